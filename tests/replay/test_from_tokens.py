"""``pagedkv trace from-tokens``: a trace from a log, or a line that says what is wrong."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cli import main
from pagedkv.lab.replay import load_trace
from pagedkv.lab.traces import token_log
from pagedkv.lab.traces.from_tokens import convert

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines, given as objects or as text, to a log."""

    def write(*lines: Any) -> Path:
        path = tmp_path / "log.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def failing(capsys: Capture, log: Path, *options: str) -> str:
    """Convert what cannot be converted; the one line on stderr."""
    out = log.with_name("out.jsonl")
    before = set(log.parent.iterdir())
    code = main(["trace", "from-tokens", str(log), "-o", str(out), *options])
    told = capsys.readouterr()
    assert (code, told.out, told.err.count("\n")) == (2, "", 1)
    assert set(log.parent.iterdir()) == before, "something was left behind"
    return told.err


def test_a_log_becomes_a_trace_that_replays(write_log: Callable[..., Path], capsys: Capture) -> None:
    log = write_log(
        {"tokens": [1, 2, 3, 4, 5], "timestamp": 7.9, "output_tokens": [8, 8, 8], "session": "a", "other": "<b>"},
        {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8], "timestamp": 9, "output_length": 2, "session": "b"},
        {"input_ids": [9, 2], "timestamp": 8, "completion_tokens": 4, "output_token_ids": [1, 1, 1, 1], "session": "a"},
        {"tokens": [1, 2, 3, 4], "timestamp": 10, "namespace": "x", "session": "a", "prompt_tokens": 4},
    )
    out = log.with_name("trace.jsonl")
    assert main(["trace", "from-tokens", str(log), "--block-size", "4", "-o", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 4 requests, 4 block accesses, 3 unique blocks of 4 tokens",
        "1 prompts are shorter than a block, and have none",
        "1 time stamps lay before an earlier one, and count as that one",
        f"next: pagedkv replay {out}",
    ]
    assert rows(out) == [
        {"timestamp": t, "input_length": n, "output_length": o, "block_size": 4, "session": s, "hash_ids": ids}
        for t, n, o, s, ids in ((7, 5, 3, 0, [0]), (9, 8, 2, 1, [0, 1]), (9, 2, 4, 0, []), (10, 4, 0, 2, [2]))
    ]
    assert load_trace(out).sessions.tolist() == [0, 1, 0, 2]
    assert main(["replay", str(out), "--device-memory", "2 blocks", "--table-only"]) == 0


def test_a_recording_and_a_log_of_the_same_requests_are_the_same_trace(
    write_log: Callable[..., Path], tmp_path: Path
) -> None:
    random, spec = Random(3), pk.KVSpec(1, 1, 2, "float32", 4, model="toy")
    prompts = [[random.randrange(2) for _ in range(random.randrange(1, 40))] for _ in range(60)]
    names = [random.choice(("a", "b")) for _ in prompts]
    live, log = tmp_path / "live.jsonl", write_log(
        *({"tokens": tokens, "namespace": name} for tokens, name in zip(prompts, names, strict=True))
    )
    with pk.KVCache(spec, pk.Blocks(64)) as cache, pk.TraceRecorder(cache, live):
        for tokens, name in zip(prompts, names, strict=True):
            with cache.sequence(tokens, pk.Namespace(tenant=name)) as seq:
                rest = np.zeros((1, len(seq) - seq.num_computed, 1, 2), np.float32)
                seq.scatter(rest, rest)
    done = convert(log, tmp_path / "trace.jsonl", block_size=4, every_ms=0)
    one, other = load_trace(live), load_trace(tmp_path / "trace.jsonl")
    assert done.unique_blocks == one.num_unique == other.num_unique
    assert one.paths.tolist() == other.paths.tolist()
    assert one.input_tokens.tolist() == other.input_tokens.tolist()


def test_a_log_without_times_gets_one_request_after_the_other(write_log: Callable[..., Path], capsys: Capture) -> None:
    log = write_log(*({"tokens": list(range(16))} for _ in range(3)))
    out = log.with_name("trace.jsonl")
    assert main(["trace", "from-tokens", str(log), "-o", str(out), "--every", "20"]) == 0
    assert "no time stamps in the log: a request every 20 ms (--every)" in capsys.readouterr().out
    assert [row["timestamp"] for row in rows(out)] == [0, 20, 40]


def test_the_same_log_gives_the_same_file_also_where_it_is_compressed(write_log: Callable[..., Path]) -> None:
    log = write_log(*({"tokens": [7_654_321] * n} for n in range(16, 80)))
    packed = log.with_name("log.jsonl.gz")
    packed.write_bytes(gzip.compress(log.read_bytes()))
    outs = [log.with_name(f"{i}.jsonl") for i in range(3)]
    for source, out in zip((log, log, packed), outs, strict=True):
        convert(source, out)
    assert outs[0].read_bytes() == outs[1].read_bytes() == outs[2].read_bytes()
    assert "7654321" not in outs[0].read_text()
    assert outs[0].stat().st_mode & 0o077 == 0


GOOD = {"tokens": list(range(16))}
BAD_LINES: list[tuple[Any, str]] = [
    ("{", "line 2: not JSON, or cut short (at character 1)"),
    ("<script>alert(1)</script>", "line 2: not JSON, or cut short (at character 0)"),
    ("[1, 2, 3]", "line 2: must be a JSON object, one for each request"),
    ("[" * 100_000, "line 2: nested too deeply"),
    ('{"tokens": [NaN]}', "line 2: not JSON, or cut short (NaN is not a number)"),
    ('{"tokens": [' + "9" * 5000 + "]}", "line 2: not JSON, or cut short (Exceeds the limit"),
    ({}, "line 2, field tokens: is missing; also read: prompt_token_ids, input_ids"),
    ({**GOOD, "input_ids": [1]}, "field input_ids: is there beside tokens: one of them is needed"),
    ({"tokens": "<b>secret</b>"}, "field tokens: must be a list of token ids, and is text: tokenise it first"),
    ({"tokens": 5}, "field tokens: must be a list of token ids, and is int"),
    ({"tokens": []}, "field tokens: is empty"),
    ({"tokens": [1, "<img onerror=x>"]}, "field tokens[1]: text is not a token id in 0..2147483647"),
    ({"tokens": [1, 2**31]}, "field tokens[1]: 2147483648 is not a token id"),
    ({"tokens": [10**40]}, "field tokens[0]: an integer beyond 10**30 is not a token id"),
    ({"tokens": [-1]}, "field tokens[0]: -1 is not a token id"),
    ({"tokens": [True]}, "field tokens[0]: True is not a token id"),
    ({"tokens": [1.0]}, "field tokens[0]: 1.0 is not a token id"),
    ({"tokens": [[1]]}, "field tokens[0]: a list is not a token id"),
    ({**GOOD, "input_length": 17}, "field input_length: says 17, and there are 16 tokens in the prompt"),
    ({**GOOD, "prompt_tokens": 10**40}, "field prompt_tokens: says an integer beyond 10**30, and there are 16"),
    ({**GOOD, "num_tokens": "<i>"}, "field num_tokens: says '<i>', and there are 16"),
    ({**GOOD, "output_tokens": -1}, "field output_tokens: -1 is neither a list nor a number of tokens in 0.."),
    ({**GOOD, "output_tokens": 10**12}, "field output_tokens: 1000000000000 is neither"),
    ({**GOOD, "output_tokens": [1], "completion_tokens": 2}, "completion_tokens: says 2 tokens, and a field before it"),
    ({**GOOD, "timestamp": 1}, "field timestamp: this line has a time stamp, and the lines before have none"),
    ({**GOOD, "timestamp": "now"}, "field timestamp: 'now' is not a number of milliseconds"),
    ({**GOOD, "timestamp": -5}, "field timestamp: -5 is not in 0.."),
    ('{"tokens": [1], "timestamp": 1e999}', "field timestamp: inf is not in 0.."),
    ({**GOOD, "namespace": ["a"]}, "field namespace: a list is neither text nor a whole number"),
    ({**GOOD, "session": 1.5}, "field session: 1.5 is neither text nor a whole number"),
    ({**GOOD, "session": "x" * 70_000}, "field session: has 70000 characters; at most 65536"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_of_a_log_is_named_with_its_field_and_leaves_no_trace(
    line: Any, message: str, write_log: Callable[..., Path], capsys: Capture
) -> None:
    told = failing(capsys, write_log(GOOD, line, GOOD))
    assert message in told
    assert "log.jsonl: line 2" in told
    assert "secret" not in told
    assert len(told) < 400


def test_ten_megabytes_that_are_no_json_are_one_short_line(write_log: Callable[..., Path], capsys: Capture) -> None:
    told = failing(capsys, write_log('{"tokens": [' + "1," * 5_000_000))
    assert "line 1: not JSON, or cut short (at character 10000012)" in told
    assert len(told) < 300


def test_a_line_without_end_is_refused_before_it_takes_memory(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "log.jsonl.gz"
    with gzip.open(log, "wb", compresslevel=1) as file:
        file.write(b'{"tokens": [1]}\n[')
        for _ in range(3 * token_log.MAX_LINE_BYTES >> 20):
            file.write(bytes(b"0," * (1 << 19)))
    assert "line 2: is longer than 16777216 bytes" in failing(capsys, log)


def test_a_log_that_is_none_is_named(write_log: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
    assert "absent.jsonl: there is no such file" in failing(capsys, tmp_path / "absent.jsonl")
    assert "there are no requests in it" in failing(capsys, write_log("", " "))
    assert "the file is empty" in failing(capsys, write_log())
    assert "more than 1048576 bytes of empty lines" in failing(capsys, write_log("\n" * 1_100_000))
    assert "no prompt has a whole block of 16 tokens" in failing(capsys, write_log({"tokens": [1]}))
    assert "block size must be in 1..1048576, got 0" in failing(capsys, write_log(GOOD), "--block-size", "0")
    assert "milliseconds between requests must be in 0.." in failing(capsys, write_log(GOOD), "--every", "-1")


def test_a_trace_is_not_written_over_its_log_nor_into_a_folder(
    write_log: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    log = write_log(GOOD)
    content = log.read_bytes()
    for out, message in ((log, "is the log itself"), (tmp_path, "is a folder"), (tmp_path / "no" / "x", "no folder")):
        assert main(["trace", "from-tokens", str(log), "-o", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert log.read_bytes() == content
    with pytest.raises(SystemExit):
        main(["trace", "from-tokens", str(log)])
    assert "-o" in capsys.readouterr().err


def test_a_trace_that_is_there_stays_where_the_next_one_fails(write_log: Callable[..., Path], capsys: Capture) -> None:
    log = write_log(GOOD)
    out = log.with_name("out.jsonl")
    convert(log, out)
    before = out.read_bytes()
    assert "line 2" in failing(capsys, write_log(GOOD, "{"))
    assert out.read_bytes() == before

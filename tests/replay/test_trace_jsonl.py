"""The .jsonl reader: plain and compressed alike.

For every damage, the error names line and field.
"""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.errors import InvalidArgument, TraceFormatError
from pagedkv.lab.replay import load_trace
from pagedkv.lab.replay.trace_jsonl import MAX_EMPTY_BYTES

PATHS = [[40, 41, 42], [40, 41, 7], [40, 41, 42]]
GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [3, 4]}'


def test_ids_are_renumbered_by_first_appearance(write_jsonl: Callable[..., Path]) -> None:
    trace = load_trace(write_jsonl(PATHS))
    assert [trace.path(i).tolist() for i in range(3)] == [[0, 1, 2], [0, 1, 3], [0, 1, 2]]
    assert trace.parents.tolist() == [-1, 0, 1, 1]
    assert trace.seen_before().tolist() == [0, 2, 3]
    assert trace.block_size == 512


def test_the_last_block_may_be_partial_and_blank_lines_do_not_count(write_jsonl: Callable[..., Path]) -> None:
    trace = load_trace(write_jsonl(lines=["", GOOD, "", GOOD, ""]))
    assert trace.input_tokens.tolist() == [600, 600]


def test_the_digest_is_that_of_the_file(write_jsonl: Callable[..., Path]) -> None:
    import hashlib

    path = write_jsonl(PATHS)
    assert load_trace(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_another_block_size_can_be_named(write_jsonl: Callable[..., Path]) -> None:
    line = '{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [3, 4, 5]}'
    assert load_trace(write_jsonl(lines=[line]), block_size=16).num_unique == 3
    with pytest.raises(InvalidArgument, match="block size 0"):
        load_trace(write_jsonl(lines=[line]), block_size=0)


def test_a_line_may_name_its_session(write_jsonl: Callable[..., Path]) -> None:
    lines = [GOOD, with_field(session=5), with_field(session=None), with_field(session=0)]
    assert load_trace(write_jsonl(lines=lines)).sessions.tolist() == [-1, 5, -1, 0]


def with_field(**changes: object) -> str:
    return json.dumps(json.loads(GOOD) | changes)


BAD: list[tuple[str, str]] = [
    (GOOD[:-20], r"line 2: not JSON, or cut short"),
    ("[1, 2]", r"line 2: must be a JSON object"),
    ("\x00\x01", r"line 2: not JSON"),
    ("[" * 100_000, r"line 2: nested too deeply"),
    (with_field(timestamp=-1), r"line 2, field timestamp: -1 is not in"),
    (with_field(timestamp="now"), r"line 2, field timestamp: 'now' is not an integer"),
    (GOOD.replace('"timestamp": 0', '"timestamp": NaN'), r"line 2: .*NaN"),
    (GOOD.replace('"timestamp": 0', '"timestamp": 1e999'), r"line 2, field timestamp: inf"),
    (GOOD.replace('"timestamp": 0', '"timestamp": ' + "9" * 5000), r"line 2"),
    (with_field(timestamp=10**40), r"line 2, field timestamp: an integer beyond"),
    (with_field(timestamp=None), r"line 2, field timestamp: is missing"),
    (with_field(input_length=-600), r"line 2, field input_length: -600"),
    (with_field(input_length=10**15), r"line 2, field input_length: 10+ is not in"),
    (with_field(input_length=600.0), r"line 2, field input_length: 600.0 is not an integer"),
    (with_field(input_length=True), r"line 2, field input_length: True is not an integer"),
    (with_field(output_length=-1), r"line 2, field output_length: -1"),
    (with_field(session=-1), r"line 2, field session: -1 is not in"),
    (with_field(session="a"), r"line 2, field session: 'a' is not an integer"),
    (with_field(hash_ids=None), r"line 2, field hash_ids: is missing"),
    (with_field(hash_ids={"a": 1}), r"line 2, field hash_ids: must be a list"),
    (with_field(hash_ids=[]), r"line 2, field hash_ids: has 0 ids; input_length 600 is 2 blocks"),
    (with_field(hash_ids=[3, 4, 5]), r"line 2, field hash_ids: has 3 ids"),
    (with_field(hash_ids=[3, -4]), r"line 2, field hash_ids\[1\]: -4 is not"),
    (with_field(hash_ids=[3, "4"]), r"line 2, field hash_ids\[1\]: '4' is not"),
    (with_field(hash_ids=[3, 2**64]), r"line 2, field hash_ids\[1\]"),
    (with_field(hash_ids=[5, 4]), r"line 2, field hash_ids\[1\]: id 4 .*another parent"),
    (with_field(hash_ids=[4, 3]), r"line 2, field hash_ids\[0\]: id 4 is at depth 0 here and was at depth 1"),
    (with_field(hash_ids=[3, 3]), r"line 2, field hash_ids\[1\]: id 3 is at depth 1"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_an_error_that_names_line_and_field(
    line: str, message: str, write_jsonl: Callable[..., Path]
) -> None:
    with pytest.raises(TraceFormatError, match=message):
        load_trace(write_jsonl(lines=[GOOD, line]))


def test_an_empty_file_and_one_without_requests_are_errors(write_jsonl: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(TraceFormatError, match="empty"):
        load_trace(tmp_path / "empty.jsonl")
    with pytest.raises(TraceFormatError, match="no requests"):
        load_trace(write_jsonl(lines=["", ""]))


def test_gzip_is_read_and_its_truncation_noticed(write_jsonl: Callable[..., Path]) -> None:
    plain = write_jsonl(PATHS * 200)
    packed = plain.with_name("trace.jsonl.gz")
    whole = gzip.compress(plain.read_bytes())
    packed.write_bytes(whole)
    assert load_trace(packed).paths.tolist() == load_trace(plain).paths.tolist()
    packed.write_bytes(whole + whole)  # two members: one file after the other
    assert load_trace(packed).num_requests == 1200
    for cut in (3, len(whole) // 2, len(whole) - 1):
        packed.write_bytes(whole[:cut])
        with pytest.raises(TraceFormatError, match=r"truncated|cut short|damaged"):
            load_trace(packed)
    packed.write_bytes(plain.read_bytes())
    with pytest.raises(TraceFormatError, match=r"not a \.gz file"):
        load_trace(packed)


def test_zstandard_is_read_and_its_truncation_noticed(write_jsonl: Callable[..., Path]) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = write_jsonl(PATHS * 200)
    packed = plain.with_name("trace.jsonl.zst")
    whole = zstandard.ZstdCompressor().compress(plain.read_bytes())
    packed.write_bytes(whole)
    assert load_trace(packed).paths.tolist() == load_trace(plain).paths.tolist()
    packed.write_bytes(whole + whole)
    assert load_trace(packed).num_requests == 1200
    for cut in (5, len(whole) // 2, len(whole) - 1):
        packed.write_bytes(whole[:cut])
        with pytest.raises(TraceFormatError, match=r"truncated|damaged"):
            load_trace(packed)


def test_without_a_zstandard_module_the_error_names_the_extra(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> object:
        if name in ("zstandard", "compression.zstd"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"pagedkv's extra \[bench\]"):
        load_trace(data / "chat.jsonl.zst")


@pytest.mark.parametrize("empty", [b"\n", b"  \t\r\n", b" " * 5000 + b"\n"])
def test_empty_lines_without_end_are_refused_after_a_mebibyte(tmp_path: Path, empty: bytes) -> None:
    """1 MB of gzip can hold 1 GiB of them."""
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD.encode() + b"\n" + empty * (3 * MAX_EMPTY_BYTES // len(empty)), 1))
    last = 2 + (MAX_EMPTY_BYTES + len(GOOD) + 1) // len(empty)
    with pytest.raises(TraceFormatError, match=rf"line {last}: .*empty lines"):
        load_trace(path)


def test_a_mebibyte_of_empty_lines_and_one_after_each_request_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n" * MAX_EMPTY_BYTES + (GOOD.encode() + b"\n\n\n\n") * 1000)
    assert load_trace(path).num_requests == 1000


SIZED = '{"timestamp": 0, "input_length": 40, "output_length": 1, "block_size": %s, "hash_ids": [1, 2]}'


def test_lines_may_say_the_size_of_their_blocks_which_must_be_one(write_jsonl: Callable[..., Path]) -> None:
    assert load_trace(write_jsonl(lines=[SIZED % 16, SIZED % 16])).block_size == 16
    for lines, message in (
        ([SIZED % 16, SIZED % 17], "line 2, field block_size: is 17, and 16 in the lines before"),
        ([SIZED % 0], "line 1, field block_size: 0 is not in 1..1048576"),
        ([SIZED % 10**30], "line 1, field block_size: an integer beyond 10.*30 is not in 0..1048576"),
        ([SIZED % '"<b>16</b>"'], "line 1, field block_size: '<b>16</b>' is not an integer"),
    ):
        with pytest.raises(TraceFormatError, match=message):
            load_trace(write_jsonl(lines=lines))
    with pytest.raises(TraceFormatError, match="is 16, asked was 64: leave --block-size out"):
        load_trace(write_jsonl(lines=[SIZED % 16]), block_size=64)


def test_where_another_block_size_would_fit_the_message_says_it(write_jsonl: Callable[..., Path]) -> None:
    line = '{"timestamp": 0, "input_length": 762, "output_length": 1, "hash_ids": %s}'
    with pytest.raises(TraceFormatError, match=r"762 is 2 blocks of 512 tokens; --block-size 64\?$"):
        load_trace(write_jsonl(lines=[line % list(range(11))]))
    with pytest.raises(TraceFormatError, match=r"762 is 2 blocks of 512 tokens$"):
        load_trace(write_jsonl(lines=[line % list(range(30))]))

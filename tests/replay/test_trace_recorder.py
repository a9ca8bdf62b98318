"""A recording replays to what the live cache hit, and recording fails no request."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.lab.replay import Capacity, Options, load_trace, replay
from pagedkv.lab.traces import recorder as recorder_module
from pagedkv.lab.traces import whole_lines
from pagedkv.scheduler import Scheduler, SchedulerOptions

BLOCK = 4
SPEC = pk.KVSpec(1, 1, 2, "float32", BLOCK, model="toy")
TIERS = ("device", "host", "disk")


@contextmanager
def opened(device: int = 64, host: int = 0, disk: str | None = None, **options: Any) -> Iterator[pk.KVCache]:
    """A cache of so many blocks; `disk` is a folder for 100 of them."""
    if host:
        options["host_memory"] = pk.Blocks(host)
    if disk is not None:
        options["disk"] = pk.Disk(disk, pk.Blocks(100), admission="all")
    with pk.KVCache(SPEC, pk.Blocks(device), partial_hits=False, **options) as cache:
        yield cache


def compute(seq: pk.Sequence) -> None:
    """Write zeros for all that is not computed."""
    rest = np.zeros((1, len(seq) - seq.num_computed, 1, 2), np.float32)
    seq.scatter(rest, rest)


def serve(cache: pk.KVCache, prompt: Any, output: int = 0, **options: Any) -> int:
    """One request with `output` generated tokens; its hit tokens."""
    with cache.sequence(prompt, **options) as seq:
        compute(seq)
        for token in range(output):
            seq.append(5_000_000 + token)
            compute(seq)
        return sum(seq.hit_tokens.values())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chats(seed: int, num_requests: int = 120) -> list[list[int]]:
    """Turns of chats with a few common beginnings; none ends with its last block."""
    random, open_chats, turns = Random(seed), [], []
    for _ in range(num_requests):
        chat = random.choice(open_chats) if open_chats and random.random() < 0.6 else []
        if not 0 < len(chat) < 80:
            chat = [random.randrange(3) for _ in range(random.randrange(13))]
            open_chats.append(chat)
        chat.extend(random.randrange(1_000_000) for _ in range(random.randrange(1, 20)))
        turns.append([*chat, 7] if len(chat) % BLOCK == 0 else list(chat))
    return turns


@pytest.mark.parametrize(("device", "host", "disk"), [(60, 0, 0), (30, 40, 0), (30, 40, 100)])
@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_a_recorded_cache_replays_to_the_same_hits(
    policy: str, device: int, host: int, disk: int, tmp_path: Path
) -> None:
    """The unfinished last block is in no trace, so the live cache gets one device block more."""
    path = tmp_path / "live.jsonl"
    with (
        opened(device + 1, host, str(tmp_path / "kv") if disk else None, policy=policy) as cache,
        pk.TraceRecorder(cache, path),
    ):
        hits = [serve(cache, prompt) for prompt in chats(1)]
        by_tier = cache.stats().hit_tokens
    options, size = Options(engine="real", block_bytes=4096), Capacity(device, host, disk)
    (real,) = replay(path, [policy], size, options=options)
    assert (BLOCK * real.hits_per_request).tolist() == hits
    assert {tier: BLOCK * real.hit_blocks[tier] for tier in TIERS if tier in by_tier} == {
        tier: count for tier, count in by_tier.items() if tier != "partial"
    }
    assert [line["hit_tokens"] for line in lines(path)] == hits
    (sim,) = replay(path, [policy], size)
    if policy == "lru" and not host:  # which makes no room ahead, and asks for its blocks in another order
        assert (BLOCK * sim.hits_per_request).tolist() == hits
    assert sim.hit_blocks["total"] == pytest.approx(real.hit_blocks["total"], rel=0.15)


def test_what_a_live_cache_hits_beyond_its_trace_are_blocks_of_generated_tokens(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    prompt, outputs, hits, expected = [1, 2, 3, 4, 5], [3, 9, 2, 14], [], []
    with opened(64) as cache, pk.TraceRecorder(cache, path):
        before = 0  # whole blocks of the last turn, with its answer
        for output in outputs:
            hits.append(serve(cache, prompt, output))
            expected.append(BLOCK * before)
            before = (len(prompt) + output) // BLOCK
            prompt = [*prompt, *(5_000_000 + token for token in range(output)), 9, 9]
    assert hits == expected
    (sim,) = replay(path, ["lru"], "64 blocks")
    inputs = [line["input_length"] for line in lines(path)]
    assert sim.hits_per_request.tolist() == [0, *(tokens // BLOCK for tokens in inputs[:-1])]
    assert [line["output_length"] for line in lines(path)] == outputs


def test_the_file_says_its_block_size_and_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with opened() as cache, pk.TraceRecorder(cache, path):
        serve(cache, range(10))
    assert load_trace(path).block_size == load_trace(path, block_size=BLOCK).block_size == BLOCK
    with pytest.raises(pk.TraceFormatError, match="line 1, field block_size: is 4, asked was 512"):
        load_trace(path, block_size=512)


def test_namespaces_share_no_number_and_neither_do_their_sessions(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with opened() as cache, pk.TraceRecorder(cache, path):
        for tenant in ("a", "b", None):
            for session in ("x", "y", 7, None):
                namespace = None if tenant is None else pk.Namespace(tenant=tenant)
                serve(cache, range(17), namespace=namespace, session=session)
    rows = lines(path)
    ids = [tuple(row["hash_ids"]) for row in rows]
    assert [len(set(ids[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len({number for path in ids for number in path}) == 3 * 4
    assert len({row["session"] for row in rows if "session" in row}) == 9
    assert [i for i, row in enumerate(rows) if "session" not in row] == [3, 7, 11]
    assert load_trace(path).sessions.tolist().count(-1) == 3


def test_numbers_say_nothing_of_tokens_and_differ_from_recording_to_recording(tmp_path: Path) -> None:
    key = b"0123456789abcdef"
    paths = [tmp_path / name for name in ("one", "two", "three", "four")]
    for path, options in zip(paths, ({}, {}, {"key": key}, {"key": key}), strict=True):
        with opened() as cache, pk.TraceRecorder(cache, path, **options):
            serve(cache, [111_222_333] * 20, session=444_555_666)
        assert "111222333" not in path.read_text()
        assert "444555666" not in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ids = [lines(path)[0]["hash_ids"] for path in paths]
    assert len(set(map(tuple, ids[:3]))) == 3
    assert ids[2] == ids[3]
    assert len(set(ids[0])) == 5, "equal blocks after different prefixes have different numbers"


def test_lines_are_in_order_of_arrival_whatever_ends_first(tmp_path: Path) -> None:
    path, now = tmp_path / "live.jsonl", [5.0]
    with opened() as cache:
        recorder = pk.TraceRecorder(cache, path, clock=lambda: now[0])
        first = cache.sequence(range(9))
        for i in range(3):
            now[0] += 0.5
            serve(cache, range(100 * (i + 1), 100 * (i + 1) + 5), output=i)
        last = cache.sequence(range(900, 904))
        now[0] = 1.0  # a clock that goes back
        serve(cache, range(800, 805))
        last.append([1, 2, 3])
        compute(first)
        first.append(1)
        first.release()
        recorder.close()
        last.release()
        serve(cache, range(7))
    rows = lines(path)
    assert [row["timestamp"] for row in rows] == [0, 500, 1000, 1500, 1500, 1500]
    assert [row["output_length"] for row in rows] == [1, 0, 1, 2, 3, 0]
    assert recorder.stats().cut == 1
    assert recorder.stats().requests == len(rows)
    assert recorder.stats().bytes == path.stat().st_size


def test_a_sequence_that_was_only_tried_is_no_request_and_forks_are_none(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with opened() as cache, pk.TraceRecorder(cache, path):
        cache.sequence(range(9), on_trial=True).release()
        kept = cache.sequence(range(20, 26), on_trial=True)
        cache.count(kept)
        compute(kept)
        (fork,) = kept.fork()
        kept.append(1)
        fork.release()
        kept.release()
    assert [(row["input_length"], row["output_length"]) for row in lines(path)] == [(6, 1)]


def test_a_schedulers_requests_are_recorded_as_they_are_admitted(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with opened(12) as cache, pk.TraceRecorder(cache, path) as recorder:
        scheduler = Scheduler(cache, SchedulerOptions(max_running=4, max_batch_tokens=32))
        for i in range(6):
            scheduler.submit(range(100 * i, 100 * i + 9), 12, session=i % 2)
        while scheduler.has_work:
            plan = scheduler.schedule()
            with scheduler.step(plan) as step:
                zeros = np.zeros((len(step.tokens), 1, 2), np.float32)
                step.write(0, zeros, zeros)
            scheduler.report(plan, np.ones(len(plan.lanes), int))
        counted = cache.stats()
    rows = lines(path)
    assert recorder.stats().dropped == 0
    assert sum(row["input_length"] for row in rows) == counted.prompt_tokens
    assert sum(row["hit_tokens"] for row in rows) == sum(counted.hit_tokens.values())
    assert len(rows) > 6, "some were suspended, and have a line for each time that they were taken up"
    assert len({row["session"] for row in rows}) == 2
    assert load_trace(path).num_requests == len(rows)


def test_a_sequence_that_is_dropped_without_a_release_is_written_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with opened() as cache, pk.TraceRecorder(cache, path) as recorder:
        compute(cache.sequence(range(9)))
        gc.collect()
    assert [row["output_length"] for row in lines(path)] == [0]
    assert recorder.stats().cut == 1


def test_threads_record_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"

    def many(number: int) -> None:
        for i in range(50):
            serve(cache, range(1000 * number + i, 1000 * number + i + 30), session=number)

    with opened(256) as cache, pk.TraceRecorder(cache, path) as recorder:
        threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = lines(path)
    assert len(rows) == recorder.stats().requests == 200
    assert [row["timestamp"] for row in rows] == sorted(row["timestamp"] for row in rows)
    assert len({row["session"] for row in rows}) == 4
    assert load_trace(path).num_accesses == 200 * 7


def test_a_full_disk_costs_lines_and_no_request_and_leaves_the_file_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, real, calls = tmp_path / "live.jsonl", os.pwrite, []

    def full_for_a_while(file: int, data: Any, at: int) -> int:
        calls.append(at)
        if len(calls) in (3, 5):
            return real(file, bytes(data)[:7], at)  # a part of the line still fits
        if len(calls) in (4, 6):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, at)

    monkeypatch.setattr(whole_lines.os, "pwrite", full_for_a_while)
    with caplog.at_level(logging.WARNING, "pagedkv.traces"), opened() as cache, pk.TraceRecorder(cache, path) as rec:
        for i in range(8):
            serve(cache, range(100 * i, 100 * i + 9))
    assert rec.stats().failed_writes == 2
    assert [record.message.partition(": ")[2] for record in caplog.records] == ["[Errno 28] No space left on device"]
    assert load_trace(path).num_requests == rec.stats().requests == 6


@pytest.mark.parametrize("problem", [RuntimeError("broken clock"), MemoryError()])
def test_an_error_in_the_recorder_is_counted_and_the_request_goes_on(
    problem: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    readings = [0.0]

    def clock() -> float:
        if readings:
            return readings.pop()
        raise problem

    with caplog.at_level(logging.WARNING, "pagedkv"), opened() as cache:
        with pk.TraceRecorder(cache, tmp_path / "live.jsonl", clock=clock) as recorder:
            assert [serve(cache, range(9)) for _ in range(3)] == [0, 8, 8]
        assert cache.stats().hook_failures == 0
    assert recorder.stats().dropped == 3
    assert len(caplog.records) == 1


def test_requests_that_come_too_fast_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "live.jsonl"
    monkeypatch.setattr(recorder_module, "MAX_QUEUED_TOKENS", 20)
    with opened() as cache, pk.TraceRecorder(cache, path) as recorder:
        serve(cache, range(21))
        serve(cache, range(19))
    assert [row["input_length"] for row in lines(path)] == [19]
    assert recorder.stats().dropped == 1


def test_requests_wake_no_writer_that_gathers_and_closing_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "GATHER_S", 600.0)
    with opened() as cache:
        recorder = pk.TraceRecorder(cache, tmp_path / "live.jsonl")
        gathering, pause = threading.Event(), recorder._writer._closing.wait
        monkeypatch.setattr(recorder._writer._closing, "wait", lambda seconds: (gathering.set(), pause(seconds)))
        first = cache.sequence(range(9))
        assert gathering.wait(60)
        compute(first)
        first.release()
        for i in range(3):
            serve(cache, range(100 * i, 100 * i + 5))
        assert recorder._queued.qsize() == 7
        recorder.close()
    assert recorder.stats().requests == 4


def test_the_file_grows_no_further_than_was_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "live.jsonl"
    with opened() as cache, pk.TraceRecorder(cache, path, max_bytes="1kB") as recorder:
        for i in range(50):
            serve(cache, range(100 * i, 100 * i + 9))
    assert path.stat().st_size <= 1000
    assert recorder.stats().requests + recorder.stats().over_limit == 50
    assert len(caplog.records) == 1
    assert load_trace(path).num_requests == recorder.stats().requests


def test_what_a_program_forgets_to_close_is_whole_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    program = f"""
import numpy as np, pagedkv as pk
cache = pk.KVCache(pk.KVSpec(1, 1, 2, "float32", 4, model="toy"), pk.Blocks(64))
recorder = pk.TraceRecorder(cache, {str(path)!r})
with cache.sequence(range(9)) as seq:
    seq.scatter(*2 * [np.zeros((1, 9, 1, 2), "f")])
running = cache.sequence(range(20, 29))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["input_length"] for row in lines(path)] == [9, 9]


def test_closing_twice_is_fine_and_a_closed_recorder_is_no_hook(tmp_path: Path) -> None:
    with opened() as cache:
        recorder = pk.TraceRecorder(cache, tmp_path / "live.jsonl")
        assert cache.hooks
        recorder.close()
        recorder.close()
        assert not cache.hooks


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


REFUSED: list[tuple[Callable[[Path], Any], dict[str, Any], type[Exception], str]] = [
    (lambda folder: folder / "no" / "file", {}, pk.InvalidArgument, "cannot write a trace to .*: No such file"),
    (lambda folder: folder, {}, pk.InvalidArgument, "cannot write a trace to .*: Is a directory"),
    (fifo, {}, pk.InvalidArgument, "cannot write a trace to .*: No such device|no regular file"),
    (lambda folder: "a\0b", {}, pk.InvalidArgument, "path must not be empty or hold a NUL"),
    (lambda folder: 5, {}, pk.WrongType, "path must be a path, not int"),
    (lambda folder: folder / "f", {"key": "text"}, pk.WrongType, "key must be bytes"),
    (lambda folder: folder / "f", {"key": b"short"}, pk.InvalidArgument, "key must have 16..64 bytes, got 5"),
    (lambda folder: folder / "f", {"clock": 3}, pk.WrongType, "clock must be callable"),
    (lambda folder: folder / "f", {"max_bytes": 0}, pk.InvalidArgument, "max_bytes must be in 1"),
    (lambda folder: folder / "f", {"max_bytes": "much"}, pk.InvalidArgument, "'much' is not a size"),
]


@pytest.mark.parametrize(("path", "options", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_recorder_that_could_not_write_is_not_made(
    path: Callable[[Path], Any], options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with opened() as cache:
        with pytest.raises(error, match=message):
            pk.TraceRecorder(cache, path(tmp_path), **options)
        assert not cache.hooks


def test_a_scheduler_is_no_cache(tmp_path: Path) -> None:
    with opened() as cache, pytest.raises(pk.WrongType, match="not a Scheduler: give it the scheduler's cache"):
        pk.TraceRecorder(Scheduler(cache), tmp_path / "live.jsonl")  # type: ignore[arg-type]

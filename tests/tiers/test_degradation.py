"""A disk tier that fails: misses, then no writes, then nothing; and back again.

Each state has a line in the log.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import StoreDamaged, TierError
from pagedkv.tiers.disk import directory
from pagedkv.tiers.disk.circuit_breaker import FIRST_REST_S, LONGEST_REST_S, PATIENCE, CircuitBreaker
from pagedkv.tiers.disk.file_system import file_system_of, is_network
from pagedkv.tiers.disk.segments import Segments

from .conftest import BLOCK_BYTES, FINGERPRINT, NUM_BLOCKS, name_of


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker("here", clock=clock)


def fail_writes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(
        Segments, "write_headers", lambda self, slots, headers: np.full(slots.size, -number, np.int64)
    )  # fmt: skip


def fail_reads(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def failing(self: Segments, slots: Any, headers: Any, rows: Any, indices: Any, seeds: Any) -> Any:
        return np.full(slots.size, -number, np.int64), np.zeros((slots.size, self.geometry.shards), np.uint64)

    monkeypatch.setattr(Segments, "read", failing)


def test_single_failures_change_nothing(breaker):
    for _ in range(3 * PATIENCE):
        breaker.wrote(0, [errno.EIO])
        breaker.read(0, [errno.EIO])
        breaker.wrote(1, [])
        breaker.read(1, [])
    assert breaker.state == "ok"
    assert breaker.may_write()
    assert breaker.may_read()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
def test_where_waiting_does_not_help_the_first_failed_write_is_enough(breaker, number):
    breaker.wrote(0, [number])
    assert breaker.state == "read_only"
    assert not breaker.may_write()
    assert breaker.may_read()


def test_failures_in_a_row_shut_writes_and_then_reads(breaker):
    breaker.wrote(0, [errno.EIO] * (PATIENCE - 1))
    assert breaker.state == "ok"
    breaker.wrote(0, [errno.EIO])
    assert breaker.state == "read_only"
    breaker.read(0, [errno.EIO] * PATIENCE)
    assert breaker.state == "off"
    assert not breaker.may_write()
    assert not breaker.may_read()


def test_after_a_rest_one_call_is_let_through_and_a_success_opens_again(breaker, clock):
    breaker.wrote(0, [errno.ENOSPC])
    clock.now += FIRST_REST_S - 1
    assert not breaker.may_write()
    clock.now += 1
    assert [breaker.may_write() for _ in range(3)] == [True, False, False]
    breaker.wrote(0, [errno.ENOSPC])
    clock.now += FIRST_REST_S
    assert not breaker.may_write()
    clock.now += FIRST_REST_S
    assert breaker.may_write()
    breaker.wrote(1, [])
    assert breaker.state == "ok"
    assert breaker.may_write()
    assert breaker.may_write()


def test_rests_grow_to_a_limit(breaker, clock):
    rests = []
    for _ in range(12):
        breaker.read(0, [errno.EIO] * PATIENCE)
        before = clock.now
        while not breaker.may_read():
            clock.now += 1.0
        rests.append(clock.now - before)
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST_S


def test_a_tier_that_is_off_comes_back_by_a_write_too(breaker, clock):
    """Who was told that everything is a miss will not ask again before something was written."""
    breaker.read(0, [errno.EIO] * PATIENCE)
    clock.now += FIRST_REST_S
    assert breaker.may_write()
    breaker.wrote(1, [])
    assert breaker.state == "ok"


def test_each_change_of_state_is_one_line(breaker, clock, caplog):
    for _ in range(50):
        breaker.wrote(0, [errno.ENOSPC])
    breaker.read(0, [errno.EIO] * 50)
    breaker.read(1, [])
    breaker.wrote(1, [])
    text = [record.getMessage() for record in caplog.records]
    assert [line.split(" is ")[-1] for line in text[:2]] == [
        "read-only now: No space left on device",
        "off now: Input/output error",
    ]
    assert "works again" in text[-1]
    assert len(text) <= 4


def test_a_full_disk_makes_the_tier_read_only_until_it_works_again(open_tier, arena, clock, monkeypatch, caplog):
    tier = open_tier(clock=clock)
    tier.write([0, 1], [name_of(0), name_of(1)], arena, [0, 1])
    fail_writes(monkeypatch, errno.ENOSPC)
    assert not tier.write([2], [name_of(2)], arena, [2]).any()
    assert tier.state == "read_only"
    assert not tier.write([3, 4], [name_of(3), name_of(4)], arena, [3, 4]).any()
    assert not tier.write([1], [name_of(5)], arena, [5]).any()
    stats = tier.stats()
    assert (stats.state, stats.writes_refused, stats.write_errors) == ("read_only", 3, {"ENOSPC": 1})
    out = np.zeros_like(arena)
    names = [name_of(0), name_of(1)]
    assert tier.read([0, 1], names, out, [0, 1]).tolist() == [True, False], "slot 1 was given to another block"
    monkeypatch.undo()
    clock.now += FIRST_REST_S
    assert tier.write([2], [name_of(2)], arena, [2]).all()
    assert tier.state == "ok"
    assert len([line for line in caplog.messages if "read-only now" in line]) == 1


def test_a_dead_disk_is_off_and_costs_no_more_calls(open_tier, arena, clock, monkeypatch):
    tier = open_tier(clock=clock)
    every, names = np.arange(NUM_BLOCKS), [name_of(n) for n in range(NUM_BLOCKS)]
    tier.write(every, names, arena, every)
    fail_reads(monkeypatch, errno.EIO)
    out = np.zeros_like(arena)
    assert not tier.read(every, names, out, every).any()
    assert tier.state == "off"
    assert not tier.read(every, names, out, every).any()
    assert tier.stats().misses["off"] == NUM_BLOCKS
    monkeypatch.undo()
    assert not tier.read(every, names, out, every).any()
    clock.now += FIRST_REST_S
    assert tier.read(every, names, out, every).all()
    assert (tier.state, (out == arena).all()) == ("ok", True)


def test_a_sync_that_fails_counts_against_writes(open_tier, arena, monkeypatch):
    tier = open_tier()

    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", refuse)
    assert not tier.flush()
    assert tier.state == "read_only"


def test_a_read_only_mount_is_served_and_never_written(open_tier, arena, monkeypatch, tmp_path):
    tier = open_tier()
    tier.write([4], [name_of(4)], arena, [4])
    tier.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "kv").iterdir()}
    real = os.open

    def without_writing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", without_writing)
    tier = open_tier()
    assert tier.state == "read_only"
    out = np.zeros_like(arena)
    assert tier.read([4], [name_of(4)], out, [0]).all()
    assert (out[0] == arena[4]).all()
    assert not tier.write([5], [name_of(5)], arena, [5]).any()
    assert not tier.flush()
    with pytest.raises(TierError, match="may come back after a restart"):
        tier.purge(name_of(4).namespace)
    assert not tier.read([4], [name_of(4)], out, [0]).any()
    with pytest.raises(TierError, match="in use"):
        open_tier()
    tier.close()
    monkeypatch.undo()
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "kv").iterdir()}


def test_a_limit_of_file_sizes_is_no_signal(tmp_path):
    """SIGXFSZ ends a process that does not ignore it, as Python does and its host may not."""
    script = f"""
        import resource, signal, numpy as np
        from pagedkv.tiers import DiskTier, Record
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        where = {str(tmp_path / "kv")!r}
        name = Record(bytes(32), bytes(32), bytes(32), np.zeros(1, np.int32))
        data = np.ones((1, 65536), np.uint8)
        with DiskTier(where, 8, 65536, fingerprint=bytes(32), block_tokens=1) as tier:
            assert tier.write([0], [name], data, [0]).all()
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            assert not tier.write([7], [name], data, [0]).any()
            assert tier.state == "read_only" and tier.stats().write_errors == {{"EFBIG": 1}}
            assert tier.read([0], [name], data, [0]).all()
        with DiskTier(where, 8, 65536, fingerprint=bytes(32), block_tokens=1) as tier:
            assert tier.state == "read_only"
            assert tier.read([0], [name], data, [0]).all()
        print("alive")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_file_system_is_refused_unless_it_is_asked_for(open_tier, monkeypatch, tmp_path, kind):
    monkeypatch.setattr(directory, "file_system_of", lambda fd: kind)
    with pytest.raises(TierError, match=rf"network file system \({kind}\)"):
        open_tier()
    assert not (tmp_path / "kv").exists()
    assert open_tier(network_fs=True).state == "ok"


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path):
    with open("/proc/self/mountinfo") as file:
        known = {line.partition(" - ")[2].split(" ")[0] for line in file}
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert file_system_of(fd) in known
    finally:
        os.close(fd)
    proc = os.open("/proc", os.O_RDONLY)
    try:
        assert file_system_of(proc) == "proc"
    finally:
        os.close(proc)
    assert not is_network("ext4")
    assert not is_network("")


@pytest.mark.parametrize("name", ["KEY", "SUPER", "data.0001"])
@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_reset_replaces_a_damaged_store_by_an_empty_one(open_tier, arena, tmp_path, name, damage, caplog):
    tier = open_tier()
    tier.write([1], [name_of(1)], arena, [1])
    secret, uuid = tier.secret, tier._store.superblock.uuid
    tier.close()
    path = tmp_path / "kv" / name
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, 10)
    else:
        path.write_bytes(bytes(path.stat().st_size + 1))
        path.chmod(0o600)
    before = {file.name: file.read_bytes() for file in (tmp_path / "kv").iterdir() if file.name != "LOCK"}
    with pytest.raises(StoreDamaged):
        open_tier()
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "kv").iterdir() if file.name != "LOCK"}
    tier = open_tier(on_mismatch="reset")
    assert list(tier.records()) == []
    assert tier.secret != secret
    assert tier._store.superblock.uuid != uuid
    assert not tier.read([1], [name_of(1)], np.zeros_like(arena), [1]).any()


@pytest.mark.parametrize(
    "changes", [{"fingerprint": FINGERPRINT[::-1]}, {"num_blocks": 5}, {"shards": 2}, {"block_tokens": 8}]
)
def test_reset_replaces_a_store_of_another_layout(open_tier, arena, changes):
    tier = open_tier()
    tier.write([1], [name_of(1)], arena, [1])
    tier.close()
    tier = open_tier(on_mismatch="reset", **changes)
    assert list(tier.records()) == []
    assert tier.stats().state == "ok"


def test_reset_does_not_take_what_belongs_to_somebody_else(open_tier, arena, tmp_path):
    tier = open_tier()
    tier.write([1], [name_of(1)], arena, [1])
    tier.close()
    (tmp_path / "kv" / "KEY").chmod(0o644)
    with pytest.raises(TierError, match="open to other users"):
        open_tier(on_mismatch="reset")
    (tmp_path / "kv" / "KEY").chmod(0o600)
    assert [found.block for found in open_tier().records()] == [1]


def test_a_tier_cannot_be_sent_to_another_process(open_tier):
    with pytest.raises(TierError, match="belongs to one process"):
        copy.copy(open_tier())


def test_a_reopened_store_is_scanned_with_progress(open_tier, arena):
    tier = open_tier()
    tier.write([0, 5], [name_of(0), name_of(5)], arena, [0, 5])
    tier.close()
    seen: list[tuple[int, int]] = []
    open_tier(on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (NUM_BLOCKS, NUM_BLOCKS)


def test_a_progress_callback_that_raises_stops_no_scan_and_is_counted(open_tier, arena, caplog):
    tier = open_tier()
    tier.write([0, 5], [name_of(0), name_of(5)], arena, [0, 5])
    tier.close()

    def fail(done: int, total: int) -> None:
        raise OSError("no terminal")

    again = open_tier(on_progress=fail)
    assert [found.block for found in again.records()] == [0, 5]
    assert again.stats().progress_failures == 1
    assert [record.name for record in caplog.records] == ["pagedkv.callbacks"]


def test_a_clock_that_fails_is_no_failure_of_the_tier(open_tier, arena, clock, monkeypatch):
    tier = open_tier(clock=clock)
    clock.now = None
    assert tier.write([0], [name_of(0)], arena, [0]).all()
    with monkeypatch.context() as failing:
        fail_writes(failing, errno.ENOSPC)
        assert not tier.write([1], [name_of(1)], arena, [1]).any()
    assert not tier.write([1], [name_of(1)], arena, [1]).any(), "time stands still, so the rest is not over"
    clock.now = FIRST_REST_S + 1
    assert tier.write([1], [name_of(1)], arena, [1]).all()


def test_a_log_handler_that_raises_does_not_stop_a_tier_that_fails(open_tier, arena, monkeypatch):
    """The tier logs its first failure while the write is under way.

    It logs its change of state where the tier's lock was held.
    """

    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log is full")

    handler = Full()
    logging.getLogger("pagedkv").addHandler(handler)
    try:
        tier = open_tier()
        fail_writes(monkeypatch, errno.ENOSPC)
        assert not tier.write([0, 5], [name_of(0), name_of(5)], arena, [0, 5]).any()
        assert tier.state == "read_only"
        assert tier.stats().write_errors == {"ENOSPC": 2}
        tier.close()
    finally:
        logging.getLogger("pagedkv").removeHandler(handler)


@pytest.mark.parametrize("page_cache", ["drop", "keep"])
def test_bytes_are_the_same_whatever_becomes_of_the_page_cache(open_tier, arena, page_cache):
    tier = open_tier(page_cache=page_cache)
    every, names = np.arange(NUM_BLOCKS), [name_of(n) for n in range(NUM_BLOCKS)]
    for _ in range(3):
        assert tier.write(every, names, arena, every).all()
        assert tier.flush()
        out = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        assert tier.read(every, names, out, every).all()
        assert (out == arena).all()


def test_a_header_that_could_not_be_read_at_opening_cannot_come_back_after_a_purge(open_tier, arena, monkeypatch):
    """The header says nothing today.

    After the purge was forgotten, it would say what no caller may hear.
    """
    tier = open_tier()
    record = name_of(3)
    tier.write([3], [record], arena, [3])
    tier.close()
    real = Segments.read_headers

    def failing(self: Segments, slots: Any) -> Any:
        headers, sums, outcomes = real(self, slots)
        outcomes[slots == 3] = -errno.EIO
        return headers, sums, outcomes

    monkeypatch.setattr(Segments, "read_headers", failing)
    tier = open_tier()
    assert list(tier.records()) == []
    tier.purge(record.namespace)
    tier.close()
    monkeypatch.undo()
    tier = open_tier()
    assert list(tier.records()) == []
    assert tier._store.superblock.purges == ()
    tier.close()
    assert list(open_tier().records()) == []


def test_burying_nothing_does_not_use_up_the_one_trial_after_a_rest(open_tier, arena, clock, monkeypatch):
    tier = open_tier(clock=clock)
    with monkeypatch.context() as full:
        fail_writes(full, errno.ENOSPC)
        assert not tier.write([2], [name_of(2)], arena, [2]).any()
    clock.now += FIRST_REST_S
    tier.invalidate([5])
    assert tier.write([3], [name_of(3)], arena, [3]).all()


def test_reset_leaves_what_others_have_put_into_the_directory(open_tier, arena, tmp_path):
    tier = open_tier()
    tier.write([1], [name_of(1)], arena, [1])
    tier.close()
    (tmp_path / "kv" / "notes").write_text("mine")
    assert list(open_tier(on_mismatch="reset", fingerprint=FINGERPRINT[::-1]).records()) == []
    assert (tmp_path / "kv" / "notes").read_text() == "mine"

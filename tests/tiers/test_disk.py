"""The disk tier as its users see it: what was stored comes back, anything else does not."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import ClosedError, InvalidArgument, LayoutMismatch, TierError, WrongType
from pagedkv.tiers import DiskTier, Record
from pagedkv.tiers.base import StoreTier
from pagedkv.tiers.disk import slots as slots_module
from pagedkv.tiers.memory import anonymous_arena

from .conftest import BLOCK_BYTES, BLOCK_TOKENS, FINGERPRINT, NUM_BLOCKS, bytes_of, name_of

ALL = np.arange(NUM_BLOCKS, dtype=np.int32)
NAMES = [name_of(number) for number in range(NUM_BLOCKS)]


def test_what_was_written_is_read_back_byte_for_byte_into_any_rows(open_tier, arena, read_path):
    tier = open_tier(read_path=read_path)
    assert isinstance(tier, StoreTier)
    assert tier.write(ALL[::-1], NAMES, arena, ALL).all()
    out = np.zeros_like(arena)
    wanted = np.array([7, 0, 11], np.int32)
    rows = np.array([2, 9, 4], np.int32)
    blocks = NUM_BLOCKS - 1 - wanted
    assert tier.read(blocks, [NAMES[i] for i in wanted], out, rows).tolist() == [True] * 3
    np.testing.assert_array_equal(out[rows], arena[wanted])
    assert not out[[0, 1, 3]].any()
    stats = tier.stats()
    assert (stats.blocks_written, stats.blocks_read, sum(stats.misses.values())) == (NUM_BLOCKS, 3, 0)


@pytest.mark.parametrize(("block_bytes", "shards"), [(1, 1), (4096, 1), (4097, 1), (8192, 32), (2 << 20, 32)])
def test_any_block_size_round_trips(open_tier, block_bytes, shards, read_path):
    tier = open_tier(block_bytes=block_bytes, shards=shards, num_blocks=3, read_path=read_path)
    data = np.stack([bytes_of(i, block_bytes) for i in range(3)])
    assert tier.write([0, 1, 2], NAMES[:3], data, [0, 1, 2]).all()
    out = np.zeros_like(data)
    assert tier.read([2, 1, 0], NAMES[2::-1], out, [2, 1, 0]).all()
    np.testing.assert_array_equal(out, data)


def test_a_header_larger_than_a_page_takes_as_many_pages_as_it_needs(open_tier):
    tokens = np.arange(3000, dtype=np.int32)
    record = Record(bytes(32), bytes(32), bytes(32), tokens)
    tier = open_tier(block_bytes=4000, shards=500, block_tokens=3000, num_blocks=2)
    data = bytes_of(0, 4000)[None]
    assert tier.write([1], [record], data, [0]).all()
    tier.close()
    again = open_tier(block_bytes=4000, shards=500, block_tokens=3000, num_blocks=2)
    (stored,) = again.records()
    assert stored.record == record
    out = np.zeros_like(data)
    assert again.read([1], [record], out, [0]).all()
    np.testing.assert_array_equal(out, data)


def test_an_empty_slot_is_a_miss(open_tier, arena):
    tier = open_tier()
    assert not tier.read([3], [NAMES[3]], arena, [3]).any()
    assert tier.stats().misses["empty"] == 1


@pytest.mark.parametrize("part", ["key", "parent", "namespace", "extra", "tokens"])
def test_a_record_that_differs_in_one_part_is_a_miss(open_tier, arena, part):
    tier = open_tier()
    tier.write([5], [NAMES[5]], arena, [5])
    parts = {name: getattr(NAMES[5], name) for name in ("key", "parent", "namespace", "tokens", "extra")}
    if part == "tokens":
        parts["tokens"] = parts["tokens"] + np.array([0, 0, 0, 1], np.int32)
    else:
        parts[part] = bytes([parts[part][0] ^ 1]) + parts[part][1:]
    assert not tier.read([5], [Record(**parts)], arena.copy(), [0]).any()
    assert tier.stats().misses["tokens" if part == "tokens" else "identity"] == 1
    assert tier.read([5], [NAMES[5]], arena.copy(), [0]).all()


def test_overwriting_a_slot_forgets_what_it_held(open_tier, arena):
    tier = open_tier()
    tier.write([5], [NAMES[5]], arena, [5])
    assert tier.write([5], [NAMES[6]], arena, [6]).all()
    out = np.zeros_like(arena)
    assert tier.read([5], [NAMES[5]], out, [0]).tolist() == [False]
    assert tier.read([5], [NAMES[6]], out, [1]).tolist() == [True]
    np.testing.assert_array_equal(out[1], arena[6])


def test_a_reopened_store_lists_its_records_and_serves_the_same_bytes(open_tier, arena, read_path):
    tier = open_tier()
    assert tier.was_clean
    tier.write(ALL[2:], NAMES[2:], arena, ALL[2:])
    tier.write([4], [NAMES[1]], arena, [1])
    tier.invalidate([7])
    secret = tier.secret
    tier.close()
    again = open_tier(read_path=read_path)
    assert again.was_clean
    assert again.secret == secret
    held = {stored.block: stored.record for stored in again.records()}
    expected = {block: NAMES[block] for block in range(2, NUM_BLOCKS) if block != 7} | {4: NAMES[1]}
    assert held == expected
    generations = [stored.generation for stored in again.records()]
    assert len(set(generations)) == len(generations)
    out = np.zeros_like(arena)
    blocks = np.array(sorted(held), np.int32)
    assert again.read(blocks, [held[b] for b in blocks], out, blocks).all()
    for block in blocks:
        np.testing.assert_array_equal(out[block], arena[1 if block == 4 else block])
    assert again.write([0], [NAMES[0]], arena, np.array([0], np.int32)).all()
    newest = {stored.block: stored.generation for stored in again.records()}
    assert newest[0] > max(generations)


def test_a_store_left_open_by_a_dead_process_is_served_again(open_tier, arena, tmp_path):
    script = f"""
        import os, numpy as np
        from pagedkv.tiers import DiskTier, Record
        tier = DiskTier({str(tmp_path / "kv")!r}, {NUM_BLOCKS}, {BLOCK_BYTES}, fingerprint={FINGERPRINT!r},
                        block_tokens={BLOCK_TOKENS}, shards=4, segment_bytes=5 * 8192)
        record = Record(b"k" * 32, b"p" * 32, b"n" * 32, np.arange({BLOCK_TOKENS}, dtype=np.int32))
        assert tier.write([3], [record], np.full((1, {BLOCK_BYTES}), 7, np.uint8), [0]).all()
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
    tier = open_tier()
    assert not tier.was_clean
    (stored,) = tier.records()
    assert tier.read([3], [stored.record], arena, np.array([0], np.int32)).all()
    assert (arena[0] == 7).all()


def test_of_slots_with_one_key_the_latest_write_counts_after_reopening_and_no_other_ever_comes_back(open_tier, arena):
    tier = open_tier()
    tier.write([8, 2, 5], [NAMES[0]] * 3, arena, [0, 0, 0])
    tier.close()
    again = open_tier()
    assert [stored.block for stored in again.records()] == [5]
    again.invalidate([5])
    again.close()
    assert list(open_tier().records()) == []


def test_a_header_from_the_future_does_not_win_its_key(open_tier, arena):
    """No write can have given it its generation."""
    tier = open_tier()
    tier.write([3], [NAMES[0]], arena, [0])
    form, ahead = tier._lanes.slots[0].form, tier._ages.next
    tier.close()
    data = form.header(4, ahead, NAMES[0], np.zeros(form.geometry.shards, np.uint64), 0)
    with open(os.path.join(tier.path, "data.0000"), "r+b") as file:
        file.seek(4 * form.geometry.slot_bytes)
        file.write(data)
    for _ in range(2):
        tier = open_tier()
        assert [stored.block for stored in tier.records()] == [3]
        tier.close()


def test_every_way_to_misuse_a_call_is_refused_before_anything_is_written(open_tier, arena):
    tier = open_tier()
    bad_calls = [
        ([NUM_BLOCKS], [NAMES[0]], arena, [0], InvalidArgument),
        ([-1], [NAMES[0]], arena, [0], InvalidArgument),
        ([0], [NAMES[0]], arena, [NUM_BLOCKS], InvalidArgument),
        ([0, 1], [NAMES[0]], arena, [0, 1], InvalidArgument),
        ([0], [NAMES[0]], arena, [0, 1], InvalidArgument),
        ([0.5], [NAMES[0]], arena, [0], WrongType),
        ([[0]], [NAMES[0]], arena, [0], WrongType),
        ([0], ["name"], arena, [0], WrongType),
        ([0], [NAMES[0]], arena[:, :-1], [0], WrongType),
        ([0], [NAMES[0]], np.repeat(arena, 2, axis=1)[:, ::2], [0], WrongType),
        ([0], [NAMES[0]], arena.astype(np.int8), [0], WrongType),
        ([0], [NAMES[0]], arena.tobytes(), [0], WrongType),
        ([0], [Record(bytes(32), bytes(32), bytes(32), np.zeros(3, np.int32))], arena, [0], InvalidArgument),
    ]
    for blocks, records, data, rows, error in bad_calls:
        for call in (tier.write, tier.read):
            with pytest.raises(error):
                call(blocks, records, data, rows)
    with pytest.raises(InvalidArgument):
        tier.write([3, 3], NAMES[:2], arena, [0, 1])
    with pytest.raises(InvalidArgument):
        tier.read([3, 4], NAMES[:2], arena, [1, 1])
    assert not list(tier.records())
    read_only = arena.copy()
    read_only.flags.writeable = False
    assert tier.write([0], [NAMES[0]], read_only, [0]).all()
    with pytest.raises(WrongType):
        tier.read([0], [NAMES[0]], read_only, [0])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_blocks": 0}, InvalidArgument), ({"num_blocks": 2**31}, InvalidArgument),
        ({"num_blocks": 1.5}, WrongType), ({"num_blocks": True}, WrongType), ({"block_bytes": -1}, InvalidArgument),
        ({"shards": 3}, InvalidArgument), ({"shards": 0}, InvalidArgument), ({"shards": "4"}, WrongType),
        ({"segment_bytes": 0}, InvalidArgument), ({"block_tokens": 0}, InvalidArgument),
        ({"fingerprint": "x"}, WrongType), ({"fingerprint": b"x"}, InvalidArgument),
        ({"read_path": "io_uring"}, InvalidArgument), ({"block_bytes": 2**62}, InvalidArgument),
    ],
)  # fmt: skip
def test_arguments_that_make_no_store_are_refused_and_leave_nothing_behind(open_tier, tmp_path, changes, error):
    with pytest.raises(error):
        open_tier(**changes)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fingerprint": bytes(32)}, "fingerprint"), ({"num_blocks": 11}, "asked was 11 blocks"),
        ({"block_bytes": 1004}, "asked was blocks of 1,004 bytes"), ({"block_tokens": 8}, "asked was block_size=8"),
        ({"shards": 2}, "asked was shards=2"),
        ({"segment_bytes": 1 << 20}, r"asked was segments of \d+ blocks \(1.00 MiB\)"),
    ],
)  # fmt: skip
def test_a_store_of_another_layout_is_refused_and_left_as_it_is(open_tier, arena, changes, named):
    tier = open_tier()
    tier.write([1], [NAMES[1]], arena, [1])
    tier.close()
    with pytest.raises(LayoutMismatch, match=named):
        open_tier(**changes)
    assert open_tier().read([1], [NAMES[1]], arena, np.array([0], np.int32)).all()


def test_a_closed_tier_refuses_everything_but_its_counters(open_tier, arena):
    tier = open_tier()
    tier.write([1], [NAMES[1]], arena, [1])
    tier.close()
    tier.close()
    for call in (
        lambda: tier.write([1], [NAMES[1]], arena, [1]),
        lambda: tier.read([1], [NAMES[1]], arena, [1]),
        lambda: tier.invalidate([1]),
        lambda: next(tier.records()),
        tier.flush,
    ):
        with pytest.raises(ClosedError):
            call()
    assert tier.stats().blocks_written == 1


def test_a_failing_write_loses_the_block_and_is_counted_by_errno(open_tier, arena, caplog):
    tier = open_tier()
    tier.write([1, 2], NAMES[1:3], arena, [1, 2])
    fds = tier._store.files.fd_of
    good = fds.copy()
    fds[:] = os.open(os.devnull, os.O_RDONLY)  # not writable: EBADF, whatever is written
    try:
        assert tier.write([1, 3], [NAMES[4], NAMES[5]], arena, [4, 5]).tolist() == [False, False]
        assert tier.write([3], [NAMES[5]], arena, [5]).tolist() == [False]
    finally:
        os.close(int(fds[0]))
        fds[:] = good
    assert tier.stats().write_errors == {"EBADF": 3}
    assert len([r for r in caplog.records if "a write failed" in r.message]) == 1
    assert tier.read([1, 2], [NAMES[1], NAMES[2]], arena.copy(), [0, 1]).tolist() == [False, True]
    assert tier.write([1], [NAMES[4]], arena, [4]).tolist() == [True]


def test_a_failing_read_is_a_counted_miss(open_tier, arena):
    tier = open_tier()
    tier.write([1], [NAMES[1]], arena, [1])
    good = tier._store.files.fd_of.copy()
    tier._store.files.fd_of[:] = 2**30
    assert tier.read([1], [NAMES[1]], arena.copy(), [0]).tolist() == [False]
    tier._store.files.fd_of[:] = good
    assert tier.stats().misses["io_error"] == 1
    assert tier.read([1], [NAMES[1]], arena.copy(), [0]).tolist() == [True]


def test_a_mapping_that_cannot_be_read_falls_back_to_the_file(open_tier, arena):
    tier = open_tier(read_path="mapping")
    tier.write([1], [NAMES[1]], arena, [1])
    tier._store.files.base[:] = 0  # as where a sandbox forbids process_vm_readv
    out = np.zeros_like(arena)
    assert tier.read([1], [NAMES[1]], out, [0]).all()
    np.testing.assert_array_equal(out[0], arena[1])


def test_a_forked_child_is_refused_and_does_not_keep_the_lock(open_tier, arena):
    tier = open_tier()
    tier.write([1], [NAMES[1]], arena, [1])
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"nothing raised"
        try:
            tier.read([1], [NAMES[1]], arena, [1])
        except TierError as problem:
            answer = str(problem).encode()
        finally:
            tier.close()
            os.write(tell, answer)
            signal.pause()
            os._exit(0)
    try:
        assert b"forked child" in os.read(told, 500)
        assert tier.read([1], [NAMES[1]], arena, [1]).all()
        tier.close()
        open_tier().close()  # the child lives still, and does not hold the lock
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)


def test_a_tier_whose_end_failed_is_closed_by_the_next_close(open_tier, monkeypatch):
    tier = open_tier()
    real, problems = tier._store.close, [MemoryError()]

    def close():
        if problems:
            raise problems.pop()
        real()

    monkeypatch.setattr(tier._store, "close", close)
    with pytest.raises(MemoryError):
        tier.close()
    tier.close()
    open_tier().close()


def test_a_tier_dropped_without_close_unlocks_its_directory(tmp_path, open_tier):
    tier = DiskTier(tmp_path / "kv", 2, 64, fingerprint=FINGERPRINT)
    del tier
    DiskTier(tmp_path / "kv", 2, 64, fingerprint=FINGERPRINT).close()


def test_renaming_the_directory_under_a_tier_changes_nothing(open_tier, arena, tmp_path):
    tier = open_tier()
    shutil.move(tmp_path / "kv", tmp_path / "elsewhere")
    assert tier.write([1], [NAMES[1]], arena, [1]).all()
    assert tier.read([1], [NAMES[1]], arena.copy(), [0]).all()
    tier.close()
    assert not Path(tmp_path / "kv").exists()
    assert len(list(open_tier(path=tmp_path / "elsewhere").records())) == 1


def test_flush_says_whether_the_device_has_the_bytes(open_tier, arena, monkeypatch, caplog):
    tier = open_tier()
    tier.write([1], [NAMES[1]], arena, [1])
    assert tier.flush()

    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        assert not tier.flush()
        tier.close()
    assert "sync failed" in caplog.text
    again = open_tier()
    assert not again.was_clean
    assert again.read([1], [NAMES[1]], arena, [1]).all()


def test_a_late_write_after_closing_meets_no_file_of_somebody_else(open_tier, tmp_path):
    """A mover's thread may outlive the tier when the interpreter exits.

    By then the descriptors may be those of other files.
    """
    tier = open_tier()
    segments, header_bytes = tier._store.segments[0], tier._store.geometry.header_bytes
    assert not tier._abandon.atexit
    tier.close()
    others = [os.open(tmp_path / f"mine{number}", os.O_RDWR | os.O_CREAT) for number in range(20)]
    outcomes = segments.write_headers(np.arange(12, dtype=np.int32), np.ones((12, header_bytes), np.uint8))
    assert (outcomes == -errno.EBADF).all()
    for other in others:
        assert os.fstat(other).st_size == 0
        os.close(other)


def test_a_direct_read_goes_past_the_page_cache_where_blocks_and_arena_are_whole_pages(open_tier):
    tier = open_tier(block_bytes=8192, segment_bytes=1 << 20, num_blocks=3)
    if not tier._store.files.direct_of.size:
        pytest.skip("this file system has no O_DIRECT")
    pages = anonymous_arena(4, 8192, "test")
    pages[:3] = [bytes_of(number, 8192) for number in range(3)]
    slots, records = np.arange(3, dtype=np.int32), [name_of(number) for number in range(3)]
    assert tier.write(slots, records, pages, slots).all()
    buffered = tier._store.files.fd_of
    tier._store.files.fd_of = np.full_like(buffered, 2**30)  # no other way is left
    try:
        back = anonymous_arena(4, 8192, "test")
        assert tier.read(slots, records, back, slots + np.int32(1)).all()
        np.testing.assert_array_equal(back[1:], pages[:3])
    finally:
        tier._store.files.fd_of = buffered


@pytest.mark.parametrize("off", [0, 512, 1])
def test_a_read_that_cannot_go_past_the_page_cache_takes_the_other_way(open_tier, off):
    tier = open_tier(block_bytes=8192, segment_bytes=1 << 20, num_blocks=3)
    pages = anonymous_arena(4, 8192, "test")
    pages[:3] = [bytes_of(number, 8192) for number in range(3)]
    slots, records = np.arange(3, dtype=np.int32), [name_of(number) for number in range(3)]
    assert tier.write(slots, records, pages, slots).all()
    direct = tier._store.files.direct_of
    tier._store.files.direct_of = np.full_like(direct, 2**30)  # every direct read fails
    try:
        room = anonymous_arena(1, 5 * 8192, "test").reshape(-1)
        back = room[off : off + 3 * 8192].reshape(3, 8192)
        assert tier.read(slots, records, back, slots).all()
        np.testing.assert_array_equal(back, pages[:3])
    finally:
        tier._store.files.direct_of = direct


def test_a_block_that_was_just_written_is_read_back_past_the_page_cache(open_tier):
    tier = open_tier(block_bytes=65536, segment_bytes=1 << 20, num_blocks=8)
    arena = anonymous_arena(16, 65536, "test")
    for turn in range(20):
        number = 100 + turn
        arena[0] = bytes_of(number, 65536)
        slot = np.array([turn % 8], np.int32)
        assert tier.write(slot, [name_of(number)], arena, np.array([0], np.int32)).all()
        assert tier.read(slot, [name_of(number)], arena, np.array([9], np.int32)).all()
        np.testing.assert_array_equal(arena[9], arena[0])


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_distinct_rows_are_those_of_numpy(count):
    rows = np.random.default_rng(count).integers(0, 2, (count, 4)).astype(np.uint64)
    found, which = slots_module._distinct(rows)
    wanted = {tuple(row) for row in rows.tolist()}
    assert len(found) == len(wanted)
    assert {tuple(row) for row in found.tolist()} == wanted
    assert np.array_equal(found[which], rows)

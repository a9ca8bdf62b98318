"""Arenas in memory, on the CPU and (against a stand-in for CuPy) on a GPU."""

from __future__ import annotations

import gc
import resource
import sys
import time
import types
import weakref
from pathlib import Path

import numpy as np
import pytest

from pagedkv.cache.group_mover import GroupMover
from pagedkv.errors import ClosedError, InvalidArgument, KernelsUnavailable, TierError, WrongType
from pagedkv.spec.groups import layout_of
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import Blocks, Bytes
from pagedkv.tiers import DeviceTier, DiskTier, HostTier, Mover, Record
from pagedkv.tiers.cuda_copy import runs
from pagedkv.tiers.device import DeviceLane
from pagedkv.tiers.disk import _io
from pagedkv.tiers.memory import ArenaTier
from pagedkv.tiers.mover import transfer
from tests.tiers.fake_gpu import fake_cupy_fixture

TIERS = [DeviceTier, HostTier]
fake_cupy = fake_cupy_fixture()


@pytest.mark.parametrize("tier_class", TIERS)
def test_an_arena_is_aligned_contiguous_and_zero(tier_class):
    for num_blocks, block_bytes, align in ((3, 100, 4096), (4, 1 << 20, 2 << 20)):
        tier = tier_class(num_blocks, block_bytes)
        assert (tier.num_blocks, tier.block_bytes, tier.gpu) == (num_blocks, block_bytes, None)
        assert tier.arena.shape == (num_blocks, block_bytes)
        assert tier.arena.dtype == np.uint8
        assert tier.arena.flags.c_contiguous
        assert tier.arena.ctypes.data % align == 0
        assert not tier.arena.any()


def test_an_arena_costs_memory_only_where_it_was_written():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tier = DeviceTier(4096, 1 << 20)  # 4 GiB
    tier.view(4095)[:] = 1
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 << 10


@pytest.mark.parametrize("tier_class", TIERS)
def test_a_view_is_the_block_and_outlives_the_tier(tier_class):
    tier = tier_class(4, 10)
    view = tier.view(2)
    view[:] = 7
    assert (tier.arena[2] == 7).all()
    tier.close()
    tier.close()
    gc.collect()
    assert (view == 7).all()
    with pytest.raises(ClosedError):
        tier.view(2)
    with pytest.raises(ClosedError):
        _ = tier.arena


@pytest.mark.parametrize("tier_class", TIERS)
def test_memory_goes_back_with_the_last_view(tier_class):
    tier = tier_class(4, 10)
    base = weakref.ref(tier.arena.base.base) if tier.arena.base.base is not None else weakref.ref(tier.arena.base)
    tier.close()
    gc.collect()
    assert base() is None


@pytest.mark.parametrize("tier_class", TIERS)
def test_sizes_that_make_no_arena_are_refused(tier_class):
    for num_blocks, block_bytes, error in (
        (0, 1, InvalidArgument), (1, 0, InvalidArgument), (-1, 1, InvalidArgument), (2**31, 1, InvalidArgument),
        (1.0, 1, WrongType), ("1", 1, WrongType), (True, 1, WrongType),
    ):  # fmt: skip
        with pytest.raises(error):
            tier_class(num_blocks, block_bytes)
    for block in (-1, 4):
        with pytest.raises(InvalidArgument):
            tier_class(4, 10).view(block)


@pytest.mark.parametrize("tier_class", TIERS)
@pytest.mark.parametrize("block_bytes", [1 << 29, 1 << 40])
def test_more_memory_than_there_is_is_an_error_that_names_the_size(tier_class, block_bytes):
    with pytest.raises(TierError, match=str(block_bytes)):
        tier_class(2**31 - 1, block_bytes)


@pytest.mark.parametrize("tier_class", TIERS)
def test_bytes_are_no_number_of_blocks_and_the_reverse(tier_class):
    assert tier_class(Blocks(2), Bytes(64)).num_blocks == 2
    with pytest.raises(WrongType, match="num_blocks is not in bytes"):
        tier_class(Bytes(2), 64)
    with pytest.raises(WrongType, match="block_bytes is not in blocks"):
        tier_class(2, Blocks(64))


@pytest.mark.parametrize("tier_class", TIERS)
@pytest.mark.parametrize(("device", "error"), [("8GiB", InvalidArgument), ("gpu", InvalidArgument), (0, WrongType)])
def test_a_device_is_a_place(tier_class, device, error):
    with pytest.raises(error, match="device"):
        tier_class(2, 64, device=device)


@pytest.mark.parametrize("tier_class", TIERS)
def test_a_gpu_without_cupy_is_an_error_that_names_the_extras(tier_class, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelsUnavailable, match=r"cupy-cuda12x.*\[cuda12\].*\[cuda13\]"):
        tier_class(4, 10, device="cuda:0")


@pytest.mark.parametrize("block_bytes", [1, 15, 16384, 65536, 65552, 70001])
@pytest.mark.parametrize("count", [0, 1, 80])
def test_copied_blocks_are_equal_and_others_untouched(block_bytes, count):
    rng = np.random.default_rng(block_bytes)
    src = rng.integers(0, 256, (100, block_bytes), np.uint8)
    dst = np.zeros_like(src)
    src_blocks = rng.permutation(100)[:count].astype(np.int32)
    dst_blocks = rng.permutation(100)[:count].astype(np.int32)
    expected = dst.copy()
    expected[dst_blocks] = src[src_blocks]
    _io.copy_blocks(src, src_blocks, dst, dst_blocks)
    np.testing.assert_array_equal(dst, expected)


def test_the_low_level_calls_check_rows_and_lengths():
    rows, ids = np.zeros((3, 8), np.uint8), np.zeros(1, np.int32)
    for src_blocks, dst_blocks in (
        ([3], [0]),
        ([-1], [0]),
        ([0], [3]),
        ([0], [-1]),
        ([0, 1], [0]),
        ([0], []),
    ):
        with pytest.raises(InvalidArgument):
            _io.copy_blocks(rows, np.array(src_blocks, np.int32), rows, np.array(dst_blocks, np.int32))
    with pytest.raises(InvalidArgument):
        _io.copy_blocks(rows, ids, np.zeros((3, 9), np.uint8), ids)
    bad, one, two, four = np.array([3], np.int32), ids, np.zeros(2, np.int64), np.zeros(4, np.int32)
    place, seeds, none = np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros((1, 0), np.uint64)
    for arguments in ((one, place, rows, rows, bad, place), (one, two, rows, rows, one, place),
                      (four, np.zeros(4, np.int64), rows, rows, four, np.zeros(4, np.int64))):  # fmt: skip
        with pytest.raises(InvalidArgument):
            _io.file_read(*arguments, seeds, none)
    with pytest.raises(InvalidArgument):
        _io.mapping_read(place, rows, rows, bad, place, seeds, none)
    for arguments in ((one, place, rows, bad, place), (one, place, rows, one, np.zeros(0, np.int64))):
        with pytest.raises(InvalidArgument):
            _io.file_write(*arguments, seeds, none)


def test_neighbours_in_both_lists_become_one_run():
    src = np.array([4, 5, 6, 9, 10, 3], np.int32)
    dst = np.array([0, 1, 3, 4, 5, 6], np.int32)
    assert [array.tolist() for array in runs(src, dst)] == [[0, 2, 3, 5], [2, 1, 2, 1]]
    assert [array.tolist() for array in runs(src, dst, np.array([0, 1, 1, 1, 1, 1]))] == [
        [0, 1, 2, 3, 5],
        [1, 1, 1, 2, 1],
    ]
    assert [array.tolist() for array in runs(src[:0], dst[:0])] == [[], []]


def test_a_gpu_arena_moves_to_page_locked_host_to_disk_and_back(fake_cupy, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "BOUNCE_BYTES", 4 * 4096)
    device, host = DeviceTier(12, 4096, device="cuda:3"), HostTier(12, 4096, device="cuda:3")
    assert not host.arena.any()
    disk = DiskTier(tmp_path / "kv", 12, 4096, fingerprint=bytes(32), block_tokens=1)
    tiers = {0: device, 1: host, 2: disk}

    def describe(moves: np.ndarray) -> list[Record]:
        block = np.where(moves["dst_tier"] == 2, moves["dst_block"], moves["src_block"])
        return [Record(bytes([b]) * 32, bytes(32), bytes(32), np.zeros(1, np.int32)) for b in block.tolist()]

    content = np.random.default_rng(3).integers(0, 256, (12, 4096), np.uint8)
    device.arena.bytes[:] = content
    dtype = [(n, "i8") for n in ("transfer", "src_tier", "dst_tier", "src_block", "dst_block")]
    with disk, Mover(tiers, describe=describe) as mover:
        for src, dst in ((0, 1), (0, 2), (2, 0), (1, 0)):
            moves = np.zeros(12, dtype)
            moves["src_tier"], moves["dst_tier"] = src, dst
            moves["src_block"] = moves["dst_block"] = np.arange(12)
            if dst == 0:
                device.arena.bytes[:] = 0
            assert mover.submit(moves).results()[1].all()
            if dst == 0:
                np.testing.assert_array_equal(device.arena.bytes, content)
        np.testing.assert_array_equal(host.arena, content)
    assert set(fake_cupy.devices) == {3}
    assert fake_cupy.copies == 1 + 3 + 3 + 1
    assert fake_cupy.synchronised == 8


@pytest.mark.parametrize("tier_class", TIERS)
def test_a_gpu_that_has_too_little_memory_is_an_error_that_names_the_size(fake_cupy, tier_class):
    fake_cupy.limit = 100
    with pytest.raises(TierError, match="1000 bytes"):
        tier_class(10, 100, device="cuda:0")


def wait_for_unlocked(fake_cupy, limit_s=60.0):
    """A thread that touched the memory may hold it until it ends, after the tier was made."""
    end = time.monotonic() + limit_s
    while fake_cupy.locked and time.monotonic() < end:
        gc.collect()
        time.sleep(0.001)
    assert not fake_cupy.locked


def test_page_locked_memory_is_locked_in_chunks_and_unlocked_with_its_last_view(fake_cupy, monkeypatch):
    monkeypatch.setattr("pagedkv.tiers.memory.LOCK_CHUNK", 4096)
    tier = HostTier(5, 2048, device="cuda:0")
    assert sorted(fake_cupy.locked.values()) == [2048, 4096, 4096]
    assert not tier.arena.any()
    view = tier.view(1)
    tier.close()
    del tier
    gc.collect()
    assert len(fake_cupy.locked) == 3
    del view
    wait_for_unlocked(fake_cupy)


def test_a_limit_on_locked_memory_is_named_and_what_was_locked_is_given_back(fake_cupy, monkeypatch):
    monkeypatch.setattr("pagedkv.tiers.memory.LOCK_CHUNK", 4096)
    fake_cupy.limit = 5000
    with pytest.raises(TierError, match=r"only the first 4096.*ulimit -l"):
        HostTier(5, 2048, device="cuda:0")
    wait_for_unlocked(fake_cupy)


def test_copies_wait_for_the_kernels_that_were_launched_on_the_arena(fake_cupy):
    device, host = DeviceTier(4, 64, device="cuda:0"), HostTier(4, 64, device="cuda:0")
    device.used_by()
    device.used_by(6)
    device.used_by()
    blocks = np.arange(2, dtype=np.int32)
    transfer.copy(device, blocks, host, blocks)
    assert fake_cupy.waits == [5, 6]


def test_no_copy_reaches_from_one_page_locked_piece_into_the_next(fake_cupy, monkeypatch):
    monkeypatch.setattr("pagedkv.tiers.memory.LOCK_CHUNK", 10_000)
    for block_bytes, pieces in ((1536, 3), (3072, 5)):  # neither divides the chunk
        device, host = DeviceTier(20, block_bytes, device="cuda:0"), HostTier(20, block_bytes, device="cuda:0")
        assert all(size % block_bytes == 0 for size in fake_cupy.locked.values())
        assert all(address % 4096 == 0 for address in fake_cupy.locked)
        assert len(fake_cupy.locked) == pieces, block_bytes
        blocks = np.arange(20, dtype=np.int32)
        host.arena[:] = np.random.default_rng(0).integers(0, 256, host.arena.shape, np.uint8)
        copies = fake_cupy.copies
        transfer.copy(host, blocks, device, blocks)
        assert fake_cupy.copies - copies == pieces
        np.testing.assert_array_equal(device.arena.bytes, host.arena)
        del host
        wait_for_unlocked(fake_cupy)


def test_no_copy_of_a_groups_pages_reaches_into_the_next_page_locked_piece(fake_cupy, monkeypatch):
    monkeypatch.setattr("pagedkv.tiers.memory.LOCK_CHUNK", 10_000)
    device, host = (kind(8, 3072, device="cuda:0") for kind in (DeviceTier, HostTier))
    assert set(fake_cupy.locked.values()) == {12288}, "whole extents, and no whole number of 8 KiB of pages"
    device.arena.bytes[:] = np.random.default_rng(0).integers(1, 256, device.arena.bytes.shape, np.uint8)
    layout = types.SimpleNamespace(groups=[types.SimpleNamespace(page_bytes=1024)], strides=(1024,))
    moves = np.zeros(24, [(n, "i8") for n in ("transfer", "src_tier", "dst_tier", "src_block", "dst_block", "lane")])
    moves["dst_tier"], moves["src_block"], moves["dst_block"] = 1, np.arange(24), np.arange(24)
    mover = GroupMover({0: device, 1: host}, layout, 1)
    assert mover.submit(moves).results()[1].all()
    mover.close()
    np.testing.assert_array_equal(host.arena, device.arena.bytes)
    assert fake_cupy.copies == 2


def test_pages_that_lie_apart_move_one_by_one_and_after_the_kernels(fake_cupy):
    device, host = DeviceTier(4, 320, device="cuda:7"), HostTier(4, 320, device="cuda:7")  # 7: its own copy stream
    pages = DeviceLane(device, device.arena.reshape(8, 160)[:, :100])
    below = ArenaTier("host", host.arena.reshape(8, 160)[:, :100], host.gpu)
    device.arena.bytes[:] = np.random.default_rng(0).integers(1, 256, (4, 320), np.uint8)
    device.used_by(6)
    src, dst = np.arange(8, dtype=np.int32), np.array([4, 5, 6, 7, 3, 2, 1, 0], np.int32)
    transfer.copy(pages, src, below, dst)
    np.testing.assert_array_equal(below.arena[dst], device.arena.bytes.reshape(8, 160)[:, :100])
    assert not host.arena.reshape(8, 160)[:, 100:].any(), "bytes between pages stay"
    assert (fake_cupy.copies, fake_cupy.waits) == (8, [6])


def test_a_mover_of_groups_moves_the_pages_of_a_gpu(fake_cupy):
    layout = layout_of(KVSpec(3, 1, 8, "float16", 4, windows=(None, 9, 9)))
    device, host = (kind(3, layout.extent_bytes, device="cuda:0") for kind in (DeviceTier, HostTier))
    content = np.random.default_rng(0).integers(1, 256, device.arena.bytes.shape, np.uint8)
    device.arena.bytes[:] = content
    device.used_by(6)
    mover = GroupMover({0: device, 1: host}, layout, 1)
    for lane, (stride, group) in enumerate(zip(layout.strides, layout.groups, strict=True)):
        moves = np.zeros(2, [(n, "i8") for n in ("transfer", "src_tier", "dst_tier", "src_block", "dst_block", "lane")])
        moves["dst_tier"], moves["lane"], moves["src_block"], moves["dst_block"] = 1, lane, (2, 1), (0, 2)
        assert mover.submit(moves).results()[1].all()
        rows = host.arena.reshape(-1, stride)[:, : group.page_bytes]
        np.testing.assert_array_equal(rows[[0, 2]], content.reshape(-1, stride)[[2, 1], : group.page_bytes])
    mover.close()
    assert fake_cupy.waits == [6, 6]


def test_a_gpu_arena_is_zero_before_another_stream_can_write_it(fake_cupy):
    DeviceTier(4, 64, device="cuda:0")
    assert fake_cupy.zeros_waits == 1


def test_work_on_another_stream_waits_for_the_work_before_it_and_for_nothing_else(fake_cupy):
    device = DeviceTier(4, 64, device="cuda:2")
    assert device.before_use().ptr == 5  # the first
    device.used_by(6)
    assert device.before_use(6).ptr == 6
    assert not fake_cupy.waits
    assert device.before_use().ptr == 5
    assert fake_cupy.waits == [(5, 6)]
    assert set(fake_cupy.devices) == {2}


def test_a_closed_gpu_arena_is_let_go_after_the_kernels_that_use_it(fake_cupy):
    device = DeviceTier(4, 64, device="cuda:0")
    device.used_by(6)
    device.used_by()
    device.close()
    device.close()
    assert fake_cupy.event_waits == 2


def test_work_that_is_captured_into_a_graph_leaves_no_event_behind(fake_cupy):
    device, host = DeviceTier(4, 64, device="cuda:4"), HostTier(4, 64, device="cuda:4")
    device.used_by()
    fake_cupy.capturing = 6
    device.before_use(6)
    device.used_by(6)
    blocks = np.arange(2, dtype=np.int32)
    transfer.copy(device, blocks, host, blocks)
    assert fake_cupy.waits == [5]


def test_the_null_stream_is_never_asked_whether_it_is_captured(fake_cupy):
    null = types.SimpleNamespace(
        ptr=0, record=lambda event: None, wait_event=lambda event: fake_cupy.waits.append((0, event.recorded))
    )
    current = [fake_cupy.cuda.get_current_stream()]
    fake_cupy.cuda.get_current_stream = lambda: current[0]
    device, host = DeviceTier(4, 64, device="cuda:4"), HostTier(4, 64, device="cuda:4")
    device.used_by()
    fake_cupy.capturing = 6  # a blocking stream: CUDA refuses the question
    current[0] = null
    device.before_use()
    assert device.launched_on()
    device.before_use(0)
    blocks = np.arange(2, dtype=np.int32)
    transfer.copy(device, blocks, host, blocks)
    assert fake_cupy.waits == [(0, 5), 5, 0]


def test_page_locked_memory_is_not_copied_by_a_fork(fake_cupy):
    tier = HostTier(5, 4096, device="cuda:0")
    address = tier.arena.ctypes.data
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        first, dash, last = line.partition(" ")[0].partition("-")
        if dash and int(first, 16) <= address < int(last, 16):
            break
    flags = next(line for line in lines if line.startswith("VmFlags:"))
    assert "dc" in flags.split(), "do not copy area on fork"


def test_a_move_complains_of_a_captured_graph_whose_launches_were_not_reported(fake_cupy, caplog, monkeypatch):
    device, host = DeviceTier(4, 64, device="cuda:0"), HostTier(4, 64, device="cuda:0")
    blocks = np.arange(2, dtype=np.int32)
    fake_cupy.capturing = 6
    device.launched_on(6)
    device.launched_on(5)  # a step's own work tells nothing of the graph's launches
    monkeypatch.setenv("PAGEDKV_CHECK_GRAPHS", "1")
    for _ in range(2):
        with pytest.raises(TierError, match=r"cache\.used_on\(stream\) after each launch"):
            transfer.copy(device, blocks, host, blocks)
    assert fake_cupy.copies == 0
    device.used_by(5)
    transfer.copy(device, blocks, host, blocks)
    device.launched_on(6)
    monkeypatch.delenv("PAGEDKV_CHECK_GRAPHS")
    transfer.copy(device, blocks, host, blocks)
    transfer.copy(device, blocks, host, blocks)
    assert caplog.text.count("used_on(stream) after each launch") == 1

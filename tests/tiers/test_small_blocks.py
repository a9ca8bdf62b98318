"""Small blocks move between a GPU and the host by one launch, large ones by copies.

The interpreter runs the kernel, over a stand-in for CuPy whose memory is the host's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.kernels.block_moves import MOST_CTAS, SMALLEST, BlockMoves
from pagedkv.tiers import DeviceTier, DiskTier, HostTier, Record, cuda_copy
from pagedkv.tiers.cuda_copy import FEW_RUNS, SMALL_RUN
from pagedkv.tiers.device import DeviceLane
from pagedkv.tiers.memory import ArenaTier
from pagedkv.tiers.mover import transfer
from tests.ptxsim.fixture import interpreted_backend
from tests.tiers.fake_gpu import FakeGpu, fake_cupy_fixture

backend = interpreted_backend()  # skips where there is no NVRTC
fake_cupy = fake_cupy_fixture()
MANY = FEW_RUNS + 1
APART = np.array([*range(0, 2 * MANY, 2)], np.int32)  # no two are neighbours
BACK = APART[::-1].copy()


def tiers(num_blocks: int, block_bytes: int, host: str = "cuda:0") -> tuple[Any, Any, FakeGpu]:
    """A device tier with other random bytes than a host tier, and what copies its small blocks."""
    device, below = DeviceTier(num_blocks, block_bytes, device="cuda:0"), HostTier(num_blocks, block_bytes, device=host)
    rng = np.random.default_rng(block_bytes)
    for bytes_ in (device.arena.bytes, below.arena):
        bytes_[:] = rng.integers(0, 256, bytes_.shape, np.uint8)
    gpu = FakeGpu()
    device.copy_small_by(BlockMoves(gpu))
    return device, below, gpu


@pytest.mark.parametrize("block_bytes", [96, 1234, 65536])
def test_many_small_runs_are_one_launch_in_either_direction(block_bytes: int, backend: Any, fake_cupy: Any) -> None:
    device, host, gpu = tiers(2 * MANY, block_bytes)
    device.used_by(6)
    wanted, above = host.arena.copy(), device.arena.bytes.copy()
    wanted[BACK] = above[APART]
    transfer.copy(device, APART, host, BACK)
    np.testing.assert_array_equal(host.arena, wanted)
    np.testing.assert_array_equal(device.arena.bytes, above)
    above[APART + 1] = wanted[APART]
    transfer.copy(host, APART, device, APART + 1)
    np.testing.assert_array_equal(device.arena.bytes, above)
    assert (fake_cupy.copies, gpu.launches) == (0, [("copy_blocks", 77)] * 2), "on the thread's copy stream"
    assert gpu.allocations == [(SMALLEST, 2)], "the list stays"
    assert (fake_cupy.waits, fake_cupy.synchronised) == ([6, 6], 2)


def test_a_longer_list_takes_more_memory_once(backend: Any, fake_cupy: Any) -> None:
    device, host, gpu = tiers(SMALLEST + 4, 16)
    ids = np.random.default_rng(0).permutation(SMALLEST + 4).astype(np.int32)
    for count in (MANY, SMALLEST + 1, SMALLEST + 4):
        transfer.copy(device, ids[:count], host, ids[:count])
    np.testing.assert_array_equal(host.arena, device.arena.bytes)
    assert gpu.allocations == [(SMALLEST, 2), (2 * SMALLEST, 2)]


def test_few_runs_or_large_ones_stay_with_the_copy_engine(backend: Any, fake_cupy: Any) -> None:
    device, host, gpu = tiers(2 * MANY, 16)
    transfer.copy(device, APART[:-1], host, BACK[1:])
    transfer.copy(device, np.arange(2 * MANY, dtype=np.int32), host, np.arange(2 * MANY, dtype=np.int32))
    assert (fake_cupy.copies, gpu.launches) == (FEW_RUNS + 1, [])
    device, host, gpu = tiers(2 * MANY, SMALL_RUN)
    transfer.copy(device, APART, host, BACK)
    assert (fake_cupy.copies, gpu.launches) == (FEW_RUNS + 1 + MANY, [])
    np.testing.assert_array_equal(host.arena[BACK], device.arena.bytes[APART])


def test_a_large_run_among_small_ones_is_not_the_kernels(backend: Any, fake_cupy: Any) -> None:
    block_bytes, large = SMALL_RUN // 4, np.arange(4, dtype=np.int32) + 2 * MANY
    device, host, gpu = tiers(2 * MANY + 4, block_bytes)
    src, dst = np.concatenate((APART[:3], large, APART[3:])), np.concatenate((BACK[:3], large, BACK[3:]))
    wanted = host.arena.copy()
    wanted[dst] = device.arena.bytes[src]
    transfer.copy(device, src, host, dst)
    np.testing.assert_array_equal(host.arena, wanted)
    assert (fake_cupy.copies, len(gpu.launches), gpu.uploads) == (1, 1, [(MANY, 2)])


def test_host_memory_out_of_the_kernels_reach_stays_with_the_copy_engine(backend: Any, fake_cupy: Any) -> None:
    device, plain, gpu = tiers(2 * MANY, 16, host="cpu")
    transfer.copy(device, APART, plain, BACK)
    fake_cupy.host_pointers = 0  # a device that sees page-locked memory at another address
    device, host, other = tiers(2 * MANY, 16)
    transfer.copy(host, APART, device, BACK)
    assert (fake_cupy.copies, gpu.launches, other.launches) == (2 * MANY, [], [])
    np.testing.assert_array_equal(device.arena.bytes[BACK], host.arena[APART])


def test_pages_of_groups_that_lie_apart_are_one_launch_and_the_bytes_between_stay(backend: Any, fake_cupy: Any) -> None:
    device, host, gpu = tiers(MANY, 320)
    wanted = host.arena.reshape(-1, 160).copy()
    rows = np.arange(2 * MANY, dtype=np.int32)
    wanted[rows[::-1], :100] = device.arena.bytes.reshape(-1, 160)[rows, :100]
    pages = DeviceLane(device, device.arena.reshape(-1, 160)[:, :100])
    transfer.copy(pages, rows, ArenaTier("host", host.arena.reshape(-1, 160)[:, :100], host.gpu), rows[::-1].copy())
    np.testing.assert_array_equal(host.arena.reshape(-1, 160), wanted)
    assert (fake_cupy.copies, len(gpu.launches)) == (0, 1)


def test_a_copy_that_fails_is_waited_for_before_its_blocks_are_used_again(
    backend: Any, fake_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, host, gpu = tiers(2 * MANY, 16)
    monkeypatch.setattr(gpu, "upload", lambda *_: (_ for _ in ()).throw(MemoryError("no pinned memory")))
    with pytest.raises(MemoryError):
        transfer.copy(device, APART, host, BACK)
    assert (fake_cupy.synchronised, gpu.launches) == (1, [])


def test_small_blocks_fill_a_bounce_buffer_and_are_one_launch_of_it(
    backend: Any, fake_cupy: Any, tmp_path: Path
) -> None:
    device, _, gpu = tiers(2 * MANY, 4096)
    above = device.arena.bytes.copy()
    records = [Record(bytes([b]) * 32, bytes(32), bytes(32), np.zeros(1, np.int32)) for b in range(MANY)]
    slots = np.arange(MANY, dtype=np.int32)
    with DiskTier(tmp_path / "kv", MANY, 4096, fingerprint=bytes(32), block_tokens=1) as disk:
        assert transfer.transfer(device, APART, disk, slots, records).all()
        device.arena.bytes[:] = 0
        assert transfer.transfer(disk, slots, device, APART, records).all()
    np.testing.assert_array_equal(device.arena.bytes[APART], above[APART])
    assert (fake_cupy.copies, len(gpu.launches)) == (0, 2)


def test_the_kernel_leaves_multiprocessors_to_attention(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, grids = FakeGpu(), []
    monkeypatch.setattr(gpu, "launch", lambda variant, grid, *_, **__: grids.append(grid))
    arenas = [np.zeros((64, SMALL_RUN - 16), np.uint8) for _ in range(2)]
    ids = np.arange(64, dtype=np.int32)
    BlockMoves(gpu)(arenas[0], ids, arenas[1], ids, None)
    assert grids == [(MOST_CTAS, 1, 1)]


SPEC = pk.KVSpec(2, 1, 16, "int8", 4, scales="token_head")
GROUPS = dataclasses.replace(SPEC, num_layers=3, windows=(None, 9, 9))


@pytest.mark.parametrize("by_group", [False, True], ids=["blocks", "pages of groups"])
def test_a_caches_small_blocks_go_to_the_host_and_come_back_with_their_scales(
    by_group: bool, backend: Any, fake_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copy, "FEW_RUNS", 0)
    spec, gpu, rng = GROUPS if by_group else SPEC, FakeGpu(), np.random.default_rng(0)
    tokens = np.arange(26, dtype=np.int32)
    with pk.KVCache(spec, pk.Blocks(40), pk.Blocks(40), device="cuda:0", backend=gpu, by_group=by_group) as cache:
        with cache.sequence(tokens) as seq:
            with cache.step([seq]) as step:
                for layer in range(spec.num_layers):
                    step.write(layer, *rng.standard_normal((2, 26, 1, 16)).astype(np.float32))
            wanted = seq.gather(20, 24)
        gpu.launches.clear()
        room = cache.placement.pools[0].num_obtainable
        cache.moves.make_room(np.array([room, 0]) if by_group else room)
        out = gpu.launches.copy()
        cache.device_arena.bytes[:] = 0xEE
        with cache.sequence(tokens) as seq:
            assert seq.hit_tokens["host"] == 24
            for found, before in zip(seq.gather(20, 24), wanted, strict=True):
                np.testing.assert_array_equal(found, before)
        back = [launch for launch in gpu.launches[len(out) :] if launch[0] == "copy_blocks"]
        groups = 1 + by_group
        assert (fake_cupy.copies, out, back) == (0, [("copy_blocks", 77)] * groups, [("copy_blocks", 77)] * groups)
        cache.check_integrity()

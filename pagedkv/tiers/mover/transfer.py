"""One part of a move, carried out: memory to memory, memory to store, store to memory.

The calling thread owns both ends. A GPU arena meets a store by way of the thread's page-locked bounce buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers.base import Name, OpenTier, RamTier, Record, StoreTier, is_store
from pagedkv.tiers.cuda_copy import cuda_copy
from pagedkv.tiers.device import BlockKernel, DeviceLane, DeviceTier
from pagedkv.tiers.disk import _io
from pagedkv.tiers.host import page_locked_arena

BOUNCE_BLOCKS, BOUNCE_BYTES = 4, 1 << 20  # of a bounce buffer: small blocks fill the bytes

_local = threading.local()


def transfer(
    src: OpenTier,
    src_blocks: NDArray[np.int32],
    dst: OpenTier,
    dst_blocks: NDArray[np.int32],
    records: Sequence[Record | Name],
) -> NDArray[np.bool_]:
    """Move blocks ``src_blocks[i] -> dst_blocks[i]``.

    Parameters
    ----------
    src, dst : tiers, of which one at least is a `RamTier`.
    src_blocks, dst_blocks : int32 [n]
    records : n records if one end is a `StoreTier`, else not read.

    Returns
    -------
    bool [n]; False where the store failed.
    """
    if is_store(dst):
        memory = cast(RamTier, src)
        if isinstance(memory.arena, np.ndarray):
            return dst.write(dst_blocks, records, memory.arena, src_blocks)
        return _bounce_out(memory, src_blocks, dst, dst_blocks, records)
    if is_store(src):
        memory = cast(RamTier, dst)
        if isinstance(memory.arena, np.ndarray):
            return src.read(src_blocks, records, memory.arena, dst_blocks)
        return _bounce_in(src, src_blocks, memory, dst_blocks, records)
    copy(cast(RamTier, src), src_blocks, cast(RamTier, dst), dst_blocks)
    return np.ones(src_blocks.size, np.bool_)


def copy(src: RamTier, src_blocks: NDArray[np.int32], dst: RamTier, dst_blocks: NDArray[np.int32]) -> None:
    """Copy blocks between two tiers that have addresses."""
    if isinstance(src.arena, np.ndarray) and isinstance(dst.arena, np.ndarray):
        _io.copy_blocks(src.arena, src_blocks, dst.arena, dst_blocks)
    else:
        host = next((tier for tier in (src, dst) if isinstance(tier.arena, np.ndarray)), src)
        cuda_copy(
            src.arena, src_blocks, dst.arena, dst_blocks, _gpu(src, dst), _device(src, dst), _kernel(src, dst),
            host.piece_bytes,
        )  # fmt: skip


def _gpu(*tiers: RamTier) -> int:
    return next(tier.gpu for tier in tiers if tier.gpu is not None)


def _device(*tiers: RamTier) -> DeviceTier | DeviceLane | None:
    """The tier whose kernels a copy has to wait for."""
    return next((tier for tier in tiers if isinstance(tier, DeviceTier | DeviceLane)), None)


def _kernel(*tiers: RamTier) -> BlockKernel | None:
    """The device's kernel for small blocks, if the other end is page-locked for a GPU."""
    device = _device(*tiers)
    reached = all(tier.gpu is not None for tier in tiers)
    return device.kernel if reached and device is not None else None


def _bounce_out(
    src: RamTier,
    src_blocks: NDArray[np.int32],
    dst: StoreTier,
    dst_blocks: NDArray[np.int32],
    records: Sequence[Record | Name],
) -> NDArray[np.bool_]:
    ok = np.zeros(src_blocks.size, np.bool_)
    buffer = _bounce_buffer(src)
    for start in range(0, src_blocks.size, len(buffer)):
        part = slice(start, min(start + len(buffer), src_blocks.size))
        rows = np.arange(part.stop - part.start, dtype=np.int32)
        cuda_copy(src.arena, src_blocks[part], buffer, rows, _gpu(src), _device(src), _kernel(src))
        ok[part] = dst.write(dst_blocks[part], records[part], buffer, rows)
    return ok


def _bounce_in(
    src: StoreTier,
    src_blocks: NDArray[np.int32],
    dst: RamTier,
    dst_blocks: NDArray[np.int32],
    records: Sequence[Record | Name],
) -> NDArray[np.bool_]:
    ok = np.zeros(src_blocks.size, np.bool_)
    buffer = _bounce_buffer(dst)
    for start in range(0, src_blocks.size, len(buffer)):
        part = slice(start, min(start + len(buffer), src_blocks.size))
        rows = np.arange(part.stop - part.start, dtype=np.int32)
        ok[part] = src.read(src_blocks[part], records[part], buffer, rows)
        cuda_copy(buffer, rows, dst.arena, dst_blocks[part], _gpu(dst), _device(dst), _kernel(dst))
    return ok


def _bounce_buffer(tier: RamTier) -> NDArray[np.uint8]:
    """This thread's page-locked uint8 [num_blocks, block_bytes]."""
    buffers: dict[tuple[int, int], Any] = _local.__dict__.setdefault("buffers", {})
    wanted = (_gpu(tier), tier.block_bytes)
    if wanted not in buffers:
        num_blocks = max(BOUNCE_BLOCKS, BOUNCE_BYTES // tier.block_bytes)
        buffers[wanted] = page_locked_arena(num_blocks, tier.block_bytes, _gpu(tier))
    buffer: NDArray[np.uint8] = buffers[wanted]
    return buffer

"""Whole blocks as bytes: copy-on-write, staging of moves, filling.

One launch for any number of blocks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument, LayoutMismatch
from pagedkv.kernels.arrays import WIDEST_ACCESS, check_array, check_range
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.params import address, fill
from pagedkv.kernels.variant import variant

THREADS = 256
CHUNK_VECS = 4 * THREADS  # of one CTA at a time (block_list.cuh)
CTAS_PER_SM = 8
POISON = 0xFF  # this byte everywhere is NaN in float32, float16, bfloat16 and both fp8 types
_INDEX_TYPES = {"int32": "int", "int64": "i64"}
_INTEGERS = tuple(_INDEX_TYPES)


def copy_blocks(
    backend: Backend,
    arena: Any,
    pairs: Any,
    *,
    to_arena: Any = None,
    max_ctas: int | None = None,
    debug: bool = False,
    stream: Any = None,
) -> None:
    """Copy whole blocks, all at once: copy-on-write within an arena, or moves to another.

    Parameters
    ----------
    arena, to_arena : [num_blocks, ...], the bytes of a block dense: uint8 rows of a block-major pool, or a layer's K,
        NHD or HND. ``to_arena`` None: the same arena. Device or pinned host memory.
    pairs : int32 or int64 [n, 2], device: (source, destination). A pair with a negative id is skipped. No destination
        twice; within one arena no destination that is also a source.
    max_ctas : CTAs that copy, so that moves leave multiprocessors to others; None for eight per multiprocessor.
    debug : ids are checked on the device too.
    stream : of the backend.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
        Arguments that do not fit; nothing has been copied. Ids are checked if they lie on the host.
    """
    to = arena if to_arena is None else to_arena
    block_bytes = _check_pair(backend, "arena", arena, "arena" if to_arena is None else "to_arena", to)
    check_array(backend, "pairs", pairs, (None, 2), "n, 2", dtype=_INTEGERS)
    sources, destinations = pairs[:, 0], pairs[:, 1]
    check_range("pairs[:, 0]", sources, arena.shape[0] - 1, negative=True)
    check_range("pairs[:, 1]", destinations, to.shape[0] - 1, negative=True)
    if isinstance(pairs, np.ndarray):
        used = pairs[(pairs >= 0).all(axis=1)]
        _check_unique("pairs[:, 1]", used[:, 1])
        both = np.intersect1d(used[:, 0], used[:, 1])
        if to_arena is None and len(both):
            raise InvalidArgument(f"pairs has block {both[0]} as a source and as a destination: copies run at once")
    _copy(backend, arena, sources, to, destinations, len(pairs), block_bytes, max_ctas, debug, stream)


def gather_blocks(
    backend: Backend,
    arena: Any,
    block_ids: Any,
    staging: Any,
    *,
    max_ctas: int | None = None,
    debug: bool = False,
    stream: Any = None,
) -> None:
    """``staging[i] = arena[block_ids[i]]``: gather scattered blocks into one buffer.

    The buffer can then be moved in one piece.

    Parameters
    ----------
    arena : [num_blocks, ...], as in :func:`copy_blocks`.
    block_ids : int32 or int64 [n], device; a negative id leaves its place in the staging buffer as it is.
    staging : [at least n, ...] of as many bytes per block; device or pinned host memory.
    max_ctas, debug, stream : as in :func:`copy_blocks`.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
        Arguments that do not fit; nothing has been copied.
    """
    block_bytes = _check_pair(backend, "arena", arena, "staging", staging)
    _check_ids(backend, block_ids, arena, staging)
    _copy(backend, arena, block_ids, staging, None, len(block_ids), block_bytes, max_ctas, debug, stream)


def scatter_blocks(
    backend: Backend,
    staging: Any,
    arena: Any,
    block_ids: Any,
    *,
    max_ctas: int | None = None,
    debug: bool = False,
    stream: Any = None,
) -> None:
    """``arena[block_ids[i]] = staging[i]``, the inverse of :func:`gather_blocks`.

    Ids must differ; negative ids are skipped.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
        Arguments that do not fit; nothing has been copied.
    """
    block_bytes = _check_pair(backend, "staging", staging, "arena", arena)
    _check_ids(backend, block_ids, arena, staging)
    _check_unique("block_ids", block_ids)
    _copy(backend, staging, None, arena, block_ids, len(block_ids), block_bytes, max_ctas, debug, stream)


def fill_blocks(
    backend: Backend,
    arena: Any,
    block_ids: Any,
    value: int = 0,
    *,
    max_ctas: int | None = None,
    debug: bool = False,
    stream: Any = None,
) -> None:
    """Set every byte of the listed blocks: 0, or :data:`POISON`. Negative ids are skipped.

    Parameters
    ----------
    arena, block_ids, max_ctas, debug, stream : as in :func:`gather_blocks`.
    value : 0..255.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
        Arguments that do not fit; nothing has been written.
    """
    block_bytes = _check_arena(backend, "arena", arena, written=True)
    _check_ids(backend, block_ids, arena, None)
    if not 0 <= value <= 255:
        raise InvalidArgument(f"value is {value}: a byte is 0..255")
    num_blocks = len(block_ids)
    if num_blocks == 0 or block_bytes == 0:
        return
    vec_bytes = math.gcd(WIDEST_ACCESS, block_bytes, address(arena), _block_stride(arena))
    params = fill(
        "FillBlocksParams",
        arena=arena,
        ids=block_ids,
        id_stride=_id_stride(block_ids),
        stride=_block_stride(arena),
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        value=value * 0x01010101,
        arena_blocks=arena.shape[0],
    )
    chosen = variant("fill_blocks", VEC_BYTES=vec_bytes, INDEX_TYPE=_INDEX_TYPES[block_ids.dtype.name], DEBUG=debug)
    grid = _grid(backend, num_blocks, block_bytes // vec_bytes, max_ctas)
    backend.launch(chosen, grid, (THREADS, 1, 1), params, stream=stream)


def _copy(
    backend: Backend,
    source: Any,
    source_ids: Any,
    target: Any,
    target_ids: Any,
    num_blocks: int,
    block_bytes: int,
    max_ctas: int | None,
    debug: bool,
    stream: Any,
) -> None:
    if num_blocks == 0 or block_bytes == 0:
        return
    source_stride, target_stride = _block_stride(source), _block_stride(target)
    vec_bytes = math.gcd(WIDEST_ACCESS, block_bytes, address(source), address(target), source_stride, target_stride)
    ids = target_ids if source_ids is None else source_ids
    params = fill(
        "CopyBlocksParams",
        source=source,
        target=target,
        source_ids=source_ids,
        target_ids=target_ids,
        id_stride=_id_stride(ids),
        source_stride=source_stride,
        target_stride=target_stride,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        source_blocks=source.shape[0],
        target_blocks=target.shape[0],
    )
    chosen = variant("copy_blocks", VEC_BYTES=vec_bytes, INDEX_TYPE=_INDEX_TYPES[ids.dtype.name], DEBUG=debug)
    grid = _grid(backend, num_blocks, block_bytes // vec_bytes, max_ctas)
    backend.launch(chosen, grid, (THREADS, 1, 1), params, stream=stream)


def _grid(backend: Backend, num_blocks: int, block_vecs: int, max_ctas: int | None) -> tuple[int, int, int]:
    most = CTAS_PER_SM * backend.num_sms if max_ctas is None else max_ctas
    if most < 1:
        raise InvalidArgument(f"max_ctas is {max_ctas}: at least 1")
    return (min(num_blocks * -(-block_vecs // CHUNK_VECS), most), 1, 1)


def _check_pair(backend: Backend, from_name: str, source: Any, to_name: str, to: Any) -> int:
    """Raise unless two arenas have blocks of as many bytes; how many."""
    block_bytes = _check_arena(backend, from_name, source, written=False)
    to_bytes = _check_arena(backend, to_name, to, written=True)
    if block_bytes != to_bytes:
        raise LayoutMismatch(f"a block of {from_name} has {block_bytes} bytes, one of {to_name} {to_bytes}")
    return block_bytes


def _check_arena(backend: Backend, name: str, arena: Any, written: bool) -> int:
    """Raise unless blocks are dense and do not overlap; bytes of a block."""
    shape = tuple(getattr(arena, "shape", ())) or (None, None)
    check_array(backend, name, arena, (None,) * max(len(shape), 2), "num_blocks, ...", written=written, host=True)
    expected = arena.dtype.itemsize
    inner = zip(arena.shape[1:], arena.strides[1:], strict=True)
    for length, stride in sorted((pair for pair in inner if pair[0] != 1), key=lambda pair: pair[1]):
        if stride != expected:
            raise LayoutMismatch(f"{name} has strides {arena.strides}: the bytes of a block must be dense")
        expected *= length
    block_bytes = int(expected) if arena.size or not len(arena) else 0
    if len(arena) > 1 and arena.strides[0] < block_bytes:
        raise LayoutMismatch(f"{name} has blocks {arena.strides[0]} bytes apart, of {block_bytes} bytes each")
    return block_bytes


def _check_ids(backend: Backend, block_ids: Any, arena: Any, staging: Any) -> None:
    check_array(backend, "block_ids", block_ids, (None,), "n", dtype=_INTEGERS)
    check_range("block_ids", block_ids, arena.shape[0] - 1, negative=True)
    if staging is not None and len(staging) < len(block_ids):
        raise LayoutMismatch(f"staging holds {len(staging)} blocks: {len(block_ids)} are to be moved")


def _check_unique(name: str, ids: Any) -> None:
    """Raise InvalidArgument if a host array has an id twice."""
    if isinstance(ids, np.ndarray):
        found, counts = np.unique(ids[ids >= 0], return_counts=True)
        if np.any(counts > 1):
            raise InvalidArgument(f"{name} has block {found[counts > 1][0]} more than once: it would be written twice")


def _block_stride(arena: Any) -> int:
    """Bytes from a block to the next; 0 where there is one."""
    return int(arena.strides[0]) if len(arena) > 1 else 0


def _id_stride(ids: Any) -> int:
    return int(ids.strides[0]) // int(ids.dtype.itemsize) if len(ids) > 1 else 0

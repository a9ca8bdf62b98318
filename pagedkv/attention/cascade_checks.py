"""Checks of a cascade's arguments, before any of its levels is made, planned or run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from pagedkv.attention.checks import MAX_INT32, check_indptr, check_int32
from pagedkv.attention.layer_checks import check_places
from pagedkv.attention.option_checks import check_options
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.kernels.backend import Backend
from pagedkv.spec.sizes import whole_number

Level: TypeAlias = tuple[Any, Any, Any]  # block_tables, seq_lens, q_indptr

_ITS_OWN = ("block_size", "max_sequences", "max_tokens", "positions")  # options of a level that the cascade works out


def check_levels(block_sizes: Any, max_groups: Any, max_q_len: Any, options: dict[str, Any]) -> None:
    """Raise unless levels can be made with these sizes and options.

    Raises
    ------
    WrongType, InvalidArgument
    """
    for name, sizes in (("block_sizes", block_sizes), ("max_groups", max_groups)):
        is_array = isinstance(sizes, np.ndarray) and sizes.ndim == 1
        if isinstance(sizes, str | bytes) or not (is_array or isinstance(sizes, Sequence)):
            raise WrongType(f"{name} must be a list with a whole number for each level, not {type(sizes).__name__}")
    if len(block_sizes) < 2 or len(max_groups) != len(block_sizes):
        raise InvalidArgument(
            f"a cascade has at least two levels, each with a block size and max_groups: got block_sizes "
            f"{list(block_sizes)} and max_groups {list(max_groups)}"
        )
    for level, (block_size, groups) in enumerate(zip(block_sizes, max_groups, strict=True)):
        whole_number(block_size, f"block_sizes[{level}]", 1, 256)
        whole_number(groups, f"max_groups[{level}]", 1, MAX_INT32)
    check_options(max_q_len=max_q_len, scale_mode=options.get("scale_mode", "none"))
    whole_number(int(max_groups[-1]) * int(max_q_len), "max_groups of the last level * max_q_len", 1, MAX_INT32)
    own = [name for name in _ITS_OWN if name in options]
    if own:
        raise InvalidArgument(
            f"{' and '.join(own)} must not be given: a cascade's levels have it from block_sizes, max_groups and "
            f"max_q_len"
        )
    if options.get("scale_mode", "none") != "none":
        raise InvalidArgument(
            f"scale_mode = {options['scale_mode']!r}: a cascade's run takes no scales; attend each level of quantised "
            f"KV with a PagedAttention, and merge them by merge_states"
        )


def level_arrays(levels: Any, count: int) -> list[Level]:
    """The arrays of each level, as :meth:`pagedkv.attention.CascadeAttention.plan` takes them.

    Raises
    ------
    WrongType, InvalidArgument
        They are nested in another way, or of another number of levels.
    """
    wanted = "(block_tables, seq_lens, q_indptr)"
    if not isinstance(levels, list | tuple):
        raise WrongType(f"levels must be a list with {wanted} for each level, not {type(levels).__name__}")
    if len(levels) != count:
        raise InvalidArgument(f"this cascade has {count} levels, got {len(levels)}")
    for level, arrays in enumerate(levels):
        _check_tuple(f"levels[{level}]", arrays, wanted, 3)
    return list(levels)


def check_lengths(
    levels: Sequence[Level], max_groups: Sequence[int], max_tokens: int, causal: bool, backend: Backend | None
) -> None:
    """Raise unless the lengths and offsets fit, their values where they are on the host.

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument
    """
    ends = []
    for (_, seq_lens, q_indptr), groups in zip(levels, max_groups, strict=True):
        check_places(backend, seq_lens=seq_lens, q_indptr=q_indptr)
        check_int32("seq_lens", seq_lens, ("num_seqs",))
        if len(seq_lens) > groups:
            raise InvalidArgument(f"{len(seq_lens)} sequences, but this level was made for {groups}")
        if q_indptr is None:
            ends.append(len(seq_lens))
            continue
        check_int32("q_indptr", q_indptr, (len(seq_lens) + 1,))
        if isinstance(q_indptr, np.ndarray):
            check_indptr("q_indptr", q_indptr)
            ends.append(int(q_indptr[-1]))
    if len(set(ends)) > 1:
        raise InvalidArgument(f"the levels have {' and '.join(map(str, ends))} queries: they must have the same")
    if ends and ends[0] > max_tokens:
        raise InvalidArgument(f"{ends[0]} queries, but this was made for {max_tokens}")
    if causal:
        _check_own_keys(*levels[-1][1:])


def _check_own_keys(seq_lens: Any, q_indptr: Any) -> None:
    """Raise InvalidArgument where a query stands before the last key of the levels above.

    Those levels show all their keys to every query, which a causal cascade must not.
    """
    if not isinstance(seq_lens, np.ndarray) or not isinstance(q_indptr, np.ndarray):
        return  # the host does not know them, or every request has one query
    q_lens = np.diff(q_indptr)
    short = np.flatnonzero(q_lens.astype(np.int64) > seq_lens.astype(np.int64) + 1)
    if len(short):
        request = int(short[0])
        raise InvalidArgument(
            f"request {request} has {q_lens[request]} queries and {seq_lens[request]} own keys in the last level: a "
            f"causal cascade takes at most one query more than own keys, as queries further ahead would see keys of "
            f"the levels above that come after them. Move keys of this step's tokens into the last level, or attend "
            f"this request with a PagedAttention"
        )


def level_caches(caches: Any, count: int) -> list[tuple[Any, Any]]:
    """``(k_cache, v_cache)`` of each level, from the caches that a cascade's run takes.

    Raises
    ------
    WrongType, InvalidArgument
        They are nested in another way, or of another number of levels.
    """
    if not isinstance(caches, list | tuple):
        raise WrongType(
            f"caches must be (k_cache, v_cache), or a list with such a pair for each of {count} levels, not "
            f"{type(caches).__name__}"
        )
    if caches and hasattr(caches[0], "shape"):
        caches = [caches] * count
    elif len(caches) != count:
        raise InvalidArgument(f"caches must be one pair or {count} pairs, got {len(caches)}")
    for level, pair in enumerate(caches):
        _check_tuple(f"caches[{level}]", pair, "(k_cache, v_cache)", 2)
    return list(caches)


def _check_tuple(name: str, given: Any, wanted: str, count: int) -> None:
    if not isinstance(given, list | tuple):
        raise WrongType(f"{name} must be {wanted}, not {type(given).__name__}")
    if len(given) != count:
        raise InvalidArgument(f"{name} must be {wanted}, got {len(given)} entries")

"""Attention results of the same queries over disjoint keys, joined on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cpu import _write
from pagedkv.cpu.numbers import apart, source_of
from pagedkv.cpu.threads import num_threads
from pagedkv.errors import LayoutMismatch, WrongType


def merge_states(
    states: NDArray[Any], lses: NDArray[Any], out: NDArray[Any], lse: NDArray[np.float32] | None = None
) -> None:
    """Merge attention results; each counts with the weight e^lse.

    The sums are float64, rounded once.

    Parameters
    ----------
    states : float32, float16, bfloat16 or float64 [num_states, num_tokens, num_heads, head_dim], any strides.
    lses : float32 (others are converted) [num_states, num_tokens, num_heads], natural log-sum-exp; where it is -inf the
        state is not read.
    out : one of the same dtypes [num_tokens, num_heads, head_dim], written; 0 where no state has keys. It may be one
        of the states.
    lse : float32 [num_tokens, num_heads], written if given; -inf where no state has keys.

    Raises
    ------
    WrongType, LayoutMismatch
        Arrays that do not fit. Nothing was written.
    """
    states_name, out_name = source_of("states", states), source_of("out", out)
    if not isinstance(lses, np.ndarray) or lses.dtype.kind not in "fiu":
        raise WrongType(f"lses must be float32, got {getattr(lses, 'dtype', type(lses).__name__)}")
    if states.ndim != 4 or states.shape[:3] != lses.shape or not len(states):
        raise LayoutMismatch(
            f"states must be [num_states, num_tokens, num_heads, head_dim] of one state at least and lses the same "
            f"without the last axis, got {list(states.shape)} and {list(lses.shape)}"
        )
    if not out.dtype.isnative:
        raise WrongType(f"out must be in this machine's byte order, got {out.dtype}")
    if lse is not None and (not isinstance(lse, np.ndarray) or lse.dtype != np.float32):
        raise LayoutMismatch(f"lse must be a float32 array, got {getattr(lse, 'dtype', type(lse).__name__)}")
    for what, array in (("out", out), ("lse", lse)):
        if array is not None and not array.flags.writeable:
            raise LayoutMismatch(f"{what} is read-only")
    if out.shape != states.shape[1:] or (lse is not None and lse.shape != lses.shape[1:]):
        raise LayoutMismatch(f"out must be {list(states.shape[1:])} and lse {list(lses.shape[1:])}")
    states = apart(states, out, lse)
    lses = apart(lses.astype(np.float32, copy=False), out, lse)
    _write.merge(states, lses, out, lse, states_name, out_name, num_threads())

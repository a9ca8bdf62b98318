"""Joins attention results over disjoint keys, wherever the arrays live."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.attention.places import Device, backend_of, home_of
from pagedkv.errors import LayoutMismatch
from pagedkv.kernels import merge
from pagedkv.reference import merge_states as exact_merge


def merge_states(
    states: Any, lses: Any, *, out: Any = None, lse: Any = None, device: Device | None = None, stream: Any = None
) -> Any:
    """Merge attention results of the same queries over disjoint keys; each counts with the weight e^lse.

    Parameters
    ----------
    states : [num_states, num_tokens, num_heads, head_dim]; a state whose lse is -inf is not read.
    lses : float32 [num_states, num_tokens, num_heads], natural log-sum-exp.
    out : [num_tokens, num_heads, head_dim], default a new array of the states' dtype.
    lse : float32 [num_tokens, num_heads], written if given.
    device : default where the arrays live.
    stream : where the kernel runs; the host does not wait.

    Returns
    -------
    out

    Raises
    ------
    WrongType, LayoutMismatch, InvalidArgument, UnsupportedVariant
        Arrays that do not fit. Nothing was written.
    """
    backend = home_of(states=states, lses=lses) if device is None else backend_of(device)
    if states.ndim != 4 or states.shape[:3] != lses.shape:
        raise LayoutMismatch(
            f"states must be [num_states, num_tokens, num_heads, head_dim] and lses the same without the last "
            f"axis, got {list(states.shape)} and {list(lses.shape)}"
        )
    if not len(states):
        raise LayoutMismatch("states must hold at least one state")
    if out is None:
        shape = states.shape[1:]
        out = np.empty(shape, states.dtype) if backend is None else backend.empty(shape, states.dtype, stream=stream)
    if backend is not None:
        merge.merge_states(backend, states.transpose(1, 0, 2, 3), lses.transpose(1, 0, 2), out, lse, stream=stream)
        return out
    for name, array in (("out", out), ("lse", lse)):
        if array is not None and not array.flags.writeable:
            raise LayoutMismatch(f"{name} is read-only")
    if lse is not None and lse.dtype != np.float32:
        raise LayoutMismatch(f"lse must be float32, got {lse.dtype}")
    merged, merged_lse = states[0].astype(np.float64), lses[0]
    for state, state_lse in zip(states[1:], lses[1:], strict=True):
        merged, merged_lse = exact_merge(merged, merged_lse, state.astype(np.float64), state_lse)
    merged = np.where(np.isneginf(merged_lse)[..., None], 0, merged)
    if out.shape != merged.shape or (lse is not None and lse.shape != merged_lse.shape):
        raise LayoutMismatch(f"out must be {list(merged.shape)} and lse {list(merged_lse.shape)}")
    out[...] = merged.astype(out.dtype)
    if lse is not None:
        lse[...] = merged_lse
    return out

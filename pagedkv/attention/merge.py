"""Joins attention results over disjoint keys, wherever the arrays live."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.attention.places import Device, backend_of, home_of
from pagedkv.cpu.merge import merge_states as cpu_merge
from pagedkv.errors import LayoutMismatch
from pagedkv.kernels import merge


def merge_states(
    states: Any, lses: Any, *, out: Any = None, lse: Any = None, device: Device | None = None, stream: Any = None
) -> Any:
    """Merge attention results of the same queries over disjoint keys.

    Each result counts with the weight e^lse.

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
    cpu_merge(states, lses, out, lse)
    return out

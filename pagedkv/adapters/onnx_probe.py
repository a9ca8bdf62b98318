"""Tries an exported decoder: its KV of fixed tokens, cut and put back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.adapters.failures import refusing
from pagedkv.adapters.onnx_context import Context
from pagedkv.adapters.probe import TOLERANCE, Probe
from pagedkv.errors import NotSupported

PROBED, KEPT = 8, 5  # fixed tokens, and how many of them are put back before the others are computed again
_WHAT = "this session"


def probed(context: Context) -> tuple[Probe, int]:
    """Compute the fixed tokens at once; then put some back, and compute the others behind.

    Returns
    -------
    probe : Probe
    vocab : int
        Numbers that are tokens.

    Raises
    ------
    NotSupported
        The second way gives other numbers, or a run fails.
    """
    if context.limit is not None and context.limit < PROBED:
        raise NotSupported(_WHAT, f"it has room for {context.limit} tokens; {PROBED} are computed to try it")
    try:
        with refusing(_WHAT, f"it does not compute {PROBED} tokens as its inputs promise"):
            return _tried(context)
    finally:
        context.cut(0)


def _tried(context: Context) -> tuple[Probe, int]:
    vocab = len(context.run(np.zeros(1, np.int64)))
    ids, others = (1 + 7919 * np.arange(PROBED)) % vocab, (5 + 104729 * np.arange(2 * PROBED)) % vocab
    context.cut(0)
    at_once = context.run(ids)
    k, v = _kv(context, PROBED)
    if not all(np.any(side, axis=(1, 3)).all() for side in (k, v)):
        raise NotSupported(_WHAT, "its present holds nothing at the places of some tokens")
    whole = Probe(k, v)
    context.cut(0)
    context.run(others[: context.limit])  # leaves its KV behind in arrays of a fixed length, where no token may see it
    context.cut(0)
    context.run(np.concatenate((ids[:KEPT], others[: PROBED - KEPT])))  # nor do tokens see those that follow
    kept = _kv(context, KEPT)
    for into, side in zip(context.views(KEPT), kept, strict=True):
        into[...] = side
    context.adopt(KEPT)
    context.run(ids[KEPT:-1])
    behind = context.run(ids[-1:])
    differs = Probe(*_kv(context, PROBED)).difference(whole)
    if not differs and not np.linalg.norm(behind - at_once) <= TOLERANCE * np.linalg.norm(at_once):
        differs = "its logits do"
    if differs:
        raise NotSupported(_WHAT, f"behind KV that is put back it computes other numbers: {differs}")
    return whole, vocab


def _kv(context: Context, length: int) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Copies of K and V of the first tokens [num_layers, heads, length, dim]."""
    k, v = (np.stack(side) for side in context.kv(0, length))
    return k, v

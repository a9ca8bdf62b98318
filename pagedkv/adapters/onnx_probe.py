"""Tries an exported decoder: its KV of fixed tokens, cut and put back."""

from __future__ import annotations

import numpy as np

from pagedkv.adapters.onnx_context import Context
from pagedkv.adapters.probe import TOLERANCE, Probe
from pagedkv.errors import NotSupported
from pagedkv.observe.callbacks import is_interrupt

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
        return _tried(context)
    except NotSupported:
        raise
    except Exception as problem:
        if is_interrupt(problem):
            raise
        raise NotSupported(_WHAT, f"it does not compute {PROBED} tokens as its inputs promise: {problem}") from problem
    finally:
        context.cut(0)


def _tried(context: Context) -> tuple[Probe, int]:
    vocab = len(context.run(np.zeros(1, np.int64)))
    ids = (1 + 7919 * np.arange(PROBED)) % vocab
    context.cut(0)
    at_once = context.run(ids)
    k, v = (np.stack(side) for side in context.kv(0, PROBED))
    whole = Probe(k, v)
    for into, side in zip(context.views(KEPT), (k, v), strict=True):
        into[...] = side[:, :, :KEPT]
    context.adopt(KEPT)
    behind = context.run(ids[KEPT:])
    again = Probe(*(np.stack(side) for side in context.kv(0, PROBED)))
    differs = again.difference(whole)
    if not differs and not np.linalg.norm(behind - at_once) <= TOLERANCE * np.linalg.norm(at_once):
        differs = "its logits do"
    if differs:
        raise NotSupported(_WHAT, f"behind KV that is put back it computes other numbers: {differs}")
    return whole, vocab

"""Arrivals and ends of requests in one order, for a replay and its bounds.

Requests arrive in the order of the trace; a time stamp below an earlier one counts as that one. A request is over
``output_tokens * token_ms`` after its arrival. Requests that are over at or before an arrival leave first, in order
of their ends, and of arrival where the ends are equal.
"""

from __future__ import annotations

import math

import numpy as np

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.replay.trace import Int32, Trace

TOKEN_MS = 20.0  # default
MAX_TOKEN_MS = 1e6


def arrivals_and_ends(trace: Trace, token_ms: float) -> Int32:
    """int32 [2 * num_requests]: ``i`` where request i arrives, ``~i`` where it is over."""
    n = trace.num_requests
    arrival = np.maximum.accumulate(trace.t_ms).astype(np.float64)
    time = np.concatenate((arrival, arrival + token_ms * trace.output_tokens))
    request = np.tile(np.arange(n, dtype=np.int32), 2)
    ends = np.repeat((False, True), n)
    order = np.lexsort((ends, request, time))
    return np.where(ends, ~request, request)[order]


def require_token_ms(token_ms: float) -> None:
    """A number of milliseconds that a token can take.

    Raises
    ------
    InvalidArgument, WrongType
    """
    if isinstance(token_ms, bool) or not isinstance(token_ms, int | float):
        raise WrongType(f"generating: milliseconds per output token are a number, not {type(token_ms).__name__}")
    if not (math.isfinite(token_ms) and 0 < token_ms <= MAX_TOKEN_MS):
        raise InvalidArgument(f"generating: {token_ms} milliseconds per output token are not in 0..{MAX_TOKEN_MS:,.0f}")


def require_outputs(trace: Trace) -> None:
    """The trace says how long answers were.

    Raises
    ------
    InvalidArgument : every output length is 0.
    """
    if not trace.output_tokens.any():
        raise InvalidArgument(
            f"generating: {trace.name} has no output lengths (all {trace.num_requests} are 0), so no request takes any "
            "time; replay it without, or take a trace with output lengths"
        )

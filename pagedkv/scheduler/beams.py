"""The arithmetic of one beam-search step: scores in, the best continuations out.

Knows no cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from pagedkv.errors import InvalidArgument
from pagedkv.spec.sizes import whole_number


def expand_beams(
    scores: ArrayLike, log_probs: ArrayLike, width: int, stop_tokens: tuple[int, ...] = ()
) -> tuple[list[list[int]], list[list[float]]]:
    """The continuations that a beam search keeps.

    The `width` best that go on, and the stopping ones among them.

    Parameters
    ----------
    scores : float [num_beams]
        Summed log-probability of each beam.
    log_probs : float [num_beams, vocabulary]
        Of each beam's next token.
    width : beams wanted.
    stop_tokens : tokens that end a beam; they take no place among the `width`.

    Returns
    -------
    tokens : for each beam, the tokens it goes on with, best first: the entries for :meth:`Scheduler.report`.
    scores : the same, their scores.

    Raises
    ------
    InvalidArgument
        The shapes do not fit, or a number is NaN.
    """
    width = whole_number(width, "width", 1, 1 << 20)
    so_far, ahead = np.asarray(scores, np.float64), np.asarray(log_probs, np.float64)
    if ahead.ndim != 2 or not ahead.size or so_far.shape != ahead.shape[:1]:
        raise InvalidArgument(
            f"scores [num_beams] and log_probs [num_beams, vocabulary] are needed, got {so_far.shape} and {ahead.shape}"
        )
    totals = so_far[:, None] + ahead
    if np.isnan(totals).any():
        raise InvalidArgument("a log-probability is NaN: the model's step went wrong")
    num_beams, vocabulary = totals.shape
    wanted = min(totals.size, width + num_beams * len(stop_tokens))
    flat = totals.ravel()
    best = np.argpartition(-flat, wanted - 1)[:wanted]
    best = best[np.lexsort((best, -flat[best]))]
    tokens: list[list[int]] = [[] for _ in range(num_beams)]
    kept: list[list[float]] = [[] for _ in range(num_beams)]
    going_on = 0
    for index in best.tolist():
        beam, token = divmod(index, vocabulary)
        tokens[beam].append(token)
        kept[beam].append(float(flat[index]))
        going_on += token not in stop_tokens
        if going_on == width:
            break
    return tokens, kept

"""Online softmax attention over keys that come piece by piece.

The state is (o, m, d), with an update and a merge.

For the keys seen so far with scores ``s_j`` and values ``v_j``::

    m = max_j s_j        d = sum_j exp(s_j - m)        o = sum_j exp(s_j - m) v_j

More keys, or another state over other keys, raise ``m`` and scale the old ``d`` and ``o`` by
``exp(m_old - m_new)``. The result is ``o / d`` and the natural log-sum-exp ``lse = m + ln d``.

Sources: M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax* (2018), arXiv:1805.02867,
algorithm 3 and section 3.1 (the merge is associative); M. N. Rabe, C. Staats, *Self-attention does not need
O(n^2) memory* (2021), arXiv:2112.05682; T. Dao et al., *FlashAttention* (2022), arXiv:2205.14135,
algorithm 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .paging import Floats

# Infinite or NaN inputs give infinite or NaN outputs, without a warning on the way.
_quiet = np.errstate(over="ignore", invalid="ignore", under="ignore")


class OnlineState:
    """Attention of ``rows`` queries for each KV head over the keys seen so far.

    Attributes
    ----------
    o : float64 [num_kv_heads, rows, head_dim_v], sum of values, not divided by ``d`` yet.
    m : float64 [num_kv_heads, rows], largest score; -inf while there was no key.
    d : float64 [num_kv_heads, rows], sum of ``exp(score - m)``.
    """

    __slots__ = ("d", "m", "o")

    def __init__(self, num_kv_heads: int, rows: int, head_dim_v: int) -> None:
        self.o: Floats = np.zeros((num_kv_heads, rows, head_dim_v))
        self.m: Floats = np.full((num_kv_heads, rows), -np.inf)
        self.d: Floats = np.zeros((num_kv_heads, rows))

    @_quiet
    def update(self, scores: Floats, values: Floats) -> None:
        """Takes in more keys.

        Parameters
        ----------
        scores : float64 [num_kv_heads, rows, num_keys]; -inf where a row does not see a key.
        values : float64 [num_kv_heads, num_keys, head_dim_v].
        """
        piece = OnlineState(*self.o.shape)
        piece.m = scores.max(axis=-1, initial=-np.inf)
        weights = exp_above(scores, piece.m[..., None])
        piece.d = weights.sum(axis=-1)
        piece.o = weighted_sum(weights, values)
        self.merge(piece)

    @_quiet
    def add_sink(self, logits: Floats) -> None:
        """Add a key without a value.

        float64 [num_kv_heads, rows], its logit; -inf where a row has none.
        """
        piece = OnlineState(*self.o.shape)
        piece.m, piece.d = logits, np.ones_like(logits)
        self.merge(piece)

    @_quiet
    def merge(self, other: OnlineState) -> None:
        """Takes in the keys that another state has seen."""
        m = np.maximum(self.m, other.m)
        mine, theirs = exp_above(self.m, m), exp_above(other.m, m)
        self.d = self.d * mine + other.d * theirs
        self.o = self.o * mine[..., None] + other.o * theirs[..., None]
        self.m = m

    def finish(self) -> tuple[Floats, Floats]:
        """``(o, lse)``: output and natural log-sum-exp.

        Without keys they are 0 and -inf.
        """
        return divide_out(self.o, self.m, self.d)


@_quiet
def merge_states(
    o_a: NDArray[Any], lse_a: ArrayLike, o_b: NDArray[Any], lse_b: ArrayLike
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Attention over two disjoint sets of keys, from the attention over each.

    Parameters
    ----------
    o_a, o_b : [..., head_dim_v], outputs.
    lse_a, lse_b : [...], natural log-sum-exp; -inf where a side has no keys, and its output does not matter.
        Where there are sinks, one side alone has taken them in.

    Returns
    -------
    o : [..., head_dim_v], dtype of ``o_a``.
    lse : float32 [...].

    Raises
    ------
    ValueError
        Shapes that do not fit together.
    """
    a, b = np.asarray(lse_a, dtype=np.float64), np.asarray(lse_b, dtype=np.float64)
    if o_a.shape != o_b.shape or a.shape != b.shape or o_a.shape[:-1] != a.shape:
        raise ValueError(f"o {o_a.shape} and {o_b.shape}, lse {a.shape} and {b.shape} do not fit together")
    m = np.maximum(a, b)
    weight_a, weight_b = exp_above(a, m), exp_above(b, m)
    # A side without keys has weight 0: whatever lies in its output, NaN included, stays out of the sum.
    part_a = np.where(weight_a[..., None] == 0, 0.0, o_a.astype(np.float64) * weight_a[..., None])
    part_b = np.where(weight_b[..., None] == 0, 0.0, o_b.astype(np.float64) * weight_b[..., None])
    o, lse = divide_out(part_a + part_b, m, weight_a + weight_b)
    return o.astype(o_a.dtype), lse.astype(np.float32)


def exp_above(scores: Floats, m: Floats) -> Floats:
    """``exp(scores - m)``, and 0 where ``m`` is -inf: without a key there is nothing to weigh."""
    return np.exp(scores - np.where(m == -np.inf, 0.0, m))


def weighted_sum(weights: Floats, values: Floats) -> Floats:
    """``weights @ values``, where a weight of exactly 0 silences an infinite or NaN value.

    A row does not see the keys that other rows see; what lies there must not reach it.

    Parameters
    ----------
    weights : float64 [heads, rows, keys].
    values : float64 [heads, keys, head_dim_v].
    """
    finite = np.isfinite(values)
    total: Floats = weights @ np.where(finite, values, 0.0)
    for key in np.flatnonzero(~finite.all(axis=(0, 2))):
        weight = weights[:, :, key, None]
        value = np.where(finite[:, key], 0.0, values[:, key])[:, None, :]
        seen = np.where(weight == 0, 0.0, value)
        total += seen * np.where(weight == 0, 1.0, weight)
    return total


def divide_out(o: Floats, m: Floats, d: Floats) -> tuple[Floats, Floats]:
    """``(o / d, m + ln d)``, or ``(0, -inf)`` where ``d`` is 0."""
    empty = d == 0
    whole = np.where(empty, 1.0, d)
    return np.where(empty[..., None], 0.0, o / whole[..., None]), np.where(empty, -np.inf, m + np.log(whole))

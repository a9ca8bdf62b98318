"""From queries and keys to scores: scale, soft cap, ALiBi, mask and sinks.

Sinks are logits that belong to no key.

Sources: O. Press et al., *Train Short, Test Long* (2022), arXiv:2108.12409 (ALiBi); OpenAI, *gpt-oss-120b & gpt-oss-20b
Model Card* (2025), arXiv:2508.10925 (a learned bias in the denominator of the softmax).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from .paging import Floats, PagedBatch
from .sight import Sight


class Scoring:
    """How a call's scores come about.

    Parameters
    ----------
    batch : the call's arrays.
    softmax_scale, soft_cap, alibi_slopes, sinks : of :func:`pagedkv.reference.paged_attention`.

    Raises
    ------
    TypeError, ValueError
        Slopes or sinks that are no floats for each query head; numbers that are not finite.
    """

    def __init__(
        self,
        batch: PagedBatch,
        softmax_scale: float | None,
        soft_cap: float | None,
        alibi_slopes: ArrayLike | None,
        sinks: ArrayLike | None,
    ) -> None:
        self.group_size = batch.group_size
        self.scale = batch.q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
        self.soft_cap = soft_cap
        if not math.isfinite(self.scale):
            raise ValueError(f"softmax_scale must be finite, got {softmax_scale}")
        if soft_cap is not None and not 0 < soft_cap < math.inf:
            raise ValueError(f"soft_cap must be positive and finite, got {soft_cap}")
        self.slopes = None if alibi_slopes is None else _per_head(batch, "alibi_slopes", alibi_slopes)
        if self.slopes is not None and not np.isfinite(self.slopes).all():
            raise ValueError("alibi_slopes must be finite")
        none = np.full(batch.q.shape[1], -np.inf)
        self.sinks = _per_head(batch, "sinks", none if sinks is None else sinks)
        if not (self.sinks < np.inf).all():
            raise ValueError("sinks must be finite, or -inf for a head without one")

    def __call__(self, queries: Floats, keys: Floats, sight: Sight, low: int) -> Floats:
        """Scores, -inf where a query does not see a key.

        float64 [num_kv_heads, q_len * group_size, num_keys].

        ``keys`` are those at positions ``low, low + 1, ...``; ``sight`` is that of the queries.
        """
        high = low + keys.shape[1]
        scores: Floats = self.scale * (queries @ keys.transpose(0, 2, 1))
        if self.soft_cap is not None:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        if self.slopes is not None:
            away = np.arange(low, high) - np.repeat(sight.position, self.group_size)[:, None]
            scores = scores + self._rows(self.slopes, sight)[..., None] * away
        return np.where(np.repeat(sight.sees(low, high), self.group_size, axis=0), scores, -np.inf)

    def sink(self, sight: Sight) -> Floats:
        """Each row's logit without a key; -inf without sinks.

        float64 [num_kv_heads, q_len * group_size].
        """
        return self._rows(self.sinks, sight)

    def _rows(self, per_head: Floats, sight: Sight) -> Floats:
        """Repeat a value per head for each query.

        [num_kv_heads, group_size] to [..., q_len * group_size].
        """
        return np.tile(per_head, (1, len(sight.position)))


def _per_head(batch: PagedBatch, name: str, values: ArrayLike) -> Floats:
    """One number for each query head, float64 [num_kv_heads, group_size]."""
    array = np.asarray(values)
    if array.dtype.kind in "biucOSUmM":
        raise TypeError(f"{name} must be floating point, not {array.dtype}")
    if array.shape != batch.q.shape[1:2]:
        raise ValueError(f"{name} must be one for each of {batch.q.shape[1]} query heads, got shape {array.shape}")
    return array.astype(np.float64).reshape(-1, batch.group_size)

"""Where the queries of a cascade stand in each of its levels.

A level's keys stand before those of the next one. So a query stands behind a level's first key by the keys of the
level and by as much as it stands behind the first key of the next level; in the last level, the last query of a
request stands at its last key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention.cascade_checks import Level
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.query_positions import place_queries


class LevelPositions:
    """Positions of a batch's queries by level, on the device from the lengths there.

    Parameters
    ----------
    backend : of the levels; None for NumPy arrays.
    max_groups : sequences of each level at most.
    max_tokens : queries of a batch at most.
    """

    def __init__(self, backend: Backend | None, max_groups: Sequence[int], max_tokens: int) -> None:
        self._backend = backend
        if backend is not None:
            self._positions = [backend.empty((max_tokens,), np.int32) for _ in max_groups]
            self._spans = [backend.empty((groups, 2), np.int32) for groups in max_groups]

    def arrays(self, levels: Sequence[Level]) -> list[tuple[Any, Any]]:
        """``q_positions`` and ``position_spans`` by level, as a PagedAttention's plan takes them.

        Of NumPy arrays they are computed, of others they are written by :meth:`launch`.
        """
        if self._backend is None:
            return _in_numpy(levels)
        return [
            (positions, spans[: len(seq_lens)])
            for (_, seq_lens, _), positions, spans in zip(levels, self._positions, self._spans, strict=True)
        ]

    def launch(self, levels: Sequence[Level], stream: Any) -> None:
        """Compute the positions of a batch on the backend's device."""
        assert self._backend is not None
        below = None
        for (_, seq_lens, q_indptr), positions, spans in reversed([*zip(levels, self._positions, self._spans)]):
            place_queries(self._backend, seq_lens, q_indptr, below, positions, spans, stream=stream)
            below = positions


def _in_numpy(levels: Sequence[Level]) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    below: NDArray[np.int32] | None = None
    for _, seq_lens, q_indptr in reversed(levels):
        indptr = np.arange(len(seq_lens) + 1, dtype=np.int32) if q_indptr is None else q_indptr
        counts = np.diff(indptr)
        if below is None:
            below = np.arange(indptr[-1], dtype=np.int32) - np.repeat(indptr[1:], counts)
        below = below + np.repeat(seq_lens, counts)
        spans = np.zeros((len(counts), 2), np.int32)
        asked = np.flatnonzero(counts)
        if len(asked):
            for side, least_or_greatest in enumerate((np.minimum, np.maximum)):
                spans[asked, side] = least_or_greatest.reduceat(below, indptr[asked])
        found.append((below, spans))
    return found[::-1]

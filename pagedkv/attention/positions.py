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

from pagedkv.attention.checks import check_indptr, check_int32
from pagedkv.attention.layer_checks import check_places
from pagedkv.errors import InvalidArgument
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
        self._backend, self._max_groups, self._max_tokens = backend, tuple(max_groups), max_tokens
        if backend is not None:
            self._positions = [backend.empty((max_tokens,), np.int32) for _ in max_groups]
            self._spans = [backend.empty((groups, 2), np.int32) for groups in max_groups]

    def update(self, levels: Sequence[tuple[Any, Any, Any]], stream: Any) -> list[dict[str, Any]]:
        """Compute the positions of a batch.

        Parameters
        ----------
        levels : as :meth:`pagedkv.attention.CascadeAttention.plan` takes them.

        Returns
        -------
        By level ``q_positions`` and ``position_spans``, as :meth:`pagedkv.attention.PagedAttention.plan` takes them.

        Raises
        ------
        InvalidArgument, LayoutMismatch, WrongType
            Lengths or offsets do not fit. Nothing was launched.
        """
        for (_, seq_lens, q_indptr), groups in zip(levels, self._max_groups, strict=True):
            self._check(seq_lens, q_indptr, groups)
        ends = [len(lens) if q_indptr is None else q_indptr[-1] for _, lens, q_indptr in levels if _is_known(q_indptr)]
        if len(set(ends)) > 1:
            raise InvalidArgument(f"the levels have {' and '.join(map(str, ends))} queries: they must have the same")
        if self._backend is None:
            return _in_numpy(levels)
        below = None
        for (_, seq_lens, q_indptr), positions, spans in reversed([*zip(levels, self._positions, self._spans)]):
            place_queries(self._backend, seq_lens, q_indptr, below, positions, spans, stream=stream)
            below = positions
        return [
            {"q_positions": positions, "position_spans": spans[: len(seq_lens)]}
            for (_, seq_lens, _), positions, spans in zip(levels, self._positions, self._spans, strict=True)
        ]

    def _check(self, seq_lens: Any, q_indptr: Any, groups: int) -> None:
        """Raise unless a level's arrays fit, and their values where they are on the host."""
        check_int32("seq_lens", seq_lens, ("num_seqs",))
        if len(seq_lens) > groups:
            raise InvalidArgument(f"{len(seq_lens)} sequences, but this level was made for {groups}")
        if q_indptr is not None:
            check_int32("q_indptr", q_indptr, (len(seq_lens) + 1,))
        if self._backend is not None:
            check_places(self._backend, seq_lens=seq_lens, q_indptr=q_indptr)
        if isinstance(q_indptr, np.ndarray):
            check_indptr("q_indptr", q_indptr)
            if q_indptr[-1] > self._max_tokens:
                raise InvalidArgument(f"{q_indptr[-1]} queries, but this was made for {self._max_tokens}")


def _is_known(q_indptr: Any) -> bool:
    """Whether the host knows how many queries there are."""
    return q_indptr is None or isinstance(q_indptr, np.ndarray)


def _in_numpy(levels: Sequence[tuple[Any, Any, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
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
        found.append({"q_positions": below, "position_spans": spans})
    return found[::-1]

"""Moves that the dispatcher has taken, between their begin and their end."""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.block_pool import BlockPool
from pagedkv._core.dispatch import Taken
from pagedkv.cache.storage import Handle
from pagedkv.errors import WrongType
from pagedkv.observe.hooks import Off, Running

MOST_UNANSWERED = 100  # times that there is no memory to ask a ticket, before it is given up


@dataclass(eq=False, slots=True)
class Job:
    """Moves in one direction that were taken together, between their begin and their end.

    Attributes
    ----------
    taken : keeps the moves from being given up.
    span : passed to the hooks, in `context`.
    by_group : whether some moves may be of pages of short groups.
    tickets : those whose end the core does not know yet, with their moves.
    arrived : blocks so far, without the pages of short groups.
    arrived_pages : pages of short groups so far.
    unanswered : how often a ticket could not be asked whether it is settled.
    """

    taken: Taken
    span: Running | Off
    context: contextvars.Context | None
    by_group: bool
    tickets: list[tuple[Handle, NDArray[np.void]]] = field(default_factory=list)
    arrived: int = 0
    arrived_pages: int = 0
    unanswered: int = 0

    def __post_init__(self) -> None:
        self.span.decided_in(self.context)

    @staticmethod
    def decided(moves: NDArray[np.void], by_group: bool) -> dict[str, int]:
        """Counts that a span begins with; `pages` only where there are groups of layers."""
        if not by_group:
            return {"blocks": len(moves)}
        blocks = int(np.count_nonzero(moves["lane"] == 0))
        return {"blocks": blocks, "pages": len(moves) - blocks}

    def arrive(self, moves: NDArray[np.void], arrived: NDArray[np.bool_]) -> None:
        """Count those of these that have arrived, bool [n]."""
        num_arrived = int(np.count_nonzero(arrived))
        blocks = int(np.count_nonzero(arrived & (moves["lane"] == 0))) if self.by_group else num_arrived
        self.arrived += blocks
        self.arrived_pages += num_arrived - blocks

    def told(self) -> dict[str, int]:
        """Counts that the span ends with."""
        pages = {"moved_pages": self.arrived_pages} if self.by_group else {}
        return {"moved_blocks": self.arrived, **pages}


def left_of(ticket: Handle, moves: NDArray[np.void]) -> NDArray[np.bool_]:
    """The moves whose memory a call that hangs may still touch.

    Raises
    ------
    WrongType
        The handle's answer is not one bool for each move.
    """
    left: Any = ticket.left()
    if not isinstance(left, np.ndarray) or left.dtype != np.bool_ or left.shape != moves.shape:
        raise WrongType(f"left() of a {type(ticket).__name__} must be bool [{len(moves)}], one for each move")
    return left


def without_ticket(moves: NDArray[np.void], jobs: list[Job]) -> NDArray[np.void]:
    """Those of these moves whose transfers no job has a ticket for."""
    known = [part["transfer"] for job in jobs for _, part in job.tickets]
    return moves[~np.isin(moves["transfer"], np.concatenate(known))] if known else moves


def transfers_of(moves: NDArray[np.void]) -> Iterator[NDArray[np.void]]:
    """Moves transfer by transfer, in their order; the moves of one stand together."""
    return _parts(moves, "transfer")


def groups_of(moves: NDArray[np.void]) -> Iterator[NDArray[np.void]]:
    """Moves group by group, in their order.

    A group is transfers to a colder tier that are of use together. The last one is its purpose; those before it
    bring the missing part of its prefix.
    """
    return _parts(moves, "group")


def _parts(moves: NDArray[np.void], field: str) -> Iterator[NDArray[np.void]]:
    edges = np.flatnonzero(np.diff(moves[field])) + 1
    if len(moves):
        for a, b in itertools.pairwise([0, *edges.tolist(), len(moves)]):
            yield moves[a:b]


def destinations_of(
    moves: NDArray[np.void], pools: Sequence[BlockPool | None]
) -> Iterator[tuple[BlockPool, NDArray[np.int32]]]:
    """The blocks that moves fill, pool by pool."""
    for tier, lane in sorted(set(zip(moves["dst_tier"].tolist(), moves["lane"].tolist(), strict=True))):
        pool = pools[tier]
        assert pool is not None
        if lane:
            assert pool.extents is not None
            pool = pool.extents.pools[lane]
        chosen = (moves["dst_tier"] == tier) & (moves["lane"] == lane)
        yield pool, np.ascontiguousarray(moves["dst_block"][chosen])

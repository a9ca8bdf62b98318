"""RankMover: a mover whose moves every rank carries out on its part of the blocks.

A transfer has arrived if it has at all ranks. It failed without a word against its source where every rank that failed
says so, was lost, or did not answer before the transfer's deadline. Blocks that any rank left in a call that hangs are
kept until that rank says that the call is back, or is lost.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ClosedError, InvalidArgument, TierError
from pagedkv.threads.monitor import Monitor
from pagedkv.tiers.base import Name, OpenTier, Record
from pagedkv.tiers.mover.parts import check_moves, directions, stored_moves
from pagedkv.tiers.mover.ticket import Ticket
from pagedkv.tiers.mover.work_queue import WATCH_S, DirectionStats
from pagedkv.tiers.ranks.frames import Answer, Kind, pack_moves
from pagedkv.tiers.ranks.group import Call, Group
from pagedkv.tiers.ranks.wire import MOST_BYTES

GRACE_S = 0.05  # after a deadline: the ranks give their moves up at the deadline, and say so


@dataclass(frozen=True, slots=True)
class FarMemory:
    """A tier of memory in the ranks' processes."""

    name: str
    num_blocks: int
    block_bytes: int
    arena: Any = None
    gpu: int | None = None

    def close(self) -> None:
        """It is the ranks'."""


@dataclass(frozen=True, slots=True)
class FarStore:
    """A store in the ranks' processes."""

    name: str
    num_blocks: int
    block_bytes: int

    def close(self) -> None:
        """It is the ranks'."""


class _Sent:
    """Moves that the ranks were told of."""

    def __init__(self, moves: NDArray[np.void], ticket: Ticket) -> None:
        self.moves, self.ticket = moves, ticket
        self.is_over = False  # its ticket is settled, or about to be
        self.given_up = False  # before all ranks had answered
        self.left = np.zeros(len(moves), np.int32)  # by move: ranks whose call for it hangs
        self.by_rank: dict[int, NDArray[np.bool_]] = {}


class RankMover:
    """Moves blocks between tiers at all ranks, with :class:`pagedkv.tiers.Mover`'s interface.

    Parameters
    ----------
    group : Group
    tiers : mapping of tier number to tier
        `FarMemory` or `FarStore`; `block_bytes` are those of all ranks together.
    describe : callable, optional
        As the mover's.
    """

    is_synchronous = False

    def __init__(
        self,
        group: Group,
        tiers: Mapping[int, OpenTier],
        describe: Callable[[NDArray[np.void]], list[Record | Name]] | None = None,
    ) -> None:
        self._group, self._tiers, self._describe = group, dict(tiers), describe
        self._sent: dict[int, _Sent] = {}  # under way, by the id of their ticket
        self._changed = Monitor()
        self._stats: dict[tuple[int, int], DirectionStats] = {}
        self._is_closed = False
        self._pid = os.getpid()
        weakref.finalize(self, group.stop).atexit = False

    def submit(
        self,
        moves: NDArray[np.void],
        *,
        deadline_s: float | None = None,
        on_done: Callable[[Ticket], object] | None = None,
        here: bool = False,
        before: Callable[[Ticket], object] | None = None,
        records: Sequence[Record | Name] | None = None,
    ) -> Ticket:
        """Tell all ranks of moves; it waits for none of them.

        Parameters and errors are those of :meth:`pagedkv.tiers.Mover.submit`; `here` changes nothing.

        Raises
        ------
        WrongType, InvalidArgument, ClosedError, TierError
        """
        if self._pid != os.getpid():
            raise TierError(f"this mover belongs to process {self._pid}; a forked child must make its own")
        if self._is_closed:
            raise ClosedError("the mover is closed")
        check_moves(moves, self._tiers)
        named = self._records(moves, records)
        payload = pack_moves(moves, deadline_s, named)
        if len(payload) > MOST_BYTES:
            raise InvalidArgument(f"{len(moves)} moves at once are too many for one message to the ranks")
        deadline = None if deadline_s is None else self._group.now() + deadline_s
        ticket = Ticket(moves["transfer"].astype(np.int64), min(1, len(moves)), deadline, on_done, self.watch)
        if before is not None:
            before(ticket)
        if not len(moves):
            ticket.settle()
            return ticket
        sent = _Sent(moves.copy(), ticket)
        with self._changed:
            self._sent[id(ticket)] = sent
        try:
            self._group.call(Kind.MOVES, payload, partial(self._answered, sent), partial(self._came_back, sent))
        except BaseException:
            with self._changed:
                self._sent.pop(id(ticket), None)
            raise
        return ticket

    def _records(self, moves: NDArray[np.void], given: Sequence[Record | Name] | None) -> list[Record]:
        """One for each move to or from a store, in order."""
        stored = stored_moves(moves, self._tiers)
        if not stored.size:
            return []
        if given is None and self._describe is None:
            raise InvalidArgument("moves to or from a store need a mover made with describe=")
        described = list(given) if given is not None else self._describe(moves[stored]) if self._describe else []
        if len(described) != stored.size:
            raise InvalidArgument(f"{len(described)} records for {stored.size} moves to or from a store")
        records = [record for record in described if isinstance(record, Record)]
        if len(records) != len(described):
            raise InvalidArgument("ranks have no remote store: each move to or from a store needs a Record")
        return records

    def watch(self, ticket: Ticket) -> float:
        """Give up a ticket whose deadline is over; seconds after which to look again."""
        if ticket.deadline is None:
            return WATCH_S
        left = ticket.deadline + GRACE_S - self._group.now()
        if left > 0:
            return min(WATCH_S, left)
        with self._changed:
            sent = self._sent.get(id(ticket))
            if sent is None or sent.is_over:
                return WATCH_S
            sent.is_over = sent.given_up = True
            self._count(sent, np.zeros(len(sent.moves), np.bool_), "left")
            ticket.leave(np.arange(len(sent.moves)), reading=True)
        ticket.one_less()
        return WATCH_S

    def _answered(self, sent: _Sent, call: Call) -> None:
        """All ranks have answered or are lost. In the loop's thread."""
        ids, index = np.unique(sent.moves["transfer"], return_inverse=True)
        ok, refuted = np.ones(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
        with self._changed:
            for rank, answer in call.answers.items():
                if answer is None or len(answer.ok) != len(ids):
                    ok[:] = False
                    continue
                ok &= answer.ok
                refuted |= ~answer.ok & answer.tried
                self._keep_left(sent, rank, answer)
            arrived, tried = ok[index.reshape(-1)], refuted[index.reshape(-1)]
            self._sent.pop(id(sent.ticket), None)
            was_given_up, sent.is_over = sent.given_up, True
            if not was_given_up:
                self._count(sent, arrived, "failed")
            self._changed.notify_all()
        left = sent.left > 0
        if was_given_up:
            back = np.flatnonzero(~left)
            if len(back):
                sent.ticket.part_done(back, None)
            return
        sent.ticket.not_tried(np.flatnonzero(~arrived & ~tried))
        if left.any():
            sent.ticket.leave(np.flatnonzero(left), reading=False)
        rest = np.flatnonzero(~left)
        if len(rest):
            sent.ticket.part_done(rest, arrived[rest])
        else:
            sent.ticket.one_less()

    def _keep_left(self, sent: _Sent, rank: int, answer: Answer) -> None:
        """Count the moves that a rank has left in a call that hangs."""
        chosen = answer.left[(answer.left >= 0) & (answer.left < len(sent.moves))]
        mine = np.zeros(len(sent.moves), np.bool_)
        mine[chosen] = True
        sent.by_rank[rank] = mine
        sent.left += mine

    def _came_back(self, sent: _Sent, rank: int, answer: Answer | None) -> None:
        """A rank is out of moves that it had left, or is lost. In the loop's thread."""
        mine = sent.by_rank.get(rank)
        if mine is None:
            return
        back = mine.copy()
        if answer is not None:
            named = np.zeros(len(mine), np.bool_)
            named[answer.left[(answer.left >= 0) & (answer.left < len(mine))]] = True
            back &= named
        mine &= ~back
        sent.left -= back
        free = np.flatnonzero(back & (sent.left == 0))
        if len(free):
            sent.ticket.part_done(free, None)

    def _count(self, sent: _Sent, arrived: NDArray[np.bool_], why: str) -> None:
        """Count moves by direction; those that did not arrive as `why`. The caller holds the lock."""
        for src, dst in directions(sent.moves):
            chosen = (sent.moves["src_tier"] == src) & (sent.moves["dst_tier"] == dst)
            counts = self._stats.setdefault((src, dst), DirectionStats())
            num_arrived = int(np.count_nonzero(arrived & chosen))
            counts.blocks += num_arrived
            counts.bytes += num_arrived * self.block_bytes
            setattr(counts, why, getattr(counts, why) + int(np.count_nonzero(chosen)) - num_arrived)

    def stats(self) -> dict[tuple[int, int], DirectionStats]:
        """Counters by (source tier, destination tier); a copy. Bytes are those of all ranks."""
        with self._changed:
            return {pair: replace(counts) for pair, counts in self._stats.items()}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, at all ranks together."""
        return next(iter(self._tiers.values())).block_bytes

    def close(self) -> None:
        """Take no further moves, and wait for those under way. A second call does nothing."""
        if self._pid != os.getpid():
            return
        self._is_closed = True
        while self._sent:
            for sent in list(self._sent.values()):
                self.watch(sent.ticket)
            with self._changed:
                self._changed.wait_for(lambda: all(sent.is_over for sent in self._sent.values()), 0.05)
                if all(sent.is_over for sent in self._sent.values()):
                    return

"""Sends committed and reused blocks to the remote store.

Other processes find them there.

The core hands out one path after the other (`own_unsent`), and callers ask for the paths that they publish; the
dispatcher's thread has the mover send them. No other thread does, so an interrupted caller leaves no send behind. A
path is owned until the call into the store has returned, also where nothing waits for that any more: a block that is
being sent stays as it is. A bounded number of bytes is owned like this at a time. A block that could not be sent is
asked for again with its next use.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.dispatch import Dispatch
from pagedkv._core.held import Hold, Holder, own, own_unsent
from pagedkv._core.placement import MOVE_DTYPE, Placement
from pagedkv._core.tier import Tier
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.remote.claims import REMOTE, Claims
from pagedkv.cache.storage import Carrier, Handle
from pagedkv.observe.callbacks import Log
from pagedkv.threads.monitor import Monitor
from pagedkv.tiers import Name, Record

log = Log(logging.getLogger("pagedkv.tiers.remote"))

WINDOW_BYTES = 8 << 20  # of one ticket
LOOK_S = 0.5  # while the store takes nothing, it is asked so often whether it does


class SendingCarrier(Carrier, Protocol):
    """A Carrier that takes blocks' names with them: :class:`pagedkv.tiers.Mover`."""

    def submit(
        self,
        moves: NDArray[np.void],
        *,
        deadline_s: float | None = None,
        on_done: Callable[[Any], object] | None = None,
        here: bool = False,
        before: Callable[[Any], object] | None = None,
        records: Sequence[Record | Name] | None = None,
    ) -> Handle:
        """As Carrier's, with `records`, one for each move."""


@dataclass(eq=False, slots=True)
class Asked:
    """Blocks that a caller wants to be sent; the dispatcher sends them and fills the rest in.

    Attributes
    ----------
    prompt, root : their tokens, int32 [n], and namespace.
    limit : blocks of the prompt, of which those from `first` on are wanted.
    is_over : whether the other two are final.
    num_sent, num_stored : blocks that were sent from `first` on, and how many of these, from the front, the store has.
    """

    prompt: NDArray[np.int32]
    root: int
    limit: int
    first: int
    is_over: bool = False
    num_sent: int = 0
    num_stored: int = 0


@dataclass(eq=False, slots=True)
class Sending:
    """Blocks of one path on their way to the store.

    Attributes
    ----------
    hold : owner of the path.
    first : the path's first block that is being sent.
    num_blocks : from there on.
    ticket : of the mover.
    holder : callers without room wait for it.
    asked : told of its end; None: the core has handed it out.
    """

    hold: Hold
    first: int
    num_blocks: int
    ticket: Handle
    holder: Holder
    asked: Asked | None = None

    def num_stored(self) -> int:
        """Leading blocks that the store has, once the ticket is settled."""
        _, ok = self.ticket.results()
        return len(ok) if ok.all() else int(np.argmin(ok))


class Sender:
    """Has the mover send the blocks that the core hands out.

    The dispatcher's thread calls :meth:`pump`.

    Parameters
    ----------
    placement : Placement
    carrier : sends them.
    claims : names them.
    costs : says which blocks are worth it.
    may_send : whether the store takes any now.
    dispatch : told of sends that begin and end: callers without room wait for their blocks.
    max_bytes : owned at a time.

    Attributes
    ----------
    declined_blocks : not worth sending: computing them is faster than loading them.
    failures : rounds that raised.
    """

    def __init__(
        self,
        placement: Placement,
        carrier: SendingCarrier,
        claims: Claims,
        costs: CostModel,
        may_send: Callable[[], bool],
        dispatch: Dispatch,
        max_bytes: int,
    ) -> None:
        self._placement, self._carrier, self._claims, self._costs = placement, carrier, claims, costs
        self._may_send, self._dispatch = may_send, dispatch
        pool = placement.pools[REMOTE]
        assert pool is not None
        window = max(1, WINDOW_BYTES // carrier.block_bytes)
        self._window = min(window, pool.capacity)
        self._most = max(1, max_bytes // carrier.block_bytes)
        self._under_way: list[Sending] = []
        self._asked: deque[Asked] = deque()
        self._changed = Monitor()
        self._closed = self._beginning = False
        self._inside: set[_Last] = set()  # paths whose calls into the store were left, and are not back
        self._counting = threading.Lock()
        self.declined_blocks = self.failures = 0

    @property
    def num_blocks(self) -> int:
        """Blocks under way."""
        return sum(sending.num_blocks for sending in list(self._under_way))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way or asked for."""
        return not (self._beginning or self._under_way or self._asked)

    @property
    def may_still_write(self) -> bool:
        """Whether the store may yet get blocks that were chosen before this was asked."""
        return not self.is_idle or bool(self._inside)

    # ---- for callers

    def ask(self, asked: Asked) -> None:
        """Have blocks sent. Where it raises, they may be sent all the same."""
        with self._changed:
            if self._closed:
                asked.is_over = True
            else:
                self._take(asked)

    def wait(self, asked: Asked, seconds: float | None) -> bool:
        """Wait until it is over, at most so many seconds; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: asked.is_over, seconds)

    def close(self) -> None:
        """Take no more from callers; the dispatcher ends their wishes, at once or with the call."""
        with self._changed:
            self._closed = True

    # ---- for the dispatcher

    def pump(self, *, begins: bool = True) -> float | None:
        """End sends that are over, and with `begins` begin those there is room for.

        Returns
        -------
        float or None
            Seconds after which to call it again; None with nothing to send.
        """
        try:
            self._pump(begins)
        except Exception as problem:
            self.failures += 1
            if self.failures == 1:
                log.warning("blocks could not be sent to the remote store", exc_info=problem)
        if self._under_way:
            return min(self._carrier.watch(sending.ticket) for sending in self._under_way)
        return LOOK_S if begins and self._placement.num_unsent else None

    def _pump(self, begins: bool) -> None:
        for sending in [sending for sending in self._under_way if sending.ticket.is_settled]:
            self._finish(sending)
        while self._asked:
            self._begin_asked(self._asked[0], begins)
        while begins and self.num_blocks < self._most and self._may_send() and self._begin_next():
            pass

    def _begin(self, hold: Hold, holder: Holder, node: int, first: int) -> Sending:
        """Send the blocks of an owned path from `first` on, all on the device; `node` ends it.

        Where this raises, nothing is sent, and the caller lets go of `hold` and then ends `holder`.
        """
        names = self._claims.names_of_path(node, first)[: self._window]
        moves = np.zeros(len(names), MOVE_DTYPE)
        moves["transfer"] = np.arange(len(names))
        moves["dst_tier"] = REMOTE
        moves["src_block"] = self._placement.blocks_of(hold.handle)[first : first + len(names)]
        moves["dst_block"] = np.arange(len(names))  # no claim: the store finds a block by its name
        moves["node"], moves["depth"] = node, first + np.arange(len(names))
        ticket = self._carrier.submit(moves, on_done=lambda _: self._dispatch.wake(), here=True, records=names)
        return Sending(hold, first, len(names), ticket, holder)

    def _begin_asked(self, asked: Asked, begins: bool) -> None:
        """Take the oldest wish, and send its blocks if they are on the device still."""
        sending = hold = None
        holder = Holder(self._dispatch)  # before the path is owned: a caller without room waits for the end of both
        try:
            if begins:
                hold = own(self._placement, asked.prompt, asked.root, asked.limit)
                on_device = not self._placement.tiers_of(hold.handle).any()
                if hold.num_blocks > asked.first and on_device:
                    sending = self._begin(hold, holder, self._placement.node_of(hold.handle), asked.first)
                    sending.asked = asked
                    self._under_way.append(sending)
        finally:
            self._asked.popleft()  # last: a purge waits until it is under way
            if sending is None:
                if hold is not None:
                    hold.release()
                holder.end()
                self._end(asked, 0, 0)

    def _take(self, asked: Asked) -> None:
        """Also where it is interrupted, the dispatcher looks."""
        try:
            self._asked.append(asked)
        finally:
            self._dispatch.wake()

    def _finish(self, sending: Sending) -> None:
        """End a send: let go of its path once no call is inside the store with its blocks.

        Where this raises, it is called again.
        """
        ticket, hold, stored = sending.ticket, sending.hold, sending.num_stored()
        if sending.asked is None and stored < sending.num_blocks:
            self._placement.not_sent(hold.handle, sending.first + stored)
        left = ticket.left()
        if left.any():
            _Last(int(left.sum()), hold, self._inside).of(ticket)
        else:
            hold.release()
        sending.holder.end()
        self._under_way.remove(sending)
        if sending.asked is not None:
            self._end(sending.asked, sending.num_blocks, stored)
        self._costs.latencies.remote_write.observe(ticket.seconds)

    def _end(self, asked: Asked, num_sent: int, num_stored: int) -> None:
        asked.num_sent, asked.num_stored = num_sent, num_stored
        asked.is_over = True
        with self._changed:
            self._changed.notify_all()

    def _begin_next(self) -> bool:
        self._beginning = True  # before the path is chosen: a purge waits for it
        try:
            return self._begin_chosen()
        finally:
            self._beginning = False

    def _begin_chosen(self) -> bool:
        if not self._placement.num_unsent:
            return False
        holder = Holder(self._dispatch)  # before the path is owned, as above
        hold, first, node = own_unsent(self._placement, self._window)
        if hold is None:
            holder.end()
            return False
        try:
            num_blocks = hold.num_blocks - first
            if self._costs.worth_writing(first, num_blocks, Tier.REMOTE):
                sending = self._begin(hold, holder, node, first)
                self._under_way.append(sending)
                if sending.num_blocks < num_blocks:  # a run that could not be cut while it moved
                    self._placement.not_sent(hold.handle, first + sending.num_blocks)
                return True
            with self._counting:
                self.declined_blocks += num_blocks
        except BaseException:
            self._placement.not_sent(hold.handle, first)
            hold.release()
            holder.end()
            raise
        hold.release()
        holder.end()
        return True


class _Last:
    """Lets go of a path when the last of some of its blocks is back from the store.

    Parameters
    ----------
    count : blocks.
    hold : of the path.
    among : those whose blocks are not back.
    """

    def __init__(self, count: int, hold: Hold, among: set[_Last]) -> None:
        self._count, self._hold, self._among = count, hold, among
        self._lock = threading.Lock()
        among.add(self)

    def of(self, ticket: Handle) -> None:
        """Of this ticket's."""
        ticket.when_back(self._back)

    def _back(self, moves: NDArray[np.intp]) -> None:
        with self._lock:
            self._count -= len(moves)
            is_last = self._count <= 0
        if is_last:
            self._hold.release()
            self._among.discard(self)

"""The deciding process's calls to all ranks, and the end of a rank that does not answer.

A call goes to every rank, and is over when each has answered or is lost. A rank is lost when its connection ends, or
when it owes an answer and says nothing for `silent_s`, not even to a ping. That is for good: its part of the KV is
gone, and its connection is closed. From then on no call is sent; each is over at once.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from pagedkv.errors import ClosedError, RankLost, TierError
from pagedkv.observe.callbacks import Log
from pagedkv.threads.monitor import Monitor
from pagedkv.tiers.ranks.frames import STATES, Answer, Kind, unpack_answer
from pagedkv.tiers.ranks.wire import Broken, Frame, Loop, Wire

log = Log(logging.getLogger("pagedkv.tiers.ranks"))

PATIENCE = 0.75  # of `silent_s`, for the answer to a ping
IDLE_S = 60.0  # between two looks at the time, where no rank owes an answer
SLICE_S = 0.05  # a caller that waits runs Python this often, which is when a signal's exception can arrive


class Call:
    """One call to all ranks.

    Attributes
    ----------
    answers : by rank; None of one that was lost.
    unable : what ranks said that could not do it.
    """

    def __init__(
        self,
        kind: Kind,
        payload: bytes,
        ranks: set[int],
        done: Callable[[Call], object],
        came_back: Callable[[int, Answer | None], object],
    ) -> None:
        self.number, self.kind, self.payload = 0, kind, payload
        self.done, self.came_back = done, came_back
        self.waiting = ranks
        self.answers: dict[int, Answer | None] = {}
        self.unable: dict[int, str] = {}
        self.leaves: set[int] = set()  # ranks that have left moves, and will say when those are over
        self.early: list[tuple[int, Answer | None]] = []  # their words about those, from before the end of the call

    @property
    def is_over(self) -> bool:
        """Whether all ranks have answered or are lost."""
        return not self.waiting


class _Link:
    """One rank, to the deciding process."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.heard = 0.0
        self.pinged: float | None = None
        self.is_overdue = False
        self.state = STATES[0]


def _nothing(*_: object) -> None:
    """No one is to be told."""


class Group:
    """All ranks, as the deciding process sees them.

    Parameters
    ----------
    wires : by rank, after the handshake.
    silent_s : seconds after which a rank that owes an answer is lost.
    clock : monotonic seconds.

    Attributes
    ----------
    lost : the rank that was lost first, and how; None while all are there.
    """

    def __init__(self, wires: list[Wire], silent_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._links = {rank: _Link(wire) for rank, wire in enumerate(wires)}
        self._silent_s, self._clock = silent_s, clock
        self._calls: dict[int, Call] = {}  # that the ranks were told of, by number
        self._asked: deque[Call] = deque()  # that they are still to be told of
        self._number = 0
        self._changed = Monitor()
        self._is_stopped = False
        self._pid = os.getpid()
        self.lost: RankLost | None = None
        self.size = len(wires)
        self._loop = Loop(self, {rank: link.wire for rank, link in self._links.items()}, "pagedkv-ranks")
        self._loop.start()

    # ---- calls

    def call(
        self,
        kind: Kind,
        payload: bytes = b"",
        done: Callable[[Call], object] = _nothing,
        came_back: Callable[[int, Answer | None], object] = _nothing,
    ) -> Call:
        """Send a call to all ranks; it waits for none of them.

        Parameters
        ----------
        done : told of the call once it is over, by the loop's thread. It must not wait.
        came_back : told of a rank, and of its answer about moves that it had left, or None if it was lost.

        Raises
        ------
        ClosedError, TierError
            The group is closed, or belongs to the process this one was forked from.
        """
        if self._pid != os.getpid():
            raise TierError(f"these ranks belong to process {self._pid}; a forked child must open its own")
        call = Call(kind, payload, set(self._links), done, came_back)
        with self._changed:
            if self._is_stopped:
                raise ClosedError("the ranks are closed")
            self._asked.append(call)  # from here on it is the loop's: all ranks are told, or none
        self._loop.wake()
        return call

    def now(self) -> float:
        """The time that silence and deadlines go by."""
        return self._clock()

    def ask(self, kind: Kind, payload: bytes, within_s: float, what: str) -> list[bytes]:
        """Send a call to all ranks, and wait for their answers, in order of their ranks.

        Raises
        ------
        RankLost
            A rank is lost.
        TierError
            A rank could not do `what`, or has not done it within so many seconds; the error names the rank.
        ClosedError
        """
        call = self.call(kind, payload)
        self.wait(call, within_s)
        self.check()
        if not call.is_over:
            raise TierError(f"rank {min(call.waiting)} did not {what} within {within_s:g} s")
        self.require(call, what)
        answers = [call.answers[rank] for rank in sorted(call.answers)]
        return [b"" if answer is None else answer.rest for answer in answers]

    def require(self, call: Call, what: str) -> None:
        """Raise if a rank could not carry out a call.

        Raises
        ------
        TierError
            The error names the rank.
        """
        for rank, said in sorted(call.unable.items()):
            raise TierError(f"rank {rank} could not {what}: {said}")

    def wait(self, call: Call, within_s: float = math.inf) -> None:
        """Wait until a call is over, at most so many seconds."""
        until = self._clock() + within_s
        while not call.is_over and (left := until - self._clock()) > 0:
            with self._changed:
                self._changed.wait_for(lambda: call.is_over, min(left, SLICE_S))

    def check(self) -> None:
        """Raise if a rank is lost.

        Raises
        ------
        RankLost
        """
        if self.lost is not None:
            raise RankLost(self.lost.rank, self.lost.problem)

    @property
    def state(self) -> str:
        """The worst state of the ranks' disk tiers; ``"off"`` where a rank is lost."""
        if self.lost is not None:
            return "off"
        return max((link.state for link in self._links.values()), key=STATES.index)

    def stop(self) -> None:
        """Close all wires; calls under way are over. Again is fine, in any thread."""
        if self._pid == os.getpid():
            with self._changed:  # calls before this are ended with their wires, and none comes after it
                self._is_stopped = True
            self._loop.stop()

    def close(self) -> None:
        """As `stop`, and wait for the thread."""
        self.stop()
        if self._pid == os.getpid() and not self._loop.is_mine():
            self._loop.thread.join()

    # ---- the loop's thread

    def frame(self, number: int, frame: Frame) -> None:
        """A rank has said something."""
        link = self._links[number]
        link.heard, link.pinged, link.is_overdue = self._clock(), None, False
        if frame.kind == Kind.PONG:
            link.state = unpack_answer(frame.payload).state
        elif frame.kind == Kind.ANSWER:
            answer = unpack_answer(frame.payload)
            link.state = answer.state
            self._answered(number, frame.call, answer, "")
        elif frame.kind == Kind.UNABLE:
            self._answered(number, frame.call, None, frame.payload[:4096].decode(errors="replace") or "it failed")
        elif frame.kind == Kind.BACK:
            call = self._calls.get(frame.call)
            if call is not None and number in call.leaves:
                self._came_back(number, call, unpack_answer(frame.payload))
        else:
            raise Broken(f"sent a frame of kind {frame.kind}")

    def ended(self, number: int, why: str) -> None:
        """A rank's wire is closed: it is lost, unless the group was closed."""
        over: list[Call] = []
        with self._changed:
            if self.lost is None and not self._is_stopped:
                self.lost = RankLost(number, why)
                with suppress(BaseException):
                    log.warning("rank %d %s: its part of the KV is gone, and nothing is computed or moved any more",
                                number, why)  # fmt: skip
            calls = list(self._calls.values())
            for call in calls:
                if number in call.waiting:
                    call.answers[number] = None
                    call.waiting.discard(number)
                    over += [call] if call.is_over else []
            self._changed.notify_all()
        for call in over:
            self._finish(call)
        for call in calls:
            if number in call.leaves:
                self._came_back(number, call, None)
        self._forget(calls)
        self._tell_ranks()

    def _tell_ranks(self) -> None:
        """Send new calls; where a rank is lost, or the group closed, they are over."""
        while True:
            with self._changed:
                if not self._asked:
                    return
                call = self._asked.popleft()
                self._number += 1
                call.number = self._number
                is_sent = self.lost is None and not self._is_stopped
                if is_sent:
                    self._calls[call.number] = call
                    for link in self._links.values():
                        link.wire.put(call.kind, call.number, call.payload)
                    call.payload = b""
                else:
                    call.answers = dict.fromkeys(call.waiting)
                    call.waiting = set()
                    self._changed.notify_all()
            if not is_sent:
                self._finish(call)

    def tick(self) -> float:
        """Send new calls, and ping ranks that owe an answer; a silent rank is lost."""
        self._tell_ranks()
        now, pauses = self._clock(), [IDLE_S]
        with self._changed:
            owing = set().union(*(call.waiting for call in self._calls.values())) if self._calls else set()
        patience = self._silent_s * PATIENCE
        for rank in sorted(owing):
            link = self._links[rank]
            if link.pinged is None and now - link.heard >= self._silent_s - patience:
                link.pinged = now
                link.wire.put(Kind.PING)
            if link.pinged is None:
                pauses.append(link.heard + self._silent_s - patience - now)
            elif now - link.pinged < patience:
                pauses.append(link.pinged + patience - now)
            elif not link.is_overdue:  # this process may have stood still itself: first read its wires
                link.is_overdue = True
                pauses.append(0.0)
            else:
                self._loop.drop(rank, f"has not answered for {self._silent_s:g} s")
        return min(pauses)

    # ---- inside

    def _answered(self, rank: int, number: int, answer: Answer | None, unable: str) -> None:
        with self._changed:
            call = self._calls.get(number)
            if call is None or rank not in call.waiting:
                return
            call.answers[rank] = answer
            if unable:
                call.unable[rank] = unable
            if answer is not None and len(answer.left):
                call.leaves.add(rank)
            call.waiting.discard(rank)
            is_over = call.is_over
            self._changed.notify_all()
        if is_over:
            self._finish(call)
            self._forget([call])

    def _came_back(self, rank: int, call: Call, answer: Answer | None) -> None:
        """A rank is out of moves that it had left, or is lost (None)."""
        if answer is None or answer.rest == b"last":
            call.leaves.discard(rank)
        if not call.is_over:
            call.early.append((rank, answer))
            return
        _tell(lambda: call.came_back(rank, answer))
        self._forget([call])

    def _finish(self, call: Call) -> None:
        for rank, said in call.unable.items():
            with suppress(BaseException):
                log.warning("rank %d could not carry out a call: %s", rank, said)
        _tell(lambda: call.done(call))
        for rank, answer in call.early:
            _tell(partial(call.came_back, rank, answer))

    def _forget(self, calls: list[Call]) -> None:
        """Forget calls that are over and that no rank will come back to."""
        with self._changed:
            for call in calls:
                if call.is_over and not call.leaves:
                    self._calls.pop(call.number, None)


def _tell(tell: Callable[[], object]) -> None:
    """Call a callback; the loop's thread survives its exceptions."""
    try:
        tell()
    except BaseException:
        with suppress(BaseException):
            log.exception("a callback of a call to the ranks raised")

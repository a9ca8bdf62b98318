"""A KVCache whose mover has no threads and whose disk is a dict.

The schedule decides when and how each move ends.

Everything else is the product's: cache, `Moves`, dispatcher, placement, block table, the mover's queue, tickets and
deadlines, and the copies themselves. The dispatcher's rounds are events, and a move goes through three more, in any
order among all moves: its destination is filled with rubbish when it is submitted, its bytes are moved, and it is told
to be over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv._core.dispatch import NOT_YET, Dispatch
from pagedkv.cache.dispatcher import Dispatcher
from pagedkv.tiers import Mover
from pagedkv.tiers.mover.worker import run
from tests.reliability.scene_storage import SceneStorage
from tests.reliability.virtual import Chooser, Schedule

FAILURES = ("store says no", "store raises")


class Scene:
    """One cache under one schedule.

    Parameters
    ----------
    choose : what is next.
    failures : failing, cancelled and late moves are among the events.

    Attributes
    ----------
    seen : how often what happened.
    """

    def __init__(self, choose: Chooser, *, failures: bool) -> None:
        self.schedule = Schedule(choose, self._events)
        self.time = SceneTime(self.schedule)
        self.seen: Counter[str] = Counter()
        self._failures = failures
        self._movers: list[Mover] = []
        self._dispatchers: list[Dispatcher] = []
        self._ran: list[tuple[Any, NDArray[np.bool_] | None]] = []  # parts whose bytes were moved, and how it went
        self.next_failure = ""

    def open(self, spec: pk.KVSpec, **options: Any) -> pk.KVCache:
        """A cache of this scene: the product's mover without threads, and a dict for a disk."""
        cache = pk.KVCache(spec, **options, storage=SceneStorage(self))
        self._dispatchers.append(cache._dispatcher)
        return cache

    def begun(self, mover: Mover) -> None:
        """The parts that a mover queues are among the events from now on."""
        self._movers.append(mover)

    def _events(self) -> list[tuple[int, Callable[[], object]]]:
        events: list[tuple[int, Callable[[], object]]] = []
        for dispatcher in self._dispatchers:
            settled = any(ticket.is_settled for job in dispatcher._jobs for ticket, _ in job.tickets)
            if settled or dispatcher._dispatch.num_decided:
                events.append((4, dispatcher.pump))
        for mover in self._movers:
            for part in mover._queue.parts:
                events.append((4, lambda mover=mover, part=part: self._move(mover, part, "")))
                if self._failures:
                    events += [(1, lambda m=mover, p=part, f=f: self._move(m, p, f)) for f in FAILURES]
                    if not part.ticket.cancelled:
                        events.append((1, lambda part=part: self._cancel(part)))
                    if part.ticket.deadline is not None:
                        events.append((1, self._time_passes))
        events += [(4, lambda told=told: self._tell(told)) for told in self._ran]
        return events

    def _move(self, mover: Mover, part: Any, failure: str) -> None:
        queue = mover._queue
        queue.parts.remove(part)
        queue.queued_blocks -= part.moves.size
        self.next_failure = failure
        ok = run(queue, part)
        self.next_failure = ""
        self._ran.append((part, ok))
        self.seen["moved" if ok is not None and ok.all() else failure or "late or cancelled"] += 1

    def _tell(self, told: tuple[Any, NDArray[np.bool_] | None]) -> None:
        self._ran.remove(told)
        part, ok = told
        part.ticket.part_done(part.moves, ok)

    def _cancel(self, part: Any) -> None:
        part.ticket.cancel()
        self.seen["cancels"] += 1

    def _time_passes(self) -> None:
        self.schedule.now += 0.6
        self.seen["waits past deadlines"] += 1


class SceneTime:
    """The clock and the threads of a scene's cache."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def seconds(self) -> float:
        return self._schedule.now

    def thread(self, work: Callable[[], object], name: str) -> NoThread:
        return NoThread()

    def spawn(self, work: Callable[[], object]) -> None:
        self._schedule.start(work)

    def pause(self, dispatch: Dispatch, seen: int, others: bool) -> None:
        self._schedule.wait(lambda: dispatch.wait(seen, 0.0, others) != NOT_YET, 1.0)


class NoThread:
    """Never runs; the scene does its work."""

    name, ident = "scene", None

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass

    def is_alive(self) -> bool:
        return False

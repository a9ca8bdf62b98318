"""A KVCache whose mover has no threads and whose disk is a dict: when and how every move ends is somebody's choice.

Everything else is the product's: cache, conductor, dispatcher, placement, block table, the mover's queue, tickets and
deadlines, and the copies themselves. The dispatcher's rounds are events, and a move goes through three more, in any
order among all moves: its destination is filled with rubbish when it is submitted, its bytes are moved, and it is told
to be over.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import pagedkv.cache.cache
import pagedkv.cache.hands
import pagedkv.cache.matching
import pagedkv.cache.moving
import pagedkv.cache.prefetch
from pagedkv._core.dispatch import NOT_YET, Dispatch
from pagedkv._core.placement import Placement
from pagedkv.cache.hands import Hands
from pagedkv.tiers import Mover, Record, StoredBlock
from pagedkv.tiers.disk.slots import DiskStats
from pagedkv.tiers.mover import mover as mover_module
from pagedkv.tiers.mover.ticket import Ticket
from pagedkv.tiers.mover.worker import run
from tests.reliability.virtual import Chooser, Instead, Schedule, VirtualCondition, time_under

RUBBISH = 0xA5
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
        self.seen: Counter[str] = Counter()
        self._failures = failures
        self._movers: list[Mover] = []
        self._hands: list[Hands] = []
        self._ran: list[tuple[Any, NDArray[np.bool_] | None]] = []  # parts whose bytes were moved, and how it went
        self.next_failure = ""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Caches made in here are of this scene."""
        scene, submit = self, Mover.submit

        def scribbling_submit(mover: Mover, moves: NDArray[np.void], **options: Any) -> Ticket:
            ticket = submit(mover, moves, **options)
            for move in moves:
                tier = mover._queue.tiers[int(move["dst_tier"])]
                if hasattr(tier, "arena"):
                    tier.arena[int(move["dst_block"])] = RUBBISH
            return ticket

        def unthreaded(*arguments: Any, **options: Any) -> Mover:
            with patch.object(mover_module, "threading", _without_threads()):
                made = Mover(*arguments, **options)
            made._queue.clock = lambda: scene.schedule.now
            scene._movers.append(made)
            return made

        def scheduled_hands(hands: Hands) -> None:
            hands._thread = _NoThread()  # type: ignore[assignment]
            scene._hands.append(hands)

        with (
            patch.object(Hands, "start", scheduled_hands),
            patch.object(mover_module, "_is_quick", lambda parts: False),
            patch.object(Mover, "submit", scribbling_submit),
            patch.object(
                pagedkv.cache.cache, "Dispatch", lambda placement: ScheduledDispatch(placement, self.schedule)
            ),
            patch.object(pagedkv.cache.cache, "Mover", unthreaded),
            patch.object(pagedkv.cache.cache, "DiskTier", type("DictStore", (DictStore,), {"scene": self})),
            patch.object(pagedkv.cache.prefetch, "start_thread", self.schedule.start),
            patch.object(pagedkv.cache.prefetch, "Monitor", lambda: VirtualCondition(self.schedule)),
            patch.object(pagedkv.cache.matching, "time", time_under(self.schedule)),
            patch.object(pagedkv.cache.moving, "time", time_under(self.schedule)),
            patch.object(pagedkv.cache.hands, "time", time_under(self.schedule)),
        ):
            yield

    def _events(self) -> list[tuple[int, Callable[[], object]]]:
        events: list[tuple[int, Callable[[], object]]] = []
        for hands in self._hands:
            settled = any(ticket.is_settled for job in hands._jobs for ticket, _ in job.tickets)
            if settled or hands._dispatch.num_decided:
                events.append((4, hands.pump))
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


class DictStore:
    """A disk tier in a dict; fails as its class's scene says."""

    scene: Scene
    name = "disk"
    secret = bytes(32)
    write_bytes = 1
    state = "ok"

    def __init__(self, path: str, num_blocks: int, block_bytes: int, **_: Any) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._slots: dict[int, tuple[Record, NDArray[np.uint8]]] = {}

    def write(
        self, blocks: NDArray[np.int32], records: Sequence[Record], arena: NDArray[np.uint8], rows: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        self.invalidate(blocks)
        if not self._works():
            return np.zeros(len(records), np.bool_)
        for block, record, row in zip(blocks.tolist(), records, rows.tolist(), strict=True):
            self._slots[block] = record, arena[row].copy()
        return np.ones(len(records), np.bool_)

    def read(
        self, blocks: NDArray[np.int32], expected: Sequence[Record], arena: NDArray[np.uint8], rows: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        works, ok = self._works(), np.zeros(len(expected), np.bool_)
        for i, (block, record, row) in enumerate(zip(blocks.tolist(), expected, rows.tolist(), strict=True)):
            found, data = self._slots.get(block, (None, None))
            if works and found == record:
                arena[row], ok[i] = data, True
        return ok

    def _works(self) -> bool:
        if self.scene.next_failure == "store raises":
            raise OSError(errno.EIO, "injected")
        return not self.scene.next_failure

    def invalidate(self, blocks: NDArray[np.int32]) -> None:
        for block in blocks.tolist():
            self._slots.pop(block, None)

    def purge(self, namespace: bytes) -> None:
        self.invalidate(np.array([b for b, (record, _) in self._slots.items() if record.namespace == namespace], int))

    def records(self) -> Iterator[StoredBlock]:
        for block, (record, _) in sorted(self._slots.items()):
            yield StoredBlock(block, record, 1)

    def stats(self) -> DiskStats:
        return DiskStats("ok", 0, 0, {}, {}, 0)

    def close(self) -> None:
        self._slots.clear()


class ScheduledDispatch:
    """A Dispatch whose callers wait under the schedule."""

    def __init__(self, placement: Placement, schedule: Schedule) -> None:
        self._dispatch, self._schedule = Dispatch(placement), schedule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatch, name)

    def wait(self, seen: int, timeout_s: float, others: bool = True) -> int:
        self._schedule.wait(lambda: self._dispatch.wait(seen, 0.0, others) != NOT_YET, 1.0)
        return self._dispatch.wait(seen, 0.0, others)


class _NoThread:
    """Never runs; the scene does its work."""

    ident = None

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass

    def is_alive(self) -> bool:
        return False


def _without_threads() -> ModuleType:
    return Instead(threading, Thread=_NoThread)

"""A rank's side: carries out the deciding process's moves by a mover of its own.

The loop's thread takes orders and copies blocks between memories; the mover's threads do the rest; calls into the disk
have a thread of their own, so that a disk that hangs does not make the rank look silent.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import RankLost, TierError
from pagedkv.observe.callbacks import Log
from pagedkv.threads import crew
from pagedkv.threads.ending import at_end
from pagedkv.threads.monitor import Monitor
from pagedkv.tiers.base import Name, Record
from pagedkv.tiers.disk.tier import DiskTier, StoredBlock
from pagedkv.tiers.mover.mover import Mover
from pagedkv.tiers.mover.ticket import Ticket
from pagedkv.tiers.ranks.frames import Kind, pack_answer, pack_stored, unpack_ids, unpack_moves
from pagedkv.tiers.ranks.wire import Broken, Frame, Loop, Wire

log = Log(logging.getLogger("pagedkv.tiers.ranks"))

CORE = 0  # number of the one wire
PAGE_BLOCKS = 1 << 15  # of one answer about the blocks that the disk holds
IDLE_S = 60.0


class Blocks(Protocol):
    """What else a rank does with device blocks; each call returns when it is done."""

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks, (source, destination) int32 [n, 2]."""

    def zero_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Fill whole blocks with zeros, int32 [n]."""


class Hands:
    """Carries out what comes over a wire, until it is closed.

    Parameters
    ----------
    wire : to the deciding process, after the handshake.
    make_mover : ``make_mover(describe)`` makes the mover of this rank's tiers.
    blocks : Blocks
    store : this rank's disk tier, if there is one.

    Attributes
    ----------
    lost : how the deciding process ended; None while it is there.
    """

    def __init__(
        self,
        wire: Wire,
        make_mover: Callable[[Callable[[NDArray[np.void]], list[Record | Name]]], Mover],
        blocks: Blocks,
        store: DiskTier | None,
    ) -> None:
        self._wire, self._blocks, self._store = wire, blocks, store
        self._records: list[Record] = []  # of the order that is being submitted
        self._mover = make_mover(lambda moves: [*self._records])
        self._tickets: set[Ticket] = set()
        self._stored: Iterator[StoredBlock] = iter(())
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = Monitor()
        self._pid = os.getpid()
        self.lost: RankLost | None = None
        if store is not None:
            crew.start(threading.Thread(target=self._run_errands, name="pagedkv-rank-disk", daemon=True))
        self._loop = Loop(self, {CORE: wire}, "pagedkv-rank")
        self._loop.start()
        _running.add(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the deciding process has closed its cache, or is gone; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self.lost is not None, timeout_s)

    def close(self) -> None:
        """Close the wire and end the threads. A second call does nothing.

        A thread that hangs in the disk is left.
        """
        if self._pid == os.getpid():
            self._loop.stop()
            self._loop.thread.join()
            self._errands.put(None)

    # ---- the loop's thread

    def frame(self, number: int, frame: Frame) -> None:
        """Carry out one order."""
        kind, payload = frame.kind, frame.payload
        if kind == Kind.PING:
            self._say(Kind.PONG, 0, pack_answer(self._state))
        elif kind == Kind.MOVES:
            self._try(frame, lambda: self._move(frame.call, payload))
        elif kind == Kind.COPY:
            self._try(frame, lambda: self._blocks.copy_blocks(unpack_ids(payload).reshape(-1, 2)), answers=True)
        elif kind == Kind.ZERO:
            self._try(frame, lambda: self._blocks.zero_blocks(unpack_ids(payload)), answers=True)
        elif kind in (Kind.RECORDS, Kind.INVALIDATE, Kind.PURGE, Kind.FLUSH, Kind.STATS):
            self._errands.put(partial(self._try, frame, partial(self._ask_store, frame)))
        else:
            raise Broken(f"sent a frame of kind {kind}")

    def ended(self, number: int, why: str) -> None:
        """The deciding process is gone, or this side was closed."""
        with self._changed:
            self.lost = RankLost(None, why)
            self._changed.notify_all()
        with suppress(BaseException):
            log.info("the deciding process %s", why)

    def tick(self) -> float:
        """Give up moves that take too long."""
        pauses = [self._mover.watch(ticket) for ticket in list(self._tickets)]
        return min(pauses, default=IDLE_S)

    # ---- inside

    @property
    def _state(self) -> str:
        return "ok" if self._store is None else self._store.state

    def _say(self, kind: Kind, call: int, payload: bytes) -> None:
        self._wire.put(kind, call, payload)
        if self._wire.has_more:
            self._loop.wake()

    def _try(self, frame: Frame, work: Callable[[], object], *, answers: bool = False) -> None:
        """Carry out a frame; an exception goes to the deciding process, and ends nothing here."""
        try:
            work()
            if answers:
                self._say(Kind.ANSWER, frame.call, pack_answer(self._state))
        except BaseException as problem:
            with suppress(BaseException):
                self._say(Kind.UNABLE, frame.call, f"{type(problem).__name__}: {problem}".encode())

    def _move(self, call: int, payload: bytes) -> None:
        order = unpack_moves(payload)
        self._records = order.records
        self._mover.submit(
            order.moves, deadline_s=order.deadline_s, on_done=partial(self._moved, call), here=True,
            before=self._tickets.add,
        )  # fmt: skip

    def _moved(self, call: int, ticket: Ticket) -> None:
        """A ticket is settled. In a worker's thread, or the loop's."""
        self._tickets.discard(ticket)
        _, ok = ticket.results()
        left = np.flatnonzero(ticket.left())
        self._say(Kind.ANSWER, call, pack_answer(self._state, ok, ticket.tried(), left))
        if len(left):
            missing = set(left.tolist())
            ticket.when_back(partial(self._came_back, call, missing))

    def _came_back(self, call: int, missing: set[int], moves: NDArray[np.intp]) -> None:
        """A call that hung is back."""
        missing.difference_update(moves.tolist())
        self._say(Kind.BACK, call, pack_answer(self._state, left=moves, rest=b"" if missing else b"last"))

    def _ask_store(self, frame: Frame) -> None:
        """A call to the disk tier. In the thread for that."""
        store, rest = self._store, b""
        if store is None:
            raise TierError("this rank has no disk tier")
        if frame.kind == Kind.RECORDS:
            if frame.payload == b"first":
                self._stored = iter(store.records())
            rest = pack_stored(list(itertools.islice(self._stored, PAGE_BLOCKS)))
        elif frame.kind == Kind.INVALIDATE:
            store.invalidate(unpack_ids(frame.payload))
        elif frame.kind == Kind.PURGE:
            store.purge(frame.payload)
        elif frame.kind == Kind.FLUSH:
            rest = b"yes" if store.flush() else b"no"
        else:
            rest = json.dumps(dataclasses.asdict(store.stats())).encode()
        self._say(Kind.ANSWER, frame.call, pack_answer(self._state, rest=rest))

    def _run_errands(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand()


_running: weakref.WeakSet[Hands] = weakref.WeakSet()


@at_end
def _stop_all() -> None:
    """No thread may still copy when the interpreter frees the arenas.

    The movers' threads are stopped after this.
    """
    for hands in list(_running):
        hands.close()

"""A storage whose promotions wait until a test says how each of them ends.

Its clock stands still until the test turns it.

Everything is carried out in the caller's thread: demotions at once, promotions when the test lets them arrive, and by
their deadline at the latest. So a test can stand between any two events of a load, and nothing depends on time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
import pagedkv.cache.parts
from pagedkv._core.radix_tree import RadixTree
from pagedkv.cache.device_kv import DeviceKV
from pagedkv.cache.runtime import SystemRuntime
from pagedkv.tiers import DirectionStats
from tests.in_blocks import cache_options

RUBBISH = 0xA5


class HeldTicket:
    """Moves of one submission; promotions are settled one by one, in the prefix's order."""

    seconds = 1.0

    def __init__(self, storage: HeldStorage, moves: NDArray[np.void], deadline: float | None) -> None:
        self._storage, self.moves, self.deadline = storage, moves, deadline
        depths = {int(move["transfer"]): storage.depth_of(int(move["node"])) for move in moves}
        self.waiting = sorted(depths, key=lambda transfer: depths[transfer])
        self._ok: dict[int, bool] = {}
        self._late: set[int] = set()
        self._tell_back: Callable[[NDArray[np.intp]], object] = lambda moves: None
        self.num_rounds = 0

    def end(self, ok: bool) -> None:
        """The next transfer arrives, or could not be read."""
        transfer = self.waiting.pop(0)
        if ok:
            self._storage.copy(self.moves[self.moves["transfer"] == transfer])
        self._ok[transfer] = ok

    def look_at(self, now: float) -> None:
        """Give up overdue transfers, as a mover does."""
        if self.deadline is not None and now >= self.deadline:
            self._late |= set(self.waiting)
            self.waiting.clear()

    @property
    def is_settled(self) -> bool:
        return not self.waiting

    def results(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        ids = np.unique(self.moves["transfer"])
        return ids, np.array([self._ok.get(int(i), False) for i in ids], np.bool_)

    def tried(self) -> NDArray[np.bool_]:
        return np.array([int(i) not in self._late for i in np.unique(self.moves["transfer"])], np.bool_)

    def left(self) -> NDArray[np.bool_]:
        return np.isin(self.moves["transfer"], list(self._late)) & self._storage.leaves_late

    def when_back(self, tell: Callable[[NDArray[np.intp]], object]) -> None:
        self._tell_back = tell

    def come_back(self) -> None:
        """The calls that were left are over."""
        self._tell_back(np.flatnonzero(self.left()))


class HeldStorage:
    """Device and host memory of one cache.

    Attributes
    ----------
    now : seconds, of everything that the cache times.
    tickets : of promotions that are under way.
    read : blocks of all promotions so far.
    keeps_deadlines : False: a promotion that is late is never given up, as by a tier that hangs.
    leaves_late : late promotions are under way in a call that may still write.
    by_itself : promotions arrive at once.
    rounds : of the dispatcher, after which they arrive, so that the same calls always find the same; None: by `arrive`.
    """

    store = None
    is_synchronous = True

    def __init__(self) -> None:
        self.now, self.tickets, self.read = 1000.0, list[HeldTicket](), 0
        self.keeps_deadlines, self.leaves_late, self.by_itself = True, False, False
        self.rounds: int | None = None
        self.depth_of: Callable[[int], int] = lambda node: node
        self.moved: dict[tuple[int, int], DirectionStats] = {}
        self.carrier, self.runtime = self, HeldTime(self)

    # ---- for the test

    def arrive(self, num: int | None = None, ok: bool = True) -> None:
        """So many transfers that are under way come to their end; all, unless said."""
        while self.under_way and num != 0:
            self.under_way[0].end(ok)
            num = None if num is None else num - 1

    def turn(self, seconds: float) -> None:
        """Time passes, and overdue transfers are given up."""
        self.now += seconds
        for ticket in self.under_way if self.keeps_deadlines else []:
            ticket.look_at(self.now)

    @property
    def under_way(self) -> list[HeldTicket]:
        """Tickets that are not settled."""
        return [ticket for ticket in self.tickets if not ticket.is_settled]

    # ---- as a Storage

    def open(self, spec: pk.KVSpec, blocks: Sequence[int], disk: Any) -> list[int]:
        self.block_bytes = spec.block_bytes
        self.arenas = [np.zeros((n, spec.block_bytes), np.uint8) for n in blocks]
        self.device_arena, self.kv = self.arenas[0], DeviceKV(spec, self.arenas[0])
        return list(blocks)

    def start(self, describe: Any) -> None:
        pass

    def used_by(self, stream: Any) -> None:
        pass

    def close(self) -> None:
        for ticket in self.under_way:
            while ticket.waiting:
                ticket.end(False)

    # ---- as its carrier

    def submit(
        self, moves: NDArray[np.void], *, deadline_s: float | None = None, on_done: Any = None, before: Any = None,
        here: bool = False,
    ) -> HeldTicket:  # fmt: skip
        ticket = HeldTicket(self, moves, None if deadline_s is None else self.now + deadline_s)
        link = int(moves["src_tier"][0]), int(moves["dst_tier"][0])
        self.moved.setdefault(link, DirectionStats()).blocks += len(moves)
        if before is not None:
            before(ticket)
        if link[0] > link[1]:
            self.read += len(moves)
            self.arenas[0][moves["dst_block"]] = RUBBISH
            self.tickets.append(ticket)
            ticket.look_at(self.now)
        if link[0] < link[1] or self.by_itself:
            while ticket.waiting:
                ticket.end(True)
        return ticket

    def copy(self, moves: NDArray[np.void]) -> None:
        for move in moves:
            source = self.arenas[move["src_tier"]][move["src_block"]]
            self.arenas[move["dst_tier"]][move["dst_block"]] = source

    def watch(self, ticket: HeldTicket) -> float:
        ticket.num_rounds += 1
        while ticket.waiting and self.rounds is not None and ticket.num_rounds >= self.rounds:
            ticket.end(True)
        if self.keeps_deadlines:
            ticket.look_at(self.now)
        return 1.0

    def stats(self) -> dict[tuple[int, int], DirectionStats]:
        return self.moved


class HeldTime(SystemRuntime):
    """The storage's clock; threads, and how callers wait, are the system's."""

    def __init__(self, storage: HeldStorage) -> None:
        self._storage = storage

    def seconds(self) -> float:
        return self._storage.now


@contextmanager
def held_cache(
    spec: pk.KVSpec, *, run: int | None = None, **options: Any
) -> Iterator[tuple[pk.KVCache, HeldStorage]]:
    """A cache over such a storage; its blocks are moved `run` at a time."""
    storage = HeldStorage()
    tree = RadixTree if run is None else partial(RadixTree, max_run=run)
    with patch.object(pagedkv.cache.parts, "RadixTree", tree):
        cache = pk.KVCache(spec, **cache_options(**options), storage=storage)
        storage.depth_of = cache.placement.depth_of
        yield cache, storage
        cache.check_integrity()
        storage.arrive(ok=False)
        while cache.moves.run_moves():
            pass
        held = {name: counts["live"] for name, counts in cache.stats().blocks.items()}
        assert not any(held.values()), f"there are owners left of {held}"
        cache.check_integrity()
        cache.close()

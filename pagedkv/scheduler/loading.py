"""Requests whose prefixes are on their way to the device, while others run.

A request is loading from the moment that its cold prefix is owned and has its room until the load is over; then it runs
whatever else waits, because its room and its place are its own. Nothing waits for a load:

    need    blocks to the end of its prompt and one token more, less those that it shares on the device
    placed  of these, those that its loads hold on the device, or that are being read for them
    reserve need less placed: nothing else is given those blocks

The sum of all needs stays within `loading_share` of the device while anything runs; one load is always allowed. A load
that is late or fails keeps the front that came; the request computes the rest. Every load has a deadline.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.cache import KVCache
from pagedkv.cache.load import Load
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.queue import by_rank
from pagedkv.scheduler.request import Branch, Request

LEAST_S = 0.5  # of a load whose time is known: other loads and demotions are on the same links
UNKNOWN_S, UNKNOWN_S_PER_TOKEN, MOST_UNKNOWN_S = 2.0, 0.1 / 1024, 30.0  # of one whose time is not


@dataclass(eq=False, slots=True)
class Entry:
    """One request's loads.

    Attributes
    ----------
    loads : by branch that runs on.
    need : blocks beside those on the device when it began.
    total : blocks that its branches need, shared ones once.
    shared : whole blocks of its prompt.
    """

    loads: dict[Branch, Load]
    need: int = 0
    total: int = 0
    shared: int = 0

    @property
    def placed(self) -> int:
        """Device blocks that its loads hold, or that are being read for them; shared ones once."""
        each = [load.num_placed for load in self.loads.values()]
        return each[0] + sum(max(0, placed - self.shared) for placed in each[1:])

    @property
    def reserve(self) -> int:
        """Blocks that nothing else is given."""
        return max(0, self.total - self.placed)

    def done(self) -> bool:
        """Look once at every load; whether all are over."""
        are_over = [load.done() for load in self.loads.values()]
        return all(are_over)

    def do_without_remainders(self) -> None:
        """Load the prefixes alone, because the blocks beside them have no room. Before it begins."""
        for load in self.loads.values():
            if load.do_without_remainder():
                self.total -= 1
        self.need = self.reserve

    @property
    def has_failed(self) -> bool:
        """Whether one of them has found no room."""
        return any(load.error is not None for load in self.loads.values())

    @property
    def is_over(self) -> bool:
        """Whether all are over, as the last look has found them."""
        return all(load.is_over for load in self.loads.values())

    def cancel(self) -> None:
        """Let go of everything."""
        for load in self.loads.values():
            load.cancel()


class Loading:
    """The requests that load, by rank, and the blocks kept for them.

    Attributes
    ----------
    requests : list of Request, by rank
    width : sequences that they may come to have.
    worst_blocks : blocks that they may come to hold at their largest.
    reserved : blocks that nothing else is given.
    pins : by branch that is not open yet, of requests that run again, the load that holds its blocks.
    """

    def __init__(self, cache: KVCache, options: SchedulerOptions) -> None:
        self._cache, self._options = cache, options
        self._entries: dict[Request, Entry] = {}
        self.requests: list[Request] = []
        self.width = self.worst_blocks = self.reserved = 0
        self.pins: dict[Branch, Load] = {}

    def __bool__(self) -> bool:
        return bool(self.requests)

    def looked_at(self, request: Request, first: Load) -> Entry | None:
        """The loads that a request would need, given the match of its first branch.

        None where nothing is cold. The matches of its other branches are owned, too.
        """
        live = request.live()
        if self._cache.table.num_groups > 1 or (len(live) == 1 and first.is_matched and not first.num_cold):
            return None  # over groups of layers its caller waits: there is host memory alone below the device
        size, lookahead = self._cache.spec.block_size, self._options.lookahead
        entry = Entry({live[0]: first}, shared=len(request.prompt) // size)
        try:
            for branch in live[1:]:
                entry.loads[branch] = self._cache.begin_load(
                    branch.saved, request.namespace, session=request.session, on_trial=True, trace=request.trace
                )
            is_cold = any(not load.is_matched or load.num_cold for load in entry.loads.values())
            if self._options.loading_share and is_cold:
                wanted = [-(-(len(branch.tokens) + 1 + lookahead) // size) for branch in live]
                total = wanted[0] + sum(max(0, blocks - entry.shared) for blocks in wanted[1:])
                entry.total = min(total, request.worst_blocks)  # its last token takes no block
                entry.total += sum(load.num_beside for load in entry.loads.values())
                entry.need = entry.reserve
                return entry
        except BaseException:
            entry.cancel()
            raise
        for load in list(entry.loads.values())[1:]:
            load.cancel()
        return None

    def has_share(self, entry: Entry, is_anything_running: bool) -> bool:
        """Whether the budget of all loads has room for these."""
        if not self.requests or not is_anything_running:
            return True
        needs = sum(other.need for other in self._entries.values())
        pool = self._cache.placement.pools[0]
        assert pool is not None
        return needs + entry.need <= self._options.loading_share * pool.max_blocks

    def lift(self, request: Request, entry: Entry) -> bool:
        """Have its promotions decided once there is room for them; False where there cannot be."""
        for load in entry.loads.values():
            load.set_deadline(self._deadline_s(request, load))
        entry.done()
        return not entry.has_failed

    def begin(self, request: Request, entry: Entry) -> None:
        """It loads from now on."""
        self._entries[request] = entry
        bisect.insort(self.requests, request, key=by_rank)
        request.state = "loading"
        self._add_up()

    def over(self) -> list[tuple[Request, Entry]]:
        """Look at all loads once: those that are over, by rank."""
        if not self.requests:
            return []
        found = [(request, self._entries[request]) for request in self.requests if self._entries[request].done()]
        self._add_up()
        return found

    def is_any_over(self) -> bool:
        """Whether one of them is over, by another look."""
        return any(self._entries[request].done() for request in self.requests)

    def leave(self, request: Request) -> Entry:
        """A request loads no more; its caller lets go of its loads."""
        entry = self._entries.pop(request)
        self.requests.remove(request)
        self._add_up()
        return entry

    def victim(self, better: Request | None) -> Request | None:
        """Whose loads to give up first, of those ranked worse than `better` (None: of all).

        One that holds the least work: not decided yet, then over, then on the way; of equals the worst rank.
        """
        found = [request for request in self.requests if better is None or by_rank(request) > by_rank(better)]
        return max(found, key=lambda request: (-self._stage(request), by_rank(request)), default=None)

    def blocks(self) -> list[NDArray[np.int32]]:
        """Ids of device blocks that the loads own, an array for each."""
        loads = [load for entry in self._entries.values() for load in entry.loads.values()]
        return [load.device_blocks() for load in [*loads, *self.pins.values()]]

    @property
    def num_moving(self) -> int:
        """Device blocks that are being read for them."""
        return sum(load.num_cold for entry in self._entries.values() for load in entry.loads.values() if load.is_moving)

    def unpin(self, branch: Branch) -> None:
        """A branch is open, or not wanted any more."""
        load = self.pins.pop(branch, None)
        if load is not None:
            load.cancel()

    def make_anew(self) -> None:
        """Nothing loads."""
        for entry in self._entries.values():
            entry.cancel()
        for load in self.pins.values():
            load.cancel()
        self._entries, self.requests, self.pins = {}, [], {}
        self._add_up()

    def check_integrity(self) -> None:
        """The books agree."""
        assert self.requests == sorted(self.requests, key=by_rank)
        assert set(self.requests) == set(self._entries)
        assert all(request.state == "loading" for request in self.requests)
        assert all(branch.seq is None for request in self.requests for branch in request.live())
        assert self.width == sum(request.width for request in self.requests)

    def _stage(self, request: Request) -> int:
        entry = self._entries[request]
        return 2 if any(load.is_moving for load in entry.loads.values()) else 1 if entry.is_over else 0

    def _add_up(self) -> None:
        entries = self._entries.values()
        self.reserved = sum(entry.reserve for entry in entries)
        self.width = sum(request.width for request in self._entries)
        self.worst_blocks = sum(request.worst_blocks for request in self._entries)

    def _deadline_s(self, request: Request, load: Load) -> float:
        """Twice the time that it should take, or as long as computing takes."""
        size, costs, tiers = self._cache.spec.block_size, self._cache.costs, load.tiers
        if tiers is None:
            num_tokens = len(request.prompt)
        else:
            num_tokens = load.num_cold * size
            counts = np.bincount(tiers)
            for entry in self._entries.values():  # those before it on the same links
                for other in entry.loads.values():
                    if other.is_moving and other.tiers is not None:
                        more = np.bincount(other.tiers, minlength=len(counts))
                        counts = more + np.pad(counts, (0, len(more) - len(counts)))
            each = [costs.load_s(int(count), tier) for tier, count in enumerate(counts.tolist()) if tier and count]
            if None not in each:
                compute_s = costs.compute_s(num_tokens, int(np.argmax(tiers > 0)) * size) if num_tokens else None
                return max(2 * sum(seconds or 0.0 for seconds in each), compute_s or 0.0, LEAST_S)
        return min(UNKNOWN_S + UNKNOWN_S_PER_TOKEN * num_tokens, MOST_UNKNOWN_S)

"""Running and suspended requests: opened from the cache, released, and resumed.

A branch that runs is in one of two places:

    computing   tokens of its prompt (or those from before its suspension) are left to compute
    lanes       one token is left to compute, and the next is wanted

A request of several branches that is taken up again is `held` until all of them are back: they are opened one after the
other, and each shares what those before it hold (reopening.py), so their common blocks are held once.
"""

from __future__ import annotations

import bisect
from typing import Literal

from pagedkv.cache.cache import KVCache
from pagedkv.errors import OutOfBlocks
from pagedkv.scheduler.lanes import Lanes
from pagedkv.scheduler.loading import Entry
from pagedkv.scheduler.needs import Amount
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.queue import by_rank
from pagedkv.scheduler.reopening import reopen
from pagedkv.scheduler.request import Branch, Request, State
from pagedkv.scheduler.room import Room

# What `Running.start` says of a request.
RUNS, NO_ROOM, LOADS, NO_ROOM_TO_LOAD, NO_SHARE, NO_PLACE_IN_STEP = range(6)


class Running(Room):
    """The requests that hold blocks, and those that had to give theirs up.

    Attributes
    ----------
    suspended : list of Request, by rank
    preemptions : how often a request was suspended, by method.
    begun : dict of Request to None
        Requests that have run for the first time since the scheduler emptied it.
    """

    def __init__(self, cache: KVCache, options: SchedulerOptions) -> None:
        super().__init__(cache, options)
        tiers = enumerate(self._placement.pools)
        self._below = next((tier for tier, pool in tiers if tier and pool is not None), None)  # where to swap to
        self.suspended: list[Request] = []
        self.preemptions = {"swap": 0, "recompute": 0}
        self.begun: dict[Request, None] = {}

    # ---- beginning and going on

    def keep_sequences(self) -> None:
        """Suspend requests until better placed ones find sequences for all their branches."""
        while self._lacks_sequences(0) and (len(self.requests) > 1 or self.loading):
            if not self.give_up_load(self.requests[-1] if self.requests else None):
                self.suspend(self.requests[-1])

    def start(
        self, request: Request, promised: Amount, *, may_run: bool = True, may_load: bool = True
    ) -> tuple[int, Amount]:
        """Begin a request that has a place, or take one up again, if there is room now.

        It runs, or it loads first; else nothing has changed.

        Parameters
        ----------
        request
        promised : what :meth:`promised` says, now.
        may_run : whether it may begin without a load.
        may_load : whether it may begin with one.

        Returns
        -------
        int
            RUNS, or LOADS: it loads now. NO_ROOM, NO_ROOM_TO_LOAD: there is no room for it, and in the second case it
            has something to load. NO_SHARE: it may not load now. NO_PLACE_IN_STEP: it may not run, and loads nothing.
        Amount
            That a request which runs needs to the end of its prompt, beside the blocks that were cached.

        Raises
        ------
        OutOfBlocks
            Nothing else runs or loads, and it does not fit: others than the scheduler hold the rest of the blocks.
        """
        alone, live = not (self.requests or self.loading), request.live()
        branch = live[0]
        needs, nothing = self.needs, self.needs.nothing
        beyond = nothing if alone else promised + needs.watermark
        tokens = branch.tokens
        # without touching anything: even if all that is cached of it were held by others already
        if not alone and self.lacks(needs.at_least(len(tokens)) + beyond):
            cached = self._cache.explain(tokens, request.namespace).cached_tokens
            shared = self.sharing.common_tokens(request, tokens, self.computing)
            if self.lacks(needs.at_least(len(tokens) - max(cached, shared)) + beyond):
                return NO_ROOM, nothing
        load = self._cache.begin_load(
            tokens, request.namespace, session=request.session, on_trial=True, trace=request.trace
        )
        try:
            entry = self.loading.looked_at(request, load)
            if entry is not None:
                return self._start_to_load(request, entry, beyond, alone, may_load)
            if not may_run:
                return NO_PLACE_IN_STEP, nothing
            try:
                load.awaits_reads = alone and not self.is_room_coming()
                seq = load.sequence()
            except OutOfBlocks:
                if alone:
                    raise
                return NO_ROOM, nothing
        finally:
            if request.state != "loading":
                load.cancel()
        fresh = needs.beside(seq.row, len(tokens), self.sharing.common_blocks(request, seq, self.computing))
        while self.lacks(fresh + beyond):
            if alone and self.waits_for_reads():
                seq.release()
                return NO_ROOM, nothing
            if not alone or not self.wait(alone=True):
                seq.release()
                if alone:
                    raise self.out_of_blocks(fresh)
                return NO_ROOM, nothing
        branch.seq = seq
        self._enter(request, live)
        return RUNS, fresh

    def _start_to_load(
        self, request: Request, entry: Entry, beyond: Amount, alone: bool, may_load: bool
    ) -> tuple[int, Amount]:
        """Begin the loads of a request, if their room and their share are there.

        It runs where they are over at once.
        """
        try:
            if not may_load or not self.loading.has_share(entry, bool(self.requests)):
                return NO_SHARE, self.needs.nothing
            if self.lacks(entry.need + beyond):
                entry.do_without_remainders()
            while self.lacks(entry.need + beyond):
                if alone and self.waits_for_reads():
                    return NO_ROOM, self.needs.nothing
                if not alone or not self.wait(alone=True):
                    if alone:
                        raise self.out_of_blocks(entry.need)
                    return NO_ROOM_TO_LOAD, self.needs.nothing
            if not self.loading.lift(request, entry):
                if alone:
                    raise self.out_of_blocks(entry.need)
                return NO_ROOM_TO_LOAD, self.needs.nothing
            if request in self.suspended:
                self.suspended.remove(request)
            self.loading.begin(request, entry)
        finally:
            if request.state != "loading":
                entry.cancel()
        if not entry.is_over or not self._may_open():
            return LOADS, self.needs.nothing
        self._run_loaded(request, entry)
        branch = request.live()[0]
        assert branch.seq is not None
        return RUNS, self.needs.beside(branch.seq.row, len(branch.tokens), 0)

    def run_loaded(self) -> bool:
        """Requests whose loads are over run now, in their order, whatever else waits.

        Whether there were any. One whose loads found no room takes its turn again.
        """
        found = self.loading.over()
        for request, entry in found:
            if entry.has_failed or not self._may_open():
                self.stop_loading(request)
            else:
                self._run_loaded(request, entry)
        return bool(found)

    def _run_loaded(self, request: Request, entry: Entry) -> None:
        first, *others = request.live()
        alone = not self.requests and self.loading.requests == [request]
        entry.loads[first].awaits_reads = alone and not self.is_room_coming()
        first.seq = entry.loads[first].sequence()
        self.loading.leave(request)
        self.loading.pins.update({branch: entry.loads[branch] for branch in others})
        self._enter(request, [first, *others])

    def stop_loading(self, request: Request) -> None:
        """Let go of a request's loads; it takes its turn again at its rank."""
        self.loading.leave(request).cancel()
        request.state = "suspended" if request.num_preemptions else "waiting"
        for branch in request.live():
            branch.saved = branch.tokens
        bisect.insort(self.suspended, request, key=by_rank)

    def give_up_load(self, better: Request | None) -> bool:
        """Let go of the loads of one request ranked worse than `better` (None: of any).

        Whether there was one.
        """
        victim = self.loading.victim(better)
        if victim is None:
            return False
        self.stop_loading(victim)
        return True

    def _enter(self, request: Request, live: list[Branch]) -> None:
        branch = live[0]
        assert branch.seq is not None
        self._cache.count(branch.seq)
        if not request.hit_tokens:
            request.hit_tokens = dict(branch.seq.hit_tokens)
        self._keep_again(branch)
        if request in self.suspended:
            self.suspended.remove(request)
        request.state = "running"
        if request.began_s is None:
            self.begun[request] = None
        bisect.insort(self.requests, request, key=by_rank)
        self.width += request.width
        self.worst_blocks = self.worst_blocks + request.worst_blocks
        if len(live) > 1:
            self.held.append(request)
        self.computing.append(live[0])

    def open_held(self) -> None:
        """Open branches of the requests that come back with several, as far as that can be done.

        Raises
        ------
        NoSequences
            One request is left, and others than the scheduler hold the sequences that its branches need.
        """
        for request in list(self.held):
            if request in self.held:
                self._open_next(request)

    def _open_next(self, request: Request) -> None:
        for branch in request.live():
            if branch.seq is None:
                while not self._opened(branch):
                    alone = len(self.requests) == 1 and not self.loading
                    if not self.give_up_load(request) and not self.wait(alone=alone):
                        self.suspend(self.requests[-1])
                    if request.state != "running":
                        return
                self.computing.append(branch)
            if branch in self.computing:
                if self.pending(branch) > 1:
                    return
                self.computing.remove(branch)
        self.held.remove(request)
        for branch in request.live():
            self.lanes.add(branch)

    def _opened(self, branch: Branch) -> bool:
        """Open a branch of a request that runs.

        False if there is no room for it beside other requests.
        """
        alone = len(self.requests) == 1
        if self._table.num_rows >= self._cache.max_sequences:
            if alone and not self.loading:
                raise self._no_sequences(branch.request)
            return False
        branch.seq = reopen(self._cache, branch, alone, not self._options.loading_share)
        if branch.seq is not None:
            self.loading.unpin(branch)
        self._keep_again(branch)
        return branch.seq is not None

    def _keep_again(self, branch: Branch) -> None:
        """Keep the blocks that were the first to go like all others."""
        if branch.seq is not None and branch.request.preempted_by == "recompute" and self._below is not None:
            branch.seq.retain()

    # ---- stopping

    def suspend(self, request: Request) -> None:
        """Take a running request's blocks away; it goes on later from the tokens it has.

        Its whole blocks stay cached and go when another request needs the room, no sooner and no more of them: to
        a colder tier, from which they come back, or for good. Where computing them again is cheaper than moving them
        twice, they are the first to go from every tier until it is taken up again.
        """
        how = self._cheaper(sum(branch.seq.num_computed for branch in request.live() if branch.seq is not None))
        for branch in request.live():
            if branch.seq is not None:
                branch.saved = branch.tokens
                if how == "recompute" and self._below is not None:
                    branch.seq.retain(priority=0, ttl_s=0)
        self.leave(request, "suspended")
        bisect.insort(self.suspended, request, key=by_rank)
        request.preempted_by = how
        request.num_preemptions += 1
        self.preemptions[how] += 1

    def begin_alone(self, request: Request) -> None:
        """Suspend the one request that runs, and drop all cached blocks.

        It begins anew, and no other one beside it.
        """
        self.suspend(request)
        self._placement.clear()
        self.alone = request

    def _cheaper(self, num_tokens: int) -> Literal["swap", "recompute"]:
        """How a request gets so many tokens back: as the options say, or as the measured costs do.

        As long as they say nothing, swap, if there is anywhere to swap to.
        """
        if self._below is None or self._options.preemption == "recompute":
            return "recompute"
        if self._options.preemption == "swap":
            return "swap"
        load = self._cache.costs.load_s(num_tokens // self._cache.spec.block_size, self._below)
        compute = self._cache.costs.compute_s(num_tokens)
        return "recompute" if load is not None and compute is not None and 2 * load > compute else "swap"

    def leave(self, request: Request, state: State) -> None:
        """A running request's live branches let go of everything."""
        for branch in request.live():
            if branch in self.computing:
                self.computing.remove(branch)
            elif branch.seq is not None and request not in self.held:
                self.lanes.remove(branch)
            branch.let_go()
            self.loading.unpin(branch)
        if request in self.held:
            self.held.remove(request)
        self.requests.remove(request)
        self.width -= request.width
        self.worst_blocks = self.worst_blocks - request.worst_blocks
        request.state = state

    def back_to_computing(self, branch: Branch) -> None:
        """A branch of the lanes lost more than its last token.

        Beams wait for each other, as they go in step.
        """
        request = branch.request
        if request.beams == 1 or len(request.live()) == 1:
            self.lanes.remove(branch)
        elif request not in self.held:
            for beam in request.live():
                self.lanes.remove(beam)
            self.held.append(request)
        self.computing.append(branch)

    def make_anew(self, requests: list[Request]) -> None:
        """No request runs; of these, which have not ended, those that had begun are suspended."""
        self.lanes = Lanes(self._options.max_running)
        self.loading.make_anew()
        self.computing, self.held, self.requests = [], [], []
        self.width, self.worst_blocks = 0, self.needs.nothing
        self.suspended = sorted((request for request in requests if request.admitted), key=by_rank)
        for request in requests:
            request.state = "suspended" if request.admitted else "waiting"

    # ---- tests

    def check_integrity(self) -> None:
        """Every branch that runs is in one place, and no other one is."""
        self.lanes.check_integrity()
        assert self.requests == sorted(self.requests, key=by_rank)
        assert self.suspended == sorted(self.suspended, key=by_rank)
        assert self.width == sum(request.width for request in self.requests) <= self._options.max_running
        assert self.worst_blocks == sum((request.worst_blocks for request in self.requests), self.needs.nothing)
        placed = [*self.lanes.branches, *self.computing]
        assert len(set(placed)) == len(placed)
        for request in self.requests:
            assert request.state != "suspended"
            for branch in request.live():
                assert (branch in placed) or request in self.held
        for branch in placed:
            assert not branch.done
            assert branch.request in self.requests
        for branch in self.lanes.branches:
            assert self.pending(branch) in (0, 1 + len(branch.draft)), "committed and not reported, or the next token"
        self.loading.check_integrity()
        for request in self.suspended:
            assert request.state == "suspended" or (request.state == "waiting" and request.admitted)
            assert all(branch.seq is None and len(branch.saved) for branch in request.live())

"""What runs and what was suspended: opened from the cache, let go of, and taken up again.

A branch that runs is in one of two places:

    computing   tokens of its prompt (or of what it had before it was suspended) are left to compute
    lanes       one token is left to compute, and the next is wanted

A request of several branches that is taken up again is `held` until all of them are back: they are opened one after the
other, and each shares what those before it hold (reopening.py), so their common blocks are held once.
"""

from __future__ import annotations

import bisect
from typing import Literal

import numpy as np

from pagedkv.cache.cache import KVCache
from pagedkv.errors import InvalidArgument, OutOfBlocks
from pagedkv.scheduler.lanes import Lanes
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.queue import by_rank
from pagedkv.scheduler.reopening import reopen
from pagedkv.scheduler.request import Branch, Request, State


class NoSequences(InvalidArgument):
    """A request lacks sequences, because others than the scheduler hold them."""


class Running:
    """The requests that hold blocks, and those that had to give theirs up.

    Attributes
    ----------
    requests, suspended : list of Request, by rank
    lanes : Lanes
    computing : list of Branch
    held : list of Request
    width : sequences that the running requests may come to have.
    worst_blocks : blocks that they may come to hold, shared ones counted for each.
    preemptions : how often a request was suspended, by method.
    """

    def __init__(self, cache: KVCache, options: SchedulerOptions) -> None:
        self._cache, self._options = cache, options
        self._table, self._placement, self._moves = cache.table, cache.placement, cache._moves
        pool = self._placement.pools[0]
        assert pool is not None
        self._pool = pool
        self._seen = 0
        self.capacity = pool.max_blocks
        tiers = enumerate(self._placement.pools)
        self._below = next((tier for tier, pool in tiers if tier and pool is not None), None)  # where to swap to
        self._watermark = int(options.watermark * self.capacity)
        self.requests: list[Request] = []
        self.suspended: list[Request] = []
        self.lanes = Lanes(options.max_running)
        self.computing: list[Branch] = []
        self.held: list[Request] = []
        self.width = self.worst_blocks = 0
        self.preemptions = {"swap": 0, "recompute": 0}

    # ---- room

    def room(self) -> int:
        """Blocks that a step may be given: free ones, and those that the tree alone owns."""
        self._seen = self._moves.num_ended  # before it looks: what ends after this is worth another look
        return self._pool.num_obtainable

    def out_of_blocks(self, asked: int) -> OutOfBlocks:
        """The error for a scheduler whose last request does not fit beside what others hold."""
        return self._placement.out_of_blocks(asked)

    def wait(self) -> bool:
        """Wait until a move or a prefetch is over, which may leave room.

        False if none is under way.

        One that has ended since :meth:`room` was asked, or since the last wait, counts.
        """
        is_over = self._moves.wait_since(self._seen)
        self._seen = self._moves.num_ended
        return is_over

    def left_by_others(self) -> tuple[int, int]:
        """Blocks and sequences that others than the scheduler do not hold."""
        rows = self._rows(self.requests)
        held_by_others = self._pool.counts()["live"] - self._distinct(rows)
        return self.capacity - held_by_others, self._cache.max_sequences - self._table.num_rows + len(rows)

    def is_beyond(self, request: Request) -> bool:
        """Whether a running request needs more blocks than its worst case.

        Its branches share less than they could.
        """
        return self._distinct(self._rows([request])) + self.promised() > request.worst_blocks

    def _rows(self, requests: list[Request]) -> list[int]:
        return [branch.seq.row for request in requests for branch in request.live() if branch.seq is not None]

    def _distinct(self, rows: list[int]) -> int:
        return len(np.unique(np.concatenate([self._table.blocks(row) for row in rows]))) if rows else 0

    def pending(self, branch: Branch) -> int:
        """Tokens of it that are not computed."""
        assert branch.seq is not None
        num_tokens, computed, _, _ = self._table.info(branch.seq.row)
        return num_tokens - computed

    def wanted(self, branch: Branch) -> int:
        """Tokens that a branch of `computing` still has to compute before it is done with that."""
        return self.pending(branch) - (branch.request in self.held)

    def promised(self) -> int:
        """Blocks that running sequences need for what they have begun.

        The lanes' next step, prompts to their end.
        """
        need = self._table.blocks_needed(self.lanes.rows, None, self._options.lookahead)
        if self.computing:
            rows = [branch.seq.row for branch in self.computing if branch.seq is not None]
            need += self._table.blocks_needed(rows, None, self._options.lookahead)
        return need

    # ---- beginning and going on

    def has_place(self, request: Request) -> bool:
        """Whether there are sequences left for a request.

        And, where that is wanted, blocks for its worst case.

        Raises
        ------
        NoSequences
            Nothing else runs, and still there are too few: others than the scheduler hold the cache's sequences.
        """
        options = self._options
        if self.width + request.width > options.max_running:
            return False
        if self._lacks_sequences(request.width):
            if self.requests:
                return False
            raise self._no_sequences(request)
        if options.admission == "worst_case" and self.requests:
            return self.worst_blocks + request.worst_blocks + self._watermark <= self.capacity
        return True

    def _lacks_sequences(self, more: int) -> bool:
        """Whether too few sequences are free for so many more.

        Beside the branches that the running requests may get.
        """
        free = self._cache.max_sequences - self._table.num_rows - more
        to_come = self.width - len(self.lanes.branches) - len(self.computing)  # or fewer
        if free >= to_come:
            return False
        return free < sum(map(_most_branches, self.requests)) - len(self._rows(self.requests))

    def keep_sequences(self) -> None:
        """Suspend requests until better placed ones find sequences for all their branches."""
        while len(self.requests) > 1 and self._lacks_sequences(0):
            self.suspend(self.requests[-1])

    def _no_sequences(self, request: Request) -> NoSequences:
        others = self._table.num_rows - len(self._rows(self.requests))
        return NoSequences(
            f"{request} needs {request.width} sequences, and others than the scheduler hold {others} of the cache's "
            f"{self._cache.max_sequences}: release them, or open the cache with a larger max_sequences"
        )

    def start(self, request: Request, promised: int) -> int:
        """Begin a request that has a place, or take one up again, if there is room now.

        Else nothing has changed.

        Parameters
        ----------
        request
        promised : what :meth:`promised` says, now.

        Returns
        -------
        int
            Blocks that it needs to the end of its prompt, beside those that were cached; -1 where there is no room.

        Raises
        ------
        OutOfBlocks
            Nothing else runs, and still it does not fit: others than the scheduler hold the rest of the blocks.
        """
        alone, live = not self.requests, request.live()
        branch = live[0]
        beyond = 0 if alone else promised + self._watermark
        tokens, size = branch.tokens, self._cache.spec.block_size
        if not alone:  # without touching anything: even if all that is cached of it were held by others already
            room = self.room()
            if len(tokens) // size + beyond > room:
                cached = self._cache.explain(tokens, request.namespace).cached_tokens
                if (len(tokens) - cached) // size + beyond > room:
                    return -1
        try:
            seq = self._cache.sequence(tokens, request.namespace, session=request.session, on_trial=True)
        except OutOfBlocks:
            if alone:
                raise
            return -1
        fresh = -(-(len(tokens) + self._options.lookahead) // size) - self._table.info(seq.row).num_blocks
        while fresh + beyond > self.room():
            if not alone or not self.wait():
                seq.release()
                if alone:
                    raise self.out_of_blocks(fresh)
                return -1
        self._cache.count(seq)
        branch.seq = seq
        if not request.admitted:
            request.hit_tokens = dict(seq.hit_tokens)
        self._keep_again(branch)
        self._enter(request, live)
        return fresh

    def _enter(self, request: Request, live: list[Branch]) -> None:
        if request.state == "suspended":
            self.suspended.remove(request)
        request.state = "running"
        bisect.insort(self.requests, request, key=by_rank)
        self.width += request.width
        self.worst_blocks += request.worst_blocks
        if len(live) > 1:
            self.held.append(request)
        self.computing.append(live[0])

    def open_held(self) -> None:
        """Open what can be opened of the requests that come back with several branches.

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
                    if not self.wait():
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
            if alone:
                raise self._no_sequences(branch.request)
            return False
        branch.seq = reopen(self._cache, branch, alone)
        self._keep_again(branch)
        return branch.seq is not None

    def _keep_again(self, branch: Branch) -> None:
        """What was the first to go is kept like everything else."""
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
        if request in self.held:
            self.held.remove(request)
        self.requests.remove(request)
        self.width -= request.width
        self.worst_blocks -= request.worst_blocks
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
        self.computing, self.held, self.requests = [], [], []
        self.width = self.worst_blocks = 0
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
        assert self.worst_blocks == sum(request.worst_blocks for request in self.requests)
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
        for request in self.suspended:
            assert request.state == "suspended"
            assert all(branch.seq is None and len(branch.saved) for branch in request.live())


def _most_branches(request: Request) -> int:
    """Branches that a running request may come to have.

    Beams fork again and again, samples once.
    """
    live = request.live()
    return request.width if request.beams > 1 or not live[0].num_output else len(live)

"""What the next step computes.

Every lane's token, drafts as far as they fit, and chunks of prompts with the rest.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.cache import KVCache
from pagedkv.cache.moves import Claim
from pagedkv.cache.sequence import Batch, Sequence
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.plan import Plan
from pagedkv.scheduler.queue import by_rank
from pagedkv.scheduler.request import NO_TOKENS, Branch, Request, Tokens
from pagedkv.scheduler.running import Running

Chunk: TypeAlias = tuple[Branch, Sequence, int]  # whose prompt, and how many tokens of it


class Planner:
    """Makes plans over the running requests.

    Suspends those of the worst rank where there are too few blocks.

    Parameters
    ----------
    cache, running, options : of the scheduler.
    claim : told what the next plan needs.
    """

    def __init__(self, cache: KVCache, running: Running, options: SchedulerOptions, claim: Claim) -> None:
        self._table, self._running, self._options = cache.table, running, options
        self._claim = claim
        self._most_blocks = 1 + -(-(1 + options.lookahead) // cache.spec.block_size)  # of a lane: new ones, and a copy
        self._ones = np.ones(options.max_running, np.int32)
        self._ones.flags.writeable = False

    def plan(self, drafts: dict[Branch, Tokens], expired: tuple[Request, ...]) -> Plan:
        """The next step's work; drafts that found no place are forgotten.

        Raises
        ------
        OutOfBlocks
            One request is left, and it does not fit beside what others than the scheduler hold.
        """
        running, lanes, lookahead = self._running, self._running.lanes, self._options.lookahead
        if not running.computing and not drafts:
            branches, batch = lanes.as_planned()
            n = len(branches)
            most = n * self._most_blocks  # what a step of them can need at most: seldom worth a closer look
            self._claim.take(most)
            if most > running.room():
                need = self._table.blocks_needed(batch.rows, None, lookahead)
                self._claim.take(need)
                if need > running.room():  # a prefetch took it meanwhile
                    return self._tight(drafts, expired)
            return self._made(batch, self._ones[:n], n, branches, expired, n, False)
        return self._tight(drafts, expired)

    def _tight(self, drafts: dict[Branch, Tokens], expired: tuple[Request, ...]) -> Plan:
        """With chunks and drafts, suspending requests until it fits."""
        running, lanes = self._running, self._running.lanes
        drafted = bool(drafts) and self._propose(drafts)
        left_out: set[Branch] = set()
        while True:
            n = len(lanes)
            lane_lens = self._lane_lens() if drafted else self._ones[:n]
            num_tokens = int(lane_lens.sum()) if drafted else n
            ending, going_on = self._chunks(self._options.max_batch_tokens - num_tokens, left_out)
            chunks = [*ending, *going_on]
            rows, q_lens = np.empty(n + len(chunks), np.int64), np.empty(n + len(chunks), np.int32)
            rows[:n], q_lens[:n] = lanes.rows, lane_lens
            for i, (_, seq, take) in enumerate(chunks, n):
                rows[i], q_lens[i] = seq.row, take
                num_tokens += take
            need = self._table.blocks_needed(rows, q_lens, self._options.lookahead)
            self._claim.take(need)
            if not len(rows) or need <= running.room():
                break
            self._make_way(need, [chunk[0] for chunk in chunks], left_out)
        sequences = [*lanes.sequences, *(chunk[1] for chunk in chunks)]
        wanting = [*lanes.branches, *(chunk[0] for chunk in ending)]
        return self._made(Batch(sequences, rows), q_lens, num_tokens, wanting, expired, n, drafted)

    def _made(
        self,
        batch: Batch,
        q_lens: NDArray[np.int32],
        num_tokens: int,
        wanting: list[Branch],
        expired: tuple[Request, ...],
        from_prompt: int,
        has_drafts: bool,
    ) -> Plan:
        expected = self._table.info(batch.rows[0]).num_computed + int(q_lens[0]) if len(batch) else 0
        lookahead = self._options.lookahead
        return Plan(batch, q_lens, num_tokens, lookahead, wanting, expired, from_prompt, has_drafts, expected)

    def _chunks(self, budget: int, left_out: set[Branch]) -> tuple[list[Chunk], list[Chunk]]:
        """Who computes how much of its prompt, by rank as far as the budget goes.

        Those that then want their next token, and those that do not yet.
        """
        ending: list[Chunk] = []
        going_on: list[Chunk] = []
        computing = self._running.computing
        if len(computing) > 1:
            computing = sorted(computing, key=lambda branch: by_rank(branch.request))
        for branch in computing:
            wanted = self._running.wanted(branch)
            take = min(wanted, budget)
            if take > 0 and branch not in left_out and branch.seq is not None:
                ends = take == wanted and branch.request not in self._running.held
                (ending if ends else going_on).append((branch, branch.seq, take))
                budget -= take
        return ending, going_on

    def _lane_lens(self) -> NDArray[np.int32]:
        lanes = self._running.lanes
        return np.array([1 + len(branch.draft) for branch in lanes.branches], np.int32)

    def _propose(self, drafts: dict[Branch, Tokens]) -> bool:
        """Append what fits of the drafts; whether anything did."""
        lanes = self._running.lanes
        budget = most = self._options.max_batch_tokens - len(lanes)
        for i, branch in enumerate(lanes.branches):
            if branch in drafts and branch.seq is not None:
                k = min(len(drafts[branch]), lanes.left(i) - 1, budget)
                if k > 0:
                    branch.known = branch.seq.tokens
                    branch.seq.append(drafts[branch][:k])
                    branch.draft = drafts[branch][:k]
                    branch.known = None
                    budget -= k
        return budget < most

    def _make_way(self, need: int, chunks: list[Branch], left_out: set[Branch]) -> None:
        """Give up what is least wanted.

        The drafts, then the worst request's chunk, then, unless something under way leaves room when it is over, that
        request.
        """
        running = self._running
        proposed = [branch for branch in running.lanes.branches if len(branch.draft)]
        if proposed:
            for branch in proposed:
                self.forget_draft(branch)
            return
        worst = running.requests[-1]
        chunk = next((branch for branch in chunks if branch.request is worst), None)
        alone = len(running.requests) == 1
        if chunk is not None and not alone:
            left_out.add(chunk)
        elif running.wait():
            return
        elif alone:
            raise running.out_of_blocks(need)
        else:
            running.suspend(worst)

    def forget_draft(self, branch: Branch) -> None:
        """Cut a branch back to before its draft."""
        if len(branch.draft) and branch.seq is not None:
            branch.known = branch.tokens
            branch.seq.truncate(branch.seq.num_tokens - len(branch.draft))
            branch.draft = NO_TOKENS
            branch.known = None
            if self._running.pending(branch) > 1:
                self._running.back_to_computing(branch)

"""Chooses the tokens that the next step computes.

Every lane's token, drafts as far as they fit, and chunks of prompts with the rest.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.cache import KVCache
from pagedkv.cache.moves import Claim
from pagedkv.cache.sequence import Batch, Sequence
from pagedkv.scheduler.needs import Amount
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.plan import Plan
from pagedkv.scheduler.queue import by_rank
from pagedkv.scheduler.request import NO_TOKENS, Branch, Request, Tokens
from pagedkv.scheduler.running import Running
from pagedkv.scheduler.sharing import StepShares

Chunk: TypeAlias = tuple[Branch, Sequence, int]  # whose prompt, and how many tokens of it


class Planner:
    """Makes plans over the running requests.

    Suspends those of the worst rank where there are too few blocks.

    Parameters
    ----------
    cache, running, options : of the scheduler.
    claim : receives the needs of the next plan.
    """

    def __init__(self, cache: KVCache, running: Running, options: SchedulerOptions, claim: Claim) -> None:
        self._table, self._running, self._options = cache.table, running, options
        self._claim, self._block_size = claim, cache.spec.block_size
        self._ones = np.ones(options.max_running, np.int32)
        self._ones.flags.writeable = False

    def plan(self, drafts: dict[Branch, Tokens], expired: tuple[Request, ...]) -> Plan:
        """The next step's work; drafts that found no place are forgotten.

        Raises
        ------
        OutOfBlocks
            One request is left, and it does not fit beside what others than the scheduler hold.
        """
        running, lanes, needs = self._running, self._running.lanes, self._running.needs
        if not running.computing and not drafts:
            branches, batch = lanes.as_planned()
            n = len(branches)
            most = needs.of_lanes(n)
            self._claim.take(needs.as_blocks(most))
            if running.lacks(most):
                need = needs.of_step(batch.rows)
                self._claim.take(needs.as_blocks(need))
                if running.lacks(need):  # a prefetch took it meanwhile
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
            shares = running.sharing.in_step(len(running.computing))
            ending, going_on = self._chunks(self._options.max_batch_tokens - num_tokens, left_out, shares)
            chunks = [*ending, *going_on]
            rows, q_lens = np.empty(n + len(chunks), np.int64), np.empty(n + len(chunks), np.int32)
            rows[:n], q_lens[:n] = lanes.rows, lane_lens
            for i, (_, seq, take) in enumerate(chunks, n):
                rows[i], q_lens[i] = seq.row, take
                num_tokens += take
            follow = shares.follow(lanes.branches, [chunk[0] for chunk in chunks])
            need = running.needs.of_step(rows, q_lens, follow)
            self._claim.take(running.needs.as_blocks(need))
            if not len(rows) or not running.lacks(need):
                break
            if not self._make_way(need, [chunk[0] for chunk in chunks], left_out):
                none = Batch([], np.empty(0, np.int64))
                return self._made(none, np.empty(0, np.int32), 0, [], expired, 0, False)
        if left_out and not len(rows):
            running.waits_beside_loads()
        sequences = [*lanes.sequences, *(chunk[1] for chunk in chunks)]
        wanting = [*lanes.branches, *(chunk[0] for chunk in ending)]
        plan = self._made(Batch(sequences, rows, follow), q_lens, num_tokens, wanting, expired, n, drafted)
        plan.shared_tokens = shares.shared_tokens
        return plan

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
        if batch.follow is not None:
            expected += sum(self._taken(batch, blocks) for at, _, blocks in batch.follow.tolist() if at == 0)
        lookahead = self._options.lookahead
        return Plan(batch, q_lens, num_tokens, lookahead, wanting, expired, from_prompt, has_drafts, expected)

    def _taken(self, batch: Batch, blocks: int) -> int:
        """Tokens that the first sequence of a batch takes from its leader."""
        return blocks * self._block_size - self._table.info(batch.rows[0]).num_computed

    def _chunks(self, budget: int, left_out: set[Branch], shares: StepShares) -> tuple[list[Chunk], list[Chunk]]:
        """Who computes how much of its prompt, by rank as far as the budget goes.

        Those that then want their next token, and those that do not yet. `shares` is told of all.
        """
        ending: list[Chunk] = []
        going_on: list[Chunk] = []
        computing = self._running.computing
        if len(computing) > 1:
            computing = sorted(computing, key=lambda branch: by_rank(branch.request))
        for branch in computing:
            if budget <= 0:
                break
            if branch in left_out or branch.seq is None:
                continue
            taken = shares.taken(branch, branch.seq)
            wanted = self._running.wanted(branch) - taken
            take = min(wanted, budget)
            if taken >= 0 and take > 0:
                shares.add(branch, branch.seq, take)
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

    def _make_way(self, need: Amount, chunks: list[Branch], left_out: set[Branch]) -> bool:
        """Suspend the least wanted request; False where the step has to wait for reads under way.

        Drop the drafts, then loads of a worse rank, then the worst request's chunk; then suspend that request, unless
        something under way leaves room when it is over.
        """
        running = self._running
        proposed = [branch for branch in running.lanes.branches if len(branch.draft)]
        if proposed:
            for branch in proposed:
                self.forget_draft(branch)
            return True
        worst = running.requests[-1]
        chunk = next((branch for branch in chunks if branch.request is worst), None)
        alone = len(running.requests) == 1 and not running.loading
        if running.give_up_load(worst):
            return True
        if chunk is not None and not alone:
            left_out.add(chunk)
        elif alone and running.waits_for_reads():
            return False
        elif running.wait(alone=alone):
            return True
        elif alone:
            raise running.out_of_blocks(need)
        else:
            running.suspend(worst)
        return True

    def forget_draft(self, branch: Branch) -> None:
        """Cut a branch back to before its draft."""
        if len(branch.draft) and branch.seq is not None:
            branch.known = branch.tokens
            branch.seq.truncate(branch.seq.num_tokens - len(branch.draft))
            branch.draft = NO_TOKENS
            branch.known = None
            if self._running.pending(branch) > 1:
                self._running.back_to_computing(branch)

"""Prompts that go on from blocks which requests of better rank compute.

A prompt under way can save work in two ways. Between steps it goes on from blocks that another request
has committed to the prefix tree. Inside a step it names whole blocks that a request of better rank computes in that
very step: an engine writes all rows of a layer before it attends any of them, so they are there when they are read.

The request of the best rank takes of the step's tokens first. A prompt that gets none of them would get none without
sharing either, so it loses nothing by waiting for the other's blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.cache import KVCache
from pagedkv.cache.sequence import Sequence
from pagedkv.scheduler.queue import by_rank
from pagedkv.scheduler.reopening import common_tokens
from pagedkv.scheduler.request import Branch, Request, Tokens
from pagedkv.spec.namespace import Namespace

Key: TypeAlias = tuple[Namespace | None, bytes]


class Sharing:
    """Finds what prompts under way can take from each other.

    Parameters
    ----------
    cache : KVCache
    share : ``"step"``, ``"next"`` or ``"never"``, see :class:`SchedulerOptions`.

    Attributes
    ----------
    shared_tokens : int
        Tokens so far that were not computed because another request had computed them since the prompt began.
    """

    def __init__(self, cache: KVCache, share: str) -> None:
        self._cache, self._share = cache, share
        self._table, self._size = cache.table, cache.spec.block_size
        # In this call of schedule(): tokens and blocks that each saves, and prompts that begin alike.
        self._saved: dict[Branch, tuple[int, int]] = {}
        self._alike: dict[Key, list[Branch]] = {}
        self.shared_tokens = 0

    def catch_up(self, computing: Iterable[Branch]) -> None:
        """Let prompts go on from blocks that others have committed since the last step."""
        self._saved, self._alike = {}, {}
        if self._share != "never":
            rows = [branch.seq.row for branch in computing if branch.seq is not None]
            if rows:
                self.shared_tokens += self._table.catch_up(rows) * self._size

    # ---- for admission: an estimate over all steps to come

    def saved_tokens(self, computing: Seq[Branch]) -> int:
        """Tokens that these prompts need not compute, because others of them do."""
        return sum(tokens for tokens, _ in self._all_saved(computing))

    def saved_blocks(self, computing: Seq[Branch]) -> int:
        """Blocks that these prompts need only once."""
        return sum(blocks for _, blocks in self._all_saved(computing))

    def common_tokens(self, request: Request, tokens: Tokens, computing: Iterable[Branch]) -> int:
        """Leading tokens, in whole blocks, that a request shares with a better placed prompt.

        For a request that has no sequence yet.
        """
        self._note(computing)
        most, found = max(len(tokens) - 1, 0) // self._size * self._size, 0
        for branch in self._better(request):
            found = max(found, common_tokens(branch.tokens, tokens[:most]))
            if found == most:
                break
        return found // self._size * self._size

    def common_blocks(self, request: Request, seq: Sequence, computing: Seq[Branch]) -> int:
        """The same for a request that has a sequence: whole blocks that it can take; 0 if none."""
        if not computing:
            return 0
        self._note(computing)
        return self._common(request, seq)

    def _all_saved(self, computing: Seq[Branch]) -> list[tuple[int, int]]:
        if len(computing) < 2:  # nothing to share with
            return []
        self._note(computing)
        return [self._saved[branch] for branch in computing] if self._saved else []

    def _note(self, computing: Iterable[Branch]) -> None:
        """Find what prompts save that have begun in this call of schedule()."""
        if self._share == "never":
            return
        new = [branch for branch in computing if branch not in self._saved]
        for branch in new:
            self._alike.setdefault(_key(branch.request, self._size), []).append(branch)
        for branch in new:
            self._saved[branch] = self._saved_by(branch)

    def _saved_by(self, branch: Branch) -> tuple[int, int]:
        common = 0 if branch.seq is None else self._common(branch.request, branch.seq)
        if branch.seq is None or not common:
            return 0, 0
        num_tokens, computed, num_blocks, _ = self._table.info(branch.seq.row)
        waits = self._share == "next"  # and asks this step for nothing
        return num_tokens - computed if waits else common * self._size - computed, max(0, common - num_blocks)

    def _common(self, request: Request, seq: Sequence) -> int:
        rows = [one.seq.row for one in self._better(request) if one.seq is not None]
        if not rows:
            return 0
        first = int(self._table.shareable(seq.row, rows[:1])[0])
        if len(rows) == 1 or first == (seq.num_tokens - 1) // self._size:  # no other one can have more
            return first
        return int(self._table.shareable(seq.row, rows).max())

    def _better(self, request: Request) -> list[Branch]:
        """Prompts under way that begin as this request does, and rank before it."""
        alike = self._alike.get(_key(request, self._size))
        if alike is None:
            return []
        mine = by_rank(request)
        return [one for one in alike if one.seq is not None and by_rank(one.request) < mine]

    # ---- for a plan

    def in_step(self, num_prompts: int) -> StepShares:
        """The blocks that the prompts of one step, so many at most, take from each other.

        To be told of each, the best rank first.
        """
        return StepShares(self._cache, self._share if num_prompts > 1 else "never")


class StepShares:
    """The prompts that compute in one step, and who goes on from whose blocks.

    Attributes
    ----------
    shared_tokens : int
        Tokens that followers take from their leaders.
    """

    def __init__(self, cache: KVCache, share: str) -> None:
        self._table, self._size, self._share = cache.table, cache.spec.block_size, share
        self._alike: dict[Key, list[tuple[Branch, int, int]]] = {}  # with rows, and tokens computed after the step
        self._links: list[tuple[Branch, Branch, int]] = []
        self._next: tuple[Branch, int] | None = None  # the leader of the prompt that was asked for last, and blocks
        self.shared_tokens = self._taken = 0

    def taken(self, branch: Branch, seq: Sequence) -> int:
        """Tokens that a prompt takes from a better placed one of this step; -1 if it must wait."""
        self._next, self._taken = None, 0
        alike = self._alike.get(_key(branch.request, self._size)) if self._alike else None
        if alike is None:
            return 0
        common = self._table.shareable(seq.row, [row for _, row, _ in alike])
        if not common.any():
            return 0
        ends = np.array([end for _, _, end in alike], np.int64)
        computed = self._table.info(seq.row).num_computed
        if self._share == "next":  # its next block is computed in this step
            return -1 if np.any((common > 0) & (ends > computed // self._size * self._size)) else 0
        reached = np.minimum(common, ends // self._size)
        best = int(reached.argmax())  # the first of the best: it follows none, or the fewest
        blocks = int(reached[best])
        if blocks > computed // self._size:
            self._next, self._taken = (alike[best][0], blocks), blocks * self._size - computed
        return self._taken

    def add(self, branch: Branch, seq: Sequence, take: int) -> None:
        """The prompt that :meth:`taken` was asked for last computes so many tokens."""
        if self._share == "never":
            return
        _, computed, _, committed = self._table.info(seq.row)
        if self._next is not None:
            leader, blocks = self._next
            self._links.append((branch, leader, blocks))
            self.shared_tokens += self._taken
        elif self._share == "next" and committed < computed // self._size:
            return  # the tree has refused blocks of it: others would wait for nothing
        end = computed + self._taken + take
        self._alike.setdefault(_key(branch.request, self._size), []).append((branch, seq.row, end))

    def follow(self, lanes: Seq[Branch], prompts: Seq[Branch]) -> NDArray[np.int32] | None:
        """The argument `follow` of a step over these lanes and then these prompts.

        Rows of (follower, leader, blocks), by position in the batch; None if no prompt follows another one.
        """
        if not self._links:
            return None
        at = {branch: i for i, branch in enumerate(prompts, len(lanes))}
        return np.array([(at[branch], at[leader], blocks) for branch, leader, blocks in self._links], np.int32)


def _key(request: Request, block_size: int) -> Key:
    """The namespace and the first block: requests that may share blocks have both in common."""
    if request.kin is None:
        request.kin = request.namespace, request.prompt[:block_size].tobytes()
    return request.kin

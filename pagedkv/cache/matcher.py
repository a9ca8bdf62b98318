"""Begins loads of cached prefixes, and says which part of one is worth having."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.placement import Placement
from pagedkv._core.tier import Tier
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.load import Load
from pagedkv.cache.moves import Moves
from pagedkv.cache.remote.asking import Asking
from pagedkv.cache.remote.lookups import Lookups
from pagedkv.errors import OutOfBlocks
from pagedkv.observe.hooks import Hooks

DISK, REMOTE = int(Tier.DISK), int(Tier.REMOTE)


class Matcher:
    """Begins loads, for sequences and prefetches. Thread-safe.

    Parameters
    ----------
    placement : Placement
    moves : Moves
    costs : says which disk hits are worth their loading.
    block_size : tokens of a block.
    deadline_s : a block not loaded from disk, or not started from memory, by then is given up; None to wait.
    partial_hits : whether loads bring the block that the prompt shares in part.
    hooks : told of matches, promotions and prefetches.
    lookups : ask the remote store; None without one.
    page_bytes : by group of layers; None where every layer keeps every block.
    """

    def __init__(
        self,
        placement: Placement,
        moves: Moves,
        costs: CostModel,
        block_size: int,
        deadline_s: float | None,
        partial_hits: bool,
        hooks: Hooks,
        lookups: Lookups | None = None,
        page_bytes: Sequence[int] | None = None,
    ) -> None:
        self._placement, self._moves, self._costs, self._hooks = placement, moves, costs, hooks
        self._block_size, self.deadline_s, self._partial_hits = block_size, deadline_s, partial_hits
        self._lookups, self._page_bytes = lookups, page_bytes
        self._slow = (DISK,) if lookups is None else (DISK, REMOTE)
        self._counting = threading.Lock()
        self.declined_tokens = 0

    def begin_load(
        self,
        prompt: NDArray[np.int32],
        root: int,
        deadline_s: float | None = None,
        trace: object = None,
        await_remote_s: float = 0.0,
    ) -> Load:
        """A load of the cached prefix that is worth it, at least one token shorter than the prompt.

        It owns nothing before its first step. Blocks that take longer to load than to compute stay where they are, and
        are counted in `declined_tokens`.

        Parameters
        ----------
        prompt : int32 [n], not changed while the load is under way.
        root : of its namespace.
        deadline_s : seconds from now, the cache's at most.
        trace : for the spans of its work.
        await_remote_s : for so long missing blocks are asked for again of the remote store.
        """
        limit = max(len(prompt) - 1, 0) // self._block_size
        if self.deadline_s is not None and (deadline_s is None or self.deadline_s < deadline_s):
            deadline_s = self.deadline_s
        asking = None
        if self._lookups is not None and limit:
            until = time.monotonic() + await_remote_s if await_remote_s else 0.0
            asking = Asking(self._lookups, prompt, root, self._placement.tree.name(root), limit, until)
        return Load(
            self._placement, self._moves, self._worth_having, self._is_partial_worth, self._hooks,
            self._costs.latencies, prompt, root, limit, deadline_s, trace, asking,
        )  # fmt: skip

    def check_may_wait(self) -> None:
        """Raise InvalidArgument where the caller must not wait for moves."""
        self._moves.check_may_wait()

    def prefetch(self, prompt: NDArray[np.int32], root: int) -> int:
        """Bring the cached prefix to the device and let go of it.

        Its tokens there, 0 where there is no room.
        """
        with self._hooks.span("prefetch", tokens=len(prompt)) as span:
            self._moves.begin_prefetch()
            try:
                tokens = self._prefetch(prompt, root)
            finally:
                self._moves.end_prefetch()
            span.set(hit_tokens=tokens)
        return tokens

    def _prefetch(self, prompt: NDArray[np.int32], root: int) -> int:
        with self.begin_load(prompt, root) as load:
            load.match_in_the_end()
            if load.num_cold > self._room():  # claims are looked at when it is decided
                load.do_without_remainder()
                if load.num_cold > self._room():
                    return 0
            try:
                load.bring()
            except OutOfBlocks:
                return 0
            return load.kept * self._block_size

    def _room(self) -> int:
        """Device blocks that are free or can be made free."""
        device = self._placement.pools[0]
        assert device is not None
        return device.num_obtainable

    def _worth_having(self, owner: int) -> NDArray[np.uint8]:
        tiers = self._placement.tiers_of(owner)
        if self._page_bytes is not None:
            return self._worth_with_tail(owner, tiers, self._page_bytes)
        worth = self._costs.worth_loading(tiers, *self._slow)
        if worth < len(tiers):
            kept = self._placement.shorten(owner, worth)
            with self._counting:
                self.declined_tokens += (len(tiers) - kept) * self._block_size
            tiers = tiers[:kept]
        return tiers

    def _worth_with_tail(
        self, owner: int, tiers: NDArray[np.uint8], page_bytes: Sequence[int]
    ) -> NDArray[np.uint8]:
        """All of the path; where that is not worth it, the part that is on the device."""
        cold = self._placement.cold_pages(owner)
        if DISK in tiers and not self._costs.worth_loading_bytes(int(cold @ np.array(page_bytes)), len(tiers), DISK):
            kept = self._placement.settle(owner)
            with self._counting:
                self.declined_tokens += (len(tiers) - kept) * self._block_size
            tiers = tiers[:kept]
        return tiers

    def _is_partial_worth(self, num_tokens: int, context: int, tier: int) -> bool:
        """Whether loading a block is faster than computing its tokens that the prompt shares.

        True as long as one of the two times is not known.
        """
        if not self._partial_hits:
            return False
        load_s, compute_s = self._costs.load_s(1, tier), self._costs.compute_s(num_tokens, context)
        return load_s is None or compute_s is None or load_s <= compute_s

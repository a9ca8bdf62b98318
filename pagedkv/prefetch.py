"""Prefetch: a prefix brought to the device in the background, before its request is run; on demand, or by what the
policy ``hazard`` expects."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.hazard_policy import HazardPolicy
from pagedkv._core.placement import Placement
from pagedkv.errors import ClosedError, StaleHandle
from pagedkv.matching import Matcher

LOOKED_AT = 4096  # ends of prefixes on the device that others are compared with


class Prefetch:
    """A prefix on its way up. Made by :meth:`KVCache.prefetch`; needs no closing."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether it is over: arrived, failed or cancelled."""
        return self._future.done()

    def cancel(self) -> bool:
        """Do not begin, if it has not begun. Whether that was in time."""
        return self._future.cancel()

    def wait(self, timeout_s: float | None = None) -> int:
        """Leading tokens that are on the device now; 0 where it was cancelled or there was no room.

        Raises
        ------
        TimeoutError
            It takes longer than `timeout_s` seconds; it goes on.
        """
        try:
            return self._future.result(timeout_s)
        except CancelledError:
            return 0
        except NotYet:  # another class than the builtin one before Python 3.11
            raise TimeoutError(f"the prefetch takes longer than {timeout_s} s") from None


class Prefetcher:
    """Runs prefetches in a thread of its own, which starts with the first."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._starting = threading.Lock()
        self._background: ThreadPoolExecutor | None = None
        self._closed = False

    def start(self, prompt: NDArray[np.int32], root: int) -> Prefetch:
        """Bring the cached prefix of a prompt, which is the prefetch's own from now on, to the device."""
        with self._starting:
            if self._closed:
                raise ClosedError("this cache is closed")
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="pagedkv-prefetch")
            return Prefetch(self._background.submit(self._matcher.prefetch, prompt, root))

    def close(self) -> None:
        """Finish what runs, drop what waits."""
        with self._starting:
            self._closed = True
        if self._background is not None:
            self._background.shutdown(wait=True, cancel_futures=True)


class Foresight:
    """Starts prefetches of the prefixes that the policy expects to be used soon. Any thread may call it.

    Parameters
    ----------
    placement : Placement
    prefetcher : Prefetcher
    """

    def __init__(self, placement: Placement, prefetcher: Prefetcher) -> None:
        self._placement, self._prefetcher = placement, prefetcher
        self._starting = threading.Lock()
        self._under_way: dict[int, Prefetch] = {}  # by the node that the prefix ended with

    def start(self, policy: HazardPolicy, within_s: float, max_blocks: int) -> list[Prefetch]:
        """Prefetch the likeliest prefixes that are not on the device, `max_blocks` blocks of them at most.

        A prefix is brought up only into free blocks, and into those of prefixes that are less likely to be used.
        """
        with self._starting:
            self._under_way = {node: ticket for node, ticket in self._under_way.items() if not ticket.done()}
            room = _Room(self._free_blocks(), self._coldest(policy, within_s, max_blocks))
            started: list[Prefetch] = []
            for node, chance in self._candidates(policy, within_s, max_blocks):
                path = None if node in self._under_way else self._path(node)
                if path is None:
                    continue
                tokens, root, cold = path
                if 0 < cold <= min(max_blocks, room(chance)):
                    max_blocks -= cold
                    room.taken += cold
                    self._under_way[node] = self._prefetcher.start(tokens, root)
                    started.append(self._under_way[node])
        return started

    def _candidates(self, policy: HazardPolicy, within_s: float, most: int) -> list[tuple[int, float]]:
        """Ends of prefixes below the device with their chances, likeliest first."""
        found: list[tuple[int, float]] = []
        for tier, pool in enumerate(self._placement.pools):
            if tier > 0 and pool is not None:
                nodes, chances = policy.likely(within_s, min(most, LOOKED_AT), tier)
                found += zip(nodes.tolist(), chances.tolist(), strict=True)
        return sorted(found, key=lambda end: -end[1])

    def _path(self, node: int) -> tuple[NDArray[np.int32], int, int] | None:
        """Tokens of the prefix that ends with a node, one more than whole blocks so that all of it is matched; its
        root, and how many of its blocks are not on the device. None where it is gone by now."""
        placement = self._placement
        try:
            tokens, root = placement.path_tokens(node), placement.root_of(node)
        except StaleHandle:
            return None
        tiers, _, _ = placement.match(tokens, root)
        return np.append(tokens, np.int32(0)), root, int(np.count_nonzero(tiers))

    def _free_blocks(self) -> int:
        device = self._placement.pools[0]
        assert device is not None
        return device.counts()["available"]

    def _coldest(self, policy: HazardPolicy, within_s: float, num_blocks: int) -> list[tuple[float, int]]:
        """Chances and blocks of the least likely runs on the device, so many blocks of them as are asked for."""
        nodes, chances = policy.likely(within_s, LOOKED_AT, 0)
        found: list[tuple[float, int]] = []
        for node, chance in zip(nodes[::-1].tolist(), chances[::-1].tolist(), strict=True):
            if num_blocks <= 0:
                break
            found.append((chance, self._blocks_of(node)))
            num_blocks -= found[-1][1]
        return found

    def _blocks_of(self, node: int) -> int:
        try:
            length = len(self._placement.path_tokens(node)) // self._placement.tree.block_size
            return length - self._placement.depth_of(node)
        except StaleHandle:
            return 0


class _Room:
    """Blocks on the device that are free, or of prefixes less likely to be used than one that would come.

    Attributes
    ----------
    taken : by those that come.
    """

    def __init__(self, free: int, coldest: list[tuple[float, int]]) -> None:
        self._free, self._coldest = free, coldest
        self.taken = 0

    def __call__(self, chance: float) -> int:
        return self._free + sum(size for other, size in self._coldest if other < chance) - self.taken

"""Prefetch: a prefix brought to the device in the background, before its request is run.

On demand, or for requests that the policy ``hazard`` expects.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.placement import Placement
from pagedkv._core.policies.hazard.face import HazardPolicy
from pagedkv.cache.matcher import Matcher
from pagedkv.cache.runtime import SYSTEM, Runtime
from pagedkv.errors import ClosedError, InvalidArgument, StaleHandle
from pagedkv.threads.ending import at_end
from pagedkv.threads.monitor import Monitor

State: TypeAlias = Literal["waits", "runs", "cancelled", "over"]

LOOK_S = 1.0  # a caller that waits for a prefetch looks so often whether a thread serves it
AGAIN_S = 0.01  # until a thread without memory tries again
LOOKED_AT = 4096  # ends of prefixes on the device that others are compared with


class Prefetch:
    """A prefix on its way up. Made by :meth:`KVCache.prefetch`; needs no closing."""

    def __init__(
        self,
        changed: Monitor,
        work: Callable[[], int],
        check_may_wait: Callable[[], None],
        have_served: Callable[[], None],
    ) -> None:
        self._changed, self._work, self._check_may_wait = changed, work, check_may_wait
        self._have_served = have_served
        self._state: State = "waits"
        self._tokens = 0
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is over: arrived, failed or cancelled."""
        return self._state in ("cancelled", "over")

    def cancel(self) -> bool:
        """Do not begin, if it has not begun. Whether that was in time."""
        with self._changed:
            if self._state == "waits":
                self._state = "cancelled"
                self._changed.notify_all()
            return self._state == "cancelled"

    def wait(self, timeout_s: float | None = None) -> int:
        """Leading tokens that are on the device now; 0 where it was cancelled or there was no room.

        Raises
        ------
        TimeoutError
            It takes longer than `timeout_s` seconds; it goes on.
        InvalidArgument
            It is not over, and the caller is a hook of ``moves``, whose thread would have to carry it out.
        """
        if not self.done():
            self._check_may_wait()
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._changed.wait_for(self.done, min(LOOK_S, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until:
                    raise TimeoutError(f"the prefetch takes longer than {timeout_s} s")
                self._have_served()
        if self._error is not None:
            raise self._error
        return self._tokens

    def run(self) -> None:
        """For the prefetcher: do it, unless it was cancelled."""
        with self._changed:
            if self._state != "waits":
                return
            self._state = "runs"
        try:
            self._tokens = self._work()
        except BaseException as problem:
            self._error = problem
        finally:
            self._state = "over"  # those who wait see it soon, even where there is no memory to wake them
        with self._changed:
            self._changed.notify_all()


class Prefetcher:
    """Runs prefetches one after the other, in a thread that lives while there are any."""

    def __init__(self, matcher: Matcher, runtime: Runtime = SYSTEM) -> None:
        self._matcher, self._spawn = matcher, runtime.spawn
        self._changed = Monitor()
        self._waiting: deque[Prefetch] = deque()
        self._server = 0  # the thread that runs them; 0 without one
        self._closed = False
        self._pid = os.getpid()
        _serving.add(self)

    def start(self, prompt: NDArray[np.int32], root: int) -> Prefetch:
        """Bring the cached prefix of a prompt to the device.

        The prefetch owns it from now on.
        """
        work = partial(self._matcher.prefetch, prompt, root)
        ticket = Prefetch(self._changed, work, self._check_may_wait, self._have_served)
        with self._changed:
            if self._closed:
                raise ClosedError("this cache is closed")
            try:
                self._waiting.append(ticket)
                if not self._server:
                    self._spawn(self._serve)
            except BaseException as problem:
                if ticket in self._waiting:  # or a thread has it
                    self._waiting.remove(ticket)
                if isinstance(problem, RuntimeError):
                    raise MemoryError("the system has no thread for a prefetch") from problem
                raise
        return ticket

    def _have_served(self) -> None:
        """Start a thread where prefetches wait and none serves.

        The one that was started found no memory to begin.
        """
        with self._changed:
            if self._waiting and not self._server and not self._closed:
                self._spawn(self._serve)

    def close(self, *, wait: bool = True) -> None:
        """Finish what runs, drop what waits. Again is fine.

        Without `wait`, what runs goes on, and fails.
        """
        with self._changed:
            self._closed = True
            for ticket in self._waiting:
                ticket.cancel()
            if wait:
                self._changed.wait_for(lambda: not self._server)

    def stop(self) -> None:
        """As `close`, in the process that made it: the process ends."""
        if self._pid == os.getpid():
            self.close()

    def is_this_thread(self) -> bool:
        """Whether the caller is the thread that runs prefetches: a hook of one."""
        return self._server == threading.get_ident()

    def _check_may_wait(self) -> None:
        """Raise where the caller must not wait for a prefetch."""
        self._matcher.check_may_wait()
        if self.is_this_thread():
            raise InvalidArgument("a hook of a prefetch is called by the prefetches' thread: it cannot wait for one")

    def _serve(self) -> None:
        """The thread: prefetches until none waits. If there is one already, it goes."""
        own = threading.get_ident()
        with self._changed:
            if self._server or self._closed:
                return
            self._server = own
        while True:
            try:
                with self._changed:
                    if not self._waiting:
                        self._server = 0
                        self._changed.notify_all()
                        return
                    ticket = self._waiting[0]
                ticket.run()
                with self._changed:
                    if self._waiting and self._waiting[0] is ticket:
                        self._waiting.popleft()
            except BaseException:  # noqa: PERF203 - no memory: the thread goes on, with the same ticket if it has not begun
                time.sleep(AGAIN_S)


_serving: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@at_end
def _stop_all() -> None:
    """Before the dispatchers are stopped, without which no prefetch ends."""
    for prefetcher in list(_serving):
        prefetcher.stop()


class LikelyPrefetcher:
    """Starts prefetches of the prefixes that the policy expects to be used soon.

    Any thread may call it.

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
        """Prefetch the likeliest prefixes that are not on the device.

        `max_blocks` blocks of them at most.

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
        """The prefix that ends with a node: tokens, root, and blocks not on the device.

        One token more than whole blocks, so that all of it is matched. None where it is gone by now.
        """
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
        """Chances and blocks of the least likely runs on the device.

        As many blocks of them as are asked for.
        """
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
    """Device blocks that a prefetch may use.

    They are free, or of prefixes less likely to be used than one that would come.

    Attributes
    ----------
    taken : by those that come.
    """

    def __init__(self, free: int, coldest: list[tuple[float, int]]) -> None:
        self._free, self._coldest = free, coldest
        self.taken = 0

    def __call__(self, chance: float) -> int:
        return self._free + sum(size for other, size in self._coldest if other < chance) - self.taken

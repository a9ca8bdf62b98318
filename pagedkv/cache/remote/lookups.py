"""Lookups: which blocks of a prompt the remote store has, asked by threads of their own.

No caller waits inside the store: it begins a lookup, looks at it between other work, or waits for it up to a limit.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.dispatch import Dispatch
from pagedkv._core.held import Holder
from pagedkv.cache.remote.claims import Claims
from pagedkv.cache.runtime import Runtime
from pagedkv.observe.callbacks import Log
from pagedkv.observe.latency import Histogram
from pagedkv.threads.monitor import Monitor

log = Log(logging.getLogger("pagedkv.tiers.remote"))

MOST_THREADS = 4
HANGS_S = 1.0  # beyond the limit of a question: it hangs then, and the store is asked no more until it is back
AGAIN_S = 0.01  # until a thread without memory goes on


class Asked(Protocol):
    """The part of a remote tier that is asked about blocks."""

    @property
    def may_ask(self) -> bool:
        """Whether it would ask its store now."""

    @property
    def lookup_s(self) -> float:
        """Seconds that a caller waits for a lookup."""

    def lookup(self, namespace: bytes, chain_keys: list[bytes], *, anew: bool = False) -> int:
        """How many of these blocks, from the front, the store has."""

    def call_hangs(self, num_blocks: int) -> None:
        """A call into it does not come back."""

    def call_came_back(self) -> None:
        """A call that hung is over."""

    def log_state(self) -> None:
        """Log one line if its state has changed."""


class Lookup:
    """One question.

    Attributes
    ----------
    keys : chain keys of the blocks, from the front, that the store has; meaningful once it is done.
    """

    def __init__(self, changed: Monitor, holder: Holder) -> None:
        self._changed, self._holder = changed, holder
        self.keys: list[bytes] = []
        self.is_done = False

    def wait(self, seconds: float) -> bool:
        """Wait up to so many seconds; whether it is done."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_done, max(0.0, seconds))

    def ends(self) -> None:
        """It has its answer, or none will come."""
        self.is_done = True
        self._holder.end()
        with self._changed:
            self._changed.notify_all()


class Lookups:
    """Asks a remote tier in the background, a few questions at a time.

    Parameters
    ----------
    tier : asked.
    claims : computes the keys, and keeps those that were found.
    dispatch : callers that wait for moves also wait for a lookup under way.
    min_blocks : a shorter rest of a prompt is not asked about, unless a request awaits it.
    runtime : whose threads ask.
    took : told how long each question takes.
    """

    def __init__(
        self, tier: Asked, claims: Claims, dispatch: Dispatch, min_blocks: int, runtime: Runtime, took: Histogram
    ) -> None:
        self._tier, self.claims, self._dispatch, self._spawn = tier, claims, dispatch, runtime.spawn
        self._min_blocks, self._took = min_blocks, took
        self._changed = Monitor()
        self._waiting: deque[tuple[Lookup, Callable[[], list[bytes]]]] = deque()
        self._threads = 0
        self._under_way: dict[int, float] = {}  # threads that ask, and since when
        self._hanging: set[int] = set()  # those of which the tier was told
        self.failures = 0  # questions that raised: no memory, or a defect
        self._closed = False
        self._pid = os.getpid()

    @property
    def limit_s(self) -> float:
        """Seconds that a caller waits for one."""
        return self._tier.lookup_s

    def begin(
        self, prompt: NDArray[np.int32], digest: bytes, owner: int, found: int, limit: int, *, anew: bool = False
    ) -> Lookup | None:
        """Ask about a prompt's blocks from `found` to `limit` - 1.

        None where that is not worth it, or not possible.

        Parameters
        ----------
        prompt : int32 [n], not changed meanwhile.
        digest : of its namespace.
        owner : of its first `found` blocks.
        anew : a request awaits the blocks: ask also about a short rest, and about blocks missing a moment ago.
        """
        if limit - found < (1 if anew else self._min_blocks) or self._closed:
            return None
        self._tell_of_hanging()
        if not self._tier.may_ask:
            return None
        keys_of = self.claims.keys_from(prompt, digest, owner, limit)

        def ask() -> list[bytes]:
            began = time.monotonic()
            keys = keys_of()
            found = self._tier.lookup(digest, keys, anew=anew)
            self._took.observe(time.monotonic() - began)
            return keys[:found]

        lookup = Lookup(self._changed, Holder(self._dispatch))
        with self._changed:
            has_begun = not self._closed and self._begin((lookup, ask))
        return lookup if has_begun else None

    def close(self) -> None:
        """Ask no more, and wait for the questions under way; those that hang are left behind."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            while self._waiting:
                self._waiting.popleft()[0].ends()
            self._changed.wait_for(lambda: not self._threads, self.limit_s + HANGS_S)

    def is_this_thread(self) -> bool:
        """Whether the caller is one of the threads that ask."""
        return threading.current_thread().name == "pagedkv-lookup"

    def _begin(self, entry: tuple[Lookup, Callable[[], list[bytes]]]) -> bool:
        """Give a question to the threads; False without any, and none has it where this raises."""
        try:
            self._waiting.append(entry)
            if self._threads < MOST_THREADS:
                self._spawn(self._serve)
        except BaseException as problem:
            has_no_thread = isinstance(problem, RuntimeError)  # the system has no more
            if has_no_thread and self._threads:
                return True
            if entry in self._waiting:
                self._waiting.remove(entry)
            if not has_no_thread:
                raise
            return False
        return True

    def _serve(self) -> None:
        """A thread: question after question, until there is none."""
        with self._changed:
            if self._threads >= MOST_THREADS:
                return
            self._threads += 1
        own = threading.get_ident()
        while True:
            try:
                with self._changed:
                    if not self._waiting:
                        self._threads -= 1
                        self._changed.notify_all()
                        return
                    lookup, ask = self._waiting.popleft()
                    self._under_way[own] = time.monotonic()
                try:
                    lookup.keys = ask()
                finally:
                    lookup.ends()
                    self._came_back(own)
            except BaseException as problem:  # noqa: PERF203 - it counts as not found
                self.failures += 1
                if self.failures == 1:
                    log.warning("a lookup in the remote store failed", exc_info=problem)
                time.sleep(AGAIN_S)

    def _tell_of_hanging(self) -> None:
        """Tell the tier of questions that do not come back."""
        late = time.monotonic() - self.limit_s - HANGS_S
        if all(since > late for since in list(self._under_way.values())):
            return
        with self._changed:
            hanging = {thread for thread, since in self._under_way.items() if since <= late} - self._hanging
            self._hanging |= hanging
        for _ in hanging:
            self._tier.call_hangs(0)
        self._tier.log_state()

    def _came_back(self, thread: int) -> None:
        with self._changed:
            self._under_way.pop(thread, None)
            was_told = thread in self._hanging
            self._hanging.discard(thread)
        if was_told:
            self._tier.call_came_back()

"""Prefetch: a prefix brought to the device in the background, before its request is run."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ClosedError
from pagedkv.matching import Matcher


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

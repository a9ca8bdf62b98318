"""Prefetch: a prefix brought to the device in the background, before its request is run."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet


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

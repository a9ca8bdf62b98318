"""Prefetch: a prefix brought to the device in the background, before its request is run."""

from __future__ import annotations

from concurrent.futures import Future


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
        return 0 if self._future.cancelled() else self._future.result(timeout_s)

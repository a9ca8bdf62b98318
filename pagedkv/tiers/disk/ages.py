"""The age of a store's records: numbers of writes, and purges that void earlier ones."""

from __future__ import annotations

import threading


class Ages:
    """Shared by all slots of one open store. Thread-safe.

    Parameters
    ----------
    next_generation : of the next write, higher than any before.
    barriers : by namespace digest; records with a lower generation count no more.

    Attributes
    ----------
    lock : of the slots' books, too; a log handler, which is called with it, may ask for the statistics.
    next : the next write's generation.
    """

    def __init__(self, next_generation: int, barriers: dict[bytes, int]) -> None:
        self.lock = threading.RLock()
        self.next, self.barriers = next_generation, dict(barriers)

    def take(self, count: int) -> int:
        """The first of so many generations, which are the caller's."""
        with self.lock:
            first = self.next
            self.next += count
        return first

    def void(self, namespace: bytes) -> None:
        """Let nothing of a namespace count that was written before, or is being written now."""
        with self.lock:
            self.barriers[namespace] = self.next

    def purges(self) -> dict[bytes, int]:
        """The purges that the superblock records."""
        with self.lock:
            return dict(self.barriers)

    def begin_epoch(self, epoch: int) -> int:
        """Begin the epoch after this one, in which nothing is purged yet; its number.

        An epoch is numbered like a generation, so that no number comes again, not even that of an epoch which did not
        reach the superblock before a crash.
        """
        with self.lock:
            new = max(epoch + 1, self.next)
            self.next = new + 1
            self.barriers.clear()
        return new

"""A load's question to the remote store: which blocks follow the cached prefix."""

from __future__ import annotations

import time
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.held import Hold, own
from pagedkv.cache.remote.lookups import Lookup, Lookups

Said: TypeAlias = Literal["over", "waits", "again"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1  # between two questions about blocks that are yet to come


class Asking:
    """The question of one load, from one thread at a time.

    Parameters
    ----------
    lookups : asks.
    prompt : int32 [n]
    root, digest : of its namespace.
    limit : blocks of the prompt that may be cached.
    until : monotonic seconds up to which missing blocks are asked for again; 0: they are asked for once.
    """

    __slots__ = (
        *("_digest", "_found", "_limit", "_lookup", "_lookups", "_next_at", "_pause_s", "_prompt", "_root", "_since"),
        *("_until", "is_over"),
    )

    def __init__(
        self, lookups: Lookups, prompt: NDArray[np.int32], root: int, digest: bytes, limit: int, until: float
    ) -> None:
        self._lookups, self._prompt, self._root, self._digest, self._limit = lookups, prompt, root, digest, limit
        self._until = until
        self._lookup: Lookup | None = None
        self._found = 0
        self._since = self._next_at = 0.0
        self._pause_s = FIRST_PAUSE_S
        self.is_over = False

    def own_more(self, held: Hold) -> tuple[Hold, bool]:
        """Look once: an owner of the cached prefix, and whether no answer is to come.

        Parameters
        ----------
        held : owner of the prefix; given back, or released for one of the prefix with the blocks that were found.
        """
        while (said := self._look(held)) == "again":
            shorter, held = held, own(held.placement, self._prompt, self._root, self._limit)
            shorter.release()
        return held, said == "over"

    def _look(self, held: Hold) -> Said:
        """``"again"`` where blocks were found, and are part of the cached prefix now."""
        if self.is_over or held.num_blocks >= self._limit:
            self.is_over = True
            return "over"
        now = time.monotonic()
        if self._lookup is None:
            if now < self._next_at:
                return "waits"
            self._found, self._since = held.num_blocks, now
            self._lookup = self._lookups.begin(
                self._prompt, self._digest, held.handle, self._found, self._limit, anew=self._until > 0
            )
            return self._pause(now) if self._lookup is None else "waits"
        if not self._lookup.is_done:
            return "waits" if now < self._since + self._lookups.limit_s else self._pause(now)
        keys, self._lookup = self._lookup.keys, None
        come = max(0, held.num_blocks - self._found)  # meanwhile, by another request
        found = self._found + len(keys)
        said = self._pause(now) if found < self._limit else "over"
        self.is_over = said == "over"
        if found <= held.num_blocks:
            return said
        self._lookups.claims.graft(self._prompt, self._root, held.num_blocks, keys[come:])
        return "again"

    def waits(self, seconds: float | None) -> bool:
        """Wait until another look is worth it, so many seconds at most.

        False, at once, with nothing to wait for.
        """
        now = time.monotonic()
        if self.is_over or (self._lookup is None and now >= self._next_at):
            return False
        left = 3600.0 if seconds is None else max(0.0, seconds)
        if self._lookup is not None:
            self._lookup.wait(min(left, self._since + self._lookups.limit_s - now))
        else:
            time.sleep(min(left, max(0.0, self._next_at - now)))
        return True

    def _pause(self, now: float) -> Said:
        """No more is known for now: ask again later, or give up."""
        self._lookup = None
        if now >= self._until:
            self.is_over = True
            return "over"
        self._next_at = min(self._until, now + self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return "waits"

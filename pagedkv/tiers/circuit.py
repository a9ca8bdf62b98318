"""A circuit breaker: shut after failures in a row, tried again after growing rests."""

from __future__ import annotations


class Circuit:
    """One kind of call: let through, or shut with a time at which one call may try again.

    The caller holds a lock of its own.

    Parameters
    ----------
    patience : failures without a success between them that shut it.
    first_rest_s, longest_rest_s : seconds until the first trial, and at most, as failures of trials double them.
    """

    def __init__(self, patience: int, first_rest_s: float, longest_rest_s: float) -> None:
        self._patience, self._first_rest_s, self._longest_rest_s = patience, first_rest_s, longest_rest_s
        self.shut = False
        self._failed = 0  # since the last success
        self._rest_s = first_rest_s
        self._try_at = 0.0

    def may_try(self, now: float) -> bool:
        """Whether :meth:`lets_through` would let a call through now; asking changes nothing."""
        return not self.shut or now >= self._try_at

    def lets_through(self, now: float) -> bool:
        """Whether to make a call now."""
        if not self.shut:
            return True
        if now < self._try_at:
            return False
        self._try_at = now + self._rest_s  # this call is the trial; all others are refused until the next
        return True

    def learn(self, now: float, successes: int, failures: int, *, hopeless: bool = False) -> None:
        """So many calls succeeded, then so many failed; `hopeless` failures shut it at once."""
        if successes:
            self._failed, self._rest_s, self.shut = 0, self._first_rest_s, False
        if successes or not failures:
            return
        self._failed += failures
        if self.shut:
            self._rest_s = min(2 * self._rest_s, self._longest_rest_s)
        self.shut = self.shut or self._failed >= self._patience or hopeless
        self._try_at = now + self._rest_s

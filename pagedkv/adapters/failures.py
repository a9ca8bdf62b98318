"""Failures of a cache that its user must not notice: counted by kind, logged once per kind."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator

from pagedkv.errors import NotSupported
from pagedkv.observe.callbacks import Log, came_from_signal, is_interrupt

log = Log(logging.getLogger("pagedkv.adapters"))


@contextlib.contextmanager
def refusing(what: str, reason: str) -> Iterator[None]:
    """Make an Exception inside the block, while a runtime is tried, a NotSupported.

    Raises
    ------
    NotSupported
        Of the block, or for `what`, with the reason and the exception. Interrupts come out as they are.
    """
    try:
        yield
    except NotSupported:
        raise
    except Exception as problem:
        if is_interrupt(problem):
            raise
        raise NotSupported(what, f"{reason} ({problem!r:.200})") from problem


class Failures:
    """Counts failures and keeps them from the caller. Any thread may use it."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Make an Exception inside the block a counted failure of `what`; the block ends there.

        What comes out all the same are KeyboardInterrupt, SystemExit and an exception of one of the program's own
        signal handlers.
        """
        try:
            yield
        except Exception as problem:
            if came_from_signal(problem):
                raise
            self.add(what, problem)

    def add(self, what: str, problem: BaseException | str) -> None:
        """Count a failure of `what`; the first one of each kind is logged."""
        kind = f"{what}: {problem if isinstance(problem, str) else type(problem).__name__}"
        with self._counting:
            self._counts[kind] += 1
            is_first = self._counts[kind] == 1
        if is_first:
            log.warning(
                "%s failed and counts as a miss: %s (said once for each kind; stats().failures counts all)",
                what, problem, exc_info=problem if isinstance(problem, BaseException) else None,
            )  # fmt: skip

    def counts(self) -> dict[str, int]:
        """Failures so far, by kind."""
        with self._counting:
            return dict(self._counts)

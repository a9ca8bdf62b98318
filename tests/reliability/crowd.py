"""Threads that start at once and change places as often as the interpreter lets them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

SHORTEST_S = 1e-6


@contextmanager
def restless() -> Iterator[None]:
    """Threads change places as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SHORTEST_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def together(jobs: Sequence[Callable[[], object]]) -> list[BaseException]:
    """Run every job in a thread of its own, all begun at once; what they raised."""
    begin, raised = threading.Barrier(len(jobs)), list[BaseException]()

    def run(job: Callable[[], object]) -> None:
        try:
            begin.wait()
            job()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised

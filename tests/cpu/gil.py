"""Whether a call lets other Python threads run while it computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def lets_others_run(call: Callable[[], object], tries: int = 300) -> bool:
    """Whether another thread ever ran between the beginning and the end of the call.

    The interpreter itself takes nothing away from a thread meanwhile, so a call that keeps the GIL is never seen half
    done, however slow the machine is; one that lets go of it is seen soon.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        return any(_seen_half_done(call) for _ in range(tries))
    finally:
        sys.setswitchinterval(before)


def _seen_half_done(call: Callable[[], object]) -> bool:
    begun, over = threading.Event(), []

    def work() -> None:
        begun.set()
        call()
        over.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    seen = not over
    thread.join()
    return seen

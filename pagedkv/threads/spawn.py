"""Starts threads that the end of the interpreter waits for until they have begun.

CPython 3.11 frees the state of all other threads when it ends. A thread that the system has made and that has not yet
run writes into its own state first, so it must have begun by then. Once it runs Python, it is stopped where it next
asks for the GIL, as any daemon thread is.
"""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Callable

from pagedkv.threads.ending import at_end

BEGIN_S = 1.0  # that the end waits: without memory a thread may die before it begins
LOOK_S = 0.001

_unbegun: set[object] = set()  # one for each thread that was started and has not begun


def spawn(work: Callable[[], object]) -> None:
    """Do `work` in a thread of its own, without a Python lock.

    An interrupted ``threading.Thread.start`` can leave one taken.

    Raises
    ------
    RuntimeError
        There are no more threads.
    """
    mark = object()

    def run() -> None:
        _unbegun.discard(mark)
        work()

    _unbegun.add(mark)
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # after another exception there may be a thread
        _unbegun.discard(mark)
        raise


@at_end  # before the steps of modules that import this one, so it is called after them
def _let_begin() -> None:
    until = time.monotonic() + BEGIN_S
    while _unbegun and time.monotonic() < until:
        time.sleep(LOOK_S)


os.register_at_fork(after_in_child=_unbegun.clear)  # the parent's threads are not in the child

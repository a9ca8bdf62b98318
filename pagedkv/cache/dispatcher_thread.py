"""The dispatcher's thread, which makes its rounds and holds it weakly."""

from __future__ import annotations

import time
import weakref
from typing import Any, Protocol

from pagedkv._core.dispatch import LONGEST_S, Dispatch, Taken
from pagedkv.threads.ending import at_end

AGAIN_S = 0.01  # until a round that failed is made again


class Rounds(Protocol):
    """The part of a dispatcher that its thread calls."""

    def round(self, taken: Taken | None) -> float | None:
        """Begin and end moves; seconds until there may be more to do, None where all is done."""

    def recover(self, taken: Taken) -> None:
        """Give up the moves of a round that raised."""

    def stop(self) -> None:
        """End the thread after its round."""


_started: weakref.WeakSet[Any] = weakref.WeakSet()


def stop_at_exit(dispatcher: Rounds) -> None:
    """Stop it when the process ends, unless it is gone by then."""
    _started.add(dispatcher)


@at_end
def _stop_all() -> None:
    """No thread may still copy when the interpreter frees the arenas.

    The movers' threads are stopped after this.
    """
    for dispatcher in list(_started):
        dispatcher.stop()


def work(weakly: weakref.ref[Any], dispatch: Dispatch) -> None:
    """Make rounds until the dispatcher ends, or is collected.

    Parameters
    ----------
    weakly : weak reference to the dispatcher, a :class:`Rounds`.
    dispatch : gives it the moves.
    """
    dispatcher: Rounds | None
    pause: float | None = LONGEST_S
    taken: Taken | None = None  # by a round that is not over
    while pause is not None:
        dispatcher = None  # while it waits it holds neither the cache nor, but for AGAIN_S, moves
        try:
            if taken is None:
                taken = dispatch.take(pause)
                dispatcher = weakly()
                if dispatcher is None:
                    return
                pause = dispatcher.round(taken)
            else:
                time.sleep(AGAIN_S)
                dispatcher = weakly()
                if dispatcher is None:
                    return
                dispatcher.recover(taken)
                pause = 0.0
            taken = None
        except BaseException:  # no memory: the thread goes on, and recovers the moves taken
            pause = AGAIN_S


def settled(dispatch: Dispatch, taken: Taken, ticket: object) -> None:
    """In a worker's thread.

    The ticket holds `taken`, and with it the moves' memory, while a thread is in it.
    """
    dispatch.wake()

"""Waits for moves that are under way, and looks at them without waiting.

The dispatcher's thread (:mod:`pagedkv.cache.dispatcher`) carries them out; where a cache has no such thread, the
callers that wait or look do.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable

from pagedkv._core.dispatch import CLOSED, ENDED, NOT_YET, NOTHING, Dispatch
from pagedkv._core.placement import Placement
from pagedkv.cache.dispatcher import Dispatcher
from pagedkv.cache.runtime import Runtime
from pagedkv.errors import ClosedError, InvalidArgument
from pagedkv.observe.hooks import Hooks


class Waits:
    """Callers that wait for moves of one cache. Any thread may call it.

    Parameters
    ----------
    placement : Placement
    dispatch : Dispatch of `placement`
    dispatcher : carries out the moves.
    hooks : told of the end of moves before a caller goes on.
    runtime : whose clock deadlines go by, and how callers wait.
    """

    def __init__(
        self,
        placement: Placement,
        dispatch: Dispatch,
        dispatcher: Dispatcher,
        hooks: Hooks,
        runtime: Runtime,
    ) -> None:
        self.placement, self._dispatch, self._dispatcher = placement, dispatch, dispatcher
        self._hooks, self._runtime = hooks, runtime
        self._prefetching: set[int] = set()  # threads with a prefetch under way

    def seconds(self) -> float:
        """The time that deadlines of loads go by: monotonic, or a simulation's."""
        return self._runtime.seconds()

    def begin_prefetch(self) -> None:
        """This thread's next moves are a prefetch's, which holds blocks until it is over.

        Others can wait for that.
        """
        self._prefetching.add(threading.get_ident())
        self._dispatch.hold_up(1)

    def end_prefetch(self) -> None:
        """This thread's prefetch is over and holds nothing any more."""
        self._dispatch.hold_up(-1)  # first, as it needs no memory: others may wait for it
        self._prefetching.discard(threading.get_ident())

    def run_moves(self) -> bool:
        """Wait until a move under way, or another thread's prefetch, is over.

        False if there is none.

        Raises
        ------
        ClosedError, InvalidArgument
            The cache was closed meanwhile; or the caller is a hook of ``moves``.
        """
        return self.wait_since(self.num_ended)

    @property
    def num_ended(self) -> int:
        """Moves that are over so far, as :meth:`wait_since` counts them."""
        return self._dispatch.num_announced

    def wait_since(self, seen: int, timeout_s: float | None = None) -> bool:
        """Wait until a move or a prefetch is over; False if none is decided or under way.

        A prefetch is about to release its blocks, so its end counts as that of a move. Prefetches do not wait for
        each other's ends.

        Parameters
        ----------
        seen : int
            `num_ended` of before the caller looked whether it has to wait: moves that are over since then count.
        timeout_s : float, optional
            True after so many seconds all the same.

        Raises
        ------
        ClosedError, InvalidArgument
            As :meth:`run_moves`.
        """
        dispatcher, wait = self._dispatcher, self._dispatch.wait
        self.check_may_wait()
        until = None if timeout_s is None else self.seconds() + timeout_s
        others = threading.get_ident() not in self._prefetching
        if not dispatcher.has_thread:
            dispatcher.pump()
        while (said := wait(seen, 0.0, others)) == NOT_YET:
            if until is not None and self.seconds() >= until:
                return True
            if dispatcher.has_stopped:
                raise ClosedError("the process is ending, and the threads of this cache are stopped: close it earlier")
            self._runtime.pause(self._dispatch, seen, others)
            if not dispatcher.has_thread:  # another caller was interrupted with moves of this one
                dispatcher.pump()
        if dispatcher.interrupts:
            with contextlib.suppress(IndexError):  # another caller was quicker
                raise dispatcher.interrupts.popleft()
        if said == CLOSED:
            self._dispatch.close()  # ends moves that this call decided after the first close, too
            raise ClosedError("this cache was closed while the call waited for moves between its tiers")
        return said == ENDED

    def room_comes(self, seen: int) -> bool:
        """Whether room is about to be left to others, or something has ended since `seen`.

        Demotions and prefetches do; reads from slower tiers do not, as they may take long.
        """
        return self.num_ended != seen or self._dispatch.num_coming > 0

    @property
    def num_unowned(self) -> int:
        """Device blocks that are being read for loads that were given up.

        Others can have them once that is over.
        """
        return self._dispatch.num_unowned

    def wake(self) -> None:
        """Have callers that wait look again. Any thread may call it."""
        self._dispatch.room_made()

    @property
    def may_wait(self) -> bool:
        """Whether the caller may wait for moves: it is not the dispatcher's thread."""
        return not self._dispatcher.is_this_thread()

    def check_may_wait(self) -> None:
        """Raise where the caller must not wait for moves.

        Raises
        ------
        InvalidArgument
            It is the dispatcher's thread.
        """
        if not self.may_wait:
            raise InvalidArgument(
                "a hook of a `moves` span, a clock or a log handler was called by the thread that carries moves out, "
                "so it cannot do what waits for moves: do that in another span's hook, or in a thread of your own"
            )

    def _hear(self) -> None:
        """Let the hooks be told of moves that are over before the caller goes on."""
        dispatch = self._dispatch
        if self._hooks.all and not self._dispatcher.is_this_thread():
            while dispatch.is_telling():
                if self._dispatcher.has_thread:
                    self._runtime.pause(dispatch, dispatch.num_announced, True)
                else:  # another caller is telling them, or was interrupted before it had told them all
                    self._dispatcher.pump()

    def _decides(self) -> None:
        """The caller is about to have the core decide: hooks are told of the moves in its context."""
        if self._hooks.all:
            self._dispatcher.context = contextvars.copy_context()

    def when_decided(self, decide: Callable[[], object]) -> None:
        """Have something decided, and wait until the moves that it decided are over.

        Raises
        ------
        InvalidArgument
            The caller must not wait; nothing was decided.
        """
        self.check_may_wait()
        self._decides()
        first = self._dispatch.num_started
        decide()
        last = self._dispatch.num_started
        while first < last:
            seen = self._dispatch.num_announced
            if not self._dispatch.under_way(first, last):
                break
            self.wait_since(seen)
        self._hear()

    def drain_namespace(self, root: int) -> None:
        """Return once nothing of a namespace is under way."""
        while True:
            seen = self._dispatch.num_announced
            if not self.placement.moving_in(root):
                return
            self.wait_since(seen)

    def carry_out(self) -> None:
        """Begin and end moves where no thread does: for callers that look and do not wait."""
        if not self._dispatcher.has_thread and not self._dispatcher.is_this_thread():
            self._dispatcher.pump()

    def has_arrived(self, owner: int) -> bool:
        """Whether no promotion of an owned path is under way; without waiting."""
        self.carry_out()
        return not self.placement.is_moving(owner)

    def wait_arrived(self, owner: int) -> None:
        """Wait until no promotion of an owned path is under way."""
        while True:
            seen = self._dispatch.num_announced
            if not self.placement.is_moving(owner):
                break
            self.wait_since(seen)
        self._hear()

    def _is_idle(self, seen: int) -> bool:
        """Whether nothing is under way that could leave room, and nothing has ended since `seen`."""
        said = self._dispatch.wait(seen, 0.0, threading.get_ident() not in self._prefetching)
        if said == CLOSED:
            self._dispatch.close()
            raise ClosedError("this cache was closed while a load waited for room on the device")
        return said == NOTHING

"""Hooks: objects that the cache tells when a piece of work begins and ends.

Needs nothing installed.

A hook is any object with two methods, `begin` and `end`. It can do harm to itself alone: an Exception that it raises
is counted, logged once, and the cache goes on. KeyboardInterrupt and its like, MemoryError, and exceptions of the
program's signal handlers are let through when the piece of work they came in is over. A MemoryError in ``moves`` is
counted like an Exception: it is the dispatcher's thread that has no memory, and no call of the caller's failed.

    sequence            a prompt becomes a sequence
      match             its cached prefix is found and owned
      promote           what lies in colder tiers is brought to the device
        make_room       blocks are demoted or dropped
          moves         bytes are copied between two tiers (by the dispatcher's thread, in the caller's context)
    request             a sequence counts in the statistics; one that was opened on trial, when it is kept
    step                a forward pass, or a scatter, from its begin to its commit
      allocate          blocks, copies on write and the step's arrays
        make_room ...
    fork truncate release   of a sequence; release only where it was called, not by the garbage collector
    prefetch flush purge
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextvars import Context, ContextVar, Token
from types import TracebackType
from typing import Any, Protocol

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.observe.callbacks import Log, came_from_signal, has_no_memory

log = Log(logging.getLogger("pagedkv.hooks"))

_traces: ContextVar[tuple[object, ...]] = ContextVar("pagedkv.traces", default=())


class OnBehalfOf:
    """A context in which every span that begins carries these traces.

    None among them is left out, and each is told once. Spans of moves, which another thread carries out,
    carry them too.
    """

    __slots__ = ("_token", "traces")

    def __init__(self, traces: Iterable[object]) -> None:
        self.traces = tuple({id(trace): trace for trace in traces if trace is not None}.values())
        self._token: Token[tuple[object, ...]] | None = None

    def __enter__(self) -> None:
        self._token = _traces.set(self.traces)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _traces.reset(self._token)


class Span:
    """One piece of work, as hooks see it.

    Attributes
    ----------
    name : one of those in this module's first lines.
    attributes : dict of str to str, int, float or bool
        The call's arguments; from the end on also its result.
    subject : object or None
        The library's own object that it is about, to be looked at and not to be changed: the Moves of ``moves``
        (``pagedkv.core.MOVE_DTYPE`` [n]); the Sequence of ``request``; at the end, the ``StepArrays`` of ``allocate``
        and the new rows of ``fork`` (int64 [n]).
    traces : tuple
        The `trace` of each request that it is for (:meth:`Scheduler.submit`, :meth:`KVCache.sequence`), each once: one
        for a sequence's match, those of all sequences for a step.
    began_ns, ended_ns : int
        Nanoseconds since 1970; `ended_ns` is 0 until the end, and then never before `began_ns`.
    thread_id : of ``threading.get_ident``.
    error : the exception that ended it; None until the end, and where it raised nothing.
    """

    __slots__ = ("attributes", "began_ns", "ended_ns", "error", "name", "subject", "thread_id", "traces")

    def __init__(self, name: str, subject: Any, attributes: dict[str, Any]) -> None:
        self.name, self.subject, self.attributes = name, subject, attributes
        self.traces = _traces.get()
        self.began_ns, self.ended_ns = time.time_ns(), 0
        self.thread_id = threading.get_ident()
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        took = f"{(self.ended_ns - self.began_ns) / 1000:.1f} us" if self.ended_ns else "under way"
        return f"<Span {self.name}, {took}, {self.attributes}>"


class Hook(Protocol):
    """The interface of a hook.

    Calls come from the thread that does the work, several at a time if several do.

    A hook may call the cache. Only in ``moves``, which the thread that carries moves out is about to begin or has just
    ended, it cannot do what waits for moves (open a sequence or begin a step that needs room, flush, purge, set a
    quota): that thread would wait for itself, so it is refused with InvalidArgument.
    """

    def begin(self, span: Span) -> Any:
        """The work is about to begin. Returns a token, which the caller passes to `end`."""

    def end(self, span: Span, state: Any) -> object:
        """The work is over, or has failed. Not called if `begin` raised."""


class Running:
    """A span under way; a context manager that :meth:`Hooks.span` makes."""

    __slots__ = ("_began", "_hooks", "_interrupt", "_start", "_states", "span")

    def __init__(self, hooks: Hooks, span: Span) -> None:
        self._hooks, self.span = hooks, span
        self._states: list[tuple[Hook, Any]] = []
        self._interrupt: BaseException | None = None
        self._start = time.perf_counter_ns()

    def set(self, **attributes: Any) -> None:
        """Add to the values that the hooks receive at the end."""
        self.span.attributes.update(attributes)

    def about(self, subject: Any) -> None:
        """Name the object that it turned out to be about."""
        self.span.subject = subject

    def decided_in(self, context: Context | None) -> None:
        """Carry the traces of the caller that decided this work, where another thread does it."""
        if context is not None:
            self.span.traces = context.get(_traces, ())

    def __enter__(self) -> Running:
        self._start = time.perf_counter_ns()
        try:
            for hook in self._hooks.all:
                self._begin(hook)
        except BaseException as problem:  # a signal's, between two hooks: those told of a begin hear of its end
            self.__exit__(type(problem), problem, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        span = self.span
        span.error = error
        span.ended_ns = span.began_ns + time.perf_counter_ns() - self._start
        while self._states:  # emptied: where the begin was interrupted, this is called at the end too
            self._end(*self._states.pop())
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt  # or it would hold this frame, and that whatever was opened, in a circle

    def _begin(self, hook: Hook) -> None:
        try:
            self._states.append((hook, hook.begin(self.span)))
        except BaseException as problem:
            self._note(hook, problem)

    def _end(self, hook: Hook, state: Any) -> None:
        try:
            hook.end(self.span, state)
        except BaseException as problem:
            self._note(hook, problem)

    def _note(self, hook: Hook, problem: BaseException) -> None:
        if isinstance(problem, Exception) and not has_no_memory(problem) and not came_from_signal(problem):
            self._hooks.failed(hook, self.span, problem)
        else:
            self._interrupt = problem


class Off:
    """What stands in for a span while there is no hook."""

    __slots__ = ()

    def set(self, **attributes: Any) -> None:
        """Do nothing."""

    def about(self, subject: Any) -> None:
        """Do nothing."""

    def decided_in(self, context: Context | None) -> None:
        """Do nothing."""

    def __enter__(self) -> Off:
        return self

    def __exit__(self, *_: object) -> None:
        pass


OFF = Off()


class Hooks:
    """The hooks of one cache (``cache.hooks``). False while there are none.

    Attributes
    ----------
    failures : calls of hooks that raised an Exception, or MemoryError in ``moves``, which went no further.
    """

    def __init__(self) -> None:
        self.all: tuple[Hook, ...] = ()
        self.failures = 0
        self._changing = threading.Lock()
        self._failing: list[Hook] = []  # those whose first exception was logged

    def __bool__(self) -> bool:
        return bool(self.all)

    def add(self, hook: Hook) -> None:
        """Tell `hook` of every span that begins from now on, after those that were added before it.

        Raises
        ------
        WrongType
            It has no methods ``begin`` and ``end``.
        InvalidArgument
            It was added before.
        """
        for name in ("begin", "end"):
            if not callable(getattr(hook, name, None)):
                kind = type(hook).__name__
                raise WrongType(f"a hook has methods begin(span) and end(span, state); {kind} has no {name}")
        with self._changing:
            if any(known is hook for known in self.all):
                raise InvalidArgument(f"this hook ({type(hook).__name__}) was added before")
            self.all = (*self.all, hook)

    def remove(self, hook: Hook) -> None:
        """Remove `hook`. It still receives `end` for spans that it has already seen begin.

        Raises
        ------
        InvalidArgument
            It is not one of the hooks.
        """
        with self._changing:
            if not any(known is hook for known in self.all):
                raise InvalidArgument(f"this hook ({type(hook).__name__}) is not one of those added")
            self.all = tuple(known for known in self.all if known is not hook)
            self._failing = [known for known in self._failing if known is not hook]

    def span(self, name: str, subject: Any = None, /, **attributes: Any) -> Running | Off:
        """A context manager around a piece of work."""
        return Running(self, Span(name, subject, attributes)) if self.all else OFF

    def on_behalf_of(self, *traces: object) -> OnBehalfOf | Off:
        """A context in which every span carries these traces."""
        return OnBehalfOf(traces) if self.all else OFF

    def no_memory(self, problem: MemoryError) -> None:
        """The dispatcher's thread had no memory for the events of ``moves``.

        There is no caller to raise that in.
        """
        self.failures += 1
        if self.failures == 1:
            log.warning("no memory while hooks were told of moves; the cache goes on", exc_info=problem)

    def failed(self, hook: Hook, span: Span, problem: Exception) -> None:
        """A hook raised; said once for each hook."""
        with self._changing:
            self.failures += 1
            if any(known is hook for known in self._failing):
                return
            self._failing.append(hook)
        told = (type(hook).__name__, span.name)
        log.warning("a hook (%s) raised in span %r, and may again; the cache goes on", *told, exc_info=problem)

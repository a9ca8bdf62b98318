"""Exceptions in a caller that carries out moves itself, over a synchronous storage.

They come out of the call, whatever keeps them, and the next call finds nothing under way.
"""

from __future__ import annotations

import enum
import linecache
import logging
import signal
import sys
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.cache.dispatcher import Dispatcher
from pagedkv.cache.scrub import Scrub
from tests.reliability.interrupt_kinds import KINDS, PENDING, Alarm, HandlerTimeout
from tests.reliability.interrupt_points import LIBRARY, Tracer

from .test_interrupts import SPEC, WATCHDOG_S, held, use
from .test_storage import Done, Own

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
QUESTIONS = ("submit", "is_settled", "results", "left", "tried")
ROUND = {"pump", "round", "_begin", "_submit", "_end_settled", "_tell"}  # functions that are interrupted everywhere


@pytest.fixture(autouse=True)
def watched():
    """A call that hangs fails its test."""
    before = signal.getsignal(signal.SIGALRM)
    with Alarm(WATCHDOG_S).watch():
        yield
    signal.signal(signal.SIGALRM, before)


class Asked(Done):
    """A handle whose storage is told of every question."""

    def __init__(self, transfers: Any, storage: Interrupted) -> None:
        super().__init__(transfers)
        self._storage = storage

    @property
    def is_settled(self) -> bool:
        self._storage.asked("is_settled")
        return True

    def results(self) -> Any:
        self._storage.asked("results")
        return super().results()

    def tried(self) -> Any:
        self._storage.asked("tried")
        return super().tried()

    def left(self) -> Any:
        self._storage.asked("left")
        return super().left()


class Interrupted(Own):
    """Calls `strike` once, in the middle of one of `QUESTIONS`."""

    def __init__(self, question: str, strike: Any) -> None:
        super().__init__()
        self.question, self.strike, self.armed, self.count = question, strike, False, 0

    def asked(self, question: str) -> None:
        if self.armed and question == self.question:
            self.armed, self.count = False, self.count + 1
            self.strike()

    def submit(self, moves: Any, *, before: Any = None, on_done: Any = None, **_: Any) -> Done:
        super().submit(moves)
        self.asked("submit")
        handle = Asked(moves["transfer"], self)
        before(handle)
        on_done(handle)
        return handle


class Told:
    """A hook that knows which spans of moves have not ended."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def begin(self, span: Any) -> None:
        if span.name == "moves":
            self.open.append(span)

    def end(self, span: Any, state: Any) -> None:
        if span in self.open:
            self.open.remove(span)


def opened(storage: Any = None, hook: Any = None) -> pk.KVCache:
    """A cache whose next requests demote and promote."""
    cache = pk.KVCache(SPEC, pk.Blocks(10), pk.Blocks(8), storage=Own() if storage is None else storage)
    for number in range(6):
        use(cache, number)
    if hook is not None:
        cache.hooks.add(hook)
    return cache


def goes_on(cache: pk.KVCache) -> None:
    """Every kind of request works, and in the end nothing is held or under way."""
    for number in (9, 2, 10, 4, 11, 2):
        use(cache, number)
    assert cache.placement.num_in_flight == 0
    assert held(cache) == (0, 0, 0)
    cache.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_a_signal_handler_raises_in_the_storage_comes_out_of_the_call(question, kind):
    problem = kind("of a handler")

    def strike() -> None:
        PENDING.append(problem)
        signal.raise_signal(signal.SIGUSR1)

    own = Interrupted(question, strike)
    cache = opened(own)
    own.armed = True
    with pytest.raises(kind) as came:
        use(cache, 2)
    assert came.value is problem
    goes_on(cache)  # while `came` keeps the frames of the interrupted round
    cache.close()
    assert own.count == 1


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_exception_of_the_storages_own_costs_moves_and_fails_no_call(question):
    def strike() -> None:
        raise OSError("the engine's memory failed")

    own = Interrupted(question, strike)
    cache = opened(own)
    own.armed = True
    goes_on(cache)
    cache.close()
    assert own.count == 1


class Raises(logging.Handler):
    """A handler of the caller's that raises once."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__()
        self.problems = [problem]

    def emit(self, record: logging.LogRecord) -> None:
        if self.problems:
            raise self.problems.pop()


@pytest.mark.parametrize("question", ["submit", "results"])
def test_an_interrupt_while_moves_are_given_up_comes_out_and_keeps_no_block(question, monkeypatch):
    def strike() -> None:
        raise OSError("the engine's memory failed")

    def spoilt(self: Scrub, blocks: Any) -> None:
        if problems:
            raise problems.pop()

    own, problems = Interrupted(question, strike), []
    cache = opened(own)
    monkeypatch.setattr(Scrub, "spoilt", spoilt)
    own.armed, problems = True, [MemoryError("no memory for the scrub")]
    with pytest.raises(MemoryError, match="for the scrub"):
        use(cache, 2)
    goes_on(cache)
    handler = Raises(KeyboardInterrupt())
    log = logging.getLogger("pagedkv.tiers.mover")
    log.addHandler(handler)
    try:
        own.armed = True
        with pytest.raises(KeyboardInterrupt):
            use(cache, 3)
    finally:
        log.removeHandler(handler)
    goes_on(cache)
    cache.close()


@pytest.mark.parametrize("moment", ["begin", "end"])
def test_a_hook_of_moves_without_memory_is_told_to_the_caller_that_makes_the_round(moment):
    class Hungry(Told):
        def starve(self, span: Any, when: str) -> None:
            if span.name == "moves" and when == moment and problems:
                raise problems.pop()

        def begin(self, span: Any) -> None:
            self.starve(span, "begin")

        def end(self, span: Any, state: Any) -> None:
            self.starve(span, "end")

    problems: list[BaseException] = []
    cache = opened(hook=Hungry())
    problems.append(MemoryError("the hook's"))
    with pytest.raises(MemoryError, match="the hook's"):
        use(cache, 2)
    goes_on(cache)
    cache.close()


class InTheRound(Tracer):
    """Passes only points of the round itself."""

    def _enter(self, frame: Any, event: str, arg: Any) -> Any:
        of_round = frame.f_code.co_filename == LIBRARY + "cache/dispatcher.py" and frame.f_code.co_name in ROUND
        return super()._enter(frame, event, arg) if of_round else None


@pytest.mark.slow
@pytest.mark.parametrize(("with_hook", "each"), [(False, 5), (True, 1)], ids=["no hook", "a hook"])
def test_an_interrupt_at_any_line_of_a_callers_round_comes_out_and_stops_nothing(with_hook, each):
    counted, kept = InTheRound(), []
    cache = opened(hook=Told() if with_hook else None)
    counted.run(lambda: use(cache, 2))
    cache.close()
    assert counted.passed > 50
    for target in range(1, counted.passed + 1, each):
        told, problem = Told(), KINDS[target % len(KINDS)]("interrupted")
        cache, tracer = opened(hook=told if with_hook else None), InTheRound(target, problem)
        with pytest.raises(type(problem)) as came:
            tracer.run(lambda cache=cache: use(cache, 2))
        assert came.value is problem, tracer.point
        kept.append(came)  # and with it every frame that the interrupt went through
        goes_on(cache)
        assert not told.open, f"hooks were told of no end: {tracer.point}"
        cache.close()


def test_a_round_that_is_interrupted_again_while_it_gives_up_moves_is_ended_by_the_next(monkeypatch):
    begin, recover, problems = Dispatcher._begin, Dispatcher.recover, [KeyboardInterrupt(), SystemExit()]

    def interrupted(method: Any) -> Any:
        def call(self: Dispatcher, *arguments: Any) -> Any:
            if armed and problems:
                raise problems.pop(0)
            return method(self, *arguments)

        return call

    armed = False
    monkeypatch.setattr(Dispatcher, "_begin", interrupted(begin))
    monkeypatch.setattr(Dispatcher, "recover", interrupted(recover))
    cache = opened()
    armed = True
    with pytest.raises(SystemExit) as came:
        use(cache, 2)
    assert isinstance(came.value.__context__, KeyboardInterrupt)
    goes_on(cache)
    cache.close()


class AtTheLine(Tracer):
    """Raises at the first line of the library that begins with a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text, self.raised = text, False

    def _within(self, frame: Any, event: str, arg: Any) -> Any:
        if event != "line" or self.raised:
            return self._within
        if linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith(self._text):
            self.raised = True
            raise HandlerTimeout
        return self._within


def test_hooks_that_were_not_told_of_the_end_of_moves_hold_up_no_later_call():
    told = Told()
    cache = opened(hook=told)
    tracer = AtTheLine("self._dispatch.announce()")
    with pytest.raises(HandlerTimeout):
        tracer.run(lambda: use(cache, 2))
    assert tracer.raised
    assert cache._dispatcher._dispatch.is_telling()
    use(cache, 2)  # needs no move, and waits until the hooks were told
    goes_on(cache)
    assert not told.open
    cache.close()


def test_numpy_asks_python_nothing_of_a_tier_where_it_would_drop_an_interrupt():
    """NumPy passes over whatever is raised while it looks for ``__array_ufunc__`` and the like.

    On an enumeration's member CPython 3.11 looks in Python, where a signal can arrive.
    """
    asked: list[str] = []

    def enter(frame: Any, event: str, arg: Any) -> None:
        if frame.f_code.co_name == "__getattr__" and frame.f_code.co_filename == enum.__file__:
            asked.append(frame.f_locals["name"])

    cache = opened()
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        use(cache, 2)
    finally:
        sys.settrace(before)
    cache.close()
    assert not [name for name in asked if name.startswith("__")]


def test_a_hook_of_moves_in_a_callers_round_may_close_the_cache():
    class Closes(Told):
        def begin(self, span: Any) -> None:
            super().begin(span)
            if span.name == "moves":
                cache.close()

    hook = Closes()
    cache = opened(hook=hook)
    with pytest.raises(pk.ClosedError):
        use(cache, 2)
    assert not hook.open

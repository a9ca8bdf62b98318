"""Exceptions of the caller's own functions stay in them.

What a signal handler raises comes out.
"""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagedkv.observe.callbacks import Log, Told, came_from_signal
from pagedkv.observe.clock import Clock


class Timeout(Exception):
    """What a program's handler of SIGALRM raises."""


def handler(number: int, frame: object) -> None:
    raise Timeout


class Program:
    def handle(self, number: int, frame: object) -> None:
        raise Timeout

    def __call__(self, number: int, frame: object) -> None:
        raise Timeout


HANDLERS = {
    "function": handler, "method": Program().handle, "object": Program(), "partial": functools.partial(handler),
    "partial of a method": functools.partial(Program().handle), "lambda": lambda number, frame: handler(number, frame),
}  # fmt: skip


@pytest.fixture(params=HANDLERS.values(), ids=HANDLERS)
def alarm(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Raises SIGALRM in this thread; the program has a handler."""
    before = signal.signal(signal.SIGALRM, request.param)
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


class Handler(logging.Handler):
    """Does one thing for each record."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act, self.records = act, []  # type: ignore[var-annotated]

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.act()


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], object]], Handler]]:
    """Adds a handler to the logger of these tests."""
    added: list[Handler] = []
    logger = logging.getLogger("pagedkv.tests")

    def add(act: Callable[[], object]) -> Handler:
        added.append(Handler(act))
        logger.addHandler(added[-1])
        return added[-1]

    yield add
    for one in added:
        logger.removeHandler(one)


LOG = Log(logging.getLogger("pagedkv.tests"))


def fail() -> None:
    raise OSError("the log is full")


def exhaust() -> None:
    raise MemoryError


@pytest.mark.parametrize("act", [fail, exhaust])
def test_a_log_handler_that_raises_stops_nothing(said: Any, act: Callable[[], object]) -> None:
    handler = said(act)
    LOG.warning("one %d", 1)
    try:
        raise KeyError("k")
    except KeyError:
        LOG.exception("two")
    assert [record.getMessage() for record in handler.records] == ["one 1", "two"]
    assert [record.levelno for record in handler.records] == [logging.WARNING, logging.ERROR]
    assert handler.records[1].exc_info[0] is KeyError
    assert [record.funcName for record in handler.records] == ["test_a_log_handler_that_raises_stops_nothing"] * 2


def test_a_log_handler_that_is_interrupted_lets_the_interrupt_through(said: Any, alarm: Callable[[], None]) -> None:
    said(alarm)
    with pytest.raises(Timeout):
        LOG.warning("one")


def test_a_log_handler_that_ends_the_program_ends_it(said: Any) -> None:
    def end() -> None:
        raise SystemExit

    said(end)
    with pytest.raises(SystemExit):
        LOG.warning("one")


def test_what_a_signal_handler_raises_in_a_clock_comes_out(alarm: Callable[[], None]) -> None:
    rings = False

    def read() -> float:
        if rings:
            alarm()
        return 5.0

    clock = Clock(read)
    rings = True
    with pytest.raises(Timeout):
        clock()
    assert clock.failures == 0


def test_a_clock_that_raises_what_a_signal_handler_would_raise_has_failed(alarm: Callable[[], None]) -> None:
    rings = False

    def read() -> float:
        if rings:
            raise Timeout
        return 5.0

    clock = Clock(read)
    rings = True
    assert clock() == 5.0
    assert clock.failures == 1


def test_a_callback_that_is_told_something_cannot_fail_the_work(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        raise OSError("no terminal")

    told = Told(progress, "on_progress")
    for done in range(3):
        told(done, 3)
    assert seen == [(0, 3), (1, 3), (2, 3)]
    assert told.failures == 3
    assert [record.getMessage() for record in caplog.records] == ["on_progress raised, and may again; the work goes on"]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_ends_the_work_comes_out_of_a_callback(ends: type[BaseException]) -> None:
    def progress() -> None:
        raise ends

    told = Told(progress, "on_progress")
    with pytest.raises(ends):
        told()
    assert told.failures == 0


def test_an_interrupted_callback_lets_the_interrupt_through(alarm: Callable[[], None]) -> None:
    with pytest.raises(Timeout):
        Told(alarm, "on_progress")()


def test_handlers_that_are_not_written_in_python_are_no_trouble() -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        assert not came_from_signal(ValueError())
    finally:
        signal.signal(signal.SIGALRM, before)

"""Threads for callers that a signal may interrupt: errands and crews."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pagedkv.threads import crew
from pagedkv.threads import spawn as spawning
from pagedkv.threads.crew import Crew, Errand

WATCHDOG_S = 60.0


def test_results_come_in_the_order_of_the_items_whoever_is_done_first() -> None:
    second = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert second.wait(WATCHDOG_S)
        elif item == 1:
            second.set()
        return item * item

    with Crew(work, range(20), 3) as crew:
        assert list(crew) == [item * item for item in range(20)]


def test_what_work_raises_comes_out_at_its_item_and_the_rest_is_not_begun() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 2:
            raise ZeroDivisionError
        return item

    def call() -> None:
        with Crew(work, range(10**6), 1) as crew:
            results.extend(crew)

    results: list[int] = []
    with pytest.raises(ZeroDivisionError):
        call()
    assert begun[:3] == [0, 1, 2]
    assert len(begun) < 10**6


def test_a_crew_that_is_left_has_nobody_at_work() -> None:
    at_work, goes_on = threading.Semaphore(0), threading.Event()
    ended: list[int] = []

    def work(item: int) -> None:
        at_work.release()
        assert goes_on.wait(WATCHDOG_S)
        ended.append(item)

    def call() -> None:
        with Crew(work, range(10**6), 2):
            for _ in range(2):
                assert at_work.acquire(timeout=WATCHDOG_S)
            threading.Timer(0.01, goes_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call()
    num_ended = len(ended)
    assert {0, 1} <= set(ended), "those that were at work had ended"
    time.sleep(0.01)
    assert len(ended) == num_ended, "and no worker began another"


def test_no_items_need_nobody() -> None:
    with Crew(print, [], 4) as crew:
        assert list(crew) == []


def test_where_there_are_no_threads_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(work: Callable[[], None], arguments: tuple[()]) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", none)
    with Crew(str, [1, 2, 3], 4) as crew:
        assert list(crew) == ["1", "2", "3"]
    done: list[int] = []
    assert Errand(lambda: done.append(1)).ends_within(WATCHDOG_S)
    assert done == [1]


def test_an_errand_is_done_once_and_its_error_comes_out_of_every_wait() -> None:
    done: list[int] = []

    def work() -> None:
        done.append(1)
        raise ZeroDivisionError

    errand = Errand(work)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            errand.ends_within(WATCHDOG_S)
    assert errand.has_failed
    assert done == [1]


def test_an_errand_whose_thread_never_begins_is_begun_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = _thread.start_new_thread, []

    def start(work: Any, arguments: Any) -> int:
        started.append(work)
        return 0 if len(started) == 1 else real(work, arguments)

    monkeypatch.setattr(crew, "START_S", 0.01)
    monkeypatch.setattr(_thread, "start_new_thread", start)
    done: list[int] = []
    assert Errand(lambda: done.append(1)).ends_within(60)
    assert done == [1]
    assert len(started) > 1


def test_a_thread_that_never_begins_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    thread = threading.Thread(name="lost")
    monkeypatch.setattr(crew, "BEGIN_S", 0.05)
    monkeypatch.setattr(thread, "start", lambda: never.wait(WATCHDOG_S))
    with pytest.raises(MemoryError, match="thread lost did not begin"):
        crew.start(thread)
    never.set()


ENDS_AT_ONCE = """
import atexit, sys
begun = []
atexit.register(lambda: print(len(begun)))  # before pagedkv's handlers, so it is called after them
from pagedkv.threads.spawn import spawn
atexit.register(lambda: spawn(lambda: begun.append("at the end")))
sys.setswitchinterval(60)  # seconds: no other thread gets a turn unless this one waits
spawn(lambda: begun.append("before it"))
"""


def test_a_process_ends_only_when_its_threads_have_begun() -> None:
    ran = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "2\n"


def test_a_thread_that_never_begins_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", lambda work, arguments: None)
    monkeypatch.setattr(spawning, "BEGIN_S", 0.05)
    monkeypatch.setattr(spawning, "_unbegun", set())
    spawning.spawn(list)
    started = time.monotonic()
    spawning._let_begin()
    assert 0.05 <= time.monotonic() - started < 10


def test_the_end_waits_for_no_thread_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(work: Callable[[], object], arguments: object) -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(_thread, "start_new_thread", none)
    monkeypatch.setattr(spawning, "_unbegun", set())
    with pytest.raises(RuntimeError):
        spawning.spawn(list)
    assert not spawning._unbegun

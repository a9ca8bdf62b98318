"""A monitor knows the thread that has it."""

from __future__ import annotations

import threading

import pytest

from pagedkv.threads.monitor import Monitor


def elsewhere(monitor: Monitor) -> bool:
    """What another thread is told."""
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(monitor.is_mine()))
    thread.start()
    thread.join()
    return said[0]


def test_a_monitor_is_its_threads_from_the_first_entry_to_the_last_exit():
    monitor = Monitor()
    assert not monitor.is_mine()
    with monitor:
        with monitor:
            assert monitor.is_mine()
            assert not elsewhere(monitor)
        assert monitor.is_mine()
    assert not monitor.is_mine()


def test_a_monitor_that_an_exception_leaves_is_no_ones():
    monitor = Monitor()
    with pytest.raises(KeyboardInterrupt), monitor:
        raise KeyboardInterrupt
    assert not monitor.is_mine()


def test_a_thread_that_waits_does_not_have_the_monitor_meanwhile_and_has_it_again_afterwards():
    monitor, said, entered = Monitor(), [], threading.Event()

    def other() -> None:
        entered.wait(60)
        with monitor:
            said.append(monitor.is_mine())
            monitor.notify_all()

    thread = threading.Thread(target=other)
    thread.start()
    with monitor:
        entered.set()
        assert monitor.wait_for(lambda: said, 60)
        assert monitor.is_mine()
    thread.join()
    assert said == [True]
    assert not monitor.is_mine()

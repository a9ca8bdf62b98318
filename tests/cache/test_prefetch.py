"""Prefetch brings a prefix up in the background; it never changes what a sequence holds."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache import prefetch as prefetch_module
from pagedkv.cache.prefetch import Prefetch

from .conftest import BLOCK, Toy, all_free, prompt, where

TIMEOUT_S = 60


@pytest.fixture
def toy(open_cache):
    """Prompt 1 is on the host, prompt 2 on the device."""
    toy = Toy(open_cache(4, host=16))
    toy.use(prompt(1))
    toy.use(prompt(2, 4 * BLOCK))
    assert where(toy.cache, prompt(1)) == [("host", 3)]
    return toy


@pytest.fixture
def gate(toy, monkeypatch):
    """Holds the background thread until it is set."""
    gate, started = threading.Event(), threading.Event()
    work = toy.cache._matcher.prefetch

    def held(*arguments):
        started.set()
        assert gate.wait(TIMEOUT_S)
        return work(*arguments)

    monkeypatch.setattr(toy.cache._matcher, "prefetch", held)
    gate.started = started
    yield gate
    gate.set()


def test_a_prefetched_prefix_is_on_the_device_when_its_sequence_opens(toy):
    ticket = toy.cache.prefetch(prompt(1))
    assert ticket.wait(TIMEOUT_S) == 3 * BLOCK
    assert ticket.done()
    assert where(toy.cache, prompt(1)) == [("device", 3)]
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}
    assert all_free(toy.cache)


def test_prefetching_what_is_not_cached_or_there_already_is_fine(toy):
    assert toy.cache.prefetch(prompt(9)).wait(TIMEOUT_S) == 0
    assert toy.cache.prefetch([]).wait(TIMEOUT_S) == 0
    assert toy.cache.prefetch(prompt(2, 4 * BLOCK)).wait(TIMEOUT_S) == 3 * BLOCK


def test_without_room_nothing_comes_and_nothing_is_held(toy):
    held = toy.cache.sequence(prompt(3, 3 * BLOCK))
    toy.run(held)
    assert toy.cache.prefetch(prompt(1)).wait(TIMEOUT_S) == 0
    toy.check(held)
    held.release()
    assert all_free(toy.cache)
    assert toy.use(prompt(1)) == {"host": 3 * BLOCK}


def test_the_tokens_are_copied_before_the_call_returns(toy, gate):
    tokens = np.array(prompt(1), np.int32)
    ticket = toy.cache.prefetch(tokens)
    tokens[:] = 0
    gate.set()
    assert ticket.wait(TIMEOUT_S) == 3 * BLOCK


def test_waiting_no_longer_than_asked(toy, gate):
    ticket = toy.cache.prefetch(prompt(1))
    with pytest.raises(TimeoutError):
        ticket.wait(0.01)
    assert not ticket.done()
    gate.set()
    assert ticket.wait(TIMEOUT_S) == 3 * BLOCK


def test_cancelled_before_it_begins_it_never_begins(toy, gate):
    first = toy.cache.prefetch(prompt(2))
    assert gate.started.wait(TIMEOUT_S)
    second = toy.cache.prefetch(prompt(1))
    assert second.cancel()
    assert second.done()
    assert second.wait(TIMEOUT_S) == 0
    assert not first.cancel(), "it has begun"
    gate.set()
    first.wait(TIMEOUT_S)
    assert where(toy.cache, prompt(1)) == [("host", 3)]


def test_cancelled_while_somebody_waits_for_it(toy, gate):
    toy.cache.prefetch(prompt(2))
    assert gate.started.wait(TIMEOUT_S)
    ticket, got = toy.cache.prefetch(prompt(1)), []
    waiting = threading.Event()

    def wait():
        waiting.set()
        try:
            got.append(ticket.wait(TIMEOUT_S))
        except BaseException as problem:
            got.append(problem)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(TIMEOUT_S)
    ticket.cancel()
    thread.join()
    assert got == [0]


def test_closing_the_cache_ends_the_prefetches(toy, gate):
    first = toy.cache.prefetch(prompt(2))
    assert gate.started.wait(TIMEOUT_S)
    second = toy.cache.prefetch(prompt(1))
    closer = threading.Thread(target=toy.cache.close)
    closer.start()
    gate.set()
    closer.join()
    assert first.done()
    assert second.done()
    with pytest.raises(pk.ClosedError):
        toy.cache.prefetch(prompt(1))


def test_a_sequence_opened_meanwhile_gets_the_right_content(open_cache):
    toy = Toy(open_cache(8, host=16))
    for _ in range(30):
        tickets = [toy.cache.prefetch(prompt(1)), toy.cache.prefetch(prompt(2))]
        toy.use(prompt(1))
        toy.use(prompt(2))
        toy.use(prompt(3))
        for ticket in tickets:
            ticket.wait(TIMEOUT_S)
    assert all_free(toy.cache)


def test_a_prefetch_stays_in_its_namespace(toy):
    assert toy.cache.prefetch(prompt(1), pk.Namespace(tenant="other")).wait(TIMEOUT_S) == 0
    assert where(toy.cache, prompt(1)) == [("host", 3)]


@pytest.mark.parametrize("tokens", [None, "1", [1.5], [2**31], [[1]]], ids=repr)
def test_what_is_no_prompt_is_refused_at_once(toy, tokens):
    with pytest.raises((pk.WrongType, pk.InvalidArgument)):
        toy.cache.prefetch(tokens)


def test_threads_that_prefetch_first_at_the_same_time_leave_no_thread_behind(open_cache):
    for _ in range(20):
        cache = open_cache(4, host=4)
        barrier = threading.Barrier(4)

        def fetch(cache=cache, barrier=barrier):
            barrier.wait(TIMEOUT_S)
            cache.prefetch(prompt(1)).wait(TIMEOUT_S)

        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cache.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pagedkv-prefetch")]


def test_a_promotion_needs_less_room_once_another_thread_has_brought_some_of_it_up(open_cache, monkeypatch):
    toy = Toy(open_cache(8, host=32))
    long = prompt(1, 6 * BLOCK + 1)
    toy.use(long)
    toy.use(prompt(2, 8 * BLOCK))
    assert where(toy.cache, long) == [("host", 6)]
    moves, real, called = toy.cache.moves, toy.cache.moves.make_room, []

    def make_room(num_blocks, *tier):
        called.append(num_blocks)
        if len(called) == 1:  # as another thread would, while this one waits for room
            with toy.cache.sequence(long[: 3 * BLOCK + 1]):
                pass
        return real(num_blocks, *tier)

    monkeypatch.setattr(moves, "make_room", make_room)
    assert toy.use(long) == {"host": 6 * BLOCK}
    assert called == [6, 3, 3], "six, three by the other meanwhile, and once six were in vain the other three"
    assert all_free(toy.cache)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_thread_of_prefetches_goes_on_where_it_found_no_memory(toy, monkeypatch, when):
    real, problems = Prefetch.run, [MemoryError()]

    def run(ticket):
        if problems and when == "before":
            raise problems.pop()
        real(ticket)
        if problems:
            raise problems.pop()

    monkeypatch.setattr(Prefetch, "run", run)
    try:
        for _ in range(2):
            assert toy.cache.prefetch(prompt(1)).wait(TIMEOUT_S) == 3 * BLOCK
        assert not problems
    except BaseException:
        toy.cache._prefetcher._server = 0  # or its close would wait for a thread that has ended
        raise
    toy.cache.close()


def test_who_waits_has_another_thread_started_where_the_first_never_began(toy, monkeypatch):
    real, started = toy.cache._prefetcher._spawn, []

    def start(work):
        started.append(work)
        if len(started) > 1:
            real(work)

    monkeypatch.setattr(prefetch_module, "LOOK_S", 0.01)
    monkeypatch.setattr(toy.cache._prefetcher, "_spawn", start)
    ticket = toy.cache.prefetch(prompt(1))
    with pytest.raises(TimeoutError):
        ticket.wait(0.0)
    assert ticket.wait(TIMEOUT_S) == 3 * BLOCK
    assert len(started) > 1

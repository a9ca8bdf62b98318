"""Exceptions in the middle of a call.

What the call began is undone or goes on, and the caller can repeat the call.
"""

from __future__ import annotations

import operator
import subprocess
import sys
import threading
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.observe.hooks import Span

from .conftest import Toy, all_free

WATCHDOG_S = 60.0


def prompt(start: int, length: int = 13) -> list[int]:
    return [1000 * start + i for i in range(length)]


def in_time(work: Any) -> None:
    """Run `work` in another thread; a test that hangs fails."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WATCHDOG_S)
    assert not thread.is_alive(), "it waits for ever"
    if problems:
        raise problems[0]


def test_a_step_that_is_interrupted_as_it_begins_is_cancelled(open_cache, monkeypatch):
    toy = Toy(open_cache(16))
    seq = toy.cache.sequence(prompt(1, 6))
    toy.run(seq)
    (fork,) = seq.fork()
    fork.append(7)
    kv = toy.cache._engine.kv

    def interrupted(pairs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kv, "copy_blocks", interrupted)
        with pytest.raises(KeyboardInterrupt), toy.cache.step([fork]):
            raise AssertionError("it did not begin")
    toy.cache.check_integrity()
    (other,) = fork.fork()  # it is in no step
    toy.run(fork)
    toy.check(seq, fork)
    toy.run(other)
    toy.check(other)
    for one in (seq, fork, other):
        one.release()
    assert all_free(toy.cache)


def test_a_step_whose_copies_the_tier_refuses_is_cancelled(open_cache, monkeypatch):
    toy = Toy(open_cache(16))
    seq = toy.cache.sequence(prompt(1, 6))
    toy.run(seq)
    (fork,) = seq.fork()
    fork.append(7)

    def refused(pairs: Any) -> None:
        raise pk.TierError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(toy.cache._engine.kv, "copy_blocks", refused)
        with pytest.raises(pk.TierError), toy.cache.step([fork]):
            raise AssertionError("it did not begin")
    (other,) = fork.fork()  # it is in no step
    toy.run(fork)
    toy.run(other)
    toy.check(seq, fork, other)


def test_an_opening_that_is_interrupted_leaves_its_directory_and_no_thread(open_cache, monkeypatch, tmp_path):
    before = {thread.ident for thread in threading.enumerate()}

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for place in ("cache.LikelyPrefetcher", "dispatcher.Dispatcher.start", "cache.BlockTable"):
        with monkeypatch.context() as patch:
            patch.setattr(f"pagedkv.cache.{place}", interrupted)
            with pytest.raises(KeyboardInterrupt) as kept:
                open_cache(8, host=8, disk=16)
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("pagedkv")]
        assert not {thread.ident for thread in ours} - before
        open_cache(8, host=8, disk=16).close()  # while the traceback lives
        assert kept.value.__traceback__ is not None


def test_a_step_that_was_begun_and_never_ended_lets_go_of_its_rows(open_cache):
    toy = Toy(open_cache(16))
    seq = toy.cache.sequence(prompt(1, 6))
    step = toy.cache.step([seq])
    step.__enter__()
    with pytest.raises(pk.InvalidArgument, match="in a step"):
        seq.fork()
    del step
    (fork,) = seq.fork()
    toy.run(seq)
    toy.run(fork)
    toy.check(seq, fork)


def test_a_step_that_dies_late_leaves_the_next_one_alone(open_cache):
    toy = Toy(open_cache(16))
    seq = toy.cache.sequence(prompt(1, 6))
    old = toy.cache.step([seq])
    old.__enter__()
    with toy.cache.step([seq]) as step:
        del old
        toy.write(step, seq)
    toy.check(seq)


@pytest.mark.parametrize("moment", ["begin", "end"])
@pytest.mark.parametrize("action", ["use", "purge", "flush", "quota", "prefetch"])
def test_a_hook_of_moves_that_would_wait_for_moves_is_refused(open_cache, moment, action):
    toy = Toy(open_cache(8, host=8, disk=16))
    said: list[BaseException | None] = []

    class Calling:
        def begin(self, span: Span) -> None:
            if span.name == "moves" and moment == "begin":
                self.call()

        def end(self, span: Span, state: Any) -> None:
            if span.name == "moves" and moment == "end":
                self.call()

        def call(self) -> None:
            if said:
                return
            said.append(None)
            try:
                if action == "use":
                    toy.use(prompt(9, 31))
                elif action == "purge":
                    toy.cache.purge(None)
                elif action == "flush":
                    toy.cache.flush()
                elif action == "quota":
                    toy.cache.set_quota(pk.Namespace(tenant="another"), pk.Blocks(1))
                else:
                    toy.cache.prefetch(prompt(1))  # a thread of its own does it
            except pk.InvalidArgument as problem:
                said[0] = problem

    hook = Calling()
    toy.cache.hooks.add(hook)
    in_time(lambda: [toy.use(prompt(start)) for start in (1, 2, 3, 4, 1, 2)])
    assert said
    if action == "prefetch":
        assert said[0] is None
    else:
        assert "a hook of a `moves` span" in str(said[0])
    toy.cache.hooks.remove(hook)
    assert not toy.cache._engine.uses_quota, "what is refused changes nothing"
    in_time(lambda: [toy.use(prompt(start)) for start in (1, 2, 3, 4)])
    toy.cache.check_integrity()
    in_time(toy.cache.close)


WAITS_IN_MOVES = """
import numpy as np
import pagedkv as pk

class Hook:
    def begin(self, span):
        if span.name == "moves":
            try:
                cache.purge(None)
            except pk.InvalidArgument as problem:
                print("refused", flush=True)
    def end(self, span, state):
        pass

cache = pk.KVCache(pk.KVSpec(1, 1, 8, "float32", 4, model="t"), pk.Blocks(8), pk.Blocks(8))
cache.hooks.add(Hook())
for number in range(4):
    with cache.sequence([number * 100 + i for i in range(13)]) as seq:
        kv = np.zeros((1, len(seq) - seq.num_computed, 1, 8), np.float32)
        seq.scatter(kv, kv)
cache.close()
"""


def test_a_hook_of_moves_never_waits_for_its_own_thread():
    done = subprocess.run([sys.executable, "-c", WAITS_IN_MOVES], stdout=subprocess.PIPE, text=True, timeout=WATCHDOG_S)
    assert done.returncode == 0
    assert "refused" in done.stdout


def test_a_hook_of_moves_may_close_the_cache(open_cache):
    toy = Toy(open_cache(8, host=8))

    class Closing:
        def begin(self, span: Span) -> None:
            if span.name == "moves":
                toy.cache.close()

        def end(self, span: Span, state: Any) -> None:
            pass

    toy.cache.hooks.add(Closing())
    with pytest.raises(pk.ClosedError):
        in_time(lambda: [toy.use(prompt(start)) for start in range(9)])
    in_time(toy.cache.close)


@pytest.mark.parametrize("place", ["_prefetcher", "_dispatcher", "_storage.carrier", "_storage"])
def test_a_close_that_was_interrupted_can_be_repeated(open_cache, tmp_path, place):
    toy = Toy(
        pk.KVCache(
            pk.KVSpec(2, 2, 4, "float32", 4, model="toy"),
            pk.Blocks(8),
            pk.Blocks(8),
            pk.Disk(str(tmp_path / "kv"), pk.Blocks(16)),
        )
    )
    toy.use(prompt(1))
    part = operator.attrgetter(place)(toy.cache)
    close = part.close

    def interrupted(**_: Any) -> None:
        part.close = close
        raise KeyboardInterrupt

    part.close = interrupted
    with pytest.raises(KeyboardInterrupt):
        toy.cache.close()
    with pytest.raises(pk.ClosedError):
        toy.cache.sequence(prompt(1))
    in_time(toy.cache.close)
    pk.KVCache(
        toy.spec, pk.Blocks(8), pk.Blocks(8), pk.Disk(str(tmp_path / "kv"), pk.Blocks(16))
    ).close()  # the directory is free


def test_a_cache_that_is_not_closed_can_be_collected(open_cache):
    import gc
    import weakref

    cache = pk.KVCache(pk.KVSpec(2, 2, 4, "float32", 4, model="toy"), pk.Blocks(8), pk.Blocks(8))
    Toy(cache).use(prompt(1))
    threads = [cache._dispatcher._thread, *cache._storage.carrier._queue.threads]
    known = weakref.ref(cache._dispatcher)
    del cache
    gc.collect()
    assert known() is None
    for thread in threads:
        thread.join(WATCHDOG_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("span_name", ["moves", "prefetch", "match", "make_room"])
@pytest.mark.parametrize("action", ["close", "wait"])
def test_a_hook_in_the_middle_of_a_prefetch_may_close_the_cache_and_is_refused_to_wait_for_one(
    open_cache, span_name, action
):
    toy = Toy(open_cache(8, host=16))
    for start in (1, 2, 3, 4):
        toy.use(prompt(start))
    said: list[BaseException | None] = []

    class Calling:
        def begin(self, span: Span) -> None:
            if span.name == span_name and not said:
                said.append(None)
                try:
                    if action == "close":
                        toy.cache.close()
                    else:
                        toy.cache.prefetch(prompt(2)).wait()
                except pk.InvalidArgument as problem:
                    said[0] = problem

        def end(self, span: Span, state: Any) -> None:
            pass

    toy.cache.hooks.add(Calling())

    def ask() -> None:
        try:
            toy.cache.prefetch(prompt(1)).wait(WATCHDOG_S)
        except pk.ClosedError:
            assert action == "close"

    in_time(ask)
    assert said
    if action == "wait":
        assert "cannot" in str(said[0])
    in_time(toy.cache.close)


def test_prefetches_run_one_at_a_time(open_cache):
    toy = Toy(open_cache(8, host=64))
    for start in range(12):
        toy.use(prompt(start))
    inside, most = [], []

    class Counting:
        def begin(self, span: Span) -> None:
            if span.name == "prefetch":
                inside.append(span)
                most.append(len(inside))

        def end(self, span: Span, state: Any) -> None:
            if span.name == "prefetch":
                inside.remove(span)

    toy.cache.hooks.add(Counting())
    tickets = [toy.cache.prefetch(prompt(start)) for start in range(12)]
    in_time(lambda: [ticket.wait() for ticket in tickets])
    assert len(most) == 12
    assert max(most) == 1


def test_a_prefetch_that_was_interrupted_as_it_was_asked_for_is_forgotten(open_cache, monkeypatch):
    toy = Toy(open_cache(8, host=16))
    toy.use(prompt(1))

    def interrupted(work: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(toy.cache._prefetcher, "_spawn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            toy.cache.prefetch(prompt(1))
    assert not toy.cache._prefetcher._waiting
    assert in_time(lambda: toy.cache.prefetch(prompt(1)).wait()) is None


def test_a_purge_that_is_made_again_waits_for_what_the_interrupted_one_waited_for(open_cache, monkeypatch):
    toy, tenant = Toy(open_cache(8, host=8)), pk.Namespace(tenant="gone")
    toy.use(prompt(1), tenant)
    moves, waited = toy.cache.moves, []

    def interrupted(root: int) -> None:
        waited.append(root)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(moves, "drain_namespace", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                toy.cache.purge(tenant)
    assert waited == [waited[0]] * 2, "its moves may still be under way"
    toy.cache.purge(tenant)
    with monkeypatch.context() as patch:
        patch.setattr(moves, "drain_namespace", interrupted)
        toy.cache.purge(tenant)
    assert len(waited) == 2, "nothing of it is under way any more"


def test_the_clock_of_a_write_budget_and_a_log_handler_may_ask_the_cache(open_cache, tmp_path):
    asked: list[object] = []

    def clock() -> float:
        if opened:
            asked.append(opened[0].stats())
        return float(len(asked))

    opened: list[pk.KVCache] = []
    disk = pk.Disk(str(tmp_path / "budget"), pk.Blocks(64), admission="all", write_budget="1GiB")
    toy = Toy(open_cache(8, disk=disk, clock=clock))
    opened.append(toy.cache)
    in_time(lambda: [toy.use(prompt(start)) for start in range(6)])
    assert asked
    opened.clear()


def test_an_interrupt_of_a_clock_that_the_dispatcher_reads_comes_out_of_a_call_that_waits(open_cache, tmp_path):
    armed: list[bool] = []

    def clock() -> float:
        if armed and threading.current_thread() is not threading.main_thread():
            armed.clear()
            raise KeyboardInterrupt
        return 0.0

    disk = pk.Disk(str(tmp_path / "budget"), pk.Blocks(64), admission="all", write_budget="1GiB")
    toy = Toy(open_cache(8, disk=disk, clock=clock))
    toy.use(prompt(1))
    armed.append(True)

    def until_it_comes_out() -> None:
        for start in range(2, 40):
            toy.use(prompt(start))

    with pytest.raises(KeyboardInterrupt):
        until_it_comes_out()
    for start in range(2, 6):
        toy.use(prompt(start))

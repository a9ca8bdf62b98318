"""An exception in the caller's thread, at any moment, costs that call alone.

No byte is wrong, nothing hangs, and nothing stays held.
"""

from __future__ import annotations

import logging
import signal
import threading
import time

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tiers.mover import worker
from tests.reliability.interrupt_cases import caught
from tests.reliability.interrupt_kinds import Alarm, HandlerTimeout
from tests.reliability.interrupt_points import LIBRARY, Tracer

from .conftest import BLOCK, Toy, prompt

SPEC = pk.KVSpec(1, 1, 8, "float32", 4, model="t@1")
WATCHDOG_S = 60
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
NUM_TOKENS = 17
GOING = pk.Namespace(tenant="purged")


@pytest.fixture(autouse=True)
def watched():
    """A call that hangs fails its test."""
    before = signal.getsignal(signal.SIGALRM)
    with Alarm(WATCHDOG_S).watch():
        yield
    signal.signal(signal.SIGALRM, before)


def use(cache, number, num_tokens=NUM_TOKENS, namespace=None):
    """A request that writes number + 1 everywhere; hits hold that, or it fails. Its hits."""
    with cache.sequence([number * 1000 + j for j in range(num_tokens)], namespace) as seq:
        k, v = seq.gather()
        assert (k == number + 1).all(), f"request {number} was served KV of request {k.ravel()[0] - 1:.0f}"
        assert (v == number + 1).all()
        with cache.step([seq]) as step:
            kv = np.full((len(step.tokens), 1, 8), number + 1, np.float32)
            step.write(0, kv, kv)
        return sum(seq.hit_tokens.values())


def use_all(cache, numbers):
    """One request after the other."""
    for number in numbers:
        use(cache, number)


def held(cache):
    """Rows, owners and live blocks."""
    stats = cache.stats()
    return stats.sequences, stats.placement["owners"], stats.blocks["device"]["live"]


def settle(cache):
    """Until nothing is under way, and no prefetch holds anything."""
    prefetcher = cache._prefetcher
    while cache.stats().placement["in_flight"] or prefetcher._server or prefetcher._waiting:
        time.sleep(0.001)


class Interrupt(HandlerTimeout):
    """Of the tracer, in the caller's thread."""


@pytest.fixture
def waiting_copies(monkeypatch):
    """Copies between tiers wait until the test sets `go`, or for a moment at most.

    The first copy that waits sets `begun`.
    """
    real, begun, go = worker.transfer, threading.Event(), threading.Event()
    go.set()

    def transfer(*arguments):
        if not go.is_set():
            begun.set()
            go.wait(0.2)
        return real(*arguments)

    monkeypatch.setattr(worker, "transfer", transfer)
    return begun, go


class AfterTheCopyBegan(Tracer):
    """Raises at the library's first line in the caller's thread after a copy has begun."""

    def __init__(self, begun, cache):
        super().__init__()
        self._begun, self._cache, self._done = begun, cache, False

    def _enter(self, frame, event, arg):
        return self._within if frame.f_code.co_filename.startswith(LIBRARY) else None

    def _within(self, frame, event, arg):
        if not self._done:
            if self._cache.placement.num_in_flight:
                self._begun.wait(0.002)
            if self._begun.is_set():
                self._done = True
                raise Interrupt
        return self._within


@pytest.mark.parametrize("scrub", ["never", "across_namespaces", "always"])
@pytest.mark.parametrize("tenant", [None, "another"])
def test_an_exception_just_after_moves_were_queued_never_lets_them_overwrite_another_prompt(
    waiting_copies, scrub, tenant
):
    begun, go = waiting_copies
    namespace = None if tenant is None else pk.Namespace(tenant=tenant)
    with pk.KVCache(SPEC, pk.Blocks(10), pk.Blocks(12), threads=1, scrub=scrub) as cache:
        for number in range(4):
            use(cache, number)
        use(cache, 90, namespace=GOING)
        assert cache.explain(range(NUM_TOKENS)).runs[-1].tier == pk.Tier.HOST
        cache.purge(GOING)  # room on the device, so that the next moves are the promotion
        go.clear()
        with pytest.raises(Interrupt):
            AfterTheCopyBegan(begun, cache).run(lambda: use(cache, 0))
        use(cache, 50, 13, namespace)
        use(cache, 51, 13, namespace)
        go.set()
        settle(cache)
        time.sleep(0.01)  # a copy that is not counted any more may still come
        use(cache, 50, 13, namespace)
        use(cache, 51, 13, namespace)
        use(cache, 0)
        cache.check_integrity()


@pytest.mark.parametrize("with_disk", [False, True], ids=["two tiers", "three tiers"])
def test_a_signal_while_blocks_are_moved_does_not_stop_the_cache(monkeypatch, tmp_path, with_disk):
    real, armed = worker.transfer, [False]

    def transfer(*arguments):
        if armed[0]:
            armed[0] = False
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.01)
        return real(*arguments)

    def raises(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "transfer", transfer)
    before = signal.signal(signal.SIGUSR1, raises)
    try:
        disk = (
            pk.Disk(str(tmp_path / "kv"), pk.Blocks(32), segment_size=pk.Bytes(1 << 16), admission="all")
            if with_disk
            else None
        )
        with pk.KVCache(SPEC, pk.Blocks(10), pk.Blocks(8), disk) as cache:
            for number in range(6):
                use(cache, number)
            for number in (0, 7, 1, 8):
                armed[0] = True
                with pytest.raises(KeyboardInterrupt):  # the first that moves something is interrupted
                    use_all(cache, range(number, 2000, 100))
            for number in range(8):
                use(cache, number)
            settle(cache)
            cache.check_integrity()
            assert held(cache) == (0, 0, 0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def points_of(prepare, call):
    """How many points a call has."""
    tracer = Tracer()
    world = prepare()
    tracer.run(lambda: call(world))
    world.close()
    return tracer.passed


def interrupted_everywhere(prepare, call, most, kind=KeyboardInterrupt):
    """Yield caches whose call was interrupted, each at another point, with that point.

    The points are spread evenly over the call.
    """
    number = points_of(prepare, call)
    for k in range(1, number + 1, max(1, number // most)):
        cache, problem = prepare(), kind("interrupted")
        tracer = Tracer(k, problem)
        came = caught(lambda cache=cache, tracer=tracer: tracer.run(lambda: call(cache)))
        dropped = tracer.point is None or "__del__" in tracer.point.stack  # by the interpreter, in a finalizer
        assert dropped or came is problem, f"{came!r} came out in place of {problem!r} at {tracer.point}"
        yield cache, str(tracer.point)
        cache.close()


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_request_that_makes_room_stops_nothing_and_holds_nothing():
    def prepare():
        cache = pk.KVCache(SPEC, pk.Blocks(10), pk.Blocks(8))
        for number in range(5):
            use(cache, number)
        return cache

    for cache, point in interrupted_everywhere(prepare, lambda cache: use(cache, 0), 150):
        for number in (6, 0, 7, 1):
            use(cache, number)
        settle(cache)
        cache.check_integrity()
        assert held(cache) == (0, 0, 0), point


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_opening_forking_and_releasing_holds_no_row_and_no_owner():
    def prepare():
        cache = pk.KVCache(SPEC, pk.Blocks(16))
        use(cache, 0)
        return cache

    def call(cache):
        with cache.sequence(range(6)) as seq:
            for fork in seq.fork(2):
                fork.release()

    for cache, point in interrupted_everywhere(prepare, call, 400, HandlerTimeout):
        assert held(cache) == (0, 0, 0), point
        call(cache)
        cache.check_integrity()


def test_the_exception_that_comes_out_is_the_callers_own_and_not_an_error_about_it():
    def prepare():
        cache = pk.KVCache(SPEC, pk.Blocks(16))
        use(cache, 0)
        return cache

    for kind in (KeyboardInterrupt, SystemExit, MemoryError):
        for cache, _ in interrupted_everywhere(prepare, lambda cache: use(cache, 0), 60, kind):
            use(cache, 0)


def test_an_interrupt_inside_the_disk_tier_leaves_nobody_inside_so_that_it_closes_at_once(tmp_path):
    made = iter(range(10**6))

    def open_it(path):
        return pk.KVCache(
            SPEC,
            pk.Blocks(10),
            None,
            pk.Disk(str(path), pk.Blocks(32), segment_size=pk.Bytes(1 << 16), admission="all"),
        )

    paths = []

    def prepare():
        paths.append(tmp_path / str(next(made)))
        cache = open_it(paths[-1])
        use(cache, 0)
        return cache

    def call(cache):
        cache.stats()
        cache.flush()
        cache.purge(None)

    for cache, _ in interrupted_everywhere(prepare, call, 100):
        cache.purge(None)  # waits until it is alone in the disk tier
        cache.close()
        open_it(paths[-1]).close()  # and the lock is free


class Clock:
    """Seconds. Raises while `fails`."""

    def __init__(self):
        self.now, self.fails = 1e6, 0

    def __call__(self):
        if self.fails:
            self.fails -= 1
            raise OSError("no time")
        self.now += 1
        return self.now


def disk(tmp_path, **options):
    return pk.Disk(str(tmp_path / "kv"), pk.Blocks(64), segment_size=pk.Bytes(1 << 16), admission="all", **options)


@pytest.mark.parametrize("times", [1, 1000])
def test_a_clock_that_raises_does_not_come_out_and_stops_nothing(tmp_path, caplog, times):
    clock = Clock()
    with pk.KVCache(SPEC, pk.Blocks(8), None, disk(tmp_path, write_budget="1GiB"), clock=clock) as cache:
        with caplog.at_level(logging.WARNING, "pagedkv"):
            for number in range(12):
                if number == 4:
                    clock.fails = times
                use(cache, number)
        assert len([record for record in caplog.records if "clock" in record.getMessage()]) == 1
        clock.fails = 0
        for number in range(6):
            use(cache, number)
        settle(cache)
        cache.check_integrity()


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), float("-inf"), None, "noon", OSError("no time")])
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_clock_that_tells_no_time_does_not_come_out_of_requests(answer, policy):
    now = [1.0]

    def clock():
        if isinstance(now[0], OSError):
            raise now[0]
        return now[0]

    with pk.KVCache(SPEC, pk.Blocks(10), pk.Blocks(8), policy=policy, clock=clock) as cache:
        with cache.sequence([1, 2, 3]) as seq:
            seq.retain(ttl_s=5.0)
        now[0] = answer
        for number in range(6):
            use(cache, number)
        now[0] = 10.0
        use(cache, 0)
        cache.check_integrity()


def test_a_clock_that_goes_back_a_day_does_not_keep_the_disk_from_taking_blocks(tmp_path):
    clock = Clock()
    with pk.KVCache(SPEC, pk.Blocks(8), None, disk(tmp_path, write_budget="1GiB"), clock=clock) as cache:
        for number in range(20):
            if number == 8:
                clock.now -= 86400
            clock.now += 3600 if number >= 8 else 0
            use(cache, number)
        settle(cache)
        assert cache.stats().disk["refused_by_write_budget"] == 0


ACTIONS = {
    "a request": lambda cache: use(cache, 99), "purge": lambda cache: cache.purge(None),
    "flush": lambda cache: cache.flush(), "a prefetch": lambda cache: cache.prefetch([1, 2, 3, 4, 5]).wait(60),
    "explain": lambda cache: cache.explain([1, 2, 3]), "stats": lambda cache: cache.stats(),
}  # fmt: skip


@pytest.mark.parametrize("when", ["begin", "end"])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", ["moves", "make_room", "promote", "sequence", "step", "release"])
def test_a_hook_that_calls_the_cache_works_or_is_refused_at_once(tmp_path, name, action, when):
    class Hook:
        busy, calls = False, 0

        def begin(self, span):
            self._tell(span, "begin")

        def end(self, span, state):
            self._tell(span, "end")

        def _tell(self, span, at):
            if at == when and span.name == name and not self.busy:
                self.busy, self.calls = True, self.calls + 1
                try:
                    ACTIONS[action](cache)
                finally:
                    self.busy = False

    with pk.KVCache(SPEC, pk.Blocks(14), pk.Blocks(8), disk(tmp_path)) as cache:
        for number in range(3):
            use(cache, number)
        hook = Hook()
        cache.hooks.add(hook)
        for number in (5, 0, 6, 1, 7, 2):
            use(cache, number)
        cache.hooks.remove(hook)
        settle(cache)
        while hook.busy or held(cache) != (0, 0, 0):  # the dispatcher's thread calls the hook after the moves' end
            time.sleep(0.001)  # what stays held is found by the alarm
        cache.check_integrity()
        assert hook.calls


def test_the_points_are_found_in_the_library_and_say_where_they_are():
    tracer = Tracer(5, HandlerTimeout())
    with pk.KVCache(SPEC, pk.Blocks(16)) as cache, pytest.raises(HandlerTimeout):
        tracer.run(lambda: use(cache, 0))
    assert tracer.point is not None
    assert (LIBRARY + tracer.point.file).endswith(".py")


def test_moves_that_a_round_without_memory_had_taken_are_given_up(open_cache, monkeypatch):
    """CPython may lose a reference to the moves taken, where it has no memory.

    Those moves never die then.
    """
    cache = open_cache(4, host=16)
    toy = Toy(cache)
    toy.use(prompt(1))
    real, kept = type(cache._dispatcher).round, []

    def round_without_memory(hands, taken):
        if taken is not None and not kept:
            kept.append(taken)
            raise MemoryError
        return real(hands, taken)

    monkeypatch.setattr(type(cache._dispatcher), "round", round_without_memory)
    toy.use(prompt(2, 4 * BLOCK))  # makes room: what is to be demoted is lost, and the request goes on
    assert kept
    assert cache.placement.num_in_flight == 0
    toy.use(prompt(3, 4 * BLOCK))
    cache.check_integrity()

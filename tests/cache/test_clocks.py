"""A caller's clock may raise, return nonsense or go back.

No call fails, nothing hangs, and the cache's time stands still.
"""

from __future__ import annotations

import logging
import math
import threading

import pytest

import pagedkv as pk
from pagedkv.cache.admission import BURST_S, DAY_S, Admission, Likeliest, Turnover, WriteBudget
from pagedkv.cache.cost_model import CostModel
from pagedkv.observe.clock import LIMIT_S, Clock, Passed

from .conftest import BLOCK, Toy, prompt

DISK = 2


class Hands:
    """A clock that shows `now`, and raises it where it is an exception."""

    def __init__(self, now=1e6):
        self.now = now
        self.readings = 0

    def __call__(self):
        self.readings += 1
        if isinstance(self.now, BaseException):
            raise self.now
        return self.now


BAD = [OSError("no time"), math.nan, math.inf, -math.inf, 1e30, -1e30, LIMIT_S, None, "noon", True, 1j, [1.0]]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_the_last_good_reading_stands_in_for_a_bad_one(bad, caplog):
    hands = Hands(7)
    clock = Clock(hands)
    hands.now = 8.5
    assert clock() == 8.5
    hands.now = bad
    assert [clock(), clock()] == [8.5, 8.5]
    assert clock.failures == 2
    assert [record.name for record in caplog.records] == ["pagedkv.clock"], "said once"
    hands.now = 9
    assert clock() == 9.0
    assert type(clock()) is float
    assert clock.failures == 2


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_clock_whose_first_reading_fails_is_refused(bad, open_cache):
    for opened in (
        lambda clock: Clock(clock),
        lambda clock: pk.KVCache(pk.KVSpec(1, 1, 8, "float32", 4), pk.Blocks(8), clock=clock),
        lambda clock: pk.Scheduler(open_cache(8), clock=clock),
    ):
        with pytest.raises((pk.WrongType, pk.InvalidArgument), match="clock"):
            opened(Hands(bad))
    with pytest.raises(pk.WrongType, match="clock must be a function"):
        pk.Scheduler(open_cache(8), clock=5)


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_fault_of_the_clock_comes_out(ends):
    hands = Hands()
    clock = Clock(hands)
    hands.now = ends()
    with pytest.raises(ends):
        clock()
    assert clock.failures == 0
    hands.now = 2.0
    assert clock() == 2.0


def test_time_that_passes_never_falls_and_goes_on_after_a_step_back():
    hands = Hands(100.0)
    passed = Passed(hands)
    found = []
    for now in (105.0, 5.0, 5.0, 8.0, 107.0):
        hands.now = now
        found.append(passed())
    assert found == [5.0, 5.0, 5.0, 8.0, 107.0]


@pytest.mark.parametrize("back", [3600, DAY_S, 30 * DAY_S])
def test_a_day_back_costs_the_write_budget_nothing_and_wins_nothing(back):
    hands = Hands(1e7)
    budget = WriteBudget(DAY_S * 10, 1, hands)  # ten bytes a second
    assert budget.take(10 * BURST_S)
    hands.now -= back
    assert not budget.take(1), "a step back is no time"
    hands.now += 5
    assert budget.take(50)
    assert not budget.take(1)


def test_after_a_step_back_the_likeliest_runs_are_chosen_as_before():
    """What was compared before the step must not be taken for what is still to come."""
    hands = Hands(1e7)
    budget = WriteBudget(DAY_S * 1000, 1000, hands)
    costs = CostModel(16, 1000, 3e4, 1000.0)
    likeliest = Likeliest(lambda node, within_s: 0.5, Turnover(100, hands), costs, budget)
    found = []
    for turn in range(40):
        hands.now += 10
        if turn == 20:
            hands.now -= DAY_S
        found.append(likeliest.is_among_the_best(1.0, 1000))
    assert found == [True] * 40


def test_a_blocks_life_is_known_after_a_step_back():
    hands = Hands(1e7)
    lives = Turnover(100, hands)
    lives.add(50)
    hands.now += 10
    hands.now -= DAY_S
    assert lives.lifetime_s() == DAY_S, "nothing is known before time passes"
    hands.now += 10
    assert lives.lifetime_s() == 20.0


class Failing:
    """Stands for what judges a run: everything it is asked raises."""

    def __getattr__(self, name):
        raise RuntimeError(f"asked for {name}")


@pytest.mark.parametrize("continued", [False, True])
def test_a_run_that_cannot_be_judged_is_written_as_far_as_the_budget_goes(continued, caplog):
    budget = WriteBudget(DAY_S, 1000, Hands())
    asked = Admission("cost", Failing(), 1000, budget)
    assert asked.admits(DISK, 3, 0, continued, False), "a full bucket gives to any run"
    assert asked.admits(DISK, 3, 0, continued, False) is continued
    assert asked.failures == (0 if continued else 2)
    assert asked.refused() == {"refused_by_admission": 0, "refused_by_write_budget": 0 if continued else 3}
    assert len(caplog.records) == min(1, asked.failures), "said once"


@pytest.mark.parametrize("continued", [False, True])
def test_where_the_budget_fails_only_what_others_continue_is_written(continued):
    asked = Admission("all", CostModel(16, 1000, 3e4), 1000, Failing())
    assert asked.admits(DISK, 3, 0, continued, False) is continued
    assert asked.failures == 1
    assert asked.refused()["refused_by_write_budget"] == (0 if continued else 3)


def in_time(work):
    """Whether `work` ends, in a thread of its own; what it raised comes out."""
    raised = []

    def run():
        try:
            work()
        except BaseException as problem:
            raised.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if raised:
        raise raised[0]
    return not thread.is_alive()


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_clock_that_fails_under_the_write_budget_costs_no_request(open_cache, tmp_path, bad, caplog):
    hands = Hands()
    store = pk.Disk(str(tmp_path / "kv"), pk.Blocks(64), admission="all", write_budget="1GiB")
    cache = open_cache(8, disk=store, clock=hands)
    toy = Toy(cache)

    def work():
        for i in range(9):
            good, hands.now = hands.now, bad if i in (4, 5) else hands.now
            toy.use(prompt(i))
            hands.now = good
        for i in range(9):
            toy.use(prompt(i))

    assert in_time(work)
    stats = cache.stats()
    assert stats.clock_failures > 0
    assert stats.disk["admission_failures"] == 0
    assert f"{stats.clock_failures} readings of the clock failed" in str(stats)
    assert stats.disk["refused_by_write_budget"] == 0
    assert cache.placement.num_in_flight == 0
    assert len([record for record in caplog.records if record.name == "pagedkv.clock"]) == 1


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_times_to_live_stand_still_while_the_clock_fails(open_cache, policy, bad):
    hands = Hands()
    toy = Toy(open_cache(64, policy=policy, clock=hands))
    with toy.cache.sequence(prompt(1)) as seq:
        toy.run(seq)
        seq.retain(ttl_s=30)
    hands.now = bad
    toy.use(prompt(2))
    with toy.cache.sequence(prompt(3)) as seq:
        toy.run(seq)
        seq.retain(ttl_s=10)
    assert toy.cache.stats().placement["expired"] == 0
    assert toy.cache.stats().clock_failures > 0
    hands.now = 1e6 + 31
    toy.use(prompt(2))
    assert toy.cache.stats().placement["expired"] == 6


@pytest.mark.parametrize("back", [40, DAY_S])
def test_after_a_step_back_times_to_live_stand_still_until_the_clock_has_passed_again(open_cache, back):
    hands = Hands()
    toy = Toy(open_cache(64, clock=hands))
    with toy.cache.sequence(prompt(1)) as seq:
        toy.run(seq)
        seq.retain(ttl_s=30)
    for now, expired in ((1e6 - back, 0), (1e6 + 29, 0), (1e6 + 31, 3)):
        hands.now = now
        toy.use(prompt(2))
        assert toy.cache.stats().placement["expired"] == expired


@pytest.mark.parametrize("back", [0, 3600, DAY_S])
def test_a_clock_that_goes_back_stops_no_writes_to_the_disk(open_cache, tmp_path, back):
    hands = Hands()
    store = pk.Disk(str(tmp_path / "kv"), pk.Blocks(200), admission="all", write_budget="1GiB")
    toy = Toy(open_cache(8, disk=store, clock=hands))
    for i in range(40):
        hands.now += 3600 - (back if i == 8 else 0)
        toy.use(prompt(i))
    assert toy.cache.stats().disk["refused_by_write_budget"] == 0


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_deadlines_stand_still_while_the_schedulers_clock_fails(open_cache, bad):
    hands = Hands()
    toy = Toy(open_cache(64))
    scheduler = pk.Scheduler(toy.cache, clock=hands)
    request = scheduler.submit(prompt(1), max_new_tokens=4, deadline_s=30)
    hands.now = bad
    for token in (1, 2):
        plan = scheduler.schedule()
        assert not plan.expired
        with scheduler.step(plan) as step:
            toy.write(step, *[lane.seq for lane in plan.lanes])
        scheduler.report(plan, [token])
    other = scheduler.submit(prompt(2), max_new_tokens=4, deadline_s=10)
    hands.now = 1e6 + 31
    assert set(scheduler.schedule().expired) == {request, other}
    assert scheduler.stats().clock_failures >= 3


def test_a_scheduler_whose_clock_goes_back_ends_nothing_early(open_cache):
    hands = Hands()
    scheduler = pk.Scheduler(open_cache(64), clock=hands)
    request = scheduler.submit(prompt(1), max_new_tokens=4, deadline_s=30)
    hands.now -= DAY_S
    assert not scheduler.schedule().expired
    hands.now += DAY_S + 31
    assert scheduler.schedule().expired == (request,)


def test_a_failing_clock_whose_log_handler_fails_too_costs_no_request(open_cache):
    class Handler(logging.Handler):
        def emit(self, record):
            raise OSError("the log is full")

    handler = Handler()
    logging.getLogger("pagedkv").addHandler(handler)
    try:
        hands = Hands()
        toy = Toy(open_cache(16, policy="hazard", clock=hands))
        hands.now = None
        toy.use(prompt(1))
        assert toy.use(prompt(1)) == {"device": 3 * BLOCK}
    finally:
        logging.getLogger("pagedkv").removeHandler(handler)

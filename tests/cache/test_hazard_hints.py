"""Hints through a KVCache and a scheduler.

They say whose request it is, and when its prefix is expected again.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from random import Random

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.scheduler import Scheduler
from tests.cache.oddities import ODDITIES, ForeignError
from tests.shown import shown

from .conftest import SPEC, Toy, all_free, prompt
from .test_cost_model import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def toy(open_cache, clock):
    return Toy(open_cache(64, policy="hazard", clock=clock))


def left_behind(toy):
    return toy.cache.stats().hazard["left_behind"]


def use(toy, start, **hints):
    with toy.cache.sequence(prompt(start), **hints) as seq:
        toy.run(seq)


@pytest.mark.parametrize("name", ["a chat", b"\x00", 0, np.int64(7), 2**70])
def test_a_session_has_any_name_that_stays_the_same(toy, name):
    use(toy, 1, session=name)
    use(toy, 2)
    assert left_behind(toy) == 0
    use(toy, 3, session=name)
    assert left_behind(toy) == 2  # all of the first prompt, whose last block stands by itself


def test_a_trial_goes_on_with_its_session_when_it_is_kept_and_only_then(toy):
    use(toy, 1, session="a")
    toy.cache.sequence(prompt(2), session="a", on_trial=True).release()
    assert left_behind(toy) == 0
    with toy.cache.sequence(prompt(2), session="a", on_trial=True) as seq:
        toy.cache.count(seq)
        assert left_behind(toy) == 2


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_other_policies_do_not_look_at_hints(open_cache, policy):
    toy = Toy(open_cache(16, policy=policy))
    with toy.cache.sequence(prompt(1), session="a") as seq:
        toy.run(seq)
        seq.expect_return(math.inf)
    assert toy.use(prompt(1))["device"] > 0


def test_what_is_expected_back_is_kept_and_what_is_not_goes_first(open_cache):
    rng, hits = Random(3), {}
    again = {start for start in range(600) if rng.random() < 0.5}  # after twelve others; the rest never
    order = sorted([(float(start), start) for start in range(600)] + [(start + 12.5, start) for start in again])
    for told in (False, True):
        clock = Clock()
        toy = Toy(open_cache(30, policy="hazard", clock=clock))
        for when, start in order:
            clock.now = 100 + when
            with toy.cache.sequence(prompt(start)) as seq:
                toy.run(seq)
                if told:
                    seq.expect_return(12.5 if start in again and when == start else math.inf)
        hits[told] = toy.cache.stats().hit_tokens["device"]
    assert hits[True] > hits[False] + 600


@pytest.mark.parametrize("seconds", [0, 1.5, math.inf, np.float32(3), np.int64(4), None])
def test_a_return_is_any_number_of_seconds(toy, seconds):
    with toy.cache.sequence(prompt(1)) as seq:
        assert seq.expect_return(seconds) is None


def test_room_that_a_step_makes_is_made_by_lru_too(open_cache):
    toy = Toy(open_cache(8, policy="hazard", clock=Clock()))
    toy.use(prompt(1))  # three whole blocks of four tokens
    with toy.cache.sequence(prompt(2, 26)) as seq, toy.cache.step([seq]) as step:  # seven blocks
        assert toy.cache.explain(prompt(1)).cached_tokens < 12
        assert toy.cache.stats().hazard["lacking"] == 1  # the block that is not full: the account has whole ones only
        for layer in range(SPEC.num_layers):
            step.mark_written(layer)


def test_only_a_sequence_is_counted(toy):
    for odd in (None, 3, "seq"):
        with pytest.raises(pk.WrongType, match="count takes a Sequence"):
            toy.cache.count(odd)


def test_the_statistics_in_words_compare_with_lru(toy):
    for _ in range(3):
        toy.use(prompt(1))
    assert str(toy.cache.stats()).endswith("; hazard +0 hit blocks beside LRU, 0 victims in its order")


def test_a_scheduler_says_whose_request_it_is(toy):
    scheduler = Scheduler(toy.cache)
    for start in (1, 2):
        request = scheduler.submit(prompt(start), 1, session="a")
        while not request.ended:
            plan = scheduler.schedule()
            with scheduler.step(plan) as step:
                for layer in range(SPEC.num_layers):
                    step.mark_written(layer)
            scheduler.report(plan, np.zeros(len(plan.lanes), np.int32))
    assert request.session == "a"
    assert left_behind(toy) > 0


def is_time(odd):
    return isinstance(odd, Real) and not isinstance(odd, bool) and odd >= 0


def is_name(odd):
    if isinstance(odd, Integral) and not isinstance(odd, bool):
        return odd >= 0
    return odd is None or (isinstance(odd, str | bytes) and len(odd) > 0)


@pytest.mark.parametrize("odd", [*(odd for odd in ODDITIES if not is_name(odd)), -1, -(2**70)], ids=shown)
def test_a_session_that_is_no_name_is_refused(toy, odd):
    before = toy.cache.stats()
    with pytest.raises((pk.WrongType, pk.InvalidArgument), match="session"):
        toy.cache.sequence(prompt(1), session=odd)
    with pytest.raises((pk.WrongType, pk.InvalidArgument), match="session"):
        Scheduler(toy.cache).submit(prompt(1), 1, session=odd)
    assert toy.cache.stats() == before
    assert all_free(toy.cache)


@pytest.mark.parametrize("odd", [odd for odd in ODDITIES if odd is not None and not is_time(odd)], ids=shown)
def test_a_return_that_is_no_time_is_refused(toy, odd):
    with toy.cache.sequence(prompt(1)) as seq, pytest.raises((pk.WrongType, pk.InvalidArgument, ForeignError)):
        seq.expect_return(odd)


def test_hints_for_what_was_released_are_refused(toy):
    seq = toy.cache.sequence(prompt(1), session="a")
    seq.release()
    with pytest.raises(pk.ClosedError):
        seq.expect_return(5)

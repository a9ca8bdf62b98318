"""Which blocks the disk tier admits: by cost, by second hit, by a budget of bytes per day."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache.admission import BURST_S, DAY_S, Admission, WriteBudget
from pagedkv.cache.cost_model import CostModel

from .conftest import BLOCK, SPEC, Toy, prompt, where
from .test_cost_model import Clock

DISK = 2


def test_a_budget_allows_an_hours_share_at_once_and_its_rate_after_that() -> None:
    clock = Clock()
    budget = WriteBudget(DAY_S * 10, 1, clock)  # ten bytes a second
    assert budget.take(10 * BURST_S)
    assert not budget.take(1)
    clock.now += 5
    assert not budget.take(51)
    assert budget.take(50)
    clock.now += 10 * DAY_S
    assert budget.take(30 * BURST_S), "a full bucket gives to any run, or a run longer than it would never be written"
    clock.now += 2 * BURST_S
    assert not budget.take(1), "and what is not used is not saved up"
    clock.now += 1
    assert budget.take(1)


def test_a_budget_of_less_than_a_block_an_hour_still_lets_a_block_through() -> None:
    clock = Clock()
    budget = WriteBudget(DAY_S, 10 * BURST_S, clock)
    assert budget.take(10 * BURST_S)
    clock.now += 5 * BURST_S
    assert not budget.take(10 * BURST_S)
    clock.now += 5 * BURST_S
    assert budget.take(10 * BURST_S)


def test_what_is_owed_is_paid_first() -> None:
    clock = Clock()
    budget = WriteBudget(DAY_S, 1, clock)
    assert budget.take(3 * BURST_S, overdraw=True)
    clock.now += 2 * BURST_S
    assert not budget.take(1)
    clock.now += 2
    assert budget.take(1)


def test_over_days_no_more_is_written_than_was_allowed() -> None:
    clock = Clock()
    budget = WriteBudget(DAY_S * 4, 100, clock)
    written = 0
    for _ in range(3 * 24 * 6):
        while budget.take(100):
            written += 100
        clock.now += 600
    assert 0.99 * 3 <= written / (DAY_S * 4) <= 3 + 1 / 24


def admission(mode: Any, budget: WriteBudget | None = None, slow: bool = False) -> Admission:
    costs = CostModel(16, 1000, 3e4, 1000.0)
    if slow:
        costs.observe_load(DISK, 1000, 100.0)
    return Admission(mode, costs, 1000, budget)


@pytest.mark.parametrize(
    ("mode", "slow", "matched", "admits"),
    [
        ("all", True, False, True),
        ("cost", False, False, True),
        ("cost", True, True, False),
        ("second_hit", False, False, False),
        ("second_hit", True, True, True),
    ],
)
def test_modes(mode: Any, slow: bool, matched: bool, admits: bool) -> None:
    asked = admission(mode, slow=slow)
    assert asked.admits(DISK, 3, 0, False, matched) is admits
    assert asked.refused()["refused_by_admission"] == (0 if admits else 3)


@pytest.mark.parametrize("mode", ["cost", "second_hit"])
def test_what_others_continue_is_written_in_any_case_and_overdraws(mode: Any) -> None:
    clock = Clock()
    asked = admission(mode, WriteBudget(DAY_S, 1000, clock), slow=True)
    assert asked.admits(DISK, 50, 0, True, False)
    clock.now += 10 * BURST_S
    begun = WriteBudget(DAY_S, 1000, clock)
    assert begun.take(1)
    assert not admission("all", begun).admits(DISK, 50, 0, False, True)
    assert not Admission("all", CostModel(16, 1000, 3e4), 1000, asked._budget).admits(DISK, 1, 0, False, True)
    assert asked.refused() == {"refused_by_admission": 0, "refused_by_write_budget": 0}


def test_a_refusal_by_admission_costs_nothing_of_the_budget() -> None:
    asked = admission("second_hit", WriteBudget(24 * 1000, 1000, Clock()))
    assert not asked.admits(DISK, 1, 0, False, False)
    assert asked.admits(DISK, 1, 0, False, True)
    assert not asked.admits(DISK, 1, 0, False, True)
    assert asked.refused() == {"refused_by_admission": 1, "refused_by_write_budget": 1}


# ---- through a cache


@pytest.fixture
def open_toy(open_cache, tmp_path):
    def open_it(device=4, host=None, **options):
        prefill = options.pop("prefill_tokens_per_s", None)
        options.setdefault("write", "evicted")
        disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(60), **options)
        return Toy(open_cache(device, host=host, disk=disk, prefill_tokens_per_s=prefill))

    return open_it


def test_second_hit_writes_only_what_was_asked_for_again(open_toy):
    toy = open_toy(device=8, admission="second_hit")
    toy.use(prompt(1))
    toy.use(prompt(2))
    toy.use(prompt(2))
    for start in (3, 4, 5):
        toy.use(prompt(start))
    assert where(toy.cache, prompt(1)) == []
    assert where(toy.cache, prompt(2)) == [("disk", 3)]
    stats = toy.cache.stats()
    refused = stats.placement["refused_demotions"] + stats.placement["refused_copies"]
    assert stats.disk["refused_by_admission"] == refused > 0
    assert stats.placement["failed_demotions"] == stats.failed_moves == 0
    toy.use(prompt(2))


def test_a_turn_added_to_a_conversation_was_not_asked_for_again_itself(open_toy):
    toy = open_toy(device=8, admission="second_hit")
    toy.use(prompt(1))
    toy.use(prompt(1, 6 * BLOCK + 1))
    toy.use(prompt(2, 8 * BLOCK))
    assert where(toy.cache, prompt(1, 6 * BLOCK + 1)) == [("disk", 3)]


@pytest.mark.parametrize("host", [None, 4])
def test_what_is_refused_leaves_no_block_whose_prefix_is_gone(open_toy, host):
    toy = open_toy(device=6, host=host, admission="second_hit")
    choose = random.Random(5)
    for _ in range(80):
        toy.use(choose.choices([0, 1], k=choose.randint(1, 20)))
        toy.cache.check_integrity()
    assert toy.cache.stats().disk["refused_by_admission"] > 0
    moved = toy.cache.stats().moved_bytes
    assert moved.get("device_to_disk", 0) + moved.get("host_to_disk", 0) > 0


def test_a_budget_bounds_what_is_written(open_toy):
    toy = open_toy(admission="all", write_budget=pk.Bytes(24 * 5 * SPEC.block_bytes))
    for start in range(20):
        toy.use(prompt(start))
    stats = toy.cache.stats()
    written = stats.moved_bytes["device_to_disk"] // SPEC.block_bytes
    assert 0 < written <= 5 + 3, "an hour's share, and a run that others continue"
    assert stats.disk["refused_by_write_budget"] > 20
    assert stats.disk["blocks_written"] == written


def test_what_loads_slower_than_it_computes_is_not_written(open_toy):
    toy = open_toy(prefill_tokens_per_s=1e9)
    toy.use(prompt(1))
    toy.use(prompt(2))
    assert where(toy.cache, prompt(1)) == [("disk", 3)], "until a load was measured everything is written"
    assert toy.use(prompt(1)) == {"disk": 3 * BLOCK}
    written = toy.cache.stats().disk["blocks_written"]
    for start in range(3, 9):
        toy.use(prompt(start))
    stats = toy.cache.stats().disk
    assert stats["blocks_written"] <= written + 3, "prompt 2 may have been on its way"
    assert stats["refused_by_admission"] >= 12


def test_with_admission_all_it_is_written_all_the_same(open_toy):
    toy = open_toy(admission="all", prefill_tokens_per_s=1e9)
    for start in (1, 2, 1, 3, 4, 5, 6):
        toy.use(prompt(start))
    stats = toy.cache.stats().disk
    assert stats["blocks_written"] >= 15
    assert stats["refused_by_admission"] == 0


# ---- hits that are not worth their loading


def test_a_disk_hit_slower_than_computing_is_declined_counted_and_kept(open_toy):
    toy = open_toy(admission="all", prefill_tokens_per_s=1e9)
    for start in (1, 2, 1):
        toy.use(prompt(start))
    assert where(toy.cache, prompt(2)) == [("disk", 3)]
    assert toy.use(prompt(2)) == {}
    stats = toy.cache.stats()
    assert stats.disk["disk_hits_declined"] == 3 * BLOCK
    assert stats.missed_promotions == 0
    assert "12 tokens declined" in str(stats)
    assert stats.to_dict()["disk"]["disk_hits_declined"] == 3 * BLOCK
    toy.cache.check_integrity()
    toy.use(prompt(4))
    assert where(toy.cache, prompt(2)) == [("disk", 3)], "the copy is as good as before"


def test_a_declined_hit_is_taken_once_computing_is_slower(open_toy):
    toy = open_toy(admission="all", prefill_tokens_per_s=1e9)
    for start in (1, 2, 1):
        toy.use(prompt(start))
    with toy.cache.sequence(prompt(2)) as seq:
        assert sum(seq.hit_tokens.values()) == 0
    for _ in range(200):
        toy.cache.observe_prefill(10, 1000.0)
    assert toy.use(prompt(2)) == {"disk": 3 * BLOCK}


def test_a_prefetch_declines_what_a_sequence_would(open_toy):
    toy = open_toy(admission="all", prefill_tokens_per_s=1e9)
    for start in (1, 2, 1):
        toy.use(prompt(start))
    assert toy.cache.prefetch(prompt(2)).wait(60) == 0
    assert where(toy.cache, prompt(2)) == [("disk", 3)]
    assert toy.cache.stats().disk["disk_hits_declined"] == 3 * BLOCK


def test_the_front_that_is_closer_is_used_although_the_tail_is_declined(open_toy):
    toy = open_toy(device=8, admission="all", prefill_tokens_per_s=1e9)
    long = prompt(1, 6 * BLOCK + 1)
    toy.use(long)
    toy.use(prompt(2, 8 * BLOCK))
    assert toy.use(long) == {"disk": 6 * BLOCK}
    toy.use(prompt(3, 3 * BLOCK))
    tiers = where(toy.cache, long)
    assert [tier for tier, _ in tiers] == ["device", "disk"]
    assert toy.use(long) == {"device": tiers[0][1] * BLOCK}


def test_a_step_that_attended_every_layer_tells_how_fast_prompts_are_computed(open_cache):
    cache = open_cache(80)
    toy = Toy(cache)
    tokens = prompt(1, 200)
    with cache.sequence(tokens) as seq:
        toy.run(seq)
    assert "prefill_tokens_per_s" not in cache._costs.rates(), "it wrote, but did not compute here"
    for count, expected in ((60, False), (200, True)):
        with cache.sequence(prompt(count, count)) as seq, cache.step([seq]) as step:
            toy.write(step, seq)
            for layer in range(SPEC.num_layers):
                step.attend(layer, np.zeros((count, SPEC.num_kv_heads, SPEC.head_dim), np.float32))
        assert ("prefill_tokens_per_s" in cache._costs.rates()) is expected


@pytest.mark.parametrize("wrong", [(0, 1.0), (1, 0.0), ("x", 1.0), ([1, 2], 1.0), (1, "x"), (1, 1.0, -1)])
def test_what_cannot_have_been_observed_is_refused(open_cache, wrong):
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        open_cache().observe_prefill(*wrong)


@pytest.mark.parametrize("call", ["sequence", "load", "begin_load"])
def test_a_flag_that_is_no_bool_is_refused_before_anything_is_held(open_cache, call):
    cache = open_cache()
    with pytest.raises(pk.WrongType, match="on_trial must be a bool, not str"):
        getattr(cache, call)(prompt(1), on_trial="yes")
    assert cache.stats().sequences == 0
    cache.check_integrity()


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1.0], pk.WrongType),
        ("30000", pk.WrongType),
        (True, pk.WrongType),
        (0, pk.InvalidArgument),
        (10**400, pk.InvalidArgument),
    ],
)
def test_cost_tokens_that_are_no_number_above_0_are_refused(tokens, error):
    with pytest.raises(error, match="cost_tokens must be a"):
        pk.KVCache(pk.KVSpec(1, 1, 4), pk.Blocks(8), cost_tokens=tokens)

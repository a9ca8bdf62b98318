"""What a block is worth: lines through measurements, and whether to load or to compute."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pagedkv.cache.cost_model import FRESH_S, CostModel, Line
from pagedkv.errors import InvalidArgument, WrongType

BLOCK_SIZE, BLOCK_BYTES, COST_TOKENS = 16, 1000, 30000.0
DISK = 2


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def model(prefill: float | None = 1000.0, clock: Clock | None = None) -> CostModel:
    return CostModel(BLOCK_SIZE, BLOCK_BYTES, COST_TOKENS, prefill, clock or Clock())


def loads(costs: CostModel, bytes_per_s: float, latency_s: float = 0.0, tier: int = DISK) -> CostModel:
    """Loads of several sizes, each on the line."""
    for blocks in (1, 3, 10, 40):
        costs.observe_load(tier, blocks * BLOCK_BYTES, latency_s + blocks * BLOCK_BYTES / bytes_per_s)
    return costs


def compute_s(first_block: int, num_blocks: int, prefill: float = 1000.0) -> float:
    """Seconds to compute blocks one token at a time."""
    tokens = range(first_block * BLOCK_SIZE, (first_block + num_blocks) * BLOCK_SIZE)
    return sum(1 + (token + 0.5) / COST_TOKENS for token in tokens) / prefill


def test_a_line_is_found_again() -> None:
    line = Line()
    assert line.fit() is None
    for amount in (1, 5, 2, 8):
        line.add(amount, 0.25 + 0.5 * amount)
    assert line.fit() == pytest.approx((0.25, 0.5))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([(4, 2.0)], (0.0, 0.5)),
        ([(4, 2.0), (4, 2.0)], (0.0, 0.5)),
        ([(1, 4.0), (4, 1.0)], None),  # larger is faster: a rate alone
        ([(1, 0.1), (4, 4.0)], None),  # a latency below 0
    ],
)
def test_what_makes_no_line_is_a_rate_without_a_latency(seen: list[tuple[float, float]], expected: Any) -> None:
    line = Line()
    for amount, seconds in seen:
        line.add(amount, seconds)
    latency, slope = line.fit() or (-1, -1)
    assert latency == 0
    assert slope > 0
    assert expected is None or (latency, slope) == pytest.approx(expected)


def test_a_line_follows_a_device_that_grows_slow() -> None:
    line = Line()
    for amount in range(1, 100):
        line.add(amount, 0.001 * amount)
    for amount in range(1, 100):
        line.add(amount, 0.1 * amount)
    _, slope = line.fit() or (0, 0)
    assert slope == pytest.approx(0.1, rel=0.01)


def test_while_a_rate_is_unknown_everything_is_worth_it() -> None:
    tiers = np.full(5, DISK, np.uint8)
    slow = 1.0
    for costs in (model(None), loads(model(None), slow), model(), loads(model(), slow, tier=1)):
        assert costs.worth_loading(tiers, DISK) == 5
        assert costs.worth_writing(0, 5, DISK)


@pytest.mark.parametrize(("bytes_per_s", "worth"), [(1e6, 8), (1.0, 0)])
def test_a_fast_disk_is_read_and_a_slow_one_is_not(bytes_per_s: float, worth: int) -> None:
    costs = loads(model(), bytes_per_s)
    assert costs.worth_loading(np.full(8, DISK, np.uint8), DISK) == worth
    assert costs.worth_writing(0, 8, DISK) == (worth > 0)


def test_what_lies_elsewhere_is_always_worth_it_and_the_cold_tail_is_judged_alone() -> None:
    costs = loads(model(), 1.0)
    assert costs.worth_loading(np.array([0, 0, 1, 1, DISK, DISK], np.uint8), DISK) == 4
    assert costs.worth_loading(np.array([0, 0, 1], np.uint8), DISK) == 3
    assert costs.worth_loading(np.array([], np.uint8), DISK) == 0


def test_hotter_blocks_behind_cold_ones_count_for_them() -> None:
    load = compute_s(0, 1) * 1.5  # a little slower than computing
    costs = loads(model(), BLOCK_BYTES / load)
    assert costs.worth_loading(np.array([DISK, DISK, 0, 0], np.uint8), DISK) == 4
    assert costs.worth_loading(np.array([DISK, DISK, DISK, 0], np.uint8), DISK) == 0


def test_a_latency_is_paid_once() -> None:
    latency = compute_s(0, 4)
    costs = loads(model(), 1e9, latency)
    assert costs.worth_loading(np.full(3, DISK, np.uint8), DISK) == 0
    assert costs.worth_loading(np.full(5, DISK, np.uint8), DISK) == 5
    assert costs.worth_loading(np.array([DISK, 0, 0, 0, 0, DISK], np.uint8), DISK) == 6


def test_deep_blocks_are_worth_more() -> None:
    depth = 10_000
    load = (compute_s(0, 1) + compute_s(depth, 1)) / 2
    costs = loads(model(), BLOCK_BYTES / load)
    assert not costs.worth_writing(0, 4, DISK)
    assert costs.worth_writing(depth, 4, DISK)
    tiers = np.zeros(depth + 4, np.uint8)
    tiers[depth:] = DISK
    assert costs.worth_loading(tiers, DISK) == depth + 4


@pytest.mark.parametrize("seed", range(60))
def test_of_all_prefixes_the_one_that_saves_most_time_is_chosen(seed: int) -> None:
    choose = random.Random(seed)
    latency, load = choose.choice([0, compute_s(0, 3)]), compute_s(choose.randrange(3000), 1)
    costs = loads(model(), BLOCK_BYTES / load, latency)
    tiers = np.array(choose.choices([0, 1, DISK, DISK, DISK], k=choose.randint(1, 12)), np.uint8)
    tiers = np.concatenate((np.zeros(choose.randrange(2000), np.uint8), tiers))

    def saved(count: int) -> float:
        cold = int(np.count_nonzero(tiers[:count] == DISK))
        return compute_s(0, count) - cold * load - (latency if cold else 0)

    worth = costs.worth_loading(tiers, DISK)
    best = max(saved(count) for count in range(len(tiers) - 12 if len(tiers) > 12 else 0, len(tiers) + 1))
    assert saved(worth) == pytest.approx(best, abs=1e-7), f"seed {seed}: {worth} of {tiers.tolist()[-12:]}"
    assert worth == len(tiers) or tiers[worth] == DISK, f"seed {seed}: it cut before a block that costs nothing"
    assert worth == 0 or worth == len(tiers) or tiers[worth - 1] != DISK, f"seed {seed}: it cut a run in two"


def test_a_rate_not_seen_for_long_is_not_believed() -> None:
    clock = Clock()
    costs = loads(model(clock=clock), 1.0)
    tiers = np.full(4, DISK, np.uint8)
    clock.now += FRESH_S - 1
    assert costs.worth_loading(tiers, DISK) == 0
    clock.now += 2
    assert costs.worth_loading(tiers, DISK) == 4
    assert costs.worth_writing(0, 4, DISK)


def test_the_callers_rate_is_learned_from_what_is_observed() -> None:
    costs = model(None)
    assert costs.rates() == {}
    costs.observe_prefill(512, compute_s(0, 32, 800))
    costs.observe_prefill(512, compute_s(100, 32, 800), 1600)
    costs.observe_prefill(np.array([64, 16]), compute_s(10, 4, 800) + compute_s(3, 1, 800), np.array([160, 48]))
    assert costs.rates()["prefill_tokens_per_s"] == pytest.approx(800)
    for _ in range(200):
        costs.observe_prefill(512, compute_s(0, 32, 100))
    assert costs.rates()["prefill_tokens_per_s"] == pytest.approx(100)


def test_rates_are_told_in_units_of_the_world() -> None:
    rates = loads(model(), 5e6, 0.003).rates()
    assert rates == pytest.approx(
        {"prefill_tokens_per_s": 1000.0, "load_bytes_per_s_2": 5e6, "load_latency_s_2": 0.003}
    )


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 1.0), (100, 0.0), (100, -1.0)])
def test_a_load_that_says_nothing_is_ignored(num_bytes: int, seconds: float) -> None:
    costs = model()
    costs.observe_load(DISK, num_bytes, seconds)
    assert set(costs.rates()) == {"prefill_tokens_per_s"}


@pytest.mark.parametrize(
    "arguments", [(0, 1.0), (-1, 1.0), (1, 0), (1, -1.0), (1, float("nan")), (1, float("inf")), ("1", 1.0), (1.5, 1.0),
                  (1, None), (True, 1.0), (1, True)]
)  # fmt: skip
def test_a_prefill_that_cannot_be_is_refused(arguments: Any) -> None:
    costs = model(None)
    with pytest.raises((InvalidArgument, WrongType)):
        costs.observe_prefill(*arguments)
    assert costs.rates() == {}


@pytest.mark.parametrize("rate", [0, -5, float("inf"), float("nan"), "fast", True])
def test_a_rate_that_cannot_be_is_refused(rate: Any) -> None:
    with pytest.raises((InvalidArgument, WrongType)):
        model(rate)

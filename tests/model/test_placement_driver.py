"""Long random histories of the real placement beside the oracle.

The driver checks content at every read on every tier.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.driver import Driver
from tests.model.pair import TIERS
from tests.slices import one_in

OPS_PER_SEED = 250
COUNTERS = ("adopted", "failed_promotions", "failed_demotions", "blocked_matches")


def drive(seed: int, deep_every: int = 8) -> Driver:
    driver = Driver(seed)
    try:
        driver.run(OPS_PER_SEED, deep_every=deep_every)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return driver


@pytest.mark.parametrize("first", one_in(2, range(0, 200, 20)))
def test_fifty_thousand_operations_agree_with_the_oracle(first: int) -> None:
    for seed in range(first, first + 20):
        drive(seed)


@pytest.mark.parametrize("first", one_in(2, range(5000, 5200, 20)))
def test_fifty_thousand_operations_agree_with_all_books_recounted_after_each(first: int) -> None:
    for seed in range(first, first + 20):
        drive(seed, deep_every=1)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1_000_000, 1_008_000, 400))
def test_two_million_operations_agree_with_the_oracle(first: int) -> None:
    for seed in range(first, first + 400):
        drive(seed)


def test_the_driver_reaches_every_kind_of_event() -> None:
    """Without this, a driver that never moved anything would agree with everything."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        driver = drive(seed)
        stats = driver.pair.core.stats()
        for kind in ("hit_blocks", "promoted", "demoted", "dropped", "trimmed"):
            seen.update({f"{kind} {tier}": count for tier, count in stats[kind].items()})
        seen.update({kind: stats[kind] for kind in COUNTERS})
        seen.update({"grafted": driver.grafted, "claims read": stats["promoted"].get("remote", 0)})
        seen.update({"reads": driver.pair.reads, "pins": driver.pins[True], "pins refused": driver.pins[False]})
    never = {"promoted device", "demoted disk", "demoted remote"}
    expected = {f"{kind} {tier}" for kind in ("hit_blocks", "dropped", "trimmed") for tier in TIERS}
    expected.discard("trimmed remote")  # a claim is the only copy
    expected |= {f"{kind} {tier}" for kind in ("promoted", "demoted") for tier in TIERS} - never
    expected |= {*COUNTERS, "pins", "pins refused", "grafted", "claims read"}
    assert {kind for kind in expected if seen[kind] < 3} == set()
    assert seen["reads"] > 10_000

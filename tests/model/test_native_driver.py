"""The native driver can be trusted.

A seed gives one history, and the driver notices a single wrong slot.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.model.histories import drive, driver_of, events

pytestmark = pytest.mark.slow


def test_a_seed_always_gives_the_same_history(native_driver: ModuleType) -> None:
    for seed in range(20):
        first, second = drive(native_driver, seed, 500), drive(native_driver, seed, 500)
        assert events(first) == events(second)
        assert first.reads == second.reads


def test_the_driver_notices_a_single_wrong_slot(native_driver: ModuleType) -> None:
    spoiled = 0
    for seed in range(20):
        driver = driver_of(native_driver, seed)
        driver.run(100)
        if driver.spoil():
            spoiled += 1
            with pytest.raises(AssertionError, match=f"seed {seed}, operation 100 .* holds something else"):
                driver.check()
    assert spoiled > 5

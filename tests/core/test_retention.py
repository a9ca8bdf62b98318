"""What stays longer and what goes first.

Priority, time to live, pins and quotas; dropping a namespace, and clearing all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv.core import DEFAULT_PRIORITY, Placement
from pagedkv.errors import InvalidArgument, PinBudgetExceeded, StaleHandle, WrongType
from tests.core.helpers import (
    cache,
    cached_prefixes,
    insert,
    kept,
    nothing_changes,
    remember,
    single,
    sound,
)


def retain(placement: Placement, tokens: list[int], priority: int = DEFAULT_PRIORITY, expires_ns: int = 0) -> None:
    """Cache `tokens` with this retention."""
    owner = remember(placement, tokens)
    placement.set_retention(owner, priority, expires_ns)
    placement.release(owner)


# ---- priority


def test_a_lower_priority_goes_first_however_recent() -> None:
    tree, _, placement = single(1, 6)
    retain(placement, [1, 2], 90)
    cache(placement, [3, 4])
    retain(placement, [5, 6], 10)
    gone = []
    for missing in (2, 4, 6):
        assert placement.reserve(missing) == 0
        gone.append(cached_prefixes(tree))
        sound(placement)
    assert gone == [{(1,), (1, 2), (3,), (3, 4)}, {(1,), (1, 2)}, set()]


@pytest.mark.parametrize("priority", [0, 1, 50, 99, 100])
def test_every_priority_from_0_to_100_is_kept(priority: int) -> None:
    _, _, placement = single()
    retain(placement, [1], priority)
    assert {node["priority"] for node in placement.dump().values()} == {priority}
    sound(placement)


def test_a_prefix_that_others_use_keeps_the_higher_priority() -> None:
    _, _, placement = single()
    retain(placement, [1, 2, 3], 80)
    retain(placement, [1, 2, 9], 20)
    priorities = {node["depth"]: node["priority"] for node in placement.dump().values() if node["tokens"] != (9,)}
    assert priorities == {0: 80, 2: 80}
    retain(placement, [1, 2, 7], 95)
    assert next(node["priority"] for node in placement.dump().values() if node["depth"] == 0) == 95
    sound(placement)


def test_a_parent_never_has_less_than_what_hangs_on_it() -> None:
    _, _, placement = single()
    cache(placement, [1, 2, 3, 4])
    retain(placement, [1, 2, 3, 4, 5, 6], 70)
    retain(placement, [1, 2], 5)
    nodes = placement.dump()
    for node in nodes.values():
        if node["parent"] in nodes:
            assert nodes[node["parent"]]["priority"] >= node["priority"]
    sound(placement)


def test_blocks_inserted_later_have_their_owners_priority() -> None:
    _, _, placement = single(1, 4)
    owner, _ = placement.acquire([])
    placement.set_retention(owner, 90)
    insert(placement, owner, [1, 2])
    placement.release(owner)
    cache(placement, [3, 4])
    assert placement.reserve(2) == 0
    assert kept(placement, [1, 2], [3, 4]) == [2, 0]
    sound(placement)


# ---- time to live


def test_what_has_expired_goes_first_even_with_the_highest_priority() -> None:
    _, _, placement = single(1, 4)
    retain(placement, [1, 2], 100, 500)
    cache(placement, [3, 4])
    assert placement.expire(499) == 0
    assert placement.expire(500) == 2
    assert placement.expire(501) == 0
    assert kept(placement, [1, 2]) == [2]  # expired is not gone
    assert placement.reserve(2) == 0
    assert kept(placement, [1, 2], [3, 4]) == [0, 2]
    assert placement.stats()["expired"] == 2
    sound(placement)


def test_a_time_to_live_of_zero_never_ends() -> None:
    _, _, placement = single()
    retain(placement, [1], 50, 0)
    assert placement.expire(2**63 - 1) == 0


def test_the_time_to_live_may_be_prolonged() -> None:
    _, _, placement = single()
    retain(placement, [1, 2], 50, 100)
    retain(placement, [1, 2], 50, 300)
    assert placement.expire(200) == 0
    assert placement.expire(300) == 2
    sound(placement)


def test_a_hit_brings_expired_blocks_back() -> None:
    _, _, placement = single(1, 4)
    retain(placement, [1, 2], 50, 100)
    placement.expire(100)
    cache(placement, [3, 4])
    placement.release(placement.acquire([1, 2])[0])
    assert placement.reserve(2) == 0
    assert kept(placement, [1, 2], [3, 4]) == [2, 0]
    sound(placement)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_both_halves_of_a_run_that_was_split_expire(cut: int) -> None:
    _, _, placement = single()
    retain(placement, [1, 2, 3, 4], 80, 100)
    placement.release(placement.acquire([1, 2, 3, 4][:cut])[0])
    assert placement.expire(100) == 4
    sound(placement)


def test_what_is_left_of_a_run_whose_tail_was_evicted_expires() -> None:
    _, _, placement = single(1, 4)
    retain(placement, [1, 2, 3, 4], 80, 100)
    assert placement.reserve(1) == 0
    assert placement.expire(100) == 3
    sound(placement)


def test_runs_that_are_gone_do_not_expire() -> None:
    _, _, placement = single(1, 4)
    retain(placement, [1, 2], 80, 100)
    assert placement.reserve(4) == 0
    cache(placement, [5, 6])  # the ids of the nodes come back
    assert placement.expire(100) == 0
    sound(placement)


def test_many_times_to_live_end_in_their_order() -> None:
    _, _, placement = single(1, 64)
    for i in range(64):
        retain(placement, [i], 50, 10 + (i * 37) % 64)
    for now in range(10, 74):
        assert placement.expire(now) == 1
    sound(placement)


# ---- pins


def test_a_pin_counts_against_the_budget_until_its_owner_is_released() -> None:
    _, _, placement = single(pin_budget=3)
    first, second = remember(placement, [1, 2]), remember(placement, [3, 4])
    placement.pin(first)
    with nothing_changes(placement):
        placement.pin(first)  # twice is once
        with pytest.raises(PinBudgetExceeded, match="1 of the pin budget of 3"):
            placement.pin(second)
    assert placement.stats()["pinned_blocks"] == 2
    placement.release(first)
    assert placement.stats()["pinned_blocks"] == 0
    placement.pin(second)
    sound(placement)


def test_pinned_blocks_are_not_evicted() -> None:
    _, _, placement = single(1, 4, pin_budget=2)
    placement.pin(remember(placement, [1, 2]))
    assert placement.reserve(4) == 2
    assert kept(placement, [1, 2]) == [2]


def test_an_empty_path_can_be_pinned_without_a_budget() -> None:
    _, _, placement = single()
    owner, _ = placement.acquire([])
    placement.pin(owner)
    placement.release(owner)
    assert placement.stats()["pinned_blocks"] == 0


def test_a_pinned_owner_that_grows_gives_back_what_it_was_counted_for() -> None:
    _, _, placement = single(pin_budget=4)
    owner = remember(placement, [1, 2])
    placement.pin(owner)
    insert(placement, owner, [3, 4, 5])
    assert placement.stats()["pinned_blocks"] == 2
    with nothing_changes(placement), pytest.raises(PinBudgetExceeded):
        placement.pin(owner)
    placement.release(owner)
    assert placement.stats()["pinned_blocks"] == 0
    sound(placement)


# ---- bad input


@pytest.mark.parametrize("priority", [-1, 101, 2**40, 50.0, float("nan"), None, "50", True])
def test_a_priority_outside_0_to_100_changes_nothing(priority: Any) -> None:
    _, _, placement = single()
    owner = remember(placement, [1])
    with nothing_changes(placement), pytest.raises((InvalidArgument, WrongType)):
        placement.set_retention(owner, priority)


@pytest.mark.parametrize("time_ns", [-1, 2**63, 1.0, float("nan"), None, "now"])
def test_an_impossible_time_changes_nothing(time_ns: Any) -> None:
    _, _, placement = single()
    owner = remember(placement, [1])
    with nothing_changes(placement):
        with pytest.raises((InvalidArgument, WrongType)):
            placement.set_retention(owner, 50, time_ns)
        with pytest.raises((InvalidArgument, WrongType)):
            placement.expire(time_ns)


@pytest.mark.parametrize("blocks", [-1, 2**31, 1.0, "1", True, np.float64("nan")])
def test_an_impossible_quota_changes_nothing(blocks: Any) -> None:
    _, _, placement = single()
    with nothing_changes(placement), pytest.raises((InvalidArgument, WrongType)):
        placement.set_quota(0, blocks)


@pytest.mark.parametrize("namespace", [7, -1, None, b"", 0.0])
def test_a_namespace_that_is_none_cannot_be_limited_or_dropped(namespace: Any) -> None:
    _, _, placement = single()
    with nothing_changes(placement):
        for call in (placement.drop_namespace, lambda ns: placement.set_quota(ns, 1)):
            with pytest.raises((InvalidArgument, WrongType)):
                call(namespace)


def test_a_released_owner_cannot_be_pinned_or_retained() -> None:
    _, _, placement = single(pin_budget=5)
    owner = remember(placement, [1])
    placement.release(owner)
    with nothing_changes(placement):
        with pytest.raises(StaleHandle):
            placement.pin(owner)
        with pytest.raises(StaleHandle):
            placement.set_retention(owner, 5)

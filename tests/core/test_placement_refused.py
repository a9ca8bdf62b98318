"""Placement: every refused call says why and changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv.core import BlockPool, Placement, RadixTree
from pagedkv.errors import DoubleRelease, InvalidArgument, StaleHandle, WrongType
from tests.core.helpers import (
    DAMAGED_IDS,
    TOO_LARGE,
    cache,
    kind,
    nothing_changes,
    owner_calls,
    remember,
    single,
)

STALE = [-1, 99, 2**31, 2**40, 2**63 - 1, 2**80]


@pytest.mark.parametrize("owner", STALE)
def test_an_owner_that_never_existed_changes_nothing(owner: int) -> None:
    _, pool, placement = single()
    cache(placement, [1, 2])
    blocks = pool.alloc(1)
    with nothing_changes(placement):
        for call in owner_calls(placement, blocks):
            with pytest.raises(StaleHandle):
                call(owner)
        with pytest.raises(DoubleRelease):
            placement.release(owner)


def test_a_handle_with_a_bit_too_many_names_no_owner() -> None:
    _, _, placement = single()
    owner, _ = placement.acquire([])
    with nothing_changes(placement), pytest.raises(DoubleRelease):
        placement.release(owner | 1 << 31)


@pytest.mark.parametrize("owner", [None, "0", 0.0, float("nan"), [0], True, b"\0"])
def test_an_owner_that_is_no_integer_changes_nothing(owner: Any) -> None:
    _, pool, placement = single()
    blocks = pool.alloc(1)
    with nothing_changes(placement):
        for call in [*owner_calls(placement, blocks), placement.release]:
            with pytest.raises(WrongType):
                call(owner)


@pytest.mark.parametrize("tokens", [*DAMAGED_IDS, *TOO_LARGE], ids=kind)
def test_tokens_that_are_no_row_of_int32_change_nothing(tokens: Any) -> None:
    _, pool, placement = single()
    owner = remember(placement, [1, 2])
    blocks = pool.alloc(1)
    with nothing_changes(placement):
        for call in (
            placement.match,
            placement.acquire,
            lambda tokens: placement.partial(owner, tokens),
            lambda tokens: placement.insert(owner, tokens, blocks),
        ):
            with pytest.raises((WrongType, InvalidArgument)):
                call(tokens)


@pytest.mark.parametrize("n", [-1, 2**31, 1.0, float("nan"), None, "1", True])
def test_an_impossible_number_of_blocks_changes_nothing(n: Any) -> None:
    _, _, placement = single()
    with nothing_changes(placement):
        for call in (placement.reserve, placement.allocate):
            with pytest.raises((InvalidArgument, WrongType)):
                call(n)
        if n is not None:
            with pytest.raises((InvalidArgument, WrongType)):
                placement.acquire([1], 0, n)


@pytest.mark.parametrize("tier", [-1, 1, 9, 0.0])
def test_a_tier_that_is_not_there_is_refused(tier: Any) -> None:
    _, _, placement = single()
    with nothing_changes(placement):
        for call in (lambda: placement.reserve(1, tier), lambda: placement.set_quota(0, 1, tier)):
            with pytest.raises((InvalidArgument, WrongType)):
                call()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"policy": "fifo"}, InvalidArgument),
        ({"policy": None}, WrongType),
        ({"policy": "arc", "tree_keep_chain": False}, InvalidArgument),
        ({"policy": "s3fifo", "tree_keep_chain": False}, InvalidArgument),
        ({"policy": "hazard", "tree_keep_chain": False}, InvalidArgument),
        ({"policy": "hazard", "history_blocks": 0}, InvalidArgument),
        ({"policy": "lru", "history_blocks": 100}, InvalidArgument),
        ({"demotion": "newest_first"}, InvalidArgument),
        ({"inclusive": ()}, InvalidArgument),
        ({"inclusive": (True, True)}, InvalidArgument),
        ({"inclusive": 1}, WrongType),
        ({"pin_budget": -1}, InvalidArgument),
        ({"pin_budget": 2.0}, WrongType),
        ({"event_words": -1}, InvalidArgument),
        ({"event_words": 1.5}, WrongType),
    ],
)
def test_a_placement_with_impossible_options_is_refused(options: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        single(**options)


def test_a_placement_takes_only_an_empty_tree_and_unused_pools_of_its_own() -> None:
    tree, pool, _ = single()
    free, used, full = BlockPool(2), BlockPool(2), RadixTree(1)
    used.alloc(1)
    full.insert([1], np.zeros(1, np.int32))
    with nothing_changes(free, used, full):
        for arguments in ((tree, [free]), (full, [free]), (RadixTree(1), [pool]), (RadixTree(1), [used]),
                          (RadixTree(1), [free, free]), (RadixTree(1, 2), [free, free])):  # fmt: skip
            with pytest.raises(InvalidArgument):
                Placement(*arguments)
        for wrong in ((None, [free]), (RadixTree(1), []), (RadixTree(1), [None]), (RadixTree(1), 5),
                      (RadixTree(1, 2), [free, 3])):  # fmt: skip
            with pytest.raises(WrongType):
                Placement(*wrong)
    assert len(Placement(RadixTree(1), [free]).pools) == 1
    used.free([0])
    Placement(RadixTree(1), [used])


def test_a_released_owner_is_stale_even_when_its_slot_is_used_again() -> None:
    _, pool, placement = single()
    blocks = pool.alloc(1)
    old, _ = placement.acquire([])
    placement.release(old)
    new, _ = placement.acquire([])
    assert new != old
    with nothing_changes(placement):
        for call in owner_calls(placement, blocks):
            with pytest.raises(StaleHandle):
                call(old)
        with pytest.raises(DoubleRelease):
            placement.release(old)
    placement.release(new)


def test_blocks_that_cannot_be_inserted_change_nothing() -> None:
    _, pool, placement = single()
    owner = remember(placement, [1, 2])
    mine = pool.alloc(2).tolist()
    pool.free(pool.alloc(1))
    for ids in ([mine[0], 0], [mine[0], mine[0]], [mine[0], 4], [mine[0], -1], [mine[0], 99], [2**31 - 1, mine[0]]):
        blocks = np.array(ids, np.int32)
        with nothing_changes(placement), pytest.raises(InvalidArgument):
            placement.insert(owner, [5, 6], blocks)
        assert blocks.tolist() == ids
    strided = np.array([mine[0], 0, mine[1], 0], np.int32)[::2]
    read_only = np.array(mine, np.int32)
    read_only.flags.writeable = False
    with nothing_changes(placement):
        for wrong in (mine, tuple(mine), np.array(mine), np.array(mine, ">i4"), strided, read_only, None):
            with pytest.raises(WrongType):
                placement.insert(owner, [5, 6], wrong)  # type: ignore[arg-type]
        for tokens in ([], [5], [5, 6, 7]):
            with pytest.raises(InvalidArgument):
                placement.insert(owner, tokens, np.array(mine, np.int32))

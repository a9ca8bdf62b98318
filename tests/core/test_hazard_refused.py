"""Nonsensical arguments to the policy ``hazard``.

It refuses them and changes nothing, or counts and clamps them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.core import Placement, RadixTree
from pagedkv.errors import InvalidArgument, StaleHandle, WrongType
from tests.core.hazard_requests import NS, HazardCache, rising
from tests.core.helpers import nothing_changes, single

INF, NAN = float("inf"), float("nan")


def busy() -> HazardCache:
    """Some runs, one of them in use, and tables."""
    cache = HazardCache(20, study=64)
    cache.request(range(5), 1)
    cache.request(range(7), 3)
    cache.arrive(range(3))
    return cache


def seen(cache: HazardCache) -> Any:
    tables = cache.hazard.tables()
    return cache.hazard.stats(), None if tables is None else tables.tobytes()


def refused(error: type[Exception] | tuple[type[Exception], ...], call: Callable[[HazardCache], object]) -> None:
    cache = busy()
    before = seen(cache)
    with nothing_changes(cache.placement), pytest.raises(error):
        call(cache)
    assert seen(cache) == before


@pytest.mark.parametrize("blocks", [0, -1, 2**41, 1.0, "many", True])
def test_a_history_of_an_impossible_size_is_refused(blocks: Any) -> None:
    with pytest.raises((InvalidArgument, WrongType)):
        single(policy="hazard", history_blocks=blocks)


def test_a_history_without_the_policy_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="for policies that remember evicted blocks, not 'lru'"):
        single(policy="lru", history_blocks=100)


def test_the_policy_needs_the_chain_and_others_have_no_face_of_it() -> None:
    with pytest.raises(InvalidArgument, match="keep_chain=True"):
        single(policy="hazard", tree_keep_chain=False)
    _, _, placement = single(policy="lru")
    assert placement.hazard is None
    face = type(HazardCache(4).hazard)
    with pytest.raises(InvalidArgument, match="policy 'lru', not 'hazard'"):
        face(placement)


@pytest.mark.parametrize("now", [-1, 2**63, 1.5, None, "0", True])
def test_a_time_that_is_none_is_refused(now: Any) -> None:
    refused((InvalidArgument, WrongType), lambda cache: cache.hazard.tick(now))


def test_a_clock_that_steps_back_is_counted_and_stands_still() -> None:
    cache, other = HazardCache(20), HazardCache(20)
    cache.request([1, 2], 100)
    other.request([1, 2], 100)
    for now in (99, 50, 100, 0):
        cache.hazard.tick(now * NS)
    assert cache.hazard.stats()["clock_steps_back"] == 3
    node = next(iter(cache.placement.dump()))
    assert cache.hazard.chance(node, 60) == other.hazard.chance(next(iter(other.placement.dump())), 60)


def test_equal_times_and_the_end_of_time_do_no_harm() -> None:
    cache = HazardCache(8, study=64)
    for now in (0, 0, 0, 5, 5, (2**63 - 1) // NS, (2**63 - 1) // NS):
        for first in (0, 100, 200):
            cache.request(range(first, first + 4), now)
    cache.placement.check_integrity()
    tables = cache.hazard.tables()
    assert tables is not None
    assert np.isfinite(tables).all()


@pytest.mark.parametrize("output", [-1, 2**63, 1.0, "7", True])
def test_an_output_that_is_no_number_of_tokens_is_refused(output: Any) -> None:
    refused((InvalidArgument, WrongType), lambda cache: cache.hazard.report(0, output))
    cache = busy()
    owner, _ = cache.arrive(range(7))
    with pytest.raises((InvalidArgument, WrongType)):
        cache.hazard.depart(owner, output_tokens=output)
    assert cache.leave(owner, later=True) >= 0


def test_an_absurd_output_is_clamped_and_counted_and_a_missing_one_is_none() -> None:
    cache = HazardCache(20)
    cache.request([1, 2], 0, output_tokens=2**62)
    cache.request([1, 2], 1, output_tokens=None)
    cache.request([1, 2], 2, output_tokens=2**24)
    assert cache.hazard.stats()["outputs_clamped"] == 2  # once for each of the two runs


def test_a_visit_is_reported_once_and_only_when_it_is_over() -> None:
    cache = HazardCache(20)
    owner, _ = cache.arrive([1, 2])
    with pytest.raises(StaleHandle, match="was reported or given up, or never existed"):
        cache.hazard.report(0, 5)  # the handle that this visit will have
    visit = cache.leave(owner, later=True)
    cache.hazard.report(visit, 5)
    for stale in (visit, -1, 2**62, visit + 1):
        with pytest.raises(StaleHandle):
            cache.hazard.report(stale, 5)
    assert cache.leave(cache.arrive([1, 2])[0]) == -1


def test_an_owner_departs_once_and_not_after_its_release() -> None:
    cache = HazardCache(20)
    owner, _ = cache.arrive([1, 2])
    assert cache.hazard.depart(owner, later=True) >= 0
    assert cache.hazard.depart(owner, later=True) == -1
    cache.placement.release(owner)
    before = seen(cache)
    for stale in (owner, -1, 2**62):
        with pytest.raises(StaleHandle, match="was released, or never existed"):
            cache.hazard.depart(stale)
    assert seen(cache) == before


def is_given_up(cache: HazardCache, visit: int) -> bool:
    try:
        cache.hazard.report(visit, 5)
    except StaleHandle:
        return True
    return False


def test_outputs_that_are_never_told_do_not_stop_the_policy() -> None:
    cache = HazardCache(4)
    visits = [cache.leave(cache.arrive([i])[0], later=True) for i in range(66_000)]
    assert cache.hazard.stats()["visits_lost"] == 0
    cache.hazard.report(visits[-1], 5)
    assert any(is_given_up(cache, visit) for visit in visits[:-1])  # 65,536 are waited for


def shape(tables: Any) -> Any:
    return tables[:, :-1].copy()


DAMAGES: list[tuple[Callable[[Any], Any], type[Exception]]] = [
    (lambda tables: None, WrongType),
    (lambda tables: tables.tolist(), WrongType),
    (lambda tables: tables.astype(np.float64), WrongType),
    (lambda tables: tables.astype(">f4"), WrongType),
    (lambda tables: tables.view(np.int32), WrongType),
    (shape, InvalidArgument),
    (lambda tables: tables[0], InvalidArgument),
    (lambda tables: np.concatenate((tables, tables)), InvalidArgument),
    *((lambda tables, what=what: put(tables, 0, what), InvalidArgument) for what in (NAN, INF, -INF, 101.0, -1e30)),
    *((lambda tables, what=what: put(tables, 1, what), InvalidArgument) for what in (NAN, INF, 0.0, -1.0)),
]


def put(tables: Any, row: int, value: float) -> Any:
    tables[row, 17] = value
    return tables


@pytest.mark.parametrize("damage", range(len(DAMAGES)))
def test_damaged_tables_are_refused(damage: int) -> None:
    change, error = DAMAGES[damage]
    refused(error, lambda cache: cache.hazard.load_tables(change(cache.hazard.tables())))


def test_tables_go_on_where_they_were_taken_and_need_not_lie_in_one_piece() -> None:
    cache, other = busy(), HazardCache(20)
    tables = cache.hazard.tables()
    assert tables is not None
    assert other.hazard.tables() is None
    other.hazard.load_tables(np.asfortranarray(tables), 3)
    assert other.hazard.tables() is None
    assert (other.hazard.tables(3) == tables).all()


@pytest.mark.parametrize("kind", [-1, 8, 2**40, 1.0, None, True])
def test_a_kind_that_is_not_there_is_refused(kind: Any) -> None:
    def root(cache: HazardCache) -> int:
        return cache.root

    for call in (
        lambda cache: cache.hazard.set_kind(root(cache), kind),
        lambda cache: cache.hazard.tables(kind),
        lambda cache: cache.hazard.load_tables(cache.hazard.tables(), kind),
    ):
        refused((InvalidArgument, WrongType), call)


def test_a_kind_for_a_namespace_that_nobody_has_used_yet() -> None:
    cache = HazardCache(20, study=64)
    roots = [cache.tree.namespace(b"%d" % i) for i in range(3000)]
    for i, root in enumerate(roots):
        cache.hazard.set_kind(root, i % 8)
    for now in (0, 10):
        cache.hazard.tick(now * NS)
        cache.leave(cache.arrive([1], roots[2998])[0])
    assert [cache.hazard.tables(kind) is not None for kind in range(8)] == [kind == 2998 % 8 for kind in range(8)]
    with pytest.raises((InvalidArgument, WrongType)):
        cache.hazard.set_kind(2**30, 1)


@pytest.mark.parametrize("name", ["slack", "stake"])
@pytest.mark.parametrize("value", [NAN, -0.1, -INF, None, "0", True])
def test_a_bound_that_is_none_is_refused(name: str, value: Any) -> None:
    refused((InvalidArgument, WrongType), lambda cache: cache.hazard.set_bound(**{name: value}))


@pytest.mark.parametrize("window", [0, -5, 2**41, 100.0, None])
def test_a_window_of_no_requests_is_refused(window: Any) -> None:
    refused((InvalidArgument, WrongType), lambda cache: cache.hazard.set_bound(window=window))


@pytest.mark.parametrize("huge", [INF, 1e300, 10**400])
def test_a_bound_beyond_all_bounds_is_none(huge: Any) -> None:
    cache = HazardCache(4)
    cache.hazard.set_bound(stake=huge)
    rising(cache)
    for token in range(12):
        cache.request([token], token)
    assert cache.hazard.stats()["held_back"] == 0
    cache.hazard.set_bound(slack=huge)
    cache.request([1], 50)


@pytest.mark.parametrize("seconds", [-1, NAN, None, "1", True])
def test_a_horizon_that_is_none_is_refused(seconds: Any) -> None:
    for call in (lambda cache: cache.hazard.likely(seconds), lambda cache: cache.hazard.chance(2, seconds)):
        refused((InvalidArgument, WrongType), call)


def test_chances_lie_between_never_and_surely_and_grow_with_the_horizon() -> None:
    cache = HazardCache(20)
    cache.request(range(5), 0)
    node = next(iter(cache.placement.dump()))
    chances = [cache.hazard.chance(node, seconds) for seconds in (0, 1, 60, 3600, 10**400, INF)]
    assert chances[0] == 0
    assert chances == sorted(chances)
    assert chances[-1] <= 1
    with pytest.raises(StaleHandle):
        cache.hazard.chance(10_000, 1)


def test_nothing_is_known_of_what_no_request_has_let_go_of() -> None:
    cache = HazardCache(20)
    owner, _ = cache.placement.acquire([1, 2], request=False)
    cache.placement.insert(owner, np.array([1, 2], np.int32), cache.placement.allocate(2))
    node = next(iter(cache.placement.dump()))
    assert cache.hazard.chance(node, 60) is None
    assert cache.hazard.depart(owner, later=True) == -1


def test_the_likely_ones_are_those_below_with_the_best_chances() -> None:
    cache = HazardCache(4, 40)
    for i in range(6):
        cache.hazard.tick(i * 100 * NS)
        owner, _ = cache.placement.acquire(range(10 * i, 10 * i + 4))
        while cache.placement.reserve(4):
            transfers = np.unique(cache.placement.take_moves()["transfer"])
            cache.placement.complete(transfers, np.ones(len(transfers), np.bool_))
        tokens = np.arange(10 * i, 10 * i + 4, dtype=np.int32)
        cache.placement.insert(owner, tokens, cache.placement.allocate(4))
        cache.leave(owner)
    nodes, chances = cache.hazard.likely(300, most=3)
    assert [int(cache.placement.path_tokens(node)[0]) for node in nodes] == [40, 30, 20]
    assert (np.diff(chances) < 0).all()
    for most in (-1, 5000, 1.0):
        with pytest.raises((InvalidArgument, WrongType)):
            cache.hazard.likely(300, most)
    with pytest.raises(InvalidArgument):
        cache.hazard.likely(300, tier=2)


def test_a_request_without_blocks_is_nothing_to_remember() -> None:
    cache = HazardCache(4)
    for tokens in ([], []):
        assert cache.request(tokens, 0, later=True) == 0
    assert cache.hazard.stats()["remembered_blocks"] == 0


def test_a_request_of_many_times_the_cache_is_remembered_as_far_as_it_was_computed() -> None:
    cache = HazardCache(4)
    owner, hits = cache.placement.acquire(range(1000))
    assert hits == 0
    cache.placement.insert(owner, np.arange(4, dtype=np.int32), cache.placement.allocate(4))
    cache.leave(owner)
    stats = cache.hazard.stats()
    assert (stats["remembered_blocks"], stats["lacking"]) == (4, 0)
    assert cache.request(range(1000), 1) == 4


def test_a_placement_and_its_face_may_go_in_any_order() -> None:
    cache = HazardCache(4)
    cache.request([1, 2], 0)
    hazard = cache.hazard
    assert isinstance(hazard.placement, Placement)
    assert isinstance(hazard.placement.tree, RadixTree)
    del cache
    assert hazard.stats()["remembered_blocks"] == 2

"""Policies of other packages: registered by one call, refused where they cannot work."""

from __future__ import annotations

from importlib import metadata
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.core import POLICIES, BlockPool, BlockTable, Placement, RadixTree, Requests, policies, requests_of
from pagedkv.errors import InvalidArgument, LayoutMismatch, PagedKVError, WrongType
from tests.core.helpers import cache, cached_prefixes

SPEC = pk.KVSpec(1, 1, 16, "float32", 4)


def test_a_registered_policy_is_one_of_them(native_registry: ModuleType) -> None:
    native_registry.register("like_lru", 1)
    native_registry.register("like_lru", 1)  # once more changes nothing
    assert policies()[: len(POLICIES)] == POLICIES
    assert "like_lru" in policies()
    assert POLICIES == ("lru", "arc", "s3fifo", "hazard")
    tree = RadixTree(1)
    placement = Placement(tree, [BlockPool(2)], policy="like_lru")
    for token in (1, 2, 3):
        assert placement.reserve(1) == 0
        cache(placement, [token])
    assert cached_prefixes(tree) == {(2,), (3,)}
    with pk.KVCache(SPEC, pk.Blocks(8), policy="like_lru") as opened:
        assert opened.placement.policy == "like_lru"


WRONG: list[tuple[Any, dict[str, Any], type[PagedKVError], str]] = [
    ("newer", {"version": 99}, LayoutMismatch, "compiled for version 99 .* compile it against the installed pagedkv"),
    ("older", {"size": 8}, LayoutMismatch, r"\(8 bytes\)"),
    ("undecided", {"chooses": False}, InvalidArgument, "has no `victim`"),
    ("halfway", {"learns_by_half": True}, InvalidArgument, "all four or none"),
    ("lru", {}, InvalidArgument, "policy 'lru' is registered already: give this one another name"),
    ("", {}, InvalidArgument, "lower-case letters"),
    ("two words", {}, InvalidArgument, "lower-case letters"),
    ("Mine", {}, InvalidArgument, "lower-case letters"),
    (None, {}, WrongType, "by its name"),
]


@pytest.mark.parametrize(("name", "options", "kind", "says"), WRONG)
def test_a_policy_that_cannot_work_is_refused(
    native_registry: ModuleType, name: Any, options: dict[str, Any], kind: type[PagedKVError], says: str
) -> None:
    before = policies()
    with pytest.raises(kind, match=says):
        native_registry.register(name, 2, **options)
    assert policies() == before


def test_no_policy_at_all_is_refused(native_registry: ModuleType) -> None:
    with pytest.raises(WrongType):
        native_registry.register_nothing("none")


@pytest.mark.parametrize("policy", ["cost", "belady", "", "LRU"])
def test_an_unknown_policy_says_which_there_are(policy: str) -> None:
    with pytest.raises(InvalidArgument, match=r"one of lru, arc, s3fifo, hazard.*pagedkv\.policies"):
        pk.KVCache(SPEC, pk.Blocks(8), policy=policy)
    with pytest.raises(InvalidArgument, match="one of lru"):
        Placement(RadixTree(1), [BlockPool(1)], policy=policy)


@pytest.mark.parametrize("policy", [None, 1, b"lru", ["lru"]])
def test_a_policy_is_a_name(policy: Any) -> None:
    with pytest.raises(WrongType, match="policy must be a name"):
        pk.KVCache(SPEC, pk.Blocks(8), policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_only_policies_that_learn_of_requests_have_any(policy: str) -> None:
    table = BlockTable(Placement(RadixTree(1, keep_chain=True), [BlockPool(4)], policy=policy))
    learns = policy == "hazard"
    assert (requests_of(table) is not None) == learns
    if not learns:
        with pytest.raises(InvalidArgument, match=f"policy '{policy}' learns nothing of requests"):
            Requests(table)
    assert not any(hasattr(table, name) for name in ("arrive", "begin", "hint", "depart"))
    assert requests_of(BlockTable(BlockPool(4))) is None


@pytest.mark.parametrize("value", ["no_such_module_at_all", "math:no_such_name", "a malformed: value"])
def test_a_package_that_announces_a_policy_and_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    announced = EntryPoint("broken", value, "pagedkv.policies")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [announced])
    with pytest.raises(InvalidArgument, match=rf"entry point {value!r} of another package, which cannot be imported"):
        pk.KVCache(SPEC, pk.Blocks(8), policy="broken")


def test_a_policy_of_another_package_is_told_the_time_if_it_goes_by_a_clock(native_registry: ModuleType) -> None:
    native_registry.register("goes_by_a_clock", 2, ticks=True)
    native_registry.register("goes_by_none", 3)
    for policy, tells_time in (("goes_by_a_clock", True), ("goes_by_none", False)):
        before = native_registry.times_told()
        with pk.KVCache(SPEC, pk.Blocks(8), policy=policy) as cache, cache.sequence([1, 2, 3]) as seq:
            with cache.step([seq]) as step:
                step.mark_written(0)
            assert cache.placement.tells_time == tells_time
        assert (native_registry.times_told() > before) == tells_time


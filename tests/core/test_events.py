"""KV events: a subscriber that replays them knows what is cached where.

When too many are waiting, the cache loses the oldest first and counts them.
"""

from __future__ import annotations

from random import Random

import pytest

from pagedkv.core import KVEvent, Placement, Tier
from tests.core.helpers import cache, finish, make_room, remember, single, tiered


def test_events_are_off_unless_asked_for() -> None:
    _, _, placement = single()
    cache(placement, [1, 2])
    assert placement.drain_events() == []
    assert placement.stats()["events_lost"] == 0


def test_what_is_stored_is_told_with_its_tokens_and_its_parent() -> None:
    tree, _, placement = single(2, 16, event_words=4096)
    mine = tree.namespace(b"mine")
    owner = remember(placement, [1, 1, 2, 2], mine)
    first, second = placement.blocks_of(owner).tolist()
    assert placement.drain_events() == [
        KVEvent("stored", Tier.DEVICE, b"mine", (first, second), None, 0, (1, 1, 2, 2)),
    ]
    assert placement.drain_events() == []
    placement.release(owner)
    cache(placement, [1, 1, 3, 3], mine)
    (event,) = placement.drain_events()
    third = placement.match([1, 1, 3, 3], mine)[1].tolist()[1]
    assert event == KVEvent("stored", Tier.DEVICE, b"mine", (third,), first, 1, (3, 3))


def test_a_run_that_is_extended_tells_only_its_new_blocks() -> None:
    _, pool, placement = single(1, 16, event_words=4096)
    owner, _ = placement.acquire([])
    blocks = pool.alloc(3)
    for i in range(3):
        placement.insert(owner, [i], blocks[i : i + 1])
    events = placement.drain_events()
    assert [(event.block_ids, event.parent_block_id, event.depth) for event in events] == [
        ((int(blocks[0]),), None, 0),
        ((int(blocks[1]),), int(blocks[0]), 1),
        ((int(blocks[2]),), int(blocks[1]), 2),
    ]


def test_what_is_evicted_is_told_without_its_tokens() -> None:
    _, _, placement = single(1, 4, event_words=4096)
    cache(placement, [1, 2, 3])
    ids = placement.match([1, 2, 3])[1].tolist()
    placement.drain_events()
    placement.reserve(2)
    assert placement.drain_events() == [KVEvent("removed", Tier.DEVICE, b"", (ids[2],), ids[1], 2, ())]


def test_adopted_duplicates_are_no_news() -> None:
    _, pool, placement = single(1, 8, event_words=4096)
    cache(placement, [1, 2])
    placement.drain_events()
    owner, _ = placement.acquire([])
    placement.insert(owner, [1, 2], pool.alloc(2))
    assert placement.drain_events() == []


def test_a_demotion_is_told_when_it_has_succeeded_and_not_before() -> None:
    _, _, placement = tiered(1, (2, 4), event_words=4096)
    cache(placement, [1, 2])
    placement.drain_events()
    placement.reserve(2)
    assert placement.drain_events() == []
    finish(placement)
    assert [(event.kind, str(event.tier), len(event.block_ids)) for event in placement.drain_events()] == [
        ("stored", "host", 2),
        ("removed", "device", 2),
    ]


def test_clearing_is_told_and_a_dropped_namespace_has_no_name_any_more() -> None:
    tree, _, placement = single(1, 8, event_words=4096)
    cache(placement, [1])
    cache(placement, [2], tree.namespace(b"mine"))
    placement.drop_namespace(tree.namespace(b"mine"))
    placement.clear()
    events = placement.drain_events()
    assert [(event.kind, event.namespace) for event in events] == [
        ("stored", b""), ("stored", None), ("removed", None), ("removed", b""), ("cleared", None)]  # fmt: skip
    assert (events[-1].tier, events[-1].block_ids) == (None, ())


def test_a_full_ring_loses_the_oldest_and_counts_them() -> None:
    _, _, placement = single(1, 64, event_words=64)
    for token in range(40):
        cache(placement, [token])
    events = placement.drain_events()
    lost = placement.stats()["events_lost"]
    assert 0 < lost == 40 - len(events)
    assert [event.token_ids for event in events] == [(token,) for token in range(lost, 40)]
    cache(placement, [99])
    assert [event.token_ids for event in placement.drain_events()] == [(99,)]


def test_an_event_larger_than_the_ring_is_lost_and_counted() -> None:
    _, _, placement = single(1, 128, event_words=64)
    cache(placement, list(range(100)))
    cache(placement, [500])
    assert [event.token_ids for event in placement.drain_events()] == [(500,)]
    assert placement.stats()["events_lost"] == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("inclusive", [False, True])
def test_replaying_all_events_gives_what_is_cached(seed: int, inclusive: bool) -> None:
    rng = Random(seed)
    _, _, placement = tiered(2, (6, 8), inclusive=(False, inclusive), event_words=1 << 16, tree_max_run=3)
    known: dict[tuple[Tier | None, int], tuple[int, ...]] = {}
    for _ in range(150):
        tokens = [rng.randint(0, 1) for _ in range(2 * rng.randint(0, 5))]
        owner, matched = placement.acquire(tokens)
        if rng.random() < 0.5:
            make_room(placement, sum(placement.tiers_of(owner).tolist()))
            placement.promote(owner)
            finish(placement, ok=rng.random() < 0.8)
        matched = placement.settle(owner)
        if placement.reserve(len(tokens) // 2 - matched) == 0:
            blocks = placement.pools[0].alloc(len(tokens) // 2 - matched)  # type: ignore[union-attr]
            done = placement.insert(owner, tokens[2 * matched :], blocks)
            placement.pools[0].free(blocks[done:])  # type: ignore[union-attr]
        finish(placement, ok=rng.random() < 0.8)
        placement.release(owner)
        if rng.random() < 0.02:
            placement.clear()
        replay(known, placement.drain_events())
        assert known == cached(placement)
    placement.check_integrity()


def replay(known: dict[tuple[Tier | None, int], tuple[int, ...]], events: list[KVEvent]) -> None:
    """Block tokens by (tier, id), as a router would keep them."""
    for event in events:
        for i, block in enumerate(event.block_ids):
            if event.kind == "stored":
                assert (event.tier, block) not in known
                known[event.tier, block] = event.token_ids[2 * i : 2 * i + 2]
            else:
                del known[event.tier, block]
        assert event.kind != "cleared" or not known


def cached(placement: Placement) -> dict[tuple[str, int], tuple[int, ...]]:
    return {
        (Tier(tier), block): tuple(node["tokens"][2 * i : 2 * i + 2])
        for node in placement.dump().values()
        for tier, ids in node["ids"].items()
        for i, block in enumerate(ids)
    }

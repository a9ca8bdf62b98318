"""The hashes in events are those of plain Python, in random histories."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree, Tier
from tests.core.chains import NO_TOKEN, Known, chain, findable, followed, root_hash
from tests.core.helpers import cache, finish, make_room, remember, single, tiered

SEED = 12345
EVENTS = {"event_words": 1 << 18, "tree_keep_names": True, "tree_name_seed": SEED}


def test_hashes_are_of_the_namespaces_name_and_all_tokens() -> None:
    tree, _, placement = single(2, 16, **EVENTS)
    cache(placement, [1, -1, 2, 2, 3, 3], tree.namespace(b"mine"))
    (event,) = placement.drain_events()
    assert list(event.hashes) == chain([1, -1, 2, 2, 3, 3], 2, root_hash(b"mine", SEED), SEED)
    assert event.parent_hash is None
    cache(placement, [1, -1, 9, 9], tree.namespace(b"mine"))
    (other,) = placement.drain_events()
    assert other.parent_hash == event.hashes[0]
    cache(placement, [1, -1], tree.namespace(b"yours"))
    assert placement.drain_events()[0].hashes[0] != event.hashes[0]


def test_another_process_gives_the_same_hashes_whatever_it_did_before() -> None:
    told = []
    for others in ([], [b"a", b"b", b"mine"]):
        tree = RadixTree(1, seed=len(others), keep_names=True, name_seed=SEED)
        placement = Placement(tree, [BlockPool(8)], event_words=1024)
        for name in others:
            placement.drop_namespace(tree.namespace(name))
        cache(placement, [1, 2, 3], tree.namespace(b"mine"))
        told.append(placement.drain_events()[0].hashes)
    assert told[0] == told[1]


def test_a_tree_without_names_tells_no_hashes() -> None:
    _, _, placement = single(1, 8, event_words=1024)
    cache(placement, [1, 2])
    (event,) = placement.drain_events()
    assert (event.hashes, event.parent_hash) == ((), None)


def test_the_count_of_what_was_lost_comes_with_the_events_after_it() -> None:
    _, _, placement = single(1, 64, event_words=64, tree_keep_names=True)
    cache(placement, [0])
    assert placement.take_events()[1] == 0
    for token in range(1, 20):
        cache(placement, [token])
    events, lost = placement.take_events()
    assert lost == 19 - len(events) > 0
    assert placement.take_events() == ([], lost)


def test_a_snapshot_tells_all_and_drops_what_waits() -> None:
    tree, _, placement = single(1, 64, **EVENTS)
    for token in range(9):
        cache(placement, [7, token, token], tree.namespace(b"%d" % (token % 2)))
    waiting = followed({}, placement.drain_events(), 1)
    cache(placement, [50])
    told, lost = placement.snapshot_events()
    assert lost == 0
    assert len(followed({}, told, 1)) == len(waiting) + 1
    assert placement.drain_events() == []
    seen = set()
    for event in told:
        assert event.parent_hash is None or event.parent_hash in seen
        seen |= set(event.hashes)


def test_what_a_dropped_namespace_still_holds_is_told_as_removed_once() -> None:
    tree, _, placement = single(1, 8, **EVENTS)
    owner = remember(placement, [1, 2], tree.namespace(b"mine"))
    placement.drain_events()
    placement.drop_namespace(tree.namespace(b"mine"))
    assert [(event.kind, len(event.hashes)) for event in placement.drain_events()] == [("removed", 2)]
    placement.release(owner)
    assert placement.drain_events() == []


def test_clearing_is_told_only_where_nothing_stays() -> None:
    _, _, placement = single(1, 8, **EVENTS)
    owner = remember(placement, [1])
    cache(placement, [2])
    placement.drain_events()
    placement.clear()
    assert [event.kind for event in placement.drain_events()] == ["removed"]
    placement.release(owner)
    placement.clear()
    assert [event.kind for event in placement.drain_events()] == ["removed", "cleared"]


def test_a_copy_that_could_not_be_read_is_told_as_removed_and_comes_back_with_its_tokens() -> None:
    _, _, placement = tiered(1, (2, 8), **EVENTS)
    cache(placement, [1, 2])
    make_room(placement, 2)
    owner, _ = placement.acquire([1, 2])
    placement.drain_events()
    placement.promote(owner)
    finish(placement, ok=False)
    assert [(event.kind, event.tier, len(event.hashes)) for event in placement.drain_events()] == [
        ("removed", Tier.HOST, 2)
    ]
    placement.settle(owner)
    placement.release(owner)
    make_room(placement, 2)
    cache(placement, [1, 2])
    assert followed({}, placement.snapshot_events()[0], 1).keys() == {(Tier.DEVICE, 0), (Tier.DEVICE, 1)}


def test_partly_filled_blocks_are_not_told() -> None:
    _, _, placement = single(4, 16, **EVENTS)
    table = BlockTable(placement, 2)
    row, _ = table.open([1, 2, 3, 4, 5, 6])
    table.step([row])
    table.commit([row])
    table.release(row, keep_remainder=True)
    assert placement.tree.num_blocks == 2
    told = [token for event in placement.drain_events() for token in event.token_ids]
    assert told == [1, 2, 3, 4]
    assert [event.token_ids for event in placement.snapshot_events()[0]] == [(1, 2, 3, 4)]
    placement.clear()
    assert [len(event.hashes) for event in placement.drain_events()] == [1, 0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_reader_of_events_knows_all_that_a_match_finds(seed: int, policy: str) -> None:
    history = History(seed, policy)
    for _ in range(120):
        history.go_on()
        history.check()
    history.placement.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_events_change_no_decision(policy: str) -> None:
    told, silent = History(3, policy), History(3, policy, event_words=0)
    for _ in range(200):
        told.go_on()
        silent.go_on()
    assert told.placement.stats() == silent.placement.stats()
    assert told.tree.dump() == silent.tree.dump()


class History:
    """A random life of a cache with three tiers, one of them closed."""

    def __init__(self, seed: int, policy: str, event_words: int = 1 << 16) -> None:
        self.rng = rng = Random(seed)
        self.size = rng.choice([1, 2, 5])
        self.tree = RadixTree(
            self.size, 3, seed=seed, name_seed=SEED, keep_names=event_words > 0, keep_chain=policy != "lru",
            max_run=rng.choice([1, 3, 256]),
        )  # fmt: skip
        self.placement = Placement(
            self.tree, [BlockPool(n) for n in (6, 5, 12)], policy=policy, event_words=event_words,
            inclusive=(False, rng.random() < 0.5, True), write=rng.choice(["evicted", "reused", "all"]),
            demotion=rng.choice(["leaf_first", "oldest_first"]),
        )  # fmt: skip
        self.roots: dict[int, bytes] = {0: b""}
        self.owners: list[int] = []
        self.known: Known = {}

    def root(self) -> int:
        name = self.rng.choice([b"", b"a", b"b"])
        known = self.tree.find(name)
        made = self.tree.namespace(name)
        if known is None:
            self.roots[made & 0x7FFFFFFF] = name
        return made

    def go_on(self) -> None:
        rng, placement, size = self.rng, self.placement, self.size
        tokens = [rng.choice([0, 1, -5]) for _ in range(size * rng.randint(0, 4))]
        owner, matched = placement.acquire(tokens, self.root())
        cold = sum(1 for tier in placement.tiers_of(owner).tolist() if tier)
        if rng.random() < 0.6 and placement.reserve(cold) == 0:
            placement.promote(owner)
            finish(placement, ok=rng.random() < 0.8)
        matched = placement.settle(owner)
        if placement.reserve(len(tokens) // size - matched) == 0:
            blocks = placement.allocate(len(tokens) // size - matched)
            done = placement.insert(owner, tokens[size * matched :], blocks)
            placement.pools[0].free(blocks[done:])
        placement.copy_wanted(8)
        finish(placement, ok=rng.random() < 0.8)
        self.owners.append(owner)
        while len(self.owners) > rng.choice([0, 1, 2]):
            placement.release(self.owners.pop(rng.randrange(len(self.owners))))
        if rng.random() < 0.05:
            self.restore()
        if rng.random() < 0.05:
            self.drop()
        if rng.random() < 0.03:
            placement.clear()

    def restore(self) -> None:
        tokens, pool = [self.rng.choice([0, 1]) for _ in range(2 * self.size)], self.placement.pools[2]
        if pool.counts()["free"] >= 2:
            ids = pool.alloc(2)
            done = self.placement.restore(tokens, ids, self.root(), 2)
            pool.free(np.array([i for i in ids.tolist() if not self.has(i)], np.int32))
            assert 0 <= done <= 2

    def has(self, block: int) -> bool:
        return any(block in node["ids"].get(2, ()) for node in self.placement.dump().values())

    def drop(self) -> None:
        name = self.rng.choice([b"a", b"b"])
        named = self.tree.find(name)
        if named is not None:
            self.placement.drop_namespace(named)
            del self.roots[named & 0x7FFFFFFF]

    def check(self) -> None:
        events, lost = self.placement.take_events()
        assert lost == 0
        assert all(NO_TOKEN not in event.token_ids for event in events)
        found = findable(self.placement, SEED, self.roots)
        assert followed(self.known, events, self.size) == found
        if self.rng.random() < 0.2:
            assert followed({}, self.placement.snapshot_events()[0], self.size) == found

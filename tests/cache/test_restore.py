"""A reopened store's blocks become whole prefixes again; what does not fit is never used."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedkv._core.chain_key import ROOT_PARENT, chain_key
from pagedkv.cache.parts import open_placement
from pagedkv.cache.records import restore, whole_prefixes
from pagedkv.tiers import Record, StoredBlock

SECRET, A, B = bytes(32), bytes([1]) * 32, bytes([2]) * 32
SIZE = 2


def stored(block, parent, token, namespace=A, generation=None):
    """A block of the given token after `parent` (a StoredBlock, or None), with the right key."""
    before = ROOT_PARENT if parent is None else parent.record.key
    tokens = np.full(SIZE, token, np.int32)
    record = Record(chain_key(SECRET, namespace, before, tokens), before, namespace, tokens)
    return StoredBlock(block, record, block + 1 if generation is None else generation)


def shapes(found):
    runs, orphans = whole_prefixes(found, SECRET)
    return [(run.parent, run.blocks.tolist()) for run in runs], {why: ids for why, ids in orphans.items() if ids}


def test_a_tree_is_cut_where_it_branches_and_the_newest_comes_first():
    root = stored(0, None, 1)
    second = stored(1, root, 2)
    left, right = stored(2, second, 3), stored(3, second, 4)
    below = stored(4, left, 5)
    alone = stored(5, None, 9)
    found = [below, right, root, alone, left, second]
    assert shapes(found) == ([(-1, [5]), (-1, [0, 1]), (1, [3]), (1, [2, 4])], {})
    runs, _ = whole_prefixes(found, SECRET)
    assert [run.tokens.tolist() for run in runs] == [[9, 9], [1, 1, 2, 2], [4, 4], [3, 3, 5, 5]]
    assert {run.namespace for run in runs} == {A}


def test_a_block_without_its_parent_is_an_orphan_and_so_is_what_hangs_on_it():
    root = stored(0, None, 1)
    lost = stored(1, root, 2)
    child = stored(2, lost, 3)
    assert shapes([root, child, stored(3, child, 4)]) == ([(-1, [0])], {"no_parent": [2, 3]})


def test_of_two_blocks_of_the_same_name_one_is_used():
    assert shapes([stored(4, None, 1), stored(7, None, 1)]) == ([(-1, [4])], {"doubled": [7]})


def test_a_child_of_another_namespace_is_no_child():
    root = stored(0, None, 1, A)
    assert shapes([root, stored(1, root, 2, B)]) == ([(-1, [0])], {"no_parent": [1]})


def test_a_block_whose_key_is_not_that_of_its_content_is_an_orphan():
    root = stored(0, None, 1)
    other = stored(1, None, 2)
    other.record.tokens[0] = 3
    assert shapes([root, other]) == ([(-1, [0])], {"wrong_key": [1]})


def test_the_same_tokens_of_two_namespaces_are_two_prefixes():
    (first, second), orphans = whole_prefixes([stored(0, None, 1, A), stored(1, None, 1, B)], SECRET)
    assert {first.namespace, second.namespace} == {A, B}
    assert not any(orphans.values())


class Store:
    """What restoring needs of a DiskTier."""

    secret = SECRET

    def __init__(self, found):
        self.found, self.invalidated = found, []

    def records(self):
        return iter(self.found)

    def invalidate(self, blocks):
        self.invalidated += blocks.tolist()


@pytest.mark.parametrize("seed", range(10))
def test_every_whole_prefix_is_matched_and_every_other_block_is_free(seed):
    choose = random.Random(seed)
    slots = choose.sample(range(300), 200)
    made = []
    for number, slot in enumerate(slots):
        parent = choose.choice([None, *made]) if number % 7 else None
        namespace = choose.choice([A, B]) if parent is None else parent.record.namespace
        made.append(stored(slot, parent, number, namespace, number + 1))
    kept = [block for block in made if choose.random() < 0.9]
    choose.shuffle(kept)
    store = Store(kept)
    placement = open_placement([4, 0, 300], SIZE, "lru", None, demotion="leaf_first", pin_budget=0, event_words=0)
    found = restore(placement, store, 2, placement.tree.namespace)
    by_key = {block.record.key: block for block in kept}
    whole = set()
    for block in kept:
        path, at = [block], block
        while at is not None and at.record.parent != ROOT_PARENT:
            at = by_key.get(at.record.parent)
            path.append(at)
        if None in path:
            continue
        whole.add(block.block)
        tokens = np.concatenate([part.record.tokens for part in reversed(path)])
        tiers, ids, _ = placement.match(tokens, placement.tree.namespace(block.record.namespace))
        assert ids.tolist() == [part.block for part in reversed(path)], f"seed {seed}"
        assert set(tiers.tolist()) == {2}
    assert sorted(store.invalidated) == sorted({block.block for block in kept} - whole), f"seed {seed}"
    counts = placement.pools[2].counts()
    assert (counts["cached"], counts["live"], counts["free"]) == (len(whole), 0, 300 - len(whole))
    assert (found.blocks, sum(found.orphans.values())) == (len(whole), len(kept) - len(whole))
    parents = {block.record.parent for block in kept if block.block in whole}
    assert found.prefixes == sum(block.record.key not in parents for block in kept if block.block in whole)
    placement.check_integrity()


def test_an_empty_store_leaves_the_pool_as_it_is():
    placement = open_placement([4, 0, 8], SIZE, "lru", None, demotion="leaf_first", pin_budget=0, event_words=0)
    orphan = stored(3, stored(9, None, 1), 2)
    store = Store([orphan])
    assert restore(placement, store, 2, placement.tree.namespace).orphans["no_parent"] == 1
    assert store.invalidated == [3]
    assert placement.pools[2].counts()["free"] == 8

"""RadixTree finds prefixes of tokens in whole blocks, by their tokens alone.

It does so whatever was split or trimmed.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from pagedkv.core import RadixTree
from pagedkv.errors import InvalidArgument, WrongType
from tests.core.helpers import DAMAGED_IDS, TOO_LARGE, cached_prefixes, kind, nothing_changes, single


def put(tree: RadixTree, tokens: list[int], first_id: int, namespace: int = 0) -> list[int]:
    ids = np.arange(first_id, first_id + len(tokens) // tree.block_size, dtype=np.int32)
    tree.insert(tokens, ids, namespace)
    tree.check_integrity()
    return ids.tolist()


def test_an_empty_tree_matches_nothing() -> None:
    tree = RadixTree(4)
    assert tree.match([1, 2, 3, 4]).tolist() == []
    assert tree.match([]).tolist() == []
    assert tree.prefixes() == []
    assert (tree.num_blocks, tree.num_nodes) == (0, 1)


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_a_prefix_matches_in_whole_blocks(block_size: int) -> None:
    tree = RadixTree(block_size)
    tokens = list(range(5 * block_size))
    ids = put(tree, tokens, 100)
    for length in range(len(tokens) + 1) if block_size < 20 else (0, 1, 255, 256, 257, 1279, 1280):
        assert tree.match(tokens[:length]).tolist() == ids[: length // block_size]
    assert tree.match([*tokens, 7, 8]).tolist() == ids
    assert tree.match([-1, *tokens[1:]]).tolist() == []


@pytest.mark.parametrize("changed", range(12))
def test_one_other_token_ends_the_match_at_its_block(changed: int) -> None:
    tree = RadixTree(3)
    tokens = list(range(12))
    ids = put(tree, tokens, 0)
    tokens[changed] += 1000
    assert tree.match(tokens).tolist() == ids[: changed // 3]


@pytest.mark.parametrize("token", [0, -1, -(2**31), 2**31 - 1])
def test_every_int32_is_a_token(token: int) -> None:
    tree = RadixTree(2)
    put(tree, [token, token], 5)
    assert tree.match([token, token]).tolist() == [5]
    assert tree.prefixes()[0].tolist() == [token, token]


def test_tokens_that_do_not_fill_a_block_are_left_out() -> None:
    tree = RadixTree(4)
    ids = np.array([9], np.int32)
    assert tree.insert([1, 2, 3, 4, 5, 6], ids) == 1
    assert tree.num_blocks == 1
    assert tree.match([1, 2, 3, 4, 5, 6]).tolist() == [9]


def test_a_branch_in_the_middle_of_a_run_splits_it_and_both_are_found() -> None:
    tree = RadixTree(2)
    long = put(tree, [1, 1, 2, 2, 3, 3, 4, 4], 0)
    assert tree.num_nodes == 2
    other = np.array([10, 11, 12], np.int32)
    assert tree.insert([1, 1, 2, 2, 9, 9], other) == 1
    assert other.tolist() == [0, 1, 12]
    assert tree.num_nodes == 4
    assert tree.match([1, 1, 2, 2, 3, 3, 4, 4]).tolist() == long
    assert tree.match([1, 1, 2, 2, 9, 9]).tolist() == [0, 1, 12]
    tree.check_integrity()


def test_blocks_that_the_tree_has_are_adopted_and_the_callers_ids_rewritten() -> None:
    tree = RadixTree(1)
    put(tree, [1, 2, 3], 0)
    mine = np.array([50, 51, 52, 53], np.int32)
    assert tree.insert([1, 2, 3, 4], mine) == 1
    assert mine.tolist() == [0, 1, 2, 53]
    with nothing_changes(tree):
        again = mine + np.int32(50)
        assert tree.insert([1, 2, 3, 4], again) == 0
        assert again.tolist() == [0, 1, 2, 53]


def test_a_shorter_prefix_of_a_run_is_adopted_too() -> None:
    tree = RadixTree(1)
    put(tree, [1, 2, 3], 0)
    mine = np.array([50, 51], np.int32)
    assert tree.insert([1, 2], mine) == 0
    assert mine.tolist() == [0, 1]
    assert tree.match([1, 2, 3]).tolist() == [0, 1, 2]
    tree.check_integrity()


@pytest.mark.parametrize("max_run", [1, 2, 7, 256])
def test_a_run_is_never_longer_than_its_maximum(max_run: int) -> None:
    tree = RadixTree(2, max_run=max_run)
    tokens = list(range(1200))
    ids = put(tree, tokens, 0)
    assert tree.num_nodes == 1 + -(-600 // max_run)
    assert tree.match(tokens).tolist() == ids
    assert [leaf.tolist() for leaf in tree.prefixes()] == [tokens]


def test_each_tier_has_ids_of_its_own() -> None:
    tree = RadixTree(1, 3)
    tree.insert([1, 2, 3], np.array([0, 1, 2], np.int32), tier=0)
    tree.insert([1, 2], np.array([70, 71], np.int32), tier=2)
    assert tree.match([1, 2, 3]).tolist() == [0, 1, 2]
    assert tree.match([1, 2, 3], tier=1).tolist() == []
    assert tree.match([1, 2, 3], tier=2).tolist() == [70, 71]
    assert tree.num_blocks == 3
    tree.check_integrity()


def test_a_namespace_never_matches_what_another_holds() -> None:
    tree = RadixTree(1)
    roots = [tree.namespace(key) for key in (b"", b"a", b"a\0", b"b")]
    assert len(set(roots)) == 4
    assert [tree.namespace(key) for key in (b"", b"a", b"a\0", b"b")] == roots
    ids = {root: put(tree, [1, 2, 3], 10 * root, root) for root in roots[:3]}
    for root in roots:
        assert tree.match([1, 2, 3], root).tolist() == ids.get(root, [])


def test_the_default_namespace_is_the_one_without_a_name() -> None:
    tree = RadixTree(1)
    tenant = tree.namespace(b"tenant")
    put(tree, [1, 2, 3], 0, tenant)
    assert tree.match([1, 2, 3]).tolist() == []


def test_the_callers_tokens_may_change_afterwards() -> None:
    tree = RadixTree(1)
    tokens = np.array([1, 2, 3], np.int32)
    tree.insert(tokens, np.array([0, 1, 2], np.int32))
    tokens[:] = 9
    assert tree.match([1, 2, 3]).tolist() == [0, 1, 2]


def test_prefixes_lists_every_leaf_and_nothing_that_is_continued() -> None:
    tree = RadixTree(2)
    other = tree.namespace(b"other")
    assert tree.namespace() != other
    root = tree.namespace()
    for tokens in ([1, 1, 2, 2], [1, 1, 3, 3], [1, 1], [4, 4, 5, 5, 6, 6]):
        put(tree, tokens, 0, root)
    put(tree, [8, 8], 0, other)
    assert sorted(leaf.tolist() for leaf in tree.prefixes(root)) == [[1, 1, 2, 2], [1, 1, 3, 3], [4, 4, 5, 5, 6, 6]]
    assert [leaf.tolist() for leaf in tree.prefixes(other)] == [[8, 8]]


def test_trim_takes_out_the_deepest_first_and_stops_at_a_branch() -> None:
    tree = RadixTree(1)
    put(tree, [1, 2, 3, 4], 0)
    put(tree, [1, 2, 5], 10)
    with nothing_changes(tree):
        assert tree.trim([1, 2]).tolist() == []  # continued twice
        assert tree.trim([1, 2, 3]).tolist() == []  # continued by 4
        assert tree.trim([]).tolist() == []
    assert tree.trim([1, 2, 3, 4]).tolist() == [3, 2]
    assert tree.match([1, 2, 3, 4]).tolist() == [0, 1]
    assert tree.match([1, 2, 5]).tolist() == [0, 1, 12]
    assert tree.trim([1, 2, 5]).tolist() == [12, 1, 0]
    assert (tree.num_blocks, tree.num_nodes) == (0, 1)
    tree.check_integrity()


@pytest.mark.parametrize("keep", range(8))
def test_trim_keeps_the_first_blocks_it_is_told_to_keep(keep: int) -> None:
    tree = RadixTree(2, max_run=2)
    tokens = list(range(12))
    ids = put(tree, tokens, 0)
    assert tree.trim(tokens, keep=keep).tolist() == ids[keep:][::-1]
    assert tree.match(tokens).tolist() == ids[:keep]
    tree.check_integrity()


@pytest.mark.parametrize(("block_size", "max_run"), [(1, 256), (1, 1), (2, 3), (3, 256)])
def test_random_inserts_and_trims_agree_with_a_dictionary_of_prefixes(block_size: int, max_run: int) -> None:
    rng = Random(block_size * 1000 + max_run)
    tree = RadixTree(block_size, max_run=max_run, seed=rng.randrange(2**64), keep_chain=True)
    known: dict[tuple[int, ...], int] = {}
    fresh = 0
    for _ in range(600):
        tokens = tuple(rng.randint(0, 1) for _ in range(rng.randint(0, 9) * block_size))
        ends = range(block_size, len(tokens) + 1, block_size)
        if rng.random() < 0.6:
            ids = np.arange(fresh, fresh + len(ends), dtype=np.int32)
            new = [end for end in ends if tokens[:end] not in known]
            known.update({tokens[:end]: fresh + end // block_size - 1 for end in new})
            assert tree.insert(tokens, ids) == len(new)
            assert ids.tolist() == [known[tokens[:end]] for end in ends]
            fresh += len(ends)
        elif tokens in known:
            whole, taken = tokens, []
            while tokens in known and not any(p[: len(tokens)] == tokens and len(p) > len(tokens) for p in known):
                taken.append(known.pop(tokens))
                tokens = tokens[:-block_size]
            assert tree.trim(whole).tolist() == taken
        probe = [rng.randint(0, 1) for _ in range(rng.randint(0, 10))]
        found = []
        for end in range(block_size, len(probe) + 1, block_size):
            if tuple(probe[:end]) not in known:
                break
            found.append(known[tuple(probe[:end])])
        assert tree.match(probe).tolist() == found
        assert tree.num_blocks == len(known)
        tree.check_integrity()
    assert cached_prefixes(tree) == known.keys()


def test_a_hundred_thousand_children_of_one_root_are_all_found() -> None:
    tree = RadixTree(2)
    num = 100_000
    block = np.empty(1, np.int32)
    for i in range(num):
        block[0] = i
        tree.insert(np.array([i // 300, i], np.int32), block)
    tree.check_integrity()
    assert tree.num_nodes == num + 1
    for i in range(0, num, 7):
        assert tree.match([i // 300, i]).tolist() == [i]
        assert tree.match([i // 300 + 1, i]).tolist() == []
    for i in range(0, num, 3):
        assert tree.trim([i // 300, i]).tolist() == [i]
    tree.check_integrity()
    for i in range(0, num, 11):
        assert tree.match([i // 300, i]).tolist() == ([] if i % 3 == 0 else [i])
    assert len(tree.prefixes()) == num - len(range(0, num, 3))


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((0,), {}, InvalidArgument),
        ((257,), {}, InvalidArgument),
        ((-1,), {}, InvalidArgument),
        ((1.0,), {}, WrongType),
        ((None,), {}, WrongType),
        ((True,), {}, WrongType),
        ((1, 0), {}, InvalidArgument),
        ((1, 5), {}, InvalidArgument),
        ((1, 1), {"max_run": 0}, InvalidArgument),
        ((1, 1), {"max_run": 257}, InvalidArgument),
        ((1, 1), {"max_run": "2"}, WrongType),
        ((1, 1), {"seed": "two"}, WrongType),
    ],
)
def test_a_tree_of_an_impossible_shape_is_refused(arguments: Any, options: Any, error: type) -> None:
    with pytest.raises(error):
        RadixTree(*arguments, **options)


@pytest.mark.parametrize("key", ["", "a", None, 0, bytearray(b"a"), memoryview(b"a")])
def test_the_name_of_a_namespace_is_bytes(key: Any) -> None:
    tree = RadixTree(1)
    with nothing_changes(tree), pytest.raises(WrongType):
        tree.namespace(key)


@pytest.mark.parametrize("namespace", [1, -1, 17, 2**31, 2**80])
def test_a_namespace_that_is_no_root_of_the_tree_is_refused(namespace: int) -> None:
    tree = RadixTree(1)
    put(tree, [1, 2], 0)  # node 1 exists, and is no root
    with nothing_changes(tree):
        for call in (tree.match, tree.trim):
            with pytest.raises(InvalidArgument):
                call([1], namespace)
        with pytest.raises(InvalidArgument):
            tree.prefixes(namespace)
        with pytest.raises(InvalidArgument):
            tree.insert([1], np.array([3], np.int32), namespace)


@pytest.mark.parametrize("namespace", [0.0, None, "0", b"", True])
def test_a_namespace_that_is_no_integer_is_refused(namespace: Any) -> None:
    tree = RadixTree(1)
    with pytest.raises(WrongType):
        tree.match([1], namespace)


@pytest.mark.parametrize("tokens", [*DAMAGED_IDS, *TOO_LARGE], ids=kind)
def test_tokens_that_are_no_row_of_int32_change_nothing(tokens: Any) -> None:
    tree = RadixTree(1)
    put(tree, [1, 2], 0)
    with nothing_changes(tree):
        for call in (tree.match, tree.trim, RadixTree.tokens):
            with pytest.raises((WrongType, InvalidArgument)):
                call(tokens)
        with pytest.raises((WrongType, InvalidArgument)):
            tree.insert(tokens, np.array([3], np.int32))


def test_blocks_to_insert_must_be_a_writeable_int32_array_of_the_right_length() -> None:
    tree = RadixTree(1)
    tree.namespace()
    read_only = np.zeros(2, np.int32)
    read_only.flags.writeable = False
    strided = np.zeros(4, np.int32)[::2]
    with nothing_changes(tree):
        for blocks in ([0, 1], (0, 1), np.zeros(2, np.int64), read_only, strided, np.zeros(2, ">i4")):
            with pytest.raises(WrongType):
                tree.insert([1, 2], blocks)  # type: ignore[arg-type]
        for length in (0, 1, 3):
            with pytest.raises(InvalidArgument):
                tree.insert([1, 2], np.zeros(length, np.int32))


@pytest.mark.parametrize("tier", [-1, 1, 4])
def test_a_tier_the_tree_does_not_have_is_refused(tier: int) -> None:
    tree = RadixTree(1)
    tree.namespace()
    with nothing_changes(tree):
        with pytest.raises(InvalidArgument):
            tree.match([1], tier=tier)
        with pytest.raises(InvalidArgument):
            tree.insert([1], np.zeros(1, np.int32), tier=tier)


def test_a_tree_that_belongs_to_a_placement_is_changed_only_through_it() -> None:
    tree, _, placement = single()
    with nothing_changes(tree, placement):
        with pytest.raises(InvalidArgument):
            tree.insert([1], np.zeros(1, np.int32))
        with pytest.raises(InvalidArgument):
            tree.trim([1])
    assert tree.match([1]).tolist() == []


def test_tokens_come_back_as_they_are_or_as_a_checked_copy() -> None:
    array = np.arange(4, dtype=np.int32)
    assert RadixTree.tokens(array) is array
    assert RadixTree.tokens(array[::2]).tolist() == [0, 2]
    assert RadixTree.tokens([1, 2**31 - 1, -(2**31)]).dtype == np.int32

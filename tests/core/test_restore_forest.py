"""A whole reopened store joins the tree in one call."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pagedkv.core import Placement, Tier
from pagedkv.errors import InvalidArgument
from tests.core.helpers import cache, cached_prefixes, make_room, nothing_changes, sound, states, tiered, where

MAX_RUN = 256  # blocks of a node at most


def forest(placement: Placement, runs: list[tuple[int, list[int]]], roots: list[int] | None = None) -> np.ndarray:
    """Restore ``(parent, tokens)`` runs on the disk, and return what came of each.

    Their blocks are 0, 1, 2, and so on.
    """
    pool = placement.pools[2]
    assert pool is not None
    lengths = [len(tokens) // placement.tree.block_size for _, tokens in runs]
    return placement.restore_forest(
        np.concatenate([np.array(tokens, np.int32) for _, tokens in runs]),
        pool.alloc(sum(lengths)),
        np.concatenate(([0], np.cumsum(lengths))),
        np.array([parent for parent, _ in runs], np.int32),
        np.array(roots or [0] * len(runs), np.int32),
        Tier.DISK,
    )


def test_runs_hang_where_they_belong() -> None:
    tree, _, placement = tiered(2, (4, 4, 16))
    other = tree.namespace(b"other")
    done = forest(
        placement,
        [(-1, [1, 1, 2, 2]), (0, [3, 3]), (0, [4, 4, 5, 5]), (-1, [1, 1])],
        [0, 7, 7, other],  # of a run that continues another, no namespace is read
    )
    assert done.tolist() == [2, 1, 2, 1]
    assert cached_prefixes(tree) == {
        (1, 1), (1, 1, 2, 2), (1, 1, 2, 2, 3, 3), (1, 1, 2, 2, 4, 4), (1, 1, 2, 2, 4, 4, 5, 5),
    }  # fmt: skip
    assert placement.match([1, 1, 2, 2, 4, 4, 5, 5])[1].tolist() == [0, 1, 3, 4]
    assert placement.match([1, 1], other)[1].tolist() == [5]
    assert states(placement)[2] == (10, 0, 6)
    sound(placement)


def test_a_run_longer_than_a_node_stays_one_prefix() -> None:
    _, _, placement = tiered(1, (4, 4, 4 * MAX_RUN))
    tokens = list(range(3 * MAX_RUN + 7))
    assert forest(placement, [(-1, tokens), (0, [9])]).tolist() == [len(tokens), 1]
    assert where(placement, [*tokens, 9]) == [Tier.DISK] * (len(tokens) + 1)
    sound(placement)


@pytest.mark.parametrize("seed", range(5))
def test_it_restores_what_restoring_path_by_path_restores(seed: int) -> None:
    choose = random.Random(seed)
    runs: list[tuple[int, list[int]]] = []
    paths: list[list[int]] = []
    token = 0
    for number in range(40):
        parent = choose.randrange(-1, number) if number else -1
        tokens = list(range(token, token + choose.randint(1, 6)))
        token += len(tokens)
        runs.append((parent, tokens))
        paths.append([*(paths[parent] if parent >= 0 else []), *tokens])
    at_once, _, first = tiered(1, (4, 4, 300))
    assert forest(first, runs).tolist() == [len(tokens) for _, tokens in runs], f"seed {seed}"
    one_by_one, pools, second = tiered(1, (4, 4, 300))
    for path in paths:
        there = len(second.match(path)[1])
        ids = [*second.match(path)[1].tolist(), *pools[2].alloc(len(path) - there).tolist()]
        second.restore(path, ids)
    assert cached_prefixes(at_once) == cached_prefixes(one_by_one), f"seed {seed}"
    sound(first)


def test_an_earlier_run_is_hotter_and_no_parent_goes_before_its_children() -> None:
    _, _, placement = tiered(1, (4, 4, 8))
    forest(placement, [(-1, [1, 2]), (0, [3]), (0, [4]), (-1, [5]), (-1, [6])])
    left = []
    for wanted in range(3, 9):
        make_room(placement, wanted, Tier.DISK)
        left.append([path for path in ([1], [1, 2], [1, 2, 3], [1, 2, 4], [5], [6]) if _is_whole(placement, path)])
    assert left == [
        [[1], [1, 2], [1, 2, 3], [1, 2, 4], [5]], [[1], [1, 2], [1, 2, 3], [1, 2, 4]], [[1], [1, 2], [1, 2, 3]],
        [[1], [1, 2]], [[1]], [],
    ]  # fmt: skip
    sound(placement)


def _is_whole(placement: Placement, path: list[int]) -> bool:
    return len(placement.match(path)[1]) == len(path)


def test_a_run_whose_place_is_taken_and_what_continues_it_stay_out() -> None:
    _, pools, placement = tiered(1, (4, 4, 8))
    cache(placement, [1, 9])
    assert forest(placement, [(-1, [1, 2]), (0, [3]), (-1, [4])]).tolist() == [0, 0, 1]
    assert pools[2].refs(range(4)).tolist()[:3] == [1, 1, 1]
    assert where(placement, [4]) == [Tier.DISK]
    sound(placement)


def test_nothing_joins_a_dropped_namespace() -> None:
    tree, _, placement = tiered(1, (4, 4, 8))
    gone = tree.namespace(b"gone")
    placement.drop_namespace(gone)
    assert forest(placement, [(-1, [1]), (0, [2]), (-1, [1])], [gone, gone, 0]).tolist() == [0, 0, 1]
    sound(placement)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", [1, 2]), ("blocks", [0, 1, 7]), ("blocks", [0, 1, 1]), ("blocks", [0, 1, -1]), ("first", [0, 3]),
        ("first", [0, 2, 4]), ("first", [1, 2, 3]), ("first", [0, 0, 3]), ("parents", [0, 0]), ("parents", [-1, 1]),
        ("parents", [-2, 0]), ("namespaces", [0]), ("namespaces", [99, 0]), ("tier", 0), ("tier", 3),
    ],
)  # fmt: skip
def test_a_forest_that_cannot_be_one_changes_nothing(field: str, value: Any) -> None:
    _, pools, placement = tiered(1, (4, 4, 8))
    pools[2].alloc(3)
    given: dict[str, Any] = {
        "tokens": [1, 2, 3], "blocks": [0, 1, 2], "first": [0, 2, 3], "parents": [-1, 0], "namespaces": [0, 0],
    }  # fmt: skip
    with nothing_changes(placement), pytest.raises(InvalidArgument):
        placement.restore_forest(**{**given, field: value})
    assert placement.restore_forest(**given).tolist() == [2, 1]
    sound(placement)

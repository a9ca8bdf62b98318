"""What the conductor tells the core.

How transfers ended, which copies were found again, and which keys are known.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pagedkv.core import Tier
from pagedkv.errors import InvalidArgument, StaleHandle, WrongType
from tests.core.helpers import (
    cache,
    cached_prefixes,
    finish,
    kind,
    make_room,
    nothing_changes,
    single,
    sound,
    states,
    tiered,
    where,
)

# ---- restoring


def test_a_prefix_found_again_below_is_matched_there() -> None:
    _, pools, placement = tiered(1, (4, 4, 8))
    ids = pools[2].alloc(3)
    assert placement.restore([1, 2, 3], ids) == 3
    assert where(placement, [1, 2, 3]) == [Tier.DISK] * 3
    assert states(placement)[2] == (5, 0, 3)
    more = pools[2].alloc(1)
    assert placement.restore([1, 2, 9], [*ids[:2].tolist(), int(more[0])]) == 3
    assert placement.match([1, 2, 9])[1].tolist() == [*ids[:2].tolist(), int(more[0])]
    sound(placement)


@pytest.mark.parametrize("ids", [[5, 6], [0, 0], [3, 7]])
def test_blocks_to_restore_that_the_caller_does_not_own_alone_change_nothing(ids: list[int]) -> None:
    _, pools, placement = tiered(1, (4, 8))
    pools[1].alloc(5)
    pools[1].incref([3])
    cache(placement, [9])  # the tree is not empty
    with nothing_changes(placement), pytest.raises(InvalidArgument):
        placement.restore([1, 2], ids, tier=Tier.HOST)


def test_restoring_a_part_of_a_run_in_flight_leaves_the_transfer_whole() -> None:
    _, pools, placement = tiered(1, (4, 8))
    cache(placement, [1, 2, 3, 4])
    placement.reserve(4)
    ids = pools[1].alloc(2)
    placement.restore([1, 2], ids, tier=Tier.HOST)
    finish(placement)
    sound(placement)
    assert not any(node["in_flight"] for node in placement.dump().values())
    assert states(placement) == [(4, 0, 0), (2, 2, 4)]


def test_nothing_is_restored_into_a_dropped_namespace() -> None:
    tree, pools, placement = tiered(1, (4, 8))
    gone = tree.namespace(b"gone")
    placement.drop_namespace(gone)
    ids = pools[1].alloc(2)
    assert placement.restore([1, 2], ids, gone, Tier.HOST) == 0
    assert pools[1].refs(ids).tolist() == [1, 1]
    sound(placement)


def test_a_run_that_could_not_be_read_and_has_children_is_not_dropped_before_them() -> None:
    tree, _, placement = tiered(1, (4, 4, 2), demotion="oldest_first", tree_max_run=1)
    cache(placement, [1, 2])
    make_room(placement, 4)
    owner, _ = placement.acquire([1])
    placement.promote(owner)
    placement.release(owner)
    finish(placement, ok=False)
    sound(placement)
    placement.reserve(4, Tier.HOST)
    sound(placement)
    finish(placement)
    sound(placement)
    assert cached_prefixes(tree) in (set(), {(1,)}, {(1,), (1, 2)})


# ---- anchors


def test_an_anchor_is_the_deepest_known_key_on_the_way() -> None:
    _, _, placement = tiered(1, (4, 8))
    cache(placement, [1, 2, 3, 4])
    placement.reserve(2)
    node = int(placement.take_moves()["node"][0])
    assert placement.anchor(node, 2) == (0, None)
    keys = [bytes([i]) * 32 for i in range(4)]
    placement.remember_keys(node, 0, keys)
    assert placement.anchor(node, 2) == placement.anchor(node, 3) == (2, keys[1])
    assert placement.anchor(node, 1) == (0, None), "of a block that lies above its node by now"
    with nothing_changes(placement):
        for wrong in ([b"short"], [b"\0" * 31], [b"\0" * 33]):
            with pytest.raises(InvalidArgument):
                placement.remember_keys(node, 0, wrong)
        for stale in (0, 99, -1, 2**31):
            anchor = partial(placement.anchor, depth=2)
            for call in (anchor, placement.path_tokens, placement.depth_of, placement.root_of):
                with pytest.raises((StaleHandle, InvalidArgument)):
                    call(stale)


# ---- completing


def test_a_transfer_is_completed_once() -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(2)
    moves = finish(placement)
    for stale in (int(moves["transfer"][0]), 99, -1, 2**62):
        with nothing_changes(placement), pytest.raises(StaleHandle, match="entry 0"):
            placement.complete([stale], [True])


def test_completing_stops_at_a_stale_transfer_with_those_before_it_done() -> None:
    _, _, placement = tiered(1, (4, 8), tree_max_run=1)
    cache(placement, [1, 2])
    placement.reserve(4)
    first, second = dict.fromkeys(placement.take_moves()["transfer"].tolist())
    with pytest.raises(StaleHandle, match="entry 1"):
        placement.complete([first, 99, second], [True] * 3)
    assert placement.num_in_flight == 1
    placement.complete([second], [False])
    sound(placement)


def test_the_column_of_the_moves_can_be_completed_as_it_is() -> None:
    _, _, placement = tiered(1, (8, 8), tree_max_run=2)
    cache(placement, [1, 2, 3, 4, 5])
    assert placement.reserve(8) == 5
    moves = placement.take_moves()
    assert len(np.unique(moves["transfer"])) < len(moves) == 5
    placement.complete(moves["transfer"], np.ones(5, np.bool_))
    assert (placement.num_in_flight, placement.reserve(8)) == (0, 0)
    assert [int(tier) for tier in placement.match([1, 2, 3, 4, 5])[0]] == [1] * 5
    sound(placement)
    with nothing_changes(placement), pytest.raises(StaleHandle, match="a run of blocks"):
        placement.complete(moves["transfer"], np.ones(5, np.bool_))


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("failed", range(4))
def test_a_transfer_of_which_one_entry_failed_has_failed_as_a_whole(failed: int, shuffled: bool) -> None:
    _, _, placement = tiered(1, (4, 8), tree_max_run=2)
    cache(placement, [1, 2, 3, 4])
    placement.reserve(4)
    moves = placement.take_moves()
    order = np.array([0, 2, 1, 3] if shuffled else [0, 1, 2, 3])
    assert len(np.unique(moves["transfer"])) == 2
    placement.complete(moves["transfer"][order], order != failed)
    lost = moves["transfer"] == moves["transfer"][failed]
    assert placement.num_in_flight == 0
    demoted = [int(block) for block, gone in zip(moves["dst_block"], lost, strict=True) if not gone]
    assert placement.pools[1].refs(demoted).tolist() in ([1, 1], [0, 0]), "a run is demoted, or dropped with its parent"
    assert not placement.pools[1].refs(moves["dst_block"][lost]).any()
    sound(placement)


@pytest.mark.parametrize(
    "ok", [[], [True, True], None, "x", "1", [[True, False]], object(), [None], [2.5], [float("nan")]], ids=kind
)
def test_outcomes_that_are_not_one_bool_a_transfer_change_nothing(ok: Any) -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(2)
    transfer = placement.take_moves()["transfer"][:1]
    with nothing_changes(placement), pytest.raises((InvalidArgument, WrongType)):
        placement.complete(transfer, ok)


@pytest.mark.parametrize("transfers", [[0.0], ["0"], None, [None], [2**63], np.zeros((1, 1), np.int64), [True]])
def test_transfers_that_are_no_row_of_integers_change_nothing(transfers: Any) -> None:
    _, _, placement = tiered()
    cache(placement, [1, 2, 3, 4])
    placement.reserve(2)
    with nothing_changes(placement), pytest.raises((InvalidArgument, WrongType)):
        placement.complete(transfers, [True])


def test_completing_nothing_is_nothing() -> None:
    _, _, placement = single()
    with nothing_changes(placement):
        placement.complete([], [])



"""A tier of claims: grafted after a lookup, spent by a promotion, in no other block's way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv._core.held import own, own_unsent
from pagedkv.core import BlockPool, Placement, RadixTree, Tier
from pagedkv.errors import InvalidArgument

REMOTE = int(Tier.REMOTE)


def make(device: int = 4, disk: int = 0, claims: int = 8, **options: Any) -> Placement:
    tree = RadixTree(1, 4)
    pools = [BlockPool(device), None, BlockPool(disk) if disk else None, BlockPool(claims)]
    return Placement(tree, pools, beside=(False, False, False, True), **options)


def pool_of(core: Placement, tier: int) -> BlockPool:
    pool = core.pools[tier]
    assert pool is not None
    return pool


def graft(core: Placement, tokens: list[int], found: int = 0, piece: int = 256) -> int:
    """Claim the blocks behind the first `found`, each with its depth for a key; blocks there."""
    pool = pool_of(core, REMOTE)
    keys = np.arange(found, len(tokens), dtype=np.uint8)[:, None]
    table = np.full((pool.max_blocks, 1), 99, np.uint8)
    done = core.graft(tokens, keys, table, piece=piece)
    tiers, blocks, _ = core.match(tokens[:done])
    own = [depth for depth, tier in enumerate(tiers.tolist()) if tier == REMOTE and depth >= found]
    new = [depth for depth in own if table[blocks[depth], 0] != 99]
    assert [int(table[blocks[depth], 0]) for depth in new] == new, "the keys of other claims"
    return done


def put(core: Placement, tokens: list[int]) -> int:
    owner, found = core.acquire(tokens)
    blocks = pool_of(core, 0).alloc(len(tokens) - found)
    assert core.insert(owner, tokens[found:], blocks) == len(tokens) - found
    return owner


def test_a_claim_is_matched_promoted_and_given_back() -> None:
    core = make()
    assert graft(core, [1, 2, 3]) == 3
    assert core.match([1, 2, 3])[0].tolist() == [REMOTE] * 3
    owner, found = core.acquire([1, 2, 3])
    assert found == 3
    assert core.promote(owner) == 1
    moves = core.take_moves()
    assert moves["src_tier"].tolist() == [REMOTE] * 3
    core.complete(moves["transfer"], np.ones(3, bool))
    assert core.settle(owner) == 3
    assert pool_of(core, REMOTE).counts()["free"] == 8
    core.release(owner)
    core.check_integrity()


def test_a_run_of_claims_has_as_many_blocks_as_the_piece_says() -> None:
    core = make(device=8)
    graft(core, [1, 2, 3, 4, 5], piece=2)
    owner, _ = core.acquire([1, 2, 3, 4, 5])
    assert core.promote(owner) == 3
    moves = core.take_moves()
    failed = moves["transfer"][moves["depth"] == 2][0]
    core.complete(moves["transfer"], moves["transfer"] != failed)
    assert core.settle(owner) == 2, "blocks read before the wrong piece are served"
    core.release(owner)
    core.check_integrity()


def test_what_could_not_be_read_makes_way_for_another_graft() -> None:
    core = make()
    graft(core, [1, 2])
    owner, _ = core.acquire([1, 2])
    core.promote(owner)
    moves = core.take_moves()
    core.release(owner)  # before: else it goes with its last owner
    core.complete(moves["transfer"], np.zeros(2, bool))
    assert core.match([1, 2])[0].tolist() == []
    assert graft(core, [1, 2]) == 2
    assert core.match([1, 2])[0].tolist() == [REMOTE] * 2
    core.check_integrity()


def test_a_block_that_another_thread_has_cached_meanwhile_is_not_claimed() -> None:
    core = make()
    core.release(put(core, [1, 2]))
    assert graft(core, [1, 2, 3, 4]) == 4
    assert core.match([1, 2, 3, 4])[0].tolist() == [0, 0, REMOTE, REMOTE]
    assert pool_of(core, REMOTE).counts()["free"] == 6
    core.check_integrity()


def test_nothing_is_demoted_to_claims() -> None:
    core = make(device=2, claims=8)
    core.release(put(core, [1, 2]))
    assert core.reserve(2) == 0
    assert len(core.take_moves()) == 0
    assert core.stats()["dropped"]["device"] == 2


def test_the_disk_is_closed_beside_claims_and_takes_what_leaves() -> None:
    core = make(device=2, disk=4, write="evicted")
    core.release(put(core, [1, 2]))
    assert core.reserve(1) == 1
    moves = core.take_moves()
    assert set(moves["dst_tier"].tolist()) == {int(Tier.DISK)}
    core.complete(moves["transfer"], np.ones(len(moves), bool))
    core.check_integrity()


def test_claims_do_not_keep_the_run_they_continue() -> None:
    core = make(device=2)
    core.release(put(core, [1]))
    graft(core, [1, 2, 3], found=1)
    core.release(put(core, [9]))  # younger than the run with claims behind it
    assert core.reserve(1) == 0
    assert core.match([9])[0].tolist() == [0]
    assert core.match([1])[0].tolist() == []
    assert pool_of(core, REMOTE).counts()["free"] == 8
    core.check_integrity()


def test_claims_that_are_being_read_keep_their_run() -> None:
    core = make(device=4)
    core.release(put(core, [1]))
    graft(core, [1, 2], found=1)
    owner, _ = core.acquire([1, 2])
    core.promote(owner)
    core.release(owner)
    core.release(put(core, [9]))
    assert core.reserve(3) > 0
    assert core.match([1])[0].tolist() == [0]
    moves = core.take_moves()
    core.complete(moves["transfer"], np.ones(len(moves), bool))
    assert core.reserve(3) == 0
    core.check_integrity()


def test_a_full_pool_of_claims_drops_the_coldest() -> None:
    core = make(claims=4)
    graft(core, [1, 2])
    graft(core, [3, 4])
    assert core.reserve(2, REMOTE) == 0
    graft(core, [5, 6])
    assert core.match([1, 2])[0].tolist() == []
    assert core.match([3, 4])[0].tolist() == [REMOTE] * 2
    core.check_integrity()


def test_computed_blocks_take_the_place_of_claims() -> None:
    core = make()
    graft(core, [1, 2])
    owner, _ = core.acquire([], max_blocks=0)
    blocks = pool_of(core, 0).alloc(2)
    assert core.insert(owner, [1, 2], blocks) == 2
    assert pool_of(core, REMOTE).counts()["free"] == 8
    core.release(owner)
    core.check_integrity()


@pytest.mark.parametrize(
    "options",
    [
        {"beside": (True, False, False, True)}, {"beside": (False, False, True, False)}, {"beside": (False,)},
        {"inclusive": (False, False, False, True)}, {"closed": (False, False, False, True)}, {"send": "evicted"},
    ],
)  # fmt: skip
def test_tiers_that_cannot_lie_beside_the_others_are_refused(options: dict[str, Any]) -> None:
    pools = [BlockPool(2), None, BlockPool(2), BlockPool(2)]
    with pytest.raises(InvalidArgument):
        Placement(RadixTree(1, 4), pools, **{"beside": (False, False, False, True), **options})


# ---- sends


def unsent(core: Placement, most: int = 256) -> list[tuple[list[int], int]]:
    """All paths that are handed out to be sent: their tokens, and the first block to send."""
    found = []
    while True:
        hold, first, node = own_unsent(core, most)
        if hold is None:
            return found
        found.append((core.path_tokens(node).tolist(), first))
        core.check_integrity()
        hold.release()


def test_committed_blocks_are_handed_out_once() -> None:
    core = make(send="all")
    owner = put(core, [1, 2])
    assert unsent(core) == [([1, 2], 0)]
    blocks = pool_of(core, 0).alloc(1)
    core.insert(owner, [3], blocks)
    assert unsent(core) == [([1, 2, 3], 2)]
    core.release(owner)
    core.acquire([1, 2, 3])
    assert unsent(core) == []


def test_reused_blocks_are_handed_out_at_their_second_use() -> None:
    core = make(send="reused")
    core.release(put(core, [1, 2]))
    assert unsent(core) == []
    core.release(core.acquire([1, 2])[0])
    assert unsent(core) == [([1, 2], 0)]


def test_blocks_that_came_from_the_store_are_not_sent_back() -> None:
    core = make(send="all")
    graft(core, [1, 2])
    owner, _ = core.acquire([1, 2])
    core.promote(owner)
    moves = core.take_moves()
    core.complete(moves["transfer"], np.ones(2, bool))
    core.settle(owner)
    core.insert(owner, [3], pool_of(core, 0).alloc(1))
    assert unsent(core) == [([1, 2, 3], 2)]


def test_a_cut_run_knows_which_part_was_sent() -> None:
    core = make(device=6, send="all")
    core.release(put(core, [1, 2, 3, 4]))
    hold, first, _ = own_unsent(core, 2)
    assert hold is not None
    assert (hold.num_blocks, first) == (2, 0)
    hold.release()
    assert unsent(core) == [([1, 2, 3, 4], 2)]
    core.release(put(core, [1, 2, 3, 9]))
    assert unsent(core) == [([1, 2, 3, 9], 3)]
    core.release(core.acquire([1, 2, 3, 4])[0])
    assert core.num_unsent == 0, "the lower part of the run that was cut is handed out again"


def test_what_was_not_sent_is_handed_out_with_its_next_use() -> None:
    core = make(send="all")
    core.release(put(core, [1, 2, 3]))
    hold, _, _ = own_unsent(core, 256)
    assert hold is not None
    core.not_sent(hold.handle, 1)
    hold.release()
    assert unsent(core) == []
    core.release(core.acquire([1, 2, 3])[0])
    assert unsent(core) == [([1, 2, 3], 1)]


def test_a_run_that_left_the_device_is_not_handed_out() -> None:
    core = make(device=2, disk=8, send="all", write="evicted")
    core.release(put(core, [1, 2]))
    core.reserve(2)
    moves = core.take_moves()
    core.complete(moves["transfer"], np.ones(len(moves), bool))
    assert core.match([1, 2])[0].tolist() == [int(Tier.DISK)] * 2
    assert unsent(core) == []
    assert core.stats()["sends_dropped"] == 1


def test_a_dropped_namespace_is_not_sent() -> None:
    core = make(send="all")
    name = core.tree.namespace(b"a")
    owner, _ = core.acquire([1], name)
    core.insert(owner, [1], pool_of(core, 0).alloc(1))
    core.drop_namespace(name)
    assert unsent(core) == []
    core.release(owner)
    core.check_integrity()


def test_wishes_are_bounded_and_the_oldest_is_given_up() -> None:
    core = make(device=1 << 17, send="all")
    for token in range((1 << 16) + 5):
        core.release(put(core, [token]))
    assert core.num_unsent == 1 << 16
    assert core.stats()["sends_dropped"] == 5
    hold, _, node = own_unsent(core, 1)
    assert hold is not None
    assert core.path_tokens(node).tolist() == [5]


def test_chain_keys_of_two_secrets_lie_side_by_side() -> None:
    core = make(device=8)
    hold = own(core, [1])
    hold.release()
    owner = put(core, [1, 2, 3, 4])
    node = core.node_of(owner)
    core.remember_keys(node, 0, [bytes([i]) * 32 for i in range(4)], 0)
    core.remember_keys(node, 0, [bytes([i + 100]) * 32 for i in range(4)], 1)
    core.release(owner)
    core.release(put(core, [1, 2, 9]))  # cuts the run
    owner, _ = core.acquire([1, 2, 3, 4])
    node = core.node_of(owner)
    core.remember_keys(node, 0, [bytes([i]) * 32 for i in range(4)], 0)
    core.remember_keys(node, 0, [bytes([i + 100]) * 32 for i in range(4)], 1)
    assert core.anchor(node, 4, 0) == (2, bytes([1]) * 32)
    assert core.anchor(node, 4, 1) == (2, bytes([101]) * 32)


@pytest.mark.parametrize(
    ("tokens", "keys", "table"),
    [
        ([1, 2], (3, 4), (8, 4)), ([1, 2], (2, 4), (8, 5)), ([1, 2], (2, 4), (7, 4)),
    ],
)  # fmt: skip
def test_a_graft_of_other_sizes_changes_nothing(
    tokens: list[int], keys: tuple[int, int], table: tuple[int, int]
) -> None:
    core = make()
    with pytest.raises(InvalidArgument):
        core.graft(tokens, np.zeros(keys, np.uint8), np.zeros(table, np.uint8))
    assert pool_of(core, REMOTE).counts()["free"] == 8
    assert core.match(tokens)[0].tolist() == []


def test_a_graft_takes_as_many_claims_as_there_are() -> None:
    core = make(claims=3)
    assert graft(core, [1, 2, 3, 4, 5]) == 3
    assert core.match([1, 2, 3, 4, 5])[0].tolist() == [REMOTE] * 3
    assert pool_of(core, REMOTE).counts()["free"] == 0
    core.check_integrity()

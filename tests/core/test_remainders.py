"""Partly filled blocks that the tree keeps for partial hits when their sequences end."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from pagedkv._core.block_pool import BlockPool
from pagedkv._core.block_table import BlockTable
from pagedkv._core.placement import Placement
from pagedkv._core.radix_tree import RadixTree
from pagedkv.core import NO_TOKEN as NONE

HOST = 1
Core = tuple[Placement, BlockTable]


def core(device: int = 8, **options: object) -> Core:
    placement = Placement(RadixTree(4, 2), [BlockPool(device), BlockPool(8)], **options)
    return placement, BlockTable(placement, 8)


def compute(table: BlockTable, tokens: Seq[int]) -> int:
    """A row of these tokens, all computed."""
    row, _ = table.open(tokens)
    table.step([row])
    table.copies_done()
    table.commit([row])
    return row


def keep(table: BlockTable, tokens: Seq[int]) -> None:
    table.release(compute(table, tokens), keep_remainder=True)


def partial(placement: Placement, tokens: Seq[int], *, below: bool = False) -> int:
    """Tokens behind the whole blocks that a partial hit would copy."""
    owner, num_blocks = placement.acquire(tokens)
    other, _, common = placement.partial(owner, tokens[4 * num_blocks :], below=below)
    for held in (owner, *([other] if other >= 0 else [])):
        placement.release(held)
    placement.check_integrity()
    return common


def leaves(placement: Placement) -> list[tuple[int, ...]]:
    """The tokens that the remainders hold."""
    nodes = placement.tree.dump().values()
    return sorted(tuple(t for t in node[2] if t != NONE) for node in nodes if NONE in node[2])


@pytest.mark.parametrize("begin", [[], [1, 2, 3, 4]])
@pytest.mark.parametrize("fill", [1, 2, 3])
def test_a_released_rows_last_tokens_serve_partial_hits(begin: list[int], fill: int) -> None:
    placement, table = core()
    tokens = [*begin, *range(5, 5 + fill)]
    keep(table, tokens)
    assert partial(placement, [*tokens, 50, 51, 52]) == fill
    assert partial(placement, [*tokens[:-1], 60]) == fill - 1
    assert partial(placement, [*begin, 70]) == 0
    assert leaves(placement) == [tuple(tokens[len(begin) :])]


def test_without_being_asked_nothing_of_it_is_kept() -> None:
    placement, table = core()
    table.release(compute(table, [1, 2, 3, 4, 5]))
    assert partial(placement, [1, 2, 3, 4, 5, 6]) == 0
    assert placement.pools[0].counts()["cached"] == 1


@pytest.mark.parametrize("tokens", [[5, 6, NONE, NONE], [5, 6, NONE, NONE, 7, 7, 7, 7]])
def test_a_prompt_of_the_tokens_that_stand_for_none_does_not_match_it(tokens: list[int]) -> None:
    placement, table = core()
    keep(table, [5, 6])
    owner, num_blocks = placement.acquire(tokens)
    assert num_blocks == 0, "half of the block was never computed"
    placement.release(owner)
    assert len(placement.match(tokens)[0]) == 0
    assert placement.match(tokens, partial=True)[2] == 2
    assert partial(placement, tokens) == 2
    owner, _ = placement.acquire([5, 6, 7])
    other, _, _ = placement.partial(owner, [5, 6, 7])  # so nothing drops it
    row = compute(table, tokens)
    assert table.info(row).num_committed == 0, "nor is it adopted"
    table.release(row)
    for held in (other, owner):
        placement.release(held)
    placement.check_integrity()


def test_a_computed_block_that_reads_like_one_joins_no_tree() -> None:
    placement, table = core()
    row = compute(table, [1, 2, 3, 4, 5, 6, 7, NONE, 8, 8, 8, 8])
    assert table.info(row).num_committed == 1
    table.release(row, keep_remainder=True)
    assert leaves(placement) == []
    placement.check_integrity()


def test_a_longer_block_takes_its_place() -> None:
    placement, table = core()
    keep(table, [1, 2, 3, 4, 5])
    keep(table, [1, 2, 3, 4, 5, 6])
    assert leaves(placement) == [(5, 6)]
    keep(table, [1, 2, 3, 4, 5])
    assert leaves(placement) == [(5, 6)], "the shorter one says nothing new"
    keep(table, [1, 2, 3, 4, 9])
    assert leaves(placement) == [(5, 6), (9,)]
    table.release(compute(table, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert leaves(placement) == [(9,)]
    assert placement.pools[0].counts()["cached"] == 3
    keep(table, [1, 2, 3, 4, 5, 6, 7])
    assert leaves(placement) == [(9,)], "a whole block has these tokens"


def test_one_that_is_held_stays_when_a_longer_block_comes() -> None:
    placement, table = core()
    keep(table, [1, 2, 3, 4, 5])
    owner, _ = placement.acquire([1, 2, 3, 4, 5, 6])
    other, block, common = placement.partial(owner, [5, 6])
    table.release(compute(table, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert leaves(placement) == [(5,)]
    assert common == 1
    assert placement.blocks_of(other)[-1] == block
    placement.release(other)
    placement.release(owner)
    placement.check_integrity()


def test_blocks_behind_it_in_the_tree_never_join_it() -> None:
    placement, table = core()
    keep(table, [1, 2, 3, 4, 5])
    for more in ([6, 7, 8], [16, 17, 18, 19, 20]):
        table.release(compute(table, [1, 2, 3, 4, 5, *more]), keep_remainder=True)
    keep(table, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert all(len(node[2]) == 4 for node in placement.tree.dump().values() if NONE in node[2])
    placement.check_integrity()


def moved(placement: Placement, ok: bool = True) -> None:
    moves = placement.take_moves()
    transfers = sorted({int(move["transfer"]) for move in moves})
    placement.complete(transfers, [ok] * len(transfers))


def test_it_goes_to_a_colder_tier_and_comes_back() -> None:
    placement, table = core()
    keep(table, [1, 2, 3, 4, 5, 6])
    placement.reserve(8)
    moved(placement)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    assert [node[2] for node in placement.tree.dump().values() if node[2]] == [(1, 2, 3, 4), (5, 6, NONE, NONE)]
    assert partial(placement, tokens) == 0, "it is not on the device"
    assert partial(placement, tokens, below=True) == 2
    owner, num_blocks = placement.acquire(tokens)
    other, block, _ = placement.partial(owner, tokens[4:], below=True)
    assert placement.tiers_of(other).tolist() == [HOST, HOST]
    assert placement.blocks_of(other)[-1] == block
    placement.promote(other)
    moved(placement)
    assert placement.settle(other) == num_blocks + 1 == 2
    assert placement.partial(owner, tokens[4:], below=True)[2] == 0
    for held in (other, owner):
        placement.release(held)
    assert partial(placement, tokens) == 2


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_restored_run_is_cut_before_it(num_blocks: int) -> None:
    placement, _ = core()
    pool = placement.pools[HOST]
    assert pool is not None
    ids = pool.alloc(num_blocks + 1)
    tokens = [*range(4 * num_blocks), 90, 91, NONE, NONE]
    assert placement.restore_forest(tokens, ids, [0, num_blocks + 1], [-1], [0], HOST).tolist() == [num_blocks + 1]
    placement.check_integrity()
    assert leaves(placement) == [(90, 91)]
    prompt = [*range(4 * num_blocks), 90, 91, 92]
    assert partial(placement, prompt, below=True) == 2
    owner, found = placement.acquire(tokens)
    assert found == num_blocks
    placement.release(owner)


def test_a_row_that_shares_its_last_block_keeps_nothing_and_the_last_one_does() -> None:
    placement, table = core()
    row = compute(table, [1, 2, 3, 4, 5])
    (fork,) = table.fork(row, 1)
    table.release(row, keep_remainder=True)
    assert leaves(placement) == []
    table.release(fork, keep_remainder=True)
    assert leaves(placement) == [(5,)]


def test_a_row_whose_copy_on_write_is_not_made_keeps_nothing() -> None:
    placement, table = core()
    row = compute(table, [1, 2, 3, 4, 5])
    (fork,) = table.fork(row, 1)
    table.append([fork], [6])
    assert len(table.step([fork]).copies) == 1
    table.release(row)
    table.release(fork, keep_remainder=True)
    assert leaves(placement) == []
    placement.check_integrity()


def test_within_a_quota_it_takes_the_room_of_colder_blocks_or_none() -> None:
    placement, table = core()
    placement.set_quota(0, 2)
    keep(table, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert leaves(placement) == []
    placement.check_integrity()


MANY = 300  # more siblings than are looked at one by one


def test_among_many_siblings_it_is_kept_once_found_and_given_back() -> None:
    placement = Placement(RadixTree(4, 2), [BlockPool(2 * MANY), BlockPool(8)])
    table = BlockTable(placement, 8)
    prompts = [[1, 2, 3, 4, 100 + i, 7] for i in range(MANY)]
    for _ in range(2):
        for tokens in prompts:
            keep(table, tokens)
        assert leaves(placement) == sorted(tuple(tokens[4:]) for tokens in prompts)
        placement.check_integrity()
    assert [partial(placement, [*tokens, 8, 9]) for tokens in prompts] == [2] * MANY
    keep(table, [*prompts[0], 8])
    assert leaves(placement)[0] == (100, 7, 8)
    assert len(leaves(placement)) == MANY, "it took the place of the shorter one"
    table.release(compute(table, [*prompts[1], 8, 9]))
    assert len(leaves(placement)) == MANY - 1, "a whole block, too"
    placement.check_integrity()


def test_of_several_that_a_longer_block_has_outgrown_none_is_left() -> None:
    placement, table = core(12)
    for fill in (1, 2, 3):
        row = compute(table, [1, 2, 3, 4, *range(5, 5 + fill)])
        table.release(row, keep_remainder=True)
        assert leaves(placement) == [tuple(range(5, 5 + fill))]

"""Forks, truncation, and copies of the table.

Forks share until they write, truncation gives back what it cut, and a copy of the table follows by its changes.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from pagedkv.core import BlockPool, BlockTable
from pagedkv.errors import InvalidArgument, OutOfBlocks, PagedKVError, WrongType
from tests.core.helpers import bare, cache, filled, finish, nothing_changes, single, sound, struct_of, tiered
from tests.core.kv_memory import Runtime

# ---- forks


def test_forks_share_every_block_until_they_write() -> None:
    table = bare()
    row = filled(table, [1, 2, 3, 4, 5, 6])
    forks = table.fork(row, 3)
    assert forks.dtype == np.int64
    for fork in forks.tolist():
        assert table.blocks(fork).tolist() == table.blocks(row).tolist()
        assert table.info(fork) == table.info(row)
    assert table.block_pool.refs(table.blocks(row)).tolist() == [4, 4]
    assert table.block_pool.counts()["live"] == 2
    sound(table)
    for fork in forks.tolist():
        table.release(fork)
    assert table.block_pool.refs(table.blocks(row)).tolist() == [1, 1]
    sound(table)


def test_whoever_writes_into_a_shared_block_gets_a_copy_first() -> None:
    runtime = Runtime(BlockPool(16), 4)
    row = runtime.open([1, 2, 3, 4, 5, 6])
    runtime.step([row])
    runtime.commit([row])
    forks = runtime.fork(row, 2)
    shared = int(runtime.table.blocks(row)[1])
    runtime.append([forks[0]], [7])
    step = runtime.step([forks[0]])
    assert step.copies.tolist() == [[shared, int(runtime.table.blocks(forks[0])[1])]]
    runtime.commit([forks[0]])
    runtime.check()
    runtime.append([row, forks[1]], [8, 9])
    assert len(runtime.step([row, forks[1]]).copies) == 2  # decided together: each sees the other
    runtime.commit([row, forks[1]])
    runtime.check()
    runtime.close()


def test_the_last_owner_of_a_shared_block_writes_into_it() -> None:
    runtime = Runtime(BlockPool(16), 4)
    row = runtime.open([1, 2])
    runtime.step([row])
    runtime.commit([row])
    (fork,) = runtime.fork(row)
    for one in (row, fork):
        runtime.append([one], [one])
        assert len(runtime.step([one]).copies) == (1 if one == row else 0)
        runtime.commit([one])
        runtime.check()
    runtime.close()


def test_the_source_of_a_copy_is_held_until_the_copy_is_made() -> None:
    table = bare(8)
    row = filled(table, [1, 2])
    fork = int(table.fork(row)[0])
    table.append([fork], [3])
    (source, target) = table.step([fork]).copies[0].tolist()
    table.release(row)
    sound(table)
    assert table.block_pool.refs([source, target]).tolist() == [1, 1]
    table.copies_done()
    assert table.block_pool.refs([source, target]).tolist() == [0, 1]
    table.copies_done()
    sound(table)


def test_a_fork_at_a_block_boundary_needs_no_copy() -> None:
    runtime = Runtime(BlockPool(16), 4)
    row = runtime.open([1, 2, 3, 4])
    runtime.step([row])
    runtime.commit([row])
    (fork,) = runtime.fork(row)
    runtime.append([row, fork], [5, 6])
    assert len(runtime.step([row, fork]).copies) == 0
    runtime.commit([row, fork])
    runtime.check()
    runtime.close()


def test_a_fork_over_the_tree_shares_the_committed_blocks_through_owners() -> None:
    _, pool, placement = single(4, 32)
    table = BlockTable(placement, 8)
    row = filled(table, list(range(10)))
    (fork,) = table.fork(row).tolist()
    assert pool.refs(table.blocks(row)).tolist() == [3, 3, 2]
    assert placement.stats()["owners"] == 2
    table.release(row)
    sound(table, placement)
    table.release(fork)
    assert (pool.counts()["live"], pool.counts()["cached"]) == (0, 2)
    sound(table, placement)


def test_a_copy_needs_a_block_and_without_one_nothing_changes() -> None:
    table = bare(1)
    row = filled(table, [1, 2])
    fork = int(table.fork(row)[0])
    table.append([row], [3])
    assert table.blocks_needed([row]) == 1
    with nothing_changes((table, [row, fork])), pytest.raises(OutOfBlocks):
        table.step([row])
    table.release(fork)
    assert table.blocks_needed([row]) == 0
    table.step([row])
    sound(table)


def test_blocks_ahead_of_what_is_computed_are_not_shared_by_a_fork() -> None:
    runtime = Runtime(BlockPool(32), 4)
    row = runtime.open([1, 2, 3])
    runtime.step([row], lookahead=4)
    runtime.commit([row])
    (fork,) = runtime.fork(row)
    runtime.extend(row, [5, 6, 7])
    runtime.extend(fork, [8, 9, 9])
    step = runtime.step([row, fork])
    assert len(set(step.slot_mapping.tolist())) == 6


def test_blocks_of_a_cancelled_step_are_not_shared_by_a_fork() -> None:
    runtime = Runtime(BlockPool(32), 4)
    row = runtime.open([1, 2, 3, 4, 5, 6, 7, 8])
    runtime.table.step([row])
    runtime.table.cancel([row])
    (fork,) = runtime.fork(row)
    step = runtime.step([row, fork])
    assert len(set(step.slot_mapping.tolist())) == 16


def test_a_row_in_a_step_is_not_forked() -> None:
    table = bare()
    row = table.open([1, 2])[0]
    table.step([row])
    with nothing_changes((table, [row])), pytest.raises(InvalidArgument, match="in a step"):
        table.fork(row)
    table.cancel([row])
    assert len(table.fork(row, 0)) == 0
    table.fork(row)
    sound(table)


@pytest.mark.parametrize("n", [-1, 9, 2**31, 1.0, None, "1", True])
def test_an_impossible_number_of_forks_changes_nothing(n: Any) -> None:
    table = bare()
    row = filled(table, [1])
    with nothing_changes((table, [row])), pytest.raises((InvalidArgument, WrongType)):
        table.fork(row, n)


def test_a_fork_never_pushes_a_count_past_31_bits() -> None:
    table = bare()
    row = filled(table, [1])
    refs = struct_of(table.block_pool).refs
    block = int(table.blocks(row)[0])
    refs[block] = 2**31 - 1
    try:
        with pytest.raises(PagedKVError):
            table.fork(row)
        assert refs[block] == 2**31 - 1
    finally:
        refs[block] = 1


# ---- truncation


@pytest.mark.parametrize("keep", range(11))
def test_truncating_gives_back_the_blocks_beyond(keep: int) -> None:
    table = bare()
    row = filled(table, list(range(10)))
    table.truncate(row, keep)
    assert table.tokens(row).tolist() == list(range(keep))
    assert table.info(row) == (keep, keep, -(-keep // 4), 0)
    assert table.block_pool.counts()["live"] == -(-keep // 4)
    sound(table)


@pytest.mark.parametrize("keep", range(11))
def test_truncating_into_the_tree_gives_up_the_block_that_is_cut(keep: int) -> None:
    _, pool, placement = single(4, 32)
    table = BlockTable(placement, 8)
    row = filled(table, list(range(10)))
    table.truncate(row, keep)
    whole = keep // 4 if keep < 8 else 2
    computed = keep if keep >= 8 else whole * 4
    assert table.info(row) == (keep, computed, whole + (keep > 8), whole)
    sound(table, placement)
    table.extend(row, [50] * 5)
    table.step([row])
    table.commit([row])
    sound(table, placement)
    assert placement.match(list(range(10)))[1].size == 2
    table.release(row)
    assert pool.counts()["live"] == 0
    sound(table, placement)


def test_rejected_drafts_are_cut_off_and_written_again() -> None:
    _, _, placement = single(4, 64)
    runtime = Runtime(placement, 4)
    row, rng = runtime.open([1, 2, 3]), Random(0)
    runtime.step([row], lookahead=3)
    runtime.commit([row])
    for _ in range(30):
        length = len(runtime.rows[row])
        runtime.extend(row, [rng.randint(0, 9) for _ in range(3)])
        runtime.step([row], lookahead=3)
        runtime.truncate(row, length + rng.randint(0, 3))  # before the commit: not all were accepted
        runtime.table.cancel([row])
        runtime.step([row])
        runtime.commit([row])
        runtime.check()
    runtime.close()


def test_a_row_cut_back_into_a_block_that_a_fork_holds_copies_it_before_writing() -> None:
    runtime = Runtime(BlockPool(32), 4)
    row = runtime.open(list(range(8)))
    runtime.step([row])
    runtime.commit([row])
    runtime.fork(row)
    runtime.append([row], [9])
    runtime.step([row])
    runtime.commit([row])
    runtime.truncate(row, 6)
    runtime.append([row], [10])
    runtime.step([row])
    runtime.commit([row])
    runtime.check()


@pytest.mark.parametrize("keep", range(5))
@pytest.mark.parametrize("demoted", [True, False])
def test_truncating_into_a_run_that_is_being_demoted_gives_up_the_whole_run(keep: int, demoted: bool) -> None:
    _, _, placement = tiered(1, (4, 8))
    table = BlockTable(placement, 8)
    cache(placement, [1, 2, 3, 4])
    assert placement.reserve(4) == 4  # the run is on its way to the host
    row, matched = table.open([1, 2, 3, 4, 5])
    assert matched == 4
    table.truncate(row, keep)
    assert table.tokens(row).tolist() == [1, 2, 3, 4][:keep]
    assert table.info(row) == ((keep, 0, 0, 0) if keep < 4 else (4, 4, 4, 4))
    sound(table, placement)
    finish(placement, demoted)
    sound(table, placement)
    table.release(row)
    sound(table, placement)


@pytest.mark.parametrize("num_tokens", [-1, 3, 2**31, 1.0, None])
def test_a_row_cannot_be_truncated_to_more_than_it_has(num_tokens: Any) -> None:
    table = bare()
    row = filled(table, [1, 2])
    with nothing_changes((table, [row])), pytest.raises((InvalidArgument, WrongType)):
        table.truncate(row, num_tokens)


@pytest.mark.parametrize(("keep", "kept"), [(1, 0), (2, 2), (3, 2)])
def test_of_two_runs_that_are_being_demoted_only_the_cut_one_is_given_up(keep: int, kept: int) -> None:
    _, _, placement = tiered(1, (8, 16), tree_max_run=2)
    cache(placement, [1, 2, 3, 4])
    placement.reserve(8)
    table = BlockTable(placement, 4)
    row, _ = table.open([1, 2, 3, 4, 5])
    table.truncate(row, keep)
    assert table.info(row) == (keep, kept, kept, kept)
    finish(placement)
    sound(table, placement)


# ---- everything at once


def _drive(runtime: Runtime, rng: Random, *, lookahead: bool, num_ops: int) -> None:
    rows = runtime.rows
    for _ in range(num_ops):
        what = rng.random()
        some = rng.sample(sorted(rows), rng.randint(1, len(rows))) if rows else []
        if len(rows) < 3 or (what < 0.12 and len(rows) < 9):
            runtime.open([rng.randint(0, 1) for _ in range(rng.randint(0, 14))])
        elif what < 0.2:
            runtime.release(some[0])
        elif what < 0.3 and len(rows) < 9:
            runtime.fork(some[0], rng.randint(0, 2))
        elif what < 0.38:
            runtime.truncate(some[0], rng.randint(0, len(rows[some[0]])))
        elif what < 0.5:
            runtime.extend(some[0], [rng.randint(0, 1) for _ in range(rng.randint(0, 5))])
        elif what < 0.6:
            runtime.append(some, [rng.randint(0, 1) for _ in some])
        else:
            left = [runtime.table.info(row).num_tokens - runtime.table.info(row).num_computed for row in some]
            q_lens = None if rng.random() < 0.5 else [rng.randint(0, n) for n in left]
            try:
                runtime.step(some, q_lens, rng.choice([0, 3]) if lookahead else 0)
            except OutOfBlocks:
                if len(rows) > 3:
                    runtime.release(some[0])
                continue
            if rng.random() < 0.8:
                runtime.commit(some)
            else:
                runtime.table.cancel(some)
        runtime.check()
    runtime.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("over_tree", [False, True])
def test_random_sequences_read_back_what_they_wrote(seed: int, lookahead: bool, over_tree: bool) -> None:
    rng = Random(f"{seed}{lookahead}{over_tree}")
    block_size, num_blocks = rng.choice([1, 2, 3, 4]), rng.choice([24, 60])
    source = single(block_size, num_blocks)[2] if over_tree else BlockPool(num_blocks)
    _drive(Runtime(source, block_size), rng, lookahead=lookahead, num_ops=250)

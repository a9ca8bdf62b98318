"""BlockTable: rows, steps and their arrays.

What is scheduled, committed and cancelled; a refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from pagedkv.core import BlockPool, BlockTable, StepArrays
from pagedkv.errors import DoubleRelease, InvalidArgument, StaleHandle, WrongType
from tests.core.helpers import (
    bare,
    cache,
    filled,
    make_room,
    nothing_changes,
    remember,
    single,
    sound,
    tiered,
)
from tests.core.kv_memory import Runtime

# ---- steps


def test_a_prompt_is_scheduled_whole_and_computed_once_committed() -> None:
    table = bare()
    row, cached = table.open([1, 2, 3, 4, 5, 6])
    assert (cached, table.info(row)) == (0, (6, 0, 0, 0))
    step = table.step([row])
    assert step.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert step.positions.tolist() == list(range(6))
    assert step.seq_lens.tolist() == [6]
    assert step.q_indptr.tolist() == [0, 6]
    assert step.block_tables.tolist() == [table.blocks(row).tolist()]
    first, second = table.blocks(row).tolist()
    assert step.slot_mapping.tolist() == [*range(4 * first, 4 * first + 4), 4 * second, 4 * second + 1]
    assert len(step.copies) == 0
    assert table.info(row) == (6, 0, 2, 0)
    table.commit([row])
    assert table.info(row) == (6, 6, 2, 0)
    sound(table)


def test_the_arrays_have_their_documented_types() -> None:
    table = bare()
    step = table.step([filled(table, [1]), table.open([1, 2])[0]])
    types = {name: getattr(step, name).dtype.name for name in
             ("block_tables", "seq_lens", "q_indptr", "positions", "tokens", "slot_mapping", "copies")}  # fmt: skip
    assert types == dict.fromkeys(types, "int32") | {"slot_mapping": "int64"}
    assert step.copies.shape == (0, 2)
    assert all(array.dtype == np.int32 for array in step.to_csr())


def test_what_writes_and_reads_go_by_is_read_only() -> None:
    table = bare()
    step = table.step([table.open([1, 2])[0]])
    names = ("block_tables", "seq_lens", "q_indptr", "positions", "slot_mapping")
    assert not any(getattr(step, name).flags.writeable for name in names)
    assert step.tokens.flags.writeable


def test_rows_are_in_their_step_until_one_is_stepped_cut_or_released() -> None:
    table = bare()
    rows = [table.open(tokens)[0] for tokens in ([1, 2], [3])]
    step = table.step(rows)
    assert table.are_in(rows, step.number)
    table.commit(rows)
    assert not table.are_in(rows, step.number)
    step = table.step(rows)
    table.truncate(rows[0], 1)
    assert not table.are_in(rows, step.number)
    assert table.are_in(rows[1:], step.number)
    table.cancel(rows[1:])
    assert not table.are_in(rows[1:], step.number)
    step = table.step(rows)
    (fork,) = table.fork(table.open([5])[0], 1)
    assert not table.are_in([fork], step.number), "a row that was never stepped"
    table.release(rows[1])
    with pytest.raises(StaleHandle):
        table.are_in(rows, step.number)
    sound(table)


def test_a_step_is_untouched_until_a_row_of_its_table_changes_hands() -> None:
    table = bare()
    rows = [table.open(tokens)[0] for tokens in ([1, 2], [3], [4])]

    def begun() -> StepArrays:
        step = table.step(rows[:2])
        table.append(rows[2:], [5])
        assert step.is_untouched, "what changes no step is none of its business"
        return step

    changes: dict[str, Callable[[], object]] = {
        "another step": lambda: table.step(rows[2:]),
        "a commit": lambda: table.commit(rows[2:]),
        "its own commit": lambda: table.commit(rows[:2]),
        "a cut": lambda: table.truncate(rows[0], 1),
        "a step that is cancelled": lambda: table.cancel(rows[:1]),
        "a release": lambda: table.release(rows[0]),
    }
    for what, change in changes.items():
        step = begun()
        change()
        assert not step.is_untouched, what
    sound(table)


def test_a_batch_of_uneven_rows_is_padded_with_minus_one() -> None:
    table = bare()
    rows = [table.open(tokens)[0] for tokens in ([1] * 9, [2], [], [3] * 4)]
    step = table.step(rows)
    assert step.q_indptr.tolist() == [0, 9, 10, 10, 14]
    assert step.seq_lens.tolist() == [9, 1, 0, 4]
    assert (step.block_tables >= 0).sum(axis=1).tolist() == [3, 1, 0, 1]
    assert (step.block_tables[1:, 1:] == -1).all()
    indptr, indices, last = step.to_csr()
    assert indptr.tolist() == [0, 3, 4, 4, 5]
    assert indices.tolist() == [block for row in rows for block in table.blocks(row).tolist()]
    assert last.tolist() == [1, 1, 0, 4]


def test_a_short_row_is_padded_with_minus_one_beside_a_long_one_also_after_a_cut() -> None:
    table = bare(64)
    long, short, cut = (table.open([1] * num_tokens)[0] for num_tokens in (80, 1, 80))
    rows = [long, short, cut]
    assert (table.step(rows).block_tables >= 0).sum(axis=1).tolist() == [20, 1, 20]
    table.commit(rows)
    table.truncate(cut, 3)
    tables = table.step(rows).block_tables
    assert (tables >= 0).sum(axis=1).tolist() == [20, 1, 1]
    assert (tables[1:, 1:] == -1).all()
    assert tables[:, 0].tolist() == [table.blocks(row)[0] for row in rows]
    sound(table)


def test_no_rows_make_an_empty_step() -> None:
    table = bare()
    step = table.step([])
    assert (len(step.tokens), len(step.seq_lens), step.q_indptr.tolist()) == (0, 0, [0])
    assert [array.tolist() for array in step.to_csr()] == [[0], [], []]
    assert table.blocks_needed([]) == 0
    assert table.commit([]) == 0
    table.append([], [])
    table.cancel([])


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7, 16, 256])
def test_chunked_prefill_and_decode_read_back_what_was_written(block_size: int) -> None:
    runtime = Runtime(BlockPool(600), block_size)
    rows = [runtime.open(list(range(n))) for n in (1, block_size - 1, block_size, block_size + 1, 300)]
    rng = Random(block_size)
    while any(runtime.table.info(row).num_tokens > runtime.table.info(row).num_computed for row in rows):
        left = [runtime.table.info(row).num_tokens - runtime.table.info(row).num_computed for row in rows]
        runtime.step(rows, [rng.randint(0, n) for n in left])
        runtime.commit(rows)
        runtime.check()
    for token in range(20):
        runtime.append(rows, [token] * len(rows))
        runtime.step(rows)
        runtime.commit(rows)
    runtime.check()
    for token in range(20):
        runtime.advance(rows, [token] * len(rows))
    runtime.commit(rows)
    runtime.check()
    runtime.close()


def test_a_commit_of_a_step_that_is_over_commits_nothing() -> None:
    table = bare()
    rows = [table.open([1, 2, 3])[0], table.open([4])[0]]
    first = table.step(rows)
    again = table.step(rows[:1])
    assert again.number > first.number > 0
    before = [table.info(row) for row in rows]
    for number in (first.number, first.number - 1 or 99):
        with pytest.raises(StaleHandle, match="stepped again"):
            table.commit(rows, number)
    assert [table.info(row) for row in rows] == before
    table.commit(rows[1:], first.number)
    table.commit(rows[:1], again.number)
    assert [table.info(row).num_computed for row in rows] == [3, 1]
    for wrong in (0, -1, 1.5, "1"):
        with pytest.raises((InvalidArgument, WrongType)):
            table.commit(rows, wrong)  # type: ignore[arg-type]
    sound(table)


def test_a_step_that_is_over_cancels_no_other_step() -> None:
    table = bare()
    rows = [table.open([1, 2, 3])[0], table.open([4])[0]]
    first = table.step(rows)
    again = table.step(rows[:1])
    table.cancel(rows, first.number)
    assert table.are_in(rows[:1], again.number), "another step has scheduled it since"
    assert not table.are_in(rows[1:], first.number)
    table.commit(rows[:1], again.number)
    assert [table.info(row).num_computed for row in rows] == [3, 0]
    for wrong in (0, -1, 1.5, "1"):
        with pytest.raises((InvalidArgument, WrongType)):
            table.cancel(rows, wrong)  # type: ignore[arg-type]
    sound(table)


def test_lookahead_blocks_are_there_for_the_tokens_that_follow() -> None:
    table = bare()
    row, _ = table.open([1, 2, 3])
    assert table.blocks_needed([row], lookahead=6) == 3
    step = table.step([row], lookahead=6)
    assert step.seq_lens.tolist() == [3]
    assert step.block_tables.shape == (1, 3)
    assert step.to_csr()[0].tolist() == [0, 1]
    table.commit([row])
    table.extend(row, [4, 5, 6, 7, 8, 9])
    assert table.blocks_needed([row]) == 0
    table.step([row])
    table.commit([row])
    assert table.info(row) == (9, 9, 3, 0)
    sound(table)


def test_a_cancelled_step_can_be_built_again_in_the_same_blocks() -> None:
    table = bare()
    row, _ = table.open([1, 2, 3, 4, 5])
    first = table.step([row])
    table.cancel([row])
    assert table.commit([row]) == 0
    assert table.info(row) == (5, 0, 2, 0)
    again = table.step([row])
    assert again.slot_mapping.tolist() == first.slot_mapping.tolist()
    table.commit([row])
    assert table.info(row) == (5, 5, 2, 0)
    sound(table)


def test_tokens_appended_during_a_step_are_left_for_the_next() -> None:
    table = bare()
    row, _ = table.open([1, 2])
    table.step([row])
    table.extend(row, [3, 4])
    table.commit([row])
    assert table.info(row)[:2] == (4, 2)
    assert table.step([row]).tokens.tolist() == [3, 4]


def test_needed_blocks_are_what_a_step_takes() -> None:
    rng = Random(0)
    table = bare(200, 4, 8)
    rows = [table.open([0] * rng.randint(0, 20))[0] for _ in range(8)]
    for _ in range(60):
        left = [table.info(row).num_tokens - table.info(row).num_computed for row in rows]
        q_lens = [rng.randint(0, n) for n in left]
        ahead = rng.choice([0, 0, 5])
        needed, free = table.blocks_needed(rows, q_lens, ahead), table.block_pool.num_free
        table.step(rows, q_lens, ahead)
        assert free - table.block_pool.num_free == needed
        table.commit(rows)
        table.append(rows, [1] * 8)
    sound(table)


def test_a_wide_table_grows_and_keeps_what_it_has() -> None:
    runtime = Runtime(BlockPool(600), 1)
    rows = [runtime.open([3, 1, 4]), runtime.open([])]
    runtime.step(rows)
    runtime.commit(rows)
    for n in (64, 65, 130, 200):
        runtime.extend(rows[1], list(range(n - len(runtime.rows[rows[1]]))))
        runtime.step(rows)
        runtime.commit(rows)
        runtime.check()
    runtime.close()


# ---- over the prefix tree


def test_a_prompt_starts_where_the_cache_ends_and_leaves_one_token_to_compute() -> None:
    _, _, placement = single(4, 32)
    table = BlockTable(placement, 8)
    row = filled(table, list(range(12)))
    assert table.info(row) == (12, 12, 3, 3)
    for n, leave, expected in ((12, 1, 8), (13, 1, 12), (12, 0, 12), (12, 9, 0), (3, 0, 0)):
        assert table.open(list(range(n)), leave=leave)[1] == expected
    assert table.open([9, *range(1, 12)])[1] == 0
    sound(table, placement)


def test_two_rows_with_the_same_prompt_end_with_the_same_blocks() -> None:
    _, pool, placement = single(4, 32)
    table = BlockTable(placement, 8)
    rows = [table.open(list(range(10)))[0] for _ in range(2)]
    table.step(rows)
    assert table.commit(rows) == 4
    a, b = (table.blocks(row).tolist() for row in rows)
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert pool.counts()["live"] == 4
    sound(table, placement)
    for row in rows:
        table.release(row)
    assert (pool.counts()["live"], pool.counts()["cached"]) == (0, 2)
    sound(table, placement)


def test_a_namespace_of_its_own_shares_nothing() -> None:
    tree, _, placement = single(4, 32)
    table = BlockTable(placement, 8)
    filled(table, list(range(8)))
    assert table.open(list(range(9)), tree.namespace(b"other"))[1] == 0
    assert table.open(list(range(9)))[1] == 8


def test_a_settled_owner_is_taken_over() -> None:
    _, pool, placement = single(4, 32)
    cache(placement, list(range(8)))
    owner, _ = placement.acquire(list(range(9)))
    table = BlockTable(placement, 8)
    row, cached = table.open(list(range(9)), owner=owner)
    assert cached == 8
    table.release(row)
    assert pool.counts()["live"] == 0
    sound(table, placement)


@pytest.mark.parametrize(("leave", "cached"), [(None, 8), (0, 12), (1, 8), (4, 8), (5, 4), (12, 0), (99, 0)])
def test_an_owner_of_all_tokens_leaves_some_to_compute(leave: int | None, cached: int) -> None:
    _, pool, placement = single(4, 32)
    table, prompt = BlockTable(placement, 8), list(range(12))
    cache(placement, prompt)
    owner, _ = placement.acquire(prompt)
    assert len(placement.blocks_of(owner)) == 3
    options = {} if leave is None else {"leave": leave}
    row, found = table.open(prompt, owner=owner, **options)
    assert found == cached == table.info(row).num_computed
    assert len(table.step([row]).slot_mapping) == 12 - cached, "its step computes the rest"
    sound(table, placement)
    table.release(row)
    assert pool.counts()["live"] == 0
    assert table.open(prompt, leave=0)[1] == 12, "what it let go of stays cached"


def test_an_owner_of_some_tokens_keeps_what_leaves_enough() -> None:
    _, _, placement = single(4, 32)
    table = BlockTable(placement, 8)
    owner = remember(placement, list(range(8)))
    assert table.open(list(range(12)), owner=owner, leave=4)[1] == 8
    sound(table, placement)


def test_an_owner_that_was_taken_over_is_no_longer_the_callers_to_release() -> None:
    _, _, placement = single(4, 32)
    table = BlockTable(placement, 8)
    owner = remember(placement, list(range(8)))
    row, _ = table.open(list(range(9)), owner=owner)
    with pytest.raises(DoubleRelease):
        placement.release(owner)
    sound(table, placement)
    table.release(row)
    sound(table, placement)


def test_an_owner_of_other_tokens_is_refused() -> None:
    _, _, placement = single(4, 32)
    table = BlockTable(placement, 8)
    owner = remember(placement, [1, 2, 3, 4])
    with nothing_changes((table, []), placement), pytest.raises(InvalidArgument):
        table.open([9, 9, 9, 9, 9], owner=owner)


def test_an_owner_that_cannot_be_taken_over_stays_the_callers() -> None:
    _, _, placement = tiered(4, (8, 8))
    table = BlockTable(placement, 2)
    owner = remember(placement, list(range(8)))
    with nothing_changes((table, []), placement):
        with pytest.raises(InvalidArgument):
            table.open(list(range(7)), owner=owner)  # longer than the prompt
        with pytest.raises(StaleHandle):
            table.open(list(range(9)), owner=owner + 1)
        with pytest.raises(WrongType):
            table.open(list(range(9)), owner="0")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            bare().open([1], owner=owner)
    placement.release(owner)
    make_room(placement, 8)
    owner, _ = placement.acquire(list(range(8)))
    with nothing_changes((table, []), placement), pytest.raises(InvalidArgument):
        table.open(list(range(9)), owner=owner)  # below the device
    placement.release(owner)
    assert table.open(list(range(9)))[1] == 0
    sound(table, placement)


def test_a_step_over_one_tier_evicts_what_it_needs() -> None:
    _, pool, placement = single(4, 4)
    table = BlockTable(placement, 4)
    table.release(filled(table, list(range(16))))
    row = filled(table, [7] * 9)
    assert (pool.counts()["live"], pool.counts()["cached"]) == (3, 1)
    table.append([row], [7])
    table.step([row])
    sound(table, placement)


def test_a_seeded_block_counts_the_tokens_about_to_be_copied() -> None:
    _, _, placement = single(4, 8)
    table = BlockTable(placement, 4)
    filled(table, [1, 2, 3, 4, 5, 6, 7, 8])
    row, cached = table.open([1, 2, 3, 4, 5, 6, 0, 0])
    assert cached == 4
    block = table.seed(row, 2)
    assert table.info(row) == (8, 6, 2, 1)
    assert table.blocks(row).tolist()[1] == block
    with nothing_changes((table, [row])):
        assert table.seed(row, 1) == -1  # not at a block's start
    step = table.step([row])
    assert step.tokens.tolist() == [0, 0]
    assert step.slot_mapping.tolist() == [4 * block + 2, 4 * block + 3]
    table.commit([row])
    other, _ = table.open([1, 2, 3, 4, 5])
    with nothing_changes((table, [row, other])):
        assert table.seed(other, 2) == -1  # more than it has tokens
        for wrong in (0, 5, -1, 1.0, None):
            with pytest.raises((InvalidArgument, WrongType)):
                table.seed(other, wrong)  # type: ignore[arg-type]
    sound(table, placement)


def test_retention_of_a_row_holds_for_what_it_commits_later() -> None:
    _, _, placement = single(1, 8)
    table = BlockTable(placement, 4)
    row, _ = table.open([1, 2])
    table.retain(row, 90)
    table.step([row])
    table.commit([row])
    assert {node["priority"] for node in placement.dump().values()} == {90}
    with nothing_changes((table, [row])):
        for wrong in (-1, 101, None, 1.5):
            with pytest.raises((InvalidArgument, WrongType)):
                table.retain(row, wrong)  # type: ignore[arg-type]
    sound(table, placement)



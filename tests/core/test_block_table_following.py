"""Rows that follow others: a step computes a block once for all rows that need it."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from pagedkv.core import BlockPool, BlockTable, Placement
from pagedkv.errors import InvalidArgument, StaleHandle
from tests.core.helpers import cache, cached_prefixes, finish, nothing_changes, single, sound, tiered
from tests.core.kv_memory import Runtime

PREFIX = list(range(10, 23))  # three whole blocks of 4 tokens, and one token


def herd(num_rows: int = 3, num_blocks: int = 40, **options: Any) -> tuple[Runtime, list[int]]:
    """Rows that have PREFIX in common and a token of their own, none of it computed."""
    _, _, placement = single(4, num_blocks, **options)
    runtime = Runtime(placement, 4)
    return runtime, [runtime.open([*PREFIX, 100 + i]) for i in range(num_rows)]


def behind_the_first(num_rows: int, num_blocks: int = 3) -> list[tuple[int, int, int]]:
    return [(i, 0, num_blocks) for i in range(1, num_rows)]


def test_followers_compute_only_what_their_leader_does_not_and_all_is_cached() -> None:
    runtime, rows = herd(3)
    follow = behind_the_first(3)
    assert runtime.table.blocks_needed(rows, None, 0, follow) == 6  # of 12 without sharing
    step = runtime.step(rows, None, 0, follow)
    assert step.q_indptr.tolist() == [0, 14, 16, 18]
    assert step.seq_lens.tolist() == [14, 14, 14]
    assert step.num_new_blocks == 6
    shared = step.block_tables[:, :3]
    assert (shared == shared[0]).all()
    assert len(np.unique(step.block_tables[:, 3])) == 3
    assert runtime.table.block_pool.refs(shared[0]).tolist() == [1, 1, 1], "followers hold no reference"
    assert runtime.commit(rows) == 9
    assert [runtime.table.info(row) for row in rows] == [(14, 14, 4, 3)] * 3
    assert cached_prefixes(runtime.placement.tree) == {tuple(PREFIX[:n]) for n in (4, 8, 12)}
    runtime.check()
    runtime.close()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_leaders_are_committed_first_whatever_the_order_of_the_rows(order: list[int]) -> None:
    runtime, rows = herd(3)
    runtime.step(rows, None, 0, behind_the_first(3))
    runtime.commit([rows[i] for i in order])
    assert [runtime.table.info(row) for row in rows] == [(14, 14, 4, 3)] * 3
    runtime.check()
    runtime.close()


def test_a_follower_without_its_leader_is_not_committed_and_nothing_changes() -> None:
    runtime, rows = herd(3)
    runtime.step(rows, None, 0, behind_the_first(3))
    with nothing_changes((runtime.table, rows)), pytest.raises(InvalidArgument, match="is not committed"):
        runtime.commit(rows[1:])
    assert runtime.commit(rows[:1]) == 9  # its own blocks, and those that the others take of it now
    sound(runtime.table)
    runtime.commit(rows[1:])
    assert [runtime.table.info(row).num_computed for row in rows] == [14, 14, 14]
    runtime.check()
    runtime.close()


def test_a_row_twice_in_a_commit_with_followers_is_refused() -> None:
    runtime, rows = herd(2)
    runtime.step(rows, None, 0, behind_the_first(2))
    with nothing_changes((runtime.table, rows)), pytest.raises(InvalidArgument, match="twice"):
        runtime.commit([*rows, rows[0]])
    runtime.commit(rows)
    runtime.close()


def test_a_cancelled_step_leaves_followers_as_they_were() -> None:
    runtime, rows = herd(3)
    before = runtime.table.block_pool.counts()["free"]
    step = runtime.step(rows, None, 0, behind_the_first(3))
    runtime.cancel(step, rows)
    assert [runtime.table.info(row) for row in rows] == [(14, 0, 4, 0), (14, 0, 0, 0), (14, 0, 0, 0)]
    assert runtime.table.block_pool.counts()["free"] == before - 4  # the leader keeps its blocks, as ever
    runtime.check()
    runtime.step(rows[::-1], None, 0, behind_the_first(3))  # another one leads
    runtime.commit(rows)
    runtime.check()
    runtime.close()


@pytest.mark.parametrize("end", ["release", "truncate", "cancel", "step"])
@pytest.mark.parametrize("who", [0, 1])
def test_whatever_ends_a_leader_or_a_follower_takes_followers_out_of_the_step(end: str, who: int) -> None:
    runtime, rows = herd(3)
    step = runtime.step(rows, None, 0, behind_the_first(3))
    free = runtime.table.block_pool.counts()["free"]
    if end == "release":
        runtime.release(rows[who])
    elif end == "truncate":
        runtime.truncate(rows[who], 5)
    elif end == "cancel":
        runtime.table.cancel([rows[who]])
    else:
        runtime.step([rows[who]])
    sound(runtime.table)
    gone = range(3) if who == 0 else [1]
    for i in gone:
        if i != who:
            assert runtime.table.info(rows[i]) == (14, 0, 0, 0)
            assert not runtime.table.are_in([rows[i]], step.number)
    assert not step.is_untouched
    assert runtime.table.block_pool.counts()["free"] >= free or end == "step"
    with pytest.raises(StaleHandle):
        runtime.table.commit(rows, step.number)
    for row in list(runtime.rows):
        runtime.release(row)
    assert runtime.table.block_pool.counts()["live"] == 0
    sound(runtime.table, runtime.placement)


def test_a_follower_can_be_followed_and_goes_before_its_followers() -> None:
    _, _, placement = single(4, 40)
    runtime = Runtime(placement, 4)
    texts = [[*range(8), 90, 91], [*range(16), 90, 91], [*range(16), 70, 71]]
    rows = [runtime.open(text) for text in texts]
    with pytest.raises(InvalidArgument, match="put that first"):
        runtime.table.step(rows, None, 0, [(2, 1, 4), (1, 0, 2)])
    step = runtime.step(rows, None, 0, [(1, 0, 2), (2, 1, 4)])
    assert np.diff(step.q_indptr).tolist() == [10, 10, 2]
    runtime.commit(rows[::-1])
    assert [runtime.table.info(row).num_committed for row in rows] == [2, 4, 4]
    runtime.check()
    runtime.close()


def test_a_leader_that_goes_takes_followers_of_followers_with_it() -> None:
    runtime, rows = herd(3)
    runtime.step(rows, None, 0, [(1, 0, 2), (2, 1, 3)])
    runtime.release(rows[0])
    assert [runtime.table.info(row) for row in rows[1:]] == [(14, 0, 0, 0)] * 2
    runtime.close()


def test_a_follower_may_leave_its_leader_in_the_middle_of_a_run() -> None:
    _, _, placement = single(4, 40)
    runtime = Runtime(placement, 4)
    rows = [runtime.open(list(range(24))), runtime.open([*range(9), 70, 71, 72, 73])]
    assert runtime.table.shareable(rows[1], rows[:1]).tolist() == [2]
    refused(runtime.table, rows, [(1, 0, 3)])
    runtime.step(rows, None, 0, [(1, 0, 2)])
    runtime.commit(rows)
    assert [runtime.table.info(row).num_committed for row in rows] == [6, 3]
    runtime.check()
    runtime.close()


def test_a_follower_drops_what_it_had_copied_of_its_next_block() -> None:
    runtime, rows = herd(2)
    seeded = runtime.table.seed(rows[1], 2)
    runtime.memory.update({seeded * 4 + i: tuple(PREFIX[: i + 1]) for i in range(2)})
    assert runtime.table.info(rows[1]) == (14, 2, 1, 0)
    assert runtime.table.shareable(rows[1], rows).tolist() == [3, 0]
    runtime.step(rows, None, 0, behind_the_first(2))
    runtime.commit(rows)
    assert runtime.table.info(rows[1]) == (14, 14, 4, 3)
    runtime.check()
    runtime.close()


def test_followers_of_a_chunk_go_on_with_the_next_one() -> None:
    runtime, rows = herd(2)
    runtime.step(rows, [9, 1], 0, behind_the_first(2, 2))
    runtime.commit(rows)
    assert [runtime.table.info(row).num_computed for row in rows] == [9, 9]
    assert runtime.table.shareable(rows[1], rows[:1]).tolist() == [3], "its unfinished block is its own and is dropped"
    runtime.step(rows, [5, 2], 0, behind_the_first(2))
    runtime.commit(rows)
    assert [runtime.table.info(row).num_committed for row in rows] == [3, 3]
    runtime.check()
    runtime.close()


def test_rows_take_references_on_blocks_that_the_tree_refuses() -> None:
    runtime, rows = herd(3)
    runtime.placement.set_quota(0, 2)
    runtime.step(rows, [9, 1, 1], 0, behind_the_first(3, 2))
    runtime.commit(rows)
    assert [runtime.table.info(row) for row in rows] == [(14, 9, 3, 2)] * 3
    runtime.step(rows, [5, 2, 2], 0, behind_the_first(3))
    runtime.commit(rows)
    assert [runtime.table.info(row) for row in rows] == [(14, 14, 4, 2)] * 3
    third = runtime.table.blocks(rows[0])[2]
    assert all(runtime.table.blocks(row)[2] == third for row in rows)
    assert runtime.table.block_pool.refs([third]).tolist() == [3]
    runtime.check()
    runtime.release(rows[0])
    runtime.check()
    runtime.close()


def test_rows_of_a_dropped_namespace_share_and_are_not_cached() -> None:
    runtime, rows = herd(2)
    runtime.placement.drop_namespace(0)
    runtime.step(rows, [9, 1], 0, behind_the_first(2, 2))
    runtime.commit(rows)
    runtime.step(rows, [5, 2], 0, behind_the_first(2))  # both hold the same blocks, which the tree refused
    runtime.commit(rows)
    assert [runtime.table.info(row) for row in rows] == [(14, 14, 4, 0)] * 2
    assert runtime.table.blocks(rows[0])[:3].tolist() == runtime.table.blocks(rows[1])[:3].tolist()
    runtime.check()
    runtime.close()


def test_a_table_without_a_tree_shares_by_references() -> None:
    runtime = Runtime(BlockPool(20), 4)
    rows = [runtime.open([*PREFIX, 100 + i]) for i in range(2)]
    runtime.step(rows, None, 0, behind_the_first(2))
    runtime.commit(rows)
    assert runtime.table.block_pool.refs(runtime.table.blocks(rows[1])).tolist() == [2, 2, 2, 1]
    runtime.check()
    runtime.close()


def test_a_leader_that_finds_its_blocks_in_the_tree_gives_those_to_its_followers() -> None:
    runtime, rows = herd(3)
    step = runtime.step(rows[:2], None, 0, behind_the_first(2))
    runtime.step(rows[2:])
    runtime.commit(rows[2:])
    runtime.table.commit(rows[:2], step.number)
    first = runtime.table.blocks(rows[2])[:3].tolist()
    assert all(runtime.table.blocks(row)[:3].tolist() == first for row in rows[:2])
    runtime.check()
    runtime.close()


# ---- refusals


def refused(table: BlockTable, rows: list[int], follow: Any, q_lens: Any = None, match: str = "cannot follow") -> None:
    with nothing_changes((table, rows)), pytest.raises(InvalidArgument, match=match):
        table.step(rows, q_lens, 0, follow)


def test_a_row_follows_no_further_than_whole_blocks_of_equal_tokens_that_the_leader_writes() -> None:
    runtime, rows = herd(2)
    table = runtime.table
    refused(table, rows, [(1, 0, 4)])  # the fourth block differs
    refused(table, rows, [(1, 0, 3)], [11, 1])  # the leader ends within the third
    refused(table, rows, [(1, 0, 1)], [0, 1])  # it computes nothing
    refused(table, rows, [(1, 0, 0)])  # nothing to follow
    refused(table, rows, [(1, 0, -1)])
    for q_lens in ([14, 0], [14, 3]):  # nothing left, more than is left
        refused(table, rows, [(1, 0, 3)], q_lens, "q_lens")
    runtime.close()


def test_a_row_does_not_follow_into_its_last_token() -> None:
    _, _, placement = single(4, 40)
    runtime = Runtime(placement, 4)
    rows = [runtime.open(PREFIX[:12]) for _ in range(2)]
    assert runtime.table.shareable(rows[1], rows).tolist() == [2, 0]
    refused(runtime.table, rows, [(1, 0, 3)], None, "q_lens")
    runtime.step(rows, None, 0, [(1, 0, 2)])
    runtime.commit(rows)
    assert len(cached_prefixes(placement.tree)) == 3
    runtime.check()
    runtime.close()


def test_a_leader_that_computes_nothing_in_the_step_is_not_followed() -> None:
    """It could be forked in the middle of the step, and its blocks change."""
    runtime = Runtime(BlockPool(20), 4)
    rows = [runtime.open([*PREFIX, 100 + i]) for i in range(2)]
    runtime.step(rows[:1], [9])
    runtime.commit(rows[:1])
    refused(runtime.table, rows, [(1, 0, 2)], [0, 1])
    runtime.step(rows, [1, 1], 0, [(1, 0, 2)])
    runtime.commit(rows)
    runtime.check()
    runtime.close()


def test_rows_of_two_namespaces_never_share() -> None:
    tree, _, placement = single(4, 40)
    table = BlockTable(placement, 8)
    other = tree.namespace(b"other")
    rows = [table.open(PREFIX)[0], table.open(PREFIX, other)[0]]
    assert table.shareable(rows[1], rows).tolist() == [0, 0]
    refused(table, rows, [(1, 0, 2)])


def test_rows_of_other_beginnings_do_not_share_what_follows() -> None:
    """Both have committed their first block, and it is not the same."""
    _, _, placement = single(4, 40)
    runtime = Runtime(placement, 4)
    rows = [runtime.open([i, 1, 2, 3, *PREFIX]) for i in range(2)]
    runtime.step(rows, [4, 4])
    runtime.commit(rows)
    assert runtime.table.shareable(rows[1], rows[:1]).tolist() == [0]
    refused(runtime.table, rows, [(1, 0, 4)])
    runtime.close()


def test_a_row_behind_what_another_has_committed_goes_through_the_tree() -> None:
    runtime, rows = herd(2)
    runtime.step(rows[:1], [9])
    runtime.commit(rows[:1])
    assert runtime.table.shareable(rows[1], rows[:1]).tolist() == [0]
    refused(runtime.table, rows, [(1, 0, 3)])
    assert runtime.table.catch_up(rows) == 2
    assert runtime.table.shareable(rows[1], rows[:1]).tolist() == [3]
    runtime.step(rows, None, 0, [(1, 0, 3)])
    runtime.commit(rows)
    runtime.check()
    runtime.close()


def test_rows_that_hold_different_blocks_which_the_tree_refused_do_not_share() -> None:
    runtime, rows = herd(2)
    runtime.placement.set_quota(0, 0)
    runtime.step(rows, [8, 8])
    runtime.commit(rows)
    assert runtime.table.shareable(rows[1], rows[:1]).tolist() == [0]
    refused(runtime.table, rows, [(1, 0, 3)])
    runtime.close()


@pytest.mark.parametrize(
    ("follow", "match"),
    [
        ([(1, 0)], "shape"),
        ([1, 0, 3], "shape"),
        ([(2, 0, 3)], "batch of 2"),
        ([(1, -1, 3)], "batch of 2"),
        ([(1, 1, 3)], "itself"),
        ([(1, 0, 3), (1, 0, 2)], "two others"),
        ([(1, 0, 3), (0, 1, 3)], "put that first"),
    ],
)
def test_links_that_make_no_sense_are_refused(follow: Any, match: str) -> None:
    runtime, rows = herd(2)
    refused(runtime.table, rows, follow, None, match)
    runtime.close()


def test_gone_rows_are_stale() -> None:
    runtime, rows = herd(2)
    gone = runtime.open([1])
    runtime.release(gone)
    for call in (
        lambda: runtime.table.shareable(gone, rows),
        lambda: runtime.table.shareable(rows[0], [rows[1], gone]),
        lambda: runtime.table.catch_up([rows[0], gone]),
        lambda: runtime.table.step([rows[0], gone], None, 0, [(1, 0, 3)]),
    ):
        with nothing_changes((runtime.table, rows)), pytest.raises(StaleHandle):
            call()
    runtime.close()


# ---- going on from what others have committed


def test_a_row_goes_on_from_blocks_that_came_since_it_was_opened() -> None:
    runtime, rows = herd(2)
    runtime.step(rows[:1])
    runtime.commit(rows[:1])
    seeded = runtime.table.seed(rows[1], 2)
    assert runtime.table.catch_up(rows) == 3
    assert runtime.table.info(rows[1]) == (14, 12, 3, 3)
    assert runtime.table.block_pool.refs([seeded]).tolist() == [0]
    assert runtime.table.catch_up(rows) == 0
    runtime.check()
    runtime.close()


def test_a_row_goes_on_over_many_runs_and_leaves_its_last_token() -> None:
    _, _, placement = single(1, 700)
    table = BlockTable(placement, 4)
    row, _ = table.open(list(range(600)))
    for length in (3, 300, 599, 600):
        cache(placement, list(range(length)))
        gained = table.catch_up([row])
        assert table.info(row).num_computed == min(length, 599), gained
    sound(table, placement)


def test_a_row_in_a_step_stays_as_it_is() -> None:
    runtime, rows = herd(2)
    step = runtime.step(rows[1:])
    runtime.step(rows[:1])
    runtime.commit(rows[:1])
    assert runtime.table.catch_up(rows) == 0
    runtime.table.commit(rows[1:], step.number)
    runtime.check()
    runtime.close()


def test_a_row_does_not_go_on_into_cold_blocks() -> None:
    _, _, placement = tiered(1, (4, 8))
    table = BlockTable(placement, 4)
    row, _ = table.open([1, 2, 3, 4, 5])
    cache(placement, [1, 2, 3, 4])
    assert placement.reserve(4) != 0
    assert table.catch_up([row]) == 0, "they are on their way to the host"
    finish(placement)
    assert table.catch_up([row]) == 0, "they are on the host"
    sound(table, placement)


# ---- random programs


class Play:
    """Random steps that share all they can, over a memory that knows what each slot must hold."""

    def __init__(self, seed: int, source: BlockPool | Placement) -> None:
        self.random = Random(seed)
        self.runtime = Runtime(source, 2, max_rows=12)
        self.followed = 0

    def herd(self) -> None:
        """Rows with a new beginning in common, of which some leave it early."""
        random = self.random
        beginning = [random.randrange(1000) for _ in range(random.choice([3, 8, 13]))]
        for _ in range(random.randint(1, 5)):
            kept = random.choice([len(beginning), len(beginning), random.randint(0, len(beginning))])
            self.runtime.open([*beginning[:kept], *(random.randrange(2) for _ in range(random.randint(1, 5)))])

    def links(self, rows: list[int], q_lens: list[int]) -> list[tuple[int, int, int]] | None:
        """For each row, a row before it that it shares most with, and fewer tokens to compute."""
        table, links, ends = self.runtime.table, [], []
        for i, row in enumerate(rows):
            info = table.info(row)
            common = np.minimum(table.shareable(row, rows[:i]), np.array(ends, np.int64) // 2)
            best = int(common.max(initial=0))
            start = info.num_computed
            if best * 2 > start and q_lens[i] > 0 and self.random.random() < 0.9:
                links.append((i, int(common.argmax()), best))
                start = best * 2
                q_lens[i] = self.random.randint(1, info.num_tokens - start)
            ends.append(start + q_lens[i] if q_lens[i] else 0)
        self.followed += len(links)
        return links or None

    def turn(self) -> None:
        random, runtime = self.random, self.runtime
        if len(runtime.rows) < 7:
            self.herd()
        rows = [row for row in runtime.rows if random.random() < 0.8]
        random.shuffle(rows)
        runtime.table.catch_up(rows)
        left = [runtime.table.info(row).num_tokens - runtime.table.info(row).num_computed for row in rows]
        q_lens = [random.choice([n, random.randint(0, n), min(n, 3)]) for n in left]
        links = self.links(rows, q_lens)
        lookahead = random.choice([0, 0, 3])
        if runtime.table.blocks_needed(rows, q_lens, lookahead, links) > runtime.table.block_pool.num_obtainable:
            for row in rows:
                runtime.release(row)
            return
        step = runtime.step(rows, q_lens, lookahead, links)
        what = random.random()
        if what < 0.15:
            runtime.cancel(step, rows)
        elif what < 0.3 and rows:
            victim = random.choice(rows)
            if what < 0.22:
                runtime.release(victim)
            else:
                runtime.truncate(victim, random.randint(0, len(runtime.rows[victim])))
            runtime.table.check_integrity()
            runtime.cancel(step, rows)
        else:
            runtime.table.commit(random.sample(rows, len(rows)), step.number)
        for row in list(runtime.rows):
            if random.random() < 0.2:
                runtime.release(row)
            elif random.random() < 0.1 and len(runtime.rows) < 11:
                runtime.fork(row)
            elif random.random() < 0.3:
                runtime.append([row], [random.randrange(2)])
        runtime.check()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("quota", [None, 5, 0])
@pytest.mark.parametrize("policy", ["lru", "arc", "hazard"])
def test_random_programs_read_back_what_was_written(seed: int, quota: int | None, policy: str) -> None:
    _, _, placement = single(2, 60, policy=policy)
    if quota is not None:
        placement.set_quota(0, quota)
    play = Play(seed, placement)
    for _ in range(80):
        play.turn()
    assert play.followed > 20
    play.runtime.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_without_a_tree(seed: int) -> None:
    play = Play(seed, BlockPool(120))
    for _ in range(80):
        play.turn()
    assert play.followed > 20
    play.runtime.close()

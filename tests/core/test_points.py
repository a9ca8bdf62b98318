"""Tails and points of a group with a window: pages held, prefixes hit, points evicted."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.core import BlockPool, BlockTable, ExtentPool, Placement, RadixTree

SIZE = 2


class Core:
    """A core over a group that sees everything, and one with a window or chunks in blocks."""

    def __init__(
        self, extents: int = 40, window: int = 2, chunk: int = 0, per_extent: tuple[int, int] = (1, 1)
    ) -> None:
        self.shared = ExtentPool(extents, per_extent)
        full, short = self.shared.pools
        self.placement = Placement(RadixTree(SIZE), [full], groups=[(short, window, chunk)])
        self.table = BlockTable(self.placement, 16)
        self.full, self.short = full, short

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        return self.table.open(np.array(tokens, np.int32))

    def compute(self, row: int, at_once: int = 1000) -> None:
        while (info := self.table.info(row)).num_computed < info.num_tokens:
            self.table.step([row], [min(at_once, info.num_tokens - info.num_computed)])
            self.table.commit([row])

    def run(self, tokens: Sequence[int], at_once: int = 1000) -> int:
        """A request from its beginning to its end; the tokens that were cached."""
        row, cached = self.open(tokens)
        self.compute(row, at_once)
        self.table.release(row)
        self.sound()
        return cached

    def sound(self) -> None:
        self.placement.check_integrity()
        self.table.check_integrity()

    def in_use(self) -> tuple[int, int]:
        """Blocks of the first group and pages of the second that anything holds."""
        counts = [pool.counts() for pool in (self.full, self.short)]
        first, second = (count["live"] + count["cached"] for count in counts)
        return first, second


def test_a_row_holds_the_pages_of_its_window_alone() -> None:
    core = Core()
    row, _ = core.open(range(21))
    for _ in range(21):
        core.table.step([row], [1])
        core.table.commit([row])
        computed = core.table.info(row).num_computed
        first, pages = core.table.pages(row, 1)
        assert first == max(0, computed // SIZE - 2)
        assert len(pages) == -(-computed // SIZE) - first
        core.sound()
    assert core.in_use() == (11, 2 + 1), "the window and the unfinished block; the prompt's end needs the same"


def test_a_released_sequence_is_hit_at_its_end_and_nowhere_before() -> None:
    core = Core()
    assert core.run(range(13)) == 0
    assert core.in_use() == (6, 2)
    assert core.run([*range(12), 99]) == 12
    before = core.placement.stats()["lagging"]
    assert core.run([*range(8), 99, 98, 97]) == 0, "the window's pages of blocks 2 and 3 are gone"
    assert core.placement.stats()["lagging"] == before + 4


def test_where_two_requests_part_is_hit_from_the_third_on() -> None:
    core = Core()
    assert [core.run([*range(8), 50 + 10 * n, 51, 52]) for n in range(3)] == [0, 0, 8]


def test_a_hit_holds_its_tail_while_its_point_goes() -> None:
    core = Core(extents=20)
    core.run(range(13))
    row, cached = core.open([*range(12), 99, 98])
    assert cached == 12
    for n in range(8):  # more than fits beside it
        core.run(range(100 * n + 100, 100 * n + 109))
    core.compute(row)
    assert core.table.pages(row, 1)[0] == 5
    core.table.release(row)
    core.sound()


def test_the_point_used_longest_ago_goes_first_and_with_it_all_that_only_it_kept() -> None:
    core = Core(extents=22)  # three prompts of 4 + 2, and of a fourth one all that it takes to compute it
    for name in (100, 200, 300):
        core.run(range(name, name + 9))
    assert core.in_use() == (12, 6)
    assert core.run([*range(100, 108), 7]) == 8  # used again
    core.run(range(400, 409))
    prompts = {name: np.arange(name, name + 8, dtype=np.int32) for name in (100, 200, 300, 400)}
    hits = {name: core.placement.match(tokens)[0].size for name, tokens in prompts.items()}
    assert hits == {100: 4, 200: 0, 300: 4, 400: 4}
    assert core.in_use() == (12, 6), "blocks without a point behind them are gone, too"


def test_a_point_keeps_its_run_from_going_before_it() -> None:
    core = Core(extents=12)
    core.run(range(9))
    row, _ = core.open(range(50, 61))
    with pytest.raises(pk.OutOfBlocks):
        core.table.step([row], [11], 60)
    core.sound()
    assert core.in_use() == (0, 0), "all of it gave way"
    core.table.release(row)


def test_a_priority_is_that_of_points_too() -> None:
    core = Core(extents=20)
    row, _ = core.open(range(9))
    core.table.retain(row, 90)
    core.compute(row)
    core.table.release(row)
    core.run(range(50, 59))
    core.run(range(70, 79))
    assert core.run([*range(8), 7]) == 8
    core.sound()


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_namespaces_the_coldest_run_goes_first(first: int) -> None:
    """Only one of them has a quota, and so lists of its own."""
    core = Core(extents=60, window=0, chunk=2)
    roots = [core.placement.tree.namespace(name) for name in (b"a", b"b")]
    core.placement.set_quota(roots[1], 1000)
    order = [(np.arange(100 * i, 100 * i + 9, dtype=np.int32), roots[first if i < 3 else 1 - first]) for i in range(6)]
    for tokens, root in order:
        row, _ = core.table.open(tokens, root)
        core.compute(row)
        core.table.release(row)
    owners = [core.placement.acquire(tokens, root)[0] for tokens, root in order]
    assert core.placement.reserve(60), "all points go, and no run"
    assert core.placement.stats()["points"] == 0
    for owner in owners:
        core.placement.release(owner)
    core.placement.reserve(core.full.num_available + 10)
    sizes = [core.placement.match(tokens, root)[0].size for tokens, root in order]
    assert sizes == [0, 0, 2, 4, 4, 4], "of the last one that goes, to the end of a chunk"
    core.sound()


def test_a_fork_shares_pages_and_copies_the_one_that_it_writes() -> None:
    core = Core()
    row, _ = core.open(range(7))
    core.compute(row)
    (fork,) = core.table.fork(row)
    assert core.table.pages(fork, 1)[1].tolist() == core.table.pages(row, 1)[1].tolist()
    core.table.append([row, fork], [1, 2])
    step = core.table.step([row, fork])
    assert [len(part.copies) for part in (step, *step.groups)] == [2, 2]
    core.sound()
    core.table.cancel([row, fork])
    core.sound()
    step = core.table.step([row, fork])
    for group, part in enumerate((step, *step.groups)):
        core.table.copies_done(part.copies, group)
    core.table.commit([row, fork])
    assert core.table.pages(fork, 1)[1].tolist()[:-1] == core.table.pages(row, 1)[1].tolist()[:-1]
    assert core.table.pages(fork, 1)[1][-1] != core.table.pages(row, 1)[1][-1]
    for each in (row, fork):
        core.table.release(each)
    core.sound()


def test_a_page_that_two_forks_hold_as_their_own_is_not_the_trees() -> None:
    core = Core()
    name = core.placement.tree.namespace(b"tenant")
    core.placement.set_quota(name, 0)
    row, _ = core.table.open(np.arange(9, dtype=np.int32), name)
    core.compute(row)  # the tree refuses its blocks
    (fork,) = core.table.fork(row)
    core.placement.set_quota(name, None)
    other, _ = core.table.open(np.arange(15, dtype=np.int32), name)
    core.compute(other)  # the tree has them, and holes where the window has moved on
    for turn in range(6):
        core.table.append([row], [50 + turn])
        core.compute(row)
        core.sound()
    for each in (row, fork, other):
        core.table.release(each)
        core.sound()


def test_drafts_that_are_cut_off_leave_the_window_behind_them() -> None:
    core = Core()
    row, _ = core.open(range(12))
    core.compute(row)
    core.table.extend(row, range(8))
    core.compute(row)
    core.table.extend(row, [1, 2, 3])
    core.table.step([row], [3], 3)
    core.table.commit([row])
    core.table.truncate(row, 20)
    assert core.table.info(row).num_computed == 20, "its last blocks can be cut off again"
    core.sound()
    core.table.truncate(row, 3)
    assert core.table.info(row).num_computed == 0, "so far back nothing of the window is left"
    core.sound()
    core.compute(row)
    core.table.release(row)
    core.sound()


def test_multiples_of_a_chunk_are_hit_without_a_point() -> None:
    core = Core(window=0, chunk=3)
    assert core.run(range(15)) == 0
    assert core.run([*range(12), 99, 98]) == 12
    assert core.run([*range(8), 99, 98]) == 6, "the end of the first chunk"
    assert core.run([*range(3), 99]) == 0


def test_a_dropped_namespace_keeps_no_page() -> None:
    core = Core()
    other = core.placement.tree.namespace(b"other")
    row, _ = core.table.open(np.arange(9, dtype=np.int32), other)
    core.compute(row)
    core.placement.drop_namespace(other)
    core.sound()
    core.table.release(row)
    core.sound()
    assert core.in_use() == (0, 0)
    assert core.shared.num_free == 40


def test_blocks_without_pages_do_not_join_the_tree() -> None:
    core = Core()
    owner, _ = core.placement.acquire([1, 2])
    with pytest.raises(pk.InvalidArgument, match="with a BlockTable"):
        core.placement.insert(owner, [1, 2], core.full.alloc(1))
    core.placement.release(owner)
    core.placement.check_integrity()


def test_rows_over_groups_follow_no_others() -> None:
    core = Core()
    rows = [core.open(range(9))[0] for _ in range(2)]
    assert core.table.shareable(rows[1], rows[:1]).tolist() == [0]
    with pytest.raises(pk.InvalidArgument, match="leave follow out"):
        core.table.step(rows, follow=[(1, 0, 2)])
    assert core.table.catch_up(rows) == 0


def test_the_blocks_that_a_step_needs_are_those_that_it_can_be_given() -> None:
    for extents in range(4, 14):
        core = Core(extents, per_extent=(3, 2))
        row, _ = core.open(range(20))
        for tokens in range(1, 21):
            if core.placement.could_have(core.table.pages_needed([row], [tokens])):
                core.table.step([row], [tokens])
                core.table.cancel([row])
            else:
                with pytest.raises(pk.OutOfBlocks):
                    core.table.step([row], [tokens])
                break
        core.sound()


def test_groups_that_cannot_be_are_refused() -> None:
    shared, others = ExtentPool(4, (1, 1)), ExtentPool(4, (1, 1))
    full, short = shared.pools
    for pools, groups, options in (
        ([full], [(others.pools[1], 2, 0)], {}), ([full], [(short, 2, 3)], {}), ([full], [], {}),
        ([full], [(short, 2, 0)], {"policy": "s3fifo"}), ([full, BlockPool(3)], [(short, 2, 0)], {}),
        ([BlockPool(3)], [(short, 2, 0)], {}),
    ):  # fmt: skip
        with pytest.raises(pk.InvalidArgument):
            Placement(RadixTree(SIZE, len(pools), keep_chain=True), pools, groups=groups, **options)


@pytest.mark.parametrize("reach", [(3, 0), (0, 4)], ids=["window", "chunk"])
def test_what_could_be_had_is_what_eviction_brings(reach: tuple[int, int]) -> None:
    choose, said = Random(1), {True: 0, False: 0}
    core = Core(9, *reach, per_extent=(2, 5))
    table, rows = core.table, []
    for _ in range(3000):
        if not rows or (len(rows) < 5 and choose.random() < 0.3):
            rows.append(core.open([choose.randrange(3)] * choose.randrange(1, 8) + [choose.randrange(3)] * 9)[0])
        row = choose.choice(rows)
        info = table.info(row)
        q_lens = [choose.randint(1, max(1, info.num_tokens - info.num_computed))]
        if choose.random() < 0.2 or info.num_computed == info.num_tokens:
            rows.remove(row)
            table.release(row)
            continue
        could = core.placement.could_have(table.pages_needed([row], q_lens))
        said[could] += 1
        try:
            table.step([row], q_lens)
            table.commit([row])
        except pk.OutOfBlocks:
            assert not could, "it could have been had"
        else:
            assert could, "it was had"
        core.sound()
    assert min(said.values()) > 100


@pytest.mark.parametrize("reach", [(3, 0), (0, 4)], ids=["window", "chunk"])
def test_a_row_never_holds_more_than_it_was_said_to_need(reach: tuple[int, int]) -> None:
    for most in (1, 3, 5, 12):
        for lookahead in (0, 3):
            core = Core(200, *reach)
            row, _ = core.open(range(47))
            needed = core.table.pages_to_finish([row], most, lookahead)
            peak = 0
            while (left := core.table.info(row).num_tokens - core.table.info(row).num_computed) > 0:
                core.table.step([row], [min(most, left)], lookahead)
                peak = max(peak, len(core.table.pages(row, 1)[1]))
                core.table.commit([row])
            assert len(core.table.blocks(row)) == needed[0]
            assert peak <= needed[1] <= peak + 2 + lookahead // SIZE + reach[1]


def test_amounts_are_asked_for_over_groups_and_for_each_of_them() -> None:
    core = Core()
    with pytest.raises(pk.InvalidArgument, match="2 groups"):
        core.placement.could_have([1])
    with pytest.raises(pk.InvalidArgument, match="0 groups"):
        Placement(RadixTree(SIZE), [BlockPool(4)]).could_have([1])
    with pytest.raises(pk.InvalidArgument, match="q_lens"):
        core.table.pages_needed([core.open([1, 2])[0]], [1, 1])
    assert core.placement.reaches == (None, 2)
    assert (core.shared.num_extents, core.shared.per_extent) == (40, (1, 1))
    assert core.full.extents is core.shared


def test_a_point_whose_time_is_over_goes_before_older_ones() -> None:
    core = Core(extents=20)
    core.run(range(50, 59))
    row, _ = core.open(range(9))
    core.table.retain(row, 50, expires_ns=10)
    core.compute(row)
    core.table.release(row)
    assert core.placement.expire(9) == 0
    assert core.placement.expire(11) == 4
    core.run(range(70, 79))
    core.sound()
    hits = [core.placement.match(np.arange(first, first + 8, dtype=np.int32))[0].size for first in (50, 0, 70)]
    assert hits == [4, 0, 4]

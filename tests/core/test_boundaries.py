"""Prefixes over groups of layers without a BlockTable: blocks first, then boundaries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pagedkv.core import BlockPool, BlockTable, Boundaries, ExtentPool, Placement, RadixTree
from pagedkv.errors import DoubleRelease, InvalidArgument, StaleHandle

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


class Core:
    """A core over a group that sees everything and one with a window; blocks of a token."""

    def __init__(self, units: int = 60, window: int = 2, tiers: int = 2) -> None:
        self.memory = [ExtentPool(units, (1, 1), (1, 3)) for _ in range(tiers)]
        (self.full, self.short) = self.memory[0].pools
        full, short = zip(*(memory.pools for memory in self.memory), strict=True)
        self.placement = Placement(RadixTree(1, tiers), full, groups=[(short, window, 0)])
        self.boundaries = Boundaries(self.placement)

    def own(self, tokens: Sequence[int]) -> tuple[int, int]:
        """An owner of all of these, whose blocks are in the tree then; and its hit."""
        array = np.array(tokens, np.int32)
        owner, hit = self.placement.acquire(array)
        hit += self.boundaries.retrace(owner, array[hit:])
        done = self.boundaries.insert(owner, array[hit:], self.full.alloc(len(array) - hit))
        assert hit + done == len(array)
        return owner, hit

    def keep(self, owner: int, num_blocks: int) -> bool:
        lacking = self.boundaries.lacking(owner, num_blocks).tolist()
        return self.boundaries.keep(owner, num_blocks, [self.short.alloc(lacking[1])])

    def used(self, tier: int = 0) -> int:
        return self.memory[tier].num_extents - self.memory[tier].num_free

    def hit(self, tokens: Sequence[int]) -> int:
        return len(self.placement.match(np.array(tokens, np.int32))[0])

    def sound(self) -> None:
        self.placement.check_integrity()
        for memory in self.memory:
            memory.check_integrity()


def test_a_boundary_is_hit_from_when_it_is_kept() -> None:
    core = Core()
    owner, _ = core.own(range(5))
    assert core.hit(range(5)) == 0
    assert core.boundaries.lacking(owner, 5).tolist() == [0, 2]
    assert core.keep(owner, 5)
    assert core.boundaries.lacking(owner, 5).tolist() == [0, 0]
    assert [core.boundaries.is_point(owner, k) for k in (0, 3, 5, 6)] == [False, False, True, False]
    core.boundaries.release(owner, [5])
    core.sound()
    assert (core.hit(range(5)), core.hit(range(4)), core.used()) == (5, 0, 5 + 2 * 3)


def test_boundaries_share_pages_and_the_last_one_to_go_frees_them() -> None:
    core = Core()
    owner, _ = core.own(range(6))
    for at in (6, 5):
        assert core.keep(owner, at)
    assert core.boundaries.lacking(owner, 4).tolist() == [0, 1]
    core.placement.release(owner)
    assert core.used() == 6 + 3 * 3
    core.placement.reserve_pages(np.array([60, 0]))
    while len(transfers := np.unique(core.placement.take_moves()["transfer"])):
        core.placement.complete(transfers, np.ones(len(transfers), np.bool_))
        core.placement.reserve_pages(np.array([60, 0]))
    core.sound()
    assert (core.used(), core.used(1)) == (0, 6 + 3 * 3)
    assert core.hit(range(6)) == 6


def test_blocks_that_the_tree_has_beyond_the_hit_are_retraced() -> None:
    core = Core()
    first, _ = core.own(range(8))
    core.keep(first, 8)
    core.boundaries.release(first, [])
    tokens = np.array([*range(5), 99], np.int32)
    owner, hit = core.placement.acquire(tokens)
    assert (hit, core.boundaries.agreed(owner)) == (0, 5)
    assert core.boundaries.retrace(owner, tokens) == 5
    assert core.boundaries.retrace(owner, tokens[5:]) == 0
    core.sound()
    assert core.boundaries.insert(owner, tokens[5:], core.full.alloc(1)) == 1
    assert core.keep(owner, 5)
    core.boundaries.release(owner, [5])
    core.sound()
    assert core.used() == 8 + 4 * 3, "no request can go on behind the last block, which is gone"
    assert core.hit([*range(5), 7]) == 5


@pytest.mark.parametrize("order", [[2, 4], [4, 2]])
def test_points_used_at_the_end_go_in_this_order(order: list[int]) -> None:
    core = Core(units=40, tiers=1)
    owner, _ = core.own(range(4))
    for at in (4, 2):
        core.keep(owner, at)
    core.boundaries.release(owner, order)
    core.placement.reserve_pages(np.array([40 - 4 - 3 * 3, 0]))
    core.sound()
    assert [core.hit(range(4)), core.used()] == ([4, 4 + 2 * 3] if order == [2, 4] else [2, 2 + 2 * 3])


def test_a_failed_promise_of_pages_changes_nothing() -> None:
    core = Core()
    owner, _ = core.own(range(5))
    pages, used = core.short.alloc(3), core.used()
    for given, words in (
        ([pages[:1]], "1 pages of group 1, and the boundary behind 5 blocks lacks 2"),
        ([pages], "3 pages of group 1"),
        ([np.array([pages[0], pages[0]], np.int32)], "stands there twice"),
        ([np.array([pages[0], 59], np.int32)], "one of them is free"),
        ([np.array([pages[0], -1], np.int32)], "one of them is free"),
        ([], "pages of 0 groups, and 1 short ones exist"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            core.boundaries.keep(owner, 5, given)
        core.sound()
    with pytest.raises(InvalidArgument, match="no boundary behind 6 blocks of a path of 5"):
        core.boundaries.keep(owner, 6, [pages[:2]])
    with pytest.raises(InvalidArgument, match="no boundary behind 6 blocks of a path of 5"):
        core.boundaries.lacking(owner, 6)
    assert (core.used(), core.short.refs(pages).tolist()) == (used, [1, 1, 1])
    core.short.free(pages)
    core.boundaries.release(owner, [])
    core.sound()
    assert core.used() == 0, "nothing was kept"


def test_an_owner_that_was_released_is_named() -> None:
    core = Core()
    owner, _ = core.own(range(3))
    core.boundaries.release(owner, [])
    with pytest.raises(DoubleRelease):
        core.boundaries.release(owner, [])
    for call in (
        lambda: core.boundaries.agreed(owner),
        lambda: core.boundaries.retrace(owner, np.arange(3, dtype=np.int32)),
        lambda: core.boundaries.is_point(owner, 1),
        lambda: core.boundaries.lacking(owner, 1),
        lambda: core.boundaries.keep(owner, 1, [np.empty(0, np.int32)]),
    ):
        with pytest.raises(StaleHandle):
            call()


def test_a_placement_whose_layers_keep_everything_has_no_boundaries() -> None:
    with pytest.raises(InvalidArgument, match=r"Placement\.insert"):
        Boundaries(Placement(RadixTree(1), [BlockPool(4)]))


def test_memory_that_is_counted_is_given_back_to_the_last_unit() -> None:
    memory = ExtentPool(20, (1, 1), (2, 7))
    full, short = memory.pools
    assert (memory.span, full.num_available, short.num_available) == ((2, 7), 10, 2)
    pages, blocks = short.alloc(2), full.alloc(3)
    assert (memory.num_free, full.num_available, short.num_available) == (0, 0, 0)
    memory.check_integrity()
    short.free(pages[:1])
    assert (memory.num_free, full.num_available, short.num_available) == (7, 3, 1)
    full.free(blocks[1:])
    memory.check_integrity()
    assert (memory.num_free, short.num_available) == (11, 1)
    short.free(pages[1:])
    full.free(blocks[:1])
    memory.check_integrity()
    assert (memory.num_free, full.num_obtainable, short.num_obtainable) == (20, 10, 2)


@pytest.mark.parametrize("span", [(1,), (2, 1), (0, 1), (1, 1, 1)])
def test_spans_that_no_pool_can_have_are_refused(span: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="span"):
        ExtentPool(10, (4, 1), span)


def test_blocks_that_span_extents_cannot_be_claimed() -> None:
    memory = ExtentPool(10, (1, 1), (1, 3))
    with pytest.raises(InvalidArgument, match="takes 3 extents"):
        memory.claim(1, np.array([0], np.int32))
    memory.claim(0, np.array([4], np.int32))
    memory.check_integrity()


def test_rows_of_a_table_run_over_counted_memory() -> None:
    memory = ExtentPool(34, (1, 1), (1, 3))
    placement = Placement(RadixTree(2), [memory.pools[0]], groups=[(memory.pools[1], 2, 0)])
    table = BlockTable(placement, 8)
    for name in range(0, 1000, 100):
        row, _ = table.open(np.arange(name, name + 9, dtype=np.int32))
        for _ in range(9):
            table.step([row], [1])
            table.commit([row])
        table.release(row)
        placement.check_integrity()
        memory.check_integrity()
    assert len(placement.match(np.arange(900, 908, dtype=np.int32))[0]) == 4
    assert placement.stats()["points"] == 3, "two prompts of 4 blocks and 2 pages beside one of 5 and 3"


def test_a_row_takes_no_owner_without_the_pages_of_its_end() -> None:
    core = Core(tiers=1)
    table = BlockTable(core.placement, 4)
    owner, _ = core.own(range(6))
    core.keep(owner, 6)
    tokens = np.arange(8, dtype=np.int32)
    with pytest.raises(InvalidArgument):
        table.open(tokens, owner=owner)
    core.boundaries.release(owner, [6])
    owner, hit = core.placement.acquire(tokens)
    row, cached = table.open(tokens, owner=owner)
    assert (hit, cached) == (6, 6)
    assert table.pages(row, 1)[0] == 4
    table.release(row)
    core.sound()

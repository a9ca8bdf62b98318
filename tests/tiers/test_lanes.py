"""A disk tier for groups of layers, with slots of several sizes.

Not covered: caches over them (tests/cache/test_by_group_on_disk.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, LayoutMismatch, TierError
from pagedkv.tiers import DiskTier, Mover, Record
from pagedkv.tiers.disk.format import PAGE
from pagedkv.tiers.disk.lane import Lane
from pagedkv.tiers.disk.segments import Segments
from pagedkv.tiers.disk.superblock import most_purges, pack_super, parse_super
from pagedkv.tiers.memory import ArenaTier
from pagedkv.tiers.mover.hangs import LANE
from tests.tiers.conftest import BLOCK_TOKENS, FINGERPRINT, name_of

SIZES = (2 * PAGE, 1000)  # slots of three pages and of two: a header of one may lie in a page of the other
LANES = (Lane(SIZES[0], 2, 2, layers=3), Lane(SIZES[1], 1, 3, layers=5, window=2))
EXTENTS = 6
SPINE, TAIL = 0, 1


def content(number: int, lane: int) -> NDArray[np.uint8]:
    return np.random.default_rng([number, lane]).integers(0, 256, SIZES[lane], np.uint8)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    tiers: list[DiskTier] = []

    def open_tier(extents: int = EXTENTS, **changes: Any) -> DiskTier:
        options: dict[str, Any] = {
            "fingerprint": FINGERPRINT, "block_tokens": BLOCK_TOKENS, "segment_bytes": 100_000, "lanes": LANES,
        }  # fmt: skip
        tiers.append(DiskTier(tmp_path / "kv", extents, changes.pop("block_bytes", SIZES[0]), **(options | changes)))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


def write(tier: DiskTier, lane: int, slots: list[int], numbers: list[int] | None = None) -> NDArray[np.bool_]:
    """Store in each slot the page of its number."""
    numbers = slots if numbers is None else numbers
    arena = np.stack([content(number, lane) for number in numbers])
    return tier.write(slots, [name_of(number) for number in numbers], arena, range(len(slots)), lane=lane)


def read(tier: DiskTier, lane: int, slots: list[int], numbers: list[int] | None = None) -> list[bool]:
    """Which slots have the page of their number; its bytes are right."""
    numbers = slots if numbers is None else numbers
    arena = np.zeros((len(slots), SIZES[lane]), np.uint8)
    hit = tier.read(slots, [name_of(number) for number in numbers], arena, range(len(slots)), lane=lane)
    for row, number in enumerate(numbers):
        if hit[row]:
            np.testing.assert_array_equal(arena[row], content(number, lane))
    return [bool(each) for each in hit]


def stored(tier: DiskTier, lane: int) -> list[int]:
    return [found.block for found in tier.records(lane=lane)]


def crashed(tier: DiskTier) -> None:
    """Let go of the directory as a killed process does."""
    tier._store.close()


def test_lanes_have_slots_of_their_own_size_and_find_them(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier = opened()
    assert tier.num_lanes == 2
    assert [tier.lane(lane).num_blocks for lane in (0, 1)] == [12, 18]
    assert write(tier, SPINE, [0, 1, 2]).all()
    assert write(tier, TAIL, [8, 9, 10, 11, 12]).all()
    tier.close()
    tier = opened()
    assert stored(tier, SPINE) == [0, 1, 2]
    assert stored(tier, TAIL) == [8, 9, 10, 11, 12]
    assert read(tier, SPINE, [0, 1, 2, 3]) == [True, True, True, False]
    assert read(tier, TAIL, [8, 9, 10, 11, 12, 13]) == [True] * 5 + [False]
    assert read(tier, TAIL, [8], [9]) == [False]  # another page's name
    assert parse_super((tmp_path / "kv" / "SUPER").read_bytes()[:PAGE]).major == 2  # type: ignore[union-attr]


def test_rows_of_an_arena_may_lie_apart(opened: Callable[..., DiskTier]) -> None:
    tier = opened()
    arena = np.zeros((4, 2048), np.uint8)
    arena[:, : SIZES[1]] = [content(number, TAIL) for number in range(4)]
    rows = arena[:, : SIZES[1]]
    assert tier.write([0, 1, 2, 3], [name_of(number) for number in range(4)], rows, [0, 1, 2, 3], lane=TAIL).all()
    back = np.full((4, 2048), 7, np.uint8)
    names = [name_of(number) for number in range(4)]
    assert tier.read([0, 1, 2, 3], names, back[:, : SIZES[1]], [3, 2, 1, 0], lane=TAIL).all()
    np.testing.assert_array_equal(back[::-1, : SIZES[1]], rows)
    assert (back[:, SIZES[1] :] == 7).all()


def test_an_extent_that_changes_hands_forgets_its_former_pages(opened: Callable[..., DiskTier]) -> None:
    tier = opened()
    write(tier, SPINE, [0, 1, 2])
    assert write(tier, TAIL, [0]).all()  # of extent 0, which the spine had
    assert read(tier, SPINE, [0, 1, 2]) == [False, False, True]
    crashed(tier)
    tier = opened()
    assert (stored(tier, SPINE), stored(tier, TAIL)) == ([2], [0])
    assert write(tier, SPINE, [1], [5]).all()  # and back
    assert read(tier, TAIL, [0]) == [False]
    assert read(tier, SPINE, [1], [5]) == [True]
    crashed(tier)
    tier = opened()
    assert (stored(tier, SPINE), stored(tier, TAIL)) == ([1, 2], [])


def test_a_purged_page_does_not_come_back_from_an_extent_that_changed_hands(opened: Callable[..., DiskTier]) -> None:
    tier = opened()
    write(tier, SPINE, [0, 1])
    write(tier, TAIL, [0])
    tier.purge(name_of(0).namespace)
    for number in range(most_purges(LANES) + 1):  # more than a superblock holds: the void slots are buried
        tier.purge(bytes([number % 256, number // 256]) + bytes(30))
    tier.close()
    tier = opened()
    assert (stored(tier, SPINE), stored(tier, TAIL)) == ([], [])
    assert not parse_super(pack_super(tier._store.superblock)).purges  # type: ignore[union-attr]


def test_damaged_headers_in_an_extent_of_no_lane_do_no_harm_to_the_next_one(opened: Callable[..., DiskTier]) -> None:
    """They may be whole another day, so they are buried; by then other pages may lie there."""
    tier = opened()
    write(tier, TAIL, [0, 1, 2])
    headers = headers_of(tier, TAIL, [0, 1, 2])
    tier.close()
    put_back([(name, place + 300, b"damaged") for name, place, _ in headers])
    tier = opened()
    assert stored(tier, TAIL) == []
    assert write(tier, SPINE, [0, 1]).all()
    for number in range(most_purges(LANES) + 1):
        tier.purge(bytes([number % 256, 1 + number // 256]) + bytes(30))
    assert read(tier, SPINE, [0, 1]) == [True, True]


def test_a_header_that_cannot_be_read_in_the_extent_of_another_lane_keeps_purges_on_record(
    opened: Callable[..., DiskTier],
) -> None:
    """It may be of a purged page, brought back by a power failure, and stays amid other pages."""
    tier = opened()
    write(tier, TAIL, [0, 1, 2])
    old = headers_of(tier, TAIL, [1])
    write(tier, SPINE, [0, 1])
    tier.purge(name_of(1).namespace)
    crashed(tier)
    damaged = [(name, place, data[:300] + b"?" + data[301:]) for name, place, data in old]
    put_back(damaged)
    tier = opened()
    assert (stored(tier, SPINE), stored(tier, TAIL)) == ([0], [])
    assert not tier._try_to_forget_purges()
    crashed(tier)
    put_back(old)  # as where it could not be read for a moment
    tier = opened()
    assert stored(tier, TAIL) == []


def test_headers_of_another_lane_are_no_reason_to_keep_purges_on_record(opened: Callable[..., DiskTier]) -> None:
    """They lie at the same places, and their sums are of other slots."""
    tier = opened()
    write(tier, SPINE, [2, 3])
    write(tier, TAIL, [12])
    tier.purge(name_of(2).namespace)
    tier.close()
    tier = opened()
    assert not tier._store.superblock.purges
    for number in range(most_purges(LANES) + 1):
        tier.purge(bytes([number % 256, 3 + number // 256]) + bytes(30))
    assert tier._lanes.epoch == 1  # nothing else was forgotten


def headers_of(tier: DiskTier, lane: int, slots: list[int]) -> list[tuple[str, int, bytes]]:
    """What stands before the pages of these slots: file, place, bytes."""
    geometry = tier._geometries[lane]
    segments, offsets = geometry.places(np.array(slots))
    found = []
    for segment, offset in zip(segments.tolist(), offsets.tolist(), strict=True):
        name = os.path.join(tier.path, f"data.{segment:04d}")
        found.append((name, offset, os.pread(tier._store.files._fds[segment], geometry.header_bytes, offset)))
    return found


def put_back(headers: list[tuple[str, int, bytes]]) -> None:
    for name, offset, data in headers:
        with open(name, "r+b") as file:
            file.seek(offset)
            file.write(data)


def test_headers_of_two_lanes_in_one_extent_are_those_of_the_last_one(opened: Callable[..., DiskTier]) -> None:
    """A power failure may bring back headers that were buried, and parts of pages with them."""
    tier = opened()
    write(tier, SPINE, [0, 1, 2, 3])
    old = headers_of(tier, SPINE, [0, 1])
    write(tier, TAIL, [0, 1, 2])
    crashed(tier)
    put_back(old[1:])  # of slot 1, which lies in a page of the tail
    tier = opened()
    geometry = tier._geometries[TAIL]
    hit = int(old[1][1]) // geometry.slot_bytes
    kept = [slot for slot in range(3) if slot != hit]
    assert int(old[1][1]) % geometry.slot_bytes  # not its header
    assert stored(tier, TAIL) == kept
    assert stored(tier, SPINE) == [2, 3]
    assert read(tier, TAIL, kept) == [True] * 2
    crashed(tier)
    tier = opened()  # it was buried, and does not come back
    assert stored(tier, TAIL) == kept
    assert stored(tier, SPINE) == [2, 3]


def test_a_header_that_cannot_be_buried_at_the_opening_is_buried_before_a_page_is_written_there(
    opened: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge writes tombstones over all that was left; by then a page may lie there."""
    tier = opened()
    write(tier, SPINE, [0, 1])
    old = headers_of(tier, SPINE, [1])
    write(tier, TAIL, [0, 2])
    crashed(tier)
    put_back(old)  # amid slot 1 of the tail
    with monkeypatch.context() as broken:
        broken.setattr(Segments, "write_headers", lambda self, slots, headers: np.full(slots.size, -5, np.int64))
        tier = opened()
        assert (stored(tier, SPINE), stored(tier, TAIL)) == ([], [0, 2])
        assert not write(tier, TAIL, [1]).any()
    assert write(tier, TAIL, [1]).all()
    for number in range(most_purges(LANES) + 1):
        tier.purge(bytes([number % 256, 2 + number // 256]) + bytes(30))
    assert read(tier, TAIL, [0, 1, 2]) == [True] * 3
    crashed(tier)
    tier = opened()
    assert (stored(tier, SPINE), stored(tier, TAIL)) == ([], [0, 1, 2])


def test_a_header_from_the_future_does_not_win_its_extent(opened: Callable[..., DiskTier]) -> None:
    """No write can have given it its generation."""
    tier = opened()
    write(tier, SPINE, [0, 2])
    write(tier, TAIL, [0])
    forms = [slots.form for slots in tier._lanes.slots]
    ((name, place, _),) = headers_of(tier, SPINE, [1])
    tier.close()
    future = forms[SPINE].header(1, tier._ages.next, name_of(7), np.zeros(2, np.uint64), 0)
    put_back([(name, place, future)])
    tier = opened()
    assert (stored(tier, SPINE), stored(tier, TAIL)) == ([2], [0])
    assert read(tier, TAIL, [0]) == [True]
    tier.close()
    tier = opened()
    assert (stored(tier, SPINE), stored(tier, TAIL)) == ([2], [0])


def test_a_header_from_the_future_in_an_extent_of_no_lane_is_buried(opened: Callable[..., DiskTier]) -> None:
    tier = opened()
    form, ((name, place, _),) = tier._lanes.slots[SPINE].form, headers_of(tier, SPINE, [0])
    tier.close()
    put_back([(name, place, form.header(0, tier._ages.next, name_of(7), np.zeros(2, np.uint64), 0))])
    tier = opened()
    assert stored(tier, SPINE) == []
    assert write(tier, TAIL, [0]).all()
    crashed(tier)
    assert stored(opened(), TAIL) == [0]


def test_an_extent_is_not_taken_where_its_former_pages_cannot_be_buried(
    opened: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened()
    write(tier, SPINE, [0, 1])
    spine = tier._lanes.slots[SPINE]
    monkeypatch.setattr(spine._segments, "write_headers", lambda slots, headers: np.full(slots.size, -5, np.int64))
    assert write(tier, TAIL, [0, 1, 4]).tolist() == [False, False, True]
    assert tier.stats().writes_refused == 2
    monkeypatch.undo()
    assert write(tier, TAIL, [0]).all()


def test_a_header_behind_the_last_slot_of_its_extent_costs_the_next_extent_nothing(
    opened: Callable[..., DiskTier],
) -> None:
    lanes = (Lane(10 * PAGE, 2, 1, layers=3), Lane(SIZES[1], 1, 7, layers=5, window=2))
    tier = opened(lanes=lanes, block_bytes=10 * PAGE)
    pages = np.stack([np.full(10 * PAGE, number, np.uint8) for number in range(2)])
    write(tier, TAIL, [6])
    old = headers_of(tier, TAIL, [6])
    assert old[0][1] > 11 * PAGE
    assert tier.write([0, 1], [name_of(0), name_of(1)], pages, [0, 1]).all()
    crashed(tier)
    put_back(old)
    tier = opened(lanes=lanes, block_bytes=10 * PAGE)
    assert (stored(tier, SPINE), stored(tier, TAIL)) == ([0, 1], [])


def test_a_disk_that_hangs_in_one_lane_hangs_in_all(
    opened: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is left for another lane's moves: they are given up, too."""
    tier, back = opened(), threading.Event()
    write(tier, SPINE, [0, 1])
    write(tier, TAIL, [3])
    memory = [ArenaTier("host", np.zeros((4, size), np.uint8), None) for size in SIZES]
    numbered: dict[int, Any] = {1: memory[0], 2: tier.lane(0), 1 + LANE: memory[1], 2 + LANE: tier.lane(1)}
    let_go: list[bool] = []
    monkeypatch.setattr(Segments, "read", lambda *given: let_go.append(back.wait(60)))
    dtype = np.dtype([(name, "<i8") for name in ("transfer", "src_tier", "dst_tier", "src_block", "dst_block")])
    with Mover(numbered, threads=2, hang_s=0.2) as mover:
        try:
            tickets = [
                mover.submit(np.array([(i, src, dst, block, i)], dtype), records=[name_of(block)])
                for i, (src, dst, block) in enumerate([(2, 1, 0), (2, 1, 1), (2 + LANE, 1 + LANE, 3)])
            ]
            for ticket in tickets:
                _, arrived = ticket.results()
                assert not arrived.any()
            assert not let_go, "a move was settled when a thread was back"
        finally:
            back.set()


def test_a_lane_writes_where_it_is_while_an_extent_cannot_be_handed_over(
    opened: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, inside, back = opened(), threading.Event(), threading.Event()
    write(tier, SPINE, [0])
    write(tier, TAIL, [17])

    def hangs(slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        inside.set()
        back.wait(60)
        return np.zeros(slots.size, np.bool_)

    monkeypatch.setattr(tier._lanes.slots[SPINE], "bury", hangs)
    thread = threading.Thread(target=write, args=(tier, TAIL, [0]), daemon=True)
    thread.start()
    try:
        assert inside.wait(60)
        assert write(tier, TAIL, [17]).all()
        tier.call_hangs(1)
        assert not write(tier, TAIL, [10]).any()  # not its own yet
    finally:
        back.set()
        thread.join(60)
    tier.call_came_back()


@pytest.mark.parametrize("lane", [2, -1, "1", None])
def test_a_lane_that_is_not_there_is_refused(lane: Any, opened: Callable[..., DiskTier]) -> None:
    tier = opened()
    for call in (
        lambda: tier.lane(lane), lambda: tier.invalidate([0], lane=lane), lambda: next(iter(tier.records(lane=lane))),
        lambda: tier.read([0], [name_of(0)], np.zeros((1, SIZES[0]), np.uint8), [0], lane=lane),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="is not one of the 2"):
            call()


def test_a_store_of_other_groups_is_refused_with_the_group(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    opened().close()
    other = (LANES[0], Lane(SIZES[1], 1, 3, layers=5, window=3))
    with pytest.raises(LayoutMismatch, match=r"group 1 of layers: 5 layers with a window of 2 .* a window of 3"):
        opened(lanes=other)
    with pytest.raises(LayoutMismatch, match="2 groups of layers, asked was 3"):
        opened(lanes=(*LANES, Lane(500, 1, 8, layers=1, chunk=4)))
    with pytest.raises(LayoutMismatch, match=r"keeps 2 groups .* keeps all tokens of every layer \(by_group=False\)"):
        opened(lanes=())
    with pytest.raises(LayoutMismatch, match="fingerprint"):
        opened(fingerprint=bytes(32))
    assert opened().stats().state == "ok"
    whole = {"fingerprint": FINGERPRINT, "block_tokens": BLOCK_TOKENS}
    DiskTier(tmp_path / "whole", 4, SIZES[0], **whole).close()  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatch, match=r"keeps all tokens of every layer, .* 2 groups .*by_group=True"):
        DiskTier(tmp_path / "whole", 4, SIZES[0], **whole, lanes=LANES)  # type: ignore[arg-type]


def test_it_grows_by_extents_and_does_not_shrink(opened: Callable[..., DiskTier]) -> None:
    tier = opened()
    write(tier, SPINE, [10])
    write(tier, TAIL, [0])
    tier.close()
    tier = opened(2 * EXTENTS)
    assert (stored(tier, SPINE), stored(tier, TAIL)) == ([10], [0])
    assert write(tier, TAIL, [35]).all()
    assert read(tier, TAIL, [0, 35]) == [True, True]
    tier.close()
    with pytest.raises(LayoutMismatch, match="12 extents"):
        opened()


def test_a_directory_without_room_is_left_as_it_was(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    with pytest.raises(TierError, match="are free"):
        opened(2**26)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    "lanes",
    [
        lambda: (LANES[0],), lambda: LANES * 3, lambda: LANES[::-1], lambda: (Lane(SIZES[0], 5, 2, layers=3), LANES[1]),
        lambda: (Lane(SIZES[0], 2, 0, 3), LANES[1]), lambda: (Lane(-1, 2, 1, 3), LANES[1]),
        lambda: (LANES[0], Lane(2**40, 1, 1, 3)),
    ],
)  # fmt: skip
def test_lanes_that_cannot_be_are_refused(lanes: Callable[[], Any], opened: Callable[..., DiskTier]) -> None:
    with pytest.raises(InvalidArgument):
        opened(lanes=lanes())


def test_record_names_are_those_of_blocks(opened: Callable[..., DiskTier]) -> None:
    tier = opened()
    write(tier, TAIL, [3])
    (found,) = tier.records(lane=TAIL)
    wanted = name_of(3)
    assert isinstance(found.record, Record)
    assert (found.record.key, found.record.parent, found.record.namespace) == (
        wanted.key, wanted.parent, wanted.namespace,
    )  # fmt: skip
    tier.invalidate([3], lane=TAIL)
    assert stored(tier, TAIL) == []

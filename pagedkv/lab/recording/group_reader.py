"""Checks the data of a recording of a cache by groups of layers, version 2."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from pagedkv.lab.recording.groups import GroupOfLayers, HeldPage, PageTable, Point
from pagedkv.lab.recording.model import Frame, Move, SequenceState
from pagedkv.lab.recording.reader import MOST_BLOCKS, Reader
from pagedkv.spec.groups import MAX_GROUPS

MOST_LAYERS = 1 << 20


class GroupReader(Reader):
    """Reads what such a recording has besides: groups, pages, tables, points and extents."""

    _reaches: tuple[GroupOfLayers, ...]
    _per_extent: dict[str, tuple[int, ...]]

    # ---- of the recording

    def _groups(self, data: dict[str, Any], tiers: dict[str, int]) -> dict[str, Any]:
        given = self._list(data, "groups", "")
        if not 2 <= len(given) <= MAX_GROUPS:
            raise self._problem("groups", f"there are {len(given)}, and can be 2 to {MAX_GROUPS}")
        self._reaches = tuple(self._group(group, f"group {g}") for g, group in enumerate(given))
        for g, group in enumerate(self._reaches):
            if bool(group.windows) + (group.chunk is not None) != (g > 0):
                wanted = "a window or chunks, one of them" if g else "neither a window nor chunks"
                raise self._problem(f"group {g}", f"{wanted}, is needed: group 0 alone sees everything")
        sizes = self._get(data, "per_extent", "", dict, "an object")
        if list(sizes) != list(tiers):
            raise self._problem("per_extent", f"{', '.join(sizes) or 'none'}, but there are {', '.join(tiers)}")
        self._per_extent = {tier: self._integers(sizes, tier, "per_extent", 1, MOST_BLOCKS) for tier in tiers}
        for tier, numbers in self._per_extent.items():
            if len(numbers) != len(given) or tiers[tier] % numbers[0]:
                raise self._problem(
                    f"per_extent, {tier}", f"{list(numbers)}: a number for each group is needed, and whole extents"
                )
        return {"groups": self._reaches, "per_extent": self._per_extent}

    def _group(self, data: Any, where: str) -> GroupOfLayers:
        self._is(data, where, dict, "an object")
        chunk = None if data.get("chunk") is None else self._number(data, "chunk", where, 1, MOST_BLOCKS)
        layers = self._integers(data, "layers", where, 0, MOST_LAYERS)
        windows = self._integers(data, "windows", where, 1, MOST_BLOCKS)
        if not layers or any(b <= a for numbers in (layers, windows) for a, b in pairwise(numbers)):
            raise self._problem(where, "its layers and windows must ascend, and one layer is needed")
        return GroupOfLayers(layers, windows, chunk)

    def _size(self, tier: str, group: int, tiers: dict[str, int]) -> int:
        """Pages that a group could have in a tier."""
        numbers = self._per_extent[tier]
        return tiers[tier] // numbers[0] * numbers[group]

    # ---- of a frame

    def _frame(self, data: Any, where: str, block_size: int, tiers: dict[str, int]) -> Frame:
        frame = super()._frame(data, where, block_size, tiers)
        pages = {
            tier: tuple(self._page(page, f"{where}, {tier} page", block_size, tier, tiers) for page in given)
            for tier, given in self._by_tier(data, "pages", where, tiers).items()
        }
        extents = {
            tier: tuple(self._int(owner, f"{where}, {tier}, extents", -1, len(self._reaches) - 1) for owner in given)
            for tier, given in self._by_tier(data, "extents", where, tiers).items()
        }
        for tier, owners in extents.items():
            keys = [(held.group, held.page) for held in pages[tier]]
            if keys != sorted(set(keys)):
                raise self._problem(f"{where}, {tier}", "the pages do not stand once each, by their groups and ids")
            if len(owners) != (wanted := tiers[tier] // self._per_extent[tier][0]):
                raise self._problem(f"{where}, {tier}, extents", f"{len(owners)} are told, and the tier has {wanted}")
            for group, page in [*((0, held.block) for held in frame.tiers[tier]), *keys]:
                if owners[page // self._per_extent[tier][group]] != group:
                    raise self._problem(
                        f"{where}, {tier} page {page} of group {group}", "its extent is not the group's"
                    )
        frame = replace(
            frame,
            pages=pages,
            page_copies=tuple(self._page_copy(each, where, tiers) for each in self._list(data, "page_copies", where)),
            points=tuple(self._point(point, where, tiers) for point in self._list(data, "points", where)),
            extents=extents,
        )
        self._tables_agree(frame, where)
        return frame

    def _tables_agree(self, frame: Frame, where: str) -> None:
        """The sequences' tables, the points and the pages tell the same story."""
        having: dict[tuple[int, int], set[str]] = {}
        for sequence in frame.sequences:
            for group, table in enumerate(sequence.tables, start=1):
                for page in table.pages:
                    having.setdefault((group, page), set()).add(sequence.name)
        told = {(held.group, held.page): set(held.sequences) for held in frame.pages["device"] if held.sequences}
        if having != told:
            group, page = min(key for key in having | told if having.get(key) != told.get(key))
            raise self._problem(f"{where}, device page {page} of group {group}", "the sequences' tables say otherwise")
        for tier, pages in frame.pages.items():
            if tier != "device" and any(held.sequences for held in pages):
                raise self._problem(f"{where}, {tier}", "sequences have device pages only")
        for point in frame.points:
            if point.block not in frame.held(point.tier):
                raise self._problem(f"{where}, points", f"{point.tier} block {point.block} has no owner")

    def _by_tier(self, data: dict[str, Any], key: str, where: str, tiers: dict[str, int]) -> dict[str, list[Any]]:
        given = self._get(data, key, where, dict, "an object")
        if list(given) != list(tiers):
            raise self._problem(f"{where}, {key}", f"{', '.join(given) or 'none'}, but there are {', '.join(tiers)}")
        return {tier: list(self._list(given, tier, f"{where}, {key}")) for tier in tiers}

    def _page(self, data: Any, where: str, block_size: int, tier: str, tiers: dict[str, int]) -> HeldPage:
        self._is(data, where, dict, "an object")
        group = self._number(data, "group", where, 1, len(self._reaches) - 1)
        page = HeldPage(
            group=group,
            page=self._number(data, "page", where, 0, self._size(tier, group, tiers) - 1),
            references=self._number(data, "references", where, 1, 2**31 - 1),
            in_tree=self._get(data, "in_tree", where, bool, "true or false"),
            sequences=self._names(data, where),
            points=self._number(data, "points", where, 0, 2**31 - 1),
            moves=self._number(data, "moves", where, 0, 2**31 - 1),
            moving=self._moving(data, where),
            logical=self._number(data, "logical", where, -1, MOST_BLOCKS),
            tokens=self._tokens(data, where),
        )
        self._fits(page, where, block_size)
        return page

    def _sequence(self, data: Any, where: str, block_size: int) -> SequenceState:
        sequence, tables = super()._sequence(data, where, block_size), self._list(data, "tables", where)
        if len(tables) != len(self._reaches) - 1:
            raise self._problem(f"{where}, tables", f"there are {len(tables)}: one for each short group is needed")
        return replace(sequence, tables=tuple(self._table(table, f"{where}, tables") for table in tables))

    def _table(self, data: Any, where: str) -> PageTable:
        self._is(data, where, dict, "an object")
        first = self._number(data, "first", where, 0, MOST_BLOCKS)
        return PageTable(first, self._integers(data, "pages", where, 0, MOST_BLOCKS))

    def _point(self, data: Any, where: str, tiers: dict[str, int]) -> Point:
        place = f"{where}, points"
        self._is(data, place, dict, "an object")
        tier = self._get(data, "tier", place, str, "text")
        having = [self._is(name, place, str, "text") for name in self._list(data, "tiers", place)]
        if tier not in tiers or not having or [name for name in tiers if name in having] != having:
            raise self._problem(place, f"some of the tiers {', '.join(tiers)} are needed, in this order")
        block = self._number(data, "block", place, 0, tiers[tier] - 1)
        return Point(self._number(data, "num_blocks", place, 1, MOST_BLOCKS), tier, block, tuple(having))

    def _page_copy(self, each: Any, where: str, tiers: dict[str, int]) -> tuple[int, int, int]:
        place = f"{where}, page_copies"
        if not isinstance(each, list) or len(each) != 3:
            raise self._problem(place, "a group and a pair of page ids are needed")
        group = self._int(each[0], place, 1, len(self._reaches) - 1)
        source, target = (self._int(page, place, 0, self._size("device", group, tiers) - 1) for page in each[1:])
        return group, source, target

    def _move(self, data: Any, where: str, tiers: dict[str, int]) -> Move:
        self._is(data, where, dict, "an object")
        group = self._number(data, "group", where, 0, len(self._reaches) - 1)
        return replace(super()._move(data, where, {t: self._size(t, group, tiers) for t in tiers}), group=group)

    def _integers(self, data: dict[str, Any], key: str, where: str, least: int, most: int) -> tuple[int, ...]:
        return tuple(self._int(each, f"{where}, {key}", least, most) for each in self._list(data, key, where))

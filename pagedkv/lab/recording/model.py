"""The frames of a recording as plain data: integers, texts and tuples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pagedkv.lab.recording.groups import GroupOfLayers, HeldPage, Moving, PageTable, Point

FORMAT = "pagedkv recording"
VERSION, VERSION_OF_GROUPS = 1, 2  # of files: a cache without groups of layers is written as version 1


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block with at least one owner.

    Attributes
    ----------
    block : int
        Its id in its tier.
    references : int
        How many owners it has.
    in_tree : bool
        Whether the prefix tree is one of them.
    sequences : tuple of str
        Sequences that have it in their block tables, by name.
    moving : ``"out"`` (source of a move in flight), ``"in"`` (its destination) or ``""``
    tokens : tuple of int
        Tokens whose KV is in it, from its first slot on; empty where that is not known.
    """

    block: int
    references: int
    in_tree: bool
    sequences: tuple[str, ...]
    moving: Moving
    tokens: tuple[int, ...]

    @property
    def others(self) -> int:
        """Owners beside tree, sequences and move.

        Pins, prefetches, prompts being opened, and owners older than the recording.
        """
        return self.references - self.in_tree - len(self.sequences) - bool(self.moving)

    @property
    def shared(self) -> bool:
        """Whether several sequences have it."""
        return len(self.sequences) > 1


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence: its tokens, and its block table.

    Attributes
    ----------
    name : str
        ``"A"``, ``"B"``, ... in the order in which they were opened.
    parent : str
        Name of the sequence that it was forked from, or empty.
    tokens : tuple of int
    computed : int
        Leading tokens whose KV is written.
    blocks : tuple of int
        Device block of each of its logical blocks.
    tables : tuple of PageTable
        Of each short group.
    """

    name: str
    parent: str
    tokens: tuple[int, ...]
    computed: int
    blocks: tuple[int, ...]
    tables: tuple[PageTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A block's copy from one tier to another: under way in this frame, or just over.

    Of a `group` from 1 on it is a page's.
    """

    source: str
    block: int
    destination: str
    to: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture.

    Attributes
    ----------
    what : the span that it belongs to (:mod:`pagedkv.observe.hooks`), ``"opened"`` or ``"note"``.
    caption : what happened, in a sentence.
    sequences : tuple of SequenceState, in the order in which they were opened
    tiers : mapping of tier name to tuple of HeldBlock, by id; the other blocks are free.
    copies : tuple of (source, destination)
        Device blocks copied because a sequence was about to write into a shared one.
    moves : tuple of Move
    pages : mapping of tier name to tuple of HeldPage, by group and id; the pages of short groups.
    page_copies : tuple of (group, source, destination)
        As `copies`, of short groups.
    points : tuple of Point, by their depth
    extents : mapping of tier name to tuple of int
        The group that has each extent, -1 for a free one.
    """

    what: str
    caption: str
    sequences: tuple[SequenceState, ...]
    tiers: Mapping[str, tuple[HeldBlock, ...]]
    copies: tuple[tuple[int, int], ...]
    moves: tuple[Move, ...]
    pages: Mapping[str, tuple[HeldPage, ...]] = field(default_factory=dict)
    page_copies: tuple[tuple[int, int, int], ...] = ()
    points: tuple[Point, ...] = ()
    extents: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def held(self, tier: str = "device") -> dict[int, HeldBlock]:
        """The blocks of a tier that have an owner, by id."""
        return {held.block: held for held in self.tiers.get(tier, ())}

    def held_pages(self, group: int, tier: str = "device") -> dict[int, HeldPage]:
        """The pages of a short group in a tier that have a holder, by id."""
        return {held.page: held for held in self.pages.get(tier, ()) if held.group == group}


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run.

    Attributes
    ----------
    block_size : int
        Tokens of a block.
    policy : str
        The eviction policy.
    tiers : mapping of tier name to int
        Blocks of each tier, hottest first.
    frames : tuple of Frame
    left_out : int
        Frames that were not recorded: beyond the recorder's bound, or while another thread changed the books.
    texts : mapping of int to str
        How to write a token, for those that have a text.
    groups : tuple of GroupOfLayers
        Of a cache by groups of layers; empty for other caches, whose frames have no pages, points and extents.
    per_extent : mapping of tier name to tuple of int
        Blocks or pages of each group in one extent of the tier.
    """

    block_size: int
    policy: str
    tiers: Mapping[str, int]
    frames: tuple[Frame, ...]
    left_out: int
    texts: Mapping[int, str]
    groups: tuple[GroupOfLayers, ...] = ()
    per_extent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        whole = asdict(self)
        if not self.groups:
            _without(whole, "groups", "per_extent")
            for frame in whole["frames"]:
                _without(frame, "pages", "page_copies", "points", "extents")
                for sequence in frame["sequences"]:
                    _without(sequence, "tables")
                for move in frame["moves"]:
                    _without(move, "group")
        version = VERSION_OF_GROUPS if self.groups else VERSION
        return {"format": FORMAT, "version": version, **whole, "texts": {str(t): s for t, s in self.texts.items()}}

    def text(self, token: int) -> str:
        """A token in words, or its number."""
        return self.texts.get(token, str(token))

    def words(self, tokens: Iterable[int]) -> str:
        """Tokens as one text, with blanks between them unless the recording's texts bring some."""
        bring_blanks = any(text[:1].isspace() or text[-1:].isspace() for text in self.texts.values())
        return ("" if bring_blanks else " ").join(self.text(token) for token in tokens)


def _without(fields: dict[str, Any], *names: str) -> None:
    for name in names:
        del fields[name]

"""Parts of a recording of a cache by groups of layers: groups, pages, tables and points.

Group 0 sees everything, and its blocks are those of :mod:`pagedkv.lab.recording.model`. Of a short group, with a window
or chunks, a sequence holds the pages of its last blocks alone. docs/models.md has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Moving = Literal["", "out", "in"]

MOST_RANGES = 3  # of layers, in a label


@dataclass(frozen=True, slots=True)
class GroupOfLayers:
    """Layers that see equally far back.

    Attributes
    ----------
    layers : tuple of int
        The model's layers, ascending; those that read another layer's KV are in its group.
    windows : tuple of int
        Tokens that its layers see, ascending and each once; empty where they have no window.
    chunk : int or None
        Tokens of a chunk.
    """

    layers: tuple[int, ...]
    windows: tuple[int, ...]
    chunk: int | None

    def label(self, number: int) -> str:
        """``group 1: layers 0-4, window of 512 tokens``."""
        reach = "all tokens"
        if self.chunk is not None:
            reach = f"chunks of {self.chunk} tokens"
        elif self.windows:
            sizes = " and ".join(map(str, self.windows[:: max(1, len(self.windows) - 1)]))  # the least and the most
            reach = f"{'window' if len(self.windows) == 1 else 'windows'} of {sizes} tokens"
        return f"group {number}: {_layers(self.layers)}, {reach}"


def _layers(layers: Sequence[int]) -> str:
    """``layer 3``, ``layers 0-4 and 6-10``; of many ranges the first ones."""
    words = [str(first) if first == last else f"{first}-{last}" for first, last in _ranges(layers)]
    if len(words) > MOST_RANGES:
        return f"{len(layers)} layers ({', '.join(words[: MOST_RANGES - 1])} and so on)"
    listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return f"layer {listed}" if len(layers) == 1 else f"layers {listed}"


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    starts = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    for first, end in pairwise([0, *starts, len(numbers)]):
        yield numbers[first], numbers[end - 1]


@dataclass(frozen=True, slots=True)
class PageTable:
    """A sequence's table in a short group: it has no pages before block `first`.

    Attributes
    ----------
    first : int
        Logical block that the first page is of.
    pages : tuple of int
        Device page of each of its logical blocks from `first` on.
    """

    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeldPage:
    """A page of a short group, with at least one holder.

    The prefix tree is none: it names a page as long as another holds it.

    Attributes
    ----------
    group : int
        1 or more.
    page : int
        Its id in its group and tier.
    references : int
        How many holders it has.
    in_tree : bool
        Whether the prefix tree names it, so that a hit finds it.
    sequences : tuple of str
        Sequences that have it in their tables, by name.
    points : int
        Points whose tail it belongs to in this tier.
    moves : int
        Moves in flight that read or write it.
    moving : ``"out"`` (source of a move that empties it), ``"in"`` (destination of a move) or ``""``
    logical : int
        Block of its prefix that it stands for, -1 where that is not known.
    tokens : tuple of int
        Tokens whose KV is in it, from its first slot on; empty where that is not known.
    """

    group: int
    page: int
    references: int
    in_tree: bool
    sequences: tuple[str, ...]
    points: int
    moves: int
    moving: Moving
    logical: int
    tokens: tuple[int, ...]

    @property
    def others(self) -> int:
        """Holders beside sequences, points and moves: as :attr:`HeldBlock.others`."""
        return self.references - len(self.sequences) - self.points - self.moves

    @property
    def shared(self) -> bool:
        """Whether several sequences have it."""
        return len(self.sequences) > 1


@dataclass(frozen=True, slots=True)
class Point:
    """A boundary from which a request can go on: every group has its pages before it.

    Attributes
    ----------
    num_blocks : int
        Blocks before it.
    tier : str
        Hottest tier that has the block of group 0 before it.
    block : int
        Id of that block there.
    tiers : tuple of str
        Tiers that have its whole tail, the pages of short groups.
    """

    num_blocks: int
    tier: str
    block: int
    tiers: tuple[str, ...]

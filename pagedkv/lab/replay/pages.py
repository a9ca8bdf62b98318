"""Pages of groups of layers, in bytes: the part of a trace's block that each group keeps.

The layers of a group see equally far back. A request can go on behind a block if each group has its last pages before
that boundary (docs/models.md). The blocks of a trace are longer than a cache's own, so a page of a window that is
shorter than the block holds only the tokens that a boundary needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.errors import InvalidArgument, UnsupportedVariant
from pagedkv.lab.sizing.shape import Group, KVFormat, LayerGroup
from pagedkv.spec.groups import MAX_GROUPS, TAILS

KEPT_TOKENS = 16  # windows are kept in blocks of so many tokens


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one group.

    Attributes
    ----------
    page_bytes : of one block of the trace.
    window : blocks of the trace that are needed before a boundary; 0: all, or those since the last chunk began.
    chunk : blocks of a chunk; 0: the layers have none.
    """

    page_bytes: int
    window: int = 0
    chunk: int = 0

    def need(self, num_blocks: int) -> int:
        """Of the `num_blocks` blocks before a boundary, the number of last ones that are needed."""
        if self.chunk:
            return num_blocks % self.chunk
        return min(num_blocks, self.window) if self.window else num_blocks


@dataclass(frozen=True, slots=True)
class ModelPages:
    """A model's groups of layers over the blocks of one trace.

    Attributes
    ----------
    name : of the model.
    groups : the one that sees everything first.
    all_bytes : of one block of the trace in a cache whose layers keep every token.
    """

    name: str
    groups: tuple[Pages, ...]
    all_bytes: int

    @property
    def point_every(self) -> int:
        """Blocks between regular points, whose tails then take 1/16 of the bytes of group 0."""
        tail = sum((pages.window or pages.chunk) * pages.page_bytes for pages in self.groups[1:])
        return max(1, -(-TAILS * tail // self.groups[0].page_bytes))

    @property
    def unit(self) -> int:
        """The most bytes of which every page is a multiple."""
        return math.gcd(*(pages.page_bytes for pages in self.groups))

    def to_json(self) -> dict[str, object]:
        """The pages, for a report."""
        groups = [
            {"page_bytes": pages.page_bytes, "window_blocks": pages.window or None, "chunk_blocks": pages.chunk or None}
            for pages in self.groups
        ]
        return {"layers_of": self.name, "groups": groups, "point_every": self.point_every}

    def kept_bytes(self, num_blocks: int, boundaries: Sequence[int]) -> int:
        """Bytes of a prefix that is usable at these boundaries: ascending, the last at its end."""
        total = num_blocks * self.groups[0].page_bytes
        for pages in self.groups[1:]:
            before = 0
            for at in boundaries:
                total += min(pages.need(at), at - before) * pages.page_bytes
                before = at
        return total


def keeps_less(layers: Sequence[Group]) -> bool:
    """Whether some layers see everything and others do not: a cache by groups keeps less."""
    return not limits_all(layers) and not all(map(_sees_all, layers))


def limits_all(layers: Sequence[Group]) -> bool:
    """Whether no layer sees everything: a cache by groups keeps all tokens then, too."""
    return not any(map(_sees_all, layers))


def _sees_all(layer: Group) -> bool:
    return isinstance(layer, LayerGroup) and layer.window is None and layer.chunk is None


def model_pages(name: str, layers: Sequence[Group], block_size: int) -> ModelPages | None:
    """A model's pages over blocks of `block_size` tokens, None where groups save nothing.

    Parameters
    ----------
    layers : as :func:`pagedkv.lab.sizing.models.groups_of` or a published model has them, in 16-bit numbers.

    Raises
    ------
    InvalidArgument
        A chunk is no multiple of the block, or there are too many groups.
    UnsupportedVariant
        The model has recurrent states.
    """
    if not keeps_less(layers):
        return None
    total, by_reach = 0, {(0, 0): 0}
    for layer in layers:
        if not isinstance(layer, LayerGroup):
            raise UnsupportedVariant(f"{name} has layers with recurrent states, which cannot be replayed yet")
        token_bytes = layer.token_bytes(KVFormat())
        total += token_bytes * block_size
        if layer.chunk is not None and layer.chunk % block_size:
            raise InvalidArgument(
                f"{name}: chunks of {layer.chunk} tokens are no multiple of the trace's blocks of {block_size}"
            )
        reach, kept = (0, (layer.chunk or 0) // block_size), block_size
        if layer.window is not None:
            reach = max(1, -(-(layer.window - 1) // block_size)), 0
            if layer.window < block_size:
                kept = -(-(layer.window - 1) // KEPT_TOKENS) * KEPT_TOKENS
        by_reach[reach] = by_reach.get(reach, 0) + token_bytes * kept
    if len(by_reach) > MAX_GROUPS:
        raise InvalidArgument(f"{name} has {len(by_reach)} groups of layers; at most {MAX_GROUPS} can be kept apart")
    groups = tuple(Pages(kept, *reach) for reach, kept in by_reach.items())
    return ModelPages(name, groups, total)

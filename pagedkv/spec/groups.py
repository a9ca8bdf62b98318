"""Groups of layers that see equally far back, and the extents of memory that they share.

A *page* is a group's bytes for one block of tokens. A sequence can go on from the boundary behind block k if each group
still has its last ``need(k)`` pages before it. A tier's memory is cut into *extents* of one size. An extent belongs to
one group at a time and holds that group's pages at equal distances, so page i of a group lies ``i * stride`` bytes into
the memory, whichever extent holds it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeAlias

from pagedkv.errors import InvalidArgument
from pagedkv.spec.kv_spec import MAX_BLOCK_BYTES, KVSpec
from pagedkv.spec.scales import Scales

MAX_GROUPS = 4
MAX_EXTENT_BYTES = MAX_BLOCK_BYTES
MAX_PAGES = 4096  # of the largest group, in one extent
EXTENTS = 64  # of a tier's memory at least, so that little of it is stranded in extents with a few pages
WASTE = 100  # at most 1 / WASTE of an extent is left over
MIN_ALIGN, MAX_ALIGN = 16, 256  # bytes
TAILS = 16  # the tails at regular points take 1 / TAILS of the bytes of group 0

_Reach: TypeAlias = tuple[int | None, int | None]  # window and chunk, in blocks


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that need the same blocks before a boundary.

    Attributes
    ----------
    layers : of the spec's layers with KV of their own, ascending.
    window : blocks before a boundary that the layers need; None: they have no window.
    chunk : blocks of a chunk; None: they have no chunks.
    spec : of these layers alone; its blocks are the group's pages.
    """

    layers: tuple[int, ...]
    window: int | None
    chunk: int | None
    spec: KVSpec

    def need(self, num_blocks: int) -> int:
        """Of the `num_blocks` blocks before a boundary, the number of last ones that are needed."""
        if self.window is not None:
            return min(num_blocks, self.window)
        return num_blocks if self.chunk is None else num_blocks % self.chunk

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.spec.block_bytes

    @property
    def is_short(self) -> bool:
        """Whether the layers stop needing a block once the sequence is long enough."""
        return self.window is not None or self.chunk is not None


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How the groups' pages lie in a tier's memory.

    Attributes
    ----------
    groups : group 0 sees everything; the others are short.
    extent_bytes : of one extent, ``per_extent[g] * strides[g]`` for every group.
    per_extent : pages in an extent, by group.
    strides : bytes from a page to the next, by group.
    point_every : blocks between regular points; tails kept at all of them take 1/16 of the bytes of group 0
        0: no group is short.
    """

    groups: tuple[Group, ...]
    extent_bytes: int
    per_extent: tuple[int, ...]
    strides: tuple[int, ...]
    point_every: int

    @property
    def waste(self) -> tuple[float, ...]:
        """Part of an extent that no page covers, by group."""
        pages = zip(self.per_extent, self.groups, strict=True)
        return tuple((self.extent_bytes - count * group.page_bytes) / self.extent_bytes for count, group in pages)


def groups_of(spec: KVSpec) -> tuple[Group, ...]:
    """Group a spec's layers by how far back they see.

    Returns
    -------
    Group 0 holds the layers that see everything; short groups follow in the order of their first layers. Where no layer
    sees everything, or all do, the only group holds all layers and needs every block.

    Raises
    ------
    InvalidArgument
        The spec needs more than MAX_GROUPS groups.
    """
    everything: _Reach = (None, None)
    members: dict[_Reach, list[int]] = {everything: []}
    for layer in range(spec.num_layers):
        members.setdefault(_reach(spec, layer), []).append(layer)
    if len(members) == 1 or not members[everything]:
        return (Group(tuple(range(spec.num_layers)), None, None, spec),)
    if len(members) > MAX_GROUPS:
        first = spec.model_layer(list(members.values())[MAX_GROUPS][0])
        raise InvalidArgument(
            f"layer {first} needs group {MAX_GROUPS + 1} of {len(members)} groups of layers that see equally far back: "
            f"at most {MAX_GROUPS} can be kept apart"
        )
    return tuple(Group(tuple(own), *reach, _part(spec, own)) for reach, own in members.items())


def layout_of(spec: KVSpec, memory: int | None = None) -> GroupLayout:
    """Choose the size of an extent for a spec's groups.

    The fewest pages of the largest group with which no group leaves over 1 % of an extent unused; if no number of
    pages does that, the one with the least waste. Of these, one that divides the memory into EXTENTS extents or more,
    where there is one.

    Parameters
    ----------
    spec : KVSpec
    memory : bytes of the tier; None: as much as an extent may want.

    Raises
    ------
    InvalidArgument
        There are too many groups, or an extent would pass 2 GiB.
    """
    groups = groups_of(spec)
    pages = [group.page_bytes for group in groups]
    align = _alignment(min(pages))
    best: tuple[float, int, tuple[int, ...]] | None = None
    for count in range(1, MAX_PAGES + 1):
        wanted = count * max(pages)
        per_extent = tuple(wanted // page for page in pages)
        unit = align * math.lcm(*per_extent)
        extent = -(-wanted // unit) * unit
        if extent > MAX_EXTENT_BYTES or (best is not None and memory is not None and extent * EXTENTS > memory):
            continue
        waste = max(extent - number * page for number, page in zip(per_extent, pages, strict=True)) / extent
        if best is None or waste < best[0]:
            best = waste, extent, per_extent
        if waste * WASTE <= 1:
            best = waste, extent, per_extent
            break
    if best is None:
        largest = groups[pages.index(max(pages))]
        raise InvalidArgument(
            f"an extent of memory for the pages of layer {spec.model_layer(largest.layers[0])} and those alike "
            f"would pass 2 GiB: take a smaller block_size than {spec.block_size}"
        )
    _, extent, per_extent = best
    strides = tuple(extent // number for number in per_extent)
    return GroupLayout(groups, extent, per_extent, strides, _point_every(groups))


def _reach(spec: KVSpec, layer: int) -> _Reach:
    """Blocks that a layer's window reaches back, and blocks of its chunks."""
    window = None if spec.windows is None else spec.windows[layer]
    chunk = None if spec.chunks is None else spec.chunks[layer]
    reach = None if window is None else -(-(window - 1) // spec.block_size)
    return reach, None if chunk is None else chunk // spec.block_size


def _part(spec: KVSpec, layers: list[int]) -> KVSpec:
    """The spec of some layers alone."""
    scales = spec.scales
    if isinstance(scales, Scales) and scales.shape[0] > 1:
        scales = Scales(*([side[layer] for layer in layers] for side in (scales.k, scales.v)))
    windows, chunks = (
        None if limits is None else tuple(limits[layer] for layer in layers) for limits in (spec.windows, spec.chunks)
    )
    return dataclasses.replace(spec, num_layers=len(layers), windows=windows, chunks=chunks, reads=None, scales=scales)


def _alignment(page_bytes: int) -> int:
    """A power of two of which strides are multiples; at most 1 % of a page, but at least 16."""
    most = min(MAX_ALIGN, page_bytes // WASTE)
    return max(MIN_ALIGN, 1 << max(0, most.bit_length() - 1))


def _point_every(groups: tuple[Group, ...]) -> int:
    """Blocks between regular points."""
    if len(groups) == 1:
        return 0
    tail = sum(((group.window or 0) + (group.chunk or 0)) * group.page_bytes for group in groups)
    return max(1, -(-TAILS * tail // groups[0].page_bytes))

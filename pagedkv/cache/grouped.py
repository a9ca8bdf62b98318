"""A cache that keeps each layer's reach alone: memory in extents for groups of layers.

Chooses the layout and opens the core over it; group_kv.py has the bytes.
"""

from __future__ import annotations

from typing import Any

from pagedkv._core.block_pool import ExtentPool
from pagedkv._core.placement import Placement
from pagedkv._core.radix_tree import RadixTree
from pagedkv.errors import InvalidArgument, UnsupportedVariant
from pagedkv.spec.groups import GroupLayout, groups_of, layout_of
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import format_size

LEAST = 2  # extents for each group: a step needs pages of all of them


def group_layout(spec: KVSpec, num_blocks: int, **others: object) -> tuple[GroupLayout, int]:
    """The layout of a cache by groups over the device alone, and its extents.

    Parameters
    ----------
    spec : KVSpec
    num_blocks : of all layers, that the device's memory would hold.
    others : arguments that such a cache cannot have yet, by name; None or empty where it is not wanted.

    Raises
    ------
    UnsupportedVariant
        One of `others` is wanted.
    InvalidArgument
        All layers see equally far, or the memory is too small.
    """
    wanted = [name for name, given in others.items() if given]
    if wanted:
        raise UnsupportedVariant(
            f"by_group=True keeps each layer's reach alone, on the device alone and with policy='lru' so far: leave "
            f"{', '.join(wanted)} out, or leave by_group out and keep all tokens of every layer"
        )
    if len(groups_of(spec)) == 1:
        raise InvalidArgument(
            "by_group=True is for models with full attention in some layers and a window or chunks in others; all "
            "layers of this spec see equally far, or none sees everything: leave by_group out"
        )
    memory = num_blocks * spec.block_bytes
    layout = layout_of(spec, memory)
    extents, least = memory // layout.extent_bytes, LEAST * len(layout.groups)
    if extents < least:
        raise InvalidArgument(
            f"{format_size(memory)} hold {extents} extents of {format_size(layout.extent_bytes)}, and groups of layers "
            f"need {least} at least: give the device {format_size(least * layout.extent_bytes)} or more"
        )
    return layout, extents


def open_groups(layout: GroupLayout, num_extents: int, block_size: int, **options: Any) -> Placement:
    """The core over so many extents; `options` as Placement's."""
    shared = ExtentPool(num_extents, layout.per_extent)
    short = zip(shared.pools[1:], layout.groups[1:], strict=True)
    groups = [(pool, group.window or 0, group.chunk or 0) for pool, group in short]
    tree = RadixTree(block_size, 1, keep_names=options.get("event_words", 0) > 0)
    return Placement(tree, [shared.pools[0]], groups=groups, point_every=layout.point_every, **options)

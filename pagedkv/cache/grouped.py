"""A cache that keeps each layer's reach alone: memory in extents for groups of layers.

Chooses the layout and opens the core over it; group_kv.py has the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedkv._core.block_pool import ExtentPool
from pagedkv._core.placement import Placement
from pagedkv._core.radix_tree import RadixTree
from pagedkv._core.tier import TIER_NAMES, Tier
from pagedkv.errors import InvalidArgument, UnsupportedVariant
from pagedkv.spec.groups import GroupLayout, groups_of, layout_of
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import format_size

LEAST = 2  # extents for each group: a step needs pages of all of them


def group_layout(spec: KVSpec, sizes: Sequence[int], **others: object) -> tuple[GroupLayout, list[int]]:
    """The layout of a cache by groups, and the extents of each tier.

    Parameters
    ----------
    spec : KVSpec
    sizes : of each tier, the blocks of all layers that its memory would hold.
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
            f"by_group=True keeps each layer's reach alone, on a CPU, in device and host memory and with policy='lru': "
            f"leave {', '.join(wanted)} out, or leave by_group out and keep all tokens of every layer"
        )
    if len(groups_of(spec)) == 1:
        raise InvalidArgument(
            "by_group=True is for models with full attention in some layers and a window or chunks in others; all "
            "layers of this spec see equally far, or none sees everything: leave by_group out"
        )
    layout = layout_of(spec, sizes[Tier.DEVICE] * spec.block_bytes)
    extents, least = [], LEAST * len(layout.groups)
    for name, num_blocks in zip(TIER_NAMES, sizes, strict=False):
        memory = num_blocks * spec.block_bytes
        extents.append(memory // layout.extent_bytes)
        if memory and extents[-1] < least:
            raise InvalidArgument(
                f"{format_size(memory)} hold {extents[-1]} extents of {format_size(layout.extent_bytes)}, and groups "
                f"of layers need {least}: give the {name} {format_size(least * layout.extent_bytes)} or more"
            )
    return layout, extents


def open_groups(layout: GroupLayout, extents: Sequence[int], block_size: int, **options: Any) -> Placement:
    """The core over so many extents in each tier; `options` as Placement's."""
    tiers = [ExtentPool(count, layout.per_extent).pools for count in extents if count]
    short = enumerate(layout.groups[1:], start=1)
    groups = [(tuple(pools[g] for pools in tiers), group.window or 0, group.chunk or 0) for g, group in short]
    tree = RadixTree(block_size, len(tiers), keep_names=options.get("event_words", 0) > 0)
    return Placement(tree, [pools[0] for pools in tiers], groups=groups, point_every=layout.point_every, **options)

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
from pagedkv.cache.disk_lanes import disk_room
from pagedkv.errors import InvalidArgument, UnsupportedVariant
from pagedkv.spec.budgets import Disk
from pagedkv.spec.groups import GroupLayout, groups_of, layout_of
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import format_size

LEAST = 2  # extents for each group: a step needs pages of all of them


def group_layout(
    spec: KVSpec, sizes: Sequence[int], disk: Disk | None = None, **others: object
) -> tuple[GroupLayout, list[int]]:
    """The layout of a cache by groups, and the extents of each tier.

    Parameters
    ----------
    spec : KVSpec
    sizes : of each tier, the blocks of all layers that it would hold.
    disk : the tier on disk, whose extents are of their own size (disk_lanes.py).
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
            "by_group=True keeps each layer's reach alone, in memory and on disk, with policy='lru': leave "
            f"{', '.join(wanted)} out, or leave by_group out and keep all tokens of every layer"
        )
    if len(groups_of(spec)) == 1:
        raise InvalidArgument(
            "by_group=True is for models with full attention in some layers and a window or chunks in others; all "
            "layers of this spec see equally far, or none sees everything: leave by_group out"
        )
    layout = layout_of(spec, sizes[Tier.DEVICE] * spec.block_bytes)
    extents, least = [], LEAST * len(layout.groups)
    for tier, (name, num_blocks) in enumerate(zip(TIER_NAMES, sizes, strict=False)):
        room, extent_bytes = num_blocks * spec.block_bytes, layout.extent_bytes
        if tier == Tier.DISK and disk is not None:
            room, extent_bytes = disk_room(spec, disk, num_blocks)
        extents.append(room // extent_bytes)
        if room and extents[-1] < least:
            raise InvalidArgument(
                f"{format_size(room)} hold {extents[-1]} extents of {format_size(extent_bytes)}, and groups of layers "
                f"need {least}: give the {name} {format_size(least * extent_bytes)} or more"
            )
    return layout, extents


def open_groups(
    layout: GroupLayout, extents: Sequence[int], block_size: int, on_disk: Sequence[int] = (), **options: Any
) -> Placement:
    """The core over so many extents in each tier; `options` as Placement's.

    On disk an extent has so many pages of each group.
    """
    pools = [
        ExtentPool(count, on_disk if tier == Tier.DISK else layout.per_extent).pools if count else None
        for tier, count in enumerate(extents)
    ]
    while pools[-1] is None:
        pools.pop()
    by_group = [tuple(None if each is None else each[g] for each in pools) for g in range(len(layout.groups))]
    groups = [
        (of_tiers, group.window or 0, group.chunk or 0)
        for of_tiers, group in zip(by_group[1:], layout.groups[1:], strict=True)
    ]
    tree = RadixTree(block_size, len(pools), keep_names=options.get("event_words", 0) > 0)
    return Placement(tree, by_group[0], groups=groups, point_every=layout.point_every, **options)


def groups_in_use(placement: Placement) -> dict[str, tuple[dict[str, int], ...]]:
    """Pages and extents of each group by tier; empty without groups of layers."""
    return {
        TIER_NAMES[tier]: tuple(
            {
                "live": counts["live"],
                "cached": counts["cached"],
                "extents": owners.count(group),
                "pages_per_extent": pool.extents.per_extent[group],
            }
            for owners in (pool.extents.owners(),)
            for group, counts in enumerate(of_group.counts() for of_group in pool.extents.pools)
        )
        for tier, pool in enumerate(placement.pools)
        if pool is not None and pool.extents is not None
    }

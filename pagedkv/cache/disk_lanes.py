"""The sizes of a disk tier's slots: of whole blocks, or of the pages of groups of layers.

They are the same below any memory.
"""

from __future__ import annotations

from pagedkv.spec.budgets import Disk
from pagedkv.spec.groups import layout_of
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.tiers.disk.format import SHORTEST_SUM, Geometry
from pagedkv.tiers.disk.lane import Lane, extent_bytes_of


def disk_lanes(spec: KVSpec, disk: Disk) -> tuple[Lane, ...]:
    """The lanes of a disk tier for groups of layers."""
    layout = layout_of(spec)
    return tuple(
        Lane(
            group.page_bytes, shards_of(disk, group.spec), count, len(group.layers), group.window or 0, group.chunk or 0
        )
        for group, count in zip(layout.groups, layout.per_extent, strict=True)
    )


def shards_of(disk: Disk, spec: KVSpec) -> int:
    """Checksum shards: as asked, or one per layer.

    Fewer where a layer is so short that its sum would cost more than its bytes.
    """
    if disk.shards is not None:
        return disk.shards
    return spec.num_layers if spec.block_bytes // spec.num_layers >= SHORTEST_SUM else 1


def disk_room(spec: KVSpec, disk: Disk, num_blocks: int) -> tuple[int, int]:
    """Bytes that slots of so many blocks take, and those of an extent of groups of layers."""
    slot_bytes = Geometry(1, spec.block_bytes, spec.block_size, shards_of(disk, spec), 1).slot_bytes
    return num_blocks * slot_bytes, extent_bytes_of(disk_lanes(spec, disk), spec.block_size)

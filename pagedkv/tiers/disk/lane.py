"""Groups of layers in one store: a *lane* each, with slots of its own size.

An extent of a segment file holds the slots of one lane at a time.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pagedkv.errors import InvalidArgument
from pagedkv.tiers.disk.format import Geometry

MAX_LANES = 4
LANE = struct.Struct("<QIIIII")  # page bytes, shards, slots of an extent, layers, window, chunk


@dataclass(frozen=True, slots=True)
class Lane:
    """The pages of one group of layers.

    Attributes
    ----------
    page_bytes : of a page: one block of tokens in the group's layers.
    shards : equal parts of a page with a sum each.
    per_extent : slots in an extent.
    layers : of the group.
    window, chunk : of the layers, in blocks; 0 without one.
    """

    page_bytes: int
    shards: int
    per_extent: int
    layers: int
    window: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            least, value = int(item.name in ("page_bytes", "shards", "per_extent")), getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
                raise InvalidArgument(f"{item.name} of a lane must be a whole number from {least} on, not {value!r}")

    def __str__(self) -> str:
        reach = "that see everything"
        if self.window or self.chunk:
            reach = f"with a {'window' if self.window else 'chunk'} of {self.window or self.chunk} blocks"
        return (
            f"{self.layers} layers {reach}, pages of {self.page_bytes:,} bytes with {self.shards} checksums each, "
            f"{self.per_extent} to an extent"
        )


def pack_lanes(lanes: Sequence[Lane]) -> bytes:
    """For the superblock."""
    return b"".join(
        LANE.pack(one.page_bytes, one.shards, one.per_extent, one.layers, one.window, one.chunk) for one in lanes
    )


def parse_lanes(data: bytes) -> tuple[Lane, ...]:
    """The lanes that a superblock names.

    Raises
    ------
    InvalidArgument
        Not a whole number of lanes, fewer than two or more than MAX_LANES, or one without pages.
    """
    if len(data) % LANE.size or not 2 <= len(data) // LANE.size <= MAX_LANES:
        raise InvalidArgument(f"format 2 lists 2 to {MAX_LANES} groups of layers, and {len(data)} bytes are none")
    return tuple(Lane(*found) for found in LANE.iter_unpack(data))


def lane_geometries(first: Geometry, lanes: Sequence[Lane]) -> tuple[Geometry, ...]:
    """Sizes by lane, from those of lane 0; `first` alone without lanes."""
    if not lanes:
        return (first,)
    extents, in_segment = first.num_blocks // first.extent_slots, first.segment_slots // first.extent_slots
    return tuple(
        Geometry(
            extents * lane.per_extent, lane.page_bytes, first.block_tokens, lane.shards, in_segment * lane.per_extent,
            lane.per_extent, first.extent_bytes,
        )
        for lane in lanes
    )  # fmt: skip


def first_geometry(num_extents: int, lanes: Sequence[Lane], block_tokens: int, segment_bytes: int) -> Geometry:
    """Sizes of lane 0 in a store of so many extents."""
    extent_bytes = extent_bytes_of(lanes, block_tokens)
    slots, lane = lanes[0].per_extent, lanes[0]
    in_segment = max(1, segment_bytes // extent_bytes) * slots
    return Geometry(
        num_extents * slots, lane.page_bytes, block_tokens, lane.shards, in_segment, slots, extent_bytes
    )  # fmt: skip


def extent_bytes_of(lanes: Sequence[Lane], block_tokens: int) -> int:
    """Bytes of an extent: as many as the largest of its lanes' slots take."""
    return max(
        lane.per_extent * Geometry(1, lane.page_bytes, block_tokens, lane.shards, 1).slot_bytes for lane in lanes
    )


def lane_fingerprint(fingerprint: bytes, lane: int) -> bytes:
    """A digest of the store's fingerprint and the lane's number, for the lane's headers."""
    return hashlib.blake2b(
        fingerprint + lane.to_bytes(4, "little"), digest_size=32, person=b"pagedkv-lane-v2\0"
    ).digest()

"""The superblock of a store: its identity, and what in it is void.

Two copies of 4 KiB, always written one after the other with the same content, each ending in a sum of its own:
whatever one power failure or one damaged page takes, the other copy says the same or, where the first was just
being replaced, has the state before.

    SUPER fields | lanes (lane.py) | purges: (namespace digest 32, barrier u64) [n_purges] | 0... | sum u64

Format version 1 has no lanes. Version 2 is that of stores for groups of layers: its SUPER fields have the sizes of lane
0, and their length says where the purges begin.

A purge makes every record of its namespace with a generation below its barrier void, whatever lies in the slots.
That is one small write, so it can be made durable before the caller is told, and no crash can take it back.
Generations never repeat, also not after a crash: opening a store reserves more of them than can be used until it
is closed, and closing gives back the unused ones.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.errors import InvalidArgument
from pagedkv.tiers.disk.format import PAGE, SUM, Geometry, seal, sealed
from pagedkv.tiers.disk.lane import Lane, extent_bytes_of, lane_geometries, pack_lanes, parse_lanes

MAJOR, MAJOR_WITH_LANES, MINOR = 1, 2, 0
ENDIAN = 0x01020304
SUPER_MAGIC = b"PGKVSB\r\n"
HASH_BLAKE2B, SUM_XXH3_64 = 1, 1
LARGEST_COUNT = 1 << 62
RESERVED_GENERATIONS = 1 << 40  # per opening: a write each microsecond uses them up in twelve days

# magic, major, minor, length, endian, features a reader must know, features it may ignore, uuid, seqno,
# epoch, fingerprint, num_blocks, block_bytes, header_bytes, slot_bytes, segment_slots, block_tokens, shards,
# token width, key hash, sum kind, clean, next generation, created at, key check, number of purges
SUPER = struct.Struct("<8sHHIIQQ16sQQ32sQQQQQIIBBBBQQ16sI")
PURGE = struct.Struct("<32sQ")
MAX_PURGES = (PAGE - SUM.size - SUPER.size) // PURGE.size  # without lanes


@dataclass(frozen=True, slots=True)
class Superblock:
    """A store's description of itself.

    Attributes
    ----------
    geometry, fingerprint, uuid, created_at : as the store was made; of several lanes, the sizes of lane 0.
    seqno : decides between the two copies: the higher valid one counts.
    epoch : records of other epochs count no more.
    clean : whether the store was closed properly. Only a statistic.
    next_generation : no record has this generation or a higher one.
    key_check : see `key_check`.
    purges : (namespace digest, barrier) at most once per namespace, `most_purges` at most.
    major, incompat : of the format; others than ours are for the caller to refuse.
    lanes : of a store for groups of layers, all of them; empty: its slots are all alike.
    """

    geometry: Geometry
    fingerprint: bytes
    uuid: bytes
    seqno: int
    epoch: int
    clean: bool
    next_generation: int
    created_at: int
    key_check: bytes
    purges: tuple[tuple[bytes, int], ...] = ()
    major: int = MAJOR
    incompat: int = 0
    lanes: tuple[Lane, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether this version of pagedkv knows the format."""
        return self.major == (MAJOR_WITH_LANES if self.lanes else MAJOR) and not self.incompat


def most_purges(lanes: Sequence[Lane]) -> int:
    """Purges that a superblock has room for beside these lanes."""
    return (PAGE - SUM.size - SUPER.size - len(pack_lanes(lanes))) // PURGE.size


def key_check(uuid: bytes, secret: bytes) -> bytes:
    """16 bytes that tell whether a KEY file belongs to a store, without telling the key."""
    return hashlib.blake2b(uuid, key=secret, digest_size=16, person=b"pagedkv-check-v1").digest()


def pack_super(state: Superblock) -> bytes:
    """4 KiB for either copy."""
    g, lanes = state.geometry, pack_lanes(state.lanes)
    body = SUPER.pack(
        SUPER_MAGIC, state.major, MINOR, SUPER.size + len(lanes), ENDIAN, state.incompat, 0, state.uuid, state.seqno,
        state.epoch, state.fingerprint, g.num_blocks, g.block_bytes, g.header_bytes, g.slot_bytes,
        g.segment_slots, g.block_tokens, g.shards, 4, HASH_BLAKE2B, SUM_XXH3_64, state.clean,
        state.next_generation, state.created_at, state.key_check, len(state.purges),
    )  # fmt: skip
    body += lanes + b"".join(PURGE.pack(*purge) for purge in state.purges)
    if len(body) > PAGE - SUM.size:
        raise InvalidArgument(
            f"{len(state.purges)} purges do not fit a superblock, at most {most_purges(state.lanes)} do"
        )
    return seal(body.ljust(PAGE - SUM.size, b"\0"), 0)


def parse_super(page: bytes) -> Superblock | None:
    """Parse the superblock of a 4 KiB copy; None if it is damaged.

    The caller judges the version.

    Raises
    ------
    InvalidArgument
        The copy is intact, but its content contradicts itself or this version's rules.
    """
    if len(page) != PAGE or not sealed(page, 0):
        return None
    (
        magic, major, _, length, endian, incompat, _, uuid, seqno, epoch, fingerprint, num_blocks, block_bytes,
        header_bytes, slot_bytes, segment_slots, block_tokens, shards, token_bytes, key_hash, sum_kind, clean,
        next_generation, created_at, check, num_purges,
    ) = SUPER.unpack_from(page)  # fmt: skip
    if magic != SUPER_MAGIC:
        return None
    purges: tuple[tuple[bytes, int], ...] = ()
    lanes: tuple[Lane, ...] = ()
    if major not in (MAJOR, MAJOR_WITH_LANES) or incompat:  # its sizes mean nothing here; the caller refuses it
        geometry = Geometry(1, 1, 1, 1, 1)
    else:
        extents = (0, 0)
        if major == MAJOR_WITH_LANES:
            lanes = parse_lanes(page[SUPER.size : min(length, PAGE)])
            extents = lanes[0].per_extent, extent_bytes_of(lanes, block_tokens)
        geometry = Geometry(num_blocks, block_bytes, block_tokens, shards, segment_slots, *extents)
        if lane_geometries(geometry, lanes)[0] != geometry:
            raise InvalidArgument("the superblock's sizes are not those of its first group of layers")
        kinds = (endian, token_bytes, key_hash, sum_kind)
        derived = (geometry.header_bytes, geometry.slot_bytes)
        if (header_bytes, slot_bytes) != derived or kinds != (ENDIAN, 4, HASH_BLAKE2B, SUM_XXH3_64):
            raise InvalidArgument(f"the superblock's sizes or kinds are not those of format version {major}")
        if max(seqno, epoch, next_generation) >= LARGEST_COUNT:
            raise InvalidArgument("the superblock's counters are beyond what any store can have reached")
        purges = _purges(page, SUPER.size + len(pack_lanes(lanes)), num_purges, next_generation, most_purges(lanes))
    return Superblock(
        geometry,
        fingerprint,
        uuid,
        seqno,
        epoch,
        bool(clean),
        next_generation,
        created_at,
        check,
        purges,
        major,
        incompat,
        lanes,
    )


def newest_copy(data: bytes) -> Superblock | None:
    """The copy that counts of the two in a file's 8 KiB; None if both are damaged.

    Raises
    ------
    InvalidArgument
        As :func:`parse_super`.
    """
    intact = [copy for copy in map(parse_super, (data[:PAGE], data[PAGE:])) if copy is not None]
    return max(intact, key=lambda copy: copy.seqno, default=None)


def _purges(page: bytes, start: int, count: int, next_generation: int, most: int) -> tuple[tuple[bytes, int], ...]:
    if count > most:
        raise InvalidArgument(f"the superblock names {count} purges, and {most} fit into one")
    found = tuple(PURGE.iter_unpack(page[start : start + count * PURGE.size]))
    if len({digest for digest, _ in found}) != count or any(barrier > next_generation for _, barrier in found):
        raise InvalidArgument("the superblock's purges contradict each other or its generations")
    return found

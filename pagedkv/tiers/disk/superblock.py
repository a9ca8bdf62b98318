"""The superblock of a store, format version 1: its identity, and what in it is void.

Two copies of 4 KiB, always written one after the other with the same content, each ending in a sum of its own:
whatever one power failure or one damaged page takes, the other copy says the same or, where the first was just
being replaced, has the state before.

    SUPER fields | purges: (namespace digest 32, barrier u64) [n_purges] | 0... | sum u64

A purge makes every record of its namespace with a generation below its barrier void, whatever lies in the slots.
That is one small write, so it can be made durable before the caller is told, and no crash can take it back.
Generations never repeat, also not after a crash: opening a store reserves more of them than can be used until it
is closed, and closing gives back the unused ones.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from pagedkv.errors import InvalidArgument
from pagedkv.tiers.disk.format import PAGE, SUM, Geometry, seal, sealed

MAJOR, MINOR = 1, 0
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
MAX_PURGES = (PAGE - SUM.size - SUPER.size) // PURGE.size


@dataclass(frozen=True, slots=True)
class Superblock:
    """A store's description of itself.

    Attributes
    ----------
    geometry, fingerprint, uuid, created_at : as the store was made.
    seqno : decides between the two copies: the higher valid one counts.
    epoch : records of other epochs count no more.
    clean : whether the store was closed properly. Only a statistic.
    next_generation : no record has this generation or a higher one.
    key_check : see `key_check`.
    purges : (namespace digest, barrier) at most once per namespace, `MAX_PURGES` at most.
    major, incompat : of the format; others than ours are for the caller to refuse.
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


def key_check(uuid: bytes, secret: bytes) -> bytes:
    """16 bytes that tell whether a KEY file belongs to a store, without telling the key."""
    return hashlib.blake2b(uuid, key=secret, digest_size=16, person=b"pagedkv-check-v1").digest()


def pack_super(state: Superblock) -> bytes:
    """4 KiB for either copy."""
    g = state.geometry
    body = SUPER.pack(
        SUPER_MAGIC, state.major, MINOR, SUPER.size, ENDIAN, state.incompat, 0, state.uuid, state.seqno,
        state.epoch, state.fingerprint, g.num_blocks, g.block_bytes, g.header_bytes, g.slot_bytes,
        g.segment_slots, g.block_tokens, g.shards, 4, HASH_BLAKE2B, SUM_XXH3_64, state.clean,
        state.next_generation, state.created_at, state.key_check, len(state.purges),
    )  # fmt: skip
    body += b"".join(PURGE.pack(*purge) for purge in state.purges)
    if len(body) > PAGE - SUM.size:
        raise InvalidArgument(f"{len(state.purges)} purges do not fit a superblock, at most {MAX_PURGES} do")
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
        magic, major, _, _, endian, incompat, _, uuid, seqno, epoch, fingerprint, num_blocks, block_bytes,
        header_bytes, slot_bytes, segment_slots, block_tokens, shards, token_bytes, key_hash, sum_kind, clean,
        next_generation, created_at, check, num_purges,
    ) = SUPER.unpack_from(page)  # fmt: skip
    if magic != SUPER_MAGIC:
        return None
    purges: tuple[tuple[bytes, int], ...] = ()
    if major != MAJOR or incompat:  # another format's sizes mean nothing here; the caller refuses it
        geometry = Geometry(1, 1, 1, 1, 1)
    else:
        geometry = Geometry(num_blocks, block_bytes, block_tokens, shards, segment_slots)
        kinds = (endian, token_bytes, key_hash, sum_kind)
        derived = (geometry.header_bytes, geometry.slot_bytes)
        if (header_bytes, slot_bytes) != derived or kinds != (ENDIAN, 4, HASH_BLAKE2B, SUM_XXH3_64):
            raise InvalidArgument("the superblock's sizes or kinds are not those of format version 1")
        if max(seqno, epoch, next_generation) >= LARGEST_COUNT:
            raise InvalidArgument("the superblock's counters are beyond what any store can have reached")
        purges = _purges(page, num_purges, next_generation)
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
    )


def _purges(page: bytes, count: int, next_generation: int) -> tuple[tuple[bytes, int], ...]:
    if count > MAX_PURGES:
        raise InvalidArgument(f"the superblock names {count} purges, and {MAX_PURGES} fit into one")
    found = tuple(PURGE.iter_unpack(page[SUPER.size : SUPER.size + count * PURGE.size]))
    if len({digest for digest, _ in found}) != count or any(barrier > next_generation for _, barrier in found):
        raise InvalidArgument("the superblock's purges contradict each other or its generations")
    return found

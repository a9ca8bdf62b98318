"""The bytes of a disk tier, version 1: superblock and slot header. Packs and checks; opens nothing.

All integers are little-endian. A slot is a header, rounded up to 4 KiB, and a payload, padded to 4 KiB. Both
the superblock and the header end in an xxh3-64 sum over every byte before it, padding included. xxh3 finds
damage, not tampering; identity never rests on it, but on tokens and digests compared byte by byte.

    header: identity | tokens int32 [block_tokens] | written_at u64 | reserved 32 | sums u64 [shards] | 0... |
    sum u64

A header's own sum is seeded with its slot, a shard's sum with ``key[:8] ^ generation ^ shard``: bytes that
are intact but lie in the wrong slot, in the wrong shard, or are left over from an earlier write do not match.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument
from pagedkv.tiers import _io
from pagedkv.tiers.base import Record

SHORTEST_SUM = 256  # bytes

PAGE = 4096
MAJOR, MINOR = 1, 0
ENDIAN = 0x01020304
SUPER_MAGIC = b"PGKVSB\r\n"
SLOT_MAGIC = b"PKVR"
RECORD_VERSION = 1
LIVE, TOMBSTONE = 1, 2
HASH_BLAKE2B, SUM_XXH3_64 = 1, 1

IDENTITY_FIELDS = (
    "magic", "version", "state", "slot", "generation", "epoch", "uuid", "fingerprint", "key", "parent",
    "namespace", "extra", "n_tokens", "shards", "payload_bytes",
)  # fmt: skip
_REASONS = {  # why a header that is intact is not the expected one; the first that applies
    "header": {"magic", "version", "n_tokens", "shards", "payload_bytes"},
    "misplaced": {"slot", "uuid", "fingerprint"},
    "stale": {"state", "generation", "epoch"},
    "identity": {"key", "parent", "namespace", "extra"},
}
IDENTITY = struct.Struct("<4sHBxQQQ16s32s32s32s32s32sIIQ")
WRITTEN_AT = struct.Struct("<Q32x")
SUM = struct.Struct("<Q")
# magic, major, minor, length, endian, features a reader must know, features it may ignore, uuid, seqno,
# epoch, fingerprint, num_blocks, block_bytes, header_bytes, slot_bytes, segment_slots, block_tokens, shards,
# token width, key hash, sum kind, clean, next generation, created at, key check
SUPER = struct.Struct("<8sHHIIQQ16sQQ32sQQQQQIIBBBBQQ16s")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a store, fixed when it is made.

    Attributes
    ----------
    num_blocks, block_bytes : slots, and payload bytes of one.
    block_tokens : tokens of a block.
    shards : equal parts of a block with a sum each (one per layer lets a layer be checked alone).
    segment_slots : slots of one segment file; the last file may have fewer.
    """

    num_blocks: int
    block_bytes: int
    block_tokens: int
    shards: int
    segment_slots: int

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise InvalidArgument(f"{item.name} must be at least 1, not {getattr(self, item.name)}")
        if self.block_bytes % self.shards:
            raise InvalidArgument(f"block_bytes {self.block_bytes} does not divide into {self.shards} equal shards")
        if self.num_blocks >= 2**31 or self.segment_slots * self.slot_bytes >= 2**62:
            raise InvalidArgument(f"a store of {self.num_blocks} blocks of {self.block_bytes} bytes is too large")

    @property
    def tokens_end(self) -> int:
        """Header bytes that name the content: the identity and the tokens."""
        return IDENTITY.size + 4 * self.block_tokens

    @property
    def sums_at(self) -> int:
        """Where the shard sums begin in the header."""
        return self.tokens_end + WRITTEN_AT.size

    @property
    def header_bytes(self) -> int:
        """Bytes of a slot's header, a multiple of 4 KiB."""
        return pages(self.sums_at + SUM.size * (self.shards + 1))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, a multiple of 4 KiB."""
        return self.header_bytes + pages(self.block_bytes)

    @property
    def num_segments(self) -> int:
        """Segment files."""
        return -(-self.num_blocks // self.segment_slots)

    def segment_bytes(self, segment: int) -> int:
        """Exact size of one segment file."""
        slots = min(self.segment_slots, self.num_blocks - segment * self.segment_slots)
        return slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a store says about itself. `seqno` decides between the two copies: the higher valid one counts."""

    geometry: Geometry
    fingerprint: bytes
    uuid: bytes
    seqno: int
    epoch: int
    clean: bool
    next_generation: int
    created_at: int
    key_check: bytes
    major: int = MAJOR
    incompat: int = 0


def pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole 4 KiB pages."""
    return -(-num_bytes // PAGE) * PAGE


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
        state.next_generation, state.created_at, state.key_check,
    )  # fmt: skip
    return seal(body.ljust(PAGE - SUM.size, b"\0"), 0)


def parse_super(page: bytes) -> Superblock | None:
    """The superblock in a 4 KiB copy, or None if it is damaged. Versions are for the caller to judge.

    Raises
    ------
    InvalidArgument
        The copy is intact, but sizes in it contradict each other or this version's rules.
    """
    if len(page) != PAGE or not sealed(page, 0):
        return None
    (
        magic, major, _, _, endian, incompat, _, uuid, seqno, epoch, fingerprint, num_blocks, block_bytes,
        header_bytes, slot_bytes, segment_slots, block_tokens, shards, token_bytes, key_hash, sum_kind, clean,
        next_generation, created_at, check,
    ) = SUPER.unpack_from(page)  # fmt: skip
    if magic != SUPER_MAGIC:
        return None
    if major == MAJOR:
        geometry = Geometry(num_blocks, block_bytes, block_tokens, shards, segment_slots)
        kinds = (endian, token_bytes, key_hash, sum_kind)
        derived = (geometry.header_bytes, geometry.slot_bytes)
        if (header_bytes, slot_bytes) != derived or kinds != (ENDIAN, 4, HASH_BLAKE2B, SUM_XXH3_64):
            raise InvalidArgument("the superblock's sizes or kinds are not those of format version 1")
    else:
        geometry = Geometry(1, 1, 1, 1, 1)  # another version's sizes mean nothing here; the caller refuses it
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
        major,
        incompat,
    )


def sum_of(data: bytes | memoryview | NDArray[np.uint8], seed: int) -> int:
    """xxh3-64 of `data`; fewer than 256 bytes are filled up with zeros first (the geometry fixes their number)."""
    array = np.frombuffer(data, np.uint8)
    if array.size < SHORTEST_SUM:
        array = np.concatenate((array, np.zeros(SHORTEST_SUM - array.size, np.uint8)))
    return _io.sum_bytes(array, seed, _io.SUM_LEVEL)


def seal(body: bytes, seed: int) -> bytes:
    """`body` and its sum."""
    return body + SUM.pack(sum_of(body, seed))


def sealed(data: bytes | memoryview, seed: int) -> bool:
    """Whether `data` ends in the sum of what comes before."""
    (found,) = SUM.unpack_from(data, len(data) - SUM.size)
    return bool(found == sum_of(data[: -SUM.size], seed))


@dataclass(frozen=True, slots=True)
class SlotFormat:
    """Headers of one store: its sizes and the constants that every header repeats."""

    geometry: Geometry
    uuid: bytes
    fingerprint: bytes
    epoch: int

    def identity(self, slot: int, generation: int, record: Record) -> bytes:
        """The part of a header that names the content: a hit needs all its bytes equal."""
        g = self.geometry
        return (
            IDENTITY.pack(
                SLOT_MAGIC, RECORD_VERSION, LIVE, slot, generation, self.epoch, self.uuid, self.fingerprint,
                record.key, record.parent, record.namespace, record.extra, record.tokens.size, g.shards,
                g.block_bytes,
            )
            + record.tokens.astype("<i4", copy=False).tobytes()
        )  # fmt: skip

    def header(self, slot: int, generation: int, record: Record, sums: NDArray[np.uint64], written_at: int) -> bytes:
        """A live slot's whole header; `sums` are the payload's, uint64 [shards]."""
        body = self.identity(slot, generation, record) + WRITTEN_AT.pack(written_at)
        body += sums.astype("<u8", copy=False).tobytes()
        return seal(body.ljust(self.geometry.header_bytes - SUM.size, b"\0"), slot)

    def tombstone(self, slot: int, generation: int) -> bytes:
        """A header that names nothing; `generation` is that of the block that lay there."""
        g, nothing = self.geometry, bytes(32)
        body = IDENTITY.pack(
            SLOT_MAGIC, RECORD_VERSION, TOMBSTONE, slot, generation, self.epoch, self.uuid, self.fingerprint,
            nothing, nothing, nothing, nothing, 0, g.shards, g.block_bytes,
        )  # fmt: skip
        return seal(body.ljust(g.header_bytes - SUM.size, b"\0"), slot)

    @staticmethod
    def seed(generation: int, record: Record) -> int:
        """What the sums of a payload are seeded with, besides the shard's number."""
        return int.from_bytes(record.key[:8], "little") ^ generation

    def mismatch(
        self, slot: int, generation: int, record: Record, header: memoryview, sums: NDArray[np.uint64]
    ) -> str | None:
        """Why a slot is not what was stored under `record`, or None if it is; `sums` are of the payload found.

        Returns
        -------
        ``"header"`` (damaged, or of no known kind), ``"misplaced"`` (another slot's, store's or fingerprint's),
        ``"stale"`` (another generation or epoch, or a tombstone), ``"identity"`` (another key, parent, namespace
        or extra digest), ``"tokens"`` or ``"payload"``.
        """
        g = self.geometry
        expected = self.identity(slot, generation, record)
        if header[: g.tokens_end] != expected:
            return self._difference(header, IDENTITY.unpack_from(expected), slot)
        if not sealed(header, slot):
            return "header"
        if header[g.sums_at : g.sums_at + SUM.size * g.shards] != sums.astype("<u8", copy=False).tobytes():
            return "payload"
        return None

    def _difference(self, header: memoryview, expected: tuple[object, ...], slot: int) -> str:
        found = IDENTITY.unpack_from(header)
        own_slot = found[3]
        if not sealed(header, slot):
            return "misplaced" if own_slot != slot and sealed(header, own_slot) else "header"
        differs = {name for name, a, b in zip(IDENTITY_FIELDS, found, expected) if a != b}
        for reason, names in _REASONS.items():
            if differs & names:
                return reason
        return "tokens"

    def parse(self, slot: int, header: bytes | memoryview) -> tuple[int, Record] | None:
        """``(generation, record)`` of a live header of this slot, store, fingerprint and epoch, or None."""
        g = self.geometry
        if len(header) != g.header_bytes or header[:4] != SLOT_MAGIC or not sealed(header, slot):
            return None
        (
            _, version, state, own_slot, generation, epoch, uuid, fingerprint, key, parent, namespace, extra,
            n_tokens, shards, payload_bytes,
        ) = IDENTITY.unpack_from(header)  # fmt: skip
        ours = (RECORD_VERSION, LIVE, slot, self.epoch, self.uuid, self.fingerprint)
        if (version, state, own_slot, epoch, uuid, fingerprint) != ours:
            return None
        if (n_tokens, shards, payload_bytes) != (g.block_tokens, g.shards, g.block_bytes):
            return None
        tokens = np.frombuffer(header, "<i4", g.block_tokens, IDENTITY.size).astype(np.int32)
        return generation, Record(key, parent, namespace, tokens, extra)

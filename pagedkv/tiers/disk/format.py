"""The bytes of a slot, format versions 1 and 2: a header that names them, and a payload.

Opens nothing.

All integers are little-endian. A slot is a header, rounded up to 4 KiB, and a payload, padded to 4 KiB. Both
the superblock and the header end in an xxh3-64 sum over every byte before it, padding included. xxh3 finds
damage, not tampering; identity never rests on it, but on tokens and digests compared byte by byte.

    header: identity | tokens int32 [block_tokens] | written_at u64 | reserved 32 | sums u64 [shards] | 0... |
    sum u64

A header's own sum is seeded with its slot, a shard's sum with ``key[:8] ^ generation ^ shard``: bytes that
are intact but lie in the wrong slot, in the wrong shard, or are left over from an earlier write do not match.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument
from pagedkv.tiers.base import Record
from pagedkv.tiers.disk import _io

SHORTEST_SUM = 256  # bytes

PAGE = 4096
SLOT_MAGIC = b"PKVR"
RECORD_VERSION = 1
LIVE, TOMBSTONE = 1, 2

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
IDENTITY_DTYPE = np.dtype({
    "names": IDENTITY_FIELDS,
    "formats": ["V4", "<u2", "u1", "<u8", "<u8", "<u8", "V16", *["V32"] * 5, "<u4", "<u4", "<u8"],
    "offsets": [0, 4, 6, 8, 16, 24, 32, *range(48, 208, 32), 208, 212, 216],
    "itemsize": IDENTITY.size,
})  # fmt: skip
WRITTEN_AT = struct.Struct("<Q32x")
SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a store, fixed when it is made.

    Attributes
    ----------
    num_blocks, block_bytes : slots, and payload bytes of one.
    block_tokens : tokens of a block.
    shards : equal parts of a block with a sum each (one per layer lets a layer be checked alone).
    segment_slots : slots of one segment file; the last file may have fewer.
    extent_slots, extent_bytes : of a store for groups of layers: a segment is extents of so many bytes, each of which
        holds so many slots and perhaps a rest. 0: slots lie one behind the other.
    """

    num_blocks: int
    block_bytes: int
    block_tokens: int
    shards: int
    segment_slots: int
    extent_slots: int = 0
    extent_bytes: int = 0

    def __post_init__(self) -> None:
        for item in fields(self)[:5]:
            if getattr(self, item.name) < 1:
                raise InvalidArgument(f"{item.name} must be at least 1, not {getattr(self, item.name)}")
        if self.extent_slots and (
            self.extent_slots * self.slot_bytes > self.extent_bytes
            or self.num_blocks % self.extent_slots
            or self.segment_slots % self.extent_slots
        ):
            raise InvalidArgument(f"extents of {self.extent_bytes} bytes do not hold {self.extent_slots} slots each")
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
        return slots // self.extent_slots * self.extent_bytes if self.extent_slots else slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all segment files."""
        whole, rest = divmod(self.num_blocks, self.segment_slots)
        return whole * self.segment_bytes(0) + (self.segment_bytes(whole) if rest else 0)

    def places(self, slots: NDArray[np.signedinteger[Any]]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Of n slots the segments [n], and the bytes before each slot in its segment [n]."""
        segment, index = np.divmod(slots.astype(np.int64), self.segment_slots)
        if not self.extent_slots:
            return segment, index * self.slot_bytes
        extent, index = np.divmod(index, self.extent_slots)
        return segment, extent * self.extent_bytes + index * self.slot_bytes


def pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole 4 KiB pages."""
    return -(-num_bytes // PAGE) * PAGE


def sum_of(data: bytes | memoryview | NDArray[np.uint8], seed: int) -> int:
    """xxh3-64 of `data`, padded with zeros to at least 256 bytes.

    The geometry fixes the number of bytes.
    """
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
        """The seed of a payload's sums, besides the shard's number."""
        return int.from_bytes(record.key[:8], "little") ^ generation

    def mismatch(
        self, slot: int, generation: int, record: Record, header: memoryview, sums: NDArray[np.uint64]
    ) -> str | None:
        """Why a slot is not the block stored under `record`; None if it is.

        `sums` are of the payload found.

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

    def live(self, slots: NDArray[np.int64], headers: NDArray[np.uint8], sums: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of n headers are intact, live and of this store.

        They match their slots, this store, its fingerprint and its epoch.

        Parameters
        ----------
        slots : int64 [n]
        headers : uint8 [n, header_bytes]
        sums : uint64 [n], of each header's bytes without its last eight, seeded with its slot.
        """
        g = self.geometry
        found = fields_of(headers)
        ok = intact(headers, sums)
        wanted = {
            "magic": np.void(SLOT_MAGIC), "version": RECORD_VERSION, "state": LIVE, "slot": slots.astype("<u8"),
            "epoch": self.epoch, "uuid": np.void(self.uuid), "fingerprint": np.void(self.fingerprint),
            "n_tokens": g.block_tokens, "shards": g.shards, "payload_bytes": g.block_bytes,
        }  # fmt: skip
        for name, value in wanted.items():
            ok &= found[name] == value
        return ok

    def record(self, header: NDArray[np.uint8]) -> Record:
        """The record that a live header names."""
        _, _, _, _, _, _, _, _, key, parent, namespace, extra, *_ = IDENTITY.unpack_from(header.data)
        tokens = header[IDENTITY.size : self.geometry.tokens_end].view("<i4").astype(np.int32)
        return Record(key, parent, namespace, tokens, extra)

    def parse(self, slot: int, header: bytes) -> tuple[int, Record] | None:
        """``(generation, record)`` of a live header, or None; see `live`."""
        if len(header) != self.geometry.header_bytes:
            return None
        row = np.frombuffer(header, np.uint8)[None]
        sums = np.array([sum_of(header[: -SUM.size], slot)], np.uint64)
        if not self.live(np.array([slot], np.int64), row, sums)[0]:
            return None
        return int(fields_of(row)["generation"][0]), self.record(row[0])


def intact(headers: NDArray[np.uint8], sums: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which of n headers end in these sums, bool [n]."""
    found: NDArray[np.bool_] = headers[:, -SUM.size :].copy().view("<u8")[:, 0] == sums
    return found


def fields_of(headers: NDArray[np.uint8]) -> NDArray[np.void]:
    """The identities of uint8 [n, header_bytes].

    A structured array [n] with the fields `IDENTITY_FIELDS`.
    """
    return headers[:, : IDENTITY.size].copy().view(IDENTITY_DTYPE)[:, 0]


def written_at(headers: NDArray[np.uint8], geometry: Geometry) -> NDArray[np.uint64]:
    """When each record was written, Unix seconds [n]."""
    return headers[:, geometry.tokens_end : geometry.tokens_end + 8].copy().view("<u8")[:, 0]

"""The contents of frames: kinds, and fixed binary forms of moves, records and answers.

The reader of a form checks every length, and runs or unpickles nothing.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers.base import DIGEST_BYTES, Record
from pagedkv.tiers.disk.tier import StoredBlock
from pagedkv.tiers.ranks.wire import Broken


class Kind(enum.IntEnum):
    """Kinds of frames. Ranks send those from 32 on."""

    CHALLENGE = 1
    PROOF = 2
    REFUSED = 3
    OPEN = 4
    START = 5
    MOVES = 16
    COPY = 17
    ZERO = 18
    RECORDS = 19
    INVALIDATE = 20
    PURGE = 21
    FLUSH = 22
    STATS = 23
    PING = 24
    HELLO = 32
    OPENED = 33
    FAILED = 34
    ANSWER = 48
    UNABLE = 49
    BACK = 50
    PONG = 51


MOVE = np.dtype(
    [("transfer", "i8"), ("src_tier", "i4"), ("dst_tier", "i4"), ("src_block", "i4"), ("dst_block", "i4")]
)  # fmt: skip
STATES = ("ok", "read_only", "off")  # of a disk tier, by the number that answers carry
_MOVES = struct.Struct("<IIId")  # moves, records, tokens of a record, seconds until the deadline
_ANSWER = struct.Struct("<BIII")  # state, transfers, moves that were left, bytes of what else there is
_STORED = struct.Struct("<II")  # blocks, tokens of each
_NAMES = 4 * DIGEST_BYTES


class Order(NamedTuple):
    """Moves as a rank is told them: records for those to or from a store, in order."""

    moves: NDArray[np.void]
    deadline_s: float | None
    records: list[Record]


class Answer(NamedTuple):
    """What came of an order, or of another call, at one rank.

    Attributes
    ----------
    state : of the rank's disk tier.
    ok, tried : bool [k], by transfer, ascending; as a Ticket's.
    left : int32 [n], the moves whose memory is in use.
    rest : what other calls answer with.
    """

    state: str
    ok: NDArray[np.bool_]
    tried: NDArray[np.bool_]
    left: NDArray[np.int32]
    rest: bytes


class _Reader:
    """Takes a payload apart from its front.

    Parameters
    ----------
    payload : bytes
    """

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        part = self._payload[self._at : self._at + size]
        if size < 0 or len(part) != size:
            raise Broken("sent a frame that is too short")
        self._at += size
        return part

    def head(self, form: struct.Struct) -> tuple[int, ...]:
        """The next numbers."""
        return form.unpack(self.take(form.size))

    def array(self, kind: str, count: int) -> NDArray[np.generic]:
        """The next `count` numbers as an array of its own."""
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).copy()

    def end(self) -> None:
        """Nothing may follow."""
        if self._at != len(self._payload):
            raise Broken("sent a frame that is too long")


def pack_moves(moves: NDArray[np.void], deadline_s: float | None, records: Sequence[Record]) -> bytes:
    """An Order as bytes."""
    tokens = len(records[0].tokens) if records else 0
    head = _MOVES.pack(len(moves), len(records), tokens, math.nan if deadline_s is None else deadline_s)
    fields = [np.ascontiguousarray(moves[name], MOVE[name]).tobytes() for name in MOVE.names or ()]
    return b"".join([head, *fields, *map(_record, records)])


def unpack_moves(payload: bytes) -> Order:
    """An Order.

    Raises
    ------
    Broken
    """
    reader = _Reader(payload)
    count, num_records, tokens, seconds = reader.head(_MOVES)
    fields = {name: reader.array(MOVE[name].str, count) for name in MOVE.names or ()}
    moves = np.empty(count, MOVE)
    for name, field in fields.items():
        moves[name] = field
    records = [_read_record(reader, tokens) for _ in range(num_records)]
    reader.end()
    return Order(moves, None if math.isnan(seconds) else max(0.0, float(seconds)), records)


def _record(record: Record) -> bytes:
    names = (record.key, record.parent, record.namespace, record.extra)
    return b"".join([*names, np.ascontiguousarray(record.tokens, np.int32).tobytes()])


def _read_record(reader: _Reader, tokens: int) -> Record:
    names = reader.take(_NAMES)
    key, parent, namespace, extra = (names[at : at + DIGEST_BYTES] for at in range(0, _NAMES, DIGEST_BYTES))
    return Record(key, parent, namespace, reader.array("i4", tokens), extra)  # type: ignore[arg-type]


def pack_answer(
    state: str,
    ok: NDArray[np.bool_] | None = None,
    tried: NDArray[np.bool_] | None = None,
    left: NDArray[np.intp] | None = None,
    rest: bytes = b"",
) -> bytes:
    """An Answer as bytes."""
    none = np.empty(0, np.bool_)
    ok, tried = (none if flags is None else flags for flags in (ok, tried))
    indices = np.empty(0, np.int32) if left is None else left.astype(np.int32)
    head = _ANSWER.pack(STATES.index(state), len(ok), len(indices), len(rest))
    return b"".join([head, ok.tobytes(), tried.tobytes(), indices.tobytes(), rest])


def unpack_answer(payload: bytes) -> Answer:
    """An Answer.

    Raises
    ------
    Broken
    """
    reader = _Reader(payload)
    state, count, num_left, size = reader.head(_ANSWER)
    ok, tried = (reader.array("u1", count) != 0 for _ in range(2))
    left = reader.array("i4", num_left)
    rest = reader.take(size)
    reader.end()
    return Answer(STATES[min(state, len(STATES) - 1)], ok, tried, left, rest)  # type: ignore[arg-type]


def pack_ids(ids: NDArray[np.int32]) -> bytes:
    """Block ids, or pairs of them, as bytes."""
    return np.ascontiguousarray(ids, np.int32).tobytes()


def unpack_ids(payload: bytes) -> NDArray[np.int32]:
    """Int32 [n].

    Raises
    ------
    Broken
    """
    if len(payload) % 4:
        raise Broken("sent a frame that is cut")
    return np.frombuffer(payload, np.int32).copy()


def pack_stored(found: Sequence[StoredBlock]) -> bytes:
    """Blocks of a disk tier as bytes."""
    tokens = len(found[0].record.tokens) if found else 0
    ids = np.array([(each.block, each.generation) for each in found], np.int64).reshape(-1, 2)
    return b"".join([_STORED.pack(len(found), tokens), ids.tobytes(), *(_record(each.record) for each in found)])


def unpack_stored(payload: bytes) -> list[StoredBlock]:
    """Blocks of a disk tier.

    Raises
    ------
    Broken
    """
    reader = _Reader(payload)
    count, tokens = reader.head(_STORED)
    ids = reader.array("i8", 2 * count).reshape(-1, 2).tolist()
    found = [StoredBlock(block, _read_record(reader, tokens), generation) for block, generation in ids]
    reader.end()
    return found

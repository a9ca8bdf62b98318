"""Reads Mooncake's ``.jsonl`` traces, plain, .gz or .zst.

Fields: timestamp, input_length, output_length, hash_ids.

A line may also name its session (``session``, a number from 0) and the tokens of a block (``block_size``).

A hash id stands for a whole prefix, so it must always follow the same id. That is checked for every id, and
the ids are renumbered by first appearance.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from pagedkv.errors import TraceFormatError
from pagedkv.lab.replay import fields
from pagedkv.lab.replay.decompress import decompressed
from pagedkv.lab.replay.trace import (
    MAX_ACCESSES,
    MAX_BLOCK_SIZE,
    MAX_SESSION,
    MAX_TIME_MS,
    MAX_TOKENS,
    Trace,
    freeze,
)

MOONCAKE_BLOCK_SIZE = 512
MAX_LINE_BYTES = 256 << 20
MAX_EMPTY_BYTES = 1 << 20  # of empty lines, beyond as many bytes as the requests have


def read_jsonl(path: Path, *, block_size: int | None = None) -> Trace:
    """Read one ``.jsonl`` trace; ``block_size`` in tokens (default: the file's, else 512).

    Raises
    ------
    TraceFormatError : naming the line and field that is missing, impossible or not chained.
    """
    sha256 = hashlib.sha256()
    builder = _Builder(path, block_size)
    spare = MAX_EMPTY_BYTES
    for number, line in enumerate(_lines(path, sha256), start=1):
        if line and not line.isspace():
            builder.add(number, line)
            spare += len(line) + 1
            continue
        spare -= len(line) + 1
        if spare < 0:
            raise TraceFormatError(path, f"line {number}", f"{MAX_EMPTY_BYTES} bytes more of empty lines than requests")
    return builder.finish(path.name, sha256.hexdigest())


class _Builder:
    """Collects requests; remembers, for every id, its new number and the id it follows."""

    def __init__(self, path: Path, block_size: int | None) -> None:
        self.path, self.asked = path, block_size
        self.block_size = MOONCAKE_BLOCK_SIZE if block_size is None else block_size
        self.t_ms, self.input_tokens, self.output_tokens = array("q"), array("i"), array("i")
        self.sessions = array("q")
        self.offsets, self.paths = array("q", [0]), array("i")
        self.parents, self.depths = array("i"), array("i")
        self.number_of: dict[int, int] = {}

    def add(self, number: int, line: bytes) -> None:
        record = self._object(number, line)
        t_ms = self._time(number, record)
        if record.get("block_size") is not None:
            self._sized(number, self._integer(number, record, "block_size", MAX_BLOCK_SIZE))
        tokens = self._integer(number, record, "input_length", MAX_TOKENS)
        output = self._integer(number, record, "output_length", MAX_TOKENS)
        ids = record.get("hash_ids")
        if not isinstance(ids, list):
            self._fail(number, "hash_ids", "is missing" if ids is None else "must be a list of integers")
        expected = -(-tokens // self.block_size)
        if not tokens // self.block_size <= len(ids) <= expected:  # some recorders leave the partly filled block out
            self._fail(
                number,
                "hash_ids",
                f"has {len(ids)} ids; input_length {tokens} is {expected} blocks of {self.block_size} tokens"
                f"{self._advice(tokens, len(ids))}",
            )
        if len(self.paths) + len(ids) > MAX_ACCESSES:
            self._fail(number, "hash_ids", f"more than {MAX_ACCESSES} block accesses in total")
        self.paths.extend(self._chain(number, ids))
        named = record.get("session") is not None
        self.sessions.append(self._integer(number, record, "session", MAX_SESSION) if named else -1)
        self.t_ms.append(t_ms)
        self.input_tokens.append(tokens)
        self.output_tokens.append(output)
        self.offsets.append(len(self.paths))

    def _sized(self, number: int, block_size: int) -> None:
        """A line says the size of its blocks: the first sets it, the others have to agree."""
        if block_size == 0:
            self._fail(number, "block_size", f"0 is not in 1..{MAX_BLOCK_SIZE}")
        if self.asked is not None and block_size != self.asked:
            self._fail(number, "block_size", f"is {block_size}, asked was {self.asked}: leave --block-size out")
        if block_size != self.block_size and len(self.t_ms):
            self._fail(number, "block_size", f"is {block_size}, and {self.block_size} in the lines before")
        self.block_size = block_size

    def _advice(self, tokens: int, num_ids: int) -> str:
        """The end of a message: the power of two that would fit as the size of a block."""
        fitting = (1 << n for n in range(MAX_BLOCK_SIZE.bit_length()) if tokens >> n <= num_ids <= -(-tokens >> n))
        found = next(fitting, None)
        return "" if found is None or len(self.t_ms) else f"; --block-size {found}?"

    def finish(self, name: str, sha256: str) -> Trace:
        fields.totals(self.path, "field hash_ids", len(self.t_ms), len(self.paths))
        return freeze(
            Trace(
                name,
                sha256,
                self.block_size,
                np.array(self.t_ms, np.int64),
                np.array(self.input_tokens, np.int32),
                np.array(self.output_tokens, np.int32),
                np.array(self.offsets, np.int64),
                np.array(self.paths, np.int32),
                np.array(self.parents, np.int32),
                np.array(self.depths, np.int32),
                np.array(self.sessions, np.int64),
            )
        )

    def _chain(self, number: int, ids: list[object]) -> Iterator[int]:
        parent = -1
        for depth, hash_id in enumerate(ids):
            if type(hash_id) is not int or not 0 <= hash_id < 1 << 64:
                self._fail(number, f"hash_ids[{depth}]", f"{_short(hash_id)} is not an integer in 0..2**64-1")
            known = self.number_of.get(hash_id)
            if known is None:
                known = len(self.parents)
                self.number_of[hash_id] = known
                self.parents.append(parent)
                self.depths.append(depth)
            elif self.parents[known] != parent:
                self._fail(
                    number,
                    f"hash_ids[{depth}]",
                    f"id {hash_id} is at depth {depth} here and was at depth {self.depths[known]} with "
                    "another parent before; an id must stand for one whole prefix",
                )
            yield known
            parent = known

    def _object(self, number: int, line: bytes) -> dict[str, object]:
        try:
            record = json.loads(line, parse_constant=_reject)
        except RecursionError:
            raise TraceFormatError(self.path, f"line {number}", "nested too deeply") from None
        except ValueError as error:
            problem = str(error).splitlines()[0]
            raise TraceFormatError(self.path, f"line {number}", f"not JSON, or cut short ({problem})") from None
        if not isinstance(record, dict):
            raise TraceFormatError(self.path, f"line {number}", "must be a JSON object")
        return record

    def _integer(self, number: int, record: dict[str, object], field: str, highest: int) -> int:
        value = record.get(field)
        if value is None:
            self._fail(number, field, "is missing")
        if type(value) is not int:
            self._fail(number, field, f"{_short(value)} is not an integer")
        if not 0 <= value <= highest:
            self._fail(number, field, f"{_short(value)} is not in 0..{highest}")
        return value

    def _time(self, number: int, record: dict[str, object]) -> int:
        value = record.get("timestamp")
        if type(value) is float and math.isfinite(value):  # milliseconds with a fraction: rounded down
            record = {"timestamp": math.floor(value)}
        return self._integer(number, record, "timestamp", MAX_TIME_MS)

    def _fail(self, number: int, field: str, problem: str) -> NoReturn:
        raise TraceFormatError(self.path, f"line {number}, field {field}", problem)


def _lines(path: Path, sha256: hashlib._Hash) -> Iterator[bytes]:
    rest = bytearray()
    for chunk in decompressed(path, sha256):
        rest += chunk
        if b"\n" in chunk:
            *whole, tail = bytes(rest).split(b"\n")
            yield from whole
            rest = bytearray(tail)
        if len(rest) > MAX_LINE_BYTES:
            raise TraceFormatError(path, "", f"a line is longer than {MAX_LINE_BYTES} bytes")
    if rest:
        yield bytes(rest)


def _reject(constant: str) -> object:
    raise ValueError(f"{constant} is not a number")


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or -(10**30) < value < 10**30 else "an integer beyond 10**30"
    return text if len(text) <= 40 else text[:37] + "..."

"""Reads logs of tokens: JSON lines, one for each request.

A line has the prompt's token ids, and may have its time, its output, and its user. Everything else in it
is passed over, and no content of it is repeated in an error but for a short piece of the field that is wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, TraceFormatError
from pagedkv.lab.replay.decompress import decompressed
from pagedkv.lab.replay.trace import MAX_TIME_MS

PROMPT = ("tokens", "prompt_token_ids", "input_ids")
OUTPUT = ("output_tokens", "output_token_ids", "output_length", "completion_tokens")
LENGTH = ("input_length", "num_tokens", "num_prompt_tokens", "prompt_tokens")
MAX_LINE_BYTES = 16 << 20  # 2.8 million tokens of five digits; as lists of lists they take 400 MiB
MAX_EMPTY_BYTES = 1 << 20  # of empty lines
MAX_OUTPUT = 100_000_000
MAX_NAME = 1 << 16  # characters of a namespace or session
NO_NAME = b""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One line.

    Attributes
    ----------
    number : of the line, from 1.
    t_ms : None where the line does not say.
    tokens : int64 [n].
    output_tokens : 0 where the line does not say.
    namespace, session : names as bytes that differ by type, too; empty where the line has none.
    """

    number: int
    t_ms: int | None
    tokens: NDArray[np.int64]
    output_tokens: int
    namespace: bytes
    session: bytes


def read_token_log(path: Path) -> Iterator[LoggedRequest]:
    """The requests of a log, ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst``, one at a time.

    Raises
    ------
    TraceFormatError
        Names the line and field. What came before it has been given out already.
    """
    try:
        if not path.exists():
            raise TraceFormatError(path, "", "there is no such file")
        if not path.is_file():
            raise TraceFormatError(path, "", "is not a file")
        spare = MAX_EMPTY_BYTES
        for number, line in enumerate(_lines(path), start=1):
            if line and not line.isspace():
                yield _Line(path, number, line).request()
                continue
            spare -= len(line) + 1
            if spare < 0:
                raise TraceFormatError(path, f"line {number}", f"more than {MAX_EMPTY_BYTES} bytes of empty lines")
    except (OSError, ValueError) as error:
        if isinstance(error, TraceFormatError | InvalidArgument):
            raise
        raise TraceFormatError(path, "", getattr(error, "strerror", None) or "cannot be read") from None


def _lines(path: Path) -> Iterator[bytes]:
    rest, number = bytearray(), 1
    for chunk in decompressed(path, hashlib.sha256()):
        rest += chunk
        if b"\n" in chunk:
            *whole, tail = bytes(rest).split(b"\n")
            yield from whole
            number += len(whole)
            rest = bytearray(tail)
        if len(rest) > MAX_LINE_BYTES:
            raise TraceFormatError(path, f"line {number}", f"is longer than {MAX_LINE_BYTES} bytes")
    if rest:
        yield bytes(rest)


class _Line:
    """Checks one line's fields."""

    def __init__(self, path: Path, number: int, line: bytes) -> None:
        self._path, self._number = path, number
        try:
            record = json.loads(line, parse_constant=_refuse)
        except RecursionError:
            raise TraceFormatError(path, f"line {number}", "nested too deeply") from None
        except ValueError as error:
            problem = f"at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise TraceFormatError(path, f"line {number}", f"not JSON, or cut short ({problem[:80]})") from None
        if not isinstance(record, dict):
            raise TraceFormatError(path, f"line {number}", "must be a JSON object, one for each request")
        self._record: dict[str, object] = record

    def request(self) -> LoggedRequest:
        """The line as a request."""
        tokens = self._tokens(self._prompt())
        for field in LENGTH:
            if (said := self._record.get(field)) is not None and said != len(tokens):
                self._fail(field, f"says {_short(said)}, and there are {len(tokens)} tokens in the prompt")
        return LoggedRequest(
            self._number,
            self._time(),
            tokens,
            self._output(),
            self._name("namespace"),
            self._name("session"),
        )

    def _prompt(self) -> str:
        """The field that has the prompt."""
        there = [name for name in PROMPT if self._record.get(name) is not None]
        if len(there) > 1:
            self._fail(there[1], f"is there beside {there[0]}: one of them is needed")
        if not there:
            self._fail(PROMPT[0], f"is missing; also read: {', '.join(PROMPT[1:])}")
        return there[0]

    def _tokens(self, field: str) -> NDArray[np.int64]:
        ids = self._record[field]
        if not isinstance(ids, list):
            kind = "text" if isinstance(ids, str) else type(ids).__name__
            self._fail(field, f"must be a list of token ids, and is {kind}: tokenise it first")
        if not ids:
            self._fail(field, "is empty")
        for i, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < 1 << 31:
                shown = "text" if isinstance(token, str) else _short(token)
                self._fail(f"{field}[{i}]", f"{shown} is not a token id in 0..{(1 << 31) - 1}")
        return np.array(ids, "<i8")

    def _output(self) -> int:
        found: int | None = None
        for field in OUTPUT:
            value = self._record.get(field)
            if value is None:
                continue
            number = len(value) if isinstance(value, list) else value
            if type(number) is not int or not 0 <= number <= MAX_OUTPUT:
                self._fail(field, f"{_short(value)} is neither a list nor a number of tokens in 0..{MAX_OUTPUT}")
            if found is not None and number != found:
                self._fail(field, f"says {number} tokens, and a field before it {found}")
            found = number
        return found or 0

    def _time(self) -> int | None:
        value = self._record.get("timestamp")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail("timestamp", f"{_short(value)} is not a number of milliseconds")
        if not 0 <= value <= MAX_TIME_MS:  # nor one that is no number
            self._fail("timestamp", f"{_short(value)} is not in 0..{MAX_TIME_MS} milliseconds")
        return math.floor(value)

    def _name(self, field: str) -> bytes:
        value = self._record.get(field)
        if value is None:
            return NO_NAME
        if isinstance(value, bool) or not isinstance(value, str | int):
            self._fail(field, f"{_short(value)} is neither text nor a whole number")
        text = value if isinstance(value, str) else str(value)
        if len(text) > MAX_NAME:
            self._fail(field, f"has {len(text)} characters; at most {MAX_NAME}")
        return (b"s" if isinstance(value, str) else b"i") + text.encode("utf-8", "surrogatepass")

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise TraceFormatError(self._path, f"line {self._number}, field {field}", problem)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not a number")


def _short(value: object) -> str:
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "an integer beyond 10**30"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__}"
    text = ascii(value if not isinstance(value, str) else value[:40])
    return text if len(text) <= 40 else text[:37] + "..."

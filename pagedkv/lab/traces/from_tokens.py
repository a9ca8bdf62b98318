"""From a log of tokens to a trace: equal prefixes get equal numbers, tokens go no further."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagedkv.errors import InvalidArgument, TraceFormatError
from pagedkv.lab.replay.trace import MAX_ACCESSES, MAX_BLOCK_SIZE, MAX_REQUESTS, MAX_TIME_MS
from pagedkv.lab.traces.block_ids import MIN_KEY_BYTES, BlockIds
from pagedkv.lab.traces.rows import Row
from pagedkv.lab.traces.token_log import LoggedRequest, read_token_log
from pagedkv.lab.traces.whole_lines import WholeLines
from pagedkv.spec.sizes import whole_number

BLOCK_SIZE = 16  # default
EVERY_MS = 1000  # default: between requests of a log without times
MAX_NUMBERED = 1 << 25  # different blocks, and sessions: some 5 GiB in a dict
LINK_BYTES = 16  # of a hash: enough to tell so many apart
NO_KEY = bytes(MIN_KEY_BYTES)  # the hashes only find equal prefixes again: no one sees them


@dataclass(frozen=True, slots=True)
class Converted:
    """The counts of a conversion.

    Attributes
    ----------
    requests, blocks, unique_blocks : written; whole blocks of prompts.
    without_block : prompts shorter than a block.
    without_time : requests whose line had no time stamp.
    steps_back : time stamps that lie before an earlier one, which they were raised to.
    """

    requests: int
    blocks: int
    unique_blocks: int
    without_block: int
    without_time: int
    steps_back: int


class _Numbers:
    """Consecutive numbers for hashes, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, link: bytes) -> int:
        return self._numbers.setdefault(link[:LINK_BYTES], len(self._numbers))


def convert(
    log: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    block_size: int = BLOCK_SIZE,
    every_ms: int = EVERY_MS,
) -> Converted:
    """Write a trace of the requests in a log of tokens.

    The file appears under its name when it is whole; on an error there is none.

    Parameters
    ----------
    log : JSON lines, as :func:`read_token_log` reads them.
    out : a new file, or a regular one, which is replaced. Only its owner may read it.
    block_size : tokens of a block.
    every_ms : milliseconds from one request to the next where the log has no times.

    Raises
    ------
    TraceFormatError
        Names the line and field of the log.
    InvalidArgument
        Also where `out` cannot be written.
    """
    whole_number(block_size, "block size", 1, MAX_BLOCK_SIZE)
    whole_number(every_ms, "milliseconds between requests", 0, MAX_TIME_MS)
    source, target = Path(log), Path(os.path.realpath(out))
    if target.exists() and source.exists() and target.samefile(source):
        raise InvalidArgument(f"{os.fspath(out)} is the log itself: name another file for the trace")
    if target.exists() and not target.is_file():
        raise InvalidArgument(f"{os.fspath(out)} is no regular file, and a trace needs one: name another")
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        file = WholeLines(beside)
        try:
            done = _Conversion(source, block_size, every_ms).run(file.write)
        finally:
            file.close()
        beside.replace(target)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    return done


class _Conversion:
    """Turns requests of a log into lines of a trace.

    Its memory grows with the different blocks and sessions alone.
    """

    def __init__(self, source: Path, block_size: int, every_ms: int) -> None:
        self._source, self._every_ms = source, every_ms
        self._ids = BlockIds(NO_KEY, block_size)
        self._blocks, self._sessions = _Numbers(), _Numbers()
        self._first_has_time: bool | None = None
        self._t_ms = self._num_blocks = self._num_requests = 0
        self._without_block = self._without_time = self._steps_back = 0

    def run(self, write: Callable[[bytes], None]) -> Converted:
        """Convert all of it."""
        for request in read_token_log(self._source):
            write(self._row(request).line())
            self._num_requests += 1
        if not self._num_requests:
            raise TraceFormatError(self._source, "", "there are no requests in it")
        if not self._num_blocks:
            raise TraceFormatError(
                self._source, "",
                f"no prompt has a whole block of {self._ids.block_size} tokens: give a smaller --block-size",
            )
        return Converted(
            self._num_requests, self._num_blocks, len(self._blocks), self._without_block, self._without_time,
            self._steps_back,
        )  # fmt: skip

    def _row(self, request: LoggedRequest) -> Row:
        tokens, size = request.tokens, self._ids.block_size
        numbers = [self._blocks.of(link) for link in self._ids.chain(tokens, request.namespace)]
        self._num_blocks += len(numbers)
        self._without_block += not numbers
        session = None
        if request.session:
            session = self._sessions.of(self._ids.session_link(request.session, request.namespace))
        self._check_amount(request.number)
        return Row(
            self._time(request), len(tokens), size, numbers, session=session, output_tokens=request.output_tokens
        )

    def _check_amount(self, number: int) -> None:
        for what, there, most in (
            ("requests", self._num_requests + 1, MAX_REQUESTS),
            ("blocks", self._num_blocks, MAX_ACCESSES),
            ("different blocks", len(self._blocks), MAX_NUMBERED),
            ("sessions", len(self._sessions), MAX_NUMBERED),
        ):
            if there > most:
                raise TraceFormatError(self._source, f"line {number}", f"more than {most} {what} in all: cut the log")

    def _time(self, request: LoggedRequest) -> int:
        has_time = request.t_ms is not None
        if self._first_has_time is None:
            self._first_has_time = has_time
        elif has_time != self._first_has_time:
            one, other = ("no", "one") if self._first_has_time else ("a", "none")
            raise TraceFormatError(
                self._source,
                f"line {request.number}, field timestamp",
                f"this line has {one} time stamp, and the lines before have {other}: give all or none",
            )
        if request.t_ms is None:
            self._without_time += 1
            return min(self._num_requests * self._every_ms, MAX_TIME_MS)
        self._steps_back += request.t_ms < self._t_ms
        self._t_ms = max(self._t_ms, request.t_ms)
        return self._t_ms

"""Requests to serve: arrivals, prompts as tokens and lengths of outputs, out of any trace."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, TraceFormatError
from pagedkv.replay import Trace, load_trace
from pagedkv.replay.fields import bounded, file_sha256, totals
from pagedkv.replay.load import SYNTHETIC
from pagedkv.replay.synthetic import DEFAULT_REQUESTS, GENERATORS, MAX_SYNTHETIC_REQUESTS
from pagedkv.replay.trace import MAX_TIME_MS, MAX_TOKENS, digest, from_segments

LENGTH_BLOCK = 16  # tokens of the blocks of a trace that has lengths alone; nothing is shared in it
LENGTHS = ("t_ms", "input_tokens", "output_tokens")
SHORT = f"{SYNTHETIC}short"
SHORT_MEANS = (19.31, 58.45)  # prompt and output tokens of instructions (Alpaca), as in the PagedAttention paper


def own_token(i: int) -> int:
    """A token that only request i has: ids of a trace's blocks count up from 0, these count down."""
    return 2**31 - 1 - i


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A trace, and how it is served.

    Attributes
    ----------
    trace : Trace
    speed : arrivals come so many times as fast as recorded; 0: all at the start.
    shared : whether equal prefixes are equal tokens; else no request has anything in common with another.
    """

    trace: Trace
    speed: float = 1.0
    shared: bool = True

    def __len__(self) -> int:
        return self.trace.num_requests

    @property
    def arrivals_s(self) -> NDArray[np.float64]:
        """Seconds from the start, float64 [num_requests]."""
        t_s = (self.trace.t_ms - self.trace.t_ms[0]) / 1000.0
        return t_s / self.speed if self.speed else np.zeros_like(t_s)

    def num_tokens(self, i: int) -> tuple[int, int]:
        """Prompt and output of request i, at least a token each."""
        return max(1, int(self.trace.input_tokens[i])), max(1, int(self.trace.output_tokens[i]))

    def prompt(self, i: int) -> NDArray[np.int32]:
        """Tokens of request i: each is the id of its block in the trace, which names the whole prefix up to it.

        Where the trace's path ends before the prompt does, and in what a request generates, tokens are its own.
        """
        length, _ = self.num_tokens(i)
        own = np.int32(own_token(i))
        if not self.shared:
            return np.full(length, own, np.int32)
        tokens = np.repeat(self.trace.path(i), self.trace.block_size)[:length]
        return np.concatenate((tokens, np.full(length - len(tokens), own, np.int32))).astype(np.int32, copy=False)


def load_workload(
    source: str | os.PathLike[str], *, block_size: int | None = None, requests: int | None = None, speed: float = 1.0
) -> Workload:
    """A trace file that `pagedkv replay` knows, ``synthetic:...``, or an ``.npz`` of arrivals and lengths alone.

    ``synthetic:short[:SEED[:REQUESTS]]`` has geometric lengths with the means of instructions, 10 arrivals a second.

    Raises
    ------
    TraceFormatError, InvalidArgument, ImportError
    """
    if os.fspath(source).startswith(SHORT):
        trace = _short(os.fspath(source))
    elif _has_lengths_alone(source):
        trace = _lengths(Path(source))
    else:
        trace = _trace(source, block_size)
    if requests is not None:
        trace = trace.head(requests)
    if not 0 <= speed <= 1e6:
        raise InvalidArgument(f"--speed: {speed} is not in 0..1000000")
    return Workload(trace, speed)


def _trace(source: str | os.PathLike[str], block_size: int | None) -> Trace:
    name = os.fspath(source).removeprefix(SYNTHETIC).split(":")[0]
    if os.fspath(source).startswith(SYNTHETIC) and name not in GENERATORS:
        known = sorted([*GENERATORS, SHORT.removeprefix(SYNTHETIC)])
        raise InvalidArgument(f"unknown synthetic trace {name[:40]!r}; known: {', '.join(known)}")
    return load_trace(source, block_size=block_size)


def _has_lengths_alone(source: str | os.PathLike[str]) -> bool:
    path = Path(source)
    if path.suffix != ".npz" or not path.is_file():
        return False
    try:
        with np.load(path, allow_pickle=False) as archive:
            return set(archive.files) == set(LENGTHS)
    except (OSError, ValueError):
        return False  # the trace reader says what is wrong with it


def _lengths(path: Path) -> Trace:
    """A trace without prefixes: every prompt is new from its first token."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = [np.asarray(archive[name]) for name in LENGTHS]
    except (OSError, ValueError) as error:
        raise TraceFormatError(path, "", str(error).splitlines()[0]) from None
    for name, values in zip(LENGTHS, found, strict=True):
        if values.ndim != 1 or values.dtype.kind not in "iu" or len(values) != len(found[0]):
            raise TraceFormatError(path, f"field {name}", f"{values.dtype} {values.shape}: whole numbers are needed")
    t_ms, inputs, outputs = (values.astype(np.int64) for values in found)
    bounded(path, "t_ms", t_ms, 0, MAX_TIME_MS)
    for name, values in (("input_tokens", inputs), ("output_tokens", outputs)):
        bounded(path, name, values, 0, MAX_TOKENS)
    if (np.diff(t_ms) < 0).any():
        raise TraceFormatError(path, "field t_ms", "arrivals go back in time")
    totals(path, "", len(t_ms), int((-(-inputs // LENGTH_BLOCK)).sum()))
    return _without_prefixes(path.name, file_sha256(path), t_ms, inputs, outputs)


def _without_prefixes(
    name: str, sha256: str, t_ms: NDArray[np.int64], inputs: NDArray[np.int64], outputs: NDArray[np.int64]
) -> Trace:
    none = np.zeros(len(t_ms), np.int64)
    return from_segments(
        name, sha256, LENGTH_BLOCK, t_ms, inputs.astype(np.int32), outputs.astype(np.int32),
        none - 1, none, -(-inputs // LENGTH_BLOCK),
    )  # fmt: skip


def _short(text: str) -> Trace:
    numbers = text.removeprefix(SHORT).split(":")[1:]
    if text.removeprefix(SHORT)[:1] not in ("", ":") or len(numbers) > 2 or not all(map(_is_number, numbers)):
        raise InvalidArgument(f"{text[:60]}: expected {SHORT}[:SEED[:REQUESTS]] with whole numbers")
    seed, count = (*map(int, numbers), *(0, DEFAULT_REQUESTS)[len(numbers) :])
    if not 1 <= count <= MAX_SYNTHETIC_REQUESTS:
        raise InvalidArgument(f"{text[:60]}: 1 to {MAX_SYNTHETIC_REQUESTS} requests are possible")
    random = Random(seed)
    lengths = np.array([[_geometric(random, mean) for mean in SHORT_MEANS] for _ in range(count)], np.int64)
    t_ms = np.arange(count, dtype=np.int64) * 100
    return _without_prefixes(text, digest(LENGTH_BLOCK, t_ms, lengths), t_ms, lengths[:, 0], lengths[:, 1])


def _geometric(random: Random, mean: float) -> int:
    """At least 1, and `mean` on average."""
    return 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 18

"""Requests to serve: arrivals, prompts as tokens and lengths of outputs, out of any trace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, TraceFormatError
from pagedkv.lab.replay import Trace, load_trace
from pagedkv.lab.replay.fields import bounded, file_sha256, totals
from pagedkv.lab.replay.load import SYNTHETIC
from pagedkv.lab.replay.synthetic import GENERATORS
from pagedkv.lab.replay.trace import MAX_TIME_MS, MAX_TOKENS
from pagedkv.lab.simulate.made import LENGTH_BLOCK, MAKERS, made_here, without_prefixes

LENGTHS = ("t_ms", "input_tokens", "output_tokens")


def own_token(i: int) -> int:
    """A token that only request i has.

    Ids of a trace's blocks count up from 0, these count down.
    """
    return 2**31 - 1 - i


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A trace, and how it is served.

    Attributes
    ----------
    trace : Trace
    speed : arrivals come so many times as fast as recorded; 0: all at the start.
    shared : whether equal prefixes are equal tokens; else no request has anything in common with another.
    whole_blocks : whether prompts end with the trace's last whole block, where there is one. The tokens behind it are
        in no other request, although in truth the next turn of a conversation may continue them.
    """

    trace: Trace
    speed: float = 1.0
    shared: bool = True
    whole_blocks: bool = False

    def __len__(self) -> int:
        return self.trace.num_requests

    @property
    def arrivals_s(self) -> NDArray[np.float64]:
        """Seconds from the start, float64 [num_requests]."""
        t_s = (self.trace.t_ms - self.trace.t_ms[0]) / 1000.0
        return t_s / self.speed if self.speed else np.zeros_like(t_s)

    def num_tokens(self, i: int) -> tuple[int, int]:
        """Prompt and output of request i, at least a token each."""
        prompt, size = int(self.trace.input_tokens[i]), self.trace.block_size
        if self.whole_blocks and prompt > size:
            prompt -= prompt % size
        return max(1, prompt), max(1, int(self.trace.output_tokens[i]))

    def prompt(self, i: int) -> NDArray[np.int32]:
        """Tokens of request i.

        Each is the id of its block in the trace, which names the whole prefix up to it.

        Where the trace's path ends before the prompt does, and in what a request generates, tokens are its own.
        """
        length, _ = self.num_tokens(i)
        own = np.int32(own_token(i))
        if not self.shared:
            return np.full(length, own, np.int32)
        tokens = np.repeat(self.trace.path(i), self.trace.block_size)[:length]
        return np.concatenate((tokens, np.full(length - len(tokens), own, np.int32))).astype(np.int32, copy=False)


def load_workload(
    source: str | os.PathLike[str],
    *,
    block_size: int | None = None,
    requests: int | None = None,
    speed: float = 1.0,
    whole_blocks: bool = False,
) -> Workload:
    """A workload by name or file.

    A trace file that `pagedkv replay` knows, ``synthetic:...``, or an ``.npz`` of arrivals and lengths alone.

    ``synthetic:short[:SEED[:REQUESTS[:PROMPT:OUTPUT]]]`` has geometric lengths with the means of instructions, or with
    these, 10 arrivals a second. ``synthetic:users[:SEED[:REQUESTS]]``: 4,000 users who each come once and then come
    back at random, 20 a second, with a session of 512 tokens, 16 new ones, and 16 to generate.

    Raises
    ------
    TraceFormatError, InvalidArgument, ImportError
    """
    make = made_here(source)
    if make is not None:
        trace = make()
    elif _has_lengths_alone(source):
        trace = _lengths(Path(source))
    else:
        trace = _trace(source, block_size)
    if requests is not None:
        trace = trace.head(requests)
    if not 0 <= speed <= 1e6:
        raise InvalidArgument(f"--speed: {speed} is not in 0..1000000")
    return Workload(trace, speed, whole_blocks=whole_blocks)


def _trace(source: str | os.PathLike[str], block_size: int | None) -> Trace:
    name = os.fspath(source).removeprefix(SYNTHETIC).split(":")[0]
    if os.fspath(source).startswith(SYNTHETIC) and name not in GENERATORS:
        known = sorted([*GENERATORS, *MAKERS])
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
    return without_prefixes(path.name, file_sha256(path), t_ms, inputs, outputs)

"""Workloads made by a formula.

``synthetic:short``, short requests, and ``synthetic:users``, users who come back.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from random import Random

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay import Trace
from pagedkv.lab.replay.load import SYNTHETIC
from pagedkv.lab.replay.synthetic import DEFAULT_REQUESTS, MAX_SYNTHETIC_REQUESTS
from pagedkv.lab.replay.trace import MAX_TOKENS, digest, from_segments

LENGTH_BLOCK = 16  # tokens of a block of these traces
SHORT_MEANS = (19.31, 58.45)  # prompt and output tokens of instructions (Alpaca), as in the PagedAttention paper
USERS = 4000  # of one of 250 replicas that share a million
SESSION, TURN = 512, 16  # tokens that a user comes back with, and that are new, asked and answered
USER_MS = 50  # between two who come


def made_here(source: str | os.PathLike[str]) -> Callable[[], Trace] | None:
    """The function that makes this workload; None for another name.

    Raises
    ------
    InvalidArgument
    """
    text = os.fspath(source)
    name, *rest = text.removeprefix(SYNTHETIC).split(":")
    if not text.startswith(SYNTHETIC) or name not in MAKERS:
        return None
    make, most = MAKERS[name]
    if len(rest) > most or not all(map(_is_number, rest)):
        more = "[:PROMPT:OUTPUT]" if most > 2 else ""
        raise InvalidArgument(f"{text[:60]}: expected {SYNTHETIC}{name}[:SEED[:REQUESTS{more}]] with whole numbers")
    numbers = tuple(map(int, rest))
    seed, count = (*numbers[:2], *(0, DEFAULT_REQUESTS)[len(numbers[:2]) :])
    if not 1 <= count <= MAX_SYNTHETIC_REQUESTS:
        raise InvalidArgument(f"{text[:60]}: 1 to {MAX_SYNTHETIC_REQUESTS} requests are possible")
    return lambda: make(text, Random(seed), count, numbers[2:])


def _short(name: str, random: Random, count: int, means: tuple[int, ...]) -> Trace:
    """Requests without shared prefixes, with geometric lengths, 10 arrivals a second.

    The means are those of instructions, or these.
    """
    if len(means) == 1 or not all(1 <= mean <= MAX_TOKENS for mean in means):
        raise InvalidArgument(f"{name[:60]}: mean tokens of prompts and of outputs are needed, 1 to {MAX_TOKENS}")
    lengths = np.array([[_geometric(random, mean) for mean in means or SHORT_MEANS] for _ in range(count)], np.int64)
    t_ms = np.arange(count, dtype=np.int64) * 100
    return without_prefixes(name, digest(LENGTH_BLOCK, t_ms, lengths), t_ms, lengths[:, 0], lengths[:, 1])


def _users(name: str, random: Random, count: int, _: tuple[int, ...]) -> Trace:
    """Every user comes once.

    Then they come back at random, each with a session of as many tokens, and a turn.
    """
    first = min(count, USERS)
    t_ms = np.arange(count, dtype=np.int64) * USER_MS
    refs = np.array([-1] * first + [random.randrange(first) for _ in range(count - first)], np.int64)
    shared = np.where(refs < 0, 0, SESSION // LENGTH_BLOCK)
    blocks = np.full(count, (SESSION + TURN) // LENGTH_BLOCK, np.int64)
    inputs, outputs = np.full(count, SESSION + TURN, np.int32), np.full(count, TURN, np.int32)
    sha256 = digest(LENGTH_BLOCK, t_ms, refs)
    return from_segments(name, sha256, LENGTH_BLOCK, t_ms, inputs, outputs, refs, shared, blocks)


MAKERS: dict[str, tuple[Callable[[str, Random, int, tuple[int, ...]], Trace], int]] = {
    "short": (_short, 4),
    "users": (_users, 2),
}


def without_prefixes(
    name: str, sha256: str, t_ms: NDArray[np.int64], inputs: NDArray[np.int64], outputs: NDArray[np.int64]
) -> Trace:
    """A trace in which every prompt is new from its first token."""
    none = np.zeros(len(t_ms), np.int64)
    return from_segments(
        name, sha256, LENGTH_BLOCK, t_ms, inputs.astype(np.int32), outputs.astype(np.int32),
        none - 1, none, -(-inputs // LENGTH_BLOCK),
    )  # fmt: skip


def _geometric(random: Random, mean: float) -> int:
    """At least 1, and `mean` on average."""
    return 1 if mean <= 1 else 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 18

"""Seeded traces with the statistics of real ones: ``chat`` and ``agent``.

A replay needs no data then.

Fitted to the marginals of the two public traces the benchmarks use (lognormal where a distribution is named):

=================  =====================================  ==========================================
                   ``chat`` (Kimi conversations)          ``agent`` (Claude Code sessions)
=================  =====================================  ==========================================
arrivals           3.26 requests/s, sessions Poisson      a session every 40 s on average, Poisson
first prompt       891 shared, then median 9k, sigma .95  a tool set (one of 8, Zipf), then median
                   (.7) or median 150, sigma 1.5 (.3)     20k, sigma 1.7
session length     P(another turn) .29, .32, .36, ... .5  median 41 turns, sigma 1.0
between turns      median 150 s, sigma 0.94               median 17 s, sigma 1.2
a turn adds        median 500 tokens, sigma 1.7           median 780 tokens, sigma 1.18
breaks             8 % of turns branch off earlier        1.1 % of turns go back to the tool set
=================  =====================================  ==========================================

Not modelled: day and night, users coming back after hours, popular documents beyond the shared prefixes.
Only ``random.Random.random`` is used, whose stream Python keeps from version to version.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay.trace import Trace, digest, from_segments

BLOCK_SIZE = 512
DEFAULT_SEED = 0
DEFAULT_REQUESTS = 2000
MAX_SYNTHETIC_REQUESTS = 1_000_000
MAX_SEED = 2**63 - 1
CHAT_LONGEST, AGENT_LONGEST = 124_847, 894_371  # tokens, as in the real traces


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    It keeps the last prompt's first ``keep`` tokens (the shared prefix on turn 0).
    """

    t_ms: float
    keep: int
    input_tokens: int
    output_tokens: int


Session = tuple[int, list[Turn]]  # which shared prefix (index), and the turns


def synthetic(text: str) -> Trace:
    """Generate ``NAME[:SEED[:REQUESTS]]``: the same text always gives the same trace.

    Raises
    ------
    InvalidArgument : unknown name, or a seed or size that is not a sensible number.
    """
    name, *numbers = text.split(":")
    if name not in GENERATORS:
        raise InvalidArgument(f"unknown synthetic trace {name!r}; known: {', '.join(sorted(GENERATORS))}")
    if len(numbers) > 2 or not all(n.isascii() and n.isdigit() and len(n) < 20 for n in numbers):
        raise InvalidArgument(f"synthetic:{text}: expected synthetic:NAME[:SEED[:REQUESTS]] with whole numbers")
    seed = int(numbers[0]) if numbers else DEFAULT_SEED
    num_requests = int(numbers[1]) if len(numbers) > 1 else DEFAULT_REQUESTS
    if not 1 <= num_requests <= MAX_SYNTHETIC_REQUESTS or seed > MAX_SEED:
        raise InvalidArgument(f"synthetic:{text}: at most {MAX_SYNTHETIC_REQUESTS} requests, at least 1")
    return _merge(f"synthetic:{text}", GENERATORS[name](Random(seed)), num_requests)


def _chat(random: Random) -> Iterator[Session]:
    start = 0.0
    while True:
        start += _exponential(random, 1000 / (3.26 * 0.63))
        body = _lognormal(random, 9000, 0.95) if random.random() < 0.7 else _lognormal(random, 150, 1.5)
        tokens = min(891 + body, CHAT_LONGEST)
        turns = [Turn(start, 891 // BLOCK_SIZE * BLOCK_SIZE, tokens, _lognormal(random, 350, 0.9))]
        now = start
        while random.random() < (0.29 if len(turns) == 1 else min(0.5, 0.24 + 0.04 * len(turns))):
            now += _lognormal(random, 150_000, 0.94)
            keep = tokens if random.random() > 0.08 else int(tokens * random.random())
            tokens = min(keep + _lognormal(random, 500, 1.7), CHAT_LONGEST)
            turns.append(Turn(now, min(keep, tokens), tokens, _lognormal(random, 350, 0.9)))
        yield 0, turns


def _agent(random: Random) -> Iterator[Session]:
    tool_tokens = [BLOCK_SIZE * (12 + 2 * i) for i in range(8)]
    start = 0.0
    while True:
        start += _exponential(random, 40_000)
        tools = min(7, int(8 ** random.random()) - 1)  # log-uniform: close to Zipf(1)
        tokens = min(tool_tokens[tools] + _lognormal(random, 20_000, 1.7), AGENT_LONGEST // 2)
        turns = [Turn(start, tool_tokens[tools], tokens, _lognormal(random, 260, 0.9))]
        now = start
        for _ in range(min(380, _lognormal(random, 41, 1.0))):
            now += _lognormal(random, 17_000, 1.2)
            if random.random() < 0.011:
                keep = tool_tokens[tools]
                tokens = keep + _lognormal(random, 20_000, 0.7)
            else:
                keep = tokens
                tokens = min(tokens + _lognormal(random, 780, 1.18), AGENT_LONGEST)
            turns.append(Turn(now, min(keep, tokens), tokens, _lognormal(random, 260, 0.9)))
        yield tools, turns


GENERATORS: dict[str, Callable[[Random], Iterator[Session]]] = {"chat": _chat, "agent": _agent}


def _merge(name: str, sessions: Iterator[Session], num_requests: int) -> Trace:
    """Interleave sessions by arrival and cut after ``num_requests``.

    Sessions come in order of their start.
    """
    waiting: list[tuple[float, int, int]] = []  # arrival, session, turn
    started: list[Session] = []
    last_request: dict[int, int] = {}  # session -> its previous request
    first_of: dict[int, int] = {}  # shared prefix -> a request that has all of it
    rows: list[tuple[int, int, int, int, int, int]] = []
    whose: list[int] = []
    while len(rows) < num_requests:
        while not waiting or started[-1][1][0].t_ms <= waiting[0][0]:
            session = next(sessions)
            heapq.heappush(waiting, (session[1][0].t_ms, len(started), 0))
            started.append(session)
        _, s, k = heapq.heappop(waiting)
        prefix, turns = started[s]
        turn = turns[k]
        ref = last_request[s] if k else first_of.setdefault(prefix, len(rows))
        if ref == len(rows):
            ref, lcp = -1, 0
        else:
            lcp = min(turn.keep // BLOCK_SIZE, rows[ref][2] // BLOCK_SIZE)
        blocks = -(-turn.input_tokens // BLOCK_SIZE)
        last_request[s] = len(rows)
        whose.append(s)
        rows.append((int(turn.t_ms), turn.output_tokens, turn.input_tokens, ref, min(lcp, blocks), blocks))
        if k + 1 < len(turns):
            heapq.heappush(waiting, (turns[k + 1].t_ms, s, k + 1))
    table = np.array(rows, np.int64).reshape(-1, 6)
    t_ms, output, tokens, refs, lcps, lengths = (np.ascontiguousarray(table[:, c]) for c in range(6))
    return from_segments(
        name,
        digest(BLOCK_SIZE, table),
        BLOCK_SIZE,
        t_ms,
        tokens.astype(np.int32),
        output.astype(np.int32),
        refs,
        lcps,
        lengths,
        np.array(whose, np.int64),
    )


def _exponential(random: Random, mean: float) -> float:
    return -mean * math.log(1.0 - random.random())


def _lognormal(random: Random, median: float, sigma: float) -> int:
    """Box-Muller on two uniform draws; at least 1, at most 10**8."""
    normal = math.sqrt(-2.0 * math.log(1.0 - random.random())) * math.cos(2.0 * math.pi * random.random())
    return max(1, min(100_000_000, int(median * math.exp(sigma * normal))))

"""A stand-in for a model: every token follows from all KV that it reads back.

It also says what each token is without a cache.

Each token's K is a number for the token and its namespace, its V is the negative. The next token follows from the
weighted sum of all numbers of the history, so one wrong block, of any position, layer of sharing or namespace, changes
every token after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk

SPEC = pk.KVSpec(1, 1, 1, "float32", 4, model="history model")
SIZE = SPEC.block_size
VOCABULARY = 50
LONGEST = 512  # tokens of a history
WEIGHTS = np.random.default_rng(7).integers(1, 1 << 20, LONGEST)
_WEIGHTS: list[int] = WEIGHTS.tolist()
PRIME = 2_147_483_647


def number(token: int, salt: int) -> int:
    """What stands for a token in the KV of a namespace."""
    return token + 1 + 64 * salt


def said(total: int, which: int = 0) -> int:
    """Return the token that follows a history of this weighted sum.

    `which` takes the first, second, ... choice.
    """
    return (total * 48_271 % PRIME // 7 + which) % VOCABULARY


def weighted(tokens: list[int], salt: int) -> int:
    """The weighted sum of a history, computed from its tokens."""
    return sum(number(token, salt) * weight for token, weight in zip(tokens, _WEIGHTS, strict=False))


def read_back(k: NDArray[Any], v: NDArray[Any], step: pk.Step, lanes: int) -> NDArray[np.int64]:
    """Return weighted sums of the first `lanes` histories after each token: int64 [lanes, n].

    They come from the KV alone.
    """
    tables = step.block_tables[:lanes]
    stored = (k[tables] - v[tables]).reshape(lanes, tables.shape[1] * SIZE).astype(np.int64) // 2
    stored[np.arange(stored.shape[1]) >= step.seq_lens[:lanes, None]] = 0
    sums: NDArray[np.int64] = np.cumsum(stored * WEIGHTS[: stored.shape[1]], axis=1)
    return sums


def beam_tokens(totals: list[int], width: int) -> list[list[int]]:
    """Return what each beam of a search goes on with.

    The beam of the smallest sum forks; as soon as all run, the beam of the largest is dropped.
    """
    order = sorted(range(len(totals)), key=totals.__getitem__)
    entries = [[said(total)] for total in totals]
    spare = width - len(totals)
    if width > 1 and not spare:
        entries[order[-1]] = []
        spare = 1
    if spare and width > 1:
        best = totals[order[0]]
        entries[order[0]] = [said(best, which) for which in range(1 + spare)]
    return entries


def alone(prompt: list[int], salt: int, most: int, stops: tuple[int, ...], n: int, beams: int) -> list[list[int]]:
    """The outputs that a request comes to, in order: computed from its tokens, without any KV."""
    start = weighted(prompt, salt)
    if beams == 1:
        return sorted(_sample(len(prompt), start, salt, most, stops, which) for which in range(n))
    live: list[tuple[int, list[int]]] = [(start, [])]
    done: list[list[int]] = []
    for place in range(len(prompt), len(prompt) + most):
        going = []
        for (total, output), tokens in zip(live, beam_tokens([total for total, _ in live], beams), strict=True):
            for token in tokens:
                longer = [*output, token]
                if token in stops or len(longer) == most:
                    done.append(longer)
                else:
                    going.append((total + number(token, salt) * _WEIGHTS[place], longer))
        live = going
        if not live:
            break
    return sorted(done)


def _sample(place: int, total: int, salt: int, most: int, stops: tuple[int, ...], which: int) -> list[int]:
    output: list[int] = []
    while len(output) < most:
        token = said(total, which if not output else 0)
        output.append(token)
        if token in stops:
            break
        total += number(token, salt) * _WEIGHTS[place]
        place += 1
    return output

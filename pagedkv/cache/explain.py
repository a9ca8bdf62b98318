"""The tier of each cached block of a prompt, and where the match ends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.tier import Tier


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Consecutive blocks of a prompt that lie in the same tier.

    Attributes
    ----------
    tier : Tier
    first_token, num_tokens : int
    block_ids : tuple of int, in that tier
    """

    tier: Tier
    first_token: int
    num_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the blocks of a prompt are.

    Attributes
    ----------
    num_tokens : int
        Tokens asked about.
    cached_tokens : int
        Leading tokens cached in whole blocks, in any tier.
    runs : tuple of CachedRun, in prompt order
    partial_tokens : int
        Tokens of the next block that agree with a cached one.
    """

    num_tokens: int
    cached_tokens: int
    runs: tuple[CachedRun, ...]
    partial_tokens: int

    def __str__(self) -> str:
        lines = [f"{self.cached_tokens} of {self.num_tokens} tokens cached"]
        for run in self.runs:
            end = run.first_token + run.num_tokens
            lines.append(f"  tokens {run.first_token}..{end - 1}: {run.tier}, {len(run.block_ids)} blocks")
        if self.partial_tokens:
            lines.append(f"  {self.partial_tokens} tokens of the next block agree with a cached one")
        return "\n".join(lines)


def explain_match(
    num_tokens: int, block_size: int, tiers: NDArray[np.uint8], blocks: NDArray[np.int32], partial: int
) -> Explanation:
    """Group a match (tiers uint8 [n], blocks int32 [n]) into runs."""
    edges = [0, *(np.flatnonzero(np.diff(tiers)) + 1).tolist(), len(tiers)] if len(tiers) else [0]
    runs = tuple(
        CachedRun(Tier(int(tiers[a])), a * block_size, (b - a) * block_size, tuple(int(i) for i in blocks[a:b]))
        for a, b in itertools.pairwise(edges)
    )
    return Explanation(num_tokens, len(tiers) * block_size, runs, partial)

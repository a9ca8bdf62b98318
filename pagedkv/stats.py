"""Counters of a cache, as one snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache has done since it was opened, and what it holds now.

    Attributes
    ----------
    sequences : int
        Live sequences.
    prompt_tokens : int
        Tokens of all prompts opened.
    hit_tokens : mapping of tier name to int
        Prompt tokens served from the cache, by the tier they came from; ``"partial"`` counts tokens copied out of a
        block that agreed only in its first tokens.
    missed_promotions : int
        Blocks that were matched in a colder tier and could not be brought up: counted as misses.
    computed_tokens : int
        Tokens whose KV was written by steps.
    blocks : mapping of tier name to mapping
        ``capacity, max, free, live, cached, reserved, available`` per tier (``BlockPool.counts``).
    placement : mapping
        Counters of the core (``Placement.stats``), in blocks.
    moved_bytes : mapping of ``"source_to_destination"`` to int
        Bytes moved between tiers.
    failed_moves : int
        Blocks whose move failed, came late or was cancelled.
    """

    sequences: int
    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    missed_promotions: int
    computed_tokens: int
    blocks: Mapping[str, Mapping[str, int]]
    placement: Mapping[str, Any]
    moved_bytes: Mapping[str, int]
    failed_moves: int

    @property
    def token_hit_rate(self) -> float:
        """Share of all prompt tokens that came from the cache, 0..1; 0 before the first prompt."""
        return sum(self.hit_tokens.values()) / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "token_hit_rate": self.token_hit_rate}

    def __str__(self) -> str:
        hits = ", ".join(f"{tier} {count}" for tier, count in self.hit_tokens.items() if count) or "none"
        held = ", ".join(
            f"{tier} {counts['live']} live + {counts['cached']} cached of {counts['max']}"
            for tier, counts in self.blocks.items()
        )
        return (
            f"{self.sequences} sequences; hit tokens: {hits} of {self.prompt_tokens} ({self.token_hit_rate:.1%}); "
            f"blocks: {held}; failed moves: {self.failed_moves}"
        )

"""Counters of a prefix store, as one snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagedkv.observe.stats import CacheStats


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a store since it was opened.

    Attributes
    ----------
    prompts : int
        Calls of ``load``.
    prompt_tokens, loaded_tokens, saved_tokens : int
        Tokens of these prompts, those that came from the cache, and those that were saved for the first time.
    short_prompts : int
        Prompts and texts with fewer tokens than `min_tokens`; they are neither looked for nor saved.
    declined_loads : int
        Hits that would have taken longer to load than to compute, by the rates measured so far.
    load_s, save_s : float
        Seconds within ``load`` and ``save``.
    failures : mapping of str to int
        Failures by kind, such as ``"load: OutOfBlocks"``; each of them cost a hit and nothing else.
    hit_tokens : mapping of tier name to int
        Of the last loaded prompt: tokens by the tier that had them.
    cache : CacheStats
    """

    prompts: int
    prompt_tokens: int
    loaded_tokens: int
    saved_tokens: int
    short_prompts: int
    declined_loads: int
    load_s: float
    save_s: float
    failures: Mapping[str, int]
    hit_tokens: Mapping[str, int]
    cache: CacheStats

    def __str__(self) -> str:
        share = self.loaded_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        failed = ", ".join(f"{kind} {count}" for kind, count in self.failures.items()) or "none"
        return (
            f"{self.prompts} prompts; {self.loaded_tokens} of {self.prompt_tokens} tokens loaded ({share:.1%}) in "
            f"{self.load_s:.3g} s, {self.saved_tokens} saved in {self.save_s:.3g} s; failures: {failed}\n{self.cache}"
        )

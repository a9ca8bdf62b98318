"""A world's cache and its scheduler's options, by a seed, for the proof *progress*."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pagedkv as pk
from pagedkv.scheduler import SchedulerOptions
from tests.in_blocks import in_blocks
from tests.reliability.history_model import SIZE, SPEC


@dataclass
class Shape:
    """What a world is made of; all of it follows from a seed.

    In a narrow world requests of several branches have long prompts, hardly fit, may cache almost nothing, and are
    suspended for others: what they come back with decides whether the world ends.
    """

    random: Random
    disk: str | None
    must_have_visitor: bool = False
    is_narrow: bool = field(init=False)
    device: int = field(init=False)
    options: SchedulerOptions = field(init=False)
    has_visitor: bool = field(init=False)
    spare: int = field(init=False)

    def __post_init__(self) -> None:
        r = self.random
        self.is_narrow = r.random() < 0.2
        self.device = r.randint(12, 18) if self.is_narrow else r.randint(7, 26)
        most = r.randint(3 if self.is_narrow else 1, 6)
        self.options = SchedulerOptions(
            max_running=most, max_batch_tokens=most + r.randint(1, 40), watermark=r.choice([0.0, 0.0, 0.1]),
            order=r.choice(["first_come", "first_come", "longest_prefix"]), window=3,
            admission=r.choice(["prompt", "prompt", "prompt", "worst_case"]), lookahead=r.choice([0, 0, 0, 2]),
            priority_tokens=r.choice([0, 5, 50]),
        )  # fmt: skip
        self.has_visitor = r.random() < 0.15 or self.must_have_visitor
        self.spare = 3 if self.has_visitor else r.choice([0, 3])

    def open(self) -> pk.KVCache:
        """The cache."""
        r = self.random
        host = r.choice([None, r.randint(4, 12), r.randint(20, 60)])
        disk = (
            None
            if self.disk is None
            else pk.Disk(self.disk, pk.Blocks(64), admission="all", segment_size=pk.Bytes(1 << 16))
        )
        return pk.KVCache(
            SPEC, pk.Blocks(self.device), in_blocks(host), disk,
            policy=r.choice(["lru", "lru", "lru", "arc", "s3fifo", "hazard"]),
            demotion=r.choice(["leaf_first", "leaf_first", "oldest_first"]),
            max_sequences=self.options.max_running + self.spare, pin_budget=pk.Blocks(self.device // 3), threads=1,
            deadline_s=r.choice([None, None, None, 0.0]), partial_hits=r.random() < 0.7,
            scrub=r.choice(["across_namespaces", "never"]),
        )  # fmt: skip


def worst_case(prompt: int, most: int, width: int, lookahead: int) -> int:
    """Blocks that `submit` goes by, by the rule of docs/scheduler.md and not by its code."""
    blocks, shared = -(-(prompt + most - 1 + lookahead) // SIZE), prompt // SIZE
    return blocks if width == 1 else shared + width * (blocks - shared + 1)

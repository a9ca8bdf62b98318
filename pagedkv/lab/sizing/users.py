"""The users of a plan: number and length of sessions, concurrency, and shared prefix."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedkv.lab.sizing.checks import MAX_TOKENS, real_number, token_count
from pagedkv.lab.sizing.sharing import MAX_SEQUENCES
from pagedkv.spec.sizes import whole_number


@dataclass(frozen=True, slots=True)
class Users:
    """Who uses the model.

    Parameters
    ----------
    count : sessions whose KV is worth keeping.
    tokens : of each.
    max_tokens : what one may grow to; the model's context if None. For the comparison with contiguous memory.
    active : share of them (0..1) that generate at the same time.
    shared_prefix : tokens that all of them begin with.
    turns_per_hour : how often each comes back; 0: loads of links and disks are not counted.

    Raises
    ------
    WrongType, InvalidArgument
    """

    count: int
    tokens: int
    max_tokens: int | None = None
    active: float = 0.01
    shared_prefix: int = 0
    turns_per_hour: float = 0.0

    def __post_init__(self) -> None:
        whole_number(self.count, "users", 1, MAX_SEQUENCES)
        token_count(self.tokens, "tokens", 1)
        if self.max_tokens is not None:
            whole_number(self.max_tokens, "max_tokens", self.tokens, MAX_TOKENS)
        real_number(self.active, "active", 0, 1)
        whole_number(self.shared_prefix, "shared_prefix", 0, self.tokens)
        real_number(self.turns_per_hour, "turns_per_hour")

    @property
    def num_active(self) -> int:
        """Users that generate at the same time, rounded up."""
        return math.ceil(round(self.count * self.active, 6))  # 0.07 * 100 is no more than 7

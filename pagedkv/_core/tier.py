"""The tiers by number and by name: the one place that says which number is which."""

from __future__ import annotations

import enum


class Tier(enum.IntEnum):
    """A tier of the cache, fastest first.

    An int where the core wants one; ``str(Tier.HOST)`` is ``"host"``.

    Statistics, logs and JSON use the names as keys.
    """

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    def __str__(self) -> str:
        return self.name.lower()


TIER_NAMES = tuple(str(tier) for tier in Tier)

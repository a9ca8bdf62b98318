"""Demotion oldest block first.

A suspended sequence keeps its recent blocks close; blocks that are dropped go leaf-first.
"""

from __future__ import annotations

from pagedkv.core import Tier
from tests.core.helpers import (
    cache,
    cached_prefixes,
    finish,
    make_room,
    sound,
    tiered,
    where,
)


def test_oldest_first_sends_the_blocks_nearest_the_root_away_first() -> None:
    _, _, placement = tiered(1, (6, 12), demotion="oldest_first")
    cache(placement, [1, 2, 3, 4, 5, 6])
    for n in range(1, 7):
        assert placement.reserve(n) == 1
        finish(placement)
        assert where(placement, [1, 2, 3, 4, 5, 6]) == [Tier.HOST] * n + [Tier.DEVICE] * (6 - n)
        sound(placement)


def test_oldest_first_spares_a_stem_that_another_branch_needs() -> None:
    _, _, placement = tiered(1, (6, 12), demotion="oldest_first")
    cache(placement, [1, 2, 3, 4])
    cache(placement, [1, 2, 7, 8])
    placement.reserve(1)
    finish(placement)
    assert where(placement, [1, 2, 3, 4]) == [Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DEVICE]
    assert where(placement, [1, 2, 7, 8]) == [Tier.DEVICE] * 4
    sound(placement)


def test_oldest_first_still_loses_leaf_first() -> None:
    tree, _, placement = tiered(1, (4, 2), demotion="oldest_first")
    cache(placement, [1, 2, 3, 4])
    make_room(placement, 4)
    prefixes = cached_prefixes(tree)
    assert all(prefix[:-1] in prefixes for prefix in prefixes if len(prefix) > 1)
    sound(placement)



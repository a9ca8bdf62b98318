"""Random requests over three tiers, with moves that fail and end in any order.

Every count stays right.
"""

from __future__ import annotations

from random import Random

import pytest

from pagedkv.core import POLICIES
from tests.core.helpers import (
    cached_prefixes,
    sound,
    states,
    tiered,
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("demotion", ["leaf_first", "oldest_first"])
@pytest.mark.parametrize("inclusive", [(False, False, False), (False, True, True)])
def test_random_requests_over_three_tiers_keep_every_count_in_order(
    policy: str, demotion: str, inclusive: tuple[bool, ...]
) -> None:
    rng = Random(f"{policy}{demotion}{inclusive}")
    for max_run in (2, 256):
        tree, pools, placement = tiered(
            1, (6, 5, 9), policy=policy, demotion=demotion, inclusive=inclusive, tree_max_run=max_run
        )
        owners: list[int] = []
        flying: list[int] = []
        for _ in range(350):
            flying += dict.fromkeys(placement.take_moves()["transfer"].tolist())
            what = rng.random()
            if owners and what < 0.3:
                placement.release(owners.pop(rng.randrange(len(owners))))
            elif flying and what < 0.6:
                placement.complete([flying.pop(rng.randrange(len(flying)))], [rng.random() < 0.8])
            elif what < 0.7:
                placement.reserve(rng.randint(0, 6), rng.randrange(3))
            else:
                tokens = [rng.randint(0, 1) for _ in range(rng.randint(0, 5))]
                owner, matched = placement.acquire(tokens)
                owners.append(owner)
                if rng.random() < 0.6 and placement.reserve(int((placement.tiers_of(owner) > 0).sum())) == 0:
                    placement.promote(owner)
                elif rng.random() < 0.5:
                    matched = placement.settle(owner)
                    if placement.reserve(len(tokens) - matched) == 0:
                        blocks = pools[0].alloc(len(tokens) - matched)
                        done = placement.insert(owner, tokens[matched:], blocks)
                        pools[0].free(blocks[done:])
            sound(placement)
            prefixes = cached_prefixes(tree)
            assert all(prefix[:-1] in prefixes for prefix in prefixes if len(prefix) > 1)
        for owner in owners:
            placement.release(owner)
        flying += dict.fromkeys(placement.take_moves()["transfer"].tolist())
        placement.complete(flying, [True] * len(flying))
        assert all(live == 0 for _, live, _ in states(placement))
        placement.clear()
        assert all(pool.counts()["free"] == pool.capacity for pool in pools)
        sound(placement)

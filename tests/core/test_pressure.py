"""The core finds room whenever there is any.

The tests try every policy, order of demotion and choice of tiers, with moves that fail.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from pagedkv.core import POLICIES, BlockPool, Placement, RadixTree


class Life:
    """Owners of random paths that come and go on one placement.

    The block size is 1, so that a token is a block.
    """

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = rng = Random(seed)
        capacities = [rng.randint(2, 6), rng.choice([0, 0, 2, 4]), rng.choice([0, 3, 9])]
        pools = [BlockPool(capacity) if capacity else None for capacity in capacities]
        while pools[-1] is None:
            pools.pop()
        self.device, self.longest = pools[0], capacities[0]
        tree = RadixTree(1, len(pools), keep_chain=True)
        self.placement = Placement(
            tree,
            pools,
            policy=policy,
            demotion=rng.choice(["leaf_first", "oldest_first"]),
            inclusive=[rng.random() < 0.5 for _ in pools],
        )
        self.owners: list[int] = []

    def finish_moves(self, success_rate: float) -> bool:
        """Complete what was decided, in any order; False if nothing was."""
        transfers = np.unique(self.placement.take_moves()["transfer"])
        self.rng.shuffle(transfers)
        self.placement.complete(transfers, [self.rng.random() < success_rate for _ in transfers])
        return len(transfers) > 0

    def has_room(self, num_blocks: int) -> bool:
        """Room for blocks on the device; if there is none, every block must have a holder."""
        counts = self.device.counts()
        assert self.device.num_obtainable == counts["available"] + counts["cached"]
        while self.placement.reserve(num_blocks):
            if not self.finish_moves(0.9):
                assert self.device.counts()["cached"] == 0, "an evictable block was not evicted"
                return False
        return True

    def come(self) -> None:
        path = [self.rng.randint(0, 2) for _ in range(self.rng.randint(1, self.longest))]
        owner, matched = self.placement.acquire(path)
        self.owners.append(owner)
        cold = int(np.count_nonzero(self.placement.tiers_of(owner)))
        ahead = len(path) - matched if self.rng.random() < 0.5 else 0  # room for the rest at once, or later
        if not self.has_room(cold + ahead):
            return
        self.placement.promote(owner)
        self.finish_moves(0.95)
        matched = self.placement.settle(owner)
        if not self.has_room(len(path) - matched):
            return
        blocks = self.device.alloc(len(path) - matched)
        self.device.free(blocks[self.placement.insert(owner, path[matched:], blocks) :])

    def go(self) -> None:
        self.placement.release(self.owners.pop(self.rng.randrange(len(self.owners))))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_for_room_fails_only_when_everything_is_held(policy: str) -> None:
    for seed in range(40):
        life = Life(seed, policy)
        for _ in range(150):
            if life.rng.random() < 0.75:
                life.come()
            while len(life.owners) > 2 or (life.owners and life.rng.random() < 0.4):
                life.go()
            life.placement.check_integrity()
        while life.owners:
            life.go()
        while life.finish_moves(1.0):
            pass
        life.placement.clear()
        assert life.device.counts()["free"] == life.longest, f"seed {seed}: blocks leaked"

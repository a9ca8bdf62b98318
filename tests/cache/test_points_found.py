"""A core over a store of groups of layers, opened again after a crash at any moment.

Each page's content is followed, and hits are compared with a search over all that is stored. Not covered: the store's
files (tests/tiers/test_lanes.py) and a cache's bytes (test_by_group_on_disk.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv._core.chain_key import ROOT_PARENT, chain_keys
from pagedkv.cache.points_found import restore_points
from pagedkv.spec.groups import Group
from pagedkv.tiers import Record, StoredBlock
from tests.cache.conftest import SPEC
from tests.core.test_tails_between_tiers import SIZE, Core, play

SECRET, DIGEST = bytes(range(32)), bytes(32)


@dataclass
class Store:
    """The content of a core's closed tier when its process ended."""

    stored: dict[tuple[int, int], tuple[int, ...]]
    secret = SECRET

    def records(self, *, lane: int = 0) -> Iterable[StoredBlock]:
        for number, ((group, page), prefix) in enumerate(sorted(self.stored.items())):
            if group == lane:
                keys = [ROOT_PARENT, *chain_keys(SECRET, DIGEST, ROOT_PARENT, np.array(prefix, np.int32), SIZE)]
                record = Record(keys[-1], keys[-2], DIGEST, np.array(prefix[-SIZE:], np.int32), bytes(32))
                yield StoredBlock(page, record, number + 1)

    def invalidate(self, blocks: NDArray[np.int32], *, lane: int = 0) -> None:
        for block in blocks.tolist():
            del self.stored[lane, block]

    def can_go_on(self, prefix: tuple[int, ...], groups: tuple[Group, Group]) -> bool:
        """The rule, by the stored pages."""
        there = [{kept for (group, _), kept in self.stored.items() if group == g} for g in (0, 1)]
        blocks = len(prefix) // SIZE
        return all(
            prefix[: (block + 1) * SIZE] in there[g]
            for g, group in enumerate(groups)
            for block in range(blocks - group.need(blocks), blocks)
        )

    def longest(self, tokens: tuple[int, ...], groups: tuple[Group, Group]) -> int:
        """Blocks of a prompt after which a request can go on."""
        ends = range((len(tokens) - 1) // SIZE, 0, -1)
        return next((end for end in ends if self.can_go_on(tokens[: end * SIZE], groups)), 0)


def groups_of(core: Core) -> tuple[Group, Group]:
    return Group((0,), None, None, SPEC), Group((1,), core.window or None, core.chunk or None, SPEC)


def reopened(core: Core) -> tuple[Core, Store]:
    """A new core over the closed tier of another one."""
    store = Store(dict(core.stored))
    again = Core(*core.sizes, window=core.window, chunk=core.chunk, per_extent=core.per_extent, write="all")
    restore_points(again.placement, store, groups_of(core), again.closed, lambda digest: 0)
    for (group, page), prefix in store.stored.items():
        again.content[again.closed, group, page] = prefix
    again.stored = dict(store.stored)
    again.sound()
    return again, store


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_after_a_crash_each_prompt_hits_as_far_as_the_store_allows(seed: int, tiers: int) -> None:
    before = play(seed, 300, tiers, closed=True)
    core, store = reopened(before)
    random, groups = Random(seed), groups_of(before)
    prompts = [(*prefix, 9) for prefix in before.stored.values()]
    prompts += [(*prefix[: random.randrange(1, len(prefix) + 1)], 9, 9) for prefix in before.stored.values()]
    random.shuffle(prompts)
    found = 0
    for tokens in prompts:
        hit = len(core.placement.match(np.array(tokens, np.int32)[:-1])[0])
        assert hit == store.longest(tokens, groups), tokens
        found += hit
    assert found or not any(store.can_go_on(prefix, groups) for prefix in store.stored.values())
    for tokens in prompts[:20]:
        core.run(tokens[:19], at_once=4)  # each page is compared as it is read
    core.settle()
    assert all(pool.counts()["live"] == 0 for tier in core.pools for pool in tier)

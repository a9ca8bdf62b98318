"""Small budgets on every tier.

Whatever is demoted, promoted, dropped or reopened, each read returns what was computed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

import pagedkv as pk
from pagedkv._core.chain_key import ROOT_PARENT
from pagedkv.core import POLICIES
from tests.slices import one_in

from .conftest import BLOCK, SPEC, Toy, all_free, prompt, where

ORDERS = ["leaf_first", "oldest_first"]


@dataclass
class Traffic:
    """Random requests over few tokens, so that prefixes are shared.

    It checks every sequence it touches.
    """

    toy: Toy
    seed: int
    live: list[pk.Sequence] = field(default_factory=list)
    refused: int = 0

    def play(self, num_requests):
        choose = random.Random(self.seed)
        for turn in range(num_requests):
            try:
                self.one(choose)
            except pk.OutOfBlocks:
                self.refused += 1
                if self.live:
                    self.live.pop(0).release()
            if turn % 50 == 0:
                self.toy.cache.check_integrity()
        for seq in self.live:
            self.toy.check(seq)
            seq.release()
        self.live.clear()
        self.toy.cache.check_integrity()
        assert all_free(self.toy.cache)

    def one(self, choose):
        kind, toy = choose.random(), self.toy
        if kind < 0.4 and len(self.live) < 4:
            seq = toy.cache.sequence(choose.choices([0, 1], k=choose.randint(1, 30)))
            self.live.append(seq)
            toy.check(seq)
            toy.run(seq)
            toy.check(seq)
        elif kind < 0.7 and self.live:
            some = choose.sample(self.live, choose.randint(1, len(self.live)))
            for seq in some:
                seq.append(choose.randint(0, 1))
            toy.run(*some)
            toy.check(*some)
        elif kind < 0.75 and self.live:
            self.live += choose.choice(self.live).fork(1)
        elif kind < 0.8 and self.live:
            seq = choose.choice(self.live)
            seq.truncate(choose.randint(1, seq.num_tokens))
            toy.check(seq)
        elif self.live:
            self.live.pop(choose.randrange(len(self.live))).release()


@pytest.mark.parametrize("inclusive", [None, (True, True, True), (False, False, False)], ids=["default", "all", "none"])
@pytest.mark.parametrize("demotion", one_in(2, ORDERS))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_read_is_right_under_every_policy(open_cache, policy, demotion, inclusive):
    cache = open_cache(24, host=16, disk=40, policy=policy, demotion=demotion, inclusive=inclusive)
    traffic = Traffic(Toy(cache), seed=7)
    traffic.play(300)
    stats = cache.stats()
    assert traffic.toy.tokens_checked > 3000
    assert stats.failed_moves == stats.missed_promotions == 0
    assert stats.hit_tokens["device"] > 0
    assert stats.moved_bytes["host_to_disk"] > 0


@pytest.mark.parametrize("budgets", [{}, {"host": 12}, {"disk": 30}, {"host": 5, "disk": 7}], ids=str)
@pytest.mark.parametrize("demotion", ORDERS)
def test_every_read_is_right_with_every_set_of_tiers(open_cache, budgets, demotion):
    cache = open_cache(20, demotion=demotion, **budgets)
    traffic = Traffic(Toy(cache), seed=11)
    traffic.play(400)
    assert set(cache.stats().hit_tokens) == {"device", "partial", *budgets}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_read_is_right_with_every_kind_of_block(open_cache, dtype, layout, block_size):
    spec = pk.KVSpec(3, 1, 2, dtype, block_size, layout=layout, model="toy")
    blocks = 100 // block_size + 2
    traffic = Traffic(Toy(open_cache(blocks, spec, host=blocks // 2, disk=blocks)), seed=3)
    traffic.play(100)


@pytest.mark.parametrize("demotion", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budgets", [{"host": 60}, {"disk": 60}], ids=str)
def test_a_prefix_comes_back_from_the_tier_below(open_cache, budgets, policy, demotion):
    (below,) = budgets
    toy = Toy(open_cache(8, policy=policy, demotion=demotion, **budgets))
    for start in range(1, 8):
        toy.use(prompt(start, 6 * BLOCK + 1))
    demoted = [start for start in range(1, 8) if where(toy.cache, prompt(start, 6 * BLOCK + 1)) == [(below, 6)]]
    assert len(demoted) >= 5
    for start in demoted:
        assert toy.use(prompt(start, 6 * BLOCK + 1)) == {below: 6 * BLOCK}
    stats = toy.cache.stats()
    assert stats.moved_bytes[f"{below}_to_device"] == len(demoted) * 6 * SPEC.block_bytes
    assert not any(stats.placement["dropped"].values())


def test_a_prefix_that_lies_in_three_tiers_is_served_whole(open_cache, tmp_path):
    mirror = pk.Disk(str(tmp_path / "kv"), pk.Blocks(40), write="reused")  # so the host repeats blocks of the disk
    toy = Toy(open_cache(8, host=4, disk=mirror))
    tokens = prompt(1, 8 * BLOCK)
    toy.use(tokens)
    held = [toy.cache.sequence(prompt(2, 2 * BLOCK)), toy.cache.sequence(prompt(3, 2 * BLOCK))]
    for seq in held:
        toy.run(seq)
    runs = where(toy.cache, tokens)
    assert [tier for tier, _ in runs] == ["device", "host"]
    toy.use(prompt(4, 3 * BLOCK))
    runs = where(toy.cache, tokens)
    assert [tier for tier, _ in runs] == ["device", "host", "disk"], runs
    for seq in held:
        seq.release()
    hits = toy.use(tokens)
    assert hits == {tier: min(count, 7) * BLOCK for tier, count in runs if tier != "disk"} | {"disk": hits["disk"]}
    assert sum(hits.values()) in (7 * BLOCK, 8 * BLOCK - 1)


def test_what_leaves_the_last_tier_is_lost_and_counted(open_cache):
    toy = Toy(open_cache(4, host=4, disk=4, partial_hits=False))
    for start in range(10):
        toy.use(prompt(start))
    cached = sum(toy.cache.explain(prompt(start)).cached_tokens for start in range(10)) // BLOCK
    dropped = toy.cache.stats().placement["dropped"]
    assert cached + sum(dropped.values()) == 30
    assert dropped["disk"] > 0


def fill_disk(open_cache, demotion, starts=range(1, 7)):
    """Fill the disk of a cache and close it; return the prefixes that are wholly there.

    The cache demotes all but the last prefixes.
    """
    cache = open_cache(8, disk=60, demotion=demotion)
    toy = Toy(cache)
    for start in starts:
        toy.use(prompt(start, 5 * BLOCK + 1))
    whole = [start for start in starts if where(cache, prompt(start, 5 * BLOCK + 1)) == [("disk", 5)]]
    cache.close()
    return whole


@pytest.mark.parametrize("demotion", ORDERS)
def test_a_reopened_disk_serves_the_same_bytes(open_cache, demotion):
    whole = fill_disk(open_cache, demotion)
    assert len(whole) >= 4
    toy = Toy(open_cache(8, disk=60, demotion=demotion))
    for start in whole:
        assert toy.use(prompt(start, 5 * BLOCK + 1)) == {"disk": 5 * BLOCK}
    assert toy.cache.stats().failed_moves == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("demotion", ORDERS)
def test_a_disk_reopened_again_and_again_under_traffic_stays_right(open_cache, policy, demotion):
    served = 0
    for seed in range(4):
        cache = open_cache(20, host=6, disk=30, policy=policy, demotion=demotion)
        Traffic(Toy(cache), seed).play(60)
        served += cache.stats().hit_tokens["disk"]
        cache.close()
    assert served > 0


def test_another_policy_and_order_may_reopen_a_disk(open_cache):
    whole = fill_disk(open_cache, "leaf_first")
    toy = Toy(open_cache(8, host=3, disk=60, policy="arc", demotion="oldest_first"))
    for start in whole:
        assert sum(toy.use(prompt(start, 5 * BLOCK + 1)).values()) == 5 * BLOCK


def orphan_the_first(cache):
    """Fill the disk as no cache does: without the beginning of a prompt, which is made invalid.

    Leaves the cache closed.
    """
    toy = Toy(cache)
    toy.use(prompt(1, 8 * BLOCK))
    toy.use(prompt(2, 4 * BLOCK))
    cache.checkpoint()
    first = [block.block for block in cache._store.records() if block.record.parent == ROOT_PARENT]
    cache._store.invalidate(np.array(first, np.int32))
    cache.close()


def test_what_goes_down_is_found_again_although_its_beginning_stays_on_the_device(open_cache):
    cache = open_cache(8, disk=60)
    toy = Toy(cache)
    toy.use(prompt(1, 8 * BLOCK))
    toy.use(prompt(2, 4 * BLOCK))  # the leaves of the first go down, its beginning stays on the device
    assert [tier for tier, _ in where(cache, prompt(1, 8 * BLOCK))] == ["device", "disk"]
    cache.close(write_s=0)
    toy = Toy(open_cache(8, disk=60))
    assert toy.cache.explain(prompt(1, 8 * BLOCK)).cached_tokens == 8 * BLOCK
    assert toy.use(prompt(1, 8 * BLOCK)) == {"disk": 7 * BLOCK}


def test_blocks_whose_prefix_is_not_on_the_disk_are_never_served_and_their_room_is_free(open_cache, caplog):
    orphan_the_first(open_cache(8, disk=60))
    caplog.clear()
    with caplog.at_level("INFO", "pagedkv.cache"):
        toy = Toy(open_cache(8, disk=60))
    opening, warning = caplog.messages
    assert opening.endswith("0 blocks found in 0 prefixes, freed: 10 without the block before them")
    assert "10 of 10 blocks were written without the block before them" in warning
    assert toy.cache.explain(prompt(1, 8 * BLOCK)).cached_tokens == 0
    assert toy.cache.stats().blocks["disk"]["free"] == 60
    assert toy.cache.stats().orphans == 10
    assert toy.use(prompt(1, 8 * BLOCK)) == {}
    for start in range(2, 16):  # all of the room can be used
        toy.use(prompt(start, 4 * BLOCK + 1))
    assert toy.cache.stats().blocks["disk"]["cached"] > 48
    toy.cache.close()
    cache = open_cache(8, disk=60)
    for start in range(1, 16):
        Toy(cache).use(prompt(start, 4 * BLOCK + 1))


def test_orphans_left_by_one_cache_do_not_meet_their_parents_in_a_later_one(open_cache):
    orphan_the_first(open_cache(8, disk=60))
    other = Toy(open_cache(8, disk=60), salt=5)  # as if the weights had changed: the old leaves must be gone
    tokens = prompt(1, 8 * BLOCK)
    other.use(tokens)
    for start in range(3, 6):
        other.use(prompt(start, 7 * BLOCK))
    other.use(tokens)
    other.cache.close()
    other = Toy(open_cache(8, disk=60), salt=5)
    other.use(tokens)


def test_a_disk_of_another_spec_is_refused(open_cache):
    open_cache(8, disk=20).close()
    for change in ({"layout": "HND", "model": "toy"}, {"model": "other"}):
        changed = pk.KVSpec(2, 2, 4, "float32", 4, **change)
        with pytest.raises(pk.LayoutMismatch):
            open_cache(8, changed, disk=20)
    with pytest.raises(pk.LayoutMismatch):
        open_cache(8, disk=19)
    open_cache(8, disk=20)


def test_a_disk_that_another_cache_has_open_is_refused(open_cache):
    first = open_cache(8, disk=20)
    with pytest.raises(pk.TierError):
        open_cache(8, disk=20)
    first.close()
    open_cache(8, disk=20)


def test_the_arenas_hold_their_budget_and_no_more(open_cache):
    cache = open_cache(7, host=5)
    assert cache.device_arena.shape == (7, SPEC.block_bytes)
    assert cache.device_arena.dtype == np.uint8
    counts = cache.stats().blocks
    assert (counts["device"]["max"], counts["host"]["max"]) == (7, 5)
    Traffic(Toy(cache), 1).play(200)
    assert cache.stats().blocks["device"]["max"] == 7


def test_a_budget_in_bytes_is_rounded_down_to_blocks(open_cache):
    cache = open_cache("3KiB", host=f"{SPEC.block_bytes * 3 - 1}B")
    assert cache.stats().blocks["device"]["max"] == 3072 // SPEC.block_bytes
    assert cache.stats().blocks["host"]["max"] == 2

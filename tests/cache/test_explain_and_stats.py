"""What the cache says about itself is what happened, and asking changes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

import pagedkv as pk

from .conftest import BLOCK, SPEC, Toy, prompt, where


def test_explaining_a_prompt_that_nobody_asked_for_yet(open_cache):
    found = open_cache().explain(prompt(1))
    assert (found.num_tokens, found.cached_tokens, found.runs, found.partial_tokens) == (13, 0, (), 0)
    assert str(found) == "0 of 13 tokens cached"


@pytest.mark.parametrize("length", [0, 1, BLOCK, BLOCK + 1])
def test_explaining_short_prompts(open_cache, length):
    toy = Toy(open_cache())
    toy.use(prompt(1, length))
    assert toy.cache.explain(prompt(1, length)).cached_tokens == length // BLOCK * BLOCK


def test_the_runs_name_tier_tokens_and_blocks_in_prompt_order(open_cache):
    toy = Toy(open_cache(8, host=8))
    tokens = prompt(1, 6 * BLOCK)
    toy.use(tokens)
    held = toy.cache.sequence(prompt(2, 5 * BLOCK))
    toy.run(held)
    found = toy.cache.explain([*tokens, 1, 2, 3])
    runs = [(run.tier, run.first_token, run.num_tokens) for run in found.runs]
    assert runs == [(pk.Tier.DEVICE, 0, 12), (pk.Tier.HOST, 12, 12)]
    assert all(len(run.block_ids) * BLOCK == run.num_tokens for run in found.runs)
    assert set(found.runs[0].block_ids).isdisjoint(held.blocks.tolist())
    k_view, _ = toy.cache.layer(0)
    for i, block in enumerate(found.runs[0].block_ids):
        assert np.array_equal(k_view[block], toy.kv(tokens, 0)[0][i * BLOCK : (i + 1) * BLOCK])
    assert str(found).splitlines() == [
        "24 of 27 tokens cached", "  tokens 0..11: device, 3 blocks", "  tokens 12..23: host, 3 blocks",
    ]  # fmt: skip


def test_the_agreeing_part_of_the_next_block_is_told(open_cache):
    toy = Toy(open_cache())
    toy.use(prompt(1))
    found = toy.cache.explain([*prompt(1)[:7], 5])
    assert found.partial_tokens == 3
    assert str(found).endswith("3 tokens of the next block agree with a cached one")


def test_explaining_changes_nothing(open_cache):
    toy = Toy(open_cache(8, host=3))
    toy.use(prompt(1))
    toy.use(prompt(2))
    before = toy.cache.stats()
    for _ in range(50):  # were this a use, the first would become the younger one
        toy.cache.explain(prompt(1))
    assert toy.cache.stats() == before
    toy.use(prompt(3))
    assert where(toy.cache, prompt(2)) == [("device", 3)]
    assert where(toy.cache, prompt(1)) != [("device", 3)]


def test_counters_before_the_first_prompt_are_zero(open_cache):
    stats = open_cache(8, host=4, disk=5).stats()
    assert (
        stats.sequences
        == stats.prompt_tokens
        == stats.computed_tokens
        == stats.failed_moves
        == stats.missed_promotions
        == 0
    )
    assert stats.hit_tokens == {"device": 0, "host": 0, "disk": 0, "partial": 0}
    assert stats.token_hit_rate == 0.0
    assert {tier: (counts["free"], counts["max"]) for tier, counts in stats.blocks.items()} == {
        "device": (8, 8), "host": (4, 4), "disk": (5, 5),
    }  # fmt: skip


def test_every_prompt_token_is_either_a_hit_or_computed(open_cache):
    toy = Toy(open_cache(12, host=6, disk=20))
    choose, opened, hits = np.random.default_rng(1), 0, 0
    for _ in range(60):
        tokens = choose.integers(0, 2, choose.integers(1, 25))
        hits += sum(toy.use(tokens).values())
        opened += len(tokens)
    stats = toy.cache.stats()
    assert stats.prompt_tokens == opened
    assert sum(stats.hit_tokens.values()) == hits
    assert stats.computed_tokens == opened - hits
    assert stats.token_hit_rate == hits / opened
    assert stats.sequences == 0


def test_hits_are_counted_by_the_tier_they_were_found_in(open_cache):
    toy = Toy(open_cache(4, host=16))
    toy.use(prompt(1))
    toy.use(prompt(1))
    toy.use(prompt(2, 4 * BLOCK))
    toy.use(prompt(1))
    assert toy.cache.stats().hit_tokens == {"device": 12, "host": 12, "partial": 0}


def test_moved_bytes_are_those_of_the_blocks_moved(open_cache):
    toy = Toy(open_cache(4, host=4, disk=20))
    for start in range(6):
        toy.use(prompt(start))
    toy.use(prompt(0))
    stats = toy.cache.stats()
    demoted, promoted = stats.placement["demoted"], stats.placement["promoted"]
    to_disk = stats.moved_bytes["host_to_disk"] + stats.moved_bytes.get("device_to_disk", 0)
    assert stats.moved_bytes["device_to_host"] == demoted["device"] * SPEC.block_bytes
    assert to_disk == (demoted["host"] + stats.placement["copied"]["disk"]) * SPEC.block_bytes
    assert stats.moved_bytes["disk_to_device"] == promoted["disk"] * SPEC.block_bytes > 0


def test_live_and_cached_blocks_are_counted_apart(open_cache):
    toy = Toy(open_cache(10))
    seq = toy.cache.sequence(prompt(1))
    toy.run(seq)
    toy.use(prompt(2))
    counts = toy.cache.stats().blocks["device"]
    assert (counts["live"], counts["cached"], counts["free"]) == (4, 3, 3)
    seq.release()
    counts = toy.cache.stats().blocks["device"]
    assert (counts["live"], counts["cached"], counts["free"]) == (0, 6, 4)


def test_a_snapshot_is_plain_data_and_does_not_change_later(open_cache):
    toy = Toy(open_cache(8, host=4))
    toy.use(prompt(1))
    stats = toy.cache.stats()
    before = json.dumps(stats.to_dict())
    toy.use(prompt(2))
    toy.use(prompt(3))
    assert json.dumps(stats.to_dict()) == before
    assert json.loads(before)["token_hit_rate"] == 0.0
    assert "hit tokens: none of 13" in str(stats)


def test_a_closed_cache_still_tells_its_counters(open_cache):
    toy = Toy(open_cache(8, host=4))
    toy.use(prompt(1))
    before = toy.cache.stats()
    toy.cache.close()
    assert toy.cache.stats() == before
    assert "closed" in repr(toy.cache)


def test_events_tell_what_was_stored_and_removed_and_where(open_cache):
    toy = Toy(open_cache(4, host=8, event_words=1 << 12))
    toy.use(prompt(1))
    kinds = [(event.kind, str(event.tier)) for event in toy.cache.events()]
    assert kinds == [("stored", "device")]
    assert toy.cache.events() == []
    toy.use(prompt(2, 4 * BLOCK))
    kinds = {(event.kind, str(event.tier)) for event in toy.cache.events()}
    assert {("stored", "device"), ("removed", "device"), ("stored", "host")} <= kinds


def test_without_a_ring_there_are_no_events(open_cache):
    toy = Toy(open_cache())
    toy.use(prompt(1))
    assert toy.cache.events() == []

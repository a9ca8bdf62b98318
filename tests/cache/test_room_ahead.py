"""Over several tiers a full cache makes room before a step needs it.

So a decode loop waits for no move.
"""

from __future__ import annotations

import time

import pytest

import pagedkv as pk

from .conftest import Toy, prompt, where

DEVICE = 640  # blocks: the low watermark is at most ten of them


class MadeRoom:
    """Counts the calls that had to wait for room."""

    def __init__(self):
        self.waited = 0

    def begin(self, span):
        self.waited += span.name == "make_room"

    def end(self, span, state):
        pass


def full(open_cache, prompts=11, **options):
    """A cache whose device is full of what no sequence holds, and a toy model over it."""
    toy = Toy(open_cache(DEVICE, host=2 * DEVICE, **options))
    for start in range(1, 1 + prompts):
        toy.use(prompt(start, 60 * 4 + 1))
    return toy


def settle(cache):
    """As long as a model computes: until nothing is on its way."""
    while cache.stats().placement["in_flight"]:
        time.sleep(0.001)


def decode(toy, seqs, steps):
    for token in range(steps):
        for seq in seqs:
            seq.append(token)
        with toy.cache.step(seqs) as step:
            toy.write(step, *seqs)
            settle(toy.cache)
    toy.check(*seqs)


@pytest.mark.parametrize("disk", [0, 4 * DEVICE, DEVICE], ids=["two tiers", "disk", "small disk"])
@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "hazard"])
def test_a_steady_decode_loop_waits_for_no_room(open_cache, tmp_path, policy, disk):
    below = pk.Disk(str(tmp_path / "kv"), pk.Blocks(disk)) if disk else None
    toy, told = full(open_cache, 45 if disk == DEVICE else 11, policy=policy, disk=below), MadeRoom()
    seqs = [toy.cache.sequence([7000 + i]) for i in range(6)]
    decode(toy, seqs, 9)  # the first blocks of each: the cache learns what a step takes
    toy.cache.hooks.add(told)
    before = toy.cache.stats().moved_bytes["device_to_host"]
    decode(toy, seqs, 40)
    assert told.waited == 0
    assert toy.cache.stats().moved_bytes["device_to_host"] > before, "room was made all the same"
    for seq in seqs:
        seq.release()


def test_no_more_is_made_than_a_64th_of_the_device_twice(open_cache):
    toy = full(open_cache)
    free = toy.cache.placement.pools[0].num_available
    with toy.cache.sequence(prompt(99, 1200)) as seq, toy.cache.step([seq]) as step:
        settle(toy.cache)
        assert toy.cache.placement.pools[0].num_available <= max(free, 2 * (DEVICE // 64))
        for layer in range(toy.cache.spec.num_layers):
            step.mark_written(layer)


@pytest.mark.parametrize("options", [{"device": 640}, {"device": 60, "host": 200}], ids=["one tier", "small"])
def test_without_a_colder_tier_or_on_a_small_device_nothing_is_made_ahead(open_cache, options):
    toy = Toy(open_cache(**options))
    for start in range(1, 1 + options["device"] // 3):
        toy.use(prompt(start))
    available = toy.cache.placement.pools[0].num_available
    seq = toy.cache.sequence([1])
    decode(toy, [seq], 1)
    assert toy.cache.placement.pools[0].num_available <= available
    seq.release()


def test_nothing_is_dropped_ahead_where_the_tier_below_is_held(open_cache):
    """With all of the host held, room on the device means lost blocks, which no step needs yet."""
    toy = Toy(open_cache(DEVICE, host=3, pin_budget=pk.Blocks(DEVICE)))
    prompts = [prompt(start, 60 * 4 + 1) for start in range(1, 13)]
    for tokens in prompts:
        toy.use(tokens)
    settle(toy.cache)
    placement = toy.cache.placement
    pins = [toy.cache.pin(tokens) for tokens in prompts if ("host" in dict(where(toy.cache, tokens)))]
    assert pins
    assert placement.pools[1].num_obtainable == 0
    assert placement.pools[0].num_available < 10
    dropped = dict(placement.stats()["dropped"])
    for _ in range(5):
        toy.cache.moves.make_room_ahead(10)
        settle(toy.cache)
    assert placement.stats()["dropped"] == dropped
    for pin in pins:
        pin.release()


"""A cache that keeps each layer's reach alone, over device and host memory.

Not covered: disks (test_by_group_on_disk.py), and remote stores, which such a cache does not have yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache.group_mover import GroupMover
from tests.cache.test_by_group import FULL, SIZE, SPECS, WINDOW, compute, prompt

NUM_PROMPTS = 8


@pytest.fixture
def opened() -> Iterator[Callable[..., pk.KVCache]]:
    caches: list[pk.KVCache] = []

    def open_cache(spec: pk.KVSpec, device: int = 40, host: int = 300, **options: Any) -> pk.KVCache:
        caches.append(pk.KVCache(spec, pk.Blocks(device), pk.Blocks(host), by_group=True, **options))
        return caches[-1]

    yield open_cache
    for cache in caches:
        cache.check_integrity()
        cache.close()


def loaded(cache: pk.KVCache) -> int:
    """Bytes that have come up from the host."""
    counts = cache._storage.carrier.stats().get((pk.Tier.HOST, pk.Tier.DEVICE))
    return 0 if counts is None else int(counts.bytes)


@pytest.mark.parametrize("name", SPECS)
def test_prompts_that_went_to_the_host_attend_as_if_they_had_stayed(
    name: str, opened: Callable[..., pk.KVCache]
) -> None:
    spec = SPECS[name]
    cache, length = opened(spec), 50
    with pk.KVCache(spec, pk.Blocks(400)) as whole:
        for turn in range(3 * NUM_PROMPTS):
            tokens = np.append(prompt(turn % NUM_PROMPTS, length), prompt(turn, 5))
            with cache.sequence(tokens) as seq, whole.sequence(tokens) as other:
                hit = sum(seq.hit_tokens.values())
                assert hit == (turn >= NUM_PROMPTS) * (length // SIZE * SIZE) or (turn < 2 * NUM_PROMPTS and hit == 0)
                got, wanted = compute(cache, seq), compute(whole, other)
                both = min(got.shape[1], wanted.shape[1])
                np.testing.assert_allclose(got[:, -both:], wanted[:, -both:], atol=2e-5)
            cache.check_integrity()
    stats = cache.stats()
    assert stats.hit_tokens["host"] > 0  # how many of the hits is up to the room that was made ahead
    assert not sum(cache.placement.stats()["dropped"].values())


def test_a_hit_loads_its_spine_and_its_tail_and_a_fifth_of_all_layers_tokens() -> None:
    """Gemma 3 27B's layers at a 1024th of their width, ten of which see everything."""
    layers = [pk.Attention(1, 1) if i % 6 == 5 else pk.Attention(1, 1, window=1024) for i in range(62)]
    spec = pk.KVSpec.of(layers, dtype="float32", block_size=16)
    tokens, other = prompt(1, 32_769), prompt(2, 32_769)
    size = {"device_memory": pk.Blocks(2052), "host_memory": pk.Blocks(2300)}
    width = 62 * 32_768 * 16 * 128 * 2 * 2 // (2048 * spec.block_bytes)  # bfloat16, 16 heads of 128
    found = {}
    for by_group in (False, True):
        with pk.KVCache(spec, by_group=by_group, **size) as cache:
            for each in (tokens, other):
                with cache.sequence(each) as seq:
                    while seq.num_computed < seq.num_tokens:
                        count = min(2048, seq.num_tokens - seq.num_computed)
                        with cache.step([seq], q_lens=[count]) as step:
                            for layer in range(62):
                                step.mark_written(layer)
            if by_group:  # it takes so much less that both are on the device: have them leave
                cache.moves.make_room(np.array([cache.placement.pools[0].num_obtainable, 0]))
            assert loaded(cache) == 0
            with cache.sequence(tokens) as seq:
                assert sum(seq.hit_tokens.values()) == 32_768
            found[by_group] = loaded(cache) * width
    assert found[False] == pytest.approx(16.6e9, rel=0.01)
    assert found[True] <= 3.2e9
    least = (10 * 32_768 + 52 * 1_024) * 16 * 128 * 2 * 2
    assert found[True] == pytest.approx(least, rel=0.01)


def test_a_tail_alone_is_loaded_behind_a_spine_that_has_stayed(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(SPECS["windows"], 60)
    with cache.sequence(prompt(0, 50)) as seq:
        wanted = compute(cache, seq)
    pool = cache.placement.pools[0]
    assert pool is not None
    cache.moves.make_room(np.array([pool.num_available + 1, 0]))
    cache.check_integrity()
    assert not cache.placement.match(prompt(0, 50))[0].any(), "the spine is on the device"
    assert loaded(cache) == 0
    with cache.sequence(prompt(0, 50)) as seq:
        assert sum(seq.hit_tokens.values()) == 48
        got = compute(cache, seq)
        np.testing.assert_allclose(got, wanted[:, -got.shape[1] :], atol=2e-5)
    assert loaded(cache) > 0


def test_a_full_host_forgets_the_oldest_and_goes_on(opened: Callable[..., pk.KVCache]) -> None:
    spec = SPECS["windows"]
    cache = opened(spec, 30, 30)
    wanted = {}
    for turn in range(40):
        seed = turn % 20
        with cache.sequence(prompt(seed, 50)) as seq:
            assert sum(seq.hit_tokens.values()) in (0, 48)
            got = compute(cache, seq)
            np.testing.assert_allclose(got, wanted.setdefault(seed, got)[:, -got.shape[1] :], atol=2e-5)
        cache.check_integrity()
    assert cache.placement.stats()["dropped"]["host"] > 0
    everything_down(cache)
    there = [cache.match(prompt(seed, 50))["host"] for seed in range(20)]
    assert there == sorted(there), "the oldest went"
    assert there[0] == 0
    assert there[-1] == 48
    with cache.sequence(prompt(19, 50)) as seq:
        assert seq.hit_tokens["host"] == 48


def test_threads_that_push_each_other_out_read_their_own(opened: Callable[..., pk.KVCache]) -> None:
    spec = pk.KVSpec.of([WINDOW, WINDOW, FULL], dtype="float32", block_size=SIZE)
    cache, problems = opened(spec, 40, 400), []
    wanted = {}
    for seed in range(10):
        with pk.KVCache(spec, pk.Blocks(60)) as one, one.sequence(prompt(seed, 45)) as seq:
            wanted[seed] = compute(one, seq)

    def serve(number: int) -> None:
        try:
            for turn in range(30):
                seed = (number + turn * (number + 1)) % 10
                with cache.sequence(prompt(seed, 45)) as seq:
                    got = compute(cache, seq)
                np.testing.assert_allclose(got, wanted[seed][:, -got.shape[1] :], atol=2e-5)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)  # only tells a hang
        assert not thread.is_alive()
    if problems:
        raise problems[0]
    assert cache.stats().hit_tokens["host"] > 0


def test_a_sequence_is_cut_back_while_its_run_is_on_its_way_down(
    opened: Callable[..., pk.KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, submit = threading.Event(), GroupMover.submit

    def late(mover: GroupMover, moves: Any, **options: Any) -> Any:
        gate.wait(60.0)
        return submit(mover, moves, **options)

    cache = opened(SPECS["chunks"], 40, 100)
    with cache.sequence(prompt(1, 61)) as seq:
        compute(cache, seq)
    monkeypatch.setattr(GroupMover, "submit", late)
    pool = cache.placement.pools[0]
    assert pool is not None
    cache.placement.reserve_pages(np.array([pool.num_obtainable, 0]))  # as another caller that makes room
    with cache.sequence(prompt(1, 61)) as seq:
        assert sum(seq.hit_tokens.values()) == 60
        seq.truncate(24)
        assert seq.num_computed in (0, 24), "a run that moves is not cut"
        gate.set()
        seq.append(7)
        compute(cache, seq)
    cache.check_integrity()


def everything_down(cache: pk.KVCache) -> None:
    pool = cache.placement.pools[0]
    assert pool is not None
    cache.moves.make_room(np.array([pool.num_obtainable, *[0] * (cache.table.num_groups - 1)]))


def test_a_prompt_that_no_tier_below_holds_leaves_the_others_there(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(SPECS["windows"], 150, 30)
    for seed in range(6):
        with cache.sequence(prompt(seed, 25)) as seq:
            compute(cache, seq)
    everything_down(cache)
    with cache.sequence(prompt(99, 900)) as seq:
        compute(cache, seq, 100)
    everything_down(cache)
    hits = [sum(cache.match(prompt(seed, 25)).values()) for seed in range(6)]
    assert hits[-2:] == [24, 24], "regular points of the long one take some room"


def test_a_quota_bounds_what_a_namespace_has_in_the_host(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(SPECS["windows"], 60, 200)
    tenant = pk.Namespace(tenant="a")
    cache.set_quota(tenant, pk.Blocks(20), pk.Tier.HOST)
    for seed in range(8):
        with cache.sequence(prompt(seed, 41), tenant if seed % 2 else None) as seq:
            compute(cache, seq)
    everything_down(cache)
    cache.check_integrity()
    hits = [sum(cache.match(prompt(seed, 41), tenant if seed % 2 else None).values()) for seed in range(8)]
    assert hits[::2] == [40] * 4
    assert hits[1::2] == [0, 0, 40, 40], "two prompts of ten blocks, the last ones"
    cache.set_quota(tenant, pk.Blocks(5), pk.Tier.HOST)
    for seed in range(10, 14):
        with cache.sequence(prompt(seed, 41), tenant) as seq:
            compute(cache, seq)
    everything_down(cache)
    cache.check_integrity()
    assert not any(sum(cache.match(prompt(seed, 41), tenant).values()) for seed in range(10, 14))


def test_a_request_that_finds_a_tail_on_its_way_for_another_waits_for_it(
    opened: Callable[..., pk.KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one gives it up at its deadline."""
    gate, submit, begun = threading.Event(), GroupMover.submit, threading.Event()

    def late(mover: GroupMover, moves: Any, *, deadline_s: float | None = None, **options: Any) -> Any:
        begun.set()
        gate.wait(60.0)
        return submit(mover, moves, deadline_s=None if deadline_s is None else 0.0, **options)

    cache = opened(SPECS["windows"], 60)
    with cache.sequence(prompt(0, 50)) as seq:
        compute(cache, seq)
    pool = cache.placement.pools[0]
    assert pool is not None
    cache.moves.make_room(np.array([pool.num_available + 1, 0]))  # its tail leaves, its spine stays
    monkeypatch.setattr(GroupMover, "submit", late)
    first = cache.load(prompt(0, 50), deadline_s=0.05)
    assert begun.wait(60.0)
    second = cache.begin_load(prompt(0, 50))
    assert not second.match(), "it is not known yet what there is to load"
    gate.set()
    with second.sequence() as seq:
        assert sum(seq.hit_tokens.values()) == 48
    first.cancel()


def test_a_purged_namespace_is_found_in_no_tier(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(SPECS["both"], 40, 200)
    tenant = pk.Namespace(tenant="a")
    for seed in range(6):
        with cache.sequence(prompt(seed, 61), tenant if seed % 2 else None) as seq:
            compute(cache, seq)
    cache.purge(tenant)
    cache.check_integrity()
    for seed in range(6):
        with cache.sequence(prompt(seed, 61), tenant if seed % 2 else None) as seq:
            assert sum(seq.hit_tokens.values()) == (0 if seed % 2 else 60)


def test_a_prefetch_brings_a_tail_along(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(SPECS["windows"])
    for seed in range(NUM_PROMPTS):
        with cache.sequence(prompt(seed, 50)) as seq:
            compute(cache, seq)
    everything_down(cache)
    assert loaded(cache) == 0
    assert cache.prefetch(prompt(0, 50)).wait() == 48
    assert loaded(cache) > 0
    with cache.sequence(prompt(0, 50)) as seq:
        assert seq.hit_tokens["device"] == 48


def test_a_sequence_that_finds_no_room_says_so_and_leaves_nothing(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(SPECS["windows"], 30, 60)
    with cache.sequence(prompt(1, 50)) as seq:
        compute(cache, seq)
        with pytest.raises(pk.OutOfBlocks, match="device"), cache.sequence(prompt(2, 500)) as other:
            compute(cache, other, 500)
        cache.check_integrity()
    with cache.sequence(prompt(1, 50)) as seq:
        assert sum(seq.hit_tokens.values()) == 48


def test_a_host_that_is_too_small_is_refused() -> None:
    with pytest.raises(pk.InvalidArgument, match="give the host"):
        pk.KVCache(SPECS["windows"], pk.Blocks(50), pk.Blocks(1), by_group=True)

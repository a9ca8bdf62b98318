"""The last, partly filled blocks of sequences: kept, written, found again, copied from."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest

import pagedkv as pk
from tests.held_storage import held_cache
from tests.slices import one_in

from .conftest import BLOCK, SPEC, Toy, prompt

A, B = pk.Namespace(tenant="a"), pk.Namespace(tenant="b")
LIMIT_S = 60  # only a hang reaches it
SHORT = prompt(1, BLOCK + 2)  # a whole block, and two tokens
LONGER = [*SHORT, 7, 8]


@pytest.fixture
def opened(open_cache, tmp_path):
    """Opens toys over one disk: ``opened(device, host=, write=, ...)``."""

    def open_it(device: int = 8, *, host: int | None = None, write: str = "all", **options: Any) -> Toy:
        disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(100), write=write, admission="all")
        return Toy(open_cache(device, host=host, disk=disk, **options))

    return open_it


def settled(cache: pk.KVCache) -> None:
    """Wait until nothing is to be copied, or on its way."""
    until = time.monotonic() + LIMIT_S
    while (counts := cache.stats().placement)["wanted"] or counts["in_flight"]:
        assert time.monotonic() < until, counts
        time.sleep(0.001)


def on_disk(toy: Toy) -> int:
    settled(toy.cache)
    return int(toy.cache.stats().blocks["disk"]["cached"])


def fill_device(toy: Toy, start: int = 50) -> None:
    """Evict everything that is cached."""
    toy.use(prompt(start, toy.cache.stats().blocks["device"]["max"] * BLOCK))


@pytest.mark.parametrize("host", [None, 3])
@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_it_is_found_after_a_restart_and_its_bytes_are_right(opened, host, num_blocks):
    tokens = prompt(1, num_blocks * BLOCK + 3)
    first = opened(host=host)
    first.use(tokens)
    first.cache.close()
    again = opened(host=host)
    found = {"disk": num_blocks * BLOCK, "partial": 3} if num_blocks else {"partial": 3}
    assert again.use([*tokens, 7]) == found
    whole = {"device": num_blocks * BLOCK} if num_blocks else {}
    assert again.use([*tokens[:-1], 9, 9]) == {**whole, "partial": 2}


def test_it_comes_back_from_the_host(opened):
    toy = opened(host=40)
    toy.use(SHORT)
    fill_device(toy)
    assert toy.use(LONGER) == {"host": BLOCK, "partial": 2}


def test_a_prefetch_brings_it(opened):
    toy = opened(host=40)
    toy.use(SHORT)
    fill_device(toy)
    toy.cache.prefetch(LONGER).wait(LIMIT_S)
    assert toy.use(LONGER) == {"device": BLOCK, "partial": 2}


@pytest.mark.parametrize(("write", "at_release", "used_again", "evicted"), [
    ("all", 2, 2, 2), ("reused", 0, 2, 2), ("evicted", 0, 0, 2),
])  # fmt: skip
def test_it_is_written_by_the_rule_of_the_disk(opened, write, at_release, used_again, evicted):
    toy = opened(write=write)
    toy.use(SHORT)
    assert on_disk(toy) == at_release
    seq = toy.cache.sequence([*SHORT[:-1], 9, 9])  # copies from it, and replaces nothing
    assert seq.hit_tokens["partial"] == 1
    seq.release()
    assert on_disk(toy) == used_again
    toy.use(prompt(60, 8 * BLOCK))
    settled(toy.cache)
    assert toy.cache.explain(LONGER).partial_tokens == 2
    assert sum(len(run.block_ids) for run in toy.cache.explain(SHORT).runs if run.tier == pk.Tier.DISK) + 1 == evicted


def test_a_longer_block_gives_its_slot_back(opened):
    toy = opened()
    toy.use(SHORT)
    assert on_disk(toy) == 2
    toy.use(prompt(1, 2 * BLOCK))
    assert on_disk(toy) == 2, "two whole blocks"
    assert toy.cache.explain([*SHORT, 7]).partial_tokens == 2


@pytest.mark.parametrize("options", [{"partial_hits": False}, {"write": "never"}, {"disk": None}])
def test_nothing_is_kept_where_it_is_of_no_use(opened, open_cache, options):
    toy = Toy(open_cache(8, **options)) if "disk" in options else opened(**options)
    toy.use(SHORT)
    assert toy.cache.stats().blocks["device"]["cached"] == 1
    assert toy.use(LONGER) == {"device": BLOCK}


def test_another_namespace_finds_nothing_and_a_purge_leaves_nothing(opened):
    first = opened()
    first.use(SHORT, A)
    assert first.use(LONGER, B) == {}
    first.cache.purge(A)
    assert first.use(LONGER, A) == {}
    first.cache.purge(A)
    first.cache.close()
    assert opened().use(LONGER, A) == {}


def test_a_sequence_that_dies_without_its_release_keeps_nothing(opened):
    toy = opened()
    seq = toy.cache.sequence(SHORT)
    toy.run(seq)
    del seq  # perhaps a call was interrupted that was to write its last tokens
    gc.collect()
    assert toy.cache.stats().blocks["device"]["cached"] == 1
    assert toy.use(LONGER) == {"device": BLOCK}


def test_a_load_beside_other_work_brings_it_and_one_that_is_late_does_without():
    for late in (False, True):
        with held_cache(SPEC, device=8, host=40) as (cache, storage):
            cache._engine.keeps_remainders = True  # as over a disk
            toy = Toy(cache)
            storage.by_itself = True
            toy.use(SHORT)
            toy.use(prompt(50, 8 * BLOCK))
            storage.by_itself, storage.read = False, 0
            load = cache.load(LONGER, deadline_s=1.0)
            assert (load.num_cold, load.num_beside, load.done()) == (2, 1, False)
            if late:
                storage.turn(10.0)
                assert load.done()
            else:
                storage.arrive()
            with load.sequence() as seq:
                toy.check(seq)
                assert seq.hit_tokens["partial"] == (0 if late else 2)
                assert seq.num_computed == (0 if late else BLOCK + 2)
            storage.arrive()
            while cache.moves.run_moves():
                pass
            cache.check_integrity()


def test_a_load_lets_nothing_of_it_go_before_it_is_copied(opened):
    toy = opened(host=40)
    toy.use(SHORT)
    fill_device(toy)
    load = toy.cache.load(LONGER)
    load.wait(LIMIT_S)
    held = toy.cache.sequence(prompt(70, 5 * BLOCK))
    toy.run(held)
    with pytest.raises(pk.OutOfBlocks):
        toy.cache.moves.make_room(2)  # evicts all that is not held: a block for the copy is left
    with load.sequence() as seq:
        toy.check(seq)
        assert seq.hit_tokens["partial"] == 2
    held.release()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("tokens", "whole"), [(LONGER, BLOCK), (prompt(1, 4), 0)])
def test_without_room_for_it_a_load_brings_the_prefix_alone(opened, tokens, whole, waits):
    toy = opened(host=40)
    toy.use(tokens[:-2])
    fill_device(toy)
    held = [toy.cache.sequence(prompt(50 + i, n * BLOCK)) for i, n in enumerate([4, 4 - whole // BLOCK])]
    toy.run(*held)  # no block is left but those of the prefix
    load = toy.cache.load(tokens)
    if not waits:
        while not load.done():
            time.sleep(0.001)
    assert load.wait(LIMIT_S) == whole
    assert (load.error, load.num_beside) == (None, 0)
    for seq in held:
        seq.release()
    with load.sequence() as seq:
        toy.check(seq)
        assert seq.num_computed == whole


def test_a_prefetch_without_room_for_it_brings_the_prefix_alone(opened):
    toy = opened(host=40)
    toy.use(SHORT)
    fill_device(toy)
    with toy.cache.sequence(prompt(50, 7 * BLOCK)) as held:
        toy.run(held)
        assert toy.cache.prefetch(LONGER).wait(LIMIT_S) == BLOCK


@pytest.mark.parametrize("loading_share", [0.0, 0.5])
def test_a_request_that_takes_the_whole_device_is_served_though_one_lies_below(opened, loading_share):
    device = 4
    toy = opened(device, host=40)
    tokens = prompt(1, device * BLOCK - 1)
    toy.use(tokens)
    fill_device(toy)
    options = pk.SchedulerOptions(max_running=1, max_batch_tokens=64, watermark=0.0, loading_share=loading_share)
    scheduler = pk.Scheduler(toy.cache, options)
    request = scheduler.submit([*tokens, 7], 1)
    for _ in range(100):
        if request.ended:
            break
        plan = scheduler.schedule()
        if not plan:
            scheduler.wait()
            continue
        with scheduler.step(plan) as step:
            toy.check(*plan.sequences)
            toy.write(step, *plan.sequences)
        scheduler.report(plan, [5] * len(plan.lanes))
    assert request.state == "finished"
    assert request.hit_tokens["host"] == (device - 1) * BLOCK


def test_what_loads_slower_than_it_computes_stays_where_it_is(opened):
    toy = opened(host=40, prefill_tokens_per_s=1e9)
    toy.use(prompt(1, 2))  # no whole block: only a remainder
    fill_device(toy)
    toy.cache.costs.observe_load(1, SPEC.block_bytes, 1.0)
    assert toy.use(prompt(1, 4)) == {}


def test_a_scheduler_serves_it_to_requests_that_come_again(opened):
    toy = opened(host=40)
    for device in (8, 8):
        scheduler = pk.Scheduler(toy.cache, pk.SchedulerOptions(max_running=2, max_batch_tokens=64))
        request = scheduler.submit([*SHORT, 7], 1)
        while not request.ended:
            plan = scheduler.schedule()
            if not plan:
                scheduler.wait()
                continue
            with scheduler.step(plan) as step:
                seqs = list(plan.sequences)
                toy.check(*seqs)
                toy.write(step, *seqs)
            scheduler.report(plan, [5] * len(plan.lanes))
        hits = {name: count for name, count in request.hit_tokens.items() if count}
        toy.use(prompt(50, device * BLOCK))
    assert hits == {"host": BLOCK, "partial": 2}


@pytest.mark.parametrize("seed", one_in(3, range(6)))
def test_random_chats_over_restarts_get_the_bytes_of_their_prefixes(opened, seed):
    r = random.Random(seed)
    chats: dict[int, list[int]] = {}
    partial = 0
    for _ in range(4):
        toy = opened(r.choice([8, 12]), host=r.choice([None, 4, 30]), write=r.choice(["all", "reused", "evicted"]))
        for _ in range(60):
            chat = chats.setdefault(r.randrange(12), [r.randrange(3) for _ in range(r.randrange(1, 2 * BLOCK))])
            if len(chat) > 5 * BLOCK:
                del chat[r.randrange(1, len(chat)) :]
            chat += [r.randrange(3) for _ in range(r.randrange(1, BLOCK))]
            partial += toy.use(chat, r.choice([A, A, B])).get("partial", 0)
        toy.cache.check_integrity()
        toy.cache.close()
    assert partial

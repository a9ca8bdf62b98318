"""Loads bring prefixes to the device beside other work, and come to what sequences come to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache.load import Load
from pagedkv.observe.hooks import Span
from tests.held_storage import HeldStorage, held_cache

from .conftest import BLOCK, SPEC, Toy, prompt

WHOLE = 3  # blocks of a prompt that are kept
EACH = 10.0  # seconds until a load is given up


@pytest.fixture
def held() -> Iterator[tuple[Toy, HeldStorage]]:
    """8 blocks over 40 of a slow tier, a block a transfer; prompt 1 lies on the slow one."""
    with held_cache(SPEC, run=1, device=8, host=40) as (cache, storage):
        toy = Toy(cache)
        storage.by_itself = True
        toy.use(prompt(1))
        toy.use(prompt(2, 8 * BLOCK))
        storage.by_itself = False
        assert cache.match(prompt(1)) == {"device": 0, "host": WHOLE * BLOCK}
        yield toy, storage


def served(toy: Toy, load: Load) -> dict[str, int]:
    """Open a load's sequence, compare its blocks, compute the rest; its hits by tier."""
    with load.sequence() as seq:
        toy.check(seq)
        toy.run(seq)
        toy.check(seq)
        return {tier: count for tier, count in seq.hit_tokens.items() if count}


def test_a_load_begins_and_looks_without_waiting_and_arrives(held):
    toy, storage = held
    load = toy.cache.load(prompt(1))
    assert not load.done()
    assert (load.num_cold, storage.read) == (WHOLE, WHOLE)
    storage.arrive(WHOLE - 1)
    assert not load.done()
    storage.arrive()
    assert load.done()
    assert load.wait() == WHOLE * BLOCK
    assert served(toy, load) == {"host": WHOLE * BLOCK}
    assert toy.cache.stats().hit_tokens["host"] == WHOLE * BLOCK


def test_a_load_with_nothing_cold_is_over_at_once_and_takes_the_core_no_oftener_than_a_sequence(held):
    toy, storage = held
    toy.use(prompt(3))
    core = toy.cache.placement
    before = core.num_locked
    load = toy.cache.load(prompt(3))
    assert load.done()
    seq = load.sequence()
    assert core.num_locked - before <= 4
    assert seq.hit_tokens["device"] == WHOLE * BLOCK
    seq.release()
    assert not storage.read


def test_a_prefix_that_is_loaded_for_another_is_waited_for_and_read_once(held):
    toy, storage = held
    loads = [toy.cache.load(prompt(1)) for _ in range(3)]
    storage.arrive(1)
    assert not any(load.done() for load in loads)
    storage.arrive()
    assert all(load.done() for load in loads)
    assert storage.read == WHOLE
    assert [sum(served(toy, load).values()) for load in loads] == [WHOLE * BLOCK] * 3


def test_what_a_load_holds_is_not_evicted_for_others(held):
    toy, storage = held
    load = toy.cache.load(prompt(1))
    storage.arrive()
    assert load.done()
    with toy.cache.sequence(prompt(4, 5 * BLOCK)) as seq:
        toy.run(seq)
    with pytest.raises(pk.OutOfBlocks), toy.cache.sequence(prompt(5, 6 * BLOCK)) as seq:
        toy.run(seq)
    assert sum(served(toy, load).values()) == WHOLE * BLOCK


@pytest.mark.parametrize("k", range(WHOLE + 1))
def test_late_at_a_block_keeps_what_came_before_it_and_computes_the_rest(held, k):
    toy, storage = held
    load = toy.cache.load(prompt(1), deadline_s=EACH)
    storage.arrive(k)
    storage.turn(EACH)
    assert load.done()
    assert load.wait() == k * BLOCK
    assert served(toy, load) == ({"host": k * BLOCK} if k else {})
    stats = toy.cache.stats()
    assert (stats.missed_promotions, stats.placement["late_promotions"]) == (WHOLE - k, WHOLE - k)
    assert storage.read == WHOLE


@pytest.mark.parametrize("k", range(WHOLE))
def test_a_block_that_cannot_be_read_ends_what_is_kept(held, k):
    toy, storage = held
    load = toy.cache.load(prompt(1))
    storage.arrive(k)
    storage.arrive(1, ok=False)
    assert load.done() == (k == WHOLE - 1)
    storage.arrive()
    assert load.done()
    assert served(toy, load) == ({"host": k * BLOCK} if k else {})
    assert toy.cache.match(prompt(1))["device"] == WHOLE * BLOCK, "computed and committed"


@pytest.mark.parametrize("k", range(WHOLE))
def test_a_tier_that_hangs_beyond_every_deadline_holds_no_load(held, k):
    toy, storage = held
    storage.keeps_deadlines = False
    load = toy.cache.load(prompt(1), deadline_s=EACH)
    storage.arrive(k)
    storage.turn(EACH)
    assert not load.done(), "what carries the moves out gives them up, as a rule"
    storage.turn(1.0)
    assert load.done()
    assert served(toy, load) == {}, "of a ticket that is not settled nothing is known"
    assert toy.cache.stats().missed_promotions == WHOLE


@pytest.mark.parametrize("event", range(WHOLE + 2))
def test_a_load_that_is_cancelled_leaves_nothing_behind_and_what_came_is_cached(held, event):
    toy, storage = held
    free = toy.cache.stats().blocks["device"]["available"]
    load = toy.cache.load(prompt(1))
    storage.arrive(min(event, WHOLE))
    if event > WHOLE:
        assert load.done()
    load.cancel()
    load.cancel()
    assert load.done()
    with pytest.raises(pk.InvalidArgument, match="cancelled"):
        load.sequence()
    storage.arrive()
    while toy.cache.moves.run_moves():
        pass
    assert toy.cache.match(prompt(1)) == {"device": WHOLE * BLOCK, "host": 0}
    counts = toy.cache.stats().blocks["device"]
    assert counts["live"] == 0
    assert counts["available"] + counts["cached"] >= free


def test_a_load_without_room_says_so_and_holds_nothing(held):
    toy, storage = held
    with toy.cache.sequence(prompt(6, 7 * BLOCK)) as seq:
        toy.run(seq)
        load = toy.cache.load(prompt(1))
        assert load.done()
        with pytest.raises(pk.OutOfBlocks):
            load.sequence()
        with pytest.raises(pk.OutOfBlocks):
            load.wait()
    assert not storage.read
    assert toy.use(prompt(7)) == {}


def test_waiting_with_a_limit_is_given_up_and_the_load_goes_on(held, monkeypatch):
    toy, storage = held
    load = toy.cache.load(prompt(1))
    monkeypatch.setattr(toy.cache.moves, "wait_since", lambda seen, timeout_s=None: storage.turn(0.5) or True)
    with pytest.raises(TimeoutError, match=r"longer than 2\.0 s"):
        load.wait(2.0)
    assert storage.now == 1002.0
    storage.arrive()
    assert load.wait(2.0) == WHOLE * BLOCK
    load.cancel()


def test_a_wait_beyond_the_deadline_looks_again_when_the_load_is_given_up(held, monkeypatch):
    toy, storage = held
    storage.keeps_deadlines = False
    load = toy.cache.load(prompt(1), deadline_s=EACH)
    waits = []

    def wait_since(seen, timeout_s):
        waits.append(timeout_s)
        assert len(waits) < 3
        storage.turn(timeout_s)
        return True

    monkeypatch.setattr(toy.cache.moves, "wait_since", wait_since)
    assert load.wait(60.0) == 0
    assert waits == [EACH, 1.0]
    load.cancel()


@pytest.mark.parametrize("deadline_s", [1.0, 60.0])
def test_callers_wait_for_the_blocks_of_a_late_read_however_long_its_deadline_was(held, deadline_s):
    toy, storage = held
    storage.leaves_late = True
    load = toy.cache.load(prompt(1), deadline_s=deadline_s)
    (ticket,) = storage.tickets
    ticket.seconds = deadline_s
    storage.turn(deadline_s)
    assert load.wait() == 0
    load.cancel()
    moves = toy.cache.moves
    assert moves.num_unowned == WHOLE
    seen = moves.num_ended
    ticket.come_back()
    assert moves.wait_since(seen)
    assert moves.num_unowned == 0
    toy.use(prompt(6, 7 * BLOCK))


def test_a_sequence_and_a_load_come_to_the_same(held):
    toy, storage = held
    storage.by_itself = True
    assert toy.use(prompt(1)) == {"host": WHOLE * BLOCK}
    toy.use(prompt(2, 8 * BLOCK))
    before = storage.read
    load = toy.cache.load(np.array(prompt(1), np.int32))
    assert served(toy, load) == {"host": WHOLE * BLOCK}
    assert storage.read == before + WHOLE


def test_a_load_whose_namespace_is_purged_goes_on_and_is_not_found_again(held):
    toy, storage = held
    load = toy.cache.load(prompt(1))
    storage.arrive(1)
    load.done()
    storage.by_itself = True
    toy.cache._roots.drop(toy.cache._digest(None))
    storage.arrive()
    while toy.cache.moves.run_moves():
        pass
    assert served(toy, load) in ({"host": WHOLE * BLOCK}, {"host": BLOCK}, {})
    assert toy.cache.match(prompt(1)) == {"device": 0, "host": 0}


@pytest.mark.parametrize("bad", [-1, float("nan"), "soon", True])
def test_a_deadline_that_is_none_is_refused(held, bad):
    toy, _ = held
    with pytest.raises((pk.InvalidArgument, pk.WrongType), match="deadline_s"):
        toy.cache.load(prompt(1), deadline_s=bad)
    assert not toy.cache.stats().placement["owners"]


def test_the_time_of_a_load_is_a_promotions_and_that_of_its_match_a_matchs(held):
    toy, storage = held
    before = toy.cache.stats().latency
    load = toy.cache.load(prompt(1))
    storage.turn(3.0)
    storage.arrive()
    assert load.done()
    after = toy.cache.stats().latency
    assert [after[name].count - before[name].count for name in ("match", "promotion")] == [1, 1]
    assert [after[name].total_s - before[name].total_s for name in ("match", "promotion")] == [0.0, 3.0]
    load.cancel()
    assert toy.cache.stats().latency == after, "a load that is let go of is not timed again"


def test_what_a_load_does_carries_its_trace(held):
    toy, storage = held
    told: list[tuple[str, tuple[object, ...]]] = []

    class Spans:
        def begin(self, span: Span) -> None:
            told.append((span.name, span.traces))

        def end(self, span: Span, state: object) -> None:
            pass

    toy.cache.hooks.add(Spans())
    load = toy.cache.load(prompt(1), trace="mine")
    storage.arrive()
    assert load.done()
    load.sequence().release()
    assert {name for name, _ in told} >= {"match", "moves", "sequence", "request", "release"}
    assert {traces for _, traces in told} == {("mine",)}


@pytest.mark.parametrize("timeout_s", ["x", True, float("nan"), -1.0, 10**400])
def test_a_bad_timeout_is_refused_and_the_load_goes_on(open_cache, timeout_s):
    load = open_cache(8, host=40).load(prompt(1))
    with pytest.raises((pk.WrongType, pk.InvalidArgument), match="timeout_s"):
        load.wait(timeout_s)
    assert load.wait(0.0) == 0

"""A cache with the policy hazard.

What it counts as a request, when it learns, and whose tables it asks.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache.learned import MAX_KINDS
from pagedkv.core import requests_of
from tests.cache.oddities import NUMBERS, ODDITIES, attempt

from .conftest import BLOCK, SPEC, Toy, all_free, prompt
from .test_cost_model import Clock

AGENTS, PEOPLE = pk.Namespace(tenant="agents"), pk.Namespace(tenant="people")
NEW_KINDS = [f"kind-{i}" for i in range(MAX_KINDS - 1)]  # beside the one that is there


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_toy(open_cache, clock):
    """Caches with the policy hazard and a clock that stands still until told."""

    def open_it(device=64, **options):
        return Toy(open_cache(device, policy="hazard", clock=clock, **options))

    return open_it


@pytest.fixture
def toy(open_toy):
    return open_toy()


def counted(toy: Toy, name: str) -> int:
    return toy.cache.stats().hazard[name]


def teach(toy: Toy, clock: Clock, rounds: int = 40, output: int = 0, namespace: pk.Namespace | None = None) -> None:
    """Prompts that come again every ten seconds, among others that never do."""
    for i in range(rounds):
        for start in (1, 2, 1000 + i):
            clock.now += 10 / 3
            with toy.cache.sequence(prompt(start), namespace) as seq:
                toy.run(seq)
                seq.append(np.arange(output, dtype=np.int32))


# ---- what is a request


def test_a_request_arrives_once_and_what_it_computed_is_remembered(toy):
    toy.use(prompt(1))
    assert (counted(toy, "hits"), counted(toy, "remembered_blocks")) == (0, 3)
    toy.use(prompt(1))
    assert (counted(toy, "hits"), counted(toy, "lru_hits"), counted(toy, "remembered_blocks")) == (3, 3, 3)


@pytest.mark.parametrize("length", [3 * BLOCK, 3 * BLOCK + 1])
def test_a_block_that_no_request_could_have_is_no_hit_of_lru_either(toy, length):
    for _ in range(5):
        toy.use(prompt(1, length))
    assert counted(toy, "hits") == counted(toy, "lru_hits") == 4 * ((length - 1) // BLOCK)


def test_what_was_not_worth_its_loading_is_a_hit_for_both(open_toy, clock, tmp_path):
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(60), admission="all")
    toy = open_toy(8, disk=disk, prefill_tokens_per_s=1e9)
    for i in range(40):
        clock.now += 5
        toy.use(prompt(i % 4))
    assert toy.cache.stats().disk["disk_hits_declined"] > 50
    assert counted(toy, "hits") == counted(toy, "lru_hits") == 36 * 3


def test_a_trial_is_a_request_when_it_is_kept_and_only_then(toy):
    toy.use(prompt(1))
    toy.cache.sequence(prompt(1), on_trial=True).release()
    assert counted(toy, "hits") == 0
    with toy.cache.sequence(prompt(1), on_trial=True) as seq:
        toy.cache.count(seq)
        assert counted(toy, "hits") == 3
        toy.run(seq)
    assert counted(toy, "hits") == 3


def test_looking_pinning_and_prefetching_are_no_requests(open_toy):
    toy = open_toy(8, host=16, pin_budget=8)
    for start in (1, 2, 3):
        toy.use(prompt(start))
    before = toy.cache.stats().hazard
    toy.cache.explain(prompt(1))
    assert toy.cache.prefetch(prompt(1)).wait(60) == 3 * BLOCK
    toy.cache.pin(prompt(2)).release()
    after = toy.cache.stats().hazard
    assert (after["hits"], after["remembered_blocks"]) == (before["hits"], before["remembered_blocks"]) == (0, 9)


def test_a_request_that_finds_no_room_has_not_come(open_toy):
    toy = open_toy(4, host=16)
    toy.use(prompt(1))
    with toy.cache.sequence(prompt(2)) as seq:
        toy.run(seq)
        with pytest.raises(pk.OutOfBlocks):
            toy.cache.sequence(prompt(1))
    assert counted(toy, "hits") == 0
    assert toy.use(prompt(1)) == {"host": 3 * BLOCK}
    assert counted(toy, "hits") == 3


def test_a_sequence_for_which_nothing_was_computed_leaves_nothing_behind(toy):
    toy.use(prompt(1))
    before = counted(toy, "remembered_blocks")
    for _ in range(3):
        toy.cache.sequence(prompt(1)).release()
        with toy.cache.sequence(prompt(2)) as seq, pytest.raises(ZeroDivisionError), toy.cache.step([seq]):
            raise ZeroDivisionError
    assert counted(toy, "remembered_blocks") == before


def test_forks_are_one_request_which_is_over_with_the_last_of_them(toy):
    seq = toy.cache.sequence(prompt(1))
    toy.run(seq)
    one, two = seq.fork(2)
    seq.release()
    assert counted(toy, "remembered_blocks") == 0
    for fork, token in ((one, 5), (two, 6)):
        fork.append(np.full(2 * BLOCK, token))
        toy.run(fork)
    two.release()
    assert counted(toy, "remembered_blocks") == 0
    one.release()
    assert counted(toy, "remembered_blocks") == 5
    assert toy.use([*prompt(1), *[5] * 2 * BLOCK]) == {"device": 5 * BLOCK}
    assert all_free(toy.cache)


def test_a_request_whose_fork_goes_on_is_not_over_when_its_row_departs(toy):
    seq = toy.cache.sequence(prompt(1))
    toy.run(seq)
    (fork,) = seq.fork()
    assert requests_of(toy.cache.table).depart(seq.row) == -1
    seq.release()
    fork.append(np.full(2 * BLOCK, 5))
    toy.run(fork)
    assert counted(toy, "remembered_blocks") == 0
    assert requests_of(toy.cache.table).depart(fork.row) >= 0
    fork.release()
    assert counted(toy, "remembered_blocks") == 5


def test_an_exported_view_is_part_of_the_request(toy):
    seq = toy.cache.sequence(prompt(1))
    toy.run(seq)
    views = seq.export_blocks()
    seq.release()
    assert counted(toy, "remembered_blocks") == 0
    del views
    assert counted(toy, "remembered_blocks") == 3


def test_a_row_says_that_its_output_is_told_later(toy):
    with toy.cache.sequence(prompt(1)) as seq:
        toy.run(seq)
        visit = requests_of(toy.cache.table).depart(seq.row)
        assert requests_of(toy.cache.table).depart(seq.row) == -1
    toy.cache.placement.hazard.report(visit, 100)
    with pytest.raises(pk.StaleHandle):
        toy.cache.placement.hazard.report(visit, 100)
    with pytest.raises(pk.StaleHandle):
        requests_of(toy.cache.table).depart(12345)
    with pytest.raises(pk.StaleHandle):
        requests_of(toy.cache.table).arrive(12345)


def test_what_was_appended_to_the_prompt_is_what_a_request_generated(open_cache):
    def tables(output, *, told):
        clock = Clock()
        toy = Toy(open_cache(64, policy="hazard", clock=clock))
        if told:
            teach(toy, clock, output=output)
        else:
            for i in range(40):
                for start in (1, 2, 1000 + i):
                    clock.now += 10 / 3
                    with toy.cache.sequence(prompt(start)) as seq:
                        toy.run(seq)
                        visit = requests_of(toy.cache.table).depart(seq.row)
                        toy.cache.placement.hazard.report(visit, output)
        return toy.cache.placement.hazard.tables()

    assert np.array_equal(tables(50, told=True), tables(50, told=False))
    assert not np.array_equal(tables(50, told=True), tables(0, told=True))


# ---- when it learns


def test_it_learns_when_requests_end_by_the_caches_clock_and_a_little_at_a_time(toy, clock):
    learned = 0
    for i in range(200):
        toy.use(prompt(i % 3))
        clock.now += 7
        now = counted(toy, "learned")
        assert now - learned <= 64, "by default"
        learned = now
    assert learned > 50
    assert counted(toy, "samples_lost") == counted(toy, "clock_steps_back") == 0


def test_it_learns_the_same_when_hooks_watch(open_cache):
    class Watching:
        def begin(self, span):
            return None

        def end(self, span, state):
            pass

    found = []
    for hook in (None, Watching()):
        clock = Clock()
        toy = Toy(open_cache(16, host=16, policy="hazard", clock=clock))
        if hook is not None:
            toy.cache.hooks.add(hook)
        teach(toy, clock)
        found.append((toy.cache.stats().hazard, toy.cache.placement.hazard.tables().tolist()))
    assert found[0] == found[1]
    assert found[0][0]["learned"] > 0


@pytest.mark.parametrize("now", [1e11, float("nan"), float("inf"), None, "noon"])
def test_a_clock_that_tells_no_time_fails_nobody_and_is_counted(toy, clock, now, caplog):
    seq = toy.cache.sequence(prompt(1))
    toy.run(seq)
    clock.now = now
    seq.release()
    assert counted(toy, "clock_failures") == 1
    clock.now = 1e6
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}
    assert len([record for record in caplog.records if "clock fails" in record.message]) == 1
    assert toy.cache.table.num_rows == 0
    assert all_free(toy.cache)


def test_a_clock_that_goes_back_is_counted_and_harmless(toy, clock):
    toy.use(prompt(1))
    clock.now -= 50
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}
    assert counted(toy, "clock_steps_back") > 0


def test_times_to_live_go_by_the_caches_clock(toy, clock):
    with toy.cache.sequence(prompt(1)) as seq:
        toy.run(seq)
        seq.retain(ttl_s=30)
    clock.now += 29
    toy.use(prompt(2))
    assert toy.cache.stats().placement["expired"] == 0
    clock.now += 2
    toy.use(prompt(2))
    assert toy.cache.stats().placement["expired"] == 3


def test_it_learns_which_prefixes_come_again_and_keeps_them(open_cache):
    hits = {}
    for policy in ("lru", "hazard"):
        clock = Clock()
        toy = Toy(open_cache(20, policy=policy, clock=clock))
        for i in range(400):  # two that come again, and between their uses more new ones than there is room for
            for start in (1, 2, *(1000 + 6 * i + j for j in range(6))):
                clock.now += 2.0
                toy.use(prompt(start))
        hits[policy] = toy.cache.stats().hit_tokens["device"]
    assert hits["hazard"] > 4 * hits["lru"] + 1000


# ---- kinds of namespaces


def test_each_kind_has_tables_of_its_own(toy, clock):
    toy.cache.set_kind(AGENTS, "agents")
    policy = toy.cache.placement.hazard
    teach(toy, clock, namespace=AGENTS)
    assert policy.tables(1) is not None
    assert policy.tables(0) is None
    teach(toy, clock)
    assert not np.array_equal(policy.tables(0), policy.tables(1))


def test_a_kind_holds_after_a_purge_and_default_takes_it_back(toy, clock):
    toy.cache.set_kind(AGENTS, "agents")
    toy.cache.purge(AGENTS)
    teach(toy, clock, namespace=AGENTS)
    policy = toy.cache.placement.hazard
    assert policy.tables(0) is None
    toy.cache.set_kind(AGENTS)
    toy.cache.purge(AGENTS)
    clock.now += 1e7
    policy.study(10_000)  # what is still open of the time before
    before = policy.tables(1).tolist()
    teach(toy, clock, namespace=AGENTS)
    assert policy.tables(0) is not None
    assert policy.tables(1).tolist() == before


def test_more_kinds_than_there_are_tables_are_refused_by_name(toy):
    for name in NEW_KINDS:
        toy.cache.set_kind(AGENTS, name)
    toy.cache.set_kind(PEOPLE, NEW_KINDS[0])
    with pytest.raises(pk.InvalidArgument, match="'another' would be one kind too many: there are 8 already, default,"):
        toy.cache.set_kind(AGENTS, "another")
    toy.cache.set_kind(AGENTS, "default")


@pytest.mark.parametrize("name", ["", "Agents", "a/b", "..", "-a", "ä", "a" * 41, "a.b", "a\n"])
def test_a_kind_that_is_no_name_is_refused(toy, name):
    with pytest.raises(pk.InvalidArgument, match="a kind is 1 to 40 of"):
        toy.cache.set_kind(AGENTS, name)
    for other in NEW_KINDS:
        toy.cache.set_kind(AGENTS, other)


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_other_policies_say_that_it_is_not_for_them(open_cache, policy, tmp_path):
    cache = open_cache(8, policy=policy)
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(8), admission="hazard")
    for call in (
        lambda: cache.set_kind(AGENTS, "agents"), cache.save_learned, lambda: cache.prefetch_likely(1.0, 4),
        lambda: pk.KVCache(SPEC, pk.Blocks(8), policy=policy, disk=disk),
    ):  # fmt: skip
        with pytest.raises(pk.InvalidArgument, match=f"policy='?hazard'?.*policy '{policy}'"):
            call()
    assert cache.stats().hazard is None
    assert not (tmp_path / "kv").exists()


def test_odd_arguments_are_refused_and_change_nothing(open_toy, clock):
    toy = open_toy(16, host=16)
    teach(toy, clock, rounds=5)
    for odd in NUMBERS + ODDITIES:
        attempt(toy.cache.set_kind, odd, "agents")
        attempt(toy.cache.set_kind, AGENTS, odd)
        attempt(toy.cache.prefetch_likely, odd, 4)
        attempt(toy.cache.prefetch_likely, 1.0, odd)
        made = attempt(lambda: pk.KVCache(SPEC, pk.Blocks(4), policy="hazard", clock=odd))  # noqa: B023
        if made is not None:
            made.close()
    toy.cache.check_integrity()
    toy.use(prompt(1))


def test_a_closed_cache_says_so(toy):
    toy.cache.close()
    for call in (toy.cache.save_learned, lambda: toy.cache.prefetch_likely(1.0, 4)):
        with pytest.raises(pk.ClosedError):
            call()
    with pytest.raises(pk.ClosedError):
        toy.cache.set_kind(AGENTS, "agents")


def test_options_of_the_policy_reach_its_bound(open_cache):
    rooms = []
    for policy in (pk.Hazard(stake=0, slack=0), "hazard", pk.Hazard(slack=math.inf)):
        cache = open_cache(16, policy=policy)
        for number in range(3):
            Toy(cache).use(prompt(number))
        assert cache.placement.policy == "hazard"
        rooms.append(cache.placement.hazard.stats()["room"])
    assert rooms[0] <= rooms[1] < rooms[2]
    assert (rooms[0], rooms[2] > 1e6) == (0, True)


@pytest.mark.parametrize("option", ["stake", "slack"])
@pytest.mark.parametrize("value", [-1, math.nan, "1", True, None, [1]])
def test_options_of_the_policy_that_make_no_sense_are_refused(option, value):
    with pytest.raises((pk.WrongType, pk.InvalidArgument), match=option):
        pk.Hazard(**{option: value})
    with pytest.raises((pk.WrongType, pk.InvalidArgument), match="window"):
        pk.Hazard(window=99 if value == -1 else value)

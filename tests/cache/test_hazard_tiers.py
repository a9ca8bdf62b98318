"""Which blocks the policy hazard admits to the disk, and which it promotes unasked."""

from __future__ import annotations

import random
import threading

import pytest

import pagedkv as pk
from pagedkv.cache.admission import BURST_S, DAY_S, Admission, Likeliest, Turnover, WriteBudget
from pagedkv.cache.cost_model import CostModel

from .conftest import BLOCK, SPEC, Toy, all_free, prompt, where
from .test_cost_model import Clock
from .test_hazard import teach

DISK = 2
TIMEOUT_S = 60


@pytest.fixture
def clock():
    return Clock()


# ---- how long a block lives


def test_before_anything_is_written_a_block_lives_a_day(clock):
    lives = Turnover(100, clock)
    assert lives.lifetime_s() == DAY_S
    lives.add(3)
    assert lives.lifetime_s() == DAY_S, "no time has passed"


def test_a_block_lives_as_long_as_the_tier_takes_to_be_written_once(clock):
    lives = Turnover(100, clock)
    for _ in range(1000):
        clock.now += 2
        lives.add(1)
    assert lives.lifetime_s() == pytest.approx(200, rel=0.03)


def test_its_life_follows_the_traffic_and_has_an_end(clock):
    lives = Turnover(100, clock)
    for seconds in (2, 20):
        for _ in range(1000):
            clock.now += seconds
            lives.add(1)
        assert lives.lifetime_s() == pytest.approx(100 * seconds, rel=0.03)
    clock.now += 1e9
    assert lives.lifetime_s() == 30 * DAY_S


# ---- what is written


class Asked:
    """Admission in the mode hazard, with chances given by node."""

    def __init__(self, clock, chances, load_s=None, bytes_per_day=None):
        self.costs = CostModel(16, 1000, 3e4, 1000.0, clock)
        if load_s is not None:
            self.costs.observe_load(DISK, 1000, load_s)
        self.horizons = []
        budget = None if bytes_per_day is None else WriteBudget(bytes_per_day, 1000, clock)
        likeliest = Likeliest(self.chance, Turnover(100, clock), self.costs, budget)
        self.chances, self.admission = chances, Admission("hazard", self.costs, 1000, budget, likeliest)

    def chance(self, node, seconds):
        self.horizons.append(seconds)
        return self.chances[node]

    def __call__(self, node, num_blocks=1, continued=False):
        return self.admission.admits(DISK, num_blocks, 0, continued, False, node)


def test_a_run_is_written_if_its_chance_makes_up_for_the_writing(clock):
    # A block takes 16 ms to compute and 4 to load, so a hit saves 12 ms; writing counts as 4: a third has to be used.
    asked = Asked(clock, [0.3, 0.36, 1.0, 0.0], load_s=0.004)
    assert [asked(node) for node in range(4)] == [False, True, True, False]
    assert asked.admission.refused() == {"refused_by_admission": 2, "refused_by_write_budget": 0}


def test_what_loads_slower_than_it_computes_is_never_written(clock):
    assert not Asked(clock, [1.0], load_s=0.02)(0)


def test_until_the_rates_are_known_everything_that_may_come_again_is_written(clock):
    asked = Asked(clock, [1e-6, 0.0])
    assert asked(0)
    assert not asked(1), "and what cannot is not"


def test_what_nothing_is_known_of_is_judged_by_its_cost(clock):
    assert Asked(clock, [None], load_s=0.004)(0)
    assert not Asked(clock, [None], load_s=0.02)(0)


def test_what_others_continue_is_written_in_any_case(clock):
    assert Asked(clock, [0.0], load_s=0.02)(0, continued=True)


def test_the_chance_is_asked_for_the_time_that_a_block_lives(clock):
    asked = Asked(clock, [0.9])
    for _ in range(300):
        clock.now += 3
        asked(0)
    assert asked.horizons[0] == DAY_S
    assert asked.horizons[-1] == pytest.approx(300, rel=0.03)


def test_the_budget_goes_to_the_likeliest_and_is_spent(clock):
    rng = random.Random(1)
    chances = [rng.random() for _ in range(20_000)]
    asked = Asked(clock, chances, bytes_per_day=1000 * DAY_S // 40)  # a block in 40 seconds, of one in 4 that comes
    written = []
    for node in range(len(chances)):
        clock.now += 4
        if asked(node):
            written.append(node)
    late = [chances[node] for node in written if node > 5000]
    assert len(late) == pytest.approx(15_000 / 10, rel=0.05), "all that is allowed is used"
    assert sum(late) / len(late) > 0.93, "by the best tenth"
    assert asked.admission.refused()["refused_by_admission"] == 0


def test_the_threshold_follows_the_traffic(clock):
    rng = random.Random(2)
    asked = Asked(clock, [rng.random() * (0.1 if node < 5000 else 1.0) for node in range(10_000)],
                  bytes_per_day=1000 * DAY_S // 40)  # fmt: skip
    found = {False: 0, True: 0}
    for node in range(10_000):
        clock.now += 4
        found[node >= 5000] += asked(node)
    assert found[False] == pytest.approx(500 + BURST_S / 40, rel=0.2)
    assert found[True] == pytest.approx(500, rel=0.2)


@pytest.mark.parametrize("blocks", [1, 30, 200])
def test_a_run_larger_than_the_bucket_is_written_some_day(clock, blocks):
    asked = Asked(clock, [0.5, 0.6], bytes_per_day=1000 * 24 * 10)
    written = 0
    for i in range(2000):
        clock.now += 600
        written += blocks * asked(i % 2, blocks)
    assert written == pytest.approx(min(2000 * 600 / 3600 * 10, 2000 * blocks), rel=0.15)


def test_a_scan_is_not_written_and_what_comes_again_is(open_cache, clock, tmp_path):
    disk = pk.Disk(
        str(tmp_path / "kv"), pk.Blocks(60), admission="hazard", write_budget=pk.Bytes(24 * 12 * SPEC.block_bytes * 10)
    )
    toy = Toy(open_cache(12, disk=disk, policy="hazard", clock=clock))
    for i in range(300):
        for start in (i % 4, 1000 + i):
            clock.now += 30
            toy.use(prompt(start))
    stats = toy.cache.stats()
    assert stats.disk["refused_by_write_budget"] + stats.disk["refused_by_admission"] > 300
    assert sum(where(toy.cache, prompt(1000 + i)) != [] for i in range(200, 300)) < 20
    assert all(where(toy.cache, prompt(start)) for start in range(4))


# ---- what is brought up


@pytest.fixture
def toy(open_cache, clock):
    """A toy whose prompts 1 and 2 return every ten seconds and lie on the host.

    A prompt that never returns fills the device.
    """
    toy = Toy(open_cache(16, host=64, policy="hazard", clock=clock, threads=1))
    teach(toy, clock, rounds=60)
    with toy.cache.sequence(prompt(5000, 16 * BLOCK)) as seq:
        toy.run(seq)
    assert where(toy.cache, prompt(1)) == where(toy.cache, prompt(2)) == [("host", 3)]
    return toy


def test_the_likeliest_come_up_into_the_room_of_those_that_are_not(toy, clock):
    before = toy.cache.stats()
    started = toy.cache.prefetch_likely(30.0, 6)
    assert [ticket.wait(TIMEOUT_S) for ticket in started] == [3 * BLOCK, 3 * BLOCK]
    assert where(toy.cache, prompt(1)) == where(toy.cache, prompt(2)) == [("device", 3)]
    after = toy.cache.stats()
    assert (after.hit_tokens, after.prompt_tokens) == (before.hit_tokens, before.prompt_tokens)
    assert {name: after.hazard[name] for name in ("hits", "lru_hits", "remembered_blocks")} == {
        name: before.hazard[name] for name in ("hits", "lru_hits", "remembered_blocks")
    }
    assert all_free(toy.cache)
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}


def test_no_more_blocks_than_were_asked_for(toy):
    assert toy.cache.prefetch_likely(30.0, 0) == toy.cache.prefetch_likely(30.0, 2) == []
    (ticket,) = toy.cache.prefetch_likely(30.0, 5)
    assert ticket.wait(TIMEOUT_S) == 3 * BLOCK
    assert sorted(where(toy.cache, prompt(start))[0][0] for start in (1, 2)) == ["device", "host"]


def test_asked_again_and_again_it_comes_to_rest(open_cache, clock):
    toy = Toy(open_cache(8, host=64, policy="hazard", clock=clock, threads=1))
    for i in range(300):
        clock.now += 5
        toy.use(prompt(i % 6))
    calls = 0
    while tickets := toy.cache.prefetch_likely(20.0, 8):
        calls += 1
        assert [ticket.wait(TIMEOUT_S) > 0 for ticket in tickets]
        assert calls < 6, "prefixes take turns to displace each other"
    assert calls > 0


def test_what_is_held_is_not_displaced(open_cache, clock):
    toy = Toy(open_cache(16, host=64, policy="hazard", clock=clock, threads=1))
    teach(toy, clock, rounds=60)
    held = toy.cache.sequence(prompt(5000, 16 * BLOCK))
    toy.run(held)
    assert toy.cache.prefetch_likely(30.0, 6) == []
    toy.check(held)
    held.release()


def test_what_is_under_way_is_not_started_twice(toy, monkeypatch):
    go, work = threading.Event(), toy.cache._matcher.prefetch

    def held(*arguments):
        assert go.wait(TIMEOUT_S)
        return work(*arguments)

    monkeypatch.setattr(toy.cache._matcher, "prefetch", held)
    first = toy.cache.prefetch_likely(30.0, 6)
    assert len(first) == 2
    assert toy.cache.prefetch_likely(30.0, 6) == []
    go.set()
    assert [ticket.wait(TIMEOUT_S) for ticket in first] == [3 * BLOCK, 3 * BLOCK]


def test_it_comes_from_the_disk_too(open_cache, clock):
    toy = Toy(open_cache(16, disk=64, policy="hazard", clock=clock, threads=1))
    teach(toy, clock, rounds=60)
    toy.use(prompt(5000, 16 * BLOCK))
    assert where(toy.cache, prompt(1)) == [("disk", 3)]
    tickets = toy.cache.prefetch_likely(30.0, 6)
    assert [ticket.wait(TIMEOUT_S) for ticket in tickets] == [3 * BLOCK, 3 * BLOCK]
    assert where(toy.cache, prompt(1)) == [("device", 3)]


def test_without_colder_tiers_or_anything_known_nothing_is_started(open_cache, clock):
    assert Toy(open_cache(8, policy="hazard")).cache.prefetch_likely(60.0, 8) == []
    toy = Toy(open_cache(8, host=16, policy="hazard", clock=clock))
    toy.use(prompt(1))
    assert toy.cache.prefetch_likely(60.0, 8) == []


@pytest.mark.parametrize(
    "arguments", [(-1.0, 4), (float("nan"), 4), ("soon", 4), (True, 4), (1.0, -1), (1.0, 2.5), (1.0, None)]
)
def test_odd_wishes_are_refused(toy, arguments):
    with pytest.raises((pk.WrongType, pk.InvalidArgument), match=r"within_s|max_blocks"):
        toy.cache.prefetch_likely(*arguments)


def test_hits_stay_right_while_prefixes_come_up(open_cache, clock):
    toy = Toy(open_cache(12, host=20, disk=40, policy="hazard", clock=clock))
    choose = random.Random(3)
    for _ in range(150):
        clock.now += choose.random() * 20
        toy.use(prompt(choose.randrange(8), choose.randint(1, 5 * BLOCK)))
        toy.cache.prefetch_likely(20.0, choose.randrange(8))
    assert toy.tokens_checked > 1000

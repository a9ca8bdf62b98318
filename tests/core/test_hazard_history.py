"""The history of the policy ``hazard``.

It is plain LRU to the block, knows what was really cached, and keeps no more than it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from types import ModuleType

import numpy as np
import pytest

from pagedkv.core import BlockPool
from pagedkv.errors import StaleHandle
from pagedkv.lab.replay import bounds, load_trace
from pagedkv.lab.replay.trace import Trace
from tests.core.hazard_requests import NS, HazardCache, HeldLru, PlainLru, Prompt, branching, rising
from tests.core.helpers import finish
from tests.replay.hits import shared_folder

STAKES = (0.0, 1.0, float("inf"))
CHAT = shared_folder() / "mooncake_conversation_dev.jsonl.zst"


def everything(cache: HazardCache) -> set[int]:
    return {block for prefix in cache.tree.prefixes(cache.root) for block in prefix.tolist()}


@pytest.mark.parametrize("seed", range(15))
def test_lru_beside_it_is_lru_and_what_it_lacks_is_what_is_not_cached(native_hazard: ModuleType, seed: int) -> None:
    rng = Random(seed)
    capacity = rng.choice([1, 3, 7, 20, 50, 120])
    cache, lru, ask, now = HazardCache(capacity, study=rng.choice([0, 64])), PlainLru(capacity), branching(rng), 0.0
    cache.hazard.set_bound(stake=STAKES[seed % 3])
    if seed % 2:
        rising(cache)
    lru_hits = 0
    for i in range(250):
        now += rng.expovariate(1)
        path = ask(i)
        cache.request(path, now)
        lru_hits += lru.request(path)
        stats = cache.hazard.stats()
        assert stats["lru_hits"] == lru_hits, f"request {i}"
        assert stats["lacking"] == len(set(lru.blocks) - everything(cache)), f"request {i}"
    assert native_hazard.history_problems(cache.placement) == []
    cache.placement.check_integrity()


def lru_hits_by_request(trace: Trace, capacity: int) -> tuple[list[int], np.ndarray]:
    cache = HazardCache(capacity, study=16)
    said = []
    for i in range(trace.num_requests):
        cache.request(trace.path(i), float(trace.t_ms[i]) / 1000)
        said.append(cache.hazard.stats()["lru_hits"])
    exact = bounds.lru_hits(trace.paths, trace.offsets, trace.parents, capacity)
    return np.diff([0, *said]).tolist(), exact


@pytest.mark.parametrize("name", ["synthetic:chat:3:600", "synthetic:agent:3:300"])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_lru_beside_it_hits_what_the_bound_of_the_replay_hits(name: str, share: float) -> None:
    trace = load_trace(name)
    said, exact = lru_hits_by_request(trace, max(1, int(trace.num_unique * share)))
    assert said == exact.tolist()


@pytest.mark.skipif(not CHAT.exists(), reason="the shared traces are not here")
def test_lru_beside_it_hits_what_the_bound_hits_on_real_conversations() -> None:
    trace = load_trace(str(CHAT)).head(3000)
    said, exact = lru_hits_by_request(trace, 2000)
    assert said == exact.tolist()


# ---- no more than it may


def scattered(cache: HazardCache, i: int, length: int = 4) -> Prompt:
    return range(1_000_000 + i * length, 1_000_000 + (i + 1) * length)


def plain(cache: HazardCache, i: int) -> None:
    cache.request(scattered(cache, i), 10.0 * i)


def given_up(cache: HazardCache, i: int) -> None:
    cache.request(scattered(cache, i), 10.0 * i)
    cache.request(scattered(cache, i), 10.0 * i + 1, used=False)


def shorter_than_known(cache: HazardCache, i: int) -> None:
    """Blocks that were evicted are asked for again, and not computed."""
    cache.request(scattered(cache, i), 10.0 * i)
    cache.request(range(cache.capacity), 10.0 * i + 1)
    owner, _ = cache.placement.acquire(scattered(cache, i))
    cache.placement.release(owner)


@pytest.mark.parametrize("request_", [plain, given_up, shorter_than_known])
def test_no_more_is_remembered_than_was_allowed(request_: Callable[[HazardCache, int], None]) -> None:
    cache = HazardCache(8, history_blocks=30)
    for i in range(400):
        request_(cache, i)
        assert cache.hazard.stats()["remembered_blocks"] <= 30


@pytest.mark.parametrize("held", ["owned", "retained"])
@pytest.mark.parametrize("study", [0, 64])
def test_what_stays_cached_for_long_does_not_keep_the_rest_from_being_forgotten(held: str, study: int) -> None:
    cache = HazardCache(200, history_blocks=300, study=study)
    for token in range(100):
        owner, _ = cache.arrive([token])
        if held == "retained":
            cache.placement.set_retention(owner, 100)
        else:
            cache.placement.acquire([token], request=False)
        cache.leave(owner)
    for i in range(1500):
        cache.request(scattered(cache, i), 20.0 * i)
    stats = cache.hazard.stats()
    assert stats["remembered_blocks"] <= 300
    assert stats["remembered_runs"] >= 100


def test_only_what_was_asked_for_longest_ago_and_is_cached_nowhere_is_forgotten(native_hazard: ModuleType) -> None:
    cache = HazardCache(4, history_blocks=12)
    for i in range(5):
        cache.request(scattered(cache, i), i)
    depths = [past["born"] for past in native_hazard.pasts(cache.placement).values()]
    assert sorted(set(depths)) == [2, 3, 4]


# ---- cuts and joins


def runs(native_hazard: ModuleType, cache: HazardCache) -> list[tuple[int, int]]:
    return sorted((past["depth"], past["length"]) for past in native_hazard.pasts(cache.placement).values())


def test_a_run_is_cut_where_a_prompt_leaves_it_and_its_last_block_stands_alone(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    cache.request(range(10), 0)
    assert runs(native_hazard, cache) == [(0, 9), (9, 1)]
    cache.request([0, 1, 2, 3, 50, 51], 1)
    assert runs(native_hazard, cache) == [(0, 4), (4, 1), (4, 5), (5, 1), (9, 1)]
    assert native_hazard.history_problems(cache.placement) == []


def test_turn_by_turn_only_the_newest_ends_stay_apart(native_hazard: ModuleType) -> None:
    cache = HazardCache(400)
    for turn in range(1, 9):
        cache.request(range(10 * turn), 10.0 * turn)
        assert len(runs(native_hazard, cache)) <= 4
    deepest = max(native_hazard.pasts(cache.placement).values(), key=lambda past: past["depth"])
    assert deepest["turn"] == 7
    assert native_hazard.history_problems(cache.placement) == []


def test_a_run_that_was_evicted_in_part_and_then_forgotten_is_still_known_where_it_is_cached(
    native_hazard: ModuleType,
) -> None:
    cache = HazardCache(12, history_blocks=1)
    cache.request(range(10), 0)
    for i in range(1, 5):
        cache.request(range(100 * i, 100 * i + 2), i)
        assert native_hazard.history_problems(cache.placement) == []


# ---- what is learned


def test_a_use_teaches_the_age_at_which_it_came(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    cache.request(range(10), 0)
    cache.request(range(10), 100)
    samples = native_hazard.noted(cache.placement)
    assert len(samples) == 2
    assert {(s["first"], s["last"], s["reused"]) for s in samples} == {(0, native_hazard.bin_at(100) + 1, True)}


def test_a_part_of_a_run_teaches_nothing(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    cache.request(range(10), 0)
    cache.request([0, 1, 2, 3, 99], 100)
    assert native_hazard.noted(cache.placement) == []


def test_what_was_not_used_teaches_each_age_it_lived_through_once(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)

    def learned() -> list[int]:
        return [past["learned"] for past in native_hazard.pasts(cache.placement).values()]

    cache.request([1], 0)
    cache.hazard.tick(4 * NS)
    assert (cache.hazard.study(), learned()) == (1, [2])
    assert cache.hazard.study() == 0
    cache.hazard.tick(100_000 * NS)
    assert (cache.hazard.study(), learned()) == (10, [22])
    assert cache.hazard.study() == 0
    assert cache.hazard.stats()["learned"] == 11
    cache.request([1], 100_001)
    assert native_hazard.noted(cache.placement) == []


def test_a_visit_that_used_nothing_leaves_what_it_found_as_it_was(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)
    cache.request(range(10), 0, output_tokens=7)
    before = native_hazard.pasts(cache.placement)
    cache.request(range(10), 50, used=False)
    after = native_hazard.pasts(cache.placement)
    for past, was in before.items():
        for what in ("born", "open", "output", "turn", "tail", "kept", "x"):
            assert after[past][what] == was[what], what
        assert after[past]["learned"] == native_hazard.bin_at(50) + 1
    assert native_hazard.history_problems(cache.placement) == []


def test_an_output_told_later_reaches_what_the_visit_left_and_nothing_newer(native_hazard: ModuleType) -> None:
    cache = HazardCache(40)

    def outputs() -> dict[tuple[int, int], float]:
        return {(p["depth"], p["tail"]): p["output"] for p in native_hazard.pasts(cache.placement).values()}

    first = cache.leave(cache.arrive(range(4))[0], later=True)
    second = cache.leave(cache.arrive([0, 1, 9])[0], later=True)
    assert outputs() == {(0, 1): -1, (2, 1): -1, (2, 0): -1, (3, 0): -1}
    cache.hazard.report(first, 30)
    assert outputs() == {(0, 1): -1, (2, 1): 30, (2, 0): -1, (3, 0): 30}
    cache.hazard.report(second, 2**62)
    assert outputs() == {(0, 1): 2**24, (2, 1): 30, (2, 0): 2**24, (3, 0): 30}
    assert cache.hazard.stats()["outputs_clamped"] == 1


def test_each_namespace_teaches_the_tables_of_its_kind() -> None:
    cache = HazardCache(40, study=64)
    other = cache.tree.namespace(b"other")
    cache.hazard.set_kind(other, 5)
    for now in (0, 10):
        cache.hazard.tick(now * NS)
        cache.leave(cache.arrive([1, 2, 3], other)[0])
    assert cache.hazard.tables(0) is None
    assert cache.hazard.tables(5) is not None


# ---- requests under way at once


def test_a_prefix_that_many_compute_at_once_is_lacking_for_nobody_and_won_by_nobody() -> None:
    cache = HazardCache(1000)
    cache.request(range(100), 0)
    for i in range(20):
        cache.request(range(1000 * i + 1000, 1000 * i + 1060), i)
    assert cache.cached(range(100)) == 0
    room = cache.hazard.stats()["room"]
    owners = [cache.placement.acquire(np.arange(100, dtype=np.int32))[0] for _ in range(50)]
    stats = cache.hazard.stats()
    assert stats["lacking"] == 0
    assert stats["lru_hits"] == stats["hits"] == 0
    assert stats["room"] <= room + 0.005 * 50 * 100 + 1
    for owner in owners:
        cache.leave(owner, used=False)


def test_hits_on_what_others_compute_at_the_same_time_are_not_won_from_lru() -> None:
    cache = HazardCache(4000)
    owners = [cache.arrive([*range(100), 1000 + i])[0] for i in range(40)]
    stats = cache.hazard.stats()
    assert stats["hits"] == stats["lru_hits"]
    assert stats["room"] <= 0.005 * 40 * 101 + 1
    for owner in owners:
        cache.leave(owner)


def test_what_a_caller_does_not_want_matched_is_no_loss_to_lru() -> None:
    cache = HazardCache(40)
    for _ in range(20):
        owner, hits = cache.placement.acquire(np.arange(10, dtype=np.int32), 0, 9)
        cache.placement.insert(owner, np.arange(hits, 10, dtype=np.int32), cache.placement.allocate(10 - hits))
        cache.leave(owner)
    stats = cache.hazard.stats()
    assert stats["hits"] == stats["lru_hits"] == 19 * 9


def test_after_a_clear_or_without_a_namespace_lru_has_nothing_either(native_hazard: ModuleType) -> None:
    cache = HazardCache(400)
    other = cache.tree.namespace(b"other")
    for i in range(10):
        cache.request(range(100 * i, 100 * i + 20), i)
        cache.leave(cache.arrive(range(100 * i, 100 * i + 20), other)[0])
    cache.placement.drop_namespace(other)
    assert cache.hazard.stats()["lacking"] == 0
    assert cache.hazard.stats()["remembered_blocks"] == 200
    cache.placement.clear()
    assert cache.hazard.stats()["lacking"] == 0
    assert native_hazard.history_problems(cache.placement) == []


def both(cache: HazardCache) -> tuple[int, int]:
    stats = cache.hazard.stats()
    return stats["lru_hits"], stats["hits"]


@pytest.mark.parametrize("how", ["pinned", "of high priority"])
def test_what_a_caller_keeps_is_won_from_nobody(how: str) -> None:
    cache = HazardCache(20)
    cache.request(range(8), 0)
    owner, _ = cache.placement.acquire(np.arange(8, dtype=np.int32), request=False)
    if how == "of high priority":
        cache.placement.set_retention(owner, 100)
        cache.placement.release(owner)
    for i in range(30):
        cache.request(scattered(cache, i), i + 1.0)
    assert both(cache) == (0, 0)
    assert cache.request(range(8), 40) == 8
    assert both(cache) == (8, 8)


def test_what_came_into_the_cache_without_a_request_is_won_from_nobody() -> None:
    cache = HazardCache(20)
    tokens = np.arange(8, dtype=np.int32)
    owner, _ = cache.placement.acquire(tokens, request=False)
    cache.placement.insert(owner, tokens, cache.placement.allocate(8))
    cache.placement.release(owner)
    assert cache.request(range(8), 1) == 8
    assert both(cache) == (0, 0)


def test_lru_makes_room_when_blocks_are_computed_and_not_when_a_request_comes() -> None:
    cache = HazardCache(10)
    cache.request(range(5), 0)
    given_up, _ = cache.placement.acquire(np.arange(100, 109, dtype=np.int32))
    assert cache.request(range(5), 1) == 5
    assert both(cache) == (5, 5)
    cache.leave(given_up, used=False)
    assert cache.request(range(5), 2) == 5
    assert both(cache) == (10, 10)
    begun, _ = cache.placement.acquire(np.arange(100, 109, dtype=np.int32))
    cache.hazard.begin(begun)
    cache.request(range(5), 3)
    assert both(cache) == (11, 15)  # LRU has the first block still
    cache.leave(begun, used=False)
    with pytest.raises(StaleHandle):
        cache.hazard.begin(begun)


def test_what_another_computes_just_now_needs_room_in_lru_once() -> None:
    cache = HazardCache(20)
    cache.request(range(8), 0)
    owners = [cache.arrive([*range(100, 110), 200 + i])[0] for i in range(2)]  # 10 blocks that both use, and one each
    cache.request(range(8), 1)
    assert both(cache) == (8, 8)
    for owner in owners:
        cache.leave(owner)


def known_to_be_over(rng: Random, over: list[Prompt], fresh: Iterator[int]) -> list[int]:
    """A request that goes on with one that is over, somewhere, or comes from nowhere."""
    stem = list(rng.choice(over[-12:])) if over and rng.random() < 0.8 else []
    return stem[: rng.randint(0, len(stem))] + [next(fresh) for _ in range(rng.randint(0, 9))]


@pytest.mark.parametrize("seed", range(12))
def test_lru_beside_it_is_lru_where_requests_hold_what_they_use(native_hazard: ModuleType, seed: int) -> None:
    rng, fresh = Random(seed), iter(range(2**30))
    capacity = rng.choice([20, 60, 150])
    cache, lru = HazardCache(capacity, study=rng.choice([0, 64])), HeldLru(capacity)
    cache.hazard.set_bound(stake=STAKES[seed % 3])
    running: list[tuple[int, Prompt, Prompt]] = []
    over: list[Prompt] = []
    lru_hits = ours = 0
    for i in range(400):
        cache.hazard.tick(i * NS)
        path = known_to_be_over(rng, over, fresh)
        owner, hits = cache.arrive(path)
        expected, held = lru.arrive(path)
        lru_hits, ours = lru_hits + expected, ours + hits
        running.append((owner, path[: len(cache.placement.blocks_of(owner))], held))
        stats = cache.hazard.stats()
        assert (stats["lru_hits"], stats["hits"]) == (lru_hits, ours), f"request {i}"
        while len(running) > 3 or (running and rng.random() < 0.4):
            owner, computed, held = running.pop(rng.randrange(len(running)))
            cache.leave(owner)
            lru.leave(held)
            over.append(computed)
    for owner, _, _ in running:
        cache.leave(owner)
    assert native_hazard.history_problems(cache.placement) == []


# ---- everything at once


class Hammer:
    """Random calls on a random cache.

    Owners that are no requests, openings given up, cuts, quotas, and moves that fail.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.capacities = rng.choice([(6,), (12,), (40,), (8, 16), (6, 10, 20)])
        self.cache = HazardCache(
            *self.capacities,
            history_blocks=rng.choice([1, 20, 200]),
            demotion=rng.choice(["leaf_first", "oldest_first"]),
        )
        self.cache.hazard.set_bound(stake=rng.choice(STAKES), slack=rng.choice([0.005, 0.5]))
        if rng.random() < 0.5:
            rising(self.cache)
        self.placement = self.cache.placement
        self.roots = [self.cache.root, self.cache.tree.namespace(b"a")]
        self.owners: list[int] = []
        self.visits: list[int] = []
        self.now = 0.0
        self.doing = (
            *([self.acquire] * 16), *([self.release] * 15), *([self.finish] * 3), *([self.report] * 2), self.share,
            self.shorten, self.study, self.quota, self.retain, self.rarely,
        )  # fmt: skip

    def step(self) -> None:
        self.now += self.rng.choice([0, 0.1, 1, 30, 3000])
        self.cache.hazard.tick(int(self.now * NS) if self.rng.random() > 0.05 else 0)
        self.rng.choice(self.doing)()

    def acquire(self) -> None:
        if len(self.owners) == 5:
            return
        rng, placement = self.rng, self.placement
        path = np.array([rng.randint(0, 2) for _ in range(rng.randint(0, 9))], np.int32)
        limit = rng.choice([None, None, 2])
        owner, _ = placement.acquire(path, rng.choice(self.roots), limit, request=rng.random() < 0.85)
        self.owners.append(owner)
        if rng.random() < 0.8:
            self.compute(owner, path)

    def compute(self, owner: int, path: np.ndarray) -> None:
        placement = self.placement
        for _ in range(6):
            if placement.reserve(min(len(path), self.capacities[0])) == 0:
                placement.promote(owner)
                break
            self.finish()
        self.finish()
        hits = placement.settle(owner)
        missing = len(path) - hits
        missing = max(0, missing - placement.reserve(missing))
        pool = placement.pools[0]
        assert isinstance(pool, BlockPool)
        blocks = pool.alloc(missing)
        taken = placement.insert(owner, path[hits : hits + missing], blocks)
        pool.free(blocks[taken:])

    def release(self) -> None:
        if self.owners:
            owner = self.owners.pop(self.rng.randrange(len(self.owners)))
            if self.rng.random() < 0.7:
                output = self.rng.choice([None, 5, 2**62])
                later, used = self.rng.random() < 0.5, self.rng.random() < 0.8
                visit = self.cache.hazard.depart(owner, used=used, output_tokens=output, later=later)
                self.visits += [visit] * (visit >= 0)
            self.placement.release(owner)

    def report(self) -> None:
        if self.visits:
            visit = self.visits.pop(self.rng.randrange(len(self.visits)))
            self.cache.hazard.report(visit, self.rng.choice([0, 7, 2**40]))

    def share(self) -> None:
        if self.owners:
            self.owners.append(self.placement.share(self.rng.choice(self.owners)))

    def shorten(self) -> None:
        if self.owners:
            self.placement.shorten(self.rng.choice(self.owners), self.rng.randint(0, 4))

    def study(self) -> None:
        self.cache.hazard.study(self.rng.choice([1, 64]))

    def quota(self) -> None:
        self.placement.set_quota(self.roots[1], self.rng.choice([None, 2, 5]))

    def retain(self) -> None:
        if self.owners:
            expires = self.rng.choice([0, int(self.now * NS) + 5 * NS])
            self.placement.set_retention(self.rng.choice(self.owners), self.rng.randint(0, 100), expires)
        self.placement.expire(int(self.now * NS))

    def rarely(self) -> None:
        draw = self.rng.random()
        if draw < 0.2:
            self.placement.clear()
        elif draw < 0.4:
            self.placement.drop_namespace(self.roots[1])
            self.roots[1] = self.cache.tree.namespace(b"%d" % self.rng.getrandbits(40))
            self.cache.hazard.set_kind(self.roots[1], self.rng.randint(0, 7))

    def finish(self) -> None:
        finish(self.placement, self.rng.random() < 0.9)

    def close(self) -> None:
        for owner in self.owners:
            self.placement.release(owner)
        while self.placement.num_in_flight:
            self.finish()


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_under_everything_at_once_all_books_agree(native_hazard: ModuleType, first: int) -> None:
    for seed in range(first, first + 10):
        hammer = Hammer(seed)
        for i in range(300):
            hammer.step()
            if i % 10 == 0:
                hammer.placement.check_integrity()
                assert native_hazard.history_problems(hammer.placement, False) == [], f"seed {seed}, step {i}"
        hammer.close()
        hammer.placement.check_integrity()
        assert native_hazard.history_problems(hammer.placement, False) == [], f"seed {seed}"

"""The hazard model by itself.

The tests compare its index with brute force and its learning with NumPy; a model that has learned nothing is LRU.
"""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.core.hazard_requests import HazardCache, PlainLru, branching, rising

BINS, FEATURES, BUCKETS = 22, 16, 128
HINTS = 14  # features from here on are hints: a 0 says nothing
RATE, SHAPE_RATE = 0.06, 0.03


def features(rng: np.random.Generator) -> NDArray[np.uint8]:
    x = rng.integers(0, BUCKETS, FEATURES).astype(np.uint8)
    x[HINTS:] *= rng.integers(0, 2, FEATURES - HINTS).astype(np.uint8)  # given or not
    return x


def parts(weights: NDArray[Any], x: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Return views of the model's sums for `x`.

    base [BINS], then for each feature its level [1] and its shape [BINS].
    """
    views = [weights[:BINS]]
    for f, bucket in enumerate(x.tolist()):
        if f >= HINTS and bucket == 0:
            continue
        level = BINS + f * BUCKETS + bucket
        shape = BINS + FEATURES * BUCKETS + (f * BUCKETS + bucket) * BINS
        views += [weights[level : level + 1], weights[shape : shape + BINS]]
    return views


def hazards(weights: NDArray[Any], x: NDArray[np.uint8]) -> NDArray[np.float64]:
    logits = sum((np.broadcast_to(part, BINS).astype(np.float64) for part in parts(weights, x)), np.zeros(BINS))
    return np.asarray(1 / (1 + np.exp(-logits)))


def best_ratio(h: NDArray[np.float64], edges: NDArray[np.float64], k: int) -> float:
    """The most hits per second held that some moment to stop gives from bin k on."""
    alive, hits, held, best = 1.0, 0.0, 0.0, 0.0
    for j in range(k, BINS):
        hits += alive * h[j]
        held += alive * (edges[j + 1] - edges[j]) * (1 - 0.5 * h[j])
        alive *= 1 - h[j]
        best = max(best, hits / held)
    return best


def filled(native_hazard: ModuleType, rng: np.random.Generator, spread: float) -> Any:
    model = native_hazard.NativeModel()
    tables = model.tables
    tables[0] += rng.normal(0, spread, tables.shape[1]).astype(np.float32)
    tables[1] = rng.uniform(1, 3, tables.shape[1])
    model.tables = tables
    return model


@pytest.mark.parametrize("seed", range(8))
def test_the_index_is_the_best_of_all_moments_to_stop(native_hazard: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = np.array(native_hazard.edges())
    model = filled(native_hazard, rng, spread=rng.choice([0.1, 0.5, 1.0]))
    for _ in range(20):
        x = features(rng)
        h = hazards(model.tables[0], x)
        expected = [best_ratio(h, edges, k) for k in range(BINS)]
        assert model.index(x) == pytest.approx(expected, rel=1e-3)


def test_an_index_looks_past_a_bin_in_which_nothing_is_expected(native_hazard: ModuleType) -> None:
    """Where it differs from the plain hazard: quiet now, but sure to be used soon."""
    model = native_hazard.NativeModel()
    tables = model.tables
    tables[0] = 0
    tables[0, :BINS] = -20
    tables[0, 4] = 20
    model.tables = tables
    index = model.index(np.zeros(FEATURES, np.uint8))
    edges = native_hazard.edges()
    assert index[0] == pytest.approx(1 / (edges[4] + (edges[5] - edges[4]) / 2), rel=1e-3)
    assert index[5] < 1e-6 < index[0] < index[3]


@pytest.mark.parametrize("seed", range(4))
def test_learning_is_adagrad_on_the_logistic_loss(native_hazard: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = filled(native_hazard, rng, 0.3)
    weights, squares = model.tables.astype(np.float64)
    for _ in range(60):
        x, weight = features(rng), float(rng.uniform(0.1, 4))
        first = int(rng.integers(0, BINS))
        last, reused = int(rng.integers(first, BINS + 1)), bool(rng.integers(0, 2))
        model.learn(x, first, last, reused, weight)
        if last <= first:
            continue
        y = np.zeros(BINS)
        y[last - 1] = reused
        g = np.where((np.arange(BINS) >= first) & (np.arange(BINS) < last), (hazards(weights, x) - y) * weight, 0)
        for part, square in zip(parts(weights, x), parts(squares, x), strict=True):
            alone = len(part) == 1
            square += (g**2).sum() if alone else g**2
            rate = RATE if alone or (part.base is not None and np.shares_memory(part, weights[:BINS])) else SHAPE_RATE
            part -= rate * (g.sum() if alone else g) / np.sqrt(square)
    assert model.tables[0] == pytest.approx(weights, abs=2e-5)
    assert model.tables[1] == pytest.approx(squares, rel=1e-4)


def test_forgetting_makes_old_gradients_count_less(native_hazard: ModuleType) -> None:
    model = filled(native_hazard, np.random.default_rng(0), 0.3)
    before = model.tables
    model.forget()
    assert model.tables[0] == pytest.approx(before[0])
    assert model.tables[1] == pytest.approx(before[1] * 0.95)


@pytest.mark.parametrize("seed", range(4))
def test_the_chance_is_that_of_the_bins_the_time_runs_through(native_hazard: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = np.array(native_hazard.edges())
    model = filled(native_hazard, rng, 0.3)
    for _ in range(30):
        x = features(rng)
        age, seconds = float(rng.exponential(500)), float(rng.choice([0, 1, 60, 5000, 1e12]))
        overlap = np.minimum(age + seconds, edges[1:]) - np.maximum(age, edges[:-1])
        shares = np.clip(overlap, 0, None) / np.diff(edges)
        expected = 1 - np.prod((1 - hazards(model.tables[0], x)) ** shares)
        assert model.chance(x, age, seconds) == pytest.approx(expected, abs=1e-4)


def test_untrained_the_index_falls_with_age_and_knows_no_features(native_hazard: ModuleType) -> None:
    model, rng = native_hazard.NativeModel(), np.random.default_rng(0)
    index = model.index(np.zeros(FEATURES, np.uint8))
    assert (np.diff(index) < 0).all()
    for _ in range(20):
        assert (model.index(features(rng)) == index).all()


@pytest.mark.parametrize("seed", range(6))
def test_untrained_and_unbound_it_hits_what_lru_hits(seed: int) -> None:
    rng = Random(seed)
    capacity = rng.choice([1, 5, 20, 60])
    cache, lru, ask, now = HazardCache(capacity), PlainLru(capacity), branching(rng), 0.0
    cache.hazard.set_bound(stake=float("inf"))
    for i in range(300):
        now += rng.choice([0, 0.5, 20, 2000])
        path = ask(i)
        assert cache.request(path, now) == lru.request(path), f"request {i}"
    assert cache.hazard.stats()["lacking"] == 0


def test_with_hazards_that_rise_with_age_what_was_used_last_goes_first() -> None:
    cache = HazardCache(4)
    cache.hazard.set_bound(stake=float("inf"))
    rising(cache)
    for token in range(4):
        cache.request([token], 10.0 * token)
    cache.request([9], 40)
    assert [cache.cached([token]) for token in (0, 1, 2, 3, 9)] == [1, 1, 1, 0, 1]


@pytest.mark.parametrize("seed", range(2))
def test_it_learns_what_comes_back(seed: int) -> None:
    """The model keeps documents that return after a minute, where LRU cannot.

    Half of the requests are for documents that never return.
    """
    rng = Random(seed)
    cache, lru = HazardCache(60, study=64), PlainLru(60)
    hits = lru_hits = 0
    for i in range(3000):
        again = i % 2 == 0
        length = 4 if again else 8
        name = i // 2 % 10 if again else 1000 + i
        path = range(name * 100, name * 100 + length)
        hits += cache.request(path, i + rng.random()) * (i > 1500)
        lru_hits += lru.request(path) * (i > 1500)
    assert lru_hits == 0
    assert hits > 0.8 * 750 * 4

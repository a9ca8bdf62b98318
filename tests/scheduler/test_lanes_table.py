"""The lanes' table in C, beside NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.scheduler._lanes import are_tokens, drop, ended, put


@pytest.mark.parametrize("n", [0, 1, 2, 7, 256])
def test_one_token_below_zero_anywhere_is_seen(n):
    tokens = np.full(n, 2**31 - 1, np.int32)
    assert are_tokens(tokens)
    for i in range(n):
        tokens[i] = -1
        assert not are_tokens(tokens)
        tokens[i] = 0


def made(rng: np.random.Generator) -> np.ndarray:
    """A table of rows, last steps and stop tokens, as wide as it has room for lanes."""
    k, capacity = rng.integers(0, 4), rng.integers(1, 40)
    return np.concatenate(
        [rng.integers(0, 99, (1, capacity)), rng.integers(5, 9, (1, capacity)), rng.integers(-1, 5, (k, capacity))]
    ).astype(np.int64)


@pytest.mark.parametrize("seed", range(40))
def test_lanes_end_at_their_own_tokens_and_their_own_last_step_alone(seed):
    rng = np.random.default_rng(seed)
    table = made(rng)
    tokens = rng.integers(0, 12, rng.integers(0, table.shape[1] + 1)).astype(np.int32)
    n = len(tokens)
    for now in (4, 6, 9):
        over = (table[2:, :n] == tokens).any(axis=0) | (table[1, :n] <= now)
        assert ended(table, tokens, now) == np.flatnonzero(over).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_a_lane_that_goes_lets_those_after_it_move_up_and_leaves_the_others(seed):
    rng = np.random.default_rng(seed)
    table = made(rng)
    n = int(rng.integers(1, table.shape[1] + 1))
    i = int(rng.integers(0, n))
    beyond = table[:, n:].copy()
    left = np.delete(table[:, :n], i, axis=1)
    drop(table, i, n)
    np.testing.assert_array_equal(table[:, : n - 1], left)
    np.testing.assert_array_equal(table[:, n:], beyond)


@pytest.mark.parametrize("stops", [(), (3,), (3, 4)])
def test_a_lane_is_written_into_its_own_column(stops):
    table = np.arange(20, dtype=np.int64).reshape(4, 5)
    expected = table.copy()
    expected[:, 2] = [77, 88, *stops, *[-1] * (2 - len(stops))]
    put(table, 2, 77, 88, stops)
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("wrong", [None, [1, 2], 3])
def test_arrays_alone_are_taken(wrong):
    table, tokens = np.zeros((2, 1), np.int64), np.zeros(1, np.int32)
    calls = (
        lambda: are_tokens(wrong), lambda: ended(wrong, tokens, 0), lambda: ended(table, wrong, 0),
        lambda: drop(wrong, 0, 1), lambda: put(wrong, 0, 1, 1, ()), lambda: put(table, 0, 1, 1, wrong),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError):
            call()

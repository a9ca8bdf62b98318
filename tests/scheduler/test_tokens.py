"""The two passes over a report's tokens, beside NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.scheduler._tokens import are_tokens, stopped


@pytest.mark.parametrize("n", [0, 1, 2, 7, 256])
def test_one_token_below_zero_anywhere_is_seen(n):
    tokens = np.full(n, 2**31 - 1, np.int32)
    assert are_tokens(tokens)
    for i in range(n):
        tokens[i] = -1
        assert not are_tokens(tokens)
        tokens[i] = 0


@pytest.mark.parametrize("seed", range(30))
def test_lanes_stop_at_their_own_tokens_alone(seed):
    rng = np.random.default_rng(seed)
    k, capacity = rng.integers(1, 4), rng.integers(1, 40)
    n = rng.integers(0, capacity + 1)
    stops = rng.integers(-1, 5, (k, capacity)).astype(np.int64)
    tokens = rng.integers(0, 12, n).astype(np.int32)
    assert stopped(stops, tokens) == np.flatnonzero((stops[:, :n] == tokens).any(axis=0)).tolist()
    whole = np.concatenate([np.full((1, capacity), 7), stops])  # a view that begins further down
    assert stopped(whole[1:], tokens) == stopped(stops, tokens)


@pytest.mark.parametrize("wrong", [None, [1, 2], 3])
def test_arrays_alone_are_taken(wrong):
    with pytest.raises(TypeError):
        are_tokens(wrong)
    with pytest.raises(TypeError):
        stopped(wrong, np.zeros(1, np.int32))

"""How a token is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from examples.llama_numpy.sampling import Sampling, log_softmax

LOGITS = np.log(np.array([0.05, 0.5, 0.25, 0.2], np.float32))


def drawn(sampling: Sampling, count: int = 4000) -> np.ndarray:
    """Share of each token."""
    draws = sampling.generator(0)
    return np.bincount([sampling.choose(LOGITS, draws) for _ in range(count)], minlength=4) / count


def test_temperature_zero_takes_the_best() -> None:
    assert drawn(Sampling(), 20).tolist() == [0, 1, 0, 0]


def test_draws_follow_the_probabilities() -> None:
    np.testing.assert_allclose(drawn(Sampling(temperature=1.0)), [0.05, 0.5, 0.25, 0.2], rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, top_k=2), [1, 2]),
        (Sampling(temperature=1.0, top_k=1), [1]),
        (Sampling(temperature=1.0, top_k=99), [0, 1, 2, 3]),
        (Sampling(temperature=1.0, top_p=0.4), [1]),
        (Sampling(temperature=1.0, top_p=0.7), [1, 2]),
        (Sampling(temperature=1.0, top_p=0.9), [1, 2, 3]),
        (Sampling(temperature=1.0, top_p=1.0), [0, 1, 2, 3]),
        (Sampling(temperature=0.01), [1]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.6), [1, 2]),
    ],
)
def test_what_is_cut_off_is_never_drawn(sampling: Sampling, kept: list[int]) -> None:
    assert np.flatnonzero(drawn(sampling, 1000)).tolist() == kept


def test_a_seed_and_a_sample_have_their_own_draws() -> None:
    def some(seed: int, sample: int) -> list[float]:
        return Sampling(seed=seed).generator(sample).random(3).tolist()

    assert some(1, 0) == some(1, 0)
    assert len({tuple(some(seed, sample)) for seed in range(3) for sample in range(3)}) == 9


def test_log_softmax_neither_overflows_nor_loses_the_sum() -> None:
    logits = np.array([[1000.0, 999.0], [-1000.0, -1000.0]], np.float32)
    assert np.allclose(np.exp(log_softmax(logits)).sum(axis=1), 1)
    assert np.allclose(log_softmax(logits)[1], np.log(0.5))

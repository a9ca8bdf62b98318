"""From logits to a token.

The most likely one, or one drawn by temperature, top-k and top-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.llama_numpy.errors import NumericsError, PromptError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Parameters
    ----------
    temperature : 0 takes the most likely token; above it, larger means more even.
    top_k : draw from the k most likely; 0 for all.
    top_p : draw from the most likely that together have at least this probability.
    seed : of the draws; sample i of a prompt uses its own stream of it.

    Raises
    ------
    PromptError
        A value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise PromptError(f"temperature must be a finite number, 0 or more, not {self.temperature}")
        if self.top_k < 0 or self.seed < 0 or not 0 < self.top_p <= 1:
            raise PromptError("top_k and seed must be 0 or more, top_p above 0 and at most 1")

    def generator(self, sample: int) -> np.random.Generator:
        """Random generator of one sample; its draws do not depend on the rest of the batch."""
        return np.random.default_rng([self.seed, sample])

    def choose(self, logits: NDArray[np.floating[Any]], draws: np.random.Generator) -> int:
        """A token, given finite logits [vocab_size]."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")[: self.top_k or None]
        chances = np.exp(log_softmax(logits[order].astype(np.float64) / self.temperature))
        running = np.cumsum(chances)
        kept = int(np.searchsorted(running, self.top_p * running[-1])) + 1
        place = np.searchsorted(running[:kept], draws.random() * running[min(kept, len(running)) - 1], side="right")
        return int(order[min(place, len(order) - 1)])


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Natural logarithms of the probabilities, along the last axis, float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def check_finite(logits: NDArray[Any]) -> None:
    """Raise unless all logits are numbers.

    Called inside a step, so that KV of a failed computation is never cached.

    Raises
    ------
    NumericsError
    """
    bad = np.flatnonzero(~np.isfinite(logits).all(axis=-1))
    if len(bad):
        raise NumericsError(
            f"{len(bad)} of {len(logits)} rows of logits hold NaN or infinity (the first: row {bad[0]}): the weights "
            f"or the cached KV are bad; nothing of this step was kept"
        )

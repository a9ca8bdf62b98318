"""A model without weights, for tests and benchmarks: bytes in, letters out.

The KV of a token is a number that follows from all tokens up to it. A step reads the number of the last computed token
out of the cache and goes on from there, so a wrong block gives other text.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.scheduler import Plan

END = 256
MODULUS = (1 << 24) - 3  # numbers below it are exact in float32
LETTERS = b"etaoin shrdlucmfwypvbgkjqxz"


def after(state: int, token: int) -> int:
    """The number of a token, given that of the token before it; 1 before the first."""
    return (state * 48271 + token * 69621 + 12345) % MODULUS


def greedy(tokens: Iterable[int], most: int, *, ends: bool = True) -> list[int]:
    """What the model says after these tokens, `most` at most: computed without a cache."""
    state, said = 1, list[int]()
    for token in tokens:
        state = after(state, token)
    while len(said) < most:
        said.append(_likely(state, ends))
        if said[-1] == END:
            break
        state = after(state, said[-1])
    return said


def _likely(state: int, ends: bool) -> int:
    return END if ends and state % 61 == 0 else LETTERS[state // 61 % len(LETTERS)]


class Toy:
    """The toy model.

    Parameters
    ----------
    step_s : seconds that each step takes at least, and `token_s` more for each of its tokens.
    ends : whether it comes to an end by itself, on average after 61 tokens.
    """

    name = "toy"
    context_length = 2048
    vocab_size = 257
    stop_ids = frozenset({END})

    def __init__(self, step_s: float = 0.0, token_s: float = 0.0, *, ends: bool = True) -> None:
        if not (step_s >= 0 and token_s >= 0):
            raise pk.InvalidArgument(f"a step of {step_s} s and {token_s} s a token: neither can be below 0")
        self._step_s, self._token_s, self._ends = step_s, token_s, ends

    def kv_spec(self, block_size: int) -> pk.KVSpec:
        """One layer of two numbers a token."""
        return pk.KVSpec(1, 1, 2, "float32", block_size, model="pagedkv-toy@1")

    def encode(self, text: str) -> list[int]:
        """Bytes of UTF-8."""
        return list(text.encode("utf-8", "replace"))

    def chat(self, turns: Iterable[tuple[str, str]]) -> list[int]:
        """A line for each turn."""
        return self.encode("".join(f"{role}: {text}\n" for role, text in turns) + "assistant: ")

    def stream(self) -> ToyText:
        """Letters."""
        return ToyText()

    def logits(self, plan: Plan, step: pk.Step) -> NDArray[Any]:
        """1 for the token that comes next, 0 for the others."""
        states = np.empty(len(step.tokens), np.float32)
        ends = np.empty(len(plan.sequences), np.int64)
        starts = step.positions[step.q_indptr[:-1]].tolist()
        for i in sorted(range(len(starts)), key=starts.__getitem__):  # a follower begins behind its leader
            first, last = step.q_indptr[i : i + 2].tolist()
            state = self._state_before(starts[i], i, plan, step, states)
            for at in range(first, last):
                state = after(state, int(step.tokens[at]))
                states[at] = state
            ends[i] = state
        if self._step_s or self._token_s:
            time.sleep(self._step_s + self._token_s * len(step.tokens))
        kv = np.repeat(states[:, None, None], 2, axis=2)
        step.write(0, kv, kv)
        logits = np.zeros((len(plan.lanes), self.vocab_size), np.float32)
        logits[np.arange(len(plan.lanes)), [_likely(int(one), self._ends) for one in ends[: len(plan.lanes)]]] = 1.0
        return logits


    def _state_before(self, position: int, i: int, plan: Plan, step: pk.Step, states: NDArray[Any]) -> int:
        """The number of the token before a position of sequence `i`.

        From the cache, or from this step, where another sequence computes that token for it.
        """
        if position <= plan.sequences[i].num_computed:
            return int(plan.sequences[i].gather(position - 1, position)[0][0, 0, 0, 0]) if position else 1
        first = int(step.q_indptr[i])
        if position > step.positions[first]:
            return int(states[first + position - 1 - step.positions[first]])
        assert plan.batch.follow is not None
        (leader,) = (one for follower, one, _ in plan.batch.follow.tolist() if follower == i)
        return self._state_before(position, leader, plan, step, states)


class ToyText:
    """Each token is a letter."""

    def feed(self, token: int) -> str:
        """The letter."""
        return chr(token) if token < 128 else "\ufffd"

    def end(self) -> str:
        """Nothing."""
        return ""

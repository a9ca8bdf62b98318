"""What the server needs of a model, and how it chooses tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from examples.llama_numpy.sampling import Sampling
from pagedkv.scheduler import Branch, Plan


class TextStream(Protocol):
    """Text of tokens that come one at a time."""

    def feed(self, token: int) -> str:
        """What one more token completes; it may be nothing yet."""

    def end(self) -> str:
        """What is left unfinished."""


class Engine(Protocol):
    """A model with its tokenizer.

    Attributes
    ----------
    name : as clients name it.
    context_length : tokens of a prompt and its completion at most.
    vocab_size : tokens are below it.
    stop_ids : tokens that end a completion and are not part of its text.
    """

    name: str
    context_length: int
    vocab_size: int
    stop_ids: frozenset[int]

    def kv_spec(self, block_size: int) -> pk.KVSpec:
        """Of the caches that it computes on."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text.

        Raises
        ------
        LlamaError
            It cannot be a prompt; the message goes to the client.
        """

    def chat(self, turns: Iterable[tuple[str, str]]) -> list[int]:
        """Tokens that ask for the next turn, after ``(role, text)`` of each so far.

        Raises
        ------
        LlamaError
            As `encode`.
        """

    def stream(self) -> TextStream:
        """Turns a completion's tokens into text."""

    def logits(self, plan: Plan, step: pk.Step) -> NDArray[Any]:
        """Compute a step: write and attend every layer.

        Returns
        -------
        float [num_lanes, vocab_size], all of them numbers.
        """


@dataclass(eq=False, slots=True)
class Job:
    """A request as the thread that steps sees it; what its spans and log lines are named by.

    Attributes
    ----------
    name : of the request.
    sampling : how its tokens are chosen.
    """

    name: str
    sampling: Sampling
    _draws: dict[Branch, np.random.Generator] = field(default_factory=dict)
    _to_come: list[np.random.Generator] = field(default_factory=list)

    def choose(self, branch: Branch, logits: NDArray[Any]) -> Any:
        """The next token of a branch; of a prompt with samples, the first token of each.

        Sample i draws from the generator i of the seed, whatever else runs: its tokens are those that it gets alone.
        """
        request = branch.request
        if branch.num_output == 0:
            draws = [self.sampling.generator(sample) for sample in range(request.n)]
            tokens = [self.sampling.choose(logits, one) for one in draws]
            self._to_come = [one for one, token in zip(draws, tokens, strict=True) if token not in request.stop_tokens]
            self._draws.clear()
            return tokens if request.n > 1 else tokens[0]
        if branch not in self._draws:  # branches come in the order of their samples, those without that have ended
            self._draws[branch] = self._to_come.pop(0)
        return self.sampling.choose(logits, self._draws[branch])

    def __str__(self) -> str:
        return self.name


def compute(engine: Engine, plan: Plan, step: pk.Step) -> list[Any]:
    """What a step gives each lane: for :class:`pagedkv.serving.AsyncScheduler`."""
    rows = engine.logits(plan, step)
    return [_job(branch).choose(branch, row) for branch, row in zip(plan.lanes, rows, strict=True)]


def _job(branch: Branch) -> Job:
    job = branch.request.trace
    assert isinstance(job, Job)
    return job


def shown(tokens: Sequence[int], stop_ids: frozenset[int]) -> Sequence[int]:
    """Tokens whose text a client sees."""
    return [token for token in tokens if token not in stop_ids]

"""Decoding: prompts in chunks, other requests' tokens in the same step.

Several samples of a prompt by fork.

Everything that can fail because of this step (numbers, the choice, the caller's token callback) happens inside it, so
that a failure commits nothing of it; sequences are released however this ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

import pagedkv as pk
from examples.llama_numpy.errors import PromptError
from examples.llama_numpy.model import Llama, check_tokens
from examples.llama_numpy.sampling import Sampling, check_finite

OnToken = Callable[[int, int, int], object]  # (prompt, sample, token)


@dataclass(slots=True)
class Completion:
    """What one sample of one prompt became.

    Attributes
    ----------
    prompt, sample : which.
    tokens : generated so far, a final stop token included.
    finished : ``"stop"``, ``"length"``, or empty while it goes on.
    """

    prompt: int
    sample: int
    tokens: list[int] = field(default_factory=list)
    finished: str = ""


@dataclass(slots=True)
class Speed:
    """Tokens and seconds of the steps that held prompt tokens, and of those that did not."""

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    new_tokens: int = 0
    new_s: float = 0.0

    def add(self, num_tokens: int, seconds: float, *, is_prompt: bool) -> None:
        """A step of so many tokens took so long."""
        if is_prompt:
            self.prompt_tokens += num_tokens
            self.prompt_s += seconds
        else:
            self.new_tokens += num_tokens
            self.new_s += seconds


@dataclass(frozen=True, slots=True)
class Result:
    """Completions in order of prompt and sample; where each prompt's cached tokens were found.

    How fast it went.
    """

    completions: list[Completion]
    hit_tokens: list[dict[str, int]]
    speed: Speed


@dataclass(slots=True, eq=False)
class _Stream:
    """A live sequence and what it generates.

    During its prompt it stands for all of the prompt's samples.
    """

    seq: pk.Sequence
    completions: list[Completion]
    draws: list[np.random.Generator]


def generate(
    model: Llama,
    cache: pk.KVCache,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    samples: int = 1,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
    chunk: int | None = None,
    on_token: OnToken | None = None,
) -> Result:
    """Generate from all prompts together.

    Parameters
    ----------
    model, cache : a model, and a cache of its KVSpec.
    prompts : token ids, each at least one.
    max_tokens : of each completion; fewer where the model's context ends.
    samples : of each prompt; they share its KV.
    sampling : default: the most likely token.
    stop_ids : tokens that end a completion.
    chunk : prompt tokens of one sequence in one step at most. Default: all.
    on_token : told ``(prompt, sample, token)`` inside the step that computed it. If it raises, nothing of that step is
        committed and everything is released.

    Raises
    ------
    PromptError
        A prompt is empty, has unknown tokens, or does not fit the model or the cache. Nothing was computed.
    NumericsError
        Logits are not numbers.
    OutOfBlocks
        Others hold the blocks that this needs.
    """
    sampling = sampling or Sampling()
    checked = [check_prompt(model, prompt) for prompt in prompts]
    if max_tokens < 1 or samples < 1 or (chunk is not None and chunk < 1):
        raise PromptError("max_tokens, samples and chunk must be at least 1")
    copied = len(prompts) if samples > 1 else 0
    check_capacity(model, cache, checked, max_tokens, samples, copied)
    speed, hits, done = Speed(), [], []
    with ExitStack() as releases:
        streams = []
        for i, prompt in enumerate(checked):
            seq = releases.enter_context(cache.sequence(prompt))
            hits.append(dict(seq.hit_tokens))
            completions = [Completion(i, j) for j in range(samples)]
            done += completions
            streams.append(_Stream(seq, completions, [sampling.generator(j) for j in range(samples)]))
        while streams:
            chosen = _step(model, cache, streams, sampling, chunk, on_token, speed)
            streams = [
                left
                for stream, tokens in zip(streams, chosen, strict=True)
                for left in _advance(stream, tokens, releases, model, max_tokens, stop_ids)
            ]
    return Result(done, hits, speed)


def check_prompt(model: Llama, prompt: Sequence[int]) -> np.ndarray:
    """A prompt as int32 [n].

    Raises
    ------
    PromptError
        It is empty, has unknown tokens, or leaves no room for a further one in the model's context.
    """
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or not len(tokens):
        raise PromptError("an empty prompt: there is nothing to go on from; give at least one token")
    if tokens.dtype.kind not in "iu":
        raise PromptError(f"token ids are integers, not {tokens.dtype}")
    check_tokens(tokens, model.config.vocab_size)
    if len(tokens) >= model.config.context_length:
        raise PromptError(
            f"a prompt of {len(tokens)} tokens: the model's context is {model.config.context_length}, and at least one "
            f"token is generated"
        )
    return tokens.astype(np.int32)


def most_tokens(model: Llama, prompt: Sequence[int] | np.ndarray, max_tokens: int) -> int:
    """Tokens that a prompt's completion has at most.

    So many, or fewer where the model's context ends.
    """
    return min(max_tokens, model.config.context_length - len(prompt))


def bound_told(model: Llama, prompts: Sequence[Sequence[int] | np.ndarray], max_tokens: int) -> str:
    """For errors about completion length: says so if the model's context limits it."""
    if all(most_tokens(model, prompt, max_tokens) == max_tokens for prompt in prompts):
        return ""
    return f"; --max-tokens {max_tokens} was cut to what the model's context of {model.config.context_length} leaves"


def check_capacity(
    model: Llama, cache: pk.KVCache, prompts: Sequence[np.ndarray], max_tokens: int, samples: int, copied: int
) -> None:
    """Raise PromptError if an empty device could not hold all sequences at their longest.

    Parameters
    ----------
    model, cache, prompts, max_tokens
    samples : sequences that a prompt becomes.
    copied : partly filled blocks that may be shared when their owners go on: each copies it before it writes, and
        while that lasts the block itself is held as well.
    """
    size, capacity = cache.spec.block_size, int(cache.stats().blocks["device"]["max"])
    needed = copied if size > 1 else 0
    mosts = [most_tokens(model, prompt, max_tokens) for prompt in prompts]
    for prompt, most in zip(prompts, mosts, strict=True):
        shared = len(prompt) // size  # full blocks of the prompt, which all samples own together
        needed += shared + samples * (-(-(len(prompt) + most) // size) - shared)
    if needed > capacity:
        completions = samples * len(prompts)
        each = f"for each of {completions} completions" if completions > 1 else "for the completion"
        raise PromptError(
            f"{sum(map(len, prompts))} prompt tokens and {max(mosts)} more {each} need {needed} blocks of {size} "
            f"tokens; the device has {capacity}: take a larger device budget (--device), or ask for less (--max-tokens)"
            f"{bound_told(model, prompts, max_tokens)}"
        )


def _step(
    model: Llama,
    cache: pk.KVCache,
    streams: list[_Stream],
    sampling: Sampling,
    chunk: int | None,
    on_token: OnToken | None,
    speed: Speed,
) -> list[list[int]]:
    """One forward pass over all.

    The tokens chosen for each stream, one per sample, none while its prompt goes on.
    """
    pending = [stream.seq.num_tokens - stream.seq.num_computed for stream in streams]
    q_lens = [min(count, chunk or count) for count in pending]
    is_prompt = any(not stream.completions[0].tokens for stream in streams)
    began = time.perf_counter()
    chosen: list[list[int]] = [[] for _ in streams]
    with cache.step([stream.seq for stream in streams], q_lens=q_lens) as step:
        logits = model.forward(step)
        check_finite(logits)  # also of a chunk: whatever is not a number shows in all that comes after it
        for i, (stream, row) in enumerate(zip(streams, logits, strict=True)):
            if q_lens[i] < pending[i]:
                continue
            chosen[i] = [sampling.choose(row, draws) for draws in stream.draws]
            for completion, token in zip(stream.completions, chosen[i], strict=True):
                if on_token is not None:
                    on_token(completion.prompt, completion.sample, token)
    speed.add(sum(q_lens), time.perf_counter() - began, is_prompt=is_prompt)
    return chosen


def _advance(
    stream: _Stream,
    tokens: list[int],
    releases: ExitStack,
    model: Llama,
    max_tokens: int,
    stop_ids: Collection[int],
) -> list[_Stream]:
    """What goes on after a step.

    The stream itself, a stream per sample once the prompt is computed, or nothing.
    """
    if not tokens:
        return [stream]
    going = []
    for completion, draws, token in zip(stream.completions, stream.draws, tokens, strict=True):
        completion.tokens.append(token)
        length = stream.seq.num_tokens + 1
        if token in stop_ids:
            completion.finished = "stop"
        elif len(completion.tokens) == max_tokens or length >= model.config.context_length:
            completion.finished = "length"
        else:
            going.append((completion, draws, token))
    if not going:
        stream.seq.release()
        return []
    seqs = [stream.seq, *map(releases.enter_context, stream.seq.fork(len(going) - 1))]
    for seq, (_, _, token) in zip(seqs, going, strict=True):
        seq.append(token)
    return [_Stream(seq, [done], [draws]) for seq, (done, draws, _) in zip(seqs, going, strict=True)]

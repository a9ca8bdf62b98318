"""Prompts and numbers that cannot be computed.

The call refuses them with the reason, and the cache is as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from examples.llama_numpy.beams import beam_search
from examples.llama_numpy.errors import NumericsError, PromptError
from examples.llama_numpy.generation import generate
from examples.llama_numpy.gguf_file import Model
from examples.llama_numpy.model import Llama
from examples.llama_numpy.sampling import Sampling, check_finite
from tests.realmodel import tiny
from tests.realmodel.bed import Bed

Open = Callable[..., pk.KVCache]
VOCAB = len(tiny.TOKENS)


@pytest.fixture
def tiny_bed(tiny_beds: dict[int, Bed]) -> Bed:
    return tiny_beds[16]


def refused_by_all(bed: Bed, cache: pk.KVCache, prompt: Any, match: str, max_tokens: int = 4) -> None:
    """Refused by both ways of decoding, before anything is computed or held."""
    before = cache.stats().computed_tokens
    with pytest.raises(PromptError, match=match):
        generate(bed.model, cache, [[5, 6], prompt], max_tokens=max_tokens)
    with pytest.raises(PromptError, match=match):
        beam_search(bed.model, cache, prompt, width=2, max_tokens=max_tokens)
    assert cache.stats().computed_tokens == before
    assert cache.stats().sequences == 0


def test_an_empty_prompt_is_refused(tiny_bed: Bed, opened: Open) -> None:
    refused_by_all(tiny_bed, opened(tiny_bed, 64), [], "empty prompt")


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1, 2**40, -(2**40)])
def test_a_token_outside_the_vocabulary_is_refused(tiny_bed: Bed, opened: Open, token: int) -> None:
    refused_by_all(tiny_bed, opened(tiny_bed, 64), [1, token, 2], f"token {token} is none")


@pytest.mark.parametrize("prompt", [["a"], [1.5], [[1, 2], [3, 4]], 7, [True]], ids=str)
def test_what_is_no_list_of_tokens_is_refused(tiny_bed: Bed, opened: Open, prompt: Any) -> None:
    refused_by_all(tiny_bed, opened(tiny_bed, 64), prompt, "token|prompt")


@pytest.mark.parametrize("too_long", [tiny.CONTEXT, tiny.CONTEXT + 1, 5000])
def test_a_prompt_longer_than_the_model_is_refused_with_the_numbers(tiny_bed: Bed, opened: Open, too_long: int) -> None:
    refused_by_all(tiny_bed, opened(tiny_bed, 8192), [4] * too_long, f"{too_long} tokens.*{tiny.CONTEXT}")


def test_a_prompt_longer_than_the_cache_is_refused_with_the_numbers(tiny_bed: Bed, opened: Open) -> None:
    refused_by_all(tiny_bed, opened(tiny_bed, 64), [4] * 64, "blocks of 16 tokens; the device has 4")


def test_a_prompt_that_fits_with_what_comes_after_it_is_served(tiny_bed: Bed, opened: Open) -> None:
    cache = opened(tiny_bed, 64)
    result = generate(tiny_bed.model, cache, [[4] * 60], max_tokens=4)
    assert len(result.completions[0].tokens) == 4


def test_samples_count_each_on_its_own(tiny_bed: Bed, opened: Open) -> None:
    cache = opened(tiny_bed, 5 * 16)
    prompt = tiny_bed.so_far("mixed")[:40]  # two whole blocks, shared, and a part of one
    draw = Sampling(temperature=1.0)
    assert len(generate(tiny_bed.model, cache, [prompt], samples=2, max_tokens=8, sampling=draw).completions) == 2
    with pytest.raises(PromptError, match="need 6 blocks"):
        generate(tiny_bed.model, cache, [prompt], samples=3, max_tokens=8, sampling=draw)


@pytest.mark.parametrize("length", [31, 32, 33])
@pytest.mark.parametrize("count", [2, 20])
def test_what_is_said_to_fit_does(tiny_bed: Bed, length: int, count: int) -> None:
    """The smallest cache that is not refused runs out of blocks nowhere."""
    prompt = tiny_bed.so_far("mixed")[:length]
    draw = Sampling(temperature=1.0)
    runs: list[Callable[[pk.KVCache], object]] = [
        lambda cache: generate(tiny_bed.model, cache, [prompt], samples=4, max_tokens=count, sampling=draw),
        lambda cache: beam_search(tiny_bed.model, cache, prompt, width=4, max_tokens=count),
    ]
    for run in runs:
        refusals = 0
        for blocks in range(1, 20):
            with tiny_bed.open(16 * blocks) as cache:
                try:
                    run(cache)
                except PromptError:
                    refusals += 1
        assert 2 <= refusals < 19


def test_a_generation_ends_where_the_context_does(tiny_bed: Bed, opened: Open) -> None:
    cache = opened(tiny_bed, 2048)
    prompt = [4] * (tiny.CONTEXT - 3)
    result = generate(tiny_bed.model, cache, [prompt], max_tokens=100)
    assert len(result.completions[0].tokens) == 3
    assert result.completions[0].finished == "length"
    found = beam_search(tiny_bed.model, cache, prompt, width=2, max_tokens=100)
    assert {len(beam.tokens) for beam in found.beams} == {3}


def test_a_cache_that_others_hold_is_out_of_blocks_and_everything_is_let_go_of(tiny_bed: Bed, opened: Open) -> None:
    cache = opened(tiny_bed, 96)
    with cache.sequence([3] * 64) as other:
        with cache.step([other]) as step:
            tiny_bed.model.forward(step)
        with pytest.raises(pk.OutOfBlocks):
            generate(tiny_bed.model, cache, [[7] * 60], max_tokens=4)
        assert cache.stats().sequences == 1
    assert len(generate(tiny_bed.model, cache, [[7] * 60], max_tokens=4).completions[0].tokens) == 4


@pytest.mark.parametrize("limits", [{"max_tokens": 0}, {"max_tokens": 4, "samples": 0}, {"max_tokens": 4, "chunk": 0}])
def test_numbers_below_one_are_refused(tiny_bed: Bed, opened: Open, limits: dict[str, int]) -> None:
    with pytest.raises(PromptError, match="at least 1"):
        generate(tiny_bed.model, opened(tiny_bed, 64), [[1]], **limits)


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_sampling_out_of_range_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PromptError):
        Sampling(**values)


def test_a_token_appended_by_hand_is_refused_inside_the_step(tiny_bed: Bed, opened: Open) -> None:
    """NumPy would take -1 for the last row of the embedding."""
    cache = opened(tiny_bed, 64)
    with cache.sequence([1, 2, -1]) as seq:
        with pytest.raises(PromptError, match="token -1"), cache.step([seq]) as step:
            tiny_bed.model.forward(step)
        assert seq.num_computed == 0


def test_a_position_behind_the_context_is_refused_inside_the_step(tiny_bed: Bed, opened: Open) -> None:
    cache = opened(tiny_bed, 2048)
    with cache.sequence([4] * (tiny.CONTEXT + 1)) as seq:
        with pytest.raises(PromptError, match=f"position {tiny.CONTEXT}"), cache.step([seq]) as step:
            tiny_bed.model.forward(step)
        assert seq.num_computed == 0


def test_a_sequence_with_nothing_to_compute_has_no_logits(tiny_bed: Bed, opened: Open) -> None:
    cache = opened(tiny_bed, 64)
    with cache.sequence([1, 2]) as one, cache.sequence([3, 4]) as idle:
        with pytest.raises(PromptError, match="no logits"), cache.step([one, idle], q_lens=[2, 0]) as step:
            tiny_bed.model.forward(step)
        with cache.step([one, idle], q_lens=[2, 0]) as step:
            assert tiny_bed.model.forward(step, rows=[1]).shape == (1, VOCAB)


def poisoned(model: Model, name: str, place: tuple[int, ...]) -> Llama:
    """The model with one weight that is no number."""
    array = getattr(model.weights, name).copy()
    array[place] = np.nan
    changed = {name: array, **({"output": array} if name == "embedding" else {})}
    return Llama(dataclasses.replace(model.weights, **changed))


@pytest.mark.parametrize(
    ("name", "place"),
    [("output_norm", (3,)), ("qkv", (0, 70, 5)), ("qkv", (1, 100, 5)), ("gate_up", (0, 3, 3)), ("attn_norm", (1, 0))],
)
@pytest.mark.parametrize("chunk", [None, 16])
def test_nan_logits_are_an_error_and_nothing_is_cached(
    tiny_model: Model, tiny_bed: Bed, opened: Open, name: str, place: tuple[int, ...], chunk: int | None
) -> None:
    cache = opened(tiny_bed, 128)
    model, prompt = poisoned(tiny_model, name, place), tiny_bed.so_far("mixed")
    with pytest.raises(NumericsError, match="NaN or infinity"):
        generate(model, cache, [prompt], max_tokens=4, chunk=chunk)
    with pytest.raises(NumericsError):
        beam_search(model, cache, prompt, width=2, max_tokens=4, chunk=chunk)
    assert cache.explain(prompt).cached_tokens == 0
    assert cache.stats().computed_tokens == 0
    cache.check_integrity()
    good = generate(tiny_bed.model, cache, [prompt], max_tokens=4)
    assert good.completions[0].tokens == tiny_bed.goldens["mixed"].greedy[:4]


def test_one_bad_prompt_of_a_batch_does_not_spoil_the_cache_for_others(
    tiny_model: Model, tiny_bed: Bed, opened: Open
) -> None:
    untied = dataclasses.replace(tiny_model.weights, embedding=tiny_model.weights.embedding.copy())
    model = Llama(untied)
    untied.embedding[50] = np.inf
    good = [token for token in tiny_bed.so_far("mixed") if token != 50]
    cache = opened(tiny_bed, 256)
    with pytest.raises(NumericsError):
        generate(model, cache, [good, [*good[:20], 50, *good[20:]]], max_tokens=2)
    assert cache.explain(good).cached_tokens == 0
    assert len(generate(model, cache, [good], max_tokens=2, stop_ids={50}).completions[0].tokens) > 0


def test_the_row_that_is_no_number_is_named() -> None:
    logits = np.zeros((3, 4), np.float32)
    check_finite(logits)
    logits[1, 2] = np.inf
    with pytest.raises(NumericsError, match=r"1 of 3 rows.*row 1"):
        check_finite(logits)

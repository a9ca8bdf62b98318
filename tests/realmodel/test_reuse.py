"""Reuse of KV from other requests: prefixes, partial blocks, forks, beams, samples.

The samples run in parallel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import pagedkv as pk
from examples.llama_numpy.beams import beam_search
from examples.llama_numpy.generation import generate
from examples.llama_numpy.sampling import Sampling, log_softmax
from tests.realmodel import tiny
from tests.realmodel.bed import COLD_TOLERANCE, STEPS, Bed, Logits, kv_of, tiny_logits

Open = Callable[..., pk.KVCache]
COMMON = 171  # tokens that shared_a and shared_b begin with


def test_a_prefix_hit_goes_on_as_if_nothing_had_been_cached(bed: Bed, opened: Open) -> None:
    cache = opened(bed, 600, partial_hits=False)
    first, second = bed.so_far("shared_a"), bed.so_far("shared_b")
    with cache.sequence(first) as seq:
        bed.decode(cache, seq, "shared_a")
        computed = kv_of(seq, bed.whole(COMMON))
        with cache.sequence(second) as other:
            assert other.hit_tokens["device"] == other.num_computed == bed.whole(COMMON)
            assert kv_of(other, bed.whole(COMMON)) == computed
            bed.decode(cache, other, "shared_b")


def test_a_hit_of_a_part_of_a_block_is_that_part_and_no_more(bed: Bed, opened: Open) -> None:
    cache = opened(bed, 600)
    first, second = bed.so_far("shared_a"), bed.so_far("shared_b")
    first += [9] * (
        bed.blocks(len(first)) * bed.block_size - len(first)
    )  # whole blocks, or the last is not in the tree
    with cache.sequence(first) as seq, cache.step([seq]) as step:
        bed.model.forward(step)
    with cache.sequence(first[:172]) as seq, cache.sequence(second) as other:
        assert other.hit_tokens["partial"] == COMMON - bed.whole(COMMON)
        assert other.num_computed == COMMON
        assert kv_of(other, COMMON) == kv_of(seq, COMMON)
        bed.decode(cache, other, "shared_b")


def test_a_prompt_that_is_cached_whole_computes_its_last_token_alone(bed: Bed, opened: Open) -> None:
    cache = opened(bed, 600)
    name = "mixed"
    with cache.sequence(bed.so_far(name)) as seq:
        bed.decode(cache, seq, name)
    with cache.sequence(bed.so_far(name)) as seq:
        assert seq.num_computed >= bed.whole(len(bed.goldens[name].ids) - 1)
        bed.decode(cache, seq, name)


def test_forks_go_on_apart_and_write_into_nobody_elses_block(bed: Bed, opened: Open) -> None:
    cache = opened(bed, 600)
    name, golden = "code", bed.goldens["code"]
    with cache.sequence(golden.ids) as seq:
        bed.decode(cache, seq, name, count=3)
        before = kv_of(seq, seq.num_computed)
        straight, astray = seq.fork(2)
        with straight, astray:
            astray.append([5, 6, 7])
            with cache.step([astray]) as step:
                other = bed.model.forward(step)[0]
            assert np.abs(other - bed.cold[name].logits[3]).max() > 0.1, "it is another text now"
            bed.decode(cache, straight, name, start=3, count=3)
            assert kv_of(straight, len(golden.ids) + 2) == before
        bed.decode(cache, seq, name, start=3, count=3)
        assert kv_of(seq, len(golden.ids) + 2) == before


def rescored(bed: Bed, prompt: list[int], continuations: list[list[int]]) -> list[Logits]:
    """Score each continuation in one step with nothing shared.

    Logits [len(tokens), vocab_size] of each.
    """
    longest = len(prompt) + max(map(len, continuations))
    with bed.open(len(continuations) * (longest + bed.block_size)) as cache:
        seqs = [
            cache.sequence([*prompt, *tokens[:-1]], pk.Namespace(tenant=str(i)))
            for i, tokens in enumerate(continuations)
        ]
        with cache.step(seqs) as step:
            ends = zip(step.q_indptr[1:].tolist(), continuations, strict=True)
            rows = [range(end - len(tokens), end) for end, tokens in ends]
            logits = bed.model.forward(step, rows=np.concatenate(rows))
        for seq in seqs:
            seq.release()
    return np.split(logits, np.cumsum([len(tokens) for tokens in continuations])[:-1])


def test_the_beams_have_the_probabilities_of_their_tokens(bed: Bed, opened: Open) -> None:
    cache = opened(bed, 600)
    prompt = bed.so_far("code")
    found = beam_search(bed.model, cache, prompt, width=4, max_tokens=STEPS).beams
    assert len({beam.tokens for beam in found}) == 4
    assert [beam.log_prob for beam in found] == sorted((beam.log_prob for beam in found), reverse=True)
    logits = rescored(bed, prompt, [list(beam.tokens) for beam in found])
    for beam, rows in zip(found, logits, strict=True):
        alone = log_softmax(rows)[np.arange(len(beam.tokens)), beam.tokens].sum()
        assert abs(alone - beam.log_prob) < COLD_TOLERANCE * len(beam.tokens)


def test_a_single_beam_is_the_greedy_continuation(bed: Bed, opened: Open) -> None:
    cache = opened(bed, 600)
    found = beam_search(bed.model, cache, bed.so_far("code"), width=1, max_tokens=STEPS, chunk=5).beams
    assert list(found[0].tokens) == bed.goldens["code"].greedy[:STEPS]


def test_beam_search_finds_what_a_search_without_a_cache_finds(
    tiny_beds: dict[int, Bed], tensors: tiny.Tensors, opened: Open
) -> None:
    width, count = 5, 8
    prompt = tiny_beds[16].so_far("mixed")
    pool: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(count):
        longer = [
            (total + log_prob, [*tokens, token])
            for total, tokens in pool
            for token, log_prob in enumerate(log_softmax(tiny_logits(tensors, [*prompt, *tokens])[-1]).tolist())
        ]
        pool = sorted(longer, reverse=True)[:width]
    for bed in tiny_beds.values():
        found = beam_search(bed.model, opened(bed, 1024), prompt, width=width, max_tokens=count).beams
        assert [list(beam.tokens) for beam in found] == [tokens for _, tokens in pool]
        assert np.allclose([beam.log_prob for beam in found], [total for total, _ in pool], rtol=0, atol=1e-3)


def test_parallel_samples_are_those_that_each_would_be_alone(bed: Bed, opened: Open) -> None:
    cache = opened(bed, 600)
    prompt, sampling = bed.so_far("code"), Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=3)
    result = generate(bed.model, cache, [prompt], samples=8, max_tokens=STEPS, sampling=sampling)
    texts = [completion.tokens for completion in result.completions]
    assert len(texts) == 8
    assert len({tuple(tokens) for tokens in texts}) > 4
    for sample, rows in enumerate(rescored(bed, prompt, texts)):
        draws = sampling.generator(sample)
        assert [sampling.choose(row, draws) for row in rows] == texts[sample]


def test_generate_gives_the_golden_tokens_of_several_prompts_at_once(bed: Bed, opened: Open) -> None:
    cache = opened(bed, 600)
    told: list[tuple[int, int, int]] = []
    prompts = [bed.so_far("code"), bed.so_far("single")]
    result = generate(
        bed.model, cache, prompts, max_tokens=4, chunk=5, on_token=lambda *one: told.append(one)
    )  # fmt: skip
    for completion, name in zip(result.completions, ("code", "single"), strict=True):
        assert completion.tokens == bed.goldens[name].greedy[:4]
        assert [token for prompt, _, token in told if prompt == completion.prompt] == completion.tokens
        assert completion.finished == "length"
    assert result.speed.prompt_tokens >= 14

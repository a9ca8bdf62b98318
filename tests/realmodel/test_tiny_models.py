"""Gemma 3, gpt-oss and Llama 4, tiny, against Hugging Face transformers.

The goldens are its logits and its tokens (make_tiny_goldens.py). Layers see windows of 12 tokens, or chunks of 64, or
all: the cache knows that from the model's config, and the models themselves pass no window. Prompts reach over several
windows and chunks. A cache keeps every layer whole, or by groups each layer's reach alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from tests.realmodel.bed import all_down
from tests.realmodel.tiny_models import MODELS, Floats, TinyGolden, TinyModel, read_golden

BLOCK_SIZE, BLOCKS = 8, 100  # tokens; one request needs 33 blocks
TOLERANCE = 1e-4  # of a logit, relative to the largest one
FAR = 0.1  # likewise: no rounding does that
LONGEST = 220  # tokens of a prompt
OTHERS = ([3] * 20, [4] * 20)  # tokens behind a prefix that the golden prompt does not go on with
FIRST_REACH = {"gemma3": 12, "gpt_oss": 12, "llama4": 64}  # tokens that see all before them in every layer


@dataclass(frozen=True)
class Family:
    """A family's goldens, and the model that must compute them."""

    name: str
    golden: TinyGolden
    model: TinyModel

    @property
    def spec(self) -> pk.KVSpec:
        """As a user makes it, from the config alone."""
        return pk.KVSpec.from_config(self.golden.config, dtype="float32", block_size=BLOCK_SIZE, model=self.name)

    def compute(self, cache: pk.KVCache, seq: pk.Sequence, chunk: int | None = None) -> Floats:
        """Logits of a sequence's tokens that are not computed yet, in one step or in chunks."""
        parts = []
        while seq.num_computed < seq.num_tokens:
            count = seq.num_tokens - seq.num_computed
            with cache.step([seq], q_lens=[min(chunk or count, count)]) as step:
                parts.append(self.model.forward(step))
        return np.concatenate(parts)

    def error(self, logits: Floats, first: int = 0) -> float:
        """The largest difference from the golden logits, relative to the largest of them.

        The rows are those of the prompt's token `first` and the next ones.
        """
        golden = self.golden.logits
        return float(np.abs(logits - golden[first : first + len(logits)]).max() / np.abs(golden).max())

    def check_tokens(self, cache: pk.KVCache, seq: pk.Sequence, logits: Floats) -> None:
        """Go on greedily behind the logits of the prompt, token for token as the golden run."""
        found = [int(logits[-1].argmax())]
        while len(found) < len(self.golden.greedy):
            seq.append([found[-1]])
            found.append(int(self.compute(cache, seq)[-1].argmax()))
        assert found == self.golden.greedy


@remembered
def family_of(name: str) -> Family:
    golden = read_golden(name)
    return Family(name, golden, MODELS[name](golden.config, golden.weights))


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> Family:
    return family_of(request.param)


Open = Callable[..., pk.KVCache]


@pytest.fixture(params=[False, True], ids=["whole", "by group"])
def opened(request: pytest.FixtureRequest, family: Family) -> Iterator[Open]:
    """Opens caches; at the end no block of theirs is held, and their books agree."""
    caches: list[pk.KVCache] = []

    def open_it(**below: Any) -> pk.KVCache:
        caches.append(pk.KVCache(family.spec, pk.Blocks(BLOCKS), **below, by_group=request.param))
        assert (caches[-1].placement.num_groups > 1) == request.param
        return caches[-1]

    yield open_it
    for cache in caches:
        cache.check_integrity()
        assert all(counts["live"] == 0 for counts in cache.stats().blocks.values())
        cache.close()


@pytest.fixture
def cache(opened: Open) -> pk.KVCache:
    return opened()


@pytest.mark.parametrize("chunk", [None, 17], ids=["in one step", "in chunks"])
def test_a_tiny_model_computes_the_logits_and_tokens_of_transformers(
    family: Family, cache: pk.KVCache, chunk: int | None
) -> None:
    with cache.sequence(family.golden.prompt) as seq:
        logits = family.compute(cache, seq, chunk)
        assert len(logits) == len(family.golden.prompt)
        assert family.error(logits) < TOLERANCE
        family.check_tokens(cache, seq, logits)


@pytest.mark.parametrize("common", [220, 101, 13])
def test_a_tiny_model_goes_on_from_a_cached_prefix_as_transformers_does(
    family: Family, cache: pk.KVCache, common: int
) -> None:
    with cache.sequence(family.golden.prompt[:common]) as seq:
        family.compute(cache, seq)
    with cache.sequence(family.golden.prompt) as seq:
        hit = seq.num_computed
        assert common - BLOCK_SIZE < hit == sum(seq.hit_tokens.values())
        logits = family.compute(cache, seq)
        assert family.error(logits, hit) < TOLERANCE
        family.check_tokens(cache, seq, logits)


def test_a_tiny_model_goes_on_from_where_two_others_part_as_transformers_does(
    family: Family, cache: pk.KVCache
) -> None:
    for other in OTHERS:
        with cache.sequence(family.golden.prompt[:101] + other) as seq:
            family.compute(cache, seq)
    with cache.sequence(family.golden.prompt) as seq:
        first = seq.num_computed
        assert seq.hit_tokens["device"] == 96 == first - seq.hit_tokens["partial"]
        logits = family.compute(cache, seq, 17)
        assert family.error(logits, first) < TOLERANCE
        family.check_tokens(cache, seq, logits)


def compute_prompt(family: Family, cache: pk.KVCache) -> None:
    """The prompt and all that follows it, and the request ends."""
    with cache.sequence(family.golden.prompt) as seq:
        family.check_tokens(cache, seq, family.compute(cache, seq, 17))


def go_on(family: Family, cache: pk.KVCache, tier: str) -> None:
    """The prompt comes from a tier; the last logits and all tokens behind it are as before."""
    with cache.sequence(family.golden.prompt) as seq:
        first = seq.num_computed
        assert seq.hit_tokens[tier] == (LONGEST - 1) // BLOCK_SIZE * BLOCK_SIZE == first - seq.hit_tokens["partial"]
        logits = family.compute(cache, seq)
        assert family.error(logits, first) < TOLERANCE
        family.check_tokens(cache, seq, logits)


def test_a_tiny_model_goes_on_from_host_memory_as_transformers_does(family: Family, opened: Open) -> None:
    cache = opened(host_memory=pk.Blocks(BLOCKS))
    compute_prompt(family, cache)
    for _ in range(2):
        all_down(cache)
        go_on(family, cache, "host")
    go_on(family, cache, "device")


def test_a_tiny_model_goes_on_from_disk_also_in_a_cache_that_opens_it_again(
    family: Family, opened: Open, tmp_path: Path
) -> None:
    def disk() -> pk.Disk:
        return pk.Disk(str(tmp_path / "kv"), pk.Blocks(2 * BLOCKS), admission="all")

    cache = opened(disk=disk())
    compute_prompt(family, cache)
    all_down(cache)
    go_on(family, cache, "disk")
    cache.close()
    cache = opened(disk=disk())
    go_on(family, cache, "disk")
    go_on(family, cache, "device")


def test_a_tiny_model_by_groups_holds_what_its_layers_can_read(family: Family) -> None:
    reach = FIRST_REACH[family.name]
    with pk.KVCache(family.spec, pk.Blocks(BLOCKS), by_group=True) as cache:
        with cache.sequence(family.golden.prompt) as seq:
            family.compute(cache, seq, 17)
            first, pages = cache.table.pages(seq.row, 1)
            assert len(seq.blocks) == first + len(pages) == -(-LONGEST // BLOCK_SIZE)
            assert len(pages) <= reach // BLOCK_SIZE + 2
        cache.check_integrity()


def test_requests_of_tiny_models_that_share_steps_compute_the_logits_of_transformers(
    family: Family, cache: pk.KVCache
) -> None:
    lengths, strides = [37, 220, 130], [3, 64, 40]  # all at different places of their windows and chunks
    prompts = [family.golden.prompt[:length] for length in lengths]
    seqs = [cache.sequence(prompt, pk.Namespace(tenant=str(len(prompt)))) for prompt in prompts]
    while going := [(seq, stride) for seq, stride in zip(seqs, strides) if seq.num_computed < seq.num_tokens]:
        starts = [seq.num_computed for seq, _ in going]
        with cache.step(
            [seq for seq, _ in going], q_lens=[min(stride, seq.num_tokens - seq.num_computed) for seq, stride in going]
        ) as step:
            logits = np.split(family.model.forward(step), step.q_indptr[1:-1])
        assert max(family.error(rows, start) for rows, start in zip(logits, starts)) < TOLERANCE
    for seq in seqs:
        seq.release()


def test_a_tiny_model_computes_other_logits_where_the_spec_does_not_say_what_layers_see(family: Family) -> None:
    spec, first = family.spec, FIRST_REACH[family.name]
    seeing_all = pk.KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.block_size)
    with pk.KVCache(seeing_all, pk.Blocks(BLOCKS)) as cache, cache.sequence(family.golden.prompt) as seq:
        logits = family.compute(cache, seq)
    assert family.error(logits[:first]) < TOLERANCE
    assert family.error(logits[first:], first) > FAR

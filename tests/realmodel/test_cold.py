"""With nothing cached: the tokens and logits that an independent implementation computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.llama_numpy.gguf_file import Model
from examples.llama_numpy.tokenizer import Tokenizer
from tests.realmodel import tiny
from tests.realmodel.bed import Bed, read_goldens, tiny_logits

REAL = read_goldens(Path(__file__).parent / "goldens.json")


def assert_golden(bed: Bed, name: str) -> None:
    golden, cold = bed.goldens[name], bed.cold[name].logits
    for place in range(len(golden.greedy)):
        bed.check_token(name, place, cold[place])
    ours = np.take_along_axis(cold, golden.top_ids, axis=1)
    np.testing.assert_allclose(ours, golden.top_logits, rtol=0, atol=bed.tolerance)


@pytest.mark.realmodel
@pytest.mark.parametrize("name", REAL)
def test_smollm2_computes_the_golden_tokens_and_top_20_logits(smollm2_bed: Bed, name: str) -> None:
    assert_golden(smollm2_bed, name)


@pytest.mark.parametrize("size", [1, 8, 16, 64])
def test_the_tiny_model_computes_what_a_plain_float64_llama_computes(tiny_beds: dict[int, Bed], size: int) -> None:
    for name in tiny_beds[size].goldens:
        assert_golden(tiny_beds[size], name)


def test_the_tiny_gemma_computes_what_a_plain_float64_gemma_computes(tiny_gemma_bed: Bed) -> None:
    for name in tiny_gemma_bed.goldens:
        assert_golden(tiny_gemma_bed, name)


def test_the_tiny_models_goldens_are_no_repetition(tiny_beds: dict[int, Bed], tiny_gemma_bed: Bed) -> None:
    for bed in (tiny_beds[16], tiny_gemma_bed):
        followed = [token for golden in bed.goldens.values() for token in golden.greedy]
        assert len(set(followed)) > 20, "or a wrong cache could go unnoticed"


def test_logits_of_every_position_at_once(tiny_beds: dict[int, Bed], tensors: tiny.Tensors) -> None:
    bed = tiny_beds[16]
    ids = bed.so_far("mixed")
    with bed.open(len(ids)) as cache, cache.sequence(ids) as seq, cache.step([seq]) as step:
        logits = bed.model.forward(step, rows=range(len(ids)))
    np.testing.assert_allclose(logits, tiny_logits(tensors, ids), rtol=0, atol=1e-3)


@pytest.mark.realmodel
def test_smollm2_tokenizes_as_its_own_tokenizer_does(smollm2: Model) -> None:
    import json

    tokenizer = Tokenizer(smollm2.vocabulary)
    for name, one in json.loads((Path(__file__).parent / "goldens.json").read_text(encoding="utf-8")).items():
        assert tokenizer.encode(one["prompt"], special=True) == one["ids"], name
        assert tokenizer.decode(one["ids"]) == one["prompt"], name

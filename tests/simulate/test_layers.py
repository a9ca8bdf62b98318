"""The cost of a step in layers with a window or chunks, and in a mixture of experts."""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.lab.replay.progress import Silent
from pagedkv.lab.replay.weights import ModelShape
from pagedkv.lab.simulate import MODELS, SYSTEMS, Hardware, parse_gpus, simulate
from pagedkv.lab.simulate.contiguous import ContiguousServer
from pagedkv.lab.simulate.layers import ShortLayers, spec_of
from pagedkv.lab.simulate.served import NEVER, ServedModel
from pagedkv.lab.sizing import LayerGroup, Model, mla
from tests.simulate.conftest import CHUNKS, SIX, WINDOWS

SHORT = {
    "window 1": ShortLayers(3, 5, 1, None), "window 7": ShortLayers(3, 5, 7, None),
    "chunk 1": ShortLayers(3, 5, None, 1), "chunk 8": ShortLayers(3, 5, None, 8),
}  # fmt: skip


def seen(layers: ShortLayers, position: int) -> set[int]:
    """The positions that a token there attends to."""
    first = max(0, position - layers.window + 1) if layers.window else position // layers.chunk * layers.chunk
    return set(range(first, position + 1))


@pytest.mark.parametrize("name", SHORT)
def test_keys_and_tokens_read_are_those_that_each_new_token_sees(name):
    layers, random = SHORT[name], np.random.default_rng(1)
    q = random.integers(0, 40, 200)
    context = q + random.integers(0, 60, 200)
    by_token = [[seen(layers, p) for p in range(c - n, c)] for n, c in zip(q.tolist(), context.tolist(), strict=True)]
    assert layers.keys(q, context).tolist() == [sum(map(len, each)) for each in by_token]
    assert layers.tokens(q, context).tolist() == [len(set().union(*each)) for each in by_token]


@pytest.mark.parametrize("model", [WINDOWS, CHUNKS], ids=["window", "chunk"])
def test_a_step_costs_what_its_layers_see(machine, model):
    hardware = machine(4000, model=model)
    (short,) = hardware.roofline().short
    q, context = np.array([1, 30, 200]), np.array([1000, 300, 200])
    of_key, of_token = 4 * 2 * 8, 2 * 8 * 2
    everything = int((q * (2 * context - q + 1)).sum()) // 2
    flops = 2 * SIX.matmul_weights * 231 + of_key * (2 * everything + 4 * int(short.keys(q, context).sum()))
    read = model.weight_bytes + of_token * (2 * 1500 + 4 * int(short.tokens(q, context).sum()))
    gpu = hardware.gpu
    assert hardware.step_s(q, context) == pytest.approx(
        max(flops / gpu.flops_per_s / 0.5, read / gpu.read_bytes_per_s / 0.8) + 0.001
    )
    far = machine(4000, model=ServedModel(Model("far", (LayerGroup(6, 1, 8),), 20_000), SIX))
    assert hardware.step_s(q, context) < far.step_s(q, context)
    few = np.array([60])
    assert hardware.step_s(few, few) == pytest.approx(far.step_s(few, few)), "all that there is lies in reach"


@pytest.mark.parametrize("system", ["contiguous", "pow2", "exact"])
@pytest.mark.parametrize("model", [WINDOWS, CHUNKS], ids=["window", "chunk"])
def test_steps_reckoned_together_come_to_the_same_as_one_by_one(machine, requests, system, model):
    random = np.random.default_rng(5)
    rows = [(40 * i, int(random.integers(1, 300)), int(random.integers(1, 60))) for i in range(40)]
    what = requests(*rows), SYSTEMS[system], machine(1000, model=model), 400, 6, 50, Silent()
    together, apart = (ContiguousServer(*what, together=flag).run().to_json() for flag in (True, False))
    assert {**together, "wall_s": 0} == {**apart, "wall_s": 0}


@pytest.mark.parametrize("model", [WINDOWS, CHUNKS], ids=["window", "chunk"])
def test_one_request_costs_the_same_in_blocks_and_in_a_region(machine, requests, model):
    results = simulate(
        requests((0, 700, 90)), machine(4000, model=model), ["exact", "paged"], max_running=4, max_batch_tokens=64
    )
    assert results[0].seconds == pytest.approx(results[1].seconds)
    assert results[0].steps == results[1].steps


def test_a_step_reads_the_experts_that_its_tokens_meet():
    """Of gpt-oss-20b: 24 layers of 32 experts of 24,891,840 weights, of which a token meets 4."""
    model = MODELS["gpt-oss-20b"]
    assert model.expert_bytes == 2 * 24 * 32 * 24_891_840
    gpu, number = parse_gpus("H100")
    hardware = Hardware(gpu, number, model)
    one = np.ones(1, np.int32)
    read = model.sizes.params_per_token * 2 + model.kv_bytes_per_token
    assert hardware.step_s(one, one) == pytest.approx(read / (0.8 * 3.35e12) + 0.002)
    many = np.full(250, 1, np.int32)
    read = model.weight_bytes + 250 * model.kv_bytes_per_token
    assert hardware.step_s(many, many) == pytest.approx(read / (0.8 * 3.35e12) + 0.002)
    two = np.ones(2, np.int32)
    met = model.weight_bytes - model.expert_bytes * (1 - 4 / 32) ** 2 + 2 * model.kv_bytes_per_token
    assert hardware.step_s(two, two) == pytest.approx(met / (0.8 * 3.35e12) + 0.002)
    assert MODELS["llama-3-8b"].expert_bytes == 0


def test_a_token_passes_the_experts_it_meets_and_those_that_are_shared():
    assert ModelShape("m", 2, 1, 1, 8, 16, 32, num_mlps=3).matmul_weights == 2 * (16 * 8 * 4 + 3 * 3 * 16 * 32)


def test_context_at_which_attention_costs_as_much_as_all_else():
    """Only attention of layers that see everything grows with the context."""
    of_key = 2 * 2 * 8
    assert WINDOWS.balance_tokens == (SIX.matmul_weights + of_key * 4 * 65) / (of_key * 2)
    assert CHUNKS.balance_tokens == (SIX.matmul_weights + of_key * 4 * 64) / (of_key * 2)
    assert MODELS["llama-3-8b"].balance_tokens == MODELS["llama-3-8b"].shape.balance_tokens
    assert MODELS["mistral-7b-v0.1"].balance_tokens == NEVER


def test_the_spec_of_a_model_has_its_layers_as_they_see():
    spec = MODELS["gpt-oss-120b"].spec(32)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size) == (36, 8, 64, 32)
    assert sorted(map(str, spec.windows)) == ["128"] * 18 + ["None"] * 18
    assert spec.bytes_per_token == MODELS["gpt-oss-120b"].kv_bytes_per_token
    assert MODELS["llama-4-scout"].spec(16).chunks.count(8192) == 36


@pytest.mark.parametrize(
    ("groups", "kind", "words"),
    [
        ((LayerGroup(3, 1, 8),), pk.InvalidArgument, "of the layers of m all see equally far: take tiered"),
        ((LayerGroup(3, 1, 8, window=9),), pk.InvalidArgument, "all see equally far"),
        ((LayerGroup(3, 1, 8, window=9), LayerGroup(1, 1, 8, window=99)), pk.InvalidArgument, "none sees everything"),
        ((mla(3, 512, 64),), pk.UnsupportedVariant, "no K and V of one shape"),
        ((LayerGroup(3, 1, 8), LayerGroup(1, 2, 8, window=99)), pk.UnsupportedVariant, "layers of a shape"),
        ((LayerGroup(3, 1, 8), LayerGroup(1, 1, 8, chunk=100)), pk.InvalidArgument, "multiple of block_size"),
    ],
)
def test_a_model_whose_layers_cannot_be_kept_apart_is_refused(groups, kind, words):
    with pytest.raises(kind, match=words):
        spec_of("m", groups, 16)

"""The same loop with the cache on a GPU.

It runs on CuPy there, and elsewhere on a stand-in with the kernels interpreted.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from examples.llama_numpy.beams import beam_search
from examples.llama_numpy.devices import array_module
from examples.llama_numpy.gguf_file import Model
from examples.llama_numpy.model import Llama
from examples.llama_numpy.serving import steps, submit
from examples.llama_numpy.weights import Floats
from pagedkv.scheduler import Branch
from tests.ptxsim.fixture import interpreted_backend
from tests.realmodel.bed import Bed
from tests.realmodel.device_arrays import METHODS, STAND_IN, DeviceArray, DeviceLlama

NARROW_TOLERANCE = 0.05  # of a logit, with K, V and queries in float16

backend = interpreted_backend(races=False)


def serve_goldens(bed: Bed, model: Llama, cache: pk.KVCache, counts: dict[str, int], tolerance: float) -> None:
    """Serve prompts with the scheduler, and follow the golden tokens.

    The logits are the golden ones.
    """
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(len(counts), 64, watermark=0.0))
    requests = {submit(model, scheduler, bed.so_far(name), max_tokens=count): name for name, count in counts.items()}

    def follow(branch: Branch, row: Floats) -> int:
        golden, place = bed.goldens[requests[branch.request]], branch.num_output
        off = np.abs(row[golden.top_ids[place]] - golden.top_logits[place]).max()
        assert off < tolerance, f"token {place} behind {requests[branch.request]!r}: a logit is off by {off}"
        if tolerance <= bed.tolerance:
            bed.check_token(requests[branch.request], place, row)
        return golden.greedy[place]

    for _ in steps(model, scheduler, follow):
        scheduler.check_integrity()
    assert all(request.state == "finished" for request in requests)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", NARROW_TOLERANCE)])
def test_device_arrays_and_the_cuda_kernels_serve_the_golden_tokens(
    tiny_beds: dict[int, Bed], backend: Any, dtype: str, tolerance: float
) -> None:
    """Two prompts in one step, decoding in batches; then a prompt whose first block is cached."""
    bed = tiny_beds[8]
    model = DeviceLlama(bed.model.weights, STAND_IN, q_dtype=dtype)
    spec = model.config.kv_spec("tiny", block_size=8, dtype=dtype)
    with pk.KVCache(spec, pk.Blocks(12), backend=backend) as cache:
        serve_goldens(bed, model, cache, {"code": 3, "france": 4}, tolerance)
        before = cache.stats().hit_tokens["device"]
        serve_goldens(bed, model, cache, {"code": 1}, tolerance)
        assert cache.stats().hit_tokens["device"] == before + 8


def test_beams_on_device_arrays_are_those_on_host_arrays(tiny_beds: dict[int, Bed], backend: Any) -> None:
    bed = tiny_beds[8]
    model = DeviceLlama(bed.model.weights, STAND_IN)
    with bed.open(96) as host, bed.open(96, backend=backend) as device:
        wanted, found = (
            beam_search(one, cache, bed.so_far("france"), width=3, max_tokens=3).beams
            for one, cache in ((bed.model, host), (model, device))
        )
    assert [beam.tokens for beam in found] == [beam.tokens for beam in wanted]


def test_the_weights_go_to_the_device_once_and_a_tied_layer_is_one_array(tiny_beds: dict[int, Bed]) -> None:
    weights = tiny_beds[16].model.weights
    moved = Llama(weights, STAND_IN).weights
    assert moved.output is moved.embedding
    assert all(isinstance(array, DeviceArray) for array in moved.stored().values())
    assert Llama(weights).weights is weights


def test_a_host_array_beside_a_device_array_is_noticed() -> None:
    array = STAND_IN.asarray([1.0, 2.0])
    mistakes = (
        lambda: array + np.ones(2), lambda: array[np.array([0])], lambda: np.asarray(array), lambda: np.mean(array),
    )  # fmt: skip
    for mistake in mistakes:
        with pytest.raises(TypeError):
            mistake()


def test_cupy_has_whatever_the_stand_in_has() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    cupy = importlib.import_module("cupy")
    assert not [name for name in vars(STAND_IN) if not hasattr(cupy, name)]
    assert not [name for name in METHODS if not hasattr(cupy.ndarray, name)]


Place = Callable[[Bed, str], tuple[Llama, pk.KVCache]]


@pytest.fixture
def on_gpu() -> Any:
    """A bed's model on a GPU, and a cache there."""

    def place(bed: Bed, dtype: str) -> tuple[Llama, pk.KVCache]:
        model = Llama(bed.model.weights, array_module(0), q_dtype=dtype)
        spec = model.config.kv_spec("on a GPU", block_size=bed.block_size, dtype=dtype)
        return model, pk.KVCache(spec, pk.Blocks(bed.blocks(600)), pk.Blocks(bed.blocks(600)), device="cuda:0")

    return place


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", NARROW_TOLERANCE)])
@pytest.mark.parametrize("size", [1, 8, 16, 64])
def test_cupy_serves_the_tiny_models_golden_tokens(
    tiny_beds: dict[int, Bed], on_gpu: Place, size: int, dtype: str, tolerance: float
) -> None:
    bed = tiny_beds[size]
    model, cache = on_gpu(bed, dtype)
    with cache:
        for _ in range(2):
            serve_goldens(bed, model, cache, dict.fromkeys(("code", "mixed", "single"), 16), tolerance)


@pytest.mark.gpu
@pytest.mark.realmodel
def test_cupy_serves_smollm2s_golden_tokens(smollm2_bed: Bed, on_gpu: Place) -> None:
    bed = smollm2_bed
    model, cache = on_gpu(bed, "float32")
    with cache:
        for _ in range(2):
            serve_goldens(bed, model, cache, dict.fromkeys(("code", "mixed", "single"), 16), bed.tolerance)


@pytest.mark.gpu
def test_the_command_answers_on_a_gpu_as_on_the_cpu(
    tiny_path: Any, tiny_model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.llama_numpy import command

    told = []
    for place in ([], ["--device", "cuda:0"]):
        assert command.main(["--model", str(tiny_path), "--plain", "--max-tokens", "6", *place, "the sand"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]

"""A scheduler over groups of layers on a GPU gives the tokens that follow from attention.

The PTX interpreter runs the kernels. The CPU says which logits and tokens are right, over a roomy cache of all tokens
and one request at a time. Pages leave for the host and the disk while requests run, and come back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.scheduler import Branch, Plan, SchedulerOptions
from tests.cache.test_by_group import DIM, HEADS, kv_of
from tests.ptxsim.fixture import interpreted_backend

from .conftest import Server

backend = interpreted_backend(races=False)
SIZE, VOCABULARY = 4, 7
CLEAR = 0.01  # by how much the best logit leads at least: rounding decides no token
WEIGHTS = np.random.default_rng(7).standard_normal((VOCABULARY, 2 * HEADS * DIM)).astype(np.float32)


def spec_of(dtype: str, *reaches: dict[str, int]) -> pk.KVSpec:
    scales = None if dtype == "float16" else "token_head"
    layers = [pk.Attention(HEADS, DIM, dtype=dtype, scales=scales, **reach) for reach in reaches]
    return pk.KVSpec.of(layers, block_size=SIZE, model="test@1")


SPECS = {
    "int8": spec_of("int8", {}, {"window": 9}),
    "e4m3": spec_of("float8_e4m3", {}, {"window": 9}),
    "e5m2 chunks": spec_of("float8_e5m2", {"chunk": 12}, {}, {"chunk": 12}),
    "int8 of three": spec_of("int8", {"window": 9}, {}, {"window": 14}),
    "float16": spec_of("float16", {}, {"window": 9}, {"window": 9}),
}


class Attending(Server):
    """A model whose next token is the best of logits over all layers' attention.

    Attributes
    ----------
    dtype : of its queries: float16, for which the fast kernels are, or float32.
    logits : by prompt and number of tokens.
    """

    dtype: str
    logits: dict[tuple[bytes, int], NDArray[np.float32]]

    def write(self, plan: Plan, step: pk.Step) -> None:
        out = np.zeros((len(step.tokens), 2 * HEADS, DIM), np.float32)
        for layer in range(self.cache.spec.num_layers):
            q, k, v = kv_of(layer, step.tokens, step.positions)
            step.write(layer, k, v)
            out += step.attend(layer, q.astype(self.dtype))
        logits = out[plan.last_tokens].reshape(len(plan.lanes), -1) @ WEIGHTS.T
        for branch, row in zip(plan.lanes, logits, strict=True):
            self.logits[branch.request.prompt.tobytes(), len(branch.tokens)] = row

    def choose(self, branch: Branch) -> Any:
        return int(self.logits[branch.request.prompt.tobytes(), len(branch.tokens)].argmax())


def served(
    cache: pk.KVCache, prompts: list[NDArray[np.int32]], num_new: int, dtype: str = "float32", **options: Any
) -> Attending:
    """A scheduler over a cache that has served requests beside each other."""
    options = {"max_running": 4, "max_batch_tokens": 24, "preemption": "swap", "watermark": 0.0} | options
    server = Attending(cache, SchedulerOptions(**options))
    server.dtype, server.logits = dtype, {}
    requests = [server.submit(tokens, num_new) for tokens in prompts]
    server.run()
    cache.check_integrity()
    assert all(len(request.outputs[0]) == num_new for request in requests)
    return server


def assert_right(server: Attending, prompts: list[NDArray[np.int32]], num_new: int) -> None:
    """Logits are those of the CPU over all tokens, a request at a time."""
    with pk.KVCache(server.cache.spec, memory=pk.Blocks(400)) as cache:
        alone = served(cache, prompts, num_new, server.dtype, max_running=1, max_batch_tokens=64)
    assert server.logits.keys() == alone.logits.keys()
    for key, wanted in alone.logits.items():
        second, first = np.sort(wanted)[-2:]
        assert first - second > CLEAR, "choose other prompts: rounding would decide"
        np.testing.assert_allclose(server.logits[key], wanted, atol=CLEAR / 2)


def prompts_of(seed: int, *lengths: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, length).astype(np.int32) for length in lengths]


def test_a_request_that_was_swapped_to_the_host_goes_on_with_the_right_tokens(backend: Any) -> None:
    spec, prompts = SPECS["int8"], prompts_of(1, 8, 8, 8)
    with pk.KVCache(spec, pk.Blocks(6), pk.Blocks(60), by_group=True, backend=backend) as cache:
        server = served(cache, prompts, 2)
        moved = cache.stats().moved_bytes.get("host_to_device", 0)
    assert_right(server, prompts, 2)
    stats = server.scheduler.stats()
    assert (stats.preempted_by_swap, stats.preempted_by_recompute) == (1, 0), "it has to be tight"
    assert moved > 0, "it came back from the host"


MANY = prompts_of(2, 11, 14, 12, 9)
MANY.append(MANY[0].copy())  # its prefix is there, on the device or below


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preemption", "blocks", "dtype"),
    [
        ("int8", "swap", 7, "float32"), ("int8", "recompute", 10, "float16"), ("int8 of three", "swap", 10, "float16"),
        ("e4m3", "swap", 10, "float16"), ("e5m2 chunks", "swap", 8, "float16"), ("float16", "swap", 10, "float16"),
    ],
)  # fmt: skip
def test_requests_that_are_suspended_and_resumed_get_the_right_tokens(
    name: str, preemption: str, blocks: int, dtype: str, backend: Any
) -> None:
    spec = SPECS[name]
    with pk.KVCache(spec, pk.Blocks(blocks), pk.Blocks(60), by_group=True, backend=backend) as cache:
        server = served(cache, MANY, 9, dtype, preemption=preemption)
        assert cache.stats().moved_bytes["host_to_device"] > 0
    assert_right(server, MANY, 9)
    stats = server.scheduler.stats()
    by_swap, by_recompute = stats.preempted_by_swap, stats.preempted_by_recompute
    assert (by_swap > 0, by_recompute > 0) == (preemption == "swap", preemption == "recompute")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "e5m2 chunks"])
def test_prompts_of_an_earlier_scheduler_are_hit_on_the_disk(name: str, backend: Any, tmp_path: Path) -> None:
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(200), write="all", admission="all", segment_size="256KiB")
    for life in range(2):
        with pk.KVCache(SPECS[name], pk.Blocks(8), None, disk, by_group=True, backend=backend) as cache:
            server = served(cache, MANY, 9)
            assert (cache.stats().hit_tokens["disk"] > 0) or not life
        assert_right(server, MANY, 9)

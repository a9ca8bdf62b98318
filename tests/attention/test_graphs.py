"""A captured graph of plan and run gives the attention of the lengths at its replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.attention import PagedAttention, write_kv
from pagedkv.attention import paged_attention as paged_attention_module
from pagedkv.errors import InvalidArgument, KernelsUnavailable
from pagedkv.kernels.nvrtc import default_nvrtc
from pagedkv.kernels.select import KERNELS
from pagedkv.reference import paged_attention
from pagedkv.tiers.device import DeviceTier
from tests.attention.noting import Noting

SIDE = 7  # a stream that is not the current one
SIZE, WIDTH = 16, 8  # of a block, and of block tables
ROUNDS = ([5, 100], [128, 0], [1, 33])
KERNEL_NAMES = [
    kernel.name if kernel.name == "decode_mla" else pytest.param(kernel.name, marks=pytest.mark.slow)
    for kernel in KERNELS
]


@pytest.fixture
def backend() -> Any:
    """An interpreter that captures."""
    from tests.ptxsim.graph import CapturingBackend

    try:
        default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return CapturingBackend(num_sms=2)


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_a_captured_graph_replays_with_other_lengths(kernel: str, backend: Any) -> None:
    rng = np.random.default_rng(0)
    latent = kernel.startswith("decode_mla")
    kv_heads, group, dim, dim_v = (1, 16 if kernel == "decode_mla" else 64, 320, 256) if latent else (2, 4, 64, 64)
    pool = rng.standard_normal((2 * WIDTH, 2, SIZE, kv_heads, dim)).astype(np.float16)
    pool[:, 1, ..., :dim_v] = pool[:, 0, ..., :dim_v] if latent else pool[:, 1]
    q = rng.standard_normal((2, kv_heads * group, dim)).astype(np.float16)
    attention = PagedAttention(
        num_qo_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, block_size=SIZE,
        max_sequences=2, kernel=kernel, v_in_k=latent, softmax_scale=dim**-0.5, device=backend,
    )  # fmt: skip
    on_device = backend.asarray(pool)
    k, v = on_device[:, 0], None if latent else on_device[:, 1]
    tables, lens = backend.zeros((2, WIDTH), np.int32), backend.asarray(np.ones(2, np.int32))
    queries, out = backend.asarray(q), backend.empty((*q.shape[:2], dim_v), np.float16)
    backend.begin_capture()
    attention.plan(tables, lens)
    attention.run(queries, k, v, out=out)
    graph = backend.end_capture()
    assert np.isnan(out).all(), "a captured launch ran"
    for round_lens in ROUNDS:
        tables[...] = rng.permutation(2 * WIDTH).reshape(2, WIDTH)
        lens[...] = round_lens
        out[...] = np.nan
        backend.replay(graph)
        exact = paged_attention(
            q.astype(np.float64), pool[:, 0], pool[:, 1, ..., :dim_v], tables, lens, np.arange(3),
            out=np.zeros(out.shape, np.float64),
        )  # fmt: skip
        assert np.abs(np.asarray(out, np.float64) - exact).max() < 2e-3


def test_a_graph_of_writes_and_runs_replays_with_the_next_steps_arrays(backend: Any) -> None:
    """The loop of docs/kernels.md: two rows of which one, and then both, have a sequence."""
    rng = np.random.default_rng(0)
    attention = PagedAttention(num_qo_heads=2, num_kv_heads=1, head_dim=64, max_sequences=2, device=backend)
    caches = [backend.asarray(np.zeros((4, SIZE, 1, 64), np.float16)) for _ in "kv"]
    tables, lens = backend.asarray(np.full((2, 2), -1, np.int32)), backend.asarray(np.zeros(2, np.int32))
    slots = backend.asarray(np.full(2, -1, np.int64))
    q, k, v = (backend.asarray(np.zeros((2, heads, 64), np.float16)) for heads in (2, 1, 1))
    out = backend.empty((2, 2, 64), np.float16)

    def layers() -> None:
        attention.plan(tables, lens)
        write_kv(k, v, *caches, slots, device=backend)
        attention.run(q, *caches, out=out)

    layers()
    backend.begin_capture()
    layers()
    graph = backend.end_capture()
    tables[...] = [[3, 1], [0, 2]]
    for step in range(1, 20):
        lens[...], slots[...] = (step, 0), (3 * SIZE + step - 1 if step <= SIZE else SIZE + step - 1 - SIZE, -1)
        if step > 9:
            lens[1], slots[1] = step - 9, step - 10
        for array in (q, k, v):
            array[...] = rng.standard_normal(array.shape)
        backend.replay(graph)
        exact = paged_attention(
            np.asarray(q, np.float64), *caches, np.asarray(tables), np.asarray(lens), np.arange(3),
            out=np.zeros(out.shape, np.float64),
        )  # fmt: skip
        used = slice(0, 2 if step > 9 else 1)
        assert np.abs(np.asarray(out, np.float64) - exact)[used].max() < 2e-3
    assert (np.asarray(caches[0])[3] != 0).any(), "the first block was written"


def test_no_attention_is_made_within_a_capture(backend: Any) -> None:
    sizes: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 1, "head_dim": 64, "device": backend}
    backend.begin_capture()
    with pytest.raises(InvalidArgument, match="a graph is being captured"):
        PagedAttention(**sizes, block_size=SIZE, max_sequences=2)
    assert backend.end_capture() == []
    PagedAttention(**sizes, block_size=SIZE, max_sequences=2)
    backend.begin_capture(SIDE)
    with pytest.raises(InvalidArgument, match=r"on another stream.*before the capture"):
        PagedAttention(**sizes, block_size=SIZE, max_sequences=2)


def test_within_another_streams_capture_no_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Noting()

    def refuse() -> None:
        raise InvalidArgument("a graph is being captured on another stream")

    monkeypatch.setattr(backend, "synchronize", refuse)
    monkeypatch.setattr(paged_attention_module, "make_plan", lambda *arguments, **options: pytest.fail("too late"))
    with pytest.raises(InvalidArgument, match="on another stream"):
        PagedAttention(num_qo_heads=4, num_kv_heads=1, head_dim=64, max_sequences=2, device=backend)


def test_a_steps_first_attention_within_a_capture_is_refused_and_works_later(backend: Any) -> None:
    spec = pk.KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16", block_size=SIZE, model="toy")
    ones = backend.asarray(np.ones((20, 1, 64), np.float16))
    with (
        pk.KVCache(spec, pk.Blocks(8), backend=backend) as cache,
        cache.sequence(range(20)) as seq,
        cache.step([seq]) as step,
    ):
        backend.begin_capture()
        with pytest.raises(InvalidArgument, match="a graph is being captured"):
            step.write(0, ones, ones)
        assert backend.end_capture() == [], "the step's arrays are not on the device yet"
        step.write(0, ones, ones)
        backend.begin_capture(SIDE)
        with pytest.raises(InvalidArgument, match="or call step"):
            step.attend(0, ones, stream=SIDE)
        assert backend.end_capture() == []
        assert np.allclose(backend.to_host(step.attend(0, ones)).astype(float), 1.0, atol=1e-3)
        backend.begin_capture()
        step.attend(0, ones)
        assert len(backend.end_capture()) == 1, "the plan is of the step"


def test_each_call_of_a_step_launches_on_the_one_stream_that_the_tier_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for, launched on and noted for moves is one stream."""
    asked: list[Any] = []
    monkeypatch.setattr(DeviceTier, "before_use", lambda self, stream: asked.append(stream) or stream or SIDE)
    noted: list[Any] = []
    monkeypatch.setattr(DeviceTier, "launched_on", lambda self, stream: noted.append(stream))
    backend = Noting()
    spec = pk.KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16", block_size=SIZE, model="toy")
    ones = np.ones((20, 1, 64), np.float16)
    with (
        pk.KVCache(spec, pk.Blocks(8), backend=backend) as cache,
        cache.sequence(range(20)) as seq,
    ):
        with cache.step([seq]) as step:
            for stream in (None, 9):
                step.write(0, ones, ones, stream=stream)
                step.attend(0, ones, stream=stream)
        seq.gather()
    streams = [launch.stream for launch in backend.launches]
    assert asked == [None, None, 9, 9, None]
    assert noted == [SIDE, SIDE, 9, 9, SIDE]
    assert set(streams) == {SIDE, 9}
    assert streams == [*sorted(streams[:-1]), SIDE]

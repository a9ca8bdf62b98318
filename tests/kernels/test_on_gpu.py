"""What only a GPU can show.

Graphs replayed with other lengths, pools past 2^31 elements, and NVIDIA's own checkers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.attention import PagedAttention
from pagedkv.attention.places import cuda_backend
from pagedkv.errors import KernelsUnavailable, UnsupportedVariant
from pagedkv.kernels.block_moves import BlockMoves
from pagedkv.kernels.select import KERNELS
from pagedkv.reference import paged_attention
from pagedkv.tiers import DeviceTier, HostTier
from pagedkv.tiers.mover import transfer

pytestmark = pytest.mark.gpu

HEADS, GROUP, DIM, SIZE = 2, 4, 64, 16
# Names of tests for NVIDIA's checkers: of every attention kernel one at least.
SANITIZED = "cupy and (ragged or mixed_batch or all_heads or every_schedule or slots or merge)"


@pytest.fixture(scope="module")
def gpu() -> Any:
    """CuPy, where it has a device."""
    try:
        cuda_backend(0)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    import cupy

    return cupy


def heads_of(kernel: str) -> dict[str, Any]:
    """The model's part of an attention: latents for the kernels that take nothing else."""
    if kernel.startswith("decode_mla"):
        qo_heads = 16 if kernel == "decode_mla" else 64
        sizes = {"num_qo_heads": qo_heads, "num_kv_heads": 1, "head_dim": 320, "head_dim_v": 256}
        return {**sizes, "v_in_k": True, "softmax_scale": 320**-0.5}
    return {"num_qo_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": DIM, "head_dim_v": DIM}


def kv_of(pool: Any, heads: dict[str, Any]) -> tuple[Any, Any]:
    """K and V of a pool [num_blocks, 2, ...]; of latents both are K's."""
    return pool[:, 0], pool[:, 0, ..., : heads["head_dim_v"]] if "v_in_k" in heads else pool[:, 1]


def attention_by(kernel: str, heads: dict[str, Any], max_sequences: int) -> PagedAttention:
    """Attention by a kernel, where the GPU has its instructions."""
    try:
        return PagedAttention(**heads, block_size=SIZE, max_sequences=max_sequences, kernel=kernel)
    except UnsupportedVariant as error:
        pytest.skip(str(error))


def batch(rng: np.random.Generator, num_blocks: int, lens: list[int]) -> tuple[Any, Any]:
    """Block tables of fixed width and lengths."""
    width = 40
    tables = rng.permutation(num_blocks)[: len(lens) * width].reshape(len(lens), width).astype(np.int32)
    return tables, np.array(lens, np.int32)


@pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS])
def test_a_captured_graph_replays_with_other_lengths(gpu: Any, kernel: str) -> None:
    rng, heads = np.random.default_rng(0), heads_of(kernel)
    dim = heads["head_dim"]
    pool = gpu.asarray(rng.standard_normal((200, 2, SIZE, heads["num_kv_heads"], dim)).astype(np.float16))
    q = gpu.asarray(rng.standard_normal((4, heads["num_qo_heads"], dim)).astype(np.float16))
    out = gpu.full((4, heads["num_qo_heads"], heads["head_dim_v"]), np.nan, np.float16)
    attention = attention_by(kernel, heads, 4)
    attention.prepare()
    k, v = kv_of(pool, heads)
    tables, lens = (gpu.asarray(array) for array in batch(rng, 200, [1, 1, 1, 1]))
    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        attention.plan(tables, lens, stream=stream)
        attention.run(q, k, None if "v_in_k" in heads else v, out=out, stream=stream)
        graph = stream.end_capture()
    host_k, host_v = kv_of(pool.get(), heads)
    for round_lens in ([5, 600, 0, 17], [640, 640, 640, 640], [1, 2, 3, 4], [0, 0, 0, 0]):
        new_tables, new_lens = batch(rng, 200, round_lens)
        tables.set(new_tables)
        lens.set(new_lens)
        out.fill(np.nan)
        gpu.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        exact = paged_attention(
            q.get().astype(np.float64), host_k, host_v, new_tables, new_lens, np.arange(5),
            out=np.zeros(out.shape, np.float64),
        )  # fmt: skip
        assert np.abs(out.get() - exact).max() < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS])
def test_a_pool_past_two_to_the_31_elements_is_read_at_its_end(gpu: Any, kernel: str) -> None:
    heads = heads_of(kernel)
    kv_heads, dim = heads["num_kv_heads"], heads["head_dim"]
    num_blocks = 2**31 // (2 * SIZE * kv_heads * dim) + 100
    if gpu.cuda.Device().mem_info[0] < num_blocks * 2 * SIZE * kv_heads * dim * 2 + (1 << 30):
        pytest.skip("less than 6 GiB of GPU memory are free")
    rng = np.random.default_rng(1)
    pool = gpu.full((num_blocks, 2, SIZE, kv_heads, dim), np.nan, np.float16)
    used = rng.standard_normal((3, 2, SIZE, kv_heads, dim)).astype(np.float16)
    pool[-3:] = gpu.asarray(used)
    table = np.arange(num_blocks - 3, num_blocks, dtype=np.int32)[None]
    q = rng.standard_normal((1, heads["num_qo_heads"], dim)).astype(np.float16)
    attention = attention_by(kernel, heads, 1)
    attention.plan(gpu.asarray(table), gpu.asarray(np.array([45], np.int32)))
    k, v = kv_of(pool, heads)
    found = attention.run(gpu.asarray(q), k, None if "v_in_k" in heads else v)
    exact = paged_attention(
        q.astype(np.float64), *kv_of(used, heads), np.array([[0, 1, 2]]), np.array([45]), np.array([0, 1]),
        out=np.zeros(found.shape, np.float64),
    )  # fmt: skip
    assert np.abs(found.get() - exact).max() < 2e-3


def test_two_streams_with_plans_of_their_own_do_not_disturb_each_other(gpu: Any) -> None:
    rng = np.random.default_rng(2)
    pool = gpu.asarray(rng.standard_normal((200, 2, SIZE, HEADS, DIM)).astype(np.float16))
    q = gpu.asarray(rng.standard_normal((4, HEADS * GROUP, DIM)).astype(np.float16))
    tables, lens = (gpu.asarray(array) for array in batch(rng, 200, [640, 3, 333, 90]))
    plans = [
        PagedAttention(num_qo_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM, block_size=SIZE, max_sequences=4)
        for _ in range(2)
    ]
    streams = [gpu.cuda.Stream(non_blocking=True) for _ in plans]
    outs = [gpu.empty_like(q) for _ in plans]
    for plan, stream in zip(plans, streams, strict=True):
        plan.prepare()
        plan.plan(tables, lens, stream=stream)
    gpu.cuda.Device().synchronize()
    for _ in range(50):
        for plan, stream, out in zip(plans, streams, outs, strict=True):
            plan.run(q, pool[:, 0], pool[:, 1], out=out, stream=stream)
    gpu.cuda.Device().synchronize()
    host = pool.get()
    exact = paged_attention(q.get().astype(np.float64), host[:, 0], host[:, 1], tables.get(), lens.get(), np.arange(5))
    for out in outs:
        assert np.abs(out.get() - exact).max() < 2e-3
    assert (outs[0] == outs[1]).all()


@pytest.mark.parametrize("block_bytes", [96, 4096, 96 * 1024])
def test_small_blocks_move_to_page_locked_memory_and_back_by_a_kernel(gpu: Any, block_bytes: int) -> None:
    device, host = (kind(200, block_bytes, device="cuda:0") for kind in (DeviceTier, HostTier))
    copied: list[int] = []
    moves = BlockMoves(cuda_backend(0))

    def noted(src: Any, src_blocks: Any, dst: Any, dst_blocks: Any, stream: Any) -> None:
        copied.append(len(src_blocks))
        moves(src, src_blocks, dst, dst_blocks, stream)

    device.copy_small_by(noted)
    if device.kernel is None:
        pytest.skip("this GPU reaches page-locked memory by other addresses than the host")
    rng = np.random.default_rng(3)
    content = rng.integers(0, 256, (200, block_bytes), np.uint8)
    device.arena.set(content)
    out, back = (rng.permutation(200)[:150].astype(np.int32) for _ in range(2))
    transfer.copy(device, out, host, back)
    assert (host.arena[back] == content[out]).all()
    device.arena.fill(0)
    gpu.cuda.Device().synchronize()
    transfer.copy(host, back, device, out)
    content[np.setdiff1d(np.arange(200), out)] = 0
    assert (device.arena.get() == content).all()
    assert len(copied) == 2
    assert min(copied) > 100, "most of them are no neighbours"


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(gpu: Any, tool: str, tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    command = [
        *(sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"),
        *(sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu and not slow"),
        *("-k", SANITIZED, str(Path(__file__).parent)),
    ]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=540
    )
    assert ran.returncode == 0, ran.stdout[-4000:]

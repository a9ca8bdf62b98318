"""A captured graph of plan and run gives the attention of the lengths at its replay."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.attention import PagedAttention
from pagedkv.errors import KernelsUnavailable
from pagedkv.kernels.nvrtc import default_nvrtc
from pagedkv.kernels.select import KERNELS
from pagedkv.reference import paged_attention

SIZE, WIDTH = 16, 8  # of a block, and of block tables
ROUNDS = ([5, 100], [128, 0], [1, 33])
KERNEL_NAMES = [
    kernel.name if kernel.name == "decode_mla" else pytest.param(kernel.name, marks=pytest.mark.slow)
    for kernel in KERNELS
]


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_a_captured_graph_replays_with_other_lengths(kernel: str) -> None:
    from tests.ptxsim.graph import CapturingBackend

    try:
        default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    backend, rng = CapturingBackend(num_sms=2), np.random.default_rng(0)
    latent = kernel.startswith("decode_mla")
    kv_heads, group, dim, dim_v = (1, 16 if kernel == "decode_mla" else 64, 320, 256) if latent else (2, 4, 64, 64)
    pool = rng.standard_normal((2 * WIDTH, 2, SIZE, kv_heads, dim)).astype(np.float16)
    pool[:, 1, ..., :dim_v] = pool[:, 0, ..., :dim_v] if latent else pool[:, 1]
    q = rng.standard_normal((2, kv_heads * group, dim)).astype(np.float16)
    attention = PagedAttention(
        num_qo_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, block_size=SIZE,
        max_sequences=2, kernel=kernel, v_in_k=latent, device=backend,
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

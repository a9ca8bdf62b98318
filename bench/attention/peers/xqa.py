"""XQA, NVIDIA's decode kernel, as FlashInfer ships it."""

from __future__ import annotations

import numpy as np

from bench.attention.arena import FP8_SCALE
from bench.attention.device import Device
from bench.attention.peers import flashinfer_side
from bench.attention.peers.torch_side import TorchSide, version
from bench.attention.problems import Problem
from bench.attention.systems import Prepared, Unsupported

BLOCK_SIZES = (16, 32, 64, 128)
SEMAPHORE_BYTES = 8 << 20


class Xqa:
    """``flashinfer.xqa`` with a dense block table."""

    name = "XQA"

    def absence(self, device: Device) -> str:
        """Empty where FlashInfer and CUDA are."""
        return flashinfer_side.absence(device)

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        """Workspace, zeroed semaphores, and tables without -1.

        XQA does not know the -1 of missing blocks.
        """
        shape, model = problem.shape, problem.shape.model
        if not shape.is_decode or problem.host_tables is None:
            raise Unsupported("one query per sequence, paged KV")
        if shape.block_size not in BLOCK_SIZES:
            raise Unsupported(f"block size {shape.block_size}: {', '.join(map(str, BLOCK_SIZES))} only")
        flashinfer = flashinfer_side.module()
        side = TorchSide(device)
        q = side.tensor(problem.q)
        rows = q.view(shape.num_seqs, 1, model.num_qo_heads, model.head_dim)
        out = side.like(q)
        caches = [tuple(side.tensor(x) for x in problem.kv(copy)) for copy in range(problem.copies)]
        tables = side.ints(np.maximum(problem.host_tables, 0))
        workspace, semaphores = flashinfer_side.workspace(side), side.zeros(SEMAPHORE_BYTES).view(side.torch.uint32)
        lens = side.ints(problem.host_lens).view(side.torch.uint32).view(shape.num_seqs, 1)
        out_rows = out.view(rows.shape)

        def call(copy: int) -> None:
            k, v = caches[copy]
            flashinfer.xqa(
                rows, k, v, tables, lens, out_rows, workspace, semaphores, model.num_kv_heads, shape.block_size,
                kv_scale=1.0 if problem.scale is None else FP8_SCALE, kv_layout="NHD", sm_count=device.backend.num_sms,
            )  # fmt: skip

        return side.prepared(problem, call, out, note=f"flashinfer {version('flashinfer-python')}")

"""FlashInfer's multi-level cascade: the shared prefix once for all requests."""

from __future__ import annotations

import numpy as np

from bench.attention.device import Device
from bench.attention.peers import flashinfer_side
from bench.attention.peers.torch_side import TorchSide, version
from bench.attention.problems import Problem
from bench.attention.systems import Prepared, Unsupported


class FlashInferCascade:
    """MultiLevelCascadeAttentionWrapper with two levels."""

    name = "FlashInfer cascade"

    def absence(self, device: Device) -> str:
        """Empty where FlashInfer and CUDA are."""
        return flashinfer_side.absence(device)

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        """Plan both levels on the host; the plan is not part of what is timed."""
        shape, model, tables = problem.shape, problem.shape.model, problem.host_tables
        if not shape.prefix or tables is None or shape.kv_dtype != "bfloat16":
            raise Unsupported("a shared prefix, paged bfloat16 KV")
        flashinfer = flashinfer_side.module()
        side = TorchSide(device)
        q = side.tensor(problem.q)
        caches = [tuple(side.tensor(x) for x in problem.kv(copy)) for copy in range(problem.copies)]
        shared = shape.prefix // shape.block_size
        prefix = np.full(1, shape.prefix, np.int32)
        parts = (
            ([0, shape.num_tokens], tables[:1, :shared], prefix),
            (problem.host_q_indptr, tables[:, shared:], problem.host_lens - prefix),
        )
        levels = [
            (side.ints(queries), *flashinfer_side.csr(side, table, lens, shape.block_size))
            for queries, table, lens in parts
        ]
        with side.current():
            wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, flashinfer_side.workspace(side), "NHD")
            wrapper.plan(
                *(list(arrays) for arrays in zip(*levels, strict=True)),
                model.num_qo_heads,
                model.num_kv_heads,
                model.head_dim,
                shape.block_size,
                causal=True,
                sm_scale=problem.softmax_scale,
                q_data_type=q.dtype,
                kv_data_type=q.dtype,
            )
        note = f"flashinfer {version('flashinfer-python')}"
        return side.prepared(problem, lambda copy: wrapper.run(q, caches[copy]), note=note)

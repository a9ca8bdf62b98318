"""FlashInfer's paged prefill: its FlashAttention-2 and -3 kernels.

Takes mixed batches, too.
"""

from __future__ import annotations

from bench.attention.device import Device
from bench.attention.peers import flashinfer_side
from bench.attention.peers.torch_side import TorchSide, version
from bench.attention.problems import Problem
from bench.attention.systems import Prepared, Unsupported


class FlashInferPrefill:
    """BatchPrefillWithPagedKVCacheWrapper.

    Parameters
    ----------
    backend : ``"fa2"`` or ``"fa3"``.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = f"FlashInfer prefill, {backend}"

    def absence(self, device: Device) -> str:
        """Empty where FlashInfer and CUDA are."""
        return flashinfer_side.absence(device)

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        """Plan on the host; the plan is not part of what is timed."""
        shape, model = problem.shape, problem.shape.model
        if problem.host_tables is None or shape.kv_dtype != "bfloat16":
            raise Unsupported("paged bfloat16 KV")
        flashinfer = flashinfer_side.module()
        side = TorchSide(device)
        q = side.tensor(problem.q)
        caches = [tuple(side.tensor(x) for x in problem.kv(copy)) for copy in range(problem.copies)]
        with side.current():
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                flashinfer_side.workspace(side), "NHD", backend=self.backend
            )
            wrapper.plan(
                side.ints(problem.host_q_indptr),
                *flashinfer_side.csr(side, problem.host_tables, problem.host_lens, shape.block_size),
                model.num_qo_heads,
                model.num_kv_heads,
                model.head_dim,
                shape.block_size,
                causal=True,
                q_data_type=q.dtype,
                kv_data_type=q.dtype,
                sm_scale=problem.softmax_scale,
            )
        out = side.like(q)
        note = f"flashinfer {version('flashinfer-python')}"
        return side.prepared(problem, lambda copy: wrapper.run(q, caches[copy], out=out), out, note=note)

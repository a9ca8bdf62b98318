"""FlashInfer's paged batch decode: on CUDA cores, and on tensor cores."""

from __future__ import annotations

from typing import Any

from bench.attention.arena import FP8_SCALE
from bench.attention.device import Device
from bench.attention.peers import flashinfer_side
from bench.attention.peers.torch_side import TorchSide, version
from bench.attention.problems import Problem
from bench.attention.systems import Prepared, Unsupported

CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)


class FlashInferDecode:
    """BatchDecodeWithPagedKVCacheWrapper.

    Parameters
    ----------
    tensor_cores : its tensor-core path, which is its prefill kernel.
    """

    def __init__(self, *, tensor_cores: bool) -> None:
        self.tensor_cores = tensor_cores
        self.name = f"FlashInfer decode, {'tensor' if tensor_cores else 'CUDA'} cores"

    def absence(self, device: Device) -> str:
        """Empty where FlashInfer and CUDA are."""
        return flashinfer_side.absence(device)

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        """Plan on the host, as it does once per step; the plan is not part of what is timed."""
        shape, model = problem.shape, problem.shape.model
        if not shape.is_decode or problem.host_tables is None:
            raise Unsupported("one query per sequence, paged KV")
        if not self.tensor_cores and model.group_size not in CUDA_CORE_GROUPS:
            raise Unsupported(f"group size {model.group_size}")
        flashinfer = flashinfer_side.module()
        side = TorchSide(device)
        q = side.tensor(problem.q)
        caches = [tuple(side.tensor(x) for x in problem.kv(copy)) for copy in range(problem.copies)]
        with side.current():
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                flashinfer_side.workspace(side), "NHD", use_tensor_cores=self.tensor_cores
            )
            wrapper.plan(
                *flashinfer_side.csr(side, problem.host_tables, problem.host_lens, shape.block_size),
                model.num_qo_heads,
                model.num_kv_heads,
                model.head_dim,
                shape.block_size,
                q_data_type=q.dtype,
                kv_data_type=caches[0][0].dtype,
                sm_scale=problem.softmax_scale,
            )
        out = side.like(q)
        scales: dict[str, Any] = {} if problem.scale is None else {"k_scale": FP8_SCALE, "v_scale": FP8_SCALE}
        return side.prepared(
            problem,
            lambda copy: wrapper.run(q, caches[copy], out=out, **scales),
            out,
            note=f"flashinfer {version('flashinfer-python')}",
        )

"""FlashAttention-3 with paged KV, as vLLM builds it.

The operators of ``_vllm_fa3_C``, without vLLM around them.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from bench.attention.device import Device
from bench.attention.peers import torch_side
from bench.attention.peers.torch_side import TorchSide, version
from bench.attention.problems import Problem
from bench.attention.systems import Prepared, Unsupported

LIBRARY = "_vllm_fa3_C.abi3.so"
VARIABLE = "PEER_FA3"  # names the library's file where vLLM is not installed


def library() -> Path | None:
    """The file: what ``PEER_FA3`` names, else that of an installed vLLM."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given) if Path(given).is_file() else None
    spec = importlib.util.find_spec("vllm")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder, "vllm_flash_attn", LIBRARY)
        if path.is_file():
            return path
    return None


class FlashAttention3:
    """FA3's ``fwd`` with a block table.

    Its own scheduler's metadata is computed beforehand, as vLLM does.
    """

    name = "FA3"

    def absence(self, device: Device) -> str:
        """Empty where the library, torch and CUDA are."""
        if library() is None:
            return f"not installed: {LIBRARY} ({VARIABLE} names its file, or vllm is installed)"
        return torch_side.absence(device, "torch", "torch")

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        """Load the library and get the scheduler's metadata."""
        shape, model = problem.shape, problem.shape.model
        if problem.block_tables is None or shape.kv_dtype != "bfloat16":
            raise Unsupported("paged bfloat16 KV")
        if device.backend.capability[0] != 9:
            raise Unsupported(f"compute capability {device.backend.capability}: 9.0 only")
        side = TorchSide(device)
        side.torch.ops.load_library(str(library()))
        ops: Any = side.torch.ops._vllm_fa3_C
        q = side.tensor(problem.q)
        out = side.like(q)
        caches = [tuple(side.tensor(x) for x in problem.kv(copy)) for copy in range(problem.copies)]
        lens, q_indptr = side.tensor(problem.seq_lens), side.tensor(problem.q_indptr)
        tables = side.tensor(problem.block_tables)
        longest_q, longest, dim = max(shape.queries), max(shape.kv_lens), model.head_dim
        with side.current():
            schedule = ops.get_scheduler_metadata(
                shape.num_seqs, longest_q, longest, model.num_qo_heads, model.num_kv_heads, dim, dim, q.dtype,
                lens, q_indptr, None, None, None, None, shape.block_size, 0, True, -1, -1, False, 0, None, 0,
            )  # fmt: skip

        def call(copy: int) -> None:
            k, v = caches[copy]
            ops.fwd(
                q, k, v, None, None, None, out, q_indptr, None, None, None, lens, longest_q, longest, tables,
                None, None, None, None, None, None, None, None, problem.softmax_scale, True, -1, -1, 0.0, True,
                schedule, 0, None, 0, None, 1, 0, None,
            )  # fmt: skip

        return side.prepared(problem, call, out, note=f"vllm {version('vllm') or 'library alone'}")

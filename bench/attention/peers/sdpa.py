"""torch's scaled_dot_product_attention over contiguous KV.

What attention costs where nothing is paged.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.attention.device import Device
from bench.attention.peers import torch_side
from bench.attention.problems import Problem
from bench.attention.systems import Prepared, Unsupported


class Sdpa:
    """SDPA; decode groups the queries by KV head, so that KV is read once per group.

    The heads of a group are given as queries of one head.
    """

    name = "torch SDPA, contiguous"

    def absence(self, device: Device) -> str:
        """Empty where torch is; it also runs on torch's CPU, for control flow."""
        why = torch_side.absence(device, "torch", "torch")
        return why if why.startswith("not installed") else ""

    def prepare(self, device: Device, problem: Problem) -> Prepared:
        """Views of the arena's memory as [batch, heads, tokens, head_dim]."""
        shape, model = problem.shape, problem.shape.model
        if len(set(shape.kv_lens)) > 1 or len(set(shape.queries)) > 1:
            raise Unsupported("ragged batches are not contiguous rectangles")
        if shape.kv_dtype != "bfloat16":
            raise Unsupported(f"KV in {shape.kv_dtype}")
        if shape.prefix:
            raise Unsupported("contiguous KV has no shared prefix")
        side = torch_side.TorchSide(device)
        attend: Any = side.torch.nn.functional.scaled_dot_product_attention
        batch, queries, keys = shape.num_seqs, shape.queries[0], shape.kv_lens[0]
        group, dim = model.group_size, model.head_dim
        full = (batch, keys, model.num_kv_heads, dim)
        sides = [
            tuple(side.tensor(x).view(full).transpose(1, 2) for x in problem.contiguous(copy))
            for copy in range(problem.copies)
        ]
        q = side.tensor(problem.q)
        if shape.is_decode:
            rows = q.view(batch, model.num_kv_heads, group, dim)
            return side.prepared(problem, lambda copy: attend(rows, *sides[copy]), contiguous=True)
        rows = q.view(batch, queries, model.num_qo_heads, dim).transpose(1, 2)
        bias = importlib.import_module("torch.nn.attention.bias").causal_lower_right(queries, keys)
        mask: dict[str, Any] = {"is_causal": True} if queries == keys else {"attn_mask": bias}

        def call(copy: int) -> Any:
            return attend(rows, *sides[copy], enable_gqa=group > 1, **mask).transpose(1, 2)

        return side.prepared(problem, call, contiguous=True)

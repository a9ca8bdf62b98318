"""Who computes: this library, and peers where they are installed.

Each says which problems it takes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bench.cpu_attention.problems import Arrays, Problem

Call = Callable[[int], Any]  # of a layer's number; returns [num_tokens, num_qo_heads, head_dim]


class System(Protocol):
    """One row of the tables."""

    paged: bool

    def takes(self, problem: Problem) -> bool: ...

    def prepare(self, problem: Problem, arrays: Arrays, threads: int) -> Call: ...


class Ours:
    """pagedkv.cpu.attend."""

    paged = True

    def takes(self, problem: Problem) -> bool:
        """Everything."""
        return True

    def prepare(self, problem: Problem, arrays: Arrays, threads: int) -> Call:
        """Tables and outputs are ready, as in a step."""
        from pagedkv import cpu

        out, names = np.empty_like(arrays.q), {"q_dtype": problem.q_dtype, "kv_dtype": problem.dtype}

        def call(layer: int) -> Any:
            k_scale, v_scale = arrays.scales[layer] if arrays.scales else (None, None)
            return cpu.attend(
                arrays.q, *arrays.layers[layer], arrays.lens, block_tables=arrays.tables, q_indptr=arrays.indptr,
                out=out, threads=threads, k_scale=k_scale, v_scale=v_scale, **names,
            )  # fmt: skip

        return call


class NumpyGather:
    """What a NumPy program would do: gather the blocks, two matrix products."""

    paged = True

    def takes(self, problem: Problem) -> bool:
        """float32, short: it is slow."""
        return problem.dtype == "float32" and problem.flops < 3e9

    def prepare(self, problem: Problem, arrays: Arrays, threads: int) -> Call:
        """Grouped heads, so that K and V are read once."""
        heads, kv_heads, dim = problem.heads
        seen = np.arange(problem.context)[None] <= problem.context - problem.q_len + np.arange(problem.q_len)[:, None]
        q = arrays.q.reshape(problem.num_seqs, problem.q_len, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)

        def call(layer: int) -> Any:
            out = []
            for seq in range(problem.num_seqs):
                k, v = arrays.contiguous(layer, seq)
                scores = q[seq] @ k.transpose(1, 2, 0)[:, None] * np.float32(dim**-0.5)
                scores = np.where(seen, scores, -np.inf)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                out.append((weights @ v.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(-1, heads, dim))
            return np.concatenate(out)

        return call


class Torch:
    """torch's scaled_dot_product_attention.

    On contiguous K and V, or after an index_select into ready buffers.
    """

    def __init__(self, paged: bool) -> None:
        self.paged = paged

    def takes(self, problem: Problem) -> bool:
        """Floats."""
        return problem.dtype != "int8"

    def prepare(self, problem: Problem, arrays: Arrays, threads: int) -> Call:
        """Decode with queries grouped by KV head, torch's best form.

        A prefill with `is_causal` or a mask.
        """
        import torch

        torch.set_num_threads(threads)
        heads, kv_heads, dim = problem.heads
        group = heads // kv_heads

        def tensor(x: Any) -> Any:
            bits = torch.from_numpy(x.view(np.int16) if problem.dtype == "bfloat16" else x)
            return bits.view(torch.bfloat16) if problem.dtype == "bfloat16" else bits

        seqs, q_len, context = problem.num_seqs, problem.q_len, problem.context
        q = tensor(arrays.q).view(seqs, q_len, heads, dim)
        decode = q_len == 1
        grouped = q.view(seqs, kv_heads, group, dim) if decode else q.transpose(1, 2)
        options: dict[str, Any] = {} if decode else {"is_causal": q_len == context, "enable_gqa": True}
        if not decode and q_len != context:
            keys, queries = torch.arange(context)[None], context - q_len + torch.arange(q_len)[:, None]
            options["attn_mask"] = keys <= queries
        pools = [tuple(tensor(np.ascontiguousarray(x)) for x in pair) for pair in arrays.layers] if self.paged else []
        whole = []
        for layer in range(0 if self.paged else len(arrays.layers)):
            rows = [arrays.contiguous(layer, seq) for seq in range(seqs)]
            whole.append(
                [torch.stack([tensor(np.ascontiguousarray(x)) for x in xs]).transpose(1, 2) for xs in zip(*rows)]
            )
        flat = torch.from_numpy(arrays.tables.reshape(-1).astype(np.int64))
        buffers = (
            [torch.empty((len(flat), *pools[0][0].shape[1:]), dtype=q.dtype) for _ in range(2)] if self.paged else []
        )

        def call(layer: int) -> Any:
            if self.paged:
                for pool, buffer in zip(pools[layer], buffers):
                    torch.index_select(pool, 0, flat, out=buffer)
                k, v = (b.view(seqs, -1, kv_heads, dim)[:, :context].transpose(1, 2) for b in buffers)
            else:
                k, v = whole[layer]
            o = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, **options)
            return o.reshape(seqs, heads, dim) if decode else o.transpose(1, 2).reshape(-1, heads, dim)

        return call


class OnnxRuntime:
    """onnxruntime's GroupQueryAttention on contiguous K and V that it shares with its past."""

    paged = False

    def takes(self, problem: Problem) -> bool:
        """Decode; no bfloat16 on the CPU."""
        return problem.dtype in ("float32", "float16") and problem.q_len == 1

    def prepare(self, problem: Problem, arrays: Arrays, threads: int) -> Call:
        """past and present are one buffer, bound once per layer."""
        import onnxruntime
        from onnx import TensorProto, helper

        heads, kv_heads, dim = problem.heads
        seqs, context = problem.num_seqs, problem.context
        kind = TensorProto.FLOAT16 if problem.dtype == "float16" else TensorProto.FLOAT
        names = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
        node = helper.make_node(
            "GroupQueryAttention", names, ["output", "present_key", "present_value"], domain="com.microsoft",
            num_heads=heads, kv_num_heads=kv_heads,
        )  # fmt: skip
        shapes = [[seqs, 1, n * dim] for n in (heads, kv_heads, kv_heads)] + [[seqs, kv_heads, context, dim]] * 2
        inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in zip(names, shapes)]
        inputs += [helper.make_tensor_value_info(names[5], TensorProto.INT32, [seqs])]
        inputs += [helper.make_tensor_value_info(names[6], TensorProto.INT32, [1])]
        outputs = [
            helper.make_tensor_value_info(name, kind, shape)
            for name, shape in (("output", shapes[0]), ("present_key", shapes[3]), ("present_value", shapes[3]))
        ]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "gqa", inputs, outputs)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        o = value(np.empty((seqs, 1, heads * dim), problem.dtype))
        bindings = []
        for layer in range(len(arrays.layers)):
            k, v = (
                value(
                    np.ascontiguousarray(
                        np.stack([arrays.contiguous(layer, s)[i] for s in range(seqs)]).transpose(0, 2, 1, 3)
                    )
                )
                for i in range(2)
            )
            last = [
                value(
                    np.ascontiguousarray(
                        np.stack([arrays.contiguous(layer, s)[i][-1] for s in range(seqs)]).reshape(seqs, 1, -1)
                    )
                )
                for i in range(2)
            ]
            given = [
                value(np.ascontiguousarray(arrays.q.reshape(seqs, 1, -1))), *last, k, v,
                value(np.full(seqs, context - 1, np.int32)), value(np.array([context], np.int32)),
            ]  # fmt: skip
            binding = session.io_binding()
            for name, item in zip(names, given):
                binding.bind_ortvalue_input(name, item)
            for name, item in (("output", o), ("present_key", k), ("present_value", v)):
                binding.bind_ortvalue_output(name, item)
            bindings.append((binding, given))

        def call(layer: int) -> Any:
            session.run_with_iobinding(bindings[layer][0])
            return o.numpy().reshape(seqs, heads, dim)

        return call


SYSTEMS: dict[str, tuple[str, Callable[[], System]]] = {
    "pagedkv": ("pagedkv", Ours),
    "torch, gather and SDPA": ("torch", lambda: Torch(True)),
    "torch, SDPA, contiguous": ("torch", lambda: Torch(False)),
    "onnxruntime GQA, contiguous": ("onnxruntime", OnnxRuntime),
    "numpy, gather": ("numpy", NumpyGather),
}


def installed() -> list[str]:
    """Names of the systems that can run here."""
    return [name for name, (module, _) in SYSTEMS.items() if importlib.util.find_spec(module) is not None]

"""A llama as an ONNX graph with past and present KV, in the forms that exporters write.

The weights are initializers that a session takes from memory, so a model of any size fits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from examples.llama_numpy.config import LlamaConfig
from examples.llama_numpy.weights import LlamaWeights

KINDS = ("growing", "fixed", "chunked", "in place")


class Graph:
    """Nodes and weights of a graph under construction."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, NDArray[Any]] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def op(self, kind: str, *inputs: str, outputs: int = 1, out: str = "", domain: str = "", **attributes: Any) -> Any:
        """Append a node; the name of its output, or of several."""
        names = [out or f"{kind}_{len(self.nodes)}"] if outputs == 1 else [
            f"{kind}_{len(self.nodes)}_{number}" for number in range(outputs)
        ]  # fmt: skip
        self.nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def weight(self, array: Any, dtype: Any = np.float32) -> str:
        """A constant."""
        name = f"weight_{len(self.weights)}"
        self.weights[name] = np.array(array, dtype, order="C")
        return name

    def ints(self, *values: int) -> str:
        """A constant int64 [n]."""
        return self.weight(values, np.int64)

    def input(self, name: str, kind: int, shape: list[Any]) -> str:
        """An input of the graph."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: list[Any]) -> str:
        """An output of the graph."""
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def session(self) -> ort.InferenceSession:
        """A session of it, on two threads at most."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        options.log_severity_level = 3
        tensors, values = [], []
        for name, array in self.weights.items():
            if array.nbytes < 1024:
                tensors.append(onnx.numpy_helper.from_array(array, name))
                continue
            tensor = onnx.TensorProto(name=name, dims=array.shape, data_type=TensorProto.FLOAT)
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="memory")
            tensors.append(tensor)
            values.append((name, ort.OrtValue.ortvalue_from_numpy(array)))
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, tensors)
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10)
        if values:
            options.add_external_initializers([name for name, _ in values], [value for _, value in values])
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def decoder(
    weights: LlamaWeights, kind: str = "growing", *, length: int = 512, chunk: int = 8, dtype: str = "float32"
) -> ort.InferenceSession:
    """A session of a llama.

    Parameters
    ----------
    kind : of its past: ``growing``; ``fixed`` to `length` tokens; ``chunked``: fixed, in runs of `chunk` tokens; or
        ``in place``, which GroupQueryAttention writes into.
    dtype : of past and present.
    """
    config, graph = weights.config, Graph()
    heads, dim = config.num_kv_heads, config.head_dim
    stored = TensorProto.FLOAT if dtype == "float32" else TensorProto.FLOAT16
    fixed = kind in ("fixed", "chunked")
    count: Any = chunk if kind == "chunked" else "tokens"
    ids = graph.input("input_ids", TensorProto.INT64, [1 if fixed else "batch", count])
    mask = graph.input("attention_mask", TensorProto.INT64, ["batch", length if fixed else "total"])
    attend = _in_place(graph, config, mask) if kind == "in place" else _plain(graph, config, mask, fixed, count, stored)
    x = graph.op("Gather", graph.weight(weights.embedding), ids)
    for layer in range(config.num_layers):
        past = [
            graph.input(f"past_key_values.{layer}.{side}", stored, ["batch", heads, length if fixed else "past", dim])
            for side in ("key", "value")
        ]
        present = [
            graph.output(f"present.{layer}.{side}", stored, ["batch", heads, length if fixed else "all", dim])
            for side in ("key", "value")
        ]
        normed = _normed(graph, x, weights.attn_norm[layer], config)
        qkv = graph.op("MatMul", normed, graph.weight(weights.qkv[layer].T))
        sizes = graph.ints(config.qo_width, config.kv_width, config.kv_width)
        q, k, v = graph.op("Split", qkv, sizes, outputs=3, axis=-1)
        o, *new = attend(q, k, v, *past)
        for name, value in zip(present, new, strict=True):
            graph.op("Identity", value, out=name)
        x = graph.op("Add", x, graph.op("MatMul", o, graph.weight(weights.attn_output[layer].T)))
        normed = _normed(graph, x, weights.ffn_norm[layer], config)
        gate_up = graph.op("MatMul", normed, graph.weight(weights.gate_up[layer].T))
        gate, up = graph.op("Split", gate_up, outputs=2, axis=-1, num_outputs=2)
        gated = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
        x = graph.op("Add", x, graph.op("MatMul", gated, graph.weight(weights.ffn_down[layer].T)))
    normed = _normed(graph, x, weights.output_norm, config)
    logits = graph.output("logits", TensorProto.FLOAT, ["batch", count, config.vocab_size])
    graph.op("MatMul", normed, graph.weight(weights.output.T), out=logits)
    return graph.session()


def _normed(graph: Graph, x: str, weight: NDArray[Any], config: LlamaConfig) -> str:
    mean = graph.op("ReduceMean", graph.op("Mul", x, x), graph.ints(-1), keepdims=1)
    root = graph.op("Sqrt", graph.op("Add", mean, graph.weight([config.rms_eps])))
    return str(graph.op("Mul", graph.op("Div", x, root), graph.weight(weight)))


def _angles(config: LlamaConfig) -> NDArray[Any]:
    """Of each position and pair [context_length, head_dim / 2]."""
    powers = -2 * np.arange(config.head_dim // 2) / config.head_dim
    return np.asarray(np.arange(config.context_length)[:, None] * config.rope_base**powers)


def _in_place(graph: Graph, config: LlamaConfig, mask: str) -> Any:
    """Attention by com.microsoft.GroupQueryAttention, which finds positions by the mask's sum."""
    total = graph.op(
        "Cast", graph.op("Gather", graph.op("Shape", mask), graph.weight(1, np.int64)), to=TensorProto.INT32
    )
    ones = graph.op("ReduceSum", mask, graph.ints(1), keepdims=0)
    seqlens = graph.op("Cast", graph.op("Sub", ones, graph.ints(1)), to=TensorProto.INT32)
    cos, sin = (graph.weight(table(_angles(config))) for table in (np.cos, np.sin))

    def attend(q: str, k: str, v: str, past_k: str, past_v: str) -> Any:
        return graph.op(
            "GroupQueryAttention", q, k, v, past_k, past_v, seqlens, total, cos, sin, outputs=3,
            domain="com.microsoft", num_heads=config.num_qo_heads, kv_num_heads=config.num_kv_heads, do_rotary=1,
            rotary_interleaved=1,
        )  # fmt: skip

    return attend


def _plain(graph: Graph, config: LlamaConfig, mask: str, fixed: bool, count: Any, kind: int) -> Any:
    """Attention in plain nodes, which find positions by position_ids."""
    positions = graph.input("position_ids", TensorProto.INT64, ["batch", count])
    heads, dim, group = config.num_kv_heads, config.head_dim, config.num_qo_heads // config.num_kv_heads
    cos, sin = (
        graph.op("Unsqueeze", graph.op("Gather", graph.weight(table(_angles(config))), positions), graph.ints(1))
        for table in (np.cos, np.sin)
    )
    rows = graph.op("Reshape", positions, graph.ints(1, 1, 1, -1, 1))
    ones = graph.op("Reshape", mask, graph.ints(1, 1, 1, 1, -1))
    length = graph.op("Shape", mask, start=1)
    columns = graph.op("Range", graph.weight(0, np.int64), graph.op("Squeeze", length), graph.weight(1, np.int64))
    seen = graph.op("And", graph.op("LessOrEqual", columns, rows), graph.op("Cast", ones, to=TensorProto.BOOL))
    bias = graph.op("Where", seen, graph.weight([0.0]), graph.weight([-1e30]))

    def turned(x: str, number: int) -> str:
        split = graph.op("Reshape", x, graph.ints(1, -1, number, dim // 2, 2))
        even, odd = (
            graph.op("Transpose", graph.op("Gather", split, graph.weight(side, np.int64), axis=-1), perm=[0, 2, 1, 3])
            for side in (0, 1)
        )
        real = graph.op("Sub", graph.op("Mul", even, cos), graph.op("Mul", odd, sin))
        imaginary = graph.op("Add", graph.op("Mul", even, sin), graph.op("Mul", odd, cos))
        pairs = graph.op(
            "Concat", *(graph.op("Unsqueeze", part, graph.ints(-1)) for part in (real, imaginary)), axis=-1
        )
        return str(graph.op("Reshape", pairs, graph.ints(1, number, -1, dim)))

    def stored(past: str, new: str) -> str:
        new = graph.op("Cast", new, to=kind)
        if not fixed:
            return str(graph.op("Concat", past, new, axis=2))
        where = graph.op("Expand", graph.op("Reshape", positions, graph.ints(1, 1, -1, 1)), graph.op("Shape", new))
        return str(graph.op("ScatterElements", past, where, new, axis=2))

    def attend(q: str, k: str, v: str, past_k: str, past_v: str) -> Any:
        q = graph.op("Reshape", turned(q, config.num_qo_heads), graph.ints(1, heads, group, -1, dim))
        split = graph.op("Reshape", v, graph.ints(1, -1, heads, dim))
        all_k = stored(past_k, turned(k, heads))
        all_v = stored(past_v, graph.op("Transpose", split, perm=[0, 2, 1, 3]))
        k_read, v_read = (
            graph.op("Unsqueeze", graph.op("Cast", side, to=TensorProto.FLOAT), graph.ints(2))
            for side in (all_k, all_v)
        )
        k_t = graph.op("Transpose", k_read, perm=[0, 1, 2, 4, 3])
        scores = graph.op("Div", graph.op("MatMul", q, k_t), graph.weight([np.sqrt(dim)]))
        shares = graph.op("Softmax", graph.op("Add", scores, bias), axis=-1)
        mixed = graph.op("MatMul", shares, v_read)
        flat = graph.op("Reshape", mixed, graph.ints(1, config.num_qo_heads, -1, dim))
        o = graph.op("Reshape", graph.op("Transpose", flat, perm=[0, 2, 1, 3]), graph.ints(1, -1, config.qo_width))
        return o, all_k, all_v

    return attend

"""ONNX Runtime computes layers; past and present KV are bound in our memory (IOBinding).

Needs onnxruntime and onnx.
"""

import numpy as np
import onnxruntime as ort
from onnx import numpy_helper, parser

import pagedkv as pk
from pagedkv.interop import empty
from pagedkv.interop.onnxruntime import bind_input, bind_output

LAYERS, HEADS, DIM, VOCAB = 2, 2, 32, 500
LAYER = """<ir_version: 8, opset_import: ["": 17]>
layer (float[n, 64] x, float[n, m] mask, float[p, 2, 32] past_k, float[p, 2, 32] past_v)
   => (float[n, 64] y, float[m, 2, 32] present_k, float[m, 2, 32] present_v) {
  heads = Constant <value_ints = [-1, 2, 32]> ()    flat = Constant <value_ints = [-1, 64]> ()
  q0 = MatMul (x, wq)    q = Reshape (q0, heads)
  k0 = MatMul (x, wk)    k = Reshape (k0, heads)     present_k = Concat <axis = 0> (past_k, k)
  v0 = MatMul (x, wv)    v = Reshape (v0, heads)     present_v = Concat <axis = 0> (past_v, v)
  dots = Einsum <equation = "nhd,mhd->hnm"> (q, present_k)    scale = Constant <value_float = 0.1767767> ()
  scaled = Mul (dots, scale)    masked = Add (scaled, mask)    shares = Softmax (masked)
  o = Einsum <equation = "hnm,mhd->nhd"> (shares, present_v)
  o0 = Reshape (o, flat)    mixed = MatMul (o0, wo)    sum = Add (x, mixed)    y = Tanh (sum) }"""
draw = np.random.default_rng(0)
embedding, head = draw.standard_normal((2, VOCAB, HEADS * DIM)).astype(np.float32)


def session() -> ort.InferenceSession:
    model = parser.parse_model(LAYER)
    weights = {f"w{name}": draw.standard_normal((64, 64)).astype(np.float32) / 8 for name in "qkvo"}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def forward(seq: pk.Sequence, sessions: list[ort.InferenceSession]) -> np.ndarray:
    """Logits of the last token; K and V of all new tokens go into the cache."""
    past, n = seq.gather(), len(seq) - seq.num_computed  # past K and V: [layers, tokens, heads, dim]
    present = [empty((LAYERS, len(seq), HEADS, DIM), "float32").numpy() for _ in "kv"]
    x, mask = embedding[seq.tokens[-n:]], np.triu(np.full((n, len(seq)), -np.inf, np.float32), len(seq) - n + 1)
    for layer, run in enumerate(sessions):
        y, io = np.empty_like(x), run.io_binding()
        ins = {"x": x, "mask": mask, "past_k": past[0][layer], "past_v": past[1][layer]}
        outs = {"y": y, "present_k": present[0][layer], "present_v": present[1][layer]}
        views = [bind_input(io, *pair) for pair in ins.items()] + [bind_output(io, *pair) for pair in outs.items()]
        run.run_with_iobinding(io)
        assert [out.data_ptr() for out in io.get_outputs()] == [view.ptr for view in views[4:]]  # written in place
        x = y
    seq.scatter(*(array[:, -n:] for array in present))
    return x[-1] @ head.T


sessions, answers = [session() for _ in range(LAYERS)], []
with pk.KVCache(pk.KVSpec(LAYERS, HEADS, DIM, "float32"), device_memory="4MiB") as cache:
    for _ in range(2):
        with cache.sequence(list(range(40))) as seq:
            cached = seq.num_computed
            for _ in range(8):
                seq.append(int(np.argmax(forward(seq, sessions))))
            answers.append(seq.tokens[40:].tolist())
            print(f"{cached} of 40 prompt tokens cached: {answers[-1]}")
assert answers[0] == answers[1]

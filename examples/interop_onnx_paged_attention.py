"""ONNX Runtime's operator PagedAttention in a model on the cache's own memory. Needs onnx.

ONNX Runtime has it for CUDA alone. Here ONNX's reference evaluator runs the model, the operator as its schema tells it.
"""

import numpy as np
from onnx import parser
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import pagedkv as pk
from pagedkv.interop.onnxruntime import paged_attention_inputs
from pagedkv.reference import paged_attention

HEADS, KV_HEADS, DIM = 4, 2, 16
MODEL = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
paged (float16[n, 64] query, float16[n, 32] key, float16[n, 32] value, float16[p, 16, 2, 16] key_cache,
       float16[p, 16, 2, 16] value_cache, int32[s1] cumulative_sequence_length, int32[s] past_seqlens,
       int32[s, b] block_table, int32[n] slot_mapping) => (float16[n, 64] output) {
  output = com.microsoft.PagedAttention <num_heads = 4, kv_num_heads = 2> (query, key, value, key_cache, value_cache,
      cumulative_sequence_length, past_seqlens, block_table, , , slot_mapping) }"""


class PagedAttention(OpRun):
    """Writes new K and V into their slots, in place, then attends causally."""

    op_domain = "com.microsoft"

    def _run(self, q, k, v, k_cache, v_cache, ends, past, tables, cos, sin, slots, num_heads=0, kv_num_heads=0):
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache.reshape(-1, *cache.shape[2:])[slots] = new.reshape(-1, kv_num_heads, cache.shape[3])
        o = paged_attention(q.reshape(len(q), num_heads, -1), k_cache, v_cache, tables, past + np.diff(ends), ends)
        return (o.reshape(q.shape).astype(q.dtype),)


model = ReferenceEvaluator(parser.parse_model(MODEL), new_ops=[PagedAttention])
draw = np.random.default_rng(0)
with pk.KVCache(pk.KVSpec(1, KV_HEADS, DIM, "float16", block_size=16), device_memory="1MiB") as cache:
    seqs = [cache.sequence(range(start, start + n)) for start, n in ((0, 40), (100, 7), (200, 16))]
    for turn in range(3):
        with cache.step(seqs) as step:
            n = len(step.tokens)
            q, k, v = (draw.standard_normal((n, h * DIM)).astype(np.float16) for h in (HEADS, KV_HEADS, KV_HEADS))
            inputs = paged_attention_inputs(step, cache.pages(0, read_only=False))
            inputs.pop("attention_metadata")  # an option: bounds of the lengths
            inputs |= {name: inputs[name].numpy() for name in ("key_cache", "value_cache")}  # views of the arena
            assert inputs["key_cache"].ctypes.data == cache.layer(0)[0].ctypes.data
            (output,) = model.run(None, {"query": q, "key": k, "value": v, **inputs})
            step.mark_written(0)
            ours = step.attend(0, q.reshape(n, HEADS, DIM)).reshape(n, -1)
            print(f"step {turn}: {n} tokens, largest difference from step.attend {np.abs(output - ours).max():.4f}")
            assert np.allclose(output, ours, atol=2e-3)
        for seq in seqs:
            seq.append(1)
    for seq in seqs:
        seq.release()

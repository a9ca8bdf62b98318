"""A Numba kernel of your own attends over the paged KV in place.

It reads the cache's arrays with their strides. Needs Numba.
"""

import numba
import numpy as np

import pagedkv as pk

LAYERS, HEADS, DIM, GROUP = 2, 2, 16, 2
spec = pk.KVSpec(LAYERS, HEADS, DIM, "float32", block_size=4)


@numba.njit  # type: ignore[untyped-decorator]
def decode(q: np.ndarray, k: np.ndarray, v: np.ndarray, tables: np.ndarray, seq_lens: np.ndarray, o: np.ndarray) -> int:
    """Attention of one query per sequence; the address it read K from."""
    block_size = k.shape[1]
    for seq in range(len(q)):
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[2])
            best, total = -np.inf, 0.0
            acc = np.zeros(q.shape[2])
            for token in range(seq_lens[seq]):
                block, offset = tables[seq, token // block_size], token % block_size
                score = 0.0
                for d in range(q.shape[2]):
                    score += q[seq, head, d] * k[block, offset, kv_head, d] / np.sqrt(q.shape[2])
                top = max(best, score)  # online softmax: what was summed is rescaled when a larger score comes
                share, rescale = np.exp(score - top), np.exp(best - top)
                total, best = total * rescale + share, top
                for d in range(q.shape[2]):
                    acc[d] = acc[d] * rescale + share * v[block, offset, kv_head, d]
            o[seq, head] = acc / total
    return k.ctypes.data


draw = np.random.default_rng(0)
with pk.KVCache(spec, device_memory="1MiB") as cache:
    seqs = [cache.sequence(list(range(start, start + n))) for start, n in ((0, 9), (100, 6), (200, 1))]
    for count in (None, 1):  # the prompts, and then a token each
        with cache.step(seqs) as step:
            for layer in range(LAYERS):
                step.write(layer, *draw.standard_normal((2, len(step.tokens), HEADS, DIM)).astype(np.float32))
                if count:
                    q = draw.standard_normal((len(seqs), HEADS * GROUP, DIM)).astype(np.float32)
                    k, v = cache.layer(layer)
                    o = np.empty_like(q)
                    assert decode(q, k, v, step.block_tables, step.seq_lens, o) == k.ctypes.data  # the arena itself
                    assert np.allclose(o, step.attend(layer, q), atol=1e-5)
        for seq in seqs:
            seq.append(1)
    for seq in seqs:
        seq.release()
    print(f"{len(seqs)} sequences of 10, 7 and 2 tokens agree")

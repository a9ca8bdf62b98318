"""Beam search by forks.

Full blocks are shared, the first fork to write copies the partly filled one.
"""

import numpy as np

import pagedkv as pk

spec = pk.KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
VOCAB, WIDTH, LENGTH = 50, 3, 8
draw = np.random.default_rng(1)
embedding, head = draw.standard_normal((2, VOCAB, 8)).astype(np.float32)


def log_probs(cache: pk.KVCache, beams: list[pk.Sequence]) -> np.ndarray:
    """One step over all beams; log-probabilities [num_beams, VOCAB] of the next token of each."""
    with cache.step(beams) as step:
        x = embedding[step.tokens][:, None, :] + np.cos(step.positions[:, None, None]).astype(np.float32)
        step.write(0, x, x)
        scores = step.attend(0, x)[step.q_indptr[1:] - 1, 0] @ head.T
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


with pk.KVCache(spec, device_memory=pk.Blocks(200)) as cache:
    start = cache.sequence(list(range(10)))
    beams, totals = [start], np.zeros(1)
    for _ in range(LENGTH):
        candidates = totals[:, None] + log_probs(cache, beams)
        best = np.argsort(candidates, axis=None)[::-1][:WIDTH]
        totals = candidates.ravel()[best]
        chosen = []
        for parent, token in zip(*np.unravel_index(best, candidates.shape), strict=True):
            (beam,) = beams[parent].fork(1)
            beam.append(int(token))
            chosen.append(beam)
        for beam in beams:
            beam.release()
        beams = chosen

    for beam, total in zip(beams, totals, strict=True):
        print(f"{total:8.3f}  {beam.tokens[10:].tolist()}  blocks {beam.blocks.tolist()}")
    shared = set.intersection(*(set(beam.blocks.tolist()) for beam in beams))
    used = set.union(*(set(beam.blocks.tolist()) for beam in beams))
    print(f"{WIDTH} beams of {len(beams[0])} tokens in {len(used)} blocks, {len(shared)} of them shared by all")
    assert len(shared) >= 2
    for beam in beams:
        beam.release()
    cache.check_integrity()

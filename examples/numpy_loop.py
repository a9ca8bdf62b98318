"""A toy model of two attention layers in NumPy.

The second prompt reuses what the first one computed.
"""

import numpy as np

import pagedkv as pk

LAYERS, HEADS, DIM, VOCAB = 2, 2, 16, 500
spec = pk.KVSpec(LAYERS, HEADS, DIM, "float32", block_size=16)
draw = np.random.default_rng(0)
embedding = draw.standard_normal((VOCAB, HEADS * DIM)).astype(np.float32)
head = draw.standard_normal((HEADS * DIM, VOCAB)).astype(np.float32)
weights = draw.standard_normal((LAYERS, 4, HEADS * DIM, HEADS * DIM)).astype(np.float32) / np.sqrt(HEADS * DIM)


def forward(step: pk.Step) -> np.ndarray:
    """The last hidden state of every sequence in the step.

    K and V of the new tokens go into the cache.
    """
    x = embedding[step.tokens] + np.sin(step.positions[:, None] / 7)
    for layer in range(LAYERS):
        q, k, v = ((x @ w).reshape(-1, HEADS, DIM).astype(np.float32) for w in weights[layer, :3])
        step.write(layer, k, v)
        x = np.tanh(x + step.attend(layer, q).reshape(len(x), -1) @ weights[layer, 3])
    return x[step.q_indptr[1:] - 1]


def generate(cache: pk.KVCache, prompt: list[int], count: int) -> list[int]:
    """`count` tokens, each the most likely one."""
    with cache.sequence(prompt) as seq:
        print(f"prompt of {len(prompt)} tokens: {seq.num_computed} cached, {len(prompt) - seq.num_computed} to compute")
        for _ in range(count):
            with cache.step([seq]) as step:  # an exception inside commits nothing
                last = forward(step)
            seq.append(int(np.argmax(last[0] @ head)))
        return seq.tokens[len(prompt) :].tolist()


system = draw.integers(0, VOCAB, 64).tolist()  # what every prompt begins with
with pk.KVCache(spec, memory="1MiB") as cache:
    first = generate(cache, [*system, 1, 2, 3], 8)
    second = generate(cache, [*system, 4, 5, 6], 8)
    again = generate(cache, [*system, 1, 2, 3], 8)
    assert again == first != second
    print(first, second, sep="\n")
    print(cache.stats())

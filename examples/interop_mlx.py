"""The cache reads MLX's arrays without a copy; MLX copies what it is given.

Needs MLX (on Linux: mlx[cpu]).
"""

import mlx.core as mx
import numpy as np

import pagedkv as pk
from pagedkv.errors import ExchangeRefused
from pagedkv.interop import as_array, fit

LAYERS, HEADS, DIM, VOCAB = 2, 2, 64, 500
spec = pk.KVSpec(LAYERS, HEADS, DIM, "float32", block_size=16)
mx.random.seed(0)
embedding = mx.random.normal((VOCAB, HEADS * DIM))
weights = mx.random.normal((LAYERS, 4, HEADS * DIM, HEADS * DIM)) / (HEADS * DIM) ** 0.5
head = mx.random.normal((HEADS * DIM, VOCAB))


def forward(step: pk.Step) -> mx.array:
    """Logits of every sequence in the step."""
    x = embedding[mx.array(step.tokens)]
    for layer in range(LAYERS):
        q, k, v = (mx.reshape(x @ weights[layer, i], (-1, HEADS, DIM)) for i in range(3))
        assert as_array(k).ctypes.data == np.asarray(memoryview(k)).ctypes.data  # what the cache reads is MLX's memory
        step.write(layer, k, v)
        o = step.attend(layer, q)
        attended = mx.from_dlpack(fit(o, "mlx", copy=True))  # copy=True says aloud what MLX does in any case
        x = mx.tanh(x + attended.reshape(len(x), -1) @ weights[layer, 3])
    return x[mx.array(step.q_indptr[1:] - 1)] @ head


try:
    fit(np.zeros(16, np.float32), "mlx")
except ExchangeRefused as refusal:
    print(refusal)

prompt = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
answers = []
with pk.KVCache(spec, device_memory="4MiB") as cache:
    for _ in range(2):
        with cache.sequence(prompt) as seq:
            print(f"{seq.num_computed} of {len(prompt)} prompt tokens cached")
            for _ in range(8):
                with cache.step([seq]) as step:
                    logits = forward(step)
                seq.append(int(mx.argmax(logits[0])))
            answers.append(seq.tokens[len(prompt) :].tolist())
assert answers[0] == answers[1]
print(answers[0])

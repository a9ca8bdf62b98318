"""JAX computes in jitted halves around the cache's write and attention; nothing is copied.

Needs JAX.
"""

import jax
import jax.numpy as jnp
import numpy as np

import pagedkv as pk
from pagedkv.interop import as_array, empty, fit

LAYERS, HEADS, DIM, VOCAB = 2, 2, 64, 500
spec = pk.KVSpec(LAYERS, HEADS, DIM, "bfloat16", block_size=16)
keys = jax.random.split(jax.random.key(0), 3)
embedding = jax.random.normal(keys[0], (VOCAB, HEADS * DIM), jnp.bfloat16)
weights = jax.random.normal(keys[1], (LAYERS, 4, HEADS * DIM, HEADS * DIM), jnp.bfloat16) / (HEADS * DIM) ** 0.5
head = jax.random.normal(keys[2], (HEADS * DIM, VOCAB), jnp.bfloat16)


@jax.jit
def before(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Q in float32, K and V in bfloat16, as the cache holds them."""
    q, k, v = ((x @ w[i]).reshape(-1, HEADS, DIM) for i in range(3))
    return q.astype(jnp.float32), k, v


@jax.jit
def after(w: jax.Array, x: jax.Array, o: jax.Array) -> jax.Array:
    return jnp.tanh(x + o.reshape(len(x), -1).astype(jnp.bfloat16) @ w[3])


def forward(step: pk.Step) -> jax.Array:
    """Logits of every sequence in the step."""
    x = embedding[step.tokens]
    for layer in range(LAYERS):
        q, k, v = before(weights[layer], x)
        assert as_array(k).ctypes.data == k.unsafe_buffer_pointer()  # what the cache reads is JAX's own memory
        step.write(layer, k, v)
        o = empty(q.shape, "float32")  # at a multiple of 64 bytes, or JAX would copy; new each time, as JAX keeps it
        step.attend(layer, q, out=o)
        attended = jnp.from_dlpack(fit(o, "jax"), copy=False)
        assert attended.unsafe_buffer_pointer() == o.ptr  # what JAX reads is what attention wrote
        x = after(weights[layer], x, attended)
    return x[step.q_indptr[1:] - 1] @ head


prompt = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
answers = []
with pk.KVCache(spec, device_memory="4MiB") as cache:
    for _ in range(2):
        with cache.sequence(prompt) as seq:
            print(f"{seq.num_computed} of {len(prompt)} prompt tokens cached")
            for _ in range(8):
                with cache.step([seq]) as step:
                    logits = forward(step)
                seq.append(int(jnp.argmax(logits[0])))
            answers.append(seq.tokens[len(prompt) :].tolist())
assert answers[0] == answers[1]
print(answers[0])

"""tinygrad computes around the cache's write and attention; nothing is copied.

Needs tinygrad; clang for speed.
"""

import os
import shutil

import numpy as np

import pagedkv as pk
from pagedkv.interop import RawArray, View, as_array, empty, fit

CLANG = shutil.which(os.environ.get("CC", "clang")) is not None
os.environ["DEV"] = "CPU" if CLANG else "PYTHON"  # without a compiler: tinygrad's interpreter, slow and the same

from tinygrad import Tensor, dtypes  # noqa: E402 - reads DEV
from tinygrad.device import Buffer  # noqa: E402
from tinygrad.uop.ops import UOp  # noqa: E402


def tensor(view: View) -> Tensor:
    """A tensor over our memory; keep the view as long as it."""
    fit(view, "tinygrad")  # refused unless compact, of a dtype it has, and not read-only
    dtype = getattr(dtypes, view.dtype)
    if CLANG:
        return Tensor.from_blob(view.ptr, view.shape, dtype=dtype, device="CPU")
    memory = memoryview(view.numpy()).cast("B")  # from_blob ignores its pointer on this device, and a Buffer does not
    return Tensor(UOp.from_buffer(Buffer("PYTHON", view.size, dtype, opaque=memory))).reshape(view.shape)


def array(result: Tensor) -> np.ndarray:
    """The memory of a computed float32 tensor; keep the tensor as long as it."""
    buffer = result.contiguous().realize()._buffer()
    memory = np.frombuffer(buffer.as_memoryview(force_zero_copy=True), np.uint8)
    return as_array(RawArray(memory.ctypes.data, tuple(result.shape), None, "float32"))


LAYERS, HEADS, DIM = 2, 2, 8
draw = np.random.default_rng(0)
embedding = draw.standard_normal((50, HEADS * DIM)).astype(np.float32)
weights = [[Tensor(w) for w in layer] for layer in draw.standard_normal((LAYERS, 4, 16, 16)).astype(np.float32) / 4]
answers = []
with pk.KVCache(pk.KVSpec(LAYERS, HEADS, DIM, "float32", block_size=4), device_memory="1MiB") as cache:
    for _ in range(2):
        with cache.sequence(list(range(10))) as seq, cache.step([seq]) as step:
            print(f"{seq.num_computed} of {len(seq)} prompt tokens cached")
            x = Tensor(embedding[step.tokens])
            for w in range(LAYERS):
                kept = [(x @ weights[w][i]).contiguous().realize() for i in range(3)]
                q, k, v = (array(t).reshape(-1, HEADS, DIM) for t in kept)
                step.write(w, k, v)
                o = empty((len(q), HEADS * DIM), "float32")
                step.attend(w, q, out=o.numpy().reshape(q.shape))
                x = (x + tensor(o) @ weights[w][3]).tanh().realize()
            answers.append(x.numpy()[-1])
            o.numpy()[...] = 7
            assert tensor(o).numpy().min() == 7  # the tensor reads our memory, not a copy of it
assert np.allclose(*answers, atol=1e-5)
print(answers[0][:4])

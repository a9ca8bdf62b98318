"""Blocks and gathers by protocol: DLPack both ways, raw pointers, and what is refused.

Needs nothing but NumPy.
"""

import ctypes

import numpy as np

import pagedkv as pk
from pagedkv.interop import as_array, export

LAYERS, HEADS, DIM = 2, 2, 64
draw = np.random.default_rng(0)


class Guest:
    """An array of a framework that speaks DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.asked = array, []

    def __dlpack__(self, **options):
        self.asked.append(options)  # the newest version that the importer knows, the device, a copy or not
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


with pk.KVCache(pk.KVSpec(LAYERS, HEADS, DIM, "float32", block_size=16), device_memory="4MiB") as cache:
    seq = cache.sequence(range(40))
    with cache.step([seq]) as step:
        for layer in range(LAYERS):
            k, v = (Guest(draw.standard_normal((40, HEADS, DIM)).astype(np.float32)) for _ in "kv")
            assert as_array(k).ctypes.data == k.array.ctypes.data  # what the step reads is the guest's own memory
            step.write(layer, k, v)
    print("asked for", k.asked[0])

    blocks = seq.export_blocks()  # two whole blocks of 16 tokens: sealed, so read-only, and held while anybody has them
    first = np.from_dlpack(blocks[0])
    assert (first.ctypes.data, first.flags.writeable) == (blocks[0].ptr, False)
    try:
        blocks[0].__dlpack__()  # the old capsule cannot say "read-only"
    except BufferError as refusal:
        print("refused:", refusal)

    ptr, shape, strides, dtype, device, _ = blocks[1].raw()  # for C: an address, elements' strides, names
    floats = (ctypes.c_float * int(np.prod(shape))).from_address(ptr)
    assert floats[:DIM] == np.from_dlpack(blocks[1]).ravel()[:DIM].tolist()
    print(f"{dtype} {shape} with strides {strides} on {device}")
    assert not hasattr(blocks[0], "__cuda_array_interface__")  # arrays on a GPU have it, version 3, and their stream

    gathered = tuple(Guest(np.empty((LAYERS, 40, HEADS, DIM), np.float32)) for _ in "kv")
    seq.gather(out=gathered)  # into the guest's memory
    assert all((guest.array[:, :16] == first[:, i]).all() for i, guest in enumerate(gathered))
    seq.release()

bits = draw.standard_normal((4, 8)).astype(np.float32).view(np.uint16)[:, ::2].copy()
for name, array in (("bfloat16", bits), ("float8_e4m3fn", bits.view(np.uint8))):
    view = export(array, dtype=name)  # NumPy has neither type: what the bits are is said, and the capsule says it on
    assert (view.ptr, view.dtype) == (array.ctypes.data, name)
    print(name, view.shape, "at a multiple of", view.alignment)

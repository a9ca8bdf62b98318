"""Tensor maps: 128 bytes, encoded by the driver, that describe an array to TMA (sm_90+).

A kernel takes one as ``const __grid_constant__`` bytes within its parameter struct; the address in it is fixed, so it
stays right as long as the array stays where it is.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.kernels.driver import error_name, load_driver, tensor_map_encoder
from pagedkv.kernels.params import address

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
Swizzle = Literal[0, 32, 64, 128]

# CUtensorMapDataType and CUtensorMapSwizzle of cuda.h.
_DATA_TYPES = {
    "uint8": 0,
    "int8": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "uint16": 1,
    "float16": 6,
    "float32": 7,
    "bfloat16": 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_INTERLEAVE_NONE, _OUT_OF_BOUNDS_ZERO = 0, 0
_L2_PROMOTIONS = {256: 3, 128: 2, 64: 1}  # CUtensorMapL2promotion by bytes


def encode_tensor_map(
    array: Any, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: Swizzle = 0
) -> NDArray[np.void]:
    """The map of a strided tensor that begins at an array's first element.

    Parameters
    ----------
    array : device array; its address and dtype are taken, not its shape.
    dims : elements along each of up to five dimensions, the contiguous one first.
    strides : bytes from one index to the next, of every dimension but the first; multiples of 16.
    box : elements along each dimension that one copy brings; at most 256 each.
    swizzle : 128: the 16-byte pieces of a 128-byte row are permuted, so that columns are read without bank conflicts.

    Returns
    -------
    One element of dtype V128. Elements outside the tensor are read as zeros.

    Raises
    ------
    InvalidArgument
        The hardware cannot describe this; the message says why.
    WrongType
        No such element type.
    KernelsUnavailable
        There is no driver, or one older than CUDA 12.0.
    """
    itemsize, name = int(array.dtype.itemsize), array.dtype.name
    if name not in _DATA_TYPES:
        raise WrongType(f"a tensor map takes {', '.join(_DATA_TYPES)}, got {name}")
    start = address(array)
    check_tensor_map(start, itemsize, dims, strides, box, swizzle)
    rank = len(dims)
    room = (ctypes.c_ubyte * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
    aligned = -(-ctypes.addressof(room) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
    status = tensor_map_encoder(load_driver())(
        ctypes.c_void_p(aligned),
        ctypes.c_int(_DATA_TYPES[name]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(start),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(_INTERLEAVE_NONE),
        ctypes.c_int(_SWIZZLES[swizzle]),
        ctypes.c_int(_L2_PROMOTIONS.get(l2_bytes(start, itemsize, dims, strides, box), 0)),
        ctypes.c_int(_OUT_OF_BOUNDS_ZERO),
    )
    if status:
        raise InvalidArgument(
            f"the driver refuses a tensor map of {name} with dims {tuple(dims)}, strides {tuple(strides)}, "
            f"box {tuple(box)}, swizzle {swizzle}: {error_name(status)}"
        )
    return np.frombuffer(ctypes.string_at(aligned, TENSOR_MAP_BYTES), f"V{TENSOR_MAP_BYTES}").copy()


def l2_bytes(start: int, itemsize: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> int:
    """Bytes that L2 may fetch at a time without reading past a contiguous run of the boxes.

    A run is a row of the first dimension, and of those on which a box has more than one element as far as they follow
    without a gap. Behind it lie another reader's bytes, such as the next head's; with it they would come twice.

    Returns
    -------
    256, 128 or 64; less where runs begin or end at no multiple of 64 bytes.
    """
    run, apart = dims[0] * itemsize, [start]
    for dim, stride, side in zip(dims[1:], strides, box[1:], strict=True):
        if side > 1 and stride == run:
            run *= dim
        elif dim > 1:
            apart.append(stride)
    return math.gcd(256, run, *apart)


def check_tensor_map(
    start: int, itemsize: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> None:
    """Refuse, with the reason, arguments that the driver would refuse without one.

    Arguments as :func:`encode_tensor_map`.

    Parameters
    ----------
    start : address of the first element.

    Raises
    ------
    InvalidArgument
    """
    rank = len(dims)
    shapes = f"dims {tuple(dims)}, strides {tuple(strides)}, box {tuple(box)}"
    problem = None
    if not 1 <= rank <= 5 or len(strides) != rank - 1 or len(box) != rank:
        problem = "there are 1 to 5 dims, one stride less, and as many box sides"
    elif start % 16:
        problem = f"the address {start:#x} is no multiple of 16"
    elif not all(1 <= dim <= 2**32 for dim in dims):
        problem = "a dim is 1 to 2^32"
    elif not all(stride % 16 == 0 and 0 < stride < 2**40 for stride in strides):
        problem = "a stride is a multiple of 16 bytes below 2^40"
    elif not all(1 <= side <= 256 for side in box):
        problem = "a side of the box is 1 to 256"
    elif swizzle not in _SWIZZLES:
        problem = "the swizzle is 0, 32, 64 or 128"
    elif box[0] * itemsize % 16 or (swizzle and box[0] * itemsize > swizzle):
        problem = "the box's first side is a multiple of 16 bytes, and at most the swizzle's width"
    if problem:
        raise InvalidArgument(f"no tensor map for {shapes}, swizzle {swizzle}: {problem}")

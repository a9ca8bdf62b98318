"""``cpu.gather``: any range of tokens, in any layout of arena and result.

Bit for bit, and into the result's own memory alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv import cpu
from pagedkv.cpu import _gather
from tests.cpu.gil import lets_others_run

BLOCK, HEADS, DIM, LAYERS, NUM_BLOCKS = 4, 3, 8, 2, 9
BLOCKS = np.array([7, 0, 8, 3, 5], np.int32)
RANGES = [(0, 20), (0, 1), (3, 4), (3, 5), (4, 8), (5, 19), (19, 20), (7, 7), (0, 0), (20, 20)]

Pair = tuple[NDArray[Any], NDArray[Any]]


def arena(dtype: str = "float32", layout: str = "NHD") -> Pair:
    """K and V as views of one array of random bytes.

    Each [num_blocks, num_layers, block_size, num_kv_heads, head_dim].
    """
    inside = (BLOCK, HEADS) if layout == "NHD" else (HEADS, BLOCK)
    shape = (NUM_BLOCKS, LAYERS, 2, *inside, DIM)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    whole = np.random.default_rng(3).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
    k, v = whole[:, :, 0], whole[:, :, 1]
    return (k, v) if layout == "NHD" else (k.swapaxes(2, 3), v.swapaxes(2, 3))


def expected(side: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """What NumPy gathers: [num_layers, stop - start, num_kv_heads, head_dim]."""
    return side[BLOCKS].swapaxes(0, 1).reshape(LAYERS, -1, HEADS, DIM)[:, start:stop]


def dense(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return np.zeros(shape, dtype)


def heads_first(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    layers, tokens, heads, dim = shape
    return np.zeros((layers, heads, tokens, dim), dtype).swapaxes(1, 2)


def every_second_token(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    layers, tokens, heads, dim = shape
    return np.zeros((layers, 2 * tokens, heads, dim), dtype)[:, ::2]


def backwards(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return np.zeros(shape, dtype)[::-1, ::-1, ::-1]


def every_second_number(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return np.zeros((*shape[:3], 2 * shape[3]), dtype)[..., ::2]


def at_an_odd_address(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(size + 64, np.uint8)
    first = -room.ctypes.data % 64 + np.dtype(dtype).itemsize
    return room[first : first + size].view(dtype).reshape(shape)


OUTPUTS = [dense, heads_first, every_second_token, backwards, every_second_number, at_an_odd_address]


@pytest.mark.parametrize("make", OUTPUTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_every_range_is_what_numpy_gathers(dtype: str, layout: str, make: Any) -> None:
    k, v = arena(dtype, layout)
    for start, stop in RANGES:
        shape = (LAYERS, stop - start, HEADS, DIM)
        out = make(shape, dtype), make(shape, dtype)
        cpu.gather(k, v, BLOCKS, start, stop, *out)
        for found, side in zip(out, (k, v), strict=True):
            assert found.tobytes() == expected(side, start, stop).tobytes(), (start, stop)


@pytest.mark.parametrize("make", [dense, heads_first, at_an_odd_address], ids=lambda make: make.__name__)
def test_a_result_larger_than_the_caches_has_the_same_bits_on_any_number_of_threads(make: Any, threads: None) -> None:
    heads, dim, num_tokens = 3, 64, 1500
    whole = np.random.default_rng(1).integers(0, 256, (96, 6, 2, 16, heads, dim * 4), np.uint8).view(np.float32)
    k, v = whole[:, :, 0], whole[:, :, 1]
    blocks = np.random.default_rng(2).permutation(96)[:94].astype(np.int32)
    shape = (6, num_tokens - 5, heads, dim)
    assert 2 * np.prod(shape) * 4 > 8 << 20, "as much as is stored past the caches"
    for number in (1, 2, 7):
        cpu.set_num_threads(number)
        out = make(shape, "float32"), make(shape, "float32")
        cpu.gather(k, v, blocks, 5, num_tokens, *out)
        for found, side in zip(out, (k, v), strict=True):
            wanted = side[blocks].swapaxes(0, 1).reshape(6, -1, heads, dim)[:, 5:num_tokens]
            assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("make", [heads_first, every_second_token], ids=lambda make: make.__name__)
def test_nothing_outside_the_result_is_written(make: Any) -> None:
    k, v = arena()
    for start, stop in itertools.combinations(range(0, 21, 3), 2):
        frame = [np.full((LAYERS, 40, HEADS, DIM), 7, np.float32) for _ in "kv"]
        inside = [array[:, 10 : 10 + stop - start] for array in frame]
        cpu.gather(k, v, BLOCKS, start, stop, *inside)
        for array, side in zip(frame, (k, v), strict=True):
            assert (array[:, :10] == 7).all()
            assert (array[:, 10 + stop - start :] == 7).all()
            found = array[:, 10 : 10 + stop - start]
            assert found.tobytes() == expected(side, start, stop).tobytes()


def result(tokens: int = 20, dtype: str = "float32") -> NDArray[Any]:
    return np.zeros((LAYERS, tokens, HEADS, DIM), dtype)


def sealed() -> NDArray[Any]:
    array = result()
    array.flags.writeable = False
    return array


WRONG: dict[str, Any] = {
    "a block beyond the arena": {"blocks": np.array([7, 0, NUM_BLOCKS, 3, 5], np.int32)},
    "a block below 0": {"blocks": np.array([7, 0, 8, 3, -1], np.int32)},
    "more tokens than blocks hold": {"stop": 21, "k_out": result(21), "v_out": result(21)},
    "a start below 0": {"start": -1, "k_out": result(21), "v_out": result(21)},
    "a stop before the start": {"start": 5, "stop": 4},
    "blocks of int64": {"blocks": BLOCKS.astype(np.int64)},
    "every second block": {"blocks": np.repeat(BLOCKS, 2)[::2]},
    "blocks as a list": {"blocks": BLOCKS.tolist()},
    "a result too short": {"k_out": result(19)},
    "a result of another dtype": {"v_out": result(dtype="float64")},
    "a result in another byte order": {"v_out": result(dtype=">f4")},
    "a read-only result": {"k_out": sealed()},
    "a result that is a list": {"k_out": [1.0]},
    "k in four dimensions": {"k": np.zeros((NUM_BLOCKS, BLOCK, HEADS, DIM), np.float32)},
    "v of another shape": {"v": np.zeros((NUM_BLOCKS, LAYERS, BLOCK, HEADS, DIM + 1), np.float32)},
    "objects": {"k": np.zeros((NUM_BLOCKS, LAYERS, BLOCK, HEADS, DIM), object),
                "v": np.zeros((NUM_BLOCKS, LAYERS, BLOCK, HEADS, DIM), object)},
    "k whose last axis has gaps": {
        "k": np.zeros((NUM_BLOCKS, LAYERS, BLOCK, HEADS, 2 * DIM), np.float32)[..., ::2],
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_a_gather_that_does_not_fit_is_refused_and_writes_nothing(changes: dict[str, Any]) -> None:
    k, v = arena()
    call = {"k": k, "v": v, "blocks": BLOCKS, "start": 0, "stop": 20, "k_out": result(), "v_out": result(), **changes}
    with pytest.raises((pk.InvalidArgument, pk.LayoutMismatch, pk.WrongType)):
        cpu.gather(*call.values())
    assert not np.asarray(call["v_out"]).any()


def test_a_result_in_the_arena_itself_is_refused() -> None:
    k, v = arena()
    before = k.tobytes()
    with pytest.raises(pk.LayoutMismatch, match="shares memory"):
        cpu.gather(k, v, BLOCKS[:1], 0, BLOCK, k[1].copy(), v[2])
    assert k.tobytes() == before


def test_others_run_while_a_call_gathers() -> None:
    k = v = np.zeros((64, 4, 16, 4, 64), np.float32)
    blocks = np.arange(64, dtype=np.int32)
    out = np.zeros((4, 1024, 4, 64), np.float32), np.zeros((4, 1024, 4, 64), np.float32)
    gather = _gather.gather  # NumPy lets go of the GIL too, where overlaps are looked for
    assert lets_others_run(lambda: gather(k, v, blocks, 0, 1024, *out, 1))

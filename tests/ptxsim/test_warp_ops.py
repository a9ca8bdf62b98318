"""Shuffles, votes, matches, reductions and elections of warps.

Some tests leave lanes out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptxsim.cuda import Asm, run, run_asm
from tests.ptxsim.errors import DivergentWarp

LANES = np.arange(32)
SHUFFLES = {
    f"{mode}.{width}.{by}": (mode, width, by)
    for mode in ("bfly", "up", "down", "idx")
    for width in (32, 16, 8)
    for by in (1, 3, 9, 31)
}


def shuffled(values: NDArray[Any], mode: str, width: int, by: int) -> NDArray[Any]:
    """Return CUDA's definition of a shuffle.

    Beyond the segment a lane keeps its own value; a butterfly may reach earlier segments.
    """
    out = values.copy()
    for lane in range(32):
        first = lane // width * width
        source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": first + by % width}[mode]
        if (0 if mode == "bfly" else first) <= source < first + width:
            out[..., lane] = values[..., source]
    return out


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffle(name: str) -> None:
    mode, width, by = SHUFFLES[name]
    call = {"bfly": "__shfl_xor_sync", "up": "__shfl_up_sync", "down": "__shfl_down_sync", "idx": "__shfl_sync"}[mode]
    source = f"""extern "C" __global__ void k(const int* a, int* out, int by) {{
      const int t = threadIdx.x;
      out[t] = {call}(0xffffffffu, a[t], {by}, {width});
      out[64 + t] = {call}(0xffffffffu, a[t], by, {width}); }}"""
    a, out = np.random.default_rng(1).integers(0, 1000, 64).astype(np.int32), np.zeros((2, 64), np.int32)
    run(source, 1, 64, a, out, np.int32(by))
    expected = shuffled(a.reshape(2, 32), mode, width, by).reshape(-1)
    np.testing.assert_array_equal(out[0], expected)
    np.testing.assert_array_equal(out[1], expected)


def test_votes_and_masks() -> None:
    source = """extern "C" __global__ void k(const int* a, unsigned* out) {
      const int t = threadIdx.x; const bool p = a[t] > 500; unsigned* o = out + t;
      o[0] = __ballot_sync(0xffffffffu, p); o[64] = __any_sync(0xffffffffu, p); o[128] = __all_sync(0xffffffffu, p);
      if (t % 32 < 20) { o[192] = __activemask(); o[256] = __ballot_sync(0xfffffu, p); }
      unsigned m; asm("mov.u32 %0, %lanemask_lt;" : "=r"(m)); o[320] = m;
      o[384] = __popc(__match_any_sync(0xffffffffu, a[t] % 4)); int agree;
        o[448] = __match_all_sync(0xffffffffu, t / 32, &agree);
      o[512] = agree; }"""
    a, out = np.random.default_rng(2).integers(0, 1000, 64).astype(np.int32), np.zeros((9, 64), np.uint32)
    a[32:] = 700
    run(source, 1, 64, a, out)
    held = (a > 500).reshape(2, 32)
    words = (held * (1 << LANES.astype(np.uint64))).sum(axis=1)
    np.testing.assert_array_equal(out[0], np.repeat(words, 32))
    np.testing.assert_array_equal(out[1], np.repeat(held.any(axis=1), 32))
    np.testing.assert_array_equal(out[2], np.repeat(held.all(axis=1), 32))
    some = np.tile(LANES < 20, 2)
    np.testing.assert_array_equal(out[3], np.where(some, 0xFFFFF, 0))
    np.testing.assert_array_equal(out[4], np.where(some, np.repeat(words & 0xFFFFF, 32), 0))
    np.testing.assert_array_equal(out[5], np.tile((1 << LANES) - 1, 2))
    rest = (a % 4).reshape(2, 32)
    np.testing.assert_array_equal(out[6], (rest[:, :, None] == rest[:, None, :]).sum(axis=2).reshape(-1))
    np.testing.assert_array_equal(out[7:], [[0xFFFFFFFF] * 64, [1] * 64])


REDUX = [
    Asm(
        f"{op}.{kind}",
        f"redux.sync.{op}.{kind} %0, %1, 0xffffffff;",
        kind if kind != "b32" else "u32",
        (kind if kind != "b32" else "u32",),
        f,
    )
    for op, kind, f in (
        ("add", "s32", np.sum),
        ("add", "u32", np.sum),
        ("min", "s32", np.min),
        ("max", "u32", np.max),
        ("and", "b32", np.bitwise_and.reduce),
        ("or", "b32", np.bitwise_or.reduce),
        ("xor", "b32", np.bitwise_xor.reduce),
    )
]


@pytest.mark.parametrize("one", REDUX, ids=lambda one: one.name)
def test_redux(one: Asm) -> None:
    dtype = np.int32 if one.result == "s32" else np.uint32
    a = (
        np.random.default_rng(3).integers(-(2**31), 2**31, 64).astype(dtype)
        if dtype == np.int32
        else np.random.default_rng(3).integers(0, 2**32, 64, np.uint32)
    )
    with np.errstate(over="ignore"):
        expected = np.concatenate(
            [
                np.full(32, one.expect(half) if "add" not in one.name else half.sum(dtype=dtype))
                for half in a.reshape(2, 32)
            ]
        )
    np.testing.assert_array_equal(run_asm(REDUX, one, a), expected)


def test_elect_names_the_lowest_lane() -> None:
    source = """extern "C" __global__ void k(unsigned* out) {
      unsigned leader = 99, chosen = 0;
      if (threadIdx.x % 32 >= 5)
        asm volatile("{.reg .pred p; elect.sync %0|p, 0xffffffe0; selp.u32 %1, 1, 0, p;}" : "=r"(leader),
        "=r"(chosen));
      out[threadIdx.x] = leader; out[64 + threadIdx.x] = chosen; }"""
    out = np.zeros((2, 64), np.uint32)
    run(source, 1, 64, out)
    np.testing.assert_array_equal(out[0], np.tile(np.where(LANES >= 5, 5, 99), 2))
    np.testing.assert_array_equal(out[1], np.tile(LANES == 5, 2))


def test_a_block_that_is_no_multiple_of_a_warp() -> None:
    source = """extern "C" __global__ void k(unsigned* out) {
      out[blockIdx.x * 40 + threadIdx.x] = __activemask(); __syncthreads();
      if (threadIdx.x >= 32) return;
      const unsigned few = __ballot_sync(0xffffffffu, threadIdx.x < 3);
      if (threadIdx.x == 0) out[80 + blockIdx.x] = few; }"""
    out = np.zeros(82, np.uint32)
    run(source, 2, 40, out)
    np.testing.assert_array_equal(out[:80].reshape(2, 40), np.repeat([[0xFFFFFFFF] * 32 + [0xFF] * 8], 2, axis=0))
    assert out[80:].tolist() == [7, 7]


@pytest.mark.parametrize(
    "call",
    [
        "if (threadIdx.x % 32 > 3) x = __shfl_xor_sync(0xffffffffu, x, 1);",
        "if (threadIdx.x % 32 > 3) x = __ballot_sync(0xffffffffu, x > 2);",
        "if (threadIdx.x % 32 > 3) __syncwarp();",
        'if (threadIdx.x % 2) asm volatile("redux.sync.add.u32 %0, %0, 0xffffffff;" : "+r"(x));',
        "if (threadIdx.x % 32 < 8) x = __shfl_sync(0xffu, x, 9);",
        "if (threadIdx.x % 32 < 8) x = __shfl_sync(0xf0u, x, 5);",
        'if (threadIdx.x % 32) asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));',
    ],
)
def test_missing_lanes_are_an_error(call: str) -> None:
    source = f'extern "C" __global__ void k(int* out) {{ int x = threadIdx.x; {call} out[threadIdx.x] = x; }}'
    with pytest.raises(DivergentWarp, match=r"(?s)divergent warp.*test\.cu:1"):
        run(source, 1, 32, np.zeros(32, np.int32))

"""atom and red in global and shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ptxsim.cuda import run

SOURCE = """extern "C" __global__ void k(const TYPE* a, TYPE* cells, TYPE* old) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
#if SHARED
  __shared__ TYPE s[4];
  if (threadIdx.x < 4) s[threadIdx.x] = cells[threadIdx.x];
  __syncthreads();
  old[t] = CALL(s + t % 4, a[t]);
  __syncthreads();
  if (threadIdx.x < 4) cells[threadIdx.x] = s[threadIdx.x];
#else
  old[t] = CALL(cells + t % 4, a[t]);
#endif
}"""
OPS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "atomicAdd int": ("int", lambda x, v: x + v),
    "atomicAdd unsigned": ("unsigned", lambda x, v: (x + v) % 2**32),
    "atomicAdd float": ("float", lambda x, v: np.float32(x + v)),
    "atomicMax int": ("int", max),
    "atomicMin unsigned": ("unsigned", min),
    "atomicMax unsigned": ("unsigned", max),
    "atomicExch int": ("int", lambda x, v: v),
    "atomicInc unsigned": ("unsigned", lambda x, v: 0 if x >= v else x + 1),
    "atomicDec unsigned": ("unsigned", lambda x, v: v if x == 0 or x > v else x - 1),
    "atomicAnd unsigned": ("unsigned", lambda x, v: x & v),
    "atomicOr unsigned": ("unsigned", lambda x, v: x | v),
    "atomicXor unsigned": ("unsigned", lambda x, v: x ^ v),
}
NUMPY = {"int": np.int32, "unsigned": np.uint32, "float": np.float32}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_atomics_run_in_lane_order(name: str, shared: bool) -> None:
    call = name.split()[0]
    kind, function = OPS[name]
    rng = np.random.default_rng(4)
    a = rng.integers(0, 50, 64).astype(NUMPY[kind])
    cells = rng.integers(0, 50, 4).astype(NUMPY[kind])
    expected_cells, expected_old = [v.item() for v in cells], []
    for t, value in enumerate(a.tolist()):
        expected_old.append(expected_cells[t % 4])
        expected_cells[t % 4] = function(expected_cells[t % 4], value)
    old = np.zeros_like(a)
    run(SOURCE, 1, 64, a, cells, old, macros=[f"TYPE={kind}", f"CALL={call}", f"SHARED={int(shared)}"])
    np.testing.assert_array_equal(old, expected_old)
    np.testing.assert_array_equal(cells, expected_cells)


def test_compare_and_swap_loop() -> None:
    source = """extern "C" __global__ void k(float* cell, unsigned long long* wide) {
      unsigned* word = (unsigned*)cell; unsigned old = *(volatile unsigned*)word, seen;
      do { seen = old; old = atomicCAS(word,
        seen, __float_as_uint(fmaxf(__uint_as_float(seen), float(threadIdx.x)))); } while (old != seen);
      atomicAdd(wide, 1ull << 33); atomicMax(wide + 1, (unsigned long long)threadIdx.x << 40); }"""
    cell, wide = np.zeros(1, np.float32), np.zeros(2, np.uint64)
    run(source, 2, 64, cell, wide)
    assert cell[0] == 63
    assert wide.tolist() == [128 << 33, 63 << 40]


def test_reductions_without_result_and_packed_halves() -> None:
    source = """#include <cuda_fp16.h>
    #include <cuda_bf16.h>
    extern "C" __global__ void k(int* a, __half2* h, __nv_bfloat162* b) {
      asm volatile("red.global.add.s32 [%0], %1;" :: "l"(a), "r"(1) : "memory");
      asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" :: "l"(a + 1), "r"((int)threadIdx.x) : "memory");
      atomicAdd(h, __floats2half2_rn(1.f, 0.5f)); atomicAdd(b, __floats2bfloat162_rn(2.f, -1.f)); }"""
    a, h, b = np.zeros(2, np.int32), np.zeros(2, np.float16), np.zeros(2, np.uint16)
    run(source, 1, 64, a, h, b)
    assert a.tolist() == [64, 63]
    assert h.tolist() == [64, 32]
    assert (b.astype(np.uint32) << 16).view(np.float32).tolist() == [128, -64]


def test_a_ticket_per_cta_over_a_large_grid() -> None:
    source = """extern "C" __global__ void k(unsigned* counter, unsigned* tickets) {
      if (threadIdx.x == 0) tickets[blockIdx.x] = atomicAdd(counter, 1); }"""
    counter, tickets = np.zeros(1, np.uint32), np.zeros(100, np.uint32)
    run(source, 100, 32, counter, tickets)
    assert sorted(tickets.tolist()) == list(range(100))
    assert counter[0] == 100

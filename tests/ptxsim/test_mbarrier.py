"""mbarriers: phases, expected bytes, orders of memory, and deadlocks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptxsim.cuda import run
from tests.ptxsim.errors import DataRace, Deadlock, MbarrierError, OutOfBounds, UninitialisedRead

HEAD = """typedef unsigned long long u64;
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(u64* b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(b)),
      "r"(n) : "memory"); }
__device__ void arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(b)) : "memory"); }
__device__ void expect(u64* b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(b)), "r"(n) : "memory"); }
__device__ bool test(u64* b, int parity) { unsigned ok;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(ok) : "r"(at(b)), "r"(parity) : "memory"); return ok; }
__device__ void wait(u64* b, int parity) { unsigned ok;
  do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                  : "=r"(ok) : "r"(at(b)), "r"(parity) : "memory"); while (!ok); }
"""
# A warp fills a ring of two buffers for another warp.
RING = (
    HEAD
    + """extern "C" __global__ void k(int* out, int rounds) {
  __shared__ u64 full[2], empty[2]; __shared__ int s[2][32]; const int t = threadIdx.x % 32;
  if (threadIdx.x == 0) for (int i = 0; i < 2; ++i) { init(full + i, FULL); init(empty + i, 1); }
  BARRIER
  if (threadIdx.x < 32) {
    for (int i = 0; i < rounds; ++i) { EMPTY s[i % 2][t] = i * 100 + t; ARRIVE }
  } else {
    for (int i = 0; i < rounds; ++i) {
      WAIT
      out[i * 32 + t] = s[i % 2][31 - t];
      __syncwarp();
      if (t == 0) arrive(empty + i % 2);
    }
  } }"""
)
GOOD = {
    "FULL": "32", "BARRIER": "__syncthreads();", "EMPTY": "wait(empty + i % 2, i / 2 % 2 ^ 1);",
    "ARRIVE": "arrive(full + i % 2);",
    "WAIT": "wait(full + i % 2, i / 2 % 2);",
}  # fmt: skip


def ring(rounds: int = 7, **changes: str) -> None:
    source = RING
    for name, text in (GOOD | changes).items():
        source = source.replace(name, text)
    out = np.zeros((rounds, 32), np.int32)
    run(source, 3 if changes.get("grid") else 1, 64, out, np.int32(rounds))
    np.testing.assert_array_equal(out, np.arange(rounds)[:, None] * 100 + np.arange(31, -1, -1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"FULL": "1", "ARRIVE": "__syncwarp(); if (t == 0) arrive(full + i % 2);"},
        {"WAIT": "while (!test(full + i % 2, i / 2 % 2)) {}"},
        {"EMPTY": "if (i >= 2) wait(empty + i % 2, (i / 2 - 1) % 2);"},
    ],
)
def test_a_ring_between_two_warps(changes: dict[str, str]) -> None:
    ring(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"WAIT": "wait(full + i % 2, i / 2 % 2 ^ 1);"},
            (UninitialisedRead, DataRace, Deadlock),
            "reads shared byte|no thread",
        ),
        ({"EMPTY": ""}, (DataRace, Deadlock), "unsynchronised read|no thread"),
        (
            {"EMPTY": "wait(empty + i % 2, i / 2 % 2);"},
            Deadlock,
            "no thread can go on.*threads 0-31 of CTA 0 at an mbarrier.*threads 32-63",
        ),
        ({"FULL": "33"}, Deadlock, "threads 32-63 of CTA 0 at an mbarrier"),
        (
            {"FULL": "1", "ARRIVE": "if (t == 0) arrive(full + i % 2);"},
            DataRace,
            "reads shared byte .* unsynchronised write by thread",
        ),
        ({"BARRIER": "__syncwarp();"}, MbarrierError, "init by thread 0 of CTA 0 is not ordered|not initialised"),
        ({"FULL": "0"}, MbarrierError, "the count 0"),
        ({"FULL": "16"}, MbarrierError, "32 arrivals at an mbarrier that expects 16"),
    ],
)
def test_what_a_ring_can_get_wrong(changes: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        ring(**changes)


def test_states_counts_and_transactions() -> None:
    source = (
        HEAD
        + """extern "C" __global__ void k(int* out) {
      __shared__ u64 b; const unsigned a = at(&b); u64 state; unsigned ok;
      init(&b, 3);
      out[0] = test(&b, 0); out[1] = test(&b, 1);
      asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(state) : "r"(a) : "memory");
      expect(&b, 64); out[2] = test(&b, 0);
      asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 64;" :: "r"(a) : "memory");
      out[3] = test(&b, 0);
      asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(ok) : "r"(a), "l"(state) : "memory");
      out[4] = ok; out[5] = test(&b, 1);
      asm volatile("mbarrier.arrive_drop.shared::cta.b64 _, [%0];" :: "r"(a) : "memory");
      arrive(&b); arrive(&b); out[6] = test(&b, 1); arrive(&b); arrive(&b); out[7] = test(&b, 0);
      asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(a) : "memory"); }"""
    )
    out = np.full(8, -1, np.int32)
    run(source, 1, 1, out)
    assert out.tolist() == [0, 1, 0, 1, 1, 0, 1, 1]


def test_copies_arrive_at_an_mbarrier() -> None:
    source = (
        HEAD
        + """extern "C" __global__ void k(const int* a, int* out) {
      __shared__ u64 b; __shared__ int s[32]; const int t = threadIdx.x;
      if (t == 0) init(&b, 32); __syncthreads();
      if (t < 32) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(s + t)), "l"(a + t) : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at(&b)) : "memory");
      } else { WAIT out[t - 32] = s[63 - t]; } }"""
    )
    a, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    run(source.replace("WAIT", "wait(&b, 0);"), 1, 64, a, out)
    np.testing.assert_array_equal(out, a[::-1])
    with pytest.raises(UninitialisedRead):
        run(source.replace("WAIT", ""), 1, 64, a, out)


def test_an_mbarrier_outside_shared_memory() -> None:
    source = 'extern "C" __global__ void k(int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(n)); }'
    with pytest.raises(OutOfBounds):
        run(source, 1, 1, np.int32(8))

"""Branches, calls, CTA barriers, named barriers, polling and deadlocks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptxsim.cuda import run, run_ptx
from tests.ptxsim.errors import BarrierError, DataRace, Deadlock, DeviceTrap, UnsupportedPtx


def test_loops_of_different_lengths_meet_again() -> None:
    source = """extern "C" __global__ void k(int* out) { int sum = 0;
      for (int i = 0; i < (int)threadIdx.x % 7; ++i) { if (i == 3) continue; if (i == 5) break; sum += i; }
      out[threadIdx.x] = sum + __popc(__activemask()); }"""
    out = np.zeros(64, np.int32)
    run(source, 1, 64, out)
    assert out.tolist() == [sum(i for i in range(min(t % 7, 5)) if i != 3) + 32 for t in range(64)]


def test_switch() -> None:
    cases = "".join(f'case {i}: x = {i * i + 3} * threadIdx.x; asm volatile(""); break;' for i in range(12))
    source = f"""extern "C" __global__ void k(int* a) {{ int x = -1;
      switch (a[threadIdx.x]) {{ {cases} }} a[threadIdx.x] = x; }}"""
    a = (np.arange(32, dtype=np.int32) * 5) % 14
    expected = [int(v * v + 3) * t if v < 12 else -1 for t, v in enumerate(a)]
    run(source, 1, 32, a)
    assert a.tolist() == expected


def test_indexed_branch() -> None:
    source = """extern "C" __global__ void k(int* a) { int x;
      asm volatile("{ts: .branchtargets A, B, C;\\nbrx.idx %1, ts;\\nA: mov.u32 %0, 10;\\nbra E;\\n"
                   "B: mov.u32 %0, 20;\\nbra E;\\nC: mov.u32 %0, 30;\\nE:\\n}"
                   : "=r"(x) : "r"(a[threadIdx.x]));
      a[threadIdx.x] = x; }"""
    a = np.arange(32, dtype=np.int32) % 3
    run(source, 1, 32, a)
    assert a.tolist() == [(t % 3 + 1) * 10 for t in range(32)]


def test_calls_are_inlined() -> None:
    source = """struct Pair { int a, b; };
    __device__ __noinline__ int twice(int x) { return x > 20 ? 2 * x : -x; }
    __device__ __noinline__ Pair both(Pair p, int n) { for (int i = 0; i < n; ++i) p.a += twice(p.b + i); return p; }
    extern "C" __global__ void k(int* out) { const int t = threadIdx.x;
      out[t] = twice(t) + both(Pair{t, 3 * t}, t % 4).a; }"""
    out = np.zeros(32, np.int32)

    def twice(x: int) -> int:
        return 2 * x if x > 20 else -x

    run(source, 1, 32, out)
    assert out.tolist() == [twice(t) + t + sum(twice(3 * t + i) for i in range(t % 4)) for t in range(32)]


def test_traps_and_asserts() -> None:
    with pytest.raises(DeviceTrap, match="thread 5 of CTA 1 ran trap"):
        run('extern "C" __global__ void k() { if (blockIdx.x == 1 && threadIdx.x == 5) __trap(); }', 2, 32)


def test_barrier_reductions() -> None:
    source = """extern "C" __global__ void k(int* out) { const int t = threadIdx.x, b = blockIdx.x;
      const int count = __syncthreads_count(t % 3 == b), all = __syncthreads_and(t < 64 - b);
      out[b * 64 + t] = count * 100 + all * 10 + __syncthreads_or(t == 63 + b); }"""
    out = np.zeros((2, 64), np.int32)
    run(source, 2, 64, out)
    assert out[:, 0].tolist() == [22 * 100 + 11, 21 * 100]
    assert (out == out[:, :1]).all()


NAMED = """__device__ void sync(int id, int n) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory"); }
__device__ void arrive(int id, int n) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory"); }
extern "C" __global__ void k(int* out) { __shared__ int s[64]; const int t = threadIdx.x;
  for (int round = 0; round < 3; ++round) {
    if (t < 64) {           // two producing warps
      if (round) sync(2, 128);
      s[t] = round * 100 + t; FIRST
    } else {                // two consuming warps
      SECOND out[round * 64 + t - 64] = s[127 - t];
      arrive(2, 128);
    }
  }
  if (t < 64) sync(2, 128); }"""


def test_producers_and_consumers_at_named_barriers() -> None:
    out = np.zeros((3, 64), np.int32)
    run(NAMED.replace("FIRST", "arrive(1, 128);").replace("SECOND", "sync(1, 128);"), 1, 128, out)
    np.testing.assert_array_equal(out, np.arange(3)[:, None] * 100 + np.arange(63, -1, -1))


def test_a_named_barrier_that_is_missing_is_a_race() -> None:
    with pytest.raises(DataRace, match="unsynchronised"):
        run(NAMED.replace("FIRST", "").replace("SECOND", ""), 1, 128, np.zeros((3, 64), np.int32))
    source = NAMED.replace("FIRST", "arrive(1, 128);").replace("SECOND", "sync(1, 128);")
    source = source.replace("if (round) sync(2, 128);", "").replace("arrive(2, 128);", "")
    with pytest.raises(DataRace, match="unsynchronised read"):
        run(
            source.replace("if (t < 64) sync(2, 128);", ""),
            1,
            128,
            np.zeros((3, 64), np.int32),
        )


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            "if (t >= 32) return; __syncthreads();",
            BarrierError,
            "exited before a barrier.*threads 0-31 of CTA 0.*ended",
        ),
        (
            "if (t >= 32) __syncthreads(); else { s[t] = 1; __syncthreads(); s[t] = 2; }",
            BarrierError,
            "different barriers",
        ),
        (
            'if (t < 32) asm volatile("bar.sync 1, 64;"); else asm volatile("bar.sync 2, 64;");',
            Deadlock,
            "no thread can go on.*threads 0-31.*barrier 1.*threads 32-63.*barrier 2",
        ),
        ('asm volatile("bar.sync 1, 32;");', BarrierError, "64 threads of CTA 0 arrive at barrier 1, which counts 32"),
        ('asm volatile("bar.sync 1, 40;");', BarrierError, "count of 40"),
        ("while (((volatile int*)a)[0] == 0) {}", Deadlock, "poll memory that no thread changes.* 0-63 of CTA 0"),
    ],
)
def test_threads_that_cannot_go_on(body: str, error: type[Exception], message: str) -> None:
    source = f"""extern "C" __global__ void k(int* a) {{ __shared__ volatile int s[64]; const int t = threadIdx.x;
      {body} a[t] = 1; }}"""
    with pytest.raises(error, match=f"(?s){message}"):
        run(source, 1, 64, np.zeros(64, np.int32))


def test_polling_a_flag_of_another_cta_ends() -> None:
    """CTA 0 waits for CTA 1, whose code lies at higher addresses."""
    source = """extern "C" __global__ void k(int* flag, int* data, int* out) {
      if (blockIdx.x == 0) {
        if (threadIdx.x == 0) { while (atomicAdd(flag, 0) == 0) {} __threadfence(); }
        __syncthreads(); out[threadIdx.x] = data[threadIdx.x];
      } else {
        data[threadIdx.x] = threadIdx.x * 3; __threadfence(); __syncthreads();
        if (threadIdx.x == 0) atomicExch(flag, 1);
      } }"""
    flag, data, out = np.zeros(1, np.int32), np.zeros(64, np.int32), np.zeros(64, np.int32)
    run(source, 2, 64, flag, data, out)
    assert out.tolist() == [3 * t for t in range(64)]


HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 a) {\n"


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.b32 %r1, %r1;",
        "add.frob.u32 %r1, %r1, %r1;",
        "add.u128 %r1, %r1, %r1;",
        "mov.u32 %r1, %nosuch;",
        "cvt.rn.satfinite.tf32.f16 %r1, %r1;",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%r1}, {%r1}, {%r1}, {%r1};",
    ],
)
def test_unknown_instructions_are_errors(text: str) -> None:
    ptx = HEAD + f".reg .b32 %r<3>;\n{text}\nret;\n}}"
    with pytest.raises(UnsupportedPtx):
        run_ptx(ptx, 1, 32, np.zeros(4, np.int32))


def test_an_unknown_opcode_is_an_error_even_if_never_reached() -> None:
    with pytest.raises(UnsupportedPtx, match="opcode 'frobnicate'"):
        run_ptx(HEAD + ".reg .b32 %r<3>;\nret;\nfrobnicate.b32 %r1, %r1;\n}", 1, 32, np.zeros(4, np.int32))


def test_scopes_of_registers_and_labels() -> None:
    ptx = (
        HEAD
        + """.reg .b64 %rd<3>; .reg .b32 %r<3>; ld.param.u64 %rd1, [a]; mov.u32 %r1, 0;
    { .reg .b32 x; mov.u32 x, 5; L: add.u32 x, x, 1; { .reg .pred p; setp.lt.u32 p, x, 9; @p bra L;
      } add.u32 %r1, %r1, x; }
    { .reg .b32 x; mov.u32 x, 50; L: add.u32 x, x, 1; { .reg .pred p; setp.lt.u32 p, x, 53; @p bra L;
      } add.u32 %r1, %r1, x; }
    st.global.u32 [%rd1], %r1; ret; }"""
    )
    a = np.zeros(1, np.uint32)
    run_ptx(ptx, 1, 1, a)
    assert a[0] == 9 + 53

"""Races in shared and in global memory.

The checker catches these races, and accepts the patterns that are none.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptxsim.cuda import run
from tests.ptxsim.errors import DataRace

SHARED = 'extern "C" __global__ void k(int* out) {{ __shared__ int s[128]; const int t = threadIdx.x; {} }}'


def shared(body: str, threads: int = 64) -> np.ndarray:
    out = np.zeros(threads, np.int32)
    run(SHARED.format(body), 1, threads, out)
    return out


@pytest.mark.parametrize(
    "body",
    [
        "s[t] = t; __syncthreads(); out[t] = s[63 - t];",
        "s[t] = t; __syncwarp(); out[t] = s[t ^ 31];",
        "s[t] = t; out[t] = s[t]; s[t] = 2; out[t] += s[t];",
        "s[t] = t; __syncthreads(); const int x = s[63 - t]; __syncthreads(); s[t] = x; out[t] = s[t];",
        "s[t] = t; __syncwarp(); const int x = s[t ^ 1]; __syncwarp(); s[t] = x; out[t] = s[t];",
        "if (t == 0) s[5] = 7; __syncthreads(); out[t] = s[5]; __syncthreads(); atomicAdd(s + 5, 0);",
        "if (t < 32) s[t] = 0; __syncthreads(); atomicAdd(s + t % 32, 1); __syncthreads(); out[t] = s[t % 32];",
        "((char*)s)[t] = t; __syncthreads(); out[t] = ((char*)s)[63 - t];",
        "for (int i = 0; i < 3; ++i) { s[t] = i; __syncthreads(); out[t] += s[63 - t]; __syncthreads(); }",
    ],
)
def test_ordered_in_shared_memory(body: str) -> None:
    shared(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("s[t] = t; out[t] = s[63 - t];", "reads shared byte .* after an unsynchronised write"),
        ("s[t] = t; __syncwarp(); out[t] = s[63 - t];", "reads shared byte"),
        ("s[t] = t; out[t] = s[t ^ 1];", "reads shared byte"),
        ("s[t] = t; out[t] = __shfl_sync(~0u, s[t ^ 1], 0);", "reads shared byte"),
        ("s[t] = t; __ballot_sync(~0u, 1); out[t] = s[t ^ 1];", "reads shared byte"),
        ("s[t] = t; s[t ^ 1] = 3; out[t] = t;", "writes shared byte .* unsynchronised write|reads"),
        ("s[t / 2] = t; __syncthreads(); out[t] = s[t / 2];", "in one instruction"),
        (
            "s[t] = t; __syncthreads(); out[t] = s[63 - t]; s[t] = 0;",
            "writes shared byte .* after an unsynchronised read",
        ),
        ("s[t] = t; __syncwarp(); out[t] = s[t ^ 1]; s[t] = 0;", "writes shared byte .* after an unsynchronised read"),
        ("s[t] = t; __syncthreads(); if (t == 0) s[5] = 1; out[t] = s[5];", "shared byte 20 after"),
        ("if (t < 32) s[t] = 0; __syncthreads(); atomicAdd(s + t % 32, 1); out[t] = s[t % 32];", "reads shared byte"),
        ("((char*)s)[t] = t; out[t] = s[t / 4];", "reads shared byte"),
        ("s[t] = t; if (t < 32) { __syncwarp(); s[t] += s[t ^ 1]; } else out[t] = s[t - 32];", "shared byte"),
    ],
)
def test_races_in_shared_memory(body: str, message: str) -> None:
    source = body.replace("s[t ^ 1] = 3;", "((volatile int*)s)[t ^ 1] = 3;") if "= 3" in body else body
    with pytest.raises(DataRace, match=message):
        shared(source.replace(" s[t] = 0;", " ((volatile int*)s)[t] = 0;"))


GLOBAL = 'extern "C" __global__ void k(int* a, int* b) {{ const int t = threadIdx.x, c = blockIdx.x; {} }}'


@pytest.mark.parametrize(
    "body",
    [
        "a[c * 64 + t] = t; __syncthreads(); b[c * 64 + t] = a[c * 64 + 63 - t];",
        "a[c * 64 + t] += 1; a[c * 64 + t] *= 2;",
        "b[c * 64 + t] = a[t];",
        "atomicAdd(a + t, 1); atomicMax(a + t, 3);",
        "((char*)a)[c * 64 + t] = t;",
        "a[c * 64 + t] = t; __syncwarp(); b[c * 64 + t] = a[c * 64 + (t ^ 1)];",
    ],
)
def test_ordered_in_global_memory(body: str) -> None:
    run(GLOBAL.format(body), 2, 64, np.zeros(128, np.int32), np.zeros(128, np.int32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("a[t] = t;", "CTA 0 and thread . of CTA 1 write byte"),
        ("if (c == 0) a[t] = t; else b[t] = a[t];", "byte .* after an unsynchronised .* by thread . of CTA"),
        (
            "if (c == 0) b[t] = a[t]; else { __threadfence(); a[t] = 1; }",
            "byte .* after an unsynchronised .* by thread . of CTA",
        ),
        ("a[c * 64 + t] = t; b[c * 64 + t] = a[c * 64 + (t ^ 1)];", "unsynchronised write"),
        ("atomicAdd(a + t, 1); b[c * 64 + t] = a[t];", "unsynchronised write"),
        ("if (c == 0) atomicAdd(a + t, 1); else a[t] = 3;", "unsynchronised write"),
        ("if (t < 33) a[0] = 5;", "in one instruction"),
    ],
)
def test_races_in_global_memory(body: str, message: str) -> None:
    with pytest.raises(DataRace, match=message):
        run(GLOBAL.format(body), 2, 64, np.zeros(128, np.int32), np.zeros(128, np.int32))


# The last CTA to arrive sums what all have written.
LAST = """extern "C" __global__ void k(int* parts, unsigned* counter, int* out) {
  __shared__ bool last; const int t = threadIdx.x;
  WRITE
  if (t == 0) { INNER last = ARRIVE; AFTER }
  __syncthreads();
  if (last) { BEFORE_READ int sum = 0; for (int c = 0; c < gridDim.x; ++c) sum += parts[c * 64 + 63 - t];
      out[t] = sum; } }"""
GOOD = {
    "WRITE": "parts[blockIdx.x * 64 + t] = t + blockIdx.x; __threadfence(); __syncthreads();", "INNER": "",
    "ARRIVE": "atomicAdd(counter, 1) == gridDim.x - 1;", "AFTER": "", "BEFORE_READ": "__threadfence();",
}  # fmt: skip


def last_arriver(**changes: str) -> None:
    source = LAST
    for name, text in (GOOD | changes).items():
        source = source.replace(name, text, 1)
    parts, counter, out = np.zeros(6 * 64, np.int32), np.zeros(1, np.uint32), np.zeros(64, np.int32)
    run(source, 6, 64, parts, counter, out)
    np.testing.assert_array_equal(out, 6 * np.arange(63, -1, -1) + 15)


NO_FENCE = "parts[blockIdx.x * 64 + t] = t + blockIdx.x; __syncthreads();"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"WRITE": NO_FENCE, "INNER": "__threadfence();"},
        {"AFTER": "__threadfence();", "BEFORE_READ": ""},
        {"ARRIVE": "atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;"},
        {
            "WRITE": NO_FENCE,
            "BEFORE_READ": "",
            "ARRIVE": 'false; unsigned old; asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" '
            ': "=r"(old) : "l"(counter) : "memory"); last = old == gridDim.x - 1;',
        },
    ],
)
def test_the_last_arriver_pattern_is_accepted(changes: dict[str, str]) -> None:
    last_arriver(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"WRITE": NO_FENCE},
        {"BEFORE_READ": ""},
        {"WRITE": "parts[blockIdx.x * 64 + t] = t + blockIdx.x; __threadfence();"},
        {"WRITE": "__threadfence(); " + NO_FENCE},
    ],
    ids=[
        "no fence by the writers",
        "no fence by the reader",
        "no barrier before the arrival",
        "a fence before the writes",
    ],
)
def test_a_last_arriver_without_its_fences_is_a_race(changes: dict[str, str]) -> None:
    if changes.get("WRITE", "").endswith("__threadfence();") and "sync" not in changes["WRITE"]:
        changes = changes | {
            "WRITE": changes["WRITE"].replace("parts", "if (t < 32) parts", 1)
            + " if (t >= 32) { __nanosleep(1); parts[blockIdx.x * 64 + t] = t + blockIdx.x; __threadfence(); }"
        }
    with pytest.raises(DataRace, match=r"data race in global memory.*reads byte .* of a 1536-byte array"):
        last_arriver(**changes)


def test_one_thread_publishes_its_own_writes() -> None:
    source = """extern "C" __global__ void k(int* data, unsigned* counter, int* out) {
      if (threadIdx.x) return;
      data[blockIdx.x] = 10 + blockIdx.x; __threadfence();
      if (atomicAdd(counter, 1) == gridDim.x - 1) { __threadfence(); int sum = 0; for (int i = 0; i < gridDim.x;
        ++i) sum += data[i]; *out = sum; } }"""
    data, counter, out = np.zeros(5, np.int32), np.zeros(1, np.uint32), np.zeros(1, np.int32)
    run(source, 5, 64, data, counter, out)
    assert out[0] == 60


@pytest.mark.slow
def test_knowledge_passes_through_a_chain_of_ctas() -> None:
    """CTA i waits for CTA i-1 and then reads what CTA 0 wrote."""
    source = """extern "C" __global__ void k(int* data, int* flags, int* out) {
      const int c = blockIdx.x, t = threadIdx.x;
      if (c == 0) data[t] = t + 7;
      else { if (t == 0) { while (atomicAdd(flags + c - 1, 0) == 0) {} } __syncthreads(); __threadfence();
        out[c * 32 + t] = data[t]; }
      __threadfence(); __syncthreads();
      if (t == 0) atomicExch(flags + c, 1); }"""
    data, flags, out = np.zeros(32, np.int32), np.zeros(4, np.int32), np.zeros((4, 32), np.int32)
    run(source, 4, 32, data, flags, out)
    np.testing.assert_array_equal(out[1:], np.tile(np.arange(32) + 7, (3, 1)))

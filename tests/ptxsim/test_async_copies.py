"""cp.async: groups complete at the wait that needs them and not earlier."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptxsim.cuda import run
from tests.ptxsim.errors import AsyncCopyError, DataRace, Misaligned, OutOfBounds, UninitialisedRead

HEAD = """__device__ void copy(void* to, const void* from, int n = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"((unsigned)__cvta_generic_to_shared(to)),
      "l"(from), "r"(n) : "memory"); }
__device__ void copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"((unsigned)__cvta_generic_to_shared(to)),
      "l"(from) : "memory"); }
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
__device__ void wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
"""
# Two stages: while one tile is summed, the next one is on its way.
RING = (
    HEAD
    + """extern "C" __global__ void k(const int4* a, int* out, int tiles) {
  __shared__ int4 s[2][32]; const int t = threadIdx.x; int sum = 0;
  copy(&s[0][t], a + t); commit();
  for (int i = 0; i < tiles; ++i) {
    if (i + 1 < tiles) copy(&s[(i + 1) % 2][t], a + (i + 1) * 32 + t);
    commit(); wait<PENDING>(); MIDDLE
    const int4 v = s[i % 2][31 - t]; sum += v.x + v.y + v.z + v.w; END
  }
  wait_all(); out[t] = sum; }"""
)


def ring(tiles: int, *, pending: int = 1, middle: str = "__syncwarp();", end: str = "__syncwarp();") -> np.ndarray:
    a, out = np.arange(tiles * 128, dtype=np.int32), np.zeros(32, np.int32)
    run(
        RING.replace("PENDING", str(pending)).replace("MIDDLE", middle).replace("END", end),
        1,
        32,
        a,
        out,
        np.int32(tiles),
    )
    expected = a.reshape(tiles, 32, 4).sum(axis=(0, 2))[::-1]
    np.testing.assert_array_equal(out, expected)
    return out


@pytest.mark.parametrize("tiles", [1, 2, 7])
@pytest.mark.parametrize("pending", [0, 1])
def test_a_ring_of_two_stages(tiles: int, pending: int) -> None:
    ring(tiles, pending=pending)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pending": 2}, UninitialisedRead, "read of bytes in flight"),
        ({"middle": ""}, DataRace, "reads shared byte .* after an unsynchronised write"),
        ({"end": ""}, DataRace, "writes shared byte .* after an unsynchronised read"),
    ],
)  # fmt: skip
def test_what_a_ring_can_get_wrong(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ring(5, **change)


def test_a_stale_read_is_caught_too() -> None:
    """The second use of a buffer reads old data, not unwritten data."""
    source = (
        HEAD
        + """extern "C" __global__ void k(const int4* a, int* out) { __shared__ int4 s[32]; const int t = threadIdx.x;
      s[t] = int4(); __syncwarp(); copy(s + t, a + t); commit(); wait<1>(); out[t] = s[t].x; wait<0>(); }"""
    )
    with pytest.raises(UninitialisedRead, match="in flight"):
        run(source, 1, 32, np.zeros(128, np.int32), np.zeros(32, np.int32))


def test_groups_complete_in_order_and_one_by_one() -> None:
    source = (
        HEAD
        + """extern "C" __global__ void k(const int4* a, int* out) { __shared__ int4 s[3][32];
        const int t = threadIdx.x;
      for (int i = 0; i < 3; ++i) { copy(&s[i][t], a + i * 32 + t); commit(); }
      wait<2>(); out[t] = s[0][t].x; wait<1>(); out[32 + t] = s[1][t].x; wait<0>(); out[64 + t] = s[2][t].x; }"""
    )
    a, out = np.arange(384, dtype=np.int32), np.zeros(96, np.int32)
    run(source, 1, 32, a, out)
    np.testing.assert_array_equal(out, a[::4])


def test_partial_and_small_copies() -> None:
    source = (
        HEAD
        + """extern "C" __global__ void k(const int4* a, int4* out, int* small) {
      __shared__ int4 s[32]; __shared__ int u[32]; const int t = threadIdx.x;
      copy(s + t, t < 8 ? a + t : a + 100, t < 4 ? 16 : t < 8 ? 2 * t : 0); copy4(u + t, (const int*)a + t);
        wait_all();
      out[t] = s[t]; small[t] = u[t]; }"""
    )
    a, out, small = np.arange(1, 33, dtype=np.int32), np.full((32, 4), -1, np.int32), np.zeros(32, np.int32)
    run(source, 1, 32, a, out, small)
    expected = np.zeros((32, 16), np.uint8)
    octets = a.view(np.uint8).reshape(-1, 16)
    for t in range(8):
        size = 16 if t < 4 else 2 * t
        expected[t, :size] = octets[t, :size]
    np.testing.assert_array_equal(out.view(np.uint8), expected)
    np.testing.assert_array_equal(small, a)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("copy(s + t, a + t); commit();", AsyncCopyError, "still in flight when the kernel ends"),
        ("copy(s + t, a + t + 1); wait_all();", OutOfBounds, "accesses 16 bytes at global"),
        ("copy(s + t + 1, a + t); wait_all();", OutOfBounds, "at shared offset"),
        ("copy((char*)s + 16 * t, (const char*)a + 4 * t); wait_all();", Misaligned, "16-byte access to global"),
        ("copy((char*)s + 8 * t, a + t); wait_all();", Misaligned, "16-byte access to shared"),
        ("copy(s + t, a + t, 20); wait_all();", AsyncCopyError, "reads more bytes than it writes"),
        ("copy(s + t, a + t); s[t].x = 3; wait_all();", DataRace, "write of bytes in flight"),
        ("copy(s + t, a + t); copy(s + t, a + t); wait_all();", DataRace, "write of bytes in flight"),
        ("copy(s + t / 2, a + t); wait_all();", DataRace, "in one instruction"),
    ],
)  # fmt: skip
def test_mistakes(body: str, error: type[Exception], message: str) -> None:
    source = (
        HEAD
        + f'extern "C" __global__ void k(const int4* a) {{ __shared__ int4 s[32]; const int t = threadIdx.x; {body} }}'
    )
    with pytest.raises(error, match=message):
        run(source, 1, 32, np.zeros(128, np.int32))

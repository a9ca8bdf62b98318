"""Loads and stores of all widths and spaces, and every way to get an address wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptxsim.cuda import run
from tests.ptxsim.errors import Misaligned, OutOfBounds, ReadOnlyWrite, UninitialisedRead, UnsupportedPtx

COPY = """template <class T> __device__ void copy(const void* a, void* b, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n;
      i += blockDim.x * gridDim.x) ((T*)b)[i] = ((const T*)a)[i]; }
extern "C" __global__ void k(const void* a, void* b, int n) { copy<TYPE>(a, b, n); }"""


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("char", 1),
        ("short", 2),
        ("int", 4),
        ("double", 8),
        ("int2", 8),
        ("int4", 16),
        ("short4", 8),
        ("uchar4", 4),
        ("double2", 16),
    ],
)
def test_every_width(kind: str, size: int) -> None:
    a = np.random.default_rng(0).integers(0, 256, 100 * size, np.uint8)
    b = np.zeros_like(a)
    a.flags.writeable = False
    run(COPY, 2, 32, a, b, np.int32(100), macros=[f"TYPE={kind}"])
    np.testing.assert_array_equal(a, b)


def test_signs_extend() -> None:
    source = """extern "C" __global__ void k(const signed char* a, const short* b, long long* out) {
      out[threadIdx.x] = a[threadIdx.x]; out[32 + threadIdx.x] = b[threadIdx.x]; }"""
    a, b, out = (
        np.arange(-16, 16, dtype=np.int8),
        np.arange(-16, 16, dtype=np.int16) * 1000,
        np.zeros((2, 32), np.int64),
    )
    run(source, 1, 32, a, b, out)
    np.testing.assert_array_equal(out, [a, b])


def test_generic_addresses_of_all_spaces() -> None:
    source = """__constant__ int table[4] = {10, 20, 30, 40};
    __device__ int counter = 5;
    struct Params { int pad[3]; int values[5]; };
    __device__ __noinline__ int pick(const int* p, int i) { return p[i]; }
    extern "C" __global__ void k(const __grid_constant__ Params p, const int* g, int* out) {
      __shared__ int s[32]; int local[8]; const int t = threadIdx.x;
      for (int i = 0; i < 8; ++i) local[i] = t * i;
      s[t] = 100 + t; __syncthreads();
      const int* where = t % 4 == 0 ? g : t % 4 == 1 ? s : t % 4 == 2 ? local : p.values;
      out[t] = pick(where, t % 5) + table[t % 4] + counter; }"""
    params = np.arange(50, 58, dtype=np.int32)
    g, out = np.arange(1000, 1032, dtype=np.int32), np.zeros(32, np.int32)
    run(source, 1, 32, params.tobytes(), g, out)
    expected = []
    for t in range(32):
        i = t % 5
        value = [1000 + i, 100 + i, t * i, 53 + i][t % 4]
        expected.append(value + 10 * (t % 4 + 1) + 5)
    assert out.tolist() == expected


def test_strided_views_share_one_allocation() -> None:
    base = np.arange(64, dtype=np.float32).reshape(8, 2, 4)
    first, second = base[:, 0], base[:, 1]
    out = np.zeros((2, 8), np.float32)
    source = """extern "C" __global__ void k(const float* a, const float* b, float* out) {
      out[threadIdx.x] = a[threadIdx.x * 8 + 3]; out[8 + threadIdx.x] = b[threadIdx.x * 8 + 1]; }"""
    run(source, 1, 8, first, second, out)
    np.testing.assert_array_equal(out, [first[:, 3], second[:, 1]])


ONE = 'extern "C" __global__ void k(int* a, int n) {{ __shared__ int s[8]; s[threadIdx.x % 8] = 0; {} }}'


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            "a[n + threadIdx.x] = 1;",
            OutOfBounds,
            "thread 28 of CTA 0 accesses 4 bytes at global .* 0 bytes past the end",
        ),
        ("a[-1] = 1;", OutOfBounds, "4 bytes before the start"),
        ("*(int*)((char*)a + 2) = 1;", Misaligned, "misaligned 4-byte access to global memory"),
        ("*(int4*)(a + 1) = int4();", Misaligned, "misaligned 16-byte"),
        ("*(long long*)(a + 31) = 1;", Misaligned, "misaligned 8-byte"),
        ("((volatile int*)s)[n + 4] = 1;", OutOfBounds, "shared offset 32 of 32"),
        ("((volatile int*)s)[-n] = 1;", OutOfBounds, "shared offset -16"),
        ("*(volatile int*)nullptr = 1;", OutOfBounds, "out of bounds"),
        (
            "int x[4]; for (int i = 0; i < 4; ++i) x[i] = i; a[0] = ((volatile int*)x)[n];",
            OutOfBounds,
            "local offset 16 of",
        ),
        ("*(int4*)(a + 30) = int4();", Misaligned, "misaligned"),
    ],
)
def test_bad_addresses(body: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        run(ONE.format(body), 1, 32, np.zeros(32, np.int32), np.int32(4), races=False)
    assert "at test.cu:1" in str(raised.value)
    assert "PTX line" in str(raised.value)


def test_an_access_across_an_end() -> None:
    buffer = np.zeros(40, np.uint8)
    skip = -buffer.ctypes.data % 16
    with pytest.raises(OutOfBounds, match="before the end, too few"):
        run('extern "C" __global__ void k(int4* a) { *a = int4(); }', 1, 1, buffer[skip : skip + 12])


def test_read_only_arrays() -> None:
    a = np.zeros(32, np.int32)
    a.flags.writeable = False
    with pytest.raises(ReadOnlyWrite, match="read-only"):
        run('extern "C" __global__ void k(int* a) { a[threadIdx.x] = 1; }', 1, 32, a)
    with pytest.raises(ReadOnlyWrite):
        run('extern "C" __global__ void k(int* a) { atomicAdd(a, 1); }', 1, 32, a)


def test_unwritten_shared_memory() -> None:
    source = """extern "C" __global__ void k(int* a) { extern __shared__ int s[];
      if (threadIdx.x != 7) s[threadIdx.x] = 1; __syncthreads(); a[threadIdx.x] = s[31 - threadIdx.x]; }"""
    with pytest.raises(UninitialisedRead, match="thread 24 of CTA 0 reads shared byte 28, which nothing has written"):
        run(source, 1, 32, np.zeros(32, np.int32), shared_bytes=128)


def test_memory_qualifiers_and_hints() -> None:
    source = """extern "C" __global__ void k(const int* a, int* b) {
      const int t = threadIdx.x; int x, y, z, w; unsigned long long policy; int4 v;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.b32 %0, [%1];" : "=r"(x) : "l"(a + t));
      asm volatile("ld.volatile.global.b32 %0, [%1];" : "=r"(y) : "l"(a + t));
      asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(z) : "l"(a + t));
      asm volatile("ld.global.L1::no_allocate.L2::cache_hint.b32 %0, [%1], %2;" : "=r"(w) : "l"(a + t), "l"(policy));
      asm volatile("ld.global.nc.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x),
        "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(a + 4 * (t % 8)));
      asm volatile("prefetch.global.L2 [%0];" :: "l"(a + t));
      asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(b + t), "r"(x + y + z + w + v.x + v.w) : "memory");
        }"""
    a, b = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    run(source, 1, 32, a, b)
    t = np.arange(32)
    np.testing.assert_array_equal(b, 4 * t + 8 * (t % 8) + 3)


def test_special_registers() -> None:
    source = """extern "C" __global__ void k(unsigned* out) { extern __shared__ char s[]; unsigned v[6];
      asm("mov.u32 %0, %laneid;" : "=r"(v[0])); asm("mov.u32 %0, %warpid;" : "=r"(v[1]));
        asm("mov.u32 %0, %nwarpid;" : "=r"(v[2]));
      asm("mov.u32 %0, %dynamic_smem_size;" : "=r"(v[3])); asm("mov.u32 %0, %smid;" : "=r"(v[4]));
        asm("mov.u32 %0, %nsmid;" : "=r"(v[5]));
      const long long before = clock64();
        const int t = (blockIdx.y * gridDim.x + blockIdx.x) * 64 + threadIdx.y * blockDim.x + threadIdx.x;
      for (int i = 0; i < 6; ++i) out[t * 7 + i] = v[i];
      out[t * 7 + 6] = clock64() > before; }"""
    out = np.zeros((6, 64, 7), np.uint32)
    run(source, (3, 2), (16, 4), out, shared_bytes=48)
    t = np.arange(64)
    np.testing.assert_array_equal(
        out[5], np.stack([t % 32, t // 32, t * 0 + 2, t * 0 + 48, t * 0 + 1, t * 0 + 4, t * 0 + 1], 1)
    )


def test_what_is_not_modelled_is_an_error() -> None:
    with pytest.raises(UnsupportedPtx, match="mapa"):
        run(
            'extern "C" __global__ void k(unsigned* a) { '
            'asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(*a) : "r"(0)); }',
            1,
            1,
            np.zeros(1, np.int32),
        )
    with pytest.raises(UnsupportedPtx, match="griddepcontrol"):
        run(
            'extern "C" __global__ void k(int* a) { asm volatile("griddepcontrol.wait;"); }',
            1,
            1,
            np.zeros(1, np.int32),
        )

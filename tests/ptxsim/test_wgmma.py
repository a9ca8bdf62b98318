"""wgmma (sm_90a): both operand orders, A from registers, and its synchronisation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptxsim.cuda import run
from tests.ptxsim.errors import AsyncCopyError, DataRace, DivergentWarp
from tests.ptxsim.numerics import bf16_to_f32, f32_to_bf16

FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
SOURCE = """typedef unsigned long long u64; typedef unsigned u32;
__device__ u64 descriptor(const void* p, int lead, int stride) {
  const u64 start = (__cvta_generic_to_shared(p) & 0x3ffff) >> 4;
  return start | (u64)(lead >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62; }
__device__ u32 swizzle(u32 byte) { return byte ^ (byte >> 7 & 7) << 4; }
extern "C" __global__ void k(const unsigned short* a, const unsigned short* b, float* out) {
  extern __shared__ __align__(1024) char s[];       // A [64][64] and B: N=32 rows of 64, or 64 rows (K) of 64 columns
  char* sb = s + 8192; const int t = threadIdx.x;
  for (int i = t; i < 64 * 64; i += blockDim.x) *(unsigned short*)(s + swizzle(2 * i)) = a[i];
  for (int i = t; i < B_ELEMENTS; i += blockDim.x) *(unsigned short*)(sb + swizzle(2 * i)) = b[i];
  PROXY __syncthreads();
  float d[N / 2]; for (int i = 0; i < N / 2; ++i) d[i] = 5.f;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int k = 0; k < 4; ++k) {
    const u64 db = B_TRANSPOSED ? descriptor(sb + k * 2048, 4096, 1024) : descriptor(sb + k * 32, 16, 1024);
#if A_REGISTERS
    u32 w[4]; const int g = t % 32 / 4, q = t % 4, r = t / 32 * 16 + g;
    for (int i = 0; i < 4; ++i) w[i] = *(const u32*)(a + (r + i % 2 * 8) * 64 + k * 16 + 2 * q + i / 2 * 8);
    asm volatile("{.reg .pred p; setp.ne.u32 p, %20, 0;\\nwgmma.mma_async.sync.aligned.m64n32k16.f32.KIND.KIND "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %21, p, 1, 1, TB;}"
      : OUTPUTS : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(k), "l"(db) : "memory");
#else
    const u64 da = descriptor(s + k * 32, 16, 1024);
    asm volatile("{.reg .pred p; setp.ne.u32 p, %16, 0;\\nwgmma.mma_async.sync.aligned.m64n32k16.f32.KIND.KIND "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %17, %18, p, 1, 1, 0, TB;}"
      : OUTPUTS : "r"(k), "l"(da), "l"(db) : "memory");
#endif
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  WAIT
  AFTER
  const int g = t % 32 / 4, q = t % 4, r = t % 128 / 32 * 16 + g;
  for (int i = 0; i < N / 2; ++i) out[(r + i / 2 % 2 * 8) * N + i / 4 * 8 + 2 * q + i % 2] = d[i]; }"""
SOURCE = SOURCE.replace("OUTPUTS", ", ".join(f'"+f"(d[{i}])' for i in range(16)))
WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'


def multiply(
    kind: str, transposed: bool, registers: bool, *, proxy: str = FENCE, wait: str = WAIT, after: str = ""
) -> None:
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal((64, 64)).astype(np.float32),
        rng.standard_normal((64, 64) if transposed else (32, 64)).astype(np.float32),
    )
    bits = [x.astype(np.float16).view(np.uint16) if kind == "f16" else f32_to_bf16(x) for x in (a, b)]
    va, vb = (
        x.view(np.float16).astype(np.float64) if kind == "f16" else bf16_to_f32(x).astype(np.float64) for x in bits
    )
    out = np.zeros((64, 32), np.float32)
    source = SOURCE
    for name, text in (
        ("PROXY", proxy),
        ("WAIT", wait),
        ("AFTER", after),
        ("KIND", kind),
        ("TB", str(int(transposed))),
    ):
        source = source.replace(name, text)
    macros = [f"B_TRANSPOSED={int(transposed)}", f"A_REGISTERS={int(registers)}", "N=32", f"B_ELEMENTS={b.size}"]
    run(source, 1, 128, bits[0], bits[1], out, arch="compute_90a", macros=macros, shared_bytes=16384)
    expected = va @ (vb[:, :32] if transposed else vb.T)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("registers", [False, True])
def test_product(kind: str, transposed: bool, registers: bool) -> None:
    multiply(kind, transposed, registers)


def test_what_it_can_get_wrong() -> None:
    with pytest.raises(AsyncCopyError, match=r"wgmma.*without a fence\.proxy\.async"):
        multiply("f16", False, False, proxy="")
    store = "__syncthreads(); ((volatile int*)s)[t] = 0;"
    multiply("f16", False, False, after=store)
    with pytest.raises(DataRace, match="unsynchronised read by the tensor core"):
        multiply("f16", False, False, wait="", after=store + WAIT)
    with pytest.raises(DivergentWarp):
        run(
            'extern "C" __global__ void k(int* a) { if (threadIdx.x < 64) asm volatile("wgmma.fence.sync.aligned;"); '
            "a[threadIdx.x] = 1; }",
            1,
            128,
            np.zeros(128, np.int32),
            arch="compute_90a",
        )

// Inline PTX of warpgroup products (sm_90a): wgmma multiplies asynchronously, with operands in shared memory or registers.
//
// A product is under way from the instruction that issues it until wgmma_wait has said that its group is done: until then no
// thread touches its sums or the registers of a, nor writes the shared memory that it reads. All 128 threads of a warpgroup call each of
// these together.
#pragma once
#include "pagedkv/ptx.cuh"

namespace pagedkv {

constexpr int kWarpgroup = 128;  // threads

// What this thread has written with ordinary stores is seen by wgmma and TMA. Others must still be synchronised with.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before the first product, and before every one whose registers were written since the last.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the warpgroup's latest groups are under way.
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving what it does to these sums across this point.
template <int kCols> __device__ __forceinline__ void hold_sums(float (&d)[kCols][4]) {
#pragma unroll
  for (int n = 0; n < kCols; ++n) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

// Registers of each thread of the warpgroup from here on: those that one gives back, another takes.
template <int kCount> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// The policy of data that many read: last to leave L2.
__device__ __forceinline__ u64 evict_last_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// An operand in shared memory whose rows of 128 bytes are swizzled as TMA does it, in panels that begin at multiples of 1024 bytes;
// eight rows are 1024 bytes. Inner dimension along the rows: `panel_bytes` is not read, 16 elements further are 32 bytes further.
// Inner dimension across the rows: 64 columns further are `panel_bytes` further.
__device__ __forceinline__ u64 wgmma_operand(const void* begin, int panel_bytes) {
  const u64 place = shared_address(begin) >> 4 | static_cast<u32>(panel_bytes >> 4) << 16;
  return place | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}
// The same operand so many bytes further.
__device__ __forceinline__ u64 wgmma_advance(u64 operand, int bytes) { return operand + (bytes >> 4); }

#define PAGEDKV_SUMS_4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define PAGEDKV_SUMS_32(n)                                                                                                    \
  PAGEDKV_SUMS_4(n), PAGEDKV_SUMS_4(n + 1), PAGEDKV_SUMS_4(n + 2), PAGEDKV_SUMS_4(n + 3), PAGEDKV_SUMS_4(n + 4),              \
      PAGEDKV_SUMS_4(n + 5), PAGEDKV_SUMS_4(n + 6), PAGEDKV_SUMS_4(n + 7)
#define PAGEDKV_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PAGEDKV_NAMES_32                                                                                                      \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PAGEDKV_NAMES_64                                                                                                      \
  PAGEDKV_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57" \
                   ",%58,%59,%60,%61,%62,%63"

// d[64 x 32 or 128] = a[64 x 16] b[32 or 128 x 16]^T, or += where `add`; both in shared memory, by rows. A warp has 16 of the 64
// rows, spread over it as mma_16816 does it.
#define PAGEDKV_WGMMA_ROWS(TYPE, COLUMNS, NAMES, A, B, ADD, ...)                                                              \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE  \
               "." TYPE " {" NAMES "}, " A ", " B ", add, 1, 1, 0, 0;\n}"                                                     \
               : __VA_ARGS__                                                                                                  \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define PAGEDKV_WGMMA_ROWS_32(TYPE)                                                                                           \
  PAGEDKV_WGMMA_ROWS(TYPE, "32", PAGEDKV_NAMES_16, "%16", "%17", "%18", PAGEDKV_SUMS_4(0), PAGEDKV_SUMS_4(1),                 \
                     PAGEDKV_SUMS_4(2), PAGEDKV_SUMS_4(3))
#define PAGEDKV_WGMMA_ROWS_128(TYPE) \
  PAGEDKV_WGMMA_ROWS(TYPE, "128", PAGEDKV_NAMES_64, "%64", "%65", "%66", PAGEDKV_SUMS_32(0), PAGEDKV_SUMS_32(8))
template <class T> __device__ __forceinline__ void wgmma_rows(float (&d)[4][4], u64 a, u64 b, bool add) {
  if constexpr (kSame<T, f16>) {
    PAGEDKV_WGMMA_ROWS_32("f16");
  } else {
    PAGEDKV_WGMMA_ROWS_32("bf16");
  }
}
template <class T> __device__ __forceinline__ void wgmma_rows(float (&d)[16][4], u64 a, u64 b, bool add) {
  if constexpr (kSame<T, f16>) {
    PAGEDKV_WGMMA_ROWS_128("f16");
  } else {
    PAGEDKV_WGMMA_ROWS_128("bf16");
  }
}
#undef PAGEDKV_WGMMA_ROWS_128
#undef PAGEDKV_WGMMA_ROWS_32
#undef PAGEDKV_WGMMA_ROWS

// d[64 x 64 or 128] += a[64 x 16] b[16 x 64 or 128]; a in registers, as operand a of mma_16816, b in shared memory with its inner
// dimension across the rows.
#define PAGEDKV_WGMMA_ACROSS(TYPE, COLUMNS, NAMES, A0, A1, A2, A3, B, ...)                                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE \
               " {" NAMES "}, {" A0 "," A1 "," A2 "," A3 "}, " B ", add, 1, 1, 1;\n}"                                         \
               : __VA_ARGS__                                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PAGEDKV_WGMMA_ACROSS_64(TYPE) \
  PAGEDKV_WGMMA_ACROSS(TYPE, "64", PAGEDKV_NAMES_32, "%32", "%33", "%34", "%35", "%36", PAGEDKV_SUMS_32(0))
#define PAGEDKV_WGMMA_ACROSS_128(TYPE) \
  PAGEDKV_WGMMA_ACROSS(TYPE, "128", PAGEDKV_NAMES_64, "%64", "%65", "%66", "%67", "%68", PAGEDKV_SUMS_32(0), PAGEDKV_SUMS_32(8))
template <class T> __device__ __forceinline__ void wgmma_across(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  if constexpr (kSame<T, f16>) {
    PAGEDKV_WGMMA_ACROSS_64("f16");
  } else {
    PAGEDKV_WGMMA_ACROSS_64("bf16");
  }
}
template <class T> __device__ __forceinline__ void wgmma_across(float (&d)[16][4], const u32 (&a)[4], u64 b) {
  if constexpr (kSame<T, f16>) {
    PAGEDKV_WGMMA_ACROSS_128("f16");
  } else {
    PAGEDKV_WGMMA_ACROSS_128("bf16");
  }
}
#undef PAGEDKV_WGMMA_ACROSS_128
#undef PAGEDKV_WGMMA_ACROSS_64
#undef PAGEDKV_WGMMA_ACROSS
#undef PAGEDKV_NAMES_64
#undef PAGEDKV_NAMES_32
#undef PAGEDKV_NAMES_16
#undef PAGEDKV_SUMS_32
#undef PAGEDKV_SUMS_4

}  // namespace pagedkv

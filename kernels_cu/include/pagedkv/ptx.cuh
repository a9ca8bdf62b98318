// Inline PTX, and nowhere else.
#pragma once
#include "pagedkv/dtypes.cuh"

namespace pagedkv {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// threadIdx.x, read anew: nothing that follows from it has to stay in registers from one reading to the next.
__device__ __forceinline__ u32 fresh_thread_id() {
  u32 id;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
  return id;
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 or 8 bytes to global memory in one access: of 16-bit elements the compiler makes several on sm_80 and sm_90.
__device__ __forceinline__ void store_global(void* to, uint4 words) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}
__device__ __forceinline__ void store_global(void* to, uint2 words) {
  asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x), "r"(words.y) : "memory");
}

// Orders this thread's accesses, and what barriers have put before it, for all of the GPU: releases before a write or an atomic that
// announces something, acquires after a read that has seen it announced. Lighter than __threadfence, which orders sequentially.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- asynchronous copies into shared memory (sm_80+)

// 16 bytes; where `valid` is false nothing is read and zeros are stored. L2 fetches kL2Bytes at a time: 128 or 64.
#define PAGEDKV_CP_ASYNC16(HINTS, POLICY, ...)                                                                        \
  asm volatile("cp.async.cg.shared.global" HINTS " [%0], [%1], 16, %2" POLICY ";" ::"r"(shared_address(to)),          \
               "l"(from), "r"(valid ? 16 : 0) __VA_ARGS__                                                             \
               : "memory")
template <int kL2Bytes = 128> __device__ __forceinline__ void cp_async16(void* to, const void* from, bool valid) {
  static_assert(kL2Bytes == 128 || kL2Bytes == 64, "");
  if constexpr (kL2Bytes == 128) PAGEDKV_CP_ASYNC16(".L2::128B", "");
  else PAGEDKV_CP_ASYNC16(".L2::64B", "");
}
// The same, with what becomes of the line in L2 said by `policy`.
template <int kL2Bytes = 128> __device__ __forceinline__ void cp_async16(void* to, const void* from, bool valid, u64 policy) {
  static_assert(kL2Bytes == 128 || kL2Bytes == 64, "");
  if constexpr (kL2Bytes == 128) PAGEDKV_CP_ASYNC16(".L2::cache_hint.L2::128B", ", %3", , "l"(policy));
  else PAGEDKV_CP_ASYNC16(".L2::cache_hint.L2::64B", ", %3", , "l"(policy));
}
#undef PAGEDKV_CP_ASYNC16
// Four bytes, zeros where not `valid`.
__device__ __forceinline__ void cp_async4(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
// The policy of data that is read once: first to leave L2.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's latest groups are under way.
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- tensor cores (sm_80+)

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8 (16 bytes each).
__device__ __forceinline__ void ldmatrix_x4(u32 (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(u32 (&fragments)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(fragments[0]), "=r"(fragments[1])
               : "r"(shared_address(row))
               : "memory");
}

// An 8x8 matrix of 16-bit elements, spread over the warp as ldmatrix does, transposed.
__device__ __forceinline__ u32 movmatrix_trans(u32 fragment) {
  u32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

// c[16x8] += a[16x16] b[16x8], a by rows, b by columns, float32 sums.
#define PAGEDKV_MMA_16816(TYPE)                                                                                       \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                                 \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                           \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class T> __device__ __forceinline__ void mma_16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(kSame<T, f16> || kSame<T, bf16>, "tensor cores take f16 and bf16 here");
  if constexpr (kSame<T, f16>) {
    PAGEDKV_MMA_16816("f16");
  } else {
    PAGEDKV_MMA_16816("bf16");
  }
}
#undef PAGEDKV_MMA_16816

// ---- barriers in shared memory and the tensor memory accelerator (sm_90+)

// `threads` of the CTA, whole warps, wait for each other; id 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Counts this warp at the barrier of so many threads, without waiting for the others.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A barrier's phase ends when `arrivals` threads have arrived and all bytes it was told to expect are there. One thread.
__device__ __forceinline__ void mbarrier_init(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// What this thread has initialised is seen by the copies of TMA; others must still be synchronised with.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has ended: that of phase n is n % 2, and the phase before the first counts as ended.
__device__ __forceinline__ void mbarrier_wait(u64* barrier, int parity) {
  u32 ended;
  do {
    asm volatile("{\n.reg .pred ended;\nmbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\nselp.u32 %0, 1, 0, ended;\n}"
                 : "=r"(ended)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!ended);
}

// Starts to fetch a tensor map, before the first copy needs it. One thread or one warp.
__device__ __forceinline__ void prefetch_tensor_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// A box of a four-dimensional tensor, that begins at these coordinates, into shared memory (1024-byte aligned where the map
// swizzles by 128 bytes); its bytes count at the barrier. What lies outside the tensor arrives as zeros.
__device__ __forceinline__ void tma_load_4d(void* to, const void* map, u64* barrier, int x0, int x1, int x2, int x3, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "l"(policy)
      : "memory");
}

}  // namespace pagedkv

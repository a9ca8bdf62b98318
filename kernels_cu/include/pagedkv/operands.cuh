// Types of the operands of mma.m16n8k16, and what turns stored elements and queries into them. One-byte types (fp8, int8) become f16,
// which holds all their values exactly and is one instruction away; Q and the shares are then f16 too.
#pragma once
#include "pagedkv/ptx.cuh"

namespace pagedkv {

#if __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4m3 = true;  // whether there is an instruction
#else
constexpr bool kConvertsE4m3 = false;
#endif
constexpr int kKSteps = HEAD_DIM / 16;
constexpr int kStepsPerLoad = 2 / sizeof(KV_TYPE);  // steps of mma that one ldmatrix.x4 feeds
static_assert(HEAD_DIM % 16 == 0, "");

template <bool kFirst, class A, class B> struct Either {
  using Type = A;
};
template <class A, class B> struct Either<false, A, B> {
  using Type = B;
};
using MmaType = typename Either<kQuantised<KV_TYPE>, f16, Q_TYPE>::Type;  // of both operands of the products

// Bytes `first` and `second` of a word as a pair of f16: neighbours, or two bytes apart.
__device__ __forceinline__ u32 to_f16_pair(u32 word, int first, int second) {
  __half2 pair;
  if constexpr (kSame<KV_TYPE, i8>) {  // u = byte + 128 in the low bits of an f16 of known exponent, less what that adds
    const u32 biased = __byte_perm(word ^ 0x80808080u, 0x64646464u, first | 0x40 | second << 8 | 0x4000);
    pair = __hsub2(*reinterpret_cast<const __half2*>(&biased), __half2half2(__ushort_as_half(0x6480)));
  } else if constexpr (kSame<KV_TYPE, e5m2>) {  // the upper half of an f16
    const u32 bits = __byte_perm(word, 0, 0x0404 | first << 4 | second << 12);
    pair = *reinterpret_cast<const __half2*>(&bits);
  } else {
    const u32 sorted = second - first == 2 ? __byte_perm(word, 0, 0x3120) : word;  // the pairs of a word in its halves
    const u32 bits = first == 0 ? sorted : sorted >> 16;
    pair = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits), __NV_E4M3));
  }
  return *reinterpret_cast<const u32*>(&pair);
}

// The power of two at or below a positive number, and one over it: exact factors. Away from the ends of float's range.
__device__ __forceinline__ float power_below(float x) {
  return __uint_as_float(min(max(__float_as_uint(x) & 0x7f800000u, 0x00800000u), 0x7e800000u));
}
__device__ __forceinline__ float one_over_power(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }

// A row of queries, kLanes neighbouring lanes with kWords pairs each, becomes MmaType. Returns the row's divisor, a power of two:
// bf16 becomes f16 beside quantised K, and reaches farther. No less than
// 2^-60, so that its product with a scale is not zero. Whole warps.
template <int kLanes, int kWords> __device__ __forceinline__ float fit_queries(u32 (&words)[kWords]) {
  if constexpr (kSame<MmaType, Q_TYPE>) {
    return 1.f;
  } else {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(words[i] << 16)), fabsf(__uint_as_float(words[i] & 0xffff0000u))));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
    const float power = power_below(fmaxf(largest * 0x1p-12f, 0x1p-60f)), factor = one_over_power(power);  // the largest lies below 2^13
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = pack2<f16>(__uint_as_float(words[i] << 16) * factor, __uint_as_float(words[i] & 0xffff0000u) * factor);
    return power;
  }
}

// Q^T[16 dims x 8 rows] of every step; `q` is the row that this lane's column is (lane / 4), 4-byte aligned. Returns the row's
// divisor. All lanes together.
__device__ __forceinline__ float load_queries(u32 (&b)[2 * kKSteps], const Q_TYPE* q) {
  const int lane = lane_id() % 4;
#pragma unroll
  for (int step = 0; step < kKSteps; ++step)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      b[2 * step + i] = *reinterpret_cast<const u32*>(q + step * 16 + (kStepsPerLoad == 1 ? 2 * lane + 8 * i : 4 * lane + 2 * i));
  return fit_queries<4>(b);
}

}  // namespace pagedkv

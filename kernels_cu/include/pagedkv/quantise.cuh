// Scales of fp8 and int8: value = stored * scale. Per tensor and per head the caller gives them; per token-head the kernel makes
// the largest absolute value of the row the type's largest number.
#pragma once
#include "pagedkv/kv.cuh"
#include "pagedkv/rows.cuh"

namespace pagedkv {

// Largest number of a quantised type.
template <class T> constexpr float kLargest = kSame<T, e4m3> ? 448.f : kSame<T, e5m2> ? 57344.f : 127.f;

// Largest absolute value of a row, in all its lanes; NaN if one element is: as bits, NaN is larger than infinity. Lanes without an
// element hold zeros. Whole warps.
template <int kDim> __device__ __forceinline__ float row_absmax(const Row<kDim>& row) {
  u32 largest = 0;
#pragma unroll
  for (int j = 0; j < kRowVecs<kDim>; ++j)
#pragma unroll
    for (int e = 0; e < VEC; ++e) largest = max(largest, __float_as_uint(row.at[j][e]) & 0x7fffffffu);
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(kFullMask, largest, step));
  return __uint_as_float(largest);
}

// Divides a row by its scale. A computed scale of 0 stands for a row of zeros (or of numbers too small for a scale); an infinite
// one or NaN makes the whole row NaN when it is read, whatever is stored.
template <int kDim> __device__ __forceinline__ void quantise(Row<kDim>& row, float scale) {
#pragma unroll
  for (int j = 0; j < kRowVecs<kDim>; ++j)
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
      const float x = row.at[j][e];
      row.at[j][e] = SCALE_MODE == kScaleTokenHead && scale == 0.f ? 0.f : __fdiv_rn(x, scale);
    }
}

}  // namespace pagedkv

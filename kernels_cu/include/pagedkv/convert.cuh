// Stored elements turned into operands of mma, two at a time.
#pragma once
#include "pagedkv/dtypes.cuh"

namespace pagedkv {

// Elements 2 pair and 2 pair + 1 of what `words` hold as values of From.
template <class From> __device__ __forceinline__ float2 pair_to_floats(const u32* words, int pair) {
  if constexpr (sizeof(From) == 2) {
    const auto both = *reinterpret_cast<const Vec<From, 2>*>(words + pair);
    return {to_float(both.at[0]), to_float(both.at[1])};
  } else {
    const u32 bits = words[pair / 2] >> (pair % 2 * 16);
    if constexpr (kSame<From, i8>) {
      return {static_cast<float>(static_cast<i8>(bits)), static_cast<float>(static_cast<i8>(bits >> 8))};
    } else {
      constexpr auto kKind = kSame<From, e4m3> ? __NV_E4M3 : __NV_E5M2;
      return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits), kKind)));
    }
  }
}

// The same as one word of To, multiplied by a scale if there is one.
template <class To, class From, bool kScaled>
__device__ __forceinline__ u32 convert_pair(const u32* words, int pair, float scale) {
  const float2 both = pair_to_floats<From>(words, pair);
  return kScaled ? pack2<To>(both.x * scale, both.y * scale) : pack2<To>(both.x, both.y);
}

}  // namespace pagedkv

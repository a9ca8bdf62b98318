// Element types of Q, K, V and O, and what turns them into float and back. Named as the macros Q_TYPE and KV_TYPE name them.
#pragma once
#include "pagedkv/base.cuh"

namespace pagedkv {

using f32 = float;
using f16 = __half;
using bf16 = __nv_bfloat16;
using e4m3 = __nv_fp8_e4m3;
using e5m2 = __nv_fp8_e5m2;
using i8 = signed char;

template <class A, class B> constexpr bool kSame = false;
template <class A> constexpr bool kSame<A, A> = true;

// Quantised types need a scale: value = stored * scale.
template <class T> constexpr bool kQuantised = kSame<T, e4m3> || kSame<T, e5m2> || kSame<T, i8>;

__device__ __forceinline__ float to_float(f32 x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(e4m3 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(e5m2 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(i8 x) { return static_cast<float>(x); }

// Nearest even. fp8 and int8 saturate: a value too large becomes the largest, never infinity; NaN becomes NaN, in int8 zero.
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ f32 from_float<f32>(float x) { return x; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ e4m3 from_float<e4m3>(float x) { return e4m3(x); }
template <> __device__ __forceinline__ e5m2 from_float<e5m2>(float x) { return e5m2(x); }
template <> __device__ __forceinline__ i8 from_float<i8>(float x) {
  return static_cast<i8>(min(max(__float2int_rn(x), -127), 127));  // the conversion saturates, and takes NaN to 0
}

// Two values in one register, the first in the lower half: an operand of mma.
template <class T> __device__ __forceinline__ u32 pack2(float first, float second);
template <> __device__ __forceinline__ u32 pack2<f16>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const u32*>(&pair);
}
template <> __device__ __forceinline__ u32 pack2<bf16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const u32*>(&pair);
}

// kCount elements moved as one access; the address must be a multiple of their size together.
template <class T, int kCount> struct alignas(sizeof(T) * kCount) Vec {
  T at[kCount];
};

template <int kCount, class T> __device__ __forceinline__ Vec<T, kCount> load_vec(const T* from) {
  return *reinterpret_cast<const Vec<T, kCount>*>(from);
}
template <int kCount, class T> __device__ __forceinline__ void store_vec(T* to, const Vec<T, kCount>& vec) {
  *reinterpret_cast<Vec<T, kCount>*>(to) = vec;
}

}  // namespace pagedkv

// Rows: a row is one head of one token, and what these kernels move. LANES neighbouring lanes of a warp hold a row, each of them
// every LANES-th vector of VEC elements, so that neighbouring lanes touch neighbouring vectors. blockIdx.y says which head it is.
#pragma once
#include "pagedkv/ptx.cuh"

namespace pagedkv {

constexpr int kRowThreads = 128, kRowsPerCta = kRowThreads / LANES;
static_assert(LANES >= 1 && LANES <= kWarpSize && (LANES & (LANES - 1)) == 0, "lanes of a row are a power of two of one warp");

// Vectors of a lane in a row of kDim elements. Vector j begins at element row_element(j): the lane has none from kDim on.
template <int kDim> constexpr int kRowVecs = ceil_div(kDim / VEC, LANES);
__device__ __forceinline__ int row_lane() { return threadIdx.x % LANES; }
__device__ __forceinline__ int row_element(int j) { return (j * LANES + row_lane()) * VEC; }

// Calls body(token, inside) with the tokens of this CTA. Whole warps go through it together, so body may shuffle; lanes that have
// no token left come with inside = false and the last token.
template <class Body> __device__ __forceinline__ void for_each_token(int num_tokens, const Body& body) {
  const i64 step = static_cast<i64>(gridDim.x) * kRowsPerCta;
  for (i64 first = static_cast<i64>(blockIdx.x) * kRowsPerCta; first < num_tokens; first += step) {
    const i64 token = first + threadIdx.x / LANES;
    body(min_of<i64>(token, num_tokens - 1), token < num_tokens);
  }
}

template <class T> __device__ __forceinline__ void store_row_vec(T* to, const Vec<T, VEC>& vec) {
  if constexpr (sizeof(vec) == 16) store_global(to, *reinterpret_cast<const uint4*>(&vec));
  else if constexpr (sizeof(vec) == 8) store_global(to, *reinterpret_cast<const uint2*>(&vec));
  else store_vec<VEC>(to, vec);
}

// A row as it is, bit by bit. Every load is before every store.
template <int kDim, class T> __device__ __forceinline__ void copy_row(const T* from, T* to, bool inside) {
  static_assert(kDim % VEC == 0, "");
  Vec<T, VEC> vecs[kRowVecs<kDim>];
#pragma unroll
  for (int j = 0; j < kRowVecs<kDim>; ++j)
    if (inside && row_element(j) < kDim) vecs[j] = load_vec<VEC>(from + row_element(j));
#pragma unroll
  for (int j = 0; j < kRowVecs<kDim>; ++j)
    if (inside && row_element(j) < kDim) store_row_vec(to + row_element(j), vecs[j]);
}

// The same for a row in float, for conversions.
template <int kDim> struct Row {
  float at[kRowVecs<kDim>][VEC];

  template <class T> __device__ __forceinline__ void load(const T* from, bool inside) {
    static_assert(kDim % VEC == 0, "");
#pragma unroll
    for (int j = 0; j < kRowVecs<kDim>; ++j) {
      Vec<T, VEC> vec = {};
      if (inside && row_element(j) < kDim) vec = load_vec<VEC>(from + row_element(j));
#pragma unroll
      for (int e = 0; e < VEC; ++e) at[j][e] = to_float(vec.at[e]);
    }
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int j = 0; j < kRowVecs<kDim>; ++j)
#pragma unroll
      for (int e = 0; e < VEC; ++e) at[j][e] *= factor;
  }

  template <class T> __device__ __forceinline__ void store(T* to, bool inside) const {
#pragma unroll
    for (int j = 0; j < kRowVecs<kDim>; ++j) {
      Vec<T, VEC> vec;
#pragma unroll
      for (int e = 0; e < VEC; ++e) vec.at[e] = from_float<T>(at[j][e]);
      if (inside && row_element(j) < kDim) store_row_vec(to + row_element(j), vec);
    }
  }
};

}  // namespace pagedkv

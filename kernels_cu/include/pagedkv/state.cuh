// The running softmax of one query head: m, the largest score so far (base 2), l, the sum of 2^(score - m), and o, the sum of
// 2^(score - m) * V. Two states over disjoint keys merge into the state over both, in any order of keys (Milakov and Gimelshein
// 2018, "Online normalizer calculation for softmax"). No key seen: m = -inf, l = 0, o = 0.
#pragma once
#include "pagedkv/ptx.cuh"

namespace pagedkv {

// 2^(score - m) that is 0, not NaN, when both are -inf.
__device__ __forceinline__ float weight(float score, float m) { return score == neg_inf() ? 0.f : exp2_approx(score - m); }

template <int kDims> struct SoftmaxState {
  float m, l, o[kDims];

  __device__ __forceinline__ void clear() {
    m = neg_inf();
    l = 0.f;
#pragma unroll
    for (int d = 0; d < kDims; ++d) o[d] = 0.f;
  }

  // Makes room for scores up to `largest`: what has been summed is rescaled.
  __device__ __forceinline__ void raise(float largest) {
    const float factor = weight(m, fmaxf(m, largest));
    m = fmaxf(m, largest);
    l *= factor;
#pragma unroll
    for (int d = 0; d < kDims; ++d) o[d] *= factor;
  }

  // Adds what was summed over other keys.
  __device__ __forceinline__ void merge(float other_m, float other_l, const float (&other_o)[kDims]) {
    raise(other_m);
    const float factor = weight(other_m, m);
    l += other_l * factor;
#pragma unroll
    for (int d = 0; d < kDims; ++d) o[d] += other_o[d] * factor;
  }
};

// A sink is one more logit without a value: it takes part in the sum alone. `sink_log2` is in base 2.
__device__ __forceinline__ void add_sink(float& m, float& l, float& o_factor, float sink_log2) {
  const float largest = fmaxf(m, sink_log2);
  o_factor = weight(m, largest);
  l = l * o_factor + weight(sink_log2, largest);
  m = largest;
}

// What o is multiplied with at the end; 0 where no key was seen.
__device__ __forceinline__ float normaliser(float l) { return l > 0.f ? __fdividef(1.f, l) : 0.f; }

// Natural log-sum-exp of the scores; -inf where no key was seen.
__device__ __forceinline__ float natural_lse(float m, float l) { return l > 0.f ? (m + log2_approx(l)) * kLn2 : neg_inf(); }

}  // namespace pagedkv

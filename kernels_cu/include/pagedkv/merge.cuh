// Attention results over disjoint sets of keys, merged: each (o, lse) counts with the weight e^lse. lse is a natural logarithm and
// -inf where no key was seen; such a result's o is not read. All -inf: o = 0, lse = -inf. NaN stays NaN.
#pragma once
#include "pagedkv/cache_params.cuh"
#include "pagedkv/rows.cuh"
#include "pagedkv/state.cuh"

namespace pagedkv {

// Merges one row of num_states results and writes it. from(s) gives the o of result s, lse_of(s) its lse; results come in this
// order. Whole warps. `to` may be one of the o, `lse_to` one of the lse: a lane reads the elements that it writes, and all lanes
// have read the lse before one writes it. Rows that are not inside must not be read: other warps may be writing them.
template <class From, class Lse>
__device__ __forceinline__ void merge_row(int num_states, const From& from, const Lse& lse_of, OUT_TYPE* to, float* lse_to,
                                          bool inside) {
  float largest = neg_inf();
  for (int s = 0; s < num_states; ++s) largest = fmaxf(largest, lse_of(s));
  Row<DIM> sum = {};
  float total = 0.f;
  for (int s = 0; s < num_states; ++s) {
    const float lse = lse_of(s);
    if (lse == neg_inf()) continue;
    const float share = exp2_approx((lse - largest) * kLog2e);
    Row<DIM> o;
    o.load(from(s), inside);
    total += share;
#pragma unroll
    for (int j = 0; j < kRowVecs<DIM>; ++j)
#pragma unroll
      for (int e = 0; e < VEC; ++e) sum.at[j][e] += share * o.at[j][e];
  }
  sum.scale(total == 0.f ? 0.f : 1.f / total);
  __syncwarp();
  sum.store(to, inside);
  if (lse_to && inside && row_lane() == 0) *lse_to = total == 0.f ? neg_inf() : largest + log2_approx(total) * kLn2;
}

}  // namespace pagedkv

// The states of a CTA's warps, merged through shared memory: always in the order of the warps, so that results repeat bit by bit.
#pragma once
#include "pagedkv/finish.cuh"

namespace pagedkv {

constexpr int kPartPitch = HEAD_DIM_V + 4;  // floats from a row to the next: rows begin in different banks

// One segment's state in shared memory.
template <int kWarps> struct WarpParts {
  float o[kWarps][ROW_TILE][kPartPitch];  // unnormalised, of each warp
  float ml[kWarps][ROW_TILE][2];          // running maximum (base 2) and sum
  float whole_o[ROW_TILE][HEAD_DIM_V];
  float whole_ml[ROW_TILE][2];
};

// Merges what every warp has stored and ends the segment. All threads call this; it synchronises the CTA before it reads and after
// it has read, so that the shared memory may be used again. `o_factor` multiplies the output.
template <int kWarps>
__device__ __forceinline__ void merge_warps(const AttentionParams& p, const Segment& s, WarpParts<kWarps>& parts, float o_factor) {
  sync_computing();
  for (int i = threadIdx.x; i < ROW_TILE * HEAD_DIM_V; i += kWarps * kWarpSize) {
    const int row = i / HEAD_DIM_V, d = i % HEAD_DIM_V;
    SoftmaxState<1> sum;
    sum.clear();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float part[1] = {parts.o[warp][row][d]};
      sum.merge(parts.ml[warp][row][0], parts.ml[warp][row][1], part);
    }
    parts.whole_o[row][d] = sum.o[0] * o_factor;
    if (d == 0) {
      parts.whole_ml[row][0] = sum.m;
      parts.whole_ml[row][1] = sum.l;
    }
  }
  sync_computing();
  finish_segment(p, s, parts.whole_o[0], parts.whole_ml[0]);
}

}  // namespace pagedkv

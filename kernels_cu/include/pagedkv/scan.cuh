// Running sums over the threads of a CTA.
#pragma once
#include "pagedkv/base.cuh"

namespace pagedkv {

// Sum of `value` over this thread and those before it; `total` is that of all threads. All threads call it, whole warps, at most
// 1024 threads; it may be called again at once.
__device__ __forceinline__ int cta_running_sum(int value, int& total) {
  __shared__ int warp_sums[32];
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kFullMask, value, step);
    if (lane_id() >= step) value += other;
  }
  if (lane_id() == kWarpSize - 1) warp_sums[warp_id()] = value;
  __syncthreads();
  total = 0;
  for (int warp = 0; warp < blockDim.x / kWarpSize; ++warp) {
    if (warp == warp_id()) value += total;
    total += warp_sums[warp];
  }
  __syncthreads();
  return value;
}

}  // namespace pagedkv

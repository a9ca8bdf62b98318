// Divides a batch for the EVEN schedule: unit_indptr is the running sum of every sequence's units (schedule.cuh), computed from
// the lengths on the device, so that no host has to know them. One CTA of 1024 threads.
#include "pagedkv/attention_params.cuh"
#define CAUSAL 1
#define WINDOW 0
#define SOFT_CAP 0
#define ALIBI 0
#define MASK 0
#include "pagedkv/schedule.cuh"

using namespace pagedkv;

extern "C" __global__ __launch_bounds__(1024) void plan(const __grid_constant__ PlanParams p) {
  __shared__ int warp_sums[32];
  int before = 0;  // units of all sequences of earlier rounds
  if (threadIdx.x == 0) p.unit_indptr[0] = 0;
  for (int base = 0; base < p.num_seqs; base += 1024) {
    const int seq = base + threadIdx.x;
    int sum = 0;
    if (seq < p.num_seqs) {
      const int q_len = p.q_indptr ? p.q_indptr[seq + 1] - p.q_indptr[seq] : 1;
      const int seq_len = p.seq_lens[seq], first_position = span_of(p.position_spans, seq, seq_len, q_len, 0, q_len - 1).least;
      sum = sequence_units(seq_len, q_len, first_position, p.window, p.group_size, p.row_tile, p.tile_tokens);
    }
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, sum, step);
      if (lane_id() >= step) sum += other;
    }
    if (lane_id() == kWarpSize - 1) warp_sums[warp_id()] = sum;
    __syncthreads();
    int earlier = before;
    for (int warp = 0; warp < 32; ++warp) {
      if (warp < warp_id()) earlier += warp_sums[warp];
      before += warp_sums[warp];
    }
    if (seq < p.num_seqs) p.unit_indptr[seq + 1] = earlier + sum;
    __syncthreads();
  }
}

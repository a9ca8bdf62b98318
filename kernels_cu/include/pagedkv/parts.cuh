// Into how many parts the keys of a batch's row tiles are cut for the LISTED schedule: one, where the row tiles alone keep the GPU busy;
// as many as pay, where few row tiles have many keys or one has far more than the others.
//
// A bound `per_part` on the key tiles of a part cuts all row tiles. Each of 32 warps tries one, so that the time grows with the number of
// sequences alone: the longest row tile is cut into 1 to 8 parts, then four numbers between powers of two (10, 12, 14, 16, 20, ..., 512).
// Costs are counted in key tiles: a part costs its tiles and kOverheadUnits, to merge kMergedParts parts costs one. The parts of all KV
// heads take as many rounds as fill the CTAs that run at once; the longest part is a lower bound.
#pragma once
#include "pagedkv/schedule.cuh"

namespace pagedkv {

constexpr int kMergedParts = 3;
constexpr int kTries = 32;  // of bounds, one a warp

__device__ __forceinline__ int queries_of(const WorkListParams& p, int seq) {
  return p.q_indptr ? p.q_indptr[seq + 1] - p.q_indptr[seq] : 1;
}
__device__ __forceinline__ int row_tiles_of(const WorkListParams& p, int seq) {
  return ceil_div(queries_of(p, seq) * p.group_size, p.row_tile);
}

// Key tiles that some row of a row tile sees.
__device__ __forceinline__ int key_tiles_of(const WorkListParams& p, int seq, int row_tile) {
  const int seq_len = p.seq_lens[seq], q_len = queries_of(p, seq);
  const int first_row = row_tile * p.row_tile, last_row = min(first_row + p.row_tile, q_len * p.group_size) - 1;
  const PositionSpan at = span_of(p.position_spans, seq, seq_len, q_len, first_row / p.group_size, last_row / p.group_size);
  const int end = p.causal ? min(max(at.greatest + 1, 0), seq_len) : seq_len;
  const int begin = p.window > 0 ? min(max(at.least + 1 - p.window, 0), end) : 0;
  return ceil_div(end, p.tile_tokens) - begin / p.tile_tokens;
}

// Parts of a row tile of so many key tiles.
__device__ __forceinline__ int parts_of(const WorkListParams& p, int key_tiles, int per_part) {
  return max(min(ceil_div(key_tiles, per_part), key_tiles / p.min_part_tiles), 1);
}

// Cost of a bound on the tiles of a part, the longest row tile being of `longest` tiles; kNever where the workspace does not hold so
// many parts. All row tiles of a sequence are taken for as long as its last. One warp.
constexpr i64 kNever = 1ll << 62;
__device__ __forceinline__ i64 cost_of(const WorkListParams& p, int per_part, int longest) {
  i64 sums[3] = {};  // key tiles, parts, parts of divided row tiles: of one KV head
  for (int seq = lane_id(); seq < p.num_seqs; seq += kWarpSize) {
    const i64 row_tiles = row_tiles_of(p, seq);
    if (row_tiles == 0) continue;
    const int last = key_tiles_of(p, seq, static_cast<int>(row_tiles) - 1), parts = parts_of(p, last, per_part);
    sums[0] += row_tiles * (key_tiles_of(p, seq, 0) + last) / 2;
    sums[1] += row_tiles * parts;
    sums[2] += parts > 1 ? row_tiles * parts : 0;
  }
#pragma unroll
  for (i64& sum : sums)
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
  if (sums[2] > p.part_slots) return kNever;
  const i64 rounds = ceil_div<i64>(sums[1] * p.num_kv_heads, p.num_ctas);
  const i64 all_rounds = rounds * (sums[0] + kOverheadUnits * sums[1]) / sums[1];
  const int parts = parts_of(p, longest, per_part);
  return max_of<i64>(ceil_div(longest, parts) + kOverheadUnits, all_rounds) + (parts > 1 ? parts / kMergedParts : 0);
}

// The bound that costs least, of equal ones the largest. A CTA of kTries warps.
__device__ __forceinline__ int choose_per_part(const WorkListParams& p) {
  __shared__ int longest;
  __shared__ i64 costs[kTries];
  __shared__ int bounds[kTries];
  if (threadIdx.x == 0) longest = 1;
  __syncthreads();
  for (int seq = threadIdx.x; seq < p.num_seqs; seq += blockDim.x) {
    const int row_tiles = row_tiles_of(p, seq);
    if (row_tiles > 0) atomicMax(&longest, key_tiles_of(p, seq, row_tiles - 1));
  }
  __syncthreads();
  const int most = min(longest / p.min_part_tiles, p.part_slots);
  if (most < 2) return longest;
  int parts = 1;
  for (int warp = 0; warp < warp_id(); ++warp) parts += max(1 << (31 - __clz(parts)) >> 2, 1);
  int bound = ceil_div(longest, parts);
  const i64 own = parts <= most ? cost_of(p, bound, longest) : kNever;
  if (lane_id() == 0) costs[warp_id()] = own, bounds[warp_id()] = bound;
  __syncthreads();
  i64 least = costs[0];
  bound = bounds[0];
  for (int warp = 1; warp < kTries; ++warp)
    if (costs[warp] < least) least = costs[warp], bound = bounds[warp];
  return bound;
}

}  // namespace pagedkv

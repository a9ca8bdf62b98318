// Paged decode without tensor cores: any head dim, group size, block size and element type; the readable reference of the
// kernels. It also takes several queries per sequence (row tiles), if slowly.
//
// A warp's lanes form groups of kTokenLanes; a group holds one token at a time, each lane kVecs vectors of VEC elements of its K
// and V. All rows of the tile meet a token while it is in registers, so K and V are read once per row tile. Every group keeps a
// softmax state per row; they merge by shuffles within the warp, then through shared memory among the warps.
#include "pagedkv/kv.cuh"
#include "pagedkv/warp_merge.cuh"

using namespace pagedkv;

constexpr int kThreads = 128, kWarps = kThreads / kWarpSize;
static_assert(HEAD_DIM % VEC == 0 && HEAD_DIM_V % VEC == 0, "");

// Largest power of two that divides the vectors of K and of V, at most 16.
constexpr int token_lanes(int lanes) {
  return (HEAD_DIM / VEC) % (2 * lanes) == 0 && (HEAD_DIM_V / VEC) % (2 * lanes) == 0 && lanes < 16 ? token_lanes(2 * lanes) : lanes;
}
constexpr int kTokenLanes = token_lanes(1), kGroups = kWarpSize / kTokenLanes;
constexpr int kVecsK = HEAD_DIM / VEC / kTokenLanes, kVecsV = HEAD_DIM_V / VEC / kTokenLanes;
constexpr int kDimsV = kVecsV * VEC;

// Dims of vector j of a lane begin here: neighbouring lanes read neighbouring vectors.
__device__ __forceinline__ int dim_of(int j) { return (j * kTokenLanes + lane_id() % kTokenLanes) * VEC; }

__device__ __forceinline__ void attend(const AttentionParams& p, const Segment& s, int warp) {
  auto& parts = *reinterpret_cast<WarpParts<kWarps>*>(dynamic_shared);

  float q[ROW_TILE][kVecsK * VEC];
  SoftmaxState<kDimsV> state[ROW_TILE];
#pragma unroll
  for (int row = 0; row < ROW_TILE; ++row) {
    state[row].clear();
    const int used = min(row, s.num_rows - 1);  // rows past the end repeat the last one and are not written
    const Q_TYPE* from = query_row(p, s, used);
#pragma unroll
    for (int j = 0; j < kVecsK; ++j)
#pragma unroll
      for (int e = 0; e < VEC; ++e) q[row][j * VEC + e] = to_float(from[dim_of(j) + e]);
  }

  const SequenceKv kv(p.kv, s.seq);
  for (int first = s.begin + warp * kGroups; first < s.end; first += kWarps * kGroups) {
    const int token = first + lane_id() / kTokenLanes;
    const bool inside = token < s.end;
    const TokenPlace at = kv.place(inside ? token : s.begin);
    const KV_TYPE* k_from = kv.k<KV_TYPE>(at, s.kv_head);
    const KV_TYPE* v_from = kv.v<KV_TYPE>(at, s.kv_head);
    float k[kVecsK * VEC], v[kDimsV];
#pragma unroll
    for (int j = 0; j < kVecsK; ++j) {
      const auto vec = load_vec<VEC>(k_from + dim_of(j));
#pragma unroll
      for (int e = 0; e < VEC; ++e) k[j * VEC + e] = to_float(vec.at[e]);
    }
#pragma unroll
    for (int j = 0; j < kVecsV; ++j) {
      const auto vec = load_vec<VEC>(v_from + dim_of(j));
#pragma unroll
      for (int e = 0; e < VEC; ++e) v[j * VEC + e] = to_float(vec.at[e]);
    }
    const float k_scale = kv.k_scale(at, s.kv_head), v_scale = kv.v_scale(at, s.kv_head);
#pragma unroll
    for (int row = 0; row < ROW_TILE; ++row) {
      float dot = 0.f;
#pragma unroll
      for (int d = 0; d < kVecsK * VEC; ++d) dot += q[row][d] * k[d];
#pragma unroll
      for (int step = kTokenLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kFullMask, dot, step);
      const int used = min(row, s.num_rows - 1);
      const Scorer scorer(p, s.seq, s.seq_len, s.position(p, s.query(used)), s.query(used), s.qo_head(used));
      const float score = inside ? scorer(dot * k_scale, token) : neg_inf();
      state[row].raise(score);
      const float share = weight(score, state[row].m);
      state[row].l += share;
      if (share > 0.f) {  // what is not seen may be NaN
#pragma unroll
        for (int d = 0; d < kDimsV; ++d) state[row].o[d] += share * v_scale * v[d];
      }
    }
  }

#pragma unroll
  for (int row = 0; row < ROW_TILE; ++row) {
#pragma unroll
    for (int step = kTokenLanes; step < kWarpSize; step *= 2) {
      float other[kDimsV];
#pragma unroll
      for (int d = 0; d < kDimsV; ++d) other[d] = __shfl_xor_sync(kFullMask, state[row].o[d], step);
      const float other_m = __shfl_xor_sync(kFullMask, state[row].m, step);
      const float other_l = __shfl_xor_sync(kFullMask, state[row].l, step);
      state[row].merge(other_m, other_l, other);
    }
    if (lane_id() < kTokenLanes) {
#pragma unroll
      for (int j = 0; j < kVecsV; ++j)
#pragma unroll
        for (int e = 0; e < VEC; ++e) parts.o[warp][row][dim_of(j) + e] = state[row].o[j * VEC + e];
    }
    if (lane_id() == 0) {
      parts.ml[warp][row][0] = state[row].m;
      parts.ml[warp][row][1] = state[row].l;
    }
  }
  merge_warps<kWarps>(p, s, parts, 1.f);
}

extern "C" __global__ __launch_bounds__(kThreads, 2) void decode_simt(const __grid_constant__ AttentionParams p) {
  const int warp = uniform_warp_id();
  Schedule schedule(p);
  Segment segment;
  while (schedule.next(segment)) attend(p, segment, warp);
}

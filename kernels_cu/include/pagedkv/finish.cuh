// The end of a segment: its rows become output, or a partial state to be merged. All computing threads of the CTA call
// these: all there are, or the first COMPUTE_THREADS where the others fetch for them.
#pragma once
#include "pagedkv/schedule.cuh"
#include "pagedkv/state.cuh"

namespace pagedkv {

#ifdef COMPUTE_THREADS
__device__ __forceinline__ int compute_threads() { return COMPUTE_THREADS; }
__device__ __forceinline__ void sync_computing() { named_barrier(1, COMPUTE_THREADS); }
#else
__device__ __forceinline__ int compute_threads() { return blockDim.x; }
__device__ __forceinline__ void sync_computing() { __syncthreads(); }
#endif

// Maximum (base 2) and sum of a row of a part. Past L1: other multiprocessors have written it.
__device__ __forceinline__ float2 part_ml(const AttentionParams& p, i64 slot, int row) {
  return __ldcg(reinterpret_cast<const float2*>(p.schedule.partial_ml) + slot * ROW_TILE + row);
}

// Writes the output, kVec dims at a time. `state(row, d, m, l, o)` gives the row's maximum and sum, and its unnormalised output
// from dim d on.
template <int kVec, class State>
__device__ __forceinline__ void write_rows(const AttentionParams& p, const Segment& s, const State& state) {
  for (int i = threadIdx.x; i < s.num_rows * (HEAD_DIM_V / kVec); i += compute_threads()) {
    const int row = i / (HEAD_DIM_V / kVec), d = i % (HEAD_DIM_V / kVec) * kVec, head = s.qo_head(row);
    const i64 token = s.q_first + s.query(row);
    float m, l, o[kVec], factor = 1.f;
    state(row, d, m, l, o);
    if (SINKS) add_sink(m, l, factor, p.sinks[head] * kLog2e);
    factor *= normaliser(l);
    Q_TYPE* to = static_cast<Q_TYPE*>(p.o) + token * p.o_token_stride + head * p.o_head_stride + d;
#pragma unroll
    for (int e = 0; e < kVec; ++e) to[e] = from_float<Q_TYPE>(o[e] * factor);
    if (d == 0 && p.lse) p.lse[token * (p.num_kv_heads * GROUP_SIZE) + head] = natural_lse(m, l);
  }
}

// Merges the parts of a row tile, always in the same order, and writes the output. `slot_of(part)` says where each lies. First
// every row's maximum and sum over all parts, a warp per row; then nothing that is read depends on what was read before, and many
// reads are under way at once.
template <class SlotOf>
__device__ __forceinline__ void merge_parts(const AttentionParams& p, const Segment& s, int num_parts, const SlotOf& slot_of) {
  __shared__ float whole[ROW_TILE][2];
  for (int row = warp_id(); row < s.num_rows; row += compute_threads() / kWarpSize) {
    float m = neg_inf(), l = 0.f;
    for (int part = lane_id(); part < num_parts; part += kWarpSize) {
      const float2 ml = part_ml(p, slot_of(part), row);
      const float largest = fmaxf(m, ml.x);
      l = l * weight(m, largest) + ml.y * weight(ml.x, largest);
      m = largest;
    }
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
      const float other_m = __shfl_xor_sync(kFullMask, m, step), other_l = __shfl_xor_sync(kFullMask, l, step);
      const float largest = fmaxf(m, other_m);
      l = l * weight(m, largest) + other_l * weight(other_m, largest);
      m = largest;
    }
    if (lane_id() == 0) {
      whole[row][0] = m;
      whole[row][1] = l;
    }
  }
  sync_computing();
  constexpr int kVec = HEAD_DIM_V % 4 == 0 ? 4 : 1;
  write_rows<kVec>(p, s, [&](int row, int d, float& m, float& l, float (&o)[kVec]) {
    m = whole[row][0];
    l = whole[row][1];
#pragma unroll
    for (int e = 0; e < kVec; ++e) o[e] = 0.f;
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) {
      const i64 at = static_cast<i64>(slot_of(part)) * ROW_TILE + row;
      const float share = weight(part_ml(p, slot_of(part), row).x, m);
      const float* from = p.schedule.partial_o + at * HEAD_DIM_V + d;
      if constexpr (kVec == 4) {
        const float4 part_o = __ldcg(reinterpret_cast<const float4*>(from));
        o[0] += part_o.x * share;
        o[1] += part_o.y * share;
        o[2] += part_o.z * share;
        o[3] += part_o.w * share;
      } else {
        o[0] += __ldcg(from) * share;
      }
    }
  });
}

// Ends a segment whose state lies in shared memory: o [ROW_TILE][HEAD_DIM_V], ml [ROW_TILE][2]. The caller has synchronised the
// CTA after writing them, and may overwrite them once the call has returned.
__device__ __forceinline__ void finish_segment(const AttentionParams& p, const Segment& s, const float* o, const float* ml) {
  if (s.slot < 0) {
    write_rows<1>(p, s, [&](int row, int d, float& m, float& l, float (&out)[1]) {
      m = ml[2 * row];
      l = ml[2 * row + 1];
      out[0] = o[row * HEAD_DIM_V + d];
    });
    sync_computing();
    return;
  }
  const i64 at = static_cast<i64>(s.slot) * ROW_TILE;
  for (int i = threadIdx.x; i < s.num_rows * HEAD_DIM_V; i += compute_threads()) p.schedule.partial_o[at * HEAD_DIM_V + i] = o[i];
  for (int i = threadIdx.x; i < s.num_rows * 2; i += compute_threads()) p.schedule.partial_ml[at * 2 + i] = ml[i];
  if (SCHEDULE == kEven) {
    __shared__ bool last_to_arrive;
    sync_computing();
    if (threadIdx.x == 0) {  // for all of the CTA, which the barriers bind to it
      const u32 others = s.last_cta - s.first_cta;
      fence_gpu();  // the part is visible before the arrival is
      last_to_arrive = atomicInc(p.schedule.arrivals + s.first_cta, others) == others;  // back to zero with the last
      fence_gpu();  // the arrivals are seen before the parts are read
    }
    sync_computing();
    if (last_to_arrive) {
      merge_parts(p, s, s.last_cta - s.first_cta + 1,
                  [&](int part) { return even_slot(s.first_cta + part, s.first_cta); });
    }
  }
  sync_computing();
}

}  // namespace pagedkv

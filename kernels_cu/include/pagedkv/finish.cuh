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

// kVec floats of a part's output, past L1 too.
template <int kVec> __device__ __forceinline__ Vec<float, kVec> load_past_l1(const float* from) {
  if constexpr (kVec == 4) {
    const float4 read = __ldcg(reinterpret_cast<const float4*>(from));
    return {{read.x, read.y, read.z, read.w}};
  } else {
    static_assert(kVec == 1, "");
    return {{__ldcg(from)}};
  }
}

// Writes a row's output from dim d on. `o`: unnormalised, of the row's maximum m and sum l.
template <int kVec>
__device__ __forceinline__ void write_row(const AttentionParams& p, const Segment& s, int row, int d, float m, float l,
                                          const float (&o)[kVec]) {
  const int head = s.qo_head(row);
  const i64 token = s.q_first + s.query(row);
  float factor = 1.f;
  if (SINKS) add_sink(m, l, factor, p.sinks[head] * kLog2e);
  factor *= normaliser(l);
  Q_TYPE* to = static_cast<Q_TYPE*>(p.o) + token * p.o_token_stride + head * p.o_head_stride + d;
#pragma unroll
  for (int e = 0; e < kVec; ++e) to[e] = from_float<Q_TYPE>(o[e] * factor);
  if (d == 0 && p.lse) p.lse[token * (p.num_kv_heads * GROUP_SIZE) + head] = natural_lse(m, l);
}

// Lanes of a warp that share an output vector, each with every kPartLanes-th part, and the parts a lane reads at once.
constexpr int kPartLanes = 4, kPartsAtOnce = 16;

// Merges the parts of a row tile, always in the same order, and writes the output. `slot_of(part)` says where each lies. First
// every row's maximum and sum over all parts, a warp per row; then nothing that is read depends on what was read before. A warp
// reads 8 neighbouring vectors of 4 parts at a time, so that few rows keep all lanes busy; its shuffles add the four sums.
template <class SlotOf>
__device__ __forceinline__ void merge_parts(const AttentionParams& p, const Segment& s, int num_parts, const SlotOf& slot_of) {
  __shared__ float whole[ROW_TILE][2];
  const int thread = fresh_thread_id(), lane = thread % kWarpSize;
  for (int row = thread / kWarpSize; row < s.num_rows; row += compute_threads() / kWarpSize) {
    float m = neg_inf(), l = 0.f;
    for (int part = lane; part < num_parts; part += kWarpSize) {
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
    if (lane == 0) {
      whole[row][0] = m;
      whole[row][1] = l;
    }
  }
  sync_computing();
  constexpr int kVec = HEAD_DIM_V % 4 == 0 ? 4 : 1, kRowVecs = HEAD_DIM_V / kVec, kVecLanes = kWarpSize / kPartLanes;
  const int num_vecs = s.num_rows * kRowVecs;
  for (int first = warp_id() * kVecLanes; first < num_vecs; first += compute_threads() / kPartLanes) {
    const int vec = first + lane_id() % kVecLanes, used = min(vec, num_vecs - 1), row = used / kRowVecs, d = used % kRowVecs * kVec;
    const float m = whole[row][0];
    float o[kVec] = {};
    for (int round = lane_id() / kVecLanes; round < num_parts; round += kPartLanes * kPartsAtOnce) {
      float share[kPartsAtOnce];
      Vec<float, kVec> part_o[kPartsAtOnce];
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const int part = round + i * kPartLanes;
        share[i] = neg_inf();
        part_o[i] = {};
        if (part < num_parts) {
          const i64 at = static_cast<i64>(slot_of(part)) * ROW_TILE + row;
          share[i] = part_ml(p, slot_of(part), row).x;
          part_o[i] = load_past_l1<kVec>(p.schedule.partial_o + at * HEAD_DIM_V + d);
        }
      }
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        share[i] = weight(share[i], m);
#pragma unroll
        for (int e = 0; e < kVec; ++e) o[e] += part_o[i].at[e] * share[i];
      }
    }
#pragma unroll
    for (int step = kVecLanes; step < kWarpSize; step *= 2)
#pragma unroll
      for (int e = 0; e < kVec; ++e) o[e] += __shfl_xor_sync(kFullMask, o[e], step);
    if (lane_id() < kVecLanes && vec < num_vecs) write_row<kVec>(p, s, row, d, m, whole[row][1], o);
  }
}

// Ends a part of a row tile whose state the CTA has stored in its slot: the last CTA to arrive merges all parts and writes the output.
__device__ __forceinline__ void arrive_and_merge(const AttentionParams& p, const Segment& s) {
  __shared__ bool last_to_arrive;
  sync_computing();
  if (fresh_thread_id() == 0) {  // for all of the CTA, which the barriers bind to it
    const u32 others = s.last_cta - s.first_cta;
    fence_gpu();  // the part is visible before the arrival is
    last_to_arrive = atomicInc(p.schedule.arrivals + s.first_cta, others) == others;  // back to zero with the last
    fence_gpu();  // the arrivals are seen before the parts are read
  }
  sync_computing();
  if (last_to_arrive) merge_parts(p, s, s.num_parts(), [&](int part) { return part_slot(s, part); });
}

// Ends a segment whose state lies in shared memory: o [ROW_TILE][HEAD_DIM_V], ml [ROW_TILE][2]. The caller has synchronised the
// CTA after writing them, and may overwrite them once the call has returned.
__device__ __forceinline__ void finish_segment(const AttentionParams& p, const Segment& s, const float* o, const float* ml) {
  if (s.slot < 0) {
    for (int i = threadIdx.x; i < s.num_rows * HEAD_DIM_V; i += compute_threads()) {
      const int row = i / HEAD_DIM_V;
      const float out[1] = {o[i]};
      write_row<1>(p, s, row, i % HEAD_DIM_V, ml[2 * row], ml[2 * row + 1], out);
    }
    sync_computing();
    return;
  }
  const i64 at = static_cast<i64>(s.slot) * ROW_TILE;
  for (int i = threadIdx.x; i < s.num_rows * HEAD_DIM_V; i += compute_threads()) p.schedule.partial_o[at * HEAD_DIM_V + i] = o[i];
  for (int i = threadIdx.x; i < s.num_rows * 2; i += compute_threads()) p.schedule.partial_ml[at * 2 + i] = ml[i];
  if (SCHEDULE == kEven) arrive_and_merge(p, s);
  sync_computing();
}

}  // namespace pagedkv

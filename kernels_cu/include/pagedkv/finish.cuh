// The end of a segment: its rows become output, or a partial state that somebody merges. All computing threads of the CTA call
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

// Writes the elements (row, d) of the output. `state(row, d, m, l, o)` gives the row's maximum, sum and unnormalised output.
template <class State> __device__ __forceinline__ void write_rows(const AttentionParams& p, const Segment& s, const State& state) {
  for (int i = threadIdx.x; i < s.num_rows * HEAD_DIM_V; i += compute_threads()) {
    const int row = i / HEAD_DIM_V, d = i % HEAD_DIM_V, head = s.qo_head(row);
    const i64 token = s.q_first + s.query(row);
    float m, l, o, factor = 1.f;
    state(row, d, m, l, o);
    if (SINKS) add_sink(m, l, factor, p.sinks[head] * kLog2e);
    static_cast<Q_TYPE*>(p.o)[token * p.o_token_stride + head * p.o_head_stride + d] =
        from_float<Q_TYPE>(o * factor * normaliser(l));
    if (d == 0 && p.lse) p.lse[token * (p.num_kv_heads * GROUP_SIZE) + head] = natural_lse(m, l);
  }
}

// Merges the parts of a row tile, always in the order of the keys, and writes the output. `slot_of(part)` says where each lies.
template <class SlotOf>
__device__ __forceinline__ void merge_parts(const AttentionParams& p, const Segment& s, int num_parts, const SlotOf& slot_of) {
  write_rows(p, s, [&](int row, int d, float& m, float& l, float& o) {
    m = neg_inf();
    l = o = 0.f;
    for (int part = 0; part < num_parts; ++part) {
      const i64 at = static_cast<i64>(slot_of(part)) * ROW_TILE + row;
      const float part_m = __ldcg(p.schedule.partial_ml + 2 * at), part_l = __ldcg(p.schedule.partial_ml + 2 * at + 1);
      const float part_o = __ldcg(p.schedule.partial_o + at * HEAD_DIM_V + d);
      const float largest = fmaxf(m, part_m), old_factor = weight(m, largest), part_factor = weight(part_m, largest);
      l = l * old_factor + part_l * part_factor;
      o = o * old_factor + part_o * part_factor;
      m = largest;
    }
  });
}

// Ends a segment whose state lies in shared memory: o [ROW_TILE][HEAD_DIM_V], ml [ROW_TILE][2]. The caller has synchronised the
// CTA after writing them, and may overwrite them once the call has returned.
__device__ __forceinline__ void finish_segment(const AttentionParams& p, const Segment& s, const float* o, const float* ml) {
  if (s.slot < 0) {
    write_rows(p, s, [&](int row, int d, float& m, float& l, float& out) {
      m = ml[2 * row];
      l = ml[2 * row + 1];
      out = o[row * HEAD_DIM_V + d];
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
      __threadfence();  // the part is visible before the arrival is
      last_to_arrive = atomicInc(p.schedule.arrivals + s.first_cta, others) == others;  // back to zero with the last
      __threadfence();  // the arrivals are seen before the parts are read
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

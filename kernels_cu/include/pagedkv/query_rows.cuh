// One warp's softmax over kFrags * 16 rows in the layout of mma: lane l has of every 16 rows the rows l / 4 and l / 4 + 8, and of every
// 8 keys or dims the columns 2 * (l % 4) and 2 * (l % 4) + 1, so that four lanes hold a row together. Products come from prefill_mma
// (mma.sync) or prefill_wgmma (wgmma), whose sums lie alike.
//
// The state is that of state.cuh, but m is the largest score before `fold`, the factor to base 2 that one FMA per score applies; l
// and o stay spread over the four lanes until the end.
#pragma once
#include "pagedkv/finish.cuh"
#include "pagedkv/kv.cuh"
#include "pagedkv/operands.cuh"

namespace pagedkv {

// Whether K and V become operands in registers, as f16; else they are operands already, in shared memory. Every warp converts all
// of them, which does not pay before sm_89, where e4m3 takes some twenty instructions.
constexpr bool kInRegisters = kQuantised<KV_TYPE> && SCALE_MODE != kScaleTokenHead && (!kSame<KV_TYPE, e4m3> || kConvertsE4m3);
using Operand = typename Either<kInRegisters, f16, Q_TYPE>::Type;  // of both products
constexpr bool kPowers = !kSame<Operand, Q_TYPE>;                  // whether queries were divided by a power of two per row

// What a warp may skip: tiles that none of its rows sees, and masks on tiles that all of them see whole.
struct WarpSees {
  KeyRange any, all;

  WarpSees() = default;
  __device__ __forceinline__ WarpSees(const AttentionParams& p, const Segment& s, int first_row, int num_rows) : any{0, 0}, all{0, 0} {
    const int last_row = min(first_row + num_rows, s.num_rows) - 1;
    if (last_row < first_row) return;
    const PositionSpan at = s.positions(p, first_row, last_row);
    const KeyRange first = visible_keys(at.least, s.seq_len, p.window), last = visible_keys(at.greatest, s.seq_len, p.window);
    any = {first.begin, last.end};
    all = {last.begin, first.end};
  }
  __device__ __forceinline__ bool nothing(int key, int num_keys) const { return key >= any.end || key + num_keys <= any.begin; }
  __device__ __forceinline__ bool everything(int key, int num_keys) const {
    return !MASK && key >= all.begin && key + num_keys <= all.end;
  }
};

template <int kFrags> struct QueryRows {
  static constexpr int kKeyFrags = TILE_TOKENS / 8, kDimFrags = HEAD_DIM_V / 8;
  static constexpr bool kShaped = SOFT_CAP || ALIBI;  // scores are more than scaled dot products

  const AttentionParams& p;
  const Segment& segment;
  const float* powers;  // [ROW_TILE] the rows' divisors; kPowers only
  float k_scale, fold;
  float m[kFrags][2], l[kFrags][2];
  float o[kFrags][kDimFrags][4];

  // First of the warp's rows in the row tile, computed anew: registers are scarce in the loop.
  __device__ __forceinline__ static int first_row() { return static_cast<int>(fresh_thread_id() / kWarpSize) * (kFrags * 16); }

  // `k_scale`: of all keys alike; 1 where K has none or has been multiplied by it. `powers_`: in shared memory.
  __device__ __forceinline__ QueryRows(const AttentionParams& params, const Segment& s, float k_scale_, const float* powers_ = nullptr)
      : p(params), segment(s), powers(powers_), k_scale(k_scale_) {
    fold = kShaped || !(to_log2() > 0.f) ? 1.f : to_log2();  // else shape() scales
#pragma unroll
    for (int f = 0; f < kFrags; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) m[f][h] = neg_inf(), l[f][h] = 0.f;
#pragma unroll
      for (int n = 0; n < kDimFrags; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[f][n][e] = 0.f;
    }
  }

  // Dot products with the keys from `key` become scores, -inf where `masked` and a key is not seen.
  __device__ __forceinline__ void shape(float (&s)[kFrags][kKeyFrags][4], int key, bool masked) const {
    if (!kShaped && !masked && to_log2() > 0.f) return;
    const u32 lane = fresh_thread_id() % kWarpSize;
    const int first = first_row();
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int used = min(static_cast<int>(first + f * 16 + h * 8 + lane / 4), segment.num_rows - 1);  // rows past the end are not written
        const int query = segment.query(used);
        const float scale = k_scale * row_power(f, h);
        const Scorer scorer(p, segment.seq, segment.seq_len, segment.position(p, query), query, segment.qo_head(used));
#pragma unroll
        for (int n = 0; n < kKeyFrags; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int at = key + n * 8 + lane % 4 * 2 + e;
            float& x = s[f][n][2 * h + e];
            if (kShaped) x = scorer.score(x * scale, at);
            else if (!(to_log2() > 0.f)) x *= to_log2();
            if (masked && !scorer.sees(at)) x = neg_inf();
          }
      }
  }

  // Scores become shares 2^(score - m), with m and l brought up to them. What o has to be multiplied with before they are added is
  // in `factor`; false if that is 1 for all rows of the warp, as in most tiles.
  __device__ __forceinline__ bool softmax(float (&s)[kFrags][kKeyFrags][4], float (&factor)[kFrags][2]) {
    bool raised = false;
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = m[f][h];
        const float fold = row_fold(f, h);
#pragma unroll
        for (int n = 0; n < kKeyFrags; ++n) largest = fmaxf(largest, fmaxf(s[f][n][2 * h], s[f][n][2 * h + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
        const float base = largest == neg_inf() ? 0.f : largest * fold;  // nothing seen yet: every share is 2^-inf
        factor[f][h] = exp2_approx(m[f][h] * fold - base);
        raised |= largest > m[f][h];
        m[f][h] = largest;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kKeyFrags; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[f][n][2 * h + e];
            x = exp2_approx(x * fold - base);
            sum += x;
          }
        l[f][h] = l[f][h] * factor[f][h] + sum;
      }
    return __any_sync(kFullMask, raised);
  }

  __device__ __forceinline__ void rescale(const float (&factor)[kFrags][2]) {
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
      for (int n = 0; n < kDimFrags; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[f][n][e] *= factor[f][e / 2];
  }

  // 16 of the shares, from key fragment 2 * step on, as operand a of mma.
  __device__ __forceinline__ static void pack_shares(const float (&s)[kKeyFrags][4], int step, u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pack2<Operand>(s[2 * step + i / 2][i % 2 * 2], s[2 * step + i / 2][i % 2 * 2 + 1]);
  }

  // Ends the segment; all computing warps call it. `tile`: shared memory for the warp's rows alone. `v_scale` as k_scale.
  template <class Tile> __device__ __forceinline__ void finish(const Tile& tile, float v_scale) {
    sum_rows();
    if (segment.slot < 0) return write(tile, v_scale);
    store_part(v_scale);
    arrive_and_merge(p, segment);
  }

 private:
  __device__ __forceinline__ float to_log2() const { return p.softmax_scale * kLog2e * k_scale; }

  __device__ __forceinline__ float row_power(int f, int h) const {
    return kPowers ? powers[first_row() + f * 16 + h * 8 + fresh_thread_id() % kWarpSize / 4] : 1.f;
  }
  __device__ __forceinline__ float row_fold(int f, int h) const { return kShaped ? fold : fold * row_power(f, h); }

  // Two neighbouring dims of a row that the lane holds, of kDimFrags: the first of them, and their sums.
  __device__ __forceinline__ static int pair_dim(u32 lane, int n) {
    return static_cast<int>(kInRegisters ? n / 2 * 16 + lane % 4 * 4 + n % 2 * 2 : n * 8 + lane % 4 * 2);
  }
  __device__ __forceinline__ float2 pair_of(int f, int h, int n) const {
    if constexpr (kInRegisters) return {o[f][n & ~1][2 * h + n % 2], o[f][n | 1][2 * h + n % 2]};
    else return {o[f][n][2 * h], o[f][n][2 * h + 1]};
  }

  // Sums of whole rows, of the four lanes that hold each, and maxima in base 2.
  __device__ __forceinline__ void sum_rows() {
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        l[f][h] += __shfl_xor_sync(kFullMask, l[f][h], 1);
        l[f][h] += __shfl_xor_sync(kFullMask, l[f][h], 2);
        m[f][h] *= row_fold(f, h);
      }
  }

  // The state of the warp's rows, into the part's slot.
  __device__ __forceinline__ void store_part(float v_scale) const {
    const u32 lane = fresh_thread_id() % kWarpSize;
    const int first = first_row();
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = static_cast<int>(first + f * 16 + h * 8 + lane / 4);
        if (r >= segment.num_rows) continue;
        const i64 at = static_cast<i64>(segment.slot) * ROW_TILE + r;
        if (lane % 4 == 0) reinterpret_cast<float2*>(p.schedule.partial_ml)[at] = {m[f][h], l[f][h]};
        float* to = p.schedule.partial_o + at * HEAD_DIM_V;
#pragma unroll
        for (int n = 0; n < kDimFrags; ++n) {
          const float2 pair = pair_of(f, h, n);
          *reinterpret_cast<float2*>(to + pair_dim(lane, n)) = {pair.x * v_scale, pair.y * v_scale};
        }
      }
  }

  // Writes the warp's rows of the output and of lse.
  template <class Tile> __device__ __forceinline__ void write(const Tile& tile, float v_scale) const {
    const u32 lane = fresh_thread_id() % kWarpSize;
    const int first = first_row();
    __syncwarp();  // all lanes have read what lay in the tile
#pragma unroll
    for (int f = 0; f < kFrags; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = l[f][h], largest = m[f][h], factor = 1.f;
        const int own = static_cast<int>(f * 16 + h * 8 + lane / 4), r = first + own;
        const bool used = r < segment.num_rows;
        const int head = segment.qo_head(r);
        if (SINKS && used) add_sink(largest, sum, factor, p.sinks[head] * kLog2e);
        factor *= normaliser(sum) * v_scale;
        if (p.lse && used && lane % 4 == 0)
          p.lse[static_cast<i64>(segment.q_first + segment.query(r)) * (p.num_kv_heads * GROUP_SIZE) + head] = natural_lse(largest, sum);
#pragma unroll
        for (int n = 0; n < kDimFrags; ++n) {
          const float2 pair = pair_of(f, h, n);
          const int dim = pair_dim(lane, n);
          *reinterpret_cast<u32*>(tile.chunk(own, dim / 8) + dim % 8 * 2) = pack2<Q_TYPE>(pair.x * factor, pair.y * factor);
        }
      }
    __syncwarp();
    constexpr int kChunks = HEAD_DIM_V / 8;
#pragma unroll
    for (int j = 0; j < kFrags * 16 * kChunks / kWarpSize; ++j) {
      const int index = static_cast<int>(j * kWarpSize + lane), own = index / kChunks, chunk = index % kChunks, r = first + own;
      if (r >= segment.num_rows) break;
      Q_TYPE* to = static_cast<Q_TYPE*>(p.o) + (segment.q_first + segment.query(r)) * p.o_token_stride + segment.qo_head(r) * p.o_head_stride;
      *reinterpret_cast<Vec<u32, 4>*>(to + chunk * 8) = *reinterpret_cast<const Vec<u32, 4>*>(tile.chunk(own, chunk));
    }
  }
};

}  // namespace pagedkv

// One warp's attention of ROW_TILE rows over groups of 16 keys, on tensor cores (tile.cuh), kKeyGroups of them in one step of the
// softmax. In the layout of mma, lane l has of each group of eight rows the rows 2 * (l % 4) and 2 * (l % 4) + 1, and of 16 keys the
// keys l / 4 and l / 4 + 8: the eight lanes of equal l % 4 hold a row together. The softmax state is that of state.cuh; l and o stay
// spread until the end.
//
// With scales per token, shares are multiplied by V's before they become an operand. In f16 a small scale would make them subnormal:
// a row's o is kept in units of `unit`, the power of two at its largest share times scale so far.
#pragma once
#include "pagedkv/kv.cuh"
#include "pagedkv/schedule.cuh"
#include "pagedkv/state.cuh"
#include "pagedkv/tile.cuh"

namespace pagedkv {

// 16 keys in shared memory: rows first_row.. of a tile. Without `any` none is a key of the segment, and the tile is not read.
struct KeyGroup {
  const u8* tile;
  int first_row, first_key;
  bool any;
};

template <int kKeyGroups> class WarpRows {
 public:
  // Reads the queries. Rows past the end repeat the last one and are never written.
  __device__ __forceinline__ WarpRows(const AttentionParams& p, const Segment& s, float k_scale) : segment(s) {
    const int last_row = s.num_rows - 1;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const int row = min(group * 8 + lane_id() / 4, last_row);
      const float power = load_queries(q[group], query_row(p, s, row));
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int own = min(own_row(group, column), last_row);
        scorers[group][column] = Scorer(p, s.seq, s.seq_len, s.position(p, s.query(own)), s.query(own), s.qo_head(own));
        scorers[group][column].scale_log2 *= k_scale * __shfl_sync(kFullMask, power, own_row(0, column) * 4);
        m[group][column] = neg_inf();
        l[group][column] = 0.f;
        if (kUnits) unit[group][column] = top[group][column] = 0.f;
      }
#pragma unroll
      for (int step = 0; step < kVSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[group][step][i] = 0.f;
    }
    const PositionSpan at = s.positions(p, 0, last_row);
    all_see = {visible_keys(at.greatest, s.seq_len, p.window).begin, visible_keys(at.least, s.seq_len, p.window).end};
    all_see = {max(all_see.begin, s.begin), min(all_see.end, s.end)};
  }

  // Scores of the keys, and their shares in the softmax, which wait in registers for add_values. With `kPartial` some of them may
  // be no keys of the segment. `scales`: [2][16], of K and of V, SCALE_MODE token_head only.
  template <class Layout, bool kPartial>
  __device__ __forceinline__ void add_scores(const KeyGroup (&keys)[kKeyGroups], const float* scales) {
    float s[kKeyGroups][kRowGroups][4];
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g) multiply<Layout, kPartial>(s[g], keys[g]);
    float v_scale[2] = {1.f, 1.f};
    if constexpr (SCALE_MODE == kScaleTokenHead) {
      static_assert(kKeyGroups == 1, "one group's scales");
      const float k_scale[2] = {scales[lane_id() / 4], scales[lane_id() / 4 + 8]};
      v_scale[0] = scales[16 + lane_id() / 4], v_scale[1] = scales[24 + lane_id() / 4];
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[0][group][i] *= k_scale[i / 2];
    }
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g) shape(s[g], keys[g].first_key);
    float factor[kRowGroups][2];  // of o
    bool rescaled = raise(s, factor);
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g)
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[g][group][i] = weight(s[g][group][i], m[group][i % 2]);
          l[group][i % 2] += s[g][group][i];
          s[g][group][i] *= v_scale[i / 2];
        }
    if constexpr (kUnits) rescaled = take_units(s[0], factor);
    if (__any_sync(kFullMask, rescaled)) {
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
        for (int step = 0; step < kVSteps; ++step)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[group][step][i] *= factor[group][i % 2];
    }
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g)
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          shares[g][group][half] = movmatrix_trans(pack2<MmaType>(s[g][group][2 * half], s[g][group][2 * half + 1]));
  }

  // Adds the shares' values. With `kPartial` rows of the tile that are no key of the segment may hold anything, NaN too.
  template <class Layout, bool kPartial> __device__ __forceinline__ void add_values(const KeyGroup (&keys)[kKeyGroups]) {
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g) {
      if (kPartial && !keys[g].any) continue;
      u32 inside[2] = {0xffffffffu, 0xffffffffu};
      if (kPartial) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = keys[g].first_key + half * 8 + lane_id() % 4 * 2;
          inside[half] = (segment.begin <= key && key < segment.end ? 0xffffu : 0) |
                         (segment.begin <= key + 1 && key + 1 < segment.end ? 0xffff0000u : 0);
        }
      }
#pragma unroll
      for (int load = 0; load < ceil_div(kVSteps, kStepsPerLoad); ++load) {
        u32 a[kStepsPerLoad][4];
        load_v<Layout>(a, keys[g].tile, keys[g].first_row, load);
#pragma unroll
        for (int i = 0; i < kStepsPerLoad; ++i) {
          const int step = load * kStepsPerLoad + i;
          if (kPartial) {
#pragma unroll
            for (int j = 0; j < 4; ++j) a[i][j] &= inside[j / 2];
          }
          if (step < kVSteps) {
#pragma unroll
            for (int group = 0; group < kRowGroups; ++group)
              mma_16816<MmaType>(o[group][step], a[i], shares[g][group][0], shares[g][group][1]);
          }
        }
      }
    }
  }

  // The warp's state into shared memory, as merge_warps takes it.
  __device__ __forceinline__ void store(float* part_o, float* part_ml) {
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int row = own_row(group, column);
        float sum = l[group][column];
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
        if (lane_id() < 4) {
          part_ml[2 * row] = m[group][column];
          part_ml[2 * row + 1] = sum;
        }
#pragma unroll
        for (int step = 0; step < kVSteps; ++step)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            part_o[row * kPartPitch + dim_of(step, lane_id() / 4 + 8 * half)] =
                kUnits ? o[group][step][2 * half + column] * unit[group][column] : o[group][step][2 * half + column];
      }
  }

 private:
  static constexpr bool kUnits = SCALE_MODE == kScaleTokenHead && kSame<MmaType, f16>;

  const Segment& segment;
  KeyRange all_see;  // keys that every row sees
  u32 q[kRowGroups][2 * kKSteps];
  Scorer scorers[kRowGroups][2];
  float m[kRowGroups][2], l[kRowGroups][2];
  float o[kRowGroups][kVSteps][4];
  float top[kRowGroups][2], unit[kRowGroups][2];  // the largest share times scale, as m is now; o's divisor
  u32 shares[kKeyGroups][kRowGroups][2];

  // Dot products of 16 keys, zeros where none is the segment's. Sums that nothing else would run beside go in two chains.
  template <class Layout, bool kPartial> __device__ __forceinline__ void multiply(float (&s)[kRowGroups][4], const KeyGroup& keys) {
    constexpr int kChains = kKeyGroups * kRowGroups == 1 ? 2 : 1;
    float sums[kChains][kRowGroups][4] = {};
    if (!kPartial || keys.any) {
#pragma unroll
      for (int load = 0; load < ceil_div(kKSteps, kStepsPerLoad); ++load) {
        u32 a[kStepsPerLoad][4];
        load_k<Layout>(a, keys.tile, keys.first_row, load);
#pragma unroll
        for (int i = 0; i < kStepsPerLoad; ++i) {
          const int step = load * kStepsPerLoad + i;
          if (step < kKSteps) {
#pragma unroll
            for (int group = 0; group < kRowGroups; ++group)
              mma_16816<MmaType>(sums[step % kChains][group], a[i], q[group][2 * step], q[group][2 * step + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[group][i] = kChains == 2 ? sums[0][group][i] + sums[kChains - 1][group][i] : sums[0][group][i];
  }

  // Dot products become scores, -inf where a key is not seen.
  __device__ __forceinline__ void shape(float (&s)[kRowGroups][4], int first_key) const {
    const int key = first_key + lane_id() / 4;
    if (!MASK && all_see.begin <= first_key && first_key + kGroupKeys <= all_see.end) {
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[group][i] = scorers[group][i % 2].score(s[group][i], key + i / 2 * 8);
    } else {
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = key + i / 2 * 8;
          const bool inside = segment.begin <= at && at < segment.end;
          s[group][i] = inside ? scorers[group][i % 2](s[group][i], at) : neg_inf();
        }
    }
  }

  // Makes room for scores: raises m and rescales l. True if some maximum of this lane's rows has risen, as in few steps; `factor` is
  // then due to o.
  __device__ __forceinline__ bool raise(const float (&s)[kKeyGroups][kRowGroups][4], float (&factor)[kRowGroups][2]) {
    bool raised = false;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float largest = neg_inf();
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) largest = fmaxf(largest, fmaxf(s[g][group][column], s[g][group][2 + column]));
        largest = fmaxf(row_largest(largest), m[group][column]);
        factor[group][column] = weight(m[group][column], largest);
        raised |= largest > m[group][column];
        m[group][column] = largest;
        l[group][column] *= factor[group][column];
      }
    return raised;
  }

  // Brings shares times scales into units, and the change of units into `factor`. True if that is not 1.
  __device__ __forceinline__ bool take_units(float (&s)[kRowGroups][4], float (&factor)[kRowGroups][2]) {
    bool changed = false;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const float largest = row_largest(fmaxf(fabsf(s[group][column]), fabsf(s[group][2 + column])));
        top[group][column] = fmaxf(top[group][column] * factor[group][column], largest);
        const float power = power_below(top[group][column]), inverse = one_over_power(power);
        factor[group][column] *= unit[group][column] * inverse;
        changed |= factor[group][column] != 1.f;
        unit[group][column] = power;
        s[group][column] *= inverse;
        s[group][2 + column] *= inverse;
      }
    return changed;
  }

  // Over the eight lanes that hold a row.
  static __device__ __forceinline__ float row_largest(float largest) {
#pragma unroll
    for (int step = 4; step < kWarpSize; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
    return largest;
  }
};

}  // namespace pagedkv

// Rotary position embedding (Su et al. 2021): pairs of elements of K and Q turn by an angle that is the position times the pair's
// frequency. ROPE: 0 none, 1 cosines and sines from a table, 2 computed. Of a head, the elements ROTARY_OFFSET .. ROTARY_OFFSET +
// ROTARY_DIM - 1 turn, and PAIRING says which belong together: 0 split (NeoX), element i with i + ROTARY_DIM / 2; 1 interleaved
// (GPT-J), element 2i with 2i + 1. TABLE_VEC floats of the table are one access.
//
// Products and sums are rounded one by one, never fused: the same bits from every compiler, and from NumPy.
#pragma once
#include "pagedkv/cache_params.cuh"
#include "pagedkv/rows.cuh"

namespace pagedkv {

constexpr int kRopeNone = 0, kRopeTable = 1, kRopeComputed = 2;
constexpr int kSplit = 0, kInterleaved = 1;
constexpr int kRotaryHalf = ROTARY_DIM / 2;
constexpr int kTurns = PAIRING == kSplit ? VEC : max_of(VEC / 2, 1);  // pairs that a vector takes part in
static_assert(ROPE == kRopeNone || (ROTARY_DIM > 0 && ROTARY_DIM % 2 == 0 && ROTARY_OFFSET + ROTARY_DIM <= HEAD_DIM), "");
static_assert(ROPE == kRopeNone || ROTARY_OFFSET % VEC == 0, "a vector turns whole or not at all");
static_assert(ROPE == kRopeNone || (PAIRING == kSplit ? kRotaryHalf : ROTARY_DIM) % VEC == 0, "");
static_assert(kTurns % TABLE_VEC == 0, "");

// The angles of one token.
struct TokenRope {
  const RopeParams& p;
  i64 position;

  __device__ __forceinline__ TokenRope(const RopeParams& params, i64 token) : p(params) {
    position = ROPE ? params.positions[token] : 0;
  }

  // Cosines and sines of neighbouring pairs, from `pair` on.
  __device__ __forceinline__ void turns(int pair, float (&cos)[kTurns], float (&sin)[kTurns]) const {
    if (ROPE == kRopeTable) {
#if DEBUG
      if (position < 0 || position >= p.max_position) __trap();
#endif
      const i64 at = position * p.table_stride + pair;
#pragma unroll
      for (int i = 0; i < kTurns; i += TABLE_VEC) {
        const auto some_cos = load_vec<TABLE_VEC>(p.cos + at + i), some_sin = load_vec<TABLE_VEC>(p.sin + at + i);
#pragma unroll
        for (int e = 0; e < TABLE_VEC; ++e) cos[i + e] = some_cos.at[e], sin[i + e] = some_sin.at[e];
      }
    } else {
      // Whole turns drop out in the overflow, so the angle is as exact at position a million as at position one.
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const i64 turned = static_cast<i64>(static_cast<u64>(position) * p.frequencies[pair + i]);
        sincospif(static_cast<float>(turned) * 0x1p-63f, &sin[i], &cos[i]);
      }
    }
  }
};

// One element of a pair, turned: the first loses some of the other, the second gains.
__device__ __forceinline__ float turn(float x, float other, float cos, float sin, bool is_second) {
  const float cross = __fmul_rn(other, sin);
  return __fadd_rn(__fmul_rn(x, cos), is_second ? cross : -cross);
}

// Turns a row that was loaded from `from`; the other elements of the pairs are read there again, where the lane has them not.
template <int kDim, class T>
__device__ __forceinline__ void rotate(Row<kDim>& row, const T* from, const TokenRope& rope, bool inside) {
#pragma unroll
  for (int j = 0; j < kRowVecs<kDim>; ++j) {
    const int begin = row_element(j) - ROTARY_OFFSET;  // within the part that turns
    if (!inside || begin < 0 || begin >= ROTARY_DIM) continue;
    float cos[kTurns], sin[kTurns], other[VEC];
    if (PAIRING == kInterleaved && VEC > 1) {
#pragma unroll
      for (int e = 0; e < VEC; ++e) other[e] = row.at[j][e ^ (VEC > 1)];
    } else {
      const int there = PAIRING == kInterleaved ? begin ^ 1 : begin < kRotaryHalf ? begin + kRotaryHalf : begin - kRotaryHalf;
      const auto vec = load_vec<VEC>(from + ROTARY_OFFSET + there);
#pragma unroll
      for (int e = 0; e < VEC; ++e) other[e] = to_float(vec.at[e]);
    }
    const bool second_half = begin >= kRotaryHalf;
    rope.turns(PAIRING == kInterleaved ? begin / 2 : begin - (second_half ? kRotaryHalf : 0), cos, sin);
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
      const int pair = PAIRING == kInterleaved ? e / 2 : e;
      const bool is_second = PAIRING == kInterleaved ? (begin + e) % 2 : second_half;
      row.at[j][e] = turn(row.at[j][e], other[e], cos[pair], sin[pair], is_second);
    }
  }
}

}  // namespace pagedkv

// The two products of a tile on mma.sync: rows stand where mma.m16n8k16 has its 16 rows,
//   S[16 rows x 8 keys] = Q K^T,    O[16 rows x 8 dims] += P V.
// P stays in registers: the sums of S are laid out as the operand of P V. A fragment of K or V that has been read from shared
// memory serves all kFrags fragments of rows.
#pragma once
#include "pagedkv/kv_tile.cuh"

namespace pagedkv {

// s += Q K^T. `load_q(lane, f, step, a)` gives dims 16 step.. of fragment f of the rows.
template <int kFrags, class LoadQ, class K>
__device__ __forceinline__ void multiply_keys(float (&s)[kFrags][TILE_TOKENS / 8][4], const LoadQ& load_q, const K& k) {
  // Steps that the compiler may mix: with more of them it reads operands so far ahead that others have to leave the registers.
  constexpr bool kFew = QueryRows<kFrags>::kShaped || (!kSame<Q_TYPE, KV_TYPE> && !kInRegisters);
  constexpr int kMixed = Q_REGISTERS ? HEAD_DIM / 16 : MASK ? 1 : kFew ? 2 : 4;
  const u32 lane = fresh_thread_id() % kWarpSize;
#pragma unroll kMixed
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    u32 a[kFrags][4];
#pragma unroll
    for (int f = 0; f < kFrags; ++f) load_q(lane, f, step, a[f]);
#pragma unroll
    for (int n = 0; n < TILE_TOKENS / 8; n += K::kLoaded) {
      u32 b[K::kLoaded][2];
      k.load_keys(b, lane, n * 8, step);
#pragma unroll
      for (int f = 0; f < kFrags; ++f)
#pragma unroll
        for (int j = 0; j < min_of(K::kLoaded, TILE_TOKENS / 8 - n); ++j) mma_16816<Operand>(s[f][n + j], a[f], b[j][0], b[j][1]);
    }
  }
}

// o += P V, the shares P in s.
template <int kFrags, class V>
__device__ __forceinline__ void add_values(float (&o)[kFrags][HEAD_DIM_V / 8][4], const float (&s)[kFrags][TILE_TOKENS / 8][4], const V& v) {
  const u32 lane = fresh_thread_id() % kWarpSize;
#pragma unroll
  for (int step = 0; step < TILE_TOKENS / 16; ++step) {
    u32 a[kFrags][4];
#pragma unroll
    for (int f = 0; f < kFrags; ++f) QueryRows<kFrags>::pack_shares(s[f], step, a[f]);
#pragma unroll
    for (int n = 0; n < HEAD_DIM_V / 8; n += V::kLoaded) {
      u32 b[V::kLoaded][2];
      v.load_values(b, lane, step * 16, n / V::kLoaded);
#pragma unroll
      for (int f = 0; f < kFrags; ++f)
#pragma unroll
        for (int j = 0; j < min_of(V::kLoaded, HEAD_DIM_V / 8 - n); ++j) mma_16816<Operand>(o[f][n + j], a[f], b[j][0], b[j][1]);
    }
  }
}

}  // namespace pagedkv

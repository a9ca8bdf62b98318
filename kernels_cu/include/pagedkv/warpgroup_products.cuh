// The two products of a tile on wgmma: a warpgroup's 64 rows against all keys of the tile at once,
//   S[64 rows x TILE_TOKENS] = Q K^T,    O[64 rows x HEAD_DIM_V] += P V.
// Q, K and V lie in shared memory as TMA's 128-byte swizzle leaves them (TileLayout); P stays in registers: the sums of S are laid
// out as the operand of P V. Both only start the product, as one group: ptx_wgmma.cuh says what must not be touched until its end.
#pragma once
#include "pagedkv/ptx_wgmma.cuh"
#include "pagedkv/query_rows.cuh"
#include "pagedkv/tma_ring.cuh"

namespace pagedkv {

constexpr int kGroupRows = 64;  // of a warpgroup
using QLayout = TileLayout<HEAD_DIM / 8, kGroupRows>;
static_assert(TILE_TOKENS == 128 && kPanelDims == 64, "the shapes of wgmma_rows and wgmma_across");

// s = Q K^T.
__device__ __forceinline__ void start_keys(float (&s)[TILE_TOKENS / 8][4], const u8* q, const u8* k) {
  const u64 a = wgmma_operand(q, 0), b = wgmma_operand(k, 0);
  hold_sums(s);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    const int panel = step / 4, at = step % 4 * 32;
    wgmma_rows<Q_TYPE>(s, wgmma_advance(a, panel * kGroupRows * 128 + at), wgmma_advance(b, panel * TILE_TOKENS * 128 + at), step > 0);
  }
  wgmma_commit();
  hold_sums(s);
}

// o += P V.
__device__ __forceinline__ void start_values(float (&o)[HEAD_DIM_V / 8][4], const u32 (&p)[TILE_TOKENS / 16][4], const u8* v) {
  const u64 b = wgmma_operand(v, TILE_TOKENS * 128);
  hold_sums(o);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < TILE_TOKENS / 16; ++step) wgmma_across<Q_TYPE>(o, p[step], wgmma_advance(b, step * 16 * 128));
  wgmma_commit();
  hold_sums(o);
}

}  // namespace pagedkv

// K or V of a tile in shared memory, and the operands b of mma.m16n8k16 that prefill makes of them.
//
// One-byte types are read by the same ldmatrix as pairs and converted in registers. A lane has other dims than mma asks for: as a sum
// over dims may go in any order and columns of O may have any order, K's dims are permuted alike in Q (load_queries) and V's in O
// (pair_of in query_rows.cuh). With scales per token a tile is converted in shared memory instead (cta_ring.cuh).
#pragma once
#include "pagedkv/query_rows.cuh"
#include "pagedkv/shared_tile.cuh"

namespace pagedkv {

template <int kRows, int kDim> struct KvTile : SharedTile<kRows, kDim, kInRegisters ? 1 : 2> {
  static constexpr int kLoaded = kInRegisters ? 4 : 2;  // operands of a load

  // Dims 16 step.. of keys row..row + 8 * kLoaded - 1, eight each; unspecified for keys past the tile.
  __device__ __forceinline__ void load_keys(u32 (&b)[kLoaded][2], u32 lane, int row, int step) const {
    u32 words[4];
    if constexpr (kInRegisters) {
      this->load_chunk(words, lane, row, step);
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j][0] = to_f16_pair(words[j], 0, 1), b[j][1] = to_f16_pair(words[j], 2, 3);
    } else {
      this->load_b(words, lane, row, step);
      b[0][0] = words[0], b[0][1] = words[1], b[1][0] = words[2], b[1][1] = words[3];
    }
  }

  // Keys row..row + 15 of eight dims each, from dim 8 * kLoaded * load; unspecified for dims past the last.
  __device__ __forceinline__ void load_values(u32 (&b)[kLoaded][2], u32 lane, int row, int load) const {
    u32 words[4];
    this->load_b_trans(words, lane, row, load);
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) b[j][half] = to_f16_pair(words[j / 2 * 2 + half], j % 2, j % 2 + 2);
    } else {
      b[0][0] = words[0], b[0][1] = words[1], b[1][0] = words[2], b[1][1] = words[3];
    }
  }
};

}  // namespace pagedkv

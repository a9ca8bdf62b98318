// A tile of 16-bit elements in shared memory, as ldmatrix wants it: rows of 16-byte chunks, one after the other, in which a chunk's
// place depends on its row, so that the same chunk of eight neighbouring rows lies in eight different bank groups.
//
// Rows of kChunks chunks repeat their banks after 8 / kCycle rows, kCycle being the largest power of two in kChunks, at most 8; from
// there on, chunks are exchanged within groups of kCycle. Any head dim that is a multiple of 16 is free of conflicts this way.
#pragma once
#include "pagedkv/ptx.cuh"

namespace pagedkv {

template <int kRows, int kCols> struct SharedTile {
  static_assert(kCols % 16 == 0, "mma takes 16 columns at a time");
  static constexpr int kChunks = kCols / 8, kBytes = kRows * kCols * 2;
  static constexpr int kCycle = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;

  u8* base;

  __device__ __forceinline__ static int swizzle(int row) { return row / (8 / kCycle) % kCycle; }
  __device__ __forceinline__ u8* chunk(int row, int column) const { return base + row * (kChunks * 16) + (column ^ swizzle(row)) * 16; }

  // 16 rows from `row` and columns 16 step..16 step + 15 as operand a of mma, or as two operands b of which each row is a column.
  __device__ __forceinline__ void load_a(u32 (&a)[4], u32 lane, int row, int step) const {
    ldmatrix_x4(a, lane_chunk(row, lane % 16, lane / 16, step));
  }
  __device__ __forceinline__ void load_b(u32 (&b)[4], u32 lane, int row, int step) const {
    ldmatrix_x4(b, lane_chunk(row, lane / 16 * 8 + lane % 8, lane / 8 % 2, step));
  }
  // 16 rows as the inner dimension: two operands b, of columns 16 step..16 step + 7 and the next 8.
  __device__ __forceinline__ void load_b_trans(u32 (&b)[4], u32 lane, int row, int step) const {
    ldmatrix_x4_trans(b, lane_chunk(row, lane % 16, lane / 16, step));
  }

 private:
  // chunk(row + lane_row, 2 * step + lane_column) for a row that is a multiple of 8 and columns 0 and 1, so written that kCycle / 2
  // addresses per lane serve all rows and steps, with constants added.
  __device__ __forceinline__ u8* lane_chunk(int row, int lane_row, int lane_column, int step) const {
    const int within = 2 * step % kCycle;
    const u8* lane_base = base + lane_row * (kChunks * 16) + ((lane_column ^ swizzle(lane_row)) ^ within) * 16;
    return const_cast<u8*>(lane_base) + row * (kChunks * 16) + (2 * step - within) * 16;
  }
};

}  // namespace pagedkv

// A tile in shared memory, as ldmatrix wants it: rows of 16-byte chunks, one after the other, in which a chunk's
// place depends on its row, so that the same chunk of eight neighbouring rows lies in eight different bank groups.
//
// Rows of kChunks chunks repeat their banks after 8 / kCycle rows, kCycle being the largest power of two in kChunks, at most 8; from
// there on, chunks are exchanged within groups of kCycle. Any head dim that is a multiple of 16 is free of conflicts this way, in
// elements of 16 bits and of one byte.
#pragma once
#include "pagedkv/ptx.cuh"

namespace pagedkv {

template <int kRows, int kCols, int kItemBytes = 2> struct SharedTile {
  static_assert(kCols % 16 == 0, "mma takes 16 columns at a time");
  static constexpr int kBytes = kRows * kCols * kItemBytes, kChunks = kBytes / kRows / 16;
  static constexpr int kCycle = kChunks % 8 == 0 ? 8 : kChunks & -kChunks;

  u8* base;

  __device__ __forceinline__ static int swizzle(int row) { return row / (8 / kCycle) % kCycle; }
  __device__ __forceinline__ u8* chunk(int row, int column) const { return base + row * (kChunks * 16) + (column ^ swizzle(row)) * 16; }

  // 16 rows from `row` and columns 16 step..16 step + 15 as operand a of mma, or as two operands b of which each row is a column.
  __device__ __forceinline__ void load_a(u32 (&a)[4], u32 lane, int row, int step) const {
    ldmatrix_x4(a, lane_chunk(row, lane % 16, lane / 16, 2 * step));
  }
  __device__ __forceinline__ void load_b(u32 (&b)[4], u32 lane, int row, int step) const {
    ldmatrix_x4(b, lane_chunk(row, lane / 16 * 8 + lane % 8, lane / 8 % 2, 2 * step));
  }
  // 16 rows as the inner dimension: two operands b, of columns 16 step..16 step + 7 and the next 8. Of bytes: two of each of two
  // chunks from 2 step, of their even columns and of their odd ones; of the last chunk twice where there is one.
  __device__ __forceinline__ void load_b_trans(u32 (&b)[4], u32 lane, int row, int step) const {
    const int column = 2 * step + 1 < kChunks ? lane / 16 : 0;
    ldmatrix_x4_trans(b, lane_chunk(row, lane % 16, column, 2 * step));
  }
  // Chunk `column` of 32 rows, eight in each word; of the first 16 rows twice where there are no more.
  __device__ __forceinline__ void load_chunk(u32 (&b)[4], u32 lane, int row, int column) const {
    ldmatrix_x4(b, lane_chunk(row, row + 32 <= kRows ? lane : lane % 16, 0, column));
  }

 private:
  // chunk(row + lane_row, first + lane_column) for a row that is a multiple of 8, and an even `first` where lane_column may be 1, so
  // written that few addresses per lane serve all rows and columns, with constants added.
  __device__ __forceinline__ u8* lane_chunk(int row, int lane_row, int lane_column, int first) const {
    const int within = first % kCycle;
    const u8* lane_base = base + lane_row * (kChunks * 16) + ((lane_column ^ swizzle(lane_row)) ^ within) * 16;
    return const_cast<u8*>(lane_base) + row * (kChunks * 16) + (first - within) * 16;
  }
};

}  // namespace pagedkv

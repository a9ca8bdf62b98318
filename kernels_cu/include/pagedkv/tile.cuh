// Tiles of K and V in shared memory, and the operands of mma.m16n8k16 that are made of them.
//
// Decode swaps the operands: keys stand where mma has 16 rows, the few rows of Q where it has 8 columns,
//   S^T[16 keys x 8 rows] = K[16 x D] Q^T,    O^T[16 dims x 8 rows] += V^T[16 x 16 keys] P^T,
// so that a group of up to eight query heads wastes nothing. K is read by ldmatrix, V by ldmatrix.trans, 16 bytes per lane.
//
// One-byte types (fp8, int8) go through the same ldmatrix as pairs and are converted in registers (operands.cuh). A lane has other
// elements than mma asks for; as a sum over dims may go in any order and rows of O^T may have any order, K's dims are permuted alike
// in Q (load_queries) and V's dims are permuted in O^T (dim_of).
#pragma once
#include "pagedkv/operands.cuh"

namespace pagedkv {

constexpr int kGroupKeys = 16;                    // keys that a warp computes at once: the rows of mma
constexpr int kRowGroups = ROW_TILE / 8;          // times the columns of mma
constexpr int kVSteps = HEAD_DIM_V / 16;
constexpr int kChunkDims = 16 / sizeof(KV_TYPE);  // elements of 16 bytes
constexpr int kKChunks = HEAD_DIM / kChunkDims, kVChunks = HEAD_DIM_V / kChunkDims;
static_assert(ROW_TILE % 8 == 0 && HEAD_DIM_V % 16 == 0, "");
static_assert(kSame<Q_TYPE, KV_TYPE> || kQuantised<KV_TYPE>, "");
static_assert(kSame<MmaType, Q_TYPE> || kSame<Q_TYPE, bf16>, "");

// Where 16-byte chunk `chunk` of row `row` lies: such that eight rows of one chunk (what ldmatrix reads) and eight chunks of one
// row (what copies write) are in different banks. Rows of whole 128 bytes are cut into panels [kRows][128 bytes] with the chunk's
// number XORed by the row's, as TMA's 128-byte swizzle does; shorter powers of two likewise; anything else has an odd pitch.
template <int kChunks, int kRows> struct TileLayout {
  static constexpr bool kPanels = kChunks % 8 == 0, kXor = (kChunks & (kChunks - 1)) == 0;
  static constexpr int kPitch = kXor ? kChunks : kChunks | 1;
  static constexpr int kBytes = kPanels ? kRows * kChunks * 16 : kRows * kPitch * 16;

  static __device__ __forceinline__ int at(int row, int chunk) {
    if constexpr (kPanels) return (chunk / 8 * kRows + row) * 128 + ((chunk % 8) ^ (row % 8)) * 16;
    else if constexpr (kXor) return (row * kPitch + (chunk ^ (row / (8 / kChunks) % kChunks))) * 16;
    else return (row * kPitch + chunk) * 16;
  }
  // at(row + ahead, chunk), given at(row, chunk): one XOR and a constant. No bit is set in both `row` and `ahead`.
  static __device__ __forceinline__ int moved(int from, int ahead) {
    static_assert(kPanels || kXor, "an odd pitch needs no such thing");
    if constexpr (kPanels) return (from ^ ahead % 8 * 16) + ahead * 128;
    else return (from ^ ahead / (8 / kChunks) % kChunks * 16) + ahead * kPitch * 16;
  }
};

// K[16 keys x 16 dims], kStepsPerLoad times: step load * kStepsPerLoad + i. Rows first_row.. of the tile.
template <class Layout> __device__ __forceinline__ void load_k(u32 (&a)[kStepsPerLoad][4], const u8* tile, int first_row, int load) {
  const int chunk = min(2 * load + lane_id() / 16, kKChunks - 1);
  u32 words[4];
  ldmatrix_x4(words, tile + Layout::at(first_row + lane_id() % 16, chunk));
#pragma unroll
  for (int i = 0; i < kStepsPerLoad; ++i) {
    if constexpr (kStepsPerLoad == 1) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = words[j];
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = to_f16_pair(words[2 * i + j % 2], j / 2 * 2, j / 2 * 2 + 1);
    }
  }
}

// V^T[16 dims x 16 keys], likewise; row r of the 16 is dim_of(step, r).
template <class Layout> __device__ __forceinline__ void load_v(u32 (&a)[kStepsPerLoad][4], const u8* tile, int first_row, int load) {
  const int chunk = min(2 * load + lane_id() / 8 % 2, kVChunks - 1);
  u32 words[4];
  ldmatrix_x4_trans(words, tile + Layout::at(first_row + lane_id() % 8 + lane_id() / 16 * 8, chunk));
#pragma unroll
  for (int i = 0; i < kStepsPerLoad; ++i) {
    if constexpr (kStepsPerLoad == 1) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = words[j];
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = to_f16_pair(words[i + j / 2 * 2], j % 2, j % 2 + 2);
    }
  }
}
__device__ __forceinline__ int dim_of(int step, int row) { return step * 16 + (kStepsPerLoad == 1 ? row : row % 8 * 2 + row / 8); }

// Row of the tile that is this lane's `column` (0, 1) of row group `group`, in sums of mma.
__device__ __forceinline__ int own_row(int group, int column) { return group * 8 + lane_id() % 4 * 2 + column; }

}  // namespace pagedkv

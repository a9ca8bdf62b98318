// Tiles of K and V in shared memory, and the operands of mma.m16n8k16 that are made of them.
//
// Decode swaps the operands: keys stand where mma has 16 rows, the few rows of Q where it has 8 columns,
//   S^T[16 keys x 8 rows] = K[16 x D] Q^T,    O^T[16 dims x 8 rows] += V^T[16 x 16 keys] P^T,
// so that a group of up to eight query heads wastes nothing. K is read by ldmatrix, V by ldmatrix.trans, 16 bytes per lane.
//
// One-byte types (fp8, int8) go through the same ldmatrix as pairs and are converted in registers. Then a lane has other elements
// than mma asks for; as a sum over dims may go in any order and rows of O^T may have any order, K's dims are permuted alike in Q
// (load_queries) and V's dims are permuted in O^T (dim_of).
#pragma once
#include "pagedkv/ptx.cuh"

namespace pagedkv {

constexpr int kGroupKeys = 16;                    // keys that a warp computes at once: the rows of mma
constexpr int kRowGroups = ROW_TILE / 8;          // times the columns of mma
constexpr int kKSteps = HEAD_DIM / 16, kVSteps = HEAD_DIM_V / 16;
constexpr int kChunkDims = 16 / sizeof(KV_TYPE);  // elements of 16 bytes
constexpr int kKChunks = HEAD_DIM / kChunkDims, kVChunks = HEAD_DIM_V / kChunkDims;
constexpr int kStepsPerLoad = 2 / sizeof(KV_TYPE);  // steps of mma that one ldmatrix.x4 feeds
static_assert(ROW_TILE % 8 == 0 && HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "");
static_assert(kSame<Q_TYPE, KV_TYPE> || kQuantised<KV_TYPE>, "");

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

// Bytes `first` and `second` of a word, converted, as one operand register.
template <class T> __device__ __forceinline__ u32 convert_pair(u32 word, int first, int second) {
  if constexpr (kSame<KV_TYPE, i8>) {  // u = byte + 128 in the low bits of a float of known exponent, less what that adds
    word ^= 0x80808080u;
    if constexpr (kSame<T, f16>) {
      const u32 biased = __byte_perm(word, 0x64646464u, first | 0x40 | second << 8 | 0x4000);
      const __half2 pair = __hsub2(*reinterpret_cast<const __half2*>(&biased), __half2half2(__ushort_as_half(0x6480)));
      return *reinterpret_cast<const u32*>(&pair);
    } else {
      const float low = __uint_as_float(__byte_perm(word, 0x4b000000u, first | 0x7540));
      const float high = __uint_as_float(__byte_perm(word, 0x4b000000u, second | 0x7540));
      return pack2<T>(low - 8388736.f, high - 8388736.f);
    }
  } else {
    __half2 pair;
    if constexpr (kSame<KV_TYPE, e5m2>) {  // the upper half of an f16
      const u32 bits = __byte_perm(word, 0, 0x0404 | first << 4 | second << 12);
      pair = *reinterpret_cast<const __half2*>(&bits);
    } else {
      const u32 bits = __byte_perm(word, 0, first | second << 4);
      pair = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits), __NV_E4M3));
    }
    if constexpr (kSame<T, f16>) return *reinterpret_cast<const u32*>(&pair);
    const float2 both = __half22float2(pair);
    return pack2<T>(both.x, both.y);
  }
}

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
      for (int j = 0; j < 4; ++j) a[i][j] = convert_pair<Q_TYPE>(words[2 * i + j % 2], j / 2 * 2, j / 2 * 2 + 1);
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
      for (int j = 0; j < 4; ++j) a[i][j] = convert_pair<Q_TYPE>(words[i + j / 2 * 2], j % 2, j % 2 + 2);
    }
  }
}
__device__ __forceinline__ int dim_of(int step, int row) { return step * 16 + (kStepsPerLoad == 1 ? row : row % 8 * 2 + row / 8); }

// Q^T[16 dims x 8 rows] of every step; `q` is the row that this lane's column is (lane / 4), 4-byte aligned.
__device__ __forceinline__ void load_queries(u32 (&b)[kKSteps][2], const Q_TYPE* q) {
  const int lane = lane_id() % 4;
#pragma unroll
  for (int step = 0; step < kKSteps; ++step)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      b[step][i] = *reinterpret_cast<const u32*>(q + step * 16 + (kStepsPerLoad == 1 ? 2 * lane + 8 * i : 4 * lane + 2 * i));
}

}  // namespace pagedkv

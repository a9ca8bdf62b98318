// Tiles of K and V in shared memory, and the operands of mma.m16n8k16 that are made of them.
//
// Decode swaps the operands: keys stand where mma has 16 rows, the few rows of Q where it has 8 columns,
//   S^T[16 keys x 8 rows] = K[16 x D] Q^T,    O^T[16 dims x 8 rows] += V^T[16 x 16 keys] P^T,
// so that a group of up to eight query heads wastes nothing. K is read by ldmatrix, V by ldmatrix.trans, 16 bytes per lane.
//
// One-byte types (fp8, int8) go through the same ldmatrix as pairs and are converted in registers, to f16, which holds all their
// values exactly and is one instruction away; Q and the shares are then f16 too. A lane has other elements than mma asks for; as a sum over dims may go in any order and rows of O^T may have any order, K's dims are permuted alike in Q
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

template <bool kFirst, class A, class B> struct Either {
  using Type = A;
};
template <class A, class B> struct Either<false, A, B> {
  using Type = B;
};
using MmaType = typename Either<kQuantised<KV_TYPE>, f16, Q_TYPE>::Type;  // of both operands of the products
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

// Bytes `first` and `second` of a word, converted, as one operand register: neighbours, or two bytes apart.
__device__ __forceinline__ u32 convert_pair(u32 word, int first, int second) {
  __half2 pair;
  if constexpr (kSame<KV_TYPE, i8>) {  // u = byte + 128 in the low bits of an f16 of known exponent, less what that adds
    const u32 biased = __byte_perm(word ^ 0x80808080u, 0x64646464u, first | 0x40 | second << 8 | 0x4000);
    pair = __hsub2(*reinterpret_cast<const __half2*>(&biased), __half2half2(__ushort_as_half(0x6480)));
  } else if constexpr (kSame<KV_TYPE, e5m2>) {  // the upper half of an f16
    const u32 bits = __byte_perm(word, 0, 0x0404 | first << 4 | second << 12);
    pair = *reinterpret_cast<const __half2*>(&bits);
  } else {
    const u32 sorted = second - first == 2 ? __byte_perm(word, 0, 0x3120) : word;  // the pairs of a word in its halves
    const u32 bits = first == 0 ? sorted : sorted >> 16;
    pair = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits), __NV_E4M3));
  }
  return *reinterpret_cast<const u32*>(&pair);
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
      for (int j = 0; j < 4; ++j) a[i][j] = convert_pair(words[2 * i + j % 2], j / 2 * 2, j / 2 * 2 + 1);
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
      for (int j = 0; j < 4; ++j) a[i][j] = convert_pair(words[i + j / 2 * 2], j % 2, j % 2 + 2);
    }
  }
}
__device__ __forceinline__ int dim_of(int step, int row) { return step * 16 + (kStepsPerLoad == 1 ? row : row % 8 * 2 + row / 8); }

// The power of two at or below a positive number, and one over it: exact factors. Away from the ends of float's range.
__device__ __forceinline__ float power_below(float x) {
  return __uint_as_float(min(max(__float_as_uint(x) & 0x7f800000u, 0x00800000u), 0x7e800000u));
}
__device__ __forceinline__ float one_over_power(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }

// Row of the tile that is this lane's `column` (0, 1) of row group `group`, in sums of mma.
__device__ __forceinline__ int own_row(int group, int column) { return group * 8 + lane_id() % 4 * 2 + column; }

// A row of queries, kLanes neighbouring lanes with kWords pairs each, becomes MmaType. Returns the row's divisor, a power of two:
// bf16 becomes f16 beside quantised K, and reaches farther. Whole warps.
template <int kLanes, int kWords> __device__ __forceinline__ float fit_queries(u32 (&words)[kWords]) {
  if constexpr (kSame<MmaType, Q_TYPE>) {
    return 1.f;
  } else {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(words[i] << 16)), fabsf(__uint_as_float(words[i] & 0xffff0000u))));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
    const float power = power_below(largest * 0x1p-12f), factor = one_over_power(power);  // the largest lies below 2^13
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = pack2<f16>(__uint_as_float(words[i] << 16) * factor, __uint_as_float(words[i] & 0xffff0000u) * factor);
    return power;
  }
}

// Q^T[16 dims x 8 rows] of every step; `q` is the row that this lane's column is (lane / 4), 4-byte aligned. Returns the row's
// divisor. All lanes together.
__device__ __forceinline__ float load_queries(u32 (&b)[2 * kKSteps], const Q_TYPE* q) {
  const int lane = lane_id() % 4;
#pragma unroll
  for (int step = 0; step < kKSteps; ++step)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      b[2 * step + i] = *reinterpret_cast<const u32*>(q + step * 16 + (kStepsPerLoad == 1 ? 2 * lane + 8 * i : 4 * lane + 2 * i));
  return fit_queries<4>(b);
}

}  // namespace pagedkv

// A CTA's ring of tiles of K and V in shared memory, filled by cp.async: STAGES times TILE_TOKENS keys of one sequence and KV head.
//
// Every warp copies kWarpKeys keys of each tile. Copies of one tile are one group per thread. For the tiles i that hold a key of the
// segment, in order: acquire(i) waits for its copies and for all warps to be done with tile i - 1, and starts tile i + STAGES - 1 in
// that tile's place; then all warps may read k(i) and v(i) until they call acquire(i + 1).
//
// Keys outside the segment are stored as zeros: unowned blocks may hold NaN, and 0 * NaN would not be 0. Their places are never
// looked up, as the table has -1 where a window has left a block behind.
//
// Block ids travel through the ring as well: the copies of tile i bring those that the copies of tile i + STAGES - 1 will need, so
// that no warp waits for the table. A warp copies and reads the ids of its own keys alone.
//
// The ring holds the bits as they are. Where they are neither operands nor become them in registers (kv_tile.cuh), acquire() converts
// the tile into one more buffer behind the ring, with scales of token_head multiplied in; those of tensor and head are for the caller
// to fold.
#pragma once
#include "pagedkv/convert.cuh"
#include "pagedkv/kv.cuh"
#include "pagedkv/kv_tile.cuh"

namespace pagedkv {

constexpr bool kConverted = !kSame<Q_TYPE, KV_TYPE> && !kInRegisters;
constexpr int kVecElements = 16 / sizeof(KV_TYPE);  // of one copy
constexpr int kScaleTokens = SCALE_MODE == kScaleTokenHead ? TILE_TOKENS : 0;

using KTile = KvTile<TILE_TOKENS, HEAD_DIM>;
using VTile = KvTile<TILE_TOKENS, HEAD_DIM_V>;

template <int kWarps> class CtaRing {
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpKeys = TILE_TOKENS / kWarps;
  static_assert(STAGES >= 2 && TILE_TOKENS % kWarps == 0 && kWarpKeys <= kWarpSize, "");
  // A warp's keys begin at a multiple of their number: in one block, one after the other, if that holds a multiple of it.
  static constexpr bool kOneBlock = !PAGED || (BLOCK_SIZE > 0 && BLOCK_SIZE % kWarpKeys == 0);
  static constexpr int kWarpIds = !PAGED ? 0 : kOneBlock ? 1 : kWarpKeys, kIds = kWarps * kWarpIds;

 public:
  static constexpr int kRawK = TILE_TOKENS * HEAD_DIM * sizeof(KV_TYPE), kRawV = TILE_TOKENS * HEAD_DIM_V * sizeof(KV_TYPE);
  static constexpr int kStageBytes = kRawK + kRawV + 2 * kScaleTokens * sizeof(float);
  static constexpr int kConvertedBytes = kConverted ? KTile::kBytes + VTile::kBytes : 0;
  static constexpr int kBytes = STAGES * kStageBytes + kConvertedBytes + STAGES * kIds * sizeof(int);

  __device__ __forceinline__ CtaRing(u8* shared_, const AttentionParams& params, const Segment& segment)
      : shared(shared_), p(params.kv), s(segment) {}

  // The segment's tiles: tile i holds the keys from i * TILE_TOKENS.
  __device__ __forceinline__ int first_tile() const { return s.begin / TILE_TOKENS; }
  __device__ __forceinline__ bool holds(int i) const { return i * TILE_TOKENS < s.end; }

  // Starts the first tiles. What the thread has copied before without a commit is waited for with them.
  __device__ __forceinline__ void start() {
    if (PAGED) {
#pragma unroll
      for (int i = 0; i < STAGES - 1; ++i) copy_ids(first_tile() + i, lane_id(), warp_id());
      cp_async_commit();
      cp_async_wait<0>();
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (holds(first_tile() + i)) copy(first_tile() + i);
      cp_async_commit();
    }
  }

  __device__ __forceinline__ void acquire(int i) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    if (holds(i + STAGES - 1)) copy(i + STAGES - 1);
    cp_async_commit();
    if (kConverted) {
      convert(i);
      __syncthreads();
    }
  }

  __device__ __forceinline__ KTile k(int i) const { return {{kConverted ? shared + STAGES * kStageBytes : raw(i)}}; }
  __device__ __forceinline__ VTile v(int i) const {
    return {{kConverted ? shared + STAGES * kStageBytes + KTile::kBytes : raw(i) + kRawK}};
  }

 private:
  u8* shared;
  const KvParams& p;
  const Segment& s;

  __device__ __forceinline__ u8* raw(int i) const { return shared + i % STAGES * kStageBytes; }
  __device__ __forceinline__ float* scales(int i) const { return reinterpret_cast<float*>(raw(i) + kRawK + kRawV); }
  __device__ __forceinline__ static int warp_key(int i, int warp) { return i * TILE_TOKENS + warp * kWarpKeys; }

  __device__ __forceinline__ int* ids(int i, int warp) const {
    return reinterpret_cast<int*>(shared + STAGES * kStageBytes + kConvertedBytes) + i % STAGES * kIds + warp * kWarpIds;
  }

  // Copies the ids of the blocks of the warp's keys of tile i. Of keys outside the segment: of its first or last key.
  __device__ __forceinline__ void copy_ids(int i, int lane, int warp) const {
    if (lane >= kWarpIds || !holds(i)) return;
    cp_async4(ids(i, warp) + lane, SequenceKv(p, s.seq).entry(min(max(warp_key(i, warp) + lane, s.begin), s.end - 1)), true);
  }

  // What one thread's copies of one tile have in common: read once, as every copy makes the compiler forget what it has read.
  struct Copy {
    u32 lane, warp;
    int first_key;  // of the warp in the tile
    const int* ids;
    KeyRange keys;     // of the segment
    const SequenceKv& kv;

    // Place of key number `key` of the warp's keys.
    __device__ __forceinline__ TokenPlace place(int key) const {
      return PAGED ? kv.place(ids[kOneBlock ? 0 : key], first_key + key) : kv.place(first_key + key);
    }
    __device__ __forceinline__ bool inside(int key) const {
      return static_cast<u32>(first_key + key - keys.begin) < static_cast<u32>(keys.end - keys.begin);
    }
  };

  __device__ __forceinline__ void copy(int i) {
    const u32 thread = fresh_thread_id(), lane = thread % kWarpSize, warp = thread / kWarpSize;
    __syncwarp();  // ids of tile i are there; those of tile i - 1 are read
    copy_ids(i + STAGES - 1, lane, warp);
    const SequenceKv kv(p, s.seq);
    const Copy c{lane, warp, warp_key(i, warp), ids(i, warp), {s.begin, s.end}, kv};
    const int kv_head = s.kv_head;
    copy_rows<KTile, HEAD_DIM>(c, raw(i), kv.k<KV_TYPE>({0, 0}, kv_head), p.k_block_stride, p.k_token_stride);
    copy_rows<VTile, HEAD_DIM_V>(c, raw(i) + kRawK, kv.v<KV_TYPE>({0, 0}, kv_head), p.v_block_stride, p.v_token_stride);
    if (kScaleTokens && lane < kWarpKeys) {
      const TokenPlace at = c.place(lane);
      const i64 from = at.block * p.scale_block_stride + at.offset * p.scale_token_stride + kv_head * p.scale_head_stride;
      float* to = scales(i) + warp * kWarpKeys + lane;
      cp_async4(to, p.k_scale + from, c.inside(lane));
      cp_async4(to + TILE_TOKENS, p.v_scale + from, c.inside(lane));
    }
  }

  // The warp's rows of K or of V; `base` is where block 0 has the KV head's first token. The lanes take as many 16-byte pieces of a
  // row at once as the largest power of two that divides their number, so that pieces differ in constants only.
  template <class Tile, int kDim>
  __device__ __forceinline__ void copy_rows(const Copy& c, u8* to, const KV_TYPE* base, i64 block_stride, i64 token_stride) {
    constexpr int kVecs = kDim / kVecElements, kLanes = min_of(kVecs & -kVecs, kWarpSize), kRows = kWarpSize / kLanes;
    static_assert(kDim % kVecElements == 0, "");
    const KV_TYPE* from = nullptr;
#pragma unroll
    for (int j = 0; j < ceil_div(kWarpKeys, kRows); ++j) {
      const int key = j * kRows + c.lane / kLanes, row = c.warp * kWarpKeys + key;
      if (j == 0 || !kOneBlock) {
        const TokenPlace at = c.place(key % kWarpKeys);
        from = base + at.block * block_stride + at.offset * token_stride + c.lane % kLanes * kVecElements;
      } else {
        from += kRows * token_stride;
      }
#pragma unroll
      for (int n = 0; n < kVecs; n += kLanes) {
        const int vec = n + c.lane % kLanes;
        u8* at = kConverted ? to + (row * kVecs + vec) * 16 : Tile{{to}}.chunk(row, vec);
        if (kWarpKeys % kRows == 0 || key < kWarpKeys) cp_async16<kRowL2Bytes>(at, from + n * kVecElements, c.inside(key));
      }
    }
  }

  __device__ __forceinline__ void convert(int i) {
    convert_rows<HEAD_DIM>(raw(i), k(i), scales(i));
    convert_rows<HEAD_DIM_V>(raw(i) + kRawK, v(i), scales(i) + TILE_TOKENS);
  }
  template <int kDim, class Tile>
  __device__ __forceinline__ void convert_rows(const u8* from, const Tile& to, const float* row_scales) {
    constexpr int kVecs = kDim / kVecElements, kAll = TILE_TOKENS * kVecs;
    const int thread = fresh_thread_id();  // registers are scarce where this runs
#pragma unroll 1
    for (int j = 0; j < ceil_div(kAll, kThreads); ++j) {
      const int index = j * kThreads + thread, row = index / kVecs, vec = index % kVecs;
      if (kAll % kThreads && index >= kAll) break;
      const auto stored = *reinterpret_cast<const Vec<u32, 4>*>(from + index * 16);
      const float scale = kScaleTokens ? row_scales[row] : 1.f;
      constexpr int kPairs = kVecElements / 2;  // of elements, each one word when converted
      Vec<u32, 4> words[kPairs / 4];
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair)
        words[pair / 4].at[pair % 4] = convert_pair<Q_TYPE, KV_TYPE, kScaleTokens != 0>(stored.at, pair, scale);
#pragma unroll
      for (int n = 0; n < kPairs / 4; ++n) *reinterpret_cast<Vec<u32, 4>*>(to.chunk(row, vec * (kPairs / 4) + n)) = words[n];
    }
  }
};

}  // namespace pagedkv

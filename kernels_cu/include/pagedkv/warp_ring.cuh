// One warp's ring of tiles in shared memory, filled by cp.async: STAGES times 16 keys of K and of V. The warp's lanes copy, wait and
// read for themselves alone, so that warps of a CTA never wait for each other.
//
// Tile i is the warp's 16 keys of the segment's tile i. Copies of tile i are two groups, K and V. start() begins the first STAGES - 1
// tiles; then for i = 0, 1, ...: wait_k(i), which also makes the buffer of tile i - 1 free, issue(i + STAGES - 1) into it, read K,
// wait_v(i), read V. Keys outside the segment are stored as zeros: unowned blocks may hold NaN, and 0 * NaN would not be 0.
//
// Block ids are read from the table ahead of the copies that need them, one lane each, and passed around by shuffles.
#pragma once
#include "pagedkv/kv.cuh"
#include "pagedkv/schedule.cuh"
#include "pagedkv/tile.cuh"

namespace pagedkv {

constexpr int kWarps = TILE_TOKENS / kGroupKeys;
using KLayout = TileLayout<kKChunks, kGroupKeys>;
using VLayout = TileLayout<kVChunks, kGroupKeys>;
constexpr int kScaleBytes = SCALE_MODE == kScaleTokenHead ? 2 * kGroupKeys * 4 : 0;
constexpr int kStageBytes = KLayout::kBytes + VLayout::kBytes + kScaleBytes;
constexpr int kRingBytes = kWarps * STAGES * kStageBytes;

// 16 keys that begin at a multiple of 16 lie in one block, one after the other.
constexpr bool kOneBlock = !PAGED || (BLOCK_SIZE > 0 && BLOCK_SIZE % kGroupKeys == 0);
constexpr int kTilesPerRead = kOneBlock ? kWarpSize : kWarpSize / kGroupKeys;  // tiles whose block ids one read of all lanes brings

class WarpRing {
 public:
  int num_tiles;

  __device__ __forceinline__ WarpRing(const SequenceKv& sequence, const Segment& segment, u8* shared, int warp)
      : kv(sequence), s(segment), buffers(shared + warp * STAGES * kStageBytes) {
    const int first_tile = s.begin / TILE_TOKENS;
    num_tiles = s.begin < s.end ? ceil_div(s.end, TILE_TOKENS) - first_tile : 0;
    base_key = first_tile * TILE_TOKENS + warp * kGroupKeys;
    if (EVICT_FIRST) policy = evict_first_policy();
  }

  __device__ __forceinline__ int first_key(int i) const { return base_key + i * TILE_TOKENS; }
  // Whether tile i has a key of the segment at all; if not, nothing has been copied.
  __device__ __forceinline__ bool has_keys(int i) const { return first_key(i) < s.end && first_key(i) + kGroupKeys > s.begin; }

  __device__ __forceinline__ const u8* k(int i) const { return buffers + i % STAGES * kStageBytes; }
  __device__ __forceinline__ const u8* v(int i) const { return k(i) + KLayout::kBytes; }
  // [2][16]: scales of K, of V.
  __device__ __forceinline__ const float* scales(int i) const { return reinterpret_cast<const float*>(v(i) + VLayout::kBytes); }

  __device__ __forceinline__ void start() {
    if (num_tiles > 0) {
      ids = read_ids(0);
      next_ids = read_ids(kTilesPerRead);
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) issue(i);
  }

  // Begins the copies of tile i; called for i = 0, 1, 2, ... in order. Past the last tile the groups are empty.
  __device__ __forceinline__ void issue(int i) {
    if (i < num_tiles) {
      if (i % kTilesPerRead == 0 && i > 0) {
        ids = next_ids;
        next_ids = read_ids(i + kTilesPerRead);
      }
      if (has_keys(i)) {
        u8* k_tile = buffers + i % STAGES * kStageBytes;
        copy<KLayout, kKChunks>(k_tile, kv.k<KV_TYPE>({0, 0}, s.kv_head), kv.p.k_block_stride, kv.p.k_token_stride, i);
        if (kScaleBytes) copy_scales(k_tile + KLayout::kBytes + VLayout::kBytes, i);
        cp_async_commit();
        copy<VLayout, kVChunks>(k_tile + KLayout::kBytes, kv.v<KV_TYPE>({0, 0}, s.kv_head), kv.p.v_block_stride, kv.p.v_token_stride, i);
        cp_async_commit();
        return;
      }
    }
    cp_async_commit();
    cp_async_commit();
  }

  // Waits for K of the tile that comes next, its scales included, by all lanes; all lanes have read the tile before.
  __device__ __forceinline__ void wait_k() const {
    cp_async_wait<2 * STAGES - 3>();
    __syncwarp();
  }
  // Waits for its V; issue() has been called since.
  __device__ __forceinline__ void wait_v() const {
    cp_async_wait<2 * STAGES - 2>();
    __syncwarp();
  }

 private:
  const SequenceKv& kv;
  const Segment& s;
  u8* buffers;
  int base_key;
  int ids, next_ids;  // block of a lane's tile (kOneBlock) or key, of this read and of the next
  u64 policy;

  // Block ids for tiles i.., of keys of the segment only: other entries of the table may be -1.
  __device__ __forceinline__ int read_ids(int i) const {
    if (!PAGED) return 0;
    const int key = kOneBlock ? first_key(i + lane_id()) : first_key(i + lane_id() / kGroupKeys) + lane_id() % kGroupKeys;
    return static_cast<int>(kv.place(min(max(key, s.begin), s.end - 1)).block);
  }
  __device__ __forceinline__ int block_of(int i, int row) const {
    if (!PAGED) return 0;
    return __shfl_sync(kFullMask, ids, kOneBlock ? i % kTilesPerRead : i % kTilesPerRead * kGroupKeys + row);
  }
  // Token within the block; contiguous: within the whole array.
  __device__ __forceinline__ i64 offset_of(int key) const {
    if (!PAGED) return kv.first + key;
    return static_cast<u32>(key) % static_cast<u32>(BLOCK_SIZE ? BLOCK_SIZE : kv.p.block_size);
  }
  __device__ __forceinline__ bool inside(int key) const {
    return static_cast<u32>(key - s.begin) < static_cast<u32>(s.end - s.begin);
  }

  template <class Layout, int kChunks>
  __device__ __forceinline__ void copy(u8* to, const KV_TYPE* from, i64 block_stride, i64 token_stride, int i) const {
    const int key = first_key(i);
    if (kOneBlock) from += block_of(i, 0) * block_stride + offset_of(key) * token_stride;
    if constexpr (kOneBlock && kWarpSize % kChunks == 0) {
      if (s.begin <= key && key + kGroupKeys <= s.end) return copy_whole<Layout, kChunks>(to, from, token_stride);
    }
    constexpr int kCopies = ceil_div(kGroupKeys * kChunks, kWarpSize);
#pragma unroll 2  // more addresses at once would not fit into the registers
    for (int j = 0; j < kCopies; ++j) {
      const int n = j * kWarpSize + lane_id(), row = n / kChunks % kGroupKeys, chunk = n % kChunks;
      i64 at = row * token_stride;
      if (!kOneBlock) at = block_of(i, row) * block_stride + offset_of(key + row) * token_stride;
      if (kChunks % 2 == 0 || n < kGroupKeys * kChunks)
        copy_chunk(to + Layout::at(row, chunk), from + at + chunk * kChunkDims, inside(key + row));
    }
  }
  // 16 keys of one block, all of the segment: nothing but addresses that are a step apart.
  template <class Layout, int kChunks> __device__ __forceinline__ void copy_whole(u8* to, const KV_TYPE* from, i64 token_stride) const {
    constexpr int kRowsPerCopy = kWarpSize / kChunks;
    const int row = lane_id() / kChunks, chunk = lane_id() % kChunks;
    const int first = Layout::at(row, chunk);
    const KV_TYPE* source = from + row * token_stride + chunk * kChunkDims;
#pragma unroll
    for (int j = 0; j < kGroupKeys / kRowsPerCopy; ++j, source += kRowsPerCopy * token_stride)
      copy_chunk(to + Layout::moved(first, j * kRowsPerCopy), source, true);
  }
  __device__ __forceinline__ void copy_chunk(u8* to, const KV_TYPE* from, bool valid) const {
    if (EVICT_FIRST) cp_async16<kRowL2Bytes>(to, from, valid, policy);
    else cp_async16<kRowL2Bytes>(to, from, valid);
  }

  __device__ __forceinline__ void copy_scales(u8* to, int i) const {
    const int row = lane_id() % kGroupKeys, key = first_key(i) + row;
    const float* from = (lane_id() < kGroupKeys ? kv.p.k_scale : kv.p.v_scale) + block_of(i, row) * kv.p.scale_block_stride +
                        offset_of(key) * kv.p.scale_token_stride + s.kv_head * kv.p.scale_head_stride;
    cp_async4(to + 4 * lane_id(), from, inside(key));
  }
};

}  // namespace pagedkv

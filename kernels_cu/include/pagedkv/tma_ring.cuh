// A CTA's ring of tiles in shared memory, filled by the tensor memory accelerator: STAGES buffers of TILE_TOKENS keys, K of so many
// tiles as are computed at once, then V of the same. One warp produces, kWarps warps consume; they meet at two barriers per buffer:
//
//   full   the producer has said how many bytes come, and they have come
//   empty  every consuming warp has read the buffer
//
// Both count the buffers they pass, over all segments of the CTA, and so agree on buffer and phase without speaking: the producer is
// ahead by up to STAGES buffers, into the next segment too.
//
// A tile arrives in pieces of BOX_TOKENS tokens x 128 bytes, one lane each. Pieces without a key of the segment are asked for beyond
// the last block, where the map says zeros: their table entries may be -1, unowned blocks may hold NaN. Keys that share a piece with
// the segment's arrive as they are: the code that multiplies V must leave them out (add_values with zero_outside).
#pragma once
#include "pagedkv/kv.cuh"
#include "pagedkv/schedule.cuh"
#include "pagedkv/tile.cuh"
#include "pagedkv/tma_params.cuh"

namespace pagedkv {

constexpr int kWarps = TILE_TOKENS / kGroupKeys;
constexpr int kPanelDims = 128 / sizeof(KV_TYPE);  // elements of 128 bytes
constexpr int kKPanels = HEAD_DIM / kPanelDims, kVPanels = HEAD_DIM_V / kPanelDims;
constexpr int kPieces = TILE_TOKENS / BOX_TOKENS;  // of a panel of a tile
using KLayout = TileLayout<kKChunks, TILE_TOKENS>;
using VLayout = TileLayout<kVChunks, TILE_TOKENS>;
constexpr int kBufferBytes = max_of(KLayout::kBytes, VLayout::kBytes);
static_assert(HEAD_DIM % kPanelDims == 0 && HEAD_DIM_V % kPanelDims == 0, "");
static_assert(PAGED && BLOCK_SIZE % BOX_TOKENS == 0 && TILE_TOKENS % BOX_TOKENS == 0 && BOX_TOKENS % 8 == 0, "");
static_assert(kPieces * max_of(kKPanels, kVPanels) <= kWarpSize, "one piece per lane");

// Where a side stands in the ring.
struct RingPlace {
  u32 buffer = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++buffer == STAGES) buffer = 0, parity ^= 1;
  }
};

struct TmaRing {
  u8* buffers;       // [STAGES][kBufferBytes], 1024-byte aligned
  u64* full;         // [STAGES]
  u64* empty;        // [STAGES]
  RingPlace next;    // to fill, or to acquire
  RingPlace held;    // the first that is acquired and not released

  // All threads of the CTA, once.
  __device__ __forceinline__ explicit TmaRing(u8* shared) : buffers(shared) {
    full = reinterpret_cast<u64*>(shared + STAGES * kBufferBytes);
    empty = full + STAGES;
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(full + i, 1);
        mbarrier_init(empty + i, kWarps);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
  }
  static constexpr int kBytes = STAGES * (kBufferBytes + 16);

  // ---- the producing warp

  template <int kTilesAtOnce = 1>
  __device__ __forceinline__ void produce(const TmaAttentionParams& p, const Segment& s, u64 policy) {
    if (s.begin >= s.end) return;
    const SequenceKv kv(p.attention.kv, s.seq);
    const int first = s.begin / TILE_TOKENS * TILE_TOKENS, piece = lane_id() % kPieces, panel = lane_id() / kPieces;
    const int offset = piece * BOX_TOKENS;
    int blocks[kTilesAtOnce];
#pragma unroll
    for (int i = 0; i < kTilesAtOnce; ++i) blocks[i] = block_of(kv, s, first + i * TILE_TOKENS + offset);
    for (int tile = first; tile < s.end; tile += kTilesAtOnce * TILE_TOKENS) {
      int next_blocks[kTilesAtOnce];  // on their way while these tiles wait for buffers
#pragma unroll
      for (int i = 0; i < kTilesAtOnce; ++i) next_blocks[i] = block_of(kv, s, tile + (kTilesAtOnce + i) * TILE_TOKENS + offset);
#pragma unroll
      for (int i = 0; i < kTilesAtOnce; ++i)
        if (i == 0 || tile + i * TILE_TOKENS < s.end)
          fill<KLayout, kKPanels>(&p.k_map, s, tile + i * TILE_TOKENS + offset, blocks[i], piece, panel, policy);
#pragma unroll
      for (int i = 0; i < kTilesAtOnce; ++i)
        if (i == 0 || tile + i * TILE_TOKENS < s.end)
          fill<VLayout, kVPanels>(&p.v_map, s, tile + i * TILE_TOKENS + offset, blocks[i], piece, panel, policy);
#pragma unroll
      for (int i = 0; i < kTilesAtOnce; ++i) blocks[i] = next_blocks[i];
    }
  }

  // ---- a consuming warp

  // Waits for the next buffer.
  __device__ __forceinline__ const u8* acquire() {
    mbarrier_wait(full + next.buffer, next.parity);
    const u8* buffer = buffers + next.buffer * kBufferBytes;
    next.advance();
    return buffer;
  }
  // The warp has read the first `count` of the buffers that it holds, of kMost.
  template <int kMost> __device__ __forceinline__ void release(int count) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= count) break;
      if (lane_id() == 0) mbarrier_arrive(empty + held.buffer);
      held.advance();
    }
  }

 private:
  // Block of the piece that begins at a token; beyond the last one where the piece has no key of the segment.
  __device__ __forceinline__ int block_of(const SequenceKv& kv, const Segment& s, int token) const {
    const bool needed = token < s.end && token + BOX_TOKENS > s.begin;
    return needed ? static_cast<int>(kv.place(max(token, s.begin)).block) : kv.p.num_blocks;
  }

  template <class Layout, int kPanels>
  __device__ __forceinline__ void fill(const TMap* map, const Segment& s, int token, int block, int piece, int panel, u64 policy) {
    u64* barrier = full + next.buffer;
    mbarrier_wait(empty + next.buffer, next.parity ^ 1);
    if (lane_id() == 0) mbarrier_arrive_expect(barrier, Layout::kBytes);
    __syncwarp();
    if (panel < kPanels) {
      u8* to = buffers + next.buffer * kBufferBytes + (panel * TILE_TOKENS + piece * BOX_TOKENS) * 128;
      tma_load_4d(to, map, barrier, panel * kPanelDims, s.kv_head, token % BLOCK_SIZE, block, policy);
    }
    next.advance();
  }
};

}  // namespace pagedkv

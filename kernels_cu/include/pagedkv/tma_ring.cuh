// A CTA's ring of tiles in shared memory, filled by the tensor memory accelerator: STAGES buffers of TILE_TOKENS keys, K and V of a
// tile one after the other. One warp produces, kWarps warps consume; they meet at two barriers per buffer:
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

struct TmaRing {
  u8* buffers;       // [STAGES][kBufferBytes], 1024-byte aligned
  u64* full;         // [STAGES]
  u64* empty;        // [STAGES]
  u32 passed = 0;    // buffers so far

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

  __device__ __forceinline__ void produce(const TmaAttentionParams& p, const Segment& s, u64 policy) {
    if (s.begin >= s.end) return;
    const SequenceKv kv(p.attention.kv, s.seq);
    const int first = s.begin / TILE_TOKENS * TILE_TOKENS, piece = lane_id() % kPieces, panel = lane_id() / kPieces;
    int token = first + piece * BOX_TOKENS, block = block_of(kv, s, token);
    for (int tile = first; tile < s.end; tile += TILE_TOKENS, token += TILE_TOKENS) {
      const int next_block = block_of(kv, s, token + TILE_TOKENS);  // on its way while this tile waits for a buffer
      fill<KLayout, kKPanels>(&p.k_map, s, token, block, piece, panel, policy);
      fill<VLayout, kVPanels>(&p.v_map, s, token, block, piece, panel, policy);
      block = next_block;
    }
  }

  // ---- a consuming warp

  // Waits for the next buffer.
  __device__ __forceinline__ const u8* acquire() {
    mbarrier_wait(full + passed % STAGES, passed / STAGES % 2);
    return buffers + passed % STAGES * kBufferBytes;
  }
  // The warp has read it.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(empty + passed % STAGES);
    ++passed;
  }

 private:
  // Block of the piece that begins at a token; beyond the last one where the piece has no key of the segment.
  __device__ __forceinline__ int block_of(const SequenceKv& kv, const Segment& s, int token) const {
    const bool needed = token < s.end && token + BOX_TOKENS > s.begin;
    return needed ? static_cast<int>(kv.place(max(token, s.begin)).block) : kv.p.num_blocks;
  }

  template <class Layout, int kPanels>
  __device__ __forceinline__ void fill(const TMap* map, const Segment& s, int token, int block, int piece, int panel, u64 policy) {
    u64* barrier = full + passed % STAGES;
    mbarrier_wait(empty + passed % STAGES, passed / STAGES % 2 ^ 1);
    if (lane_id() == 0) mbarrier_arrive_expect(barrier, Layout::kBytes);
    __syncwarp();
    if (panel < kPanels) {
      u8* to = buffers + passed % STAGES * kBufferBytes + (panel * TILE_TOKENS + piece * BOX_TOKENS) * 128;
      tma_load_4d(to, map, barrier, panel * kPanelDims, s.kv_head, token % BLOCK_SIZE, block, policy);
    }
    ++passed;
  }
};

}  // namespace pagedkv

// Paged decode on tensor cores with the tensor memory accelerator (sm_90+): the mathematics of decode_mma, with tiles that one warp
// asks for and the hardware copies. Warps 0..kWarps-1 compute, each 16 keys of every tile (warp_rows.cuh); the last warp walks the
// same segments ahead of them and keeps the ring full (tma_ring.cuh). While the computing warps end a segment, whose states merge in
// shared memory of their own, the next segment's tiles are on their way.
#include "pagedkv/tma_ring.cuh"
#include "pagedkv/warp_merge.cuh"
#include "pagedkv/warp_rows.cuh"

using namespace pagedkv;

using Parts = WarpParts<kWarps>;

static_assert(COMPUTE_THREADS == kWarps * kWarpSize, "");
static_assert(SHARED_BYTES >= TmaRing::kBytes + sizeof(Parts), "");

__device__ __forceinline__ void attend(const AttentionParams& p, const Segment& s, TmaRing& ring, Parts& parts, int warp) {
  const SequenceKv kv(p.kv, s.seq);
  constexpr bool kFolded = SCALE_MODE == kScaleTensor || SCALE_MODE == kScaleHead;  // one scale for all keys
  WarpRows rows(p, s, kFolded ? kv.k_scale({0, 0}, s.kv_head) : 1.f);
  const int first_row = warp * kGroupKeys;
  if (s.begin < s.end) {
    for (int key = s.begin / TILE_TOKENS * TILE_TOKENS + first_row; key - first_row < s.end; key += TILE_TOKENS) {
      const bool has_keys = key < s.end && key + kGroupKeys > s.begin, all = s.begin <= key && key + kGroupKeys <= s.end;
      const u8* k = ring.acquire();
      if (has_keys) rows.add_scores<KLayout>(k, first_row, key, nullptr);
      ring.release();
      const u8* v = ring.acquire();
      if (all) rows.add_values<VLayout>(v, first_row, key);
      else if (has_keys) rows.add_values<VLayout, true>(v, first_row, key);
      ring.release();
    }
  }
  rows.store(parts.o[warp][0], parts.ml[warp][0]);
  merge_warps<kWarps>(p, s, parts, kFolded ? kv.v_scale({0, 0}, s.kv_head) : 1.f);
}

extern "C" __global__ __launch_bounds__((kWarps + 1) * kWarpSize, MIN_CTAS) void decode_tma(
    const __grid_constant__ TmaAttentionParams p) {
  TmaRing ring(dynamic_shared);
  Parts& parts = *reinterpret_cast<Parts*>(dynamic_shared + TmaRing::kBytes);
  const int warp = uniform_warp_id();
  Schedule schedule(p.attention);
  Segment segment;
  if (warp == kWarps) {
    const u64 policy = evict_first_policy();
    while (schedule.next(segment)) ring.produce(p, segment, policy);
  } else {
    while (schedule.next(segment)) attend(p.attention, segment, ring, parts, warp);
  }
}

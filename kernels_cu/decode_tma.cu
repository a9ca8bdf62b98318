// Paged decode on tensor cores with the tensor memory accelerator (sm_90+): the mathematics of decode_mma, with tiles that one warp
// asks for and the hardware copies. Warps 0..kWarps-1 compute, each 16 keys of every tile (warp_rows.cuh) and, with few rows, of two
// tiles in one step of the softmax, whose chains of dependent instructions then run beside each other; the last warp walks the same
// segments ahead of them and keeps the ring full (tma_ring.cuh). While the computing warps end a segment, whose states merge in
// shared memory of their own, the next segment's tiles are on their way.
#include "pagedkv/tma_ring.cuh"
#include "pagedkv/warp_merge.cuh"
#include "pagedkv/warp_rows.cuh"

using namespace pagedkv;

constexpr int kTilesAtOnce = ROW_TILE == 8 && STAGES >= 4 ? 2 : 1;  // more rows would not fit into the registers
using Parts = WarpParts<kWarps>;

static_assert(COMPUTE_THREADS == kWarps * kWarpSize, "");
static_assert(SHARED_BYTES >= TmaRing::kBytes + sizeof(Parts), "");

__device__ __forceinline__ void attend(const AttentionParams& p, const Segment& s, TmaRing& ring, Parts& parts, int warp) {
  const SequenceKv kv(p.kv, s.seq);
  constexpr bool kFolded = SCALE_MODE == kScaleTensor || SCALE_MODE == kScaleHead;  // one scale for all keys
  WarpRows<kTilesAtOnce> rows(p, s, kFolded ? kv.k_scale({0, 0}, s.kv_head) : 1.f);
  const int first_row = warp * kGroupKeys;
  if (s.begin < s.end) {
    KeyGroup keys[kTilesAtOnce];
    for (int tile = s.begin / TILE_TOKENS * TILE_TOKENS; tile < s.end; tile += kTilesAtOnce * TILE_TOKENS) {
      const int first_key = tile + first_row, count = min(kTilesAtOnce, ceil_div(s.end - tile, TILE_TOKENS));
      const bool all = s.begin <= first_key && first_key + (kTilesAtOnce - 1) * TILE_TOKENS + kGroupKeys <= s.end;
      const auto acquire = [&] {
#pragma unroll
        for (int i = 0; i < kTilesAtOnce; ++i) {
          const int key = first_key + i * TILE_TOKENS;
          keys[i] = {i < count ? ring.acquire() : nullptr, first_row, key, key < s.end && key + kGroupKeys > s.begin};
        }
      };
      acquire();
      if (all) rows.add_scores<KLayout, false>(keys, nullptr);
      else rows.add_scores<KLayout, true>(keys, nullptr);
      ring.release<kTilesAtOnce>(count);
      acquire();
      if (all) rows.add_values<VLayout, false>(keys);
      else rows.add_values<VLayout, true>(keys);
      ring.release<kTilesAtOnce>(count);
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
    while (schedule.next(segment)) ring.produce<kTilesAtOnce>(p, segment, policy);
  } else {
    while (schedule.next(segment)) attend(p.attention, segment, ring, parts, warp);
  }
}

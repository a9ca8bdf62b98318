// Paged decode on tensor cores (sm_80+): the main kernel. A CTA's warps each take 16 keys of every tile of TILE_TOKENS keys, through
// a ring of their own (warp_ring.cuh), and keep a softmax state of all rows of the tile (warp_rows.cuh); at the end of a segment
// the states merge through shared memory, where the rings were. K and V are read once per row tile: ROW_TILE rows (query, head of
// the group), so several queries of a sequence cost no more than one, as long as they fit.
#include "pagedkv/warp_ring.cuh"
#include "pagedkv/warp_merge.cuh"
#include "pagedkv/warp_rows.cuh"

using namespace pagedkv;

static_assert(STAGES >= 2, "");
static_assert(SHARED_BYTES >= kRingBytes && SHARED_BYTES >= sizeof(WarpParts<kWarps>), "");

__device__ __forceinline__ void attend(const AttentionParams& p, const Segment& s, int warp) {
  const SequenceKv kv(p.kv, s.seq);
  WarpRing ring(kv, s, dynamic_shared, warp);
  ring.start();
  constexpr bool kFolded = SCALE_MODE == kScaleTensor || SCALE_MODE == kScaleHead;  // one scale for all keys
  WarpRows<1> rows(p, s, kFolded ? kv.k_scale({0, 0}, s.kv_head) : 1.f);
  for (int i = 0; i < ring.num_tiles; ++i) {
    ring.wait_k();
    ring.issue(i + STAGES - 1);
    if (ring.has_keys(i)) rows.add_scores<KLayout, false>({{ring.k(i), 0, ring.first_key(i), true}}, ring.scales(i));
    ring.wait_v();
    if (ring.has_keys(i)) rows.add_values<VLayout, false>({{ring.v(i), 0, ring.first_key(i), true}});
  }
  auto& parts = *reinterpret_cast<WarpParts<kWarps>*>(dynamic_shared);
  __syncthreads();  // the rings are read; all their copies are done
  rows.store(parts.o[warp][0], parts.ml[warp][0]);
  merge_warps<kWarps>(p, s, parts, kFolded ? kv.v_scale({0, 0}, s.kv_head) : 1.f);
}

extern "C" __global__ __launch_bounds__(kWarps * kWarpSize, MIN_CTAS) void decode_mma(const __grid_constant__ AttentionParams p) {
  const int warp = uniform_warp_id();
  Schedule schedule(p);
  Segment segment;
  while (schedule.next(segment)) attend(p, segment, warp);
}

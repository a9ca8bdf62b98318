// Causal paged prefill on the warpgroup tensor cores of sm_90a: the rows and the work list of prefill_mma, tiles that the tensor
// memory accelerator brings. After FlashAttention-3 (Shah et al. 2024).
//
// A CTA computes one row tile: ROW_TILE rows (query, head of the group) of one sequence and one KV head, 64 by each of two warpgroups
// that compute; one warp of a third keeps the ring of tiles full (tma_ring.cuh) and leaves its registers to them. A warpgroup starts
// the scores of a tile and the values of the one before it together, and computes the softmax of the former during the latter.
//
// What shares a piece of the last tile with the sequence's last keys may be NaN. For K that is masked; V's rows there are zeroed in
// shared memory, as 0 * NaN would not be 0.
#include "pagedkv/shared_tile.cuh"
#include "pagedkv/warpgroup_products.cuh"

using namespace pagedkv;

constexpr int kGroups = ROW_TILE / kGroupRows;
constexpr int kWarpTileBytes = 16 * HEAD_DIM_V * 2;  // of the output
constexpr int kRingAt = kGroups * QLayout::kBytes;   // behind the queries
static_assert(SHARED_BYTES >= kRingAt + TmaRing::kBytes, "");
static_assert(COMPUTE_THREADS == kGroups * kWarpgroup && COMPUTE_THREADS == kWarps * kWarpSize, "");
static_assert(kSame<Q_TYPE, KV_TYPE> && HEAD_DIM == HEAD_DIM_V && CAUSAL && !WINDOW, "");
static_assert((SCHEDULE == kListed || SCHEDULE == kWhole) && STAGES >= 4, "a CTA writes its rows whole, two tiles at a time");

// The ring as its computing side takes it here: by the buffer's number, K of one tile before V of the one before.
struct Ring : TmaRing {
  using TmaRing::TmaRing;

  __device__ __forceinline__ u8* wait(int n) {
    mbarrier_wait(full + n % STAGES, n / STAGES % 2);
    return buffers + n % STAGES * kBufferBytes;
  }
  // The warp's products have read it.
  __device__ __forceinline__ void free(int n) {
    if (lane_id() == 0) mbarrier_arrive(empty + n % STAGES);
  }
};

// Copies the queries of the warpgroup's rows, zeros where there is no row, and waits for them.
__device__ __forceinline__ void copy_queries(const AttentionParams& p, const Segment& s, int group, u8* to) {
  constexpr int kChunks = HEAD_DIM / 8;
#pragma unroll
  for (int j = 0; j < kGroupRows * kChunks / kWarpgroup; ++j) {
    const int index = j * kWarpgroup + threadIdx.x % kWarpgroup, row = index / kChunks, chunk = index % kChunks;
    const int r = group * kGroupRows + row, used = min(r, s.num_rows - 1);
    const Q_TYPE* from = static_cast<const Q_TYPE*>(p.q) + (s.q_first + s.query(used)) * p.q_token_stride + s.qo_head(used) * p.q_head_stride;
    cp_async16(to + QLayout::at(row, chunk), from + chunk * 8, r < s.num_rows);
  }
  cp_async_commit();
  cp_async_wait<0>();
  async_proxy_fence();
  named_barrier(2 + group, kWarpgroup);
}

// Zeros in V for what lies in the last tile behind the last key. All computing threads; returns when all may read.
__device__ __forceinline__ void zero_behind(u8* v, int num_keys) {
  for (int i = num_keys * kVChunks + threadIdx.x; i < ceil_div(num_keys, BOX_TOKENS) * BOX_TOKENS * kVChunks; i += COMPUTE_THREADS)
    *reinterpret_cast<uint4*>(v + VLayout::at(i / kVChunks, i % kVChunks)) = uint4{};
  async_proxy_fence();
  named_barrier(1, COMPUTE_THREADS);
}

// A computing warpgroup. Tile i is the ring's buffers 2 i (K) and 2 i + 1 (V).
__device__ __forceinline__ void attend(const AttentionParams& p, const Segment& s, Ring& ring, int group, int warp) {
  u8* const queries = dynamic_shared + group * QLayout::kBytes;
  copy_queries(p, s, group, queries);
  const int first_row = warp * 16, tiles = s.begin < s.end ? ceil_div(s.end, TILE_TOKENS) : 0;
  const WarpSees group_sees(p, s, group * kGroupRows, kGroupRows), sees(p, s, first_row, 16);
  const int own = min(ceil_div(group_sees.any.end, TILE_TOKENS), tiles);  // the last ones may be beyond all rows of the warpgroup
  float scores[1][TILE_TOKENS / 8][4], factor[1][2];
  u32 shares[TILE_TOKENS / 16][4];
  QueryRows<1> rows(p, s, first_row, 1.f);
  const auto values_of = [&](int i) {
    u8* v = ring.wait(2 * i + 1);
    if (i == tiles - 1 && s.end % BOX_TOKENS) zero_behind(v, s.end - i * TILE_TOKENS);
    return v;
  };
  const auto softmax = [&](int i) {
    rows.shape(scores, i * TILE_TOKENS, !sees.everything(i * TILE_TOKENS, TILE_TOKENS));
    return rows.softmax(scores, factor);
  };
  const auto end_values = [&] {
    wgmma_wait<0>();
    hold_sums(rows.o[0]);
  };
  const auto pack = [&] {
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step) QueryRows<1>::pack_shares(scores[0], step, shares[step]);
  };
  if (own > 0) {
    start_keys(scores[0], queries, ring.wait(0));
    wgmma_wait<0>();
    hold_sums(scores[0]);
    ring.free(0);
    softmax(0);
    pack();
    const u8* k = own > 1 ? ring.wait(2) : nullptr;
    for (int i = 1; i < own; ++i) {
      start_keys(scores[0], queries, k);
      start_values(rows.o[0], shares, ring.wait(2 * i - 1));  // not of the last tile
      wgmma_wait<1>();
      hold_sums(scores[0]);
      ring.free(2 * i);
      const bool raised = softmax(i);
      hold_sums(scores[0]);
      if (i + 1 < own) k = ring.wait(2 * i + 2);  // here, as the compiler would else move the softmax behind the end of the values
      end_values();
      ring.free(2 * i - 1);
      if (raised) rows.rescale(factor);
      pack();
    }
    start_values(rows.o[0], shares, values_of(own - 1));
    end_values();
    ring.free(2 * own - 1);
  }
  for (int i = own; i < tiles; ++i) {
    ring.wait(2 * i);
    ring.free(2 * i);
    values_of(i);
    ring.free(2 * i + 1);
  }
  named_barrier(2 + group, kWarpgroup);  // all have read the queries: the output goes through their place
  rows.finish(SharedTile<16, HEAD_DIM_V>{queries + warp % 4 * kWarpTileBytes}, 1.f);
}

extern "C" __global__ __launch_bounds__(COMPUTE_THREADS + kWarpgroup, 1) void prefill_wgmma(const __grid_constant__ TmaAttentionParams p) {
  Segment segment;
  if (!Schedule(p.attention).next(segment)) return;
  Ring ring(dynamic_shared + kRingAt);
  const int warp = uniform_warp_id(), group = warp / 4;
  if (group == kGroups) {
    give_registers<24>();
    if (warp == kWarps) ring.produce(p, segment, evict_last_policy());
  } else {
    take_registers<240>();
    attend(p.attention, segment, ring, group, warp);
  }
}

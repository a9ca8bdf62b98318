// Paged prefill on the warpgroup tensor cores of sm_90a: the rows and the work list of prefill_mma, tiles that the tensor
// memory accelerator brings. After FlashAttention-3 (Shah et al. 2024).
//
// A row tile is ROW_TILE rows (query, head of the group) of one sequence and one KV head, 64 for each of two warpgroups that compute;
// one warp of a third takes the CTA's segments from the schedule, keeps the ring of tiles full (tma_ring.cuh) and leaves its registers
// to them. A warpgroup starts the scores of a tile and the values of the one before it together, and computes the softmax of the
// former during the latter. The warpgroups take turns at starting products, so that one's softmax runs beside the other's products.
//
// The producing warp is a segment ahead: while the output of one is written, the next one's queries and first tiles are on their way.
//
// What shares a piece of the last tile with the sequence's last keys may be NaN. For K that is masked; V's rows there are zeroed in
// shared memory, as 0 * NaN would not be 0.
#include "pagedkv/shared_tile.cuh"
#include "pagedkv/warpgroup_products.cuh"

using namespace pagedkv;

constexpr int kGroups = ROW_TILE / kGroupRows;
constexpr int kWarpTileBytes = 16 * HEAD_DIM_V * 2;  // of the output

// The CTA's segments on their way from the producing warp to the computing ones: two places, filled in turn.
struct Feed {
  Segment segments[2];
  bool found[2];  // false: there are no more
  u64 full[2], empty[2];
  // All threads of the CTA, before the barrier that ends the ring's constructor.
  __device__ __forceinline__ void init() {
    if (threadIdx.x > 0) return;
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, kWarps);
    }
  }
  // The producing warp; false where there are no more.
  __device__ __forceinline__ bool put(int turn, Schedule& schedule) {
    mbarrier_wait(empty + turn % 2, turn / 2 % 2 ^ 1);
    if (lane_id() == 0) {
      found[turn % 2] = schedule.next(segments[turn % 2]);
      mbarrier_arrive(full + turn % 2);
    }
    __syncwarp();
    return found[turn % 2];
  }
  // A computing warp.
  __device__ __forceinline__ bool take(int turn, Segment& s) {
    mbarrier_wait(full + turn % 2, turn / 2 % 2);
    const bool more = found[turn % 2];
    if (more) s = segments[turn % 2];
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(empty + turn % 2);
    return more;
  }
};

// A warpgroup's turns at starting the products of a tile: it takes a turn when the other has passed it on, once for every tile of the
// segment, also of tiles that it does not see.
static_assert(kGroups == 2, "");
struct Turns {
  int group;
  __device__ __forceinline__ void take() const { named_barrier(4 + group, COMPUTE_THREADS); }
  __device__ __forceinline__ void pass() const { named_barrier_arrive(4 + (group ^ 1), COMPUTE_THREADS); }
};

// Shared memory: the queries of two segments, the ring, the feed.
constexpr int kQueryBytes = kGroups * QLayout::kBytes;  // of a segment
constexpr int kRingAt = 2 * kQueryBytes, kFeedAt = kRingAt + TmaRing::kBytes;
static_assert(SHARED_BYTES >= kFeedAt + sizeof(Feed), "");
static_assert(COMPUTE_THREADS == kGroups * kWarpgroup && COMPUTE_THREADS == kWarps * kWarpSize, "");
static_assert(kSame<Q_TYPE, KV_TYPE> && HEAD_DIM == HEAD_DIM_V && !WINDOW, "");
static_assert((SCHEDULE == kListed || SCHEDULE == kWhole) && STAGES >= 4, "two tiles at a time");

// The ring as its computing side takes it here: by the buffer's number, K of one tile before V of the one before.
struct Ring : TmaRing {
  using TmaRing::TmaRing;
  int passed = 0;  // buffers of the segments before

  __device__ __forceinline__ u8* wait(int n) {
    mbarrier_wait(full + n % STAGES, n / STAGES % 2);
    return buffers + n % STAGES * kBufferBytes;
  }
  // The warp's products have read it.
  __device__ __forceinline__ void free(int n) {
    if (lane_id() == 0) mbarrier_arrive(empty + n % STAGES);
  }
};

// Starts to copy the queries of the warpgroup's rows, zeros where there is no row.
__device__ __forceinline__ void start_queries(const AttentionParams& p, const Segment& s, int group, u8* to) {
  constexpr int kChunks = HEAD_DIM / 8;
#pragma unroll
  for (int j = 0; j < kGroupRows * kChunks / kWarpgroup; ++j) {
    const int index = j * kWarpgroup + threadIdx.x % kWarpgroup, row = index / kChunks, chunk = index % kChunks;
    const int r = group * kGroupRows + row, used = min(r, s.num_rows - 1);
    const Q_TYPE* from = static_cast<const Q_TYPE*>(p.q) + (s.q_first + s.query(used)) * p.q_token_stride + s.qo_head(used) * p.q_head_stride;
    cp_async16(to + QLayout::at(row, chunk), from + chunk * 8, r < s.num_rows);
  }
  cp_async_commit();
}
// Waits until the products of the warpgroup may read them, and until all its warps are done with the segment before.
__device__ __forceinline__ void wait_queries(int group) {
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

// A segment's products and softmax, by one of the computing warpgroups. Its tile i, counted from its first, is the ring's buffers
// 2 i (K) and 2 i + 1 (V) after those that have passed.
__device__ __forceinline__ void attend(QueryRows<1>& rows, const Segment& s, Ring& ring, const u8* queries, int group) {
  const AttentionParams& p = rows.p;
  const int first_key = s.begin / TILE_TOKENS * TILE_TOKENS;
  const int tiles = s.begin < s.end ? ceil_div(s.end - first_key, TILE_TOKENS) : 0, passed = ring.passed;
  const WarpSees group_sees(p, s, group * kGroupRows, kGroupRows), sees(p, s, QueryRows<1>::first_row(), 16);
  // The last tiles may be beyond all rows of the warpgroup.
  const int own = min(ceil_div(max(group_sees.any.end - first_key, 0), TILE_TOKENS), tiles);
  float scores[1][TILE_TOKENS / 8][4], factor[1][2];
  u32 shares[TILE_TOKENS / 16][4];
  const Turns turns{group};
  const auto values_of = [&](int i) {
    u8* v = ring.wait(passed + 2 * i + 1);
    if (i == tiles - 1 && s.end % BOX_TOKENS) zero_behind(v, s.end - first_key - i * TILE_TOKENS);
    return v;
  };
  const auto softmax = [&](int i) {
    const int key = first_key + i * TILE_TOKENS;
    rows.shape(scores, key, !sees.everything(key, TILE_TOKENS));
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
    const u8* k = ring.wait(passed);
    turns.take();
    start_keys(scores[0], queries, k);
    turns.pass();
    wgmma_wait<0>();
    hold_sums(scores[0]);
    ring.free(passed);
    softmax(0);
    pack();
    k = own > 1 ? ring.wait(passed + 2) : nullptr;
    for (int i = 1; i < own; ++i) {
      const u8* v = ring.wait(passed + 2 * i - 1);  // not of the last tile
      turns.take();
      start_keys(scores[0], queries, k);
      start_values(rows.o[0], shares, v);
      turns.pass();
      wgmma_wait<1>();
      hold_sums(scores[0]);
      ring.free(passed + 2 * i);
      const bool raised = softmax(i);
      hold_sums(scores[0]);
      // Here, as the compiler would else move the softmax behind the end of the values.
      if (i + 1 < own) k = ring.wait(passed + 2 * i + 2);
      end_values();
      ring.free(passed + 2 * i - 1);
      if (raised) rows.rescale(factor);
      pack();
    }
    start_values(rows.o[0], shares, values_of(own - 1));
    end_values();
    ring.free(passed + 2 * own - 1);
  }
  for (int i = own; i < tiles; ++i) {
    turns.take();
    turns.pass();
    ring.wait(passed + 2 * i);
    ring.free(passed + 2 * i);
    values_of(i);
    ring.free(passed + 2 * i + 1);
  }
  ring.passed += 2 * tiles;
}

// A computing warpgroup: all segments of the CTA.
__device__ __forceinline__ void compute(const AttentionParams& p, Ring& ring, Feed& feed, int group, int warp) {
  Segment s;
  if (!feed.take(0, s)) return;
  start_queries(p, s, group, dynamic_shared + group * QLayout::kBytes);
  if (group == 1) Turns{group}.pass();  // the first turn is the other's
  bool more = true;
  for (int turn = 0; more; ++turn) {
    u8* const queries = dynamic_shared + turn % 2 * kQueryBytes + group * QLayout::kBytes;
    wait_queries(group);
    QueryRows<1> rows(p, s, 1.f);
    attend(rows, s, ring, queries, group);
    Segment next;
    more = feed.take(turn + 1, next);
    if (more) start_queries(p, next, group, dynamic_shared + (turn + 1) % 2 * kQueryBytes + group * QLayout::kBytes);
    named_barrier(2 + group, kWarpgroup);  // all have read the queries: the output goes through their place
    rows.finish(SharedTile<16, HEAD_DIM_V>{queries + warp % 4 * kWarpTileBytes}, 1.f);
    s = next;
  }
  if (group == 0) Turns{group}.take();  // the last turn that was passed on
}

// The producing warp: all segments of the CTA.
__device__ __forceinline__ void produce(const TmaAttentionParams& p, Ring& ring, Feed& feed) {
  prefetch_tensor_map(&p.k_map);
  prefetch_tensor_map(&p.v_map);
  Schedule schedule(p.attention);
  for (int turn = 0; feed.put(turn, schedule); ++turn) ring.produce(p, feed.segments[turn % 2], evict_last_policy());
}

extern "C" __global__ __launch_bounds__(COMPUTE_THREADS + kWarpgroup, 1) void prefill_wgmma(const __grid_constant__ TmaAttentionParams p) {
  Feed& feed = *reinterpret_cast<Feed*>(dynamic_shared + kFeedAt);
  feed.init();
  Ring ring(dynamic_shared + kRingAt);
  const int warp = uniform_warp_id(), group = warp / 4;
  if (group == kGroups) {
    give_registers<40>();
    if (warp == kWarps) produce(p, ring, feed);
  } else {
    take_registers<232>();
    compute(p.attention, ring, feed, group, warp);
  }
}

// Paged decode over latents (MLA) on the warpgroup tensor cores of sm_90a, for more query heads than decode_mla takes at once: one KV
// head, V the first HEAD_DIM_V numbers of K, so that a tile is loaded once and read for both products. After FlashMLA.
//
// A CTA has ROW_TILE = 64 rows, whose queries stay in shared memory, and tiles of 64 keys. Two warpgroups compute:
//
//   scores   a warpgroup has all rows and half of the keys
//   softmax  of these; the rows' maxima are exchanged, and the shares of all keys lie in shared memory
//   values   a warpgroup has all rows, all keys and half of V's dims
//
// One warp of a third walks the same segments ahead of them, keeps a ring of STAGES tiles full through the tensor memory accelerator
// and leaves its registers to them. Pieces of BOX_TOKENS tokens without a key of the segment are asked for beyond the last block,
// where the map says zeros; what shares a piece with the segment's keys may be NaN, and is zeroed, as 0 * NaN would not be 0.
#include "pagedkv/finish.cuh"
#include "pagedkv/kv.cuh"
#include "pagedkv/ptx_wgmma.cuh"
#include "pagedkv/tile.cuh"
#include "pagedkv/tma_params.cuh"

using namespace pagedkv;

constexpr int kGroups = 2, kWarps = COMPUTE_THREADS / kWarpSize;
constexpr int kOwnKeys = TILE_TOKENS / kGroups;        // of a warpgroup's scores
constexpr int kOwnParts = HEAD_DIM_V / kGroups / 128;  // of 128 dims, of a warpgroup's values
constexpr int kPanelBytes = TILE_TOKENS * 128;         // 64 dims of a tile
constexpr int kPanels = HEAD_DIM / 64, kPieces = TILE_TOKENS / BOX_TOKENS;
static_assert(ROW_TILE == 64 && TILE_TOKENS == 64 && COMPUTE_THREADS == kGroups * kWarpgroup, "");
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM_V % 256 == 0 && HEAD_DIM_V <= HEAD_DIM, "");
static_assert(PAGED && BLOCK_SIZE % BOX_TOKENS == 0 && BOX_TOKENS % 8 == 0 && kWarpSize % kPieces == 0, "");
static_assert(kSame<Q_TYPE, KV_TYPE> && SCHEDULE != kListed && STAGES >= 2, "");

using KLayout = TileLayout<kKChunks, TILE_TOKENS>;
using QLayout = TileLayout<HEAD_DIM / 8, ROW_TILE>;
using ShareLayout = TileLayout<TILE_TOKENS / 8, ROW_TILE>;

struct Shared {
  u8 tiles[STAGES][KLayout::kBytes];
  u8 queries[QLayout::kBytes];
  u8 shares[ShareLayout::kBytes];
  float largest[kGroups][ROW_TILE];  // score of a tile, by a warpgroup's keys
  float sums[kGroups][ROW_TILE];     // of the shares, at the end of a segment
  u64 full[STAGES], empty[STAGES];
};
static_assert(SHARED_BYTES >= sizeof(Shared), "");

// The producing warp: the tiles of a segment, `passed` of which the ring has had before.
__device__ __forceinline__ void produce(const TmaAttentionParams& p, const Segment& s, Shared& shared, int& passed) {
  const SequenceKv kv(p.attention.kv, s.seq);
  const u64 policy = GROUP_SIZE > ROW_TILE ? evict_last_policy() : evict_first_policy();
  const int offset = lane_id() % kPieces * BOX_TOKENS;
  const auto block_of = [&](int tile) {
    const int token = tile + offset;
    const bool needed = token < s.end && token + BOX_TOKENS > s.begin;
    return needed ? static_cast<int>(kv.place(max(token, s.begin)).block) : kv.p.num_blocks;
  };
  const int first = s.begin / TILE_TOKENS * TILE_TOKENS;
  int block = s.begin < s.end ? block_of(first) : 0;
  for (int tile = first; tile < s.end; tile += TILE_TOKENS, ++passed) {
    const int next_block = block_of(tile + TILE_TOKENS);  // on its way while this tile waits for its place
    const int stage = passed % STAGES;
    mbarrier_wait(shared.empty + stage, passed / STAGES % 2 ^ 1);
    if (lane_id() == 0) mbarrier_arrive_expect(shared.full + stage, KLayout::kBytes);
    __syncwarp();
    for (int panel = lane_id() / kPieces; panel < kPanels; panel += kWarpSize / kPieces)
      tma_load_4d(shared.tiles[stage] + panel * kPanelBytes + offset * 128, &p.k_map, shared.full + stage, panel * 64, s.kv_head,
                  (tile + offset) % BLOCK_SIZE, block, policy);
    block = next_block;
  }
}

// Copies the queries, a row by a warp, zeros where there is no row. All computing threads; returns when all may read them.
__device__ __forceinline__ void copy_queries(const AttentionParams& p, const Segment& s, u8* to, int warp) {
#pragma unroll 1  // the registers are for the sums
  for (int row = warp; row < ROW_TILE; row += kWarps) {
    const Q_TYPE* from = query_row(p, s, min(row, s.num_rows - 1));
    for (int chunk = lane_id(); chunk < HEAD_DIM / 8; chunk += kWarpSize)
      cp_async16(to + QLayout::at(row, chunk), from + chunk * 8, row < s.num_rows);
  }
  cp_async_commit();
  cp_async_wait<0>();
  async_proxy_fence();
  sync_computing();
}

// Zeros for the tile's keys outside the segment. All computing threads; returns when all may read the tile.
__device__ __forceinline__ void zero_outside(const Segment& s, u8* tile, int first_key) {
  for (int i = threadIdx.x; i < TILE_TOKENS * kKChunks; i += COMPUTE_THREADS) {
    const int row = i / kKChunks, key = first_key + row;
    if (key < s.begin || key >= s.end) *reinterpret_cast<uint4*>(tile + KLayout::at(row, i % kKChunks)) = uint4{};
  }
  async_proxy_fence();
  sync_computing();
}

// A thread's two rows of a warpgroup's products: sums as mma_16816 spreads them.
struct Rows {
  int first;  // the other is eight further
  Scorer scorers[2];
  float m[2] = {neg_inf(), neg_inf()};
  float l[2] = {};  // of this thread's keys
  float o[kOwnParts][16][4] = {};

  __device__ __forceinline__ Rows(const AttentionParams& p, const Segment& s) : first(warp_id() % 4 * 16 + lane_id() / 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int used = min(first + 8 * half, s.num_rows - 1);
      scorers[half] = Scorer(p, s.seq, s.seq_len, s.position(p, s.query(used)), s.query(used), s.qo_head(used));
    }
  }

  // Products with a warpgroup's keys of the tile.
  __device__ __forceinline__ void add_scores(float (&x)[kOwnKeys / 8][4], const Shared& shared, const u8* tile, int group) {
    const u64 a = wgmma_operand(shared.queries, 0), b = wgmma_operand(tile + group * kOwnKeys * 128, 0);
    hold_sums(x);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const int at = step / 4 * kPanelBytes + step % 4 * 32;  // panels of queries have as many rows
      wgmma_rows<Q_TYPE>(x, wgmma_advance(a, at), wgmma_advance(b, at), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold_sums(x);
  }

  // The softmax of the tile: shares of a warpgroup's keys go to shared memory. Returns when those of all keys are there.
  __device__ __forceinline__ void softmax(float (&x)[kOwnKeys / 8][4], const Segment& s, Shared& shared, int first_key, int group) {
    float largest[2] = {neg_inf(), neg_inf()};
#pragma unroll
    for (int n = 0; n < kOwnKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + group * kOwnKeys + n * 8 + lane_id() % 4 * 2 + i % 2;
        x[n][i] = s.begin <= key && key < s.end ? scorers[i / 2](x[n][i], key) : neg_inf();
        largest[i / 2] = fmaxf(largest[i / 2], x[n][i]);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) largest[half] = fmaxf(largest[half], __shfl_xor_sync(kFullMask, largest[half], step));
      if (lane_id() % 4 == 0) shared.largest[group][first + 8 * half] = largest[half];
    }
    sync_computing();
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = fmaxf(m[half], fmaxf(largest[half], shared.largest[group ^ 1][first + 8 * half]));
      factor[half] = weight(m[half], raised);
      m[half] = raised;
      l[half] *= factor[half];
    }
#pragma unroll
    for (int n = 0; n < kOwnKeys / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = weight(x[n][2 * half], m[half]), high = weight(x[n][2 * half + 1], m[half]);
        l[half] += low + high;
        u8* to = shared.shares + ShareLayout::at(first + 8 * half, group * kOwnKeys / 8 + n) + lane_id() % 4 * 4;
        *reinterpret_cast<u32*>(to) = pack2<Q_TYPE>(low, high);
      }
    if (__any_sync(kFullMask, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
      for (int part = 0; part < kOwnParts; ++part)
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[part][n][i] *= factor[i / 2];
    }
    sync_computing();
  }

  // The shares of all keys times a warpgroup's dims of V.
  __device__ __forceinline__ void add_values(const Shared& shared, const u8* tile, int group) {
    u32 a[TILE_TOKENS / 16][4];
#pragma unroll
    for (int step = 0; step < TILE_TOKENS / 16; ++step)
      ldmatrix_x4(a[step], shared.shares + ShareLayout::at(warp_id() % 4 * 16 + lane_id() % 16, 2 * step + lane_id() / 16));
#pragma unroll
    for (int part = 0; part < kOwnParts; ++part) hold_sums(o[part]);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kOwnParts; ++part) {
      const u64 b = wgmma_operand(tile + (group * kOwnParts + part) * 2 * kPanelBytes, kPanelBytes);
#pragma unroll
      for (int step = 0; step < TILE_TOKENS / 16; ++step) wgmma_across<Q_TYPE>(o[part], a[step], wgmma_advance(b, step * 16 * 128));
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kOwnParts; ++part) hold_sums(o[part]);
  }

  // Writes the rows' output or their part of it.
  __device__ __forceinline__ void finish(const AttentionParams& p, const Segment& s, Shared& shared, int group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) l[half] += __shfl_xor_sync(kFullMask, l[half], step);
      if (lane_id() % 4 == 0) shared.sums[group][first + 8 * half] = l[half];
    }
    sync_computing();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 8 * half;
      if (row >= s.num_rows) break;
      const float sum = shared.sums[0][row] + shared.sums[1][row];
      const i64 at = static_cast<i64>(s.slot) * ROW_TILE + row;
      if (s.slot >= 0 && group == 0 && lane_id() % 4 == 0)
        *reinterpret_cast<float2*>(p.schedule.partial_ml + at * 2) = make_float2(m[half], sum);
#pragma unroll
      for (int part = 0; part < kOwnParts; ++part)
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          const int d = ((group * kOwnParts + part) * 16 + n) * 8 + lane_id() % 4 * 2;
          const float pair[2] = {o[part][n][2 * half], o[part][n][2 * half + 1]};
          if (s.slot < 0) write_row<2>(p, s, row, d, m[half], sum, pair);
          else *reinterpret_cast<float2*>(p.schedule.partial_o + at * HEAD_DIM_V + d) = make_float2(pair[0], pair[1]);
        }
    }
    if (SCHEDULE == kEven && s.slot >= 0) arrive_and_merge(p, s);
  }
};

// A computing warp: the segment's tiles, `passed` of which the ring has had before.
__device__ __forceinline__ void attend(const AttentionParams& p, const Segment& s, Shared& shared, int& passed, int warp) {
  const int group = warp / 4;
  copy_queries(p, s, shared.queries, warp);
  Rows rows(p, s);
  for (int first_key = s.begin / TILE_TOKENS * TILE_TOKENS; first_key < s.end; first_key += TILE_TOKENS, ++passed) {
    const int stage = passed % STAGES;
    u8* tile = shared.tiles[stage];
    mbarrier_wait(shared.full + stage, passed / STAGES % 2);
    if (first_key < s.begin || first_key + TILE_TOKENS > s.end) zero_outside(s, tile, first_key);
    float x[kOwnKeys / 8][4];
    rows.add_scores(x, shared, tile, group);
    rows.softmax(x, s, shared, first_key, group);
    rows.add_values(shared, tile, group);
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared.empty + stage);
  }
  rows.finish(p, s, shared, group);
}

extern "C" __global__ __launch_bounds__(COMPUTE_THREADS + kWarpgroup, 1) void decode_mla_wgmma(
    const __grid_constant__ TmaAttentionParams p) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(shared.full + i, 1);
      mbarrier_init(shared.empty + i, kWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warp = uniform_warp_id();
  Schedule schedule(p.attention);
  Segment segment;
  int passed = 0;
  if (warp >= kWarps) {
    give_registers<40>();
    if (warp > kWarps) return;
    prefetch_tensor_map(&p.k_map);
    while (schedule.next(segment)) produce(p, segment, shared, passed);
  } else {
    take_registers<232>();
    while (schedule.next(segment)) attend(p.attention, segment, shared, passed, warp);
  }
}

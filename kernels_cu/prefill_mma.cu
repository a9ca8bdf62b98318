// Paged attention of many queries per sequence on tensor cores (sm_80+): prefill, chunked prefill, appends and mixed batches, with
// every variant and KV type. After FlashAttention-2 (Dao 2023).
//
// A row tile is ROW_TILE rows (query, head of the group) of one sequence and one KV head, so that K and V are read once
// for the whole group and a chunk of few queries still fills the tile. Every warp has WARP_ROWS of the rows for itself; all
// walk through the keys together, tile by tile, in a ring that cp.async fills (cta_ring.cuh says who waits for whom). Tiles that no
// row sees are never loaded, tiles that a warp's rows do not see are skipped by it, and masks are applied only in tiles that some
// of its rows see in part.
//
// A CTA computes one row tile, or a part of its keys: several, one after the other, would cost registers that the loop needs.
#include "pagedkv/schedule.cuh"
#include "pagedkv/cta_ring.cuh"
#include "pagedkv/tile_products.cuh"

using namespace pagedkv;

constexpr int kWarps = ROW_TILE / WARP_ROWS, kFrags = WARP_ROWS / 16, kThreads = kWarps * kWarpSize;
constexpr int kSteps = HEAD_DIM / 16;
static_assert(SCHEDULE == kListed || SCHEDULE == kWhole, "");
static_assert(WARP_ROWS % 16 == 0 && ROW_TILE % WARP_ROWS == 0, "");

using Ring = CtaRing<kWarps>;
// A warp's queries, and in their place its output at the end: no other warp reads or writes there.
using QTile = SharedTile<WARP_ROWS, HEAD_DIM>;
using OTile = SharedTile<WARP_ROWS, HEAD_DIM_V>;
constexpr int kWarpBytes = max_of(QTile::kBytes, OTile::kBytes);

// What is better kept in shared memory than in registers, of which the loop has none to spare.
struct Parked {
  WarpSees sees[kWarps];
  Segment segment;
  bool found;  // whether there is a segment
  float powers[kPowers ? ROW_TILE : 1];  // divisors of the rows of queries
};
// Shared memory: the warps' queries, the ring, what is parked.
constexpr int kRingAt = kWarps * kWarpBytes, kParkedAt = kRingAt + Ring::kBytes;
static_assert(SHARED_BYTES >= kParkedAt + sizeof(Parked), "");

// Copies the queries of the warp's rows; zeros where there is no row.
__device__ __forceinline__ void copy_queries(const AttentionParams& p, const Segment& s, int first_row, const QTile& to) {
#pragma unroll
  for (int j = 0; j < WARP_ROWS * QTile::kChunks / kWarpSize; ++j) {
    const int index = j * kWarpSize + lane_id(), row = index / QTile::kChunks, chunk = index % QTile::kChunks;
    const int used = min(first_row + row, s.num_rows - 1);
    const Q_TYPE* from = static_cast<const Q_TYPE*>(p.q) + (s.q_first + s.query(used)) * p.q_token_stride + s.qo_head(used) * p.q_head_stride;
    cp_async16(to.chunk(row, chunk), from + chunk * 8, first_row + row < s.num_rows);
  }
}

// The same where K becomes f16: converted, with the dims of each step permuted as K's are. A row is four lanes'.
__device__ __forceinline__ void convert_queries(const AttentionParams& p, const Segment& s, int first_row, const QTile& to, float* powers) {
  for (int row = lane_id() / 4; row < WARP_ROWS; row += 8) {
    u32 words[2 * kSteps];
    const float power = load_queries(words, query_row(p, s, min(first_row + row, s.num_rows - 1)));
    if (kPowers && lane_id() % 4 == 0) powers[first_row + row] = power;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) *reinterpret_cast<u32*>(to.chunk(row, i) + lane_id() % 4 * 4) = words[i];
  }
  __syncwarp();
}

extern "C" __global__ __launch_bounds__(kThreads, MIN_CTAS) void prefill_mma(const __grid_constant__ AttentionParams p) {
  Parked& parked = *reinterpret_cast<Parked*>(dynamic_shared + kParkedAt);
  Segment& s = parked.segment;
  if (threadIdx.x == 0) {
    parked.found = Schedule(p).next(s);
    if (parked.found && s.begin >= s.end) s.begin = s.end = 0;  // no key: no tile holds one
  }
  __syncthreads();
  if (!parked.found) return;
  const int first_row = warp_id() * WARP_ROWS;
  u8* const warp_shared = dynamic_shared + warp_id() * kWarpBytes;
  const QTile queries{warp_shared};
  Ring ring(dynamic_shared + kRingAt, p, s);
  if (s.begin < s.end) {
    if (!kInRegisters) copy_queries(p, s, first_row, queries);
    ring.start();
  }
  if (kInRegisters) convert_queries(p, s, first_row, queries, parked.powers);

  constexpr bool kFolded = SCALE_MODE == kScaleTensor || SCALE_MODE == kScaleHead;  // one scale for all keys
  const SequenceKv kv(p.kv, s.seq);
  WarpSees& sees = parked.sees[warp_id()];
  if (lane_id() == 0) sees = WarpSees(p, s, first_row, WARP_ROWS);
  __syncwarp();
  QueryRows<kFrags> rows(p, s, kFolded ? kv.k_scale({0, 0}, s.kv_head) : 1.f, parked.powers);
  u32 q[Q_REGISTERS ? kFrags : 1][Q_REGISTERS ? kSteps : 1][4];
  const auto load_q = [&](u32 lane, int f, int step, u32(&a)[4]) {
    if constexpr (Q_REGISTERS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q[f][step][i];
    } else {
      queries.load_a(a, lane, f * 16, step);
    }
  };
  for (int i = ring.first_tile(); ring.holds(i); ++i) {
    ring.acquire(i);
    if (Q_REGISTERS && i == ring.first_tile()) {
#pragma unroll
      for (int f = 0; f < (Q_REGISTERS ? kFrags : 0); ++f)
#pragma unroll
        for (int step = 0; step < kSteps; ++step) queries.load_a(q[f][step], lane_id(), f * 16, step);
    }
    const int key = i * TILE_TOKENS;
    if (sees.nothing(key, TILE_TOKENS)) continue;
    float scores[kFrags][TILE_TOKENS / 8][4] = {}, factor[kFrags][2];
    multiply_keys<kFrags>(scores, load_q, ring.k(i));
    rows.shape(scores, key, !sees.everything(key, TILE_TOKENS));
    if (rows.softmax(scores, factor)) rows.rescale(factor);
    add_values<kFrags>(rows.o, scores, ring.v(i));
  }
  rows.finish(OTile{warp_shared}, kFolded ? kv.v_scale({0, 0}, s.kv_head) : 1.f);
}

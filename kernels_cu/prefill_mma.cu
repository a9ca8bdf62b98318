// Paged attention of many queries per sequence on tensor cores (sm_80+): prefill, chunked prefill, appends and mixed batches, with
// every variant and KV type. After FlashAttention-2 (Dao 2023).
//
// A CTA computes one row tile: ROW_TILE rows (query, head of the group) of one sequence and one KV head, so that K and V are read
// once for the whole group and a chunk of few queries still fills the tile. Every warp has WARP_ROWS of the rows for itself; all
// walk through the keys together, tile by tile, in a ring that cp.async fills (cta_ring.cuh says who waits for whom). Tiles that no
// row sees are never loaded, tiles that a warp's rows do not see are skipped by it, and masks are applied only in tiles that some
// of its rows see in part.
//
// The keys of a row tile are not divided among CTAs: a batch of few rows and long sequences belongs to decode_mma.
#include "pagedkv/schedule.cuh"
#include "pagedkv/cta_ring.cuh"
#include "pagedkv/tile_products.cuh"

using namespace pagedkv;

constexpr int kWarps = ROW_TILE / WARP_ROWS, kFrags = WARP_ROWS / 16, kThreads = kWarps * kWarpSize;
constexpr int kSteps = HEAD_DIM / 16;
static_assert(SCHEDULE == kListed || SCHEDULE == kWhole, "a CTA writes its rows whole");
static_assert(WARP_ROWS % 16 == 0 && ROW_TILE % WARP_ROWS == 0, "");

using Ring = CtaRing<kWarps>;
using QTile = SharedTile<ROW_TILE, HEAD_DIM>;
using OTile = SharedTile<ROW_TILE, HEAD_DIM_V>;  // in the place of Q: a warp's rows of Q are read by that warp alone
constexpr int kRowBytes = max_of(QTile::kBytes, OTile::kBytes);
static_assert(SHARED_BYTES == kRowBytes + Ring::kBytes, "kernels/prefill_mma.py computes the same");

// Copies the rows' queries; zeros where there is no row.
__device__ __forceinline__ void copy_queries(const AttentionParams& p, const Segment& s, const QTile& to) {
#pragma unroll
  for (int j = 0; j < ROW_TILE * QTile::kChunks / kThreads; ++j) {
    const int index = j * kThreads + threadIdx.x, row = index / QTile::kChunks, chunk = index % QTile::kChunks;
    const int used = min(row, s.num_rows - 1);
    const Q_TYPE* from = static_cast<const Q_TYPE*>(p.q) + (s.q_first + s.query(used)) * p.q_token_stride + s.qo_head(used) * p.q_head_stride;
    cp_async16(to.chunk(row, chunk), from + chunk * 8, row < s.num_rows);
  }
}

extern "C" __global__ __launch_bounds__(kThreads, MIN_CTAS) void prefill_mma(const __grid_constant__ AttentionParams p) {
  __shared__ Segment s;  // not in registers: the loop has none to spare
  __shared__ bool found;
  if (threadIdx.x == 0) found = Schedule(p).next(s);
  __syncthreads();
  if (!found) return;
  const QTile queries{dynamic_shared};
  Ring ring(dynamic_shared + kRowBytes, p, s);
  const bool any_keys = s.begin < s.end;
  if (any_keys) {
    copy_queries(p, s, queries);
    ring.start();
  }

  constexpr bool kFolded = SCALE_MODE == kScaleTensor || SCALE_MODE == kScaleHead;  // one scale for all keys
  const SequenceKv kv(p.kv, s.seq);
  const int first_row = warp_id() * WARP_ROWS;
  __shared__ WarpSees warp_sees[kWarps];
  WarpSees& sees = warp_sees[warp_id()];
  if (lane_id() == 0) sees = WarpSees(p, s, first_row, WARP_ROWS);
  __syncwarp();
  QueryRows<kFrags> rows(p, s, first_row, kFolded ? kv.k_scale({0, 0}, s.kv_head) : 1.f);
  u32 q[Q_REGISTERS ? kFrags : 1][Q_REGISTERS ? kSteps : 1][4];
  const auto load_q = [&](int f, int step, u32(&a)[4]) {
    if constexpr (Q_REGISTERS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q[f][step][i];
    } else {
      queries.load_a(a, first_row + f * 16, step);
    }
  };
  for (int i = ring.first_tile(); any_keys && ring.holds(i); ++i) {
    ring.acquire(i);
    if (Q_REGISTERS && i == ring.first_tile()) {
#pragma unroll
      for (int f = 0; f < (Q_REGISTERS ? kFrags : 0); ++f)
#pragma unroll
        for (int step = 0; step < kSteps; ++step) queries.load_a(q[f][step], first_row + f * 16, step);
    }
    const int key = i * TILE_TOKENS;
    if (sees.nothing(key, TILE_TOKENS)) continue;
    float s[kFrags][TILE_TOKENS / 8][4] = {}, factor[kFrags][2];
    multiply_keys<kFrags>(s, load_q, ring.k(i));
    rows.shape(s, key, !sees.everything(key, TILE_TOKENS));
    if (rows.softmax(s, factor)) rows.rescale(factor);
    add_values<kFrags>(rows.o, s, ring.v(i));
  }
  rows.finish(OTile{dynamic_shared}, kFolded ? kv.v_scale({0, 0}, s.kv_head) : 1.f);
}

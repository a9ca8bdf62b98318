// Paged decode over latents (MLA, sm_80+): one KV head, V the first HEAD_DIM_V numbers of K, so that a tile is loaded once and read
// for both products. All eight warps of a CTA work on one tile of TILE_TOKENS keys, with operands swapped as in decode (tile.cuh):
//
//   scores   a warp has 16 of the keys and a quarter of K's dims; the quarters are added in shared memory
//   softmax  a row's scores belong to kLanes neighbouring threads; shares go back to shared memory
//   values   a warp has HEAD_DIM_V / 8 of V's dims, all rows and all keys
//
// A ring of STAGES tiles is filled by cp.async, a key by eight threads. Keys outside the segment are stored as zeros.
#include "pagedkv/finish.cuh"
#include "pagedkv/kv.cuh"
#include "pagedkv/tile.cuh"

using namespace pagedkv;

constexpr int kWarps = 8, kThreads = kWarps * kWarpSize;
constexpr int kKeyGroups = TILE_TOKENS / kGroupKeys, kSplits = kWarps / kKeyGroups;
constexpr int kLoads = kKSteps / kStepsPerLoad, kSplitLoads = ceil_div(kLoads, kSplits);
constexpr int kWarpLoads = kVSteps / kStepsPerLoad / kWarps, kWarpSteps = kWarpLoads * kStepsPerLoad;
constexpr int kLanes = kThreads / ROW_TILE, kOwnKeys = TILE_TOKENS / kLanes;  // of a row's softmax
constexpr int kRowThreads = kThreads / TILE_TOKENS;                           // that copy a key
static_assert(PAGED && !kSame<Q_TYPE, f32> && SCALE_MODE != kScaleTokenHead, "");
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM_V % 256 == 0 && HEAD_DIM_V <= HEAD_DIM && ROW_TILE % 16 == 0, "");
static_assert(kLanes <= kWarpSize && kOwnKeys % 2 == 0 && STAGES >= 2, "");

using KLayout = TileLayout<kKChunks, TILE_TOKENS>;
using QLayout = TileLayout<HEAD_DIM / 8, ROW_TILE>;
using ShareLayout = TileLayout<TILE_TOKENS / 8, ROW_TILE>;

struct Shared {
  u8 tiles[STAGES][KLayout::kBytes];  // at the end of a segment, from here up to factor: o, float [ROW_TILE][HEAD_DIM_V]
  u8 queries[QLayout::kBytes];
  u8 shares[ShareLayout::kBytes];
  float sums[kSplits][ROW_TILE][TILE_TOKENS + 4];
  float factor[ROW_TILE];  // due to o
  float power[ROW_TILE];   // divisor of the queries
  float ml[ROW_TILE][2];
};
constexpr int kOutputBytes = sizeof(Shared::tiles) + sizeof(Shared::queries) + sizeof(Shared::shares) + sizeof(Shared::sums);
static_assert(SHARED_BYTES >= sizeof(Shared) && kOutputBytes >= ROW_TILE * HEAD_DIM_V * sizeof(float), "");

// The segment's tiles, one after the other. Blocks are looked up a tile ahead.
struct LatentRing {
  const SequenceKv& kv;
  const Segment& s;
  Shared& shared;
  int first_key, num_tiles, block;  // of this thread's key in the tile to be issued next

  __device__ __forceinline__ LatentRing(const SequenceKv& sequence, const Segment& segment, Shared& shared_)
      : kv(sequence), s(segment), shared(shared_) {
    const int first = s.begin / TILE_TOKENS;
    num_tiles = s.begin < s.end ? ceil_div(s.end, TILE_TOKENS) - first : 0;
    first_key = first * TILE_TOKENS;
    if (num_tiles > 0) block = look_up(0);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) issue(i);
  }
  __device__ __forceinline__ const u8* tile(int i) const { return shared.tiles[i % STAGES]; }
  __device__ __forceinline__ int own_key(int i) const { return first_key + i * TILE_TOKENS + threadIdx.x / kRowThreads; }
  __device__ __forceinline__ int look_up(int i) const { return *kv.entry(min(max(own_key(i), s.begin), s.end - 1)); }

  __device__ __forceinline__ void issue(int i) {
    if (i < num_tiles) {
      const int row = threadIdx.x / kRowThreads, key = own_key(i);
      const bool inside = s.begin <= key && key < s.end;
      const KV_TYPE* from = kv.k<KV_TYPE>(kv.place(block, inside ? key : s.begin), s.kv_head);
      u8* to = shared.tiles[i % STAGES];
#pragma unroll
      for (int j = 0; j < ceil_div(kKChunks, kRowThreads); ++j) {
        const int chunk = threadIdx.x % kRowThreads + j * kRowThreads;
        if (kKChunks % kRowThreads == 0 || chunk < kKChunks)
          cp_async16<kRowL2Bytes>(to + KLayout::at(row, chunk), from + chunk * kChunkDims, inside);
      }
      block = look_up(i + 1);
    }
    cp_async_commit();
  }
};

// Copies the queries, a row by a warp, in the order of dims that load_k gives one-byte types. Rows past the end repeat the last one.
__device__ __forceinline__ void copy_queries(const AttentionParams& p, const Segment& s, Shared& shared, int warp) {
  constexpr int kWords = HEAD_DIM / 2 / kWarpSize;
  for (int row = warp; row < ROW_TILE; row += kWarps) {
    const Q_TYPE* from = query_row(p, s, min(row, s.num_rows - 1));
    u32 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = *reinterpret_cast<const u32*>(from + 2 * (i * kWarpSize + lane_id()));
    const float power = fit_queries<kWarpSize>(words);
    if (lane_id() == 0) shared.power[row] = power;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int dim = 2 * (i * kWarpSize + lane_id()), within = dim % 16;
      const int place = kStepsPerLoad == 1 ? within : within / 4 * 2 + within % 4 / 2 * 8;
      *reinterpret_cast<u32*>(shared.queries + QLayout::at(row, dim / 16 * 2 + place / 8) + place % 8 * 2) = words[i];
    }
  }
}

// Row groups 2 pair and 2 pair + 1, 16 columns from chunk 2 step on, of a tile of rows: operand b of two products.
template <class Layout> __device__ __forceinline__ void load_rows(u32 (&b)[4], const u8* tile, int pair, int step) {
  ldmatrix_x4(b, tile + Layout::at(pair * 16 + lane_id() / 16 * 8 + lane_id() % 8, 2 * step + lane_id() / 8 % 2));
}

__device__ __forceinline__ void add_scores(Shared& shared, const u8* tile, int warp) {
  const int group = warp % kKeyGroups, split = warp / kKeyGroups;
  float s[2][kRowGroups][4] = {};  // two chains
#pragma unroll
  for (int i = 0; i < kSplitLoads; ++i) {
    const int load = split * kSplitLoads + i;
    if (kLoads % kSplits != 0 && load >= kLoads) break;
    u32 a[kStepsPerLoad][4];
    load_k<KLayout>(a, tile, group * kGroupKeys, load);
#pragma unroll
    for (int j = 0; j < kStepsPerLoad; ++j)
#pragma unroll
      for (int pair = 0; pair < kRowGroups / 2; ++pair) {
        u32 b[4];
        load_rows<QLayout>(b, shared.queries, pair, load * kStepsPerLoad + j);
        mma_16816<MmaType>(s[(i + j) % 2][2 * pair], a[j], b[0], b[1]);
        mma_16816<MmaType>(s[(i + j) % 2][2 * pair + 1], a[j], b[2], b[3]);
      }
  }
#pragma unroll
  for (int rows = 0; rows < kRowGroups; ++rows)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      shared.sums[split][own_row(rows, i % 2)][group * kGroupKeys + lane_id() / 4 + i / 2 * 8] = s[0][rows][i] + s[1][rows][i];
}

// A thread's part of a row's softmax: kOwnKeys of every tile. l is of these alone until the end.
struct RowPart {
  Scorer scorer;
  float m = neg_inf(), l = 0.f;

  __device__ __forceinline__ void add_tile(Shared& shared, const Segment& s, int first_key) {
    const int row = threadIdx.x / kLanes, first = threadIdx.x % kLanes * kOwnKeys;
    float x[kOwnKeys], largest = m;
#pragma unroll
    for (int e = 0; e < kOwnKeys; ++e) {
      const int key = first_key + first + e;
      float dot = 0.f;
#pragma unroll
      for (int split = 0; split < kSplits; ++split) dot += shared.sums[split][row][first + e];
      x[e] = s.begin <= key && key < s.end ? scorer(dot, key) : neg_inf();
      largest = fmaxf(largest, x[e]);
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
    const float factor = weight(m, largest);
    m = largest;
    l *= factor;
#pragma unroll
    for (int e = 0; e < kOwnKeys; ++e) {
      x[e] = weight(x[e], m);
      l += x[e];
    }
#pragma unroll
    for (int e = 0; e < kOwnKeys; e += 2)
      *reinterpret_cast<u32*>(shared.shares + ShareLayout::at(row, (first + e) / 8) + (first + e) % 8 * 2) = pack2<MmaType>(x[e], x[e + 1]);
    if (threadIdx.x % kLanes == 0) shared.factor[row] = factor;
  }

  __device__ __forceinline__ void store(Shared& shared) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) l += __shfl_xor_sync(kFullMask, l, step);
    if (threadIdx.x % kLanes == 0) {
      shared.ml[threadIdx.x / kLanes][0] = m;
      shared.ml[threadIdx.x / kLanes][1] = l;
    }
  }
};

__device__ __forceinline__ void add_values(float (&o)[kRowGroups][kWarpSteps][4], const Shared& shared, const u8* tile, int warp) {
  float factor[kRowGroups][2];
  bool rescaled = false;
#pragma unroll
  for (int rows = 0; rows < kRowGroups; ++rows)
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      factor[rows][column] = shared.factor[own_row(rows, column)];
      rescaled |= factor[rows][column] != 1.f;
    }
  if (__any_sync(kFullMask, rescaled)) {
#pragma unroll
    for (int rows = 0; rows < kRowGroups; ++rows)
#pragma unroll
      for (int step = 0; step < kWarpSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[rows][step][i] *= factor[rows][i % 2];
  }
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group) {
    u32 b[kRowGroups / 2][4];
#pragma unroll
    for (int pair = 0; pair < kRowGroups / 2; ++pair) load_rows<ShareLayout>(b[pair], shared.shares, pair, group);
#pragma unroll
    for (int load = 0; load < kWarpLoads; ++load) {
      u32 a[kStepsPerLoad][4];
      load_v<KLayout>(a, tile, group * kGroupKeys, warp * kWarpLoads + load);
#pragma unroll
      for (int j = 0; j < kStepsPerLoad; ++j)
#pragma unroll
        for (int rows = 0; rows < kRowGroups; ++rows)
          mma_16816<MmaType>(o[rows][load * kStepsPerLoad + j], a[j], b[rows / 2][rows % 2 * 2], b[rows / 2][rows % 2 * 2 + 1]);
    }
  }
}

__device__ __forceinline__ void attend(const AttentionParams& p, const Segment& s, Shared& shared, int warp) {
  const SequenceKv kv(p.kv, s.seq);
  LatentRing ring(kv, s, shared);
  copy_queries(p, s, shared, warp);
  __syncthreads();
  const int row = threadIdx.x / kLanes, used = min(row, s.num_rows - 1);
  RowPart part{Scorer(p, s.seq, s.seq_len, s.position(p, s.query(used)), s.query(used), s.qo_head(used))};
  part.scorer.scale_log2 *= shared.power[row] * kv.k_scale({0, 0}, s.kv_head);
  float o[kRowGroups][kWarpSteps][4] = {};
  for (int i = 0; i < ring.num_tiles; ++i) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // the tile is there, and the one before it has been read
    ring.issue(i + STAGES - 1);
    add_scores(shared, ring.tile(i), warp);
    __syncthreads();
    part.add_tile(shared, s, ring.first_key + i * TILE_TOKENS);
    __syncthreads();
    add_values(o, shared, ring.tile(i), warp);
  }
  cp_async_wait<0>();
  __syncthreads();  // the tiles are read
  const float v_scale = kv.v_scale({0, 0}, s.kv_head);
  float* whole = reinterpret_cast<float*>(shared.tiles[0]);
#pragma unroll
  for (int rows = 0; rows < kRowGroups; ++rows)
#pragma unroll
    for (int step = 0; step < kWarpSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        whole[own_row(rows, i % 2) * HEAD_DIM_V + dim_of(warp * kWarpSteps + step, lane_id() / 4 + i / 2 * 8)] = o[rows][step][i] * v_scale;
  part.store(shared);
  __syncthreads();
  finish_segment(p, s, whole, shared.ml[0]);
}

extern "C" __global__ __launch_bounds__(kThreads, MIN_CTAS) void decode_mla(const __grid_constant__ AttentionParams p) {
  const int warp = uniform_warp_id();
  Schedule schedule(p);
  Segment segment;
  while (schedule.next(segment)) attend(p, segment, *reinterpret_cast<Shared*>(dynamic_shared), warp);
}

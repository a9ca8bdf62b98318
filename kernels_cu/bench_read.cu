// Ceilings for reading: sums the 32-bit words of pages, wrapping, and does nothing else, so its time is the memory's. The host
// knows the sum, so a read that was left out shows.
//
// PAGE_VECS 16-byte vectors make a page. HEADS=1: pages are read whole, the grid striding over them together. HEADS>1: a page is
// tokens of HEADS rows of ROW_VECS vectors, and the list is ordered by head, then page, as attention orders it: each CTA reads one
// slice of it, a row of every token of a page at a time. Each thread has kUnroll loads under way: first all pages' ids, then all
// words, then the sums.
#include "pagedkv/bench_params.cuh"
#include "pagedkv/dtypes.cuh"

using namespace pagedkv;

constexpr int kThreads = 256, kUnroll = 8, kChunk = kThreads * kUnroll;
constexpr int kItemVecs = PAGE_VECS / HEADS;  // one head's part of a page
static_assert(PAGE_VECS % (HEADS * ROW_VECS) == 0, "a page is whole tokens");

using Words = Vec<u32, 4>;

// Vector `i` of the list.
__device__ __forceinline__ const Words* vector_at(const BenchReadParams& p, i64 i) {
  const u32 item = static_cast<u32>(i / kItemVecs), within = static_cast<u32>(i % kItemVecs);
  const u32 head = HEADS > 1 ? item / p.num_pages : 0, index = item - head * p.num_pages;
  const i64 page = PAGED ? p.pages[index] : index;
  const u32 token = within / ROW_VECS, vec = within % ROW_VECS;
  return static_cast<const Words*>(p.data) + page * p.page_stride + (token * HEADS + head) * ROW_VECS + vec;
}

__device__ __forceinline__ u32 sum_of(const Words& words) { return words.at[0] + words.at[1] + words.at[2] + words.at[3]; }

extern "C" __global__ __launch_bounds__(kThreads) void bench_read(const __grid_constant__ BenchReadParams p) {
  __shared__ u32 warp_sums[kThreads / kWarpSize];
  const i64 total = static_cast<i64>(p.num_pages) * PAGE_VECS;
  const i64 slice = ceil_div<i64>(ceil_div<i64>(total, gridDim.x), kChunk) * kChunk;
  const i64 begin = HEADS > 1 ? blockIdx.x * slice : static_cast<i64>(blockIdx.x) * kChunk;
  const i64 end = HEADS > 1 ? min_of(begin + slice, total) : total;
  const i64 step = HEADS > 1 ? kChunk : static_cast<i64>(gridDim.x) * kChunk;
  u32 sum = 0;
  i64 first = begin + threadIdx.x;
  for (; first - threadIdx.x + kChunk <= end; first += step) {
    const Words* from[kUnroll];
    Words words[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) from[j] = vector_at(p, first + j * kThreads);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) words[j] = *from[j];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) sum += sum_of(words[j]);
  }
  for (int j = 0; j < kUnroll; ++j, first += kThreads)  // the last, shorter chunk; whose it is not begins at or past the end
    if (first < end) sum += sum_of(*vector_at(p, first));
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kFullMask, sum, lanes);
  if (lane_id() == 0) warp_sums[warp_id()] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 whole = 0;
    for (int warp = 0; warp < kThreads / kWarpSize; ++warp) whole += warp_sums[warp];
    p.sums[blockIdx.x] = whole;
  }
}

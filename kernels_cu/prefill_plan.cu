// Lists the row tiles of a batch for the LISTED schedule (schedule.cuh), from the lengths on the device, so that no host has to know
// them and a captured graph replays with others. One CTA of 1024 threads, in four steps with barriers between them: the order of
// the sequences, running sums of their row tiles in that order, how far their keys are divided (parts.cuh), the list.
//
// Longest first: the CTAs that start last then have the least to do. Sequences go by their keys, a sequence's tiles from its last
// rows, which see the most keys, to its first.
#define CAUSAL 1
#define WINDOW 0
#define SOFT_CAP 0
#define ALIBI 0
#define MASK 0
#include "pagedkv/parts.cuh"
#include "pagedkv/scan.cuh"

using namespace pagedkv;

constexpr int kThreads = 1024;

__device__ __forceinline__ void swap(int*& a, int*& b) {
  int* const held = a;
  a = b;
  b = held;
}

// Keys go up as lengths go down; equal lengths stay in the order of the batch.
__device__ __forceinline__ u64 key_of(const WorkListParams& p, int seq) {
  return static_cast<u64>(~static_cast<u32>(p.seq_lens[seq])) << 32 | static_cast<u32>(seq);
}

// Sorts sequences first..first + count - 1, one a thread, into `to` (bitonic: every step compares pairs `step` apart).
__device__ __forceinline__ void sort_run(const WorkListParams& p, int first, int count, int* to) {
  __shared__ u64 keys[kThreads];
  const int own = threadIdx.x;
  keys[own] = own < count ? key_of(p, first + own) : ~0ull;
  for (int width = 2; width < 2 * count; width *= 2) {
    for (int step = width / 2; step > 0; step /= 2) {
      __syncthreads();
      const int other = own ^ step;
      if (own < other) {
        const u64 low = keys[own], high = keys[other];
        if ((low > high) == ((own & width) == 0)) {
          keys[own] = high;
          keys[other] = low;
        }
      }
    }
  }
  __syncthreads();
  if (own < count) to[first + own] = static_cast<int>(keys[own]);
  __syncthreads();
}

// Merges neighbouring sorted runs of `width` sequences: a sequence's rank is its own place and its rank in the other run.
__device__ __forceinline__ void merge_runs(const WorkListParams& p, const int* from, int* to, int width) {
  for (int i = threadIdx.x; i < p.num_seqs; i += kThreads) {
    const int run = i / width, other = min((run ^ 1) * width, p.num_seqs), seq = from[i];
    const u64 key = key_of(p, seq);
    int low = other, high = min(other + width, p.num_seqs);
    while (low < high) {
      const int middle = (low + high) / 2;
      if (key_of(p, from[middle]) < key) low = middle + 1;
      else high = middle;
    }
    to[run / 2 * 2 * width + i % width + low - other] = seq;
  }
  __syncthreads();
}

// order[rank] = sequence: runs of kThreads, merged in pairs. The workspace of the sums serves as the second array.
__device__ __forceinline__ void sort_sequences(const WorkListParams& p) {
  int *to = p.order, *spare = p.tile_indptr;
  for (int width = kThreads; width < p.num_seqs; width *= 2) swap(to, spare);
  for (int first = 0; first < p.num_seqs; first += kThreads) sort_run(p, first, min(kThreads, p.num_seqs - first), to);
  for (int width = kThreads; width < p.num_seqs; width *= 2) {
    merge_runs(p, to, spare, width);
    swap(to, spare);
  }
}

__device__ __forceinline__ void sum_tiles(const WorkListParams& p) {
  int before = 0;  // tiles of all ranks of earlier rounds
  if (threadIdx.x == 0) p.tile_indptr[0] = 0;
  for (int base = 0; base < p.num_seqs; base += kThreads) {
    const int rank = base + threadIdx.x;
    int total;
    const int sum = before + cta_running_sum(rank < p.num_seqs ? row_tiles_of(p, p.order[rank]) : 0, total);
    if (rank < p.num_seqs) p.tile_indptr[rank + 1] = sum;
    before += total;
  }
}

// The last rank whose row tiles begin at or before one.
__device__ __forceinline__ int rank_of(const WorkListParams& p, int row_tile) {
  int low = 0, high = p.num_seqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.tile_indptr[middle] <= row_tile) low = middle;
    else high = middle;
  }
  return low;
}

__device__ __forceinline__ void list_parts(const WorkListParams& p, int per_part) {
  const int num_tiles = min(p.tile_indptr[p.num_seqs], p.max_tiles);
  int items = 0, slots = 0;  // of earlier rounds
  for (int base = 0; base < num_tiles; base += kThreads) {
    const int at = base + threadIdx.x;
    int seq = 0, row_tile = 0, parts = 0, total;
    if (at < num_tiles) {
      const int rank = rank_of(p, at);
      seq = p.order[rank];
      row_tile = p.tile_indptr[rank + 1] - 1 - at;
      parts = parts_of(p, key_tiles_of(p, seq, row_tile), per_part);
    }
    const int wanted = parts > 1 ? parts : 0, first_slot = slots + cta_running_sum(wanted, total) - wanted;
    slots += total;
    if (wanted && first_slot + wanted > p.part_slots) parts = 1;
    const int first_item = items + cta_running_sum(parts, total) - parts;
    items += total;
    for (int part = 0; part < parts; ++part)
      reinterpret_cast<WorkItem*>(p.work_list)[first_item + part] = {seq, row_tile, part, parts, first_slot};
  }
  if (threadIdx.x == 0) *p.num_items = items;
}

extern "C" __global__ __launch_bounds__(kThreads) void prefill_plan(const __grid_constant__ WorkListParams p) {
  sort_sequences(p);
  sum_tiles(p);
  __syncthreads();
  list_parts(p, choose_per_part(p));
}

// Lists the row tiles of a batch for the LISTED schedule (schedule.cuh), from the lengths on the device, so that no host has to know
// them and a captured graph replays with others. One CTA of 1024 threads, in three steps with barriers between them: the order of
// the sequences, running sums of their row tiles in that order, the list.
//
// Longest first: the CTAs that start last then have the least to do. Sequences go by their keys, a sequence's tiles from its last
// rows, which see the most keys, to its first.
#include "pagedkv/attention_params.cuh"
#include "pagedkv/scan.cuh"

using namespace pagedkv;

constexpr int kThreads = 1024;

// order[rank] = sequence. Each thread counts who comes before its sequence; equal lengths stay in the order of the batch.
__device__ __forceinline__ void sort_sequences(const WorkListParams& p) {
  __shared__ int lens[kThreads];
  for (int base = 0; base < p.num_seqs; base += kThreads) {
    const int seq = base + threadIdx.x;
    const int len = seq < p.num_seqs ? p.seq_lens[seq] : 0;
    int rank = 0;
    for (int others = 0; others < p.num_seqs; others += kThreads) {
      if (others + threadIdx.x < p.num_seqs) lens[threadIdx.x] = p.seq_lens[others + threadIdx.x];
      __syncthreads();
      for (int i = 0; i < min(kThreads, p.num_seqs - others); ++i) rank += lens[i] > len || (lens[i] == len && others + i < seq);
      __syncthreads();
    }
    if (seq < p.num_seqs) p.order[rank] = seq;
  }
}

__device__ __forceinline__ void sum_tiles(const WorkListParams& p) {
  int before = 0;  // tiles of all ranks of earlier rounds
  if (threadIdx.x == 0) p.tile_indptr[0] = 0;
  for (int base = 0; base < p.num_seqs; base += kThreads) {
    const int rank = base + threadIdx.x;
    int tiles = 0;
    if (rank < p.num_seqs) {
      const int seq = p.order[rank], q_len = p.q_indptr ? p.q_indptr[seq + 1] - p.q_indptr[seq] : 1;
      tiles = ceil_div(q_len * p.group_size, p.row_tile);
    }
    int total;
    const int sum = before + cta_running_sum(tiles, total);
    if (rank < p.num_seqs) p.tile_indptr[rank + 1] = sum;
    before += total;
  }
}

extern "C" __global__ __launch_bounds__(kThreads) void prefill_plan(const __grid_constant__ WorkListParams p) {
  sort_sequences(p);
  __syncthreads();
  sum_tiles(p);
  __syncthreads();
  const int num_tiles = p.tile_indptr[p.num_seqs];
  for (int item = threadIdx.x; item < p.max_tiles; item += kThreads) {
    int seq = -1, tile = 0;
    if (item < num_tiles) {  // the last rank that begins at or before `item`
      int low = 0, high = p.num_seqs;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (p.tile_indptr[middle] <= item) low = middle;
        else high = middle;
      }
      seq = p.order[low];
      tile = p.tile_indptr[low + 1] - 1 - item;
    }
    p.work_list[2 * item] = seq;
    p.work_list[2 * item + 1] = tile;
  }
}

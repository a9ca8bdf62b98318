// Which sequence a token of contiguous K and V belongs to, and where it lies in that sequence's blocks.
#pragma once
#include "pagedkv/cache_params.cuh"
#include "pagedkv/kv.cuh"
#include "pagedkv/rows.cuh"

namespace pagedkv {

struct SequenceToken {
  int seq;
  SequenceKv kv;
  TokenPlace at;

  __device__ __forceinline__ SequenceToken(const GatherKvParams& p, i64 token)
      : seq(sequence_of(p.indptr, p.num_seqs, static_cast<int>(token))), kv(p.kv, seq) {
    const int first = p.first_positions ? p.first_positions[seq] : 0;
    at = kv.place(first + static_cast<int>(token) - p.indptr[seq]);
  }

  // The last sequence that begins at or before a token: empty ones before it begin there too.
  __device__ __forceinline__ static int sequence_of(const int* indptr, int num_seqs, int token) {
    int low = 0, high = num_seqs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (indptr[middle] <= token) low = middle;
      else high = middle;
    }
    return low;
  }
};

}  // namespace pagedkv

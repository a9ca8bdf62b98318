// Where the queries of a level of a cascade stand, counted from the level's first key: behind its keys, by as much as they stand
// behind the first key of the next level; in the last level, the last query of a sequence at its last key. A CTA per sequence.
#include "pagedkv/attention_params.cuh"
#include "pagedkv/ptx.cuh"

using namespace pagedkv;

extern "C" __global__ __launch_bounds__(128) void query_positions(const __grid_constant__ PositionParams p) {
  __shared__ int least, greatest;
  const int seq = blockIdx.x, seq_len = p.seq_lens[seq];
  const int first = p.q_indptr ? p.q_indptr[seq] : seq, end = p.q_indptr ? p.q_indptr[seq + 1] : seq + 1;
  const auto position_of = [&](int query) { return seq_len + (p.below ? p.below[query] : query - end); };
  if (threadIdx.x == 0) least = greatest = first < end ? position_of(first) : 0;
  __syncthreads();
  for (int query = first + threadIdx.x; query < end; query += blockDim.x) {
    const int position = position_of(query);
    p.q_positions[query] = position;
    atomicMin(&least, position);
    atomicMax(&greatest, position);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.position_spans[2 * seq] = least;
    p.position_spans[2 * seq + 1] = greatest;
  }
}

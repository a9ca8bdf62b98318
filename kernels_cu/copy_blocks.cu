// Copies whole blocks, of one arena or from one to another, as many as there are in one launch: copy-on-write, and the staging of
// moves between device memory and pinned host memory. Blocks are bytes here.
#include "pagedkv/block_list.cuh"

using namespace pagedkv;

extern "C" __global__ __launch_bounds__(kChunkThreads) void copy_blocks(const __grid_constant__ CopyBlocksParams p) {
  const i64 block_vecs = p.block_bytes / VEC_BYTES;
  for_each_chunk(p.num_blocks, block_vecs, [&](int i, i64 first) {
    const i64 source = listed_block(p.source_ids, p.id_stride, i, p.source_blocks);
    const i64 target = listed_block(p.target_ids, p.id_stride, i, p.target_blocks);
    if (source < 0 || target < 0) return;
    const ByteVec* from = reinterpret_cast<const ByteVec*>(static_cast<const u8*>(p.source) + source * p.source_stride);
    ByteVec* to = reinterpret_cast<ByteVec*>(static_cast<u8*>(p.target) + target * p.target_stride);
    ByteVec vecs[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const i64 at = first + j * kChunkThreads + threadIdx.x;
      if (at < block_vecs) vecs[j] = from[at];
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const i64 at = first + j * kChunkThreads + threadIdx.x;
      if (at < block_vecs) to[at] = vecs[j];
    }
  });
}

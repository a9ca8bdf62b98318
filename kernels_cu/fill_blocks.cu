// Fills whole blocks with one byte: zeros, or 0xff, which is NaN in every floating-point type that KV has.
#include "pagedkv/block_list.cuh"

using namespace pagedkv;

extern "C" __global__ __launch_bounds__(kChunkThreads) void fill_blocks(const __grid_constant__ FillBlocksParams p) {
  const i64 block_vecs = p.block_bytes / VEC_BYTES;
  const uint4 pattern = make_uint4(p.value, p.value, p.value, p.value);
  const ByteVec vec = *reinterpret_cast<const ByteVec*>(&pattern);
  for_each_chunk(p.num_blocks, block_vecs, [&](int i, i64 first) {
    const i64 block = listed_block(p.ids, p.id_stride, i, p.arena_blocks);
    if (block < 0) return;
    ByteVec* to = reinterpret_cast<ByteVec*>(static_cast<u8*>(p.arena) + block * p.stride);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const i64 at = first + j * kChunkThreads + threadIdx.x;
      if (at < block_vecs) to[at] = vec;
    }
  });
}

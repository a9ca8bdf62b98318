// Whole blocks as bytes: lists of block ids, and the work of a list in chunks. A chunk is kChunkVecs vectors of one block; the CTAs
// of the grid take chunks in turn, however many CTAs there are.
#pragma once
#include "pagedkv/cache_params.cuh"

namespace pagedkv {

constexpr int kChunkThreads = 256, kInFlight = 4;  // loads of a thread before its first store
constexpr int kChunkVecs = kChunkThreads * kInFlight;

template <int kBytes> struct BytesVec;
template <> struct BytesVec<1> { using Type = u8; };
template <> struct BytesVec<2> { using Type = u16; };
template <> struct BytesVec<4> { using Type = u32; };
template <> struct BytesVec<8> { using Type = uint2; };
template <> struct BytesVec<16> { using Type = uint4; };
using ByteVec = BytesVec<VEC_BYTES>::Type;

// Id of entry i of a list; without a list, i itself.
__device__ __forceinline__ i64 listed_block(const void* ids, i64 id_stride, int i, i64 num_blocks) {
  const i64 block = ids ? static_cast<const INDEX_TYPE*>(ids)[i * id_stride] : i;
#if DEBUG
  if (block >= num_blocks) __trap();
#endif
  return block;
}

// Calls body(i, first) for this CTA's chunks: entry i of the list, vectors first .. first + kChunkVecs - 1 of its block.
template <class Body> __device__ __forceinline__ void for_each_chunk(int num_blocks, i64 block_vecs, const Body& body) {
  const i64 per_block = ceil_div<i64>(block_vecs, kChunkVecs);
  for (i64 chunk = blockIdx.x; chunk < num_blocks * per_block; chunk += gridDim.x) {
    const i64 i = chunk / per_block;
    body(static_cast<int>(i), (chunk - i * per_block) * kChunkVecs);
  }
}

}  // namespace pagedkv

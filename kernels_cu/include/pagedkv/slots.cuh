// Where a slot's rows lie, for kernels that write the cache. KvParams points to constants, for the attention kernels' sake; here
// it is the destination.
#pragma once
#include "pagedkv/kv.cuh"

namespace pagedkv {

// A slot that is not negative. 64 bits: there can be more slots than an int counts.
__device__ __forceinline__ TokenPlace place_of_slot(const KvParams& p, i64 slot) {
#if DEBUG
  if (slot >= static_cast<i64>(p.num_blocks) * p.block_size) __trap();
#endif
  const u64 block = static_cast<u64>(slot) / static_cast<u32>(p.block_size);
  return {static_cast<i64>(block), slot - static_cast<i64>(block) * p.block_size};
}

template <class T> __device__ __forceinline__ T* k_row(const KvParams& p, TokenPlace at, int kv_head) {
  const i64 element = at.block * p.k_block_stride + at.offset * p.k_token_stride + kv_head * p.k_head_stride;
  return static_cast<T*>(const_cast<void*>(p.k)) + element;
}
template <class T> __device__ __forceinline__ T* v_row(const KvParams& p, TokenPlace at, int kv_head) {
  const i64 element = at.block * p.v_block_stride + at.offset * p.v_token_stride + kv_head * p.v_head_stride;
  return static_cast<T*>(const_cast<void*>(p.v)) + element;
}

// The scale of a row, k_scale or v_scale, by SCALE_MODE.
__device__ __forceinline__ float* scale_of(const KvParams& p, const float* scales, TokenPlace at, int kv_head) {
  i64 index = 0;
  if (SCALE_MODE == kScaleHead) index = kv_head * p.scale_head_stride;
  if (SCALE_MODE == kScaleTokenHead)
    index = at.block * p.scale_block_stride + at.offset * p.scale_token_stride + kv_head * p.scale_head_stride;
  return const_cast<float*>(scales) + index;
}

}  // namespace pagedkv

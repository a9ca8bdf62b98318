// Where a token's K and V lie: paged (PAGED=1) through the block table, or contiguous. BLOCK_SIZE is a constant, or 0: read at
// run time. SCALE_MODE: 0 none, 1 tensor, 2 head, 3 token_head.
#pragma once
#include "pagedkv/attention_params.cuh"
#include "pagedkv/dtypes.cuh"

namespace pagedkv {

enum ScaleMode { kScaleNone = 0, kScaleTensor = 1, kScaleHead = 2, kScaleTokenHead = 3 };

// Bytes that L2 may fetch at a time: more than a head's row holds would be of the next head, which another CTA reads.
constexpr int kRowL2Bytes = HEAD_DIM * sizeof(KV_TYPE) % 128 == 0 && HEAD_DIM_V * sizeof(KV_TYPE) % 128 == 0 ? 128 : 64;

struct TokenPlace {
  i64 block;   // block id; contiguous: 0
  i64 offset;  // token within the block; contiguous: token within the whole array
};

// One sequence's KV.
struct SequenceKv {
  const KvParams& p;
  const int* table;
  i64 first;  // contiguous: its first token

  __device__ __forceinline__ SequenceKv(const KvParams& params, int seq) : p(params) {
    table = PAGED ? params.block_tables + seq * params.table_stride : nullptr;
    first = PAGED ? 0 : params.kv_indptr[seq];
  }

  __device__ __forceinline__ TokenPlace place(int token) const {
    return PAGED ? place(*entry(token), token) : TokenPlace{0, first + token};
  }
  // The same in two steps, for kernels that read the table early: the table's entry for a token, and its place in that block.
  __device__ __forceinline__ const int* entry(int token) const { return table + static_cast<u32>(token) / block_size(); }
  __device__ __forceinline__ TokenPlace place(int block, int token) const {
#if DEBUG
    if (block < 0 || block >= p.num_blocks) __trap();
#endif
    return {block, static_cast<u32>(token) % block_size()};
  }

  template <class T> __device__ __forceinline__ const T* k(TokenPlace at, int kv_head) const {
    return static_cast<const T*>(p.k) + at.block * p.k_block_stride + at.offset * p.k_token_stride + kv_head * p.k_head_stride;
  }
  template <class T> __device__ __forceinline__ const T* v(TokenPlace at, int kv_head) const {
    return static_cast<const T*>(p.v) + at.block * p.v_block_stride + at.offset * p.v_token_stride + kv_head * p.v_head_stride;
  }

  __device__ __forceinline__ float k_scale(TokenPlace at, int kv_head) const { return scale(p.k_scale, at, kv_head); }
  __device__ __forceinline__ float v_scale(TokenPlace at, int kv_head) const { return scale(p.v_scale, at, kv_head); }

 private:
  __device__ __forceinline__ u32 block_size() const { return BLOCK_SIZE ? BLOCK_SIZE : p.block_size; }
  __device__ __forceinline__ float scale(const float* scales, TokenPlace at, int kv_head) const {
    if (SCALE_MODE == kScaleTensor) return scales[0];
    if (SCALE_MODE == kScaleHead) return scales[kv_head * p.scale_head_stride];
    if (SCALE_MODE == kScaleTokenHead)
      return scales[at.block * p.scale_block_stride + at.offset * p.scale_token_stride + kv_head * p.scale_head_stride];
    return 1.f;
  }
};

}  // namespace pagedkv

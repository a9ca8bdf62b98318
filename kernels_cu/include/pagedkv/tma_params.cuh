// Parameters of kernels that read K and V through the tensor memory accelerator.
#pragma once
#include "pagedkv/attention_params.cuh"

// A tensor map as the driver encodes it (CUtensorMap).
struct alignas(64) TMap {
  u64 o[16];
};

// The maps are of K and V as tensors {head_dim, num_kv_heads, block_size, num_blocks}, their boxes {128 bytes, 1, BOX_TOKENS, 1},
// swizzled by 128 bytes.
struct TmaAttentionParams {
  TMap k_map;
  TMap v_map;
  AttentionParams attention;
};

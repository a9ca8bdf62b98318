// Writes K and V of new tokens into their slots: converts, quantises, and on the way rotates K, and Q if it is given.
//
// blockIdx.y is one head: first the KV heads' K, then their V, then the query heads. A row (rows.cuh) is read whole before any of
// it is written, so Q may be rotated in place; two tokens must not have the same slot, and the cache must not be the source.
#include "pagedkv/quantise.cuh"
#include "pagedkv/rope.cuh"
#include "pagedkv/slots.cuh"

using namespace pagedkv;

// One head of K or V: to the cache, with its scale.
template <int kDim, bool kRotated>
__device__ __forceinline__ void write_row(const WriteKvParams& p, const SRC_TYPE* from, KV_TYPE* to, float* scale_at, i64 token,
                                          bool inside) {
  if constexpr (kSame<SRC_TYPE, KV_TYPE> && !kRotated) {
    copy_row<kDim>(from, to, inside);
  } else {
    Row<kDim> row;
    row.load(from, inside);
    if constexpr (kRotated) rotate(row, from, TokenRope(p.rope, token), inside);
    if constexpr (SCALE_MODE == kScaleTokenHead) {
      const float scale = __fdiv_rn(row_absmax(row), kLargest<KV_TYPE>);
      quantise(row, scale);
      if (inside && row_lane() == 0) *scale_at = scale;
    } else if constexpr (SCALE_MODE != kScaleNone) {
      quantise(row, *scale_at);
    }
    row.store(to, inside);
  }
}

// One head of Q.
__device__ __forceinline__ void rotate_query(const WriteKvParams& p, int head, i64 token, bool inside) {
  const SRC_TYPE* from = static_cast<const SRC_TYPE*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
  SRC_TYPE* to = static_cast<SRC_TYPE*>(p.q_out) + token * p.q_out_token_stride + head * p.q_out_head_stride;
  Row<HEAD_DIM> row;
  row.load(from, inside);
  rotate(row, from, TokenRope(p.rope, token), inside);
  __syncwarp();  // q_out may be q: all lanes have read their vectors and the other elements of their pairs
  row.store(to, inside);
}

extern "C" __global__ __launch_bounds__(kRowThreads) void write_kv(const __grid_constant__ WriteKvParams p) {
  const int kv_rows = p.v ? 2 * p.num_kv_heads : p.num_kv_heads;
  for_each_token(p.num_tokens, [&](i64 token, bool inside) {
    if constexpr (ROPE != kRopeNone) {
      if (static_cast<int>(blockIdx.y) >= kv_rows) return rotate_query(p, blockIdx.y - kv_rows, token, inside);
    }
    const i64 slot = p.slot_mapping[token];
    inside = inside && slot >= 0;
    const TokenPlace at = place_of_slot(p.kv, inside ? slot : 0);
    const bool is_v = static_cast<int>(blockIdx.y) >= p.num_kv_heads;
    const int head = blockIdx.y - (is_v ? p.num_kv_heads : 0);
    if (is_v) {
      const SRC_TYPE* from = static_cast<const SRC_TYPE*>(p.v) + token * p.v_token_stride + head * p.v_head_stride;
      float* scale_at = scale_of(p.kv, p.kv.v_scale, at, head);
      write_row<HEAD_DIM_V, false>(p, from, v_row<KV_TYPE>(p.kv, at, head), scale_at, token, inside);
    } else {
      const SRC_TYPE* from = static_cast<const SRC_TYPE*>(p.k) + token * p.k_token_stride + head * p.k_head_stride;
      float* scale_at = scale_of(p.kv, p.kv.k_scale, at, head);
      write_row<HEAD_DIM, ROPE != kRopeNone>(p, from, k_row<KV_TYPE>(p.kv, at, head), scale_at, token, inside);
    }
  });
}

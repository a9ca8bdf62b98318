// The inverse of gather_kv: K and V of sequences, from contiguous arrays into their blocks, bit by bit.
// blockIdx.y is one head: first the KV heads' K, then their V.
#include "pagedkv/gather.cuh"
#include "pagedkv/slots.cuh"

using namespace pagedkv;

extern "C" __global__ __launch_bounds__(kRowThreads) void scatter_kv(const __grid_constant__ GatherKvParams p) {
  for_each_token(p.num_tokens, [&](i64 token, bool inside) {
    const SequenceToken to(p, token);
    const bool is_v = static_cast<int>(blockIdx.y) >= p.num_kv_heads;
    const int head = blockIdx.y - (is_v ? p.num_kv_heads : 0);
    if (is_v) {
      const KV_TYPE* from = static_cast<const KV_TYPE*>(p.v) + token * p.v_token_stride + head * p.v_head_stride;
      copy_row<HEAD_DIM_V>(from, v_row<KV_TYPE>(p.kv, to.at, head), inside);
    } else {
      const KV_TYPE* from = static_cast<const KV_TYPE*>(p.k) + token * p.k_token_stride + head * p.k_head_stride;
      copy_row<HEAD_DIM>(from, k_row<KV_TYPE>(p.kv, to.at, head), inside);
    }
  });
}

// K and V of sequences, out of their blocks into contiguous arrays, dequantised on the way where OUT_TYPE is another type.
// blockIdx.y is one head: first the KV heads' K, then their V.
#include "pagedkv/gather.cuh"
#include "pagedkv/quantise.cuh"

using namespace pagedkv;

template <int kDim> __device__ __forceinline__ void gather_row(const KV_TYPE* from, OUT_TYPE* to, float scale, bool inside) {
  if constexpr (kSame<KV_TYPE, OUT_TYPE> && SCALE_MODE == kScaleNone) {
    copy_row<kDim>(from, to, inside);
  } else {
    Row<kDim> row;
    row.load(from, inside);
    if constexpr (SCALE_MODE != kScaleNone) row.scale(scale);
    row.store(to, inside);
  }
}

extern "C" __global__ __launch_bounds__(kRowThreads) void gather_kv(const __grid_constant__ GatherKvParams p) {
  for_each_token(p.num_tokens, [&](i64 token, bool inside) {
    const SequenceToken from(p, token);
    const bool is_v = static_cast<int>(blockIdx.y) >= p.num_kv_heads;
    const int head = blockIdx.y - (is_v ? p.num_kv_heads : 0);
    if (is_v) {
      OUT_TYPE* to = static_cast<OUT_TYPE*>(p.v) + token * p.v_token_stride + head * p.v_head_stride;
      gather_row<HEAD_DIM_V>(from.kv.v<KV_TYPE>(from.at, head), to, from.kv.v_scale(from.at, head), inside);
    } else {
      OUT_TYPE* to = static_cast<OUT_TYPE*>(p.k) + token * p.k_token_stride + head * p.k_head_stride;
      gather_row<HEAD_DIM>(from.kv.k<KV_TYPE>(from.at, head), to, from.kv.k_scale(from.at, head), inside);
    }
  });
}

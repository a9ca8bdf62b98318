// Two attention results over disjoint keys into one: of a shared prefix and of a suffix, say. blockIdx.y is the query head.
#include "pagedkv/merge.cuh"

using namespace pagedkv;

extern "C" __global__ __launch_bounds__(kRowThreads) void merge_state(const __grid_constant__ MergeStateParams p) {
  const int head = blockIdx.y;
  for_each_token(p.num_tokens, [&](i64 token, bool inside) {
    const O_TYPE* a = static_cast<const O_TYPE*>(p.o_a) + token * p.o_a_token_stride + head * p.o_a_head_stride;
    const O_TYPE* b = static_cast<const O_TYPE*>(p.o_b) + token * p.o_b_token_stride + head * p.o_b_head_stride;
    const float lse_a = inside ? p.lse_a[token * p.lse_a_token_stride + head * p.lse_a_head_stride] : neg_inf();
    const float lse_b = inside ? p.lse_b[token * p.lse_b_token_stride + head * p.lse_b_head_stride] : neg_inf();
    OUT_TYPE* to = static_cast<OUT_TYPE*>(p.o) + token * p.o_token_stride + head * p.o_head_stride;
    float* lse_to = p.lse ? p.lse + token * p.lse_token_stride + head * p.lse_head_stride : nullptr;
    merge_row(2, [&](int s) { return s ? b : a; }, [&](int s) { return s ? lse_b : lse_a; }, to, lse_to, inside);
  });
}

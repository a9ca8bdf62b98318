// Any number of attention results per token into one, the same number for each or as indptr says. blockIdx.y is the query head.
#include "pagedkv/merge.cuh"

using namespace pagedkv;

extern "C" __global__ __launch_bounds__(kRowThreads) void merge_states(const __grid_constant__ MergeStatesParams p) {
  const int head = blockIdx.y;
  for_each_token(p.num_tokens, [&](i64 token, bool inside) {
    const i64 first = p.indptr ? p.indptr[token] : 0;
    const int num_states = !inside ? 0 : p.indptr ? p.indptr[token + 1] - static_cast<int>(first) : p.num_states;
    const O_TYPE* from = static_cast<const O_TYPE*>(p.states) + token * p.states_token_stride + first * p.states_state_stride +
                         head * p.states_head_stride;
    const float* lse = p.state_lse + token * p.state_lse_token_stride + first * p.state_lse_state_stride +
                       head * p.state_lse_head_stride;
    OUT_TYPE* to = static_cast<OUT_TYPE*>(p.o) + token * p.o_token_stride + head * p.o_head_stride;
    float* lse_to = p.lse ? p.lse + token * p.lse_token_stride + head * p.lse_head_stride : nullptr;
    merge_row(num_states, [&](int s) { return from + s * p.states_state_stride; },
              [&](int s) { return lse[s * p.state_lse_state_stride]; }, to, lse_to, inside);
  });
}

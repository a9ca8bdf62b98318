// Attention variants: which keys a query sees, and what becomes of a raw score. Macros switch them: CAUSAL, WINDOW, SOFT_CAP,
// ALIBI, SINKS, MASK. Scores are in base 2 from here on (multiplied by log2 e), so that the softmax is ex2.
//
// A sequence's last query stands at its last key (bottom-right alignment): query i of q_len stands at seq_len - q_len + i. With
// POSITIONS the caller says where queries stand: in a cascade, a level's queries stand behind its keys, as far as further levels reach.
#pragma once
#include "pagedkv/attention_params.cuh"
#include "pagedkv/ptx.cuh"

namespace pagedkv {

struct KeyRange {
  int begin, end;  // begin == end where no key is seen
};

// Keys that a query at `position` may see; a custom mask can only take away from them.
__device__ __forceinline__ KeyRange visible_keys(int position, int seq_len, int window) {
  int begin = 0, end = seq_len;
  if (CAUSAL) end = min(max(position + 1, 0), seq_len);
  if (WINDOW) begin = min(max(position + 1 - window, 0), end);
  return {begin, end};
}

// The scores of one query head; constant over the keys.
struct Scorer {
  float scale_log2;  // softmax_scale * log2(e), or what stands before the soft cap
  float cap_log2;    // soft_cap * log2(e)
  float slope_log2;  // ALiBi slope * log2(e)
  int position;      // of the query
  int seq_len;
  const u8* mask;    // first byte of the sequence's bits
  i64 mask_row;      // first bit of this query's row
  KeyRange seen;

  Scorer() = default;

  // Sequence `seq` of `seq_len` keys, its query `query`, which stands at `position`, query head `qo_head`.
  __device__ __forceinline__ Scorer(const AttentionParams& p, int seq, int seq_len_, int position_, int query, int qo_head)
      : position(position_), seq_len(seq_len_) {
    scale_log2 = SOFT_CAP ? 2.f * kLog2e * p.softmax_scale / p.soft_cap : p.softmax_scale * kLog2e;
    cap_log2 = p.soft_cap * kLog2e;
    slope_log2 = ALIBI ? p.alibi_slopes[qo_head] * kLog2e : 0.f;
    mask = MASK ? p.mask + p.mask_indptr[seq] : nullptr;
    mask_row = static_cast<i64>(query) * seq_len_;
    seen = visible_keys(position, seq_len_, p.window);
  }

  // Whether the key takes part at all.
  __device__ __forceinline__ bool sees(int key) const {
    bool seen_key = seen.begin <= key && key < seen.end;
    if (MASK && seen_key) {
      const i64 bit = mask_row + key;
      seen_key = mask[bit >> 3] >> (bit & 7) & 1;
    }
    return seen_key;
  }

  // Score in base 2 of a dot product, without the mask. tanh(x) = 1 - 2 / (e^2x + 1).
  __device__ __forceinline__ float score(float dot, int key) const {
    float x = dot * scale_log2;
    if (SOFT_CAP) x = cap_log2 * (1.f - __fdividef(2.f, exp2_approx(x) + 1.f));
    if (ALIBI) x += slope_log2 * static_cast<float>(key - position);
    return x;
  }

  // The same, -inf where the key is not seen.
  __device__ __forceinline__ float operator()(float dot, int key) const {
    return sees(key) ? score(dot, key) : neg_inf();
  }
};

}  // namespace pagedkv

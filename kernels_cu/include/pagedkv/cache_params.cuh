// Parameters of the kernels that write, move and merge, by value. Python reads this file for the layout of the structs.
#pragma once
#include "pagedkv/attention_params.cuh"

// How K and Q are rotated by position (rope.cuh). All null where ROPE is 0.
struct RopeParams {
  const int* positions;    // [num_tokens]
  const float* cos;        // [max_position, ROTARY_DIM / 2]; ROPE=1 (table)
  const float* sin;        // the same
  const u64* frequencies;  // [ROTARY_DIM / 2], what a pair turns per position, in 2^-64 turns; ROPE=2 (computed)
  i64 table_stride;        // floats from one position's row to the next, of cos and sin alike
  i64 max_position;        // rows of the table; checked with DEBUG=1
};

// write_kv. Of `kv`, the cache is written, and the scales too where they are per token-head.
struct WriteKvParams {
  KvParams kv;              // block_tables and kv_indptr are null
  RopeParams rope;
  const i64* slot_mapping;  // [num_tokens] slot of each token's K and V; negative: they are written nowhere
  const void* k;            // [num_tokens, num_kv_heads, HEAD_DIM]
  const void* v;            // [num_tokens, num_kv_heads, HEAD_DIM_V]; null: K alone
  const void* q;            // [num_tokens, num_qo_heads, HEAD_DIM]; null: no Q. Q is rotated also where K is skipped
  void* q_out;              // the same shape, may be q itself
  i64 k_token_stride;       // in elements
  i64 k_head_stride;
  i64 v_token_stride;
  i64 v_head_stride;
  i64 q_token_stride;
  i64 q_head_stride;
  i64 q_out_token_stride;
  i64 q_out_head_stride;
  int num_tokens;
  int num_kv_heads;
};

// gather_kv reads the cache and writes k and v, scatter_kv the other way round.
struct GatherKvParams {
  KvParams kv;                 // kv_indptr is null
  const int* indptr;           // [num_seqs + 1] first token of each sequence in k and v
  const int* first_positions;  // [num_seqs] position of that token in its sequence; null: 0
  void* k;                     // [num_tokens, num_kv_heads, HEAD_DIM]
  void* v;                     // [num_tokens, num_kv_heads, HEAD_DIM_V]; null: K alone
  i64 k_token_stride;          // in elements
  i64 k_head_stride;
  i64 v_token_stride;
  i64 v_head_stride;
  int num_seqs;
  int num_tokens;
  int num_kv_heads;
};

// copy_blocks: block target_ids[i] becomes a copy of block source_ids[i], for i < num_blocks. Negative ids: nothing is copied.
struct CopyBlocksParams {
  const void* source;      // arena: block b begins at byte b * source_stride. Device memory, or pinned host memory
  void* target;            // arena, may be `source`: no block may then be both read and written
  const void* source_ids;  // [num_blocks] of INDEX_TYPE, id_stride apart; null: i itself
  const void* target_ids;  // the same
  i64 id_stride;           // entries from one id to the next
  i64 source_stride;       // bytes
  i64 target_stride;
  i64 block_bytes;         // a multiple of VEC_BYTES, as are the strides
  i64 source_blocks;       // blocks in each arena; checked with DEBUG=1
  i64 target_blocks;
  int num_blocks;
};

// fill_blocks: every byte of the listed blocks becomes `value`.
struct FillBlocksParams {
  void* arena;      // block b begins at byte b * stride
  const void* ids;  // [num_blocks] of INDEX_TYPE, id_stride apart; negative: nothing is filled
  i64 id_stride;
  i64 stride;
  i64 block_bytes;  // a multiple of VEC_BYTES, as is the stride
  i64 arena_blocks; // checked with DEBUG=1
  int num_blocks;
  u32 value;        // the byte four times
};

// merge_state: two attention results over disjoint keys into the result over both. Outputs may be one of the inputs.
struct MergeStateParams {
  const void* o_a;       // [num_tokens, num_heads, DIM]
  const void* o_b;       // the same
  const float* lse_a;    // [num_tokens, num_heads], natural logarithm; -inf: no key was seen, o is not read
  const float* lse_b;
  void* o;               // [num_tokens, num_heads, DIM]
  float* lse;            // [num_tokens, num_heads]; null: not wanted
  i64 o_a_token_stride;  // in elements
  i64 o_a_head_stride;
  i64 o_b_token_stride;
  i64 o_b_head_stride;
  i64 o_token_stride;
  i64 o_head_stride;
  i64 lse_a_token_stride;
  i64 lse_a_head_stride;
  i64 lse_b_token_stride;
  i64 lse_b_head_stride;
  i64 lse_token_stride;
  i64 lse_head_stride;
  int num_tokens;
};

// merge_states: any number of results per token.
struct MergeStatesParams {
  const void* states;       // [num_tokens, num_states, num_heads, DIM]; ragged: [all states, num_heads, DIM]
  const float* state_lse;   // the same without DIM
  const int* indptr;        // [num_tokens + 1] first state of each token; null: num_states each
  void* o;                  // [num_tokens, num_heads, DIM]
  float* lse;               // [num_tokens, num_heads]; null: not wanted
  i64 states_token_stride;  // in elements; ragged: 0
  i64 states_state_stride;
  i64 states_head_stride;
  i64 state_lse_token_stride;
  i64 state_lse_state_stride;
  i64 state_lse_head_stride;
  i64 o_token_stride;
  i64 o_head_stride;
  i64 lse_token_stride;
  i64 lse_head_stride;
  int num_tokens;
  int num_states;
};

// Parameters of the attention kernels, by value. Python reads this file for the layout of the structs (kernels/params.py).
#pragma once
#include "pagedkv/base.cuh"

// Where K and V lie. Strides are in elements and 64-bit: a layer of a block-major pool, NHD or HND, is a strided view.
struct KvParams {
  const void* k;            // [num_blocks, block_size, num_kv_heads, head_dim]; contiguous: [num_kv_tokens, num_kv_heads, head_dim]
  const void* v;            // the same with head_dim_v
  const float* k_scale;     // SCALE_MODE tensor: [1]; head: [num_kv_heads]; token_head: [num_blocks, block_size, num_kv_heads]
  const float* v_scale;     // the same
  const int* block_tables;  // [num_seqs, table_stride], -1 where there is no block; PAGED=0: null
  const int* kv_indptr;     // [num_seqs + 1] first token of each sequence in contiguous KV; PAGED=1: null
  i64 k_block_stride;
  i64 k_token_stride;
  i64 k_head_stride;
  i64 v_block_stride;
  i64 v_token_stride;
  i64 v_head_stride;
  i64 scale_block_stride;  // in floats, of k_scale and v_scale alike; token_head only
  i64 scale_token_stride;
  i64 scale_head_stride;   // head and token_head
  i64 table_stride;        // entries from one row of block_tables to the next
  int block_size;          // tokens; read only where the macro BLOCK_SIZE is 0
  int num_blocks;          // ids outside 0..num_blocks-1 are errors: checked with DEBUG=1, see kv.cuh
};

// What a schedule needs to divide the work (schedule.cuh).
struct ScheduleParams {
  const int* unit_indptr;  // [num_seqs + 1] from the plan kernel, units per KV head; EVEN only
  float* partial_o;        // [num_slots, ROW_TILE, HEAD_DIM_V] unnormalised outputs of parts of a row tile
  float* partial_ml;       // [num_slots, ROW_TILE, 2] their running maximum (base 2) and sum
  u32* arrivals;           // EVEN [num_ctas], LISTED [num_slots]: zero before and after every launch
  int partition_tokens;    // tokens of a partition, a multiple of the tile; PARTITIONED only
  int num_partitions;      // partitions per row tile; PARTITIONED only
  const int* work_list;    // [num_items, 5] from the prefill_plan kernel, as WorkItem of schedule.cuh; LISTED only
  const int* num_items;    // [1] items of the list, each of them once per KV head; LISTED only
  u32* next_item;          // [1] zero before and after every launch; LISTED only
  int part_slots;          // slots that each KV head has for its parts; LISTED only
};

struct AttentionParams {
  KvParams kv;
  ScheduleParams schedule;
  const void* q;              // [num_tokens, num_qo_heads, HEAD_DIM]
  void* o;                    // [num_tokens, num_qo_heads, HEAD_DIM_V]
  float* lse;                 // [num_tokens, num_qo_heads], natural logarithm; null: not wanted
  const int* seq_lens;        // [num_seqs] keys of each sequence, those of this call's queries included
  const int* q_indptr;        // [num_seqs + 1] first query of each sequence; null: one query each
  const int* q_positions;     // [num_tokens] where each query stands, counted from its sequence's first key; POSITIONS only
  const int* position_spans;  // [num_seqs, 2] the least and the greatest position of each sequence's queries; POSITIONS only
  const float* alibi_slopes;  // [num_qo_heads]; ALIBI only
  const float* sinks;         // [num_qo_heads]; SINKS only
  const u8* mask;             // bits: query i of sequence s sees key j if bit i * seq_len + j from byte mask_indptr[s] is set; MASK only
  const i64* mask_indptr;     // [num_seqs + 1] in bytes; MASK only
  i64 q_token_stride;
  i64 q_head_stride;
  i64 o_token_stride;
  i64 o_head_stride;
  int num_seqs;
  int num_kv_heads;
  int window;                 // a query sees the last `window` keys up to its own position; WINDOW only
  float softmax_scale;
  float soft_cap;             // scores become soft_cap * tanh(score / soft_cap); SOFT_CAP only
};

// The plan kernel: how many units of work each sequence is.
struct PlanParams {
  const int* seq_lens;        // [num_seqs]
  const int* q_indptr;        // [num_seqs + 1]; null: one query each
  const int* position_spans;  // [num_seqs, 2] as in AttentionParams; null: a sequence's last query stands at its last key
  int* unit_indptr;           // [num_seqs + 1], written
  int num_seqs;
  int window;                 // 0: none
  int group_size;             // query heads per KV head
  int row_tile;               // rows (query, head of the group) of one row tile
  int tile_tokens;            // keys of one tile
};

// The query_positions kernel: where queries stand, counted from the first key of a level of a cascade.
struct PositionParams {
  const int* seq_lens;        // [num_seqs] keys of the level's sequences
  const int* q_indptr;        // [num_seqs + 1] first query of each; null: one query each
  const int* below;           // [num_tokens] positions counted from the first key of the next level; null: this is the last one
  int* q_positions;           // [num_tokens] written
  int* position_spans;        // [num_seqs, 2] written: the least and the greatest of each sequence
};

// The prefill_plan kernel: the row tiles of all sequences, one KV head's, in one or more parts each, as a list.
struct WorkListParams {
  const int* seq_lens;        // [num_seqs]
  const int* q_indptr;        // [num_seqs + 1]; null: one query each
  const int* position_spans;  // [num_seqs, 2] as in AttentionParams; null: a sequence's last query stands at its last key
  int* order;                 // [num_seqs] workspace: sequences by length, the longest first
  int* tile_indptr;           // [num_seqs + 1] workspace: running sum of row tiles in that order
  int* work_list;             // [max_tiles + part_slots, 5] written, as WorkItem of schedule.cuh
  int* num_items;             // [1] written
  int num_seqs;
  int max_tiles;              // >= num_tokens * group_size / row_tile + num_seqs
  int group_size;             // query heads per KV head
  int row_tile;               // rows (query, head of the group) of one row tile
  int tile_tokens;            // keys of one tile
  int causal;                 // 0 or 1
  int window;                 // 0: none
  int num_kv_heads;
  int num_ctas;               // that the GPU runs at once
  int part_slots;             // parts of divided row tiles at most
  int min_part_tiles;         // tiles of a part at least
};

// The reduce kernel of the PARTITIONED schedule.
struct ReduceParams {
  AttentionParams attention;
};

/* Paged attention on the CPU: what a call is, and what each instruction set provides.
 *
 * Pointers are the caller's; nothing here keeps one beyond a call. Strides are in elements. Everything may run in any thread.
 */
#ifndef PAGEDKV_CPU_ATTEND_H
#define PAGEDKV_CPU_ATTEND_H

#include <stddef.h>
#include <stdint.h>

enum { MOST_HEAD_DIM = 4096, MOST_BLOCK_SIZE = 256, MOST_KEYS = 1 << 30 }; /* more is refused */
enum { TILE = 128 };            /* keys of one tile at most: their scores are in the L1 cache between the two products */
enum { DIRECT_TILE_BYTES = 1 << 16 }; /* of K, and of V, in a direct task's tile: what is fetched ahead must still be in L2 when it is used */
enum { ROWS_AT_ONCE = 4 };      /* rows (query, head of the group) that share a pass over K or V */
enum { MOST_DIRECT_ROWS = 8 };  /* of one KV head: with more, K and V are converted to float32 first, once for all of them */
enum { MOST_TASK_ROWS = 64 };   /* of all heads of one direct task, */
enum { TASK_BYTES = 4096 };     /* and their K of one token, read in one go */
enum { TILED_ROWS = 128 };      /* of one tiled task, */
enum { TILED_KEYS = 64 };       /* which takes as many keys as fit in the L1 cache as floats of a usual head dim, */
enum { TILED_COLUMNS = 64 };    /* and as many of V's columns at once, because the output goes through that cache, too */

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453

typedef enum { F32, F16, BF16, I8, F8_E4M3, F8_E5M2, NUM_DTYPES } dtype_t;

/* One call. Shapes: q [num_tokens, num_kv_heads * group_size, head_dim], o [..., head_dim_v]; K and V [num_blocks, block_size,
 * num_kv_heads, head_dim(_v)], or without blocks [num_kv_tokens, ...]; their scales alike without the last axis. */
typedef struct {
    const void *q;
    void *o;
    float *lse; /* [num_tokens, num_qo_heads] contiguous, or NULL */
    const char *k, *v;
    const float *k_scale, *v_scale;
    const int32_t *tables;    /* [num_seqs, table_stride], or NULL: contiguous */
    const int32_t *kv_indptr; /* [num_seqs + 1], of contiguous KV */
    const int32_t *seq_lens, *q_indptr; /* q_indptr NULL: one query each */
    const int32_t *q_positions; /* [num_tokens], counted from key 0; NULL: a sequence's last query stands at its last key */
    const float *slopes, *sinks; /* [num_qo_heads], or NULL */
    const uint8_t *mask; /* bits, or NULL */
    const int64_t *mask_indptr;
    int64_t q_token, q_head, o_token, o_head;
    int64_t k_block, k_token, k_head, v_block, v_token, v_head;
    int64_t scale_block, scale_token, scale_head;
    int64_t table_stride;
    int num_seqs, num_kv_heads, group_size, head_dim, head_dim_v, block_size;
    int window; /* 0: none */
    int causal;
    int scale_per_token; /* the scales have a token axis (and a head axis); otherwise one for all, or one per head */
    float scale, soft_cap; /* soft_cap 0: none */
    dtype_t q_dtype, kv_dtype;
} call_t;

/* A piece of a call: queries first_query .. + num_queries of one sequence, some KV heads, keys begin .. end - 1. */
typedef struct {
    int seq, first_query, num_queries, first_head, num_heads, begin, end;
    int part, num_parts; /* of the keys; with more than one, the thread that finishes last joins the results */
    int direct;
    size_t partial; /* floats from the begin of the call's partial results: o [rows, head_dim_v], m [rows], l [rows] */
    int group;      /* index of the counter that the parts share */
} task_t;

/* Keys of a tile that some of four rows see: begin .. end - 1. */
typedef struct { int begin, end; } span_t;

/* Memory of one thread, for one task at a time. */
typedef struct {
    float *q, *o, *m, *l, *scores, *k, *k_panels, *v, *k_scale, *v_scale;
    span_t *spans;
    const char *k_row[2 * TILE], *v_row[TILE];
} scratch_t;

/* What an instruction set provides. Rows of a task are numbered [head][query][head of the group]. */
typedef struct {
    const char *name;
    int width; /* floats of a vector: direct tasks need head dims that are multiples of it */
    /* Unnormalised o, m and l (base 2) of a task into the scratch memory. */
    void (*run)(const call_t *, const task_t *, scratch_t *);
    void (*store)(dtype_t, const float *from, void *to, int count);
} isa_t;

extern const isa_t isa_portable;
#if defined(__x86_64__) && defined(__GNUC__)
#define PAGEDKV_X86 1
extern const isa_t isa_avx2, isa_avx512;
#endif

/* The query heads' rows of a task, and the keys that a query sees: begin .. end - 1. */
static inline int rows_of(const call_t *c, const task_t *t) { return t->num_queries * c->group_size; }

static inline int first_token(const call_t *c, int seq) { return c->q_indptr ? c->q_indptr[seq] : seq; }
static inline int queries_of(const call_t *c, int seq) { return c->q_indptr ? c->q_indptr[seq + 1] - c->q_indptr[seq] : 1; }

typedef struct { int position, begin, end; } sight_t;

static inline sight_t sight_of(const call_t *c, int seq, int query)
{
    const int seq_len = c->seq_lens[seq];
    sight_t s;
    s.position = c->q_positions ? c->q_positions[first_token(c, seq) + query] : seq_len - queries_of(c, seq) + query;
    s.end = c->causal && s.position + 1 < seq_len ? s.position + 1 : seq_len;
    if (s.end < 0)
        s.end = 0;
    s.begin = c->window && s.position >= c->window ? s.position + 1 - c->window : 0;
    if (s.begin > s.end)
        s.begin = s.end;
    return s;
}

/* Keys that some of the queries first .. first + count - 1 see lie in begin .. end - 1. */
static inline span_t span_of(const call_t *c, int seq, int first, int count)
{
    sight_t sight = sight_of(c, seq, first);
    span_t span = {sight.begin, sight.end};
    for (int i = c->q_positions ? 1 : count - 1; i < count; i++) { /* in order unless the caller says where they stand */
        sight = sight_of(c, seq, first + i);
        span.begin = sight.begin < span.begin ? sight.begin : span.begin;
        span.end = sight.end > span.end ? sight.end : span.end;
    }
    return span;
}

/* Elements from the begin of K (or V, or the scales) to a token's first head, by its strides. */
static inline int64_t place_of(const call_t *c, int seq, int token, int64_t block_stride, int64_t token_stride)
{
    if (!c->tables)
        return (int64_t)(c->kv_indptr[seq] + token) * token_stride;
    int64_t block = c->tables[seq * c->table_stride + token / c->block_size];
    return block * block_stride + (int64_t)(token % c->block_size) * token_stride;
}

/* The bit of a mask that says whether a query sees key 0. */
static inline int64_t mask_row(const call_t *c, int seq, int seq_len, int query)
{
    return 8 * c->mask_indptr[seq] + (int64_t)query * seq_len;
}

static inline int bit(const uint8_t *bits, int64_t at) { return bits[at >> 3] >> (at & 7) & 1; }

#endif

/* Attention of one task with one instruction set: included by kernels_*.c after its vectors (vec_*.h).
 *
 * Keys go tile by tile through an online softmax (Milakov and Gimelshein 2018; FlashAttention's algorithm 1), in base 2. A direct
 * task reads K and V where they lie, converts them in registers, and goes through all its heads tile by tile, so that memory is read
 * in the order of its addresses. A tiled task (many rows) first converts a tile to floats.
 */
#include "attend.h"
#include "numbers.h"

/* `call` with the number of rows as a constant. */
#define BY_ROWS(call) \
    switch (rows) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    default: call(4); break; \
    }

#define KVT float
#define LOAD load_f32
#define KIND f32
#define DTYPE F32
#include "rows.h"
#define KVT uint16_t
#define LOAD load_f16
#define KIND f16
#define DTYPE F16
#include "rows.h"
#define KVT uint16_t
#define LOAD load_bf16
#define KIND bf16
#define DTYPE BF16
#include "rows.h"
#define KVT int8_t
#define LOAD load_i8
#define KIND i8
#define DTYPE I8
#include "rows.h"

typedef void (*scores_fn)(const float *, int, const char *const *, long, int, int, float *, int, const char *const *);
typedef void (*values_fn)(const float *, const char *const *, long, int, int, float *, int, int, int, const char *const *);
typedef void (*expand_fn)(const void *, float *, int, int);

static void expand_f8(const uint8_t *row, float *to, int dim, int padded, const float *values)
{
    for (int c = 0; c < padded; c++)
        to[c] = c < dim ? values[row[c]] : 0;
}
static void expand_e4m3(const void *row, float *to, int dim, int padded) { expand_f8(row, to, dim, padded, f8_values[0]); }
static void expand_e5m2(const void *row, float *to, int dim, int padded) { expand_f8(row, to, dim, padded, f8_values[1]); }

static const scores_fn SCORES[] = {scores_f32, scores_f16, scores_bf16, scores_i8};
static const values_fn VALUES[] = {values_f32, values_f16, values_bf16, values_i8};
static const expand_fn EXPAND[] = {expand_f32, expand_f16, expand_bf16, expand_i8, expand_e4m3, expand_e5m2};

INLINE int padded(int dim) { return (dim + VW - 1) / VW * VW; }

/* 2^x; 0 below 2^-126, NaN for NaN. Degree 6 on [-1/2, 1/2]: relative error below 2e-7. */
INLINE V v_exp2(V x)
{
    V n = v_round(v_max(v_set1(-126), x)), f = v_sub(x, n), p = v_set1(1.5403530393381608e-4f);
    p = v_fma(p, f, v_set1(1.3333558146428443e-3f));
    p = v_fma(p, f, v_set1(9.6181291076284772e-3f));
    p = v_fma(p, f, v_set1(5.5504108664821580e-2f));
    p = v_fma(p, f, v_set1(2.4022650695910072e-1f));
    p = v_fma(p, f, v_set1(6.9314718055994531e-1f));
    p = v_fma(p, f, v_set1(1));
    return v_if_less(x, v_set1(-126), v_zero(), v_scale2(p, n));
}

/* tanh: by its series near 0, where the quotient would lose digits. */
INLINE V v_tanh(V x)
{
    V size = v_abs(x), square = v_mul(x, x), near = v_set1(-17.0f / 315);
    V e = v_exp2(v_mul(v_set1((float)(-2 * LOG2_E)), size));
    V far = v_div(v_sub(v_set1(1), e), v_add(v_set1(1), e));
    near = v_fma(near, square, v_set1(2.0f / 15));
    near = v_fma(near, square, v_set1(-1.0f / 3));
    near = v_fma(v_mul(near, square), x, x);
    return v_if_less(size, v_set1(0.25f), near, v_if_less(x, v_zero(), v_sub(v_zero(), far), far));
}

#include "panels.h"
#include "scales.h"

/* Turns a row's products with n keys into weights, takes them into m, l and o, and says which keys have weights. */
typedef struct {
    int begin, end;         /* of the tile's keys */
    float slope, away;      /* ALiBi, in base 2: slope * (key + away) */
    int64_t first_bit;      /* of the tile's mask, -1: no mask */
    const float *k_scale, *v_scale; /* by token, or NULL */
} row_t;

static void weigh(const call_t *c, const row_t *row, float *s, int n, float *m, float *l, float *o, int dim)
{
    const int round = (n + VW - 1) / VW * VW;
    if (row->k_scale)
        for (int t = 0; t < n; t++)
            s[t] *= row->k_scale[t];
    if (c->soft_cap) {
        const V cap = v_set1((float)(c->soft_cap * LOG2_E)), inverse = v_set1(1 / c->soft_cap);
        for (int t = 0; t < round; t += VW)
            v_store(s + t, v_mul(cap, v_tanh(v_mul(inverse, v_load(s + t)))));
    }
    if (row->slope != 0)
        for (int t = 0; t < round; t += VW)
            v_store(s + t, v_fma(v_set1(row->slope), v_add(v_iota(), v_set1((float)t + row->away)), v_load(s + t)));
    for (int t = 0; t < row->begin; t++)
        s[t] = -INFINITY;
    for (int t = row->end; t < round; t++)
        s[t] = -INFINITY;
    if (row->first_bit >= 0)
        for (int t = row->begin; t < row->end; t++)
            if (!bit(c->mask, row->first_bit + t))
                s[t] = -INFINITY;
    V most = v_load(s), sum = v_zero();
    for (int t = VW; t < round; t += VW)
        most = v_max(most, v_load(s + t));
    float top = v_hmax(most);
    if (top < *m || top != top)
        top = *m;
    const V above = v_set1(top == -INFINITY ? 0 : top);
    for (int t = 0; t < round; t += VW) {
        V weight = v_exp2(v_sub(v_load(s + t), above));
        sum = v_add(sum, weight);
        v_store(s + t, weight);
    }
    if (top > *m) {
        const float less = *m == -INFINITY ? 0 : exp2f(*m - top);
        *l *= less;
        *m = top;
        for (int d = 0; d < dim; d += VW)
            v_store(o + d, v_mul(v_set1(less), v_load(o + d)));
    }
    *l += v_hsum(sum);
    if (row->v_scale)
        for (int t = 0; t < n; t++)
            s[t] *= row->v_scale[t];
}

/* Rows that will be read soon, in the order of their addresses: head after head, or token after token where the heads
 * of a token are adjacent. */
typedef struct {
    const char *const *row;
    long head_bytes;
    int heads, tokens, token_major, token, head;
} stream_t;

INLINE stream_t stream_of(const char *const *row, long head_bytes, int heads, int tokens, int dim_bytes)
{
    return (stream_t){row, head_bytes, heads, tokens, head_bytes == dim_bytes, 0, 0};
}

/* Pointers to the next `count` rows, four to a pointer; NULL where there are none. */
static void take(stream_t *s, const char **ahead, int count)
{
    for (int i = 0; i < count; i += 4) {
        const int over = s->token >= s->tokens || s->head >= s->heads;
        ahead[i >> 2] = over ? NULL : s->row[s->token] + s->head * s->head_bytes;
        if (s->token_major) {
            for (s->head += 4; s->head >= s->heads; s->head -= s->heads)
                s->token++;
        } else if ((s->token += 4) >= s->tokens) {
            s->token = 0;
            s->head++;
        }
    }
}

/* Pointers to n tokens' first heads from a key on; the last one again up to a multiple of 16. */
static void find_rows(const call_t *c, const task_t *t, int from, int n, const char **row, const char *base, int64_t block, int64_t token)
{
    const int bytes = item_bytes(c->kv_dtype);
    if (!c->tables) {
        const char *at = base + place_of(c, t->seq, from, block, token) * bytes;
        for (int i = 0; i < n; i++, at += token * bytes)
            row[i] = at;
    } else {
        for (int i = 0; i < n;) {
            const char *at = base + place_of(c, t->seq, from + i, block, token) * bytes;
            int left = c->block_size - (from + i) % c->block_size;
            for (; left && i < n; left--, i++, at += token * bytes)
                row[i] = at;
        }
    }
    for (int i = n; i % 16; i++)
        row[i] = row[n - 1];
}

/* Q of the task's rows as floats, times the softmax scale (in base 2, unless a soft cap comes between) and K's. */
static void load_queries(const call_t *c, const task_t *t, float *q, int width)
{
    const int first = first_token(c, t->seq) + t->first_query, bytes = item_bytes(c->q_dtype);
    for (int h = 0; h < t->num_heads; h++) {
        double factor = c->scale * (c->soft_cap ? 1 : LOG2_E);
        if (c->k_scale && !c->scale_per_token)
            factor *= c->k_scale[(t->first_head + h) * c->scale_head];
        for (int i = 0; i < t->num_queries; i++)
            for (int g = 0; g < c->group_size; g++, q += width) {
                const int64_t head = (int64_t)(t->first_head + h) * c->group_size + g;
                EXPAND[c->q_dtype]((const char *)c->q + ((first + i) * c->q_token + head * c->q_head) * bytes, q, c->head_dim, width);
                for (int d = 0; d < width; d += VW)
                    v_store(q + d, v_mul(v_set1((float)factor), v_load(q + d)));
            }
    }
}

static row_t row_of(const call_t *c, const task_t *t, const sight_t *sight, int query, int qo_head, int from, int n)
{
    row_t r = {sight->begin - from, sight->end - from, 0, 0, -1, NULL, NULL};
    r.begin = r.begin < 0 ? 0 : r.begin > n ? n : r.begin;
    r.end = r.end > n ? n : r.end < r.begin ? r.begin : r.end;
    if (c->slopes) {
        r.slope = (float)(c->slopes[qo_head] * LOG2_E);
        r.away = (float)(from - sight->position);
    }
    if (c->mask)
        r.first_bit = mask_row(c, t->seq, c->seq_lens[t->seq], query) + from;
    return r;
}

/* Keys of a direct task's tile, from the numbers of one token's K (or V): a multiple of 16. Nothing fetches a part's first tile ahead,
 * so the shortest part, of SHORTEST_PART keys, has at least two; those of int8 are half as many bytes, or there were only two. */
INLINE int direct_tile(int token_numbers, int number_bytes)
{
    const int keys = DIRECT_TILE_BYTES / (number_bytes == 1 ? 2 : number_bytes) / token_numbers / 16 * 16;
    return keys < 16 ? 16 : keys > TILE / 2 ? TILE / 2 : keys;
}

static void run_direct(const call_t *c, const task_t *t, scratch_t *w)
{
    const int rows = rows_of(c, t), dim = c->head_dim, dim_v = c->head_dim_v, bytes = item_bytes(c->kv_dtype);
    const long k_head = c->k_head * bytes, v_head = c->v_head * bytes;
    const char *k = c->k + t->first_head * k_head, *v = c->v + t->first_head * v_head;
    const char *ahead[TILE / 4], **k_row = w->k_row, **next = w->k_row + TILE;
    int64_t place[TILE];
    const int tile = direct_tile(t->num_heads * (dim > dim_v ? dim : dim_v), bytes);
    for (int from = t->begin, n; from < t->end; from += n) {
        n = t->end - from < tile ? t->end - from : tile;
        const int later = from + n, more = t->end - later < tile ? t->end - later : tile;
        if (from == t->begin)
            find_rows(c, t, from, n, k_row, k, c->k_block, c->k_token);
        find_rows(c, t, from, n, w->v_row, v, c->v_block, c->v_token);
        if (c->scale_per_token) {
            find_scales(c, t, from, n, place);
            fetch_scales(c, t, place, n);
        }
        if (more > 0)
            find_rows(c, t, later, more, next, k, c->k_block, c->k_token);
        stream_t soon = stream_of(w->v_row, v_head, t->num_heads, n, dim_v * bytes);
        for (int h = 0; h < t->num_heads; h++) {
            take(&soon, ahead, (n + 15) & ~15);
            for (int r = 0; r < rows; r += ROWS_AT_ONCE)
                SCORES[c->kv_dtype](w->q + (size_t)(h * rows + r) * dim, dim, k_row, h * k_head, dim,
                                    rows - r < ROWS_AT_ONCE ? rows - r : ROWS_AT_ONCE, w->scores + (size_t)(h * rows + r) * TILE, n,
                                    r || dim != dim_v ? NULL : ahead);
        }
        for (int h = 0; h < t->num_heads; h++) {
            if (c->scale_per_token) {
                take_scales(c, place, n, t->first_head + h, w->k_scale, c->k_scale);
                take_scales(c, place, n, t->first_head + h, w->v_scale, c->v_scale);
            }
            for (int r = 0; r < rows; r++) {
                const int query = t->first_query + r / c->group_size, at = h * rows + r;
                const sight_t sight = sight_of(c, t->seq, query);
                row_t row = row_of(c, t, &sight, query, (t->first_head + h) * c->group_size + r % c->group_size, from, n);
                if (c->scale_per_token)
                    row.k_scale = w->k_scale, row.v_scale = w->v_scale;
                weigh(c, &row, w->scores + (size_t)at * TILE, n, w->m + at, w->l + at, w->o + (size_t)at * dim_v, dim_v);
            }
        }
        soon = stream_of(next, k_head, t->num_heads, more > 0 ? more : 0, dim * bytes);
        for (int h = 0; h < t->num_heads; h++) {
            take(&soon, ahead, (n + 3) & ~3);
            for (int r = 0; r < rows; r += ROWS_AT_ONCE)
                VALUES[c->kv_dtype](w->scores + (size_t)(h * rows + r) * TILE, w->v_row, h * v_head, dim_v,
                                    rows - r < ROWS_AT_ONCE ? rows - r : ROWS_AT_ONCE, w->o + (size_t)(h * rows + r) * dim_v, dim_v, 0, n,
                                    r || dim != dim_v ? NULL : ahead);
        }
        const char **other = k_row;
        k_row = next;
        next = other;
    }
}

static void run_tiled(const call_t *c, const task_t *t, scratch_t *w)
{
    const int rows = rows_of(c, t), dim = padded(c->head_dim), dim_v = padded(c->head_dim_v), bytes = item_bytes(c->kv_dtype);
    const int head = t->first_head;
    const int k_lies = c->kv_dtype == F32 && dim == c->head_dim, v_lies = c->kv_dtype == F32 && dim_v == c->head_dim_v;
    int64_t place[TILE];
    for (int from = t->begin, n; from < t->end; from += n) {
        n = t->end - from < TILED_KEYS ? t->end - from : TILED_KEYS;
        find_rows(c, t, from, n, w->k_row, c->k + c->k_head * head * bytes, c->k_block, c->k_token);
        find_rows(c, t, from, n, w->v_row, c->v + c->v_head * head * bytes, c->v_block, c->v_token);
        for (int i = 0; i < n && !k_lies; i++) {
            EXPAND[c->kv_dtype](w->k_row[i], w->k + (size_t)i * dim, c->head_dim, dim);
            w->k_row[i] = (const char *)(w->k + (size_t)i * dim);
        }
        for (int i = 0; i < n && !v_lies; i++) {
            EXPAND[c->kv_dtype](w->v_row[i], w->v + (size_t)i * dim_v, c->head_dim_v, dim_v);
            w->v_row[i] = (const char *)(w->v + (size_t)i * dim_v);
        }
        for (int i = n; i % 16; i++)
            w->k_row[i] = w->k_row[n - 1];
        turn_keys((const float *const *)w->k_row, w->k_panels, dim, (n + VW - 1) / VW * VW);
        if (c->scale_per_token) {
            find_scales(c, t, from, n, place);
            take_scales(c, place, n, head, w->k_scale, c->k_scale);
            take_scales(c, place, n, head, w->v_scale, c->v_scale);
        }
        /* All rows with K, then all rows with V: each of the two stays in the L1 cache meanwhile. */
        for (int r0 = 0, count; r0 < rows; r0 += count) {
            row_t some[ROWS_AT_ONCE];
            span_t *span = &w->spans[r0 / ROWS_AT_ONCE];
            count = rows - r0 < ROWS_AT_ONCE ? rows - r0 : ROWS_AT_ONCE;
            *span = (span_t){n, 0};
            for (int r = r0; r < r0 + count; r++) {
                const int query = t->first_query + r / c->group_size;
                const sight_t sight = sight_of(c, t->seq, query);
                row_t *row = &some[r - r0];
                *row = row_of(c, t, &sight, query, head * c->group_size + r % c->group_size, from, n);
                if (row->begin < row->end) {
                    span->begin = row->begin < span->begin ? row->begin : span->begin;
                    span->end = row->end > span->end ? row->end : span->end;
                }
            }
            if (span->begin >= span->end)
                continue;
            float *scores = w->scores + (size_t)r0 * TILE;
            panel_scores(w->q + (size_t)r0 * dim, dim, w->k_panels, count, scores, span->begin, span->end);
            for (int r = r0; r < r0 + count; r++) {
                row_t *row = &some[r - r0];
                if (c->scale_per_token)
                    row->k_scale = w->k_scale, row->v_scale = w->v_scale;
                weigh(c, row, scores + (size_t)(r - r0) * TILE, span->end, w->m + r, w->l + r, w->o + (size_t)r * dim_v, dim_v);
            }
        }
        for (int first = 0; first < dim_v; first += TILED_COLUMNS)
            for (int r0 = 0; r0 < rows; r0 += ROWS_AT_ONCE) {
                const span_t *span = &w->spans[r0 / ROWS_AT_ONCE];
                if (span->begin < span->end)
                    panel_values(w->scores + (size_t)r0 * TILE, w->v_row, first, dim_v - first < TILED_COLUMNS ? dim_v : first + TILED_COLUMNS,
                                 rows - r0 < ROWS_AT_ONCE ? rows - r0 : ROWS_AT_ONCE, w->o + (size_t)r0 * dim_v, dim_v, span->begin,
                                 span->end);
            }
    }
}

static void run(const call_t *c, const task_t *t, scratch_t *w)
{
    const int total = t->num_heads * rows_of(c, t), dim = padded(c->head_dim), dim_v = padded(c->head_dim_v);
    load_queries(c, t, w->q, dim);
    for (int i = 0; i < total; i++) {
        w->m[i] = -INFINITY;
        w->l[i] = 0;
    }
    memset(w->o, 0, (size_t)total * dim_v * sizeof(float));
    (t->direct ? run_direct : run_tiled)(c, t, w);
}

static void store(dtype_t dtype, const float *from, void *to, int count)
{
    int c = 0;
    for (; c + VW <= count; c += VW) {
        if (dtype == F32)
            v_store((float *)to + c, v_load(from + c));
        else if (dtype == F16)
            store_f16((uint16_t *)to + c, v_load(from + c));
        else
            store_bf16((uint16_t *)to + c, v_load(from + c));
    }
    for (; c < count; c++)
        put_scalar(dtype, from[c], to, c);
}

#define ISA_NAME_(isa) isa_##isa
#define ISA_NAME(isa) ISA_NAME_(isa)
#define TEXT_(isa) #isa
#define TEXT(isa) TEXT_(isa)
const isa_t ISA_NAME(ISA) = {TEXT(ISA), VW, run, store};

/* One call: cut into tasks by the lengths alone, run on threads, parts joined in order. So the bits are the same for any number of
 * threads, and for a sequence alone or in a batch. Rows in which something infinite or NaN came up are computed again, slowly, with
 * the reference's rules. */
#include "attend_call.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "threads.h"

enum { SHORTEST_PART = 128, LONGEST_SHORT = 512, PART = 512, MOST_PARTS = 32 };
enum { KEPT_MEMORY = 4 };            /* calls' memory that waits for the next one */
enum { BYTES_PER_THREAD = 1 << 16 }; /* of K and V: less is not worth waking a thread */

/* What a call needs beside its arguments; kept for the next call. */
typedef struct memory {
    struct memory *other;
    size_t task_room, float_room, scratch_bytes;
    task_t *tasks;
    float *partials;
    _Atomic int *left; /* parts of a group that are not finished */
    size_t group_room;
    int scratch_room;
    scratch_t **scratch; /* one for each thread, made by the thread */
} memory_t;

typedef struct {
    const call_t *call;
    const isa_t *isa;
    memory_t *memory;
    long num_tasks;
    size_t num_floats, most_rows;
    int num_groups;
    _Atomic int out_of_memory;
} running_t;

static memory_t *kept;
static int num_kept;
static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;

/* A fork waits for the lock, so that the child does not inherit one that no thread of its own would release. */
static void before_fork(void) { pthread_mutex_lock(&keeping); }
static void after_fork(void) { pthread_mutex_unlock(&keeping); }
__attribute__((constructor)) static void expect_forks(void) { pthread_atfork(before_fork, after_fork, after_fork); }

static memory_t *take_memory(void)
{
    pthread_mutex_lock(&keeping);
    memory_t *m = kept;
    if (m) {
        kept = m->other;
        num_kept--;
    }
    pthread_mutex_unlock(&keeping);
    return m ? m : calloc(1, sizeof *m);
}

static void drop_memory(memory_t *m)
{
    for (int i = 0; i < m->scratch_room; i++)
        free(m->scratch[i] ? (char *)m->scratch[i] - 64 : NULL);
    free(m->scratch);
    free(m->tasks);
    free(m->partials);
    free((void *)m->left);
    free(m);
}

static void give_back(memory_t *m)
{
    pthread_mutex_lock(&keeping);
    const int room = num_kept < KEPT_MEMORY;
    if (room) {
        m->other = kept;
        kept = m;
        num_kept++;
    }
    pthread_mutex_unlock(&keeping);
    if (!room)
        drop_memory(m);
}

/* At least `wanted` items of a size; the old ones are not kept unless `keep`. */
static int grow(void **array, size_t *room, size_t wanted, size_t bytes, int keep)
{
    if (wanted <= *room)
        return 1;
    size_t more = wanted + wanted / 2;
    void *grown;
    if (keep) {
        grown = realloc(*array, more * bytes);
    } else {
        free(*array);
        *array = NULL;
        *room = 0;
        grown = malloc(more * bytes);
    }
    if (!grown)
        return 0;
    *array = grown;
    *room = more;
    return 1;
}

static int up(int n, int step) { return (n + step - 1) / step * step; }

/* Keys of a part: by the sequence's own length alone. */
static int part_of(int keys)
{
    if (keys <= LONGEST_SHORT)
        return SHORTEST_PART;
    if (keys <= 4 * LONGEST_SHORT)
        return 2 * SHORTEST_PART;
    const int part = up((keys + MOST_PARTS - 1) / MOST_PARTS, TILE);
    return part > PART ? part : PART;
}

static int add_task(running_t *r, task_t task)
{
    memory_t *m = r->memory;
    if (!grow((void **)&m->tasks, &m->task_room, (size_t)r->num_tasks + 1, sizeof task, 1))
        return 0;
    const size_t rows = (size_t)task.num_heads * rows_of(r->call, &task);
    if (rows > r->most_rows)
        r->most_rows = rows;
    if (task.num_parts > 1) {
        task.partial = r->num_floats;
        r->num_floats += rows * ((size_t)r->call->head_dim_v + 2);
    }
    m->tasks[r->num_tasks++] = task;
    return 1;
}

static int can_be_direct(const call_t *c, const isa_t *isa)
{
    return c->kv_dtype <= I8 && c->head_dim % isa->width == 0 && c->head_dim_v % isa->width == 0;
}

static int cut_sequence(running_t *r, int seq)
{
    const call_t *c = r->call;
    const int q_len = queries_of(c, seq);
    if (q_len <= 0)
        return 1;
    const int rows = q_len * c->group_size;
    const int direct = rows <= MOST_DIRECT_ROWS && can_be_direct(c, r->isa);
    const int tile = direct || q_len * c->group_size <= TILED_ROWS ? q_len : TILED_ROWS / c->group_size ? TILED_ROWS / c->group_size : 1;
    int heads = direct ? MOST_TASK_ROWS / rows : 1;
    const int at_once = TASK_BYTES / (c->head_dim * item_bytes(c->kv_dtype));
    if (heads > at_once)
        heads = at_once > 1 ? at_once : 1;
    heads = heads < c->num_kv_heads ? heads : c->num_kv_heads;
    for (int first = (q_len - 1) / tile * tile; first >= 0; first -= tile) { /* the longest first */
        const int count = q_len - first < tile ? q_len - first : tile;
        const span_t seen = span_of(c, seq, first, count);
        const int keys = seen.end > seen.begin ? seen.end - seen.begin : 0;
        const int part = rows <= TILED_ROWS ? part_of(keys) : keys;
        const int parts = keys ? (keys + part - 1) / part : 1;
        for (int head = 0; head < c->num_kv_heads; head += heads) {
            const int group = r->num_groups++;
            for (int p = 0; p < parts; p++) {
                const int from = seen.begin + p * part, until = p + 1 < parts ? from + part : seen.begin + keys;
                task_t task = {seq, first, count, head, c->num_kv_heads - head < heads ? c->num_kv_heads - head : heads,
                               from, until, p, parts, direct, 0, group};
                if (!add_task(r, task))
                    return 0;
            }
        }
    }
    return 1;
}

static scratch_t *scratch_of(running_t *r, int worker)
{
    const call_t *c = r->call;
    const size_t dim = up(c->head_dim, 16), dim_v = up(c->head_dim_v, 16), rows = r->most_rows;
    const size_t floats[] = {rows * dim, rows * dim_v, rows, rows, rows * TILE, TILE * dim, TILE * dim, TILE * dim_v, TILE, TILE, 2 * (rows / ROWS_AT_ONCE + 1)};
    size_t total = up(sizeof(scratch_t), 64);
    for (int i = 0; i < 11; i++)
        total += (floats[i] * sizeof(float) + 63) / 64 * 64;
    scratch_t *w = r->memory->scratch[worker];
    if (!w || *(size_t *)((char *)w - 64) < total) {
        if (w)
            free((char *)w - 64);
        char *raw = aligned_alloc(64, (total + 64 + 63) / 64 * 64);
        r->memory->scratch[worker] = NULL;
        if (!raw)
            return NULL;
        *(size_t *)raw = total;
        w = (scratch_t *)(raw + 64);
        r->memory->scratch[worker] = w;
    }
    char *at = (char *)w + up(sizeof(scratch_t), 64);
    float **places[] = {&w->q, &w->o, &w->m, &w->l, &w->scores, &w->k, &w->k_panels, &w->v, &w->k_scale, &w->v_scale, (float **)&w->spans};
    for (int i = 0; i < 11; i++) {
        *places[i] = (float *)at;
        at += (floats[i] * sizeof(float) + 63) / 64 * 64;
    }
    return w;
}

/* The reference's rules in float64 for one row: weights of 0 silence even infinite values; NaN spreads. */
static float compute_again(const call_t *c, int seq, int query, int qo_head, float *o)
{
    const int seq_len = c->seq_lens[seq], head = qo_head / c->group_size;
    const sight_t sight = sight_of(c, seq, query);
    const int64_t q0 = (first_token(c, seq) + query) * c->q_token + qo_head * c->q_head;
    const double slope = c->slopes ? c->slopes[qo_head] : 0, sink = c->sinks ? c->sinks[qo_head] : -INFINITY;
    double top = sink, total = 0;
    double *sum = calloc((size_t)c->head_dim_v, sizeof *sum), *score = malloc((size_t)(sight.end - sight.begin + 1) * sizeof *score);
    if (!sum || !score) {
        free(sum);
        free(score);
        return NAN;
    }
    for (int t = sight.begin; t < sight.end; t++) {
        double *s = &score[t - sight.begin];
        *s = -INFINITY;
        if (c->mask && !bit(c->mask, mask_row(c, seq, seq_len, query) + t))
            continue;
        const int64_t k0 = place_of(c, seq, t, c->k_block, c->k_token) + head * c->k_head;
        double dot = 0, scale = 1;
        if (c->k_scale)
            scale = c->k_scale[(c->scale_per_token ? place_of(c, seq, t, c->scale_block, c->scale_token) : 0) + head * c->scale_head];
        for (int d = 0; d < c->head_dim; d++)
            dot += (double)scalar_of(c->q_dtype, c->q, q0 + d) * (scale * scalar_of(c->kv_dtype, c->k, k0 + d));
        *s = c->scale * dot;
        if (c->soft_cap)
            *s = c->soft_cap * tanh(*s / c->soft_cap);
        *s += slope * (t - sight.position);
        if (!(*s <= top) && top == top)
            top = *s;
    }
    const double above = top == -INFINITY ? 0 : top;
    for (int t = sight.begin; t < sight.end; t++) {
        const double weight = exp(score[t - sight.begin] - above);
        total += weight;
        if (weight == 0)
            continue;
        const int64_t v0 = place_of(c, seq, t, c->v_block, c->v_token) + head * c->v_head;
        double scale = 1;
        if (c->v_scale)
            scale = c->v_scale[(c->scale_per_token ? place_of(c, seq, t, c->scale_block, c->scale_token) : 0) + head * c->scale_head];
        for (int d = 0; d < c->head_dim_v; d++)
            sum[d] += weight * (scale * scalar_of(c->kv_dtype, c->v, v0 + d));
    }
    total += exp(sink - above);
    for (int d = 0; d < c->head_dim_v; d++)
        o[d] = total == 0 ? 0 : (float)(sum[d] / total);
    free(sum);
    free(score);
    return total == 0 ? -INFINITY : (float)(top + log(total));
}

/* A row's result, to where it belongs. `o` is not normalised, and is used up. */
static void finish_row(running_t *r, const task_t *t, int row, float *o, float m, float l)
{
    const call_t *c = r->call;
    const int rows = rows_of(c, t), query = t->first_query + row % rows / c->group_size;
    const int head = t->first_head + row / rows, qo_head = head * c->group_size + row % c->group_size;
    const int64_t token = first_token(c, t->seq) + query, dim = c->head_dim_v;
    double factor = 1;
    /* Sums of keys that are there but weigh nothing: their products may have overflowed. */
    const sight_t sight = m == -INFINITY ? sight_of(c, t->seq, query) : (sight_t){0, 0, 0};
    const int lost = sight.begin < sight.end;
    if (c->sinks && c->sinks[qo_head] > -INFINITY) {
        const float sink = (float)(c->sinks[qo_head] * LOG2_E), top = m > sink ? m : sink;
        const float mine = m == -INFINITY ? 0 : exp2f(m - top);
        l = l * mine + exp2f(sink - top);
        factor = mine;
        m = top;
    }
    if (c->v_scale && !c->scale_per_token)
        factor *= c->v_scale[head * c->scale_head];
    const float by = l == 0 ? 0 : (float)(factor / l);
    float odd = l * 0;
    for (int64_t d = 0; d < dim; d++) {
        o[d] *= by;
        odd += o[d] * 0; /* NaN if anything is infinite or NaN */
    }
    float lse = l == 0 ? -INFINITY : (float)(LN_2 * ((double)m + log2((double)l)));
    if (odd != 0 || lse == INFINITY || lost)
        lse = compute_again(c, t->seq, query, qo_head, o);
    r->isa->store(c->q_dtype, o, (char *)c->o + (token * c->o_token + qo_head * c->o_head) * item_bytes(c->q_dtype), (int)dim);
    if (c->lse)
        c->lse[token * c->num_kv_heads * c->group_size + qo_head] = lse;
}

static void join_parts(running_t *r, const task_t *last)
{
    const task_t *first = last - last->part;
    const int total = last->num_heads * rows_of(r->call, last), dim = r->call->head_dim_v;
    const float *base = r->memory->partials;
    const size_t apart = (size_t)total * (dim + 2);
    for (int row = 0; row < total; row++) {
        const float *part = base + first->partial;
        float top = -INFINITY, l = 0, o[MOST_HEAD_DIM];
        for (int p = 0; p < last->num_parts; p++) {
            const float m = part[p * apart + (size_t)total * dim + row];
            top = m > top ? m : top;
        }
        memset(o, 0, dim * sizeof *o);
        for (int p = 0; p < last->num_parts; p++) {
            const float *mine = part + p * apart;
            const float m = mine[(size_t)total * dim + row], weight = m == -INFINITY ? 0 : exp2f(m - top);
            const float sum = mine[(size_t)total * (dim + 1) + row];
            if (weight == 0 && sum == sum)
                continue;
            l += weight * sum;
            for (int d = 0; d < dim; d++)
                o[d] += weight * mine[(size_t)row * dim + d];
        }
        finish_row(r, last, row, o, top, l);
    }
}

static void run_task(void *argument, long item, int worker)
{
    running_t *r = argument;
    const call_t *c = r->call;
    const task_t *t = &r->memory->tasks[item];
    scratch_t *w = scratch_of(r, worker);
    if (!w) {
        atomic_store(&r->out_of_memory, 1);
        return;
    }
    r->isa->run(c, t, w);
    const int total = t->num_heads * rows_of(c, t), dim = c->head_dim_v, wide = up(dim, r->isa->width);
    if (t->num_parts == 1) {
        for (int row = 0; row < total; row++)
            finish_row(r, t, row, w->o + (size_t)row * wide, w->m[row], w->l[row]);
        return;
    }
    float *part = r->memory->partials + t->partial;
    for (int row = 0; row < total; row++)
        memcpy(part + (size_t)row * dim, w->o + (size_t)row * wide, dim * sizeof(float));
    memcpy(part + (size_t)total * dim, w->m, total * sizeof(float));
    memcpy(part + (size_t)total * (dim + 1), w->l, total * sizeof(float));
    if (atomic_fetch_sub(&r->memory->left[t->group], 1) == 1)
        join_parts(r, t);
}

static int useful_threads(const call_t *c, int threads)
{
    double keys = 0;
    for (int seq = 0; seq < c->num_seqs; seq++)
        keys += (double)c->seq_lens[seq] * ((queries_of(c, seq) + 7) / 8);
    const double bytes = keys * c->num_kv_heads * (c->head_dim + c->head_dim_v) * item_bytes(c->kv_dtype);
    const double most = bytes / BYTES_PER_THREAD;
    return most < 1 ? 1 : most < threads ? (int)most : threads;
}

int attend(const call_t *c, const isa_t *isa, int threads)
{
    running_t r = {.call = c, .isa = isa, .memory = take_memory()};
    memory_t *m = r.memory;
    int ok = m != NULL;
    for (int seq = 0; ok && seq < c->num_seqs; seq++)
        ok = cut_sequence(&r, seq);
    if (ok && r.num_tasks) {
        size_t room = (size_t)m->scratch_room;
        threads = useful_threads(c, threads);
        ok = grow((void **)&m->partials, &m->float_room, r.num_floats + 1, sizeof(float), 0);
        ok = ok && grow((void **)&m->left, &m->group_room, (size_t)r.num_groups, sizeof *m->left, 0);
        if (ok && room < (size_t)threads) {
            scratch_t **more = realloc(m->scratch, threads * sizeof *more);
            ok = more != NULL;
            if (ok) {
                memset(more + room, 0, (threads - room) * sizeof *more);
                m->scratch = more;
                m->scratch_room = threads;
            }
        }
    }
    if (ok && r.num_tasks) {
        for (long i = 0; i < r.num_tasks; i++)
            atomic_init(&m->left[m->tasks[i].group], m->tasks[i].num_parts);
        run_items(run_task, &r, r.num_tasks, threads);
        ok = !atomic_load(&r.out_of_memory);
    }
    if (m)
        give_back(m);
    return ok ? 0 : -1;
}

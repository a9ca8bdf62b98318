/* A task copies one layer's K or V of a run of blocks. Axes that lie together on both sides are copied as one piece.
 *
 * A result larger than the caches is stored past them: a plain store would first read each line that it is about to replace, half as
 * much memory traffic again.
 */
#include "gather.h"

#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { PIECE_BYTES = 1 << 18, BYTES_PER_THREAD = 1 << 18, PAST_CACHES_BYTES = 8 << 20, PASS_NUMBERS = 32 };

typedef struct {
    const gather_call_t *call;
    int64_t first_block, num_blocks, blocks_per_item, items_per_layer;
    int past_caches;
} shared_t;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__x86_64__)
static void copy_past_caches(char *to, const char *from, int64_t bytes)
{
    const int64_t lead = smaller(-(uintptr_t)to & 15, bytes);
    memcpy(to, from, (size_t)lead);
    int64_t at = lead;
    for (; at + 64 <= bytes; at += 64) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(from + at)), b = _mm_loadu_si128((const __m128i *)(from + at + 16));
        const __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32)), d = _mm_loadu_si128((const __m128i *)(from + at + 48));
        _mm_stream_si128((__m128i *)(to + at), a);
        _mm_stream_si128((__m128i *)(to + at + 16), b);
        _mm_stream_si128((__m128i *)(to + at + 32), c);
        _mm_stream_si128((__m128i *)(to + at + 48), d);
    }
    memcpy(to + at, from + at, (size_t)(bytes - at));
}
static void settle(void) { _mm_sfence(); }
#else
static void copy_past_caches(char *to, const char *from, int64_t bytes) { memcpy(to, from, (size_t)bytes); }
static void settle(void) {}
#endif

static inline void copy(char *to, const char *from, int64_t bytes, int past_caches)
{
    if (past_caches)
        copy_past_caches(to, from, bytes);
    else
        memcpy(to, from, (size_t)bytes);
}

static void copy_row(const gather_call_t *c, const gather_side_t *s, char *to, const char *from, int past_caches)
{
    if (s->to_item == c->item_bytes)
        copy(to, from, s->dim * c->item_bytes, past_caches);
    else
        for (int64_t i = 0; i < s->dim; i++)
            memcpy(to + i * s->to_item, from + i * c->item_bytes, (size_t)c->item_bytes);
}

/* One head's rows of `count` tokens where a result holds the tokens of each number together, as runtimes keep V for a plain matrix
 * product: tiles of 8 x 8 numbers of 16 bits go through registers, the rest one by one. */
static void transpose_16(char *to, int64_t to_item, const char *from, int64_t from_token, int64_t dim, int64_t count)
{
    int64_t token = 0;
#if defined(__x86_64__)
    for (; token + 8 <= count; token += 8) {
        int64_t item = 0;
        for (; item + 8 <= dim; item += 8) {
            const char *in = from + token * from_token + item * 2;
            char *out = to + item * to_item + token * 2;
            __m128i row[8], pair[8];
            for (int i = 0; i < 8; i++)
                row[i] = _mm_loadu_si128((const __m128i *)(in + i * from_token));
            for (int i = 0; i < 4; i++) {
                pair[i] = _mm_unpacklo_epi16(row[2 * i], row[2 * i + 1]);
                pair[i + 4] = _mm_unpackhi_epi16(row[2 * i], row[2 * i + 1]);
            }
            for (int half = 0; half < 2; half++) { /* items 0 to 3, then 4 to 7 */
                const __m128i *p = pair + 4 * half;
                const __m128i a = _mm_unpacklo_epi32(p[0], p[1]), b = _mm_unpacklo_epi32(p[2], p[3]);
                const __m128i c = _mm_unpackhi_epi32(p[0], p[1]), d = _mm_unpackhi_epi32(p[2], p[3]);
                char *at = out + 4 * half * to_item;
                _mm_storeu_si128((__m128i *)at, _mm_unpacklo_epi64(a, b));
                _mm_storeu_si128((__m128i *)(at + to_item), _mm_unpackhi_epi64(a, b));
                _mm_storeu_si128((__m128i *)(at + 2 * to_item), _mm_unpacklo_epi64(c, d));
                _mm_storeu_si128((__m128i *)(at + 3 * to_item), _mm_unpackhi_epi64(c, d));
            }
        }
        for (; item < dim; item++)
            for (int64_t i = token; i < token + 8; i++)
                memcpy(to + item * to_item + i * 2, from + i * from_token + item * 2, 2);
    }
#endif
    for (int64_t item = 0; item < dim; item++)
        for (int64_t i = token; i < count; i++)
            memcpy(to + item * to_item + i * 2, from + i * from_token + item * 2, 2);
}

static void transpose_32(char *to, int64_t to_item, const char *from, int64_t from_token, int64_t dim, int64_t count)
{
    for (int64_t item = 0; item < dim; item++)
        for (int64_t i = 0; i < count; i++)
            memcpy(to + item * to_item + i * 4, from + i * from_token + item * 4, 4);
}

/* `count` tokens of one block. */
static void copy_tokens(const gather_call_t *c, const gather_side_t *s, char *to, const char *from, int64_t count, int past_caches)
{
    const int64_t row = s->dim * c->item_bytes, all_heads = c->num_heads * row;
    const int rows_are_whole = s->to_item == c->item_bytes;
    const int heads_together = rows_are_whole && (c->num_heads == 1 || (s->from_head == row && s->to_head == row));
    if (heads_together && (count == 1 || (s->from_token == all_heads && s->to_token == all_heads)))
        copy(to, from, count * all_heads, past_caches);
    else if (heads_together)
        for (int64_t token = 0; token < count; token++)
            copy(to + token * s->to_token, from + token * s->from_token, all_heads, past_caches);
    else if (rows_are_whole && s->from_token == row && s->to_token == row)
        for (int64_t head = 0; head < c->num_heads; head++)
            copy(to + head * s->to_head, from + head * s->from_head, count * row, past_caches);
    else if (s->from_token >= s->from_head) /* in the order in which they are read: a cache line is fetched when its turn comes */
        for (int64_t token = 0; token < count; token++)
            for (int64_t head = 0; head < c->num_heads; head++)
                copy_row(c, s, to + head * s->to_head + token * s->to_token, from + head * s->from_head + token * s->from_token,
                         past_caches);
    else
        for (int64_t head = 0; head < c->num_heads; head++)
            for (int64_t token = 0; token < count; token++)
                copy_row(c, s, to + head * s->to_head + token * s->to_token, from + head * s->from_head + token * s->from_token,
                         past_caches);
}

static int is_transposed(const gather_call_t *c, const gather_side_t *s)
{
    return s->to_item != c->item_bytes && s->to_token == c->item_bytes && (c->item_bytes == 2 || c->item_bytes == 4);
}

static void gather_item(void *argument, long item, int worker)
{
    const shared_t *shared = argument;
    const gather_call_t *c = shared->call;
    const int64_t layer = item / shared->items_per_layer / 2, part = item % shared->items_per_layer;
    const gather_side_t *s = &c->sides[item / shared->items_per_layer % 2];
    const int64_t begin = shared->first_block + part * shared->blocks_per_item;
    const int64_t end = smaller(begin + shared->blocks_per_item, shared->first_block + shared->num_blocks);
    (void)worker;
    const int transposed = is_transposed(c, s);
    const int64_t passes = transposed ? c->num_heads * ((s->dim - 1) / PASS_NUMBERS + 1) : 1, per_head = passes / c->num_heads;
    for (int64_t pass = 0; pass < passes; pass++) /* a pass writes few rows, so their pages and lines stay at hand */
        for (int64_t block = begin; block < end; block++) {
            const int64_t first = block * c->block_size, from = first > c->start ? first : c->start;
            const int64_t count = smaller(first + c->block_size, c->stop) - from;
            char *to = s->to + layer * s->to_layer + (from - c->start) * s->to_token;
            const char *in = s->from + c->blocks[block] * s->from_block + layer * s->from_layer + (from - first) * s->from_token;
            if (!transposed) {
                copy_tokens(c, s, to, in, count, shared->past_caches);
                continue;
            }
            const int64_t head = pass / per_head, item = pass % per_head * PASS_NUMBERS;
            (c->item_bytes == 2 ? transpose_16 : transpose_32)(to + head * s->to_head + item * s->to_item, s->to_item,
                                                               in + head * s->from_head + item * c->item_bytes, s->from_token,
                                                               smaller(s->dim - item, PASS_NUMBERS), count);
        }
    if (shared->past_caches)
        settle();
}

void gather_tokens(const gather_call_t *call, gather_run_t *run, int threads)
{
    const int64_t k_dim = call->sides[0].dim, v_dim = call->sides[1].dim, longer = k_dim > v_dim ? k_dim : v_dim;
    const int64_t token_bytes = call->num_heads * call->item_bytes, block_bytes = call->block_size * token_bytes * longer;
    const int64_t bytes = call->num_layers * (call->stop - call->start) * token_bytes * (k_dim + v_dim);
    const int64_t worth = 1 + bytes / BYTES_PER_THREAD;
    shared_t shared = {.call = call, .first_block = call->start / call->block_size};
    if (!bytes)
        return;
    shared.num_blocks = (call->stop - 1) / call->block_size + 1 - shared.first_block;
    shared.blocks_per_item = block_bytes < PIECE_BYTES ? PIECE_BYTES / block_bytes : 1;
    shared.items_per_layer = (shared.num_blocks - 1) / shared.blocks_per_item + 1;
    shared.past_caches = bytes >= PAST_CACHES_BYTES;
    run(gather_item, &shared, (long)(2 * call->num_layers * shared.items_per_layer), threads < worth ? threads : (int)worth);
}

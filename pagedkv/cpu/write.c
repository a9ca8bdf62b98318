/* A task owns some slots of the cache, not some of the tokens: each slot is written by one thread, in the order of the tokens.
 * Stretches of neighbouring slots have one owner, so threads do not meet in a cache line more often than they must.
 */
#include "write.h"

enum { NEIGHBOURS_LOG2 = 4, ITEMS_PER_THREAD = 4, NUMBERS_PER_THREAD = 1 << 16 };

typedef struct {
    const write_call_t *call;
    long items;
} shared_t;

static const float LARGEST[] = {[I8] = 127, [F8_E4M3] = 448, [F8_E5M2] = 57344};

static inline long owner_of(int64_t slot, long items)
{
    const uint64_t mixed = (uint64_t)(slot >> NEIGHBOURS_LOG2) * 0x9e3779b97f4a7c15u;
    return (long)((mixed >> 32) * (uint64_t)items >> 32);
}

static inline int shorter(int64_t left) { return left < STRETCH ? (int)left : STRETCH; }

/* Of the sizes, which NaN exceeds. */
static float largest_of(const write_side_t *s, const char *from)
{
    float numbers[STRETCH];
    uint32_t most = 0;
    for (int64_t begin = 0; begin < s->dim; begin += STRETCH) {
        const int count = shorter(s->dim - begin);
        read_numbers(s->from_type, 0, from + begin * s->from_item, s->from_item, count, numbers);
        for (int i = 0; i < count; i++) {
            const uint32_t size = bits_of(numbers[i]) & 0x7fffffff;
            most = size > most ? size : most;
        }
    }
    return float_of_bits(most);
}

/* The bits of the smallest size that is rounded to infinity. */
static inline uint32_t too_large(int dtype) { return dtype == F16 ? 0x477ff000 : dtype == BF16 ? 0x7f7f8000 : 0x7f800000; }

static int overflow(const float *numbers, int count, uint32_t limit)
{
    uint32_t found = 0;
    for (int i = 0; i < count; i++) {
        const uint32_t size = bits_of(numbers[i]) & 0x7fffffff;
        found |= (size >= limit) & (size < 0x7f800000);
    }
    return (int)found;
}

/* A scale of 0 stands for zeros; an infinite one, or NaN, makes the row NaN when it is read. */
static void divide(float *numbers, int count, float by)
{
    if (by == 0)
        memset(numbers, 0, (size_t)count * sizeof *numbers);
    else
        for (int i = 0; i < count; i++)
            numbers[i] /= by;
}

static void copy_row(const write_side_t *s, const char *from, char *to)
{
    const int64_t width = width_of(s->from_type);
    if (s->from_item == width && s->to_item == width)
        memcpy(to, from, (size_t)(s->dim * width));
    else if (width == 2) /* a copy of constant length takes one instruction */
        for (int64_t i = 0; i < s->dim; i++)
            memcpy(to + i * s->to_item, from + i * s->from_item, 2);
    else
        for (int64_t i = 0; i < s->dim; i++)
            memcpy(to + i * s->to_item, from + i * s->from_item, (size_t)width);
}

static void write_row(const write_side_t *s, const char *from, char *to, char *scale, int computed, int *overflowed)
{
    float numbers[STRETCH], by = 1;
    const uint32_t limit = too_large(s->to_type);
    if (!scale && s->from_type == s->to_type) {
        copy_row(s, from, to);
        return;
    }
    if (computed) {
        by = largest_of(s, from) / LARGEST[s->to_type];
        memcpy(scale, &by, sizeof by);
    } else if (scale) {
        memcpy(&by, scale, sizeof by);
    }
    for (int64_t begin = 0; begin < s->dim; begin += STRETCH) {
        const int count = shorter(s->dim - begin), once = s->to_type == F16;
        read_numbers(s->from_type, once, from + begin * s->from_item, s->from_item, count, numbers);
        if (scale)
            divide(numbers, count, by);
        else if (overflow(numbers, count, limit))
            __atomic_store_n(overflowed, 1, __ATOMIC_RELAXED); /* any thread's */
        put_numbers(s->to_type, numbers, count, to + begin * s->to_item, s->to_item);
    }
}

static void write_token(const write_call_t *c, const write_side_t *s, int64_t token, int64_t block, int64_t offset)
{
    const char *from = s->from + token * s->from_token;
    char *to = s->to + block * s->to_block + offset * s->to_token;
    char *scale = s->scale ? s->scale + block * s->scale_block + offset * s->scale_token : NULL;
    for (int64_t head = 0; head < c->num_heads; head++)
        write_row(s, from + head * s->from_head, to + head * s->to_head, scale ? scale + head * s->scale_head : NULL, c->computed,
                  c->overflowed);
}

static void write_owned(void *argument, long item, int worker)
{
    const shared_t *shared = argument;
    const write_call_t *c = shared->call;
    (void)worker;
    for (int64_t token = 0; token < c->num_tokens; token++) {
        const int64_t slot = c->slots[token];
        if (slot < 0 || owner_of(slot, shared->items) != item)
            continue;
        for (int side = 0; side < 2; side++)
            if (c->sides[side].dim) /* rows of no width have no scale either */
                write_token(c, &c->sides[side], token, slot / c->block_size, slot % c->block_size);
    }
}

void write_rows(const write_call_t *call, run_t *run, int threads)
{
    const int64_t numbers = call->num_tokens * call->num_heads * (call->sides[0].dim + call->sides[1].dim);
    const int64_t worth = 1 + numbers / NUMBERS_PER_THREAD;
    const int used = threads < worth ? threads : (int)worth;
    shared_t shared = {call, used > 1 ? (long)used * ITEMS_PER_THREAD : 1};
    run(write_owned, &shared, shared.items, used);
}

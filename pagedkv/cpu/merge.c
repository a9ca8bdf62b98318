/* A task is some rows, each a token's head: the largest lse, the sum of the weights, then the weighted sum of the states, in float64.
 * Weights are made again for each stretch of a row, which needs no memory and costs one exponential for 256 numbers.
 */
#include "merge.h"

#include <math.h>

enum { NUMBERS_PER_ITEM = 1 << 14 };

typedef struct {
    const merge_call_t *call;
    int64_t rows_per_item;
} shared_t;

typedef struct {
    const char *state, *lse; /* of the first state */
    double most, sum;
} row_t;

static inline double lse_of(const merge_call_t *c, const row_t *row, int64_t state)
{
    float lse;
    memcpy(&lse, row->lse + state * c->lses_state, sizeof lse);
    return lse;
}

/* A state alone is taken as it is, whatever its lse. */
static inline double weight_of(const merge_call_t *c, const row_t *row, int64_t state)
{
    return c->num_states == 1 ? 1 : exp(lse_of(c, row, state) - row->most);
}

static row_t row_of(const merge_call_t *c, int64_t token, int64_t head)
{
    row_t row = {
        .state = c->states + token * c->states_token + head * c->states_head,
        .lse = c->lses + token * c->lses_token + head * c->lses_head,
        .most = -INFINITY,
    };
    for (int64_t state = 0; state < c->num_states; state++) {
        const double lse = lse_of(c, &row, state);
        if (!(lse <= row.most)) /* NaN is the largest, and stays */
            row.most = row.most != row.most ? row.most : lse;
    }
    for (int64_t state = 0; state < c->num_states && row.most != -INFINITY; state++)
        row.sum += weight_of(c, &row, state);
    return row;
}

static void add_weighted(int dtype, const char *restrict from, int64_t stride, int count, double weight, double *restrict to)
{
    switch (dtype) {
    case F32:
        EACH_READ(float, to[i] += weight * (double)x)
        break;
    case F16:
        EACH_READ(uint16_t, to[i] += weight * (double)widened(x))
        break;
    case BF16:
        EACH_READ(uint16_t, to[i] += weight * (double)float_of_bits((uint32_t)x << 16))
        break;
    default:
        EACH_READ(double, to[i] += weight * x)
    }
}

static void put_merged(int dtype, const double *restrict merged, int count, char *restrict to, int64_t stride)
{
    float numbers[STRETCH];
    if (dtype == F64) {
        EACH_PUT(double, merged[i])
        return;
    }
    read_numbers(F64, dtype != F32, (const char *)merged, sizeof *merged, count, numbers);
    put_numbers(dtype, numbers, count, to, stride);
}

static void merge_row(const merge_call_t *c, const row_t *row, char *out)
{
    double merged[STRETCH];
    for (int64_t begin = 0; begin < c->dim; begin += STRETCH) {
        const int count = (int)(c->dim - begin < STRETCH ? c->dim - begin : STRETCH);
        for (int i = 0; i < count; i++)
            merged[i] = row->most == -INFINITY ? 0 : -0.0; /* to which -0 can be added */
        for (int64_t state = 0; state < c->num_states && row->most != -INFINITY; state++) {
            const double weight = weight_of(c, row, state);
            const char *from = row->state + state * c->states_state + begin * c->states_item;
            if (weight != 0) /* what lies in a state without keys, NaN included, stays out */
                add_weighted(c->states_type, from, c->states_item, count, weight / row->sum, merged);
        }
        put_merged(c->out_type, merged, count, out + begin * c->out_item, c->out_item);
    }
}

static void merge_some(void *argument, long item, int worker)
{
    const shared_t *shared = argument;
    const merge_call_t *c = shared->call;
    const int64_t rows = c->num_tokens * c->num_heads, begin = item * shared->rows_per_item;
    (void)worker;
    for (int64_t i = begin; i < rows && i < begin + shared->rows_per_item; i++) {
        const int64_t token = i / c->num_heads, head = i % c->num_heads;
        const row_t row = row_of(c, token, head);
        merge_row(c, &row, c->out + token * c->out_token + head * c->out_head);
        if (c->lse) {
            const float lse = (float)(row.most == -INFINITY ? -INFINITY : row.most + log(row.sum));
            memcpy(c->lse + token * c->lse_token + head * c->lse_head, &lse, sizeof lse);
        }
    }
}

void merge_rows(const merge_call_t *call, run_t *run, int threads)
{
    const int64_t rows = call->num_tokens * call->num_heads, numbers = call->num_states * call->dim;
    shared_t shared = {call, numbers < NUMBERS_PER_ITEM ? NUMBERS_PER_ITEM / (numbers + 1) + 1 : 1};
    run(merge_some, &shared, (long)((rows + shared.rows_per_item - 1) / shared.rows_per_item), threads);
}

/* Merges attention over disjoint keys. The caller has checked lengths and strides. */
#ifndef PAGEDKV_CPU_MERGE_H
#define PAGEDKV_CPU_MERGE_H

#include "write_numbers.h"

/* All strides are bytes. */
typedef struct {
    const char *states; /* [num_states, num_tokens, num_heads, dim] of float32, float16, bfloat16 or float64 */
    const char *lses;   /* float32 [num_states, num_tokens, num_heads] */
    char *out;          /* [num_tokens, num_heads, dim] of one of the same dtypes */
    char *lse;          /* float32 [num_tokens, num_heads], or NULL */
    int64_t states_state, states_token, states_head, states_item;
    int64_t lses_state, lses_token, lses_head;
    int64_t out_token, out_head, out_item;
    int64_t lse_token, lse_head;
    int64_t num_states, num_tokens, num_heads, dim;
    int states_type, out_type;
} merge_call_t;

/* Each state counts with the weight e^lse; one without keys (-inf) is not read. 0 and -inf where no state has keys. */
void merge_rows(const merge_call_t *call, run_t *run, int threads);

#endif

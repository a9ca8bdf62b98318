/* Tokens of one sequence out of the blocks of an arena into two arrays, bit for bit. The caller has checked blocks, lengths and strides. */
#ifndef PAGEDKV_CPU_GATHER_H
#define PAGEDKV_CPU_GATHER_H

#include <stdint.h>

/* run_items of threads.h, in whichever module has the threads. */
typedef void gather_run_t(void (*work)(void *argument, long item, int worker), void *argument, long items, int threads);

/* All of K, or of V. All strides are bytes. */
typedef struct {
    const char *from; /* [num_blocks, num_layers, block_size, num_heads, dim]; the last axis lies together */
    char *to;         /* [num_layers, stop - start, num_heads, dim] */
    int64_t from_block, from_layer, from_token, from_head;
    int64_t to_layer, to_token, to_head, to_item;
    int64_t dim;
} gather_side_t;

typedef struct {
    gather_side_t sides[2];
    const int32_t *blocks; /* of tokens 0 to stop - 1 */
    int64_t start, stop, block_size, num_layers, num_heads, item_bytes;
} gather_call_t;

void gather_tokens(const gather_call_t *call, gather_run_t *run, int threads);

#endif

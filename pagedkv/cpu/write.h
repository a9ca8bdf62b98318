/* K and V of new tokens into the slots of a cache. The caller has checked lengths and strides. */
#ifndef PAGEDKV_CPU_WRITE_H
#define PAGEDKV_CPU_WRITE_H

#include "write_numbers.h"

/* K, or V. All strides are bytes. */
typedef struct {
    const char *from; /* [num_tokens, num_heads, dim] of float32, float16, bfloat16 or float64 */
    char *to;         /* [num_blocks, block_size, num_heads, dim] of a cache's dtype */
    char *scale;      /* float32 as the strides say, or NULL: numbers are divided by it; not touched where dim is 0 */
    int64_t from_token, from_head, from_item;
    int64_t to_block, to_token, to_head, to_item;
    int64_t scale_block, scale_token, scale_head;
    int64_t dim;
    int from_type, to_type;
} write_side_t;

typedef struct {
    write_side_t sides[2];
    const int64_t *slots; /* [num_tokens], block * block_size + offset; a negative one skips its token */
    int64_t num_tokens, block_size, num_heads;
    int computed; /* scales are made of each row, and stored */
    int *overflowed; /* set to 1 where a finite number is stored as infinity (float16, bfloat16); never cleared */
} write_call_t;

/* Of two tokens for one slot the later one stays, on any number of threads. */
void write_rows(const write_call_t *call, run_t *run, int threads);

#endif

/* What this machine reads and multiplies at most: one thread's share, as tight as a compiler makes it with any instruction set. */
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

typedef float wide_t __attribute__((vector_size(64)));

/* Sum of n floats, n a multiple of 256, aligned to 64 bytes. */
CLONES float read_floats(const float *from, size_t n)
{
    wide_t sum[8] = {0};
    for (size_t i = 0; i < n; i += 128) {
        const wide_t *at = (const wide_t *)(from + i);
        for (int j = 0; j < 8; j++) {
            __builtin_prefetch((const char *)(at + j) + 4096, 0, 2);
            sum[j] += at[j];
        }
    }
    for (int j = 1; j < 8; j++)
        sum[0] += sum[j];
    return sum[0][0] + sum[0][15];
}

/* 16 vectors of 16 floats, each multiplied and added `times` times. */
CLONES float multiply(long times)
{
    wide_t a[12], b, c;
    for (int i = 0; i < 16; i++)
        b[i] = 0.999f, c[i] = 1e-6f;
    for (int i = 0; i < 12; i++)
        a[i] = b * (float)i;
    for (long k = 0; k < times; k++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            a[i] = a[i] * b + c;
    for (int i = 1; i < 12; i++)
        a[0] += a[i];
    return a[0][0] + a[0][15];
}

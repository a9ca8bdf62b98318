/* Stretches of numbers to float32 or float64 and back, any distance apart, at any address.
 *
 * Writing and merging read every number once and do a few instructions with it: with some threads memory is what they wait for. So
 * these are plain loops without branches, which the compiler turns into the vectors of the oldest CPU of its target (SSE2, NEON), and
 * nothing is chosen when the program runs. One thread alone would gain from F16C and wider vectors where a number is rounded.
 *
 * Everything rounds to nearest even. NaN stays NaN with its sign, in int8 it is 0; int8 and fp8 saturate.
 */
#ifndef PAGEDKV_CPU_WRITE_NUMBERS_H
#define PAGEDKV_CPU_WRITE_NUMBERS_H

#include "numbers.h"

enum { F64 = F8_E5M2 + 1 }; /* read and merged, never kept in a cache */
enum { STRETCH = 256 };     /* numbers between two conversions; they stay in the L1 cache */

/* run_items of threads.h, in whichever module has the threads: a process has them once. */
typedef void run_t(void (*work)(void *argument, long item, int worker), void *argument, long items, int threads);

static inline int64_t width_of(int dtype) { return dtype == F64 ? 8 : item_bytes((dtype_t)dtype); }

/* A loop for neighbours, which becomes vectors, and one for the rest. `body` takes x, number i. */
#define EACH_READ(type, body)                                     \
    if (stride == (int64_t)sizeof(type))                          \
        for (int i = 0; i < count; i++) {                         \
            type x;                                               \
            memcpy(&x, from + (int64_t)sizeof(type) * i, sizeof x); \
            body;                                                 \
        }                                                         \
    else                                                          \
        for (int i = 0; i < count; i++) {                         \
            type x;                                               \
            memcpy(&x, from + stride * i, sizeof x);              \
            body;                                                 \
        }

#define EACH_PUT(type, value)                                   \
    if (stride == (int64_t)sizeof(type))                        \
        for (int i = 0; i < count; i++) {                       \
            const type y = (type)(value);                       \
            memcpy(to + (int64_t)sizeof(type) * i, &y, sizeof y); \
        }                                                       \
    else                                                        \
        for (int i = 0; i < count; i++) {                       \
            const type y = (type)(value);                       \
            memcpy(to + stride * i, &y, sizeof y);              \
        }

/* As float_of_half, without branches. */
static inline float widened(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, size = h & 0x7fff;
    const uint32_t small = bits_of((float)(int32_t)size * 0x1p-24f), normal = (size << 13) + (112u << 23);
    const uint32_t whole = size < 0x400 ? small : size < 0x7c00 ? normal : normal + (112u << 23);
    return float_of_bits(sign | whole);
}

/* Cut off, with the last bit set if anything was lost: rounded once more, to 22 bits or fewer, it is x rounded once. */
static inline float to_odd(double x)
{
    const float nearest = (float)x;
    const double back = (double)nearest;
    const uint32_t beyond = (back > x) == (x > 0), lost = back != x && x == x;
    return float_of_bits(lost ? (bits_of(nearest) - beyond) | 1 : bits_of(nearest));
}

/* The bits of a size (no sign, no NaN) with so many bits of fraction and this bias. A number too large gets more bits than there are. */
static inline uint32_t narrowed(uint32_t size, int fraction, int bias)
{
    const float one = float_of_bits((uint32_t)(127 + 24 - bias - fraction) << 23); /* its last bit is the smallest number's */
    const uint32_t small = bits_of(float_of_bits(size) + one) - bits_of(one);
    const int lost = 23 - fraction;
    const uint32_t rounded = (size + (1u << (lost - 1)) - 1 + (size >> lost & 1)) >> lost;
    return size < (uint32_t)(128 - bias) << 23 ? small : rounded - ((uint32_t)(127 - bias) << fraction);
}

static inline uint16_t half_from(float x)
{
    const uint32_t bits = bits_of(x), size = bits & 0x7fffffff, found = narrowed(size, 10, 15);
    return (uint16_t)((bits >> 16 & 0x8000) | (size > 0x7f800000 ? 0x7e00 : found > 0x7c00 ? 0x7c00 : found));
}

static inline uint16_t brain_from(float x)
{
    const uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

static inline uint8_t eight_from(float x, int fraction, int bias, uint32_t largest, uint32_t nan)
{
    const uint32_t bits = bits_of(x), size = bits & 0x7fffffff, found = narrowed(size, fraction, bias);
    return (uint8_t)((bits >> 24 & 0x80) | (size > 0x7f800000 ? nan : found > largest ? largest : found));
}

static inline int8_t whole_from(float x)
{
    const float low = x > -127 ? x : -127, capped = low < 127 ? low : 127;
    const float shifted = (x == x ? capped : 0) + 0x1.8p23f; /* whole numbers are all that such a sum can keep */
    return (int8_t)(int32_t)(bits_of(shifted) - bits_of(0x1.8p23f));
}

/* `once`: float64 is rounded so that the next rounding is the only one. */
static inline void read_numbers(int dtype, int once, const char *restrict from, int64_t stride, int count, float *restrict to)
{
    switch (dtype) {
    case F32:
        EACH_READ(float, to[i] = x)
        break;
    case F16:
        EACH_READ(uint16_t, to[i] = widened(x))
        break;
    case BF16:
        EACH_READ(uint16_t, to[i] = float_of_bits((uint32_t)x << 16))
        break;
    default:
        if (once) {
            EACH_READ(double, to[i] = to_odd(x))
        } else {
            EACH_READ(double, to[i] = (float)x)
        }
    }
}

static inline void put_numbers(int dtype, const float *restrict from, int count, char *restrict to, int64_t stride)
{
    switch (dtype) {
    case F32:
        EACH_PUT(float, from[i])
        break;
    case F16:
        EACH_PUT(uint16_t, half_from(from[i]))
        break;
    case BF16:
        EACH_PUT(uint16_t, brain_from(from[i]))
        break;
    case I8:
        EACH_PUT(int8_t, whole_from(from[i]))
        break;
    case F8_E4M3:
        EACH_PUT(uint8_t, eight_from(from[i], 3, 7, 0x7e, 0x7f))
        break;
    default:
        EACH_PUT(uint8_t, eight_from(from[i], 2, 15, 0x7b, 0x7e))
    }
}

#endif

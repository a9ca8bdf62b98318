/* Numbers of 8 and 16 bits, one at a time. Conversions to fewer bits round to nearest even; NaN stays NaN. */
#ifndef PAGEDKV_CPU_NUMBERS_H
#define PAGEDKV_CPU_NUMBERS_H

#include <stdint.h>
#include <string.h>

#include "attend.h"

extern float f8_values[2][256]; /* e4m3 (no infinities, 0x7f and 0xff are NaN) and e5m2 */

static inline float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of_half(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31)
        return float_of_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent)
        return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float small = (float)fraction * 0x1p-24f;
    return sign ? -small : small;
}

static inline uint16_t half_of(float x)
{
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477ff000) /* rounds to 2^16 or more */
        return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000) /* below 2^-14: adding 2^-1 puts the last bit of a half where the sum is rounded */
        return (uint16_t)(sign | (bits_of(float_of_bits(size) + 0.5f) - bits_of(0.5f)));
    size += 0xfff + (size >> 13 & 1);
    return (uint16_t)(sign | ((size >> 13) - (112 << 10)));
}

static inline uint16_t brain_of(float x)
{
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline int item_bytes(dtype_t dtype) { return dtype == F32 ? 4 : dtype == F16 || dtype == BF16 ? 2 : 1; }

/* Element `at` of an array. */
static inline float scalar_of(dtype_t dtype, const void *from, int64_t at)
{
    switch (dtype) {
    case F32:
        return ((const float *)from)[at];
    case F16:
        return float_of_half(((const uint16_t *)from)[at]);
    case BF16:
        return float_of_bits((uint32_t)((const uint16_t *)from)[at] << 16);
    case I8:
        return ((const int8_t *)from)[at];
    default:
        return f8_values[dtype == F8_E5M2][((const uint8_t *)from)[at]];
    }
}

static inline void put_scalar(dtype_t dtype, float x, void *to, int64_t at)
{
    if (dtype == F32)
        ((float *)to)[at] = x;
    else
        ((uint16_t *)to)[at] = dtype == F16 ? half_of(x) : brain_of(x);
}

#endif

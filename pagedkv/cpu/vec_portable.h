/* Vectors of 4 floats in the compiler's own words (GCC, Clang): SSE2 on any x86-64, NEON on aarch64. */
#include <math.h>

#define ISA portable
#define VW 4
#define NACC 8
typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));

INLINE V v_set1(float x) { return (V){x, x, x, x}; }
INLINE V v_zero(void) { return v_set1(0); }
INLINE V v_load(const float *p)
{
    V a;
    __builtin_memcpy(&a, p, sizeof a);
    return a;
}
INLINE void v_store(float *p, V a) { __builtin_memcpy(p, &a, sizeof a); }
INLINE V v_fma(V a, V b, V c) { return a * b + c; }
INLINE V v_add(V a, V b) { return a + b; }
INLINE V v_sub(V a, V b) { return a - b; }
INLINE V v_mul(V a, V b) { return a * b; }
INLINE V v_div(V a, V b) { return a / b; }
INLINE V v_select(VI where, V x, V y) { return (V)((where & (VI)x) | (~where & (VI)y)); }
INLINE V v_max(V a, V b) { return v_select(a > b, a, b); } /* b where one is NaN, as on x86 */
INLINE V v_if_less(V a, V b, V x, V y) { return v_select(a < b, x, y); }
INLINE V v_iota(void) { return (V){0, 1, 2, 3}; }
INLINE V v_round(V a) { return (V){rintf(a[0]), rintf(a[1]), rintf(a[2]), rintf(a[3])}; }
INLINE V v_abs(V a) { return (V)((VI)a & (VI){0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff}); }
INLINE float v_hmax(V a)
{
    float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
INLINE float v_hsum(V a) { return (a[0] + a[2]) + (a[1] + a[3]); }
/* a * 2^n, for whole n in -126..127 */
INLINE V v_scale2(V a, V n)
{
    VI bits = (VI){(int32_t)n[0], (int32_t)n[1], (int32_t)n[2], (int32_t)n[3]};
    return a * (V)((bits + 127) << 23);
}
INLINE void v_sums(const V *a, float *sums)
{
    for (int i = 0; i < NACC; i++)
        sums[i] = v_hsum(a[i]);
}

/* 4 rows' 4 floats from `at` on become 4 columns, `apart` from each other. */
INLINE void v_transpose(const float *const *rows, size_t at, float *columns, size_t apart)
{
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            columns[j * apart + i] = rows[i][at + j];
}

INLINE V load_f32(const float *p) { return v_load(p); }
INLINE V load_f16(const uint16_t *p) { return (V){scalar_of(F16, p, 0), scalar_of(F16, p, 1), scalar_of(F16, p, 2), scalar_of(F16, p, 3)}; }
INLINE int upper_half(uint16_t x) { return (int)((uint32_t)x << 16); }
INLINE V load_bf16(const uint16_t *p) { return (V)(VI){upper_half(p[0]), upper_half(p[1]), upper_half(p[2]), upper_half(p[3])}; }
INLINE V load_i8(const int8_t *p) { return (V){p[0], p[1], p[2], p[3]}; }
INLINE void store_f16(uint16_t *p, V a)
{
    for (int i = 0; i < 4; i++)
        p[i] = half_of(a[i]);
}
INLINE void store_bf16(uint16_t *p, V a)
{
    for (int i = 0; i < 4; i++)
        p[i] = brain_of(a[i]);
}
INLINE void prefetch(const char *p) { __builtin_prefetch(p, 0, 2); }

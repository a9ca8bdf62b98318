/* Vectors of 16 floats: AVX-512 F, BW, DQ, VL. */
#include <immintrin.h>

#define ISA avx512
#define VW 16
#define NACC 16
typedef __m512 V;

INLINE V v_zero(void) { return _mm512_setzero_ps(); }
INLINE V v_set1(float x) { return _mm512_set1_ps(x); }
INLINE V v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, V a) { _mm512_storeu_ps(p, a); }
INLINE V v_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V v_add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V v_sub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V v_mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V v_div(V a, V b) { return _mm512_div_ps(a, b); }
INLINE V v_max(V a, V b) { return _mm512_max_ps(a, b); }
INLINE V v_iota(void) { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE V v_round(V a) { return _mm512_roundscale_ps(a, 8); }
INLINE V v_abs(V a) { return _mm512_abs_ps(a); }
/* a < b ? x : y, and y where that is undecided */
INLINE V v_if_less(V a, V b, V x, V y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x); }
INLINE float v_hmax(V a) { return _mm512_reduce_max_ps(a); }
INLINE float v_hsum(V a) { return _mm512_reduce_add_ps(a); }
INLINE V v_scale2(V a, V n) { return _mm512_scalef_ps(a, n); }

INLINE V v_pairs(V a, V b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
INLINE V v_quads(V a, V b)
{
    __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
INLINE V v_halves(V a, V b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
INLINE void v_sums(const V *a, float *sums)
{
    V b[4];
    for (int i = 0; i < 4; i++)
        b[i] = v_quads(v_pairs(a[4 * i], a[4 * i + 1]), v_pairs(a[4 * i + 2], a[4 * i + 3]));
    v_store(sums, v_halves(v_halves(b[0], b[1]), v_halves(b[2], b[3])));
}

/* 16 rows' 16 floats from `at` on become 16 columns, `apart` from each other. */
INLINE void v_transpose(const float *const *rows, size_t at, float *columns, size_t apart)
{
    V a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        a[i] = v_load(rows[i] + at);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const __m512d x = _mm512_castps_pd(b[i + j]), y = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const V p = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), q = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD);
        const V r = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88), s = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xDD);
        v_store(columns + i * apart, _mm512_shuffle_f32x4(p, r, 0x88));
        v_store(columns + (i + 4) * apart, _mm512_shuffle_f32x4(q, s, 0x88));
        v_store(columns + (i + 8) * apart, _mm512_shuffle_f32x4(p, r, 0xDD));
        v_store(columns + (i + 12) * apart, _mm512_shuffle_f32x4(q, s, 0xDD));
    }
}

INLINE V load_f32(const float *p) { return _mm512_loadu_ps(p); }
INLINE V load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE V load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE V load_i8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE void store_f16(uint16_t *p, V a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void store_bf16(uint16_t *p, V a)
{
    __m512i x = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    x = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    x = _mm512_mask_mov_epi32(x, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
}
INLINE void prefetch(const char *p) { _mm_prefetch(p, _MM_HINT_T1); }

/* Vectors of 8 floats: AVX2, FMA, F16C. */
#include <immintrin.h>

#define ISA avx2
#define VW 8
#define NACC 8
typedef __m256 V;

INLINE V v_zero(void) { return _mm256_setzero_ps(); }
INLINE V v_set1(float x) { return _mm256_set1_ps(x); }
INLINE V v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, V a) { _mm256_storeu_ps(p, a); }
INLINE V v_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V v_add(V a, V b) { return _mm256_add_ps(a, b); }
INLINE V v_sub(V a, V b) { return _mm256_sub_ps(a, b); }
INLINE V v_mul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V v_div(V a, V b) { return _mm256_div_ps(a, b); }
INLINE V v_max(V a, V b) { return _mm256_max_ps(a, b); }
INLINE V v_iota(void) { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
INLINE V v_round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE V v_abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE V v_if_less(V a, V b, V x, V y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE float v_hmax(V a)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
INLINE float v_hsum(V a)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
/* a * 2^n, for whole n in -126..127 */
INLINE V v_scale2(V a, V n)
{
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}

INLINE V v_pairs(V a, V b) { return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); }
INLINE V v_quads(V a, V b)
{
    __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
}
INLINE void v_sums(const V *a, float *sums)
{
    V x = v_quads(v_pairs(a[0], a[1]), v_pairs(a[2], a[3])), y = v_quads(v_pairs(a[4], a[5]), v_pairs(a[6], a[7]));
    v_store(sums, _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31)));
}

/* 8 rows' 8 floats from `at` on become 8 columns, `apart` from each other. */
INLINE void v_transpose(const float *const *rows, size_t at, float *columns, size_t apart)
{
    V a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = v_load(rows[i] + at);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const __m256d x = _mm256_castps_pd(b[i + j]), y = _mm256_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
            a[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        v_store(columns + i * apart, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        v_store(columns + (i + 4) * apart, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

INLINE V load_f32(const float *p) { return _mm256_loadu_ps(p); }
INLINE V load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE V load_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE V load_i8(const int8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE void store_f16(uint16_t *p, V a)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void store_bf16(uint16_t *p, V a)
{
    __m256i x = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    x = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    x = _mm256_blendv_epi8(x, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
    x = _mm256_srli_epi32(x, 16);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
INLINE void prefetch(const char *p) { _mm_prefetch(p, _MM_HINT_T1); }

/* XXH3-64 with a seed, for inputs of more than 240 bytes, written for this library after the published algorithm (Yann Collet,
 * xxHash); its constants are the algorithm's.
 *
 * The xxhash package gives the same values and is not needed at run time; this exists because a block's shards must be summed between two
 * system calls, without the GIL, while the block is in the L2 cache. tests/tiers/test_sums.py compares both.
 * Callable from any thread; no state.
 */
#ifndef PAGEDKV_SUMS_H
#define PAGEDKV_SUMS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define PAGEDKV_AVX2 __attribute__((target("avx2")))
#define PAGEDKV_AVX512 __attribute__((target("avx512f")))
#endif

enum { SUM_STRIPE = 64, SUM_LANES = 8, SUM_SECRET = 192, SUM_STEP = 8, SUM_STRIPES = 16 };

#define SUM_P32_1 0x9E3779B1U
#define SUM_P32_2 0x85EBCA77U
#define SUM_P32_3 0xC2B2AE3DU
#define SUM_P64_1 0x9E3779B185EBCA87ULL
#define SUM_P64_2 0xC2B2AE3D27D4EB4FULL
#define SUM_P64_3 0x165667B19E3779F9ULL
#define SUM_P64_4 0x85EBCA77C2B2AE63ULL
#define SUM_P64_5 0x27D4EB2F165667C5ULL

/* The algorithm's constant, as 24 little-endian words. */
static const uint64_t SUM_KEY[SUM_SECRET / 8] = {
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL,
    0x78e5c0cc4ee679cbULL, 0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL,
    0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL, 0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL,
    0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL, 0x647378d9c97e9fc8ULL,
    0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL,
    0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL,
};

static inline uint64_t sum_word(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, 8); /* little-endian machines only: x86-64 and aarch64 */
    return word;
}

/* One stripe of 64 bytes into the eight lanes. */
static inline void sum_stripe(uint64_t *acc, const unsigned char *in, const unsigned char *secret)
{
    int i;
    for (i = 0; i < SUM_LANES; i++) {
        uint64_t data = sum_word(in + 8 * i), mixed = data ^ sum_word(secret + 8 * i);
        acc[i ^ 1] += data;
        acc[i] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    }
}

/* `blocks` times SUM_STRIPES stripes, the lanes scrambled after each block. */
static void sum_blocks_plain(
    uint64_t *acc, const unsigned char *in, const unsigned char *secret, size_t blocks)
{
    const unsigned char *key = secret + SUM_SECRET - SUM_STRIPE;
    int i, n;
    for (; blocks; blocks--) {
        for (n = 0; n < SUM_STRIPES; n++, in += SUM_STRIPE)
            sum_stripe(acc, in, secret + n * SUM_STEP);
        for (i = 0; i < SUM_LANES; i++)
            acc[i] = (acc[i] ^ (acc[i] >> 47) ^ sum_word(key + 8 * i)) * SUM_P32_1;
    }
}

#ifdef PAGEDKV_AVX2
PAGEDKV_AVX2 static inline __m256i sum_half(__m256i acc, const unsigned char *in, const unsigned char *secret)
{
    __m256i data = _mm256_loadu_si256((const __m256i *) in);
    __m256i mixed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *) secret));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(_mm256_add_epi64(acc, _mm256_shuffle_epi32(data, 0x4E)), product);
}

PAGEDKV_AVX2 static inline __m256i sum_scramble(__m256i acc, const unsigned char *key)
{
    const __m256i prime = _mm256_set1_epi32((int) SUM_P32_1);
    __m256i mixed = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
    mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((const __m256i *) key));
    return _mm256_add_epi64(
        _mm256_mul_epu32(mixed, prime),
        _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime), 32));
}

PAGEDKV_AVX2 static void sum_blocks_avx2(
    uint64_t *acc, const unsigned char *in, const unsigned char *secret, size_t blocks)
{
    const unsigned char *key = secret + SUM_SECRET - SUM_STRIPE;
    __m256i low = _mm256_loadu_si256((const __m256i *) acc);
    __m256i high = _mm256_loadu_si256((const __m256i *) (acc + 4));
    int n;
    for (; blocks; blocks--) {
#pragma GCC unroll 16
        for (n = 0; n < SUM_STRIPES; n++, in += SUM_STRIPE) {
            _mm_prefetch((const char *) in + 512, _MM_HINT_T0);
            low = sum_half(low, in, secret + n * SUM_STEP);
            high = sum_half(high, in + 32, secret + n * SUM_STEP + 32);
        }
        low = sum_scramble(low, key);
        high = sum_scramble(high, key + 32);
    }
    _mm256_storeu_si256((__m256i *) acc, low);
    _mm256_storeu_si256((__m256i *) (acc + 4), high);
}

PAGEDKV_AVX512 static void sum_blocks_avx512(
    uint64_t *acc, const unsigned char *in, const unsigned char *secret, size_t blocks)
{
    const __m512i prime = _mm512_set1_epi32((int) SUM_P32_1);
    const __m512i key = _mm512_loadu_si512(secret + SUM_SECRET - SUM_STRIPE);
    __m512i lanes = _mm512_loadu_si512(acc), mixed;
    int n;
    for (; blocks; blocks--) {
#pragma GCC unroll 16
        for (n = 0; n < SUM_STRIPES; n++, in += SUM_STRIPE) {
            __m512i data = _mm512_loadu_si512(in);
            _mm_prefetch((const char *) in + 512, _MM_HINT_T0);
            mixed = _mm512_xor_si512(data, _mm512_loadu_si512(secret + n * SUM_STEP));
            lanes = _mm512_add_epi64(lanes, _mm512_shuffle_epi32(data, (_MM_PERM_ENUM) 0x4E));
            lanes = _mm512_add_epi64(lanes, _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32)));
        }
        mixed = _mm512_xor_si512(_mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47)), key);
        lanes = _mm512_add_epi64(
            _mm512_mul_epu32(mixed, prime),
            _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime), 32));
    }
    _mm512_storeu_si512(acc, lanes);
}
#endif

/* What the processor has: 2 AVX-512, 1 AVX2, 0 neither. */
static int sum_level(void)
{
#ifdef PAGEDKV_AVX2
    return __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
#else
    return 0;
#endif
}

/* Sum of `count` > 240 bytes; `level` at most sum_level(). */
static uint64_t sum_long(const void *data, size_t count, uint64_t seed, int level)
{
    const unsigned char *in = (const unsigned char *) data;
    const size_t block = SUM_STRIPES * SUM_STRIPE, blocks = (count - 1) / block;
    uint64_t words[SUM_SECRET / 8], result = (uint64_t) count * SUM_P64_1;
    uint64_t acc[SUM_LANES] = {
        SUM_P32_3, SUM_P64_1, SUM_P64_2, SUM_P64_3, SUM_P64_4, SUM_P32_2, SUM_P64_5, SUM_P32_1};
    unsigned char secret[SUM_SECRET];
    size_t i;
    for (i = 0; i < SUM_SECRET / 8; i += 2) {
        words[i] = SUM_KEY[i] + seed;
        words[i + 1] = SUM_KEY[i + 1] - seed;
    }
    memcpy(secret, words, sizeof secret);
#ifdef PAGEDKV_AVX2
    if (level == 2)
        sum_blocks_avx512(acc, in, secret, blocks);
    else if (level == 1)
        sum_blocks_avx2(acc, in, secret, blocks);
    else
#endif
        sum_blocks_plain(acc, in, secret, blocks);
    for (i = 0; i < (count - 1 - blocks * block) / SUM_STRIPE; i++)
        sum_stripe(acc, in + blocks * block + i * SUM_STRIPE, secret + i * SUM_STEP);
    sum_stripe(acc, in + count - SUM_STRIPE, secret + SUM_SECRET - SUM_STRIPE - 7);
    for (i = 0; i < SUM_LANES; i += 2) {
        unsigned __int128 product = (unsigned __int128) (acc[i] ^ sum_word(secret + 11 + 8 * i))
                                    * (acc[i + 1] ^ sum_word(secret + 19 + 8 * i));
        result += (uint64_t) product ^ (uint64_t) (product >> 64);
    }
    (void) level;
    result ^= result >> 37;
    result *= 0x165667919E3779F9ULL;
    return result ^ (result >> 32);
}

#endif

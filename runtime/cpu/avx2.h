// AVX2 with FMA and half precision: simd.h in vectors of 8 floats.
#include <immintrin.h>

#define NAME(x) x##_avx2
#define NAME_STRING "avx2"
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define Q8_OFFSET 0
#define N 8
#define PANELS 1
#define TOKENS 6
#define TOKENS_Q 3
#define V __m256
#define I __m256i
#define LOAD(p) _mm256_loadu_ps(p)
#define LOAD_F16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define LOAD_BF16(p) _mm256_castsi256_ps(_mm256_slli_epi32( \
    _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define STORE_F16(p, v) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(v, 0))
#define SET(x) _mm256_set1_ps(x)
#define ADD(a, b) _mm256_add_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define DIV(a, b) _mm256_div_ps(a, b)
#define MAX(a, b) _mm256_max_ps(a, b)
#define MIN(a, b) _mm256_min_ps(a, b)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define SUM(v) sum_avx2(v)
#define MOST_OF(v) most_avx2(v)
#define ROUND(v) _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define SWAP(v) _mm256_permute_ps(v, 0xb1)
#define POW2(n) _mm256_castsi256_ps(_mm256_slli_epi32( \
    _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23))
#define LOAD_I(p) _mm256_loadu_si256((const __m256i *)(p))
#define BF16_LOW(i) _mm256_castsi256_ps(_mm256_slli_epi32(i, 16))
#define BF16_HIGH(i) _mm256_castsi256_ps(_mm256_and_si256(i, _mm256_set1_epi32((int)0xffff0000)))
#define SET_I(x) _mm256_set1_epi32(x)
#define FLOATS(i) _mm256_cvtepi32_ps(i)
#define INTS(v) _mm256_cvtps_epi32(v)
#define ADD_I(a, b) _mm256_add_epi32(a, b)
#define MAX_I(a, b) _mm256_max_epi32(a, b)
#define SUM_I(i) sum_of_ints_avx2(i)
#define MOST_OF_I(i) most_of_ints_avx2(i)
#define MAGNITUDE(v) _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff))
#define STORE_8(p, i) store_bytes_avx2(p, i)
#define DOT(c, w, x) DOT_SMALL(c, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
// Pairs of products are added in 16 bits: at most 2 * 128 * 127, which is below 2^15
#define DOT_SMALL(c, w, x) _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)))
#define AND_15(w) _mm256_and_si256(w, _mm256_set1_epi8(15))
#define SHIFT_4(w) AND_15(_mm256_srli_epi16(w, 4))

TARGET static inline float sum_avx2(__m256 v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

TARGET static inline float most_avx2(__m256 v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

TARGET static inline int32_t sum_of_ints_avx2(__m256i i) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

TARGET static inline int32_t most_of_ints_avx2(__m256i i) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}

TARGET static inline void store_bytes_avx2(int8_t *p, __m256i i) {
    __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(shorts, shorts));
}

TARGET static inline __m256 block_q8_avx2(const uint8_t *q, const Block *x) {
    return _mm256_cvtepi32_ps(DOT(_mm256_setzero_si256(), LOAD_I(q), LOAD_I(x->q)));
}

// The offset's correction stands in one lane, as all are summed in the end.
TARGET static inline __m256 block_q4_avx2(const uint8_t *q, const Block *x) {
    __m128i low = _mm_loadu_si128((const __m128i *)q);
    __m256i w = AND_15(_mm256_set_m128i(_mm_srli_epi16(low, 4), low));
    __m256i offset = _mm256_castsi128_si256(_mm_cvtsi32_si128(-8 * x->sum));
    return _mm256_cvtepi32_ps(DOT_SMALL(offset, w, LOAD_I(x->q)));
}

#include "simd.h"

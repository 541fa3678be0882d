// AVX-512 with VNNI: kernels_simd.h in vectors of 16 floats. The instruction for bytes wants one side unsigned.
#include <immintrin.h>

#define NAME(x) x##_avx512
#define NAME_STRING "avx512"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define Q8_OFFSET 128
#define N 16
#define TOKENS 6
#define V __m512
#define I __m512i
#define LOAD(p) _mm512_loadu_ps(p)
#define LOAD_F16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define LOAD_BF16(p) _mm512_castsi512_ps(_mm512_slli_epi32( \
    _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define STORE_F16(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(v, 0))
#define SET(x) _mm512_set1_ps(x)
#define ADD(a, b) _mm512_add_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define DIV(a, b) _mm512_div_ps(a, b)
#define MAX(a, b) _mm512_max_ps(a, b)
#define MIN(a, b) _mm512_min_ps(a, b)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define SUM(v) _mm512_reduce_add_ps(v)
#define ADD_SUMS(y, a, b, c, d) add_sums_avx512(y, a, b, c, d)
#define ROUND(v) _mm512_roundscale_ps(v, 0)
#define POW2(n) _mm512_scalef_ps(_mm512_set1_ps(1), n)
#define LOAD_I(p) _mm512_loadu_si512(p)
#define SET_I(x) _mm512_set1_epi32(x)
#define FLOATS(i) _mm512_cvtepi32_ps(i)
#define DOT(c, w, x) _mm512_dpbusd_epi32(c, w, x)
#define DOT_SMALL(c, w, x) _mm512_dpbusd_epi32(c, w, x)
#define AND_15(w) _mm512_and_si512(w, _mm512_set1_epi8(15))
#define SHIFT_4(w) AND_15(_mm512_srli_epi16(w, 4))

// Lanes of each 128 bits: a + a, b + b, then a, b, c, d; the four parts are added in the end.
TARGET static inline void add_sums_avx512(float *y, __m512 a, __m512 b, __m512 c, __m512 d) {
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(y, _mm_add_ps(_mm_loadu_ps(y), sums));
}

// The offset's correction stands in one lane, as all are summed in the end.
TARGET static inline __m256 block_q8_avx512(const uint8_t *q, const Block *x) {
    __m256i w = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)q), _mm256_set1_epi8(-128));
    __m256i offset = _mm256_castsi128_si256(_mm_cvtsi32_si128(-128 * x->sum));
    return _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(offset, w, _mm256_loadu_si256((const __m256i *)x->q)));
}

TARGET static inline __m256 block_q4_avx512(const uint8_t *q, const Block *x) {
    __m128i low = _mm_loadu_si128((const __m128i *)q);
    __m256i w = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(low, 4), low), _mm256_set1_epi8(15));
    __m256i offset = _mm256_castsi128_si256(_mm_cvtsi32_si128(-8 * x->sum));
    return _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(offset, w, _mm256_loadu_si256((const __m256i *)x->q)));
}

#include "kernels_simd.h"

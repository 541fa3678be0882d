// Defines the operations of simd.h for vectors of 8 floats, with AVX2, FMA and half-precision
// conversion. avx2.c and avxvnni.c define TARGET, Q8_OFFSET, DOT and DOT_SMALL, then include this
// file, which includes simd.h.
#include "x86.h"

#define LANES 8
#define TILE_ROWS 1
#define TOKENS 6
#define BLOCK_TOKENS 3

typedef __m256 Floats;
#define LOAD(p) _mm256_loadu_ps(p)
#define LOAD_F16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define LOAD_BF16(p) \
    _mm256_castsi256_ps( \
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define LOAD_8(p) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define STORE_F16(p, v) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(v, 0))
#define SET(x) _mm256_set1_ps(x)
#define ADD(a, b) _mm256_add_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define DIV(a, b) _mm256_div_ps(a, b)
#define MAX(a, b) _mm256_max_ps(a, b)
#define MIN(a, b) _mm256_min_ps(a, b)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define SUM(v) sum_of_8(v)
#define LARGEST(v) largest_of_8(v)
#define ROUND(v) _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define SWAP(v) _mm256_permute_ps(v, 0xb1)
#define POW2(n) \
    _mm256_castsi256_ps( \
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23))

typedef __m256i Ints;
#define LOAD_I(p) _mm256_loadu_si256((const __m256i *)(p))
#define BF16_LOW(i) _mm256_castsi256_ps(_mm256_slli_epi32(i, 16))
#define BF16_HIGH(i) _mm256_castsi256_ps(_mm256_and_si256(i, _mm256_set1_epi32((int)0xffff0000)))
#define F16_LOW(i) floats_of_halves(_mm256_and_si256(i, _mm256_set1_epi32(0xffff)))
#define F16_HIGH(i) floats_of_halves(_mm256_srli_epi32(i, 16))
#define SET_I(x) _mm256_set1_epi32(x)
#define FLOATS(i) _mm256_cvtepi32_ps(i)
#define INTS(v) _mm256_cvtps_epi32(v)
#define ADD_I(a, b) _mm256_add_epi32(a, b)
#define MAX_I(a, b) _mm256_max_epi32(a, b)
#define SUM_I(i) sum_of_8_ints(i)
#define LARGEST_I(i) largest_of_8_ints(i)
#define MAGNITUDE(v) _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff))
#define STORE_8(p, i) store_8_bytes(p, i)
#define AND_15(w) _mm256_and_si256(w, _mm256_set1_epi8(15))
#define SHIFT_4(w) AND_15(_mm256_srli_epi16(w, 4))

TARGET static inline float largest_of_8(__m256 v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

TARGET static inline int32_t largest_of_8_ints(__m256i i) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}

TARGET static inline void store_8_bytes(int8_t *p, __m256i i) {
    __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(shorts, shorts));
}

// Converts the half-precision number in the lower 16 bits of each lane to float. The upper 16 bits
// must be zero.
TARGET static inline __m256 floats_of_halves(__m256i i) {
    __m128i low = _mm256_castsi256_si128(i), high = _mm256_extracti128_si256(i, 1);
    return _mm256_cvtph_ps(_mm_packus_epi32(low, high));
}

#include "simd.h"

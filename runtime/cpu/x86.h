// Operations of simd.h that avx2.h and avx512.h share, on vectors of 16 and 32 bytes. TARGET must
// be defined before this file is included.
#include <immintrin.h>

typedef __m128i Quad;
#define LOAD_QUAD(p) _mm_loadu_si128((const __m128i *)(p))
#define STORE_QUAD(p, v) _mm_storeu_si128((__m128i *)(p), v)
#define SET_QUAD(x) _mm_set1_epi32((int)(x))
#define XOR_QUAD(a, b) _mm_xor_si128(a, b)
#define LOW_32(a, b) _mm_unpacklo_epi32(a, b)
#define HIGH_32(a, b) _mm_unpackhi_epi32(a, b)

TARGET static inline float sum_of_8(__m256 v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

TARGET static inline int32_t sum_of_8_ints(__m256i i) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

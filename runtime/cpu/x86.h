// What avx2.c and avx512.c share: vectors of 16 and 32 bytes, in the terms of simd.h.
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))

typedef __m128i Quad;
#define LOAD_QUAD(p) _mm_loadu_si128((const __m128i *)(p))
#define STORE_QUAD(p, v) _mm_storeu_si128((__m128i *)(p), v)
#define SET_QUAD(x) _mm_set1_epi32((int)(x))
#define XOR_QUAD(a, b) _mm_xor_si128(a, b)
#define LOW_32(a, b) _mm_unpacklo_epi32(a, b)
#define HIGH_32(a, b) _mm_unpackhi_epi32(a, b)

typedef __m256 Partial;
#define PARTIAL_SET(x) _mm256_set1_ps(x)
#define PARTIAL_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define PARTIAL_SUM(a, b) sum_of_8(_mm256_add_ps(a, b))
#define HALF(h) _cvtsh_ss(h)

AVX2 static inline float sum_of_8(__m256 v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

AVX2 static inline int32_t sum_of_8_ints(__m256i i) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

// The 32 numbers of a block of Q4_0, each 0 to 15: the low nibbles, then the high ones.
AVX2 static inline __m256i nibbles(const uint8_t *q) {
    __m128i low = _mm_loadu_si128((const __m128i *)q);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(low, 4), low), _mm256_set1_epi8(15));
}

// 16 in each byte whose bit is set.
AVX2 static inline __m256i fifth_bits(uint32_t bits) {
    __m256i place = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    __m256i mask = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), place), mask);
    return _mm256_and_si256(_mm256_cmpeq_epi8(own, mask), _mm256_set1_epi8(16));
}

// What corrects a block's product for the offset of its weights. It stands in one lane, as all are summed in the end.
AVX2 static inline __m256i minus_offset(int offset, const Block *x) {
    return _mm256_castsi128_si256(_mm_cvtsi32_si128(-offset * x->sum));
}

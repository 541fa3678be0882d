// Operations of simd.h that avx2.c and avx512.c share, on vectors of 16 and 32 bytes. Before they
// include this file, they define TARGET and DOT_256(c, w, x), which is DOT_SMALL on vectors of 32
// bytes.
#include <immintrin.h>

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

// Returns the 32 nibbles of 16 bytes, as bytes: the low nibbles, then the high nibbles.
TARGET static inline __m256i nibbles(const uint8_t *q) {
    __m128i low = _mm_loadu_si128((const __m128i *)q);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(low, 4), low), _mm256_set1_epi8(15));
}

// Returns bytes, of which byte i is 16 if bit i is set, else 0. Copies to byte i the byte of `bits`
// with bit i (`place` is i / 8), and keeps only that bit.
TARGET static inline __m256i fifth_bits(uint32_t bits) {
    __m256i place =
        _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    __m256i mask = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), place), mask);
    return _mm256_and_si256(_mm256_cmpeq_epi8(own, mask), _mm256_set1_epi8(16));
}

// Returns the sums with which a product of weights that are too large by `offset` begins. Only one
// lane has the correction, because all lanes are summed in the end.
TARGET static inline __m256i minus_offset(int offset, const Block *x) {
    return _mm256_castsi128_si256(_mm_cvtsi32_si128(-offset * x->sum));
}

TARGET static inline Partial block_q4(const uint8_t *q, const Block *x) {
    __m256i activations = _mm256_loadu_si256((const __m256i *)x->q);
    return _mm256_cvtepi32_ps(DOT_256(minus_offset(8, x), nibbles(q), activations));
}

// Returns the products of w (from 0 to 63) with x, as floats.
TARGET static inline Partial products_of_bytes(__m256i w, const Block *x) {
    __m256i activations = _mm256_loadu_si256((const __m256i *)x->q);
    return _mm256_cvtepi32_ps(DOT_256(_mm256_setzero_si256(), w, activations));
}

TARGET static inline Partial add_small(Partial sum, const uint8_t *q, const Block *x, float a,
                                       float b) {
    Partial scales = _mm256_set_m128(_mm_set1_ps(b), _mm_set1_ps(a));
    __m256i w = _mm256_loadu_si256((const __m256i *)q);
    return _mm256_fmadd_ps(products_of_bytes(w, x), scales, sum);
}

TARGET static inline Partial add_nibbles(Partial sum, const uint8_t *q, uint32_t fifth,
                                         const Block *x, float a) {
    __m256i w = _mm256_or_si256(nibbles(q), fifth_bits(fifth));
    return _mm256_fmadd_ps(products_of_bytes(w, x), _mm256_set1_ps(a), sum);
}

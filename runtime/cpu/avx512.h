// AVX-512 with VNNI: simd.h in vectors of 16 floats. The instruction for bytes wants one side unsigned.
#include <immintrin.h>

#define NAME(x) x##_avx512
#define NAME_STRING "avx512"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define Q8_OFFSET 128
#define N 16
#define PANELS 2
#define TOKENS 12
#define TOKENS_Q 6
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
#define MOST_OF(v) _mm512_reduce_max_ps(v)
#define ROUND(v) _mm512_roundscale_ps(v, 0)
#define SWAP(v) _mm512_permute_ps(v, 0xb1)
#define POW2(n) _mm512_scalef_ps(_mm512_set1_ps(1), n)
#define LOAD_I(p) _mm512_loadu_si512(p)
#define BF16_LOW(i) _mm512_castsi512_ps(_mm512_slli_epi32(i, 16))
#define BF16_HIGH(i) _mm512_castsi512_ps(_mm512_and_si512(i, _mm512_set1_epi32((int)0xffff0000)))
#define SET_I(x) _mm512_set1_epi32(x)
#define FLOATS(i) _mm512_cvtepi32_ps(i)
#define INTS(v) _mm512_cvtps_epi32(v)
#define ADD_I(a, b) _mm512_add_epi32(a, b)
#define MAX_I(a, b) _mm512_max_epi32(a, b)
#define SUM_I(i) sum_of_ints_avx2(_mm256_add_epi32(_mm512_castsi512_si256(i), _mm512_extracti64x4_epi64(i, 1)))
#define MOST_OF_I(i) _mm512_reduce_max_epi32(i)
#define MAGNITUDE(v) _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff))
#define STORE_8(p, i) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8(i))
#define DOT(c, w, x) _mm512_dpbusd_epi32(c, w, x)
#define DOT_SMALL(c, w, x) _mm512_dpbusd_epi32(c, w, x)
#define AND_15(w) _mm512_and_si512(w, _mm512_set1_epi8(15))
#define SHIFT_4(w) AND_15(_mm512_srli_epi16(w, 4))

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

#include "simd.h"

// The same with products of BF16: pairs of columns at once, each product exact, summed in float32. GCC 9 does not know them.
#if defined(__clang__) || __GNUC__ >= 10
#define BF16_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

BF16_TARGET static void bf16s_avx512(uint16_t *out, const float *x, int n) {
    for (int i = 0; i < n; i += 16) {
        __mmask16 some = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : 0xffff;
        _mm256_mask_storeu_epi16(out + i, some, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, x + i)));
    }
}

// T is at least 4, so that an addition need not wait for the one before.
BF16_TARGET __attribute__((always_inline)) static inline void
tiles_of_pairs(float *y, const uint8_t *tiles, size_t next, const uint16_t *x, int pairs, const int T, const int P, Ahead ahead) {
    __m512 sums[2][12];
    for (int p = 0; p < P; p++)
        for (int t = 0; t < T; t++) sums[p][t] = _mm512_setzero_ps();
    for (int c = 0; c < pairs; c++, tiles += 4 * TILE, x += 2 * T) {
        call_for(&ahead, c);
        __m512bh w = (__m512bh)_mm512_loadu_si512(tiles), w2 = P == 2 ? (__m512bh)_mm512_loadu_si512(tiles + next) : w;
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
            int32_t pair;
            memcpy(&pair, x + 2 * t, 4);
            __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
            sums[0][t] = _mm512_dpbf16_ps(sums[0][t], w, xs);
            if (P == 2) sums[1][t] = _mm512_dpbf16_ps(sums[1][t], w2, xs);
        }
    }
    for (int p = 0; p < P; p++)
        for (int t = 0; t < T; t++) _mm512_storeu_ps(y + t * 2 * TILE + p * TILE, sums[p][t]);
}

BF16_TARGET static void tiles_bf16_pairs(float *y, const uint8_t *tiles, int rows_of_tiles, const uint16_t *x, int cols, int T,
                                         Ahead a) {
    int n = (cols + 1) / 2;
    size_t next = (size_t)n * 4 * TILE;
    bool two = rows_of_tiles == 2;
    if (T == 12) two ? tiles_of_pairs(y, tiles, next, x, n, 12, 2, a) : tiles_of_pairs(y, tiles, next, x, n, 12, 1, a);
    else if (T == 8) two ? tiles_of_pairs(y, tiles, next, x, n, 8, 2, a) : tiles_of_pairs(y, tiles, next, x, n, 8, 1, a);
    else two ? tiles_of_pairs(y, tiles, next, x, n, 4, 2, a) : tiles_of_pairs(y, tiles, next, x, n, 4, 1, a);
}

// kernels_avx512 with these.
static const Kernels *with_bf16(void) {
    static Kernels kernels;
    kernels = kernels_avx512;
    kernels.name = "avx512bf16", kernels.bf16s = bf16s_avx512, kernels.tiles_bf16_pairs = tiles_bf16_pairs;
    return &kernels;
}
#endif

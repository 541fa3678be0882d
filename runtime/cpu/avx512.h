// Defines the operations of simd.h for vectors of 16 floats, with AVX-512. avx512.c and avx512bw.c
// define TARGET, Q8_OFFSET, DOT and DOT_SMALL, then include this file, which includes simd.h.
#include "x86.h"

#define LANES 16
#define TILE_ROWS 2
#define TOKENS 12
#define BLOCK_TOKENS 6

typedef __m512 Floats;
#define LOAD(p) _mm512_loadu_ps(p)
#define LOAD_F16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define LOAD_BF16(p) \
    _mm512_castsi512_ps( \
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define LOAD_8(p) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
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
#define LARGEST(v) _mm512_reduce_max_ps(v)
#define ROUND(v) _mm512_roundscale_ps(v, 0)
#define SWAP(v) _mm512_permute_ps(v, 0xb1)
#define POW2(n) _mm512_scalef_ps(_mm512_set1_ps(1), n)

typedef __m512i Ints;
#define LOAD_I(p) _mm512_loadu_si512(p)
#define BF16_LOW(i) _mm512_castsi512_ps(_mm512_slli_epi32(i, 16))
#define BF16_HIGH(i) _mm512_castsi512_ps(_mm512_and_si512(i, _mm512_set1_epi32((int)0xffff0000)))
#define F16_LOW(i) _mm512_cvtph_ps(_mm512_cvtepi32_epi16(i))
#define F16_HIGH(i) _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(i, 16)))
#define SET_I(x) _mm512_set1_epi32(x)
#define FLOATS(i) _mm512_cvtepi32_ps(i)
#define INTS(v) _mm512_cvtps_epi32(v)
#define ADD_I(a, b) _mm512_add_epi32(a, b)
#define MAX_I(a, b) _mm512_max_epi32(a, b)
#define SUM_I(i) \
    sum_of_8_ints(_mm256_add_epi32(_mm512_castsi512_si256(i), _mm512_extracti64x4_epi64(i, 1)))
#define LARGEST_I(i) _mm512_reduce_max_epi32(i)
#define MAGNITUDE(v) _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff))
#define STORE_8(p, i) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8(i))
#define AND_15(w) _mm512_and_si512(w, _mm512_set1_epi8(15))
#define SHIFT_4(w) AND_15(_mm512_srli_epi16(w, 4))

#include "simd.h"

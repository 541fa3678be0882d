// AVX-512 with VNNI, for x86-64: the kernels of simd.h in vectors of 16 floats. The instruction
// that multiplies bytes (vpdpbusd) needs unsigned weights, so tiles of Q8_0 have an offset of 128.
// The table llamac_avx512bf16 adds products of BF16, for machines that have instructions for them.
#include "kernels.h"

#if defined(__x86_64__)
#define TARGET \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#include "x86.h"

#define LANES 16
#define TILE_ROWS 2
#define TOKENS 12
#define BLOCK_TOKENS 6
#define Q8_OFFSET 128

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
#define DOT(c, w, x) _mm512_dpbusd_epi32(c, w, x)
#define DOT_SMALL(c, w, x) _mm512_dpbusd_epi32(c, w, x)
#define AND_15(w) _mm512_and_si512(w, _mm512_set1_epi8(15))
#define SHIFT_4(w) AND_15(_mm512_srli_epi16(w, 4))

#include "simd.h"

static bool supported(void) {
    return llamac_avx2.supported() && __builtin_cpu_supports("avx512f")
           && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
           && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

const Kernels llamac_avx512 = {.name = "avx512", .supported = supported, SIMD_KERNELS};
#else
const Kernels llamac_avx512 = {.name = "avx512"};
#endif

// Products of BF16: an instruction multiplies pairs of columns. Each product is exact, and sums are
// float32. GCC 9 lacks the intrinsics.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define BF16_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define BF16_INLINE BF16_TARGET __attribute__((always_inline)) static inline

BF16_TARGET static void bf16s(uint16_t *out, const float *x, int n) {
    for (int i = 0; i < n; i += 16) {
        __mmask16 some = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : 0xffff;
        _mm256_mask_storeu_epi16(out + i, some,
                                 (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, x + i)));
    }
}

// Multiplies one or two groups of TILE rows of a row of tiles with T tokens. `tiles` points to the
// first group of the first tile. Each lane adds the pairs of columns in order, whatever T is.
BF16_INLINE void pair_tiles(const TileProduct *p, const uint8_t *tiles, const int T,
                            const int groups) {
    const int pairs = (p->cols + 1) / 2;
    const uint16_t *x = p->x;
    Prefetch ahead = p->prefetch;
    __m512 sums[2][TOKENS];
    for (int r = 0; r < groups; r++)
        for (int t = 0; t < T; t++) sums[r][t] = _mm512_setzero_ps();
    for (int c = 0; c < pairs; c++, tiles += 4 * FLOAT_TILE, x += 2 * T) {
        if (T > 2) prefetch(&ahead, c);
        __m512bh w = (__m512bh)LOAD_I(tiles),
                 w2 = groups == 2 ? (__m512bh)LOAD_I(tiles + 4 * TILE) : w;
        UNROLL for (int t = 0; t < T; t++) {
            int32_t pair;
            memcpy(&pair, x + 2 * t, 4);
            __m512bh xs = (__m512bh)SET_I(pair);
            sums[0][t] = _mm512_dpbf16_ps(sums[0][t], w, xs);
            if (groups == 2) sums[1][t] = _mm512_dpbf16_ps(sums[1][t], w2, xs);
        }
    }
    for (int r = 0; r < groups; r++)
        for (int t = 0; t < T; t++) STORE(p->y + t * 2 * TILE + r * TILE, sums[r][t]);
}

BF16_TARGET static void pairs_product(const TileProduct *product) {
    TileProduct p = *product;
    const size_t size = (size_t)(p.cols + 1) / 2 * 4 * FLOAT_TILE; // bytes of a row of tiles
    const int end = p.first + p.groups;
    for (int g = p.first, n; g < end; g += n, p.y += n * TILE) {
        const uint8_t *tiles = p.tiles + g / 2 * size + g % 2 * 4 * TILE;
        bool two = g % 2 == 0 && g + 1 < end;
        n = two ? 2 : 1;
        if (p.T == TOKENS)
            two ? pair_tiles(&p, tiles, TOKENS, 2) : pair_tiles(&p, tiles, TOKENS, 1);
        else if (p.T == 8) two ? pair_tiles(&p, tiles, 8, 2) : pair_tiles(&p, tiles, 8, 1);
        else if (p.T == 4) two ? pair_tiles(&p, tiles, 4, 2) : pair_tiles(&p, tiles, 4, 1);
        else if (p.T == 2) two ? pair_tiles(&p, tiles, 2, 2) : pair_tiles(&p, tiles, 2, 1);
        else two ? pair_tiles(&p, tiles, 1, 2) : pair_tiles(&p, tiles, 1, 1);
    }
}

static bool supported_with_bf16(void) {
    return supported() && __builtin_cpu_supports("avx512bf16");
}

const Kernels llamac_avx512bf16 = {.name = "avx512bf16",
                                   .supported = supported_with_bf16,
                                   SIMD_KERNELS,
                                   .bf16s = bf16s,
                                   .pairs_product = pairs_product};
#else
const Kernels llamac_avx512bf16 = {.name = "avx512bf16"};
#endif

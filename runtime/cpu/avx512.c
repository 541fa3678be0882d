// AVX-512 with VNNI, for x86-64: one instruction (vpdpbusd) multiplies bytes and adds the products.
// The table llamac_avx512bf16 adds products of BF16, for machines that have instructions for them.
#include "kernels.h"

#if defined(__x86_64__)
#define TARGET \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
// vpdpbusd needs unsigned w
#define Q8_OFFSET 128
#define DOT(c, w, x) _mm512_dpbusd_epi32(c, w, x)
#define DOT_SMALL(c, w, x) DOT(c, w, x)
#include "avx512.h"

static bool supported(void) { return llamac_has_x86(X86_AVX512_VNNI); }

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
// first group of the first tile. Each lane adds the pairs of columns in order, regardless of T.
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

static bool supported_with_bf16(void) { return supported() && llamac_has_x86(X86_AVX512_BF16); }

const Kernels llamac_avx512bf16 = {.name = "avx512bf16",
                                   .supported = supported_with_bf16,
                                   SIMD_KERNELS,
                                   .bf16s = bf16s,
                                   .pairs_product = pairs_product};
#else
const Kernels llamac_avx512bf16 = {.name = "avx512bf16"};
#endif

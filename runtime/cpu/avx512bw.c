// AVX-512 without VNNI, for x86-64: Intel's servers and workstations of 2017 (Skylake).
#include "kernels.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define Q8_OFFSET 0
// the sign of w is moved to x, because maddubs needs unsigned w
#define DOT(c, w, x) DOT_SMALL(c, _mm512_abs_epi8(w), with_sign(x, w))
// maddubs (unsigned w, signed x) adds pairs of products in 16 bits: at most 2 * 128 * 127 < 2^15
#define DOT_SMALL(c, w, x) \
    _mm512_add_epi32(c, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)))
#include <immintrin.h>

// Returns x with the sign of each byte flipped where the byte of w is negative.
TARGET static inline __m512i with_sign(__m512i x, __m512i w) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
}

#include "avx512.h"

static bool supported(void) { return llamac_has_x86(X86_AVX512); }

const Kernels llamac_avx512bw = {.name = "avx512bw", .supported = supported, SIMD_KERNELS};
#else
const Kernels llamac_avx512bw = {.name = "avx512bw"};
#endif

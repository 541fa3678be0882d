// AVX2 with FMA and half-precision conversion, for x86-64.
#include "kernels.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define Q8_OFFSET 0
// the sign of w is moved to x, because maddubs needs unsigned w
#define DOT(c, w, x) DOT_SMALL(c, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
// maddubs (unsigned w, signed x) adds pairs of products in 16 bits: at most 2 * 128 * 127 < 2^15
#define DOT_SMALL(c, w, x) \
    _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)))
#include "avx2.h"

static bool supported(void) { return llamac_has_x86(X86_AVX2); }

const Kernels llamac_avx2 = {.name = "avx2", .supported = supported, SIMD_KERNELS};
#else
const Kernels llamac_avx2 = {.name = "avx2"};
#endif

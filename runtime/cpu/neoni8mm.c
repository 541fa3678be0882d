// The kernels for NEON with products of matrices of bytes (i8mm), as in Neoverse V1 and N2 and most
// ARM processors since.
#include "../os.h"
#include "kernels.h"

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD) // as in neondot.c
#define TARGET
static bool supported(void) { return true; }
#elif defined(__aarch64__) && (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 10)
#ifdef __clang__
#define TARGET __attribute__((target("dotprod,i8mm")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#endif
static bool supported(void) {
    return llamac_neondot.supported && llamac_neondot.supported() && llamac_has_i8mm();
}
#endif

#ifdef TARGET
#define BLOCK_TOKENS 4
#define DOT(c, w, x) vdotq_s32(c, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x))
#define DOT_2X2(c, w, x) vmmlaq_s32(c, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x))
#include "neon.h"

const Kernels llamac_neoni8mm = {.name = "neoni8mm", .supported = supported, SIMD_KERNELS};
#else
const Kernels llamac_neoni8mm = {.name = "neoni8mm"};
#endif

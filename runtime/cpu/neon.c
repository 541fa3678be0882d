// The kernels for NEON, which every 64-bit ARM processor has.
#include "kernels.h"

#if defined(__aarch64__)
#define TARGET
#define BLOCK_TOKENS 3
// Pairs of products are added in 16 bits: at most 2 * 128 * 127 < 2^15
#define DOT(c, w, x) \
    vpadalq_s16(c, vpaddq_s16(vmull_s8(vget_low_s8(vreinterpretq_s8_s32(w)), \
                                       vget_low_s8(vreinterpretq_s8_s32(x))), \
                              vmull_high_s8(vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x))))
#include "neon.h"

static bool supported(void) { return true; }

const Kernels llamac_neon = {.name = "neon", .supported = supported, SIMD_KERNELS};
#else
const Kernels llamac_neon = {.name = "neon"};
#endif

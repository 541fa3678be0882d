// The kernels for NEON with the dot product of bytes (dotprod), which most 64-bit ARM processors
// since 2018 have.
#include "../os.h"
#include "kernels.h"

#if defined(__ARM_FEATURE_DOTPROD) // enabled for the whole program: the default on Apple
#define TARGET
static bool supported(void) { return true; }
#elif defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16)
#ifdef __clang__ // before 16, clang has no target attribute for it
#define TARGET __attribute__((target("dotprod")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
static bool supported(void) { return llamac_has_dotprod(); }
#endif

#ifdef TARGET
#define BLOCK_TOKENS 3
#define DOT(c, w, x) vdotq_s32(c, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x))
#include "neon.h"

const Kernels llamac_neondot = {.name = "neondot", .supported = supported, SIMD_KERNELS};
#else
const Kernels llamac_neondot = {.name = "neondot"};
#endif

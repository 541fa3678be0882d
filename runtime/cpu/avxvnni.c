// AVX2 with AVX-VNNI, for x86-64: one instruction (vpdpbusd) multiplies bytes and adds the
// products. Intel's processors without AVX-512 have it since 2021 (Alder Lake).
#include "kernels.h"

// Compilers that know the instruction. LLVM's clang 12 does, but Apple's clang 12 does not.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 13 : __GNUC__ >= 11)
#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
// vpdpbusd needs unsigned w
#define Q8_OFFSET 128
#define DOT(c, w, x) _mm256_dpbusd_avx_epi32(c, w, x)
#define DOT_SMALL(c, w, x) DOT(c, w, x)
#include "avx2.h"

static bool supported(void) { return llamac_has_x86(X86_AVXVNNI); }

const Kernels llamac_avxvnni = {.name = "avxvnni", .supported = supported, SIMD_KERNELS};
#else
const Kernels llamac_avxvnni = {.name = "avxvnni"};
#endif

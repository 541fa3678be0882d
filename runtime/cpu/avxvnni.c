// AVX2 with AVX-VNNI, for x86-64: one instruction (vpdpbusd) multiplies bytes and adds the
// products. Intel's processors without AVX-512 have it since 2021 (Alder Lake).
#include "kernels.h"

// Compilers that know the instruction. LLVM's clang 12 does, but Apple's clang 12 does not.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 13 : __GNUC__ >= 11)
#include <cpuid.h>
#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
// vpdpbusd needs unsigned w
#define Q8_OFFSET 128
#define DOT(c, w, x) _mm256_dpbusd_avx_epi32(c, w, x)
#define DOT_SMALL(c, w, x) DOT(c, w, x)
#include "avx2.h"

// Reads bit 4 of EAX in subleaf 1 of leaf 7 of CPUID, because clang's __builtin_cpu_supports does
// not know this instruction set before clang 19. A system that saves the registers of AVX2 saves
// those of AVX-VNNI: they are the same.
static bool supported(void) {
    unsigned eax, ebx, ecx, edx;
    return llamac_avx2.supported() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)
           && (eax >> 4 & 1);
}

const Kernels llamac_avxvnni = {.name = "avxvnni", .supported = supported, SIMD_KERNELS};
#else
const Kernels llamac_avxvnni = {.name = "avxvnni"};
#endif

// Chooses the kernels of one instruction set, for the machine that the program runs on.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

#ifndef SAVED_REGISTERS // tests define it
// Returns which registers the system saves when it switches threads (XCR0). Must only be called if
// the system has enabled the instruction xgetbv (OSXSAVE).
static uint32_t saved_registers(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}
#define SAVED_REGISTERS() saved_registers()
#endif

// Does not use __builtin_cpu_supports: in programs compiled by zig, it is a stub that recognises no
// instruction set.
bool llamac_has_x86(X86Set set) {
    enum { FMA = 1 << 12, OSXSAVE = 1 << 27, F16C = 1 << 29, YMM = 0x6, ZMM = 0xe6 };
    const uint32_t avx512_sets = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; // F, DQ, BW, VL
    uint32_t a, b, c, d, a1 = 0, first, saved;
    if (!__get_cpuid_count(1, 0, &a, &b, &first, &d) || !(first & OSXSAVE)) return false;
    saved = SAVED_REGISTERS();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    uint32_t b1, c1, d1;
    if (a && !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return false; // a: last subleaf
    bool avx2 = (saved & YMM) == YMM && (first & FMA) && (first & F16C) && (b >> 5 & 1);
    bool avx512 = avx2 && (saved & ZMM) == ZMM && (b & avx512_sets) == avx512_sets;
    switch (set) {
    case X86_AVX2: return avx2;
    case X86_AVXVNNI: return avx2 && (a1 >> 4 & 1);
    case X86_AVX512: return avx512;
    case X86_AVX512_VNNI: return avx512 && (c >> 11 & 1);
    case X86_AVX512_BF16: return avx512 && (a1 >> 5 & 1);
    }
    return false;
}
#endif

int llamac_find_kernels(const Kernels *found[MAX_KERNELS]) {
    // the best first
    static const Kernels *const known[MAX_KERNELS] = {
        &llamac_avx512bf16, &llamac_avx512,  &llamac_avx512bw, &llamac_avxvnni, &llamac_avx2,
        &llamac_neoni8mm,   &llamac_neondot, &llamac_neon,     &llamac_wasm128, &llamac_reference};
    int n = 0;
    for (int i = 0; i < MAX_KERNELS; i++)
        if (known[i]->supported && known[i]->supported()) found[n++] = known[i];
    return n;
}

const Kernels *llamac_choose_kernels(const char *isa) {
    const Kernels *found[MAX_KERNELS];
    int n = llamac_find_kernels(found);
    for (int i = 0; i < n; i++)
        if (!isa || !*isa || !strcmp(isa, found[i]->name)) return found[i];
    return NULL;
}

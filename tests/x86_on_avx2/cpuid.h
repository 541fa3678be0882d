// Emulates CPUID on a processor with AVX-VNNI; see immintrin.h.
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) \
    (*(a) = (leaf) == 7 && (subleaf) == 1 ? 1 << 4 : 0, *(b) = *(c) = *(d) = 0, 1)

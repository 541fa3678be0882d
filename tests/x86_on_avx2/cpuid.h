// Emulates the CPUID instruction of a processor with every instruction set, under an operating
// system that saves all registers; see immintrin.h.
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(a) = *(b) = *(c) = *(d) = -1, 1)
#define SAVED_REGISTERS() 0xe7

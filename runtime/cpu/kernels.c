// Chooses the kernels of one instruction set, for the machine that the program runs on.
#include "kernels.h"

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

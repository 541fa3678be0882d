// flips FILE NUMBER flips single bits of a GGUF file's tensors, one at a time, and counts those that verify finds.
#define main run_main
#include "../../run.c"
#undef main

int main(int argc, char **argv) {
    if (argc != 3) return 1;
    Text file = read_file(argv[1]);
    Model m = {0};
    const char *wrong = load_model(&m, NULL, (uint8_t *)file.s, file.n);
    if (!wrong) wrong = verify(&m);
    if (wrong) die(argv[1], wrong);
    int found = 0, flips = atoi(argv[2]);
    Sampler random = {.state = 1};
    for (int i = 0; i < flips; i++) {
        uint64_t bit = (uint64_t)(random_float(&random) * m.data_size * 8);
        uint8_t *byte = (uint8_t *)m.data + bit / 8, mask = (uint8_t)(1 << bit % 8);
        *byte ^= mask;
        found += verify(&m) != NULL;
        *byte ^= mask;
    }
    printf("%d of %d flips found\n", found, flips);
    free(m.weights.layers);
    free(file.s);
    return 0;
}

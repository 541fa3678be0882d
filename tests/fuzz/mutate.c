// Runs a fuzz target without libFuzzer: first on each file as it is, then on RUNS random mutations
// of the files. The same files and RUNS give the same mutations. Prints the numbers of inputs and
// mutations. If the target has an error, the sanitizers end the program.
//
// Usage: TARGET=name mutate RUNS FILE...
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LONGEST = 1 << 16 };
typedef struct {
    uint8_t bytes[LONGEST];
    size_t size;
} Input;

static uint64_t state = 88172645463325252ull;

static size_t below(size_t n) { // a number 0..n-1 (Marsaglia's xorshift)
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return n ? state % n : 0;
}

static Input *read_inputs(int n, char **paths) {
    Input *inputs = calloc(n, sizeof *inputs);
    for (int i = 0; inputs && i < n; i++) {
        FILE *file = fopen(paths[i], "rb");
        if (!file) exit(fprintf(stderr, "mutate: %s cannot be read\n", paths[i]) > 0);
        inputs[i].size = fread(inputs[i].bytes, 1, LONGEST, file);
        fclose(file);
    }
    return inputs;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static void change(Input *input, const Input *other) {
    static const int64_t values[] = {0,         1,         -1,        2,         7,       8,
                                     31,        32,        33,        255,       256,     65536,
                                     INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1 << 20, 1 << 24};
    if (!input->size) return;
    size_t at = below(input->size), left = input->size - at, n = 1 + below(least(left, 64));
    int64_t value = values[below(sizeof values / sizeof *values)];
    uint8_t *here = input->bytes + at;
    switch (below(8)) {
    case 0: *here ^= 1 << below(8); break;
    case 1: *here = (uint8_t)below(256); break;
    case 2: memcpy(here, &value, least(left, 4)); break;
    case 3: memcpy(here, &value, least(left, 8)); break;
    case 4: *here += (uint8_t)(below(9) - 4); break;
    case 5: // delete n bytes
        memmove(here, here + n, left - n);
        input->size -= n;
        break;
    case 6: // duplicate n bytes
        if (input->size + n > LONGEST) break;
        memmove(here + n, here, left);
        input->size += n;
        break;
    case 7: // copy n bytes of another input
        n = least(n, other->size);
        memcpy(here, other->bytes + below(other->size - n + 1), n);
    }
}

int main(int argc, char **argv) {
    int n = argc - 2, runs = argc > 2 ? atoi(argv[1]) : 0;
    Input *inputs = read_inputs(n, argv + 2), *input = malloc(sizeof *input);
    if (n < 1 || !inputs || !input)
        return fprintf(stderr, "usage: TARGET=name mutate RUNS FILE...\n") > 0;
    for (int i = 0; i < n; i++) LLVMFuzzerTestOneInput(inputs[i].bytes, inputs[i].size);
    for (int i = 0; i < runs; i++) {
        *input = inputs[below(n)];
        for (size_t changes = 1 + below(4); changes--;) change(input, &inputs[below(n)]);
        LLVMFuzzerTestOneInput(input->bytes, input->size);
    }
    fprintf(stderr, "%d inputs, %d mutations\n", n, runs);
    free(inputs);
    free(input);
    return 0;
}

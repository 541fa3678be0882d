// Flips NUMBER random bits of the tensors in a GGUF file, one at a time, and counts how many flips
// llamac_verify detects.
//
// Usage: flips FILE NUMBER
#define _DEFAULT_SOURCE 1
#include "../../runtime/model.h"

int main(int argc, char **argv) {
    llamac_error error;
    FILE *file = argc == 3 ? fopen(argv[1], "rb") : NULL;
    if (!file || fseek(file, 0, SEEK_END)) return 1;
    size_t size = ftell(file);
    uint8_t *bytes = malloc(size);
    rewind(file);
    if (!bytes || fread(bytes, 1, size, file) != size) return 1;
    fclose(file);
    llamac_model *m = llamac_open_memory(bytes, size, LLAMAC_NO_TOKENIZER, &error);
    if (!m || !llamac_verify(m, &error)) return fprintf(stderr, "%s: %s\n", argv[1], error.text), 1;
    int found = 0, flips = atoi(argv[2]);
    srandom(1);
    for (int i = 0; i < flips; i++) {
        uint64_t bit = (uint64_t)random() % (m->transformer.data_size * 8);
        uint8_t *byte = (uint8_t *)m->transformer.data + bit / 8, mask = (uint8_t)(1 << bit % 8);
        *byte ^= mask;
        found += !llamac_verify(m, NULL);
        *byte ^= mask;
    }
    printf("%d of %d flips found\n", found, flips);
    llamac_close(m);
    free(bytes);
    return 0;
}

// Prints bytes of a model as run does, for fuzz.c.
#define main run_main
#include "../../run.c"
#undef main

void print_bytes_of_model(const char *s, size_t n) {
    for (size_t half = n / 2; n; s += half, n -= half, half = n) print_text(s, half, false);
}

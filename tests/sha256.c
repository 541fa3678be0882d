// Prints the SHA-256 of the first n bytes of stdin for n = 0, 1, ..., N. Each line has two digests:
// by the accelerated code, if the processor supports it, and by the portable code.
//
// Usage: sha256 N
#include <stdio.h>
#include <stdlib.h>
#include "../runtime/sha256.h"

static void print_digest(const unsigned char *bytes, size_t n, bool accelerated, char end) {
    unsigned char digest[SHA256_BYTES];
    Sha256 s = llamac_sha256_begin();
    s.accelerated &= accelerated;
    llamac_sha256_add(&s, bytes, n / 3); // in two parts
    llamac_sha256_add(&s, bytes + n / 3, n - n / 3);
    llamac_sha256_end(&s, digest);
    for (int i = 0; i < SHA256_BYTES; i++) printf("%02x", digest[i]);
    putchar(end);
}

int main(int argc, char **argv) {
    static unsigned char bytes[4096];
    size_t max = argc > 1 ? (size_t)atoi(argv[1]) : 0;
    if (max > sizeof bytes || fread(bytes, 1, max, stdin) != max) return 1;
    for (size_t n = 0; n <= max; n++)
        print_digest(bytes, n, true, ' '), print_digest(bytes, n, false, '\n');
    return 0;
}

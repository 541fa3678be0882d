// SHA-256 (FIPS 180-4), for the checksums of model files and saved sequences.
#ifndef LLAMAC_SHA256_H
#define LLAMAC_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SHA256_BYTES = 32 };

typedef struct {
    uint32_t state[8];
    uint8_t block[64]; // the last bytes, which do not fill a block yet
    uint64_t n;        // bytes so far
    bool accelerated;  // with the SHA instructions of x86
} Sha256;

Sha256 llamac_sha256_begin(void);

// Adds n bytes.
void llamac_sha256_add(Sha256 *, const void *bytes, size_t n);

// Writes the digest of all bytes that were added. Nothing can be added afterwards.
void llamac_sha256_end(Sha256 *, uint8_t digest[SHA256_BYTES]);

#endif

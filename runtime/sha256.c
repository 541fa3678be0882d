// SHA-256 (FIPS 180-4).
#include <string.h>
#include "backend.h" // refuses -ffast-math
#include "sha256.h"

// Round constants of SHA-256: the first 32 bits of the fractional parts of the cube roots of the
// first 64 primes.
static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate_right(uint32_t x, int n) { return x >> n | x << (32 - n); }

// A round. The standard moves each of the eight words to the next place; here the words stay, and
// the caller passes them in a rotated order, which saves the moves.
#define ROUND(a, b, c, d, e, f, g, h, i) \
    do { \
        h += (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25)) \
             + ((e & f) ^ (~e & g)) + round_constants[i] + w[i]; \
        d += h; \
        h += (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22)) \
             + ((a & b) ^ (a & c) ^ (b & c)); \
    } while (0)

static void add_block(uint32_t state[8], const uint8_t block[64]) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | block[4 * i + 1] << 16 | block[4 * i + 2] << 8
               | block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (rotate_right(a, 7) ^ rotate_right(a, 18) ^ a >> 3) + w[i - 7]
               + (rotate_right(b, 17) ^ rotate_right(b, 19) ^ b >> 10);
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; i += 8) {
        ROUND(a, b, c, d, e, f, g, h, i);
        ROUND(h, a, b, c, d, e, f, g, i + 1);
        ROUND(g, h, a, b, c, d, e, f, i + 2);
        ROUND(f, g, h, a, b, c, d, e, i + 3);
        ROUND(e, f, g, h, a, b, c, d, i + 4);
        ROUND(d, e, f, g, h, a, b, c, i + 5);
        ROUND(c, d, e, f, g, h, a, b, i + 6);
        ROUND(b, c, d, e, f, g, h, a, i + 7);
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

// ----------------------------------------------------------------------------
// The SHA instructions of x86, which are 8 times as fast on a Xeon

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

static bool has_instructions(void) {
    unsigned a, b, c, d;
    bool known = __get_cpuid_count(7, 0, &a, &b, &c, &d);
    return known && b >> 29 & 1; // with SSE4.1
}

// The instructions keep the words as (f, e, b, a) and (h, g, d, c), lowest lane first. Two rounds
// compute the new first vector from both; the old first vector is then the second one.
__attribute__((target("sha,sse4.1"))) static void add_blocks_accelerated(uint32_t state[8],
                                                                         const uint8_t *blocks,
                                                                         size_t n) {
    const __m128i big_endian = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    __m128i first = _mm_set_epi32(state[0], state[1], state[4], state[5]);
    __m128i second = _mm_set_epi32(state[2], state[3], state[6], state[7]);
    for (; n; n--, blocks += 64) {
        __m128i w[4], old_first = first, old_second = second; // w: the latest 16 words
        for (int i = 0; i < 16; i++) {                        // four rounds each
            __m128i *new = &w[i % 4], *one = &w[(i + 1) % 4], *two = &w[(i + 2) % 4],
                    *three = &w[(i + 3) % 4];
            if (i < 4) {
                __m128i bytes = _mm_loadu_si128((const __m128i *)(blocks + 16 * i));
                *new = _mm_shuffle_epi8(bytes, big_endian);
            } else {
                __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(*new, *one),
                                            _mm_alignr_epi8(*three, *two, 4));
                *new = _mm_sha256msg2_epu32(sum, *three);
            }
            const __m128i *constants = (const __m128i *)(round_constants + 4 * i);
            __m128i words = _mm_add_epi32(*new, _mm_loadu_si128(constants));
            second = _mm_sha256rnds2_epu32(second, first, words);
            first = _mm_sha256rnds2_epu32(first, second, _mm_shuffle_epi32(words, 0x0e));
        }
        first = _mm_add_epi32(first, old_first), second = _mm_add_epi32(second, old_second);
    }
    uint32_t feba[4], hgdc[4];
    _mm_storeu_si128((__m128i *)feba, first);
    _mm_storeu_si128((__m128i *)hgdc, second);
    for (int i = 0; i < 2; i++) {
        state[i] = feba[3 - i], state[2 + i] = hgdc[3 - i];
        state[4 + i] = feba[1 - i], state[6 + i] = hgdc[1 - i];
    }
}
#else
static bool has_instructions(void) { return false; }
static void add_blocks_accelerated(uint32_t state[8], const uint8_t *blocks, size_t n) {
    (void)state, (void)blocks, (void)n; // never called
}
#endif

// ----------------------------------------------------------------------------

static void add_blocks(Sha256 *s, const uint8_t *blocks, size_t n) {
    if (s->accelerated) add_blocks_accelerated(s->state, blocks, n);
    else
        for (; n; n--, blocks += 64) add_block(s->state, blocks);
}

Sha256 llamac_sha256_begin(void) {
    return (Sha256){.accelerated = has_instructions(),
                    .state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                              0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void llamac_sha256_add(Sha256 *s, const void *bytes, size_t n) {
    const uint8_t *from = bytes;
    size_t held = s->n % 64; // bytes in s->block
    s->n += n;
    if (held) {
        size_t more = n < 64 - held ? n : 64 - held;
        memcpy(s->block + held, from, more);
        from += more, n -= more;
        if (held + more < 64) return;
        add_blocks(s, s->block, 1);
    }
    add_blocks(s, from, n / 64);
    if (n % 64) memcpy(s->block, from + n / 64 * 64, n % 64);
}

void llamac_sha256_end(Sha256 *s, uint8_t digest[SHA256_BYTES]) {
    static const uint8_t padding[64] = {0x80};
    uint8_t length[8];
    uint64_t bits = 8 * s->n;
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(bits >> (56 - 8 * i));
    llamac_sha256_add(s, padding, 1 + (119 - s->n % 64) % 64); // up to 8 bytes before a block ends
    llamac_sha256_add(s, length, 8);
    for (int i = 0; i < SHA256_BYTES; i++)
        digest[i] = (uint8_t)(s->state[i / 4] >> (24 - i % 4 * 8));
}

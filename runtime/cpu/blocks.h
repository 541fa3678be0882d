// Describes and reads quantised blocks (ggml's layouts) in plain C. All functions are inlined, so
// they are compiled for the instruction set of the file that includes them, and their conditions on
// a constant type cost nothing.
#ifndef BLOCKS_H
#define BLOCKS_H

#include "kernels.h"

#define ALWAYS __attribute__((always_inline)) static inline

// A block as plain numbers. Number i is scale[i / n] * (q[i] - zero_of(type)) - min[i / n], with
// n = numbers_per_scale(type).
typedef struct {
    uint8_t q[256];
    float scale[16], min[8]; // min is set only if has_minima(type)
} Numbers;

// Returns the offset of the stored numbers. Q8_0 stores signed bytes, which read_block makes
// unsigned.
ALWAYS int zero_of(Type type) {
    return type == Q8_0 ? 128 : type == Q4_0 ? 8 : type == Q5_0 ? 16 : type == Q6_K ? 32 : 0;
}
// Returns whether scales and minima of the eight sub-blocks have 6 bits each: see read_k_scales.
ALWAYS bool has_k_scales(Type type) { return type == Q4_K || type == Q5_K; }
ALWAYS bool has_fifth_bits(Type type) { return type == Q5_0 || type == Q5_1; }
ALWAYS bool has_minima(Type type) { return type == Q4_1 || type == Q5_1 || has_k_scales(type); }
ALWAYS int numbers_per_scale(Type type) { return type == Q6_K ? 16 : 32; }

// A block consists of one or two half-precision numbers (the scale and, if the type has minima, the
// minimum or its factor) and words of 4 bytes. halves_of and words_of return the number of each,
// halves_at and words_at their byte offset in the block.
ALWAYS int halves_of(Type type) { return has_minima(type) ? 2 : 1; }
ALWAYS int halves_at(Type type) { return type == Q6_K ? 208 : 0; }
ALWAYS int words_at(Type type) { return type == Q6_K ? 0 : 2 * halves_of(type); }
ALWAYS int words_of(Type type) { return (block_size(type).bytes - 2 * halves_of(type)) / 4; }

ALWAYS float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return half_to_float(half);
}

// q (2 n,) = the low nibbles of n bytes, then the high nibbles.
ALWAYS void read_nibbles(uint8_t *q, const uint8_t *bytes, int n) {
    for (int i = 0; i < n; i++) q[i] = bytes[i] & 15;
    for (int i = 0; i < n; i++) q[n + i] = bytes[i] >> 4;
}

// Reads the eight scales and eight minima, of 6 bits each, from the 12 bytes of Q4_K and Q5_K.
// The low 6 bits of bytes 0..3 hold scales 0..3, those of bytes 4..7 minima 0..3. The low nibbles
// of bytes 8..11 hold the low 4 bits of scales 4..7, their high nibbles those of minima 4..7. The
// upper 2 bits of scales 4..7 are in those of bytes 0..3, of minima 4..7 in those of bytes 4..7.
ALWAYS void read_k_scales(Numbers *n, const uint8_t *bytes, float scale, float min) {
    uint32_t a, b, c;
    memcpy(&a, bytes, 4), memcpy(&b, bytes + 4, 4), memcpy(&c, bytes + 8, 4);
    uint32_t scale_words[2] = {a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)};
    uint32_t min_words[2] = {b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)};
    uint8_t scales[8], mins[8];
    memcpy(scales, scale_words, 8), memcpy(mins, min_words, 8);
    for (int i = 0; i < 8; i++) n->scale[i] = scale * scales[i], n->min[i] = min * mins[i];
}

// Reads Q4_K, or Q5_K if `fifth` is not NULL. Each 32 bytes of nibbles hold 64 numbers: the low
// nibbles, then the high nibbles.
ALWAYS void read_k(Numbers *n, const uint8_t *block, const uint8_t *nibbles, const uint8_t *fifth) {
    read_k_scales(n, block + 4, half_at(block), half_at(block + 2));
    for (int i = 0; i < 4; i++) read_nibbles(n->q + 64 * i, nibbles + 32 * i, 32);
    for (int i = 0; fifth && i < 8; i++) // bit i of byte j belongs to number 32 i + j
        for (int j = 0; j < 32; j++) n->q[32 * i + j] |= (fifth[j] >> i & 1) << 4;
}

// Reads Q6_K. The 128 numbers of each half of a block have their lower four bits in 64 bytes (the
// low nibbles, then the high nibbles), their upper two bits in 32 bytes.
ALWAYS void read_q6_k(Numbers *n, const uint8_t *block) {
    for (int half = 0; half < 2; half++) {
        uint8_t *q = n->q + 128 * half;
        read_nibbles(q, block + 64 * half, 64);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 32; j++)
                q[32 * i + j] |= (block[128 + 32 * half + j] >> 2 * i & 3) << 4;
    }
    float scale = half_at(block + 208);
    for (int i = 0; i < 16; i++) n->scale[i] = scale * (int8_t)block[192 + i];
}

ALWAYS void read_block(Type type, Numbers *n, const uint8_t *block) {
    if (type == Q6_K) read_q6_k(n, block);
    else if (type == Q4_K) read_k(n, block, block + 16, NULL);
    else if (type == Q5_K) read_k(n, block, block + 48, block + 16);
    if (block_size(type).numbers == 256) return;
    n->scale[0] = half_at(block);
    if (has_minima(type)) n->min[0] = -half_at(block + 2); // Q4_1 and Q5_1 add their minimum
    if (type == Q8_0)
        for (int i = 0; i < 32; i++) n->q[i] = block[2 + i] ^ 0x80; // adds 128
    else read_nibbles(n->q, block + block_size(type).bytes - 16, 16);
    if (!has_fifth_bits(type)) return;
    uint32_t fifth;
    memcpy(&fifth, block + words_at(type), 4);
    for (int i = 0; i < 32; i++) n->q[i] |= (fifth >> i & 1) << 4;
}

#endif

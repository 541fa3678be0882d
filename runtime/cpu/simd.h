// The kernels in vector code. The file of an instruction set (ISA) defines the macros, types and
// functions below and includes this file. Its table of kernels (struct Kernels) then consists of
// SIMD_KERNELS, at the end of this file, and of the fields that depend on the ISA: name, supported
// and, if it has them, bf16s and pairs_product.
//   TARGET               attribute of functions that use the instruction set
//   LANES                lanes of a vector
//   Floats               a vector of LANES floats
//   Ints                 a vector of LANES int32, or of 4 LANES bytes
//   TILE_ROWS            rows of tiles that a product computes at once, 1 or 2
//   TOKENS               max tokens that a product of floats computes at once: their sums must fit
//                        in registers, beside the weights of TILE_ROWS rows of tiles
//   FLOAT_STREAMS        rows of tiles of F32 that are multiplied with one token at once: 1, the
//                        default, or 2
//   UNROLL_WORDS         UNROLL if a product of Blocks gains from an unrolled loop over the words
//                        of a sub-block; empty by default
//   BLOCK_TOKENS         like TOKENS, for a product of Blocks, which also has integer sums
//   LOAD, LOAD_F16, LOAD_BF16, LOAD_8 (from int8), STORE, STORE_F16, SET, ADD, MUL, DIV, MAX, MIN,
//                        FMA (a * b + c), SUM (of the lanes), ROUND. MAX(a, b) and MIN(a, b) are
//                        NaN if b is NaN; if only a is NaN, they are NaN or b, depending on the ISA
//   LARGEST(v)           the largest lane, any value if one is NaN
//   SWAP(v)              exchanges the lanes of each pair
//   POW2(n)              2^n for integers n from -126 to 127
//   BF16_LOW(i), BF16_HIGH(i), F16_LOW(i), F16_HIGH(i)  convert the lower or upper 16 bits of each
//                        lane to a float
//   LOAD_I, SET_I, FLOATS (from int32), INTS (from floats, to nearest even), ADD_I, MAX_I, SUM_I,
//                        LARGEST_I
//   MAGNITUDE(v)         the bits of the floats, with the sign cleared
//   STORE_8(p, i)        stores int32 from -127 to 127 as bytes
//   Q8_OFFSET            added to the bytes in tiles of Q8_0: 128 if DOT needs unsigned w, else 0
//   DOT(c, w, x)         adds to each int32 lane of c the four products of the bytes of w and x in
//                        that lane; w is unsigned if Q8_OFFSET is 128, else signed
//   DOT_SMALL(c, w, x)   the same for w from 0 to 63
//   AND_15, SHIFT_4      the low nibble, the high nibble of each byte
// Only if the ISA multiplies matrices of bytes, in vectors of 4 lanes:
//   DOT_2X2(c, w, x)     w is 8 bytes of each of two rows, x of each of two tokens; adds the
//                        products of row 0 with both tokens, then of row 1, to the lanes of c
//   LOAD_2X8(p, q)       loads 8 bytes from p, then 8 from q
//   EVEN_32(a, b), ODD_32(a, b)  of Quads: a0 a2 b0 b2, a1 a3 b1 b3
// For packing, four words of 4 bytes:
//   Quad, LOAD_QUAD, STORE_QUAD, SET_QUAD, XOR_QUAD, LOW_32(a, b) = a0 b0 a1 b1,
//                        HIGH_32 = a2 b2 a3 b3
// INLINE functions are inlined with constants for the type and for the numbers of tokens and rows,
// so that their conditions on these cost nothing.
#include <math.h>
#include "blocks.h"

// clang-format off: it does not know UNROLL

#ifndef FLOAT_STREAMS
#define FLOAT_STREAMS 1
#endif
#ifndef UNROLL_WORDS
#define UNROLL_WORDS
#endif
#define INLINE TARGET __attribute__((always_inline)) static inline
#define VECTORS (TILE / LANES) // vectors for TILE floats
#define SUMS (TILE_ROWS * VECTORS) // vectors of sums for each token
#ifdef __clang__ // unrolled loops keep arrays of vectors in registers
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t SignedWords __attribute__((vector_size(4 * LANES)));

// Loads LANES numbers of w (F32, F16, BF16 or INT8_GROUPS), from number i on.
INLINE Floats load(Type type, const void *w, size_t i) {
    if (type == F16) return LOAD_F16((const uint16_t *)w + i);
    if (type == BF16) return LOAD_BF16((const uint16_t *)w + i);
    if (type == INT8_GROUPS) return LOAD_8((const int8_t *)w + i);
    return LOAD((const float *)w + i);
}

// Loads numbers i to i + left - 1 of w (F32, F16 or BF16), where left < LANES. The other lanes are
// zero.
INLINE Floats load_tail(Type type, const void *w, size_t i, int left) {
    float tail[LANES] = {0}; // LANES numbers of the largest type
    size_t size = type == F32 ? 4 : 2;
    memcpy(tail, (const char *)w + i * size, left * size);
    return load(type, tail, 0);
}

// Load and store LANES numbers of x, or only `left` if that is fewer.
INLINE Floats load_up_to(const float *x, int left) {
    return left < LANES ? load_tail(F32, x, 0, left) : LOAD(x);
}

INLINE void store_up_to(float *x, Floats v, int left) {
    float tail[LANES];
    STORE(left < LANES ? tail : x, v);
    if (left < LANES) memcpy(x, tail, left * sizeof *x);
}

#include "simd_rows.h"
#include "simd_tiles.h"
#include "simd_blocks.h"
#include "simd_elementwise.h"
#include "simd_attention.h"

// Defines separate kernels for one quantised type, so that `type` is a constant in them.
#define BLOCK_KERNELS(name, type) \
    TARGET static void pack_##name(uint8_t *tiles, const uint8_t *rows, size_t stride, int n) { \
        pack_blocks(type, tiles, rows, stride, n); \
    } \
    TARGET static void product_##name(const TileProduct *p) { product_of_blocks(type, *p); }

// K-quants have blocks of 256, so they also have `unpack`.
#define K_KERNELS(name, type) \
    BLOCK_KERNELS(name, type) \
    TARGET static void unpack_##name(uint8_t *out, const uint8_t *tiles, int n) { \
        unpack_tiles(type, out, tiles, n); \
    }

BLOCK_KERNELS(q8_0, Q8_0)
BLOCK_KERNELS(q4_0, Q4_0)
BLOCK_KERNELS(q4_1, Q4_1)
BLOCK_KERNELS(q5_0, Q5_0)
BLOCK_KERNELS(q5_1, Q5_1)
K_KERNELS(q4_k, Q4_K)
K_KERNELS(q5_k, Q5_K)
K_KERNELS(q6_k, Q6_K)

#define KERNELS_OF(name) {.pack = pack_##name, .product = product_##name}
#define K_KERNELS_OF(name) \
    {.pack = pack_##name, .product = product_##name, .unpack = unpack_##name}

// PANEL is defined in simd_attention.h.
#define SIMD_KERNELS \
    .tokens = TOKENS, .panel_queries = PANEL, \
    .types = {[F32] = {dot_f32, pack_words, product_f32, NULL}, \
              [F16] = {.pack = pack_words, .product = product_f16}, \
              [BF16] = {.pack = pack_words, .product = product_bf16}, \
              [Q8_0] = KERNELS_OF(q8_0), [Q4_0] = KERNELS_OF(q4_0), [Q4_1] = KERNELS_OF(q4_1), \
              [Q5_0] = KERNELS_OF(q5_0), [Q5_1] = KERNELS_OF(q5_1), [Q4_K] = K_KERNELS_OF(q4_k), \
              [Q5_K] = K_KERNELS_OF(q5_k), [Q6_K] = K_KERNELS_OF(q6_k)}, \
    .floats_f16 = floats_f16, .floats_bf16 = floats_bf16, .halves = halves, .quantize = quantize, \
    .transpose = transpose, .swiglu = swiglu, .rotate = rotate, .rotate_halves = rotate_halves, \
    .largest = largest, .exponentials = exponentials, .multiply = multiply, .scores = scores, \
    .mix = mix, .panel_product = panel_product

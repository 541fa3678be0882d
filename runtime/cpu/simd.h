// The kernels in vectors. The file of an instruction set defines the macros below and includes this
// file. SIMD_KERNELS, at the end, initialises its table of kernels.
//   TARGET               attribute of functions that use the instruction set
//   LANES                lanes of a vector
//   Floats, Ints         vectors of LANES floats; of LANES int32 or 4 LANES bytes
//   TILE_ROWS            rows of tiles worked on at once, 1 or 2
//   TOKENS, BLOCK_TOKENS tokens worked on at once, of floats and of Blocks: so many that the sums
//                        (or sums and products) and the weights of all rows fit in registers
//   LOAD, LOAD_F16, LOAD_BF16, LOAD_8 (from int8), STORE, STORE_F16, SET, ADD, MUL, DIV, MAX, MIN,
//                        FMA (a * b + c), SUM (of the lanes), ROUND. MAX and MIN return the second
//                        operand if one is NaN
//   LARGEST(v)           the largest lane, any lane if one is NaN
//   SWAP(v)              exchanges the lanes of each pair
//   POW2(n)              2^n for integers n from -126 to 127
//   LOAD_I, SET_I, FLOATS (from int32), INTS (from floats, to nearest even), ADD_I, MAX_I, SUM_I,
//                        LARGEST_I
//   MAGNITUDE(v)         bits of the floats without the sign
//   STORE_8(p, i)        stores int32 from -127 to 127 as bytes
//   BF16_LOW(i), BF16_HIGH(i)  the lower, the upper halves of 32 bits as floats
//   DOT(c, w, x)         c + the products of the four bytes of each lane; w is unsigned if
//                        Q8_OFFSET is 128, else signed
//   DOT_SMALL(c, w, x)   the same for w from 0 to 63
//   AND_15, SHIFT_4      of bytes: w & 15; w >> 4, with the upper four bits cleared
//   Q8_OFFSET            added to the bytes in tiles of Q8_0
//   Partial, PARTIAL_SET, PARTIAL_FMA, PARTIAL_SUM(a, b): floats that sum the products of 32 bytes
//   block_q8(q, x), block_q4(q, x)  Partial products of the numbers of one block with Block x
//   add_small(sum, q, x, a, b)  sum + a times the products of the first 16 bytes of q, which are
//                        from 0 to 63, + b times those of the others
//   add_nibbles(sum, q, fifth, x, a)  sum + a times the products of 32 numbers: the low nibbles of
//                        q (16,), then the high nibbles, each with its bit of `fifth` on top
//   HALF(h)              a half as float
//   Quad, LOAD_QUAD, STORE_QUAD, SET_QUAD, XOR_QUAD, LOW_32(a, b) = a0 b0 a1 b1,
//                        HIGH_32 = a2 b2 a3 b3: four int32
// INLINE functions are inlined with constants for the type and for the numbers of tokens and rows.
#include <math.h>
#include "blocks.h"

// clang-format off: it does not know UNROLL

#define INLINE TARGET __attribute__((always_inline)) static inline
#define VECTORS (TILE / LANES) // vectors for TILE floats
#define SUMS (TILE_ROWS * VECTORS)
#ifdef __clang__ // unrolled loops keep arrays of vectors in registers
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t SignedWords __attribute__((vector_size(4 * LANES)));

// A vector of a type, from number i of w on.
INLINE Floats load(Type type, const void *w, size_t i) {
    if (type == F16) return LOAD_F16((const uint16_t *)w + i);
    if (type == BF16) return LOAD_BF16((const uint16_t *)w + i);
    if (type == INT8_GROUPS) return LOAD_8((const int8_t *)w + i);
    return LOAD((const float *)w + i);
}

// The last `left` < LANES numbers of w from i on, followed by zeros.
INLINE Floats load_tail(Type type, const void *w, size_t i, int left) {
    float tail[LANES] = {0}; // large enough for each type
    size_t size = type == F32 ? 4 : 2;
    memcpy(tail, (const char *)w + i * size, left * size);
    return load(type, tail, 0);
}

// Load and store LANES numbers of x, or only `left` if fewer are left.
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

// The kernels of a quantised type. K-quants have blocks of 256.
#define BLOCK_KERNELS(name, type, dot) \
    TARGET static float dot_##name(const void *row, const void *x, int cols) { \
        return dot(type, row, x, cols / 32); \
    } \
    TARGET static void pack_##name(uint8_t *tiles, const uint8_t *rows, size_t stride, int n) { \
        pack_blocks(type, tiles, rows, stride, n); \
    } \
    TARGET static void product_##name(const TileProduct *p) { product_of_blocks(type, *p); }

#define K_KERNELS(name, type) \
    BLOCK_KERNELS(name, type, dot_numbers) \
    TARGET static void unpack_##name(uint8_t *out, const uint8_t *tiles, int n) { \
        unpack_tiles(type, out, tiles, n); \
    }

BLOCK_KERNELS(q8_0, Q8_0, dot_blocks)
BLOCK_KERNELS(q4_0, Q4_0, dot_blocks)
BLOCK_KERNELS(q4_1, Q4_1, dot_nibbles)
BLOCK_KERNELS(q5_0, Q5_0, dot_nibbles)
BLOCK_KERNELS(q5_1, Q5_1, dot_nibbles)
K_KERNELS(q4_k, Q4_K)
K_KERNELS(q5_k, Q5_K)
K_KERNELS(q6_k, Q6_K)

#define KERNELS_OF(name) {dot_##name, pack_##name, product_##name, NULL}
#define K_KERNELS_OF(name) {dot_##name, pack_##name, product_##name, unpack_##name}

#define SIMD_KERNELS \
    .tokens = TOKENS, .queries = PANEL, \
    .types = {[F32] = {dot_f32, pack_words, product_f32, NULL}, [F16] = {.dot = dot_f16}, \
              [BF16] = {dot_bf16, pack_words, product_bf16, NULL}, \
              [Q8_0] = KERNELS_OF(q8_0), [Q4_0] = KERNELS_OF(q4_0), [Q4_1] = KERNELS_OF(q4_1), \
              [Q5_0] = KERNELS_OF(q5_0), [Q5_1] = KERNELS_OF(q5_1), [Q4_K] = K_KERNELS_OF(q4_k), \
              [Q5_K] = K_KERNELS_OF(q5_k), [Q6_K] = K_KERNELS_OF(q6_k)}, \
    .floats_f16 = floats_f16, .floats_bf16 = floats_bf16, .halves = halves, .quantize = quantize, \
    .transpose = transpose, .swiglu = swiglu, .rotate = rotate, .rotate_halves = rotate_halves, \
    .largest = largest, .exponentials = exponentials, .multiply = multiply, .scores = scores, \
    .mix = mix, .panel_product = panel_product

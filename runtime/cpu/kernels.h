// The interface between the CPU backend and the kernels of an instruction set (ISA). reference.c
// has each kernel in plain C, which also runs where no vector instructions are available; tests
// compare all other kernels with it. simd.h has the same kernels in vectors. avx2.c, avx512.c,
// neon.c and neondot.c each compile it for one instruction set.
#ifndef KERNELS_H
#define KERNELS_H

#include <string.h>
#include "../backend.h"

// 32 activations in 8 bits. A product with quantised weights is a sum of products of bytes, so
// activations are quantised once for all matrices that they are multiplied with.
typedef struct {
    float scale;  // largest magnitude / 127
    int16_t sum;  // of q
    int16_t half; // sum of the first 16 of q
    int8_t q[32]; // round(x / scale)
} Block;

// Tiles: the weights of TILE rows of a matrix, reordered so that the numbers that one instruction
// multiplies are next to each other. Rows 0..15 of the matrix become its first row of tiles, rows
// 16..31 its second; rows missing at the end are zero. Each tile has one unit of all 16 rows: a
// column of F32, two columns of BF16, a block of 32 or 256 columns of a quantised type. If w[r][c]
// is row r, column c, the first row of tiles is
//
//         tile 0, 64 bytes                            tile 1
//   F32   w[0][0]   w[1][0]   ... w[15][0]          | w[0][1]   w[1][1]   ... w[15][1]   | ...
//   BF16  w[0][0,1] w[1][0,1] ... w[15][0,1]        | w[0][2,3] w[1][2,3] ... w[15][2,3] | ...
//
//         tile 0, 544 bytes                                                      tile 1
//   Q8_0  16 half-precision scales, one for each row                           | 16 scales
//         word 0: w[0][0..3]   w[1][0..3]   ... w[15][0..3]      64 bytes      | w[0][32..35] ...
//         word 1: w[0][4..7]   w[1][4..7]   ... w[15][4..7]                    |
//         ...                                                                  |
//         word 7: w[0][28..31] w[1][28..31] ... w[15][28..31]                  |
//
//         tile 0, 288 bytes
//   Q4_0  16 scales, then 4 such words of each row: the low nibbles of word g are columns 4g..4g+3,
//         the high nibbles columns 16+4g..16+4g+3
//
// Bytes of Q8_0 are w + 128 if the instruction set multiplies unsigned bytes; nibbles of Q4_0 are w
// + 8, as in the file. All other quantised types follow the same scheme: first the half-precision
// numbers of the 16 blocks (if a block has two, first all of one), then the rest of the blocks as
// in the file, in words of 4 bytes of each row. So a tile has as many bytes as its blocks. Only the
// fifth bits of Q5_0 and Q5_1 are reordered: bit i of byte k of their word is column 4i + k.
//
// Example: row 18, column 37 of a Q8_0 matrix with 64 columns. Row 18 is number 2 of the second row
// of tiles, which begins after 64 / 32 tiles, at byte 2 * 544 = 1088. Column 37 is number 5 of the
// second block: its tile begins at 1088 + 544 = 1632. There, the scale is at 1632 + 2 * 2 = 1636.
// The byte is in word 5 / 4 = 1, after the scales (32 bytes) and word 0 (64 bytes), in the four
// bytes of row 2 (2 * 4), number 5 % 4 = 1 of them: 1632 + 32 + 64 + 8 + 1 = 1737.
enum { TILE = 16 };

// What a product of floats prefetches while it computes. Each step of two columns prefetches the
// next weights. A step whose number has no bit of `mask` also prefetches a cache line of the
// output, of which each token has two adjacent lines. Prefetching all lines at once would delay the
// product's own loads.
typedef struct {
    const uint8_t *weights;
    int step; // bytes of weights for each step
    const char *out;
    int64_t gap; // bytes from the end of one token's two lines to the next token's
    int mask;    // a power of two, minus 1
} Prefetch;

static inline void prefetch(Prefetch *p, int step) {
    __builtin_prefetch(p->weights);
    p->weights += p->step;
    if (step & p->mask) return;
    __builtin_prefetch(p->out, 1);
    p->out += step & (p->mask + 1) ? 64 + p->gap : 64;
}

// y (T, 2 TILE) = the activations of T tokens times one or two rows of tiles. With one token, y is
// (tile_rows TILE,), and tile_rows may be any number.
typedef struct {
    float *y;
    const uint8_t *tiles;
    int tile_rows;
    // Quantised types: Block (T, cols / 32). Others: a panel, which is float (cols, T), or pairs of
    // columns in BF16 (cols / 2, T, 2)
    const void *x;
    int cols;
    int T;         // of a panel: 1, 2, 4, 8 or Kernels.tokens; of pairs at least 4
    bool unpacked; // tiles were made by TypeKernels.unpack
    Prefetch prefetch;
} TileProduct;

// Up to QUERIES queries that share a KV head, with the keys and values that they attend to.
enum { QUERIES = 4 };
typedef struct {
    const float *q;     // (n_queries, q_stride)
    float *p;           // (n_queries, p_stride): scores, then their exponentials
    float *out;         // (n_queries, width)
    const void *keys;   // (ceil(n / TILE), head_dim, TILE)
    const void *values; // (n, width)
    size_t q_stride, p_stride;
    int n_queries;
    int head_dim;
    int width; // head_dim rounded up to a multiple of TILE
    int n;     // positions
    Type type; // of keys and values: F32, F16 or INT8_GROUPS
    // (n,) of INT8_GROUPS, else NULL; the caller of `scores` and `mix` applies them
    const float *key_scales, *value_scales;
} Attention;

// Attention of many tokens multiplies panels of Kernels.queries queries with tiles of TILE rows:
// queries with keys, whose rows have head_dim columns, then probabilities with values, whose rows
// have one column for each position.
typedef struct {
    float *y;       // (queries, y_stride): the product with row r of tile i is in column TILE i + r
    const void *w;  // number c of row r of tile i is w[next i + column c + r]
    const float *x; // (cols, queries)
    size_t y_stride, next, column;
    int tiles, cols;
    bool add;  // add to y instead of replacing it
    Type type; // of w: F32, F16 or INT8_GROUPS, without its scales
} PanelProduct;

// The kernels for one type of weights. A type without `dot` or `product` is multiplied as F32.
typedef struct {
    // Returns the product of a row in the order of the file with x: Block (cols / 32,) for
    // quantised types, else float (cols,)
    float (*dot)(const void *row, const void *x, int cols);
    // Makes one row of tiles from TILE rows of `units` units, which are `stride` bytes apart
    void (*pack)(uint8_t *tiles, const uint8_t *rows, size_t stride, int units);
    void (*product)(const TileProduct *);
    // Unpacks n tiles of a type with blocks of 256 into tiles of UNPACKED bytes, for products with
    // many tokens; NULL for other types. For each sub-block (columns that share a scale), the
    // result has TILE scales, TILE minima if the type has them, then a byte for each number, as in
    // Q8_0
    void (*unpack)(uint8_t *out, const uint8_t *tiles, int n);
} TypeKernels;

enum { UNPACKED = 5120 };

// The kernels of one instruction set.
typedef struct {
    const char *name;
    // Whether this machine has it; NULL if the compiler or the architecture lacks the instruction
    // set
    bool (*supported)(void);
    // Max tokens of a panel. 1: the kernels have no tiles, and a panel is a row of activations
    int tokens;
    int queries; // queries of a panel in PanelProduct
    TypeKernels types[BF16 + 1];
    // out (n,) = w (n,) as float32
    void (*floats_f16)(float *out, const void *w, int n);
    void (*floats_bf16)(float *out, const void *w, int n);
    void (*halves)(uint16_t *out, const float *x, int n); // out (n,) = x (n,) in half precision
    void (*quantize)(Block *out, const float *x, int n_blocks);
    // out (n, rows) = in (rows, n) of words of 4 bytes; the rows of `in` are `stride` bytes apart
    void (*transpose)(uint8_t *out, const uint8_t *in, size_t stride, int rows, int n);
    void (*swiglu)(float *h, const float *h2, int n); // h (n,) = silu(h) * h2
    // x (head_dim,) = x * rotation[0] + (the other of each pair) * rotation[1]; rotation (2,
    // head_dim). rotate has pairs (2i, 2i + 1), rotate_halves (i, i + head_dim / 2)
    void (*rotate)(float *x, const float *rotation, int head_dim);
    void (*rotate_halves)(float *x, const float *rotation, int head_dim);
    float (*largest)(const float *x, int n); // NaN if one is not finite
    // x (n,) = exp((x - max) * scale); returns their sum
    float (*exponentials)(float *x, float max, float scale, int n);
    void (*multiply)(float *x, const float *y, int n); // x (n,) *= y
    void (*scores)(const Attention *); // p = q keys^T, for n rounded up to a multiple of TILE
    void (*mix)(const Attention *);    // out = p values
    void (*panel_product)(const PanelProduct *);
    // NULL unless the machine multiplies BF16 natively: x in BF16; product of BF16 weights with
    // pairs
    void (*bf16s)(uint16_t *out, const float *x, int n);
    void (*pairs_product)(const TileProduct *);
} Kernels;

// Bytes of one number of F32, F16, BF16 or INT8_GROUPS.
static inline size_t number_size(Type type) {
    return type == F32 ? 4 : type == INT8_GROUPS ? 1 : 2;
}

static inline bool has_tiles(const Kernels *k) { return k->tokens > 1; }

static inline int round_up_to_tile(int n) { return (n + TILE - 1) / TILE * TILE; }

extern const Kernels llamac_reference, llamac_avx2, llamac_avx512, llamac_avx512bf16, llamac_neon,
    llamac_neondot;

// Fills in the kernels that this machine can run, the best first. Returns how many.
enum { MAX_KERNELS = 6 };
int llamac_find_kernels(const Kernels *found[MAX_KERNELS]);

// Returns the best kernels, or those that the environment variable LLAMAC_ISA names; NULL if this
// machine cannot run those.
const Kernels *llamac_choose_kernels(void);

static inline float half_to_float(uint16_t h) {
    // Moving exponent and mantissa into the place of a float's makes the exponent 112 too small. A
    // product with 2^112 repairs that, for subnormal halves too. A result of 2^16 or more was
    // infinity or NaN.
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    memcpy(&bits, &f, 4);
    bits |= (f >= 65536.0f ? 0x7f800000u : 0) | (uint32_t)(h & 0x8000) << 16;
    memcpy(&f, &bits, 4);
    return f;
}

#endif

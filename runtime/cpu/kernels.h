// The interface between the CPU backend and the kernels of an instruction set (ISA). reference.c
// has each kernel in plain C, which also runs where no vector instructions are available; tests
// compare all other kernels with it. simd.h has the same kernels in vectors. avx2.c, avxvnni.c,
// avx512bw.c, avx512.c, neon.c, neondot.c, neoni8mm.c and wasm128.c each compile it for one
// instruction set.
#ifndef KERNELS_H
#define KERNELS_H

#include <string.h>
#include "../backend.h"

// 32 activations in 8 bits. A product with quantised weights is a sum of products of bytes, so
// activations are quantised once for all matrices that they are multiplied with. Weights that share
// a scale also share a constant: the offset at which the type stores its numbers, or the minimum.
// It contributes the constant times the sum of q to the product, so a Block also holds that sum.
typedef struct {
    float scale;  // largest magnitude / 127
    int16_t sum;  // of q
    int16_t half; // sum of the first 16 of q
    int8_t q[32]; // round(x / scale)
} Block;

// Tiles: the weights of some rows of a matrix, reordered so that the numbers that one instruction
// multiplies are next to each other. Quantised types have tiles of TILE rows: rows 0..15 of the
// matrix become its first row of tiles, rows 16..31 its second. Floats have tiles of FLOAT_TILE
// rows, so that the sums of one token are independent vectors. Rows missing at the end are zero. A
// unit is a column of F32, two columns of BF16 or F16, or a block of 32 or 256 columns of a
// quantised type; each tile holds one unit of all its rows. If w[r][c] is row r, column c, the
// first row of tiles is
//
//         tile 0, 128 bytes                           tile 1
//   F32   w[0][0]   w[1][0]   ... w[31][0]          | w[0][1]   w[1][1]   ... w[31][1]   | ...
//   BF16  w[0][0,1] w[1][0,1] ... w[31][0,1]        | w[0][2,3] w[1][2,3] ... w[31][2,3] | ...
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
// + 8, as in the file. All other quantised types follow the same scheme. A tile begins with the
// half-precision numbers of its 16 blocks: if a block has two (scale and minimum), the 16 scales
// precede the 16 minima. Then come the remaining bytes of the blocks as in the file: word 0 of all
// rows, word 1 of all rows, ... So a tile has as many bytes as its 16 blocks. Only the fifth bits
// of Q5_0 and Q5_1 are reordered: bit i of byte k of their word is column 4i + k.
//
// Example: row 18, column 37 of a Q8_0 matrix with 64 columns. Row 18 is number 2 of the second row
// of tiles, which begins after 64 / 32 tiles, at byte 2 * 544 = 1088. Column 37 is number 5 of the
// second block: its tile begins at 1088 + 544 = 1632. There, the scale is at 1632 + 2 * 2 = 1636.
// The byte is in word 5 / 4 = 1, after the scales (32 bytes) and word 0 (64 bytes), in the four
// bytes of row 2 (2 * 4), number 5 % 4 = 1 of them: 1632 + 32 + 64 + 8 + 1 = 1737.
enum { TILE = 16, FLOAT_TILE = 2 * TILE };

// What a product of floats prefetches while it computes. Each step (two columns) prefetches one
// cache line of weights for the next rows. Every (mask + 1)th step also prefetches one cache line
// of the output, where the caller will write y: two adjacent lines (2 TILE floats) for each token.
// With mask 3, steps 0 and 4 prefetch the lines of token 0, steps 8 and 12 those of token 1.
// Prefetching all lines at once would delay the product's own loads.
typedef struct {
    const uint8_t *weights;
    int step; // bytes by which `weights` advances at each step
    const char *out;
    int64_t gap; // bytes from the end of one token's two lines to the next token's
    int mask;    // a power of two, minus 1
} Prefetch;

static inline void prefetch(Prefetch *p, int step) {
    __builtin_prefetch(p->weights);
    p->weights += p->step;
    if (step & p->mask) return;
    __builtin_prefetch(p->out, 1); // 1: for writing
    // the bit above the mask is 0 at a token's first line and 1 at its second
    p->out += step & (p->mask + 1) ? 64 + p->gap : 64;
}

// The operands of TypeKernels.product and Kernels.pairs_product, which multiply T tokens with
// `groups` groups of TILE rows. They begin with group `first` of a row of tiles: 0, or 1 for the
// second half of a tile of floats.
typedef struct {
    // If T is 1: (groups * TILE,). Else (T, 2 * TILE), where the second TILE columns are unused if
    // there is one group
    float *y;
    const uint8_t *tiles; // the row of tiles of the first group
    int first;
    // 1 or 2, of the same row of tiles if they are floats; any number if T is 1
    int groups;
    // Quantised types: Block (T, cols / 32). F32, BF16 and F16: a panel of floats (cols, T).
    // `pairs_product`: a panel of pairs of columns in BF16 (cols / 2 rounded up, T, 2)
    const void *x;
    int cols;
    int T; // Blocks: any number. Panels: 1, 2, 4, 8 or Kernels.tokens
    // whether the tiles have the layout of TypeKernels.unpack. Those of Q8_0 have it if they were
    // packed from INT8_GROUPS: 16 float32 scales, then the bytes
    bool unpacked;
    Prefetch prefetch;
} TileProduct;

// Up to QUERIES queries that share a KV head, with the keys and values that they attend to.
enum { QUERIES = 4 };
typedef struct {
    const float *q;            // (n_queries, q_stride)
    float *p;                  // (n_queries, p_stride): scores, then their exponentials
    float *out;                // (n_queries, width)
    const void *keys;          // (ceil(n / TILE), head_dim, TILE)
    const void *values;        // (n, width)
    size_t q_stride, p_stride; // in floats; a row of p has room for n rounded up to whole tiles
    int n_queries;
    int head_dim;
    int width; // head_dim rounded up to a multiple of TILE
    int n;     // positions
    bool add;  // `mix` adds to `out` instead of replacing it
    Type type; // of keys and values: F32, F16 or INT8_GROUPS, whose scales the caller applies
} Attention;

enum { MAX_PANEL_QUERIES = 8 }; // max of Kernels.panel_queries

// Attention of many tokens multiplies panels of Kernels.panel_queries queries with tiles of TILE
// rows: queries with keys (a row is a position, a column a dimension of the head), then
// probabilities with values (a row is a dimension, a column a position).
typedef struct {
    // (panel_queries, y_stride): the product with row r of tile i is in column i * TILE + r
    float *y;
    const void *w;  // row r, column c of tile i is w[i * tile_stride + c * column_stride + r]
    const float *x; // (cols, panel_queries)
    // counted in numbers: between rows of y, between tiles of w, between columns of a tile of w
    size_t y_stride, tile_stride, column_stride;
    int tiles, cols;
    bool add;  // add to y instead of replacing it
    Type type; // of w: F32, F16 or INT8_GROUPS, whose scales the caller applies
} PanelProduct;

// The kernels for one type of weights. A type without `dot` or `product` is multiplied as F32.
typedef struct {
    // Returns the dot product of x with a row in the order of the file. x is Block (cols / 32,) for
    // quantised types, else float (cols,). Kernels with tiles have it only for F32
    float (*dot)(const void *row, const void *x, int cols);
    // Makes one row of tiles from its rows in the order of the file, which are `stride` bytes apart
    // and have `units` units each
    void (*pack)(uint8_t *tiles, const uint8_t *rows, size_t stride, int units);
    void (*product)(const TileProduct *);
    // Unpacks n tiles of a type with blocks of 256 into tiles of UNPACKED bytes, so that products
    // with many tokens need not extract 4 to 6 bits repeatedly; NULL for other types. For each
    // sub-block (columns that share a scale), the result has TILE float scales, TILE float minima
    // if the type has them, then a byte for each number, in the order of Q8_0
    void (*unpack)(uint8_t *out, const uint8_t *tiles, int n);
} TypeKernels;

// Bytes of an unpacked tile. Each of its TILE rows has 256 bytes and 16 floats: 8 scales and 8
// minima (Q4_K, Q5_K) or 16 scales (Q6_K).
enum { UNPACKED = 5120 };

// The kernels of one instruction set.
typedef struct Kernels {
    const char *name;
    // Returns whether this machine has the instruction set; NULL if the kernels were not compiled,
    // because the architecture or the compiler lacks it
    bool (*supported)(void);
    // Max tokens of a panel. If 1, the kernels have no tiles: weights are multiplied by `dot`, and
    // a panel (cols, 1) is just a row of activations
    int tokens;
    int panel_queries; // queries of a panel in PanelProduct
    TypeKernels types[BF16 + 1];
    // out (n,) = w (n,) as float32
    void (*floats_f16)(float *out, const void *w, int n);
    void (*floats_bf16)(float *out, const void *w, int n);
    void (*halves)(uint16_t *out, const float *x, int n); // out (n,) = x (n,) in half precision
    void (*quantize)(Block *out, const float *x, int n_blocks);
    // out (n, rows) = in (rows, n) of words of 4 bytes; the rows of `in` are `stride` bytes apart
    void (*transpose)(uint8_t *out, const uint8_t *in, size_t stride, int rows, int n);
    void (*swiglu)(float *h, const float *h2, int n); // h (n,) = silu(h) * h2
    // RoPE: x (head_dim,) = x * rotation[0] + partner * rotation[1], with rotation (2, head_dim) of
    // cosines and signed sines. `rotate` takes partners from pairs (2i, 2i + 1), `rotate_halves`
    // from (i, i + head_dim / 2)
    void (*rotate)(float *x, const float *rotation, int head_dim);
    void (*rotate_halves)(float *x, const float *rotation, int head_dim);
    float (*largest)(const float *x, int n); // largest x (signed); NaN if one is NaN or infinite
    // x (n,) = exp((x - max) * scale); returns the sum of the new x
    float (*exponentials)(float *x, float max, float scale, int n);
    void (*multiply)(float *x, const float *y, int n); // x (n,) *= y
    // p = q keys^T; may also write scores of padding, up to the next multiple of TILE positions
    void (*scores)(const Attention *);
    void (*mix)(const Attention *); // out = p values, for n positions
    void (*panel_product)(const PanelProduct *);
    // These two are NULL unless the instruction set multiplies BF16 natively
    void (*bf16s)(uint16_t *out, const float *x, int n); // out (n,) = x (n,) in BF16
    void (*pairs_product)(const TileProduct *);          // BF16 weights times pairs in BF16
} Kernels;

// Bytes of one number of F32, F16, BF16 or INT8_GROUPS.
static inline size_t number_size(Type type) {
    return type == F32 ? 4 : type == INT8_GROUPS ? 1 : 2;
}

static inline bool has_tiles(const Kernels *k) { return k->tokens > 1; }

static inline int round_up_to_tile(int n) { return (n + TILE - 1) / TILE * TILE; }

extern const Kernels llamac_reference, llamac_avx2, llamac_avxvnni, llamac_avx512bw, llamac_avx512,
    llamac_avx512bf16, llamac_neon, llamac_neondot, llamac_neoni8mm, llamac_wasm128;

#if defined(__x86_64__)
// X86_AVX2 includes FMA and F16C; X86_AVX512 is AVX-512 F, BW, VL and DQ together.
typedef enum { X86_AVX2, X86_AVXVNNI, X86_AVX512, X86_AVX512_VNNI, X86_AVX512_BF16 } X86Set;

// Returns whether the processor has the instructions, and the system saves their registers.
bool llamac_has_x86(X86Set);
#endif

// Fills `found` with the kernels that this machine can run, the best first. Returns their number.
enum { MAX_KERNELS = 10 };
int llamac_find_kernels(const Kernels *found[MAX_KERNELS]);

// Returns the kernels of the instruction set with this name, or the best ones if `isa` is NULL or
// empty. Returns NULL if the name is unknown or this machine cannot run them.
const Kernels *llamac_choose_kernels(const char *isa);

static inline float half_to_float(uint16_t h) {
    // Moves exponent and mantissa to where a float has them. There the exponent is 112 too small,
    // because floats have a bias of 127 and halves of 15. Multiplying by 2^112 corrects that, for
    // subnormal halves too. Finite halves are below 2^16, so a result of 2^16 or more was infinity
    // or NaN and gets their exponent.
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

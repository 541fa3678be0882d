// What the CPU backend asks of an instruction set. reference.c states each kernel in plain C, which runs where no vector
// instructions are known; tests compare the others with it. simd.h states the same kernels in vectors, and avx2.c, avx512.c,
// neon.c and neondot.c compile it, each for one instruction set (ISA).
#ifndef KERNELS_H
#define KERNELS_H

#include <string.h>
#include "../backend.h"

// 32 activations in 8 bits. Products of quantised weights are sums of products of bytes: activations become blocks once, for
// all matrices that they are multiplied with.
typedef struct {
    float scale;   // largest magnitude / 127
    int16_t sum;   // of q
    int16_t half;  // of the first 16
    int8_t q[32];  // round(x / scale)
} Block;

// Tiles: the weights of TILE rows of a matrix, reordered so that the numbers that one instruction multiplies lie together.
// Rows 0..15 of the matrix become its first row of tiles, rows 16..31 its second; what is missing at the end is zero. Each
// tile has one unit of all 16 rows: a column of F32, two columns of BF16, a block of 32 or 256 columns of a quantised type. If
// w[r][c] is row r, column c, the first row of tiles is
//
//         tile 0, 64 bytes                            tile 1
//   F32   w[0][0]   w[1][0]   ... w[15][0]          | w[0][1]   w[1][1]   ... w[15][1]   | ...
//   BF16  w[0][0,1] w[1][0,1] ... w[15][0,1]        | w[0][2,3] w[1][2,3] ... w[15][2,3] | ...
//
//         tile 0, 544 bytes                                                                tile 1
//   Q8_0  16 half-precision scales, one for each row                                     | 16 scales
//         group 0: w[0][0..3]   w[1][0..3]   ... w[15][0..3]      64 bytes               | w[0][32..35] ...
//         group 1: w[0][4..7]   w[1][4..7]   ... w[15][4..7]                             |
//         ...                                                                            |
//         group 7: w[0][28..31] w[1][28..31] ... w[15][28..31]                           |
//
//         tile 0, 288 bytes
//   Q4_0  16 scales, then 4 such groups: the low nibbles of group g are columns 4g..4g+3, the high ones 16+4g..16+4g+3
//
// Bytes of Q8_0 are w + 128 where the instruction wants them unsigned; nibbles of Q4_0 are w + 8, as in the file. All other
// quantised types go the same way: first the half-precision numbers of the 16 blocks (of two, first all of one), then the
// rest of the blocks as it stands in the file, by groups of 4 bytes of each row. So a tile has as many bytes as its blocks. The
// fifth bits of Q5_0 and Q5_1 alone change their order: bit i of a group's byte k is column 4i + k.
//
// Example: row 18, column 37 of a Q8_0 matrix with 64 columns. Row 18 is number 2 of the second row of tiles, which begins
// behind 64 / 32 tiles, at byte 2 * 544 = 1088. Column 37 is number 5 of the second block: its tile begins at 1088 + 544 =
// 1632. There, the scale is at 1632 + 2 * 2 = 1636. The byte is in group 5 / 4 = 1, behind the scales (32 bytes) and group 0
// (64 bytes), in row 2's four bytes (2 * 4), number 5 % 4 = 1 of them: 1632 + 32 + 64 + 8 + 1 = 1737.
enum { TILE = 16 };

// What a product of floats prefetches while it computes: in each step of two columns, the next weights; and in each step
// whose number has no bit of `mask`, a cache line of the output, where two lines side by side belong to one token. All of
// them at once would delay what the product reads itself.
typedef struct {
    const uint8_t *weights;
    int step;        // bytes of weights for each step
    const char *out;
    int64_t gap;     // bytes from the end of one token's two lines to the next token's
    int mask;        // one below a power of two
} Prefetch;

static inline void prefetch(Prefetch *p, int step) {
    __builtin_prefetch(p->weights);
    p->weights += p->step;
    if (step & p->mask) return;
    __builtin_prefetch(p->out, 1);
    p->out += step & (p->mask + 1) ? 64 + p->gap : 64;
}

// y (T, 2 TILE) = T tokens times one or two rows of tiles. Of one token, y is (tile_rows TILE,) and tile_rows any number.
typedef struct {
    float *y;
    const uint8_t *tiles;
    int tile_rows;
    const void *x;   // Quantised types: Block (T, cols / 32). Others: a panel, float (cols, T) or pairs in BF16 (cols / 2, T, 2)
    int cols, T;     // T of a panel: 1, 2, 4, 8 or Kernels' tokens; of pairs at least 4
    bool unpacked;   // tiles are those that TypeKernels' unpack makes
    Prefetch prefetch;
} TileProduct;

// Queries that share a KV head, and what they attend to. Keys lie in tiles (ceil(n / TILE), head_dim, TILE).
enum { QUERIES = 4 };
typedef struct {
    const float *q;       // (n_queries, q_stride)
    float *p;             // (n_queries, p_stride): scores, then their exponentials
    float *out;           // (n_queries, width)
    const void *keys;     // of n positions
    const void *values;   // (n, width)
    size_t q_stride, p_stride;
    int n_queries;        // at most QUERIES
    int head_dim, width;  // width: head_dim rounded up to a multiple of TILE
    int n;                // positions
    Type type;            // of keys and values: F32, F16 or INT8_GROUPS
    const float *key_scales, *value_scales; // (n,) of INT8_GROUPS, else NULL; scores and mix leave them to those who call
} Attention;

// Attention of many tokens is products of panels, (cols, Kernels' queries), with tiles of TILE rows of numbers: those of queries with
// keys, rows of head_dim columns, and those of probabilities with values, rows of as many columns as positions.
typedef struct {
    float *y;            // (queries, y_stride): products with row r of tile i at column TILE i + r
    const void *w;       // number c of row r of tile i is w[next i + column c + r]
    const float *x;      // (cols, queries)
    size_t y_stride, next, column;
    int tiles, cols;
    bool add;            // to what y holds
    Type type;           // of w: F32, F16 or INT8_GROUPS, without its scales
} PanelProduct;

// What depends on the type of the weights. A type without `dot` or `product` is multiplied as F32.
typedef struct {
    // Product of a row as it lies in the file with x: Block (cols / 32,) of quantised types, else float (cols,)
    float (*dot)(const void *row, const void *x, int cols);
    // Makes one row of tiles of TILE rows with `units` units, `stride` bytes apart
    void (*pack)(uint8_t *tiles, const uint8_t *rows, size_t stride, int units);
    void (*product)(const TileProduct *);
    // Makes n tiles of UNPACKED bytes of those of a type with blocks of 256, for products with many tokens; else NULL. For columns
    // that share a scale: TILE scales, TILE minima where the type has them, then groups of a byte for each number, as in Q8_0
    void (*unpack)(uint8_t *out, const uint8_t *tiles, int n);
} TypeKernels;

enum { UNPACKED = 5120 };

// The kernels of one instruction set.
typedef struct {
    const char *name;
    bool (*supported)(void); // by this machine; NULL where the compiler or the architecture does not know the set
    int tokens;              // most tokens of a panel; 1: the kernels have no tiles, and a panel is a row of the activations
    int queries;             // of a panel in PanelProduct
    TypeKernels types[BF16 + 1];
    // out (n,) = w (n,) as float32
    void (*floats_f16)(float *out, const void *w, int n);
    void (*floats_bf16)(float *out, const void *w, int n);
    void (*halves)(uint16_t *out, const float *x, int n); // x in half precision
    void (*quantize)(Block *out, const float *x, int n_blocks);
    // out (n, rows) = in (rows, n) of words of 4 bytes; the rows of `in` lie `stride` bytes apart
    void (*transpose)(uint8_t *out, const uint8_t *in, size_t stride, int rows, int n);
    // h (n,) = silu(h) * h2
    void (*swiglu)(float *h, const float *h2, int n);
    // x (head_dim,) = x * rotation[0] + (of each pair, the other) * rotation[1]; rotation (2, head_dim). Pairs are (2i, 2i + 1),
    // or (i, i + head_dim / 2)
    void (*rotate)(float *x, const float *rotation, int head_dim);
    void (*rotate_halves)(float *x, const float *rotation, int head_dim);
    float (*largest)(const float *x, int n); // NaN if one is not finite
    // x (n,) = exp((x - most) * scale); returns their sum
    float (*exponentials)(float *x, float most, float scale, int n);
    void (*multiply)(float *x, const float *y, int n); // x (n,) *= y
    void (*scores)(const Attention *); // p = q keys^T, up to n rounded up to TILE
    void (*mix)(const Attention *);    // out = p values
    void (*panel_product)(const PanelProduct *);
    // Where the machine multiplies BF16 by itself (else NULL): x in BF16; and BF16's product with pairs of columns
    void (*bf16s)(uint16_t *out, const float *x, int n);
    void (*pairs_product)(const TileProduct *);
} Kernels;

// Bytes of a number of the types that are rows of numbers.
static inline size_t number_size(Type type) { return type == F32 ? 4 : type == INT8_GROUPS ? 1 : 2; }

static inline bool has_tiles(const Kernels *k) { return k->tokens > 1; }

extern const Kernels llamac_reference, llamac_avx2, llamac_avx512, llamac_avx512bf16, llamac_neon, llamac_neondot;

// The best kernels of this machine, or those that the environment variable LLAMAC_ISA names; the reference if the machine
// does not have them.
const Kernels *llamac_cpu_kernels(void);

static inline float half_to_float(uint16_t h) {
    // Moving exponent and mantissa into a float's place leaves the exponent 112 too small; a product repairs that,
    // for subnormal halves too. What comes out at 2^16 or more was infinity or NaN.
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

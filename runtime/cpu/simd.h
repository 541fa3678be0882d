// The kernels in vectors. A unit of one instruction set defines these, and includes this file:
//   TARGET               attribute of functions that use the set
//   LANES, Floats, Ints  lanes of a vector; vectors of LANES floats, and of LANES int32 or 4 LANES bytes
//   TILE_ROWS            rows of tiles worked on at once, 1 or 2
//   TOKENS, TOKENS_Q     how many tokens are worked on at once with them, of floats and of Blocks, so that the sums, or
//                        the sums and the products, and the weights of all rows stay in registers
//   LOAD, LOAD_F16, LOAD_BF16, LOAD_8 (of int8), STORE, STORE_F16, SET, ADD, MUL, DIV, MAX, MIN, FMA (a * b + c), SUM (of
//                        the lanes), ROUND. MAX and MIN give the second operand when one is NaN
//   LARGEST(v)           the largest lane, any if one is NaN
//   SWAP(v)              of each pair of lanes, the other
//   POW2(n)              2^n for integers n from -126 to 127
//   LOAD_I, SET_I, FLOATS (of int32); INTS (of floats, to the nearest, ties to even), ADD_I, MAX_I, SUM_I, LARGEST_I
//   MAGNITUDE(v)         floats' bits without the sign
//   STORE_8(p, i)        int32 from -127 to 127 as bytes
//   BF16_LOW(i), BF16_HIGH(i)  the lower, the upper halves of 32 bits as floats
//   DOT(c, w, x)         c + the products of each lane's four bytes; w unsigned if Q8_OFFSET is 128, else signed
//   DOT_SMALL(c, w, x)   the same for w from 0 to 63
//   AND_15, SHIFT_4      of bytes: w & 15; w >> 4, where the bits above the low four are cleared
//   Q8_OFFSET            what is added to the bytes in Q8_0's tiles
//   Partial, PARTIAL_SET, PARTIAL_FMA, PARTIAL_SUM(a, b): floats in which the products of a block's 32 bytes are summed
//   block_q8(q, x), block_q4(q, x)  Partial with the products of one block's numbers with the activations in Block x
//   add_small(sum, q, x, a, b)  sum + a times the products of the first 16 bytes of q, from 0 to 63, + b times the others'
//   add_nibbles(sum, q, fifth, x, a)  sum + a times the products of 32 numbers, the low nibbles of q (16,), then the high
//                        ones, with the bits of `fifth` before them
//   HALF(h)              a half as float
//   Quad, LOAD_QUAD, STORE_QUAD, SET_QUAD, XOR_QUAD, LOW_32(a, b) = a0 b0 a1 b1, HIGH_32 = a2 b2 a3 b3: four int32
// SIMD_KERNELS, at the end, are the initialisers of its table. Functions that take the type, or how many tokens and rows of
// tiles they work on, are inlined with constants.
#include <math.h>
#include "blocks.h"

// clang-format off: it knows no UNROLL

#define INLINE TARGET __attribute__((always_inline)) static inline
#define VECTORS (TILE / LANES) // that TILE lanes take
#define SUMS (TILE_ROWS * VECTORS)
#ifdef __clang__ // so that arrays of vectors become registers
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t SignedWords __attribute__((vector_size(4 * LANES)));

// ----------------------------------------------------------------------------
// Rows

// Numbers i.. of a row of the type; and its last `left` < LANES numbers, with zeros behind them.
INLINE Floats load(Type type, const void *w, size_t i) {
    if (type == F16) return LOAD_F16((const uint16_t *)w + i);
    if (type == BF16) return LOAD_BF16((const uint16_t *)w + i);
    if (type == INT8_GROUPS) return LOAD_8((const int8_t *)w + i);
    return LOAD((const float *)w + i);
}

INLINE Floats load_tail(Type type, const void *w, size_t i, int left) {
    float tail[LANES] = {0}; // room for either type
    size_t size = type == F32 ? 4 : 2;
    memcpy(tail, (const char *)w + i * size, left * size);
    return load(type, tail, 0);
}

// Four sums side by side, so that an addition need not wait for the one before.
INLINE float dot_floats(Type type, const void *w, const float *x, int n) {
    Floats a = SET(0), b = a, c = a, d = a;
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        a = FMA(load(type, w, i), LOAD(x + i), a);
        b = FMA(load(type, w, i + LANES), LOAD(x + i + LANES), b);
        c = FMA(load(type, w, i + 2 * LANES), LOAD(x + i + 2 * LANES), c);
        d = FMA(load(type, w, i + 3 * LANES), LOAD(x + i + 3 * LANES), d);
    }
    for (; i + LANES <= n; i += LANES) a = FMA(load(type, w, i), LOAD(x + i), a);
    if (i < n) b = FMA(load_tail(type, w, i, n - i), load_tail(F32, x, i, n - i), b);
    return SUM(ADD(ADD(a, b), ADD(c, d)));
}

TARGET static float dot_f32(const void *row, const void *x, int cols) { return dot_floats(F32, row, x, cols); }
TARGET static float dot_f16(const void *row, const void *x, int cols) { return dot_floats(F16, row, x, cols); }
TARGET static float dot_bf16(const void *row, const void *x, int cols) { return dot_floats(BF16, row, x, cols); }

// Products of the block at `row` with x, added to the sum.
INLINE Partial add_block(Type type, const uint8_t *row, const Block *x, Partial sum) {
    uint16_t scale;
    memcpy(&scale, row, 2);
    Partial products = type == Q8_0 ? block_q8(row + 2, x) : block_q4(row + 2, x);
    return PARTIAL_FMA(products, PARTIAL_SET(HALF(scale) * x->scale), sum);
}

// Two sums side by side.
INLINE float dot_blocks(Type type, const uint8_t *row, const Block *x, int n_blocks) {
    const int size = type == Q8_0 ? 34 : 18;
    Partial even = PARTIAL_SET(0), odd = even;
    for (int b = 0; b < n_blocks / 2; b++, row += 2 * size, x += 2) {
        even = add_block(type, row, x, even);
        odd = add_block(type, row + size, x + 1, odd);
    }
    if (n_blocks % 2) even = add_block(type, row, x, even);
    return PARTIAL_SUM(even, odd);
}

TARGET static float dot_q8(const void *row, const void *x, int cols) { return dot_blocks(Q8_0, row, x, cols / 32); }
TARGET static float dot_q4(const void *row, const void *x, int cols) { return dot_blocks(Q4_0, row, x, cols / 32); }

// Q4_1, Q5_0, Q5_1. What the sum of the activations makes of zeros and minima is added apart.
INLINE float dot_nibbles(Type type, const uint8_t *row, const Block *x, int n_blocks) {
    Partial sum = PARTIAL_SET(0);
    float rest = 0;
    for (int b = 0; b < n_blocks; b++, row += block_size(type).bytes, x++) {
        uint16_t halves[2];
        uint32_t fifth = 0;
        memcpy(halves, row, 4);
        if (type != Q4_1) memcpy(&fifth, row + words_at(type), 4);
        float scale = HALF(halves[0]) * x->scale;
        sum = add_nibbles(sum, row + block_size(type).bytes - 16, fifth, x, scale);
        rest += x->sum * (has_minima(type) ? HALF(halves[1]) * x->scale : -zero_of(type) * scale);
    }
    return PARTIAL_SUM(sum, PARTIAL_SET(0)) + rest;
}

TARGET static float dot_q4_1(const void *row, const void *x, int cols) { return dot_nibbles(Q4_1, row, x, cols / 32); }
TARGET static float dot_q5_0(const void *row, const void *x, int cols) { return dot_nibbles(Q5_0, row, x, cols / 32); }
TARGET static float dot_q5_1(const void *row, const void *x, int cols) { return dot_nibbles(Q5_1, row, x, cols / 32); }

// Blocks of 256 become bytes before.
INLINE float dot_numbers(Type type, const uint8_t *row, const Block *x, int cols) {
    const int per = numbers_per_scale(type), zero = zero_of(type);
    Partial sum = PARTIAL_SET(0);
    float rest = 0;
    Numbers n;
    for (const Block *end = x + cols / 32; x < end; row += block_size(type).bytes) {
        take_block(type, &n, row);
        for (int at = 0; at < block_size(type).numbers; at += 32, x++) {
            float a = x->scale * n.scale[at / per], b = per == 32 ? a : x->scale * n.scale[at / per + 1];
            sum = add_small(sum, n.q + at, x, a, b);
            if (zero) rest -= zero * (a * x->half + b * (x->sum - x->half));
            if (has_minima(type)) rest -= x->scale * n.min[at / 32] * x->sum;
        }
    }
    return PARTIAL_SUM(sum, PARTIAL_SET(0)) + rest;
}

TARGET static float dot_q4_k(const void *row, const void *x, int cols) { return dot_numbers(Q4_K, row, x, cols); }
TARGET static float dot_q5_k(const void *row, const void *x, int cols) { return dot_numbers(Q5_K, row, x, cols); }
TARGET static float dot_q6_k(const void *row, const void *x, int cols) { return dot_numbers(Q6_K, row, x, cols); }

INLINE void floats_of(Type type, float *out, const void *w, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) STORE(out + i, load(type, w, i));
    if (i == n) return;
    float tail[LANES];
    STORE(tail, load_tail(type, w, i, n - i));
    memcpy(out + i, tail, (n - i) * sizeof(float));
}

TARGET static void floats_f16(float *out, const void *w, int n) { floats_of(F16, out, w, n); }
TARGET static void floats_bf16(float *out, const void *w, int n) { floats_of(BF16, out, w, n); }

TARGET static void halves(uint16_t *out, const float *x, int n) {
    for (int i = 0; i < n; i += LANES) {
        uint16_t tail[LANES];
        int left = n - i < LANES ? n - i : LANES;
        STORE_F16(tail, left < LANES ? load_tail(F32, x, i, left) : LOAD(x + i));
        memcpy(out + i, tail, left * sizeof *out);
    }
}

TARGET static void quantize(Block *out, const float *x, int n_blocks) {
    enum { PARTS = 32 / LANES };
    for (; n_blocks > 0; n_blocks--, x += 32, out++) {
        Floats v[PARTS];
        Ints largest = SET_I(0), sums[2] = {largest, largest}; // as bits, among which NaN is larger than any number
        UNROLL for (int i = 0; i < PARTS; i++) v[i] = LOAD(x + i * LANES), largest = MAX_I(largest, MAGNITUDE(v[i]));
        int32_t bits = LARGEST_I(largest);
        float most;
        memcpy(&most, &bits, 4);
        Floats inverse = SET(most > 1e-30f ? 127 / most : 0);
        UNROLL for (int i = 0; i < PARTS; i++) {
            Ints q = INTS(MIN(MAX(MUL(v[i], inverse), SET(-127)), SET(127))); // a bound for NaN and infinity
            STORE_8(out->q + i * LANES, q);
            sums[2 * i / PARTS] = ADD_I(sums[2 * i / PARTS], q);
        }
        out->scale = most / 127;
        int32_t both = SUM_I(ADD_I(sums[0], (Ints)((Words)sums[1] << 16))); // one sum in each half of the word
        out->half = (int16_t)both;
        out->sum = (int16_t)(out->half + (both - out->half) / 65536);
    }
}

// ----------------------------------------------------------------------------
// Making tiles

// Transposes a 4 by 4 matrix of words of four bytes; the rows lie `stride` bytes apart, those of the result `out_stride`.
INLINE void transpose_4x4(uint8_t *out, size_t out_stride, const uint8_t *rows, size_t stride, Quad offset) {
    Quad a = LOAD_QUAD(rows), b = LOAD_QUAD(rows + stride);
    Quad c = LOAD_QUAD(rows + 2 * stride), d = LOAD_QUAD(rows + 3 * stride);
    Quad ac = LOW_32(a, c), bd = LOW_32(b, d), ac2 = HIGH_32(a, c), bd2 = HIGH_32(b, d);
    STORE_QUAD(out, XOR_QUAD(LOW_32(ac, bd), offset));
    STORE_QUAD(out + out_stride, XOR_QUAD(HIGH_32(ac, bd), offset));
    STORE_QUAD(out + 2 * out_stride, XOR_QUAD(LOW_32(ac2, bd2), offset));
    STORE_QUAD(out + 3 * out_stride, XOR_QUAD(HIGH_32(ac2, bd2), offset));
}

// A cache line of four rows at a time: lines of more rows may be such that the first-level cache can't hold all of them.
TARGET static void transpose(uint8_t *out, const uint8_t *in, size_t stride, int rows, int n) {
    int i = 0, end;
    for (; rows % 4 == 0 && i + 4 <= n; i = end) {
        end = i + 16 <= n ? i + 16 : n / 4 * 4;
        for (int r = 0; r < rows; r += 4)
            for (int c = i; c < end; c += 4)
                transpose_4x4(out + 4 * ((size_t)c * rows + r), 4 * rows, in + r * stride + 4 * c, stride, SET_QUAD(0));
    }
    if (i < n) llamac_reference.transpose(out + (size_t)4 * i * rows, in + 4 * i, stride, rows, n - i);
}

// F32, or pairs of BF16.
TARGET static void pack_words(uint8_t *tiles, const uint8_t *rows, size_t stride, int units) {
    transpose(tiles, rows, stride, TILE, units);
}

// Bits of 32 columns in the order of a tile: bit i of byte k is column 4i + k. A product spreads 4 bits over 4 bytes.
ALWAYS uint32_t order_bits(uint32_t bits) {
    uint32_t ordered = 0;
    for (int i = 0; i < 8; i++) ordered |= ((bits >> 4 * i & 15) * 0x00204081 & 0x01010101) << i;
    return ordered;
}

INLINE void order_rows(uint8_t *words) {
    uint32_t bits[TILE];
    memcpy(bits, words, sizeof bits);
    for (int r = 0; r < TILE; r++) bits[r] = order_bits(bits[r]);
    memcpy(words, bits, sizeof bits);
}

INLINE void pack_blocks(Type type, uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks) {
    const int size = block_size(type).bytes, halves = halves_of(type), n = words_of(type);
    Quad offset = SET_QUAD(type == Q8_0 && Q8_OFFSET ? 0x80808080 : 0);
    for (int b = 0; b < n_blocks; b++, rows += size, tiles += size * TILE) {
        uint8_t *words = tiles + 2 * halves * TILE;
        for (int i = 0; i < halves; i++)
            for (int r = 0; r < TILE; r++)
                memcpy(tiles + 2 * (i * TILE + r), rows + r * stride + halves_at(type) + 2 * i, 2);
        for (int r = 0; r < TILE; r += 4)
            for (int c = 0, first; c < n; c += 4) { // the last four again, where the number of words is no multiple of 4
                first = c + 4 <= n ? c : n - 4;
                const uint8_t *from = rows + r * stride + words_at(type) + 4 * first;
                transpose_4x4(words + 4 * (first * TILE + r), 4 * TILE, from, stride, offset);
            }
        if (type == Q5_0 || type == Q5_1) order_rows(words);
    }
}

#define PACK(name, type) \
    TARGET static void name(uint8_t *tiles, const uint8_t *rows, size_t stride, int units) { \
        pack_blocks(type, tiles, rows, stride, units); \
    }
PACK(pack_q8, Q8_0)
PACK(pack_q4, Q4_0)
PACK(pack_q4_1, Q4_1)
PACK(pack_q5_0, Q5_0)
PACK(pack_q5_1, Q5_1)
PACK(pack_q4_k, Q4_K)
PACK(pack_q5_k, Q5_K)
PACK(pack_q6_k, Q6_K)

// ----------------------------------------------------------------------------
// Products of tiles with floats

// One column of some rows of tiles added to the sums of T tokens x (T,).
INLINE void add_column(Floats sums[SUMS][TOKENS], const Floats w[SUMS], const float *x, const int T, const int tile_rows) {
    UNROLL for (int t = 0; t < T; t++) {
        Floats xs = SET(x[t]);
        UNROLL for (int v = 0; v < tile_rows * VECTORS; v++) sums[v][t] = FMA(w[v], xs, sums[v][t]);
    }
}

// One or two columns of weights; `next` bytes from one row of tiles to the other.
INLINE void load_columns(Type type, Floats w[2][SUMS], const uint8_t *tiles, size_t next, const int tile_rows,
                         const bool two) {
    UNROLL for (int v = 0; v < tile_rows * VECTORS; v++) {
        const uint8_t *here = tiles + v / VECTORS * next + v % VECTORS * 4 * LANES;
        if (type == F32) w[0][v] = LOAD((const float *)here), w[1][v] = two ? LOAD((const float *)here + TILE) : w[0][v];
        else w[0][v] = BF16_LOW(LOAD_I(here)), w[1][v] = BF16_HIGH(LOAD_I(here));
    }
}

// The sums of TILE rows stand side by side in the lanes. Where few tokens leave room, columns take turns between some sums,
// so that an addition need not wait for the one before.
INLINE void float_tiles(Type type, const TileProduct *p, const int T, const int tile_rows) {
    const int chains = T == 1 ? 4 : T == 2 ? 2 : 1;
    const int cols = p->cols;
    const size_t column = (type == F32 ? 4 : 2) * TILE, next = (cols + (type != F32 && cols % 2)) * column; // bytes
    const uint8_t *tiles = p->tiles;
    const float *x = p->x;
    Prefetch ahead = p->prefetch;
    Floats w[2][SUMS], sums[4][SUMS][TOKENS];
    UNROLL for (int i = 0; i < chains; i++)
        UNROLL for (int v = 0; v < tile_rows * VECTORS; v++)
            UNROLL for (int t = 0; t < T; t++) sums[i][v][t] = SET(0);
    int c = 0;
    for (; chains == 4 && c + 4 <= cols; c += 4, x += 4 * T)
        UNROLL for (int i = 0; i < 4; i += 2) {
            load_columns(type, w, tiles + (c + i) * column, next, tile_rows, true);
            add_column(sums[i], w[0], x + i * T, T, tile_rows);
            add_column(sums[i + 1], w[1], x + (i + 1) * T, T, tile_rows);
        }
    for (; c + 2 <= cols; c += 2, x += 2 * T) {
        if (T > 2) prefetch(&ahead, c / 2);
        load_columns(type, w, tiles + c * column, next, tile_rows, true);
        add_column(sums[0], w[0], x, T, tile_rows);
        add_column(sums[chains > 1], w[1], x + T, T, tile_rows);
    }
    if (c < cols) {
        load_columns(type, w, tiles + c * column, next, tile_rows, false);
        add_column(sums[0], w[0], x, T, tile_rows);
    }
    UNROLL for (int v = 0; v < tile_rows * VECTORS; v++)
        UNROLL for (int t = 0; t < T; t++) {
            Floats sum = chains > 1 ? ADD(sums[0][v][t], sums[1][v][t]) : sums[0][v][t];
            STORE(p->y + t * 2 * TILE + v * LANES, chains == 4 ? ADD(sum, ADD(sums[2][v][t], sums[3][v][t])) : sum);
        }
}

// Few tokens take one row of tiles after the other, for memory is read fastest at one place; many share what is loaded of
// two.
INLINE void product_of_floats(Type type, TileProduct p) {
    enum { EIGHT = TOKENS < 8 ? TOKENS : 8 };
    const size_t size = (size_t)(type == F32 ? p.cols : (p.cols + 1) / 2) * 4 * TILE; // bytes of a row of tiles
    for (int r = 0, rows; r < p.tile_rows; r += rows, p.y += rows * TILE, p.tiles += rows * size) {
        rows = TILE_ROWS == 2 && p.T >= 4 && r + 1 < p.tile_rows ? 2 : 1;
        if (p.T == 1) float_tiles(type, &p, 1, 1);
        else if (p.T == 2) float_tiles(type, &p, 2, 1);
        else if (p.T == 4 && rows == 1) float_tiles(type, &p, 4, 1);
        else if (p.T == 4) float_tiles(type, &p, 4, TILE_ROWS);
        else if (TOKENS > 8 && p.T == 8 && rows == 1) float_tiles(type, &p, EIGHT, 1);
        else if (TOKENS > 8 && p.T == 8) float_tiles(type, &p, EIGHT, TILE_ROWS);
        else if (TILE_ROWS == 1 || rows == 1) float_tiles(type, &p, TOKENS, 1);
        else float_tiles(type, &p, TOKENS, TILE_ROWS);
    }
}

TARGET static void product_f32(const TileProduct *p) { product_of_floats(F32, *p); }
TARGET static void product_bf16(const TileProduct *p) { product_of_floats(BF16, *p); }

// ----------------------------------------------------------------------------
// Products of tiles with blocks

INLINE Ints four_bytes(const int8_t *q) {
    int32_t bytes;
    memcpy(&bytes, q, 4);
    return SET_I(bytes);
}

// Bits of each word, moved down (up, if `shift` is negative); then those of the mask.
INLINE Ints bits(Ints v, int shift, uint32_t mask) {
    return (Ints)((shift < 0 ? (Words)v << -shift : (Words)v >> shift) & mask);
}

INLINE Ints either(Ints a, Ints b) { return (Ints)((Words)a | (Words)b); }

INLINE Ints nibbles_of(Ints v, int high) { return high ? SHIFT_4(v) : AND_15(v); }

// A tile's columns that share a scale are multiplied at once: part s of them. Parts go in steps, in which i is a constant:
// the low and the high nibbles of the same bytes.
INLINE int parts_of_step(Type type) { return type == Q6_K ? 4 : type == Q4_K || type == Q5_K ? 2 : 1; }
INLINE int part_of(Type type, int step, int i) {
    return type == Q6_K ? step / 2 * 8 + i / 2 * 4 + step % 2 * 2 + i % 2 : 2 * step + i;
}

INLINE Ints word_at(const uint8_t *words, int i) { return LOAD_I(words + i * 4 * TILE); }

// Four columns of LANES rows as bytes, zero_of(type) too large: of part i of a step, from column 4g + 16h on. h is 1 only of
// types whose high nibbles are the other half of the same block.
INLINE Ints numbers_at(Type type, const uint8_t *words, int step, int i, int g, int h) {
    if (type == Q8_0) return word_at(words, g);
    if (type == Q4_0 || type == Q4_1) return nibbles_of(word_at(words, g), h);
    if (type == Q5_0 || type == Q5_1)
        return either(nibbles_of(word_at(words, 1 + g), h), bits(word_at(words, 0), g + 4 * h - 4, 0x10101010));
    if (type == Q4_K) return nibbles_of(word_at(words, 3 + 8 * step + g), i);
    if (type == Q5_K) {
        Ints fifth = bits(bits(word_at(words, 3 + g), 2 * step, ~0u), i - 4, 0x10101010);
        return either(nibbles_of(word_at(words, 11 + 8 * step + g), i), fifth);
    }
    Ints upper = bits(word_at(words, 32 + step / 2 * 8 + i % 2 * 4 + g), step % 2 * 2, ~0u); // Q6_K
    return either(nibbles_of(word_at(words, step * 8 + i % 2 * 4 + g), i / 2), bits(upper, i / 2 * 4 - 4, 0x30303030));
}

// Of 6 bits, of Q4_K and Q5_K: the scales (blocks.h) of part s; or the minima.
INLINE Ints k_scales(const uint8_t *words, int s, int minima) {
    if (s < 4) return bits(word_at(words, minima), 8 * s, 63);
    int at = 8 * (s - 4);
    return either(bits(word_at(words, 2), at + 4 * minima, 15), bits(word_at(words, minima), at + 2, 0x30));
}

INLINE Floats scales_at(Type type, const uint8_t *halves, const uint8_t *words, int s) {
    Floats scales = LOAD_F16((const void *)halves);
    if (type == Q4_K || type == Q5_K) return MUL(scales, FLOATS(k_scales(words, s, 0)));
    if (type != Q6_K) return scales;
    return MUL(scales, FLOATS((Ints)((SignedWords)((Words)word_at(words, 48 + s / 4) << (24 - s % 4 * 8)) >> 24)));
}

INLINE Floats minima_at(Type type, const uint8_t *halves, const uint8_t *words, int s) {
    Floats minima = LOAD_F16((const void *)(halves + 2 * TILE));
    return type == Q4_1 || type == Q5_1 ? MUL(minima, SET(-1)) : MUL(minima, FLOATS(k_scales(words, s, 1)));
}

// Of an unpacked part: bytes of its scales and minima, and of all.
INLINE int part_head(Type type) { return (has_minima(type) ? 8 : 4) * TILE; }
INLINE int part_size(Type type) { return part_head(type) + numbers_per_scale(type) * TILE; }

INLINE void unpack_part(Type type, uint8_t *out, const uint8_t *tile, int step, const int i) {
    const int s = part_of(type, step, i);
    out += s * part_size(type);
    UNROLL for (int v = 0; v < VECTORS; v++, out += 4 * LANES) {
        const uint8_t *halves = tile + 2 * v * LANES, *words = tile + 2 * halves_of(type) * TILE + 4 * v * LANES;
        STORE((float *)out, scales_at(type, halves, words, s));
        if (has_minima(type)) STORE((float *)out + TILE, minima_at(type, halves, words, s));
        for (int g = 0; g < numbers_per_scale(type) / 4; g++)
            STORE((float *)(out + part_head(type)) + g * TILE, (Floats)numbers_at(type, words, step, i, g, 0));
    }
}

INLINE void unpack_tiles(Type type, uint8_t *out, const uint8_t *tiles, int n) {
    const int steps = 256 / numbers_per_scale(type) / parts_of_step(type);
    for (; n > 0; n--, out += UNPACKED, tiles += block_size(type).bytes * TILE)
        for (int step = 0; step < steps; step++)
            UNROLL for (int i = 0; i < parts_of_step(type); i++) unpack_part(type, out, tiles, step, i);
}

TARGET static void unpack_q4_k(uint8_t *out, const uint8_t *tiles, int n) { unpack_tiles(Q4_K, out, tiles, n); }
TARGET static void unpack_q5_k(uint8_t *out, const uint8_t *tiles, int n) { unpack_tiles(Q5_K, out, tiles, n); }
TARGET static void unpack_q6_k(uint8_t *out, const uint8_t *tiles, int n) { unpack_tiles(Q6_K, out, tiles, n); }

// The columns of part i of a step with T tokens; x: the Blocks of the tile's first columns. Products are summed as integers,
// then scaled by both scales.
INLINE void add_part(Type type, bool unpacked, Floats sums[SUMS][TOKENS_Q], const uint8_t *tile, size_t next, const Block *x,
                     size_t n_blocks, int step, const int i, const int T, const int tile_rows) {
    const int per = numbers_per_scale(type), s = part_of(type, step, i), first = type == Q6_K ? 16 * (i % 2) : 0;
    const int zero = type == Q8_0 ? Q8_OFFSET : zero_of(type);
    const int both = type == Q4_0 || type == Q4_1 || type == Q5_0 || type == Q5_1 ? 2 : 1; // parts of a nibble
    const uint8_t *halves[SUMS], *words[SUMS];
    x += s * per / 32;
    UNROLL for (int v = 0; v < tile_rows * VECTORS; v++) {
        const uint8_t *own = tile + v / VECTORS * next, *part = own + s * part_size(type) + 4 * (v % VECTORS) * LANES;
        halves[v] = unpacked ? part : own + 2 * (v % VECTORS) * LANES;
        words[v] = unpacked ? part + part_head(type) : own + 2 * halves_of(type) * TILE + 4 * (v % VECTORS) * LANES;
    }
    Ints products[SUMS][TOKENS_Q];
    UNROLL for (int t = 0; t < T; t++) {
        const Block *b = x + t * n_blocks;
        int sum = per == 32 ? b->sum : first ? b->sum - b->half : b->half;
        UNROLL for (int v = 0; v < tile_rows * VECTORS; v++) products[v][t] = SET_I(zero ? -zero * sum : 0);
    }
    for (int g = 0; g < per / 4 / both; g++)
        UNROLL for (int h = 0; h < both; h++) {
            Ints w[SUMS];
            UNROLL for (int v = 0; v < tile_rows * VECTORS; v++)
                w[v] = unpacked ? word_at(words[v], g) : numbers_at(type, words[v], step, i, g, h);
            UNROLL for (int t = 0; t < T; t++) {
                Ints q = four_bytes(x[t * n_blocks].q + first + 4 * g + 16 * h);
                UNROLL for (int v = 0; v < tile_rows * VECTORS; v++)
                    products[v][t] = type == Q8_0 ? DOT(products[v][t], w[v], q) : DOT_SMALL(products[v][t], w[v], q);
            }
        }
    UNROLL for (int v = 0; v < tile_rows * VECTORS; v++) {
        Floats scales = unpacked ? LOAD((const float *)halves[v]) : scales_at(type, halves[v], words[v], s);
        UNROLL for (int t = 0; t < T; t++)
            sums[v][t] = FMA(FLOATS(products[v][t]), MUL(scales, SET(x[t * n_blocks].scale)), sums[v][t]);
        if (!has_minima(type)) continue;
        Floats minima = unpacked ? LOAD((const float *)halves[v] + TILE) : minima_at(type, halves[v], words[v], s);
        UNROLL for (int t = 0; t < T; t++)
            sums[v][t] = FMA(minima, SET(-x[t * n_blocks].scale * x[t * n_blocks].sum), sums[v][t]);
    }
}

// Parts of a tile of 256 columns are read back and forth, which hides from the processor that memory is read in one stream.
INLINE void prefetch_share(const uint8_t *tile, size_t share, int step) {
    for (size_t i = 0; i < share; i += 64) __builtin_prefetch(tile + step * share + i);
}

// T tokens with some rows of tiles.
INLINE void block_tiles(Type type, bool unpacked, const TileProduct *p, const int T, const int tile_rows) {
    const int width = block_size(type).numbers, steps = width / numbers_per_scale(type) / parts_of_step(type);
    const size_t size = unpacked ? UNPACKED : block_size(type).bytes * TILE, next = p->cols / width * size; // bytes
    const Block *x = p->x;
    const uint8_t *tiles = p->tiles, *end = tiles + next;
    Floats sums[SUMS][TOKENS_Q];
    UNROLL for (int v = 0; v < tile_rows * VECTORS; v++)
        UNROLL for (int t = 0; t < T; t++) sums[v][t] = SET(0);
    for (; tiles != end; tiles += size, x += width / 32)
        for (int step = 0; step < steps; step++) {
            if (T == 1 && width == 256) prefetch_share(tiles + 2 * size, size / steps, step);
            UNROLL for (int i = 0; i < parts_of_step(type); i++) {
                add_part(type, unpacked, sums, tiles, next, x, p->cols / 32, step, i, T, tile_rows);
                // or parts would share what fits no registers
                if (T == TOKENS_Q && parts_of_step(type) > 1 && !unpacked) __asm__ volatile("" ::: "memory");
            }
        }
    UNROLL for (int v = 0; v < tile_rows * VECTORS; v++)
        UNROLL for (int t = 0; t < T; t++) STORE(p->y + t * 2 * TILE + v * LANES, sums[v][t]);
}

// T tokens with each row of tiles.
INLINE void block_rows(Type type, bool unpacked, TileProduct p, const int T) {
    const size_t size = unpacked ? UNPACKED : block_size(type).bytes * TILE; // bytes of a tile
    if (TILE_ROWS == 2 && T == TOKENS_Q && p.tile_rows == 2) block_tiles(type, unpacked, &p, T, TILE_ROWS);
    else
        for (int r = 0; r < p.tile_rows; r++, p.y += TILE, p.tiles += p.cols / block_size(type).numbers * size)
            block_tiles(type, unpacked, &p, T, 1);
}

// Behind the next T tokens.
INLINE TileProduct skip(TileProduct p, const int T) {
    p.T -= T, p.y += T * 2 * TILE, p.x = (const Block *)p.x + T * (p.cols / 32);
    return p;
}

INLINE void product_of_some(Type type, bool unpacked, TileProduct p) {
    for (; p.T >= TOKENS_Q; p = skip(p, TOKENS_Q)) block_rows(type, unpacked, p, TOKENS_Q);
    for (; p.T >= 2; p = skip(p, 2)) block_rows(type, unpacked, p, 2);
    if (p.T) block_rows(type, unpacked, p, 1);
}

INLINE void product_of_blocks(Type type, TileProduct p) {
    if (block_size(type).numbers == 256 && p.unpacked) product_of_some(type, true, p);
    else product_of_some(type, false, p);
}

TARGET static void product_q8(const TileProduct *p) { product_of_blocks(Q8_0, *p); }
TARGET static void product_q4(const TileProduct *p) { product_of_blocks(Q4_0, *p); }
TARGET static void product_q4_1(const TileProduct *p) { product_of_blocks(Q4_1, *p); }
TARGET static void product_q5_0(const TileProduct *p) { product_of_blocks(Q5_0, *p); }
TARGET static void product_q5_1(const TileProduct *p) { product_of_blocks(Q5_1, *p); }
TARGET static void product_q4_k(const TileProduct *p) { product_of_blocks(Q4_K, *p); }
TARGET static void product_q5_k(const TileProduct *p) { product_of_blocks(Q5_K, *p); }
TARGET static void product_q6_k(const TileProduct *p) { product_of_blocks(Q6_K, *p); }

// ----------------------------------------------------------------------------
// SwiGLU, RoPE, softmax

// e^x for x up to 88, and 1e-38 below -87: 2^n e^r, n an integer and |r| <= ln 2 / 2, by the series to r^6 (error 2e-7).
INLINE Floats exponential(Floats x) {
    x = MIN(SET(88.0f), MAX(SET(-87.0f), x));
    Floats n = ROUND(MUL(x, SET(1.44269504f))), r = FMA(n, SET(-0.693359375f), x), p = SET(1 / 720.0f);
    r = FMA(n, SET(2.12194440e-4f), r); // ln 2 in two parts; n times the first is exact
    p = FMA(p, r, SET(1 / 120.0f));
    p = FMA(p, r, SET(1 / 24.0f));
    p = FMA(p, r, SET(1 / 6.0f));
    p = FMA(p, r, SET(0.5f));
    p = FMA(p, r, SET(1));
    p = FMA(p, r, SET(1));
    return MUL(p, POW2(n));
}

TARGET static void swiglu(float *h, const float *h2, int n) {
    for (int i = 0; i < n; i += LANES) {
        float tail[LANES];
        bool full = i + LANES <= n;
        Floats x = full ? LOAD(h + i) : load_tail(F32, h, i, n - i);
        Floats x2 = full ? LOAD(h2 + i) : load_tail(F32, h2, i, n - i);
        Floats y = MUL(DIV(x, ADD(SET(1), exponential(MUL(x, SET(-1))))), x2);
        STORE(full ? h + i : tail, y);
        if (!full) memcpy(h + i, tail, (n - i) * sizeof(float));
    }
}

TARGET static void rotate(float *x, const float *rotation, int head_dim) {
    for (int i = 0; i < head_dim; i += LANES) {
        int left = head_dim - i;
        float tail[LANES];
        Floats a = left < LANES ? load_tail(F32, x, i, left) : LOAD(x + i);
        Floats cosine = left < LANES ? load_tail(F32, rotation, i, left) : LOAD(rotation + i);
        Floats sine = left < LANES ? load_tail(F32, rotation, head_dim + i, left) : LOAD(rotation + head_dim + i);
        Floats y = FMA(SWAP(a), sine, MUL(a, cosine));
        STORE(left < LANES ? tail : x + i, y);
        if (left < LANES) memcpy(x + i, tail, left * sizeof *tail);
    }
}

// A vector of the first half and one of the second, or what is left of them.
TARGET static void rotate_halves(float *x, const float *rotation, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += LANES) {
        int left = half - i < LANES ? half - i : LANES;
        const float *numbers[] = {x + i, x + half + i, rotation + i, rotation + half + i, rotation + head_dim + i,
                                  rotation + head_dim + half + i};
        Floats v[6];
        float tail[LANES];
        UNROLL for (int j = 0; j < 6; j++) v[j] = left < LANES ? load_tail(F32, numbers[j], 0, left) : LOAD(numbers[j]);
        for (int j = 0; j < 2; j++) {
            STORE(left < LANES ? tail : x + j * half + i, FMA(v[1 - j], v[4 + j], MUL(v[j], v[2 + j])));
            if (left < LANES) memcpy(x + j * half + i, tail, left * sizeof *tail);
        }
    }
}

TARGET static float largest(const float *x, int n) {
    Floats a = SET(-INFINITY), b = a, poison = SET(0); // 0 times NaN or infinity is NaN
    float rest = 0;
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        Floats x1 = LOAD(x + i), x2 = LOAD(x + i + LANES);
        a = MAX(a, x1), b = MAX(b, x2);
        poison = FMA(x1, SET(0), FMA(x2, SET(0), poison));
    }
    float most = LARGEST(MAX(a, b));
    for (; i < n; i++) most = x[i] > most ? x[i] : most, rest += 0 * x[i];
    return most + SUM(poison) + rest;
}

TARGET static float exponentials(float *x, float most, float scale, int n) {
    Floats sum = SET(0);
    float tail[LANES];
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        Floats e = exponential(MUL(ADD(LOAD(x + i), SET(-most)), SET(scale)));
        STORE(x + i, e);
        sum = ADD(sum, e);
    }
    float total = SUM(sum);
    if (i < n) STORE(tail, exponential(MUL(ADD(load_tail(F32, x, i, n - i), SET(-most)), SET(scale))));
    for (int t = 0; i < n; i++, t++) total += x[i] = tail[t];
    return total;
}

TARGET static void multiply(float *x, const float *y, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) STORE(x + i, MUL(LOAD(x + i), LOAD(y + i)));
    for (; i < n; i++) x[i] *= y[i];
}

// ----------------------------------------------------------------------------
// Attention

// Scores of n queries q.., a tile of keys at a time. Two sums for even and odd d, so that an addition need not wait for the
// one before.
INLINE void score_queries(Type type, const Attention *a, int first, const int n) {
    const float *q = a->q + first * a->q_stride;
    const char *keys = a->keys;
    const size_t size = number_size(type) * TILE; // bytes of one d in a tile
    for (int i = 0; i < a->n; i += TILE, keys += size * a->head_dim)
        for (int v = 0; v < VECTORS; v++) {
            Floats even[QUERIES], odd[QUERIES];
            UNROLL for (int query = 0; query < n; query++) even[query] = odd[query] = SET(0);
            for (int d = 0; d < a->head_dim; d += 2) {
                Floats key = load(type, keys + d * size, v * LANES), key2 = load(type, keys + (d + 1) * size, v * LANES);
                UNROLL for (int query = 0; query < n; query++) {
                    even[query] = FMA(key, SET(q[query * a->q_stride + d]), even[query]);
                    odd[query] = FMA(key2, SET(q[query * a->q_stride + d + 1]), odd[query]);
                }
            }
            UNROLL for (int query = 0; query < n; query++)
                STORE(a->p + (first + query) * a->p_stride + i + v * LANES, ADD(even[query], odd[query]));
        }
}

INLINE void score_all(Type type, const Attention *a) {
    if (a->n_queries == 1) score_queries(type, a, 0, 1);
    else if (a->n_queries == 2) score_queries(type, a, 0, 2);
    else if (a->n_queries == 3) score_queries(type, a, 0, 3);
    else score_queries(type, a, 0, QUERIES);
}

TARGET static void scores(const Attention *a) {
    if (a->type == F16) score_all(F16, a);
    else if (a->type == INT8_GROUPS) score_all(INT8_GROUPS, a);
    else score_all(F32, a);
}

// The sums of `vectors` vectors of the width, from d on, for n queries stay in registers while the positions pass by; of one
// query, even and odd positions have their own, so that an addition need not wait for the one before.
INLINE void mix_columns(Type type, const Attention *a, int first, int d, const int n, const int vectors) {
    const int chains = n == 1 ? 2 : 1;
    const float *p = a->p + first * a->p_stride;
    const char *values = (const char *)a->values + d * number_size(type);
    Floats sums[QUERIES + 1][4];
    UNROLL for (int i = 0; i < n * chains; i++)
        UNROLL for (int v = 0; v < vectors; v++) sums[i][v] = SET(0);
    for (int i = 0; i < a->n; i++) {
        UNROLL for (int v = 0; v < vectors; v++) {
            Floats value = load(type, values, (size_t)i * a->width + v * LANES);
            UNROLL for (int query = 0; query < n; query++)
                sums[query][v] = FMA(value, SET(p[query * a->p_stride + i]), sums[query][v]);
        }
        if (chains == 1 || ++i == a->n) continue;
        UNROLL for (int v = 0; v < vectors; v++)
            sums[1][v] = FMA(load(type, values, (size_t)i * a->width + v * LANES), SET(p[i]), sums[1][v]);
    }
    UNROLL for (int query = 0; query < n; query++)
        UNROLL for (int v = 0; v < vectors; v++)
            STORE(a->out + (size_t)(first + query) * a->width + d + v * LANES,
                  chains == 2 ? ADD(sums[0][v], sums[1][v]) : sums[query][v]);
}

INLINE void mix_queries(Type type, const Attention *a, int first, const int n) {
    enum { MOST = LANES == 16 ? 4 : 2 };
    int d = 0;
    for (; d + MOST * LANES <= a->width; d += MOST * LANES) mix_columns(type, a, first, d, n, MOST);
    for (; MOST > 3 && d + 3 * LANES <= a->width; d += 3 * LANES) mix_columns(type, a, first, d, n, 3);
    for (; d < a->width; d += LANES) mix_columns(type, a, first, d, n, 1);
}

INLINE void mix_all(Type type, const Attention *a) {
    if (a->n_queries == 1) mix_queries(type, a, 0, 1);
    else if (a->n_queries == 2) mix_queries(type, a, 0, 2);
    else if (a->n_queries == 3) mix_queries(type, a, 0, 3);
    else mix_queries(type, a, 0, QUERIES);
}

TARGET static void mix(const Attention *a) {
    if (a->type == F16) mix_all(F16, a);
    else if (a->type == INT8_GROUPS) mix_all(INT8_GROUPS, a);
    else mix_all(F32, a);
}

enum { PANEL = TOKENS < 8 ? 4 : 8 }; // queries, of which a chunk has whole panels

INLINE void panel_tiles(Type type, const PanelProduct *p, int first, const int tiles) {
    const char *w = (const char *)p->w + first * p->next * number_size(type);
    float *y = p->y + first * TILE;
    Floats sums[SUMS][TOKENS], column[SUMS];
    const float *x = p->x;
    UNROLL for (int v = 0; v < tiles * VECTORS; v++)
        UNROLL for (int t = 0; t < PANEL; t++) sums[v][t] = p->add ? LOAD(y + t * p->y_stride + v * LANES) : SET(0);
    for (int c = 0; c < p->cols; c++, w += p->column * number_size(type), x += PANEL) {
        UNROLL for (int v = 0; v < tiles * VECTORS; v++)
            column[v] = load(type, w, v / VECTORS * p->next + v % VECTORS * LANES);
        add_column(sums, column, x, PANEL, tiles);
    }
    UNROLL for (int v = 0; v < tiles * VECTORS; v++)
        UNROLL for (int t = 0; t < PANEL; t++) STORE(y + t * p->y_stride + v * LANES, sums[v][t]);
}

INLINE void panel_of(Type type, const PanelProduct *p) {
    for (int i = 0; i < p->tiles; i += TILE_ROWS) {
        if (i + TILE_ROWS <= p->tiles) panel_tiles(type, p, i, TILE_ROWS);
        else panel_tiles(type, p, i, 1);
    }
}

TARGET static void panel_product(const PanelProduct *p) {
    if (p->type == F16) panel_of(F16, p);
    else if (p->type == INT8_GROUPS) panel_of(INT8_GROUPS, p);
    else panel_of(F32, p);
}

#define SIMD_KERNELS \
    .tokens = TOKENS, .queries = PANEL, .panel_product = panel_product, \
    .types = {[F32] = {dot_f32, pack_words, product_f32, NULL}, [F16] = {.dot = dot_f16}, \
              [BF16] = {dot_bf16, pack_words, product_bf16, NULL}, [Q8_0] = {dot_q8, pack_q8, product_q8, NULL}, \
              [Q4_0] = {dot_q4, pack_q4, product_q4, NULL}, [Q4_1] = {dot_q4_1, pack_q4_1, product_q4_1, NULL}, \
              [Q5_0] = {dot_q5_0, pack_q5_0, product_q5_0, NULL}, [Q5_1] = {dot_q5_1, pack_q5_1, product_q5_1, NULL}, \
              [Q4_K] = {dot_q4_k, pack_q4_k, product_q4_k, unpack_q4_k}, \
              [Q5_K] = {dot_q5_k, pack_q5_k, product_q5_k, unpack_q5_k}, \
              [Q6_K] = {dot_q6_k, pack_q6_k, product_q6_k, unpack_q6_k}}, \
    .floats_f16 = floats_f16, .floats_bf16 = floats_bf16, .halves = halves, .quantize = quantize, .transpose = transpose, \
    .swiglu = swiglu, .rotate = rotate, .rotate_halves = rotate_halves, .largest = largest, .exponentials = exponentials, \
    .multiply = multiply, .scores = scores, .mix = mix

// Part of simd.h: packs rows into tiles, and multiplies tiles of F32 and BF16 with floats.

// Transposes a 4 by 4 matrix of words of four bytes and XORs each word with `flip`. The rows of the
// matrix are `stride` bytes apart, those of the result `out_stride`.
INLINE void transpose_4x4(uint8_t *out, size_t out_stride, const uint8_t *rows, size_t stride,
                          Quad flip) {
    Quad a = LOAD_QUAD(rows), b = LOAD_QUAD(rows + stride);
    Quad c = LOAD_QUAD(rows + 2 * stride), d = LOAD_QUAD(rows + 3 * stride);
    Quad ac = LOW_32(a, c), bd = LOW_32(b, d), ac2 = HIGH_32(a, c), bd2 = HIGH_32(b, d);
    STORE_QUAD(out, XOR_QUAD(LOW_32(ac, bd), flip));
    STORE_QUAD(out + out_stride, XOR_QUAD(HIGH_32(ac, bd), flip));
    STORE_QUAD(out + 2 * out_stride, XOR_QUAD(LOW_32(ac2, bd2), flip));
    STORE_QUAD(out + 3 * out_stride, XOR_QUAD(HIGH_32(ac2, bd2), flip));
}

// out (n, rows) = in (rows, n) of words of 4 bytes. Reads one cache line (16 words) of only four
// rows at a time: if `stride` is a power of two, the lines of more rows may fall into the same set
// of the first-level cache and evict each other.
TARGET static void transpose(uint8_t *out, const uint8_t *in, size_t stride, int rows, int n) {
    int i = 0, end; // words i..end-1 of each row
    for (; rows % 4 == 0 && i + 4 <= n; i = end) {
        end = i + 16 <= n ? i + 16 : n / 4 * 4;
        for (int r = 0; r < rows; r += 4)
            for (int c = i; c < end; c += 4) {
                uint8_t *to = out + 4 * ((size_t)c * rows + r);
                transpose_4x4(to, 4 * rows, in + r * stride + 4 * c, stride, SET_QUAD(0));
            }
    }
    uint8_t *rest = out + (size_t)4 * i * rows;
    if (i < n) llamac_reference.transpose(rest, in + 4 * i, stride, rows, n - i);
}

// Packs F32 or BF16. A unit is one word of a row: one column of F32, or two columns of BF16.
TARGET static void pack_words(uint8_t *tiles, const uint8_t *rows, size_t stride, int units) {
    transpose(tiles, rows, stride, TILE, units);
}

// Reorders the fifth bits of 32 columns: that of column 4i + k moves to bit i of byte k. Then a
// product gets the fifth bits of four columns, one in each byte, with one shift and one mask.
ALWAYS uint32_t order_bits(uint32_t bits) {
    uint32_t ordered = 0;
    // the multiplication makes four copies of the 4 bits, at bits 0, 7, 14 and 21, so bit k of
    // copy k is at bit 7k + k = 8k
    for (int i = 0; i < 8; i++) ordered |= ((bits >> 4 * i & 15) * 0x00204081 & 0x01010101) << i;
    return ordered;
}

// Reorders the fifth bits of TILE rows, one word each.
INLINE void order_fifth_bits(uint8_t *words) {
    uint32_t bits[TILE];
    memcpy(bits, words, sizeof bits);
    for (int r = 0; r < TILE; r++) bits[r] = order_bits(bits[r]);
    memcpy(words, bits, sizeof bits);
}

// Packs quantised blocks; see the layout of tiles in kernels.h.
INLINE void pack_blocks(Type type, uint8_t *tiles, const uint8_t *rows, size_t stride,
                        int n_blocks) {
    // halves, n: the half-precision numbers and the words of a block
    const int size = block_size(type).bytes, halves = halves_of(type), n = words_of(type);
    Quad flip = SET_QUAD(type == Q8_0 && Q8_OFFSET ? 0x80808080 : 0); // signed q to q + 128
    for (int b = 0; b < n_blocks; b++, rows += size, tiles += size * TILE) {
        uint8_t *words = tiles + 2 * halves * TILE;
        for (int i = 0; i < halves; i++)
            for (int r = 0; r < TILE; r++)
                memcpy(tiles + 2 * (i * TILE + r), rows + r * stride + halves_at(type) + 2 * i, 2);
        for (int r = 0; r < TILE; r += 4)
            for (int c = 0, first; c < n; c += 4) {
                first = c + 4 <= n ? c : n - 4; // the last step may pack some words again
                const uint8_t *from = rows + r * stride + words_at(type) + 4 * first;
                transpose_4x4(words + 4 * (first * TILE + r), 4 * TILE, from, stride, flip);
            }
        if (has_fifth_bits(type)) order_fifth_bits(words); // word 0 of each block
    }
}

// ----------------------------------------------------------------------------
// Products of tiles with floats. Each lane holds the sum of one row

// Adds the products of one column of weights with the activations x (T,) to the sums of T tokens.
INLINE void add_column(Floats sums[SUMS][TOKENS], const Floats w[SUMS], const float *x, const int T,
                       const int tile_rows) {
    UNROLL for (int t = 0; t < T; t++) {
        Floats xs = SET(x[t]);
        UNROLL for (int v = 0; v < tile_rows * VECTORS; v++) sums[v][t] = FMA(w[v], xs, sums[v][t]);
    }
}

// Loads two columns of weights from one row of tiles, or from two that are `next` bytes apart. If
// `two` is false, the first is the last column of the matrix, and w[1] must not be used.
INLINE void load_columns(Type type, Floats w[2][SUMS], const uint8_t *tiles, size_t next,
                         const int tile_rows, const bool two) {
    UNROLL for (int v = 0; v < tile_rows * VECTORS; v++) {
        const uint8_t *from = tiles + v / VECTORS * next + v % VECTORS * 4 * LANES;
        if (type == F32) {
            w[0][v] = LOAD((const float *)from);
            w[1][v] = two ? LOAD((const float *)from + TILE) : w[0][v];
        } else {
            w[0][v] = BF16_LOW(LOAD_I(from));
            w[1][v] = BF16_HIGH(LOAD_I(from));
        }
    }
}

// Multiplies one or two rows of tiles with T tokens. With few tokens, columns alternate between
// several sums (`chains`), so that an addition does not wait for the one before.
INLINE void float_tiles(Type type, const TileProduct *p, const int T, const int tile_rows) {
    const int chains = T == 1 ? 4 : T == 2 ? 2 : 1;
    const int cols = p->cols;
    const size_t column = (type == F32 ? 4 : 2) * TILE; // bytes of one column
    // bytes of a row of tiles; an odd last column of BF16 has a pair of its own
    const size_t next = (cols + (type != F32 && cols % 2)) * column;
    const uint8_t *tiles = p->tiles;
    const float *x = p->x;
    Prefetch ahead = p->prefetch;
    Floats w[2][SUMS], sums[4][SUMS][TOKENS];
    UNROLL for (int i = 0; i < chains; i++) UNROLL for (int v = 0; v < tile_rows * VECTORS; v++)
        UNROLL for (int t = 0; t < T; t++) sums[i][v][t] = SET(0);
    int c = 0;
    for (; chains == 4 && c + 4 <= cols; c += 4, x += 4 * T) UNROLL for (int i = 0; i < 4; i += 2) {
            load_columns(type, w, tiles + (c + i) * column, next, tile_rows, true);
            add_column(sums[i], w[0], x + i * T, T, tile_rows);
            add_column(sums[i + 1], w[1], x + (i + 1) * T, T, tile_rows);
        }
    for (; c + 2 <= cols; c += 2, x += 2 * T) {
        // the output and the weights of the next rows; with 1 or 2 tokens, memory is read as one
        // stream instead
        if (T > 2) prefetch(&ahead, c / 2);
        load_columns(type, w, tiles + c * column, next, tile_rows, true);
        add_column(sums[0], w[0], x, T, tile_rows);
        add_column(sums[chains > 1], w[1], x + T, T, tile_rows);
    }
    if (c < cols) {
        load_columns(type, w, tiles + c * column, next, tile_rows, false);
        add_column(sums[0], w[0], x, T, tile_rows);
    }
    UNROLL for (int v = 0; v < tile_rows * VECTORS; v++) UNROLL for (int t = 0; t < T; t++) {
        Floats sum = chains > 1 ? ADD(sums[0][v][t], sums[1][v][t]) : sums[0][v][t];
        if (chains == 4) sum = ADD(sum, ADD(sums[2][v][t], sums[3][v][t]));
        // if T > 1, y is (T, 2 * TILE): see TileProduct
        STORE(p->y + t * 2 * TILE + v * LANES, sum);
    }
}

// Multiplies all rows of tiles: any number if T is 1, otherwise one or two. With few tokens, it
// computes one row of tiles after the other, because memory is read fastest as one stream. With
// many tokens, it computes two rows at once, which share the loaded activations. Each call passes T
// as a constant.
INLINE void product_of_floats(Type type, TileProduct p) {
    // If TOKENS is 8 or less, the calls with EIGHT are never made, but must compile: float_tiles
    // has room for the sums of TOKENS.
    enum { EIGHT = TOKENS < 8 ? TOKENS : 8 };
    // bytes of a row of tiles
    const size_t size = (size_t)(type == F32 ? p.cols : (p.cols + 1) / 2) * 4 * TILE;
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

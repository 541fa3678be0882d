// Part of simd.h: packs rows into tiles, and multiplies tiles of F32, BF16 and F16 with floats.

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

// Packs F32, BF16 or F16. A unit is one word of a row: one column of F32, or two of the others.
TARGET static void pack_words(uint8_t *tiles, const uint8_t *rows, size_t stride, int units) {
    transpose(tiles, rows, stride, FLOAT_TILE, units);
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
INLINE void add_column(Floats sums[][TOKENS], const Floats *w, const float *x, const int T,
                       const int vectors) {
    UNROLL for (int t = 0; t < T; t++) {
        Floats xs = SET(x[t]);
        UNROLL for (int v = 0; v < vectors; v++) sums[v][t] = FMA(w[v], xs, sums[v][t]);
    }
}

// Loads two columns of weights. If `two` is false, the first is the last column of the matrix, and
// w[1] must not be used.
INLINE void load_columns(Type type, Floats w[2][2 * VECTORS], const uint8_t *tile,
                         const int vectors, const bool two) {
    UNROLL for (int v = 0; v < vectors; v++) {
        const uint8_t *from = tile + v * 4 * LANES;
        if (type == F32) {
            w[0][v] = LOAD((const float *)from);
            w[1][v] = two ? LOAD((const float *)from + FLOAT_TILE) : w[0][v];
        } else if (type == BF16) {
            w[0][v] = BF16_LOW(LOAD_I(from));
            w[1][v] = BF16_HIGH(LOAD_I(from));
        } else {
            w[0][v] = F16_LOW(LOAD_I(from));
            w[1][v] = F16_HIGH(LOAD_I(from));
        }
    }
}

// Multiplies one or two groups of TILE rows of a row of tiles with T tokens. `tiles` points to the
// first group of the first tile. Each lane adds the columns in order, regardless of T.
INLINE void float_tiles(Type type, const TileProduct *p, const uint8_t *tiles, const int T,
                        const int groups) {
    const int cols = p->cols, vectors = groups * VECTORS;
    const size_t column = (type == F32 ? 4 : 2) * FLOAT_TILE; // bytes of one column
    const float *x = p->x;
    Prefetch ahead = p->prefetch;
    Floats w[2][2 * VECTORS], sums[2 * VECTORS][TOKENS];
    UNROLL for (int v = 0; v < vectors; v++) UNROLL for (int t = 0; t < T; t++) sums[v][t] = SET(0);
    int c = 0;
    for (; c + 2 <= cols; c += 2, x += 2 * T) {
        // prefetches the output and the weights of the next rows, except with 1 or 2 tokens, when
        // memory is read as one stream
        if (T > 2) prefetch(&ahead, c / 2);
        load_columns(type, w, tiles + c * column, vectors, true);
        add_column(sums, w[0], x, T, vectors);
        add_column(sums, w[1], x + T, T, vectors);
    }
    if (c < cols) {
        load_columns(type, w, tiles + c * column, vectors, false);
        add_column(sums, w[0], x, T, vectors);
    }
    // if T > 1, y is (T, 2 * TILE): see TileProduct
    UNROLL for (int v = 0; v < vectors; v++) UNROLL for (int t = 0; t < T; t++)
        STORE(p->y + t * 2 * TILE + v * LANES, sums[v][t]);
}

// Multiplies two rows of tiles of F32 with one token. Memory is read faster as two streams, unless
// it has large pages: while one stream waits for its next page, the other continues.
INLINE void two_float_rows(const TileProduct *p, const uint8_t *tiles) {
    const size_t column = 4 * FLOAT_TILE, row = p->cols * column; // bytes
    const float *x = p->x;
    Floats w[2 * VECTORS], sums[2][2 * VECTORS][TOKENS];
    UNROLL for (int v = 0; v < 2 * VECTORS; v++) sums[0][v][0] = sums[1][v][0] = SET(0);
    for (int c = 0; c < p->cols; c++, tiles += column, x++) {
        UNROLL for (int r = 0; r < 2; r++) {
            const float *from = (const float *)(tiles + r * row);
            UNROLL for (int v = 0; v < 2 * VECTORS; v++) w[v] = LOAD(from + v * LANES);
            add_column(sums[r], w, x, 1, 2 * VECTORS);
        }
    }
    UNROLL for (int r = 0; r < 2; r++) UNROLL for (int v = 0; v < 2 * VECTORS; v++)
        STORE(p->y + r * FLOAT_TILE + v * LANES, sums[r][v][0]);
}

// Multiplies all groups. Computes both groups of a tile at once if their sums fit in registers:
// then they share the loaded activations. Each call passes T as a constant.
INLINE void product_of_floats(Type type, TileProduct p) {
    // If TOKENS is 8 or less, the calls with EIGHT are never made, but must compile: float_tiles
    // has room for the sums of TOKENS.
    enum { EIGHT = TOKENS < 8 ? TOKENS : 8, BOTH = TILE_ROWS };
    // bytes of a row of tiles
    const size_t size = (size_t)(type == F32 ? p.cols : (p.cols + 1) / 2) * 4 * FLOAT_TILE;
    const int end = p.first + p.groups;
    for (int g = p.first, n; g < end; g += n, p.y += n * TILE) {
        const uint8_t *tiles = p.tiles + g / 2 * size + g % 2 * 4 * TILE;
        if (FLOAT_STREAMS == 2 && type == F32 && p.T == 1 && g % 2 == 0 && g + 4 <= end) {
            two_float_rows(&p, tiles);
            n = 4;
            continue;
        }
        n = g % 2 == 0 && g + 1 < end && (BOTH == 2 || p.T == 1) ? 2 : 1;
        if (p.T == 1 && n == 2) float_tiles(type, &p, tiles, 1, 2);
        else if (p.T == 1) float_tiles(type, &p, tiles, 1, 1);
        else if (p.T == 2 && n == 1) float_tiles(type, &p, tiles, 2, 1);
        else if (p.T == 2) float_tiles(type, &p, tiles, 2, BOTH);
        else if (p.T == 4 && n == 1) float_tiles(type, &p, tiles, 4, 1);
        else if (p.T == 4) float_tiles(type, &p, tiles, 4, BOTH);
        else if (TOKENS > 8 && p.T == 8 && n == 1) float_tiles(type, &p, tiles, EIGHT, 1);
        else if (TOKENS > 8 && p.T == 8) float_tiles(type, &p, tiles, EIGHT, BOTH);
        else if (n == 1) float_tiles(type, &p, tiles, TOKENS, 1);
        else float_tiles(type, &p, tiles, TOKENS, BOTH);
    }
}

TARGET static void product_f32(const TileProduct *p) { product_of_floats(F32, *p); }
TARGET static void product_bf16(const TileProduct *p) { product_of_floats(BF16, *p); }
TARGET static void product_f16(const TileProduct *p) { product_of_floats(F16, *p); }

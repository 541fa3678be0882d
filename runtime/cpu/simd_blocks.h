// Part of simd.h: products of tiles of quantised types with Blocks of activations.
//
// The columns of a tile that share a scale are a sub-block. Its products are summed as integers
// before they are scaled. The types with 32 columns have one sub-block, Q4_K and Q5_K eight, Q6_K
// sixteen. Sub-blocks that are stored in the low and the high nibbles of the same bytes form a
// step. Loops over steps stay loops; those over the sub-blocks i of a step are unrolled, so i is a
// constant.

// Loads four activations and copies them to every lane.
INLINE Ints four_bytes(const int8_t *q) {
    int32_t bytes;
    memcpy(&bytes, q, 4);
    return SET_I(bytes);
}

// Shifts each word right (left if `shift` is negative), then masks it.
INLINE Ints bits(Ints v, int shift, uint32_t mask) {
    return (Ints)((shift < 0 ? (Words)v << -shift : (Words)v >> shift) & mask);
}

INLINE Ints either(Ints a, Ints b) { return (Ints)((Words)a | (Words)b); }

INLINE Ints nibbles_of(Ints v, int high) { return high ? SHIFT_4(v) : AND_15(v); }

INLINE int subs_of_step(Type type) { return type == Q6_K ? 4 : has_k_scales(type) ? 2 : 1; }
INLINE int steps_of(Type type) {
    return block_size(type).numbers / numbers_per_scale(type) / subs_of_step(type);
}

// Returns the index in the block of sub-block i of a step. For Q6_K, the four summands select, in
// order: the half of the block, low or high nibbles, 32 of the half's 64 bytes, 16 of these 32.
INLINE int sub_of(Type type, int step, int i) {
    return type == Q6_K ? step / 2 * 8 + i / 2 * 4 + step % 2 * 2 + i % 2 : 2 * step + i;
}

// Returns word i of LANES rows of a tile, starting with the row that `words` points to. A tile
// stores word 0 of all its TILE rows, then word 1 of all rows, and so on.
INLINE Ints word_at(const uint8_t *words, int i) { return LOAD_I(words + i * 4 * TILE); }

// Returns four columns of LANES rows as bytes: those of sub-block i of a step that begin with
// column 4g + 16h. Each byte is too large by zero_of(type), or by Q8_OFFSET for Q8_0. h is 1 only
// for types with 32 columns and nibbles, which store columns 16..31 in high nibbles; h is 0 for all
// others. Words 0..2 of Q4_K and Q5_K are scales and minima. Words 3..10 of Q5_K are fifth bits,
// words 11..42 nibbles. Words 0..31 of Q6_K are nibbles, words 32..47 upper bits, words 48..51
// scales.
INLINE Ints numbers_at(Type type, const uint8_t *words, int step, int i, int g, int h) {
    if (type == Q8_0) return word_at(words, g);
    if (type == Q4_0 || type == Q4_1) return nibbles_of(word_at(words, g), h);
    if (has_fifth_bits(type)) {
        // moves bit g + 4h of each byte, which order_bits in simd_tiles.h put there, to bit 4
        Ints fifth = bits(word_at(words, 0), g + 4 * h - 4, 0x10101010);
        return either(nibbles_of(word_at(words, 1 + g), h), fifth);
    }
    if (type == Q4_K) return nibbles_of(word_at(words, 3 + 8 * step + g), i);
    if (type == Q5_K) {
        // moves bit 2 step + i to bit 4, in two shifts because only i is a constant
        Ints fifth = bits(bits(word_at(words, 3 + g), 2 * step, ~0u), i - 4, 0x10101010);
        return either(nibbles_of(word_at(words, 11 + 8 * step + g), i), fifth);
    }
    // Q6_K: moves two bits, from bit 2 (step % 2) + 4 (i / 2) on, to bits 4 and 5
    Ints upper = bits(word_at(words, 32 + step / 2 * 8 + i % 2 * 4 + g), step % 2 * 2, ~0u);
    Ints low = nibbles_of(word_at(words, step * 8 + i % 2 * 4 + g), i / 2);
    return either(low, bits(upper, i / 2 * 4 - 4, 0x30303030));
}

// Returns the scales (or minima) of sub-block s of Q4_K and Q5_K, 6 bits each: see read_k_scales in
// blocks.h.
INLINE Ints k_scales(const uint8_t *words, int s, int minima) {
    if (s < 4) return bits(word_at(words, minima), 8 * s, 63);
    int at = 8 * (s - 4);
    Ints low = bits(word_at(words, 2), at + 4 * minima, 15);
    return either(low, bits(word_at(words, minima), at + 2, 0x30));
}

// Returns the scales of sub-block s for LANES rows. A tile begins with half-precision scales, then
// minima if the type has them: `halves` points to the scale of the first of these rows.
INLINE Floats scales_at(Type type, const uint8_t *halves, const uint8_t *words, int s) {
    Floats scales = LOAD_F16((const void *)halves);
    if (has_k_scales(type)) return MUL(scales, FLOATS(k_scales(words, s, 0)));
    if (type != Q6_K) return scales;
    // Q6_K: byte s % 4 of the word, as signed integer
    Words bytes = (Words)word_at(words, 48 + s / 4) << (24 - s % 4 * 8);
    return MUL(scales, FLOATS((Ints)((SignedWords)bytes >> 24)));
}

// Returns the minima of sub-block s for LANES rows, to be subtracted. Those of Q4_1 and Q5_1 are
// stored to be added, so they are negated.
INLINE Floats minima_at(Type type, const uint8_t *halves, const uint8_t *words, int s) {
    Floats minima = LOAD_F16((const void *)(halves + 2 * TILE));
    return MUL(minima, has_k_scales(type) ? FLOATS(k_scales(words, s, 1)) : SET(-1));
}

// Return the bytes of the scales and minima of an unpacked sub-block, and of the whole sub-block.
INLINE int unpacked_head(Type type) { return (has_minima(type) ? 8 : 4) * TILE; }
INLINE int unpacked_size(Type type) { return unpacked_head(type) + numbers_per_scale(type) * TILE; }

// Unpacks sub-block i of a step: see TypeKernels.unpack.
INLINE void unpack_sub(Type type, uint8_t *out, const uint8_t *tile, int step, const int i) {
    const int s = sub_of(type, step, i);
    out += s * unpacked_size(type);
    UNROLL for (int v = 0; v < VECTORS; v++, out += 4 * LANES) {
        const uint8_t *halves = tile + 2 * v * LANES;
        const uint8_t *words = tile + 2 * halves_of(type) * TILE + 4 * v * LANES;
        STORE((float *)out, scales_at(type, halves, words, s));
        if (has_minima(type)) STORE((float *)out + TILE, minima_at(type, halves, words, s));
        for (int g = 0; g < numbers_per_scale(type) / 4; g++) {
            Ints numbers = numbers_at(type, words, step, i, g, 0);
            STORE((float *)(out + unpacked_head(type)) + g * TILE, (Floats)numbers);
        }
    }
}

INLINE void unpack_tiles(Type type, uint8_t *out, const uint8_t *tiles, int n) {
    for (; n > 0; n--, out += UNPACKED, tiles += block_size(type).bytes * TILE)
        for (int step = 0; step < steps_of(type); step++)
            UNROLL for (int i = 0; i < subs_of_step(type); i++)
                unpack_sub(type, out, tiles, step, i);
}

// The constants that a product is compiled for: T tokens, tile_rows rows of tiles.
typedef struct {
    Type type;
    bool unpacked;
    int T, tile_rows;
} Shape;

INLINE size_t tile_bytes(Type type, bool unpacked) {
    if (!unpacked) return block_size(type).bytes * TILE;
    return type == Q8_0 ? unpacked_size(type) : UNPACKED;
}

// Returns the same as numbers_at, for packed or unpacked tiles.
INLINE Ints weights_at(const Shape shape, const uint8_t *words, int step, int i, int g, int h) {
    return shape.unpacked ? word_at(words, g) : numbers_at(shape.type, words, step, i, g, h);
}

// The operands of a product at one tile of each row of tiles.
typedef struct {
    const uint8_t *tile;
    size_t next;     // bytes of a row of tiles
    const Block *x;  // of the first token, from the first column of the tile on
    size_t n_blocks; // Blocks of one token
} Operands;

// Returns how many columns of a sub-block a byte holds. In types with 256 columns, the other nibble
// belongs to another sub-block.
INLINE int columns_per_byte(Type type) {
    return type != Q8_0 && block_size(type).numbers == 32 ? 2 : 1;
}

// Returns the index in a Block of the activation for the first column of numbers_at.
INLINE int column_at(Type type, int i, int g, int h) {
    return (type == Q6_K ? 16 * (i % 2) : 0) + 4 * g + 16 * h;
}

// Adds the products of sub-block i of a step to `products`. words: the words of each vector of
// rows; at.x: the Block of the first token.
INLINE void add_products(const Shape shape, Ints products[SUMS][BLOCK_TOKENS],
                         const uint8_t *const words[SUMS], Operands at, int step, const int i) {
    const Type type = shape.type;
    const int T = shape.T, vectors = shape.tile_rows * VECTORS, nibbles = columns_per_byte(type);
    UNROLL_WORDS
    for (int g = 0; g < numbers_per_scale(type) / 4 / nibbles; g++)
        UNROLL for (int h = 0; h < nibbles; h++) {
            Ints w[SUMS];
            UNROLL for (int v = 0; v < vectors; v++) w[v] =
                weights_at(shape, words[v], step, i, g, h);
            UNROLL for (int t = 0; t < T; t++) {
                Ints q = four_bytes(at.x[t * at.n_blocks].q + column_at(type, i, g, h));
                UNROLL for (int v = 0; v < vectors; v++) products[v][t] =
                    type == Q8_0 ? DOT(products[v][t], w[v], q)
                                 : DOT_SMALL(products[v][t], w[v], q);
            }
        }
}

#ifdef DOT_2X2
// The same for an even number of tokens. DOT_2X2 multiplies 8 columns of two rows with two tokens.
// A word of a tile is four columns of a row, so two words of each row are put side by side.
INLINE void add_products_2x2(const Shape shape, Ints products[SUMS][BLOCK_TOKENS],
                             const uint8_t *const words[SUMS], Operands at, int step, const int i) {
    const Type type = shape.type;
    const int T = shape.T, vectors = shape.tile_rows * VECTORS, nibbles = columns_per_byte(type);
    // during the loop, products[v][t] holds rows 0 and 1 of tokens t and t + 1, products[v][t + 1]
    // holds rows 2 and 3 of them
    UNROLL for (int v = 0; v < vectors; v++) UNROLL for (int t = 0; t < T; t += 2) {
        Quad a = (Quad)products[v][t], b = (Quad)products[v][t + 1];
        products[v][t] = (Ints)LOW_32(a, b), products[v][t + 1] = (Ints)HIGH_32(a, b);
    }
    for (int g = 0; g < numbers_per_scale(type) / 4 / nibbles; g += 2)
        UNROLL for (int h = 0; h < nibbles; h++) {
            Ints low[SUMS], high[SUMS]; // rows 0 and 1 of each vector, rows 2 and 3
            UNROLL for (int v = 0; v < vectors; v++) {
                Quad a = (Quad)weights_at(shape, words[v], step, i, g, h);
                Quad b = (Quad)weights_at(shape, words[v], step, i, g + 1, h);
                low[v] = (Ints)LOW_32(a, b), high[v] = (Ints)HIGH_32(a, b);
            }
            UNROLL for (int t = 0; t < T; t += 2) {
                const Block *b = at.x + t * at.n_blocks;
                const int column = column_at(type, i, g, h);
                Ints q = LOAD_2X8(b->q + column, b[at.n_blocks].q + column);
                UNROLL for (int v = 0; v < vectors; v++) {
                    products[v][t] = DOT_2X2(products[v][t], low[v], q);
                    products[v][t + 1] = DOT_2X2(products[v][t + 1], high[v], q);
                }
            }
        }
    UNROLL for (int v = 0; v < vectors; v++) UNROLL for (int t = 0; t < T; t += 2) {
        Quad a = (Quad)products[v][t], b = (Quad)products[v][t + 1];
        products[v][t] = (Ints)EVEN_32(a, b), products[v][t + 1] = (Ints)ODD_32(a, b);
    }
}
#endif

// Adds the products of sub-block i of a step to `sums`. Some types store weights with an offset
// (`zero`), others have a minimum. The sum of the activations times the offset is subtracted before
// the products are added, that sum times the minimum afterwards.
INLINE void add_sub(const Shape shape, Floats sums[SUMS][BLOCK_TOKENS], Operands at, int step,
                    const int i) {
    const Type type = shape.type;
    const int T = shape.T, vectors = shape.tile_rows * VECTORS;
    const int per = numbers_per_scale(type), s = sub_of(type, step, i);
    const int first = column_at(type, i, 0, 0); // index in the 32 activations of a Block
    const int zero = type == Q8_0 ? Q8_OFFSET : zero_of(type);
    at.x += s * per / 32;
    // `halves` points to half-precision scales, or to float32 scales if the tiles are unpacked
    const uint8_t *halves[SUMS], *words[SUMS];
    UNROLL for (int v = 0; v < vectors; v++) {
        const uint8_t *tile = at.tile + v / VECTORS * at.next;
        const uint8_t *sub = tile + s * unpacked_size(type) + 4 * (v % VECTORS) * LANES;
        halves[v] = shape.unpacked ? sub : tile + 2 * (v % VECTORS) * LANES;
        words[v] = shape.unpacked ? sub + unpacked_head(type)
                                  : tile + 2 * halves_of(type) * TILE + 4 * (v % VECTORS) * LANES;
    }
    Ints products[SUMS][BLOCK_TOKENS];
    UNROLL for (int t = 0; t < T; t++) {
        const Block *b = at.x + t * at.n_blocks;
        // b->half is the sum of the first 16 activations
        int sum = per == 32 ? b->sum : first ? b->sum - b->half : b->half;
        UNROLL for (int v = 0; v < vectors; v++) products[v][t] = SET_I(zero ? -zero * sum : 0);
    }
#ifdef DOT_2X2
    if (T % 2 == 0) add_products_2x2(shape, products, words, at, step, i);
    else
#endif
        add_products(shape, products, words, at, step, i);
    UNROLL for (int v = 0; v < vectors; v++) {
        Floats scales = shape.unpacked ? LOAD((const float *)halves[v])
                                       : scales_at(type, halves[v], words[v], s);
        UNROLL for (int t = 0; t < T; t++) {
            Floats scale = MUL(scales, SET(at.x[t * at.n_blocks].scale));
            sums[v][t] = FMA(FLOATS(products[v][t]), scale, sums[v][t]);
        }
        if (!has_minima(type)) continue;
        Floats minima = shape.unpacked ? LOAD((const float *)halves[v] + TILE)
                                       : minima_at(type, halves[v], words[v], s);
        UNROLL for (int t = 0; t < T; t++) {
            const Block *b = at.x + t * at.n_blocks;
            sums[v][t] = FMA(minima, SET(-b->scale * b->sum), sums[v][t]);
        }
    }
}

// Prefetches the part of a tile that belongs to a step: `share` bytes. Products do not read the
// sub-blocks of a tile of 256 columns in the order of memory, so the processor does not recognise
// a stream.
INLINE void prefetch_share(const uint8_t *tile, size_t share, int step) {
    for (size_t i = 0; i < share; i += 64) __builtin_prefetch(tile + step * share + i);
}

// Multiplies shape.tile_rows rows of tiles with shape.T tokens.
INLINE void block_tiles(const Shape shape, const TileProduct *p) {
    const Type type = shape.type;
    const int width = block_size(type).numbers, steps = steps_of(type), T = shape.T;
    const int vectors = shape.tile_rows * VECTORS;
    const size_t size = tile_bytes(type, shape.unpacked);
    Operands at = {p->tiles, p->cols / width * size, p->x, p->cols / 32};
    const uint8_t *end = at.tile + at.next;
    Floats sums[SUMS][BLOCK_TOKENS];
    UNROLL for (int v = 0; v < vectors; v++) UNROLL for (int t = 0; t < T; t++) sums[v][t] = SET(0);
    for (; at.tile != end; at.tile += size, at.x += width / 32)
        for (int step = 0; step < steps; step++) {
            // each step prefetches its share of the tile after the next
            if (T == 1 && width == 256) prefetch_share(at.tile + 2 * size, size / steps, step);
            UNROLL for (int i = 0; i < subs_of_step(type); i++) {
                add_sub(shape, sums, at, step, i);
                // stops the compiler from sharing values between sub-blocks, which would not fit in
                // registers
                if (T == BLOCK_TOKENS && subs_of_step(type) > 1 && !shape.unpacked)
                    __asm__ volatile("" ::: "memory");
            }
        }
    // tokens are 2 * TILE apart in y, even if there is only one row of tiles: see TileProduct.y
    UNROLL for (int v = 0; v < vectors; v++) UNROLL for (int t = 0; t < T; t++)
        STORE(p->y + t * 2 * TILE + v * LANES, sums[v][t]);
}

// Multiplies all rows of tiles with T tokens.
INLINE void block_rows(Type type, bool unpacked, TileProduct p, const int T) {
    const size_t row = p.cols / block_size(type).numbers * tile_bytes(type, unpacked);
    if (TILE_ROWS == 2 && T == BLOCK_TOKENS && p.groups == 2) {
        block_tiles((Shape){type, unpacked, T, TILE_ROWS}, &p);
        return;
    }
    for (int r = 0; r < p.groups; r++, p.y += TILE, p.tiles += row)
        block_tiles((Shape){type, unpacked, T, 1}, &p);
}

// Returns the product without its first T tokens.
INLINE TileProduct skip_tokens(TileProduct p, const int T) {
    p.T -= T;
    p.y += T * 2 * TILE;
    p.x = (const Block *)p.x + T * (p.cols / 32);
    return p;
}

INLINE void product_of_tokens(Type type, bool unpacked, TileProduct p) {
    for (; p.T >= BLOCK_TOKENS; p = skip_tokens(p, BLOCK_TOKENS))
        block_rows(type, unpacked, p, BLOCK_TOKENS);
    for (; p.T >= 2; p = skip_tokens(p, 2)) block_rows(type, unpacked, p, 2);
    if (p.T) block_rows(type, unpacked, p, 1);
}

INLINE void product_of_blocks(Type type, TileProduct p) {
    bool has_unpacked = block_size(type).numbers == 256 || type == Q8_0;
    if (has_unpacked && p.unpacked) product_of_tokens(type, true, p);
    else product_of_tokens(type, false, p);
}

// Part of simd.h: dot products of one token with rows in the order of the file, which serve until
// the weights are packed, and conversions.

// Has four independent sums, so that an addition does not wait for the one before.
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

#define DOT_FLOATS(name, type) \
    TARGET static float name(const void *w, const void *x, int n) { \
        return dot_floats(type, w, x, n); \
    }
DOT_FLOATS(dot_f32, F32)
DOT_FLOATS(dot_f16, F16)
DOT_FLOATS(dot_bf16, BF16)

// Returns sum + the products of the block at `row` with x.
INLINE Partial add_block(Type type, const uint8_t *row, const Block *x, Partial sum) {
    uint16_t scale;
    memcpy(&scale, row, 2);
    Partial products = type == Q8_0 ? block_q8(row + 2, x) : block_q4(row + 2, x);
    return PARTIAL_FMA(products, PARTIAL_SET(HALF(scale) * x->scale), sum);
}

// For Q8_0 and Q4_0. Has two independent sums.
INLINE float dot_blocks(Type type, const uint8_t *row, const Block *x, int n_blocks) {
    const int size = block_size(type).bytes;
    Partial even = PARTIAL_SET(0), odd = even;
    for (int b = 0; b < n_blocks / 2; b++, row += 2 * size, x += 2) {
        even = add_block(type, row, x, even);
        odd = add_block(type, row + size, x + 1, odd);
    }
    if (n_blocks % 2) even = add_block(type, row, x, even);
    return PARTIAL_SUM(even, odd);
}

// For Q4_1, Q5_0 and Q5_1. A weight is scale * (q - zero_of(type)) + minimum. Only q differs within
// a block, so the zero point and the minimum are multiplied with the sum of the activations
// (`rest`).
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

// For K-quants, whose blocks of 256 are first read into bytes. n_blocks counts the Blocks of x, of
// 32 activations each.
INLINE float dot_numbers(Type type, const uint8_t *row, const Block *x, int n_blocks) {
    const int per = numbers_per_scale(type), zero = zero_of(type);
    Partial sum = PARTIAL_SET(0);
    float rest = 0;
    Numbers n;
    for (const Block *end = x + n_blocks; x < end; row += block_size(type).bytes) {
        read_block(type, &n, row);
        for (int at = 0; at < block_size(type).numbers; at += 32, x++) {
            // the scales of the first and of the last 16 products
            float a = x->scale * n.scale[at / per];
            float b = per == 32 ? a : x->scale * n.scale[at / per + 1];
            sum = add_small(sum, n.q + at, x, a, b);
            if (zero) rest -= zero * (a * x->half + b * (x->sum - x->half));
            if (has_minima(type)) rest -= x->scale * n.min[at / 32] * x->sum;
        }
    }
    return PARTIAL_SUM(sum, PARTIAL_SET(0)) + rest;
}

INLINE void floats_of(Type type, float *out, const void *w, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) STORE(out + i, load(type, w, i));
    if (i < n) store_up_to(out + i, load_tail(type, w, i, n - i), n - i);
}

TARGET static void floats_f16(float *out, const void *w, int n) { floats_of(F16, out, w, n); }
TARGET static void floats_bf16(float *out, const void *w, int n) { floats_of(BF16, out, w, n); }

TARGET static void halves(uint16_t *out, const float *x, int n) {
    for (int i = 0; i < n; i += LANES) {
        uint16_t tail[LANES];
        int left = n - i < LANES ? n - i : LANES;
        STORE_F16(tail, load_up_to(x + i, left));
        memcpy(out + i, tail, left * sizeof *out);
    }
}

TARGET static void quantize(Block *out, const float *x, int n_blocks) {
    enum { N = 32 / LANES }; // vectors of a block
    for (; n_blocks > 0; n_blocks--, x += 32, out++) {
        Floats v[N];
        Ints largest = SET_I(0), sums[2] = {largest, largest}; // of the first and the last 16 q
        // magnitudes are compared as integers, where NaN is larger than infinity and all numbers
        UNROLL for (int i = 0; i < N; i++) {
            v[i] = LOAD(x + i * LANES);
            largest = MAX_I(largest, MAGNITUDE(v[i]));
        }
        int32_t bits = LARGEST_I(largest);
        float max;
        memcpy(&max, &bits, 4);
        Floats inverse = SET(max > 1e-30f ? 127 / max : 0);
        UNROLL for (int i = 0; i < N; i++) {
            // clips, because blocks with NaN or infinity exceed the range of a byte
            Ints q = INTS(MIN(MAX(MUL(v[i], inverse), SET(-127)), SET(127)));
            STORE_8(out->q + i * LANES, q);
            sums[2 * i / N] = ADD_I(sums[2 * i / N], q);
        }
        out->scale = max / 127;
        // adds the lanes of both at once: both = first sum + 65536 * second sum
        int32_t both = SUM_I(ADD_I(sums[0], (Ints)((Words)sums[1] << 16)));
        out->half = (int16_t)both;
        out->sum = (int16_t)(out->half + (both - out->half) / 65536);
    }
}

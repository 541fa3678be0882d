// Part of simd.h: dot product and conversions of rows of numbers.

// Uses four independent sums, so that an addition does not wait for the one before.
TARGET static float dot_f32(const void *row, const void *y, int n) {
    const float *w = row, *x = y;
    Floats a = SET(0), b = a, c = a, d = a;
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        a = FMA(LOAD(w + i), LOAD(x + i), a);
        b = FMA(LOAD(w + i + LANES), LOAD(x + i + LANES), b);
        c = FMA(LOAD(w + i + 2 * LANES), LOAD(x + i + 2 * LANES), c);
        d = FMA(LOAD(w + i + 3 * LANES), LOAD(x + i + 3 * LANES), d);
    }
    for (; i + LANES <= n; i += LANES) a = FMA(LOAD(w + i), LOAD(x + i), a);
    if (i < n) b = FMA(load_tail(F32, w, i, n - i), load_tail(F32, x, i, n - i), b);
    return SUM(ADD(ADD(a, b), ADD(c, d)));
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

// The arithmetic of the CPU in plain C: what is computed, one number after the other. It runs where no vector
// instructions are known, and is what simd.h is tested against. cpu.c includes it.

// Quantised products are sums of products of bytes: the activations are rounded to 8 bits, each 32 with one scale,
// once for all matrices that they are multiplied with.
typedef struct {
    float scale;   // largest magnitude / 127
    int32_t sum;   // of q
    int8_t q[32];  // round(x / scale)
} Block;

// Weights are worked on in tiles of TILE rows, in which what is multiplied together lies together: a vector register holds
// four bytes of each of as many rows as it has room for. A row of tiles is
//   F32:  for each column, TILE floats
//   BF16: for every two columns, (TILE, 2) numbers; what is missing at the end is zero
//   Q8_0: for every 32 columns, TILE half-precision scales, then for every four of the columns (TILE, 4) bytes, each
//         w + offset, where the instruction wants them unsigned
//   Q4_0: the same with 4 groups of (TILE, 4) bytes, in group g low nibbles are columns 4g..4g+3, high ones columns
//         16+4g..16+4g+3, each w + 8
// They are multiplied with activations in Blocks, or in a panel of some tokens: (cols, tokens) floats.
enum { TILE = 16, Q8_TILE = 34 * TILE, Q4_TILE = 18 * TILE };

// What is called for meanwhile, for there is time: at each turn, of two columns, `step` bytes of weights from `at` on; and at each
// turn whose number has no bit of `mask`, a cache line where results will go, of which two lie side by side, `gap` bytes before
// the next two. All of them at once would keep the product from what it reads.
typedef struct { const uint8_t *at; int step; const char *line; int64_t gap; int mask; } Ahead;

static inline void call_for(Ahead *a, int turn) {
    __builtin_prefetch(a->at);
    a->at += a->step;
    if (turn & a->mask) return;
    __builtin_prefetch(a->line, 1);
    a->line += turn & (a->mask + 1) ? 64 + a->gap : 64;
}

// Kernels of one instruction set.
typedef struct {
    const char *name;
    int tokens; // most of a panel; other panels have 1, 2, 4 or 8. Without tiles 1: a panel is a row of the activations
    // Sum of w (n,) x (n,), w in the type of the name
    float (*dot_f32)(const void *w, const float *x, int n);
    float (*dot_f16)(const void *w, const float *x, int n);
    float (*dot_bf16)(const void *w, const float *x, int n);
    // out (n,) = w (n,) as float32
    void (*floats_f16)(float *out, const void *w, int n);
    void (*floats_bf16)(float *out, const void *w, int n);
    void (*halves)(uint16_t *out, const float *x, int n); // x in half precision
    void (*quantize)(Block *out, const float *x, int n_blocks);
    // Sum of a row of blocks, as it is in files, times x (n_blocks,)
    float (*dot_q8)(const uint8_t *row, const Block *x, int n_blocks);
    float (*dot_q4)(const uint8_t *row, const Block *x, int n_blocks);
    // out (n, rows) = in (rows, n) of words of 4 bytes; the rows of `in` lie `stride` bytes apart
    void (*transpose)(uint8_t *out, const uint8_t *in, size_t stride, int rows, int n);
    // From here to tiles_q4: NULL where the kernels have no use for tiles, and take rows as they lie in the file.
    // Makes tiles of TILE rows of n_blocks blocks as they are in files, `stride` bytes apart
    void (*pack_q8)(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks);
    void (*pack_q4)(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks);
    // y (T, 2 TILE) = x times one row of tiles, or two rows of tiles that lie one behind the other. x: a panel
    void (*tiles_f32)(float *y, const uint8_t *tiles, int rows_of_tiles, const float *x, int cols, int T, Ahead ahead);
    void (*tiles_bf16)(float *y, const uint8_t *tiles, int rows_of_tiles, const float *x, int cols, int T, Ahead ahead);
    // The same for x (T, n_blocks) and rows of n_blocks tiles
    void (*tiles_q8)(float *y, const uint8_t *tiles, int rows_of_tiles, const Block *x, int n_blocks, int T);
    void (*tiles_q4)(float *y, const uint8_t *tiles, int rows_of_tiles, const Block *x, int n_blocks, int T);
    // h (n,) = silu(h) * h2
    void (*swiglu)(float *h, const float *h2, int n);
    // x (head_dim,) = x * rotation[0] + (of each pair, the other) * rotation[1]; rotation (2, head_dim)
    void (*rotate)(float *x, const float *rotation, int head_dim);
    float (*largest)(const float *x, int n); // NaN if one is not finite
    // x (n,) = exp((x - most) * scale); returns their sum
    float (*exponentials)(float *x, float most, float scale, int n);
    // out (4, out_stride): products of Q <= 4 queries q (Q, q_stride) with the keys of n positions, in tiles
    // (ceil(n / TILE), head_dim, TILE) of float32 or half precision
    void (*scores)(float *out, size_t out_stride, const float *q, size_t q_stride, int Q, const void *keys, bool half,
                   int head_dim, int n);
    // out (Q, width) = p (Q, p_stride) values (n, width); width is a multiple of TILE
    void (*mix)(float *out, const float *p, size_t p_stride, int Q, const void *values, bool half, int width, int n);
    // Where the machine multiplies BF16 by itself (else NULL): x in BF16; and tiles_bf16 with a panel (ceil(cols / 2), T, 2)
    void (*bf16s)(uint16_t *out, const float *x, int n);
    void (*tiles_bf16_pairs)(float *y, const uint8_t *tiles, int rows_of_tiles, const uint16_t *x, int cols, int T, Ahead ahead);
} Kernels;

static float half_to_float(uint16_t h) {
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

// To the nearest half, ties to even; infinity beyond the largest.
static uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    memcpy(&f, &bits, 4);
    if (bits > 0x7f800000) return sign | 0x7e00; // NaN
    if (f >= 65520) return sign | 0x7c00;
    if (f < 0x1p-14f) { // subnormal: a sum with 0.5 rounds at 2^-24
        f += 0.5f;
        memcpy(&bits, &f, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits >> 13) - (112 << 10));
}

static void floats_f16(float *out, const void *w, int n) {
    for (int i = 0; i < n; i++) out[i] = half_to_float(((const uint16_t *)w)[i]);
}

static void floats_bf16(float *out, const void *w, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)w)[i] << 16;
        memcpy(&out[i], &bits, 4);
    }
}

static void halves(uint16_t *out, const float *x, int n) {
    for (int i = 0; i < n; i++) out[i] = float_to_half(x[i]);
}

// Eight sums side by side, so that an addition need not wait for the one before, and a compiler may make vectors of them.
static float dot_f32(const void *w, const float *x, int n) {
    float sums[8] = {0}, sum = 0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += ((const float *)w)[i + j] * x[i + j];
    for (int j = 0; j < 8; j++) sum += sums[j];
    for (; i < n; i++) sum += ((const float *)w)[i] * x[i];
    return sum;
}

// Part by part as floats.
static float dot_halves(void (*floats)(float *, const void *, int), const uint16_t *w, const float *x, int n) {
    float part[64], sum = 0;
    for (int i = 0; i < n; i += 64) {
        int m = n - i < 64 ? n - i : 64;
        floats(part, w + i, m);
        sum += dot_f32(part, x + i, m);
    }
    return sum;
}

static float dot_f16(const void *w, const float *x, int n) { return dot_halves(floats_f16, w, x, n); }

static float dot_bf16(const void *w, const float *x, int n) { return dot_halves(floats_bf16, w, x, n); }

// What is not finite stays so in the scale: magnitudes are compared as bits, in which order NaN is the largest.
static void quantize(Block *out, const float *x, int n_blocks) {
    for (; n_blocks > 0; n_blocks--, x += 32, out++) {
        uint32_t largest = 0, bits;
        for (int i = 0; i < 32; i++) {
            memcpy(&bits, &x[i], 4);
            bits &= 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
        float most, rounded;
        memcpy(&most, &largest, 4);
        float inverse = most > 1e-30f ? 127 / most : 0;
        int32_t sum = 0;
        for (int i = 0; i < 32; i++) {
            rounded = x[i] * inverse + 0x1.8p23f; // so large that the last bits of the mantissa are the whole number
            memcpy(&bits, &rounded, 4);
            out->q[i] = (int8_t)bits;
            sum += (int8_t)bits;
        }
        out->scale = most / 127;
        out->sum = sum;
    }
}

static float dot_q8(const uint8_t *row, const Block *x, int n_blocks) {
    float sum = 0;
    for (; n_blocks > 0; n_blocks--, row += 34, x++) {
        int32_t product = 0;
        uint16_t scale;
        memcpy(&scale, row, 2);
        for (int c = 0; c < 32; c++) product += (int8_t)row[2 + c] * x->q[c];
        sum += half_to_float(scale) * x->scale * product;
    }
    return sum;
}

static float dot_q4(const uint8_t *row, const Block *x, int n_blocks) {
    float sum = 0;
    for (; n_blocks > 0; n_blocks--, row += 18, x++) {
        int32_t product = -8 * x->sum;
        uint16_t scale;
        memcpy(&scale, row, 2);
        for (int c = 0; c < 16; c++) product += (row[2 + c] & 15) * x->q[c] + (row[2 + c] >> 4) * x->q[16 + c];
        sum += half_to_float(scale) * x->scale * product;
    }
    return sum;
}

static void transpose(uint8_t *out, const uint8_t *in, size_t stride, int rows, int n) {
    for (int i = 0; i < n; i++)
        for (int r = 0; r < rows; r++) memcpy(out + 4 * ((size_t)i * rows + r), in + r * stride + 4 * i, 4);
}

static void swiglu(float *h, const float *h2, int n) {
    for (int i = 0; i < n; i++) h[i] = h[i] / (1.0f + expf(-h[i])) * h2[i];
}

static void rotate(float *x, const float *rotation, int head_dim) {
    for (int i = 0; i < head_dim; i += 2) {
        float a = x[i], b = x[i + 1];
        x[i] = a * rotation[i] + b * rotation[head_dim + i];
        x[i + 1] = b * rotation[i + 1] + a * rotation[head_dim + i + 1];
    }
}

static float largest(const float *x, int n) {
    float most = -INFINITY, poison = 0; // 0 times what is not finite is NaN
    for (int i = 0; i < n; i++) most = x[i] > most ? x[i] : most, poison += 0 * x[i];
    return most + poison;
}

static float exponentials(float *x, float most, float scale, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] = expf((x[i] - most) * scale);
    return sum;
}

static void scores(float *out, size_t out_stride, const float *q, size_t q_stride, int Q, const void *keys, bool half,
                   int head_dim, int n) {
    for (int query = 0; query < Q; query++)
        for (int i = 0; i < n; i++) {
            float sum = 0;
            for (int d = 0; d < head_dim; d++) {
                size_t at = (size_t)i / TILE * TILE * head_dim + d * TILE + i % TILE;
                float key = half ? half_to_float(((const uint16_t *)keys)[at]) : ((const float *)keys)[at];
                sum += q[query * q_stride + d] * key;
            }
            out[query * out_stride + i] = sum;
        }
}

static void mix(float *out, const float *p, size_t p_stride, int Q, const void *values, bool half, int width, int n) {
    for (int query = 0; query < Q; query++)
        for (int d = 0; d < width; d++) {
            float sum = 0;
            for (int i = 0; i < n; i++) {
                size_t at = (size_t)i * width + d;
                float value = half ? half_to_float(((const uint16_t *)values)[at]) : ((const float *)values)[at];
                sum += p[query * p_stride + i] * value;
            }
            out[query * width + d] = sum;
        }
}

static const Kernels kernels_scalar = {
    "scalar", 1, dot_f32, dot_f16, dot_bf16, floats_f16, floats_bf16, halves, quantize, dot_q8, dot_q4, transpose,
    NULL, NULL, NULL, NULL, NULL, NULL, swiglu, rotate, largest, exponentials, scores, mix, NULL, NULL,
};

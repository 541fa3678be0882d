// The arithmetic of the CPU in plain C: what is computed, one number after the other. It runs where no vector
// instructions are known, and is what kernels_simd.h is tested against. kernels_cpu.c includes it.

// Quantised products are sums of products of bytes: the activations are rounded to 8 bits, each 32 with one scale,
// once for all matrices that they are multiplied with.
typedef struct {
    float scale;   // largest magnitude / 127
    int32_t sum;   // of q
    int8_t q[32];  // round(x / scale)
} Block;

// Quantised weights are worked on in tiles of TILE rows and 32 columns: TILE half-precision scales, then the numbers
// of four columns after those of the four before, inside them row by row, so that a vector register holds four columns
// of as many rows as it has room for:
//   Q8_0: 8 groups of (TILE, 4) bytes, each w + offset, where the instruction wants them unsigned
//   Q4_0: 4 groups of (TILE, 4) bytes, low nibbles are columns 4g..4g+3, high ones columns 16+4g..16+4g+3, each w + 8
enum { TILE = 16, Q8_TILE = 34 * TILE, Q4_TILE = 18 * TILE };

// Kernels of one instruction set.
typedef struct {
    const char *name;
    // Sum of w (n,) x (n,), w in the type of the name
    float (*dot_f32)(const void *w, const float *x, int n);
    float (*dot_f16)(const void *w, const float *x, int n);
    float (*dot_bf16)(const void *w, const float *x, int n);
    // out (n,) = w (n,) as float32
    void (*floats_f16)(float *out, const void *w, int n);
    void (*floats_bf16)(float *out, const void *w, int n);
    void (*halves)(uint16_t *out, const float *x, int n); // x in half precision
    // y (T, rows) += x (T, n) w (rows, n)^T; the rows of x lie x_stride numbers apart, those of y and w y_stride, w_stride
    void (*products)(float *y, size_t y_stride, const float *w, size_t w_stride, int rows, const float *x,
                     size_t x_stride, int n, int T);
    void (*quantize)(Block *out, const float *x, int n_blocks);
    // Sum of a row of blocks, as it is in files, times x (n_blocks,)
    float (*dot_q8)(const uint8_t *row, const Block *x, int n_blocks);
    float (*dot_q4)(const uint8_t *row, const Block *x, int n_blocks);
    // Makes n_blocks tiles of TILE rows of blocks as they are in files, `stride` bytes apart
    void (*pack_q8)(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks);
    void (*pack_q4)(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks);
    // y (T, TILE) = x (T, n_blocks) times a row of tiles (n_blocks,)
    void (*tiles_q8)(float *y, const uint8_t *tiles, const Block *x, int n_blocks, int T);
    void (*tiles_q4)(float *y, const uint8_t *tiles, const Block *x, int n_blocks, int T);
    // h (n,) = silu(h) * h2
    void (*swiglu)(float *h, const float *h2, int n);
    float (*largest)(const float *x, int n);
    // x (n,) = exp((x - most) * scale); returns their sum
    float (*exponentials)(float *x, float most, float scale, int n);
    // out (4, out_stride): products of Q <= 4 queries q (Q, q_stride) with the keys of n positions, in tiles
    // (ceil(n / TILE), head_dim, TILE) of float32 or half precision
    void (*scores)(float *out, size_t out_stride, const float *q, size_t q_stride, int Q, const void *keys, bool half,
                   int head_dim, int n);
    // out (Q, width) = p (Q, p_stride) values (n, width); width is a multiple of TILE
    void (*mix)(float *out, const float *p, size_t p_stride, int Q, const void *values, bool half, int width, int n);
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

static float dot_f32(const void *w, const float *x, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += ((const float *)w)[i] * x[i];
    return sum;
}

static float dot_f16(const void *w, const float *x, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += half_to_float(((const uint16_t *)w)[i]) * x[i];
    return sum;
}

static float dot_bf16(const void *w, const float *x, int n) {
    float sum = 0, f;
    for (int i = 0; i < n; i++) {
        floats_bf16(&f, (const uint16_t *)w + i, 1);
        sum += f * x[i];
    }
    return sum;
}

static void products(float *y, size_t y_stride, const float *w, size_t w_stride, int rows, const float *x,
                     size_t x_stride, int n, int T) {
    for (int t = 0; t < T; t++)
        for (int r = 0; r < rows; r++) y[t * y_stride + r] += dot_f32(w + r * w_stride, x + t * x_stride, n);
}

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

static void pack_q8(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks) {
    for (int b = 0; b < n_blocks; b++, rows += 34, tiles += Q8_TILE)
        for (int i = 0; i < TILE; i++) {
            memcpy(tiles + 2 * i, rows + i * stride, 2);
            for (int g = 0; g < 8; g++) memcpy(tiles + 2 * TILE + 4 * (g * TILE + i), rows + i * stride + 2 + 4 * g, 4);
        }
}

static void pack_q4(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks) {
    for (int b = 0; b < n_blocks; b++, rows += 18, tiles += Q4_TILE)
        for (int i = 0; i < TILE; i++) {
            memcpy(tiles + 2 * i, rows + i * stride, 2);
            for (int g = 0; g < 4; g++) memcpy(tiles + 2 * TILE + 4 * (g * TILE + i), rows + i * stride + 2 + 4 * g, 4);
        }
}

static void tiles_q8(float *y, const uint8_t *tiles, const Block *x, int n_blocks, int T) {
    for (int t = 0; t < T; t++)
        for (int r = 0; r < TILE; r++) {
            float sum = 0;
            for (int b = 0; b < n_blocks; b++) {
                const uint8_t *tile = tiles + (size_t)b * Q8_TILE;
                const Block *block = &x[(size_t)t * n_blocks + b];
                int32_t product = 0;
                uint16_t scale;
                memcpy(&scale, tile + 2 * r, 2);
                for (int c = 0; c < 32; c++)
                    product += (int8_t)tile[2 * TILE + c / 4 * 4 * TILE + 4 * r + c % 4] * block->q[c];
                sum += half_to_float(scale) * block->scale * product;
            }
            y[t * TILE + r] = sum;
        }
}

static void tiles_q4(float *y, const uint8_t *tiles, const Block *x, int n_blocks, int T) {
    for (int t = 0; t < T; t++)
        for (int r = 0; r < TILE; r++) {
            float sum = 0;
            for (int b = 0; b < n_blocks; b++) {
                const uint8_t *tile = tiles + (size_t)b * Q4_TILE;
                const Block *block = &x[(size_t)t * n_blocks + b];
                int32_t product = -8 * block->sum;
                uint16_t scale;
                memcpy(&scale, tile + 2 * r, 2);
                for (int c = 0; c < 16; c++) {
                    uint8_t nibbles = tile[2 * TILE + c / 4 * 4 * TILE + 4 * r + c % 4];
                    product += (nibbles & 15) * block->q[c] + (nibbles >> 4) * block->q[16 + c];
                }
                sum += half_to_float(scale) * block->scale * product;
            }
            y[t * TILE + r] = sum;
        }
}

static void swiglu(float *h, const float *h2, int n) {
    for (int i = 0; i < n; i++) h[i] = h[i] / (1.0f + expf(-h[i])) * h2[i];
}

static float largest(const float *x, int n) {
    float most = x[0];
    for (int i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
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
    "scalar", dot_f32, dot_f16, dot_bf16, floats_f16, floats_bf16, halves, products, quantize, dot_q8,
    dot_q4, pack_q8, pack_q4, tiles_q8, tiles_q4, swiglu, largest,
    exponentials, scores, mix,
};

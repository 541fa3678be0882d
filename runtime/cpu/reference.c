// Each kernel in plain C, without intrinsics. kernels.h describes what each computes.
#include <math.h>
#include "blocks.h"

// Returns the nearest half, ties to even; infinity if f rounds to more than the largest half,
// 65504.
static uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    memcpy(&f, &bits, 4);
    if (bits > 0x7f800000) return sign | 0x7e00; // NaN
    if (f >= 65520) return sign | 0x7c00;
    // Subnormal halves are the multiples of 2^-24. Floats from 0.5 to 1 are 2^-24 apart, so adding
    // 0.5 rounds f to such a multiple, and the mantissa of the result counts the 2^-24s.
    if (f < 0x1p-14f) {
        f += 0.5f;
        memcpy(&bits, &f, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    // rounds away 13 bits of the mantissa, and reduces the bias of the exponent from 127 to 15
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

// Uses eight independent sums, so that an addition does not wait for the one before, and the
// compiler can use vectors.
static float dot_f32(const void *row, const void *x, int n) {
    const float *w = row, *y = x;
    float sums[8] = {0}, sum = 0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += w[i + j] * y[i + j];
    for (int j = 0; j < 8; j++) sum += sums[j];
    for (; i < n; i++) sum += w[i] * y[i];
    return sum;
}

// Returns the dot product of F16 or BF16. `floats` converts 64 weights at a time.
static float dot_halves(void (*floats)(float *, const void *, int), const uint16_t *w,
                        const float *x, int n) {
    float part[64], sum = 0;
    for (int i = 0; i < n; i += 64) {
        int m = n - i < 64 ? n - i : 64;
        floats(part, w + i, m);
        sum += dot_f32(part, x + i, m);
    }
    return sum;
}

static float dot_f16(const void *row, const void *x, int n) {
    return dot_halves(floats_f16, row, x, n);
}

static float dot_bf16(const void *row, const void *x, int n) {
    return dot_halves(floats_bf16, row, x, n);
}

// Compares magnitudes as integers, where NaN is larger than infinity and all numbers. So a block
// with NaN or infinity gets a scale that is not finite.
static void quantize(Block *out, const float *x, int n_blocks) {
    for (; n_blocks > 0; n_blocks--, x += 32, out++) {
        uint32_t largest = 0, bits;
        for (int i = 0; i < 32; i++) {
            memcpy(&bits, &x[i], 4);
            bits &= 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
        float max, rounded;
        memcpy(&max, &largest, 4);
        float inverse = max > 1e-30f ? 127 / max : 0;
        int32_t sum = 0;
        for (int i = 0; i < 32; i++) {
            // floats near 1.5 * 2^23 have no fraction: the addition rounds to an integer and leaves
            // it in the lowest bits of the float
            rounded = x[i] * inverse + 0x1.8p23f;
            memcpy(&bits, &rounded, 4);
            out->q[i] = (int8_t)bits;
            sum += (int8_t)bits;
            if (i == 15) out->half = (int16_t)sum; // sum of the first 16
        }
        out->scale = max / 127;
        out->sum = (int16_t)sum;
    }
}

static float dot_q8(const void *row, const void *x, int cols) {
    const uint8_t *w = row;
    float sum = 0;
    for (const Block *b = x, *end = b + cols / 32; b < end; b++, w += 34) {
        int32_t product = 0;
        uint16_t scale;
        memcpy(&scale, w, 2);
        for (int c = 0; c < 32; c++) product += (int8_t)w[2 + c] * b->q[c];
        sum += half_to_float(scale) * b->scale * product;
    }
    return sum;
}

static float dot_q4(const void *row, const void *x, int cols) {
    const uint8_t *w = row;
    float sum = 0;
    for (const Block *b = x, *end = b + cols / 32; b < end; b++, w += 18) {
        int32_t product = -8 * b->sum;
        uint16_t scale;
        memcpy(&scale, w, 2);
        for (int c = 0; c < 16; c++)
            product += (w[2 + c] & 15) * b->q[c] + (w[2 + c] >> 4) * b->q[16 + c];
        sum += half_to_float(scale) * b->scale * product;
    }
    return sum;
}

// Returns the dot product of x and weights at..at+31 of a block.
static float dot_32(Type type, const Numbers *n, int at, const Block *x) {
    float sum = 0;
    for (int c = 0, per = numbers_per_scale(type); c < 32; c += per) {
        int32_t product = 0;
        for (int i = c; i < c + per; i++) product += (n->q[at + i] - zero_of(type)) * x->q[i];
        sum += n->scale[(at + c) / per] * product;
    }
    // a weight is scale * (q - zero) - min, so min times the sum of x is subtracted
    return x->scale * (has_minima(type) ? sum - n->min[at / 32] * x->sum : sum);
}

ALWAYS float dot_blocks(Type type, const uint8_t *row, const Block *x, int cols) {
    const int width = block_size(type).numbers;
    float sum = 0;
    Numbers n;
    for (const Block *end = x + cols / 32; x < end; row += block_size(type).bytes) {
        read_block(type, &n, row);
        for (int at = 0; at < width; at += 32) sum += dot_32(type, &n, at, x++);
    }
    return sum;
}

#define DOT_BLOCKS(name, type) \
    static float name(const void *row, const void *x, int cols) { \
        return dot_blocks(type, row, x, cols); \
    }
DOT_BLOCKS(dot_q4_1, Q4_1)
DOT_BLOCKS(dot_q5_0, Q5_0)
DOT_BLOCKS(dot_q5_1, Q5_1)
DOT_BLOCKS(dot_q4_k, Q4_K)
DOT_BLOCKS(dot_q5_k, Q5_K)
DOT_BLOCKS(dot_q6_k, Q6_K)

// out (n, rows) = in (rows, n) of words of 4 bytes; the rows of `in` are `stride` bytes apart.
static void transpose(uint8_t *out, const uint8_t *in, size_t stride, int rows, int n) {
    for (int i = 0; i < n; i++)
        for (int r = 0; r < rows; r++)
            memcpy(out + 4 * ((size_t)i * rows + r), in + r * stride + 4 * i, 4);
}

static void swiglu(float *h, const float *h2, int n) {
    for (int i = 0; i < n; i++) h[i] = h[i] / (1.0f + expf(-h[i])) * h2[i];
}

// `rotation` is (2, head_dim): cosines, then signed sines.
static void rotate(float *x, const float *rotation, int head_dim) {
    for (int i = 0; i < head_dim; i += 2) {
        float a = x[i], b = x[i + 1];
        x[i] = a * rotation[i] + b * rotation[head_dim + i];
        x[i + 1] = b * rotation[i + 1] + a * rotation[head_dim + i + 1];
    }
}

static void rotate_halves(float *x, const float *rotation, int head_dim) {
    for (int i = 0, j = head_dim / 2; j < head_dim; i++, j++) {
        float a = x[i], b = x[j];
        x[i] = a * rotation[i] + b * rotation[head_dim + i];
        x[j] = b * rotation[j] + a * rotation[head_dim + j];
    }
}

static float largest(const float *x, int n) {
    float max = -INFINITY, poison = 0; // 0 times NaN or infinity is NaN
    for (int i = 0; i < n; i++) {
        max = x[i] > max ? x[i] : max;
        poison += 0 * x[i];
    }
    return max + poison;
}

static float exponentials(float *x, float max, float scale, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] = expf((x[i] - max) * scale);
    return sum;
}

static void multiply(float *x, const float *y, int n) {
    for (int i = 0; i < n; i++) x[i] *= y[i];
}

// Returns element i of x as float. The caller of the kernel applies the scales of INT8_GROUPS.
static float number(Type type, const void *x, size_t i) {
    if (type == INT8_GROUPS) return ((const int8_t *)x)[i];
    return type == F16 ? half_to_float(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

static void scores(const Attention *a) {
    for (int query = 0; query < a->n_queries; query++)
        for (int i = 0; i < a->n; i++) {
            float sum = 0;
            for (int d = 0; d < a->head_dim; d++) {
                // keys are (tiles, head_dim, TILE), with TILE positions in a tile
                size_t at = (size_t)i / TILE * TILE * a->head_dim + d * TILE + i % TILE;
                sum += a->q[query * a->q_stride + d] * number(a->type, a->keys, at);
            }
            a->p[query * a->p_stride + i] = sum;
        }
}

static void mix(const Attention *a) {
    for (int query = 0; query < a->n_queries; query++)
        for (int d = 0; d < a->width; d++) {
            float sum = a->add ? a->out[query * a->width + d] : 0;
            for (int i = 0; i < a->n; i++)
                sum += a->p[query * a->p_stride + i]
                       * number(a->type, a->values, (size_t)i * a->width + d);
            a->out[query * a->width + d] = sum;
        }
}

static void panel_product(const PanelProduct *p) {
    for (int row = 0; row < p->tiles * TILE; row++) {
        size_t at = row / TILE * p->tile_stride + row % TILE;
        float sum = p->add ? p->y[row] : 0;
        for (int c = 0; c < p->cols; c++)
            sum += number(p->type, p->w, at + c * p->column_stride) * p->x[c];
        p->y[row] = sum;
    }
}

static bool always(void) { return true; }

const Kernels llamac_reference = {
    .name = "scalar",
    .supported = always,
    .tokens = 1,        // no tiles: weights are multiplied by `dot`
    .panel_queries = 1, // `scores` and `mix` take up to QUERIES
    .types = {[F32] = {.dot = dot_f32},
              [F16] = {.dot = dot_f16},
              [BF16] = {.dot = dot_bf16},
              [Q8_0] = {.dot = dot_q8},
              [Q4_0] = {.dot = dot_q4},
              [Q4_1] = {.dot = dot_q4_1},
              [Q5_0] = {.dot = dot_q5_0},
              [Q5_1] = {.dot = dot_q5_1},
              [Q4_K] = {.dot = dot_q4_k},
              [Q5_K] = {.dot = dot_q5_k},
              [Q6_K] = {.dot = dot_q6_k}},
    .floats_f16 = floats_f16,
    .floats_bf16 = floats_bf16,
    .halves = halves,
    .quantize = quantize,
    .transpose = transpose,
    .swiglu = swiglu,
    .rotate = rotate,
    .rotate_halves = rotate_halves,
    .largest = largest,
    .exponentials = exponentials,
    .multiply = multiply,
    .scores = scores,
    .mix = mix,
    .panel_product = panel_product,
};

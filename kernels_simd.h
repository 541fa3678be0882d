// The arithmetic of kernels_scalar.h in vectors, written once and included for each instruction set with these defined:
//   NAME(x)              x with the set's name
//   TARGET               attribute of functions that use the set
//   N, V, I              lanes of a vector; vectors of N floats, and of N int32 or 4 N bytes
//   TOKENS               how many tokens `products` works on at once: 4 * TOKENS sums, TOKENS vectors and one more fit
//   LOAD, LOAD_F16, LOAD_BF16, STORE, STORE_F16, SET, ADD, MUL, DIV, MAX, MIN, FMA (a * b + c), SUM (of the lanes), ROUND
//                        MAX and MIN give the second operand when one is NaN
//   POW2(n)              2^n for whole n from -126 to 127
//   LOAD_I, SET_I, FLOATS (of int32)
//   DOT(c, w, x)         c + the products of each lane's four bytes; w unsigned if Q8_OFFSET is 128, else signed
//   DOT_SMALL(c, w, x)   the same for w from 0 to 15
//   AND_15, SHIFT_4      of bytes: w & 15; w >> 4, where the bits above the low four are cleared
//   ADD_SUMS(y, a, b, c, d)  adds the sums of four vectors' lanes to y (4,)
//   Q8_OFFSET            what is added to the bytes in Q8_0's tiles
//   S, S_SET, S_FMA, S_SUM(a, b), HALF: floats that the products of a block's 32 bytes are summed in; a half as float
//   block_q8(q, x), block_q4(q, x): S with the products of one block's numbers with the activations in Block x
//   Q, LOAD_Q, STORE_Q, SET_Q, XOR_Q, LOW_32(a, b) = a0 b0 a1 b1, HIGH_32 = a2 b2 a3 b3: vectors of four int32

#if defined(__x86_64__) // the same in all of its sets
#define Q __m128i
#define LOAD_Q(p) _mm_loadu_si128((const __m128i *)(p))
#define STORE_Q(p, v) _mm_storeu_si128((__m128i *)(p), v)
#define SET_Q(x) _mm_set1_epi32((int)(x))
#define XOR_Q(a, b) _mm_xor_si128(a, b)
#define LOW_32(a, b) _mm_unpacklo_epi32(a, b)
#define HIGH_32(a, b) _mm_unpackhi_epi32(a, b)
#define S __m256
#define S_SET(x) _mm256_set1_ps(x)
#define S_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define S_SUM(a, b) sum_avx2(_mm256_add_ps(a, b))
#define HALF(h) _cvtsh_ss(h)
#endif

#define INLINE TARGET __attribute__((always_inline)) static inline
#define VECTORS (TILE / N) // that TILE lanes take
#ifdef __clang__ // so that arrays of vectors become registers
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// Vector i.. of a row of the type, and the same of its last `left` < N numbers, with zeros behind them.
INLINE V NAME(load)(Type type, const void *w, size_t i) {
    if (type == F16) return LOAD_F16((const uint16_t *)w + i);
    if (type == BF16) return LOAD_BF16((const uint16_t *)w + i);
    return LOAD((const float *)w + i);
}

INLINE V NAME(load_tail)(Type type, const void *w, size_t i, int left) {
    float tail[N] = {0}; // room for either type
    size_t size = type == F32 ? 4 : 2;
    memcpy(tail, (const char *)w + i * size, left * size);
    return NAME(load)(type, tail, 0);
}

// Four sums side by side, so that an addition need not wait for the one before.
INLINE float NAME(dot)(Type type, const void *w, const float *x, int n) {
    V a = SET(0), b = a, c = a, d = a;
    int i = 0;
    for (; i + 4 * N <= n; i += 4 * N) {
        a = FMA(NAME(load)(type, w, i), LOAD(x + i), a);
        b = FMA(NAME(load)(type, w, i + N), LOAD(x + i + N), b);
        c = FMA(NAME(load)(type, w, i + 2 * N), LOAD(x + i + 2 * N), c);
        d = FMA(NAME(load)(type, w, i + 3 * N), LOAD(x + i + 3 * N), d);
    }
    for (; i + N <= n; i += N) a = FMA(NAME(load)(type, w, i), LOAD(x + i), a);
    if (i < n) b = FMA(NAME(load_tail)(type, w, i, n - i), NAME(load_tail)(F32, x, i, n - i), b);
    return SUM(ADD(ADD(a, b), ADD(c, d)));
}

TARGET static float NAME(dot_f32)(const void *w, const float *x, int n) { return NAME(dot)(F32, w, x, n); }
TARGET static float NAME(dot_f16)(const void *w, const float *x, int n) { return NAME(dot)(F16, w, x, n); }
TARGET static float NAME(dot_bf16)(const void *w, const float *x, int n) { return NAME(dot)(BF16, w, x, n); }

INLINE void NAME(floats)(Type type, float *out, const void *w, int n) {
    int i = 0;
    for (; i + N <= n; i += N) STORE(out + i, NAME(load)(type, w, i));
    if (i == n) return;
    float tail[N];
    STORE(tail, NAME(load_tail)(type, w, i, n - i));
    memcpy(out + i, tail, (n - i) * sizeof(float));
}

TARGET static void NAME(floats_f16)(float *out, const void *w, int n) { NAME(floats)(F16, out, w, n); }
TARGET static void NAME(floats_bf16)(float *out, const void *w, int n) { NAME(floats)(BF16, out, w, n); }

TARGET static void NAME(halves)(uint16_t *out, const float *x, int n) {
    for (int i = 0; i < n; i += N) {
        uint16_t tail[N];
        int left = n - i < N ? n - i : N;
        STORE_F16(tail, left < N ? NAME(load_tail)(F32, x, i, left) : LOAD(x + i));
        memcpy(out + i, tail, left * sizeof *out);
    }
}

// y (T, R) += x (T, n) w (R, n)^T, R 4 or 1: R * T sums stay in registers, R + T loads feed R * T multiplications.
INLINE void NAME(product_tile)(float *y, size_t y_stride, const float *w, size_t w_stride, const float *x,
                               size_t x_stride, int n, const int R, const int T) {
    V sum[4][TOKENS], xs[TOKENS];
    UNROLL for (int r = 0; r < 4; r++)
        UNROLL for (int t = 0; t < T; t++) sum[r][t] = SET(0);
    int i = 0;
    for (; i + N <= n; i += N) {
        UNROLL for (int t = 0; t < T; t++) xs[t] = LOAD(x + t * x_stride + i);
        UNROLL for (int r = 0; r < R; r++) {
            V ws = LOAD(w + r * w_stride + i);
            UNROLL for (int t = 0; t < T; t++) sum[r][t] = FMA(ws, xs[t], sum[r][t]);
        }
    }
    if (i < n) {
        UNROLL for (int t = 0; t < T; t++) xs[t] = NAME(load_tail)(F32, x + t * x_stride, i, n - i);
        UNROLL for (int r = 0; r < R; r++) {
            V ws = NAME(load_tail)(F32, w + r * w_stride, i, n - i);
            UNROLL for (int t = 0; t < T; t++) sum[r][t] = FMA(ws, xs[t], sum[r][t]);
        }
    }
    UNROLL for (int t = 0; t < T; t++)
        if (R == 4) ADD_SUMS(y + t * y_stride, sum[0][t], sum[1][t], sum[2][t], sum[3][t]);
        else y[t * y_stride] += SUM(sum[0][t]);
}

// Up to TOKENS tokens with all rows, which pass by while the tokens stay in the nearest cache.
INLINE void NAME(product_rows)(float *y, size_t y_stride, const float *w, size_t w_stride, int rows, const float *x,
                               size_t x_stride, int n, const int T) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) NAME(product_tile)(y + r, y_stride, w + r * w_stride, w_stride, x, x_stride, n, 4, T);
    for (; r < rows; r++) NAME(product_tile)(y + r, y_stride, w + r * w_stride, w_stride, x, x_stride, n, 1, T);
}

TARGET static void NAME(products)(float *y, size_t y_stride, const float *w, size_t w_stride, int rows, const float *x,
                                  size_t x_stride, int n, int T) {
    for (; T >= TOKENS; T -= TOKENS, x += TOKENS * x_stride, y += TOKENS * y_stride)
        NAME(product_rows)(y, y_stride, w, w_stride, rows, x, x_stride, n, TOKENS);
    for (; T >= 2; T -= 2, x += 2 * x_stride, y += 2 * y_stride)
        NAME(product_rows)(y, y_stride, w, w_stride, rows, x, x_stride, n, 2);
    if (T) NAME(product_rows)(y, y_stride, w, w_stride, rows, x, x_stride, n, 1);
}

// The scalar loops, which the compiler turns into this set's vectors.
TARGET static void NAME(quantize)(Block *out, const float *x, int n_blocks) {
    for (; n_blocks > 0; n_blocks--, x += 32, out++) {
        uint32_t bits[32], largest = 0;
        memcpy(bits, x, sizeof bits);
        for (int i = 0; i < 32; i++) {
            uint32_t magnitude = bits[i] & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        float most, rounded[32];
        memcpy(&most, &largest, 4);
        float inverse = most > 1e-30f ? 127 / most : 0;
        for (int i = 0; i < 32; i++) rounded[i] = x[i] * inverse + 0x1.8p23f;
        memcpy(bits, rounded, sizeof bits);
        int32_t sum = 0;
        for (int i = 0; i < 32; i++) sum += (int8_t)bits[i];
        for (int i = 0; i < 32; i++) out->q[i] = (int8_t)bits[i];
        out->scale = most / 127;
        out->sum = sum;
    }
}

// Writes four rows of 16 bytes, stride apart, to a tile: the transpose of a 4 by 4 matrix of four bytes each.
INLINE void NAME(pack_square)(uint8_t *tile, const uint8_t *rows, size_t stride, Q offset) {
    Q a = LOAD_Q(rows), b = LOAD_Q(rows + stride), c = LOAD_Q(rows + 2 * stride), d = LOAD_Q(rows + 3 * stride);
    Q ac = LOW_32(a, c), bd = LOW_32(b, d), ac2 = HIGH_32(a, c), bd2 = HIGH_32(b, d);
    STORE_Q(tile, XOR_Q(LOW_32(ac, bd), offset));
    STORE_Q(tile + 4 * TILE, XOR_Q(HIGH_32(ac, bd), offset));
    STORE_Q(tile + 8 * TILE, XOR_Q(LOW_32(ac2, bd2), offset));
    STORE_Q(tile + 12 * TILE, XOR_Q(HIGH_32(ac2, bd2), offset));
}

INLINE void NAME(pack)(Type type, uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks) {
    const size_t size = type == Q8_0 ? 34 : 18;
    Q offset = SET_Q(type == Q8_0 && Q8_OFFSET ? 0x80808080 : 0);
    for (int b = 0; b < n_blocks; b++, rows += size, tiles += size * TILE) {
        for (int i = 0; i < TILE; i++) memcpy(tiles + 2 * i, rows + i * stride, 2);
        for (int i = 0; i < TILE; i += 4) {
            NAME(pack_square)(tiles + 2 * TILE + 4 * i, rows + i * stride + 2, stride, offset);
            if (type == Q8_0) NAME(pack_square)(tiles + 18 * TILE + 4 * i, rows + i * stride + 18, stride, offset);
        }
    }
}

TARGET static void NAME(pack_q8)(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks) {
    NAME(pack)(Q8_0, tiles, rows, stride, n_blocks);
}

TARGET static void NAME(pack_q4)(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks) {
    NAME(pack)(Q4_0, tiles, rows, stride, n_blocks);
}

// Products of the block at `row` with x, added to the sum.
INLINE S NAME(add_block)(Type type, const uint8_t *row, const Block *x, S sum) {
    uint16_t scale;
    memcpy(&scale, row, 2);
    S products = type == Q8_0 ? NAME(block_q8)(row + 2, x) : NAME(block_q4)(row + 2, x);
    return S_FMA(products, S_SET(HALF(scale) * x->scale), sum);
}

// One row, as it is in the file, with one token: two sums side by side.
INLINE float NAME(dot_blocks)(Type type, const uint8_t *row, const Block *x, int n_blocks) {
    const int size = type == Q8_0 ? 34 : 18;
    S even = S_SET(0), odd = even;
    for (int b = 0; b < n_blocks / 2; b++, row += 2 * size, x += 2) {
        even = NAME(add_block)(type, row, x, even);
        odd = NAME(add_block)(type, row + size, x + 1, odd);
    }
    if (n_blocks % 2) even = NAME(add_block)(type, row, x, even);
    return S_SUM(even, odd);
}

TARGET static float NAME(dot_q8)(const uint8_t *row, const Block *x, int n_blocks) {
    return NAME(dot_blocks)(Q8_0, row, x, n_blocks);
}

TARGET static float NAME(dot_q4)(const uint8_t *row, const Block *x, int n_blocks) {
    return NAME(dot_blocks)(Q4_0, row, x, n_blocks);
}

INLINE I NAME(four_bytes)(const int8_t *q) {
    int32_t bytes;
    memcpy(&bytes, q, 4);
    return SET_I(bytes);
}

// T tokens with one row of tiles: the sums of TILE rows stand side by side in the lanes.
INLINE void NAME(tile)(Type type, float *y, const uint8_t *tiles, const Block *x, int n_blocks, const int T) {
    V sums[8][VECTORS];
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int v = 0; v < VECTORS; v++) sums[t][v] = SET(0);
    for (int b = 0; b < n_blocks; b++, tiles += type == Q8_0 ? Q8_TILE : Q4_TILE) {
        const uint8_t *numbers = tiles + 2 * TILE;
        UNROLL for (int v = 0; v < VECTORS; v++) {
            I products[8];
            UNROLL for (int t = 0; t < T; t++)
                products[t] = SET_I((type == Q8_0 ? -Q8_OFFSET : -8) * x[(size_t)t * n_blocks + b].sum);
            for (int g = 0; g < (type == Q8_0 ? 8 : 4); g++) {
                I w = LOAD_I(numbers + (g * TILE + v * N) * 4), low = AND_15(w), high = SHIFT_4(w);
                UNROLL for (int t = 0; t < T; t++) {
                    const int8_t *q = x[(size_t)t * n_blocks + b].q + 4 * g;
                    if (type == Q8_0) products[t] = DOT(products[t], w, NAME(four_bytes)(q));
                    else {
                        products[t] = DOT_SMALL(products[t], low, NAME(four_bytes)(q));
                        products[t] = DOT_SMALL(products[t], high, NAME(four_bytes)(q + 16));
                    }
                }
            }
            V scales = LOAD_F16((const void *)(tiles + 2 * v * N));
            UNROLL for (int t = 0; t < T; t++)
                sums[t][v] = FMA(FLOATS(products[t]), MUL(scales, SET(x[(size_t)t * n_blocks + b].scale)), sums[t][v]);
        }
    }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int v = 0; v < VECTORS; v++) STORE(y + t * TILE + v * N, sums[t][v]);
}

INLINE void NAME(tiles)(Type type, float *y, const uint8_t *tiles, const Block *x, int n_blocks, int T) {
    enum { MOST = 8 / VECTORS };
    for (; T >= MOST; T -= MOST, x += MOST * n_blocks, y += MOST * TILE) NAME(tile)(type, y, tiles, x, n_blocks, MOST);
    for (; T >= 2; T -= 2, x += 2 * n_blocks, y += 2 * TILE) NAME(tile)(type, y, tiles, x, n_blocks, 2);
    if (T) NAME(tile)(type, y, tiles, x, n_blocks, 1);
}

TARGET static void NAME(tiles_q8)(float *y, const uint8_t *tiles, const Block *x, int n_blocks, int T) {
    NAME(tiles)(Q8_0, y, tiles, x, n_blocks, T);
}

TARGET static void NAME(tiles_q4)(float *y, const uint8_t *tiles, const Block *x, int n_blocks, int T) {
    NAME(tiles)(Q4_0, y, tiles, x, n_blocks, T);
}

// e^x for x up to 88, and 1e-38 below -87: 2^n e^r, n whole and |r| <= ln 2 / 2, by the series to r^6 (error 2e-7).
INLINE V NAME(exp)(V x) {
    x = MIN(SET(88.0f), MAX(SET(-87.0f), x));
    V n = ROUND(MUL(x, SET(1.44269504f))), r = FMA(n, SET(-0.693359375f), x), p = SET(1 / 720.0f);
    r = FMA(n, SET(2.12194440e-4f), r); // ln 2 in two parts, of which n times the first is exact
    p = FMA(p, r, SET(1 / 120.0f));
    p = FMA(p, r, SET(1 / 24.0f));
    p = FMA(p, r, SET(1 / 6.0f));
    p = FMA(p, r, SET(0.5f));
    p = FMA(p, r, SET(1));
    p = FMA(p, r, SET(1));
    return MUL(p, POW2(n));
}

TARGET static void NAME(swiglu)(float *h, const float *h2, int n) {
    for (int i = 0; i < n; i += N) {
        float tail[N];
        bool whole = i + N <= n;
        V x = whole ? LOAD(h + i) : NAME(load_tail)(F32, h, i, n - i);
        V x2 = whole ? LOAD(h2 + i) : NAME(load_tail)(F32, h2, i, n - i);
        V y = MUL(DIV(x, ADD(SET(1), NAME(exp)(MUL(x, SET(-1))))), x2);
        STORE(whole ? h + i : tail, y);
        if (!whole) memcpy(h + i, tail, (n - i) * sizeof(float));
    }
}

TARGET static float NAME(largest)(const float *x, int n) {
    V most = SET(-INFINITY);
    float lanes[N], largest = -INFINITY;
    int i = 0;
    for (; i + N <= n; i += N) most = MAX(most, LOAD(x + i));
    STORE(lanes, most);
    for (int lane = 0; lane < N; lane++) largest = lanes[lane] > largest ? lanes[lane] : largest;
    for (; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

TARGET static float NAME(exponentials)(float *x, float most, float scale, int n) {
    V sum = SET(0);
    float tail[N];
    int i = 0;
    for (; i + N <= n; i += N) {
        V e = NAME(exp)(MUL(ADD(LOAD(x + i), SET(-most)), SET(scale)));
        STORE(x + i, e);
        sum = ADD(sum, e);
    }
    float total = SUM(sum);
    if (i < n) STORE(tail, NAME(exp)(MUL(ADD(NAME(load_tail)(F32, x, i, n - i), SET(-most)), SET(scale))));
    for (int t = 0; i < n; i++, t++) total += x[i] = tail[t];
    return total;
}

// Two sums for even and odd d, so that an addition need not wait for the one before.
INLINE void NAME(score_tiles)(Type type, float *out, size_t out_stride, const float *q, size_t q_stride, const int Q,
                              const char *keys, int head_dim, int n) {
    size_t size = (type == F16 ? 2 : 4) * (size_t)TILE; // bytes of one d in a tile
    for (int i = 0; i < n; i += TILE, keys += size * head_dim)
        for (int v = 0; v < VECTORS; v++) {
            V even[4], odd[4];
            UNROLL for (int query = 0; query < Q; query++) even[query] = odd[query] = SET(0);
            for (int d = 0; d < head_dim; d += 2) {
                V key = NAME(load)(type, keys + d * size, v * N), key2 = NAME(load)(type, keys + (d + 1) * size, v * N);
                UNROLL for (int query = 0; query < Q; query++) {
                    even[query] = FMA(key, SET(q[query * q_stride + d]), even[query]);
                    odd[query] = FMA(key2, SET(q[query * q_stride + d + 1]), odd[query]);
                }
            }
            UNROLL for (int query = 0; query < Q; query++)
                STORE(out + query * out_stride + i + v * N, ADD(even[query], odd[query]));
        }
}

TARGET static void NAME(scores)(float *out, size_t out_stride, const float *q, size_t q_stride, int Q, const void *keys,
                                bool half, int head_dim, int n) {
    if (Q == 4 && half) NAME(score_tiles)(F16, out, out_stride, q, q_stride, 4, keys, head_dim, n);
    else if (Q == 4) NAME(score_tiles)(F32, out, out_stride, q, q_stride, 4, keys, head_dim, n);
    else
        for (int query = 0; query < Q; query++, out += out_stride, q += q_stride)
            if (half) NAME(score_tiles)(F16, out, out_stride, q, q_stride, 1, keys, head_dim, n);
            else NAME(score_tiles)(F32, out, out_stride, q, q_stride, 1, keys, head_dim, n);
}

// The sums of `vectors` vectors of the width, for Q queries, stay in registers while the positions pass by.
INLINE void NAME(mix_columns)(Type type, float *out, const float *p, size_t p_stride, const int Q, const void *values,
                              int width, int n, const int vectors) {
    V sums[4][4];
    UNROLL for (int query = 0; query < Q; query++)
        UNROLL for (int v = 0; v < vectors; v++) sums[query][v] = SET(0);
    for (int i = 0; i < n; i++)
        UNROLL for (int v = 0; v < vectors; v++) {
            V value = NAME(load)(type, values, (size_t)i * width + v * N);
            UNROLL for (int query = 0; query < Q; query++)
                sums[query][v] = FMA(value, SET(p[query * p_stride + i]), sums[query][v]);
        }
    UNROLL for (int query = 0; query < Q; query++)
        UNROLL for (int v = 0; v < vectors; v++) STORE(out + (size_t)query * width + v * N, sums[query][v]);
}

INLINE void NAME(mix_type)(Type type, float *out, const float *p, size_t p_stride, const int Q, const char *values,
                           int width, int n) {
    enum { MOST = N == 16 ? 4 : 2 };
    size_t size = type == F16 ? 2 : 4;
    int d = 0;
    for (; d + MOST * N <= width; d += MOST * N)
        NAME(mix_columns)(type, out + d, p, p_stride, Q, values + d * size, width, n, MOST);
    for (; d < width; d += N) NAME(mix_columns)(type, out + d, p, p_stride, Q, values + d * size, width, n, 1);
}

TARGET static void NAME(mix)(float *out, const float *p, size_t p_stride, int Q, const void *values, bool half, int width,
                             int n) {
    if (Q == 4 && half) NAME(mix_type)(F16, out, p, p_stride, 4, values, width, n);
    else if (Q == 4) NAME(mix_type)(F32, out, p, p_stride, 4, values, width, n);
    else
        for (int query = 0; query < Q; query++, out += width, p += p_stride)
            if (half) NAME(mix_type)(F16, out, p, p_stride, 1, values, width, n);
            else NAME(mix_type)(F32, out, p, p_stride, 1, values, width, n);
}

static const Kernels NAME(kernels) = {
    NAME_STRING, NAME(dot_f32), NAME(dot_f16), NAME(dot_bf16), NAME(floats_f16), NAME(floats_bf16),
    NAME(halves), NAME(products), NAME(quantize), NAME(dot_q8), NAME(dot_q4), NAME(pack_q8), NAME(pack_q4), NAME(tiles_q8), NAME(tiles_q4), NAME(swiglu), NAME(largest), NAME(exponentials), NAME(scores),
    NAME(mix),
};

#undef INLINE
#undef VECTORS
#undef UNROLL
#undef NAME
#undef NAME_STRING
#undef TARGET
#undef Q8_OFFSET
#undef N
#undef TOKENS
#undef V
#undef I
#undef Q
#undef S
#undef S_SET
#undef S_FMA
#undef S_SUM
#undef HALF
#undef LOAD_Q
#undef STORE_Q
#undef SET_Q
#undef XOR_Q
#undef LOW_32
#undef HIGH_32
#undef LOAD
#undef LOAD_F16
#undef LOAD_BF16
#undef STORE
#undef STORE_F16
#undef SET
#undef ADD
#undef MUL
#undef DIV
#undef MAX
#undef MIN
#undef FMA
#undef SUM
#undef ADD_SUMS
#undef ROUND
#undef POW2
#undef LOAD_I
#undef SET_I
#undef FLOATS
#undef DOT
#undef DOT_SMALL
#undef AND_15
#undef SHIFT_4

// The arithmetic of kernels.h in vectors, written once and included for each instruction set with these defined:
//   NAME(x)              x with the set's name
//   TARGET               attribute of functions that use the set
//   N, V, I              lanes of a vector; vectors of N floats, and of N int32 or 4 N bytes
//   PANELS               rows of tiles worked on at once, 1 or 2
//   TOKENS, TOKENS_Q     how many tokens are worked on at once with them, of floats and of Blocks, so that the sums, or
//                        the sums and the products, and the weights of all rows stay in registers
//   LOAD, LOAD_F16, LOAD_BF16, STORE, STORE_F16, SET, ADD, MUL, DIV, MAX, MIN, FMA (a * b + c), SUM (of the lanes), ROUND
//                        MAX and MIN give the second operand when one is NaN
//   MOST_OF(v)           the largest lane, any if one is NaN
//   SWAP(v)              of each pair of lanes, the other
//   POW2(n)              2^n for whole n from -126 to 127
//   LOAD_I, SET_I, FLOATS (of int32); INTS (of floats, to the nearest, ties to even), ADD_I, MAX_I, SUM_I, MOST_OF_I
//   MAGNITUDE(v)         floats' bits without the sign
//   STORE_8(p, i)        int32 from -127 to 127 as bytes
//   BF16_LOW(i), BF16_HIGH(i)  the lower, the upper halves of 32 bits as floats
//   DOT(c, w, x)         c + the products of each lane's four bytes; w unsigned if Q8_OFFSET is 128, else signed
//   DOT_SMALL(c, w, x)   the same for w from 0 to 15
//   AND_15, SHIFT_4      of bytes: w & 15; w >> 4, where the bits above the low four are cleared
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
#define SUMS (PANELS * VECTORS)
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

TARGET static void NAME(quantize)(Block *out, const float *x, int n_blocks) {
    enum { PARTS = 32 / N };
    for (; n_blocks > 0; n_blocks--, x += 32, out++) {
        V v[PARTS];
        I largest = SET_I(0), sum = largest; // as bits, among which NaN is larger than any number
        UNROLL for (int i = 0; i < PARTS; i++) v[i] = LOAD(x + i * N), largest = MAX_I(largest, MAGNITUDE(v[i]));
        int32_t bits = MOST_OF_I(largest);
        float most;
        memcpy(&most, &bits, 4);
        V inverse = SET(most > 1e-30f ? 127 / most : 0);
        UNROLL for (int i = 0; i < PARTS; i++) {
            I q = INTS(MIN(MAX(MUL(v[i], inverse), SET(-127)), SET(127))); // a bound to what is not finite
            STORE_8(out->q + i * N, q);
            sum = ADD_I(sum, q);
        }
        out->scale = most / 127;
        out->sum = SUM_I(sum);
    }
}

// Transposes a 4 by 4 matrix of words of four bytes; the rows lie `stride` bytes apart, those of the result `out_stride`.
INLINE void NAME(pack_square)(uint8_t *out, size_t out_stride, const uint8_t *rows, size_t stride, Q offset) {
    Q a = LOAD_Q(rows), b = LOAD_Q(rows + stride), c = LOAD_Q(rows + 2 * stride), d = LOAD_Q(rows + 3 * stride);
    Q ac = LOW_32(a, c), bd = LOW_32(b, d), ac2 = HIGH_32(a, c), bd2 = HIGH_32(b, d);
    STORE_Q(out, XOR_Q(LOW_32(ac, bd), offset));
    STORE_Q(out + out_stride, XOR_Q(HIGH_32(ac, bd), offset));
    STORE_Q(out + 2 * out_stride, XOR_Q(LOW_32(ac2, bd2), offset));
    STORE_Q(out + 3 * out_stride, XOR_Q(HIGH_32(ac2, bd2), offset));
}

// A cache line of four rows at a time: lines of more rows may be such that the first-level cache can't hold all of them.
TARGET static void NAME(transpose)(uint8_t *out, const uint8_t *in, size_t stride, int rows, int n) {
    int i = 0, end;
    for (; rows % 4 == 0 && i + 4 <= n; i = end) {
        end = i + 16 <= n ? i + 16 : n / 4 * 4;
        for (int r = 0; r < rows; r += 4)
            for (int c = i; c < end; c += 4)
                NAME(pack_square)(out + 4 * ((size_t)c * rows + r), 4 * rows, in + r * stride + 4 * c, stride, SET_Q(0));
    }
    transpose(out + (size_t)4 * i * rows, in + 4 * i, stride, rows, n - i);
}

INLINE void NAME(pack)(Type type, uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks) {
    const size_t size = type == Q8_0 ? 34 : 18;
    Q offset = SET_Q(type == Q8_0 && Q8_OFFSET ? 0x80808080 : 0);
    for (int b = 0; b < n_blocks; b++, rows += size, tiles += size * TILE) {
        for (int r = 0; r < TILE; r++) memcpy(tiles + 2 * r, rows + r * stride, 2);
        for (int r = 0; r < TILE; r += 4) {
            NAME(pack_square)(tiles + 2 * TILE + 4 * r, 4 * TILE, rows + r * stride + 2, stride, offset);
            if (type == Q8_0) NAME(pack_square)(tiles + 18 * TILE + 4 * r, 4 * TILE, rows + r * stride + 18, stride, offset);
        }
    }
}

TARGET static void NAME(pack_q8)(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks) {
    NAME(pack)(Q8_0, tiles, rows, stride, n_blocks);
}

TARGET static void NAME(pack_q4)(uint8_t *tiles, const uint8_t *rows, size_t stride, int n_blocks) {
    NAME(pack)(Q4_0, tiles, rows, stride, n_blocks);
}

// One column of P rows of tiles added to the sums of T tokens x (T,).
INLINE void NAME(add_column)(V sums[SUMS][TOKENS], const V w[SUMS], const float *x, const int T, const int P) {
    UNROLL for (int t = 0; t < T; t++) {
        V xs = SET(x[t]);
        UNROLL for (int v = 0; v < P * VECTORS; v++) sums[v][t] = FMA(w[v], xs, sums[v][t]);
    }
}

// Two columns, of which only the first is there where `both` is not; `next` bytes from one row of tiles to the other.
INLINE void NAME(add_columns)(Type type, V even[SUMS][TOKENS], V odd[SUMS][TOKENS], const uint8_t *tiles, size_t next, bool both,
                              const float *x, const int T, const int P) {
    V w[SUMS], w2[SUMS];
    UNROLL for (int v = 0; v < P * VECTORS; v++) {
        const uint8_t *here = tiles + v / VECTORS * next + v % VECTORS * 4 * N;
        I pairs = LOAD_I(here);
        if (type == F32) w[v] = LOAD((const float *)here), w2[v] = both ? LOAD((const float *)here + TILE) : w[v];
        else w[v] = BF16_LOW(pairs), w2[v] = BF16_HIGH(pairs);
    }
    NAME(add_column)(even, w, x, T, P);
    if (both) NAME(add_column)(odd, w2, x + T, T, P);
}

// The sums of TILE rows stand side by side in the lanes. Columns are summed apart in turns, where few tokens leave room, so
// that an addition need not wait for the one before.
INLINE void NAME(float_tiles)(Type type, float *y, const uint8_t *tiles, const float *x, int cols, const int T, const int P,
                              Ahead ahead) {
    const int apart = T == 1 ? 4 : T == 2 ? 2 : 1;
    const size_t column = (type == F32 ? 4 : 2) * TILE; // bytes
    V sums[4][SUMS][TOKENS];
    size_t next = (cols + (type != F32 && cols % 2)) * column;
    UNROLL for (int i = 0; i < apart; i++)
        UNROLL for (int v = 0; v < P * VECTORS; v++)
            UNROLL for (int t = 0; t < T; t++) sums[i][v][t] = SET(0);
    int c = 0;
    for (; apart == 4 && c + 4 <= cols; c += 4, x += 4 * T) {
        NAME(add_columns)(type, sums[0], sums[1], tiles + c * column, next, true, x, T, P);
        NAME(add_columns)(type, sums[2], sums[3], tiles + (c + 2) * column, next, true, x + 2 * T, T, P);
    }
    for (; c < cols; c += 2, x += 2 * T) {
        if (T > 2) call_for(&ahead, c / 2);
        NAME(add_columns)(type, sums[0], sums[apart > 1], tiles + c * column, next, c + 1 < cols, x, T, P);
    }
    UNROLL for (int v = 0; v < P * VECTORS; v++)
        UNROLL for (int t = 0; t < T; t++) {
            V sum = apart > 1 ? ADD(sums[0][v][t], sums[1][v][t]) : sums[0][v][t];
            STORE(y + t * 2 * TILE + v * N, apart == 4 ? ADD(sum, ADD(sums[2][v][t], sums[3][v][t])) : sum);
        }
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

// T tokens with P rows of tiles.
INLINE void NAME(block_tiles)(Type type, float *y, const uint8_t *tiles, const Block *x, int n_blocks, const int T, const int P) {
    const size_t size = type == Q8_0 ? Q8_TILE : Q4_TILE, next = n_blocks * size; // bytes from one row of tiles to the other
    V sums[SUMS][TOKENS_Q];
    UNROLL for (int v = 0; v < P * VECTORS; v++)
        UNROLL for (int t = 0; t < T; t++) sums[v][t] = SET(0);
    for (int b = 0; b < n_blocks; b++, tiles += size) {
        I products[SUMS][TOKENS_Q];
        UNROLL for (int v = 0; v < P * VECTORS; v++)
            UNROLL for (int t = 0; t < T; t++)
                products[v][t] = SET_I((type == Q8_0 ? -Q8_OFFSET : -8) * x[(size_t)t * n_blocks + b].sum);
        for (int g = 0; g < (type == Q8_0 ? 8 : 4); g++) {
            I w[SUMS];
            UNROLL for (int v = 0; v < P * VECTORS; v++)
                w[v] = LOAD_I(tiles + v / VECTORS * next + 2 * TILE + (g * TILE + v % VECTORS * N) * 4);
            UNROLL for (int t = 0; t < T; t++) {
                const int8_t *q = x[(size_t)t * n_blocks + b].q + 4 * g;
                I first = NAME(four_bytes)(q), second = NAME(four_bytes)(q + (type == Q8_0 ? 0 : 16));
                UNROLL for (int v = 0; v < P * VECTORS; v++)
                    if (type == Q8_0) products[v][t] = DOT(products[v][t], w[v], first);
                    else products[v][t] = DOT_SMALL(DOT_SMALL(products[v][t], AND_15(w[v]), first), SHIFT_4(w[v]), second);
            }
        }
        UNROLL for (int v = 0; v < P * VECTORS; v++) {
            V scales = LOAD_F16((const void *)(tiles + v / VECTORS * next + 2 * (v % VECTORS) * N));
            UNROLL for (int t = 0; t < T; t++)
                sums[v][t] = FMA(FLOATS(products[v][t]), MUL(scales, SET(x[(size_t)t * n_blocks + b].scale)), sums[v][t]);
        }
    }
    UNROLL for (int v = 0; v < P * VECTORS; v++)
        UNROLL for (int t = 0; t < T; t++) STORE(y + t * 2 * TILE + v * N, sums[v][t]);
}

// Few tokens go along one row of tiles after the other, for memory is read fastest at one place; many share what is
// loaded of two.
INLINE void NAME(floats_times_panel)(Type type, float *y, const uint8_t *tiles, int rows_of_tiles, const float *x, int cols,
                                     int T, Ahead ahead) {
    size_t size = (size_t)(type == F32 ? cols : (cols + 1) / 2) * 4 * TILE;
    for (int r = 0; r < rows_of_tiles; r++, y += TILE, tiles += size)
        if (T == 1) NAME(float_tiles)(type, y, tiles, x, cols, 1, 1, ahead);
        else if (T == 2) NAME(float_tiles)(type, y, tiles, x, cols, 2, 1, ahead);
        else if (T == 4) NAME(float_tiles)(type, y, tiles, x, cols, 4, 1, ahead);
        else if (PANELS == 2 && r + 1 < rows_of_tiles) {
            if (T == 8) NAME(float_tiles)(type, y, tiles, x, cols, PANELS == 2 ? 8 : 1, PANELS, ahead);
            else NAME(float_tiles)(type, y, tiles, x, cols, TOKENS, PANELS, ahead);
            r++, y += TILE, tiles += size;
        } else if (T == 8) NAME(float_tiles)(type, y, tiles, x, cols, TOKENS > 8 ? 8 : 1, 1, ahead);
        else NAME(float_tiles)(type, y, tiles, x, cols, TOKENS, 1, ahead);
}

TARGET static void NAME(tiles_f32)(float *y, const uint8_t *tiles, int rows_of_tiles, const float *x, int cols, int T,
                            Ahead ahead) {
    NAME(floats_times_panel)(F32, y, tiles, rows_of_tiles, x, cols, T, ahead);
}

TARGET static void NAME(tiles_bf16)(float *y, const uint8_t *tiles, int rows_of_tiles, const float *x, int cols, int T,
                            Ahead ahead) {
    NAME(floats_times_panel)(BF16, y, tiles, rows_of_tiles, x, cols, T, ahead);
}

INLINE void NAME(blocks_times_tokens)(Type type, float *y, const uint8_t *tiles, int rows_of_tiles, const Block *x, int n,
                                      int T) {
    size_t size = (size_t)n * (type == Q8_0 ? Q8_TILE : Q4_TILE);
    enum { MOST = TOKENS_Q };
    for (; T >= MOST; T -= MOST, x += MOST * n, y += MOST * 2 * TILE)
        if (PANELS == 2 && rows_of_tiles == 2) NAME(block_tiles)(type, y, tiles, x, n, MOST, PANELS);
        else for (int r = 0; r < rows_of_tiles; r++) NAME(block_tiles)(type, y + r * TILE, tiles + r * size, x, n, MOST, 1);
    for (; T >= 2; T -= 2, x += 2 * n, y += 4 * TILE)
        for (int r = 0; r < rows_of_tiles; r++) NAME(block_tiles)(type, y + r * TILE, tiles + r * size, x, n, 2, 1);
    for (int r = 0; T && r < rows_of_tiles; r++) NAME(block_tiles)(type, y + r * TILE, tiles + r * size, x, n, 1, 1);
}

TARGET static void NAME(tiles_q8)(float *y, const uint8_t *tiles, int rows_of_tiles, const Block *x, int n, int T) {
    NAME(blocks_times_tokens)(Q8_0, y, tiles, rows_of_tiles, x, n, T);
}

TARGET static void NAME(tiles_q4)(float *y, const uint8_t *tiles, int rows_of_tiles, const Block *x, int n, int T) {
    NAME(blocks_times_tokens)(Q4_0, y, tiles, rows_of_tiles, x, n, T);
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

TARGET static void NAME(rotate)(float *x, const float *rotation, int head_dim) {
    for (int i = 0; i < head_dim; i += N) {
        int left = head_dim - i;
        float tail[N];
        V a = left < N ? NAME(load_tail)(F32, x, i, left) : LOAD(x + i);
        V cosine = left < N ? NAME(load_tail)(F32, rotation, i, left) : LOAD(rotation + i);
        V sine = left < N ? NAME(load_tail)(F32, rotation, head_dim + i, left) : LOAD(rotation + head_dim + i);
        V y = FMA(SWAP(a), sine, MUL(a, cosine));
        STORE(left < N ? tail : x + i, y);
        if (left < N) memcpy(x + i, tail, left * sizeof *tail);
    }
}

TARGET static float NAME(largest)(const float *x, int n) {
    V a = SET(-INFINITY), b = a, poison = SET(0); // 0 times what is not finite is NaN
    float rest = 0;
    int i = 0;
    for (; i + 2 * N <= n; i += 2 * N) {
        V x1 = LOAD(x + i), x2 = LOAD(x + i + N);
        a = MAX(a, x1), b = MAX(b, x2);
        poison = FMA(x1, SET(0), FMA(x2, SET(0), poison));
    }
    float largest = MOST_OF(MAX(a, b));
    for (; i < n; i++) largest = x[i] > largest ? x[i] : largest, rest += 0 * x[i];
    return largest + SUM(poison) + rest;
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

// The sums of `vectors` vectors of the width, for Q queries, stay in registers while the positions pass by; of one query, those of
// even and odd positions apart, so that an addition need not wait for the one before.
INLINE void NAME(mix_columns)(Type type, float *out, const float *p, size_t p_stride, const int Q, const void *values,
                              int width, int n, const int vectors) {
    const int apart = Q == 1;
    V sums[5][4];
    UNROLL for (int query = 0; query < Q + apart; query++)
        UNROLL for (int v = 0; v < vectors; v++) sums[query][v] = SET(0);
    for (int i = 0; i < n; i++) {
        UNROLL for (int v = 0; v < vectors; v++) {
            V value = NAME(load)(type, values, (size_t)i * width + v * N);
            UNROLL for (int query = 0; query < Q; query++)
                sums[query][v] = FMA(value, SET(p[query * p_stride + i]), sums[query][v]);
        }
        if (!apart || ++i == n) continue;
        UNROLL for (int v = 0; v < vectors; v++)
            sums[1][v] = FMA(NAME(load)(type, values, (size_t)i * width + v * N), SET(p[i]), sums[1][v]);
    }
    UNROLL for (int query = 0; query < Q; query++)
        UNROLL for (int v = 0; v < vectors; v++)
            STORE(out + (size_t)query * width + v * N, apart ? ADD(sums[0][v], sums[1][v]) : sums[query][v]);
}

INLINE void NAME(mix_type)(Type type, float *out, const float *p, size_t p_stride, const int Q, const char *values,
                           int width, int n) {
    enum { MOST = N == 16 ? 4 : 2 };
    size_t size = type == F16 ? 2 : 4;
    int d = 0;
    for (; d + MOST * N <= width; d += MOST * N)
        NAME(mix_columns)(type, out + d, p, p_stride, Q, values + d * size, width, n, MOST);
    for (; MOST > 3 && d + 3 * N <= width; d += 3 * N)
        NAME(mix_columns)(type, out + d, p, p_stride, Q, values + d * size, width, n, 3);
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
    NAME_STRING, TOKENS, NAME(dot_f32), NAME(dot_f16), NAME(dot_bf16), NAME(floats_f16), NAME(floats_bf16), NAME(halves),
    NAME(quantize), NAME(dot_q8), NAME(dot_q4), NAME(transpose), NAME(pack_q8), NAME(pack_q4), NAME(tiles_f32),
    NAME(tiles_bf16), NAME(tiles_q8), NAME(tiles_q4), NAME(swiglu), NAME(rotate), NAME(largest), NAME(exponentials),
    NAME(scores), NAME(mix), NULL, NULL,
};

#undef INLINE
#undef VECTORS
#undef SUMS
#undef PANELS
#undef TOKENS_Q
#undef BF16_LOW
#undef BF16_HIGH
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
#undef MOST_OF
#undef ROUND
#undef SWAP
#undef POW2
#undef LOAD_I
#undef SET_I
#undef FLOATS
#undef INTS
#undef ADD_I
#undef MAX_I
#undef SUM_I
#undef MOST_OF_I
#undef MAGNITUDE
#undef STORE_8
#undef DOT
#undef DOT_SMALL
#undef AND_15
#undef SHIFT_4

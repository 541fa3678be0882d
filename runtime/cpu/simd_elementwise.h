// Part of simd.h: SwiGLU, RoPE, softmax.

// Returns e^x for x from -87 to 88. Clips other x to this range; NaN stays NaN. e^x = 2^n e^r with
// n an integer and |r| <= ln(2) / 2; the Taylor series of e^r ends with r^6 (relative error 2e-7).
INLINE Floats exponential(Floats x) {
    x = MIN(SET(88.0f), MAX(SET(-87.0f), x));
    // r = x - n ln 2, with ln 2 in two parts, because n times the first part is exact
    Floats n = ROUND(MUL(x, SET(1.44269504f))), r = FMA(n, SET(-0.693359375f), x);
    r = FMA(n, SET(2.12194440e-4f), r);
    Floats p = SET(1 / 720.0f);
    p = FMA(p, r, SET(1 / 120.0f));
    p = FMA(p, r, SET(1 / 24.0f));
    p = FMA(p, r, SET(1 / 6.0f));
    p = FMA(p, r, SET(0.5f));
    p = FMA(p, r, SET(1));
    p = FMA(p, r, SET(1));
    return MUL(p, POW2(n));
}

TARGET static void swiglu(float *h, const float *h2, int n) {
    for (int i = 0; i < n; i += LANES) {
        Floats x = load_up_to(h + i, n - i), x2 = load_up_to(h2 + i, n - i);
        Floats y = MUL(DIV(x, ADD(SET(1), exponential(MUL(x, SET(-1))))), x2);
        store_up_to(h + i, y, n - i);
    }
}

TARGET static void rotate(float *x, const float *rotation, int head_dim) {
    for (int i = 0; i < head_dim; i += LANES) {
        int left = head_dim - i;
        Floats a = load_up_to(x + i, left), cosine = load_up_to(rotation + i, left);
        Floats sine = load_up_to(rotation + head_dim + i, left);
        store_up_to(x + i, FMA(SWAP(a), sine, MUL(a, cosine)), left);
    }
}

// Loads vectors of the first and the second half of a head together: their elements are partners.
TARGET static void rotate_halves(float *x, const float *rotation, int head_dim) {
    const int half = head_dim / 2;
    const float *sines = rotation + head_dim;
    for (int i = 0; i < half; i += LANES) {
        int left = half - i;
        Floats a = load_up_to(x + i, left), b = load_up_to(x + half + i, left);
        Floats cos_a = load_up_to(rotation + i, left);
        Floats cos_b = load_up_to(rotation + half + i, left);
        Floats sin_a = load_up_to(sines + i, left), sin_b = load_up_to(sines + half + i, left);
        store_up_to(x + i, FMA(b, sin_a, MUL(a, cos_a)), left);
        store_up_to(x + half + i, FMA(a, sin_b, MUL(b, cos_b)), left);
    }
}

TARGET static float largest(const float *x, int n) {
    Floats a = SET(-INFINITY), b = a, poison = SET(0); // 0 times NaN or infinity is NaN
    float rest = 0;
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        Floats x1 = LOAD(x + i), x2 = LOAD(x + i + LANES);
        a = MAX(a, x1);
        b = MAX(b, x2);
        poison = FMA(x1, SET(0), FMA(x2, SET(0), poison));
    }
    float max = LARGEST(MAX(a, b));
    for (; i < n; i++) {
        max = x[i] > max ? x[i] : max;
        rest += 0 * x[i];
    }
    return max + SUM(poison) + rest;
}

TARGET static float exponentials(float *x, float max, float scale, int n) {
    Floats sum = SET(0);
    float tail[LANES];
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        Floats e = exponential(MUL(ADD(LOAD(x + i), SET(-max)), SET(scale)));
        STORE(x + i, e);
        sum = ADD(sum, e);
    }
    float total = SUM(sum);
    if (i == n) return total;
    STORE(tail, exponential(MUL(ADD(load_tail(F32, x, i, n - i), SET(-max)), SET(scale))));
    for (int t = 0; i < n; i++, t++) total += x[i] = tail[t];
    return total;
}

TARGET static void multiply(float *x, const float *y, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) STORE(x + i, MUL(LOAD(x + i), LOAD(y + i)));
    for (; i < n; i++) x[i] *= y[i];
}

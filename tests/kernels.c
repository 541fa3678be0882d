// Compares the kernels of each instruction set that this machine has with the scalar ones, op by op, on random sizes that
// leave remainders everywhere. Usage: kernels SEED ROUNDS. Prints the largest differences; exit code 1 if one is too large.
#include "../kernels_cpu.c"

enum { MOST = 700 };

static uint32_t state;
static bool failed;

static int below(int n) { return (int)((state = state * 1664525 + 1013904223) >> 8) % n; }
static float number(void) { return (below(1 << 20) - (1 << 19)) * 0x1p-19f; }

static float *floats(size_t n) { // exactly as many, so that the sanitizer sees what is read beyond
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = number();
    return x;
}

static uint16_t *shorts(size_t n, bool bf16) {
    uint16_t *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        float f = number();
        memcpy(&x[i], (char *)&f + 2, 2);
        if (!bf16) x[i] = float_to_half(f);
    }
    return x;
}

static uint8_t *blocks_of(int rows, int n_blocks, int size) { // rows of Q8_0 or Q4_0
    uint8_t *bytes = malloc((size_t)rows * n_blocks * size);
    for (int i = 0; i < rows * n_blocks * size; i++) {
        uint16_t scale = float_to_half(number());
        bytes[i] = i % size < 2 ? scale >> 8 * (i % size) : below(256);
        if (i % size == 1) bytes[i] = scale >> 8, bytes[i - 1] = (uint8_t)scale;
    }
    return bytes;
}

static void compare(const Kernels *k, const char *op, const float *found, const float *expected, size_t n, double most) {
    double worst = 0, largest = 1;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)found[i] - expected[i]);
        worst = d <= worst ? worst : isnan(d) ? INFINITY : d;
        largest = fmax(largest, fabs(expected[i]));
    }
    if (worst <= most * largest) return;
    failed = true;
    printf("%s %s: %g of %g\n", k->name, op, worst, largest);
}

static void compare_bytes(const Kernels *k, const char *op, const void *found, const void *expected, size_t n) {
    if (!memcmp(found, expected, n)) return;
    failed = true;
    printf("%s %s: other bytes\n", k->name, op);
}

// A number half-way between two may be rounded to either, for a product and a sum may be one instruction.
static void compare_blocks(const Kernels *k, const Block *found, const Block *expected, int n) {
    for (int b = 0; b < n; b++) {
        int sum = 0, other = 0;
        for (int i = 0; i < 32; i++) {
            sum += found[b].q[i];
            other += abs(found[b].q[i] - expected[b].q[i]);
        }
        if (found[b].scale == expected[b].scale && found[b].sum == sum && other <= 1) continue;
        failed = true;
        printf("%s quantize: %d numbers differ\n", k->name, other);
    }
}

static void rows_of_floats(const Kernels *k, const Kernels *s) {
    int n = 1 + below(MOST);
    float *x = floats(n), *w = floats(n), *y = floats(n), *z = floats(n);
    uint16_t *f16 = shorts(n, false), *bf16 = shorts(n, true), *narrow = shorts(n, false), *narrow2 = shorts(n, false);
    float found[] = {k->dot_f32(w, x, n), k->dot_f16(f16, x, n), k->dot_bf16(bf16, x, n)};
    float expected[] = {s->dot_f32(w, x, n), s->dot_f16(f16, x, n), s->dot_bf16(bf16, x, n)};
    for (int i = 0; i < 3; i++) // a sum of n products below 1, of either sign
        if (!(fabs(found[i] - expected[i]) <= 1e-6 * sqrt(n))) failed = true, printf("%s dot %d\n", k->name, i);
    k->floats_f16(y, f16, n), s->floats_f16(z, f16, n), compare(k, "floats_f16", y, z, n, 0);
    k->floats_bf16(y, bf16, n), s->floats_bf16(z, bf16, n), compare(k, "floats_bf16", y, z, n, 0);
    for (int i = 0; i < n; i++) x[i] *= ldexpf(1, below(50) - 30); // subnormal halves and infinity among them
    k->halves(narrow, x, n), s->halves(narrow2, x, n), compare_bytes(k, "halves", narrow, narrow2, n * 2);
    memcpy(y, w, n * sizeof *y), memcpy(z, w, n * sizeof *z);
    for (int i = 0; i < n; i++) y[i] = z[i] = 100 * z[i];
    k->swiglu(y, x, n), s->swiglu(z, x, n), compare(k, "swiglu", y, z, n, 1e-6);
    free(x), free(w), free(y), free(z), free(f16), free(bf16), free(narrow), free(narrow2);
}

static void products_of_floats(const Kernels *k, const Kernels *s) {
    int n = 1 + below(100), rows = 1 + below(35), T = 1 + below(20), more = below(3);
    float *x = floats((size_t)T * (n + more)), *w = floats((size_t)rows * (n + more));
    float *y = floats(T * (rows + more)), *z = malloc(T * (rows + more) * sizeof *z);
    memcpy(z, y, T * (rows + more) * sizeof *z);
    k->products(y, rows + more, w, n + more, rows, x, n + more, n, T);
    s->products(z, rows + more, w, n + more, rows, x, n + more, n, T);
    compare(k, "products", y, z, T * (rows + more), 1e-6);
    free(x), free(w), free(y), free(z);
}

static void products_of_blocks(const Kernels *k, const Kernels *s, bool q8) {
    int n = 1 + below(9), T = 1 + below(20), size = q8 ? 34 : 18, rows = 1 + below(40);
    float *x = floats((size_t)T * n * 32);
    for (int i = 0; i < 32 && below(2); i++) x[i] = 0;
    Block *b = malloc(T * n * sizeof *b), *b2 = malloc(T * n * sizeof *b);
    k->quantize(b, x, T * n), s->quantize(b2, x, T * n), compare_blocks(k, b, b2, T * n);
    Mat m = {.type = q8 ? Q8_0 : Q4_0, .rows = rows, .cols = n * 32, .data = blocks_of(rows, n, size)};
    size_t tile = tiles_size(&m);
    uint8_t *tiles = malloc(tile), *tiles2 = malloc(tile);
    float *y = floats(T * TILE), *z = floats(T * TILE), *row = floats(n * 32), found[TILE];
    for (int r = 0; r < rows; r += TILE) {
        pack(k, tiles, &m, r), pack(s, tiles2, &m, r);
        (q8 ? k->tiles_q8 : k->tiles_q4)(y, tiles, b, n, T), (q8 ? s->tiles_q8 : s->tiles_q4)(z, tiles2, b, n, T);
        compare(k, q8 ? "tiles_q8" : "tiles_q4", y, z, T * TILE, 1e-6);
        for (int i = 0; i < TILE && r + i < rows; i++) {
            const uint8_t *blocks = (const uint8_t *)m.data + (size_t)(r + i) * n * size;
            found[i] = (q8 ? k->dot_q8 : k->dot_q4)(blocks, b, n);
            floats_of(s, row, &m, r + i, 0, n * 32); // and the scalar ones against what the format says
            double exact = 0, magnitude = 0;
            for (int c = 0; c < n * 32; c++) {
                double product = (double)row[c] * b[c / 32].scale * b[c / 32].q[c % 32];
                exact += product, magnitude += fabs(product);
            }
            if (!(fabs(found[i] - exact) <= 1e-6 * magnitude && fabs(z[i] - exact) <= 1e-6 * magnitude))
                failed = true, printf("%s dot of blocks, row %d: %g %g, expected %g\n", k->name, r + i, found[i], z[i], exact);
        }
    }
    free(x), free(b), free(b2), free((void *)m.data), free(tiles), free(tiles2), free(y), free(z), free(row);
}

static void attention_ops(const Kernels *k, const Kernels *s, bool half) {
    int n = 1 + below(70), head_dim = 2 * (1 + below(40)), width = round_up(head_dim), Q = 1 + below(4), room = round_up(n);
    float *q = floats(4 * head_dim), *p = floats(4 * room), *p2 = floats(4 * room);
    float *y = floats(4 * width), *z = floats(4 * width);
    void *keys = half ? (void *)shorts((size_t)room * head_dim, false) : floats((size_t)room * head_dim);
    void *values = half ? (void *)shorts((size_t)n * width, false) : floats((size_t)n * width);
    k->scores(p, room, q, head_dim, Q, keys, half, head_dim, n), s->scores(p2, room, q, head_dim, Q, keys, half, head_dim, n);
    for (int i = 0; i < Q; i++) {
        compare(k, "scores", p + i * room, p2 + i * room, n, 1e-6);
        memcpy(p + i * room, p2 + i * room, n * sizeof *p); // small differences would grow
        float most = k->largest(p + i * room, n);
        compare(k, "largest", &most, (float[]){s->largest(p2 + i * room, n)}, 1, 1e-6);
        float sum = k->exponentials(p + i * room, most, 3, n), sum2 = s->exponentials(p2 + i * room, most, 3, n);
        compare(k, "exponentials", p + i * room, p2 + i * room, n, 1e-6);
        compare(k, "sum of exponentials", &sum, &sum2, 1, 2e-6);
    }
    k->mix(y, p, room, Q, values, half, width, n), s->mix(z, p, room, Q, values, half, width, n);
    compare(k, "mix", y, z, Q * width, 2e-6);
    free(q), free(p), free(p2), free(y), free(z), free(keys), free(values);
}

int main(int argc, char **argv) {
    const Kernels *found[4];
    int n = find_kernels(found), rounds = argc > 2 ? atoi(argv[2]) : 1;
    state = argc > 1 ? (uint32_t)atoi(argv[1]) : 1;
    for (int i = 0; i < n; i++)
        for (int round = 0; round < rounds; round++) {
            rows_of_floats(found[i], &kernels_scalar);
            products_of_floats(found[i], &kernels_scalar);
            for (int half = 0; half < 2; half++) {
                products_of_blocks(found[i], &kernels_scalar, half);
                attention_ops(found[i], &kernels_scalar, half);
            }
        }
    for (int i = 0; i < n; i++) printf("%s ", found[i]->name);
    printf("%s\n", failed ? "differ" : "agree");
    return failed;
}

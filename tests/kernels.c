// Compares the kernels of each instruction set that this machine has with the scalar reference, op
// by op, on random sizes that leave remainders everywhere.
//
// Usage: kernels SEED ROUNDS  prints the differences that are too large; the exit code is then 1
//        kernels panels       compares the time of a panel of four tokens with that of the next
//                             larger panel
#define _DEFAULT_SOURCE 1 // POSIX in addition to C11
#include "../runtime/cpu/cpu.c"
#include "../runtime/cpu/products.c"
#include "../runtime/cpu/attention.c"
#include "../runtime/cpu/blocks.h"
#include <stdio.h>
#include <time.h>

enum { MOST = 700 };

static uint32_t state;
static bool failed;

static int below(int n) { return (int)((state = state * 1664525 + 1013904223) >> 8) % n; }
static float number(void) { return (below(1 << 20) - (1 << 19)) * 0x1p-19f; }

// Returns n random floats. The memory has their exact size, so that the sanitizer detects reads
// beyond the end.
static float *floats(size_t n) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = number();
    return x;
}

static uint16_t half_of(float f) {
    uint16_t half;
    llamac_reference.halves(&half, &f, 1);
    return half;
}

static uint16_t *shorts(size_t n, bool bf16) {
    uint16_t *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        float f = number();
        memcpy(&x[i], (char *)&f + 2, 2);
        if (!bf16) x[i] = half_of(f);
    }
    return x;
}

// Returns n random blocks of a quantised type.
static uint8_t *blocks_of(Type type, size_t n) {
    size_t size = block_size(type).bytes;
    uint8_t *bytes = malloc(n * size);
    for (size_t i = 0; i < n * size; i++) bytes[i] = below(256);
    for (size_t i = 0; i < n; i++)
        for (int j = 0; j < halves_of(type); j++)
            memcpy(bytes + i * size + halves_at(type) + 2 * j, (uint16_t[]){half_of(number())}, 2);
    return bytes;
}

static void compare(const Kernels *k, const char *op, const float *found, const float *expected,
                    size_t n, double most) {
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

static void compare_bytes(const Kernels *k, const char *op, const void *found, const void *expected,
                          size_t n) {
    if (!memcmp(found, expected, n)) return;
    failed = true;
    printf("%s %s: other bytes\n", k->name, op);
}

// Compares n blocks of activations. Kernels that compute a product and a sum in one instruction may
// round a number halfway between two integers differently, so one q of a block may differ by 1.
static void compare_blocks(const Kernels *k, const Block *found, const Block *expected, int n) {
    for (int b = 0; b < n; b++) {
        int sum = 0, half = 0, other = 0;
        for (int i = 0; i < 32; i++) {
            sum += found[b].q[i], half += i < 16 ? found[b].q[i] : 0;
            other += abs(found[b].q[i] - expected[b].q[i]);
        }
        if (found[b].scale == expected[b].scale && found[b].sum == sum && found[b].half == half
            && other <= 1)
            continue;
        failed = true;
        printf("%s quantize: %d numbers differ\n", k->name, other);
    }
}

static void rows_of_floats(const Kernels *k, const Kernels *s) {
    int n = 1 + below(MOST);
    float *x = floats(n), *w = floats(n), *y = floats(n), *z = floats(n);
    uint16_t *f16 = shorts(n, false), *bf16 = shorts(n, true), *narrow = shorts(n, false),
             *narrow2 = shorts(n, false);
    const void *rows[] = {[F32] = w, [F16] = f16, [BF16] = bf16};
    for (int type = 0; type <= BF16; type += type == F16 ? BF16 - F16 : 1) {
        if (!k->types[type].dot) continue;
        float found = k->types[type].dot(rows[type], x, n),
              expected = s->types[type].dot(rows[type], x, n);
        // the sum of n products below 1, of random sign, is of the order of sqrt(n)
        if (!(fabs(found - expected) <= 1e-6 * sqrt(n)))
            failed = true, printf("%s dot of type %d\n", k->name, type);
    }
    k->floats_f16(y, f16, n), s->floats_f16(z, f16, n), compare(k, "floats_f16", y, z, n, 0);
    k->floats_bf16(y, bf16, n), s->floats_bf16(z, bf16, n), compare(k, "floats_bf16", y, z, n, 0);
    // numbers that become normal halves, subnormal halves and infinity
    for (int i = 0; i < n; i++) x[i] *= ldexpf(1, below(50) - 30);
    k->halves(narrow, x, n), s->halves(narrow2, x, n),
        compare_bytes(k, "halves", narrow, narrow2, n * 2);
    memcpy(y, w, n * sizeof *y), memcpy(z, w, n * sizeof *z);
    for (int i = 0; i < n; i++) y[i] = z[i] = 100 * z[i];
    k->swiglu(y, x, n), s->swiglu(z, x, n), compare(k, "swiglu", y, z, n, 1e-6);
    int pairs = (n + 1) / 2; // of a head; the rotation has 4 numbers for each pair
    float *head = floats(2 * pairs), *head2 = malloc(2 * pairs * sizeof *head),
          *rotation = floats(4 * pairs);
    memcpy(head2, head, 2 * pairs * sizeof *head);
    k->rotate(head, rotation, 2 * pairs), s->rotate(head2, rotation, 2 * pairs);
    compare(k, "rotate", head, head2, 2 * pairs, 1e-6);
    k->rotate_halves(head, rotation, 2 * pairs), s->rotate_halves(head2, rotation, 2 * pairs);
    compare(k, "rotate_halves", head, head2, 2 * pairs, 1e-6);
    free(x), free(w), free(y), free(z), free(f16), free(bf16), free(narrow), free(narrow2),
        free(head), free(head2), free(rotation);
}

// Makes a random matrix. A group of INT8_GROUPS has 7 numbers or, if the columns allow it, a
// multiple of 32.
static Mat matrix(Type type, int rows, int cols) {
    Mat m = {.type = type,
             .rows = rows,
             .cols = cols,
             .group = cols % 32 == 0 && below(2) ? 32 * (1 + below(3)) : 7};
    size_t n = (size_t)rows * cols;
    bool blocks = block_size(type).numbers > 1;
    m.data = blocks        ? blocks_of(type, n / block_size(type).numbers)
             : type == F32 ? (void *)floats(n)
                           : (void *)shorts(n, type == BF16); // INT8_GROUPS uses half of the bytes
    m.scales = type == INT8_GROUPS ? floats(n / m.group + 1) : NULL;
    return m;
}

// Returns a random number of columns that a type can have.
static int columns_of(Type type) {
    int width = block_size(type).numbers;
    if (type == INT8_GROUPS && below(2)) width = 32;
    return width > 1 ? width * (1 + below(width == 32 ? 9 : 2)) : 1 + below(150);
}

// Tests products of a random matrix with T tokens, by kernels k and by the scalar kernels s. The
// matrix is in kept tiles, in tiles made for the product, or in the order of the file. The expected
// products are sums in double precision. Also compares the blocks of quantised activations.
static void matrix_products(const Kernels *k, const Kernels *s, Type type) {
    int cols = columns_of(type), n = cols / 32, most = block_size(type).numbers == 256 ? 30 : 40;
    int rows = 1 + below(2 * most), T = 1 + below(most);
    Mat m = matrix(type, rows, cols);
    bool blocks = is_quantised(&m);
    float *x = floats((size_t)T * cols), *row = floats(cols);
    for (int i = 0; i < 32 && i < cols && below(2); i++) x[i] = 0;
    Block *b = malloc((size_t)T * (n + 1) * sizeof *b);
    if (blocks) {
        Block *b2 = malloc((size_t)T * n * sizeof *b);
        k->quantize(b, x, T * n), s->quantize(b2, x, T * n), compare_blocks(k, b, b2, T * n);
        for (int i = 0; i < T * cols; i++) x[i] = b[i / 32].scale * b[i / 32].q[i % 32];
        free(b2);
    }
    for (int both = 0; both < 2; both++) { // kernels k, then the scalar ones
        const Kernels *used = both ? s : k;
        float *scratch = malloc(ROWS * (cols + 1 + T + used->tokens) * sizeof *scratch);
        Cpu cpu = {.kernels = used,
                   .panels = malloc((size_t)(T + used->tokens) * cols * sizeof(float)),
                   .pairs = malloc((size_t)(T + used->tokens) * (cols + 1) * sizeof(uint16_t))};
        int panels = (T + used->tokens - 1) / used->tokens;
        Worker me = {.cpu = &cpu, .scratch = scratch};
        Activations a = {
            .x = x, .panels = T > 1 ? cpu.panels : x, .blocks = b, .cols = cols, .T = T};
        pack_panels(&me, &a, 0, panels);
        float *out = floats((size_t)T * rows), *first = malloc((size_t)T * rows * sizeof *out);
        memcpy(first, out, (size_t)T * rows * sizeof *out);
        int height = tile_height(&m), kept = below(2) && has_tiles(used),
            as_file = !has_tiles(used);
        uint8_t *tiles = malloc((rows + height - 1) / height * tiles_size(&m));
        for (int r = 0; kept && r < rows; r += height)
            llamac_pack(used, tiles + r / height * tiles_size(&m), &m, r);
        m.tiles = kept ? tiles : NULL;
        Product p = {out, &m, true};
        bool pairs = used->bf16s && below(2);
        if (pairs) pack_pairs(&me, &a, 0, panels), a.pairs = cpu.pairs;
        // multiply the rows in two parts; the second may begin within a tile
        int middle = rows > TILE ? TILE * below(rows / TILE + 1) : 0;
        if (middle) llamac_multiply_rows(&me, &p, &a, 0, middle);
        if (middle < rows) llamac_multiply_rows(&me, &p, &a, middle, rows);
        for (int r = 0; r < rows; r++) {
            llamac_floats(s, row, &m, r, 0, cols);
            for (int t = 0; t < T; t++) {
                double exact = first[t * rows + r], magnitude = fabs(exact);
                for (int c = 0; c < cols; c++) {
                    double product = (double)row[c] * x[(size_t)t * cols + c];
                    exact += product, magnitude += fabs(product);
                }
                if (fabs(out[t * rows + r] - exact)
                    <= (pairs && type == BF16 ? 0x1p-8 : 1e-6) * magnitude)
                    continue;
                failed = true;
                printf(
                    "%s products of type %d, %s, row %d of %d, token %d of %d: %g, expected %g\n",
                    used->name, type,
                    as_file ? "rows"
                    : kept  ? "tiles kept"
                            : "tiles",
                    r, rows, t, T, out[t * rows + r], exact);
            }
        }
        free(cpu.panels), free(cpu.pairs), free(out), free(first), free(scratch), free(tiles);
    }
    free(x), free(row), free(b), free((void *)m.data), free((void *)m.scales);
}

// Tests that all instruction sets with tiles compute the same products of a quantised type, to the
// last bit. Sums of products of bytes are exact. After them, each row has the same multiplications
// and additions in the same order.
static void same_products(const Kernels *const *found, int n, Type type) {
    int cols = columns_of(type), rows = 1 + below(60), T = 1 + below(30);
    Mat m = matrix(type, rows, cols);
    size_t size = (size_t)T * rows;
    float *x = floats((size_t)T * cols), *out = malloc(size * sizeof *out),
          *first = malloc(size * sizeof *first);
    Block *blocks = malloc((size_t)T * (cols / 32) * sizeof *blocks);
    llamac_reference.quantize(blocks, x, T * (cols / 32));
    Activations a = {.blocks = blocks, .cols = cols, .T = T};
    for (int i = 0; i < n && is_quantised(&m) && has_tiles(found[i]); i++) {
        Cpu cpu = {.kernels = found[i]};
        Worker me = {.cpu = &cpu,
                     .scratch = malloc(ROWS * (cols + 1 + T + found[i]->tokens) * sizeof(float))};
        llamac_multiply_rows(&me, &(Product){i ? out : first, &m, false}, &a, 0, rows);
        if (i) compare_bytes(found[i], "products of bytes", out, first, size * sizeof *out);
        free(me.scratch);
    }
    free(x), free(out), free(first), free(blocks), free((void *)m.data), free((void *)m.scales);
}

// Tests swiglu_rows with many tokens. It must compute the same bits as separate steps: norm, the
// two products, swiglu, and the conversion of h. With swiglu_rows, the norm is part of the packing.
static void gated_of(const Kernels *k, Type type) {
    int cols = columns_of(type), quantised = block_size(type).numbers > 1;
    int rows = below(2) ? 32 * (1 + below(3)) : 1 + below(100), T = 2 + below(40),
        most = cols > rows ? cols : rows;
    size_t room = (size_t)(T + k->tokens) * (most + 1), n = (size_t)T * rows;
    int panels = (T + k->tokens - 1) / k->tokens, pairs = k->bf16s && type == BF16 && below(2);
    float *x = floats((size_t)T * cols), *weight = floats(cols), *h = floats(n), *h2 = floats(n),
          *joined = floats(n);
    float *xb = malloc((size_t)T * cols * sizeof *xb);
    Cpu cpu = {.kernels = k,
               .config = {.dim = cols, .hidden_dim = rows, .norm_eps = 1e-5f},
               .panels = calloc(room, 4),
               .blocks = calloc(room, sizeof(Block)),
               .gated_blocks = calloc(room, sizeof(Block)),
               .pairs = calloc(room, 2),
               .gated_pairs = calloc(room, 2)};
    Worker me = {.cpu = &cpu, .scratch = calloc(2 * ROWS * (most + 1 + k->tokens), sizeof(float))};
    Mat w = matrix(type, rows, cols), w2 = matrix(type, rows, cols);
    for (; is_grouped(&w2) != is_grouped(&w); w2 = matrix(type, rows, cols))
        free((void *)w2.data), free((void *)w2.scales);
    quantised |= is_grouped(&w);
    Activations apart = {.x = xb, .panels = cpu.panels, .blocks = cpu.blocks, .cols = cols, .T = T};
    if (pairs) apart.pairs = cpu.pairs;
    MatmulArgs a = {.products = {{joined, &w, false}, {h2, &w2, false}}, .n = 2, .in = apart};
    a.in.x = x, a.in.norm = weight, cpu.h = h, cpu.h2 = h2;
    a.writes = pairs ? PAIRS : rows % 32 == 0 && below(2) ? BLOCKS : 0;
    Task *make = quantised ? quantize_tokens : pairs ? pack_pairs : pack_panels;
    make(&me, &a.in, 0, quantised ? T : panels);
    swiglu_rows(&me, &a, 0, (rows + ROWS - 1) / ROWS);
    for (int t = 0; t < T; t++)
        normalize(&cpu, xb + (size_t)t * cols, x + (size_t)t * cols, weight, cols);
    make(&me, &apart, 0, quantised ? T : panels);
    llamac_multiply_rows(&me, &(Product){h, &w, false}, &apart, 0, rows),
        llamac_multiply_rows(&me, &(Product){h2, &w2, false}, &apart, 0, rows);
    swiglu_tokens(&me, NULL, 0, T);
    Activations next = {.x = h, .cols = rows, .T = T};
    if (a.writes == PAIRS) {
        pack_pairs(&me, &next, 0, panels);
        compare_bytes(k, "pairs of swiglu", cpu.gated_pairs, cpu.pairs, n / T / 2 * 2 * T * 2);
    } else if (a.writes == BLOCKS) {
        quantize_tokens(&me, &next, 0, T);
        compare_bytes(k, "blocks of swiglu", cpu.gated_blocks, cpu.blocks, n / 32 * sizeof(Block));
    } else compare_bytes(k, "swiglu of products", joined, h, n * sizeof *h);
    free(x), free(weight), free(h), free(h2), free(joined), free(xb), free(cpu.panels),
        free(cpu.blocks), free(cpu.gated_blocks);
    free(cpu.pairs), free(cpu.gated_pairs), free(me.scratch), free((void *)w.data),
        free((void *)w.scales);
    free((void *)w2.data), free((void *)w2.scales);
}

// Tests swiglu_rows with one token, one item of rows at a time. It must write h in blocks, and
// nothing after them.
static void gated_of_one(const Kernels *k, Type type) {
    int cols = columns_of(type), quantised = block_size(type).numbers > 1;
    int rows = 32 * (1 + below(9));
    float *x = floats(cols), *weight = floats(cols), *h = floats(rows), *h2 = floats(rows);
    Cpu cpu = {.kernels = k,
               .config = {.dim = cols, .norm_eps = 1e-5f},
               .gated_blocks = malloc(rows / 32 * sizeof(Block))};
    Worker me = {.cpu = &cpu,
                 .x = floats(cols),
                 .blocks = malloc((cols / 32 + 1) * sizeof(Block)),
                 .scratch = floats(2 * ROWS * (cols + 1 + k->tokens))};
    Mat w = matrix(type, rows, cols), w2 = matrix(type, rows, cols);
    for (; is_grouped(&w2) != is_grouped(&w); w2 = matrix(type, rows, cols))
        free((void *)w2.data), free((void *)w2.scales);
    quantised |= is_grouped(&w);
    MatmulArgs a = {.products = {{h, &w, false}, {h2, &w2, false}},
                    .n = 2,
                    .reads = quantised ? BLOCKS : PANELS,
                    .writes = BLOCKS,
                    .in = {.x = x, .norm = weight, .cols = cols, .T = 1}};
    for (int i = 0; i < (rows + ROWS - 1) / ROWS; i++) swiglu_rows(&me, &a, i, i + 1);
    Block *expected = malloc(rows / 32 * sizeof *expected);
    k->quantize(expected, h, rows / 32);
    compare_bytes(k, "blocks of swiglu of one token", cpu.gated_blocks, expected,
                  rows / 32 * sizeof *expected);
    free(x), free(weight), free(h), free(h2), free(expected), free(cpu.gated_blocks), free(me.x),
        free(me.blocks), free(me.scratch);
    free((void *)w.data), free((void *)w.scales), free((void *)w2.data), free((void *)w2.scales);
}

// Returns n random numbers in a type of the KV cache.
static void *numbers(Type type, size_t n) {
    if (type != INT8_GROUPS) return type == F16 ? (void *)shorts(n, false) : floats(n);
    int8_t *bytes = malloc(n);
    for (size_t i = 0; i < n; i++) bytes[i] = below(255) - 127;
    return bytes;
}

static void attention_ops(const Kernels *k, const Kernels *s, Type type) {
    int n = 1 + below(70), head_dim = 2 * (1 + below(40)), width = round_up_to_tile(head_dim),
        Q = 1 + below(4), room = round_up_to_tile(n);
    float *q = floats(4 * head_dim), *p = floats(4 * room), *p2 = floats(4 * room);
    float *y = floats(4 * width), *z = floats(4 * width);
    void *keys = numbers(type, (size_t)room * head_dim), *values = numbers(type, (size_t)n * width);
    float *scales = floats(n);
    double most = type == INT8_GROUPS ? 127 * 2e-6 : 2e-6;
    Attention a = {.q = q,
                   .p = p,
                   .out = y,
                   .keys = keys,
                   .values = values,
                   .q_stride = head_dim,
                   .p_stride = room,
                   .n_queries = Q,
                   .head_dim = head_dim,
                   .width = width,
                   .n = n,
                   .type = type},
              b = a;
    b.p = p2, b.out = z;
    k->scores(&a), s->scores(&b);
    for (int i = 0; i < Q; i++) {
        compare(k, "scores", p + i * room, p2 + i * room, n, most);
        k->multiply(p + i * room, scales, n), s->multiply(p2 + i * room, scales, n);
        compare(k, "multiply", p + i * room, p2 + i * room, n, most);
        memcpy(p + i * room, p2 + i * room, n * sizeof *p); // small differences would grow
        float largest = k->largest(p + i * room, n);
        compare(k, "largest", &largest, (float[]){s->largest(p2 + i * room, n)}, 1, 1e-6);
        float sum = k->exponentials(p + i * room, largest, 3, n),
              sum2 = s->exponentials(p2 + i * room, largest, 3, n);
        compare(k, "exponentials", p + i * room, p2 + i * room, n, 1e-6);
        compare(k, "sum of exponentials", &sum, &sum2, 1, 2e-6);
    }
    b.p = p;
    k->mix(&a), s->mix(&b);
    compare(k, "mix", y, z, Q * width, 2e-6);
    free(q), free(p), free(p2), free(y), free(z), free(keys), free(values), free(scales);
}

// Compares panel_product with the scalar one, which takes one query at a time.
static void panels_of(const Kernels *k, const Kernels *s) {
    int cols = 1 + below(90), tiles = 1 + below(6), Q = k->panel_queries,
        apart = tiles * TILE + below(20);
    bool keys = below(2); // w is laid out like keys, else like values
    Type type = (Type[]){F32, F16, INT8_GROUPS}[below(3)];
    size_t next = keys ? (size_t)cols * TILE : TILE, column = keys ? TILE : (size_t)tiles * TILE;
    float *x = floats((size_t)cols * Q), *y = floats((size_t)Q * apart);
    void *w = numbers(type, (size_t)cols * tiles * TILE);
    float *z = malloc((size_t)Q * apart * sizeof *z), *one = malloc(cols * sizeof *one);
    memcpy(z, y, (size_t)Q * apart * sizeof *z);
    PanelProduct p = {y, w, x, apart, next, column, tiles, cols, below(2), type};
    k->panel_product(&p);
    for (int q = 0; q < Q; q++) {
        for (int c = 0; c < cols; c++) one[c] = x[c * Q + q];
        p.y = z + (size_t)q * apart, p.x = one;
        s->panel_product(&p);
    }
    compare(k, "panel_product", y, z, (size_t)Q * apart, 1e-6);
    free(w), free(x), free(y), free(z), free(one);
}

// Returns number d of the key or the value of a position, as the cache of the only head stores it.
static double kept_number(const Cpu *cpu, bool key, int pos, int d) {
    const Page *page = cpu->caches[0]->pages[pos / PAGE];
    int slot = pos % PAGE;
    size_t at = key ? slot / TILE * TILE * cpu->config.head_dim + d * TILE + slot % TILE
                    : slot * cpu->value_width + d;
    const void *w = key ? page->keys : page->values;
    if (cpu->kv_type == F16) return half_to_float(((const uint16_t *)w)[at]);
    if (cpu->kv_type == F32) return ((const float *)w)[at];
    return (key ? page->key_scales : page->value_scales)[slot] * (double)((const int8_t *)w)[at];
}

// Computes out (head_dim,) = attention of q to n positions in double precision. `rounded`: with the
// keys and values that the cache stores, else with the original ones.
static void attention_of(const Cpu *cpu, double *out, const float *q, int n, bool rounded) {
    int dim = cpu->config.head_dim;
    double sum = 0;
    memset(out, 0, dim * sizeof *out);
    for (int i = 0; i < n; i++) {
        double score = 0;
        for (int d = 0; d < dim; d++)
            score += q[d] * (rounded ? kept_number(cpu, true, i, d) : cpu->k[i * dim + d]);
        double weight = exp(score / sqrt(dim));
        for (int d = 0; d < dim; d++)
            out[d] += weight * (rounded ? kept_number(cpu, false, i, d) : cpu->v[i * dim + d]);
        sum += weight;
    }
    for (int d = 0; d < dim; d++) out[d] /= sum;
}

// Tests attention of the last T of n tokens with a KV cache of the type. Two query heads share a KV
// head. The cache changes numbers of at most 1 by at most `unit`. This changes a score by at most
// d = unit |q|_1 / sqrt(head_dim), and its weight by a factor of at most exp(2 d).
static void kept(const Kernels *k, Type type) {
    int n = 1 + below(below(4) ? 70 : 1300), T = n < 9 || below(2) ? 1 : 2 + below(8);
    int dim = 2 * (1 + below(40)), width = round_up_to_tile(dim);
    double unit = type == F32 ? 0 : type == F16 ? 0x1p-11 : 0.5001 / 127, exact[80], whole[80];
    float *out = floats((size_t)T * 2 * dim), *q = floats((size_t)n * 2 * dim);
    ThreadPool pool = {.n_threads = 1 + below(3)}; // three threads split the ranges
    Cpu cpu = {.kernels = k,
               .max_positions = n,
               .kv_type = type,
               .value_width = width,
               .pool = pool,
               .k = floats((size_t)n * dim),
               .config = {.n_layers = 1,
                          .n_heads = 2,
                          .n_kv_heads = 1,
                          .head_dim = dim,
                          .q_dim = 2 * dim,
                          .kv_dim = dim},
               .v = floats((size_t)n * dim),
               .n_rotations = n};
    make_attention(&cpu);
    Cache *cache = llamac_cpu_new_cache(&cpu.ops);
    if (!llamac_cpu_reserve(&cpu.ops, cache, 0, n)) failed = true;
    const Cache **few = cpu.caches, *caches[1300];
    int *first = cpu.positions, positions[1300];
    cpu.caches = caches, cpu.positions = positions;
    Worker me = {.cpu = &cpu, .scratch = malloc(scratch_size(&cpu, dim) * sizeof(float))};
    for (int i = 0; i < n * 2 * dim; i++) q[i] *= 4; // gives few positions most of the weight
    for (int t = 0; t < n; t++) {
        caches[t] = cache, positions[t] = t;
        store_in_cache(&cpu, 0, 0, t, me.scratch);
    }
    cpu.caches = few, cpu.positions = first;
    AttentionArgs a = {out, NULL, 0};
    cpu.q = q;
    llamac_plan_attention(&cpu, &(Batch){.T = T, .runs = &(Run){cache, 0, T, n - T}, .n_runs = 1});
    attention_items(&me, &a, 0, cpu.n_items);
    if (cpu.split) merge_partials(&me, &a, 0, 2 * T);
    for (int i = 0; i < 2 * T; i++, q += dim) {
        double size = 0;
        for (int d = 0; d < dim; d++) size += fabs(q[d]);
        double most = unit + exp(2 * unit * size / sqrt(dim)) - 1;
        attention_of(&cpu, whole, q, n - T + 1 + i / 2, false),
            attention_of(&cpu, exact, q, n - T + 1 + i / 2, true);
        for (int d = 0; d < dim; d++) {
            double found = out[i * dim + d];
            if (fabs(found - exact[d]) <= 1e-5 && fabs(found - whole[d]) <= most + 1e-5) continue;
            failed = true;
            printf("%s cache of type %d: %g, rounded %g, in full %g\n", k->name, type, found,
                   exact[d], whole[d]);
        }
    }
    llamac_cpu_free_cache(&cpu.ops, cache), llamac_free_pages(&cpu);
    for (int i = 0; i < cpu.n_memory; i++) free(cpu.memory[i]);
    free(cpu.memory), free(out), free(cpu.q), free(cpu.k), free(cpu.v), free(me.scratch);
}

// Tests the example in kernels.h: the places of row 18, column 37 of a Q8_0 matrix with 64 columns
// and of its scale.
static void example_of_a_tile(const Kernels *k) {
    Mat m = {.type = Q8_0, .rows = 32, .cols = 64, .data = calloc(32 * 2, 34)};
    uint8_t *tiles = malloc(2 * tiles_size(&m)), *block = (uint8_t *)row_of(&m, 18) + 34;
    block[0] = 7, block[2 + 5] = 99;
    for (int r = 0; r < 32; r += TILE) llamac_pack(k, tiles + r / TILE * tiles_size(&m), &m, r);
    if (tiles[1636] != 7 || (tiles[1737] & 127) != 99)
        failed = true, printf("%s: not the tile that kernels.h shows\n", k->name);
    free((void *)m.data), free(tiles);
}

// Returns the CPU time, in seconds, of REPEATS products of a panel of T tokens with two rows of
// tiles that stay in the caches: the minimum of many tries.
static double panel_seconds(const Kernels *k, Type type, int T) {
    enum { COLS = 512, TRIES = 300, REPEATS = 20 };
    Mat m = {.type = type, .rows = ROWS, .cols = COLS};
    uint8_t *tiles = calloc(2, tiles_size(&m));
    float *x = floats((size_t)COLS * T), *y = floats((size_t)ROWS * T);
    TileProduct p = {.y = y, .tiles = tiles, .groups = 2, .x = x, .cols = COLS, .T = T};
    p.prefetch = (Prefetch){tiles, 0, (const char *)y, -128, 1023};
    double least = INFINITY;
    for (int i = 0; i < TRIES; i++) {
        struct timespec before, after;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
        for (int j = 0; j < REPEATS; j++) k->types[type].product(&p);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
        least =
            fmin(least, (after.tv_sec - before.tv_sec) + 1e-9 * (after.tv_nsec - before.tv_nsec));
    }
    free(tiles), free(x), free(y);
    return least;
}

// Prints for each instruction set the time of a panel of four tokens divided by that of the next
// larger panel, in F32 and BF16.
static void compare_panels(void) {
    const Kernels *found[MAX_KERNELS];
    int n = llamac_find_kernels(found);
    for (int i = 0; i < n; i++) {
        int next = found[i]->tokens < 8 ? found[i]->tokens : 8;
        if (!has_tiles(found[i])) continue;
        printf("%s %d", found[i]->name, next);
        for (int j = 0; j < 2; j++) {
            Type type = j ? BF16 : F32;
            printf(" %.3f", panel_seconds(found[i], type, 4) / panel_seconds(found[i], type, next));
        }
        printf("\n");
    }
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "panels")) {
        compare_panels();
        return 0;
    }
    const Kernels *found[MAX_KERNELS];
    Type types[] = {F32, F16, BF16, Q8_0, Q4_0, INT8_GROUPS, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K};
    enum { TYPES = sizeof types / sizeof *types };
    int n = llamac_find_kernels(found), rounds = argc > 2 ? atoi(argv[2]) : 1;
    state = argc > 1 ? (uint32_t)atoi(argv[1]) : 1;
    for (int i = 0; i < n; i++)
        for (int round = 0; round < rounds; round++) {
            rows_of_floats(found[i], &llamac_reference);
            for (int j = 0; j < (round % 2 ? 6 : TYPES); j++)
                matrix_products(found[i], &llamac_reference, types[j]);
            for (int j = 0; j < 3; j++)
                attention_ops(found[i], &llamac_reference, (Type[]){F32, F16, INT8_GROUPS}[j]);
            kept(found[i], (Type[]){F32, F16, INT8_GROUPS}[round % 3]);
            panels_of(found[i], &llamac_reference);
        }
    for (int i = 0; i < n; i++)
        for (int round = 0; round < rounds; round++)
            for (int j = 0; j < (round % 2 ? 6 : TYPES); j++) {
                gated_of_one(found[i], types[j]);
                if (has_tiles(found[i])) gated_of(found[i], types[j]);
            }
    for (int round = 0; round < rounds; round++)
        for (int j = 3; j < TYPES; j++) same_products(found, n, types[j]);
    for (int i = 0; i < n && has_tiles(found[i]); i++) example_of_a_tile(found[i]);
    for (int i = 0; i < n; i++) printf("%s ", found[i]->name);
    printf("%s\n", failed ? "differ" : "agree");
    return failed;
}

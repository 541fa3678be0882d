// The Backend of the CPU. Work is handed to threads (team.h) by rows, and every number is computed by one thread in one
// order, so results do not depend on how many threads there are. The arithmetic is in kernels.h, and in vectors in
// simd.h, which is compiled for each instruction set; the best one that the machine has is taken at the start.
#define _DEFAULT_SOURCE // POSIX beside C11
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#include "../backend.h"
#include "kernels.h"

#if defined(__x86_64__)
#include "avx2.h"
#include "avx512.h"
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#include "neon.h"
#if defined(__ARM_FEATURE_DOTPROD) // the compiler takes it for granted, as on Apple's
#define DOT_PRODUCT
#elif defined(__linux__) && !defined(__clang__)
#define DOT_PRODUCT __attribute__((target("arch=armv8.2-a+dotprod")))
#elif defined(__linux__) && __clang_major__ >= 16 // older ones know the instruction only where it may be used everywhere
#define DOT_PRODUCT __attribute__((target("dotprod")))
#endif
#ifdef DOT_PRODUCT
#include "neon.h"
#endif
#endif
#ifndef PAUSE
#define PAUSE() (void)0
#endif
#include "team.h"
#include "memory.h"

// What this machine can run, the best first.
static int find_kernels(const Kernels *found[5]) {
    int n = 0;
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); // all such have f16c
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vnni")) {
#ifdef BF16_TARGET
        if (__builtin_cpu_supports("avx512bf16")) found[n++] = with_bf16();
#endif
        found[n++] = &kernels_avx512;
    }
    if (avx2) found[n++] = &kernels_avx2;
#elif defined(__aarch64__)
#if defined(__ARM_FEATURE_DOTPROD)
    found[n++] = &kernels_neondot;
#elif defined(DOT_PRODUCT)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found[n++] = &kernels_neondot;
#endif
    found[n++] = &kernels_neon;
#endif
    found[n++] = &kernels_scalar;
    return n;
}

// The best kernels, or those that the environment variable LLAMAC_ISA names; NULL if the machine has them not.
static const Kernels *choose_kernels(void) {
    const Kernels *found[5];
    const char *name = getenv("LLAMAC_ISA");
    int n = find_kernels(found);
    for (int i = 0; i < n; i++)
        if (!name || !*name || !strcmp(name, found[i]->name)) return found[i];
    return NULL;
}

// For one thread of the program.
static const Kernels *host_kernels(void) {
    static const Kernels *chosen;
    if (!chosen) chosen = choose_kernels();
    return chosen ? chosen : (chosen = &kernels_scalar);
}

float cpu_largest(const float *x, int n) { return host_kernels()->largest(x, n); }

float cpu_exponentials(float *x, float most, float scale, int n) { return host_kernels()->exponentials(x, most, scale, n); }

typedef struct { int layer, T; } RopeArgs;

struct Cpu {
    Backend ops;
    Config config;
    const Kernels *kernels;
    int positions;
    bool half;                      // the cache is in half precision rather than float32
    int value_width;                // head_dim rounded up to TILE
    void *keys;                     // (n_layers, n_kv_heads, ceil(positions / TILE), head_dim, TILE)
    void *values;                   // (n_layers, n_kv_heads, positions, value_width)
    double *frequencies;            // (head_dim / 2,)
    float *rotation;                // (positions, 2, head_dim): cosines, sines, for Kernels' rotate
    int rotations;                  // positions of it computed so far
    float *panels;                  // (columns, tokens) one after the other: activations of a chunk, see kernels.h
    Block *blocks, *gated_blocks;   // (chunk, columns / 32): in 8 bits; those that gated_rows makes, while it reads the others
    uint16_t *pairs, *gated_pairs;  // (columns / 2, tokens, 2) one after the other: in BF16; likewise
    float *q, *k, *v;               // (chunk, dim), (chunk, kv_dim) twice: of attention
    float *h, *h2;                  // (chunk, hidden_dim): of feed_forward
    bool precise;                   // all logits are asked for: BF16 is multiplied in float32
    Model *model;                   // whose weights are put in tiles
    const void *tiles;              // where they are then; NULL before
    size_t tiles_size;              // bytes
    int decoded;                    // calls with one token so far
    void **memory;                  // what alloc gave out
    int n_memory;

    Team team;                      // its steps are those of one call of forward; those for one token stay for the next
    bool collecting;                // between begin and end
    bool recorded;                  // the steps are those for one token
    const Mat *table;               // where embed got that token's row from, and
    float *embedded;                // where it went
    int pos;                        // of the call's first token
};

enum {
    CHUNK = 128,         // tokens: more of them no longer make a product faster
    LEAST_PAIRS = 16,    // tokens for which BF16 weights are multiplied with activations in BF16
    PATIENT_TOKENS = 16, // decoded before the weights are put in tiles
    MOST_STEPS = 24,     // of a layer
};

// Appends a step for n items, each of about `cost` multiplications; outside of a call of forward, runs it.
static void add(Cpu *cpu, Task *task, const void *args, size_t size, int n, int64_t cost) {
    if (!cpu->collecting) cpu->team.n_steps = 0, cpu->recorded = false;
    Step *step = &cpu->team.steps[cpu->team.n_steps++];
    *step = (Step){task, n, cost, {0}};
    memcpy(step->args, args, size);
    if (!cpu->collecting) run_steps(&cpu->team), cpu->team.n_steps = 0;
}

// ----------------------------------------------------------------------------
// Rows of any type

static void floats_q8_0(float *out, const uint8_t *row, int n) {
    for (; n > 0; n -= 32, row += 34, out += 32) {
        uint16_t scale;
        memcpy(&scale, row, 2);
        float d = half_to_float(scale);
        for (int i = 0; i < 32; i++) out[i] = d * (int8_t)row[2 + i];
    }
}

static void floats_q4_0(float *out, const uint8_t *row, int n) {
    for (; n > 0; n -= 32, row += 18, out += 32) {
        uint16_t scale;
        memcpy(&scale, row, 2);
        float d = half_to_float(scale);
        for (int i = 0; i < 16; i++) out[i] = d * ((row[2 + i] & 15) - 8);
        for (int i = 0; i < 16; i++) out[16 + i] = d * ((row[2 + i] >> 4) - 8);
    }
}

// Groups run over the whole matrix: a row may begin and end inside one.
static void floats_int8_groups(float *out, const Mat *m, int64_t first, int n) {
    const int8_t *q = (const int8_t *)m->data + first;
    for (int i = 0; i < n;) {
        int64_t group = (first + i) / m->group;
        int64_t left = (group + 1) * m->group - (first + i); // numbers of the row's part in this group
        int end = left < n - i ? i + (int)left : n;
        float scale;
        memcpy(&scale, (const char *)m->scales + 4 * group, 4);
        for (; i < end; i++) out[i] = scale * q[i];
    }
}

// n numbers of row r, from column c on, as floats. Blocks begin at c.
static void floats_of(const Kernels *k, float *out, const Mat *m, int64_t r, int c, int n) {
    const uint8_t *data = m->data;
    int64_t first = r * m->cols + c;
    switch (m->type) {
    case F32: memcpy(out, data + 4 * first, n * sizeof(float)); break;
    case F16: k->floats_f16(out, data + 2 * first, n); break;
    case BF16: k->floats_bf16(out, data + 2 * first, n); break;
    case Q8_0: floats_q8_0(out, data + first / 32 * 34, n); break;
    case Q4_0: floats_q4_0(out, data + first / 32 * 18, n); break;
    case INT8_GROUPS: floats_int8_groups(out, m, first, n); break;
    }
}

static bool is_quantised(const Mat *m) { return m->type == Q8_0 || m->type == Q4_0; }

// What is packed as one: a block, two numbers of BF16, or a float, which other types become. Its bytes; how many a row has.
static int unit_size(const Mat *m) { return m->type == Q8_0 ? 34 : m->type == Q4_0 ? 18 : 4; }
static int units(const Mat *m) { return is_quantised(m) ? m->cols / 32 : m->type == BF16 ? (m->cols + 1) / 2 : m->cols; }

// Where row r lies in the file; of no INT8_GROUPS, which have no rows there. Behind the last, where the matrix ends.
static const uint8_t *row_of(const Mat *m, int r) {
    size_t size = is_quantised(m) ? (size_t)units(m) * unit_size(m) : (m->type == F32 ? 4 : 2) * (size_t)m->cols;
    return (const uint8_t *)m->data + (r < m->rows ? r : m->rows) * size;
}

// Bytes of a row of tiles: of TILE rows of the matrix.
static size_t tiles_size(const Mat *m) { return (size_t)units(m) * unit_size(m) * TILE; }

// n units of row r, from unit u on.
static void copy_units(const Kernels *k, uint8_t *out, const Mat *m, int r, int u, int n) {
    const uint8_t *data = m->data;
    size_t size = unit_size(m), bytes = n * size;
    if (m->type == BF16) {
        size_t left = 2 * ((size_t)m->cols - 2 * u); // of the row; an odd number of columns ends in half a unit
        memset(out, 0, bytes);
        memcpy(out, data + 2 * ((size_t)r * m->cols + 2 * u), bytes < left ? bytes : left);
    } else if (m->type == F32 || is_quantised(m)) memcpy(out, data + ((size_t)r * units(m) + u) * size, bytes);
    else floats_of(k, (float *)out, m, r, u, n);
}

// A row of tiles: of up to TILE rows from r on; rows beyond the last are zero.
static void pack(const Kernels *k, uint8_t *tiles, const Mat *m, int r) {
    enum { STRIP = 64 }; // units
    void (*pack_rows)(uint8_t *, const uint8_t *, size_t, int) =
        m->type == Q8_0 ? k->pack_q8 : m->type == Q4_0 ? k->pack_q4 : NULL;
    int rows = m->rows - r < TILE ? m->rows - r : TILE, n = units(m);
    size_t size = unit_size(m), stride = n * size;
    if (rows == TILE && (m->type == F32 || is_quantised(m) || (m->type == BF16 && m->cols % 2 == 0))) {
        const uint8_t *data = (const uint8_t *)m->data + r * stride;
        pack_rows ? pack_rows(tiles, data, stride, n) : k->transpose(tiles, data, stride, TILE, n);
        return;
    }
    _Alignas(64) uint8_t strip[TILE * STRIP * 34] = {0};
    for (int u = 0; u < n; u += STRIP, tiles += TILE * STRIP * size) {
        int part = n - u < STRIP ? n - u : STRIP;
        for (int i = 0; i < rows; i++) copy_units(k, strip + i * STRIP * size, m, r + i, u, part);
        pack_rows ? pack_rows(tiles, strip, STRIP * size, part) : k->transpose(tiles, strip, STRIP * size, TILE, part);
    }
}

// ----------------------------------------------------------------------------
// The operations; backend.h says what each computes

static void embed(Backend *b, float *x, const Mat *table, const int *tokens, int T) {
    Cpu *cpu = (Cpu *)b;
    cpu->table = table, cpu->embedded = x;
    for (int t = 0; t < T; t++) floats_of(cpu->kernels, x + (size_t)t * table->cols, table, tokens[t], 0, table->cols);
}

static void normalize(const Cpu *cpu, float *out, const float *x, const float *weight) {
    int n = cpu->config.dim;
    float scale = 1.0f / sqrtf(cpu->kernels->dot_f32(x, x, n) / n + cpu->config.norm_eps);
    for (int i = 0; i < n; i++) out[i] = weight[i] * (scale * x[i]);
}

// One matrix product: out (T, w.rows) = x (T, w.cols) w^T, or out += that.
typedef struct {
    float *out;
    const Mat *w;
    bool add;
} Product;

// Items of a product are ROWS rows.
enum { ROWS = 2 * TILE };

// What products read: x (T, cols), or norm(x), and what was made of it where the products want that.
typedef struct {
    const float *x, *norm;   // norm: (cols,), the weights of an RMSNorm; NULL for none
    const float *panels;     // of one token they are what is read
    const uint16_t *pairs;   // NULL: BF16 is multiplied in float32
    const Block *blocks;
    int cols, T;
} Activations;

typedef struct {
    Product products[3];
    int n;
    Activations in;
    bool floats, quantised; // some products want x as it is, some as blocks; others in BF16
    bool made;           // what they read, by the step before
    bool blocks_wanted, pairs_wanted; // of gated_rows, by the step behind
} MatmulArgs;
_Static_assert(sizeof(MatmulArgs) <= ARGS, "room in a step");

// Tokens of the next panel when T are left: a panel has as many as the kernels take at once, or 1, 2, 4 or 8; of pairs
// at least 4.
static int panel_width(const Kernels *k, int T, bool pairs) {
    int width = pairs ? 4 : 1;
    while (width < T && width < k->tokens) width *= 2;
    return width < k->tokens ? width : k->tokens;
}

static void put_rows(float *out, const float *y, int n, bool add) {
    for (int i = 0; i < n; i++) out[i] = add ? out[i] + y[i] : y[i];
}

// A row as it lies in the file, of INT8_GROUPS as floats, with token t.
static float row_times_token(const Kernels *k, Type type, const uint8_t *row, const Activations *a, int t) {
    const float *x = a->panels + (size_t)t * a->cols;
    const Block *blocks = a->blocks + (size_t)t * (a->cols / 32);
    switch (type) {
    case F16: return k->dot_f16(row, x, a->cols);
    case BF16: return k->dot_bf16(row, x, a->cols);
    case Q8_0: return k->dot_q8(row, blocks, a->cols / 32);
    case Q4_0: return k->dot_q4(row, blocks, a->cols / 32);
    default: return k->dot_f32(row, x, a->cols);
    }
}

// Rows r..end-1 without tiles: with one token, or with any number by kernels that have no tiles, whose panels are rows of x.
static void rows_times_tokens(const Kernels *k, const Product *p, const Activations *a, int r, int end, float *scratch) {
    const Mat *w = p->w;
    for (; r < end; r++) {
        const uint8_t *row = w->type == INT8_GROUPS ? (uint8_t *)scratch : row_of(w, r);
        if (w->type == INT8_GROUPS) floats_of(k, scratch, w, r, 0, w->cols);
        for (int t = 0; t < a->T; t++)
            put_rows(p->out + (size_t)t * w->rows + r, (float[]){row_times_token(k, w->type, row, a, t)}, 1, p->add);
    }
}

// What is called for during the product of a panel: of kept tiles those that lie behind, with each panel its part, for the
// next products; and where the results go, `stride` bytes from token to token.
static Ahead ahead_of(const Mat *w, const uint8_t *tiles, int n, int T, int t, int width, const void *out, size_t stride) {
    size_t size = n * tiles_size(w);
    Ahead ahead = {tiles, 0, out, (int64_t)stride - 128, 0};
    if (w->tiles) ahead.at = tiles + size + size / T * t, ahead.step = (int)(size * width / T / ((w->cols + 1) / 2));
    while (2 * width * 2 * (ahead.mask + 1) <= (w->cols + 1) / 2) ahead.mask = 2 * ahead.mask + 1;
    return ahead;
}

// y (width, ROWS) = tokens t.. of x, a panel of them, times n <= 2 rows of tiles; for one token y (n TILE,), and n may be any
// number.
static void times_tiles(const Kernels *k, float *y, const Mat *w, const uint8_t *tiles, int n, const Activations *a, int t,
                        int width, Ahead ahead) {
    int blocks = w->cols / 32, left = a->T - t < width ? a->T - t : width;
    if (w->type == Q8_0) { k->tiles_q8(y, tiles, n, a->blocks + (size_t)t * blocks, blocks, left); return; }
    if (w->type == Q4_0) { k->tiles_q4(y, tiles, n, a->blocks + (size_t)t * blocks, blocks, left); return; }
    size_t first = (size_t)t * w->cols;
    if (w->type != BF16) k->tiles_f32(y, tiles, n, a->panels + first, w->cols, width, ahead);
    else if (!a->pairs) k->tiles_bf16(y, tiles, n, a->panels + first, w->cols, width, ahead);
    else k->tiles_bf16_pairs(y, tiles, n, a->pairs + (size_t)t * 2 * ((w->cols + 1) / 2), w->cols, width, ahead);
}

// Rows r..end-1 in tiles: those kept, or made in `room`.
static const uint8_t *tiles_of(const Kernels *k, const Mat *w, int r, int end, uint8_t *room) {
    if (w->tiles) return (const uint8_t *)w->tiles + r / TILE * tiles_size(w);
    for (uint8_t *tiles = room; r < end; r += TILE, tiles += tiles_size(w)) pack(k, tiles, w, r);
    return room;
}

// Up to ROWS rows with many tokens.
static void tiles_times_tokens(const Kernels *k, const Product *p, const Activations *a, int r, int end, float *scratch) {
    const Mat *w = p->w;
    int n = (end - r + TILE - 1) / TILE;
    float *y = scratch; // (tokens of a panel, ROWS)
    const uint8_t *tiles = tiles_of(k, w, r, end, (uint8_t *)(y + k->tokens * ROWS));
    for (int t = 0, width; t < a->T; t += width) {
        width = panel_width(k, a->T - t, w->type == BF16 && a->pairs);
        float *out = p->out + (size_t)t * w->rows + r;
        int left = a->T - t < width ? a->T - t : width;
        for (int i = 0; i < left && is_quantised(w); i++)
            for (int j = 0; j < end - r; j += TILE) __builtin_prefetch(out + (size_t)i * w->rows + j, 1);
        Ahead ahead = ahead_of(w, tiles, n, a->T, t, width, out, w->rows * sizeof(float));
        times_tiles(k, y, w, tiles, n, a, t, width, ahead);
        for (int i = 0; i < left; i++) put_rows(out + (size_t)i * w->rows, y + i * ROWS, end - r, p->add);
    }
}

// Rows r..end-1 in kept tiles: one long stream of memory. What fills its tiles goes to its place without a detour.
static void tiles_times_token(const Kernels *k, const Product *p, const Activations *a, int r, int end, float *scratch) {
    const uint8_t *tiles = (uint8_t *)p->w->tiles + r / TILE * tiles_size(p->w);
    int whole = p->add ? 0 : (end - r) / TILE, rest = (end - r + TILE - 1) / TILE - whole;
    if (whole) times_tiles(k, p->out + r, p->w, tiles, whole, a, 0, 1, (Ahead){0});
    if (!rest) return;
    times_tiles(k, scratch, p->w, tiles + whole * tiles_size(p->w), rest, a, 0, 1, (Ahead){0});
    put_rows(p->out + r + whole * TILE, scratch, end - r - whole * TILE, p->add);
}

// What the products of one token read, every member makes for itself: it takes no longer than waiting for another that does.
static Activations prepared(Member *self, const MatmulArgs *a) {
    Activations in = a->in;
    if (in.T > 1 || a->made) return in;
    if (in.norm) in.x = in.panels = self->x;
    in.blocks = self->blocks;
    if (self->prepared) return in;
    if (in.norm) normalize(self->cpu, self->x, a->in.x, in.norm);
    if (a->quantised) self->cpu->kernels->quantize(self->blocks, in.x, in.cols / 32);
    self->prepared = true;
    return in;
}

// Rows r..end-1 of one product; r is a multiple of TILE.
static void some_rows(Member *self, const Product *p, const Activations *in, int r, int end) {
    const Kernels *k = self->cpu->kernels;
    if (in->T == 1 && p->w->tiles) tiles_times_token(k, p, in, r, end, self->scratch);
    else if (in->T == 1 || !k->tiles_f32) rows_times_tokens(k, p, in, r, end, self->scratch);
    else
        for (; r < end; r += ROWS) tiles_times_tokens(k, p, in, r, r + ROWS < end ? r + ROWS : end, self->scratch);
}

static int items_of(const Product *p) { return (p->w->rows + ROWS - 1) / ROWS; }

// Items are the rows of all products, ROWS at a time, one product after the other.
static void matmul_rows(Member *self, const void *args, int begin, int end) {
    const MatmulArgs *a = args;
    Activations in = prepared(self, a);
    for (const Product *p = a->products; p < a->products + a->n; p++) {
        int items = items_of(p), first = begin > 0 ? begin * ROWS : 0, last = end < items ? end * ROWS : p->w->rows;
        if (first < last) some_rows(self, p, &in, first, last);
        begin -= items, end -= items;
    }
}

// Of one token, rows r..end-1 of h and h2, and what swiglu makes of them.
static void gated_token(Member *self, const MatmulArgs *a, const Activations *in, int r, int end) {
    const Kernels *k = self->cpu->kernels;
    float *h = a->products[0].out + r, *h2 = a->products[1].out + r;
    for (int i = 0; i < 2; i++) some_rows(self, &a->products[i], in, r, end);
    k->swiglu(h, h2, end - r);
    if (a->blocks_wanted) k->quantize(self->cpu->gated_blocks + r / 32, h, (end - r) / 32);
}

// Swiglu of y and y2 (width, ROWS), columns r..end-1 of tokens t.. of h and h2, goes where the next product wants it.
static void put_gated(Member *self, const MatmulArgs *a, float *y, const float *y2, int t, int width, int r, int end) {
    Cpu *cpu = self->cpu;
    const Kernels *k = cpu->kernels;
    int rows = a->products->w->rows, left = a->in.T - t < width ? a->in.T - t : width, pairs = (end - r + 1) / 2;
    uint16_t narrow[16][ROWS] = {0}; // of a panel
    for (int i = 0; i < left; i++, y += ROWS, y2 += ROWS) {
        k->swiglu(y, y2, end - r);
        if (a->pairs_wanted) k->bf16s(narrow[i], y, end - r);
        else if (a->blocks_wanted) k->quantize(cpu->gated_blocks + ((size_t)(t + i) * rows + r) / 32, y, (end - r) / 32);
        else put_rows(a->products->out + (size_t)(t + i) * rows + r, y, end - r, false);
    }
    uint16_t *out = cpu->gated_pairs + (size_t)t * 2 * ((rows + 1) / 2) + r * width;
    if (a->pairs_wanted) k->transpose((uint8_t *)out, (uint8_t *)narrow, sizeof *narrow, width, pairs);
}

// The same of many tokens, up to ROWS rows: h and h2 never stand in memory.
static void gated_tokens(Member *self, const MatmulArgs *a, int r, int end) {
    const Kernels *k = self->cpu->kernels;
    const Mat *w = a->products[0].w, *w2 = a->products[1].w;
    int n = (end - r + TILE - 1) / TILE;
    float *y = self->scratch, *y2 = y + k->tokens * ROWS; // (tokens of a panel, ROWS)
    uint8_t *room = (uint8_t *)(y2 + k->tokens * ROWS);
    const uint8_t *tiles = tiles_of(k, w, r, end, room), *tiles2 = tiles_of(k, w2, r, end, room + n * tiles_size(w));
    for (int t = 0, width; t < a->in.T; t += width) {
        width = panel_width(k, a->in.T - t, w->type == BF16 && a->in.pairs);
        times_tiles(k, y, w, tiles, n, &a->in, t, width, ahead_of(w, tiles, n, a->in.T, t, width, y, 128));
        times_tiles(k, y2, w2, tiles2, n, &a->in, t, width, ahead_of(w2, tiles2, n, a->in.T, t, width, y2, 128));
        put_gated(self, a, y, y2, t, width, r, end);
    }
}

// h and h2 and what swiglu makes of them. Items are ROWS rows of both.
static void gated_rows(Member *self, const void *args, int begin, int end) {
    const MatmulArgs *a = args;
    Activations in = prepared(self, a);
    int rows = a->products->w->rows, last = end * ROWS < rows ? end * ROWS : rows;
    if (in.T == 1) { gated_token(self, a, &in, begin * ROWS, last); return; }
    for (int r = begin * ROWS; r < last; r += ROWS) gated_tokens(self, a, r, r + ROWS < last ? r + ROWS : last);
}

// Rows t.. of what products read, for one of many tokens: as they are, or normalised into room (n, cols).
static const float *read_tokens(const Cpu *cpu, const Activations *a, int t, int n, float *room) {
    size_t cols = a->cols;
    if (!a->norm) return a->x + t * cols;
    for (int i = 0; i < n; i++) normalize(cpu, room + i * cols, a->x + (t + i) * cols, a->norm);
    return room;
}

// Items are tokens.
static void quantize_tokens(Member *self, const void *args, int begin, int end) {
    const Activations *a = args;
    Cpu *cpu = self->cpu;
    for (int t = begin, n = a->cols / 32; t < end; t++)
        cpu->kernels->quantize(cpu->blocks + (size_t)t * n, read_tokens(cpu, a, t, 1, self->scratch), n);
}

// Items are panels; a token that is missing in the last is zero.
static void pack_tokens(Member *self, const void *args, int begin, int end) {
    const Activations *a = args;
    const Kernels *k = self->cpu->kernels;
    for (int i = begin; i < end; i++) {
        int t = i * k->tokens, width = panel_width(k, a->T - t, false), left = a->T - t < width ? a->T - t : width;
        float *panel = self->cpu->panels + (size_t)t * a->cols; // (cols, width)
        const float *x = read_tokens(self->cpu, a, t, left, self->scratch);
        if (left == width) k->transpose((uint8_t *)panel, (const uint8_t *)x, 4 * a->cols, width, a->cols);
        else
            for (int c = 0; c < a->cols; c++)
                for (int j = 0; j < width; j++) panel[(size_t)c * width + j] = j < left ? x[(size_t)j * a->cols + c] : 0;
    }
}

// The same in BF16, by pairs of columns.
static void pack_pairs(Member *self, const void *args, int begin, int end) {
    const Activations *a = args;
    const Kernels *k = self->cpu->kernels;
    int pairs = (a->cols + 1) / 2;
    float *room = self->scratch;                        // (cols,)
    uint16_t *rows = (uint16_t *)(room + a->cols);      // (width, 2 pairs)
    for (int i = begin; i < end; i++) {
        int t = i * k->tokens, width = panel_width(k, a->T - t, true);
        memset(rows, 0, (size_t)width * pairs * 4);
        for (int j = 0; j < width && t + j < a->T; j++)
            k->bf16s(rows + (size_t)j * 2 * pairs, read_tokens(self->cpu, a, t + j, 1, room), a->cols);
        k->transpose((uint8_t *)(self->cpu->pairs + (size_t)t * 2 * pairs), (const uint8_t *)rows, 4 * pairs, width, pairs);
    }
}

// n products of x (T, cols) or, where norm is given, of norm(x).
static MatmulArgs products_of(const Cpu *cpu, const Product *products, int n, const Mat *norm, const float *x, int T) {
    bool halves = cpu->kernels->bf16s && !cpu->precise && T >= LEAST_PAIRS;
    MatmulArgs a = {.n = n, .in = {.x = x, .norm = norm ? norm->data : NULL, .panels = T > 1 ? cpu->panels : x,
                                   .blocks = cpu->blocks, .cols = products->w->cols, .T = T}};
    for (int i = 0; i < n; i++) {
        a.products[i] = products[i];
        if (is_quantised(products[i].w)) a.quantised = true;
        else if (halves && products[i].w->type == BF16) a.in.pairs = cpu->pairs;
        else a.floats = true;
    }
    return a;
}

// Adds the steps that make of many tokens what products read, in the orders that they want.
static void prepare(Cpu *cpu, const MatmulArgs *a) {
    const Activations *in = &a->in;
    int panels = (in->T + cpu->kernels->tokens - 1) / cpu->kernels->tokens;
    int64_t cost = (int64_t)cpu->kernels->tokens * in->cols;
    if (in->T > 1 && a->quantised) add(cpu, quantize_tokens, in, sizeof *in, in->T, in->cols);
    if (in->T > 1 && a->floats) add(cpu, pack_tokens, in, sizeof *in, panels, cost);
    if (in->pairs) add(cpu, pack_pairs, in, sizeof *in, panels, cost);
}

static int64_t cost_of_rows(const MatmulArgs *a) { return (int64_t)ROWS * a->in.cols * a->in.T; }

static void multiply(Cpu *cpu, const MatmulArgs *a) {
    int items = 0;
    for (int i = 0; i < a->n; i++) items += items_of(&a->products[i]);
    add(cpu, matmul_rows, a, sizeof *a, items, cost_of_rows(a));
}

// Fills the table of rotations up to `positions`: angle = position / rope_scaling * rope_theta^(-2i / head_dim),
// in double precision, because a float angle is off by 1e-4 at position 2000.
static void extend_rotations(Cpu *cpu, int positions) {
    const Config *c = &cpu->config;
    for (int half = c->head_dim / 2; cpu->rotations < positions; cpu->rotations++) {
        float *cosines = cpu->rotation + (size_t)cpu->rotations * 2 * c->head_dim, *sines = cosines + c->head_dim;
        for (int i = 0; i < half; i++) {
            double angle = cpu->rotations / (double)c->rope_scaling * cpu->frequencies[i];
            cosines[2 * i] = cosines[2 * i + 1] = (float)cos(angle);
            sines[2 * i] = -(float)sin(angle), sines[2 * i + 1] = (float)sin(angle);
        }
    }
}

static int round_up(int n) { return (n + TILE - 1) / TILE * TILE; }

// Where a layer's keys, or values, of one KV head begin.
static char *keys_of(const Cpu *cpu, int layer, int head) {
    size_t numbers = (size_t)round_up(cpu->positions) * cpu->config.head_dim;
    return (char *)cpu->keys + (layer * (size_t)cpu->config.n_kv_heads + head) * numbers * (cpu->half ? 2 : 4);
}

static char *values_of(const Cpu *cpu, int layer, int head) {
    size_t numbers = (size_t)cpu->positions * cpu->value_width;
    return (char *)cpu->values + (layer * (size_t)cpu->config.n_kv_heads + head) * numbers * (cpu->half ? 2 : 4);
}

// Stores one head's key and value (head_dim,) of a position.
static void cache(Cpu *cpu, int layer, int head, int pos, const float *k, const float *v, float *scratch) {
    int n = cpu->config.head_dim;
    char *key = keys_of(cpu, layer, head), *value = values_of(cpu, layer, head);
    size_t at = (size_t)pos / TILE * TILE * n + pos % TILE;
    if (cpu->half) {
        uint16_t *narrow = (uint16_t *)scratch;
        cpu->kernels->halves(narrow, k, n);
        for (int i = 0; i < n; i++) ((uint16_t *)key)[at + i * TILE] = narrow[i];
        cpu->kernels->halves((uint16_t *)value + (size_t)pos * cpu->value_width, v, n);
    } else {
        for (int i = 0; i < n; i++) ((float *)key)[at + i * TILE] = k[i];
        memcpy((float *)value + (size_t)pos * cpu->value_width, v, n * sizeof(float));
    }
}

// Of one token: the query heads of KV head h, and its key, are rotated; its key and value go to the cache.
static void turn(Cpu *cpu, const RopeArgs *a, int t, int h, float *scratch) {
    const Config *c = &cpu->config;
    int shared = c->n_heads / c->n_kv_heads;
    const float *rotation = cpu->rotation + (size_t)(cpu->pos + t) * 2 * c->head_dim;
    float *q = cpu->q + (size_t)t * c->dim, *k = cpu->k + (size_t)t * c->kv_dim + h * c->head_dim;
    for (int i = h * shared; i < (h + 1) * shared; i++) cpu->kernels->rotate(q + i * c->head_dim, rotation, c->head_dim);
    cpu->kernels->rotate(k, rotation, c->head_dim);
    cache(cpu, a->layer, h, cpu->pos + t, k, cpu->v + (size_t)t * c->kv_dim + h * c->head_dim, scratch);
}

// Items are tokens. They go head by head, for the keys of TILE tokens share their places in the cache.
static void rope_tokens(Member *self, const void *args, int begin, int end) {
    const RopeArgs *a = args;
    for (int h = 0; h < self->cpu->config.n_kv_heads; h++)
        for (int t = begin; t < end; t++) turn(self->cpu, a, t, h, self->scratch);
}

typedef struct { float *out; RopeArgs in; bool turned; } AttentionArgs;

// Up to 4 queries of a KV head at once share what is loaded: of heads that share it, or, when each has its own, of tokens.
enum { QUERIES = 4 };

// Attention of Q queries, q_stride numbers apart: `first` positions are seen by the first of them, `more` more by each next.
static void attend(Cpu *cpu, int layer, int kv_head, float *out, const float *q, size_t q_stride, int Q, int first, int more,
                   float *scratch) {
    int head_dim = cpu->config.head_dim, n = first + more * (Q - 1);
    size_t room = round_up(cpu->positions);
    float *p = scratch, *mixed = scratch + QUERIES * room, sums[QUERIES];
    cpu->kernels->scores(p, room, q, q_stride, Q, keys_of(cpu, layer, kv_head), cpu->half, head_dim, n);
    for (int i = 0; i < Q; i++) {
        int seen = first + more * i;
        float most = cpu->kernels->largest(p + i * room, seen);
        sums[i] = cpu->kernels->exponentials(p + i * room, most, 1 / sqrtf(head_dim), seen);
        for (int j = seen; j < n; j++) p[i * room + j] = 0;
    }
    cpu->kernels->mix(mixed, p, room, Q, values_of(cpu, layer, kv_head), cpu->half, cpu->value_width, n);
    for (int i = 0; i < Q; i++)
        for (int j = 0; j < head_dim; j++) out[i * q_stride + j] = mixed[i * cpu->value_width + j] / sums[i];
}

// Groups of queries that one KV head has.
static int query_groups(const Cpu *cpu, int T) {
    int shared = cpu->config.n_heads / cpu->config.n_kv_heads; // query heads of a KV head
    return shared > 1 ? (shared + QUERIES - 1) / QUERIES : (T + QUERIES - 1) / QUERIES;
}

// Items are groups of queries: of each KV head, one group of tokens, or of each token one group of heads, after the other.
static void attention_groups(Member *self, const void *args, int begin, int end) {
    const AttentionArgs *a = args;
    Cpu *cpu = self->cpu;
    const Config *c = &cpu->config;
    int shared = c->n_heads / c->n_kv_heads, groups = query_groups(cpu, a->in.T), tokens = shared > 1 ? a->in.T : 1;
    for (int item = begin; item < end; item++) {
        int first = item % groups * QUERIES, t = item / groups % tokens, kv_head = item / groups / tokens;
        int left = (shared > 1 ? shared : a->in.T) - first, Q = left < QUERIES ? left : QUERIES;
        size_t at = shared > 1 ? (size_t)t * c->dim + (kv_head * shared + first) * c->head_dim
                               : (size_t)first * c->dim + kv_head * c->head_dim;
        if (!a->turned) turn(cpu, &a->in, t, kv_head, self->scratch);
        attend(cpu, a->in.layer, kv_head, a->out + at, cpu->q + at, shared > 1 ? c->head_dim : c->dim, Q,
               cpu->pos + (shared > 1 ? t : first) + 1, shared == 1, self->scratch);
    }
}

typedef struct { MatmulArgs qkv; AttentionArgs attention; } HeadsArgs;
_Static_assert(sizeof(HeadsArgs) <= ARGS, "room in a step");

// Of one token, query, key and value and the attention of those heads: who makes them needs nobody else's. Items are KV heads.
static void heads(Member *self, const void *args, int begin, int end) {
    const HeadsArgs *a = args;
    Activations in = prepared(self, &a->qkv);
    for (const Product *p = a->qkv.products; p < a->qkv.products + 3; p++) {
        int rows = p->w->rows / self->cpu->config.n_kv_heads; // of a KV head
        some_rows(self, p, &in, begin * rows, end * rows);
    }
    attention_groups(self, &a->attention, begin, end);
}

// Whether one token's attention goes with its query, key and value: where that spares members waiting for each other and gives
// each as many heads.
static bool heads_join(const Cpu *cpu) {
    const Config *c = &cpu->config;
    return c->head_dim % TILE == 0 && cpu->team.n_threads > 1 && c->n_kv_heads % cpu->team.n_threads == 0;
}

// Where the query heads of one token are few to a KV head, who attends also rotates them and fills the cache.
static void attention(Backend *b, int layer, const Layer *w, float *out, const float *x, int pos, int T) {
    Cpu *cpu = (Cpu *)b;
    const Config *c = &cpu->config;
    Product products[] = {{cpu->q, &w->wq, false}, {cpu->k, &w->wk, false}, {cpu->v, &w->wv, false}};
    MatmulArgs qkv = products_of(cpu, products, 3, &w->attention_norm, x, T);
    int groups = query_groups(cpu, T), items = c->n_kv_heads * groups * (c->n_heads > c->n_kv_heads ? T : 1), n = 0;
    int64_t cost = 2 * (int64_t)(pos + T) * c->head_dim * QUERIES;
    AttentionArgs a = {out, {layer, T}, T > 1 || groups > 1};
    cpu->pos = pos;
    extend_rotations(cpu, pos + T);
    prepare(cpu, &qkv);
    if (!a.turned && heads_join(cpu)) {
        for (int i = 0; i < 3; i++) n += items_of(&products[i]);
        add(cpu, heads, &(HeadsArgs){qkv, a}, sizeof(HeadsArgs), c->n_kv_heads, cost + n * cost_of_rows(&qkv) / c->n_kv_heads);
        return;
    }
    multiply(cpu, &qkv);
    if (a.turned) add(cpu, rope_tokens, &a.in, sizeof a.in, T, 4 * c->dim);
    add(cpu, attention_groups, &a, sizeof a, items, cost);
}

static void add_product(Backend *b, float *x, const Mat *w, const float *y, int T) {
    Cpu *cpu = (Cpu *)b;
    MatmulArgs a = products_of(cpu, &(Product){x, w, true}, 1, NULL, y, T);
    prepare(cpu, &a);
    multiply(cpu, &a);
}

// Items are tokens.
static void swiglu_tokens(Member *self, const void *args, int begin, int end) {
    Cpu *cpu = self->cpu;
    size_t n = cpu->config.hidden_dim;
    (void)args;
    for (int t = begin; t < end; t++) cpu->kernels->swiglu(cpu->h + t * n, cpu->h2 + t * n, (int)n);
}

// Gate and up are multiplied side by side, and what swiglu makes of them goes where down reads it, in the order that it wants;
// h and h2 stand in memory only where the kernels have no tiles, or the matrices are of two types.
static void feed_forward(Backend *b, const Layer *w, float *x, int T) {
    Cpu *cpu = (Cpu *)b;
    Product both[] = {{cpu->h, &w->w1, false}, {cpu->h2, &w->w3, false}};
    MatmulArgs gated = products_of(cpu, both, 2, &w->ffn_norm, x, T);
    MatmulArgs down = products_of(cpu, &(Product){x, &w->w2, true}, 1, NULL, cpu->h, T);
    bool joined = w->w1.type == w->w3.type && (T == 1 || cpu->kernels->tiles_f32);
    prepare(cpu, &gated);
    if (joined && !down.floats && (!down.in.pairs || w->w1.type == BF16)) {
        gated.blocks_wanted = down.quantised, gated.pairs_wanted = down.in.pairs != NULL, down.made = true;
        down.in.blocks = cpu->gated_blocks;
        if (down.in.pairs) down.in.pairs = cpu->gated_pairs;
    }
    if (joined) add(cpu, gated_rows, &gated, sizeof gated, items_of(both), 2 * cost_of_rows(&gated));
    else multiply(cpu, &gated), add(cpu, swiglu_tokens, "", 1, T, 4 * cpu->config.hidden_dim);
    if (!down.made) prepare(cpu, &down);
    multiply(cpu, &down);
}

static void logits(Backend *b, float *out, const Mat *norm, const Mat *output, const float *x, int T) {
    Cpu *cpu = (Cpu *)b;
    MatmulArgs a = products_of(cpu, &(Product){out, output, false}, 1, norm, x, T);
    prepare(cpu, &a);
    multiply(cpu, &a);
}

typedef struct { const uint8_t *bytes; } ReadArgs;

enum { READ_CHUNK = 1 << 16 }; // bytes

// Items are chunks of the bytes; their sums go where nobody looks.
static void read_chunks(Member *self, const void *args, int begin, int end) {
    const ReadArgs *a = args;
    for (int chunk = begin; chunk < end; chunk++) {
        uint64_t sum[16] = {0}, word;
        for (size_t i = 0; i < READ_CHUNK; i += sizeof sum)
            for (int j = 0; j < 16; j++) {
                memcpy(&word, a->bytes + (size_t)chunk * READ_CHUNK + i + 8 * j, 8);
                sum[j] += word;
            }
        for (int j = 1; j < 16; j++) sum[0] += sum[j];
        memcpy(self->scratch, sum, sizeof *sum);
    }
}

void llamac_use_large_pages(const void *p, size_t n) {
#ifdef MADV_HUGEPAGE // in Linux alone
    madvise((void *)p, n, MADV_HUGEPAGE);
#else
    (void)p, (void)n;
#endif
}

double llamac_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

// The best of many passes.
static double bandwidth(Backend *b, const void *bytes, size_t n) {
    Cpu *cpu = (Cpu *)b;
    if (cpu->tiles) bytes = cpu->tiles, n = n < cpu->tiles_size ? n : cpu->tiles_size;
    int chunks = (int)(n / READ_CHUNK);
    double best = 0, start = llamac_seconds();
    for (int pass = 0; chunks && (pass < 5 || llamac_seconds() - start < 0.1); pass++) {
        double begin = llamac_seconds();
        add(cpu, read_chunks, &(ReadArgs){bytes}, sizeof(ReadArgs), chunks, READ_CHUNK);
        double speed = (double)chunks * READ_CHUNK / (llamac_seconds() - begin);
        best = speed > best ? speed : best;
    }
    return best;
}

// ----------------------------------------------------------------------------
// Opening and closing

static void *allocate(Cpu *cpu, size_t n, size_t size, size_t alignment) {
    void **memory = realloc(cpu->memory, (cpu->n_memory + 1) * sizeof(void *)), *p = NULL;
    if (!memory) return NULL;
    cpu->memory = memory;
    if (n < SIZE_MAX / 2 / size && !(p = aligned_alloc(alignment, (n * size / alignment + 1) * alignment))) return NULL;
    if (p) memory[cpu->n_memory++] = p;
    return p;
}

static float *cpu_alloc(Backend *b, size_t n) { return allocate((Cpu *)b, n, sizeof(float), 64); }

static void cpu_close(Backend *b) {
    Cpu *cpu = (Cpu *)b;
    end_team(&cpu->team);
    for (int i = 0; i < cpu->n_memory; i++) free(cpu->memory[i]);
    free(cpu->memory);
    free(cpu);
}

// Room for n_threads members, each with what a step of the model needs for itself.
static bool make_members(Cpu *cpu, int n_threads, size_t cols, size_t scratch_size) {
    size_t own_x = cols + 16, own_blocks = cols / 32 + 2; // a cache line or more between those of two members
    cpu->team.members = allocate(cpu, n_threads, sizeof(Member), 64);
    float *x = allocate(cpu, n_threads * own_x, sizeof(float), 64);
    float *scratch = allocate(cpu, n_threads * scratch_size, sizeof(float), 64);
    Block *blocks = allocate(cpu, n_threads * own_blocks, sizeof(Block), 64);
    if (!cpu->team.members || !x || !scratch || !blocks) return false;
    memset(cpu->team.members, 0, n_threads * sizeof(Member));
    for (int i = 0; i < n_threads; i++) {
        Member *m = &cpu->team.members[i];
        m->team = &cpu->team, m->cpu = cpu;
        m->x = x + i * own_x, m->blocks = blocks + i * own_blocks, m->scratch = scratch + i * scratch_size;
    }
    return true;
}

enum { SLICE = 4 << 20 }; // bytes of a matrix that are put in tiles at once

typedef struct { const Mat *m; uint8_t *tiles; int first; } PackArgs;

// Items are rows of tiles.
static void pack_rows(Member *self, const void *args, int begin, int end) {
    const PackArgs *a = args;
    for (int i = a->first + begin; i < a->first + end; i++)
        pack(self->cpu->kernels, a->tiles + i * tiles_size(a->m), a->m, i * TILE);
}

// Gives back the memory of the whole pages of a mapped file from `begin` to `end`, and of those before, but not below
// `lowest`, that the system may have brought back with the last ones read.
static void drop_pages(const uint8_t *lowest, const uint8_t *begin, const uint8_t *end) {
    begin = begin - lowest > SLICE ? begin - SLICE : lowest;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)begin + page - 1) / page * page;
    uintptr_t last = (uintptr_t)end / page * page;
    if (first < last) madvise((void *)first, last - first, MADV_DONTNEED);
}

// Puts a matrix in tiles at `tiles`; returns their bytes. With tiles NULL it only measures.
static size_t keep_tiles(Cpu *cpu, Mat *m, uint8_t *tiles, const uint8_t *lowest) {
    if (m->type != F32 && m->type != BF16 && !is_quantised(m)) return 0;
    int n = (m->rows + TILE - 1) / TILE, slice = (int)(SLICE / tiles_size(m)) + 1;
    for (int i = 0, some; tiles && i < n; i += some) { // by slices, so that both orders of them never stand in memory
        some = n - i < slice ? n - i : slice;
        add(cpu, pack_rows, &(PackArgs){m, tiles, i}, sizeof(PackArgs), some, TILE * m->cols);
        if (cpu->model->mapped) drop_pages(lowest, row_of(m, i * TILE), row_of(m, (i + some) * TILE));
    }
    if (tiles) m->tiles = tiles;
    return n * tiles_size(m);
}

static size_t keep_all(Cpu *cpu, uint8_t *tiles) {
    Weights *w = &cpu->model->weights;
    const uint8_t *lowest = w->output.data;
    for (int i = 0; i < cpu->config.n_layers; i++)
        if ((const uint8_t *)w->layers[i].wq.data < lowest) lowest = w->layers[i].wq.data;
    size_t n = keep_tiles(cpu, &w->output, tiles, lowest);
    for (int i = 0; i < cpu->config.n_layers; i++) {
        Layer *l = &w->layers[i];
        Mat *mats[] = {&l->wq, &l->wk, &l->wv, &l->wo, &l->w1, &l->w3, &l->w2};
        for (int j = 0; j < 7; j++) n += keep_tiles(cpu, mats[j], tiles ? tiles + n : NULL, lowest);
    }
    return n;
}

// Puts the weights in tiles, in large pages. That takes as long as some tokens do, and makes the next ones faster; where it
// would take more than half of the memory that is free, they stay as they are: the file needs as much again.
static void order_weights(Cpu *cpu) {
    size_t n = keep_all(cpu, NULL), huge = 2 << 20;
    void *tiles = n > 0 && n < free_memory("") / 2 ? allocate(cpu, n, 1, huge) : NULL;
    if (!tiles) return;
    llamac_use_large_pages(tiles, (n / huge + 1) * huge); // as much as allocate took
    keep_all(cpu, tiles);
    cpu->tiles = tiles, cpu->tiles_size = n;
}

// The steps of one token are the same each time, but for the token and its position. They are made anew at every 64th, for
// attention costs more the later it is, and whether steps are worth a team is decided by their costs.
static bool begin(Backend *b, const int *tokens, int T, int pos, bool all) {
    Cpu *cpu = (Cpu *)b;
    cpu->precise = all;
    bool wanted = cpu->kernels->tiles_f32 && !cpu->model->no_copy;
    if (T == 1 && wanted && ++cpu->decoded == PATIENT_TOKENS) order_weights(cpu);
    if (T == 1 && cpu->recorded && pos % 64) {
        cpu->pos = pos;
        extend_rotations(cpu, pos + 1);
        embed(b, cpu->embedded, cpu->table, tokens, 1);
        return false;
    }
    cpu->team.n_steps = 0, cpu->collecting = true, cpu->recorded = T == 1;
    return true;
}

static void end(Backend *b) {
    Cpu *cpu = (Cpu *)b;
    cpu->collecting = false;
    run_steps(&cpu->team);
}

// What any operation needs for itself, in floats.
static size_t scratch_size(const Cpu *cpu, size_t cols) {
    size_t tiles = 2 * ROWS * (cols + 1 + cpu->kernels->tokens); // of two matrices
    size_t attention = QUERIES * ((size_t)round_up(cpu->positions) + cpu->value_width), most = cols;
    most = most > tiles ? most : tiles;
    most = most > attention ? most : attention;
    return (most + 15) / 16 * 16;
}

const char *llamac_cpu_open(Backend **backend, Model *model, int positions, int n_threads) {
    const Config *c = &model->config;
    *backend = NULL;
    const Kernels *kernels = choose_kernels();
    if (!kernels) return "LLAMAC_ISA names no instruction set of this machine; expected scalar, avx2, avx512, avx512bf16, neon or neondot";
    Cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return "out of memory";
    cpu->ops = (Backend){.chunk = CHUNK, .begin = begin, .end = end, .alloc = cpu_alloc, .embed = embed,
                         .attention = attention, .add_product = add_product, .feed_forward = feed_forward, .logits = logits,
                         .bandwidth = bandwidth, .close = cpu_close};
    cpu->config = *c;
    cpu->model = model;
    cpu->kernels = kernels;
    cpu->positions = positions;
    cpu->half = is_quantised(&model->weights.layers[0].wq);
    cpu->value_width = round_up(c->head_dim);
    size_t heads = (size_t)c->n_layers * c->n_kv_heads, number = cpu->half ? 2 : 4;
    int cols = c->dim > c->hidden_dim ? c->dim : c->hidden_dim, chunk = positions < CHUNK ? positions : CHUNK;
    bool ok = (cpu->keys = allocate(cpu, heads * round_up(positions) * c->head_dim, number, 64))
           && (cpu->values = allocate(cpu, heads * positions * cpu->value_width, number, 64))
           && (cpu->frequencies = allocate(cpu, c->head_dim / 2, sizeof(double), 64))
           && (cpu->rotation = allocate(cpu, (size_t)positions * 2 * c->head_dim, sizeof(float), 64))
           && (cpu->blocks = allocate(cpu, (size_t)chunk * (cols / 32 + 1), sizeof(Block), 64))
           && (cpu->gated_blocks = allocate(cpu, (size_t)chunk * (cols / 32 + 1), sizeof(Block), 64))
           && (cpu->panels = allocate(cpu, (size_t)(chunk + kernels->tokens) * cols, sizeof(float), 64))
           && (cpu->pairs = allocate(cpu, (size_t)(chunk + kernels->tokens) * (cols + 1), sizeof(uint16_t), 64))
           && (cpu->gated_pairs = allocate(cpu, (size_t)(chunk + kernels->tokens) * (cols + 1), sizeof(uint16_t), 64))
           && (cpu->q = cpu_alloc(&cpu->ops, (size_t)chunk * c->dim))
           && (cpu->k = cpu_alloc(&cpu->ops, (size_t)chunk * c->kv_dim))
           && (cpu->v = cpu_alloc(&cpu->ops, (size_t)chunk * c->kv_dim))
           && (cpu->h = cpu_alloc(&cpu->ops, (size_t)chunk * c->hidden_dim))
           && (cpu->h2 = cpu_alloc(&cpu->ops, (size_t)chunk * c->hidden_dim))
           && (cpu->team.steps = allocate(cpu, (c->n_layers + 1) * MOST_STEPS, sizeof(Step), 64))
           && make_members(cpu, n_threads, cols, scratch_size(cpu, cols));
    for (int i = 0; ok && i < c->head_dim / 2; i++) cpu->frequencies[i] = pow(c->rope_theta, -2.0 * i / c->head_dim);
    *backend = &cpu->ops;
    if (ok) start_team(&cpu->team, n_threads);
    if (ok) return NULL;
    cpu_close(&cpu->ops);
    *backend = NULL;
    return "not enough memory for the context; ask for fewer tokens with -n";
}

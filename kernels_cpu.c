// The Backend of the CPU. Work is handed to threads by rows, and every number is computed by one thread in one order,
// so results do not depend on how many threads there are. The arithmetic is in kernels_scalar.h, and in vectors in
// kernels_simd.h, which is compiled for each instruction set; the best one that the machine has is taken at the start.
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
#include "run.h"
#include "kernels_scalar.h"

#if defined(__x86_64__)
#include "kernels_avx2.h"
#include "kernels_avx512.h"
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "kernels_neon.h"
#endif
#ifndef PAUSE
#define PAUSE() (void)0
#endif

// What this machine can run, the best first.
static int find_kernels(const Kernels *found[4]) {
    int n = 0;
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); // all such have f16c
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vnni")) found[n++] = &kernels_avx512;
    if (avx2) found[n++] = &kernels_avx2;
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    found[n++] = &kernels_neon;
#endif
    found[n++] = &kernels_scalar;
    return n;
}

// The best kernels, or those that the environment variable LLAMAC_ISA names; NULL if the machine has them not.
static const Kernels *choose_kernels(void) {
    const Kernels *found[4];
    const char *name = getenv("LLAMAC_ISA");
    int n = find_kernels(found);
    for (int i = 0; i < n; i++)
        if (!name || !*name || !strcmp(name, found[i]->name)) return found[i];
    return NULL;
}

float cpu_largest(const float *x, int n) { return choose_kernels()->largest(x, n); }

float cpu_exponentials(float *x, float most, float scale, int n) {
    return choose_kernels()->exponentials(x, most, scale, n);
}

// ----------------------------------------------------------------------------
// A team of threads. The caller publishes a task, cut into pieces; whoever is awake takes the next piece, so nobody
// waits for a member that the system has put aside, only for pieces begun. Members look for work for a while before
// they sleep, because the next task mostly comes within microseconds.

typedef struct Cpu Cpu;
typedef void Task(Cpu *cpu, const void *args, int begin, int end, float *scratch);
typedef struct { Cpu *cpu; int index; } Member;

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
    float *rotation;                // (positions, head_dim / 2, 2): cosine and sine
    int rotations;                  // positions of it computed so far
    Block *blocks;                  // (chunk, columns / 32): activations in 8 bits
    int chunk;                      // most tokens that a product works on at once
    float *scratch;                 // (n_threads, scratch_size)
    size_t scratch_size;
    void **memory;                  // what alloc gave out
    int n_memory;

    int n_threads;
    pthread_t *threads;             // (n_threads,); threads[0] is not used
    Member *members;
    _Atomic(Task *) task;           // NULL asks the members to leave
    _Atomic(const void *) args;
    atomic_int n, step;             // items of the task, items of a piece
    atomic_ullong next;             // number of the latest task << 32 | pieces taken of it, or CLOSED
    atomic_int done;                // its pieces that are finished
    atomic_int sleepers;
    pthread_mutex_t lock;           // guards falling asleep
    pthread_cond_t wake;
};

enum { CHUNK = 128 };      // tokens: more of them no longer make a product faster
#define CLOSED 0xffffffffull // more pieces than any task has: what stands beside it is being changed
enum { PATIENCE = 20000 }; // looks for work before a member sleeps: some 200 microseconds

// Takes pieces of the present task while there are any. False when it asks to leave.
static bool work(Cpu *cpu, int index) {
    for (;;) {
        unsigned long long next = atomic_load(&cpu->next);
        Task *task = atomic_load_explicit(&cpu->task, memory_order_acquire);
        const void *args = atomic_load_explicit(&cpu->args, memory_order_acquire);
        int n = atomic_load_explicit(&cpu->n, memory_order_acquire);
        int step = atomic_load_explicit(&cpu->step, memory_order_acquire);
        int64_t begin = (int64_t)(next & 0xffffffff) * step;
        if (begin >= n) return true;
        if (!task) return false;
        // While a task is written the word stands for none, so if it is still the same, what was read belongs to it
        if (!atomic_compare_exchange_weak(&cpu->next, &next, next + 1)) continue;
        task(cpu, args, (int)begin, begin + step < n ? (int)begin + step : n, cpu->scratch + index * cpu->scratch_size);
        atomic_fetch_add_explicit(&cpu->done, 1, memory_order_release);
    }
}

static void *member(void *arg) {
    Cpu *cpu = ((Member *)arg)->cpu;
    unsigned long long seen = 0; // number of the latest dispatch
    for (int looks = 0;; looks++) {
        if (atomic_load(&cpu->next) >> 32 != seen) {
            seen = atomic_load(&cpu->next) >> 32;
            if (!work(cpu, ((Member *)arg)->index)) return NULL;
            looks = 0;
        }
        PAUSE();
        if (looks % 1024 == 1023) sched_yield();
        if (looks < PATIENCE) continue;
        pthread_mutex_lock(&cpu->lock);
        atomic_fetch_add(&cpu->sleepers, 1);
        while (atomic_load(&cpu->next) >> 32 == seen) pthread_cond_wait(&cpu->wake, &cpu->lock);
        atomic_fetch_sub(&cpu->sleepers, 1);
        pthread_mutex_unlock(&cpu->lock);
    }
}

// The word `next` is closed before what belongs to it changes, and opened after, each with a number of its own. Who read
// some of the old and some of the new finds another word, and takes nothing.
static void publish(Cpu *cpu, Task *task, const void *args, int n, int step) {
    unsigned long long dispatches = atomic_load(&cpu->next) >> 32;
    atomic_store(&cpu->next, (dispatches + 1) << 32 | 0xffffffff); // no pieces, until all is written
    atomic_store_explicit(&cpu->task, task, memory_order_release);
    atomic_store_explicit(&cpu->args, args, memory_order_release);
    atomic_store_explicit(&cpu->n, n, memory_order_release);
    atomic_store_explicit(&cpu->step, step, memory_order_release);
    atomic_store_explicit(&cpu->done, 0, memory_order_release);
    atomic_store(&cpu->next, (dispatches + 2) << 32);
    if (!atomic_load(&cpu->sleepers)) return;
    pthread_mutex_lock(&cpu->lock);
    pthread_cond_broadcast(&cpu->wake);
    pthread_mutex_unlock(&cpu->lock);
}

// Runs the task over items 0..n-1, each of about `cost` multiplications. Small jobs are done sooner alone.
static void parallel(Cpu *cpu, Task *task, const void *args, int n, int64_t cost) {
    if (cpu->n_threads == 1 || n == 1 || n * cost < 20000) {
        task(cpu, args, 0, n, cpu->scratch);
        return;
    }
    int step = n / (cpu->n_threads * 4) + 1, pieces = (n + step - 1) / step;
    publish(cpu, task, args, n, step);
    work(cpu, 0);
    for (int looks = 1; atomic_load_explicit(&cpu->done, memory_order_acquire) < pieces; looks++) {
        PAUSE();
        if (looks % 1024 == 0) sched_yield();
    }
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

// Bytes of a row of tiles: of TILE rows of the matrix.
static size_t tiles_size(const Mat *m) { return (size_t)(m->cols / 32) * (m->type == Q8_0 ? Q8_TILE : Q4_TILE); }

// The tiles of up to TILE rows from r on; rows beyond the last are zero.
static void pack(const Kernels *k, uint8_t *tiles, const Mat *m, int r) {
    void (*pack_rows)(uint8_t *, const uint8_t *, size_t, int) = m->type == Q8_0 ? k->pack_q8 : k->pack_q4;
    size_t block = m->type == Q8_0 ? 34 : 18, stride = m->cols / 32 * block;
    const uint8_t *rows = (const uint8_t *)m->data + r * stride;
    if (m->rows - r >= TILE) {
        pack_rows(tiles, rows, stride, m->cols / 32);
        return;
    }
    uint8_t last[34 * TILE] = {0};
    for (int b = 0; b < m->cols / 32; b++, tiles += block * TILE) {
        for (int i = 0; i < m->rows - r; i++) memcpy(last + i * block, rows + i * stride + b * block, block);
        pack_rows(tiles, last, block, 1);
    }
}

// ----------------------------------------------------------------------------
// The operations; run.h says what each computes

static void embed(Backend *b, float *x, const Mat *table, const int *tokens, int T) {
    for (int t = 0; t < T; t++)
        floats_of(((Cpu *)b)->kernels, x + (size_t)t * table->cols, table, tokens[t], 0, table->cols);
}

typedef struct { float *out; const float *x, *weight; } NormArgs;

// Items are tokens.
static void norm_tokens(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    (void)scratch;
    const NormArgs *a = args;
    int dim = cpu->config.dim;
    for (int t = begin; t < end; t++) {
        const float *x = a->x + (size_t)t * dim;
        float *out = a->out + (size_t)t * dim;
        float scale = 1.0f / sqrtf(cpu->kernels->dot_f32(x, x, dim) / dim + cpu->config.norm_eps);
        for (int i = 0; i < dim; i++) out[i] = a->weight[i] * (scale * x[i]);
    }
}

static void rmsnorm(Backend *b, float *out, const float *x, const Mat *weight, int T) {
    parallel((Cpu *)b, norm_tokens, &(NormArgs){out, x, weight->data}, T, weight->cols);
}

// Items of a product are ROWS rows. Its columns are gone through in strips, so that a strip of the rows, as floats,
// and of some tokens stay in the caches.
enum { ROWS = 2 * TILE, STRIP = 640 };

typedef struct { const Product *products; int n; const float *x; const Block *blocks; int T; } MatmulArgs;

static void add_to(float *out, float y, bool add) { *out = add ? *out + y : y; }

// One token and rows r..end-1 of a matrix of floats, or of what becomes floats.
static void rows_times_token(const Kernels *k, const Product *p, const float *x, int r, int end, float *scratch) {
    const Mat *w = p->w;
    for (; r < end; r++) {
        const uint8_t *data = w->data;
        size_t first = (size_t)r * w->cols;
        float y;
        if (w->type == F32) y = k->dot_f32(data + 4 * first, x, w->cols);
        else if (w->type == F16) y = k->dot_f16(data + 2 * first, x, w->cols);
        else if (w->type == BF16) y = k->dot_bf16(data + 2 * first, x, w->cols);
        else floats_of(k, scratch, w, r, 0, w->cols), y = k->dot_f32(scratch, x, w->cols);
        add_to(&p->out[r], y, p->add);
    }
}

static void rows_times_tokens(const Kernels *k, const Product *p, const float *x, int T, int r, int end, float *scratch) {
    const Mat *w = p->w;
    int strips = (w->cols + STRIP - 1) / STRIP, strip = (w->cols / strips + TILE - 1) / TILE * TILE;
    float *y = scratch, *floats = scratch + T * ROWS; // (T, ROWS), (ROWS, STRIP)
    memset(y, 0, T * ROWS * sizeof(float));
    for (int c = 0; c < w->cols; c += strip) {
        int n = w->cols - c < strip ? w->cols - c : strip;
        const float *rows = (const float *)w->data + (size_t)r * w->cols + c;
        for (int i = r; i < end && w->type != F32; i++) floats_of(k, floats + (i - r) * STRIP, w, i, c, n);
        if (w->type == F32) k->products(y, ROWS, rows, w->cols, end - r, x + c, w->cols, n, T);
        else k->products(y, ROWS, floats, STRIP, end - r, x + c, w->cols, n, T);
    }
    for (int t = 0; t < T; t++)
        for (int i = 0; i < end - r; i++) add_to(&p->out[(size_t)t * w->rows + r + i], y[t * ROWS + i], p->add);
}

// Rows of blocks with one token: read in the order of the file, which is the fastest way where memory is the limit.
static void blocks_times_token(const Kernels *k, const Product *p, const Block *x, int r, int end) {
    const Mat *w = p->w;
    float (*dot)(const uint8_t *, const Block *, int) = w->type == Q8_0 ? k->dot_q8 : k->dot_q4;
    size_t stride = w->cols / 32 * (w->type == Q8_0 ? 34 : 18);
    for (; r < end; r++) add_to(&p->out[r], dot((const uint8_t *)w->data + r * stride, x, w->cols / 32), p->add);
}

// Rows of tiles, kept or made on the way. r is a multiple of TILE.
static void tiles_times_tokens(const Kernels *k, const Product *p, const Block *x, int T, int r, int end, float *scratch) {
    const Mat *w = p->w;
    float *y = scratch; // (T, TILE)
    for (; r < end; r += TILE) {
        uint8_t *tiles = w->tiles ? (uint8_t *)w->tiles + r / TILE * tiles_size(w) : (uint8_t *)(y + T * TILE);
        if (!w->tiles) pack(k, tiles, w, r);
        (w->type == Q8_0 ? k->tiles_q8 : k->tiles_q4)(y, tiles, x, w->cols / 32, T);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < TILE && r + i < end; i++)
                add_to(&p->out[(size_t)t * w->rows + r + i], y[t * TILE + i], p->add);
    }
}

// Items are the rows of all products, ROWS at a time, one product after the other.
static void matmul_rows(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    const MatmulArgs *a = args;
    for (const Product *p = a->products; p < a->products + a->n; p++) {
        int items = (p->w->rows + ROWS - 1) / ROWS;
        for (int i = begin > 0 ? begin : 0; i < end && i < items; i++) {
            int r = i * ROWS, last = r + ROWS < p->w->rows ? r + ROWS : p->w->rows;
            if (is_quantised(p->w) && a->T == 1 && !p->w->tiles) blocks_times_token(cpu->kernels, p, a->blocks, r, last);
            else if (is_quantised(p->w)) tiles_times_tokens(cpu->kernels, p, a->blocks, a->T, r, last, scratch);
            else if (a->T == 1) rows_times_token(cpu->kernels, p, a->x, r, last, scratch);
            else rows_times_tokens(cpu->kernels, p, a->x, a->T, r, last, scratch);
        }
        begin -= items, end -= items;
    }
}

typedef struct { const float *x; int n_blocks; } QuantizeArgs;

// Items are tokens.
static void quantize_tokens(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    (void)scratch;
    const QuantizeArgs *a = args;
    size_t first = (size_t)begin * a->n_blocks;
    cpu->kernels->quantize(cpu->blocks + first, a->x + first * 32, (end - begin) * a->n_blocks);
}

static void matmul(Backend *b, const Product *products, int n, const float *x, int T) {
    Cpu *cpu = (Cpu *)b;
    int items = 0, cols = products->w->cols, most = T < cpu->chunk ? T : cpu->chunk;
    bool quantised = false;
    Product slice[3];
    for (int i = 0; i < n; i++) {
        slice[i] = products[i];
        items += (products[i].w->rows + ROWS - 1) / ROWS;
        quantised |= is_quantised(products[i].w);
    }
    for (; T > 0; T -= most, x += (size_t)most * cols) {
        int t = T < most ? T : most;
        if (quantised) parallel(cpu, quantize_tokens, &(QuantizeArgs){x, cols / 32}, t, cols);
        parallel(cpu, matmul_rows, &(MatmulArgs){slice, n, x, cpu->blocks, t}, items, (int64_t)ROWS * cols * t);
        for (int i = 0; i < n; i++) slice[i].out += (size_t)most * slice[i].w->rows;
    }
}

// Fills the table of rotations up to `positions`: angle = position / rope_scaling * rope_theta^(-2i / head_dim),
// in double precision, because a float angle is off by 1e-4 at position 2000.
static void extend_rotations(Cpu *cpu, int positions) {
    const Config *c = &cpu->config;
    for (int half = c->head_dim / 2; cpu->rotations < positions; cpu->rotations++) {
        float *r = cpu->rotation + (size_t)cpu->rotations * c->head_dim;
        for (int i = 0; i < half; i++) {
            double angle = cpu->rotations / (double)c->rope_scaling * cpu->frequencies[i];
            r[2 * i] = (float)cos(angle);
            r[2 * i + 1] = (float)sin(angle);
        }
    }
}

// Rotates each head of one token's x (n,) by its position's rotation (head_dim / 2, 2).
static void rotate(float *x, int n, const float *rotation, int head_dim) {
    for (int head = 0; head < n; head += head_dim)
        for (int i = 0; i < head_dim; i += 2) {
            float a = x[head + i], b = x[head + i + 1], cosine = rotation[i], sine = rotation[i + 1];
            x[head + i] = a * cosine - b * sine;
            x[head + i + 1] = a * sine + b * cosine;
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

typedef struct { int layer; float *q, *k; const float *v; int pos; } RopeArgs;

// Items are tokens.
static void rope_tokens(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    const RopeArgs *a = args;
    const Config *c = &cpu->config;
    for (int t = begin; t < end; t++) {
        const float *rotation = cpu->rotation + (size_t)(a->pos + t) * c->head_dim, *v = a->v + (size_t)t * c->kv_dim;
        float *k = a->k + (size_t)t * c->kv_dim;
        rotate(a->q + (size_t)t * c->dim, c->dim, rotation, c->head_dim);
        rotate(k, c->kv_dim, rotation, c->head_dim);
        for (int h = 0; h < c->n_kv_heads; h++)
            cache(cpu, a->layer, h, a->pos + t, k + h * c->head_dim, v + h * c->head_dim, scratch);
    }
}

static void rope(Backend *b, int layer, float *q, float *k, const float *v, int pos, int T) {
    Cpu *cpu = (Cpu *)b;
    extend_rotations(cpu, pos + T);
    parallel(cpu, rope_tokens, &(RopeArgs){layer, q, k, v, pos}, T, 4 * cpu->config.dim);
}

typedef struct { int layer; float *out; const float *q; int pos, T; } AttentionArgs;

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

// Items are groups of queries: of each KV head, one group of tokens or of heads after the other.
static void attention_groups(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    const AttentionArgs *a = args;
    const Config *c = &cpu->config;
    int shared = c->n_heads / c->n_kv_heads; // query heads of a KV head
    int groups = shared > 1 ? (shared + QUERIES - 1) / QUERIES : (a->T + QUERIES - 1) / QUERIES;
    for (int item = begin; item < end; item++) {
        int first = item % groups * QUERIES, kv_head = item / groups % c->n_kv_heads, t = item / groups / c->n_kv_heads;
        int left = (shared > 1 ? shared : a->T) - first, Q = left < QUERIES ? left : QUERIES;
        size_t at = shared > 1 ? (size_t)t * c->dim + (kv_head * shared + first) * c->head_dim
                               : (size_t)first * c->dim + kv_head * c->head_dim;
        attend(cpu, a->layer, kv_head, a->out + at, a->q + at, shared > 1 ? c->head_dim : c->dim, Q,
               a->pos + (shared > 1 ? t : first) + 1, shared == 1, scratch);
    }
}

static void attention(Backend *b, int layer, float *out, const float *q, int pos, int T) {
    Cpu *cpu = (Cpu *)b;
    const Config *c = &cpu->config;
    int shared = c->n_heads / c->n_kv_heads;
    int items = c->n_kv_heads * (shared > 1 ? T * ((shared + QUERIES - 1) / QUERIES) : (T + QUERIES - 1) / QUERIES);
    int64_t cost = 2 * (int64_t)(pos + T) * c->head_dim * QUERIES;
    parallel(cpu, attention_groups, &(AttentionArgs){layer, out, q, pos, T}, items, cost);
}

typedef struct { float *h; const float *h2; } SwigluArgs;

// Items are tokens.
static void swiglu_tokens(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    (void)scratch;
    const SwigluArgs *a = args;
    size_t n = cpu->config.hidden_dim;
    for (int t = begin; t < end; t++) cpu->kernels->swiglu(a->h + t * n, a->h2 + t * n, (int)n);
}

static void swiglu_op(Backend *b, float *h, const float *h2, int T) {
    parallel((Cpu *)b, swiglu_tokens, &(SwigluArgs){h, h2}, T, 4 * ((Cpu *)b)->config.hidden_dim);
}

static void logits(Backend *b, float *out, const Mat *output, const float *x, int T) {
    matmul(b, &(Product){.out = out, .w = output}, 1, x, T);
}

typedef struct { const uint8_t *bytes; uint64_t *sums; } ReadArgs;

enum { READ_CHUNK = 1 << 16 }; // bytes

// Items are chunks of the bytes.
static void read_chunks(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    (void)cpu, (void)scratch;
    const ReadArgs *a = args;
    for (int chunk = begin; chunk < end; chunk++) {
        uint64_t sum[16] = {0}, word;
        for (size_t i = 0; i < READ_CHUNK; i += sizeof sum)
            for (int j = 0; j < 16; j++) {
                memcpy(&word, a->bytes + (size_t)chunk * READ_CHUNK + i + 8 * j, 8);
                sum[j] += word;
            }
        for (int j = 1; j < 16; j++) sum[0] += sum[j];
        a->sums[chunk] = sum[0];
    }
}

double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

// The best of many passes.
static double bandwidth(Backend *b, const void *bytes, size_t n) {
    int chunks = (int)(n / READ_CHUNK);
    uint64_t *sums = malloc((chunks + 1) * sizeof *sums);
    double best = 0, start = seconds();
    for (int pass = 0; sums && chunks && (pass < 5 || seconds() - start < 0.1); pass++) {
        double begin = seconds();
        parallel((Cpu *)b, read_chunks, &(ReadArgs){bytes, sums}, chunks, READ_CHUNK);
        double speed = (double)chunks * READ_CHUNK / (seconds() - begin);
        best = speed > best ? speed : best;
    }
    free(sums);
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
    publish(cpu, NULL, NULL, 1, 1);
    for (int i = 1; i < cpu->n_threads; i++) pthread_join(cpu->threads[i], NULL);
    for (int i = 0; i < cpu->n_memory; i++) free(cpu->memory[i]);
    free(cpu->memory);
    free(cpu->threads);
    free(cpu->members);
    free(cpu);
}

// Starts members 1..n_threads-1; with fewer when the system refuses, for the results are the same.
static bool start_team(Cpu *cpu, int n_threads) {
    pthread_mutex_init(&cpu->lock, NULL);
    pthread_cond_init(&cpu->wake, NULL);
    cpu->n_threads = 1;
    cpu->threads = calloc(n_threads, sizeof *cpu->threads);
    cpu->members = calloc(n_threads, sizeof *cpu->members);
    if (!cpu->threads || !cpu->members) return false;
    int started = 1;
    for (; started < n_threads; started++) {
        cpu->members[started] = (Member){cpu, started};
        if (pthread_create(&cpu->threads[started], NULL, member, &cpu->members[started])) break;
    }
    cpu->n_threads = started;
    return true;
}

// Items are rows of tiles.
static void pack_rows(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    (void)scratch;
    const Mat *m = args;
    for (int i = begin; i < end; i++) pack(cpu->kernels, (uint8_t *)m->tiles + i * tiles_size(m), m, i * TILE);
}

// Gives back the memory of the whole pages in which the matrix lies.
static void drop_pages(const Mat *m, size_t size) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)m->data, end = begin + size;
    begin = (begin + page - 1) / page * page, end = end / page * page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_DONTNEED);
}

// Puts a matrix in tiles at `tiles`; returns where they end. With tiles NULL it only measures.
static size_t keep_tiles(Cpu *cpu, Mat *m, uint8_t *tiles, bool mapped) {
    if (!is_quantised(m)) return 0;
    size_t size = (m->rows + TILE - 1) / TILE * tiles_size(m);
    if (!tiles) return size;
    m->tiles = tiles;
    parallel(cpu, pack_rows, m, (m->rows + TILE - 1) / TILE, TILE * m->cols);
    if (mapped) drop_pages(m, (size_t)m->rows * m->cols / 32 * (m->type == Q8_0 ? 34 : 18));
    return size;
}

static size_t keep_all(Cpu *cpu, Model *model, uint8_t *tiles) {
    Weights *w = &model->weights;
    size_t n = keep_tiles(cpu, &w->output, tiles, model->mapped);
    for (int i = 0; i < model->config.n_layers; i++) {
        Layer *l = &w->layers[i];
        Mat *mats[] = {&l->wq, &l->wk, &l->wv, &l->wo, &l->w1, &l->w3, &l->w2};
        for (int j = 0; j < 7; j++) n += keep_tiles(cpu, mats[j], tiles ? tiles + n : NULL, model->mapped);
    }
    return n;
}

// Where the weights are few enough for the caches to hold, they are kept in tiles, which are read twice as fast from
// there. Making them takes as long as reading them once or twice.
enum { MOST_TILES = 64 << 20 }; // bytes

static void order_weights(Cpu *cpu, Model *model) {
    size_t n = keep_all(cpu, model, NULL), huge = 2 << 20;
    void *tiles = n > 0 && n <= MOST_TILES ? allocate(cpu, n, 1, huge) : NULL;
    if (!tiles) return;
    madvise(tiles, n, MADV_HUGEPAGE);
    keep_all(cpu, model, tiles);
}

// What any operation needs for itself, in floats.
static size_t scratch_size(const Cpu *cpu) {
    const Config *c = &cpu->config;
    size_t cols = c->dim > c->hidden_dim ? c->dim : c->hidden_dim;
    size_t floats = ROWS * ((size_t)STRIP + cpu->chunk), tiles = (cols / 32 * Q8_TILE + 3) / 4 + (size_t)cpu->chunk * TILE;
    size_t attention = QUERIES * ((size_t)round_up(cpu->positions) + cpu->value_width), most = cols;
    most = most > floats ? most : floats;
    most = most > tiles ? most : tiles;
    most = most > attention ? most : attention;
    return (most + 15) / 16 * 16;
}

const char *cpu_open(Backend **backend, Model *model, int positions, int n_threads) {
    const Config *c = &model->config;
    *backend = NULL;
    const Kernels *kernels = choose_kernels();
    if (!kernels) return "LLAMAC_ISA names no instruction set of this machine; expected scalar, avx2, avx512 or neon";
    Cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return "out of memory";
    cpu->ops = (Backend){.chunk = CHUNK, .alloc = cpu_alloc, .embed = embed, .rmsnorm = rmsnorm, .matmul = matmul, .rope = rope,
                         .attention = attention, .swiglu = swiglu_op, .logits = logits, .bandwidth = bandwidth,
                         .close = cpu_close};
    cpu->config = *c;
    cpu->kernels = kernels;
    cpu->positions = positions;
    cpu->half = is_quantised(&model->weights.layers[0].wq);
    cpu->value_width = round_up(c->head_dim);
    cpu->chunk = positions < CHUNK ? positions : CHUNK;
    cpu->scratch_size = scratch_size(cpu);
    size_t heads = (size_t)c->n_layers * c->n_kv_heads, number = cpu->half ? 2 : 4;
    int cols = c->dim > c->hidden_dim ? c->dim : c->hidden_dim;
    bool ok = (cpu->keys = allocate(cpu, heads * round_up(positions) * c->head_dim, number, 64))
           && (cpu->values = allocate(cpu, heads * positions * cpu->value_width, number, 64))
           && (cpu->frequencies = allocate(cpu, c->head_dim / 2, sizeof(double), 64))
           && (cpu->rotation = allocate(cpu, (size_t)positions * c->head_dim, sizeof(float), 64))
           && (cpu->blocks = allocate(cpu, (size_t)cpu->chunk * (cols / 32 + 1), sizeof(Block), 64))
           && (cpu->scratch = allocate(cpu, (size_t)n_threads * cpu->scratch_size, sizeof(float), 64))
           && start_team(cpu, n_threads);
    for (int i = 0; ok && i < c->head_dim / 2; i++) cpu->frequencies[i] = pow(c->rope_theta, -2.0 * i / c->head_dim);
    if (ok) order_weights(cpu, model);
    *backend = &cpu->ops;
    if (ok) return NULL;
    cpu_close(&cpu->ops);
    *backend = NULL;
    return "not enough memory for the context; ask for fewer tokens with -n";
}

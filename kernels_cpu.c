// The Backend of the CPU: plain C that a compiler turns into vector instructions by itself.
// Work is handed to threads by rows, and every number is computed by one thread in one order,
// so results do not depend on how many threads there are.
#define _DEFAULT_SOURCE // POSIX beside C11
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "run.h"

// ----------------------------------------------------------------------------
// Scalar reference: a row of any type becomes floats, and floats are multiplied

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

static void row_f16(float *out, const uint16_t *row, int n) {
    for (int i = 0; i < n; i++) out[i] = half_to_float(row[i]);
}

static void row_bf16(float *out, const uint16_t *row, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)row[i] << 16;
        memcpy(&out[i], &bits, 4);
    }
}

static void row_q8_0(float *out, const uint8_t *row, int n) {
    for (; n > 0; n -= 32, row += 34, out += 32) {
        uint16_t scale;
        memcpy(&scale, row, 2);
        float d = half_to_float(scale);
        for (int i = 0; i < 32; i++) out[i] = d * (int8_t)row[2 + i];
    }
}

static void row_q4_0(float *out, const uint8_t *row, int n) {
    for (; n > 0; n -= 32, row += 18, out += 32) {
        uint16_t scale;
        memcpy(&scale, row, 2);
        float d = half_to_float(scale);
        for (int i = 0; i < 16; i++) out[i] = d * ((row[2 + i] & 15) - 8);
        for (int i = 0; i < 16; i++) out[16 + i] = d * ((row[2 + i] >> 4) - 8);
    }
}

static void row_int8_groups(float *out, const Mat *m, int64_t first) {
    // Groups run over the whole matrix: a row may begin and end inside one
    const int8_t *q = (const int8_t *)m->data + first;
    for (int i = 0; i < m->cols;) {
        int64_t group = (first + i) / m->group;
        int64_t left = (group + 1) * m->group - (first + i); // numbers of the row's part in this group
        int end = left < m->cols - i ? i + (int)left : m->cols;
        float scale;
        memcpy(&scale, (const char *)m->scales + 4 * group, 4);
        for (; i < end; i++) out[i] = scale * q[i];
    }
}

// Row r of a matrix as floats: in `buffer` (cols,), or where it lies when it is float32 already.
static const float *row(const Mat *m, int64_t r, float *buffer) {
    const uint8_t *data = m->data;
    int64_t first = r * m->cols;
    switch (m->type) {
    case F32: return (const float *)m->data + first;
    case F16: row_f16(buffer, (const uint16_t *)m->data + first, m->cols); break;
    case BF16: row_bf16(buffer, (const uint16_t *)m->data + first, m->cols); break;
    case Q8_0: row_q8_0(buffer, data + first / 32 * 34, m->cols); break;
    case Q4_0: row_q4_0(buffer, data + first / 32 * 18, m->cols); break;
    case INT8_GROUPS: row_int8_groups(buffer, m, first); break;
    }
    return buffer;
}

// Sixteen sums side by side fill vector registers without asking the compiler to reorder float arithmetic.
static float dot(const float *a, const float *b, int n) {
    float sum[16] = {0};
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) sum[j] += a[i + j] * b[i + j];
    for (; i < n; i++) sum[i % 16] += a[i] * b[i];
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++) sum[j] += sum[j + half];
    return sum[0];
}

static void softmax(float *x, int n) {
    float max = x[0], sum = 0;
    for (int i = 1; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int i = 0; i < n; i++) sum += x[i] = expf(x[i] - max);
    for (int i = 0; i < n; i++) x[i] /= sum;
}

// ----------------------------------------------------------------------------
// A team of threads: the caller is member 0, the others sleep between dispatches

typedef struct Cpu Cpu;
typedef void Task(Cpu *cpu, const void *args, int begin, int end, float *scratch);
typedef struct { Cpu *cpu; int index; } Member;

struct Cpu {
    Backend ops;
    Config config;
    int positions;
    float *key_cache, *value_cache; // (n_layers, positions, kv_dim)
    float *rotation;                // (positions, head_dim / 2, 2): cosine and sine
    int rotations;                  // positions of it computed so far
    float *scratch;                 // (n_threads, scratch_size): a row of a matrix, or attention scores
    int scratch_size;
    float **blocks;                 // what alloc gave out
    int n_blocks;

    int n_threads;
    pthread_t *threads;             // (n_threads,); threads[0] is not used
    Member *members;
    pthread_mutex_t lock;           // guards all that follows
    pthread_cond_t begin, done;
    Task *task;                     // NULL asks the members to leave
    const void *args;
    int n, busy;
    unsigned round;                 // counts dispatches
};

// Member `index` does its share of the items 0..n-1.
static void work(Cpu *cpu, int index) {
    int64_t n = cpu->n;
    int begin = (int)(n * index / cpu->n_threads), end = (int)(n * (index + 1) / cpu->n_threads);
    if (begin < end) cpu->task(cpu, cpu->args, begin, end, cpu->scratch + (size_t)index * cpu->scratch_size);
}

static void *member(void *arg) {
    Cpu *cpu = ((Member *)arg)->cpu;
    for (unsigned round = 0;; round++) {
        pthread_mutex_lock(&cpu->lock);
        while (cpu->round == round) pthread_cond_wait(&cpu->begin, &cpu->lock);
        bool leave = !cpu->task;
        pthread_mutex_unlock(&cpu->lock);
        if (leave) return NULL;
        work(cpu, ((Member *)arg)->index);
        pthread_mutex_lock(&cpu->lock);
        if (--cpu->busy == 0) pthread_cond_signal(&cpu->done);
        pthread_mutex_unlock(&cpu->lock);
    }
}

static void dispatch(Cpu *cpu, Task *task, const void *args, int n) {
    pthread_mutex_lock(&cpu->lock);
    cpu->task = task, cpu->args = args, cpu->n = n;
    cpu->busy = cpu->n_threads - 1;
    cpu->round++;
    pthread_cond_broadcast(&cpu->begin);
    pthread_mutex_unlock(&cpu->lock);
    if (!task) return;
    work(cpu, 0);
    pthread_mutex_lock(&cpu->lock);
    while (cpu->busy) pthread_cond_wait(&cpu->done, &cpu->lock);
    pthread_mutex_unlock(&cpu->lock);
}

// Runs the task over items 0..n-1, each of about `cost` multiplications. Waking the team takes some ten microseconds:
// small jobs are done sooner alone.
static void parallel(Cpu *cpu, Task *task, const void *args, int n, int64_t cost) {
    if (cpu->n_threads == 1 || n * cost < 100000) task(cpu, args, 0, n, cpu->scratch);
    else dispatch(cpu, task, args, n);
}

// ----------------------------------------------------------------------------
// The operations; run.h says what each computes

static void embed(Backend *b, float *x, const Mat *table, const int *tokens, int T) {
    Cpu *cpu = (Cpu *)b;
    for (int t = 0; t < T; t++)
        memcpy(x + (size_t)t * table->cols, row(table, tokens[t], cpu->scratch), sizeof(float) * table->cols);
}

static void rmsnorm(Backend *b, float *out, const float *x, const Mat *weight, int T) {
    int dim = weight->cols;
    const float *w = weight->data;
    for (int t = 0; t < T; t++, x += dim, out += dim) {
        float scale = 1.0f / sqrtf(dot(x, x, dim) / dim + ((Cpu *)b)->config.norm_eps);
        for (int i = 0; i < dim; i++) out[i] = w[i] * (scale * x[i]);
    }
}

typedef struct { const Product *products; int n; const float *x; int T; } MatmulArgs;

// Items are the rows of all products, one product after the other.
static void matmul_rows(Cpu *cpu, const void *args, int begin, int end, float *scratch) {
    (void)cpu;
    const MatmulArgs *a = args;
    for (const Product *p = a->products; p < a->products + a->n; p++) {
        int rows = p->w->rows, cols = p->w->cols;
        for (int r = begin > 0 ? begin : 0; r < end && r < rows; r++) {
            const float *w = row(p->w, r, scratch);
            for (int t = 0; t < a->T; t++) {
                float y = dot(w, a->x + (size_t)t * cols, cols);
                float *out = &p->out[(size_t)t * rows + r];
                *out = p->add ? *out + y : y;
            }
        }
        begin -= rows, end -= rows;
    }
}

static void matmul(Backend *b, const Product *products, int n, const float *x, int T) {
    int rows = 0;
    for (int i = 0; i < n; i++) rows += products[i].w->rows;
    parallel((Cpu *)b, matmul_rows, &(MatmulArgs){products, n, x, T}, rows, (int64_t)products->w->cols * T);
}

// Fills the table of rotations up to `positions`: angle = position / rope_scaling * rope_theta^(-2i / head_dim),
// in double precision, because a float angle is off by 1e-4 at position 2000.
static void extend_rotations(Cpu *cpu, int positions) {
    const Config *c = &cpu->config;
    for (int half = c->head_dim / 2; cpu->rotations < positions; cpu->rotations++) {
        float *r = cpu->rotation + (size_t)cpu->rotations * c->head_dim;
        for (int i = 0; i < half; i++) {
            double angle = cpu->rotations / (double)c->rope_scaling * pow(c->rope_theta, -2.0 * i / c->head_dim);
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

static void rope(Backend *b, int layer, float *q, float *k, const float *v, int pos, int T) {
    Cpu *cpu = (Cpu *)b;
    const Config *c = &cpu->config;
    extend_rotations(cpu, pos + T);
    for (int t = 0; t < T; t++) {
        const float *rotation = cpu->rotation + (size_t)(pos + t) * c->head_dim;
        rotate(q + (size_t)t * c->dim, c->dim, rotation, c->head_dim);
        rotate(k + (size_t)t * c->kv_dim, c->kv_dim, rotation, c->head_dim);
    }
    size_t at = ((size_t)layer * cpu->positions + pos) * c->kv_dim, bytes = sizeof(float) * T * c->kv_dim;
    memcpy(cpu->key_cache + at, k, bytes);
    memcpy(cpu->value_cache + at, v, bytes);
}

typedef struct { int layer; float *out; const float *q; int pos; } AttentionArgs;

// Items are the query heads of all tokens: item t * n_heads + h.
static void attention_heads(Cpu *cpu, const void *args, int begin, int end, float *scores) {
    const AttentionArgs *a = args;
    const Config *c = &cpu->config;
    size_t layer = (size_t)a->layer * cpu->positions * c->kv_dim;
    for (int item = begin; item < end; item++) {
        int h = item % c->n_heads, n = a->pos + item / c->n_heads + 1; // this token sees n positions
        size_t head = layer + h / (c->n_heads / c->n_kv_heads) * c->head_dim;
        const float *q = a->q + (size_t)item * c->head_dim;
        float *out = a->out + (size_t)item * c->head_dim;
        for (int i = 0; i < n; i++)
            scores[i] = dot(q, cpu->key_cache + head + (size_t)i * c->kv_dim, c->head_dim) / sqrtf(c->head_dim);
        softmax(scores, n);
        memset(out, 0, sizeof(float) * c->head_dim);
        for (int i = 0; i < n; i++) {
            const float *value = cpu->value_cache + head + (size_t)i * c->kv_dim;
            for (int j = 0; j < c->head_dim; j++) out[j] += scores[i] * value[j];
        }
    }
}

static void attention(Backend *b, int layer, float *out, const float *q, int pos, int T) {
    Cpu *cpu = (Cpu *)b;
    int64_t cost = 2 * (int64_t)(pos + T) * cpu->config.head_dim;
    parallel(cpu, attention_heads, &(AttentionArgs){layer, out, q, pos}, T * cpu->config.n_heads, cost);
}

static void swiglu(Backend *b, float *h, const float *h2, int T) {
    size_t n = (size_t)T * ((Cpu *)b)->config.hidden_dim;
    for (size_t i = 0; i < n; i++) h[i] = h[i] / (1.0f + expf(-h[i])) * h2[i];
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

static double seconds(void) {
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

static float *cpu_alloc(Backend *b, size_t n) {
    Cpu *cpu = (Cpu *)b;
    float **blocks = realloc(cpu->blocks, (cpu->n_blocks + 1) * sizeof(float *));
    if (!blocks) return NULL;
    cpu->blocks = blocks;
    float *block = n < SIZE_MAX / sizeof(float) ? malloc(n * sizeof(float)) : NULL;
    if (block) blocks[cpu->n_blocks++] = block;
    return block;
}

static void cpu_close(Backend *b) {
    Cpu *cpu = (Cpu *)b;
    dispatch(cpu, NULL, NULL, 0);
    for (int i = 1; i < cpu->n_threads; i++) pthread_join(cpu->threads[i], NULL);
    for (int i = 0; i < cpu->n_blocks; i++) free(cpu->blocks[i]);
    free(cpu->blocks);
    free(cpu->threads);
    free(cpu->members);
    free(cpu);
}

// Starts members 1..n_threads-1; with fewer when the system refuses, for the results are the same.
static bool start_team(Cpu *cpu, int n_threads) {
    pthread_mutex_init(&cpu->lock, NULL);
    pthread_cond_init(&cpu->begin, NULL);
    pthread_cond_init(&cpu->done, NULL);
    cpu->n_threads = 1;
    cpu->threads = calloc(n_threads, sizeof *cpu->threads);
    cpu->members = calloc(n_threads, sizeof *cpu->members);
    if (!cpu->threads || !cpu->members) return false;
    for (int i = 1; i < n_threads; i++, cpu->n_threads++) {
        cpu->members[i] = (Member){cpu, i};
        if (pthread_create(&cpu->threads[i], NULL, member, &cpu->members[i])) break;
    }
    return true;
}

const char *cpu_open(Backend **backend, Model *model, int positions, int n_threads) {
    const Config *c = &model->config;
    Cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return "out of memory";
    cpu->ops = (Backend){.chunk = 64, .alloc = cpu_alloc, .embed = embed, .rmsnorm = rmsnorm, .matmul = matmul,
                         .rope = rope, .attention = attention, .swiglu = swiglu, .logits = logits,
                         .bandwidth = bandwidth, .close = cpu_close};
    cpu->config = *c;
    cpu->positions = positions;
    cpu->scratch_size = c->dim > c->hidden_dim ? c->dim : c->hidden_dim;
    if (cpu->scratch_size < positions) cpu->scratch_size = positions;
    size_t cache = (size_t)c->n_layers * positions * c->kv_dim;
    bool ok = start_team(cpu, n_threads)
           && (cpu->key_cache = cpu_alloc(&cpu->ops, cache))
           && (cpu->value_cache = cpu_alloc(&cpu->ops, cache))
           && (cpu->rotation = cpu_alloc(&cpu->ops, (size_t)positions * c->head_dim))
           && (cpu->scratch = cpu_alloc(&cpu->ops, (size_t)n_threads * cpu->scratch_size));
    *backend = &cpu->ops;
    if (ok) return NULL;
    cpu_close(&cpu->ops);
    return "not enough memory for the context; ask for fewer tokens with -n";
}

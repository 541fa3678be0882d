// The CPU backend: how it opens and closes, its list of steps, and the packing of weights in tiles.
#include <stdlib.h>
#include "../os.h"
#include "cpu.h"

enum {
    PACKING_TOKEN = 16,       // the weights are packed at the start of the 16th call with one token
    MAX_STEPS = 24,           // max steps that the ops of one layer add
    PACKED_AT_ONCE = 4 << 20, // bytes of a matrix that are packed before their pages are dropped
    READ_AT_ONCE = 1 << 16,   // bytes that one item of the bandwidth test reads
};

// ----------------------------------------------------------------------------
// Memory

// Returns uninitialised memory for n elements of `size` bytes, which cpu_close frees. If there is
// not enough memory, sets out_of_memory and returns NULL.
static void *allocate(Cpu *cpu, size_t n, size_t size, size_t alignment) {
    void **memory = realloc(cpu->memory, (cpu->n_memory + 1) * sizeof(void *)), *p = NULL;
    if (memory) cpu->memory = memory;
    if (memory && n < SIZE_MAX / 2 / size)
        p = aligned_alloc(alignment, (n * size / alignment + 1) * alignment);
    if (p) memory[cpu->n_memory++] = p;
    else cpu->out_of_memory = true;
    return p;
}

static float *cpu_alloc(Backend *b, size_t n) { return allocate((Cpu *)b, n, sizeof(float), 64); }

// ----------------------------------------------------------------------------
// The list of steps

void llamac_add_step(Cpu *cpu, Task *task, const void *args, size_t size, int n, int64_t cost) {
    ThreadPool *pool = &cpu->pool;
    // outside begin and end, the step replaces the list and runs at once
    if (!cpu->collecting) pool->n_steps = 0, cpu->recorded = false;
    Step *step = &pool->steps[pool->n_steps++];
    *step = (Step){task, n, cost, {0}};
    memcpy(step->args, args, size);
    if (!cpu->collecting) llamac_thread_pool_run(pool), pool->n_steps = 0;
}

static void embed(Backend *b, float *x, const Mat *table, const int *tokens, int T) {
    Cpu *cpu = (Cpu *)b;
    size_t cols = table->cols;
    cpu->table = table, cpu->embedded = x;
    for (int t = 0; t < T; t++)
        llamac_floats(cpu->kernels, x + t * cols, table, tokens[t], 0, table->cols);
}

static void pack_weights(Cpu *cpu);

// Returns whether the ops must be called (backend.h). The steps of one token are the same for every
// token, except for the token and its position, so they are recorded and reused. Every 64th
// position records them anew, because the cost of attention grows with the position, and the pool
// uses the costs to decide whether steps are worth sharing.
static bool begin(Backend *b, const int *tokens, int T, int pos, bool all_logits) {
    Cpu *cpu = (Cpu *)b;
    cpu->all_logits = all_logits;
    bool packs = has_tiles(cpu->kernels) && !cpu->model->no_copy;
    if (T == 1 && packs && ++cpu->decoded == PACKING_TOKEN) pack_weights(cpu);
    if (T == 1 && cpu->recorded && pos % 64) {
        cpu->pos = pos;
        llamac_extend_rotations(cpu, pos + 1);
        embed(b, cpu->embedded, cpu->table, tokens, 1);
        return false;
    }
    cpu->pool.n_steps = 0, cpu->collecting = true, cpu->recorded = T == 1;
    return true;
}

static void end(Backend *b) {
    Cpu *cpu = (Cpu *)b;
    cpu->collecting = false;
    llamac_thread_pool_run(&cpu->pool);
}

// ----------------------------------------------------------------------------
// Packing of weights in tiles

typedef struct {
    const Mat *m;
    uint8_t *tiles; // all tiles of m
    int first;      // row of tiles that item 0 packs
} PackArgs;

// A Task. Items are rows of tiles, counted from `first`.
static void pack_rows(Worker *self, const void *args, int begin, int end) {
    const PackArgs *a = args;
    for (int i = a->first + begin; i < a->first + end; i++)
        llamac_pack(self->cpu->kernels, a->tiles + i * tiles_size(a->m), a->m, i * TILE);
}

// Drops the pages of a mapped file from `begin` to `end`, whose rows have just been packed. Drops
// the PACKED_AT_ONCE bytes before `begin` once more, because the system may have read them again
// when it read neighbouring pages. lowest: an address in the file; pages below it are kept,
// because they may not belong to the file.
static void drop_packed(const uint8_t *lowest, const uint8_t *begin, const uint8_t *end) {
    begin = begin - lowest > PACKED_AT_ONCE ? begin - PACKED_AT_ONCE : lowest;
    llamac_drop_pages(begin, end);
}

// Packs a matrix into `tiles` and returns the size of all its tiles in bytes. If `tiles` is NULL,
// only returns the size. Does not pack F16 and INT8_GROUPS, whose tiles would be in float32 and
// thus larger than the matrix, and returns 0 for them.
static size_t pack_matrix(Cpu *cpu, Mat *m, uint8_t *tiles, const uint8_t *lowest) {
    if (m->type != F32 && m->type != BF16 && !is_quantised(m)) return 0;
    int n = (m->rows + TILE - 1) / TILE; // rows of tiles; tiles_size(m) is the size of one
    // rows of tiles that are packed before the pages that they come from are dropped, so that
    // memory never holds both copies of a whole large matrix
    int at_once = (int)(PACKED_AT_ONCE / tiles_size(m)) + 1;
    for (int i = 0, count; tiles && i < n; i += count) {
        PackArgs args = {m, tiles, i};
        count = n - i < at_once ? n - i : at_once;
        llamac_add_step(cpu, pack_rows, &args, sizeof args, count, TILE * m->cols);
        if (cpu->model->mapped)
            drop_packed(lowest, row_of(m, i * TILE), row_of(m, (i + count) * TILE));
    }
    if (tiles) m->tiles = tiles;
    return n * tiles_size(m);
}

// Packs all matrices, one after the other, and returns the size of the tiles in bytes. If `tiles`
// is NULL, only returns the size.
static size_t pack_all(Cpu *cpu, uint8_t *tiles) {
    Weights *w = &cpu->model->weights;
    const uint8_t *lowest = w->output.data;
    for (int i = 0; i < cpu->config.n_layers; i++)
        if ((const uint8_t *)w->layers[i].wq.data < lowest) lowest = w->layers[i].wq.data;
    size_t n = pack_matrix(cpu, &w->output, tiles, lowest);
    for (int i = 0; i < cpu->config.n_layers; i++) {
        Layer *l = &w->layers[i];
        Mat *mats[] = {&l->wq, &l->wk, &l->wv, &l->wo, &l->w1, &l->w3, &l->w2};
        for (int j = 0; j < 7; j++)
            n += pack_matrix(cpu, mats[j], tiles ? tiles + n : NULL, lowest);
    }
    return n;
}

// Packs the weights into large pages. This takes as long as a few tokens, and makes all later
// tokens faster. Does nothing if this second copy of the weights needs half of the free memory or
// more.
static void pack_weights(Cpu *cpu) {
    size_t n = pack_all(cpu, NULL), page = 2 << 20;
    void *tiles = n > 0 && n < llamac_free_memory("") / 2 ? allocate(cpu, n, 1, page) : NULL;
    if (!tiles) return;
    llamac_use_large_pages(tiles, (n / page + 1) * page); // the size that `allocate` rounds up to
    pack_all(cpu, tiles);
    cpu->tiles = tiles, cpu->tiles_size = n;
}

// ----------------------------------------------------------------------------
// The bandwidth of memory

typedef struct { const uint8_t *bytes; } ReadArgs;

// A Task. Items are READ_AT_ONCE bytes. Stores the sum of all words, because the compiler would
// remove loads whose result is unused.
static void read_memory(Worker *self, const void *args, int begin, int end) {
    const ReadArgs *a = args;
    for (int item = begin; item < end; item++) {
        uint64_t sum[16] = {0}, word;
        for (size_t i = 0; i < READ_AT_ONCE; i += sizeof sum)
            for (int j = 0; j < 16; j++) {
                memcpy(&word, a->bytes + (size_t)item * READ_AT_ONCE + i + 8 * j, 8);
                sum[j] += word;
            }
        for (int j = 1; j < 16; j++) sum[0] += sum[j];
        memcpy(self->scratch, sum, sizeof *sum);
    }
}

// Measures several times how fast n bytes are read. Once the weights are packed, reads their tiles
// instead of `bytes`, at most all of them. Returns the highest speed in bytes per second, or 0 if n
// is less than READ_AT_ONCE.
static double bandwidth(Backend *b, const void *bytes, size_t n) {
    Cpu *cpu = (Cpu *)b;
    if (cpu->tiles) bytes = cpu->tiles, n = n < cpu->tiles_size ? n : cpu->tiles_size;
    int items = (int)(n / READ_AT_ONCE);
    double best = 0, start = llamac_seconds();
    for (int pass = 0; items && (pass < 5 || llamac_seconds() - start < 0.1); pass++) {
        double begin = llamac_seconds();
        llamac_add_step(cpu, read_memory, &(ReadArgs){bytes}, sizeof(ReadArgs), items,
                        READ_AT_ONCE);
        double speed = (double)items * READ_AT_ONCE / (llamac_seconds() - begin);
        best = speed > best ? speed : best;
    }
    return best;
}

// ----------------------------------------------------------------------------
// Opening and closing

static void cpu_close(Backend *b) {
    Cpu *cpu = (Cpu *)b;
    llamac_thread_pool_stop(&cpu->pool);
    for (int i = 0; i < cpu->n_memory; i++) free(cpu->memory[i]);
    free(cpu->memory);
    free(cpu);
}

// Returns how many floats of scratch a worker needs, whatever its task is. cols: max columns of a
// matrix.
static size_t scratch_size(const Cpu *cpu, size_t cols) {
    // what swiglu_tiles needs: ROWS rows of w1 (gate) and ROWS rows of w3 (up) as tiles, with one
    // column of padding, and their products with a panel of kernels->tokens tokens
    size_t tiles = 2 * ROWS * (cols + 1 + cpu->kernels->tokens);
    size_t attention = llamac_attention_scratch(cpu), max = tiles > attention ? tiles : attention;
    return (max + 15) / 16 * 16;
}

// Allocates the workers. Their buffers are at least a cache line apart, so that no two threads
// write to the same line. cols: max columns of a matrix.
static void make_workers(Cpu *cpu, int n_threads, size_t cols, size_t scratch_floats) {
    size_t x_size = cols + 16, n_blocks = cols / 32 + 2;
    Worker *workers = cpu->pool.workers = allocate(cpu, n_threads, sizeof(Worker), 64);
    float *x = allocate(cpu, n_threads * x_size, sizeof(float), 64);
    float *scratch = allocate(cpu, n_threads * scratch_floats, sizeof(float), 64);
    Block *blocks = allocate(cpu, n_threads * n_blocks, sizeof(Block), 64);
    if (cpu->out_of_memory) return;
    memset(workers, 0, n_threads * sizeof(Worker));
    for (int i = 0; i < n_threads; i++) {
        Worker *w = &workers[i];
        w->pool = &cpu->pool, w->cpu = cpu, w->x = x + i * x_size;
        w->blocks = blocks + i * n_blocks, w->scratch = scratch + i * scratch_floats;
    }
}

static void make_cache(Cpu *cpu) {
    const Config *c = &cpu->config;
    size_t rows = (size_t)c->n_layers * c->n_kv_heads * cpu->positions;
    size_t key_rows = rows / cpu->positions * round_up_to_tile(cpu->positions);
    size_t size = number_size(cpu->kv_type);
    cpu->value_width = round_up_to_tile(c->head_dim);
    cpu->keys = allocate(cpu, key_rows * c->head_dim, size, 64);
    cpu->values = allocate(cpu, rows * cpu->value_width, size, 64);
    cpu->rotation = allocate(cpu, (size_t)cpu->positions * 2 * c->head_dim, sizeof(float), 64);
    if (cpu->kv_type != INT8_GROUPS) return;
    cpu->key_scales = allocate(cpu, rows, sizeof(float), 64);
    cpu->value_scales = allocate(cpu, rows, sizeof(float), 64);
}

// Allocates the activations of a chunk of tokens. cols: max columns of a matrix.
static void make_activations(Cpu *cpu, size_t cols) {
    const Config *c = &cpu->config;
    size_t chunk = cpu->positions < CHUNK ? cpu->positions : CHUNK;
    size_t padded = chunk + cpu->kernels->tokens; // the last panel may be only partly filled
    cpu->q = allocate(cpu, chunk * c->q_dim, sizeof(float), 64);
    cpu->k = allocate(cpu, chunk * c->kv_dim, sizeof(float), 64);
    cpu->v = allocate(cpu, chunk * c->kv_dim, sizeof(float), 64);
    cpu->h = allocate(cpu, chunk * c->hidden_dim, sizeof(float), 64);
    cpu->h2 = allocate(cpu, chunk * c->hidden_dim, sizeof(float), 64);
    cpu->panels = allocate(cpu, padded * cols, sizeof(float), 64);
    // cols + 1, because an odd last column is padded to a pair
    cpu->pairs = allocate(cpu, padded * (cols + 1), sizeof(uint16_t), 64);
    cpu->gated_pairs = allocate(cpu, padded * (cols + 1), sizeof(uint16_t), 64);
    cpu->blocks = allocate(cpu, chunk * (cols / 32 + 1), sizeof(Block), 64);
    cpu->gated_blocks = allocate(cpu, chunk * (cols / 32 + 1), sizeof(Block), 64);
}

const char *llamac_cpu_open(Backend **backend, Model *model, int positions, int n_threads) {
    const Config *c = &model->config;
    *backend = NULL;
    const Kernels *kernels = llamac_choose_kernels();
    if (!kernels)
        return "LLAMAC_ISA names no instruction set of this machine; "
               "expected scalar, avx2, avx512, avx512bf16, neon or neondot";
    Cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return "out of memory";
    cpu->ops = (Backend){.chunk = CHUNK,
                         .begin = begin,
                         .end = end,
                         .alloc = cpu_alloc,
                         .embed = embed,
                         .attention = llamac_cpu_attention,
                         .add_product = llamac_cpu_add_product,
                         .feed_forward = llamac_cpu_feed_forward,
                         .logits = llamac_cpu_logits,
                         .bandwidth = bandwidth,
                         .close = cpu_close};
    cpu->config = *c, cpu->model = model, cpu->kernels = kernels, cpu->positions = positions;
    bool half =
        model->kv_bits == 16 || (!model->kv_bits && is_quantised(&model->weights.layers[0].wq));
    cpu->kv_type = model->kv_bits == 8 ? INT8_GROUPS : half ? F16 : F32;
    int cols = c->dim > c->hidden_dim ? c->dim : c->hidden_dim;
    if (cols < c->q_dim) cols = c->q_dim;
    make_cache(cpu);
    make_activations(cpu, cols);
    make_workers(cpu, n_threads, cols, scratch_size(cpu, cols));
    cpu->pool.steps = allocate(cpu, (c->n_layers + 1) * MAX_STEPS, sizeof(Step), 64);
    if (cpu->out_of_memory) {
        cpu_close(&cpu->ops);
        return "not enough memory for the context; ask for fewer tokens with -n or -c, or fewer "
               "bits of each with --kv";
    }
    llamac_thread_pool_start(&cpu->pool, n_threads);
    *backend = &cpu->ops;
    return NULL;
}

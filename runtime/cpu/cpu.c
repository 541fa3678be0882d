// The CPU backend: opening and closing, the list of steps, and the packing of weights into tiles.
#include <stdlib.h>
#include "../bytes.h"
#include "../os.h"
#include "cpu.h"

enum {
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
        p = llamac_allocate_aligned(alignment, (n * size / alignment + 1) * alignment);
    if (p) memory[cpu->n_memory++] = p, cpu->allocated += n * size;
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

typedef struct {
    float *x;        // (T, dim)
    const int *rows; // (n,) ascending
    int n;
} GatherArgs;

// A Task with one item.
static void gather_rows(Worker *self, const void *args, int begin, int end) {
    const GatherArgs *a = args;
    size_t dim = self->cpu->config.dim;
    (void)begin, (void)end;
    for (int i = 0; i < a->n; i++)
        memmove(a->x + i * dim, a->x + a->rows[i] * dim, dim * sizeof *a->x);
}

static void gather(Backend *b, float *x, const int *rows, int n) {
    Cpu *cpu = (Cpu *)b;
    GatherArgs args = {x, rows, n};
    llamac_add_step(cpu, gather_rows, &args, sizeof args, 1, (int64_t)n * cpu->config.dim);
}

typedef struct {
    float *out;        // (T, dim)
    const float *x;    // (T, dim)
    const float *norm; // (dim,)
} NormArgs;

// A Task. Items are tokens.
static void normalize_tokens(Worker *self, const void *args, int begin, int end) {
    const NormArgs *a = args;
    int dim = self->cpu->config.dim;
    for (size_t t = begin; t < (size_t)end; t++)
        normalize(self->cpu, a->out + t * dim, a->x + t * dim, a->norm, dim);
}

static void hidden_states(Backend *b, float *out, const Mat *norm, const float *x, int T) {
    Cpu *cpu = (Cpu *)b;
    NormArgs args = {out, x, norm->data};
    llamac_add_step(cpu, normalize_tokens, &args, sizeof args, T, 2 * cpu->config.dim);
}

// Returns whether the ops must be called (backend.h). Batches of one token have the same steps,
// except for the token, its position and its sequence, so the steps are recorded and reused. Those
// of a pass that computes hidden states are not recorded, because such passes are rare. Every 64th
// position records the steps again, because the cost of attention grows with the position, and the
// pool uses the costs to decide whether steps are worth sharing.
static bool begin(Backend *b, const Batch *batch) {
    Cpu *cpu = (Cpu *)b;
    int n_items = cpu->n_items;
    bool split = cpu->split;
    llamac_plan_attention(cpu, batch);
    float *logits = batch->n_wanted ? batch->logits : NULL;
    bool same = n_items == cpu->n_items && split == cpu->split && logits == cpu->logits;
    bool recordable = batch->T == 1 && !batch->hidden_states;
    if (recordable && cpu->recorded && same && batch->runs->pos % 64) {
        embed(b, cpu->embedded, cpu->table, batch->tokens, 1);
        return false;
    }
    cpu->pool.n_steps = 0, cpu->collecting = true, cpu->recorded = recordable;
    cpu->logits = logits;
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
        llamac_pack(self->cpu->kernels, a->tiles + i * tiles_size(a->m), a->m,
                    i * tile_height(a->m));
}

// Drops the pages of a mapped file from `begin` to `end`, whose rows have just been packed, from
// memory. Also drops the PACKED_AT_ONCE bytes before `begin` again, because the system may have
// read them once more together with neighbouring pages. lowest: an address in the file; pages below
// it are kept, because they may not belong to the file.
static void drop_packed(const uint8_t *lowest, const uint8_t *begin, const uint8_t *end) {
    begin = begin - lowest > PACKED_AT_ONCE ? begin - PACKED_AT_ONCE : lowest;
    llamac_drop_pages(begin, end);
}

// Packs a matrix into `tiles` and returns the size of all its tiles in bytes. If `tiles` is NULL,
// only returns the size. Does not pack INT8_GROUPS without blocks of 32, whose tiles would be in
// float32 and thus larger than the matrix, and returns 0 for it.
static size_t pack_matrix(Cpu *cpu, Mat *m, uint8_t *tiles, const uint8_t *lowest) {
    if (m->type == INT8_GROUPS && !is_grouped(m)) return 0;
    int height = tile_height(m);
    int n = (m->rows + height - 1) / height; // rows of tiles; tiles_size(m) is the size of one
    // rows of tiles to pack before dropping their source pages, so that memory never holds both
    // copies of a whole large matrix
    int at_once = (int)(PACKED_AT_ONCE / tiles_size(m)) + 1;
    for (int i = 0, count; tiles && i < n; i += count) {
        PackArgs args = {m, tiles, i};
        count = n - i < at_once ? n - i : at_once;
        llamac_add_step(cpu, pack_rows, &args, sizeof args, count, (int64_t)height * m->cols);
        if (cpu->model->file)
            drop_packed(lowest, row_of(m, i * height), row_of(m, (i + count) * height));
    }
    if (tiles) m->tiles = tiles;
    return n * tiles_size(m);
}

// The matrices that are packed, in the order of their tiles.
typedef struct {
    Mat *m[8];
    int n;
} Matrices;

static Matrices matrices_of(Weights *w, int layer) {
    Layer *l = &w->layers[layer];
    Matrices list = {{&l->wq, &l->wk, &l->wv, &l->wo, &l->w1, &l->w3, &l->w2}, 7};
    if (layer == 0) list.m[list.n++] = &w->output;
    return list;
}

// Returns the memory available for tiles, in bytes: the free memory, less an eighth of it, the
// backend's other allocations and the KV cache of one sequence.
static size_t room_for_tiles(const Cpu *cpu) {
    uint64_t free = llamac_free_memory("");
    uint64_t other = free / 8 + cpu->allocated + llamac_cache_size(cpu, cpu->max_positions);
    return free > other ? free - other : 0;
}

// Returns the total size in bytes of the tiles that fit in `room` bytes, taking the matrices in
// order and skipping those that do not fit. Sets *lowest to the lowest address among `output` and
// the wq of all layers.
static size_t packed_size(Cpu *cpu, size_t room, const uint8_t **lowest) {
    Weights *w = &cpu->model->weights;
    size_t n = 0;
    *lowest = w->output.data;
    for (int i = 0; i < cpu->config.n_layers; i++) {
        Matrices list = matrices_of(w, i);
        for (int j = 0; j < list.n; j++) {
            size_t size = pack_matrix(cpu, list.m[j], NULL, NULL);
            if (n + size <= room) n += size;
        }
        if ((const uint8_t *)list.m[0]->data < *lowest) *lowest = list.m[0]->data;
    }
    return n;
}

// Packs the weights into large pages. Sets *all to whether there is memory for the tiles of all
// matrices. If not, packs as many as fit beside the buffers of a stream for the others. Returns
// false if `progress` aborts it.
static bool pack_weights(Cpu *cpu, const Opening *o, bool *all) {
    Weights *w = &cpu->model->weights;
    const uint8_t *lowest;
    size_t room = room_for_tiles(cpu), n = packed_size(cpu, SIZE_MAX, &lowest), page = 2 << 20;
    // memory of a stream: two buffers, and some for its steps and for rounding up to large pages
    size_t done = 0, size, stream = 3 * SECTION_BYTES;
    *all = n <= room;
    if (!*all) n = packed_size(cpu, room > stream ? room - stream : 0, &lowest);
    uint8_t *tiles = n ? allocate(cpu, n, 1, page) : NULL;
    cpu->out_of_memory = false; // the engine works without tiles
    if (!tiles) return true;
    llamac_use_large_pages(tiles, (n / page + 1) * page); // the size that `allocate` rounds up to
    for (int i = 0; i < cpu->config.n_layers; i++) {
        Matrices list = matrices_of(w, i);
        for (int j = 0; j < list.n; j++) {
            if (o->progress && !o->progress(o->data, (float)done / n)) return false;
            size = pack_matrix(cpu, list.m[j], NULL, NULL);
            if (done + size <= n) done += pack_matrix(cpu, list.m[j], tiles + done, lowest);
        }
    }
    cpu->tiles = tiles, cpu->tiles_size = n;
    return !o->progress || o->progress(o->data, 1);
}

// ----------------------------------------------------------------------------
// Weights that are not kept in memory

// Streams the matrices that have no tiles, and drops all pages of the file from memory. Returns
// NULL, or the error.
static const char *stream_weights(Cpu *cpu) {
    const Config *c = &cpu->config;
    const struct File *file = cpu->model->file;
    Weights *w = &cpu->model->weights;
    Mat **matrices = resize(NULL, 7 * (size_t)c->n_layers + 1, sizeof *matrices);
    int n = 0;
    if (!matrices) return no_memory;
    for (int i = 0; i < c->n_layers; i++) {
        Layer *l = &w->layers[i];
        Mat *in_order[] = {&l->wq, &l->wk, &l->wv, &l->wo, &l->w1, &l->w3, &l->w2};
        for (int j = 0; j < 7; j++)
            if (!in_order[j]->tiles) matrices[n++] = in_order[j];
    }
    if (!w->output.tiles) matrices[n++] = &w->output;
    cpu->stream = llamac_open_stream(matrices, n, file);
    free(matrices);
    if (!cpu->stream) return "cannot start the reader of the weights: not enough memory or threads";
    size_t steps = (c->n_layers + 1) * MAX_STEPS + 2 * llamac_count_parts(cpu->stream);
    cpu->pool.steps = allocate(cpu, steps, sizeof(Step), 64);
    if (!cpu->pool.steps) return no_memory;
    cpu->ops.streamed = llamac_streamed_bytes(cpu->stream);
    cpu->ops.failure = llamac_stream_failure;
    llamac_drop_pages(file->bytes, file->bytes + file->size);
    return NULL;
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

// Measures several times how fast n bytes are read, and returns the highest speed in bytes per
// second, or 0 if n is less than READ_AT_ONCE. If the weights are packed, reads up to n bytes of
// their tiles instead of `bytes`. If weights are streamed, measures once how fast they are read.
static double bandwidth(Backend *b, const void *bytes, size_t n) {
    Cpu *cpu = (Cpu *)b;
    if (cpu->stream) return llamac_stream_speed(cpu->stream);
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
    llamac_close_stream(cpu->stream);
    llamac_free_pages(cpu);
    for (int i = 0; i < cpu->n_memory; i++) llamac_free_aligned(cpu->memory[i]);
    free(cpu->memory);
    free(cpu);
}

// Returns how many floats of scratch a worker needs for any task. cols: max columns of a matrix.
static size_t scratch_size(const Cpu *cpu, size_t cols) {
    // swiglu_tiles needs ROWS rows of w1 (gate) and ROWS rows of w3 (up) as tiles, with one column
    // of padding, and their products with a panel of kernels->tokens tokens
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
    size_t n_pairs = cols + 64; // a cache line apart
    uint16_t *pairs = allocate(cpu, n_threads * n_pairs, sizeof(uint16_t), 64);
    if (cpu->out_of_memory) return;
    memset(workers, 0, n_threads * sizeof(Worker));
    for (int i = 0; i < n_threads; i++) {
        Worker *w = &workers[i];
        w->pool = &cpu->pool, w->cpu = cpu, w->x = x + i * x_size;
        w->pairs = pairs + i * n_pairs;
        w->blocks = blocks + i * n_blocks, w->scratch = scratch + i * scratch_floats;
    }
}

// Allocates the arrays of attention, except the caches.
static void make_attention(Cpu *cpu) {
    const Config *c = &cpu->config;
    cpu->value_width = round_up_to_tile(c->head_dim);
    cpu->max_ranges = (cpu->max_positions + KV_RANGE - 1) / KV_RANGE + 1;
    size_t partial = 2 + cpu->value_width, items = (size_t)(CHUNK + cpu->max_ranges) * c->n_heads;
    cpu->rotation = allocate(cpu, (size_t)cpu->max_positions * 2 * c->head_dim, sizeof(float), 64);
    cpu->partials = allocate(cpu, cpu->max_ranges * c->n_heads * partial, sizeof(float), 64);
    cpu->items = allocate(cpu, items, sizeof *cpu->items, 64);
    cpu->caches = allocate(cpu, CHUNK, sizeof *cpu->caches, 64);
    cpu->positions = allocate(cpu, CHUNK, sizeof *cpu->positions, 64);
}

// Allocates the activations of a chunk of tokens. cols: max columns of a matrix.
static void make_activations(Cpu *cpu, size_t cols) {
    const Config *c = &cpu->config;
    const size_t chunk = CHUNK;
    const size_t padded = chunk + cpu->kernels->tokens; // the last panel may be only partly filled
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

const char *llamac_cpu_open(Backend **backend, Model *model, const Opening *o) {
    const Config *c = &model->config;
    *backend = NULL;
    Cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return "out of memory";
    cpu->ops = (Backend){.chunk = CHUNK,
                         .max_runs = CHUNK,
                         .begin = begin,
                         .end = end,
                         .alloc = cpu_alloc,
                         .new_cache = llamac_cpu_new_cache,
                         .free_cache = llamac_cpu_free_cache,
                         .reserve = llamac_cpu_reserve,
                         .share = llamac_cpu_share,
                         .read_cache = llamac_cpu_read_cache,
                         .write_cache = llamac_cpu_write_cache,
                         .embed = embed,
                         .attention = llamac_cpu_attention,
                         .add_product = llamac_cpu_add_product,
                         .feed_forward = llamac_cpu_feed_forward,
                         .gather = gather,
                         .logits = llamac_cpu_logits,
                         .hidden_states = hidden_states,
                         .bandwidth = bandwidth,
                         .close = cpu_close};
    cpu->config = *c, cpu->model = model, cpu->kernels = o->kernels;
    cpu->max_positions = o->positions;
    bool half = o->kv_bits == 16 || (!o->kv_bits && is_quantised(&model->weights.layers[0].wq));
    cpu->kv_type = o->kv_bits == 8 ? INT8_GROUPS : half ? F16 : F32;
    cpu->ops.kv_bits = o->kv_bits == 8 ? 8 : half ? 16 : 32;
    int cols = c->dim > c->hidden_dim ? c->dim : c->hidden_dim;
    if (cols < c->q_dim) cols = c->q_dim;
    make_attention(cpu);
    make_activations(cpu, cols);
    if (!cpu->out_of_memory) make_workers(cpu, o->n_threads, cols, scratch_size(cpu, cols));
    cpu->pool.steps = allocate(cpu, (c->n_layers + 1) * MAX_STEPS, sizeof(Step), 64);
    if (cpu->out_of_memory) {
        cpu_close(&cpu->ops);
        return "not enough memory for the context; use a smaller -n or -c, or --kv q8";
    }
    llamac_thread_pool_start(&cpu->pool, o->n_threads);
    const char *wrong = NULL;
    bool pack = has_tiles(cpu->kernels) && !o->no_copy && !model->stream;
    bool all = !model->stream;
    if (pack && !pack_weights(cpu, o, &all)) wrong = "aborted by the program";
    if (!wrong && !all && model->file) wrong = stream_weights(cpu);
    if (wrong) cpu_close(&cpu->ops);
    else *backend = &cpu->ops;
    return wrong;
}

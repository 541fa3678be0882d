// Runs random programs on the ops of the CPU backend: an embedding, then other ops in any order,
// inside and outside of begin and end. The random models have mixed types, and sizes that leave
// remainders in every kernel. Compares each instruction set, on one to three threads, with the
// scalar kernels on one thread. The ops must leave the same numbers in x, y and the logits, except
// for rounding. tests/cuda_ops.cpp has such programs for GPUs.
//
// Usage: programs SEED ROUNDS. The exit code is 1 if a program differs.
#define _DEFAULT_SOURCE 1 // POSIX in addition to C11
#include "../runtime/cpu/cpu.c"
#include "../runtime/cpu/products.c"
#include "../runtime/cpu/attention.c"
#include "../runtime/cpu/blocks.h"
#include <stdio.h>

// OPS: ops per layer. With mixed types, each op needs up to 9 of the MAX_STEPS steps of a layer.
enum { POSITIONS = 570, OPS = 3, CALLS = 12 };

static uint32_t state;
static int positions; // of this round

static int below(int n) { return (int)((state = state * 1664525 + 1013904223) >> 8) % n; }
static float number(void) { return (below(1 << 20) - (1 << 19)) * 0x1p-19f; }

static uint16_t half_of(float f) {
    uint16_t half;
    llamac_reference.halves(&half, &f, 1);
    return half;
}

static Mat matrix(Type type, int rows, int cols) {
    if (block_size(type).numbers && cols % block_size(type).numbers) type = BF16;
    Mat m = {.type = type, .rows = rows, .cols = cols, .group = 16};
    size_t n = (size_t)rows * cols, // numbers
        size = is_quantised(&m)      ? (size_t)rows * units(&m) * unit_size(&m)
               : type == F32         ? 4 * n
               : type == INT8_GROUPS ? n
                                     : 2 * n;
    uint8_t *bytes = malloc(size);
    float *scales = malloc((n / 16 + 1) * sizeof *scales), small = 1 / sqrtf(cols);
    for (size_t i = 0; i < n / 16 + 1; i++) scales[i] = small * 0x1p-7f;
    for (size_t i = 0; i < size; i++) bytes[i] = below(256);
    for (size_t i = 0; i < n && !is_quantised(&m) && type != INT8_GROUPS; i++) {
        float f = number() * small;
        uint16_t half = half_of(f);
        if (type == F32) memcpy(bytes + 4 * i, &f, 4);
        else memcpy(bytes + 2 * i, type == F16 ? (char *)&half : (char *)&f + 2, 2);
    }
    // approximate largest integer of a block, before the half-precision scale multiplies it
    float largest = type == Q8_0 ? 127 : type == Q6_K ? 32 * 128 : type >= Q4_K ? 15 * 63 : 8;
    uint16_t scale = half_of(small / largest);
    for (size_t i = 0; is_quantised(&m) && i < size; i += unit_size(&m))
        for (int j = 0; j < halves_of(type); j++)
            memcpy(bytes + i + halves_at(type) + 2 * j, &scale, 2);
    m.data = bytes, m.scales = scales;
    return m;
}

static Type any_type(Type usual) {
    static const Type types[] = {F32,  F16,  BF16, Q8_0, Q4_0, INT8_GROUPS,
                                 Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K};
    return below(3) ? usual : types[below(12)];
}

static Model random_model(void) {
    static const Type types[] = {F32, F16, BF16, Q8_0, Q4_0, INT8_GROUPS, Q4_K, Q6_K};
    Type type = types[below(8)];
    int heads = 1 + below(3), groups = 1 + below(6),
        head_dim = below(3) ? 16 * (1 + below(2)) : 2 * (1 + below(12));
    bool blocks = type == Q4_K || type == Q6_K; // blocks of 256 numbers
    if (blocks) heads = 1 + below(2), groups = 8 / heads, head_dim = 32;
    // wide: dim is chosen independently of q_dim
    bool biases = below(2), norms = below(2), wide = below(2);
    Config c = {.n_layers = 1 + below(2),
                .n_heads = heads * groups,
                .n_kv_heads = heads,
                .head_dim = head_dim,
                .q_dim = heads * groups * head_dim,
                .dim = blocks ? 256
                       : wide ? 32 * (1 + below(4))
                              : heads * groups * head_dim,
                .kv_dim = heads * head_dim,
                .vocab_size = 1 + below(90),
                .seq_len = positions,
                .hidden_dim = blocks && below(3) ? 256
                              : below(3)         ? 32 * (1 + below(4))
                                                 : 1 + below(150),
                .norm_eps = 1e-5f,
                .window = below(3) ? 0 : 1 + below(positions),
                .rope_halves = below(2),
                .rope_scale = below(2) ? 1 : 1.2f};
    Model m = {.config = c,
               .weights = {.token_embedding = matrix(any_type(type), c.vocab_size, c.dim),
                           .norm = matrix(F32, 1, c.dim),
                           .output = matrix(any_type(type), c.vocab_size, c.dim),
                           .frequencies = malloc(head_dim / 2 * sizeof(double)),
                           .layers = malloc(c.n_layers * sizeof(Layer))}};
    for (int i = 0; i < head_dim / 2; i++)
        m.weights.frequencies[i] = pow(10000, -2.0 * i / head_dim);
    for (int l = 0; l < c.n_layers; l++) {
        Layer *layer = &m.weights.layers[l];
        *layer = (Layer){.attention_norm = matrix(F32, 1, c.dim),
                         .wq = matrix(any_type(type), c.q_dim, c.dim),
                         .wk = matrix(any_type(type), c.kv_dim, c.dim),
                         .wv = matrix(any_type(type), c.kv_dim, c.dim),
                         .wo = matrix(any_type(type), c.dim, c.q_dim),
                         .ffn_norm = matrix(F32, 1, c.dim),
                         .w1 = matrix(any_type(type), c.hidden_dim, c.dim),
                         .w3 = matrix(any_type(type), c.hidden_dim, c.dim),
                         .w2 = matrix(any_type(type), c.dim, c.hidden_dim)};
        if (biases)
            layer->bq = matrix(F32, 1, c.q_dim), layer->bk = matrix(F32, 1, c.kv_dim),
            layer->bv = matrix(F32, 1, c.kv_dim);
        if (norms)
            layer->q_norm = matrix(F32, 1, head_dim), layer->k_norm = matrix(F32, 1, head_dim);
    }
    return m;
}

static void free_model(Model *m) {
    Weights *w = &m->weights;
    for (int l = 0; l < m->config.n_layers; l++) {
        Layer *a = &w->layers[l];
        // clang-format off
        Mat *all[] = {&a->attention_norm, &a->wq, &a->wk, &a->wv, &a->wo, &a->ffn_norm, &a->w1,
                      &a->w3, &a->w2, &a->bq, &a->bk, &a->bv, &a->q_norm, &a->k_norm};
        // clang-format on
        for (int i = 0; i < 14; i++) free((void *)all[i]->data), free((void *)all[i]->scales);
    }
    Mat *all[] = {&w->token_embedding, &w->norm, &w->output};
    for (int i = 0; i < 3; i++) free((void *)all[i]->data), free((void *)all[i]->scales);
    free(w->layers), free(w->frequencies);
}

// A backend and a sequence of it.
typedef struct {
    Backend *b;
    Cache *cache;
    Model *model; // a copy, in which the backend stores pointers to its packed weights
    float *x, *y, *logits;
} Machine;

static Machine open_machine(const Model *model, const Kernels *kernels, int kv_bits, int threads) {
    Machine a = {0};
    size_t layers = model->config.n_layers * sizeof(Layer);
    Model *m = a.model = malloc(sizeof *m);
    *m = *model, m->weights.layers = memcpy(malloc(layers), model->weights.layers, layers);
    Opening opening = {
        .positions = positions, .n_threads = threads, .kv_bits = kv_bits, .kernels = kernels};
    const char *wrong = llamac_cpu_open(&a.b, m, &opening);
    if (wrong) printf("%s: %s\n", kernels->name, wrong), exit(2);
    a.cache = a.b->new_cache(a.b);
    if (!a.cache) printf("no memory for a cache\n"), exit(2);
    a.x = a.b->alloc(a.b, positions * m->config.dim),
    a.y = a.b->alloc(a.b, positions * m->config.q_dim);
    memset(a.x, 0, positions * m->config.dim * sizeof(float)),
        memset(a.y, 0, positions * m->config.q_dim * sizeof(float));
    a.logits = a.b->alloc(a.b, positions * m->config.vocab_size);
    return a;
}

static void close_machine(const Machine *a) {
    a->b->free_cache(a->b, a->cache);
    a->b->close(a->b);
    free(a->model->weights.layers), free(a->model);
}

typedef struct { int op, layer, pos, T, tokens[POSITIONS]; } Call;

// A batch of T tokens of one sequence, all of whose logits are wanted.
typedef struct {
    Run run;
    Batch batch;
    int wanted[POSITIONS];
} OneRun;

static void fill_batch(OneRun *one, const Machine *a, const int *tokens, int T, int pos) {
    for (int i = 0; i < T; i++) one->wanted[i] = i;
    one->run = (Run){a->cache, 0, T, pos};
    one->batch = (Batch){tokens, T, &one->run, 1, one->wanted, T, a->logits, NULL};
}

static void call(const Machine *a, const Call *c) {
    Backend *b = a->b;
    OneRun one;
    fill_batch(&one, a, c->tokens, c->T, c->pos);
    const Weights *w = &a->model->weights;
    const Layer *layer = &w->layers[c->layer];
    switch (c->op) {
    case 0: b->embed(b, a->x, &w->token_embedding, c->tokens, c->T); break;
    case 1: b->attention(b, &one.batch, c->layer, layer, a->y, a->x); break;
    case 2: b->add_product(b, a->x, &layer->wo, a->y, c->T); break;
    case 3: b->feed_forward(b, layer, a->x, c->T); break;
    case 4: b->add_product(b, a->y, &layer->wq, a->x, c->T); break;
    default: b->logits(b, a->logits, &w->norm, &w->output, a->x, c->T);
    }
}

// Makes a random program for T tokens from position pos on. The caches of all layers must have the
// positions before. Returns the number of calls.
static int random_program(Call *calls, const Model *m, int pos, int T) {
    int n = 2 + below(OPS * m->config.n_layers);
    for (int i = 0; i < n; i++) {
        calls[i] = (Call){i ? 1 + below(5) : 0, below(m->config.n_layers), pos, T, {0}};
        for (int t = 0; t < T; t++) calls[i].tokens[t] = below(m->config.vocab_size);
    }
    for (int l = 0; l < m->config.n_layers; l++)
        calls[n++] = (Call){1, l, pos, T, {0}}; // fills the cache for the next program
    return n;
}

static void run(const Machine *a, const Call *calls, int n, bool together) {
    int none[2] = {0};
    OneRun one;
    if (!a->b->reserve(a->b, a->cache, calls->pos, calls->T))
        printf("no memory for a cache\n"), exit(2);
    fill_batch(&one, a, none, 2, 0);
    if (together)
        a->b->begin(a->b, &one.batch), a->b->end(a->b); // drops the steps of the previous program
    fill_batch(&one, a, calls->tokens, calls->T, calls->pos);
    if (together) a->b->begin(a->b, &one.batch);
    for (int i = 0; i < n; i++) call(a, &calls[i]);
    if (together) a->b->end(a->b);
}

static bool differ(const char *what, const float *found, const float *expected, size_t n,
                   double most) {
    double worst = 0, largest = 1e-3;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)found[i] - expected[i]);
        worst = d <= worst ? worst : isnan(d) ? INFINITY : d;
        largest = fmax(largest, fabs(expected[i]));
    }
    if (worst > most * largest) printf("%s: %g of %g\n", what, worst, largest);
    return worst > most * largest;
}

int main(int argc, char **argv) {
    const Kernels *found[MAX_KERNELS];
    int kinds = llamac_find_kernels(found), rounds = argc > 2 ? atoi(argv[2]) : 1, failed = 0;
    state = argc > 1 ? (uint32_t)atoi(argv[1]) : 1;
    for (int round = 0; round < rounds; round++) {
        static const int kv_bits[] = {0, 32, 16, 8};
        positions = round ? 40 : POSITIONS; // round 0 needs more than one KV_RANGE of the attention
        Model m = random_model();
        int bits = kv_bits[below(4)];
        Machine scalar = open_machine(&m, llamac_choose_kernels("scalar"), bits, 1);
        Machine others[24];
        for (int i = 0; i < kinds; i++)
            for (int j = 0; j < 3; j++) others[3 * i + j] = open_machine(&m, found[i], bits, 1 + j);
        for (int pos = 0, T; pos < positions; pos += T) {
            Call calls[CALLS];
            int most = positions - pos < CHUNK ? positions - pos : CHUNK;
            T = below(2) ? 1 : 1 + below(most);
            int n = random_program(calls, &m, pos, T), together = below(2);
            run(&scalar, calls, n, false);
            for (int i = 0; i < 3 * kinds; i++) {
                const Machine *a = &others[i];
                size_t wide = (size_t)T * m.config.dim, attended = (size_t)T * m.config.q_dim,
                       vocab = (size_t)T * m.config.vocab_size;
                run(a, calls, n, together);
                bool logits = false;
                for (int k = 0; k < n; k++) logits |= calls[k].op == 5;
                // an activation halfway between two 8-bit numbers may be rounded to either, and the
                // next ops propagate the difference
                double most = 3e-2;
                int wrong = differ("x", a->x, scalar.x, wide, most)
                            + differ("y", a->y, scalar.y, attended, most)
                            + (logits && differ("logits", a->logits, scalar.logits, vocab, most));
                if (wrong)
                    failed = 1, printf("%s, %d threads, round %d, T=%d at %d\n", found[i / 3]->name,
                                       1 + i % 3, round, T, pos);
                memcpy(a->x, scalar.x, wide * sizeof(float)),
                    memcpy(a->y, scalar.y, attended * sizeof(float));
            }
        }
        close_machine(&scalar);
        for (int i = 0; i < 3 * kinds; i++) close_machine(&others[i]);
        free_model(&m);
    }
    puts(failed ? "differ" : "agree");
    return failed;
}

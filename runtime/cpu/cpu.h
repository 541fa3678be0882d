// Shared by the files of the CPU backend: cpu.c opens it and records steps, products.c has matrix
// products and the feed-forward network, attention.c has RoPE, the KV cache and attention.
//
// An op of the backend (backend.h) adds steps to a list. A step is a loop over independent items,
// such as some rows of a matrix, which the thread pool shares among its workers. Every number is
// computed by one thread in one order, so results do not depend on the number of threads.
//
// Three forms of activations, one for each kind of weights: a panel is the activations of a few
// tokens, transposed, so that a kernel multiplies all of them with one weight; pairs are a panel in
// BF16 with two columns side by side; blocks are 32 activations of a token in 8 bits (kernels.h).
#ifndef CPU_H
#define CPU_H

#include <math.h>
#include "thread_pool.h"
#include "weights.h"

enum {
    CHUNK = 128,     // max tokens of one call: more tokens do not make a product faster
    ROWS = 2 * TILE, // rows of a matrix that are one item of a product's step
};

struct Cpu {
    Backend ops;
    Config config;
    const Kernels *kernels;
    Model *model;

    // The KV cache (attention.c)
    int positions;   // max tokens in the cache
    Type kv_type;    // F32, F16, or INT8_GROUPS with a scale for each key and each value
    int value_width; // head_dim rounded up to a multiple of TILE
    char *keys;      // (n_layers, n_kv_heads, ceil(positions / TILE), head_dim, TILE)
    char *values;    // (n_layers, n_kv_heads, positions, value_width)
    // (n_layers, n_kv_heads, positions) for INT8_GROUPS, else NULL
    float *key_scales, *value_scales;
    float *rotation; // (positions, 2, head_dim) cosines and sines for Kernels.rotate
    int n_rotations; // positions of it that are computed so far

    // Activations of a chunk of tokens. gated_ are those of the feed-forward network after SwiGLU
    float *q, *k, *v;              // (chunk, q_dim), (chunk, kv_dim), (chunk, kv_dim)
    float *h, *h2;                 // (chunk, hidden_dim) gate, up
    float *panels;                 // (columns, tokens of a panel), one panel after the other
    uint16_t *pairs, *gated_pairs; // (columns / 2, tokens of a panel, 2), likewise
    Block *blocks, *gated_blocks;  // (chunk, columns / 32)
    // Logits of all tokens are requested, perhaps for comparison: no activations in BF16
    bool all_logits;

    // Weights in tiles (cpu.c)
    const void *tiles; // NULL until the weights are packed
    size_t tiles_size; // bytes
    int decoded;       // calls with one token so far

    void **memory; // allocations, freed at the end
    int n_memory;
    bool out_of_memory; // some allocation failed

    // The steps of one call of forward. Those for one token stay for the next token
    ThreadPool pool;
    bool collecting;  // between begin and end: steps are added, and run at the end
    bool recorded;    // the steps are those for one token
    const Mat *table; // embedding table of that token
    float *embedded;  // where its row was written
    int pos;          // position of the first token of the call
};

// Adds a step of n items to the list; outside begin and end, runs it at once. `cost` is the
// approximate number of multiplications of one item.
void llamac_add_step(Cpu *, Task *, const void *args, size_t size, int n, int64_t cost);

// x (n,) = y (n,), or x += y.
static inline void put_row(float *x, const float *y, int n, bool add) {
    for (int i = 0; i < n; i++) x[i] = add ? x[i] + y[i] : y[i];
}

// RMSNorm: out (n,) = x / rms(x) * weight. x and out may be the same.
static inline void normalize(const Cpu *cpu, float *out, const float *x, const float *weight,
                             int n) {
    float scale = 1.0f / sqrtf(cpu->kernels->types[F32].dot(x, x, n) / n + cpu->config.norm_eps);
    for (int i = 0; i < n; i++) out[i] = weight[i] * (scale * x[i]);
}

// ----------------------------------------------------------------------------
// Products (products.c)

// One matrix product: out (T, w.rows) = x (T, w.cols) w^T, or out += x w^T.
typedef struct {
    float *out;
    const Mat *w;
    bool add;
} Product;

// The forms of activations, of which each type of weights reads one: a bit each.
enum { PANELS = 1, PAIRS = 2, BLOCKS = 4 };

// The input of products: x (T, cols), or RMSNorm of x, in the forms that the weights need.
typedef struct {
    const float *x, *norm; // norm: (cols,) weights of the RMSNorm, or NULL
    const float *panels;   // with one token, x itself
    const uint16_t *pairs; // NULL: BF16 is multiplied in float32
    const Block *blocks;
    int cols, T;
} Activations;

// Arguments of the steps that multiply: up to three products with the same input.
typedef struct {
    Product products[3];
    int n;
    Activations in;
    int reads;  // forms that the products read
    int writes; // of a SwiGLU step: the form of h that the next product reads; 0: floats
    bool ready; // an earlier step has made the form that the products read
} MatmulArgs;
_Static_assert(sizeof(MatmulArgs) <= MAX_ARGS, "MatmulArgs must fit in a step");

// The arguments for n products of x (T, cols), or of RMSNorm(x) if norm is not NULL.
MatmulArgs llamac_matmul_args(const Cpu *, const Product *, int n, const Mat *norm, const float *x,
                              int T);

// Adds the steps that convert the activations of many tokens to the forms that the products read.
void llamac_prepare(Cpu *, const MatmulArgs *);

// Adds the step that multiplies.
void llamac_multiply(Cpu *, const MatmulArgs *);

// The activations for one worker. With one token, each worker normalises and quantises them itself,
// because waiting for another worker takes as long.
Activations llamac_activations(Worker *, const MatmulArgs *);

// Computes rows r..end-1 of one product; r is a multiple of TILE.
void llamac_multiply_rows(Worker *, const Product *, const Activations *, int r, int end);

// Items of a product are ROWS rows each.
static inline int items_of(const Product *p) { return (p->w->rows + ROWS - 1) / ROWS; }
static inline int64_t cost_of_item(const MatmulArgs *a) {
    return (int64_t)ROWS * a->in.cols * a->in.T;
}

// ----------------------------------------------------------------------------
// Ops. backend.h has their formulas

void llamac_cpu_attention(Backend *, int layer, const Layer *, float *out, const float *x, int pos,
                          int T);
void llamac_cpu_add_product(Backend *, float *x, const Mat *w, const float *y, int T);
void llamac_cpu_feed_forward(Backend *, const Layer *, float *x, int T);
void llamac_cpu_logits(Backend *, float *logits, const Mat *norm, const Mat *output, const float *x,
                       int T);

// Fills in the rotations of RoPE for positions below `positions`.
void llamac_extend_rotations(Cpu *, int positions);

// Floats of scratch that one worker needs for attention.
size_t llamac_attention_scratch(const Cpu *);

#endif

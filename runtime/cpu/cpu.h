// Declarations that the files of the CPU backend share. cpu.c opens the backend and records steps,
// products.c has matrix products and the feed-forward network, attention.c has RoPE, the KV cache
// and attention.
//
// An op of the backend (backend.h) adds steps to a list. A step is a loop over independent items,
// such as some rows of a matrix, which the thread pool shares among its workers. One thread
// computes each number, always in the same order, so results do not depend on the number of
// threads.
//
// Before a product, activations are converted to the form that the type of the weights needs:
//   panel   for float weights: the activations of a few tokens, transposed, so that a kernel loads
//           a weight once and multiplies it with all of these tokens
//   pairs   for BF16 weights, if the machine multiplies BF16: a panel in BF16 with two columns side
//           by side
//   blocks  for quantised weights: 32 activations of a token in 8 bits (Block in kernels.h)
#ifndef CPU_H
#define CPU_H

#include <math.h>
#include "thread_pool.h"
#include "weights.h"

enum {
    CHUNK = 128,     // max tokens of one call; beyond it, products do not get faster
    ROWS = 2 * TILE, // rows of a matrix in one item of a product's step
};

enum {
    PAGE = 64,      // positions of a page of the KV cache, a multiple of TILE
    KV_RANGE = 512, // positions of a range of attention (attention.c), a multiple of PAGE
};

// A page of the KV cache: keys and values of PAGE positions of a sequence, in all layers. Sequences
// that begin with the same tokens share pages. One block of memory holds the page and its arrays.
typedef struct Page {
    int n_caches;      // number of caches that share the page; a shared page is never changed
    struct Page *next; // in the list of unused pages
    char *keys;        // (n_layers, n_kv_heads, PAGE / TILE, head_dim, TILE)
    char *values;      // (n_layers, n_kv_heads, PAGE, value_width)
    float *key_scales; // (n_layers, n_kv_heads, PAGE) for INT8_GROUPS, else NULL
    float *value_scales;
} Page;

struct Cache {
    Page **pages; // (n_pages,)
    int n_pages, capacity;
};

// One unit of work of attention: the description of one item of its step.
typedef struct {
    enum { GROUP, PART, SPAN_OF_TOKENS } kind;
    int t;           // index in the batch of the token or, for a span, of its first token
    int n;           // number of query heads of a group, or of tokens of a span
    int head;        // first query head of a group, or the query head of a span
    int range;       // PART: index of the range among those of the token
    int first_range; // PART: number of ranges of all earlier tokens of the batch
} AttentionItem;

typedef struct Stream Stream;

struct Cpu {
    Backend ops;
    Config config;
    const Kernels *kernels;
    Model *model;

    // The KV caches (attention.c)
    int max_positions;  // of a sequence
    Type kv_type;       // F32, F16, or INT8_GROUPS with a scale for each key and each value
    int value_width;    // head_dim rounded up to a multiple of TILE
    Page *unused_pages; // linked list
    float *rotation;    // (max_positions, 2, head_dim) cosines and sines for Kernels.rotate
    int n_rotations;    // positions whose cosines and sines have been computed

    // The batch, and the plan of its attention
    const Cache **caches; // (CHUNK,) cache of each token
    int *positions;       // (CHUNK,) position of each token in its sequence
    AttentionItem *items; // (n_items,)
    int n_items;
    int64_t item_cost; // of one item, see llamac_add_step
    bool split;        // the items are PARTs
    float *partials;   // (max_ranges, n_heads, 2 + value_width) results of PARTs
    int max_ranges;    // max total ranges of a batch that is split

    // Activations of a chunk of tokens. gated_* hold the output of SwiGLU
    float *q, *k, *v;              // (chunk, q_dim), (chunk, kv_dim), (chunk, kv_dim)
    float *h, *h2;                 // (chunk, hidden_dim) gate, up
    float *panels;                 // (columns, tokens of a panel) for each panel
    uint16_t *pairs, *gated_pairs; // (columns / 2, tokens of a panel, 2) for each panel
    Block *blocks, *gated_blocks;  // (chunk, columns / 32)

    // Weights in tiles (cpu.c)
    const void *tiles; // all tiles, NULL if the weights are not packed
    size_t tiles_size; // bytes

    Stream *stream; // reads the weights that are not kept in memory; NULL if all are

    void **memory; // (n_memory,) allocations that cpu_close frees
    int n_memory;
    size_t allocated;   // their total size in bytes
    bool out_of_memory; // an allocation failed

    // The steps of one call of forward. The steps for one token are reused for the next token
    ThreadPool pool;
    bool collecting;  // between begin and end: new steps wait in the list until end runs them
    bool recorded;    // the list holds the steps for one token
    const Mat *table; // embedding table of the last call of embed
    float *embedded;  // output of the last call of embed
    float *logits;    // where the recorded steps write the logits; NULL: they compute none
};

// Adds a step of n items to the list, with a copy of args (size bytes, max MAX_ARGS). Outside begin
// and end, discards the list and runs the step at once. `cost` is the approximate number of
// multiplications of one item.
void llamac_add_step(Cpu *, Task *, const void *args, size_t size, int n, int64_t cost);

// x (n,) = y (n,), or x += y if `add`.
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

// One matrix product: out (T, w.rows) = x (T, w.cols) w^T, or out += x w^T if `add`.
typedef struct {
    float *out;
    const Mat *w;
    bool add;
} Product;

// The forms of activations, as bits, since products with the same input may need several.
enum { PANELS = 1, PAIRS = 2, BLOCKS = 4 };

// The input of products: x (T, cols), or RMSNorm(x), in the forms that the weights need.
typedef struct {
    const float *x;
    const float *norm;     // (cols,) weights of the RMSNorm, or NULL
    const float *panels;   // with one token: x or RMSNorm(x), since a panel of one token is its row
    const uint16_t *pairs; // NULL: BF16 weights are multiplied in float32, with panels
    const Block *blocks;
    int cols, T;
} Activations;

// Arguments of the steps that multiply: up to three products with the same input.
typedef struct {
    Product products[3];
    int n;
    Activations in;
    int reads;  // forms that the products read, a sum of PANELS, PAIRS and BLOCKS
    int writes; // of a SwiGLU step: the form in which it writes h, PAIRS or BLOCKS; 0: floats
    bool ready; // an earlier step has converted `in`, so nothing remains to be prepared
} MatmulArgs;
_Static_assert(sizeof(MatmulArgs) <= MAX_ARGS, "MatmulArgs must fit in a step");

// Returns the arguments for n products of x (T, cols), or of RMSNorm(x) if norm is not NULL.
MatmulArgs llamac_matmul_args(const Cpu *, const Product *, int n, const Mat *norm, const float *x,
                              int T);

// Adds the steps that convert the activations to the forms that the products read. Adds none for
// one token: llamac_activations converts it.
void llamac_prepare(Cpu *, const MatmulArgs *);

// Adds the step that multiplies.
void llamac_multiply(Cpu *, const MatmulArgs *);

// Returns the activations for one worker. With one token, each worker normalises and quantises them
// itself: that takes no longer than waiting for another worker to do it.
Activations llamac_activations(Worker *, const MatmulArgs *);

// Computes elements r..end-1 of each token's output of one product; r is a multiple of TILE.
void llamac_multiply_rows(Worker *, const Product *, const Activations *, int r, int end);

// The number of items of ROWS rows in one product, and the cost of one for llamac_add_step.
static inline int items_of(const Product *p) { return (p->w->rows + ROWS - 1) / ROWS; }
static inline int64_t cost_of_item(const MatmulArgs *a) {
    return (int64_t)ROWS * a->in.cols * a->in.T;
}

// ----------------------------------------------------------------------------
// Weights that are not kept in memory (stream.c). Matrices are read in parts, each of which covers
// whole items of their product's step. With a stream, each product has its own steps

enum { SECTION_BYTES = 4 << 20 }; // approximate size of each of the stream's two buffers

// Opens a stream of these matrices, which every pass multiplies in this order. The steps of
// llamac_open_part make their `data` and `scales` point into buffers. Returns NULL if there is not
// enough memory or the thread cannot be started.
Stream *llamac_open_stream(Mat *const *matrices, int n, const struct File *);
void llamac_close_stream(Stream *); // NULL is allowed

int llamac_count_parts(const Stream *);
uint64_t llamac_streamed_bytes(const Stream *); // bytes that a pass reads from the file

// Returns the first part of a matrix, or -1 if the matrix is kept in memory.
int llamac_find_part(const Stream *, const Mat *);

// Adds the step that waits for the section of the file that holds a part, if the part is the first
// of the section. Returns the end of the part's items.
int llamac_open_part(Cpu *, int part);

// Measures how fast the parts are read, in bytes per second.
double llamac_stream_speed(Stream *);

// Backend.failure of an engine with a stream.
const char *llamac_stream_failure(const Backend *);

// ----------------------------------------------------------------------------
// Ops. backend.h describes their formulas

void llamac_cpu_attention(Backend *, const Batch *, int layer, const Layer *, float *out,
                          const float *x);
void llamac_cpu_add_product(Backend *, float *x, const Mat *w, const float *y, int T);
void llamac_cpu_feed_forward(Backend *, const Layer *, float *x, int T);
void llamac_cpu_logits(Backend *, float *logits, const Mat *norm, const Mat *output, const float *x,
                       int T);
Cache *llamac_cpu_new_cache(Backend *);
void llamac_cpu_free_cache(Backend *, Cache *);
bool llamac_cpu_reserve(Backend *, Cache *, int pos, int n);
bool llamac_cpu_share(Backend *, Cache *, const Cache *from, int n);
void llamac_cpu_read_cache(Backend *, const Cache *, int pos, int n, void *bytes);
void llamac_cpu_write_cache(Backend *, Cache *, int pos, int n, const void *bytes);

// Prepares attention to a batch: sets the caches and positions of its tokens, the items of
// attention, and the rotations.
void llamac_plan_attention(Cpu *, const Batch *);

// Returns the bytes of the cache of a sequence of `positions` tokens.
size_t llamac_cache_size(const Cpu *, int positions);

// Frees the unused pages.
void llamac_free_pages(Cpu *);

// Returns how many floats of scratch one worker needs for attention.
size_t llamac_attention_scratch(const Cpu *);

#endif

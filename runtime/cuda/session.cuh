// struct Cuda (the host's state of an engine on the GPU), errors, memory, launches of kernels.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <new>
#include <vector>
#include "whole_token.cuh"

// The KV cache of a sequence, on the device: all layers, one after another.
struct Cache { void *keys, *values; }; // (n_layers, n_kv_heads, positions, width) each

// Which attention kernels are needed: for tokens that are the only ones of their run, for others.
typedef struct { bool singles, others; } Attenders;

// The properties that all passes that replay a recording have in common. Sequences and positions
// may differ: kernels read them from Input.
typedef struct {
    int T, n_wanted;    // both padded: see padded_rows
    bool gathers;       // not all tokens are wanted
    bool on_host;       // the logits are copied to the host; else `choose` reads them on the device
    bool hidden_states; // the pass computes hidden states instead of logits
    Attenders attenders;
} PassShape;

// The ops of a pass, recorded as a CUDA graph.
typedef struct {
    PassShape shape;      // shape.T is 0 if the recording is unused
    cudaGraphExec_t exec; // NULL until the second pass of this shape
    uint64_t last_pass;   // number of the latest pass of this shape
} Recording;

// Max recordings of an engine. Each takes memory on the host and on the device.
enum { MAX_RECORDINGS = 32 };

// A matrix of the model, which now points to device memory, and its original contents.
typedef struct { Mat *mat, original; } UploadedMat;

typedef struct {
    Backend ops; // first, so that a Backend * is a Cuda *
    Config config;
    cudaStream_t stream;
    int multiprocessors;
    size_t max_shared; // max bytes of shared memory of a block
    bool cooperative;  // whether the GPU can run whole_token
    bool can_record;   // whether the driver can record graphs

    // Message of the first failed CUDA call, after which the macro CUDA skips calls; empty: none
    char failure[256];

    // Passes
    bool in_pass;      // a pass is a call of forward, from begin to end
    Batch batch;       // batch of the pass
    uint64_t n_passes; // passes so far that looked for a recording
    Recording recordings[MAX_RECORDINGS];
    Recording *recording;      // the one that this pass records or replays, or NULL
    Input *input, *input_host; // on the device; in pinned host memory

    // Memory
    std::vector<void *> blocks;         // all allocations on the device; close frees them
    std::vector<UploadedMat> uploaded;  // close restores their originals
    const uint4 *weights;               // quantized values of all matrices, then all scales
    size_t weights_bytes, values_bytes; // size of values and scales; size of the values
    LayerCache layer_cache;             // the shape of every cache; it has no keys and values
    size_t keys_bytes;                  // bytes of a cache's keys; its values have as many
    bool float_cache;                   // cache elements are float; otherwise __half
    Cache *first_cache;                 // allocated by open for the first sequence; else NULL
    float2 *rotation;                   // (positions, head_dim / 2): cosine and sine (RoPE)
    float *y, *q, *k, *v, *h, *h2;      // temporaries: y (max T, dim), q (max T, q_dim),
                                        // k and v (max T, kv_dim), h and h2 (max T, hidden_dim)
    __half *half_x, *spare_half_x;      // (CHUNK, max of dim, q_dim and hidden_dim) each
    const float *half_x_source;         // during a pass: the array half_x was copied from, or NULL
    int splits;                         // blocks that share the positions of a head if T is 1
    float *partials;                    // results of blocks that share work; see count_partials
    unsigned *counters;                 // counters of is_last_block; all 0 between kernels

    // Results
    float *logits; // (max T, vocab_size) on the device
    int *best;     // in pinned host memory: index of the largest logit, or -1 if any logit is not
                   // finite. `choose` uses it for the sampled token, then restores it

    TokenPlan token; // how whole_token runs; token.slots is 0 if it cannot
} Cuda;

// ----------------------------------------------------------------------------
// Errors

static bool has_failed(const Cuda *c) { return c->failure[0]; }

// Records the error of a CUDA call, if it is the first. Such an error comes from the machine or
// from a bug in this backend, and the GPU cannot be used afterwards.
static void check(Cuda *c, cudaError_t e, const char *call, const char *file, int line) {
    if (e == cudaSuccess || has_failed(c)) return;
    const char *slash = strrchr(file, '/');
    snprintf(c->failure, sizeof c->failure, "the GPU failed: %.120s (%s:%d: %.60s)",
             cudaGetErrorString(e), slash ? slash + 1 : file, line, call);
}

// Calls a function of CUDA, unless an earlier call failed.
#define CUDA(c, call) (has_failed(c) ? (void)0 : check(c, call, #call, __FILE__, __LINE__))

static const char *failure(const Backend *b) {
    const Cuda *c = (const Cuda *)b;
    return has_failed(c) ? c->failure : NULL;
}

// Writes a message with up to four numbers to e->text. Returns it.
static const char *format(llamac_error *e, const char *text, double a, double b, double c,
                          double d) {
    snprintf(e->text, sizeof e->text, text, a, b, c, d);
    return e->text;
}

// ----------------------------------------------------------------------------
// Memory

// Memory left free for the kernels' code, which the driver loads when they are first called.
enum { KERNEL_CODE_BYTES = 32 << 20 };

// Allocates device memory. Returns NULL if too little is free.
static void *allocate_device(size_t bytes) {
    void *block = NULL;
    if (cudaMalloc(&block, bytes ? bytes : 1) == cudaSuccess) return block;
    (void)cudaGetLastError(); // clears the error, which a later check would report
    return NULL;
}

// Does the same for memory that close frees. Throws std::bad_alloc if host memory is too small.
static void *allocate(Cuda *c, size_t bytes) {
    c->blocks.push_back(NULL);
    return c->blocks.back() = allocate_device(bytes);
}

// Allocates pinned host memory: the system never moves it, so the GPU copies it or writes to it
// directly. Returns NULL if too little is free.
static void *allocate_pinned(size_t bytes) {
    void *block = NULL;
    if (cudaMallocHost(&block, bytes) == cudaSuccess) return block;
    (void)cudaGetLastError();
    return NULL;
}

static const char NOT_PINNED[] =
    "not enough main memory for transfers to the GPU; use --device=cpu, which needs less";

// ----------------------------------------------------------------------------
// Launches

// Identity<P>::type takes no part in the deduction of P. So P is deduced from the kernel alone, and
// the arguments are converted to the types of its parameters.
template <typename T> struct Identity { typedef T type; };

// Launches a kernel with `shared` bytes of dynamic shared memory, and with a launch attribute (such
// as a cooperative launch) unless it is NULL.
template <typename... P>
static cudaError_t try_launch(Cuda *c, cudaLaunchAttribute *attribute, void (*kernel)(P...),
                              dim3 grid, int threads, size_t shared,
                              typename Identity<P>::type... args) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared, config.stream = c->stream;
    config.attrs = attribute, config.numAttrs = attribute != NULL;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename... P>
static void launch(Cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t shared,
                   typename Identity<P>::type... args) {
    CUDA(c, try_launch(c, NULL, kernel, grid, threads, shared, args...));
}

enum { DEFAULT_SHARED = 48 << 10 }; // bytes of shared memory that every launch may use

// Raises a kernel's limit of dynamic shared memory to the GPU's. The limit is set for the whole
// process: if each engine set only what its launches need, an engine on a smaller model would
// lower the limit of one on a larger model.
static void raise_shared_limit(Cuda *c, const void *kernel) {
    cudaFuncAttributes code = {};
    CUDA(c, cudaFuncGetAttributes(&code, kernel));
    int limit = (int)(c->max_shared - code.sharedSizeBytes);
    CUDA(c, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
}

static unsigned ceil_div(size_t n, size_t by) { return (unsigned)((n + by - 1) / by); }

// Outside a pass, waits for the stream: the next call may overwrite the inputs of this one.
static void finish_op(Cuda *c) {
    if (!c->in_pass) CUDA(c, cudaStreamSynchronize(c->stream));
}

// Returns how many rows the ops compute for n tokens. In a pass, this is a power of 2 up to 64 or a
// multiple of 64, so that a few recordings serve all numbers of tokens; the kernels of products
// compute up to 64 tokens in the time of one. The rows beyond n are meaningless.
static int padded_rows(const Cuda *c, int n) {
    int rows = 1;
    if (!c->in_pass || !c->can_record) return n;
    if (n > 64) return (n + 63) / 64 * 64;
    while (rows < n) rows *= 2;
    return rows;
}

// Starts the copy of T and the T tokens of c->input_host to the device.
static void send_tokens(Cuda *c, int T) {
    size_t bytes = offsetof(Input, tokens) + sizeof(InputToken) * T;
    CUDA(c, cudaMemcpyAsync(c->input, c->input_host, bytes, cudaMemcpyHostToDevice, c->stream));
    finish_op(c);
}

// Starts the copy of n rows of c->input_host to the device.
static void send_rows(Cuda *c, int n) {
    CUDA(c, cudaMemcpyAsync(c->input->rows, c->input_host->rows, sizeof(int) * n,
                            cudaMemcpyHostToDevice, c->stream));
    finish_op(c);
}

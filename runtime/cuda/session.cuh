// struct Cuda, the host's state of a session on the GPU; its memory; launches of kernels.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <vector>
#include "whole_token.cuh"

// The ops of forward, recorded as a CUDA graph. All calls with the same T and the same all_logits
// (see Backend.begin) share one.
typedef struct {
    bool warmed_up;       // the ops were called once, which also loaded their kernels
    cudaGraphExec_t exec; // NULL until they are recorded
} Recording;

// A matrix of the model, which points to device memory now, and what it was before.
typedef struct { Mat *mat, original; } UploadedMat;

typedef struct {
    Backend ops; // first, so that a Backend * is a Cuda *
    Config config;
    cudaStream_t stream;
    int multiprocessors;
    size_t max_shared; // max bytes of shared memory of a block
    bool cooperative;  // whether the GPU can run whole_token
    bool can_record;   // whether the driver can record graphs

    // Calls of forward
    bool in_pass;                       // a pass is a call of forward, from begin to end
    Recording recordings[CHUNK + 1][2]; // [T][all_logits]
    Recording *recording;               // the one that this pass records or replays, or NULL
    Input *input, *input_host;          // on the device; in pinned host memory

    // Memory
    std::vector<void *> *blocks;        // all allocations on the device; close frees them
    std::vector<UploadedMat> *uploaded; // close restores their originals
    const uint4 *weights;               // quantized values of all matrices, then all scales
    size_t weights_bytes, values_bytes; // size of values and scales; size of the values
    Cache cache;                        // all layers, one after another; its pointers are layer 0's
    bool float_cache;                   // the elements of the cache are float, else __half
    float2 *rotation;                   // (positions, head_dim / 2): cosine and sine (RoPE)
    float *y, *q, *k, *v, *h, *h2;      // temporaries: y (max T, dim), q (max T, q_dim),
                                        // k and v (max T, kv_dim), h and h2 (max T, hidden_dim)
    __half *half_x, *spare_half_x;      // (CHUNK, max of dim, q_dim and hidden_dim) each
    const float *half_x_source;         // during a pass: the array half_x was copied from, or NULL
    int splits;                         // blocks that share the positions of a head if T is 1
    float *partials;                    // results of blocks that share work; see count_partials
    unsigned *counters;                 // of is_last_block; all 0 between kernels

    // Results
    float *logits; // (max T, vocab_size) on the device
    float *out;    // host memory that the last call of `logits` copied to; NULL: it copied nothing
    void *pinned;  // the same memory if it has been pinned for fast copies, else NULL
    size_t pinned_bytes;
    int *best; // in pinned host memory: index of the largest logit, or -1 if any logit is not
               // finite. `choose` uses it for the sampled token, then restores it

    TokenPlan token; // how whole_token runs; token.slots is 0 if it cannot
} Cuda;

// ----------------------------------------------------------------------------
// Errors

// Prints an error of a CUDA call and ends the process. Such an error comes from the machine or from
// a bug in this backend, and the GPU cannot be used afterwards.
static void check(cudaError_t e, const char *call, const char *file, int line) {
    if (e == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "run: cuda: %s (%s:%d: %.60s)\n", cudaGetErrorString(e), file, line, call);
    _exit(1);
}

#define CUDA(call) check(call, #call, __FILE__, __LINE__)

// Writes a message with up to four numbers to e->text. Returns it.
static const char *format(llamac_error *e, const char *text, double a, double b, double c,
                          double d) {
    snprintf(e->text, sizeof e->text, text, a, b, c, d);
    return e->text;
}

// ----------------------------------------------------------------------------
// Memory

// Allocates device memory, which close frees. Returns NULL if too little is free.
static void *allocate(Cuda *c, size_t bytes) {
    void *block = NULL;
    if (cudaMalloc(&block, bytes ? bytes : 1) == cudaSuccess)
        return c->blocks->push_back(block), block;
    (void)cudaGetLastError(); // clears the error, which a later check would report
    return NULL;
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
    "the host's memory is too short for what a GPU reads from it; --device=cpu needs less";

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
    CUDA(try_launch(c, NULL, kernel, grid, threads, shared, args...));
}

enum { DEFAULT_SHARED = 48 << 10 }; // bytes of shared memory that every launch may ask for

// Raises a kernel's limit of dynamic shared memory to the GPU's. The limit is set for the whole
// process: if each session set only what its launches need, a session on a smaller model would
// lower the limit of one on a larger model.
static void raise_shared_limit(const Cuda *c, const void *kernel) {
    cudaFuncAttributes code;
    CUDA(cudaFuncGetAttributes(&code, kernel));
    int limit = (int)(c->max_shared - code.sharedSizeBytes);
    CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
}

static unsigned ceil_div(size_t n, size_t by) { return (unsigned)((n + by - 1) / by); }

// Starts the copy of pos and tokens (T,) to c->input. Ops that need only pos pass NULL and T 0.
static void send_input(Cuda *c, const int *tokens, int T, int pos) {
    c->input_host->pos = pos;
    if (tokens) memcpy(c->input_host->tokens, tokens, sizeof(int) * T);
    size_t bytes = sizeof(int) * (1 + T);
    CUDA(cudaMemcpyAsync(c->input, c->input_host, bytes, cudaMemcpyHostToDevice, c->stream));
    if (!c->in_pass) CUDA(cudaStreamSynchronize(c->stream)); // a next call may overwrite input_host
}

// The host's state of a session on the GPU, its memory, and how kernels are launched.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <vector>
#include "whole_token.cuh"

// The recorded ops of calls of forward with the same T and `all`.
typedef struct {
    bool warmed_up;       // the ops were called once, which also loaded their kernels
    cudaGraphExec_t exec; // NULL until they are recorded
} Recording;

// A matrix of the model and what it was before it was uploaded.
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
    bool in_pass;                       // between begin and end
    Recording recordings[CHUNK + 1][2]; // by T and `all`
    Recording *recording;               // the one that this pass records or replays, or NULL
    Input *input, *input_host;          // on the device; in pinned host memory

    // Memory
    std::vector<void *> *blocks;        // all device memory, freed by close
    std::vector<UploadedMat> *uploaded; // restored by close
    const uint4 *weights;               // quantized values of all matrices, then all scales
    size_t weights_bytes, values_bytes; // of both; of the values
    Cache cache;                        // of all layers; its pointers are those of layer 0
    bool float_cache;                   // its elements are float, else __half
    float2 *rotation;                   // (positions, head_dim / 2): cosine and sine
    float *y, *q, *k, *v, *h, *h2;      // temporaries (max T, dim), (max T, q_dim), twice
                                        // (max T, kv_dim), twice (max T, hidden_dim)
    __half *half_x, *spare_half_x;      // (CHUNK, max of dim, q_dim and hidden_dim) each
    const float *half_x_source;         // during a pass: what half_x is a copy of, or NULL
    int splits;                         // blocks that share a head's positions for one token
    float *partials;                    // of attention, or of tiles
    unsigned *counters;                 // zeros between kernels

    // Results
    float *logits; // (max T, vocab_size) on the device
    float *out;    // the caller's logits of the last call of forward, or NULL
    void *pinned;  // the caller's logits, if they were pinned
    size_t pinned_bytes;
    int *best; // in pinned host memory: find_largest's result, or a sampled token

    TokenPlan token; // slots is 0 if whole_token cannot run
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

static const char *format(llamac_error *e, const char *text, double a, double b, double c,
                          double d) {
    snprintf(e->text, sizeof e->text, text, a, b, c, d);
    return e->text;
}

// ----------------------------------------------------------------------------
// Memory

// Allocates device memory, which close frees. Returns NULL if there is not enough.
static void *allocate(Cuda *c, size_t bytes) {
    void *block = NULL;
    if (cudaMalloc(&block, bytes ? bytes : 1) == cudaSuccess)
        return c->blocks->push_back(block), block;
    (void)cudaGetLastError(); // clears the error, which a later check would report
    return NULL;
}

// Allocates host memory that the GPU can access. Returns NULL if there is not enough.
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

template <typename T> struct Identity { typedef T type; };

// Launches a kernel with `shared` bytes of dynamic shared memory, and with `attribute` unless it is
// NULL. The arguments are converted to the types of the kernel's parameters.
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

// Raises a kernel's limit of dynamic shared memory to all that there is. It is not set to what one
// launch needs: the limit belongs to the process, so a session on a smaller model would lower the
// limit of a session on a larger one.
static void raise_shared_limit(const Cuda *c, const void *kernel) {
    cudaFuncAttributes code;
    CUDA(cudaFuncGetAttributes(&code, kernel));
    int limit = (int)(c->max_shared - code.sharedSizeBytes);
    CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
}

static unsigned ceil_div(size_t n, size_t by) { return (unsigned)((n + by - 1) / by); }

// Starts the copy of tokens (T,), or with tokens NULL and T 0 only of pos, to the device.
static void send_input(Cuda *c, const int *tokens, int T, int pos) {
    c->input_host->pos = pos;
    if (tokens) memcpy(c->input_host->tokens, tokens, sizeof(int) * T);
    size_t bytes = sizeof(int) * (1 + T);
    CUDA(cudaMemcpyAsync(c->input, c->input_host, bytes, cudaMemcpyHostToDevice, c->stream));
    if (!c->in_pass) CUDA(cudaStreamSynchronize(c->stream)); // before input_host may change again
}

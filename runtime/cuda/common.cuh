// Shared by all kernels: limits, warp reductions, detection of the last block, prefetches.
//
// Shapes in comments: T is the number of tokens of a call; (rows, cols) is row-major.
#pragma once
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>
#include <mma.h>
#include <string.h>
#include "../backend.h"

// Warps of a block of matvec and attention. At least 8: attention uses a thread for each dimension
// of a head, so 32 * WARPS must not be less than MAX_HEAD_DIM.
#ifndef WARPS
#define WARPS 8
#endif

enum {
    CHUNK = 512,        // max tokens in one call of forward
    MAX_HEAD_DIM = 256, // max width of an attention head
};

#define ALL_LANES 0xffffffffu

// Declares `float *name`, the dynamic shared memory, whose size is set at the launch. Tests that
// run kernels on the CPU define their own.
#ifndef LAUNCH_SHARED
#define LAUNCH_SHARED(name) \
    extern __shared__ __align__(128) float4 name##_[]; \
    float *name = (float *)name##_
#endif

// A token of a batch: its ID, its position, its run (tokens first..end-1 of the batch), and the KV
// cache of its sequence (all layers).
typedef struct {
    int token, pos, first, end;
    void *keys, *values;
} InputToken;

// The inputs of a batch, which differ from pass to pass. Kernels read them from device memory, so
// that a recorded graph can be replayed with other values. A kernel's grid may cover more than T
// tokens; results beyond T are meaningless.
typedef struct {
    int T;
    InputToken tokens[CHUNK]; // (T,)
    int rows[CHUNK];          // (n,) rows that gather selects
} Input;

// Returns whether the token is the only one of its run. Attention has a kernel for such tokens.
static __device__ bool is_single(const InputToken &t) { return t.end - t.first == 1; }

static __device__ float warp_sum(float x) {
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(ALL_LANES, x, i);
    return x;
}

static __device__ float warp_max(float x) {
    for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, i));
    return x;
}

// Returns whether this block is the last of n blocks to call it with this counter. The last block
// sees what the others wrote before their calls. The counter must be 0 at first and is reset to 0.
// All threads of the block must call it.
static __device__ bool is_last_block(unsigned *counter, unsigned n) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) { // after __syncthreads, its fences order the writes of the whole block
        __threadfence();
        last = atomicAdd(counter, 1u) == n - 1;
        __threadfence();
        if (last) *counter = 0;
    }
    __syncthreads();
    return last;
}

// Prefetches the 128-byte line at `line` to the L2 cache.
static __device__ void prefetch_line(const void *line) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#else // the compiler's pass over host code, or a test on the CPU
    (void)line;
#endif
}

// Returns silu(gate) * up, where silu(z) = z / (1 + exp(-z)).
static __device__ float swiglu(float gate, float up) { return gate / (1 + expf(-gate)) * up; }

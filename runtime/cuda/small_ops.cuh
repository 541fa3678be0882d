// The small operations: embedding, RMSNorm, SwiGLU, gathering rows, and a kernel that only reads
// memory, which measures the bandwidth.
#pragma once
#include "formats.cuh"

// Writes the table's row of token t to row t of x (T, table.cols). A thread writes one element.
static __global__ void embed_rows(float *x, const __grid_constant__ Mat table, const Input *input) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    int dim = table.cols, t = (int)(i / dim);
    if (t < input->T) x[i] = element_at(table, (size_t)input->tokens[t].token * dim + i % dim);
}

// RMSNorm: out = x / sqrt(mean(x^2) + eps) * weight, for each token.
// out, x (T, dim); half_copy: out in half precision, or NULL; weight (dim,).
// Grid: T; block: 512 threads.
static __global__ void __launch_bounds__(512)
    normalize(float *out, __half *half_copy, const float *x, const float *weight, int dim,
              float eps) {
    __shared__ float sums[16];
    size_t at = (size_t)blockIdx.x * dim;
    float sum = 0;
    for (int i = threadIdx.x; i < dim; i += 512) sum += x[at + i] * x[at + i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < 16; i++) sum += sums[i];
    float scale = 1 / sqrtf(sum / dim + eps);
    for (int i = threadIdx.x; i < dim; i += 512)
        store_with_copy(out, half_copy, at + i, weight[i] * (scale * x[at + i]));
}

// Overwrites gate (n,) with SwiGLU of gate and up (n,). half_copy: the result in half precision, or
// NULL. A thread handles one element.
static __global__ void apply_swiglu(float *gate, __half *half_copy, const float *up, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) store_with_copy(gate, half_copy, i, swiglu(gate[i], up[i]));
}

// Overwrites row i of x (T, dim) with row input->rows[i], for i from 0 to n - 1. The rows ascend,
// so no later row is copied from row i, and GATHER_BATCH rows may be loaded before the first is
// stored. A thread handles one column.
enum { GATHER_BATCH = 8 };

static __global__ void gather_rows(float *x, const Input *input, int n, int dim) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= dim) return;
    for (int i = 0; i < n; i += GATHER_BATCH) {
        float values[GATHER_BATCH];
#pragma unroll
        for (int j = 0; j < GATHER_BATCH; j++)
            values[j] = x[(size_t)input->rows[min(i + j, n - 1)] * dim + column];
#pragma unroll
        for (int j = 0; j < GATHER_BATCH; j++)
            if (i + j < n) x[(size_t)(i + j) * dim + column] = values[j];
    }
}

// Reads n 16-byte words and adds them up. The compiler would remove loads whose result is unused,
// so *out is written if the sum equals an arbitrary value, which practically never happens.
static __global__ void read_memory(const uint4 *words, size_t n, int *out) {
    uint32_t sum = 0;
    size_t stride = (size_t)gridDim.x * blockDim.x,
           i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 a = words[i], b = words[i + stride];
        uint4 c = words[i + 2 * stride], d = words[i + 3 * stride];
        sum += (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w) + (c.x ^ c.y ^ c.z ^ c.w)
               + (d.x ^ d.y ^ d.z ^ d.w);
    }
    for (; i < n; i += stride) sum += words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
    if (sum == 0x9e3779b9u) *out = 1;
}

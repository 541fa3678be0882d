// Tests that cuda_on_cpu/fibers.cpp finds races. Runs three kernels that have no races, unless one
// barrier, fence or wait is left out.
//
// Usage: cuda_races MISSING, the number in the enum of what is left out
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

enum {
    NOTHING,
    BLOCK_BEFORE_READ,
    BLOCK_BEFORE_WRITE,
    WARP,
    FENCE_BEFORE,
    FENCE_AFTER,
    WARP_AFTER_COPY,
    LAST_FENCE_BEFORE,
    LAST_FENCE_AFTER,
    BARRIER_AFTER_WORD
};

// A barrier of the grid, whose blocks are all resident.
static __device__ void grid_barrier(unsigned *arrived, int missing) {
    __syncthreads();
    if (threadIdx.x == 0) {
        if (missing != FENCE_BEFORE) __threadfence();
        unsigned before = atomicAdd(arrived, blockIdx.x ? 1u : 0x80000000u - (gridDim.x - 1));
        while (((before ^ *(volatile unsigned *)arrived) & 0x80000000u) == 0) __nanosleep(20);
        if (missing != FENCE_AFTER) __threadfence();
    }
    __syncthreads();
}

// Two resident blocks of 64 threads. x (blocks, 64), copied (blocks, 256).
static __global__ void together(float *x, const float *copied, unsigned *arrived, int missing) {
    LAUNCH_SHARED(shared);
    int i = threadIdx.x, other = 64 * (gridDim.x - 1 - blockIdx.x) + i;
    shared[i] = i;
    if (missing != BLOCK_BEFORE_READ) __syncthreads();
    float sum = shared[63 - i]; // of the other warp
    if (missing != BLOCK_BEFORE_WRITE) __syncthreads();
    shared[i] = sum;
    if (missing != WARP) __syncwarp();
    sum += shared[i ^ 1];
    x[64 * blockIdx.x + i] = sum;
    grid_barrier(arrived, missing);
    sum += x[other];
    grid_barrier(arrived, NOTHING);
    // a thread waits for its own copies only
    __pipeline_memcpy_async(shared + 4 * i, copied + 4 * i, 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    if (missing != WARP_AFTER_COPY) __syncwarp();
    sum += shared[4 * (i ^ 1)];
    x[64 * blockIdx.x + i] = sum;
}

// Two blocks that need not be resident together, each with its own __shared__ variables. The last
// to finish adds up what both have written.
static __global__ void apart(float *x, const float *copied, unsigned *counter, int missing) {
    __shared__ float shared;
    __shared__ bool last;
    if (threadIdx.x == 0) shared = copied[blockIdx.x];
    __syncthreads();
    if (threadIdx.x == 1) x[blockIdx.x] = shared;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (missing != LAST_FENCE_BEFORE) __threadfence();
        last = atomicAdd(counter, 1u) == gridDim.x - 1;
        if (missing != LAST_FENCE_AFTER) __threadfence();
    }
    __syncthreads();
    if (last && threadIdx.x == 2) x[2] = x[0] + x[1];
}

// Two resident blocks. Each sends the other a word of 8 bytes that holds a number and an epoch. A
// word orders no other accesses: to read x as well, the blocks need a barrier.
static __global__ void carried(float *x, const float *copied, unsigned *arrived, int missing) {
    volatile uint64_t *words = (volatile uint64_t *)x; // (blocks,)
    int block = blockIdx.x, other = gridDim.x - 1 - block;
    if (threadIdx.x == 0) {
        x[8 + block] = copied[block];
        words[block] = (uint64_t)1 << 32 | (unsigned)(block + 1); // epoch 1
        while (words[other] >> 32 != 1) __nanosleep(20);
    }
    if (missing != BARRIER_AFTER_WORD) grid_barrier(arrived, NOTHING);
    if (threadIdx.x == 0) x[10 + block] = x[8 + other] + (float)(words[other] & 0xffffffffu);
    grid_barrier(arrived, NOTHING); // the second one: *arrived is 0 again, as `apart` needs it
}

int main(int argc, char **argv) {
    int missing = argc > 1 ? atoi(argv[1]) : 0;
    float *x, *copied;
    unsigned *arrived;
    cudaMalloc(&x, 512), cudaMalloc(&copied, 2048), cudaMalloc(&arrived, 4);
    cudaMemset(copied, 0, 2048);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    cudaLaunchConfig_t config = {dim3(2), dim3(64), 4096, 0, &attribute, 1};
    for (auto kernel : {together, carried, apart}) {
        cudaMemset(arrived, 0, 4);
        config.numAttrs = kernel != apart;
        cudaLaunchKernelEx(&config, kernel, x, (const float *)copied, arrived, missing);
    }
    cudaFree(x), cudaFree(copied), cudaFree(arrived);
}

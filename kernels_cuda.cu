// The Backend of NVIDIA GPUs. Everything runs on one stream. Kernels read position and tokens from the device's memory,
// so the ops of a call of forward are the same for every token: they are recorded once as a CUDA graph and replayed.
//
// Decoding (T = 1) reads every weight once: warps stream rows in 16-byte loads. A prompt's matrix products multiply
// tiles on the tensor cores in half precision, float32 matrices in float32. Keys and values are kept in half precision
// as well, but for models in float32.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <vector>
#ifdef __HIPCC__
#include "kernels_hip.h"
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>
#define TENSOR_CORES
#endif
#include "run.h"

enum {
    CHUNK = 256,     // most tokens of one call
    HEAD_MAX = 256,  // widest attention head
    WARPS = 8,       // of the blocks of matvec and attention
    TILE = 64,       // rows, and tokens, of a tile of a matrix product
    STEP = 64,       // columns that a tile on the tensor cores advances by
    ROOM = STEP + 8, // halves between a tile's rows in shared memory: 16 bytes more than needed, against bank conflicts
};

#define ALL_LANES 0xffffffffu

// Whether kernels may overlap, where the GPU can do it. From CUDA 12.3 on graphs can hold such launches.
#ifndef OVERLAP
#define OVERLAP (CUDART_VERSION >= 12030)
#endif

// Shared memory whose size the launch gives.
#ifndef LAUNCH_SHARED
#define LAUNCH_SHARED(name) extern __shared__ float4 name##_[]; float *name = (float *)name##_
#endif

// What differs between two calls of forward with equally many tokens.
typedef struct {
    int pos;           // of the first token
    int tokens[CHUNK]; // (T,)
} Input;

// ----------------------------------------------------------------------------
// Between kernels and threads

// From Hopper on a kernel may start while the one before still runs, if that one allows it (programmatic dependent
// launch). Every kernel here allows it at once, and waits before it touches anything but weights.
static __device__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ float warp_sum(float x) {
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(ALL_LANES, x, i, 32);
    return x;
}

static __device__ float warp_max(float x) {
    for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, i, 32));
    return x;
}

// Whether this block is the last of n that get here, after their writes; what the others wrote must then be read as
// volatile. Leaves the counter at zero. All threads of the block have to call it.
static __device__ bool is_last(unsigned *counter, unsigned n) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) == n - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// ----------------------------------------------------------------------------
// Numbers. On the device, the scales of Q8_0 and Q4_0 lie apart from the blocks, so that rows can be read in 16 bytes.

// Number `at` of the flattened matrix, whatever its type and shape.
static __device__ float number_at(const Mat &m, size_t at) {
    const uint8_t *bytes = (const uint8_t *)m.data;
    switch (m.type) {
    case F32: return ((const float *)m.data)[at];
    case F16: return __half2float(((const __half *)m.data)[at]);
    case BF16: return __uint_as_float((uint32_t)((const uint16_t *)m.data)[at] << 16);
    case Q8_0: return __half2float(((const __half *)m.scales)[at / 32]) * (int8_t)bytes[at];
    case Q4_0: {
        int byte = bytes[at / 32 * 16 + at % 16];
        return __half2float(((const __half *)m.scales)[at / 32]) * ((at % 32 < 16 ? byte & 15 : byte >> 4) - 8);
    }
    default: return ((const float *)m.scales)[at / m.group] * (int8_t)bytes[at];
    }
}

// The bytes of a word as floats, less `zero`. A byte under the exponent of 2^23 is that float plus the byte: cheaper
// than the conversion of integers.
static __device__ void bytes_to_floats(uint32_t word, float zero, float *out) {
    for (int i = 0; i < 4; i++)
        out[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - (8388608.0f + zero);
}

// A Unit is what one 16-byte load brings: N numbers of a row, in units of `scale`.
template <Type type> struct Format;

template <> struct Format<F32> {
    enum { N = 4 };
    struct Unit { uint4 bits; };
    static __device__ Unit load(const Mat &m, size_t at) { return {__ldg((const uint4 *)((const float *)m.data + at))}; }
    static __device__ float scale(const Unit &) { return 1; }
    static __device__ void numbers(const Unit &u, float *out) {
        out[0] = __uint_as_float(u.bits.x), out[1] = __uint_as_float(u.bits.y);
        out[2] = __uint_as_float(u.bits.z), out[3] = __uint_as_float(u.bits.w);
    }
};

template <> struct Format<F16> {
    enum { N = 8 };
    struct Unit { uint4 bits; };
    static __device__ Unit load(const Mat &m, size_t at) { return {__ldg((const uint4 *)((const __half *)m.data + at))}; }
    static __device__ float scale(const Unit &) { return 1; }
    static __device__ void numbers(const Unit &u, float *out) {
        const __half2 *pairs = (const __half2 *)&u.bits;
        for (int i = 0; i < 4; i++) {
            float2 pair = __half22float2(pairs[i]);
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        }
    }
};

template <> struct Format<BF16> {
    enum { N = 8 };
    struct Unit { uint4 bits; };
    static __device__ Unit load(const Mat &m, size_t at) { return {__ldg((const uint4 *)((const uint16_t *)m.data + at))}; }
    static __device__ float scale(const Unit &) { return 1; }
    static __device__ void numbers(const Unit &u, float *out) {
        const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
        for (int i = 0; i < 4; i++) {
            out[2 * i] = __uint_as_float(words[i] << 16);
            out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
};

static __device__ void signed_bytes(const uint4 &bits, float *out) {
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
    for (int i = 0; i < 4; i++) bytes_to_floats(words[i] ^ 0x80808080u, 128, out + 4 * i);
}

template <> struct Format<Q8_0> {
    enum { N = 16 };
    struct Unit { uint4 bits; __half scale; };
    static __device__ Unit load(const Mat &m, size_t at) {
        return {__ldg((const uint4 *)((const char *)m.data + at)), __ldg((const __half *)m.scales + at / 32)};
    }
    static __device__ float scale(const Unit &u) { return __half2float(u.scale); }
    static __device__ void numbers(const Unit &u, float *out) { signed_bytes(u.bits, out); }
};

template <> struct Format<INT8_GROUPS> { // of groups that are a power of two, 16 or more
    enum { N = 16 };
    struct Unit { uint4 bits; float scale; };
    static __device__ Unit load(const Mat &m, size_t at) {
        return {__ldg((const uint4 *)((const char *)m.data + at)),
                __ldg((const float *)m.scales + (at >> (__ffs(m.group) - 1)))};
    }
    static __device__ float scale(const Unit &u) { return u.scale; }
    static __device__ void numbers(const Unit &u, float *out) { signed_bytes(u.bits, out); }
};

template <> struct Format<Q4_0> {
    enum { N = 32 };
    struct Unit { uint4 bits; __half scale; };
    static __device__ Unit load(const Mat &m, size_t at) {
        return {__ldg((const uint4 *)((const char *)m.data + at / 2)), __ldg((const __half *)m.scales + at / 32)};
    }
    static __device__ float scale(const Unit &u) { return __half2float(u.scale); }
    static __device__ void numbers(const Unit &u, float *out) {
        const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bytes_to_floats(words[i] & 0x0f0f0f0fu, 8, out + 4 * i);
            bytes_to_floats(words[i] >> 4 & 0x0f0f0f0fu, 8, out + 16 + 4 * i);
        }
    }
};

// To half precision. What is finite stays finite; what is not, stays what it is, and is found in the logits.
static __device__ __half to_half(float x) {
    if (fabsf(x) > 65504 && fabsf(x) < INFINITY) x = copysignf(65504, x);
    return __float2half(x);
}

// ----------------------------------------------------------------------------
// Matrix products. Those of one dispatch have the same x (T, cols) and type.

typedef struct { float *out; Mat w; bool add; } Part;
typedef struct { Part part[3]; int n; } Parts;

// The part, and its row, where the index-th group of `size` rows begins; groups don't go over a part's end.
// part is n when there are fewer groups.
typedef struct { int part, row; } Place;

static __device__ Place find(const Parts &parts, int index, int size) {
    Place at = {0, 0};
    for (; at.part < parts.n; at.part++) {
        int groups = (parts.part[at.part].w.rows + size - 1) / size;
        if (index < groups) break;
        index -= groups;
    }
    at.row = index * size;
    return at;
}

static __device__ void put(float *out, float y, bool add) { *out = add ? *out + y : y; }

// For any shape: one warp for each row and token. The grid is (row groups, T).
static __global__ void matmul_any(const __grid_constant__ Parts parts, const float *x, int cols) {
    let_next_start();
    wait_for_previous();
    int lane = threadIdx.x % 32, t = blockIdx.y;
    Place at = find(parts, blockIdx.x * WARPS + threadIdx.x / 32, 1);
    if (at.part == parts.n) return;
    const Part &p = parts.part[at.part];
    float sum = 0;
    for (int i = lane; i < cols; i += 32) sum += number_at(p.w, (size_t)at.row * cols + i) * x[(size_t)t * cols + i];
    sum = warp_sum(sum);
    if (lane == 0) put(&p.out[(size_t)t * p.w.rows + at.row], sum, p.add);
}

// Where number i of x lies in shared memory: 16 bytes of room after every 128, so that the lanes' float4, which lie
// N numbers apart, come from different banks.
static __host__ __device__ int padded(int i) { return i + i / 32 * 4; }

// Units u of ROWS rows, from `unit` on, 32 apart.
enum { ROWS = 2, UNROLL = 2 };

template <Type type> struct Batch {
    typename Format<type>::Unit units[UNROLL][ROWS];

    __device__ void load(const Parts &parts, Place at, int cols, int unit) {
        const int N = Format<type>::N;
        if (at.part == parts.n) return;
        const Mat &w = parts.part[at.part].w;
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            for (int r = 0; r < ROWS; r++) {
                int row = at.row + r < w.rows ? at.row + r : w.rows - 1, i = (unit + 32 * u) * N;
                if (i < cols) units[u][r] = Format<type>::load(w, (size_t)row * cols + i);
            }
    }

    __device__ void multiply(const float *xs, int cols, int unit, float sum[ROWS]) const {
        const int N = Format<type>::N;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int i = (unit + 32 * u) * N;
            if (i >= cols) continue;
            float x[N], w[N];
#pragma unroll
            for (int j = 0; j < N; j += 4) {
                float4 four = *(const float4 *)(xs + padded(i + j));
                x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float dot = 0;
                Format<type>::numbers(units[u][r], w);
#pragma unroll
                for (int j = 0; j < N; j++) dot += w[j] * x[j];
                sum[r] += Format<type>::scale(units[u][r]) * dot;
            }
        }
    }
};

// For one token: each warp takes ROWS rows at a time, and the grid goes round until all are done. Weights are on their
// way before x is known, and the next batch before this one is multiplied. cols is a multiple of 32.
template <Type type>
static __global__ void __launch_bounds__(32 * WARPS)
matvec(const __grid_constant__ Parts parts, const float *x, int cols) {
    LAUNCH_SHARED(xs); // x (cols,), padded
    let_next_start();
    const int step = 32 * UNROLL;
    int lane = threadIdx.x % 32, group = blockIdx.x * WARPS + threadIdx.x / 32, unit = lane;
    Place at = find(parts, group, ROWS);
    Batch<type> now, next;
    now.load(parts, at, cols, unit);
    wait_for_previous();
    for (int i = threadIdx.x; i < cols; i += 32 * WARPS) xs[padded(i)] = x[i];
    __syncthreads();
    float sum[ROWS] = {0};
    while (at.part < parts.n) {
        bool end = (unit - lane + step) * Format<type>::N >= cols; // of the rows; the same for all lanes
        int following = end ? lane : unit + step;
        Place then = end ? find(parts, group += gridDim.x * WARPS, ROWS) : at;
        next.load(parts, then, cols, following);
        now.multiply(xs, cols, unit, sum);
        if (end) {
            const Part &p = parts.part[at.part];
            for (int r = 0; r < ROWS; r++) {
                float y = warp_sum(sum[r]);
                if (lane == 0 && at.row + r < p.w.rows) put(&p.out[at.row + r], y, p.add);
                sum[r] = 0;
            }
        }
        now = next, at = then, unit = following;
    }
}

// For many tokens, in float32: a block computes a tile of 64 rows and 64 tokens, each thread 4 by 4 of it.
// The grid is (row tiles, token tiles). cols is a multiple of 32.
template <Type type>
static __global__ void __launch_bounds__(256)
matmul_tiles(const __grid_constant__ Parts parts, const float *x, int cols, int T) {
    const int N = Format<type>::N, K = 32;
    __shared__ __align__(16) float ws[K][TILE + 4], xs[K][TILE + 4];
    let_next_start();
    wait_for_previous();
    Place at = find(parts, blockIdx.x, TILE);
    const Part &p = parts.part[at.part];
    int t0 = blockIdx.y * TILE, r4 = threadIdx.x % 16 * 4, t4 = threadIdx.x / 16 * 4;
    float sum[4][4] = {{0}}; // token, row
    for (int k = 0; k < cols; k += K) {
        for (int i = threadIdx.x; i < TILE * K / N; i += 256) {
            int r = i % TILE, u = i / TILE * N;
            float w[N], scale = 0;
            for (int j = 0; j < N; j++) w[j] = 0;
            if (at.row + r < p.w.rows) {
                typename Format<type>::Unit unit = Format<type>::load(p.w, (size_t)(at.row + r) * cols + k + u);
                Format<type>::numbers(unit, w);
                scale = Format<type>::scale(unit);
            }
            for (int j = 0; j < N; j++) ws[u + j][r] = scale * w[j];
        }
        for (int i = threadIdx.x; i < TILE * K / 4; i += 256) {
            int t = i % TILE, u = i / TILE * 4;
            float4 four = make_float4(0, 0, 0, 0);
            if (t0 + t < T) four = *(const float4 *)(x + (size_t)(t0 + t) * cols + k + u);
            xs[u][t] = four.x, xs[u + 1][t] = four.y, xs[u + 2][t] = four.z, xs[u + 3][t] = four.w;
        }
        __syncthreads();
        for (int i = 0; i < K; i++) {
            float4 w4 = *(const float4 *)&ws[i][r4], x4 = *(const float4 *)&xs[i][t4];
            float w[4] = {w4.x, w4.y, w4.z, w4.w}, y[4] = {x4.x, x4.y, x4.z, x4.w};
            for (int a = 0; a < 4; a++)
                for (int b = 0; b < 4; b++) sum[a][b] += y[a] * w[b];
        }
        __syncthreads();
    }
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            if (t0 + t4 + a < T && at.row + r4 + b < p.w.rows)
                put(&p.out[(size_t)(t0 + t4 + a) * p.w.rows + at.row + r4 + b], sum[a][b], p.add);
}

#ifdef TENSOR_CORES

// x (n,) in half precision.
static __global__ void convert(__half *out, const float *x, size_t n) {
    let_next_start();
    wait_for_previous();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = to_half(x[i]);
}

// What the threads of a block bring for one step of a tile: 64 rows, and 64 tokens, of 64 columns, by way of registers.
template <Type type> struct Stage {
    static const int N = Format<type>::N, UNITS = TILE * STEP / N / 128, EIGHTS = TILE * STEP / 8 / 128;
    typename Format<type>::Unit w[UNITS];
    uint4 x[EIGHTS];

    __device__ void load(const Mat &m, int row, const __half *xh, int t0, int T, int cols, int k) {
        for (int j = 0; j < UNITS; j++) {
            int i = threadIdx.x + 128 * j, r = row + i / (STEP / N), col = k + i % (STEP / N) * N;
            if (r < m.rows && col < cols) w[j] = Format<type>::load(m, (size_t)r * cols + col);
            else memset(&w[j], 0, sizeof w[j]);
        }
        for (int j = 0; j < EIGHTS; j++) {
            int i = threadIdx.x + 128 * j, t = t0 + i / (STEP / 8), col = k + i % (STEP / 8) * 8;
            if (t < T && col < cols) x[j] = *(const uint4 *)(xh + (size_t)t * cols + col);
            else memset(&x[j], 0, sizeof x[j]);
        }
    }

    __device__ void store(__half *ws, __half *xs) const {
        for (int j = 0; j < UNITS; j++) {
            int i = threadIdx.x + 128 * j;
            float numbers[N], scale = Format<type>::scale(w[j]);
            Format<type>::numbers(w[j], numbers);
            __half2 *to = (__half2 *)(ws + i / (STEP / N) * ROOM + i % (STEP / N) * N);
            for (int n = 0; n < N; n += 2)
                to[n / 2] = __halves2half2(to_half(scale * numbers[n]), to_half(scale * numbers[n + 1]));
        }
        for (int j = 0; j < EIGHTS; j++) {
            int i = threadIdx.x + 128 * j;
            *(uint4 *)(xs + i / (STEP / 8) * ROOM + i % (STEP / 8) * 8) = x[j];
        }
    }
};

// The product of one step: this warp's 32 rows, all 64 tokens, its 32 of the 64 columns.
typedef nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> Sums;

static __device__ void multiply_tiles(Sums sums[2][4], const __half *ws, const __half *xs) {
    using namespace nvcuda::wmma;
    int row = threadIdx.x / 32 % 2 * 32, half = threadIdx.x / 64 * 32;
    for (int k = half; k < half + 32; k += 16) {
        fragment<matrix_a, 16, 16, 16, __half, row_major> a[2];
        for (int i = 0; i < 2; i++) load_matrix_sync(a[i], ws + (row + 16 * i) * ROOM + k, ROOM);
        for (int j = 0; j < 4; j++) {
            fragment<matrix_b, 16, 16, 16, __half, col_major> b;
            load_matrix_sync(b, xs + 16 * j * ROOM + k, ROOM);
            for (int i = 0; i < 2; i++) mma_sync(sums[i][j], a[i], b, sums[i][j]);
        }
    }
}

// Adds up the two halves of the columns, into tile (tokens, rows), TILE + 4 apart.
static __device__ void add_halves(Sums sums[2][4], float *tile) {
    using namespace nvcuda::wmma;
    int row = threadIdx.x / 32 % 2 * 32, half = threadIdx.x / 64;
    for (int turn = 1; turn >= 0; turn--) {
        for (int i = 0; i < 2 && half == turn; i++)
            for (int j = 0; j < 4; j++) {
                float *at = tile + 16 * j * (TILE + 4) + row + 16 * i;
                if (turn == 0) {
                    Sums other;
                    load_matrix_sync(other, at, TILE + 4, mem_col_major);
                    for (int e = 0; e < other.num_elements; e++) sums[i][j].x[e] += other.x[e];
                }
                store_matrix_sync(at, sums[i][j], TILE + 4, mem_col_major);
            }
        __syncthreads();
    }
}

// For many tokens, on the tensor cores. The grid is (row tiles, token tiles, splits): blocks of one tile share its
// columns, and the last to be ready adds up what they left in pieces (tiles, splits, 64, 64). cols is a multiple of 32.
template <Type type>
static __global__ void __launch_bounds__(128)
matmul_tensor(const __grid_constant__ Parts parts, const __half *x, int cols, int T, float *pieces, unsigned *counters) {
    __shared__ __align__(32) __half shared[2][2][TILE * ROOM]; // weights and x, of this step and the next
    float *tile = (float *)shared;                             // and in the end the result
    let_next_start();
    wait_for_previous();
    Place at = find(parts, blockIdx.x, TILE);
    const Part &p = parts.part[at.part];
    int t0 = blockIdx.y * TILE, splits = gridDim.z, steps = (cols + STEP - 1) / STEP;
    int first = steps * blockIdx.z / splits, end = steps * (blockIdx.z + 1) / splits;
    Sums sums[2][4];
    for (int i = 0; i < 8; i++) nvcuda::wmma::fill_fragment(sums[i / 4][i % 4], 0.0f);
    Stage<type> stage;
    stage.load(p.w, at.row, x, t0, T, cols, first * STEP);
    for (int step = first; step < end; step++) {
        __half (*now)[TILE * ROOM] = shared[step % 2]; // last read two steps ago, before a barrier
        stage.store(now[0], now[1]);
        __syncthreads();
        if (step + 1 < end) stage.load(p.w, at.row, x, t0, T, cols, (step + 1) * STEP);
        multiply_tiles(sums, now[0], now[1]);
    }
    __syncthreads();
    add_halves(sums, tile);

    size_t index = blockIdx.y * gridDim.x + blockIdx.x;
    volatile float *mine = pieces + (index * splits + blockIdx.z) * TILE * TILE;
    for (int i = threadIdx.x; splits > 1 && i < TILE * TILE; i += 128)
        mine[i] = tile[i / TILE * (TILE + 4) + i % TILE];
    if (splits > 1 && !is_last(&counters[index], splits)) return;
    for (int i = threadIdx.x; i < TILE * TILE; i += 128) {
        int t = t0 + i / TILE, row = at.row + i % TILE;
        float sum = splits > 1 ? 0 : tile[i / TILE * (TILE + 4) + i % TILE];
        for (int z = 0; splits > 1 && z < splits; z++)
            sum += ((volatile float *)pieces)[(index * splits + z) * TILE * TILE + i];
        if (t < T && row < p.w.rows) put(&p.out[(size_t)t * p.w.rows + row], sum, p.add);
    }
}
#endif

// ----------------------------------------------------------------------------
// Attention

// What a warp has seen of some positions: with weights exp(score - max), their sum and the weighted sum of the values,
// of which a lane has the dimensions 64 i + 2 lane and the next, as out[2 i] and out[2 i + 1].
template <int D> struct Seen { float max, sum, out[2 * D]; };

static __device__ float2 pair_at(const float *p) { return *(const float2 *)p; }
static __device__ float2 pair_at(const __half *p) { return __half22float2(*(const __half2 *)p); }
static __device__ void put_pair(float *p, float a, float b) { *(float2 *)p = make_float2(a, b); }
static __device__ void put_pair(__half *p, float a, float b) { *(__half2 *)p = __halves2half2(to_half(a), to_half(b)); }

template <typename Number> struct FormatOf;
template <> struct FormatOf<float> : Format<F32> {};
template <> struct FormatOf<__half> : Format<F16> {};

// Attention of q (width,) over the tiles first, first + stride, ... of 32 positions before n; keys and values
// (positions, width). In one pass: what was summed is scaled down whenever a larger score comes (Milakov 2018).
template <typename Number, int D>
static __device__ Seen<D> attend(const float *q, const Number *keys, const Number *values, int width, int n, int first,
                                 int stride, float scale) {
    typedef FormatOf<Number> F;
    const int N = F::N, lane = threadIdx.x % 32;
    Seen<D> s = {-INFINITY, 0, {0}};
    for (int p = 32 * first; p < n; p += 32 * stride) {
        float score = -INFINITY;
        if (p + lane < n) {
            const uint4 *key = (const uint4 *)(keys + (size_t)(p + lane) * width);
            score = 0;
            for (int u = 0; u < width / N; u++) {
                typename F::Unit unit = {key[u]};
                float k[N];
                F::numbers(unit, k);
                for (int i = 0; i < N; i++) score += k[i] * q[N * u + i];
            }
            score *= scale;
        }
        float max = fmaxf(s.max, warp_max(score)), shrink = expf(s.max - max), weight = expf(score - max);
        s.max = max;
        s.sum = s.sum * shrink + warp_sum(weight);
        for (int i = 0; i < 2 * D; i++) s.out[i] *= shrink;
        for (int j = 0; j < 32 && p + j < n; j++) {
            float w = __shfl_sync(ALL_LANES, weight, j, 32);
            const Number *value = values + (size_t)(p + j) * width;
            for (int i = 0; i < D; i++) {
                int d = 64 * i + 2 * lane;
                if (d >= width) continue;
                float2 pair = pair_at(value + d);
                s.out[2 * i] += w * pair.x;
                s.out[2 * i + 1] += w * pair.y;
            }
        }
    }
    return s;
}

typedef struct {
    void *keys, *values; // (n_kv_heads, positions, width) of one layer
    int positions, width, n_heads, n_kv_heads, head_dim;
    const Input *input;
} Cache;

// Of many tokens: a block takes 8 tokens of one head, a warp each, so that they share what they read.
// out, q (T, n_heads, head_dim); the grid is (n_heads, groups of 8 tokens).
template <typename Number, int D>
static __global__ void attention_many(Cache c, float *out, const float *q, int T) {
    __shared__ float queries[WARPS][HEAD_MAX];
    let_next_start();
    wait_for_previous();
    int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = blockIdx.y * WARPS + warp;
    if (t >= T) return;
    size_t at = ((size_t)t * c.n_heads + h) * c.head_dim;
    size_t head = (size_t)(h / (c.n_heads / c.n_kv_heads)) * c.positions * c.width;
    for (int i = lane; i < c.width; i += 32) queries[warp][i] = i < c.head_dim ? q[at + i] : 0;
    __syncwarp();
    Seen<D> s = attend<Number, D>(queries[warp], (Number *)c.keys + head, (Number *)c.values + head, c.width,
                                  c.input->pos + t + 1, 0, 1, 1 / sqrtf(c.head_dim));
    for (int i = 0; i < 2 * D; i++) {
        int d = 64 * (i / 2) + 2 * lane + i % 2;
        if (d < c.head_dim) out[at + d] = s.out[i] / s.sum;
    }
}

// n pieces of one head's attention: max and sum (n,), out (n, HEAD_MAX). Returns those of the whole, dimension d of out.
struct Whole { float max, sum, out; };

static __device__ Whole merge(const volatile float *max, const volatile float *sum, const volatile float *out, int n,
                              int d) {
    Whole w = {-INFINITY, 0, 0};
    for (int i = 0; i < n; i++) w.max = fmaxf(w.max, max[i]);
    for (int i = 0; i < n; i++) {
        float weight = max[i] == -INFINITY ? 0 : expf(max[i] - w.max); // 0 of a piece without positions
        w.sum += weight * sum[i];
        w.out += weight * out[i * HEAD_MAX + d];
    }
    return w;
}

// Of one token: the positions of a head are shared out among the warps of `splits` blocks; the last block to be ready
// merges what all have left in pieces (n_heads, splits + splits + splits * HEAD_MAX). The grid is (n_heads, splits).
template <typename Number, int D>
static __global__ void attention_one(Cache c, float *out, const float *q, float *pieces, unsigned *counters) {
    __shared__ float query[HEAD_MAX], max[WARPS], sum[WARPS], outs[WARPS * HEAD_MAX];
    let_next_start();
    wait_for_previous();
    int h = blockIdx.x, split = blockIdx.y, splits = gridDim.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    size_t head = (size_t)(h / (c.n_heads / c.n_kv_heads)) * c.positions * c.width;
    int d = threadIdx.x; // there are as many threads as a head can have dimensions
    if (d < c.width) query[d] = d < c.head_dim ? q[h * c.head_dim + d] : 0;
    __syncthreads();
    Seen<D> s = attend<Number, D>(query, (Number *)c.keys + head, (Number *)c.values + head, c.width, c.input->pos + 1,
                                  split * WARPS + warp, splits * WARPS, 1 / sqrtf(c.head_dim));
    if (lane == 0) max[warp] = s.max, sum[warp] = s.sum;
    for (int i = 0; i < 2 * D; i++) outs[warp * HEAD_MAX + 64 * (i / 2) + 2 * lane + i % 2] = s.out[i];
    __syncthreads();
    if (splits > 1) {
        float *all_max = pieces + (size_t)h * splits * (2 + HEAD_MAX), *all_sum = all_max + splits;
        float *all_out = all_sum + splits;
        if (d < c.head_dim) {
            Whole w = merge(max, sum, outs, WARPS, d);
            if (d == 0) all_max[split] = w.max, all_sum[split] = w.sum;
            all_out[split * HEAD_MAX + d] = w.out;
        }
        if (!is_last(&counters[h], splits) || d >= c.head_dim) return;
        Whole w = merge(all_max, all_sum, all_out, splits, d);
        out[h * c.head_dim + d] = w.out / w.sum;
    } else if (d < c.head_dim) {
        Whole w = merge(max, sum, outs, WARPS, d);
        out[h * c.head_dim + d] = w.out / w.sum;
    }
}

// Rotates the pairs of q (T, n_heads, head_dim) and k (T, n_kv_heads, head_dim) and writes k and v to the cache.
// The grid is (pairs, T); rotation (positions, head_dim / 2) holds cosine and sine.
template <typename Number>
static __global__ void rotate(Cache c, float *q, float *k, const float *v, const float2 *rotation) {
    let_next_start();
    wait_for_previous();
    int dim = c.n_heads * c.head_dim, kv_dim = c.n_kv_heads * c.head_dim;
    int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x), t = blockIdx.y, pos = c.input->pos + t;
    bool is_q = i < dim, is_k = !is_q && i < dim + kv_dim;
    if (i >= dim + 2 * kv_dim) return;
    if (!is_q) i -= is_k ? dim : dim + kv_dim;
    const float *from = is_q ? q + (size_t)t * dim + i : (is_k ? k : v) + (size_t)t * kv_dim + i;
    float a = from[0], b = from[1];
    if (is_q || is_k) {
        float2 r = rotation[(size_t)pos * (c.head_dim / 2) + i % c.head_dim / 2];
        float turned = a * r.x - b * r.y;
        b = a * r.y + b * r.x;
        a = turned;
        float *to = is_q ? q + (size_t)t * dim + i : k + (size_t)t * kv_dim + i;
        to[0] = a, to[1] = b;
    }
    if (is_q) return;
    size_t at = ((size_t)(i / c.head_dim) * c.positions + pos) * c.width + i % c.head_dim;
    put_pair((Number *)(is_k ? c.keys : c.values) + at, a, b);
}

// ----------------------------------------------------------------------------
// The small operations

// x (T, dim); a thread computes one number.
static __global__ void embed_rows(float *x, const __grid_constant__ Mat table, const Input *input, int T) {
    let_next_start();
    wait_for_previous();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    int dim = table.cols, t = (int)(i / dim);
    if (t < T) x[i] = number_at(table, (size_t)input->tokens[t] * dim + i % dim);
}

// A block for each token.
static __global__ void __launch_bounds__(512)
normalize(float *out, const float *x, const float *weight, int dim, float eps) {
    __shared__ float sums[16];
    let_next_start();
    wait_for_previous();
    x += (size_t)blockIdx.x * dim, out += (size_t)blockIdx.x * dim;
    float sum = 0;
    for (int i = threadIdx.x; i < dim; i += 512) sum += x[i] * x[i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < 16; i++) sum += sums[i];
    float scale = 1 / sqrtf(sum / dim + eps);
    for (int i = threadIdx.x; i < dim; i += 512) out[i] = weight[i] * (scale * x[i]);
}

static __global__ void gate(float *h, const float *h2, size_t n) {
    let_next_start();
    wait_for_previous();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) h[i] = h[i] / (1 + expf(-h[i])) * h2[i];
}

// best = index of the largest of x (n,), the first of equals; -1 when any is not finite. One block of 1024 threads.
static __global__ void __launch_bounds__(1024) find_largest(int *best, const float *x, int n) {
    __shared__ float values[1024];
    __shared__ int indices[1024]; // n of a thread that has none, -1 of one that saw what is not finite
    let_next_start();
    wait_for_previous();
    int me = threadIdx.x, index = n;
    float value = -INFINITY;
    for (int i = me; i < n; i += 1024) {
        float y = x[i];
        if (index >= 0 && y > value) value = y, index = i;
        if (!(fabsf(y) < INFINITY)) index = -1;
    }
    values[me] = value, indices[me] = index;
    __syncthreads();
    for (int half = 512; half > 0; half /= 2) {
        if (me < half) {
            float other = values[me + half];
            int there = indices[me + half], here = indices[me];
            bool better = other > values[me] || (other == values[me] && there < here);
            if (here >= 0 && (there < 0 || better)) values[me] = other, indices[me] = there;
        }
        __syncthreads();
    }
    if (me == 0) *best = indices[0];
}

// Reads n 16-byte words; writes only if their sum is what no one expects.
static __global__ void read_all(const uint4 *words, size_t n, int *out) {
    uint32_t sum = 0;
    size_t stride = (size_t)gridDim.x * blockDim.x, i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 a = words[i], b = words[i + stride], c = words[i + 2 * stride], d = words[i + 3 * stride];
        sum += (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w) + (c.x ^ c.y ^ c.z ^ c.w) + (d.x ^ d.y ^ d.z ^ d.w);
    }
    for (; i < n; i += stride) sum += words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
    if (sum == 0x9e3779b9u) *out = 1;
}

// ----------------------------------------------------------------------------
// The host's side

typedef struct {
    bool seen;             // the ops were called once already, which also loaded the kernels
    cudaGraphExec_t exec;  // NULL until they are recorded
} Recording;

typedef struct {
    Backend ops;           // first, so that a Backend * is a Cuda *
    Config config;
    cudaStream_t stream;
    int multiprocessors;
    size_t shared_most;    // bytes of shared memory that a block can have
    bool overlap;          // kernels start before the one before has ended
    bool after_copy;       // the next kernel comes after a copy, which it cannot overlap
    bool in_pass;          // between begin and end
    Recording recordings[CHUNK + 1][2]; // by T and all
    Recording *recording;  // of this pass, while it is being recorded

    std::vector<void *> *blocks; // the device's memory, to be freed
    Input *input, *input_host;   // on the device, and pinned on the host
    int *best, *best_host;       // what argmax answers
    float *logits;               // (logits_rows, vocab_size)
    int logits_rows;
    void *pinned;                // the caller's logits, once pinned
    size_t pinned_size;
    const uint4 *weights;        // all of them
    size_t weights_size;         // bytes
    Cache cache;                 // of all layers; its pointers are layer 0's
    bool exact;                  // the cache holds float, else __half
    float2 *rotation;            // (positions, head_dim / 2): cosine and sine
    int splits;                  // blocks that share a head's positions when decoding
    __half *x16;                 // (CHUNK, dim or hidden_dim)
    float *pieces;               // of attention, or of tiles
    unsigned *counters;          // zeros between kernels
} Cuda;

static const char *format(const char *text, double a, double b, double c, double d) {
    static char message[512];
    snprintf(message, sizeof message, text, a, b, c, d);
    return message;
}

// An error in the middle of the work comes from a fault of the machine or of this file; there is no going on.
static void check(cudaError_t e, const char *call, int line) {
    if (e == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "run: cuda: %s (kernels_cuda.cu:%d: %.60s)\n", cudaGetErrorString(e), line, call);
    _exit(1);
}

#define CUDA(call) check(call, #call, __LINE__)

template <typename T> struct Exactly { typedef T type; };

// Starts a kernel with `shared` bytes of LAUNCH_SHARED memory.
template <typename... P>
static void launch(Cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t shared,
                   typename Exactly<P>::type... args) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = c->stream;
    config.attrs = &attribute, config.numAttrs = c->overlap && !c->after_copy;
    CUDA(cudaLaunchKernelEx(&config, kernel, args...));
    c->after_copy = false;
}

static unsigned blocks_for(size_t items, size_t per_block) { return (unsigned)((items + per_block - 1) / per_block); }

static void send_input(Cuda *c, const int *tokens, int T, int pos) {
    c->input_host->pos = pos;
    if (tokens) memcpy(c->input_host->tokens, tokens, sizeof(int) * T);
    CUDA(cudaMemcpyAsync(c->input, c->input_host, sizeof(int) * (1 + T), cudaMemcpyHostToDevice, c->stream));
    c->after_copy = true;
    if (!c->in_pass) CUDA(cudaStreamSynchronize(c->stream)); // before the host's input may change again
}

// The first call with this T is done op by op, the second is recorded, the others are replayed.
static bool begin(Backend *b, const int *tokens, int T, int pos, bool all) {
    Cuda *c = (Cuda *)b;
    Recording *r = &c->recordings[T][all];
    c->in_pass = true;
    c->recording = r->seen ? r : NULL;
    if (r->exec) {
        c->input_host->pos = pos;
        memcpy(c->input_host->tokens, tokens, sizeof(int) * T);
        return false;
    }
    if (r->seen) CUDA(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
    r->seen = true;
    send_input(c, tokens, T, pos);
    return true;
}

static void end(Backend *b) {
    Cuda *c = (Cuda *)b;
    Recording *r = c->recording;
    if (r && !r->exec) {
        cudaGraph_t graph;
        CUDA(cudaStreamEndCapture(c->stream, &graph));
        CUDA(cudaGraphInstantiate(&r->exec, graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
    if (r) CUDA(cudaGraphLaunch(r->exec, c->stream));
    CUDA(cudaStreamSynchronize(c->stream));
    c->in_pass = false;
    c->recording = NULL;
}

// ----------------------------------------------------------------------------
// The operations; run.h says what each computes

static void embed(Backend *b, float *x, const Mat *table, const int *tokens, int T) {
    Cuda *c = (Cuda *)b;
    if (!c->in_pass) send_input(c, tokens, T, 0);
    launch(c, embed_rows, blocks_for((size_t)T * table->cols, 256), 256, 0, x, *table, c->input, T);
}

static void rmsnorm(Backend *b, float *out, const float *x, const Mat *weight, int T) {
    Cuda *c = (Cuda *)b;
    launch(c, normalize, T, 512, 0, out, x, (const float *)weight->data, weight->cols, c->config.norm_eps);
}

// Whether rows consist of whole units that the kernels above this can load.
static bool has_units(const Mat *m) {
    bool groups = m->type != INT8_GROUPS || (m->group >= 16 && (m->group & (m->group - 1)) == 0);
    return m->cols % 32 == 0 && groups;
}

typedef void Matvec(Parts, const float *, int);
typedef void Tiles(Parts, const float *, int, int);

static Matvec *matvec_of(Type type) {
    switch (type) {
    case F32: return matvec<F32>;
    case F16: return matvec<F16>;
    case BF16: return matvec<BF16>;
    case Q8_0: return matvec<Q8_0>;
    case Q4_0: return matvec<Q4_0>;
    default: return matvec<INT8_GROUPS>;
    }
}

// Groups of rows, of `size` at most, of all parts.
static unsigned groups_of(const Parts &parts, int size) {
    unsigned n = 0;
    for (int i = 0; i < parts.n; i++) n += blocks_for(parts.part[i].w.rows, size);
    return n;
}

// As many blocks as can run at the same time, if there is work for them. False when x finds no room.
static bool launch_matvec(Cuda *c, const Parts &parts, const float *x, int cols) {
    Matvec *kernel = matvec_of(parts.part[0].w.type);
    size_t shared = sizeof(float) * padded(cols);
    int fit = 0;
    if (shared > c->shared_most) return false;
    if (shared > 48 << 10)
        CUDA(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, (const void *)kernel, 32 * WARPS, shared));
    unsigned blocks = blocks_for(groups_of(parts, ROWS), WARPS), most = c->multiprocessors * (fit > 0 ? fit : 1);
    launch(c, kernel, blocks < most ? blocks : most, 32 * WARPS, shared, parts, x, cols);
    return true;
}

#ifdef TENSOR_CORES

typedef void Tensor(Parts, const __half *, int, int, float *, unsigned *);

static Tensor *tensor_of(Type type) {
    switch (type) {
    case F16: return matmul_tensor<F16>;
    case BF16: return matmul_tensor<BF16>;
    case Q8_0: return matmul_tensor<Q8_0>;
    case Q4_0: return matmul_tensor<Q4_0>;
    default: return matmul_tensor<INT8_GROUPS>;
    }
}

static Tiles *tiles_of(Type) { return matmul_tiles<F32>; }

// Few tiles are split along the columns, so that all multiprocessors have two, with 4 steps at least.
static void launch_tensor(Cuda *c, const Parts &parts, const float *x, int cols, int T) {
    size_t n = (size_t)T * cols;
    unsigned rows = groups_of(parts, TILE), tokens = blocks_for(T, TILE), steps = blocks_for(cols, STEP);
    unsigned splits = 2 * c->multiprocessors / (rows * tokens);
    if (splits > steps / 4) splits = steps / 4;
    if (splits < 1) splits = 1;
    launch(c, convert, blocks_for(n, 256), 256, 0, c->x16, x, n);
    launch(c, tensor_of(parts.part[0].w.type), dim3(rows, tokens, splits), 128, 0, parts, c->x16, cols, T, c->pieces,
           c->counters);
}

#else

static Tiles *tiles_of(Type type) {
    switch (type) {
    case F32: return matmul_tiles<F32>;
    case F16: return matmul_tiles<F16>;
    case BF16: return matmul_tiles<BF16>;
    case Q8_0: return matmul_tiles<Q8_0>;
    case Q4_0: return matmul_tiles<Q4_0>;
    default: return matmul_tiles<INT8_GROUPS>;
    }
}
#endif

static void launch_parts(Cuda *c, const Parts &parts, const float *x, int T) {
    const Mat *w = &parts.part[0].w;
    int cols = w->cols;
    if (has_units(w) && T == 1 && launch_matvec(c, parts, x, cols)) return;
    if (!has_units(w) || T == 1) {
        launch(c, matmul_any, dim3(blocks_for(groups_of(parts, 1), WARPS), T), 32 * WARPS, 0, parts, x, cols);
        return;
    }
#ifdef TENSOR_CORES
    if (w->type != F32) return launch_tensor(c, parts, x, cols, T);
#endif
    launch(c, tiles_of(w->type), dim3(groups_of(parts, TILE), blocks_for(T, TILE)), 256, 0, parts, x, cols, T);
}

static void matmul(Backend *b, const Product *products, int n, const float *x, int T) {
    for (int i = 0; i < n;) {
        Parts parts;
        const Mat *w = products[i].w;
        for (parts.n = 0; i < n && parts.n < 3; i++) {
            if (products[i].w->type != w->type || has_units(products[i].w) != has_units(w)) break;
            parts.part[parts.n++] = {products[i].out, *products[i].w, products[i].add};
        }
        launch_parts((Cuda *)b, parts, x, T);
    }
}

static Cache cache_of(const Cuda *c, int layer) {
    Cache cache = c->cache;
    size_t at = (c->exact ? sizeof(float) : sizeof(__half)) * layer * cache.n_kv_heads * cache.positions * cache.width;
    cache.keys = (char *)cache.keys + at, cache.values = (char *)cache.values + at;
    return cache;
}

static void rope(Backend *b, int layer, float *q, float *k, const float *v, int pos, int T) {
    Cuda *c = (Cuda *)b;
    if (!c->in_pass) send_input(c, NULL, 0, pos);
    size_t pairs = (c->config.dim + 2 * (size_t)c->config.kv_dim) / 2;
    auto kernel = c->exact ? rotate<float> : rotate<__half>;
    launch(c, kernel, dim3(blocks_for(pairs, 128), T), 128, 0, cache_of(c, layer), q, k, v, c->rotation);
}

template <typename Number> static void launch_attention(Cuda *c, Cache cache, float *out, const float *q, int T) {
    int width = cache.width;
    if (T == 1) {
        auto kernel = width <= 64 ? attention_one<Number, 1> : width <= 128 ? attention_one<Number, 2>
                                                                            : attention_one<Number, 4>;
        launch(c, kernel, dim3(cache.n_heads, c->splits), 32 * WARPS, 0, cache, out, q, c->pieces, c->counters);
    } else {
        auto kernel = width <= 64 ? attention_many<Number, 1> : width <= 128 ? attention_many<Number, 2>
                                                                             : attention_many<Number, 4>;
        launch(c, kernel, dim3(cache.n_heads, blocks_for(T, WARPS)), 32 * WARPS, 0, cache, out, q, T);
    }
}

static void attention(Backend *b, int layer, float *out, const float *q, int pos, int T) {
    Cuda *c = (Cuda *)b;
    if (!c->in_pass) send_input(c, NULL, 0, pos);
    if (c->exact) launch_attention<float>(c, cache_of(c, layer), out, q, T);
    else launch_attention<__half>(c, cache_of(c, layer), out, q, T);
}

static void swiglu(Backend *b, float *h, const float *h2, int T) {
    Cuda *c = (Cuda *)b;
    size_t n = (size_t)T * c->config.hidden_dim;
    launch(c, gate, blocks_for(n, 256), 256, 0, h, h2, n);
}

// Device memory that close frees; NULL when there is none.
static void *take(Cuda *c, size_t bytes) {
    void *block = NULL;
    if (cudaMalloc(&block, bytes ? bytes : 1) == cudaSuccess) return c->blocks->push_back(block), block;
    (void)cudaGetLastError(); // so that it is not taken for a later call's
    return NULL;
}

// Pins the caller's logits, so that the copy is one transfer. Where the system refuses, it is a slower one.
static void pin(Cuda *c, void *bytes, size_t size) {
    if (c->pinned == bytes && size <= c->pinned_size) return;
    if (c->pinned) CUDA(cudaHostUnregister(c->pinned));
    bool done = cudaHostRegister(bytes, size, cudaHostRegisterDefault) == cudaSuccess;
    if (!done) (void)cudaGetLastError();
    c->pinned = done ? bytes : NULL, c->pinned_size = done ? size : 0;
}

static void logits(Backend *b, float *out, const Mat *output, const float *x, int T) {
    Cuda *c = (Cuda *)b;
    size_t bytes = sizeof(float) * T * output->rows;
    if (T > c->logits_rows) { // in the first call with this T, never in one that is recorded
        c->logits = (float *)take(c, bytes);
        c->logits_rows = T;
        if (!c->logits) check(cudaErrorMemoryAllocation, "logits", __LINE__);
    }
    Product product = {c->logits, output, false};
    matmul(b, &product, 1, x, T);
    if (out) {
        if (!c->recording) pin(c, out, bytes);
        CUDA(cudaMemcpyAsync(out, c->logits, bytes, cudaMemcpyDeviceToHost, c->stream));
    } else {
        launch(c, find_largest, 1, 1024, 0, c->best, c->logits, output->rows);
        CUDA(cudaMemcpyAsync(c->best_host, c->best, sizeof(int), cudaMemcpyDeviceToHost, c->stream));
    }
    c->after_copy = true;
    if (!c->in_pass) CUDA(cudaStreamSynchronize(c->stream));
}

static int argmax(Backend *b) { return *((Cuda *)b)->best_host; }

// The best of some passes over n bytes of the weights.
static double bandwidth(Backend *b, const void *, size_t n) {
    Cuda *c = (Cuda *)b;
    cudaEvent_t start, stop;
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&stop));
    size_t words = (n < c->weights_size ? n : c->weights_size) / 16;
    float best = INFINITY, ms;
    for (int pass = 0; pass < 20; pass++) {
        CUDA(cudaEventRecord(start, c->stream));
        c->after_copy = true; // not before the last pass has ended
        launch(c, read_all, 8 * c->multiprocessors, 256, 0, c->weights, words, c->best);
        CUDA(cudaEventRecord(stop, c->stream));
        CUDA(cudaEventSynchronize(stop));
        CUDA(cudaEventElapsedTime(&ms, start, stop));
        best = ms < best ? ms : best;
    }
    CUDA(cudaEventDestroy(start));
    CUDA(cudaEventDestroy(stop));
    return words * 16 / (best * 1e-3);
}

// ----------------------------------------------------------------------------
// Opening: the weights go to the device

// A matrix on the device: its numbers, and behind them, from the next multiple of 256 on, its scales.
typedef struct { size_t numbers, scales; } Size;

static Size size_of(const Mat *m) {
    size_t n = (size_t)m->rows * m->cols;
    switch (m->type) {
    case F32: return {4 * n, 0};
    case F16: case BF16: return {2 * n, 0};
    case Q8_0: return {n, n / 32 * 2};
    case Q4_0: return {n / 2, n / 32 * 2};
    default: return {n, (n + m->group - 1) / m->group * 4};
    }
}

static size_t aligned(size_t n) { return (n + 255) / 256 * 256; }
static size_t bytes_of(const Mat *m) { return aligned(size_of(m).numbers) + aligned(size_of(m).scales); }

// Every matrix once. A tied output is the embedding.
static std::vector<Mat *> matrices(Weights *w, int n_layers) {
    std::vector<Mat *> all = {&w->token_embedding, &w->norm};
    if (w->output.data != w->token_embedding.data) all.push_back(&w->output);
    for (Layer *l = w->layers; l < w->layers + n_layers; l++)
        all.insert(all.end(), {&l->attention_norm, &l->wq, &l->wk, &l->wv, &l->wo, &l->ffn_norm, &l->w1, &l->w3, &l->w2});
    return all;
}

static const size_t PIECE = 32 << 20; // bytes

// Copies by way of two pinned pieces in turn: one is filled from the file while the other travels.
typedef struct {
    cudaStream_t stream;
    char *pieces[2];
    cudaEvent_t gone[2]; // when a piece may be filled again
    int turn;
    size_t done, total;  // bytes
} Upload;

static char *next_piece(Upload *u) {
    u->turn = !u->turn;
    CUDA(cudaEventSynchronize(u->gone[u->turn]));
    return u->pieces[u->turn];
}

static void send(Upload *u, void *to, const char *from, size_t n) {
    CUDA(cudaMemcpyAsync(to, from, n, cudaMemcpyHostToDevice, u->stream));
    CUDA(cudaEventRecord(u->gone[u->turn], u->stream));
    u->done += n;
    if (isatty(2)) fprintf(stderr, "\r%zu of %zu MiB on the GPU", u->done >> 20, u->total >> 20);
}

static void upload_bytes(Upload *u, char *to, const void *from, size_t n) {
    for (size_t at = 0, some; at < n; at += some) {
        some = n - at < PIECE ? n - at : PIECE;
        send(u, to + at, (char *)memcpy(next_piece(u), (const char *)from + at, some), some);
    }
}

// n blocks, each a scale of two bytes before WIDTH bytes of numbers: the scales go to one place, the rest to another.
template <size_t WIDTH>
static void upload_blocks(Upload *u, char *numbers, char *scales, const void *from, size_t n) {
    const char *block = (const char *)from;
    size_t most = PIECE / (2 + WIDTH);
    for (size_t at = 0, some; at < n; at += some) {
        some = n - at < most ? n - at : most;
        char *piece = next_piece(u);
        for (size_t i = 0; i < some; i++, block += 2 + WIDTH) {
            memcpy(piece + i * WIDTH, block + 2, WIDTH);
            memcpy(piece + some * WIDTH + 2 * i, block, 2);
        }
        send(u, numbers + at * WIDTH, piece, some * WIDTH);
        send(u, scales + 2 * at, piece + some * WIDTH, 2 * some);
    }
}

static void upload_matrix(Upload *u, char *to, Mat *m) {
    Size size = size_of(m);
    char *scales = to + aligned(size.numbers);
    size_t blocks = (size_t)m->rows * m->cols / 32;
    if (m->type == Q8_0) upload_blocks<32>(u, to, scales, m->data, blocks);
    else if (m->type == Q4_0) upload_blocks<16>(u, to, scales, m->data, blocks);
    else {
        upload_bytes(u, to, m->data, size.numbers);
        if (size.scales) upload_bytes(u, scales, m->scales, size.scales);
    }
    m->data = to;
    m->scales = size.scales ? scales : NULL;
}

static void upload(Cuda *c, Weights *w) {
    Upload u = {};
    u.stream = c->stream;
    u.total = c->weights_size;
    char *to = (char *)c->weights;
    bool tied = w->output.data == w->token_embedding.data;
    for (int i = 0; i < 2; i++) {
        CUDA(cudaMallocHost((void **)&u.pieces[i], PIECE));
        CUDA(cudaEventCreateWithFlags(&u.gone[i], cudaEventDisableTiming));
    }
    for (Mat *m : matrices(w, c->config.n_layers)) {
        size_t bytes = bytes_of(m);
        upload_matrix(&u, to, m);
        to += bytes;
    }
    if (tied) w->output = w->token_embedding;
    CUDA(cudaStreamSynchronize(c->stream));
    if (isatty(2)) fprintf(stderr, "\n");
    for (int i = 0; i < 2; i++) {
        CUDA(cudaFreeHost(u.pieces[i]));
        CUDA(cudaEventDestroy(u.gone[i]));
    }
}

// Cosine and sine of position / rope_scaling * rope_theta^(-2i / head_dim), in double precision as on the CPU.
static void upload_rotation(Cuda *c) {
    int positions = c->cache.positions, half = c->config.head_dim / 2;
    std::vector<float> table(2 * (size_t)positions * half);
    for (int i = 0; i < half; i++) {
        double rate = pow(c->config.rope_theta, -2.0 * i / c->config.head_dim);
        for (int pos = 0; pos < positions; pos++) {
            double angle = pos / (double)c->config.rope_scaling * rate;
            table[2 * ((size_t)pos * half + i)] = (float)cos(angle);
            table[2 * ((size_t)pos * half + i) + 1] = (float)sin(angle);
        }
    }
    CUDA(cudaMemcpy(c->rotation, table.data(), sizeof(float) * table.size(), cudaMemcpyHostToDevice));
}

// ----------------------------------------------------------------------------
// Opening and closing

static float *cuda_alloc(Backend *b, size_t n) {
    return n < SIZE_MAX / sizeof(float) ? (float *)take((Cuda *)b, n * sizeof(float)) : NULL;
}

static void cuda_close(Backend *b) {
    Cuda *c = (Cuda *)b;
    for (auto &pair : c->recordings)
        for (Recording &r : pair)
            if (r.exec) CUDA(cudaGraphExecDestroy(r.exec));
    if (c->pinned) CUDA(cudaHostUnregister(c->pinned));
    for (void *block : *c->blocks) CUDA(cudaFree(block));
    if (c->input_host) CUDA(cudaFreeHost(c->input_host));
    if (c->best_host) CUDA(cudaFreeHost(c->best_host));
    if (c->stream) CUDA(cudaStreamDestroy(c->stream));
    delete c->blocks;
    free(c);
}

// Whether there is a GPU that this program was compiled for. Returns NULL or what is wrong.
static const char *find_device(Cuda *c) {
    static char message[512];
    cudaDeviceProp device;
    cudaFuncAttributes code;
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaSuccess && n == 0) e = cudaErrorNoDevice;
    if (e == cudaSuccess) e = cudaSetDevice(0);
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&device, 0);
    if (e != cudaSuccess) {
        const char *why = e == cudaErrorInsufficientDriver ? "no driver, or too old a one for this program's CUDA"
                                                           : cudaGetErrorString(e);
        snprintf(message, sizeof message, "no GPU can be used here (%s); --device=cpu computes without", why);
        return message;
    }
    if (cudaFuncGetAttributes(&code, (const void *)normalize) != cudaSuccess) {
        snprintf(message, sizeof message, "this program was not compiled for a %.200s; make runcuda ARCH=%d%d does it",
                 device.name, device.major, device.minor);
        return message;
    }
    c->multiprocessors = device.multiProcessorCount;
    c->shared_most = device.sharedMemPerBlockOptin;
    c->overlap = OVERLAP && device.major >= 9;
    return NULL;
}

// Numbers of `pieces` that attention's splits, or the tiles that share multiprocessors, can leave.
static size_t pieces_of(const Cuda *c) {
    size_t attention = (size_t)c->config.n_heads * c->splits * (2 + HEAD_MAX);
    size_t tiles = 2 * (size_t)c->multiprocessors * TILE * TILE;
    return attention > tiles ? attention : tiles;
}

// Takes all the memory but the activations'; NULL or what is wrong.
static const char *take_memory(Cuda *c, Weights *w) {
    const Config *config = &c->config;
    size_t wide = config->dim > config->hidden_dim ? config->dim : config->hidden_dim, free_bytes = 0, total = 0;
    size_t half = (c->exact ? sizeof(float) : sizeof(__half)) * config->n_layers * config->n_kv_heads
                * c->cache.positions * c->cache.width; // of the cache: keys, and as much for values
    size_t n_counters = config->n_heads > 2 * c->multiprocessors ? config->n_heads : 2 * c->multiprocessors;
    size_t rows = CHUNK < c->cache.positions ? CHUNK : c->cache.positions;
    size_t activations = sizeof(float) * rows * (3 * (size_t)config->dim + 2 * config->kv_dim + 2 * config->hidden_dim);
    activations += sizeof(float) * (config->vocab_size + pieces_of(c)) + sizeof(__half) * CHUNK * wide;
    activations += sizeof(float) * c->cache.positions * config->head_dim;
    for (Mat *m : matrices(w, config->n_layers)) c->weights_size += bytes_of(m);
    double gib = 1 << 30, needed = (double)c->weights_size + 2.0 * half + activations;
    CUDA(cudaMemGetInfo(&free_bytes, &total));
    bool ok = needed <= free_bytes
           && (c->weights = (const uint4 *)take(c, c->weights_size))
           && (c->cache.keys = take(c, half)) && (c->cache.values = take(c, half))
           && (c->rotation = (float2 *)take(c, sizeof(float) * c->cache.positions * config->head_dim))
           && (c->x16 = (__half *)take(c, sizeof(__half) * CHUNK * wide))
           && (c->pieces = (float *)take(c, sizeof(float) * pieces_of(c)))
           && (c->counters = (unsigned *)take(c, sizeof(unsigned) * n_counters))
           && (c->input = (Input *)take(c, sizeof(Input))) && (c->best = (int *)take(c, sizeof(int)));
    if (!ok)
        return format("the GPU's memory is too small: %.2f GiB are needed (weights %.2f, context %.2f), %.2f are free; "
                      "ask for fewer tokens with -n, or for --device=cpu", needed / gib, c->weights_size / gib,
                      2 * half / gib, free_bytes / gib);
    CUDA(cudaMemset(c->cache.keys, 0, half)); // the room between head_dim and width stays zero
    CUDA(cudaMemset(c->cache.values, 0, half));
    CUDA(cudaMemset(c->counters, 0, sizeof(unsigned) * n_counters));
    CUDA(cudaMallocHost((void **)&c->input_host, sizeof(Input)));
    CUDA(cudaMallocHost((void **)&c->best_host, sizeof(int)));
    return NULL;
}

const char *cuda_open(Backend **backend, Model *model, int positions) {
    const Config *config = &model->config;
    if (config->head_dim > HEAD_MAX) return format("heads of %.0f numbers, expected up to %.0f", config->head_dim, HEAD_MAX, 0, 0);
    Cuda *c = (Cuda *)calloc(1, sizeof *c);
    if (!c) return "out of memory";
    c->blocks = new std::vector<void *>;
    c->config = *config;
    c->exact = model->weights.layers[0].wk.type == F32;
    int width = (config->head_dim + 7) / 8 * 8, splits = (positions + 255) / 256; // a tile of 32 for each of 8 warps
    c->splits = splits < 16 ? splits : 16;
    c->cache.positions = positions, c->cache.width = width, c->cache.head_dim = config->head_dim;
    c->cache.n_heads = config->n_heads, c->cache.n_kv_heads = config->n_kv_heads;
    const char *wrong = find_device(c);
    if (!wrong) wrong = take_memory(c, &model->weights);
    if (wrong) return cuda_close(&c->ops), wrong;
    c->cache.input = c->input;
    CUDA(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    upload_rotation(c);
    upload(c, &model->weights);
    CUDA(cudaDeviceSynchronize());
    Backend *b = &c->ops;
    b->chunk = CHUNK, b->begin = begin, b->end = end, b->alloc = cuda_alloc, b->embed = embed, b->rmsnorm = rmsnorm;
    b->matmul = matmul, b->rope = rope, b->attention = attention, b->swiglu = swiglu, b->logits = logits;
    b->argmax = argmax, b->bandwidth = bandwidth, b->close = cuda_close;
    *backend = b;
    return NULL;
}

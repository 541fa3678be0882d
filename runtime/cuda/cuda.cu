// The Backend of NVIDIA GPUs. Everything runs on one stream. Kernels read position and tokens from the device's memory,
// so the ops of a call of forward are the same for every token: they are recorded once as a CUDA graph and replayed.
//
// Decoding (T = 1) reads every weight once, in one kernel where token.h can, else by ops like all other calls:
// warps stream rows in 16-byte loads. A prompt's matrix products multiply
// tiles on the tensor cores in half precision, float32 matrices in float32. Keys and values are kept in half precision
// as well, but for models in float32.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <algorithm>
#include <vector>
#ifdef __HIPCC__
#include "hip.h"
#else
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <mma.h>
#define TENSOR_CORES
#endif
#include "../backend.h"

#ifndef WARPS
#define WARPS 8 // of the blocks of matvec and attention: at least 8, a thread for each number of a head
#endif

enum {
    CHUNK = 512,     // most tokens of one call
    HEAD_MAX = 256,  // widest attention head
    TILE = 64,       // rows, and tokens, of a tile of a matrix product in float32
};

#define ALL_LANES 0xffffffffu

// Whether one token goes through the model in one kernel, where the GPU and the model allow it; else op by op.
#ifndef FUSED
#define FUSED 1
#endif

// Shared memory whose size the launch gives.
#ifndef LAUNCH_SHARED
#define LAUNCH_SHARED(name) \
    extern __shared__ __align__(128) float4 name##_[]; \
    float *name = (float *)name##_
#endif

// What differs between two calls of forward with equally many tokens.
typedef struct {
    int pos;           // of the first token
    int tokens[CHUNK]; // (T,)
} Input;

// ----------------------------------------------------------------------------
// Between kernels and threads

static __device__ float warp_sum(float x) {
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(ALL_LANES, x, i, 32);
    return x;
}

static __device__ float warp_max(float x) {
    for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, i, 32));
    return x;
}

// Whether this block is the last of n that get here, after their writes. Leaves the counter at zero. All threads of the
// block have to call it.
static __device__ bool is_last(unsigned *counter, unsigned n) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) { // its fences count for all of the block
        __threadfence();
        last = atomicAdd(counter, 1u) == n - 1;
        __threadfence();
        if (last) *counter = 0;
    }
    __syncthreads();
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
    for (int i = 0; i < 4; i++) out[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - (8388608.0f + zero);
}

// A Unit is what one 16-byte load brings: N numbers of a row, in units of `scale`.
template <Type type> struct Format;

struct Plain { // numbers without a scale
    struct Scale {};
    struct Unit { uint4 bits; };
    static __device__ Scale scale_at(const Mat &, size_t) { return {}; }
    static __device__ Unit unit(const uint4 &bits, Scale) { return {bits}; }
    static __device__ float scale(const Unit &) { return 1; }
};

template <> struct Format<F32> : Plain {
    enum { N = 4 };
    static __device__ void numbers(const Unit &u, float *out) {
        out[0] = __uint_as_float(u.bits.x), out[1] = __uint_as_float(u.bits.y);
        out[2] = __uint_as_float(u.bits.z), out[3] = __uint_as_float(u.bits.w);
    }
};

template <> struct Format<F16> : Plain {
    enum { N = 8 };
    static __device__ void numbers(const Unit &u, float *out) {
        const __half2 *pairs = (const __half2 *)&u.bits;
        for (int i = 0; i < 4; i++) {
            float2 pair = __half22float2(pairs[i]);
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        }
    }
};

template <> struct Format<BF16> : Plain {
    enum { N = 8 };
    static __device__ void numbers(const Unit &u, float *out) {
        const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
        for (int i = 0; i < 4; i++) {
            out[2 * i] = __uint_as_float(words[i] << 16);
            out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
};

struct Blocks { // of 32 numbers, with a scale in half precision
    typedef __half Scale;
    struct Unit {
        uint4 bits;
        __half scale;
    };
    static __device__ Scale scale_at(const Mat &m, size_t at) { return __ldg((const __half *)m.scales + at / 32); }
    static __device__ Unit unit(const uint4 &bits, Scale scale) { return {bits, scale}; }
    static __device__ float scale(const Unit &u) { return __half2float(u.scale); }
};

template <> struct Format<Q8_0> : Blocks {
    enum { N = 16 };
    static __device__ void numbers(const Unit &u, float *out) { // signed bytes
        const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
        for (int i = 0; i < 4; i++) bytes_to_floats(words[i] ^ 0x80808080u, 128, out + 4 * i);
    }
};

template <> struct Format<Q4_0> : Blocks {
    enum { N = 32 };
    static __device__ void numbers(const Unit &u, float *out) {
        const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bytes_to_floats(words[i] & 0x0f0f0f0fu, 8, out + 4 * i);
            bytes_to_floats(words[i] >> 4 & 0x0f0f0f0fu, 8, out + 16 + 4 * i);
        }
    }
};

// A unit of the flattened matrix.
template <Type type> static __device__ typename Format<type>::Unit load_unit(const Mat &m, size_t unit) {
    typedef Format<type> F;
    return F::unit(__ldg((const uint4 *)m.data + unit), F::scale_at(m, unit * F::N));
}

// To half precision. What is finite stays finite; what is not, stays what it is, and is found in the logits.
static __device__ __half to_half(float x) {
    if (fabsf(x) > 65504 && fabsf(x) < INFINITY) x = copysignf(65504, x);
    return __float2half(x);
}

static __device__ __half2 to_halves(float a, float b) { return __halves2half2(to_half(a), to_half(b)); }

// N numbers in units of scale; that they fit is the rule.
template <int N> static __device__ void to_halves(__half2 *to, const float *numbers, float scale) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < N; i++) most = fmaxf(most, fabsf(scale * numbers[i]));
    if (most <= 65504) {
#pragma unroll
        for (int i = 0; i < N; i += 2) to[i / 2] = __floats2half2_rn(scale * numbers[i], scale * numbers[i + 1]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 2) to[i / 2] = to_halves(scale * numbers[i], scale * numbers[i + 1]);
    }
}

// Writes a number that a matrix product will take, and where those do in half precision, a copy for them.
static __device__ void put_x(float *out, __half *copy, size_t at, float y) {
    out[at] = y;
    if (copy) copy[at] = to_half(y);
}

// The same of four numbers; `at` is a multiple of 4.
static __device__ void put_four(float *out, __half *copy, size_t at, const float y[4]) {
    *(float4 *)(out + at) = make_float4(y[0], y[1], y[2], y[3]);
    __align__(8) __half2 pairs[2] = {to_halves(y[0], y[1]), to_halves(y[2], y[3])};
    if (copy) *(float2 *)(copy + at) = *(float2 *)pairs;
}

static __device__ float swiglu(float gate, float x) { return gate / (1 + expf(-gate)) * x; }

// ----------------------------------------------------------------------------
// Matrix products. Those of one dispatch have the same x (T, cols) and type.

typedef struct {
    float *out;
    Mat w;
    bool add;
} Part;
typedef struct {
    Part part[3];
    int n;
} Parts;

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
static __host__ __device__ unsigned padded(unsigned i) { return i + i / 32 * 4; }

enum { ROWS = 2, UNROLL = 2 };

// Adds to each row's sum the product of its unit with the N numbers at xs, between which there is no room.
template <Type type>
static __device__ void multiply_units(const typename Format<type>::Unit units[ROWS], const float *xs, float sum[ROWS]) {
    const int N = Format<type>::N;
    float x[N], w[N];
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        float4 four = *(const float4 *)(xs + j);
        x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float dot = 0;
        Format<type>::numbers(units[r], w);
#pragma unroll
        for (int j = 0; j < N; j++) dot += w[j] * x[j];
        sum[r] += Format<type>::scale(units[r]) * dot;
    }
}

// Units u of ROWS rows, from `unit` on, 32 apart.
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
                if (i < cols) units[u][r] = load_unit<type>(w, ((size_t)row * cols + i) / N);
            }
    }

    __device__ void multiply(const float *xs, int cols, int unit, float sum[ROWS]) const {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int i = (unit + 32 * u) * Format<type>::N;
            if (i < cols) multiply_units<type>(units[u], xs + padded(i), sum);
        }
    }
};

// For one token: each warp takes ROWS rows at a time, and the grid goes round until all are done. Weights are on their
// way before x is known, and the next batch before this one is multiplied. cols is a multiple of 32.
template <Type type>
static __global__ void __launch_bounds__(32 * WARPS) matvec(const __grid_constant__ Parts parts, const float *x, int cols) {
    LAUNCH_SHARED(xs); // x (cols,), padded
    const int step = 32 * UNROLL;
    int lane = threadIdx.x % 32, group = blockIdx.x * WARPS + threadIdx.x / 32, unit = lane;
    Place at = find(parts, group, ROWS);
    Batch<type> now, next;
    now.load(parts, at, cols, unit);
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
static __global__ void __launch_bounds__(256) matmul_tiles(const __grid_constant__ Parts parts, const float *x, int cols, int T) {
    const int N = Format<type>::N, K = 32;
    __shared__ __align__(16) float ws[K][TILE + 4], xs[K][TILE + 4];
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
                typename Format<type>::Unit unit = load_unit<type>(p.w, ((size_t)(at.row + r) * cols + k + u) / N);
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

// x (n,) in half precision.
static __global__ void convert(__half *out, const float *x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = to_half(x[i]);
}

#ifdef TENSOR_CORES

#ifndef STEP
#define STEP 64 // columns that a tile advances by: a multiple of 64
#endif
#ifndef STAGES
#define STAGES 3 // steps whose x is in shared memory or on the way to it, where there is room; at least 2
#endif
#ifndef SHARERS
#define SHARERS 3 // blocks that may share a tile of 128 rows; else tiles have 64
#endif
#ifndef AHEAD
#define AHEAD 4 // steps after which weights are needed that are sent for
#endif

enum {
    TEAM_SIZE = 256, // threads of a block
    SIDE = 64,       // rows, and tokens, of a warp
    ROOM = STEP + 8, // halves between a tile's rows in shared memory: 16 bytes more than needed, against bank conflicts
};

// A 128-byte line that is needed later comes to the L2 cache.
static __device__ void bring_line(const void *line) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#else
    (void)line;
#endif
}

// The numbers of a unit in half precision, 8 in each uint4.
template <Type type> static __device__ void unit_to_halves(const typename Format<type>::Unit &u, uint4 *out) {
    const int N = Format<type>::N;
    float numbers[N];
    Format<type>::numbers(u, numbers);
    to_halves<N>((__half2 *)out, numbers, Format<type>::scale(u));
}

template <> __device__ void unit_to_halves<F16>(const Format<F16>::Unit &u, uint4 *out) { *out = u.bits; }

template <> __device__ void unit_to_halves<BF16>(const Format<BF16>::Unit &u, uint4 *out) {
    float numbers[8];
    Format<BF16>::numbers(u, numbers);
    if ((u.bits.x | u.bits.y | u.bits.z | u.bits.w) & 0x40004000u) return to_halves<8>((__half2 *)out, numbers, 1); // 2 or more
#pragma unroll
    for (int i = 0; i < 4; i++) ((__half2 *)out)[i] = __floats2half2_rn(numbers[2 * i], numbers[2 * i + 1]);
}

// Two bytes of a word, less `zero`, times the scale. A byte under the exponent of 1024 is that number plus the byte.
static __device__ __half2 bytes_to_halves(uint32_t word, uint32_t which, float zero, __half2 scale) {
    uint32_t bits = __byte_perm(word, 0x64646464u, which);
    __half2 shift = __floats2half2_rn(-1024 - zero, -1024 - zero);
    return __hmul2(__hadd2(*(__half2 *)&bits, shift), scale);
}

// Exact but for the last rounding, as by way of float. Scales whose products might be out of range go that way.
static __device__ bool is_small(__half scale) { return fabsf(__half2float(scale)) <= 500; }

template <> __device__ void unit_to_halves<Q8_0>(const Format<Q8_0>::Unit &u, uint4 *out) {
    const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
    __half2 *pairs = (__half2 *)out, scale = __halves2half2(u.scale, u.scale);
    if (is_small(u.scale)) {
#pragma unroll
        for (int i = 0; i < 8; i++) pairs[i] = bytes_to_halves(words[i / 2] ^ 0x80808080u, i % 2 ? 0x4342 : 0x4140, 128, scale);
    } else {
        float numbers[16];
        Format<Q8_0>::numbers(u, numbers);
        to_halves<16>(pairs, numbers, Format<Q8_0>::scale(u));
    }
}

template <> __device__ void unit_to_halves<Q4_0>(const Format<Q4_0>::Unit &u, uint4 *out) {
    const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
    __half2 *pairs = (__half2 *)out, scale = __halves2half2(u.scale, u.scale);
    if (is_small(u.scale)) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            pairs[i] = bytes_to_halves(words[i / 2] & 0x0f0f0f0fu, i % 2 ? 0x4342 : 0x4140, 8, scale);
            pairs[8 + i] = bytes_to_halves(words[i / 2] >> 4 & 0x0f0f0f0fu, i % 2 ? 0x4342 : 0x4140, 8, scale);
        }
    } else {
        float numbers[32];
        Format<Q4_0>::numbers(u, numbers);
        to_halves<32>(pairs, numbers, Format<Q4_0>::scale(u));
    }
}

// What the blocks of a launch do: the tiles' steps, in a row, are shared out evenly. Tiles follow each other by tokens,
// then by rows, so that blocks that run together read the same weights.
typedef struct {
    int cols, T, tokens, steps, tiles; // tokens: tiles of them
    int stages;                        // of x in shared memory: all but one are under way
    bool gated;                        // of two parts, the product becomes SwiGLU's h in the first's `out` and in `copy`
    __half *copy;                      // NULL where nobody takes it
    float *pieces;                     // two of a tile's size for each block
    unsigned *counters;                // one for each block
} Plan;

// Where a tile of R rows has them from: the upper half follows the lower, or where they are gated, has the same rows of
// the second part.
struct Source {
    Mat lower, upper; // copies, since registers hold them
    int part, row, row_up;

    template <int R> static __device__ Source find(const Parts &parts, const Plan &p, int tile) {
        Place at = ::find(parts, tile / p.tokens, p.gated ? R / 2 : R);
        const Mat &w = parts.part[at.part].w;
        if (p.gated) return {w, parts.part[1].w, 0, at.row, at.row};
        return {w, w, at.part, at.row, at.row + R / 2};
    }

    // Row r of the tile's R; beyond the last, that. Sets the matrix.
    template <int R> __device__ size_t row_of(int r, Mat *m) const {
        *m = lower;
        if (r < R / 2) return min(row + r, lower.rows - 1);
        m->data = upper.data, m->scales = upper.scales;
        return min(row_up + r - R / 2, lower.rows - 1);
    }
};

// What a thread brings of the R rows of a tile's next step, by way of registers: units 256 apart, of STEP columns each row.
template <Type type, int R> struct Stage {
    static const int N = Format<type>::N, ROW = STEP / N, ALL = R * ROW, UNITS = (ALL + TEAM_SIZE - 1) / TEAM_SIZE;
    typename Format<type>::Unit units[UNITS];

    static __device__ int row_of(int j) { return (threadIdx.x + j * TEAM_SIZE) / ROW; }
    static __device__ int col_of() { return threadIdx.x % ROW * N; }
    static __device__ bool has(int j) { return ALL % TEAM_SIZE == 0 || threadIdx.x + j * TEAM_SIZE < ALL; }

    // From column k on; what is beyond the columns is zero, and rows beyond the last are the last.
    __device__ void load(int j, const Source &source, int cols, int k) {
        if (!has(j)) return;
        Mat m;
        size_t at = source.row_of<R>(row_of(j), &m);
        if (k + col_of() < cols) units[j] = load_unit<type>(m, (at * cols + k + col_of()) / N);
        else memset(&units[j], 0, sizeof units[j]);
    }

    __device__ void store(int j, __half *ws) const {
        uint4 halves[N / 8];
        if (!has(j)) return;
        unit_to_halves<type>(units[j], halves);
        uint4 *to = (uint4 *)(ws + row_of(j) * ROOM + col_of());
#pragma unroll
        for (int i = 0; i < N / 8; i++) to[i] = halves[i];
    }
};

// Sends for x of one step: TOKENS of the tokens, from t0 on, of STEP columns, from k on, with the same rule.
template <int TOKENS> static __device__ void send_for_x(__half *xs, const __half *x, int t0, int T, int cols, int k) {
    const int ROW = STEP / 8;
#pragma unroll
    for (int j = 0; j < TOKENS * ROW / TEAM_SIZE; j++) {
        int i = threadIdx.x + j * TEAM_SIZE, col = k + i % ROW * 8;
        const __half *from = x + (size_t)min(t0 + i / ROW, T - 1) * cols + (col < cols ? col : 0);
        __pipeline_memcpy_async(xs + i / ROW * ROOM + i % ROW * 8, from, 16, col < cols ? 0 : 16);
    }
}

// A warp's sums: 64 rows and 64 tokens. The warps of a tile are groups of as many as it takes, which share the columns.
typedef nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> Sums;

template <int R, int TOKENS> struct Team {
    static const int GROUPS = TEAM_SIZE / 32 * SIDE * SIDE / (R * TOKENS),
                     WIDE = R + 4; // numbers between the tokens of a tile of sums in shared memory
    static __device__ int row() { return threadIdx.x / 32 % (R / SIDE) * SIDE; }
    static __device__ int token() { return threadIdx.x / 32 / (R / SIDE) % (TOKENS / SIDE) * SIDE; }
    static __device__ int group() { return threadIdx.x / (TEAM_SIZE / GROUPS); }

    // The product of 16 columns.
    static __device__ void multiply(Sums sums[4][4], const __half *ws, const __half *xs) {
        using namespace nvcuda::wmma;
        fragment<matrix_a, 16, 16, 16, __half, row_major> a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) load_matrix_sync(a[i], ws + (row() + 16 * i) * ROOM, ROOM);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            fragment<matrix_b, 16, 16, 16, __half, col_major> b;
            load_matrix_sync(b, xs + (token() + 16 * j) * ROOM, ROOM);
#pragma unroll
            for (int i = 0; i < 4; i++) mma_sync(sums[i][j], a[i], b, sums[i][j]);
        }
    }

    // Adds up the sums of all groups, one after another, in tile (TOKENS, R).
    static __device__ void add_groups(Sums sums[4][4], float *tile) {
        using namespace nvcuda::wmma;
        for (int turn = 0; turn < GROUPS; turn++) {
            if (group() == turn) {
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    float *at = tile + (token() + i / 4 * 16) * WIDE + row() + i % 4 * 16;
                    Sums &mine = sums[i % 4][i / 4];
                    if (turn > 0) {
                        Sums other;
                        load_matrix_sync(other, at, WIDE, mem_col_major);
                        for (int e = 0; e < other.num_elements; e++) mine.x[e] += other.x[e];
                    }
                    store_matrix_sync(at, mine, WIDE, mem_col_major);
                }
            }
            __syncthreads();
        }
    }
};

static __device__ int first_of(const Plan &p, int block) { return (int)((long long)p.tiles * p.steps * block / gridDim.x); }
static __device__ int block_of(const Plan &p, int step) { // whose step it is
    return (int)((((long long)step + 1) * gridDim.x - 1) / ((long long)p.tiles * p.steps));
}

// What brings the lines of a tile's weights to the cache, AHEAD steps before they are needed: threads 0..R-1 a row's numbers,
// the next R its scales.
template <Type type, int R> struct Scout {
    const char *from; // NULL for threads that bring nothing
    size_t step;      // bytes between steps

    __device__ Scout(const Source &source, int cols) {
        const int N = Format<type>::N, part = threadIdx.x / R;
        Mat m;
        size_t at = source.row_of<R>(threadIdx.x % R, &m) * cols;
        from = part == 0 ? (const char *)m.data + at / N * sizeof(uint4) : NULL, step = STEP / N * sizeof(uint4);
        if (part == 1 && m.scales) from = (const char *)m.scales + at / 32 * sizeof(__half), step = STEP / 32 * sizeof(__half);
    }
    __device__ void bring(int s, int end) const {
        if (from && s < end) bring_line(from + s * step);
    }
};

// The first weights of a block that begins at this step.
template <Type type, int R> static __device__ void bring_first(const Parts &parts, const Plan &p, int step) {
    Scout<type, R> scout(Source::find<R>(parts, p, step / p.steps), p.cols);
    for (int s = step % p.steps; s < step % p.steps + AHEAD; s++) scout.bring(s, p.steps);
}

// A tile's steps first..end-1, into sums. Weights are in registers a step before the one in which they become halves in
// shared memory, for the step after that.
template <Type type, int R, int TOKENS>
static __device__ void multiply_steps(Sums sums[4][4], const Source &source, int t0, const __half *x, const Plan &p, int first,
                                      int end, __half *ws, __half *xs) {
    typedef Team<R, TOKENS> Warps;
    typedef Stage<type, R> Weights;
    const int SLICES = STEP / 16 / Warps::GROUPS, W = R * ROOM, X = TOKENS * ROOM;
    bool needed = t0 + Warps::token() < p.T;
    Scout<type, R> scout(source, p.cols);
    Weights stage;
#pragma unroll
    for (int j = 0; j < Weights::UNITS; j++) stage.load(j, source, p.cols, first * STEP);
    for (int s = first + 1; s < first + AHEAD; s++) scout.bring(s, end);
    for (int i = 0; i < p.stages - 1; i++) {
        if (first + i < end) send_for_x<TOKENS>(xs + i * X, x, t0, p.T, p.cols, (first + i) * STEP);
        __pipeline_commit();
    }
#pragma unroll
    for (int i = 0; i < 16; i++) nvcuda::wmma::fill_fragment(sums[i / 4][i % 4], 0.0f);
#pragma unroll
    for (int j = 0; j < Weights::UNITS; j++) {
        stage.store(j, ws);
        if (first + 1 < end) stage.load(j, source, p.cols, (first + 1) * STEP);
    }
    int now = 0, next = p.stages - 1; // of x, what is multiplied and what is sent for
    for (int s = first; s < end; s++) {
        __pipeline_wait_prior(p.stages - 2);
        __syncthreads(); // all see this step's weights and x, and are done with the step before
        if (s + p.stages - 1 < end) send_for_x<TOKENS>(xs + next * X, x, t0, p.T, p.cols, (s + p.stages - 1) * STEP);
        __pipeline_commit();
        scout.bring(s + AHEAD, end);
        const __half *w_now = ws + (s - first) % 2 * W, *x_now = xs + now * X;
        __half *w_next = ws + (s + 1 - first) % 2 * W;
        auto renew = [&](int i) { // a slice's share of the weights
#pragma unroll
            for (int j = i; j < Weights::UNITS; j += SLICES) {
                if (s + 1 < end) stage.store(j, w_next);
                if (s + 2 < end) stage.load(j, source, p.cols, (s + 2) * STEP);
            }
        };
#pragma unroll
        for (int i = 0; i < SLICES; i++) {
            int k = (i * Warps::GROUPS + Warps::group()) * 16;
            if (threadIdx.x < TEAM_SIZE / 2) renew(i); // while the other half of the warps have the tensor cores
            if (needed) Warps::multiply(sums, w_now + k, x_now + k);
            if (threadIdx.x >= TEAM_SIZE / 2) renew(i);
        }
        now = now + 1 < p.stages ? now + 1 : 0, next = next + 1 < p.stages ? next + 1 : 0;
    }
    __syncthreads(); // the room is free
}

// The sums of one of PARTS parts of a tile that this thread has at the end: of 4 rows, EACH times.
template <int R, int TOKENS> struct Fours {
    static const int ALL = TOKENS * R / 4 / TEAM_SIZE, EACH = ALL < 16 ? ALL : 16, PARTS = ALL / EACH;
    float4 y[EACH];
    int first;

    __device__ Fours(int part) : first(threadIdx.x + part * EACH * TEAM_SIZE) {}
    __device__ int place(int j) const { return first + j * TEAM_SIZE; }
    __device__ int token(int j) const { return place(j) / (R / 4); }
    __device__ int first_row(int j) const { return place(j) % (R / 4) * 4; }

    __device__ void read(const float *tile) {
#pragma unroll
        for (int j = 0; j < EACH; j++) y[j] = *(const float4 *)(tile + token(j) * Team<R, TOKENS>::WIDE + first_row(j));
    }
    __device__ void leave(float4 *piece) const {
#pragma unroll
        for (int j = 0; j < EACH; j++) piece[place(j)] = y[j];
    }
    __device__ void clear() {
#pragma unroll
        for (int j = 0; j < EACH; j++) y[j] = make_float4(0, 0, 0, 0);
    }
    __device__ void add(const float4 other[EACH]) {
#pragma unroll
        for (int j = 0; j < EACH; j++) y[j].x += other[j].x, y[j].y += other[j].y, y[j].z += other[j].z, y[j].w += other[j].w;
    }
    __device__ void add_piece(const float4 *piece) {
        float4 other[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) other[j] = piece[place(j)];
        add(other);
    }

    // Rows from `row` on, of tokens from t0 on; what they are added to is read together.
    __device__ void put(const Part &p, int row, int t0, int T) {
        const int rows = p.w.rows;
        float *out = p.out + (size_t)t0 * rows + row;
        if (rows % 4) return put_each(p, row, t0, T);
        float4 before[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            bool there = p.add && t0 + token(j) < T && row + first_row(j) < rows;
            before[j] = there ? *(const float4 *)(out + (size_t)token(j) * rows + first_row(j)) : make_float4(0, 0, 0, 0);
        }
        add(before);
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (t0 + token(j) < T && row + first_row(j) < rows) *(float4 *)(out + (size_t)token(j) * rows + first_row(j)) = y[j];
    }

    // Those of the tile's lower half become SwiGLU's, with the upper half as what the gate lets through.
    __device__ void put_gated(const Part &p, int row, int t0, const Plan &plan) const {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            float four[4] = {y[j].x, y[j].y, y[j].z, y[j].w};
            int t = t0 + token(j), r = row + first_row(j);
            size_t at = (size_t)t * p.w.rows + r;
#pragma unroll
            for (int i = 0; i < 4; i++) // the other is R / 2 rows further on
                four[i] = swiglu(four[i], __shfl_xor_sync(ALL_LANES, four[i], R / 8, 32));
            if (first_row(j) >= R / 2 || t >= plan.T || r >= p.w.rows) continue;
            if (p.w.rows % 4 == 0) put_four(p.out, plan.copy, at, four);
            else
                for (int i = 0; i < 4 && r + i < p.w.rows; i++) put_x(p.out, plan.copy, at + i, four[i]);
        }
    }

    // The same as put, where four rows are not aligned.
    __device__ void put_each(const Part &p, int row, int t0, int T) const {
        for (int j = 0; j < EACH; j++) {
            const float four[4] = {y[j].x, y[j].y, y[j].z, y[j].w};
            int t = t0 + token(j), r = row + first_row(j);
            for (int i = 0; i < 4 && t < T && r + i < p.w.rows; i++) ::put(p.out + (size_t)t * p.w.rows + r + i, four[i], p.add);
        }
    }
};

// Where block `b` leaves its sums of a tile, of which it has the first step or not: it shares two tiles at most.
template <int SIZE> static __device__ float4 *piece_of(const Plan &p, int b, bool has_first) {
    return (float4 *)(p.pieces + (2 * (size_t)b + has_first) * SIZE);
}

// Whether this block is the last of a tile's to be ready; it has left its sums for that one.
template <int R, int TOKENS>
static __device__ bool is_last_of_tile(const float *tile, const Plan &p, bool has_first, int from, int to) {
    typedef Fours<R, TOKENS> Part;
    for (int i = 0; i < Part::PARTS; i++) {
        Part y(i);
        y.read(tile);
        y.leave(piece_of<R * TOKENS>(p, blockIdx.x, has_first));
    }
    return is_last(&p.counters[from], to - from + 1);
}

// For many tokens, on the tensor cores: tiles of R rows and TOKENS tokens. Of the blocks that share a tile, the last to be
// ready adds up what they left, in the columns' order. cols is a multiple of 32.
template <Type type, int R, int TOKENS>
static __global__ void __launch_bounds__(TEAM_SIZE, 1)
    matmul_tensor(const __grid_constant__ Parts parts, const __half *x, const __grid_constant__ Plan p) {
    LAUNCH_SHARED(room);
    __half *ws = (__half *)room, *xs = ws + 2 * R * ROOM; // weights of two steps, then p.stages of x; in the end the sums
    int step = first_of(p, blockIdx.x), end = first_of(p, blockIdx.x + 1);
    bring_first<type, R>(parts, p, step);
    for (int n; step < end; step += n) {
        int tile = step / p.steps, first = step % p.steps, t0 = tile % p.tokens * TOKENS;
        n = min(p.steps - first, end - step);
        Source source = Source::find<R>(parts, p, tile);
        Sums sums[4][4];
        multiply_steps<type, R, TOKENS>(sums, source, t0, x, p, first, first + n, ws, xs);
        Team<R, TOKENS>::add_groups(sums, room);
        int from = block_of(p, tile * p.steps), to = block_of(p, (tile + 1) * p.steps - 1);
        if (from < to && !is_last_of_tile<R, TOKENS>(room, p, first == 0, from, to)) continue;
        for (int i = 0; i < Fours<R, TOKENS>::PARTS; i++) {
            Fours<R, TOKENS> y(i);
            if (from == to) y.read(room);
            else y.clear();
            for (int b = from; from < to && b <= to; b++) y.add_piece(piece_of<R * TOKENS>(p, b, b == from));
            if (p.gated) y.put_gated(parts.part[0], source.row, t0, p);
            else y.put(parts.part[source.part], source.row, t0, p.T);
        }
        __syncthreads(); // all have read their sums
    }
}
#endif

// ----------------------------------------------------------------------------
// Attention

// What a warp has seen of some positions: with weights exp(score - max), their sum and the weighted sum of the values,
// of which a lane has the dimensions 64 i + 2 lane and the next, as out[2 i] and out[2 i + 1].
template <int D> struct Seen { float max, sum, out[2 * D]; };

static __device__ float2 to_floats(float2 pair) { return pair; }
static __device__ float2 to_floats(__half2 pair) { return __half22float2(pair); }
static __device__ void put_pair(float *p, float a, float b) { *(float2 *)p = make_float2(a, b); }
static __device__ void put_pair(__half *p, float a, float b) { *(__half2 *)p = to_halves(a, b); }
static __device__ void put_number(float *p, float a) { *p = a; }
static __device__ void put_number(__half *p, float a) { *p = to_half(a); }

template <typename Number> struct FormatOf;
template <> struct FormatOf<float> : Format<F32> { typedef float2 Pair; };
template <> struct FormatOf<__half> : Format<F16> { typedef __half2 Pair; };

// Attention of q (width,) over the tiles first, first + stride, ... of 32 positions before n; keys and values
// (positions, width). In one pass: what was summed is scaled down whenever a larger score comes (Milakov 2018).
template <typename Number, int D>
static __device__ Seen<D> attend(const float *q, const Number *keys, const Number *values, int width, int n, int first, int stride,
                                 float scale) {
    typedef FormatOf<Number> F;
    const int N = F::N, BATCH = 8, VALUES = 64 / sizeof(Number), lane = threadIdx.x % 32; // so many loads are under way together
    Seen<D> s = {-INFINITY, 0, {0}};
    for (int p = 32 * first; p < n; p += 32 * stride) {
        float score = -INFINITY;
        typename F::Pair pairs[VALUES];
        auto load_values = [&](int i,
                               int j) { // this lane's dimensions of positions p + j and on; what lies past n has the weight 0
            int d = 64 * i + 2 * lane < width ? 64 * i + 2 * lane : 0;
#pragma unroll
            for (int b = 0; b < VALUES; b++)
                pairs[b] = *(const typename F::Pair *)(values + (size_t)min(p + j + b, n - 1) * width + d);
        };
        load_values(0, 0); // the first are on their way before their weights are known
        if (p + lane < n) {
            const uint4 *key = (const uint4 *)(keys + (size_t)(p + lane) * width);
            score = 0;
            for (int u = 0; u < width / N; u += BATCH) {
                typename F::Unit units[BATCH];
#pragma unroll
                for (int b = 0; b < BATCH; b++) units[b] = {key[u + b < width / N ? u + b : 0]};
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    if (u + b >= width / N) break;
                    float k[N];
                    F::numbers(units[b], k);
                    for (int i = 0; i < N; i++) score += k[i] * q[N * (u + b) + i];
                }
            }
            score *= scale;
        }
        float max = fmaxf(s.max, warp_max(score)), shrink = expf(s.max - max), weight = expf(score - max);
        s.max = max;
        s.sum = s.sum * shrink + warp_sum(weight);
        for (int i = 0; i < 2 * D; i++) s.out[i] *= shrink;
        for (int j = 0; j < 32 && p + j < n; j += VALUES) {
#pragma unroll
            for (int i = 0; i < D; i++) {
                if (64 * i >= width) break;
                if (i || j) load_values(i, j);
#pragma unroll
                for (int b = 0; b < VALUES; b++) {
                    float w = __shfl_sync(ALL_LANES, weight, j + b, 32);
                    float2 pair = to_floats(pairs[b]);
                    s.out[2 * i] += w * pair.x;
                    s.out[2 * i + 1] += w * pair.y;
                }
            }
        }
    }
    return s;
}

typedef struct {
    void *keys, *values; // (n_kv_heads, positions, width) of one layer
    int positions, width, n_heads, n_kv_heads, head_dim;
    bool halves; // RoPE's pairs in a head are (i, i + head_dim / 2); else (2i, 2i + 1)
    const Input *input;
} Cache;

// Of many tokens: a block takes 8 tokens of one head, a warp each, so that they share what they read.
// out, q (T, n_heads, head_dim); the grid is (n_heads, groups of 8 tokens).
template <typename Number, int D> static __global__ void attention_many(Cache c, float *out, __half *copy, const float *q, int T) {
    __shared__ float queries[WARPS][HEAD_MAX];
    int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = blockIdx.y * WARPS + warp;
    if (t >= T) return;
    size_t at = ((size_t)t * c.n_heads + h) * c.head_dim;
    size_t head = (size_t)(h / (c.n_heads / c.n_kv_heads)) * c.positions * c.width;
    for (int i = lane; i < c.width; i += 32) queries[warp][i] = i < c.head_dim ? q[at + i] : 0;
    __syncwarp();
    Seen<D> s = attend<Number, D>(queries[warp], (Number *)c.keys + head, (Number *)c.values + head, c.width, c.input->pos + t + 1,
                                  0, 1, 1 / sqrtf(c.head_dim));
    for (int i = 0; i < 2 * D; i++) {
        int d = 64 * (i / 2) + 2 * lane + i % 2;
        if (d < c.head_dim) put_x(out, copy, at + d, s.out[i] / s.sum);
    }
}

#ifdef TENSOR_CORES

// The same on the tensor cores, for a cache in half precision: a warp has 16 queries of one head, and the block's warps share
// tiles of KEYS positions. D is head_dim or more.
template <int D> struct Flash {
    enum { WARPS_HERE = D > 128 ? 2 : 4, QUERIES = 16 * WARPS_HERE, KEYS = D > 128 ? 16 : D > 64 ? 32 : 64, SPLIT = KEYS / 2 };
    enum { WIDE = D + 8, SCORES = KEYS + 4 }; // numbers between rows in shared memory, against bank conflicts
    typedef nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, __half, nvcuda::wmma::row_major> Rows;

    // Sends for the keys, or values, of positions first..first+KEYS-1; zeros from `end` on.
    static __device__ void send_for(__half *to, const __half *from, int width, int first, int end) {
#pragma unroll
        for (int j = 0; j < KEYS * D / 8 / (32 * WARPS_HERE); j++) {
            int i = threadIdx.x + j * 32 * WARPS_HERE, row = i / (D / 8), d = i % (D / 8) * 8;
            bool there = first + row < end && d < width;
            __pipeline_memcpy_async(to + row * WIDE + d, there ? from + (size_t)(first + row) * width + d : from, 16,
                                    there ? 0 : 16);
        }
        __pipeline_commit();
    }

    // The block's queries, from token t0 on.
    static __device__ void load_queries(__half *qs, const float *q, const Cache &c, int h, int t0, int T) {
#pragma unroll 16
        for (int i = threadIdx.x; i < QUERIES * D / 2; i += 32 * WARPS_HERE) {
            int t = t0 + i / (D / 2), d = i % (D / 2) * 2;
            bool there = t < T && d < c.head_dim;
            float2 pair = there ? *(const float2 *)(q + ((size_t)t * c.n_heads + h) * c.head_dim + d) : make_float2(0, 0);
            *(__half2 *)(qs + i / (D / 2) * WIDE + d) = to_halves(pair.x, pair.y);
        }
    }

    // This warp's scores (16, KEYS).
    static __device__ void score(float *scores, const __half *qs, const __half *ks) {
        using namespace nvcuda::wmma;
        Sums sums[KEYS / 16];
        for (int j = 0; j < KEYS / 16; j++) fill_fragment(sums[j], 0.0f);
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            Rows a;
            load_matrix_sync(a, qs + d, WIDE);
#pragma unroll
            for (int j = 0; j < KEYS / 16; j++) {
                fragment<matrix_b, 16, 16, 16, __half, col_major> b;
                load_matrix_sync(b, ks + 16 * j * WIDE + d, WIDE);
                mma_sync(sums[j], a, b, sums[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) store_matrix_sync(scores + 16 * j, sums[j], SCORES, mem_row_major);
        __syncwarp();
    }

    // Scores of the first n positions become weights 2^(scale score - max), in half precision at the same place; others 0. A
    // lane has every other pair of a row, whose other lane is the next. Returns what is left of weights by the max before.
    static __device__ float weigh(float *scores, float scale, int n, float &max, float &sum) {
        int row = threadIdx.x % 32 / 2, begin = threadIdx.x % 2 * 2;
        float2 pairs[SPLIT / 2];
        float most = max;
#pragma unroll
        for (int i = 0; i < SPLIT / 2; i++) {
            int at = begin + 4 * i;
            pairs[i] = *(const float2 *)(scores + row * SCORES + at);
            pairs[i].x = at < n ? scale * pairs[i].x : -INFINITY, pairs[i].y = at + 1 < n ? scale * pairs[i].y : -INFINITY;
            most = fmaxf(most, fmaxf(pairs[i].x, pairs[i].y));
        }
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1, 32));
        float shrink = exp2f(max - most);
        max = most, sum *= shrink;
        __syncwarp(); // both lanes have read the row
#pragma unroll
        for (int i = 0; i < SPLIT / 2; i++) {
            __half2 weights = __floats2half2_rn(exp2f(pairs[i].x - most), exp2f(pairs[i].y - most));
            float2 rounded = __half22float2(weights);
            sum += rounded.x + rounded.y;
            *(__half2 *)((__half *)(scores + row * SCORES) + begin + 4 * i) = weights;
        }
        return shrink;
    }

    // Adds the weighted values to what is left of the sums (16, D); shrink (16,).
    static __device__ void add_values(Sums sums[D / 16], const float *scores, const float *shrink, const __half *vs) {
        using namespace nvcuda::wmma;
        Sums factors; // of each row in all of its columns
        load_matrix_sync(factors, shrink, 0, mem_col_major);
#pragma unroll
        for (int d = 0; d < D / 16; d++)
            for (int e = 0; e < factors.num_elements; e++) sums[d].x[e] *= factors.x[e];
#pragma unroll
        for (int k = 0; k < KEYS; k += 16) {
            Rows a;
            load_matrix_sync(a, (const __half *)scores + k, 2 * SCORES);
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                fragment<matrix_b, 16, 16, 16, __half, row_major> b;
                load_matrix_sync(b, vs + k * WIDE + 16 * d, WIDE);
                mma_sync(sums[d], a, b, sums[d]);
            }
        }
    }

    // out (T, n_heads, head_dim), from this warp's first token on, by way of `scores`; sum is of the row that weigh gave a lane.
    static __device__ void put(Sums sums[D / 16], float *scores, float sum, float *out, __half *copy, const Cache &c, int h, int t,
                               int T) {
        int row = threadIdx.x % 32 / 2, begin = threadIdx.x % 2 * 8;
        size_t at = ((size_t)(t + row) * c.n_heads + h) * c.head_dim + begin;
#pragma unroll
        for (int i = 0; i < D / 16; i++, at += 16) {
            __syncwarp(); // all have read what lay there
            nvcuda::wmma::store_matrix_sync(scores, sums[i], SCORES, nvcuda::wmma::mem_row_major);
            __syncwarp();
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = scores[row * SCORES + begin + j] / sum;
            int n = t + row < T ? c.head_dim - 16 * i - begin : 0; // of the 8
            if (c.head_dim % 8 == 0 && n > 0) put_four(out, copy, at, y), put_four(out, copy, at + 4, y + 4);
            else
                for (int j = 0; j < 8 && j < n; j++) put_x(out, copy, at + j, y[j]);
        }
    }
};

// The grid is (n_heads, tiles of queries); the last, which see most, come first.
template <int D>
static __global__ void __launch_bounds__(32 * Flash<D>::WARPS_HERE)
    attention_tiles(Cache c, float *out, __half *copy, const float *q, int T) {
    typedef Flash<D> F;
    __shared__ __align__(128) __half qs[F::QUERIES * F::WIDE], ks[F::KEYS * F::WIDE], vs[F::KEYS * F::WIDE];
    __shared__ __align__(128) float all_scores[F::WARPS_HERE][16 * F::SCORES], all_shrinks[F::WARPS_HERE][16];
    int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, pos = c.input->pos;
    int t0 = (gridDim.y - 1 - blockIdx.y) * F::QUERIES, t = t0 + 16 * warp, end = pos + min(t0 + F::QUERIES, T);
    size_t head = (size_t)(h / (c.n_heads / c.n_kv_heads)) * c.positions * c.width;
    const __half *keys = (const __half *)c.keys + head, *values = (const __half *)c.values + head;
    float *scores = all_scores[warp], *shrinks = all_shrinks[warp];
    float max = -INFINITY, sum = 0, scale = 1.442695041f / sqrtf(c.head_dim); // 1 / log(2): exponentials are of 2
    Sums sums[D / 16];
    for (int i = 0; i < D / 16; i++) nvcuda::wmma::fill_fragment(sums[i], 0.0f);
    for (int first = 0; first < end; first += F::KEYS) {
        F::send_for(ks, keys, c.width, first, end);
        F::send_for(vs, values, c.width, first, end);
        if (first == 0) F::load_queries(qs, q, c, h, t0, T);
        __pipeline_wait_prior(1);
        __syncthreads(); // all see the keys
        if (t < T) {
            F::score(scores, qs + 16 * warp * F::WIDE, ks);
            float shrink = F::weigh(scores, scale, pos + t + lane / 2 + 1 - first, max, sum);
            if (lane % 2 == 0) shrinks[lane / 2] = shrink;
        }
        __pipeline_wait_prior(0);
        __syncthreads(); // all see the values
        if (t < T) F::add_values(sums, scores, shrinks, vs);
        __syncthreads(); // all have read both
    }
    sum += __shfl_xor_sync(ALL_LANES, sum, 1, 32);
    if (t < T) F::put(sums, scores, sum, out, copy, c, h, t, T);
}
#endif

// n pieces of one head's attention: max and sum (n,), out (n, HEAD_MAX). Returns those of the whole, dimension d of out.
struct Whole { float max, sum, out; };

static __device__ Whole merge(const float *max, const float *sum, const float *out, int n, int d) {
    Whole w = {-INFINITY, 0, 0};
    for (int i = 0; i < n; i++) w.max = fmaxf(w.max, max[i]);
    for (int i = 0; i < n; i++) {
        float weight = max[i] == -INFINITY ? 0 : expf(max[i] - w.max); // 0 of a piece without positions
        w.sum += weight * sum[i];
        w.out += weight * out[i * HEAD_MAX + d];
    }
    return w;
}

// What a block needs of shared memory to attend.
typedef struct { float query[HEAD_MAX], max[WARPS], sum[WARPS], outs[WARPS * HEAD_MAX]; } Desk;

// Attention of head h before position n by a block, one of `splits` among which the tiles of positions are shared out.
// Returns, to the thread with that number, dimension d of the block's piece. All threads have to call it.
template <typename Number, int D>
static __device__ Whole attend_head(const Cache &c, const float *q, int h, int split, int splits, int n, Desk *desk) {
    int d = threadIdx.x, warp = d / 32, lane = d % 32; // WARPS attend; they are as many threads as a head can be wide
    Whole whole = {};
    size_t head = (size_t)(h / (c.n_heads / c.n_kv_heads)) * c.positions * c.width;
    if (d < c.width) desk->query[d] = d < c.head_dim ? q[h * c.head_dim + d] : 0;
    __syncthreads();
    if (warp < WARPS) {
        Seen<D> s = attend<Number, D>(desk->query, (const Number *)c.keys + head, (const Number *)c.values + head, c.width, n,
                                      split * WARPS + warp, splits * WARPS, 1 / sqrtf(c.head_dim));
        if (lane == 0) desk->max[warp] = s.max, desk->sum[warp] = s.sum;
        for (int i = 0; i < 2 * D; i++) desk->outs[warp * HEAD_MAX + 64 * (i / 2) + 2 * lane + i % 2] = s.out[i];
    }
    __syncthreads();
    if (d < c.head_dim) whole = merge(desk->max, desk->sum, desk->outs, WARPS, d);
    return whole;
}

// The pieces of a head: max and sum (splits,), out (splits, HEAD_MAX).
static __device__ size_t pieces_at(int h, int splits) { return (size_t)h * splits * (2 + HEAD_MAX); }

static __device__ void leave_piece(float *pieces, int h, int split, int splits, int d, const Whole &w) {
    float *max = pieces + pieces_at(h, splits), *sum = max + splits, *out = sum + splits;
    if (d == 0) max[split] = w.max, sum[split] = w.sum;
    out[split * HEAD_MAX + d] = w.out;
}

static __device__ float merge_pieces(const float *pieces, int h, int splits, int d) {
    const float *max = pieces + pieces_at(h, splits);
    Whole w = merge(max, max + splits, max + 2 * splits, splits, d);
    return w.out / w.sum;
}

// Of one token: the last block of a head to be ready merges what all have left. The grid is (n_heads, splits).
template <typename Number, int D>
static __global__ void attention_one(Cache c, float *out, const float *q, float *pieces, unsigned *counters) {
    __shared__ Desk desk;
    int h = blockIdx.x, split = blockIdx.y, splits = gridDim.y, d = threadIdx.x;
    Whole w = attend_head<Number, D>(c, q, h, split, splits, c.input->pos + 1, &desk);
    if (splits > 1) {
        if (d < c.head_dim) leave_piece(pieces, h, split, splits, d, w);
        if (!is_last(&counters[h], splits)) return;
    }
    if (d < c.head_dim) out[h * c.head_dim + d] = splits > 1 ? merge_pieces(pieces, h, splits, d) : w.out / w.sum;
}

// Turns a pair by an angle whose cosine and sine are given.
static __device__ void turn(float &a, float &b, float2 angle) {
    float turned = a * angle.x - b * angle.y;
    b = a * angle.y + b * angle.x;
    a = turned;
}

// Where numbers i and i + 1 of the keys, or values, of position pos lie in the cache.
static __device__ size_t place_in_cache(const Cache &c, int i, int pos) {
    return ((size_t)(i / c.head_dim) * c.positions + pos) * c.width + i % c.head_dim;
}

// What is added to queries, keys and values, and what their norms multiply with; NULL where there is none.
typedef struct { const float *bq, *bk, *bv, *q_norm, *k_norm; } HeadWeights;

// Adds their biases to q (T, n_heads, head_dim), k and v (T, n_kv_heads, head_dim), and normalises each head of q and k. A warp
// takes a head; the grid is (n_heads + 2 n_kv_heads, T).
static __global__ void __launch_bounds__(32) finish_heads(Cache c, HeadWeights w, float *q, float *k, float *v, float norm_eps) {
    int head = blockIdx.x, t = blockIdx.y, lane = threadIdx.x;
    bool is_q = head < c.n_heads, is_k = !is_q && head < c.n_heads + c.n_kv_heads;
    if (!is_q) head -= is_k ? c.n_heads : c.n_heads + c.n_kv_heads;
    float *x = (is_q ? q : is_k ? k : v) + ((size_t)t * (is_q ? c.n_heads : c.n_kv_heads) + head) * c.head_dim, sum = 0;
    const float *bias = is_q ? w.bq : is_k ? w.bk : w.bv, *norm = is_q ? w.q_norm : is_k ? w.k_norm : NULL;
    for (int i = lane; i < c.head_dim; i += 32) {
        if (bias) x[i] += bias[head * c.head_dim + i];
        sum += x[i] * x[i];
    }
    float scale = 1 / sqrtf(warp_sum(sum) / c.head_dim + norm_eps);
    for (int i = lane; norm && i < c.head_dim; i += 32) x[i] *= scale * norm[i];
}

// Rotates the pairs of q (T, n_heads, head_dim) and k (T, n_kv_heads, head_dim) and writes k and v to the cache.
// The grid is (pairs, T); rotation (positions, head_dim / 2) holds cosine and sine.
template <typename Number> static __global__ void rotate(Cache c, float *q, float *k, const float *v, const float2 *rotation) {
    int q_dim = c.n_heads * c.head_dim, kv_dim = c.n_kv_heads * c.head_dim, half = c.head_dim / 2;
    int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x), t = blockIdx.y, pos = c.input->pos + t, apart = 1;
    bool is_q = i < q_dim, is_k = !is_q && i < q_dim + kv_dim;
    if (i >= q_dim + 2 * kv_dim) return;
    if (!is_q) i -= is_k ? q_dim : q_dim + kv_dim;
    int pair = i % c.head_dim / 2;
    if (c.halves && (is_q || is_k)) i -= pair, apart = half; // pair numbers i and i + apart
    const float *from = is_q ? q + (size_t)t * q_dim + i : (is_k ? k : v) + (size_t)t * kv_dim + i;
    float a = from[0], b = from[apart];
    if (is_q || is_k) {
        turn(a, b, rotation[(size_t)pos * half + pair]);
        float *to = is_q ? q + (size_t)t * q_dim + i : k + (size_t)t * kv_dim + i;
        to[0] = a, to[apart] = b;
    }
    if (is_q) return;
    Number *place = (Number *)(is_k ? c.keys : c.values) + place_in_cache(c, i, pos);
    if (apart == 1) put_pair(place, a, b);
    else put_number(place, a), put_number(place + apart, b);
}

// ----------------------------------------------------------------------------
// The small operations

// x (T, dim); a thread computes one number.
static __global__ void embed_rows(float *x, const __grid_constant__ Mat table, const Input *input, int T) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    int dim = table.cols, t = (int)(i / dim);
    if (t < T) x[i] = number_at(table, (size_t)input->tokens[t] * dim + i % dim);
}

// A block for each token.
static __global__ void __launch_bounds__(512)
    normalize(float *out, __half *copy, const float *x, const float *weight, int dim, float eps) {
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
    for (int i = threadIdx.x; i < dim; i += 512) put_x(out, copy, at + i, weight[i] * (scale * x[at + i]));
}

static __global__ void gate(float *h, __half *copy, const float *h2, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) put_x(h, copy, i, swiglu(h[i], h2[i]));
}

// A number and where it stands; -1 where one was met that is not finite.
typedef struct {
    float value;
    int index;
} Largest;

static __device__ Largest larger(Largest a, Largest b) { // the first of equals
    if (a.index < 0 || b.index < 0) return {0, -1};
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

static __device__ Largest finite(float value, int index) { return {value, fabsf(value) < INFINITY ? index : -1}; }

// Of all threads of a block, for thread 0; shared has room for one of each warp.
static __device__ Largest block_largest(Largest mine, Largest *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 16; i > 0; i /= 2)
        mine = larger(mine, {__shfl_xor_sync(ALL_LANES, mine.value, i, 32), __shfl_xor_sync(ALL_LANES, mine.index, i, 32)});
    if (lane == 0) shared[warp] = mine;
    __syncthreads();
    for (int i = 1; i < (int)blockDim.x / 32 && threadIdx.x == 0; i++) mine = larger(mine, shared[i]);
    return mine;
}

// best = index of the largest of x (n,), the first of equals; -1 when any is not finite. One block of 1024 threads.
static __global__ void __launch_bounds__(1024) find_largest(int *best, const float *x, int n) {
    __shared__ Largest shared[32];
    Largest mine = {-INFINITY, n};
    for (int i = threadIdx.x; i < n; i += 1024) mine = larger(mine, finite(x[i], i));
    mine = block_largest(mine, shared);
    if (threadIdx.x == 0) *best = mine.index;
}

// ---- sampling, by one block of 1024 threads

// What a token's probability is proportional to, of a most likely one that has 1; and the same as a whole number, whose
// sums do not depend on their order.
typedef unsigned long long Mass;
enum { DRAWERS = 1024, BINS = 1024, MASS_BITS = 40 };

typedef struct {
    const float *logits;
    int n;
    float most, scale;
} Chances;

static __device__ float chance_of(const Chances &c, float logit) { return expf((logit - c.most) * c.scale); }
static __device__ Mass mass_of(float chance) { return (Mass)(chance * (float)((Mass)1 << MASS_BITS)); }

// Calls use(chance) for all tokens, some of whose logits are under way together.
template <typename F> static __device__ void for_chances(const Chances &c, F use) {
    enum { AT_ONCE = 8 };
    for (int i = threadIdx.x; i < c.n; i += AT_ONCE * DRAWERS) {
        float logits[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) logits[j] = c.logits[min(i + j * DRAWERS, c.n - 1)];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (i + j * DRAWERS < c.n) use(chance_of(c, logits[j]));
    }
}

// Lane i's x becomes the sum of those of lanes 0..i.
static __device__ Mass warp_sum_up_to(Mass x) {
    int lane = threadIdx.x % 32;
    for (int far = 1; far < 32; far *= 2) {
        Mass other = __shfl_sync(ALL_LANES, x, lane >= far ? lane - far : lane, 32);
        x += lane >= far ? other : 0;
    }
    return x;
}

// Thread i's x becomes the sum of those of threads 0..i; shared (DRAWERS / 32,) the sums of warps.
static __device__ Mass sum_up_to(Mass x, Mass *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_sum_up_to(x);
    __syncthreads(); // all have read what lay there
    if (lane == 31) shared[warp] = x;
    __syncthreads();
    for (int i = 0; i < warp; i++) x += shared[i];
    return x;
}

// The least chance of the likeliest tokens that together have more than `target`, as its bits; *above is what those have
// that are likelier still. Tokens with less than `least` are not looked at. It goes by 10 bits of the chance at a time.
static __device__ uint32_t find_chance(const Chances &c, Mass least, Mass target, Mass *above, Mass *shared) {
    __shared__ Mass bins[BINS], passed;
    __shared__ uint32_t found;
    int me = threadIdx.x;
    __syncthreads(); // all have read what a call before has found
    if (me == 0) found = 0, passed = 0;
    for (int shift = 20; shift >= 0; shift -= 10) {
        bins[me] = 0;
        __syncthreads();
        uint32_t prefix = found;
        Mass before = passed;
        for_chances(c, [&](float chance) {
            uint32_t bits = __float_as_uint(chance);
            Mass mass = mass_of(chance);
            if (mass >= least && mass && bits >> shift >> 10 == prefix) atomicAdd(&bins[bits >> shift & (BINS - 1)], mass);
        });
        __syncthreads();
        int bin = BINS - 1 - me; // the likeliest first
        Mass mine = bins[bin], sum = before + sum_up_to(mine, shared);
        if (sum - mine <= target && target < sum) found = prefix << 10 | bin, passed = sum - mine;
        __syncthreads();
    }
    *above = passed;
    return found;
}

// The first token at which the sum over all tokens before and itself exceeds target: of the masses, or where `bits` is
// not 0, of ones for the tokens with this chance. Each warp has a stretch of the tokens.
static __device__ void find_token(const Chances &c, uint32_t bits, Mass target, int *token, Mass *shared) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = (c.n + DRAWERS - 1) / DRAWERS * 32;
    int first = warp * each, end = min(first + each, c.n);
    auto part = [&](int i) {
        float chance = i < end ? chance_of(c, c.logits[i]) : 0;
        return !bits ? mass_of(chance) : (Mass)(__float_as_uint(chance) == bits);
    };
    Mass mine = 0, sum = 0;
    for (int i = first + lane; i < end; i += 32) mine += part(i);
    mine = warp_sum_up_to(mine);
    __syncthreads(); // all have read what lay there
    if (lane == 31) shared[warp] = mine;
    __syncthreads();
    for (int i = 0; i < warp; i++) sum += shared[i];
    if (target < sum || target >= sum + shared[warp]) return;
    for (int i = first; i < end; i += 32) {
        Mass x = part(i + lane), until = sum + warp_sum_up_to(x);
        if (until - x <= target && target < until) *token = i + lane;
        sum = __shfl_sync(ALL_LANES, until, 31, 32);
        if (target < sum) break;
    }
}

// The sampler of run.c: from all tokens, or where topp is in (0, 1), from the fewest whose probability exceeds it. c.most
// is token `best`'s logit. One block of DRAWERS threads.
static __global__ void __launch_bounds__(DRAWERS) draw(int *token, Chances c, int best, float topp, float coin) {
    __shared__ Mass shared[DRAWERS / 32], all;
    c.most = c.logits[best];
    Mass total = 0, above;
    for_chances(c, [&](float chance) { total += mass_of(chance); });
    total = sum_up_to(total, shared);
    if (threadIdx.x == DRAWERS - 1) all = total, *token = best;
    __syncthreads();
    total = all;
    if (!(topp > 0 && topp < 1)) return find_token(c, 0, (Mass)((double)coin * total), token, shared);
    Mass least = c.n > 1 ? (Mass)((1 - (double)topp) / (c.n - 1) * total) : 0, limit = (Mass)((double)topp * total);
    uint32_t bits = find_chance(c, least, limit, &above, shared);
    Mass one = mass_of(__uint_as_float(bits)), set = above + ((limit - above) / one + 1) * one;
    Mass target = (Mass)((double)coin * set);
    bits = find_chance(c, least, target, &above, shared);
    one = mass_of(__uint_as_float(bits));
    find_token(c, bits, (target - above) / one, token, shared);
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

#if FUSED
#include "token.h"
#endif

// ----------------------------------------------------------------------------
// The host's side

typedef struct {
    bool seen;             // the ops were called once already, which also loaded the kernels
    cudaGraphExec_t exec;  // NULL until they are recorded
} Recording;

typedef struct { Mat *place, before; } Moved; // a matrix of the model, and what it was before it went to the device

typedef struct {
    Backend ops;           // first, so that a Backend * is a Cuda *
    Config config;
    cudaStream_t stream;
    int multiprocessors;
    size_t shared_most;    // bytes of shared memory that a block can have
    bool cooperative;      // whether whole_token can run
    bool records;          // the driver lets calls be recorded as graphs
    bool in_pass;          // between begin and end
    Recording recordings[CHUNK + 1][2]; // by T and all
    Recording *recording;  // of this pass, while it is being recorded

    std::vector<void *> *blocks; // the device's memory, to be freed
    std::vector<Moved> *moved;   // the model's weights, to be put back
    Input *input, *input_host;   // on the device, and pinned on the host
    int *best;                   // of the host, pinned: index of the largest logit, -1 if one is not finite; what was drawn
    float *logits;               // (CHUNK or all positions, vocab_size)
    void *pinned;                // the caller's logits, once pinned
    size_t pinned_size;
    const uint4 *weights;        // all of them
    size_t weights_size, numbers_size; // bytes of all, and of all but the scales
    Cache cache;                 // of all layers; its pointers are layer 0's
    bool exact;                  // the cache holds float, else __half
    float2 *rotation;            // (positions, head_dim / 2): cosine and sine
    int splits;                  // blocks that share a head's positions when decoding
    float *y, *q, *k, *v, *h, *h2; // (rows, dim), (rows, q_dim), (rows, kv_dim) twice, (rows, hidden_dim) twice: inside of ops
    __half *x16, *x16_next;      // (CHUNK, dim, q_dim or hidden_dim): x in half precision for products on the tensor cores
    const float *copied;         // in a pass: the x whose copy is in x16, NULL for none
    float *pieces;               // of attention, or of tiles
    unsigned *counters;          // zeros between kernels
    float *out;                  // the host's logits of the last call of forward, or NULL
#if FUSED
    Token token;                 // of one token in one kernel; slots is 0 where there is none
#endif
} Cuda;

static const char *format(llamac_error *e, const char *text, double a, double b, double c, double d) {
    snprintf(e->text, sizeof e->text, text, a, b, c, d);
    return e->text;
}

// An error in the middle of the work comes from a fault of the machine or of this file; there is no going on.
static void check(cudaError_t e, const char *call, int line) {
    if (e == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "run: cuda: %s (cuda.cu:%d: %.60s)\n", cudaGetErrorString(e), line, call);
    _exit(1);
}

#define CUDA(call) check(call, #call, __LINE__)

template <typename T> struct Exactly { typedef T type; };

// Starts a kernel with `shared` bytes of LAUNCH_SHARED memory, and with an attribute or NULL.
template <typename... P>
static cudaError_t start(Cuda *c, cudaLaunchAttribute *attribute, void (*kernel)(P...), dim3 grid, int threads, size_t shared,
                         typename Exactly<P>::type... args) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = c->stream;
    config.attrs = attribute, config.numAttrs = attribute != NULL;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename... P>
static void launch(Cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t shared, typename Exactly<P>::type... args) {
    CUDA(start(c, NULL, kernel, grid, threads, shared, args...));
}

// Lets a kernel have all the shared memory there is. Not what a launch takes: the limit is the process's, and a session on a
// smaller model would lower that of one on a larger.
static void allow_shared(const Cuda *c, const void *kernel) {
    cudaFuncAttributes code;
    CUDA(cudaFuncGetAttributes(&code, kernel));
    CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(c->shared_most - code.sharedSizeBytes)));
}

static unsigned blocks_for(size_t items, size_t per_block) { return (unsigned)((items + per_block - 1) / per_block); }

static void send_input(Cuda *c, const int *tokens, int T, int pos) {
    c->input_host->pos = pos;
    if (tokens) memcpy(c->input_host->tokens, tokens, sizeof(int) * T);
    CUDA(cudaMemcpyAsync(c->input, c->input_host, sizeof(int) * (1 + T), cudaMemcpyHostToDevice, c->stream));
    if (!c->in_pass) CUDA(cudaStreamSynchronize(c->stream)); // before the host's input may change again
}

#if FUSED

typedef void WholeToken(Token, int, int);

// By the type of the layers' matrices and that of the logits; NULL where they don't go together.
static WholeToken *whole_token_of(Type type, Type last) {
    if (type == Q4_0 && last == Q8_0) return whole_token<Q4_0, Q8_0, __half>; // as export.py writes it
    if (type != last) return NULL;
    switch (type) {
    case F32: return whole_token<F32, F32, float>;
    case F16: return whole_token<F16, F16, __half>;
    case BF16: return whole_token<BF16, BF16, __half>;
    case Q8_0: return whole_token<Q8_0, Q8_0, __half>;
    case Q4_0: return whole_token<Q4_0, Q4_0, __half>;
    default: return NULL;
    }
}

static cudaError_t start_token(Cuda *c, int token, int pos) {
    cudaLaunchAttribute together = {}; // all blocks on the GPU at the same time
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    WholeToken *kernel = whole_token_of(c->token.jobs[QKV].w.type, c->token.jobs[LOGITS].w.type);
    return start(c, &together, kernel, c->multiprocessors, 32 * TEAM, shared_of(c->token), c->token, token, pos);
}

static void launch_token(Cuda *c, int token, int pos) {
    CUDA(start_token(c, token, pos));
    if (c->out) CUDA(cudaMemcpyAsync(c->out, c->logits, sizeof(float) * c->config.vocab_size, cudaMemcpyDeviceToHost, c->stream));
}

static bool has_whole_token(const Cuda *c) { return c->token.slots > 0; }

#else
static bool has_whole_token(const Cuda *) { return false; }
static void launch_token(Cuda *, int, int) {}
#endif

// The first call with this T is done op by op. One token then goes in one kernel, where there is one; for others the
// second call is recorded, where the driver allows it, and all that follow are replayed.
static bool begin(Backend *b, const int *tokens, int T, int pos, bool all) {
    Cuda *c = (Cuda *)b;
    Recording *r = &c->recordings[T][all];
    c->in_pass = true;
    if (T == 1 && r->seen && has_whole_token(c)) return launch_token(c, tokens[0], pos), false;
    c->recording = r->seen && c->records ? r : NULL;
    if (r->exec) {
        c->input_host->pos = pos;
        memcpy(c->input_host->tokens, tokens, sizeof(int) * T);
        return false;
    }
    if (c->recording) CUDA(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
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
    c->in_pass = false, c->copied = NULL;
    c->recording = NULL;
}

// ----------------------------------------------------------------------------
// The operations; backend.h says what each computes

static void embed(Backend *b, float *x, const Mat *table, const int *tokens, int T) {
    Cuda *c = (Cuda *)b;
    if (!c->in_pass) send_input(c, tokens, T, 0);
    // after a copy, not a kernel
    CUDA(start(c, NULL, embed_rows, blocks_for((size_t)T * table->cols, 256), 256, 0, x, *table, c->input, T));
}

// Where a kernel that writes x (T, ...) puts a copy in half precision; NULL where nobody will take it.
static __half *copy_of(Cuda *c, const float *x, int T) {
#ifdef TENSOR_CORES
    bool wanted = c->in_pass && T > 1 && !c->exact; // outside a pass others may write x
#else
    bool wanted = false;
#endif
    c->copied = wanted ? x : NULL;
    if (wanted) std::swap(c->x16, c->x16_next); // the kernel that writes it may read the one before
    return wanted ? c->x16 : NULL;
}

static void rmsnorm(Cuda *c, float *out, const float *x, const Mat *weight, int T) {
    launch(c, normalize, T, 512, 0, out, copy_of(c, out, T), x, (const float *)weight->data, weight->cols, c->config.norm_eps);
}

// Whether rows consist of whole units that the kernels above this can load. llama2.c's groups may be of any length.
static bool has_units(const Mat *m) { return m->cols % 32 == 0 && m->type != INT8_GROUPS; }

typedef void Matvec(Parts, const float *, int);
typedef void Tiles(Parts, const float *, int, int);

static Matvec *matvec_of(Type type) {
    switch (type) {
    case F32: return matvec<F32>;
    case F16: return matvec<F16>;
    case BF16: return matvec<BF16>;
    case Q8_0: return matvec<Q8_0>;
    default: return matvec<Q4_0>;
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
    if (shared > 48 << 10) allow_shared(c, (const void *)kernel);
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, (const void *)kernel, 32 * WARPS, shared));
    unsigned blocks = blocks_for(groups_of(parts, ROWS), WARPS), most = c->multiprocessors * (fit > 0 ? fit : 1);
    launch(c, kernel, blocks < most ? blocks : most, 32 * WARPS, shared, parts, x, cols);
    return true;
}

#ifdef TENSOR_CORES

typedef void Tensor(Parts, const __half *, Plan);

template <int R, int TOKENS> static Tensor *tensor_of(Type type) {
    switch (type) {
    case F16: return matmul_tensor<F16, R, TOKENS>;
    case BF16: return matmul_tensor<BF16, R, TOKENS>;
    case Q8_0: return matmul_tensor<Q8_0, R, TOKENS>;
    default: return matmul_tensor<Q4_0, R, TOKENS>;
    }
}

static Tiles *tiles_of(Type) { return matmul_tiles<F32>; }

// Tiles of so many rows and tokens; the largest first.
static const struct Shape {
    int rows, tokens;
    Tensor *(*kernel)(Type);
} SHAPES[] = {{128, 256, tensor_of<128, 256>}, {128, 128, tensor_of<128, 128>}, {64, 128, tensor_of<64, 128>}};

// Bytes that tiles take with so many stages of x; their sums take less.
static size_t tensor_shared(const Shape &shape, int stages) {
    return std::max(sizeof(__half) * ROOM * (2 * (size_t)shape.rows + (size_t)stages * shape.tokens),
                    sizeof(float) * (shape.rows + 4) * shape.tokens);
}

static int tiles_in(const Parts &parts, const Shape &shape, int T, bool gated) {
    int rows = gated ? blocks_for(parts.part[0].w.rows, shape.rows / 2) : groups_of(parts, shape.rows);
    return rows * blocks_for(T, shape.tokens);
}

// One block for each multiprocessor, with 4 steps at least. Tiles are as large as finds room, unless too many blocks would
// share each: the last of them adds up all that they leave. False when no tile finds room.
static bool launch_tensor(Cuda *c, const Parts &parts, const float *x, int cols, int T, bool gated) {
    size_t n = (size_t)T * cols, most = c->shared_most - 128; // but for the flag of is_last
    const Shape *shape = SHAPES, *last = std::end(SHAPES) - 1;
    int stages = STAGES;
    while (shape < last
           && (T <= shape->tokens - 128 || tensor_shared(*shape, 2) > most
               || tiles_in(parts, *shape, T, gated) * SHARERS < c->multiprocessors))
        shape++;
    while (stages > 2 && tensor_shared(*shape, stages) > most) stages--;
    size_t shared = tensor_shared(*shape, stages);
    if (shared > most) return false;
    Tensor *kernel = shape->kernel(parts.part[0].w.type);
    if (c->copied != x) launch(c, convert, blocks_for(n, 256), 256, 0, c->x16, x, n);
    const __half *x16 = c->x16;
    __half *copy = gated ? copy_of(c, parts.part[0].out, T) : NULL;
    Plan plan = {cols,
                 T,
                 (int)blocks_for(T, shape->tokens),
                 (int)blocks_for(cols, STEP),
                 tiles_in(parts, *shape, T, gated),
                 stages,
                 gated,
                 copy,
                 c->pieces,
                 c->counters};
    unsigned blocks = std::max<size_t>(1, (size_t)plan.tiles * plan.steps / 4);
    if (shared > 48 << 10) allow_shared(c, (const void *)kernel);
    launch(c, kernel, std::min<unsigned>(blocks, c->multiprocessors), TEAM_SIZE, shared, parts, x16, plan);
    return true;
}

#else

static bool launch_tensor(Cuda *, const Parts &, const float *, int, int, bool) { return false; }

static Tiles *tiles_of(Type type) {
    switch (type) {
    case F32: return matmul_tiles<F32>;
    case F16: return matmul_tiles<F16>;
    case BF16: return matmul_tiles<BF16>;
    case Q8_0: return matmul_tiles<Q8_0>;
    default: return matmul_tiles<Q4_0>;
    }
}
#endif

// Whether the tensor cores take products with w.
static bool is_for_tensor(const Mat *w, int T) {
#ifdef TENSOR_CORES
    return has_units(w) && T > 1 && w->type != F32;
#else
    return (void)w, (void)T, false;
#endif
}

static void launch_parts(Cuda *c, const Parts &parts, const float *x, int T) {
    const Mat *w = &parts.part[0].w;
    int cols = w->cols;
    bool tensor = is_for_tensor(w, T);
    if (has_units(w) && T == 1 && launch_matvec(c, parts, x, cols)) return;
    if (tensor && launch_tensor(c, parts, x, cols, T, false)) return;
    if (!has_units(w) || T == 1 || tensor) {
        launch(c, matmul_any, dim3(blocks_for(groups_of(parts, 1), WARPS), T), 32 * WARPS, 0, parts, x, cols);
        return;
    }
    launch(c, tiles_of(w->type), dim3(groups_of(parts, TILE), blocks_for(T, TILE)), 256, 0, parts, x, cols, T);
}

// One matrix product: out (T, w.rows) = x (T, w.cols) w^T, or out += that.
typedef struct {
    float *out;
    const Mat *w;
    bool add;
} Product;

// In as few launches as their types allow.
static void matmul(Cuda *c, const Product *products, int n, const float *x, int T) {
    for (int i = 0; i < n;) {
        Parts parts = {};
        const Mat *w = products[i].w;
        for (parts.n = 0; i < n && parts.n < 3; i++) {
            if (products[i].w->type != w->type || has_units(products[i].w) != has_units(w)) break;
            parts.part[parts.n++] = {products[i].out, *products[i].w, products[i].add};
        }
        launch_parts(c, parts, x, T);
    }
}

static Cache cache_of(const Cuda *c, int layer) {
    Cache cache = c->cache;
    size_t at = (c->exact ? sizeof(float) : sizeof(__half)) * layer * cache.n_kv_heads * cache.positions * cache.width;
    cache.keys = (char *)cache.keys + at, cache.values = (char *)cache.values + at;
    return cache;
}

template <typename Number> static void launch_many(Cuda *c, const Cache &cache, float *out, const float *q, int T) {
    int width = cache.width;
    auto kernel = width <= 64 ? attention_many<Number, 1> : width <= 128 ? attention_many<Number, 2> : attention_many<Number, 4>;
    launch(c, kernel, dim3(cache.n_heads, blocks_for(T, WARPS)), 32 * WARPS, 0, cache, out, copy_of(c, out, T), q, T);
}

#ifdef TENSOR_CORES
template <int D> static void launch_tiles(Cuda *c, const Cache &cache, float *out, const float *q, int T) {
    launch(c, attention_tiles<D>, dim3(cache.n_heads, blocks_for(T, Flash<D>::QUERIES)), 32 * Flash<D>::WARPS_HERE, 0, cache, out,
           copy_of(c, out, T), q, T);
}

template <> void launch_many<__half>(Cuda *c, const Cache &cache, float *out, const float *q, int T) {
    auto launch = cache.width <= 64 ? launch_tiles<64> : cache.width <= 128 ? launch_tiles<128> : launch_tiles<256>;
    launch(c, cache, out, q, T);
}
#endif

template <typename Number> static void launch_attention(Cuda *c, const Cache &cache, float *out, const float *q, int T) {
    int width = cache.width;
    if (T > 1) return launch_many<Number>(c, cache, out, q, T);
    auto kernel = width <= 64 ? attention_one<Number, 1> : width <= 128 ? attention_one<Number, 2> : attention_one<Number, 4>;
    launch(c, kernel, dim3(cache.n_heads, c->splits), 32 * WARPS, 0, cache, out, q, c->pieces, c->counters);
}

static HeadWeights head_weights(const Layer *w) {
    return {(const float *)w->bq.data, (const float *)w->bk.data, (const float *)w->bv.data, (const float *)w->q_norm.data,
            (const float *)w->k_norm.data};
}

// Whether anything is done to queries, keys and values before they are rotated.
static bool is_finished_apart(const HeadWeights &w) { return w.bq || w.bk || w.bv || w.q_norm || w.k_norm; }

static void attention(Backend *b, int layer, const Layer *w, float *out, const float *x, int pos, int T) {
    Cuda *c = (Cuda *)b;
    Cache cache = cache_of(c, layer);
    Product qkv[] = {{c->q, &w->wq, false}, {c->k, &w->wk, false}, {c->v, &w->wv, false}};
    size_t pairs = (c->config.q_dim + 2 * (size_t)c->config.kv_dim) / 2;
    if (!c->in_pass) send_input(c, NULL, 0, pos);
    rmsnorm(c, c->y, x, &w->attention_norm, T);
    matmul(c, qkv, 3, c->y, T);
    HeadWeights heads = head_weights(w);
    if (is_finished_apart(heads))
        launch(c, finish_heads, dim3(cache.n_heads + 2 * cache.n_kv_heads, T), 32, 0, cache, heads, c->q, c->k, c->v,
               c->config.norm_eps);
    launch(c, c->exact ? rotate<float> : rotate<__half>, dim3(blocks_for(pairs, 128), T), 128, 0, cache, c->q, c->k, c->v,
           c->rotation);
    if (c->exact) launch_attention<float>(c, cache, out, c->q, T);
    else launch_attention<__half>(c, cache, out, c->q, T);
}

static void add_product(Backend *b, float *x, const Mat *w, const float *y, int T) {
    Product product = {x, w, true};
    matmul((Cuda *)b, &product, 1, y, T);
}

static void feed_forward(Backend *b, const Layer *w, float *x, int T) {
    Cuda *c = (Cuda *)b;
    Product both[] = {{c->h, &w->w1, false}, {c->h2, &w->w3, false}};
    Parts parts = {{{c->h, w->w1, false}, {c->h2, w->w3, false}}, 2};
    size_t n = (size_t)T * c->config.hidden_dim;
    rmsnorm(c, c->y, x, &w->ffn_norm, T);
    bool together = is_for_tensor(&w->w1, T) && w->w1.type == w->w3.type;
    if (!together || !launch_tensor(c, parts, c->y, w->w1.cols, T, true)) {
        matmul(c, both, 2, c->y, T);
        launch(c, gate, blocks_for(n, 256), 256, 0, c->h, copy_of(c, c->h, T), c->h2, n);
    }
    add_product(b, x, &w->w2, c->h, T);
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

static void logits(Backend *b, float *out, const Mat *norm, const Mat *output, const float *x, int T) {
    Cuda *c = (Cuda *)b;
    size_t bytes = sizeof(float) * T * output->rows;
    Product product = {c->logits, output, false};
    c->out = out;
    rmsnorm(c, c->y, x, norm, T);
    matmul(c, &product, 1, c->y, T);
    if (out) {
        if (!c->recording) pin(c, out, bytes);
        CUDA(cudaMemcpyAsync(out, c->logits, bytes, cudaMemcpyDeviceToHost, c->stream));
    } else {
        launch(c, find_largest, 1, 1024, 0, c->best, c->logits, output->rows);
    }
    if (!c->in_pass) CUDA(cudaStreamSynchronize(c->stream));
}

static int choose(Backend *b, float temperature, float topp, float coin) {
    Cuda *c = (Cuda *)b;
    int best = *c->best;
    if (best < 0 || temperature == 0) return best;
    Chances chances = {c->logits, c->config.vocab_size, 0, 1 / temperature};
    launch(c, draw, 1, DRAWERS, 0, c->best, chances, best, topp, coin);
    CUDA(cudaStreamSynchronize(c->stream));
    int drawn = *c->best;
    *c->best = best; // for the next call by the same logits
    return drawn;
}

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

// Bytes of a matrix on the device, where first the numbers of all matrices lie, and then all their scales.
typedef struct { size_t numbers, scales; } Size;

static Size size_of(const Mat *m) {
    size_t n = (size_t)m->rows * m->cols;
    switch (m->type) {
    case F32: return {4 * n, 0};
    case F16:
    case BF16: return {2 * n, 0};
    case Q8_0: return {n, n / 32 * 2};
    case Q4_0: return {n / 2, n / 32 * 2};
    default: return {n, (n + m->group - 1) / m->group * 4};
    }
}

static bool is_known(Type type) {
    return type == F32 || type == F16 || type == BF16 || type == Q8_0 || type == Q4_0 || type == INT8_GROUPS;
}

static size_t aligned(size_t n, size_t to) { return (n + to - 1) / to * to; }
static size_t numbers_of(const Mat *m) { return aligned(size_of(m).numbers, sizeof(uint4)); } // rows in whole units follow
static size_t scales_of(const Mat *m) { return aligned(size_of(m).scales, sizeof(float)); }    // each other without a gap

// Every matrix once. A tied output is the embedding.
static std::vector<Mat *> matrices(Weights *w, int n_layers) {
    std::vector<Mat *> all = {&w->token_embedding, &w->norm};
    if (w->output.data != w->token_embedding.data) all.push_back(&w->output);
    for (Layer *l = w->layers; l < w->layers + n_layers; l++)
        all.insert(all.end(), {&l->attention_norm, &l->wq, &l->wk, &l->wv, &l->wo, &l->ffn_norm, &l->w1, &l->w3, &l->w2});
    for (Layer *l = w->layers; l < w->layers + n_layers; l++)
        for (Mat *m : {&l->bq, &l->bk, &l->bv, &l->q_norm, &l->k_norm})
            if (m->data) all.push_back(m);
    return all;
}

static const char NOT_PINNED[] = "the host's memory is too short for what a GPU reads from it; --device=cpu needs less";

// Memory of the host that the GPU reads and writes by itself; NULL when there is none.
static void *take_pinned(size_t bytes) {
    void *block = NULL;
    if (cudaMallocHost(&block, bytes) == cudaSuccess) return block;
    return (void)cudaGetLastError(), (void *)NULL;
}

static const size_t PIECE = 32 << 20; // bytes

// Copies by way of two pinned pieces in turn: one is filled from the file while the other travels.
typedef struct {
    cudaStream_t stream;
    char *pieces[2];
    cudaEvent_t gone[2]; // when a piece may be filled again
    int turn;
} Upload;

static char *next_piece(Upload *u) {
    u->turn = !u->turn;
    CUDA(cudaEventSynchronize(u->gone[u->turn]));
    return u->pieces[u->turn];
}

static void send(Upload *u, void *to, const char *from, size_t n) {
    CUDA(cudaMemcpyAsync(to, from, n, cudaMemcpyHostToDevice, u->stream));
    CUDA(cudaEventRecord(u->gone[u->turn], u->stream));
}

static void upload_bytes(Upload *u, char *to, const void *from, size_t n) {
    for (size_t at = 0, some; at < n; at += some) {
        some = n - at < PIECE ? n - at : PIECE;
        send(u, to + at, (char *)memcpy(next_piece(u), (const char *)from + at, some), some);
    }
}

// n blocks, each a scale of two bytes before WIDTH bytes of numbers: the scales go to one place, the rest to another.
template <size_t WIDTH> static void upload_blocks(Upload *u, char *numbers, char *scales, const void *from, size_t n) {
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

static void upload_matrix(Upload *u, char *to, char *scales, Mat *m) {
    Size size = size_of(m);
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

// Returns NULL or what is wrong.
static const char *upload(Cuda *c, Weights *w) {
    Upload u = {};
    u.stream = c->stream;
    char *numbers = (char *)c->weights, *scales = numbers + c->numbers_size;
    bool tied = w->output.data == w->token_embedding.data;
    for (int i = 0; i < 2; i++) {
        u.pieces[i] = (char *)take_pinned(PIECE);
        CUDA(cudaEventCreateWithFlags(&u.gone[i], cudaEventDisableTiming));
    }
    bool ok = u.pieces[0] && u.pieces[1];
    for (Mat *m : ok ? matrices(w, c->config.n_layers) : std::vector<Mat *>()) {
        size_t n = numbers_of(m), n_scales = scales_of(m);
        c->moved->push_back({m, *m});
        upload_matrix(&u, numbers, scales, m);
        numbers += n, scales += n_scales;
    }
    if (ok && tied) c->moved->push_back({&w->output, w->output}), w->output = w->token_embedding;
    CUDA(cudaStreamSynchronize(c->stream));
    for (int i = 0; i < 2; i++) {
        if (u.pieces[i]) CUDA(cudaFreeHost(u.pieces[i]));
        CUDA(cudaEventDestroy(u.gone[i]));
    }
    return ok ? NULL : NOT_PINNED;
}

// Cosine and sine of position * frequency, in double precision as on the CPU.
static void upload_rotation(Cuda *c, const double *frequencies) {
    int positions = c->cache.positions, half = c->config.head_dim / 2;
    std::vector<float> table(2 * (size_t)positions * half);
    for (int i = 0; i < half; i++) {
        for (int pos = 0; pos < positions; pos++) {
            double angle = pos * frequencies[i];
            table[2 * ((size_t)pos * half + i)] = (float)(c->config.rope_scale * cos(angle));
            table[2 * ((size_t)pos * half + i) + 1] = (float)(c->config.rope_scale * sin(angle));
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
    for (const Moved &m : *c->moved) *m.place = m.before;
    if (c->input_host) CUDA(cudaFreeHost(c->input_host));
    if (c->best) CUDA(cudaFreeHost(c->best));
    if (c->stream) CUDA(cudaStreamDestroy(c->stream));
    delete c->blocks;
    delete c->moved;
    free(c);
}

// Whether there is a GPU that this program was compiled for. Returns NULL or what is wrong, as a constant or in `wrong`.
static const char *find_device(Cuda *c, llamac_error *wrong) {
    cudaDeviceProp device;
    cudaFuncAttributes code;
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaSuccess && n == 0) e = cudaErrorNoDevice;
    if (e == cudaSuccess) e = cudaSetDevice(0);
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&device, 0);
    if (e != cudaSuccess) {
        const char *why =
            e == cudaErrorInsufficientDriver ? "no driver, or too old a one for this program's CUDA" : cudaGetErrorString(e);
        snprintf(wrong->text, sizeof wrong->text, "no GPU can be used here (%s); --device=cpu computes without", why);
        return wrong->text;
    }
    if (cudaFuncGetAttributes(&code, (const void *)normalize) != cudaSuccess) {
        snprintf(wrong->text, sizeof wrong->text, "this program was not compiled for a %.200s; make runcuda ARCH=%d%d does it",
                 device.name, device.major, device.minor);
        return wrong->text;
    }
    c->multiprocessors = device.multiProcessorCount;
    c->shared_most = device.sharedMemPerBlockOptin;
    c->cooperative = device.cooperativeLaunch && device.major >= 8; // copies go on by themselves from Ampere on
    return NULL;
}

// Numbers of `pieces` that attention's splits, or the tiles that share multiprocessors, can leave.
static size_t pieces_of(const Cuda *c) {
    size_t attention = (size_t)c->config.n_heads * c->splits * (2 + HEAD_MAX);
#ifdef TENSOR_CORES
    size_t tiles = 2 * (size_t)c->multiprocessors * SHAPES->tokens * SHAPES->rows;
#else
    size_t tiles = 0;
#endif
    return attention > tiles ? attention : tiles;
}

enum { KERNELS = 32 << 20 }; // bytes that their code may take, which the driver loads when they are first called

static bool take_floats(Cuda *c, float **p, size_t n) { return (*p = (float *)take(c, n * sizeof(float))); }

// Takes all the memory but the activations of forward, which it counts too; NULL or what is wrong.
static const char *take_memory(Cuda *c, Weights *w, llamac_error *e) {
    const Config *config = &c->config;
    size_t wide = std::max(std::max(config->dim, config->hidden_dim), config->q_dim), free_bytes = 0, total = 0;
    size_t half = (c->exact ? sizeof(float) : sizeof(__half)) * config->n_layers * config->n_kv_heads * c->cache.positions
                  * c->cache.width; // of the cache: keys, and as much for values
    size_t n_counters = config->n_heads > 2 * c->multiprocessors ? config->n_heads : 2 * c->multiprocessors;
    size_t rows = CHUNK < c->cache.positions ? CHUNK : c->cache.positions;
    size_t activations =
        sizeof(float) * rows * (2 * (size_t)config->dim + 2 * config->q_dim + 2 * config->kv_dim + 2 * config->hidden_dim);
    activations += sizeof(float) * (rows * config->vocab_size + pieces_of(c)) + 2 * sizeof(__half) * CHUNK * wide;
    activations += sizeof(float) * (c->cache.positions * (size_t)config->head_dim + 3 * (size_t)config->dim + config->hidden_dim);
    for (Mat *m : matrices(w, config->n_layers)) c->numbers_size += numbers_of(m), c->weights_size += scales_of(m);
    c->weights_size += c->numbers_size;
    double gib = 1 << 30, needed = (double)c->weights_size + 2.0 * half + activations + KERNELS;
    CUDA(cudaMemGetInfo(&free_bytes, &total));
    bool ok = needed <= free_bytes && (c->weights = (const uint4 *)take(c, c->weights_size)) && (c->cache.keys = take(c, half))
              && (c->cache.values = take(c, half))
              && (c->rotation = (float2 *)take(c, sizeof(float) * c->cache.positions * config->head_dim))
              && take_floats(c, &c->y, rows * config->dim) && take_floats(c, &c->q, rows * config->q_dim)
              && take_floats(c, &c->k, rows * config->kv_dim) && take_floats(c, &c->v, rows * config->kv_dim)
              && take_floats(c, &c->h, rows * config->hidden_dim) && take_floats(c, &c->h2, rows * config->hidden_dim)
              && (c->x16 = (__half *)take(c, sizeof(__half) * CHUNK * wide))
              && (c->x16_next = (__half *)take(c, sizeof(__half) * CHUNK * wide))
              && (c->logits = (float *)take(c, sizeof(float) * rows * config->vocab_size))
              && (c->pieces = (float *)take(c, sizeof(float) * pieces_of(c)))
              && (c->counters = (unsigned *)take(c, sizeof(unsigned) * n_counters)) && (c->input = (Input *)take(c, sizeof(Input)));
    if (!ok)
        return format(e,
                      "the GPU's memory is too small: %.2f GiB are needed (weights %.2f, context %.2f), %.2f are free; "
                      "ask for fewer tokens with -n, or for --device=cpu",
                      needed / gib, c->weights_size / gib, 2 * half / gib, free_bytes / gib);
    CUDA(cudaMemset(c->cache.keys, 0, half)); // the room between head_dim and width stays zero
    CUDA(cudaMemset(c->cache.values, 0, half));
    CUDA(cudaMemset(c->counters, 0, sizeof(unsigned) * n_counters));
    return NULL;
}

#if FUSED

// Whether all of layer l lies l strides from layer 0.
static bool is_in_step(const Layer *first, size_t l, Stride stride) {
    const Mat *all[] = {&first->attention_norm, &first->wq, &first->wk, &first->wv, &first->wo,
                        &first->ffn_norm,       &first->w1, &first->w3, &first->w2};
    for (const Mat *m : all) {
        const Mat *other = (const Mat *)((const char *)(first + l) + ((const char *)m - (const char *)first));
        if (other->type != m->type || (const char *)other->data != (const char *)m->data + l * stride.numbers) return false;
        if (m->scales && (const char *)other->scales != (const char *)m->scales + l * stride.scales) return false;
    }
    return true;
}

// Whether all that layers multiply is of one type, in whole units, and lies alike in all of them; the way to the next.
static bool is_uniform(const Weights *w, int n_layers, Stride *stride) {
    const Layer *first = w->layers, *next = first + (n_layers > 1);
    for (const Mat *m : {&first->wq, &first->wk, &first->wv, &first->wo, &first->w1, &first->w3, &first->w2})
        if (m->type != first->wq.type || !has_units(m)) return false;
    stride->numbers = (const char *)next->wq.data - (const char *)first->wq.data;
    stride->scales = first->wq.scales ? (const char *)next->wq.scales - (const char *)first->wq.scales : 0;
    for (int l = 1; l < n_layers; l++)
        if (!is_in_step(first, l, *stride)) return false;
    return true;
}

// Whether the rows of b follow those of a as if they were one matrix's; a becomes that.
static bool join(Mat *a, const Mat &b) {
    Size size = size_of(a);
    bool follows = (const char *)b.data == (const char *)a->data + size.numbers
                   && (!a->scales || (const char *)b.scales == (const char *)a->scales + size.scales);
    a->rows += b.rows;
    return follows;
}

static Job job_of(const Mat &matrix, const Mat *norm, bool gate, int blocks) {
    Job job = {};
    job.w = matrix;
    job.row_bytes = (int)(size_of(&matrix).numbers / matrix.rows), job.pieces = blocks_for(job.row_bytes, SPAN);
    job.rows = gate ? OCTET / 2 : OCTET, job.fifth = gate ? matrix.rows / 2 : OCTET / 2;
    int groups = blocks_for(gate ? matrix.rows / 2 : matrix.rows, job.rows);
    job.share = groups / blocks, job.rest = groups % blocks;
    for (int i = 0; i < WARPS; i++) job.first[i] = {(unsigned char)(i / job.pieces), (unsigned char)(i % job.pieces)};
    job.hop = {(unsigned char)(WARPS / job.pieces), (unsigned char)(WARPS % job.pieces)};
    job.norm = norm ? (const float *)norm->data : NULL;
    return job;
}

// Prepares the kernel for whole tokens; leaves token.slots at 0 where the model, the GPU or the driver does not allow it.
static void open_token(Cuda *c, const Weights *w) {
    const Config *config = &c->config;
    const Layer *l = w->layers;
    int blocks = c->multiprocessors;
    Token t = {};
    const void *kernel = (const void *)whole_token_of(l->wq.type, w->output.type);
    Mat qkv = l->wq, gate = l->w1;
    if (config->q_dim != config->dim || config->rope_halves || is_finished_apart(head_weights(l))) return; // op by op
    if (!c->cooperative || !kernel || !has_units(&w->output) || !is_uniform(w, config->n_layers, &t.stride)) return;
    if (!join(&qkv, l->wk) || !join(&qkv, l->wv) || !join(&gate, l->w3)) return;
    t.jobs[QKV] = job_of(qkv, &l->attention_norm, false, blocks);
    t.jobs[OUT] = job_of(l->wo, NULL, false, blocks);
    t.jobs[GATE] = job_of(gate, &l->ffn_norm, true, blocks);
    t.jobs[DOWN] = job_of(l->w2, NULL, false, blocks);
    t.jobs[LOGITS] = job_of(w->output, &w->norm, false, blocks);
    t.n_layers = config->n_layers, t.table = w->token_embedding, t.cache = c->cache, t.splits = c->splits;
    t.stride.cache = (c->exact ? sizeof(float) : sizeof(__half)) * c->cache.n_kv_heads * c->cache.positions * c->cache.width;
    t.rotation = c->rotation, t.norm_eps = config->norm_eps, t.pieces = c->pieces, t.best = c->best;
    t.desk = sizeof(Desk) / sizeof(float);
    for (const Job &job : t.jobs) {
        t.desk = std::max(t.desk, whole_steps(job.w.cols));
        t.products = std::max(t.products, OCTET * (job.share + 1) * job.pieces);
    }
    t.desk = (t.desk + 3) / 4 * 4;
    size_t others = shared_of(t), room = c->shared_most > others ? (c->shared_most - others) / (WARPS * SLOT) : 0;
    if (room < 2) return;
    t.slots = room < SLOTS_MAX ? (int)room : SLOTS_MAX;
    int fit = 0;
    allow_shared(c, kernel);
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, 32 * TEAM, shared_of(t)));
    size_t floats = 3 * (size_t)config->dim + config->hidden_dim;
    t.x = (float *)take(c, sizeof(float) * floats);
    t.largest = (Largest *)take(c, sizeof(Largest) * c->multiprocessors);
    t.arrived = (unsigned *)take(c, sizeof(unsigned));
    if (!fit || !t.x || !t.largest || !t.arrived) return;
    t.q = t.x + config->dim, t.attended = t.q + config->dim, t.h = t.attended + config->dim;
    CUDA(cudaMemset(t.arrived, 0, sizeof(unsigned)));
    c->token = t, c->token.logits = c->logits;
    if (start_token(c, 0, 0) == cudaSuccess) return; // a trial: what it leaves in the cache is written anew
    (void)cudaGetLastError();
    c->token.slots = 0;
}
#endif

// Whether the driver records what is launched, and runs the recording: not so under some ways to share a GPU.
static bool can_record(Cuda *c) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    bool ok = cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    if (ok) {
        ok = start(c, NULL, convert, 1, 256, 0, c->x16, c->pieces, 1) == cudaSuccess;
        ok = cudaStreamEndCapture(c->stream, &graph) == cudaSuccess && ok;
    }
    ok = ok && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess && cudaGraphLaunch(exec, c->stream) == cudaSuccess;
    if (exec) CUDA(cudaGraphExecDestroy(exec));
    if (graph) CUDA(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
    return ok;
}

// Returns NULL, or what is wrong with the types of the weights.
static const char *check_types(Model *model, llamac_error *e) {
    char number[12];
    for (const Mat *m : matrices(&model->weights, model->config.n_layers)) {
        if (is_known(m->type)) continue;
        snprintf(e->text, sizeof e->text, "weights of type %s, expected F32, F16, BF16, Q8_0 or Q4_0; --device=cpu takes them",
                 llamac_type_name(m->type, number));
        return e->text;
    }
    return NULL;
}

const char *llamac_cuda_open(Backend **backend, Model *model, int positions, llamac_error *e) {
    const Config *config = &model->config;
    const char *wrong = check_types(model, e);
    if (wrong) return wrong;
    if (config->head_dim > HEAD_MAX)
        return format(e, "heads of %.0f numbers, expected up to %.0f", config->head_dim, HEAD_MAX, 0, 0);
    if (config->window) return format(e, "a sliding window of %.0f positions, which --device=cpu has", config->window, 0, 0, 0);
    Cuda *c = (Cuda *)calloc(1, sizeof *c);
    if (!c) return "out of memory";
    c->blocks = new std::vector<void *>, c->moved = new std::vector<Moved>;
    c->config = *config;
    c->exact = model->weights.layers[0].wk.type == F32;
    int width = (config->head_dim + 7) / 8 * 8, splits = (positions + 255) / 256; // a tile of 32 for each of 8 warps
    c->splits = splits < 16 ? splits : 16;
    c->cache.positions = positions, c->cache.width = width, c->cache.head_dim = config->head_dim;
    c->cache.n_heads = config->n_heads, c->cache.n_kv_heads = config->n_kv_heads, c->cache.halves = config->rope_halves;
    wrong = find_device(c, e);
    if (!wrong) wrong = take_memory(c, &model->weights, e);
    if (!wrong && !((c->input_host = (Input *)take_pinned(sizeof(Input))) && (c->best = (int *)take_pinned(sizeof(int)))))
        wrong = NOT_PINNED;
    if (wrong) return cuda_close(&c->ops), wrong;
    c->cache.input = c->input;
    CUDA(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    upload_rotation(c, model->weights.frequencies);
    if ((wrong = upload(c, &model->weights))) return cuda_close(&c->ops), wrong;
    launch(c, convert, 1, 256, 0, c->x16, c->pieces, 1); // loads the kernels, which can't be done in a recording
    c->records = can_record(c);
#if FUSED
    open_token(c, &model->weights);
#endif
    CUDA(cudaDeviceSynchronize());
    Backend *b = &c->ops;
    b->chunk = CHUNK, b->begin = begin, b->end = end, b->alloc = cuda_alloc, b->embed = embed;
    b->attention = attention, b->add_product = add_product, b->feed_forward = feed_forward, b->logits = logits;
    b->choose = choose, b->bandwidth = bandwidth, b->close = cuda_close;
    *backend = b;
    return NULL;
}

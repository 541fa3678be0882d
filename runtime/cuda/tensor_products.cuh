// Matrix products of many tokens on the tensor cores, in half precision with float32 sums.
//
// A tile is R rows of the weights and TOKENS tokens. Its columns are processed in steps of
// STEP_COLS. All steps of all tiles form one sequence, of which every block computes an equal
// part, so a tile may be shared by several blocks. The last of them to finish adds up the partial
// sums that the others wrote, in the order of the columns.
//
// Weights go from global memory through registers, where they are converted to half precision, to
// shared memory. x is copied to shared memory asynchronously, some steps ahead. With RAW_STAGES the
// weights are also copied asynchronously, in their own format, and converted in shared memory.
#pragma once
#include "products.cuh"

// RAW_STAGES=4 compiles a program that copies weights and x of prompts up to 3 steps ahead, to
// measure the speedup (multiply_raw_steps). 0 compiles the variant that has been measured: weights
// go through registers, one step ahead (multiply_steps). Any other number from 2 on is possible.
#ifndef RAW_STAGES
#define RAW_STAGES 0
#endif
static_assert(RAW_STAGES == 0 || RAW_STAGES >= 2, "one step is multiplied while others are copied");

// STORES_FIRST=1 compiles another order of multiply_steps, to measure the speedup: a thread stores
// all its weights of a step before it loads the first of the next, and a load clears no registers.
// nvcc 13.0 assigns all of these loads to one of a warp's six scoreboards, so an instruction that
// uses the registers of one load waits until no load is in flight. In the order that has been
// measured, converting or clearing a unit therefore waits for the load of the previous unit, which
// has just been issued.
#ifndef STORES_FIRST
#define STORES_FIRST 0
#endif

enum {
    STEP_COLS = 64,        // a multiple of 64: 16 columns for each of up to 4 groups of warps
    PITCH = STEP_COLS + 8, // halves between rows in shared memory; 8 unused against bank conflicts
    PREFETCH_STEPS = 4,    // weights are prefetched to the L2 cache this many steps ahead
    TENSOR_THREADS = 256,  // threads of a block
    WARP_TILE = 64,        // rows, and tokens, of the part of a tile that a warp computes
};

// Writes x (n,) in half precision to out.
static __global__ void convert(__half *out, const float *x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = to_half(x[i]);
}

// ----------------------------------------------------------------------------
// Weights in half precision

// Converts a unit to half precision, 8 elements in each uint4 of `out`.
template <Type type>
static __device__ void unit_to_halves(const typename Format<type>::Unit &u, uint4 *out) {
    const int N = Format<type>::N;
    float x[N];
    Format<type>::unpack(u, x);
    scale_to_halves<N>((__half2 *)out, x, Format<type>::scale(u));
}

template <> __device__ void unit_to_halves<F16>(const Format<F16>::Unit &u, uint4 *out) {
    *out = u.bits;
}

template <> __device__ void unit_to_halves<BF16>(const Format<BF16>::Unit &u, uint4 *out) {
    float x[8];
    Format<BF16>::unpack(u, x);
    // The highest exponent bit of a bfloat16 is set if its absolute value is at least 2.
    bool may_overflow = (u.bits.x | u.bits.y | u.bits.z | u.bits.w) & 0x40004000u;
    if (may_overflow) return scale_to_halves<8>((__half2 *)out, x, 1);
#pragma unroll
    for (int i = 0; i < 4; i++) ((__half2 *)out)[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
}

// Returns scale * (byte - zero) for two bytes of `word`: 0 and 1 if `selector` is 0x4140, 2 and 3
// if it is 0x4342. The lowest bit of the half 1024 (0x6400) has the value 1, so putting a byte in
// its lowest 8 bits makes it 1024 + byte.
static __device__ __half2 bytes_to_halves(uint32_t word, uint32_t selector, float zero,
                                          __half2 scale) {
    uint32_t bits = __byte_perm(word, 0x64646464u, selector);
    __half2 shift = __floats2half2_rn(-1024 - zero, -1024 - zero);
    return __hmul2(__hadd2(*(__half2 *)&bits, shift), scale);
}

// Whether the products of this scale and quantized values, at most 128, stay in the range of half
// precision, which ends at 65504. Then they can be computed in half precision: they are rounded
// once, as they would be if they were computed in float32.
static __device__ bool is_small(__half scale) { return fabsf(__half2float(scale)) <= 500; }

template <> __device__ void unit_to_halves<Q8_0>(const Format<Q8_0>::Unit &u, uint4 *out) {
    const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
    __half2 *pairs = (__half2 *)out, scale = __halves2half2(u.scale, u.scale);
    if (is_small(u.scale)) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t word = words[i / 2] ^ 0x80808080u, selector = i % 2 ? 0x4342 : 0x4140;
            pairs[i] = bytes_to_halves(word, selector, 128, scale);
        }
    } else {
        float x[16];
        Format<Q8_0>::unpack(u, x);
        scale_to_halves<16>(pairs, x, Format<Q8_0>::scale(u));
    }
}

template <> __device__ void unit_to_halves<Q4_0>(const Format<Q4_0>::Unit &u, uint4 *out) {
    const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
    __half2 *pairs = (__half2 *)out, scale = __halves2half2(u.scale, u.scale);
    if (is_small(u.scale)) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t word = words[i / 2], selector = i % 2 ? 0x4342 : 0x4140;
            pairs[i] = bytes_to_halves(word & 0x0f0f0f0fu, selector, 8, scale);
            pairs[8 + i] = bytes_to_halves(word >> 4 & 0x0f0f0f0fu, selector, 8, scale);
        }
    } else {
        float x[32];
        Format<Q4_0>::unpack(u, x);
        scale_to_halves<32>(pairs, x, Format<Q4_0>::scale(u));
    }
}

// ----------------------------------------------------------------------------
// What a launch computes, and where a tile's rows are

// Tokens are cut into token_tiles groups of TOKENS, the rows of each matrix into groups of R (R / 2
// with `gated`). Tile i computes token group i % token_tiles and row group i / token_tiles. Most
// consecutive tiles have the same rows, so blocks that run at the same time read the same weights.
typedef struct {
    int cols, T;        // shape of x: (T, cols)
    int token_tiles;    // groups of TOKENS tokens; each row group has that many tiles
    int steps, tiles;   // steps of a tile; all tiles
    int stages;         // steps of x in shared memory: one is multiplied, the others are copied
    bool gated;         // product 0's out becomes SwiGLU of products 0 (gate) and 1 (up)
    __half *half_copy;  // with `gated`: this out in half precision; NULL if not needed
    float *partials;    // (blocks, 2, TOKENS, R): partial sums of shared tiles
    unsigned *counters; // (blocks,) zeros; a shared tile uses the one of its first block
} TilePlan;

// The rows of a tile, in two halves: the lower half, from `row` on, and the upper half, from
// `upper_row` on. The upper half follows the lower one; with `gated`, it has the same rows of the
// second matrix instead.
struct TileRows {
    Mat lower, upper; // copies, so that they stay in registers
    int product, row, upper_row;

    template <int R>
    static __device__ TileRows of(const Products &products, const TilePlan &p, int tile) {
        RowGroup at = find_rows(products, tile / p.token_tiles, p.gated ? R / 2 : R);
        const Mat &w = products.list[at.product].w;
        if (p.gated) return {w, products.list[1].w, 0, at.row, at.row};
        return {w, w, at.product, at.row, at.row + R / 2};
    }

    // Sets *m to the matrix that contains the tile's row r, and returns the row's index in that
    // matrix. Rows beyond the last one repeat it; their sums are not stored.
    template <int R> __device__ size_t row_of(int r, Mat *m) const {
        *m = lower;
        if (r < R / 2) return min(row + r, lower.rows - 1);
        m->data = upper.data, m->scales = upper.scales;
        return min(upper_row + r - R / 2, lower.rows - 1);
    }
};

// Returns the first step of a block, counted over all tiles.
static __device__ int first_step(const TilePlan &p, int block) {
    return (int)((long long)p.tiles * p.steps * block / gridDim.x);
}

// Returns the block that computes a step: the last whose first_step is at most `step`.
static __device__ int block_of_step(const TilePlan &p, int step) {
    return (int)((((long long)step + 1) * gridDim.x - 1) / ((long long)p.tiles * p.steps));
}

// ----------------------------------------------------------------------------
// Loads

// A thread's part of the weights of a step, in registers. The units of a step are numbered row by
// row; unit j of the thread is the one with number threadIdx.x + j * TENSOR_THREADS.
template <Type type, int R> struct WeightStage {
    static const int N = Format<type>::N, UNITS_PER_ROW = STEP_COLS / N, TOTAL = R * UNITS_PER_ROW,
                     UNITS = (TOTAL + TENSOR_THREADS - 1) / TENSOR_THREADS;
    typename Format<type>::Unit units[UNITS];

    static __device__ int unit_row(int j) {
        return (threadIdx.x + j * TENSOR_THREADS) / UNITS_PER_ROW;
    }
    static __device__ int unit_col() { return threadIdx.x % UNITS_PER_ROW * N; } // for every j
    static __device__ bool is_used(int j) {
        return TOTAL % TENSOR_THREADS == 0 || threadIdx.x + j * TENSOR_THREADS < TOTAL;
    }

    // Loads unit j of the step that begins at column k. Columns beyond the last are zero.
    __device__ void load(int j, const TileRows &rows, int cols, int k) {
        if (!is_used(j)) return;
        Mat m;
        size_t row = rows.row_of<R>(unit_row(j), &m);
        if (k + unit_col() < cols) units[j] = load_unit<type>(m, (row * cols + k + unit_col()) / N);
        else memset(&units[j], 0, sizeof units[j]);
    }

    // Loads unit j of the step that begins at column k. If its columns are beyond the last, loads
    // the row's first unit instead.
    __device__ void load_any(int j, const TileRows &rows, int cols, int k) {
        if (!is_used(j)) return;
        Mat m;
        size_t row = rows.row_of<R>(unit_row(j), &m);
        int col = k + unit_col() < cols ? k + unit_col() : 0;
        units[j] = load_unit<type>(m, (row * cols + col) / N);
    }

    // Stores unit j to ws (R, PITCH), or zeros if it is not `wanted`.
    __device__ void store(int j, __half *ws, bool wanted = true) const {
        uint4 halves[N / 8];
        if (!is_used(j)) return;
        unit_to_halves<type>(units[j], halves);
        if (!wanted) memset(halves, 0, sizeof halves);
        uint4 *to = (uint4 *)(ws + unit_row(j) * PITCH + unit_col());
#pragma unroll
        for (int i = 0; i < N / 8; i++) to[i] = halves[i];
    }
};

// Starts the copy of one step of x (T, cols): tokens from t0 and columns from k, to xs (TOKENS,
// PITCH). Tokens and columns beyond the last are zero, and nothing is read for them: a batch of a
// few tokens would otherwise read more x than weights.
template <int TOKENS>
static __device__ void copy_x_async(__half *xs, const __half *x, int t0, int T, int cols, int k) {
    const int UNITS_PER_ROW = STEP_COLS / 8;
#pragma unroll
    for (int j = 0; j < TOKENS * UNITS_PER_ROW / TENSOR_THREADS; j++) {
        int i = threadIdx.x + j * TENSOR_THREADS, unit = i % UNITS_PER_ROW, col = k + unit * 8;
        int t = i / UNITS_PER_ROW;
        const __half *from = x + (size_t)min(t0 + t, T - 1) * cols + (col < cols ? col : 0);
        bool exists = col < cols && t0 + t < T;
        int zero_bytes = exists ? 0 : 16; // written instead of bytes of `from`
        __pipeline_memcpy_async(xs + t * PITCH + unit * 8, from, 16, zero_bytes);
    }
}

// Prefetches a tile's weights to the L2 cache. Each of the threads 0 to R - 1 prefetches the
// elements of one row, each of the next R threads the scales of one row.
template <Type type, int R> struct WeightPrefetch {
    const char *from; // address at step 0; NULL for the other threads
    size_t stride;    // bytes between steps

    __device__ WeightPrefetch(const TileRows &rows, int cols) {
        const int N = Format<type>::N, part = threadIdx.x / R;
        Mat m;
        size_t i = rows.row_of<R>(threadIdx.x % R, &m) * cols;
        from = part == 0 ? (const char *)m.data + i / N * sizeof(uint4) : NULL;
        stride = STEP_COLS / N * sizeof(uint4);
        if (part == 1 && m.scales) {
            from = (const char *)m.scales + i / 32 * scale_bytes(type) / 8;
            stride = STEP_COLS / 32 * scale_bytes(type) / 8; // on average; cache lines are longer
        }
    }
    __device__ void prefetch(int step, int end) const {
        if (from && step < end) prefetch_line(from + step * stride);
    }
};

// Prefetches the weights of the first steps of a block that begins at `step`.
template <Type type, int R>
static __device__ void prefetch_first(const Products &products, const TilePlan &p, int step) {
    WeightPrefetch<type, R> weights(TileRows::of<R>(products, p, step / p.steps), p.cols);
    for (int s = step % p.steps; s < step % p.steps + PREFETCH_STEPS; s++)
        weights.prefetch(s, p.steps);
}

// ----------------------------------------------------------------------------
// Multiplication

// A tensor core's sums of 16 rows and 16 tokens. A warp holds 4 by 4 of them.
typedef nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> Sums;

// How the warps of a block share a tile: each computes WARP_TILE rows and tokens. If the tile needs
// fewer warps than there are, several groups of warps each multiply a part of the columns.
template <int R, int TOKENS> struct WarpLayout {
    static const int GROUPS = TENSOR_THREADS / 32 * WARP_TILE * WARP_TILE / (R * TOKENS),
                     SUM_PITCH = R + 4; // floats between the tokens of a tile of sums
    static __device__ int row() { return threadIdx.x / 32 % (R / WARP_TILE) * WARP_TILE; }
    static __device__ int token() {
        return threadIdx.x / 32 / (R / WARP_TILE) % (TOKENS / WARP_TILE) * WARP_TILE;
    }
    static __device__ int group() { return threadIdx.x / (TENSOR_THREADS / GROUPS); }

    // Adds the product of 16 columns of ws (R, PITCH) and xs (TOKENS, PITCH).
    static __device__ void multiply(Sums sums[4][4], const __half *ws, const __half *xs) {
        using namespace nvcuda::wmma;
        fragment<matrix_a, 16, 16, 16, __half, row_major> a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) load_matrix_sync(a[i], ws + (row() + 16 * i) * PITCH, PITCH);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            fragment<matrix_b, 16, 16, 16, __half, col_major> b;
            load_matrix_sync(b, xs + (token() + 16 * j) * PITCH, PITCH);
#pragma unroll
            for (int i = 0; i < 4; i++) mma_sync(sums[i][j], a[i], b, sums[i][j]);
        }
    }

    // Writes the sums of all groups, added in the order of the groups, to tile (TOKENS, SUM_PITCH).
    static __device__ void add_groups(Sums sums[4][4], float *tile) {
        using namespace nvcuda::wmma;
        for (int turn = 0; turn < GROUPS; turn++) {
            if (group() == turn) {
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    float *at = tile + (token() + i / 4 * 16) * SUM_PITCH + row() + i % 4 * 16;
                    Sums &mine = sums[i % 4][i / 4];
                    if (turn > 0) {
                        Sums other;
                        load_matrix_sync(other, at, SUM_PITCH, mem_col_major);
                        for (int e = 0; e < other.num_elements; e++) mine.x[e] += other.x[e];
                    }
                    store_matrix_sync(at, mine, SUM_PITCH, mem_col_major);
                }
            }
            __syncthreads();
        }
    }
};

// The steps first to end - 1 of a tile that begins at token t0.
struct TileSteps {
    TileRows rows;
    int t0, first, end;
};

// Shared memory of a tile: ws (2, R, PITCH), the weights of two steps; xs (stages, TOKENS, PITCH).
struct TileBuffers { __half *ws, *xs; };

// Computes `sums` of some steps of a tile. Weights are loaded into registers two steps before they
// are multiplied, and stored to shared memory one step before.
// x (T, cols) in half precision.
template <Type type, int R, int TOKENS>
static __device__ void multiply_steps(Sums sums[4][4], const TileSteps &tile, const __half *x,
                                      const TilePlan &p, const TileBuffers &buffers) {
    typedef WarpLayout<R, TOKENS> Warps;
    typedef WeightStage<type, R> Weights;
    const int SLICES = STEP_COLS / 16 / Warps::GROUPS; // slices of 16 columns per group of warps
    const int W_SIZE = R * PITCH, X_SIZE = TOKENS * PITCH;
    const TileRows &rows = tile.rows;
    int t0 = tile.t0, first = tile.first, end = tile.end;
    __half *ws = buffers.ws, *xs = buffers.xs;
    bool has_tokens = t0 + Warps::token() < p.T;
    WeightPrefetch<type, R> ahead(rows, p.cols);
    Weights stage;
#pragma unroll
    for (int j = 0; j < Weights::UNITS; j++) stage.load(j, rows, p.cols, first * STEP_COLS);
    for (int s = first + 1; s < first + PREFETCH_STEPS; s++) ahead.prefetch(s, end);
    for (int i = 0; i < p.stages - 1; i++) {
        if (first + i < end)
            copy_x_async<TOKENS>(xs + i * X_SIZE, x, t0, p.T, p.cols, (first + i) * STEP_COLS);
        __pipeline_commit();
    }
#pragma unroll
    for (int i = 0; i < 16; i++) nvcuda::wmma::fill_fragment(sums[i / 4][i % 4], 0.0f);
#pragma unroll
    for (int j = 0; j < Weights::UNITS; j++) {
        stage.store(j, ws);
        if (first + 1 < end) stage.load(j, rows, p.cols, (first + 1) * STEP_COLS);
    }
    int now = 0;             // stage of x that the step multiplies
    int next = p.stages - 1; // stage of x that the step starts to copy to
    for (int s = first; s < end; s++) {
        __pipeline_wait_prior(p.stages - 2);
        __syncthreads(); // this step's weights and x are visible; the step before is finished
        if (s + p.stages - 1 < end)
            copy_x_async<TOKENS>(xs + next * X_SIZE, x, t0, p.T, p.cols,
                                 (s + p.stages - 1) * STEP_COLS);
        __pipeline_commit();
        ahead.prefetch(s + PREFETCH_STEPS, end);
        const __half *w_now = ws + (s - first) % 2 * W_SIZE, *x_now = xs + now * X_SIZE;
        __half *w_next = ws + (s + 1 - first) % 2 * W_SIZE;
        // Stores a part of the next step's weights, and loads the same units of the step after it.
        auto renew_weights = [&](int slice) {
            if constexpr (STORES_FIRST) { // all units in the first slice or in the last
                if (slice != (threadIdx.x < TENSOR_THREADS / 2 ? 0 : SLICES - 1)) return;
                bool exists = (s + 1) * STEP_COLS + Weights::unit_col() < p.cols;
#pragma unroll
                for (int j = 0; j < Weights::UNITS; j++)
                    if (s + 1 < end) stage.store(j, w_next, exists);
#pragma unroll
                for (int j = 0; j < Weights::UNITS; j++)
                    if (s + 2 < end) stage.load_any(j, rows, p.cols, (s + 2) * STEP_COLS);
            } else {
#pragma unroll
                for (int j = slice; j < Weights::UNITS; j += SLICES) {
                    if (s + 1 < end) stage.store(j, w_next);
                    if (s + 2 < end) stage.load(j, rows, p.cols, (s + 2) * STEP_COLS);
                }
            }
        };
#pragma unroll
        for (int i = 0; i < SLICES; i++) {
            int k = (i * Warps::GROUPS + Warps::group()) * 16;
            // Half of the warps store weights while the other half use the tensor cores.
            if (threadIdx.x < TENSOR_THREADS / 2) renew_weights(i);
            if (has_tokens) Warps::multiply(sums, w_now + k, x_now + k);
            if (threadIdx.x >= TENSOR_THREADS / 2) renew_weights(i);
        }
        now = now + 1 < p.stages ? now + 1 : 0, next = next + 1 < p.stages ? next + 1 : 0;
    }
    __syncthreads(); // the buffers may be overwritten
}

// ----------------------------------------------------------------------------
// Multiplication of raw weights (RAW_STAGES)
//
// The units of a step, and the words of their scales, are copied to one of several slots in shared
// memory, which form a ring. A thread converts the units that it copied itself, so it waits only
// for its own copies. A step needs one barrier, as in multiply_steps.
//
// Types of 8 bits and less are converted from the ring to one of two tiles in half precision. Types
// of 16 bits are copied to their final places in a tile and converted in place: the slots of the
// ring are the tiles, and there are no others. Converting weights in the registers of fragments
// instead would convert each weight TOKENS / WARP_TILE times.
//
// Shared memory of a block, in bytes, with RAW_STAGES=4 and tiles of 128 rows and 128 tokens, where
// a tile in half precision and a step of x take 128 * PITCH * 2 = 18,432 each:
//   F16, BF16     5 tiles                           92,160   with 4 steps of x   165,888
//   Q8_0          3 steps of 10,240, 2 tiles        67,584                       141,312
//   Q4_0, Q4_1    3 steps of  5,120, 2 tiles        52,224                       125,952
//   Q5, Q4_K      3 steps of  6,144, 2 tiles        55,296                       129,024
//   Q5_K, Q6_K    3 steps of  7,168 and 8,192       58,368, 61,440      132,096, 135,168
// So one block fits on a multiprocessor with compute capability 8.0 (163 KB) or 9.0 (227 KB), as
// without RAW_STAGES: its 256 threads need 128 registers each for the sums alone, which is all that
// a thread could have if there were a second block. If there is less memory, launch_tensor uses
// fewer steps of x: two or three with 100 KB (8.6, 8.9, 12.0). With 128 rows and 256 tokens, F16
// and BF16 have room for 3 steps in 227 KB (184,320), the others for 4.
//
// There are no bank conflicts: the units of a step and the words of their scales are stored in the
// order of the threads, and each thread reads what it copied. The rows of a tile are 144 bytes
// apart, so consecutive rows begin 4 banks apart. So the 8 rows of 16 bytes that a tensor core's
// load reads together are in different banks. So are the 8 pieces of 16 bytes that 8 threads store
// together: they are from one row (16 bits), from two rows at intervals of 32 bytes (Q8_0), or from
// four rows at intervals of 64 bytes (others).

// Returns how many words of m.scales hold the scale of a unit.
static constexpr __host__ __device__ int raw_words(Type type) {
    switch (type) {
    case Q8_0:
    case Q4_0:
    case Q4_1: return 1;
    case Q5_0:
    case Q5_1:
    case Q4_K: return 2;
    case Q5_K: return 3;
    case Q6_K: return 4;
    default: return 0;
    }
}

// Whether the type's units are converted where they were copied to.
static constexpr __host__ __device__ bool converts_in_place(Type type) {
    return type == F16 || type == BF16;
}

// Returns the bytes of a step's weights in the ring, for tiles of `rows` rows.
static constexpr __host__ __device__ int raw_stage_bytes(Type type, int rows) {
    int units = rows * STEP_COLS / (type == Q8_0 ? 16 : 32);
    return converts_in_place(type) ? rows * PITCH * (int)sizeof(__half)
                                   : units * (int)(sizeof(uint4) + 4 * raw_words(type));
}

// Returns how many steps of weights the ring has if x has `stages` steps. At the barrier before a
// step is multiplied, the weights of the next step have arrived, and those of the `stages` - 2
// steps after it are in flight. A step that is converted in place also stays in the ring while it
// is multiplied, and its slot is refilled only after the next barrier: that takes two more slots.
static constexpr __host__ __device__ int ring_stages(Type type, int stages) {
    return converts_in_place(type) ? stages + 1 : stages - 1;
}

// Returns the bytes of the ring and, unless types are converted in place, two half-precision tiles.
static constexpr __host__ __device__ int raw_weights_bytes(Type type, int rows, int stages) {
    int tiles = converts_in_place(type) ? 0 : 2 * rows * PITCH * (int)sizeof(__half);
    return ring_stages(type, stages) * raw_stage_bytes(type, rows) + tiles;
}

// RawScale<type> reads the scale of 32 elements from m.scales, word by word. `block` is the index
// of these 32 elements among the groups of 32 elements of the flattened matrix.
//   word_at(block, w)   returns the index in m.scales of word w of raw_words(type)
//   make(words, block)  returns the scale, made of these words
template <Type type> struct RawScale { // F16, BF16: no scale
    static __device__ size_t word_at(size_t, int) { return 0; }
    static __device__ typename Format<type>::Scale make(const uint32_t *, unsigned) { return {}; }
};

// Returns half of a word: the lower one if i is even, the upper one if it is odd.
static __device__ uint16_t half_word(uint32_t word, unsigned i) {
    return (uint16_t)(word >> i % 2 * 16);
}

struct RawHalf { // two neighbours share a word, because copies have at least 4 bytes
    static __device__ size_t word_at(size_t block, int) { return block / 2; }
    static __device__ __half make(const uint32_t *words, unsigned block) {
        uint16_t bits = half_word(words[0], block);
        return *(const __half *)&bits;
    }
};
template <> struct RawScale<Q8_0> : RawHalf {};
template <> struct RawScale<Q4_0> : RawHalf {};

template <> struct RawScale<Q4_1> {
    static __device__ size_t word_at(size_t block, int) { return block; }
    static __device__ Format<Q4_1>::Scale make(const uint32_t *words, unsigned) {
        return {*(const __half2 *)words};
    }
};

struct RawFifthBits {
    static __device__ size_t word_at(size_t block, int w) { return 2 * block + w; }
    static __device__ FifthBits::Scale make(const uint32_t *words, unsigned) {
        return {*(const __half2 *)words, words[1]};
    }
};
template <> struct RawScale<Q5_0> : RawFifthBits {};
template <> struct RawScale<Q5_1> : RawFifthBits {};

// For types with large blocks: word 0 is the block's first word, word 1 holds the scale and its
// neighbour's, and the others hold the unit's upper bits.
template <Type type> static __device__ size_t word_of_large_block(size_t block, int w) {
    const int UPPER = raw_words(type) - 2;
    int sub = (int)(block % 8);
    size_t first = block / 8 * (scale_bytes(type) / 4);
    return first + (w == 0 ? 0 : w == 1 ? 1 + sub / 2 : 5 + UPPER * sub + w - 2);
}

template <> struct RawScale<Q4_K> {
    static __device__ size_t word_at(size_t block, int w) {
        return word_of_large_block<Q4_K>(block, w);
    }
    static __device__ Format<Q4_K>::Scale make(const uint32_t *words, unsigned block) {
        return {*(const __half2 *)words, half_word(words[1], block)};
    }
};

template <> struct RawScale<Q5_K> {
    static __device__ size_t word_at(size_t block, int w) {
        return word_of_large_block<Q5_K>(block, w);
    }
    static __device__ Format<Q5_K>::Scale make(const uint32_t *words, unsigned block) {
        return {RawScale<Q4_K>::make(words, block), words[2]};
    }
};

template <> struct RawScale<Q6_K> {
    static __device__ size_t word_at(size_t block, int w) {
        return word_of_large_block<Q6_K>(block, w);
    }
    static __device__ Format<Q6_K>::Scale make(const uint32_t *words, unsigned block) {
        return {*(const __half *)words, half_word(words[1], block), words[2], words[3]};
    }
};

// A thread's part of a tile's raw weights: the same units of a step as in WeightStage. A step in
// the ring is (R, PITCH) elements of 16 bits if the type is converted in place. Otherwise it is the
// units, uint4 (TOTAL,), then the words of their scales (raw_words(type), TOTAL).
template <Type type, int R> struct RawWeights {
    typedef WeightStage<type, R> Units;
    static const int N = Format<type>::N, WORDS = raw_words(type);
    const uint4 *rows[Units::UNITS];      // start of the row of unit j
    const uint32_t *scales[Units::UNITS]; // scales of the matrix of unit j
    size_t first_block[Units::UNITS];     // first block of the row, as in RawScale

    __device__ RawWeights(const TileRows &tile, int cols) {
#pragma unroll
        for (int j = 0; j < Units::UNITS; j++) {
            Mat m;
            size_t first = tile.row_of<R>(Units::unit_row(j) % R, &m) * cols;
            rows[j] = (const uint4 *)m.data + first / N;
            scales[j] = (const uint32_t *)m.scales, first_block[j] = first / 32;
        }
    }

    static __device__ int number(int j) { return threadIdx.x + j * TENSOR_THREADS; }
    static __device__ __half *in_tile(int j, __half *tile) {
        return tile + Units::unit_row(j) * PITCH + Units::unit_col();
    }
    static __device__ uint4 *unit_at(int j, char *stage) {
        return converts_in_place(type) ? (uint4 *)in_tile(j, (__half *)stage)
                                       : (uint4 *)stage + number(j);
    }
    static __device__ uint32_t *words_at(int j, char *stage) {
        return (uint32_t *)(stage + Units::TOTAL * sizeof(uint4)) + number(j);
    }

    // Starts the copy of unit j of the step that begins at column k. Columns beyond the last become
    // zero, and so do their scales.
    __device__ void copy(int j, int cols, int k, char *stage) const {
        if (!Units::is_used(j)) return;
        int col = k + Units::unit_col();
        size_t zeros = col < cols ? 0 : 16;
        if (zeros) col = 0;
        __pipeline_memcpy_async(unit_at(j, stage), rows[j] + col / N, 16, zeros);
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            size_t at = RawScale<type>::word_at(first_block[j] + col / 32, w);
            __pipeline_memcpy_async(words_at(j, stage) + w * Units::TOTAL, scales[j] + at, 4,
                                    zeros / 4);
        }
    }

    // Converts unit j of the step to half precision, once its copy is done. tile (R, PITCH) is the
    // stage itself if the type converts in place.
    __device__ void convert(int j, char *stage, __half *tile) const {
        if (!Units::is_used(j) || type == F16) return;
        uint32_t words[WORDS + 1]; // one more, because an array can't be empty
#pragma unroll
        for (int w = 0; w < WORDS; w++) words[w] = words_at(j, stage)[w * Units::TOTAL];
        // Only its parity matters, the same in every step: a step has an even number of blocks.
        unsigned block = (unsigned)first_block[j] + Units::unit_col() / 32;
        auto unit = Format<type>::make_unit(*unit_at(j, stage), RawScale<type>::make(words, block));
        uint4 halves[N / 8], *to = (uint4 *)in_tile(j, tile);
        unit_to_halves<type>(unit, halves);
#pragma unroll
        for (int i = 0; i < N / 8; i++) to[i] = halves[i];
    }
};

// Computes `sums` of some steps of a tile. While a step is multiplied, the weights of the next are
// converted to half precision, and copies are started: of the weights p.stages steps ahead, and of
// x p.stages - 1 steps ahead.
// x (T, cols) in half precision. shared: raw_weights_bytes, then xs (stages, TOKENS, PITCH).
template <Type type, int R, int TOKENS>
static __device__ void multiply_raw_steps(Sums sums[4][4], const TileSteps &tile, const __half *x,
                                          const TilePlan &p, char *shared) {
    typedef WarpLayout<R, TOKENS> Warps;
    typedef RawWeights<type, R> Weights;
    const bool IN_PLACE = converts_in_place(type);
    const int SLICES = STEP_COLS / 16 / Warps::GROUPS; // slices of 16 columns per group of warps
    const int W_SIZE = R * PITCH, X_SIZE = TOKENS * PITCH, STAGE = raw_stage_bytes(type, R);
    const int n_slots = ring_stages(type, p.stages), first = tile.first, end = tile.end;
    __half *tiles = (__half *)(shared + n_slots * STAGE); // (2, R, PITCH) unless IN_PLACE
    __half *xs = (__half *)(shared + raw_weights_bytes(type, R, p.stages));
    bool has_tokens = tile.t0 + Warps::token() < p.T;
    Weights weights(tile.rows, p.cols);
    auto copy_x = [&](int step, int slot) {
        copy_x_async<TOKENS>(xs + slot * X_SIZE, x, tile.t0, p.T, p.cols, step * STEP_COLS);
    };
    auto tile_of = [&](int step, int slot) { // the step in half precision
        return IN_PLACE ? (__half *)(shared + slot * STAGE) : tiles + (step - first) % 2 * W_SIZE;
    };
    // Converts unit j of a step, which is in `slot` of the ring. Then starts the copy of the same
    // unit p.stages - 1 steps ahead: to the same slot, or with IN_PLACE, to the slot of
    // step `step` - 2.
    auto renew_weights = [&](int j, int step, int slot) {
        int later = step + p.stages - 1, free_slot = slot;
        if (IN_PLACE) free_slot = slot >= 2 ? slot - 2 : slot - 2 + n_slots;
        if (step < end) weights.convert(j, shared + slot * STAGE, tile_of(step, slot));
        if (later < end) weights.copy(j, p.cols, later * STEP_COLS, shared + free_slot * STAGE);
    };
    for (int i = 0; i < p.stages - 1; i++) {
        if (first + i < end) {
            copy_x(first + i, i);
#pragma unroll
            for (int j = 0; j < Weights::Units::UNITS; j++)
                weights.copy(j, p.cols, (first + i) * STEP_COLS, shared + i * STAGE);
        }
        __pipeline_commit();
    }
#pragma unroll
    for (int i = 0; i < 16; i++) nvcuda::wmma::fill_fragment(sums[i / 4][i % 4], 0.0f);
    __pipeline_wait_prior(p.stages - 2); // this thread's units of the first step have arrived
#pragma unroll
    for (int j = 0; j < Weights::Units::UNITS; j++) renew_weights(j, first, 0);
    __pipeline_commit();
    int slot = 0, x_slot = 0; // slots of the step that is multiplied
    for (int s = first; s < end; s++) {
        // This thread's units of the next step have arrived, and its part of this step's x.
        __pipeline_wait_prior(p.stages - 2);
        __syncthreads(); // this step's weights and x are visible; the step before is finished
        int next_slot = slot + 1 < n_slots ? slot + 1 : 0;
        int last_x_slot = x_slot > 0 ? x_slot - 1 : p.stages - 1;
        if (s + p.stages - 1 < end) copy_x(s + p.stages - 1, last_x_slot);
        const __half *w_now = tile_of(s, slot), *x_now = xs + x_slot * X_SIZE;
        auto renew_some = [&](int slice) {
#pragma unroll
            for (int j = slice; j < Weights::Units::UNITS; j += SLICES)
                renew_weights(j, s + 1, next_slot);
        };
#pragma unroll
        for (int i = 0; i < SLICES; i++) {
            int k = (i * Warps::GROUPS + Warps::group()) * 16;
            // Half of the warps convert weights while the other half use the tensor cores.
            if (threadIdx.x < TENSOR_THREADS / 2) renew_some(i);
            if (has_tokens) Warps::multiply(sums, w_now + k, x_now + k);
            if (threadIdx.x >= TENSOR_THREADS / 2) renew_some(i);
        }
        __pipeline_commit();
        slot = next_slot, x_slot = x_slot + 1 < p.stages ? x_slot + 1 : 0;
    }
    __syncthreads(); // the buffers may be overwritten
}

// ----------------------------------------------------------------------------
// Results

// A thread's part of a tile's finished sums, in quads: the sums of 4 rows for one token. A thread
// has QUADS quads of a tile, TENSOR_THREADS apart. To save registers, it handles them in PARTS
// parts of PART_QUADS quads each, one after another.
template <int R, int TOKENS> struct SumQuads {
    static const int QUADS = TOKENS * R / 4 / TENSOR_THREADS, PART_QUADS = QUADS < 16 ? QUADS : 16,
                     PARTS = QUADS / PART_QUADS;
    float4 y[PART_QUADS];
    int first;

    __device__ SumQuads(int part) : first(threadIdx.x + part * PART_QUADS * TENSOR_THREADS) {}
    __device__ int index(int j) const { return first + j * TENSOR_THREADS; }
    __device__ int token(int j) const { return index(j) / (R / 4); }
    __device__ int first_row(int j) const { return index(j) % (R / 4) * 4; }

    // tile (TOKENS, SUM_PITCH)
    __device__ void read(const float *tile) {
        const int PITCH_OF_SUMS = WarpLayout<R, TOKENS>::SUM_PITCH;
#pragma unroll
        for (int j = 0; j < PART_QUADS; j++)
            y[j] = *(const float4 *)(tile + token(j) * PITCH_OF_SUMS + first_row(j));
    }
    __device__ void write_partial(float4 *partial) const {
#pragma unroll
        for (int j = 0; j < PART_QUADS; j++) partial[index(j)] = y[j];
    }
    __device__ void clear() {
#pragma unroll
        for (int j = 0; j < PART_QUADS; j++) y[j] = make_float4(0, 0, 0, 0);
    }
    __device__ void add(const float4 other[PART_QUADS]) {
#pragma unroll
        for (int j = 0; j < PART_QUADS; j++) {
            y[j].x += other[j].x, y[j].y += other[j].y;
            y[j].z += other[j].z, y[j].w += other[j].w;
        }
    }
    __device__ void add_partial(const float4 *partial) {
        float4 other[PART_QUADS];
#pragma unroll
        for (int j = 0; j < PART_QUADS; j++) other[j] = partial[index(j)];
        add(other);
    }

    // Stores the tile whose first row and token are `row` and t0 to out (T, rows) of product p.
    __device__ void store(const Product &p, int row, int t0, int T) {
        const int rows = p.w.rows;
        float *out = p.out + (size_t)t0 * rows + row;
        if (rows % 4) return store_unaligned(p, row, t0, T);
        float4 before[PART_QUADS]; // all are loaded before the first is stored
#pragma unroll
        for (int j = 0; j < PART_QUADS; j++) {
            bool needed = p.accumulate && t0 + token(j) < T && row + first_row(j) < rows;
            before[j] = needed ? *(const float4 *)(out + (size_t)token(j) * rows + first_row(j))
                               : make_float4(0, 0, 0, 0);
        }
        add(before);
#pragma unroll
        for (int j = 0; j < PART_QUADS; j++)
            if (t0 + token(j) < T && row + first_row(j) < rows)
                *(float4 *)(out + (size_t)token(j) * rows + first_row(j)) = y[j];
    }

    // Does the same where a quad may cross the end of a row or is not aligned.
    __device__ void store_unaligned(const Product &p, int row, int t0, int T) const {
        for (int j = 0; j < PART_QUADS; j++) {
            const float four[4] = {y[j].x, y[j].y, y[j].z, y[j].w};
            int t = t0 + token(j), r = row + first_row(j);
            for (int i = 0; i < 4 && t < T && r + i < p.w.rows; i++)
                store_sum(p.out + (size_t)t * p.w.rows + r + i, four[i], p.accumulate);
        }
    }

    // Stores SwiGLU of the tile's lower half, the gate, and its upper half.
    __device__ void store_gated(const Product &p, int row, int t0, const TilePlan &plan) const {
#pragma unroll
        for (int j = 0; j < PART_QUADS; j++) {
            float four[4] = {y[j].x, y[j].y, y[j].z, y[j].w};
            int t = t0 + token(j), r = row + first_row(j);
            size_t at = (size_t)t * p.w.rows + r;
            // Lanes of the lower half receive `up` from the lane R / 8 higher, whose quad is R / 2
            // rows further.
#pragma unroll
            for (int i = 0; i < 4; i++)
                four[i] = swiglu(four[i], __shfl_xor_sync(ALL_LANES, four[i], R / 8));
            if (first_row(j) >= R / 2 || t >= plan.T || r >= p.w.rows) continue;
            if (p.w.rows % 4 == 0) store_four_with_copy(p.out, plan.half_copy, at, four);
            else
                for (int i = 0; i < 4 && r + i < p.w.rows; i++)
                    store_with_copy(p.out, plan.half_copy, at + i, four[i]);
        }
    }
};

// Returns where a block writes its partial sums (SIZE,) of a tile that it shares with others. At
// most two of its tiles are shared: one whose first step it computes, and one that an earlier block
// began.
template <int SIZE>
static __device__ float4 *partial_of(const TilePlan &p, int block, bool has_first_step) {
    return (float4 *)(p.partials + (2 * (size_t)block + has_first_step) * SIZE);
}

// Writes this block's partial sums of a tile that the blocks from `from` to `to` share. Returns
// whether it is the last of them to do so.
template <int R, int TOKENS>
static __device__ bool is_last_of_tile(const float *tile, const TilePlan &p, bool has_first_step,
                                       int from, int to) {
    typedef SumQuads<R, TOKENS> Quads;
    for (int i = 0; i < Quads::PARTS; i++) {
        Quads y(i);
        y.read(tile);
        y.write_partial(partial_of<R * TOKENS>(p, blockIdx.x, has_first_step));
    }
    return is_last_block(&p.counters[from], to - from + 1);
}

// Computes the products of many tokens.
// x (T, cols) in half precision; cols is a multiple of 32. Dynamic shared memory: TileBuffers, or
// what multiply_raw_steps needs; after a tile's last step the same memory holds its sums (TOKENS,
// SUM_PITCH).
// Grid: at most as many blocks as there are steps; block: TENSOR_THREADS threads.
template <Type type, int R, int TOKENS>
static __global__ void __launch_bounds__(TENSOR_THREADS, 1)
    matmul_tensor(const __grid_constant__ Products products, const __half *x,
                  const __grid_constant__ TilePlan p) {
    LAUNCH_SHARED(shared);
    __half *ws = (__half *)shared;
    [[maybe_unused]] TileBuffers buffers = {ws, ws + 2 * R * PITCH};
    int step = first_step(p, blockIdx.x), end = first_step(p, blockIdx.x + 1);
    prefetch_first<type, R>(products, p, step);
    for (int n; step < end; step += n) {
        int tile = step / p.steps, first = step % p.steps, t0 = tile % p.token_tiles * TOKENS;
        n = min(p.steps - first, end - step);
        TileSteps steps = {TileRows::of<R>(products, p, tile), t0, first, first + n};
        Sums sums[4][4];
        if constexpr (RAW_STAGES > 0)
            multiply_raw_steps<type, R, TOKENS>(sums, steps, x, p, (char *)shared);
        else multiply_steps<type, R, TOKENS>(sums, steps, x, p, buffers);
        WarpLayout<R, TOKENS>::add_groups(sums, shared);
        int from = block_of_step(p, tile * p.steps);
        int to = block_of_step(p, (tile + 1) * p.steps - 1);
        if (from < to && !is_last_of_tile<R, TOKENS>(shared, p, first == 0, from, to)) continue;
        for (int i = 0; i < SumQuads<R, TOKENS>::PARTS; i++) {
            SumQuads<R, TOKENS> y(i);
            if (from == to) y.read(shared);
            else y.clear();
            for (int b = from; from < to && b <= to; b++) // for a shared tile only
                y.add_partial(partial_of<R * TOKENS>(p, b, b == from));
            const TileRows &rows = steps.rows;
            if (p.gated) y.store_gated(products.list[0], rows.row, t0, p);
            else y.store(products.list[rows.product], rows.row, t0, p.T);
        }
        __syncthreads(); // all threads have read the sums
    }
}

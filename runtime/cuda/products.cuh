// Matrix products without tensor cores: one token (matvec), float32 matrices (matmul_tiles), and
// any shape (matmul_any). One launch computes up to three products of the same x.
#pragma once
#include "formats.cuh"

// out (T, w.rows) = x (T, w.cols) w^T; or out += x w^T, with `accumulate`
typedef struct {
    float *out;
    Mat w;
    bool accumulate;
} Product;

// The products of one launch. Their matrices have the same type and number of columns.
typedef struct {
    Product list[3];
    int n;
} Products;

// A group of rows: which product it belongs to, and its first row.
typedef struct { int product, row; } RowGroup;

// Returns group `index` when every matrix is cut into groups of `size` rows, the last of which may
// be shorter. Beyond the last group, `product` is products.n.
static __device__ RowGroup find_rows(const Products &products, int index, int size) {
    RowGroup at = {0, 0};
    for (; at.product < products.n; at.product++) {
        int groups = (products.list[at.product].w.rows + size - 1) / size;
        if (index < groups) break;
        index -= groups;
    }
    at.row = index * size;
    return at;
}

static __device__ void store_sum(float *out, float y, bool accumulate) {
    *out = accumulate ? *out + y : y;
}

// ----------------------------------------------------------------------------
// Any type and shape

// Computes one row for one token in each warp.
// x (T, cols). Grid: (groups of WARPS rows, T); block: WARPS warps.
static __global__ void matmul_any(const __grid_constant__ Products products, const float *x,
                                  int cols) {
    int lane = threadIdx.x % 32, t = blockIdx.y;
    RowGroup at = find_rows(products, blockIdx.x * WARPS + threadIdx.x / 32, 1);
    if (at.product == products.n) return;
    const Product &p = products.list[at.product];
    float sum = 0;
    for (int i = lane; i < cols; i += 32)
        sum += element_at(p.w, (size_t)at.row * cols + i) * x[(size_t)t * cols + i];
    sum = warp_sum(sum);
    if (lane == 0) store_sum(&p.out[(size_t)t * p.w.rows + at.row], sum, p.accumulate);
}

// ----------------------------------------------------------------------------
// One token

// A unit is one 16-byte load: N elements of a row (see Format in formats.cuh).
enum {
    WARP_ROWS = 2, // rows that a warp multiplies together
    UNROLL = 2,    // units of each row that a lane loads together
};

// Returns the index in shared memory of element i of x. After every 32 floats, 4 are unused:
// neighbouring lanes read float4 that are N floats apart, which would fall in the same few banks
// without these gaps.
static __host__ __device__ unsigned padded(unsigned i) { return i + i / 32 * 4; }

// Adds to sum[r] the product of row r's unit and xs (N,), for each of the rows.
template <Type type>
static __device__ void multiply_units(const typename Format<type>::Unit units[WARP_ROWS],
                                      const float *xs, float sum[WARP_ROWS]) {
    const int N = Format<type>::N;
    float x[N], w[N];
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        float4 four = *(const float4 *)(xs + j);
        x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
    }
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        float dot = 0;
        Format<type>::unpack(units[r], w);
#pragma unroll
        for (int j = 0; j < N; j++) dot += w[j] * x[j];
        sum[r] += Format<type>::scale(units[r]) * dot;
    }
}

// A lane's part of its warp's rows: the UNROLL units `unit`, `unit` + 32, ... of each row. Each
// lane has a different `unit`.
template <Type type> struct UnitBatch {
    typename Format<type>::Unit units[UNROLL][WARP_ROWS];

    // Loads from the rows at `at`. In place of a row beyond the end of the matrix, it loads the
    // last row; matvec does not store that sum. Units beyond the columns are left as they are.
    __device__ void load(const Products &products, RowGroup at, int cols, int unit) {
        const int N = Format<type>::N;
        if (at.product == products.n) return;
        const Mat &w = products.list[at.product].w;
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            for (int r = 0; r < WARP_ROWS; r++) {
                int row = at.row + r < w.rows ? at.row + r : w.rows - 1, i = (unit + 32 * u) * N;
                if (i < cols) units[u][r] = load_unit<type>(w, ((size_t)row * cols + i) / N);
            }
    }

    // Adds to `sum` the products with xs (cols,), padded.
    __device__ void multiply(const float *xs, int cols, int unit, float sum[WARP_ROWS]) const {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int i = (unit + 32 * u) * Format<type>::N;
            if (i < cols) multiply_units<type>(units[u], xs + padded(i), sum);
        }
    }
};

// Computes the products for one token. The first weights are requested before x is read, and each
// next batch before the current one is multiplied.
// x (cols,); cols is a multiple of 32. Dynamic shared memory: x, padded. Grid: any number of
// blocks, which take WARP_ROWS rows per warp in turns; block: WARPS warps.
template <Type type>
static __global__ void __launch_bounds__(32 * WARPS)
    matvec(const __grid_constant__ Products products, const float *x, int cols) {
    LAUNCH_SHARED(xs); // declares float *xs, the dynamic shared memory
    const int step = 32 * UNROLL;
    int lane = threadIdx.x % 32, group = blockIdx.x * WARPS + threadIdx.x / 32, unit = lane;
    RowGroup at = find_rows(products, group, WARP_ROWS);
    UnitBatch<type> now, next;
    now.load(products, at, cols, unit);
    for (int i = threadIdx.x; i < cols; i += 32 * WARPS) xs[padded(i)] = x[i];
    __syncthreads();
    float sum[WARP_ROWS] = {0};
    while (at.product < products.n) {
        // Whether this batch is the last of its rows; the same for all lanes of the warp.
        bool row_ends = (unit - lane + step) * Format<type>::N >= cols;
        int next_unit = row_ends ? lane : unit + step;
        RowGroup next_at = at;
        if (row_ends) {
            group += gridDim.x * WARPS;
            next_at = find_rows(products, group, WARP_ROWS);
        }
        next.load(products, next_at, cols, next_unit);
        now.multiply(xs, cols, unit, sum);
        if (row_ends) {
            const Product &p = products.list[at.product];
            for (int r = 0; r < WARP_ROWS; r++) {
                float y = warp_sum(sum[r]);
                if (lane == 0 && at.row + r < p.w.rows)
                    store_sum(&p.out[at.row + r], y, p.accumulate);
                sum[r] = 0;
            }
        }
        now = next, at = next_at, unit = next_unit;
    }
}

// ----------------------------------------------------------------------------
// Many tokens, float32 weights

enum { TILE = 64 }; // rows and tokens of a tile

// Each block computes a tile of TILE rows and TILE tokens, each thread 4 by 4 of it.
// x (T, cols); cols is a multiple of 32. Grid: (row tiles, token tiles), exactly one block for each
// tile; block: 256 threads.
static __global__ void __launch_bounds__(256)
    matmul_tiles(const __grid_constant__ Products products, const float *x, int cols, int T) {
    typedef Format<F32> F;
    const int N = F::N, K = 32;
    // K columns of the tile's rows of w, and of its tokens of x, as [column][row or token]. The
    // last 4 floats of each column are unused.
    __shared__ __align__(16) float ws[K][TILE + 4], xs[K][TILE + 4];
    RowGroup at = find_rows(products, blockIdx.x, TILE);
    const Product &p = products.list[at.product];
    int t0 = blockIdx.y * TILE;
    int row4 = threadIdx.x % 16 * 4, token4 = threadIdx.x / 16 * 4; // first of this thread's four
    float sum[4][4] = {{0}};                                        // (tokens, rows)
    for (int k = 0; k < cols; k += K) {
        for (int i = threadIdx.x; i < TILE * K / N; i += 256) {
            int r = i % TILE, u = i / TILE * N;
            float w[N], scale = 0;
            for (int j = 0; j < N; j++) w[j] = 0;
            if (at.row + r < p.w.rows) {
                F::Unit unit = load_unit<F32>(p.w, ((size_t)(at.row + r) * cols + k + u) / N);
                F::unpack(unit, w);
                scale = F::scale(unit);
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
            float4 w4 = *(const float4 *)&ws[i][row4], x4 = *(const float4 *)&xs[i][token4];
            float of_rows[4] = {w4.x, w4.y, w4.z, w4.w}, of_tokens[4] = {x4.x, x4.y, x4.z, x4.w};
            for (int t = 0; t < 4; t++)
                for (int r = 0; r < 4; r++) sum[t][r] += of_tokens[t] * of_rows[r];
        }
        __syncthreads();
    }
    for (int t = 0; t < 4; t++)
        for (int r = 0; r < 4; r++)
            if (t0 + token4 + t < T && at.row + row4 + r < p.w.rows) {
                float *out = &p.out[(size_t)(t0 + token4 + t) * p.w.rows + at.row + row4 + r];
                store_sum(out, sum[t][r], p.accumulate);
            }
}

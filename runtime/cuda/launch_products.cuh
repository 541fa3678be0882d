// Chooses the kernel and the grid of each matrix product.
#pragma once
#include <algorithm>
#include "session.cuh"
#include "tensor_products.cuh"

// Returns where a kernel that writes x (T, ...) must also write it in half precision, and records x
// as the source of that copy. Returns NULL if no copy is wanted: outside a pass, the caller may
// change x, and products of one token or of a float32 model read float32.
static __half *half_copy_for(Cuda *c, const float *x, int T) {
    bool is_wanted = c->in_pass && T > 1 && !c->float_cache;
    c->half_x_source = is_wanted ? x : NULL;
    if (!is_wanted) return NULL;
    std::swap(c->half_x, c->spare_half_x); // the kernel may read the earlier copy
    return c->half_x;
}

// Whether the kernels can load rows in 16-byte units. The groups of INT8_GROUPS, which llama2.c
// writes, may have any length, so a unit could contain elements of several groups.
static bool has_units(const Mat *m) { return m->cols % 32 == 0 && m->type != INT8_GROUPS; }

// Whether products with w run on the tensor cores.
static bool uses_tensor_cores(const Mat *w, int T) {
    return has_units(w) && T > 1 && w->type != F32;
}

// Returns the number of groups of `size` rows. The last group of each matrix may be smaller.
static unsigned count_groups(const Products &products, int size) {
    unsigned n = 0;
    for (int i = 0; i < products.n; i++) n += ceil_div(products.list[i].w.rows, size);
    return n;
}

// ----------------------------------------------------------------------------
// One token

typedef void MatvecKernel(Products, const float *, int);

static MatvecKernel *matvec_kernel(Type type) {
    switch (type) {
    case F32: return matvec<F32>;
    case F16: return matvec<F16>;
    case BF16: return matvec<BF16>;
    case Q8_0: return matvec<Q8_0>;
    case Q4_0: return matvec<Q4_0>;
    case Q4_1: return matvec<Q4_1>;
    case Q5_0: return matvec<Q5_0>;
    case Q5_1: return matvec<Q5_1>;
    case Q4_K: return matvec<Q4_K>;
    case Q5_K: return matvec<Q5_K>;
    default: return matvec<Q6_K>;
    }
}

// Launches as many blocks as can run at the same time, or fewer if there is less work. Returns
// false if x does not fit in shared memory.
static bool launch_matvec(Cuda *c, const Products &products, const float *x) {
    const Mat &w = products.list[0].w;
    MatvecKernel *kernel = matvec_kernel(w.type);
    size_t shared = sizeof(float) * padded(w.cols);
    int resident = 0; // blocks that fit on a multiprocessor
    if (shared > c->max_shared) return false;
    if (shared > DEFAULT_SHARED) raise_shared_limit(c, (const void *)kernel);
    CUDA(c, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, (const void *)kernel,
                                                          32 * WARPS, shared));
    unsigned blocks = ceil_div(count_groups(products, WARP_ROWS), WARPS);
    unsigned max_blocks = c->multiprocessors * std::max(resident, 1);
    launch(c, kernel, std::min(blocks, max_blocks), 32 * WARPS, shared, products, x, w.cols);
    return true;
}

// ----------------------------------------------------------------------------
// Many tokens on the tensor cores

typedef void TensorKernel(Products, const __half *, TilePlan);

template <int R, int TOKENS> static TensorKernel *tensor_kernel(Type type) {
    switch (type) {
    case F16: return matmul_tensor<F16, R, TOKENS>;
    case BF16: return matmul_tensor<BF16, R, TOKENS>;
    case Q8_0: return matmul_tensor<Q8_0, R, TOKENS>;
    case Q4_0: return matmul_tensor<Q4_0, R, TOKENS>;
    case Q4_1: return matmul_tensor<Q4_1, R, TOKENS>;
    case Q5_0: return matmul_tensor<Q5_0, R, TOKENS>;
    case Q5_1: return matmul_tensor<Q5_1, R, TOKENS>;
    case Q4_K: return matmul_tensor<Q4_K, R, TOKENS>;
    case Q5_K: return matmul_tensor<Q5_K, R, TOKENS>;
    default: return matmul_tensor<Q6_K, R, TOKENS>;
    }
}

// The tile sizes for which kernels exist, the largest first.
static const struct TileShape {
    int rows, tokens;
    TensorKernel *(*kernel)(Type);
} TILE_SHAPES[] = {
    {128, 256, tensor_kernel<128, 256>},
    {128, 128, tensor_kernel<128, 128>},
    {64, 128, tensor_kernel<64, 128>},
};

enum {
    // max stages of x in shared memory; at least 2 are needed
    MAX_STAGES = RAW_STAGES > 0 ? RAW_STAGES : 3,
    MAX_SHARERS = 3,     // max blocks that share a tile, unless it has the smallest shape
    MIN_BLOCK_STEPS = 4, // min steps of a block
};

// Returns the bytes of shared memory that a tile needs. Its buffers (weights of two steps or, with
// RAW_STAGES, of more; x of `stages` steps) and later its sums use the same memory.
static size_t tile_bytes(const TileShape &shape, Type type, int stages) {
    const size_t row = sizeof(__half) * PITCH;
    size_t weights =
        RAW_STAGES > 0 ? raw_weights_bytes(type, shape.rows, stages) : 2 * row * shape.rows;
    return std::max(weights + row * stages * shape.tokens,
                    sizeof(float) * (shape.rows + 4) * shape.tokens);
}

static int count_tiles(const Products &products, const TileShape &shape, int T, bool gated) {
    int row_tiles = gated ? ceil_div(products.list[0].w.rows, shape.rows / 2)
                          : count_groups(products, shape.rows);
    return row_tiles * ceil_div(T, shape.tokens);
}

// Launches one block per multiprocessor, or fewer if each would get less than MIN_BLOCK_STEPS
// steps. Uses the largest tiles that fit in shared memory and are shared by few blocks: the last
// block of a tile adds up the partial sums of all, which takes time. Returns false if no tile fits.
// x (T, cols); gated: the first product's out becomes SwiGLU of both.
static bool launch_tensor(Cuda *c, const Products &products, const float *x, int T, bool gated) {
    int cols = products.list[0].w.cols, stages = MAX_STAGES;
    Type type = products.list[0].w.type;
    size_t n = (size_t)T * cols, max_shared = c->max_shared - 128; // room for is_last_block's flag
    const TileShape *shape = TILE_SHAPES, *smallest = std::end(TILE_SHAPES) - 1;
    auto is_too_large = [&](const TileShape &s) {
        bool is_half_empty = T <= s.tokens - 128; // at least 128 unused tokens
        return is_half_empty || tile_bytes(s, type, 2) > max_shared
               || count_tiles(products, s, T, gated) * MAX_SHARERS < c->multiprocessors;
    };
    while (shape < smallest && is_too_large(*shape)) shape++;
    while (stages > 2 && tile_bytes(*shape, type, stages) > max_shared) stages--;
    size_t shared = tile_bytes(*shape, type, stages);
    if (shared > max_shared) return false;
    TensorKernel *kernel = shape->kernel(type);
    if (c->half_x_source != x) launch(c, convert, ceil_div(n, 256), 256, 0, c->half_x, x, n);
    const __half *half_x = c->half_x;
    TilePlan plan = {};
    plan.cols = cols, plan.T = T;
    plan.token_tiles = ceil_div(T, shape->tokens);
    plan.steps = ceil_div(cols, STEP_COLS);
    plan.tiles = count_tiles(products, *shape, T, gated);
    plan.stages = stages;
    plan.gated = gated;
    plan.half_copy = gated ? half_copy_for(c, products.list[0].out, T) : NULL;
    plan.partials = c->partials, plan.counters = c->counters;
    size_t max_blocks = std::max<size_t>(1, (size_t)plan.tiles * plan.steps / MIN_BLOCK_STEPS);
    unsigned blocks = std::min<unsigned>((unsigned)max_blocks, c->multiprocessors);
    if (shared > DEFAULT_SHARED) raise_shared_limit(c, (const void *)kernel);
    launch(c, kernel, blocks, TENSOR_THREADS, shared, products, half_x, plan);
    return true;
}

// ----------------------------------------------------------------------------
// Any products

// matmul_any computes what no faster kernel can: rows without 16-byte units, or shapes that do not
// fit in shared memory.
static void launch_products(Cuda *c, const Products &products, const float *x, int T) {
    const Mat *w = &products.list[0].w;
    bool on_tensor_cores = uses_tensor_cores(w, T);
    if (has_units(w) && T == 1 && launch_matvec(c, products, x)) return;
    if (on_tensor_cores && launch_tensor(c, products, x, T, false)) return;
    if (!has_units(w) || T == 1 || on_tensor_cores) {
        dim3 grid(ceil_div(count_groups(products, 1), WARPS), T);
        launch(c, matmul_any, grid, 32 * WARPS, 0, products, x, w->cols);
        return;
    }
    dim3 grid(count_groups(products, TILE), ceil_div(T, TILE));
    launch(c, matmul_tiles, grid, 256, 0, products, x, w->cols, T);
}

// Computes n products of the same x (T, cols), in as few launches as their types allow.
static void matmul(Cuda *c, const Product *products, int n, const float *x, int T) {
    for (int i = 0; i < n;) {
        Products group = {};
        const Mat &w = products[i].w;
        for (group.n = 0; i < n && group.n < 3; i++) {
            const Mat &other = products[i].w;
            if (other.type != w.type || has_units(&other) != has_units(&w)) break;
            group.list[group.n++] = products[i];
        }
        launch_products(c, group, x, T);
    }
}

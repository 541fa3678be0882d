// Attention of many tokens on the tensor cores, for a cache in half precision: tiles of queries and
// keys with an online softmax (Dao et al. 2022, "FlashAttention").
#pragma once
#include "attention.cuh"
#include "tensor_products.cuh"

// Where a warp stores the results of its 16 queries: tokens t to t + 15 of head h. Tokens from T on
// are not stored.
struct FlashOutput {
    float *out;        // (T, n_heads, head_dim)
    __half *half_copy; // the same in half precision, or NULL
    int h, t, T;
};

// Each warp computes 16 queries of one head. All warps of a block share tiles of KEYS positions.
// D: head_dim rounded up to 64, 128 or 256.
template <int D> struct Flash {
    enum {
        N_WARPS = D > 128 ? 2 : 4,
        QUERIES = 16 * N_WARPS,
        KEYS = 4096 / D,        // positions of a tile: 64, 32 or 16
        LANE_SCORES = KEYS / 2, // scores of a lane: two lanes share a row
    };
    // Elements between the starts of consecutive rows in shared memory. The last 8 of a row (4 for
    // scores) are unused and prevent bank conflicts.
    enum { QKV_PITCH = D + 8, SCORE_PITCH = KEYS + 4 };
    typedef nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, __half,
                                   nvcuda::wmma::row_major>
        Rows;

    // Starts the copy of KEYS keys or values of `from` (positions, width), beginning at position
    // `first`, to `to` (KEYS, QKV_PITCH). Positions from `end` on become zero.
    static __device__ void copy_async(__half *to, const __half *from, int width, int first,
                                      int end) {
#pragma unroll
        for (int j = 0; j < KEYS * D / 8 / (32 * N_WARPS); j++) {
            int i = threadIdx.x + j * 32 * N_WARPS, row = i / (D / 8), d = i % (D / 8) * 8;
            bool exists = first + row < end && d < width;
            const __half *source = exists ? from + (size_t)(first + row) * width + d : from;
            __pipeline_memcpy_async(to + row * QKV_PITCH + d, source, 16, exists ? 0 : 16);
        }
        __pipeline_commit();
    }

    // Loads the block's queries of head h, from token t0 on, to qs (QUERIES, QKV_PITCH).
    // q (T, n_heads, head_dim)
    static __device__ void load_queries(__half *qs, const float *q, const LayerCache &c, int h,
                                        int t0, int T) {
#pragma unroll 16
        for (int i = threadIdx.x; i < QUERIES * D / 2; i += 32 * N_WARPS) {
            int t = t0 + i / (D / 2), d = i % (D / 2) * 2;
            bool exists = t < T && d < c.head_dim;
            const float *from = q + ((size_t)t * c.n_heads + h) * c.head_dim + d;
            float2 pair = exists ? *(const float2 *)from : make_float2(0, 0);
            *(__half2 *)(qs + i / (D / 2) * QKV_PITCH + d) = to_halves(pair.x, pair.y);
        }
    }

    // Computes this warp's scores (16, SCORE_PITCH) of qs (16, QKV_PITCH) and ks (KEYS, QKV_PITCH).
    static __device__ void score(float *scores, const __half *qs, const __half *ks) {
        using namespace nvcuda::wmma;
        Sums sums[KEYS / 16];
        for (int j = 0; j < KEYS / 16; j++) fill_fragment(sums[j], 0.0f);
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            Rows a;
            load_matrix_sync(a, qs + d, QKV_PITCH);
#pragma unroll
            for (int j = 0; j < KEYS / 16; j++) {
                fragment<matrix_b, 16, 16, 16, __half, col_major> b;
                load_matrix_sync(b, ks + 16 * j * QKV_PITCH + d, QKV_PITCH);
                mma_sync(sums[j], a, b, sums[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++)
            store_matrix_sync(scores + 16 * j, sums[j], SCORE_PITCH, mem_row_major);
        __syncwarp();
    }

    // Replaces the scores of positions from..n-1 by weights 2^(scale * score - max), and all others
    // by 0; from and n may be outside the tile. Weights are in half precision and overwrite the
    // first half of their row of scores. Updates the max of this lane's row and the lane's part of
    // the row's sum of weights. Returns the factor that earlier sums must be multiplied by.
    // Lanes 2 r and 2 r + 1 share row r: of each 4 scores, the first lane holds the first two.
    static __device__ float softmax_step(float *scores, float scale, int from, int n, float &max,
                                         float &sum) {
        int row = threadIdx.x % 32 / 2, begin = threadIdx.x % 2 * 2;
        float2 pairs[LANE_SCORES / 2];
        float new_max = max;
#pragma unroll
        for (int i = 0; i < LANE_SCORES / 2; i++) {
            int at = begin + 4 * i;
            pairs[i] = *(const float2 *)(scores + row * SCORE_PITCH + at);
            pairs[i].x = at >= from && at < n ? scale * pairs[i].x : -INFINITY;
            pairs[i].y = at + 1 >= from && at + 1 < n ? scale * pairs[i].y : -INFINITY;
            new_max = fmaxf(new_max, fmaxf(pairs[i].x, pairs[i].y));
        }
        new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, 1));
        float base = new_max == -INFINITY ? 0 : new_max; // 0: no position seen yet
        float rescale = exp2f(max - base);
        max = new_max, sum *= rescale;
        __syncwarp(); // both lanes have read the row
#pragma unroll
        for (int i = 0; i < LANE_SCORES / 2; i++) {
            __half2 weights = __floats2half2_rn(exp2f(pairs[i].x - base), exp2f(pairs[i].y - base));
            float2 rounded = __half22float2(weights);
            sum += rounded.x + rounded.y; // sums the same rounded weights that multiply values
            *(__half2 *)((__half *)(scores + row * SCORE_PITCH) + begin + 4 * i) = weights;
        }
        return rescale;
    }

    // Multiplies the sums (16, D) by rescale (16,), row by row, then adds the products of the
    // weights, which softmax_step left in `scores`, and the values vs (KEYS, QKV_PITCH).
    static __device__ void add_values(Sums sums[D / 16], const float *scores, const float *rescale,
                                      const __half *vs) {
        using namespace nvcuda::wmma;
        // Copies each row's factor to all columns: with a pitch of 0, every column is read from the
        // same 16 floats.
        Sums factors;
        load_matrix_sync(factors, rescale, 0, mem_col_major);
#pragma unroll
        for (int d = 0; d < D / 16; d++)
            for (int e = 0; e < factors.num_elements; e++) sums[d].x[e] *= factors.x[e];
#pragma unroll
        for (int k = 0; k < KEYS; k += 16) {
            Rows a;
            load_matrix_sync(a, (const __half *)scores + k, 2 * SCORE_PITCH);
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                fragment<matrix_b, 16, 16, 16, __half, row_major> b;
                load_matrix_sync(b, vs + k * QKV_PITCH + 16 * d, QKV_PITCH);
                mma_sync(sums[d], a, b, sums[d]);
            }
        }
    }

    // Stores this warp's sums (16, D), divided by their rows' sums of weights. `sum` is the
    // whole sum of this lane's row, the same in both lanes of a row. scratch (16, SCORE_PITCH).
    static __device__ void store(Sums sums[D / 16], float *scratch, float sum, const LayerCache &c,
                                 const FlashOutput &to) {
        int row = threadIdx.x % 32 / 2, begin = threadIdx.x % 2 * 8;
        size_t at = ((size_t)(to.t + row) * c.n_heads + to.h) * c.head_dim + begin;
#pragma unroll
        for (int i = 0; i < D / 16; i++, at += 16) {
            __syncwarp(); // all lanes have read the previous 16 columns
            nvcuda::wmma::store_matrix_sync(scratch, sums[i], SCORE_PITCH,
                                            nvcuda::wmma::mem_row_major);
            __syncwarp();
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = scratch[row * SCORE_PITCH + begin + j] / sum;
            int n = to.t + row < to.T ? c.head_dim - 16 * i - begin : 0; // dimensions to store
            if (c.head_dim % 8 == 0 && n > 0) {
                store_four_with_copy(to.out, to.half_copy, at, y);
                store_four_with_copy(to.out, to.half_copy, at + 4, y + 4);
            } else
                for (int j = 0; j < 8 && j < n; j++)
                    store_with_copy(to.out, to.half_copy, at + j, y[j]);
        }
    }
};

// Computes attention for tokens of runs of two or more tokens. A block handles QUERIES tokens of
// the batch, one run after another; its warps share the queries of a run.
// out, q (T, n_heads, head_dim); half_copy: out in half precision, or NULL.
// Grid: (n_heads, tiles of queries), in reverse order, since the last tiles see the most positions;
// block: Flash<D>::N_WARPS warps.
template <int D>
static __global__ void __launch_bounds__(32 * Flash<D>::N_WARPS)
    attention_tiles(LayerCache c, float *out, __half *half_copy, const float *q) {
    typedef Flash<D> F;
    __shared__ __align__(128) __half qs[F::QUERIES * F::QKV_PITCH];
    __shared__ __align__(128) __half ks[F::KEYS * F::QKV_PITCH], vs[F::KEYS * F::QKV_PITCH];
    __shared__ __align__(128) float all_scores[F::N_WARPS][16 * F::SCORE_PITCH];
    __shared__ __align__(128) float all_rescales[F::N_WARPS][16];
    int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int block_begin = (gridDim.y - 1 - blockIdx.y) * F::QUERIES;
    int block_end = min(block_begin + F::QUERIES, c.input->T);
    float *scores = all_scores[warp], *rescales = all_rescales[warp];
    // Weights are powers of 2, so scores are multiplied by 1 / ln(2) = 1.4427.
    float scale = 1.442695041f / sqrtf(c.head_dim);
    for (int t0 = block_begin, T; t0 < block_end; t0 = T) { // tokens t0..T-1 are in one run
        const InputToken &token = c.input->tokens[t0];
        T = min(token.end, block_end);
        if (is_single(token)) continue;
        int pos = token.pos, t = t0 + 16 * warp; // position of t0; the warp's first token
        int end = pos + T - t0, begin = first_position(c, pos + 1);
        HeadCache<__half> head(cache_of(c, t0), h);
        float max = -INFINITY, sum = 0;
        Sums sums[D / 16];
        for (int i = 0; i < D / 16; i++) nvcuda::wmma::fill_fragment(sums[i], 0.0f);
        begin = begin / F::KEYS * F::KEYS;
        for (int first = begin; first < end; first += F::KEYS) {
            F::copy_async(ks, head.keys, c.width, first, end);
            F::copy_async(vs, head.values, c.width, first, end);
            if (first == begin) F::load_queries(qs, q, c, h, t0, T); // while the copies run
            __pipeline_wait_prior(1); // waits for the keys; the values may still be in flight
            __syncthreads();          // keys and queries are visible
            if (t < T) {
                F::score(scores, qs + 16 * warp * F::QKV_PITCH, ks);
                int n = pos + t - t0 + lane / 2 + 1; // the row attends to positions below n
                float rescale = F::softmax_step(scores, scale, first_position(c, n) - first,
                                                n - first, max, sum);
                if (lane % 2 == 0) rescales[lane / 2] = rescale;
            }
            __pipeline_wait_prior(0);
            __syncthreads(); // the values are visible
            if (t < T) F::add_values(sums, scores, rescales, vs);
            __syncthreads(); // all warps have read keys and values
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        if (t < T) F::store(sums, scores, sum, c, {out, half_copy, h, t, T});
    }
}

// Attention without tensor cores, the KV cache, and the preparation of queries, keys and values:
// biases, norms and rotary position embedding (RoPE).
#pragma once
#include "formats.cuh"

// The KV cache of one layer. Its elements are __half, or float for float32 models (the template
// parameter CacheType of the kernels). Elements between head_dim and width are zero.
typedef struct {
    void *keys, *values; // (n_kv_heads, positions, width) each; see cache_of
    int positions;
    int width; // head_dim rounded up to a multiple of 8
    int n_heads, n_kv_heads, head_dim;
    int window;         // max positions that a token attends to; 0: no limit
    bool rope_halves;   // RoPE's pairs in a head are (i, i + head_dim / 2); else (2i, 2i + 1)
    size_t offset;      // byte offset of this layer in the keys (values) of a sequence
    const Input *input; // the batch
} LayerCache;

// Returns c with the keys and values of token t's sequence.
static __device__ LayerCache cache_of(LayerCache c, int t) {
    const InputToken &token = c.input->tokens[t];
    c.keys = (char *)token.keys + c.offset, c.values = (char *)token.values + c.offset;
    return c;
}

// Returns the first position that the token at position n - 1 attends to.
static __device__ int first_position(const LayerCache &c, int n) {
    return c.window && n > c.window ? n - c.window : 0;
}

// The keys and values that query head h attends to.
template <typename CacheType> struct HeadCache {
    const CacheType *keys, *values; // (positions, width)
    int width;

    __device__ HeadCache(const LayerCache &c, int h) : width(c.width) {
        size_t head = (size_t)(h / (c.n_heads / c.n_kv_heads)) * c.positions * c.width;
        keys = (const CacheType *)c.keys + head, values = (const CacheType *)c.values + head;
    }
};

static __device__ float2 to_floats(float2 pair) { return pair; }
static __device__ float2 to_floats(__half2 pair) { return __half22float2(pair); }
static __device__ void store_pair(float *p, float a, float b) { *(float2 *)p = make_float2(a, b); }
static __device__ void store_pair(__half *p, float a, float b) { *(__half2 *)p = to_halves(a, b); }
static __device__ void store_element(float *p, float a) { *p = a; }
static __device__ void store_element(__half *p, float a) { *p = to_half(a); }

template <typename CacheType> struct CacheFormat;
template <> struct CacheFormat<float> : Format<F32> { typedef float2 Pair; };
template <> struct CacheFormat<__half> : Format<F16> { typedef __half2 Pair; };

// ----------------------------------------------------------------------------
// A warp's attention

// A softmax over the positions seen so far: the largest score, the sum of the weights
// exp(score - max), and the weighted sum of the values. A head is cut into at most SLICES slices of
// 64 dimensions. Of slice i of the weighted sum, lane l holds dimensions 64 i + 2 l and
// 64 i + 2 l + 1, as out[2 i] and out[2 i + 1].
template <int SLICES> struct OnlineSoftmax { float max, sum, out[2 * SLICES]; };

// Attends with q (width,) to the positions from `begin` to n - 1. A tile is 32 consecutive
// positions, of which each lane computes the score of one; tile 0 contains position `begin`. The
// warp takes tiles first_tile, first_tile + tile_stride, and so on.
// One pass over the positions suffices: the sums are scaled down whenever a larger score appears
// (Milakov 2018, "Online normalizer calculation for softmax").
template <typename CacheType, int SLICES>
static __device__ OnlineSoftmax<SLICES> attend_warp(const float *q,
                                                    const HeadCache<CacheType> &head, int begin,
                                                    int n, int first_tile, int tile_stride,
                                                    float scale) {
    typedef CacheFormat<CacheType> F;
    const int N = F::N, lane = threadIdx.x % 32;
    const int BATCH = 8;                            // units of a key that a lane loads together
    const int VALUE_BATCH = 64 / sizeof(CacheType); // positions whose values it loads together
    const CacheType *keys = head.keys, *values = head.values;
    int width = head.width;
    OnlineSoftmax<SLICES> s = {-INFINITY, 0, {0}};
    for (int p = 32 * (begin / 32 + first_tile); p < n; p += 32 * tile_stride) {
        float score = -INFINITY;
        typename F::Pair pairs[VALUE_BATCH];
        // Loads this lane's dimensions of slice i of the values at the VALUE_BATCH positions from
        // p + j on. Positions from n on repeat position n - 1; their weight is 0.
        auto load_values = [&](int i, int j) {
            int d = 64 * i + 2 * lane < width ? 64 * i + 2 * lane : 0;
#pragma unroll
            for (int b = 0; b < VALUE_BATCH; b++)
                pairs[b] =
                    *(const typename F::Pair *)(values + (size_t)min(p + j + b, n - 1) * width + d);
        };
        load_values(0, 0); // loads start before the weights are known
        if (p + lane >= begin && p + lane < n) {
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
                    F::unpack(units[b], k);
                    for (int i = 0; i < N; i++) score += k[i] * q[N * (u + b) + i];
                }
            }
            score *= scale;
        }
        float max = fmaxf(s.max, warp_max(score));
        float rescale = expf(s.max - max), weight = expf(score - max);
        s.max = max;
        s.sum = s.sum * rescale + warp_sum(weight);
        for (int i = 0; i < 2 * SLICES; i++) s.out[i] *= rescale;
        for (int j = 0; j < 32 && p + j < n; j += VALUE_BATCH) {
#pragma unroll
            for (int i = 0; i < SLICES; i++) {
                if (64 * i >= width) break;
                if (i || j) load_values(i, j); // (0, 0) is loaded above
#pragma unroll
                for (int b = 0; b < VALUE_BATCH; b++) {
                    float w = __shfl_sync(ALL_LANES, weight, j + b);
                    float2 pair = to_floats(pairs[b]);
                    s.out[2 * i] += w * pair.x;
                    s.out[2 * i + 1] += w * pair.y;
                }
            }
        }
    }
    return s;
}

// Computes attention for many tokens. Each warp computes one token of one head. The warps of a
// block read mostly the same keys and values, so caches serve most of their reads.
// out, q (T, n_heads, head_dim); half_copy: out in half precision, or NULL.
// Grid: (n_heads, groups of WARPS tokens); block: WARPS warps.
template <typename CacheType, int SLICES>
static __global__ void attention_many(LayerCache c, float *out, __half *half_copy, const float *q) {
    __shared__ float queries[WARPS][MAX_HEAD_DIM];
    int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int t = blockIdx.y * WARPS + warp;
    if (t >= c.input->T) return;
    size_t at = ((size_t)t * c.n_heads + h) * c.head_dim;
    HeadCache<CacheType> head(cache_of(c, t), h);
    for (int i = lane; i < c.width; i += 32) queries[warp][i] = i < c.head_dim ? q[at + i] : 0;
    __syncwarp();
    int n = c.input->tokens[t].pos + 1;
    float scale = 1 / sqrtf(c.head_dim);
    OnlineSoftmax<SLICES> s =
        attend_warp<CacheType, SLICES>(queries[warp], head, first_position(c, n), n, 0, 1, scale);
    for (int i = 0; i < 2 * SLICES; i++) {
        int d = 64 * (i / 2) + 2 * lane + i % 2;
        if (d < c.head_dim) store_with_copy(out, half_copy, at + d, s.out[i] / s.sum);
    }
}

// ----------------------------------------------------------------------------
// Attention of one token, whose positions several blocks may share

// Number of positions beyond which several blocks share a head. By default, a tile of 32 for each
// warp of a block. A smaller number, such as -DSPLIT_POSITIONS=64, uses more blocks per head, whose
// partial softmaxes must then be merged; this has not been measured on a GPU yet.
#ifndef SPLIT_POSITIONS
#define SPLIT_POSITIONS (32 * WARPS)
#endif

// One dimension of an OnlineSoftmax.
struct HeadPartial { float max, sum, out; };

// Merges n partial softmaxes: max and sum (n,), out (n, MAX_HEAD_DIM). Returns dimension d.
static __device__ HeadPartial merge(const float *max, const float *sum, const float *out, int n,
                                    int d) {
    HeadPartial all = {-INFINITY, 0, 0};
    for (int i = 0; i < n; i++) all.max = fmaxf(all.max, max[i]);
    for (int i = 0; i < n; i++) {
        // A partial without positions has weight 0. If no partial has any, expf would return NaN.
        float weight = max[i] == -INFINITY ? 0 : expf(max[i] - all.max);
        all.sum += weight * sum[i];
        all.out += weight * out[i * MAX_HEAD_DIM + d];
    }
    return all;
}

// A block's part of the attention of head h to the positions from `begin` to n - 1. Their tiles are
// divided among `splits` blocks; this is block `split`.
struct HeadSplit { int h, split, splits, begin, n; };

// Returns the first tile of a warp. Its other tiles follow at a stride of splits * WARPS. By
// default a block takes WARPS consecutive tiles. With a smaller SPLIT_POSITIONS, the blocks take
// tiles in turn, because otherwise the first block could take them all.
static __device__ int first_tile(const HeadSplit &part, int warp) {
    bool in_turn = SPLIT_POSITIONS < 32 * WARPS;
    return in_turn ? warp * part.splits + part.split : part.split * WARPS + warp;
}

// Returns whether the token's own position, n - 1, is in the block's part.
static __device__ bool has_last_position(const HeadSplit &part) {
    int tile = (part.n - 1) / 32 - part.begin / 32;
    bool in_turn = SPLIT_POSITIONS < 32 * WARPS; // see first_tile
    return (in_turn ? tile : tile / WARPS) % part.splits == part.split;
}

// Shared memory of attend_block: the query, and each warp's softmax. `key`: see complete_heads.
typedef struct {
    float query[MAX_HEAD_DIM], max[WARPS], sum[WARPS], outs[WARPS * MAX_HEAD_DIM];
    float key[MAX_HEAD_DIM];
} AttentionScratch;

// Copies head h of q (n_heads, head_dim) to the block's query.
static __device__ void load_query(const LayerCache &c, const float *q, int h,
                                  AttentionScratch *scratch) {
    int d = threadIdx.x;
    if (d < c.width) scratch->query[d] = d < c.head_dim ? q[h * c.head_dim + d] : 0;
}

// Attends with the block's query. Thread d returns dimension d of the block's partial softmax. All
// threads must call it; the first WARPS warps compute.
template <typename CacheType, int SLICES>
static __device__ HeadPartial attend_block(const LayerCache &c, const HeadSplit &part,
                                           AttentionScratch *scratch) {
    int d = threadIdx.x, warp = d / 32, lane = d % 32;
    HeadPartial partial = {};
    HeadCache<CacheType> head(c, part.h);
    __syncthreads();
    if (warp < WARPS) {
        OnlineSoftmax<SLICES> s = attend_warp<CacheType, SLICES>(
            scratch->query, head, part.begin, part.n, first_tile(part, warp), part.splits * WARPS,
            1 / sqrtf(c.head_dim));
        if (lane == 0) scratch->max[warp] = s.max, scratch->sum[warp] = s.sum;
        for (int i = 0; i < 2 * SLICES; i++)
            scratch->outs[warp * MAX_HEAD_DIM + 64 * (i / 2) + 2 * lane + i % 2] = s.out[i];
    }
    __syncthreads();
    if (d < c.head_dim) partial = merge(scratch->max, scratch->sum, scratch->outs, WARPS, d);
    return partial;
}

// Returns the index in `partials` of the partial softmaxes of head h: max (splits,), then sum
// (splits,), then out (splits, MAX_HEAD_DIM).
static __device__ size_t partials_at(int h, int splits) {
    return (size_t)h * splits * (2 + MAX_HEAD_DIM);
}

// Stores dimension d of a block's partial softmax.
static __device__ void store_partial(float *partials, const HeadSplit &part, int d,
                                     const HeadPartial &partial) {
    int splits = part.splits, split = part.split;
    float *max = partials + partials_at(part.h, splits), *sum = max + splits, *out = sum + splits;
    if (d == 0) max[split] = partial.max, sum[split] = partial.sum;
    out[split * MAX_HEAD_DIM + d] = partial.out;
}

// Returns dimension d of head h's attention, merged from the partial softmaxes of all splits.
static __device__ float merge_partials(const float *partials, int h, int splits, int d) {
    const float *max = partials + partials_at(h, splits);
    HeadPartial all = merge(max, max + splits, max + 2 * splits, splits, d);
    return all.out / all.sum;
}

// Computes attention for tokens that are the only ones of their run. The last block to finish a
// head of a token merges the partial softmaxes.
// out, q (T, n_heads, head_dim); half_copy: out in half precision, or NULL; partials: see
// partials_at, with T * n_heads heads; counters (T * n_heads,) zeros. Both are unused if there is
// one split. Grid: (n_heads, splits, T); block: WARPS warps.
template <typename CacheType, int SLICES>
static __global__ void attention_one(LayerCache c, float *out, __half *half_copy, const float *q,
                                     float *partials, unsigned *counters) {
    __shared__ AttentionScratch scratch;
    int t = blockIdx.z, h = blockIdx.x, splits = gridDim.y, d = threadIdx.x;
    if (t >= c.input->T || !is_single(c.input->tokens[t])) return;
    int n = c.input->tokens[t].pos + 1, row = t * c.n_heads + h; // row of out and q
    HeadSplit part = {h, (int)blockIdx.y, splits, first_position(c, n), n};
    load_query(c, q + (size_t)t * c.n_heads * c.head_dim, h, &scratch);
    HeadPartial mine = attend_block<CacheType, SLICES>(cache_of(c, t), part, &scratch);
    part.h = row; // its index in `partials`
    if (splits > 1) {
        if (d < c.head_dim) store_partial(partials, part, d, mine);
        if (!is_last_block(&counters[row], splits)) return;
    }
    if (d < c.head_dim)
        store_with_copy(out, half_copy, (size_t)row * c.head_dim + d,
                        splits > 1 ? merge_partials(partials, row, splits, d)
                                   : mine.out / mine.sum);
}

// ----------------------------------------------------------------------------
// Queries, keys and values before attention

// Rotates the pair (a, b) by the angle whose cosine and sine are angle.x and angle.y.
static __device__ void rotate_pair(float &a, float &b, float2 angle) {
    float rotated = a * angle.x - b * angle.y;
    b = a * angle.y + b * angle.x;
    a = rotated;
}

// Returns the index in c.keys (or c.values) of element i of k (or v) (n_kv_heads, head_dim) at
// position pos.
static __device__ size_t cache_index(const LayerCache &c, int i, int pos) {
    return ((size_t)(i / c.head_dim) * c.positions + pos) * c.width + i % c.head_dim;
}

// A layer's biases (q_dim,), (kv_dim,), (kv_dim,) and norm weights (head_dim,); NULL where the
// layer has none.
typedef struct { const float *bq, *bk, *bv, *q_norm, *k_norm; } HeadWeights;

// Adds the biases, then normalizes each head of q and k (RMSNorm), in place.
// q (T, n_heads, head_dim); k, v (T, n_kv_heads, head_dim).
// Grid: (n_heads + 2 n_kv_heads, T); block: one warp.
static __global__ void __launch_bounds__(32)
    add_biases_and_norms(LayerCache c, HeadWeights w, float *q, float *k, float *v,
                         float norm_eps) {
    int head = blockIdx.x, t = blockIdx.y, lane = threadIdx.x;
    bool is_q = head < c.n_heads, is_k = !is_q && head < c.n_heads + c.n_kv_heads;
    if (!is_q) head -= is_k ? c.n_heads : c.n_heads + c.n_kv_heads;
    float *all = is_q ? q : is_k ? k : v, sum = 0;
    float *x = all + ((size_t)t * (is_q ? c.n_heads : c.n_kv_heads) + head) * c.head_dim;
    const float *bias = is_q ? w.bq : is_k ? w.bk : w.bv;
    const float *norm = is_q ? w.q_norm : is_k ? w.k_norm : NULL;
    for (int i = lane; i < c.head_dim; i += 32) {
        if (bias) x[i] += bias[head * c.head_dim + i];
        sum += x[i] * x[i];
    }
    float scale = 1 / sqrtf(warp_sum(sum) / c.head_dim + norm_eps);
    for (int i = lane; norm && i < c.head_dim; i += 32) x[i] *= scale * norm[i];
}

// Rotates q and k by their positions (RoPE), in place, and writes k and v to the cache. A thread
// handles one pair of q, k or v.
// q (T, n_heads, head_dim); k, v (T, n_kv_heads, head_dim); rotation (positions, head_dim / 2):
// cosine and sine. Grid: (groups of pairs, T).
template <typename CacheType>
static __global__ void rotate_and_cache(LayerCache c, float *q, float *k, const float *v,
                                        const float2 *rotation) {
    int q_dim = c.n_heads * c.head_dim, kv_dim = c.n_kv_heads * c.head_dim, half = c.head_dim / 2;
    int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x), t = blockIdx.y;
    bool is_q = i < q_dim, is_k = !is_q && i < q_dim + kv_dim;
    if (i >= q_dim + 2 * kv_dim || t >= c.input->T) return;
    int pos = c.input->tokens[t].pos;
    c = cache_of(c, t);
    if (!is_q) i -= is_k ? q_dim : q_dim + kv_dim;
    int pair = i % c.head_dim / 2, distance = 1;
    if (c.rope_halves && (is_q || is_k)) i -= pair, distance = half;
    // The pair is now elements i and i + distance.
    const float *from = is_q ? q + (size_t)t * q_dim + i : (is_k ? k : v) + (size_t)t * kv_dim + i;
    float a = from[0], b = from[distance];
    if (is_q || is_k) {
        rotate_pair(a, b, rotation[(size_t)pos * half + pair]);
        float *to = is_q ? q + (size_t)t * q_dim + i : k + (size_t)t * kv_dim + i;
        to[0] = a, to[distance] = b;
    }
    if (is_q) return;
    CacheType *cached = (CacheType *)(is_k ? c.keys : c.values) + cache_index(c, i, pos);
    if (distance == 1) store_pair(cached, a, b);
    else store_element(cached, a), store_element(cached + distance, b);
}

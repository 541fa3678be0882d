// The ops of Backend, each as a sequence of kernels. backend.h describes them.
#pragma once
#include "flash.cuh"
#include "launch_products.cuh"
#include "small_ops.cuh"

// ----------------------------------------------------------------------------
// Embedding and RMSNorm

static void embed(Backend *b, float *x, const Mat *table, const int *tokens, int T) {
    Cuda *c = (Cuda *)b;
    if (!c->in_pass) { // in a pass, begin has sent them
        for (int t = 0; t < T; t++) c->input_host->tokens[t].token = tokens[t];
        c->input_host->T = T;
        send_tokens(c, T);
    }
    unsigned blocks = ceil_div((size_t)padded_rows(c, T) * table->cols, 256);
    launch(c, embed_rows, blocks, 256, 0, x, *table, c->input);
}

// out (T, weight->cols) = RMSNorm of x (T, weight->cols)
static void rmsnorm(Cuda *c, float *out, const float *x, const Mat *weight, int T) {
    launch(c, normalize, T, 512, 0, out, half_copy_for(c, out, T), x, (const float *)weight->data,
           weight->cols, c->config.norm_eps);
}

// ----------------------------------------------------------------------------
// Attention

// Writes the tokens and runs of a batch to c->input_host. The batch's array of tokens may be NULL.
static void fill_tokens(Cuda *c, const Batch *batch) {
    Input *input = c->input_host;
    input->T = batch->T;
    for (const Run *run = batch->runs; run < batch->runs + batch->n_runs; run++)
        for (int i = 0, t = run->first; i < run->n; i++, t++)
            input->tokens[t] = {batch->tokens ? batch->tokens[t] : 0,
                                run->pos + i,
                                run->first,
                                run->first + run->n,
                                run->cache->keys,
                                run->cache->values};
}

static Attenders find_attenders(const Batch *batch) {
    Attenders found = {};
    for (int i = 0; i < batch->n_runs; i++)
        (batch->runs[i].n == 1 ? found.singles : found.others) = true;
    return found;
}

// In the functions launch_*, out and q are (T, n_heads, head_dim); half_copy: see half_copy_for.

// Attention of tokens of any runs, with a float32 cache.
static void launch_plain(Cuda *c, const LayerCache &cache, float *out, const float *q, int T) {
    auto kernel = cache.width <= 64    ? attention_many<float, 1>
                  : cache.width <= 128 ? attention_many<float, 2>
                                       : attention_many<float, 4>;
    dim3 grid(cache.n_heads, ceil_div(T, WARPS));
    launch(c, kernel, grid, 32 * WARPS, 0, cache, out, NULL, q);
}

// Attention of tokens of runs of two or more, with a half precision cache.
template <int D>
static void launch_flash(Cuda *c, const LayerCache &cache, float *out, __half *half_copy,
                         const float *q, int T) {
    dim3 grid(cache.n_heads, ceil_div(T, Flash<D>::QUERIES));
    launch(c, attention_tiles<D>, grid, 32 * Flash<D>::N_WARPS, 0, cache, out, half_copy, q);
}

// Attention of tokens that are the only ones of their run. The number of blocks that share a head
// decreases with T, so that T tokens have no more partial softmaxes than one: see count_partials.
template <typename CacheType>
static void launch_one(Cuda *c, const LayerCache &cache, float *out, __half *half_copy,
                       const float *q, int T) {
    auto kernel = cache.width <= 64    ? attention_one<CacheType, 1>
                  : cache.width <= 128 ? attention_one<CacheType, 2>
                                       : attention_one<CacheType, 4>;
    dim3 grid(cache.n_heads, std::max(1, c->splits / T), T);
    launch(c, kernel, grid, 32 * WARPS, 0, cache, out, half_copy, q, c->partials, c->counters);
}

static void launch_attention(Cuda *c, const LayerCache &cache, float *out, const float *q, int T,
                             Attenders attenders) {
    __half *half_copy = half_copy_for(c, out, T);
    if (attenders.others && c->float_cache) return launch_plain(c, cache, out, q, T);
    if (attenders.others) {
        auto flash = cache.width <= 64    ? launch_flash<64>
                     : cache.width <= 128 ? launch_flash<128>
                                          : launch_flash<256>;
        flash(c, cache, out, half_copy, q, T);
    }
    auto one = c->float_cache ? launch_one<float> : launch_one<__half>;
    if (attenders.singles) one(c, cache, out, half_copy, q, T);
}

static HeadWeights head_weights(const Layer *w) {
    return {(const float *)w->bq.data, (const float *)w->bk.data, (const float *)w->bv.data,
            (const float *)w->q_norm.data, (const float *)w->k_norm.data};
}

// Whether queries, keys and values are changed before they are rotated.
static bool has_biases_or_norms(const HeadWeights &w) {
    return w.bq || w.bk || w.bv || w.q_norm || w.k_norm;
}

static void attention(Backend *b, const Batch *batch, int layer, const Layer *w, float *out,
                      const float *x) {
    Cuda *c = (Cuda *)b;
    int T = padded_rows(c, batch->T);
    LayerCache cache = c->layer_cache;
    cache.offset = c->keys_bytes / c->config.n_layers * layer;
    Product qkv[] = {{c->q, w->wq, false}, {c->k, w->wk, false}, {c->v, w->wv, false}};
    size_t pairs = (c->config.q_dim + 2 * (size_t)c->config.kv_dim) / 2;
    if (!c->in_pass) { // in a pass, begin has sent them
        fill_tokens(c, batch);
        send_tokens(c, T);
    }
    rmsnorm(c, c->y, x, &w->attention_norm, T);
    matmul(c, qkv, 3, c->y, T);
    HeadWeights heads = head_weights(w);
    if (has_biases_or_norms(heads))
        launch(c, add_biases_and_norms, dim3(cache.n_heads + 2 * cache.n_kv_heads, T), 32, 0, cache,
               heads, c->q, c->k, c->v, c->config.norm_eps);
    auto rotate = c->float_cache ? rotate_and_cache<float> : rotate_and_cache<__half>;
    launch(c, rotate, dim3(ceil_div(pairs, 128), T), 128, 0, cache, c->q, c->k, c->v, c->rotation);
    launch_attention(c, cache, out, c->q, T, find_attenders(batch));
}

// ----------------------------------------------------------------------------
// Products

static void add_product(Backend *b, float *x, const Mat *w, const float *y, int T) {
    Product product = {x, *w, true};
    matmul((Cuda *)b, &product, 1, y, padded_rows((Cuda *)b, T));
}

static void feed_forward(Backend *b, const Layer *w, float *x, int n_tokens) {
    Cuda *c = (Cuda *)b;
    int T = padded_rows(c, n_tokens);
    Products gate_up = {{{c->h, w->w1, false}, {c->h2, w->w3, false}}, 2};
    size_t n = (size_t)T * c->config.hidden_dim;
    rmsnorm(c, c->y, x, &w->ffn_norm, T);
    bool can_fuse = uses_tensor_cores(&w->w1, T) && w->w1.type == w->w3.type;
    if (!can_fuse || !launch_tensor(c, gate_up, c->y, T, true)) {
        matmul(c, gate_up.list, 2, c->y, T);
        launch(c, apply_swiglu, ceil_div(n, 256), 256, 0, c->h, half_copy_for(c, c->h, T), c->h2,
               n);
    }
    add_product(b, x, &w->w2, c->h, T);
}

// ----------------------------------------------------------------------------
// Logits and the next token

static void gather(Backend *b, float *x, const int *rows, int n) {
    Cuda *c = (Cuda *)b;
    if (!c->in_pass) { // in a pass, begin has sent them
        memcpy(c->input_host->rows, rows, sizeof(int) * n);
        send_rows(c, n);
    }
    int dim = c->config.dim;
    launch(c, gather_rows, ceil_div(dim, 128), 128, 0, x, c->input, padded_rows(c, n), dim);
    c->half_x_source = NULL; // the source may be x, which has changed
}

// Copies n rows of results to host memory. The copy is not part of a recording, because each pass
// may have another destination.
static void copy_rows(Cuda *c, float *to, const float *from, int n, int cols) {
    size_t bytes = sizeof(float) * n * cols;
    CUDA(c, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, c->stream));
}

static void logits(Backend *b, float *out, const Mat *norm, const Mat *output, const float *x,
                   int n_tokens) {
    Cuda *c = (Cuda *)b;
    int T = padded_rows(c, n_tokens);
    Product product = {c->logits, *output, false};
    rmsnorm(c, c->y, x, norm, T);
    matmul(c, &product, 1, c->y, T);
    if (!out) launch(c, find_largest, 1, 1024, 0, c->best, c->logits, output->rows);
    else if (!c->in_pass) copy_rows(c, out, c->logits, T, output->rows); // in a pass, `end` does it
    finish_op(c);
}

static void hidden_states(Backend *b, float *out, const Mat *norm, const float *x, int n_tokens) {
    Cuda *c = (Cuda *)b;
    int T = padded_rows(c, n_tokens);
    rmsnorm(c, c->y, x, norm, T);
    if (!c->in_pass) copy_rows(c, out, c->y, T, norm->cols); // in a pass, `end` does it
    finish_op(c);
}

static int choose(Backend *b, float temperature, float topp, float coin) {
    Cuda *c = (Cuda *)b;
    int best = *c->best;
    if (has_failed(c)) return -1;
    if (best < 0 || temperature == 0) return best; // -1: a logit is not finite
    // Not 0: relative_probability multiplies it by a difference that may be -infinity, giving NaN
    float scale = std::max(1 / temperature, FLT_MIN);
    Distribution distribution = {c->logits, c->config.vocab_size, 0, scale};
    launch(c, sample_token, 1, SAMPLER_THREADS, 0, c->best, distribution, best, topp, coin);
    CUDA(c, cudaStreamSynchronize(c->stream));
    int sampled = *c->best;
    *c->best = best; // choose may be called again for the same logits
    return has_failed(c) ? -1 : sampled;
}

// ----------------------------------------------------------------------------
// Bandwidth

// Returns the bytes per second of the fastest of 20 reads of the first n bytes of the weights in
// device memory; 0 after a failure. The pointer to the host's weights is unused.
static double bandwidth(Backend *b, const void *, size_t n) {
    Cuda *c = (Cuda *)b;
    cudaEvent_t start = {}, stop = {};
    CUDA(c, cudaEventCreate(&start));
    CUDA(c, cudaEventCreate(&stop));
    size_t words = std::min(n, c->weights_bytes) / 16;
    float best = INFINITY, ms = INFINITY;
    for (int pass = 0; pass < 20; pass++) {
        CUDA(c, cudaEventRecord(start, c->stream));
        launch(c, read_memory, 8 * c->multiprocessors, 256, 0, c->weights, words, c->best);
        CUDA(c, cudaEventRecord(stop, c->stream));
        CUDA(c, cudaEventSynchronize(stop));
        CUDA(c, cudaEventElapsedTime(&ms, start, stop));
        best = std::min(best, ms);
    }
    if (start) (void)cudaEventDestroy(start);
    if (stop) (void)cudaEventDestroy(stop);
    return words * 16 / (best * 1e-3);
}

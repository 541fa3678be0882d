// The host's side of whole_token: checks whether the model and the GPU allow it, plans its work and
// launches it.
#pragma once
#include "ops.cuh"
#include "upload.cuh"

// FUSED=0 compiles a program that decodes op by op, to measure the speedup of whole_token.
#ifndef FUSED
#define FUSED 1
#endif

// ----------------------------------------------------------------------------
// The launch

typedef void WholeTokenKernel(TokenPlan, int, int);

// Returns the kernel for these types of the layers' matrices and of the output matrix, or NULL.
static WholeTokenKernel *whole_token_kernel(Type layers, Type output) {
    if (layers == Q4_0 && output == Q8_0)
        return whole_token<Q4_0, Q8_0, __half>; // export.py's --dtype=q4_0
    if (layers != output) return NULL;
    switch (layers) {
    case F32: return whole_token<F32, F32, float>;
    case F16: return whole_token<F16, F16, __half>;
    case BF16: return whole_token<BF16, BF16, __half>;
    case Q8_0: return whole_token<Q8_0, Q8_0, __half>;
    case Q4_0: return whole_token<Q4_0, Q4_0, __half>;
    default: return NULL;
    }
}

// With CARRIED: returns how many words CarriedWords has.
static size_t count_token_words(const Cuda *c) {
    const Config *config = &c->config;
    size_t attended = (size_t)config->n_heads * c->splits * (2 + config->head_dim);
    return config->dim + config->hidden_dim + config->q_dim + 2 * config->kv_dim + attended;
}

// With CARRIED: if the next token's epochs would exceed LAST_EPOCH, zeroes the words and restarts
// the epochs at 0.
static cudaError_t prepare_epochs(Cuda *c) {
    unsigned needed = LAYER_VECTORS * c->token.n_layers;
    if (LAST_EPOCH >= needed && c->token.epoch <= LAST_EPOCH - needed) return cudaSuccess;
    c->token.epoch = 0;
    return cudaMemsetAsync(c->token.words.x, 0, sizeof(uint64_t) * count_token_words(c), c->stream);
}

static cudaError_t try_launch_token(Cuda *c, const Cache *cache, int token, int pos) {
    cudaLaunchAttribute cooperative = {}; // all blocks are resident at once, as grid_barrier needs
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    cudaError_t status = CARRIED ? prepare_epochs(c) : cudaSuccess;
    if (status != cudaSuccess) return status;
    TokenPlan t = c->token;
    t.token = token, c->token.epoch += LAYER_VECTORS * t.n_layers;
    t.cache.keys = cache->keys, t.cache.values = cache->values;
    WholeTokenKernel *kernel =
        whole_token_kernel(t.products[QKV].w.type, t.products[LOGITS].w.type);
    return try_launch(c, &cooperative, kernel, c->multiprocessors, BLOCK_THREADS,
                      token_shared_bytes(t), t, token, pos);
}

static bool has_whole_token(const Cuda *c) { return c->token.slots > 0; }

// ----------------------------------------------------------------------------
// The plan

// Returns the matrix of layer l that corresponds to m, a matrix of the first layer.
static const Mat *matrix_of_layer(const Layer *first, const Mat *m, size_t l) {
    size_t member = (const char *)m - (const char *)first; // offset in Layer
    return (const Mat *)((const char *)(first + l) + member);
}

// Returns whether the address of each matrix of layer l is that of layer 0 plus l strides.
static bool is_at_stride(const Layer *first, size_t l, LayerStride stride) {
    const Mat *all[] = {&first->attention_norm, &first->wq, &first->wk, &first->wv, &first->wo,
                        &first->ffn_norm,       &first->w1, &first->w3, &first->w2};
    for (const Mat *m : all) {
        const Mat *other = matrix_of_layer(first, m, l);
        const char *data = (const char *)m->data + l * stride.weights;
        const char *scales = (const char *)m->scales + l * stride.scales;
        if (other->type != m->type || (const char *)other->data != data) return false;
        if (m->scales && (const char *)other->scales != scales) return false;
    }
    return true;
}

// Sets *stride to the bytes from the biases and norms of a layer's heads to those of the next
// layer. Returns whether all layers have the same biases and norms, at that stride.
static bool has_uniform_heads(const Weights *w, int n_layers, size_t *stride) {
    const Layer *first = w->layers;
    bool found = false;
    *stride = 0;
    for (const Mat *m : {&first->bq, &first->bk, &first->bv, &first->q_norm, &first->k_norm})
        for (int l = 1; l < n_layers; l++) {
            const char *data = (const char *)m->data,
                       *other = (const char *)matrix_of_layer(first, m, l)->data;
            if (!data != !other) return false;
            if (!data) continue;
            if (!found) *stride = other - data, found = true; // l is 1
            if (other != data + l * *stride) return false;
        }
    return true;
}

// Returns whether has_units accepts all matrices of the layers, they are of one type, and their
// layout is the same in all layers. Sets *stride to the bytes from one layer to the next.
static bool has_uniform_layers(const Weights *w, int n_layers, LayerStride *stride) {
    const Layer *first = w->layers, *next = first + (n_layers > 1); // 1 layer: strides of 0
    const Mat *all[] = {&first->wq, &first->wk, &first->wv, &first->wo,
                        &first->w1, &first->w3, &first->w2};
    for (const Mat *m : all)
        if (m->type != first->wq.type || !has_units(m)) return false;
    const char *data = (const char *)first->wq.data, *scales = (const char *)first->wq.scales;
    stride->weights = (const char *)next->wq.data - data;
    stride->scales = scales ? (const char *)next->wq.scales - scales : 0;
    for (int l = 1; l < n_layers; l++)
        if (!is_at_stride(first, l, *stride)) return false;
    return true;
}

// Appends the rows of b to *a, without a copy. Returns false if b does not follow a in memory; *a
// is then unusable.
static bool join_rows(Mat *a, const Mat &b) {
    MatBytes bytes = bytes_of(a);
    bool data_follows = (const char *)b.data == (const char *)a->data + bytes.values;
    bool scales_follow =
        !a->scales || (const char *)b.scales == (const char *)a->scales + bytes.scales;
    a->rows += b.rows;
    return data_follows && scales_follow;
}

// Plans a product for a grid of `blocks` blocks. norm: weights of the RMSNorm before it, or NULL;
// gated: the matrix is w1 and w3, joined.
static TokenProduct plan_product(const Mat &matrix, const Mat *norm, bool gated, int blocks) {
    TokenProduct p = {};
    int rows = gated ? matrix.rows / 2 : matrix.rows;
    p.w = matrix;
    p.row_bytes = (int)(bytes_of(&matrix).values / matrix.rows);
    p.pieces = ceil_div(p.row_bytes, PIECE_BYTES);
    p.group_stride = gated ? GROUP_ROWS / 2 : GROUP_ROWS;
    p.second_half = gated ? rows : GROUP_ROWS / 2;
    int groups = ceil_div(rows, p.group_stride);
    p.groups_per_block = groups / blocks, p.extra_groups = groups % blocks;
    // The block's pieces are numbered group by group. Warp i takes i, i + WARPS, and so on.
    for (int i = 0; i < WARPS; i++)
        p.first[i] = {(unsigned char)(i / p.pieces), (unsigned char)(i % p.pieces)};
    p.hop = {(unsigned char)(WARPS / p.pieces), (unsigned char)(WARPS % p.pieces)};
    p.norm = norm ? (const float *)norm->data : NULL;
    return p;
}

// Fills in t->products and t->stride. Returns false if whole_token cannot compute the model.
static bool plan_products(const Cuda *c, const Weights *w, TokenPlan *t) {
    const Config *config = &c->config;
    const Layer *l = w->layers;
    int blocks = c->multiprocessors;
    Mat qkv = l->wq, gate_up = l->w1;
    if (!whole_token_kernel(l->wq.type, w->output.type) || !has_units(&w->output)) return false;
    if (!has_uniform_layers(w, config->n_layers, &t->stride)) return false;
    if (!has_uniform_heads(w, config->n_layers, &t->stride.heads)) return false;
    t->heads = head_weights(l);
    t->complete_later = config->rope_halves || has_biases_or_norms(t->heads);
    if (!join_rows(&qkv, l->wk) || !join_rows(&qkv, l->wv)) return false;
    if (!join_rows(&gate_up, l->w3)) return false;
    t->products[QKV] = plan_product(qkv, &l->attention_norm, false, blocks);
    t->products[ATTENTION_OUT] = plan_product(l->wo, NULL, false, blocks);
    t->products[GATE_UP] = plan_product(gate_up, &l->ffn_norm, true, blocks);
    t->products[DOWN] = plan_product(l->w2, NULL, false, blocks);
    t->products[LOGITS] = plan_product(w->output, &w->norm, false, blocks);
    return true;
}

// Plans how a block uses its shared memory: slots take the space that the arrays leave. Returns
// whether each warp has room for at least two slots: one is multiplied while the other is copied.
static bool plan_shared(const Cuda *c, TokenPlan *t) {
    t->x_floats = sizeof(AttentionScratch) / sizeof(float);
    for (const TokenProduct &p : t->products) {
        int max_groups = p.groups_per_block + 1;
        t->x_floats = std::max(t->x_floats, padded_cols(p.w.cols));
        t->sums_floats = std::max(t->sums_floats, GROUP_ROWS * max_groups * p.pieces);
    }
    t->x_floats = (t->x_floats + 3) / 4 * 4;
    size_t arrays = token_shared_bytes(*t), slots = 0; // bytes without slots: t->slots is still 0
    if (c->max_shared > arrays) slots = (c->max_shared - arrays) / (WARPS * SLOT_BYTES);
    if (slots < 2) return false;
    t->slots = (int)std::min<size_t>(slots, MAX_SLOTS);
    return true;
}

// Returns the total number of floats in the vectors of a token.
static size_t count_token_floats(const Config *config) {
    return config->dim + 2 * (size_t)config->q_dim + config->hidden_dim + config->kv_dim;
}

// Prepares whole_token. Leaves c->token.slots at 0 if the model, the GPU or the driver does not
// allow it. cache: an empty cache, for a trial run.
static void open_token(Cuda *c, const Weights *w, const Cache *cache) {
    const Config *config = &c->config;
    TokenPlan t = {};
    if (!FUSED || !c->cooperative || !plan_products(c, w, &t) || !plan_shared(c, &t)) return;
    t.n_layers = config->n_layers, t.table = w->token_embedding;
    t.cache = c->layer_cache, t.max_splits = c->splits;
    t.stride.cache = c->keys_bytes / config->n_layers;
    t.rotation = c->rotation, t.norm_eps = config->norm_eps;
    t.partials = c->partials, t.logits = c->logits, t.best = c->best;

    const void *kernel = (const void *)whole_token_kernel(w->layers->wq.type, w->output.type);
    int resident = 0; // blocks that fit on a multiprocessor
    raise_shared_limit(c, kernel);
    CUDA(c, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, BLOCK_THREADS,
                                                          token_shared_bytes(t)));
    t.x = (float *)allocate(c, sizeof(float) * count_token_floats(config));
    t.largest = (Largest *)allocate(c, sizeof(Largest) * c->multiprocessors);
    t.arrived = (unsigned *)allocate(c, sizeof(unsigned));
    if (!resident || !t.x || !t.largest || !t.arrived) return;
    t.q = t.x + config->dim, t.attention_out = t.q + config->q_dim;
    t.h = t.attention_out + config->q_dim, t.k = t.h + config->hidden_dim;
    CUDA(c, cudaMemsetAsync(t.arrived, 0, sizeof(unsigned), c->stream));
    if (CARRIED) {
        size_t bytes = sizeof(uint64_t) * count_token_words(c);
        t.words.x = (uint64_t *)allocate(c, bytes);
        if (!t.words.x) return;
        t.words.h = t.words.x + config->dim, t.words.qkv = t.words.h + config->hidden_dim;
        t.words.attended = t.words.qkv + config->q_dim + 2 * config->kv_dim;
        CUDA(c, cudaMemsetAsync(t.words.x, 0, bytes, c->stream)); // no reader expects epoch 0
    }
    if (has_failed(c)) return;
    c->token = t;
    // A trial run, to see whether the driver allows it. It writes to the cache at position 0, which
    // the first token overwrites.
    if (try_launch_token(c, cache, 0, 0) == cudaSuccess) return;
    (void)cudaGetLastError();
    c->token.slots = 0;
}

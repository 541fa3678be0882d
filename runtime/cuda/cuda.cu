// The Backend of NVIDIA GPUs. This file opens and closes it. Only this file is compiled; it
// includes the others:
//
//   common.cuh, formats.cuh      limits, warp reductions; weight formats
//   products.cuh                 kernels: matrix products of one token, and of float32 matrices
//   tensor_products.cuh          kernels: matrix products of many tokens on the tensor cores
//   attention.cuh, flash.cuh     kernels: attention and the KV cache; the same on the tensor cores
//   small_ops.cuh, sampling.cuh  kernels: embedding, RMSNorm, SwiGLU; sampling
//   whole_token.cuh              kernel: one token through the whole model
//   carried.cuh                  its variant whose barriers carry their data (-DCARRIED=1)
//   session.cuh                  struct Cuda (the host's state), errors, memory, launches
//   cache.cuh                    KV caches of sequences
//   launch_products.cuh, ops.cuh the ops of Backend as sequences of kernels
//   launch_token.cuh             when and how whole_token runs
//   graph.cuh                    ops recorded as a CUDA graph
//   upload.cuh                   copies of the weights and of RoPE's rotations to the device
//
// Everything runs on one stream. A decoded token reads every weight once: in one kernel if
// whole_token can compute the model, otherwise op by op. The matrix products of a prompt run on the
// tensor cores in half precision; float32 matrices are multiplied in float32 without them. Keys and
// values are stored in half precision, or in float32 if the model's weights are float32.
#include "cache.cuh"
#include "graph.cuh"
#include "upload.cuh"

static float *cuda_alloc(Backend *b, size_t n) {
    if (n >= SIZE_MAX / sizeof(float)) return NULL;
    try {
        return (float *)allocate((Cuda *)b, n * sizeof(float));
    } catch (const std::bad_alloc &) { // it would end the caller's program, which may be in C
        return NULL;
    }
}

static void cuda_close(Backend *b) {
    Cuda *c = (Cuda *)b;
    if (c->first_cache) free_cache(b, c->first_cache);
    for (Recording &r : c->recordings) drop_recording(&r);
    for (void *block : c->blocks)
        if (block) (void)cudaFree(block);
    // The model outlives the backend, so its matrices point to the host's weights again.
    for (const UploadedMat &m : c->uploaded) *m.mat = m.original;
    if (c->input_host) (void)cudaFreeHost(c->input_host);
    if (c->best) (void)cudaFreeHost(c->best);
    if (c->stream) (void)cudaStreamDestroy(c->stream);
    delete c;
}

// Selects GPU 0 and stores its limits in c. Returns NULL, or an error message if there is no GPU or
// this program was not compiled for it.
static const char *find_device(Cuda *c, llamac_error *error) {
    cudaDeviceProp device;
    cudaFuncAttributes attributes;
    int n_devices = 0;
    cudaError_t e = cudaGetDeviceCount(&n_devices);
    if (e == cudaSuccess && n_devices == 0) e = cudaErrorNoDevice;
    if (e == cudaSuccess) e = cudaSetDevice(0);
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&device, 0);
    if (e != cudaSuccess) {
        const char *why = e == cudaErrorInsufficientDriver
                              ? "the driver is missing, or too old for this program's CUDA"
                              : cudaGetErrorString(e);
        snprintf(error->text, sizeof error->text, "no GPU can be used (%s); use --device=cpu", why);
        return error->text;
    }
    // Any kernel will do: the call fails if the program has no code for this GPU's architecture.
    if (cudaFuncGetAttributes(&attributes, (const void *)normalize) != cudaSuccess) {
        snprintf(
            error->text, sizeof error->text,
            "this program was not compiled for a %.200s; compile it with make runcuda ARCH=%d%d",
            device.name, device.major, device.minor);
        return error->text;
    }
    c->multiprocessors = device.multiProcessorCount;
    c->max_shared = device.sharedMemPerBlockOptin;
    c->cooperative = device.cooperativeLaunch && device.major >= 8; // cp.async needs Ampere
    return NULL;
}

// ----------------------------------------------------------------------------
// Memory

// Returns how many floats c->partials needs. It holds the partial softmaxes of attention (see
// partials_at) or, at other times, two partial sums of tiles for each block of matmul_tensor (see
// partial_of), which has at most one block per multiprocessor.
static size_t count_partials(const Cuda *c) {
    const TileShape &largest = TILE_SHAPES[0];
    size_t attention = (size_t)c->config.n_heads * c->splits * (2 + MAX_HEAD_DIM);
    size_t tiles = 2 * (size_t)c->multiprocessors * largest.tokens * largest.rows;
    return std::max(attention, tiles);
}

template <typename T> static bool allocate_array(Cuda *c, T **p, size_t n) {
    return (*p = (T *)allocate(c, n * sizeof(T)));
}

// Allocates the engine's device memory and the cache of its first sequence. Two parts are allocated
// later, but counted here when the free memory is checked: open_token's vectors, and those of
// llama.c (by cuda_alloc). Returns NULL or an error message.
static const char *allocate_all(Cuda *c, Weights *w, llamac_error *e) {
    const Config *config = &c->config;
    size_t positions = c->layer_cache.positions, rows = CHUNK;
    size_t dim = config->dim, hidden_dim = config->hidden_dim;
    size_t q_dim = config->q_dim, kv_dim = config->kv_dim, vocab_size = config->vocab_size;
    size_t half_x = CHUNK * std::max(std::max(dim, hidden_dim), q_dim);
    // attention_one needs a counter for each head of a token while blocks share heads, which is for
    // up to `splits` tokens; matmul_tensor needs one for each block. It has at most one block per
    // multiprocessor, so half of 2 * multiprocessors would suffice.
    size_t n_counters = std::max(config->n_heads * c->splits, 2 * c->multiprocessors);
    c->keys_bytes = (c->float_cache ? sizeof(float) : sizeof(__half)) * config->n_layers
                    * config->n_kv_heads * positions * c->layer_cache.width;

    for (Mat *m : matrices(w, config->n_layers)) {
        MatBytes bytes = aligned_bytes_of(m);
        c->values_bytes += bytes.values, c->weights_bytes += bytes.values + bytes.scales;
    }
    // y, q, k, v, h and h2, allocated below; llama.c's x (rows, dim), attention_out (rows, q_dim)
    size_t activations = sizeof(float) * rows * (2 * dim + 2 * q_dim + 2 * kv_dim + 2 * hidden_dim);
    activations += sizeof(float) * (rows * vocab_size + count_partials(c));
    activations += 2 * sizeof(__half) * half_x;
    // the rotation (head_dim / 2 pairs for each position); open_token's vectors
    activations += sizeof(float) * (positions * config->head_dim + count_token_floats(config));
    activations += CARRIED ? sizeof(uint64_t) * count_token_words(c) : 0;
    double needed =
        (double)c->weights_bytes + 2.0 * c->keys_bytes + activations + KERNEL_CODE_BYTES;

    size_t free_bytes = 0, total = 0;
    CUDA(c, cudaMemGetInfo(&free_bytes, &total));
    bool ok = needed <= free_bytes && (c->weights = (const uint4 *)allocate(c, c->weights_bytes))
              && (c->first_cache = allocate_cache(c))
              && allocate_array(c, &c->rotation, positions * config->head_dim / 2)
              && allocate_array(c, &c->y, rows * dim) && allocate_array(c, &c->q, rows * q_dim)
              && allocate_array(c, &c->k, rows * kv_dim) && allocate_array(c, &c->v, rows * kv_dim)
              && allocate_array(c, &c->h, rows * hidden_dim)
              && allocate_array(c, &c->h2, rows * hidden_dim)
              && allocate_array(c, &c->half_x, half_x)
              && allocate_array(c, &c->spare_half_x, half_x)
              && allocate_array(c, &c->logits, rows * vocab_size)
              && allocate_array(c, &c->partials, count_partials(c))
              && allocate_array(c, &c->counters, n_counters) && allocate_array(c, &c->input, 1);
    if (!ok) {
        double gib = 1 << 30;
        return format(e,
                      "the GPU's memory is too small: %.2f GiB are needed (weights %.2f, context "
                      "%.2f), %.2f are free; use a smaller -n, or --device=cpu",
                      needed / gib, c->weights_bytes / gib, 2 * c->keys_bytes / gib,
                      free_bytes / gib);
    }
    c->layer_cache.input = c->input;
    CUDA(c, cudaMemsetAsync(c->counters, 0, sizeof(unsigned) * n_counters, c->stream));
    return NULL;
}

// ----------------------------------------------------------------------------
// Open

// Returns NULL, or an error message if the GPU cannot compute the model.
static const char *check_model(Model *model, llamac_error *e) {
    const Config *config = &model->config;
    if (config->head_dim > MAX_HEAD_DIM)
        return format(e, "the head size is %.0f, expected at most %.0f", config->head_dim,
                      MAX_HEAD_DIM, 0, 0);
    return NULL;
}

// Returns the shape of a layer's cache, which is the same for all layers and sequences.
static LayerCache plan_layer_cache(const Config *config, int positions) {
    LayerCache cache = {};
    cache.positions = positions;
    cache.width = (config->head_dim + 7) / 8 * 8; // 8 halves are a 16-byte load
    cache.n_heads = config->n_heads, cache.n_kv_heads = config->n_kv_heads;
    cache.window = config->window;
    // rope_halves: RoPE's pairs are (i, i + head_dim / 2); else (2i, 2i + 1)
    cache.head_dim = config->head_dim, cache.rope_halves = config->rope_halves;
    return cache;
}

// Allocates memory and uploads the weights. Returns NULL or an error message.
static const char *open_memory(Cuda *c, Model *model, const Opening *o, llamac_error *e) {
    CUDA(c, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    const char *wrong = allocate_all(c, &model->weights, e);
    if (wrong) return wrong;
    c->input_host = (Input *)allocate_pinned(sizeof(Input));
    if (c->input_host) c->best = (int *)allocate_pinned(sizeof(int));
    if (!c->best) return NOT_PINNED;
    upload_rotation(c, model->weights.frequencies);
    return upload(c, &model->weights, o);
}

// Finds out what the driver allows, and waits for the copies of open_memory.
static void try_driver(Cuda *c, const Weights *w) {
    // try_recording records a launch of convert. A kernel's first launch loads its code, which is
    // not possible during a recording, so convert is launched once before.
    launch(c, convert, 1, 256, 0, c->half_x, c->partials, 1);
    c->can_record = try_recording(c);
    open_token(c, w, c->first_cache);
    CUDA(c, cudaDeviceSynchronize());
}

// Fills in c. Returns NULL or an error message. Throws std::bad_alloc if the host has too little
// memory.
static const char *open_engine(Cuda *c, Model *model, const Opening *o, llamac_error *e) {
    c->config = model->config;
    c->float_cache = model->weights.layers[0].wk.type == F32;
    c->layer_cache = plan_layer_cache(&model->config, o->positions);
    // Attention of one token divides a head's positions into up to 16 splits, one per block. Each
    // has up to 256 positions (32 for each of a block's 8 warps), or up to SPLIT_POSITIONS if that
    // is smaller, and more only in contexts that exceed 16 such splits.
    int seen = model->config.window ? std::min(model->config.window, o->positions) : o->positions;
    int per_split = std::min(256, SPLIT_POSITIONS);
    c->splits = std::min((seen + per_split - 1) / per_split, 16);
    const char *wrong = find_device(c, e);
    if (!wrong) wrong = open_memory(c, model, o, e);
    if (!wrong) try_driver(c, &model->weights);
    if (!has_failed(c)) return wrong;
    snprintf(e->text, sizeof e->text, "%s; use --device=cpu", c->failure);
    return e->text;
}

const char *llamac_cuda_open(Backend **backend, Model *model, const Opening *o, llamac_error *e) {
    static const char no_memory[] = "the host's memory is too small";
    const char *wrong = check_model(model, e);
    if (wrong) return wrong;
    Cuda *c = new (std::nothrow) Cuda(); // zero-initialized
    if (!c) return no_memory;
    try {
        wrong = open_engine(c, model, o, e);
    } catch (const std::bad_alloc &) { // see cuda_alloc
        wrong = no_memory;
    }
    if (wrong) return cuda_close(&c->ops), wrong;
    Backend *b = &c->ops;
    b->chunk = CHUNK, b->max_runs = CHUNK, b->begin = begin, b->end = end, b->alloc = cuda_alloc;
    b->new_cache = new_cache, b->free_cache = free_cache, b->reserve = reserve, b->share = share;
    b->read_cache = read_cache, b->write_cache = write_cache;
    b->kv_bits = c->float_cache ? 32 : 16;
    b->embed = embed, b->attention = attention, b->add_product = add_product;
    b->feed_forward = feed_forward, b->gather = gather, b->logits = logits, b->choose = choose;
    b->hidden_states = hidden_states, b->bandwidth = bandwidth, b->failure = failure;
    b->close = cuda_close;
    *backend = b;
    return NULL;
}

// The KV caches of sequences. Each has memory for all positions that a sequence may have.
#pragma once
#include "session.cuh"

static void free_cache(Backend *b, Cache *cache) {
    Cuda *c = (Cuda *)b;
    // Does not use the macro CUDA, which would not free the memory after a failure. cudaFree may be
    // the first call that returns the failure of a kernel.
    for (void *array : {cache->keys, cache->values})
        if (array) check(c, cudaFree(array), "cudaFree", __FILE__, __LINE__);
    free(cache);
}

// Returns whether enough memory is free for a cache and the code of kernels. A kernel whose code
// does not fit fails permanently.
static bool has_memory_for_cache(Cuda *c) {
    size_t free_bytes = 0, total = 0;
    CUDA(c, cudaMemGetInfo(&free_bytes, &total));
    return free_bytes >= 2 * c->keys_bytes + KERNEL_CODE_BYTES;
}

// Returns NULL if there is not enough memory. After a failure of the GPU, returns a cache without
// memory: the pass that would use it reports the failure.
static Cache *allocate_cache(Cuda *c) {
    Cache *cache = (Cache *)calloc(1, sizeof *cache);
    if (!cache || has_failed(c)) return cache;
    if (has_memory_for_cache(c)) cache->keys = allocate_device(c->keys_bytes);
    if (cache->keys) cache->values = allocate_device(c->keys_bytes);
    if (!cache->values) return free_cache(&c->ops, cache), (Cache *)NULL;
    // Attention also reads the padding from head_dim to LayerCache.width, which is never written.
    CUDA(c, cudaMemsetAsync(cache->keys, 0, c->keys_bytes, c->stream));
    CUDA(c, cudaMemsetAsync(cache->values, 0, c->keys_bytes, c->stream));
    return cache;
}

static Cache *new_cache(Backend *b) {
    Cuda *c = (Cuda *)b;
    Cache *cache = c->first_cache;
    c->first_cache = NULL;
    return cache ? cache : allocate_cache(c);
}

// There is memory for all positions from the start.
static bool reserve(Backend *, Cache *, int, int) { return true; }

// Copies the first n positions of each head.
static bool share(Backend *b, Cache *cache, const Cache *from, int n) {
    Cuda *c = (Cuda *)b;
    size_t heads = (size_t)c->config.n_layers * c->config.n_kv_heads; // in all layers
    size_t pitch = c->keys_bytes / heads, bytes = pitch / c->layer_cache.positions * n;
    if (n == 0) return true;
    CUDA(c, cudaMemcpy2DAsync(cache->keys, pitch, from->keys, pitch, bytes, heads,
                              cudaMemcpyDeviceToDevice, c->stream));
    CUDA(c, cudaMemcpy2DAsync(cache->values, pitch, from->values, pitch, bytes, heads,
                              cudaMemcpyDeviceToDevice, c->stream));
    return true;
}

// Copies positions pos..pos+n-1 to or from `bytes`, in the layout of Backend.read_cache.
static void copy_positions(Cuda *c, const Cache *cache, int pos, int n, char *bytes,
                           cudaMemcpyKind kind) {
    size_t size = c->float_cache ? sizeof(float) : sizeof(__half);
    size_t row = c->config.head_dim * size, pitch = c->layer_cache.width * size;
    size_t heads = (size_t)c->config.n_layers * c->config.n_kv_heads; // in all layers
    if (has_failed(c)) return;                                 // the cache may have no memory
    for (size_t i = 0; i < 2 * heads; i++, bytes += n * row) { // the keys, then the values
        char *array = (char *)(i < heads ? cache->keys : cache->values);
        char *device = array + i % heads * (c->keys_bytes / heads) + pos * pitch;
        if (kind == cudaMemcpyDeviceToHost)
            CUDA(c, cudaMemcpy2DAsync(bytes, row, device, pitch, row, n, kind, c->stream));
        else CUDA(c, cudaMemcpy2DAsync(device, pitch, bytes, row, row, n, kind, c->stream));
    }
    CUDA(c, cudaStreamSynchronize(c->stream));
}

static void read_cache(Backend *b, const Cache *cache, int pos, int n, void *bytes) {
    copy_positions((Cuda *)b, cache, pos, n, (char *)bytes, cudaMemcpyDeviceToHost);
}

static void write_cache(Backend *b, Cache *cache, int pos, int n, const void *bytes) {
    copy_positions((Cuda *)b, cache, pos, n, (char *)bytes, cudaMemcpyHostToDevice);
}

// Copies the weights, and a table of RoPE's rotations, to the device.
#pragma once
#include <vector>
#include "session.cuh"

namespace cpu { // some names, such as TILE, also exist in this backend
#include "../cpu/blocks.h"
}

// ----------------------------------------------------------------------------
// Layout of c->weights: the values of all matrices, then the scales of all

// Bytes of a matrix on the device: of its values (quantized or not) and of their scales.
typedef struct { size_t values, scales; } MatBytes;

static MatBytes bytes_of(const Mat *m) {
    size_t n = (size_t)m->rows * m->cols;
    switch (m->type) {
    case F32: return {4 * n, 0};
    case F16:
    case BF16: return {2 * n, 0};
    case INT8_GROUPS: return {n, (n + m->group - 1) / m->group * 4};
    case Q8_0: return {n, n / 32 * scale_bytes(Q8_0) / 8};
    default: return {n / 2, n / 32 * scale_bytes(m->type) / 8};
    }
}

// Returns bytes_of(m), rounded up so that the next matrix is aligned. Rounding adds no gap after
// the values of a matrix that has_units accepts: its rows are multiples of 16 bytes. So join_rows
// can join wq, wk and wv, and w1 and w3, without a copy.
static MatBytes aligned_bytes_of(const Mat *m) {
    MatBytes bytes = bytes_of(m);
    auto round_up = [](size_t n, size_t to) { return (n + to - 1) / to * to; };
    return {round_up(bytes.values, sizeof(uint4)), round_up(bytes.scales, sizeof(float))};
}

// Returns every matrix (norms and biases too) once, in the order of their data in c->weights. Skips
// the output matrix if it is tied to the embedding, and biases and norms that the model lacks.
static std::vector<Mat *> matrices(Weights *w, int n_layers) {
    std::vector<Mat *> all = {&w->token_embedding, &w->norm};
    if (w->output.data != w->token_embedding.data) all.push_back(&w->output);
    for (Layer *l = w->layers; l < w->layers + n_layers; l++)
        all.insert(all.end(), {&l->attention_norm, &l->wq, &l->wk, &l->wv, &l->wo, &l->ffn_norm,
                               &l->w1, &l->w3, &l->w2});
    for (Layer *l = w->layers; l < w->layers + n_layers; l++)
        for (Mat *m : {&l->bq, &l->bk, &l->bv, &l->q_norm, &l->k_norm})
            if (m->data) all.push_back(m);
    return all;
}

// ----------------------------------------------------------------------------
// Copies through two pinned buffers: one is filled from the file while the other is copied

static const size_t BUFFER_BYTES = 32 << 20;

typedef struct {
    Cuda *c;
    char *buffers[2];
    cudaEvent_t copied[2]; // the copy of buffers[i] has finished, so it may be refilled
    int current;           // index of the buffer that was filled last
} Upload;

// Switches to the other buffer and waits until its last copy has finished. Returns the buffer.
static char *next_buffer(Upload *u) {
    u->current = !u->current;
    CUDA(u->c, cudaEventSynchronize(u->copied[u->current]));
    return u->buffers[u->current];
}

// Starts the copy of n bytes to device memory `to`. `from` points into the current buffer.
static void send(Upload *u, void *to, const char *from, size_t n) {
    CUDA(u->c, cudaMemcpyAsync(to, from, n, cudaMemcpyHostToDevice, u->c->stream));
    CUDA(u->c, cudaEventRecord(u->copied[u->current], u->c->stream));
}

static void upload_bytes(Upload *u, char *to, const void *from, size_t n) {
    for (size_t done = 0, count; done < n; done += count) {
        count = n - done < BUFFER_BYTES ? n - done : BUFFER_BYTES;
        char *buffer = next_buffer(u);
        memcpy(buffer, (const char *)from + done, count);
        send(u, to + done, buffer, count);
    }
}

// Uploads n blocks, each a scale of 2 bytes followed by WIDTH bytes of values. Separates them: the
// buffer holds the values of its blocks, then their scales.
template <size_t WIDTH>
static void upload_blocks(Upload *u, char *values, char *scales, const void *from, size_t n) {
    const char *block = (const char *)from;
    size_t max_blocks = BUFFER_BYTES / (2 + WIDTH);
    for (size_t done = 0, count; done < n; done += count) {
        count = n - done < max_blocks ? n - done : max_blocks;
        char *buffer = next_buffer(u);
        for (size_t i = 0; i < count; i++, block += 2 + WIDTH) {
            memcpy(buffer + i * WIDTH, block + 2, WIDTH);
            memcpy(buffer + count * WIDTH + 2 * i, block, 2);
        }
        send(u, values + done * WIDTH, buffer, count * WIDTH);
        send(u, scales + 2 * done, buffer + count * WIDTH, 2 * count);
    }
}

// ----------------------------------------------------------------------------
// Blocks with more than a scale

// Packs the fifth bits of q (32,) as fifth_bits expects them.
static uint32_t pack_fifth_bits(const uint8_t *q) {
    uint32_t bits = 0;
    for (int j = 0; j < 32; j++) bits |= (uint32_t)(q[j] >> 4 & 1) << (j % 4 * 8 + j / 4);
    return bits;
}

// Packs bits 4 and 5 of q (16,) as Block<Q6_K>::upper expects them.
static uint32_t pack_upper_two(const uint8_t *q) {
    uint32_t bits = 0;
    for (int j = 0; j < 16; j++) bits |= (uint32_t)(q[j] >> 4 & 3) << (j % 4 * 8 + j / 4 * 2);
    return bits;
}

// Reorders a block of the file: the low bits of its elements go to `values`, the rest to `scales`
// (see Block in formats.cuh).
template <Type type>
static void reorder_block(uint8_t *values, uint8_t *scales, const uint8_t *block) {
    const int units = block_size(type).numbers / 32;
    const uint8_t *halves = block + cpu::halves_at(type);
    cpu::Numbers n;
    cpu::read_block(type, &n, block);
    memset(scales, 0, 4);
    memcpy(scales, halves, 2 * cpu::halves_of(type));
    scales += 4;
    if (cpu::has_k_scales(type)) { // raw bytes, without read_block's factors
        cpu::read_k_scales(&n, block + 4, 1, 1);
        for (int i = 0; i < 8; i++, scales += 2)
            scales[0] = (uint8_t)n.scale[i], scales[1] = (uint8_t)n.min[i];
    }
    if (type == Q6_K) memcpy(scales, block + 192, 16), scales += 16;
    for (int u = 0; u < units; u++) {
        const uint8_t *q = n.q + 32 * u;
        for (int i = 0; i < 16; i++) *values++ = (q[i] & 15) | (q[i + 16] & 15) << 4;
        uint32_t upper[2] = {0};
        int bytes = 0;
        if (type == Q6_K)
            upper[0] = pack_upper_two(q), upper[1] = pack_upper_two(q + 16), bytes = 8;
        else if (type != Q4_1 && type != Q4_K) upper[0] = pack_fifth_bits(q), bytes = 4;
        memcpy(scales, upper, bytes);
        scales += bytes;
    }
}

// Uploads n blocks, reordered: the buffer holds the values of its blocks, then the rest.
template <Type type>
static void upload_reordered(Upload *u, char *values, char *scales, const void *from, size_t n) {
    const int numbers = block_size(type).numbers, width = numbers / 2,
              rest = scale_bytes(type) * numbers / 256;
    const uint8_t *block = (const uint8_t *)from;
    size_t max_blocks = BUFFER_BYTES / (width + rest);
    for (size_t done = 0, count; done < n; done += count) {
        count = std::min(n - done, max_blocks);
        char *buffer = next_buffer(u);
        for (size_t i = 0; i < count; i++, block += block_size(type).bytes)
            reorder_block<type>((uint8_t *)buffer + i * width,
                                (uint8_t *)buffer + count * width + i * rest, block);
        send(u, values + done * width, buffer, count * width);
        send(u, scales + done * rest, buffer + count * width, count * rest);
    }
}

// Uploads a matrix and makes *m point to its copy on the device.
static void upload_matrix(Upload *u, char *values, char *scales, Mat *m) {
    MatBytes bytes = bytes_of(m);
    size_t blocks = (size_t)m->rows * m->cols / 32;
    if (m->type == Q8_0) upload_blocks<32>(u, values, scales, m->data, blocks);
    else if (m->type == Q4_0) upload_blocks<16>(u, values, scales, m->data, blocks);
    else if (m->type == Q4_1) upload_reordered<Q4_1>(u, values, scales, m->data, blocks);
    else if (m->type == Q5_0) upload_reordered<Q5_0>(u, values, scales, m->data, blocks);
    else if (m->type == Q5_1) upload_reordered<Q5_1>(u, values, scales, m->data, blocks);
    else if (m->type == Q4_K) upload_reordered<Q4_K>(u, values, scales, m->data, blocks / 8);
    else if (m->type == Q5_K) upload_reordered<Q5_K>(u, values, scales, m->data, blocks / 8);
    else if (m->type == Q6_K) upload_reordered<Q6_K>(u, values, scales, m->data, blocks / 8);
    else {
        upload_bytes(u, values, m->data, bytes.values);
        if (bytes.scales) upload_bytes(u, scales, m->scales, bytes.scales);
    }
    m->data = values;
    m->scales = bytes.scales ? scales : NULL;
}

// Uploads `all` weights to c->weights and makes the model's matrices point there. Returns false if
// `progress` aborts it.
static bool upload_matrices(Upload *u, Weights *w, const std::vector<Mat *> &all,
                            const Opening *o) {
    Cuda *c = u->c;
    char *values = (char *)c->weights, *scales = values + c->values_bytes;
    bool is_tied = w->output.data == w->token_embedding.data; // the loop below changes the latter
    size_t done = 0;
    for (Mat *m : all) {
        if (o->progress && !o->progress(o->data, (float)done / c->weights_bytes)) return false;
        MatBytes bytes = aligned_bytes_of(m);
        c->uploaded.push_back({m, *m}); // close restores the host's Mat
        upload_matrix(u, values, scales, m);
        values += bytes.values, scales += bytes.scales;
        done += bytes.values + bytes.scales;
    }
    if (is_tied) {
        c->uploaded.push_back({&w->output, w->output});
        w->output = w->token_embedding;
    }
    return !o->progress || o->progress(o->data, 1);
}

// Allocates the buffers and uploads the weights through them. Returns NULL, or an error message if
// host memory cannot be pinned or if `progress` aborts it.
static const char *upload(Cuda *c, Weights *w, const Opening *o) {
    const char *wrong = NULL;
    Upload u = {};
    std::vector<Mat *> all = matrices(w, c->config.n_layers);
    c->uploaded.reserve(all.size() + 1); // so nothing throws before the buffers are freed
    u.c = c;
    for (int i = 0; i < 2; i++) {
        u.buffers[i] = (char *)allocate_pinned(BUFFER_BYTES);
        CUDA(c, cudaEventCreateWithFlags(&u.copied[i], cudaEventDisableTiming));
    }
    if (!u.buffers[0] || !u.buffers[1]) wrong = NOT_PINNED;
    else if (!upload_matrices(&u, w, all, o)) wrong = "aborted by the program";
    CUDA(c, cudaStreamSynchronize(c->stream));
    for (int i = 0; i < 2; i++) {
        if (u.buffers[i]) (void)cudaFreeHost(u.buffers[i]);
        if (u.copied[i]) (void)cudaEventDestroy(u.copied[i]);
    }
    return wrong;
}

// Fills c->rotation from frequencies (head_dim / 2,), in radians per position. Computes in double
// precision, as the CPU backend does, so that both round to the same floats.
static void upload_rotation(Cuda *c, const double *frequencies) {
    int positions = c->layer_cache.positions, half = c->config.head_dim / 2;
    std::vector<float> table(2 * (size_t)positions * half);
    for (int i = 0; i < half; i++) {
        for (int pos = 0; pos < positions; pos++) {
            double angle = pos * frequencies[i];
            float *cos_sin = &table[2 * ((size_t)pos * half + i)];
            cos_sin[0] = (float)(c->config.rope_scale * cos(angle));
            cos_sin[1] = (float)(c->config.rope_scale * sin(angle));
        }
    }
    size_t bytes = sizeof(float) * table.size();
    CUDA(c, cudaMemcpy(c->rotation, table.data(), bytes, cudaMemcpyHostToDevice));
}

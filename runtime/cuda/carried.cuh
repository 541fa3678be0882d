// Barriers that carry their data: a variant of whole_token, compiled with -DCARRIED=1. It has not
// been measured on a GPU yet; bench/gpu.py compares it with the default.
//
// At a grid barrier (whole_token.cuh), a block waits for its stores (a fence), counts itself (an
// atomic), reads the counter until all blocks are counted, and only then reads the data. Here each
// element of a vector is stored in an 8-byte word together with its epoch: the index of the vector,
// counted since the words were last zeroed. One store writes a word and one load reads it. A reader
// loads a word until it holds the expected epoch; the number in it is then valid. (NCCL's LL
// protocol sends data between GPUs in this way.) A word does not order other memory accesses.
//
// A layer computes five vectors: (1) queries, keys and values, (2) attention's result, (3) x,
// (4) h, (5) x again. Each has one array of words, which every layer overwrites. A reader of a word
// never finds a later epoch there, so it cannot miss the one that it waits for:
//
// - A block that receives a vector computes a part of the next vector from it. A block without a
//   part of the next vector receives nothing. So when a vector is complete, all blocks that need
//   the previous vector have received it, except for x, to which its owner adds later.
// - Parts of products are computed from all of the previous vector. Heads of attention are computed
//   from their own queries, keys and values, and parts of the next product from all heads. So a
//   part of vector v + 3 or a later one exists only when vector v + 1 is complete. Vector v + 5
//   overwrites v.
// - x is vector 5 l + 3 and 5 l + 5 of the layers, in one array. Vector 5 l + 3 overwrites 5 l: see
//   above. Vector 5 l + 5 overwrites 5 l + 3: a part of it is a product with all of h, vector
//   5 l + 4, and a part of h is a product with all of 5 l + 3. So by then all blocks have received
//   5 l + 3 to multiply it. To add to it, only the thread that overwrites a word receives that
//   word, and it does so first.
// - A block without a share of the logits does not receive the last layer's x. The barrier after
//   the logits is a counting one, and the next token is another launch of the kernel.
//
// Data dependence orders these steps without fences: a value is not computed before the loads that
// it depends on have returned (PTX, memory consistency model: no values out of thin air). Of two
// stores to a word, the later one depends on a load that has returned the earlier one. Without
// fences, PTX does not guarantee that they reach memory in this order. The code relies on the L2
// cache, which handles the stores and loads of all multiprocessors to an address.
#pragma once
#include "attention.cuh"

#ifndef CARRIED
#define CARRIED 0
#endif

// The largest epoch. Before a token would exceed it, the host zeroes the words and counts from 0
// again. So no word keeps an epoch from before the wrap-around, not even the words of partial
// softmaxes, which few tokens write. 2^32 epochs are 39 million tokens of 22 layers. Tests set a
// small number.
#ifndef LAST_EPOCH
#define LAST_EPOCH 0xffffffffu
#endif

enum { LAYER_VECTORS = 5 }; // vectors that a layer computes

// The words of the vectors. A word holds the epoch in its upper half and a float in its lower half.
typedef struct {
    uint64_t *x;        // (dim,)
    uint64_t *h;        // (hidden_dim,)
    uint64_t *qkv;      // (q_dim + 2 kv_dim,)
    uint64_t *attended; // (q_dim,); if blocks share heads, (n_heads, splits, 2 + head_dim): each
                        // block's largest score, sum of weights and weighted sum of values
} CarriedWords;

static __device__ uint64_t word_of(float number, unsigned epoch) {
    return (uint64_t)epoch << 32 | __float_as_uint(number);
}

static __device__ void send(uint64_t *to, float number, unsigned epoch) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word_of(number, epoch)));
#else
    *(volatile uint64_t *)to = word_of(number, epoch);
#endif
}

// Sends two consecutive words, at an even index.
static __device__ void send_pair(uint64_t *to, float a, float b, unsigned epoch) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(word_of(a, epoch)),
                 "l"(word_of(b, epoch)));
#else
    send(to, a, epoch), send(to + 1, b, epoch);
#endif
}

// Loads two consecutive words, at an even index. Each word is loaded atomically, but not the pair.
static __device__ void load_pair(const uint64_t *from, uint64_t words[2]) {
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(words[0]), "=l"(words[1])
                 : "l"(from));
#else
    for (int i = 0; i < 2; i++) words[i] = ((const volatile uint64_t *)from)[i];
#endif
}

// Waits until PAIRS pairs of words hold `epoch`, then writes their 2 * PAIRS numbers to `numbers`.
// pair(i) returns the address of pair i. All loads are in flight together.
template <int PAIRS, typename F>
static __device__ void receive_pairs(F pair, unsigned epoch, float *numbers) {
    uint64_t words[2 * PAIRS];
    for (;;) {
        bool complete = true;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) load_pair(pair(i), words + 2 * i);
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) complete = complete && words[i] >> 32 == epoch;
        if (complete) break;
#ifndef __CUDA_ARCH__
        __nanosleep(20); // lets other threads run
#endif
    }
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) numbers[i] = __uint_as_float((uint32_t)words[i]);
}

// Receives 2 * PAIRS consecutive words.
template <int PAIRS>
static __device__ void receive(const uint64_t *from, unsigned epoch, float *numbers) {
    receive_pairs<PAIRS>([&](int i) { return from + 2 * i; }, epoch, numbers);
}

// Returns the words of a block's partial softmax of a head.
static __device__ uint64_t *partial_words(uint64_t *attended, const HeadSplit &part, int head_dim) {
    return attended + (size_t)(part.h * part.splits + part.split) * (2 + head_dim);
}

// Sends dimension d of a block's attention: of the result, or of its partial softmax.
static __device__ void send_attended(uint64_t *attended, const HeadSplit &part, int head_dim, int d,
                                     const HeadPartial &partial, unsigned epoch) {
    if (part.splits == 1)
        return send(attended + part.h * head_dim + d, partial.out / partial.sum, epoch);
    uint64_t *words = partial_words(attended, part, head_dim);
    if (d == 0) send_pair(words, partial.max, partial.sum, epoch);
    send(words + 2 + d, partial.out, epoch);
}

// Receives elements i to i + 7 of attention's result, x (8,), where `splits` blocks share a head:
// merges their partial softmaxes. A pair of elements belongs to one head, because head_dim is even.
static __device__ void receive_merged(uint64_t *attended, int head_dim, int splits, int i,
                                      unsigned epoch, float *x) {
    float max[4], sum[4];
#pragma unroll
    for (int k = 0; k < 4; k++) max[k] = -INFINITY, sum[k] = x[2 * k] = x[2 * k + 1] = 0;
    for (int split = 0; split < splits; split++) {
        float parts[16]; // for each pair: its head's largest score and sum, and the two elements
        auto pair = [&](int k) -> const uint64_t * {
            int element = i + k / 2 * 2;
            HeadSplit part = {element / head_dim, split, splits, 0, 0};
            return partial_words(attended, part, head_dim) + (k % 2 ? 2 + element % head_dim : 0);
        };
        receive_pairs<8>(pair, epoch, parts);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *part = parts + 4 * k;
            if (part[0] == -INFINITY) continue; // a partial without positions has weight 0
            float larger = fmaxf(max[k], part[0]);
            float rescale = expf(max[k] - larger), weight = expf(part[0] - larger);
            max[k] = larger, sum[k] = sum[k] * rescale + weight * part[1];
            x[2 * k] = x[2 * k] * rescale + weight * part[2];
            x[2 * k + 1] = x[2 * k + 1] * rescale + weight * part[3];
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) x[2 * k] /= sum[k], x[2 * k + 1] /= sum[k];
}

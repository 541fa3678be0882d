// The contract between run.c (files, tokenizer, forward, command line) and the kernels (all the arithmetic).
// Sizes stand on every field: (rows, columns), row-major; T is the number of tokens a call works on.
#ifndef BACKEND_H
#define BACKEND_H

// Not a number and infinity have to be seen where they come up, and small numbers must not become zero. The last of the
// macros is 0 with any of GCC's flags that -ffast-math stands for.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || (defined(__GCC_IEC_559) && !__GCC_IEC_559)
#error "compile with -O3 instead of -Ofast, -ffast-math or the like: they remove the checks for broken numbers"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "llamac.h"

// How the numbers of a matrix are stored. The values are GGUF's, but for llama2.c's int8 groups, unknown to it.
typedef enum {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,           // blocks of 32 in a row: half-precision scale, 16 bytes of (low, high) nibbles, value = q - 8
    Q4_1 = 3,           // the same with a half-precision minimum, value = scale * q + minimum
    Q5_0 = 6,           // Q4_0 and Q4_1 with a fifth bit, of value = q - 16
    Q5_1 = 7,
    Q8_0 = 8,           // blocks of 32 in a row: half-precision scale, 32 signed bytes
    Q4_K = 12,          // blocks of 256 in a row: eight scales and minima of 6 bits, in units of two half-precision numbers
    Q5_K = 13,          // the same with a fifth bit
    Q6_K = 14,          // blocks of 256 in a row: sixteen scales of 8 bits in units of a half-precision number, value = q - 32
    BF16 = 30,
    INT8_GROUPS = 1000, // signed bytes; one float32 scale for each `group` numbers of the flattened matrix
} Type;

#define GGUF_TYPES "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K" // for messages

typedef struct { int numbers, bytes; } BlockSize;

// How many numbers of a row are stored together, in how many bytes; none where the type is not one of GGUF_TYPES.
static inline BlockSize block_size(uint32_t type) {
    switch (type) {
    case F32: return (BlockSize){1, 4};
    case F16: return (BlockSize){1, 2};
    case BF16: return (BlockSize){1, 2};
    case Q8_0: return (BlockSize){32, 34};
    case Q4_0: return (BlockSize){32, 18};
    case Q4_1: return (BlockSize){32, 20};
    case Q5_0: return (BlockSize){32, 22};
    case Q5_1: return (BlockSize){32, 24};
    case Q4_K: return (BlockSize){256, 144};
    case Q5_K: return (BlockSize){256, 176};
    case Q6_K: return (BlockSize){256, 210};
    default: return (BlockSize){0, 0};
    }
}

// A type for messages: ggml's name, or its number in `text`.
const char *llamac_type_name(uint32_t type, char text[12]);

typedef struct {
    Type type;
    int rows, cols;
    const void *data;   // (rows, cols) in `type`, in the mapped file or wherever the backend moved it
    const void *scales; // INT8_GROUPS: (ceil(rows * cols / group),) float32, perhaps unaligned; otherwise NULL
    int group;          // INT8_GROUPS: numbers that share a scale
    void *tiles;        // the CPU's own order of the same numbers, where it keeps one; otherwise NULL
} Mat;

typedef struct {
    int dim;            // width of the residual stream
    int hidden_dim;     // width inside the feed-forward network
    int n_layers;
    int n_heads;        // query heads
    int n_kv_heads;     // key and value heads; n_heads / n_kv_heads query heads share one
    int vocab_size;
    int seq_len;        // longest context the model was made for
    int head_dim;       // width of a head, even
    int q_dim;          // n_heads * head_dim
    int kv_dim;         // n_kv_heads * head_dim
    int window;         // positions that a token sees at most, itself among them; 0: all before it
    float norm_eps;     // inside RMSNorm's square root
    bool rope_halves;   // RoPE's pairs in a head are (i, i + head_dim / 2); else (2i, 2i + 1)
    float rope_scale;   // RoPE multiplies queries and keys by it (YaRN); else 1
} Config;

typedef struct {
    Mat attention_norm; // (1, dim) F32
    Mat wq;             // (q_dim, dim)
    Mat wk, wv;         // (kv_dim, dim)
    Mat bq, bk, bv;     // (1, q_dim), (1, kv_dim) twice F32; data is NULL where there is none
    Mat q_norm, k_norm; // (1, head_dim) F32; likewise
    Mat wo;             // (dim, q_dim)
    Mat ffn_norm;       // (1, dim) F32
    Mat w1, w3;         // (hidden_dim, dim): gate, up
    Mat w2;             // (dim, hidden_dim): down
} Layer;

typedef struct {
    Mat token_embedding; // (vocab_size, dim)
    Layer *layers;       // (n_layers,)
    Mat norm;            // (1, dim) F32
    Mat output;          // (vocab_size, dim); the embedding itself when the two are tied
    Mat rope_factors; // (1, head_dim / 2) F32 in the file, which the frequencies are divided by; data is NULL where there is none
    double *frequencies; // (head_dim / 2,) of RoPE: by how many radians a pair turns from a position to the next
} Weights;

typedef struct {
    Config config;
    Weights weights;
    const uint8_t *data; // GGUF: the tensors of the file, to its end
    size_t data_size; // bytes
    const uint8_t *list; // GGUF: names, shapes, types and offsets of the tensors
    size_t list_size; // bytes
    bool mapped; // the weights lie in a mapped file: pages that are dropped come back
    bool no_copy; // the CPU is to leave them there, where processes share them
    int kv_bits; // of a number in the CPU's cache of keys and values: 32, 16 or 8; 0: 16 where the weights are quantised, else 32
    const char *sha256; // their checksum by the file's metadata, 64 hexadecimal digits; NULL when there is none
    const char *list_sha256; // the list's
} Model;

typedef struct Backend Backend;

// The operations of a transformer, as coarse as speed needs: each does what its comment says, in any order behind embed.
// norm(x) = x / sqrt(mean(x^2) + norm_eps) * weight, token by token. The KV cache and what stands between the products of an op
// belong to the backend: their format and place are nobody else's business.
struct Backend {
    int chunk; // most tokens in one call
    // Around the ops of one call of forward, where the backend has them (else NULL). begin returns whether the ops have
    // to be called; not so once they are recorded: end then replays them for these tokens (T,) at pos..pos+T-1. What
    // the ops compute is there after end.
    bool (*begin)(Backend *, const int *tokens, int T, int pos, bool all);
    void (*end)(Backend *);
    // Uninitialised room for n floats that the ops below can work on, freed by close; NULL when there is none.
    float *(*alloc)(Backend *, size_t n);
    // x (T, dim) = rows `tokens` (T,) of the table: the first op of a call of forward
    void (*embed)(Backend *, float *x, const Mat *table, const int *tokens, int T);
    // out (T, q_dim) = causal attention of q, k, v (T, q_dim or kv_dim) = norm(x) wq^T + bq, norm(x) wk^T + bk, norm(x) wv^T + bv,
    // where norm is attention_norm of x (T, dim). Each head of q and k is normalised by q_norm and k_norm, where the layer has
    // them, and rotated for positions pos..pos+T-1; k and v go to the layer's cache; token t sees positions 0..pos+t, or
    // the last `window` of them
    void (*attention)(Backend *, int layer, const Layer *, float *out, const float *x, int pos, int T);
    // x (T, w.rows) += y (T, w.cols) w^T
    void (*add_product)(Backend *, float *x, const Mat *w, const float *y, int T);
    // x (T, dim) += (silu(y w1^T) * (y w3^T)) w2^T, where y (T, dim) = ffn_norm of x
    void (*feed_forward)(Backend *, const Layer *, float *x, int T);
    // logits (T, vocab_size), in the host's memory = norm(x) output^T of x (T, dim). Where the backend has choose (else
    // NULL), logits may be NULL and T 1: they stay with the backend then
    void (*logits)(Backend *, float *logits, const Mat *norm, const Mat *output, const float *x, int T);
    // The next token by the logits that stayed: the largest, the first of equals, where temperature is 0, else drawn as by
    // run.c's sampler, coin in [0, 1). -1 if one is not finite
    int (*choose)(Backend *, float temperature, float topp, float coin);
    // Bytes per second at which the backend reads memory, n bytes over and over: those, or as many of its own
    double (*bandwidth)(Backend *, const void *bytes, size_t n);
    void (*close)(Backend *);
};

// Opens the CPU with a KV cache for `positions` tokens and a team of n_threads. May move weights to its own memory.
// Returns NULL or what is wrong.
const char *llamac_cpu_open(Backend **backend, Model *model, int positions, int n_threads);

// Asks the system to keep n bytes, of its own memory or a mapped file's, in large pages, where it has them.
void llamac_use_large_pages(const void *p, size_t n);

// Opens the GPU with a KV cache for `positions` tokens, and moves the weights to its memory. Returns NULL, or what is
// wrong, as a constant or in the last argument; the weights are then where they were.
const char *llamac_cuda_open(Backend **backend, Model *model, int positions, llamac_error *);

#ifdef __cplusplus
}
#endif
#endif

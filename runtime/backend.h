// The interface between forward (llama.c) and the backends, which do all the arithmetic. Shapes in
// comments are (rows, columns), row-major. T is the number of tokens of a call.
#ifndef BACKEND_H
#define BACKEND_H

// -ffast-math breaks the checks for NaN and infinity, and flushes subnormal numbers to 0. It is a
// set of flags: GCC sets __GCC_IEC_559 to 0 also if only some of them are given.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) \
    || (defined(__GCC_IEC_559) && !__GCC_IEC_559)
#error "compile with -O3 instead of -Ofast, -ffast-math or the like: they break the checks for NaN"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "llamac.h"

// How the numbers of a matrix are stored. The values are those of GGUF, except INT8_GROUPS, which
// is a format of llama2.c.
typedef enum {
    F32 = 0,
    F16 = 1,
    // blocks of 32 in a row: scale (half precision), 16 bytes; the low nibble of byte i is q of
    // number i, the high nibble that of number i + 16; value = scale * (q - 8)
    Q4_0 = 2,
    Q4_1 = 3, // the same with a minimum (half precision); value = scale * q + minimum
    Q5_0 = 6, // Q4_0 and Q4_1 with a fifth bit; Q5_0 has value = scale * (q - 16)
    Q5_1 = 7,
    Q8_0 = 8, // blocks of 32 in a row: scale (half precision), 32 signed bytes
    // blocks of 256 in a row: two half-precision numbers d and e; a 6-bit scale and a 6-bit minimum
    // for each 32 numbers; 128 bytes of nibbles; value = d * scale * q - e * minimum
    Q4_K = 12,
    Q5_K = 13, // the same with a fifth bit
    // blocks of 256 in a row: numbers q of 6 bits; a signed 8-bit scale for each 16 numbers; one
    // half-precision number d; value = d * scale * (q - 32)
    Q6_K = 14,
    BF16 = 30,
    // signed bytes; one float32 scale for each `group` numbers of the flattened matrix
    INT8_GROUPS = 1000,
} Type;

#define GGUF_TYPES \
    "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K" // for messages

typedef struct { int numbers, bytes; } BlockSize;

// Returns how many numbers of a row form a block, and its bytes; zeros for a type that is not one
// of GGUF_TYPES. The loader refuses rows that are not a whole number of blocks.
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

// Returns the name of a type for messages: that of ggml, or its number, written to `text`.
const char *llamac_type_name(uint32_t type, char text[12]);

typedef struct {
    Type type;
    int rows, cols;
    // (rows, cols) in `type`: in the bytes of the model file, or in the backend's memory
    const void *data;
    // INT8_GROUPS: (ceil(rows * cols / group),) float32, perhaps unaligned; else NULL
    const void *scales;
    int group;   // INT8_GROUPS: numbers that share a scale
    void *tiles; // the same numbers packed in tiles by the CPU backend, or NULL
} Mat;

typedef struct {
    int dim;        // width of the residual stream
    int hidden_dim; // width inside the feed-forward network
    int n_layers;
    int n_heads;    // query heads
    int n_kv_heads; // key and value heads; each is shared by n_heads / n_kv_heads query heads
    int vocab_size;
    int seq_len;  // max context
    int head_dim; // width of a head, even
    int q_dim;    // n_heads * head_dim
    int kv_dim;   // n_kv_heads * head_dim
    // sliding window: max positions that a token attends to, its own included; 0: no limit
    int window;
    float norm_eps;   // added to the mean square in RMSNorm
    bool rope_halves; // pairs of RoPE in a head are (i, i + head_dim / 2), else (2i, 2i + 1)
    float rope_scale; // YaRN: multiplies queries and keys after RoPE; 1 without YaRN
} Config;

typedef struct {
    Mat attention_norm; // (1, dim) F32
    Mat wq;             // (q_dim, dim)
    Mat wk, wv;         // (kv_dim, dim)
    // (1, q_dim), (1, kv_dim), (1, kv_dim) F32; data is NULL if the model has no biases
    Mat bq, bk, bv;
    // (1, head_dim) F32; data is NULL if the model has no norms of queries and keys
    Mat q_norm, k_norm;
    Mat wo;       // (dim, q_dim)
    Mat ffn_norm; // (1, dim) F32
    Mat w1, w3;   // (hidden_dim, dim): gate, up
    Mat w2;       // (dim, hidden_dim): down
} Layer;

typedef struct {
    Mat token_embedding; // (vocab_size, dim)
    Layer *layers;       // (n_layers,)
    Mat norm;            // (1, dim) F32
    Mat output;          // (vocab_size, dim); the same as token_embedding if the two are tied
    // (1, head_dim / 2) F32: divisors of the frequencies; data is NULL if the file has none
    Mat rope_factors;
    // (head_dim / 2,): RoPE rotates pair i by frequencies[i] radians for each position
    double *frequencies;
} Weights;

typedef struct {
    Config config;
    Weights weights;
    const uint8_t *data; // GGUF: the data of all tensors, up to the end of the file
    size_t data_size;    // bytes
    const uint8_t *list; // GGUF: the list of names, shapes, types and offsets of the tensors
    size_t list_size;    // bytes
    // the mapped file with the weights: the system reads pages again that were dropped from memory.
    // NULL: the weights are in memory of the program
    const struct File *file;
    bool stream; // LLAMAC_STREAM
    // SHA-256 of `data` according to the file, 64 hexadecimal digits; NULL if the file has none
    const char *sha256;
    const char *list_sha256; // likewise of `list`
} Model;

typedef struct Backend Backend;
typedef struct Cache Cache; // the KV cache of a sequence: keys and values of its tokens

// Tokens first..first+n-1 of a batch: n consecutive tokens of one sequence, at positions
// pos..pos+n-1.
typedef struct {
    Cache *cache;
    int first, n, pos;
} Run;

// The tokens that one pass through the model evaluates.
typedef struct {
    const int *tokens; // (T,)
    int T;
    const Run *runs; // (n_runs,) in the order of the tokens, which they cover
    int n_runs;
    const int *wanted; // (n_wanted,) ascending indices of the tokens whose logits are computed
    int n_wanted;
    // (n_wanted, vocab_size) in host memory: where the logits are written. NULL if n_wanted is at
    // most 1 and the backend has `choose`: the logits stay in the backend's memory
    float *logits;
    // (n_wanted, dim) in host memory: where the hidden states of the wanted tokens are written,
    // which are then computed instead of their logits; else NULL
    float *hidden_states;
} Batch;

// The operations (ops) of a transformer. Each one fuses several steps where that is faster. embed
// is called first; the others may follow in any order. For each token,
// norm(x) = x / sqrt(mean(x^2) + norm_eps) * weight. The layout of the KV cache and the format of
// values inside an op are private to the backend.
//
// In the CPU backend, the result of an op for a token does not depend, to the last bit, on the
// other tokens of the batch.
struct Backend {
    int chunk;    // max tokens of a batch
    int max_runs; // max runs of a batch
    // bits of a number in the KV cache: 32 (float32), 16 (half precision), or 8 (signed bytes, with
    // a float32 scale for each key and each value of a head)
    int kv_bits;
    // begin and end may be NULL. Between them, x and attention_out have room for `chunk` tokens,
    // and the ops may use all of it. forward calls begin, then the ops unless begin returned false,
    // and always end, which completes the results. If begin returns false, the backend itself
    // computes the batch, from a recording of the ops of an earlier call or in one kernel.
    bool (*begin)(Backend *, const Batch *);
    void (*end)(Backend *);
    // Returns uninitialised memory for n floats that the ops can use, freed by close; NULL if there
    // is not enough.
    float *(*alloc)(Backend *, size_t n);
    // Creates an empty cache. Returns NULL if there is not enough memory.
    Cache *(*new_cache)(Backend *);
    void (*free_cache)(Backend *, Cache *);
    // Prepares positions pos..pos+n-1 of the cache for writing. They follow the positions in use,
    // or replace those from pos on. Returns false if there is not enough memory.
    bool (*reserve)(Backend *, Cache *, int pos, int n);
    // Makes an empty cache share the first n positions of another. Returns false if there is not
    // enough memory.
    bool (*share)(Backend *, Cache *, const Cache *from, int n);
    // Copies positions pos..pos+n-1 of a cache to `bytes`, in a layout that does not depend on the
    // backend: keys (n_layers, n_kv_heads, n, head_dim) and values of the same shape, of kv_bits
    // each; if kv_bits is 8, then the scales of the keys (n_layers, n_kv_heads, n) and those of the
    // values.
    void (*read_cache)(Backend *, const Cache *, int pos, int n, void *bytes);
    // Copies such bytes to positions that are reserved.
    void (*write_cache)(Backend *, Cache *, int pos, int n, const void *bytes);
    // x (T, dim) = rows `tokens` (T,) of the table. The first op of a call of forward
    void (*embed)(Backend *, float *x, const Mat *table, const int *tokens, int T);
    // Computes causal attention of x (T, dim):
    //   y = attention_norm of x
    //   q (T, q_dim) = y wq^T + bq; k (T, kv_dim) = y wk^T + bk; v (T, kv_dim) = y wv^T + bv
    //   (biases, q_norm and k_norm only if the layer has them)
    //   q_norm and k_norm normalise each head of q and k
    //   RoPE rotates q and k for the positions of the tokens
    //   k and v are stored in the caches of the layer
    //   out (T, q_dim) = attention; a token at position p of a sequence attends to its positions
    //   0..p, or the last `window` of them
    void (*attention)(Backend *, const Batch *, int layer, const Layer *, float *out,
                      const float *x);
    // x (T, w.rows) += y (T, w.cols) w^T
    void (*add_product)(Backend *, float *x, const Mat *w, const float *y, int T);
    // x (T, dim) += (silu(y w1^T) * (y w3^T)) w2^T, where y (T, dim) = ffn_norm of x
    void (*feed_forward)(Backend *, const Layer *, float *x, int T);
    // x (n, dim) = rows rows[0..n-1] of x; they ascend
    void (*gather)(Backend *, float *x, const int *rows, int n);
    // logits (T, vocab_size), in host memory, = norm(x) output^T of x (T, dim). NULL: they stay in
    // the backend's memory
    void (*logits)(Backend *, float *logits, const Mat *norm, const Mat *output, const float *x,
                   int T);
    // out (T, dim), in host memory, = norm(x) of x (T, dim)
    void (*hidden_states)(Backend *, float *out, const Mat *norm, const float *x, int T);
    // Samples the next token from the logits in the backend's memory. Temperature 0: the largest,
    // the first of equals; else like sampler.c with `coin` in [0, 1). Returns -1 if a logit is not
    // finite. NULL in the CPU backend
    int (*choose)(Backend *, float temperature, float topp, float coin);
    // Measures how fast the backend reads weights, in bytes per second. It reads at most n bytes of
    // its own copy or, if it has none, the n bytes at `bytes`
    double (*bandwidth)(Backend *, const void *bytes, size_t n);
    // CPU: bytes of weights that each pass reads from the file, because they are not kept in memory
    uint64_t streamed;
    // Returns the error that has made the backend unusable, or NULL.
    const char *(*failure)(const Backend *);
    void (*close)(Backend *);
};

// Options with which both backends are opened.
typedef struct {
    int positions; // max tokens of a sequence
    int n_threads; // CPU
    bool no_copy;  // CPU: do not copy the weights
    int kv_bits; // CPU: bits of a number in the KV cache, 32, 16 or 8; 0: 16 for quantised weights
    bool (*progress)(void *data, float share); // llamac_options.progress
    void *data;
    const struct Kernels *kernels; // CPU: of the instruction set to use
} Opening;

// Opens the CPU backend. Returns NULL, or the error.
const char *llamac_cpu_open(Backend **backend, Model *model, const Opening *);

// Opens the GPU backend. Copies the weights to its memory and makes `model` point to them there,
// until close restores the pointers. Returns NULL, or the error: a constant, or the text in the
// last argument. After an error, the backend is not open and the model is unchanged.
const char *llamac_cuda_open(Backend **backend, Model *model, const Opening *, llamac_error *);

#ifdef __cplusplus
}
#endif
#endif

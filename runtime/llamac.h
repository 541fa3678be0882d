// llamac: runs Llama models inside a C program.
//
//     llamac_error error;
//     llamac_model *model = llamac_open("model.gguf", 0, &error);
//     llamac_session *session = llamac_start(model, NULL, &error);
//     int n, *tokens = llamac_encode(model, "Once", 4, true, &n, &error);
//     llamac_forward(session, tokens, n, 0, &error);
//
// examples/embed.c is a complete program. A function that can fail returns NULL, false or -1 and
// writes one line to its last argument, which may be NULL; on success that is left unchanged. An
// invalid argument, such as a NULL model, is a failure.
// The library prints nothing, and never ends the program, except when a GPU fails during its work.
// There is no static state: a program may have any number of models and sessions. Threads may share
// a model after it is set up; a session may be used by one thread at a time.
#ifndef LLAMAC_H
#define LLAMAC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define LLAMAC_API __attribute__((visibility("default")))
#else
#define LLAMAC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct llamac_model llamac_model; // weights and tokenizer of a file
typedef struct llamac_session
    llamac_session; // a context: the KV cache, and the threads or the GPU that compute

typedef struct { char text[512]; } llamac_error; // printable ASCII

// ----------------------------------------------------------------------------
// Models

enum { LLAMAC_NO_TOKENIZER = 1 }; // flag: do not read the tokenizer

// Opens a model file: GGUF, or one of the formats of llama2.c (v0, v1, v2). The file stays mapped
// until llamac_close.
LLAMAC_API llamac_model *llamac_open(const char *path, int flags, llamac_error *);

// The same for a file in memory, which must stay valid until llamac_close. `bytes` must be aligned
// like memory from malloc.
LLAMAC_API llamac_model *llamac_open_memory(const void *bytes, size_t size, int flags,
                                            llamac_error *);

// Replaces the tokenizer by that of a file in llama2.c's format (tokenizer.bin). Unsets the chat
// template.
LLAMAC_API bool llamac_open_tokenizer(llamac_model *, const char *path, llamac_error *);

// Compares the weights with the SHA-256 that export.py stored in the file. A file without one is a
// failure.
LLAMAC_API bool llamac_verify(const llamac_model *, llamac_error *);

// Frees a model. Stop all its sessions first. NULL is allowed.
LLAMAC_API void llamac_close(llamac_model *);

typedef struct {
    int dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size;
    int seq_len; // max context
    bool has_tokenizer;
    bool add_bos; // texts begin with the token `bos`
    int bos, eos; // tokens that begin and end a text; -1: the tokenizer has none
    int eot;      // token that ends an answer; -1: the tokenizer has none
} llamac_info;

LLAMAC_API llamac_info llamac_describe(const llamac_model *);

// ----------------------------------------------------------------------------
// Text

// Encodes n bytes of text. Returns the tokens, to be freed with llamac_free, and their number in
// *n_tokens. `bos`: begin with the token BOS. Text never becomes a control token.
LLAMAC_API int *llamac_encode(const llamac_model *, const char *text, size_t n, bool bos,
                              int *n_tokens, llamac_error *);

// Decodes a token: writes at most `room` bytes of its text, without a zero at the end, and returns
// the length of all of it. `previous` is the token before: after BOS, the space that llamac_encode
// puts before a text is removed. A character may be split over several tokens.
LLAMAC_API size_t llamac_decode(const llamac_model *, int previous, int token, char *out,
                                size_t room);

// Returns the length of the UTF-8 character at the beginning of s (n bytes); 0 if it is invalid.
LLAMAC_API int llamac_utf8(const char *s, size_t n);

// Sets the chat template: chatml, llama3, zephyr or llama2. NULL recognises the template of the
// model file by its markers (files in llama2.c's formats use llama2). From then on its markers,
// such as <|im_end|>, are control tokens.
LLAMAC_API bool llamac_use_template(llamac_model *, const char *name, llamac_error *);

// Encodes a turn of the user, up to where the answer begins; like llamac_encode. The system prompt
// (NULL: none) is used in the first turn only.
LLAMAC_API int *llamac_encode_turn(const llamac_model *, bool first, const char *system,
                                   const char *words, size_t n, int *n_tokens, llamac_error *);

// Encodes an earlier answer without its end marker, with which the next turn begins. Use it to
// rebuild a conversation; a session that continues has the tokens of the answer already.
LLAMAC_API int *llamac_encode_answer(const llamac_model *, const char *words, size_t n,
                                     int *n_tokens, llamac_error *);

// Returns whether a token ends a text, or an answer in the chat template in use. False without a
// tokenizer.
LLAMAC_API bool llamac_ends(const llamac_model *, int token);

LLAMAC_API void llamac_free(void *);

// ----------------------------------------------------------------------------
// Computing

typedef enum {
    LLAMAC_SAMPLE_ONLY, // for llamac_sample only; a GPU keeps the logits in its memory
    LLAMAC_LAST_LOGITS, // llamac_logits has those of the last token of a call
    LLAMAC_ALL_LOGITS,  // of all tokens of a call, which has at most llamac_chunk tokens then
} llamac_logits_kept;

typedef struct {
    int positions; // max tokens in the KV cache; 0: the seq_len of the model
    int n_threads; // threads of the CPU; 0: one for each usable core, at most 64
    // cpu, cuda, or auto: cuda if it can be used; NULL: the default of the build
    const char *device;
    // compute from the pages of the file, which processes share; slower after the first tokens
    bool no_copy;
    llamac_logits_kept logits;
    // bits of a number in the KV cache: 32, 16 or 8; 0: 16 if the weights are quantised, else 32
    int kv_bits;
} llamac_options;

// Begins a session. Options may be NULL: all zero. Sessions of one model share its file, but each
// may keep a copy of the weights in tiles.
LLAMAC_API llamac_session *llamac_start(const llamac_model *, const llamac_options *,
                                        llamac_error *);

// Ends a session. NULL is allowed.
LLAMAC_API void llamac_stop(llamac_session *);

// Returns a message for the user about how the session began, such as why it fell back to the CPU;
// "" if there is none.
LLAMAC_API const char *llamac_note(const llamac_session *);

// Returns the max number of tokens for which one call keeps all logits.
LLAMAC_API int llamac_chunk(const llamac_session *);

LLAMAC_API int llamac_positions(const llamac_session *);

// Evaluates n tokens at positions pos..pos+n-1. Earlier calls must have filled positions 0..pos-1.
LLAMAC_API bool llamac_forward(llamac_session *, const int *tokens, int n, int pos, llamac_error *);

// Returns the logits of the last call: (vocab_size,) floats or, with LLAMAC_ALL_LOGITS, (n,
// vocab_size). NULL with LLAMAC_SAMPLE_ONLY, and before the first call.
LLAMAC_API const float *llamac_logits(const llamac_session *);

// Computes *nll = -log of the probability of `token` from row `row` of the logits. Fails if they
// are not finite.
LLAMAC_API bool llamac_nll(llamac_session *, int row, int token, double *nll, llamac_error *);

typedef struct {
    float temperature; // 0: greedy
    float topp; // sample from the most likely tokens with this total probability; 0 or 1: from all
    uint64_t state; // of the random generator: a seed
} llamac_sampler;

// Samples the token after the last one evaluated. The logits are unchanged, so the next call
// samples again. Returns -1 if they are not finite. A seed gives the same text as in llama2.c.
LLAMAC_API int llamac_sample(llamac_session *, llamac_sampler *, llamac_error *);

// ----------------------------------------------------------------------------
// Speed

// Threads of the CPU that compute.
LLAMAC_API int llamac_threads(const llamac_session *);

// Bytes of weights that one token reads.
LLAMAC_API double llamac_bytes_per_token(const llamac_model *);

// Measures, in bytes per second, how fast the session reads its weights if it does nothing else: an
// upper bound of bytes per token times tokens per second.
LLAMAC_API double llamac_bandwidth(const llamac_session *);

#ifdef __cplusplus
}
#endif
#endif

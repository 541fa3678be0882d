// llamac: runs Llama models inside a C program.
//
//     llamac_error error;
//     llamac_model *model = llamac_open("model.gguf", 0, &error);
//     llamac_session *session = llamac_start(model, NULL, &error);
//     int n, *tokens = llamac_encode(model, "Once", 4, true, &n, &error);
//     llamac_forward(session, tokens, n, 0, &error);
//
// examples/embed.c is a whole program. A function that can fail returns NULL, false or -1 and writes one line to its last
// argument, which may be NULL; a success leaves that alone. An argument that cannot be used, such as a NULL model, is a failure.
// Nothing is printed, and nothing ends the program but a GPU that fails in the midst of its work.
// There is no static state: models and sessions are as many as memory allows. A model may be shared by threads as soon as it is
// set up; a session belongs to one thread at a time.
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

typedef struct llamac_model llamac_model;     // weights and tokenizer, as they lie in a file
typedef struct llamac_session llamac_session; // a context: the KV cache, and the threads or the GPU that compute

typedef struct { char text[512]; } llamac_error; // printable ASCII, whatever stands in the file

// ----------------------------------------------------------------------------
// Models

enum { LLAMAC_NO_TOKENIZER = 1 }; // a flag: leave the tokenizer in the file alone

// Opens a GGUF file, or one of llama2.c's formats (v0, v1, v2). The file stays mapped until llamac_close.
LLAMAC_API llamac_model *llamac_open(const char *path, int flags, llamac_error *);

// The same from memory, which has to stay until llamac_close. `bytes` are aligned as malloc aligns.
LLAMAC_API llamac_model *llamac_open_memory(const void *bytes, size_t size, int flags, llamac_error *);

// Takes the tokenizer from a file in llama2.c's format (tokenizer.bin) instead. No chat template is in use then.
LLAMAC_API bool llamac_open_tokenizer(llamac_model *, const char *path, llamac_error *);

// Compares the weights with the SHA-256 that export.py wrote into the file. False as well where there is none.
LLAMAC_API bool llamac_verify(const llamac_model *, llamac_error *);

// Frees a model, of which no session may be left. NULL is fine.
LLAMAC_API void llamac_close(llamac_model *);

typedef struct {
    int dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size;
    int seq_len;        // tokens that the model was made to see at once
    bool has_tokenizer;
    bool add_bos;       // texts begin with `bos`
    int bos, eos;       // tokens that begin and end a text
    int eot;            // ends an answer; -1: there is none
} llamac_info;

LLAMAC_API llamac_info llamac_describe(const llamac_model *);

// ----------------------------------------------------------------------------
// Text

// The tokens of n bytes of text, in memory to be freed with llamac_free; their number in *n_tokens. With `bos`, the
// beginning token comes first. Control tokens never come from text.
LLAMAC_API int *llamac_encode(const llamac_model *, const char *text, size_t n, bool bos, int *n_tokens, llamac_error *);

// Writes at most `room` bytes of a token's text, without a zero behind it, and returns how many bytes it has. `previous` is the token
// before: behind BOS, the space that encode puts before a text is not part of it. One character may come in several tokens.
LLAMAC_API size_t llamac_decode(const llamac_model *, int previous, int token, char *out, size_t room);

// Bytes of the UTF-8 character that s (n bytes) begins with; 0 if it is none.
LLAMAC_API int llamac_utf8(const char *s, size_t n);

// Sets the chat template: chatml, llama3, zephyr or llama2; NULL: the one whose marks the model file's own has (llama2.c's formats
// mean llama2).
// Its marks, such as <|im_end|>, are control tokens from then on.
LLAMAC_API bool llamac_use_template(llamac_model *, const char *name, llamac_error *);

// The tokens of a user's turn, up to where the answer begins; like llamac_encode. `system` (NULL: none) counts in the first turn.
LLAMAC_API int *llamac_encode_turn(const llamac_model *, bool first, const char *system, const char *words, size_t n, int *n_tokens,
                                   llamac_error *);

// The tokens of an answer given earlier, from behind its turn up to what closes it, with which the next turn begins. For a
// conversation that is told anew; in a session that goes on, the answer's own tokens stand there.
LLAMAC_API int *llamac_encode_answer(const llamac_model *, const char *words, size_t n, int *n_tokens, llamac_error *);

// Whether a token ends a text, or an answer by the chat template in use. Without a tokenizer none does.
LLAMAC_API bool llamac_ends(const llamac_model *, int token);

LLAMAC_API void llamac_free(void *);

// ----------------------------------------------------------------------------
// Computing

typedef enum {
    LLAMAC_SAMPLE_ONLY, // llamac_sample has what it needs; a GPU keeps the logits
    LLAMAC_LAST_LOGITS, // llamac_logits has those of a call's last token
    LLAMAC_ALL_LOGITS,  // ... of all tokens of a call, which are at most llamac_chunk then
} llamac_logits_kept;

typedef struct {
    int positions;      // tokens that the KV cache has room for; 0: the model's seq_len
    int n_threads;      // of the CPU; 0: one for each core that the process may use, 64 at most
    const char *device; // cpu, cuda, or auto: cuda where it can be used; NULL: what the library was built for
    bool no_copy;       // compute from the file's own pages, which processes share; slower after the first tokens
    llamac_logits_kept logits;
    int kv_bits;        // of a number in the KV cache: 32, 16 or 8; 0: 16 where the weights are quantised, else 32
} llamac_options;

// Begins a session; NULL as options: all zero. Sessions of one model share its file, but each may keep weights of its own.
LLAMAC_API llamac_session *llamac_start(const llamac_model *, const llamac_options *, llamac_error *);

// Ends a session. NULL is fine.
LLAMAC_API void llamac_stop(llamac_session *);

// What the user should know of how the session began, such as why it is on the CPU; "" if nothing.
LLAMAC_API const char *llamac_note(const llamac_session *);

// Most tokens of which one call leaves all logits.
LLAMAC_API int llamac_chunk(const llamac_session *);

LLAMAC_API int llamac_positions(const llamac_session *);

// Runs n tokens that stand at positions pos..pos+n-1 through the model.
// Keys and values of 0..pos-1 are those of earlier calls, which must have filled them.
LLAMAC_API bool llamac_forward(llamac_session *, const int *tokens, int n, int pos, llamac_error *);

// What the last call left: (vocab_size,) or, with LLAMAC_ALL_LOGITS, (n, vocab_size) floats; NULL with LLAMAC_SAMPLE_ONLY and
// before the first call.
LLAMAC_API const float *llamac_logits(const llamac_session *);

// *nll = -log of the probability of `token` by row `row` of the logits. False if they are not finite.
LLAMAC_API bool llamac_nll(llamac_session *, int row, int token, double *nll, llamac_error *);

typedef struct {
    float temperature; // 0 is greedy
    float topp;        // sample from the likeliest tokens that have this probability together; 0 or 1: from all
    uint64_t state;    // of the generator: a seed
} llamac_sampler;

// The token after the last one that went through forward, drawn by its logits, which stay: each call draws again. -1 if they
// are not finite.
// Llama2.c's sampler: a seed gives the same text.
LLAMAC_API int llamac_sample(llamac_session *, llamac_sampler *, llamac_error *);

// ----------------------------------------------------------------------------
// Speed

// Threads of the CPU that compute.
LLAMAC_API int llamac_threads(const llamac_session *);

// Bytes of weights that one token reads.
LLAMAC_API double llamac_bytes_per_token(const llamac_model *);

// Measures, in bytes per second, how fast the session reads its weights if it does nothing else: an upper
// bound of bytes per token times tokens per second.
LLAMAC_API double llamac_bandwidth(const llamac_session *);

#ifdef __cplusplus
}
#endif
#endif

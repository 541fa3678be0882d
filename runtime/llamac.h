// llamac: runs Llama models inside a C program.
//
//     llamac_error error;
//     llamac_model *model = llamac_open("model.gguf", 0, &error);
//     llamac_session *session = llamac_start(model, NULL, &error);
//     int n, *tokens = llamac_encode(model, "Once", 4, true, &n, &error);
//     llamac_forward(session, tokens, n, 0, &error);
//
// examples/embed.c is a complete program.
//
// Errors: the last parameter of a function that can fail is a llamac_error *, which may be NULL. On
// failure, the function returns NULL, false or -1 and writes one line to the error. On success, it
// does not change the error. Passing NULL as the model or session is a failure; a function without
// an error parameter then returns 0, false, NULL or "".
// The library prints nothing and does not end the program, with one exception: after a CUDA error
// that leaves the GPU unusable, it prints one line to stderr and calls _exit(1).
//
// Threads: there is no static state, so a program may have any number of models and sessions.
// Threads may share a model, but not while llamac_open_tokenizer or llamac_use_template changes it.
// A session may be used by one thread at a time.
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
// A context: the KV cache, and the threads or the GPU that compute.
typedef struct llamac_session llamac_session;

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

// Replaces the tokenizer by that of a file in llama2.c's format (tokenizer.bin). This discards the
// chat template: llamac_encode_turn fails until llamac_use_template names one. In such a file only
// tokens 1 and 2 (BOS and EOS) are control tokens. Other markers of a template are encoded as
// ordinary text, so a user who types a marker can forge a turn.
LLAMAC_API bool llamac_open_tokenizer(llamac_model *, const char *path, llamac_error *);

// Compares the weights with their SHA-256 in the file. Fails if the file has none; the project's
// export.py writes it.
LLAMAC_API bool llamac_verify(const llamac_model *, llamac_error *);

// Frees a model. Stop all its sessions first. NULL is allowed.
LLAMAC_API void llamac_close(llamac_model *);

typedef struct {
    int dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size;
    int seq_len; // max context
    bool has_tokenizer;
    bool add_bos; // the model expects BOS before a text: call llamac_encode with bos = true
    int bos, eos; // the tokens BOS and EOS, which begin and end a text; -1: there is no tokenizer
    int eot;      // token that ends an answer of a chat; -1: the tokenizer has none
} llamac_info;

// Describes a model. For NULL, bos, eos and eot are -1 and all other fields 0.
LLAMAC_API llamac_info llamac_describe(const llamac_model *);

// ----------------------------------------------------------------------------
// Text

// Encodes n bytes of text. Returns the tokens, to be freed with llamac_free, and their number in
// *n_tokens. If `bos` is true, the first token is BOS. The name of a control token in the text,
// like </s>, is encoded as ordinary text.
LLAMAC_API int *llamac_encode(const llamac_model *, const char *text, size_t n, bool bos,
                              int *n_tokens, llamac_error *);

// Decodes a token: writes the first `room` bytes of its text, without a terminating zero, and
// returns the length of the whole text, which is 0 for a control token. `previous` is the token
// before it, or -1 if there is none. If `previous` is BOS, the space that llamac_encode puts before
// a text is removed. A character may be split over several tokens.
LLAMAC_API size_t llamac_decode(const llamac_model *, int previous, int token, char *out,
                                size_t room);

// Returns the length in bytes of the UTF-8 character at the beginning of s (n bytes); 0 if the
// character is invalid or incomplete.
LLAMAC_API int llamac_utf8(const char *s, size_t n);

// Sets the chat template, which llamac_encode_turn and llamac_encode_answer need: chatml, llama3,
// zephyr or llama2. If `name` is NULL, the model file decides: a GGUF file has a template, which is
// recognised by its markers, such as <|im_end|>; llama2.c's formats use llama2. Markers that the
// file lists as user-defined tokens, a token type of GGUF, become control tokens: a marker that a
// user types is then encoded as ordinary text.
LLAMAC_API bool llamac_use_template(llamac_model *, const char *name, llamac_error *);

// Encodes a turn of the user, up to where the answer begins, with BOS if the template needs it.
// Returns the tokens like llamac_encode. The system prompt (NULL: none) is used in the first turn
// only. Every later turn begins with the end marker of the answer before it.
LLAMAC_API int *llamac_encode_turn(const llamac_model *, bool first, const char *system,
                                   const char *words, size_t n, int *n_tokens, llamac_error *);

// Encodes an earlier answer without its end marker, to rebuild a conversation in a new session. The
// session that sampled the answer does not need this: its KV cache has the tokens. If llamac_sample
// returns the end marker, do not evaluate it. In both cases the next llamac_encode_turn adds it.
// Returns the tokens like llamac_encode.
LLAMAC_API int *llamac_encode_answer(const llamac_model *, const char *words, size_t n,
                                     int *n_tokens, llamac_error *);

// Returns whether a token ends a text, or an answer in the chat template in use. False without a
// tokenizer.
LLAMAC_API bool llamac_ends(const llamac_model *, int token);

LLAMAC_API void llamac_free(void *);

// ----------------------------------------------------------------------------
// Computing

typedef enum {
    // No logits: only llamac_sample uses them, so a GPU does not copy them to the host
    LLAMAC_SAMPLE_ONLY,
    LLAMAC_LAST_LOGITS, // logits of the last token of each llamac_forward
    LLAMAC_ALL_LOGITS,  // logits of all tokens of each llamac_forward, at most llamac_chunk tokens
} llamac_logits_kept;

typedef struct {
    int positions; // max tokens in the KV cache; 0: the seq_len of the model
    int n_threads; // threads of the CPU; 0: one for each usable core, at most 64
    // cpu, cuda, or auto: cuda if it can be used, else cpu. NULL: cuda in a build with CUDA, else
    // cpu
    const char *device;
    // CPU: never copy the weights to a faster layout. Saves memory, because processes share the
    // pages of the file. By default, a session makes the copy after its first tokens if
    // there is enough memory
    bool no_copy;
    llamac_logits_kept logits; // logits that the program can read
    // CPU: bits of a number in the KV cache: 32, 16 or 8; 0: 16 if the weights are quantised, else
    // 32. A GPU requires 0
    int kv_bits;
} llamac_options;

// Begins a session. NULL options are options that are all zero. Sessions share the file of their
// model, but each may keep its own copy of the weights: see no_copy.
LLAMAC_API llamac_session *llamac_start(const llamac_model *, const llamac_options *,
                                        llamac_error *);

// Ends a session. NULL is allowed.
LLAMAC_API void llamac_stop(llamac_session *);

// Returns a message for the user about how the session began, such as why it fell back to the CPU;
// "" if there is none.
LLAMAC_API const char *llamac_note(const llamac_session *);

// Returns the max n of llamac_forward with LLAMAC_ALL_LOGITS.
LLAMAC_API int llamac_chunk(const llamac_session *);

// Returns the capacity of the KV cache in tokens.
LLAMAC_API int llamac_positions(const llamac_session *);

// Evaluates n tokens at positions pos..pos+n-1, where pos + n is llamac_positions at most. Earlier
// calls must have filled positions 0..pos-1. pos may be lower than the number of filled positions:
// the new tokens then replace the old ones at pos..pos+n-1. Later positions keep their old tokens
// and still count as filled, but the new tokens do not attend to them.
LLAMAC_API bool llamac_forward(llamac_session *, const int *tokens, int n, int pos, llamac_error *);

// Returns the logits of the last call: (vocab_size,) floats or, with LLAMAC_ALL_LOGITS, (n,
// vocab_size). NULL with LLAMAC_SAMPLE_ONLY, and before the first call.
LLAMAC_API const float *llamac_logits(const llamac_session *);

// Computes *nll = -log of the probability of `token` from a row of llamac_logits: row 0 with
// LLAMAC_LAST_LOGITS, row 0..n-1 with LLAMAC_ALL_LOGITS. Fails with LLAMAC_SAMPLE_ONLY, or if the
// logits are not finite.
LLAMAC_API bool llamac_nll(llamac_session *, int row, int token, double *nll, llamac_error *);

typedef struct {
    float temperature; // 0: greedy
    float topp; // sample from the most likely tokens with this total probability; 0 or 1: from all
    uint64_t state; // of the random generator: set it to the seed; llamac_sample advances it
} llamac_sampler;

// Samples the token after the last one evaluated. Does not evaluate it: another call samples from
// the same logits again. Fails if the logits are not finite. The sampler is
// that of llama2.c, so that the same seed gives the same text.
LLAMAC_API int llamac_sample(llamac_session *, llamac_sampler *, llamac_error *);

// ----------------------------------------------------------------------------
// Grammar

// Which tokens may come next in a JSON text. Mask the logits of all other tokens before sampling:
//
//     const uint8_t *allowed = llamac_grammar_allowed(grammar, tokens_left);
//     ... sample `token` among those with allowed[token] == 1, at most tokens_left of them ...
//     llamac_grammar_accept(grammar, token);
//
// The text is JSON as in RFC 8259, in valid UTF-8. Escaped surrogates come in pairs, arrays and
// objects are nested at most LLAMAC_JSON_DEPTH deep, and at most LLAMAC_JSON_SPACES bytes of
// whitespace follow each other outside strings, so that a model cannot write spaces forever. Tokens
// that no text contains are never allowed: control, unknown and unused ones. A grammar may be used
// by one thread at a time.
typedef struct llamac_grammar llamac_grammar; // the grammar, and the state of one text

enum { LLAMAC_JSON_DEPTH = 64, LLAMAC_JSON_SPACES = 64 };

// Creates a grammar for the vocabulary of a model, which must stay open, with the same tokenizer,
// until llamac_grammar_free. If `object` is true, the text is an object, otherwise any value. Fails
// if the vocabulary has no one-byte token for one of { } [ ] : , ".
LLAMAC_API llamac_grammar *llamac_grammar_json(const llamac_model *, bool object, llamac_error *);

// Frees a grammar. NULL is allowed.
LLAMAC_API void llamac_grammar_free(llamac_grammar *);

// Begins a new text.
LLAMAC_API void llamac_grammar_reset(llamac_grammar *);

// Appends a token to the text. Returns false, and changes nothing, if the token is not allowed. A
// token that ends a text (llamac_ends) is allowed if the text is complete, and changes nothing.
LLAMAC_API bool llamac_grammar_accept(llamac_grammar *, int token);

// Returns (vocab_size,) bytes, valid until the next call: 1 if the token may come next and the text
// can then be completed with `left` tokens, this one included but not the one that ends the text.
// If the caller samples among these and lowers `left` by 1 for each token, the text is complete at
// `left` == 0 at the latest; if `left` is too small for any text at first, no token is allowed.
// A completion counts if each of its tokens begins without whitespace and closes what it opens. So
// in the last steps before `left` is 0, a token that needs another completion may be 0. Tokens that
// end a text are 1 if the text is complete.
LLAMAC_API const uint8_t *llamac_grammar_allowed(llamac_grammar *, int left);

// Returns whether the text is valid JSON as it is. More tokens may be allowed: 12 can become 123.
LLAMAC_API bool llamac_grammar_complete(const llamac_grammar *);

// ----------------------------------------------------------------------------
// Speed

// Returns the number of CPU threads that compute.
LLAMAC_API int llamac_threads(const llamac_session *);

// Returns the bytes of weights that are read to evaluate one token.
LLAMAC_API double llamac_bytes_per_token(const llamac_model *);

// Measures how fast the session can read its weights if it does nothing else, in bytes per second.
// This, divided by llamac_bytes_per_token, is an upper bound of the tokens per second.
LLAMAC_API double llamac_bandwidth(const llamac_session *);

#ifdef __cplusplus
}
#endif
#endif

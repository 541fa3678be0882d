// llamac: runs Llama models inside a C program.
//
//     llamac_error error;
//     llamac_model *model = llamac_open("model.gguf", 0, &error);
//     llamac_engine *engine = llamac_start(model, NULL, &error);
//     llamac_sequence *sequence = llamac_sequence_new(engine, &error);
//     int n, *tokens = llamac_encode(model, "Once", 4, true, &n, &error);
//     llamac_forward(sequence, tokens, n, 0, &error);
//     int next = llamac_sample(sequence, &(llamac_sampler){0}, &error);
//
// A model is a file: its weights and its tokenizer. An engine computes: it has the CPU threads or
// the GPU, and the weights in the layout that they need. A sequence is a text that the engine
// works on: its tokens and their KV cache. examples/embed.c is a complete program.
//
// Errors: the last parameter of a function that can fail is a llamac_error *, which may be NULL. On
// failure, the function returns NULL, false or -1 and writes one line to the error. On success, it
// makes the error empty. Passing NULL as the model, engine or sequence is a failure; a function
// without an error parameter then returns 0, false, NULL or "".
// The library prints nothing, reads no environment variable, and never ends the program.
//
// Threads: there is no static state, so a program may have any number of models and engines.
// Threads may share a model, but not while llamac_open_tokenizer or llamac_use_template changes it.
// An engine, together with its sequences, may be used by one thread at a time. Sequences do not
// affect each other: on the CPU, the logits of a sequence are bit-identical for any other sequences
// in the batch and for any division of its tokens into calls. On a GPU, they are the same up to
// rounding, which differs between kernels for one token and for several.
//
// Versions: a struct that a program passes or receives may get new fields at its end. The inline
// functions pass its sizeof, which tells the library which fields the program knows.
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

#define LLAMAC_VERSION 2

// Returns the LLAMAC_VERSION that the library was compiled with.
LLAMAC_API int llamac_version(void);

// Returns the name of the instruction set that the CPU backend uses on this machine, such as avx2.
LLAMAC_API const char *llamac_isa(void);

typedef struct llamac_model llamac_model;   // weights and tokenizer of a file
typedef struct llamac_engine llamac_engine; // threads or GPU, and weights in the layout they need
typedef struct llamac_sequence llamac_sequence; // tokens and their KV cache

typedef struct { char text[512]; } llamac_error; // printable ASCII

// ----------------------------------------------------------------------------
// Models

enum {                       // flags
    LLAMAC_NO_TOKENIZER = 1, // do not read the tokenizer
    // Keep no matrices in memory: engines read them from the file for every pass through the model.
    // This is slow; it is for machines that have less memory than the model. Without this flag,
    // engines keep as many matrices as fit in memory. CPU only
    LLAMAC_STREAM = 2,
};

// Opens a model file: GGUF, or one of the formats of llama2.c (v0, v1, v2). The file stays mapped
// until llamac_close.
LLAMAC_API llamac_model *llamac_open(const char *path, int flags, llamac_error *);

// Opens a model file in memory, which must stay valid until llamac_close. `bytes` must be aligned
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

// Frees a model. Stop all its engines first. NULL is allowed.
LLAMAC_API void llamac_close(llamac_model *);

typedef struct {
    int dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size;
    int seq_len; // max context in tokens
    bool has_tokenizer;
    bool add_bos; // the model expects BOS before a text: call llamac_encode with bos = true
    int bos, eos; // the tokens BOS and EOS, which begin and end a text; -1: there is no tokenizer
    int eot;      // token that ends an answer of a chat; -1: the tokenizer has none
} llamac_info;

// Describes a model. For NULL, bos, eos and eot are -1 and all other fields 0. `size` is
// sizeof(llamac_info) of the caller.
LLAMAC_API void llamac_describe_sized(const llamac_model *, llamac_info *, size_t size);
static inline llamac_info llamac_describe(const llamac_model *model) {
    llamac_info info;
    llamac_describe_sized(model, &info, sizeof info);
    return info;
}

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
// llama3.1, zephyr, llama2, mistral-v0, mistral-v1, mistral-v3, mistral-v3-tekken, phi3 or
// phi4-mini. If `name` is NULL, the model file decides: a GGUF file has a template, which is
// recognised by its markers, such as <|im_end|>; llama2.c's formats use llama2. Markers that the
// file lists as user-defined tokens, a token type of GGUF, become control tokens: a marker that a
// user types is then encoded as ordinary text.
LLAMAC_API bool llamac_use_template(llamac_model *, const char *name, llamac_error *);

// Encodes a turn of the user, up to where the answer begins, with BOS if the template needs it.
// Returns the tokens like llamac_encode. The system prompt is used in the first turn only; "": no
// system prompt; NULL: the one in the file's template, if llamac_use_template had a NULL name and
// that template has one, like Qwen2.5's. Every later turn begins with the end marker of the answer
// before it.
LLAMAC_API int *llamac_encode_turn(const llamac_model *, bool first, const char *system,
                                   const char *words, size_t n, int *n_tokens, llamac_error *);

// Encodes an earlier answer without its end marker, to rebuild a conversation in a new sequence.
// The sequence that sampled the answer does not need this: its KV cache has the tokens. If
// llamac_sample returns the end marker, do not evaluate it. In both cases the next
// llamac_encode_turn adds it. Returns the tokens like llamac_encode.
LLAMAC_API int *llamac_encode_answer(const llamac_model *, const char *words, size_t n,
                                     int *n_tokens, llamac_error *);

// Returns whether a token ends a text, or an answer in the chat template in use. False without a
// tokenizer.
LLAMAC_API bool llamac_ends(const llamac_model *, int token);

// Decodes sampled tokens to text that may be shown: whole UTF-8 characters, up to a stop string.
typedef struct llamac_text llamac_text;

enum {                     // flags of llamac_text_new
    LLAMAC_TEXT_RAW = 1,   // release all bytes, instead of U+FFFD for those that are not UTF-8
    LLAMAC_TEXT_GO_ON = 2, // tokens that end a text do not end this one, and add nothing to it
};

// Begins a text. `previous` is the token before it, or -1 if there is none, as for llamac_decode.
// stops (n_stops,): the text ends before the first of these strings. Free the text with
// llamac_text_free, before the model is closed.
LLAMAC_API llamac_text *llamac_text_new(const llamac_model *, int previous,
                                        const char *const *stops, int n_stops, int flags,
                                        llamac_error *);

enum { LLAMAC_MORE, LLAMAC_END, LLAMAC_STOP }; // results of llamac_text_add

// Adds a token. Returns LLAMAC_END if it ends the text (see llamac_ends), LLAMAC_STOP if it
// completes a stop string, else LLAMAC_MORE; -1 after a failure. Sets *out to *n bytes that may be
// shown now, valid until the next call. Bytes that may begin a stop string, and incomplete
// characters, are held back until later tokens decide. A text that has ended accepts no tokens.
LLAMAC_API int llamac_text_add(llamac_text *, int token, const char **out, size_t *n,
                               llamac_error *);

// Ends a text that no token has ended: releases the bytes that are held back.
LLAMAC_API bool llamac_text_finish(llamac_text *, const char **out, size_t *n, llamac_error *);

// Frees a text. NULL is allowed.
LLAMAC_API void llamac_text_free(llamac_text *);

LLAMAC_API void llamac_free(void *);

// ----------------------------------------------------------------------------
// Computing

typedef struct {
    int positions; // max tokens of a sequence; 0: the seq_len of the model
    int n_threads; // threads of the CPU; 0: one for each usable core, at most 64
    // cpu, cuda, or auto: cuda if it can be used, else cpu. NULL: cuda in a build with CUDA, else
    // cpu
    const char *device;
    // CPU: never copy the weights to a faster layout. Saves memory, because processes share the
    // pages of the file. By default, llamac_start makes the copy if there is enough memory
    bool no_copy;
    // The program reads no logits: it only calls llamac_sample, with temperature and topp alone. A
    // GPU then keeps the logits in its memory
    bool sample_only;
    // CPU: bits of a number in the KV cache: 32, 16 or 8; 0: 16 if the weights are quantised, else
    // 32. A GPU requires 0
    int kv_bits;
    // Called while llamac_start prepares the weights, with the fraction that is done, from 0 to 1.
    // If it returns false, llamac_start fails. May be NULL
    bool (*progress)(void *data, float share);
    // Called from time to time during a call that evaluates tokens. If it returns true, the call
    // fails and the engine can be used again. May be NULL
    bool (*abort)(void *data);
    void *data; // for `progress` and `abort`
    // CPU: name of the instruction set that the kernels must use, for tests: scalar, avx2, avxvnni,
    // avx512bw, avx512, avx512bf16, neon, neondot, neoni8mm or wasm128. NULL: the best one of the
    // machine
    const char *isa;
} llamac_options;

// Starts an engine. NULL as options is the same as all zeros. `size` is sizeof(llamac_options).
// Copies the weights to the device or, on the CPU, to a layout that is faster to multiply.
LLAMAC_API llamac_engine *llamac_start_sized(const llamac_model *, const llamac_options *,
                                             size_t size, llamac_error *);
static inline llamac_engine *llamac_start(const llamac_model *model, const llamac_options *options,
                                          llamac_error *error) {
    return llamac_start_sized(model, options, sizeof *options, error);
}

// Stops an engine. Free all its sequences first. NULL is allowed.
LLAMAC_API void llamac_stop(llamac_engine *);

// Returns a message for the user about how the engine started, such as why it fell back to the CPU;
// "" if there is none.
LLAMAC_API const char *llamac_note(const llamac_engine *);

// Returns the max tokens of a sequence.
LLAMAC_API int llamac_positions(const llamac_engine *);

// Begins an empty sequence.
LLAMAC_API llamac_sequence *llamac_sequence_new(llamac_engine *, llamac_error *);

// Frees a sequence. NULL is allowed.
LLAMAC_API void llamac_sequence_free(llamac_sequence *);

// Begins a sequence with the first n tokens of another. They share the memory of these tokens as
// long as neither changes them.
LLAMAC_API llamac_sequence *llamac_sequence_copy(const llamac_sequence *, int n, llamac_error *);

// Drops all tokens but the first n.
LLAMAC_API bool llamac_sequence_truncate(llamac_sequence *, int n, llamac_error *);

// Saves the tokens of a sequence and their KV cache in a file, from which llamac_sequence_load
// begins a sequence without evaluating them. The file is written beside `path` and then moved
// there, so a file at `path` is always complete. This replaces an earlier file of this function,
// but fails if anything else is there. If `path` is a symbolic link, the file at its end is
// replaced. On POSIX, only the owner of the file can read it.
LLAMAC_API bool llamac_sequence_save(const llamac_sequence *, const char *path, llamac_error *);

// Begins a sequence with the tokens in a file of llamac_sequence_save. Its continuation is the same
// as that of the saved one, to the last bit. It has no logits until a token is evaluated: to get
// those of the last token, evaluate it again, at its position. Fails if the file is damaged, was
// saved with another model or other kv_bits, or has more tokens than llamac_positions.
LLAMAC_API llamac_sequence *llamac_sequence_load(llamac_engine *, const char *path, llamac_error *);

// Returns the number of tokens of a sequence.
LLAMAC_API int llamac_sequence_length(const llamac_sequence *);

// Returns the tokens of a sequence, which the next call that evaluates tokens may move.
LLAMAC_API const int *llamac_sequence_tokens(const llamac_sequence *);

// Evaluates n tokens at positions pos..pos+n-1, where pos + n is at most llamac_positions. The
// sequence must have at least pos tokens; those from pos on are dropped first. Computes the logits
// of the last token. After a failure, the sequence has at most pos tokens.
LLAMAC_API bool llamac_forward(llamac_sequence *, const int *tokens, int n, int pos,
                               llamac_error *);

// A token of a batch.
typedef struct {
    llamac_sequence *sequence;
    int token;
    // Position of the token in its sequence. The first token of a sequence in the batch replaces
    // the sequence from there on, as in llamac_forward. Its further tokens must have the positions
    // that follow
    int position;
    bool logits; // compute the logits of this token
} llamac_batch_token;

// Evaluates n tokens of any sequences of the engine. `size` is sizeof(llamac_batch_token).
LLAMAC_API bool llamac_evaluate_sized(llamac_engine *, const llamac_batch_token *batch, int n,
                                      size_t size, llamac_error *);
static inline bool llamac_evaluate(llamac_engine *engine, const llamac_batch_token *batch, int n,
                                   llamac_error *error) {
    return llamac_evaluate_sized(engine, batch, n, sizeof *batch, error);
}

// Returns the logits (vocab_size,) of the latest token of the sequence for which they were
// computed. They are valid until the engine evaluates again; NULL after that, and with
// sample_only.
LLAMAC_API const float *llamac_logits(const llamac_sequence *);

// Returns the logits (vocab_size,) of token i of the engine's last call: of llamac_evaluate, or of
// llamac_forward, which computes only those of its last token. NULL if there are none.
LLAMAC_API const float *llamac_batch_logits(const llamac_engine *, int i);

// Computes *nll = -log of the probability of `token` by the logits of token i of the last call.
// Fails if there are none, or if they are not finite.
LLAMAC_API bool llamac_nll(const llamac_engine *, int i, int token, double *nll, llamac_error *);

// How a token is sampled. A field of 0 skips its step. The steps are, in this order: logit biases,
// penalties, mask, temperature, softmax, top-k, min-p, top-p, and the draw.
typedef struct {
    // 0: greedy, the most likely token after biases, penalties and mask; infinity: all are equally
    // likely
    float temperature;
    // top-p: of the tokens that top-k and min-p leave, sample from the smallest set of most likely
    // ones whose share of the total probability exceeds this; 0 or 1: from all
    float topp;
    uint64_t state; // of the random generator: set it to the seed; llamac_sample advances it
    int topk;       // sample from this many of the most likely tokens; 0: from all
    float minp;     // leave out tokens less likely than this times the most likely one; 0: none
    // The penalties apply to the tokens of the sequence, prompt included. repeat_penalty: positive
    // logits are divided by it, others multiplied, as in llama.cpp; 0 or 1: none
    float repeat_penalty;
    float frequency_penalty; // subtracted from the logit for each occurrence, as in OpenAI's API
    float presence_penalty;  // subtracted once, likewise
    int penalty_tokens;      // number of last tokens to penalise; 0: 64; -1: all
    // biases[i] is added to the logit of token bias_tokens[i]; -INFINITY leaves the token out
    const int *bias_tokens; // (n_biases,)
    const float *biases;    // (n_biases,)
    int n_biases;
    const uint8_t *allowed; // (vocab_size,) mask: 0 leaves a token out. NULL: all are allowed
} llamac_sampler;

// Samples the token after the latest one whose logits were computed. Does not evaluate it: another
// call samples from the same logits again. Fails if the logits are not finite, or if no token is
// left. With temperature, topp and state alone, the sampler is that of llama2.c, so that the same
// seed gives the same text. The other fields need logits in host memory, where a GPU with
// sample_only does not write them. `size` is sizeof(llamac_sampler).
LLAMAC_API int llamac_sample_sized(llamac_sequence *, llamac_sampler *, size_t size,
                                   llamac_error *);
static inline int llamac_sample(llamac_sequence *sequence, llamac_sampler *sampler,
                                llamac_error *error) {
    return llamac_sample_sized(sequence, sampler, sizeof *sampler, error);
}

// Samples the token after token i of the engine's last call, whose logits must have been computed.
// The penalties apply to the tokens of its sequence up to token i. Otherwise like llamac_sample.
// Fails if the sequence was freed since the call.
LLAMAC_API int llamac_sample_at_sized(llamac_engine *, int i, llamac_sampler *, size_t size,
                                      llamac_error *);
static inline int llamac_sample_at(llamac_engine *engine, int i, llamac_sampler *sampler,
                                   llamac_error *error) {
    return llamac_sample_at_sized(engine, i, sampler, sizeof *sampler, error);
}

// Samples the next token of each of n sequences, like llamac_sample with the sampler of the same
// index. Writes the tokens to tokens (n,), with -1 where sampling fails; returns false and the
// first error then. `size` is sizeof(llamac_sampler).
LLAMAC_API bool llamac_sample_batch_sized(llamac_sequence *const *sequences,
                                          llamac_sampler *const *samplers, int n, int *tokens,
                                          size_t size, llamac_error *);
static inline bool llamac_sample_batch(llamac_sequence *const *sequences,
                                       llamac_sampler *const *samplers, int n, int *tokens,
                                       llamac_error *error) {
    return llamac_sample_batch_sized(sequences, samplers, n, tokens, sizeof **samplers, error);
}

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

enum { LLAMAC_JSON_DEPTH = 64, LLAMAC_JSON_SPACES = 20 };

// Creates a grammar for the vocabulary of a model, which must stay open, with the same tokenizer,
// until llamac_grammar_free. If `object` is true, the text is an object, otherwise any value. Fails
// if the vocabulary has no one-byte token for one of { } [ ] : , ".
LLAMAC_API llamac_grammar *llamac_grammar_json(const llamac_model *, bool object, llamac_error *);

// Creates a grammar for another text, which shares the tables of this one and takes no time to
// build. Free it before the other.
LLAMAC_API llamac_grammar *llamac_grammar_copy(const llamac_grammar *, llamac_error *);

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
// Only completions are considered whose tokens all begin without whitespace and close every
// container that they open. So in the last steps before `left` is 0, a token that needs another
// completion may be 0. Tokens that end a text are 1 if the text is complete.
LLAMAC_API const uint8_t *llamac_grammar_allowed(llamac_grammar *, int left);

// Returns whether the text is valid JSON as it is. More tokens may be allowed: 12 can become 123.
LLAMAC_API bool llamac_grammar_complete(const llamac_grammar *);

// ----------------------------------------------------------------------------
// Embeddings

// How the hidden states of a text's tokens are pooled: their mean, or the state of the last token.
enum { LLAMAC_MEAN, LLAMAC_LAST };

// Computes the embedding (dim,) of a text of n tokens, up to llamac_positions, from the hidden
// states of its tokens: the residual stream after the final RMSNorm. It is not scaled to unit
// length. A hidden state depends only on the tokens up to its own: on the CPU, it is bit-identical
// for any tokens that follow. The sequences of the engine and the logits of its last call stay
// unchanged. Fails if a number is not finite. After a failure, `embedding` is undefined.
LLAMAC_API bool llamac_embed(llamac_engine *, const int *tokens, int n, int pooling,
                             float *embedding, llamac_error *);

// ----------------------------------------------------------------------------
// Speed

// Returns the number of CPU threads that compute.
LLAMAC_API int llamac_threads(const llamac_engine *);

// Returns the bytes of weights that are read to evaluate one token.
LLAMAC_API double llamac_bytes_per_token(const llamac_model *);

// Measures how fast the engine can read its weights if it does nothing else, in bytes per second.
// This, divided by llamac_bytes_per_token, is an upper bound on the tokens per second.
LLAMAC_API double llamac_bandwidth(const llamac_engine *);

#ifdef __cplusplus
}
#endif
#endif

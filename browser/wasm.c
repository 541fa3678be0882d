// The library as a WebAssembly module: the functions that llamac.js calls. An instance of the
// module has one model and generates one text at a time. `open`, `begin`, `step` and `finish`
// return false or -1 on failure, and `error` then returns the message. `make wasm` compiles it.
#include <stdlib.h>
#include <string.h>
#include "../runtime/llamac.h"

#define EXPORT(name) __attribute__((export_name(#name)))

enum {
    MAX_POSITIONS = 8192, // max context in tokens, which limits the memory of the KV cache
    PART = 32,            // max tokens that a step evaluates
};

static llamac_model *model;
static llamac_engine *engine;
static llamac_sequence *sequence;
static llamac_info info;
static llamac_sampler sampler;
static llamac_text *text;
static llamac_error error;
static const char *shown; // bytes that the last step or finish has added to the text
static int *window;       // (llamac_positions,) ids of the tokens in the context
static int length;        // number of tokens in the window
static int evaluated;     // number of tokens of the window that are in the KV cache
static int sampled;       // number of tokens sampled for the text
static int left;          // number of tokens that may still be sampled
static int pending = -1;  // the latest sampled token, if it is not yet in the window, or -1
static bool in_chat;      // the window holds a chat
static bool ended;        // the model has ended the text
static bool done = true;  // no more tokens follow

EXPORT(allocate) void *allocate(size_t n) { return malloc(n); }
EXPORT(release) void release(void *p) { free(p); }
EXPORT(error) const char *error_text(void) { return error.text; }
EXPORT(shown) const char *shown_text(void) { return shown; }
EXPORT(done) bool is_done(void) { return done; }
EXPORT(sampled) int sampled_tokens(void) { return sampled; }

// Opens the model in `bytes` and starts its engine. `bytes` come from `allocate` and must not be
// released.
EXPORT(open) bool open_model(const void *bytes, size_t size) {
    model = llamac_open_memory(bytes, size, 0, &error);
    info = llamac_describe(model);
    if (model && !info.has_tokenizer) strcpy(error.text, "the model file has no tokenizer");
    if (!info.has_tokenizer) return false;
    int positions = info.seq_len < MAX_POSITIONS ? info.seq_len : MAX_POSITIONS;
    llamac_options options = {.positions = positions, .n_threads = 1, .device = "cpu"};
    engine = llamac_start(model, &options, &error);
    sequence = engine ? llamac_sequence_new(engine, &error) : NULL;
    window = engine ? malloc(llamac_positions(engine) * sizeof *window) : NULL;
    if (sequence && !window) strcpy(error.text, "not enough memory");
    return sequence && window;
}

EXPORT(positions) int positions(void) { return llamac_positions(engine); }
EXPORT(can_chat) bool can_chat(void) { return llamac_use_template(model, NULL, &error); }

// Adds n tokens to the window, like `feed` in cli/streams.h. If they do not fit, keeps as many of
// the latest tokens, old and new, as fill half of the window; these are evaluated again. The first
// token of the text, usually BOS, stays in front.
static void feed(const int *tokens, int n) {
    int capacity = llamac_positions(engine), half = capacity > 3 ? capacity / 2 : 1;
    if (n <= capacity - length) {
        memcpy(window + length, tokens, n * sizeof *window);
        length += n;
        return;
    }
    int first = length ? window[0] : tokens[0];
    int n_new = n < half ? n : half, n_old = half - n_new;
    memmove(window, window + length - n_old, n_old * sizeof *window);
    memcpy(window + n_old, tokens + n - n_new, n_new * sizeof *window);
    if (half > 1) window[0] = first;
    length = half, evaluated = 0;
}

// Begins a text. Without `chat`, it continues a prompt of n bytes. With `chat`, the prompt is a
// user's message, which the text answers; the previous chat is continued unless `fresh`. system:
// the system prompt of a new chat; NULL: the default of the chat template. steps: max tokens of the
// answer or, without `chat`, of prompt and text together, not counting BOS. seed: a whole number, 0
// or more. Returns the number of tokens of the prompt or message.
EXPORT(begin)
int begin(const char *prompt, size_t n, bool chat, bool fresh, const char *system, int steps,
          float temperature, float topp, double seed) {
    bool first = fresh || !chat || !in_chat || !length;
    bool bos = info.add_bos || !n; // with an empty prompt, BOS is the token to evaluate
    int count, *tokens;
    if (chat) tokens = llamac_encode_turn(model, first, system, prompt, n, &count, &error);
    else tokens = llamac_encode(model, prompt, n, bos, &count, &error);
    if (tokens && !count) strcpy(error.text, "the prompt has no tokens");
    if (!tokens || !count) return llamac_free(tokens), -1;
    if (first) length = evaluated = 0;
    else if (pending >= 0) feed(&pending, 1);
    feed(tokens, count);
    llamac_free(tokens);
    sampler = (llamac_sampler){.temperature = temperature, .topp = topp, .state = (uint64_t)seed};
    in_chat = chat, sampled = 0, pending = -1, ended = false;
    left = chat ? steps : steps + bos - count;
    done = left <= 0;
    llamac_text_free(text);
    text = llamac_text_new(model, window[length - 1], NULL, 0, 0, &error);
    return text ? count : -1;
}

// Evaluates the next tokens of the window, at most PART. If all are then evaluated, samples a
// token. Returns the number of bytes that were added to the text; they are at `shown`.
EXPORT(step) int step(void) {
    size_t n = 0;
    if (pending >= 0) feed(&pending, 1);
    pending = -1;
    int part = length - evaluated < PART ? length - evaluated : PART;
    if (!llamac_forward(sequence, window + evaluated, part, evaluated, &error)) return -1;
    evaluated += part;
    if (evaluated < length) return 0;
    int token = llamac_sample(sequence, &sampler, &error);
    if (token < 0) return -1;
    int result = llamac_text_add(text, token, &shown, &n, &error);
    if (result < 0) return -1;
    ended = result == LLAMAC_END;
    if (!ended) sampled++, pending = token;
    done = ended || !--left;
    return (int)n;
}

// Ends the text, unless the model has ended it. Returns the number of bytes that had been held
// back, such as a part of a character; they are at `shown`.
EXPORT(finish) int finish(void) {
    size_t n = 0;
    done = true;
    if (ended) return 0;
    return llamac_text_finish(text, &shown, &n, &error) ? (int)n : -1;
}

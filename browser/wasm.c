// The library as a WebAssembly module: what llamac.js calls. An instance of the module has one
// model and one text. Functions that can fail return false, NULL or -1, and `error` then returns the
// message. `make wasm` compiles it.
#include <stdlib.h>
#include <string.h>
#include "../runtime/llamac.h"

#define EXPORT(name) __attribute__((export_name(#name)))

enum {
    MAX_POSITIONS = 8192, // max tokens that the model sees: their keys and values take memory
    PART = 32,            // max tokens of a prompt that a step evaluates
};

static llamac_model *model;
static llamac_engine *engine;
static llamac_sequence *sequence;
static llamac_info info;
static llamac_sampler sampler;
static llamac_text *text;
static llamac_error error;
static const char *shown;         // the bytes that the last step has added to the text
static int *window;               // (llamac_positions,) tokens that the model sees
static int length, evaluated;     // tokens in the window; how many have keys and values
static int sampled, left;         // tokens sampled so far, tokens that may follow
static int pending = -1;          // sampled token that is not in the window, or -1
static bool in_chat, done = true; // the text is a chat; nothing follows

EXPORT(allocate) void *allocate(size_t n) { return malloc(n); }
EXPORT(release) void release(void *p) { free(p); }
EXPORT(error) const char *error_text(void) { return error.text; }
EXPORT(shown) const char *shown_text(void) { return shown; }
EXPORT(done) bool is_done(void) { return done; }
EXPORT(sampled) int sampled_tokens(void) { return sampled; }

// Opens the model in `bytes`, memory of `allocate` that stays in use, and starts its engine.
EXPORT(open) bool open_model(const void *bytes, size_t size) {
    model = llamac_open_memory(bytes, size, 0, &error);
    info = llamac_describe(model);
    if (model && !info.has_tokenizer) strcpy(error.text, "the model file has no tokenizer");
    if (!info.has_tokenizer) return false;
    int positions = info.seq_len < MAX_POSITIONS ? info.seq_len : MAX_POSITIONS;
    llamac_options options = {.positions = positions, .n_threads = 1, .device = "cpu"};
    engine = llamac_start(model, &options, &error);
    sequence = engine ? llamac_sequence_new(engine, &error) : NULL;
    window = malloc(positions * sizeof *window);
    if (sequence && !window) strcpy(error.text, "not enough memory");
    return sequence && window;
}

EXPORT(positions) int positions(void) { return llamac_positions(engine); }
EXPORT(can_chat) bool can_chat(void) { return llamac_use_template(model, NULL, &error); }

// Adds n tokens to the window. If it is full, its first half becomes the latest tokens, which are
// then evaluated again; the first token of all, usually BOS, keeps its place. As in cli/streams.h.
static void feed(const int *tokens, int n) {
    int all = llamac_positions(engine), half = all > 3 ? all / 2 : 1;
    if (n <= all - length) {
        memcpy(window + length, tokens, n * sizeof *window);
        length += n;
        return;
    }
    int first = length ? window[0] : tokens[0], new = n < half ? n : half, old = half - new;
    memmove(window, window + length - old, old * sizeof *window);
    memcpy(window + old, tokens + n - new, new * sizeof *window);
    if (half > 1) window[0] = first;
    length = half, evaluated = 0;
}

// Begins a text with n bytes of a prompt, or an answer to them if `chat`. The text of a chat goes on
// until `fresh`. system: of a chat's first turn, or NULL for that of the model. steps: max tokens,
// those of the prompt counted as by `run -n`; in a chat, those of the answer. Returns -1 or the
// number of the prompt's tokens.
EXPORT(begin)
int begin(const char *words, size_t n, bool chat, bool fresh, const char *system, int steps,
          float temperature, float topp, double seed) {
    bool first = fresh || !chat || !in_chat || !length;
    bool bos = info.add_bos || !n; // an empty prompt needs a token
    int count, *tokens;
    if (chat) tokens = llamac_encode_turn(model, first, system, words, n, &count, &error);
    else tokens = llamac_encode(model, words, n, bos, &count, &error);
    if (tokens && !count) strcpy(error.text, "the prompt has no tokens");
    if (!tokens || !count) return -1;
    if (first) length = evaluated = 0;
    else if (pending >= 0) feed(&pending, 1);
    feed(tokens, count);
    llamac_free(tokens);
    sampler = (llamac_sampler){.temperature = temperature, .topp = topp, .state = (uint64_t)seed};
    in_chat = chat, sampled = 0, pending = -1;
    left = chat ? steps : steps + bos - count;
    done = left <= 0;
    llamac_text_free(text);
    text = llamac_text_new(model, window[length - 1], NULL, 0, 0, &error);
    return text ? count : -1;
}

// Evaluates the tokens of the window that have not been evaluated, of a prompt a part, then samples a
// token. Returns how many bytes the text has grown by, which are at `shown`; -1 after a failure.
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
    done = result == LLAMAC_END || !--left;
    if (result == LLAMAC_END) return (int)n;
    sampled++, pending = token;
    return (int)n;
}

// Ends a text that has not ended by itself. Returns how many bytes were held back, which are at `shown`.
EXPORT(finish) int finish(void) {
    size_t n = 0;
    done = true;
    return llamac_text_finish(text, &shown, &n, &error) ? (int)n : 0;
}

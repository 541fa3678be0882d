// Tests how the library handles failures of the system. Uses sequences, texts and a grammar once
// for each call of the library to the system, with that one call failing. The library function
// must return an error, change only what llamac.h says, and succeed when it is called again. The
// logits must then be those of a run without failures. fuzz/faults.h makes the calls fail. Prints
// how many library functions failed.
//
// Usage: failures MODEL FOLDER
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../runtime/llamac.h"

// LONG: more tokens than a page of the KV cache holds.
enum { LONG = 70, SHORT = 40, MAX_LOGITS = 4096 };

// calls: to the system in this round. to_fail: the number of the call that fails.
// failures: of library functions, in all rounds.
static int calls, to_fail, failures;
bool stream_failed;

bool fault_now(void) {
    bool fails = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) == to_fail;
    if (fails) errno = ENOMEM;
    return fails;
}

static llamac_error error;
static int n_logits;

static void give_up(int line, const char *what) {
    fprintf(stderr, "call %d failed: line %d: %s: %s\n", to_fail, line, what, error.text);
    exit(1);
}

#define EXPECT(condition) ((condition) ? (void)0 : give_up(__LINE__, #condition))

// Makes a call that may fail once, with a message. After the failure, `kept` must hold, and the
// second call must succeed.
#define TRY_TWICE(call, kept) \
    do { \
        strcpy(error.text, ""); \
        if (call) break; \
        failures++, stream_failed = false; \
        EXPECT(*error.text); \
        EXPECT(kept); \
        EXPECT(call); \
    } while (0)

static void keep_logits(float *to, llamac_sequence *s) {
    EXPECT(llamac_logits(s));
    memcpy(to, llamac_logits(s), n_logits * sizeof *to);
}

// Uses the library. Writes the logits of four tokens to logits (4, n_logits).
static void use(llamac_model *model, const char *path, float *logits) {
    int tokens[LONG], n, *encoded, token;
    for (int i = 0; i < LONG; i++) tokens[i] = 3 + i * 37 % 250;
    llamac_options options = {.n_threads = 2};
    llamac_engine *engine;
    llamac_sequence *s, *copy, *loaded;
    TRY_TWICE((engine = llamac_start(model, &options, &error)), true);
    TRY_TWICE((s = llamac_sequence_new(engine, &error)), true);
    TRY_TWICE(llamac_forward(s, tokens, LONG, 0, &error), llamac_sequence_length(s) == 0);
    keep_logits(logits, s);
    TRY_TWICE((copy = llamac_sequence_copy(s, SHORT, &error)), llamac_sequence_length(s) == LONG);
    // the two sequences share the last page, so the library copies it before changing it
    TRY_TWICE(llamac_forward(copy, &tokens[5], 1, SHORT, &error),
              llamac_sequence_length(copy) <= SHORT && llamac_sequence_length(s) == LONG);
    keep_logits(logits + n_logits, copy);
    EXPECT(llamac_sequence_truncate(s, SHORT - 1, &error)); // never fails
    llamac_batch_token batch[LONG];
    for (int i = 0; i < LONG; i++) {
        bool of_copy = i < LONG / 2;
        int pos = of_copy ? SHORT + 1 + i : SHORT - 1 + i - LONG / 2;
        batch[i] = (llamac_batch_token){of_copy ? copy : s, tokens[i], pos, i % 9 == 0};
    }
    TRY_TWICE(llamac_evaluate(engine, batch, LONG, &error),
              llamac_sequence_length(s) == SHORT - 1 && llamac_sequence_length(copy) == SHORT + 1
                  && !llamac_logits(s));
    memcpy(logits + 2 * n_logits, llamac_batch_logits(engine, 9), n_logits * sizeof *logits);
    int length = llamac_sequence_length(s);
    TRY_TWICE(llamac_sequence_save(s, path, &error), llamac_sequence_length(s) == length);
    TRY_TWICE((loaded = llamac_sequence_load(engine, path, &error)), true);
    EXPECT(llamac_sequence_length(loaded) == length);
    EXPECT(
        !memcmp(llamac_sequence_tokens(loaded), llamac_sequence_tokens(s), length * sizeof(int)));
    TRY_TWICE(llamac_forward(loaded, &tokens[7], 1, length, &error),
              llamac_sequence_length(loaded) <= length && llamac_sequence_length(s) == length);
    keep_logits(logits + 3 * n_logits, loaded);
    llamac_sampler sampler = {.temperature = 1, .topk = 5, .repeat_penalty = 1.1f, .state = 1};
    TRY_TWICE((token = llamac_sample(loaded, &sampler, &error)) >= 0, true);

    llamac_text *text;
    llamac_grammar *grammar;
    const char *out, *stops[] = {"abc", "xyz"};
    TRY_TWICE((encoded = llamac_encode(model, "Hello you", 9, true, &n, &error)), n == 0);
    llamac_free(encoded);
    TRY_TWICE(llamac_use_template(model, "chatml", &error), true);
    TRY_TWICE((encoded = llamac_encode_turn(model, true, "Be kind", "Hi", 2, &n, &error)), n == 0);
    llamac_free(encoded);
    TRY_TWICE((text = llamac_text_new(model, -1, stops, 2, 0, &error)), true);
    size_t shown;
    // not called again after a failure: the text is then unusable
    if (llamac_text_add(text, token, &out, &shown, &error) < 0) failures++;
    llamac_text_free(text);
    TRY_TWICE((grammar = llamac_grammar_json(model, true, &error)), true);
    llamac_grammar_free(grammar);
    llamac_sequence_free(loaded), llamac_sequence_free(copy), llamac_sequence_free(s);
    llamac_stop(engine);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    static float expected[4 * MAX_LOGITS], found[4 * MAX_LOGITS];
    char path[4096];
    snprintf(path, sizeof path, "%s/state", argv[2]);
    llamac_model *model = llamac_open(argv[1], 0, &error);
    EXPECT(model && llamac_describe(model).vocab_size <= MAX_LOGITS);
    n_logits = llamac_describe(model).vocab_size;
    use(model, path, expected);
    for (int n = 1;; n++) {
        calls = 0, to_fail = n, stream_failed = false;
        use(model, path, found);
        EXPECT(!memcmp(found, expected, 4 * n_logits * sizeof *found));
        if (calls < n) break; // each call has failed once
    }
    llamac_close(model);
    printf("%d\n", failures);
    return 0;
}

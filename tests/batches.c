// Tests that the logits of a sequence depend on its own tokens alone. Evaluates random texts token
// by token. Then evaluates the same texts in calls of random lengths, and in random batches of
// sequences that join, leave, are copied and truncated. Compares the logits bit by bit.
//
// Usage: batches MODEL ISA THREADS KV_BITS SEED ROUNDS [no_copy]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../runtime/llamac.h"

enum { TEXTS = 6, MAX_BATCH = 200 };

typedef struct {
    int *tokens; // (n,)
    int n;
    float *logits; // (n, vocab_size), computed one token per call
} Text;

static llamac_engine *engine;
static Text texts[TEXTS];
static int vocab_size;
static uint32_t state;

static int below(int n) {
    state = state * 1664525 + 1013904223;
    return (int)((state >> 8) % (uint32_t)n);
}

static void give_up(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static llamac_sequence *begin(void) {
    llamac_error error;
    llamac_sequence *s = llamac_sequence_new(engine, &error);
    if (!s) give_up(error.text);
    return s;
}

// Computes the logits of all tokens of a text, one token per call.
static void evaluate_alone(Text *text) {
    llamac_error error;
    llamac_sequence *s = begin();
    for (int i = 0; i < text->n; i++) {
        if (!llamac_forward(s, &text->tokens[i], 1, i, &error)) give_up(error.text);
        memcpy(text->logits + (size_t)i * vocab_size, llamac_logits(s), vocab_size * sizeof(float));
    }
    llamac_sequence_free(s);
}

static void compare(const float *found, const Text *text, int pos, const char *how) {
    const float *expected = text->logits + (size_t)pos * vocab_size;
    if (!found) give_up("no logits");
    if (!memcmp(found, expected, vocab_size * sizeof(float))) return;
    int i = 0;
    while (found[i] == expected[i]) i++;
    fprintf(stderr, "%s: text %d, position %d, logit %d is %.9g, alone %.9g\n", how,
            (int)(text - texts), pos, i, found[i], expected[i]);
    exit(1);
}

// Evaluates a text in calls of random lengths and compares the logits after each call.
static void cut(const Text *text) {
    llamac_error error;
    llamac_sequence *s = begin();
    for (int pos = 0, n; pos < text->n; pos += n) {
        int left = text->n - pos, most = below(3) ? 12 : MAX_BATCH;
        n = 1 + below(left < most ? left : most);
        if (!llamac_forward(s, text->tokens + pos, n, pos, &error)) give_up(error.text);
        compare(llamac_logits(s), text, pos + n - 1, "cut");
    }
    llamac_sequence_free(s);
}

// Evaluates batches with a random number of tokens from each of up to 12 sequences, and compares
// their logits.
static void batch_of_some(void) {
    llamac_error error;
    llamac_sequence *sequences[12] = {NULL};
    int text_of[12], done = 0;
    while (done < 400) {
        llamac_batch_token batch[MAX_BATCH];
        int n = 0, origin[MAX_BATCH];
        for (int i = 0; i < 12; i++) {
            if (sequences[i] && below(30) == 0) // the sequence leaves
                llamac_sequence_free(sequences[i]), sequences[i] = NULL;
            // a sequence joins: empty, or as a copy of the first tokens of another
            if (!sequences[i] && below(4) == 0) {
                int from = below(12);
                if (sequences[from] && below(2)) {
                    int kept = below(llamac_sequence_length(sequences[from]) + 1);
                    sequences[i] = llamac_sequence_copy(sequences[from], kept, &error);
                    if (!sequences[i]) give_up(error.text);
                    text_of[i] = text_of[from];
                } else sequences[i] = begin(), text_of[i] = below(TEXTS);
            }
            if (!sequences[i]) continue;
            const Text *text = &texts[text_of[i]];
            int length = llamac_sequence_length(sequences[i]);
            if (below(20) == 0
                && !llamac_sequence_truncate(sequences[i], length = below(length + 1), &error))
                give_up(error.text);
            // one time in 20, replace the tokens from a random position on instead of appending
            int pos = below(20) ? length : below(length + 1);
            int left = text->n - pos, most = below(3) ? 1 : below(40);
            for (int k = 0; k < left && k < most && n < MAX_BATCH; k++, n++) {
                batch[n] =
                    (llamac_batch_token){sequences[i], text->tokens[pos + k], pos + k, below(2)};
                origin[n] = i;
            }
        }
        if (!n) continue;
        if (!llamac_evaluate(engine, batch, n, &error)) give_up(error.text);
        for (int k = 0; k < n; k++)
            if (batch[k].logits)
                compare(llamac_batch_logits(engine, k), &texts[text_of[origin[k]]],
                        batch[k].position, "batch");
            else if (llamac_batch_logits(engine, k)) give_up("logits that nobody asked for");
        done += n;
    }
    for (int i = 0; i < 12; i++) llamac_sequence_free(sequences[i]);
}

int main(int argc, char **argv) {
    if (argc < 7) return 2;
    llamac_error error;
    llamac_model *model = llamac_open(argv[1], LLAMAC_NO_TOKENIZER, &error);
    if (!model) give_up(error.text);
    llamac_options options = {.isa = argv[2],
                              .n_threads = atoi(argv[3]),
                              .kv_bits = atoi(argv[4]),
                              .no_copy = argc > 7,
                              .device = "cpu"};
    engine = llamac_start(model, &options, &error);
    if (!engine) give_up(error.text);
    state = (uint32_t)atoi(argv[5]);
    vocab_size = llamac_describe(model).vocab_size;
    int context = llamac_positions(engine);
    for (int i = 0; i < TEXTS; i++) {
        int longest = i ? 80 : 700; // text 0 spans more than one KV_RANGE of the attention
        Text *text = &texts[i];
        text->n = longest < context ? longest : context;
        text->tokens = malloc(text->n * sizeof(int));
        text->logits = malloc((size_t)text->n * vocab_size * sizeof(float));
        for (int k = 0; k < text->n; k++) text->tokens[k] = below(vocab_size);
        evaluate_alone(text);
    }
    for (int round = 0; round < atoi(argv[6]); round++) {
        cut(&texts[below(TEXTS)]);
        batch_of_some();
    }
    llamac_stop(engine);
    llamac_close(model);
    for (int i = 0; i < TEXTS; i++) free(texts[i].tokens), free(texts[i].logits);
    puts("the same");
    return 0;
}

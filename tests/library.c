// Tests the library through llamac.h.
//   library twice MODEL OTHER  writes texts with both models, alone and at once from four threads
//   library often MODEL N      opens and closes the model N times, with an engine every fourth time
//   library wrong MODEL        makes invalid calls and prints their errors
//   library again MODEL        makes the same calls twice, which must have the same results
//   library batch MODEL        evaluates sequences in batches and alone
//   library older MODEL        calls the library like a program that was compiled with an older
//                              llamac.h, whose structs have fewer fields
//   library at MODEL           samples after every token of a batch
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../runtime/llamac.h"

enum { TOKENS = 48 };

static int vocab_size; // of the model: the logits of one token

typedef struct {
    llamac_model *model;
    char text[4096];
} Writer;

static void give_up(const llamac_error *error) {
    fprintf(stderr, "%s\n", error->text);
    exit(1);
}

static void *write_text(void *argument) {
    Writer *w = argument;
    llamac_error error;
    llamac_engine *engine = llamac_start(w->model, &(llamac_options){.n_threads = 2}, &error);
    llamac_sequence *s = engine ? llamac_sequence_new(engine, &error) : NULL;
    if (!s) give_up(&error);
    llamac_sampler sampler = {.temperature = 0.9f, .topp = 0.9f, .state = 7};
    int n, *tokens = llamac_encode(w->model, "One", 3, true, &n, &error), last = tokens[n - 1];
    size_t length = 0;
    if (!llamac_forward(s, tokens, n, 0, &error)) give_up(&error);
    for (int i = 0; i < TOKENS; i++) {
        int next = llamac_sample(s, &sampler, &error);
        if (next < 0) give_up(&error);
        length +=
            llamac_decode(w->model, last, next, w->text + length, sizeof w->text - 1 - length);
        if (!llamac_forward(s, &next, 1, n + i, &error)) give_up(&error);
        last = next;
    }
    llamac_free(tokens);
    llamac_sequence_free(s);
    llamac_stop(engine);
    return NULL;
}

static llamac_model *open_model(const char *path) {
    llamac_error error;
    llamac_model *m = llamac_open(path, 0, &error);
    if (!m) give_up(&error);
    return m;
}

// Writes a text with each model alone, then with both at once: two threads for each model. The
// texts must be the same.
static int twice(const char *one, const char *other) {
    Writer alone[2] = {{.model = open_model(one)}, {.model = open_model(other)}};
    Writer beside[4] = {{.model = alone[0].model},
                        {.model = alone[1].model},
                        {.model = alone[1].model},
                        {.model = alone[0].model}};
    pthread_t threads[4];
    for (int i = 0; i < 2; i++) write_text(&alone[i]);
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, write_text, &beside[i]);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++)
        if (strcmp(beside[i].text, alone[i == 1 || i == 2].text))
            return fprintf(stderr, "%d wrote another text\n", i), 1;
    if (!strcmp(alone[0].text, alone[1].text)) return fprintf(stderr, "both wrote the same\n"), 1;
    for (int i = 0; i < 2; i++) llamac_close(alone[i].model);
    return 0;
}

static int often(const char *path, int times) {
    llamac_error error;
    for (int i = 0; i < times; i++) {
        llamac_model *m = open_model(path);
        llamac_options options = {.positions = 4, .n_threads = 1 + i % 3};
        llamac_engine *engine = i % 4 ? NULL : llamac_start(m, &options, &error);
        llamac_sequence *s = engine ? llamac_sequence_new(engine, &error) : NULL, *copy = NULL;
        int n, *tokens = llamac_encode(m, "One day", 7, true, &n, &error);
        if (s && !llamac_forward(s, tokens, 2, 0, &error)) give_up(&error);
        if (s && !(copy = llamac_sequence_copy(s, i % 3, &error))) give_up(&error);
        if (copy && !llamac_forward(copy, tokens, 1, i % 3, &error)) give_up(&error);
        float *embedding = malloc(llamac_describe(m).dim * sizeof *embedding);
        if (engine && !llamac_embed(engine, tokens, 2 + i % 3, i % 2, embedding, &error))
            give_up(&error);
        free(embedding);
        llamac_free(tokens);
        llamac_sequence_free(s), llamac_sequence_free(copy);
        llamac_stop(engine);
        llamac_close(m);
        if (llamac_open("/dev/null", 0, &error) || llamac_open_memory("GGUF", 4, 0, NULL)) return 1;
    }
    return 0;
}

// Makes invalid calls and prints their errors.
static int wrong(const char *path) {
    llamac_error e;
    llamac_model *m = open_model(path);
    int token = 1, beyond = llamac_describe(m).vocab_size, n;
    llamac_engine *engine = llamac_start(m, NULL, &e),
                  *other = engine ? llamac_start(m, NULL, &e) : NULL;
    llamac_sequence *s = other ? llamac_sequence_new(engine, &e) : NULL;
    llamac_sampler greedy = {0};
    double nll;
    if (!s) give_up(&e);
#define REFUSED(call) \
    do { \
        strcpy(e.text, "-"); \
        if (call) return fprintf(stderr, "taken: %s\n", #call), 1; \
        puts(e.text); \
    } while (0)
#define BATCH(...) (llamac_batch_token[]){__VA_ARGS__}
    REFUSED(llamac_sample(s, &greedy, &e) >= 0);
    REFUSED(llamac_forward(s, &token, 1, llamac_positions(engine), &e));
    REFUSED(llamac_forward(s, &token, 1, -1, &e));
    REFUSED(llamac_forward(s, &token, 0, 0, &e));
    REFUSED(llamac_forward(s, &beyond, 1, 0, &e));
    REFUSED(llamac_start(m, &(llamac_options){.positions = 1 << 20}, &e));
    REFUSED(llamac_start(m, &(llamac_options){.device = "abacus"}, &e));
    REFUSED(llamac_encode_turn(m, true, NULL, "a", 1, &n, &e));
    REFUSED(llamac_use_template(m, "vicuna", &e));
    REFUSED(llamac_open("no such file", 0, &e));
    REFUSED(llamac_open_tokenizer(m, path, &e));
    REFUSED(llamac_nll(engine, 0, 0, &nll, &e));
    llamac_engine *quiet = llamac_start(m, &(llamac_options){.sample_only = true}, &e);
    llamac_sequence *unread = quiet ? llamac_sequence_new(quiet, &e) : NULL;
    if (!unread || !llamac_forward(unread, &token, 1, 0, &e)) give_up(&e);
    if (llamac_logits(unread) || llamac_batch_logits(quiet, 0))
        return fprintf(stderr, "logits where none are kept\n"), 1;
    REFUSED(llamac_nll(quiet, 0, 0, &nll, &e));
    if (!llamac_forward(s, &token, 1, 0, &e)) give_up(&e);
    REFUSED(llamac_sample(s, &(llamac_sampler){.temperature = NAN}, &e) >= 0);
    REFUSED(llamac_sample(s, &(llamac_sampler){.temperature = -1}, &e) >= 0);
    REFUSED(llamac_sample(s, &(llamac_sampler){.temperature = 1, .topp = NAN}, &e) >= 0);
    REFUSED(llamac_encode(m, "", ((size_t)1 << 27) + 1, true, &n, &e));
    // each function with one invalid argument
    llamac_info none = llamac_describe(NULL);
    char out[8] = "";
    int *tokens = &n;
    if (none.vocab_size || none.has_tokenizer || none.bos != -1 || llamac_decode(NULL, 1, 1, out, 8)
        || llamac_ends(NULL, 1))
        return 1;
    if (llamac_decode(m, 1, 70, NULL, 8) != llamac_decode(m, 1, 70, out, 8) || llamac_utf8(NULL, 4))
        return 1;
    if (llamac_positions(NULL) || *llamac_note(NULL) || llamac_logits(NULL)
        || llamac_batch_logits(NULL, 0))
        return 1;
    if (llamac_sequence_length(NULL) || llamac_sequence_tokens(NULL)
        || llamac_batch_logits(engine, -1))
        return 1;
    if (llamac_threads(NULL) || llamac_bytes_per_token(NULL) != 0 || llamac_bandwidth(NULL) != 0)
        return 1;
    if (llamac_threads(engine) < 1 || llamac_bytes_per_token(m) < 1
        || llamac_version() != LLAMAC_VERSION)
        return 1;
    llamac_close(NULL), llamac_stop(NULL), llamac_free(NULL), llamac_sequence_free(NULL);
    REFUSED(llamac_open(NULL, 0, &e));
    REFUSED(llamac_open("", 0, &e));
    REFUSED(llamac_open(path, 4, &e));
    REFUSED(llamac_open(path, -1, &e));
    REFUSED(llamac_open_memory(NULL, 100, 0, &e));
    REFUSED(llamac_open_memory((char *)m + 1, 100, 0, &e));
    REFUSED(llamac_open_memory(m, 0, 0, &e));
    REFUSED(llamac_open_tokenizer(NULL, path, &e));
    REFUSED(llamac_open_tokenizer(m, NULL, &e));
    REFUSED(llamac_open_tokenizer(m, "no such file", &e));
    REFUSED(llamac_verify(NULL, &e));
    REFUSED(llamac_verify(m, &e));
    REFUSED(llamac_use_template(NULL, "chatml", &e));
    REFUSED(llamac_use_template(m, "", &e));
    REFUSED(llamac_encode(NULL, "a", 1, true, &n, &e));
    REFUSED(llamac_encode(m, NULL, 1, true, &n, &e));
    REFUSED(llamac_encode(m, "a", 1, true, NULL, &e));
    REFUSED(llamac_encode_turn(NULL, true, NULL, "a", 1, &n, &e));
    REFUSED(llamac_encode_answer(NULL, "a", 1, &n, &e));
    REFUSED(llamac_start(NULL, NULL, &e));
    REFUSED(llamac_start(m, &(llamac_options){.positions = -1}, &e));
    REFUSED(llamac_start(m, &(llamac_options){.n_threads = -3}, &e));
    REFUSED(llamac_start(m, &(llamac_options){.n_threads = 1 << 20}, &e));
    REFUSED(llamac_start(m, &(llamac_options){.isa = "mmx"}, &e));
    REFUSED(llamac_start(m, &(llamac_options){.kv_bits = -8}, &e));
    REFUSED(llamac_start(m, &(llamac_options){.device = ""}, &e));
    REFUSED(llamac_start_sized(m, &(llamac_options){0}, sizeof(llamac_options) + 8, &e));
    REFUSED(llamac_sequence_new(NULL, &e));
    REFUSED(llamac_sequence_copy(NULL, 0, &e));
    REFUSED(llamac_sequence_copy(s, 2, &e));
    REFUSED(llamac_sequence_copy(s, -1, &e));
    REFUSED(llamac_sequence_save(NULL, "state", &e));
    REFUSED(llamac_sequence_save(s, NULL, &e));
    REFUSED(llamac_sequence_save(s, "", &e));
    REFUSED(llamac_sequence_save(s, "no such folder/state", &e));
    REFUSED(llamac_sequence_load(NULL, "state", &e));
    REFUSED(llamac_sequence_load(engine, NULL, &e));
    REFUSED(llamac_sequence_load(engine, "no such file", &e));
    REFUSED(llamac_sequence_load(engine, path, &e));
    REFUSED(llamac_sequence_truncate(NULL, 0, &e));
    REFUSED(llamac_sequence_truncate(s, 2, &e));
    REFUSED(llamac_sequence_truncate(s, -1, &e));
    REFUSED(llamac_forward(NULL, &token, 1, 0, &e));
    REFUSED(llamac_forward(s, NULL, 1, 0, &e));
    REFUSED(llamac_forward(s, &token, 1, 40, &e));
    REFUSED(llamac_forward(s, &token, INT_MAX, 1, &e));
    REFUSED(llamac_forward(s, &token, -1, 0, &e));
    REFUSED(llamac_evaluate(NULL, BATCH({s, 1, 0, true}), 1, &e));
    REFUSED(llamac_evaluate(engine, NULL, 1, &e));
    REFUSED(llamac_evaluate(engine, BATCH({s, 1, 0, true}), 0, &e));
    REFUSED(llamac_evaluate(engine, BATCH({NULL, 1, 0, true}), 1, &e));
    REFUSED(llamac_evaluate(other, BATCH({s, 1, 0, true}), 1, &e));
    REFUSED(llamac_evaluate(engine, BATCH({s, beyond, 0, true}), 1, &e));
    REFUSED(llamac_evaluate(engine, BATCH({s, 1, 0, true}, {s, 1, -1, true}), 2, &e));
    REFUSED(llamac_evaluate_sized(engine, BATCH({s, 1, 0, true}), 1, 8, &e));
    REFUSED(llamac_sample(NULL, &greedy, &e) >= 0);
    REFUSED(llamac_sample(s, NULL, &e) >= 0);
    REFUSED(llamac_nll(NULL, 0, 0, &nll, &e));
    REFUSED(llamac_nll(engine, 0, 0, NULL, &e));
    float embedding[1024];
    REFUSED(llamac_embed(NULL, &token, 1, LLAMAC_MEAN, embedding, &e));
    REFUSED(llamac_embed(engine, NULL, 1, LLAMAC_MEAN, embedding, &e));
    REFUSED(llamac_embed(engine, &token, 1, LLAMAC_MEAN, NULL, &e));
    REFUSED(llamac_embed(engine, &token, 0, LLAMAC_MEAN, embedding, &e));
    REFUSED(llamac_embed(engine, &token, llamac_positions(engine) + 1, LLAMAC_MEAN, embedding, &e));
    REFUSED(llamac_embed(engine, &beyond, 1, LLAMAC_LAST, embedding, &e));
    REFUSED(llamac_embed(engine, &token, 1, 2, embedding, &e));
    if (llamac_sequence_length(s) != 1)
        return fprintf(stderr, "a mistake changed the sequence\n"), 1;
    if (!llamac_forward(s, &token, 1, 0, &e)) give_up(&e);
    REFUSED(llamac_nll(engine, 1, 0, &nll, &e));
    REFUSED(llamac_nll(engine, 0, beyond, &nll, &e));
    REFUSED(llamac_sample(s, &(llamac_sampler){.temperature = 1, .topp = -5}, &e) >= 0);
    REFUSED(llamac_sample(s, &(llamac_sampler){.temperature = 1, .topp = 1.5f}, &e) >= 0);
    // fails while the batch is appended: the sequence keeps the tokens before the batch
    REFUSED(llamac_evaluate(engine, BATCH({s, 1, 1, true}, {s, 1, 3, true}), 2, &e));
    if (llamac_sequence_length(s) != 1)
        return fprintf(stderr, "%d tokens after a failure\n", llamac_sequence_length(s)), 1;
    REFUSED(llamac_sample(s, &greedy, &e) >= 0);
    n = 7;
    if (llamac_encode(m, NULL, 1, true, &n, NULL) || n)
        return fprintf(stderr, "%d tokens of a failure\n", n), 1;
    if (!(tokens = llamac_encode(m, NULL, 0, true, &n, &e)) || n != 1)
        return fprintf(stderr, "%d tokens of no text\n", n), 1;
    llamac_free(tokens);
    char *empty = malloc(1);
    if (llamac_utf8(empty + 1, 0)) return 1;
    free(empty);
    llamac_sequence_free(s), llamac_sequence_free(unread);
    llamac_stop(engine), llamac_stop(other), llamac_stop(quiet);
    llamac_close(m);
    return 0;
}

static bool same(const float *a, const float *b, int n) {
    return a && b && !memcmp(a, b, n * sizeof *a);
}

// Evaluates n tokens from position pos on. Returns a copy of their logits (n, vocab_size).
static float *all_logits(llamac_engine *engine, llamac_sequence *s, const int *tokens, int n,
                         int pos) {
    llamac_error e;
    llamac_batch_token batch[16] = {{0}};
    int size = vocab_size;
    float *rows = malloc((size_t)n * size * sizeof *rows);
    for (int i = 0; i < n; i++) batch[i] = (llamac_batch_token){s, tokens[i], pos + i, true};
    if (!llamac_evaluate(engine, batch, n, &e)) give_up(&e);
    for (int i = 0; i < n; i++)
        memcpy(rows + (size_t)i * size, llamac_batch_logits(engine, i), size * sizeof *rows);
    return rows;
}

// Tests that repeated calls have the same results, also after invalid calls. Sampling must not
// change the logits, and a call that succeeds must make the error empty.
static int again(const char *path) {
    llamac_error e = {"-"};
    llamac_model *m = open_model(path);
    llamac_engine *engine = llamac_start(m, NULL, &e),
                  *quiet = llamac_start(m, &(llamac_options){.sample_only = true}, &e);
    int size = vocab_size = llamac_describe(m).vocab_size, tokens[] = {1, 5, 9, -1};
    if (!engine || !quiet) give_up(&e);
    llamac_sequence *s = llamac_sequence_new(engine, &e), *unread = llamac_sequence_new(quiet, &e);
    if (!s || !unread || llamac_logits(s)) return fprintf(stderr, "logits of no tokens\n"), 1;
    float *before = all_logits(engine, s, tokens, 3, 0);
    if (!llamac_forward(unread, tokens, 3, 0, &e)) give_up(&e);
    int drawn[2][3];
    double nll[2];
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 3; j++) { // draws 0 and 2 have the same sampler, so the same token
            llamac_sampler sampler = {.temperature = 0.8f, .topp = j == 1 ? 1 : 0.9f, .state = 3};
            drawn[i][j] = llamac_sample(i ? unread : s, &sampler, &e);
        }
        if (!llamac_nll(engine, 1, 9, &nll[i], &e)) give_up(&e);
    }
    if (drawn[0][0] != drawn[0][2] || memcmp(drawn[0], drawn[1], sizeof drawn[0]))
        return fprintf(stderr, "other tokens\n"), 1;
    if (nll[0] != nll[1] || !same(before + 2 * size, llamac_logits(s), size))
        return fprintf(stderr, "other logits\n"), 1;
    int n, *turn, *answer;
    if (!llamac_use_template(m, "chatml", &e)) give_up(&e);
    strcpy(e.text, "-");
    turn = llamac_encode_turn(m, true, "Be brief.", "Hi", 2, &n, &e);
    if (!turn || *e.text) return fprintf(stderr, "an error of a success: %s\n", e.text), 1;
    strcpy(e.text, "-");
    answer = llamac_encode_answer(m, "Yes", 3, &n, &e);
    if (!answer || *e.text) return fprintf(stderr, "an error of a success: %s\n", e.text), 1;
    if (llamac_forward(s, tokens, 4, 0, &e) || llamac_forward(s, tokens, 3, 1 << 30, &e)) return 1;
    if (!same(before + 2 * size, llamac_logits(s), size))
        return fprintf(stderr, "a mistake changed the logits\n"), 1;
    if (!llamac_forward(s, tokens, 3, 3, &e)) give_up(&e);
    float *after = all_logits(engine, s, tokens, 3, 0);
    if (!same(before, after, 3 * size))
        return fprintf(stderr, "other logits of the same text\n"), 1;
    llamac_free(turn), llamac_free(answer), free(before), free(after);
    llamac_sequence_free(s), llamac_sequence_free(unread);
    llamac_stop(engine), llamac_stop(quiet), llamac_close(m);
    return 0;
}

// Tests that sequences in batches of changing size and order have the same logits as each one
// alone.
static int batch(const char *path) {
    enum { N = 5, LENGTH = 12 };
    llamac_error e;
    llamac_model *m = open_model(path);
    llamac_engine *engine = llamac_start(m, &(llamac_options){.n_threads = 2}, &e);
    llamac_sequence *s[N], *alone = engine ? llamac_sequence_new(engine, &e) : NULL;
    if (!alone) give_up(&e);
    int size = vocab_size = llamac_describe(m).vocab_size, tokens[N][LENGTH], done[N] = {0};
    float *expected[N];
    for (int i = 0; i < N; i++) {
        for (int t = 0; t < LENGTH; t++)
            // all sequences have the same first four tokens
            tokens[i][t] = t < 4 ? 5 + t : 7 + (31 * i + 11 * t) % 200;
        expected[i] = all_logits(engine, alone, tokens[i], LENGTH, 0);
    }
    // the other sequences begin as copies of the first, and share its four tokens
    if (!(s[0] = llamac_sequence_new(engine, &e)) || !llamac_forward(s[0], tokens[0], 4, 0, &e))
        give_up(&e);
    for (int i = 1; i < N; i++)
        if (!(s[i] = llamac_sequence_copy(s[0], 4, &e))) give_up(&e);
    for (int i = 0; i < N; i++) done[i] = 4;
    for (int step = 0, left = 1; left; step++) {
        llamac_batch_token together[N * LENGTH];
        int n = 0;
        for (int k = 0; k < N; k++) {
            int i = step % 2 ? N - 1 - k : k, more = 1 + (step + i) % 3;
            for (; more-- && done[i] < LENGTH; n++, done[i]++)
                together[n] = (llamac_batch_token){s[i], tokens[i][done[i]], done[i], true};
        }
        if (!(left = n)) break;
        if (!llamac_evaluate(engine, together, n, &e)) give_up(&e);
        for (int k = 0; k < n; k++) {
            int i = 0;
            while (s[i] != together[k].sequence) i++;
            if (!same(llamac_batch_logits(engine, k),
                      expected[i] + (size_t)together[k].position * size, size))
                return fprintf(stderr, "step %d: other logits of sequence %d at %d\n", step, i,
                               together[k].position),
                       1;
        }
    }
    for (int i = 0; i < N; i++) {
        if (llamac_sequence_length(s[i]) != LENGTH
            || memcmp(llamac_sequence_tokens(s[i]), tokens[i], sizeof tokens[i]))
            return fprintf(stderr, "other tokens of sequence %d\n", i), 1;
        if (!llamac_sequence_truncate(s[i], 6, &e)
            || !llamac_forward(s[i], &tokens[i][6], 1, 6, &e))
            give_up(&e);
        if (!same(llamac_logits(s[i]), expected[i] + 6 * (size_t)size, size))
            return fprintf(stderr, "other logits at 6\n"), 1;
        llamac_sequence_free(s[i]), free(expected[i]);
    }
    llamac_sequence_free(alone), llamac_stop(engine), llamac_close(m);
    return 0;
}

// Tests structs with fewer fields than the library knows. It must use 0 for the missing fields, and
// must not write to them.
static int older(const char *path) {
    llamac_error e;
    llamac_model *m = open_model(path);
    // the size says that the program does not know `isa`, so its invalid value is ignored
    llamac_options options = {.positions = 4, .n_threads = 1, .isa = "mmx"};
    llamac_engine *engine = llamac_start_sized(m, &options, offsetof(llamac_options, isa), &e);
    if (!engine) give_up(&e);
    if (llamac_positions(engine) != 4 || llamac_threads(engine) != 1)
        return fprintf(stderr, "other options\n"), 1;
    llamac_info info = {.eot = 12345};
    llamac_describe_sized(m, &info, offsetof(llamac_info, eot));
    if (info.bos != 1 || info.eos != 2 || info.eot != 12345)
        return fprintf(stderr, "another description\n"), 1;
    llamac_stop(engine), llamac_close(m);
    return 0;
}

// Samples after each token of a batch of two sequences, and after the same tokens alone. Both must
// sample the same token and leave the same random state, whatever tokens the sampler's penalties
// count. Prints the errors of invalid calls.
static int at(const char *path) {
    enum { LENGTH = 12 };
    llamac_error e;
    llamac_model *m = open_model(path);
    llamac_engine *engine = llamac_start(m, &(llamac_options){.n_threads = 2}, &e),
                  *other = llamac_start(m, NULL, &e);
    llamac_sequence *s[2], *alone = other ? llamac_sequence_new(other, &e) : NULL;
    llamac_batch_token batch[2 * LENGTH];
    int tokens[2][LENGTH], n = 0, distinct = 0, last = -1;
    for (int i = 0; i < 2; i++) {
        if (!alone || !(s[i] = llamac_sequence_new(engine, &e))) give_up(&e);
        for (int t = 0; t < LENGTH; t++) tokens[i][t] = 5 + (31 * i + 11 * t) % 40;
        // an earlier call, after which the batch continues
        if (!llamac_forward(s[i], tokens[i], 3, 0, &e)) give_up(&e);
    }
    for (int k = 0; k < 2; k++) // two runs of each sequence, by turns
        for (int i = 0; i < 2; i++)
            for (int t = 3 + 4 * k; t < 7 + 5 * k; t++, n++)
                batch[n] = (llamac_batch_token){s[i], tokens[i][t], t, t % 3 > 0};
    if (!llamac_evaluate(engine, batch, n, &e)) give_up(&e);
    const llamac_sampler samplers[] = {
        {0},
        {.temperature = 1, .topp = 0.9f, .state = 4},
        {.repeat_penalty = 1.7f, .penalty_tokens = 3},
        {.temperature = 2, .frequency_penalty = 3, .penalty_tokens = -1, .state = 9, .topk = 50}};
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < n; i++) {
            int of = batch[i].sequence == s[1];
            if (!llamac_forward(alone, tokens[of], batch[i].position + 1, 0, &e)) give_up(&e);
            for (int k = 0; k < 4; k++) {
                llamac_sampler here = samplers[k], there = samplers[k];
                int expected = llamac_sample(alone, &there, &e),
                    token = llamac_sample_at(engine, i, &here, &e);
                bool ok = batch[i].logits ? token == expected && here.state == there.state
                                          : token == -1 && *e.text;
                if (!ok)
                    return fprintf(stderr, "token %d, sampler %d: %d instead of %d\n", i, k, token,
                                   expected),
                           1;
                if (batch[i].logits && token != last) distinct++, last = token;
            }
        }
        // the penalties must count the tokens of the call, though the sequence then has fewer
        if (!llamac_sequence_truncate(s[0], 2, &e)) give_up(&e);
    }
    if (distinct < n) return fprintf(stderr, "nearly all tokens are the same\n"), 1;
    llamac_sampler greedy = {0};
    REFUSED(llamac_sample_at(NULL, 0, &greedy, &e) >= 0);
    REFUSED(llamac_sample_at(engine, 1, NULL, &e) >= 0);
    REFUSED(llamac_sample_at(engine, -1, &greedy, &e) >= 0);
    REFUSED(llamac_sample_at(engine, n, &greedy, &e) >= 0);
    REFUSED(llamac_sample_at(engine, 0, &greedy, &e) >= 0); // without logits
    REFUSED(llamac_sample_at(engine, 1, &(llamac_sampler){.temperature = -1}, &e) >= 0);
    REFUSED(llamac_sample_at_sized(engine, 1, &greedy, 8, &e) >= 0);
    llamac_sequence_free(s[0]);
    REFUSED(llamac_sample_at(engine, 1, &greedy, &e) >= 0); // its sequence was freed
    for (int i = 0; i < n; i++)
        if (batch[i].sequence == s[1] && batch[i].logits
            && llamac_sample_at(engine, i, &greedy, &e) < 0)
            give_up(&e);
    // an engine with sample_only
    llamac_engine *quiet = llamac_start(m, &(llamac_options){.sample_only = true}, &e);
    llamac_sequence *unread = quiet ? llamac_sequence_new(quiet, &e) : NULL;
    if (!unread || !llamac_forward(unread, tokens[0], 4, 0, &e)
        || !llamac_forward(alone, tokens[0], 4, 0, &e))
        give_up(&e);
    if (llamac_sample_at(quiet, 3, &greedy, &e) != llamac_sample(alone, &greedy, &e)) return 1;
    llamac_sequence_free(s[1]), llamac_sequence_free(alone), llamac_sequence_free(unread);
    llamac_stop(engine), llamac_stop(other), llamac_stop(quiet), llamac_close(m);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "at")) return at(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "again")) return again(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "batch")) return batch(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "older")) return older(argv[2]);
    if (argc == 4 && !strcmp(argv[1], "twice")) return twice(argv[2], argv[3]);
    if (argc == 4 && !strcmp(argv[1], "often")) return often(argv[2], atoi(argv[3]));
    return argc == 3 ? wrong(argv[2]) : 2;
}

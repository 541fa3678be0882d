// Tests many sequences on one engine of the GPU. Prints "fine", or the check that failed and the
// error.
//
// Usage: cuda_sequences CASE MODEL
//   turns     sequences evaluated by turns, and in one batch, have the same texts as each one alone
//   copies    a copy of a sequence continues like the sequence, and neither changes the other
//   saved     a sequence that is saved and loaded continues like the original: exactly on the GPU,
//             nearly on the CPU
//   logits    the same logits as the CPU's, in memory that moves between two calls
//   embed     nearly the same embeddings as the CPU's; they do not change the logits of the last
//             call
//   shapes    sequences share recordings, and so do prompts of similar lengths; the number of
//             recordings is limited (emulated)
//   failures  if any one call of CUDA fails, there is an error, and no memory is leaked (emulated)
//   exhausted if any one allocation of host memory by the backend fails, there is an error
//             (emulated)
//   memory    if as many sequences are created as fit, enough memory remains for the code of the
//             kernels (emulated)
//   hot       with an infinite temperature, and logits as far apart as floats can be, only likely
//             tokens are sampled; the logits of the model must be near 2.5e38 or -2.5e38
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <new>
#include <set>
#include <string>
#include <vector>
#include "../runtime/llamac.h"

enum { POSITIONS = 320, MAX_RECORDINGS = 32 };

static llamac_error error;

static void give_up(const char *what) {
    printf("%s: %s\n", what, error.text);
    exit(1);
}

#define EXPECT(ok) ((ok) ? (void)0 : give_up(#ok))

typedef std::vector<int> Tokens;

// Returns a prompt of n tokens. Different numbers give different prompts.
static Tokens prompt(int number, int n) {
    Tokens tokens(n);
    for (int i = 0; i < n; i++) tokens[i] = 3 + (number * 31 + i * 7) % 200;
    return tokens;
}

static llamac_engine *start(llamac_model *model, const char *device, bool sample_only) {
    llamac_options options = {};
    options.positions = POSITIONS, options.n_threads = 1, options.device = device;
    options.sample_only = sample_only;
    return llamac_start(model, &options, &error);
}

// Evaluates tokens at the end of a sequence. Returns the next token, by sampling with a seed that
// depends on the length alone; -1 after an error.
static int extend(llamac_sequence *s, const Tokens &tokens) {
    int n = (int)tokens.size(), pos = llamac_sequence_length(s);
    llamac_sampler sampler = {};
    sampler.temperature = sampler.topp = 0.9f, sampler.state = (uint64_t)(7 + pos + n);
    if (!llamac_forward(s, tokens.data(), n, pos, &error)) return -1;
    return llamac_sample(s, &sampler, &error);
}

// Extends a sequence by n tokens: `next` and those sampled after it. Returns them.
static Tokens write_tokens(llamac_sequence *s, int next, int n) {
    Tokens text;
    for (int i = 0; i < n; i++) {
        text.push_back(next);
        next = extend(s, {next});
        EXPECT(next >= 0);
    }
    return text;
}

static Tokens write_alone(llamac_engine *engine, const Tokens &tokens, int n) {
    llamac_sequence *s = llamac_sequence_new(engine, &error);
    EXPECT(s);
    Tokens text = write_tokens(s, extend(s, tokens), n);
    llamac_sequence_free(s);
    return text;
}

static void turns(llamac_model *model, bool sample_only) {
    enum { N = 3, LENGTH = 3 };
    llamac_engine *engine = start(model, "cuda", sample_only);
    EXPECT(engine);
    Tokens alone[N], text[N];
    llamac_sequence *s[N];
    int next[N];
    for (int i = 0; i < N; i++) alone[i] = write_alone(engine, prompt(i, 2 + 3 * i), LENGTH);
    for (int i = 0; i < N; i++) {
        s[i] = llamac_sequence_new(engine, &error);
        EXPECT(s[i]);
        next[i] = extend(s[i], prompt(i, 2 + 3 * i));
    }
    for (int turn = 0; turn < LENGTH; turn++)
        for (int i = 0; i < N; i++) text[i].push_back(next[i]), next[i] = extend(s[i], {next[i]});
    for (int i = 0; i < N; i++) EXPECT(text[i] == alone[i]);

    // the prompts again, alone and then all in one batch; greedy sampling must agree
    if (!sample_only) {
        std::vector<llamac_batch_token> batch;
        Tokens expected, found;
        for (int i = 0; i < N; i++) {
            llamac_sampler greedy = {};
            Tokens tokens = prompt(i, 2 + 3 * i);
            EXPECT(llamac_forward(s[i], tokens.data(), (int)tokens.size(), 0, &error));
            expected.push_back(llamac_sample(s[i], &greedy, &error));
            for (int t = 0; t < (int)tokens.size(); t++)
                batch.push_back({s[i], tokens[t], t, t + 1 == (int)tokens.size()});
        }
        EXPECT(llamac_evaluate(engine, batch.data(), (int)batch.size(), &error));
        for (int i = 0; i < N; i++) {
            llamac_sampler greedy = {};
            found.push_back(llamac_sample(s[i], &greedy, &error));
        }
        EXPECT(found == expected);
    } else { // logits stay on the GPU while later passes of the call compute none
        llamac_sampler greedy = {};
        EXPECT(llamac_forward(s[0], prompt(0, 4).data(), 4, 0, &error));
        int expected = llamac_sample(s[0], &greedy, &error);
        std::vector<llamac_batch_token> batch;
        for (int t = 0; t < 4; t++) batch.push_back({s[0], prompt(0, 4)[t], t, t == 3});
        batch.push_back({s[1], 9, 0, false});
        EXPECT(llamac_evaluate(engine, batch.data(), 5, &error));
        EXPECT(llamac_sample(s[0], &greedy, &error) == expected);
    }
    for (llamac_sequence *sequence : s) llamac_sequence_free(sequence);
    llamac_stop(engine);
}

static void copies(llamac_model *model) {
    enum { LENGTH = 3, KEPT = 5 };
    llamac_engine *engine = start(model, "cuda", false);
    EXPECT(engine);
    Tokens first = prompt(1, KEPT), other = prompt(2, 3);
    Tokens expected = write_alone(engine, first, LENGTH);
    llamac_sequence *s = llamac_sequence_new(engine, &error);
    EXPECT(s && extend(s, first) >= 0 && extend(s, prompt(3, 6)) >= 0);
    llamac_sequence *copy = llamac_sequence_copy(s, KEPT, &error);
    llamac_sequence *changed = llamac_sequence_copy(s, KEPT, &error);
    llamac_sequence *empty = llamac_sequence_copy(s, 0, &error);
    EXPECT(copy && changed && empty && llamac_sequence_length(copy) == KEPT);
    EXPECT(extend(changed, other) >= 0 && extend(empty, other) >= 0);
    // evaluate the last kept token again, for its logits
    EXPECT(llamac_sequence_truncate(copy, KEPT - 1, &error));
    EXPECT(write_tokens(copy, extend(copy, {first.back()}), LENGTH) == expected);
    EXPECT(llamac_sequence_truncate(s, KEPT - 1, &error));
    EXPECT(write_tokens(s, extend(s, {first.back()}), LENGTH) == expected);
    llamac_sequence_free(s); // a copy outlives it
    EXPECT(llamac_sequence_truncate(copy, KEPT - 1, &error));
    EXPECT(write_tokens(copy, extend(copy, {first.back()}), LENGTH) == expected);
    for (llamac_sequence *sequence : {copy, changed, empty}) llamac_sequence_free(sequence);
    llamac_stop(engine);
}

// Returns the path of the file of a saved sequence. It is removed after loading.
static std::string file_name() { return "/tmp/cuda_sequences." + std::to_string(getpid()); }

static llamac_sequence *save_and_load(llamac_sequence *s, llamac_engine *engine) {
    bool saved = llamac_sequence_save(s, file_name().c_str(), &error);
    llamac_sequence *loaded = NULL;
    if (saved) loaded = llamac_sequence_load(engine, file_name().c_str(), &error);
    unlink(file_name().c_str());
    std::string path = file_name() + ": "; // prefix of errors, even of those of the GPU
    if (!loaded && !strncmp(error.text, path.c_str(), path.size()))
        memmove(error.text, error.text + path.size(), strlen(error.text + path.size()) + 1);
    return loaded;
}

static void saved(llamac_model *model) {
    enum { LENGTH = 3 };
    llamac_engine *engines[2] = {start(model, "cuda", false), start(model, "cpu", false)};
    EXPECT(engines[0] && engines[1]);
    for (int n : {1, 7, 64, 70}) { // blocks of a file have 64 positions
        llamac_sequence *s = llamac_sequence_new(engines[0], &error);
        EXPECT(s && extend(s, prompt(n, n)) >= 0);
        llamac_sequence *on_gpu = save_and_load(s, engines[0]);
        EXPECT(on_gpu && llamac_sequence_length(on_gpu) == n);
        llamac_sequence *on_cpu = save_and_load(s, engines[1]);
        EXPECT(on_cpu && llamac_sequence_length(on_cpu) == n);
        Tokens expected = write_tokens(s, 5, LENGTH);
        std::vector<float> row;
        EXPECT(extend(s, {9}) >= 0);
        row.assign(llamac_logits(s), llamac_logits(s) + llamac_describe(model).vocab_size);
        EXPECT(write_tokens(on_gpu, 5, LENGTH) == expected && extend(on_gpu, {9}) >= 0);
        EXPECT(!memcmp(row.data(), llamac_logits(on_gpu), row.size() * sizeof(float)));
        for (int token : expected) EXPECT(extend(on_cpu, {token}) >= 0);
        EXPECT(extend(on_cpu, {9}) >= 0);
        for (size_t i = 0; i < row.size(); i++)
            EXPECT(fabsf(row[i] - llamac_logits(on_cpu)[i]) <= 1e-3f * (1 + fabsf(row[i])));
        for (llamac_sequence *sequence : {s, on_gpu, on_cpu}) llamac_sequence_free(sequence);
    }
    for (llamac_engine *engine : engines) llamac_stop(engine);
}

// Evaluates a batch of n tokens on both engines and compares the logits of some of them.
static void compare(llamac_engine *engines[2], llamac_sequence *s[2], int vocab_size, int n,
                    int number, bool (*is_wanted)(int, int)) {
    Tokens tokens = prompt(number, n);
    for (int i = 0; i < 2; i++) {
        std::vector<llamac_batch_token> batch;
        for (int t = 0; t < n; t++) batch.push_back({s[i], tokens[t], t, is_wanted(t, n)});
        EXPECT(llamac_evaluate(engines[i], batch.data(), n, &error));
    }
    for (int t = 0; t < n; t++) {
        const float *a = llamac_batch_logits(engines[0], t),
                    *b = llamac_batch_logits(engines[1], t);
        EXPECT(!a == !b && !a == !is_wanted(t, n));
        for (int i = 0; a && i < vocab_size; i++)
            EXPECT(fabsf(a[i] - b[i]) <= 1e-3f * (1 + fabsf(b[i])));
    }
}

static void logits(llamac_model *model) {
    llamac_engine *engines[2] = {start(model, "cuda", false), start(model, "cpu", false)};
    EXPECT(engines[0] && engines[1]);
    llamac_sequence *s[2];
    for (int i = 0; i < 2; i++) s[i] = llamac_sequence_new(engines[i], &error);
    auto last = [](int t, int n) { return t + 1 == n; };
    auto all = [](int, int) { return true; };
    auto some = [](int t, int) { return t % 3 == 1; };
    int vocab_size = llamac_describe(model).vocab_size;
    for (int round = 0; round < 4; round++) {
        compare(engines, s, vocab_size, 1, round, all);
        compare(engines, s, vocab_size, 6, round, last);
        compare(engines, s, vocab_size, 6, round, some);
        // more rows in round 2: their memory moves
        compare(engines, s, vocab_size, 9 + 20 * (round == 2), round, all);
    }
    for (int i = 0; i < 2; i++) llamac_sequence_free(s[i]), llamac_stop(engines[i]);
}

static std::vector<float> embed(llamac_engine *engine, const Tokens &tokens, int pooling, int dim) {
    std::vector<float> embedding(dim);
    EXPECT(
        llamac_embed(engine, tokens.data(), (int)tokens.size(), pooling, embedding.data(), &error));
    return embedding;
}

static void embeddings(llamac_model *model) {
    llamac_engine *engines[3] = {start(model, "cuda", false), start(model, "cuda", true),
                                 start(model, "cpu", false)};
    EXPECT(engines[0] && engines[1] && engines[2]);
    int dim = llamac_describe(model).dim;
    llamac_sequence *s = llamac_sequence_new(engines[1], &error);
    EXPECT(s);
    int next = extend(s, prompt(1, 5)), seed = 7 + 5; // the seed that extend used
    // lengths repeat, so that passes run op by op, are recorded and are replayed
    for (int n : {1, 2, 150, 1, 2, 1, 1})
        for (int pooling : {LLAMAC_MEAN, LLAMAC_LAST}) {
            std::vector<float> expected = embed(engines[2], prompt(n, n), pooling, dim);
            for (int i = 0; i < 2; i++) {
                std::vector<float> found = embed(engines[i], prompt(n, n), pooling, dim);
                for (int j = 0; j < dim; j++)
                    EXPECT(fabsf(found[j] - expected[j]) <= 1e-3f * (1 + fabsf(expected[j])));
            }
            llamac_sampler sampler = {};
            sampler.temperature = sampler.topp = 0.9f, sampler.state = seed;
            EXPECT(llamac_sample(s, &sampler, &error) == next);
        }
    llamac_sequence_free(s);
    for (llamac_engine *engine : engines) llamac_stop(engine);
}

static void hot(llamac_model *model) {
    llamac_engine *engines[2] = {start(model, "cuda", true), start(model, "cpu", false)};
    EXPECT(engines[0] && engines[1]);
    llamac_sequence *s[2];
    for (int i = 0; i < 2; i++) {
        s[i] = llamac_sequence_new(engines[i], &error);
        EXPECT(s[i] && llamac_forward(s[i], prompt(1, 3).data(), 3, 0, &error));
    }
    const float *logits = llamac_logits(s[1]);
    for (float topp : {0.0f, 0.5f, 0.99f}) {
        std::set<int> seen;
        llamac_sampler sampler = {};
        sampler.temperature = INFINITY, sampler.topp = topp, sampler.state = 1;
        for (int i = 0; i < 100; i++) {
            int token = llamac_sample(s[0], &sampler, &error);
            EXPECT(token >= 0 && token < llamac_describe(model).vocab_size && logits[token] > 0);
            seen.insert(token);
        }
        EXPECT(seen.size() > 10);
    }
    for (int i = 0; i < 2; i++) llamac_sequence_free(s[i]), llamac_stop(engines[i]);
}

#ifdef CUDA_ON_CPU
static int news_left = -1; // allocations of the backend that succeed before one fails; < 0: all do

// Replace every `new` and `delete` of the program. If they were inlined, GCC would see `free`
// release memory that `new` has allocated.
#define APART __attribute__((noinline))
APART void *operator new(size_t n, const std::nothrow_t &) noexcept {
    if (!cuda_on_cpu::owns && news_left >= 0 && news_left-- == 0) return NULL;
    return malloc(n ? n : 1);
}
APART void *operator new(size_t n) {
    void *block = operator new(n, std::nothrow);
    if (!block) throw std::bad_alloc();
    return block;
}
APART void operator delete(void *block) noexcept { free(block); }
APART void operator delete(void *block, size_t) noexcept { free(block); }

static void exhausted(llamac_model *model) {
    int n = 0;
    for (bool failed = true; failed; n++) {
        news_left = n;
        llamac_engine *engine = start(model, "cuda", false);
        failed = news_left < 0, news_left = -1;
        EXPECT(failed == !engine);
        if (failed) EXPECT(strstr(error.text, "memory"));
        EXPECT(failed || write_alone(engine, prompt(1, 3), 2).size() == 2);
        llamac_stop(engine);
        EXPECT(cuda_on_cpu::sizes.empty());
    }
    EXPECT(n > 5);
}

static void memory(llamac_model *model) {
    llamac_engine *engine = start(model, "cuda", false);
    EXPECT(engine);
    std::vector<llamac_sequence *> sequences;
    while (llamac_sequence *s = llamac_sequence_new(engine, &error)) sequences.push_back(s);
    size_t free_bytes, total;
    EXPECT(!strcmp(error.text, "not enough memory") && sequences.size() > 10);
    EXPECT(!cudaMemGetInfo(&free_bytes, &total) && free_bytes >= 32 << 20 && free_bytes < 33 << 20);
    EXPECT(!llamac_sequence_copy(sequences[0], 0, &error));
    llamac_sequence_free(sequences.back()); // leaves enough memory for one other sequence
    sequences.back() = llamac_sequence_new(engine, &error);
    EXPECT(sequences.back() && extend(sequences.back(), {5}) >= 0);
    for (llamac_sequence *s : sequences) llamac_sequence_free(s);
    llamac_stop(engine);
}

// Evaluates a prompt of n tokens twice: op by op, then recorded. The logits of its last n_wanted
// tokens are wanted.
static void evaluate_twice(llamac_engine *engine, llamac_sequence *s, int n, int n_wanted) {
    std::vector<llamac_batch_token> batch;
    for (int t = 0; t < n; t++) batch.push_back({s, 3 + t, t, t >= n - n_wanted});
    for (int i = 0; i < 2; i++) EXPECT(llamac_evaluate(engine, batch.data(), n, &error));
}

static void shapes(llamac_model *model) {
    using cuda_on_cpu::graphs;
    llamac_engine *engine = start(model, "cuda", false);
    EXPECT(engine);
    for (int n = 33; n <= 64; n++) { // one recording serves all of these, and all sequences
        llamac_sequence *s = llamac_sequence_new(engine, &error);
        evaluate_twice(engine, s, n, 1);
        llamac_sequence_free(s);
        EXPECT(graphs == 1);
    }
    llamac_sequence *s = llamac_sequence_new(engine, &error);
    for (int n : {1, 2, 3, 4, 7, 8, 13, 16, 29, 32, 61, 64})
        for (int n_wanted : {0, 1, 2, 4, 8, 16, 32, n - 1, n}) {
            if (n_wanted <= n) evaluate_twice(engine, s, n, n_wanted);
            EXPECT(graphs <= MAX_RECORDINGS);
        }
    EXPECT(graphs == MAX_RECORDINGS);
    llamac_sequence_free(s);
    llamac_stop(engine);
    EXPECT(graphs == 0);
}

static bool is_failure() {
    return !strncmp(error.text, "the GPU failed: unspecified launch failure (", 44);
}

// Uses an engine for a text, whose passes run op by op, are recorded and are replayed, and for a
// copy, a saved file and an embedding. Returns whether all calls succeeded.
static bool use(llamac_engine *engine, llamac_sequence *s) {
    for (int i = 0; i < 4; i++)
        if (llamac_sequence_truncate(s, 0, &error), extend(s, prompt(i, 3)) < 0) return false;
    for (int i = 0; i < 2; i++)
        if (extend(s, {5}) < 0) return false;
    llamac_sequence *copy = llamac_sequence_copy(s, 4, &error);
    bool ok = copy && extend(copy, {6}) >= 0;
    llamac_sequence_free(copy);
    llamac_sequence *loaded = ok ? save_and_load(s, engine) : NULL;
    ok = loaded && extend(loaded, {6}) >= 0;
    llamac_sequence_free(loaded);
    std::vector<float> embedding(1024);
    ok = ok && llamac_embed(engine, prompt(1, 3).data(), 3, LLAMAC_MEAN, embedding.data(), &error);
    return ok && llamac_bandwidth(engine) > 0;
}

static void failures(llamac_model *model) {
    using namespace cuda_on_cpu;
    bool done = false;
    int n;
    for (n = 0; !done; n += 7) { // call n of `start` fails
        calls_left = n, broken = false;
        llamac_engine *engine = start(model, "cuda", true);
        EXPECT(engine || is_failure());
        done = engine && !broken;
        llamac_stop(engine);
    }
    EXPECT(n > 10);
    for (n = 0, done = false; !done; n++) {
        calls_left = -1, broken = false;
        llamac_engine *engine = start(model, "cuda", n % 2);
        EXPECT(engine);
        llamac_sequence *s = llamac_sequence_new(engine, &error);
        EXPECT(s);
        calls_left = n;
        done = use(engine, s);
        if (!done && *error.text) EXPECT(is_failure());
        if (!done) { // all later calls fail too, with the same error
            std::string first = error.text;
            EXPECT(extend(s, {5}) < 0 && is_failure() && (first.empty() || first == error.text));
            llamac_sequence *other = llamac_sequence_new(engine, &error);
            EXPECT(other && extend(other, {5}) < 0 && is_failure());
            EXPECT(!llamac_logits(s) && llamac_bandwidth(engine) == 0);
            llamac_sequence_free(other);
        }
        EXPECT(!capture);
        llamac_sequence_free(s);
        llamac_stop(engine);
        EXPECT(graphs == 0);
    }
    EXPECT(n > 60);
    // a failure found while a sequence is freed is reported as the engine's, not as lack of memory
    calls_left = -1, broken = false;
    llamac_engine *engine = start(model, "cuda", false);
    llamac_sequence *first = llamac_sequence_new(engine, &error);
    llamac_sequence *second = llamac_sequence_new(engine, &error);
    EXPECT(first && second);
    calls_left = 0;
    llamac_sequence_free(second);
    second = llamac_sequence_new(engine, &error);
    EXPECT(second && extend(second, {5}) < 0 && is_failure());
    llamac_sequence_free(first), llamac_sequence_free(second);
    llamac_stop(engine);
}
#else
static void exhausted(llamac_model *) {}
static void memory(llamac_model *) {}
static void shapes(llamac_model *) {}
static void failures(llamac_model *) {}
#endif

int main(int argc, char **argv) {
    llamac_model *model = argc == 3 ? llamac_open(argv[2], 0, &error) : NULL;
    if (!model) return fprintf(stderr, "cuda_sequences CASE MODEL: %s\n", error.text), 2;
    std::string name = argv[1];
    if (name == "turns") turns(model, false), turns(model, true);
    else if (name == "copies") copies(model);
    else if (name == "saved") saved(model);
    else if (name == "logits") logits(model);
    else if (name == "embed") embeddings(model);
    else if (name == "shapes") shapes(model);
    else if (name == "exhausted") exhausted(model);
    else if (name == "memory") memory(model);
    else if (name == "hot") hot(model);
    else failures(model);
    llamac_close(model);
    puts("fine");
    return 0;
}

// Runs the sampler, for test_sampling.py.
//   sampling shares       reads cases from stdin. Writes for each token the share of all random
//                         numbers that sample it.
//   sampling draws N      reads cases from stdin. Writes how many of N draws sample each token.
//   sampling wrong MODEL  prints the errors of invalid calls.
//
// A case is a Case followed by its arrays, in binary.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../runtime/sampler.h"

typedef struct {
    int vocab_size, n_tokens, has_mask;
    float temperature, topp, minp, repeat, frequency, presence;
    int topk, penalty_tokens, n_biases;
} Case;

static void *take_array(size_t n, size_t size) {
    void *p = malloc(n * size + 1);
    if (!p || fread(p, size, n, stdin) != n) exit(2);
    return p;
}

// Returns a state with which llamac_random returns coin / 2^24, by inverting xorshift*.
static uint64_t state_of(uint32_t coin) {
    uint64_t inverse = 1;
    for (int i = 0; i < 6; i++) inverse *= 2 - 0x2545F4914F6CDD1Dull * inverse; // Newton's method
    uint64_t y = ((uint64_t)coin << 40 | 1) * inverse, x = y;
    for (int i = 0; i < 3; i++) x = y ^ x >> 27;
    for (int i = 0; i < 3; i++) y = x ^ y << 25;
    for (int i = 0; i < 6; i++) x = y ^ x >> 12;
    return x;
}

static int draw(const SamplerMemory *m, llamac_sampler *s, const float *logits, const int *tokens,
                int n) {
    llamac_error e;
    int token = llamac_draw(m, s, logits, tokens, n, &e);
    if (token < 0) puts(e.text), exit(3);
    return token;
}

// Computes the share of random numbers that sample each token. Each token has one interval of
// random numbers; bisection finds where it ends.
static void find_shares(const SamplerMemory *m, llamac_sampler *s, const float *logits,
                        const int *tokens, int n, double *shares) {
    const uint32_t end = 1 << 24;
    for (uint32_t coin = 0; coin < end;) {
        uint32_t low = coin, high = end; // low samples the token, high another one
        s->state = state_of(coin);
        int token = draw(m, s, logits, tokens, n);
        while (high - low > 1) {
            uint32_t middle = low + (high - low) / 2;
            s->state = state_of(middle);
            if (draw(m, s, logits, tokens, n) == token) low = middle;
            else high = middle;
        }
        shares[token] += (high - coin) / (double)end;
        coin = high;
    }
}

static void run_cases(int draws) {
    const Kernels *kernels[MAX_KERNELS];
    int n_kernels = llamac_find_kernels(kernels);
    Case c;
    for (int number = 0; fread(&c, sizeof c, 1, stdin) == 1; number++) {
        float *logits = take_array(c.vocab_size, sizeof *logits);
        int *tokens = take_array(c.n_tokens, sizeof *tokens);
        int *bias_tokens = take_array(c.n_biases, sizeof *bias_tokens);
        float *biases = take_array(c.n_biases, sizeof *biases);
        uint8_t *mask = c.has_mask ? take_array(c.vocab_size, 1) : NULL;
        llamac_sampler s = {c.temperature, c.topp,      number + 1, c.topk,           c.minp,
                            c.repeat,      c.frequency, c.presence, c.penalty_tokens, bias_tokens,
                            biases,        c.n_biases,  mask};
        double *shares = calloc(c.vocab_size, sizeof *shares);
        float *before = malloc(c.vocab_size * sizeof *before);
        SamplerMemory m;
        llamac_error e;
        if (!llamac_new_sampler_memory(&m, kernels[number % n_kernels], c.vocab_size)) exit(2);
        if (!llamac_check_sampler(&s, c.vocab_size, &e)) puts(e.text), exit(3);
        memcpy(before, logits, c.vocab_size * sizeof *before);
        if (!draws) find_shares(&m, &s, logits, tokens, c.n_tokens, shares);
        for (int i = 0; i < draws; i++) shares[draw(&m, &s, logits, tokens, c.n_tokens)]++;
        if (memcmp(before, logits, c.vocab_size * sizeof *before)) puts("logits changed"), exit(3);
        fwrite(shares, sizeof *shares, c.vocab_size, stdout);
        llamac_free_sampler_memory(&m);
        free(logits), free(tokens), free(bias_tokens), free(biases), free(mask);
        free(shares), free(before);
    }
}

// Prints the error of a sampler that must be refused.
static void refused(llamac_sequence *s, llamac_sampler sampler, size_t size) {
    llamac_error e;
    sampler.temperature = sampler.temperature == 0 ? 1 : sampler.temperature;
    int token = llamac_sample_sized(s, &sampler, size, &e);
    if (token != -1) printf("token %d instead of an error\n", token), exit(3);
    puts(e.text);
}

static void wrong(const char *path) {
    llamac_error e = {""};
    llamac_model *model = llamac_open(path, 0, &e);
    llamac_engine *engine = model ? llamac_start(model, NULL, &e) : NULL;
    llamac_sequence *s = engine ? llamac_sequence_new(engine, &e) : NULL;
    if (!s || !llamac_forward(s, (int[]){1, 5, 9}, 3, 0, &e)) puts(e.text), exit(3);
    int n = llamac_describe(model).vocab_size, *all = malloc(n * sizeof *all);
    float *banned = malloc(n * sizeof *banned);
    uint8_t *mask = calloc(n, 1);
    for (int i = 0; i < n; i++) all[i] = i, banned[i] = -INFINITY;
    const size_t size = sizeof(llamac_sampler);
    refused(s, (llamac_sampler){.temperature = NAN}, size);
    refused(s, (llamac_sampler){.temperature = -1}, size);
    refused(s, (llamac_sampler){.topp = -5}, size);
    refused(s, (llamac_sampler){.topp = NAN}, size);
    refused(s, (llamac_sampler){.topk = -1}, size);
    refused(s, (llamac_sampler){.minp = 1.5f}, size);
    refused(s, (llamac_sampler){.minp = NAN}, size);
    refused(s, (llamac_sampler){.repeat_penalty = -1}, size);
    refused(s, (llamac_sampler){.repeat_penalty = INFINITY}, size);
    refused(s, (llamac_sampler){.frequency_penalty = NAN}, size);
    refused(s, (llamac_sampler){.frequency_penalty = -INFINITY}, size);
    refused(s, (llamac_sampler){.presence_penalty = 101}, size);
    refused(s, (llamac_sampler){.penalty_tokens = -2}, size);
    refused(s, (llamac_sampler){.n_biases = -1}, size);
    refused(s, (llamac_sampler){.n_biases = 1}, size);
    refused(s, (llamac_sampler){.bias_tokens = &n, .biases = banned, .n_biases = 1}, size);
    refused(s, (llamac_sampler){.bias_tokens = (int[]){-1}, .biases = banned, .n_biases = 1}, size);
    refused(s, (llamac_sampler){.bias_tokens = all, .biases = (float[]){NAN}, .n_biases = 1}, size);
    refused(s, (llamac_sampler){.bias_tokens = all, .biases = (float[]){INFINITY}, .n_biases = 1},
            size);
    refused(s, (llamac_sampler){.bias_tokens = all, .biases = banned, .n_biases = n}, size);
    refused(s, (llamac_sampler){.allowed = mask}, size);
    refused(s, (llamac_sampler){.temperature = 1e-45f, .allowed = mask}, size); // greedy
    refused(s, (llamac_sampler){0}, size + 8);
    refused(s, (llamac_sampler){0}, 8);
    // the invalid calls have changed nothing: the one allowed token is sampled
    mask[7] = 1;
    float huge[] = {-3e38f};
    llamac_sampler one = {.temperature = INFINITY,
                          .topp = 0.5f,
                          .state = 3,
                          .topk = 2,
                          .allowed = mask,
                          .bias_tokens = &(int){7},
                          .biases = huge,
                          .n_biases = 1};
    for (int i = 0; i < 100; i++)
        if (llamac_sample(s, &one, &e) != 7) puts("not token 7"), exit(3);
    // Logits as far apart as floats can be, at all temperatures: their difference overflows
    float far[] = {3e38f, -3e38f};
    llamac_sampler extreme = {
        .state = 4, .bias_tokens = (int[]){7, 8}, .biases = far, .n_biases = 2};
    static const float temperatures[] = {0, 1e-45f, 1e-40f, 3e-39f,  1e-30f,
                                         1, 1e30f,  1e38f,  FLT_MAX, INFINITY};
    for (int i = 0; i < 4 * 10; i++) {
        extreme.temperature = temperatures[i / 4];
        extreme.topk = i % 2 ? 3 : 0, extreme.topp = i / 2 % 2 ? 0.5f : 0;
        for (int k = 0; k < 10; k++) {
            int token = llamac_sample(s, &extreme, &e);
            if (token < 0 || token >= n || token == 8) printf("token %d\n", token), exit(3);
        }
    }
    // A caller that knows only the first 16 bytes of the struct: the invalid fields after them are
    // ignored
    llamac_sampler plain = {.temperature = 1, .state = 5}, shorter = plain, noisy = plain;
    noisy.topk = -1, noisy.minp = NAN;
    for (int i = 0; i < 100; i++) {
        int next = llamac_sample(s, &plain, &e);
        if (llamac_sample_sized(s, &shorter, 16, &e) != next) puts("another token"), exit(3);
        if (llamac_sample_sized(s, &noisy, 16, &e) != next) puts("another token"), exit(3);
    }
    if (plain.state != shorter.state) puts("another state"), exit(3);
    free(all), free(banned), free(mask);
    llamac_sequence_free(s), llamac_stop(engine), llamac_close(model);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "shares")) run_cases(0);
    else if (argc == 3 && !strcmp(argv[1], "draws")) run_cases(atoi(argv[2]));
    else if (argc == 3 && !strcmp(argv[1], "wrong")) wrong(argv[2]);
    else return 1;
    return 0;
}

// How fast a model runs on this machine.
#include <sys/resource.h>
#include "model.h"

enum { RUNS = 5, SECONDS = 2, PROMPT = 128, WARM = 20 }; // WARM tokens, after which the CPU has its weights in order

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int n) {
    qsort(times, n, sizeof *times, compare_doubles);
    return times[n / 2];
}

static double peak_memory(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
#ifdef __APPLE__
    return used.ru_maxrss; // bytes there, KiB elsewhere
#else
    return 1024.0 * used.ru_maxrss;
#endif
}

// Decodes n tokens from an empty cache, the first behind `token`, the likeliest each time.
static bool decode(llamac_session *s, int token, int n, Error *e) {
    llamac_sampler greedy = {0};
    for (int pos = 0; pos < n; pos++) {
        TRY(llamac_forward(s, &token, 1, pos, e));
        TRY((token = llamac_sample(s, &greedy, e)) >= 0);
    }
    return true;
}

static bool measure(llamac_session *s, const llamac_model *m, double began, llamac_speed *speed, Error *e) {
    double prompt[RUNS], decoding[RUNS], reading[RUNS], share[RUNS];
    int runs = 0, tokens[PROMPT], bos = m->tokenizer.pieces ? m->tokenizer.bos : 0;
    const uint8_t *first;
    speed->bytes = llamac_weights_read(&m->weights, &first);
    for (int i = 0; i < speed->prompt; i++) tokens[i] = (int)((int64_t)i * m->weights.config.vocab_size / speed->prompt);
    TRY(decode(s, bos, 1, e));
    speed->first = llamac_seconds() - began;
    for (int i = 0; i < WARM; i++) TRY(llamac_forward(s, &bos, 1, 0, e));
    TRY(llamac_forward(s, tokens, speed->prompt, 0, e));
    for (double begin = llamac_seconds(); runs < RUNS && (runs == 0 || llamac_seconds() - begin < SECONDS); runs++) {
        double before = llamac_seconds();
        TRY(llamac_forward(s, tokens, speed->prompt, 0, e));
        double middle = llamac_seconds();
        TRY(decode(s, bos, speed->decoded, e));
        prompt[runs] = middle - before;
        decoding[runs] = llamac_seconds() - middle;
        reading[runs] = llamac_bandwidth(s, first, speed->bytes);
        share[runs] = reading[runs] > 0 ? speed->decoded / decoding[runs] * speed->bytes / reading[runs] : 0;
    }
    speed->peak = peak_memory();
    speed->prompt_speed = speed->prompt / median(prompt, runs), speed->decode_speed = speed->decoded / median(decoding, runs);
    speed->bandwidth = median(reading, runs), speed->share = median(share, runs);
    return true;
}

bool llamac_bench(const llamac_model *m, const llamac_options *options, int decoded, double began, llamac_speed *speed, Error *e) {
    CHECK(m, no_model);
    CHECK(speed, "the place for the result is NULL");
    CHECK(decoded >= 1, "%d tokens to decode, expected 1 or more", decoded);
    CHECK(began <= llamac_seconds(), "the time of the beginning is %g, expected CLOCK_MONOTONIC's of before", began);
    llamac_options o = options ? *options : (llamac_options){0};
    int context = o.positions ? o.positions : m->weights.config.seq_len;
    CHECK(context >= 1 && context <= m->weights.config.seq_len, "%d positions, but the model's context is %d", context,
          m->weights.config.seq_len);
    *speed = (llamac_speed){.prompt = m->weights.config.seq_len < PROMPT ? m->weights.config.seq_len : PROMPT,
                            .decoded = decoded < context ? decoded : context};
    o.positions = speed->prompt > speed->decoded ? speed->prompt : speed->decoded;
    o.logits = LLAMAC_SAMPLE_ONLY;
    llamac_session *s = llamac_start(m, &o, e);
    if (!s) return false;
    speed->n_threads = llamac_threads(s);
    bool ok = measure(s, m, began, speed, e);
    llamac_stop(s);
    return ok;
}

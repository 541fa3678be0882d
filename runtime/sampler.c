// The sampler. With only temperature, topp and state it is that of llama2.c, so a seed gives the
// same text.
#include "sampler.h"
#include <float.h>
#include <math.h>

enum {
    DEFAULT_PENALTY_TOKENS = 64, // for llamac_sampler.penalty_tokens = 0
    MAX_PENALTY = 100,           // bounds each of the three penalties
};

// Logit of a token that is left out: finite, because the kernels treat infinity as an error
static const float LEFT_OUT = -FLT_MAX;

bool llamac_new_sampler_memory(SamplerMemory *m, const Kernels *kernels, int vocab_size) {
    *m = (SamplerMemory){.kernels = kernels,
                         .vocab_size = vocab_size,
                         .p = resize(NULL, vocab_size, sizeof *m->p),
                         .candidates = resize(NULL, vocab_size, sizeof *m->candidates),
                         .counts = calloc(vocab_size, sizeof *m->counts)};
    return m->p && m->candidates && m->counts;
}

void llamac_free_sampler_memory(SamplerMemory *m) {
    free(m->p);
    free(m->candidates);
    free(m->counts);
}

// ----------------------------------------------------------------------------
// The fields of a sampler

static bool check_biases(const llamac_sampler *s, int vocab_size, Error *e) {
    CHECK(s->n_biases >= 0, "%d biases, expected 0 or more", s->n_biases);
    CHECK(!s->n_biases || (s->bias_tokens && s->biases),
          "%d biases, but bias_tokens or biases is NULL", s->n_biases);
    for (int i = 0; i < s->n_biases; i++) {
        int token = s->bias_tokens[i];
        float bias = s->biases[i];
        CHECK(token >= 0 && token < vocab_size,
              "the bias of token %d, which is outside the vocabulary of %d tokens", token,
              vocab_size);
        CHECK(isfinite(bias) || bias == -INFINITY,
              "the bias of token %d is %g, expected a number or -infinity", token, bias);
    }
    return true;
}

static bool check_penalties(const llamac_sampler *s, Error *e) {
    CHECK(s->repeat_penalty >= 0 && s->repeat_penalty <= MAX_PENALTY,
          "the repeat penalty is %g, expected 0 to %d", s->repeat_penalty, MAX_PENALTY);
    CHECK(fabsf(s->frequency_penalty) <= MAX_PENALTY,
          "the frequency penalty is %g, expected -%d to %d", s->frequency_penalty, MAX_PENALTY,
          MAX_PENALTY);
    CHECK(fabsf(s->presence_penalty) <= MAX_PENALTY,
          "the presence penalty is %g, expected -%d to %d", s->presence_penalty, MAX_PENALTY,
          MAX_PENALTY);
    CHECK(s->penalty_tokens >= -1,
          "penalty_tokens is %d, expected the number of last tokens, 0 (which means %d) or -1 for "
          "all",
          s->penalty_tokens, DEFAULT_PENALTY_TOKENS);
    return true;
}

bool llamac_check_sampler(const llamac_sampler *s, int vocab_size, Error *e) {
    CHECK(s->temperature >= 0, "the temperature is %g, expected 0 or more", s->temperature);
    CHECK(s->topp >= 0 && s->topp <= 1, "top-p is %g, expected 0 to 1", s->topp);
    CHECK(s->topk >= 0, "top-k is %d, expected 0 or more", s->topk);
    CHECK(s->minp >= 0 && s->minp <= 1, "min-p is %g, expected 0 to 1", s->minp);
    return check_penalties(s, e) && check_biases(s, vocab_size, e);
}

// A temperature whose reciprocal overflows is treated as 0.
bool llamac_is_greedy(const llamac_sampler *s) {
    return s->temperature == 0 || isinf(1 / s->temperature);
}

// The penalties 0 (the default) and 1 both leave the logits as they are.
static bool has_repeat_penalty(const llamac_sampler *s) {
    return s->repeat_penalty != 0 && s->repeat_penalty != 1;
}

static bool has_penalties(const llamac_sampler *s) {
    return has_repeat_penalty(s) || s->frequency_penalty != 0 || s->presence_penalty != 0;
}

static bool changes_logits(const llamac_sampler *s) {
    return has_penalties(s) || s->n_biases || s->allowed;
}

// Returns whether the sampler uses only temperature, topp and state. For such a sampler, a GPU
// samples without copying the logits to the CPU.
bool llamac_is_plain(const llamac_sampler *s) {
    return !changes_logits(s) && !s->topk && s->minp == 0;
}

// 24 bits of xorshift* (Marsaglia 2003, Vigna 2014). State 0 would stay 0, so it is replaced.
float llamac_random(llamac_sampler *s) {
    if (!s->state) s->state = 0x9e3779b97f4a7c15;
    s->state ^= s->state >> 12;
    s->state ^= s->state << 25;
    s->state ^= s->state >> 27;
    return (float)((uint32_t)((s->state * 0x2545F4914F6CDD1Dull) >> 32) >> 8) / 16777216.0f;
}

// ----------------------------------------------------------------------------
// Biases, penalties and the mask

// Penalises, once, the logit of each token that occurs among the last ones of the text. tokens:
// (n,). The counts are 0 before and after.
static void penalize(const SamplerMemory *m, const llamac_sampler *s, const int *tokens, int n,
                     float *logits) {
    int last = s->penalty_tokens ? s->penalty_tokens : DEFAULT_PENALTY_TOKENS;
    int first = last > 0 && last < n ? n - last : 0; // -1: all
    for (int i = first; i < n; i++) m->counts[tokens[i]]++;
    for (int i = first; i < n; i++) {
        int count = m->counts[tokens[i]];
        float *logit = &logits[tokens[i]];
        if (!count) continue; // this token was penalised at an earlier place
        if (has_repeat_penalty(s)) {
            if (*logit > 0) *logit /= s->repeat_penalty;
            else *logit *= s->repeat_penalty;
        }
        *logit -= (float)count * s->frequency_penalty + s->presence_penalty;
        m->counts[tokens[i]] = 0;
    }
}

// Sets x to `value` for each token that the mask or a bias of -infinity leaves out. Returns whether
// there is such a token.
static bool leave_out(const SamplerMemory *m, const llamac_sampler *s, float *x, float value) {
    bool any = false;
    for (int i = 0; i < s->n_biases; i++)
        if (isinf(s->biases[i])) x[s->bias_tokens[i]] = value, any = true;
    for (int i = 0; s->allowed && i < m->vocab_size; i++)
        if (!s->allowed[i]) x[i] = value, any = true;
    return any;
}

static void change_logits(const SamplerMemory *m, const llamac_sampler *s, const int *tokens, int n,
                          float *logits) {
    for (int i = 0; i < s->n_biases; i++)
        if (isfinite(s->biases[i])) logits[s->bias_tokens[i]] += s->biases[i];
    if (has_penalties(s)) penalize(m, s, tokens, n, logits);
    // Last, because a penalty could move LEFT_OUT to infinity
    leave_out(m, s, logits, LEFT_OUT);
}

// ----------------------------------------------------------------------------
// Sampling

// Returns the index of the largest number, the first of equals; -1 if any is NaN or infinite. The
// first pass finds the part that contains it, so the second searches only that part.
static int argmax(const Kernels *k, const float *x, int n) {
    enum { PART = 1024 };
    float max = -INFINITY;
    int best = 0;
    for (int i = 0; i < n; i += PART) {
        float largest = k->largest(x + i, n - i < PART ? n - i : PART);
        if (isnan(largest)) return -1; // the part contains NaN or infinity
        if (largest > max) max = largest, best = i;
    }
    while (x[best] != max) best++;
    return best;
}

static bool likelier(const Candidate *a, const Candidate *b) {
    return a->p > b->p || (a->p == b->p && a->token < b->token);
}

static bool less_likely(const Candidate *a, const Candidate *b) { return likelier(b, a); }

// Restores a heap after candidate i has changed: moves it down until none of its children belongs
// above it. above(a, b): whether a belongs nearer to the root than b.
static inline void sink(Candidate *c, int n, int i,
                        bool (*above)(const Candidate *, const Candidate *)) {
    Candidate moved = c[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && above(&c[child + 1], &c[child])) child++;
        if (!above(&c[child], &moved)) break;
        c[i] = c[child];
    }
    c[i] = moved;
}

// Moves the k most likely of n candidates to the front. These k are a heap with the least likely at
// its root; each later candidate that is likelier than the root replaces it.
static void keep_likeliest(Candidate *c, int n, int k) {
    for (int i = k / 2 - 1; i >= 0; i--) sink(c, k, i, less_likely);
    for (int i = k; i < n; i++) {
        if (!likelier(&c[i], &c[0])) continue;
        c[0] = c[i];
        sink(c, k, 0, less_likely);
    }
}

// Writes to m->candidates the tokens whose probability is positive and at least `least`. Returns
// their number.
static int find_candidates(const SamplerMemory *m, float least) {
    int n = 0;
    for (int i = 0; i < m->vocab_size; i++)
        if (m->p[i] >= least && m->p[i] > 0) m->candidates[n++] = (Candidate){m->p[i], i};
    return n;
}

static float total_of(const Candidate *c, int n) {
    float total = 0;
    for (int i = 0; i < n; i++) total += c[i].p;
    return total;
}

// Samples from the smallest set of candidates whose probability exceeds `share` (Holtzman 2019).
static int sample_topp(Candidate *c, int n, float share, float coin) {
    // As in heapsort, c[0..left-1] is a heap; c[left..n-1] are the candidates taken from it, the
    // most likely last
    for (int i = n / 2 - 1; i >= 0; i--) sink(c, n, i, likelier);
    int left = n;
    float total = 0, cdf = 0;
    do {
        Candidate likeliest = c[0];
        c[0] = c[--left];
        sink(c, left, 0, likelier);
        c[left] = likeliest;
        total += likeliest.p;
    } while (left > 0 && total <= share);
    for (int i = n - 1; i > left; i--) {
        cdf += c[i].p;
        if (coin * total < cdf) return c[i].token;
    }
    return c[left].token;
}

// Samples from the probabilities m->p with topp alone. topp 0 and 1 both sample from all tokens.
static int sample_unfiltered(const SamplerMemory *m, float topp, float coin) {
    int n = m->vocab_size;
    if (topp > 0 && topp < 1) {
        // Sorting fewer candidates is faster. If some token reaches this cutoff, at most n - 1 do
        // not. The total of those is below (n - 1) * cutoff = 1 - topp, so that of the candidates
        // exceeds topp
        float cutoff = (1.0f - topp) / (n - 1);
        int left = find_candidates(m, cutoff);
        // If topp < 1 / n, maybe no token reaches it: the most likely token alone exceeds topp
        return left ? sample_topp(m->candidates, left, topp, coin) : argmax(m->kernels, m->p, n);
    }
    float cdf = 0;
    for (int i = 0; i < n; i++) {
        cdf += m->p[i];
        if (coin < cdf) return i;
    }
    return n - 1;
}

// Samples from the probabilities m->p, some of which may be 0 and the largest of which is p[best],
// with minp, topk and topp. Each of these filters applies to the tokens that the one before it has
// left.
static int sample_filtered(const SamplerMemory *m, const llamac_sampler *s, int best, float coin) {
    Candidate *c = m->candidates;
    int n = find_candidates(m, s->minp * m->p[best]); // includes `best`
    if (s->topk && s->topk < n) {
        keep_likeliest(c, n, s->topk);
        n = s->topk;
    }
    float total = total_of(c, n), cdf = 0;
    if (s->topp > 0 && s->topp < 1) return sample_topp(c, n, s->topp * total, coin);
    for (int i = 0; i < n; i++) {
        cdf += c[i].p;
        if (coin * total < cdf) return c[i].token;
    }
    return c[n - 1].token;
}

int llamac_draw(const SamplerMemory *m, llamac_sampler *s, const float *logits, const int *tokens,
                int n, Error *e) {
    int vocab_size = m->vocab_size, best = argmax(m->kernels, logits, vocab_size);
    float *p = m->p;
    bool changed = changes_logits(s), filtered = s->topk || s->minp > 0;
    if (best < 0) return fail(e, not_finite), -1;
    if (llamac_is_greedy(s) && !changed) return best;
    memcpy(p, logits, vocab_size * sizeof *p);
    if (changed) {
        change_logits(m, s, tokens, n, p);
        best = argmax(m->kernels, p, vocab_size);
        if (best < 0) return fail(e, "a logit with its bias and penalties exceeds a float"), -1;
        if (p[best] == LEFT_OUT)
            return fail(e, "no token is left to sample: the mask and the biases leave out all %d",
                        vocab_size),
                   -1;
    }
    if (llamac_is_greedy(s)) return best;
    // p = exp((p - max) * scale). For LEFT_OUT, p - max can overflow to -infinity, which gives NaN
    // if scale is 0. So scale is kept above 0, even if the temperature is infinite
    float scale = fmaxf(1 / s->temperature, FLT_MIN);
    float sum = m->kernels->exponentials(p, p[best], scale, vocab_size);
    for (int i = 0; i < vocab_size; i++) p[i] /= sum;
    // The kernels compute small numbers instead of 0 for the tokens that are left out. These
    // numbers are a part of `sum`, but sample_filtered divides by the total of its candidates
    if (changed) filtered |= leave_out(m, s, p, 0);
    float coin = llamac_random(s);
    return filtered ? sample_filtered(m, s, best, coin) : sample_unfiltered(m, s->topp, coin);
}

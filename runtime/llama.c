// Sessions: the forward pass over a backend, and the sampler.
#include <math.h>
#include "cpu/kernels.h"
#include "model.h"

typedef struct {
    float p;
    int token;
} Candidate;

struct llamac_session {
    // A copy of llamac_model.transformer and of its array of layers, because the backend may change
    // the pointers to weights
    Model model;
    Backend *backend;
    const Kernels *kernels; // of the CPU, for logits in host memory
    int chunk;              // max tokens in one pass through the backend
    int positions;          // max tokens in the KV cache
    int n_threads;
    bool all_logits;      // keep the logits of all tokens
    bool logits_visible;  // the caller may read the logits, not only the sampler
    float *x;             // (chunk, dim) residual stream, in the backend's memory
    float *attention_out; // (chunk, q_dim) output of attention, likewise
    // (1 or chunk, vocab_size) in host memory; NULL: the logits stay in the backend's memory, and
    // its `choose` samples from them
    float *logits;
    int rows;              // rows of logits after the last llamac_forward; 0 before the first
    int filled;            // positions that have keys and values: max pos + n of all calls
    float *probabilities;  // (vocab_size,) for the sampler
    Candidate *candidates; // (vocab_size,) for the sampler
    Error note;            // for llamac_note
};

static const char no_session[] = "the session is NULL";
static const char outside_vocabulary[] = "token %d is outside the vocabulary of %d tokens";

// ----------------------------------------------------------------------------
// The transformer

// Runs the model on T tokens at positions pos..pos+T-1, with the ops of backend.h.
static void compute(const llamac_session *s, const int *tokens, int T, int pos) {
    const Model *m = &s->model;
    const Weights *w = &m->weights;
    Backend *b = s->backend;

    b->embed(b, s->x, &w->token_embedding, tokens, T);
    for (int l = 0; l < m->config.n_layers; l++) {
        const Layer *layer = &w->layers[l];

        b->attention(b, l, layer, s->attention_out, s->x, pos, T);
        b->add_product(b, s->x, &layer->wo, s->attention_out, T);
        b->feed_forward(b, layer, s->x, T);
    }
    int rows = s->all_logits ? T : 1;
    const float *last_rows = s->x + (size_t)(T - rows) * m->config.dim;
    b->logits(b, s->logits, &w->norm, &w->output, last_rows, rows);
}

static void forward(llamac_session *s, const int *tokens, int T, int pos) {
    Backend *b = s->backend;
    // If begin returns false, the backend computes the tokens itself, and the ops are not called
    if (!b->begin || b->begin(b, tokens, T, pos, s->all_logits)) compute(s, tokens, T, pos);
    if (b->end) b->end(b);
    s->rows = s->all_logits ? T : 1;
}

bool llamac_forward(llamac_session *s, const int *tokens, int n, int pos, Error *e) {
    CHECK(s, no_session);
    int vocab_size = s->model.config.vocab_size;
    CHECK(n >= 1 && pos >= 0 && n <= s->positions - pos,
          "%d tokens at position %d, but there is room for %d", n, pos, s->positions);
    CHECK(pos <= s->filled,
          "tokens at position %d, but only %d positions are filled; expected position 0 to %d", pos,
          s->filled, s->filled);
    CHECK(tokens, "%d tokens at NULL, expected an array", n);
    CHECK(!s->all_logits || n <= s->chunk,
          "%d tokens, but one call leaves the logits of %d at most", n, s->chunk);
    for (int i = 0; i < n; i++)
        CHECK(tokens[i] >= 0 && tokens[i] < vocab_size, outside_vocabulary, tokens[i], vocab_size);
    int end = pos + n;
    for (int T = s->chunk; n > T; tokens += T, pos += T, n -= T) forward(s, tokens, T, pos);
    forward(s, tokens, n, pos);
    if (end > s->filled) s->filled = end;
    return true;
}

const float *llamac_logits(const llamac_session *s) {
    return s && s->logits_visible && s->rows ? s->logits : NULL;
}

// ----------------------------------------------------------------------------
// Sessions

#ifdef CUDA
enum { HAS_CUDA = 1 };
#else
enum { HAS_CUDA = 0 };

// The linker needs this in a build without CUDA, which never calls it
const char *llamac_cuda_open(Backend **b, Model *m, int positions, Error *e) {
    (void)b, (void)m, (void)positions, (void)e;
    return "no GPU";
}
#endif

// Opens the backend and allocates the activations. On failure, closes the backend, which restores
// s->model, and sets s->backend to NULL, so another backend can be tried.
static bool open_backend(llamac_session *s, bool gpu, llamac_logits_kept kept, Error *e) {
    Model *m = &s->model;
    Error text; // holds the message that llamac_cuda_open returns, unless that is a constant
    CHECK(!gpu || !m->kv_bits, "the KV cache of a GPU has 32 bits for float32 weights, else 16, "
                               "and cannot be changed; leave --kv out");
    const char *wrong = gpu ? llamac_cuda_open(&s->backend, m, s->positions, &text)
                            : llamac_cpu_open(&s->backend, m, s->positions, s->n_threads);
    CHECK(!wrong, "%s", wrong);
    Backend *b = s->backend;
    size_t T = s->chunk = s->positions < b->chunk ? s->positions : b->chunk;
    bool on_host = kept != LLAMAC_SAMPLE_ONLY || !b->choose; // logits are copied to host memory
    s->x = b->alloc(b, T * m->config.dim);
    s->attention_out = b->alloc(b, T * m->config.q_dim);
    if (on_host)
        s->logits = resize(NULL, (s->all_logits ? T : 1) * m->config.vocab_size, sizeof(float));
    bool ok = s->x && s->attention_out && (s->logits || !on_host);
    if (!ok) {
        b->close(b);
        free(s->logits);
        s->backend = NULL;
        s->logits = NULL;
    }
    CHECK(ok, "not enough memory for the activations");
    return true;
}

enum { MAX_THREADS = 1024 };

static bool open_session(llamac_session *s, const llamac_options *o, Error *e) {
    const Config *c = &s->model.config;
    const char *device = o->device ? o->device : HAS_CUDA ? "cuda" : "cpu";
    bool cpu = !strcmp(device, "cpu"), automatic = !strcmp(device, "auto");
    CHECK(cpu || automatic || !strcmp(device, "cuda"),
          "'%.40s' is no device, expected cpu, cuda or auto", device);
    CHECK(cpu || automatic || HAS_CUDA,
          "this program computes on the CPU; make runcuda builds the one for GPUs");
    CHECK(o->positions >= 0 && o->positions <= c->seq_len,
          "%d positions, but the model's context is %d", o->positions, c->seq_len);
    CHECK(o->n_threads >= 0 && o->n_threads <= MAX_THREADS,
          "%d threads, expected 1 to %d, or 0 for one per core", o->n_threads, MAX_THREADS);
    CHECK(o->logits == LLAMAC_SAMPLE_ONLY || o->logits == LLAMAC_LAST_LOGITS
              || o->logits == LLAMAC_ALL_LOGITS,
          "logits is %d, expected LLAMAC_SAMPLE_ONLY, LLAMAC_LAST_LOGITS or LLAMAC_ALL_LOGITS",
          (int)o->logits);
    int kv = o->kv_bits;
    CHECK(!kv || kv == 32 || kv == 16 || kv == 8, "a KV cache of %d bits, expected 32, 16 or 8",
          kv);
    s->positions = o->positions ? o->positions : c->seq_len;
    s->n_threads = o->n_threads > 0 ? o->n_threads : llamac_default_threads();
    s->all_logits = o->logits == LLAMAC_ALL_LOGITS;
    s->logits_visible = o->logits != LLAMAC_SAMPLE_ONLY;
    const Kernels *kernels = llamac_choose_kernels();
    s->kernels = kernels ? kernels : &llamac_reference;
    s->candidates = resize(NULL, c->vocab_size, sizeof(Candidate));
    s->probabilities = resize(NULL, c->vocab_size, sizeof(float));
    CHECK(s->candidates && s->probabilities, no_memory);
    if (!cpu && HAS_CUDA) {
        Error gpu_error;
        if (open_backend(s, true, o->logits, &gpu_error)) return true;
        CHECK(automatic, "%s", gpu_error.text);
        // fail only writes the note: the session begins, on the CPU
        fail(&s->note, "on the CPU, for the GPU cannot be used: %s", gpu_error.text);
    }
    return open_backend(s, false, o->logits, e);
}

double llamac_bandwidth(const llamac_session *s) {
    const uint8_t *first;
    if (!s) return 0;
    // n: bytes of weights that one token reads; first: their lowest address
    uint64_t n = llamac_weight_bytes(&s->model, &first);
    return s->backend->bandwidth(s->backend, first, n);
}

int llamac_threads(const llamac_session *s) { return s ? s->n_threads : 0; }

llamac_session *llamac_start(const llamac_model *model, const llamac_options *options, Error *e) {
    if (!model) return fail(e, no_model), NULL;
    const Model *m = &model->transformer;
    llamac_session *s = calloc(1, sizeof *s);
    Layer *layers = resize(NULL, m->config.n_layers, sizeof *layers);
    if (!s || !layers) return free(s), free(layers), fail(e, no_memory), NULL;
    memcpy(layers, m->weights.layers, m->config.n_layers * sizeof *layers);
    s->model = *m;
    s->model.weights.layers = layers;
    s->model.no_copy = options && options->no_copy;
    s->model.kv_bits = options ? options->kv_bits : 0;
    if (open_session(s, options ? options : &(llamac_options){0}, e)) return s;
    return llamac_stop(s), NULL;
}

void llamac_stop(llamac_session *s) {
    if (!s) return;
    if (s->backend) s->backend->close(s->backend);
    free(s->logits);
    free(s->candidates);
    free(s->probabilities);
    free(s->model.weights.layers);
    free(s);
}

const char *llamac_note(const llamac_session *s) { return s ? s->note.text : ""; }

int llamac_chunk(const llamac_session *s) { return s ? s->chunk : 0; }

int llamac_positions(const llamac_session *s) { return s ? s->positions : 0; }

// ----------------------------------------------------------------------------
// The sampler: llama2.c's, so a seed gives the same text

// Returns a uniform number in [0, 1), 24 bits (xorshift*: Marsaglia 2003, Vigna 2014). State 0
// would stay 0, so it is replaced.
static float random_float(llamac_sampler *s) {
    if (!s->state) s->state = 0x9e3779b97f4a7c15;
    s->state ^= s->state >> 12;
    s->state ^= s->state << 25;
    s->state ^= s->state >> 27;
    return (float)((uint32_t)((s->state * 0x2545F4914F6CDD1Dull) >> 32) >> 8) / 16777216.0f;
}

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

// Restores a heap, whose root is the most likely candidate, after candidate i has changed: moves it
// down until no child is likelier.
static void sink(Candidate *c, int n, int i) {
    Candidate moved = c[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && likelier(&c[child + 1], &c[child])) child++;
        if (!likelier(&c[child], &moved)) break;
        c[i] = c[child];
    }
    c[i] = moved;
}

// Samples from the smallest set of tokens whose total probability exceeds topp (Holtzman 2019).
static int sample_topp(const llamac_session *s, const float *p, float topp, float coin) {
    int n = 0, vocab_size = s->model.config.vocab_size;
    // The set needs no token below the cutoff. Unless all tokens are below it, at most
    // vocab_size - 1 are; their total is less than 1 - topp, so that of the others exceeds topp
    const float cutoff = (1.0f - topp) / (vocab_size - 1);
    for (int i = 0; i < vocab_size; i++)
        if (p[i] >= cutoff) s->candidates[n++] = (Candidate){p[i], i};
    // If topp < 1 / vocab_size, all may be below: the set is then the most likely token
    if (n == 0) return argmax(s->kernels, p, vocab_size);
    // As in heapsort, c[0..left-1] is a heap; c[left..n-1] are the candidates taken from it, the
    // most likely last
    Candidate *c = s->candidates;
    for (int i = n / 2 - 1; i >= 0; i--) sink(c, n, i);
    int left = n;
    float total = 0, cdf = 0;
    do {
        Candidate likeliest = c[0];
        c[0] = c[--left];
        sink(c, left, 0);
        c[left] = likeliest;
        total += likeliest.p;
    } while (left > 0 && total <= topp);
    for (int i = n - 1; i > left; i--) {
        cdf += c[i].p;
        if (coin * total < cdf) return c[i].token;
    }
    return c[left].token;
}

static const char not_finite[] = "the logits are not finite; the weights of the model are broken";

// The reciprocal of a subnormal temperature can be infinite
static bool is_greedy(const llamac_sampler *s) {
    return s->temperature == 0 || isinf(1 / s->temperature);
}

// Samples from logits (vocab_size,) in host memory.
static int sample(const llamac_session *s, llamac_sampler *sampler, const float *logits) {
    int n = s->model.config.vocab_size, best = argmax(s->kernels, logits, n);
    if (best < 0 || is_greedy(sampler)) return best;
    float *p = s->probabilities, cdf = 0;
    memcpy(p, logits, n * sizeof *p);
    // p = exp((p - max) / temperature)
    float sum = s->kernels->exponentials(p, logits[best], 1 / sampler->temperature, n);
    for (int i = 0; i < n; i++) p[i] /= sum;
    float coin = random_float(sampler);
    // topp 0 and 1 both sample from all tokens
    if (sampler->topp > 0 && sampler->topp < 1) return sample_topp(s, p, sampler->topp, coin);
    for (int i = 0; i < n; i++) {
        cdf += p[i];
        if (coin < cdf) return i;
    }
    return n - 1;
}

int llamac_sample(llamac_session *s, llamac_sampler *sampler, Error *e) {
    if (!s || !sampler) return fail(e, s ? "the sampler is NULL" : no_session), -1;
    Backend *b = s->backend;
    int next;
    if (!s->rows) return fail(e, "nothing has gone through llamac_forward"), -1;
    if (!(sampler->temperature >= 0))
        return fail(e, "the temperature is %g, expected 0 or more", sampler->temperature), -1;
    if (!(sampler->topp >= 0 && sampler->topp <= 1))
        return fail(e, "top-p is %g, expected 0 to 1", sampler->topp), -1;
    if (s->logits)
        next = sample(s, sampler, s->logits + (size_t)(s->rows - 1) * s->model.config.vocab_size);
    else if (is_greedy(sampler)) next = b->choose(b, 0, 0, 0);
    else next = b->choose(b, sampler->temperature, sampler->topp, random_float(sampler));
    if (next < 0) fail(e, not_finite);
    return next;
}

bool llamac_nll(llamac_session *s, int row, int token, double *nll, Error *e) {
    CHECK(s, no_session);
    CHECK(nll, "the place for the result is NULL");
    int n = s->model.config.vocab_size;
    CHECK(s->logits_visible && row >= 0 && row < s->rows,
          "there is no row %d of logits: the last call left %d", row,
          s->logits_visible ? s->rows : 0);
    CHECK(token >= 0 && token < n, outside_vocabulary, token, n);
    const float *logits = s->logits + (size_t)row * n;
    // log(sum of exp(logits)) - logits[token], shifted by the largest so that exp cannot overflow
    float largest = s->kernels->largest(logits, n);
    CHECK(!isnan(largest), not_finite);
    memcpy(s->probabilities, logits, n * sizeof *logits);
    *nll = log(s->kernels->exponentials(s->probabilities, largest, 1, n)) + largest - logits[token];
    return true;
}

// Engines, sequences, and the forward pass over a backend.
#include <math.h>
#include "cpu/kernels.h"
#include "model.h"
#include "sampler.h"
#include "state.h"

// A token of the last call.
typedef struct {
    const llamac_sequence *sequence; // NULL: it has been freed
    int row;                         // row of its logits, or -1
    int end;                         // tokens of the sequence up to and including this one
} EvaluatedToken;

struct llamac_engine {
    // A copy of llamac_model.transformer and of its array of layers, because the backend may change
    // the pointers to weights
    Model model;
    const Model *source; // the original, llamac_model.transformer: its weights are in host memory
    Backend *backend;
    const Kernels *kernels; // CPU kernels, with which the sampler reads logits in host memory
    int chunk;              // max tokens in one pass through the backend
    int positions;          // max tokens of a sequence
    int n_threads;
    bool (*abort)(void *data); // llamac_options.abort
    void *data;
    bool sample_only;     // llamac_options.sample_only
    float *x;             // (chunk, dim) residual stream, in the backend's memory
    float *attention_out; // (chunk, q_dim) output of attention, likewise
    float *logits;        // (capacity, vocab_size) logits of the last call
    int capacity;         // rows of `logits`
    bool on_host;         // the last call wrote to `logits`; else its logits stayed in the backend,
                          // which samples from them with `choose`
    int *tokens, *wanted; // (chunk,) of the current pass, see Batch
    Run *runs;            // (chunk,) likewise
    EvaluatedToken *last; // (n,) tokens of the last call
    int n;                // number of them; 0 after a failure
    uint64_t calls;       // number of calls that evaluated tokens, failed ones included
    SamplerMemory sampler;
    Error note; // for llamac_note
};

struct llamac_sequence {
    llamac_engine *engine;
    Cache *cache;
    int *tokens;   // (capacity,)
    int length;    // number of tokens, whose keys and values are in the cache
    int capacity;  // of tokens
    uint64_t call; // number of the engine's latest call that evaluated its tokens; 0: none
    int row;       // in that call: row of the logits of its latest token with logits, or -1
    int row_end;   // tokens of the sequence up to and including that token
};

static const char no_engine[] = "the engine is NULL", no_sequence[] = "the sequence is NULL";
static const char no_logits[] =
    "there are no logits of token %d of the last call, which evaluated %d tokens";
static const char outside_vocabulary[] = "token %d is outside the vocabulary of %d tokens";

// ----------------------------------------------------------------------------
// The transformer

// Runs the model on a batch, with the ops of backend.h.
static void compute(const llamac_engine *engine, const Batch *batch) {
    const Model *m = &engine->model;
    const Weights *w = &m->weights;
    Backend *b = engine->backend;
    int T = batch->T;

    b->embed(b, engine->x, &w->token_embedding, batch->tokens, T);
    for (int l = 0; l < m->config.n_layers; l++) {
        const Layer *layer = &w->layers[l];

        b->attention(b, batch, l, layer, engine->attention_out, engine->x);
        b->add_product(b, engine->x, &layer->wo, engine->attention_out, T);
        b->feed_forward(b, layer, engine->x, T);
    }
    int n = batch->n_wanted;
    if (n == 0) return;
    if (n < T) b->gather(b, engine->x, batch->wanted, n);
    if (batch->hidden_states) b->hidden_states(b, batch->hidden_states, &w->norm, engine->x, n);
    else b->logits(b, batch->logits, &w->norm, &w->output, engine->x, n);
}

// Runs the model on a batch: op by op, or as a whole if the backend computes it in its own way.
static void forward(llamac_engine *engine, const Batch *batch) {
    Backend *b = engine->backend;
    // If begin returns false, the backend computes the batch itself, and the ops are not called
    if (!b->begin || b->begin(b, batch)) compute(engine, batch);
    if (b->end) b->end(b);
}

// ----------------------------------------------------------------------------
// Sequences

llamac_sequence *llamac_sequence_new(llamac_engine *engine, Error *e) {
    clear(e);
    if (!engine) return fail(e, no_engine), NULL;
    llamac_sequence *s = calloc(1, sizeof *s);
    Cache *cache = s ? engine->backend->new_cache(engine->backend) : NULL;
    if (!cache) return free(s), fail(e, no_memory), NULL;
    s->engine = engine, s->cache = cache;
    return s;
}

void llamac_sequence_free(llamac_sequence *s) {
    if (!s) return;
    llamac_engine *engine = s->engine;
    for (int i = 0; s->call == engine->calls && i < engine->n; i++)
        if (engine->last[i].sequence == s) engine->last[i].sequence = NULL;
    engine->backend->free_cache(engine->backend, s->cache);
    free(s->tokens);
    free(s);
}

// Makes room for n tokens in s->tokens.
static bool make_token_room(llamac_sequence *s, int n, Error *e) {
    if (n <= s->capacity) return true;
    int capacity = n < 2 * s->capacity ? 2 * s->capacity : n;
    int *tokens = resize(s->tokens, capacity, sizeof *tokens);
    CHECK(tokens, no_memory);
    s->tokens = tokens, s->capacity = capacity;
    return true;
}

llamac_sequence *llamac_sequence_copy(const llamac_sequence *s, int n, Error *e) {
    clear(e);
    if (!s) return fail(e, no_sequence), NULL;
    if (n < 0 || n > s->length)
        return fail(e, "%d tokens, but the sequence has %d", n, s->length), NULL;
    llamac_sequence *copy = llamac_sequence_new(s->engine, e);
    Backend *b = s->engine->backend;
    if (!copy) return NULL;
    bool ok = make_token_room(copy, n, e);
    if (ok && !b->share(b, copy->cache, s->cache, n)) ok = fail(e, no_memory);
    if (!ok) return llamac_sequence_free(copy), NULL;
    if (n) memcpy(copy->tokens, s->tokens, n * sizeof *copy->tokens);
    copy->length = n;
    return copy;
}

// Drops the tokens from n on. Returns false if there is not enough memory: a page of the cache that
// is shared with another sequence is copied before it is changed.
static bool drop_tokens(llamac_sequence *s, int n) {
    Backend *b = s->engine->backend;
    if (s->length > n) s->length = n;
    return b->reserve(b, s->cache, s->length, 0);
}

bool llamac_sequence_truncate(llamac_sequence *s, int n, Error *e) {
    clear(e);
    CHECK(s, no_sequence);
    CHECK(n >= 0 && n <= s->length, "%d tokens, but the sequence has %d", n, s->length);
    CHECK(drop_tokens(s, n), no_memory);
    return true;
}

int llamac_sequence_length(const llamac_sequence *s) { return s ? s->length : 0; }

const int *llamac_sequence_tokens(const llamac_sequence *s) { return s ? s->tokens : NULL; }

// ----------------------------------------------------------------------------
// Saved sequences

static StateOwner owner_of(const llamac_engine *engine) {
    return (StateOwner){engine->source, engine->backend, engine->positions};
}

bool llamac_sequence_save(const llamac_sequence *s, const char *path, Error *e) {
    clear(e);
    CHECK(s, no_sequence);
    StateOwner owner = owner_of(s->engine);
    bool ok = llamac_write_state(path, &owner, s->cache, s->tokens, s->length, e);
    if (!ok) llamac_name_file(path ? path : "", e);
    return ok;
}

// Begins a sequence with the tokens, keys and values that are stored in the bytes of a file.
static llamac_sequence *restore(llamac_engine *engine, const uint8_t *bytes, size_t size,
                                Error *e) {
    StateOwner owner = owner_of(engine);
    Backend *b = engine->backend;
    SavedState saved;
    if (!llamac_check_state(bytes, size, &owner, &saved, e)) return NULL;
    llamac_sequence *s = llamac_sequence_new(engine, e);
    if (!s) return NULL;
    bool ok = make_token_room(s, saved.n, e);
    if (ok && !b->reserve(b, s->cache, 0, saved.n)) ok = fail(e, no_memory);
    if (ok) llamac_restore_cache(&saved, &owner, s->cache);
    const char *failure = ok && b->failure ? b->failure(b) : NULL;
    if (failure) ok = fail(e, "%s", failure);
    if (!ok) return llamac_sequence_free(s), NULL;
    if (saved.n) memcpy(s->tokens, saved.tokens, saved.n * sizeof *s->tokens);
    s->length = saved.n;
    return s;
}

llamac_sequence *llamac_sequence_load(llamac_engine *engine, const char *path, Error *e) {
    size_t size;
    clear(e);
    if (!engine) return fail(e, no_engine), NULL;
    uint8_t *bytes = llamac_read_state(path, &size, e);
    llamac_sequence *s = bytes ? restore(engine, bytes, size, e) : NULL;
    free(bytes);
    if (!s) llamac_name_file(path ? path : "", e);
    return s;
}

// ----------------------------------------------------------------------------
// Evaluating tokens

// Checks a batch as far as that is possible before anything is changed.
static bool check_batch(const llamac_engine *engine, const llamac_batch_token *batch, int n,
                        size_t size, Error *e) {
    CHECK(n >= 1, "a batch of %d tokens, expected 1 or more", n);
    CHECK(batch, "the array of %d tokens is NULL", n);
    CHECK(size == sizeof *batch, "llamac_batch_token has %zu bytes, expected %zu", size,
          sizeof *batch);
    int vocab_size = engine->model.config.vocab_size;
    for (int i = 0; i < n; i++) {
        const llamac_batch_token *t = &batch[i];
        CHECK(t->sequence, no_sequence);
        CHECK(t->sequence->engine == engine, "the sequence of token %d belongs to another engine",
              i);
        CHECK(t->token >= 0 && t->token < vocab_size, outside_vocabulary, t->token, vocab_size);
        CHECK(t->position >= 0 && t->position < engine->positions,
              "a token at position %d, but the context has room for %d", t->position,
              engine->positions);
    }
    return true;
}

// Appends the tokens of the batch to their sequences, and drops the tokens that they replace.
static bool append_tokens(llamac_engine *engine, const llamac_batch_token *batch, int n, Error *e) {
    for (int i = 0; i < n; i++) {
        llamac_sequence *s = batch[i].sequence;
        int pos = batch[i].position;
        bool first = s->call != engine->calls; // this is the sequence's first token in the batch
        CHECK(pos <= s->length && (first || pos == s->length),
              "a token at position %d, but the sequence has %d tokens; expected position %d%s", pos,
              s->length, s->length, first ? " or an earlier one" : "");
        CHECK(!first || drop_tokens(s, pos), no_memory);
        s->call = engine->calls, s->row = -1;
        CHECK(make_token_room(s, pos + 1, e), no_memory);
        s->tokens[pos] = batch[i].token;
        s->length = pos + 1;
    }
    return true;
}

// Decides where the logits of n tokens are stored (engine->on_host), and makes room for them if
// that is host memory.
static bool make_rows(llamac_engine *engine, int n, Error *e) {
    engine->on_host = !(engine->sample_only && engine->backend->choose && n <= 1);
    if (!engine->on_host || n <= engine->capacity) return true;
    float *logits =
        resize(engine->logits, (size_t)n * engine->model.config.vocab_size, sizeof *logits);
    CHECK(logits, "not enough memory for the logits of %d tokens", n);
    engine->logits = logits, engine->capacity = n;
    return true;
}

// Returns the next pass: as many of the n tokens as the backend can evaluate in one pass. Their
// logits are written to the rows of engine->logits from `row` on.
static Batch next_pass(llamac_engine *engine, const llamac_batch_token *batch, int n, int row) {
    Batch pass = {.tokens = engine->tokens, .runs = engine->runs, .wanted = engine->wanted};
    // NULL if no call has asked for logits yet: then this pass has no wanted tokens either
    if (engine->on_host && engine->logits)
        pass.logits = engine->logits + (size_t)row * engine->model.config.vocab_size;
    const llamac_sequence *last = NULL;
    for (int t = 0; t < n && t < engine->chunk; t++) {
        const llamac_batch_token *token = &batch[t];
        if (token->sequence != last) {
            if (pass.n_runs == engine->backend->max_runs) break;
            engine->runs[pass.n_runs++] =
                (Run){.cache = token->sequence->cache, .first = t, .n = 0, .pos = token->position};
            last = token->sequence;
        }
        engine->runs[pass.n_runs - 1].n++;
        engine->tokens[t] = token->token;
        if (token->logits) engine->wanted[pass.n_wanted++] = t;
        pass.T = t + 1;
    }
    return pass;
}

// Evaluates the tokens of a batch, which have been appended to their sequences.
static bool evaluate(llamac_engine *engine, const llamac_batch_token *batch, int n, Error *e) {
    Backend *b = engine->backend;
    int row = 0; // row of the next logits
    for (int at = 0; at < n;) {
        CHECK(!engine->abort || !engine->abort(engine->data), "aborted by the program");
        Batch pass = next_pass(engine, batch + at, n - at, row);
        for (int i = 0; i < pass.n_runs; i++) {
            const Run *run = &pass.runs[i];
            CHECK(b->reserve(b, run->cache, run->pos, run->n),
                  "not enough memory for the context; use a smaller -n or -c, or --kv q8");
        }
        forward(engine, &pass);
        const char *failure = b->failure ? b->failure(b) : NULL;
        CHECK(!failure, "%s", failure);
        for (int t = 0; t < pass.T; t++, at++) {
            llamac_sequence *s = batch[at].sequence;
            int end = batch[at].position + 1;
            engine->last[at] = (EvaluatedToken){s, batch[at].logits ? row : -1, end};
            if (batch[at].logits) s->row = row++, s->row_end = end;
        }
    }
    return true;
}

bool llamac_evaluate_sized(llamac_engine *engine, const llamac_batch_token *batch, int n,
                           size_t size, Error *e) {
    clear(e);
    CHECK(engine, no_engine);
    if (!check_batch(engine, batch, n, size, e)) return false;
    int rows = 0;
    EvaluatedToken *last = resize(engine->last, n, sizeof *last);
    CHECK(last, no_memory);
    engine->last = last, engine->n = 0, engine->calls++;
    for (int i = 0; i < n; i++) rows += batch[i].logits;
    bool ok = make_rows(engine, rows, e) && append_tokens(engine, batch, n, e)
              && evaluate(engine, batch, n, e);
    if (ok) engine->n = n;
    for (int i = 0; !ok && i < n; i++) { // drop what was appended
        llamac_sequence *s = batch[i].sequence;
        if (s->call == engine->calls) drop_tokens(s, batch[i].position);
        s->row = -1;
    }
    return ok;
}

bool llamac_forward(llamac_sequence *s, const int *tokens, int n, int pos, Error *e) {
    clear(e);
    CHECK(s, no_sequence);
    llamac_engine *engine = s->engine;
    CHECK(n >= 1 && pos >= 0 && n <= engine->positions - pos,
          "%d tokens at position %d, but the context has room for %d", n, pos, engine->positions);
    CHECK(tokens, "the array of %d tokens is NULL", n);
    llamac_batch_token one, *batch = n > 1 ? resize(NULL, n, sizeof *batch) : &one;
    CHECK(batch, no_memory);
    for (int i = 0; i < n; i++)
        batch[i] = (llamac_batch_token){s, tokens[i], pos + i, /*logits*/ i == n - 1};
    bool ok = llamac_evaluate(engine, batch, n, e);
    if (n > 1) free(batch);
    return ok;
}

// Returns the row of the logits of a sequence, or -1.
static int row_of(const llamac_sequence *s) {
    return s && s->engine->n && s->call == s->engine->calls ? s->row : -1;
}

static const float *row_at(const llamac_engine *engine, int row) {
    bool there = row >= 0 && engine->on_host && !engine->sample_only;
    return there ? engine->logits + (size_t)row * engine->model.config.vocab_size : NULL;
}

const float *llamac_logits(const llamac_sequence *s) {
    return s ? row_at(s->engine, row_of(s)) : NULL;
}

const float *llamac_batch_logits(const llamac_engine *engine, int i) {
    return engine && i >= 0 && i < engine->n ? row_at(engine, engine->last[i].row) : NULL;
}

bool llamac_nll(const llamac_engine *engine, int i, int token, double *nll, Error *e) {
    clear(e);
    CHECK(engine, no_engine);
    CHECK(nll, "the pointer to the result is NULL");
    int n = engine->model.config.vocab_size;
    const float *logits = llamac_batch_logits(engine, i);
    CHECK(logits, no_logits, i, engine->n);
    CHECK(token >= 0 && token < n, outside_vocabulary, token, n);
    double max = -INFINITY, sum = 0;
    for (int j = 0; j < n; j++) {
        CHECK(isfinite(logits[j]), not_finite);
        max = logits[j] > max ? logits[j] : max;
    }
    for (int j = 0; j < n; j++) sum += exp(logits[j] - max);
    *nll = log(sum) + max - logits[token];
    return true;
}

// ----------------------------------------------------------------------------
// Embeddings

// Memory of a call of llamac_embed.
typedef struct {
    int *wanted;   // (T,) indices of the wanted tokens of a pass; T: max tokens of a pass
    float *states; // (T, dim) their hidden states
    double *sums;  // (dim,) sums of the states of all wanted tokens
} EmbedMemory;

// Evaluates n tokens in an empty cache, one pass after the other. Adds their hidden states to
// `sums`, in the order of the tokens; if `pooling` is LLAMAC_LAST, only that of the last token.
// Does not change the results of the engine's last call, such as the logits.
static bool sum_hidden_states(llamac_engine *engine, Cache *cache, const int *tokens, int n,
                              int pooling, const EmbedMemory *memory, Error *e) {
    Backend *b = engine->backend;
    int dim = engine->model.config.dim;
    for (int pos = 0, T; pos < n; pos += T) {
        CHECK(!engine->abort || !engine->abort(engine->data), "aborted by the program");
        T = n - pos < engine->chunk ? n - pos : engine->chunk;
        Run run = {cache, 0, T, pos};
        Batch pass = {.tokens = tokens + pos,
                      .T = T,
                      .runs = &run,
                      .n_runs = 1,
                      .wanted = memory->wanted,
                      .n_wanted = T,
                      .hidden_states = memory->states};
        if (pooling == LLAMAC_LAST) {
            memory->wanted[0] = T - 1;
            pass.n_wanted = pos + T == n; // none in earlier passes
        }
        CHECK(b->reserve(b, cache, pos, T), "not enough memory for a text of %d tokens", n);
        forward(engine, &pass);
        const char *failure = b->failure ? b->failure(b) : NULL;
        CHECK(!failure, "%s", failure);
        for (int t = 0; t < pass.n_wanted; t++)
            for (int i = 0; i < dim; i++) memory->sums[i] += memory->states[(size_t)t * dim + i];
    }
    return true;
}

static bool check_text(const llamac_engine *engine, const int *tokens, int n, Error *e) {
    int vocab_size = engine->model.config.vocab_size;
    CHECK(n >= 1 && n <= engine->positions, "a text of %d tokens, expected 1 to %d", n,
          engine->positions);
    CHECK(tokens, "the array of %d tokens is NULL", n);
    for (int i = 0; i < n; i++)
        CHECK(tokens[i] >= 0 && tokens[i] < vocab_size, outside_vocabulary, tokens[i], vocab_size);
    return true;
}

bool llamac_embed(llamac_engine *engine, const int *tokens, int n, int pooling, float *embedding,
                  Error *e) {
    clear(e);
    CHECK(engine, no_engine);
    CHECK(embedding, "the pointer to the embedding is NULL");
    CHECK(pooling == LLAMAC_MEAN || pooling == LLAMAC_LAST,
          "pooling is %d, expected LLAMAC_MEAN or LLAMAC_LAST", pooling);
    if (!check_text(engine, tokens, n, e)) return false;
    Backend *b = engine->backend;
    int dim = engine->model.config.dim, T = n < engine->chunk ? n : engine->chunk;
    EmbedMemory memory = {resize(NULL, T, sizeof(int)),
                          resize(NULL, (size_t)T * dim, sizeof(float)),
                          calloc(dim, sizeof(double))};
    Cache *cache = b->new_cache(b);
    bool ok = memory.wanted && memory.states && memory.sums && cache;
    if (!ok) fail(e, no_memory);
    for (int t = 0; ok && t < T; t++) memory.wanted[t] = t;
    ok = ok && sum_hidden_states(engine, cache, tokens, n, pooling, &memory, e);
    int divisor = pooling == LLAMAC_MEAN ? n : 1;
    for (int i = 0; ok && i < dim; i++) {
        embedding[i] = (float)(memory.sums[i] / divisor);
        ok = isfinite(embedding[i])
             || fail(e, "the hidden states are not finite; the weights of the model are broken");
    }
    if (cache) b->free_cache(b, cache);
    free(memory.wanted);
    free(memory.states);
    free(memory.sums);
    return ok;
}

// ----------------------------------------------------------------------------
// Engines

#ifdef CUDA
enum { HAS_CUDA = 1 };
#else
enum { HAS_CUDA = 0 };

// The linker needs this in a build without CUDA, which never calls it
const char *llamac_cuda_open(Backend **b, Model *m, const Opening *o, Error *e) {
    (void)b, (void)m, (void)o, (void)e;
    return "no GPU";
}
#endif

// Opens the backend and allocates the activations. On failure, closes the backend, which restores
// engine->model, and sets engine->backend to NULL, so another backend can be tried.
static bool open_backend(llamac_engine *engine, bool gpu, const Opening *opening, Error *e) {
    Model *m = &engine->model;
    Error text; // holds the message that llamac_cuda_open returns, unless that is a constant
    CHECK(!gpu || !opening->kv_bits, "the KV cache of a GPU is f32 if the weights are float32, "
                                     "and f16 otherwise; leave --kv out");
    CHECK(!gpu || !m->stream, "a GPU keeps all weights in its memory; leave --stream out");
    const char *wrong = gpu ? llamac_cuda_open(&engine->backend, m, opening, &text)
                            : llamac_cpu_open(&engine->backend, m, opening);
    CHECK(!wrong, "%s", wrong);
    Backend *b = engine->backend;
    size_t T = engine->chunk = opening->positions < b->chunk ? opening->positions : b->chunk;
    if (b->max_runs > 1) T = engine->chunk = b->chunk; // several sequences share a pass
    engine->x = b->alloc(b, T * m->config.dim);
    engine->attention_out = b->alloc(b, T * m->config.q_dim);
    engine->tokens = resize(engine->tokens, T, sizeof(int));
    engine->wanted = resize(engine->wanted, T, sizeof(int));
    engine->runs = resize(engine->runs, T, sizeof(Run));
    bool ok =
        engine->x && engine->attention_out && engine->tokens && engine->wanted && engine->runs;
    if (!ok) {
        b->close(b);
        engine->backend = NULL;
    }
    CHECK(ok, "not enough memory for the activations");
    return true;
}

enum { MAX_THREADS = 1024 };

// Checks that sizes that grow with the number of positions fit in WebAssembly's addresses of 32
// bits. The largest is that of the KV cache.
static bool check_positions(const Config *c, int positions, Error *e) {
    uint64_t vectors = 2 * (uint64_t)c->n_layers * c->n_kv_heads + c->n_heads + 4;
    uint64_t bytes = (positions + 128) * vectors * (c->head_dim + 16) * sizeof(float);
    CHECK(sizeof(size_t) == 8 || bytes < UINT32_MAX,
          "the context of %d tokens needs more than 4 GB, which is all that WebAssembly has",
          positions);
    return true;
}

static bool open_engine(llamac_engine *engine, const llamac_options *o, Error *e) {
    const Model *m = &engine->model;
    const Config *c = &m->config;
    const char *device = o->device ? o->device : HAS_CUDA ? "cuda" : "cpu";
    bool cpu = !strcmp(device, "cpu"), automatic = !strcmp(device, "auto");
    CHECK(cpu || automatic || !strcmp(device, "cuda"),
          "unknown device '%.40s', expected cpu, cuda or auto", device);
    CHECK(cpu || automatic || HAS_CUDA,
          "this program runs on the CPU only; build the GPU program with: make runcuda");
    CHECK(o->positions >= 0 && o->positions <= c->seq_len,
          "%d positions, but the model's context is %d", o->positions, c->seq_len);
    CHECK(o->n_threads >= 0 && o->n_threads <= MAX_THREADS,
          "%d threads, expected 1 to %d, or 0 for one per core", o->n_threads, MAX_THREADS);
    int kv = o->kv_bits;
    CHECK(!kv || kv == 32 || kv == 16 || kv == 8, "a KV cache of %d bits, expected 32, 16 or 8",
          kv);
    engine->kernels = llamac_choose_kernels(o->isa);
    CHECK(engine->kernels,
          "this machine has no instruction set '%.40s', expected scalar, avx2, avxvnni, "
          "avx512bw, avx512, avx512bf16, neon, neondot, neoni8mm or wasm128",
          o->isa);
    engine->positions = o->positions ? o->positions : c->seq_len;
    TRY(check_positions(c, engine->positions, e));
    engine->n_threads = o->n_threads > 0 ? o->n_threads : llamac_default_threads();
    engine->sample_only = o->sample_only;
    engine->abort = o->abort, engine->data = o->data;
    CHECK(llamac_new_sampler_memory(&engine->sampler, engine->kernels, c->vocab_size), no_memory);
    Opening opening = {.positions = engine->positions,
                       .n_threads = engine->n_threads,
                       .no_copy = o->no_copy,
                       .kv_bits = kv,
                       .progress = o->progress,
                       .data = o->data,
                       .kernels = engine->kernels};
    if (!cpu && HAS_CUDA) {
        Error gpu_error;
        if (open_backend(engine, true, &opening, &gpu_error)) return true;
        CHECK(automatic, "%s", gpu_error.text);
        // `fail` only writes the note here: the engine starts on the CPU
        fail(&engine->note, "running on the CPU instead of a GPU: %s", gpu_error.text);
    }
    TRY(open_backend(engine, false, &opening, e));
    uint64_t streamed = engine->backend->streamed;
    if (streamed && !m->stream) {
        const uint8_t *first;
        fail(&engine->note,
             "%.0f of %.0f MB of the weights do not fit in memory and are read from the file for "
             "every token",
             streamed / 1e6, llamac_weight_bytes(m, &first) / 1e6);
    }
    return true;
}

llamac_engine *llamac_start_sized(const llamac_model *model, const llamac_options *options,
                                  size_t size, Error *e) {
    clear(e);
    if (!model) return fail(e, no_model), NULL;
    llamac_options o = {0};
    if (options && size > sizeof o)
        return fail(e,
                    "llamac_options has %zu bytes, expected at most %zu: the program was "
                    "compiled with a newer llamac.h than the library",
                    size, sizeof o),
               NULL;
    if (options) memcpy(&o, options, size);
    const Model *m = &model->transformer;
    llamac_engine *engine = calloc(1, sizeof *engine);
    Layer *layers = resize(NULL, m->config.n_layers, sizeof *layers);
    if (!engine || !layers) return free(engine), free(layers), fail(e, no_memory), NULL;
    memcpy(layers, m->weights.layers, m->config.n_layers * sizeof *layers);
    engine->model = *m, engine->source = m;
    engine->model.weights.layers = layers;
    if (open_engine(engine, &o, e)) return engine;
    return llamac_stop(engine), NULL;
}

void llamac_stop(llamac_engine *engine) {
    if (!engine) return;
    if (engine->backend) engine->backend->close(engine->backend);
    free(engine->logits);
    free(engine->tokens);
    free(engine->wanted);
    free(engine->runs);
    free(engine->last);
    llamac_free_sampler_memory(&engine->sampler);
    free(engine->model.weights.layers);
    free(engine);
}

int llamac_version(void) { return LLAMAC_VERSION; }

const char *llamac_isa(void) { return llamac_choose_kernels(NULL)->name; }

const char *llamac_note(const llamac_engine *engine) { return engine ? engine->note.text : ""; }

int llamac_positions(const llamac_engine *engine) { return engine ? engine->positions : 0; }

int llamac_threads(const llamac_engine *engine) { return engine ? engine->n_threads : 0; }

double llamac_bandwidth(const llamac_engine *engine) {
    const uint8_t *first;
    if (!engine) return 0;
    // n: bytes of weights that one token reads; first: their lowest address
    uint64_t n = llamac_weight_bytes(&engine->model, &first);
    return engine->backend->bandwidth(engine->backend, first, n);
}

// ----------------------------------------------------------------------------
// Sampling

// Samples the token after tokens (n,). `row`: row of the last call's logits that belongs to the
// last of these tokens. The penalties read these tokens.
static int sample_row(llamac_engine *engine, llamac_sampler *sampler, int row, const int *tokens,
                      int n, Error *e) {
    Backend *b = engine->backend;
    int vocab_size = engine->model.config.vocab_size, next;
    if (!llamac_check_sampler(sampler, vocab_size, e)) return -1;
    if (engine->on_host)
        return llamac_draw(&engine->sampler, sampler, engine->logits + (size_t)row * vocab_size,
                           tokens, n, e);
    if (!llamac_is_plain(sampler))
        return fail(e, "the logits are in the memory of the GPU, which samples by temperature and "
                       "top-p only; leave sample_only out of llamac_options"),
               -1;
    if (llamac_is_greedy(sampler)) next = b->choose(b, 0, 0, 0);
    else next = b->choose(b, sampler->temperature, sampler->topp, llamac_random(sampler));
    const char *failure = b->failure ? b->failure(b) : NULL;
    if (next < 0) fail(e, "%s", failure ? failure : not_finite);
    return next;
}

// Like sample_row, for a program in which llamac_sampler has `size` bytes. Advances the state of
// the sampler. Returns -1 after a failure.
static int sample(llamac_engine *engine, llamac_sampler *sampler, size_t size, int row,
                  const int *tokens, int n, Error *e) {
    enum { MIN_SIZE = offsetof(llamac_sampler, topk) }; // the first version ended there
    if (size < MIN_SIZE || size > sizeof *sampler)
        return fail(e, "llamac_sampler has %zu bytes, expected %d to %zu", size, MIN_SIZE,
                    sizeof *sampler),
               -1;
    llamac_sampler all = {0}; // fields that are newer than the program stay 0
    memcpy(&all, sampler, size);
    int next = sample_row(engine, &all, row, tokens, n, e);
    sampler->state = all.state;
    return next;
}

static const char no_sampler[] = "the sampler is NULL";

int llamac_sample_sized(llamac_sequence *s, llamac_sampler *sampler, size_t size, Error *e) {
    clear(e);
    if (!s || !sampler) return fail(e, "%s", s ? no_sampler : no_sequence), -1;
    int row = row_of(s);
    if (row < 0)
        return fail(e, "there are no logits of the sequence: the last call must evaluate one of "
                       "its tokens with logits"),
               -1;
    return sample(s->engine, sampler, size, row, s->tokens, s->row_end, e);
}

int llamac_sample_at_sized(llamac_engine *engine, int i, llamac_sampler *sampler, size_t size,
                           Error *e) {
    clear(e);
    if (!engine || !sampler) return fail(e, "%s", engine ? no_sampler : no_engine), -1;
    const EvaluatedToken *token = i >= 0 && i < engine->n ? &engine->last[i] : NULL;
    if (!token || token->row < 0) return fail(e, no_logits, i, engine->n), -1;
    if (!token->sequence)
        return fail(e, "the sequence of token %d of the last call was freed", i), -1;
    return sample(engine, sampler, size, token->row, token->sequence->tokens, token->end, e);
}

bool llamac_sample_batch_sized(llamac_sequence *const *sequences, llamac_sampler *const *samplers,
                               int n, int *tokens, size_t size, Error *e) {
    clear(e);
    CHECK(n >= 0, "%d sequences, expected 0 or more", n);
    CHECK(!n || (sequences && samplers && tokens), "an array of %d sequences is NULL", n);
    bool ok = true;
    for (int i = 0; i < n; i++) {
        Error error;
        tokens[i] = llamac_sample_sized(sequences[i], samplers[i], size, &error);
        if (tokens[i] < 0 && ok) ok = fail(e, "%s", error.text);
    }
    return ok;
}

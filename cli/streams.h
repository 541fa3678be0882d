// Texts that a model continues, one or many at once: each is a stream of tokens, of which the model
// sees a window.
#ifndef CLI_STREAMS_H
#define CLI_STREAMS_H

#include "common.h"
#include "lookup.h"

typedef struct {
    llamac_model *model;
    llamac_info info;
    // options.positions: max tokens that the model may see. The engine is started with that many
    // positions or, if the texts are shorter, with fewer: llamac_positions(engine)
    llamac_options options;
    llamac_engine *engine;
    llamac_sampler sampler;   // the initial sampler of a stream
    const char *const *stops; // (n_stops,) strings before which a text ends
    int n_stops;
    bool raw;                 // print all bytes as they are
    bool json_object;         // texts are JSON objects
    int steps;                // max tokens of a text, or of an answer in a chat
    bool told;                // the user has been told that a window slid
    Input input;              // stdin
    const char *prompt_cache; // file with keys and values of a prompt, or NULL
    // Used by evaluate
    llamac_batch_token *batch; // (capacity,)
    int capacity;
    int64_t n_evaluated; // tokens of all texts so far, without wrong guesses
    double began;        // time of the first call of evaluate
    Lookup lookup;
    llamac_grammar **grammars; // (n_grammars,) grammars that no text uses at the moment
    int n_grammars;
} Run;

typedef struct {
    llamac_sequence *sequence;
    llamac_sampler sampler;
    int *window;       // (llamac_positions(engine),) tokens that the model sees
    int length;        // tokens in the window
    int evaluated;     // number of them, from the first on, whose keys and values are in the cache
    bool slid;         // the window has slid at least once
    int prompt_tokens; // tokens of the prompt, BOS included
    // The text that is being continued
    llamac_text *text;       // decodes the sampled tokens
    llamac_grammar *grammar; // masks the tokens of a JSON object; NULL: the text may be anything
    int sampled, max;        // number of sampled tokens, and its limit
    int last;                // latest sampled token
    bool done;
    // How the text ended: LLAMAC_END, LLAMAC_STOP (also if a JSON object is complete), or
    // LLAMAC_MORE if it reached its limit
    int result;
    // The tokens of the stream in the latest batch
    int at;                   // index in the batch of its latest token that is not a guess
    int guesses[MAX_GUESSES]; // (n_guesses,) guesses for the tokens after that one
    int n_guesses;
    int max_guesses; // max guesses of the next call; 0: the stream has not guessed yet
    Text out;        // bytes that may be shown, but are not printed yet
} Stream;

// Starts the engine for sequences of up to `positions` tokens, at most r->options.positions. Calls
// `die` if it cannot be started.
static void start_engine(Run *r, int positions) {
    llamac_options o = r->options;
    llamac_error error;
    o.positions = positions;
    r->engine = llamac_start(r->model, &o, &error);
    if (!r->engine) {
        // The message begins with the setting that the user may have to change
        const char *subject = !strcmp(o.device, "cuda") ? "cuda" : "start";
        if (o.isa && strstr(error.text, "instruction set")) subject = "LLAMAC_ISA";
        die(subject, "%s", error.text);
    }
    if (*llamac_note(r->engine)) fprintf(stderr, "%s\n", llamac_note(r->engine));
}

static llamac_sequence *new_sequence(const Run *r) {
    llamac_error error;
    llamac_sequence *sequence = llamac_sequence_new(r->engine, &error);
    if (!sequence) die("start", "%s", error.text);
    return sequence;
}

static void open_stream(const Run *r, Stream *s) {
    s->sequence = new_sequence(r);
    s->window = resize(NULL, llamac_positions(r->engine), sizeof(int));
}

// Opens a stream with the tokens of another, and the keys and values of those that are evaluated.
static void open_copy(const Run *r, Stream *s, const Stream *from) {
    llamac_error error;
    s->sequence = llamac_sequence_copy(from->sequence, from->evaluated, &error);
    if (!s->sequence) die("start", "%s", error.text);
    s->window = resize(NULL, llamac_positions(r->engine), sizeof(int));
    memcpy(s->window, from->window, from->length * sizeof(int));
    s->length = from->length, s->evaluated = from->evaluated, s->slid = from->slid;
}

// Frees a stream, except s->out, which still has to be printed. Keeps the grammar in r->grammars
// for later texts, because creating one takes long.
static void close_stream(Run *r, Stream *s) {
    if (s->grammar) {
        r->grammars = resize(r->grammars, r->n_grammars + 1, sizeof *r->grammars);
        r->grammars[r->n_grammars++] = s->grammar;
        s->grammar = NULL;
    }
    llamac_sequence_free(s->sequence);
    llamac_text_free(s->text);
    free(s->window);
    s->sequence = NULL, s->text = NULL, s->window = NULL;
}

// Adds n new tokens to a window that has no room for them. Afterwards its first half contains the
// latest tokens of the stream, the new ones last. If the new ones alone exceed the half, only the
// latest of them are kept. The stream's first token, usually BOS, replaces the first token of the
// half, unless the half is a single token. The half must be evaluated again. The window slides
// again when its second half is full, so tokens are evaluated about twice on average.
static void slide(Stream *s, int positions, const int *tokens, int n) {
    int half = positions > 3 ? positions / 2 : 1;
    int first = s->length ? s->window[0] : tokens[0];
    int new = n < half ? n : half, old = half - new;
    memmove(s->window, s->window + s->length - old, old * sizeof(int));
    memcpy(s->window + old, tokens + n - new, new * sizeof(int));
    if (half > 1) s->window[0] = first;
    s->length = half, s->evaluated = 0, s->slid = true;
}

// Adds n tokens to the window, which slides if it has no room for them. If it slides and they are
// more than half a window, the model never sees those that do not fit.
static void feed(const Run *r, Stream *s, const int *tokens, int n) {
    int positions = llamac_positions(r->engine);
    if (n > positions - s->length) slide(s, positions, tokens, n);
    else {
        memcpy(s->window + s->length, tokens, n * sizeof(int));
        s->length += n;
    }
}

// Guesses the next tokens of a stream, as many as the text and the window have room for, and adds
// them to the batch, which has `count` tokens. Returns the new count.
static int add_guesses(Run *r, Stream *s, int count) {
    int max = s->max_guesses ? s->max_guesses : FIRST_GUESSES;
    int room = llamac_positions(r->engine) - s->length, left = s->max - s->sampled - 1;
    if (max > room) max = room;
    if (max > left) max = left;
    s->n_guesses = guess_tokens(s->window, s->length, max, s->guesses);
    for (int i = 0; i < s->n_guesses; i++)
        r->batch[count++] = (llamac_batch_token){s->sequence, s->guesses[i], s->length + i,
                                                 /*logits*/ true};
    return count;
}

// Evaluates, in one batch, the tokens of n streams that have not been evaluated. With two or more
// streams, a call evaluates at most PROMPT_PART tokens of each, so that a long prompt does not
// delay the others.
static void evaluate(Run *r, Stream **streams, int n) {
    enum { PROMPT_PART = 256 }; // tokens
    llamac_error error;
    int count = 0, n_guesses = 0;
    bool one_each = true; // each stream has one token to evaluate, which was sampled
    double begin = llamac_seconds();
    if (!r->n_evaluated) r->began = begin;
    for (int i = 0; i < n; i++)
        one_each &= streams[i]->length - streams[i]->evaluated == 1 && streams[i]->sampled > 0;
    bool guess = one_each && may_guess(&r->lookup, n);
    for (int i = 0; i < n; i++) {
        Stream *s = streams[i];
        int left = s->length - s->evaluated,
            part = n > 1 && left > PROMPT_PART ? PROMPT_PART : left;
        if (count + part + MAX_GUESSES > r->capacity) {
            r->capacity = 2 * r->capacity + part + MAX_GUESSES;
            r->batch = resize(r->batch, r->capacity, sizeof *r->batch);
        }
        for (int end = s->evaluated + part; s->evaluated < end; s->evaluated++) {
            bool is_last = s->evaluated == s->length - 1; // the next token is sampled after it
            r->batch[count++] = (llamac_batch_token){s->sequence, s->window[s->evaluated],
                                                     s->evaluated, /*logits*/ is_last};
        }
        s->at = count - 1, s->n_guesses = 0;
        if (guess) count = add_guesses(r, s, count);
        n_guesses += s->n_guesses;
    }
    if (!llamac_evaluate(r->engine, r->batch, count, &error)) die("model", "%s", error.text);
    if (one_each) count_call(&r->lookup, n, n_guesses, llamac_seconds() - begin);
    r->n_evaluated += count - n_guesses;
}

// Begins a text that continues the stream by at most `max` tokens, and ends before the first
// occurrence of a stop string. stops: (n_stops,).
static void begin_text(const Run *r, Stream *s, const char *const *stops, int n_stops, int max) {
    llamac_error error;
    int previous = s->length ? s->window[s->length - 1] : -1;
    llamac_text_free(s->text);
    s->text =
        llamac_text_new(r->model, previous, stops, n_stops, r->raw ? LLAMAC_TEXT_RAW : 0, &error);
    if (!s->text) die("--stop", "%s", error.text);
    s->sampled = 0, s->max = max, s->done = false;
}

// Makes the next text of a stream, of at most `max` tokens, a JSON object. Fails if the vocabulary
// cannot spell JSON, or if no object fits into `max` tokens.
static bool use_grammar(Run *r, Stream *s, int max, llamac_error *error) {
    if (!s->grammar && r->n_grammars) s->grammar = r->grammars[--r->n_grammars];
    if (!s->grammar) s->grammar = llamac_grammar_json(r->model, true, error);
    if (!s->grammar) return false;
    llamac_grammar_reset(s->grammar);
    // Is any token allowed?
    if (max > 0 && memchr(llamac_grammar_allowed(s->grammar, max), 1, r->info.vocab_size))
        return true;
    snprintf(error->text, sizeof error->text,
             "the text has room for %d tokens, too few for a JSON object", max > 0 ? max : 0);
    return false;
}

// Samples the next token of the stream from the logits of token i of the latest batch. Adds it to
// the window, unless the text is done: at a token that ends texts, such as EOS, before a stop
// string, after s->max tokens, or as soon as its JSON object is complete.
static void sample_next(const Run *r, Stream *s, int i) {
    llamac_error error;
    const char *shown;
    size_t n;
    if (s->grammar) s->sampler.allowed = llamac_grammar_allowed(s->grammar, s->max - s->sampled);
    s->last = llamac_sample_at(r->engine, i, &s->sampler, &error);
    if (s->last < 0) die("model", "%s", error.text);
    llamac_grammar_accept(s->grammar, s->last);          // does nothing without a grammar
    bool complete = llamac_grammar_complete(s->grammar); // false without a grammar
    s->result = llamac_text_add(s->text, s->last, &shown, &n, &error);
    if (s->result < 0) die("text", "%s", error.text);
    append(&s->out, shown, n);
    if (s->result != LLAMAC_END) s->sampled++;
    s->done = s->result != LLAMAC_MORE || complete || s->sampled == s->max;
    if (!s->done) feed(r, s, &s->last, 1);
    else if (s->result == LLAMAC_MORE) {
        if (!llamac_text_finish(s->text, &shown, &n, &error)) die("text", "%s", error.text);
        append(&s->out, shown, n);
        if (complete) s->result = LLAMAC_STOP;
    }
}

// Samples the next token of a stream whose tokens are all evaluated. As long as the sampled token
// is the guessed one, also samples the one after it. The keys and values of wrong guesses stay in
// the sequence until the tokens of the next batch, which have the same positions, replace them.
static void sample_stream(Run *r, Stream *s) {
    int right = 0;
    sample_next(r, s, s->at);
    while (right < s->n_guesses && !s->done && s->last == s->guesses[right]) {
        s->evaluated++;
        sample_next(r, s, s->at + ++right);
    }
    if (!s->n_guesses) return;
    s->max_guesses = next_guesses(s->n_guesses, right);
    count_right(&r->lookup, right);
    r->n_evaluated += right;
}

// Samples for each of n streams, except those with tokens that are not evaluated yet.
static void sample_all(Run *r, Stream **streams, int n) {
    for (int i = 0; i < n; i++)
        if (streams[i]->evaluated == streams[i]->length) sample_stream(r, streams[i]);
}

// Prints the available output of a stream.
static void print_out(const Run *r, Stream *s) {
    print_text(s->out.s, s->out.n, r->raw);
    s->out.n = 0;
    flush();
}

// Reports, once per program run, that the window of a stream slid.
static void report_slide(Run *r, const Stream *s) {
    if (s->slid && !r->told)
        fprintf(stderr, "the context of %d tokens is full: the oldest tokens are dropped\n",
                llamac_positions(r->engine));
    r->told |= s->slid;
}

// Ends the line of a text. Only then reports a slide: an earlier report would interrupt the text if
// stdout and stderr are the same terminal.
static void end_line(Run *r, const Stream *s) {
    print_bytes("\n", 1);
    flush();
    report_slide(r, s);
}

#endif

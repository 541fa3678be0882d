// Runs a Llama model from the command line, with the library in runtime/: continues texts, chats,
// and measures perplexity and speed. Text goes to stdout, everything else to stderr. An error ends
// the program with one line `run: <subject>: <message>` and exit code 1.
#include "cli/common.h"
#include <math.h>
#include <time.h>
#include "cli/options.h"
#include "cli/requests.h"
#include "cli/streams.h"

// ----------------------------------------------------------------------------
// Texts

static int *encode(const Run *r, Text text, bool bos, int *n) {
    llamac_error error;
    int *tokens = llamac_encode(r->model, text.s, text.n, bos, n, &error);
    if (!tokens) die("text", "%s", error.text);
    return tokens;
}

// Returns whether the prompt is encoded with BOS. An empty prompt always is, because a text needs a
// token to begin with.
static bool wants_bos(const Run *r, Text prompt) { return r->info.add_bos || !prompt.n; }

// Encodes the prompt, which must have at least one token.
static int *encode_prompt(const Run *r, Text prompt, int *n) {
    int *tokens = encode(r, prompt, wants_bos(r, prompt), n);
    if (*n == 0) die("prompt", "it has no tokens");
    return tokens;
}

// Appends the text of a prompt's tokens to the output of the stream.
static void show_prompt(const Run *r, Stream *s, const int *tokens, int n) {
    llamac_error error;
    const char *shown;
    size_t bytes;
    int flags = LLAMAC_TEXT_GO_ON | (r->raw ? LLAMAC_TEXT_RAW : 0);
    // decode as after BOS, even if the prompt is encoded without it
    llamac_text *text = llamac_text_new(r->model, r->info.bos, NULL, 0, flags, &error);
    if (!text) die("text", "%s", error.text);
    for (int i = 0; i < n; i++) {
        if (llamac_text_add(text, tokens[i], &shown, &bytes, &error) < 0)
            die("text", "%s", error.text);
        append(&s->out, shown, bytes);
    }
    if (!llamac_text_finish(text, &shown, &bytes, &error)) die("text", "%s", error.text);
    append(&s->out, shown, bytes);
    llamac_text_free(text);
}

// Returns the library's message without the path at its beginning, because die prints the path.
static const char *message_of(const llamac_error *error, const char *path) {
    size_t n = strlen(path) < 200 ? strlen(path) : 200; // the library shows at most this much of it
    return strlen(error->text) > n + 2 && !memcmp(error->text + n, ": ", 2) ? error->text + n + 2
                                                                            : error->text;
}

// Loads the KV cache in the file of --prompt-cache, if it exists, as far as its prompt and this one
// begin alike. The last token of this prompt is always evaluated, for its logits.
static void load_prompt(Run *r, Stream *s) {
    llamac_error error;
    const char *path = r->prompt_cache;
    if (!llamac_may_exist(path)) return;
    llamac_sequence *saved = llamac_sequence_load(r->engine, path, &error);
    if (!saved) die(path, "%s", message_of(&error, path));
    const int *tokens = llamac_sequence_tokens(saved);
    int n = 0, length = llamac_sequence_length(saved);
    while (n < length && n < s->length && tokens[n] == s->window[n]) n++;
    if (n == s->length) r->prompt_cache = NULL; // the file has the whole prompt: leave it
    s->evaluated = n < s->length ? n : s->length - 1;
    if (!llamac_sequence_truncate(saved, s->evaluated, &error)) die(path, "%s", error.text);
    llamac_sequence_free(s->sequence);
    s->sequence = saved;
    fprintf(stderr, "prompt: %d of %d tokens read from the file of --prompt-cache\n", s->evaluated,
            s->length);
}

static void save_prompt(const Run *r, const Stream *s) {
    llamac_error error;
    const char *path = r->prompt_cache;
    if (!llamac_sequence_save(s->sequence, path, &error)) die(path, "%s", message_of(&error, path));
}

static void must_use_grammar(Run *r, Stream *s, int max) {
    llamac_error error;
    if (!use_grammar(r, s, max, &error)) die("--json-object", "%s", error.text);
}

// Begins the text that continues a prompt. Both have at most r->steps tokens together, not counting
// BOS. `first` is NULL or a stream to copy, which has evaluated all tokens of the same prompt except
// the last.
static void begin_prompt(Run *r, Stream *s, Text prompt, const Stream *first) {
    int n, *tokens = encode_prompt(r, prompt, &n);
    int64_t total = (int64_t)r->steps + wants_bos(r, prompt);
    if (r->json_object) must_use_grammar(r, s, (int)(total - n));
    else show_prompt(r, s, tokens, n < total ? n : (int)total);
    s->prompt_tokens = n;
    s->done = n >= total;
    if (!s->done) {
        int context = r->options.positions;
        // The last token of the text is sampled but not evaluated, so r->steps positions are
        // enough, even with BOS. The file of --prompt-cache may have a longer prompt, up to the
        // whole context
        int positions = r->steps < context && !r->prompt_cache ? r->steps : context;
        if (!r->engine) start_engine(r, positions);
        if (first) open_copy(r, s, first);
        else open_stream(r, s), feed(r, s, tokens, n);
        if (r->prompt_cache) load_prompt(r, s);
        begin_text(r, s, r->stops, r->n_stops, (int)(total - n));
    }
    llamac_free(tokens);
}

// The texts that a call of `generate` generates.
typedef struct {
    const Text *prompts; // (n,), or one prompt for all texts, which is evaluated once
    bool same_prompt;
    Stream *streams;             // (n,)
    int n, begun, printed;       // number of texts: in total, begun, printed completely
    Stream *active[MAX_AT_ONCE]; // (n_active,) streams that are begun and not done
    int n_active, max_active;
} Batch;

// Begins texts until max_active are active. Texts of the same prompt have different seeds.
static void begin_texts(Run *r, Batch *b) {
    for (; b->n_active < b->max_active && b->begun < b->n; b->begun++) {
        bool same = b->same_prompt && b->n > 1, first = b->begun == 0;
        Stream *s = &b->streams[b->begun];
        s->sampler = r->sampler;
        if (same) s->sampler.state += b->begun;
        begin_prompt(r, s, b->prompts[same ? 0 : b->begun], same && !first ? b->streams : NULL);
        if (!s->done) b->active[b->n_active++] = s;
        if (!same || !first || s->done || s->length == 1) continue;
        // Evaluate the tokens that all texts share: the prompt without its last token. Each text
        // evaluates that one itself, to get its own logits
        s->length--;
        evaluate(r, &s, 1);
        s->length++;
    }
}

// Samples a token for each active text, and closes the texts that are then done.
static void continue_texts(Run *r, Batch *b) {
    int left = 0;
    sample_all(r, b->active, b->n_active);
    for (int i = 0; i < b->n_active; i++) {
        if (b->active[i]->done) close_stream(r, b->active[i]);
        else b->active[left++] = b->active[i];
    }
    b->n_active = left;
}

// Prints the available output of the texts in order. A text waits until all earlier ones are done.
static void print_texts(Run *r, Batch *b) {
    for (; b->printed < b->n; b->printed++) {
        Stream *s = &b->streams[b->printed];
        print_out(r, s);
        if (!s->done) return;
        end_line(r, s);
        if (!s->max)
            fprintf(stderr,
                    "no text was generated: the prompt has %d tokens, and -n %d includes them; "
                    "use a larger -n\n",
                    s->prompt_tokens - r->info.add_bos, r->steps); // -n does not count BOS
        if (b->printed < b->n - 1) print_bytes("---\n", 4);
        free(s->out.s);
        s->out = (Text){0};
    }
}

// Prints n prompts and their continuations, of which `max_active` are computed at the same time. A
// single prompt is continued n times.
static void generate(Run *r, const Text *prompts, int n_prompts, int n, int max_active) {
    Batch b = {.prompts = prompts, .same_prompt = n_prompts == 1, .n = n, .max_active = max_active};
    double middle = 0;         // time of the first sample
    int64_t prompt_tokens = 0; // tokens evaluated before it
    b.streams = resize(NULL, n, sizeof *b.streams);
    memset(b.streams, 0, n * sizeof *b.streams);
    while (b.printed < n) {
        begin_texts(r, &b);
        print_texts(r, &b);
        if (!b.n_active) continue;
        evaluate(r, b.active, b.n_active);
        if (!middle) {
            middle = llamac_seconds(), prompt_tokens = r->n_evaluated;
            if (r->prompt_cache) save_prompt(r, b.active[0]);
        }
        continue_texts(r, &b);
        print_texts(r, &b);
    }
    double end = llamac_seconds();
    free(b.streams);
    if (!r->n_evaluated) return;
    if (r->lookup.on)
        fprintf(stderr, "lookup: %lld of %lld guessed tokens were right\n",
                (long long)r->lookup.n_right, (long long)r->lookup.n);
    if (n > 1) {
        fprintf(stderr, "%d texts: %lld tokens evaluated, tok/s: %f\n", n,
                (long long)r->n_evaluated, (double)r->n_evaluated / (end - r->began));
        return;
    }
    fprintf(stderr, "achieved tok/s: %f\n",
            (double)(r->n_evaluated - prompt_tokens) / (end - middle));
    fprintf(stderr, "prompt: %lld tokens evaluated, tok/s: %f\n", (long long)prompt_tokens,
            (double)prompt_tokens / (middle - r->began));
}

// Continues the lines of a file. Empty lines are prompts too.
static void generate_lines(Run *r, Text file, int max_active) {
    int n = 0, capacity = 0;
    Text *lines = NULL;
    for (size_t at = 0, end; at < file.n; at = end + 1) {
        for (end = at; end < file.n && file.s[end] != '\n';) end++;
        size_t length = end - at;
        if (length && file.s[end - 1] == '\r') length--;
        if (n == capacity) lines = resize(lines, capacity = 2 * capacity + 64, sizeof *lines);
        lines[n++] = (Text){.s = file.s + at, .n = length};
    }
    if (!n) die("--prompts", "the file has no lines");
    generate(r, lines, n, n, max_active);
    free(lines);
}

static int *encode_turn(const Run *r, bool first, const char *system, Text words, int *n) {
    llamac_error error;
    int *tokens = llamac_encode_turn(r->model, first, system, words.s, words.n, n, &error);
    if (!tokens) die("text", "%s", error.text);
    return tokens;
}

// Alternates turns of user and assistant until the input ends. The first message may come from -i
// or -f, the system prompt from -y. If the user enters an empty system prompt, the template's own
// is used.
static void chat(Run *r, Text words, bool has_words, const char *system) {
    Stream stream = {.sampler = r->sampler}, *s = &stream;
    bool pending = false; // the last answer was cut off: its last token is not in the window yet
    Text line = {0}, prompt = {0};
    if (system) append_string(&prompt, system);
    else ask(&r->input, "Enter system prompt (optional): ", &prompt);
    append(&prompt, "", 1); // the zero at the end of a C string
    if (strlen(prompt.s) < prompt.n - 1) die("system prompt", "it contains a zero byte");
    if (!system && *prompt.s) system = prompt.s;
    start_engine(r, r->options.positions);
    open_stream(r, s);
    for (bool first = true; (first && has_words) || ask(&r->input, "User: ", &line);
         first = false) {
        int n, *tokens = encode_turn(r, first, system, first && has_words ? words : line, &n);
        if (pending) feed(r, s, &s->last, 1);
        feed(r, s, tokens, n);
        llamac_free(tokens);
        print_bytes("Assistant: ", 11);
        if (r->json_object) must_use_grammar(r, s, r->steps);
        begin_text(r, s, r->stops, r->n_stops, r->steps);
        while (!s->done) {
            evaluate(r, &s, 1);
            sample_stream(r, s);
            print_out(r, s);
        }
        pending = s->result != LLAMAC_END;
        end_line(r, s);
        if (s->result == LLAMAC_MORE)
            fprintf(stderr, "the answer was cut off after %d tokens (-n)\n", r->steps);
    }
    close_stream(r, s);
    free(s->out.s);
    free(line.s);
    free(prompt.s);
}

// ----------------------------------------------------------------------------
// Perplexity and logits

enum { MAX_ROWS = 128 }; // tokens whose logits are kept at once

// Evaluates up to `max` tokens from position pos on, at most MAX_ROWS, with the logits of each.
// Returns the number of tokens evaluated.
static int evaluate_some(Run *r, llamac_sequence *sequence, const int *tokens, int max, int pos) {
    llamac_batch_token batch[MAX_ROWS];
    llamac_error error;
    int n = max < MAX_ROWS ? max : MAX_ROWS;
    for (int i = 0; i < n; i++)
        batch[i] = (llamac_batch_token){sequence, tokens[i], pos + i, /*logits*/ true};
    if (!llamac_evaluate(r->engine, batch, n, &error)) die("model", "%s", error.text);
    return n;
}

// Returns the negative log likelihood of a token by the logits of token i of the last call.
static double nll_of(Run *r, int i, int token) {
    llamac_error error;
    double nll = 0;
    if (!llamac_nll(r->engine, i, token, &nll, &error)) die("model", "%s", error.text);
    return nll;
}

// Prints exp of the mean negative log likelihood of the tokens of a text. The text is cut into
// windows of the context's length, and each window starts with an empty cache. Every token of a
// window predicts the next token of the text, so the last one predicts the first token of the next
// window.
static void perplexity(Run *r, Text text) {
    int n, *tokens = encode(r, text, true, &n);
    int inputs = n - 1, context = r->options.positions;
    int window = inputs < context ? inputs : context;
    if (inputs < 1) die("perplexity", "the text has no tokens");
    start_engine(r, window);
    llamac_sequence *sequence = new_sequence(r);
    double nll = 0;
    for (int at = 0, T; at < inputs; at += T) {
        int pos = at % window, left = inputs - at, room = window - pos;
        T = evaluate_some(r, sequence, tokens + at, left < room ? left : room, pos);
        for (int t = 0; t < T; t++) nll += nll_of(r, t, tokens[at + t + 1]);
        if (!llamac_stderr_is_terminal()) continue;
        fprintf(stderr, "\r%d of %d tokens%s", at + T, inputs, at + T < inputs ? "" : "\n");
    }
    printf("perplexity %.4f (%d tokens, %.6f nats per token, %.6f bits per byte)\n",
           exp(nll / inputs), inputs, nll / inputs, nll / log(2) / (double)text.n);
    llamac_sequence_free(sequence);
    llamac_free(tokens);
}

// Writes the logits of all tokens of the prompt, (tokens, vocab_size) float32, for comparison with
// other programs.
static void dump_logits(Run *r, Text prompt) {
    int n, *tokens = encode_prompt(r, prompt, &n);
    if (n > r->options.positions)
        die("prompt", "%d tokens, but the context is %d", n, r->options.positions);
    start_engine(r, n);
    llamac_sequence *sequence = new_sequence(r);
    for (int at = 0, T; at < n; at += T) {
        T = evaluate_some(r, sequence, tokens + at, n - at, at);
        for (int t = 0; t < T; t++) {
            nll_of(r, t, 0); // dies if the logits are not finite
            const char *logits = (const char *)llamac_batch_logits(r->engine, t);
            print_bytes(logits, sizeof(float) * r->info.vocab_size);
        }
    }
    llamac_sequence_free(sequence);
    llamac_free(tokens);
}

// Prints the token ids of the prompt, or of each line of the input. A chat encodes them as turns of
// the user in the chat template; other modes encode the bare text without BOS.
static void tokenize(Run *r, Text prompt, bool has_prompt, const char *system, bool is_chat) {
    Text line = {0};
    for (bool first = true; has_prompt ? first : ask(&r->input, "", &line); first = false) {
        Text words = has_prompt ? prompt : line;
        int n, *tokens;
        if (is_chat) tokens = encode_turn(r, first, system, words, &n);
        else tokens = encode(r, words, false, &n);
        for (int i = 0; i < n; i++) printf("%s%d", i ? " " : "", tokens[i]);
        printf("\n");
        llamac_free(tokens);
    }
    free(line.s);
}

// ----------------------------------------------------------------------------
// Speed

// Tokens of the prompt of --bench. bench/gpu.py compiles programs with longer ones.
#ifndef BENCH_PROMPT
#define BENCH_PROMPT 128
#endif

enum {
    BENCH_RUNS = 5,
    BENCH_SECONDS = 2, // no run begins later than this after the start of the first one
    WARM_UP = 20,      // tokens before the first run
};

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n) {
    qsort(values, n, sizeof *values, compare_doubles);
    return values[n / 2];
}

// Sequences that are evaluated together.
typedef struct {
    llamac_engine *engine;
    llamac_sequence **sequences; // (n,)
    llamac_batch_token *batch;   // (n * max tokens of a sequence in a call,)
    int n;
} BenchTexts;

// Evaluates T tokens of each sequence from position pos on. Those of sequence i begin at
// tokens[i * stride].
static void bench_evaluate(BenchTexts *b, const int *tokens, int stride, int T, int pos) {
    llamac_error error;
    int count = 0;
    for (int i = 0; i < b->n; i++)
        for (int t = 0; t < T; t++)
            b->batch[count++] = (llamac_batch_token){b->sequences[i], tokens[i * stride + t],
                                                     pos + t, /*logits*/ t == T - 1};
    if (!llamac_evaluate(b->engine, b->batch, count, &error)) die("model", "%s", error.text);
}

// Evaluates T tokens of each sequence one by one: `token` at position 0, then the most likely token
// each time.
static void decode_greedily(BenchTexts *b, int token, int T) {
    llamac_error error;
    llamac_sampler greedy = {0};
    int next[MAX_AT_ONCE];
    for (int i = 0; i < b->n; i++) next[i] = token;
    for (int pos = 0; pos < T; pos++) {
        bench_evaluate(b, next, 1, 1, pos);
        for (int i = 0; i < b->n; i++) {
            next[i] = llamac_sample(b->sequences[i], &greedy, &error);
            if (next[i] < 0) die("model", "%s", error.text);
        }
    }
}

// Prints the speed of the model as a table or as JSON: medians over the runs. Speeds are totals
// over the n_texts texts. `began` is the time when the program began. Each run also measures the
// bandwidth of reading the weights without computing, and the share of it that decoding reached. It
// does so right after decoding, so that other programs affect both measurements alike.
static void bench(Run *r, double began, int n_texts, bool json) {
    double prompt[BENCH_RUNS], decode[BENCH_RUNS]; // seconds
    double bandwidth[BENCH_RUNS], share[BENCH_RUNS];
    int runs = 0, tokens[BENCH_PROMPT], bos = r->info.has_tokenizer ? r->info.bos : 0;
    int context = r->options.positions;
    int n = context < BENCH_PROMPT ? context : BENCH_PROMPT;
    int decoded = r->steps < context ? r->steps : context;
    double bytes = llamac_bytes_per_token(r->model);
    for (int i = 0; i < n; i++) tokens[i] = (int)((int64_t)i * r->info.vocab_size / n);
    start_engine(r, n > decoded ? n : decoded);
    llamac_sequence *sequences[MAX_AT_ONCE];
    BenchTexts b = {.engine = r->engine, .sequences = sequences, .n = n_texts};
    b.batch = resize(NULL, (size_t)n_texts * n, sizeof *b.batch);
    for (int i = 0; i < n_texts; i++) sequences[i] = new_sequence(r);
    decode_greedily(&b, bos, 1);
    double first_token = llamac_seconds() - began;
    for (int i = 0; i < WARM_UP; i++) bench_evaluate(&b, &bos, 0, 1, 0);
    bench_evaluate(&b, tokens, 0, n, 0);
    double begin = llamac_seconds();
    for (; runs < BENCH_RUNS && (!runs || llamac_seconds() - begin < BENCH_SECONDS); runs++) {
        double before = llamac_seconds();
        bench_evaluate(&b, tokens, 0, n, 0);
        double middle = llamac_seconds();
        decode_greedily(&b, bos, decoded);
        prompt[runs] = middle - before;
        decode[runs] = llamac_seconds() - middle;
        bandwidth[runs] = llamac_bandwidth(r->engine);
        share[runs] = bandwidth[runs] > 0 ? decoded / decode[runs] * bytes / bandwidth[runs] : 0;
    }
    double prompt_speed = n_texts * n / median(prompt, runs);
    double calls = decoded / median(decode, runs); // per second; each reads all weights
    printf(json ? "{\"threads\": %d, \"texts\": %d, \"first_token_ms\": %.2f, "
                  "\"prompt_tokens\": %d, "
                  "\"prompt_tokens_per_s\": %.1f, \"decode_tokens\": %d, "
                  "\"decode_tokens_per_s\": %.1f, \"bytes_per_token\": %.0f, "
                  "\"decode_gb_per_s\": %.2f, \"bandwidth_gb_per_s\": %.2f, "
                  "\"bandwidth_share\": %.3f, \"peak_mib\": %.1f}\n"
                : "threads                %12d\n"
                  "texts at once          %12d\n"
                  "first token            %12.2f ms from the start\n"
                  "prompt of %4d tokens  %12.1f tokens/s\n"
                  "decoding %4d tokens   %12.1f tokens/s\n"
                  "weights per token      %12.0f bytes\n"
                  "weights read, decoding %12.2f GB/s\n"
                  "weights read, alone    %12.2f GB/s\n"
                  "ratio of these two     %12.3f\n"
                  "peak memory            %12.1f MiB\n",
           llamac_threads(r->engine), n_texts, first_token * 1e3, n, prompt_speed, decoded,
           n_texts * calls, bytes, bytes * calls / 1e9, median(bandwidth, runs) / 1e9,
           median(share, runs), (double)llamac_peak_memory() / (1 << 20));
    for (int i = 0; i < n_texts; i++) llamac_sequence_free(sequences[i]);
    free(b.batch);
}

// ----------------------------------------------------------------------------
// The program

// Returns the path of the model file, to be freed. In the folder of a run it is model.gguf.
static char *model_path(const char *path) {
    Text text = {0};
    append_string(&text, path);
    if (llamac_is_folder(path)) append_string(&text, "/model.gguf");
    append(&text, "", 1); // the zero at the end of a C string
    return text.s;
}

// Opens the model, without its own tokenizer if -z names another. If a tokenizer is then needed and
// missing, opens that of -z, or else tokenizer.bin in the working directory.
static void load(Run *r, const Options *o, bool needs_tokenizer) {
    llamac_error error;
    char *path = model_path(o->model);
    int flags = (o->tokenizer ? LLAMAC_NO_TOKENIZER : 0) | (o->stream ? LLAMAC_STREAM : 0);
    r->model = llamac_open(path, flags, &error);
    if (!r->model || (o->verify && !llamac_verify(r->model, &error)))
        die(path, "%s", message_of(&error, path));
    free(path);
    const char *tokenizer = o->tokenizer ? o->tokenizer : "tokenizer.bin";
    bool missing = needs_tokenizer && !llamac_describe(r->model).has_tokenizer;
    if (missing && !llamac_open_tokenizer(r->model, tokenizer, &error))
        die(tokenizer, "%s", message_of(&error, tokenizer));
    r->info = llamac_describe(r->model);
}

int main(int argc, char **argv) {
    llamac_begin_program(&argc, &argv);
    double began = llamac_seconds();
    Options o = parse_options(argc, argv);
    Run r = {0};
    load(&r, &o, !o.verify && !o.bench);
    if (o.context > r.info.seq_len)
        die("-c", "%.0f tokens, but the model's context is %d", o.context, r.info.seq_len);
    bool reads_logits =
        o.perplexity || o.logits || o.at_once > 1 || o.prompts || o.jsonl || o.lookup;
    r.options = (llamac_options){.positions = o.context ? (int)o.context : r.info.seq_len,
                                 .n_threads = (int)o.threads,
                                 .device = o.device,
                                 .no_copy = o.no_copy,
                                 .sample_only = !reads_logits && !needs_logits(&o),
                                 .kv_bits = kv_bits(o.kv),
                                 .isa = getenv("LLAMAC_ISA")};
    r.raw = o.raw && !o.jsonl, r.stops = o.stops, r.n_stops = o.n_stops;
    r.prompt_cache = o.prompt_cache, r.json_object = o.json_object, r.lookup.on = o.lookup;
    r.steps = o.steps ? (int)o.steps : r.options.positions;
    r.sampler = (llamac_sampler){.temperature = (float)o.temperature,
                                 .topp = (float)o.topp,
                                 .state = o.seed ? (uint64_t)o.seed : (uint64_t)time(NULL),
                                 .topk = (int)o.topk,
                                 .minp = (float)o.minp,
                                 .repeat_penalty = (float)o.repeat_penalty,
                                 .frequency_penalty = (float)o.frequency_penalty,
                                 .presence_penalty = (float)o.presence_penalty};
    int at_once = o.at_once ? (int)o.at_once : o.prompts || o.jsonl ? AT_ONCE : 1;

    bool has_prompt = o.prompt || o.prompt_file;
    // --verify, --bench, --logits and --perplexity ignore -m; --tokenize encodes turns of a chat
    // with -m chat
    bool is_chat = !strcmp(o.mode, "chat") && !o.verify && !o.bench && !o.logits && !o.perplexity;
    llamac_error error;
    bool has_template = (is_chat || o.jsonl) && llamac_use_template(r.model, o.template, &error);
    // Without a template, --jsonl answers requests with a prompt, but not those with messages
    if ((is_chat || (o.jsonl && o.template)) && !has_template) {
        if (o.template) die("--template", "%s", error.text);
        die(o.model, "%s", message_of(&error, o.model));
    }
    Text prompt = {0}, text = {0};
    bool is_stdin = o.prompt && !strcmp(o.prompt, "-");
    if (is_stdin) prompt = read_file(&r.input, "-");
    else if (o.prompt) append_string(&prompt, o.prompt);
    if (o.prompt_file) prompt = read_file(&r.input, o.prompt_file);
    if (o.verify) printf("the weights are intact\n");
    else if (o.perplexity) perplexity(&r, text = read_file(&r.input, o.perplexity));
    else if (o.logits) dump_logits(&r, prompt);
    else if (o.bench) bench(&r, began, at_once, o.json);
    else if (o.tokenize) tokenize(&r, prompt, has_prompt, o.system, is_chat);
    else if (is_chat) chat(&r, prompt, has_prompt, o.system);
    else if (o.jsonl) answer_requests(&r, at_once, has_template ? "" : error.text);
    else if (o.prompts) generate_lines(&r, text = read_file(&r.input, o.prompts), at_once);
    else generate(&r, &prompt, 1, at_once, at_once);
    flush();

    for (int i = 0; i < r.n_grammars; i++) llamac_grammar_free(r.grammars[i]);
    free(r.grammars);
    llamac_stop(r.engine);
    llamac_close(r.model);
    free(r.batch);
    free(r.input.bytes.s);
    free(prompt.s);
    free(text.s);
    return 0;
}

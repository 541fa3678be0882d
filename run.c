// Runs a Llama model. This is a program on the library in runtime/: it continues texts, chats, and
// measures perplexity and speed. Text goes to stdout, everything else to stderr. An error ends the
// program with one line `run: <subject>: <message>` and exit code 1.
#define _DEFAULT_SOURCE 1 // POSIX beside C11
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include "runtime/llamac.h"

// ----------------------------------------------------------------------------
// Errors, memory, texts

// Ends the program with the line `run: <subject>: <message>`. The subject may be a path: it keeps
// its UTF-8, and '?' replaces only control characters. The message may quote text of the user that
// was cut, by %.40s for example, in the middle of a UTF-8 character: '?' replaces every byte that
// is not printable ASCII.
__attribute__((format(printf, 2, 3), noreturn)) static void die(const char *subject,
                                                                const char *format, ...) {
    char message[600];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    fflush(stdout);
    fputs("run: ", stderr);
    for (const char *c = subject; *c; c++)
        fputc((unsigned char)*c < ' ' || *c == 127 ? '?' : *c, stderr);
    fputs(": ", stderr);
    for (const char *c = message; *c; c++) fputc(*c < ' ' || *c > '~' ? '?' : *c, stderr);
    fputc('\n', stderr);
    exit(1);
}

static void *resize(void *p, size_t n, size_t size) {
    p = n < SIZE_MAX / size ? realloc(p, (n + 1) * size) : NULL; // + 1: never 0 bytes
    if (!p) die("memory", "there is not enough");
    return p;
}

typedef struct {
    char *s;
    size_t n, capacity;
} Text; // a growing string, which may contain zero bytes

enum { MAX_TEXT = 1 << 27 }; // bytes; also bounds the input from an endless stream

static void append(Text *text, const char *s, size_t n) {
    if (n > MAX_TEXT - text->n) die("text", "it has more than %d bytes", MAX_TEXT);
    if (text->n + n > text->capacity) {
        text->capacity = 2 * text->capacity + n;
        text->s = resize(text->s, text->capacity, 1);
    }
    if (n) memcpy(text->s + text->n, s, n);
    text->n += n;
}

// Reads a whole file or pipe, without the byte-order mark that some editors put before UTF-8.
static Text read_file(const char *path) {
    Text text = {0};
    char buffer[1 << 16];
    FILE *file = fopen(path, "rb");
    if (!file) die(path, "%s", strerror(errno));
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, file));) append(&text, buffer, n);
    if (ferror(file)) die(path, "%s", strerror(errno));
    fclose(file);
    if (text.n >= 3 && !memcmp(text.s, "\xef\xbb\xbf", 3)) memmove(text.s, text.s + 3, text.n -= 3);
    return text;
}

// Seconds on a monotonic clock.
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// ----------------------------------------------------------------------------
// Printing: whole UTF-8 characters, without characters that a terminal could take for a command

typedef struct {
    bool raw;     // print all bytes as they are
    char held[4]; // bytes that wait until their character is complete
    int n;        // number of bytes held
} Printer;

static void print_bytes(const char *s, size_t n) {
    if (n && fwrite(s, 1, n, stdout) != n) die("stdout", "%s", strerror(errno));
}

static void flush(void) {
    if (fflush(stdout)) die("stdout", "%s", strerror(errno));
}

// Prints a character, unless it is a control character (C0, DEL, C1) other than newline and tab.
static void print_character(const char *s, int n) {
    unsigned char c = s[0];
    bool c0 = n == 1 && ((c < ' ' && c != '\n' && c != '\t') || c == 127);
    bool c1 = n == 2 && c == 0xc2 && (unsigned char)s[1] < 0xa0;
    if (!c0 && !c1) print_bytes(s, n);
}

// Prints the held bytes, except an incomplete character to which later bytes may still belong.
// U+FFFD replaces each byte that does not begin a valid character. `end`: no bytes follow.
static void print_held(Printer *p, bool end) {
    while (p->n) {
        unsigned char c = p->held[0];
        int valid = llamac_utf8(p->held, p->n); // length of a complete character, or 0
        int expected = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1; // by its first byte
        // No later byte can make the character valid (used only if it is not valid yet)
        bool broken = end || c >= 0xf5 || p->n >= expected;
        for (int i = 1; i < p->n; i++) broken |= (p->held[i] & 0xc0) != 0x80;
        if (!valid && !broken) return;
        if (valid) print_character(p->held, valid);
        else print_bytes("\xef\xbf\xbd", 3);
        int used = valid ? valid : 1;
        memmove(p->held, p->held + used, p->n -= used);
    }
}

static void print(Printer *p, const char *s, size_t n) {
    if (p->raw) print_bytes(s, n);
    for (size_t i = 0; i < n && !p->raw; i++) {
        p->held[p->n++] = s[i];
        print_held(p, false);
    }
}

static void print_end(Printer *p) {
    print_held(p, true);
    print_bytes("\n", 1);
    flush();
}

// Prints a question and reads a line, without its newline. Returns false at the end of the input.
static bool ask(const char *question, Text *line) {
    print_bytes(question, strlen(question));
    flush();
    int c;
    for (line->n = 0; (c = getchar()) != EOF && c != '\n';) append(line, &(char){(char)c}, 1);
    if (ferror(stdin)) die("stdin", "%s", strerror(errno));
    return c != EOF || line->n;
}

// ----------------------------------------------------------------------------
// Evaluating tokens: the engine, and the window of tokens that the model sees

typedef struct {
    llamac_model *model;
    llamac_info info;
    llamac_options options; // options.positions is the context: max tokens that the model sees
    llamac_engine *engine;
    llamac_sequence *sequence;
    llamac_sampler sampler;
    Printer printer;
    int steps;   // max tokens of a text, or of an answer in a chat
    int *window; // tokens whose keys and values are cached, at most llamac_positions(engine)
    int pos;     // number of tokens in the window
    bool slid;   // the window has slid at least once
    bool told;   // the user has been told that it slid
} Run;

// Starts an engine whose sequences have up to `positions` tokens; the caller passes no more than
// the context.
static void start(Run *r, int positions) {
    llamac_options o = r->options;
    llamac_error error;
    o.positions = positions;
    r->engine = llamac_start(r->model, &o, &error);
    if (!r->engine) die(!strcmp(o.device, "cuda") ? "cuda" : "start", "%s", error.text);
    r->sequence = llamac_sequence_new(r->engine, &error);
    if (!r->sequence) die("start", "%s", error.text);
    if (*llamac_note(r->engine)) fprintf(stderr, "%s\n", llamac_note(r->engine));
    r->window = resize(NULL, positions, sizeof(int));
}

// Evaluates n tokens from position pos on.
static void forward(Run *r, const int *tokens, int n, int pos) {
    llamac_error error;
    if (!llamac_forward(r->sequence, tokens, n, pos, &error)) die("model", "%s", error.text);
}

static int sample(Run *r, llamac_sampler *sampler) {
    llamac_error error;
    int token = llamac_sample(r->sequence, sampler, &error);
    if (token < 0) die("model", "%s", error.text);
    return token;
}

// Makes room in the window: its first half then holds the latest tokens of the text, ending with
// the n new ones (only the last of them if n exceeds the half). If the half has two places or more,
// the first token of the text, usually BOS, replaces the oldest of these. The caller evaluates this
// half again. The other half fills before the window slides again, so each token is evaluated twice
// on average, however long the text is. Returns the number of tokens in the window.
static int slide(Run *r, const int *tokens, int n) {
    int positions = llamac_positions(r->engine), half = positions > 3 ? positions / 2 : 1;
    int first = r->pos ? r->window[0] : tokens[0];
    int new = n < half ? n : half, old = half - new;
    r->slid = true;
    memmove(r->window, r->window + r->pos - old, old * sizeof(int));
    memcpy(r->window + old, tokens + n - new, new * sizeof(int));
    if (half > 1) r->window[0] = first;
    return half;
}

// Evaluates the next n tokens of the text. If they do not fit into the window, slides it first and
// evaluates all tokens that it then holds; new tokens that do not fit into the half are never
// evaluated.
static void feed(Run *r, const int *tokens, int n) {
    if (n > llamac_positions(r->engine) - r->pos) {
        n = slide(r, tokens, n);
        tokens = r->window;
        r->pos = 0;
    } else memcpy(r->window + r->pos, tokens, n * sizeof(int));
    forward(r, tokens, n, r->pos);
    r->pos += n;
}

static void print_token(Run *r, int previous, int token) {
    char buffer[256], *text = buffer;
    size_t n = llamac_decode(r->model, previous, token, buffer, sizeof buffer);
    if (n > sizeof buffer) {
        text = resize(NULL, n, 1);
        llamac_decode(r->model, previous, token, text, n);
    }
    print(&r->printer, text, n);
    if (text != buffer) free(text);
    flush();
}

// Ends the line of a text, and then reports, once, that the window slid. An earlier report would
// interrupt the text if stdout and stderr are the same terminal.
static void end_text(Run *r) {
    print_end(&r->printer);
    if (r->slid && !r->told)
        fprintf(stderr, "the context of %d tokens is full: it slides over the text\n",
                llamac_positions(r->engine));
    r->told = r->slid;
}

// Samples and prints up to `max` tokens; stops early at a token that ends the text. *last is the
// last token of the text, already evaluated, and becomes the last token printed. Each printed token
// is evaluated, except number `max`. Returns the number of tokens printed.
static int continue_text(Run *r, int *last, int max) {
    for (int n = 0; n < max; n++) {
        int next = sample(r, &r->sampler);
        if (llamac_ends(r->model, next)) return n;
        print_token(r, *last, next);
        *last = next;
        if (n + 1 < max) feed(r, last, 1);
    }
    return max;
}

// ----------------------------------------------------------------------------
// Texts and chats

static int *encode(const Run *r, Text text, bool bos, int *n) {
    llamac_error error;
    int *tokens = llamac_encode(r->model, text.s, text.n, bos, n, &error);
    if (!tokens) die("text", "%s", error.text);
    return tokens;
}

// Returns whether the prompt is encoded with BOS. An empty prompt always is, to have a token.
static bool wants_bos(const Run *r, Text prompt) { return r->info.add_bos || !prompt.n; }

// Encodes the prompt, which must have at least one token.
static int *encode_prompt(const Run *r, Text prompt, int *n) {
    int *tokens = encode(r, prompt, wants_bos(r, prompt), n);
    if (*n == 0) die("prompt", "it has no tokens");
    return tokens;
}

// Prints the prompt and its continuation: at most r->steps tokens in all. BOS is not counted.
static void generate(Run *r, Text prompt) {
    int n, evaluated = 0, prompt_evaluated = 0, *tokens = encode_prompt(r, prompt, &n);
    int64_t total = (int64_t)r->steps + wants_bos(r, prompt);
    int max = (int)(total - n);
    double begin = 0, middle = 0, end;
    // Without BOS, the first token is decoded as if it followed BOS
    for (int i = 0; i < n && i < total; i++)
        print_token(r, i ? tokens[i - 1] : r->info.bos, tokens[i]);
    if (max > 0) {
        int context = r->options.positions;
        // The last token is not evaluated, so r->steps positions are enough, even with BOS
        start(r, r->steps < context ? r->steps : context);
        begin = seconds();
        feed(r, tokens, n);
        middle = seconds();
        prompt_evaluated = r->pos; // fewer than n if the window slid
        int printed = continue_text(r, &tokens[n - 1], max);
        evaluated = printed < max ? printed : max - 1;
    }
    end = seconds();
    end_text(r);
    if (max > 0) {
        fprintf(stderr, "achieved tok/s: %f\n", evaluated / (end - middle));
        fprintf(stderr, "prompt: %d tokens evaluated, tok/s: %f\n", prompt_evaluated,
                prompt_evaluated / (middle - begin));
    } else {
        fprintf(stderr, "nothing was added: the prompt has %d tokens, and -n %d counts them too\n",
                n, r->steps);
    }
    llamac_free(tokens);
}

static int *encode_turn(const Run *r, bool first, const char *system, Text words, int *n) {
    llamac_error error;
    int *tokens = llamac_encode_turn(r->model, first, system, words.s, words.n, n, &error);
    if (!tokens) die("text", "%s", error.text);
    return tokens;
}

// Alternates turns of user and assistant until the input ends. The first words of the user may come
// from -i or -f, the system prompt from -y.
static void chat(Run *r, Text words, bool has_words, const char *system) {
    int pending = -1; // last token of an answer that was cut off, not evaluated yet; -1: none
    Text line = {0}, prompt = {0};
    if (system) append(&prompt, system, strlen(system));
    else ask("Enter system prompt (optional): ", &prompt);
    append(&prompt, "", 1); // the zero at the end of a C string
    if (strlen(prompt.s) < prompt.n - 1) die("system prompt", "it holds a zero byte");
    start(r, r->options.positions);
    for (bool first = true; (first && has_words) || ask("User: ", &line); first = false) {
        int n, *tokens = encode_turn(r, first, prompt.s, first && has_words ? words : line, &n);
        if (pending >= 0) feed(r, &pending, 1);
        feed(r, tokens, n);
        print_bytes("Assistant: ", 11);
        int last = tokens[n - 1];
        bool cut_off = continue_text(r, &last, r->steps) == r->steps;
        pending = cut_off ? last : -1;
        end_text(r);
        if (cut_off) fprintf(stderr, "the answer was cut off after %d tokens (-n)\n", r->steps);
        llamac_free(tokens);
    }
    free(line.s);
    free(prompt.s);
}

// ----------------------------------------------------------------------------
// Perplexity and logits

enum { MAX_ROWS = 128 }; // tokens whose logits are kept at once

// Evaluates up to `max` tokens from position pos on, at most MAX_ROWS, with the logits of each.
// Returns the number of tokens evaluated.
static int evaluate_some(Run *r, const int *tokens, int max, int pos) {
    llamac_batch_token batch[MAX_ROWS];
    llamac_error error;
    int n = max < MAX_ROWS ? max : MAX_ROWS;
    for (int i = 0; i < n; i++)
        batch[i] = (llamac_batch_token){r->sequence, tokens[i], pos + i, /*logits*/ true};
    if (!llamac_evaluate(r->engine, batch, n, &error)) die("model", "%s", error.text);
    return n;
}

// The negative log likelihood of a token by the logits of token i of the last call.
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
    start(r, window);
    double nll = 0;
    for (int at = 0, T; at < inputs; at += T) {
        int pos = at % window, left = inputs - at, room = window - pos;
        T = evaluate_some(r, tokens + at, left < room ? left : room, pos);
        for (int t = 0; t < T; t++) nll += nll_of(r, t, tokens[at + t + 1]);
        if (!isatty(2)) continue;
        fprintf(stderr, "\r%d of %d tokens%s", at + T, inputs, at + T < inputs ? "" : "\n");
    }
    printf("perplexity %.4f (%d tokens, %.6f nats per token, %.6f bits per byte)\n",
           exp(nll / inputs), inputs, nll / inputs, nll / log(2) / (double)text.n);
    llamac_free(tokens);
}

// Writes the logits of all tokens of the prompt, (tokens, vocab_size) float32, for comparison with
// other programs.
static void dump_logits(Run *r, Text prompt) {
    int n, *tokens = encode_prompt(r, prompt, &n);
    if (n > r->options.positions)
        die("prompt", "%d tokens, but the context is %d", n, r->options.positions);
    start(r, n);
    for (int at = 0, T; at < n; at += T) {
        T = evaluate_some(r, tokens + at, n - at, at);
        for (int t = 0; t < T; t++) {
            nll_of(r, t, 0); // dies if the logits are not finite
            const char *logits = (const char *)llamac_batch_logits(r->engine, t);
            print_bytes(logits, sizeof(float) * r->info.vocab_size);
        }
    }
    llamac_free(tokens);
}

// Prints the token ids of the prompt, or of each line of the input. A chat encodes them as turns of
// the user in the chat template; other modes encode the bare text without BOS.
static void tokenize(Run *r, Text prompt, bool has_prompt, const char *system, bool is_chat) {
    Text line = {0};
    for (bool first = true; has_prompt ? first : ask("", &line); first = false) {
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

enum {
    BENCH_RUNS = 5,
    BENCH_SECONDS = 2,  // a further run begins only within this time from the start of the first
    BENCH_PROMPT = 128, // tokens
    WARM_UP = 20,       // tokens before the first run
};

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n) {
    qsort(values, n, sizeof *values, compare_doubles);
    return values[n / 2];
}

// Peak memory of the process in MiB.
static double peak_memory(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
#ifdef __APPLE__
    return used.ru_maxrss / 1048576.0; // bytes there, KiB elsewhere
#else
    return used.ru_maxrss / 1024.0;
#endif
}

// Evaluates n tokens one by one: `token` at position 0, then the most likely token each time.
static void decode_greedily(Run *r, int token, int n) {
    llamac_sampler greedy = {0};
    for (int pos = 0; pos < n; pos++) {
        forward(r, &token, 1, pos);
        token = sample(r, &greedy);
    }
}

// Prints the speed of the model, as a table or as JSON: medians over the runs. `began` is the time
// when the program began. Each run also measures the bandwidth of reading the weights without
// computing, and the share of it that decoding reached. It does so right after decoding, before
// other programs change the speed of the machine.
static void bench(Run *r, double began, bool json) {
    double prompt[BENCH_RUNS], decode[BENCH_RUNS]; // seconds
    double bandwidth[BENCH_RUNS], share[BENCH_RUNS];
    int runs = 0, tokens[BENCH_PROMPT], bos = r->info.has_tokenizer ? r->info.bos : 0;
    int context = r->options.positions;
    int n = context < BENCH_PROMPT ? context : BENCH_PROMPT;
    int decoded = r->steps < context ? r->steps : context;
    double bytes = llamac_bytes_per_token(r->model);
    for (int i = 0; i < n; i++) tokens[i] = (int)((int64_t)i * r->info.vocab_size / n);
    start(r, n > decoded ? n : decoded);
    decode_greedily(r, bos, 1);
    double first_token = seconds() - began;
    for (int i = 0; i < WARM_UP; i++) forward(r, &bos, 1, 0);
    forward(r, tokens, n, 0);
    double begin = seconds();
    for (; runs < BENCH_RUNS && (!runs || seconds() - begin < BENCH_SECONDS); runs++) {
        double before = seconds();
        forward(r, tokens, n, 0);
        double middle = seconds();
        decode_greedily(r, bos, decoded);
        prompt[runs] = middle - before;
        decode[runs] = seconds() - middle;
        bandwidth[runs] = llamac_bandwidth(r->engine);
        share[runs] = bandwidth[runs] > 0 ? decoded / decode[runs] * bytes / bandwidth[runs] : 0;
    }
    double decode_speed = decoded / median(decode, runs);
    printf(json ? "{\"threads\": %d, \"first_token_ms\": %.2f, \"prompt_tokens\": %d, "
                  "\"prompt_tokens_per_s\": %.1f, \"decode_tokens\": %d, "
                  "\"decode_tokens_per_s\": %.1f, \"bytes_per_token\": %.0f, "
                  "\"decode_gb_per_s\": %.2f, \"bandwidth_gb_per_s\": %.2f, "
                  "\"bandwidth_share\": %.3f, \"peak_mib\": %.1f}\n"
                : "threads                %12d\n"
                  "first token            %12.2f ms from the start\n"
                  "prompt of %4d tokens  %12.1f tokens/s\n"
                  "decoding %4d tokens   %12.1f tokens/s\n"
                  "weights per token      %12.0f bytes\n"
                  "read while decoding    %12.2f GB/s\n"
                  "read without computing %12.2f GB/s\n"
                  "share of that reached  %12.3f\n"
                  "peak memory            %12.1f MiB\n",
           llamac_threads(r->engine), first_token * 1e3, n, n / median(prompt, runs), decoded,
           decode_speed, bytes, bytes * decode_speed / 1e9, median(bandwidth, runs) / 1e9,
           median(share, runs), peak_memory());
}

// ----------------------------------------------------------------------------
// The command line

static const char help[] =
    "Usage: run MODEL [options]      MODEL: a GGUF file, or one of llama2.c's .bin files\n"
    "Defaults are in parentheses.\n"
    "  -t NUMBER        temperature, 0 is greedy (1.0)\n"
    "  -p NUMBER        sample from the most likely tokens with this total probability;\n"
    "                   0 or 1: from all (0.9)\n"
    "  -s NUMBER        seed, 0 takes the time (0)\n"
    "  -n NUMBER        tokens in all, prompt included, or of each answer in a chat;\n"
    "                   0 is the context (256)\n"
    "  -c NUMBER        context: max tokens that the model sees at once (the model's maximum)\n"
    "  -i TEXT          prompt\n"
    "  -f FILE          prompt from a file\n"
    "  -z FILE          tokenizer, in llama2.c's format (the model's own, or tokenizer.bin)\n"
    "  -m MODE          generate or chat (generate)\n"
    "  -y TEXT          system prompt of the chat\n"
    "  -j NUMBER        threads (as many as cores, 64 at most)\n"
    "  --kv NAME        how keys and values are kept: f32, f16 or q8\n"
    "                   (f32; f16 where the weights are quantised)\n"
    "  --no-copy        compute from the mapped file (shared between processes)\n"
    "                   instead of a faster copy of it\n"
    "  --device NAME    cpu, cuda, or auto: cuda if it can be used\n"
    "                   (runcuda: cuda; run: cpu, its only device)\n"
    "  --raw            print control characters that the model writes\n"
    "  --perplexity FILE  how well the model predicts a text\n"
    "  --template NAME  what the chat puts around your words: chatml, llama3, zephyr or llama2\n"
    "                   (as the model file says)\n"
    "  --tokenize       print the token ids of the prompt, or of each line of the input;\n"
    "                   with -m chat those of your turns\n"
    "  --verify         compare the weights with the checksum in the file\n"
    "  --logits         write the logits of every prompt token as float32\n"
    "  --bench          measure the speed with a prompt, then with -n tokens one by one;\n"
    "                   --json prints JSON\n"
    "  -h, --help       this text\n";

#ifdef CUDA
static const char default_device[] = "cuda";
#else
static const char default_device[] = "cpu";
#endif

typedef struct {
    const char *model, *prompt, *prompt_file, *tokenizer, *mode, *system;
    const char *template, *perplexity, *device, *kv;
    double temperature, topp, seed, steps, context, threads;
    bool raw, no_copy, tokenize, logits, verify, bench, json;
} Options;

// An option of the command line. One of `on`, `text` and `number` points to where its value is
// stored; the other two are NULL.
typedef struct {
    const char *flag;
    bool *on; // the option has no value
    const char **text;
    double *number, min, max;
    bool whole; // the number is a whole one
} Option;

static Option find_option(Options *o, const char *flag) {
    const Option options[] = {
        {"-t", .number = &o->temperature, .max = 1e6},
        {"-p", .number = &o->topp, .max = 1},
        {"-s", .number = &o->seed, .max = 9007199254740991, .whole = true},
        {"-n", .number = &o->steps, .max = INT_MAX, .whole = true},
        {"-c", .number = &o->context, .min = 1, .max = INT_MAX, .whole = true},
        {"-j", .number = &o->threads, .min = 1, .max = 1024, .whole = true},
        {"-i", .text = &o->prompt},
        {"-f", .text = &o->prompt_file},
        {"-z", .text = &o->tokenizer},
        {"-m", .text = &o->mode},
        {"-y", .text = &o->system},
        {"--kv", .text = &o->kv},
        {"--device", .text = &o->device},
        {"--perplexity", .text = &o->perplexity},
        {"--template", .text = &o->template},
        {"--no-copy", .on = &o->no_copy},
        {"--raw", .on = &o->raw},
        {"--tokenize", .on = &o->tokenize},
        {"--verify", .on = &o->verify},
        {"--logits", .on = &o->logits},
        {"--bench", .on = &o->bench},
        {"--json", .on = &o->json},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (!strcmp(flag, options[i].flag)) return options[i];
    die(flag, "no such option; see run --help");
}

// Parses a decimal number from o->min to o->max.
static double parse_number(const Option *o, const char *s) {
    char *end;
    double value = strtod(s, &end);
    bool plain = *s && strspn(s, o->whole ? "0123456789" : "0123456789.+-eE") == strlen(s);
    if (!plain || *end || !(value >= o->min && value <= o->max))
        die(o->flag, "'%.40s' is not a %snumber from %.0f to %.0f", s, o->whole ? "whole " : "",
            o->min, o->max);
    return value;
}

// Stores the value of an option; NULL: the command line has none.
static void set_option(const Option *o, const char *value) {
    if (!o->on && !value) die(o->flag, "its value is missing; see run --help");
    if (o->on) *o->on = true;
    else if (o->text) *o->text = value;
    else *o->number = parse_number(o, value);
}

// Bits of a number in the KV cache; 0 lets the library choose.
static int kv_bits(const char *name) {
    if (!name) return 0;
    if (!strcmp(name, "f32")) return 32;
    if (!strcmp(name, "f16")) return 16;
    if (!strcmp(name, "q8")) return 8;
    die("--kv", "'%.40s' is no type of the KV cache, expected f32, f16 or q8", name);
}

static void check_options(const Options *o) {
    const char *device = o->device;
    if (!o->model)
        die("no model given", "expected ./run model.gguf, options after it; see ./run --help");
    if (o->prompt && o->prompt_file) die("-f", "there is a prompt from -i already");
    if (o->tokenize + o->logits + o->verify + o->bench + (o->perplexity != NULL) > 1)
        die("options",
            "expected only one of --tokenize, --logits, --verify, --bench and --perplexity");
    if (o->json && !o->bench) die("--json", "expected --bench beside it");
    if (strcmp(o->mode, "generate") && strcmp(o->mode, "chat"))
        die("-m", "'%s' is no mode, expected generate or chat", o->mode);
    if (strcmp(device, "cpu") && strcmp(device, "cuda") && strcmp(device, "auto"))
        die("--device", "'%s' is no device, expected cpu, cuda or auto", device);
    if (!strcmp(device, "cuda") && strcmp(default_device, "cuda") != 0)
        die("--device", "this program computes on the CPU; make runcuda builds the one for GPUs");
    kv_bits(o->kv);
}

static Options parse_options(int argc, char **argv) {
    Options o = {
        .mode = "generate", .temperature = 1, .topp = 0.9, .steps = 256, .device = default_device};
    for (int i = 1; i < argc; i++) {
        char *flag = argv[i];
        if (!strcmp(flag, "--help") || !strcmp(flag, "-h"))
            print_bytes(help, strlen(help)), flush(), exit(0);
        if (i == 1 && *flag != '-') { // the model comes first
            o.model = flag;
            continue;
        }
        if (!o.model) continue; // check_options reports it, unless --help follows
        char *equals = strncmp(flag, "--", 2) ? NULL : strchr(flag, '='); // --kv=f16
        if (equals) *equals = 0;
        Option option = find_option(&o, flag);
        if (equals && option.on) *equals = '=', die(flag, "this option takes no value");
        set_option(&option, equals ? equals + 1 : option.on ? NULL : argv[++i]);
    }
    check_options(&o);
    return o;
}

// Reading a truncated mapping raises SIGBUS: another program may have cut off the model file.
static void file_shrank(int number) {
    static const char message[] = "run: model: its file was cut off while in use\n";
    ssize_t written = write(2, message, sizeof message - 1);
    (void)number, (void)written;
    _exit(1);
}

// Returns the library's message without the path at its beginning, because die prints the path.
static const char *message_of(const llamac_error *error, const char *path) {
    size_t n = strlen(path) < 200 ? strlen(path) : 200; // the library shows 200 bytes of a path
    return strlen(error->text) > n + 2 && !memcmp(error->text + n, ": ", 2) ? error->text + n + 2
                                                                            : error->text;
}

// Opens the model, without its own tokenizer if -z names another. Then opens the tokenizer of -z,
// or else tokenizer.bin in the working directory, if one is needed and missing.
static void load(Run *r, const Options *o, bool needs_tokenizer) {
    llamac_error error;
    r->model = llamac_open(o->model, o->tokenizer ? LLAMAC_NO_TOKENIZER : 0, &error);
    if (!r->model || (o->verify && !llamac_verify(r->model, &error)))
        die(o->model, "%s", message_of(&error, o->model));
    const char *tokenizer = o->tokenizer ? o->tokenizer : "tokenizer.bin";
    bool missing = needs_tokenizer && !llamac_describe(r->model).has_tokenizer;
    if (missing && !llamac_open_tokenizer(r->model, tokenizer, &error))
        die(tokenizer, "%s", message_of(&error, tokenizer));
    r->info = llamac_describe(r->model);
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN); // a reader that closed the pipe is reported as a write error
    signal(SIGBUS, file_shrank);
    double began = seconds();
    Options o = parse_options(argc, argv);
    Run r = {0};
    load(&r, &o, !o.verify && !o.bench);
    if (o.context > r.info.seq_len)
        die("-c", "%.0f tokens, but the model's context is %d", o.context, r.info.seq_len);
    r.options = (llamac_options){.positions = o.context ? (int)o.context : r.info.seq_len,
                                 .n_threads = (int)o.threads,
                                 .device = o.device,
                                 .no_copy = o.no_copy,
                                 .sample_only = !o.perplexity && !o.logits,
                                 .kv_bits = kv_bits(o.kv),
                                 .isa = getenv("LLAMAC_ISA")};
    r.printer.raw = o.raw;
    r.steps = o.steps ? (int)o.steps : r.options.positions;
    uint64_t seed = o.seed ? (uint64_t)o.seed : (uint64_t)time(NULL);
    r.sampler =
        (llamac_sampler){.temperature = (float)o.temperature, .topp = (float)o.topp, .state = seed};

    bool has_prompt = o.prompt || o.prompt_file;
    // --verify, --bench, --logits and --perplexity ignore -m; --tokenize obeys it, and encodes
    // turns for a chat
    bool is_chat = !strcmp(o.mode, "chat") && !o.verify && !o.bench && !o.logits && !o.perplexity;
    llamac_error error;
    if (is_chat && !llamac_use_template(r.model, o.template, &error)) {
        if (o.template) die("--template", "%s", error.text);
        die(o.model, "%s", message_of(&error, o.model));
    }
    Text prompt = {0}, text = {0};
    if (o.prompt) append(&prompt, o.prompt, strlen(o.prompt));
    if (o.prompt_file) prompt = read_file(o.prompt_file);
    if (o.verify) printf("the weights are intact\n");
    else if (o.perplexity) perplexity(&r, text = read_file(o.perplexity));
    else if (o.logits) dump_logits(&r, prompt);
    else if (o.bench) bench(&r, began, o.json);
    else if (o.tokenize) tokenize(&r, prompt, has_prompt, o.system, is_chat);
    else if (is_chat) chat(&r, prompt, has_prompt, o.system);
    else generate(&r, prompt);
    flush();

    llamac_sequence_free(r.sequence);
    llamac_stop(r.engine);
    llamac_close(r.model);
    free(r.window);
    free(prompt.s);
    free(text.s);
    return 0;
}

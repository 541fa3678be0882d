// Runs a Llama model: the program on the library in runtime/. It continues texts, chats, and measures perplexity and speed.
// Text goes to stdout, all else to stderr. A mistake ends in one line `run: <what>: <what is wrong>` and exit code 1.
#define _DEFAULT_SOURCE 1 // POSIX beside C11
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "runtime/llamac.h"

// ----------------------------------------------------------------------------
// Errors, memory, texts

// Ends the program: run: <what>: <message>
__attribute__((format(printf, 2, 3), noreturn)) static void die(const char *what, const char *format, ...) {
    char message[600];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    fflush(stdout);
    fputs("run: ", stderr);
    for (; *what; what++) fputc((unsigned char)*what < ' ' || *what == 127 ? '?' : *what, stderr);
    fputs(": ", stderr);
    for (const char *c = message; *c; c++) fputc(*c < ' ' || *c > '~' ? '?' : *c, stderr);
    fputc('\n', stderr);
    exit(1);
}

static void *resize(void *p, size_t n, size_t size) {
    p = n < SIZE_MAX / size ? realloc(p, (n + 1) * size) : NULL; // one more than asked, so that none is not zero bytes
    if (!p) die("memory", "there is not enough");
    return p;
}

typedef struct {
    char *s;
    size_t n, capacity;
} Text; // a string that grows; may hold zero bytes

enum { LONGEST_TEXT = 1 << 27 }; // bytes; what comes from an endless stream ends here

static void append(Text *text, const char *s, size_t n) {
    if (n > LONGEST_TEXT - text->n) die("text", "it has more than %d bytes", LONGEST_TEXT);
    if (text->n + n > text->capacity) text->s = resize(text->s, text->capacity = 2 * text->capacity + n, 1);
    if (n) memcpy(text->s + text->n, s, n);
    text->n += n;
}

// Reads a whole file, pipes too, without the mark that some editors put before UTF-8.
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

// Seconds on a clock that only goes forward.
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// ----------------------------------------------------------------------------
// Printing: whole UTF-8 characters, and none that a terminal could take for a command

typedef struct {
    bool raw;
    char held[4];
    int n;
} Printer; // held: the beginning of a character yet to be completed

static void print_bytes(const char *s, size_t n) {
    if (n && fwrite(s, 1, n, stdout) != n) die("stdout", "%s", strerror(errno));
}

static void flush(void) {
    if (fflush(stdout)) die("stdout", "%s", strerror(errno));
}

// A character, unless it is a control character other than newline and tab (C0, DEL, C1).
static void print_character(const char *s, int n) {
    unsigned char c = s[0];
    bool control = n == 1 ? (c < ' ' && c != '\n' && c != '\t') || c == 127 : c == 0xc2 && (unsigned char)s[1] < 0xa0;
    if (!control) print_bytes(s, n);
}

// Prints what of the held bytes is certain: whole characters, and U+FFFD for bytes that can begin none.
static void print_held(Printer *p, bool end) {
    while (p->n) {
        unsigned char c = p->held[0];
        int used = llamac_utf8(p->held, p->n), whole = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1;
        bool broken = c >= 0xf5;
        for (int i = 1; i < p->n; i++) broken |= (p->held[i] & 0xc0) != 0x80;
        if (!used && !broken && p->n < whole && !end) return;
        if (used) print_character(p->held, used);
        else print_bytes("\xef\xbf\xbd", 3), used = 1;
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

// Asks on stdout and reads a line, without its end, into *line. False at the end of the input.
static bool ask(const char *question, Text *line) {
    print_bytes(question, strlen(question));
    flush();
    int c;
    for (line->n = 0; (c = getchar()) != EOF && c != '\n';) append(line, &(char){(char)c}, 1);
    if (ferror(stdin)) die("stdin", "%s", strerror(errno));
    return c != EOF || line->n;
}

// ----------------------------------------------------------------------------
// A text as it grows: the session, and the window of it that the model sees

typedef struct {
    llamac_model *model;
    llamac_info info;
    llamac_options options; // positions: the context, tokens that the model sees at once
    llamac_session *session;
    llamac_sampler sampler;
    Printer printer;
    int steps;     // tokens that a text, or an answer in a chat, may have
    int *window;   // (positions of the session,) the tokens whose keys and values are cached
    int pos;       // how many of them there are
    bool slid;
} Run;

static void start(Run *r, int positions, llamac_logits_kept kept) {
    llamac_options o = r->options;
    llamac_error error;
    o.positions = positions, o.logits = kept;
    if (!(r->session = llamac_start(r->model, &o, &error))) die(strcmp(o.device, "cuda") ? "start" : "cuda", "%s", error.text);
    if (*llamac_note(r->session)) fprintf(stderr, "%s\n", llamac_note(r->session));
    r->window = resize(NULL, positions, sizeof(int));
}

// Makes room in a full window for n more tokens: what stays is the first token, BOS, and the latest of all, together half
// a window. As many again come before it slides next, so that a token is evaluated twice, however long the text.
static int slide(Run *r, const int *tokens, int n) {
    int positions = llamac_positions(r->session), half = positions > 3 ? positions / 2 : 1;
    int first = r->pos ? r->window[0] : tokens[0], new = n < half ? n : half, old = half - new;
    if (!r->slid) fprintf(stderr, "the context of %d tokens is full: it slides over the text\n", positions);
    r->slid = true;
    memmove(r->window, r->window + r->pos - old, old * sizeof(int));
    memcpy(r->window + old, tokens + n - new, new * sizeof(int));
    if (half > 1) r->window[0] = first;
    return half;
}

// Evaluates n more tokens.
static void feed(Run *r, const int *tokens, int n) {
    llamac_error error;
    if (n > llamac_positions(r->session) - r->pos) {
        n = slide(r, tokens, n);
        tokens = r->window;
        r->pos = 0;
    } else memcpy(r->window + r->pos, tokens, n * sizeof(int));
    if (!llamac_forward(r->session, tokens, n, r->pos, &error)) die("model", "%s", error.text);
    r->pos += n;
}

static void print_token(Run *r, int previous, int token) {
    char few[256], *text = few;
    size_t n = llamac_decode(r->model, previous, token, few, sizeof few);
    if (n > sizeof few) llamac_decode(r->model, previous, token, text = resize(NULL, n, 1), n);
    print(&r->printer, text, n);
    if (text != few) free(text);
    flush();
}

// Prints tokens after a text that ends with the token *last, which has been evaluated, until one that ends the text, or
// `most`. Returns how many; *last is the latest of them, which has not been evaluated if they are `most`.
static int continue_text(Run *r, int *last, int most) {
    llamac_error error;
    for (int n = 0;; feed(r, last, 1)) {
        int next = llamac_sample(r->session, &r->sampler, &error);
        if (next < 0) die("model", "%s", error.text);
        if (llamac_ends(r->model, next)) return n;
        print_token(r, *last, next);
        *last = next;
        if (++n == most) return n;
    }
}

// ----------------------------------------------------------------------------
// What the program does

static int *encode(const Run *r, Text text, bool bos, int *n) {
    llamac_error error;
    int *tokens = llamac_encode(r->model, text.s, text.n, bos, n, &error);
    if (!tokens) die("text", "%s", error.text);
    return tokens;
}

// The prompt's tokens, at least one.
static int *encode_prompt(const Run *r, Text prompt, int *n) {
    int *tokens = encode(r, prompt, r->info.add_bos || !prompt.n, n);
    if (*n == 0) die("prompt", "it has no tokens");
    return tokens;
}

// Prints the prompt and what the model makes of it, `steps` tokens together, behind BOS where there is one.
static void generate(Run *r, Text prompt) {
    int n, evaluated = 0, *tokens = encode_prompt(r, prompt, &n);
    int64_t whole = (int64_t)r->steps + (r->info.add_bos || !prompt.n);
    int most = (int)(whole - n);
    double begin = 0, middle = 0, end;
    for (int i = 0; i < n && i < whole; i++) print_token(r, i ? tokens[i - 1] : r->info.bos, tokens[i]);
    if (most > 0) {
        start(r, r->steps < r->options.positions ? r->steps : r->options.positions, LLAMAC_SAMPLE_ONLY);
        begin = seconds();
        feed(r, tokens, n);
        middle = seconds();
        evaluated = continue_text(r, &tokens[n - 1], most);
        if (evaluated == most) evaluated--;
    }
    end = seconds();
    print_end(&r->printer);
    if (most > 0) {
        fprintf(stderr, "achieved tok/s: %f\n", evaluated / (end - middle));
        fprintf(stderr, "prompt: %d tokens, tok/s: %f\n", n, n / (middle - begin));
    } else fprintf(stderr, "nothing was added: the prompt has %d tokens, and -n %d counts them too\n", n, r->steps);
    llamac_free(tokens);
}

static int *encode_turn(const Run *r, bool first, const char *system, Text words, int *n) {
    llamac_error error;
    int *tokens = llamac_encode_turn(r->model, first, system, words.s, words.n, n, &error);
    if (!tokens) die("text", "%s", error.text);
    return tokens;
}

// Turns of user and assistant until the input ends. The first words may come from -i, the system prompt from -y.
static void chat(Run *r, Text words, bool has_words, const char *system) {
    int last = -1;
    Text line = {0}, instruction = {0};
    if (system) append(&instruction, system, strlen(system));
    else ask("Enter system prompt (optional): ", &instruction);
    append(&instruction, "", 1);
    if (strlen(instruction.s) + 1 < instruction.n) die("system prompt", "it holds a zero byte");
    start(r, r->options.positions, LLAMAC_SAMPLE_ONLY);
    for (bool first = true; (first && has_words) || ask("User: ", &line); first = false) {
        int n, *tokens = encode_turn(r, first, instruction.s, first && has_words ? words : line, &n);
        if (last >= 0) feed(r, &last, 1);
        feed(r, tokens, n);
        print_bytes("Assistant: ", 11);
        last = tokens[n - 1];
        if (continue_text(r, &last, r->steps) < r->steps) last = -1;
        else fprintf(stderr, "the answer was cut off after %d tokens (-n)\n", r->steps);
        print_end(&r->printer);
        llamac_free(tokens);
    }
    free(line.s);
    free(instruction.s);
}

// Evaluates up to a chunk of `left` tokens from `pos` on, and keeps all their logits; returns how many.
static int feed_chunk(Run *r, const int *tokens, int left, int pos) {
    llamac_error error;
    int n = left < llamac_chunk(r->session) ? left : llamac_chunk(r->session);
    if (!llamac_forward(r->session, tokens, n, pos, &error)) die("model", "%s", error.text);
    return n;
}

static double nll_of(Run *r, int row, int token) {
    llamac_error error;
    double nll = 0;
    if (!llamac_nll(r->session, row, token, &nll, &error)) die("model", "%s", error.text);
    return nll;
}

// Prints exp of the mean negative log likelihood of a text's tokens, each given those before it in its window.
// Windows of the context's length do not overlap; each starts at position 0 with an empty cache.
static void perplexity(Run *r, Text text) {
    int n, *tokens = encode(r, text, true, &n);
    int inputs = n - 1, window = inputs < r->options.positions ? inputs : r->options.positions;
    if (inputs < 1) die("perplexity", "the text has no tokens");
    start(r, window, LLAMAC_ALL_LOGITS);
    double nll = 0;
    for (int at = 0, T; at < inputs; at += T) {
        int pos = at % window;
        T = feed_chunk(r, tokens + at, inputs - at < window - pos ? inputs - at : window - pos, pos);
        for (int t = 0; t < T; t++) nll += nll_of(r, t, tokens[at + t + 1]);
        if (isatty(2)) fprintf(stderr, "\r%d of %d tokens%s", at + T, inputs, at + T < inputs ? "" : "\n");
    }
    printf("perplexity %.4f (%d tokens, %.6f nats per token, %.6f bits per byte)\n", exp(nll / inputs), inputs, nll / inputs,
           nll / log(2) / (double)text.n);
    llamac_free(tokens);
}

// Writes the logits of every position of the prompt: (tokens, vocab_size) float32. For tests against other programs.
static void dump_logits(Run *r, Text prompt) {
    int n, *tokens = encode_prompt(r, prompt, &n);
    if (n > r->options.positions) die("prompt", "%d tokens, but the context is %d", n, r->options.positions);
    start(r, n, LLAMAC_ALL_LOGITS);
    for (int at = 0, T; at < n; at += T) {
        T = feed_chunk(r, tokens + at, n - at, at);
        print_bytes((const char *)llamac_logits(r->session), sizeof(float) * T * r->info.vocab_size);
        for (int t = 0; t < T; t++) nll_of(r, t, 0); // are they finite?
    }
    llamac_free(tokens);
}

// Prints the token ids of the prompt, or of each line of the input: without BOS, or in a chat as a turn of the user's.
static void tokenize(Run *r, Text prompt, bool has_prompt, const char *system, bool chats) {
    Text line = {0};
    for (bool first = true; has_prompt ? first : ask("", &line); first = false) {
        Text words = has_prompt ? prompt : line;
        int n, *tokens = chats ? encode_turn(r, first, system, words, &n) : encode(r, words, false, &n);
        for (int i = 0; i < n; i++) printf("%s%d", i ? " " : "", tokens[i]);
        printf("\n");
        llamac_free(tokens);
    }
    free(line.s);
}

// Prints how fast the model is, as a table or JSON. `began` is when the program began.
static void bench(const Run *r, double began, bool json) {
    llamac_speed b;
    llamac_error error;
    if (!llamac_bench(r->model, &r->options, r->steps, began, &b, &error)) die("bench", "%s", error.text);
    printf(json ? "{\"threads\": %d, \"first_token_ms\": %.2f, \"prompt_tokens\": %d, \"prompt_tokens_per_s\": %.1f, "
                  "\"decode_tokens\": %d, \"decode_tokens_per_s\": %.1f, \"bytes_per_token\": %.0f, "
                  "\"decode_gb_per_s\": %.2f, \"bandwidth_gb_per_s\": %.2f, \"bandwidth_share\": %.3f, "
                  "\"peak_mib\": %.1f}\n"
                : "threads                %12d\n"
                  "first token            %12.2f ms from the start\n"
                  "prompt of %4d tokens  %12.1f tokens/s\n"
                  "decoding %4d tokens   %12.1f tokens/s\n"
                  "weights per token      %12.0f bytes\n"
                  "read while decoding    %12.2f GB/s\n"
                  "only reading them      %12.2f GB/s\n"
                  "share                  %12.3f\n"
                  "peak memory            %12.1f MiB\n",
           b.n_threads, b.first * 1e3, b.prompt, b.prompt_speed, b.decoded, b.decode_speed, b.bytes, b.bytes * b.decode_speed / 1e9,
           b.bandwidth / 1e9, b.share, b.peak / (1 << 20));
}

// ----------------------------------------------------------------------------
// The command line

static const char help[] =
    "Usage: run MODEL [options]      MODEL: a GGUF file, or one of llama2.c's .bin files\n"
    "  -t NUMBER        temperature, 0 is greedy (1.0)\n"
    "  -p NUMBER        sample from the most likely tokens of this probability, 0 or 1 is all (0.9)\n"
    "  -s NUMBER        seed, 0 takes the time (0)\n"
    "  -n NUMBER        tokens in all, prompt included, or of each answer in a chat; 0 is the context (256)\n"
    "  -c NUMBER        context: tokens that the model sees at once, at most the model's own (that)\n"
    "  -i TEXT          prompt\n"
    "  -f FILE          prompt from a file\n"
    "  -z FILE          tokenizer, in llama2.c's format (the model's own, or tokenizer.bin)\n"
    "  -m MODE          generate or chat (generate)\n"
    "  -y TEXT          system prompt of the chat\n"
    "  -j NUMBER        threads (as many as cores, 64 at most)\n"
    "  --kv NAME        how keys and values are kept: f32, f16 or q8 (f32; f16 where the weights are quantised)\n"
    "  --no-copy        compute from the file's own pages, which processes share; slower after the first tokens\n"
    "  --device NAME    cpu, cuda, or auto: cuda if there is one (runcuda: cuda; run: cpu, which is all it has)\n"
    "  --raw            print control characters that the model writes\n"
    "  --perplexity FILE  how well the model predicts a text\n"
    "  --template NAME  what the chat puts around your words: chatml, llama3, zephyr or llama2 (as the model file says)\n"
    "  --tokenize       print the token ids of the prompt, or of each line of the input; with -m chat those of your turns\n"
    "  --verify         compare the weights with the checksum in the file\n"
    "  --logits         write the logits of every prompt token as float32\n"
    "  --bench          how fast the model runs here, -n tokens one by one; with --json for programs\n"
    "  -h, --help       this text\n";

#ifdef CUDA
static const char default_device[] = "cuda";
#else
static const char default_device[] = "cpu";
#endif

typedef struct {
    const char *model, *prompt, *prompt_file, *tokenizer, *mode, *system, *template, *perplexity, *device;
    double temperature, topp, seed, steps, context, threads;
    int kv_bits;
    bool raw, no_copy, tokenize, logits, verify, bench, json;
} Options;

// A number, whole if asked, written in decimal digits to its end.
static double parse_number(const char *flag, const char *s, double least, double most, bool whole) {
    char *end;
    double value = strtod(s, &end);
    bool plain = *s && strspn(s, whole ? "0123456789" : "0123456789.+-eE") == strlen(s);
    if (!plain || *end || !(value >= least && value <= most))
        die(flag, "'%.40s' is not a %snumber from %.0f to %.0f", s, whole ? "whole " : "", least, most);
    return value;
}

static int parse_kv(const char *name) {
    if (!strcmp(name, "f32")) return 32;
    if (!strcmp(name, "f16")) return 16;
    if (!strcmp(name, "q8")) return 8;
    die("--kv", "'%.40s' is no type of the KV cache, expected f32, f16 or q8", name);
}

static void parse_option(Options *o, const char *flag, const char *value) {
    if (!value) die(flag, "no such option, or its value is missing; see run --help");
    if (!strcmp(flag, "-t")) o->temperature = parse_number(flag, value, 0, 1e6, false);
    else if (!strcmp(flag, "-p")) o->topp = parse_number(flag, value, 0, 1, false);
    else if (!strcmp(flag, "-s")) o->seed = parse_number(flag, value, 0, 9007199254740991, true);
    else if (!strcmp(flag, "-n")) o->steps = parse_number(flag, value, 0, INT_MAX, true);
    else if (!strcmp(flag, "-c")) o->context = parse_number(flag, value, 1, INT_MAX, true);
    else if (!strcmp(flag, "-j")) o->threads = parse_number(flag, value, 1, 1024, true);
    else if (!strcmp(flag, "-i")) o->prompt = value;
    else if (!strcmp(flag, "-f")) o->prompt_file = value;
    else if (!strcmp(flag, "-z")) o->tokenizer = value;
    else if (!strcmp(flag, "-m")) o->mode = value;
    else if (!strcmp(flag, "-y")) o->system = value;
    else if (!strcmp(flag, "--perplexity")) o->perplexity = value;
    else if (!strcmp(flag, "--device")) o->device = value;
    else if (!strcmp(flag, "--template")) o->template = value;
    else if (!strcmp(flag, "--kv")) o->kv_bits = parse_kv(value);
    else die(flag, "no such option; see run --help");
}

static Options parse_options(int argc, char **argv) {
    Options o = {.mode = "generate", .temperature = 1, .topp = 0.9, .steps = 256, .device = default_device};
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) print_bytes(help, strlen(help)), flush(), exit(0);
        else if (i == 1 && argv[i][0] != '-') o.model = argv[i];
        else if (i == 1) break;
        else if (!strcmp(argv[i], "--raw")) o.raw = true;
        else if (!strcmp(argv[i], "--no-copy")) o.no_copy = true;
        else if (!strcmp(argv[i], "--tokenize")) o.tokenize = true;
        else if (!strcmp(argv[i], "--logits")) o.logits = true;
        else if (!strcmp(argv[i], "--verify")) o.verify = true;
        else if (!strcmp(argv[i], "--bench")) o.bench = true;
        else if (!strcmp(argv[i], "--json")) o.json = true;
        else if (!strncmp(argv[i], "--device=", 9)) parse_option(&o, "--device", argv[i] + 9);
        else if (!strncmp(argv[i], "--template=", 11)) parse_option(&o, "--template", argv[i] + 11);
        else if (!strncmp(argv[i], "--kv=", 5)) parse_option(&o, "--kv", argv[i] + 5);
        else parse_option(&o, argv[i], argv[i + 1]), i++;
    }
    if (!o.model) die("no model given", "expected ./run model.gguf, options after it; see ./run --help");
    if (o.prompt && o.prompt_file) die("-f", "there is a prompt from -i already");
    if (o.tokenize + o.logits + o.verify + o.bench + (o.perplexity != NULL) > 1)
        die("options", "expected only one of --tokenize, --logits, --verify, --bench and --perplexity");
    if (o.json && !o.bench) die("--json", "expected --bench beside it");
    if (strcmp(o.mode, "generate") && strcmp(o.mode, "chat")) die("-m", "'%s' is no mode, expected generate or chat", o.mode);
    if (strcmp(o.device, "cpu") && strcmp(o.device, "cuda") && strcmp(o.device, "auto"))
        die("--device", "'%s' is no device, expected cpu, cuda or auto", o.device);
    if (!strcmp(o.device, "cuda") && strcmp(default_device, "cuda") != 0)
        die("--device", "this program computes on the CPU; make runcuda builds the one for GPUs");
    return o;
}

// Someone else may cut off a file that is mapped; reading what is no more there is this signal.
static void file_shrank(int number) {
    static const char message[] = "run: model: its file was cut off while in use\n";
    ssize_t written = write(2, message, sizeof message - 1);
    (void)number, (void)written;
    _exit(1);
}

// The library's message without the path that it begins with, which die prints itself.
static const char *message_of(const llamac_error *error, const char *path) {
    size_t n = strlen(path) < 200 ? strlen(path) : 200; // of a long path, the library shows the first 200 bytes
    return strlen(error->text) > n + 2 && !memcmp(error->text + n, ": ", 2) ? error->text + n + 2 : error->text;
}

static void load(Run *r, const Options *o, bool text) {
    llamac_error error;
    r->model = llamac_open(o->model, o->tokenizer ? LLAMAC_NO_TOKENIZER : 0, &error);
    if (!r->model || (o->verify && !llamac_verify(r->model, &error))) die(o->model, "%s", message_of(&error, o->model));
    const char *tokenizer = o->tokenizer ? o->tokenizer : "tokenizer.bin";
    bool needed = text && !llamac_describe(r->model).has_tokenizer;
    if (needed && !llamac_open_tokenizer(r->model, tokenizer, &error)) die(tokenizer, "%s", message_of(&error, tokenizer));
    r->info = llamac_describe(r->model);
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN); // a reader that leaves is an error of writing like any other
    signal(SIGBUS, file_shrank);
    double began = seconds();
    Options o = parse_options(argc, argv);
    Run r = {0};
    load(&r, &o, !o.verify && !o.bench);
    if (o.context > r.info.seq_len) die("-c", "%.0f tokens, but the model's context is %d", o.context, r.info.seq_len);
    r.options = (llamac_options){.positions = o.context ? (int)o.context : r.info.seq_len,
                                 .n_threads = (int)o.threads,
                                 .device = o.device,
                                 .no_copy = o.no_copy,
                                 .kv_bits = o.kv_bits};
    r.printer.raw = o.raw;
    r.steps = o.steps ? (int)o.steps : r.options.positions;
    r.sampler = (llamac_sampler){(float)o.temperature, (float)o.topp, o.seed ? (uint64_t)o.seed : (uint64_t)time(NULL)};

    bool has_prompt = o.prompt || o.prompt_file;
    bool chats = !strcmp(o.mode, "chat") && !o.verify && !o.bench && !o.logits && !o.perplexity;
    llamac_error wrong;
    if (chats && !llamac_use_template(r.model, o.template, &wrong))
        die(o.template ? "--template" : o.model, "%s", message_of(&wrong, o.model));
    Text prompt = {0}, text = {0};
    if (o.prompt) append(&prompt, o.prompt, strlen(o.prompt));
    if (o.prompt_file) prompt = read_file(o.prompt_file);
    if (o.verify) printf("the weights are intact\n");
    else if (o.perplexity) perplexity(&r, text = read_file(o.perplexity));
    else if (o.logits) dump_logits(&r, prompt);
    else if (o.bench) bench(&r, began, o.json);
    else if (o.tokenize) tokenize(&r, prompt, has_prompt, o.system, chats);
    else if (chats) chat(&r, prompt, has_prompt, o.system);
    else generate(&r, prompt);
    flush();

    llamac_stop(r.session);
    llamac_close(r.model);
    free(r.window);
    free(prompt.s);
    free(text.s);
    return 0;
}

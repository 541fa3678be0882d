// Fuzz targets for the library's loaders, encoder, chat templates, grammar, saved sequences and
// batches, and for run's printing. libFuzzer or mutate.c calls LLVMFuzzerTestOneInput. The
// environment variable TARGET selects the target: v0, v1, v2, gguf, gguf_tokenizer, tokenizer_bin,
// encode, bpe, grammar, state or batch.
//
// A loader that accepts a file must have checked all of it. So the targets then read every tensor
// and, if the model is small, evaluate tokens.
#define _GNU_SOURCE 1 // as os.c does, before the first header
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { ROOM = 1 << 16 };          // max bytes by which an allocation may exceed the input
static size_t allowed = SIZE_MAX; // max bytes of one allocation

// Allocations that succeed before one fails; -1: all succeed. The target `batch` sets it.
static int allocations_left = -1;

static bool fails(void) { return allocations_left >= 0 && allocations_left-- == 0; }

static void *limited_realloc(void *p, size_t size) {
    if (size > allowed) abort();
    return fails() ? NULL : realloc(p, size);
}

static void *failing_calloc(size_t n, size_t size) { return fails() ? NULL : calloc(n, size); }

#define realloc limited_realloc
#define calloc failing_calloc
#include "../../runtime/os.c"
#include "../../runtime/gguf.c"
#include "../../runtime/sha256.c"
#include "../../runtime/model.c"
#include "../../runtime/tokenizer.c"
#include "../../runtime/bpe.c"
#include "../../runtime/chat.c"
#include "../../runtime/sampler.c"
#define add_byte add_text_byte // chat.c has functions with these names
#define add_token add_text_token
#include "../../runtime/text.c"
#undef add_byte
#undef add_token
#include "../../runtime/state.c"
#include "../../runtime/llama.c"
#include "../../runtime/grammar.c"
#undef realloc
#undef calloc

void print_bytes_of_model(const char *s, size_t n); // printer.c

// Reads every byte of a tensor, so that AddressSanitizer checks them all.
static void read_tensor(const Mat *m) {
    volatile uint8_t sink;
    uint64_t n = bytes_of(m);
    if (m->type == INT8_GROUPS) {
        uint64_t numbers = (uint64_t)m->rows * m->cols;
        for (uint64_t i = 0; i < n - numbers; i++) sink = ((const uint8_t *)m->scales)[i];
        n = numbers;
    }
    for (uint64_t i = 0; i < n; i++) sink = ((const uint8_t *)m->data)[i];
    (void)sink;
}

static void use_model(const llamac_model *model) {
    const Model *m = &model->transformer;
    for (int i = 0; i < N_TENSORS; i++)
        for (int layer = 0; layer < (tensors[i].per_layer ? m->config.n_layers : 1); layer++)
            read_tensor(place_of((Weights *)&m->weights, i, layer));
    if (m->config.dim > 64 || m->config.hidden_dim > 256 || m->config.n_layers > 4
        || m->config.vocab_size > 512)
        return;
    int T = m->config.seq_len < 2 ? 1 : 2, tokens[2] = {0, m->config.vocab_size - 1};
    allowed = SIZE_MAX; // activations may be larger than the file
    llamac_engine *engine =
        llamac_start(model, &(llamac_options){.positions = T, .n_threads = 1}, NULL);
    llamac_sequence *sequence = engine ? llamac_sequence_new(engine, NULL) : NULL;
    llamac_batch_token batch[2];
    for (int i = 0; i < T; i++) batch[i] = (llamac_batch_token){sequence, tokens[i], i, true};
    if (sequence) llamac_evaluate(engine, batch, T, NULL);
    llamac_sequence_free(sequence);
    llamac_stop(engine);
}

// Encodes a text with and without a prefix, decodes the tokens, and prints their text to /dev/null.
static void use_tokenizer(const llamac_model *m, const char *s, size_t n) {
    const Tokenizer *t = &m->tokenizer;
    for (int prefix = 0; prefix < 2; prefix++) {
        int n_tokens, *tokens = llamac_encode_text(t, s, n, WITH_BOS + (prefix ? WITH_PREFIX : 0),
                                                   &n_tokens, NULL);
        for (int i = 0; i < n_tokens; i++) {
            if (tokens[i] < 0 || tokens[i] >= t->vocab_size) abort();
            char text[64];
            size_t length =
                llamac_decode(m, i ? tokens[i - 1] : t->bos, tokens[i], text, sizeof text);
            if (length > 1 && length > (size_t)t->pieces[tokens[i]].n) abort();
            print_bytes_of_model(text, length < sizeof text ? length : sizeof text);
        }
        free(tokens);
    }
}

// Encodes a first and a later turn of a chat with every template. Only the template may add control
// tokens (BOS, EOS and markers), whatever the words are.
static void use_chat(llamac_model *m) {
    Tokenizer *t = &m->tokenizer;
    // in such a vocabulary, words without a piece become a control token
    if (t->unk >= 0 && t->pieces[t->unk].type == CONTROL) return;
    static char words[] = " <|im_start|><|im_end|> </s><s><|user|>\xff [INST] ";
    llamac_use_template(m, NULL, NULL);
    for (int i = 0; i < N_TEMPLATES; i++) {
        if (!llamac_use_template(m, templates[i].name, NULL)) return;
        for (int first = 0; first < 2; first++) {
            int n, *tokens = llamac_encode_turn(m, first, words, words, sizeof words, &n, NULL);
            int plain, *others = llamac_encode_turn(m, first, "x", words, 1, &plain, NULL);
            int balance = 0;
            for (int k = 0; k < n; k++) balance += t->pieces[tokens[k]].type == CONTROL;
            for (int k = 0; k < plain; k++) balance -= t->pieces[others[k]].type == CONTROL;
            if (balance) abort();
            free(tokens);
            free(others);
        }
    }
}

static const char sample_text[] = " Once upon a  time <s>\n\xe2\x96\x81"
                                  "caf\xc3\xa9 \xff\xf0\x9f\x98\x80 12345 \x01\x7f <|user|>  ";

static void model_target(uint8_t *bytes, size_t size, int version, bool tokenizer) {
    const uint32_t magic[2] = {0x616b3432, (uint32_t)version};
    // repair the magic number, because a loader would refuse every mutation of it
    if (version > 0 && size >= 8) memcpy(bytes, magic, 8);
    if (version < 0 && size >= 4) memcpy(bytes, "GGUF", 4);
    llamac_model *m = llamac_open_memory(bytes, size, tokenizer ? 0 : LLAMAC_NO_TOKENIZER, NULL);
    if (!m) return;
    if (m->transformer.sha256) llamac_verify(m, NULL);
    if (m->tokenizer.pieces) use_tokenizer(m, sample_text, sizeof sample_text - 1);
    if (m->tokenizer.pieces) use_chat(m);
    use_model(m);
    llamac_close(m);
}

// The input: the vocabulary's size in one byte, and a tokenizer.bin.
static void tokenizer_bin_target(const uint8_t *bytes, size_t size) {
    llamac_model m = {0};
    if (!size) return;
    bool read = llamac_bin_tokenizer(&m.tokenizer, bytes + 1, size - 1, bytes[0], NULL);
    if (read) use_tokenizer(&m, sample_text, sizeof sample_text - 1);
    llamac_free_tokenizer(&m.tokenizer);
}

static bool among(const Piece *pieces, int n, const char *s, int length) {
    for (int i = 0; i < n; i++)
        if (pieces[i].n == length && !memcmp(pieces[i].s, s, length)) return true;
    return false;
}

// The input: flags, the number of pieces, the pieces (length and type in one byte, score, text),
// and a text to encode.
static void encode_target(const uint8_t *bytes, size_t size) {
    Reader r = {.bytes = bytes, .size = size};
    const uint8_t *head = take(&r, 2);
    if (!head) return;
    llamac_model m = {.stop = -1};
    Tokenizer t = {.space = head[0] & 1 ? " " : LOWER_BLOCK,
                   .space_prefix = head[0] & 2,
                   .unk = 0,
                   .bos = 1,
                   .eos = 2,
                   .extra_spaces_removed = head[0] & 4,
                   .vocab_size = 3 + head[1] % 64 + (head[0] & 8 ? 256 : 0)};
    t.pieces = resize(NULL, t.vocab_size, sizeof *t.pieces);
    t.pieces[0] = (Piece){"<unk>", 0, 5, UNKNOWN};
    t.pieces[1] = (Piece){"<s>", 0, 3, CONTROL};
    t.pieces[2] = (Piece){"</s>", 0, 4, CONTROL};
    static char byte_pieces[256][7];
    int n = 3;
    for (int i = 0; i < 256 && head[0] & 8; i++, n++) {
        snprintf(byte_pieces[i], 7, "<0x%02X>", i);
        t.pieces[n] = (Piece){byte_pieces[i], 0, 6, BYTE};
    }
    for (const uint8_t *piece; n < t.vocab_size && (piece = take(&r, 2)); n++) {
        int length = piece[0] & 15, type = (piece[0] >> 4) % 4;
        const int types[] = {NORMAL, NORMAL, USER_DEFINED, UNUSED};
        const uint8_t *text = take(&r, length);
        if (!text) break;
        // leave out duplicates: a vocabulary with two equal pieces would be refused
        if (among(t.pieces, n, (const char *)text, length)) {
            n--;
            continue;
        }
        t.pieces[n] = (Piece){(const char *)text, piece[1], length, types[type]};
    }
    t.vocab_size = n;
    m.tokenizer = t;
    if (llamac_index_pieces(&m.tokenizer, NULL))
        use_tokenizer(&m, (const char *)bytes + r.at, size - r.at);
    llamac_free_tokenizer(&m.tokenizer);
}

// The input: a pre-tokenizer, the number of merges, the pairs of tokens that they merge, and a text
// to encode. The vocabulary is all bytes and the results of the merges.
static void bpe_target(const uint8_t *bytes, size_t size) {
    enum { MOST = 64 };
    static char spelled[256 + MOST][64];
    if (size < 2) return;
    int n_merges = bytes[1] % MOST, n = 256;
    if (size < 2 + 2 * (size_t)n_merges) return;
    size_t text = size - 2 - 2 * n_merges; // bytes; more than 128 would test nothing new
    llamac_model m = {.stop = -1};
    Tokenizer *t = &m.tokenizer;
    *t = (Tokenizer){.space = " ", .bos = 0, .eos = 1, .unk = -1, .eot = -1, .vocab_size = 256};
    t->pieces = resize(NULL, 256 + MOST, sizeof *t->pieces);
    t->byte_pairs = calloc(1, sizeof *t->byte_pairs);
    for (int i = 0; i < 256; i++)
        t->pieces[i] = (Piece){spelled[i], 0, write_letter(i, spelled[i]), NORMAL};
    Text merges = {0};
    uint64_t count = 0;
    for (int i = 0; i < n_merges; i++) {
        const Piece *a = &t->pieces[bytes[2 + 2 * i] % n], *b = &t->pieces[bytes[3 + 2 * i] % n];
        uint64_t length = a->n + b->n + 1;
        if (length > 60) continue;
        memcpy(spelled[n], a->s, a->n);
        memcpy(spelled[n] + a->n, b->s, b->n);
        append(&merges, (char *)&length, 8);
        append(&merges, a->s, a->n);
        append(&merges, " ", 1);
        append(&merges, b->s, b->n);
        count++;
        // the token exists already: this is a second merge with the same result
        if (among(t->pieces, n, spelled[n], (int)length - 1)) continue;
        t->pieces[n] = (Piece){spelled[n], 0, (int)length - 1, n % 7 ? NORMAL : USER_DEFINED};
        n++;
    }
    t->vocab_size = n;
    t->byte_pairs->pre = bytes[0] % N_PRE_TOKENIZERS;
    t->byte_pairs->longest = 60;
    Value list = {.present = true,
                  .is_array = true,
                  .kind = STRING,
                  .count = count,
                  .data = {(uint8_t *)merges.s, merges.n, 0, false}};
    if (llamac_index_pieces(t, NULL) && read_merges(t, list, NULL))
        use_tokenizer(&m, (const char *)bytes + 2 + 2 * n_merges, text < 128 ? text : 128);
    llamac_free_tokenizer(t);
    free(merges.s);
}

// Parses a JSON value and advances *s past it. Returns false if it is invalid, or nested deeper
// than LLAMAC_JSON_DEPTH. This parser shares no code with the grammar.
static bool parse_value(const char **s, const char *end, int level);

static void parse_spaces(const char **s, const char *end) {
    while (*s < end && **s && strchr(" \t\n\r", **s)) ++*s;
}

static bool parse_char(const char **s, const char *end, char c) { return *s < end && *(*s)++ == c; }

// Parses \uXXXX. Returns its number, or -1 if it is invalid.
static int parse_hex(const char **s, const char *end) {
    char digits[5] = {0};
    if (end - *s < 6 || (*s)[0] != '\\' || (*s)[1] != 'u') return -1;
    memcpy(digits, *s + 2, 4);
    if (strspn(digits, "0123456789abcdefABCDEF") != 4) return -1;
    *s += 6;
    return (int)strtol(digits, NULL, 16);
}

static bool parse_text(const char **s, const char *end) {
    if (!parse_char(s, end, '"')) return false;
    while (*s < end && **s != '"') {
        int length = llamac_utf8(*s, end - *s);
        if (!length || (unsigned char)**s < 0x20) return false;
        if (**s != '\\') *s += length;
        else if (end - *s > 1 && (*s)[1] && strchr("\"\\/bfnrt", (*s)[1])) *s += 2;
        else {
            int high = parse_hex(s, end);
            if (high < 0 || high >> 10 == 0xdc00 >> 10) return false;
            if (high >> 10 == 0xd800 >> 10 && parse_hex(s, end) >> 10 != 0xdc00 >> 10) return false;
        }
    }
    return parse_char(s, end, '"');
}

static bool parse_digits(const char **s, const char *end) {
    const char *begin = *s;
    while (*s < end && **s >= '0' && **s <= '9') ++*s;
    return *s > begin;
}

static bool parse_number(const char **s, const char *end) {
    if (*s < end && **s == '-') ++*s;
    bool zero = *s < end && **s == '0';
    if (zero ? !++*s : !parse_digits(s, end)) return false;
    if (*s < end && **s == '.' && (++*s, !parse_digits(s, end))) return false;
    if (*s == end || (**s | 32) != 'e') return true;
    if (++*s < end && (**s == '+' || **s == '-')) ++*s;
    return parse_digits(s, end);
}

static bool parse_items(const char **s, const char *end, int level, bool object) {
    char close = *(*s)++ == '{' ? '}' : ']';
    parse_spaces(s, end);
    if (*s < end && **s == close) return ++*s, true;
    for (;;) {
        parse_spaces(s, end);
        if (object && !parse_text(s, end)) return false;
        parse_spaces(s, end);
        if (object && !parse_char(s, end, ':')) return false;
        if (!parse_value(s, end, level + 1)) return false;
        if (*s == end || (**s != ',' && **s != close)) return false;
        if (*(*s)++ == close) return true;
    }
}

static bool parse_value(const char **s, const char *end, int level) {
    static const char *const words[] = {"true", "false", "null"};
    parse_spaces(s, end);
    bool ok = *s < end && level <= LLAMAC_JSON_DEPTH;
    if (!ok) return false;
    if (**s == '{' || **s == '[')
        ok = level < LLAMAC_JSON_DEPTH && parse_items(s, end, level, **s == '{');
    else if (**s == '"') ok = parse_text(s, end);
    else if (**s == '-' || (**s >= '0' && **s <= '9')) ok = parse_number(s, end);
    else {
        size_t n = 0;
        for (int i = 0; i < 3 && !n; i++)
            if ((size_t)(end - *s) >= strlen(words[i]) && !memcmp(*s, words[i], strlen(words[i])))
                n = strlen(words[i]);
        *s += n, ok = n;
    }
    parse_spaces(s, end);
    return ok;
}

// Returns whether the grammar accepts the bytes of a token one by one. Needs a vocabulary in which
// every byte is a token: tokens 3 to 258.
static bool allowed_by_bytes(const llamac_grammar *g, int token) {
    llamac_grammar copy = *g; // has its own state of the text, and shares the tables
    char piece[64];
    size_t n = llamac_decode(g->model, -1, token, piece, sizeof piece), i = 0;
    if (token == g->model->tokenizer.unk) return false;
    while (i < n && llamac_grammar_accept(&copy, 3 + (unsigned char)piece[i])) i++;
    return n && i == n;
}

// Writes a text of allowed tokens, chosen by the n bytes. The text must be valid JSON that keeps to
// the token budget, unless no text fits into the budget.
static void walk_grammar(llamac_grammar *g, const uint8_t *choices, size_t n, bool object,
                         bool bytes) {
    int left = n ? choices[0] % 64 : 0, begun = 0, vocab_size = g->vocab_size;
    Text text = {0};
    for (size_t i = 0; left >= 0; i++, left--) {
        uint32_t choice = n ? choices[i % n] * 257u + (uint32_t)i : (uint32_t)i;
        uint8_t *widest = malloc(vocab_size);
        memcpy(widest, llamac_grammar_allowed(g, INT32_MAX), vocab_size);
        const uint8_t *mask = llamac_grammar_allowed(g, left);
        for (int t = 0; t < vocab_size; t++)
            if (mask[t] > widest[t]) abort();
        int token = -1, refused = (int)(choice % vocab_size);
        if (llamac_grammar_complete(g) && choice % 5 == 0) left = 0;
        for (int k = 0; k < vocab_size && token < 0; k++) {
            int t = (int)((choice + k) % vocab_size);
            if (mask[t] && !llamac_ends(g->model, t)) token = t;
        }
        if (!widest[refused] && llamac_grammar_accept(g, refused)) abort();
        if (bytes && widest[refused] != allowed_by_bytes(g, refused)
            && !llamac_ends(g->model, refused))
            abort();
        free(widest);
        if (left == 0 || token < 0) {
            if (token >= 0 && llamac_grammar_allowed(g, 0)[token]) abort();
            if (begun && !llamac_grammar_complete(g)) abort();
            break;
        }
        if (!llamac_grammar_accept(g, token)) abort();
        char piece[64];
        size_t length = llamac_decode(g->model, -1, token, piece, sizeof piece);
        if (!length || length > sizeof piece) abort();
        append(&text, piece, length);
        begun++;
    }
    if (begun) {
        const char *s = text.s, *end = text.s + text.n;
        parse_spaces(&s, end);
        if (object && *s != '{') abort();
        if (!parse_value(&s, end, 0) || s != end) abort();
    }
    free(text.s);
}

enum { MAX_PIECES = 64, N_MADE = 32 };
enum { AN_OBJECT = 1, ALL_BYTES = 2, LOWER_SPACES = 4, N_KINDS_OF_GRAMMAR = 8 };

// A grammar and its vocabulary.
typedef struct {
    llamac_model model;
    char texts[MAX_PIECES][8]; // of random pieces
    llamac_grammar *grammar;
} Vocabulary;

// Begins a vocabulary with one-byte tokens: all bytes, or the structural characters of JSON alone.
static void begin_vocabulary(Vocabulary *v, int kind) {
    static const char structure[] = "{}[]:,\"";
    static char single[256];
    Tokenizer *t = &v->model.tokenizer;
    *v = (Vocabulary){.model = {.stop = -1}};
    *t = (Tokenizer){
        .space = kind & LOWER_SPACES ? LOWER_BLOCK : " ", .bos = 1, .eos = 2, .eot = -1};
    t->pieces = resize(NULL, 3 + 256 + MAX_PIECES, sizeof *t->pieces);
    t->pieces[0] = (Piece){"<unk>", 0, 5, UNKNOWN};
    t->pieces[1] = (Piece){"<s>", 0, 3, CONTROL};
    t->pieces[2] = (Piece){"</s>", 0, 4, CONTROL};
    t->vocab_size = 3;
    for (int i = 0; i < 256; i++) {
        single[i] = (char)i;
        if (kind & ALL_BYTES || (i && strchr(structure, i)))
            t->pieces[t->vocab_size++] = (Piece){&single[i], 0, 1, NORMAL};
    }
}

static void make_grammar(Vocabulary *v, int kind) {
    v->grammar = llamac_grammar_json(&v->model, kind & AN_OBJECT, NULL);
    if (!v->grammar) abort();
}

// Returns vocabulary `number` of a kind. It has random pieces of bytes that matter in JSON.
// Building a grammar takes a hundred times as long as writing a text with it, so each is built once
// and kept.
static Vocabulary *made_vocabulary(int kind, int number) {
    static Vocabulary *made[N_KINDS_OF_GRAMMAR][N_MADE];
    static const char bytes[] =
        "{}[]:,\"{}[]:,\"\\\\/ \n\t00129eE+-.DdCcuufabntrels\x1f\xc3\xa9\xe2\x82\xac"
        "\xf0\x9f\x98\x80\xed\xa0\xf4\xe0\xff";
    if (made[kind][number]) return made[kind][number];
    Vocabulary *v = made[kind][number] = malloc(sizeof *v);
    uint32_t state = number;
    begin_vocabulary(v, kind);
    for (int i = 0; i < MAX_PIECES; i++) {
        int n = 0;
        do {
            state = state * 1664525 + 1013904223;
            v->texts[i][n++] = bytes[(state >> 8) % (sizeof bytes - 1)];
        } while (n < 8 && state >> 30);
        v->model.tokenizer.pieces[v->model.tokenizer.vocab_size++] =
            (Piece){v->texts[i], 0, n, i % 8 ? NORMAL : USER_DEFINED};
    }
    make_grammar(v, kind);
    return v;
}

// The input: a byte that selects the kind of vocabulary; the vocabulary's number or, if the first
// byte is OWN_PIECES or more, the number of pieces and the pieces (length in a byte, text); and
// bytes that choose tokens.
static void grammar_target(const uint8_t *bytes, size_t size) {
    enum { OWN_PIECES = 248 };
    Reader r = {.bytes = bytes, .size = size};
    const uint8_t *head = take(&r, 2);
    if (!head) return;
    int kind = head[0] % N_KINDS_OF_GRAMMAR;
    Vocabulary own, *v = &own;
    if (head[0] < OWN_PIECES) v = made_vocabulary(kind, head[1] % N_MADE);
    else begin_vocabulary(&own, kind);
    Tokenizer *t = &v->model.tokenizer;
    for (int i = 0; v == &own && i < head[1] % MAX_PIECES; i++) {
        const uint8_t *length = take(&r, 1);
        const uint8_t *text = length && *length % 32 ? take(&r, *length % 32) : NULL;
        if (!text) break;
        int type = *length & 32 ? USER_DEFINED : NORMAL;
        t->pieces[t->vocab_size++] = (Piece){(const char *)text, 0, *length % 32, type};
    }
    if (v == &own) make_grammar(v, kind);
    for (int i = 1; i <= 2; i++, llamac_grammar_reset(v->grammar))
        walk_grammar(v->grammar, bytes + r.at / i, size - r.at / i, kind & AN_OBJECT,
                     kind & ALL_BYTES);
    if (v != &own) return;
    llamac_grammar_free(own.grammar);
    free(t->pieces);
}

// The model of the targets `state` and `batch`. STATE_TOKENS: max tokens of a sequence. They need
// two blocks of a saved file, and two pages of the CPU's KV cache.
enum { STATE_TOKENS = 80, STATE_VOCAB = 8 };

static bool aborts; // the abort callback stops evaluations

static bool abort_now(void *data) {
    (void)data;
    return aborts;
}

// Returns the engine with KV cache type 0 to 2 (see kv_bits), for a tiny model in llama2.c's format
// v0.
static llamac_engine *state_engine(int type) {
    static llamac_engine *engines[3];
    static const int sizes[] = {
        4,           // dim
        4,           // hidden_dim
        2,           // n_layers
        2,           // n_heads
        1,           // n_kv_heads
        STATE_VOCAB, // vocab_size
        STATE_TOKENS // seq_len
    };
    static const int kv_bits[] = {32, 16, 8};
    static float file[2048];
    if (engines[type]) return engines[type];
    if (!file[100]) {
        for (size_t i = 0; i < sizeof file / sizeof *file; i++)
            file[i] = (float)(i * 37 % 64) / 64 - 0.4f;
        memcpy(file, sizes, sizeof sizes);
    }
    // find the size of the file: the loader accepts no other
    for (size_t n = 28; n < sizeof file && !engines[type]; n += 4) {
        llamac_model *m = llamac_open_memory(file, n, LLAMAC_NO_TOKENIZER, NULL);
        llamac_options options = {.kv_bits = kv_bits[type], .n_threads = 1, .abort = abort_now};
        if (m) engines[type] = llamac_start(m, &options, NULL);
    }
    if (!engines[type]) abort();
    return engines[type];
}

// The input: a byte that selects the engine, and a file of a saved sequence. Unless bit 2 of the
// byte is set, repairs the file's magic number, version, model and SHA-256, because the checks of
// these would refuse every mutation. If the file is accepted, the KV cache must have the numbers of
// the file, and the sequence must continue.
static void state_target(uint8_t *bytes, size_t size) {
    if (!size) return;
    llamac_engine *engine = state_engine(bytes[0] % 3);
    StateOwner owner = owner_of(engine);
    size_t n = size - 1;
    uint8_t *file = malloc(n); // aligned, unlike bytes + 1, and of the exact size
    Header header = header_of(&owner, 0);
    memcpy(file, bytes + 1, n);
    if (!(bytes[0] & 4) && n >= HEADER + SHA256_BYTES) {
        memcpy(file, &header, offsetof(Header, kv_bits));
        memcpy(file + offsetof(Header, identity), header.identity, SHA256_BYTES);
        Sha256 sha = llamac_sha256_begin();
        llamac_sha256_add(&sha, file, n - SHA256_BYTES);
        llamac_sha256_end(&sha, file + n - SHA256_BYTES);
    }
    llamac_error error;
    allowed = size + ROOM;
    llamac_sequence *s = restore(engine, file, n, &error);
    allowed = SIZE_MAX;
    if (!s && !error.text[0]) abort();
    if (s) {
        int length = llamac_sequence_length(s), token = 0;
        size_t at = HEADER + length * sizeof(int);
        for (int pos = 0, count; pos < length; pos += count) {
            uint8_t block[1 << 13];
            count = positions_of_block(length, pos);
            size_t size_of_block = bytes_of_positions(&owner, count);
            if (size_of_block > sizeof block) abort();
            engine->backend->read_cache(engine->backend, s->cache, pos, count, block);
            if (memcmp(block, file + at, size_of_block)) abort();
            at += size_of_block;
        }
        if (at + SHA256_BYTES != n) abort();
        if (length < STATE_TOKENS && !llamac_forward(s, &token, 1, length, &error)) abort();
        llamac_sampler sampler = {
            .temperature = 1, .repeat_penalty = 1.1f, .penalty_tokens = -1, .state = 1};
        if (length < STATE_TOKENS) llamac_sample(s, &sampler, &error);
        llamac_sequence_free(s);
    }
    free(file);
}

// ----------------------------------------------------------------------------
// Sequences of one engine

enum { SLOTS = 4, MAX_RUNS = 5, MAX_RUN = 48, MAX_BATCH = MAX_RUNS * MAX_RUN, MAX_CALLS = 16 };

// A sequence, and the tokens that it must contain.
typedef struct {
    llamac_sequence *s; // NULL: the slot is empty
    int tokens[STATE_TOKENS], n;
} Slot;

typedef struct {
    const uint8_t *bytes;
    size_t size, at;
    llamac_engine *engine;
    int type;      // of the engine's KV cache
    bool may_fail; // in this call, an allocation may fail, or the abort callback stops it
    Slot slots[SLOTS];
} BatchTest;

// Returns a number 0..n-1, chosen by the next byte of the input; 0 after its end.
static int choice(BatchTest *t, int n) { return t->at < t->size ? t->bytes[t->at++] % n : 0; }

// Returns the logits (STATE_VOCAB,) after n tokens, which a new sequence evaluates in one call.
// Caches the logits, because many inputs begin alike. tests/batches.c compares such calls with
// calls of one token each.
static const float *logits_alone(const BatchTest *t, const int *tokens, int n) {
    static struct {
        uint64_t key; // hash of the cache's type and the tokens; 0: unused
        float logits[STATE_VOCAB];
    } known[1 << 15], *places[STATE_TOKENS + 1];
    uint64_t keys[STATE_TOKENS + 1] = {0xcbf29ce484222325 * (t->type + 1)}; // FNV-1a
    for (int i = 1; i <= n; i++) {
        keys[i] = (keys[i - 1] ^ (uint64_t)tokens[i - 1]) * 0x100000001b3;
        places[i] = &known[keys[i] * 0x9e3779b97f4a7c15 >> 49];
    }
    if (places[n]->key == keys[n]) return places[n]->logits;
    llamac_sequence *s = llamac_sequence_new(t->engine, NULL);
    llamac_batch_token batch[STATE_TOKENS];
    for (int i = 0; i < n; i++) batch[i] = (llamac_batch_token){s, tokens[i], i, true};
    if (!llamac_evaluate(t->engine, batch, n, NULL)) abort();
    for (int i = 1; i <= n; i++) {
        places[i]->key = keys[i];
        memcpy(places[i]->logits, llamac_batch_logits(t->engine, i - 1), sizeof places[i]->logits);
    }
    llamac_sequence_free(s);
    return places[n]->logits;
}

// Checks that a sequence has the tokens of its slot: all of them or, after a failure, at least the
// first `kept`. Drops the others from the slot.
static void check_tokens(Slot *slot, int kept) {
    int n = llamac_sequence_length(slot->s);
    if (n > slot->n || n < kept) abort();
    if (n && memcmp(llamac_sequence_tokens(slot->s), slot->tokens, n * sizeof(int))) abort();
    slot->n = n;
}

// Checks that a call has failed if it had to (`wrong`), has otherwise failed only if t->may_fail,
// and has written a message exactly if it has failed.
static void check_result(const BatchTest *t, bool ok, bool wrong, const llamac_error *error) {
    if (ok ? wrong : !wrong && !t->may_fail) abort();
    if (ok != !error->text[0]) abort();
}

static void free_slot(Slot *slot) {
    llamac_sequence_free(slot->s);
    *slot = (Slot){0};
}

// Puts sequence s, which must have the first n tokens of `from`, into a slot.
static void fill_slot(Slot *slot, llamac_sequence *s, const Slot *from, int n) {
    Slot filled = {.s = s, .n = n};
    memcpy(filled.tokens, from->tokens, n * sizeof(int));
    free_slot(slot);
    *slot = filled;
    check_tokens(slot, n);
}

// Adds a run of tokens of a random sequence to the batch, usually at the end of the sequence.
// Returns false if they make the batch invalid. begins (SLOTS,): how many tokens each sequence
// keeps, or -1 if the batch has no tokens of it.
static bool add_run(BatchTest *t, llamac_batch_token *batch, int *n, int *begins) {
    int i = choice(t, SLOTS), count = choice(t, 256), how = choice(t, 256);
    int token = choice(t, STATE_VOCAB);
    Slot *slot = &t->slots[i];
    if (!slot->s) return true;
    count = 1 + (count < 200 ? count % 6 : count % MAX_RUN); // usually few
    if (begins[i] < 0) begins[i] = slot->n = how % 4 ? slot->n : how / 4 % (slot->n + 1);
    bool right = how < 254 && slot->n + count <= STATE_TOKENS;
    int pos = slot->n + (how == 254);
    for (int k = 0; k < count; k++, pos++, token = (token + 3) % STATE_VOCAB) {
        bool wanted = how & 16 ? k == count - 1 : how & 32 && k % 3 == 0;
        batch[(*n)++] = (llamac_batch_token){slot->s, how == 255 ? -1 : token, pos, wanted};
        if (right) slot->tokens[slot->n++] = token;
    }
    return right;
}

// Compares the logits of a batch with those of each sequence alone.
static void check_logits(const BatchTest *t, const llamac_batch_token *batch, int n) {
    static float found[MAX_BATCH][STATE_VOCAB]; // copies: the next call overwrites the originals
    for (int i = 0; i < n; i++) {
        const float *logits = llamac_batch_logits(t->engine, i);
        if (!logits != !batch[i].logits) abort();
        if (logits) memcpy(found[i], logits, sizeof *found);
    }
    for (int i = 0; i < n; i++) {
        const Slot *slot = t->slots;
        if (!batch[i].logits) continue;
        while (slot->s != batch[i].sequence) slot++;
        const float *alone = logits_alone(t, slot->tokens, batch[i].position + 1);
        if (memcmp(found[i], alone, sizeof *found)) abort();
    }
}

static void evaluate_batch(BatchTest *t) {
    llamac_batch_token batch[MAX_BATCH];
    llamac_error error;
    int n = 0, begins[SLOTS] = {-1, -1, -1, -1};
    bool right = true;
    Slot before[SLOTS];
    memcpy(before, t->slots, sizeof before);
    for (int runs = 1 + choice(t, MAX_RUNS); runs > 0 && right; runs--)
        right = add_run(t, batch, &n, begins);
    bool ok = llamac_evaluate(t->engine, batch, n, &error);
    check_result(t, ok, !right || !n, &error);
    allocations_left = -1, aborts = false;
    if (!ok) memcpy(t->slots, before, sizeof before);
    for (int i = 0; i < SLOTS; i++) {
        Slot *slot = &t->slots[i];
        if (slot->s) check_tokens(slot, ok || begins[i] < 0 ? slot->n : begins[i]);
    }
    if (ok) check_logits(t, batch, n);
}

// Samples with settings that are usually valid, from the logits of a sequence or of a token of the
// last call.
static void sample_slot(BatchTest *t, const Slot *slot) {
    static const float odd[] = {0,         1,      0.5f,   0.9f,   -1,     100,   NAN,   INFINITY,
                                -INFINITY, 1e-45f, 1e-40f, 3e-39f, 1e-30f, 1e30f, 3e38f, -3e38f};
    enum { N_ODD = sizeof odd / sizeof *odd, MAX_BIASES = 3 };
    float biases[MAX_BIASES], before[STATE_VOCAB];
    int bias_tokens[MAX_BIASES];
    uint8_t mask[STATE_VOCAB];
    llamac_sampler s = {.temperature = 1, .state = t->at};
    // clang-format off
    float *fields[] = {&s.temperature,    &s.topp,              &s.minp,
                       &s.repeat_penalty, &s.frequency_penalty, &s.presence_penalty};
    // clang-format on
    for (int n = choice(t, 4); n > 0; n--) {
        float *field = fields[choice(t, 6)];
        *field = odd[choice(t, N_ODD)];
    }
    s.topk = choice(t, STATE_VOCAB + 2), s.penalty_tokens = choice(t, 5) - 1;
    s.n_biases = choice(t, MAX_BIASES + 1), s.bias_tokens = bias_tokens, s.biases = biases;
    for (int k = 0; k < s.n_biases; k++) {
        bias_tokens[k] = choice(t, STATE_VOCAB);
        biases[k] = odd[choice(t, N_ODD)];
    }
    int bits = choice(t, 256);
    for (int k = 0; k < STATE_VOCAB; k++) mask[k] = bits >> k & 1;
    if (bits) s.allowed = mask;
    int i = choice(t, 24) - 8; // token of the last call; < 0: use the logits of the sequence
    const float *logits = i < 0 ? llamac_logits(slot->s) : llamac_batch_logits(t->engine, i);
    if (logits) memcpy(before, logits, sizeof before);
    llamac_error error;
    int token =
        i < 0 ? llamac_sample(slot->s, &s, &error) : llamac_sample_at(t->engine, i, &s, &error);
    if ((token < 0) != (error.text[0] != 0) || token >= STATE_VOCAB) abort();
    if (logits && memcmp(before, logits, sizeof before)) abort();
    if (token < 0) return;
    if (!logits || (s.allowed && !mask[token])) abort();
    for (int k = 0; k < s.n_biases; k++)
        if (bias_tokens[k] == token && isinf(biases[k])) abort();
}

// Saves a sequence and loads it into a slot.
static void save_and_load(BatchTest *t, const Slot *from, Slot *to) {
    static char path[64];
    llamac_error error;
    if (!*path) snprintf(path, sizeof path, "/dev/shm/llamac-fuzz-%d", (int)getpid());
    bool ok = llamac_sequence_save(from->s, path, &error);
    check_result(t, ok, false, &error);
    if (ok) {
        llamac_sequence *loaded = llamac_sequence_load(t->engine, path, &error);
        check_result(t, loaded, false, &error);
        if (loaded) fill_slot(to, loaded, from, from->n);
    }
    unlink(path);
}

// Makes one call, or two, on random sequences.
static void call(BatchTest *t) {
    llamac_error error;
    int what = choice(t, 256), n;
    Slot *slot = &t->slots[choice(t, SLOTS)], *other = &t->slots[choice(t, SLOTS)];
    t->may_fail = what >= 224;
    if (what >= 240) allocations_left = choice(t, 8);
    aborts = what >= 224 && what < 240;
    if (what % 8 >= 5) evaluate_batch(t);
    else if (!slot->s) {
        llamac_sequence *s = llamac_sequence_new(t->engine, &error);
        check_result(t, s, false, &error);
        if (s) slot->s = s;
    } else if (what % 8 == 0) {
        n = choice(t, slot->n + 2);
        llamac_sequence *copy = llamac_sequence_copy(slot->s, n, &error);
        check_result(t, copy, n > slot->n, &error);
        if (copy) fill_slot(other, copy, slot, n);
    } else if (what % 8 == 1) {
        n = choice(t, slot->n + 2);
        bool ok = llamac_sequence_truncate(slot->s, n, &error);
        check_result(t, ok, n > slot->n, &error);
        if (ok) slot->n = n;
        check_tokens(slot, ok ? n : 0);
    } else if (what % 8 == 2) sample_slot(t, slot);
    else if (what % 8 == 3) save_and_load(t, slot, other);
    else if (choice(t, 2)) free_slot(slot);
    allocations_left = -1, aborts = false;
}

// The input: a byte that selects the engine, and bytes that choose calls on up to SLOTS sequences.
static void batch_target(const uint8_t *bytes, size_t size) {
    if (!size) return;
    BatchTest t = {.bytes = bytes, .size = size, .at = 1, .type = bytes[0] % 3};
    t.engine = state_engine(t.type);
    for (int calls = 0; t.at < t.size && calls < MAX_CALLS; calls++) call(&t);
    for (int i = 0; i < SLOTS; i++) free_slot(&t.slots[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const versions[] = {"v0", "v1", "v2"};
    static const char *target;
    if (!target) {
        target = getenv("TARGET");
        if (!target || !freopen("/dev/null", "w", stdout))
            exit(fprintf(stderr, "TARGET: expected the name of a target\n"));
    }
    // a copy of the exact size, whose end AddressSanitizer guards, and aligned like a file
    uint8_t *bytes = malloc(size ? size : 1);
    if (!bytes) abort();
    if (size) memcpy(bytes, data, size);
    bool file = strcmp(target, "encode") && strcmp(target, "bpe") && strcmp(target, "grammar")
                && strcmp(target, "state") && strcmp(target, "batch");
    allowed = file ? size + ROOM : SIZE_MAX;
    for (int version = 0; version < 3; version++)
        if (!strcmp(target, versions[version])) model_target(bytes, size, version, false);
    if (!strcmp(target, "gguf")) model_target(bytes, size, -1, false);
    if (!strcmp(target, "gguf_tokenizer")) model_target(bytes, size, -1, true);
    if (!strcmp(target, "tokenizer_bin")) tokenizer_bin_target(bytes, size);
    if (!strcmp(target, "encode")) encode_target(bytes, size);
    if (!strcmp(target, "bpe")) bpe_target(bytes, size);
    if (!strcmp(target, "grammar")) grammar_target(bytes, size);
    if (!strcmp(target, "state")) state_target(bytes, size);
    if (!strcmp(target, "batch")) batch_target(bytes, size);
    allowed = SIZE_MAX;
    free(bytes);
    return 0;
}

// Fuzz targets over the library's loaders, encoder, chat templates, grammar and saved sequences, and run's printing: LLVMFuzzerTestOneInput for libFuzzer, or for mutate.c.
// The environment variable TARGET chooses: v0, v1, v2, gguf, gguf_tokenizer, tokenizer_bin, encode, bpe, grammar or state.
// A loader that accepts a file must have checked all of it: every tensor is then read and, in small models, used.
#define _GNU_SOURCE 1 // as os.c does, before the first header
#include <stdint.h>
#include <stdlib.h>

enum { ROOM = 1 << 16 };          // bytes that an allocation may be larger than the input
static size_t allowed = SIZE_MAX; // bytes of one allocation

static void *limited_realloc(void *p, size_t size) {
    if (size > allowed) abort();
    return realloc(p, size);
}

#define realloc limited_realloc
#include "../../runtime/os.c"
#include "../../runtime/gguf.c"
#include "../../runtime/sha256.c"
#include "../../runtime/model.c"
#include "../../runtime/tokenizer.c"
#include "../../runtime/bpe.c"
#include "../../runtime/chat.c"
#include "../../runtime/sampler.c"
#define add_byte add_text_byte // chat.c has functions of these names
#define add_token add_text_token
#include "../../runtime/text.c"
#undef add_byte
#undef add_token
#include "../../runtime/state.c"
#include "../../runtime/llama.c"
#include "../../runtime/grammar.c"
#undef realloc

void print_bytes_of_model(const char *s, size_t n); // printer.c

// Every byte of a tensor, which the sanitizer follows.
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
    if (m->config.dim > 64 || m->config.hidden_dim > 256 || m->config.n_layers > 4 || m->config.vocab_size > 512) return;
    int T = m->config.seq_len < 2 ? 1 : 2, tokens[2] = {0, m->config.vocab_size - 1};
    allowed = SIZE_MAX; // activations are no matter of the file
    llamac_engine *engine = llamac_start(model, &(llamac_options){.positions = T, .n_threads = 1}, NULL);
    llamac_sequence *sequence = engine ? llamac_sequence_new(engine, NULL) : NULL;
    llamac_batch_token batch[2];
    for (int i = 0; i < T; i++) batch[i] = (llamac_batch_token){sequence, tokens[i], i, true};
    if (sequence) llamac_evaluate(engine, batch, T, NULL);
    llamac_sequence_free(sequence);
    llamac_stop(engine);
}

// Encodes a text in every way and prints what comes out, which goes nowhere.
static void use_tokenizer(const llamac_model *m, const char *s, size_t n) {
    const Tokenizer *t = &m->tokenizer;
    for (int prefix = 0; prefix < 2; prefix++) {
        int n_tokens, *tokens = llamac_encode_text(t, s, n, WITH_BOS + (prefix ? WITH_PREFIX : 0), &n_tokens, NULL);
        for (int i = 0; i < n_tokens; i++) {
            if (tokens[i] < 0 || tokens[i] >= t->vocab_size) abort();
            char text[64];
            size_t length = llamac_decode(m, i ? tokens[i - 1] : t->bos, tokens[i], text, sizeof text);
            if (length > 1 && length > (size_t)t->pieces[tokens[i]].n) abort();
            print_bytes_of_model(text, length < sizeof text ? length : sizeof text);
        }
        free(tokens);
    }
}

// Two turns of a chat in every template: BOS, EOS and marks come from the template alone, whatever is said.
static void use_chat(llamac_model *m) {
    Tokenizer *t = &m->tokenizer;
    if (t->unk >= 0 && t->pieces[t->unk].type == CONTROL) return; // what is no piece becomes one then
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

static const char sample_text[] = " Once upon a  time <s>\n\xe2\x96\x81""caf\xc3\xa9 \xff\xf0\x9f\x98\x80 12345 \x01\x7f <|user|>  ";

static void model_target(uint8_t *bytes, size_t size, int version, bool tokenizer) {
    const uint32_t magic[2] = {0x616b3432, (uint32_t)version};
    if (version > 0 && size >= 8) memcpy(bytes, magic, 8); // mutations of these lead nowhere
    if (version < 0 && size >= 4) memcpy(bytes, "GGUF", 4);
    llamac_model *m = llamac_open_memory(bytes, size, tokenizer ? 0 : LLAMAC_NO_TOKENIZER, NULL);
    if (!m) return;
    if (m->transformer.sha256) llamac_verify(m, NULL);
    if (m->tokenizer.pieces) use_tokenizer(m, sample_text, sizeof sample_text - 1);
    if (m->tokenizer.pieces) use_chat(m);
    use_model(m);
    llamac_close(m);
}

// The input is a vocabulary's size and a tokenizer.bin.
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

// The input is flags, a number of pieces, the pieces (length and type in one byte, score, text), and a text to encode.
static void encode_target(const uint8_t *bytes, size_t size) {
    Reader r = {.bytes = bytes, .size = size};
    const uint8_t *head = take(&r, 2);
    if (!head) return;
    llamac_model m = {.stop = -1};
    Tokenizer t = {.space = head[0] & 1 ? " " : LOWER_BLOCK, .space_prefix = head[0] & 2, .unk = 0, .bos = 1, .eos = 2,
                   .extra_spaces_removed = head[0] & 4, .vocab_size = 3 + head[1] % 64 + (head[0] & 8 ? 256 : 0)};
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
        if (among(t.pieces, n, (const char *)text, length)) { n--; continue; } // one that stands twice would be refused
        t.pieces[n] = (Piece){(const char *)text, piece[1], length, types[type]};
    }
    t.vocab_size = n;
    m.tokenizer = t;
    if (llamac_index_pieces(&m.tokenizer, NULL)) use_tokenizer(&m, (const char *)bytes + r.at, size - r.at);
    llamac_free_tokenizer(&m.tokenizer);
}

// The input is a pre-tokenizer, a number of merges, pairs of tokens that merge, and a text to encode with these and all bytes.
static void bpe_target(const uint8_t *bytes, size_t size) {
    enum { MOST = 64 };
    static char spelled[256 + MOST][64];
    if (size < 2) return;
    int n_merges = bytes[1] % MOST, n = 256;
    if (size < 2 + 2 * (size_t)n_merges) return;
    size_t text = size - 2 - 2 * n_merges; // of longer ones there is nothing new to learn
    llamac_model m = {.stop = -1};
    Tokenizer *t = &m.tokenizer;
    *t = (Tokenizer){.space = " ", .bos = 0, .eos = 1, .unk = -1, .eot = -1, .vocab_size = 256};
    t->pieces = resize(NULL, 256 + MOST, sizeof *t->pieces);
    t->byte_pairs = calloc(1, sizeof *t->byte_pairs);
    for (int i = 0; i < 256; i++) t->pieces[i] = (Piece){spelled[i], 0, write_letter(i, spelled[i]), NORMAL};
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
        if (among(t->pieces, n, spelled[n], (int)length - 1)) continue; // another way to make it
        t->pieces[n] = (Piece){spelled[n], 0, (int)length - 1, n % 7 ? NORMAL : USER_DEFINED};
        n++;
    }
    t->vocab_size = n;
    t->byte_pairs->pre = bytes[0] % N_PRE_TOKENIZERS;
    t->byte_pairs->longest = 60;
    Value list = {.present = true, .is_array = true, .kind = STRING, .count = count, .data = {(uint8_t *)merges.s, merges.n, 0, false}};
    if (llamac_index_pieces(t, NULL) && read_merges(t, list, NULL))
        use_tokenizer(&m, (const char *)bytes + 2 + 2 * n_merges, text < 128 ? text : 128);
    llamac_free_tokenizer(t);
    free(merges.s);
}

// A parser of JSON that is written apart from the grammar: advances *s past a value. Counts levels only to bound its recursion.
static bool parse_value(const char **s, const char *end, int level);

static void parse_spaces(const char **s, const char *end) {
    while (*s < end && **s && strchr(" \t\n\r", **s)) ++*s;
}

static bool parse_char(const char **s, const char *end, char c) { return *s < end && *(*s)++ == c; }

// Returns the number of \uXXXX, or -1.
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
    if (**s == '{' || **s == '[') ok = level < LLAMAC_JSON_DEPTH && parse_items(s, end, level, **s == '{');
    else if (**s == '"') ok = parse_text(s, end);
    else if (**s == '-' || (**s >= '0' && **s <= '9')) ok = parse_number(s, end);
    else {
        size_t n = 0;
        for (int i = 0; i < 3 && !n; i++)
            if ((size_t)(end - *s) >= strlen(words[i]) && !memcmp(*s, words[i], strlen(words[i]))) n = strlen(words[i]);
        *s += n, ok = n;
    }
    parse_spaces(s, end);
    return ok;
}

// Whether the bytes of a token are accepted one by one, where every byte is a token: 3 to 258.
static bool allowed_by_bytes(const llamac_grammar *g, int token) {
    llamac_grammar copy = *g; // of the text's state; the tables are shared
    char piece[64];
    size_t n = llamac_decode(g->model, -1, token, piece, sizeof piece), i = 0;
    if (token == g->model->tokenizer.unk) return false;
    while (i < n && llamac_grammar_accept(&copy, 3 + (unsigned char)piece[i])) i++;
    return n && i == n;
}

// Writes a text of allowed tokens, which the bytes choose. It must be JSON within the budget, if any text is.
static void walk_grammar(llamac_grammar *g, const uint8_t *choices, size_t n, bool object, bool bytes) {
    int left = n ? choices[0] % 64 : 0, begun = 0, vocab_size = g->vocab_size;
    Text text = {0};
    for (size_t i = 0; left >= 0; i++, left--) {
        uint32_t choice = n ? choices[i % n] * 257u + (uint32_t)i : (uint32_t)i;
        uint8_t *widest = malloc(vocab_size);
        memcpy(widest, llamac_grammar_allowed(g, INT32_MAX), vocab_size);
        const uint8_t *mask = llamac_grammar_allowed(g, left);
        for (int t = 0; t < vocab_size; t++) if (mask[t] > widest[t]) abort();
        int token = -1, refused = (int)(choice % vocab_size);
        if (llamac_grammar_complete(g) && choice % 5 == 0) left = 0;
        for (int k = 0; k < vocab_size && token < 0; k++) {
            int t = (int)((choice + k) % vocab_size);
            if (mask[t] && !llamac_ends(g->model, t)) token = t;
        }
        if (!widest[refused] && llamac_grammar_accept(g, refused)) abort();
        if (bytes && widest[refused] != allowed_by_bytes(g, refused) && !llamac_ends(g->model, refused)) abort();
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

// The input is flags, a number of pieces, the pieces (length in a byte, text), and bytes that choose tokens of these and all bytes,
// or characters of structure alone.
static void grammar_target(const uint8_t *bytes, size_t size) {
    enum { MOST = 64 };
    static const char structure[] = "{}[]:,\"";
    static char single[256];
    Reader r = {.bytes = bytes, .size = size};
    const uint8_t *head = take(&r, 2);
    if (!head) return;
    llamac_model m = {.stop = -1};
    Tokenizer *t = &m.tokenizer;
    *t = (Tokenizer){.space = head[0] & 4 ? LOWER_BLOCK : " ", .unk = 0, .bos = 1, .eos = 2, .eot = -1};
    t->pieces = resize(NULL, 3 + 256 + MOST, sizeof *t->pieces);
    t->pieces[0] = (Piece){"<unk>", 0, 5, UNKNOWN};
    t->pieces[1] = (Piece){"<s>", 0, 3, CONTROL};
    t->pieces[2] = (Piece){"</s>", 0, 4, CONTROL};
    int n = 3;
    for (int i = 0; i < 256; i++) {
        single[i] = (char)i;
        if (head[0] & 2 || (i && strchr(structure, i))) t->pieces[n++] = (Piece){&single[i], 0, 1, NORMAL};
    }
    for (int i = 0; i < head[1] % MOST; i++) {
        const uint8_t *length = take(&r, 1), *text = length && *length % 32 ? take(&r, *length % 32) : NULL;
        if (!text) break;
        t->pieces[n++] = (Piece){(const char *)text, 0, *length % 32, *length & 32 ? USER_DEFINED : NORMAL};
    }
    t->vocab_size = n;
    llamac_grammar *g = llamac_grammar_json(&m, head[0] & 1, NULL);
    if (!g) abort();
    for (int i = 0; i < 2; i++, llamac_grammar_reset(g)) 
        walk_grammar(g, bytes + r.at / (i + 1), size - r.at / (i + 1), head[0] & 1, head[0] & 2);
    llamac_grammar_free(g);
    free(t->pieces);
}

enum { STATE_TOKENS = 80 }; // max tokens of the target's sequences: two blocks of a file

// An engine of each type of KV cache, for the smallest model of llama2.c's format v0.
static llamac_engine *state_engine(int type) {
    static llamac_engine *engines[3];
    static const int sizes[] = {/*dim*/ 4, /*hidden_dim*/ 4, /*n_layers*/ 2, /*n_heads*/ 2, /*n_kv_heads*/ 1, /*vocab_size*/ 8, STATE_TOKENS};
    static const int kv_bits[] = {32, 16, 8};
    static float file[2048];
    if (engines[type]) return engines[type];
    if (!file[100]) {
        for (size_t i = 0; i < sizeof file / sizeof *file; i++) file[i] = (float)(i * 37 % 64) / 64 - 0.4f;
        memcpy(file, sizes, sizeof sizes);
    }
    for (size_t n = 28; n < sizeof file && !engines[type]; n += 4) { // the loader knows the size
        llamac_model *m = llamac_open_memory(file, n, LLAMAC_NO_TOKENIZER, NULL);
        if (m) engines[type] = llamac_start(m, &(llamac_options){.kv_bits = kv_bits[type], .n_threads = 1}, NULL);
    }
    if (!engines[type]) abort();
    return engines[type];
}

// The input is a byte, which chooses the engine, and a file of a saved sequence. Magic, version, model and SHA-256 are put right
// unless the byte has 4: else no mutation would get beyond them. What is accepted must be what the cache then has, and can be continued.
static void state_target(uint8_t *bytes, size_t size) {
    if (!size) return;
    llamac_engine *engine = state_engine(bytes[0] % 3);
    StateOwner owner = owner_of(engine);
    uint8_t *file = malloc(size); // aligned, and no byte more than there are
    Header header = header_of(&owner, 0);
    size_t n = size - 1;
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
        llamac_sampler sampler = {.temperature = 1, .repeat_penalty = 1.1f, .penalty_tokens = -1, .state = 1};
        if (length < STATE_TOKENS) llamac_sample(s, &sampler, &error);
        llamac_sequence_free(s);
    }
    free(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const versions[] = {"v0", "v1", "v2"};
    static const char *target;
    if (!target) {
        target = getenv("TARGET");
        if (!target || !freopen("/dev/null", "w", stdout)) exit(fprintf(stderr, "TARGET: expected the name of a target\n"));
    }
    uint8_t *bytes = malloc(size ? size : 1); // no byte more than there are, and aligned as a file's are
    if (!bytes) abort();
    if (size) memcpy(bytes, data, size);
    bool file = strcmp(target, "encode") && strcmp(target, "bpe") && strcmp(target, "grammar") && strcmp(target, "state");
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
    allowed = SIZE_MAX;
    free(bytes);
    return 0;
}

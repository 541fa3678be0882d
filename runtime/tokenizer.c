// The tokenizer: the vocabulary, and sentencepiece's BPE. Byte-level BPE is in bpe.c.
#include <math.h>
#include "heap.h"
#include "model.h"

enum {
    MAX_PIECE = (1 << 27) - 1, // bytes that Piece.n can hold
    // bytes of a symbol (a user-defined piece): limits the time of llamac_match_symbol, which
    // searches for a symbol at every position of a text
    MAX_SYMBOL = 256,
    MAX_PROBES = 1000, // slots of the hash table that a lookup tries
};

static const char LOWER_BLOCK[] = "\xe2\x96\x81"; // U+2581, sentencepiece's space

static uint32_t hash(const char *s, int n) { // FNV-1a
    uint32_t h = 2166136261u;
    for (int i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 16777619u;
    return h;
}

// Returns the slot of the table that holds the piece with this text, or the empty slot where it
// belongs. Returns NULL after MAX_PROBES: in a malicious vocabulary, many pieces may have one hash.
static int *slot_of(const Tokenizer *t, const char *s, int n) {
    uint32_t i = hash(s, n);
    for (int probes = 0; probes < MAX_PROBES; probes++, i++) {
        int *slot = &t->table[i & (t->table_size - 1)];
        if (*slot < 0) return slot;
        const Piece *p = &t->pieces[*slot];
        if (p->n == n && memcmp(p->s, s, n) == 0) return slot;
    }
    return NULL;
}

// Returns the normal, user-defined or unused piece with this text, or -1. Control, byte and unknown
// pieces are not found: a text that contains their spelling is encoded as ordinary text.
static int lookup(const Tokenizer *t, const char *s, int n) {
    const int *slot = slot_of(t, s, n);
    int type = slot && *slot >= 0 ? (int)t->pieces[*slot].type : UNKNOWN;
    return type == NORMAL || type == USER_DEFINED || type == UNUSED ? *slot : -1;
}

int llamac_token_of(const Tokenizer *t, const char *s, int n) {
    int id = lookup(t, s, n);
    return id >= 0 && t->pieces[id].type != UNUSED ? id : -1;
}

// Returns the byte that a byte piece such as "<0x41>" stands for, or -1.
static int byte_of(const Piece *p) {
    static const char digits[] = "0123456789ABCDEF";
    if (p->n != 6 || memcmp(p->s, "<0x", 3) || p->s[5] != '>') return -1;
    const char *high = memchr(digits, p->s[3], 16), *low = memchr(digits, p->s[4], 16);
    return high && low ? (int)(16 * (high - digits) + (low - digits)) : -1;
}

static int compare_symbols(const void *a, const void *b) {
    const Piece *x = *(const Piece *const *)a, *y = *(const Piece *const *)b;
    int order = memcmp(x->s, y->s, x->n < y->n ? x->n : y->n);
    return order ? order : x->n - y->n;
}

// Returns whether there is a space at s[at], and none before it.
static bool begins_word(const Tokenizer *t, const char *s, size_t at, size_t n) {
    size_t space = strlen(t->space);
    return at + space <= n && memcmp(s + at, t->space, space) == 0
           && !(at >= space && memcmp(s + at - space, t->space, space) == 0);
}

// Checks the byte pieces. A vocabulary without byte pieces is accepted: unknown characters become
// `unk`. A vocabulary with any must have one for each byte that encoding may need: all 256, except
// ASCII characters that are pieces themselves.
static bool check_bytes(const Tokenizer *t, Error *e) {
    for (int byte = 0; t->byte_fallback && byte < 256; byte++) {
        const char *s = byte == ' ' ? t->space : &(char){(char)byte};
        int n = byte == ' ' ? (int)strlen(t->space) : 1;
        bool is_piece = byte < 128 && lookup(t, s, n) >= 0;
        CHECK(t->byte_ids[byte] >= 0 || is_piece,
              "it has byte tokens, but none for the byte 0x%02X", byte);
    }
    return true;
}

// Turns bos, eos and eot into control tokens if the file lists them as user-defined, so that no
// text is encoded as one of them.
static void claim_ends(Tokenizer *t) {
    const int ends[] = {t->bos, t->eos, t->eot};
    for (int i = 0; i < 3; i++)
        if (ends[i] >= 0 && t->pieces[ends[i]].type == USER_DEFINED)
            t->pieces[ends[i]].type = CONTROL;
}

bool llamac_index_pieces(Tokenizer *t, Error *e) {
    int n = t->vocab_size;
    CHECK(t->bos < n && t->eos < n && t->unk < n && t->eot < n,
          "a special token is beyond the vocabulary of %d", n);
    claim_ends(t);
    for (t->table_size = 16; t->table_size < 2u * n; t->table_size *= 2) {}
    free(t->table);
    free(t->symbols);
    t->table = resize(NULL, t->table_size, sizeof *t->table);
    t->symbols = resize(NULL, n, sizeof *t->symbols);
    t->n_symbols = 0;
    CHECK(t->table && t->symbols, no_memory);
    t->encode_whole = t->byte_pairs;
    memset(t->table, -1, t->table_size * sizeof *t->table);
    memset(t->byte_ids, -1, sizeof t->byte_ids);
    for (int i = 0; i < n; i++) {
        const Piece *p = &t->pieces[i];
        CHECK(p->n > 0, "token %d is empty", i);
        CHECK(isfinite(p->score), "the score of token %d is not a finite number", i);
        int byte = p->type == BYTE ? byte_of(p) : -1, *slot = slot_of(t, p->s, p->n);
        CHECK(slot, "token %d is one of too many with the same hash", i);
        CHECK(*slot < 0, "tokens %d and %d have the same text, so encoding is ambiguous", *slot, i);
        CHECK(p->type != BYTE || byte >= 0,
              "token %d is a byte but is not written <0x00> to <0xFF>", i);
        CHECK(p->type != USER_DEFINED || p->n <= MAX_SYMBOL,
              "token %d is user-defined and has %d bytes, expected at most %d", i, p->n,
              MAX_SYMBOL);
        if (byte >= 0) t->byte_ids[byte] = i, t->byte_fallback = true;
        // how an unused piece is split can depend on earlier words of the text (Encoder.split)
        if (p->type == UNUSED) t->has_unused = t->encode_whole = true;
        for (int at = 1; at < p->n && !t->encode_whole; at++)
            t->encode_whole = begins_word(t, p->s, at, p->n);
        if (p->type == USER_DEFINED) t->symbols[t->n_symbols++] = p;
        *slot = i;
    }
    if (t->byte_pairs) llamac_find_bytes(t);
    else TRY(check_bytes(t, e));
    qsort(t->symbols, t->n_symbols, sizeof *t->symbols, compare_symbols);
    return true;
}

// Loads llama2.c's tokenizer.bin: the max length, then score, length and text of each piece. Spaces
// are written as spaces. The file has no types: token 0 is unknown, 1 begins and 2 ends a text,
// <0xNN> are bytes.
bool llamac_bin_tokenizer(Tokenizer *t, const uint8_t *bytes, size_t size, int vocab_size,
                          Error *e) {
    Reader r = {.bytes = bytes, .size = size}, start;
    uint32_t longest = take_u32(&r), found = 0, n = 0;
    for (start = r; !r.failed && r.at < size; n++) {
        take(&r, 4);
        uint32_t length = take_u32(&r);
        CHECK(length <= longest && length <= MAX_PIECE,
              "token %u has %u bytes, but the file's header allows %u", n, length, longest);
        take(&r, length);
        found = length > found ? length : found;
    }
    CHECK(!r.failed, "the file ends inside a token");
    CHECK(found == longest, "the longest token has %u bytes, but the file's header says %u", found,
          longest);
    CHECK(n == (uint32_t)vocab_size, "%u tokens, but the model has %d: another model's tokenizer",
          n, vocab_size);
    *t = (Tokenizer){.vocab_size = vocab_size,
                     .space = " ",
                     .space_prefix = true,
                     .add_bos = true,
                     .bos = 1,
                     .eos = 2,
                     .unk = 0,
                     .eot = -1};
    CHECK(vocab_size > 2, "%d tokens, expected at least 3", vocab_size);
    CHECK((t->pieces = resize(NULL, n, sizeof *t->pieces)), no_memory);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t score = take_u32(&start), length = take_u32(&start);
        Piece *p = &t->pieces[i];
        *p = (Piece){.s = (const char *)take(&start, length), .n = (int)length};
        memcpy(&p->score, &score, 4);
        p->type = i == 0 ? UNKNOWN : i <= 2 ? CONTROL : byte_of(p) >= 0 ? BYTE : NORMAL;
    }
    return llamac_index_pieces(t, e);
}

// Returns whether the text of a piece is one character. Pieces are assumed to be valid UTF-8, where
// every byte but a character's first is 10xxxxxx.
static bool is_character(const char *s, size_t n) {
    size_t first_bytes = 0;
    for (size_t i = 0; i < n; i++) first_bytes += (s[i] & 0xc0) != 0x80;
    return first_bytes == 1;
}

// The kinds of tokenizer.ggml.model: "gpt2" is byte-level BPE, the others are sentencepiece's BPE.
// llama.cpp cannot encode with a "llama" vocabulary without byte pieces, so export.py calls such a
// vocabulary "t5" if every piece is one character, because llama.cpp's t5 encoder then returns the
// same tokens as this code. Otherwise it writes "llama-without-bytes", which llama.cpp refuses.
bool llamac_gguf_tokenizer(Tokenizer *t, const Value *v, int vocab_size, Error *e) {
    String kind = llamac_get_string(v, TOKENIZER);
    bool byte_level = equals(kind, "gpt2");
    bool characters = equals(kind, "t5");
    CHECK(byte_level || characters || equals(kind, "llama") || equals(kind, "llama-without-bytes"),
          "the tokenizer is '%.*s', expected 'llama' (sentencepiece) or 'gpt2' (byte-level BPE)",
          SHOWN(kind, 40));
    const struct {
        int key;
        uint32_t kind;
    } arrays[] = {{TOKENS, STRING}, {SCORES, FLOAT}, {TOKEN_TYPES, I32}};
    for (int i = 0; i < 3; i++) {
        const Value *a = &v[arrays[i].key];
        if (byte_level && arrays[i].key == SCORES) continue;
        CHECK(a->present && a->is_array && a->kind == arrays[i].kind,
              "metadata key %s is missing or of another type", llamac_key(v, arrays[i].key).s);
        CHECK(a->count == (uint64_t)vocab_size, "%s has %llu entries, but the model has %d tokens",
              llamac_key(v, arrays[i].key).s, (unsigned long long)a->count, vocab_size);
    }
    int space_prefix, extra_spaces_removed, add_bos;
    *t = (Tokenizer){.vocab_size = vocab_size,
                     .space = LOWER_BLOCK,
                     .chat_template = llamac_get_string(v, CHAT_TEMPLATE)};
    t->eot = -1;
    if (v[EOT_ID].present) TRY(llamac_get_int(v, EOT_ID, NAN, &t->eot, e)); // NAN: no fallback
    TRY(llamac_get_int(v, BOS_ID, 1, &t->bos, e));
    TRY(llamac_get_int(v, EOS_ID, 2, &t->eos, e));
    TRY(llamac_get_int(v, UNK_ID, 0, &t->unk, e));
    TRY(llamac_get_int(v, ADD_BOS, 1, &add_bos, e));
    TRY(llamac_get_int(v, SPACE_PREFIX, 1, &space_prefix, e));
    TRY(llamac_get_int(v, EXTRA_SPACES, 0, &extra_spaces_removed, e));
    t->add_bos = add_bos, t->space_prefix = space_prefix,
    t->extra_spaces_removed = extra_spaces_removed;
    CHECK((t->pieces = resize(NULL, vocab_size, sizeof *t->pieces)), no_memory);
    Reader texts = v[TOKENS].data, scores = v[SCORES].data, types = v[TOKEN_TYPES].data;
    for (int i = 0; i < vocab_size; i++) {
        String s = take_string(&texts);
        uint32_t score = byte_level ? 0 : take_u32(&scores), type = take_u32(&types);
        CHECK(s.n <= MAX_PIECE, "token %d is too long", i);
        CHECK(type >= NORMAL && type <= BYTE, "token %d has type %u, expected 1 to 6", i, type);
        t->pieces[i] = (Piece){.s = s.s, .n = (int)s.n, .type = (int)type};
        memcpy(&t->pieces[i].score, &score, 4);
        CHECK(!characters || type == UNKNOWN || type == CONTROL
                  || (type == NORMAL && is_character(s.s, s.n)),
              "the tokenizer is 't5' and token %d is not a single character, expected 'llama' "
              "(sentencepiece)",
              i);
    }
    return byte_level ? llamac_byte_level(t, v, e) : llamac_index_pieces(t, e);
}

// ----------------------------------------------------------------------------
// Encoding

// Returns the length of the UTF-8 character at the beginning of s (n bytes); 0 if it is invalid.
int llamac_utf8(const char *s, size_t n) {
    const unsigned char *u = (const unsigned char *)s;
    if (!s || !n) return 0;
    int length = u[0] < 0x80   ? 1
                 : u[0] < 0xc2 ? 0
                 : u[0] < 0xe0 ? 2
                 : u[0] < 0xf0 ? 3
                 : u[0] < 0xf5 ? 4
                               : 0;
    if ((size_t)length > n) return 0;
    for (int i = 1; i < length; i++)
        if ((u[i] & 0xc0) != 0x80) return 0;
    bool overlong = (u[0] == 0xe0 && u[1] < 0xa0) || (u[0] == 0xf0 && u[1] < 0x90);
    // surrogates, above U+10FFFF
    bool outside = (u[0] == 0xed && u[1] >= 0xa0) || (u[0] == 0xf4 && u[1] >= 0x90);
    return overlong || outside ? 0 : length;
}

// Finds, by bisection among symbols lo to hi - 1, the first whose byte d is at least `byte`. The
// symbols must have their first d bytes in common. Returns hi if there is none.
static int first_symbol(const Tokenizer *t, int lo, int hi, int d, int byte) {
    while (lo < hi) {
        int middle = lo + (hi - lo) / 2;
        const Piece *p = t->symbols[middle];
        if (p->n <= d || (unsigned char)p->s[d] < byte) lo = middle + 1;
        else hi = middle;
    }
    return lo;
}

int llamac_match_symbol(const Tokenizer *t, const char *s, size_t n) {
    int best = -1, lo = 0, hi = t->n_symbols;
    for (int d = 0; (size_t)d < n && lo < hi; d++) {
        const Piece *first = t->symbols[lo], *last = t->symbols[hi - 1];
        // if the first and the last match, so do all between, because symbols are sorted
        bool all = first->n > d && first->s[d] == s[d] && last->s[d] == s[d];
        if (!all) {
            lo = first_symbol(t, lo, hi, d, (unsigned char)s[d]);
            hi = first_symbol(t, lo, hi, d, (unsigned char)s[d] + 1);
        }
        if (lo < hi && t->symbols[lo]->n == d + 1) best = (int)(t->symbols[lo] - t->pieces);
    }
    return best;
}

// Normalizes a text like sentencepiece: bytes that are not UTF-8 become U+FFFD, spaces and U+2581
// become t->space, `prefix` puts one before the text, and extra spaces are removed if the
// vocabulary requires it. In a user-defined piece, U+2581 stays unchanged.
static Text normalize(const Tokenizer *t, const char *s, size_t n, bool prefix) {
    Text out = {0};
    size_t space = strlen(t->space);
    bool remove = t->extra_spaces_removed;
    // drop spaces until another character: true at the beginning of the text, and after a character
    // or user-defined piece that ends in a space
    bool drop_spaces = remove;
    if (n && prefix) append(&out, t->space, space);
    for (size_t length; n; s += length, n -= length) {
        int symbol = llamac_match_symbol(t, s, n), valid = llamac_utf8(s, n);
        length = symbol >= 0 ? (size_t)t->pieces[symbol].n : valid ? (size_t)valid : 1;
        if (symbol < 0 && !valid) append_string(&out, "\xef\xbf\xbd");
        else if (symbol < 0 && length == 3 && memcmp(s, LOWER_BLOCK, 3) == 0)
            append(&out, t->space, space);
        else
            for (size_t i = 0; i < length; i++) {
                if (s[i] != ' ') append(&out, &s[i], 1);
                else if (!drop_spaces) append(&out, t->space, space);
                if (s[i] != ' ') drop_spaces = false;
            }
        drop_spaces = remove && (s[length - 1] == ' ');
    }
    while (remove && out.n >= space && memcmp(out.s + out.n - space, t->space, space) == 0)
        out.n -= space;
    return out;
}

// A part of the text that is one piece so far, in a linked list.
typedef struct {
    const char *s;
    int n;              // bytes; 0: it has been merged into the part before
    int previous, next; // indices of parts, or -1
    int symbol;         // a user-defined piece, which is not merged; or -1
    uint32_t priority;  // of the merge with the next part, or NO_MERGE
} Part;

#define NO_MERGE UINT32_MAX

typedef struct {
    const Tokenizer *t;
    Part *parts;
    int capacity;
    Heap merges;
    // (vocab_size,) where to split each unused piece: bytes of the left part of the latest pair
    // that could merge into it; 0: no such pair yet
    int *split;
    int *tokens;
    int n_tokens;
    bool after_unknown; // the latest part was unknown
} Encoder;

// Returns a number that is lower for higher scores, which must be finite. The bits of a
// float below the sign bit, as an integer, grow with its magnitude. So they are inverted for
// positive scores. Negative scores keep their bits, and the sign bit puts them after all others.
static uint32_t priority_of(float score) {
    uint32_t bits;
    score += 0.0f; // -0 becomes 0
    memcpy(&bits, &score, 4);
    return bits >> 31 ? bits : ~bits & 0x7fffffff;
}

// Adds the merge of a part with the next one to the heap, if the two make a piece.
static void note_merge(Encoder *e, int left) {
    if (left < 0) return;
    Part *a = &e->parts[left];
    const Part *b = a->next < 0 ? NULL : &e->parts[a->next];
    a->priority = NO_MERGE;
    if (!b || a->symbol >= 0 || b->symbol >= 0) return;
    int id = lookup(e->t, a->s, a->n + b->n);
    if (id < 0) return;
    a->priority = priority_of(e->t->pieces[id].score);
    push(&e->merges, (uint64_t)a->priority << 32 | (uint32_t)left);
    if (e->t->pieces[id].type == UNUSED) e->split[id] = a->n;
}

static void merge_parts(Encoder *e) {
    while (e->merges.n) {
        uint64_t merge = pop(&e->merges);
        int left = (int)(uint32_t)merge;
        Part *a = &e->parts[left];
        if (a->priority != merge >> 32) continue; // one of the two has been merged since
        Part *b = &e->parts[a->next];
        a->n += b->n, a->next = b->next;
        if (b->next >= 0) e->parts[b->next].previous = left;
        b->n = 0, b->priority = NO_MERGE;
        note_merge(e, a->previous);
        note_merge(e, left);
    }
}

// Appends the tokens of one part of the text, of piece `id` (-1: look it up). An unused piece is
// split again. An unknown part becomes its bytes or, without byte pieces, `unk`, once for
// consecutive unknown parts.
static void emit(Encoder *e, const char *s, int n, int id) {
    if (id < 0) id = lookup(e->t, s, n);
    if (id >= 0 && e->t->pieces[id].type == UNUSED && e->split[id]) {
        int left = e->split[id];
        emit(e, s, left, -1);
        emit(e, s + left, n - left, -1);
        return;
    }
    if (id < 0 && e->t->byte_fallback)
        for (int i = 0; i < n; i++) e->tokens[e->n_tokens++] = e->t->byte_ids[(unsigned char)s[i]];
    else if (id >= 0 || !e->after_unknown) e->tokens[e->n_tokens++] = id >= 0 ? id : e->t->unk;
    e->after_unknown = id < 0;
}

// Appends the tokens of a stretch (a word, or the whole text) of n bytes. Returns false if there is
// not enough memory.
static bool encode_stretch(Encoder *e, const char *s, size_t n) {
    int n_parts = 0;
    for (; n; n_parts++) {
        int symbol = llamac_match_symbol(e->t, s, n), valid = llamac_utf8(s, n);
        int length = symbol >= 0 ? e->t->pieces[symbol].n : valid ? valid : 1;
        if (n_parts == e->capacity) {
            Part *larger = resize(e->parts, 2 * e->capacity + 64, sizeof(Part));
            if (!larger) return false;
            e->parts = larger, e->capacity = 2 * e->capacity + 64;
        }
        int next = n > (size_t)length ? n_parts + 1 : -1;
        e->parts[n_parts] = (Part){s, length, n_parts - 1, next, symbol, NO_MERGE};
        s += length, n -= length;
    }
    for (int i = 0; i < n_parts; i++) note_merge(e, i);
    merge_parts(e);
    for (int i = 0; i >= 0; i = e->parts[i].next)
        emit(e, e->parts[i].s, e->parts[i].n, e->parts[i].symbol);
    return !e->merges.failed;
}

static int *no_tokens(size_t n, Error *error) {
    fail(error, "a text of %zu bytes is longer than %d, or there is not enough memory for it", n,
         MAX_TEXT);
    return NULL;
}

// Takes time O(n log n). Unless t->encode_whole, it encodes word by word, which keeps `parts` and
// the heap small.
int *llamac_encode_text(const Tokenizer *t, const char *s, size_t n, int how, int *n_tokens,
                        Error *error) {
    bool bos = how & WITH_BOS, prefix = how & WITH_PREFIX;
    *n_tokens = 0;
    if (n > MAX_TEXT) return no_tokens(n, error);
    if (t->byte_pairs) {
        int *tokens = llamac_encode_bytes(t, s, n, bos, n_tokens);
        return tokens ? tokens : no_tokens(n, error);
    }
    Text text = normalize(t, s, n, prefix && t->space_prefix);
    Encoder e = {.t = t, .tokens = resize(NULL, text.n + 1, sizeof(int))};
    if (t->has_unused) e.split = calloc(t->vocab_size, sizeof(int));
    bool ok = !text.failed && e.tokens && (e.split || !t->has_unused);
    if (ok && bos) e.tokens[e.n_tokens++] = t->bos;
    for (size_t start = 0, end = 1; ok && start < text.n; start = end++) {
        while (end < text.n && (t->encode_whole || !begins_word(t, text.s, end, text.n))) end++;
        ok = encode_stretch(&e, text.s + start, end - start);
    }
    if (!ok) free(e.tokens), e.tokens = no_tokens(n, error);
    free(text.s);
    free(e.parts);
    free(e.split);
    free(e.merges.keys);
    *n_tokens = e.tokens ? e.n_tokens : 0;
    return e.tokens;
}

bool llamac_check_text_arguments(const llamac_model *m, const char *text, size_t n, int *n_tokens,
                                 Error *e) {
    clear(e);
    CHECK(n_tokens, "n_tokens is NULL");
    *n_tokens = 0;
    CHECK(m, no_model);
    CHECK(text || !n, "the text of %zu bytes is NULL", n);
    return true;
}

int *llamac_encode(const llamac_model *m, const char *text, size_t n, bool bos, int *n_tokens,
                   Error *e) {
    if (!llamac_check_text_arguments(m, text, n, n_tokens, e)) return NULL;
    if (!m->tokenizer.pieces) return fail(e, "it has no tokenizer"), NULL;
    int how = WITH_PREFIX + (bos ? WITH_BOS : 0);
    return llamac_encode_text(&m->tokenizer, text, n, how, n_tokens, e);
}

void llamac_free_tokenizer(Tokenizer *t) {
    free(t->pieces);
    free(t->table);
    free(t->symbols);
    llamac_free_byte_pairs(t->byte_pairs);
    *t = (Tokenizer){0};
}

void llamac_free(void *p) { free(p); }

// ----------------------------------------------------------------------------
// Decoding

size_t llamac_decode(const llamac_model *m, int previous, int token, char *out, size_t room) {
    if (!m) return 0;
    if (!out) room = 0;
    const Tokenizer *t = &m->tokenizer;
    if (token < 0 || token >= t->vocab_size) return 0;
    const Piece *piece = &t->pieces[token];
    const char *s = piece->s;
    size_t n = piece->n, space = strlen(t->space), length = 0;
    if (piece->type == CONTROL) return 0;
    // an id without a token: the model's embedding has more rows than the vocabulary has tokens
    if (t->byte_pairs && piece->type == UNUSED) return 0;
    if (t->byte_pairs && piece->type == NORMAL) return llamac_decode_byte_level(piece, out, room);
    if (piece->type == BYTE) {
        if (room) *out = (char)byte_of(piece);
        return 1;
    }
    // like sentencepiece, drop the space that begins a text
    bool drop = previous == t->bos && (t->space_prefix || t->extra_spaces_removed);
    for (bool first = true; n; first = false) {
        bool is_space = n >= space && memcmp(s, t->space, space) == 0;
        if (!is_space || !first || !drop) {
            if (length < room) out[length] = is_space ? ' ' : *s;
            length++;
        }
        s += is_space ? space : 1;
        n -= is_space ? space : 1;
    }
    return length;
}

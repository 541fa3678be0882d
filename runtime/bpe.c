// Byte-level BPE, as in GPT-2, Llama 3, Qwen and SmolLM: a text is split into words, and the bytes
// of each word are merged pair by pair in the order of the list of merges. The vocabulary spells
// tokens in GPT-2's letters: one printable character for each byte.
#include <math.h>
#include "heap.h"
#include "model.h"
#include "unicode.h"

enum {
    MAX_MERGES = 1 << 24,
    MAX_STEPS = 1000, // max distance in the hash table from a pair's first slot
};

typedef struct {
    int left, right, merged; // ids of tokens; left is -1 if the slot is empty
    int rank;                // index in the list of merges: the lowest is merged first
} Pair;

typedef enum { PRE_GPT_2, PRE_LLAMA_BPE, PRE_QWEN2, PRE_SMOLLM, N_PRE_TOKENIZERS } PreTokenizer;
static const char *const pre_tokenizers[N_PRE_TOKENIZERS] = {"gpt-2", "llama-bpe", "qwen2",
                                                             "smollm"};

struct BytePairs {
    PreTokenizer pre;
    Pair *pairs; // hash table of 1 << bits slots
    int bits;
    int steps;   // the largest distance of a pair from its first slot
    int longest; // max bytes of a token
};

// ----------------------------------------------------------------------------
// GPT-2's letters

// Returns the letter of a byte. A byte that is visible in Latin-1 stands for itself; the 68 others
// become U+0100 to U+0143, in order.
static int letter_of(int byte) {
    return byte <= 0x20                   ? 0x100 + byte
           : byte >= 0x7f && byte <= 0xa0 ? 0x121 + byte - 0x7f
           : byte == 0xad                 ? 0x143
                                          : byte;
}

// Returns the byte whose letter is at the beginning of s (n bytes), and the letter's length in
// UTF-8; -1 if s does not begin with a letter.
static int byte_of_letter(const char *s, int n, int *length) {
    const unsigned char *u = (const unsigned char *)s;
    int letter = u[0];
    *length = u[0] < 0x80 ? 1 : 2;
    bool two = u[0] >= 0xc2 && u[0] <= 0xc5 && n > 1 && (u[1] & 0xc0) == 0x80;
    if (u[0] >= 0x80) letter = two ? (u[0] & 31) << 6 | (u[1] & 63) : 0;
    int byte = letter < 0x100    ? letter
               : letter <= 0x120 ? letter - 0x100
               : letter <= 0x142 ? letter - 0x121 + 0x7f
                                 : 0xad;
    return letter <= 0x143 && letter_of(byte) == letter ? byte : -1;
}

// Writes the letter of a byte in UTF-8, and returns its length.
static int write_letter(int byte, char out[2]) {
    int letter = letter_of(byte);
    if (letter < 0x80) return *out = (char)letter, 1;
    out[0] = (char)(0xc0 | letter >> 6), out[1] = (char)(0x80 | (letter & 63));
    return 2;
}

size_t llamac_decode_byte_level(const Piece *p, char *out, size_t room) {
    size_t n = 0;
    for (int at = 0, length; at < p->n; at += length, n++) {
        int byte = byte_of_letter(p->s + at, p->n - at, &length);
        if (n < room) out[n] = (char)byte;
    }
    return n;
}

// ----------------------------------------------------------------------------
// The list of merges

// Returns the first slot where a pair may be (Fibonacci hashing).
static uint32_t slot_of_pair(const BytePairs *b, int left, int right) {
    return (uint32_t)(((uint64_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15
                      >> (64 - b->bits));
}

// Returns the pair of two tokens that merge, or NULL if they do not.
static const Pair *find_pair(const BytePairs *b, int left, int right) {
    uint32_t slot = slot_of_pair(b, left, right), last = (1u << b->bits) - 1;
    for (int step = 0; step <= b->steps; step++, slot++) {
        const Pair *p = &b->pairs[slot & last];
        if (p->left == left && p->right == right) return p;
        if (p->left < 0) break;
    }
    return NULL;
}

static bool add_pair(BytePairs *b, Pair pair, Error *e) {
    uint32_t slot = slot_of_pair(b, pair.left, pair.right), last = (1u << b->bits) - 1;
    int step = 0;
    const Pair *same = find_pair(b, pair.left, pair.right);
    CHECK(!same, "merges %d and %d are the same", same->rank, pair.rank);
    while (b->pairs[(slot + step) & last].left >= 0 && step < MAX_STEPS) step++;
    CHECK(step < MAX_STEPS, "merge %d is one of too many with the same hash", pair.rank);
    b->pairs[(slot + step) & last] = pair;
    if (step > b->steps) b->steps = step;
    return true;
}

static bool find_space(String s, int rank, const char **space, Error *e) {
    *space = s.n > 2 && s.n <= MAX_TEXT ? memchr(s.s + 1, ' ', s.n - 2) : NULL;
    CHECK(*space, "merge %d is not two tokens with a space between", rank);
    return true;
}

// Reads the merge "left right". Both, and their concatenation, must be tokens.
static bool read_merge(const Tokenizer *t, String s, int rank, Text *text, Error *e) {
    const char *space;
    TRY(find_space(s, rank, &space, e));
    size_t left = space - s.s, right = s.n - left - 1;
    text->n = 0;
    append(text, s.s, left);
    append(text, space + 1, right);
    CHECK(!text->failed, no_memory);
    Pair pair = {llamac_token_of(t, s.s, (int)left), llamac_token_of(t, space + 1, (int)right),
                 llamac_token_of(t, text->s, (int)text->n), rank};
    CHECK(pair.left >= 0 && pair.right >= 0 && pair.merged >= 0,
          "merge %d, '%.*s': %s is not a text token", rank, SHOWN(s, 80),
          pair.left < 0    ? "the first part"
          : pair.right < 0 ? "the second part"
                           : "the result");
    return add_pair(t->byte_pairs, pair, e);
}

static bool read_merges(Tokenizer *t, Value merges, Error *e) {
    BytePairs *b = t->byte_pairs;
    CHECK(merges.count <= MAX_MERGES, "%llu merges, expected at most %d",
          (unsigned long long)merges.count, MAX_MERGES);
    // Check all merges before the table is allocated, so that the size of the file limits its size.
    // A merge takes at least 11 bytes of the file (length, "a b") and at most 8/3 slots: 43 bytes.
    Reader list = merges.data;
    const char *space;
    for (int i = 0; i < (int)merges.count; i++) TRY(find_space(take_string(&list), i, &space, e));
    // at most 3/4 of the slots are used
    for (b->bits = 4; 3ull << b->bits < 4 * merges.count; b->bits++) {}
    CHECK((b->pairs = resize(NULL, (size_t)1 << b->bits, sizeof(Pair))), no_memory);
    for (uint32_t i = 0; i < 1u << b->bits; i++) b->pairs[i].left = -1;
    Text text = {0};
    bool ok = true;
    for (int i = 0; i < (int)merges.count && ok; i++)
        ok = read_merge(t, take_string(&merges.data), i, &text, e);
    free(text.s);
    return ok;
}

bool llamac_byte_level(Tokenizer *t, const Value *v, Error *e) {
    String pre = llamac_get_string(v, PRE_TOKENIZER);
    int kind = 0;
    while (kind < N_PRE_TOKENIZERS && !equals(pre, pre_tokenizers[kind])) kind++;
    CHECK(kind < N_PRE_TOKENIZERS,
          "the pre-tokenizer is '%.*s', expected gpt-2, llama-bpe, qwen2 or smollm",
          SHOWN(pre, 40));
    TRY(llamac_get_int(v, EOS_ID, NAN, &t->eos, e));
    TRY(llamac_get_int(v, BOS_ID, t->eos, &t->bos,
                       e)); // Qwen has no BOS: its EOS separates texts
    int add_bos;
    TRY(llamac_get_int(v, ADD_BOS, kind == PRE_LLAMA_BPE, &add_bos, e));
    t->add_bos = add_bos, t->unk = -1, t->space = " ",
    t->space_prefix = t->extra_spaces_removed = false;
    CHECK((t->byte_pairs = calloc(1, sizeof *t->byte_pairs)), no_memory);
    t->byte_pairs->pre = kind;
    for (int i = 0; i < t->vocab_size; i++) {
        const Piece *p = &t->pieces[i];
        CHECK(p->type != UNKNOWN && p->type != BYTE,
              "token %d has type %d, which byte-level BPE does not have", i, p->type);
        if (p->n > t->byte_pairs->longest) t->byte_pairs->longest = p->n;
        for (int at = 0, length = 1; p->type == NORMAL && at < p->n; at += length)
            CHECK(byte_of_letter(p->s + at, p->n - at, &length) >= 0,
                  "token %d has a character outside GPT-2's byte alphabet", i);
    }
    Value merges = v[MERGES];
    CHECK(merges.present && merges.is_array && merges.kind == STRING,
          "metadata key %s is missing or of another type", llamac_key(v, MERGES).s);
    TRY(llamac_index_pieces(t, e));
    return read_merges(t, merges, e);
}

// A byte without a token is dropped from texts, as in Hugging Face's tokenizers.
void llamac_find_bytes(Tokenizer *t) {
    char letter[2];
    for (int byte = 0; byte < 256; byte++)
        t->byte_ids[byte] = llamac_token_of(t, letter, write_letter(byte, letter));
}

void llamac_free_byte_pairs(BytePairs *b) {
    if (b) free(b->pairs);
    free(b);
}

// ----------------------------------------------------------------------------
// Words, split like the regular expressions of the models' pre-tokenizers

static const uint8_t ascii_classes[128] = {
    ['\t'] = WHITE_SPACE, ['\n'] = WHITE_SPACE, ['\v'] = WHITE_SPACE, ['\f'] = WHITE_SPACE,
    ['\r'] = WHITE_SPACE, [' '] = WHITE_SPACE,  ['0'] = NUMBER,       ['1'] = NUMBER,
    ['2'] = NUMBER,       ['3'] = NUMBER,       ['4'] = NUMBER,       ['5'] = NUMBER,
    ['6'] = NUMBER,       ['7'] = NUMBER,       ['8'] = NUMBER,       ['9'] = NUMBER,
};

// Returns the class of the character at the beginning of s (n bytes, at least 1), and its length.
static int class_of(const char *s, size_t n, int *length) {
    const unsigned char *u = (const unsigned char *)s;
    *length = 1;
    if (*u < 0x80) return (unsigned)((*u | 32) - 'a') < 26 ? LETTER : ascii_classes[*u];
    *length = llamac_utf8(s, n); // 0: invalid; its class is that of U+0000, OTHER
    uint32_t c = *length == 2   ? (u[0] & 31u) << 6 | (u[1] & 63)
                 : *length == 3 ? (u[0] & 15u) << 12 | (u[1] & 63u) << 6 | (u[2] & 63)
                 : *length == 4
                     ? (u[0] & 7u) << 18 | (u[1] & 63u) << 12 | (u[2] & 63u) << 6 | (u[3] & 63)
                     : 0;
    if (!*length) *length = 1;
    // find the last run that begins at c or before
    size_t lo = 0, count = sizeof unicode_runs / sizeof *unicode_runs;
    for (size_t half; (half = count / 2); count -= half)
        lo += unicode_runs[lo + half] >> 2 <= c ? half : 0;
    return unicode_runs[lo] & 3;
}

// Returns the end of the run of up to `max` characters of one class from s[at] on.
static size_t run_of(int class, const char *s, size_t at, size_t n, size_t max) {
    for (int length; at < n && max-- && class_of(s + at, n - at, &length) == class;) at += length;
    return at;
}

// Returns the length of a contraction: 's 't 're 've 'm 'll 'd; 0 if there is none. `capitals`:
// also accept capital letters, and the long s (U+017F), which case folding makes an s.
static size_t contraction(const char *s, size_t n, bool capitals) {
    if (*s != '\'' || n < 2) return 0;
    int lower = capitals ? 32 : 0; // the bit that turns a capital letter into a small one
    int a = s[1] | lower, b = n > 2 ? s[2] | lower : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    return capitals && n > 2 && !memcmp(s + 1, "\xc5\xbf", 2) ? 3 : 0;
}

// Returns the length of the word at the beginning of s, which begins with white space. At the end
// of a text, the word is all of the white space; elsewhere, all but the last character, with which
// the next word may begin, but at least one character. `ends_at_number`: a number counts as the end
// of the text, because the digits are split off before the spaces are.
static size_t word_of_spaces(const char *s, size_t n, bool ends_at_number) {
    size_t end = 0, last = 0;
    int length, class = WHITE_SPACE;
    while (end < n && (class = class_of(s + end, n - end, &length)) == WHITE_SPACE)
        last = end, end += length;
    bool ends = end == n || (ends_at_number && class == NUMBER);
    return ends || !last ? end : last;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// `digits_apart`: each digit is a word of its own, and a space before it is another.
static size_t word_of_gpt2(const char *s, size_t n, bool digits_apart) {
    int length;
    size_t word = contraction(s, n, false), space = *s == ' ' && n > 1;
    if (word) return word;
    int class = class_of(s + space, n - space, &length);
    if (digits_apart && class == NUMBER) return space ? 1 : length;
    if (class == WHITE_SPACE) return word_of_spaces(s, n, digits_apart);
    return run_of(class, s, space, n, SIZE_MAX);
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}
// | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
// `digits`: max digits of a word, in place of 3.
static size_t word_of_llama3(const char *s, size_t n, int digits) {
    int length, second;
    size_t word = contraction(s, n, true), space = *s == ' ' && n > 1;
    if (word) return word;
    int class = class_of(s, n, &length);
    if (class == LETTER) return run_of(LETTER, s, 0, n, SIZE_MAX);
    if (class == NUMBER) return run_of(NUMBER, s, 0, n, digits);
    bool newline = *s == '\r' || *s == '\n';
    if (!newline && (size_t)length < n && class_of(s + length, n - length, &second) == LETTER)
        return run_of(LETTER, s, length, n, SIZE_MAX);
    if (class_of(s + space, n - space, &second) == OTHER) {
        for (word = run_of(OTHER, s, space, n, SIZE_MAX);
             word < n && (s[word] == '\r' || s[word] == '\n');)
            word++;
        return word;
    }
    size_t end = run_of(WHITE_SPACE, s, 0, n, SIZE_MAX);
    for (word = end; word && s[word - 1] != '\r' && s[word - 1] != '\n';) word--;
    return word ? word : word_of_spaces(s, n, false);
}

// Returns the length of the first word of s (n bytes, at least 1).
static size_t first_word(PreTokenizer pre, const char *s, size_t n) {
    switch (pre) {
    case PRE_LLAMA_BPE: return word_of_llama3(s, n, 3);
    case PRE_QWEN2: return word_of_llama3(s, n, 1);
    default: return word_of_gpt2(s, n, pre == PRE_SMOLLM);
    }
}

// ----------------------------------------------------------------------------
// Encoding

// A token of a word, in a linked list.
typedef struct {
    int id, previous, next; // -1: there is none
    int rank, merged;       // merge with the next link: its rank (-1: none) and its token
} Link;

typedef struct {
    const Tokenizer *t;
    Link *links;
    size_t capacity;
    Heap merges;
    char *letters; // (2 * capacity,) a word in GPT-2's letters
    int *tokens, n_tokens;
} WordEncoder;

// Makes room for the links and letters of a word of n bytes.
static bool make_room(WordEncoder *w, size_t n) {
    if (n <= w->capacity) return true;
    n += n / 2 + 64;
    void *links = resize(w->links, n, sizeof *w->links);
    if (links) w->links = links;
    void *letters = resize(w->letters, 2 * n, 1);
    if (letters) w->letters = letters;
    if (links && letters) w->capacity = n;
    return links && letters;
}

// Adds the merge of a link with the next one to the heap, if they merge.
static void note_pair(WordEncoder *w, int left) {
    Link *link = &w->links[left];
    const Pair *pair =
        link->next < 0 ? NULL : find_pair(w->t->byte_pairs, link->id, w->links[link->next].id);
    link->rank = pair ? pair->rank : -1;
    if (!pair) return;
    link->merged = pair->merged;
    push(&w->merges, (uint64_t)pair->rank << 32 | (uint32_t)left);
}

static void merge_links(WordEncoder *w) {
    while (w->merges.n) {
        uint64_t merge = pop(&w->merges);
        int left = (int)(uint32_t)merge;
        Link *link = &w->links[left];
        if (link->rank != (int)(merge >> 32)) continue; // one of the two has been merged since
        Link *gone = &w->links[link->next];
        gone->rank = -1;
        link->id = link->merged, link->next = gone->next;
        if (link->next >= 0) w->links[link->next].previous = left;
        note_pair(w, left);
        if (link->previous >= 0) note_pair(w, link->previous);
    }
}

// Returns the normal token that spells a whole word, or -1. Llama 3 uses it even if the merges do
// not lead to it (ignore_merges in its tokenizer.json).
static int whole_word(WordEncoder *w, const char *s, size_t n) {
    int length = 0;
    if (n > (size_t)w->t->byte_pairs->longest) return -1;
    for (size_t i = 0; i < n; i++) length += write_letter((unsigned char)s[i], w->letters + length);
    int id = llamac_token_of(w->t, w->letters, length);
    return id >= 0 && w->t->pieces[id].type == NORMAL ? id : -1;
}

// Appends the tokens of a word. Returns false if there is not enough memory. Takes time O(n log n).
static bool encode_word(WordEncoder *w, const char *s, size_t n) {
    if (!make_room(w, n)) return false;
    int count = 0, whole = w->t->byte_pairs->pre == PRE_LLAMA_BPE ? whole_word(w, s, n) : -1;
    if (whole >= 0) return w->tokens[w->n_tokens++] = whole, true;
    for (size_t i = 0; i < n; i++) {
        int id = w->t->byte_ids[(unsigned char)s[i]];
        if (id < 0) continue;
        w->links[count] = (Link){.id = id, .previous = count - 1, .next = count + 1};
        count++;
    }
    if (!count) return true;
    w->links[count - 1].next = -1;
    for (int i = 0; i < count; i++) note_pair(w, i);
    merge_links(w);
    for (int i = 0; i >= 0; i = w->links[i].next) w->tokens[w->n_tokens++] = w->links[i].id;
    return !w->merges.failed;
}

// Returns the text with U+FFFD in place of each byte that is not part of a valid character.
static Text clean(const char *s, size_t n) {
    Text out = {0};
    for (size_t at = 0, from = 0; at <= n;) {
        int length = at < n ? llamac_utf8(s + at, n - at) : 0;
        if (!length) {
            if (at > from) append(&out, s + from, at - from); // s may be NULL if n is 0
            if (at < n) append_string(&out, "\xef\xbf\xbd");
            from = ++at;
        } else at += length;
    }
    return out;
}

// Encodes user-defined tokens as they are, and splits the text between them into words.
static bool encode_words(WordEncoder *w, const char *s, size_t n) {
    const Tokenizer *t = w->t;
    for (size_t start = 0, end = 0; start < n;) {
        int symbol = -1; // the next user-defined token, at `end`
        while (t->n_symbols && end < n && (symbol = llamac_match_symbol(t, s + end, n - end)) < 0) {
            int length = llamac_utf8(s + end, n - end);
            end += length ? length : 1;
        }
        if (!t->n_symbols) end = n;
        for (size_t length; start < end; start += length) {
            length = first_word(t->byte_pairs->pre, s + start, end - start);
            if (!encode_word(w, s + start, length)) return false;
        }
        if (symbol >= 0) w->tokens[w->n_tokens++] = symbol, start = end += t->pieces[symbol].n;
    }
    return true;
}

int *llamac_encode_bytes(const Tokenizer *t, const char *s, size_t n, bool bos, int *n_tokens) {
    Text text = clean(s, n);
    WordEncoder w = {.t = t, .tokens = resize(NULL, text.n + 1, sizeof(int))};
    bool ok = !text.failed && w.tokens;
    if (ok && bos) w.tokens[w.n_tokens++] = t->bos;
    ok = ok && encode_words(&w, text.s, text.n);
    if (!ok) free(w.tokens), w.tokens = NULL;
    free(text.s);
    free(w.links);
    free(w.merges.keys);
    free(w.letters);
    *n_tokens = w.tokens ? w.n_tokens : 0;
    return w.tokens;
}

// Tests llamac_grammar through llamac.h. Texts are read and printed as lines of hexadecimal digits.
//   grammar walk MODEL OBJECT SEED N
//     Writes N texts of random allowed tokens. Prints for each its token budget, the number of its
//     tokens, and the text.
//   grammar read MODEL OBJECT HOW
//     Reads texts, as tokens of one byte (HOW=bytes) or as llamac_encode divides them (HOW=tokens).
//     Prints for each the number of accepted tokens, the number of all tokens, and 1 if the text is
//     complete, else 0.
//   grammar masks MODEL OBJECT LEFT
//     Reads texts as tokens of one byte. Prints for each the tokens that are allowed next if LEFT
//     tokens are left, or "refused".
//   grammar time MODEL
//     Prints the microseconds to build the grammar, and to accept a token and compute the next
//     mask: in strings, elsewhere, and with few tokens left.
//   grammar wrong MODEL
//     Makes invalid calls and prints their errors.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "../runtime/llamac.h"

enum { MAX_BUDGET = 400, LONGEST = 1 << 20 };

static uint64_t state = 88172645463325252ull;

static int below(int n) { // a number 0..n-1 (Marsaglia's xorshift)
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (int)(state % n);
}

#define EXPECT(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

typedef struct {
    llamac_model *model;
    llamac_grammar *grammar, // the one in use: `built` or `copy`
        *built, *copy;
    int vocab_size, bytes[256];
    uint16_t *structure;
} Test;

static const char structure[] = "{}[]\":,\\1";

// Returns the characters of `structure` that occur in a text, as one bit each.
static uint16_t structure_of(const char *s, size_t n) {
    uint16_t bits = 0;
    for (size_t i = 0; structure[i]; i++) bits |= !!memchr(s, structure[i], n) << i;
    return bits;
}

static Test open_test(const char *path, bool object) {
    llamac_error error;
    Test t = {.model = llamac_open(path, 0, &error)};
    if (t.model) t.grammar = t.built = llamac_grammar_json(t.model, object, &error);
    if (t.built) t.copy = llamac_grammar_copy(t.built, &error);
    if (!t.copy) {
        fprintf(stderr, "%s\n", error.text);
        exit(1);
    }
    t.vocab_size = llamac_describe(t.model).vocab_size;
    t.structure = calloc(t.vocab_size, sizeof *t.structure);
    memset(t.bytes, -1, sizeof t.bytes);
    for (int i = 0; i < t.vocab_size; i++) {
        char text[64];
        size_t n = llamac_decode(t.model, -1, i, text, sizeof text);
        if (n == 1) t.bytes[(unsigned char)*text] = i;
        t.structure[i] = structure_of(text, n < sizeof text ? n : sizeof text);
    }
    return t;
}

static void close_test(Test *t) {
    llamac_grammar_free(t->copy);
    llamac_grammar_free(t->built);
    llamac_close(t->model);
    free(t->structure);
}

// Returns a random allowed token that does not end the text, or -1 if there is none. Half the time
// it is one with a random character of `structure`, if any such token is allowed.
static int choose(const Test *t, const uint8_t *allowed) {
    static int some[1 << 18];
    int wanted = below(2) ? 1 << below(sizeof structure - 1) : 0;
    for (int tries = 0; tries < 2; tries++, wanted = 0) {
        int n = 0;
        for (int i = 0; i < t->vocab_size; i++)
            if (allowed[i] && !llamac_ends(t->model, i) && (t->structure[i] & wanted) == wanted)
                some[n++] = i;
        if (n) return some[below(n)];
    }
    return -1;
}

static void walk(Test *t, int texts) {
    static char text[MAX_BUDGET << 8];
    for (int i = 0; i < texts; i++) {
        int budget = below(8) ? 1 + below(60) : below(MAX_BUDGET), left = budget;
        size_t n = 0;
        t->grammar = i % 2 ? t->copy : t->built;
        llamac_grammar_reset(t->grammar);
        for (int token; left >= 0; left--) {
            const uint8_t *allowed = llamac_grammar_allowed(t->grammar, left);
            bool complete = llamac_grammar_complete(t->grammar);
            int eos = llamac_describe(t->model).eos;
            EXPECT(eos < 0 || allowed[eos] == complete);
            if (complete && !below(4)) break;
            if ((token = choose(t, allowed)) < 0) break;
            EXPECT(left > 0);
            // tokens that no budget allows are refused, and do not change the state
            uint8_t *before = malloc(t->vocab_size);
            memcpy(before, llamac_grammar_allowed(t->grammar, INT32_MAX), t->vocab_size);
            EXPECT(before[token]);
            for (int k = 0; k < 8; k++) {
                int other = below(t->vocab_size);
                EXPECT(before[other] || !llamac_grammar_accept(t->grammar, other));
            }
            EXPECT(!memcmp(before, llamac_grammar_allowed(t->grammar, INT32_MAX), t->vocab_size));
            free(before);
            EXPECT(llamac_grammar_accept(t->grammar, token));
            size_t length = llamac_decode(t->model, -1, token, text + n, sizeof text - n);
            EXPECT(length && length < sizeof text - n);
            n += length;
        }
        // n is 0 if no text fits into the budget
        if (n) EXPECT(llamac_grammar_complete(t->grammar));
        printf("%d %d ", budget, budget - left);
        for (size_t k = 0; k < n; k++) printf("%02x", (unsigned char)text[k]);
        puts("");
    }
}

// Reads a line of hexadecimal digits. Returns the bytes, or -1 at the end.
static int read_line(char *text) {
    static char line[2 * LONGEST + 2];
    if (!fgets(line, sizeof line, stdin)) return -1;
    int n = (int)strcspn(line, "\n") / 2;
    for (int i = 0; i < n; i++) {
        unsigned byte;
        sscanf(line + 2 * i, "%2x", &byte);
        text[i] = (char)byte;
    }
    return n;
}

static char text[LONGEST];

static int accept_bytes(Test *t, int n) {
    int accepted = 0;
    llamac_grammar_reset(t->grammar);
    while (accepted < n
           && llamac_grammar_accept(t->grammar, t->bytes[(unsigned char)text[accepted]]))
        accepted++;
    return accepted;
}

static void read_texts(Test *t, bool bytes) {
    for (int n; (n = read_line(text)) >= 0;) {
        int accepted = 0, all = n;
        if (bytes) accepted = accept_bytes(t, n);
        else {
            llamac_grammar_reset(t->grammar);
            int *tokens = llamac_encode(t->model, text, n, false, &all, NULL);
            while (accepted < all && llamac_grammar_accept(t->grammar, tokens[accepted]))
                accepted++;
            llamac_free(tokens);
        }
        printf("%d %d %d\n", accepted, all, llamac_grammar_complete(t->grammar));
    }
}

static void masks(Test *t, int left) {
    for (int n; (n = read_line(text)) >= 0;) {
        if (accept_bytes(t, n) < n) {
            puts("refused");
            continue;
        }
        const uint8_t *allowed = llamac_grammar_allowed(t->grammar, left);
        for (int i = 0; i < t->vocab_size; i++)
            if (allowed[i] && !llamac_ends(t->model, i)) printf("%d ", i);
        puts("");
    }
}

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

// Returns the microseconds to accept the last character of `prefix` and compute the next mask: the
// lowest mean of five rounds.
static double mask_time(Test *t, const char *prefix, int left) {
    double best = 1e9;
    for (int round = 0; round < 5; round++) {
        double begin, sum = 0;
        for (int k = 0; k < 100; k++) {
            llamac_grammar_reset(t->grammar);
            const char *c = prefix;
            for (; c[1]; c++)
                EXPECT(llamac_grammar_accept(t->grammar, t->bytes[(unsigned char)*c]));
            begin = seconds();
            EXPECT(llamac_grammar_accept(t->grammar, t->bytes[(unsigned char)*c]));
            llamac_grammar_allowed(t->grammar, left);
            sum += seconds() - begin;
        }
        best = sum < best ? sum : best;
    }
    return best * 1e6 / 100;
}

static void print_times(const char *path) {
    Test t = open_test(path, false);
    double begin = seconds();
    llamac_grammar_free(llamac_grammar_json(t.model, false, NULL));
    printf("%d tokens: build %.0f", t.vocab_size, (seconds() - begin) * 1e6);
    static const struct {
        const char *name, *prefix;
        int left;
    } cases[] = {{"string", "{\"a\":\"bc", INT32_MAX},
                 {"key", "{\"a", INT32_MAX},
                 {"value", "{\"a\":", INT32_MAX},
                 {"after a value", "{\"a\":1,\"b\":[1", INT32_MAX},
                 {"string, 3 left", "{\"a\":\"bc", 3},
                 {"value, 6 left", "[[[[{\"a\":", 6},
                 {"value, 40 deep, 42 left", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", 42},
                 {"value, 40 deep, 20 left", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", 20}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        printf("; %s %.1f", cases[i].name, mask_time(&t, cases[i].prefix, cases[i].left));
    puts("");
    close_test(&t);
}

// Makes invalid calls and prints their errors.
static void wrong(const char *path) {
    llamac_error e;
    Test t = open_test(path, true);
    llamac_model *bare = llamac_open(path, LLAMAC_NO_TOKENIZER, &e);
    EXPECT(!llamac_grammar_json(NULL, true, &e) && puts(e.text));
    EXPECT(!llamac_grammar_json(bare, true, &e) && puts(e.text));
    EXPECT(!llamac_grammar_json(bare, true, NULL));
    strcpy(e.text, "of an earlier call");
    llamac_grammar_free(llamac_grammar_json(t.model, false, &e));
    EXPECT(!*e.text);
    EXPECT(!llamac_grammar_accept(NULL, 3) && !llamac_grammar_allowed(NULL, 3)
           && !llamac_grammar_complete(NULL));
    EXPECT(!llamac_grammar_accept(t.grammar, -1)
           && !llamac_grammar_accept(t.grammar, t.vocab_size));
    EXPECT(!llamac_grammar_accept(t.grammar, INT32_MAX)
           && !llamac_grammar_accept(t.grammar, INT32_MIN));
    // EOS before the text is complete
    EXPECT(!llamac_grammar_accept(t.grammar, llamac_describe(t.model).eos));
    // the shortest text, {}, needs two tokens
    for (int left = -1; left < 3; left++) {
        const uint8_t *allowed = llamac_grammar_allowed(t.grammar, left < 0 ? INT32_MIN : left);
        EXPECT(allowed[t.bytes['{']] == (left >= 2) && !allowed[t.bytes['[']]);
    }
    EXPECT(llamac_grammar_accept(t.grammar, t.bytes['{'])
           && llamac_grammar_accept(t.grammar, t.bytes['}']));
    EXPECT(llamac_grammar_complete(t.grammar) && !llamac_grammar_accept(t.grammar, t.bytes[',']));
    // EOS is accepted and does not change the state
    EXPECT(llamac_grammar_accept(t.grammar, llamac_describe(t.model).eos));
    EXPECT(llamac_grammar_allowed(t.grammar, 0)[llamac_describe(t.model).eos]);
    EXPECT(llamac_grammar_accept(t.grammar, t.bytes['\n']));
    llamac_grammar *other = llamac_grammar_copy(t.grammar, &e); // begins a new text
    EXPECT(other && !*e.text && !llamac_grammar_complete(other)
           && !llamac_grammar_accept(other, t.bytes['\n' + 1]));
    EXPECT(llamac_grammar_accept(other, t.bytes['{'])
           && llamac_grammar_accept(other, t.bytes['"']));
    EXPECT(llamac_grammar_complete(t.grammar) && !llamac_grammar_accept(t.grammar, t.bytes['"']));
    llamac_grammar_free(other);
    EXPECT(llamac_grammar_accept(t.grammar, t.bytes['\n']));
    EXPECT(!llamac_grammar_copy(NULL, &e) && puts(e.text) && !llamac_grammar_copy(NULL, NULL));
    llamac_grammar_reset(NULL);
    llamac_grammar_free(NULL);
    llamac_close(bare);
    close_test(&t);
}

int main(int argc, char **argv) {
    const char *mode = argc > 2 ? argv[1] : "";
    if (!strcmp(mode, "time")) return print_times(argv[2]), 0;
    if (!strcmp(mode, "wrong")) return wrong(argv[2]), 0;
    if (argc < 5) return fprintf(stderr, "usage: see tests/grammar.c\n"), 1;
    Test t = open_test(argv[2], atoi(argv[3]));
    if (!strcmp(mode, "walk") && argc == 6) {
        state += 7919 * strtoull(argv[4], NULL, 10);
        walk(&t, atoi(argv[5]));
    } else if (!strcmp(mode, "read")) read_texts(&t, !strcmp(argv[4], "bytes"));
    else if (!strcmp(mode, "masks")) masks(&t, atoi(argv[4]));
    close_test(&t);
    return 0;
}

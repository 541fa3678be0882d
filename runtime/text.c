// Texts of sampled tokens: bytes are released as soon as it is certain that they may be shown.
#include "model.h"

typedef struct {
    char *s;
    size_t n;
} StopString;

struct llamac_text {
    const llamac_model *model;
    int previous; // the latest token, on which the next one's bytes depend (llamac_decode), or -1
    int flags;
    StopString *stops; // (n_stops,)
    int n_stops;
    bool ended;
    Text held; // bytes that are not released yet
    Text out;  // bytes that the latest call has released
};

void llamac_text_free(llamac_text *t) {
    if (!t) return;
    for (int i = 0; i < t->n_stops; i++) free(t->stops[i].s);
    free(t->stops);
    free(t->held.s);
    free(t->out.s);
    free(t);
}

static bool set_stops(llamac_text *t, const char *const *stops, int n, Error *e) {
    t->stops = calloc((size_t)n + 1, sizeof *t->stops);
    CHECK(t->stops, no_memory);
    for (int i = 0; i < n; i++) {
        CHECK(stops[i] && *stops[i], "stop string %d is %s, expected one byte or more", i,
              stops[i] ? "empty" : "NULL");
        StopString stop = {malloc(strlen(stops[i])), strlen(stops[i])};
        CHECK(stop.s, no_memory);
        memcpy(stop.s, stops[i], stop.n);
        t->stops[t->n_stops++] = stop;
    }
    return true;
}

llamac_text *llamac_text_new(const llamac_model *model, int previous, const char *const *stops,
                             int n_stops, int flags, Error *e) {
    const int known = LLAMAC_TEXT_RAW | LLAMAC_TEXT_GO_ON;
    if (e) e->text[0] = 0;
    if (!model) return fail(e, no_model), NULL;
    if (!model->tokenizer.pieces) return fail(e, "the model has no tokenizer"), NULL;
    if (n_stops < 0 || (n_stops && !stops))
        return fail(e, "n_stops is %d and stops %s, expected 0 or more strings in an array",
                    n_stops, stops ? "an array" : "NULL"),
               NULL;
    if (flags & ~known)
        return fail(e, "flags are %d, expected LLAMAC_TEXT_RAW, LLAMAC_TEXT_GO_ON, both or 0",
                    flags),
               NULL;
    llamac_text *t = calloc(1, sizeof *t);
    if (!t) return fail(e, no_memory), NULL;
    t->model = model, t->previous = previous, t->flags = flags;
    if (!set_stops(t, stops, n_stops, e)) return llamac_text_free(t), NULL;
    return t;
}

// Appends a byte to the held bytes. If they now end with a stop string, removes it (the longest one
// if there are several) and returns true. Working byte by byte makes the result independent of how
// the text is divided into tokens.
static bool add_byte(llamac_text *t, char byte) {
    size_t longest = 0;
    append(&t->held, &byte, 1);
    for (int i = 0; i < t->n_stops; i++) {
        StopString stop = t->stops[i];
        if (stop.n <= longest || stop.n > t->held.n) continue;
        if (!memcmp(t->held.s + t->held.n - stop.n, stop.s, stop.n)) longest = stop.n;
    }
    t->held.n -= longest;
    return longest;
}

// Returns how many of the held bytes, at their end, may begin a stop string.
static size_t undecided(const llamac_text *t) {
    size_t longest = 0;
    for (int i = 0; i < t->n_stops; i++) {
        StopString stop = t->stops[i];
        size_t n = stop.n - 1 < t->held.n ? stop.n - 1 : t->held.n;
        for (; n > longest; n--)
            if (!memcmp(t->held.s + t->held.n - n, stop.s, n)) longest = n;
    }
    return longest;
}

// Returns whether the n bytes at s are the beginning of a valid character, which more bytes could
// complete.
static bool is_incomplete(const char *s, size_t n) {
    unsigned char first = s[0];
    size_t expected = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
    if (first >= 0xf5 || n >= expected) return false;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return false;
    return true;
}

// Releases the held bytes that no later byte can change; the beginning of a stop string or of a
// character stays held. Each byte that belongs to no valid character becomes U+FFFD, except with
// LLAMAC_TEXT_RAW. `last`: no bytes follow, so nothing stays held.
static void release(llamac_text *t, bool last) {
    const char *s = t->held.s;
    size_t at = 0, n = t->held.n, end = last ? n : n - undecided(t);
    if (t->flags & LLAMAC_TEXT_RAW) {
        append(&t->out, s, end);
        at = end;
    }
    while (at < end) {
        int valid = llamac_utf8(s + at, n - at); // bytes of the character at s + at, 0: invalid
        // A character that crosses `end` stays held whole
        if (at + valid > end || (!valid && !last && is_incomplete(s + at, n - at))) break;
        append(&t->out, valid ? s + at : "\xef\xbf\xbd", valid ? valid : 3);
        at += valid ? valid : 1;
    }
    if (at) memmove(t->held.s, s + at, t->held.n = n - at);
}

// Adds the bytes of a token. Returns whether they complete a stop string, and drops the bytes after
// it.
static bool add_token(llamac_text *t, int token) {
    char buffer[256], *s = buffer;
    bool stopped = false;
    size_t n = llamac_decode(t->model, t->previous, token, buffer, sizeof buffer);
    if (n > sizeof buffer) {
        s = malloc(n);
        if (!s) return t->held.failed = true, false;
        llamac_decode(t->model, t->previous, token, s, n);
    }
    for (size_t i = 0; i < n && !stopped; i++) stopped = add_byte(t, s[i]);
    if (s != buffer) free(s);
    t->previous = token;
    return stopped;
}

// Begins a call. Discards the bytes that the previous call has released.
static bool begin_call(llamac_text *t, const char **out, size_t *n, Error *e) {
    if (e) e->text[0] = 0;
    CHECK(out && n, "the pointer to the result is NULL");
    *out = "", *n = 0;
    CHECK(t, "the text is NULL");
    CHECK(!t->ended, "the text has ended already");
    t->out.n = 0;
    return true;
}

// Ends a call: releases bytes, all of them if `last`.
static bool end_call(llamac_text *t, bool last, const char **out, size_t *n, Error *e) {
    release(t, last);
    t->ended = last; // even after an error
    CHECK(!t->held.failed && !t->out.failed, no_memory);
    if (t->out.n) *out = t->out.s, *n = t->out.n;
    return true;
}

int llamac_text_add(llamac_text *t, int token, const char **out, size_t *n, Error *e) {
    if (!begin_call(t, out, n, e)) return -1;
    int vocab_size = t->model->tokenizer.vocab_size, result = LLAMAC_MORE;
    if (token < 0 || token >= vocab_size)
        return fail(e, "token %d is outside the vocabulary of %d tokens", token, vocab_size), -1;
    if (!(t->flags & LLAMAC_TEXT_GO_ON) && llamac_ends(t->model, token)) result = LLAMAC_END;
    else if (add_token(t, token)) result = LLAMAC_STOP;
    return end_call(t, result != LLAMAC_MORE, out, n, e) ? result : -1;
}

bool llamac_text_finish(llamac_text *t, const char **out, size_t *n, Error *e) {
    return begin_call(t, out, n, e) && end_call(t, true, out, n, e);
}

// Helpers that all files of the library share: errors, allocation that may fail, growing texts, and
// a reader of bytes.
#ifndef LLAMAC_BYTES_H
#define LLAMAC_BYTES_H

#include "os.h"
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

typedef llamac_error Error;

// Makes an error empty. The functions of llamac.h do this first, so it is empty if they succeed.
static inline void clear(Error *e) {
    if (e) e->text[0] = 0;
}

// Writes the message to e (unless e is NULL) and returns false. The message may quote an untrusted
// file, and a terminal obeys control characters, so every byte that is not printable ASCII becomes
// a question mark.
PRINTF_LIKE(2, 3) static inline bool fail(Error *e, const char *format, ...) {
    if (!e) return false;
    char text[sizeof e->text]; // separate, because an argument may be the earlier message in e
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *c = text; *c; c++)
        if (*c < ' ' || *c > '~') *c = '?';
    strcpy(e->text, text);
    return false;
}

// For functions that return whether they succeeded and have an Error *e: CHECK writes the message
// if the condition is false; TRY passes on the failure of a call that has written its own message.
#define CHECK(condition, ...) \
    do { \
        if (!(condition)) return fail(e, __VA_ARGS__); \
    } while (0)
#define TRY(call) \
    do { \
        if (!(call)) return false; \
    } while (0)

static const char no_memory[] = "not enough memory";
static const char no_model[] = "the model is NULL";

// Resizes p to n items. Returns NULL if there is not enough memory; p is unchanged then.
static inline void *resize(void *p, size_t n, size_t size) {
    return n < SIZE_MAX / size ? realloc(p, (n + 1) * size) : NULL; // + 1: never 0 bytes
}

typedef struct {
    char *s;
    size_t n, capacity;
    bool failed;
} Text; // a growing string, which may contain zero bytes

// MAX_TEXT: max bytes of a text to encode. MAX_BYTES: max bytes that normalization can make of it.
// A space may become U+2581 and an invalid byte becomes U+FFFD, both 3 bytes in UTF-8, and one
// U+2581 may be put before the text.
enum { MAX_TEXT = 1 << 27, MAX_BYTES = 3 * MAX_TEXT + 3 };

// Appends n bytes. If memory is missing, or the text would exceed MAX_BYTES, sets `failed` and
// leaves the text unchanged.
static inline void append(Text *text, const char *s, size_t n) {
    text->failed |= n > MAX_BYTES - text->n;
    if (!text->failed && text->n + n > text->capacity) {
        size_t capacity = 2 * text->capacity + n;
        char *larger = resize(text->s, capacity, 1);
        text->failed = !larger;
        if (larger) text->s = larger, text->capacity = capacity;
    }
    if (text->failed) return;
    if (n) memcpy(text->s + text->n, s, n);
    text->n += n;
}

static inline void append_string(Text *text, const char *s) { append(text, s, strlen(s)); }

typedef struct {
    const uint8_t *bytes;
    size_t size, at; // at: offset of the next byte to read
    bool failed;     // a read went past the end
} Reader;

typedef struct {
    const char *s; // not terminated by a zero
    size_t n;
} String;

// Expands to the two arguments of %.*s that print the first `max` bytes of a string.
#define SHOWN(string, max) (int)((string).n < (max) ? (string).n : (max)), (string).s

// Returns the next n bytes. Past the end, returns NULL and sets `failed`.
static inline const uint8_t *take(Reader *r, uint64_t n) {
    if (n > r->size - r->at) {
        r->failed = true;
        r->at = r->size;
        return NULL;
    }
    r->at += n;
    return r->bytes + r->at - n;
}

static inline uint32_t take_u32(Reader *r) {
    const uint8_t *p = take(r, 4);
    uint32_t value = 0;
    if (p) memcpy(&value, p, 4);
    return value;
}

static inline uint64_t take_u64(Reader *r) {
    uint64_t low = take_u32(r), high = take_u32(r);
    return high << 32 | low;
}

// Reads a string of GGUF: a length of 8 bytes, then the text. Past the end, returns "".
static inline String take_string(Reader *r) {
    uint64_t n = take_u64(r);
    const uint8_t *p = take(r, n);
    return (String){p ? (const char *)p : "", p ? n : 0};
}

static inline bool equals(String a, const char *b) {
    return a.n == strlen(b) && memcmp(a.s, b, a.n) == 0;
}

#endif

// What the units of the library share: errors, memory that may be missing, texts that grow, and a reader of bytes.
#ifndef LLAMAC_BYTES_H
#define LLAMAC_BYTES_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "llamac.h"

typedef llamac_error Error;

// Writes the message to e (if it is not NULL) and returns false. Text may come from a stranger's file, so whatever a terminal
// could take for a command becomes a question mark.
__attribute__((format(printf, 2, 3))) static inline bool fail(Error *e, const char *format, ...) {
    if (!e) return false;
    char text[sizeof e->text]; // apart, because an argument may be an earlier message
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *c = text; *c; c++)
        if (*c < ' ' || *c > '~') *c = '?';
    strcpy(e->text, text);
    return false;
}

// In functions that return whether all is well and have an Error *e
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

// Room for n items, or NULL; what p held stays in it.
static inline void *resize(void *p, size_t n, size_t size) {
    return n < SIZE_MAX / size ? realloc(p, (n + 1) * size) : NULL; // one more than asked, so that none is not zero bytes
}

typedef struct {
    char *s;
    size_t n, capacity;
    bool failed;
} Text; // a string that grows; may hold zero bytes

// The longest text that is encoded, in bytes, and what becomes of it: three for a space or a broken byte, and one space in front
enum { LONGEST_TEXT = 1 << 27, MOST_BYTES = 3 * LONGEST_TEXT + 3 };

// Adds n bytes. Where they do not fit, or make more than MOST_BYTES, the text has failed, and stays as it is.
static inline void append(Text *text, const char *s, size_t n) {
    text->failed |= n > MOST_BYTES - text->n;
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
    size_t size, at;
    bool failed;
} Reader;
typedef struct {
    const char *s;
    size_t n;
} String;

// The next n bytes, or NULL past the end; the reader remembers that it failed.
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

// GGUF's: a length of 8 bytes, then the text.
static inline String take_string(Reader *r) {
    uint64_t n = take_u64(r);
    const uint8_t *p = take(r, n);
    return (String){p ? (const char *)p : "", p ? n : 0};
}

static inline bool equals(String a, const char *b) { return a.n == strlen(b) && memcmp(a.s, b, a.n) == 0; }

#endif

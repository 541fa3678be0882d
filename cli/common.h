// Helpers that all parts of the program share: errors, memory, texts, printing.
#ifndef CLI_COMMON_H
#define CLI_COMMON_H

#include "../runtime/os.h"
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include "../runtime/llamac.h"

// ----------------------------------------------------------------------------
// Errors, memory, texts

// Ends the program with the line `run: <subject>: <message>`. The subject may be a path, so only
// its control characters are replaced by '?'. The message may quote text of the user that was cut
// within a UTF-8 character, such as by %.40s, so all bytes except printable ASCII are replaced.
PRINTF_LIKE(2, 3) _Noreturn static void die(const char *subject, const char *format, ...) {
    char message[600];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    for (char *c = message; *c; c++)
        if (*c < ' ' || *c > '~') *c = '?';
    char line[1 << 13]; // printed in one write, because a console decodes each write separately
    snprintf(line, sizeof line, "run: %s", subject);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", line, message);
    exit(1);
}

static void *resize(void *p, size_t n, size_t size) {
    p = n < SIZE_MAX / size ? realloc(p, (n + 1) * size) : NULL; // + 1: never 0 bytes
    if (!p) die("memory", "not enough is available");
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

static inline void append_string(Text *text, const char *s) { append(text, s, strlen(s)); }

// Bytes of stdin that were read but not used yet. The C library's own buffer does not show whether
// a whole line has arrived.
typedef struct {
    Text bytes;
    size_t begin;   // start of the next line
    size_t scanned; // the bytes from `begin` to here contain no newline
    bool ended;
} Input;

// Appends bytes of stdin. If none have arrived, waits for them or, unless `wait`, returns false.
static bool read_input(Input *in, bool wait) {
    char buffer[1 << 16];
    int64_t got = llamac_read_input(buffer, sizeof buffer, wait);
    if (got == LLAMAC_INPUT_LATER) return false;
    if (got < 0) die("stdin", "%s", strerror(errno));
    append(&in->bytes, buffer, (size_t)got);
    in->ended = got == 0;
    return true;
}

// Finds the next line, which is valid until the next call. Returns false at the end of the input.
// If a whole line has not arrived yet, waits for it or, unless `wait`, returns false.
static bool next_line(Input *in, bool wait, const char **line, size_t *n) {
    for (;;) {
        size_t left = in->bytes.n - in->begin;
        const char *begin = left ? in->bytes.s + in->begin : NULL, *newline = NULL;
        if (in->scanned < in->bytes.n)
            newline = memchr(in->bytes.s + in->scanned, '\n', in->bytes.n - in->scanned);
        in->scanned = in->bytes.n;
        if (newline || (in->ended && left)) {
            *line = begin, *n = newline ? (size_t)(newline - begin) : left;
            in->begin = in->scanned = newline ? in->begin + *n + 1 : in->bytes.n;
            return true;
        }
        if (in->ended) return false;
        // Nothing but an incomplete line is left: move it to the front
        if (left) memmove(in->bytes.s, begin, left);
        in->bytes.n = in->scanned = left, in->begin = 0;
        if (!read_input(in, wait)) return false;
    }
}

// Reads a whole file or pipe, without the byte-order mark that some editors put before UTF-8. The
// path "-" is stdin.
static Text read_file(Input *in, const char *path) {
    Text text = {0};
    if (!strcmp(path, "-")) {
        while (!in->ended) read_input(in, true);
        text = in->bytes;
        in->bytes = (Text){0};
    } else {
        char buffer[1 << 16];
        FILE *file = llamac_open_file(path);
        if (!file) die(path, "%s", strerror(errno));
        for (size_t n; (n = fread(buffer, 1, sizeof buffer, file));) append(&text, buffer, n);
        if (ferror(file)) die(path, "%s", strerror(errno));
        fclose(file);
    }
    if (text.n >= 3 && !memcmp(text.s, "\xef\xbb\xbf", 3)) memmove(text.s, text.s + 3, text.n -= 3);
    return text;
}

// ----------------------------------------------------------------------------
// Printing

static void print_bytes(const char *s, size_t n) {
    if (n && fwrite(s, 1, n, stdout) != n) die("stdout", "%s", strerror(errno));
}

static void flush(void) {
    if (fflush(stdout)) die("stdout", "%s", strerror(errno));
}

// Returns whether a terminal could interpret the character (UTF-8, n bytes) as a command: C0, DEL
// and C1, except newline and tab.
static bool is_control(const char *s, int n) {
    unsigned char c = s[0];
    bool c0 = n == 1 && ((c < ' ' && c != '\n' && c != '\t') || c == 127);
    return c0 || (n == 2 && c == 0xc2 && (unsigned char)s[1] < 0xa0);
}

// Prints UTF-8 without control characters. `raw`: prints all bytes as they are.
static void print_text(const char *s, size_t n, bool raw) {
    if (raw) print_bytes(s, n), n = 0;
    for (size_t at = 0, length; at < n; at += length) {
        length = llamac_utf8(s + at, n - at);
        if (!length) length = 1; // llamac_text releases whole characters, so this is for safety
        if (!is_control(s + at, (int)length)) print_bytes(s + at, length);
    }
}

// Prints a question and reads a line of stdin, without its newline. Returns false at the end of the
// input.
static bool ask(Input *in, const char *question, Text *line) {
    const char *found;
    size_t n;
    print_bytes(question, strlen(question));
    flush();
    line->n = 0;
    bool is_line = next_line(in, true, &found, &n);
    if (is_line) append(line, found, n);
    return is_line;
}

#endif

// What all parts of the program share: errors, memory, texts, printing.
#ifndef CLI_COMMON_H
#define CLI_COMMON_H

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "../runtime/llamac.h"

// ----------------------------------------------------------------------------
// Errors, memory, texts

// Ends the program with the line `run: <subject>: <message>`. The subject may be a path: it keeps
// its UTF-8, and '?' replaces only control characters. The message may quote text of the user that
// was cut, by %.40s for example, in the middle of a UTF-8 character: '?' replaces every byte that
// is not printable ASCII.
__attribute__((format(printf, 2, 3), noreturn)) static void die(const char *subject,
                                                                const char *format, ...) {
    char message[600];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    fflush(stdout);
    fputs("run: ", stderr);
    for (const char *c = subject; *c; c++)
        fputc((unsigned char)*c < ' ' || *c == 127 ? '?' : *c, stderr);
    fputs(": ", stderr);
    for (const char *c = message; *c; c++) fputc(*c < ' ' || *c > '~' ? '?' : *c, stderr);
    fputc('\n', stderr);
    exit(1);
}

static void *resize(void *p, size_t n, size_t size) {
    p = n < SIZE_MAX / size ? realloc(p, (n + 1) * size) : NULL; // + 1: never 0 bytes
    if (!p) die("memory", "there is not enough");
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

// Reads a whole file or pipe, without the byte-order mark that some editors put before UTF-8. The
// path "-" is stdin.
static Text read_file(const char *path) {
    Text text = {0};
    char buffer[1 << 16];
    bool is_stdin = !strcmp(path, "-");
    FILE *file = is_stdin ? stdin : fopen(path, "rb");
    if (!file) die(path, "%s", strerror(errno));
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, file));) append(&text, buffer, n);
    if (ferror(file)) die(is_stdin ? "stdin" : path, "%s", strerror(errno));
    if (!is_stdin) fclose(file);
    if (text.n >= 3 && !memcmp(text.s, "\xef\xbb\xbf", 3)) memmove(text.s, text.s + 3, text.n -= 3);
    return text;
}

// Seconds on a monotonic clock.
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// ----------------------------------------------------------------------------
// Printing

static void print_bytes(const char *s, size_t n) {
    if (n && fwrite(s, 1, n, stdout) != n) die("stdout", "%s", strerror(errno));
}

static void flush(void) {
    if (fflush(stdout)) die("stdout", "%s", strerror(errno));
}

// Returns whether a terminal could take the character (UTF-8, n bytes) for a command: C0, DEL and
// C1, except newline and tab.
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

// Prints a question and reads a line, without its newline. Returns false at the end of the input.
static bool ask(const char *question, Text *line) {
    print_bytes(question, strlen(question));
    flush();
    int c;
    for (line->n = 0; (c = getchar()) != EOF && c != '\n';) append(line, &(char){(char)c}, 1);
    if (ferror(stdin)) die("stdin", "%s", strerror(errno));
    return c != EOF || line->n;
}

#endif

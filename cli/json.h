// A reader of JSON (RFC 8259) that walks over a text once, and a writer of strings.
#ifndef CLI_JSON_H
#define CLI_JSON_H

#include "common.h"

typedef struct {
    const char *s; // (n,)
    size_t n, at;  // at: the next byte to read
    char error[200];
} Json;

// Stores the error, unless an earlier one is stored, and returns false.
PRINTF_LIKE(2, 3) static bool refuse(Json *j, const char *format, ...) {
    if (*j->error) return false;
    va_list args;
    va_start(args, format);
    vsnprintf(j->error, sizeof j->error, format, args);
    va_end(args);
    return false;
}

// Returns the next byte that is not white space; 0 at the end.
static char peek(Json *j) {
    while (j->at < j->n && strchr(" \t\r\n", j->s[j->at]) && j->s[j->at]) j->at++;
    return j->at < j->n ? j->s[j->at] : 0;
}

// Skips the byte if it is next.
static bool skip(Json *j, char byte) {
    if (peek(j) != byte) return false;
    j->at++;
    return true;
}

static bool expect(Json *j, char byte) {
    if (skip(j, byte)) return true;
    return refuse(j, "expected %c at byte %zu", byte, j->at);
}

// Skips a word, such as null, if it is next.
static bool skip_word(Json *j, const char *word) {
    size_t n = strlen(word);
    peek(j);
    if (n > j->n - j->at || memcmp(j->s + j->at, word, n) != 0) return false;
    j->at += n;
    return true;
}

// Reads four hexadecimal digits. Returns their value, or -1 if there are fewer.
static int read_hex(Json *j) {
    int value = 0;
    for (int i = 0; i < 4; i++, j->at++) {
        char c = j->at < j->n ? j->s[j->at] : 0;
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return -1;
        value = 16 * value + digit;
    }
    return value;
}

static void append_utf8(Text *text, unsigned c) {
    char s[4] = {(char)c};
    int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, c >>= 6) s[i] = (char)(0x80 | (c & 0x3f));
    if (n > 1) s[0] = (char)((0xf00 >> n & 0xff) | c);
    append(text, s, n);
}

// Reads the rest of a \u escape, or of a surrogate pair. An unpaired surrogate becomes U+FFFD.
static bool read_unicode(Json *j, Text *out) {
    int c = read_hex(j);
    if (c < 0) return refuse(j, "expected 4 hexadecimal digits after \\u at byte %zu", j->at);
    bool high = c >= 0xd800 && c < 0xdc00, low = c >= 0xdc00 && c < 0xe000;
    if (high && j->n - j->at >= 6 && j->s[j->at] == '\\' && j->s[j->at + 1] == 'u') {
        size_t before = j->at;
        j->at += 2;
        int next = read_hex(j);
        if (next >= 0xdc00 && next < 0xe000) {
            append_utf8(out, 0x10000 + ((unsigned)(c - 0xd800) << 10) + (unsigned)(next - 0xdc00));
            return true;
        }
        j->at = before;
    }
    append_utf8(out, high || low ? 0xfffd : (unsigned)c);
    return true;
}

// Reads a string into *out, replacing what was there.
static bool read_string(Json *j, Text *out) {
    static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    out->n = 0;
    if (peek(j) != '"') return refuse(j, "expected a string at byte %zu", j->at);
    for (j->at++; j->at < j->n;) {
        char c = j->s[j->at++];
        if (c == '"') return true;
        if ((unsigned char)c < ' ') return refuse(j, "a control character at byte %zu", j->at - 1);
        if (c != '\\') {
            append(out, &c, 1);
            continue;
        }
        char escape = j->at < j->n ? j->s[j->at++] : 0;
        const char *known = escape ? strchr(escapes, escape) : NULL;
        if (escape == 'u') {
            if (!read_unicode(j, out)) return false;
        } else if (known) append(out, &meanings[known - escapes], 1);
        else return refuse(j, "an unknown escape at byte %zu", j->at - 1);
    }
    return refuse(j, "a string has no closing quote");
}

// Reads a string as a C string: terminates it with a zero, and refuses a string that contains one.
static bool read_c_string(Json *j, Text *out) {
    if (!read_string(j, out)) return false;
    append(out, "", 1);
    return strlen(out->s) == out->n - 1
           || refuse(j, "a zero byte in the string that ends at byte %zu", j->at);
}

// Skips digits. Returns whether there was at least one.
static bool skip_digits(Json *j) {
    size_t begin = j->at;
    while (j->at < j->n && j->s[j->at] >= '0' && j->s[j->at] <= '9') j->at++;
    return j->at > begin;
}

static bool skip_byte(Json *j, const char *any) {
    bool found = j->at < j->n && j->s[j->at] && strchr(any, j->s[j->at]);
    j->at += found;
    return found;
}

static bool read_number(Json *j, double *value) {
    char text[64] = "";
    peek(j);
    size_t begin = j->at;
    skip_byte(j, "-");
    bool ok = skip_byte(j, "0") || skip_digits(j);
    if (ok && skip_byte(j, ".")) ok = skip_digits(j);
    if (ok && skip_byte(j, "eE")) {
        skip_byte(j, "+-");
        ok = skip_digits(j);
    }
    size_t n = j->at - begin;
    if (!ok || n >= sizeof text)
        return refuse(j, "expected a number%s at byte %zu", ok ? " with fewer digits" : "", begin);
    memcpy(text, j->s + begin, n);
    *value = strtod(text, NULL);
    return true;
}

// Appends a string in quotes. Also escapes DEL and C1, which JSON allows, but terminals interpret.
static void append_json(Text *out, const char *s, size_t n) {
    append(out, "\"", 1);
    for (size_t at = 0, length; at < n; at += length) {
        char escaped[8];
        unsigned char c = s[at];
        length = llamac_utf8(s + at, n - at);
        if (!length) { // an invalid byte
            append_string(out, "\xef\xbf\xbd");
            length = 1;
            continue;
        }
        if (c == '"' || c == '\\') snprintf(escaped, sizeof escaped, "\\%c", c);
        else if (c == '\n') snprintf(escaped, sizeof escaped, "\\n");
        else if (c == '\t') snprintf(escaped, sizeof escaped, "\\t");
        else if (is_control(s + at, (int)length))
            snprintf(escaped, sizeof escaped, "\\u%04x",
                     length == 2 ? (unsigned char)s[at + 1] : c);
        else {
            append(out, s + at, length);
            continue;
        }
        append_string(out, escaped);
    }
    append(out, "\"", 1);
}

#endif

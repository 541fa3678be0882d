// Runs llamac_text, for test_sampling.py. Reads one case per line from stdin: flags, the number of
// stop strings, the stop strings in hexadecimal, then tokens up to -1. Prints for each token the
// result and the released bytes in hexadecimal, and at the end the bytes that llamac_text_finish
// releases. After all cases, prints the errors of invalid calls.
//
// Usage: texts MODEL
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../runtime/llamac.h"

static void show(int result, const char *s, size_t n) {
    printf(" %d:", result);
    for (size_t i = 0; i < n; i++) printf("%02x", (unsigned char)s[i]);
}

int main(int argc, char **argv) {
    llamac_error e = {"a model expected"};
    llamac_model *model = argc == 2 ? llamac_open(argv[1], 0, &e) : NULL;
    if (!model) return puts(e.text), 1;
    char word[100], stops[8][50];
    const char *places[8], *out;
    int flags, n_stops, token, result;
    size_t n;
    while (scanf("%d %d", &flags, &n_stops) == 2) {
        for (int i = 0; i < n_stops; i++) {
            if (scanf("%99s", word) != 1) return 1;
            size_t bytes = strlen(word) / 2;
            for (size_t b = 0; b < bytes; b++) {
                char digits[3] = {word[2 * b], word[2 * b + 1], 0};
                stops[i][b] = (char)strtol(digits, NULL, 16);
            }
            stops[i][bytes] = 0;
            places[i] = stops[i];
        }
        llamac_text *t = llamac_text_new(model, -1, places, n_stops, flags, &e);
        if (!t) return puts(e.text), 1;
        for (result = 0; scanf("%d", &token) == 1 && token >= 0;) {
            if (result) continue; // the text has ended
            result = llamac_text_add(t, token, &out, &n, &e);
            if (result < 0) return puts(e.text), 1;
            show(result, out, n);
        }
        if (!llamac_text_finish(t, &out, &n, &e)) show(-1, e.text, strlen(e.text));
        else show(LLAMAC_MORE, out, n);
        puts("");
        llamac_text_free(t);
    }
    // invalid calls: each must fail with a message of one line
    const char *empty[] = {""}, *nothing[] = {NULL};
    if (!llamac_text_new(NULL, -1, NULL, 0, 0, &e)) puts(e.text);
    if (!llamac_text_new(model, -1, NULL, 1, 0, &e)) puts(e.text);
    if (!llamac_text_new(model, -1, empty, -1, 0, &e)) puts(e.text);
    if (!llamac_text_new(model, -1, empty, 1, 0, &e)) puts(e.text);
    if (!llamac_text_new(model, -1, nothing, 1, 0, &e)) puts(e.text);
    if (!llamac_text_new(model, -1, NULL, 0, 4, &e)) puts(e.text);
    llamac_text *t = llamac_text_new(model, -1, NULL, 0, 0, &e);
    if (llamac_text_add(t, 1 << 20, &out, &n, &e) < 0) puts(e.text);
    if (llamac_text_add(t, -1, &out, &n, &e) < 0) puts(e.text);
    if (llamac_text_add(t, 70, NULL, &n, &e) < 0) puts(e.text);
    if (llamac_text_add(NULL, 70, &out, &n, &e) < 0) puts(e.text);
    if (!llamac_text_finish(NULL, &out, &n, &e)) puts(e.text);
    llamac_text_free(t), llamac_text_free(NULL), llamac_close(model);
    return 0;
}

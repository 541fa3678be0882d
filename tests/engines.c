// Starts an engine on the GPU for each of two models and evaluates tokens on the two by turns.
// Prints "fine", or the error.
//
// Usage: engines MODEL OTHER
#include <stdio.h>
#include "../runtime/llamac.h"

enum { TURNS = 3, TOKENS = 2 };

int main(int argc, char **argv) {
    llamac_error error = {"two models expected"};
    llamac_model *models[2] = {NULL};
    llamac_engine *engines[2] = {NULL};
    llamac_sequence *sequences[2] = {NULL};
    bool ok = argc == 3;
    for (int i = 0; ok && i < 2; i++) {
        models[i] = llamac_open(argv[1 + i], 0, &error);
        if (models[i])
            engines[i] = llamac_start(models[i], &(llamac_options){.device = "cuda"}, &error);
        if (engines[i]) sequences[i] = llamac_sequence_new(engines[i], &error);
        ok = sequences[i];
    }
    for (int i = 0; ok && i < 2 * TURNS * TOKENS; i++) {
        int token = 5, turn = i / TOKENS, pos = turn / 2 * TOKENS + i % TOKENS;
        llamac_sequence *s = sequences[turn % 2];
        ok = llamac_forward(s, &token, 1, pos, &error);
        ok = ok && llamac_sample(s, &(llamac_sampler){0}, &error) >= 0;
    }
    for (int i = 0; i < 2; i++) {
        llamac_sequence_free(sequences[i]);
        llamac_stop(engines[i]);
        llamac_close(models[i]);
    }
    puts(ok ? "fine" : error.text);
    return !ok;
}

// Continues a text: the library inside another program.
//     make lib && cc -O3 -Iruntime examples/embed.c libllamac.a -lm -pthread -o embed
//     ./embed model.gguf "Once upon a time"
#include <stdio.h>
#include <string.h>
#include "llamac.h"

int main(int argc, char **argv) {
    llamac_error error = {""};
    llamac_model *model = argc == 3 ? llamac_open(argv[1], 0, &error) : NULL;
    llamac_engine *engine = model ? llamac_start(model, NULL, &error) : NULL;
    llamac_sequence *sequence = engine ? llamac_sequence_new(engine, &error) : NULL;
    // an empty text needs BOS as its first token
    bool bos = model && (llamac_describe(model).add_bos || !*argv[2]);
    int n = 0, *tokens = NULL;
    if (sequence) tokens = llamac_encode(model, argv[2], strlen(argv[2]), bos, &n, &error);
    if (!tokens) return fprintf(stderr, "embed MODEL TEXT: %s\n", error.text), 1;

    llamac_sampler sampler = {.temperature = 0}; // greedy
    bool ok = llamac_forward(sequence, tokens, n, 0, &error);
    for (int last = tokens[n - 1]; ok; n++) {
        char text[4096];
        int next = llamac_sample(sequence, &sampler, &error);
        if (!(ok = next >= 0) || llamac_ends(model, next)) break;
        size_t length = llamac_decode(model, last, next, text, sizeof text);
        fwrite(text, 1, length < sizeof text ? length : sizeof text, stdout);
        if (n == llamac_positions(engine)) break; // the context is full
        ok = llamac_forward(sequence, &next, 1, n, &error);
        last = next;
    }
    if (!ok) fprintf(stderr, "embed: %s\n", error.text);
    puts("");
    llamac_free(tokens);
    llamac_sequence_free(sequence);
    llamac_stop(engine);
    llamac_close(model);
    return !ok;
}

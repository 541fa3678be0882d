// Continues several texts at once: each library call evaluates the next token of every text.
//     make lib && cc -O3 -Iruntime examples/batch.c libllamac.a -lm -pthread -o batch
//     ./batch model.gguf "Once upon a time" "One day" "The cat"
#include <stdio.h>
#include <string.h>
#include "llamac.h"

enum { MAX_TEXTS = 16, MAX_TOKENS = 4096, ROOM = 1 << 16 };

int main(int argc, char **argv) {
    static llamac_batch_token batch[MAX_TOKENS];
    static char written[MAX_TEXTS][ROOM];
    llamac_sequence *sequences[MAX_TEXTS];
    size_t length[MAX_TEXTS] = {0};
    int n_texts = argc - 2, n = 0; // n: tokens of the batch
    llamac_error error = {"expected 1 to 16 texts"};
    bool ok = n_texts >= 1 && n_texts <= MAX_TEXTS;
    llamac_model *model = ok ? llamac_open(argv[1], 0, &error) : NULL;
    llamac_engine *engine = model ? llamac_start(model, NULL, &error) : NULL;
    if (!engine) return fprintf(stderr, "batch MODEL TEXT...: %s\n", error.text), 1;

    // The first batch has all tokens of the prompts, with logits for the last token of each prompt
    for (int i = 0; ok && i < n_texts; i++) {
        const char *prompt = argv[2 + i];
        bool bos = llamac_describe(model).add_bos || !*prompt;
        int size, *tokens = llamac_encode(model, prompt, strlen(prompt), bos, &size, &error);
        sequences[i] = llamac_sequence_new(engine, &error);
        ok = tokens && sequences[i];
        if (ok && !(ok = n + size <= MAX_TOKENS)) error = (llamac_error){"the texts are too long"};
        for (int t = 0; ok && t < size; t++)
            batch[n++] = (llamac_batch_token){sequences[i], tokens[t], t, t == size - 1};
        llamac_free(tokens);
    }
    // Each later batch has the newly sampled token of each text that has not ended
    while (ok && n && (ok = llamac_evaluate(engine, batch, n, &error))) {
        int next = 0; // number of tokens in the next batch, which overwrites this one
        for (int b = 0, i = 0; ok && b < n; b++) {
            if (!batch[b].logits) continue;
            while (sequences[i] != batch[b].sequence) i++;
            int position = batch[b].position + 1; // of the sampled token
            int token = llamac_sample(sequences[i], &(llamac_sampler){0}, &error);
            if (!(ok = token >= 0) || llamac_ends(model, token)) continue;
            char *end = written[i] + length[i];
            size_t room = ROOM - length[i];
            size_t size = llamac_decode(model, batch[b].token, token, end, room);
            length[i] += size < room ? size : room;
            if (position < llamac_positions(engine))
                batch[next++] = (llamac_batch_token){sequences[i], token, position, true};
        }
        n = next;
    }
    if (!ok) fprintf(stderr, "batch: %s\n", error.text);
    for (int i = 0; ok && i < n_texts; i++) {
        printf("%s%.*s\n", argv[2 + i], (int)length[i], written[i]);
        llamac_sequence_free(sequences[i]);
    }
    return !ok; // the end of the program frees the rest
}

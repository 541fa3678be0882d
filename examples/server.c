// Continues texts over HTTP for several clients at once: each batch has one token per client.
//     make lib && cc -O3 -Iruntime examples/server.c libllamac.a -lm -pthread -o server
//     ./server model.gguf 8080
//     curl -N -d "Once upon a time" http://127.0.0.1:8080
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "llamac.h"

enum { MAX_CLIENTS = 16 };
#define OK "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n"

typedef struct {
    FILE *stream;
    llamac_sequence *sequence;
    llamac_text *text; // of the sampled tokens
    int token;         // the latest one, which is not evaluated yet
} Client;

// Sends a client the next token. Returns false at the end of its text, or if it reads too slowly.
static bool advance(Client *c, const llamac_engine *engine) {
    const char *bytes;
    size_t n;
    c->token = llamac_sample(c->sequence, &(llamac_sampler){0}, NULL);
    if (c->token < 0 || llamac_text_add(c->text, c->token, &bytes, &n, NULL) != LLAMAC_MORE)
        return false;
    return send(fileno(c->stream), bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)n
           && llamac_sequence_length(c->sequence) < llamac_positions(engine);
}

// Reads a prompt, the body of a request, and begins the answer. Returns false if it is refused, or
// if nothing arrives for a second: the other clients wait meanwhile.
static bool begin(Client *c, const llamac_model *model, llamac_engine *engine) {
    char body[1 << 14];
    int size = 0, n;
    struct timeval limit = {.tv_sec = 1};
    setsockopt(fileno(c->stream), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    while (fgets(body, sizeof body, c->stream) && strcmp(body, "\r\n"))
        if (!strncasecmp(body, "Content-Length:", 15)) size = atoi(body + 15);
    if (size < 1 || size > (int)sizeof body || !fread(body, size, 1, c->stream)) return false;
    int *tokens = llamac_encode(model, body, size, llamac_describe(model).add_bos, &n, NULL);
    c->sequence = llamac_sequence_new(engine, NULL);
    if (n > 0) c->text = llamac_text_new(model, tokens[n - 1], NULL, 0, LLAMAC_TEXT_RAW, NULL);
    bool ok = c->text && llamac_forward(c->sequence, tokens, n, 0, NULL);
    llamac_free(tokens);
    return ok && send(fileno(c->stream), OK, sizeof OK - 1, MSG_NOSIGNAL) > 0 && advance(c, engine);
}

static void end(Client *c) {
    fclose(c->stream);
    llamac_sequence_free(c->sequence);
    llamac_text_free(c->text);
}

int main(int argc, char **argv) {
    Client clients[MAX_CLIENTS];
    llamac_batch_token batch[MAX_CLIENTS];
    llamac_error error = {""};
    llamac_model *model = argc == 3 ? llamac_open(argv[1], 0, &error) : NULL;
    llamac_engine *engine = model ? llamac_start(model, NULL, &error) : NULL;
    if (!engine) return fprintf(stderr, "server MODEL PORT: %s\n", error.text), 1;
    struct sockaddr_in address = {AF_INET, htons(atoi(argv[2])), {htonl(INADDR_LOOPBACK)}, {0}};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 64))
        return perror("server"), 1;
    for (int n = 0;;) { // n: clients
        struct pollfd waiting = {listener, POLLIN, 0};
        FILE *stream = NULL;
        if (n < MAX_CLIENTS && poll(&waiting, 1, n ? 0 : -1) > 0)
            stream = fdopen(accept(listener, NULL, NULL), "r");
        if (stream) {
            clients[n] = (Client){.stream = stream};
            if (begin(&clients[n], model, engine)) n++;
            else end(&clients[n]);
        }
        for (int i = 0; i < n; i++) {
            llamac_sequence *s = clients[i].sequence;
            batch[i] = (llamac_batch_token){s, clients[i].token, llamac_sequence_length(s), true};
        }
        if (n && !llamac_evaluate(engine, batch, n, &error))
            return fprintf(stderr, "server: %s\n", error.text), 1;
        for (int i = n - 1; i >= 0; i--) {
            if (advance(&clients[i], engine)) continue;
            end(&clients[i]);
            clients[i] = clients[--n]; // the last one takes its place
        }
    }
}

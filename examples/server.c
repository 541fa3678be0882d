// Continues texts over HTTP for several clients at once, in one thread: a batch has a token of each.
//     make lib && cc -O3 -Iruntime examples/server.c libllamac.a -lm -pthread -o server
//     ./server model.gguf 8080
//     curl -N -d "Once upon a time" http://127.0.0.1:8080/completion
#define _GNU_SOURCE // strcasestr
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "llamac.h"

enum { MAX_CLIENTS = 16, CHUNK = 32, MAX_TOKENS = 200, MAX_REQUEST = 1 << 14 };
#define OK "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n"

typedef struct {
    int socket, size; // bytes of the request so far
    char request[MAX_REQUEST + 1];
    llamac_sequence *sequence;  // NULL until the request is complete
    int *tokens, n, done, left; // `done` of n tokens are evaluated; `left` may still be sampled
} Client;

// Reads what has arrived. Returns false if the client has left or asks for something else.
static bool receive(Client *c, const llamac_model *model, llamac_engine *engine) {
    ssize_t n = recv(c->socket, c->request + c->size, MAX_REQUEST - c->size, 0);
    if (n <= 0 || c->sequence) return false;
    c->request[c->size += n] = 0;
    const char *body = strstr(c->request, "\r\n\r\n");
    const char *length = strcasestr(c->request, "\r\nContent-Length:");
    int size = body ? (int)(c->request + c->size - body - 4) : 0;
    if (!body || (length && size < atoi(length + 17))) return true; // more will arrive
    if (strncmp(c->request, "POST /completion ", 17)) return false;
    bool bos = llamac_describe(model).add_bos || !size;
    c->tokens = llamac_encode(model, body + 4, size, bos, &c->n, NULL), c->left = MAX_TOKENS;
    if (c->n > 0 && c->n < llamac_positions(engine))
        c->sequence = llamac_sequence_new(engine, NULL);
    return c->sequence && send(c->socket, OK, sizeof OK - 1, MSG_NOSIGNAL) > 0;
}

// Samples and sends the token after the n that are evaluated. Returns false at the end of the text.
static bool advance(Client *c, const llamac_model *model, llamac_engine *engine) {
    char text[512];
    int previous = c->tokens[c->n - 1];
    int token = llamac_sample(c->sequence, &(llamac_sampler){0}, NULL);
    if (token < 0 || llamac_ends(model, token) || !c->left--) return false;
    size_t size = llamac_decode(model, previous, token, text, sizeof text);
    c->tokens[0] = token, c->n = 1, c->done = 0;
    // A client that reads too slowly is dropped, so that the others do not wait for it
    return (!size || send(c->socket, text, size, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)size)
           && llamac_sequence_length(c->sequence) < llamac_positions(engine);
}

// Forgets client i, which the last one replaces. Returns the number of clients that remain.
static int drop(Client *clients, int i, int n) {
    close(clients[i].socket);
    llamac_sequence_free(clients[i].sequence);
    llamac_free(clients[i].tokens);
    clients[i] = clients[n - 1];
    return n - 1;
}

int main(int argc, char **argv) {
    static Client clients[MAX_CLIENTS];
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
        struct pollfd polled[MAX_CLIENTS + 1] = {{listener, n < MAX_CLIENTS ? POLLIN : 0, 0}};
        llamac_batch_token batch[MAX_CLIENTS * CHUNK];
        int busy = 0, size = 0; // clients that have a sequence, and tokens of the batch
        for (int i = 0; i < n; i++) {
            polled[i + 1] = (struct pollfd){clients[i].socket, POLLIN, 0};
            busy += clients[i].sequence != NULL;
        }
        if (poll(polled, n + 1, busy ? 0 : -1) < 0) return perror("server"), 1;
        for (int i = n - 1; i >= 0; i--)
            if (polled[i + 1].revents && !receive(&clients[i], model, engine))
                n = drop(clients, i, n);
        if (polled[0].revents) clients[n++] = (Client){.socket = accept(listener, NULL, NULL)};
        for (Client *c = clients; c < clients + n; c++) {
            int position = llamac_sequence_length(c->sequence); // 0 if there is none
            for (int k = 0; c->sequence && k < CHUNK && c->done < c->n; k++, c->done++, size++)
                batch[size] = (llamac_batch_token){c->sequence, c->tokens[c->done], position + k,
                                                   c->done == c->n - 1};
        }
        if (size && !llamac_evaluate(engine, batch, size, &error))
            return fprintf(stderr, "server: %s\n", error.text), 1;
        for (int i = n - 1; i >= 0; i--)
            if (clients[i].sequence && clients[i].done == clients[i].n
                && !advance(&clients[i], model, engine))
                n = drop(clients, i, n);
    }
}

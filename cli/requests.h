// --jsonl: reads requests from stdin, one JSON object per line, and answers several at once.
#ifndef CLI_REQUESTS_H
#define CLI_REQUESTS_H

#include <math.h>
#include "json.h"
#include "options.h"
#include "streams.h"

// ----------------------------------------------------------------------------
// Requests

typedef struct {
    bool is_user; // otherwise, the message is an earlier answer of the model
    Text words;
} Message;

typedef struct {
    Text id; // as JSON, to be repeated in the answer; the text null if the request has no id
    Text prompt;
    Text system; // terminated by a zero; s is NULL if there is no system prompt
    bool has_prompt, has_stops, json_object;
    Message *messages; // (n_messages,)
    int n_messages;
    Text stops[MAX_STOPS]; // each terminated by a zero
    int n_stops;
    double max_tokens, temperature, topp, topk, minp;
    double repeat_penalty, frequency_penalty, presence_penalty, penalty_tokens, seed;
} Request;

static void free_request(Request *q) {
    free(q->id.s);
    free(q->prompt.s);
    free(q->system.s);
    for (int i = 0; i < q->n_messages; i++) free(q->messages[i].words.s);
    free(q->messages);
    for (int i = 0; i < MAX_STOPS; i++) free(q->stops[i].s);
}

// Reads an id, which is a string or a number, and stores it as JSON.
static bool read_id(Json *j, Request *q) {
    double number;
    Text text = {0};
    bool is_string = peek(j) == '"';
    size_t begin = j->at; // after white space
    bool ok = is_string ? read_string(j, &text) : read_number(j, &number);
    if (ok) q->id.n = 0; // replaces "null"
    if (ok && is_string) append_json(&q->id, text.s, text.n);
    else if (ok) append(&q->id, j->s + begin, j->at - begin);
    free(text.s);
    return ok;
}

static bool read_stop(Json *j, Request *q) {
    if (q->n_stops == MAX_STOPS) return refuse(j, "more than %d stop strings", MAX_STOPS);
    Text *stop = &q->stops[q->n_stops];
    if (!read_c_string(j, stop)) return false;
    if (!*stop->s) return refuse(j, "a stop string is empty");
    q->n_stops++;
    return true;
}

// Reads a string or an array of strings. An empty array means no stop strings.
static bool read_stops(Json *j, Request *q) {
    q->has_stops = true;
    if (!skip(j, '[')) return read_stop(j, q);
    if (skip(j, ']')) return true;
    do {
        if (!read_stop(j, q)) return false;
    } while (skip(j, ','));
    return expect(j, ']');
}

// Reads {"role": ..., "content": ...} and adds it to the messages, or as the system prompt.
static bool read_message(Json *j, Request *q) {
    Text key = {0}, role = {0}, content = {0};
    bool ok = expect(j, '{'), has_content = false;
    do {
        ok = ok && read_c_string(j, &key) && expect(j, ':');
        bool is_content = ok && !strcmp(key.s, "content");
        if (ok && !is_content && strcmp(key.s, "role") != 0)
            ok = refuse(j, "unknown field '%.40s' of a message", key.s);
        ok = ok && (is_content ? read_string(j, &content) : read_c_string(j, &role));
        has_content |= is_content;
    } while (ok && skip(j, ','));
    ok = ok && expect(j, '}');
    append(&role, "", 1); // terminate it, even if `role` is missing or was not read
    bool is_system = !strcmp(role.s, "system"), is_user = !strcmp(role.s, "user");
    bool user_is_next = q->n_messages % 2 == 0;
    int index = q->n_messages + (q->system.s ? 1 : 0); // of this message in the array
    if (ok && !is_system && !is_user && strcmp(role.s, "assistant") != 0)
        ok = refuse(j, "the role of a message is '%.40s', expected system, user or assistant",
                    role.s);
    if (ok && !has_content) ok = refuse(j, "a message has no content");
    if (ok && is_system && (q->n_messages || q->system.s))
        ok = refuse(j, "a system message is not the first message");
    if (ok && !is_system && is_user != user_is_next)
        ok = refuse(j, "messages[%d] is from the %s, expected the %s", index, role.s,
                    user_is_next ? "user" : "assistant");
    if (ok && is_system) {
        append(&content, "", 1);
        q->system = content, content = (Text){0};
        if (strlen(q->system.s) < q->system.n - 1)
            ok = refuse(j, "the system message holds a zero byte");
    } else if (ok) {
        q->messages = resize(q->messages, q->n_messages + 1, sizeof *q->messages);
        q->messages[q->n_messages++] = (Message){is_user, content};
        content = (Text){0};
    }
    free(key.s);
    free(role.s);
    free(content.s);
    return ok;
}

static bool read_messages(Json *j, Request *q) {
    if (!expect(j, '[')) return false;
    do {
        if (!read_message(j, q)) return false;
    } while (skip(j, ','));
    if (!expect(j, ']')) return false;
    return q->n_messages % 2 || refuse(j, "the last message is not from the user");
}

static bool read_prompt(Json *j, Request *q) {
    q->has_prompt = true;
    return read_string(j, &q->prompt);
}

// Reads {"type": "text"} or {"type": "json_object"}.
static bool read_format(Json *j, Request *q) {
    Text key = {0}, type = {0};
    bool ok = expect(j, '{') && read_c_string(j, &key);
    if (ok && strcmp(key.s, "type") != 0)
        ok = refuse(j, "unknown field '%.40s' of response_format", key.s);
    ok = ok && expect(j, ':') && read_c_string(j, &type) && expect(j, '}');
    q->json_object = ok && !strcmp(type.s, "json_object");
    if (ok && !q->json_object && strcmp(type.s, "text") != 0)
        ok = refuse(j, "the type of response_format is '%.40s', expected text or json_object",
                    type.s);
    free(key.s);
    free(type.s);
    return ok;
}

// A field of a request.
typedef struct {
    const char *name;
    bool (*read_value)(Json *, Request *); // stores the value; NULL: the value is a number
    double *number, min, max;              // where the number is stored, and its limits
    bool whole;
} Field;

enum { N_FIELDS = 15 };

static void set_fields(Field fields[N_FIELDS], Request *q) {
    const Field all[N_FIELDS] = {
        {"id", .read_value = read_id},
        {"prompt", .read_value = read_prompt},
        {"messages", .read_value = read_messages},
        {"stop", .read_value = read_stops},
        {"response_format", .read_value = read_format},
        {"max_tokens", .number = &q->max_tokens, .min = 1, .max = INT_MAX, .whole = true},
        {"temperature", .number = &q->temperature, .max = 1e6},
        {"top_p", .number = &q->topp, .max = 1},
        {"top_k", .number = &q->topk, .max = INT_MAX, .whole = true},
        {"min_p", .number = &q->minp, .max = 1},
        {"repeat_penalty", .number = &q->repeat_penalty, .max = 100},
        {"frequency_penalty", .number = &q->frequency_penalty, .min = -100, .max = 100},
        {"presence_penalty", .number = &q->presence_penalty, .min = -100, .max = 100},
        {"penalty_tokens", .number = &q->penalty_tokens, .min = -1, .max = INT_MAX, .whole = true},
        {"seed", .number = &q->seed, .max = 9007199254740991, .whole = true},
    };
    memcpy(fields, all, sizeof all);
}

static bool read_field(Json *j, Request *q, const Field *field) {
    if (skip_word(j, "null")) return true; // *q keeps its value, as if the field were missing
    if (field->read_value) return field->read_value(j, q);
    double value;
    if (!read_number(j, &value)) return false;
    bool whole = !field->whole || value == floor(value);
    if (!whole || !(value >= field->min && value <= field->max))
        return refuse(j, "%s is %g, expected a %snumber from %.0f to %.0f", field->name, value,
                      field->whole ? "whole " : "", field->min, field->max);
    *field->number = value;
    return true;
}

// Reads the fields of a request. Missing fields keep their values in *q.
static bool read_request(Json *j, Request *q) {
    Field fields[N_FIELDS];
    bool given[N_FIELDS] = {false}; // a field with the value null counts as given
    bool ok = expect(j, '{');
    Text name = {0};
    set_fields(fields, q);
    if (ok && skip(j, '}')) ok = refuse(j, "an empty object");
    for (bool more = ok; more; more = ok && skip(j, ',')) {
        int i = 0;
        ok = read_c_string(j, &name) && expect(j, ':');
        while (ok && i < N_FIELDS && strcmp(name.s, fields[i].name) != 0) i++;
        if (ok && i == N_FIELDS) ok = refuse(j, "unknown field '%.40s'", name.s);
        if (ok && given[i]) ok = refuse(j, "the field '%s' appears twice", name.s);
        if (ok) given[i] = true;
        ok = ok && read_field(j, q, &fields[i]);
    }
    ok = ok && expect(j, '}');
    free(name.s);
    peek(j); // skips white space
    if (ok && j->at < j->n) ok = refuse(j, "text after the object at byte %zu", j->at);
    bool has_messages = q->n_messages > 0;
    if (ok && q->has_prompt == has_messages) // both or neither
        ok = refuse(j, "expected either prompt or messages");
    return ok;
}

// ----------------------------------------------------------------------------
// Answers

// The answer to a request, while the model generates it.
typedef struct {
    Stream stream;
    Text id; // JSON
} Answer;

// Prints the line that answers a request: the text of the stream, or the error.
static void print_answer(const Text *id, const Stream *s, const char *error) {
    Text line = {0};
    char numbers[100];
    append_string(&line, "{\"id\": ");
    append(&line, id->s, id->n);
    append_string(&line, error ? ", \"error\": " : ", \"text\": ");
    if (error) append_json(&line, error, strlen(error));
    else {
        append_json(&line, s->out.s, s->out.n);
        snprintf(numbers, sizeof numbers,
                 ", \"finish_reason\": \"%s\", \"prompt_tokens\": %d, \"tokens\": %d",
                 s->result == LLAMAC_MORE ? "length" : "stop", s->prompt_tokens, s->sampled);
        append_string(&line, numbers);
    }
    append_string(&line, "}\n");
    print_bytes(line.s, line.n);
    flush();
    free(line.s);
}

// Tokens of a prompt that has several parts.
typedef struct { int *tokens, n; } Tokens;

// Appends an array of tokens that the library has allocated, and frees it. Returns false if it is
// NULL.
static bool append_tokens(Tokens *all, int *tokens, int n) {
    if (!tokens) return false;
    all->tokens = resize(all->tokens, (size_t)all->n + n, sizeof(int));
    memcpy(all->tokens + all->n, tokens, n * sizeof(int));
    all->n += n;
    llamac_free(tokens);
    return true;
}

static void encode_messages(const Run *r, const Request *q, Tokens *all, llamac_error *error) {
    bool ok = true;
    for (int i = 0; ok && i < q->n_messages; i++) {
        Text words = q->messages[i].words;
        int n, *tokens;
        bool first = i == 0; // only the first turn contains the system prompt
        if (q->messages[i].is_user)
            tokens = llamac_encode_turn(r->model, first, q->system.s, words.s, words.n, &n, error);
        else tokens = llamac_encode_answer(r->model, words.s, words.n, &n, error);
        ok = append_tokens(all, tokens, n);
    }
}

// Encodes the prompt or the messages of a request. `chat_error`: why messages cannot be encoded, or
// "".
static bool encode_request(const Run *r, const Request *q, const char *chat_error, Tokens *all,
                           llamac_error *error) {
    error->text[0] = 0;
    if (q->n_messages && *chat_error) snprintf(error->text, sizeof error->text, "%s", chat_error);
    else if (q->n_messages) encode_messages(r, q, all, error);
    else {
        bool bos = r->info.add_bos || !q->prompt.n; // an empty prompt needs a token
        int n, *tokens = llamac_encode(r->model, q->prompt.s, q->prompt.n, bos, &n, error);
        append_tokens(all, tokens, n);
    }
    if (!*error->text && !all->n) strcpy(error->text, "the prompt has no tokens");
    return !*error->text;
}

// Begins the answer to a line. If the line is not a valid request, prints an error as its answer
// and returns NULL.
static Answer *begin_answer(Run *r, const char *line, size_t n, const char *chat_error) {
    const llamac_sampler *defaults = &r->sampler; // of the command line
    Json json = {.s = line, .n = n};
    // The values of missing fields. seed 0 means the state of the command line's sampler.
    // penalty_tokens 0 means the library's default, since the command line has no option for it
    Request q = {.json_object = r->json_object,
                 .max_tokens = r->steps,
                 .temperature = defaults->temperature,
                 .topp = defaults->topp,
                 .topk = defaults->topk,
                 .minp = defaults->minp,
                 .repeat_penalty = defaults->repeat_penalty,
                 .frequency_penalty = defaults->frequency_penalty,
                 .presence_penalty = defaults->presence_penalty};
    llamac_error error = {""};
    Tokens tokens = {0};
    Answer *answer = NULL;
    Stream stream = {0};
    append_string(&q.id, "null");
    bool ok = read_request(&json, &q);
    if (ok) ok = encode_request(r, &q, chat_error, &tokens, &error);
    if (ok && q.json_object) ok = use_grammar(r, &stream, (int)q.max_tokens, &error);
    if (!ok) close_stream(r, &stream); // it is not open yet, but may have a grammar
    if (!ok) print_answer(&q.id, NULL, *json.error ? json.error : error.text);
    else {
        const char *stops[MAX_STOPS];
        for (int i = 0; i < q.n_stops; i++) stops[i] = q.stops[i].s;
        answer = resize(NULL, 1, sizeof *answer);
        *answer = (Answer){.id = q.id, .stream = stream};
        q.id = (Text){0};
        Stream *s = &answer->stream;
        s->sampler = (llamac_sampler){.temperature = (float)q.temperature,
                                      .topp = (float)q.topp,
                                      .state = q.seed ? (uint64_t)q.seed : defaults->state,
                                      .topk = (int)q.topk,
                                      .minp = (float)q.minp,
                                      .repeat_penalty = (float)q.repeat_penalty,
                                      .frequency_penalty = (float)q.frequency_penalty,
                                      .presence_penalty = (float)q.presence_penalty,
                                      .penalty_tokens = (int)q.penalty_tokens};
        open_stream(r, s);
        feed(r, s, tokens.tokens, tokens.n);
        s->prompt_tokens = tokens.n;
        if (q.has_stops) begin_text(r, s, stops, q.n_stops, (int)q.max_tokens);
        else begin_text(r, s, r->stops, r->n_stops, (int)q.max_tokens);
    }
    free(tokens.tokens);
    free_request(&q);
    return answer;
}

static void end_answer(Run *r, Answer *answer) {
    print_answer(&answer->id, &answer->stream, NULL);
    report_slide(r, &answer->stream);
    close_stream(r, &answer->stream);
    free(answer->stream.out.s);
    free(answer->id.s);
    free(answer);
}

// ----------------------------------------------------------------------------
// Lines of stdin

static bool is_blank(const char *line, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!strchr(" \t\r", line[i]) || !line[i]) return false;
    return true;
}

// Answers requests, up to max_active at once, until the input ends and all are answered. An answer
// is printed when it is complete. `chat_error`: why the model cannot chat, or "".
static void answer_requests(Run *r, int max_active, const char *chat_error) {
    Input *in = &r->input;
    Stream *active[MAX_AT_ONCE]; // (n_active,); each is the first member of an Answer
    int n_active = 0;
    const char *line;
    size_t n;
    start_engine(r, r->options.positions);
    while (n_active || !in->ended || in->begin < in->bytes.n) {
        while (n_active < max_active && next_line(in, !n_active, &line, &n)) {
            Answer *answer = is_blank(line, n) ? NULL : begin_answer(r, line, n, chat_error);
            if (answer) active[n_active++] = &answer->stream;
        }
        if (!n_active) continue;
        evaluate(r, active, n_active);
        sample_all(r, active, n_active);
        int left = 0;
        for (int i = 0; i < n_active; i++) {
            if (active[i]->done) end_answer(r, (Answer *)active[i]);
            else active[left++] = active[i];
        }
        n_active = left;
    }
}

#endif

// Chat templates: recognizes the template of a model file among the known ones, and encodes turns
// by it.
#include "model.h"

// In the strings of a template, BOS and EOS stand for the vocabulary's tokens, whatever their text.
#define BOS "\2"
#define EOS "\3"

// A template: the strings around what the user and the assistant write (their words).
struct Template {
    const char *name;
    const char *marks[3];  // markers: each becomes one token if the vocabulary has that token
    const char *signs[4];  // texts that every Jinja source of this template contains
    const char *others[4]; // texts that none contains: markers of similar templates
    const char *stop;      // the marker that ends an answer; NULL: only EOS ends it
    const char *begin;     // put before the first turn; NULL: BOS if the vocabulary has add_bos
    const char *open;      // put before every turn of the user, and before the system prompt
    const char *system_open, *system_close; // around the system prompt, in the first turn only
    const char *user_open, *user_close;     // around the words of the user
    const char *answer_open, *answer_end;   // around the words of an answer
    const char *answer_close;               // ends an answer: put before every turn but the first
    bool strip;                             // remove white space around the words
    bool system_apart;   // strip the system prompt and the words one by one, not as one text
    bool eos_after_user; // the Jinja source must have EOS after the user's words
};

// clang-format off
static const Template templates[] = {
    {.name = "chatml", .marks = {"<|im_start|>", "<|im_end|>"}, .stop = "<|im_end|>",
     .signs = {"<|im_start|>", "<|im_end|>"},
     .others = {"<|im_sep|>", "<|im_user|>", "<|im_middle|>"},
     .system_open = "<|im_start|>system\n", .system_close = "<|im_end|>\n",
     .user_open = "<|im_start|>user\n",
     .user_close = "<|im_end|>\n<|im_start|>assistant\n", .answer_close = "<|im_end|>\n"},
    {.name = "llama3", .marks = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     .signs = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     .others = {"<|im_start|>"}, .stop = "<|eot_id|>",
     .begin = BOS, .strip = true, .system_apart = true,
     .system_open = "<|start_header_id|>system<|end_header_id|>\n\n", .system_close = "<|eot_id|>",
     .user_open = "<|start_header_id|>user<|end_header_id|>\n\n",
     .user_close = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
     .answer_close = "<|eot_id|>"},
    {.name = "zephyr", .marks = {"<|system|>", "<|user|>", "<|assistant|>"}, .eos_after_user = true,
     .signs = {"<|user|>", "<|assistant|>"},
     .others = {"<|end|>", "<|endoftext|>", "<|im_start|>", "[gMASK]"},
     .system_open = "<|system|>\n", .system_close = EOS "\n",
     .user_open = "<|user|>\n", .user_close = EOS "\n<|assistant|>\n", .answer_close = EOS "\n"},
    {.name = "llama2", .strip = true, .begin = "",
     .signs = {"[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"},
     .others = {"[SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "<|im_start|>"},
     .open = BOS "[INST] ", .system_open = "<<SYS>>\n", .system_close = "\n<</SYS>>\n\n",
     .user_close = " [/INST]", .answer_open = " ", .answer_end = " ", .answer_close = EOS},
};
// clang-format on
enum { N_TEMPLATES = sizeof templates / sizeof *templates };

static const Template *template_named(const char *name) {
    for (int i = 0; i < N_TEMPLATES; i++)
        if (!strcmp(name, templates[i].name)) return &templates[i];
    return NULL;
}

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static String strip_end(String s) {
    while (s.n && is_space(s.s[s.n - 1])) s.n--;
    return s;
}

static String strip(String s) {
    while (s.n && is_space(*s.s)) s.s++, s.n--;
    return strip_end(s);
}

// Returns the first position of `sign` in a Jinja source from `at` on, outside comments; source.n
// if there is none.
static size_t find_sign(String source, size_t at, const char *sign) {
    size_t n = source.n, length = strlen(sign);
    for (; at < n; at++) {
        if (n - at > 1 && !memcmp(source.s + at, "{#", 2)) {
            for (at += 2; at + 1 < n && memcmp(source.s + at, "#}", 2); at++) {}
            at++;
        } else if (n - at >= length && !memcmp(source.s + at, sign, length)) return at;
    }
    return n;
}

static bool contains(String source, const char *sign) {
    return find_sign(source, 0, sign) < source.n;
}

// Returns how many signs of a template a source contains. Sets *all to whether the source matches:
// it has all signs, no marker of similar templates, and EOS after the user's words if required.
static int count_signs(const Template *template, String source, bool *all) {
    int found = 0, expected = 0;
    for (int i = 0; i < 4 && template->signs[i]; i++, expected++)
        found += contains(source, template->signs[i]);
    *all = found == expected;
    for (int i = 0; i < 4 && template->others[i]; i++)
        *all &= !contains(source, template->others[i]);
    if (!*all || !template->eos_after_user) return found;
    // eos_token must follow <|user|> before the next marker
    size_t user = find_sign(source, 0, "<|user|>") + 1, next = find_sign(source, user, "<|");
    *all = find_sign(source, user, "eos_token") < next;
    return found;
}

// Returns the template that a Jinja source matches, or NULL. Only markers are compared, because
// spaces, names of variables, loops and conditions differ between files. Sets *nearest to the
// template with the most signs in the source, or NULL.
static const Template *find_template(String source, const Template **nearest) {
    int max = 0;
    *nearest = NULL;
    for (int i = 0; i < N_TEMPLATES; i++) {
        bool all;
        int found = count_signs(&templates[i], source, &all);
        if (all) return *nearest = &templates[i];
        if (found > max) max = found, *nearest = &templates[i];
    }
    return NULL;
}

// Returns the control token with this text, or -1.
static int control_token(const Tokenizer *t, const char *text) {
    for (int i = 0; i < t->vocab_size; i++)
        if (t->pieces[i].type == CONTROL && equals((String){t->pieces[i].s, t->pieces[i].n}, text))
            return i;
    return -1;
}

// Returns whether a control or user-defined token has this text.
static bool has_token(const Tokenizer *t, const char *text) {
    for (int i = 0; i < t->n_symbols; i++)
        if (equals((String){t->symbols[i]->s, t->symbols[i]->n}, text)) return true;
    return control_token(t, text) >= 0;
}

// Makes the markers of the template control tokens if the vocabulary has them as user-defined
// pieces, so that text cannot contain them.
static bool claim_marks(Tokenizer *t, const Template *template, Error *e) {
    bool changed = false;
    for (int i = 0; i < t->n_symbols; i++)
        for (int m = 0; m < 3; m++)
            if (template->marks[m]
                && equals((String){t->symbols[i]->s, t->symbols[i]->n}, template->marks[m])) {
                t->pieces[t->symbols[i] - t->pieces].type = CONTROL;
                changed = true;
            }
    return !changed || llamac_index_pieces(t, e);
}

typedef struct {
    const Tokenizer *t;
    const Template *template;
    Text text; // text that is not yet encoded
    int *ids;  // (n,) the tokens so far
    int n;
    bool begun; // something other than BOS precedes the text, so it gets no leading space
    bool failed;
    Error *error;
} Turn;

// Appends n tokens. `tokens` is NULL if the encoder has failed.
static void add_tokens(Turn *turn, const int *tokens, int n) {
    int *larger = tokens ? resize(turn->ids, (size_t)turn->n + n, sizeof(int)) : NULL;
    if (!larger) {
        if (tokens) fail(turn->error, no_memory); // the encoder writes its own message
        turn->failed = true;
        return;
    }
    turn->ids = larger;
    memcpy(turn->ids + turn->n, tokens, n * sizeof(int));
    turn->n += n;
}

// Encodes the pending text. Only text at the beginning of the chat or after BOS gets a leading
// space, as in transformers.
static void end_text(Turn *turn) {
    int n, how = turn->begun ? 0 : WITH_PREFIX;
    int *tokens = llamac_encode_text(turn->t, turn->text.s, turn->text.n, how, &n, turn->error);
    add_tokens(turn, tokens, n);
    turn->begun |= turn->text.n > 0;
    turn->text.n = 0;
    free(tokens);
}

static void add_token(Turn *turn, int token) {
    end_text(turn);
    add_tokens(turn, &token, 1);
    turn->begun = token != turn->t->bos;
}

// Adds a string of the template; nothing if it is NULL. Markers, BOS and EOS in it become tokens.
static void add_markup(Turn *turn, const char *s) {
    while (s && *s) {
        int token = *s == *BOS ? turn->t->bos : *s == *EOS ? turn->t->eos : -1;
        size_t length = 1;
        for (int m = 0; m < 3 && token < 0; m++) {
            const char *mark = turn->template->marks[m];
            if (!mark || strncmp(s, mark, strlen(mark))) continue;
            token = control_token(turn->t, mark);
            if (token >= 0) length = strlen(mark);
        }
        if (token >= 0) add_token(turn, token);
        else append(&turn->text, s, 1);
        s += length;
    }
}

// Adds words between two strings of the template. Markers in the words are encoded as plain text.
static void add_words(Turn *turn, const char *before, String words, const char *after) {
    add_markup(turn, before);
    append(&turn->text, words.s, words.n);
    add_markup(turn, after);
}

// Checks the arguments of a turn of n bytes, and prepares it.
static bool begin_turn(Turn *turn, const llamac_model *m, const char *words, size_t n,
                       int *n_tokens) {
    Error *e = turn->error;
    TRY(llamac_check_text_arguments(m, words, n, n_tokens, e));
    CHECK(m->chat, "no chat template is in use");
    turn->t = &m->tokenizer, turn->template = m->chat;
    return true;
}

// Returns the tokens of the turn, or NULL with a message.
static int *finish_turn(Turn *turn, int *n_tokens) {
    end_text(turn);
    if (turn->text.failed) fail(turn->error, no_memory);
    if (turn->failed || turn->text.failed) free(turn->ids), turn->ids = NULL;
    free(turn->text.s);
    *n_tokens = turn->ids ? turn->n : 0;
    return turn->ids;
}

int *llamac_encode_turn(const llamac_model *m, bool first, const char *system, const char *words,
                        size_t n, int *n_tokens, Error *e) {
    Turn turn = {.begun = !first, .error = e};
    if (!begin_turn(&turn, m, words, n, n_tokens)) return NULL;
    const Template *template = turn.template;
    String said = {words, n};
    bool has_system = first && system && *system;
    if (!first) add_markup(&turn, template->answer_close);
    else if (template->begin) add_markup(&turn, template->begin);
    else if (turn.t->add_bos) add_token(&turn, turn.t->bos);
    add_markup(&turn, template->open);
    if (has_system) {
        String prompt = {system, strlen(system)};
        add_words(&turn, template->system_open, template->system_apart ? strip(prompt) : prompt,
                  template->system_close);
    }
    if (template->strip)
        said = has_system && !template->system_apart ? strip_end(said) : strip(said);
    add_words(&turn, template->user_open, said, template->user_close);
    return finish_turn(&turn, n_tokens);
}

int *llamac_encode_answer(const llamac_model *m, const char *words, size_t n, int *n_tokens,
                          Error *e) {
    Turn turn = {.begun = true, .error = e};
    if (!begin_turn(&turn, m, words, n, n_tokens)) return NULL;
    String said = {words, n};
    if (turn.template->strip) said = strip(said);
    add_words(&turn, turn.template->answer_open, said, turn.template->answer_end);
    return finish_turn(&turn, n_tokens);
}

// Returns the template with the most markers in the vocabulary, or NULL: a suggestion for files
// without a known template.
static const Template *template_of_vocabulary(const Tokenizer *t) {
    const Template *best = NULL;
    int max = 0;
    for (int i = 0; i < N_TEMPLATES; i++) {
        int found = 0;
        for (int m = 0; m < 3; m++)
            found += templates[i].marks[m] && has_token(t, templates[i].marks[m]);
        if (found > max) max = found, best = &templates[i];
    }
    return best;
}

static bool use_template(llamac_model *m, const char *name, Error *e) {
    String text = m->tokenizer.chat_template;
    CHECK(m->tokenizer.pieces, "it has no tokenizer");
    const Template *nearest = NULL;
    const Template *template;
    if (name) template = template_named(name);
    else if (!m->transformer.data) template = template_named("llama2"); // only GGUF sets data
    else template = find_template(text, &nearest);
    CHECK(template || !name, "'%.40s' is no template, expected chatml, llama3, zephyr or llama2",
          name);
    if (!nearest) nearest = template_of_vocabulary(&m->tokenizer);
    CHECK(template,
          "%s%.*s%s; known are chatml, llama3, zephyr and llama2: name the one it was trained "
          "with, such as --template=%s",
          text.n ? "its chat template '" : "it has no chat template", SHOWN(text, 60),
          text.n ? "...' is unknown" : "", nearest ? nearest->name : "chatml");
    TRY(claim_marks(&m->tokenizer, template, e));
    m->chat = template;
    m->stop = template->stop ? control_token(&m->tokenizer, template->stop) : -1;
    return true;
}

bool llamac_use_template(llamac_model *m, const char *name, Error *e) {
    clear(e);
    CHECK(m, no_model);
    if (use_template(m, name, e)) return true;
    // a wrong name is the caller's fault, so the message does not name the file
    return name ? false : llamac_name_file(m->path, e);
}

bool llamac_ends(const llamac_model *m, int token) {
    if (!m || !m->tokenizer.pieces || token < 0) return false;
    const Tokenizer *t = &m->tokenizer;
    return token == t->bos || token == t->eos || token == t->eot || token == m->stop;
}

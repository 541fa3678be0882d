// Chats: the templates that are known, which of them a model file's template is by its marks, and the tokens of a turn.
#include "model.h"

// What stands around the words of a chat. BOS and EOS are the vocabulary's own, whatever their text.
#define BOS "\2"
#define EOS "\3"

struct Template {
    const char *name;
    const char *marks[3];   // texts that are one token each, where the vocabulary has them
    const char *signs[4];   // what each Jinja source of this template contains
    const char *others[4];  // what none of its sources contains: the marks of similar templates
    const char *stop;       // the mark that ends an answer, or NULL: EOS alone
    const char *begin;      // before the first turn, or NULL: BOS where the vocabulary wants it
    const char *open, *system_open, *system_close, *user_open, *user_close; // the system prompt stands in the first turn
    const char *answer_open, *answer_end; // around the words of an answer
    const char *answer_close; // before every other turn
    bool strip;             // space around the words goes
    bool system_apart;      // the system prompt and the user's words are stripped each by itself; else as one text
    bool eos_after_user;    // EOS follows the user's words
};

// clang-format off
static const Template templates[] = {
    {.name = "chatml", .marks = {"<|im_start|>", "<|im_end|>"}, .stop = "<|im_end|>",
     .signs = {"<|im_start|>", "<|im_end|>"}, .others = {"<|im_sep|>", "<|im_user|>", "<|im_middle|>"},
     .answer_open = "", .answer_end = "", .open = "", .system_open = "<|im_start|>system\n", .system_close = "<|im_end|>\n",
     .user_open = "<|im_start|>user\n", .user_close = "<|im_end|>\n<|im_start|>assistant\n", .answer_close = "<|im_end|>\n"},
    {.name = "llama3", .marks = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}, .stop = "<|eot_id|>",
     .signs = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}, .others = {"<|im_start|>"},
     .begin = BOS, .strip = true, .system_apart = true,
     .answer_open = "", .answer_end = "", .open = "", .system_open = "<|start_header_id|>system<|end_header_id|>\n\n",
     .system_close = "<|eot_id|>", .user_open = "<|start_header_id|>user<|end_header_id|>\n\n",
     .user_close = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", .answer_close = "<|eot_id|>"},
    {.name = "zephyr", .marks = {"<|system|>", "<|user|>", "<|assistant|>"}, .eos_after_user = true,
     .signs = {"<|user|>", "<|assistant|>"}, .others = {"<|end|>", "<|endoftext|>", "<|im_start|>", "[gMASK]"},
     .answer_open = "", .answer_end = "", .open = "", .system_open = "<|system|>\n", .system_close = EOS "\n",
     .user_open = "<|user|>\n", .user_close = EOS "\n<|assistant|>\n", .answer_close = EOS "\n"},
    {.name = "llama2", .strip = true, .begin = "",
     .signs = {"[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"}, .others = {"[SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "<|im_start|>"},
     .open = BOS "[INST] ", .system_open = "<<SYS>>\n", .system_close = "\n<</SYS>>\n\n",
     .user_open = "", .user_close = " [/INST]", .answer_open = " ", .answer_end = " ", .answer_close = EOS},
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

// The first place of `sign` in a Jinja source from `at` on, outside of comments; n where there is none.
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

static bool contains(String source, const char *sign) { return find_sign(source, 0, sign) < source.n; }

// How many of the template's signs a source contains. *all: they are all there, and no sign of another template.
static int count_signs(const Template *f, String source, bool *all) {
    int found = 0, expected = 0;
    for (int i = 0; i < 4 && f->signs[i]; i++, expected++) found += contains(source, f->signs[i]);
    *all = found == expected;
    for (int i = 0; i < 4 && f->others[i]; i++) *all &= !contains(source, f->others[i]);
    if (!*all || !f->eos_after_user) return found;
    size_t user = find_sign(source, 0, "<|user|>") + 1, next = find_sign(source, user, "<|");
    *all = find_sign(source, user, "eos_token") < next;
    return found;
}

// The template whose marks a model file's Jinja source has, or NULL. Spaces, names of variables, loops and conditions differ
// from file to file. *nearest: the template of which it has some marks, or NULL.
static const Template *find_template(String source, const Template **nearest) {
    int most = 0;
    *nearest = NULL;
    for (int i = 0; i < N_TEMPLATES; i++) {
        bool all;
        int found = count_signs(&templates[i], source, &all);
        if (all) return *nearest = &templates[i];
        if (found > most) most = found, *nearest = &templates[i];
    }
    return NULL;
}

// The control token with this text, or -1.
static int control_token(const Tokenizer *t, const char *text) {
    for (int i = 0; i < t->vocab_size; i++)
        if (t->pieces[i].type == CONTROL && equals((String){t->pieces[i].s, t->pieces[i].n}, text)) return i;
    return -1;
}

// Whether a control or user-defined token has this text.
static bool has_token(const Tokenizer *t, const char *text) {
    for (int i = 0; i < t->n_symbols; i++)
        if (equals((String){t->symbols[i]->s, t->symbols[i]->n}, text)) return true;
    return control_token(t, text) >= 0;
}

// Makes the template's marks control tokens, where the vocabulary has them as user-defined pieces: nobody's words may
// become them.
static bool claim_marks(Tokenizer *t, const Template *f, Error *e) {
    bool changed = false;
    for (int i = 0; i < t->n_symbols; i++)
        for (int m = 0; m < 3; m++)
            if (f->marks[m] && equals((String){t->symbols[i]->s, t->symbols[i]->n}, f->marks[m])) {
                t->pieces[t->symbols[i] - t->pieces].type = CONTROL;
                changed = true;
            }
    return !changed || llamac_index_pieces(t, e);
}

typedef struct {
    const Tokenizer *t;
    const Template *f;
    Text text;    // yet to be encoded
    int *ids, n;
    bool begun;   // something but BOS stands before the text
    bool failed;
    Error *error;
} Turn;

// Appends n tokens, and leaves room for one more.
static void add_tokens(Turn *turn, const int *tokens, int n) {
    int *larger = tokens ? resize(turn->ids, (size_t)turn->n + n + 1, sizeof(int)) : NULL;
    if (!larger) turn->failed = true;
    if (tokens && !larger) fail(turn->error, no_memory); // else the encoder's own message stands there
    if (!larger) return;
    turn->ids = larger;
    memcpy(turn->ids + turn->n, tokens, n * sizeof(int));
    turn->n += n;
}

// Encodes the text so far. It begins with a space only where nothing but BOS stands before it, as in transformers.
static void end_text(Turn *turn) {
    int n, *tokens = llamac_encode_text(turn->t, turn->text.s, turn->text.n, false, !turn->begun, &n, turn->error);
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

// Adds a part of the template, in which marks, BOS and EOS are tokens.
static void add_part(Turn *turn, const char *s) {
    while (*s) {
        int token = *s == *BOS ? turn->t->bos : *s == *EOS ? turn->t->eos : -1;
        size_t length = 1;
        for (int m = 0; m < 3 && token < 0; m++) {
            const char *mark = turn->f->marks[m];
            if (mark && !strncmp(s, mark, strlen(mark)) && (token = control_token(turn->t, mark)) >= 0) length = strlen(mark);
        }
        if (token >= 0) add_token(turn, token);
        else append(&turn->text, s, 1);
        s += length;
    }
}

// The turn's tokens, all of its text encoded; NULL with the error told.
static int *finish_turn(Turn *turn, int *n_tokens) {
    end_text(turn);
    if (turn->text.failed) fail(turn->error, no_memory);
    if (turn->failed || turn->text.failed) free(turn->ids), turn->ids = NULL;
    free(turn->text.s);
    *n_tokens = turn->ids ? turn->n : 0;
    return turn->ids;
}

// What is the user's is text, whatever it says.
int *llamac_encode_turn(const llamac_model *model, bool first, const char *system, const char *words, size_t n, int *n_tokens,
                        Error *e) {
    if (!llamac_takes_text(model, words, n, n_tokens, e)) return NULL;
    const Template *f = model->chat;
    if (!f) return fail(e, "no chat template is in use"), NULL;
    Turn turn = {.t = &model->tokenizer, .f = f, .begun = !first, .error = e};
    if (!first) add_part(&turn, f->answer_close);
    else if (f->begin) add_part(&turn, f->begin);
    else if (turn.t->add_bos) add_token(&turn, turn.t->bos);
    add_part(&turn, f->open);
    bool has_system = first && system && *system;
    if (has_system) {
        String prompt = {system, strlen(system)};
        if (f->system_apart) prompt = strip(prompt);
        add_part(&turn, f->system_open);
        append(&turn.text, prompt.s, prompt.n);
        add_part(&turn, f->system_close);
    }
    String said = {words, n};
    if (f->strip) said = has_system && !f->system_apart ? strip_end(said) : strip(said);
    add_part(&turn, f->user_open);
    append(&turn.text, said.s, said.n);
    add_part(&turn, f->user_close);
    return finish_turn(&turn, n_tokens);
}

int *llamac_encode_answer(const llamac_model *model, const char *words, size_t n, int *n_tokens, Error *e) {
    if (!llamac_takes_text(model, words, n, n_tokens, e)) return NULL;
    const Template *f = model->chat;
    if (!f) return fail(e, "no chat template is in use"), NULL;
    Turn turn = {.t = &model->tokenizer, .f = f, .begun = true, .error = e};
    String said = {words, n};
    if (f->strip) said = strip(said);
    append_string(&turn.text, f->answer_open);
    append(&turn.text, said.s, said.n);
    append_string(&turn.text, f->answer_end);
    return finish_turn(&turn, n_tokens);
}

// The template with most marks among the vocabulary's tokens: what a file without a known template may mean.
static const Template *template_of_vocabulary(const Tokenizer *t) {
    const Template *best = NULL;
    int most = 0;
    for (int i = 0; i < N_TEMPLATES; i++) {
        int found = 0;
        for (int m = 0; m < 3; m++) found += templates[i].marks[m] && has_token(t, templates[i].marks[m]);
        if (found > most) most = found, best = &templates[i];
    }
    return best;
}

static bool use_template(llamac_model *m, const char *name, Error *e) {
    String text = m->tokenizer.chat_template;
    CHECK(m->tokenizer.pieces, "it has no tokenizer");
    const Template *nearest = NULL;
    const Template *f = name ? template_named(name) : !m->weights.data ? template_named("llama2") : find_template(text, &nearest);
    CHECK(f || !name, "'%.40s' is no template, expected chatml, llama3, zephyr or llama2", name);
    if (!nearest) nearest = template_of_vocabulary(&m->tokenizer);
    CHECK(f, "%s%.*s%s; known are chatml, llama3, zephyr and llama2: name the one it was trained with, such as --template=%s",
          text.n ? "its chat template '" : "it has no chat template", (int)(text.n < 60 ? text.n : 60), text.s,
          text.n ? "...' is unknown" : "", nearest ? nearest->name : "chatml");
    TRY(claim_marks(&m->tokenizer, f, e));
    m->chat = f;
    m->stop = f->stop ? control_token(&m->tokenizer, f->stop) : -1;
    return true;
}

bool llamac_use_template(llamac_model *m, const char *name, Error *e) {
    CHECK(m, no_model);
    return use_template(m, name, e) || (name ? false : llamac_name_file(m->path, e));
}

bool llamac_ends(const llamac_model *m, int token) {
    if (!m || !m->tokenizer.pieces || token < 0) return false;
    const Tokenizer *t = &m->tokenizer;
    return token == t->bos || token == t->eos || token == t->eot || token == m->stop;
}

// Chats: the templates that are known, what a model file's template is, and the tokens of a turn.
#include "model.h"

// What stands around the words of a chat. BOS and EOS are the vocabulary's own, whatever their text.
#define BOS "\2"
#define EOS "\3"

struct Template {
    const char *name;
    const char *sources[2]; // chat templates, in Jinja, that say this; how they are spelled does not matter
    const char *marks[3];   // texts that are one token each, where the vocabulary has them
    const char *stop;       // the mark that ends an answer, or NULL: EOS alone
    const char *open, *system_open, *system_close, *user_open, *user_close; // the system prompt stands in the first turn
    const char *answer_open, *answer_end; // around the words of an answer
    const char *answer_close; // before every other turn
    bool bos, strip;          // the template itself says BOS; space around the words goes
};

// clang-format off
#define CHATML "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}" \
               "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
#define ZEPHYR(end) "{% for message in messages %}" \
    "{% if message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + eos_token " end \
    "{% elif message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + eos_token " end \
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + eos_token " end \
    "{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>"
#define LLAMA2(check) "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}" \
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}" \
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}" check \
    "{% if loop.index0 == 0 and system_message != false %}" \
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}" \
    "{% else %}{% set content = message['content'] %}{% endif %}" \
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}" \
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"

static const Template templates[] = {
    {.name = "chatml", .marks = {"<|im_start|>", "<|im_end|>"}, .stop = "<|im_end|>",
     .sources = {CHATML, "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}" CHATML},
     .answer_open = "", .answer_end = "", .open = "", .system_open = "<|im_start|>system\n", .system_close = "<|im_end|>\n",
     .user_open = "<|im_start|>user\n", .user_close = "<|im_end|>\n<|im_start|>assistant\n", .answer_close = "<|im_end|>\n"},
    {.name = "zephyr", .marks = {"<|system|>", "<|user|>", "<|assistant|>"},
     .sources = {ZEPHYR("}}\n") "' }}\n{% endif %}\n{% endfor %}", ZEPHYR("+ '\\n' }}") "\\n' }}{% endif %}{% endfor %}"},
     .answer_open = "", .answer_end = "", .open = "", .system_open = "<|system|>\n", .system_close = EOS "\n",
     .user_open = "<|user|>\n", .user_close = EOS "\n<|assistant|>\n", .answer_close = EOS "\n"},
    {.name = "llama2", .bos = true, .strip = true,
     .sources = {LLAMA2("{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
                        "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"), LLAMA2("")},
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

static void strip_end(Text *text, size_t start) {
    while (text->n > start && is_space(text->s[text->n - 1])) text->n--;
}

// A Jinja template without its freedom of spelling: spaces inside of tags, kinds of quotes and of newlines, one text in
// two strings or two tags, and the space around tags that trim_blocks, lstrip_blocks (which chat templates are made for)
// and the minus sign remove.
static Text plain_spelling(String source) {
    Text out = {0};
    const char *s = source.s, *end = s + source.n;
    if (end > s && end[-1] == '\n') end--; // as Jinja does
    char tag = 0, quote = 0;               // inside of which we are
    size_t line = 0, text = 0;             // where in `out` the text of a line and the text outside of tags begin
    for (; s < end; s++) {
        bool two = end - s > 1;
        if (quote) {
            if (*s == '\n') append_string(&out, "\\n");
            else append(&out, *s == quote ? "'" : s, 1);
            if (*s == '\\' && two) append(&out, ++s, 1);
            else if (*s == quote) quote = 0;
        } else if (tag && two && (*s == tag || (*s == '-' && end - s > 2 && s[1] == tag)) && s[1 + (*s == '-')] == '}') {
            bool minus = *s == '-';
            append(&out, (char[]){tag, '}'}, 2);
            for (s += 1 + minus; minus && s + 1 < end && is_space(s[1]);) s++;
            bool newline = tag == '%' && s + 1 < end && s[1] == '\n';
            s += newline, text = out.n, line = newline ? out.n : SIZE_MAX, tag = 0;
        } else if (tag && (*s == '\'' || *s == '"')) {
            quote = *s;
            if (out.n > 1 && !memcmp(out.s + out.n - 2, "'+", 2)) out.n -= 2; // 'a' + 'b' is 'ab'
            else append(&out, "'", 1);
        } else if (tag) {
            if (!is_space(*s)) append(&out, s, 1);
        } else if (two && *s == '{' && (s[1] == '%' || s[1] == '{')) {
            tag = s[1] == '{' ? '}' : '%';
            size_t blanks = out.n;
            while (blanks > line && (out.s[blanks - 1] == ' ' || out.s[blanks - 1] == '\t')) blanks--;
            if (end - s > 2 && s[2] == '-') strip_end(&out, text), s++;
            else if (tag == '%' && blanks == line) out.n = blanks;
            if (tag == '}' && out.n > 1 && out.n == text && !memcmp(out.s + out.n - 2, "}}", 2)) {
                out.n -= 2; // {{ a }}{{ b }} is {{ a + b }}
                append(&out, "+", 1);
            } else append(&out, (char[]){'{', tag == '}' ? '{' : '%'}, 2);
            s++;
        } else {
            append(&out, s, 1);
            if (*s == '\n') line = out.n;
        }
    }
    return out;
}

// The template that a model file's Jinja source is, or NULL.
static const Template *find_template(String source) {
    const Template *found = NULL;
    Text theirs = plain_spelling(source);
    for (int i = 0; i < 2 * N_TEMPLATES && !found; i++) {
        const char *known = templates[i / 2].sources[i % 2];
        Text ours = plain_spelling((String){known, strlen(known)});
        bool whole = !ours.failed && !theirs.failed;
        if (whole && ours.n == theirs.n && !memcmp(ours.s, theirs.s, ours.n)) found = &templates[i / 2];
        free(ours.s);
    }
    free(theirs.s);
    return found;
}

// The control token with this text, or -1.
static int control_token(const Tokenizer *t, const char *text) {
    for (int i = 0; i < t->vocab_size; i++)
        if (t->pieces[i].type == CONTROL && equals((String){t->pieces[i].s, t->pieces[i].n}, text)) return i;
    return -1;
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
    turn->failed |= !larger;
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
    if (turn->failed || turn->text.failed) free(turn->ids), turn->ids = NULL;
    free(turn->text.s);
    *n_tokens = turn->n;
    return turn->ids;
}

// What is the user's is text, whatever it says.
int *llamac_encode_turn(const llamac_model *model, bool first, const char *system, const char *words, size_t n, int *n_tokens,
                        Error *e) {
    const Template *f = model->chat;
    if (!f) return fail(e, "no chat template is in use"), NULL;
    Turn turn = {.t = &model->tokenizer, .f = f, .begun = !first, .error = e};
    fail(e, no_memory);
    if (!first) add_part(&turn, f->answer_close);
    else if (turn.t->add_bos && !f->bos) add_token(&turn, turn.t->bos);
    add_part(&turn, f->open);
    bool has_system = first && system && *system;
    if (has_system) {
        add_part(&turn, f->system_open);
        append_string(&turn.text, system);
        add_part(&turn, f->system_close);
    }
    while (f->strip && n && is_space(words[n - 1])) n--;
    while (f->strip && n && !has_system && is_space(*words)) words++, n--;
    add_part(&turn, f->user_open);
    append(&turn.text, words, n);
    add_part(&turn, f->user_close);
    return finish_turn(&turn, n_tokens);
}

int *llamac_encode_answer(const llamac_model *model, const char *words, size_t n, int *n_tokens, Error *e) {
    const Template *f = model->chat;
    if (!f) return fail(e, "no chat template is in use"), NULL;
    Turn turn = {.t = &model->tokenizer, .f = f, .begun = true, .error = e};
    fail(e, no_memory);
    while (f->strip && n && is_space(words[n - 1])) n--;
    while (f->strip && n && is_space(*words)) words++, n--;
    append_string(&turn.text, f->answer_open);
    append(&turn.text, words, n);
    append_string(&turn.text, f->answer_end);
    return finish_turn(&turn, n_tokens);
}

bool llamac_use_template(llamac_model *m, const char *name, Error *e) {
    String text = m->tokenizer.chat_template;
    CHECK(m->tokenizer.pieces, "it has no tokenizer");
    const Template *f = name ? template_named(name) : !m->weights.data ? template_named("llama2") : find_template(text);
    CHECK(f || !name, "'%.40s' is no template, expected chatml, zephyr or llama2", name);
    CHECK(f, "%s%.*s%s; known are chatml, zephyr and llama2: name the one it was trained with, such as --template=llama2",
          text.n ? "its chat template '" : "it has no chat template", (int)(text.n < 60 ? text.n : 60), text.s,
          text.n ? "...' is unknown" : "");
    TRY(claim_marks(&m->tokenizer, f, e));
    m->chat = f;
    m->stop = f->stop ? control_token(&m->tokenizer, f->stop) : -1;
    return true;
}

bool llamac_ends(const llamac_model *m, int token) {
    const Tokenizer *t = &m->tokenizer;
    if (!t->pieces || token < 0) return false;
    return token == t->bos || token == t->eos || token == t->eot || token == m->stop;
}

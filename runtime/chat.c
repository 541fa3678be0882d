// Chat templates: recognizes the template of a model file among the known ones, and encodes turns
// by it.
#include "model.h"

// Placeholders in the strings of a template: BOS and EOS for these tokens of the vocabulary,
// VARIABLE for anything that a Jinja source computes, such as the user's words.
#define VARIABLE "\1"
#define BOS "\2"
#define EOS "\3"

enum { MAX_SIGNS = 5 };

// A template: the strings around what the user and the assistant write (their words).
struct Template {
    const char *name;
    const char *marks[MAX_MARKS];  // markers: each becomes one token if the vocabulary has it
    const char *signs[MAX_SIGNS];  // texts in the outline of each of its Jinja sources
    const char *others[MAX_SIGNS]; // texts in none of these outlines: signs of similar templates
    const char *stop;              // the marker that ends an answer; NULL: only EOS ends it
    // Put before the first turn. NULL: BOS, if the vocabulary has add_bos or the Jinja source
    // contains bos_token.
    const char *begin;
    const char *open; // put before every turn of the user, and before the system prompt
    const char *system_open, *system_close; // around the system prompt, in the first turn only
    const char *user_open, *user_close;     // around the words of the user
    const char *answer_open, *answer_end;   // around the words of an answer
    const char *answer_close;               // ends an answer: put before every turn but the first
    bool system_always;   // write system_open and system_close without a system prompt too
    bool strip;           // remove white space around the system prompt and all words
    bool strip_answer;    // remove it around answers only
    bool strip_together;  // strip the system prompt and the user's words as one text
    bool marks_eat_space; // a marker that is one token removes the white space after it
    bool leading_space;   // text after BOS or EOS gets the leading space of the vocabulary
};

// Each row names the models whose Jinja source it reproduces. engine/formats/chat_template.py has
// the same rows for training. The rows leave out:
// - Qwen3 and QwQ remove the part of earlier answers up to </think>. A turn cannot change the
//   tokens before it, so this part stays in the KV cache of a session. QwQ's source also begins
//   each answer with <think>, which the model then writes itself.
// - Llama 3.2 writes today's date. llama3.1 always writes 26 Jul 2024, as Llama 3.1 does.
// - Mistral's v3 sources put the system prompt into the latest turn. Which turn that will be is not
//   known when a turn is encoded, so the system prompt is in the first one.
// - Tools and images.
// clang-format off
static const Template templates[] = {
    // Qwen1.5, 2, 2.5 and 3, SmolLM, SmolLM2, Yi, Hermes, Dolphin
    {.name = "chatml", .marks = {"<|im_start|>", "<|im_end|>"}, .stop = "<|im_end|>",
     .signs = {"<|im_start|>", "<|im_end|>"},
     .others = {"<|im_sep|>", "<|im_user|>", "<|im_middle|>"},
     .system_open = "<|im_start|>system\n", .system_close = "<|im_end|>\n",
     .user_open = "<|im_start|>user\n",
     .user_close = "<|im_end|>\n<|im_start|>assistant\n", .answer_close = "<|im_end|>\n"},
    // Llama 3
    {.name = "llama3", .marks = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     .signs = {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"},
     .others = {"<|im_start|>", "Today Date: ", "BEGIN CONVERSATION"}, .stop = "<|eot_id|>",
     .begin = BOS, .strip = true,
     .system_open = "<|start_header_id|>system<|end_header_id|>\n\n", .system_close = "<|eot_id|>",
     .user_open = "<|start_header_id|>user<|end_header_id|>\n\n",
     .user_close = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
     .answer_close = "<|eot_id|>"},
    // Llama 3.1, 3.2 and 3.3
    {.name = "llama3.1", .marks = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     .signs = {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>",
               "Cutting Knowledge Date: December 2023\n", "Today Date: "},
     .others = {"<|im_start|>"}, .stop = "<|eot_id|>",
     .begin = BOS, .strip = true, .system_always = true,
     .system_open = "<|start_header_id|>system<|end_header_id|>\n\n"
                    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
     .system_close = "<|eot_id|>",
     .user_open = "<|start_header_id|>user<|end_header_id|>\n\n",
     .user_close = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
     .answer_close = "<|eot_id|>"},
    // Zephyr, TinyLlama
    {.name = "zephyr", .marks = {"<|system|>", "<|user|>", "<|assistant|>"},
     .signs = {"<|user|>", "<|assistant|>", "<|user|>\n" VARIABLE EOS},
     .others = {"<|end|>", "<|endoftext|>", "<|im_start|>", "[gMASK]"},
     .system_open = "<|system|>\n", .system_close = EOS "\n",
     .user_open = "<|user|>\n", .user_close = EOS "\n<|assistant|>\n", .answer_close = EOS "\n"},
    // Llama 2
    {.name = "llama2", .strip = true, .strip_together = true, .leading_space = true, .begin = "",
     .signs = {"[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"},
     .others = {"[SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "<|im_start|>"},
     .open = BOS "[INST] ", .system_open = "<<SYS>>\n", .system_close = "\n<</SYS>>\n\n",
     .user_close = " [/INST]", .answer_open = " ", .answer_end = " ", .answer_close = EOS},
    // The first files of Mistral 7B Instruct 0.1 and 0.2, of Mixtral 8x7B and LLaVA. They refuse a
    // system prompt; here it is put where v1 puts it. The source of 0.1 has a space after EOS,
    // which leading_space provides.
    {.name = "mistral-v0", .marks = {"[INST]", "[/INST]"}, .begin = BOS, .leading_space = true,
     .signs = {"[INST] ", " [/INST]", VARIABLE EOS},
     .others = {" [INST]", "<<SYS>>", "[SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
                VARIABLE " " VARIABLE EOS},
     .open = "[INST] ", .system_close = "\n\n", .user_close = " [/INST]", .answer_close = EOS},
    // Mistral 7B Instruct 0.2, Mixtral 8x7B
    {.name = "mistral-v1", .marks = {"[INST]", "[/INST]"}, .begin = BOS,
     .signs = {" [INST] ", " [/INST]", VARIABLE " " VARIABLE EOS},
     .others = {"<<SYS>>", "[SYSTEM_PROMPT]"},
     .open = " [INST] ", .system_close = "\n\n", .user_close = " [/INST]", .answer_open = " ",
     .answer_close = EOS},
    // Mistral 7B Instruct 0.3, Mistral Large 2407, Mixtral 8x22B (which does not strip answers)
    {.name = "mistral-v3", .marks = {"[INST]", "[/INST]"}, .begin = BOS, .strip_answer = true,
     .signs = {"[INST] ", VARIABLE "[/INST]", VARIABLE " " VARIABLE EOS},
     .others = {" [INST]", "<<SYS>>", "[SYSTEM_PROMPT]"},
     .open = "[INST] ", .system_close = "\n\n", .user_close = "[/INST]", .answer_open = " ",
     .answer_close = EOS},
    // Mistral Nemo 2407
    {.name = "mistral-v3-tekken", .marks = {"[INST]", "[/INST]"}, .begin = BOS,
     .signs = {"[INST]" VARIABLE, VARIABLE "[/INST]", VARIABLE EOS},
     .others = {" [INST]", "<<SYS>>", "[SYSTEM_PROMPT]", VARIABLE " " VARIABLE EOS},
     .open = "[INST]", .system_close = "\n\n", .user_close = "[/INST]", .answer_close = EOS},
    // Phi-3, Phi-3.5. The newlines are in the Jinja source, but the markers remove them.
    {.name = "phi3", .marks = {"<|system|>", "<|user|>", "<|assistant|>", "<|end|>"},
     .signs = {"<|end|>\n", "<|assistant|>\n"},
     .others = {"<|im_start|>", "<|endoftext|>", "[gMASK]"},
     .stop = "<|end|>", .marks_eat_space = true,
     .system_open = "<|system|>\n", .system_close = "<|end|>\n", .user_open = "<|user|>\n",
     .user_close = "<|end|>\n<|assistant|>\n", .answer_close = "<|end|>\n"},
    // Phi-4-mini
    {.name = "phi4-mini", .marks = {"<|system|>", "<|user|>", "<|assistant|>", "<|end|>"},
     .signs = {"<|end|>" VARIABLE, "<|assistant|>" VARIABLE},
     .others = {"<|end|>\n", "<|im_start|>", "[gMASK]", "<|system|>Your name is Phi"},
     .stop = "<|end|>", .marks_eat_space = true,
     .system_open = "<|system|>", .system_close = "<|end|>", .user_open = "<|user|>",
     .user_close = "<|end|><|assistant|>", .answer_close = "<|end|>"},
};
// clang-format on
enum { N_TEMPLATES = sizeof templates / sizeof *templates };

static const Template *template_named(const char *name) {
    for (int i = 0; i < N_TEMPLATES; i++)
        if (!strcmp(name, templates[i].name)) return &templates[i];
    return NULL;
}

// The names of all templates as a list, for messages.
typedef struct { char s[200]; } Names;

static Names all_names(void) {
    Names names = {""};
    for (int i = 0, n = 0; i < N_TEMPLATES; i++) {
        const char *before = i == 0 ? "" : i < N_TEMPLATES - 1 ? ", " : " or ";
        n += snprintf(names.s + n, sizeof names.s - n, "%s%s", before, templates[i].name);
    }
    return names;
}

// ----------------------------------------------------------------------------
// White space

// Returns whether the code point has Unicode's property White_Space.
static bool is_white_space(uint32_t c) {
    return (c >= '\t' && c <= '\r') || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680
           || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f
           || c == 0x205f || c == 0x3000;
}

// Returns whether Python's str.strip, which Jinja's filter `trim` calls, removes the code point.
static bool is_stripped(uint32_t c) { return is_white_space(c) || (c >= 0x1c && c <= 0x1f); }

// Returns the first code point of s, and its length in bytes; 0 and 0 if it is invalid.
static uint32_t first_character(String s, size_t *length) {
    static const uint8_t bits[] = {0, 0x7f, 0x1f, 0x0f, 0x07}; // of the first byte, by length
    *length = llamac_utf8(s.s, s.n);
    uint32_t c = *length ? (unsigned char)*s.s & bits[*length] : 0;
    for (size_t i = 1; i < *length; i++) c = c << 6 | ((unsigned char)s.s[i] & 0x3f);
    return c;
}

static String strip_start(String s, bool (*is_space)(uint32_t)) {
    size_t length;
    while (s.n && is_space(first_character(s, &length))) s.s += length, s.n -= length;
    return s;
}

static String strip_end(String s) {
    for (size_t at = s.n, length; at > 0;) {
        at--;
        if ((s.s[at] & 0xc0) == 0x80 && s.n - at < 4) continue; // not the first byte of a character
        uint32_t c = first_character((String){s.s + at, s.n - at}, &length);
        if (length != s.n - at || !is_stripped(c)) break;
        s.n = at;
    }
    return s;
}

static String strip(String s) { return strip_end(strip_start(s, is_stripped)); }

// ----------------------------------------------------------------------------
// Recognition

enum { MAX_SOURCE = 1 << 20 }; // bytes of a Jinja source; a longer one is unknown

// The outline of a Jinja source: the text that it may write, in the order of the source, with
// BOS and EOS for bos_token and eos_token and one VARIABLE for all other code between two texts.
// Most spellings of a template have the same outline: it does not depend on names, loops,
// conditions, quotes, or on whether texts are joined by +, by ~ or by being adjacent.
typedef struct {
    String source;
    size_t at;
    Text text;
} Outline;

static char peek(const Outline *o, size_t ahead) {
    return o->at + ahead < o->source.n ? o->source.s[o->at + ahead] : 0;
}

static bool at_text(const Outline *o, const char *s) {
    size_t n = strlen(s);
    return o->source.n - o->at >= n && !memcmp(o->source.s + o->at, s, n);
}

static void add_variable(Outline *o) {
    if (!o->text.n || o->text.s[o->text.n - 1] != *VARIABLE) append_string(&o->text, VARIABLE);
}

// Adds a byte of text, unless it is one of the bytes of VARIABLE, BOS and EOS.
static void add_byte(Outline *o, char c) {
    if (c != *VARIABLE && c != *BOS && c != *EOS) append(&o->text, &c, 1);
}

static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// Adds the text up to the next tag, without the white space that transformers makes Jinja remove:
// around a tag with a minus, and before and after statements and comments on a line of their own.
static void add_raw_text(Outline *o, bool after_minus, bool after_statement) {
    String s = o->source;
    if (after_statement && !after_minus && peek(o, 0) == '\n') o->at++;
    while (after_minus && is_blank(peek(o, 0))) o->at++;
    size_t start = o->at;
    while (o->at < s.n && !at_text(o, "{{") && !at_text(o, "{%") && !at_text(o, "{#")) o->at++;
    size_t end = o->at;
    if (peek(o, 2) == '-')
        while (end > start && is_blank(s.s[end - 1])) end--;
    else if (end < s.n && peek(o, 1) != '{') {
        size_t line = end;
        while (line > start && (s.s[line - 1] == ' ' || s.s[line - 1] == '\t')) line--;
        if (line == 0 || s.s[line - 1] == '\n') end = line;
    }
    for (size_t i = start; i < end; i++) add_byte(o, s.s[i]);
}

// Adds the string that begins at a quote, without the quotes. A subscript such as ['role'] is code.
static void add_string(Outline *o, bool subscript) {
    char quote = peek(o, 0);
    for (o->at++; o->at < o->source.n && peek(o, 0) != quote; o->at++) {
        char c = peek(o, 0);
        if (c == '\\') {
            o->at++;
            c = peek(o, 0) == 'n' ? '\n' : peek(o, 0) == 't' ? '\t' : peek(o, 0);
        }
        if (!subscript) add_byte(o, c);
    }
    o->at += o->at < o->source.n;
}

static bool in_name(char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// Adds a name or number.
static void add_name(Outline *o) {
    size_t start = o->at;
    while (in_name(peek(o, 0))) o->at++;
    String name = {o->source.s + start, o->at - start};
    if (equals(name, "bos_token")) append_string(&o->text, BOS);
    else if (equals(name, "eos_token")) append_string(&o->text, EOS);
    else add_variable(o);
}

// Adds what is between the braces of a tag that ends with `end`, and skips the tag.
static void add_code(Outline *o, const char *end) {
    bool is_statement = *end == '%';
    int depth = 0; // of the braces of dictionaries
    if (is_statement) add_variable(o);
    for (char before = 0, c; o->at < o->source.n && (depth || !at_text(o, end)); before = c) {
        c = peek(o, 0);
        if (c == '\'' || c == '"') add_string(o, before == '[');
        else if (in_name(c)) add_name(o);
        else {
            depth += (c == '{') - (c == '}' && depth);
            bool joins = is_blank(c) || c == '+' || c == '~' || c == '-';
            if (!joins) add_variable(o);
            o->at++;
        }
    }
    if (is_statement) add_variable(o);
}

// Returns the outline, which ends with a VARIABLE; free its text.
static Text outline_of(String source) {
    Outline o = {.source = source};
    bool after_minus = false, after_statement = false;
    while (true) {
        add_raw_text(&o, after_minus, after_statement);
        if (o.at >= source.n) break;
        const char *end = peek(&o, 1) == '{' ? "}}" : peek(&o, 1) == '%' ? "%}" : "#}";
        o.at += 2;
        if (*end != '#') add_code(&o, end);
        else
            while (o.at < source.n && !at_text(&o, end)) o.at++;
        after_minus = o.at < source.n && source.s[o.at - 1] == '-';
        after_statement = *end != '}';
        o.at = source.n - o.at > 2 ? o.at + 2 : source.n;
    }
    add_variable(&o);
    return o.text;
}

// Returns the position of `sign` in a text from `at` on; text.n if there is none.
static size_t find(String text, size_t at, const char *sign) {
    size_t n = strlen(sign);
    while (at + n <= text.n) {
        const char *first = memchr(text.s + at, *sign, text.n - n + 1 - at);
        if (!first) break;
        if (!memcmp(first, sign, n)) return first - text.s;
        at = first - text.s + 1;
    }
    return text.n;
}

static bool contains(String text, const char *sign) { return find(text, 0, sign) < text.n; }

// Returns whether a sign contains text, such as a marker, beyond spaces and placeholders.
static bool has_text(const char *sign) { return strspn(sign, " " VARIABLE BOS EOS) < strlen(sign); }

// Returns the template that an outline matches: the outline contains all of its `signs` and none of
// its `others`. Returns NULL if there is none. Sets *nearest to the template with the most signs
// with text in the outline and, among these, the fewest missing signs; NULL if there is none.
static const Template *find_template(String outline, const Template **nearest) {
    int max_found = 0, min_missing = 0;
    *nearest = NULL;
    for (int i = 0; i < N_TEMPLATES; i++) {
        const Template *template = &templates[i];
        int found = 0, missing = 0, others = 0;
        for (int s = 0; s < MAX_SIGNS && template->signs[s]; s++) {
            bool is_there = contains(outline, template->signs[s]);
            found += is_there && has_text(template->signs[s]);
            missing += !is_there;
        }
        for (int s = 0; s < MAX_SIGNS && template->others[s]; s++)
            others += contains(outline, template->others[s]);
        if (!missing && !others) return *nearest = template;
        if (found > max_found || (found && found == max_found && missing < min_missing))
            max_found = found, min_missing = missing, *nearest = template;
    }
    return NULL;
}

static bool begins_with(String text, const char *s) {
    size_t n = strlen(s);
    return text.n >= n && !memcmp(text.s, s, n);
}

// Returns the template's own system prompt, for chats without one: the first text in the outline
// between system_open and system_close that has no VARIABLE, BOS or EOS. Returns "" if there is
// none. Reads each byte once: a source may have many markers that open a prompt and none that
// closes one.
static String default_system(const Template *template, String outline) {
    const char *open = template->system_open, *close = template->system_close;
    for (size_t at = 0; open && (at = find(outline, at, open)) < outline.n;) {
        size_t begin = at += strlen(open);
        for (; at < outline.n; at++) {
            String rest = {outline.s + at, outline.n - at};
            if (begins_with(rest, close)) return (String){outline.s + begin, at - begin};
            if (*rest.s == *VARIABLE || *rest.s == *BOS || *rest.s == *EOS) break;
        }
    }
    return (String){"", 0};
}

// ----------------------------------------------------------------------------
// Encoding

// Returns the control token with this text, or -1. Reads the whole vocabulary.
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
// pieces, so that no text is encoded as one of them.
static bool claim_marks(Tokenizer *t, const Template *template, Error *e) {
    bool changed = false;
    for (int i = 0; i < t->n_symbols; i++)
        for (int m = 0; m < MAX_MARKS; m++)
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
    const int *mark_tokens; // llamac_model.mark_tokens
    Text text;              // text that is not yet encoded
    int *ids;               // (n,) the tokens so far
    int n;
    bool begun;      // the text gets no leading space
    bool after_mark; // the text follows a marker that removes the white space after it
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

// Encodes the pending text. Only text at the beginning of the chat gets a leading space, as in
// transformers; with leading_space, text after BOS and EOS too.
static void end_text(Turn *turn) {
    String text = {turn->text.s, turn->text.n};
    if (turn->after_mark) text = strip_start(text, is_white_space);
    int n, how = turn->begun ? 0 : WITH_PREFIX;
    int *tokens = llamac_encode_text(turn->t, text.s, text.n, how, &n, turn->error);
    add_tokens(turn, tokens, n);
    turn->begun |= text.n > 0;
    turn->after_mark &= text.n == 0;
    turn->text.n = 0;
    free(tokens);
}

static void add_token(Turn *turn, int token, bool is_mark) {
    end_text(turn);
    add_tokens(turn, &token, 1);
    turn->begun = is_mark || !turn->template->leading_space;
    turn->after_mark = is_mark && turn->template->marks_eat_space;
}

// Adds a string of the template; nothing if it is NULL. Markers, BOS and EOS in it become tokens.
static void add_markup(Turn *turn, const char *s) {
    while (s && *s) {
        int token = *s == *BOS ? turn->t->bos : *s == *EOS ? turn->t->eos : -1;
        size_t length = 1;
        bool is_mark = token < 0;
        for (int m = 0; m < MAX_MARKS && token < 0; m++) {
            const char *mark = turn->template->marks[m];
            if (!mark || strncmp(s, mark, strlen(mark))) continue;
            token = turn->mark_tokens[m];
            if (token >= 0) length = strlen(mark);
        }
        if (token >= 0) add_token(turn, token, is_mark);
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
    turn->t = &m->tokenizer, turn->template = m->chat, turn->mark_tokens = m->mark_tokens;
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

// Adds the system prompt; NULL: the template's own.
static void add_system(Turn *turn, const llamac_model *m, const char *system) {
    const Template *template = turn->template;
    String prompt = {m->chat_system.s, m->chat_system.n};
    if (system) prompt = (String){system, strlen(system)};
    if (!prompt.n && !template->system_always) return;
    if (template->strip && !template->strip_together) prompt = strip(prompt);
    add_words(turn, template->system_open, prompt, template->system_close);
}

int *llamac_encode_turn(const llamac_model *m, bool first, const char *system, const char *words,
                        size_t n, int *n_tokens, Error *e) {
    Turn turn = {.begun = !first, .error = e};
    if (!begin_turn(&turn, m, words, n, n_tokens)) return NULL;
    const Template *template = turn.template;
    String said = {words, n};
    if (!first) add_markup(&turn, template->answer_close);
    else if (template->begin) add_markup(&turn, template->begin);
    else if (m->chat_bos) {
        add_token(&turn, turn.t->bos, false);
        // transformers adds the BOS of a vocabulary after encoding, that of a template before
        turn.begun = !turn.t->add_bos;
    }
    add_markup(&turn, template->open);
    size_t system_begin = turn.text.n;
    if (first) add_system(&turn, m, system);
    if (template->strip_together && turn.text.n > system_begin) said = strip_end(said);
    else if (template->strip) said = strip(said);
    add_words(&turn, template->user_open, said, NULL);
    if (template->strip_together) { // words may be nothing but white space
        String both = {turn.text.s + system_begin, turn.text.n - system_begin};
        turn.text.n = system_begin + strip_end(both).n;
    }
    add_markup(&turn, template->user_close);
    return finish_turn(&turn, n_tokens);
}

int *llamac_encode_answer(const llamac_model *m, const char *words, size_t n, int *n_tokens,
                          Error *e) {
    Turn turn = {.begun = true, .error = e};
    if (!begin_turn(&turn, m, words, n, n_tokens)) return NULL;
    const Template *template = turn.template;
    // the turn before it ended with a marker; m->stop: whether the markers are tokens
    turn.after_mark = template->marks_eat_space && m->stop >= 0;
    String said = {words, n};
    if (template->strip || template->strip_answer) said = strip(said);
    add_words(&turn, template->answer_open, said, template->answer_end);
    return finish_turn(&turn, n_tokens);
}

// Returns the template with the most markers in the vocabulary, or NULL: a suggestion for files
// without a known template.
static const Template *template_of_vocabulary(const Tokenizer *t) {
    const Template *best = NULL;
    int max = 0;
    for (int i = 0; i < N_TEMPLATES; i++) {
        int found = 0;
        for (int m = 0; m < MAX_MARKS; m++)
            found += templates[i].marks[m] && has_token(t, templates[i].marks[m]);
        if (found > max) max = found, best = &templates[i];
    }
    return best;
}

// What a Jinja source determines.
typedef struct {
    const Template *template, *nearest; // as find_template returns them
    bool has_bos;                       // the source writes BOS
    Text system;                        // the source's own system prompt, or ""
} Choice;

static bool read_source(String source, Choice *choice, Error *e) {
    if (source.n > MAX_SOURCE) return true;
    Text text = outline_of(source);
    String outline = {text.s, text.n};
    choice->template = find_template(outline, &choice->nearest);
    if (choice->template) {
        String prompt = default_system(choice->template, outline);
        // a source with enable_thinking writes its prompt only if the caller asks for thinking
        if (!contains(source, "enable_thinking")) append(&choice->system, prompt.s, prompt.n);
        choice->has_bos = contains(outline, BOS);
    }
    bool failed = text.failed || choice->system.failed;
    free(text.s);
    CHECK(!failed, no_memory);
    return true;
}

static bool choose_template(const llamac_model *m, const char *name, Choice *choice, Error *e) {
    String source = m->tokenizer.chat_template;
    CHECK(m->tokenizer.pieces, "it has no tokenizer");
    if (name) choice->template = template_named(name);
    else if (!m->transformer.data) choice->template = template_named("llama2"); // GGUF sets data
    else TRY(read_source(source, choice, e));
    CHECK(choice->template || !name, "unknown template '%.40s', expected %s", name, all_names().s);
    if (!choice->nearest) choice->nearest = template_of_vocabulary(&m->tokenizer);
    CHECK(choice->template,
          "%s%.*s%s; choose the one it was trained with (%s), such as --template=%s",
          source.n ? "its chat template '" : "it has no chat template", SHOWN(source, 60),
          source.n ? "...' is unknown" : "", all_names().s,
          choice->nearest ? choice->nearest->name : "chatml");
    return true;
}

static bool use_template(llamac_model *m, const char *name, Error *e) {
    Choice choice = {0};
    if (!choose_template(m, name, &choice, e) || !claim_marks(&m->tokenizer, choice.template, e)) {
        free(choice.system.s);
        return false;
    }
    free(m->chat_system.s);
    m->chat = choice.template, m->chat_system = choice.system;
    m->chat_bos = m->tokenizer.add_bos || choice.has_bos;
    m->stop = m->chat->stop ? control_token(&m->tokenizer, m->chat->stop) : -1;
    for (int i = 0; i < MAX_MARKS; i++) {
        const char *mark = m->chat->marks[i];
        m->mark_tokens[i] = mark ? control_token(&m->tokenizer, mark) : -1;
    }
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

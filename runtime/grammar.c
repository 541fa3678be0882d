// Grammar: which tokens may come next in a JSON text.
//
// The bytes of a text drive a pushdown automaton: a state, and a stack of the open arrays and
// objects. The effect of a token is how it changes both. llamac_grammar_json computes, for each
// state, the effects of all tokens, and groups the tokens by effect: of 150,000 tokens, most have
// the same effect within a string. llamac_grammar_allowed then compares a few hundred effects with
// the stack, instead of reading the bytes of each token.
#include "model.h"

enum {
    MAX_DEPTH = LLAMAC_JSON_DEPTH,
    MAX_SPACES = LLAMAC_JSON_SPACES,
    IN_ARRAY = 0, // the two types of containers, one bit each in a stack
    IN_OBJECT = 1,
    NEVER = UINT16_MAX, // a cost (see Costs below): no number of tokens completes the text
};
_Static_assert(MAX_DEPTH <= 64, "a stack of containers is 64 bits");

// ----------------------------------------------------------------------------
// States

// States within a string. IN_STRING + one of these is a state of the text; IN_KEY + one of these is
// the same within a key.
enum {
    TEXT_NEXT,
    ESCAPE_NEXT, // after a backslash
    HEX_1,       // HEX_n: before digit n of the four of \uXXXX
    HEX_2,
    HEX_3,
    HEX_4,
    // The first digit was D. After 8 to B the code is a high surrogate, \uD800 to \uDBFF, which
    // must be followed by a low one, \uDC00 to \uDFFF
    AFTER_HEX_D,
    HIGH_3, // HIGH_n: before digit n of the high surrogate
    HIGH_4,
    LOW_BACKSLASH, // before the backslash, the u, and digits 1 and 2 of the low surrogate
    LOW_U,
    LOW_1,
    LOW_2,
    TAIL_1, // TAIL_n: n bytes of a UTF-8 character are missing, each 80 to BF
    TAIL_2,
    TAIL_3,
    // After byte E0, ED, F0 or F4: the next byte has a narrower range than 80 to BF, which excludes
    // overlong forms, surrogates, and characters above U+10FFFF
    TAIL_E0,
    TAIL_ED,
    TAIL_F0,
    TAIL_F4,
    N_IN_STRING,
    STRING_ENDS = N_IN_STRING, // result of string_transition at the quote that ends the string
};

enum {
    REFUSED,
    OBJECT_NEXT, // the text begins, and must be an object
    VALUE_NEXT,
    ELEMENT_NEXT, // after [: a value or ]
    FIRST_KEY_NEXT,
    KEY_NEXT,
    COLON_NEXT,
    AFTER_VALUE,
    AFTER_MINUS, // within a number
    AFTER_ZERO,
    IN_INTEGER,
    AFTER_POINT,
    IN_FRACTION,
    AFTER_E,
    AFTER_E_SIGN,
    IN_EXPONENT,
    IN_LITERAL, // one state for each byte of literal_rests, which has 10
    IN_STRING = IN_LITERAL + 10,
    IN_KEY = IN_STRING + N_IN_STRING,
    N_STATES = IN_KEY + N_IN_STRING,
    // Not states, but results of `transition` where the next state depends on the stack
    OPENS_ARRAY = N_STATES,
    OPENS_OBJECT,
    CLOSES_ARRAY,
    CLOSES_OBJECT,
    COMMA,
};
_Static_assert(COMMA < 256, "transitions are bytes");

// What follows the first letter of true, false and null
static const char literal_rests[] = "rue"
                                    "alse"
                                    "ull";
enum { IN_TRUE = IN_LITERAL, IN_FALSE = IN_TRUE + 3, IN_NULL = IN_FALSE + 4 };

static bool is_json_space(int byte) {
    return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r';
}

static bool is_digit(int byte) { return byte >= '0' && byte <= '9'; }

static bool between(int low, int byte, int high) { return low <= byte && byte <= high; }

// Returns the value of a hexadecimal digit, or -1.
static int hex_value(int byte) {
    if (is_digit(byte)) return byte - '0';
    byte |= 'a' - 'A';
    return between('a', byte, 'f') ? byte - 'a' + 10 : -1;
}

// Returns the state within a string after a byte, STRING_ENDS, or -1.
static int string_transition(int state, int byte) {
    int hex = hex_value(byte);
    switch (state) {
    case TEXT_NEXT:
        if (byte == '"') return STRING_ENDS;
        if (byte == '\\') return ESCAPE_NEXT;
        if (byte < 0x80) return byte >= 0x20 ? TEXT_NEXT : -1;
        if (byte == 0xe0) return TAIL_E0;
        if (byte == 0xed) return TAIL_ED;
        if (byte == 0xf0) return TAIL_F0;
        if (byte == 0xf4) return TAIL_F4;
        if (between(0xc2, byte, 0xdf)) return TAIL_1;
        if (between(0xe1, byte, 0xef)) return TAIL_2;
        return between(0xf1, byte, 0xf3) ? TAIL_3 : -1;
    case ESCAPE_NEXT:
        if (byte == 'u') return HEX_1;
        return byte && strchr("\"\\/bfnrt", byte) ? TEXT_NEXT : -1;
    case HEX_1: return hex < 0 ? -1 : hex == 0xd ? AFTER_HEX_D : HEX_2;
    case HEX_2: return hex < 0 ? -1 : HEX_3;
    case HEX_3: return hex < 0 ? -1 : HEX_4;
    case HEX_4: return hex < 0 ? -1 : TEXT_NEXT;
    case AFTER_HEX_D: return between(0, hex, 7) ? HEX_3 : between(8, hex, 0xb) ? HIGH_3 : -1;
    case HIGH_3: return hex < 0 ? -1 : HIGH_4;
    case HIGH_4: return hex < 0 ? -1 : LOW_BACKSLASH;
    case LOW_BACKSLASH: return byte == '\\' ? LOW_U : -1;
    case LOW_U: return byte == 'u' ? LOW_1 : -1;
    case LOW_1: return hex == 0xd ? LOW_2 : -1;
    case LOW_2: return hex >= 0xc ? HEX_3 : -1;
    case TAIL_1: return between(0x80, byte, 0xbf) ? TEXT_NEXT : -1;
    case TAIL_2: return between(0x80, byte, 0xbf) ? TAIL_1 : -1;
    case TAIL_3: return between(0x80, byte, 0xbf) ? TAIL_2 : -1;
    case TAIL_E0: return between(0xa0, byte, 0xbf) ? TAIL_1 : -1;
    case TAIL_ED: return between(0x80, byte, 0x9f) ? TAIL_1 : -1;
    case TAIL_F0: return between(0x90, byte, 0xbf) ? TAIL_2 : -1;
    case TAIL_F4: return between(0x80, byte, 0x8f) ? TAIL_2 : -1;
    }
    return -1;
}

static int value_transition(int byte) {
    switch (byte) {
    case '{': return OPENS_OBJECT;
    case '[': return OPENS_ARRAY;
    case '"': return IN_STRING + TEXT_NEXT;
    case '-': return AFTER_MINUS;
    case '0': return AFTER_ZERO;
    case 't': return IN_TRUE;
    case 'f': return IN_FALSE;
    case 'n': return IN_NULL;
    }
    return is_digit(byte) ? IN_INTEGER : REFUSED;
}

static int after_value_transition(int byte) {
    if (is_json_space(byte)) return AFTER_VALUE;
    return byte == ',' ? COMMA : byte == ']' ? CLOSES_ARRAY : byte == '}' ? CLOSES_OBJECT : REFUSED;
}

// Returns the state after a byte, or the transition that depends on the stack.
static int transition(int state, int byte) {
    if (state >= IN_STRING) {
        bool key = state >= IN_KEY;
        int first = key ? IN_KEY : IN_STRING, next = string_transition(state - first, byte);
        if (next == STRING_ENDS) return key ? COLON_NEXT : AFTER_VALUE;
        return next < 0 ? REFUSED : first + next;
    }
    if (state >= IN_LITERAL) {
        if (byte != literal_rests[state - IN_LITERAL]) return REFUSED;
        // The states of a literal are consecutive. If state + 1 is the first state of something
        // else, this byte is the last of the literal
        bool last = state + 1 == IN_FALSE || state + 1 == IN_NULL || state + 1 == IN_STRING;
        return last ? AFTER_VALUE : state + 1;
    }
    if (state <= COLON_NEXT && is_json_space(byte)) return state;
    bool exponent = byte == 'e' || byte == 'E';
    switch (state) {
    case OBJECT_NEXT: return byte == '{' ? OPENS_OBJECT : REFUSED;
    case VALUE_NEXT: return value_transition(byte);
    case ELEMENT_NEXT: return byte == ']' ? CLOSES_ARRAY : value_transition(byte);
    case FIRST_KEY_NEXT:
        if (byte == '}') return CLOSES_OBJECT; // fallthrough
    case KEY_NEXT: return byte == '"' ? IN_KEY + TEXT_NEXT : REFUSED;
    case COLON_NEXT: return byte == ':' ? VALUE_NEXT : REFUSED;
    case AFTER_MINUS: return byte == '0' ? AFTER_ZERO : is_digit(byte) ? IN_INTEGER : REFUSED;
    case IN_INTEGER:
        if (is_digit(byte)) return IN_INTEGER; // fallthrough
    case AFTER_ZERO:
        if (byte == '.') return AFTER_POINT;
        return exponent ? AFTER_E : after_value_transition(byte);
    case AFTER_POINT: return is_digit(byte) ? IN_FRACTION : REFUSED;
    case IN_FRACTION:
        if (is_digit(byte)) return IN_FRACTION;
        return exponent ? AFTER_E : after_value_transition(byte);
    case AFTER_E:
        if (byte == '+' || byte == '-') return AFTER_E_SIGN; // fallthrough
    case AFTER_E_SIGN: return is_digit(byte) ? IN_EXPONENT : REFUSED;
    case IN_EXPONENT: return is_digit(byte) ? IN_EXPONENT : after_value_transition(byte);
    case AFTER_VALUE: return after_value_transition(byte);
    }
    return REFUSED;
}

// Returns whether a value may end here.
static bool ends_value(int state) {
    return state == AFTER_VALUE || state == AFTER_ZERO || state == IN_INTEGER
           || state == IN_FRACTION || state == IN_EXPONENT;
}

// ----------------------------------------------------------------------------
// Effects

// What a token does from a state. Bit 0 of a stack is the innermost container.
typedef struct {
    uint64_t opened; // containers that the token opens and leaves open
    // Types of the innermost containers before the token, as far as it depends on them: those that
    // it closes, and the next one if a comma of the token is in that one, because the type of a
    // container decides what may follow its commas
    uint64_t expected;
    uint8_t n_closed; // number of containers that were open before and that it closes
    uint8_t n_opened, n_expected;
    uint8_t peak; // max depth of nesting within the token, minus the depth before it
    uint8_t first_spaces, last_spaces; // bytes of whitespace outside strings at both ends
    uint8_t blank;                     // nothing but such whitespace
    uint8_t end;                       // the state after it
} Effect;
_Static_assert(sizeof(Effect) == 24, "effects are compared by memcmp, so they have no padding");

// Shifts by n = 64, too, which C leaves undefined.
static uint64_t shift_left(uint64_t x, int n) { return n < 64 ? x << n : 0; }
static uint64_t shift_right(uint64_t x, int n) { return n < 64 ? x >> n : 0; }

// A token that has been read in part.
typedef struct {
    Effect effect;
    int state, spaces; // spaces: whitespace up to here
    bool only_spaces;
} Partial;

// Returns whether the type of the container that is innermost now is unknown: the token has not
// opened it, and nothing has been assumed about it by `expect`.
static bool innermost_is_unknown(const Effect *e) {
    return e->n_opened == 0 && e->n_expected == e->n_closed;
}

// Assumes the type of the innermost container, which is unknown. Returns false if the token would
// then expect more than MAX_DEPTH containers.
static bool expect(Effect *e, int type) {
    if (e->n_expected == MAX_DEPTH) return false;
    e->expected |= (uint64_t)type << e->n_expected++;
    return true;
}

// Returns the type of the innermost container, which must be known.
static int innermost(const Effect *e) {
    return (e->n_opened ? e->opened : e->expected >> e->n_closed) & 1;
}

static bool open_container(Effect *e, int type) {
    int rise = e->n_opened - e->n_closed + 1;
    if (e->n_opened == MAX_DEPTH || rise > MAX_DEPTH) return false;
    e->opened = e->opened << 1 | type;
    e->n_opened++;
    if (rise > e->peak) e->peak = rise;
    return true;
}

static bool close_container(Effect *e, int type) {
    if (innermost_is_unknown(e) && !expect(e, type)) return false;
    if (innermost(e) != type) return false;
    if (e->n_opened) e->opened >>= 1, e->n_opened--;
    else e->n_closed++;
    return true;
}

// Reads a byte. Returns false if it is refused.
static bool read_byte(Partial *p, int next, bool space) {
    p->spaces = space ? p->spaces + 1 : 0;
    if (p->spaces > MAX_SPACES) return false;
    p->only_spaces &= space;
    if (p->only_spaces) p->effect.first_spaces++;
    p->state = next;
    switch (next) {
    case REFUSED: return false;
    case OPENS_ARRAY: p->state = ELEMENT_NEXT; return open_container(&p->effect, IN_ARRAY);
    case OPENS_OBJECT: p->state = FIRST_KEY_NEXT; return open_container(&p->effect, IN_OBJECT);
    case CLOSES_ARRAY: p->state = AFTER_VALUE; return close_container(&p->effect, IN_ARRAY);
    case CLOSES_OBJECT: p->state = AFTER_VALUE; return close_container(&p->effect, IN_OBJECT);
    case COMMA:
        // find_effects has assumed a type, so this is never true
        if (innermost_is_unknown(&p->effect)) return false;
        p->state = innermost(&p->effect) == IN_OBJECT ? KEY_NEXT : VALUE_NEXT;
    }
    return true;
}

struct llamac_grammar {
    const llamac_model *model;
    int vocab_size, first_state; // first_state: the state in which a text begins
    // Made by llamac_grammar_copy: the arrays that the pointers below point to belong to another
    // grammar, except `allowed`
    bool is_copy;
    // the text so far; the outermost container is bit depth - 1 of the stack
    int state, spaces, depth;
    uint64_t stack;
    uint8_t *allowed; // (vocab_size,)

    uint8_t transitions[N_STATES][256];
    Effect *effects; // by state
    int first_effect[N_STATES + 1];
    int *tokens;      // by effect; ascending within one
    int *first_token; // (n_effects + 1,)
    // The effect that most tokens of a state have, and a mask of these tokens, to be copied. The
    // mask is NULL if they are so few that a mask would not be faster
    int common_effect[N_STATES];
    uint8_t *common[N_STATES];

    struct Closing *closings;
    int n_closings;
    uint16_t value_costs[N_STATES]; // see compute_value_costs
    // A cache: min tokens that complete a text, by depth and state, for the stack `costs_stack` of
    // depth `costs_depth`. Row d depends on the d outermost containers alone, so it stays valid as
    // long as they stay open
    uint16_t costs[MAX_DEPTH + 1][N_STATES];
    uint64_t costs_stack;
    int costs_depth;
};

// Finds the effects of a token of n bytes from a state. Returns their number, 0 to 2.
//
// A key follows a comma in an object, a value follows it in an array. If the token has not opened
// the container of its comma, the type of the container is unknown, and the token is read in two
// ways: as in an array and as in an object. Only a string is possible in both. After it, a colon
// is possible only in an object; a comma and the end of the container only in an array. So one way
// has ended before the next such comma, and there are never more than two.
static int find_effects(const llamac_grammar *g, int state, const uint8_t *s, size_t n,
                        Effect out[2]) {
    Partial parts[2] = {{.state = state, .only_spaces = state < IN_STRING}};
    int n_parts = 1;
    for (size_t i = 0; i < n && n_parts; i++) {
        bool comma = g->transitions[parts[0].state][s[i]] == COMMA;
        if (n_parts == 1 && comma && innermost_is_unknown(&parts[0].effect)) {
            parts[1] = parts[0];
            if (!expect(&parts[0].effect, IN_ARRAY) || !expect(&parts[1].effect, IN_OBJECT))
                return 0;
            n_parts = 2;
        }
        int kept = 0;
        for (int k = 0; k < n_parts; k++) {
            bool space = parts[k].state < IN_STRING && is_json_space(s[i]);
            if (read_byte(&parts[k], g->transitions[parts[k].state][s[i]], space))
                parts[kept++] = parts[k];
        }
        n_parts = kept;
    }
    for (int k = 0; k < n_parts; k++) {
        out[k] = parts[k].effect;
        out[k].last_spaces = parts[k].spaces;
        out[k].blank = parts[k].only_spaces;
        out[k].end = parts[k].state;
    }
    return n_parts;
}

// Returns whether a token with such an effect may come next: the innermost containers of the stack
// are the expected ones, and the token does not nest too deep.
static bool matches(uint64_t stack, int depth, uint64_t expected, int n_expected, int peak) {
    uint64_t mask = ~shift_left(~(uint64_t)0, n_expected); // of the containers that are compared
    return depth >= n_expected && !((stack ^ expected) & mask) && depth + peak <= MAX_DEPTH;
}

// ----------------------------------------------------------------------------
// Costs
//
// The cost of a state with a stack is the min number of tokens that complete the text, if only
// these tokens are used:
// - tokens that close all containers that they open. After them, the stack is the same, or the same
//   without its innermost containers, so costs are computed from the outermost container inwards.
// - tokens that do not begin with whitespace, so that the cost does not depend on the whitespace
//   before.
// Such tokens exist for closing every container, because llamac_grammar_json requires the brackets
// as tokens of one byte.
//
// The cost is the length of a shortest path: unless it is 0 or NEVER, there is a token after which
// the cost is lower by 1. So a text whose cost is at most the number of tokens that are left can
// always be completed.

// The parts of such a token's effect that costs depend on. `start`: the state before the token.
typedef struct Closing {
    uint64_t expected;
    uint8_t n_expected, n_closed, peak, start, end;
} Closing;

// Computes the costs at a depth. Those at all smaller depths must have been computed.
static void compute_costs(llamac_grammar *g, uint64_t stack, int depth) {
    uint16_t *costs = g->costs[depth];
    for (int state = 0; state < N_STATES; state++)
        costs[state] = depth == 0 && ends_value(state) ? 0 : NEVER;
    // The tokens { and }. The first is not a Closing, since it leaves a container open. A token {}
    // is a Closing, and lowers this to 1
    if (depth == 0) costs[OBJECT_NEXT] = 2;
    for (bool lowered = true; lowered;) {
        lowered = false;
        for (int i = 0; i < g->n_closings; i++) {
            const Closing *c = &g->closings[i];
            int cost = c->n_closed > depth ? NEVER : g->costs[depth - c->n_closed][c->end] + 1;
            if (cost >= costs[c->start]) continue;
            if (!matches(stack, depth, c->expected, c->n_expected, c->peak)) continue;
            costs[c->start] = cost;
            lowered = true;
        }
    }
}

// Returns how many of the outermost containers two stacks have in common.
static int common_depth(uint64_t a, int depth_a, uint64_t b, int depth_b) {
    int depth = depth_a < depth_b ? depth_a : depth_b;
    uint64_t difference = shift_right(a, depth_a - depth) ^ shift_right(b, depth_b - depth);
    difference &= ~shift_left(~(uint64_t)0, depth);
    return difference ? __builtin_clzll(difference) - (64 - depth) : depth;
}

// Returns the costs of all states with this stack.
static const uint16_t *costs_of(llamac_grammar *g, uint64_t stack, int depth) {
    int known = common_depth(g->costs_stack, g->costs_depth, stack, depth);
    for (int d = known + 1; d <= depth; d++) compute_costs(g, shift_right(stack, depth - d), d);
    // deeper rows stay valid if `stack` is an outer part of `costs_stack`
    if (known < depth) g->costs_stack = stack, g->costs_depth = depth;
    return g->costs[depth];
}

// ----------------------------------------------------------------------------
// Tokens that are allowed

static bool applies(const llamac_grammar *g, const Effect *e) {
    return g->spaces + e->first_spaces <= MAX_SPACES
           && matches(g->stack, g->depth, e->expected, e->n_expected, e->peak);
}

static int depth_after(const llamac_grammar *g, const Effect *e) {
    return g->depth - e->n_closed + e->n_opened;
}

static uint64_t stack_after(const llamac_grammar *g, const Effect *e) {
    return shift_left(shift_right(g->stack, e->n_closed), e->n_opened) | e->opened;
}

// Returns whether the text can be completed with `left` tokens, the first of which has this effect.
// Most calls need no costs_of, because an upper bound of the cost is low enough: the number of
// tokens that end the value, whatever the stack is, plus one closing bracket for each container.
static bool affordable(llamac_grammar *g, const Effect *e, int left) {
    int depth = depth_after(g, e), value_cost = g->value_costs[e->end];
    if (value_cost != NEVER && value_cost + depth < left) return true;
    int cost = costs_of(g, stack_after(g, e), depth)[e->end];
    return cost != NEVER && cost < left;
}

const uint8_t *llamac_grammar_allowed(llamac_grammar *g, int left) {
    if (!g) return NULL;
    int common = g->common[g->state] ? g->common_effect[g->state] : -1; // index of an effect
    const Effect *common_effect = common >= 0 ? &g->effects[common] : NULL;
    if (common_effect && applies(g, common_effect) && affordable(g, common_effect, left))
        memcpy(g->allowed, g->common[g->state], g->vocab_size);
    else memset(g->allowed, 0, g->vocab_size);
    for (int i = g->first_effect[g->state]; i < g->first_effect[g->state + 1]; i++) {
        const Effect *e = &g->effects[i];
        if (i == common || !applies(g, e) || !affordable(g, e, left)) continue;
        for (int k = g->first_token[i]; k < g->first_token[i + 1]; k++)
            g->allowed[g->tokens[k]] = 1;
    }
    const Tokenizer *t = &g->model->tokenizer;
    // Tokens that end a text or, in some chat templates, an answer: llamac_ends returns whether
    // they do so in the template in use
    const int ends[] = {t->bos, t->eos, t->eot, g->model->stop};
    for (int i = 0; i < 4; i++)
        if (ends[i] >= 0 && ends[i] < g->vocab_size)
            g->allowed[ends[i]] = llamac_grammar_complete(g) && llamac_ends(g->model, ends[i]);
    return g->allowed;
}

// Returns whether a token has the effect, by bisection.
static bool has_effect(const llamac_grammar *g, int effect, int token) {
    int lo = g->first_token[effect], hi = g->first_token[effect + 1];
    while (lo < hi) {
        int middle = lo + (hi - lo) / 2;
        if (g->tokens[middle] < token) lo = middle + 1;
        else hi = middle;
    }
    return lo < g->first_token[effect + 1] && g->tokens[lo] == token;
}

bool llamac_grammar_accept(llamac_grammar *g, int token) {
    if (!g) return false;
    if (llamac_ends(g->model, token)) return llamac_grammar_complete(g);
    for (int i = g->first_effect[g->state]; i < g->first_effect[g->state + 1]; i++) {
        const Effect *e = &g->effects[i];
        if (!applies(g, e) || !has_effect(g, i, token)) continue;
        if (!affordable(g, e, INT32_MAX)) return false;
        g->spaces = e->blank ? g->spaces + e->last_spaces : e->last_spaces;
        g->stack = stack_after(g, e);
        g->depth = depth_after(g, e);
        g->state = e->end;
        return true;
    }
    return false;
}

bool llamac_grammar_complete(const llamac_grammar *g) {
    return g && g->depth == 0 && ends_value(g->state);
}

void llamac_grammar_reset(llamac_grammar *g) {
    if (!g) return;
    g->state = g->first_state;
    g->spaces = g->depth = 0;
    g->stack = 0;
}

// ----------------------------------------------------------------------------
// Building the grammar of a vocabulary

// The texts of all tokens, and growing arrays.
typedef struct {
    Text texts;
    size_t *begin;       // (vocab_size + 1,) where each token begins in `texts`
    int *order;          // tokens by their first byte
    int first_with[257]; // where the tokens of each first byte begin in `order`
    Text found;          // TokenEffects of one state
    Text effects, tokens, first_token, closings; // arrays of the grammar
} Builder;

typedef struct {
    Effect effect;
    int token;
} TokenEffect;

static int compare_effects(const void *a, const void *b) {
    const TokenEffect *x = a, *y = b;
    int order = memcmp(&x->effect, &y->effect, sizeof x->effect);
    return order ? order : x->token - y->token;
}

static void append_int(Text *array, int value) { append(array, (char *)&value, sizeof value); }

// Decodes all tokens to b->texts. Tokens that cannot be a part of a JSON text get no bytes.
static bool read_texts(Builder *b, const llamac_model *m, Error *e) {
    const Tokenizer *t = &m->tokenizer;
    CHECK((b->begin = resize(NULL, t->vocab_size + 1, sizeof *b->begin)), no_memory);
    for (int i = 0; i < t->vocab_size; i++) {
        int type = t->pieces[i].type;
        bool used = type != UNKNOWN && type != UNUSED && !llamac_ends(m, i);
        size_t n = used ? llamac_decode(m, -1, i, NULL, 0) : 0; // -1: no token before it
        char room[64], *s = n > sizeof room ? resize(NULL, n, 1) : room;
        CHECK(s, no_memory);
        llamac_decode(m, -1, i, s, n);
        b->begin[i] = b->texts.n;
        append(&b->texts, s, n);
        if (s != room) free(s);
    }
    b->begin[t->vocab_size] = b->texts.n;
    CHECK(!b->texts.failed, no_memory);
    return true;
}

// Sorts the tokens by their first byte, because most states allow only a few bytes.
static bool sort_by_first_byte(Builder *b, int vocab_size, Error *e) {
    CHECK((b->order = resize(NULL, vocab_size, sizeof *b->order)), no_memory);
    const uint8_t *texts = (uint8_t *)b->texts.s;
    int next[256] = {0}; // first the number of tokens, then where to put the next one
    for (int i = 0; i < vocab_size; i++)
        if (b->begin[i + 1] > b->begin[i]) next[texts[b->begin[i]]]++;
    for (int byte = 0; byte < 256; byte++) {
        b->first_with[byte + 1] = b->first_with[byte] + next[byte];
        next[byte] = b->first_with[byte];
    }
    for (int i = 0; i < vocab_size; i++)
        if (b->begin[i + 1] > b->begin[i]) b->order[next[texts[b->begin[i]]]++] = i;
    return true;
}

// Requires the characters of JSON's structure as tokens of one byte.
static bool require_structure(const Builder *b, const llamac_model *m, Error *e) {
    bool present[256] = {false};
    for (int i = 0; i < m->tokenizer.vocab_size; i++)
        if (b->begin[i + 1] - b->begin[i] == 1) present[(uint8_t)b->texts.s[b->begin[i]]] = true;
    for (const char *c = "{}[]:,\""; *c; c++)
        CHECK(present[(uint8_t)*c],
              "the vocabulary cannot write JSON: it has no token for the character %c", *c);
    return true;
}

// Appends the effects of a token from a state to b->found.
static void add_effects(const llamac_grammar *g, Builder *b, int state, int token) {
    const uint8_t *s = (uint8_t *)b->texts.s + b->begin[token];
    Effect effects[2];
    int n = find_effects(g, state, s, b->begin[token + 1] - b->begin[token], effects);
    for (int i = 0; i < n; i++) {
        TokenEffect found = {.effect = effects[i], .token = token};
        append(&b->found, (char *)&found, sizeof found);
    }
}

// Appends the effects from a state, and the tokens that have each of them.
static void add_state(llamac_grammar *g, Builder *b, int state) {
    b->found.n = 0;
    for (int byte = 0; byte < 256; byte++) {
        bool refused = g->transitions[state][byte] == REFUSED;
        int first = b->first_with[byte], last = refused ? first : b->first_with[byte + 1];
        for (int k = first; k < last; k++) add_effects(g, b, state, b->order[k]);
    }
    const TokenEffect *found = (TokenEffect *)b->found.s;
    int n_found = (int)(b->found.n / sizeof *found);
    if (n_found) qsort(b->found.s, n_found, sizeof *found, compare_effects);
    for (int i = 0; i < n_found; i++) {
        const Effect *e = &found[i].effect;
        if (i == 0 || memcmp(e, &found[i - 1].effect, sizeof *e)) {
            append(&b->effects, (char *)e, sizeof *e);
            append_int(&b->first_token, (int)(b->tokens.n / sizeof(int)));
            // A token that changes neither stack nor state is left out: it lowers no cost
            bool stays = e->n_closed == 0 && e->end == state;
            if (e->n_opened == 0 && e->first_spaces == 0 && !stays) {
                Closing c = {e->expected, e->n_expected, e->n_closed, e->peak, state, e->end};
                append(&b->closings, (char *)&c, sizeof c);
            }
        }
        append_int(&b->tokens, found[i].token);
    }
}

// Makes a mask for the effect that most tokens of a state have, if they are so many that copying
// the mask is faster than setting a byte for each token.
static bool find_common(llamac_grammar *g, int state) {
    int max = 0, *common = &g->common_effect[state];
    for (int i = g->first_effect[state]; i < g->first_effect[state + 1]; i++) {
        int n = g->first_token[i + 1] - g->first_token[i];
        if (n > max) max = n, *common = i;
    }
    if (max <= g->vocab_size / 16) return true;
    if (!(g->common[state] = calloc(g->vocab_size, 1))) return false;
    for (int k = g->first_token[*common]; k < g->first_token[*common + 1]; k++)
        g->common[state][g->tokens[k]] = 1;
    return true;
}

static bool build(llamac_grammar *g, Builder *b, Error *e) {
    TRY(read_texts(b, g->model, e));
    TRY(require_structure(b, g->model, e));
    TRY(sort_by_first_byte(b, g->vocab_size, e));
    CHECK((g->allowed = calloc(g->vocab_size, 1)), no_memory);
    for (int i = 0; i < N_STATES * 256; i++)
        g->transitions[i / 256][i % 256] = transition(i / 256, i % 256);
    for (int state = 0; state < N_STATES; state++) {
        g->first_effect[state] = (int)(b->effects.n / sizeof(Effect));
        add_state(g, b, state);
    }
    g->first_effect[N_STATES] = (int)(b->effects.n / sizeof(Effect));
    append_int(&b->first_token, (int)(b->tokens.n / sizeof(int)));
    g->effects = (Effect *)b->effects.s, b->effects.s = NULL;
    g->tokens = (int *)b->tokens.s, b->tokens.s = NULL;
    g->first_token = (int *)b->first_token.s, b->first_token.s = NULL;
    g->closings = (Closing *)b->closings.s, b->closings.s = NULL;
    g->n_closings = (int)(b->closings.n / sizeof(Closing));
    bool ok = !b->found.failed && !b->effects.failed && !b->tokens.failed && !b->first_token.failed
              && !b->closings.failed;
    for (int state = 0; ok && state < N_STATES; state++) ok = find_common(g, state);
    CHECK(ok, no_memory);
    return true;
}

// Fills in value_costs: the min number of tokens from each state to the end of the value. Uses only
// tokens that depend neither on the stack (n_expected is 0) nor on the depth (peak is 0), so the
// numbers hold for every stack.
static void compute_value_costs(llamac_grammar *g) {
    for (int state = 0; state < N_STATES; state++) g->value_costs[state] = NEVER;
    g->value_costs[AFTER_VALUE] = 0;
    g->value_costs[OBJECT_NEXT] = 2; // { and }, as in compute_costs: the depth is 0 here
    for (bool lowered = true; lowered;) {
        lowered = false;
        for (int i = 0; i < g->n_closings; i++) {
            const Closing *c = &g->closings[i];
            int cost = g->value_costs[c->end] + 1;
            if (c->n_expected || c->peak || cost >= g->value_costs[c->start]) continue;
            g->value_costs[c->start] = cost;
            lowered = true;
        }
    }
}

llamac_grammar *llamac_grammar_json(const llamac_model *m, bool object, Error *e) {
    clear(e);
    if (!m) return fail(e, no_model), NULL;
    if (!m->tokenizer.pieces) {
        fail(e, "it has no tokenizer");
        return llamac_name_file(m->path, e), NULL;
    }
    llamac_grammar *g = calloc(1, sizeof *g);
    if (!g) return fail(e, no_memory), NULL;
    g->model = m;
    g->vocab_size = m->tokenizer.vocab_size;
    g->first_state = object ? OBJECT_NEXT : VALUE_NEXT;
    llamac_grammar_reset(g);
    Builder b = {0};
    bool ok = build(g, &b, e);
    Text *texts[] = {&b.texts, &b.found, &b.effects, &b.tokens, &b.first_token, &b.closings};
    for (int i = 0; i < 6; i++) free(texts[i]->s);
    free(b.begin);
    free(b.order);
    if (!ok) {
        llamac_grammar_free(g);
        return llamac_name_file(m->path, e), NULL;
    }
    compute_value_costs(g);
    compute_costs(g, 0, 0);
    return g;
}

llamac_grammar *llamac_grammar_copy(const llamac_grammar *from, Error *e) {
    clear(e);
    if (!from) return fail(e, "the grammar is NULL"), NULL;
    llamac_grammar *g = resize(NULL, 1, sizeof *g);
    uint8_t *allowed = resize(NULL, from->vocab_size, 1);
    if (!g || !allowed) return free(g), free(allowed), fail(e, no_memory), NULL;
    memcpy(g, from, sizeof *g);
    g->allowed = allowed, g->is_copy = true;
    llamac_grammar_reset(g);
    return g;
}

void llamac_grammar_free(llamac_grammar *g) {
    if (!g) return;
    free(g->allowed);
    if (g->is_copy) return free(g);
    free(g->effects);
    free(g->tokens);
    free(g->first_token);
    free(g->closings);
    for (int state = 0; state < N_STATES; state++) free(g->common[state]);
    free(g);
}

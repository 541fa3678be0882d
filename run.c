// Runs a Llama model: reads GGUF and llama2.c files, encodes the prompt, computes, samples, prints.
// Text goes to stdout, all else to stderr. A mistake ends in one line `run: <what>: <what is wrong>` and exit code 1.
#define _GNU_SOURCE 1 // POSIX beside C11, and which processors may be used
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "runtime/backend.h"

_Static_assert(sizeof(size_t) == 8, "sizes of models are counted in 64 bits; 32-bit systems cannot run them");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "model files are little-endian and are used in place");

// ----------------------------------------------------------------------------
// Errors and memory

// Formats a message. Functions that can fail return it, or NULL when all is well.
// The text may come from a stranger's file, so whatever a terminal could take for a command becomes a question mark.
__attribute__((format(printf, 1, 2)))
static const char *error(const char *format, ...) {
    static char message[512];
    char text[sizeof message]; // apart, because an argument may be an earlier message
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *c = text; *c; c++)
        if (*c < ' ' || *c > '~') *c = '?';
    return strcpy(message, text);
}

// Ends the program: run: <what>: <message>
static void die(const char *what, const char *message) {
    fflush(stdout);
    fputs("run: ", stderr);
    for (; *what; what++) fputc((unsigned char)*what < ' ' || *what == 127 ? '?' : *what, stderr);
    fprintf(stderr, ": %s\n", message);
    exit(1);
}

#define CHECK(condition, ...) do { if (!(condition)) return error(__VA_ARGS__); } while (0)
#define TRY(call) do { const char *e_ = (call); if (e_) return e_; } while (0)

static void *resize(void *p, size_t n, size_t size) {
    p = n < SIZE_MAX / size ? realloc(p, (n + 1) * size) : NULL; // one more than asked, so that none is not zero bytes
    if (!p) die("memory", error("%.1f MiB are not to be had", (double)n * size / (1 << 20)));
    return p;
}

typedef struct { char *s; size_t n, capacity; } Text; // a string that grows; may hold zero bytes

enum { LONGEST_TEXT = 1 << 27 }; // bytes; what comes from an endless stream ends here

static void append(Text *text, const char *s, size_t n) {
    if (n > LONGEST_TEXT - text->n) die("text", error("it has more than %d bytes", LONGEST_TEXT));
    if (text->n + n > text->capacity)
        text->s = resize(text->s, text->capacity = 2 * text->capacity + n, 1);
    if (n) memcpy(text->s + text->n, s, n);
    text->n += n;
}

static void append_string(Text *text, const char *s) { append(text, s, strlen(s)); }

// ----------------------------------------------------------------------------
// Model files. A loader is a pure function of bytes: it fills a struct that points into them, or says what is wrong.
// It reads nothing it has not checked, and allocates only after the size of everything is known.

enum { TOKEN_EMBEDDING, ATTENTION_NORM, WQ, WK, WV, WO, FFN_NORM, W1, W2, W3, NORM, OUTPUT, N_TENSORS };

// The name in GGUF (per layer behind "blk.<layer>."), the place in Layer or Weights, and the shape:
// V vocab_size, D dim, K kv_dim, F hidden_dim; the norms have one row.
static const struct { const char *name; bool per_layer; size_t place; char rows, cols; } tensors[N_TENSORS] = {
    [TOKEN_EMBEDDING] = {"token_embd.weight", false, offsetof(Weights, token_embedding), 'V', 'D'},
    [ATTENTION_NORM] = {"attn_norm.weight", true, offsetof(Layer, attention_norm), '1', 'D'},
    [WQ] = {"attn_q.weight", true, offsetof(Layer, wq), 'D', 'D'},
    [WK] = {"attn_k.weight", true, offsetof(Layer, wk), 'K', 'D'},
    [WV] = {"attn_v.weight", true, offsetof(Layer, wv), 'K', 'D'},
    [WO] = {"attn_output.weight", true, offsetof(Layer, wo), 'D', 'D'},
    [FFN_NORM] = {"ffn_norm.weight", true, offsetof(Layer, ffn_norm), '1', 'D'},
    [W1] = {"ffn_gate.weight", true, offsetof(Layer, w1), 'F', 'D'},
    [W2] = {"ffn_down.weight", true, offsetof(Layer, w2), 'D', 'F'},
    [W3] = {"ffn_up.weight", true, offsetof(Layer, w3), 'F', 'D'},
    [NORM] = {"output_norm.weight", false, offsetof(Weights, norm), '1', 'D'},
    [OUTPUT] = {"output.weight", false, offsetof(Weights, output), 'V', 'D'},
};

static bool is_norm(int tensor) { return tensors[tensor].rows == '1'; }

static Mat *place_of(Weights *w, int tensor, int layer) {
    char *base = tensors[tensor].per_layer ? (char *)&w->layers[layer] : (char *)w;
    return (Mat *)(base + tensors[tensor].place);
}

// The tensor's shape, without data.
static Mat shape_of(const Config *c, int tensor, Type type) {
    const int size[] = {['1'] = 1, ['V'] = c->vocab_size, ['D'] = c->dim, ['K'] = c->kv_dim, ['F'] = c->hidden_dim};
    return (Mat){.type = type, .rows = size[(int)tensors[tensor].rows], .cols = size[(int)tensors[tensor].cols]};
}

static uint64_t bytes_of(const Mat *m) {
    uint64_t n = (uint64_t)m->rows * m->cols; // below 2^44 by check_config
    switch (m->type) {
    case F32: return 4 * n;
    case F16: case BF16: return 2 * n;
    case Q8_0: return n / 32 * 34;
    case Q4_0: return n / 32 * 18;
    default: return n + (n + m->group - 1) / m->group * 4; // INT8_GROUPS
    }
}

enum { MOST_LAYERS = 1 << 12 };

// The limits keep every product of sizes below 2^63, with room for a factor of the largest number of layers.
static const char *check_config(Config *c) {
    const struct { const char *name; int value, most; } sizes[] = {
        {"dim", c->dim, 1 << 20}, {"hidden_dim", c->hidden_dim, 1 << 22}, {"n_layers", c->n_layers, MOST_LAYERS},
        {"n_heads", c->n_heads, c->dim}, {"n_kv_heads", c->n_kv_heads, c->n_heads},
        {"vocab_size", c->vocab_size, 1 << 24}, {"seq_len", c->seq_len, 1 << 24},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        CHECK(sizes[i].value >= 1 && sizes[i].value <= sizes[i].most,
              "%s is %d, expected 1 to %d", sizes[i].name, sizes[i].value, sizes[i].most);
    CHECK(c->dim % c->n_heads == 0, "dim %d is not a multiple of n_heads %d", c->dim, c->n_heads);
    CHECK(c->dim / c->n_heads % 2 == 0, "the head size %d is odd, RoPE needs pairs", c->dim / c->n_heads);
    CHECK(c->n_heads % c->n_kv_heads == 0, "n_heads %d is not a multiple of n_kv_heads %d", c->n_heads, c->n_kv_heads);
    CHECK(c->norm_eps >= 0 && c->norm_eps < 1, "norm_eps is %g, expected 0 to 1", c->norm_eps);
    CHECK(c->rope_theta > 0 && isfinite(c->rope_theta), "rope_theta is %g, expected more than 0", c->rope_theta);
    CHECK(c->rope_scaling > 0 && isfinite(c->rope_scaling), "rope_scaling is %g, expected more than 0",
          c->rope_scaling);
    c->head_dim = c->dim / c->n_heads;
    c->kv_dim = c->n_kv_heads * c->head_dim;
    return NULL;
}

// llama2.c's formats -----------------------------------------------------------
// v0: 7 ints, float32 tensors. v1, v2: "ak42", version, 7 ints, flag of a tied classifier, in v2 the group size,
// zeros up to byte 256, tensors; v2's matrices are int8 groups, each followed by its scales.

// v0's order is that of the enum, the others' this:
static const int order_v1[] = {ATTENTION_NORM, FFN_NORM, NORM, TOKEN_EMBEDDING, WQ, WK, WV, WO, W1, W2, W3, OUTPUT};

// Lays the tensors out one after the other from bytes + at; returns where they end. With layers NULL it only measures.
static uint64_t lay_out(Model *m, const uint8_t *bytes, uint64_t at, int version, int group, bool tied) {
    for (int i = 0; i < N_TENSORS; i++) {
        int tensor = version ? order_v1[i] : i;
        Mat mat = shape_of(&m->config, tensor, version == 2 && !is_norm(tensor) ? INT8_GROUPS : F32);
        mat.group = mat.type == INT8_GROUPS ? group : 0;
        if (tensor == OUTPUT && version == 0)
            at += 4 * (uint64_t)m->config.seq_len * m->config.head_dim; // tables of cosines and sines, not needed
        if (tensor == OUTPUT && tied) continue;
        for (int layer = 0; layer < (tensors[tensor].per_layer ? m->config.n_layers : 1); layer++) {
            if (m->weights.layers) {
                mat.data = bytes + at;
                mat.scales = group ? bytes + at + (uint64_t)mat.rows * mat.cols : NULL;
                *place_of(&m->weights, tensor, layer) = mat;
            }
            at += bytes_of(&mat);
        }
    }
    return at;
}

static const char *load_llama2c(Model *m, const uint8_t *bytes, size_t size) {
    int32_t version = 0, header[7], group = 0;
    uint32_t magic = 0;
    if (size >= 4) memcpy(&magic, bytes, 4);
    size_t at = magic == 0x616b3432 ? 8 : 0, start = at ? 256 : sizeof header;
    CHECK(size >= start, "%zu bytes are too few for a header", size);
    if (at) memcpy(&version, bytes + 4, 4);
    CHECK(!at || version == 1 || version == 2, "version %d of llama2.c's format, expected 1 or 2", version);
    memcpy(header, bytes + at, sizeof header);
    bool tied = header[5] > 0; // v0 marks an untied classifier by a negative vocabulary
    if (version == 0 && header[5] < 0 && header[5] > INT_MIN) header[5] = -header[5];
    if (version) tied = bytes[36];
    CHECK(!version || bytes[36] <= 1, "the flag of a tied classifier is %d, expected 0 or 1", bytes[36]);
    if (version == 2) memcpy(&group, bytes + 37, 4);
    CHECK(version != 2 || group > 0, "the group size is %d, expected 1 or more", group);

    m->config = (Config){.dim = header[0], .hidden_dim = header[1], .n_layers = header[2], .n_heads = header[3],
                         .n_kv_heads = header[4], .vocab_size = header[5], .seq_len = header[6],
                         .norm_eps = 1e-5f, .rope_theta = 10000, .rope_scaling = 1};
    const char *wrong = check_config(&m->config);
    CHECK(!wrong, "%s%s", version ? "" : "not a GGUF or llama2.c model; read as llama2.c's v0, ", wrong);
    uint64_t end = lay_out(m, bytes, start, version, group, tied);
    CHECK(end == size, "the file has %zu bytes, its header makes %llu", size, (unsigned long long)end);
    m->weights.layers = resize(NULL, m->config.n_layers, sizeof(Layer));
    lay_out(m, bytes, start, version, group, tied);
    if (tied) m->weights.output = m->weights.token_embedding;
    return NULL;
}

// GGUF ---------------------------------------------------------------------------
// "GGUF", version, counts, metadata (key, type, value), tensors (name, shape, type, offset), padding, data.

typedef struct { const uint8_t *bytes; size_t size, at; bool failed; } Reader;
typedef struct { const char *s; size_t n; } String;

// The next n bytes, or NULL past the end; the reader remembers that it failed.
static const uint8_t *take(Reader *r, uint64_t n) {
    if (n > r->size - r->at) {
        r->failed = true;
        r->at = r->size;
        return NULL;
    }
    r->at += n;
    return r->bytes + r->at - n;
}

static uint32_t take_u32(Reader *r) {
    const uint8_t *p = take(r, 4);
    uint32_t value = 0;
    if (p) memcpy(&value, p, 4);
    return value;
}

static uint64_t take_u64(Reader *r) {
    uint64_t low = take_u32(r), high = take_u32(r);
    return high << 32 | low;
}

static String take_string(Reader *r) {
    uint64_t n = take_u64(r);
    const uint8_t *p = take(r, n);
    return (String){p ? (const char *)p : "", p ? n : 0};
}

static bool equals(String a, const char *b) { return a.n == strlen(b) && memcmp(a.s, b, a.n) == 0; }

enum { U8, I8, U16, I16, U32, I32, FLOAT, BOOL, STRING, ARRAY, U64, I64, DOUBLE, N_KINDS };
static const int kind_size[N_KINDS] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

enum { ARCHITECTURE, ALIGNMENT, CONTEXT_LENGTH, EMBEDDING_LENGTH, BLOCK_COUNT, FEED_FORWARD_LENGTH, HEAD_COUNT,
       HEAD_COUNT_KV, KEY_LENGTH, VALUE_LENGTH, SLIDING_WINDOW, NORM_EPS, ROPE_DIMENSION, ROPE_BASE, SCALING_TYPE,
       SCALING_FACTOR, SCALE_LINEAR, VOCAB_SIZE, QUANTIZATION_VERSION,
       TOKENIZER, TOKENS, SCORES, TOKEN_TYPES, BOS_ID, EOS_ID, EOT_ID, UNK_ID, ADD_BOS, SPACE_PREFIX, EXTRA_SPACES,
       CHAT_TEMPLATE, CHECKSUM, LIST_CHECKSUM, N_KEYS };
static const char *const keys[N_KEYS] = {
    "general.architecture", "general.alignment", "llama.context_length", "llama.embedding_length",
    "llama.block_count", "llama.feed_forward_length", "llama.attention.head_count",
    "llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.value_length",
    "llama.attention.sliding_window", "llama.attention.layer_norm_rms_epsilon", "llama.rope.dimension_count",
    "llama.rope.freq_base", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear",
    "llama.vocab_size", "general.quantization_version",
    "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type",
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces",
    "tokenizer.chat_template", "llamac.tensor_data.sha256", "llamac.tensor_list.sha256",
};

// More of llama.*: keys that are fine with the one value that says what forward computes, and those that change nothing
// that it computes. All others are refused, since they may.
static const struct { const char *key; double value; } fixed_keys[] = {
    {"llama.attention.causal", 1}, {"llama.attention.clamp_kqv", 0}, {"llama.attention.max_alibi_bias", 0},
    {"llama.expert_count", 0}, {"llama.expert_used_count", 0}, {"llama.rope.scaling.attn_factor", 1},
    {"llama.use_parallel_residual", 0},
};
static const char *const idle_keys[] = {
    "llama.pooling_type", "llama.rope.scaling.finetuned", "llama.rope.scaling.original_context_length",
    "llama.tensor_data_layout",
};

typedef struct {
    bool present, is_array;
    uint32_t kind;   // of the value, or of an array's elements
    uint64_t count;  // 1, or the array's length
    Reader data;     // reads the value
} Value;

static const char *take_value(Reader *r, Value *v) {
    *v = (Value){.present = true, .kind = take_u32(r), .count = 1};
    v->is_array = v->kind == ARRAY;
    if (v->is_array) {
        v->kind = take_u32(r);
        v->count = take_u64(r);
    }
    CHECK(!r->failed && v->kind < N_KINDS && v->kind != ARRAY, "metadata is cut off or of unknown type %u", v->kind);
    v->data = *r;
    if (v->kind == STRING)
        for (uint64_t i = 0; i < v->count && !r->failed; i++) take_string(r);
    else
        take(r, v->count > r->size ? UINT64_MAX : v->count * kind_size[v->kind]);
    CHECK(!r->failed, "metadata runs past the end of the file");
    return NULL;
}

static const char *number_of(Value v, const char *key, double *out) {
    CHECK(!v.is_array && v.kind != STRING, "metadata key %s is not a number", key);
    uint64_t bits = 0;
    memcpy(&bits, take(&v.data, kind_size[v.kind]), kind_size[v.kind]);
    switch (v.kind) {
    case I8: *out = (int8_t)bits; break;
    case I16: *out = (int16_t)bits; break;
    case I32: *out = (int32_t)bits; break;
    case I64: *out = (double)(int64_t)bits; break;
    case FLOAT: { float f; memcpy(&f, &bits, 4); *out = f; break; }
    case DOUBLE: memcpy(out, &bits, 8); break;
    default: *out = (double)bits;
    }
    return NULL;
}

// Refuses a key of llama.* that is none of `keys`, unless it is known to change nothing.
static const char *check_other_key(String key, Value v) {
    double value;
    if (key.n < 6 || memcmp(key.s, "llama.", 6)) return NULL;
    for (size_t i = 0; i < sizeof idle_keys / sizeof *idle_keys; i++)
        if (equals(key, idle_keys[i])) return NULL;
    for (size_t i = 0; i < sizeof fixed_keys / sizeof *fixed_keys; i++)
        if (equals(key, fixed_keys[i].key)) {
            TRY(number_of(v, fixed_keys[i].key, &value));
            CHECK(value == fixed_keys[i].value, "metadata key %s is %g, expected %g", fixed_keys[i].key, value,
                  fixed_keys[i].value);
            return NULL;
        }
    return error("metadata key '%.*s' is unknown, and may change what the model computes",
                 (int)(key.n < 80 ? key.n : 80), key.s);
}

static const char *take_metadata(Reader *r, uint64_t count, Value values[N_KEYS]) {
    for (uint64_t i = 0; i < count; i++) {
        String key = take_string(r);
        Value v;
        TRY(take_value(r, &v));
        int k = 0;
        while (k < N_KEYS && !equals(key, keys[k])) k++;
        if (k == N_KEYS) {
            TRY(check_other_key(key, v));
            continue;
        }
        CHECK(!values[k].present, "metadata key %s appears twice", keys[k]);
        values[k] = v;
    }
    return NULL;
}

// A number of any kind; the fallback when the key is absent, an error when it is absent and the fallback is NAN.
static const char *get_number(const Value *values, int key, double fallback, double *out) {
    Value v = values[key];
    *out = fallback;
    CHECK(v.present || !isnan(fallback), "metadata key %s is missing", keys[key]);
    return v.present ? number_of(v, keys[key], out) : NULL;
}

static const char *get_int(const Value *values, int key, double fallback, int *out) {
    double number;
    TRY(get_number(values, key, fallback, &number));
    CHECK(number >= 0 && number <= INT_MAX && number == floor(number),
          "metadata key %s is %g, expected a whole number", keys[key], number);
    *out = (int)number;
    return NULL;
}

static String get_string(const Value *values, int key) {
    Value v = values[key];
    return v.present && v.kind == STRING && !v.is_array ? take_string(&v.data) : (String){"", 0};
}

static const char *gguf_config(const Value *values, Config *c) {
    String architecture = get_string(values, ARCHITECTURE), scaling = get_string(values, SCALING_TYPE);
    double eps, theta, factor, scale;
    CHECK(equals(architecture, "llama"), "the architecture is '%.*s', expected 'llama'",
          (int)(architecture.n < 40 ? architecture.n : 40), architecture.s);
    TRY(get_int(values, CONTEXT_LENGTH, NAN, &c->seq_len));
    TRY(get_int(values, EMBEDDING_LENGTH, NAN, &c->dim));
    TRY(get_int(values, BLOCK_COUNT, NAN, &c->n_layers));
    TRY(get_int(values, FEED_FORWARD_LENGTH, NAN, &c->hidden_dim));
    TRY(get_int(values, HEAD_COUNT, NAN, &c->n_heads));
    TRY(get_int(values, HEAD_COUNT_KV, c->n_heads, &c->n_kv_heads));
    TRY(get_int(values, VOCAB_SIZE, values[TOKENS].present ? (double)values[TOKENS].count : NAN, &c->vocab_size));
    TRY(get_number(values, NORM_EPS, NAN, &eps));
    TRY(get_number(values, ROPE_BASE, 10000, &theta));
    TRY(get_number(values, SCALE_LINEAR, 1, &scale));
    TRY(get_number(values, SCALING_FACTOR, scale, &factor));
    CHECK(!values[SCALE_LINEAR].present || scale == factor, "%s is %g, but %s is %g", keys[SCALING_FACTOR], factor,
          keys[SCALE_LINEAR], scale);
    CHECK(!scaling.n || equals(scaling, "linear") || equals(scaling, "none"),
          "RoPE scaling '%.*s' is not supported, only linear", (int)(scaling.n < 40 ? scaling.n : 40), scaling.s);
    c->norm_eps = (float)eps, c->rope_theta = (float)theta;
    c->rope_scaling = equals(scaling, "none") ? 1 : (float)factor;
    TRY(check_config(c));
    for (int key = KEY_LENGTH; key <= ROPE_DIMENSION; key++) {
        int size;
        if (key != KEY_LENGTH && key != VALUE_LENGTH && key != ROPE_DIMENSION) continue;
        TRY(get_int(values, key, c->head_dim, &size));
        CHECK(size == c->head_dim, "%s is %d, expected the head size %d", keys[key], size, c->head_dim);
    }
    int window, version;
    TRY(get_int(values, SLIDING_WINDOW, 0, &window));
    CHECK(!window || window >= c->seq_len, "%s is %d, expected none, or the whole context of %d", keys[SLIDING_WINDOW],
          window, c->seq_len);
    TRY(get_int(values, QUANTIZATION_VERSION, 2, &version));
    CHECK(version == 2, "%s is %d, expected 2", keys[QUANTIZATION_VERSION], version);
    return NULL;
}

// Which tensor a name means, and of which layer; N_TENSORS when the name is none of ours.
static int find_tensor(String name, const Config *c, int *layer) {
    *layer = 0;
    size_t at = 0;
    bool per_layer = name.n > 4 && memcmp(name.s, "blk.", 4) == 0;
    if (per_layer) {
        for (at = 4; at < name.n && name.s[at] >= '0' && name.s[at] <= '9' && *layer < c->n_layers; at++)
            *layer = 10 * *layer + name.s[at] - '0';
        if (at == 4 || at == name.n || name.s[at++] != '.' || *layer >= c->n_layers) return N_TENSORS;
    }
    int tensor = 0;
    while (tensor < N_TENSORS && (tensors[tensor].per_layer != per_layer
                                  || !equals((String){name.s + at, name.n - at}, tensors[tensor].name))) tensor++;
    return tensor;
}

// A tensor's type for messages: ggml's name, or its number.
static const char *type_name(uint32_t type, char text[12]) {
    static const char *const names[] = {
        "F32", "F16", "Q4_0", "Q4_1", [6] = "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K",
        "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64",
        "IQ1_M", "BF16", [34] = "TQ1_0", "TQ2_0", [39] = "MXFP4",
    };
    bool known = type < sizeof names / sizeof *names && names[type];
    snprintf(text, 12, "%u", type);
    return known ? names[type] : text;
}

// Reads the list of tensors over to its end: each must be known and appear once, and none but the output may be missing.
static const char *check_list(Reader *r, const Config *c, uint64_t count) {
    bool seen[MOST_LAYERS][N_TENSORS] = {0};
    char text[32];
    for (uint64_t i = 0; i < count; i++) {
        String name = take_string(r);
        uint32_t n_dims = take_u32(r);
        int shown = name.n < 64 ? (int)name.n : 64, layer, tensor = find_tensor(name, c, &layer);
        CHECK(r->failed || (n_dims >= 1 && n_dims <= 4), "tensor '%.*s' has %u dimensions, expected 1 to 4", shown, name.s, n_dims);
        take(r, 8 * (uint64_t)n_dims);
        const char *type = type_name(take_u32(r), text);
        take_u64(r);
        CHECK(!r->failed, "the list of tensors is cut off");
        CHECK(tensor < N_TENSORS, "tensor '%.*s' (%s) is no part of the model described", shown, name.s, type);
        CHECK(!seen[layer][tensor], "tensor %.*s (%s) appears twice", shown, name.s, type);
        seen[layer][tensor] = true;
    }
    for (int layer = 0; layer < c->n_layers; layer++)
        for (int i = 0; i < OUTPUT; i++) {
            if (seen[layer][i] || (layer && !tensors[i].per_layer)) continue;
            Mat mat = shape_of(c, i, F32);
            if (tensors[i].per_layer) snprintf(text, sizeof text, "blk.%d.", layer);
            return error("tensor %s%s (%d x %d) is missing", tensors[i].per_layer ? text : "", tensors[i].name, mat.rows, mat.cols);
        }
    return NULL;
}

// Reads one entry of the list of tensors. Offsets count from the start of the data and must follow each other without
// gaps but for alignment (as the format's writers do), so tensors cannot overlap. `end` is where the last one ended.
static const char *take_tensor(Reader *r, Model *m, uint32_t alignment, uint64_t *end) {
    String name = take_string(r);
    uint32_t n_dims = take_u32(r);
    uint64_t dims[4] = {1, 1, 1, 1};
    for (uint32_t i = 0; i < n_dims; i++) dims[i] = take_u64(r);
    uint32_t type = take_u32(r);
    uint64_t offset = take_u64(r);
    char text[12];
    int shown = name.n < 64 ? (int)name.n : 64, layer, tensor = find_tensor(name, &m->config, &layer);
    CHECK(is_norm(tensor) ? type == F32 : type == F32 || type == F16 || type == BF16 || type == Q8_0 || type == Q4_0,
          "tensor %.*s has type %s, expected F32%s", shown, name.s, type_name(type, text),
          is_norm(tensor) ? "" : ", F16, BF16, Q8_0 or Q4_0");
    Mat mat = shape_of(&m->config, tensor, type), *place = place_of(&m->weights, tensor, layer);
    CHECK(dims[0] == (uint64_t)mat.cols && dims[1] == (uint64_t)mat.rows && dims[2] == 1 && dims[3] == 1,
          "tensor %.*s is %llu x %llu, expected %d x %d", shown, name.s, (unsigned long long)dims[1],
          (unsigned long long)dims[0], mat.rows, mat.cols);
    CHECK((type != Q8_0 && type != Q4_0) || mat.cols % 32 == 0, "tensor %.*s: rows of %d numbers do not split into "
          "blocks of 32", shown, name.s, mat.cols);
    uint64_t expected = (*end + alignment - 1) / alignment * alignment;
    CHECK(offset == expected, "tensor %.*s lies at %llu, expected %llu", shown, name.s, (unsigned long long)offset,
          (unsigned long long)expected);
    *end = offset + bytes_of(&mat);
    CHECK(*end <= m->data_size, "tensor %.*s runs past the end of the file", shown, name.s);
    mat.data = m->data + offset;
    *place = mat;
    return NULL;
}

static const char *gguf_tensors(Reader *r, Model *m, uint64_t count, uint32_t alignment) {
    Reader list = *r;
    uint64_t end = 0;
    TRY(check_list(&list, &m->config, count));
    size_t start = (list.at + alignment - 1) / alignment * alignment;
    CHECK(start <= r->size, "the file ends before its data");
    m->list = r->bytes + r->at, m->list_size = list.at - r->at;
    m->data = r->bytes + start, m->data_size = r->size - start;
    m->weights.layers = resize(NULL, m->config.n_layers, sizeof(Layer));
    for (uint64_t i = 0; i < count; i++) TRY(take_tensor(r, m, alignment, &end));
    uint64_t padded = (end + alignment - 1) / alignment * alignment;
    CHECK(m->data_size == end || m->data_size == padded, "%llu bytes follow the last tensor",
          (unsigned long long)(m->data_size - end));
    if (!m->weights.output.data) m->weights.output = m->weights.token_embedding;
    return NULL;
}

// ----------------------------------------------------------------------------
// The transformer

// The ops of forward.
static void compute(const Model *m, const State *s, const int *tokens, int T, int pos, bool all) {
    const Weights *w = &m->weights;
    Backend *b = s->backend;

    b->embed(b, s->x, &w->token_embedding, tokens, T);
    for (int l = 0; l < m->config.n_layers; l++) {
        const Layer *layer = &w->layers[l];

        b->attention(b, l, layer, s->y, s->x, pos, T);
        b->add_product(b, s->x, &layer->wo, s->y, T);
        b->feed_forward(b, layer, s->x, T);
    }
    const float *last = all ? s->x : s->x + (size_t)(T - 1) * m->config.dim;
    b->logits(b, s->logits, &w->norm, &w->output, last, all ? T : 1);
}

// Runs T tokens that stand at positions pos..pos+T-1 through the model, after which their keys and values are cached.
// Returns logits: (T, vocab_size) of all of them, or (1, vocab_size) of the last.
static float *forward(const Model *m, const State *s, const int *tokens, int T, int pos, bool all) {
    Backend *b = s->backend;
    if (!b->begin || b->begin(b, tokens, T, pos, all)) compute(m, s, tokens, T, pos, all);
    if (b->end) b->end(b);
    return s->logits;
}

// Runs n tokens in pieces that fit the state; returns the logits after the last.
static float *prefill(const Model *m, const State *s, const int *tokens, int n, int pos) {
    for (int T = s->chunk; n > T; tokens += T, pos += T, n -= T) forward(m, s, tokens, T, pos, false);
    return forward(m, s, tokens, n, pos, false);
}

#ifdef CUDA
enum { HAS_GPU = true };
#else
enum { HAS_GPU = false };
const char *llamac_cuda_open(Backend **b, Model *m, int positions) { return (void)b, (void)m, (void)positions, "no GPU"; }
#endif

// The state on one of the two; nothing is left open where that fails.
static const char *state_open_on(State *s, bool gpu, Model *m, int positions, bool all, int n_threads) {
    const Config *c = &m->config;
    TRY(gpu ? llamac_cuda_open(&s->backend, m, positions) : llamac_cpu_open(&s->backend, m, positions, n_threads));
    Backend *b = s->backend;
    size_t T = s->chunk = positions < b->chunk ? positions : b->chunk;
    s->positions = positions;
    bool ok = (s->x = b->alloc(b, T * c->dim)) && (s->y = b->alloc(b, T * c->dim));
    if (!ok) b->close(b), s->backend = NULL;
    CHECK(ok, "not enough memory for the activations");
    if (all || !b->choose) s->logits = resize(NULL, (all ? T : 1) * c->vocab_size, sizeof(float));
    return NULL;
}

// Room for contexts of `positions` tokens on a device: cpu, cuda, or auto: cuda if that can be had, else cpu. With `all`, for
// the logits of every token of a chunk, else for those of one, or none where the backend chooses by itself.
static const char *state_open(State *s, Model *m, const char *device, int positions, bool all, int n_threads) {
    if (HAS_GPU && strcmp(device, "cpu")) {
        const char *wrong = state_open_on(s, true, m, positions, all, n_threads);
        if (!wrong || strcmp(device, "auto")) return wrong;
        fprintf(stderr, "on the CPU, for the GPU cannot be used: %s\n", wrong);
    }
    return state_open_on(s, false, m, positions, all, n_threads);
}

// ----------------------------------------------------------------------------
// The tokenizer: sentencepiece's BPE

enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE }; // sentencepiece's and GGUF's numbers

typedef struct { const char *s; float score; signed n : 28, type : 4; } Piece; // no larger than its entry in a file

enum { LONGEST_PIECE = (1 << 27) - 1, MOST_PROBES = 1000 };

typedef struct {
    Piece *pieces;                // (vocab_size,) texts lie in the file
    int vocab_size;
    int *table;                   // (table_size,) hash table of the pieces: ids, -1 where empty
    uint32_t table_size;          // a power of two
    const Piece **symbols;        // (n_symbols,) user-defined pieces, sorted by text
    int n_symbols;
    int byte_ids[256];            // piece of each byte
    bool has_unused;              // some pieces are UNUSED: merges may pass through them, but they are no tokens
    bool words_join;              // a piece may reach from one word into the next, so a text cannot be cut into words
    bool byte_fallback;           // characters that are no piece become bytes rather than unknown
    bool space_prefix;            // a space goes before the text
    bool extra_spaces_removed;    // runs of spaces shrink to one, spaces at the ends go
    bool add_bos;
    const char *space;            // how pieces write a space
    int bos, eos, unk;
    int eot;                      // ends an answer; -1: there is none
    String chat_template;
} Tokenizer;

static const char LOWER_BLOCK[] = "\xe2\x96\x81"; // U+2581, sentencepiece's space

static uint32_t hash(const char *s, int n) { // FNV-1a
    uint32_t h = 2166136261u;
    for (int i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 16777619u;
    return h;
}

// The slot of the table that holds the piece with this text, or the empty one where it would go; NULL when it is not
// found soon, because the vocabulary was built to make the search long.
static int *slot_of(const Tokenizer *t, const char *s, int n) {
    uint32_t i = hash(s, n);
    for (int probes = 0; probes < MOST_PROBES; probes++, i++) {
        int *slot = &t->table[i & (t->table_size - 1)];
        if (*slot < 0) return slot;
        const Piece *p = &t->pieces[*slot];
        if (p->n == n && memcmp(p->s, s, n) == 0) return slot;
    }
    return NULL;
}

// The piece with this text that merges can make, or -1.
static int lookup(const Tokenizer *t, const char *s, int n) {
    const int *slot = slot_of(t, s, n);
    int type = slot && *slot >= 0 ? (int)t->pieces[*slot].type : UNKNOWN;
    return type == NORMAL || type == USER_DEFINED || type == UNUSED ? *slot : -1;
}

// The byte that "<0x41>" stands for, or -1.
static int byte_of(const Piece *p) {
    static const char digits[] = "0123456789ABCDEF";
    if (p->n != 6 || memcmp(p->s, "<0x", 3) || p->s[5] != '>') return -1;
    const char *high = memchr(digits, p->s[3], 16), *low = memchr(digits, p->s[4], 16);
    return high && low ? (int)(16 * (high - digits) + (low - digits)) : -1;
}

static int compare_symbols(const void *a, const void *b) {
    const Piece *x = *(const Piece *const *)a, *y = *(const Piece *const *)b;
    int order = memcmp(x->s, y->s, x->n < y->n ? x->n : y->n);
    return order ? order : x->n - y->n;
}

// Whether a space stands at s[at], and none before it.
static bool begins_word(const Tokenizer *t, const char *s, size_t at, size_t n) {
    size_t space = strlen(t->space);
    return at + space <= n && memcmp(s + at, t->space, space) == 0
        && !(at >= space && memcmp(s + at - space, t->space, space) == 0);
}

// A vocabulary has no byte pieces, and what is not in it is unknown; or it has one for each byte that text may have to fall
// back to: sentencepiece wants all 256, but a character of one byte that is a piece itself does without.
static const char *check_bytes(const Tokenizer *t) {
    for (int byte = 0; t->byte_fallback && byte < 256; byte++) {
        const char *s = byte == ' ' ? t->space : &(char){(char)byte};
        bool character = byte < 128 && lookup(t, s, byte == ' ' ? (int)strlen(t->space) : 1) >= 0;
        CHECK(t->byte_ids[byte] >= 0 || character, "it has byte pieces, but none for the byte 0x%02X", byte);
    }
    return NULL;
}

// Builds the tables over pieces that a loader has filled in.
static const char *index_pieces(Tokenizer *t) {
    int n = t->vocab_size;
    for (t->table_size = 16; t->table_size < 2u * n; t->table_size *= 2) {}
    t->table = resize(NULL, t->table_size, sizeof *t->table);
    memset(t->table, -1, t->table_size * sizeof *t->table);
    t->symbols = resize(NULL, n, sizeof *t->symbols);
    memset(t->byte_ids, -1, sizeof t->byte_ids);
    for (int i = 0; i < n; i++) {
        const Piece *p = &t->pieces[i];
        CHECK(p->n > 0, "token %d is empty", i);
        CHECK(isfinite(p->score), "token %d has no finite number as score", i);
        int byte = p->type == BYTE ? byte_of(p) : -1, *slot = slot_of(t, p->s, p->n);
        CHECK(slot, "token %d is one of too many with the same hash", i);
        CHECK(*slot < 0, "tokens %d and %d have the same text, so nobody can tell which is meant", *slot, i);
        CHECK(p->type != BYTE || byte >= 0, "token %d is a byte but is not written <0x00> to <0xFF>", i);
        if (byte >= 0) t->byte_ids[byte] = i, t->byte_fallback = true;
        if (p->type == UNUSED) t->has_unused = t->words_join = true; // how they fall apart depends on the whole text
        for (int at = 1; at < p->n && !t->words_join; at++) t->words_join = begins_word(t, p->s, at, p->n);
        if (p->type == USER_DEFINED) t->symbols[t->n_symbols++] = p;
        *slot = i;
    }
    CHECK(t->bos < n && t->eos < n && t->unk < n && t->eot < n, "a special token is beyond the vocabulary of %d", n);
    TRY(check_bytes(t));
    qsort(t->symbols, t->n_symbols, sizeof *t->symbols, compare_symbols);
    return NULL;
}

// llama2.c's tokenizer.bin: longest length, then score, length and text of each piece, spaces written as spaces.
// It keeps no types: 0 is unknown, 1 begins and 2 ends a text, <0xNN> are bytes.
static const char *load_tokenizer_bin(Tokenizer *t, const uint8_t *bytes, size_t size, int vocab_size) {
    Reader r = {.bytes = bytes, .size = size}, start;
    uint32_t longest = take_u32(&r), found = 0, n = 0;
    for (start = r; !r.failed && r.at < size; n++) {
        take(&r, 4);
        uint32_t length = take_u32(&r);
        CHECK(length <= longest && length <= LONGEST_PIECE, "token %u has %u bytes, the longest should have %u", n, length,
              longest);
        take(&r, length);
        found = length > found ? length : found;
    }
    CHECK(!r.failed, "the file ends inside a token");
    CHECK(found == longest, "the longest token has %u bytes, the file's beginning says %u", found, longest);
    CHECK(n == (uint32_t)vocab_size, "%u tokens, but the model has %d: not its tokenizer", n, vocab_size);
    *t = (Tokenizer){.vocab_size = vocab_size, .space = " ", .space_prefix = true, .add_bos = true,
                     .bos = 1, .eos = 2, .unk = 0, .eot = -1};
    CHECK(vocab_size > 2, "%d tokens, expected at least 3", vocab_size);
    t->pieces = resize(NULL, n, sizeof *t->pieces);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t score = take_u32(&start), length = take_u32(&start);
        Piece *p = &t->pieces[i];
        *p = (Piece){.s = (const char *)take(&start, length), .n = (int)length};
        memcpy(&p->score, &score, 4);
        p->type = i == 0 ? UNKNOWN : i <= 2 ? CONTROL : byte_of(p) >= 0 ? BYTE : NORMAL;
    }
    return index_pieces(t);
}

static bool is_character(const char *s, size_t n) { // of a piece, which is UTF-8
    size_t first_bytes = 0;
    for (size_t i = 0; i < n; i++) first_bytes += (s[i] & 0xc0) != 0x80;
    return first_bytes == 1;
}

// The tokenizer inside a GGUF file.
static const char *gguf_tokenizer(Tokenizer *t, Value *v, int vocab_size) {
    String kind = get_string(v, TOKENIZER);
    bool characters = equals(kind, "t5"); // what is written for llama.cpp where no piece is longer and none is a byte
    CHECK(characters || equals(kind, "llama") || equals(kind, "llama-without-bytes"),
          "the tokenizer is not 'llama' (sentencepiece)");
    const struct { int key; uint32_t kind; } arrays[] = {{TOKENS, STRING}, {SCORES, FLOAT}, {TOKEN_TYPES, I32}};
    for (int i = 0; i < 3; i++) {
        const Value *a = &v[arrays[i].key];
        CHECK(a->present && a->is_array && a->kind == arrays[i].kind, "metadata key %s is missing or of another type",
              keys[arrays[i].key]);
        CHECK(a->count == (uint64_t)vocab_size, "%s has %llu entries, but the model has %d tokens",
              keys[arrays[i].key], (unsigned long long)a->count, vocab_size);
    }
    int space_prefix, extra_spaces_removed, add_bos;
    *t = (Tokenizer){.vocab_size = vocab_size, .space = LOWER_BLOCK, .chat_template = get_string(v, CHAT_TEMPLATE)};
    TRY(get_int(v, BOS_ID, 1, &t->bos));
    TRY(get_int(v, EOS_ID, 2, &t->eos));
    TRY(get_int(v, UNK_ID, 0, &t->unk));
    t->eot = -1;
    if (v[EOT_ID].present) TRY(get_int(v, EOT_ID, NAN, &t->eot));
    TRY(get_int(v, ADD_BOS, 1, &add_bos));
    TRY(get_int(v, SPACE_PREFIX, 1, &space_prefix));
    TRY(get_int(v, EXTRA_SPACES, 0, &extra_spaces_removed));
    t->add_bos = add_bos, t->space_prefix = space_prefix, t->extra_spaces_removed = extra_spaces_removed;
    t->pieces = resize(NULL, vocab_size, sizeof *t->pieces);
    for (int i = 0; i < vocab_size; i++) {
        String s = take_string(&v[TOKENS].data);
        uint32_t score = take_u32(&v[SCORES].data), type = take_u32(&v[TOKEN_TYPES].data);
        CHECK(s.n <= LONGEST_PIECE, "token %d is too long", i);
        CHECK(type >= NORMAL && type <= BYTE, "token %d has type %u, expected 1 to 6", i, type);
        t->pieces[i] = (Piece){.s = s.s, .n = (int)s.n, .type = (int)type};
        memcpy(&t->pieces[i].score, &score, 4);
        CHECK(!characters || type == UNKNOWN || type == CONTROL || (type == NORMAL && is_character(s.s, s.n)),
              "the tokenizer is 't5' and token %d is no single character, expected 'llama' (sentencepiece)", i);
    }
    return index_pieces(t);
}

// A GGUF file: the model, and its tokenizer if it has one and it is wanted (t not NULL).
static const char *load_gguf(Model *m, Tokenizer *t, const uint8_t *bytes, size_t size) {
    Reader r = {.bytes = bytes, .size = size};
    Value values[N_KEYS] = {0};
    take(&r, 4); // "GGUF", by which the caller knew it
    uint32_t version = take_u32(&r);
    uint64_t n_tensors = take_u64(&r), n_values = take_u64(&r);
    CHECK(!r.failed, "%zu bytes are too few for a header", size);
    CHECK(version == 2 || version == 3, "GGUF version %u, expected 2 or 3", version); // 3 allows other orders of bytes
    TRY(take_metadata(&r, n_values, values));
    int alignment;
    TRY(get_int(values, ALIGNMENT, 32, &alignment));
    CHECK(alignment >= 8 && alignment <= 1 << 16 && (alignment & (alignment - 1)) == 0,
          "the alignment is %d, expected a power of two from 8", alignment);
    TRY(gguf_config(values, &m->config));
    TRY(gguf_tensors(&r, m, n_tensors, alignment));
    const char **places[] = {&m->sha256, &m->list_sha256};
    for (int i = 0; i < 2; i++) {
        String checksum = get_string(values, CHECKSUM + i);
        CHECK(checksum.n == 0 || checksum.n == 64, "its checksum has %zu digits, expected 64", checksum.n);
        *places[i] = checksum.n ? checksum.s : NULL;
    }
    return t && values[TOKENIZER].present ? gguf_tokenizer(t, values, m->config.vocab_size) : NULL;
}

// Any model file, told apart by its first bytes.
static const char *load_model(Model *m, Tokenizer *t, const uint8_t *bytes, size_t size) {
    bool gguf = size >= 4 && memcmp(bytes, "GGUF", 4) == 0;
    return gguf ? load_gguf(m, t, bytes, size) : load_llama2c(m, bytes, size);
}

// Length of the UTF-8 character that s (n bytes) begins with; 0 if it is none.
static int utf8_length(const char *s, size_t n) {
    const unsigned char *u = (const unsigned char *)s;
    int length = u[0] < 0x80 ? 1 : u[0] < 0xc2 ? 0 : u[0] < 0xe0 ? 2 : u[0] < 0xf0 ? 3 : u[0] < 0xf5 ? 4 : 0;
    if ((size_t)length > n) return 0;
    for (int i = 1; i < length; i++)
        if ((u[i] & 0xc0) != 0x80) return 0;
    bool overlong = (u[0] == 0xe0 && u[1] < 0xa0) || (u[0] == 0xf0 && u[1] < 0x90);
    bool outside = (u[0] == 0xed && u[1] >= 0xa0) || (u[0] == 0xf4 && u[1] >= 0x90); // surrogates, above U+10FFFF
    return overlong || outside ? 0 : length;
}

// The first of symbols lo..hi-1 (which agree in their first d bytes) whose byte d is at least `byte`.
static int first_symbol(const Tokenizer *t, int lo, int hi, int d, int byte) {
    while (lo < hi) {
        int middle = lo + (hi - lo) / 2;
        const Piece *p = t->symbols[middle];
        if (p->n <= d || (unsigned char)p->s[d] < byte) lo = middle + 1;
        else hi = middle;
    }
    return lo;
}

// The longest user-defined piece that s (n bytes) begins with, or -1.
static int match_symbol(const Tokenizer *t, const char *s, size_t n) {
    int best = -1, lo = 0, hi = t->n_symbols;
    for (int d = 0; (size_t)d < n && lo < hi; d++) {
        lo = first_symbol(t, lo, hi, d, (unsigned char)s[d]);
        hi = first_symbol(t, lo, hi, d, (unsigned char)s[d] + 1);
        if (lo < hi && t->symbols[lo]->n == d + 1) best = (int)(t->symbols[lo] - t->pieces);
    }
    return best;
}

// What sentencepiece does before it cuts: bytes that are no UTF-8 become U+FFFD, spaces take the form they have in
// pieces, with `prefix` a space goes in front, extra spaces are removed. User-defined pieces pass as they are.
static Text normalize(const Tokenizer *t, const char *s, size_t n, bool prefix) {
    Text out = {0};
    size_t space = strlen(t->space);
    bool remove = t->extra_spaces_removed, after_space = remove;
    if (n && prefix) append(&out, t->space, space);
    for (size_t length; n; s += length, n -= length) {
        int symbol = match_symbol(t, s, n), valid = utf8_length(s, n);
        length = symbol >= 0 ? (size_t)t->pieces[symbol].n : valid ? (size_t)valid : 1;
        if (symbol < 0 && !valid) append_string(&out, "\xef\xbf\xbd");
        else if (symbol < 0 && length == 3 && memcmp(s, LOWER_BLOCK, 3) == 0) append(&out, t->space, space);
        else
            for (size_t i = 0; i < length; i++) {
                if (s[i] != ' ') append(&out, &s[i], 1);
                else if (!after_space) append(&out, t->space, space);
                if (s[i] != ' ') after_space = false;
            }
        after_space = remove && (s[length - 1] == ' ');
    }
    while (remove && out.n >= space && memcmp(out.s + out.n - space, t->space, space) == 0) out.n -= space;
    return out;
}

typedef struct { const char *s; int n, previous, next, symbol; } Part; // of the text; symbol: a fixed piece, or -1
typedef struct { float score; int left, right, n; } Merge;             // of two parts into one of n bytes
typedef struct { Merge *merges; int n, capacity; } Heap;               // the best first

static bool better(const Merge *a, const Merge *b) {
    return a->score > b->score || (a->score == b->score && a->left < b->left);
}

static void push(Heap *h, Merge merge) {
    if (h->n == h->capacity) h->merges = resize(h->merges, h->capacity = 2 * h->capacity + 64, sizeof(Merge));
    int i = h->n++;
    for (; i > 0 && better(&merge, &h->merges[(i - 1) / 2]); i = (i - 1) / 2) h->merges[i] = h->merges[(i - 1) / 2];
    h->merges[i] = merge;
}

static Merge pop(Heap *h) {
    Merge top = h->merges[0], last = h->merges[--h->n];
    int i = 0;
    for (int child; (child = 2 * i + 1) < h->n; i = child) {
        if (child + 1 < h->n && better(&h->merges[child + 1], &h->merges[child])) child++;
        if (!better(&h->merges[child], &last)) break;
        h->merges[i] = h->merges[child];
    }
    h->merges[i] = last;
    return top;
}

typedef struct {
    const Tokenizer *t;
    Part *parts;
    int capacity;
    Heap heap;
    int *split;  // (vocab_size,) how many bytes of an unused piece are the left part of its latest merge; 0: never made
    int *tokens;
    int n_tokens;
    bool after_unknown;
} Encoder;

static void try_merge(Encoder *e, int left, int right) {
    if (left < 0 || right < 0) return;
    const Part *a = &e->parts[left], *b = &e->parts[right];
    if (a->symbol >= 0 || b->symbol >= 0) return;
    int id = lookup(e->t, a->s, a->n + b->n);
    if (id < 0) return;
    push(&e->heap, (Merge){e->t->pieces[id].score, left, right, a->n + b->n});
    if (e->t->pieces[id].type == UNUSED) e->split[id] = a->n;
}

static void merge_parts(Encoder *e) {
    while (e->heap.n) {
        Merge m = pop(&e->heap);
        Part *a = &e->parts[m.left], *b = &e->parts[m.right];
        if (!a->n || !b->n || a->n + b->n != m.n) continue; // one of them has been merged since
        a->n = m.n;
        a->next = b->next;
        if (b->next >= 0) e->parts[b->next].previous = m.left;
        b->n = 0;
        try_merge(e, a->previous, m.left);
        try_merge(e, m.left, a->next);
    }
}

// Appends the tokens of one part: its piece; an unused piece's parts; bytes, or one <unk> for a run of unknown ones.
static void emit(Encoder *e, const char *s, int n, int id) {
    if (id < 0) id = lookup(e->t, s, n);
    if (id >= 0 && e->t->pieces[id].type == UNUSED && e->split[id]) {
        int left = e->split[id];
        emit(e, s, left, -1);
        emit(e, s + left, n - left, -1);
        return;
    }
    if (id < 0 && e->t->byte_fallback)
        for (int i = 0; i < n; i++) e->tokens[e->n_tokens++] = e->t->byte_ids[(unsigned char)s[i]];
    else if (id >= 0 || !e->after_unknown) e->tokens[e->n_tokens++] = id >= 0 ? id : e->t->unk;
    e->after_unknown = id < 0;
}

static void encode_stretch(Encoder *e, const char *s, size_t n) {
    int n_parts = 0;
    for (; n; n_parts++) {
        int symbol = match_symbol(e->t, s, n), valid = utf8_length(s, n);
        int length = symbol >= 0 ? e->t->pieces[symbol].n : valid ? valid : 1;
        if (n_parts == e->capacity) e->parts = resize(e->parts, e->capacity = 2 * e->capacity + 64, sizeof(Part));
        e->parts[n_parts] = (Part){s, length, n_parts - 1, n > (size_t)length ? n_parts + 1 : -1, symbol};
        s += length, n -= length;
    }
    for (int i = 1; i < n_parts; i++) try_merge(e, i - 1, i);
    merge_parts(e);
    for (int i = 0; i >= 0; i = e->parts[i].next) emit(e, e->parts[i].s, e->parts[i].n, e->parts[i].symbol);
}

// The tokens of a text, in memory to be freed; their number in *n_tokens. With `bos`, the beginning token comes first.
// With `prefix`, the text begins as the vocabulary wants it: with a space or not. No text becomes a control token.
// Time is O(n log n).
static int *encode(const Tokenizer *t, const char *s, size_t n, bool bos, bool prefix, int *n_tokens) {
    Text text = normalize(t, s, n, prefix && t->space_prefix);
    Encoder e = {.t = t, .tokens = resize(NULL, text.n + 1, sizeof(int))};
    if (t->has_unused) e.split = memset(resize(NULL, t->vocab_size, sizeof(int)), 0, t->vocab_size * sizeof(int));
    if (bos) e.tokens[e.n_tokens++] = t->bos;
    for (size_t start = 0, end = 1; start < text.n; start = end++) {
        while (end < text.n && (t->words_join || !begins_word(t, text.s, end, text.n))) end++;
        encode_stretch(&e, text.s + start, end - start);
    }
    free(text.s);
    free(e.parts);
    free(e.split);
    free(e.heap.merges);
    *n_tokens = e.n_tokens;
    return e.tokens;
}

// ----------------------------------------------------------------------------
// Printing: whole UTF-8 characters, and none that a terminal could take for a command

typedef struct { bool raw; char held[4]; int n; } Printer; // held: the beginning of a character yet to be completed

static void print_bytes(const char *s, size_t n) {
    if (n && fwrite(s, 1, n, stdout) != n) die("stdout", strerror(errno));
}

static void flush(void) {
    if (fflush(stdout)) die("stdout", strerror(errno));
}

// A character, unless it is a control character other than newline and tab (C0, DEL, C1).
static void print_character(const char *s, int n) {
    unsigned char c = s[0];
    bool control = n == 1 ? (c < ' ' && c != '\n' && c != '\t') || c == 127 : c == 0xc2 && (unsigned char)s[1] < 0xa0;
    if (!control) print_bytes(s, n);
}

// Prints what of the held bytes is certain: whole characters, and U+FFFD for bytes that can begin none.
static void print_held(Printer *p, bool end) {
    while (p->n) {
        unsigned char c = p->held[0];
        int used = utf8_length(p->held, p->n), whole = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1;
        bool broken = c >= 0xf5;
        for (int i = 1; i < p->n; i++) broken |= (p->held[i] & 0xc0) != 0x80;
        if (!used && !broken && p->n < whole && !end) return;
        if (used) print_character(p->held, used);
        else print_bytes("\xef\xbf\xbd", 3), used = 1;
        memmove(p->held, p->held + used, p->n -= used);
    }
}

static void print(Printer *p, const char *s, size_t n) {
    if (p->raw) print_bytes(s, n);
    for (size_t i = 0; i < n && !p->raw; i++) {
        p->held[p->n++] = s[i];
        print_held(p, false);
    }
}

static void print_end(Printer *p) {
    print_held(p, true);
    print_bytes("\n", 1);
    flush();
}

// A token's text. The space that the encoder put before the text is not part of it, so it is dropped after BOS.
static void print_token(Printer *p, const Tokenizer *t, int previous, int token) {
    const Piece *piece = &t->pieces[token];
    const char *s = piece->s;
    size_t n = piece->n, space = strlen(t->space);
    if (piece->type == CONTROL) return;
    if (piece->type == BYTE) {
        char byte = (char)byte_of(piece);
        print(p, &byte, 1);
        n = 0;
    }
    bool drop = previous == t->bos && (t->space_prefix || t->extra_spaces_removed);
    for (bool first = true; n; first = false) {
        bool is_space = n >= space && memcmp(s, t->space, space) == 0;
        if (!is_space) print(p, s, 1);
        else if (!first || !drop) print(p, " ", 1);
        s += is_space ? space : 1;
        n -= is_space ? space : 1;
    }
    flush();
}

// ----------------------------------------------------------------------------
// The sampler: llama2.c's, so a seed gives the same text

typedef struct { float p; int token; } Candidate;

typedef struct {
    int vocab_size;
    float temperature, topp;
    uint64_t state;          // of the xorshift* generator; never 0
    Candidate *candidates;   // (vocab_size,)
} Sampler;

// Uniform in [0, 1), 24 bits (Marsaglia 2003, Vigna 2014).
static float random_float(Sampler *s) {
    s->state ^= s->state >> 12;
    s->state ^= s->state << 25;
    s->state ^= s->state >> 27;
    return (float)((uint32_t)((s->state * 0x2545F4914F6CDD1Dull) >> 32) >> 8) / 16777216.0f;
}

// The first of the largest; -1 if one is not finite. Only the part that it stands in is searched for its place.
static int argmax(const float *x, int n) {
    enum { PART = 1024 };
    float most = -INFINITY;
    int best = 0;
    for (int i = 0; i < n; i += PART) {
        float largest = cpu_largest(x + i, n - i < PART ? n - i : PART);
        if (isnan(largest)) return -1;
        if (largest > most) most = largest, best = i;
    }
    while (x[best] != most) best++;
    return best;
}

static bool likelier(const Candidate *a, const Candidate *b) { return a->p > b->p || (a->p == b->p && a->token < b->token); }

// Moves candidate i of a heap, whose first is the likeliest, down to its place.
static void sink(Candidate *c, int n, int i) {
    Candidate moved = c[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && likelier(&c[child + 1], &c[child])) child++;
        if (!likelier(&c[child], &moved)) break;
        c[i] = c[child];
    }
    c[i] = moved;
}

// From the smallest set of tokens whose probability exceeds topp (Holtzman 2019).
static int sample_topp(Sampler *s, const float *p, float coin) {
    int n = 0;
    const float cutoff = (1.0f - s->topp) / (s->vocab_size - 1); // what is less likely cannot be in the set
    for (int i = 0; i < s->vocab_size; i++)
        if (p[i] >= cutoff) s->candidates[n++] = (Candidate){p[i], i};
    if (n == 0) return argmax(p, s->vocab_size);
    Candidate *c = s->candidates; // a heap; what is taken from it stands behind it, the likeliest last
    for (int i = n / 2 - 1; i >= 0; i--) sink(c, n, i);
    int left = n;
    float total = 0, cdf = 0;
    do {
        Candidate likeliest = c[0];
        c[0] = c[--left];
        sink(c, left, 0);
        c[left] = likeliest;
        total += likeliest.p;
    } while (left > 0 && total <= s->topp);
    for (int i = n - 1; i > left; i--) {
        cdf += c[i].p;
        if (coin * total < cdf) return c[i].token;
    }
    return c[left].token;
}

static const char not_finite[] = "its logits are not finite; the weights are broken";

static bool is_greedy(const Sampler *s) { return s->temperature == 0 || isinf(1 / s->temperature); }

// The next token; overwrites the logits (vocab_size,) by probabilities.
static int sample(Sampler *s, float *logits) {
    int n = s->vocab_size, best = argmax(logits, n);
    if (best < 0) die("model", not_finite);
    if (is_greedy(s)) return best;
    float sum = cpu_exponentials(logits, logits[best], 1 / s->temperature, n), cdf = 0;
    for (int i = 0; i < n; i++) logits[i] /= sum;
    float coin = random_float(s);
    if (s->topp > 0 && s->topp < 1) return sample_topp(s, logits, coin);
    for (int i = 0; i < n; i++) {
        cdf += logits[i];
        if (coin < cdf) return i;
    }
    return n - 1;
}

// ----------------------------------------------------------------------------
// What the program does

typedef struct {
    Model model;
    Tokenizer tokenizer;
    State state;
    Sampler sampler;
    Printer printer;
    const char *device; // cpu, cuda or auto
    int steps;     // tokens that a text, or an answer in a chat, may have
    int context;   // tokens that the model sees at once, at most
    int n_threads;
    int *window;   // (state.positions,) the tokens whose keys and values are cached
    int pos;       // how many of them there are
    bool slid;
} Run;

static void open_state(Run *r, int positions, bool all) {
    const char *wrong = state_open(&r->state, &r->model, r->device, positions, all, r->n_threads);
    if (wrong) die(strcmp(r->device, "cuda") ? "start" : "cuda", wrong);
    r->window = resize(NULL, positions, sizeof(int));
}

// The prompt's tokens, at least one.
static int *encode_prompt(const Run *r, Text prompt, int *n) {
    const Tokenizer *t = &r->tokenizer;
    int *tokens = encode(t, prompt.s, prompt.n, t->add_bos || !prompt.n, true, n);
    if (*n == 0) die("prompt", "it has no tokens");
    return tokens;
}

// Makes room in a full window for n more tokens: what stays is the first token, BOS, and the latest of all, together half
// a window. As many again come before it slides next, so that a token is evaluated twice, however long the text.
static int slide(Run *r, const int *tokens, int n) {
    int half = r->state.positions > 3 ? r->state.positions / 2 : 1, first = r->pos ? r->window[0] : tokens[0];
    int new = n < half ? n : half, old = half - new;
    if (!r->slid) fprintf(stderr, "the context of %d tokens is full: it slides over the text\n", r->state.positions);
    r->slid = true;
    memmove(r->window, r->window + r->pos - old, old * sizeof(int));
    memcpy(r->window + old, tokens + n - new, new * sizeof(int));
    if (half > 1) r->window[0] = first;
    return half;
}

// Evaluates n more tokens; returns the logits after the last.
static float *feed(Run *r, const int *tokens, int n) {
    if (n > r->state.positions - r->pos) {
        n = slide(r, tokens, n);
        tokens = r->window;
        r->pos = 0;
    } else memcpy(r->window + r->pos, tokens, n * sizeof(int));
    r->pos += n;
    return prefill(&r->model, &r->state, tokens, n, r->pos - n);
}

// The next token: the sampler's choice from the logits, or the backend's when they stayed with it.
static int choose(Run *r, float *logits) {
    Sampler *s = &r->sampler;
    if (logits) return sample(s, logits);
    Backend *b = r->state.backend;
    int next = is_greedy(s) ? b->choose(b, 0, 0, 0) : b->choose(b, s->temperature, s->topp, random_float(s));
    if (next < 0) die("model", not_finite);
    return next;
}

// Prints tokens after a text that ends with the token *last and left these logits, until one that ends the text, or `most`.
// Returns how many; *last is the latest of them, which has not been evaluated if they are `most`.
static int continue_text(Run *r, float *logits, int *last, int most, int stop) {
    const Tokenizer *t = &r->tokenizer;
    for (int n = 0; ; logits = feed(r, last, 1)) {
        int next = choose(r, logits);
        if (next == t->bos || next == t->eos || next == t->eot || next == stop) return n;
        print_token(&r->printer, t, *last, next);
        *last = next;
        if (++n == most) return n;
    }
}

// Prints the prompt and what the model makes of it, `steps` tokens together.
static void generate(Run *r, Text prompt) {
    const Tokenizer *t = &r->tokenizer;
    int n, most, evaluated = 0;
    int *tokens = encode_prompt(r, prompt, &n);
    double start = 0, middle = 0, end;
    for (int i = 0; i < n && i <= r->steps; i++) print_token(&r->printer, t, i ? tokens[i - 1] : t->bos, tokens[i]);
    if ((most = r->steps - n + 1) > 0) {
        open_state(r, r->steps < r->context ? r->steps : r->context, false);
        start = llamac_seconds();
        float *logits = feed(r, tokens, n);
        middle = llamac_seconds();
        evaluated = continue_text(r, logits, &tokens[n - 1], most, -1);
        if (evaluated == most) evaluated--;
    }
    end = llamac_seconds();
    print_end(&r->printer);
    if (most > 0) {
        fprintf(stderr, "achieved tok/s: %f\n", evaluated / (end - middle));
        fprintf(stderr, "prompt: %d tokens, tok/s: %f\n", n, n / (middle - start));
    } else fprintf(stderr, "nothing was added: the prompt has %d tokens, and -n %d counts them too\n", n, r->steps);
    free(tokens);
}

// What stands around the words of a chat. BOS and EOS are the vocabulary's own, whatever their text.
#define BOS "\2"
#define EOS "\3"

typedef struct {
    const char *name;
    const char *sources[2]; // chat templates, in Jinja, that say this; how they are spelled does not matter
    const char *marks[3];   // texts that are one token each, where the vocabulary has them
    const char *stop;       // the mark that ends an answer, or NULL: EOS alone
    const char *open, *system_open, *system_close, *user_open, *user_close; // the system prompt stands in the first turn
    const char *answer_close; // before every other turn
    bool bos, strip;          // the template itself says BOS; space around the words goes
} Template;

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
     .open = "", .system_open = "<|im_start|>system\n", .system_close = "<|im_end|>\n",
     .user_open = "<|im_start|>user\n", .user_close = "<|im_end|>\n<|im_start|>assistant\n", .answer_close = "<|im_end|>\n"},
    {.name = "zephyr", .marks = {"<|system|>", "<|user|>", "<|assistant|>"},
     .sources = {ZEPHYR("}}\n") "' }}\n{% endif %}\n{% endfor %}", ZEPHYR("+ '\\n' }}") "\\n' }}{% endif %}{% endfor %}"},
     .open = "", .system_open = "<|system|>\n", .system_close = EOS "\n",
     .user_open = "<|user|>\n", .user_close = EOS "\n<|assistant|>\n", .answer_close = EOS "\n"},
    {.name = "llama2", .bos = true, .strip = true,
     .sources = {LLAMA2("{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
                        "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"), LLAMA2("")},
     .open = BOS "[INST] ", .system_open = "<<SYS>>\n", .system_close = "\n<</SYS>>\n\n",
     .user_open = "", .user_close = " [/INST]", .answer_close = EOS},
};
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
        if (ours.n == theirs.n && !memcmp(ours.s, theirs.s, ours.n)) found = &templates[i / 2];
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
static const char *claim_marks(Tokenizer *t, const Template *f) {
    bool changed = false;
    for (int i = 0; i < t->n_symbols; i++)
        for (int m = 0; m < 3; m++)
            if (f->marks[m] && equals((String){t->symbols[i]->s, t->symbols[i]->n}, f->marks[m])) {
                t->pieces[t->symbols[i] - t->pieces].type = CONTROL;
                changed = true;
            }
    if (!changed) return NULL;
    free(t->table);
    free(t->symbols);
    t->n_symbols = 0;
    return index_pieces(t);
}

typedef struct { const Tokenizer *t; const Template *f; Text text; int *ids, n; bool begun; } Turn; // text: yet to be encoded

// Encodes the text so far. It begins with a space only where nothing but BOS stands before it, as in transformers.
static void end_text(Turn *turn) {
    int n, *ids = encode(turn->t, turn->text.s, turn->text.n, false, !turn->begun, &n);
    turn->ids = resize(turn->ids, turn->n + n + 1, sizeof(int));
    memcpy(turn->ids + turn->n, ids, n * sizeof(int));
    turn->n += n;
    turn->begun |= turn->text.n > 0;
    turn->text.n = 0;
    free(ids);
}

static void add_token(Turn *turn, int token) {
    end_text(turn);
    turn->ids[turn->n++] = token;
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

// The tokens of a user's turn, up to where the answer begins, in memory to be freed; their number in *n. What is the
// user's is text, whatever it says.
static int *encode_turn(const Tokenizer *t, const Template *f, bool first, const char *system, Text words, int *n) {
    Turn turn = {.t = t, .f = f, .ids = resize(NULL, 0, sizeof(int)), .begun = !first};
    if (!first) add_part(&turn, f->answer_close);
    else if (t->add_bos && !f->bos) add_token(&turn, t->bos);
    add_part(&turn, f->open);
    if (*system) {
        add_part(&turn, f->system_open);
        append_string(&turn.text, system);
        add_part(&turn, f->system_close);
    }
    while (f->strip && words.n && is_space(words.s[words.n - 1])) words.n--;
    while (f->strip && words.n && !*system && is_space(*words.s)) words.s++, words.n--;
    add_part(&turn, f->user_open);
    append(&turn.text, words.s, words.n);
    add_part(&turn, f->user_close);
    end_text(&turn);
    free(turn.text.s);
    *n = turn.n;
    return turn.ids;
}

// Asks on stdout and reads a line, without its end, into *line. False at the end of the input.
static bool ask(const char *question, Text *line) {
    print_bytes(question, strlen(question));
    flush();
    int c;
    for (line->n = 0; (c = getchar()) != EOF && c != '\n';) append(line, &(char){(char)c}, 1);
    if (ferror(stdin)) die("stdin", strerror(errno));
    return c != EOF || line->n;
}

// Turns of user and assistant until the input ends. The first words may come from -i, the system prompt from -y.
static void chat(Run *r, const Template *f, Text words, bool has_words, const char *system) {
    const Tokenizer *t = &r->tokenizer;
    int last = -1, stop = f->stop ? control_token(t, f->stop) : -1;
    Text line = {0}, instruction = {0};
    if (system) append_string(&instruction, system);
    else if (!ask("Enter system prompt (optional): ", &instruction)) has_words = false;
    append(&instruction, "", 1);
    open_state(r, r->context, false);
    for (bool first = true; (first && has_words) || ask("User: ", &line); first = false) {
        int n, *tokens = encode_turn(t, f, first, first ? instruction.s : "", first && has_words ? words : line, &n);
        if (last >= 0) feed(r, &last, 1);
        float *logits = feed(r, tokens, n);
        print_bytes("Assistant: ", 11);
        last = tokens[n - 1];
        if (continue_text(r, logits, &last, r->steps, stop) < r->steps) last = -1;
        else fprintf(stderr, "the answer was cut off after %d tokens (-n)\n", r->steps);
        print_end(&r->printer);
        free(tokens);
    }
    free(line.s);
    free(instruction.s);
}

// Prints exp of the mean negative log likelihood of a text's tokens, each given those before it in its window.
// Windows of seq_len tokens do not overlap; each starts at position 0 with an empty cache.
static void perplexity(Run *r, Text text) {
    const Config *c = &r->model.config;
    int n;
    int *tokens = encode(&r->tokenizer, text.s, text.n, true, true, &n);
    int inputs = n - 1, window = inputs < c->seq_len ? inputs : c->seq_len;
    if (inputs < 1) die("perplexity", "the text has no tokens");
    open_state(r, window, true);
    double nll = 0;
    for (int at = 0, T; at < inputs; at += T) {
        int pos = at % window, left = inputs - at < window - pos ? inputs - at : window - pos;
        T = left < r->state.chunk ? left : r->state.chunk;
        float *logits = forward(&r->model, &r->state, tokens + at, T, pos, true);
        for (int t = 0; t < T; t++, logits += c->vocab_size) {
            float most = cpu_largest(logits, c->vocab_size), next = logits[tokens[at + t + 1]];
            if (isnan(most)) die("model", not_finite);
            nll += log(cpu_exponentials(logits, most, 1, c->vocab_size)) + most - next;
        }
        if (isatty(2)) fprintf(stderr, "\r%d of %d tokens%s", at + T, inputs, at + T < inputs ? "" : "\n");
    }
    printf("perplexity %.4f (%d tokens, %.6f nats per token, %.6f bits per byte)\n", exp(nll / inputs), inputs,
           nll / inputs, nll / log(2) / text.n);
    free(tokens);
}

// Writes the logits of every position of the prompt: (tokens, vocab_size) float32. For tests against other programs.
static void dump_logits(Run *r, Text prompt) {
    int n, vocab_size = r->model.config.vocab_size;
    int *tokens = encode_prompt(r, prompt, &n);
    if (n > r->context) die("prompt", error("%d tokens, but the context is %d", n, r->context));
    open_state(r, n, true);
    for (int at = 0, T; at < n; at += T) {
        T = n - at < r->state.chunk ? n - at : r->state.chunk;
        const float *logits = forward(&r->model, &r->state, tokens + at, T, at, true);
        for (int t = 0; t < T; t++, logits += vocab_size) {
            if (isnan(cpu_largest(logits, vocab_size))) die("model", not_finite);
            print_bytes((const char *)logits, sizeof(float) * vocab_size);
        }
    }
    free(tokens);
}

static void print_ids(const int *tokens, int n) {
    for (int i = 0; i < n; i++) printf("%s%d", i ? " " : "", tokens[i]);
    printf("\n");
}

// Prints the token ids of the prompt, or of each line of the input: without BOS, or in a chat as a turn of the user's.
static void tokenize(Run *r, Text prompt, bool has_prompt, const char *system, const Template *f) {
    Text line = {0};
    for (bool first = true; has_prompt ? first : ask("", &line); first = false) {
        int n, *tokens;
        Text words = has_prompt ? prompt : line;
        if (f) tokens = encode_turn(&r->tokenizer, f, first, first && system ? system : "", words, &n);
        else tokens = encode(&r->tokenizer, words.s, words.n, false, true, &n);
        print_ids(tokens, n);
        free(tokens);
    }
    free(line.s);
}

// Round constants of SHA-256: the first 32 bits of the fractions of the first 64 primes' cube roots.
static const uint32_t sha256_rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate_right(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void sha256_block(uint32_t state[8], const uint8_t block[64]) {
    uint32_t w[64], h[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | block[4 * i + 1] << 16 | block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + (rotate_right(w[i - 15], 7) ^ rotate_right(w[i - 15], 18) ^ w[i - 15] >> 3)
             + w[i - 7] + (rotate_right(w[i - 2], 17) ^ rotate_right(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(h, state, sizeof h);
    for (int i = 0; i < 64; i++) {
        uint32_t a = h[0], e = h[4];
        uint32_t one = h[7] + (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25))
                     + ((e & h[5]) ^ (~e & h[6])) + sha256_rounds[i] + w[i];
        uint32_t two = (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22))
                     + ((a & h[1]) ^ (a & h[2]) ^ (h[1] & h[2]));
        for (int k = 7; k > 0; k--) h[k] = h[k - 1];
        h[4] += one;
        h[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state[i] += h[i];
}

// SHA-256 (FIPS 180-4) of n bytes as hexadecimal digits.
static void sha256(const uint8_t *bytes, size_t n, char hex[65]) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t whole = n / 64 * 64, rest = n - whole, padded = rest < 56 ? 64 : 128;
    uint8_t last[128] = {0};
    for (size_t at = 0; at < whole; at += 64) sha256_block(state, bytes + at);
    memcpy(last, bytes + whole, rest);
    last[rest] = 0x80;
    for (int i = 0; i < 8; i++) last[padded - 1 - i] = (uint8_t)((uint64_t)n * 8 >> 8 * i);
    for (size_t at = 0; at < padded; at += 64) sha256_block(state, last + at);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", state[i]);
}

// Whether the weights are those that were exported. Programs that write other tensors keep metadata that they don't know,
// so the list of tensors has a checksum too: if it is another list, the weights' checksum is not about this file.
static const char *verify(const Model *m) {
    char found[65];
    CHECK(m->sha256, "it carries no checksum; GGUF files by export.py do");
    if (m->list_sha256) sha256(m->list, m->list_size, found);
    CHECK(!m->list_sha256 || !memcmp(found, m->list_sha256, 64), "its checksum is another file's: a program that wrote its "
          "tensors anew, such as llama-quantize, copied it, so nothing can be said of them");
    sha256(m->data, m->data_size, found);
    CHECK(!memcmp(found, m->sha256, 64), "its weights are damaged%s: SHA-256 %.64s, expected %.64s",
          m->list_sha256 ? "" : ", or another program wrote them", found, m->sha256);
    return NULL;
}

// ----------------------------------------------------------------------------
// How fast it is

typedef struct {
    int prompt, decoded;             // tokens
    double first;                    // seconds from the program's start to the first token after BOS, load included
    double prompt_speed, decode_speed; // tokens/s, medians
    double bytes;                    // of weights that one token reads
    double bandwidth;                // bytes/s that the threads read the same weights with, doing nothing else
    double share;                    // of it while decoding: the median of runs, each beside a reading of its own
    double peak;                     // bytes of memory that the process had at most
} Bench;

enum { BENCH_RUNS = 5, BENCH_SECONDS = 2, WARM = 20 }; // WARM tokens, after which the CPU has its weights in order

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int n) {
    qsort(times, n, sizeof *times, compare_doubles);
    return times[n / 2];
}

// Bytes of the matrices that one token goes through; *first is where the first of them lies.
static uint64_t weights_read(Model *m, const uint8_t **first) {
    uint64_t n = 0;
    *first = m->weights.output.data;
    for (int i = ATTENTION_NORM; i < N_TENSORS; i++)
        for (int layer = 0; layer < (tensors[i].per_layer ? m->config.n_layers : 1); layer++) {
            const Mat *mat = place_of(&m->weights, i, layer);
            n += bytes_of(mat);
            if ((const uint8_t *)mat->data < *first) *first = mat->data;
        }
    return n;
}

// A prompt of up to 128 tokens, and up to -n tokens one by one from an empty cache: medians of some runs, fewer if slow.
static Bench measure(Run *r, double start) {
    const Config *c = &r->model.config;
    Bench b = {.prompt = c->seq_len < 128 ? c->seq_len : 128, .decoded = r->steps < r->context ? r->steps : r->context};
    double prompt[BENCH_RUNS], decode[BENCH_RUNS], reading[BENCH_RUNS], share[BENCH_RUNS];
    int runs = 0, tokens[128];
    const uint8_t *first;
    b.bytes = weights_read(&r->model, &first);
    for (int i = 0; i < b.prompt; i++) tokens[i] = (int)((int64_t)i * c->vocab_size / b.prompt);
    r->sampler.temperature = 0;
    open_state(r, b.prompt > b.decoded ? b.prompt : b.decoded, false);
    choose(r, forward(&r->model, &r->state, &r->tokenizer.bos, 1, 0, false));
    b.first = llamac_seconds() - start;
    for (int i = 0; i < WARM; i++) forward(&r->model, &r->state, &r->tokenizer.bos, 1, 0, false);
    prefill(&r->model, &r->state, tokens, b.prompt, 0);
    for (double begin = llamac_seconds(); runs < BENCH_RUNS && (!runs || llamac_seconds() - begin < BENCH_SECONDS); runs++) {
        double before = llamac_seconds();
        prefill(&r->model, &r->state, tokens, b.prompt, 0);
        double middle = llamac_seconds();
        for (int token = r->tokenizer.bos, pos = 0; pos < b.decoded; pos++)
            token = choose(r, forward(&r->model, &r->state, &token, 1, pos, false));
        prompt[runs] = middle - before;
        decode[runs] = llamac_seconds() - middle;
        reading[runs] = r->state.backend->bandwidth(r->state.backend, first, b.bytes);
        share[runs] = reading[runs] > 0 ? b.decoded / decode[runs] * b.bytes / reading[runs] : 0;
    }
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
#ifdef __APPLE__
    b.peak = used.ru_maxrss; // bytes there, KiB elsewhere
#else
    b.peak = 1024.0 * used.ru_maxrss;
#endif
    b.prompt_speed = b.prompt / median(prompt, runs), b.decode_speed = b.decoded / median(decode, runs);
    b.bandwidth = median(reading, runs), b.share = median(share, runs);
    return b;
}

// Prints a table, or JSON. `start` is when the program began.
static void bench(Run *r, double start, bool json) {
    Bench b = measure(r, start);
    double speed = b.bytes * b.decode_speed;
    printf(json ? "{\"threads\": %d, \"first_token_ms\": %.2f, \"prompt_tokens\": %d, \"prompt_tokens_per_s\": %.1f, "
                  "\"decode_tokens\": %d, \"decode_tokens_per_s\": %.1f, \"bytes_per_token\": %.0f, "
                  "\"decode_gb_per_s\": %.2f, \"bandwidth_gb_per_s\": %.2f, \"bandwidth_share\": %.3f, "
                  "\"peak_mib\": %.1f}\n"
                : "threads                %12d\n"
                  "first token            %12.2f ms from the start\n"
                  "prompt of %4d tokens  %12.1f tokens/s\n"
                  "decoding %4d tokens   %12.1f tokens/s\n"
                  "weights per token      %12.0f bytes\n"
                  "read while decoding    %12.2f GB/s\n"
                  "only reading them      %12.2f GB/s\n"
                  "share                  %12.3f\n"
                  "peak memory            %12.1f MiB\n",
           r->n_threads, b.first * 1e3, b.prompt, b.prompt_speed, b.decoded, b.decode_speed, b.bytes, speed / 1e9,
           b.bandwidth / 1e9, b.share, b.peak / (1 << 20));
}

// ----------------------------------------------------------------------------
// The command line

static const char help[] =
    "Usage: run MODEL [options]      MODEL: a GGUF file, or one of llama2.c's .bin files\n"
    "  -t NUMBER        temperature, 0 is greedy (1.0)\n"
    "  -p NUMBER        sample from the most likely tokens of this probability, 0 or 1 is all (0.9)\n"
    "  -s NUMBER        seed, 0 takes the time (0)\n"
    "  -n NUMBER        tokens in all, prompt included, or of each answer in a chat; 0 is the context (256)\n"
    "  -c NUMBER        context: tokens that the model sees at once, at most the model's own (that)\n"
    "  -i TEXT          prompt\n"
    "  -f FILE          prompt from a file\n"
    "  -z FILE          tokenizer, in llama2.c's format (the model's own, or tokenizer.bin)\n"
    "  -m MODE          generate or chat (generate)\n"
    "  -y TEXT          system prompt of the chat\n"
    "  -j NUMBER        threads (as many as cores)\n"
    "  --no-copy        compute from the file's own pages, which processes share; slower after the first tokens\n"
    "  --device NAME    cpu, cuda, or auto: cuda if there is one (runcuda: cuda; run: cpu, which is all it has)\n"
    "  --raw            print control characters that the model writes\n"
    "  --perplexity FILE  how well the model predicts a text\n"
    "  --template NAME  what the chat puts around your words: chatml, zephyr or llama2 (as the model file says)\n"
    "  --tokenize       print the token ids of the prompt, or of each line of the input; with -m chat those of your turns\n"
    "  --verify         compare the weights with the checksum in the file\n"
    "  --logits         write the logits of every prompt token as float32\n"
    "  --bench          how fast the model runs here, -n tokens one by one; with --json for programs\n"
    "  -h, --help       this text\n";

typedef struct {
    const char *model, *prompt, *prompt_file, *tokenizer, *mode, *system, *template, *perplexity, *device;
    double temperature, topp, seed, steps, context, threads;
    bool raw, no_copy, tokenize, logits, verify, bench, json;
} Options;

// A number, whole if asked, written in decimal digits to its end.
static double parse_number(const char *flag, const char *s, double least, double most, bool whole) {
    char *end;
    double value = strtod(s, &end);
    bool plain = *s && strspn(s, whole ? "0123456789" : "0123456789.+-eE") == strlen(s);
    if (!plain || *end || !(value >= least && value <= most))
        die(flag, error("'%.40s' is not a %snumber from %.0f to %.0f", s, whole ? "whole " : "", least, most));
    return value;
}

static void parse_option(Options *o, const char *flag, const char *value) {
    if (!value) die(flag, "no such option, or its value is missing; see run --help");
    if (!strcmp(flag, "-t")) o->temperature = parse_number(flag, value, 0, 1e6, false);
    else if (!strcmp(flag, "-p")) o->topp = parse_number(flag, value, 0, 1, false);
    else if (!strcmp(flag, "-s")) o->seed = parse_number(flag, value, 0, 9007199254740991, true);
    else if (!strcmp(flag, "-n")) o->steps = parse_number(flag, value, 0, INT_MAX, true);
    else if (!strcmp(flag, "-c")) o->context = parse_number(flag, value, 1, INT_MAX, true);
    else if (!strcmp(flag, "-j")) o->threads = parse_number(flag, value, 1, 1024, true);
    else if (!strcmp(flag, "-i")) o->prompt = value;
    else if (!strcmp(flag, "-f")) o->prompt_file = value;
    else if (!strcmp(flag, "-z")) o->tokenizer = value;
    else if (!strcmp(flag, "-m")) o->mode = value;
    else if (!strcmp(flag, "-y")) o->system = value;
    else if (!strcmp(flag, "--perplexity")) o->perplexity = value;
    else if (!strcmp(flag, "--device")) o->device = value;
    else if (!strcmp(flag, "--template")) o->template = value;
    else die(flag, "no such option; see run --help");
}

#ifdef CUDA
static const char default_device[] = "cuda";
#else
static const char default_device[] = "cpu";
#endif

// One for each core that the process may use: of two processors that share one, the second only waits for the same units.
// A container's share of time may be smaller than its processors are many.
static int default_threads(void) {
    long processors = sysconf(_SC_NPROCESSORS_ONLN), quota = 0, period = 0;
#ifdef __linux__
    cpu_set_t allowed;
    if (!sched_getaffinity(0, sizeof allowed, &allowed)) processors = CPU_COUNT(&allowed);
#endif
    FILE *file = fopen("/sys/devices/system/cpu/smt/active", "r");
    if (file && getc(file) == '1') processors = (processors + 1) / 2;
    if (file) fclose(file);
    file = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (file && fscanf(file, "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0 && quota / period < processors)
        processors = quota / period;
    if (file) fclose(file);
    return processors < 1 ? 1 : processors > 64 ? 64 : (int)processors;
}

static Options parse_options(int argc, char **argv) {
    Options o = {.mode = "generate", .temperature = 1, .topp = 0.9, .steps = 256, .device = default_device};
    o.threads = default_threads();
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) exit(fputs(help, stdout) < 0);
        else if (i == 1 && argv[i][0] != '-') o.model = argv[i];
        else if (i == 1) break;
        else if (!strcmp(argv[i], "--raw")) o.raw = true;
        else if (!strcmp(argv[i], "--no-copy")) o.no_copy = true;
        else if (!strcmp(argv[i], "--tokenize")) o.tokenize = true;
        else if (!strcmp(argv[i], "--logits")) o.logits = true;
        else if (!strcmp(argv[i], "--verify")) o.verify = true;
        else if (!strcmp(argv[i], "--bench")) o.bench = true;
        else if (!strcmp(argv[i], "--json")) o.json = true;
        else if (!strncmp(argv[i], "--device=", 9)) parse_option(&o, "--device", argv[i] + 9);
        else if (!strncmp(argv[i], "--template=", 11)) parse_option(&o, "--template", argv[i] + 11);
        else parse_option(&o, argv[i], argv[i + 1]), i++;
    }
    if (!o.model) die("no model given", "expected ./run model.gguf, options after it; see ./run --help");
    if (o.prompt && o.prompt_file) die("-f", "there is a prompt from -i already");
    if (o.tokenize + o.logits + o.verify + o.bench + (o.perplexity != NULL) > 1)
        die("options", "expected only one of --tokenize, --logits, --verify, --bench and --perplexity");
    if (o.json && !o.bench) die("--json", "expected --bench beside it");
    if (strcmp(o.mode, "generate") && strcmp(o.mode, "chat"))
        die("-m", error("'%s' is no mode, expected generate or chat", o.mode));
    if (o.template && !template_named(o.template))
        die("--template", error("'%s' is no template, expected chatml, zephyr or llama2", o.template));
    if (strcmp(o.device, "cpu") && strcmp(o.device, "cuda") && strcmp(o.device, "auto"))
        die("--device", error("'%s' is no device, expected cpu, cuda or auto", o.device));
    if (!strcmp(o.device, "cuda") && strcmp(default_device, "cuda") != 0)
        die("--device", "this program computes on the CPU; make runcuda builds the one for GPUs");
    return o;
}

// Reads a whole file, pipes too.
static Text read_file(const char *path) {
    Text text = {0};
    char buffer[1 << 16];
    FILE *file = fopen(path, "rb");
    if (!file) die(path, strerror(errno));
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)); ) append(&text, buffer, n);
    if (ferror(file)) die(path, strerror(errno));
    fclose(file);
    return text;
}

static const char *map_file(const char *path, const uint8_t **bytes, size_t *size) {
    int file = open(path, O_RDONLY | O_NONBLOCK); // so that a pipe is refused rather than waited for
    struct stat info;
    CHECK(file >= 0 || errno != ENOENT, "no such file");
    CHECK(file >= 0 && fstat(file, &info) == 0, "%s", strerror(errno));
    CHECK(S_ISREG(info.st_mode), "not a regular file");
    CHECK(info.st_size > 0, "the file is empty");
    *size = info.st_size;
    *bytes = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, file, 0);
    CHECK(*bytes != MAP_FAILED, "%s", strerror(errno));
    llamac_use_large_pages(*bytes, *size); // who reads it from disk first keeps it in large pages for those after
    close(file);
    return NULL;
}

// Someone else may cut off a file that is mapped; reading what is no more there is this signal.
static void file_shrank(int number) {
    static const char message[] = "run: model: its file was cut off while in use\n";
    ssize_t written = write(2, message, sizeof message - 1);
    (void)number, (void)written;
    _exit(1);
}

static void load(Run *r, const char *model, const char *tokenizer, bool to_verify, bool text) {
    const uint8_t *bytes;
    size_t size;
    const char *wrong = map_file(model, &bytes, &size);
    if (!wrong) wrong = load_model(&r->model, tokenizer ? NULL : &r->tokenizer, bytes, size);
    if (!wrong && to_verify) wrong = verify(&r->model);
    if (wrong) die(model, wrong);
    r->model.mapped = true;
    if (r->tokenizer.pieces || !text) return;
    if (!tokenizer) tokenizer = "tokenizer.bin";
    wrong = map_file(tokenizer, &bytes, &size);
    if (!wrong) wrong = load_tokenizer_bin(&r->tokenizer, bytes, size, r->model.config.vocab_size);
    if (wrong) die(tokenizer, wrong);
}

// The chat's template: the one named, else the model file's. llama2.c's formats name none and mean Llama 2's.
static const Template *template_of(Run *r, const Options *o) {
    String text = r->tokenizer.chat_template;
    const Template *f = o->template ? template_named(o->template) : !r->model.data ? template_named("llama2") : find_template(text);
    if (!f)
        die(o->model, error("%s%.*s%s; known are chatml, zephyr and llama2: name the one it was trained with, such as "
                            "--template=llama2", text.n ? "its chat template '" : "it has no chat template",
                            (int)(text.n < 60 ? text.n : 60), text.s, text.n ? "...' is unknown" : ""));
    const char *wrong = claim_marks(&r->tokenizer, f);
    if (wrong) die(o->model, wrong);
    return f;
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN); // a reader that leaves is an error of writing like any other
    signal(SIGBUS, file_shrank);
    double start = llamac_seconds();
    Options o = parse_options(argc, argv);
    static Run r;
    load(&r, o.model, o.tokenizer, o.verify, !o.verify && !o.bench);
    const Config *c = &r.model.config;
    r.model.no_copy = o.no_copy;
    r.n_threads = (int)o.threads;
    r.device = o.device;
    r.printer.raw = o.raw;
    if (o.context > c->seq_len) die("-c", error("%.0f tokens, but the model's context is %d", o.context, c->seq_len));
    r.context = o.context ? (int)o.context : c->seq_len;
    r.steps = o.steps ? (int)o.steps : r.context;
    r.sampler = (Sampler){c->vocab_size, (float)o.temperature, (float)o.topp,
                          o.seed ? (uint64_t)o.seed : (uint64_t)time(NULL),
                          resize(NULL, c->vocab_size, sizeof(Candidate))};

    bool has_prompt = o.prompt || o.prompt_file;
    bool chats = !strcmp(o.mode, "chat") && !o.verify && !o.bench && !o.logits && !o.perplexity;
    const Template *template = chats ? template_of(&r, &o) : NULL;
    Text prompt = {0}, text = {0};
    if (o.prompt) append_string(&prompt, o.prompt);
    if (o.prompt_file) prompt = read_file(o.prompt_file);
    if (o.verify) printf("the weights are intact\n");
    else if (o.perplexity) perplexity(&r, text = read_file(o.perplexity));
    else if (o.logits) dump_logits(&r, prompt);
    else if (o.bench) bench(&r, start, o.json);
    else if (o.tokenize) tokenize(&r, prompt, has_prompt, o.system, template);
    else if (chats) chat(&r, template, prompt, has_prompt, o.system);
    else generate(&r, prompt);
    flush();

    if (r.state.backend) r.state.backend->close(r.state.backend);
    free(r.state.logits);
    free(r.window);
    free(r.model.weights.layers);
    free(r.tokenizer.pieces);
    free(r.tokenizer.table);
    free(r.tokenizer.symbols);
    free(r.sampler.candidates);
    free(prompt.s);
    free(text.s);
    return 0;
}

// The metadata of GGUF: keys, types and values, stored before the list of tensors.
#include <limits.h>
#include <math.h>
#include "model.h"

// Bytes of a value of each type; 0 for STRING and ARRAY, whose size varies.
static const int kind_size[N_KINDS] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

const char *const llamac_architectures[N_ARCHITECTURES] = {
    [LLAMA] = "llama", [QWEN2] = "qwen2", [QWEN3] = "qwen3"};

// Names of the keys. The name of the architecture precedes a leading dot.
static const char *const keys[N_KEYS] = {
    [ARCHITECTURE] = "general.architecture",
    [ALIGNMENT] = "general.alignment",
    [CONTEXT_LENGTH] = ".context_length",
    [EMBEDDING_LENGTH] = ".embedding_length",
    [BLOCK_COUNT] = ".block_count",
    [FEED_FORWARD_LENGTH] = ".feed_forward_length",
    [HEAD_COUNT] = ".attention.head_count",
    [HEAD_COUNT_KV] = ".attention.head_count_kv",
    [KEY_LENGTH] = ".attention.key_length",
    [VALUE_LENGTH] = ".attention.value_length",
    [SLIDING_WINDOW] = ".attention.sliding_window",
    [NORM_EPS] = ".attention.layer_norm_rms_epsilon",
    [ROPE_DIMENSION] = ".rope.dimension_count",
    [ROPE_BASE] = ".rope.freq_base",
    [SCALING_TYPE] = ".rope.scaling.type",
    [SCALING_FACTOR] = ".rope.scaling.factor",
    [SCALING_CONTEXT] = ".rope.scaling.original_context_length",
    [SCALE_LINEAR] = ".rope.scale_linear",
    [VOCAB_SIZE] = ".vocab_size",
    [QUANTIZATION_VERSION] = "general.quantization_version",
    [TOKENIZER] = "tokenizer.ggml.model",
    [TOKENS] = "tokenizer.ggml.tokens",
    [SCORES] = "tokenizer.ggml.scores",
    [TOKEN_TYPES] = "tokenizer.ggml.token_type",
    [PRE_TOKENIZER] = "tokenizer.ggml.pre",
    [MERGES] = "tokenizer.ggml.merges",
    [BOS_ID] = "tokenizer.ggml.bos_token_id",
    [EOS_ID] = "tokenizer.ggml.eos_token_id",
    [EOT_ID] = "tokenizer.ggml.eot_token_id",
    [UNK_ID] = "tokenizer.ggml.unknown_token_id",
    [ADD_BOS] = "tokenizer.ggml.add_bos_token",
    [SPACE_PREFIX] = "tokenizer.ggml.add_space_prefix",
    [EXTRA_SPACES] = "tokenizer.ggml.remove_extra_whitespaces",
    [CHAT_TEMPLATE] = "tokenizer.chat_template",
    [SPLIT_NO] = "split.no",
    [SPLIT_COUNT] = "split.count",
    [CHECKSUM] = "llamac.tensor_data.sha256",
    [LIST_CHECKSUM] = "llamac.tensor_list.sha256",
};

// Further keys of an architecture. Fixed keys change the computation: only the value that forward
// implements is accepted. Idle keys do not change it. Every other key of the architecture may, so
// it is refused.
static const struct {
    const char *key;
    double value;
} fixed_keys[] = {
    {".attention.causal", 1},
    {".attention.clamp_kqv", 0},
    {".attention.max_alibi_bias", 0},
    {".expert_count", 0},
    {".expert_used_count", 0},
    {".rope.scaling.attn_factor", 1},
    {".rope.scaling.yarn_beta_fast", 32},
    {".rope.scaling.yarn_beta_slow", 1},
    {".use_parallel_residual", 0},
};
static const char *const idle_keys[] = {
    ".pooling_type",
    ".rope.scaling.finetuned",
    ".tensor_data_layout",
};

// Returns whether `key` of the file is `known`, a name as in `keys`: the name of the architecture
// precedes a leading dot.
static bool is_key(String key, const char *known, const char *architecture) {
    size_t n = *known == '.' ? strlen(architecture) : 0;
    return key.n > n && !memcmp(key.s, architecture, n)
           && equals((String){key.s + n, key.n - n}, known);
}

int llamac_architecture(const Value *values) {
    String name = llamac_get_string(values, ARCHITECTURE);
    int i = 0;
    while (i < N_ARCHITECTURES && !equals(name, llamac_architectures[i])) i++;
    return i;
}

KeyName llamac_key(const Value *values, int key) {
    int architecture = llamac_architecture(values);
    KeyName name;
    bool prefixed = *keys[key] == '.' && architecture < N_ARCHITECTURES;
    snprintf(name.s, sizeof name.s, "%s%s", prefixed ? llamac_architectures[architecture] : "",
             keys[key]);
    return name;
}

static bool take_value(Reader *r, Value *v, Error *e) {
    *v = (Value){.present = true, .kind = take_u32(r), .count = 1};
    v->is_array = v->kind == ARRAY;
    if (v->is_array) {
        v->kind = take_u32(r);
        v->count = take_u64(r);
    }
    CHECK(!r->failed && v->kind < N_KINDS && v->kind != ARRAY,
          "metadata is cut off or of unknown type %u", v->kind);
    v->data = *r;
    if (v->kind == STRING)
        for (uint64_t i = 0; i < v->count && !r->failed; i++) take_string(r);
    else // the product would overflow for a huge count; UINT64_MAX makes `take` fail
        take(r, v->count > r->size ? UINT64_MAX : v->count * kind_size[v->kind]);
    CHECK(!r->failed, "metadata runs past the end of the file");
    return true;
}

static bool number_of(Value v, const char *key, double *out, Error *e) {
    CHECK(!v.is_array && v.kind != STRING, "metadata key %s is not a number", key);
    uint64_t bits = 0;
    memcpy(&bits, take(&v.data, kind_size[v.kind]), kind_size[v.kind]);
    switch (v.kind) {
    case I8: *out = (int8_t)bits; break;
    case I16: *out = (int16_t)bits; break;
    case I32: *out = (int32_t)bits; break;
    case I64: *out = (double)(int64_t)bits; break;
    case FLOAT: {
        float f;
        memcpy(&f, &bits, 4);
        *out = f;
        break;
    }
    case DOUBLE: memcpy(out, &bits, 8); break;
    default: *out = (double)bits;
    }
    return true;
}

// Checks a key that is not one of `keys`. Accepts keys of other prefixes, idle keys, and fixed keys
// with the right value.
static bool check_other_key(String key, Value v, const char *architecture, Error *e) {
    double value;
    size_t n = strlen(architecture);
    if (key.n <= n || memcmp(key.s, architecture, n) || key.s[n] != '.') return true;
    for (size_t i = 0; i < sizeof idle_keys / sizeof *idle_keys; i++)
        if (is_key(key, idle_keys[i], architecture)) return true;
    for (size_t i = 0; i < sizeof fixed_keys / sizeof *fixed_keys; i++)
        if (is_key(key, fixed_keys[i].key, architecture)) {
            char name[64];
            snprintf(name, sizeof name, "%.*s", (int)key.n, key.s);
            TRY(number_of(v, name, &value, e));
            CHECK(value == fixed_keys[i].value, "metadata key %s is %g, expected %g", name, value,
                  fixed_keys[i].value);
            return true;
        }
    return fail(e, "metadata key '%.*s' is unknown, and may change what the model computes",
                SHOWN(key, 80));
}

static bool take_entry(Reader *r, String *key, Value *v, Error *e) {
    *key = take_string(r);
    return take_value(r, v, e);
}

// Refuses a file that llama-gguf-split wrote as one part of a model.
static bool refuse_split(const Value *values, Error *e) {
    int part = 0, parts = 0; // gcc for ARM cannot tell that both are always set
    TRY(llamac_get_int(values, SPLIT_COUNT, 1, &parts, e));
    TRY(llamac_get_int(values, SPLIT_NO, 0, &part, e));
    CHECK(parts < 2,
          "it is part %d of %d of a split model; join them: llama-gguf-split --merge "
          "NAME-00001-of-%05d.gguf NAME.gguf",
          part + 1, parts, parts);
    return true;
}

// Finds the architecture, which the names of other keys depend on. Does not move the caller's
// reader. Later parts of a split model have no architecture; for them, reports that the model is
// split.
static bool find_architecture(Reader r, uint64_t count, const char **name, Error *e) {
    static const int wanted[] = {ARCHITECTURE, SPLIT_NO, SPLIT_COUNT};
    Value values[N_KEYS] = {0}, v;
    String key, found;
    for (uint64_t i = 0; i < count && !values[ARCHITECTURE].present; i++) {
        TRY(take_entry(&r, &key, &v, e));
        for (int k = 0; k < 3; k++)
            if (equals(key, keys[wanted[k]])) values[wanted[k]] = v;
    }
    if (!values[ARCHITECTURE].present) TRY(refuse_split(values, e));
    int architecture = llamac_architecture(values);
    found = llamac_get_string(values, ARCHITECTURE);
    CHECK(architecture < N_ARCHITECTURES,
          "the architecture is '%.*s', expected llama, qwen2 or qwen3", SHOWN(found, 40));
    *name = llamac_architectures[architecture];
    return true;
}

bool llamac_take_metadata(Reader *r, uint64_t count, Value values[N_KEYS], Error *e) {
    const char *architecture;
    TRY(find_architecture(*r, count, &architecture, e));
    for (uint64_t i = 0; i < count; i++) {
        String key;
        Value v;
        TRY(take_entry(r, &key, &v, e));
        int k = 0;
        while (k < N_KEYS && !is_key(key, keys[k], architecture)) k++;
        if (k == N_KEYS) {
            TRY(check_other_key(key, v, architecture, e));
            continue;
        }
        CHECK(!values[k].present, "metadata key %.*s appears twice", (int)key.n, key.s);
        values[k] = v;
    }
    return refuse_split(values, e);
}

bool llamac_get_number(const Value *values, int key, double fallback, double *out, Error *e) {
    Value v = values[key];
    *out = fallback;
    CHECK(v.present || !isnan(fallback), "metadata key %s is missing", llamac_key(values, key).s);
    return !v.present || number_of(v, llamac_key(values, key).s, out, e);
}

bool llamac_get_int(const Value *values, int key, double fallback, int *out, Error *e) {
    double number;
    TRY(llamac_get_number(values, key, fallback, &number, e));
    CHECK(number >= 0 && number <= INT_MAX && number == floor(number),
          "metadata key %s is %g, expected a whole number", llamac_key(values, key).s, number);
    *out = (int)number;
    return true;
}

String llamac_get_string(const Value *values, int key) {
    Value v = values[key];
    return v.present && v.kind == STRING && !v.is_array ? take_string(&v.data) : (String){"", 0};
}

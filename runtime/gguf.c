// GGUF's metadata: keys, types and values, in front of the list of tensors.
#include <limits.h>
#include <math.h>
#include "model.h"

static const int kind_size[N_KINDS] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

static const char *const keys[N_KEYS] = {
    [ARCHITECTURE] = "general.architecture",
    [ALIGNMENT] = "general.alignment",
    [CONTEXT_LENGTH] = "llama.context_length",
    [EMBEDDING_LENGTH] = "llama.embedding_length",
    [BLOCK_COUNT] = "llama.block_count",
    [FEED_FORWARD_LENGTH] = "llama.feed_forward_length",
    [HEAD_COUNT] = "llama.attention.head_count",
    [HEAD_COUNT_KV] = "llama.attention.head_count_kv",
    [KEY_LENGTH] = "llama.attention.key_length",
    [VALUE_LENGTH] = "llama.attention.value_length",
    [SLIDING_WINDOW] = "llama.attention.sliding_window",
    [NORM_EPS] = "llama.attention.layer_norm_rms_epsilon",
    [ROPE_DIMENSION] = "llama.rope.dimension_count",
    [ROPE_BASE] = "llama.rope.freq_base",
    [SCALING_TYPE] = "llama.rope.scaling.type",
    [SCALING_FACTOR] = "llama.rope.scaling.factor",
    [SCALE_LINEAR] = "llama.rope.scale_linear",
    [VOCAB_SIZE] = "llama.vocab_size",
    [QUANTIZATION_VERSION] = "general.quantization_version",
    [TOKENIZER] = "tokenizer.ggml.model",
    [TOKENS] = "tokenizer.ggml.tokens",
    [SCORES] = "tokenizer.ggml.scores",
    [TOKEN_TYPES] = "tokenizer.ggml.token_type",
    [BOS_ID] = "tokenizer.ggml.bos_token_id",
    [EOS_ID] = "tokenizer.ggml.eos_token_id",
    [EOT_ID] = "tokenizer.ggml.eot_token_id",
    [UNK_ID] = "tokenizer.ggml.unknown_token_id",
    [ADD_BOS] = "tokenizer.ggml.add_bos_token",
    [SPACE_PREFIX] = "tokenizer.ggml.add_space_prefix",
    [EXTRA_SPACES] = "tokenizer.ggml.remove_extra_whitespaces",
    [CHAT_TEMPLATE] = "tokenizer.chat_template",
    [CHECKSUM] = "llamac.tensor_data.sha256",
    [LIST_CHECKSUM] = "llamac.tensor_list.sha256",
};

// More of llama.*: keys that are fine with the one value that says what forward computes, and those that change nothing
// that it computes. All others are refused, since they may.
static const struct {
    const char *key;
    double value;
} fixed_keys[] = {
    {"llama.attention.causal", 1},      {"llama.attention.clamp_kqv", 0}, {"llama.attention.max_alibi_bias", 0},
    {"llama.expert_count", 0},          {"llama.expert_used_count", 0},   {"llama.rope.scaling.attn_factor", 1},
    {"llama.use_parallel_residual", 0},
};
static const char *const idle_keys[] = {
    "llama.pooling_type",
    "llama.rope.scaling.finetuned",
    "llama.rope.scaling.original_context_length",
    "llama.tensor_data_layout",
};

const char *llamac_key(int key) { return keys[key]; }

static bool take_value(Reader *r, Value *v, Error *e) {
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
    else take(r, v->count > r->size ? UINT64_MAX : v->count * kind_size[v->kind]);
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

// Refuses a key of llama.* that is none of `keys`, unless it is known to change nothing.
static bool check_other_key(String key, Value v, Error *e) {
    double value;
    if (key.n < 6 || memcmp(key.s, "llama.", 6)) return true;
    for (size_t i = 0; i < sizeof idle_keys / sizeof *idle_keys; i++)
        if (equals(key, idle_keys[i])) return true;
    for (size_t i = 0; i < sizeof fixed_keys / sizeof *fixed_keys; i++)
        if (equals(key, fixed_keys[i].key)) {
            TRY(number_of(v, fixed_keys[i].key, &value, e));
            CHECK(value == fixed_keys[i].value, "metadata key %s is %g, expected %g", fixed_keys[i].key, value,
                  fixed_keys[i].value);
            return true;
        }
    return fail(e, "metadata key '%.*s' is unknown, and may change what the model computes", (int)(key.n < 80 ? key.n : 80), key.s);
}

bool llamac_take_metadata(Reader *r, uint64_t count, Value values[N_KEYS], Error *e) {
    for (uint64_t i = 0; i < count; i++) {
        String key = take_string(r);
        Value v;
        TRY(take_value(r, &v, e));
        int k = 0;
        while (k < N_KEYS && !equals(key, keys[k])) k++;
        if (k == N_KEYS) {
            TRY(check_other_key(key, v, e));
            continue;
        }
        CHECK(!values[k].present, "metadata key %s appears twice", keys[k]);
        values[k] = v;
    }
    return true;
}

bool llamac_get_number(const Value *values, int key, double fallback, double *out, Error *e) {
    Value v = values[key];
    *out = fallback;
    CHECK(v.present || !isnan(fallback), "metadata key %s is missing", keys[key]);
    return !v.present || number_of(v, keys[key], out, e);
}

bool llamac_get_int(const Value *values, int key, double fallback, int *out, Error *e) {
    double number;
    TRY(llamac_get_number(values, key, fallback, &number, e));
    CHECK(number >= 0 && number <= INT_MAX && number == floor(number), "metadata key %s is %g, expected a whole number", keys[key],
          number);
    *out = (int)number;
    return true;
}

String llamac_get_string(const Value *values, int key) {
    Value v = values[key];
    return v.present && v.kind == STRING && !v.is_array ? take_string(&v.data) : (String){"", 0};
}

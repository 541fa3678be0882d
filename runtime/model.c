// Model files: GGUF and llama2.c's formats. A loader reads nothing but the bytes of the file. It
// fills a structure that points into them, or returns an error. It checks every field before using
// it, and allocates only after all sizes are known.
#include <limits.h>
#include <math.h>
#include "model.h"
#include "sha256.h"

enum {
    TOKEN_EMBEDDING,
    ATTENTION_NORM,
    WQ,
    WK,
    WV,
    WO,
    FFN_NORM,
    W1,
    W2,
    W3,
    NORM,
    OUTPUT,
    N_LLAMA2C, // number of tensors of llama2.c's formats
    BQ = N_LLAMA2C,
    BK,
    BV,
    Q_NORM,
    K_NORM,
    ROPE_FACTORS,
    N_TENSORS
};

// For each tensor: its name in GGUF (per layer after "blk.<layer>."), the offset of its field in
// Layer or Weights, and its shape: V vocab_size, D dim, Q q_dim, K kv_dim, H head_dim, P pairs of a
// head, F hidden_dim. Vectors have one row.
static const struct {
    const char *name;
    bool per_layer;
    size_t place;
    char rows, cols;
} tensors[N_TENSORS] = {
    [TOKEN_EMBEDDING] = {"token_embd.weight", false, offsetof(Weights, token_embedding), 'V', 'D'},
    [ATTENTION_NORM] = {"attn_norm.weight", true, offsetof(Layer, attention_norm), '1', 'D'},
    [WQ] = {"attn_q.weight", true, offsetof(Layer, wq), 'Q', 'D'},
    [WK] = {"attn_k.weight", true, offsetof(Layer, wk), 'K', 'D'},
    [WV] = {"attn_v.weight", true, offsetof(Layer, wv), 'K', 'D'},
    [WO] = {"attn_output.weight", true, offsetof(Layer, wo), 'D', 'Q'},
    [FFN_NORM] = {"ffn_norm.weight", true, offsetof(Layer, ffn_norm), '1', 'D'},
    [W1] = {"ffn_gate.weight", true, offsetof(Layer, w1), 'F', 'D'},
    [W2] = {"ffn_down.weight", true, offsetof(Layer, w2), 'D', 'F'},
    [W3] = {"ffn_up.weight", true, offsetof(Layer, w3), 'F', 'D'},
    [NORM] = {"output_norm.weight", false, offsetof(Weights, norm), '1', 'D'},
    [OUTPUT] = {"output.weight", false, offsetof(Weights, output), 'V', 'D'},
    [BQ] = {"attn_q.bias", true, offsetof(Layer, bq), '1', 'Q'},
    [BK] = {"attn_k.bias", true, offsetof(Layer, bk), '1', 'K'},
    [BV] = {"attn_v.bias", true, offsetof(Layer, bv), '1', 'K'},
    [Q_NORM] = {"attn_q_norm.weight", true, offsetof(Layer, q_norm), '1', 'H'},
    [K_NORM] = {"attn_k_norm.weight", true, offsetof(Layer, k_norm), '1', 'H'},
    [ROPE_FACTORS] = {"rope_freqs.weight", false, offsetof(Weights, rope_factors), '1', 'P'},
};

static bool is_vector(int tensor) { return tensors[tensor].rows == '1'; }

static bool is_head_norm(int tensor) { return tensor == Q_NORM || tensor == K_NORM; }

// Returns whether a model of an architecture must have a tensor.
static bool is_needed(int tensor, int architecture) {
    return tensor < OUTPUT || (is_head_norm(tensor) && architecture == QWEN3);
}

// Returns whether a model of an architecture may have a tensor.
static bool is_known(int tensor, int architecture) {
    return tensor < N_TENSORS && (!is_head_norm(tensor) || architecture == QWEN3);
}

static Mat *place_of(Weights *w, int tensor, int layer) {
    char *base = tensors[tensor].per_layer ? (char *)&w->layers[layer] : (char *)w;
    return (Mat *)(base + tensors[tensor].place);
}

// Returns a tensor with its shape, without data.
static Mat shape_of(const Config *c, int tensor, Type type) {
    const int size[] = {
        ['1'] = 1,         ['V'] = c->vocab_size, ['D'] = c->dim,          ['Q'] = c->q_dim,
        ['K'] = c->kv_dim, ['H'] = c->head_dim,   ['P'] = c->head_dim / 2, ['F'] = c->hidden_dim};
    return (Mat){.type = type,
                 .rows = size[(int)tensors[tensor].rows],
                 .cols = size[(int)tensors[tensor].cols]};
}

// Returns the bytes of a tensor in the file.
static uint64_t bytes_of(const Mat *m) {
    uint64_t n = (uint64_t)m->rows * m->cols; // at most 2^44 by check_config
    BlockSize block = block_size(m->type);
    if (block.numbers) return n / block.numbers * block.bytes;
    return n + (n + m->group - 1) / m->group * 4; // INT8_GROUPS: a float32 scale for each group
}

enum { MAX_LAYERS = 1 << 12, MAX_HEAD_DIM = 1 << 13, MAX_Q_DIM = 1 << 22 };

// Checks the sizes and fills in q_dim and kv_dim. A head_dim of 0 becomes dim / n_heads. The limits
// keep the bytes of all layers together below 2^63.
static bool check_config(Config *c, Error *e) {
    const struct {
        const char *name;
        int value, max;
    } sizes[] = {
        {"dim", c->dim, 1 << 20},
        {"hidden_dim", c->hidden_dim, 1 << 22},
        {"n_layers", c->n_layers, MAX_LAYERS},
        {"n_heads", c->n_heads, c->dim},
        {"n_kv_heads", c->n_kv_heads, c->n_heads},
        {"vocab_size", c->vocab_size, 1 << 24},
        {"seq_len", c->seq_len, 1 << 24},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        CHECK(sizes[i].value >= 1 && sizes[i].value <= sizes[i].max, "%s is %d, expected 1 to %d",
              sizes[i].name, sizes[i].value, sizes[i].max);
    CHECK(c->head_dim || c->dim % c->n_heads == 0, "dim %d is not a multiple of n_heads %d", c->dim,
          c->n_heads);
    if (!c->head_dim) c->head_dim = c->dim / c->n_heads;
    CHECK(c->head_dim % 2 == 0, "the head size %d is odd, expected an even one", c->head_dim);
    CHECK(c->head_dim <= MAX_HEAD_DIM && c->n_heads <= MAX_Q_DIM / c->head_dim,
          "%d heads of %d numbers are too large, expected at most %d per head and %d in total",
          c->n_heads, c->head_dim, MAX_HEAD_DIM, MAX_Q_DIM);
    CHECK(c->n_heads % c->n_kv_heads == 0, "n_heads %d is not a multiple of n_kv_heads %d",
          c->n_heads, c->n_kv_heads);
    CHECK(c->norm_eps >= 0 && c->norm_eps < 1, "norm_eps is %g, expected 0 to 1", c->norm_eps);
    c->q_dim = c->n_heads * c->head_dim;
    c->kv_dim = c->n_kv_heads * c->head_dim;
    return true;
}

// The parameters of RoPE's frequencies.
typedef struct {
    double theta;  // pair i turns by theta^(-2i / head_dim) radians for each position
    double factor; // context extension: positions are divided by it
    int context;   // YaRN: training context in tokens, before the extension; 0: not YaRN
} Rope;

// Returns the share of the context extension that applies to pair i: 1 if the model has no YaRN.
// With YaRN (Peng 2023), it is 0 for pairs that turn 32 times or more within the training context,
// 1 for pairs that turn once or less, and grows linearly with i between them.
//
// Pair i turns n = context * theta^(-2i / head_dim) / (2 pi) times. Solved for i:
// i = head_dim / (2 log(theta)) * (log(context / (2 pi)) - log(n)).
static double stretch_of(const Rope *r, int head_dim, int i) {
    double pi = acos(-1), slope = head_dim / (2 * log(r->theta));
    double log_turns = log(r->context / (2 * pi)); // of pair 0
    double first = fmax(0, floor(slope * (log_turns - log(32))));
    // the bound is that of YaRN's own code, though the last pair is head_dim / 2 - 1
    double last = fmin(head_dim - 1, ceil(slope * log_turns));
    // without YaRN, context is 0, and the numbers above are not used
    return r->context ? fmin(1, fmax(0, (i - first) / fmax(1e-3, last - first))) : 1;
}

// Computes the frequencies and YaRN's scale of queries and keys. Call it after the rest of the
// model is loaded.
static bool set_rope(Model *m, const Rope *r, Error *e) {
    Config *c = &m->config;
    const float *factors = m->weights.rope_factors.data;
    double *f = m->weights.frequencies = resize(NULL, c->head_dim / 2, sizeof *f);
    CHECK(f, no_memory);
    CHECK(r->theta > 0 && isfinite(r->theta), "rope_theta is %g, expected more than 0", r->theta);
    CHECK(r->factor > 0 && isfinite(r->factor), "rope_scaling is %g, expected more than 0",
          r->factor);
    for (int i = 0; i < c->head_dim / 2; i++) {
        double stretch = stretch_of(r, c->head_dim, i), factor = factors ? factors[i] : 1;
        CHECK(factor > 0 && isfinite(factor),
              "factor %d of RoPE's frequencies is %g, expected more than 0", i, factor);
        f[i] = pow(r->theta, -2.0 * i / c->head_dim) / factor * (stretch / r->factor + 1 - stretch);
        CHECK(isfinite(f[i]), "RoPE's frequency %d is %g, expected a number", i, f[i]);
    }
    c->rope_scale = r->context && r->factor > 1 ? (float)(1 + 0.1 * log(r->factor)) : 1;
    return true;
}

// ----------------------------------------------------------------------------
// llama2.c's formats
//
// v0: 7 ints, float32 tensors.
// v1, v2: "ak42", version, 7 ints, flag of a tied classifier, group size (v2), zeros up to byte
// 256, tensors. The matrices of v2 are int8 groups, each matrix followed by its scales.

// Order of the tensors in v1 and v2. v0 has the order of the enum.
static const int order_v1[] = {
    ATTENTION_NORM, FFN_NORM, NORM, TOKEN_EMBEDDING, WQ, WK, WV, WO, W1, W2, W3, OUTPUT};

// Assigns the tensors, one after the other from bytes + at on, and returns the offset of their end.
// Before take_layers, it assigns nothing and only computes the end.
static uint64_t lay_out(Model *m, const uint8_t *bytes, uint64_t at, int version, int group,
                        bool tied) {
    for (int i = 0; i < N_LLAMA2C; i++) {
        int tensor = version ? order_v1[i] : i;
        Type type = version == 2 && !is_vector(tensor) ? INT8_GROUPS : F32;
        Mat mat = shape_of(&m->config, tensor, type);
        mat.group = mat.type == INT8_GROUPS ? group : 0;
        // v0 has tables of RoPE's cosines and sines before the classifier: skip them
        if (tensor == OUTPUT && version == 0)
            at += 4 * (uint64_t)m->config.seq_len * m->config.head_dim;
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

// Allocates the layers, whose tensors have no data yet.
static bool take_layers(Model *m, Error *e) {
    size_t n = m->config.n_layers;
    CHECK((m->weights.layers = resize(NULL, n, sizeof(Layer))), no_memory);
    memset(m->weights.layers, 0, n * sizeof(Layer));
    return true;
}

static bool load_llama2c(Model *m, const uint8_t *bytes, size_t size, Error *e) {
    int32_t version = 0, header[7], group = 0;
    uint32_t magic = 0;
    if (size >= 4) memcpy(&magic, bytes, 4);
    size_t at = magic == 0x616b3432 ? 8 : 0, start = at ? 256 : sizeof header;
    CHECK(size >= start, "%zu bytes are too few for a header", size);
    if (at) memcpy(&version, bytes + 4, 4);
    CHECK(!at || version == 1 || version == 2, "version %d of llama2.c's format, expected 1 or 2",
          version);
    memcpy(header, bytes + at, sizeof header);
    bool tied = header[5] > 0; // v0 marks an untied classifier by a negative vocabulary
    if (version == 0 && header[5] < 0 && header[5] > INT_MIN) header[5] = -header[5];
    if (version) tied = bytes[36];
    CHECK(!version || bytes[36] <= 1, "the flag of a tied classifier is %d, expected 0 or 1",
          bytes[36]);
    if (version == 2) memcpy(&group, bytes + 37, 4);
    CHECK(version != 2 || group > 0, "the group size is %d, expected 1 or more", group);

    m->config = (Config){.dim = header[0],
                         .hidden_dim = header[1],
                         .n_layers = header[2],
                         .n_heads = header[3],
                         .n_kv_heads = header[4],
                         .vocab_size = header[5],
                         .seq_len = header[6],
                         .norm_eps = 1e-5f};
    Error wrong;
    CHECK(check_config(&m->config, &wrong), "%s%s",
          version ? "" : "not a GGUF or llama2.c model; read as llama2.c's v0, ", wrong.text);
    uint64_t end = lay_out(m, bytes, start, version, group, tied);
    CHECK(end == size, "the file has %zu bytes, but its header needs %llu", size,
          (unsigned long long)end);
    TRY(take_layers(m, e));
    lay_out(m, bytes, start, version, group, tied);
    if (tied) m->weights.output = m->weights.token_embedding;
    return set_rope(m, &(Rope){.theta = 10000, .factor = 1}, e);
}

// ----------------------------------------------------------------------------
// GGUF: "GGUF", version, counts, metadata (key, type, value), tensors (name, shape, type, offset),
// padding, data

static bool gguf_rope(const Value *values, int seq_len, Rope *rope, Error *e) {
    String scaling = llamac_get_string(values, SCALING_TYPE);
    double theta, factor, scale;
    int context;
    TRY(llamac_get_number(values, ROPE_BASE, 10000, &theta, e));
    // SCALE_LINEAR is an older key for SCALING_FACTOR; if a file has both, they must agree
    TRY(llamac_get_number(values, SCALE_LINEAR, 1, &scale, e));
    TRY(llamac_get_number(values, SCALING_FACTOR, scale, &factor, e));
    CHECK(!values[SCALE_LINEAR].present || scale == factor, "%s is %g, but %s is %g",
          llamac_key(values, SCALING_FACTOR).s, factor, llamac_key(values, SCALE_LINEAR).s, scale);
    bool none = equals(scaling, "none"), yarn = equals(scaling, "yarn");
    CHECK(!scaling.n || none || yarn || equals(scaling, "linear"),
          "RoPE scaling '%.*s' is not supported, only linear and yarn (%s)", SHOWN(scaling, 40),
          llamac_key(values, SCALING_TYPE).s);
    TRY(llamac_get_int(values, SCALING_CONTEXT, seq_len, &context, e));
    CHECK(!yarn || context > 0, "%s is %d, expected 1 or more",
          llamac_key(values, SCALING_CONTEXT).s, context);
    *rope = (Rope){
        .theta = (float)theta, .factor = none ? 1 : (float)factor, .context = yarn ? context : 0};
    return true;
}

// Reads the width of heads, given or derived. Queries, keys and values must have the same width,
// and RoPE must rotate all of it.
static bool gguf_heads(const Value *values, Config *c, Error *e) {
    int values_width, rotated;
    TRY(llamac_get_int(values, KEY_LENGTH, 0, &c->head_dim, e));
    CHECK(!values[KEY_LENGTH].present || c->head_dim, "%s is 0, expected 2 or more",
          llamac_key(values, KEY_LENGTH).s);
    TRY(check_config(c, e));
    TRY(llamac_get_int(values, VALUE_LENGTH, c->dim / c->n_heads, &values_width, e));
    CHECK(values_width == c->head_dim,
          "%s is %d, but %s is %d: keys and values must have the same width",
          llamac_key(values, KEY_LENGTH).s, c->head_dim, llamac_key(values, VALUE_LENGTH).s,
          values_width);
    TRY(llamac_get_int(values, ROPE_DIMENSION, c->head_dim, &rotated, e));
    CHECK(rotated == c->head_dim, "%s is %d, expected the head size %d",
          llamac_key(values, ROPE_DIMENSION).s, rotated, c->head_dim);
    return true;
}

static bool gguf_config(const Value *values, Config *c, Error *e) {
    double eps;
    int version;
    // NAN: the key is required
    TRY(llamac_get_int(values, CONTEXT_LENGTH, NAN, &c->seq_len, e));
    TRY(llamac_get_int(values, EMBEDDING_LENGTH, NAN, &c->dim, e));
    TRY(llamac_get_int(values, BLOCK_COUNT, NAN, &c->n_layers, e));
    TRY(llamac_get_int(values, FEED_FORWARD_LENGTH, NAN, &c->hidden_dim, e));
    TRY(llamac_get_int(values, HEAD_COUNT, NAN, &c->n_heads, e));
    TRY(llamac_get_int(values, HEAD_COUNT_KV, c->n_heads, &c->n_kv_heads, e));
    TRY(llamac_get_int(values, VOCAB_SIZE,
                       values[TOKENS].present ? (double)values[TOKENS].count : NAN, &c->vocab_size,
                       e));
    TRY(llamac_get_number(values, NORM_EPS, NAN, &eps, e));
    c->norm_eps = (float)eps;
    // RoPE's pairs are (i, i + head_dim / 2), except in llama files: their converter reorders the
    // rows of each query and key head so that pairs are neighbours
    c->rope_halves = llamac_architecture(values) != LLAMA;
    TRY(gguf_heads(values, c, e));
    TRY(llamac_get_int(values, SLIDING_WINDOW, 0, &c->window, e));
    if (c->window >= c->seq_len) c->window = 0;
    // in other architectures only some layers have a window
    CHECK(!c->window || llamac_architecture(values) == LLAMA,
          "%s is %d, expected 0 or at least the context of %d",
          llamac_key(values, SLIDING_WINDOW).s, c->window, c->seq_len);
    TRY(llamac_get_int(values, QUANTIZATION_VERSION, 2, &version, e));
    CHECK(version == 2, "%s is %d, expected 2", llamac_key(values, QUANTIZATION_VERSION).s,
          version);
    return true;
}

// Returns the tensor with a name, and its layer (0 if it belongs to no layer); N_TENSORS if the
// name is unknown.
static int find_tensor(String name, const Config *c, int *layer) {
    *layer = 0;
    size_t at = 0;
    bool per_layer = name.n > 4 && memcmp(name.s, "blk.", 4) == 0;
    if (per_layer) {
        for (at = 4; at < name.n && name.s[at] >= '0' && name.s[at] <= '9' && *layer < c->n_layers;
             at++)
            *layer = 10 * *layer + name.s[at] - '0';
        if (at == 4 || at == name.n || name.s[at++] != '.' || *layer >= c->n_layers)
            return N_TENSORS;
    }
    int tensor = 0;
    while (tensor < N_TENSORS
           && (tensors[tensor].per_layer != per_layer
               || !equals((String){name.s + at, name.n - at}, tensors[tensor].name)))
        tensor++;
    return tensor;
}

const char *llamac_type_name(uint32_t type, char text[12]) {
    static const char *const names[] = {
        "F32",     "F16",          "Q4_0",    "Q4_1",         [6] = "Q5_0", "Q5_1",  "Q8_0",
        "Q8_1",    "Q2_K",         "Q3_K",    "Q4_K",         "Q5_K",       "Q6_K",  "Q8_K",
        "IQ2_XXS", "IQ2_XS",       "IQ3_XXS", "IQ1_S",        "IQ4_NL",     "IQ3_S", "IQ2_S",
        "IQ4_XS",  "I8",           "I16",     "I32",          "I64",        "F64",   "IQ1_M",
        "BF16",    [34] = "TQ1_0", "TQ2_0",   [39] = "MXFP4",
    };
    bool known = type < sizeof names / sizeof *names && names[type];
    snprintf(text, 12, "%u", type);
    return known ? names[type] : text;
}

// Reads the list of tensors. Each must be known and appear once, and no required tensor may be
// missing.
static bool check_list(Reader *r, const Config *c, int architecture, uint64_t count, Error *e) {
    bool seen[MAX_LAYERS][N_TENSORS] = {0};
    char text[32];
    for (uint64_t i = 0; i < count; i++) {
        String name = take_string(r);
        uint32_t n_dims = take_u32(r);
        int layer, tensor = find_tensor(name, c, &layer);
        CHECK(r->failed || (n_dims >= 1 && n_dims <= 4),
              "tensor '%.*s' has %u dimensions, expected 1 to 4", SHOWN(name, 64), n_dims);
        take(r, 8 * (uint64_t)n_dims);
        const char *type = llamac_type_name(take_u32(r), text);
        take_u64(r);
        CHECK(!r->failed, "the list of tensors is cut off");
        CHECK(is_known(tensor, architecture),
              "tensor '%.*s' (%s) is not part of the model that the metadata describes",
              SHOWN(name, 64), type);
        CHECK(!seen[layer][tensor], "tensor %.*s (%s) appears twice", SHOWN(name, 64), type);
        seen[layer][tensor] = true;
    }
    for (int layer = 0; layer < c->n_layers; layer++)
        for (int i = 0; i < N_TENSORS; i++) {
            if (seen[layer][i] || !is_needed(i, architecture) || (layer && !tensors[i].per_layer))
                continue;
            Mat mat = shape_of(c, i, F32);
            if (tensors[i].per_layer) snprintf(text, sizeof text, "blk.%d.", layer);
            return fail(e, "tensor %s%s (%d x %d) is missing", tensors[i].per_layer ? text : "",
                        tensors[i].name, mat.rows, mat.cols);
        }
    return true;
}

// Reads one entry of the list of tensors. Offsets count from the start of the data, and tensors
// must follow each other without gaps except for alignment, so they cannot overlap. *end is the end
// of the previous tensor, and becomes that of this one.
static bool take_tensor(Reader *r, Model *m, uint32_t alignment, uint64_t *end, Error *e) {
    String name = take_string(r);
    uint32_t n_dims = take_u32(r);
    uint64_t dims[4] = {1, 1, 1, 1};
    for (uint32_t i = 0; i < n_dims; i++) dims[i] = take_u64(r);
    uint32_t type = take_u32(r);
    uint64_t offset = take_u64(r);
    char text[12];
    int layer, tensor = find_tensor(name, &m->config, &layer);
    BlockSize block = block_size(type);
    CHECK(is_vector(tensor) ? type == F32 : block.numbers, "tensor %.*s has type %s, expected %s",
          SHOWN(name, 64), llamac_type_name(type, text), is_vector(tensor) ? "F32" : GGUF_TYPES);
    Mat mat = shape_of(&m->config, tensor, type);
    CHECK(dims[0] == (uint64_t)mat.cols && dims[1] == (uint64_t)mat.rows && dims[2] == 1
              && dims[3] == 1,
          "tensor %.*s is %llu x %llu, expected %d x %d", SHOWN(name, 64),
          (unsigned long long)dims[1], (unsigned long long)dims[0], mat.rows, mat.cols);
    CHECK(mat.cols % block.numbers == 0,
          "tensor %.*s: rows of %d numbers do not split into blocks of %d", SHOWN(name, 64),
          mat.cols, block.numbers);
    uint64_t expected = (*end + alignment - 1) / alignment * alignment;
    CHECK(offset == expected, "tensor %.*s has offset %llu, expected %llu", SHOWN(name, 64),
          (unsigned long long)offset, (unsigned long long)expected);
    *end = offset + bytes_of(&mat);
    CHECK(*end <= m->data_size, "tensor %.*s runs past the end of the file", SHOWN(name, 64));
    mat.data = m->data + offset;
    *place_of(&m->weights, tensor, layer) = mat;
    return true;
}

static bool gguf_tensors(Reader *r, Model *m, int architecture, uint64_t count, uint32_t alignment,
                         Error *e) {
    Reader after_list = *r; // check_list moves it past the list; take_tensor reads the list with r
    uint64_t end = 0;
    TRY(check_list(&after_list, &m->config, architecture, count, e));
    size_t start = (after_list.at + alignment - 1) / alignment * alignment;
    CHECK(start <= r->size, "the file ends before its data");
    m->list = r->bytes + r->at, m->list_size = after_list.at - r->at;
    m->data = r->bytes + start, m->data_size = r->size - start;
    TRY(take_layers(m, e));
    for (uint64_t i = 0; i < count; i++) TRY(take_tensor(r, m, alignment, &end, e));
    uint64_t padded = (end + alignment - 1) / alignment * alignment;
    CHECK(m->data_size == end || m->data_size == padded, "%llu bytes follow the last tensor",
          (unsigned long long)(m->data_size - end));
    if (!m->weights.output.data) m->weights.output = m->weights.token_embedding;
    return true;
}

// Loads a GGUF file: the model, and its tokenizer if there is one and t is not NULL.
static bool load_gguf(Model *m, Tokenizer *t, const uint8_t *bytes, size_t size, Error *e) {
    Reader r = {.bytes = bytes, .size = size};
    Value values[N_KEYS] = {0};
    take(&r, 4); // "GGUF", checked by the caller
    uint32_t version = take_u32(&r);
    uint64_t n_tensors = take_u64(&r), n_values = take_u64(&r);
    CHECK(!r.failed, "%zu bytes are too few for a header", size);
    // a big-endian file, which only version 3 allows, has its version in reverse byte order
    CHECK(version == 2 || version == 3, "GGUF version %u, expected 2 or 3", version);
    TRY(llamac_take_metadata(&r, n_values, values, e));
    int alignment;
    TRY(llamac_get_int(values, ALIGNMENT, 32, &alignment, e));
    CHECK(alignment >= 8 && alignment <= 1 << 16 && (alignment & (alignment - 1)) == 0,
          "the alignment is %d, expected a power of two from 8", alignment);
    Rope rope;
    TRY(gguf_config(values, &m->config, e));
    TRY(gguf_rope(values, m->config.seq_len, &rope, e));
    TRY(gguf_tensors(&r, m, llamac_architecture(values), n_tensors, alignment, e));
    TRY(set_rope(m, &rope, e));
    const char **checksums[] = {&m->sha256, &m->list_sha256}; // keys CHECKSUM, LIST_CHECKSUM
    for (int i = 0; i < 2; i++) {
        String checksum = llamac_get_string(values, CHECKSUM + i);
        CHECK(checksum.n == 0 || checksum.n == 64, "its checksum has %zu digits, expected 64",
              checksum.n);
        *checksums[i] = checksum.n ? checksum.s : NULL;
    }
    return !t || !values[TOKENIZER].present
           || llamac_gguf_tokenizer(t, values, m->config.vocab_size, e);
}

bool llamac_load(llamac_model *m, const uint8_t *bytes, size_t size, int flags, Error *e) {
    Tokenizer *t = flags & LLAMAC_NO_TOKENIZER ? NULL : &m->tokenizer;
    bool gguf = size >= 4 && memcmp(bytes, "GGUF", 4) == 0;
    m->stop = -1;
    return gguf ? load_gguf(&m->transformer, t, bytes, size, e)
                : load_llama2c(&m->transformer, bytes, size, e);
}

// ----------------------------------------------------------------------------
// Checksums

// Computes the SHA-256 of n bytes as hexadecimal digits.
static void sha256(const uint8_t *bytes, size_t n, char hex[65]) {
    uint8_t digest[SHA256_BYTES];
    Sha256 sha = llamac_sha256_begin();
    llamac_sha256_add(&sha, bytes, n);
    llamac_sha256_end(&sha, digest);
    for (int i = 0; i < SHA256_BYTES; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

// Returns whether the file has a checksum of the list of tensors that matches the list. A program
// that rewrites the tensors, such as in another type, copies metadata that it does not know, such
// as the checksums. So if the list does not match, the checksum of the weights is stale too.
static bool list_is_unchanged(const Model *m) {
    char found[65];
    if (m->list_sha256) sha256(m->list, m->list_size, found);
    return m->list_sha256 && !memcmp(found, m->list_sha256, 64);
}

static bool verify(const Model *m, Error *e) {
    char found[65];
    CHECK(m->sha256, "it has no checksum; GGUF files from export.py have one");
    CHECK(!m->list_sha256 || list_is_unchanged(m),
          "its weights cannot be verified: the checksum belongs to another file, from which a "
          "program such as llama-quantize copied it");
    sha256(m->data, m->data_size, found);
    CHECK(!memcmp(found, m->sha256, 64), "its weights are damaged%s: SHA-256 %.64s, expected %.64s",
          m->list_sha256 ? "" : ", or another program wrote them", found, m->sha256);
    return true;
}

bool llamac_verify(const llamac_model *m, Error *e) {
    clear(e);
    CHECK(m, no_model);
    return verify(&m->transformer, e) || llamac_name_file(m->path, e); // the latter returns false
}

// ----------------------------------------------------------------------------
// Identity

// Adds a number as four bytes, the lowest first.
static void add_number(Sha256 *sha, uint32_t number) { llamac_sha256_add(sha, &number, 4); }

static void add_float(Sha256 *sha, double x) {
    float rounded = (float)x;
    llamac_sha256_add(sha, &rounded, 4);
}

// Adds SAMPLES evenly spaced samples of the bytes, from the first byte to the last, or all bytes if
// the samples would not be fewer. Reading everything would take as long as loading the model.
static void add_samples(Sha256 *sha, const void *bytes, uint64_t n) {
    enum { SAMPLES = 8, SAMPLE = 64 }; // SAMPLE in bytes
    if (n <= SAMPLES * SAMPLE) {
        llamac_sha256_add(sha, bytes, n);
        return;
    }
    for (int i = 0; i < SAMPLES; i++)
        llamac_sha256_add(sha, (const uint8_t *)bytes + (n - SAMPLE) * i / (SAMPLES - 1), SAMPLE);
}

static void add_tensor(Sha256 *sha, const Mat *m) {
    uint64_t size = bytes_of(m), numbers = (uint64_t)m->rows * m->cols;
    add_number(sha, m->type), add_number(sha, m->rows), add_number(sha, m->cols);
    if (m->type == INT8_GROUPS) {
        add_samples(sha, m->scales, size - numbers);
        size = numbers;
    }
    add_samples(sha, m->data, size);
}

void llamac_identify(const Model *m, uint8_t identity[SHA256_BYTES]) {
    const Config *c = &m->config;
    const int sizes[] = {c->dim,        c->hidden_dim, c->n_layers, c->n_heads, c->n_kv_heads,
                         c->vocab_size, c->seq_len,    c->head_dim, c->window,  c->rope_halves};
    Sha256 sha = llamac_sha256_begin();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) add_number(&sha, sizes[i]);
    add_float(&sha, c->norm_eps), add_float(&sha, c->rope_scale);
    // rounded, because the last bits of a double differ between math libraries
    for (int i = 0; i < c->head_dim / 2; i++) add_float(&sha, m->weights.frequencies[i]);
    if (m->sha256) llamac_sha256_add(&sha, m->sha256, 64);
    if (m->list_sha256) llamac_sha256_add(&sha, m->list_sha256, 64);
    // also with checksums, which may be stale (see list_is_unchanged)
    for (int i = 0; i < N_TENSORS; i++)
        for (int layer = 0; layer < (tensors[i].per_layer ? c->n_layers : 1); layer++) {
            const Mat *mat = place_of((Weights *)&m->weights, i, layer);
            if (mat->data) add_tensor(&sha, mat);
        }
    llamac_sha256_end(&sha, identity);
}

// ----------------------------------------------------------------------------
// Zeros: an interrupted download may have its full size, with zeros in place of the missing data

// Drops bytes from memory if the model is streamed, because they must not accumulate there.
static void forget(const Model *m, const void *bytes, size_t n) {
    if (m->stream) llamac_drop_pages(bytes, (const uint8_t *)bytes + n);
}

static bool all_zeros(const uint8_t *bytes, size_t n) {
    return n && !*bytes && !memcmp(bytes, bytes + 1, n - 1);
}

// Returns whether any sample of the weights is all zeros. The samples are the first 256 bytes of
// every 64 KiB and the last 256, because reading everything would make loading slow.
static bool has_zeros(const Model *m) {
    const size_t sample = 256, every = 1 << 16, kept = 1 << 20; // bytes
    for (size_t at = 0; at + sample <= m->data_size; at += every) {
        if (all_zeros(m->data + at, sample)) return true;
        if (at && at % kept == 0) forget(m, m->data + at - kept, kept);
    }
    return m->data_size >= sample && all_zeros(m->data + m->data_size - sample, sample);
}

// Returns whether a tensor must contain a number other than 0. Biases may be initialized with
// zeros, and so may the classifier and the matrices that add to the residual stream.
static bool is_never_zero(int tensor) {
    return tensor < BQ ? tensor != WO && tensor != W2 && tensor != OUTPUT : is_head_norm(tensor);
}

// Refuses a model with zeros in place of weights. A sample of zeros is not proof, since a model may
// have rows of zeros: if the file has a checksum of its weights that is not stale, that checksum
// alone decides. Without such a sample or such a checksum, refuses the model only if a tensor that
// must contain other numbers is all zeros.
static bool refuse_zeros(const Model *m, Error *e) {
    if (m->sha256 && list_is_unchanged(m) && has_zeros(m)) return verify(m, e);
    for (int i = 0; i < N_TENSORS; i++) {
        if (!is_never_zero(i)) continue;
        for (int layer = 0; layer < (tensors[i].per_layer ? m->config.n_layers : 1); layer++) {
            const Mat *mat = place_of((Weights *)&m->weights, i, layer);
            char where[32] = "";
            if (tensors[i].per_layer) snprintf(where, sizeof where, " of layer %d", layer);
            CHECK(!mat->data || !all_zeros(mat->data, bytes_of(mat)),
                  "%s%s contains only zeros: the file is damaged, for example by an incomplete "
                  "download",
                  tensors[i].name, where);
            forget(m, mat->data, mat->data ? bytes_of(mat) : 0);
        }
    }
    return true;
}

// ----------------------------------------------------------------------------
// Opening and closing

bool llamac_name_file(const char *path, Error *e) {
    return e && *path ? fail(e, "%.*s: %s", MAX_SHOWN_PATH, path, e->text) : false;
}

// Opens the model in the bytes of a file. `file` is the file if it is mapped, else NULL.
static llamac_model *open_bytes(const uint8_t *bytes, size_t size, const File *file, int flags,
                                Error *e) {
    llamac_model *m = calloc(1, sizeof *m);
    if (!m) return fail(e, no_memory), NULL;
    if (file) m->file = *file, m->transformer.file = &m->file;
    m->transformer.stream = flags & LLAMAC_STREAM;
    if (llamac_load(m, bytes, size, flags, e) && refuse_zeros(&m->transformer, e)) return m;
    m->file = (File){0}; // the caller unmaps it
    return llamac_close(m), NULL;
}

static bool check_flags(int flags, Error *e) {
    CHECK(!(flags & ~(LLAMAC_NO_TOKENIZER | LLAMAC_STREAM)),
          "flags are %d, expected a sum of LLAMAC_NO_TOKENIZER and LLAMAC_STREAM, or 0", flags);
    return true;
}

llamac_model *llamac_open_memory(const void *bytes, size_t size, int flags, Error *e) {
    clear(e);
    if (!bytes) return fail(e, "the file's bytes are NULL"), NULL;
    if ((uintptr_t)bytes % 8)
        return fail(e,
                    "the file's bytes are not aligned, expected an address such as malloc returns"),
               NULL;
    if (!check_flags(flags, e)) return NULL;
    if (flags & LLAMAC_STREAM)
        return fail(e, "a model in memory cannot be streamed, expected the path of its file"), NULL;
    return open_bytes(bytes, size, NULL, flags, e);
}

llamac_model *llamac_open(const char *path, int flags, Error *e) {
    File file;
    clear(e);
    if (!check_flags(flags, e) || !llamac_map_file(path, &file, e))
        return llamac_name_file(path ? path : "", e), NULL;
    llamac_model *m = open_bytes(file.bytes, file.size, &file, flags, e);
    if (!m) return llamac_unmap(&file), llamac_name_file(path, e), NULL;
    snprintf(m->path, sizeof m->path, "%s", path);
    return m;
}

bool llamac_open_tokenizer(llamac_model *m, const char *path, Error *e) {
    File file;
    Tokenizer t = {0};
    clear(e);
    CHECK(m, no_model);
    if (!llamac_map_file(path, &file, e)) return llamac_name_file(path ? path : "", e);
    if (!llamac_bin_tokenizer(&t, file.bytes, file.size, m->transformer.config.vocab_size, e)) {
        llamac_free_tokenizer(&t);
        llamac_unmap(&file);
        return llamac_name_file(path, e);
    }
    llamac_free_tokenizer(&m->tokenizer);
    llamac_unmap(&m->tokenizer_file);
    m->tokenizer = t, m->tokenizer_file = file, m->chat = NULL, m->stop = -1;
    return true;
}

void llamac_close(llamac_model *m) {
    if (!m) return;
    llamac_free_tokenizer(&m->tokenizer);
    free(m->transformer.weights.layers);
    free(m->transformer.weights.frequencies);
    free(m->chat_system.s);
    llamac_unmap(&m->tokenizer_file);
    llamac_unmap(&m->file);
    free(m);
}

static llamac_info info_of(const llamac_model *m) {
    if (!m) return (llamac_info){.bos = -1, .eos = -1, .eot = -1};
    const Config *c = &m->transformer.config;
    const Tokenizer *t = &m->tokenizer;
    llamac_info info = {.dim = c->dim,
                        .hidden_dim = c->hidden_dim,
                        .n_layers = c->n_layers,
                        .n_heads = c->n_heads,
                        .n_kv_heads = c->n_kv_heads,
                        .vocab_size = c->vocab_size,
                        .seq_len = c->seq_len,
                        .has_tokenizer = t->pieces,
                        .bos = -1,
                        .eos = -1,
                        .eot = -1};
    if (t->pieces)
        info.add_bos = t->add_bos, info.bos = t->bos, info.eos = t->eos, info.eot = t->eot;
    return info;
}

void llamac_describe_sized(const llamac_model *m, llamac_info *info, size_t size) {
    const llamac_info known = info_of(m);
    memset(info, 0, size); // also the fields that this library does not know
    memcpy(info, &known, size < sizeof known ? size : sizeof known);
}

uint64_t llamac_weight_bytes(const Model *m, const uint8_t **first) {
    uint64_t n = 0;
    // The embedding is left out, since a token reads only one row of it. If it is also the
    // classifier (tied), it is counted as `output`.
    *first = m->weights.output.data;
    for (int i = ATTENTION_NORM; i < N_TENSORS; i++)
        for (int layer = 0; layer < (tensors[i].per_layer ? m->config.n_layers : 1); layer++) {
            const Mat *mat = place_of((Weights *)&m->weights, i, layer);
            if (!mat->data) continue;
            n += bytes_of(mat);
            if ((const uint8_t *)mat->data < *first) *first = mat->data;
        }
    return n;
}

double llamac_bytes_per_token(const llamac_model *m) {
    const uint8_t *first;
    return m ? llamac_weight_bytes(&m->transformer, &first) : 0;
}

// RoPE, the KV cache, and attention of one token or of many.
#include "cpu.h"

// ----------------------------------------------------------------------------
// RoPE

// The indices in a head of the two numbers that pair i rotates.
static int first_of_pair(const Config *c, int i) { return c->rope_halves ? i : 2 * i; }
static int second_of_pair(const Config *c, int i) {
    return c->rope_halves ? i + c->head_dim / 2 : 2 * i + 1;
}

// Angles (position * frequency) are in double precision: at position 2000, a float would be off by
// 1e-4 radians.
void llamac_extend_rotations(Cpu *cpu, int positions) {
    const Config *c = &cpu->config;
    for (; cpu->n_rotations < positions; cpu->n_rotations++) {
        float *cosines = cpu->rotation + (size_t)cpu->n_rotations * 2 * c->head_dim;
        float *sines = cosines + c->head_dim;
        for (int i = 0; i < c->head_dim / 2; i++) {
            int first = first_of_pair(c, i), second = second_of_pair(c, i);
            double angle = cpu->n_rotations * cpu->model->weights.frequencies[i];
            float sine = (float)(c->rope_scale * sin(angle));
            cosines[first] = cosines[second] = (float)(c->rope_scale * cos(angle));
            sines[first] = -sine, sines[second] = sine;
        }
    }
}

// ----------------------------------------------------------------------------
// The KV cache. Keys are stored in tiles (head_dim, TILE) with a column for each of TILE positions,
// values in rows (value_width,), one for each position

// The keys and values of one KV head of a layer from a position on, as a view into the cache.
typedef struct {
    char *keys, *values;
    float *key_scales, *value_scales; // NULL if the cache has no scales
} CachedHead;

// Returns the view from position `pos` on, which is a multiple of TILE.
static CachedHead cache_at(const Cpu *cpu, int layer, int head, int pos) {
    size_t size = number_size(cpu->kv_type), index = layer * (size_t)cpu->config.n_kv_heads + head;
    size_t row = index * cpu->positions + pos, width = cpu->value_width;
    size_t key_row = index * round_up_to_tile(cpu->positions) + pos;
    CachedHead c = {cpu->keys + key_row * cpu->config.head_dim * size,
                    cpu->values + row * width * size, NULL, NULL};
    if (cpu->key_scales)
        c.key_scales = cpu->key_scales + row, c.value_scales = cpu->value_scales + row;
    return c;
}

// Quantises x (n,) to 8 bits. Returns the scale, which is NaN if a number of x is not finite.
static float to_bytes(int8_t *out, const float *x, int n) {
    float max = 0, poison = 0;
    for (int i = 0; i < n; i++) {
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
        poison += 0 * x[i]; // NaN if x[i] is NaN or infinity
    }
    float inverse = max > 1e-30f ? 127 / max : 0;
    for (int i = 0; i < n; i++) {
        // the sum is so large that its lowest bits are the rounded integer
        float rounded = x[i] * inverse + 0x1.8p23f;
        int32_t bits;
        memcpy(&bits, &rounded, 4);
        out[i] = (int8_t)bits;
    }
    return max / 127 + poison;
}

// Writes the key and the value of a KV head of token t to the cache.
static void store_in_cache(Cpu *cpu, int layer, int head, int t, float *scratch) {
    const Config *c = &cpu->config;
    const Kernels *kernels = cpu->kernels;
    int n = c->head_dim, pos = cpu->pos + t, slot = pos % TILE; // the key's column in its tile
    size_t from = (size_t)t * c->kv_dim + head * n;
    const float *k = cpu->k + from, *v = cpu->v + from;
    CachedHead to = cache_at(cpu, layer, head, pos - slot);
    void *value = to.values + (size_t)slot * cpu->value_width * number_size(cpu->kv_type);
    void *key = scratch;
    if (cpu->kv_type == INT8_GROUPS) {
        to.key_scales[slot] = to_bytes(key, k, n);
        to.value_scales[slot] = to_bytes(value, v, n);
        for (int i = 0; i < n; i++) ((int8_t *)to.keys)[i * TILE + slot] = ((int8_t *)key)[i];
    } else if (cpu->kv_type == F16) {
        kernels->halves(key, k, n), kernels->halves(value, v, n);
        for (int i = 0; i < n; i++) ((uint16_t *)to.keys)[i * TILE + slot] = ((uint16_t *)key)[i];
    } else {
        memcpy(value, v, n * sizeof(float));
        for (int i = 0; i < n; i++) ((float *)to.keys)[i * TILE + slot] = k[i];
    }
}

// ----------------------------------------------------------------------------
// Finishing queries, keys and values after their products: bias, RMSNorm, RoPE, cache

typedef struct {
    float *out; // (T, q_dim)
    const Layer *w;
    int layer, T;
    int span;    // max tokens of a span, see attention_spans
    bool cached; // an earlier step has finished the queries and filled the cache
} AttentionArgs;

// Adds the bias of a head, if there is one, to x (head_dim,).
static void add_bias(const Cpu *cpu, float *x, const Mat *bias, int head) {
    int n = cpu->config.head_dim;
    if (bias->data) put_row(x, (const float *)bias->data + head * n, n, /*add*/ true);
}

// Applies bias, RMSNorm and RoPE to x (head_dim,), the query or key of a head at a position.
static void finish_head(const Cpu *cpu, float *x, const Mat *bias, const Mat *norm, int head,
                        int pos) {
    int n = cpu->config.head_dim;
    const float *rotation = cpu->rotation + (size_t)pos * 2 * n;
    add_bias(cpu, x, bias, head);
    if (norm->data) normalize(cpu, x, x, norm->data, n);
    if (cpu->config.rope_halves) cpu->kernels->rotate_halves(x, rotation, n);
    else cpu->kernels->rotate(x, rotation, n);
}

// Finishes the key, the value and the queries of a KV head of token t, and stores key and value in
// the cache.
static void finish_token(Cpu *cpu, const AttentionArgs *a, int head, int t, float *scratch) {
    const Config *c = &cpu->config;
    const Layer *w = a->w;
    int shared = c->n_heads / c->n_kv_heads, pos = cpu->pos + t;
    float *q = cpu->q + (size_t)t * c->q_dim;
    size_t at = (size_t)t * c->kv_dim + head * c->head_dim;
    for (int i = head * shared; i < (head + 1) * shared; i++)
        finish_head(cpu, q + i * c->head_dim, &w->bq, &w->q_norm, i, pos);
    finish_head(cpu, cpu->k + at, &w->bk, &w->k_norm, head, pos);
    add_bias(cpu, cpu->v + at, &w->bv, head);
    store_in_cache(cpu, a->layer, head, t, scratch);
}

// A Task. Items are tokens. The outer loop is over heads, because the keys of TILE tokens of a head
// share cache lines.
static void finish_tokens(Worker *self, const void *args, int begin, int end) {
    for (int head = 0; head < self->cpu->config.n_kv_heads; head++)
        for (int t = begin; t < end; t++) finish_token(self->cpu, args, head, t, self->scratch);
}

// Returns the first position that the token at `pos` attends to, 0 unless there is a sliding
// window.
static int first_visible(const Cpu *cpu, int pos) {
    int window = cpu->config.window;
    return window && pos >= window ? pos - window + 1 : 0;
}

// ----------------------------------------------------------------------------
// Attention in groups of up to QUERIES queries that use the same KV head, so that its keys and
// values are loaded once for the group. With one token, a group is some of the query heads that
// share the KV head. With several tokens, each query head must have its own KV head, and a group is
// consecutive tokens of the head; there must be no sliding window, so that the positions that the
// queries of a group attend to begin at the same one

// Query i of a group attends to positions begin..end + i * more - 1, counted from the first one in
// Attention.keys. `more` is 1 if the queries are consecutive tokens, 0 if they are heads of one
// token.
typedef struct { int begin, end, more; } Visible;

// Computes the attention of the queries of one group. Writes the result of query i to
// out + i * q_stride.
static void attend(const Kernels *k, const Attention *a, Visible v, float *out) {
    float sums[QUERIES];
    k->scores(a);
    for (int i = 0; i < a->n_queries; i++) {
        float *p = a->p + i * a->p_stride, *scores = p + v.begin;
        int end = v.end + i * v.more, count = end - v.begin;
        if (a->key_scales) k->multiply(scores, a->key_scales + v.begin, count);
        sums[i] = k->exponentials(scores, k->largest(scores, count), 1 / sqrtf(a->head_dim), count);
        if (a->value_scales) k->multiply(scores, a->value_scales + v.begin, count);
        // mix adds the values of all a->n positions for every query: the others get weight 0
        memset(p, 0, v.begin * sizeof *p);
        memset(p + end, 0, (a->n - end) * sizeof *p);
    }
    k->mix(a);
    for (int i = 0; i < a->n_queries; i++)
        for (int j = 0; j < a->head_dim; j++)
            out[i * a->q_stride + j] = a->out[i * a->width + j] / sums[i];
}

// Returns how many groups of up to QUERIES queries a KV head has in a call with T tokens.
static int query_groups(const Cpu *cpu, int T) {
    return (cpu->config.n_heads / cpu->config.n_kv_heads * T + QUERIES - 1) / QUERIES;
}

// A Task. Items are groups of queries, all groups of one KV head after the other.
static void attention_groups(Worker *self, const void *args, int begin, int end) {
    const AttentionArgs *a = args;
    Cpu *cpu = self->cpu;
    const Config *c = &cpu->config;
    int shared = c->n_heads / c->n_kv_heads, groups = query_groups(cpu, a->T), more = a->T > 1;
    size_t p_stride = round_up_to_tile(cpu->positions);
    int start = first_visible(cpu, cpu->pos), from = start / TILE * TILE; // positions
    for (int item = begin; item < end; item++) {
        int head = item / groups, first = item % groups * QUERIES; // first query of the group
        int left = shared * a->T - first, n = left < QUERIES ? left : QUERIES;
        int t = more ? first : 0, query_head = head * shared + (more ? 0 : first);
        int visible_end = cpu->pos + t + 1 - from; // for the first query of the group
        size_t at = (size_t)t * c->q_dim + (size_t)query_head * c->head_dim;
        if (!a->cached) finish_token(cpu, a, head, 0, self->scratch);
        CachedHead kv = cache_at(cpu, a->layer, head, from);
        Attention queries = {.q = cpu->q + at,
                             .q_stride = more ? c->q_dim : c->head_dim,
                             .n_queries = n,
                             .p = self->scratch,
                             .p_stride = p_stride,
                             .out = self->scratch + QUERIES * p_stride,
                             .keys = kv.keys,
                             .values = kv.values,
                             .key_scales = kv.key_scales,
                             .value_scales = kv.value_scales,
                             .type = cpu->kv_type,
                             .head_dim = c->head_dim,
                             .width = cpu->value_width,
                             .n = visible_end + more * (n - 1)};
        attend(cpu->kernels, &queries, (Visible){start - from, visible_end, more}, a->out + at);
    }
}

// ----------------------------------------------------------------------------
// Attention in spans: up to SPAN consecutive tokens of one query head. A span processes positions
// in ranges of KV_RANGE, whose keys and values are loaded once for all its tokens. When a range has
// a larger score than the ranges before, the sums of the token so far are scaled down (online
// softmax, Milakov 2018)

enum { SPAN = CHUNK, KV_RANGE = 512 };

// Returns the max tokens of a span: halved from SPAN until there are two spans for each thread, but
// at least SPAN / 4, because shorter spans would load keys and values too often.
static int span_of(const Cpu *cpu, int T) {
    int span = SPAN, heads = cpu->config.n_heads, min_items = 2 * cpu->pool.n_threads;
    while (span > SPAN / 4 && heads * ((T + span - 1) / span) < min_items) span /= 2;
    return span;
}

// The arrays of a span. A panel is Kernels.queries consecutive tokens of the span, which a kernel
// processes at once.
typedef struct {
    float *q;         // (panels, head_dim, queries of a panel)
    float *out;       // (SPAN, value_width) sums of the values, weighted with exp(score - max)
    float *max, *sum; // (SPAN,) largest score and sum of the weights so far
    float *scores;    // (queries, KV_RANGE) of a panel: scores, then the weights
    float *p;         // (KV_RANGE, queries) the weights, transposed
} Span;

// Returns the arrays of a span, one after the other in scratch. Unless `size` is NULL, sets *size
// to their number of floats. Arrays of tokens have room for a panel that extends beyond the span.
static Span span_in(const Cpu *cpu, float *scratch, size_t *size) {
    int queries = cpu->kernels->queries, tokens = SPAN + queries;
    Span s = {.q = scratch};
    s.out = s.q + tokens * cpu->config.head_dim;
    s.scores = s.out + tokens * cpu->value_width;
    s.p = s.scores + KV_RANGE * queries;
    s.max = s.p + KV_RANGE * queries;
    s.sum = s.max + tokens;
    if (size) *size = s.sum + tokens - scratch;
    return s;
}

// Copies the queries of n tokens of a head, from token t on, to a panel (head_dim, queries). If n
// is less than Kernels.queries, fills the rest with zeros.
static void load_queries(const Cpu *cpu, float *panel, int head, int t, int n) {
    const Config *c = &cpu->config;
    size_t stride = c->q_dim;
    const float *q = cpu->q + t * stride + (size_t)head * c->head_dim;
    int queries = cpu->kernels->queries;
    if (n == queries) {
        cpu->kernels->transpose((uint8_t *)panel, (const uint8_t *)q, 4 * stride, queries,
                                c->head_dim);
        return;
    }
    for (int d = 0; d < c->head_dim; d++)
        for (int i = 0; i < queries; i++) panel[d * queries + i] = i < n ? q[i * stride + d] : 0;
}

// Turns the scores of token t of the span for a range of n positions into weights. The token
// attends to the first `visible` positions of the range, except those before its sliding window.
static void weigh(const Cpu *cpu, const Span *s, int t, const CachedHead *kv, int visible, int n) {
    const Kernels *k = cpu->kernels;
    float *scores = s->scores + t % k->queries * KV_RANGE;
    int end = visible < 0 ? 0 : visible < n ? visible : n;
    // counted from the begin of the range, the token's position is visible - 1, which may be
    // negative, and the first `hidden` positions precede its sliding window
    int hidden = first_visible(cpu, visible - 1), count = end - hidden;
    if (count <= 0) hidden = end = 0;
    memset(scores, 0, hidden * sizeof *scores);
    memset(scores + end, 0, (n - end) * sizeof *scores);
    if (count <= 0) return;
    scores += hidden;
    if (kv->key_scales) k->multiply(scores, kv->key_scales + hidden, count);
    float largest = k->largest(scores, count), scale = 1 / sqrtf(cpu->config.head_dim);
    if (!(largest <= s->max[t])) { // `largest` is larger, or NaN
        float shrink = expf((s->max[t] - largest) * scale);
        float *out = s->out + (size_t)t * cpu->value_width;
        s->max[t] = largest, s->sum[t] *= shrink;
        for (int d = 0; d < cpu->value_width; d++) out[d] *= shrink;
    }
    s->sum[t] += k->exponentials(scores, s->max[t], scale, count);
    if (kv->value_scales) k->multiply(scores, kv->value_scales + hidden, count);
}

// Adds a range of n positions to the attention of one panel, which begins with token t of the span.
// Token t attends to the first `visible` positions of the range, each next token to one more.
static void attend_panel(const Cpu *cpu, const Span *s, int t, const CachedHead *kv, int visible,
                         int n) {
    const Kernels *k = cpu->kernels;
    size_t dim = cpu->config.head_dim, width = cpu->value_width;
    int queries = k->queries, last = visible + queries - 1;
    n = last < n ? last : n;
    if (n <= 0) return;
    PanelProduct scores = {.y = s->scores,
                           .w = kv->keys,
                           .x = s->q + t * dim,
                           .y_stride = KV_RANGE,
                           .next = dim * TILE, // a tile has the keys of TILE positions
                           .column = TILE,     // a column has one dimension of them
                           .tiles = round_up_to_tile(n) / TILE,
                           .cols = (int)dim,
                           .type = cpu->kv_type};
    k->panel_product(&scores);
    for (int i = 0; i < queries; i++) weigh(cpu, s, t + i, kv, visible + i, n);
    if (queries > 1)
        k->transpose((uint8_t *)s->p, (const uint8_t *)s->scores, KV_RANGE * sizeof(float), queries,
                     n);
    PanelProduct mix = {.y = s->out + t * width,
                        .w = kv->values,
                        .x = queries > 1 ? s->p : s->scores,
                        .y_stride = width,
                        .next = TILE,    // a tile has TILE dimensions of the values
                        .column = width, // a column has one position of them
                        .tiles = (int)width / TILE,
                        .cols = n,
                        .add = true,
                        .type = cpu->kv_type};
    k->panel_product(&mix);
}

// Computes the attention of one span: tokens t..t+tokens-1 of a query head.
static void attend_span(const Cpu *cpu, const AttentionArgs *a, const Span *s, int head, int t,
                        int tokens) {
    const Config *c = &cpu->config;
    size_t width = cpu->value_width;
    int queries = cpu->kernels->queries, kv_head = head / (c->n_heads / c->n_kv_heads);
    int first = cpu->pos + t, end = first + tokens; // positions
    for (int i = 0; i < tokens; i += queries) {
        int n = tokens - i < queries ? tokens - i : queries;
        load_queries(cpu, s->q + i * c->head_dim, head, t + i, n);
    }
    memset(s->out, 0, (SPAN + queries) * width * sizeof *s->out);
    for (int i = 0; i < SPAN + queries; i++) s->max[i] = -INFINITY, s->sum[i] = 0;
    for (int from = first_visible(cpu, first) / KV_RANGE * KV_RANGE; from < end; from += KV_RANGE) {
        int n = end - from < KV_RANGE ? end - from : KV_RANGE;
        CachedHead kv = cache_at(cpu, a->layer, kv_head, from);
        for (int i = 0; i < tokens; i += queries)
            attend_panel(cpu, s, i, &kv, first + i + 1 - from, n);
    }
    for (int i = 0; i < tokens; i++) {
        float *out = a->out + (size_t)(t + i) * c->q_dim + (size_t)head * c->head_dim;
        for (int d = 0; d < c->head_dim; d++) out[d] = s->out[i * width + d] / s->sum[i];
    }
}

// A Task. Items are spans, all spans of one query head after the other.
static void attention_spans(Worker *self, const void *args, int begin, int end) {
    const AttentionArgs *a = args;
    int spans = (a->T + a->span - 1) / a->span;
    Span s = span_in(self->cpu, self->scratch, NULL);
    for (int item = begin; item < end; item++) {
        int t = item % spans * a->span, left = a->T - t;
        attend_span(self->cpu, a, &s, item / spans, t, left < a->span ? left : a->span);
    }
}

size_t llamac_attention_scratch(const Cpu *cpu) {
    size_t groups = QUERIES * ((size_t)round_up_to_tile(cpu->positions) + cpu->value_width), span;
    span_in(cpu, cpu->rotation, &span); // any array will do: only the size is used
    return groups > span ? groups : span;
}

// ----------------------------------------------------------------------------
// Fused QKV and attention of one token

typedef struct {
    MatmulArgs qkv;
    AttentionArgs attention;
} FusedArgs;
_Static_assert(sizeof(FusedArgs) <= MAX_ARGS, "FusedArgs must fit in a step");

// A Task. Items are KV heads. One thread computes queries, key, value and attention of its KV
// heads, so no barrier is needed between the products and attention.
static void qkv_attention_heads(Worker *self, const void *args, int begin, int end) {
    const FusedArgs *a = args;
    Activations in = llamac_activations(self, &a->qkv);
    for (const Product *p = a->qkv.products; p < a->qkv.products + 3; p++) {
        int rows = p->w->rows / self->cpu->config.n_kv_heads; // rows of a KV head
        llamac_multiply_rows(self, p, &in, begin * rows, end * rows);
    }
    attention_groups(self, &a->attention, begin, end);
}

// Returns whether to fuse: whether that saves a barrier, every thread gets the same number of KV
// heads, and the weight rows of each head begin with a new row of tiles.
static bool can_fuse(const Cpu *cpu) {
    const Config *c = &cpu->config;
    int threads = cpu->pool.n_threads;
    return c->head_dim % TILE == 0 && threads > 1 && c->n_kv_heads % threads == 0;
}

void llamac_cpu_attention(Backend *b, int layer, const Layer *w, float *out, const float *x,
                          int pos, int T) {
    Cpu *cpu = (Cpu *)b;
    const Config *c = &cpu->config;
    Product products[] = {
        {cpu->q, &w->wq, false}, {cpu->k, &w->wk, false}, {cpu->v, &w->wv, false}};
    MatmulArgs qkv = llamac_matmul_args(cpu, products, 3, &w->attention_norm, x, T);
    // If each query head has its own KV head and there are few positions, groups are faster than
    // spans: 3 % of the time of a prompt of 128 tokens. With spans, `groups` is not used
    bool own_keys = c->n_heads == c->n_kv_heads;
    bool spans = T > 1 && (!own_keys || c->window || pos + T > KV_RANGE);
    int groups = query_groups(cpu, spans ? 1 : T), span = span_of(cpu, T);
    int64_t cost = 2 * (int64_t)(pos + T) * c->head_dim * (spans ? span : QUERIES);
    // groups of the same KV head may run on several threads, so an earlier step finishes the key
    AttentionArgs a = {out, w, layer, T, span, .cached = T > 1 || groups > 1};
    cpu->pos = pos;
    llamac_extend_rotations(cpu, pos + T);
    llamac_prepare(cpu, &qkv);
    if (!a.cached && can_fuse(cpu)) {
        FusedArgs fused = {qkv, a};
        int items = 0;
        for (int i = 0; i < 3; i++) items += items_of(&products[i]);
        cost += items * cost_of_item(&qkv) / c->n_kv_heads;
        llamac_add_step(cpu, qkv_attention_heads, &fused, sizeof fused, c->n_kv_heads, cost);
        return;
    }
    llamac_multiply(cpu, &qkv);
    if (a.cached) llamac_add_step(cpu, finish_tokens, &a, sizeof a, T, 4 * c->q_dim);
    int items = spans ? c->n_heads * ((T + span - 1) / span) : c->n_kv_heads * groups;
    llamac_add_step(cpu, spans ? attention_spans : attention_groups, &a, sizeof a, items, cost);
}

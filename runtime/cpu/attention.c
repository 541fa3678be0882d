// RoPE, the KV cache, and attention of one token or of many.
#include <stdlib.h>
#include "cpu.h"

// ----------------------------------------------------------------------------
// RoPE

// Return the indices in a head of the two numbers of pair i, which RoPE rotates together.
static int first_of_pair(const Config *c, int i) { return c->rope_halves ? i : 2 * i; }
static int second_of_pair(const Config *c, int i) {
    return c->rope_halves ? i + c->head_dim / 2 : 2 * i + 1;
}

// Computes the missing rotations of positions below `positions`. Angles (position * frequency) are
// in double precision: at position 2000, a float would be off by 1e-4 radians.
static void extend_rotations(Cpu *cpu, int positions) {
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
// The KV cache. A page stores keys in tiles (head_dim, TILE) of TILE positions each: element i of
// the key at position p of a tile is at [i][p]. It stores values in rows (value_width,), one for
// each position. value_width is head_dim rounded up to a multiple of TILE, because kernels compute
// whole tiles; their results for the padding are not used

// Pointers into a page: to the keys and values of one KV head of a layer, starting at a position.
typedef struct {
    char *keys, *values;
    float *key_scales, *value_scales; // NULL if the cache has no scales
} CachedHead;

// Returns whether the cache stores numbers in 8 bits. Then each key (head_dim,) and each value
// (head_dim,) has a scale.
static bool has_scales(const Cpu *cpu) { return cpu->kv_type == INT8_GROUPS; }

// Returns pointers to the keys and values from position `pos` to the end of its page. `pos` must be
// a multiple of TILE.
static CachedHead cache_at(const Cpu *cpu, const Cache *cache, int layer, int head, int pos) {
    size_t size = number_size(cpu->kv_type);
    size_t row = (layer * (size_t)cpu->config.n_kv_heads + head) * PAGE + pos % PAGE;
    const Page *page = cache->pages[pos / PAGE];
    CachedHead c = {page->keys + row * cpu->config.head_dim * size,
                    page->values + row * cpu->value_width * size, NULL, NULL};
    if (page->key_scales)
        c.key_scales = page->key_scales + row, c.value_scales = page->value_scales + row;
    return c;
}

// Quantises x (n,) to 8 bits. Returns the scale, which is NaN if an element of x is not finite.
static float to_bytes(int8_t *out, const float *x, int n) {
    float max = 0, poison = 0;
    for (int i = 0; i < n; i++) {
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
        poison += 0 * x[i]; // NaN if x[i] is NaN or infinity
    }
    float inverse = max > 1e-30f ? 127 / max : 0;
    for (int i = 0; i < n; i++) {
        // floats near 1.5 * 2^23 have no fraction: the addition rounds to an integer and leaves
        // it in the lowest bits of the float
        float rounded = x[i] * inverse + 0x1.8p23f;
        int32_t bits;
        memcpy(&bits, &rounded, 4);
        out[i] = (int8_t)bits;
    }
    return max / 127 + poison;
}

// Writes the key and the value of one KV head of token t of the batch to the token's cache.
static void store_in_cache(Cpu *cpu, int layer, int head, int t, float *scratch) {
    const Config *c = &cpu->config;
    const Kernels *kernels = cpu->kernels;
    int n = c->head_dim, pos = cpu->positions[t], slot = pos % TILE; // index in the tile
    size_t from = (size_t)t * c->kv_dim + head * n;
    const float *k = cpu->k + from, *v = cpu->v + from;
    CachedHead to = cache_at(cpu, cpu->caches[t], layer, head, pos - slot);
    void *value = to.values + (size_t)slot * cpu->value_width * number_size(cpu->kv_type);
    void *key = scratch;
    if (has_scales(cpu)) {
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
    int layer;
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
    int shared = c->n_heads / c->n_kv_heads, pos = cpu->positions[t];
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

// ----------------------------------------------------------------------------
// Attention of a token processes the positions in ranges of KV_RANGE, which begin at multiples of
// KV_RANGE. Each range has its own softmax, and the results of the ranges are merged in order
// (online softmax, Milakov 2018). So the result does not depend on the number of threads, on how
// tokens are divided into calls, or on how many tokens a kernel processes at once

// Softmax statistics of some positions: the max score, and the sum of exp((score - max) * scale).
typedef struct { float max, sum; } Softmax;

// Returns the first position that the token at `pos` attends to: 0 without a sliding window.
static int first_visible(const Cpu *cpu, int pos) {
    int window = cpu->config.window;
    return window && pos >= window ? pos - window + 1 : 0;
}

static float score_scale(const Cpu *cpu) { return 1 / sqrtf(cpu->config.head_dim); }

// A range of positions of one KV head.
typedef struct {
    const Cache *cache;
    int layer, head;
    int start; // first position of the range
} Range;

// Multiplies p[i] by the scale of the key (or, if `values`, of the value) at position r->start + i,
// for i from begin to end - 1.
static void multiply_scales(const Cpu *cpu, const Range *r, float *p, int begin, int end,
                            bool values) {
    for (int i = begin, next; i < end; i = next) {
        next = (i / PAGE + 1) * PAGE < end ? (i / PAGE + 1) * PAGE : end; // page by page
        CachedHead kv = cache_at(cpu, r->cache, r->layer, r->head, r->start + i / PAGE * PAGE);
        const float *scales = values ? kv.value_scales : kv.key_scales;
        cpu->kernels->multiply(p + i, scales + i % PAGE, next - i);
    }
}

// Turns the scores p[begin..end-1] of a query into weights exp((score - max) * scale), and returns
// their max and sum. With an 8-bit cache, first multiplies the scores by the scales of the keys
// and, after the sum, the weights by the scales of the values. `begin` and `end` are counted from
// the start of the range.
static Softmax weights_of_scores(const Cpu *cpu, const Range *r, float *p, int begin, int end) {
    const Kernels *k = cpu->kernels;
    Softmax s;
    if (has_scales(cpu)) multiply_scales(cpu, r, p, begin, end, /*values*/ false);
    s.max = k->largest(p + begin, end - begin);
    s.sum = k->exponentials(p + begin, s.max, score_scale(cpu), end - begin);
    if (has_scales(cpu)) multiply_scales(cpu, r, p, begin, end, /*values*/ true);
    return s;
}

// Merges a range into the ranges before it. `part` (width,) and `of_range` are the weighted sums
// and the softmax of the range; `out` (width,) and *s are those of the ranges before it. Scales
// down the sums with the lower max, because weights are relative to their max. Not inlined, because
// a compiler might round the sums differently in different callers.
static __attribute__((noinline)) void merge(float *out, Softmax *s, const float *part,
                                            Softmax of_range, float scale, int width) {
    float out_factor = 1, part_factor = 1;
    if (of_range.max <= s->max) part_factor = expf((of_range.max - s->max) * scale);
    else { // larger, or NaN
        out_factor = expf((s->max - of_range.max) * scale);
        s->max = of_range.max;
    }
    s->sum = s->sum * out_factor + of_range.sum * part_factor;
    for (int d = 0; d < width; d++) out[d] = out[d] * out_factor + part[d] * part_factor;
}

// ----------------------------------------------------------------------------
// Attention of one token, in groups of up to QUERIES query heads that share a KV head, so that its
// keys and values are loaded once for the group

// The arrays of a group, in scratch.
typedef struct {
    float *p;    // (QUERIES, KV_RANGE) scores, then weights
    float *part; // (QUERIES, value_width) weighted sums of the values of a range
    float *out;  // (QUERIES, value_width) weighted sums, merged over the ranges so far
} Group;

static Group group_in(const Cpu *cpu, float *scratch) {
    Group g = {.p = scratch};
    g.part = g.p + QUERIES * KV_RANGE;
    g.out = g.part + QUERIES * cpu->value_width;
    return g;
}

// Calls a kernel for positions begin..end-1 of a range, page by page: Kernels.scores, which writes
// scores to g.p, or Kernels.mix, which reads weights from g.p. `begin` is a multiple of TILE. Only
// `mix` reads a->add: it adds the weighted sums of a page to those of earlier pages.
static void attend_pages(const Cpu *cpu, Attention *a, const Range *r, Group g, int begin, int end,
                         void (*kernel)(const Attention *)) {
    for (int i = begin, next; i < end; i = next) {
        next = (i / PAGE + 1) * PAGE < end ? (i / PAGE + 1) * PAGE : end;
        CachedHead kv = cache_at(cpu, r->cache, r->layer, r->head, r->start + i);
        a->keys = kv.keys, a->values = kv.values;
        a->p = g.p + i, a->n = next - i, a->add = i > begin;
        kernel(a);
    }
}

// Computes the attention of a group to positions begin..end-1 of a range, counted from its start.
// Writes the weighted sums to g.part, and the max and sum of each query to s.
static void attend_range(const Cpu *cpu, const AttentionItem *item, const Range *r, Group g,
                         int begin, int end, Softmax *s) {
    const Config *c = &cpu->config;
    Attention a = {.q = cpu->q + (size_t)item->t * c->q_dim + (size_t)item->head * c->head_dim,
                   .q_stride = c->head_dim,
                   .n_queries = item->n,
                   .p_stride = KV_RANGE,
                   .out = g.part,
                   .type = cpu->kv_type,
                   .head_dim = c->head_dim,
                   .width = cpu->value_width};
    // Kernels start at a tile boundary, so they also process the positions of the first tile that
    // are before `begin`; these get weight 0
    int tile = begin / TILE * TILE; // first position of the tile of `begin`
    attend_pages(cpu, &a, r, g, tile, end, cpu->kernels->scores);
    for (int q = 0; q < item->n; q++) {
        float *p = g.p + q * KV_RANGE;
        s[q] = weights_of_scores(cpu, r, p, begin, end);
        memset(p + tile, 0, (begin - tile) * sizeof *p);
    }
    attend_pages(cpu, &a, r, g, tile, end, cpu->kernels->mix);
}

// Divides the weighted sums of a query head of token t by the sum of its weights, and writes the
// result to a->out.
static void finish_query(const Cpu *cpu, const AttentionArgs *a, int t, int head, const float *sums,
                         float sum) {
    const Config *c = &cpu->config;
    float *out = a->out + (size_t)t * c->q_dim + (size_t)head * c->head_dim;
    for (int d = 0; d < c->head_dim; d++) out[d] = sums[d] / sum;
}

// Computes the attention of a group to all positions.
static void attend_group(Worker *self, const AttentionArgs *a, const AttentionItem *item) {
    const Cpu *cpu = self->cpu;
    int shared = cpu->config.n_heads / cpu->config.n_kv_heads, width = cpu->value_width;
    int pos = cpu->positions[item->t], begin = first_visible(cpu, pos), end = pos + 1;
    Group g = group_in(cpu, self->scratch);
    Range r = {cpu->caches[item->t], a->layer, item->head / shared, begin / KV_RANGE * KV_RANGE};
    Softmax s[QUERIES];
    for (int q = 0; q < item->n; q++) s[q] = (Softmax){-INFINITY, 0};
    memset(g.out, 0, item->n * width * sizeof(float));
    for (; r.start < end; r.start += KV_RANGE) {
        Softmax of_range[QUERIES];
        int first = begin > r.start ? begin - r.start : 0;
        int last = end - r.start < KV_RANGE ? end - r.start : KV_RANGE;
        attend_range(cpu, item, &r, g, first, last, of_range);
        for (int q = 0; q < item->n; q++)
            merge(g.out + q * width, &s[q], g.part + q * width, of_range[q], score_scale(cpu),
                  width);
    }
    for (int q = 0; q < item->n; q++)
        finish_query(cpu, a, item->t, item->head + q, g.out + q * width, s[q].sum);
}

// Returns where the results of a range of a query head are stored if ranges are split among
// threads: max, sum, then (value_width,) weighted sums. `range` is an index into the ranges of the
// whole batch: all ranges of token 0, then all of token 1, ...
static float *partial_at(const Cpu *cpu, int range, int head) {
    size_t index = (size_t)range * cpu->config.n_heads + head;
    return cpu->partials + index * (2 + cpu->value_width);
}

// Computes the attention of a group to one range, and stores the result for merge_partials.
static void attend_partially(Worker *self, const AttentionArgs *a, const AttentionItem *item) {
    const Cpu *cpu = self->cpu;
    int shared = cpu->config.n_heads / cpu->config.n_kv_heads, width = cpu->value_width;
    int pos = cpu->positions[item->t], begin = first_visible(cpu, pos);
    Range r = {cpu->caches[item->t], a->layer, item->head / shared,
               (begin / KV_RANGE + item->range) * KV_RANGE};
    Group g = group_in(cpu, self->scratch);
    Softmax s[QUERIES];
    int end = pos + 1 - r.start < KV_RANGE ? pos + 1 - r.start : KV_RANGE;
    attend_range(cpu, item, &r, g, begin > r.start ? begin - r.start : 0, end, s);
    for (int q = 0; q < item->n; q++) {
        float *partial = partial_at(cpu, item->first_range + item->range, item->head + q);
        partial[0] = s[q].max, partial[1] = s[q].sum;
        memcpy(partial + 2, g.part + q * width, width * sizeof(float));
    }
}

// Returns the number of ranges that the token at `pos` attends to.
static int ranges_of(const Cpu *cpu, int pos) {
    return pos / KV_RANGE - first_visible(cpu, pos) / KV_RANGE + 1;
}

// A Task that merges the ranges that attend_partially stored. Item t * n_heads + head is a query
// head of token t.
static void merge_partials(Worker *self, const void *args, int begin, int end) {
    const AttentionArgs *a = args;
    const Cpu *cpu = self->cpu;
    int n_heads = cpu->config.n_heads, width = cpu->value_width, first = 0;
    float *out = self->scratch;
    for (int t = 0; t * n_heads < end; t++) {
        int ranges = ranges_of(cpu, cpu->positions[t]);
        for (int head = 0; head < n_heads; head++) {
            if (t * n_heads + head < begin || t * n_heads + head >= end) continue;
            Softmax s = {-INFINITY, 0};
            memset(out, 0, width * sizeof *out);
            for (int i = 0; i < ranges; i++) {
                const float *partial = partial_at(cpu, first + i, head);
                merge(out, &s, partial + 2, (Softmax){partial[0], partial[1]}, score_scale(cpu),
                      width);
            }
            finish_query(cpu, a, t, head, out, s.sum);
        }
        first += ranges;
    }
}

// ----------------------------------------------------------------------------
// Attention in spans: up to SPAN consecutive tokens of a sequence, for one query head. The keys and
// values of a range are loaded once for all tokens of the span

enum { SPAN = CHUNK }; // max tokens of a span: the max tokens of a batch

// Returns the max tokens of a span for n tokens of a sequence: SPAN, halved until there are two
// spans for each thread, but at least SPAN / 4, because shorter spans would load keys and values
// too often.
static int span_length(const Cpu *cpu, int n) {
    int span = SPAN, heads = cpu->config.n_heads, min_items = 2 * cpu->pool.n_threads;
    while (span > SPAN / 4 && heads * ((n + span - 1) / span) < min_items) span /= 2;
    return span;
}

// The arrays of a span. A kernel processes one panel at a time: the queries of panel_queries
// consecutive tokens, where panel_queries depends on the kernels. (QUERIES is different: the max
// query heads of one token in a group.)
typedef struct {
    float *q;         // (panels, head_dim, panel_queries)
    float *out;       // (SPAN, value_width) weighted sums of the values of the ranges so far
    Softmax *softmax; // (SPAN,) of the ranges so far
    // For one panel and one range:
    float *scores; // (panel_queries, KV_RANGE) scores, then weights
    float *p;    // (KV_RANGE, panel_queries) the weights, transposed; unused if panel_queries is 1
    float *part; // (panel_queries, value_width) weighted sums of the values
} Span;

// Returns the arrays of a span, placed one after the other in scratch. Sets *size to their total
// size in floats, unless `size` is NULL. q, out and softmax have room for a last panel that extends
// beyond the span.
static Span span_in(const Cpu *cpu, float *scratch, size_t *size) {
    int queries = cpu->kernels->panel_queries, tokens = SPAN + queries;
    Span s = {.q = scratch};
    s.out = s.q + tokens * cpu->config.head_dim;
    s.scores = s.out + tokens * cpu->value_width;
    s.p = s.scores + KV_RANGE * queries;
    s.part = s.p + KV_RANGE * queries;
    s.softmax = (Softmax *)(s.part + queries * cpu->value_width);
    if (size) *size = (float *)(s.softmax + tokens) - scratch;
    return s;
}

// Returns the queries (head_dim, panel_queries) of the panel that begins with token t of the span.
// t is a multiple of panel_queries, so that t / panel_queries panels precede it.
static float *queries_of_panel(const Cpu *cpu, const Span *s, int t) {
    return s->q + (size_t)t * cpu->config.head_dim;
}

// Copies the queries of a head for tokens t..t+n-1 of the batch to a panel (head_dim,
// panel_queries). If n is less than panel_queries, fills the rest with zeros.
static void load_queries(const Cpu *cpu, float *panel, int head, int t, int n) {
    const Config *c = &cpu->config;
    size_t stride = c->q_dim;
    const float *q = cpu->q + t * stride + (size_t)head * c->head_dim;
    int queries = cpu->kernels->panel_queries;
    if (n == queries) {
        cpu->kernels->transpose((uint8_t *)panel, (const uint8_t *)q, 4 * stride, queries,
                                c->head_dim);
        return;
    }
    for (int d = 0; d < c->head_dim; d++)
        for (int i = 0; i < queries; i++) panel[d * queries + i] = i < n ? q[i * stride + d] : 0;
}

// Computes the scores of the panel that begins with token t of the span, for positions at..at+n-1
// of the range, which are in one page.
static void score_page(const Cpu *cpu, const Span *s, int t, CachedHead kv, int at, int n) {
    size_t dim = cpu->config.head_dim;
    // The matrix of the product has a row for each position and a column for each dimension
    PanelProduct scores = {.y = s->scores + at,
                           .w = kv.keys,
                           .x = queries_of_panel(cpu, s, t),
                           .y_stride = KV_RANGE,
                           .tile_stride = dim * TILE,
                           .column_stride = TILE,
                           .tiles = round_up_to_tile(n) / TILE,
                           .cols = (int)dim,
                           .type = cpu->kv_type};
    cpu->kernels->panel_product(&scores);
}

// Computes the weighted sums of the values at positions at..at+n-1 of the range, which are in one
// page, with the weights of a panel. Writes them to s->part or, if `add`, adds them to it.
static void mix_page(const Cpu *cpu, const Span *s, CachedHead kv, int at, int n, bool add) {
    size_t width = cpu->value_width;
    int queries = cpu->kernels->panel_queries;
    // With one query per panel, the weights need no transpose
    const float *p = queries > 1 ? s->p + (size_t)at * queries : s->scores + at;
    // A tile has TILE dimensions of the values as rows, and the n positions as columns
    PanelProduct mix = {.y = s->part,
                        .w = kv.values,
                        .x = p,
                        .y_stride = width,
                        .tile_stride = TILE,
                        .column_stride = width,
                        .tiles = (int)width / TILE,
                        .cols = n,
                        .add = add,
                        .type = cpu->kv_type};
    cpu->kernels->panel_product(&mix);
}

// Turns the scores p[begin..end-1] of the token at `pos` into weights: 0 for positions that the
// token does not attend to. Returns their max and sum. `begin` and `end` are counted from the start
// of the range.
static Softmax weights_of_token(const Cpu *cpu, const Range *r, float *p, int begin, int end,
                                int pos) {
    int first = first_visible(cpu, pos) - r->start, after = pos + 1 - r->start;
    first = first > begin ? first : begin;
    after = after < end ? after : end; // the token attends to first..after-1
    if (first >= after) {
        memset(p + begin, 0, (end - begin) * sizeof *p);
        return (Softmax){-INFINITY, 0};
    }
    memset(p + begin, 0, (first - begin) * sizeof *p);
    memset(p + after, 0, (end - after) * sizeof *p);
    return weights_of_scores(cpu, r, p, first, after);
}

// Adds a range to the attention of the first `tokens` tokens of a panel, which begins with token t
// of the span, at position `pos`. The rest of the panel is padding.
static void attend_panel(const Cpu *cpu, const Span *s, int t, const Range *r, int pos,
                         int tokens) {
    const Kernels *k = cpu->kernels;
    size_t width = cpu->value_width;
    int queries = k->panel_queries;
    // begin..end-1 are the positions, counted from the start of the range, that at least one token
    // of the panel attends to, with `begin` rounded down to the first position of its page
    int begin = first_visible(cpu, pos) - r->start, end = pos + tokens - r->start;
    begin = begin > 0 ? begin / PAGE * PAGE : 0;
    end = end < KV_RANGE ? end : KV_RANGE;
    if (begin >= end) return;
    for (int i = begin; i < end; i += PAGE) {
        CachedHead kv = cache_at(cpu, r->cache, r->layer, r->head, r->start + i);
        score_page(cpu, s, t, kv, i, end - i < PAGE ? end - i : PAGE);
    }
    Softmax of_range[MAX_PANEL_QUERIES];
    for (int i = 0; i < queries; i++) {
        float *p = s->scores + i * KV_RANGE;
        if (i < tokens) of_range[i] = weights_of_token(cpu, r, p, begin, end, pos + i);
        else memset(p + begin, 0, (end - begin) * sizeof *p);
    }
    if (queries > 1)
        k->transpose((uint8_t *)(s->p + (size_t)begin * queries),
                     (const uint8_t *)(s->scores + begin), KV_RANGE * sizeof(float), queries,
                     end - begin);
    for (int i = begin; i < end; i += PAGE) {
        CachedHead kv = cache_at(cpu, r->cache, r->layer, r->head, r->start + i);
        mix_page(cpu, s, kv, i, end - i < PAGE ? end - i : PAGE, /*add*/ i > begin);
    }
    for (int i = 0; i < tokens; i++) {
        if (of_range[i].sum == 0) continue; // no position of the range is visible to this token
        merge(s->out + (t + i) * width, &s->softmax[t + i], s->part + i * width, of_range[i],
              score_scale(cpu), (int)width);
    }
}

// Computes the attention of one span: item->n tokens of a query head.
static void attend_span(Worker *self, const AttentionArgs *a, const AttentionItem *item) {
    const Cpu *cpu = self->cpu;
    const Config *c = &cpu->config;
    size_t width = cpu->value_width;
    int queries = cpu->kernels->panel_queries, tokens = item->n;
    int first = cpu->positions[item->t], end = first + tokens; // positions of the span
    Span s = span_in(cpu, self->scratch, NULL);
    for (int i = 0; i < tokens; i += queries) {
        int n = tokens - i < queries ? tokens - i : queries;
        load_queries(cpu, queries_of_panel(cpu, &s, i), item->head, item->t + i, n);
    }
    memset(s.out, 0, tokens * width * sizeof *s.out);
    for (int i = 0; i < tokens; i++) s.softmax[i] = (Softmax){-INFINITY, 0};
    Range r = {cpu->caches[item->t], a->layer, item->head / (c->n_heads / c->n_kv_heads),
               first_visible(cpu, first) / KV_RANGE * KV_RANGE};
    for (; r.start < end; r.start += KV_RANGE)
        for (int i = 0; i < tokens; i += queries) {
            int n = tokens - i < queries ? tokens - i : queries;
            attend_panel(cpu, &s, i, &r, first + i, n);
        }
    for (int i = 0; i < tokens; i++)
        finish_query(cpu, a, item->t + i, item->head, s.out + i * width, s.softmax[i].sum);
}

size_t llamac_attention_scratch(const Cpu *cpu) {
    float *base = cpu->rotation; // any array would do: only offsets from it are used
    size_t group = group_in(cpu, base).out + QUERIES * cpu->value_width - base, span;
    span_in(cpu, base, &span);
    return group > span ? group : span;
}

// ----------------------------------------------------------------------------
// The items of a batch

enum { MIN_SPAN = 4 }; // min tokens of a run for which spans are faster than groups

// Adds the items of one token: its groups or, if `split`, the ranges of its groups. *n_ranges is
// the number of ranges of earlier tokens; adds those of this token to it.
static void add_groups(Cpu *cpu, int t, bool split, int *n_ranges) {
    const Config *c = &cpu->config;
    int shared = c->n_heads / c->n_kv_heads;
    int ranges = ranges_of(cpu, cpu->positions[t]);
    for (int kv_head = 0; kv_head < c->n_kv_heads; kv_head++)
        for (int first = 0; first < shared; first += QUERIES) {
            int n = shared - first < QUERIES ? shared - first : QUERIES;
            AttentionItem item = {.kind = split ? PART : GROUP,
                                  .t = t,
                                  .n = n,
                                  .head = kv_head * shared + first,
                                  .first_range = *n_ranges};
            int n_items = split ? ranges : 1;
            for (; item.range < n_items; item.range++) cpu->items[cpu->n_items++] = item;
        }
    *n_ranges += ranges;
}

// Adds the items of a run: its spans, for each query head.
static void add_spans(Cpu *cpu, const Run *run) {
    int span = span_length(cpu, run->n);
    for (int head = 0; head < cpu->config.n_heads; head++)
        for (int i = 0; i < run->n; i += span) {
            int n = run->n - i < span ? run->n - i : span;
            AttentionItem item = {
                .kind = SPAN_OF_TOKENS, .t = run->first + i, .n = n, .head = head};
            cpu->items[cpu->n_items++] = item;
        }
}

void llamac_plan_attention(Cpu *cpu, const Batch *batch) {
    const Config *c = &cpu->config;
    int groups = (c->n_heads / c->n_kv_heads + QUERIES - 1) / QUERIES, ranges = 0, longest = 0;
    bool has_spans = false;
    for (const Run *run = batch->runs; run < batch->runs + batch->n_runs; run++) {
        has_spans |= run->n >= MIN_SPAN;
        for (int i = 0; i < run->n; i++) {
            cpu->caches[run->first + i] = run->cache;
            cpu->positions[run->first + i] = run->pos + i;
            ranges += ranges_of(cpu, run->pos + i);
        }
        extend_rotations(cpu, run->pos + run->n);
        longest = run->pos + run->n > longest ? run->pos + run->n : longest;
    }
    // Groups keep all threads busy if each thread gets the same number of them, or at least two.
    // Otherwise, if there are no spans, the ranges of groups are split among threads, provided that
    // some token has several ranges and cpu->partials has room for the results of all ranges
    int n_groups = batch->T * c->n_kv_heads * groups, threads = cpu->pool.n_threads;
    bool all_busy = n_groups >= 2 * threads || n_groups % threads == 0;
    cpu->split = !has_spans && !all_busy && ranges > batch->T && ranges <= cpu->max_ranges;
    cpu->n_items = 0, ranges = 0;
    for (const Run *run = batch->runs; run < batch->runs + batch->n_runs; run++) {
        if (run->n >= MIN_SPAN) add_spans(cpu, run);
        else
            for (int i = 0; i < run->n; i++) add_groups(cpu, run->first + i, cpu->split, &ranges);
    }
    // Approximate multiplications of one item: 2 for each query, position and dimension, one for
    // the score and one for the weighted sum. A group has up to QUERIES queries, a short span has
    // SPAN / 4
    cpu->item_cost = 2 * (int64_t)longest * c->head_dim * (has_spans ? SPAN / 4 : QUERIES);
}

// A Task. Items are those of cpu->items.
static void attention_items(Worker *self, const void *args, int begin, int end) {
    for (int i = begin; i < end; i++) {
        const AttentionItem *item = &self->cpu->items[i];
        if (item->kind == GROUP) attend_group(self, args, item);
        else if (item->kind == PART) attend_partially(self, args, item);
        else attend_span(self, args, item);
    }
}

// ----------------------------------------------------------------------------
// Fused QKV and attention of one token

typedef struct {
    MatmulArgs qkv;
    AttentionArgs attention;
} FusedArgs;
_Static_assert(sizeof(FusedArgs) <= MAX_ARGS, "FusedArgs must fit in a step");

// A Task for one token. Items are KV heads; cpu->items[head] is the only group of KV head `head`.
// One thread computes queries, keys, values and attention of its KV heads, so no barrier is needed
// between the products and attention.
static void qkv_attention_heads(Worker *self, const void *args, int begin, int end) {
    const FusedArgs *a = args;
    Activations in = llamac_activations(self, &a->qkv);
    for (const Product *p = a->qkv.products; p < a->qkv.products + 3; p++) {
        int rows = p->w->rows / self->cpu->config.n_kv_heads; // rows per KV head
        llamac_multiply_rows(self, p, &in, begin * rows, end * rows);
    }
    for (int head = begin; head < end; head++)
        finish_token(self->cpu, &a->attention, head, 0, self->scratch);
    attention_items(self, &a->attention, begin, end);
}

// Returns whether to fuse the steps of one token, which saves the barriers between them. Requires
// that weights are not streamed, that there are several threads and each gets the same number of KV
// heads, that each KV head has one group, and that the weights of each head begin at a multiple of
// TILE rows, as llamac_multiply_rows expects.
static bool can_fuse(const Cpu *cpu, int T) {
    const Config *c = &cpu->config;
    int threads = cpu->pool.n_threads;
    bool one_group_per_head = cpu->n_items == c->n_kv_heads;
    return T == 1 && !cpu->stream && threads > 1 && c->n_kv_heads % threads == 0
           && one_group_per_head && c->head_dim % TILE == 0;
}

void llamac_cpu_attention(Backend *b, const Batch *batch, int layer, const Layer *w, float *out,
                          const float *x) {
    Cpu *cpu = (Cpu *)b;
    const Config *c = &cpu->config;
    Product products[] = {
        {.out = cpu->q, .w = &w->wq}, {.out = cpu->k, .w = &w->wk}, {.out = cpu->v, .w = &w->wv}};
    // `collecting` is true between Backend.begin and end, and begin has planned the batch for all
    // layers. Tests call this function outside of begin and end
    if (!cpu->collecting) llamac_plan_attention(cpu, batch);
    MatmulArgs qkv = llamac_matmul_args(cpu, products, 3, &w->attention_norm, x, batch->T);
    AttentionArgs a = {out, w, layer};
    llamac_prepare(cpu, &qkv); // adds the steps that convert x; none for one token
    if (can_fuse(cpu, batch->T)) {
        FusedArgs fused = {qkv, a};
        int items = 0;
        for (int i = 0; i < 3; i++) items += items_of(&products[i]);
        int64_t cost = cpu->item_cost + items * cost_of_item(&qkv) / c->n_kv_heads;
        llamac_add_step(cpu, qkv_attention_heads, &fused, sizeof fused, c->n_kv_heads, cost);
        return;
    }
    llamac_multiply(cpu, &qkv);
    llamac_add_step(cpu, finish_tokens, &a, sizeof a, batch->T, 4 * c->q_dim);
    llamac_add_step(cpu, attention_items, &a, sizeof a, cpu->n_items, cpu->item_cost);
    if (cpu->split)
        llamac_add_step(cpu, merge_partials, &a, sizeof a, batch->T * c->n_heads, cpu->value_width);
}

// ----------------------------------------------------------------------------
// Pages and caches

// Sizes of the arrays of a page, in bytes.
typedef struct {
    size_t keys, values;
    size_t scales; // of key_scales, and the same for value_scales; 0 without scales
    size_t all;    // of all four arrays, which follow each other in this order
} PageSizes;

static PageSizes page_sizes(const Cpu *cpu) {
    const Config *c = &cpu->config;
    size_t rows = (size_t)c->n_layers * c->n_kv_heads * PAGE, size = number_size(cpu->kv_type);
    PageSizes s = {.keys = rows * c->head_dim * size, .values = rows * cpu->value_width * size};
    if (has_scales(cpu)) s.scales = rows * sizeof(float);
    s.all = s.keys + s.values + 2 * s.scales;
    return s;
}

size_t llamac_cache_size(const Cpu *cpu, int positions) {
    return (positions + PAGE - 1) / PAGE * page_sizes(cpu).all;
}

// Returns an unused page. Returns NULL if there is not enough memory.
static Page *new_page(Cpu *cpu) {
    // The four arrays follow the Page. Each begins at a multiple of 64 bytes, because HEAD and the
    // sizes of the arrays, which have PAGE = 64 positions, are multiples of 64
    enum { HEAD = (sizeof(Page) + 63) / 64 * 64 };
    PageSizes s = page_sizes(cpu);
    Page *page = cpu->unused_pages;
    if (page) cpu->unused_pages = page->next;
    else page = llamac_allocate_aligned(64, HEAD + s.all);
    if (!page) return NULL;
    *page = (Page){.n_caches = 1, .keys = (char *)page + HEAD};
    page->values = page->keys + s.keys;
    if (s.scales) {
        page->key_scales = (float *)(page->values + s.values);
        page->value_scales = (float *)(page->values + s.values + s.scales);
    }
    return page;
}

// Releases a page that a cache used. If no other cache uses it, adds it to the unused pages.
static void drop_page(Cpu *cpu, Page *page) {
    if (--page->n_caches) return;
    page->next = cpu->unused_pages;
    cpu->unused_pages = page;
}

void llamac_free_pages(Cpu *cpu) {
    for (Page *page = cpu->unused_pages, *next; page; page = next) {
        next = page->next;
        llamac_free_aligned(page);
    }
}

Cache *llamac_cpu_new_cache(Backend *b) {
    (void)b;
    return calloc(1, sizeof(Cache));
}

void llamac_cpu_free_cache(Backend *b, Cache *cache) {
    for (int i = 0; i < cache->n_pages; i++) drop_page((Cpu *)b, cache->pages[i]);
    free(cache->pages);
    free(cache);
}

// Makes room for n pages in the list.
static bool grow(Cache *cache, int n) {
    if (n <= cache->capacity) return true;
    int capacity = n > 2 * cache->capacity ? n : 2 * cache->capacity;
    Page **pages = realloc(cache->pages, capacity * sizeof *pages);
    if (!pages) return false;
    cache->pages = pages, cache->capacity = capacity;
    return true;
}

bool llamac_cpu_reserve(Backend *b, Cache *cache, int pos, int n) {
    Cpu *cpu = (Cpu *)b;
    int used = (pos + PAGE - 1) / PAGE, needed = (pos + n + PAGE - 1) / PAGE;
    while (cache->n_pages > used) drop_page(cpu, cache->pages[--cache->n_pages]);
    // copy on write: if another cache shares the last page in use, copy it before it is changed
    Page **last = n && pos % PAGE ? &cache->pages[used - 1] : NULL;
    if (last && (*last)->n_caches > 1) {
        Page *page = new_page(cpu);
        if (!page) return false;
        memcpy(page->keys, (*last)->keys, page_sizes(cpu).all); // all four arrays
        drop_page(cpu, *last);
        *last = page;
    }
    if (!grow(cache, needed)) return false;
    while (cache->n_pages < needed) {
        Page *page = new_page(cpu);
        if (!page) return false;
        cache->pages[cache->n_pages++] = page;
    }
    return true;
}

bool llamac_cpu_share(Backend *b, Cache *cache, const Cache *from, int n) {
    (void)b;
    int pages = (n + PAGE - 1) / PAGE;
    if (!grow(cache, pages)) return false;
    for (int i = 0; i < pages; i++) { // `cache` is empty, so there are no pages to drop
        cache->pages[i] = from->pages[i];
        cache->pages[i]->n_caches++;
    }
    cache->n_pages = pages;
    return true;
}

// ----------------------------------------------------------------------------
// Copies of positions of the cache in one array, `bytes`: keys (n_layers, n_kv_heads, n, head_dim),
// values of the same shape and, if the cache has scales, the scales of the keys (n_layers,
// n_kv_heads, n) and the scales of the values

// Copies n numbers of `size` bytes each. Strides are counted in numbers, not bytes.
static void copy_strided(char *to, size_t to_stride, const char *from, size_t from_stride, int n,
                         size_t size) {
    // memcpy of a constant size compiles to a load and a store
    for (int i = 0; i < n; i++, to += to_stride * size, from += from_stride * size) {
        if (size == 4) memcpy(to, from, 4);
        else if (size == 2) memcpy(to, from, 2);
        else *to = *from;
    }
}

// Pointers into `bytes`: to the key and the value of one position of a KV head of a layer, and to
// their scales.
typedef struct { char *key, *value, *key_scale, *value_scale; } CopiedRow;

// Returns row `row` of the (n_layers * n_kv_heads * n) rows in `bytes`.
static CopiedRow row_of_copy(const Cpu *cpu, char *bytes, int n, size_t row) {
    const Config *c = &cpu->config;
    size_t rows = (size_t)c->n_layers * c->n_kv_heads * n;
    size_t width = c->head_dim * number_size(cpu->kv_type); // bytes
    char *scales = bytes + 2 * rows * width;
    return (CopiedRow){bytes + row * width, bytes + (rows + row) * width,
                       scales + row * sizeof(float), scales + (rows + row) * sizeof(float)};
}

// Copies positions pos..pos+n-1 from a cache to `bytes` or, if `to_cache`, from `bytes` to the
// cache.
static void copy_positions(const Cpu *cpu, const Cache *cache, int pos, int n, char *bytes,
                           bool to_cache) {
    const Config *c = &cpu->config;
    size_t size = number_size(cpu->kv_type), row = 0, value_size = c->head_dim * size;
    for (int layer = 0; layer < c->n_layers; layer++)
        for (int head = 0; head < c->n_kv_heads; head++)
            for (int i = pos; i < pos + n; i++, row++) {
                int slot = i % TILE; // the key's column in its tile
                CachedHead kv = cache_at(cpu, cache, layer, head, i - slot);
                CopiedRow copy = row_of_copy(cpu, bytes, n, row);
                char *key = kv.keys + slot * size;
                char *value = kv.values + slot * cpu->value_width * size;
                if (to_cache) copy_strided(key, TILE, copy.key, 1, c->head_dim, size);
                else copy_strided(copy.key, 1, key, TILE, c->head_dim, size);
                memcpy(to_cache ? value : copy.value, to_cache ? copy.value : value, value_size);
                if (!kv.key_scales) continue;
                char *scales[] = {(char *)(kv.key_scales + slot), (char *)(kv.value_scales + slot)};
                char *copies[] = {copy.key_scale, copy.value_scale};
                for (int j = 0; j < 2; j++)
                    memcpy(to_cache ? scales[j] : copies[j], to_cache ? copies[j] : scales[j],
                           sizeof(float));
            }
}

void llamac_cpu_read_cache(Backend *b, const Cache *cache, int pos, int n, void *bytes) {
    copy_positions((const Cpu *)b, cache, pos, n, bytes, false);
}

void llamac_cpu_write_cache(Backend *b, Cache *cache, int pos, int n, const void *bytes) {
    copy_positions((const Cpu *)b, cache, pos, n, (char *)bytes, true);
}

// The Backend of the CPU. Work is handed to threads (team.h) by rows, and every number is computed by one thread in one
// order, so results do not depend on how many threads there are. The arithmetic is in kernels (kernels.h); the best
// instruction set that the machine has is chosen when the backend is opened.
#define _DEFAULT_SOURCE // POSIX beside C11
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "memory.h"
#include "team.h"
#include "weights.h"

// What this machine can run, the best first. Returns how many.
enum { MOST_KERNELS = 6 };
static int find_kernels(const Kernels *found[MOST_KERNELS]) {
    static const Kernels *const known[MOST_KERNELS] = {&llamac_avx512bf16, &llamac_avx512, &llamac_avx2,
                                                       &llamac_neondot,    &llamac_neon,   &llamac_reference};
    int n = 0;
    for (int i = 0; i < MOST_KERNELS; i++)
        if (known[i]->supported && known[i]->supported()) found[n++] = known[i];
    return n;
}

// The best kernels, or those that the environment variable LLAMAC_ISA names; NULL if the machine does not have them.
static const Kernels *choose_kernels(void) {
    const Kernels *found[MOST_KERNELS];
    const char *name = getenv("LLAMAC_ISA");
    int n = find_kernels(found);
    for (int i = 0; i < n; i++)
        if (!name || !*name || !strcmp(name, found[i]->name)) return found[i];
    return NULL;
}

const Kernels *llamac_cpu_kernels(void) {
    const Kernels *chosen = choose_kernels();
    return chosen ? chosen : &llamac_reference;
}

struct Cpu {
    Backend ops;
    Config config;
    const Kernels *kernels;
    int positions;
    Type kv;                        // of the cache: F32, F16, or INT8_GROUPS with a scale for each key and each value
    int value_width;                // head_dim rounded up to TILE
    char *keys;                     // (n_layers, n_kv_heads, ceil(positions / TILE), head_dim, TILE)
    char *values;                   // (n_layers, n_kv_heads, positions, value_width)
    float *key_scales, *value_scales; // (n_layers, n_kv_heads, positions) of INT8_GROUPS; else NULL
    float *rotation;                // (positions, 2, head_dim): cosines, sines, for Kernels' rotate or rotate_halves
    int rotations;                  // positions of it computed so far
    float *panels;                  // (columns, tokens) one after the other: activations of a chunk, see kernels.h
    Block *blocks, *gated_blocks;   // (chunk, columns / 32): in 8 bits; swiglu_rows reads the first and makes the second
    uint16_t *pairs, *gated_pairs;  // (columns / 2, tokens, 2) one after the other: in BF16; likewise
    float *q, *k, *v;               // (chunk, q_dim), (chunk, kv_dim) twice: of attention
    float *h, *h2;                  // (chunk, hidden_dim): of feed_forward
    bool precise;                   // all logits are asked for: BF16 is multiplied in float32
    Model *model;                   // whose weights are put in tiles
    const void *tiles;              // where they are then; NULL before
    size_t tiles_size;              // bytes
    int decoded;                    // calls with one token so far
    void **memory;                  // what alloc gave out
    int n_memory;

    Team team;                      // its steps are those of one call of forward; those for one token stay for the next
    bool collecting;                // between begin and end
    bool recorded;                  // the steps are those for one token
    const Mat *table;               // where embed got that token's row from, and
    float *embedded;                // where it went
    int pos;                        // of the call's first token
};

enum {
    CHUNK = 128,         // tokens: more of them no longer make a product faster
    LEAST_UNPACKED = 24, // tokens for which tiles of blocks of 256 are unpacked once
    LEAST_PAIRS = 16,    // tokens for which BF16 weights are multiplied with activations in BF16
    PATIENT_TOKENS = 16, // decoded before the weights are put in tiles
    MOST_STEPS = 24,     // of a layer
};

// Appends a step for n items, each of about `cost` multiplications; outside of a call of forward, runs it.
static void add(Cpu *cpu, Task *task, const void *args, size_t size, int n, int64_t cost) {
    if (!cpu->collecting) cpu->team.n_steps = 0, cpu->recorded = false;
    Step *step = &cpu->team.steps[cpu->team.n_steps++];
    *step = (Step){task, n, cost, {0}};
    memcpy(step->args, args, size);
    if (!cpu->collecting) llamac_team_run(&cpu->team), cpu->team.n_steps = 0;
}

// ----------------------------------------------------------------------------
// Products

// out (n,) = norm(x); they may be one.
static void normalize(const Cpu *cpu, float *out, const float *x, const float *weight, int n) {
    float scale = 1.0f / sqrtf(cpu->kernels->types[F32].dot(x, x, n) / n + cpu->config.norm_eps);
    for (int i = 0; i < n; i++) out[i] = weight[i] * (scale * x[i]);
}

// One matrix product: out (T, w.rows) = x (T, w.cols) w^T, or out += that.
typedef struct {
    float *out;
    const Mat *w;
    bool add;
} Product;

// Items of a product are ROWS rows.
enum { ROWS = 2 * TILE };

// What products read: x (T, cols), or norm(x), and the forms of it that the types of the weights want.
typedef struct {
    const float *x, *norm;   // norm: (cols,), the weights of an RMSNorm; NULL for none
    const float *panels;     // of one token, x itself
    const uint16_t *pairs;   // NULL: BF16 is multiplied in float32
    const Block *blocks;
    int cols, T;
} Activations;

typedef struct {
    Product products[3];
    int n;
    Activations in;
    bool needs_floats, needs_blocks; // some products read panels, some blocks; others pairs
    bool ready;                      // the step before has made what they read
    bool to_blocks, to_pairs;        // swiglu_rows makes these, for the step behind
} MatmulArgs;
_Static_assert(sizeof(MatmulArgs) <= ARGS, "room in a step");

// Tokens t..t+width-1 of a prompt, of which `left` are there.
typedef struct { int t, width, left; } Panel;

// The panel that begins with token t of T. It has as many tokens as the kernels take at once, or 1, 2, 4 or 8; of pairs at
// least 4.
static Panel panel_at(const Kernels *k, int t, int T, bool pairs) {
    int left = T - t, width = pairs ? 4 : 1;
    while (width < left && width < k->tokens) width *= 2;
    width = width < k->tokens ? width : k->tokens;
    return (Panel){t, width, left < width ? left : width};
}

static void put_row(float *out, const float *y, int n, bool add) {
    for (int i = 0; i < n; i++) out[i] = add ? out[i] + y[i] : y[i];
}

// Rows r..end-1 without tiles: with one token, or with any number by kernels that have no tiles, whose panels are rows of x.
static void multiply_rows(const Kernels *k, const Product *p, const Activations *a, int r, int end, float *scratch) {
    const Mat *w = p->w;
    const bool direct = has_dot(k, w);
    const TypeKernels *kernels = &k->types[direct ? w->type : F32];
    for (; r < end; r++) {
        const void *row = direct ? (const void *)row_of(w, r) : scratch;
        if (!direct) llamac_floats(k, scratch, w, r, 0, w->cols);
        for (int t = 0; t < a->T; t++) {
            const void *x = is_quantised(w) ? (const void *)(a->blocks + (size_t)t * (a->cols / 32))
                                            : (const void *)(a->panels + (size_t)t * a->cols);
            put_row(p->out + (size_t)t * w->rows + r, (float[]){kernels->dot(row, x, a->cols)}, 1, p->add);
        }
    }
}

// Some rows of tiles of a matrix.
typedef struct {
    const Mat *w;
    const uint8_t *tiles;
    int n;
    bool unpacked;
} TileRows;

// Rows r..end-1 in tiles: those kept, or made in `room`.
static TileRows tile_rows(const Kernels *k, const Mat *w, int r, int end, uint8_t *room) {
    TileRows rows = {w, room, (end - r + TILE - 1) / TILE, false};
    if (w->tiles) rows.tiles = (const uint8_t *)w->tiles + r / TILE * tiles_size(w);
    else
        for (int i = 0; i < rows.n; i++) llamac_pack(k, room + i * tiles_size(w), w, r + i * TILE);
    return rows;
}

// Unpacks rows of tiles for T tokens, where there are enough of them, to `room`.
static void unpack(const Kernels *k, TileRows *rows, int T, uint8_t *room) {
    const Mat *w = rows->w;
    if (T < LEAST_UNPACKED || !tile_kernels(k, w)->unpack) return;
    tile_kernels(k, w)->unpack(room, rows->tiles, rows->n * (w->cols / 256));
    rows->tiles = room, rows->unpacked = true;
}

// Where the results of a panel go, `stride` bytes from token to token.
typedef struct {
    const float *out;
    size_t stride;
} Output;

// What the product of a panel of floats prefetches: of kept tiles those that lie behind, each of the panels a part, for the
// next products; and where the results go.
static Prefetch prefetch_of(const TileRows *rows, int T, Panel panel, Output output) {
    size_t size = rows->n * tiles_size(rows->w);
    int steps = (rows->w->cols + 1) / 2;
    Prefetch prefetch = {rows->tiles, 0, (const char *)output.out, (int64_t)output.stride - 128, 0};
    if (rows->w->tiles) {
        prefetch.weights = rows->tiles + size + size / T * panel.t;
        prefetch.step = (int)(size * panel.width / T / steps);
    }
    while (2 * panel.width * 2 * (prefetch.mask + 1) <= steps) prefetch.mask = 2 * prefetch.mask + 1;
    return prefetch;
}

// y (width, ROWS) = a panel times one or two rows of tiles; of one token y (n TILE,), and n may be any number.
static void multiply_panel(const Kernels *k, float *y, const TileRows *rows, const Activations *a, Panel panel, Output output) {
    const Mat *w = rows->w;
    TileProduct p = {
        .y = y, .tiles = rows->tiles, .tile_rows = rows->n, .cols = w->cols, .T = panel.width, .unpacked = rows->unpacked};
    if (is_quantised(w)) {
        p.x = a->blocks + (size_t)panel.t * (w->cols / 32), p.T = panel.left;
        tile_kernels(k, w)->product(&p);
        return;
    }
    bool pairs = w->type == BF16 && a->pairs;
    if (pairs) p.x = a->pairs + (size_t)panel.t * 2 * ((w->cols + 1) / 2);
    else p.x = a->panels + (size_t)panel.t * w->cols;
    if (panel.width > 1) p.prefetch = prefetch_of(rows, a->T, panel, output);
    pairs ? k->pairs_product(&p) : tile_kernels(k, w)->product(&p);
}

// Up to ROWS rows with many tokens.
static void multiply_tiles(const Kernels *k, const Product *p, const Activations *a, int r, int end, float *scratch) {
    const Mat *w = p->w;
    float *y = scratch; // (tokens of a panel, ROWS)
    uint8_t *room = (uint8_t *)(y + k->tokens * ROWS);
    TileRows rows = tile_rows(k, w, r, end, room);
    unpack(k, &rows, a->T, room + 2 * ROWS * w->cols);
    for (int t = 0; t < a->T;) {
        Panel panel = panel_at(k, t, a->T, w->type == BF16 && a->pairs);
        float *out = p->out + (size_t)t * w->rows + r;
        for (int i = 0; i < panel.left && is_quantised(w); i++)
            for (int j = 0; j < end - r; j += TILE) __builtin_prefetch(out + (size_t)i * w->rows + j, 1);
        multiply_panel(k, y, &rows, a, panel, (Output){out, w->rows * sizeof(float)});
        for (int i = 0; i < panel.left; i++) put_row(out + (size_t)i * w->rows, y + i * ROWS, end - r, p->add);
        t += panel.width;
    }
}

// Rows r..end-1 in kept tiles with one token: one long stream of memory. Full tiles are written in place, without scratch.
static void stream_tiles(const Kernels *k, const Product *p, const Activations *a, int r, int end, float *scratch) {
    const Panel token = {0, 1, 1};
    TileRows rows = tile_rows(k, p->w, r, end, NULL), full = rows;
    full.n = p->add ? 0 : (end - r) / TILE;
    if (full.n) multiply_panel(k, p->out + r, &full, a, token, (Output){0});
    if (full.n == rows.n) return;
    rows.tiles += full.n * tiles_size(p->w), rows.n -= full.n;
    multiply_panel(k, scratch, &rows, a, token, (Output){0});
    put_row(p->out + r + full.n * TILE, scratch, end - r - full.n * TILE, p->add);
}

// What the products of one token read, every member makes for itself: that takes no longer than to wait for another one's.
static Activations inputs(Member *self, const MatmulArgs *a) {
    Activations in = a->in;
    if (in.T > 1 || a->ready) return in;
    if (in.norm) in.x = in.panels = self->x;
    in.blocks = self->blocks;
    if (self->prepared) return in;
    if (in.norm) normalize(self->cpu, self->x, a->in.x, in.norm, in.cols);
    if (a->needs_blocks) self->cpu->kernels->quantize(self->blocks, in.x, in.cols / 32);
    self->prepared = true;
    return in;
}

// Rows r..end-1 of one product; r is a multiple of TILE.
static void multiply_some(Member *self, const Product *p, const Activations *in, int r, int end) {
    const Kernels *k = self->cpu->kernels;
    if (in->T == 1 && p->w->tiles) stream_tiles(k, p, in, r, end, self->scratch);
    else if (in->T == 1 || !has_tiles(k)) multiply_rows(k, p, in, r, end, self->scratch);
    else
        for (; r < end; r += ROWS) multiply_tiles(k, p, in, r, r + ROWS < end ? r + ROWS : end, self->scratch);
}

static int items_of(const Product *p) { return (p->w->rows + ROWS - 1) / ROWS; }

// Items are the rows of all products, ROWS at a time, one product after the other.
static void matmul_rows(Member *self, const void *args, int begin, int end) {
    const MatmulArgs *a = args;
    Activations in = inputs(self, a);
    for (const Product *p = a->products; p < a->products + a->n; p++) {
        int items = items_of(p), first = begin > 0 ? begin * ROWS : 0, last = end < items ? end * ROWS : p->w->rows;
        if (first < last) multiply_some(self, p, &in, first, last);
        begin -= items, end -= items;
    }
}

// ----------------------------------------------------------------------------
// What products read: panels, pairs, blocks

// Tokens t..t+n-1 of x, one of many: as they are, or normalised into room (n, cols).
static const float *read_tokens(const Cpu *cpu, const Activations *a, int t, int n, float *room) {
    size_t cols = a->cols;
    if (!a->norm) return a->x + t * cols;
    for (int i = 0; i < n; i++) normalize(cpu, room + i * cols, a->x + (t + i) * cols, a->norm, a->cols);
    return room;
}

// Items are tokens.
static void quantize_tokens(Member *self, const void *args, int begin, int end) {
    const Activations *a = args;
    Cpu *cpu = self->cpu;
    for (int t = begin, n = a->cols / 32; t < end; t++)
        cpu->kernels->quantize(cpu->blocks + (size_t)t * n, read_tokens(cpu, a, t, 1, self->scratch), n);
}

// Items are panels; a token that is missing in the last is zero.
static void pack_panels(Member *self, const void *args, int begin, int end) {
    const Activations *a = args;
    const Kernels *k = self->cpu->kernels;
    for (int i = begin; i < end; i++) {
        Panel p = panel_at(k, i * k->tokens, a->T, false);
        float *panel = self->cpu->panels + (size_t)p.t * a->cols; // (cols, width)
        const float *x = read_tokens(self->cpu, a, p.t, p.left, self->scratch);
        if (p.left == p.width) k->transpose((uint8_t *)panel, (const uint8_t *)x, 4 * a->cols, p.width, a->cols);
        else
            for (size_t c = 0; c < (size_t)a->cols; c++)
                for (int j = 0; j < p.width; j++) panel[c * p.width + j] = j < p.left ? x[j * (size_t)a->cols + c] : 0;
    }
}

// The same in BF16, by pairs of columns.
static void pack_pairs(Member *self, const void *args, int begin, int end) {
    const Activations *a = args;
    const Kernels *k = self->cpu->kernels;
    int pairs = (a->cols + 1) / 2;
    float *room = self->scratch;                        // (cols,)
    uint16_t *rows = (uint16_t *)(room + a->cols);      // (width, 2 pairs)
    for (int i = begin; i < end; i++) {
        Panel p = panel_at(k, i * k->tokens, a->T, true);
        memset(rows, 0, (size_t)p.width * pairs * 4);
        for (int j = 0; j < p.left; j++)
            k->bf16s(rows + (size_t)j * 2 * pairs, read_tokens(self->cpu, a, p.t + j, 1, room), a->cols);
        uint16_t *panel = self->cpu->pairs + (size_t)p.t * 2 * pairs; // (pairs, width, 2)
        k->transpose((uint8_t *)panel, (const uint8_t *)rows, 4 * pairs, p.width, pairs);
    }
}

// n products of x (T, cols) or, where norm is given, of norm(x).
static MatmulArgs products_of(const Cpu *cpu, const Product *products, int n, const Mat *norm, const float *x, int T) {
    bool pairs = cpu->kernels->bf16s && !cpu->precise && T >= LEAST_PAIRS;
    MatmulArgs a = {.n = n,
                    .in = {.x = x,
                           .norm = norm ? norm->data : NULL,
                           .panels = T > 1 ? cpu->panels : x,
                           .blocks = cpu->blocks,
                           .cols = products->w->cols,
                           .T = T}};
    for (int i = 0; i < n; i++) {
        a.products[i] = products[i];
        if (is_quantised(products[i].w)) a.needs_blocks = true;
        else if (pairs && products[i].w->type == BF16) a.in.pairs = cpu->pairs;
        else a.needs_floats = true;
    }
    return a;
}

// Adds the steps that make what products of many tokens read.
static void prepare(Cpu *cpu, const MatmulArgs *a) {
    const Activations *in = &a->in;
    int panels = (in->T + cpu->kernels->tokens - 1) / cpu->kernels->tokens;
    int64_t cost = (int64_t)cpu->kernels->tokens * in->cols;
    if (in->T > 1 && a->needs_blocks) add(cpu, quantize_tokens, in, sizeof *in, in->T, in->cols);
    if (in->T > 1 && a->needs_floats) add(cpu, pack_panels, in, sizeof *in, panels, cost);
    if (in->pairs) add(cpu, pack_pairs, in, sizeof *in, panels, cost);
}

static int64_t cost_of_rows(const MatmulArgs *a) { return (int64_t)ROWS * a->in.cols * a->in.T; }

static void multiply(Cpu *cpu, const MatmulArgs *a) {
    int items = 0;
    for (int i = 0; i < a->n; i++) items += items_of(&a->products[i]);
    add(cpu, matmul_rows, a, sizeof *a, items, cost_of_rows(a));
}

// ----------------------------------------------------------------------------
// Gate, up and SwiGLU in one step: h = silu(norm(x) w1^T) * (norm(x) w3^T), products 0 and 1

// One token: rows r..end-1.
static void swiglu_token(Member *self, const MatmulArgs *a, const Activations *in, int r, int end) {
    const Kernels *k = self->cpu->kernels;
    float *h = a->products[0].out + r, *h2 = a->products[1].out + r;
    for (int i = 0; i < 2; i++) multiply_some(self, &a->products[i], in, r, end);
    k->swiglu(h, h2, end - r);
    if (a->to_blocks) k->quantize(self->cpu->gated_blocks + r / 32, h, (end - r) / 32);
}

// Columns r..end-1 of a panel of gate and up, each (tokens of a panel, ROWS), become those of h, in the form that the next
// product reads.
static void put_swiglu(Member *self, const MatmulArgs *a, float *gate, Panel panel, int r, int end) {
    Cpu *cpu = self->cpu;
    const Kernels *k = cpu->kernels;
    int rows = a->products->w->rows, n = end - r;
    uint16_t narrow[16][ROWS] = {0}; // of a panel
    for (int i = 0; i < panel.left; i++) {
        float *h = gate + i * ROWS, *up = h + k->tokens * ROWS;
        k->swiglu(h, up, n);
        if (a->to_pairs) k->bf16s(narrow[i], h, n);
        else if (a->to_blocks) k->quantize(cpu->gated_blocks + ((size_t)(panel.t + i) * rows + r) / 32, h, n / 32);
        else put_row(a->products->out + (size_t)(panel.t + i) * rows + r, h, n, false);
    }
    uint16_t *out = cpu->gated_pairs + (size_t)panel.t * 2 * ((rows + 1) / 2) + r * panel.width;
    if (a->to_pairs) k->transpose((uint8_t *)out, (uint8_t *)narrow, sizeof *narrow, panel.width, (n + 1) / 2);
}

// Many tokens, up to ROWS rows: gate and up never stand in memory.
static void swiglu_tiles(Member *self, const MatmulArgs *a, int r, int end) {
    const Kernels *k = self->cpu->kernels;
    const Mat *w = a->products[0].w;
    float *gate = self->scratch, *up = gate + k->tokens * ROWS; // (tokens of a panel, ROWS)
    uint8_t *room = (uint8_t *)(up + k->tokens * ROWS);
    TileRows gates = tile_rows(k, w, r, end, room);
    TileRows ups = tile_rows(k, a->products[1].w, r, end, room + gates.n * tiles_size(w));
    unpack(k, &gates, a->in.T, room + 2 * ROWS * w->cols);
    unpack(k, &ups, a->in.T, room + 4 * ROWS * w->cols);
    for (int t = 0; t < a->in.T;) {
        Panel panel = panel_at(k, t, a->in.T, w->type == BF16 && a->in.pairs);
        multiply_panel(k, gate, &gates, &a->in, panel, (Output){gate, ROWS * sizeof(float)});
        multiply_panel(k, up, &ups, &a->in, panel, (Output){up, ROWS * sizeof(float)});
        put_swiglu(self, a, gate, panel, r, end);
        t += panel.width;
    }
}

// Items are ROWS rows of both matrices.
static void swiglu_rows(Member *self, const void *args, int begin, int end) {
    const MatmulArgs *a = args;
    Activations in = inputs(self, a);
    int rows = a->products->w->rows, last = end * ROWS < rows ? end * ROWS : rows;
    if (in.T == 1) {
        swiglu_token(self, a, &in, begin * ROWS, last);
        return;
    }
    for (int r = begin * ROWS; r < last; r += ROWS) swiglu_tiles(self, a, r, r + ROWS < last ? r + ROWS : last);
}

// Where gate and up stand in memory. Items are tokens.
static void swiglu_tokens(Member *self, const void *args, int begin, int end) {
    Cpu *cpu = self->cpu;
    size_t n = cpu->config.hidden_dim;
    (void)args;
    for (int t = begin; t < end; t++) cpu->kernels->swiglu(cpu->h + t * n, cpu->h2 + t * n, (int)n);
}

// ----------------------------------------------------------------------------
// Attention

// Where the numbers of pair i of a head stand.
static int first_of_pair(const Config *c, int i) { return c->rope_halves ? i : 2 * i; }
static int second_of_pair(const Config *c, int i) { return c->rope_halves ? i + c->head_dim / 2 : 2 * i + 1; }

// Fills the table of rotations up to `positions`: angle = position * frequency, in double precision, because a float angle is off
// by 1e-4 at position 2000.
static void extend_rotations(Cpu *cpu, int positions) {
    const Config *c = &cpu->config;
    for (int half = c->head_dim / 2; cpu->rotations < positions; cpu->rotations++) {
        float *cosines = cpu->rotation + (size_t)cpu->rotations * 2 * c->head_dim, *sines = cosines + c->head_dim;
        for (int i = 0; i < half; i++) {
            double angle = cpu->rotations * cpu->model->weights.frequencies[i];
            float sine = (float)(c->rope_scale * sin(angle)), cosine = (float)(c->rope_scale * cos(angle));
            cosines[first_of_pair(c, i)] = cosines[second_of_pair(c, i)] = cosine;
            sines[first_of_pair(c, i)] = -sine, sines[second_of_pair(c, i)] = sine;
        }
    }
}

static int round_up(int n) { return (n + TILE - 1) / TILE * TILE; }

// What is cached of a KV head.
typedef struct {
    char *keys, *values;
    float *key_scales, *value_scales; // NULL: there are none
} Cached;

// A layer's, from position `from` on, a multiple of TILE.
static Cached cached(const Cpu *cpu, int layer, int head, int from) {
    size_t size = number_size(cpu->kv), heads = layer * (size_t)cpu->config.n_kv_heads + head;
    size_t row = heads * cpu->positions + from;
    Cached c = {cpu->keys + (heads * round_up(cpu->positions) + from) * cpu->config.head_dim * size,
                cpu->values + row * cpu->value_width * size, NULL, NULL};
    if (cpu->key_scales) c.key_scales = cpu->key_scales + row, c.value_scales = cpu->value_scales + row;
    return c;
}

typedef struct {
    float *out;
    const Layer *w;
    int layer, T;
    int span;     // tokens of one head that share what is loaded
    bool rotated; // a step before finishes the queries and keys, and fills the cache
} AttentionArgs;

// x (n,) as scale * out, to the nearest; returns the scale, which is NaN if a number of x is not finite.
static float to_bytes(int8_t *out, const float *x, int n) {
    float most = 0, poison = 0, rounded; // 0 times NaN or infinity is NaN
    for (int i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most, poison += 0 * x[i];
    float inverse = most > 1e-30f ? 127 / most : 0;
    for (int i = 0; i < n; i++) {
        int32_t bits; // the lowest are the integer, with such a number added
        rounded = x[i] * inverse + 0x1.8p23f;
        memcpy(&bits, &rounded, 4);
        out[i] = (int8_t)bits;
    }
    return most / 127 + poison;
}

// Stores the key and the value of a KV head of token t in the cache.
static void cache(Cpu *cpu, int layer, int head, int t, float *scratch) {
    const Config *c = &cpu->config;
    int n = c->head_dim, pos = cpu->pos + t, row = pos % TILE;
    const float *k = cpu->k + (size_t)t * c->kv_dim + head * n, *v = cpu->v + (size_t)t * c->kv_dim + head * n;
    Cached to = cached(cpu, layer, head, pos - row);
    void *key = scratch, *value = to.values + (size_t)row * cpu->value_width * number_size(cpu->kv);
    if (cpu->kv == INT8_GROUPS) {
        to.key_scales[row] = to_bytes(key, k, n), to.value_scales[row] = to_bytes(value, v, n);
        for (int i = 0; i < n; i++) ((int8_t *)to.keys)[i * TILE + row] = ((int8_t *)key)[i];
    } else if (cpu->kv == F16) {
        cpu->kernels->halves(key, k, n), cpu->kernels->halves(value, v, n);
        for (int i = 0; i < n; i++) ((uint16_t *)to.keys)[i * TILE + row] = ((uint16_t *)key)[i];
    } else {
        memcpy(value, v, n * sizeof(float));
        for (int i = 0; i < n; i++) ((float *)to.keys)[i * TILE + row] = k[i];
    }
}

static void add_bias(const Cpu *cpu, float *x, const Mat *bias, int head) {
    int n = cpu->config.head_dim;
    if (bias->data) put_row(x, (const float *)bias->data + head * n, n, true);
}

// Bias, norm and RoPE of query or key `head` at a position; x (head_dim,).
static void finish_head(const Cpu *cpu, float *x, const Mat *bias, const Mat *norm, int head, int pos) {
    int n = cpu->config.head_dim;
    const float *rotation = cpu->rotation + (size_t)pos * 2 * n;
    add_bias(cpu, x, bias, head);
    if (norm->data) normalize(cpu, x, x, norm->data, n);
    if (cpu->config.rope_halves) cpu->kernels->rotate_halves(x, rotation, n);
    else cpu->kernels->rotate(x, rotation, n);
}

// Finishes the query heads that share a KV head, its key and its value, of token t; key and value go to the cache.
static void rope_and_cache(Cpu *cpu, const AttentionArgs *a, int head, int t, float *scratch) {
    const Config *c = &cpu->config;
    const Layer *w = a->w;
    int shared = c->n_heads / c->n_kv_heads, pos = cpu->pos + t;
    float *q = cpu->q + (size_t)t * c->q_dim;
    size_t at = (size_t)t * c->kv_dim + head * c->head_dim;
    for (int i = head * shared; i < (head + 1) * shared; i++) finish_head(cpu, q + i * c->head_dim, &w->bq, &w->q_norm, i, pos);
    finish_head(cpu, cpu->k + at, &w->bk, &w->k_norm, head, pos);
    add_bias(cpu, cpu->v + at, &w->bv, head);
    cache(cpu, a->layer, head, t, scratch);
}

// Items are tokens. They go head by head, for the keys of TILE tokens share their places in the cache.
static void rope_tokens(Member *self, const void *args, int begin, int end) {
    const AttentionArgs *a = args;
    for (int head = 0; head < self->cpu->config.n_kv_heads; head++)
        for (int t = begin; t < end; t++) rope_and_cache(self->cpu, a, head, t, self->scratch);
}

// The first position that the token at `pos` sees.
static int first_seen(const Cpu *cpu, int pos) {
    int window = cpu->config.window;
    return window && pos >= window ? pos - window + 1 : 0;
}

// Attention of queries to positions, without the first `hidden`: the first query sees up to `seen`, each next one `more` more. The
// results go to `out`, q_stride numbers apart like the queries.
static void attend(const Kernels *k, const Attention *a, int hidden, int seen, int more, float *out) {
    float sums[QUERIES];
    k->scores(a);
    for (int i = 0; i < a->n_queries; i++, seen += more) {
        float *p = a->p + i * a->p_stride;
        if (a->key_scales) k->multiply(p + hidden, a->key_scales + hidden, seen - hidden);
        sums[i] = k->exponentials(p + hidden, k->largest(p + hidden, seen - hidden), 1 / sqrtf(a->head_dim), seen - hidden);
        if (a->value_scales) k->multiply(p + hidden, a->value_scales + hidden, seen - hidden);
        memset(p, 0, hidden * sizeof *p);
        memset(p + seen, 0, (a->n - seen) * sizeof *p);
    }
    k->mix(a);
    for (int i = 0; i < a->n_queries; i++)
        for (int j = 0; j < a->head_dim; j++) out[i * a->q_stride + j] = a->out[i * a->width + j] / sums[i];
}

// Up to QUERIES queries of a KV head share what is loaded: the heads of one token, or, where each head has its own keys, several
// tokens. So many groups of them a KV head has.
static int query_groups(const Cpu *cpu, int T) {
    return (cpu->config.n_heads / cpu->config.n_kv_heads * T + QUERIES - 1) / QUERIES;
}

// Of one token, or of few positions in models whose heads have keys of their own; items are groups of queries.
static void attention_groups(Member *self, const void *args, int begin, int end) {
    const AttentionArgs *a = args;
    Cpu *cpu = self->cpu;
    const Config *c = &cpu->config;
    int shared = c->n_heads / c->n_kv_heads, groups = query_groups(cpu, a->T), more = a->T > 1;
    size_t room = round_up(cpu->positions);
    int start = first_seen(cpu, cpu->pos), from = start / TILE * TILE;
    for (int item = begin; item < end; item++) {
        int first = item % groups * QUERIES, head = item / groups, left = shared * a->T - first, t = more ? first : 0;
        int n = left < QUERIES ? left : QUERIES, seen = cpu->pos + t + 1 - from;
        size_t at = (size_t)t * c->q_dim + (size_t)(head * shared + first - t) * c->head_dim;
        if (!a->rotated) rope_and_cache(cpu, a, head, 0, self->scratch);
        Cached kv = cached(cpu, a->layer, head, from);
        Attention queries = {.q = cpu->q + at,
                             .q_stride = more ? c->q_dim : c->head_dim,
                             .n_queries = n,
                             .p = self->scratch,
                             .p_stride = room,
                             .out = self->scratch + QUERIES * room,
                             .keys = kv.keys,
                             .values = kv.values,
                             .key_scales = kv.key_scales,
                             .value_scales = kv.value_scales,
                             .type = cpu->kv,
                             .head_dim = c->head_dim,
                             .width = cpu->value_width,
                             .n = seen + more * (n - 1)};
        attend(cpu->kernels, &queries, start - from, seen, more, a->out + at);
    }
}

// Of many tokens and positions: up to SPAN tokens of a query head go over the positions BLOCK by BLOCK, whose keys and values are loaded once for
// all of them. What a token has seen so far is scaled down whenever a larger score comes (Milakov 2018).
enum { SPAN = CHUNK, BLOCK = 512 };

// So many tokens that each member has two spans or more, if that leaves enough to share what is loaded.
static int span_of(const Cpu *cpu, int T) {
    int span = SPAN;
    while (span > SPAN / 4 && cpu->config.n_heads * ((T + span - 1) / span) < 2 * cpu->team.n_threads) span /= 2;
    return span;
}

typedef struct {
    float *q;          // (panels, head_dim, queries of a panel)
    float *out;        // (SPAN, value_width): values weighted with exp(score - most)
    float *most, *sum; // (SPAN,): the largest score; the sum of the weights
    float *scores, *p; // (queries, BLOCK), and, after exp, (BLOCK, queries)
} Span;

// Places in scratch, whose number goes to `size` where that is given.
static Span span_in(const Cpu *cpu, float *scratch, size_t *size) {
    int queries = cpu->kernels->queries, tokens = SPAN + queries;
    Span s = {.q = scratch};
    s.out = s.q + tokens * cpu->config.head_dim;
    s.scores = s.out + tokens * cpu->value_width;
    s.p = s.scores + BLOCK * queries;
    s.most = s.p + BLOCK * queries;
    s.sum = s.most + tokens;
    if (size) *size = s.sum + tokens - scratch;
    return s;
}

// Queries t.. of a head, which lie q_dim apart, as a panel. Those that are missing are zero.
static void load_queries(const Cpu *cpu, float *panel, int head, int t, int n) {
    const Config *c = &cpu->config;
    const float *q = cpu->q + (size_t)t * c->q_dim + (size_t)head * c->head_dim;
    int queries = cpu->kernels->queries;
    if (n == queries) cpu->kernels->transpose((uint8_t *)panel, (const uint8_t *)q, 4 * (size_t)c->q_dim, queries, c->head_dim);
    else
        for (int d = 0; d < c->head_dim; d++)
            for (int i = 0; i < queries; i++) panel[d * queries + i] = i < n ? q[i * (size_t)c->q_dim + d] : 0;
}

// Scores (n,) of token t of the span, which sees the first `seen` but those before its window, become weights.
static void weigh(const Cpu *cpu, const Span *s, int t, float *scores, const Cached *kv, int seen, int n) {
    const Kernels *k = cpu->kernels;
    int end = seen < 0 ? 0 : seen < n ? seen : n, hidden = first_seen(cpu, seen - 1), sees = end - hidden;
    if (sees <= 0) hidden = end = 0;
    memset(scores, 0, hidden * sizeof *scores);
    memset(scores + end, 0, (n - end) * sizeof *scores);
    if (sees <= 0) return;
    scores += hidden;
    if (kv->key_scales) k->multiply(scores, kv->key_scales + hidden, sees);
    float largest = k->largest(scores, sees), scale = 1 / sqrtf(cpu->config.head_dim);
    if (!(largest <= s->most[t])) { // or is not a number
        float shrink = expf((s->most[t] - largest) * scale), *out = s->out + (size_t)t * cpu->value_width;
        s->most[t] = largest, s->sum[t] *= shrink;
        for (int d = 0; d < cpu->value_width; d++) out[d] *= shrink;
    }
    s->sum[t] += k->exponentials(scores, s->most[t], scale, sees);
    if (kv->value_scales) k->multiply(scores, kv->value_scales + hidden, sees);
}

// The panel with token t of the span and those behind it sees a block of n positions: t `seen` of them, each next one 1 more.
static void attend_panel(const Cpu *cpu, const Span *s, int t, const Cached *kv, int seen, int n) {
    const Kernels *k = cpu->kernels;
    size_t dim = cpu->config.head_dim, width = cpu->value_width;
    int queries = k->queries, all = seen + queries - 1, tiles;
    const float *p = queries > 1 ? s->p : s->scores;
    n = all < n ? all : n;
    if (n <= 0) return;
    tiles = round_up(n) / TILE;
    PanelProduct scores = {s->scores, kv->keys, s->q + t * dim, BLOCK, dim * TILE, TILE, tiles, (int)dim, false, cpu->kv};
    k->panel_product(&scores);
    for (int i = 0; i < queries; i++) weigh(cpu, s, t + i, s->scores + i * BLOCK, kv, seen + i, n);
    if (queries > 1) k->transpose((uint8_t *)s->p, (const uint8_t *)s->scores, BLOCK * sizeof(float), queries, n);
    PanelProduct mix = {s->out + t * width, kv->values, p, width, TILE, width, (int)width / TILE, n, true, cpu->kv};
    k->panel_product(&mix);
}

// Tokens t..t+tokens-1 of a query head.
static void attend_span(const Cpu *cpu, const AttentionArgs *a, const Span *s, int head, int t, int tokens) {
    const Config *c = &cpu->config;
    size_t width = cpu->value_width;
    int queries = cpu->kernels->queries, kv_head = head / (c->n_heads / c->n_kv_heads), first = cpu->pos + t;
    for (int i = 0; i < tokens; i += queries)
        load_queries(cpu, s->q + i * c->head_dim, head, t + i, tokens - i < queries ? tokens - i : queries);
    memset(s->out, 0, (SPAN + queries) * width * sizeof *s->out);
    for (int i = 0; i < SPAN + queries; i++) s->most[i] = -INFINITY, s->sum[i] = 0;
    for (int from = first_seen(cpu, first) / BLOCK * BLOCK; from < first + tokens; from += BLOCK) {
        int left = first + tokens - from, n = left < BLOCK ? left : BLOCK;
        Cached kv = cached(cpu, a->layer, kv_head, from);
        for (int i = 0; i < tokens; i += queries) attend_panel(cpu, s, i, &kv, first + i + 1 - from, n);
    }
    for (int i = 0; i < tokens; i++) {
        float *out = a->out + (size_t)(t + i) * c->q_dim + (size_t)head * c->head_dim;
        for (int d = 0; d < c->head_dim; d++) out[d] = s->out[i * width + d] / s->sum[i];
    }
}

// Items are spans of tokens of a query head, one head after the other.
static void attention_spans(Member *self, const void *args, int begin, int end) {
    const AttentionArgs *a = args;
    int spans = (a->T + a->span - 1) / a->span;
    Span s = span_in(self->cpu, self->scratch, NULL);
    for (int item = begin; item < end; item++) {
        int t = item % spans * a->span;
        attend_span(self->cpu, a, &s, item / spans, t, a->T - t < a->span ? a->T - t : a->span);
    }
}

typedef struct {
    MatmulArgs qkv;
    AttentionArgs attention;
} QkvAttentionArgs;
_Static_assert(sizeof(QkvAttentionArgs) <= ARGS, "room in a step");

// Of one token, query, key, value and attention of some KV heads: a member that makes them needs nobody else's. Items are KV
// heads.
static void qkv_attention_heads(Member *self, const void *args, int begin, int end) {
    const QkvAttentionArgs *a = args;
    Activations in = inputs(self, &a->qkv);
    for (const Product *p = a->qkv.products; p < a->qkv.products + 3; p++) {
        int rows = p->w->rows / self->cpu->config.n_kv_heads; // of a KV head
        multiply_some(self, p, &in, begin * rows, end * rows);
    }
    attention_groups(self, &a->attention, begin, end);
}

// Whether one token's query, key and value are made in the step of its attention: where that spares members waiting for each
// other and gives each as many heads.
static bool by_heads(const Cpu *cpu) {
    const Config *c = &cpu->config;
    return c->head_dim % TILE == 0 && cpu->team.n_threads > 1 && c->n_kv_heads % cpu->team.n_threads == 0;
}

// ----------------------------------------------------------------------------
// The operations; backend.h says what each computes

static void embed(Backend *b, float *x, const Mat *table, const int *tokens, int T) {
    Cpu *cpu = (Cpu *)b;
    cpu->table = table, cpu->embedded = x;
    for (int t = 0; t < T; t++) llamac_floats(cpu->kernels, x + (size_t)t * table->cols, table, tokens[t], 0, table->cols);
}

// Of one token with few query heads to a KV head, the member that attends also rotates them and fills the cache.
static void attention(Backend *b, int layer, const Layer *w, float *out, const float *x, int pos, int T) {
    Cpu *cpu = (Cpu *)b;
    const Config *c = &cpu->config;
    Product products[] = {{cpu->q, &w->wq, false}, {cpu->k, &w->wk, false}, {cpu->v, &w->wv, false}};
    MatmulArgs qkv = products_of(cpu, products, 3, &w->attention_norm, x, T);
    // few positions of keys that no other head has are read again sooner than a panel is made: 3 % of a prompt of 128 tokens
    bool own = c->n_heads == c->n_kv_heads, spans = T > 1 && (!own || c->window || pos + T > BLOCK);
    int groups = query_groups(cpu, spans ? 1 : T), span = span_of(cpu, T), n = 0;
    int64_t cost = 2 * (int64_t)(pos + T) * c->head_dim * (spans ? span : QUERIES);
    AttentionArgs a = {out, w, layer, T, span, T > 1 || groups > 1};
    cpu->pos = pos;
    extend_rotations(cpu, pos + T);
    prepare(cpu, &qkv);
    if (!a.rotated && by_heads(cpu)) {
        for (int i = 0; i < 3; i++) n += items_of(&products[i]);
        cost += n * cost_of_rows(&qkv) / c->n_kv_heads;
        add(cpu, qkv_attention_heads, &(QkvAttentionArgs){qkv, a}, sizeof(QkvAttentionArgs), c->n_kv_heads, cost);
        return;
    }
    multiply(cpu, &qkv);
    if (a.rotated) add(cpu, rope_tokens, &a, sizeof a, T, 4 * c->q_dim);
    if (spans) add(cpu, attention_spans, &a, sizeof a, c->n_heads * ((T + span - 1) / span), cost);
    else add(cpu, attention_groups, &a, sizeof a, c->n_kv_heads * groups, cost);
}

static void add_product(Backend *b, float *x, const Mat *w, const float *y, int T) {
    Cpu *cpu = (Cpu *)b;
    MatmulArgs a = products_of(cpu, &(Product){x, w, true}, 1, NULL, y, T);
    prepare(cpu, &a);
    multiply(cpu, &a);
}

// The step of gate and up writes h in the form that down reads. Gate and up stand in memory only where the kernels have no
// tiles, or the matrices are of two types.
static void feed_forward(Backend *b, const Layer *w, float *x, int T) {
    Cpu *cpu = (Cpu *)b;
    Product gate_up[] = {{cpu->h, &w->w1, false}, {cpu->h2, &w->w3, false}};
    MatmulArgs gated = products_of(cpu, gate_up, 2, &w->ffn_norm, x, T);
    MatmulArgs down = products_of(cpu, &(Product){x, &w->w2, true}, 1, NULL, cpu->h, T);
    bool joined = w->w1.type == w->w3.type && (T == 1 || has_tiles(cpu->kernels));
    prepare(cpu, &gated);
    if (joined && !down.needs_floats && (!down.in.pairs || w->w1.type == BF16)) {
        gated.to_blocks = down.needs_blocks, gated.to_pairs = down.in.pairs != NULL, down.ready = true;
        down.in.blocks = cpu->gated_blocks;
        if (down.in.pairs) down.in.pairs = cpu->gated_pairs;
    }
    if (joined) add(cpu, swiglu_rows, &gated, sizeof gated, items_of(gate_up), 2 * cost_of_rows(&gated));
    else multiply(cpu, &gated), add(cpu, swiglu_tokens, "", 1, T, 4 * cpu->config.hidden_dim);
    if (!down.ready) prepare(cpu, &down);
    multiply(cpu, &down);
}

static void logits(Backend *b, float *out, const Mat *norm, const Mat *output, const float *x, int T) {
    Cpu *cpu = (Cpu *)b;
    MatmulArgs a = products_of(cpu, &(Product){out, output, false}, 1, norm, x, T);
    prepare(cpu, &a);
    multiply(cpu, &a);
}

typedef struct { const uint8_t *bytes; } ReadArgs;

enum { READ_CHUNK = 1 << 16 }; // bytes

// Items are chunks of the bytes; their sums go where nobody looks.
static void read_chunks(Member *self, const void *args, int begin, int end) {
    const ReadArgs *a = args;
    for (int chunk = begin; chunk < end; chunk++) {
        uint64_t sum[16] = {0}, word;
        for (size_t i = 0; i < READ_CHUNK; i += sizeof sum)
            for (int j = 0; j < 16; j++) {
                memcpy(&word, a->bytes + (size_t)chunk * READ_CHUNK + i + 8 * j, 8);
                sum[j] += word;
            }
        for (int j = 1; j < 16; j++) sum[0] += sum[j];
        memcpy(self->scratch, sum, sizeof *sum);
    }
}

double llamac_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

// The best of many passes.
static double bandwidth(Backend *b, const void *bytes, size_t n) {
    Cpu *cpu = (Cpu *)b;
    if (cpu->tiles) bytes = cpu->tiles, n = n < cpu->tiles_size ? n : cpu->tiles_size;
    int chunks = (int)(n / READ_CHUNK);
    double best = 0, start = llamac_seconds();
    for (int pass = 0; chunks && (pass < 5 || llamac_seconds() - start < 0.1); pass++) {
        double begin = llamac_seconds();
        add(cpu, read_chunks, &(ReadArgs){bytes}, sizeof(ReadArgs), chunks, READ_CHUNK);
        double speed = (double)chunks * READ_CHUNK / (llamac_seconds() - begin);
        best = speed > best ? speed : best;
    }
    return best;
}

// ----------------------------------------------------------------------------
// Opening and closing

static void *allocate(Cpu *cpu, size_t n, size_t size, size_t alignment) {
    void **memory = realloc(cpu->memory, (cpu->n_memory + 1) * sizeof(void *)), *p = NULL;
    if (!memory) return NULL;
    cpu->memory = memory;
    if (n < SIZE_MAX / 2 / size && !(p = aligned_alloc(alignment, (n * size / alignment + 1) * alignment))) return NULL;
    if (p) memory[cpu->n_memory++] = p;
    return p;
}

static float *cpu_alloc(Backend *b, size_t n) { return allocate((Cpu *)b, n, sizeof(float), 64); }

static void cpu_close(Backend *b) {
    Cpu *cpu = (Cpu *)b;
    llamac_team_end(&cpu->team);
    for (int i = 0; i < cpu->n_memory; i++) free(cpu->memory[i]);
    free(cpu->memory);
    free(cpu);
}

// Room for n_threads members, each with what a step of the model needs for itself.
static bool make_members(Cpu *cpu, int n_threads, size_t cols, size_t scratch_size) {
    size_t own_x = cols + 16, own_blocks = cols / 32 + 2; // a cache line or more between those of two members
    cpu->team.members = allocate(cpu, n_threads, sizeof(Member), 64);
    float *x = allocate(cpu, n_threads * own_x, sizeof(float), 64);
    float *scratch = allocate(cpu, n_threads * scratch_size, sizeof(float), 64);
    Block *blocks = allocate(cpu, n_threads * own_blocks, sizeof(Block), 64);
    if (!cpu->team.members || !x || !scratch || !blocks) return false;
    memset(cpu->team.members, 0, n_threads * sizeof(Member));
    for (int i = 0; i < n_threads; i++) {
        Member *m = &cpu->team.members[i];
        m->team = &cpu->team, m->cpu = cpu;
        m->x = x + i * own_x, m->blocks = blocks + i * own_blocks, m->scratch = scratch + i * scratch_size;
    }
    return true;
}

enum { SLICE = 4 << 20 }; // bytes of a matrix that are put in tiles at once

typedef struct {
    const Mat *m;
    uint8_t *tiles;
    int first;
} PackArgs;

// Items are rows of tiles.
static void pack_rows(Member *self, const void *args, int begin, int end) {
    const PackArgs *a = args;
    for (int i = a->first + begin; i < a->first + end; i++)
        llamac_pack(self->cpu->kernels, a->tiles + i * tiles_size(a->m), a->m, i * TILE);
}

// Gives back the memory of the whole pages of a mapped file from `begin` to `end`, and of those before, but not below
// `lowest`, that the system may have brought back with the last ones read.
static void drop_pages(const uint8_t *lowest, const uint8_t *begin, const uint8_t *end) {
    begin = begin - lowest > SLICE ? begin - SLICE : lowest;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)begin + page - 1) / page * page;
    uintptr_t last = (uintptr_t)end / page * page;
    if (first < last) madvise((void *)first, last - first, MADV_DONTNEED);
}

// Puts a matrix in tiles at `tiles`; returns their bytes. With tiles NULL it only measures.
static size_t keep_tiles(Cpu *cpu, Mat *m, uint8_t *tiles, const uint8_t *lowest) {
    if (m->type != F32 && m->type != BF16 && !is_quantised(m)) return 0;
    int n = (m->rows + TILE - 1) / TILE, slice = (int)(SLICE / tiles_size(m)) + 1;
    for (int i = 0, some; tiles && i < n; i += some) { // by slices, so that both orders of them never stand in memory
        some = n - i < slice ? n - i : slice;
        add(cpu, pack_rows, &(PackArgs){m, tiles, i}, sizeof(PackArgs), some, TILE * m->cols);
        if (cpu->model->mapped) drop_pages(lowest, row_of(m, i * TILE), row_of(m, (i + some) * TILE));
    }
    if (tiles) m->tiles = tiles;
    return n * tiles_size(m);
}

static size_t keep_all(Cpu *cpu, uint8_t *tiles) {
    Weights *w = &cpu->model->weights;
    const uint8_t *lowest = w->output.data;
    for (int i = 0; i < cpu->config.n_layers; i++)
        if ((const uint8_t *)w->layers[i].wq.data < lowest) lowest = w->layers[i].wq.data;
    size_t n = keep_tiles(cpu, &w->output, tiles, lowest);
    for (int i = 0; i < cpu->config.n_layers; i++) {
        Layer *l = &w->layers[i];
        Mat *mats[] = {&l->wq, &l->wk, &l->wv, &l->wo, &l->w1, &l->w3, &l->w2};
        for (int j = 0; j < 7; j++) n += keep_tiles(cpu, mats[j], tiles ? tiles + n : NULL, lowest);
    }
    return n;
}

// Puts the weights in tiles, in large pages. That takes as long as some tokens do, and makes the next ones faster; where it
// would take more than half of the memory that is free, they stay as they are: the file needs as much again.
static void order_weights(Cpu *cpu) {
    size_t n = keep_all(cpu, NULL), huge = 2 << 20;
    void *tiles = n > 0 && n < llamac_free_memory("") / 2 ? allocate(cpu, n, 1, huge) : NULL;
    if (!tiles) return;
    llamac_use_large_pages(tiles, (n / huge + 1) * huge); // as much as allocate took
    keep_all(cpu, tiles);
    cpu->tiles = tiles, cpu->tiles_size = n;
}

// The steps of one token are the same each time, but for the token and its position. They are made anew at every 64th, for
// attention costs more the later it is, and whether steps are worth a team is decided by their costs.
static bool begin(Backend *b, const int *tokens, int T, int pos, bool all) {
    Cpu *cpu = (Cpu *)b;
    cpu->precise = all;
    bool wanted = has_tiles(cpu->kernels) && !cpu->model->no_copy;
    if (T == 1 && wanted && ++cpu->decoded == PATIENT_TOKENS) order_weights(cpu);
    if (T == 1 && cpu->recorded && pos % 64) {
        cpu->pos = pos;
        extend_rotations(cpu, pos + 1);
        embed(b, cpu->embedded, cpu->table, tokens, 1);
        return false;
    }
    cpu->team.n_steps = 0, cpu->collecting = true, cpu->recorded = T == 1;
    return true;
}

static void end(Backend *b) {
    Cpu *cpu = (Cpu *)b;
    cpu->collecting = false;
    llamac_team_run(&cpu->team);
}

// What any operation needs for itself, in floats.
static size_t scratch_size(const Cpu *cpu, size_t cols) {
    size_t tiles = 2 * ROWS * (cols + 1 + cpu->kernels->tokens); // of two matrices
    size_t attention = QUERIES * ((size_t)round_up(cpu->positions) + cpu->value_width), most = cols, span;
    span_in(cpu, cpu->rotation, &span);
    most = most > tiles ? most : tiles;
    most = most > attention ? most : attention;
    most = most > span ? most : span;
    return (most + 15) / 16 * 16;
}

const char *llamac_cpu_open(Backend **backend, Model *model, int positions, int n_threads) {
    const Config *c = &model->config;
    *backend = NULL;
    const Kernels *kernels = choose_kernels();
    if (!kernels)
        return "LLAMAC_ISA names no instruction set of this machine; "
               "expected scalar, avx2, avx512, avx512bf16, neon or neondot";
    Cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return "out of memory";
    cpu->ops = (Backend){.chunk = CHUNK,
                         .begin = begin,
                         .end = end,
                         .alloc = cpu_alloc,
                         .embed = embed,
                         .attention = attention,
                         .add_product = add_product,
                         .feed_forward = feed_forward,
                         .logits = logits,
                         .bandwidth = bandwidth,
                         .close = cpu_close};
    cpu->config = *c;
    cpu->model = model;
    cpu->kernels = kernels;
    cpu->positions = positions;
    bool half = model->kv_bits == 16 || (!model->kv_bits && is_quantised(&model->weights.layers[0].wq));
    cpu->kv = model->kv_bits == 8 ? INT8_GROUPS : half ? F16 : F32;
    cpu->value_width = round_up(c->head_dim);
    size_t heads = (size_t)c->n_layers * c->n_kv_heads, number = number_size(cpu->kv), scale = sizeof(float);
    int cols = c->dim > c->hidden_dim ? c->dim : c->hidden_dim, chunk = positions < CHUNK ? positions : CHUNK;
    if (cols < c->q_dim) cols = c->q_dim;
    bool ok = (cpu->keys = allocate(cpu, heads * round_up(positions) * c->head_dim, number, 64))
              && (cpu->values = allocate(cpu, heads * positions * cpu->value_width, number, 64))
              && (number > 1 || (cpu->key_scales = allocate(cpu, heads * positions, scale, 64)))
              && (number > 1 || (cpu->value_scales = allocate(cpu, heads * positions, scale, 64)))
              && (cpu->rotation = allocate(cpu, (size_t)positions * 2 * c->head_dim, sizeof(float), 64))
              && (cpu->blocks = allocate(cpu, (size_t)chunk * (cols / 32 + 1), sizeof(Block), 64))
              && (cpu->gated_blocks = allocate(cpu, (size_t)chunk * (cols / 32 + 1), sizeof(Block), 64))
              && (cpu->panels = allocate(cpu, (size_t)(chunk + kernels->tokens) * cols, sizeof(float), 64))
              && (cpu->pairs = allocate(cpu, (size_t)(chunk + kernels->tokens) * (cols + 1), sizeof(uint16_t), 64))
              && (cpu->gated_pairs = allocate(cpu, (size_t)(chunk + kernels->tokens) * (cols + 1), sizeof(uint16_t), 64))
              && (cpu->q = cpu_alloc(&cpu->ops, (size_t)chunk * c->q_dim))
              && (cpu->k = cpu_alloc(&cpu->ops, (size_t)chunk * c->kv_dim))
              && (cpu->v = cpu_alloc(&cpu->ops, (size_t)chunk * c->kv_dim))
              && (cpu->h = cpu_alloc(&cpu->ops, (size_t)chunk * c->hidden_dim))
              && (cpu->h2 = cpu_alloc(&cpu->ops, (size_t)chunk * c->hidden_dim))
              && (cpu->team.steps = allocate(cpu, (c->n_layers + 1) * MOST_STEPS, sizeof(Step), 64))
              && make_members(cpu, n_threads, cols, scratch_size(cpu, cols));
    *backend = &cpu->ops;
    if (ok) llamac_team_start(&cpu->team, n_threads);
    if (ok) return NULL;
    cpu_close(&cpu->ops);
    *backend = NULL;
    return "not enough memory for the context; ask for fewer tokens with -n or -c, or fewer bits of each with --kv";
}

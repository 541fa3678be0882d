// Matrix products: the conversion of activations to the form that each type of weights reads, the
// products themselves, and the feed-forward network.
#include "cpu.h"

enum { MIN_UNPACKED = 24 }; // min tokens for which it pays to unpack tiles (TypeKernels.unpack)

// ----------------------------------------------------------------------------
// Panels: the tokens of a prompt that a kernel multiplies at once

// Tokens t..t+width-1. Only the first `left` exist; the others are padding.
typedef struct { int t, width, left; } Panel;

// Returns the panel that begins with token t of T. Its width is Kernels.tokens or, for the last
// tokens, the smallest power of two that holds them.
static Panel panel_at(const Kernels *k, int t, int T) {
    int left = T - t, width = 1;
    while (width < left && width < k->tokens) width *= 2;
    width = width < k->tokens ? width : k->tokens;
    return (Panel){t, width, left < width ? left : width};
}

// Returns tokens t..t+n-1 of the input (n, cols): rows of x, or RMSNorm of them, written to
// `normed`.
static const float *read_tokens(const Cpu *cpu, const Activations *a, int t, int n, float *normed) {
    size_t cols = a->cols;
    if (!a->norm) return a->x + t * cols;
    for (int i = 0; i < n; i++)
        normalize(cpu, normed + i * cols, a->x + (t + i) * cols, a->norm, a->cols);
    return normed;
}

// A Task that converts tokens to blocks. Items are tokens.
static void quantize_tokens(Worker *self, const void *args, int begin, int end) {
    const Activations *a = args;
    Cpu *cpu = self->cpu;
    for (int t = begin, n = a->cols / 32; t < end; t++) {
        const float *x = read_tokens(cpu, a, t, 1, self->scratch);
        cpu->kernels->quantize(cpu->blocks + (size_t)t * n, x, n);
    }
}

// A Task that writes the tokens of each Panel in the form PANELS: floats (cols, width). Items are
// Panels. Missing tokens of the last one are zero.
static void pack_panels(Worker *self, const void *args, int begin, int end) {
    const Activations *a = args;
    const Kernels *k = self->cpu->kernels;
    size_t cols = a->cols;
    for (int i = begin; i < end; i++) {
        Panel p = panel_at(k, i * k->tokens, a->T);
        float *panel = self->cpu->panels + p.t * cols; // (cols, width)
        const float *x = read_tokens(self->cpu, a, p.t, p.left, self->scratch);
        if (p.left == p.width) {
            k->transpose((uint8_t *)panel, (const uint8_t *)x, 4 * cols, p.width, a->cols);
            continue;
        }
        for (size_t c = 0; c < cols; c++)
            for (int j = 0; j < p.width; j++)
                panel[c * p.width + j] = j < p.left ? x[j * cols + c] : 0;
    }
}

// A Task that writes the tokens of each Panel in the form PAIRS: BF16 (pairs of columns, width, 2).
// Items are Panels. Missing tokens of the last one are zero.
static void pack_pairs(Worker *self, const void *args, int begin, int end) {
    const Activations *a = args;
    const Kernels *k = self->cpu->kernels;
    int pairs = (a->cols + 1) / 2;
    float *normed = self->scratch;                   // (cols,)
    uint16_t *rows = (uint16_t *)(normed + a->cols); // (width, 2 * pairs)
    for (int i = begin; i < end; i++) {
        Panel p = panel_at(k, i * k->tokens, a->T);
        memset(rows, 0, (size_t)p.width * pairs * 4);
        for (int j = 0; j < p.left; j++) {
            const float *x = read_tokens(self->cpu, a, p.t + j, 1, normed);
            k->bf16s(rows + (size_t)j * 2 * pairs, x, a->cols);
        }
        uint16_t *panel = self->cpu->pairs + (size_t)p.t * 2 * pairs; // (pairs, width, 2)
        k->transpose((uint8_t *)panel, (const uint8_t *)rows, 4 * pairs, p.width, pairs);
    }
}

MatmulArgs llamac_matmul_args(const Cpu *cpu, const Product *products, int n, const Mat *norm,
                              const float *x, int T) {
    bool pairs = cpu->kernels->bf16s;
    MatmulArgs a = {.n = n,
                    .in = {.x = x,
                           .norm = norm ? norm->data : NULL,
                           .panels = T > 1 ? cpu->panels : x,
                           .blocks = cpu->blocks,
                           .cols = products->w->cols,
                           .T = T}};
    for (int i = 0; i < n; i++) {
        const Mat *w = products[i].w;
        a.products[i] = products[i];
        a.reads |= is_quantised(w) ? BLOCKS : pairs && w->type == BF16 ? PAIRS : PANELS;
    }
    if (a.reads & PAIRS) a.in.pairs = cpu->pairs;
    return a;
}

void llamac_prepare(Cpu *cpu, const MatmulArgs *a) {
    const Activations *in = &a->in;
    int tokens = cpu->kernels->tokens, panels = (in->T + tokens - 1) / tokens;
    int64_t cost = (int64_t)tokens * in->cols; // cost of a panel
    if (in->T == 1) return;                    // llamac_activations converts one token
    if (a->reads & BLOCKS) llamac_add_step(cpu, quantize_tokens, in, sizeof *in, in->T, in->cols);
    if (a->reads & PANELS) llamac_add_step(cpu, pack_panels, in, sizeof *in, panels, cost);
    if (a->reads & PAIRS) llamac_add_step(cpu, pack_pairs, in, sizeof *in, panels, cost);
}

Activations llamac_activations(Worker *self, const MatmulArgs *a) {
    Activations in = a->in;
    if (in.T > 1 || a->ready) return in;
    if (in.norm) in.x = in.panels = self->x;
    in.blocks = self->blocks;
    if (in.pairs) in.pairs = self->pairs;
    if (self->prepared) return in;
    if (in.norm) normalize(self->cpu, self->x, a->in.x, in.norm, in.cols);
    if (a->reads & BLOCKS) self->cpu->kernels->quantize(self->blocks, in.x, in.cols / 32);
    if (a->reads & PAIRS) {
        self->pairs[in.cols] = 0; // completes the pair of an odd last column
        self->cpu->kernels->bf16s(self->pairs, in.x, in.cols);
    }
    self->prepared = true;
    return in;
}

// ----------------------------------------------------------------------------
// Products of kernels without tiles. `panels` are plain rows here, since all panels have one token
// (Kernels.tokens is 1)

// Returns the product of row r with a token, whose activations are x or `blocks`. If its type has
// no `dot`, the row is first converted to floats in scratch (cols,).
static float dot_row(const Kernels *k, const Mat *w, int r, const float *x, const Block *blocks,
                     float *scratch) {
    if (is_grouped(w)) return llamac_dot_groups(w, r, blocks);
    const void *input = is_quantised(w) ? (const void *)blocks : x;
    if (has_dot(k, w)) return k->types[w->type].dot(row_of(w, r), input, w->cols);
    llamac_floats(k, scratch, w, r, 0, w->cols);
    return k->types[F32].dot(scratch, x, w->cols);
}

// Computes rows r..end-1 of the product.
static void multiply_plain(const Kernels *k, const Product *p, const Activations *a, int r, int end,
                           float *scratch) {
    const Mat *w = p->w;
    for (; r < end; r++)
        for (int t = 0; t < a->T; t++) {
            const float *x = a->panels + (size_t)t * a->cols;
            const Block *blocks = a->blocks + (size_t)t * (a->cols / 32);
            float product = dot_row(k, w, r, x, blocks, scratch);
            float *out = p->out + (size_t)t * w->rows + r;
            *out = p->add ? *out + product : product;
        }
}

// ----------------------------------------------------------------------------
// Products with tiles

// Some groups of TILE rows of a matrix, as tiles.
typedef struct {
    const Mat *w;
    const uint8_t *tiles; // the row of tiles of the first group
    int first;            // index of the first group in that row of tiles
    int n;                // number of groups
    bool unpacked;        // in the layout of TypeKernels.unpack
} TileRows;

// Returns the tiles of rows r..end-1: if the weights are packed, their tiles; else packs these rows
// into `buffer`. r is a multiple of TILE.
static TileRows tile_rows(const Kernels *k, const Mat *w, int r, int end, uint8_t *buffer) {
    int height = tile_height(w), start = r / height * height;
    TileRows rows = {w, buffer, (r - start) / TILE, (end - r + TILE - 1) / TILE, is_grouped(w)};
    if (w->tiles) rows.tiles = (const uint8_t *)w->tiles + start / height * tiles_size(w);
    else
        for (int i = start; i < end; i += height, buffer += tiles_size(w))
            llamac_pack(k, buffer, w, i);
    return rows;
}

// Skips the first n groups.
static void skip_groups(TileRows *rows, int n) {
    int per = tile_height(rows->w) / TILE; // groups per row of tiles
    rows->first += n, rows->n -= n;
    rows->tiles += rows->first / per * tiles_size(rows->w);
    rows->first %= per;
}

// Unpacks rows of tiles into `buffer`, if their type has `unpack` (types with blocks of 256
// weights) and there are enough tokens T to gain from it.
static void unpack(const Kernels *k, TileRows *rows, int T, uint8_t *buffer) {
    const Mat *w = rows->w;
    if (T < MIN_UNPACKED || !tile_kernels(k, w)->unpack) return;
    tile_kernels(k, w)->unpack(buffer, rows->tiles, rows->n * (w->cols / 256));
    rows->tiles = buffer, rows->unpacked = true;
}

// Where the results of a panel will be written. Consecutive tokens are `stride` bytes apart.
typedef struct {
    const float *out;
    size_t stride;
} Output;

// Returns what the product of a panel prefetches (Prefetch in kernels.h): its output and, if the
// weights are packed, a part of the tiles of the next rows. Each panel of a prompt prefetches one
// part, in proportion to its width.
static Prefetch prefetch_of(const TileRows *rows, int T, Panel panel, Output output) {
    // bytes of the tiles of these rows, and so of the next ones
    size_t size = rows->n * tiles_size(rows->w) * TILE / tile_height(rows->w);
    int steps = (rows->w->cols + 1) / 2;
    Prefetch prefetch = {.weights = rows->tiles,
                         .out = (const char *)output.out,
                         .gap = (int64_t)output.stride - ROWS * (int64_t)sizeof(float)};
    if (rows->w->tiles) {
        prefetch.weights = rows->tiles + size + size / T * panel.t;
        prefetch.step = (int)(size * panel.width / T / steps);
    }
    // the output has two lines for each token, and every (mask + 1)th step prefetches one: double
    // mask + 1 as long as the steps still suffice for all lines
    while (2 * panel.width * 2 * (prefetch.mask + 1) <= steps)
        prefetch.mask = 2 * prefetch.mask + 1;
    return prefetch;
}

// y (width, ROWS) = a panel times one or two groups (ROWS is 2 * TILE). With one token, any number
// of groups is allowed, and y is (rows->n * TILE,).
static void multiply_panel(const Kernels *k, float *y, const TileRows *rows, const Activations *a,
                           Panel panel, Output output) {
    const Mat *w = rows->w;
    TileProduct p = {.y = y,
                     .tiles = rows->tiles,
                     .first = rows->first,
                     .groups = rows->n,
                     .cols = w->cols,
                     .T = panel.width,
                     .unpacked = rows->unpacked};
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

// Computes rows r..end-1 for any number of tokens. These are at most ROWS rows, all in the same row
// of tiles if they are floats.
static void multiply_tiles(const Kernels *k, const Product *p, const Activations *a, int r, int end,
                           float *scratch) {
    const Mat *w = p->w;
    float *y = scratch; // (tokens of a panel, ROWS)
    uint8_t *buffer = (uint8_t *)(y + k->tokens * ROWS);
    TileRows rows = tile_rows(k, w, r, end, buffer);
    // the unpacked tiles follow the packed weights, which take less than 1 byte each if their type
    // has `unpack`
    unpack(k, &rows, a->T, buffer + 2 * ROWS * w->cols);
    for (int t = 0; t < a->T;) {
        Panel panel = panel_at(k, t, a->T);
        float *out = p->out + (size_t)t * w->rows + r;
        for (int i = 0; i < panel.left && is_quantised(w); i++)
            for (int j = 0; j < end - r; j += TILE)
                __builtin_prefetch(out + (size_t)i * w->rows + j, 1);
        multiply_panel(k, y, &rows, a, panel, (Output){out, w->rows * sizeof(float)});
        for (int i = 0; i < panel.left; i++)
            put_row(out + (size_t)i * w->rows, y + i * ROWS, end - r, p->add);
        t += panel.width;
    }
}

// Computes rows r..end-1 for one token from packed weights, which are read as one long stream.
// Writes the results of full tiles directly to the output, unless they are added to it; all others
// pass through scratch.
static void stream_tiles(const Kernels *k, const Product *p, const Activations *a, int r, int end,
                         float *scratch) {
    const Panel token = {0, 1, 1};
    TileRows rows = tile_rows(k, p->w, r, end, NULL), full = rows;
    full.n = p->add ? 0 : (end - r) / TILE;
    if (full.n) multiply_panel(k, p->out + r, &full, a, token, (Output){0});
    if (full.n == rows.n) return;
    skip_groups(&rows, full.n);
    multiply_panel(k, scratch, &rows, a, token, (Output){0});
    put_row(p->out + r + full.n * TILE, scratch, end - r - full.n * TILE, p->add);
}

void llamac_multiply_rows(Worker *self, const Product *p, const Activations *in, int r, int end) {
    const Kernels *k = self->cpu->kernels;
    if (!has_tiles(k)) multiply_plain(k, p, in, r, end, self->scratch);
    else if (in->T == 1 && p->w->tiles) stream_tiles(k, p, in, r, end, self->scratch);
    else
        for (int next; r < end; r = next) {
            next = (r / ROWS + 1) * ROWS < end ? (r / ROWS + 1) * ROWS : end;
            multiply_tiles(k, p, in, r, next, self->scratch);
        }
}

// A Task. Each item is ROWS rows; the items of the products are numbered consecutively.
static void matmul_rows(Worker *self, const void *args, int begin, int end) {
    const MatmulArgs *a = args;
    Activations in = llamac_activations(self, a);
    for (const Product *p = a->products; p < a->products + a->n; p++) {
        int items = items_of(p);
        int first = begin > 0 ? begin * ROWS : 0, last = end < items ? end * ROWS : p->w->rows;
        if (first < last) llamac_multiply_rows(self, p, &in, first, last);
        begin -= items, end -= items;
    }
}

typedef struct {
    MatmulArgs args;
    int first; // first item of the part
} PartArgs;
_Static_assert(sizeof(PartArgs) <= MAX_ARGS, "PartArgs must fit in a step");

// A Task. Items are those of matmul_rows, counted from `first`.
static void matmul_part(Worker *self, const void *args, int begin, int end) {
    const PartArgs *a = args;
    matmul_rows(self, &a->args, a->first + begin, a->first + end);
}

// Adds a step for each part of each product's matrix; a matrix that is kept in memory is one part.
static void multiply_parts(Cpu *cpu, const MatmulArgs *a) {
    for (int i = 0; i < a->n; i++) {
        const Product *p = &a->products[i];
        int items = items_of(p), part = llamac_find_part(cpu->stream, p->w), end;
        PartArgs args = {*a, 0};
        args.args.products[0] = *p, args.args.n = 1;
        for (; args.first < items; args.first = end) {
            end = part < 0 ? items : llamac_open_part(cpu, part++);
            llamac_add_step(cpu, matmul_part, &args, sizeof args, end - args.first,
                            cost_of_item(a));
        }
    }
}

void llamac_multiply(Cpu *cpu, const MatmulArgs *a) {
    int items = 0;
    if (cpu->stream) {
        multiply_parts(cpu, a);
        return;
    }
    for (int i = 0; i < a->n; i++) items += items_of(&a->products[i]);
    llamac_add_step(cpu, matmul_rows, a, sizeof *a, items, cost_of_item(a));
}

void llamac_cpu_add_product(Backend *b, float *x, const Mat *w, const float *y, int T) {
    Cpu *cpu = (Cpu *)b;
    MatmulArgs a = llamac_matmul_args(cpu, &(Product){x, w, true}, 1, NULL, y, T);
    llamac_prepare(cpu, &a);
    llamac_multiply(cpu, &a);
}

void llamac_cpu_logits(Backend *b, float *out, const Mat *norm, const Mat *output, const float *x,
                       int T) {
    Cpu *cpu = (Cpu *)b;
    MatmulArgs a = llamac_matmul_args(cpu, &(Product){out, output, false}, 1, norm, x, T);
    llamac_prepare(cpu, &a);
    llamac_multiply(cpu, &a);
}

// ----------------------------------------------------------------------------
// The feed-forward network: products[0] is the gate, products[1] is up, and h = silu(gate) * up

// Computes elements r..end-1 of h for one token.
static void swiglu_token(Worker *self, const MatmulArgs *a, const Activations *in, int r, int end) {
    const Kernels *k = self->cpu->kernels;
    float *h = a->products[0].out + r, *h2 = a->products[1].out + r;
    for (int i = 0; i < 2; i++) llamac_multiply_rows(self, &a->products[i], in, r, end);
    k->swiglu(h, h2, end - r);
    // r is a multiple of ROWS, which is 32, so blocks are complete
    if (a->writes == BLOCKS) k->quantize(self->cpu->gated_blocks + r / 32, h, (end - r) / 32);
}

// Computes elements r..end-1 of h for the tokens of a panel, and writes them in the form a->writes.
// `gate` (Kernels.tokens, ROWS) is followed by up of the same shape.
static void put_swiglu(Worker *self, const MatmulArgs *a, float *gate, Panel panel, int r,
                       int end) {
    Cpu *cpu = self->cpu;
    const Kernels *k = cpu->kernels;
    int rows = a->products->w->rows, n = end - r;
    uint16_t bf16[16][ROWS] = {0}; // (tokens of a panel, at most 16; ROWS)
    for (int i = 0; i < panel.left; i++) {
        float *h = gate + i * ROWS, *up = h + k->tokens * ROWS;
        size_t at = (size_t)(panel.t + i) * rows + r;
        k->swiglu(h, up, n);
        if (a->writes == PAIRS) k->bf16s(bf16[i], h, n);
        else if (a->writes == BLOCKS) k->quantize(cpu->gated_blocks + at / 32, h, n / 32);
        else put_row(a->products->out + at, h, n, false);
    }
    if (a->writes != PAIRS) return;
    uint16_t *out = cpu->gated_pairs + (size_t)panel.t * 2 * ((rows + 1) / 2) + r * panel.width;
    k->transpose((uint8_t *)out, (uint8_t *)bf16, sizeof *bf16, panel.width, (n + 1) / 2);
}

// Computes elements r..end-1 of h, at most ROWS of them, for many tokens. Gate and up stay in
// scratch, one panel at a time.
static void swiglu_tiles(Worker *self, const MatmulArgs *a, int r, int end) {
    const Kernels *k = self->cpu->kernels;
    const Mat *w = a->products[0].w;
    float *gate = self->scratch, *up = gate + k->tokens * ROWS; // (tokens of a panel, ROWS)
    uint8_t *buffer = (uint8_t *)(up + k->tokens * ROWS);
    TileRows gates = tile_rows(k, w, r, end, buffer);
    size_t size = ROWS / tile_height(w) * tiles_size(w); // bytes of the packed rows
    TileRows ups = tile_rows(k, a->products[1].w, r, end, buffer + size);
    // if the type has `unpack`, a weight takes less than 1 byte packed, less than 2 unpacked
    unpack(k, &gates, a->in.T, buffer + 2 * ROWS * w->cols);
    unpack(k, &ups, a->in.T, buffer + 4 * ROWS * w->cols);
    for (int t = 0; t < a->in.T;) {
        Panel panel = panel_at(k, t, a->in.T);
        multiply_panel(k, gate, &gates, &a->in, panel, (Output){gate, ROWS * sizeof(float)});
        multiply_panel(k, up, &ups, &a->in, panel, (Output){up, ROWS * sizeof(float)});
        put_swiglu(self, a, gate, panel, r, end);
        t += panel.width;
    }
}

// A Task that computes gate, up and h. Items are ROWS elements of h.
static void swiglu_rows(Worker *self, const void *args, int begin, int end) {
    const MatmulArgs *a = args;
    Activations in = llamac_activations(self, a);
    int rows = a->products->w->rows, last = end * ROWS < rows ? end * ROWS : rows, r = begin * ROWS;
    if (in.T == 1) swiglu_token(self, a, &in, r, last);
    else
        for (; r < last; r += ROWS) swiglu_tiles(self, a, r, r + ROWS < last ? r + ROWS : last);
}

// A Task that computes h from gate (cpu->h) and up (cpu->h2), in place of gate. Items are tokens.
static void swiglu_tokens(Worker *self, const void *args, int begin, int end) {
    Cpu *cpu = self->cpu;
    size_t n = cpu->config.hidden_dim;
    (void)args;
    for (int t = begin; t < end; t++) cpu->kernels->swiglu(cpu->h + t * n, cpu->h2 + t * n, (int)n);
}

void llamac_cpu_feed_forward(Backend *b, const Layer *w, float *x, int T) {
    Cpu *cpu = (Cpu *)b;
    Product gate_up[] = {{cpu->h, &w->w1, false}, {cpu->h2, &w->w3, false}};
    MatmulArgs gated = llamac_matmul_args(cpu, gate_up, 2, &w->ffn_norm, x, T);
    MatmulArgs down = llamac_matmul_args(cpu, &(Product){x, &w->w2, true}, 1, NULL, cpu->h, T);
    llamac_prepare(cpu, &gated);
    bool fuse = !cpu->stream && w->w1.type == w->w3.type;
    if (fuse && (T == 1 || has_tiles(cpu->kernels))) {
        // One step computes gate, up and h. It writes h in the form that `down` reads if that is
        // BLOCKS, or PAIRS with several tokens. Otherwise it writes floats, which llamac_prepare
        // converts
        if (down.reads == BLOCKS || (down.reads == PAIRS && T > 1)) {
            gated.writes = down.reads, down.ready = true;
            down.in.blocks = cpu->gated_blocks;
            if (down.in.pairs) down.in.pairs = cpu->gated_pairs;
        }
        int items = items_of(gate_up);
        llamac_add_step(cpu, swiglu_rows, &gated, sizeof gated, items, 2 * cost_of_item(&gated));
    } else {
        llamac_multiply(cpu, &gated);
        llamac_add_step(cpu, swiglu_tokens, "", 1, T, 4 * cpu->config.hidden_dim);
    }
    if (!down.ready) llamac_prepare(cpu, &down);
    llamac_multiply(cpu, &down);
}

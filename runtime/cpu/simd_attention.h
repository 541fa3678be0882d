// Part of simd.h: attention. The operands are described in kernels.h.

// BY_TYPE calls a function with the type of the cache as a constant, BY_QUERIES with the number of
// queries as a constant.
#define BY_TYPE(function, a) \
    if (a->type == F16) function(F16, a); \
    else if (a->type == INT8_GROUPS) function(INT8_GROUPS, a); \
    else function(F32, a)
#define BY_QUERIES(function, type, a) \
    if (a->n_queries == 1) function(type, a, 1); \
    else if (a->n_queries == 2) function(type, a, 2); \
    else if (a->n_queries == 3) function(type, a, 3); \
    else function(type, a, QUERIES)

// Computes the scores of n queries for `tiles` tiles of keys at once. With few queries, these are
// several tiles, so that enough sums are independent and an addition does not wait for the one
// before.
INLINE void score_tiles(Type type, const Attention *a, int first, const int n, const int tiles) {
    const size_t column = number_size(type) * TILE; // bytes of one dimension in a tile
    const char *keys = (const char *)a->keys + first / TILE * column * a->head_dim;
    Floats sums[QUERIES][4 * VECTORS];
    UNROLL for (int q = 0; q < n; q++) UNROLL for (int v = 0; v < tiles * VECTORS; v++) sums[q][v] =
        SET(0);
    for (int d = 0; d < a->head_dim; d++, keys += column) {
        Floats key[4 * VECTORS];
        UNROLL for (int v = 0; v < tiles * VECTORS; v++) key[v] =
            load(type, keys + v / VECTORS * column * a->head_dim, v % VECTORS * LANES);
        UNROLL for (int q = 0; q < n; q++) {
            Floats query = SET(a->q[q * a->q_stride + d]);
            UNROLL for (int v = 0; v < tiles * VECTORS; v++) sums[q][v] =
                FMA(key[v], query, sums[q][v]);
        }
    }
    UNROLL for (int q = 0; q < n; q++) UNROLL for (int v = 0; v < tiles * VECTORS; v++)
        STORE(a->p + q * a->p_stride + first + v * LANES, sums[q][v]);
}

INLINE void score_queries(Type type, const Attention *a, const int n) {
    // max tiles whose sums and keys fit in registers
    const int tiles = n == 1 ? 4 : LANES == 16 || n == 2 ? 2 : 1;
    int i = 0;
    for (; i + tiles * TILE <= a->n; i += tiles * TILE) score_tiles(type, a, i, n, tiles);
    for (; i < a->n; i += TILE) score_tiles(type, a, i, n, 1);
}

INLINE void scores_of(Type type, const Attention *a) { BY_QUERIES(score_queries, type, a); }

TARGET static void scores(const Attention *a) { BY_TYPE(scores_of, a); }

// Computes `vectors` vectors of the output from column d on, for n queries, whose sums stay in
// registers during the loop over positions.
INLINE void mix_columns(Type type, const Attention *a, int d, const int n, const int vectors) {
    const float *p = a->p;
    const char *values = (const char *)a->values + d * number_size(type);
    Floats sums[QUERIES][4];
    UNROLL for (int q = 0; q < n; q++) UNROLL for (int v = 0; v < vectors; v++) sums[q][v] =
        a->add ? LOAD(a->out + (size_t)q * a->width + d + v * LANES) : SET(0);
    for (int i = 0; i < a->n; i++) UNROLL for (int v = 0; v < vectors; v++) {
            Floats value = load(type, values, (size_t)i * a->width + v * LANES);
            UNROLL for (int q = 0; q < n; q++) sums[q][v] =
                FMA(value, SET(p[q * a->p_stride + i]), sums[q][v]);
        }
    UNROLL for (int q = 0; q < n; q++) UNROLL for (int v = 0; v < vectors; v++)
        STORE(a->out + (size_t)q * a->width + d + v * LANES, sums[q][v]);
}

INLINE void mix_queries(Type type, const Attention *a, const int n) {
    // max vectors for which the sums of all queries fit in registers
    const int MANY = LANES == 16 || n == 1 ? 4 : 2;
    int d = 0;
    for (; d + MANY * LANES <= a->width; d += MANY * LANES) mix_columns(type, a, d, n, MANY);
    for (; MANY > 3 && d + 3 * LANES <= a->width; d += 3 * LANES) mix_columns(type, a, d, n, 3);
    for (; d < a->width; d += LANES) mix_columns(type, a, d, n, 1);
}

INLINE void mix_of(Type type, const Attention *a) { BY_QUERIES(mix_queries, type, a); }

TARGET static void mix(const Attention *a) { BY_TYPE(mix_of, a); }

// Queries of a panel: Kernels.panel_queries. PANEL divides the max tokens of a span, see
// span_length in attention.c.
enum { PANEL = TOKENS < 8 ? 4 : MAX_PANEL_QUERIES };

// Multiplies a panel with `tiles` tiles of w, from tile `first` on.
INLINE void panel_tiles(Type type, const PanelProduct *p, int first, const int tiles) {
    const char *w = (const char *)p->w + first * p->tile_stride * number_size(type);
    float *y = p->y + first * TILE;
    Floats sums[SUMS][TOKENS], column[SUMS];
    const float *x = p->x;
    UNROLL for (int v = 0; v < tiles * VECTORS; v++) UNROLL for (int t = 0; t < PANEL; t++)
        sums[v][t] = p->add ? LOAD(y + t * p->y_stride + v * LANES) : SET(0);
    for (int c = 0; c < p->cols; c++, w += p->column_stride * number_size(type), x += PANEL) {
        UNROLL for (int v = 0; v < tiles * VECTORS; v++) column[v] =
            load(type, w, v / VECTORS * p->tile_stride + v % VECTORS * LANES);
        add_column(sums, column, x, PANEL, tiles * VECTORS);
    }
    UNROLL for (int v = 0; v < tiles * VECTORS; v++) UNROLL for (int t = 0; t < PANEL; t++)
        STORE(y + t * p->y_stride + v * LANES, sums[v][t]);
}

INLINE void panel_of(Type type, const PanelProduct *p) {
    for (int i = 0; i < p->tiles; i += TILE_ROWS) {
        if (i + TILE_ROWS <= p->tiles) panel_tiles(type, p, i, TILE_ROWS);
        else panel_tiles(type, p, i, 1);
    }
}

TARGET static void panel_product(const PanelProduct *p) { BY_TYPE(panel_of, p); }

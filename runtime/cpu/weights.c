#include "weights.h"

static void floats_q8_0(float *out, const uint8_t *row, int n) {
    for (; n > 0; n -= 32, row += 34, out += 32) {
        uint16_t scale;
        memcpy(&scale, row, 2);
        float d = half_to_float(scale);
        for (int i = 0; i < 32; i++) out[i] = d * (int8_t)row[2 + i];
    }
}

static void floats_q4_0(float *out, const uint8_t *row, int n) {
    for (; n > 0; n -= 32, row += 18, out += 32) {
        uint16_t scale;
        memcpy(&scale, row, 2);
        float d = half_to_float(scale);
        for (int i = 0; i < 16; i++) out[i] = d * ((row[2 + i] & 15) - 8);
        for (int i = 0; i < 16; i++) out[16 + i] = d * ((row[2 + i] >> 4) - 8);
    }
}

// Groups run over the matrix as a whole: a row may begin and end inside one.
static void floats_int8_groups(float *out, const Mat *m, int64_t first, int n) {
    const int8_t *q = (const int8_t *)m->data + first;
    for (int i = 0; i < n;) {
        int64_t group = (first + i) / m->group;
        int64_t left = (group + 1) * m->group - (first + i); // numbers of the row's part in this group
        int end = left < n - i ? i + (int)left : n;
        float scale;
        memcpy(&scale, (const char *)m->scales + 4 * group, 4);
        for (; i < end; i++) out[i] = scale * q[i];
    }
}

void llamac_floats(const Kernels *k, float *out, const Mat *m, int r, int c, int n) {
    const uint8_t *data = m->data;
    int64_t first = (int64_t)r * m->cols + c;
    switch (m->type) {
    case F32: memcpy(out, data + 4 * first, n * sizeof(float)); break;
    case F16: k->floats_f16(out, data + 2 * first, n); break;
    case BF16: k->floats_bf16(out, data + 2 * first, n); break;
    case Q8_0: floats_q8_0(out, data + first / 32 * 34, n); break;
    case Q4_0: floats_q4_0(out, data + first / 32 * 18, n); break;
    case INT8_GROUPS: floats_int8_groups(out, m, first, n); break;
    }
}

// n units of row r, from unit u on.
static void copy_units(const Kernels *k, uint8_t *out, const Mat *m, int r, int u, int n) {
    const uint8_t *data = m->data;
    size_t size = unit_size(m), bytes = n * size;
    if (m->type == BF16) {
        size_t left = 2 * ((size_t)m->cols - 2 * u); // of the row; an odd number of columns ends in half a unit
        memset(out, 0, bytes);
        memcpy(out, data + 2 * ((size_t)r * m->cols + 2 * u), bytes < left ? bytes : left);
    } else if (m->type == F32 || is_quantised(m)) memcpy(out, data + ((size_t)r * units(m) + u) * size, bytes);
    else llamac_floats(k, (float *)out, m, r, u, n);
}

void llamac_pack(const Kernels *k, uint8_t *tiles, const Mat *m, int r) {
    enum { STRIP = 64 }; // units
    const TypeKernels *type = tile_kernels(k, m);
    int rows = m->rows - r < TILE ? m->rows - r : TILE, n = units(m);
    size_t size = unit_size(m), stride = n * size;
    if (rows == TILE && (m->type == F32 || is_quantised(m) || (m->type == BF16 && m->cols % 2 == 0))) {
        type->pack(tiles, (const uint8_t *)m->data + r * stride, stride, n);
        return;
    }
    _Alignas(64) uint8_t strip[TILE * STRIP * 34] = {0};
    for (int u = 0; u < n; u += STRIP, tiles += TILE * STRIP * size) {
        int part = n - u < STRIP ? n - u : STRIP;
        for (int i = 0; i < rows; i++) copy_units(k, strip + i * STRIP * size, m, r + i, u, part);
        type->pack(tiles, strip, STRIP * size, part);
    }
}

// Converts matrices to floats and packs them in tiles.
#include "blocks.h"
#include "weights.h"

// out (n,) = the first n numbers of the blocks at `row`, as floats. blocks.h describes the blocks.
static void floats_of_blocks(Type type, float *out, const uint8_t *row, int n) {
    const int width = block_size(type).numbers;
    for (Numbers b; n > 0; n -= width, row += block_size(type).bytes, out += width) {
        read_block(type, &b, row);
        for (int i = 0; i < width; i++) {
            int sub = i / numbers_per_scale(type); // sub-block: numbers that share a scale
            out[i] = b.scale[sub] * (b.q[i] - zero_of(type)) - (has_minima(type) ? b.min[sub] : 0);
        }
    }
}

// out (n,) = numbers first..first+n-1 of the flattened matrix, as floats. Groups extend across
// rows, so a row may begin and end inside a group.
static void floats_int8_groups(float *out, const Mat *m, int64_t first, int n) {
    const int8_t *q = (const int8_t *)m->data + first;
    for (int i = 0; i < n;) {
        int64_t group = (first + i) / m->group;
        int64_t left = (group + 1) * m->group - (first + i); // numbers left in the group
        int end = left < n - i ? i + (int)left : n;
        float scale = scale_of_group(m, first + i);
        for (; i < end; i++) out[i] = scale * q[i];
    }
}

void llamac_floats(const Kernels *k, float *out, const Mat *m, int r, int c, int n) {
    const uint8_t *data = m->data;
    int64_t first = (int64_t)r * m->cols + c;
    BlockSize block = block_size(m->type);
    switch (m->type) {
    case F32: memcpy(out, data + 4 * first, n * sizeof(float)); break;
    case F16: k->floats_f16(out, data + 2 * first, n); break;
    case BF16: k->floats_bf16(out, data + 2 * first, n); break;
    case INT8_GROUPS: floats_int8_groups(out, m, first, n); break;
    default: floats_of_blocks(m->type, out, data + first / block.numbers * block.bytes, n);
    }
}

// Copies units u..u+n-1 of row r to `out`. Converts types without their own units to floats.
static void copy_units(const Kernels *k, uint8_t *out, const Mat *m, int r, int u, int n) {
    const uint8_t *data = m->data;
    size_t size = unit_size(m), bytes = n * size;
    if (is_half(m)) {
        // bytes left in the row; if the number of columns is odd, the last unit is half full
        size_t left = 2 * ((size_t)m->cols - 2 * u);
        memset(out, 0, bytes);
        memcpy(out, data + 2 * ((size_t)r * m->cols + 2 * u), bytes < left ? bytes : left);
    } else if (m->type == F32 || is_quantised(m))
        memcpy(out, data + ((size_t)r * units(m) + u) * size, bytes);
    else llamac_floats(k, (float *)out, m, r, u, n);
}

float llamac_dot_groups(const Mat *m, int r, const Block *x) {
    const int8_t *q = (const int8_t *)row_of(m, r);
    float sum = 0;
    for (int c = 0; c < m->cols; c += 32, x++) {
        int32_t product = 0;
        for (int i = 0; i < 32; i++) product += q[c + i] * x->q[i];
        sum += scale_of_group(m, (int64_t)r * m->cols + c) * x->scale * product;
    }
    return sum;
}

// Packs TILE rows of INT8_GROUPS, or fewer at the end of the matrix, into a row of unpacked tiles
// (TypeKernels.unpack): 16 scales, then the bytes in the order of Q8_0.
static void pack_groups(const Kernels *k, uint8_t *tiles, const Mat *m, int r) {
    enum { BLOCK = 34, SCALES = TILE * sizeof(float), BYTES = TILE * 32 };
    for (int c = 0; c < m->cols; c += 32, tiles += SCALES + BYTES) {
        uint8_t blocks[TILE * BLOCK] = {0}, tile[TILE * BLOCK]; // of Q8_0
        float scales[TILE] = {0};
        for (int i = 0; i < TILE && r + i < m->rows; i++) {
            scales[i] = scale_of_group(m, (int64_t)(r + i) * m->cols + c);
            memcpy(blocks + i * BLOCK + 2, row_of(m, r + i) + c, 32);
        }
        k->types[Q8_0].pack(tile, blocks, BLOCK, 1);
        memcpy(tiles, scales, SCALES);
        memcpy(tiles + SCALES, tile + 2 * TILE, BYTES);
    }
}

void llamac_pack(const Kernels *k, uint8_t *tiles, const Mat *m, int r) {
    if (is_grouped(m)) {
        pack_groups(k, tiles, m, r);
        return;
    }
    enum { STRIP = 256 }; // max bytes of each row that are copied at once: a unit, or several
    const TypeKernels *type = tile_kernels(k, m);
    int height = tile_height(m), rows = m->rows - r < height ? m->rows - r : height, n = units(m);
    size_t size = unit_size(m), stride = n * size;
    // the rows of the file consist of units already: pack them from there
    if (rows == height && (m->type == F32 || is_quantised(m) || (is_half(m) && m->cols % 2 == 0))) {
        type->pack(tiles, (const uint8_t *)m->data + r * stride, stride, n);
        return;
    }
    _Alignas(64) uint8_t strip[FLOAT_TILE * STRIP] = {0}; // rows beyond the last stay zero
    for (int u = 0, copied; u < n; u += copied, tiles += height * copied * size) {
        copied = n - u < (int)(STRIP / size) ? n - u : (int)(STRIP / size);
        for (int i = 0; i < rows; i++) copy_units(k, strip + i * STRIP, m, r + i, u, copied);
        type->pack(tiles, strip, STRIP, copied);
    }
}

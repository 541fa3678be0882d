// Matrices of any type: access to their rows, conversion to floats, and conversion to tiles
// (kernels.h).
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "kernels.h"

// Whether rows are stored in quantised blocks, which are multiplied with Blocks of activations.
static inline bool is_quantised(const Mat *m) { return block_size(m->type).numbers > 1; }

// The unit of a tile is a block, two numbers of BF16, or a float; other types are converted to
// floats. Bytes of a unit, and units of a row:
static inline int unit_size(const Mat *m) {
    return is_quantised(m) ? block_size(m->type).bytes : 4;
}
static inline int units(const Mat *m) {
    if (is_quantised(m)) return m->cols / block_size(m->type).numbers;
    return m->type == BF16 ? (m->cols + 1) / 2 : m->cols;
}

// Bytes of a row of tiles, which holds TILE rows of the matrix.
static inline size_t tiles_size(const Mat *m) { return (size_t)units(m) * unit_size(m) * TILE; }

// Row r in the order of the file, of a type with has_dot. Returns the end of the matrix if r is
// beyond the last row.
static inline const uint8_t *row_of(const Mat *m, int r) {
    size_t size = is_quantised(m) ? (size_t)units(m) * unit_size(m)
                                  : (m->type == F32 ? 4 : 2) * (size_t)m->cols;
    return (const uint8_t *)m->data + (r < m->rows ? r : m->rows) * size;
}

// Whether kernels multiply rows in the order of the file. Other rows are converted to floats first.
static inline bool has_dot(const Kernels *k, const Mat *m) {
    return m->type <= BF16 && k->types[m->type].dot;
}

// The kernels for tiles of a matrix. Types without kernels of their own use those of F32.
static inline const TypeKernels *tile_kernels(const Kernels *k, const Mat *m) {
    return &k->types[m->type <= BF16 && k->types[m->type].product ? m->type : F32];
}

// out (n,) = n numbers of row r from column c on. c and n of quantised types are multiples of a
// block.
void llamac_floats(const Kernels *k, float *out, const Mat *m, int r, int c, int n);

// Packs up to TILE rows from r on into a row of tiles. Rows beyond the last are zero.
void llamac_pack(const Kernels *k, uint8_t *tiles, const Mat *m, int r);

#endif

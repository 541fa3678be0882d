// Matrices of any type: how their rows lie in the file, how they become floats, and how they become tiles (kernels.h).
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "kernels.h"

// Whether rows are stored in blocks, which are multiplied with Blocks of activations.
static inline bool is_quantised(const Mat *m) { return block_size(m->type).numbers > 1; }

// What is packed as one: a block, two numbers of BF16, or a float, which other types become. Its bytes; how many a row has.
static inline int unit_size(const Mat *m) { return is_quantised(m) ? block_size(m->type).bytes : 4; }
static inline int units(const Mat *m) {
    return is_quantised(m) ? m->cols / block_size(m->type).numbers : m->type == BF16 ? (m->cols + 1) / 2 : m->cols;
}

// Bytes of a row of tiles: of TILE rows of the matrix.
static inline size_t tiles_size(const Mat *m) { return (size_t)units(m) * unit_size(m) * TILE; }

// Where row r of a type with has_dot lies in the file; the end of the matrix if r is beyond the last.
static inline const uint8_t *row_of(const Mat *m, int r) {
    size_t size = is_quantised(m) ? (size_t)units(m) * unit_size(m) : (m->type == F32 ? 4 : 2) * (size_t)m->cols;
    return (const uint8_t *)m->data + (r < m->rows ? r : m->rows) * size;
}

// Whether kernels multiply rows of a matrix as they lie in the file; else they become floats before.
static inline bool has_dot(const Kernels *k, const Mat *m) { return m->type <= BF16 && k->types[m->type].dot; }

// The kernels for tiles of a matrix: F32's, where its type has none of its own.
static inline const TypeKernels *tile_kernels(const Kernels *k, const Mat *m) {
    return &k->types[m->type <= BF16 && k->types[m->type].product ? m->type : F32];
}

// n numbers of row r, from column c on, as floats. Of quantised types, c and n are whole blocks.
void llamac_floats(const Kernels *k, float *out, const Mat *m, int r, int c, int n);

// A row of tiles: of up to TILE rows from r on; rows beyond the last are zero.
void llamac_pack(const Kernels *k, uint8_t *tiles, const Mat *m, int r);

#endif

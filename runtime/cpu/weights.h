// Matrices of any type: access to their rows, conversion to floats, and packing in tiles
// (kernels.h).
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "kernels.h"

// Returns whether a matrix in llama2.c's INT8_GROUPS consists of blocks of 32 numbers of a row that
// share a scale, as in nearly all files. It is then multiplied like Q8_0, with scales in float32;
// otherwise it is converted to floats.
static inline bool is_grouped(const Mat *m) {
    return m->type == INT8_GROUPS && m->group % 32 == 0 && m->cols % 32 == 0;
}

// Returns whether the matrix is stored in quantised blocks, which are multiplied with Blocks of
// activations.
static inline bool is_quantised(const Mat *m) {
    return block_size(m->type).numbers > 1 || is_grouped(m);
}

// Returns whether the numbers of the matrix have 16 bits.
static inline bool is_half(const Mat *m) { return m->type == BF16 || m->type == F16; }

// Returns the bytes of a unit, the part of a row that one tile holds: a block of a quantised type,
// two numbers of BF16 or F16, or one float for any other type.
static inline int unit_size(const Mat *m) {
    if (is_grouped(m)) return sizeof(float) + 32;
    return is_quantised(m) ? block_size(m->type).bytes : 4;
}

// Returns the number of units of a row.
static inline int units(const Mat *m) {
    if (is_grouped(m)) return m->cols / 32;
    if (is_quantised(m)) return m->cols / block_size(m->type).numbers;
    return is_half(m) ? (m->cols + 1) / 2 : m->cols;
}

// Returns the number of rows of a tile.
static inline int tile_height(const Mat *m) { return is_quantised(m) ? TILE : FLOAT_TILE; }

// Returns the bytes of a row of tiles.
static inline size_t tiles_size(const Mat *m) {
    return (size_t)units(m) * unit_size(m) * tile_height(m);
}

// Returns a pointer to row r in `data`, or to the end of the matrix if r is beyond the last row.
static inline const uint8_t *row_of(const Mat *m, int r) {
    BlockSize block = m->type == INT8_GROUPS ? (BlockSize){1, 1} : block_size(m->type);
    size_t size = (size_t)m->cols / block.numbers * block.bytes;
    return (const uint8_t *)m->data + (r < m->rows ? r : m->rows) * size;
}

// Returns whether the kernels multiply rows in the order of the file. If not, rows are converted to
// floats first.
static inline bool has_dot(const Kernels *k, const Mat *m) {
    return m->type <= BF16 && k->types[m->type].dot;
}

// Returns the kernels for tiles of the matrix: those of F32 if its type has none of its own.
static inline const TypeKernels *tile_kernels(const Kernels *k, const Mat *m) {
    if (is_grouped(m)) return &k->types[Q8_0];
    return &k->types[m->type <= BF16 && k->types[m->type].product ? m->type : F32];
}

// Returns the scale of number i of the flattened matrix, which is in INT8_GROUPS.
static inline float scale_of_group(const Mat *m, int64_t i) {
    float scale; // perhaps unaligned
    memcpy(&scale, (const char *)m->scales + i / m->group * sizeof scale, sizeof scale);
    return scale;
}

// out (n,) = columns c..c+n-1 of row r, as floats. For quantised types, c and n are multiples of
// the numbers in a block.
void llamac_floats(const Kernels *k, float *out, const Mat *m, int r, int c, int n);

// Packs rows r..r+tile_height-1 into a row of tiles. Rows beyond the last of the matrix become
// zero.
void llamac_pack(const Kernels *k, uint8_t *tiles, const Mat *m, int r);

// Returns the dot product of row r with x (cols / 32,). is_grouped(m) must be true.
float llamac_dot_groups(const Mat *m, int r, const Block *x);

#endif

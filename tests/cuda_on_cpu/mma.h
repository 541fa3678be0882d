// Tensor cores on the CPU: the first lane of a warp holds the whole tile. The other lanes must
// synchronize before they read what it stored, as on a GPU.
#pragma once
#include "cuda_runtime.h"

namespace nvcuda {
namespace wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void> struct fragment {
    enum { num_elements = 256 };
    T x[256]; // (16, 16), row-major
};

static inline bool first_lane() { return threadIdx.x % 32 == 0; }

static inline void check_alignment(const void *p, int stride, size_t size) {
    if ((uintptr_t)p % 32 || stride * size % 16) cuda_on_cpu::fail("a tile that is not aligned");
}

template <typename F> UNWATCHED void fill_fragment(F &f, float value) {
    for (auto &x : f.x) x = value;
}

template <typename Use, typename T, typename Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout> &f, const T *p, int stride) {
    check_alignment(p, stride, sizeof(T));
    bool row = std::is_same<Layout, row_major>::value;
    for (int i = 0; i < 256 && first_lane(); i++)
        f.x[i] = row ? p[i / 16 * stride + i % 16] : p[i % 16 * stride + i / 16];
}

template <typename F> void load_matrix_sync(F &f, const float *p, int stride, layout_t layout) {
    check_alignment(p, stride, sizeof *p);
    for (int i = 0; i < 256 && first_lane(); i++)
        f.x[i] =
            layout == mem_row_major ? p[i / 16 * stride + i % 16] : p[i % 16 * stride + i / 16];
}

template <typename F> void store_matrix_sync(float *p, const F &f, int stride, layout_t layout) {
    check_alignment(p, stride, sizeof *p);
    for (int i = 0; i < 256 && first_lane(); i++)
        p[layout == mem_row_major ? i / 16 * stride + i % 16 : i % 16 * stride + i / 16] = f.x[i];
}

template <typename D, typename A, typename B>
UNWATCHED void mma_sync(D &d, const A &a, const B &b, const D &c) {
    float left[256], right[256];
    if (!first_lane()) return;
    for (int i = 0; i < 256; i++) left[i] = __half2float(a.x[i]), right[i] = __half2float(b.x[i]);
    for (int i = 0; i < 256; i++) {
        float sum = c.x[i];
        for (int k = 0; k < 16; k++) sum += left[i / 16 * 16 + k] * right[16 * k + i % 16];
        d.x[i] = sum;
    }
}
} // namespace wmma
} // namespace nvcuda

// PTX's mma.m16n8k16, in the layout that multiply_eight of whole_token.cuh documents. Each lane
// gathers its rows of a and its two columns of b from four lanes each.
template <bool bf16>
UNWATCHED void tensor_product(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    auto number = [](uint64_t words, int i) {
        uint16_t bits = (uint16_t)(words >> 16 * i);
        return bf16 ? __uint_as_float((uint32_t)bits << 16) : __half2float({bits});
    };
    uint64_t rows[2] = {(uint64_t)a[2] << 32 | a[0], (uint64_t)a[3] << 32 | a[1]},
             column = (uint64_t)b1 << 32 | b0;
    // first lanes of this lane's row and columns
    int row = threadIdx.x % 32 / 4 * 4, first = threadIdx.x % 4 * 8;
    for (int q = 0; q < 4; q++) {
        uint64_t as[2], bs[2];
        for (int i = 0; i < 2; i++) as[i] = cuda_on_cpu::exchange(rows[i], row + q);
        for (int i = 0; i < 2; i++) bs[i] = cuda_on_cpu::exchange(column, first + 4 * i + q);
        for (int i = 0; i < 16; i++)
            d[i / 4] += number(as[i / 8], i % 4) * number(bs[i / 4 % 2], i % 4);
    }
}

static inline uint32_t to_bfloat(float f) { // to nearest, ties to even
    uint32_t bits = __float_as_uint(f);
    return isnan(f) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

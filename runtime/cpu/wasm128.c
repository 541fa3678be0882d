// The kernels for WebAssembly with vectors of 128 bits, which all current browsers have.
#include "kernels.h"

#if defined(__wasm_simd128__)
#include <wasm_simd128.h>

#define TARGET
#define LANES 4
#define TILE_ROWS 1
#define TOKENS 4
#define BLOCK_TOKENS 2
#define FLOAT_STREAMS 2
#define UNROLL_WORDS UNROLL
#define Q8_OFFSET 128 // unsigned bytes are widened by one instruction instead of two

typedef v128_t Floats;
#define LOAD(p) wasm_v128_load(p)
#define LOAD_F16(p) floats_of_halves(wasm_i32x4_load16x4(p))
#define LOAD_BF16(p) wasm_i32x4_shl(wasm_u32x4_load16x4(p), 16)
#define LOAD_8(p) \
    wasm_f32x4_convert_i32x4( \
        wasm_i32x4_extend_low_i16x8(wasm_i16x8_extend_low_i8x16(wasm_v128_load32_zero(p))))
#define STORE(p, v) wasm_v128_store(p, v)
#define STORE_F16(p, v) store_halves(p, v)
#define SET(x) wasm_f32x4_splat(x)
#define ADD(a, b) wasm_f32x4_add(a, b)
#define MUL(a, b) wasm_f32x4_mul(a, b)
#define DIV(a, b) wasm_f32x4_div(a, b)
#define MAX(a, b) wasm_f32x4_pmax(b, a) // b if one is NaN: one instruction on x86, unlike f32x4.max
#define MIN(a, b) wasm_f32x4_pmin(b, a)
#define FMA(a, b, c) ADD(MUL(a, b), c) // rounds twice
#define SUM(v) sum_of_4(v)
#define LARGEST(v) largest_of_4(v)
#define ROUND(v) wasm_f32x4_nearest(v)
#define SWAP(v) wasm_i32x4_shuffle(v, v, 1, 0, 3, 2)
#define POW2(n) wasm_i32x4_shl(ADD_I(INTS(n), SET_I(127)), 23)

typedef v128_t Ints;
#define LOAD_I(p) wasm_v128_load(p)
#define BF16_LOW(i) wasm_i32x4_shl(i, 16)
#define BF16_HIGH(i) wasm_v128_and(i, SET_I((int)0xffff0000))
#define F16_LOW(i) floats_of_halves(wasm_i32x4_shr(wasm_i32x4_shl(i, 16), 16))
#define F16_HIGH(i) floats_of_halves(wasm_i32x4_shr(i, 16))
#define SET_I(x) wasm_i32x4_splat(x)
#define FLOATS(i) wasm_f32x4_convert_i32x4(i)
// floats near 1.5 * 2^23 have no fraction: the addition rounds to an integer, for up to 22 bits
#define INTS(v) wasm_i32x4_sub(ADD(v, SET(0x1.8p23f)), SET(0x1.8p23f))
#define ADD_I(a, b) wasm_i32x4_add(a, b)
#define MAX_I(a, b) wasm_i32x4_max(a, b)
#define SUM_I(i) sum_of_4_ints(i)
#define LARGEST_I(i) largest_of_4_ints(i)
#define MAGNITUDE(v) wasm_f32x4_abs(v)
#define STORE_8(p, i) store_4_bytes(p, i)
#define DOT(c, w, x) add_products_of_bytes(c, w, x)
#define DOT_SMALL(c, w, x) add_products_of_bytes(c, w, x)
#define AND_15(w) wasm_v128_and(w, wasm_i8x16_splat(15))
#define SHIFT_4(w) AND_15(wasm_u16x8_shr(w, 4))

typedef v128_t Quad;
#define LOAD_QUAD(p) wasm_v128_load(p)
#define STORE_QUAD(p, v) wasm_v128_store(p, v)
#define SET_QUAD(x) wasm_i32x4_splat((int)(x))
#define XOR_QUAD(a, b) wasm_v128_xor(a, b)
#define LOW_32(a, b) wasm_i32x4_shuffle(a, b, 0, 4, 1, 5)
#define HIGH_32(a, b) wasm_i32x4_shuffle(a, b, 2, 6, 3, 7)

// Exchanges the halves of a vector.
static inline v128_t halves_swapped(v128_t v) { return wasm_i64x2_shuffle(v, v, 1, 0); }

static inline float sum_of_4(v128_t v) {
    v128_t two = wasm_f32x4_add(v, halves_swapped(v));
    return wasm_f32x4_extract_lane(two, 0) + wasm_f32x4_extract_lane(two, 1);
}

static inline float largest_of_4(v128_t v) {
    v128_t two = wasm_f32x4_pmax(v, halves_swapped(v));
    return wasm_f32x4_extract_lane(wasm_f32x4_pmax(two, SWAP(two)), 0);
}

static inline int32_t sum_of_4_ints(v128_t i) {
    v128_t two = wasm_i32x4_add(i, halves_swapped(i));
    return wasm_i32x4_extract_lane(two, 0) + wasm_i32x4_extract_lane(two, 1);
}

static inline int32_t largest_of_4_ints(v128_t i) {
    v128_t two = wasm_i32x4_max(i, halves_swapped(i));
    return wasm_i32x4_extract_lane(wasm_i32x4_max(two, SWAP(two)), 0);
}

static inline void store_4_bytes(int8_t *p, v128_t i) {
    v128_t shorts = wasm_i16x8_narrow_i32x4(i, i);
    wasm_v128_store32_lane(p, wasm_i8x16_narrow_i16x8(shorts, shorts), 0);
}

static inline void store_halves(uint16_t *p, v128_t v) {
    float floats[LANES];
    wasm_v128_store(floats, v);
    llamac_reference.halves(p, floats, LANES);
}

// Converts half-precision numbers, sign-extended to 32 bits, to floats: half_to_float of kernels.h
// in vectors. The shift moves the exponent and the mantissa to where a float has them, and the mask
// keeps the sign, which is in bit 31 due to the sign extension.
static inline v128_t floats_of_halves(v128_t i) {
    v128_t bits = wasm_v128_and(wasm_i32x4_shl(i, 13), SET_I((int)0x8fffe000));
    v128_t f = wasm_f32x4_mul(bits, SET(0x1p112f));
    v128_t infinite = wasm_f32x4_ge(wasm_f32x4_abs(f), SET(65536));
    return wasm_v128_or(f, wasm_v128_and(infinite, SET_I(0x7f800000)));
}

// Multiplies the even bytes of w (unsigned) and x (signed), then the odd ones, as 16-bit numbers.
// One instruction adds two such products in 32 bits. The compiler widens x once for all w.
static inline v128_t add_products_of_bytes(v128_t c, v128_t w, v128_t x) {
    v128_t even = wasm_i32x4_dot_i16x8(wasm_v128_and(w, wasm_i16x8_splat(255)),
                                       wasm_i16x8_shr(wasm_i16x8_shl(x, 8), 8));
    v128_t odd = wasm_i32x4_dot_i16x8(wasm_u16x8_shr(w, 8), wasm_i16x8_shr(x, 8));
    return wasm_i32x4_add(c, wasm_i32x4_add(even, odd));
}

#include "simd.h"

static bool supported(void) { return true; }

const Kernels llamac_wasm128 = {.name = "wasm128", .supported = supported, SIMD_KERNELS};
#else
const Kernels llamac_wasm128 = {.name = "wasm128"};
#endif

// Defines the operations of simd.h for vectors of 4 floats. neon.c and neondot.c define TARGET and
// DOT, then include this file, which includes simd.h.
#include <arm_neon.h>

#define LANES 4
#define TILE_ROWS 1
#define TOKENS 6
#define BLOCK_TOKENS 3
#define Q8_OFFSET 0

typedef float32x4_t Floats;
#define LOAD(p) vld1q_f32(p)
#define LOAD_F16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(p))))
#define LOAD_BF16(p) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)(p)), 16))
#define LOAD_8(p) load_4_bytes(p)
#define STORE(p, v) vst1q_f32(p, v)
#define STORE_F16(p, v) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)))
#define SET(x) vdupq_n_f32(x)
#define ADD(a, b) vaddq_f32(a, b)
#define MUL(a, b) vmulq_f32(a, b)
#define DIV(a, b) vdivq_f32(a, b)
#define MAX(a, b) vmaxq_f32(a, b)
#define MIN(a, b) vminq_f32(a, b)
#define FMA(a, b, c) vfmaq_f32(c, a, b)
#define SUM(v) vaddvq_f32(v)
#define LARGEST(v) vmaxvq_f32(v)
#define ROUND(v) vrndnq_f32(v)
#define SWAP(v) vrev64q_f32(v)
#define POW2(n) \
    vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23))

typedef int32x4_t Ints;
#define LOAD_I(p) vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)(p)))
#define BF16_LOW(i) vreinterpretq_f32_s32(vshlq_n_s32(i, 16))
#define BF16_HIGH(i) vreinterpretq_f32_s32(vandq_s32(i, vdupq_n_s32((int)0xffff0000)))
#define SET_I(x) vdupq_n_s32(x)
#define FLOATS(i) vcvtq_f32_s32(i)
#define INTS(v) vcvtnq_s32_f32(v)
#define ADD_I(a, b) vaddq_s32(a, b)
#define MAX_I(a, b) vmaxq_s32(a, b)
#define SUM_I(i) vaddvq_s32(i)
#define LARGEST_I(i) vmaxvq_s32(i)
#define MAGNITUDE(v) vandq_s32(vreinterpretq_s32_f32(v), vdupq_n_s32(0x7fffffff))
#define STORE_8(p, i) store_4_bytes(p, i)
#define DOT_SMALL(c, w, x) DOT(c, w, x)
#define AND_15(w) vandq_s32(w, vdupq_n_s32(0x0f0f0f0f))
#define SHIFT_4(w) vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(w), 4))

typedef uint32x4_t Quad;
#define LOAD_QUAD(p) vreinterpretq_u32_u8(vld1q_u8(p))
#define STORE_QUAD(p, v) vst1q_u8(p, vreinterpretq_u8_u32(v))
#define SET_QUAD(x) vdupq_n_u32(x)
#define XOR_QUAD(a, b) veorq_u32(a, b)
#define LOW_32(a, b) vzip1q_u32(a, b)
#define HIGH_32(a, b) vzip2q_u32(a, b)

typedef float32x4_t Partial;
#define PARTIAL_SET(x) vdupq_n_f32(x)
#define PARTIAL_FMA(a, b, c) vfmaq_f32(c, a, b)
#define PARTIAL_SUM(a, b) vaddvq_f32(vaddq_f32(a, b))
#define HALF(h) half_to_float(h)

TARGET static inline float32x4_t load_4_bytes(const int8_t *p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes))))));
}

TARGET static inline void store_4_bytes(int8_t *p, int32x4_t i) {
    int16x4_t shorts = vmovn_s32(i);
    vst1_lane_s32((int32_t *)p, vreinterpret_s32_s8(vmovn_s16(vcombine_s16(shorts, shorts))), 0);
}

TARGET static inline Partial block_q8(const uint8_t *q, const Block *x) {
    int32x4_t sum = DOT(vdupq_n_s32(0), LOAD_I(q), LOAD_I(x->q));
    return vcvtq_f32_s32(DOT(sum, LOAD_I(q + 16), LOAD_I(x->q + 16)));
}

// Only one lane has the correction for the offset of the weights, because all lanes are summed in
// the end.
TARGET static inline Partial block_q4(const uint8_t *q, const Block *x) {
    int32x4_t w = LOAD_I(q), sum = vsetq_lane_s32(-8 * x->sum, vdupq_n_s32(0), 0);
    sum = DOT(sum, AND_15(w), LOAD_I(x->q));
    return vcvtq_f32_s32(DOT(sum, SHIFT_4(w), LOAD_I(x->q + 16)));
}

TARGET static inline Partial add_small(Partial sum, const uint8_t *q, const Block *x, float a,
                                       float b) {
    int32x4_t low = DOT(vdupq_n_s32(0), LOAD_I(q), LOAD_I(x->q));
    int32x4_t high = DOT(vdupq_n_s32(0), LOAD_I(q + 16), LOAD_I(x->q + 16));
    return vfmaq_n_f32(vfmaq_n_f32(sum, vcvtq_f32_s32(low), a), vcvtq_f32_s32(high), b);
}

// Returns 16 bytes, of which byte i is 16 if bit i is set, else 0.
TARGET static inline int32x4_t fifth_bits(uint32_t bits) {
    uint8x16_t own = vcombine_u8(vdup_n_u8((uint8_t)bits), vdup_n_u8((uint8_t)(bits >> 8)));
    uint8x16_t mask = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    return vreinterpretq_s32_u8(vandq_u8(vtstq_u8(own, mask), vdupq_n_u8(16)));
}

TARGET static inline Partial add_nibbles(Partial sum, const uint8_t *q, uint32_t fifth,
                                         const Block *x, float a) {
    int32x4_t w = LOAD_I(q), products = vdupq_n_s32(0);
    products = DOT(products, vorrq_s32(AND_15(w), fifth_bits(fifth)), LOAD_I(x->q));
    products = DOT(products, vorrq_s32(SHIFT_4(w), fifth_bits(fifth >> 16)), LOAD_I(x->q + 16));
    return vfmaq_n_f32(sum, vcvtq_f32_s32(products), a);
}

#include "simd.h"

// Defines the operations of simd.h for vectors of 4 floats. neon.c, neondot.c and neoni8mm.c define
// TARGET, BLOCK_TOKENS and DOT, then include this file, which includes simd.h.
#include <arm_neon.h>

#define LANES 4
#define TILE_ROWS 1
#define TOKENS 6
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
#define F16_LOW(i) vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(vreinterpretq_u32_s32(i))))
#define F16_HIGH(i) vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(vreinterpretq_u32_s32(i), 16)))
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
#define EVEN_32(a, b) vuzp1q_u32(a, b)
#define ODD_32(a, b) vuzp2q_u32(a, b)
#define LOAD_2X8(p, q) vreinterpretq_s32_s8(vcombine_s8(vld1_s8(p), vld1_s8(q)))

TARGET static inline float32x4_t load_4_bytes(const int8_t *p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes))))));
}

TARGET static inline void store_4_bytes(int8_t *p, int32x4_t i) {
    int16x4_t shorts = vmovn_s32(i);
    vst1_lane_s32((int32_t *)p, vreinterpret_s32_s8(vmovn_s16(vcombine_s16(shorts, shorts))), 0);
}

#include "simd.h"

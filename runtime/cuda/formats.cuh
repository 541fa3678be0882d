// Weight formats: how the bytes of a matrix become numbers.
//
// On the device, the scales of Q8_0 and Q4_0 are stored apart from the quantized values, so that
// every row can be read in aligned 16-byte loads.
#pragma once
#include "common.cuh"

// Returns element i of the flattened matrix, for any type and shape.
static __device__ float element_at(const Mat &m, size_t i) {
    const uint8_t *bytes = (const uint8_t *)m.data;
    switch (m.type) {
    case F32: return ((const float *)m.data)[i];
    case F16: return __half2float(((const __half *)m.data)[i]);
    case BF16: return __uint_as_float((uint32_t)((const uint16_t *)m.data)[i] << 16);
    case Q8_0: return __half2float(((const __half *)m.scales)[i / 32]) * (int8_t)bytes[i];
    case Q4_0: {
        int byte = bytes[i / 32 * 16 + i % 16]; // elements 0 to 15 are the low nibbles
        float scale = __half2float(((const __half *)m.scales)[i / 32]);
        return scale * ((i % 32 < 16 ? byte & 15 : byte >> 4) - 8);
    }
    default: // INT8_GROUPS
        return ((const float *)m.scales)[i / m.group] * (int8_t)bytes[i];
    }
}

// ----------------------------------------------------------------------------
// Format<type> unpacks one type. Its Unit holds N elements of a row, which one 16-byte load reads,
// and their scale where the type has one.
//   scale_at(m, i)         loads the scale of element i of the flattened matrix
//   make_unit(bits, scale) returns the unit made of the two loads
//   unpack(unit, out)      writes the N elements, not yet multiplied by the scale
//   scale(unit)            returns the factor for the unpacked elements

template <Type type> struct Format;

struct Unscaled {
    struct Scale {};
    struct Unit { uint4 bits; };
    static __device__ Scale scale_at(const Mat &, size_t) { return {}; }
    static __device__ Unit make_unit(const uint4 &bits, Scale) { return {bits}; }
    static __device__ float scale(const Unit &) { return 1; }
};

template <> struct Format<F32> : Unscaled {
    enum { N = 4 };
    static __device__ void unpack(const Unit &u, float *out) {
        out[0] = __uint_as_float(u.bits.x), out[1] = __uint_as_float(u.bits.y);
        out[2] = __uint_as_float(u.bits.z), out[3] = __uint_as_float(u.bits.w);
    }
};

template <> struct Format<F16> : Unscaled {
    enum { N = 8 };
    static __device__ void unpack(const Unit &u, float *out) {
        const __half2 *pairs = (const __half2 *)&u.bits;
        for (int i = 0; i < 4; i++) {
            float2 pair = __half22float2(pairs[i]);
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        }
    }
};

template <> struct Format<BF16> : Unscaled {
    enum { N = 8 };
    static __device__ void unpack(const Unit &u, float *out) {
        const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
        for (int i = 0; i < 4; i++) {
            out[2 * i] = __uint_as_float(words[i] << 16);
            out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
};

// Converts the four bytes of `word` to floats and subtracts `zero`. The lowest bit of the float
// 2^23 (0x4b000000) counts ones, so byte i of `word` in its lowest 8 bits makes it 2^23 + byte,
// which is cheaper than converting an integer.
static __device__ void bytes_to_floats(uint32_t word, float zero, float *out) {
    for (int i = 0; i < 4; i++) {
        float shifted = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i));
        out[i] = shifted - (8388608.0f + zero); // 8388608 = 2^23
    }
}

struct ScaledBlocks { // blocks of 32 elements with a scale in half precision
    typedef __half Scale;
    struct Unit {
        uint4 bits;
        __half scale;
    };
    static __device__ Scale scale_at(const Mat &m, size_t i) {
        return __ldg((const __half *)m.scales + i / 32);
    }
    static __device__ Unit make_unit(const uint4 &bits, Scale scale) { return {bits, scale}; }
    static __device__ float scale(const Unit &u) { return __half2float(u.scale); }
};

template <> struct Format<Q8_0> : ScaledBlocks {
    enum { N = 16 };
    static __device__ void unpack(const Unit &u, float *out) { // flipping the sign bit adds 128
        const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
        for (int i = 0; i < 4; i++) bytes_to_floats(words[i] ^ 0x80808080u, 128, out + 4 * i);
    }
};

template <> struct Format<Q4_0> : ScaledBlocks {
    enum { N = 32 };
    static __device__ void unpack(const Unit &u, float *out) {
        const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bytes_to_floats(words[i] & 0x0f0f0f0fu, 8, out + 4 * i);
            bytes_to_floats(words[i] >> 4 & 0x0f0f0f0fu, 8, out + 16 + 4 * i);
        }
    }
};

// Loads unit `unit` of the flattened matrix.
template <Type type>
static __device__ typename Format<type>::Unit load_unit(const Mat &m, size_t unit) {
    typedef Format<type> F;
    return F::make_unit(__ldg((const uint4 *)m.data + unit), F::scale_at(m, unit * F::N));
}

// ----------------------------------------------------------------------------
// Half precision

// Rounds to half precision. Finite values are clamped to its range, -65504 to 65504; infinities and
// NaN are kept, so that they reach the logits, where they are reported.
static __device__ __half to_half(float x) {
    if (fabsf(x) > 65504 && fabsf(x) < INFINITY) x = copysignf(65504, x);
    return __float2half(x);
}

static __device__ __half2 to_halves(float a, float b) {
    return __halves2half2(to_half(a), to_half(b));
}

// Writes scale * x (N,) in half precision, rounded by to_half. If no value is out of range, pairs
// are converted without clamping, which is faster.
template <int N> static __device__ void scale_to_halves(__half2 *out, const float *x, float scale) {
    float max = 0;
#pragma unroll
    for (int i = 0; i < N; i++) max = fmaxf(max, fabsf(scale * x[i]));
    if (max <= 65504) {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            out[i / 2] = __floats2half2_rn(scale * x[i], scale * x[i + 1]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 2) out[i / 2] = to_halves(scale * x[i], scale * x[i + 1]);
    }
}

// Writes y to out[i], and in half precision to half_copy[i] unless half_copy is NULL. The products
// on tensor cores read the copy.
static __device__ void store_with_copy(float *out, __half *half_copy, size_t i, float y) {
    out[i] = y;
    if (half_copy) half_copy[i] = to_half(y);
}

// Does the same for y (4,), to elements i to i + 3; i is a multiple of 4.
static __device__ void store_four_with_copy(float *out, __half *half_copy, size_t i,
                                            const float y[4]) {
    *(float4 *)(out + i) = make_float4(y[0], y[1], y[2], y[3]);
    __align__(8) __half2 pairs[2] = {to_halves(y[0], y[1]), to_halves(y[2], y[3])};
    if (half_copy) *(float2 *)(half_copy + i) = *(float2 *)pairs;
}

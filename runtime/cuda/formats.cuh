// Weight formats: how the bytes of a matrix become numbers.
//
// On the device, the scales of a quantized type are stored apart from the values (Mat.scales), so
// that every row can be read in aligned 16-byte loads. Q4_0 and all types with more than a scale
// (Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K) store 32 elements in 16 bytes of values: byte i has the low
// four bits of element i and, as its high nibble, those of element i + 16. The other bits of an
// element are in m.scales too. upload.cuh reorders the blocks of the file.
#pragma once
#include "common.cuh"

// Returns the bytes of m.scales for 256 elements of a row; 0 for types that are not quantized in
// blocks, including INT8_GROUPS. For types with blocks of 32, a block has an eighth of these bytes.
static constexpr __host__ __device__ int scale_bytes(Type type) {
    switch (type) {
    case Q8_0:
    case Q4_0: return 8 * 2;             // the scale, in half precision
    case Q4_1: return 8 * 4;             // scale and minimum
    case Q5_0:                           // scale, unused half, fifth bits
    case Q5_1: return 8 * 8;             // scale, minimum, fifth bits
    case Q4_K: return 4 + 8 * 2;         // d and e; a scale and a minimum for each 32 elements
    case Q5_K: return 4 + 8 * 2 + 8 * 4; // also fifth bits for each 32
    case Q6_K: return 4 + 16 + 8 * 8;    // d, unused half; 16 scales; upper two bits for each 32
    default: return 0;
    }
}

// Whether a block of the type has 256 elements; else it has 32.
static constexpr __host__ __device__ bool has_large_blocks(Type type) {
    return type == Q4_K || type == Q5_K || type == Q6_K;
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
// 2^23 (0x4b000000) has the value 1, so putting a byte in its lowest 8 bits makes it 2^23 + byte.
// This is cheaper than converting an integer.
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

// The types with more than a scale. Each block is described by a struct Block:
//   Scale            the data in m.scales for the 32 elements of a unit
//   load(p, sub)     loads it, for unit `sub` of the block whose bytes in m.scales begin at p
//   upper(s, i)      returns the upper bits of elements 4 i to 4 i + 3 of the unit, one element per
//                    byte, from bit 4 of the byte on
//   value(s, j, q)   returns element j of the unit, which is stored as q
template <Type type> struct Block;

// The upper bits of a unit are stored so that a shift and a mask extract those of four elements:
// byte k has the fifth bits of elements k, k + 4, ..., k + 28, from the lowest bit on.
static __device__ uint32_t fifth_bits(uint32_t bits, int i) {
    return (bits >> i & 0x01010101u) << 4;
}

template <> struct Block<Q4_1> {
    struct Scale { __half2 scale_min; };
    static __device__ Scale load(const uint8_t *p, int) { return {__ldg((const __half2 *)p)}; }
    static __device__ uint32_t upper(const Scale &, int) { return 0; }
    static __device__ float value(const Scale &s, int, float q) {
        float2 scale_min = __half22float2(s.scale_min);
        return scale_min.x * q + scale_min.y;
    }
};

struct FifthBits {
    struct Scale {
        __half2 scale_min;
        uint32_t fifth;
    };
    static __device__ Scale load(const uint8_t *p, int) {
        return {__ldg((const __half2 *)p), __ldg((const uint32_t *)p + 1)};
    }
    static __device__ uint32_t upper(const Scale &s, int i) { return fifth_bits(s.fifth, i); }
};

template <> struct Block<Q5_0> : FifthBits {
    static __device__ float value(const Scale &s, int, float q) {
        return __half22float2(s.scale_min).x * (q - 16);
    }
};

template <> struct Block<Q5_1> : FifthBits {
    static __device__ float value(const Scale &s, int, float q) {
        float2 scale_min = __half22float2(s.scale_min);
        return scale_min.x * q + scale_min.y;
    }
};

template <> struct Block<Q4_K> {
    struct Scale {
        __half2 factors;    // d and e
        uint16_t scale_min; // the scale in the lower byte
    };
    static __device__ Scale load(const uint8_t *p, int sub) {
        return {__ldg((const __half2 *)p), __ldg((const uint16_t *)p + 2 + sub)};
    }
    static __device__ uint32_t upper(const Scale &, int) { return 0; }
    static __device__ float value(const Scale &s, int, float q) {
        float2 factors = __half22float2(s.factors);
        return factors.x * (s.scale_min & 255) * q - factors.y * (s.scale_min >> 8);
    }
};

template <> struct Block<Q5_K> {
    struct Scale {
        Block<Q4_K>::Scale four;
        uint32_t fifth;
    };
    static __device__ Scale load(const uint8_t *p, int sub) {
        return {Block<Q4_K>::load(p, sub), __ldg((const uint32_t *)p + 5 + sub)};
    }
    static __device__ uint32_t upper(const Scale &s, int i) { return fifth_bits(s.fifth, i); }
    static __device__ float value(const Scale &s, int j, float q) {
        return Block<Q4_K>::value(s.four, j, q);
    }
};

template <> struct Block<Q6_K> {
    struct Scale {
        __half d;
        uint16_t scales;    // two signed bytes: lower for elements 0 to 15, upper for 16 to 31
        uint32_t lower_two; // upper two bits of elements 0 to 15: byte k has those of k, k + 4, ...
        uint32_t upper_two; // the same for elements 16 to 31
    };
    static __device__ Scale load(const uint8_t *p, int sub) {
        const uint32_t *words = (const uint32_t *)p + 5 + 2 * sub;
        return {__ldg((const __half *)p), __ldg((const uint16_t *)p + 2 + sub), __ldg(words),
                __ldg(words + 1)};
    }
    static __device__ uint32_t upper(const Scale &s, int i) {
        return ((i < 4 ? s.lower_two : s.upper_two) >> 2 * (i % 4) & 0x03030303u) << 4;
    }
    static __device__ float value(const Scale &s, int j, float q) {
        int scale = (int8_t)(j < 16 ? s.scales & 255 : s.scales >> 8);
        return __half2float(s.d) * scale * (q - 32);
    }
};

template <Type type> struct BlockFormat {
    enum { N = 32 };
    typedef Block<type> B;
    typedef typename B::Scale Scale;
    struct Unit {
        uint4 bits;
        Scale scale;
    };
    static __device__ Scale scale_at(const Mat &m, size_t i) {
        size_t block = i / (has_large_blocks(type) ? 256 : 32);
        int size = scale_bytes(type) / (has_large_blocks(type) ? 1 : 8);
        return B::load((const uint8_t *)m.scales + block * size, (int)(i / 32 % 8));
    }
    static __device__ Unit make_unit(const uint4 &bits, const Scale &scale) {
        return {bits, scale};
    }
    static __device__ float scale(const Unit &) { return 1; } // unpack multiplies by it
    static __device__ void unpack(const Unit &u, float *out) {
        const uint32_t words[] = {u.bits.x, u.bits.y, u.bits.z, u.bits.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t low = words[i % 4] >> (i < 4 ? 0 : 4) & 0x0f0f0f0fu;
            bytes_to_floats(low | B::upper(u.scale, i), 0, out + 4 * i);
#pragma unroll
            for (int j = 4 * i; j < 4 * i + 4; j++) out[j] = B::value(u.scale, j, out[j]);
        }
    }
    // Returns element i of the flattened matrix.
    static __device__ float element(const Mat &m, size_t i) {
        int j = (int)(i % 32), byte = ((const uint8_t *)m.data)[i / 32 * 16 + i % 16];
        Scale s = scale_at(m, i);
        int q = (j < 16 ? byte & 15 : byte >> 4) | (B::upper(s, j / 4) >> 8 * (j % 4) & 255);
        return B::value(s, j, (float)q);
    }
};

template <> struct Format<Q4_1> : BlockFormat<Q4_1> {};
template <> struct Format<Q5_0> : BlockFormat<Q5_0> {};
template <> struct Format<Q5_1> : BlockFormat<Q5_1> {};
template <> struct Format<Q4_K> : BlockFormat<Q4_K> {};
template <> struct Format<Q5_K> : BlockFormat<Q5_K> {};
template <> struct Format<Q6_K> : BlockFormat<Q6_K> {};

// Loads unit `unit` of the flattened matrix.
template <Type type>
static __device__ typename Format<type>::Unit load_unit(const Mat &m, size_t unit) {
    typedef Format<type> F;
    return F::make_unit(__ldg((const uint4 *)m.data + unit), F::scale_at(m, unit * F::N));
}

// Returns element i of the flattened matrix, for any type and shape.
static __device__ float element_at(const Mat &m, size_t i) {
    const uint8_t *bytes = (const uint8_t *)m.data;
    switch (m.type) {
    case F32: return ((const float *)m.data)[i];
    case F16: return __half2float(((const __half *)m.data)[i]);
    case BF16: return __uint_as_float((uint32_t)((const uint16_t *)m.data)[i] << 16);
    case Q8_0: return __half2float(((const __half *)m.scales)[i / 32]) * (int8_t)bytes[i];
    case Q4_0: {
        int byte = bytes[i / 32 * 16 + i % 16];
        float scale = __half2float(((const __half *)m.scales)[i / 32]);
        return scale * ((i % 32 < 16 ? byte & 15 : byte >> 4) - 8);
    }
    case Q4_1: return Format<Q4_1>::element(m, i);
    case Q5_0: return Format<Q5_0>::element(m, i);
    case Q5_1: return Format<Q5_1>::element(m, i);
    case Q4_K: return Format<Q4_K>::element(m, i);
    case Q5_K: return Format<Q5_K>::element(m, i);
    case Q6_K: return Format<Q6_K>::element(m, i);
    default: // INT8_GROUPS
        return ((const float *)m.scales)[i / m.group] * (int8_t)bytes[i];
    }
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

// Emulates AVX-VNNI and AVX-512 with VNNI and BF16 on a processor that has AVX2: each intrinsic
// that the kernels use, lane by lane, as Intel's guide describes it. The compiler finds this folder
// before its own headers, so the files of the kernels are compiled as they are.
#ifndef EMULATED
#include_next <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Changes the target attribute of the kernels' functions, so that the compiler itself uses nothing
// beyond AVX2.
#define target(set) __target__("avx2,fma,f16c")

// Without inlining, compilation takes a fifth of the time.
#define EMULATED __attribute__((noinline, unused, target())) static
#define ALL(n) for (int i = 0; i < n; i++)

typedef int32_t Ints16 __attribute__((vector_size(64)));
typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef int16_t Shorts32 __attribute__((vector_size(64)));
typedef uint16_t UnsignedShorts32 __attribute__((vector_size(64)));
typedef int8_t Bytes64 __attribute__((vector_size(64)));
typedef uint8_t Unsigned64 __attribute__((vector_size(64)));
typedef int8_t Bytes32 __attribute__((vector_size(32)));
typedef uint8_t Unsigned32 __attribute__((vector_size(32)));
typedef int16_t Shorts16 __attribute__((vector_size(32)));
typedef uint16_t Halves16 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef int8_t Bytes16 __attribute__((vector_size(16)));

// ----------------------------------------------------------------------------
// Products of bytes, and of pairs of BF16

#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 dpbusd_256
EMULATED __m256i dpbusd_256(__m256i c, __m256i w, __m256i x) {
    Ints8 sums = (Ints8)c;
    ALL(32) sums[i / 4] += ((Unsigned32)w)[i] * ((Bytes32)x)[i];
    return (__m256i)sums;
}

#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 dpbusd_512
EMULATED __m512i dpbusd_512(__m512i c, __m512i w, __m512i x) {
    Ints16 sums = (Ints16)c;
    ALL(64) sums[i / 4] += ((Unsigned64)w)[i] * ((Bytes64)x)[i];
    return (__m512i)sums;
}

#undef _mm512_maddubs_epi16
#define _mm512_maddubs_epi16 maddubs_512
EMULATED __m512i maddubs_512(__m512i w, __m512i x) {
    Shorts32 sums;
    ALL(32) {
        int sum = 0;
        for (int j = 2 * i; j < 2 * i + 2; j++) sum += ((Unsigned64)w)[j] * ((Bytes64)x)[j];
        sums[i] = sum > INT16_MAX ? INT16_MAX : sum < INT16_MIN ? INT16_MIN : sum;
    }
    return (__m512i)sums;
}

#undef _mm512_madd_epi16
#define _mm512_madd_epi16 madd_512
EMULATED __m512i madd_512(__m512i a, __m512i b) {
    Ints16 sums = {0};
    ALL(32) sums[i / 2] += ((Shorts32)a)[i] * ((Shorts32)b)[i];
    return (__m512i)sums;
}

EMULATED float float_of_bf16(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &word, 4);
    return f;
}

#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps dpbf16
EMULATED __m512 dpbf16(__m512 c, __m512bh a, __m512bh b) { // the upper half of each word first
    Words16 x = (Words16)a, y = (Words16)b;
    ALL(16) c[i] = fmaf(float_of_bf16(x[i] >> 16), float_of_bf16(y[i] >> 16), c[i]);
    ALL(16) c[i] = fmaf(float_of_bf16((uint16_t)x[i]), float_of_bf16((uint16_t)y[i]), c[i]);
    return c;
}

#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh cvtneps_pbh
EMULATED __m256bh cvtneps_pbh(__m512 v) { // to nearest even; zero for subnormal floats
    Words16 bits = (Words16)v;
    Halves16 out;
    ALL(16) {
        uint16_t sign = bits[i] >> 16 & 0x8000;
        if (v[i] != v[i]) out[i] = bits[i] >> 16 | 0x40;
        else if (fabsf(v[i]) < 0x1p-126f) out[i] = sign;
        else out[i] = (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
    }
    return (__m256bh)out;
}

#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps maskz_loadu
EMULATED __m512 maskz_loadu(__mmask16 some, const float *p) {
    __m512 v;
    ALL(16) v[i] = some >> i & 1 ? p[i] : 0;
    return v;
}

#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 mask_storeu_16
EMULATED void mask_storeu_16(uint16_t *p, __mmask16 some, __m256i v) {
    ALL(16) if (some >> i & 1) p[i] = ((Halves16)v)[i];
}

// ----------------------------------------------------------------------------
// Floats

#undef _mm512_loadu_ps
#undef _mm512_storeu_ps
#undef _mm512_set1_ps
#undef _mm512_setzero_ps
#undef _mm512_add_ps
#undef _mm512_mul_ps
#undef _mm512_div_ps
#define _mm512_loadu_ps loadu_floats
#define _mm512_storeu_ps storeu_floats
#define _mm512_set1_ps set1_floats
#define _mm512_setzero_ps() set1_floats(0)
#define _mm512_add_ps(a, b) ((a) + (b))
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_div_ps(a, b) ((a) / (b))
EMULATED __m512 loadu_floats(const float *p) {
    __m512 v;
    memcpy(&v, p, sizeof v);
    return v;
}
EMULATED void storeu_floats(float *p, __m512 v) { memcpy(p, &v, sizeof v); }
EMULATED __m512 set1_floats(float x) {
    __m512 v;
    ALL(16) v[i] = x;
    return v;
}

#undef _mm512_max_ps
#define _mm512_max_ps max_floats
EMULATED __m512 max_floats(__m512 a, __m512 b) { // returns b if one of the two is NaN
    ALL(16) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}

#undef _mm512_min_ps
#define _mm512_min_ps min_floats
EMULATED __m512 min_floats(__m512 a, __m512 b) {
    ALL(16) a[i] = a[i] < b[i] ? a[i] : b[i];
    return a;
}

#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps fmadd_floats
EMULATED __m512 fmadd_floats(__m512 a, __m512 b, __m512 c) {
    ALL(16) a[i] = fmaf(a[i], b[i], c[i]);
    return a;
}

#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps reduce_add
EMULATED float reduce_add(__m512 v) {
    for (int n = 8; n; n /= 2) ALL(n) v[i] += v[i + n];
    return v[0];
}

#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps reduce_max
EMULATED float reduce_max(__m512 v) {
    for (int n = 8; n; n /= 2) ALL(n) v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
    return v[0];
}

#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(v, imm) round_floats(v) // imm is 0: to nearest even
EMULATED __m512 round_floats(__m512 v) {
    ALL(16) v[i] = rintf(v[i]);
    return v;
}

#undef _mm512_scalef_ps
#define _mm512_scalef_ps scale_floats
EMULATED __m512 scale_floats(__m512 a, __m512 b) {
    ALL(16) a[i] = ldexpf(a[i], (int)floorf(b[i]));
    return a;
}

#undef _mm512_permute_ps
#define _mm512_permute_ps permute_floats
EMULATED __m512 permute_floats(__m512 v, int imm) {
    __m512 out;
    ALL(16) out[i] = v[i / 4 * 4 + (imm >> i % 4 * 2 & 3)];
    return out;
}

// ----------------------------------------------------------------------------
// Conversions

#undef _mm512_castsi512_ps
#undef _mm512_castps_si512
#undef _mm512_castsi512_si256
#define _mm512_castsi512_ps(i) ((__m512)(i))
#define _mm512_castps_si512(v) ((__m512i)(v))
#define _mm512_castsi512_si256(i) half_of(i, 0)
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 half_of
EMULATED __m256i half_of(__m512i i, int half) {
    __m256i out;
    memcpy(&out, (char *)&i + 32 * half, sizeof out);
    return out;
}

EMULATED __m512i whole(__m256i low, __m256i high) {
    __m512i out;
    memcpy(&out, &low, sizeof low), memcpy((char *)&out + 32, &high, sizeof high);
    return out;
}

#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps floats_of_f16
EMULATED __m512 floats_of_f16(__m256i v) {
    __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(v));
    __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
    return (__m512)whole((__m256i)low, (__m256i)high);
}

#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(v, imm) f16_of_floats(v) // imm is 0: to nearest even
EMULATED __m256i f16_of_floats(__m512 v) {
    __m128i low = _mm256_cvtps_ph((__m256)half_of((__m512i)v, 0), 0);
    return _mm256_set_m128i(_mm256_cvtps_ph((__m256)half_of((__m512i)v, 1), 0), low);
}

#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps floats_of_ints
EMULATED __m512 floats_of_ints(__m512i v) { return __builtin_convertvector((Ints16)v, __m512); }

#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 ints_of_floats
EMULATED __m512i ints_of_floats(__m512 v) {
    __m256i low = _mm256_cvtps_epi32((__m256)half_of((__m512i)v, 0));
    return whole(low, _mm256_cvtps_epi32((__m256)half_of((__m512i)v, 1)));
}

#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 ints_of_unsigned_shorts
EMULATED __m512i ints_of_unsigned_shorts(__m256i v) {
    return (__m512i) __builtin_convertvector((Halves16)v, Ints16);
}

#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 ints_of_bytes
EMULATED __m512i ints_of_bytes(__m128i v) {
    return (__m512i) __builtin_convertvector((Bytes16)v, Ints16);
}

#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 shorts_of_ints
EMULATED __m256i shorts_of_ints(__m512i v) {
    return (__m256i) __builtin_convertvector((Ints16)v, Shorts16);
}

#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 bytes_of_ints
EMULATED __m128i bytes_of_ints(__m512i v) {
    return (__m128i) __builtin_convertvector((Ints16)v, Bytes16);
}

// ----------------------------------------------------------------------------
// Integers

#undef _mm512_loadu_si512
#undef _mm512_setzero_si512
#undef _mm512_and_si512
#undef _mm512_add_epi32
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_srli_epi16
#define _mm512_loadu_si512(p) ((__m512i)loadu_floats((const float *)(p)))
#define _mm512_setzero_si512() set1_ints(0)
#define _mm512_and_si512(a, b) ((__m512i)((Words16)(a) & (Words16)(b)))
#define _mm512_add_epi32(a, b) ((__m512i)((Words16)(a) + (Words16)(b)))
#define _mm512_slli_epi32(v, n) ((__m512i)((Words16)(v) << (n)))
#define _mm512_srli_epi32(v, n) ((__m512i)((Words16)(v) >> (n)))
#define _mm512_srli_epi16(v, n) ((__m512i)((UnsignedShorts32)(v) >> (n)))

#undef _mm512_set1_epi32
#undef _mm512_set1_epi16
#undef _mm512_set1_epi8
#define _mm512_set1_epi32 set1_ints
#define _mm512_set1_epi16(x) set1_ints((x) * 0x00010001)
#define _mm512_set1_epi8(x) set1_ints((x) * 0x01010101)
EMULATED __m512i set1_ints(int32_t x) {
    Ints16 v;
    ALL(16) v[i] = x;
    return (__m512i)v;
}

#undef _mm512_max_epi32
#define _mm512_max_epi32 max_ints
EMULATED __m512i max_ints(__m512i a, __m512i b) {
    Ints16 x = (Ints16)a, y = (Ints16)b;
    ALL(16) x[i] = x[i] > y[i] ? x[i] : y[i];
    return (__m512i)x;
}

#undef _mm512_reduce_max_epi32
#define _mm512_reduce_max_epi32 reduce_max_ints
EMULATED int32_t reduce_max_ints(__m512i v) {
    Ints16 x = (Ints16)v;
    for (int n = 8; n; n /= 2) ALL(n) x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
    return x[0];
}

#undef _mm512_abs_epi8
#define _mm512_abs_epi8 abs_bytes
EMULATED __m512i abs_bytes(__m512i v) { // -128 becomes 128, as an unsigned byte
    Bytes64 x = (Bytes64)v;
    ALL(64) x[i] = (int8_t)abs(x[i]);
    return (__m512i)x;
}

#undef _mm512_movepi8_mask
#define _mm512_movepi8_mask sign_mask
EMULATED __mmask64 sign_mask(__m512i v) {
    __mmask64 mask = 0;
    ALL(64) mask |= (__mmask64)(((Bytes64)v)[i] < 0) << i;
    return mask;
}

#undef _mm512_mask_sub_epi8
#define _mm512_mask_sub_epi8 mask_sub_bytes
EMULATED __m512i mask_sub_bytes(__m512i from, __mmask64 some, __m512i a, __m512i b) {
    Bytes64 out = (Bytes64)from;
    ALL(64) if (some >> i & 1) out[i] = (int8_t)(((Bytes64)a)[i] - ((Bytes64)b)[i]);
    return (__m512i)out;
}
#endif

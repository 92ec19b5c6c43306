// Vectors of the instruction set that a file is compiled for, as vector types of the compiler:
// operators work lane by lane, and `a + b * c` becomes one fused instruction.
//
// Files in kernels/ are compiled once per instruction set.  All they define is in an anonymous
// namespace or always inlined, and they use nothing of the standard library: the linker keeps one
// copy of an inline function, perhaps one with instructions that this processor lacks.
#pragma once

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

using F32 = float __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
using I32 = int32_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
using U32 = uint32_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
using U16 = uint16_t __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
using U16Pairs = uint16_t __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
using I16 = int16_t __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
using I8 = int8_t __attribute__((vector_size(LANES), aligned(1), may_alias));
using U8 = uint8_t __attribute__((vector_size(LANES), aligned(1), may_alias));

ALWAYS_INLINE F32 load(const float* p) { return *reinterpret_cast<const F32*>(p); }
ALWAYS_INLINE void store(float* p, F32 v) { *reinterpret_cast<F32*>(p) = v; }
ALWAYS_INLINE F32 splat(float x) { return x - F32{}; }

ALWAYS_INLINE I32 splat_int(int32_t x) { return x - I32{}; }

ALWAYS_INLINE F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }

/// Zero-extend bytes to 32 bits.
ALWAYS_INLINE I32 load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (I32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const U8*>(p), I32);
#endif
}

/// Twice the float of 4 bits of each lane (OCP microscaling formats, 2023).
ALWAYS_INLINE I32 mxfp4_code(I32 q) {
  const I32 exponent = q >> 1 & 3, is_normal = (I32)(exponent > 0);
  const I32 size = ((q & 1) | (is_normal & 2)) << (exponent + is_normal);
  const I32 is_negative = q << 28 >> 31;
  return (size ^ is_negative) - is_negative;
}

/// Zero-extend 16 bits to 32.
ALWAYS_INLINE I32 load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const U16*>(p), I32);
#endif
}

/// bfloat16 is the upper half of a float.
ALWAYS_INLINE F32 load(const uint16_t* bf16) { return (F32)(load_halves(bf16) << 16); }

/// Signed bytes.
ALWAYS_INLINE F32 load(const int8_t* p) {
#if defined(__AVX512F__)
  return to_float((I32)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return to_float((I32)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return to_float(__builtin_convertvector(*reinterpret_cast<const I8*>(p), I32));
#endif
}

/// float16.
ALWAYS_INLINE F32 load_fp16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (F32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__F16C__)
  return (F32)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  return (F32)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
#error "no instruction for float16 is known here"
#endif
}

/// a * b + c, rounded once: where there are branches the compiler may round twice in one of them.
ALWAYS_INLINE F32 fused(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

/// Add the products with one number, rounding once.
ALWAYS_INLINE void add_product(F32& sums, F32 a, const float* b) {
#if defined(__AVX512F__)
  // The compiler would broadcast the number for several vectors, which takes an instruction.
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(a), "m"(*b));
#else
  sums = fused(splat(*b), a, sums);
#endif
}

ALWAYS_INLINE F32 absolute(F32 v) { return (F32)((I32)v & 0x7fffffff); }

ALWAYS_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
ALWAYS_INLINE I32 max(I32 a, I32 b) { return a > b ? a : b; }

/// Whether any lane of a comparison is true.
ALWAYS_INLINE bool any(I32 lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)lanes) != 0;
#else
  int32_t either = 0;
  for (int i = 0; i < LANES; i++) either |= lanes[i];
  return either != 0;
#endif
}

/// Sum and maximum of the lanes, halving the vector each time, in the same order for any LANES.
#if defined(__AVX512F__)
ALWAYS_INLINE float sum(F32 v) { return _mm512_reduce_add_ps((__m512)v); }
ALWAYS_INLINE float max(F32 v) { return _mm512_reduce_max_ps((__m512)v); }
ALWAYS_INLINE int32_t sum(I32 v) { return _mm512_reduce_add_epi32((__m512i)v); }
ALWAYS_INLINE int32_t max(I32 v) { return _mm512_reduce_max_epi32((__m512i)v); }
#else
template <typename Vector>
ALWAYS_INLINE auto sum(Vector v) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}
template <typename Vector>
ALWAYS_INLINE auto max(Vector v) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}
#endif

/// e^x within 2 units in the last place; exactly 1 at 0, 0 below -87.3, infinite above 88.7; NaN
/// stays NaN.
///
/// x = n ln 2 + r, and e^r by its Taylor polynomial, |r| < 0.35.
ALWAYS_INLINE F32 exp(F32 x) {
  const F32 lowest = splat(-87.336544f), highest = splat(88.72283f);
  F32 within = x < lowest ? lowest : x;
  within = within > highest ? highest : within;
  const F32 round = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  F32 shifted = within * splat(1.44269504f) + round;
  F32 n = shifted - round;
  F32 r = within - n * splat(0.693145752f);
  r = r - n * splat(1.42860677e-6f);
  F32 p = splat(1.0f / 5040);
  p = p * r + splat(1.0f / 720);
  p = p * r + splat(1.0f / 120);
  p = p * r + splat(1.0f / 24);
  p = p * r + splat(1.0f / 6);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  // 2^n in two factors: 2^128 is not a float.
  I32 whole = (I32)shifted - (I32)round;
  I32 half = whole >> 1;
  F32 scale = (F32)((half + 127) << 23), rest = (F32)((whole - half + 127) << 23);
  const F32 result = x < lowest ? F32{} : p * scale * rest;
  return x > highest ? splat(__builtin_inff()) : result;
}

/// The same for x <= 0 with a relative error of 3e-6, in half the time, for what is then rounded.
ALWAYS_INLINE F32 exp_coarse(F32 x) {
  const F32 lowest = splat(-87.0f), round = splat(12582912.0f);
  const F32 within = x < lowest ? lowest : x;
  const F32 shifted = within * splat(1.44269504f) + round;
  const F32 r = within * splat(1.44269504f) - (shifted - round);
  // 2^r is nearest to this for |r| <= 0.5, of polynomials that are 1 at 0.
  F32 p = splat(0.00958285294f);
  p = p * r + splat(0.0559064262f);
  p = p * r + splat(0.240240991f);
  p = p * r + splat(0.693124175f);
  p = p * r + splat(1.0f);
  const F32 power = (F32)(((I32)shifted << 23) + (127 << 23));
  return x < lowest ? F32{} : p * power;
}

// Products of 16-bit integers, which AVX2 and AVX-512 add two by two.
#if defined(__AVX2__)
#define HAS_DOT

/// Round to nearest, ties to even; for |x| < 2^22.
ALWAYS_INLINE I32 round_to_int(F32 x) {
  const F32 round = splat(12582912.0f);  // as in exp
  return (I32)(x + round) - (I32)round;
}

/// Swap the second and third of every four lanes.
ALWAYS_INLINE I32 swap_inner(I32 v) {
#if defined(__AVX512F__)
  return (I32)_mm512_shuffle_epi32((__m512i)v, _MM_PERM_DBCA);
#else
  return (I32)_mm256_shuffle_epi32((__m256i)v, _MM_SHUFFLE(3, 1, 2, 0));
#endif
}

/// The low 8 or 16 bits of each lane.
template <typename Int>
ALWAYS_INLINE auto narrow(I32 v) {
  if constexpr (sizeof(Int) == 1)
    return __builtin_convertvector(v, I8);
  else
    return __builtin_convertvector(v, I16);
}

ALWAYS_INLINE U16Pairs load_pairs(const uint8_t* p) {
  return *reinterpret_cast<const U16Pairs*>(p);
}

/// The codes of MXFP4 of bytes below 16.
ALWAYS_INLINE U16Pairs mxfp4_codes(U16Pairs q) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(native::MXFP4_CODES));
#if defined(__AVX512F__)
  return (U16Pairs)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)q);
#else
  return (U16Pairs)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)q);
#endif
}

/// Add the products of two signed 16-bit integers a lane.
ALWAYS_INLINE I32 add_products(I32 sums, I32 a, I32 b) {
#if defined(__AVX512VNNI__)
  return (I32)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (I32)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#else
  return sums + (I32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// Vector neural network instructions (VNNI), with 512-bit or else 256-bit vectors: they add products of four
// bytes, or of two 16-bit integers, to 32 bits.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HAS_VNNI
#endif

#if defined(__AVX512VBMI__)
#define HAS_SHIFTS
/// Look up each byte of `indices` in a table of 64; their upper two bits do not matter.
ALWAYS_INLINE I32 look_up(I32 table, I32 indices) {
  return (I32)_mm512_permutexvar_epi8((__m512i)indices, (__m512i)table);
}
#elif defined(__AVXVNNI__)
#define HAS_SHIFTS
/// Shift each byte to the left by its own count; all have room for a shift by MAX_SHIFT.
ALWAYS_INLINE I32 shift_bytes(I32 bytes, I32 by) {
  // A product of polynomials over GF(2) with x^n, of no higher degree than 7, is a shift by n.
  const __m256i powers = _mm256_set1_epi32(0x08040201);
  return (I32)_mm256_gf2p8mul_epi8((__m256i)bytes, _mm256_shuffle_epi8(powers, (__m256i)by));
}
#endif

// Inputs of 8 bits are scaled by channel, so that bytes of weights are shifted.
#if defined(HAS_SHIFTS)
constexpr int MIN_INPUT_BITS = 8;
#else
constexpr int MIN_INPUT_BITS = 16;
#endif

/// Four bytes in each lane.
ALWAYS_INLINE I32 splat_word(const uint8_t* word) {
  int32_t value;
  __builtin_memcpy(&value, word, sizeof(value));
  return splat_int(value);
}

/// Add to each lane the dot product of its weights, two 16-bit integers or, with VNNI, four unsigned
/// bytes, and the signed inputs of one word.
template <typename Int>
ALWAYS_INLINE I32 dot(I32 sums, I32 weights, const uint8_t* word) {
#if defined(__AVX512VNNI__)
  if constexpr (sizeof(Int) == 1) {
    // The compiler would broadcast a word for several vectors, which takes an instruction.
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(sums)
        : "v"(weights), "m"(*reinterpret_cast<const uint8_t(*)[4]>(word)));
    return sums;
  }
#elif defined(__AVXVNNI__)
  if constexpr (sizeof(Int) == 1)
    return (I32)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)splat_word(word));
#else
  static_assert(sizeof(Int) == 2);
#endif
  return add_products(sums, weights, splat_word(word));
}

#else
constexpr int MIN_INPUT_BITS = 32;
#endif

}  // namespace

// Products of quantized weights with inputs that are rounded to integers: the fast modes.
//
// A group's integers are multiplied and added exactly; the sum is then scaled once.  With inputs
// x = s_x q_x and weights w = s_w q_w + b_w, a group contributes
//     s_w s_x sum(q_w q_x) + b_w s_x sum(q_x)
// (as llama.cpp does with inputs of 8 bits).  One instruction multiplies two inputs of 16 bits or
// four of 8 where it multiplies one float.  Of normal numbers in groups of 32, 16 bits lose an
// eightieth of what bfloat16 loses, and 8 bits three times as much as it.
#pragma once

#include <limits>

#include "kernels.h"
#include "kernels/micro.h"

namespace {

#if defined(__AVX512VNNI__)

/// Rows of one call: with 8 the compiler keeps some of their sums in memory.
constexpr int MAX_ROWS_INTEGERS = 6;

/// Inputs of a row that lie side by side.
constexpr int EIGHT = 8;

/// Sixteen integers, as two rows of eight that are `stride` bytes apart.
template <typename Int>
ALWAYS_INLINE void store_eights(uint8_t* to, size_t stride, __m512i q) {
  if constexpr (sizeof(Int) == 1) {
    const __m128i integers = _mm512_cvtsepi32_epi8(q);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), integers);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + stride), _mm_srli_si128(integers, 8));
  } else {
    // Of four bytes of weights, the even and the odd ones are unpacked together.
    const __m512i mixed = _mm512_shuffle_epi32(q, _MM_PERM_DBCA);
    const __m256i integers = _mm512_cvtsepi32_epi16(mixed);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(integers));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + stride),
                     _mm256_extracti128_si256(integers, 1));
  }
}

/// A row's numbers `[size]`.  A number that is none makes the scale of its group none.
template <typename Int>
void arrange_integers(const float* x, int row, int height, int size, int group, uint8_t* integers,
                      float* scales, float* sums) {
  constexpr float TOP = std::numeric_limits<Int>::max();
  const size_t stride = EIGHT * sizeof(Int) * height;
  integers += EIGHT * sizeof(Int) * row;
  for (int at = row; at < size / group * height + row; at += height, x += group) {
    __m512 top = _mm512_setzero_ps();
    __mmask16 is_none = 0;
    for (int i = 0; i < group; i += LANES) {
      const __m512 value = _mm512_loadu_ps(x + i);
      top = _mm512_max_ps(top, _mm512_abs_ps(value));
      is_none |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    }
    const float highest = is_none ? __builtin_nanf("") : _mm512_reduce_max_ps(top);
    // Numbers as small as that are nothing beside any other; by 0 they could not be divided.
    const __m512 factor = _mm512_set1_ps(highest > 1e-30f ? TOP / highest : 0);
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < group; i += LANES, integers += 2 * stride) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
      total = _mm512_add_epi32(total, q);
      store_eights<Int>(integers, stride, q);
    }
    scales[at] = highest / TOP;
    sums[at] = scales[at] * static_cast<float>(_mm512_reduce_add_epi32(total));
  }
}

/// Add, in each lane, the products of 32 bits of weights and the inputs that one word holds.
template <typename Int>
ALWAYS_INLINE __m512i dot(__m512i sums, __m512i weights, const uint8_t* word) {
  int32_t inputs;
  __builtin_memcpy(&inputs, word, sizeof(inputs));
  if constexpr (sizeof(Int) == 1)
    return _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(inputs));
  return _mm512_dpwssd_epi32(sums, weights, _mm512_set1_epi32(inputs));
}

/// One tile of a panel; weights of BITS bits.
template <typename Int, int BITS, int ROWS>
void multiply_integers(const native::Panels& weights, const native::Arranged& x, const uint8_t* p,
                       float* y, size_t ldy, Ahead ahead) {
  constexpr int PER_BYTE = 8 / BITS, WORDS = sizeof(Int);  // words that hold four inputs
  const __m512i half_bytes = _mm512_set1_epi8(15), low_bytes = _mm512_set1_epi16(255);
  const uint8_t* inputs = x.integers;
  F32 results[ROWS][VECTORS] = {};
  for (int g = 0; g < weights.num_inputs / weights.group; g++) {
    ahead.ask();
    __m512i sums[ROWS][VECTORS] = {};
    for (int i = 0; i < weights.group; i += EIGHT, inputs += EIGHT * sizeof(Int) * ROWS) {
      __m512i loaded[VECTORS];
      for (int four = 0; four < EIGHT / 4; four++) {
        if (four % PER_BYTE == 0) {
          for (int v = 0; v < VECTORS; v++) loaded[v] = _mm512_loadu_si512(p + 64 * v);
          p += 4 * COLUMNS;
        }
        __m512i bytes[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          const __m512i shifted = four % PER_BYTE ? _mm512_srli_epi16(loaded[v], 4) : loaded[v];
          bytes[v] = BITS == 4 ? _mm512_and_si512(shifted, half_bytes) : shifted;
        }
        for (int word = 0; word < WORDS; word++) {
          __m512i w[VECTORS];
          for (int v = 0; v < VECTORS; v++)
            w[v] = WORDS == 1  ? bytes[v]
                   : word == 0 ? _mm512_and_si512(bytes[v], low_bytes)
                               : _mm512_srli_epi16(bytes[v], 8);
          const uint8_t* at = inputs + 4 * (four * WORDS + word);
          for (int m = 0; m < ROWS; m++)
            for (int v = 0; v < VECTORS; v++)
              sums[m][v] = dot<Int>(sums[m][v], w[v], at + EIGHT * sizeof(Int) * m);
        }
      }
    }
    const Parameters group(weights, p);
    for (int v = 0; v < VECTORS; v++) {
      for (int m = 0; m < ROWS; m++) {
        const F32 scaled = to_float((I32)sums[m][v]) * splat(x.scales[g * ROWS + m]);
        results[m][v] += scaled * group.scales[v];
        results[m][v] += group.biases[v] * splat(x.sums[g * ROWS + m]);
      }
    }
    p += weights.parameter_bytes();
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, results[m][v]);
}

template <typename Int>
void linear_tile_integers(const native::LinearArgs& args, int tile, const uint8_t* p, float* y,
                          size_t ldy, Ahead ahead, float*) {
  const native::Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, MAX_ROWS_INTEGERS};
  const size_t first = tiles.first(tile), groups = first * (w.num_inputs / w.group);
  const native::Arranged& all = args.arranged;
  const native::Arranged x = {nullptr, all.integers + first * w.num_inputs * sizeof(Int),
                              all.scales + groups, all.sums + groups};
#define CASE(ROWS)                                                        \
  case ROWS:                                                              \
    return w.format == native::Format::kBits4                             \
               ? multiply_integers<Int, 4, ROWS>(w, x, p, y, ldy, ahead)  \
               : multiply_integers<Int, 8, ROWS>(w, x, p, y, ldy, ahead);
  switch (tiles.height(tile)) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
  }
#undef CASE
}

#else

constexpr int MAX_ROWS_INTEGERS = 0;
template <typename Int>
void arrange_integers(const float*, int, int, int, int, uint8_t*, float*, float*) {}
template <typename Int>
void linear_tile_integers(const native::LinearArgs&, int, const uint8_t*, float*, size_t, Ahead,
                          float*) {}

#endif

}  // namespace

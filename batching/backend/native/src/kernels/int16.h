// Products of quantized weights with inputs that are rounded to 16 bits: the fast mode.
//
// A group's integers are multiplied and added exactly; the sum is then scaled once.  With inputs
// x = s_x q_x and weights w = s_w q_w + b_w, a group contributes
//     s_w s_x sum(q_w q_x) + b_w s_x sum(q_x)
// (llama.cpp does so with inputs of 8 bits; of 16, two at a time, one instruction multiplies as
// many as of floats twice, and of normal numbers in groups of 32 it loses an eightieth of what
// bfloat16 loses.)
#pragma once

#include "kernels.h"
#include "kernels/micro.h"

namespace {

#if defined(__AVX512VNNI__)

/// Rows of one call: with 8 the compiler keeps some of their sums in memory.
constexpr int MAX_ROWS_PAIRS = 6;

/// Inputs of a row that lie side by side.
constexpr int EIGHT = 8;

/// A row's numbers `[size]`: a group's largest one becomes 32767.  A number that is none makes the
/// scale none.
void arrange_pairs(const float* x, int row, int height, int size, int group, int16_t* pairs,
                   float* scales, float* sums) {
  auto* eights = reinterpret_cast<__m128i*>(pairs) + row;
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
    const __m512 factor = _mm512_set1_ps(highest > 1e-30f ? 32767 / highest : 0);
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < group; i += LANES, eights += 2 * height) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
      total = _mm512_add_epi32(total, q);
      const __m256i integers = _mm512_cvtsepi32_epi16(q);
      _mm_storeu_si128(eights, _mm256_castsi256_si128(integers));
      _mm_storeu_si128(eights + height, _mm256_extracti128_si256(integers, 1));
    }
    scales[at] = highest / 32767;
    sums[at] = scales[at] * static_cast<float>(_mm512_reduce_add_epi32(total));
  }
}

ALWAYS_INLINE __m512i dot(__m512i sums, __m512i weights, const int16_t* pair) {
  int32_t both;
  __builtin_memcpy(&both, pair, sizeof(both));
  return _mm512_dpwssd_epi32(sums, weights, _mm512_set1_epi32(both));
}

/// One tile of a panel; weights of BITS bits.
template <int BITS, int ROWS>
void multiply_pairs(const native::Panels& weights, const native::Arranged& x, const uint8_t* p,
                    float* y, size_t ldy, Ahead ahead) {
  constexpr int PAIRS = 16 / BITS;  // of inputs, whose weights share their words
  const __m512i mask = _mm512_set1_epi16((1 << BITS) - 1);
  const int16_t* pairs = x.pairs;
  F32 results[ROWS][VECTORS] = {};
  for (int g = 0; g < weights.num_inputs / weights.group; g++) {
    ahead.ask();
    __m512i integers[ROWS][VECTORS] = {};
    for (int i = 0; i < weights.group; i += EIGHT, pairs += EIGHT * ROWS) {
      __m512i words[VECTORS];
      for (int t = 0; t < EIGHT / 2; t++) {
        if (t % PAIRS == 0) {
          for (int v = 0; v < VECTORS; v++) words[v] = _mm512_loadu_si512(p + 64 * v);
          p += 4 * COLUMNS;
        }
        __m512i w[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          w[v] = (t + 1) % PAIRS ? _mm512_and_si512(words[v], mask) : words[v];
          words[v] = _mm512_srli_epi16(words[v], BITS);
        }
        for (int m = 0; m < ROWS; m++)
          for (int v = 0; v < VECTORS; v++)
            integers[m][v] = dot(integers[m][v], w[v], pairs + EIGHT * m + 2 * t);
      }
    }
    const Parameters group(weights, p);
    for (int v = 0; v < VECTORS; v++) {
      for (int m = 0; m < ROWS; m++) {
        const F32 scaled = to_float((I32)integers[m][v]) * splat(x.scales[g * ROWS + m]);
        results[m][v] += scaled * group.scales[v];
        results[m][v] += group.biases[v] * splat(x.sums[g * ROWS + m]);
      }
    }
    p += weights.parameter_bytes();
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, results[m][v]);
}

void linear_tile_pairs(const native::LinearArgs& args, int tile, const uint8_t* p, float* y,
                       size_t ldy, Ahead ahead, float*) {
  const native::Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, MAX_ROWS_PAIRS};
  const size_t first = tiles.first(tile), groups = first * (w.num_inputs / w.group);
  const native::Arranged& all = args.arranged;
  const native::Arranged x = {nullptr, all.pairs + first * w.num_inputs, all.scales + groups,
                              all.sums + groups};
#define CASE(ROWS)                                                \
  case ROWS:                                                      \
    return w.format == native::Format::kBits4                     \
               ? multiply_pairs<4, ROWS>(w, x, p, y, ldy, ahead)  \
               : multiply_pairs<8, ROWS>(w, x, p, y, ldy, ahead);
  switch (tiles.height(tile)) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
  }
#undef CASE
}

#else

constexpr int MAX_ROWS_PAIRS = 0;
void arrange_pairs(const float*, int, int, int, int, int16_t*, float*, float*) {}
void linear_tile_pairs(const native::LinearArgs&, int, const uint8_t*, float*, size_t, Ahead,
                       float*) {}

#endif

}  // namespace

// Products of quantized weights with inputs that are rounded to 16 bits: the fast mode.
//
// A group's integers are multiplied and added exactly; the sum is then scaled once.  With inputs
// x = s_x q_x and weights w = s_w q_w + b_w, a group contributes
//     s_w s_x sum(q_w q_x) + b_w s_x sum(q_x)
// (llama.cpp does so with inputs of 8 bits; of 16, two at a time, one instruction multiplies as
// many as of floats twice, and what is lost is a thousandth of what bfloat16 loses.)
#pragma once

#include "kernels.h"
#include "kernels/micro.h"

namespace {

#if defined(__AVX512VNNI__)

constexpr bool HAS_INT16 = true;
/// Rows of one call: their integer sums and their results stay in registers.
constexpr int INT16_ROWS = 6;

ALWAYS_INLINE float highest_magnitude(const float* x, int size) {
  F32 top{};
  for (int i = 0; i < size; i += LANES) {
    const F32 value = load(x + i);
    top = max(top, value < F32{} ? -value : value);
  }
  return max(top);
}

/// One row: a group's largest number becomes 32767.  A number that is none makes the scale none.
void quantize(const float* x, int size, int group, int16_t* values, float* scales, float* sums) {
  const F32 round = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no room for a fraction
  for (int g = 0; g * group < size; g++, x += group, values += group) {
    const float highest = highest_magnitude(x, group);
    // Numbers as small as that are nothing beside any other; by 0 they could not be divided.
    const float factor = highest > 1e-30f ? 32767 / highest : 0;
    I32 total{};
    F32 check{};
    for (int i = 0; i < group; i += LANES) {
      const F32 value = load(x + i);
      check += value * F32{};
      const I32 q = (I32)(value * splat(factor) + round) - (I32)round;
      total += q;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + i),
                          _mm512_cvtsepi32_epi16((__m512i)q));
    }
    scales[g] = highest / 32767 + sum(check);
    sums[g] = scales[g] * sum(to_float(total));
  }
}

ALWAYS_INLINE __m512i dot(__m512i sums, __m512i weights, const int16_t* pair) {
  int32_t both;
  __builtin_memcpy(&both, pair, sizeof(both));
  return _mm512_dpwssd_epi32(sums, weights, _mm512_set1_epi32(both));
}

/// One panel's outputs of ROWS rows; weights of BITS bits.
template <int BITS, int ROWS>
void multiply_int16(const native::Panels& w, const native::Quantized& x, int first_row,
                    const uint8_t* p, float* y, size_t ldy) {
  constexpr int PAIRS = 16 / BITS;  // of inputs, whose weights share their words
  const int num_groups = w.num_inputs / w.group;
  const int16_t* values = x.values + static_cast<size_t>(first_row) * w.num_inputs;
  const float* scales = x.scales + static_cast<size_t>(first_row) * num_groups;
  const float* sums = x.sums + static_cast<size_t>(first_row) * num_groups;
  const __m512i mask = _mm512_set1_epi16((1 << BITS) - 1);
  F32 results[ROWS][VECTORS] = {};
  for (int g = 0; g < num_groups; g++, values += w.group) {
    __m512i integers[ROWS][VECTORS] = {};
    for (int i = 0; i < w.group; i += 2 * PAIRS, p += 4 * COLUMNS)
      for (int v = 0; v < VECTORS; v++) {
        __m512i words = _mm512_loadu_si512(p + 64 * v);
        for (int t = 0; t < PAIRS; t++, words = _mm512_srli_epi16(words, BITS)) {
          const __m512i weights = t < PAIRS - 1 ? _mm512_and_si512(words, mask) : words;
          for (int m = 0; m < ROWS; m++)
            integers[m][v] = dot(integers[m][v], weights, values + m * w.num_inputs + i + 2 * t);
        }
      }
    const float* parameters = reinterpret_cast<const float*>(p);
    for (int v = 0; v < VECTORS; v++) {
      const F32 scale = load(parameters + v * LANES);
      const F32 bias = load(parameters + COLUMNS + v * LANES);
      for (int m = 0; m < ROWS; m++) {
        const F32 scaled = to_float((I32)integers[m][v]) * splat(scales[m * num_groups + g]);
        results[m][v] += scaled * scale;
        results[m][v] += bias * splat(sums[m * num_groups + g]);
      }
    }
    p += 2 * COLUMNS * sizeof(float);
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, results[m][v]);
}

template <int BITS>
void multiply_int16(int rows, const native::Panels& w, const native::Quantized& x, int first_row,
                    const uint8_t* p, float* y, size_t ldy) {
#define CASE(ROWS) \
  case ROWS:       \
    return multiply_int16<BITS, ROWS>(w, x, first_row, p, y, ldy);
  switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

/// Rows `[first_row, first_row + rows)` of one panel.
void linear_int16(int rows, const native::Panels& w, const native::Quantized& x, int first_row,
                  const uint8_t* p, float* y, size_t ldy) {
  const int tiles = (rows + INT16_ROWS - 1) / INT16_ROWS;
  for (int t = 0; t < tiles; t++) {
    const int first = rows * t / tiles, size = rows * (t + 1) / tiles - first;
    auto run = w.format == native::Format::kBits4 ? &multiply_int16<4> : &multiply_int16<8>;
    run(size, w, x, first_row + first, p, y + first * ldy, ldy);
  }
}

#else

constexpr bool HAS_INT16 = false;
void quantize(const float*, int, int, int16_t*, float*, float*) {}
void linear_int16(int, const native::Panels&, const native::Quantized&, int, const uint8_t*,
                  float*, size_t) {}

#endif

}  // namespace

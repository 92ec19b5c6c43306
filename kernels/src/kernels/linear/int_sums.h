// Sums of products of integers in registers, and products with inputs of 16 bits by them: a lane of an
// instruction multiplies and adds two 16-bit or, with VNNI, four 8-bit inputs.
#pragma once

#include "kernels.h"
#include "kernels/linear/integers.h"
#include "kernels/linear/shifted_weights.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_DOT)

/// A group's sums of products of integers, in COUNT vectors of columns.
template <typename Int, native::Format FORMAT, int ROWS, int COUNT = VECTORS>
struct IntSums {
  static constexpr int FOURS = has_nibbles(FORMAT) ? 2 : 1, WORDS = sizeof(Int);  // loaded at once
  static constexpr int INPUT_BYTES = EIGHT * sizeof(Int), WEIGHT_BYTES = EIGHT * COLUMNS / FOURS;
  // A sum of one or two rows would wait for itself, so it is kept in parts.
  static constexpr int PARTS = ROWS == 1 ? 2 * WORDS : ROWS == 2 ? 2 : 1;
  I32 parts[PARTS][ROWS][COUNT] = {};

  ALWAYS_INLINE IntSums() = default;
  ALWAYS_INLINE explicit IntSums(const int32_t* begins) {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < COUNT; v++) parts[0][m][v] = splat_int(begins[m]);
  }
  /// Add the products of eight inputs of each row; with 8 bits their weights are shifted.
  ALWAYS_INLINE void add(const uint8_t* inputs, const uint8_t* p, const uint8_t* shifts = nullptr) {
    U16Pairs loaded[COUNT];
    for (int at = 0; at < 2 * WORDS; at++) {
      const int four = at / WORDS;
      I32 w[COUNT];
      for (int v = 0; v < COUNT; v++) {
        if (at % (FOURS * WORDS) == 0) loaded[v] = load_pairs(p + 4 * (four * COLUMNS + LANES * v));
        if constexpr (sizeof(Int) == 1)
          w[v] = shifted_weights<FORMAT, ROWS>(loaded[v], four, shifts + 4 * four);
        else
          w[v] = weights_of<Int, FORMAT>(loaded[v], four % FOURS, at % WORDS);
      }
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < COUNT; v++) {
          I32& sum = parts[at % PARTS][m][v];
          sum = dot<Int>(sum, w[v], inputs + 4 * at + INPUT_BYTES * m);
        }
    }
  }
  /// Add those of a group, and move on to what follows it.
  ALWAYS_INLINE void add_group(const uint8_t*& inputs, const uint8_t*& p, int group) {
    for (int i = 0; i < group; i += EIGHT) {
      add(inputs, p);
      inputs += INPUT_BYTES * ROWS;
      p += WEIGHT_BYTES;
    }
  }
  ALWAYS_INLINE F32 at(int m, int v) const {
    I32 sum = parts[0][m][v];
    for (int part = 1; part < PARTS; part++) sum += parts[part][m][v];
    return to_float(sum);
  }
};

/// Add the products of one tile of a panel and inputs of 16 bits to `results`, `[ROWS][COLUMNS]`:
/// memory, since registers have the sums of a group.
template <native::Format FORMAT, int ROWS, bool HAS_HALVES = false>
void multiply_int16(const native::Panels& weights, const native::PackedInputs& x, const uint8_t* p,
                    const int32_t* begins, float* results, Prefetcher prefetcher) {
  using Sums = IntSums<int16_t, FORMAT, ROWS>;
  const uint8_t *inputs = x.integers, *panel = p;
  p += weights.first_group();
  const bool is_biased = has_biases(weights);
  const int end = weights.num_inputs / weights.group * ROWS;
  for (int at = 0; at < end; at += ROWS) {
    prefetcher.advance();
    Sums sums(begins + at);
    sums.add_group(inputs, p, weights.group);
    const Parameters group(weights, p, factors_of(weights, panel, at / ROWS));
    p += weights.parameter_bytes();
    // Two groups of HALF_GROUP share the scale of their inputs.
    const float* scales = x.scales + (HAS_HALVES ? at / ROWS / 2 * ROWS : at);
    const float* input_sums = (HAS_HALVES ? x.half_sums : x.sums) + at;
    const auto finish = [&]<bool IS_BIASED>() __attribute__((always_inline)) {
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++) {
          float* y = results + m * COLUMNS + v * LANES;
          F32 result = fused(sums.at(m, v) * splat(scales[m]), group.scales[v], load(y));
          if (IS_BIASED) result = fused(splat(input_sums[m]), group.biases[v], result);
          store(y, result);
        }
    };
    is_biased ? finish.template operator()<true>() : finish.template operator()<false>();
  }
}

#endif

}  // namespace

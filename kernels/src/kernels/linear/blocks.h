// Products of quantized weights and inputs of 16 bits without VNNI: a block of weights is unpacked into registers and
// multiplied with all rows of a tile.
//
// AVX2 has 16 registers, and a product of integers takes two instructions, so that a tile of sums in
// registers would have few rows, and unpacking would be a third of the work.  The sums are in the L1
// cache instead, read and written once a block; one or two rows, which would wait for that, have them in
// registers.  Integers are added exactly and floats in the order of the groups, so that no bit of a row
// depends on the number of rows.
#pragma once

#include "kernels.h"
#include "kernels/linear/int_sums.h"
#include "kernels/linear/integers.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_DOT) && !defined(HAS_VNNI)

/// The weights of eight inputs in the columns of a panel, as pairs.
template <native::Format FORMAT>
struct Block {
  static constexpr int PAIRS = EIGHT / 2, FOURS = has_nibbles(FORMAT) ? 2 : 1;
  static constexpr int INPUT_BYTES = EIGHT * sizeof(int16_t), WEIGHT_BYTES = EIGHT * COLUMNS / FOURS;
  I32 weights[PAIRS][VECTORS];

  ALWAYS_INLINE explicit Block(const uint8_t* p) {
    for (int at = 0; at < PAIRS; at++)
      for (int v = 0; v < VECTORS; v++) {
        const int four = at / 2, first = four / FOURS * COLUMNS + v * LANES;
        weights[at][v] = weights_of<int16_t, FORMAT>(load_pairs(p + 4 * first), four % FOURS, at % 2);
      }
  }
  /// Add a row's products to its sums.
  ALWAYS_INLINE void add(const uint8_t* inputs, I32 (&sums)[VECTORS]) const {
    for (int at = 0; at < PAIRS; at++)
      for (int v = 0; v < VECTORS; v++) sums[v] = dot<int16_t>(sums[v], weights[at][v], inputs + 4 * at);
  }
};

/// The sums of a group in each row and column.
struct GroupSums {
  alignas(64) I32 sums[MAX_ROWS_INT][VECTORS];

  /// Add the products of a block to what the sums begin with, or to those before.
  template <native::Format FORMAT>
  ALWAYS_INLINE void add(const Block<FORMAT>& block, const uint8_t* inputs, int height,
                         const int32_t* begins) {
    for (int m = 0; m < height; m++) {
      I32 row[VECTORS];
      for (int v = 0; v < VECTORS; v++) row[v] = begins ? splat_int(begins[m]) : sums[m][v];
      block.add(inputs + m * Block<FORMAT>::INPUT_BYTES, row);
      for (int v = 0; v < VECTORS; v++) sums[m][v] = row[v];
    }
  }
  /// Scale them, and add them to the results `[height][COLUMNS]`.
  ALWAYS_INLINE void finish(const Parameters<>& group, bool is_biased, int height,
                            const float* scales, const float* input_sums, float* results) const {
    for (int m = 0; m < height; m++)
      for (int v = 0; v < VECTORS; v++, results += LANES) {
        const F32 sum = to_float(sums[m][v]) * splat(scales[m]);
        F32 result = fused(sum, group.scales[v], load(results));
        if (is_biased) result = fused(splat(input_sums[m]), group.biases[v], result);
        store(results, result);
      }
  }
};

template <typename Int>
constexpr int max_rows_int() {
  return MAX_ROWS_INT;
}

/// Add the products of one tile of a panel to `results`, `[height][COLUMNS]`, block by block.
template <native::Format FORMAT, bool HAS_HALVES>
void multiply_blocks(const native::Panels& weights, const native::PackedInputs& x,
                     const uint8_t* p, const int32_t* begins, int height, float* results,
                     Prefetcher prefetcher) {
  using Weights = Block<FORMAT>;
  const bool is_biased = has_biases(weights);
  const float *scales = x.scales, *input_sums = HAS_HALVES ? x.half_sums : x.sums;
  const uint8_t *inputs = x.integers, *panel = p;
  GroupSums sums;
  p += weights.first_group();
  for (int g = 0; g < weights.num_inputs / weights.group; g++) {
    prefetcher.advance();
    for (int i = 0; i < weights.group; i += EIGHT) {
      sums.add(Weights(p), inputs, height, i == 0 ? begins : nullptr);
      p += Weights::WEIGHT_BYTES;
      inputs += Weights::INPUT_BYTES * height;
    }
    const Parameters group(weights, p, factors_of(weights, panel, g));
    p += weights.parameter_bytes();
    sums.finish(group, is_biased, height, scales, input_sums, results);
    begins += height;
    input_sums += height;
    // Two groups of HALF_GROUP share the scale of their inputs.
    if (!HAS_HALVES || g % 2) scales += height;
  }
}

/// Compute one tile of a panel, of up to MAX_ROWS_INT rows.
template <typename Int, bool HAS_HALVES, native::Format FORMAT>
void multiply_ints(const native::Panels& weights, const native::PackedInputs& x, const uint8_t* p,
                   const int32_t* begins, int height, float* y, size_t ldy, Prefetcher prefetcher) {
  static_assert(sizeof(Int) == 2);
  alignas(64) float results[MAX_ROWS_INT * COLUMNS];
  for (int i = 0; i < height * COLUMNS; i += LANES) store(results + i, F32{});
  if (height == 1)
    multiply_int16<FORMAT, 1, HAS_HALVES>(weights, x, p, begins, results, prefetcher);
  else if (height == 2)
    multiply_int16<FORMAT, 2, HAS_HALVES>(weights, x, p, begins, results, prefetcher);
  else
    multiply_blocks<FORMAT, HAS_HALVES>(weights, x, p, begins, height, results, prefetcher);
  copy_rows(results, height, y, ldy);
}

#endif

}  // namespace

// Products of weights of up to 6 bits and inputs of 8 bits without VNNI.
//
// One instruction multiplies unsigned and signed bytes and adds each two products in 16 bits, in which the
// products of four inputs have room.  The next one, which adds two of these sums in 32 bits, multiplies
// them as well: by an integer factor of each, so that every four inputs are rounded with a scale of their
// own at next to no cost.  Scales of two levels are those of VS-Quant (Dai et al., MLSys 2021).
#pragma once

#include "kernels.h"
#include "kernels/linear/integers.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_DOT) && !defined(HAS_VNNI)

/// That of the group's largest input.  Sums of 128 inputs times weights of 6 bits times factors are
/// below 2^31.
constexpr int MAX_FACTOR = 1 << 11;

/// How inputs of a group are rounded.
struct TwoLevelRounding {
  float scale, factors_per_unit, integers_per_unit;

  /// `top` as in Rounding.
  ALWAYS_INLINE explicit TwoLevelRounding(I32 top) {
    const Rounding<int8_t> one_level(top);
    scale = one_level.scale * (1.0f / MAX_FACTOR);
    integers_per_unit = one_level.factor * MAX_FACTOR;
    // The largest becomes MAX_FACTOR and no more, so that an input alone is exact.
    factors_per_unit = integers_per_unit * ((1 - 0x1p-20f) / Rounding<int8_t>::TOP);
  }
  /// Of the largest absolute values; those that are rounded with them become TOP at most.  Of inputs that
  /// are not finite they may be any.
  ALWAYS_INLINE I32 factors(I32 tops) const {
    return __builtin_convertvector((F32)tops * splat(factors_per_unit), I32) + 1;
  }
  ALWAYS_INLINE I32 integers(F32 x, I32 factors) const {
    return round_to_int(x * (splat(integers_per_unit) / to_float(factors)));
  }
};

/// Round TWO_LEVEL_INPUTS inputs, and return the sum of the integers times their factors.
ALWAYS_INLINE int32_t pack_two_level_block(const float* x, const TwoLevelRounding& rounding,
                                           uint8_t* to) {
  auto* of_fours = reinterpret_cast<int16_t*>(to + native::TWO_LEVEL_INPUTS);
  I32 sums{};
  for (int i = 0; i < native::TWO_LEVEL_INPUTS; i += LANES) {
    const F32 values = load(x + i);
    const I32 factors = rounding.factors(max_of_fours((I32)absolute(values)));
    const I32 q = rounding.integers(values, factors);
    const auto bytes = narrow<int8_t>(q);
    __builtin_memcpy(to + i, &bytes, LANES);
    for (int eight = 0; eight < LANES; eight += EIGHT) {
      *of_fours++ = static_cast<int16_t>(factors[eight]);
      *of_fours++ = static_cast<int16_t>(factors[eight + 2]);
    }
    sums += q * factors;
  }
  return sum(sums);
}

void pack_row_two_level(const float* x, int row, int height, int size, int group,
                        const native::PackedInputs& to) {
  static_assert(native::TWO_LEVEL_INPUTS == native::HALF_GROUP);
  uint8_t* block = to.integers + native::TWO_LEVEL_BYTES * row;
  const auto pack_half = [&](const float* inputs, const TwoLevelRounding& rounding)
                             __attribute__((always_inline)) {
    const int32_t total = pack_two_level_block(inputs, rounding, block);
    block += native::TWO_LEVEL_BYTES * height;
    return total;
  };
  pack_groups<TwoLevelRounding>(x, row, height, size, group, to, pack_half);
}

/// The weights of TWO_LEVEL_INPUTS inputs in the columns of a panel, four in each lane.
template <native::Format FORMAT>
struct ByteBlock {
  static constexpr int FOURS = native::TWO_LEVEL_INPUTS / 4, AT_ONCE = has_nibbles(FORMAT) ? 2 : 1;
  static constexpr int WEIGHT_BYTES = native::TWO_LEVEL_INPUTS * COLUMNS / AT_ONCE;
  I32 weights[FOURS][VECTORS];

  ALWAYS_INLINE explicit ByteBlock(const uint8_t* p) {
    for (int at = 0; at < FOURS; at++)
      for (int v = 0; v < VECTORS; v++) {
        const uint8_t* from = p + 4 * (at / AT_ONCE * COLUMNS + v * LANES);
        weights[at][v] = weights_of<int8_t, FORMAT>(load_pairs(from), at % AT_ONCE, 0);
      }
  }
  /// Add a row's products, times their factors, to its sums.
  ALWAYS_INLINE void add(const uint8_t* inputs, I32 (&sums)[VECTORS]) const {
    for (int at = 0; at < FOURS; at += 2) {
      const I32 first = splat_word(inputs + 4 * at), second = splat_word(inputs + 4 * at + 4);
      const I32 factors = splat_word(inputs + native::TWO_LEVEL_INPUTS + 2 * at);
      for (int v = 0; v < VECTORS; v++) {
        const I16Pairs pairs =
            byte_products(weights[at][v], first) + byte_products(weights[at + 1][v], second);
        sums[v] = add_products(sums[v], (I32)pairs, factors);
      }
    }
  }
};

/// What is read for a group of weights: `[row]` each.
struct GroupOfRows {
  const int32_t* begins;
  const float *scales, *sums;
};

/// The sums of a group of weights, and results, of the rows of a tile: ROWS, whose sums are in
/// registers, or for 0 any number up to MAX_ROWS_INT.
template <int ROWS>
struct TwoLevelTile {
  static constexpr int SIZE = ROWS ? ROWS : MAX_ROWS_INT;
  int num_rows;
  alignas(64) I32 sums[SIZE][VECTORS];
  alignas(64) F32 results[SIZE][VECTORS];

  ALWAYS_INLINE explicit TwoLevelTile(int num_rows) : num_rows(num_rows) {
    for (int m = 0; m < height(); m++)
      for (int v = 0; v < VECTORS; v++) results[m][v] = F32{};
  }
  ALWAYS_INLINE int height() const { return ROWS ? ROWS : num_rows; }
  /// Add the products of a block of a group, the last of which is scaled and added to the results.
  template <native::Format FORMAT, bool IS_FIRST, bool IS_LAST, bool IS_BIASED>
  ALWAYS_INLINE void add(const uint8_t* p, const uint8_t* inputs, const GroupOfRows& rows,
                         const Parameters<>& group) {
    const ByteBlock<FORMAT> block(p);
    for (int m = 0; m < height(); m++, inputs += native::TWO_LEVEL_BYTES) {
      I32 row[VECTORS];
      for (int v = 0; v < VECTORS; v++) row[v] = IS_FIRST ? splat_int(rows.begins[m]) : sums[m][v];
      block.add(inputs, row);
      for (int v = 0; v < VECTORS; v++) {
        if (!IS_LAST) {
          sums[m][v] = row[v];
          continue;
        }
        F32& result = results[m][v];
        result = fused(to_float(row[v]) * splat(rows.scales[m]), group.scales[v], result);
        if (IS_BIASED) result = fused(splat(rows.sums[m]), group.biases[v], result);
      }
    }
  }
  /// Add the products of a group.
  template <native::Format FORMAT, bool IS_BIASED, bool IS_HALF>
  ALWAYS_INLINE void add_group(const uint8_t*& p, const uint8_t*& inputs, int size,
                               const GroupOfRows& rows, const Parameters<>& group) {
    const auto add_block = [&]<bool IS_FIRST, bool IS_LAST>() __attribute__((always_inline)) {
      add<FORMAT, IS_FIRST, IS_LAST, IS_BIASED>(p, inputs, rows, group);
      p += ByteBlock<FORMAT>::WEIGHT_BYTES;
      inputs += native::TWO_LEVEL_BYTES * height();
    };
    if (IS_HALF) return add_block.template operator()<true, true>();
    add_block.template operator()<true, false>();
    for (int i = 2 * native::TWO_LEVEL_INPUTS; i < size; i += native::TWO_LEVEL_INPUTS)
      add_block.template operator()<false, false>();
    add_block.template operator()<false, true>();
  }
};

/// Compute one tile of a panel, of up to MAX_ROWS_INT rows.
template <native::Format FORMAT, bool HAS_HALVES, bool IS_BIASED, int ROWS>
void multiply_two_level(const native::Panels& weights, const native::PackedInputs& x,
                        const uint8_t* p, const int32_t* begins, int height, float* y, size_t ldy,
                        Prefetcher prefetcher) {
  const uint8_t *inputs = x.integers, *panel = p;
  GroupOfRows rows{begins, x.scales, HAS_HALVES ? x.half_sums : x.sums};
  TwoLevelTile<ROWS> tile(height);
  p += weights.first_group();
  for (int g = 0; g < weights.num_inputs / weights.group; g++) {
    prefetcher.advance();
    constexpr int AT_ONCE = ByteBlock<FORMAT>::AT_ONCE;
    const Parameters group(weights, p + weights.group * COLUMNS / AT_ONCE,
                           factors_of(weights, panel, g));
    tile.template add_group<FORMAT, IS_BIASED, HAS_HALVES>(p, inputs, weights.group, rows, group);
    p += weights.parameter_bytes();
    rows.begins += height;
    rows.sums += height;
    // Two groups of HALF_GROUP share the scale of their inputs.
    if (!HAS_HALVES || g % 2) rows.scales += height;
  }
  for (int m = 0; m < height; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, tile.results[m][v]);
}

#else

void pack_row_two_level(const float*, int, int, int, int, const native::PackedInputs&) {}

#endif

}  // namespace

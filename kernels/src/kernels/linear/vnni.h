// Products of quantized weights and integer inputs by VNNI, with the sums of a group in registers.
#pragma once

#include "kernels.h"
#include "kernels/linear/int_sums.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_VNNI)

/// Rows of one call: as many as fit in registers with the sums of a group.
constexpr int MAX_ROWS_INT = 6;
/// With 8 bits there are sums of INT8_GROUP inputs, scaled sums of a group, and results: of 8 rows and one
/// vector of columns, or of 4 rows and two, 24 of AVX-512's 32 registers.
constexpr int MAX_ROWS_INT8 = LANES == 16 ? 8 : MAX_ROWS_INT;
constexpr int vectors_at_once(int rows) { return LANES == 16 && rows > 4 ? 1 : VECTORS; }
template <typename Int>
constexpr int max_rows_int() {
  return sizeof(Int) == 1 ? MAX_ROWS_INT8 : MAX_ROWS_INT;
}
#define FOR_EACH_HEIGHT_INT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)

/// As multiply_int16, of groups of HALF_GROUP: two of them are scaled, and their sum by the inputs' scale.
template <native::Format FORMAT, int ROWS>
void multiply_halves_int16(const native::Panels& weights, const native::PackedInputs& x,
                           const uint8_t* p, const int32_t* begins, float* results,
                           Prefetcher prefetcher) {
  using Sums = IntSums<int16_t, FORMAT, ROWS>;
  constexpr int HALF = native::HALF_GROUP;
  const uint8_t *inputs = x.integers, *panel = p;
  p += weights.first_group();
  const bool is_biased = has_biases(weights);
  F32 scaled[ROWS][VECTORS];
  const auto add = [&]<bool IS_SECOND>(int g) __attribute__((always_inline)) {
    prefetcher.advance();
    Sums sums(begins + g * ROWS);
    sums.add_group(inputs, p, HALF);
    const Parameters group(weights, p, factors_of(weights, panel, g));
    p += weights.parameter_bytes();
    const float *scales = x.scales + g / 2 * ROWS, *half_sums = x.half_sums + g * ROWS;
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) {
        float* y = results + m * COLUMNS + v * LANES;
        const F32 before = IS_SECOND ? scaled[m][v] : F32{};
        scaled[m][v] = fused(sums.at(m, v), group.scales[v], before);
        if (is_biased) store(y, fused(splat(half_sums[m]), group.biases[v], load(y)));
        if (IS_SECOND) store(y, fused(scaled[m][v], splat(scales[m]), load(y)));
      }
  };
  for (int g = 0; g < weights.num_inputs / HALF; g += 2) {
    add.template operator()<false>(g);
    add.template operator()<true>(g + 1);
  }
}

/// Where groups of a panel and of a tile's inputs of 8 bits are.
struct GroupsInt8 {
  int group = 0;
  const uint8_t *p, *inputs, *shifts;
  const int32_t* begins;  // unless there are biases
  const float *scales, *sums;
};

/// Add the products of groups until `end` to a tile's results in COUNT vectors of columns, from `first`
/// on: the sums of INT8_GROUP inputs are scaled, and the sum of these by the scale of the group of
/// weights, of GROUP inputs if that is not 0.
template <native::Format FORMAT, bool IS_BIASED, int GROUP, int ROWS, int COUNT>
ALWAYS_INLINE void multiply_groups_int8(const native::Panels& weights, const uint8_t* panel,
                                        GroupsInt8& at, int end, int first, float* y,
                                        size_t ldy, Prefetcher& prefetcher) {
  using Sums = IntSums<int8_t, FORMAT, ROWS, COUNT>;
  F32 results[ROWS][COUNT];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < COUNT; v++)
      results[m][v] = at.group == 0 ? F32{} : load(y + m * ldy + (first + v) * LANES);
  for (; at.group < end; at.group++) {
    prefetcher.advance();
    F32 scaled[ROWS][COUNT] = {};
    const auto add = [&]() __attribute__((always_inline)) {
      // Without a center to subtract they begin with 0.
      Sums sums = IS_BIASED ? Sums() : Sums(at.begins);
      for (int i = 0; i < native::INT8_GROUP; i += EIGHT) {
        sums.add(at.inputs, at.p + 4 * LANES * first, at.shifts);
        at.inputs += Sums::INPUT_BYTES * ROWS;
        at.p += Sums::WEIGHT_BYTES;
        at.shifts += EIGHT;
      }
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < COUNT; v++)
          scaled[m][v] = fused(sums.at(m, v), splat(at.scales[m]), scaled[m][v]);
      if (!IS_BIASED) at.begins += ROWS;
      at.scales += ROWS;
    };
    const int size = GROUP ? GROUP : weights.group;
#pragma GCC unroll 2
    for (int i = 0; i < size; i += native::INT8_GROUP) add();
    const Parameters<COUNT> group(weights, at.p, factors_of(weights, panel, at.group), first);
    at.p += weights.parameter_bytes();
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < COUNT; v++) {
        F32& result = results[m][v];
        result = fused(scaled[m][v], group.scales[v], result);
        if (IS_BIASED) result = fused(splat(at.sums[m]), group.biases[v], result);
      }
    at.sums += ROWS;
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < COUNT; v++) store(y + m * ldy + (first + v) * LANES, results[m][v]);
}

/// Compute one tile of a panel of inputs of 8 bits.  With few vectors at a time, the others follow while
/// weights are in the L1 cache.
template <native::Format FORMAT, int GROUP, int ROWS>
void multiply_int8(const native::Panels& weights, const native::PackedInputs& x, const uint8_t* p,
                   const int32_t* begins, float* y, size_t ldy, Prefetcher prefetcher) {
  constexpr int COUNT = vectors_at_once(ROWS), INPUTS = 256;
  // It advances once for each of the vectors' groups.
  const bool prefetches = ROWS > 1 || native::PREFETCHES_ONE_ROW_INT8;
  prefetcher.part = prefetches ? prefetcher.part / (VECTORS / COUNT) : 0;
  const int num_groups = weights.num_inputs / weights.group;
  const int within = INPUTS > weights.group ? INPUTS / weights.group : 1;
  const int at_once = COUNT == VECTORS ? num_groups : within;
  GroupsInt8 at{0,      p + weights.first_group(), x.integers, weights.shifts,
                begins, x.scales,                  weights.has_halves() ? x.half_sums : x.sums};
  const auto multiply = [&]<bool IS_BIASED>() __attribute__((always_inline)) {
    while (at.group < num_groups) {
      const int end = num_groups - at.group < at_once ? num_groups : at.group + at_once;
      const GroupsInt8 begin = at;
      for (int first = 0; first < VECTORS; first += COUNT) {
        at = begin;
        multiply_groups_int8<FORMAT, IS_BIASED, GROUP, ROWS, COUNT>(
            weights, p, at, end, first, y, ldy, prefetcher);
      }
    }
  };
  has_biases(weights) ? multiply.template operator()<true>()
                      : multiply.template operator()<false>();
}

/// Groups of either size have a function of their own: in one, the compiler would not inline them.
template <typename Int, bool HAS_HALVES, native::Format FORMAT, int ROWS>
ALWAYS_INLINE void multiply_rows_int(const native::Panels& weights, const native::PackedInputs& x,
                                     const uint8_t* p, const int32_t* begins, float* y, size_t ldy,
                                     Prefetcher prefetcher) {
  if constexpr (sizeof(Int) == 1) {
    // The loop over the usual group has no branch.
    const auto multiply =
        weights.group == 32 ? multiply_int8<FORMAT, 32, ROWS> : multiply_int8<FORMAT, 0, ROWS>;
    multiply(weights, x, p, begins, y, ldy, prefetcher);
  } else {
    alignas(64) float results[ROWS * COLUMNS] = {};
    HAS_HALVES ? multiply_halves_int16<FORMAT, ROWS>(weights, x, p, begins, results, prefetcher)
               : multiply_int16<FORMAT, ROWS>(weights, x, p, begins, results, prefetcher);
    copy_rows(results, ROWS, y, ldy);
  }
}

/// Compute one tile of a panel, of up to max_rows_int<Int>() rows.
template <typename Int, bool HAS_HALVES, native::Format FORMAT>
void multiply_ints(const native::Panels& weights, const native::PackedInputs& x, const uint8_t* p,
                   const int32_t* begins, int height, float* y, size_t ldy, Prefetcher prefetcher) {
#define CASE(ROWS)                                                                              \
  case ROWS:                                                                                    \
    if constexpr (ROWS <= max_rows_int<Int>())                                                  \
      return multiply_rows_int<Int, HAS_HALVES, FORMAT, ROWS>(weights, x, p, begins, y, ldy,    \
                                                              prefetcher);                      \
    break;
  switch (height) { FOR_EACH_HEIGHT_INT(CASE) }
#undef CASE
}

#endif

}  // namespace

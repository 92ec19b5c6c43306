// Products of quantized weights and float inputs: the exact mode.
//
// The weights of a group are integers but for a scale and a bias, so that a group contributes
//     scale * sum((q - center) x) + (bias + center * scale) * sum(x)
// which is one operation a weight.  The center is the middle of the integers: the larger they are,
// the more of the sums would cancel.  Where the bias is -center * scale, its term is left out.
#pragma once

#include "kernels.h"
#include "kernels/microkernel.h"

namespace {

using native::Format;
using native::Panels;

/// What the scales multiply, of the low bits of each lane.
template <Format FORMAT>
ALWAYS_INLINE F32 code_of(I32 q, int center) {
  if constexpr (FORMAT == Format::kMxfp4) return to_float(mxfp4_code(q & 15));
  return to_float((FORMAT == Format::kBits4 ? q & 15 : q) - center);
}

/// Converts stored integers to floats.  Those of INPUTS successive inputs take a vector.
template <Format FORMAT>
struct Codes {
  static constexpr int INPUTS = has_nibbles(FORMAT) ? 4 : 2, BYTES = 2 * COLUMNS;
  static_assert(VECTORS == 2);
  int center;
#if defined(__AVX512F__)
  __m512 table;
  __m512i table16;  // the upper halves: the lower ones are 0
#endif

  ALWAYS_INLINE explicit Codes(const Panels& weights)
      : center(weights.center) {
#if defined(__AVX512F__)
    constexpr uint8_t NIBBLES[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    table = (__m512)code_of<FORMAT>(load_bytes(NIBBLES), center);
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)table, 16));
    table16 = _mm512_broadcast_i64x4(halves);
#endif
  }

  /// The codes of input `index` of those whose integers begin at `p`.
  ALWAYS_INLINE void load(const uint8_t* p, int index, F32 (&w)[VECTORS]) const {
    if constexpr (!has_nibbles(FORMAT)) {
      for (int v = 0; v < VECTORS; v++)
        w[v] = code_of<FORMAT>(load_bytes(p + index * COLUMNS + v * LANES), center);
      return;
    }
    const I32 words = *reinterpret_cast<const I32*>(p);
#if defined(__AVX512F__)
    // Each looks at the lowest bits of its lanes: of words, and of their upper halves.
    const auto shifted = (__m512i)(words >> 4 * index);
    w[0] = (F32)_mm512_permutexvar_ps(shifted, table);
    w[1] = (F32)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, shifted, table16);
#else
    for (int v = 0; v < VECTORS; v++)
      w[v] = code_of<FORMAT>(words >> (4 * index + 16 * v), center);
#endif
  }
};

/// Sums of a group in the columns of a panel, in the order of the inputs for any ROWS: no bit of a
/// row depends on the number of rows.
template <int ROWS>
struct FloatSums {
  F32 sums[ROWS][VECTORS];

  ALWAYS_INLINE FloatSums() {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) sums[m][v] = F32{};
  }
  /// Add the products of one input of each row.
  ALWAYS_INLINE void add(const float* x, const F32 (&w)[VECTORS]) {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) sums[m][v] = fused(splat(x[m]), w[v], sums[m][v]);
  }
  /// The same, for weights that are in registers only.
  ALWAYS_INLINE void add_converted(const float* x, const F32 (&w)[VECTORS]) {
    // The compiler would have too few registers for the sums of more rows.
    if constexpr (ROWS == MAX_ROWS) return add(x, w);
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) add_product(sums[m][v], w[v], x + m);
  }
};

/// The outputs of a tile in the columns of a panel.
template <int ROWS>
struct GroupedOutputs {
  F32 results[ROWS][VECTORS] = {};

  /// Add the scaled sums of a group; `x_sums` are those of each row's inputs.
  ALWAYS_INLINE void add(const FloatSums<ROWS>& of_group, const Panels& weights,
                         const uint8_t* parameters, const uint16_t* factors, const float* x_sums) {
    const Parameters group(weights, parameters, factors);
    F32 biases[VECTORS];
    for (int v = 0; v < VECTORS; v++)
      biases[v] = fused(group.scales[v], splat(weights.center), group.biases[v]);
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) {
        F32& result = results[m][v];
        result = fused(of_group.sums[m][v], group.scales[v], result);
        if (has_biases(weights)) result = fused(splat(x_sums[m]), biases[v], result);
      }
  }
  ALWAYS_INLINE void write(float* y, size_t ldy) const {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, results[m][v]);
  }
};

/// Call `use(i, codes)` for the inputs of a group.
template <Format FORMAT, typename Use>
ALWAYS_INLINE void for_codes(const Codes<FORMAT>& codes, const uint8_t* p, int group, Use use) {
  constexpr int INPUTS = Codes<FORMAT>::INPUTS;
  for (int i = 0; i < group; i += INPUTS, p += Codes<FORMAT>::BYTES) {
#pragma GCC unroll 4
    for (int index = 0; index < INPUTS; index++) {
      F32 w[VECTORS];
      codes.load(p, index, w);
      use(i + index, w);
    }
  }
}

/// Where groups of a panel are.
struct Groups {
  int size, count;
  size_t value_bytes, parameter_bytes, stride;

  ALWAYS_INLINE explicit Groups(const Panels& weights)
      : size(weights.group),
        count(weights.num_inputs / weights.group),
        value_bytes(static_cast<size_t>(size) * COLUMNS / (has_nibbles(weights.format) ? 2 : 1)),
        parameter_bytes(weights.parameter_bytes()),
        stride(value_bytes + parameter_bytes) {}
};

/// Inputs of a tile, and the sums of those that a group of weights is multiplied with.
struct GroupedInputs {
  const float* floats;  // [input][row]
  const float* sums;    // [group][row]
};

/// Compute the only tile, whose time is that of reading weights from memory if there are few rows:
/// they are prefetched line by line, as they are read.
template <Format FORMAT, int ROWS>
void multiply_groups(const Panels& weights, const GroupedInputs& x, const uint8_t* p, float* y,
                     size_t ldy) {
  constexpr int INPUTS = Codes<FORMAT>::INPUTS;
  const Groups groups(weights);
  const Codes<FORMAT> codes(weights);
  GroupedOutputs<ROWS> outputs;
  const uint8_t* next = p + weights.first_group();
  const float* inputs = x.floats;
  for (int g = 0; g < groups.count; g++) {
    FloatSums<ROWS> sums;
    for (int i = 0; i < groups.size; i += INPUTS, next += Codes<FORMAT>::BYTES) {
      prefetch(next + PREFETCH_DISTANCE);
#pragma GCC unroll 4
      for (int index = 0; index < INPUTS; index++, inputs += ROWS) {
        F32 w[VECTORS];
        codes.load(next, index, w);
        sums.add_converted(inputs, w);
      }
    }
    for (size_t i = 0; i < groups.parameter_bytes; i += 64) prefetch(next + PREFETCH_DISTANCE + i);
    outputs.add(sums, weights, next, factors_of(weights, p, g), x.sums + g * ROWS);
    next += groups.parameter_bytes;
  }
  outputs.write(y, ldy);
}

/// Compute one of several tiles, with the codes in `unpacked`, which the first tile fills.
///
/// A group is unpacked while the one before it is multiplied, so that neither waits for the other.
template <Format FORMAT, int ROWS, bool IS_FIRST>
void multiply_unpacked(const Panels& weights, const GroupedInputs& x, const uint8_t* p, float* y,
                       size_t ldy, Prefetcher prefetcher, float* unpacked) {
  const Groups groups(weights);
  const Codes<FORMAT> codes(weights);
  GroupedOutputs<ROWS> outputs;
  const uint8_t* values = p + weights.first_group();
  const float* inputs = x.floats;
  float* target = unpacked;
  const auto unpack = [&](int i, const F32(&w)[VECTORS]) __attribute__((always_inline)) {
    for (int v = 0; v < VECTORS; v++) store(target + i * COLUMNS + v * LANES, w[v]);
  };
  if (IS_FIRST) for_codes<FORMAT>(codes, values, groups.size, unpack);
  for (int g = 0; g < groups.count; g++) {
    prefetcher.advance();
    FloatSums<ROWS> sums;
    const auto multiply = [&](int i) __attribute__((always_inline)) {
      F32 w[VECTORS];
      for (int v = 0; v < VECTORS; v++) w[v] = load(unpacked + i * COLUMNS + v * LANES);
      sums.add(inputs + i * ROWS, w);
    };
    target = unpacked + groups.size * COLUMNS;
    if (IS_FIRST && g + 1 < groups.count)
      for_codes<FORMAT>(codes, values + groups.stride, groups.size,
                        [&](int i, const F32(&w)[VECTORS]) __attribute__((always_inline)) {
        unpack(i, w);
        multiply(i);
      });
    else
      for (int i = 0; i < groups.size; i++) multiply(i);
    outputs.add(sums, weights, values + groups.value_bytes, factors_of(weights, p, g),
                x.sums + g * ROWS);
    values += groups.stride;
    inputs += groups.size * ROWS;
    unpacked = target;
  }
  outputs.write(y, ldy);
}

/// Compute one tile of a panel.
template <Format FORMAT>
void linear_tile_groups(const native::LinearArgs& args, int tile, const uint8_t* p, float* y,
                        size_t ldy, Prefetcher prefetcher, float* unpacked) {
  const native::Tiles tiles{args.num_rows, MAX_ROWS};
  const Panels& w = args.weights;
  const size_t first = tiles.first(tile);
  const GroupedInputs x{args.packed.floats + first * w.num_inputs,
                        (w.has_halves() ? args.packed.half_sums : args.packed.sums) +
                            first * (w.num_inputs / w.group)};
#define CASE(ROWS)                                                                          \
  case ROWS:                                                                                \
    if (tiles.count() == 1) return multiply_groups<FORMAT, ROWS>(w, x, p, y, ldy);          \
    if (tile == 0)                                                                          \
      return multiply_unpacked<FORMAT, ROWS, true>(w, x, p, y, ldy, prefetcher, unpacked);  \
    return multiply_unpacked<FORMAT, ROWS, false>(w, x, p, y, ldy, prefetcher, unpacked);
  switch (tiles.height(tile)) { FOR_EACH_HEIGHT(CASE) }
#undef CASE
}

}  // namespace

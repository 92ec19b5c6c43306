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
using native::ParameterType;

/// Panels that few rows are multiplied with at a time: one alone would wait for its own sums.
constexpr int PAIR = 2;
constexpr int MAX_ROWS_OF_PAIR = 2;

/// What the scales multiply, of the low bits of each lane.
template <Format FORMAT>
ALWAYS_INLINE F32 code_of(I32 q, int center) {
  if constexpr (FORMAT == Format::kMxfp4) return to_float(mxfp4_code(q & 15));
  return to_float((FORMAT == Format::kBits4 ? q & 15 : q) - center);
}

/// Converts stored integers to floats.
template <Format FORMAT>
struct Codes {
  static constexpr int PER_BYTE = has_nibbles(FORMAT) ? 2 : 1;
  int center;
#if defined(__AVX512F__)
  __m512 table;
#endif

  ALWAYS_INLINE explicit Codes(const Panels& weights)
      : center(weights.center) {
#if defined(__AVX512F__)
    constexpr uint8_t NIBBLES[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    table = (__m512)code_of<FORMAT>(load_bytes(NIBBLES), center);
#endif
  }

  /// The first or the second weight of each byte.
  ALWAYS_INLINE F32 at(int index, I32 bytes) const {
    const I32 q = index == 0 ? bytes : bytes >> 4;
#if defined(__AVX512F__)
    if constexpr (PER_BYTE == 2) return (F32)_mm512_permutexvar_ps((__m512i)q, table);
#endif
    return code_of<FORMAT>(q, center);
  }
};

/// The outputs of a tile in the columns of some panels.  Sums are in the order of the inputs for any
/// ROWS: no bit of a row depends on the number of rows.
template <int ROWS, int PANELS>
struct GroupedOutputs {
  static constexpr int SIZE = PANELS * VECTORS;
  F32 results[ROWS][SIZE] = {};
  F32 sums[ROWS][SIZE];  // of a group

  ALWAYS_INLINE void begin() {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < SIZE; v++) sums[m][v] = F32{};
  }
  /// Add the products of one input of each row.
  ALWAYS_INLINE void add(const float* x, const F32 (&w)[SIZE]) {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < SIZE; v++) sums[m][v] += splat(x[m]) * w[v];
  }
  /// Add the scaled sums of group `g`; `x_sums` are those of each row's inputs.
  ALWAYS_INLINE void finish(const Panels& weights, const uint8_t* first, int g,
                            const uint8_t* parameters, const float* x_sums) {
    for (int panel = 0; panel < PANELS; panel++) {
      const size_t at = panel * weights.panel_bytes();
      const Parameters group(weights, parameters + at, factors_of(weights, first + at, g));
      F32 biases[VECTORS];
      for (int v = 0; v < VECTORS; v++)
        biases[v] = fused(group.scales[v], splat(weights.center), group.biases[v]);
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++) {
          F32& result = results[m][panel * VECTORS + v];
          result = fused(sums[m][panel * VECTORS + v], group.scales[v], result);
          if (has_biases(weights)) result = fused(splat(x_sums[m]), biases[v], result);
        }
    }
  }
  ALWAYS_INLINE void write(float* y, size_t ldy) const {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < SIZE; v++) store(y + m * ldy + v * LANES, results[m][v]);
  }
};

/// Call `use(i, codes)` for the inputs of a group, with the codes of the columns of PANELS panels.
template <Format FORMAT, int PANELS, typename Use>
ALWAYS_INLINE void for_codes(const Codes<FORMAT>& codes, const uint8_t* p, size_t panel_bytes,
                             int group, Use use) {
  constexpr int SIZE = PANELS * VECTORS, PER_BYTE = Codes<FORMAT>::PER_BYTE;
  for (int i = 0; i < group; i += PER_BYTE, p += COLUMNS) {
    I32 bytes[SIZE];
    for (int v = 0; v < SIZE; v++)
      bytes[v] = load_bytes(p + v / VECTORS * panel_bytes + v % VECTORS * LANES);
    for (int index = 0; index < PER_BYTE; index++) {
      F32 w[SIZE];
      for (int v = 0; v < SIZE; v++) w[v] = codes.at(index, bytes[v]);
      use(i + index, w);
    }
  }
}

/// Where groups of a panel are.
struct Groups {
  int size, count;
  size_t value_bytes, stride;

  ALWAYS_INLINE explicit Groups(const Panels& weights)
      : size(weights.group),
        count(weights.num_inputs / weights.group),
        value_bytes(static_cast<size_t>(size) * COLUMNS / (has_nibbles(weights.format) ? 2 : 1)),
        stride(value_bytes + weights.parameter_bytes()) {}
};

/// Inputs of a tile, and the sums of those that a group of weights is multiplied with.
struct GroupedInputs {
  const float* floats;  // [input][row]
  const float* sums;    // [group][row]
};

/// Compute one tile.
template <Format FORMAT, int ROWS, int PANELS>
void multiply_groups(const Panels& weights, const GroupedInputs& x, const uint8_t* p, float* y,
                     size_t ldy, Prefetcher prefetcher) {
  const Groups groups(weights);
  const size_t panel_bytes = weights.panel_bytes();
  const Codes<FORMAT> codes(weights);
  Prefetcher second{prefetcher.next + panel_bytes, prefetcher.part};
  GroupedOutputs<ROWS, PANELS> outputs;
  const float* inputs = x.floats;
  const uint8_t* panel = p;
  p += weights.first_group();
  for (int g = 0; g < groups.count; g++, p += groups.stride, inputs += groups.size * ROWS) {
    prefetcher.advance();
    if (PANELS == PAIR) second.advance();
    outputs.begin();
    for_codes<FORMAT, PANELS>(codes, p, panel_bytes, groups.size,
                              [&](int i, const F32(&w)[PANELS * VECTORS])
                                  __attribute__((always_inline)) {
      outputs.add(inputs + i * ROWS, w);
    });
    outputs.finish(weights, panel, g, p + groups.value_bytes, x.sums + g * ROWS);
  }
  outputs.write(y, ldy);
}

/// The same for one of several tiles, with the codes in `unpacked`, which the first tile fills.
///
/// A group is unpacked while the one before it is multiplied, so that neither waits for the other.
template <Format FORMAT, int ROWS, bool IS_FIRST>
void multiply_unpacked(const Panels& weights, const GroupedInputs& x, const uint8_t* p, float* y,
                       size_t ldy, Prefetcher prefetcher, float* unpacked) {
  const Groups groups(weights);
  const Codes<FORMAT> codes(weights);
  GroupedOutputs<ROWS, 1> outputs;
  const uint8_t* panel = p;
  p += weights.first_group();
  const float* inputs = x.floats;
  float* target = unpacked;
  const auto unpack = [&](int i, const F32(&w)[VECTORS]) __attribute__((always_inline)) {
    for (int v = 0; v < VECTORS; v++) store(target + i * COLUMNS + v * LANES, w[v]);
  };
  const auto multiply = [&](int i) __attribute__((always_inline)) {
    F32 w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = load(unpacked + i * COLUMNS + v * LANES);
    outputs.add(inputs + i * ROWS, w);
  };
  if (IS_FIRST) for_codes<FORMAT, 1>(codes, p, 0, groups.size, unpack);
  for (int g = 0; g < groups.count; g++) {
    prefetcher.advance();
    outputs.begin();
    target = unpacked + groups.size * COLUMNS;
    if (IS_FIRST && g + 1 < groups.count)
      for_codes<FORMAT, 1>(codes, p + groups.stride, 0, groups.size,
                           [&](int i, const F32(&w)[VECTORS]) __attribute__((always_inline)) {
        unpack(i, w);
        multiply(i);
      });
    else
      for (int i = 0; i < groups.size; i++) multiply(i);
    outputs.finish(weights, panel, g, p + groups.value_bytes, x.sums + g * ROWS);
    p += groups.stride;
    inputs += groups.size * ROWS;
    unpacked = target;
  }
  outputs.write(y, ldy);
}

/// Compute one tile of one or two panels.
template <Format FORMAT>
void linear_tile_groups(const native::LinearArgs& args, int tile, int num_panels, const uint8_t* p,
                        float* y, size_t ldy, Prefetcher prefetcher, float* unpacked) {
  const native::Tiles tiles{args.num_rows, MAX_ROWS};
  const Panels& w = args.weights;
  const size_t first = tiles.first(tile);
  const GroupedInputs x{args.packed.floats + first * w.num_inputs,
                        (w.has_halves() ? args.packed.half_sums : args.packed.sums) +
                            first * (w.num_inputs / w.group)};
#define CASE(ROWS)                                                                              \
  case ROWS:                                                                                    \
    if constexpr (ROWS <= MAX_ROWS_OF_PAIR)                                                     \
      if (num_panels == PAIR)                                                                   \
        return multiply_groups<FORMAT, ROWS, PAIR>(w, x, p, y, ldy, prefetcher);                \
    if (tiles.count() == 1)                                                                     \
      return multiply_groups<FORMAT, ROWS, 1>(w, x, p, y, ldy, prefetcher);                     \
    if (tile == 0)                                                                              \
      return multiply_unpacked<FORMAT, ROWS, true>(w, x, p, y, ldy, prefetcher, unpacked);      \
    return multiply_unpacked<FORMAT, ROWS, false>(w, x, p, y, ldy, prefetcher, unpacked);
  switch (tiles.height(tile)) { FOR_EACH_HEIGHT(CASE) }
#undef CASE
}

}  // namespace

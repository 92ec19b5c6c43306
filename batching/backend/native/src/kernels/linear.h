// y = x W^T + b, one panel of outputs at a time.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "kernels/linear_int.h"
#include "kernels/microkernel.h"

namespace {

using native::Format;
using native::InputType;
using native::LinearArgs;
using native::Panels;
using native::Tiles;

/// Inputs between two prefetches, for formats without groups.
constexpr int FLOAT_GROUP = 32;

ALWAYS_INLINE int group_of(const Panels& weights) {
  return weights.group ? weights.group : FLOAT_GROUP;
}

/// What to prefetch, group by group, while a tile of a panel is computed: the panel itself for the
/// first tile, the next panel for the others.
ALWAYS_INLINE Prefetcher prefetcher_for(const Panels& weights, const uint8_t* panel, int tile,
                                        int num_tiles) {
  const int group = group_of(weights), num_groups = (weights.num_inputs + group - 1) / group;
  const size_t size = weights.panel_bytes();
  if (tile == 0) return {panel + PREFETCH_DISTANCE, size / num_groups};
  const size_t part = (size / num_groups / (num_tiles - 1) + 63) / 64 * 64;
  return {panel + size + (tile - 1) * part * num_groups, part};
}

/// The number that a scale multiplies, of the low bits of each lane.
template <Format FORMAT>
ALWAYS_INLINE F32 code_of(I32 q) {
  if constexpr (FORMAT == Format::kMxfp4) return mxfp4_codes(q);
  return to_float(FORMAT == Format::kBits4 ? q & 15 : q);
}

/// Call `use(i, weights)` for the inputs of a group, with the weights of a panel's columns; return
/// the start of the next group.
template <Format FORMAT, typename Use>
ALWAYS_INLINE const uint8_t* for_group(const Panels& weights, const uint8_t* p, int size,
                                       Prefetcher& prefetcher, Use use) {
  F32 w[VECTORS];
  prefetcher.advance();
  if constexpr (FORMAT == Format::kFloat32 || FORMAT == Format::kBfloat16) {
    using Float = std::conditional_t<FORMAT == Format::kFloat32, float, uint16_t>;
    const Float* values = reinterpret_cast<const Float*>(p);
    for (int i = 0; i < size; i++, values += COLUMNS) {
      for (int v = 0; v < VECTORS; v++) w[v] = load(values + v * LANES);
      use(i, w);
    }
    return reinterpret_cast<const uint8_t*>(values);
  }
  constexpr int PER_BYTE = has_nibbles(FORMAT) ? 2 : 1;
  const size_t num_bytes = static_cast<size_t>(size) * COLUMNS / PER_BYTE;
  const Parameters group(weights, p + num_bytes);
  const auto unpack = [&](int v, I32 q) __attribute__((always_inline)) {
    return code_of<FORMAT>(q) * group.scales[v] + group.biases[v];
  };
  for (int i = 0; i < size; i += PER_BYTE, p += COLUMNS) {
    I32 q[VECTORS];
    for (int v = 0; v < VECTORS; v++) q[v] = load_bytes(p + v * LANES);
    for (int v = 0; v < VECTORS; v++) w[v] = unpack(v, q[v]);
    use(i, w);
    if constexpr (PER_BYTE == 2) {
      for (int v = 0; v < VECTORS; v++) w[v] = unpack(v, q[v] >> 4);
      use(i + 1, w);
    }
  }
  return p + weights.parameter_bytes();
}

/// The outputs of a tile in the columns of a panel, in registers.
///
/// Sums are in the order of the inputs for any ROWS: no bit of a row depends on the number of rows.
template <int ROWS>
struct Outputs {
  F32 sums[ROWS][VECTORS] = {};

  /// Add the products of one input of each row.
  ALWAYS_INLINE void add(const float* x, const F32 (&w)[VECTORS]) {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) sums[m][v] += splat(x[m]) * w[v];
  }
  ALWAYS_INLINE void write(float* y, size_t ldy) const {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, sums[m][v]);
  }
};

/// Compute one tile of inputs `x[input][row]`.
template <Format FORMAT, int ROWS>
void multiply_panel(const Panels& weights, const float* x, const uint8_t* p, float* y, size_t ldy,
                    Prefetcher prefetcher) {
  Outputs<ROWS> outputs;
  const int group = group_of(weights);
  for (int first = 0; first < weights.num_inputs; first += group) {
    const int left = weights.num_inputs - first;
    p = for_group<FORMAT>(weights, p, left < group ? left : group, prefetcher,
                                 [&](int i, const F32(&w)[VECTORS])
                                     __attribute__((always_inline)) {
      outputs.add(x + i * ROWS, w);
    });
    x += group * ROWS;
  }
  outputs.write(y, ldy);
}

/// The same, storing the dequantized weights in `unpacked` for other tiles.
///
/// A group is unpacked while the one before it is multiplied, so that neither waits for the other.
template <Format FORMAT, int ROWS>
void multiply_unpacking(const Panels& weights, const float* x, const uint8_t* p, float* y,
                        size_t ldy, Prefetcher prefetcher, float* unpacked) {
  Outputs<ROWS> outputs;
  const int group = weights.group;
  float* target = unpacked;
  const auto unpack = [&](int i, const F32(&w)[VECTORS]) __attribute__((always_inline)) {
    for (int v = 0; v < VECTORS; v++) store(target + i * COLUMNS + v * LANES, w[v]);
  };
  const auto multiply = [&](int i) __attribute__((always_inline)) {
    F32 w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = load(unpacked + i * COLUMNS + v * LANES);
    outputs.add(x + i * ROWS, w);
  };
  p = for_group<FORMAT>(weights, p, group, prefetcher, unpack);
  for (int first = group; first < weights.num_inputs; first += group) {
    target = unpacked + group * COLUMNS;
    p = for_group<FORMAT>(weights, p, group, prefetcher,
                                  [&](int i, const F32(&w)[VECTORS])
                                      __attribute__((always_inline)) {
      unpack(i, w);
      multiply(i);
    });
    unpacked = target;
    x += group * ROWS;
  }
  for (int i = 0; i < group; i++) multiply(i);
  outputs.write(y, ldy);
}

/// Compute one tile of a panel; the first tile fills `unpacked` for the others.
template <Format FORMAT>
void linear_tile(const LinearArgs& args, int tile, const uint8_t* p, float* y, size_t ldy,
                 Prefetcher prefetcher, float* unpacked) {
  const Tiles tiles{args.num_rows, MAX_ROWS};
  const Panels& w = args.weights;
  const float* x = args.packed.floats + static_cast<size_t>(tiles.first(tile)) * w.num_inputs;
  const auto* again = reinterpret_cast<const uint8_t*>(unpacked);
#define CASE(ROWS)                                                                              \
  case ROWS:                                                                                    \
    if constexpr (is_quantized(FORMAT)) {                                                               \
      if (tile > 0)                                                                             \
        return multiply_panel<Format::kFloat32, ROWS>(w, x, again, y, ldy, prefetcher);         \
      if (tiles.count() > 1)                                                          \
        return multiply_unpacking<FORMAT, ROWS>(w, x, p, y, ldy, prefetcher, unpacked); \
    }                                                                                           \
    return multiply_panel<FORMAT, ROWS>(w, x, p, y, ldy, prefetcher);
  switch (tiles.height(tile)) { FOR_EACH_HEIGHT(CASE) }
#undef CASE
}

Tiles tiles_of(const LinearArgs& args) {
  const bool has_floats = args.weights.input_type == InputType::kFloat32;
  return {args.num_rows, has_floats ? MAX_ROWS : MAX_ROWS_INT};
}

using LinearTile = decltype(&linear_tile<Format::kFloat32>);

LinearTile linear_tile_of(const Panels& weights) {
  if (weights.input_type == InputType::kInt16) return linear_tile_int<int16_t>;
  if (weights.input_type == InputType::kInt8) return linear_tile_int<int8_t>;
  switch (weights.format) {
    case Format::kFloat32: return linear_tile<Format::kFloat32>;
    case Format::kBfloat16: return linear_tile<Format::kBfloat16>;
    case Format::kBits8: return linear_tile<Format::kBits8>;
    case Format::kBits4: return linear_tile<Format::kBits4>;
    case Format::kMxfp4: return linear_tile<Format::kMxfp4>;
  }
  return nullptr;
}

/// Add bias and residual, and write the outputs of a panel.
void finish_panel(const LinearArgs& args, int first_column, int first_row, int rows,
                  const float* y, size_t ldy, float* target) {
  const size_t num_outputs = args.weights.num_outputs;
  const int left = args.weights.num_outputs - first_column;
  const int width = left < COLUMNS ? left : COLUMNS;
  for (int m = 0; m < rows; m++) {
    const float* residual =
        args.residual ? args.residual + (first_row + m) * num_outputs + first_column : nullptr;
    int j = 0;
    for (; j + LANES <= width; j += LANES) {
      F32 values = load(y + m * ldy + j);
      if (args.bias) values += load(args.bias + first_column + j);
      if (residual) values += load(residual + j);
      store(target + m * num_outputs + j, values);
    }
    for (; j < width; j++) {
      float value = y[m * ldy + j];
      if (args.bias) value += args.bias[first_column + j];
      if (residual) value += residual[j];
      target[m * num_outputs + j] = value;
    }
  }
}

void linear(const LinearArgs& args, int panel, float* scratch) {
  const Panels& weights = args.weights;
  const LinearTile linear_tile = linear_tile_of(weights);
  const Tiles tiles = tiles_of(args);
  const uint8_t* p = weights.data + panel * weights.panel_bytes();
  const int first_column = panel * COLUMNS;
  // The last panel may have more columns than remaining outputs.
  const bool is_whole = weights.num_outputs - first_column >= COLUMNS;
  const size_t ldy = is_whole ? weights.num_outputs : COLUMNS;
  float edge[MAX_ROWS * COLUMNS];
  for (int tile = 0; tile < tiles.count(); tile++) {
    const int first_row = tiles.first(tile);
    float* target = args.y + static_cast<size_t>(first_row) * weights.num_outputs + first_column;
    float* y = is_whole ? target : edge;
    const Prefetcher prefetcher = prefetcher_for(weights, p, tile, tiles.count());
    linear_tile(args, tile, p, y, ldy, prefetcher, scratch);
    if (is_whole && !args.bias && !args.residual) continue;
    finish_panel(args, first_column, first_row, tiles.height(tile), y, ldy, target);
  }
}

void argmax(const LinearArgs& args, int panel, float* scratch, native::ArgMax* rows) {
  const Panels& weights = args.weights;
  const LinearTile linear_tile = linear_tile_of(weights);
  const Tiles tiles = tiles_of(args);
  const uint8_t* p = weights.data + panel * weights.panel_bytes();
  const int first_column = panel * COLUMNS;
  const int left = weights.num_outputs - first_column;
  const int width = left < COLUMNS ? left : COLUMNS;
  float outputs[MAX_ROWS * COLUMNS];
  for (int tile = 0; tile < tiles.count(); tile++) {
    const Prefetcher prefetcher = prefetcher_for(weights, p, tile, tiles.count());
    linear_tile(args, tile, p, outputs, COLUMNS, prefetcher, scratch);
    for (int m = 0; m < tiles.height(tile); m++) {
      float* y = outputs + m * COLUMNS;
      for (int j = 0; args.bias && j < width; j++) y[j] += args.bias[first_column + j];
      native::ArgMax& row = rows[tiles.first(tile) + m];
      const F32 before = splat(row.value);
      I32 is_not_more{};
      for (int v = 0; v < VECTORS; v++) is_not_more |= ~(I32)(load(y + v * LANES) <= before);
      if (!any(is_not_more)) continue;
      for (int j = 0; j < width; j++) row.update(y[j], first_column + j);
    }
  }
}

void pack_row(const float* x, int row, int height, int size, float* floats) {
  for (int i = 0; i < size; i++) floats[i * height + row] = x[i];
}

}  // namespace

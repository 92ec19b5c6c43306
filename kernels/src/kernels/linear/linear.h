// y = x W^T + b, one panel of outputs at a time.
#pragma once

#include "kernels.h"
#include "kernels/linear/amx.h"
#include "kernels/linear/int_tiles.h"
#include "kernels/microkernel.h"
#include "kernels/parts.h"

namespace {

using native::InputType;
using native::LinearArgs;
using native::Panels;
using native::Tiles;
using native::NATIVE_ISA::LinearTile;

ALWAYS_INLINE int group_of(const Panels& weights) {
  return weights.group ? weights.group : FLOAT_GROUP;
}

/// What to prefetch, group by group, while a tile of a panel is computed: the panel itself for the
/// first tile, the next panel for the others.
ALWAYS_INLINE Prefetcher prefetcher_for(const Panels& weights, const uint8_t* panel, int tile,
                                        int num_tiles) {
  const int group = group_of(weights), num_groups = (weights.num_inputs + group - 1) / group;
  const size_t size = weights.panel_bytes();
  const bool has_floats = weights.input_type == InputType::kFloat32;
  const size_t distance = has_floats ? PREFETCH_DISTANCE : PREFETCH_DISTANCE_INT;
  if (tile == 0) return {panel + weights.first_group() + distance, size / num_groups};
  const size_t part = (size / num_groups / (num_tiles - 1) + 63) / 64 * 64;
  return {panel + size + (tile - 1) * part * num_groups, part};
}

int max_tile_rows(const Panels& weights) {
  switch (weights.input_type) {
    case InputType::kFloat32: return MAX_ROWS;
    case InputType::kBfloat16: return max_rows_amx(weights);
    case InputType::kInt8: return max_rows_int<int8_t>();
    default: return max_rows_int<int16_t>();
  }
}

Tiles tiles_of(const LinearArgs& args) { return {args.num_rows, max_tile_rows(args.weights)}; }

LinearTile linear_tile_of(const Panels& weights) {
  switch (weights.input_type) {
    case InputType::kInt16: return native::NATIVE_ISA::int16_tile(weights);
    case InputType::kInt8: return native::NATIVE_ISA::int8_tile(weights);
    default: return native::NATIVE_ISA::float_tile(weights);
  }
}

/// Add bias and residual, and write the outputs of some columns.
void finish_columns(const LinearArgs& args, int first_column, int width, int first_row, int rows,
                    const float* y, size_t ldy, float* target) {
  const size_t num_outputs = args.weights.num_outputs;
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

/// The outputs of a panel: the last one may have fewer than columns.
ALWAYS_INLINE int width_of(const Panels& weights, int panel) {
  const int left = weights.num_outputs - panel * COLUMNS;
  return left < COLUMNS ? left : COLUMNS;
}

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int MAX_TILE_ROWS = larger(larger(MAX_ROWS, MAX_ROWS_AMX),
                                     larger(max_rows_int<int8_t>(), max_rows_int<int16_t>()));

/// Compute tiles [first_tile, next_tile) of the panels [panel, next); only the first of all tiles
/// reads weights from memory.
void linear_tiles(const LinearArgs& args, int panel, int next, int first_tile, int next_tile,
                  float* scratch) {
  const Panels& weights = args.weights;
  const LinearTile linear_tile = linear_tile_of(weights);
  const Tiles tiles = tiles_of(args);
  alignas(64) float edge[MAX_TILE_ROWS * COLUMNS];
  for (; panel < next; panel++) {
    const uint8_t* p = weights.data + panel * weights.panel_bytes();
    const int first_column = panel * COLUMNS, width = width_of(weights, panel);
    const bool is_whole = width == COLUMNS;
    const size_t ldy = is_whole ? weights.num_outputs : COLUMNS;
    for (int tile = first_tile; tile < next_tile; tile++) {
      const int first_row = tiles.first(tile);
      float* target = args.y + static_cast<size_t>(first_row) * weights.num_outputs + first_column;
      float* y = is_whole ? target : edge;
      const Prefetcher prefetcher =
          prefetcher_for(weights, p, tile - first_tile, next_tile - first_tile);
      linear_tile(args, tile, p, y, ldy, prefetcher, scratch);
      if (is_whole && !args.bias && !args.residual) continue;
      finish_columns(args, first_column, width, first_row, tiles.height(tile), y, ldy, target);
    }
  }
}

/// Compute what tiles of several panels read.
void prepare_tiles(const LinearArgs& args, float* scratch) {
  const InputType type = args.weights.input_type;
  // With biases and 8 bits sums begin with 0.
  if (type == InputType::kInt16 || (type == InputType::kInt8 && !has_biases(args.weights)))
    begin_sums(args, reinterpret_cast<int32_t*>(scratch));
}

void linear(const LinearArgs& args, int panel, int next, float* scratch) {
  const int num_tiles = tiles_of(args).count();
  prepare_tiles(args, scratch);
  if (args.weights.input_type != InputType::kBfloat16)
    return linear_tiles(args, panel, next, 0, num_tiles, scratch);
  // Inputs of a tile take longer to read again than the weights of the panels.
  const MatrixUnit unit(tiles_of(args).height(0));
  for (int tile = 0; tile < num_tiles; tile++)
    linear_tiles(args, panel, next, tile, tile + 1, scratch);
}

void argmax(const LinearArgs& args, int panel, int next, float* scratch, native::ArgMax* rows) {
  const Panels& weights = args.weights;
  const LinearTile linear_tile = linear_tile_of(weights);
  const Tiles tiles = tiles_of(args);
  const MatrixUnit unit(weights.input_type == InputType::kBfloat16 ? tiles.height(0) : 0);
  prepare_tiles(args, scratch);
  alignas(64) float outputs[MAX_TILE_ROWS * COLUMNS];
  for (; panel < next; panel++) {
    const uint8_t* p = weights.data + panel * weights.panel_bytes();
    const int first_column = panel * COLUMNS, width = width_of(weights, panel);
    for (int tile = 0; tile < tiles.count(); tile++) {
      const Prefetcher prefetcher = prefetcher_for(weights, p, tile, tiles.count());
      linear_tile(args, tile, p, outputs, COLUMNS, prefetcher, scratch);
      for (int m = 0; m < tiles.height(tile); m++) {
        float* y = outputs + m * COLUMNS;
        for (int j = 0; args.bias && j < width; j++) y[j] += args.bias[first_column + j];
        native::ArgMax& row = rows[tiles.first(tile) + m];
        const F32 before = splat(row.value);
        I32 is_not_more{};
        for (int j = 0; j < COLUMNS; j += LANES) is_not_more |= ~(I32)(load(y + j) <= before);
        if (!any(is_not_more)) continue;
        for (int j = 0; j < width; j++) row.update(y[j], first_column + j);
      }
    }
  }
}

/// Set the sums of groups of a row, `[size / group][height]`.
ALWAYS_INLINE void sum_groups(const float* x, int row, int height, int size, int group,
                              float* sums) {
  for (int g = 0; g < size / group; g++) {
    F32 total{};
    for (int i = 0; i < group; i += LANES) total += load(x + g * group + i);
    sums[g * height + row] = sum(total);
  }
}

void pack_row(const float* x, int row, int height, int size, int group,
              const native::PackedInputs& to) {
  for (int i = 0; i < size; i++) to.floats[i * height + row] = x[i];
  if (group == 0) return;
  sum_groups(x, row, height, size, group, to.sums);
  if (to.half_sums) sum_groups(x, row, height, size, native::HALF_GROUP, to.half_sums);
}

}  // namespace

#include "operations/linear.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "memory.h"
#include "operations/parts.h"

namespace native {

namespace {

float* scratch(size_t size) {
  thread_local std::vector<float> memory;
  return grow(memory, size);
}

/// What the kernels want for a product, in floats.
size_t scratch_size(const LinearArgs& product) {
  static_assert(INT8_GROUP >= HALF_GROUP);
  const int rows = (product.num_rows + HALF_GROUP - 1) / HALF_GROUP;
  return static_cast<size_t>(std::max(kernels()->columns, rows)) * product.weights.num_inputs;
}

/// Call `run(product, panel, next, scratch, part)` for ranges of panels.
template <typename Run>
void for_panels(const Parts& parts, const Run& run) {
  threads().for_each(parts.count(), [&](int part) {
    parts.for_each(part, [&](const LinearArgs& product, int panel, int next) {
      run(product, panel, next, scratch(scratch_size(product)), part);
    });
  });
}

void nothing_to_prepare(int, int) {}

}  // namespace

InputPacker::InputPacker(const Panels& weights, int num_rows, bool has_halves)
    : weights_(weights), num_rows_(num_rows) {
  // Other threads write to them.
  thread_local std::vector<float> floats, scales, sums, half_sums;
  thread_local std::vector<uint8_t> integers;
  thread_local std::vector<int32_t> totals, half_totals;
  const size_t total = num_rows * static_cast<size_t>(weights.num_inputs);
  if (weights.input_type == InputType::kBfloat16) {
    all_.integers = grow(integers, 2 * total + UNIT_OVERREAD);
    input_factor_ = std::ldexp(1.0f, BFLOAT16_EXPONENT - weights.exponent);
    return;
  }
  if (weights.input_type == InputType::kFloat32) {
    all_.floats = grow(floats, total);
  } else {
    all_.integers = grow(integers, weights.integer_bytes(total));
    all_.scales = grow(scales, total / weights.scale_group());
    all_.totals = grow(totals, total / weights.scale_group());
  }
  if (weights.group) all_.sums = grow(sums, total / weights.input_group());
  if (!has_halves && !weights.has_halves()) return;
  all_.half_sums = grow(half_sums, total / HALF_GROUP);
  all_.half_totals = grow(half_totals, total / HALF_GROUP);
}

int InputPacker::rows_per_part() const {
  const int num_threads = threads().num_threads();
  // Rows of a tile are interleaved: two threads should not write to the same cache lines.
  return std::clamp((num_rows_ + num_threads - 1) / num_threads, 1, 2 * ROWS_PER_PART);
}

PackedInputs InputPacker::packed(const RowRange& rows) const {
  return all_.from_row(weights_, rows.first);
}

void InputPacker::pack(const float* x, const RowRange& rows, int row) const {
  const Kernels& k = *kernels();
  const int size = weights_.num_inputs, group = weights_.input_group();
  const Tiles tiles{rows.num_rows, k.max_tile_rows(weights_)};
  const int own = row - rows.first, tile = tiles.of(own), height = tiles.height(tile);
  const PackedInputs to = packed({rows.first + tiles.first(tile), height});
  const int m = own - tiles.first(tile);
  switch (weights_.input_type) {
    case InputType::kFloat32: return k.pack_row(x, m, height, size, group, to);
    case InputType::kInt16: return k.pack_row_int16(x, m, height, size, group, to);
    case InputType::kInt8: return k.pack_row_int8(x, weights_.shifts, m, height, size, group, to);
    case InputType::kBfloat16: return k.pack_row_bf16(x, input_factor_, m, height, size, to);
  }
}

void multiply_packed(const std::vector<LinearArgs>& products) {
  for_panels(Parts(products, kernels()->max_tile_rows(products[0].weights)),
             [](const LinearArgs& product, int panel, int next, float* scratch, int) {
               kernels()->linear(product, panel, next, scratch);
               if (product.deltas) product.deltas->add(product, panel, next);
             });
}

void multiply(std::vector<LinearArgs> products, const AdaptedRows* adapted) {
  multiply(std::move(products), adapted, nothing_to_prepare);
}

void arg_max(const LinearArgs& product, uint32_t* indices, float* values) {
  std::vector<LinearArgs> products{product};
  pack_input(products, nothing_to_prepare);
  const size_t num_rows = product.num_rows;
  // Parts have rows of their own in `partials`, and there are enough panels.
  const Parts parts(products, NO_TILES);
  std::vector<ArgMax> partials(parts.count() * num_rows);
  for_panels(parts, [&](const LinearArgs& p, int panel, int next, float* scratch, int part) {
    kernels()->argmax(p, panel, next, scratch, partials.data() + part * num_rows);
  });
  for (size_t m = 0; m < num_rows; m++) {
    ArgMax row;
    for (size_t at = m; at < partials.size(); at += num_rows)
      row.update(partials[at].value, partials[at].index);
    indices[m] = row.index;
    values[m] = row.value;
  }
}

void embed(const PackedWeights& weights, const int32_t* tokens, int num_rows, float* y) {
  const Panels& panels = weights.panels();
  for_rows(num_rows, ROWS_PER_PART, [&](int first, int next) {
    for (int m = first; m < next; m++) {
      // As in MLX, an index out of range is no error; it must not read out of bounds.
      const int token = std::clamp(tokens[m], 0, panels.num_outputs - 1);
      weights.unpack(token, y + static_cast<size_t>(m) * panels.num_inputs);
    }
  });
}

}  // namespace native

#include "operations/linear.h"

#include <utility>

#include "memory.h"

namespace native {

namespace {

// More parts would balance threads better, but claiming one takes longer than computing a small
// one.
constexpr int PARTS_PER_THREAD = 3;

float* scratch(size_t size) {
  thread_local std::vector<float> memory;
  return grow(memory, size);
}

size_t integer_size(InputType input_type) { return input_type == InputType::kInt16 ? 2 : 1; }

int count_panels(const std::vector<LinearArgs>& products) {
  int num_panels = 0;
  for (const LinearArgs& p : products) num_panels += p.weights.num_panels();
  return num_panels;
}

int count_parts(const std::vector<LinearArgs>& products) {
  return std::min(count_panels(products), PARTS_PER_THREAD * threads().num_threads());
}

/// Call `run(product, panel, scratch, part)` for all panels of products of one packed input.
template <typename Run>
void for_panels(const std::vector<LinearArgs>& products, const Run& run) {
  const size_t size = static_cast<size_t>(kernels()->columns) * products[0].weights.num_inputs;
  const int num_panels = count_panels(products), num_parts = count_parts(products);
  threads().for_each(num_parts, [&](int part) {
    const LinearArgs* p = products.data();
    int panel = static_cast<int>(int64_t{num_panels} * part / num_parts);
    const int next = static_cast<int>(int64_t{num_panels} * (part + 1) / num_parts);
    for (int before = 0; panel < next; panel++) {
      while (panel - before >= p->weights.num_panels()) before += p++->weights.num_panels();
      run(*p, panel - before, scratch(size), part);
    }
  });
}

void nothing_to_prepare(int, int) {}

}  // namespace

InputPacker::InputPacker(const LinearArgs& product)
    : x_(product.x),
      input_type_(product.weights.input_type),
      size_(product.weights.num_inputs),
      group_(product.weights.group),
      tiles_{product.num_rows, input_type_ == InputType::kFloat32 ? kernels()->max_tile_rows
                                                          : kernels()->max_tile_rows_int} {
  // Other threads write to them.
  thread_local std::vector<float> floats, scales, sums;
  thread_local std::vector<uint8_t> integers;
  const size_t total = product.num_rows * size_;
  if (input_type_ != InputType::kFloat32) {
    integers_ = grow(integers, total * integer_size(input_type_));
    scales_ = grow(scales, total / group_);
    sums_ = grow(sums, total / group_);
  } else if (product.num_rows > 1) {
    floats_ = grow(floats, total);
  }
  // A single row of floats needs no packing.
  packed_ = {floats_ ? floats_ : x_, integers_, scales_, sums_};
}

int InputPacker::rows_per_part() const {
  const int num_threads = threads().num_threads();
  // Rows of a tile are interleaved: two threads should not write to the same cache lines.
  return std::clamp((tiles_.num_rows + num_threads - 1) / num_threads, 1, 2 * ROWS_PER_PART);
}

void InputPacker::pack(int first, int next) const {
  if (!floats_ && !integers_) return;
  const Kernels& k = *kernels();
  const auto pack_row_int = input_type_ == InputType::kInt16 ? k.pack_row_int16 : k.pack_row_int8;
  for (int row = first; row < next; row++) {
    const int tile = tiles_.of(row), height = tiles_.height(tile), m = row - tiles_.first(tile);
    const size_t at = tiles_.first(tile) * size_;
    const float* x = x_ + row * size_;
    if (floats_)
      k.pack_row(x, m, height, size_, floats_ + at);
    else
      pack_row_int(x, m, height, size_, group_, integers_ + at * integer_size(input_type_),
                       scales_ + at / group_, sums_ + at / group_);
  }
}

void multiply_packed(const std::vector<LinearArgs>& products) {
  for_panels(products, [](const LinearArgs& product, int panel, float* scratch, int) {
    kernels()->linear(product, panel, scratch);
  });
}

void multiply(std::vector<LinearArgs> products) {
  multiply(std::move(products), nothing_to_prepare);
}

void arg_max(const LinearArgs& product, uint32_t* indices, float* values) {
  std::vector<LinearArgs> products{product};
  pack_input(products, nothing_to_prepare);
  const size_t num_rows = product.num_rows;
  std::vector<ArgMax> partials(count_parts(products) * num_rows);
  for_panels(products, [&](const LinearArgs& p, int panel, float* scratch, int part) {
    kernels()->argmax(p, panel, scratch, partials.data() + part * num_rows);
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

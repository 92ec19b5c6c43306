// Products of quantized weights and inputs that are rounded to integers, tile by tile.
#pragma once

#include "kernels.h"
#include "kernels/linear/blocks.h"
#include "kernels/linear/integers.h"
#include "kernels/linear/vnni.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_DOT)

/// Inputs that a sum is of.
int inputs_of_sum(const native::Panels& w) {
  const bool uses_halves = w.input_type != native::InputType::kInt8 && w.has_halves();
  return uses_halves ? native::HALF_GROUP : w.scale_group();
}

/// What sums begin with so that the center is subtracted from the weights, for all tiles,
/// `[tile][group][row]`.
void begin_sums(const native::LinearArgs& args, int32_t* begins) {
  const native::Panels& w = args.weights;
  const int group = inputs_of_sum(w);
  const int32_t* totals = group < w.scale_group() ? args.packed.half_totals : args.packed.totals;
  const size_t size = static_cast<size_t>(w.num_inputs / group) * args.num_rows;
  const int center = has_biases(w) ? 0 : w.center;
  // Totals of inputs that are not finite may be any.
  for (size_t i = 0; i < size; i++)
    begins[i] = static_cast<int32_t>(-center * static_cast<uint32_t>(totals[i]));
}

template <typename Int, bool HAS_HALVES>
void linear_tile_int(const native::LinearArgs& args, int tile, const uint8_t* p, float* y,
                     size_t ldy, Prefetcher prefetcher, float* scratch) {
  const native::Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, max_rows_int<Int>()};
  const int first = tiles.first(tile), height = tiles.height(tile);
  const native::PackedInputs x = args.packed.from_row(w, first);
  const size_t num_sums = w.num_inputs / inputs_of_sum(w);
  const int32_t* begins = reinterpret_cast<const int32_t*>(scratch) + first * num_sums;
  // The lines are there when the sums are: else each store waits, once outputs exceed the caches.
  for (int m = 0; m < height; m++)
    for (int v = 0; v < VECTORS; v++) prefetch_to_write(y + m * ldy + v * LANES);
  const auto run = [&]<native::Format FORMAT>() {
    multiply_ints<Int, HAS_HALVES, FORMAT>(w, x, p, begins, height, y, ldy, prefetcher);
  };
  switch (w.format) {
    case native::Format::kBits4: return run.template operator()<native::Format::kBits4>();
    case native::Format::kMxfp4: return run.template operator()<native::Format::kMxfp4>();
    default:
      // With inputs of 8 bits weights have 4.
      if constexpr (sizeof(Int) == 2) run.template operator()<native::Format::kBits8>();
  }
}

template <typename Int>
auto linear_tile_int_of(const native::Panels& weights) {
  return weights.has_halves() ? linear_tile_int<Int, true> : linear_tile_int<Int, false>;
}

#else

template <typename Int>
constexpr int max_rows_int() {
  return 0;
}
void begin_sums(const native::LinearArgs&, int32_t*) {}
template <typename Int>
std::nullptr_t linear_tile_int_of(const native::Panels&) {
  return nullptr;
}

#endif

}  // namespace

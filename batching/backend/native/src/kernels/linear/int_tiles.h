// Products of quantized weights and inputs that are rounded to integers, tile by tile.
#pragma once

#include "kernels.h"
#include "kernels/linear/blocks.h"
#include "kernels/linear/integers.h"
#include "kernels/linear/vnni.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_DOT)

/// What the sums of a tile begin with, so that the center is subtracted from the weights.
template <bool USES_HALVES>
const int32_t* begin_sums(const native::Panels& weights, const native::PackedInputs& x, int height,
                          int32_t* begins) {
  const int center = has_biases(weights) ? 0 : weights.center;
  const int group = USES_HALVES ? native::HALF_GROUP : weights.scale_group();
  const int32_t* totals = USES_HALVES ? x.half_totals : x.totals;
  const int size = weights.num_inputs / group * height;
  // Totals of inputs that are not finite may be any.
  for (int i = 0; i < size; i++)
    begins[i] = static_cast<int32_t>(-center * static_cast<uint32_t>(totals[i]));
  return begins;
}

template <typename Int, bool HAS_HALVES>
void linear_tile_int(const native::LinearArgs& args, int tile, int, const uint8_t* p, float* y,
                     size_t ldy, Prefetcher prefetcher, float* scratch) {
  const native::Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, max_rows_int<Int>()};
  const native::PackedInputs x = args.packed.from_row(w, tiles.first(tile));
  const int height = tiles.height(tile);
  const int32_t* begins = begin_sums<HAS_HALVES && sizeof(Int) == 2>(
      w, x, height, reinterpret_cast<int32_t*>(scratch));
  // The lines are there when the sums are: else each store waits, once outputs exceed the caches.
  for (int m = 0; m < height; m++)
    for (int v = 0; v < VECTORS; v++) prefetch_to_write(y + m * ldy + v * LANES);
  const auto run = [&]<native::Format FORMAT>() {
    multiply_ints<Int, HAS_HALVES, FORMAT>(w, x, p, begins, height, y, ldy, prefetcher);
  };
  switch (w.format) {
    case native::Format::kBits8: run.template operator()<native::Format::kBits8>(); break;
    case native::Format::kBits4: run.template operator()<native::Format::kBits4>(); break;
    default: run.template operator()<native::Format::kMxfp4>();
  }
}

#else

template <typename Int>
constexpr int max_rows_int() {
  return 0;
}
template <typename Int, bool HAS_HALVES>
void linear_tile_int(const native::LinearArgs&, int, int, const uint8_t*, float*, size_t,
                     Prefetcher, float*) {}

#endif

}  // namespace

#include "kernels/linear/amx.h"
#include "kernels/linear/groups.h"
#include "kernels/microkernel.h"
#include "kernels/parts.h"

namespace {

using native::LinearArgs;
using native::Tiles;

/// Compute one tile of floats.
template <typename Float, int ROWS>
void multiply_floats(const Panels& weights, const float* x, const Float* p, float* y, size_t ldy,
                     Prefetcher prefetcher) {
  // Sums are in the order of the inputs for any ROWS: no bit of a row depends on the number of rows.
  F32 sums[ROWS][VECTORS] = {};
  for (int i = 0; i < weights.num_inputs; i++, p += COLUMNS) {
    if (i % FLOAT_GROUP == 0) prefetcher.advance();
    F32 w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = load(p + v * LANES);
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) sums[m][v] += splat(x[i * ROWS + m]) * w[v];
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, sums[m][v]);
}

template <typename Float>
void linear_tile_floats(const LinearArgs& args, int tile, const uint8_t* p, float* y, size_t ldy,
                        Prefetcher prefetcher, float*) {
  const Tiles tiles{args.num_rows, MAX_ROWS};
  const Panels& w = args.weights;
  const float* x = args.packed.floats + static_cast<size_t>(tiles.first(tile)) * w.num_inputs;
  const auto* floats = reinterpret_cast<const Float*>(p);
#define CASE(ROWS) \
  case ROWS:       \
    return multiply_floats<Float, ROWS>(w, x, floats, y, ldy, prefetcher);
  switch (tiles.height(tile)) { FOR_EACH_HEIGHT(CASE) }
#undef CASE
}

}  // namespace

native::NATIVE_ISA::LinearTile native::NATIVE_ISA::float_tile(const Panels& weights) {
  const bool is_bf16 = weights.input_type == InputType::kBfloat16;
  switch (weights.format) {
    case Format::kFloat32: return linear_tile_floats<float>;
#define CASE(FORMAT, FLOATS) \
  case FORMAT: return is_bf16 ? linear_tile_amx<FORMAT> : FLOATS;
    CASE(Format::kBfloat16, linear_tile_floats<uint16_t>)
    CASE(Format::kBits8, linear_tile_groups<Format::kBits8>)
    CASE(Format::kBits4, linear_tile_groups<Format::kBits4>)
    CASE(Format::kMxfp4, linear_tile_groups<Format::kMxfp4>)
#undef CASE
  }
  return nullptr;
}

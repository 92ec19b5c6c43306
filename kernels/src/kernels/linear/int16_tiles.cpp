#include "kernels/linear/int_tiles.h"
#include "kernels/parts.h"

native::NATIVE_ISA::LinearTile native::NATIVE_ISA::int16_tile(const Panels& weights) {
  return linear_tile_int_of<int16_t>(weights);
}

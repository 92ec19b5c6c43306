#include "kernels/linear/int_tiles.h"
#include "kernels/parts.h"

native::NATIVE_ISA::LinearTile native::NATIVE_ISA::int8_tile([[maybe_unused]] const Panels& weights) {
#if defined(HAS_SHIFTS)
  return linear_tile_int_of<int8_t>(weights);
#else
  return nullptr;
#endif
}

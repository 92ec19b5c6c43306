// Weights of 4 bits, each shifted to the left by as much as its input was divided by: see
// Panels::shifts.
#pragma once

#include "kernels.h"
#include "kernels/linear/integers.h"

namespace {

#if defined(HAS_SHIFTS)

#if defined(__AVX512VBMI__)
/// `[weight][shift]`.
template <native::Format FORMAT>
struct ShiftedWeights {
  alignas(64) uint8_t table[16][native::MAX_SHIFT + 1];

  constexpr ShiftedWeights() : table() {
    for (int q = 0; q < 16; q++)
      for (int by = 0; by <= native::MAX_SHIFT; by++)
        table[q][by] = (FORMAT == native::Format::kMxfp4 ? native::MXFP4_CODES[q] : q) << by;
  }
};
template <native::Format FORMAT>
constexpr ShiftedWeights<FORMAT> SHIFTED_WEIGHTS{};
#endif

/// The weights of four inputs in each lane, of those loaded, shifted by as much as these inputs;
/// `four` says which, and ROWS of inputs are multiplied with them.
template <native::Format FORMAT, int ROWS>
ALWAYS_INLINE I32 shifted_weights(U16Pairs loaded, int four, const uint8_t* shifts) {
  const I32 by = splat_word(shifts);
#if defined(__AVX512VBMI__)
  const I32 table = *reinterpret_cast<const I32*>(SHIFTED_WEIGHTS<FORMAT>.table);
  const I32 q = (I32)(four ? loaded >> 2 : loaded << 2) & 0x3c3c3c3c;
  // For "or" the compiler would join both operations: with many rows, the port of what that gives
  // has no time left (Zen 4).
  return look_up(table, ROWS > 2 ? q + by : q | by);
#else
  return shift_bytes(weights_of<int8_t, FORMAT>(loaded, four, 0), by);
#endif
}

#endif

}  // namespace

#pragma once

#include <cstdint>

namespace {

/// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

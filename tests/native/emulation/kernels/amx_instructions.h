// Computes what Intel's AMX does (Software Developer's Manual, volume 2), in place of the file of this
// name, so that the kernels for it are tested on processors without it: it is included before theirs.
#pragma once

#include <cstring>

#include "kernels/simd.h"

#define HAS_AMX 1

namespace {

using Halves = __m512h;

/// Call `compute` for the float16 numbers of each lane.
template <typename Compute>
ALWAYS_INLINE Halves for_halves(Halves a, Halves b, Halves c, Compute compute) {
  constexpr int SIZE = sizeof(Halves) / sizeof(uint16_t);
  uint16_t x[SIZE], y[SIZE], z[SIZE];
  std::memcpy(x, &a, sizeof a), std::memcpy(y, &b, sizeof b), std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < SIZE; i++)
    z[i] = _cvtss_sh(compute(_cvtsh_ss(x[i]), _cvtsh_ss(y[i]), _cvtsh_ss(z[i])),
                     _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(&c, z, sizeof c);
  return c;
}

ALWAYS_INLINE Halves to_halves(__m512i integers) {
  int16_t from[sizeof(Halves) / sizeof(int16_t)];
  uint16_t to[sizeof(Halves) / sizeof(uint16_t)];
  std::memcpy(from, &integers, sizeof from);
  for (size_t i = 0; i < sizeof to / sizeof *to; i++)
    to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
  Halves halves;
  std::memcpy(&halves, to, sizeof to);
  return halves;
}
ALWAYS_INLINE Halves product(Halves a, Halves b) {
  return for_halves(a, b, b, [](float x, float y, float) { return x * y; });
}
ALWAYS_INLINE Halves fused(Halves a, Halves b, Halves c) {
  return for_halves(a, b, c, [](double x, double y, double z) { return x * y + z; });
}

constexpr int NUM_REGISTERS = 8, ROWS_OF_REGISTER = 16, UPPER_HALF = static_cast<int>(0xffff0000);

/// What LDTILECFG reads.
struct RegisterSizes {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct EmulatedUnit {
  RegisterSizes sizes;
  I32 rows[NUM_REGISTERS][ROWS_OF_REGISTER];
};
thread_local EmulatedUnit emulated;

void configure_unit(const void* sizes) {
  std::memset(&emulated, 0, sizeof emulated);
  std::memcpy(&emulated.sizes, sizes, sizeof emulated.sizes);
}
/// Registers without a configuration cannot be used: here they have no rows.
void release_unit() { std::memset(&emulated, 0, sizeof emulated); }

template <int TO>
void clear_unit() {
  std::memset(emulated.rows[TO], 0, sizeof emulated.rows[TO]);
}
template <int TO>
void load_unit(const void* rows, size_t stride) {
  clear_unit<TO>();
  for (int i = 0; i < emulated.sizes.rows[TO]; i++)
    std::memcpy(&emulated.rows[TO][i], static_cast<const uint8_t*>(rows) + i * stride,
                emulated.sizes.row_bytes[TO]);
}
template <int FROM>
void store_unit(void* rows, size_t stride) {
  for (int i = 0; i < emulated.sizes.rows[FROM]; i++)
    std::memcpy(static_cast<uint8_t*>(rows) + i * stride, &emulated.rows[FROM][i],
                emulated.sizes.row_bytes[FROM]);
}
template <int TO, int X, int W>
void multiply_unit() {
  for (int row = 0; row < emulated.sizes.rows[TO]; row++) {
    F32 sums = (F32)emulated.rows[TO][row];
    for (int pair = 0; pair < emulated.sizes.rows[W]; pair++) {
      const I32 x = splat_int(emulated.rows[X][row][pair]), w = emulated.rows[W][pair];
      sums += (F32)(x << 16) * (F32)(w << 16);
      sums += (F32)(x & UPPER_HALF) * (F32)(w & UPPER_HALF);
    }
    emulated.rows[TO][row] = (I32)sums;
  }
}

}  // namespace

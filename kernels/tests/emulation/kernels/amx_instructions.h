// Computes what Intel's AMX does (Software Developer's Manual, TDPBF16PS), except that denormal numbers are
// kept, and what vectors of float16 do, in place of the kernels' file of this name: they are tested on
// processors that have neither.
#pragma once

#include <cstring>

#include "kernels/simd.h"

#define HAS_AMX

namespace {

using Halves = __m512i;

ALWAYS_INLINE uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

/// Call `compute` for the float16 numbers of each lane.
template <typename Compute>
ALWAYS_INLINE Halves for_halves(Halves a, Halves b, Halves c, Compute compute) {
  constexpr int SIZE = sizeof(Halves) / sizeof(uint16_t);
  uint16_t x[SIZE], y[SIZE], z[SIZE];
  std::memcpy(x, &a, sizeof a), std::memcpy(y, &b, sizeof b), std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < SIZE; i++)
    z[i] = to_half(compute(_cvtsh_ss(x[i]), _cvtsh_ss(y[i]), _cvtsh_ss(z[i])));
  std::memcpy(&c, z, sizeof c);
  return c;
}

ALWAYS_INLINE Halves to_halves(__m512i integers) {
  int16_t from[sizeof(Halves) / sizeof(int16_t)];
  uint16_t to[sizeof(Halves) / sizeof(uint16_t)];
  std::memcpy(from, &integers, sizeof from);
  for (size_t i = 0; i < sizeof to / sizeof *to; i++)
    to[i] = to_half(from[i]);
  Halves halves;
  std::memcpy(&halves, to, sizeof to);
  return halves;
}
ALWAYS_INLINE Halves product(Halves a, Halves b) {
  return for_halves(a, b, b, [](float x, float y, float) { return x * y; });
}
/// Rounded to float32 on the way, which only a tie of float16 could tell.
ALWAYS_INLINE Halves fused(Halves a, Halves b, Halves c) {
  return for_halves(a, b, c, [](double x, double y, double z) {
    return static_cast<float>(x * y + z);
  });
}

constexpr int NUM_REGISTERS = 8, ROWS_OF_REGISTER = 16, UPPER_HALF = static_cast<int>(0xffff0000);

}  // namespace

// As a processor's, the registers of a thread are the same in all files.
namespace native::NATIVE_ISA {

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
inline thread_local EmulatedUnit emulated;

}  // namespace native::NATIVE_ISA

namespace {

using native::NATIVE_ISA::emulated;

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
    F32 even{}, odd{};
    for (int pair = 0; pair < emulated.sizes.rows[W]; pair++) {
      const I32 x = splat_int(emulated.rows[X][row][pair]), w = emulated.rows[W][pair];
      even += (F32)(x << 16) * (F32)(w << 16);
      odd += (F32)(x & UPPER_HALF) * (F32)(w & UPPER_HALF);
    }
    emulated.rows[TO][row] = (I32)((F32)emulated.rows[TO][row] + (even + odd));
  }
}

}  // namespace

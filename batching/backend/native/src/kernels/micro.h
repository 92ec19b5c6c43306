// The size of what is multiplied in registers, and the products of attention.
#pragma once

#include "kernels/simd.h"

namespace {

// Rows and vectors of columns that one call keeps in registers: ROWS * VECTORS sums, VECTORS
// weights and one broadcast value.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#define FOR_EACH_HEIGHT(CASE) \
  CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 6;
#define FOR_EACH_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
constexpr int MAX_ROWS = 8;
#define FOR_EACH_HEIGHT(CASE) \
  CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#endif
constexpr int VECTORS = 2;
/// Columns of one call.
constexpr int COLUMNS = VECTORS * LANES;

/// How far ahead memory is asked for: the processor's own prefetching loses the track while rows
/// are multiplied.
constexpr size_t BYTES_AHEAD = 4096;

/// Ask for a cache line that is needed soon.
ALWAYS_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

/// Memory that is needed soon, to be asked for part by part.
struct Ahead {
  const uint8_t* next;
  size_t part;

  ALWAYS_INLINE void ask() {
    for (size_t i = 0; i < part; i += 64) fetch(next + i);
    next += part;
  }
};

/// Scales and biases of one group, for the columns of one panel.
struct Parameters {
  F32 scales[VECTORS], biases[VECTORS];

  ALWAYS_INLINE Parameters(const native::Panels& weights, const uint8_t* p) {
    const auto* halves = reinterpret_cast<const uint16_t*>(p);
    const auto* floats = reinterpret_cast<const float*>(p);
    for (int v = 0; v < VECTORS; v++) {
      const int at = v * LANES;
      scales[v] = weights.has_half_parameters ? load_half(halves + at) : load(floats + at);
      biases[v] = weights.has_half_parameters ? load_half(halves + COLUMNS + at)
                                              : load(floats + COLUMNS + at);
    }
  }
};

/// y[m, j] (+)= sum over k of x[m, k] * w[k, j], for ROWS rows and COLUMNS columns.
///
/// A sum is taken in the order of k, whatever ROWS is: a row's result does not depend, in a
/// single bit, on how many others are computed with it.  `next` is laid out as w is, and will be
/// needed soon; it may be null.
template <int ROWS, bool HAS_NEXT, typename Weight>
ALWAYS_INLINE void multiply_rows(const float* x, size_t ldx, const Weight* w, size_t ldw, int k,
                                 float* y, size_t ldy, bool add, const Weight* next) {
  constexpr int PER_LINE = 64 / sizeof(Weight);
  F32 sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) sums[m][v] = add ? load(y + m * ldy + v * LANES) : F32{};
  for (int i = 0; i < k; i++, w += ldw) {
    F32 weights[VECTORS];
    for (int v = 0; v < VECTORS; v++) weights[v] = load(w + v * LANES);
    if constexpr (HAS_NEXT)
      for (int j = 0; j < COLUMNS; j += PER_LINE) fetch(next + i * ldw + j);
    for (int m = 0; m < ROWS; m++) {
      F32 value = splat(x[m * ldx + i]);
      for (int v = 0; v < VECTORS; v++) sums[m][v] += value * weights[v];
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, sums[m][v]);
}

/// The same for at most MAX_ROWS rows.
template <bool HAS_NEXT, typename Weight>
void multiply_tile(int rows, const float* x, size_t ldx, const Weight* w, size_t ldw, int k,
                   float* y, size_t ldy, bool add, const Weight* next) {
#define CASE(ROWS) \
  case ROWS:       \
    return multiply_rows<ROWS, HAS_NEXT>(x, ldx, w, ldw, k, y, ldy, add, next);
  switch (rows) { FOR_EACH_HEIGHT(CASE) }
#undef CASE
}

/// The same for any number of rows, in tiles of nearly equal height.
template <typename Weight>
void multiply(int rows, const float* x, size_t ldx, const Weight* w, size_t ldw, int k, float* y,
              size_t ldy, bool add, const Weight* next) {
  const native::Tiles tiles{rows, MAX_ROWS};
  for (int t = 0; t < tiles.count(); t++) {
    const int first = tiles.first(t);
    const auto run = t == 0 && next ? multiply_tile<true, Weight> : multiply_tile<false, Weight>;
    run(tiles.height(t), x + first * ldx, ldx, w, ldw, k, y + first * ldy, ldy, add, next);
  }
}

}  // namespace

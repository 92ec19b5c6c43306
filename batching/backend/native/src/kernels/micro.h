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

/// How far ahead memory is asked for: the processor's own prefetching loses the track while rows are
/// multiplied.
constexpr size_t BYTES_AHEAD = 4096;

ALWAYS_INLINE void prefetch(const void* p, size_t size) {
  for (size_t i = 0; i < size; i += 64)
    __builtin_prefetch(static_cast<const char*>(p) + BYTES_AHEAD + i);
}

/// y[m, j] (+)= sum over k of x[m, k] * w[k, j], for ROWS rows and COLUMNS columns.
///
/// A sum is taken in the order of k, whatever ROWS is: a row's result does not depend, in a
/// single bit, on how many others are computed with it.
template <int ROWS>
ALWAYS_INLINE void multiply_rows(const float* x, size_t ldx, const float* w, size_t ldw, int k,
                                 float* y, size_t ldy, bool add) {
  F32 sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) sums[m][v] = add ? load(y + m * ldy + v * LANES) : F32{};
  for (int i = 0; i < k; i++, w += ldw) {
    F32 weights[VECTORS];
    for (int v = 0; v < VECTORS; v++) weights[v] = load(w + v * LANES);
    for (int m = 0; m < ROWS; m++) {
      F32 value = splat(x[m * ldx + i]);
      for (int v = 0; v < VECTORS; v++) sums[m][v] += value * weights[v];
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, sums[m][v]);
}

/// The same for at most MAX_ROWS rows.
void multiply_tile(int rows, const float* x, size_t ldx, const float* w, size_t ldw, int k,
                   float* y, size_t ldy, bool add) {
#define CASE(ROWS) \
  case ROWS:       \
    return multiply_rows<ROWS>(x, ldx, w, ldw, k, y, ldy, add);
  switch (rows) { FOR_EACH_HEIGHT(CASE) }
#undef CASE
}

/// The same for any number of rows, in tiles of nearly equal height.
void multiply(int rows, const float* x, size_t ldx, const float* w, size_t ldw, int k, float* y,
              size_t ldy, bool add) {
  int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
  for (int t = 0; t < tiles; t++) {
    int first = rows * t / tiles, next = rows * (t + 1) / tiles;
    multiply_tile(next - first, x + first * ldx, ldx, w, ldw, k, y + first * ldy, ldy, add);
  }
}

}  // namespace

// Sizes of register tiles, prefetching, and the matrix products of attention.
#pragma once

#include "kernels/simd.h"

namespace {

// The register tile of one call: ROWS * VECTORS sums, VECTORS weights and one broadcast input.
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

/// In bytes.  The hardware prefetcher does not keep up with weights while rows are multiplied, and
/// integers of few rows are multiplied faster than memory is read.
constexpr size_t PREFETCH_DISTANCE = 4096, PREFETCH_DISTANCE_INT = 8192;

/// Prefetch a cache line.
ALWAYS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
ALWAYS_INLINE void prefetch_to_write(void* p) { __builtin_prefetch(p, 1, 3); }

/// Prefetches memory, `part` bytes at each call.
struct Prefetcher {
  const uint8_t* next;
  size_t part;

  ALWAYS_INLINE void advance() {
    for (size_t i = 0; i < part; i += 64) prefetch(next + i);
    next += part;
  }
};

/// What the scales and biases of a group are multiples of, for the columns of one panel: float16 for
/// each SUPER groups, before the groups.
ALWAYS_INLINE const uint16_t* factors_of(const native::Panels& weights, const uint8_t* panel,
                                         int group) {
  return reinterpret_cast<const uint16_t*>(panel + group / native::SUPER * weights.factor_bytes());
}

/// Scales and biases of one group, for COUNT vectors of the columns of one panel.
template <int COUNT = VECTORS>
struct Parameters {
  F32 scales[COUNT], biases[COUNT] = {};

  ALWAYS_INLINE Parameters(const native::Panels& weights, const uint8_t* p, const uint16_t* factors,
                           int first = 0) {
    const auto* halves = reinterpret_cast<const uint16_t*>(p);
    const auto* floats = reinterpret_cast<const float*>(p);
    const auto* integers = reinterpret_cast<const int8_t*>(p);
    for (int v = 0; v < COUNT; v++) {
      const int at = (first + v) * LANES;
      switch (weights.parameter_type) {
        case native::ParameterType::kFloat32:
          scales[v] = load(floats + at);
          biases[v] = load(floats + COLUMNS + at);
          break;
        case native::ParameterType::kFloat16:
          scales[v] = load_fp16(halves + at);
          biases[v] = load_fp16(halves + COLUMNS + at);
          break;
        case native::ParameterType::kCentered: scales[v] = load_fp16(halves + at); break;
        case native::ParameterType::kPowerOfTwo:
          // Of MXFP4, whose codes are twice the weights.
          scales[v] = (F32)(load_bytes(p + at) << 23) * splat(0.5f);
          break;
        case native::ParameterType::kProducts:
          scales[v] = load_fp16(factors + at) * load(integers + at);
          biases[v] = load_fp16(factors + COLUMNS + at) * load(integers + COLUMNS + at);
          break;
        case native::ParameterType::kCenteredProducts:
          scales[v] = load_fp16(factors + at) * load(integers + at);
          break;
      }
    }
  }
};

/// Whether a bias is more than the scale times -center.
ALWAYS_INLINE bool has_biases(const native::Panels& weights) {
  return weights.parameter_type == native::ParameterType::kFloat32 ||
         weights.parameter_type == native::ParameterType::kFloat16 ||
         weights.parameter_type == native::ParameterType::kProducts;
}

/// Load a vector of rows that are stored together: one of floats, and else a pair.
ALWAYS_INLINE void load_numbers(const float* p, F32 (&rows)[1]) { rows[0] = load(p); }
ALWAYS_INLINE void load_numbers(const uint16_t* p, F32 (&rows)[2]) {
  const I32 pairs = *reinterpret_cast<const I32*>(p);
  rows[0] = (F32)(pairs << 16);
  rows[1] = (F32)(pairs & -65536);
}
ALWAYS_INLINE void load_numbers(const int8_t* p, F32 (&rows)[2]) {
  const I32 pairs = load_halves(reinterpret_cast<const uint16_t*>(p));
  rows[0] = to_float(pairs << 24 >> 24);
  rows[1] = to_float(pairs << 16 >> 24);
}

/// y[m, j] (+)= sum over k of x[m, k] * w[k, j], for ROWS rows and COLUMNS columns.
///
/// Sums are in the order of k for any ROWS: no bit of a row depends on the number of rows.  `next`
/// has the layout of w and is prefetched; it may be null.  Rows of w that are stored together, see
/// PoolLayout, are `2 * ldw` apart.
template <int ROWS, bool HAS_NEXT, typename Weight>
ALWAYS_INLINE void multiply_rows(const float* x, size_t ldx, const Weight* w, size_t ldw, int k,
                                 float* y, size_t ldy, bool add, const Weight* next) {
  constexpr int PER_LINE = 64 / sizeof(Weight), PACK = native::packed_rows(sizeof(Weight));
  F32 sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) sums[m][v] = add ? load(y + m * ldy + v * LANES) : F32{};
  const auto step = [&](int i, int count) __attribute__((always_inline)) {
    F32 weights[VECTORS][PACK];
    for (int v = 0; v < VECTORS; v++) load_numbers(w + i * ldw + PACK * v * LANES, weights[v]);
    if constexpr (HAS_NEXT)
      for (int j = 0; j < PACK * COLUMNS; j += PER_LINE) prefetch(next + i * ldw + j);
    for (int p = 0; p < count; p++)
      for (int m = 0; m < ROWS; m++) {
        const F32 value = splat(x[m * ldx + i + p]);
        for (int v = 0; v < VECTORS; v++) sums[m][v] += value * weights[v][p];
      }
  };
  const int whole = k / PACK * PACK;
  for (int i = 0; i < whole; i += PACK) step(i, PACK);
  if (whole < k) step(whole, 1);
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

// y = x W^T + b, one panel of outputs at a time.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "kernels/int16.h"
#include "kernels/micro.h"

namespace {

using native::Format;
using native::LinearArgs;
using native::Panels;

/// Inputs whose weights are unpacked at a time: with COLUMNS outputs they fit into the L1 cache.
/// A multiple of every group size.
constexpr int CHUNK = 128;
/// Rows that share what was unpacked.
constexpr int ROW_BLOCK = 8 * MAX_ROWS;

constexpr size_t LINEAR_SCRATCH = static_cast<size_t>(COLUMNS) * (CHUNK + ROW_BLOCK);

/// q * scale rounded to 11 bits, as float16 is: right for every integer of 8 bits and scale of 11.
ALWAYS_INLINE F32 rounded_product(F32 q, F32 scale) {
  // The sum has room for 11 bits of the product; taking away the rest leaves these.
  const F32 product = q * scale;
  const F32 shifted = product * splat(8192.0f) + product;
  return shifted - product * splat(8192.0f);
}

/// Any number rounded to 11 bits (Veltkamp's splitting; Dekker 1971).
ALWAYS_INLINE F32 rounded(F32 x) {
  F32 shifted = x * splat(8193.0f);
  // The product has to be rounded first; fused with the subtraction it would not be.
#if defined(__x86_64__)
  asm("" : "+v"(shifted));
#elif defined(__aarch64__)
  asm("" : "+w"(shifted));
#endif
  return shifted - (shifted - x);
}

/// Scales and biases of one group, for the columns of one panel.
template <bool ROUNDS>
struct Affine {
  F32 scales[VECTORS], biases[VECTORS];

  ALWAYS_INLINE explicit Affine(const uint8_t* parameters) {
    const float* p = reinterpret_cast<const float*>(parameters);
    for (int v = 0; v < VECTORS; v++) {
      scales[v] = load(p + v * LANES);
      biases[v] = load(p + COLUMNS + v * LANES);
    }
  }
  ALWAYS_INLINE F32 operator()(int v, I32 q) const {
    if constexpr (ROUNDS) return rounded(rounded_product(to_float(q), scales[v]) + biases[v]);
    return to_float(q) * scales[v] + biases[v];
  }
};
constexpr size_t AFFINE_BYTES = 2 * COLUMNS * sizeof(float);

/// Call `use(i, weights)` for inputs 0 to `num_inputs` of a panel, with the weights of its columns;
/// return where those of the next inputs begin.
template <Format FORMAT, bool ROUNDS, typename Use>
ALWAYS_INLINE const uint8_t* for_inputs(const uint8_t* p, int num_inputs, int group, Use use) {
  F32 w[VECTORS];
  if constexpr (FORMAT == Format::kFloat32 || FORMAT == Format::kBfloat16) {
    using Float = std::conditional_t<FORMAT == Format::kFloat32, float, uint16_t>;
    const Float* values = reinterpret_cast<const Float*>(p);
    for (int i = 0; i < num_inputs; i++, values += COLUMNS) {
      for (int v = 0; v < VECTORS; v++) w[v] = load(values + v * LANES);
      use(i, w);
    }
    return reinterpret_cast<const uint8_t*>(values);
  }
  constexpr int PER_BYTE = FORMAT == Format::kBits4 ? 2 : 1;
  const size_t group_bytes = static_cast<size_t>(group) * COLUMNS / PER_BYTE;
  for (int first = 0; first < num_inputs; first += group, p += AFFINE_BYTES) {
    const Affine<ROUNDS> affine(p + group_bytes);
    for (int i = first; i < first + group; i += PER_BYTE, p += COLUMNS) {
      I32 q[VECTORS];
      for (int v = 0; v < VECTORS; v++) q[v] = load_bytes(p + v * LANES);
      for (int v = 0; v < VECTORS; v++) w[v] = affine(v, PER_BYTE == 2 ? q[v] & 15 : q[v]);
      use(i, w);
      if constexpr (PER_BYTE == 2) {
        for (int v = 0; v < VECTORS; v++) w[v] = affine(v, q[v] >> 4);
        use(i + 1, w);
      }
    }
  }
  return p;
}

/// The weights of some inputs as floats `[num_inputs][COLUMNS]`.
template <Format FORMAT, bool ROUNDS>
ALWAYS_INLINE const uint8_t* unpack(const uint8_t* p, int num_inputs, int group, float* unpacked) {
  return for_inputs<FORMAT, ROUNDS>(p, num_inputs, group, [&](int i, const F32(&w)[VECTORS])
                                                      __attribute__((always_inline)) {
    for (int v = 0; v < VECTORS; v++) store(unpacked + i * COLUMNS + v * LANES, w[v]);
  });
}

/// What `multiply_rows` does, with weights that are unpacked on the way: of few rows, writing
/// them down would take longer than multiplying.
template <Format FORMAT, bool ROUNDS, int ROWS>
const uint8_t* multiply_packed(const float* x, size_t ldx, const uint8_t* p, int num_inputs,
                               int group, float* y, size_t ldy, bool add) {
  F32 sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) sums[m][v] = add ? load(y + m * ldy + v * LANES) : F32{};
  p = for_inputs<FORMAT, ROUNDS>(p, num_inputs, group, [&](int i, const F32(&w)[VECTORS])
                                                   __attribute__((always_inline)) {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) sums[m][v] += splat(x[m * ldx + i]) * w[v];
  });
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, sums[m][v]);
  return p;
}

/// y (+)= x W for a chunk of inputs; return where the next chunk's weights begin.
template <Format FORMAT, bool ROUNDS>
const uint8_t* multiply_chunk(int rows, const float* x, size_t ldx, const uint8_t* p,
                              int num_inputs, int group, float* y, size_t ldy, bool add,
                              float* scratch) {
#define CASE(ROWS) \
  case ROWS:       \
    return multiply_packed<FORMAT, ROUNDS, ROWS>(x, ldx, p, num_inputs, group, y, ldy, add);
  switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
  const float* w = reinterpret_cast<const float*>(p);
  if constexpr (FORMAT == Format::kFloat32) {
    p += static_cast<size_t>(num_inputs) * COLUMNS * sizeof(float);
  } else {
    p = unpack<FORMAT, ROUNDS>(p, num_inputs, group, scratch);
    w = scratch;
  }
  multiply(rows, x, ldx, w, COLUMNS, num_inputs, y, ldy, add);
  return p;
}

using MultiplyChunk = decltype(&multiply_chunk<Format::kFloat32, false>);

MultiplyChunk chunk_multiplier(const Panels& weights) {
  switch (weights.format) {
    case Format::kFloat32: return multiply_chunk<Format::kFloat32, false>;
    case Format::kBfloat16: return multiply_chunk<Format::kBfloat16, false>;
    case Format::kBits8:
      return weights.rounds ? multiply_chunk<Format::kBits8, true>
                            : multiply_chunk<Format::kBits8, false>;
    case Format::kBits4:
      return weights.rounds ? multiply_chunk<Format::kBits4, true>
                            : multiply_chunk<Format::kBits4, false>;
  }
  return nullptr;
}

/// Rows of one panel, a chunk of inputs after the other.
void linear_floats(int rows, const Panels& weights, const float* x, const uint8_t* p, float* y,
                   size_t ldy, float* scratch) {
  const MultiplyChunk multiply_chunk = chunk_multiplier(weights);
  const size_t chunk_bytes = weights.panel_bytes() / weights.num_inputs * CHUNK;
  for (int i = 0; i < weights.num_inputs; i += CHUNK) {
    const int size = weights.num_inputs - i < CHUNK ? weights.num_inputs - i : CHUNK;
    const uint8_t* next = p + chunk_bytes;
    // The processor's own prefetching loses the track while rows are multiplied.
    for (size_t ahead = 0; ahead < chunk_bytes; ahead += 64) __builtin_prefetch(next + ahead);
    p = multiply_chunk(rows, x + i, weights.num_inputs, p, size, weights.group, y, ldy, i > 0,
                       scratch);
  }
}

/// Add bias and residual, and write what the panel has of the outputs where it belongs.
void finish_panel(const LinearArgs& args, int first_column, int first_row, int rows,
                  const float* y, size_t ldy, float* target) {
  const size_t num_outputs = args.weights.num_outputs;
  const int left = args.weights.num_outputs - first_column;
  const int width = left < COLUMNS ? left : COLUMNS;
  for (int m = 0; m < rows; m++) {
    const float* residual =
        args.residual ? args.residual + (first_row + m) * num_outputs + first_column : nullptr;
    for (int j = 0; j < width; j++) {
      float value = y[m * ldy + j];
      if (args.bias) value += args.bias[first_column + j];
      if (residual) value += residual[j];
      target[m * num_outputs + j] = value;
    }
  }
}

void linear(const LinearArgs& args, int panel, float* scratch) {
  const Panels& weights = args.weights;
  const int first_column = panel * COLUMNS;
  const int num_columns = weights.num_outputs - first_column;
  float* edge = scratch + static_cast<size_t>(COLUMNS) * CHUNK;
  for (int first = 0; first < args.num_rows; first += ROW_BLOCK) {
    const int rows = args.num_rows - first < ROW_BLOCK ? args.num_rows - first : ROW_BLOCK;
    const float* x = args.x + static_cast<size_t>(first) * weights.num_inputs;
    float* target = args.y + static_cast<size_t>(first) * weights.num_outputs + first_column;
    // The last panel may be wider than what is left of the outputs.
    const bool is_whole = num_columns >= COLUMNS;
    float* y = is_whole ? target : edge;
    const size_t ldy = is_whole ? weights.num_outputs : COLUMNS;
    const uint8_t* p = weights.data + panel * weights.panel_bytes();
    if (weights.in_pairs)
      linear_int16(rows, weights, args.x16, first, p, y, ldy);
    else
      linear_floats(rows, weights, x, p, y, ldy, scratch);
    if (is_whole && !args.bias && !args.residual) continue;
    finish_panel(args, first_column, first, rows, y, ldy, target);
  }
}

}  // namespace

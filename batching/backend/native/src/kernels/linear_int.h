// Products of quantized weights and inputs that are rounded to integers: the fast modes.
//
// A group's integers are multiplied and added exactly; the sum is then scaled once.  With inputs
// x = s_x q_x and weights w = s_w q_w + b_w, a group contributes
//     s_w s_x sum(q_w q_x) + b_w s_x sum(q_x)
// (as llama.cpp does with 8-bit inputs).  A lane of an instruction multiplies two 16-bit or four
// 8-bit inputs instead of one float.  For normally distributed inputs in groups of 32, the rounding
// error of 16 bits is an eightieth of bfloat16's, and that of 8 bits three times bfloat16's.
#pragma once

#include "kernels.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_DOT)

// Rows of one call: as many as fit in registers with all of their sums.
#if defined(__AVX512F__)
constexpr int MAX_ROWS_INT = 6;
#define FOR_EACH_HEIGHT_INT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
constexpr int MAX_ROWS_INT = 3;
#define FOR_EACH_HEIGHT_INT(CASE) CASE(1) CASE(2) CASE(3)
#endif

/// Adjacent inputs of a row.
constexpr int EIGHT = 8;

/// Store the integers of one vector, eight at a time, `stride` bytes apart.
template <typename Int>
ALWAYS_INLINE void store_eights(uint8_t* to, size_t stride, I32 q) {
  // Even and odd bytes of four weights are unpacked separately.
  if constexpr (sizeof(Int) == 2) q = swap_inner(q);
  const auto integers = narrow<Int>(q);
  constexpr size_t SIZE = EIGHT * sizeof(Int);
  for (size_t i = 0; i < LANES / EIGHT; i++)
    __builtin_memcpy(to + i * stride, reinterpret_cast<const uint8_t*>(&integers) + i * SIZE, SIZE);
}

/// Pack a row `[size]`.  A NaN makes the scale of its group NaN.
template <typename Int>
void pack_row_int(const float* x, int row, int height, int size, int group, uint8_t* integers,
                  float* scales, float* sums) {
  constexpr float TOP = sizeof(Int) == 1 ? 127 : 32767;
  const size_t stride = EIGHT * sizeof(Int) * height;
  integers += EIGHT * sizeof(Int) * row;
  for (int at = row; at < size / group * height + row; at += height, x += group) {
    F32 top{};
    I32 is_nan{};
    for (int i = 0; i < group; i += LANES) {
      const F32 value = load(x + i);
      top = max(top, absolute(value));
      is_nan |= value != value;
    }
    const float largest = any(is_nan) ? __builtin_nanf("") : max(top);
    // Avoids a division by 0; inputs that small are negligible.
    const F32 factor = splat(largest > 1e-30f ? TOP / largest : 0);
    F32 total{};
    for (int i = 0; i < group; i += LANES, integers += LANES / EIGHT * stride) {
      const I32 q = round_to_int(load(x + i) * factor);
      total += to_float(q);
      store_eights<Int>(integers, stride, q);
    }
    scales[at] = largest / TOP;
    sums[at] = scales[at] * sum(total);
  }
}

/// Compute one tile of a panel.
template <typename Int, native::Format FORMAT, int ROWS>
void multiply_int(const native::Panels& weights, const native::PackedInputs& x, const uint8_t* p,
                  float* y, size_t ldy, Prefetcher prefetcher) {
  constexpr int PER_BYTE = has_nibbles(FORMAT) ? 2 : 1, WORDS = sizeof(Int);  // of four inputs
  const uint8_t* inputs = x.integers;
  F32 results[ROWS][VECTORS] = {};
  for (int g = 0; g < weights.num_inputs / weights.group; g++) {
    prefetcher.advance();
    I32 sums[ROWS][VECTORS] = {};
    for (int i = 0; i < weights.group; i += EIGHT, inputs += EIGHT * sizeof(Int) * ROWS) {
      U16Pairs loaded[VECTORS];
      for (int four = 0; four < EIGHT / 4; four++) {
        if (four % PER_BYTE == 0) {
          for (int v = 0; v < VECTORS; v++) loaded[v] = load_pairs(p + 4 * LANES * v);
          p += 4 * COLUMNS;
        }
        U16Pairs bytes[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          bytes[v] = four % PER_BYTE ? loaded[v] >> 4 : loaded[v];
          if (PER_BYTE == 2) bytes[v] &= 0x0f0f;
          if (FORMAT == native::Format::kMxfp4) bytes[v] = mxfp4_codes(bytes[v]);
        }
        for (int word = 0; word < WORDS; word++) {
          I32 w[VECTORS];
          for (int v = 0; v < VECTORS; v++)
            w[v] = (I32)(WORDS == 1 ? bytes[v] : word == 0 ? bytes[v] & 0xff : bytes[v] >> 8);
          const uint8_t* at = inputs + 4 * (four * WORDS + word);
          for (int m = 0; m < ROWS; m++)
            for (int v = 0; v < VECTORS; v++)
              sums[m][v] = dot<Int>(sums[m][v], w[v], at + EIGHT * sizeof(Int) * m);
        }
      }
    }
    const Parameters group(weights, p);
    for (int v = 0; v < VECTORS; v++) {
      for (int m = 0; m < ROWS; m++) {
        const F32 scaled = to_float(sums[m][v]) * splat(x.scales[g * ROWS + m]);
        results[m][v] += scaled * group.scales[v];
        results[m][v] += group.biases[v] * splat(x.sums[g * ROWS + m]);
      }
    }
    p += weights.parameter_bytes();
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * ldy + v * LANES, results[m][v]);
}

template <typename Int>
void linear_tile_int(const native::LinearArgs& args, int tile, int, const uint8_t* p, float* y,
                     size_t ldy, Prefetcher prefetcher, float*) {
  const native::Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, MAX_ROWS_INT};
  const size_t first = tiles.first(tile), groups = first * (w.num_inputs / w.group);
  const native::PackedInputs& all = args.packed;
  const native::PackedInputs x = {nullptr, all.integers + first * w.num_inputs * sizeof(Int),
                                  all.scales + groups, all.sums + groups};
  const auto run = [&]<native::Format FORMAT>() {
#define CASE(ROWS) \
  case ROWS:       \
    return multiply_int<Int, FORMAT, ROWS>(w, x, p, y, ldy, prefetcher);
    switch (tiles.height(tile)) { FOR_EACH_HEIGHT_INT(CASE) }
#undef CASE
  };
  switch (w.format) {
    case native::Format::kBits8: return run.template operator()<native::Format::kBits8>();
    case native::Format::kBits4: return run.template operator()<native::Format::kBits4>();
    default: return run.template operator()<native::Format::kMxfp4>();
  }
}

#else

constexpr int MAX_ROWS_INT = 0;
template <typename Int>
void pack_row_int(const float*, int, int, int, int, uint8_t*, float*, float*) {}
template <typename Int>
void linear_tile_int(const native::LinearArgs&, int, int, const uint8_t*, float*, size_t,
                     Prefetcher, float*) {}

#endif

}  // namespace

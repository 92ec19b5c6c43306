// Products of quantized weights with inputs that are rounded to integers: the fast modes.
//
// A group's integers are multiplied and added exactly; the sum is then scaled once.  With inputs
// x = s_x q_x and weights w = s_w q_w + b_w, a group contributes
//     s_w s_x sum(q_w q_x) + b_w s_x sum(q_x)
// (as llama.cpp does with inputs of 8 bits).  One instruction multiplies two inputs of 16 bits or
// four of 8 where it multiplies one float.  Of normal numbers in groups of 32, 16 bits lose an
// eightieth of what bfloat16 loses, and 8 bits three times as much as it.
#pragma once

#include "kernels.h"
#include "kernels/micro.h"

namespace {

#if defined(HAS_DOT)

// Rows of one call: as many as leave all of its sums in registers.
#if defined(__AVX512F__)
constexpr int MAX_ROWS_INTEGERS = 6;
#define FOR_EACH_HEIGHT_INTEGERS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
constexpr int MAX_ROWS_INTEGERS = 3;
#define FOR_EACH_HEIGHT_INTEGERS(CASE) CASE(1) CASE(2) CASE(3)
#endif

/// Inputs of a row that lie side by side.
constexpr int EIGHT = 8;

/// Integers of one vector, as rows of eight that are `stride` bytes apart.
template <typename Int>
ALWAYS_INLINE void store_eights(uint8_t* to, size_t stride, I32 q) {
  // Of four bytes of weights, the even and the odd ones are unpacked together.
  if constexpr (sizeof(Int) == 2) q = swap_inner(q);
  const auto integers = narrow<Int>(q);
  constexpr size_t SIZE = EIGHT * sizeof(Int);
  for (size_t i = 0; i < LANES / EIGHT; i++)
    __builtin_memcpy(to + i * stride, reinterpret_cast<const uint8_t*>(&integers) + i * SIZE, SIZE);
}

/// A row's numbers `[size]`.  A number that is none makes the scale of its group none.
template <typename Int>
void arrange_integers(const float* x, int row, int height, int size, int group, uint8_t* integers,
                      float* scales, float* sums) {
  constexpr float TOP = sizeof(Int) == 1 ? 127 : 32767;
  const size_t stride = EIGHT * sizeof(Int) * height;
  integers += EIGHT * sizeof(Int) * row;
  for (int at = row; at < size / group * height + row; at += height, x += group) {
    F32 top{};
    I32 is_none{};
    for (int i = 0; i < group; i += LANES) {
      const F32 value = load(x + i);
      top = max(top, absolute(value));
      is_none |= value != value;
    }
    const float highest = any(is_none) ? __builtin_nanf("") : max(top);
    // Numbers as small as that are nothing beside any other; by 0 they could not be divided.
    const F32 factor = splat(highest > 1e-30f ? TOP / highest : 0);
    F32 total{};
    for (int i = 0; i < group; i += LANES, integers += LANES / EIGHT * stride) {
      const I32 q = rounded_to_integers(load(x + i) * factor);
      total += to_float(q);
      store_eights<Int>(integers, stride, q);
    }
    scales[at] = highest / TOP;
    sums[at] = scales[at] * sum(total);
  }
}

/// One tile of a panel; weights of BITS bits.
template <typename Int, int BITS, int ROWS>
void multiply_integers(const native::Panels& weights, const native::Arranged& x, const uint8_t* p,
                       float* y, size_t ldy, Ahead ahead) {
  constexpr int PER_BYTE = 8 / BITS, WORDS = sizeof(Int);  // words that hold four inputs
  const uint8_t* inputs = x.integers;
  F32 results[ROWS][VECTORS] = {};
  for (int g = 0; g < weights.num_inputs / weights.group; g++) {
    ahead.ask();
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
          if (BITS == 4) bytes[v] &= 0x0f0f;
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
void linear_tile_integers(const native::LinearArgs& args, int tile, const uint8_t* p, float* y,
                          size_t ldy, Ahead ahead, float*) {
  const native::Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, MAX_ROWS_INTEGERS};
  const size_t first = tiles.first(tile), groups = first * (w.num_inputs / w.group);
  const native::Arranged& all = args.arranged;
  const native::Arranged x = {nullptr, all.integers + first * w.num_inputs * sizeof(Int),
                              all.scales + groups, all.sums + groups};
#define CASE(ROWS)                                                       \
  case ROWS:                                                             \
    return w.format == native::Format::kBits4                            \
               ? multiply_integers<Int, 4, ROWS>(w, x, p, y, ldy, ahead) \
               : multiply_integers<Int, 8, ROWS>(w, x, p, y, ldy, ahead);
  switch (tiles.height(tile)) { FOR_EACH_HEIGHT_INTEGERS(CASE) }
#undef CASE
}

#else

constexpr int MAX_ROWS_INTEGERS = 0;
template <typename Int>
void arrange_integers(const float*, int, int, int, int, uint8_t*, float*, float*) {}
template <typename Int>
void linear_tile_integers(const native::LinearArgs&, int, const uint8_t*, float*, size_t, Ahead,
                          float*) {}

#endif

}  // namespace

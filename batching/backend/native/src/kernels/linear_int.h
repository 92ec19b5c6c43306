// Products of quantized weights and inputs that are rounded to integers: the fast modes.
//
// A group's integers are multiplied and added exactly; the sum is then scaled once.  With inputs
// x = s_x q_x and weights w = s_w q_w + b_w, a group contributes
//     s_w s_x sum(q_w q_x) + b_w s_x sum(q_x)
// (as llama.cpp does with 8-bit inputs); where b_w is s_w times -center, this is
//     s_w s_x (sum(q_w q_x) - center sum(q_x))
// with integers in the parentheses.  A lane of an instruction multiplies two 16-bit or four
// 8-bit inputs instead of one float.  For normally distributed inputs in groups of 32, the rounding
// error of 16 bits is an eightieth of bfloat16's, and that of 8 bits three times bfloat16's.
#pragma once

#include "kernels.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_DOT)

/// Rows of one call: as many as fit in registers with the sums of a group.
constexpr int MAX_ROWS_INT = 6;
#define FOR_EACH_HEIGHT_INT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)

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
void pack_row_int(const float* x, int row, int height, int size, int group,
                  const native::PackedInputs& to) {
  constexpr float TOP = sizeof(Int) == 1 ? 127 : 32767;
  const size_t stride = EIGHT * sizeof(Int) * height;
  uint8_t* integers = to.integers + EIGHT * sizeof(Int) * row;
  float *scales = to.scales, *sums = to.sums, *half_sums = to.half_sums;
  int32_t *totals = to.totals, *half_totals = to.half_totals;
  int half = row;
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
    const float factor = largest > 1e-30f ? TOP / largest : 0;
    const float scale = largest / TOP;
    F32 total{};
    for (int i = 0; i < group; i += LANES, integers += LANES / EIGHT * stride) {
      const I32 q = round_to_int(load(x + i) * splat(factor));
      total += to_float(q);
      store_eights<Int>(integers, stride, q);
    }
    scales[at] = scale;
    sums[at] = scale * sum(total);
    // Integers of inputs that are not finite may be any.
    totals[at] = factor > 0 ? static_cast<int32_t>(sum(total)) : 0;
    for (int i = 0; half_sums && i < group; half += height) {
      F32 of_half{};
      for (const int end = i + native::HALF_GROUP; i < end; i += LANES)
        of_half += to_float(round_to_int(load(x + i) * splat(factor)));
      half_sums[half] = scale * sum(of_half);
      half_totals[half] = factor > 0 ? static_cast<int32_t>(sum(of_half)) : 0;
    }
  }
}

/// The weights of four inputs in each lane, or of two of them as 16-bit integers; `four` and `word`
/// say which of those loaded.
template <typename Int, native::Format FORMAT>
ALWAYS_INLINE I32 weights_of(U16Pairs loaded, int four, int word) {
  if constexpr (FORMAT == native::Format::kBits4 && sizeof(Int) == 2) {
    const U16Pairs q = loaded >> (4 * four + 8 * word);
    return (I32)(four + word == 2 ? q : q & 15);
  }
  U16Pairs bytes = loaded;
  if (has_nibbles(FORMAT)) bytes = (four ? bytes >> 4 : bytes) & 0x0f0f;
  if (FORMAT == native::Format::kMxfp4) bytes = mxfp4_codes(bytes);
  return (I32)(sizeof(Int) == 1 ? bytes : word == 0 ? bytes & 0xff : bytes >> 8);
}

/// A group's sums of products of integers.
template <typename Int, native::Format FORMAT, int ROWS>
struct IntSums {
  static constexpr int FOURS = has_nibbles(FORMAT) ? 2 : 1, WORDS = sizeof(Int);  // loaded at once
  static constexpr int INPUT_BYTES = EIGHT * sizeof(Int), WEIGHT_BYTES = EIGHT * COLUMNS / FOURS;
  // A sum of one or two rows would wait for itself, so it is kept in parts.
  static constexpr int PARTS = ROWS == 1 ? 2 * WORDS : ROWS == 2 ? 2 : 1;
  I32 parts[PARTS][ROWS][VECTORS] = {};

  /// Begin with what subtracting `center` from the weights adds to the sums.
  ALWAYS_INLINE IntSums(const int32_t* totals, int center) {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) parts[0][m][v] = splat_int(-center * totals[m]);
  }
  /// Add the products of eight inputs of each row.
  ALWAYS_INLINE void add(const uint8_t* inputs, const uint8_t* p) {
    U16Pairs loaded[VECTORS];
    for (int at = 0; at < 2 * WORDS; at++) {
      const int four = at / WORDS;
      I32 w[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        if (at % (FOURS * WORDS) == 0) loaded[v] = load_pairs(p + 4 * (four * COLUMNS + LANES * v));
        w[v] = weights_of<Int, FORMAT>(loaded[v], four % FOURS, at % WORDS);
      }
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++) {
          I32& sum = parts[at % PARTS][m][v];
          sum = dot<Int>(sum, w[v], inputs + 4 * at + INPUT_BYTES * m);
        }
    }
  }
  /// Add those of a group, and move on to what follows it.
  ALWAYS_INLINE void add_group(const uint8_t*& inputs, const uint8_t*& p, int group) {
    for (int i = 0; i < group; i += EIGHT) {
      add(inputs, p);
      inputs += INPUT_BYTES * ROWS;
      p += WEIGHT_BYTES;
    }
  }
  ALWAYS_INLINE F32 at(int m, int v) const {
    I32 sum = parts[0][m][v];
    for (int part = 1; part < PARTS; part++) sum += parts[part][m][v];
    return to_float(sum);
  }
};

/// Add the products of one tile of a panel to `results`, `[ROWS][COLUMNS]`: memory, since registers
/// have the sums of a group.
template <typename Int, native::Format FORMAT, int ROWS>
void multiply_int(const native::Panels& weights, const native::PackedInputs& x, const uint8_t* p,
                  float* results, Prefetcher prefetcher) {
  using Sums = IntSums<Int, FORMAT, ROWS>;
  const uint8_t *inputs = x.integers, *panel = p;
  p += weights.first_group();
  const bool is_biased = has_biases(weights);
  const int end = weights.num_inputs / weights.group * ROWS;
  for (int at = 0; at < end; at += ROWS) {
    prefetcher.advance();
    Sums sums(x.totals + at, is_biased ? 0 : weights.center);
    for (int i = 0; i < weights.group; i += EIGHT) {
      sums.add(inputs, p);
      inputs += Sums::INPUT_BYTES * ROWS;
      p += Sums::WEIGHT_BYTES;
    }
    const Parameters group(weights, p, factors_of(weights, panel, at / ROWS));
    p += weights.parameter_bytes();
    const auto finish = [&]<bool IS_BIASED>() __attribute__((always_inline)) {
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++) {
          float* y = results + m * COLUMNS + v * LANES;
          F32 result = fused(sums.at(m, v) * splat(x.scales[at + m]), group.scales[v], load(y));
          if (IS_BIASED) result = fused(splat(x.sums[at + m]), group.biases[v], result);
          store(y, result);
        }
    };
    is_biased ? finish.template operator()<true>() : finish.template operator()<false>();
  }
}

/// The same of groups of HALF_GROUP: two of them are scaled, and their sum by the inputs' scale.
template <typename Int, native::Format FORMAT, int ROWS>
void multiply_halves_int(const native::Panels& weights, const native::PackedInputs& x,
                         const uint8_t* p, float* results, Prefetcher prefetcher) {
  using Sums = IntSums<Int, FORMAT, ROWS>;
  constexpr int HALF = native::HALF_GROUP;
  const uint8_t *inputs = x.integers, *panel = p;
  p += weights.first_group();
  const bool is_biased = has_biases(weights);
  F32 scaled[ROWS][VECTORS];
  const auto add = [&]<bool IS_SECOND>(int g) __attribute__((always_inline)) {
    prefetcher.advance();
    Sums sums(x.half_totals + g * ROWS, is_biased ? 0 : weights.center);
    sums.add_group(inputs, p, HALF);
    const Parameters group(weights, p, factors_of(weights, panel, g));
    p += weights.parameter_bytes();
    const float *scales = x.scales + g / 2 * ROWS, *half_sums = x.half_sums + g * ROWS;
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) {
        float* y = results + m * COLUMNS + v * LANES;
        const F32 before = IS_SECOND ? scaled[m][v] : F32{};
        scaled[m][v] = fused(sums.at(m, v), group.scales[v], before);
        if (is_biased) store(y, fused(splat(half_sums[m]), group.biases[v], load(y)));
        if (IS_SECOND) store(y, fused(scaled[m][v], splat(scales[m]), load(y)));
      }
  };
  for (int g = 0; g < weights.num_inputs / HALF; g += 2) {
    add.template operator()<false>(g);
    add.template operator()<true>(g + 1);
  }
}

/// Groups of either size have a function of their own: in one, the compiler would not inline them.
template <typename Int, bool HAS_HALVES>
void linear_tile_int(const native::LinearArgs& args, int tile, int, const uint8_t* p, float* y,
                     size_t ldy, Prefetcher prefetcher, float*) {
  const native::Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, MAX_ROWS_INT};
  const size_t first = tiles.first(tile), groups = first * (w.num_inputs / w.input_group());
  const size_t halves = first * (w.num_inputs / native::HALF_GROUP);
  const native::PackedInputs& all = args.packed;
  const native::PackedInputs x = {
      nullptr,
      all.integers + first * w.num_inputs * sizeof(Int),
      all.scales + groups,
      all.sums + groups,
      all.totals + groups,
      HAS_HALVES ? all.half_sums + halves : nullptr,
      HAS_HALVES ? all.half_totals + halves : nullptr,
  };
  const int height = tiles.height(tile);
  alignas(64) float results[MAX_ROWS_INT * COLUMNS];
  for (int i = 0; i < height * COLUMNS; i += LANES) store(results + i, F32{});
  // The lines are there when the sums are: else each store waits, once outputs exceed the caches.
  for (int m = 0; m < height; m++)
    for (int v = 0; v < VECTORS; v++) prefetch_to_write(y + m * ldy + v * LANES);
  const auto run = [&]<native::Format FORMAT>() {
#define CASE(ROWS)                                                                 \
  case ROWS:                                                                       \
    if constexpr (HAS_HALVES)                                                      \
      return multiply_halves_int<Int, FORMAT, ROWS>(w, x, p, results, prefetcher); \
    else                                                                           \
      return multiply_int<Int, FORMAT, ROWS>(w, x, p, results, prefetcher);
    switch (height) { FOR_EACH_HEIGHT_INT(CASE) }
#undef CASE
  };
  switch (w.format) {
    case native::Format::kBits8: run.template operator()<native::Format::kBits8>(); break;
    case native::Format::kBits4: run.template operator()<native::Format::kBits4>(); break;
    default: run.template operator()<native::Format::kMxfp4>();
  }
  for (int m = 0; m < height; m++)
    for (int v = 0; v < VECTORS; v++)
      store(y + m * ldy + v * LANES, load(results + m * COLUMNS + v * LANES));
}

#else

constexpr int MAX_ROWS_INT = 0;
template <typename Int>
void pack_row_int(const float*, int, int, int, int, const native::PackedInputs&) {}
template <typename Int, bool HAS_HALVES>
void linear_tile_int(const native::LinearArgs&, int, int, const uint8_t*, float*, size_t,
                     Prefetcher, float*) {}

#endif

}  // namespace

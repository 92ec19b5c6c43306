// Products of quantized weights and inputs that are rounded to integers: the fast modes.
//
// A group's integers are multiplied and added exactly; the sum is then scaled once.  With inputs
// x = s_x q_x and weights w = s_w q_w + b_w, a group contributes
//     s_w s_x sum(q_w q_x) + b_w s_x sum(q_x)
// (as llama.cpp does with 8-bit inputs); where b_w is s_w times -center, this is
//     s_w s_x (sum(q_w q_x) - center sum(q_x))
// with integers in the parentheses.  A lane of an instruction multiplies two 16-bit or four
// 8-bit inputs instead of one float.  For normally distributed inputs, the rounding error of 16 bits
// in groups of 32 is an eightieth of bfloat16's, and that of 8 bits in groups of 16 is 2.5 times it.
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

/// Integers of successive inputs of one scale; `shifts` as in Panels, from these inputs on.
template <typename Int>
struct RoundedInputs {
  static constexpr float TOP = sizeof(Int) == 1 ? 127 : 32767;
  const float* x;
  const uint8_t* shifts;
  float scale, factor;

  /// A NaN makes the scale NaN.
  ALWAYS_INLINE RoundedInputs(const float* from, const uint8_t* by, int size) : x(from), shifts(by) {
    F32 top{};
    I32 is_nan{};
    for (int i = 0; i < size; i += LANES) {
      const F32 value = shifted(i);
      top = max(top, absolute(value));
      is_nan |= value != value;
    }
    const float largest = any(is_nan) ? __builtin_nanf("") : max(top);
    // Avoids a division by 0; inputs that small are negligible.
    factor = largest > 1e-30f ? TOP / largest : 0;
    scale = largest / TOP;
  }
  ALWAYS_INLINE I32 shift(int i) const { return shifts ? load_bytes(shifts + i) : I32{}; }
  ALWAYS_INLINE F32 shifted(int i) const {
    return load(x + i) * (F32)((127 - shift(i)) << 23);
  }
  ALWAYS_INLINE I32 at(int i) const { return round_to_int(shifted(i) * splat(factor)); }
  /// The sum of inputs [first, next), in units of the scale.
  ALWAYS_INLINE float total(int first, int next) const {
    F32 sums{};
    for (int i = first; i < next; i += LANES) sums += to_float(at(i) << shift(i));
    return sum(sums);
  }
  /// Integers of inputs that are not finite may be any.
  ALWAYS_INLINE int32_t whole(float total) const {
    return factor > 0 ? static_cast<int32_t>(total) : 0;
  }
};

/// Pack a row `[size]`.
void pack_row_int16(const float* x, int row, int height, int size, int group,
                    const native::PackedInputs& to) {
  const size_t stride = EIGHT * sizeof(int16_t) * height;
  uint8_t* integers = to.integers + EIGHT * sizeof(int16_t) * row;
  int half = row;
  for (int at = row; at < size / group * height + row; at += height, x += group) {
    const RoundedInputs<int16_t> inputs(x, nullptr, group);
    for (int i = 0; i < group; i += LANES, integers += LANES / EIGHT * stride)
      store_eights<int16_t>(integers, stride, inputs.at(i));
    const float total = inputs.total(0, group);
    to.scales[at] = inputs.scale;
    to.sums[at] = inputs.scale * total;
    to.totals[at] = inputs.whole(total);
    for (int i = 0; to.half_sums && i < group; i += native::HALF_GROUP, half += height) {
      const float of_half = inputs.total(i, i + native::HALF_GROUP);
      to.half_sums[half] = inputs.scale * of_half;
      to.half_totals[half] = inputs.whole(of_half);
    }
  }
}

void pack_row_int8(const float* x, const uint8_t* shifts, int row, int height, int size, int group,
                   const native::PackedInputs& to) {
  constexpr int GROUP = native::INT8_GROUP;
  const size_t stride = EIGHT * height;
  uint8_t* integers = to.integers + EIGHT * row;
  int part = row;
  for (int at = row; at < size / group * height + row; at += height) {
    float group_total = 0;
    for (int end = part + group / GROUP * height; part < end; part += height, x += GROUP) {
      const RoundedInputs<int8_t> inputs(x, shifts, GROUP);
      for (int i = 0; i < GROUP; i += LANES, integers += LANES / EIGHT * stride)
        store_eights<int8_t>(integers, stride, inputs.at(i));
      const float total = inputs.total(0, GROUP), scaled = inputs.scale * total;
      to.scales[part] = inputs.scale;
      to.totals[part] = inputs.whole(total);
      if (to.half_sums) to.half_sums[part] = scaled;
      group_total += scaled;
      if (shifts) shifts += GROUP;
    }
    to.sums[at] = group_total;
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

/// The weights of four inputs in each lane, shifted.
template <native::Format FORMAT>
ALWAYS_INLINE I32 shifted_weights_of(U16Pairs loaded, int four,
                                     const native::ShiftControl& control) {
  if (FORMAT == native::Format::kMxfp4)
    return shift_bytes(weights_of<int8_t, FORMAT>(loaded, four, 0), control.begins[four]);
  return shift_bytes((I32)loaded, control.begins[four]) &
         splat_int(static_cast<int32_t>(control.masks[four]));
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
  /// Add the products of eight inputs of each row, with weights that are shifted if it is said how.
  template <bool IS_SHIFTED = false>
  ALWAYS_INLINE void add(const uint8_t* inputs, const uint8_t* p,
                         const native::ShiftControl* control = nullptr) {
    U16Pairs loaded[VECTORS];
    for (int at = 0; at < 2 * WORDS; at++) {
      const int four = at / WORDS;
      I32 w[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        if (at % (FOURS * WORDS) == 0) loaded[v] = load_pairs(p + 4 * (four * COLUMNS + LANES * v));
        if constexpr (IS_SHIFTED)
          w[v] = shifted_weights_of<FORMAT>(loaded[v], four, *control);
        else
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
template <native::Format FORMAT, int ROWS>
void multiply_int16(const native::Panels& weights, const native::PackedInputs& x, const uint8_t* p,
                  float* results, Prefetcher prefetcher) {
  using Sums = IntSums<int16_t, FORMAT, ROWS>;
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
template <native::Format FORMAT, int ROWS>
void multiply_halves_int16(const native::Panels& weights, const native::PackedInputs& x,
                           const uint8_t* p, float* results, Prefetcher prefetcher) {
  using Sums = IntSums<int16_t, FORMAT, ROWS>;
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

/// The same of inputs of 8 bits: the sums of INT8_GROUP inputs are scaled, and the sum of these by
/// the scale of the group of weights.
template <native::Format FORMAT, bool IS_SHIFTED, int ROWS>
void multiply_int8(const native::Panels& weights, const native::PackedInputs& x, const uint8_t* p,
                   float* results, Prefetcher prefetcher) {
  using Sums = IntSums<int8_t, FORMAT, ROWS>;
  const uint8_t *inputs = x.integers, *panel = p;
  const native::ShiftControl* control = weights.controls;
  p += weights.first_group();
  const bool is_biased = has_biases(weights);
  const int num_groups = weights.num_inputs / weights.group;
  const float* group_sums = weights.has_halves() ? x.half_sums : x.sums;
  int at = 0;
  for (int g = 0; g < num_groups; g++) {
    prefetcher.advance();
    F32 scaled[ROWS][VECTORS] = {};
    for (int first = 0; first < weights.group; first += native::INT8_GROUP, at += ROWS) {
      Sums sums(x.totals + at, is_biased ? 0 : weights.center);
      for (int i = 0; i < native::INT8_GROUP; i += EIGHT) {
        sums.template add<IS_SHIFTED>(inputs, p, control);
        inputs += Sums::INPUT_BYTES * ROWS;
        p += Sums::WEIGHT_BYTES;
        if (IS_SHIFTED) control++;
      }
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++)
          scaled[m][v] = fused(sums.at(m, v), splat(x.scales[at + m]), scaled[m][v]);
    }
    const Parameters group(weights, p, factors_of(weights, panel, g));
    p += weights.parameter_bytes();
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) {
        float* y = results + m * COLUMNS + v * LANES;
        F32 result = fused(scaled[m][v], group.scales[v], load(y));
        if (is_biased) result = fused(splat(group_sums[g * ROWS + m]), group.biases[v], result);
        store(y, result);
      }
  }
}

/// Groups of either size have a function of their own: in one, the compiler would not inline them.
template <typename Int, bool HAS_HALVES, native::Format FORMAT, int ROWS>
ALWAYS_INLINE void multiply_ints(const native::Panels& weights, const native::PackedInputs& x,
                                 const uint8_t* p, float* results, Prefetcher prefetcher) {
  constexpr bool CAN_SHIFT = SHIFTS_WEIGHTS && has_nibbles(FORMAT);
  if constexpr (sizeof(Int) == 1)
    weights.shifts ? multiply_int8<FORMAT, CAN_SHIFT, ROWS>(weights, x, p, results, prefetcher)
                   : multiply_int8<FORMAT, false, ROWS>(weights, x, p, results, prefetcher);
  else if constexpr (HAS_HALVES)
    multiply_halves_int16<FORMAT, ROWS>(weights, x, p, results, prefetcher);
  else
    multiply_int16<FORMAT, ROWS>(weights, x, p, results, prefetcher);
}

template <typename Int, bool HAS_HALVES>
void linear_tile_int(const native::LinearArgs& args, int tile, int, const uint8_t* p, float* y,
                     size_t ldy, Prefetcher prefetcher, float*) {
  const native::Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, MAX_ROWS_INT};
  const size_t first = tiles.first(tile), groups = first * (w.num_inputs / w.input_group());
  const size_t scales = sizeof(Int) == 1 ? first * (w.num_inputs / native::INT8_GROUP) : groups;
  const size_t halves = first * (w.num_inputs / native::HALF_GROUP);
  const native::PackedInputs& all = args.packed;
  const native::PackedInputs x = {
      nullptr,
      all.integers + first * w.num_inputs * sizeof(Int),
      all.scales + scales,
      all.sums + groups,
      all.totals + scales,
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
#define CASE(ROWS) \
  case ROWS:       \
    return multiply_ints<Int, HAS_HALVES, FORMAT, ROWS>(w, x, p, results, prefetcher);
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
void pack_row_int16(const float*, int, int, int, int, const native::PackedInputs&) {}
void pack_row_int8(const float*, const uint8_t*, int, int, int, int, const native::PackedInputs&) {}
template <typename Int, bool HAS_HALVES>
void linear_tile_int(const native::LinearArgs&, int, int, const uint8_t*, float*, size_t,
                     Prefetcher, float*) {}

#endif

}  // namespace

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

/// How inputs of one scale are rounded.
template <typename Int>
struct Rounding {
  static constexpr float TOP = sizeof(Int) == 1 ? 127 : 32767;
  float scale, factor;

  /// `top` are the largest of their absolute values, as bits: these are in the order of the values,
  /// with NaN, which makes the scale NaN, after all others.
  ALWAYS_INLINE explicit Rounding(I32 top) {
    const int32_t bits = max(top);
    float largest;
    __builtin_memcpy(&largest, &bits, sizeof(bits));
    // Avoids a division by 0; inputs that small are negligible.
    factor = largest > 1e-30f ? TOP / largest : 0;
    scale = largest * (1 / TOP);
  }
  /// Those of inputs that are not finite may be any.
  ALWAYS_INLINE I32 integers(F32 x) const { return round_to_int(x * splat(factor)); }
};

/// Stores integers eight at a time, `stride` bytes apart.
template <typename Int>
struct IntegerStore {
  uint8_t* to;
  size_t stride;

  ALWAYS_INLINE void add(I32 q) {
    store_eights<Int>(to, stride, q);
    to += LANES / EIGHT * stride;
  }
};

/// Pack a row `[size]`.
void pack_row_int16(const float* x, int row, int height, int size, int group,
                    const native::PackedInputs& to) {
  constexpr int HALF = native::HALF_GROUP, INPUT_BYTES = EIGHT * sizeof(int16_t);
  IntegerStore<int16_t> integers{to.integers + INPUT_BYTES * row,
                                 static_cast<size_t>(INPUT_BYTES) * height};
  int half = row;
  for (int at = row; at < size / group * height + row; at += height, x += group) {
    I32 top{};
    for (int i = 0; i < group; i += LANES) top = max(top, (I32)absolute(load(x + i)));
    const Rounding<int16_t> rounding(top);
    int32_t total = 0;
    for (int first = 0; first < group; first += HALF, half += height) {
      I32 sums{};
      for (int i = first; i < first + HALF; i += LANES) {
        const I32 q = rounding.integers(load(x + i));
        integers.add(q);
        sums += q;
      }
      const int32_t of_half = sum(sums);
      total += of_half;
      if (!to.half_sums) continue;
      to.half_sums[half] = rounding.scale * of_half;
      to.half_totals[half] = of_half;
    }
    to.scales[at] = rounding.scale;
    to.sums[at] = rounding.scale * total;
    to.totals[at] = total;
  }
}

void pack_row_int8(const float* x, const uint8_t* shifts, int row, int height, int size, int group,
                   const native::PackedInputs& to) {
  constexpr int GROUP = native::INT8_GROUP, SIZE = GROUP / LANES;
  IntegerStore<int8_t> integers{to.integers + EIGHT * row, static_cast<size_t>(EIGHT) * height};
  int part = row;
  for (int at = row; at < size / group * height + row; at += height) {
    float group_total = 0;
    for (int end = part + group / GROUP * height; part < end; part += height, x += GROUP) {
      F32 values[SIZE];
      I32 by[SIZE], top{}, sums{};
      for (int i = 0; i < SIZE; i++) {
        by[i] = shifts ? load_bytes(shifts + LANES * i) : I32{};
        values[i] = load(x + LANES * i) * (F32)((127 - by[i]) << 23);
        top = max(top, (I32)absolute(values[i]));
      }
      const Rounding<int8_t> rounding(top);
      for (int i = 0; i < SIZE; i++) {
        const I32 q = rounding.integers(values[i]);
        integers.add(q);
        sums += q << by[i];
      }
      const int32_t total = sum(sums);
      const float scaled = rounding.scale * total;
      to.scales[part] = rounding.scale;
      to.totals[part] = total;
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

/// Weights of 4 bits, shifted: `[weight][shift]`.
template <native::Format FORMAT>
struct ShiftedWeights {
  uint8_t table[16][native::MAX_SHIFT + 1];

  constexpr ShiftedWeights() : table() {
    for (int q = 0; q < 16; q++)
      for (int by = 0; by <= native::MAX_SHIFT; by++)
        table[q][by] = (FORMAT == native::Format::kMxfp4 ? native::MXFP4_CODES[q] : q) << by;
  }
  /// The weights of four inputs in each lane, of those loaded, shifted by as much as these inputs.
  template <int ROWS>
  ALWAYS_INLINE I32 at(U16Pairs loaded, int four, const uint8_t* shifts) const {
    int32_t word;
    __builtin_memcpy(&word, shifts, sizeof(word));
    const I32 q = (I32)(four ? loaded >> 2 : loaded << 2) & 0x3c3c3c3c, by = splat_int(word);
    // For "or" the compiler would join both operations: with many rows, the port of what that gives
    // has no time left (Zen 4).
    return look_up(*reinterpret_cast<const I32*>(table), ROWS > 2 ? q + by : q | by);
  }
};

/// A group's sums of products of integers.
template <typename Int, native::Format FORMAT, int ROWS>
struct IntSums {
  static constexpr ShiftedWeights<FORMAT> SHIFTED_WEIGHTS{};
  static constexpr int FOURS = has_nibbles(FORMAT) ? 2 : 1, WORDS = sizeof(Int);  // loaded at once
  static constexpr int INPUT_BYTES = EIGHT * sizeof(Int), WEIGHT_BYTES = EIGHT * COLUMNS / FOURS;
  // A sum of one or two rows would wait for itself, so it is kept in parts.
  static constexpr int PARTS = ROWS == 1 ? 2 * WORDS : ROWS == 2 ? 2 : 1;
  I32 parts[PARTS][ROWS][VECTORS] = {};

  ALWAYS_INLINE explicit IntSums(const int32_t* begins) {
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) parts[0][m][v] = splat_int(begins[m]);
  }
  /// Add the products of eight inputs of each row, with weights that are shifted if it is said how.
  template <bool IS_SHIFTED = false>
  ALWAYS_INLINE void add(const uint8_t* inputs, const uint8_t* p, const uint8_t* shifts = nullptr) {
    U16Pairs loaded[VECTORS];
    for (int at = 0; at < 2 * WORDS; at++) {
      const int four = at / WORDS;
      I32 w[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        if (at % (FOURS * WORDS) == 0) loaded[v] = load_pairs(p + 4 * (four * COLUMNS + LANES * v));
        if constexpr (IS_SHIFTED)
          w[v] = SHIFTED_WEIGHTS.template at<ROWS>(loaded[v], four, shifts + 4 * four);
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
                    const int32_t* begins, float* results, Prefetcher prefetcher) {
  using Sums = IntSums<int16_t, FORMAT, ROWS>;
  const uint8_t *inputs = x.integers, *panel = p;
  p += weights.first_group();
  const bool is_biased = has_biases(weights);
  const int end = weights.num_inputs / weights.group * ROWS;
  for (int at = 0; at < end; at += ROWS) {
    prefetcher.advance();
    Sums sums(begins + at);
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
                           const uint8_t* p, const int32_t* begins, float* results,
                           Prefetcher prefetcher) {
  using Sums = IntSums<int16_t, FORMAT, ROWS>;
  constexpr int HALF = native::HALF_GROUP;
  const uint8_t *inputs = x.integers, *panel = p;
  p += weights.first_group();
  const bool is_biased = has_biases(weights);
  F32 scaled[ROWS][VECTORS];
  const auto add = [&]<bool IS_SECOND>(int g) __attribute__((always_inline)) {
    prefetcher.advance();
    Sums sums(begins + g * ROWS);
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
/// the scale of the group of weights, of GROUP inputs if that is not 0.
template <native::Format FORMAT, bool IS_SHIFTED, int GROUP, int ROWS>
void multiply_int8(const native::Panels& weights, const native::PackedInputs& x, const uint8_t* p,
                   const int32_t* begins, float* results, Prefetcher prefetcher) {
  using Sums = IntSums<int8_t, FORMAT, ROWS>;
  const uint8_t *inputs = x.integers, *panel = p;
  const uint8_t* shifts = weights.shifts;
  p += weights.first_group();
  const bool is_biased = has_biases(weights);
  const int num_groups = weights.num_inputs / weights.group;
  const float* group_sums = weights.has_halves() ? x.half_sums : x.sums;
  const float* scales = x.scales;
  for (int g = 0; g < num_groups; g++) {
    prefetcher.advance();
    F32 scaled[ROWS][VECTORS] = {};
    const auto add = [&]() __attribute__((always_inline)) {
      Sums sums(begins);
      for (int i = 0; i < native::INT8_GROUP; i += EIGHT) {
        sums.template add<IS_SHIFTED>(inputs, p, shifts);
        inputs += Sums::INPUT_BYTES * ROWS;
        p += Sums::WEIGHT_BYTES;
        if (IS_SHIFTED) shifts += EIGHT;
      }
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++)
          scaled[m][v] = fused(sums.at(m, v), splat(scales[m]), scaled[m][v]);
      begins += ROWS;
      scales += ROWS;
    };
    const int size = GROUP ? GROUP : weights.group;
#pragma GCC unroll 2
    for (int i = 0; i < size; i += native::INT8_GROUP) add();
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
                                 const uint8_t* p, const int32_t* begins, float* results,
                                 Prefetcher prefetcher) {
  if constexpr (sizeof(Int) == 1) {
    const auto multiply = [&]<int GROUP>() __attribute__((always_inline)) {
      constexpr bool CAN_SHIFT = SHIFTS_WEIGHTS && has_nibbles(FORMAT);
      weights.shifts
          ? multiply_int8<FORMAT, CAN_SHIFT, GROUP, ROWS>(weights, x, p, begins, results, prefetcher)
          : multiply_int8<FORMAT, false, GROUP, ROWS>(weights, x, p, begins, results, prefetcher);
    };
    // The loop over the usual group has no branch.
    weights.group == 32 ? multiply.template operator()<32>() : multiply.template operator()<0>();
  } else if constexpr (HAS_HALVES) {
    multiply_halves_int16<FORMAT, ROWS>(weights, x, p, begins, results, prefetcher);
  } else {
    multiply_int16<FORMAT, ROWS>(weights, x, p, begins, results, prefetcher);
  }
}

/// What the sums of a tile begin with, so that the center is subtracted from the weights.
template <bool USES_HALVES>
const int32_t* begin_sums(const native::Panels& weights, const native::PackedInputs& x, int height,
                          int32_t* begins) {
  const int center = has_biases(weights) ? 0 : weights.center;
  const int group = USES_HALVES ? native::HALF_GROUP : weights.scale_group();
  const int32_t* totals = USES_HALVES ? x.half_totals : x.totals;
  const int size = weights.num_inputs / group * height;
  for (int i = 0; i < size; i++) begins[i] = -center * totals[i];
  return begins;
}

template <typename Int, bool HAS_HALVES>
void linear_tile_int(const native::LinearArgs& args, int tile, int, const uint8_t* p, float* y,
                     size_t ldy, Prefetcher prefetcher, float* scratch) {
  const native::Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, MAX_ROWS_INT};
  const native::PackedInputs x = args.packed.from_row(w, tiles.first(tile));
  const int height = tiles.height(tile);
  const int32_t* begins = begin_sums<HAS_HALVES && sizeof(Int) == 2>(
      w, x, height, reinterpret_cast<int32_t*>(scratch));
  alignas(64) float results[MAX_ROWS_INT * COLUMNS];
  for (int i = 0; i < height * COLUMNS; i += LANES) store(results + i, F32{});
  // The lines are there when the sums are: else each store waits, once outputs exceed the caches.
  for (int m = 0; m < height; m++)
    for (int v = 0; v < VECTORS; v++) prefetch_to_write(y + m * ldy + v * LANES);
  const auto run = [&]<native::Format FORMAT>() {
#define CASE(ROWS) \
  case ROWS:       \
    return multiply_ints<Int, HAS_HALVES, FORMAT, ROWS>(w, x, p, begins, results, prefetcher);
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

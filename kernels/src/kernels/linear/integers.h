// Inputs rounded to integers, and the integers of quantized weights: the fast modes.
//
// A group's integers are multiplied and added exactly; the sum is then scaled once.  With inputs
// x = s_x q_x and weights w = s_w q_w + b_w, a group contributes
//     s_w s_x sum(q_w q_x) + b_w s_x sum(q_x)
// (as llama.cpp does with 8-bit inputs); where b_w is s_w times -center, this is
//     s_w s_x (sum(q_w q_x) - center sum(q_x))
// with integers in the parentheses.  For normally distributed inputs, the rounding error of 16 bits
// in groups of 32 is an eightieth of bfloat16's, and that of 8 bits in groups of 16 is 2.5 times it.
#pragma once

#include "kernels.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_DOT)

/// Adjacent inputs of a row.
constexpr int EIGHT = 8;

#if !defined(HAS_VNNI)
/// Rows of one call: enough that unpacking is little, and that their sums stay in the L1 cache.
constexpr int MAX_ROWS_INT = 24;
#endif

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
  /// with infinity and NaN, which make the scale NaN, after all others.
  ALWAYS_INLINE explicit Rounding(I32 top) {
    const int32_t bits = max(top);
    float largest;
    __builtin_memcpy(&largest, &bits, sizeof(bits));
    // Avoids a division by 0; inputs that small are negligible.
    factor = largest > 1e-30f ? TOP / largest : 0;
    scale = largest < __builtin_inff() ? largest * (1 / TOP) : __builtin_nanf("");
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

/// Pack a row `[size]` whose groups have a scale: `pack_half(x, rounding)` packs HALF_GROUP inputs and
/// returns the sum of what the scale multiplies.
template <typename GroupRounding, typename PackHalf>
ALWAYS_INLINE void pack_groups(const float* x, int row, int height, int size, int group,
                               const native::PackedInputs& to, PackHalf pack_half) {
  int half = row;
  for (int at = row; at < size / group * height + row; at += height) {
    I32 top{};
    for (int i = 0; i < group; i += LANES) top = max(top, (I32)absolute(load(x + i)));
    const GroupRounding rounding(top);
    int32_t total = 0;
    for (const float* end = x + group; x < end; x += native::HALF_GROUP, half += height) {
      const int32_t of_half = pack_half(x, rounding);
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

void pack_row_int16(const float* x, int row, int height, int size, int group,
                    const native::PackedInputs& to) {
  constexpr int INPUT_BYTES = EIGHT * sizeof(int16_t);
  IntegerStore<int16_t> integers{to.integers + INPUT_BYTES * row,
                                 static_cast<size_t>(INPUT_BYTES) * height};
  const auto pack_half = [&](const float* inputs, const Rounding<int16_t>& rounding)
                             __attribute__((always_inline)) {
    I32 sums{};
    for (int i = 0; i < native::HALF_GROUP; i += LANES) {
      const I32 q = rounding.integers(load(inputs + i));
      integers.add(q);
      sums += q;
    }
    return sum(sums);
  };
  pack_groups<Rounding<int16_t>>(x, row, height, size, group, to, pack_half);
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
        by[i] = load_bytes(shifts + LANES * i);
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
      shifts += GROUP;
    }
    to.sums[at] = group_total;
  }
}

/// Copy the results of a tile, `[height][COLUMNS]`.
ALWAYS_INLINE void copy_rows(const float* results, int height, float* y, size_t ldy) {
  for (int m = 0; m < height; m++)
    for (int v = 0; v < VECTORS; v++)
      store(y + m * ldy + v * LANES, load(results + m * COLUMNS + v * LANES));
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

#else

void pack_row_int16(const float*, int, int, int, int, const native::PackedInputs&) {}
void pack_row_int8(const float*, const uint8_t*, int, int, int, int, const native::PackedInputs&) {}

#endif

}  // namespace

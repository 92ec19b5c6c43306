// Products in bfloat16 by a matrix unit, Intel's AMX: inputs and dequantized weights are rounded, and
// their products added in float32.
//
// What rounds a weight is most of the work of few rows.  Weights of 4 and 8 bits are therefore scaled in
// float16, the bits of which are those of bfloat16 once they are shifted, but for a factor of
// 2^BFLOAT16_EXPONENT, by which the inputs are larger instead.
#pragma once

#include "kernels.h"
#include "kernels/linear/groups.h"
#include "kernels/matrix_unit.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_AMX)

/// Rows of a call, for which weights are unpacked once.
constexpr int MAX_ROWS_AMX = 256;
/// Those of a tile, whose inputs are to stay in the L2 cache.
constexpr int MAX_INPUT_BYTES = 3 << 19, MIN_MAX_ROWS_AMX = 64;
ALWAYS_INLINE int max_rows_amx(const Panels& weights) {
  const int fitting = MAX_INPUT_BYTES / (2 * weights.num_inputs);
  if (fitting > MAX_ROWS_AMX) return MAX_ROWS_AMX;
  return fitting < MIN_MAX_ROWS_AMX ? MIN_MAX_ROWS_AMX : fitting / (2 * UNIT_ROWS) * 2 * UNIT_ROWS;
}
/// Inputs whose weights are unpacked together: the L1 cache has space for them and their inputs.
constexpr int MAX_UNPACKED = 256;
// What is read beyond the inputs of a last tile, see multiply_rows_amx.
static_assert(native::UNIT_OVERREAD >= (UNIT_ROWS - 1) * 2 * UNIT_INPUTS);

/// Pack a row `[size]`, times `factor`; see PackedInputs.
void pack_row_bf16(const float* x, float factor, int row, int height, int size,
                   const native::PackedInputs& to) {
  uint8_t* p = to.integers + 2 * UNIT_INPUTS * row;
  // 0, 2, 1, 3 of each four.
  const __m512i order = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int i = 0; i < size; i += UNIT_INPUTS, p += 2 * UNIT_INPUTS * height) {
    const F32 low = load(x + i) * splat(factor), high = load(x + i + LANES) * splat(factor);
    const auto rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    _mm512_storeu_si512(p, _mm512_shuffle_epi8(rounded, order));
  }
}

/// float16 numbers, each twice.
ALWAYS_INLINE Halves twice(F32 numbers) {
  const I32 halves = (I32)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)numbers, _MM_FROUND_TO_NEAREST_INT));
  return (Halves)(halves | halves << 16);
}

/// Those of float16 as bfloat16 that are 2^-BFLOAT16_EXPONENT as large: the bits of its exponent and of
/// its mantissa are where bfloat16 has them once they are shifted by three.  Rounded to nearest, ties
/// away from zero.
ALWAYS_INLINE I32 as_bf16(Halves numbers) {
  const __m512i rounded = _mm512_mulhrs_epi16((__m512i)numbers, _mm512_set1_epi16(1 << 12));
  return (I32)_mm512_and_si512(rounded, _mm512_set1_epi16(static_cast<short>(0x8fff)));
}

/// Dequantizes, or copies, weights of UNIT_INPUTS inputs and the columns of a panel for the unit:
/// `[vector][input / 2][column][2]`, inputs in the order in which they are packed, times
/// 2^(Panels::exponent - BFLOAT16_EXPONENT).
template <Format FORMAT>
class Unpacker {
 public:
  ALWAYS_INLINE Unpacker(const Panels& weights, const uint8_t* panel, Prefetcher prefetcher)
      : weights_(weights),
        panel_(panel),
        p_(panel + weights.first_group()),
        prefetcher_(prefetcher),
        has_biases_(has_biases(weights)) {
    if constexpr (has_nibbles(FORMAT)) {
      alignas(LANES) uint8_t nibbles[LANES];
      for (int i = 0; i < LANES; i++) nibbles[i] = static_cast<uint8_t>(i);
      const F32 codes = code_of<FORMAT>(load_bytes(nibbles), weights.center);
      // Integers of so few bits are in the upper bytes.
      const __m256i halves = _mm512_cvtps_ph((__m512)codes, _MM_FROUND_TO_NEAREST_INT);
      const __m128i bytes = _mm256_cvtepi16_epi8(_mm256_srli_epi16(halves, 8));
      table_ = _mm512_broadcast_i32x4(bytes);
    }
  }

  ALWAYS_INLINE void unpack(uint16_t* to) {
    if constexpr (FORMAT == Format::kBfloat16) {
      prefetcher_.advance();
      for (int i = 0; i < UNIT_INPUTS; i += 4, p_ += 4 * COLUMNS * sizeof(uint16_t))
        for (int pair = 0; pair < 2; pair++, to += 2 * LANES)
          for (int v = 0; v < VECTORS; v++) {
            const auto* row = reinterpret_cast<const uint16_t*>(p_) + pair * COLUMNS + v * LANES;
            const I32 both = load_halves(row) | load_halves(row + 2 * COLUMNS) << 16;
            *reinterpret_cast<I32*>(to + v * UNIT_INPUTS * LANES) = both;
          }
    } else {
      const int part = weights_.group < UNIT_INPUTS ? weights_.group : UNIT_INPUTS;
      for (int first = 0; first < UNIT_INPUTS; first += part, to += part * LANES) {
        if (left_ == 0) begin_group();
        for (int v = 0; v < VECTORS; v++)
          has_biases_ ? unpack_vector<true>(v, part, to + v * UNIT_INPUTS * LANES)
                      : unpack_vector<false>(v, part, to + v * UNIT_INPUTS * LANES);
        p_ += part * COLUMNS / PER_BYTE;
        left_ -= part;
        if (left_ == 0) p_ += weights_.parameter_bytes(), group_++;
      }
    }
  }

 private:
  static constexpr int PER_BYTE = has_nibbles(FORMAT) ? 2 : 1;

  ALWAYS_INLINE void begin_group() {
    prefetcher_.advance();
    left_ = weights_.group;
    const uint8_t* parameters = p_ + weights_.group * COLUMNS / PER_BYTE;
    const Parameters group(weights_, parameters, factors_of(weights_, panel_, group_));
    const F32 factor = (F32)splat_int((127 + weights_.exponent) << 23);
    for (int v = 0; v < VECTORS; v++) {
      scales_[v] = twice(group.scales[v] * factor);
      const F32 bias = fused(group.scales[v], splat(weights_.center), group.biases[v]);
      if (has_biases_) biases_[v] = twice(bias * factor);
    }
  }

  /// The codes of two inputs of each column, from the bytes of four inputs or of twice as many.
  template <int PAIR>
  ALWAYS_INLINE Halves codes(__m512i bytes) const {
    if constexpr (PER_BYTE == 2) {
      // Where the lower byte is zero.  Bits of an index before the last four are of another weight.
      const __m512i q = PAIR == 0   ? _mm512_slli_epi16(bytes, 8)
                        : PAIR == 1 ? bytes
                        : PAIR == 2 ? _mm512_slli_epi16(bytes, 4)
                                    : _mm512_srli_epi16(bytes, 4);
      return (Halves)_mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaa, q, table_);
    }
    const __m512i q = PAIR ? _mm512_srli_epi16(bytes, 8)
                           : _mm512_and_si512(bytes, _mm512_set1_epi16(255));
    const auto center = static_cast<short>(weights_.center);
    return to_halves(_mm512_sub_epi16(q, _mm512_set1_epi16(center)));
  }

  /// Some inputs of one vector of columns.
  template <bool HAS_BIASES>
  ALWAYS_INLINE void unpack_vector(int v, int num_inputs, uint16_t* to) const {
    const uint8_t* p = p_ + 4 * v * LANES;
    const auto put = [&]<int PAIR>(__m512i bytes) __attribute__((always_inline)) {
      const Halves q = codes<PAIR>(bytes);
      const Halves w = HAS_BIASES ? fused(q, scales_[v], biases_[v]) : product(q, scales_[v]);
      *reinterpret_cast<I32*>(to + PAIR * 2 * LANES) = as_bf16(w);
    };
    for (int i = 0; i < num_inputs; i += 4 * PER_BYTE, p += 4 * COLUMNS, to += 4 * PER_BYTE * LANES) {
      const __m512i bytes = _mm512_loadu_si512(p);
      put.template operator()<0>(bytes);
      put.template operator()<1>(bytes);
      if constexpr (PER_BYTE == 1) continue;
      put.template operator()<2>(bytes);
      put.template operator()<3>(bytes);
    }
  }

  const Panels& weights_;
  const uint8_t *panel_, *p_;
  Prefetcher prefetcher_;
  bool has_biases_;
  int left_ = 0, group_ = 0;  // inputs of a group, and which it is
  __m512i table_;
  Halves scales_[VECTORS], biases_[VECTORS];
};

/// Numbers of the weights of UNIT_INPUTS inputs.
constexpr int UNPACKED_SIZE = VECTORS * UNIT_INPUTS * LANES;

template <bool HAS_SECOND>
ALWAYS_INLINE void add_unpacked(const uint8_t* inputs, const uint16_t* weights) {
  UnitSums<HAS_SECOND>::add(inputs, 64, weights, weights + UNPACKED_SIZE / VECTORS, 64);
}

/// Multiply up to two times 16 rows.
template <Format FORMAT, bool HAS_SECOND>
void multiply_few_rows(int num_steps, Unpacker<FORMAT>& unpacker, const uint8_t* inputs,
                       size_t input_stride, float* y, size_t ldy) {
  using Sums = UnitSums<HAS_SECOND>;
  constexpr int RING = 4;
  alignas(64) uint16_t unpacked[RING][UNPACKED_SIZE];
  Sums::clear();
  unpacker.unpack(unpacked[0]);
  for (int step = 0; step < num_steps; step++, inputs += input_stride) {
    // Weights are unpacked while those before are multiplied.
    if (step + 1 < num_steps) unpacker.unpack(unpacked[(step + 1) % RING]);
    add_unpacked<HAS_SECOND>(inputs, unpacked[step % RING]);
  }
  Sums::store(y, ldy);
}

/// Multiply all rows with some weights, then with the next.  Inputs of a multiple of UNIT_ROWS are read:
/// to configure the unit for fewer takes longer than to multiply what is not kept.
template <Format FORMAT>
void multiply_rows_amx(int num_rows, int num_steps, Unpacker<FORMAT>& unpacker,
                       const uint8_t* inputs, size_t input_stride, float* y, size_t ldy) {
  alignas(64) uint16_t unpacked[MAX_UNPACKED / UNIT_INPUTS][UNPACKED_SIZE];
  // Rows of outputs are often a multiple of the caches' sets apart.
  alignas(64) float results[MAX_ROWS_AMX][COLUMNS];
  const int num_stored = num_rows / (2 * UNIT_ROWS) * 2 * UNIT_ROWS;
  for (int left = num_steps, steps; left > 0; left -= steps, inputs += steps * input_stride) {
    const bool is_first = left == num_steps, is_last = left <= MAX_UNPACKED / UNIT_INPUTS;
    steps = is_last ? left : MAX_UNPACKED / UNIT_INPUTS;
    unpacker.unpack(unpacked[0]);
    const auto run = [&]<bool HAS_SECOND>(int row) __attribute__((always_inline)) {
      using Sums = UnitSums<HAS_SECOND>;
      is_first ? Sums::clear() : Sums::load(results[row], COLUMNS);
      const uint8_t* x = inputs + 2 * UNIT_INPUTS * row;
      for (int step = 0; step < steps; step++, x += input_stride) {
        if (row == 0 && step + 1 < steps) unpacker.unpack(unpacked[step + 1]);
        add_unpacked<HAS_SECOND>(x, unpacked[step]);
      }
      is_last && row < num_stored ? Sums::store(y + row * ldy, ldy)
                                  : Sums::store(results[row], COLUMNS);
    };
    for (int row = 0; row < num_rows; row += 2 * UNIT_ROWS)
      num_rows - row > UNIT_ROWS ? run.template operator()<true>(row)
                                 : run.template operator()<false>(row);
  }
  for (int row = num_stored; row < num_rows; row++)
    for (int v = 0; v < VECTORS; v++)
      store(y + row * ldy + v * LANES, load(results[row] + v * LANES));
}

/// Compute one tile of a panel, with a MatrixUnit for its rows.
template <Format FORMAT>
void linear_tile_amx(const native::LinearArgs& args, int tile, const uint8_t* p, float* y,
                     size_t ldy, Prefetcher prefetcher, float*) {
  const Panels& w = args.weights;
  const native::Tiles tiles{args.num_rows, max_rows_amx(w)};
  const int height = tiles.height(tile), num_steps = w.num_inputs / UNIT_INPUTS;
  const uint8_t* inputs = args.packed.from_row(w, tiles.first(tile)).integers;
  const size_t input_stride = static_cast<size_t>(2 * UNIT_INPUTS) * height;
  Unpacker<FORMAT> unpacker(w, p, prefetcher);
  if (height <= UNIT_ROWS)
    multiply_few_rows<FORMAT, false>(num_steps, unpacker, inputs, input_stride, y, ldy);
  else if (height <= 2 * UNIT_ROWS)
    multiply_few_rows<FORMAT, true>(num_steps, unpacker, inputs, input_stride, y, ldy);
  else
    multiply_rows_amx(height, num_steps, unpacker, inputs, input_stride, y, ldy);
}

#else

constexpr int MAX_ROWS_AMX = 0;
ALWAYS_INLINE int max_rows_amx(const Panels&) { return MAX_ROWS_AMX; }
void pack_row_bf16(const float*, float, int, int, int, const native::PackedInputs&) {}
template <Format FORMAT>
void linear_tile_amx(const native::LinearArgs&, int, const uint8_t*, float*, size_t,
                     Prefetcher, float*) {}

#endif

}  // namespace

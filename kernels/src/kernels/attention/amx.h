// Attention's products in bfloat16 by a matrix unit, Intel's AMX: see rounded.h.
#pragma once

#include "kernels/attention/tile.h"
#include "kernels/matrix_unit.h"

namespace {

#if defined(HAS_AMX)

/// Rows of pairs with UNIT_INPUTS numbers of each of COLUMNS columns.
struct PairRows {
  const uint16_t* data;
  size_t stride;  // in bytes
};

/// Those from `first` on; what is beyond the block's numbers, which may be anything, is 0 in a copy.
ALWAYS_INLINE PairRows pair_rows(const Pairs<uint16_t>& block, size_t stride, int column, int first,
                                 uint32_t (&copy)[UNIT_INPUTS / 2][COLUMNS]) {
  const uint16_t* data = block.data + first * stride + 2 * column;
  const int left = block.count - first;
  if (left >= UNIT_INPUTS) return {data, 4 * stride};
  for (int i = 0; i < UNIT_INPUTS / 2; i++)
    for (int v = 0; v < VECTORS; v++) {
      const auto* pairs = reinterpret_cast<const I32*>(data + 2 * (i * stride + v * LANES));
      const int bits = 2 * i + 1 < left ? -1 : 2 * i < left ? 0xffff : 0;
      *reinterpret_cast<I32*>(copy[i] + v * LANES) = bits ? *pairs & bits : I32{};
    }
  return {reinterpret_cast<const uint16_t*>(copy), sizeof(copy[0])};
}

/// The sums of up to two times 16 rows, see dot_rows.
template <bool HAS_SECOND>
ALWAYS_INLINE void dot_rows_amx(const uint32_t* x, size_t ldx, size_t words_per_block,
                                const Pairs<uint16_t>* blocks, int num_blocks, size_t stride,
                                int column, bool has_next, float* sums) {
  using Sums = UnitSums<HAS_SECOND>;
  alignas(64) uint32_t copy[UNIT_INPUTS / 2][COLUMNS];
  Sums::clear();
  for (int b = 0; b < num_blocks; b++, x += words_per_block) {
    const Pairs<uint16_t>& block = blocks[b];
    const int whole = block.count / 2 * 2;
    for (int i = 0; i < block.count; i += UNIT_INPUTS) {
      const PairRows w = pair_rows(block, stride, column, i, copy);
      Sums::add(x + i / 2, 4 * ldx, w.data, w.data + 2 * LANES, w.stride);
      if (!has_next || !block.next) continue;
      const int last = i + UNIT_INPUTS < whole ? i + UNIT_INPUTS : whole;
      const uint16_t* next = block.next + static_cast<size_t>(column) * whole;
      for (int j = i * COLUMNS; j < last * COLUMNS; j += 64 / sizeof(uint16_t)) prefetch(next + j);
    }
  }
  Sums::store(sums, COLUMNS);
}

/// For any number of rows, for which there is a MatrixUnit; rows of words up to a multiple of two
/// times 16 can be read.
template <typename Finish>
void dot_tile(int rows, const uint32_t* x, size_t ldx, size_t words_per_block,
              const Pairs<uint16_t>* blocks, int num_blocks, size_t stride, int column,
              const Finish& finish) {
  alignas(64) float sums[2 * UNIT_ROWS][COLUMNS];
  const bool has_next = blocks[num_blocks - 1].next;
  for (int first = 0; first < rows; first += 2 * UNIT_ROWS) {
    const int left = rows - first, count = left < 2 * UNIT_ROWS ? left : 2 * UNIT_ROWS;
    const auto run = count > UNIT_ROWS ? dot_rows_amx<true> : dot_rows_amx<false>;
    run(x + first * ldx, ldx, words_per_block, blocks, num_blocks, stride, column,
        has_next && first == 0, sums[0]);
    for (int m = 0; m < count; m++)
      for (int v = 0; v < VECTORS; v++)
        finish(first + m, column + v * LANES, load(sums[m] + v * LANES));
  }
}

#endif

}  // namespace

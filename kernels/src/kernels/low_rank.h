// Products with two thin matrices, y += B (A x), of LoRA adapters (Hu et al. 2021).
//
// Each sum is in the order of the inputs, or of the rank, in one place of one vector: no bit of a row depends on
// the rows that share a tile.
#pragma once

#include "kernels.h"
#include "kernels/microkernel.h"

namespace {

using native::LowRank;
using native::RANKS;

// Rows times RANKS are sums in registers, beside the vectors that they are products of.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int LOW_RANK_ROWS = 2;
#define FOR_EACH_LOW_RANK_HEIGHT(CASE) CASE(1) CASE(2)
#else
constexpr int LOW_RANK_ROWS = 4;
#define FOR_EACH_LOW_RANK_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#endif

/// RANKS numbers of A x for each row; rows of x are `ldx` apart.
template <typename Float, int ROWS>
ALWAYS_INLINE void inner_tile(const float* x, size_t ldx, const Float* a, int num_inputs,
                              float* inner, size_t ldi) {
  F32 sums[ROWS][RANKS] = {};
  const auto add = [&](const float* rows, size_t ld) __attribute__((always_inline)) {
    for (int v = 0; v < VECTORS; v++) {
      F32 vectors[ROWS];
      for (int m = 0; m < ROWS; m++) vectors[m] = load(rows + m * ld + v * LANES);
      for (int r = 0; r < RANKS; r++) {
        const F32 w = load(a + r * COLUMNS + v * LANES);
        for (int m = 0; m < ROWS; m++) sums[m][r] = fused(vectors[m], w, sums[m][r]);
      }
    }
  };
  const int whole = num_inputs / COLUMNS * COLUMNS;
  for (int i = 0; i < whole; i += COLUMNS, a += RANKS * COLUMNS) add(x + i, ldx);
  if (whole < num_inputs) {
    float rest[ROWS * COLUMNS] = {};
    for (int m = 0; m < ROWS; m++)
      for (int i = whole; i < num_inputs; i++) rest[m * COLUMNS + i - whole] = x[m * ldx + i];
    add(rest, COLUMNS);
  }
  for (int m = 0; m < ROWS; m++)
    for (int r = 0; r < RANKS; r++) inner[m * ldi + r] = sum(sums[m][r]);
}

template <typename Float>
void inner_rows(const LowRank& weights, const float* x, int num_rows, int part, float* inner) {
  const int rank = weights.padded_rank(), first = part * native::LOW_RANK_INPUTS;
  const int left = weights.num_inputs - first;
  const int num_inputs = left < native::LOW_RANK_INPUTS ? left : native::LOW_RANK_INPUTS;
  const size_t ldx = weights.num_inputs, block = RANKS * weights.padded(weights.num_inputs);
  const Float* a = static_cast<const Float*>(weights.a) + RANKS * first;
  const native::Tiles tiles{num_rows, LOW_RANK_ROWS};
  for (int tile = 0; tile < tiles.count(); tile++) {
    const size_t row = tiles.first(tile);
    for (int r = 0; r < rank; r += RANKS) {
      const float* from = x + row * ldx + first;
      const Float* of_block = a + r / RANKS * block;
      float* to = inner + row * rank + r;
#define CASE(ROWS)                                                          \
  case ROWS:                                                                \
    inner_tile<Float, ROWS>(from, ldx, of_block, num_inputs, to, rank); \
    break;
      switch (tiles.height(tile)) { FOR_EACH_LOW_RANK_HEIGHT(CASE) }
#undef CASE
    }
  }
}

void low_rank_inner(const LowRank& weights, const float* x, int num_rows, int part, float* inner) {
  (weights.is_bf16 ? inner_rows<uint16_t> : inner_rows<float>)(weights, x, num_rows, part, inner);
}

template <typename Float>
void outer_rows(const LowRank& weights, const float* inner, int num_rows, int panel, int next,
                float* y) {
  const size_t ldi = weights.padded_rank(), ldy = weights.num_outputs;
  const Float* b = static_cast<const Float*>(weights.b) + panel * ldi * COLUMNS;
  for (; panel < next; panel++, b += ldi * COLUMNS) {
    float* to = y + panel * COLUMNS;
    const int width = weights.num_outputs - panel * COLUMNS;
    if (width >= COLUMNS) {
      multiply<Float>(num_rows, inner, ldi, b, COLUMNS, weights.rank, to, ldy, true, nullptr);
      continue;
    }
    for (int m = 0; m < num_rows; m++) {
      float last[COLUMNS] = {};
      for (int j = 0; j < width; j++) last[j] = to[m * ldy + j];
      multiply<Float>(1, inner + m * ldi, ldi, b, COLUMNS, weights.rank, last, COLUMNS, true, nullptr);
      for (int j = 0; j < width; j++) to[m * ldy + j] = last[j];
    }
  }
}

void add_low_rank(const LowRank& weights, const float* inner, int num_rows, int panel, int next,
                  float* y) {
  (weights.is_bf16 ? outer_rows<uint16_t> : outer_rows<float>)(weights, inner, num_rows, panel,
                                                               next, y);
}

}  // namespace

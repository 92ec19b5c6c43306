// What attention in floats and in rounded numbers have in common: tiles, masks, the softmax's maxima.
#pragma once

#include "kernels.h"
#include "kernels/pool.h"

namespace {

using native::AttentionArgs;
using native::AttentionPart;

/// Results of `size` query vectors before normalization: maxima and sums of the softmax, `[size]`,
/// and weighted sums of values, `[size][value_stride]`.
struct Partial {
  float* maxima;
  float* sums;
  float* values;
};

constexpr int MAX_TILE = native::MAX_TILE;
static_assert(MAX_TILE % LANES == 0);

/// Scaled query vectors: rows of the step times query heads that share a key head.
struct Tile {
  const AttentionPart& part;
  int group;  // query heads per key head
  int stride;
  const float* queries;  // [size][stride]
  const float* scales;   // of integers

  int size() const { return part.num_rows * group; }
  int position(int m) const { return part.first_position + m / group; }
  int last_position() const { return part.last_position(); }
};

struct Scratch {
  float* scores;   // [MAX_TILE][group_columns]
  float* block;    // keys or values of one block
  float* factors;  // [MAX_TILE]
  float* scales;   // [MAX_TILE]
};

/// Rows of pairs in one block, and those to prefetch, or null.
template <typename Stored>
struct Pairs {
  const Stored* data;
  const Stored* next;
  const float* scales;  // of integers
  int count;            // of numbers; if it is odd, the last pair has only one
};

ALWAYS_INLINE F32 tanh(F32 x) {
  // Without overflow: 1 - 2 / (e^2x + 1).
  return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
}

/// Set scores outside of columns [first, next) to -infinity.
ALWAYS_INLINE void mask(float* scores, int width, int first, int next) {
  for (int j = 0; j < first && j < width; j++) scores[j] = -INF;
  for (int j = next > 0 ? next : 0; j < width; j++) scores[j] = -INF;
}

/// Bound and mask the scores of a block's keys, `width` columns of each row.
ALWAYS_INLINE void finish_scores(const AttentionArgs& args, const Tile& tile, int first_key,
                                 int num_keys, float* scores, int stride, int width) {
  for (int m = 0; m < tile.size(); m++) {
    float* row = scores + m * stride;
    if (args.soft_cap > 0)
      for (int j = 0; j < width; j += LANES)
        store(row + j, splat(args.soft_cap) * tanh(load(row + j) / splat(args.soft_cap)));
    const int position = tile.position(m);
    const int first = args.first_visible(position) - first_key;
    int next = tile.part.last_visible(position) + 1 - first_key;
    next = next < num_keys ? next : num_keys;
    if (first > 0 || next < width) mask(row, width, first, next);
  }
}

ALWAYS_INLINE void clear(int size, int value_stride, const Partial& result) {
  for (int m = 0; m < size; m++) result.maxima[m] = -INF, result.sums[m] = 0.0f;
  for (int i = 0; i < size * value_stride; i += LANES) store(result.values + i, F32{});
}

/// Update the maxima with scores `[size][stride]`, `width` of each; the results so far must be
/// multiplied by `factors[m]`.
ALWAYS_INLINE void update_maxima(const float* scores, int size, int stride, int width,
                                 float* maxima, float* factors) {
  for (int m = 0; m < size; m++) {
    const float* row = scores + m * stride;
    F32 top = load(row);
    for (int j = LANES; j < width; j += LANES) top = max(top, load(row + j));
    const float before = maxima[m], largest = max(top);
    maxima[m] = largest > before ? largest : before;
    // All is masked so far: any finite factor is right.
    factors[m] = maxima[m] == -INF ? 0.0f : before - maxima[m];
  }
  for (int m = size; m % LANES; m++) factors[m] = 0.0f;
  for (int m = 0; m < size; m += LANES) store(factors + m, exp(load(factors + m)));
}

}  // namespace

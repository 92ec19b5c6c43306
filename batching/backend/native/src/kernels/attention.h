// Attention of one step's rows over the paged pool, without gathering anything.
//
// The keys are visited block by block with a running maximum and a running total (online softmax,
// Milakov & Gimelshein 2018), in spans of a fixed number of blocks whose results are then merged
// (as in flash-decoding, Dao et al. 2023).  What is computed for a row, and in which order, follows
// from its own position alone: rows that are in the same tile, keys that they alone see, and who
// computes which span make no difference to a single bit.
#pragma once

#include "kernels.h"
#include "kernels/micro.h"

namespace {

using native::AttentionArgs;
using native::AttentionPart;
using native::PoolLayout;

constexpr float INFINITE = __builtin_inff();

/// Unnormalised results of `size` query vectors: `[size]`, `[size]` and `[size][value_stride]`.
struct Partial {
  float* highest;
  float* totals;
  float* values;
};

constexpr int MAX_TILE = native::MAX_TILE;
static_assert(MAX_TILE % LANES == 0);

/// y *= factor, in whole vectors.
ALWAYS_INLINE void scale(float* y, int size, float factor) {
  for (int i = 0; i < size; i += LANES) store(y + i, load(y + i) * splat(factor));
}

ALWAYS_INLINE F32 tanh(F32 x) {
  // Without overflow: 1 - 2 / (e^2x + 1).
  return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
}

/// Columns [first, next) are visible: a score elsewhere becomes -infinity.
ALWAYS_INLINE void hide(float* scores, int width, int first, int next) {
  for (int j = 0; j < first && j < width; j++) scores[j] = -INFINITE;
  for (int j = next > 0 ? next : 0; j < width; j++) scores[j] = -INFINITE;
}

/// Turn scores `[size][stride]` into weights, `width` of each; update maximum and total.
/// `factors[m]`: by what the results so far are to be multiplied.
void weigh(float* scores, int size, int stride, int width, float* highest, float* totals,
           float* factors) {
  float before[MAX_TILE];
  for (int m = 0; m < size; m++) {
    const float* row = scores + m * stride;
    F32 top = load(row);
    for (int j = LANES; j < width; j += LANES) top = max(top, load(row + j));
    before[m] = highest[m];
    const float found = max(top);
    highest[m] = found > highest[m] ? found : highest[m];
    // Nothing was visible so far, nor is now: any finite number will do.
    factors[m] = highest[m] == -INFINITE ? 0.0f : before[m] - highest[m];
  }
  for (int m = size; m % LANES; m++) factors[m] = 0.0f;
  for (int m = 0; m < size; m += LANES) store(factors + m, exp(load(factors + m)));
  for (int m = 0; m < size; m++) {
    float* row = scores + m * stride;
    const F32 shift = splat(highest[m] == -INFINITE ? 0.0f : highest[m]);
    F32 total{};
    for (int j = 0; j < width; j += LANES) {
      F32 weight = exp(load(row + j) - shift);
      store(row + j, weight);
      total += weight;
    }
    totals[m] = totals[m] * factors[m] + sum(total);
  }
}

/// A block of the pool as floats, in `scratch` if it is stored otherwise, and the one after it.
struct Floats {
  const float* block;
  const float* next;  // null if there is none, or if it has been asked for already
};

ALWAYS_INLINE Floats as_floats(const void* pool, bool is_bf16, size_t size, size_t index,
                               int64_t next, float* scratch) {
  if (!is_bf16) {
    const float* floats = static_cast<const float*>(pool);
    return {floats + index * size, next < 0 ? nullptr : floats + next * size};
  }
  const uint16_t* halves = static_cast<const uint16_t*>(pool);
  const uint16_t* block = halves + index * size;
  const uint16_t* ahead = next < 0 ? block : halves + next * size;
  for (size_t i = 0; i < size; i += LANES) {
    if (i % 32 == 0) fetch(ahead + i);
    store(scratch + i, load(block + i));
  }
  return {scratch, nullptr};
}

/// Query vectors of a tile, scaled: rows of the step by the heads that share a key head.
struct Tile {
  int first_position;
  int num_rows;
  int group;  // query heads of a key head
  const float* queries;

  int size() const { return num_rows * group; }
  int position(int m) const { return first_position + m / group; }
  int last_position() const { return first_position + num_rows - 1; }
};

struct Scratch {
  float* scores;   // [MAX_TILE][key_stride]
  float* block;    // keys or values of one block
  float* factors;  // [MAX_TILE]
};

void attend_span(const AttentionArgs& args, const AttentionPart& part, const Tile& tile,
                 int first_block, int next_block, const Scratch& scratch, const Partial& result) {
  const PoolLayout& pool = args.pool;
  const int size = tile.size();
  const int stride = pool.key_stride();
  const int last_block = part.span < 0 ? tile.last_position() / pool.block_size + 1 : next_block;
  for (int m = 0; m < size; m++) result.highest[m] = -INFINITE, result.totals[m] = 0.0f;
  for (int i = 0; i < size * pool.value_stride(); i += LANES) store(result.values + i, F32{});
  for (int b = first_block; b < next_block; b++) {
    const int first_key = b * pool.block_size;
    int num_keys = tile.last_position() + 1 - first_key;
    num_keys = num_keys < pool.block_size ? num_keys : pool.block_size;
    if (num_keys <= 0) return;
    const size_t block = static_cast<size_t>(part.blocks[b]) * pool.num_heads + part.head;
    // Memory is read twice as fast if the next block is asked for little by little meanwhile.
    int64_t ahead = part.next;
    if (b + 1 < last_block) ahead = int64_t{part.blocks[b + 1]} * pool.num_heads + part.head;
    const Floats keys =
        as_floats(args.keys, pool.is_bf16, pool.key_floats(), block, ahead, scratch.block);
    for (int j = 0; j < num_keys; j += COLUMNS)
      multiply(size, tile.queries, pool.key_dim, keys.block + j, stride, pool.key_dim,
               scratch.scores + j, stride, false, keys.next ? keys.next + j : nullptr);
    const int width = (num_keys + LANES - 1) / LANES * LANES;
    for (int m = 0; m < size; m++) {
      float* row = scratch.scores + m * stride;
      if (args.soft_cap > 0)
        for (int j = 0; j < width; j += LANES)
          store(row + j, splat(args.soft_cap) * tanh(load(row + j) / splat(args.soft_cap)));
      const int position = tile.position(m);
      const int first = args.window > 0 ? position - args.window + 1 - first_key : 0;
      int next = position + 1 - first_key;
      next = next < num_keys ? next : num_keys;
      if (first > 0 || next < width) hide(row, width, first, next);
    }
    weigh(scratch.scores, size, stride, width, result.highest, result.totals, scratch.factors);
    for (int m = 0; m < size; m++)
      if (scratch.factors[m] != 1.0f)
        scale(result.values + m * pool.value_stride(), pool.value_stride(), scratch.factors[m]);
    const Floats values =
        as_floats(args.values, pool.is_bf16, pool.value_floats(), block, ahead, scratch.block);
    for (int j = 0; j < pool.value_stride(); j += COLUMNS)
      multiply(size, scratch.scores, stride, values.block + j, pool.value_stride(), num_keys,
               result.values + j, pool.value_stride(), true,
               values.next ? values.next + j : nullptr);
  }
}

/// Add the result of one more span.
void merge(int size, int value_stride, const Partial& more, float* factors, const Partial& result) {
  float others[MAX_TILE];
  for (int m = 0; m < size; m++) {
    const float before = result.highest[m];
    const float highest = more.highest[m] > before ? more.highest[m] : before;
    result.highest[m] = highest;
    factors[m] = highest == -INFINITE ? 0.0f : before - highest;
    others[m] = highest == -INFINITE ? 0.0f : more.highest[m] - highest;
  }
  for (int m = size; m % LANES; m++) factors[m] = others[m] = 0.0f;
  for (int m = 0; m < size; m += LANES) {
    store(factors + m, exp(load(factors + m)));
    store(others + m, exp(load(others + m)));
  }
  for (int m = 0; m < size; m++) {
    result.totals[m] = result.totals[m] * factors[m] + more.totals[m] * others[m];
    float* y = result.values + m * value_stride;
    const float* x = more.values + m * value_stride;
    for (int i = 0; i < value_stride; i += LANES)
      store(y + i, load(y + i) * splat(factors[m]) + load(x + i) * splat(others[m]));
  }
}

/// Begin with the sinks, or with nothing: a sink is a score of a key without a value.
void begin(const AttentionArgs& args, int head, int size, int group, const Partial& result) {
  for (int m = 0; m < size; m++) {
    result.highest[m] = args.sinks ? args.sinks[head * group + m % group] : -INFINITE;
    result.totals[m] = args.sinks ? 1.0f : 0.0f;
  }
  for (int i = 0; i < size * args.pool.value_stride(); i += LANES) store(result.values + i, F32{});
}

void finish(const AttentionArgs& args, int head, int first_row, int size, int group,
            const Partial& result) {
  const int dim = args.pool.value_dim;
  for (int m = 0; m < size; m++) {
    const size_t row = static_cast<size_t>(first_row) + m / group;
    float* y = args.y + (row * args.num_query_heads + head * group + m % group) * dim;
    const float* x = result.values + m * args.pool.value_stride();
    for (int i = 0; i < dim; i++) y[i] = x[i] / result.totals[m];
  }
}

/// Hand out pieces of a buffer.
struct Arena {
  float* next;
  float* take(size_t size) {
    float* piece = next;
    next += (size + 15) / 16 * 16;
    return piece;
  }
  Partial partial(int size, int value_stride) {
    const size_t padded = (size + 15) / 16 * 16;
    return {take(padded), take(padded), take(padded * value_stride)};
  }
};

Tile load_tile(const AttentionArgs& args, const AttentionPart& part, int group, float* queries) {
  const int dim = args.pool.key_dim;
  for (int m = 0; m < part.num_rows * group; m++) {
    const size_t row = static_cast<size_t>(part.first_row) + m / group;
    const float* q = args.q + (row * args.num_query_heads + part.head * group + m % group) * dim;
    for (int i = 0; i < dim; i++) queries[m * dim + i] = q[i] * args.scale;
  }
  return {part.first_position, part.num_rows, group, queries};
}

/// Attend the rows of a part: all their spans, or one span of a row whose spans are shared out.
void attend(const AttentionArgs& args, const AttentionPart& part, float* memory) {
  const PoolLayout& pool = args.pool;
  const int group = args.num_query_heads / pool.num_heads;
  const int size = part.num_rows * group;
  Arena arena{memory};
  float* queries = arena.take(static_cast<size_t>(size) * pool.key_dim);
  const Tile tile = load_tile(args, part, group, queries);
  const Scratch scratch{arena.take(static_cast<size_t>(MAX_TILE) * pool.key_stride()),
                        arena.take(pool.key_floats() > pool.value_floats() ? pool.key_floats()
                                                                          : pool.value_floats()),
                        arena.take(MAX_TILE)};
  const int num_blocks = tile.last_position() / pool.block_size + 1;
  if (part.span >= 0) {
    Arena shared{part.partial};
    const int first = part.span * args.span_blocks, next = first + args.span_blocks;
    attend_span(args, part, tile, first, next < num_blocks ? next : num_blocks, scratch,
                shared.partial(size, pool.value_stride()));
    return;
  }
  const Partial result = arena.partial(size, pool.value_stride());
  const Partial more = arena.partial(size, pool.value_stride());
  begin(args, part.head, size, group, result);
  const int hidden = args.window > 0 ? tile.first_position - args.window + 1 : 0;
  const int first_span = hidden > 0 ? hidden / pool.block_size / args.span_blocks : 0;
  for (int first = first_span * args.span_blocks; first < num_blocks; first += args.span_blocks) {
    const int next = first + args.span_blocks;
    attend_span(args, part, tile, first, next < num_blocks ? next : num_blocks, scratch, more);
    merge(size, pool.value_stride(), more, scratch.factors, result);
  }
  finish(args, part.head, part.first_row, size, group, result);
}

/// Merge the spans of a row that `attend` left at `part.partial`, `num_spans` of them.
void merge_spans(const AttentionArgs& args, const AttentionPart& part, int num_spans,
                 float* memory) {
  const int group = args.num_query_heads / args.pool.num_heads;
  const int size = part.num_rows * group;
  Arena arena{memory};
  float* factors = arena.take(MAX_TILE);
  const Partial result = arena.partial(size, args.pool.value_stride());
  begin(args, part.head, size, group, result);
  Arena shared{part.partial};
  for (int i = 0; i < num_spans; i++)
    merge(size, args.pool.value_stride(), shared.partial(size, args.pool.value_stride()), factors,
          result);
  finish(args, part.head, part.first_row, size, group, result);
}

}  // namespace

// Attention of the rows of one step over the paged pool, without gathering keys and values.
//
// Keys are read block by block with a running maximum and a running sum (online softmax, Milakov &
// Gimelshein 2018), in spans of a fixed number of blocks whose results are then merged (as in
// flash-decoding, Dao et al. 2023).  What is computed for a row, and in which order, depends on its
// position alone: no bit depends on the other rows of its tile, on keys that only these see, or on
// which thread computes a span.
#pragma once

#include "kernels.h"
#include "kernels/bf16.h"
#include "kernels/microkernel.h"

namespace {

using native::AttentionArgs;
using native::AttentionPart;
using native::CacheType;
using native::PoolLayout;

constexpr float INF = __builtin_inff();

/// Results of `size` query vectors before normalization: maxima and sums of the softmax, `[size]`,
/// and weighted sums of values, `[size][value_stride]`.
struct Partial {
  float* maxima;
  float* sums;
  float* values;
};

constexpr int MAX_TILE = native::MAX_TILE;
static_assert(MAX_TILE % LANES == 0);

/// Replace numbers that are HALF apart by sum and difference, in every 2 * HALF of `[size]`.
template <int HALF>
ALWAYS_INLINE void butterflies(float* x, int size) {
  for (int i = 0; i < size; i += 2 * HALF) {
    for (int j = i; j < i + HALF; j++) {
      const float a = x[j], b = x[j + HALF];
      x[j] = a + b;
      x[j + HALF] = a - b;
    }
  }
}

/// Multiply every `n` numbers of `[size]`, a power of 2, by a Hadamard matrix, whose square is n
/// times the identity.  A few channels of keys are much larger than the others, and integers of a
/// scale for all of them would be coarse; this spreads them out (as in QuaRot, Ashkboos et al.
/// 2024), and a product with a query that is rotated, too, is the same but for the factor n.
ALWAYS_INLINE void rotate(float* x, int size, int n) {
  if (n > 1) butterflies<1>(x, size);
  if (n > 2) butterflies<2>(x, size);
  if (n > 4) butterflies<4>(x, size);
  if (n > 8) butterflies<8>(x, size);
  if (n > 16) butterflies<16>(x, size);
  if (n > 32) butterflies<32>(x, size);
  if (n > 64) butterflies<64>(x, size);
  if (n > 128) butterflies<128>(x, size);
  static_assert(native::MAX_ROTATED == 256);
}

/// y *= factor, in whole vectors.
ALWAYS_INLINE void scale(float* y, int size, float factor) {
  for (int i = 0; i < size; i += LANES) store(y + i, load(y + i) * splat(factor));
}

ALWAYS_INLINE F32 tanh(F32 x) {
  // Without overflow: 1 - 2 / (e^2x + 1).
  return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
}

/// Set scores outside of columns [first, next) to -infinity.
ALWAYS_INLINE void mask(float* scores, int width, int first, int next) {
  for (int j = 0; j < first && j < width; j++) scores[j] = -INF;
  for (int j = next > 0 ? next : 0; j < width; j++) scores[j] = -INF;
}

/// Replace scores `[size][stride]`, `width` of each, by softmax weights; update maxima and sums.
/// The results so far must be multiplied by `factors[m]`.
void update_softmax(float* scores, int size, int stride, int width, float* maxima, float* sums,
                    float* factors) {
  float before[MAX_TILE];
  for (int m = 0; m < size; m++) {
    const float* row = scores + m * stride;
    F32 top = load(row);
    for (int j = LANES; j < width; j += LANES) top = max(top, load(row + j));
    before[m] = maxima[m];
    const float largest = max(top);
    maxima[m] = largest > maxima[m] ? largest : maxima[m];
    // All is masked so far: any finite factor is right.
    factors[m] = maxima[m] == -INF ? 0.0f : before[m] - maxima[m];
  }
  for (int m = size; m % LANES; m++) factors[m] = 0.0f;
  for (int m = 0; m < size; m += LANES) store(factors + m, exp(load(factors + m)));
  for (int m = 0; m < size; m++) {
    float* row = scores + m * stride;
    const F32 shift = splat(maxima[m] == -INF ? 0.0f : maxima[m]);
    F32 total{};
    for (int j = 0; j < width; j += LANES) {
      F32 weight = exp(load(row + j) - shift);
      store(row + j, weight);
      total += weight;
    }
    sums[m] = sums[m] * factors[m] + sum(total);
  }
}

/// Keys or values of a block in the pool, and those to prefetch, or null; `scales` of integers.
template <typename Stored>
struct StoredBlock {
  const Stored* data;
  const Stored* next;
  int stride;
  const float* scales = nullptr;
};

/// Multiply columns `[size][stride]`, `width` of them, by a number each.
ALWAYS_INLINE void scale_columns(float* x, int size, int stride, int width, const float* factors) {
  for (int m = 0; m < size; m++)
    for (int j = m * stride; j < m * stride + width; j += LANES)
      store(x + j, load(x + j) * load(factors + j - m * stride));
}

/// y (+)= x times the first `width` columns of `[k][stride]`; `floats` has space for all of them.
template <typename Stored>
void multiply_block(int size, const float* x, int ldx, const StoredBlock<Stored>& block, int k,
                    int width, float* y, int ldy, bool add, float* floats) {
  if (sizeof(Stored) < sizeof(float) && size > MAX_ROWS) {
    // Converted once, since several tiles read them.
    const Stored* ahead = block.next ? block.next : block.data;
    for (int i = 0; i < k * block.stride; i += LANES) {
      if (i % (64 / sizeof(Stored)) == 0) prefetch(ahead + i);
      store(floats + i, load(block.data + i));
    }
    const StoredBlock<float> unpacked{floats, nullptr, block.stride};
    return multiply_block(size, x, ldx, unpacked, k, width, y, ldy, add, floats);
  }
  for (int j = 0; j < width; j += COLUMNS)
    multiply(size, x, ldx, block.data + j, block.stride, k, y + j, ldy, add,
             block.next ? block.next + j : nullptr);
}

/// Scaled query vectors: rows of the step times query heads that share a key head.
struct Tile {
  int first_position;
  int num_rows;
  int group;  // query heads per key head
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

template <typename Stored>
void attend_span(const AttentionArgs& args, const AttentionPart& part, const Tile& tile,
                 int first_block, int next_block, const Scratch& scratch, const Partial& result) {
  const PoolLayout& pool = args.pool;
  const int size = tile.size();
  const int stride = pool.key_stride();
  constexpr bool HAS_SCALES = sizeof(Stored) == 1;
  const auto stored = [&](const void* data, size_t numbers, int64_t at, int64_t next, int width) {
    const auto* blocks = static_cast<const uint8_t*>(data);
    const size_t bytes = pool.bytes(numbers);
    StoredBlock<Stored> block{reinterpret_cast<const Stored*>(blocks + at * bytes), nullptr, width};
    if (next >= 0) block.next = reinterpret_cast<const Stored*>(blocks + next * bytes);
    if constexpr (HAS_SCALES) {
      block.scales = reinterpret_cast<const float*>(block.data + numbers);
      for (size_t i = numbers; block.next && i < bytes; i += 64) prefetch(block.next + i);
    }
    return block;
  };
  const int last_block = part.span < 0 ? tile.last_position() / pool.block_size + 1 : next_block;
  for (int m = 0; m < size; m++) result.maxima[m] = -INF, result.sums[m] = 0.0f;
  for (int i = 0; i < size * pool.value_stride(); i += LANES) store(result.values + i, F32{});
  for (int b = first_block; b < next_block; b++) {
    const int first_key = b * pool.block_size;
    int num_keys = tile.last_position() + 1 - first_key;
    num_keys = num_keys < pool.block_size ? num_keys : pool.block_size;
    if (num_keys <= 0) return;
    const int64_t block = int64_t{part.blocks[b]} * pool.num_heads + part.head;
    // Memory is read twice as fast if the next block is prefetched bit by bit meanwhile.
    int64_t ahead = part.next;
    if (b + 1 < last_block) ahead = int64_t{part.blocks[b + 1]} * pool.num_heads + part.head;
    const auto keys = stored(args.keys, pool.key_size(), block, ahead, stride);
    multiply_block(size, tile.queries, pool.key_dim, keys, pool.key_dim, num_keys, scratch.scores,
                   stride, false, scratch.block);
    const int width = (num_keys + LANES - 1) / LANES * LANES;
    if constexpr (HAS_SCALES) scale_columns(scratch.scores, size, stride, width, keys.scales);
    for (int m = 0; m < size; m++) {
      float* row = scratch.scores + m * stride;
      if (args.soft_cap > 0)
        for (int j = 0; j < width; j += LANES)
          store(row + j, splat(args.soft_cap) * tanh(load(row + j) / splat(args.soft_cap)));
      const int position = tile.position(m);
      const int first = args.first_visible(position) - first_key;
      int next = position + 1 - first_key;
      next = next < num_keys ? next : num_keys;
      if (first > 0 || next < width) mask(row, width, first, next);
    }
    update_softmax(scratch.scores, size, stride, width, result.maxima, result.sums,
                   scratch.factors);
    for (int m = 0; m < size; m++)
      if (scratch.factors[m] != 1.0f)
        scale(result.values + m * pool.value_stride(), pool.value_stride(), scratch.factors[m]);
    const auto values = stored(args.values, pool.value_size(), block, ahead, pool.value_stride());
    if constexpr (HAS_SCALES) scale_columns(scratch.scores, size, stride, width, values.scales);
    multiply_block(size, scratch.scores, stride, values, num_keys, pool.value_stride(),
                   result.values, pool.value_stride(), true, scratch.block);
  }
}

/// Merge the result of one more span.
void merge(int size, int value_stride, const Partial& more, float* factors, const Partial& result) {
  float others[MAX_TILE];
  for (int m = 0; m < size; m++) {
    const float before = result.maxima[m];
    const float maximum = more.maxima[m] > before ? more.maxima[m] : before;
    result.maxima[m] = maximum;
    factors[m] = maximum == -INF ? 0.0f : before - maximum;
    others[m] = maximum == -INF ? 0.0f : more.maxima[m] - maximum;
  }
  for (int m = size; m % LANES; m++) factors[m] = others[m] = 0.0f;
  for (int m = 0; m < size; m += LANES) {
    store(factors + m, exp(load(factors + m)));
    store(others + m, exp(load(others + m)));
  }
  for (int m = 0; m < size; m++) {
    result.sums[m] = result.sums[m] * factors[m] + more.sums[m] * others[m];
    float* y = result.values + m * value_stride;
    const float* x = more.values + m * value_stride;
    for (int i = 0; i < value_stride; i += LANES)
      store(y + i, load(y + i) * splat(factors[m]) + load(x + i) * splat(others[m]));
  }
}

/// Start with the sinks, if any: a sink is the score of a key without a value.
void init_partial(const AttentionArgs& args, int head, int size, int group, const Partial& result) {
  for (int m = 0; m < size; m++) {
    result.maxima[m] = args.sinks ? args.sinks[head * group + m % group] : -INF;
    result.sums[m] = args.sinks ? 1.0f : 0.0f;
  }
  for (int i = 0; i < size * args.pool.value_stride(); i += LANES) store(result.values + i, F32{});
}

void normalize(const AttentionArgs& args, int head, int first_row, int size, int group,
            const Partial& result) {
  const int dim = args.pool.value_dim;
  for (int m = 0; m < size; m++) {
    const size_t row = static_cast<size_t>(first_row) + m / group;
    float* y = args.y + (row * args.num_query_heads + head * group + m % group) * dim;
    const float* x = result.values + m * args.pool.value_stride();
    for (int i = 0; i < dim; i++) y[i] = x[i] / result.sums[m];
  }
}

/// Allocates parts of a buffer.
struct Arena {
  float* next;
  float* allocate(size_t size) {
    float* part = next;
    next += (size + 15) / 16 * 16;
    return part;
  }
  Partial partial(int size, int value_stride) {
    const size_t padded = (size + 15) / 16 * 16;
    return {allocate(padded), allocate(padded), allocate(padded * value_stride)};
  }
};

Tile load_tile(const AttentionArgs& args, const AttentionPart& part, int group, float* queries) {
  const int dim = args.pool.key_dim, rotated = args.pool.rotated();
  const float scale = args.scale / rotated;
  for (int m = 0; m < part.num_rows * group; m++) {
    const size_t row = static_cast<size_t>(part.first_row) + m / group;
    const float* q = args.q + (row * args.num_query_heads + part.head * group + m % group) * dim;
    for (int i = 0; i < dim; i++) queries[m * dim + i] = q[i] * scale;
    rotate(queries + m * dim, dim, rotated);
  }
  return {part.first_position, part.num_rows, group, queries};
}

/// Attend the rows of a part: all of their spans, or only `part.span`.
void attend(const AttentionArgs& args, const AttentionPart& part, float* memory) {
  const PoolLayout& pool = args.pool;
  const int group = args.num_query_heads / pool.num_heads;
  const int size = part.num_rows * group;
  Arena arena{memory};
  float* queries = arena.allocate(static_cast<size_t>(size) * pool.key_dim);
  const Tile tile = load_tile(args, part, group, queries);
  const Scratch scratch{arena.allocate(static_cast<size_t>(MAX_TILE) * pool.key_stride()),
                        arena.allocate(pool.key_size() > pool.value_size() ? pool.key_size()
                                                                          : pool.value_size()),
                        arena.allocate(MAX_TILE)};
  const int num_blocks = tile.last_position() / pool.block_size + 1;
  const auto attend_blocks = pool.type == CacheType::kFloat32    ? attend_span<float>
                             : pool.type == CacheType::kBfloat16 ? attend_span<uint16_t>
                                                                 : attend_span<int8_t>;
  if (part.span >= 0) {
    Arena shared{part.partial};
    const int first = part.span * args.span_blocks, next = first + args.span_blocks;
    attend_blocks(args, part, tile, first, next < num_blocks ? next : num_blocks, scratch,
                  shared.partial(size, pool.value_stride()));
    return;
  }
  const Partial result = arena.partial(size, pool.value_stride());
  const Partial more = arena.partial(size, pool.value_stride());
  init_partial(args, part.head, size, group, result);
  const int first_block = args.first_visible(tile.first_position) / pool.block_size;
  const int first_span = first_block / args.span_blocks;
  for (int first = first_span * args.span_blocks; first < num_blocks; first += args.span_blocks) {
    const int next = first + args.span_blocks;
    attend_blocks(args, part, tile, first, next < num_blocks ? next : num_blocks, scratch, more);
    merge(size, pool.value_stride(), more, scratch.factors, result);
  }
  normalize(args, part.head, part.first_row, size, group, result);
}

/// Merge `num_spans` results that `attend` wrote to `part.partial`.
void merge_spans(const AttentionArgs& args, const AttentionPart& part, int num_spans,
                 float* memory) {
  const int group = args.num_query_heads / args.pool.num_heads;
  const int size = part.num_rows * group;
  Arena arena{memory};
  float* factors = arena.allocate(MAX_TILE);
  const Partial result = arena.partial(size, args.pool.value_stride());
  init_partial(args, part.head, size, group, result);
  Arena shared{part.partial};
  for (int i = 0; i < num_spans; i++)
    merge(size, args.pool.value_stride(), shared.partial(size, args.pool.value_stride()), factors,
          result);
  normalize(args, part.head, part.first_row, size, group, result);
}

ALWAYS_INLINE void store_as(float x, float* stored) { *stored = x; }
ALWAYS_INLINE void store_as(float x, uint16_t* stored) { *stored = to_bf16(x); }

/// Write successive tokens of one block.
template <typename Stored>
void write_tokens(const PoolLayout& pool, void* pool_keys, void* pool_values, int slot,
                  int num_tokens, const float* keys, const float* values, float*) {
  const size_t block = slot / pool.block_size, at = slot % pool.block_size;
  for (int h = 0; h < pool.num_heads; h++) {
    const size_t head = block * pool.num_heads + h;
    Stored* key = static_cast<Stored*>(pool_keys) + head * pool.key_size() + at;
    for (int i = 0; i < pool.key_dim; i++, key += pool.key_stride())
      for (int t = 0; t < num_tokens; t++)
        store_as(keys[(t * pool.num_heads + h) * pool.key_dim + i], key + t);
    Stored* value = static_cast<Stored*>(pool_values) + head * pool.value_size() +
                    at * pool.value_stride();
    for (int t = 0; t < num_tokens; t++, value += pool.value_stride())
      for (int i = 0; i < pool.value_dim; i++)
        store_as(values[(t * pool.num_heads + h) * pool.value_dim + i], value + i);
  }
}

/// The largest magnitude; infinite if a number is not finite.
ALWAYS_INLINE float largest_magnitude(const float* x, int size) {
  F32 top{};
  I32 is_nan{};
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    const F32 value = load(x + i);
    top = max(top, absolute(value));
    is_nan |= value != value;
  }
  float largest = any(is_nan) ? INF : max(top);
  for (; i < size; i++) {
    const float value = __builtin_fabsf(x[i]);
    largest = value <= largest ? largest : value == value ? value : INF;
  }
  return largest;
}

/// Round numbers to integers `stride` apart; return their scale, NaN if a number is not finite.
ALWAYS_INLINE float quantize(const float* x, int size, int8_t* integers, int stride) {
  const float largest = largest_magnitude(x, size);
  const bool is_finite = largest < INF;
  // Avoids a division by 0; numbers that small are negligible.
  const float factor = is_finite && largest > 1e-30f ? 127 / largest : 0;
  const float round = 12582912.0f;  // as in exp
  for (int i = 0; i < size; i++) {
    const int32_t shifted = __builtin_bit_cast(int32_t, x[i] * factor + round);
    integers[i * stride] = static_cast<int8_t>(shifted - __builtin_bit_cast(int32_t, round));
  }
  return is_finite ? largest / 127 : __builtin_nanf("");
}

template <>
void write_tokens<int8_t>(const PoolLayout& pool, void* pool_keys, void* pool_values, int slot,
                          int num_tokens, const float* keys, const float* values,
                          float* rotated) {
  const int block = slot / pool.block_size, at = slot % pool.block_size;
  for (int h = 0; h < pool.num_heads; h++) {
    const size_t head = static_cast<size_t>(block) * pool.num_heads + h;
    auto* key = static_cast<int8_t*>(pool_keys) + head * pool.key_bytes();
    auto* value = static_cast<int8_t*>(pool_values) + head * pool.value_bytes();
    auto* key_scales = reinterpret_cast<float*>(key + pool.key_size());
    auto* value_scales = reinterpret_cast<float*>(value + pool.value_size());
    for (int t = 0; t < num_tokens; t++) {
      const int row = t * pool.num_heads + h, slot = at + t;
      for (int i = 0; i < pool.key_dim; i++) rotated[i] = keys[row * pool.key_dim + i];
      rotate(rotated, pool.key_dim, pool.rotated());
      key_scales[slot] = quantize(rotated, pool.key_dim, key + slot, pool.key_stride());
      value_scales[slot] = quantize(values + row * pool.value_dim, pool.value_dim,
                                    value + slot * pool.value_stride(), 1);
    }
  }
}

void write(const PoolLayout& pool, void* pool_keys, void* pool_values, const int32_t* slots,
           int num_rows, const float* keys, const float* values, float* scratch) {
  const auto write_run = pool.type == CacheType::kFloat32    ? write_tokens<float>
                         : pool.type == CacheType::kBfloat16 ? write_tokens<uint16_t>
                                                             : write_tokens<int8_t>;
  int next;
  for (int first = 0; first < num_rows; first = next) {
    next = first + 1;
    while (next < num_rows && slots[next] == slots[next - 1] + 1 && slots[next] % pool.block_size)
      next++;
    const float* k = keys + static_cast<size_t>(first) * pool.num_heads * pool.key_dim;
    const float* v = values + static_cast<size_t>(first) * pool.num_heads * pool.value_dim;
    write_run(pool, pool_keys, pool_values, slots[first], next - first, k, v, scratch);
  }
}

}  // namespace

// Attention of the rows of one step over the paged pool, without gathering keys and values.
//
// Keys are read block by block with a running maximum and a running sum (online softmax, Milakov &
// Gimelshein 2018), in spans of a fixed number of blocks whose results are then merged (as in
// flash-decoding, Dao et al. 2023).  What is computed for a row, and in which order, depends on its
// position alone: no bit depends on the other rows of its tile, on keys that only these see, or on
// which thread computes a span.
#include "kernels.h"
#include "kernels/attention/rounded.h"
#include "kernels/attention/tile.h"
#include "kernels/microkernel.h"
#include "kernels/parts.h"
#include "kernels/pool.h"
#include "kernels/transpose.h"

namespace {

/// y *= factor, in whole vectors.
ALWAYS_INLINE void scale(float* y, int size, float factor) {
  for (int i = 0; i < size; i += LANES) store(y + i, load(y + i) * splat(factor));
}

/// Replace scores `[size][stride]`, `width` of each, by softmax weights; update maxima and sums.
/// The results so far must be multiplied by `factors[m]`.
void update_softmax(float* scores, int size, int stride, int width, float* maxima, float* sums,
                    float* factors) {
  update_maxima(scores, size, stride, width, maxima, factors);
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
  constexpr int PACK = native::packed_rows(sizeof(Stored));
  if constexpr (PACK > 1) if (size > MAX_ROWS) {
    // Converted once, since several tiles read them.
    const Stored* ahead = block.next ? block.next : block.data;
    for (int i = 0; i < k; i += 2) {
      for (int j = 0; j < block.stride; j += LANES) {
        const int at = i * block.stride + 2 * j;
        if (at % (64 / sizeof(Stored)) == 0) prefetch(ahead + at);
        F32 pair[2];
        load_numbers(block.data + at, pair);
        store(floats + i * block.stride + j, pair[0]);
        store(floats + (i + 1) * block.stride + j, pair[1]);
      }
    }
    const StoredBlock<float> unpacked{floats, nullptr, block.stride};
    return multiply_block(size, x, ldx, unpacked, k, width, y, ldy, add, floats);
  }
  for (int j = 0; j < width; j += COLUMNS)
    multiply(size, x, ldx, block.data + PACK * j, block.stride, k, y + j, ldy, add,
             block.next ? block.next + PACK * j : nullptr);
}

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
  clear(size, pool.value_stride(), result);
  for (int b = first_block; b < next_block; b++) {
    const int first_key = b * pool.block_size;
    int num_keys = tile.last_position() + 1 - first_key;
    num_keys = num_keys < pool.block_size ? num_keys : pool.block_size;
    if (num_keys <= 0) return;
    const int64_t block = int64_t{part.blocks[b]} * pool.num_heads + part.head;
    // Memory is read twice as fast if the next block is prefetched bit by bit meanwhile.
    const int64_t ahead = part.ahead(b, 1, last_block, pool.num_heads);
    const auto keys = stored(args.keys, pool.key_size(), block, ahead, stride);
    multiply_block(size, tile.queries, tile.stride, keys, pool.key_dim, num_keys, scratch.scores,
                   stride, false, scratch.block);
    const int width = (num_keys + LANES - 1) / LANES * LANES;
    if constexpr (HAS_SCALES) scale_columns(scratch.scores, size, stride, width, keys.scales);
    finish_scores(args, tile, first_key, num_keys, scratch.scores, stride, width);
    update_softmax(scratch.scores, size, stride, width, result.maxima, result.sums,
                   scratch.factors);
    for (int m = 0; m < size; m++)
      if (scratch.factors[m] != 1.0f)
        scale(result.values + m * pool.value_stride(), pool.value_stride(), scratch.factors[m]);
    if (pool.is_latent) {
      transpose(keys.data, stride, pool.key_dim, num_keys, scratch.block, pool.value_stride());
      const StoredBlock<float> latents{scratch.block, nullptr, pool.value_stride()};
      multiply_block(size, scratch.scores, stride, latents, num_keys, pool.value_stride(),
                     result.values, pool.value_stride(), true, scratch.block);
      continue;
    }
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

/// The function that attends to a span, and what rounds the queries for it, or null.
struct Method {
  void (*attend_span)(const AttentionArgs&, const AttentionPart&, const Tile&, int, int,
                      const Scratch&, const Partial&);
  void (*round)(float* queries, int size, int stride, int dim, float* scales);
};

template <typename Stored>
Method method_of(const PoolLayout& pool) {
  if constexpr (Dots<Stored>::EXIST)
    if (pool.rounds_inputs) return {attend_span_rounded<Stored>, round_queries<Stored>};
  return {attend_span<Stored>, nullptr};
}

Method method(const PoolLayout& pool) {
  switch (pool.type) {
    case CacheType::kBfloat16: return method_of<uint16_t>(pool);
    case CacheType::kInt8: return method_of<int8_t>(pool);
    default: return method_of<float>(pool);
  }
}

/// Load scaled queries, rows `stride` apart with zeros behind them.
void load_queries(const AttentionArgs& args, const AttentionPart& part, int group, int stride,
                  float* queries) {
  const int dim = args.pool.key_dim, rotated = args.pool.rotated();
  const float scale = args.scale / rotated;
  for (int m = 0; m < part.num_rows * group; m++, queries += stride) {
    const size_t row = static_cast<size_t>(part.first_row) + m / group;
    const float* q = args.q + (row * args.num_query_heads + part.head * group + m % group) * dim;
    for (int i = 0; i < dim; i++) queries[i] = q[i] * scale;
    rotate(queries, dim, rotated);
    for (int i = dim; i < stride; i++) queries[i] = 0;
  }
}

}  // namespace

/// Attend the rows of a part: all of their spans, or only `part.span`.
void native::NATIVE_ISA::attend(const AttentionArgs& args, const AttentionPart& part, float* memory) {
  const PoolLayout& pool = args.pool;
  const int group = args.num_query_heads / pool.num_heads;
  const int size = part.num_rows * group;
  Arena arena{memory};
  const int stride = pool.query_stride();
  const Method method = ::method(pool);
  float* queries = arena.allocate(static_cast<size_t>(MAX_TILE) * stride);
  float* query_scales = arena.allocate(MAX_TILE);
  load_queries(args, part, group, stride, queries);
  if (method.round) method.round(queries, size, stride, pool.key_dim, query_scales);
  const Tile tile{part, group, stride, queries, query_scales};
  const Scratch scratch{arena.allocate(static_cast<size_t>(MAX_TILE) * pool.group_columns()),
                        arena.allocate(pool.key_size() > pool.value_size() ? pool.key_size()
                                                                          : pool.value_size()),
                        arena.allocate(MAX_TILE), arena.allocate(MAX_TILE)};
  const int num_blocks = tile.last_position() / pool.block_size + 1;
  if (part.span >= 0) {
    Arena shared{part.partial};
    const int first = part.span * args.span_blocks, next = first + args.span_blocks;
    method.attend_span(args, part, tile, first, next < num_blocks ? next : num_blocks, scratch,
                  shared.partial(size, pool.value_stride()));
    return;
  }
  const Partial result = arena.partial(size, pool.value_stride());
  const Partial more = arena.partial(size, pool.value_stride());
  init_partial(args, part.head, size, group, result);
  const int first_block = args.first_visible(part.first_position) / pool.block_size;
  const int first_span = first_block / args.span_blocks;
  for (int first = first_span * args.span_blocks; first < num_blocks; first += args.span_blocks) {
    const int next = first + args.span_blocks;
    method.attend_span(args, part, tile, first, next < num_blocks ? next : num_blocks, scratch, more);
    merge(size, pool.value_stride(), more, scratch.factors, result);
  }
  normalize(args, part.head, part.first_row, size, group, result);
}

/// Merge `num_spans` results that `attend` wrote to `part.partial`.
void native::NATIVE_ISA::merge_spans(const AttentionArgs& args, const AttentionPart& part,
                                     int num_spans, float* memory) {
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

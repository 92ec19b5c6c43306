// Attention in 16-bit products: the fast modes over keys and values of 16 or 8 bits.
//
// Queries and the softmax's weights are rounded to the type that an instruction multiplies two of
// in a lane: to bfloat16 for keys and values in bfloat16, whose products are added in float32; to
// integers with a scale for those in integers, whose products are added exactly.  Keys are read in
// groups of blocks that follow from their positions alone, for any number of rows.
#pragma once

#include "kernels.h"
#include "kernels/attention/amx.h"
#include "kernels/attention/tile.h"
#include "kernels/microkernel.h"
#include "kernels/pool.h"

namespace {

/// The instruction for stored numbers of a type, if there is one.
template <typename Stored>
struct Dots {
  static constexpr bool EXIST = false;
};

/// The largest magnitude of integers of which `count` products with 8-bit ones fit into 32 bits.
ALWAYS_INLINE float largest_integer(int count) {
  const int largest = 0x7fffffff / (127 * count);
  return static_cast<float>(largest < 32767 ? largest : 32767);
}

#if defined(__AVX512BF16__)
template <>
struct Dots<uint16_t> {
  static constexpr bool EXIST = true, IS_OF_UNIT = HAS_UNIT;
  using Sums = F32;

  static ALWAYS_INLINE I32 load(const uint16_t* pairs) {
    return *reinterpret_cast<const I32*>(pairs);
  }
  /// Denormals count as 0; odd products are added first, each rounded.
  static ALWAYS_INLINE F32 add(F32 sums, I32 pairs, const uint32_t* x) {
    const __m512i all = _mm512_set1_epi32(static_cast<int>(*x));
    return (F32)_mm512_dpbf16_ps((__m512)sums, (__m512bh)all, (__m512bh)(__m512i)pairs);
  }
  static ALWAYS_INLINE F32 scaled(F32 sums, float) { return sums; }
  /// Round floats in place; return their scale.
  static ALWAYS_INLINE float round(float* x, int size, int) {
    auto* halves = reinterpret_cast<__m256i*>(x);
    for (int i = 0; i < size; i += LANES)
      _mm256_storeu_si256(halves++, (__m256i)_mm512_cvtneps_pbh((__m512)::load(x + i)));
    return 1;
  }
};
#endif

#if defined(HAS_DOT)
template <>
struct Dots<int8_t> {
  static constexpr bool EXIST = true, IS_OF_UNIT = false;
  using Sums = I32;

  static ALWAYS_INLINE I32 load(const int8_t* pairs) {
#if defined(__AVX512F__)
    return (I32)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)));
#else
    return (I32)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs)));
#endif
  }
  static ALWAYS_INLINE I32 add(I32 sums, I32 pairs, const uint32_t* x) {
    return dot<int16_t>(sums, pairs, reinterpret_cast<const uint8_t*>(x));
  }
  static ALWAYS_INLINE F32 scaled(I32 sums, float scale) { return to_float(sums) * splat(scale); }
  /// The scale is NaN if a number is not finite.
  static ALWAYS_INLINE float round(float* x, int size, int count) {
    const float largest = largest_magnitude(x, size), top = largest_integer(count);
    const bool is_finite = largest < INF;
    const F32 factor = splat(is_finite && largest > 1e-30f ? top / largest : 0);
    auto* integers = reinterpret_cast<I16*>(x);
    for (int i = 0; i < size; i += LANES)
      *integers++ = narrow<int16_t>(round_to_int(is_finite ? ::load(x + i) * factor : F32{}));
    return is_finite ? largest / top : __builtin_nanf("");
  }
};
#endif

/// The products of ROWS rows of words with COLUMNS columns of successive blocks; `finish` takes
/// the sums of a row's vector.
template <typename Stored, int ROWS, bool HAS_NEXT, typename Finish>
ALWAYS_INLINE void dot_rows(const uint32_t* x, size_t ldx, size_t words_per_block,
                            const Pairs<Stored>* blocks, int num_blocks, size_t stride, int column,
                            const Finish& finish) {
  using D = Dots<Stored>;
  typename D::Sums sums[ROWS][VECTORS] = {};
  for (int b = 0; b < num_blocks; b++, x += words_per_block) {
    const Pairs<Stored>& block = blocks[b];
    const Stored* w = block.data + 2 * column;
    const int whole = block.count / 2;
    const Stored* next = block.next ? block.next + size_t{2} * column * whole : nullptr;
    const auto step = [&](int i, int bits) __attribute__((always_inline)) {
      I32 pairs[VECTORS];
      for (int v = 0; v < VECTORS; v++) pairs[v] = D::load(w + 2 * (i * stride + v * LANES)) & bits;
      if constexpr (HAS_NEXT)
        for (size_t j = 0; j < 2 * COLUMNS; j += 64 / sizeof(Stored))
          prefetch(next + 2 * i * COLUMNS + j);
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECTORS; v++) sums[m][v] = D::add(sums[m][v], pairs[v], x + m * ldx + i);
    };
    for (int i = 0; i < whole; i++) step(i, -1);
    // What follows the last one may be anything.
    if (block.count % 2) step(whole, 0xffff);
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) finish(m, v * LANES, sums[m][v]);
}

/// The same for any number of rows; `finish` takes the row and the column, too.
template <typename Stored, typename Finish>
void dot_tile(int rows, const uint32_t* x, size_t ldx, size_t words_per_block,
              const Pairs<Stored>* blocks, int num_blocks, size_t stride, int column,
              const Finish& finish) {
  const native::Tiles tiles{rows, MAX_ROWS};
  for (int t = 0; t < tiles.count(); t++) {
    const int first = tiles.first(t);
    const auto finish_row = [&](int m, int j, auto sums) __attribute__((always_inline)) {
      finish(first + m, column + j, sums);
    };
    const uint32_t* own = x + first * ldx;
    const bool has_next = t == 0 && blocks[num_blocks - 1].next;
#define CASE(ROWS)                                                                               \
  case ROWS:                                                                                     \
    if (has_next)                                                                                \
      dot_rows<Stored, ROWS, true>(own, ldx, words_per_block, blocks, num_blocks, stride,        \
                                   column, finish_row);                                          \
    else                                                                                         \
      dot_rows<Stored, ROWS, false>(own, ldx, words_per_block, blocks, num_blocks, stride,       \
                                    column, finish_row);                                         \
    break;
    switch (tiles.height(t)) { FOR_EACH_HEIGHT(CASE) }
#undef CASE
  }
}

/// Turn scores into rounded weights, each times the scale of its value if there are any; see
/// update_softmax.
template <typename Stored>
void round_softmax(float* scores, int size, int stride, int width, const Pairs<Stored>* values,
                   int block_width, float* maxima, float* sums, float* factors, float* scales) {
  update_maxima(scores, size, stride, width, maxima, factors);
  for (int m = 0; m < size; m++) {
    float* row = scores + m * stride;
    const F32 shift = splat(maxima[m] == -INF ? 0.0f : maxima[m]);
    F32 total{};
    for (int first = 0, b = 0; first < width; first += block_width, b++) {
      for (int j = first; j < first + block_width; j += LANES) {
        F32 weight = exp_coarse(load(row + j) - shift);
        total += weight;
        if constexpr (sizeof(Stored) == 1) {
          // The scale of a value that a row does not see may be NaN.
          const F32 scaled = weight * load(values[b].scales + j - first);
          weight = weight == F32{} ? weight : scaled;
        }
        store(row + j, weight);
      }
    }
    sums[m] = sums[m] * factors[m] + sum(total);
    scales[m] = Dots<Stored>::round(row, width, width);
  }
}

/// Queries rounded in place, a row of words where a row of floats was.
template <typename Stored>
void round_queries(float* queries, int size, int stride, int dim, float* scales) {
  for (int m = 0; m < size; m++)
    scales[m] = Dots<Stored>::round(queries + m * stride, stride, dim);
}

template <typename Stored>
void attend_span_rounded(const AttentionArgs& args, const AttentionPart& part, const Tile& tile,
                         int first_block, int next_block, const Scratch& scratch,
                         const Partial& result) {
  using D = Dots<Stored>;
  const MatrixUnit unit(D::IS_OF_UNIT ? tile.size() : 0);
  const PoolLayout& pool = args.pool;
  const int size = tile.size(), width = pool.key_stride(), columns = pool.group_columns();
  const int group_blocks = pool.group_blocks(), ldy = pool.value_stride();
  const int num_blocks = part.span < 0 ? tile.last_position() / pool.block_size + 1 : next_block;
  const auto pairs = [&](const void* data, size_t numbers, int at, int count) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    const int64_t block = int64_t{part.blocks[at]} * pool.num_heads + part.head;
    const int64_t ahead = part.ahead(at, group_blocks, num_blocks, pool.num_heads);
    Pairs<Stored> found{};
    found.data = reinterpret_cast<const Stored*>(bytes + block * pool.bytes(numbers));
    if (ahead >= 0) found.next = reinterpret_cast<const Stored*>(bytes + ahead * pool.bytes(numbers));
    found.count = count;
    if constexpr (sizeof(Stored) == 1) {
      found.scales = reinterpret_cast<const float*>(found.data + numbers);
      for (size_t i = numbers; found.next && i < pool.bytes(numbers); i += 64)
        prefetch(found.next + i);
    }
    return found;
  };
  clear(size, ldy, result);
  const auto* queries = reinterpret_cast<const uint32_t*>(tile.queries);
  for (int first = first_block; first < next_block; first += group_blocks) {
    const int num = next_block - first < group_blocks ? next_block - first : group_blocks;
    Pairs<Stored> values[native::GROUP_KEYS];
    for (int b = 0; b < num; b++) {
      const int first_key = (first + b) * pool.block_size;
      const int left = tile.last_position() + 1 - first_key;
      const int num_keys = left < pool.block_size ? left : pool.block_size;
      const auto keys = pairs(args.keys, pool.key_size(), first + b, pool.key_dim);
      values[b] = pairs(args.values, pool.value_size(), first + b, num_keys);
      float* scores = scratch.scores + b * width;
      const auto keep = [&](int m, int j, auto sums) __attribute__((always_inline)) {
        F32 score = D::scaled(sums, tile.scales[m]);
        if constexpr (sizeof(Stored) == 1) score *= load(keys.scales + j);
        store(scores + m * columns + j, score);
      };
      for (int j = 0; j < num_keys; j += COLUMNS)
        dot_tile(size, queries, tile.stride, 0, &keys, 1, width, j, keep);
      finish_scores(args, tile, first_key, num_keys, scores, columns, width);
    }
    round_softmax(scratch.scores, size, columns, num * width, values, width, result.maxima,
                  result.sums, scratch.factors, scratch.scales);
    const auto add = [&](int m, int j, auto sums) __attribute__((always_inline)) {
      float* y = result.values + m * ldy + j;
      const F32 more = D::scaled(sums, scratch.scales[m]);
      store(y, fused(load(y), splat(scratch.factors[m]), more));
    };
    const auto* weights = reinterpret_cast<const uint32_t*>(scratch.scores);
    for (int j = 0; j < ldy; j += COLUMNS)
      dot_tile(size, weights, columns, width / 2, values, num, ldy, j, add);
  }
}

}  // namespace

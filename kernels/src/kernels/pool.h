// Writing keys and values into the paged pool: as they are, rounded to bfloat16, or as integers.
#pragma once

#include "kernels.h"
#include "kernels/bf16.h"
#include "kernels/simd.h"

namespace {

using native::CacheType;
using native::PoolLayout;

constexpr float INF = __builtin_inff();

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

ALWAYS_INLINE void store_as(float x, float* stored) { *stored = x; }
ALWAYS_INLINE void store_as(float x, uint16_t* stored) { *stored = to_bf16(x); }

/// Where the number at a column of a row is stored.
template <typename Stored>
ALWAYS_INLINE size_t stored_at(int row, int column, int stride) {
  constexpr int PACK = native::packed_rows(sizeof(Stored));
  return (static_cast<size_t>(row / PACK) * stride + column) * PACK + row % PACK;
}

/// Fill the row that is stored with the last one if the number of rows is odd.
template <typename Stored>
ALWAYS_INLINE void write_odd_row(int num_rows, int column, int stride, Stored* rows) {
  if (num_rows % native::packed_rows(sizeof(Stored)))
    rows[stored_at<Stored>(num_rows, column, stride)] = 0;
}

/// Write successive tokens of one block.
template <typename Stored>
void write_tokens(const PoolLayout& pool, void* pool_keys, void* pool_values, int slot,
                  int num_tokens, const float* keys, const float* values, float*) {
  const size_t block = slot / pool.block_size, at = slot % pool.block_size;
  for (int h = 0; h < pool.num_heads; h++) {
    const size_t head = block * pool.num_heads + h;
    const int stride = pool.key_stride();
    Stored* key = static_cast<Stored*>(pool_keys) + head * pool.key_size();
    for (int i = 0; i < pool.key_dim; i++)
      for (int t = 0; t < num_tokens; t++)
        store_as(keys[(t * pool.num_heads + h) * pool.key_dim + i],
                 key + stored_at<Stored>(i, at + t, stride));
    for (int t = 0; t < num_tokens; t++) write_odd_row(pool.key_dim, at + t, stride, key);
    if (pool.is_latent) continue;
    Stored* value = static_cast<Stored*>(pool_values) + head * pool.value_size();
    for (int t = 0; t < num_tokens; t++)
      for (int i = 0; i < pool.value_dim; i++)
        store_as(values[(t * pool.num_heads + h) * pool.value_dim + i],
                 value + stored_at<Stored>(at + t, i, pool.value_stride()));
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

/// Round numbers to integers, each kept by `keep`; return their scale, NaN if a number is not finite.
template <typename Keep>
ALWAYS_INLINE float quantize(const float* x, int size, const Keep& keep) {
  const float largest = largest_magnitude(x, size);
  const bool is_finite = largest < INF;
  // Avoids a division by 0; numbers that small are negligible.
  const float factor = is_finite && largest > 1e-30f ? 127 / largest : 0;
  const float round = 12582912.0f;  // as in exp
  for (int i = 0; i < size; i++) {
    const int32_t shifted = __builtin_bit_cast(int32_t, __builtin_fmaf(x[i], factor, round));
    keep(i, static_cast<int8_t>(shifted - __builtin_bit_cast(int32_t, round)));
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
      const int stride = pool.key_stride(), value_stride = pool.value_stride();
      key_scales[slot] = quantize(rotated, pool.key_dim, [&](int i, int8_t integer) {
        key[stored_at<int8_t>(i, slot, stride)] = integer;
      });
      write_odd_row(pool.key_dim, slot, stride, key);
      value_scales[slot] =
          quantize(values + row * pool.value_dim, pool.value_dim, [&](int i, int8_t integer) {
            value[stored_at<int8_t>(slot, i, value_stride)] = integer;
          });
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

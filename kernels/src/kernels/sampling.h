// What sampling a token does with each logit.
#pragma once

#include "kernels/simd.h"

namespace {

/// ln(x) within 2 units in the last place for normal x > 0.
///
/// x = 2^n m with m in [sqrt(1/2), sqrt(2)); ln(m) = 2 artanh(s), s = (m - 1) / (m + 1), by its series.
ALWAYS_INLINE F32 log(F32 x) {
  const I32 bits = (I32)x - 0x3f3504f3;  // of sqrt(1/2)
  const F32 n = to_float(bits >> 23);
  const F32 m = (F32)((bits & 0x007fffff) + 0x3f3504f3) - splat(1.0f);
  const F32 s = m / (m + splat(2.0f)), square = s * s;
  F32 p = splat(2.0f / 9);
  p = p * square + splat(2.0f / 7);
  p = p * square + splat(2.0f / 5);
  p = p * square + splat(2.0f / 3);
  // m - 1 is exact, and s is small beside it.
  const F32 rest = s * (m - p * square);
  return n * splat(0.693145752f) + (m - (rest - n * splat(1.42860677e-6f)));
}

/// The products of the even lanes with a number, twice as wide.
ALWAYS_INLINE U32 wide_products(U32 v, uint32_t factor) {
#if defined(__AVX512F__)
  return (U32)_mm512_mul_epu32((__m512i)v, _mm512_set1_epi32(static_cast<int32_t>(factor)));
#elif defined(__AVX2__)
  return (U32)_mm256_mul_epu32((__m256i)v, _mm256_set1_epi32(static_cast<int32_t>(factor)));
#else
  for (int i = 0; i < LANES; i += 2) {
    const uint64_t product = uint64_t{v[i]} * factor;
    v[i] = static_cast<uint32_t>(product);
    v[i + 1] = static_cast<uint32_t>(product >> 32);
  }
  return v;
#endif
}

/// 32 random bits of each of these numbers: the first word of Philox2x32-10 (Salmon et al. 2011), whose
/// counter is the number and the upper half of the seed, its key the lower half.
ALWAYS_INLINE U32 random_bits(U32 numbers, uint64_t seed) {
  using U64 = uint64_t __attribute__((vector_size(4 * LANES)));
  U32 left = numbers, right = (U32)splat_int(static_cast<int32_t>(seed >> 32));
  uint32_t key = static_cast<uint32_t>(seed);
  for (int round = 0; round < 10; round++, key += 0x9e3779b9) {
    const U64 even = (U64)wide_products(left, 0xd256d193);
    const U64 odd = (U64)wide_products((U32)((U64)left >> 32), 0xd256d193);
    const U32 high = (U32)(even >> 32 | odd >> 32 << 32);
    const U32 low = (U32)(even << 32 >> 32 | odd << 32);
    left = high ^ key ^ right;
    right = low;
  }
  return left;
}

/// Exponentially distributed times, from 2e-10 to 17.4.
ALWAYS_INLINE F32 exponential(U32 bits) {
  const F32 whole = to_float((I32)(bits >> 1));
  const F32 uniform = (whole + splat(0.5f)) * splat(0x1p-31f);
  // -ln(1 - u), by its series where that is more exact.
  const F32 series = uniform * (splat(1.0f) + uniform * (splat(0.5f) + uniform * splat(1.0f / 3)));
  const F32 left = max(splat(1.0f) - uniform, splat(0x1p-25f));
  return uniform < splat(0x1p-8f) ? series : -log(left);
}

/// Logits from the i-th on, with -inf behind the last one.
ALWAYS_INLINE F32 load_logits(const float* x, int i, int size) {
  if (i + LANES <= size) return load(x + i);
  float last[LANES];
  for (int j = 0; j < LANES; j++) last[j] = i + j < size ? x[i + j] : -__builtin_inff();
  return load(last);
}

float largest(const float* x, int size) {
  F32 highest = splat(-__builtin_inff());
  I32 are_nan{};
  for (int i = 0; i < size; i += LANES) {
    const F32 values = load_logits(x, i, size);
    are_nan |= (I32)(values != values);
    highest = max(highest, values);
  }
  return any(are_nan) ? __builtin_nanf("") : max(highest);
}

double total_weight(const float* x, int size, float highest, float factor) {
  // Floats add up this many values at most.
  constexpr int BLOCK = 64 * LANES;
  double total = 0;
  for (int first = 0; first < size; first += BLOCK) {
    F32 weights{};
    for (int i = first; i < size && i < first + BLOCK; i += LANES)
      weights += exp((load_logits(x, i, size) - splat(highest)) * splat(factor));
    total += sum(weights);
  }
  return total;
}

int find_above(const float* x, int first, int size, float floor) {
  int i = first;
  for (; i + LANES <= size; i += LANES)
    if (any((I32)(load(x + i) > splat(floor)))) break;
  for (; i < size; i++)
    if (x[i] > floor) break;
  return i;
}

int race(const float* x, const int32_t* tokens, int size, float highest, float factor,
         uint64_t seed) {
  F32 best = splat(-1.0f);
  I32 winners{}, numbers{};
  for (int j = 0; j < LANES; j++) numbers[j] = j;
  for (int i = 0; i < size; i += LANES, numbers += LANES) {
    I32 named = numbers;
    if (tokens)
      for (int j = 0; j < LANES; j++) named[j] = tokens[i + j < size ? i + j : size - 1];
    const F32 weights = exp((load_logits(x, i, size) - splat(highest)) * splat(factor));
    const F32 speeds = weights / exponential(random_bits((U32)named, seed));
    const I32 is_better = (I32)(speeds > best);
    best = is_better ? speeds : best;
    winners = is_better ? numbers : winners;
  }
  int winner = winners[0];
  float speed = best[0];
  for (int j = 1; j < LANES; j++)
    if (best[j] > speed || (best[j] == speed && winners[j] < winner))
      winner = winners[j], speed = best[j];
  return winner;
}

}  // namespace

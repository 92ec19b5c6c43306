// What the machine can do at best: the roofs that kernels are measured against.
#pragma once

#include "kernels/simd.h"

namespace {

/// Read memory, and do as little as can be with it.
float read_all(const float* x, size_t size) {
  F32 sums[8] = {};
  for (size_t i = 0; i + 8 * LANES <= size; i += 8 * LANES)
    for (int v = 0; v < 8; v++) sums[v] += load(x + i + v * LANES);
  F32 total{};
  for (const F32& each : sums) total += each;
  return sum(total);
}

/// Multiply and add in registers, 16 sums of LANES floats in each of the rounds.
float multiply_add(int64_t num_rounds, float factor) {
  F32 sums[16];
  const F32 value = splat(factor);
  // Each another number, or the compiler would see that they are all the same.
  for (int i = 0; i < 16; i++) sums[i] = splat(factor + i);
  for (int64_t i = 0; i < num_rounds; i++)
    for (F32& each : sums) each = each * value + value;
  F32 total{};
  for (const F32& each : sums) total += each;
  return sum(total);
}

}  // namespace

// Operations on each row or each value by itself.
#pragma once

#include "kernels/simd.h"

namespace {

void rms_norm(const float* x, const float* weight, float eps, int size, float* y) {
  const int whole = size / LANES * LANES;
  F32 squares{};
  for (int i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (int i = whole; i < size; i++) total += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf(total / size + eps);
  for (int i = 0; i < whole; i += LANES) {
    F32 scaled = load(x + i) * splat(factor);
    store(y + i, weight ? scaled * load(weight + i) : scaled);
  }
  for (int i = whole; i < size; i++) y[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
}

void weighted_sum(const float* const* rows, const float* weights, int count, size_t size,
                  float* y) {
  size_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    F32 total{};
    for (int j = 0; j < count; j++) total += splat(weights[j]) * load(rows[j] + i);
    store(y + i, total);
  }
  for (; i < size; i++) {
    float total = 0;
    for (int j = 0; j < count; j++) total += weights[j] * rows[j][i];
    y[i] = total;
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int size,
                float* y) {
  const int whole = size / LANES * LANES;
  F32 sums{};
  for (int i = 0; i < whole; i += LANES) sums += load(x + i);
  float total = sum(sums);
  for (int i = whole; i < size; i++) total += x[i];
  const float mean = total / size;
  F32 squares{};
  for (int i = 0; i < whole; i += LANES) {
    const F32 centered = load(x + i) - splat(mean);
    squares += centered * centered;
  }
  total = sum(squares);
  for (int i = whole; i < size; i++) total += (x[i] - mean) * (x[i] - mean);
  const float factor = 1.0f / __builtin_sqrtf(total / size + eps);
  for (int i = 0; i < whole; i += LANES) {
    F32 scaled = (load(x + i) - splat(mean)) * splat(factor);
    if (weight) scaled *= load(weight + i);
    store(y + i, bias ? scaled + load(bias + i) : scaled);
  }
  for (int i = whole; i < size; i++) {
    const float scaled = (x[i] - mean) * factor * (weight ? weight[i] : 1.0f);
    y[i] = bias ? scaled + bias[i] : scaled;
  }
}

void rope(const float* x, const float* cosines, const float* sines, int half, int dim,
          bool traditional, float* y) {
  const int stride = traditional ? 2 : 1, other = traditional ? 1 : half;
  for (int i = 0; i < half; i++) {
    const float a = x[i * stride], b = x[i * stride + other];
    // Explicit, so that the same product is rounded however the loop is compiled.
    y[i * stride] = __builtin_fmaf(a, cosines[i], -(b * sines[i]));
    y[i * stride + other] = __builtin_fmaf(b, cosines[i], a * sines[i]);
  }
  for (int i = 2 * half; i < dim; i++) y[i] = x[i];
}

ALWAYS_INLINE F32 silu(F32 x) { return x / (splat(1.0f) + exp(-x)); }

ALWAYS_INLINE F32 sigmoid(F32 x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

/// GELU (Hendrycks and Gimpel 2016) in its tanh form: x / 2 (1 + tanh(u)) is x / (1 + e^-2u).
ALWAYS_INLINE F32 gelu(F32 x) {
  const F32 twice = splat(1.5957691216057308f) * x * (splat(1.0f) + splat(0.044715f) * x * x);
  return x / (splat(1.0f) + exp(-twice));
}

/// GELU as it is defined, x times the normal distribution up to x, whose tail is by Abramowitz and
/// Stegun (1964), 7.1.26, within 1e-7.
ALWAYS_INLINE F32 gelu_erf(F32 x) {
  const F32 size = absolute(x) * splat(0.70710678f);
  const F32 t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f) * size);
  F32 p = splat(1.061405429f);
  p = p * t - splat(1.453152027f);
  p = p * t + splat(1.421413741f);
  p = p * t - splat(0.284496736f);
  p = p * t + splat(0.254829592f);
  const F32 tail = splat(0.5f) * x * p * t * exp(-size * size);
  return x > F32{} ? x - tail : tail;
}

ALWAYS_INLINE F32 relu(F32 x) { return x < F32{} ? F32{} : x; }  // a NaN stays
ALWAYS_INLINE F32 squared_relu(F32 x) { return relu(x) * relu(x); }

/// y = run(gate, up), of vectors; `up` is 1 if it is null.
template <typename Run>
ALWAYS_INLINE void for_pairs(const float* gate, const float* up, size_t size, float* y, Run run) {
  const size_t whole = size / LANES * LANES;
  for (size_t i = 0; i < whole; i += LANES)
    store(y + i, run(load(gate + i), up ? load(up + i) : splat(1.0f)));
  if (whole == size) return;
  // The rest as one vector, so that a result does not depend on its position.
  float last[2][LANES] = {};
  for (size_t i = whole; i < size; i++)
    last[0][i - whole] = gate[i], last[1][i - whole] = up ? up[i] : 1;
  const F32 result = run(load(last[0]), load(last[1]));
  for (size_t i = whole; i < size; i++) y[i] = result[i - whole];
}

template <F32 (*activation)(F32)>
void gated(const float* gate, const float* up, size_t size, float* y) {
  for_pairs(gate, up, size, y, [](F32 g, F32 u) __attribute__((always_inline)) {
    return activation(g) * u;
  });
}

void clipped_swiglu(const float* gate, const float* up, float alpha, float limit, size_t size,
                    float* y) {
  const F32 top = splat(limit), factor = splat(alpha);
  for_pairs(gate, up, size, y, [=](F32 g, F32 u) __attribute__((always_inline)) {
    g = g > top ? top : g;  // a NaN stays
    u = u > top ? top : u;
    u = u < -top ? -top : u;
    return g / (splat(1.0f) + exp(-factor * g)) * (u + splat(1.0f));
  });
}

}  // namespace

// Recurrences: a state that the tokens of a request change one after the other.
#pragma once

#include "kernels/simd.h"

namespace {

using native::ConvolutionArgs;
using native::DeltaArgs;

/// A vector's worth of numbers in memory.
struct Whole {
  ALWAYS_INLINE F32 load(const float* p) const { return ::load(p); }
  ALWAYS_INLINE void store(float* p, F32 v) const { ::store(p, v); }
};

/// Fewer; the other lanes are zero.
struct Part {
  int size;

  ALWAYS_INLINE F32 load(const float* p) const {
    F32 v{};
    for (int i = 0; i < size; i++) v[i] = p[i];
    return v;
  }
  ALWAYS_INLINE void store(float* p, F32 v) const {
    for (int i = 0; i < size; i++) p[i] = v[i];
  }
};

/// Call `run(i, vector)` for each vector of `[size]`.
template <typename Run>
ALWAYS_INLINE void for_vectors(int size, const Run& run) {
  const int whole = size / LANES * LANES;
  for (int i = 0; i < whole; i += LANES) run(i, Whole{});
  if (whole < size) run(whole, Part{size - whole});
}

// Rows of a state at a time: they share what is loaded for a token, and hide each other's latency.
constexpr int DELTA_ROWS = LANES == 8 ? 4 : 8;

/// What rows of one head read of a token.
struct DeltaToken {
  const float* q;
  const float* k;
  const float* decay;  // of each channel, or of all
  bool has_channels;
  bool is_additive;
  float beta;

  template <typename Vector>
  ALWAYS_INLINE F32 decay_at(int i, Vector vector) const {
    return has_channels ? vector.load(decay + i) : splat(*decay);
  }
};

/// One token for ROWS rows `[size]` of a state.
template <int ROWS>
ALWAYS_INLINE void delta_step(const DeltaToken& token, const float* v, int size, const float* from,
                              float* to, float* y) {
  F32 sums[ROWS] = {};
  if (!token.is_additive)
    for_vectors(size, [&](int i, auto vector) {
      const F32 key = vector.load(token.k + i) * token.decay_at(i, vector);
      for (int r = 0; r < ROWS; r++) sums[r] += vector.load(from + r * size + i) * key;
    });
  F32 deltas[ROWS];
  for (int r = 0; r < ROWS; r++) deltas[r] = splat((v[r] - sum(sums[r])) * token.beta);
  for (int r = 0; r < ROWS; r++) sums[r] = F32{};
  for_vectors(size, [&](int i, auto vector) {
    const F32 query = vector.load(token.q + i), key = vector.load(token.k + i);
    const F32 decay = token.decay_at(i, vector);
    for (int r = 0; r < ROWS; r++) {
      const F32 state = vector.load(from + r * size + i) * decay + key * deltas[r];
      vector.store(to + r * size + i, state);
      sums[r] += state * query;
    }
  });
  for (int r = 0; r < ROWS; r++) y[r] = sum(sums[r]);
}

void delta_rule(const DeltaArgs& args, int head, int first, int next) {
  const size_t size = args.key_dim, num_heads = args.num_heads;
  const size_t request = head / num_heads, own = head % num_heads;
  const size_t key_head = own * args.num_key_heads / num_heads;
  const size_t offset = static_cast<size_t>(head) * args.value_dim * size;
  float* const state = args.new_state + offset;
  const float* before = args.state ? args.state + offset : state;
  if (!args.state)
    for (size_t i = first * size; i < next * size; i++) state[i] = 0;
  for (int t = 0; t < args.num_tokens; t++, before = state) {
    const size_t row = request * args.num_tokens + t;
    const size_t key = (row * args.num_key_heads + key_head) * size;
    const size_t value = row * num_heads + own;
    const DeltaToken token{args.q + key, args.k + key,
                           args.decay + value * (args.has_channels ? size : 1), args.has_channels,
                           args.is_additive, args.beta[value]};
    const float* v = args.v + value * args.value_dim;
    float* y = args.y + value * args.value_dim;
    int r = first;
    for (; r + DELTA_ROWS <= next; r += DELTA_ROWS)
      delta_step<DELTA_ROWS>(token, v + r, size, before + r * size, state + r * size, y + r);
    for (; r < next; r++)
      delta_step<1>(token, v + r, size, before + r * size, state + r * size, y + r);
  }
}

void convolve(const ConvolutionArgs& args, int row, int first, int next) {
  const size_t num_channels = args.num_channels;
  const size_t first_row = row + static_cast<size_t>(row / args.num_tokens) * (args.num_taps - 1);
  const float* x = args.x + first_row * num_channels + first;
  const float* taps = args.taps + first;
  float* y = args.y + row * num_channels + first;
  for_vectors(next - first, [&](int i, auto vector) {
    F32 sum = args.bias ? vector.load(args.bias + first + i) : F32{};
    for (int t = 0; t < args.num_taps; t++)
      sum += vector.load(x + t * num_channels + i) * vector.load(taps + t * num_channels + i);
    vector.store(y + i, sum);
  });
}

}  // namespace

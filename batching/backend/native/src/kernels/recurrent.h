// Recurrences: a state that the tokens of a request change one after the other.
#pragma once

#include "kernels/pointwise.h"
#include "kernels/simd.h"

namespace {

using native::ConvolutionArgs;
using native::DeltaArgs;
using native::DeltaColumns;
using native::STATE_COLUMNS;

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

constexpr int STATE_VECTORS = STATE_COLUMNS / LANES;

/// A number for each column.
struct Columns {
  F32 of[STATE_VECTORS];
};

/// One token on all columns: the state decays and takes the delta; returns the outputs, and in `sums` its
/// product with the next token's key, if there is one.
///
/// Two sums each, since a sum waits four cycles for itself.  Products are fused explicitly: the bits
/// must not depend on whether there is a next token.
template <bool has_next>
ALWAYS_INLINE Columns delta_token(const DeltaColumns& args, const float* from, const float* q,
                                  const float* k, float decay, const Columns& delta,
                                  const float* next_key, Columns& sums) {
  F32 outputs[2][STATE_VECTORS] = {}, products[2][STATE_VECTORS] = {};
  const F32 factor = splat(decay);
  const auto row = [&](int i, int parity) __attribute__((always_inline)) {
    const F32 key = splat(k[i]), query = splat(q[i]);
    for (int c = 0; c < STATE_VECTORS; c++) {
      const size_t at = static_cast<size_t>(i) * STATE_COLUMNS + c * LANES;
      const F32 state = fused(key, delta.of[c], load(from + at) * factor);
      store(args.after + at, state);
      outputs[parity][c] = fused(state, query, outputs[parity][c]);
      if constexpr (has_next)
        products[parity][c] = fused(state, splat(next_key[i]), products[parity][c]);
    }
    if constexpr (!has_next)
      if (args.next)
        for (int c = 0; c < STATE_COLUMNS; c += 16)
          __builtin_prefetch(args.next + static_cast<size_t>(i) * STATE_COLUMNS + c);
  };
  int i = 0;
  for (; i + 1 < args.key_dim; i += 2) row(i, 0), row(i + 1, 1);
  if (i < args.key_dim) row(i, 0);
  Columns y;
  for (int c = 0; c < STATE_VECTORS; c++) {
    y.of[c] = outputs[0][c] + outputs[1][c];
    if constexpr (has_next) sums.of[c] = products[0][c] + products[1][c];
  }
  return y;
}

/// The state's product with a key.
ALWAYS_INLINE Columns delta_product(const float* state, const float* k, int key_dim) {
  F32 products[2][STATE_VECTORS] = {};
  const auto row = [&](int i, int parity) __attribute__((always_inline)) {
    for (int c = 0; c < STATE_VECTORS; c++)
      products[parity][c] =
          fused(load(state + static_cast<size_t>(i) * STATE_COLUMNS + c * LANES), splat(k[i]),
                products[parity][c]);
  };
  int i = 0;
  for (; i + 1 < key_dim; i += 2) row(i, 0), row(i + 1, 1);
  if (i < key_dim) row(i, 0);
  Columns sums;
  for (int c = 0; c < STATE_VECTORS; c++) sums.of[c] = products[0][c] + products[1][c];
  return sums;
}

/// A pass over the state for each token, and one before the first: that of a token also takes the
/// state's product with the next one's key.
void delta_columns(const DeltaColumns& args) {
  const float* from = args.before;
  if (!from) {
    for (int i = 0; i < args.key_dim * STATE_COLUMNS; i++) args.after[i] = 0;
    from = args.after;
  }
  Columns sums = delta_product(from, args.k, args.key_dim);
  for (int t = 0; t < args.num_tokens; t++, from = args.after) {
    const size_t key = static_cast<size_t>(t) * args.key_dim, gate = t * args.gate_stride;
    float values[STATE_COLUMNS] = {};
    for (int i = 0; i < args.num_values; i++) values[i] = args.v[t * args.value_stride + i];
    const float decay = args.decay[gate];
    Columns delta;
    for (int c = 0; c < STATE_VECTORS; c++)
      delta.of[c] =
          (load(values + c * LANES) - sums.of[c] * splat(decay)) * splat(args.beta[gate]);
    const float *q = args.q + key, *k = args.k + key;
    const Columns y =
        t + 1 < args.num_tokens
            ? delta_token<true>(args, from, q, k, decay, delta, k + args.key_dim, sums)
            : delta_token<false>(args, from, q, k, decay, delta, nullptr, sums);
    float outputs[STATE_COLUMNS];
    for (int c = 0; c < STATE_VECTORS; c++) store(outputs + c * LANES, y.of[c]);
    for (int i = 0; i < args.num_values; i++) args.y[t * args.output_stride + i] = outputs[i];
  }
}

void convolve_silu(const float* const* rows, const float* taps, size_t stride, int num_taps,
                   int size, float* y) {
  for_vectors(size, [&](int i, auto vector) {
    F32 sum{};
    for (int t = 0; t < num_taps; t++)
      sum = fused(vector.load(rows[t] + i), vector.load(taps + t * stride + i), sum);
    vector.store(y + i, silu(sum));
  });
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

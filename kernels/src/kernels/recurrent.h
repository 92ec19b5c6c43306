// Recurrences: a state that the tokens of a request change one after the other.
#pragma once

#include "kernels/pointwise.h"
#include "kernels/simd.h"

namespace {

using native::ConvolutionArgs;
using native::ConvolvedRows;
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

// Vectors of columns at a time, with sums in registers, and how many sums each has: one waits four
// cycles for itself.
constexpr int DELTA_VECTORS = LANES == 8 ? 2 : 4, DELTA_SUMS = LANES == 8 ? 2 : 1;
static_assert(STATE_COLUMNS % (DELTA_VECTORS * LANES) == 0);

/// Sums of products for some columns, one sum after the other for successive products.
struct ColumnSums {
  F32 of[DELTA_SUMS][DELTA_VECTORS] = {};

  ALWAYS_INLINE void add(int i, int c, F32 a, F32 b) {
    F32& sum = of[i % DELTA_SUMS][c];
    sum = fused(a, b, sum);
  }
  ALWAYS_INLINE F32 total(int c) const {
    return DELTA_SUMS == 1 ? of[0][c] : of[0][c] + of[DELTA_SUMS - 1][c];
  }
};

/// Call `run(i, i % DELTA_SUMS)` for each row of a state, the latter known to the compiler.
template <typename Run>
ALWAYS_INLINE void for_keys(int key_dim, const Run& run) {
  int i = 0;
  for (; i + DELTA_SUMS <= key_dim; i += DELTA_SUMS)
    for (int parity = 0; parity < DELTA_SUMS; parity++) run(i + parity, parity);
  if (i < key_dim) run(i, 0);
}

ALWAYS_INLINE const float* at(const float* state, int i, int c) {
  return state + static_cast<size_t>(i) * STATE_COLUMNS + c * LANES;
}

/// One token: the state decays and takes the delta.  Sums its product with the query, and with the next
/// token's key, if there is one.  Products are fused explicitly: no bit depends on whether there is.
template <bool has_next>
ALWAYS_INLINE void delta_token(const float* from, float* to, int key_dim, const float* q,
                               const float* k, float decay, const F32* deltas,
                               const float* next_key, const float* prefetched, ColumnSums& outputs,
                               ColumnSums& products) {
  const F32 factor = splat(decay);
  for_keys(key_dim, [&](int i, int parity) __attribute__((always_inline)) {
    for (int c = 0; c < DELTA_VECTORS; c++) {
      const F32 state = fused(splat(k[i]), deltas[c], load(at(from, i, c)) * factor);
      store(const_cast<float*>(at(to, i, c)), state);
      outputs.add(parity, c, state, splat(q[i]));
      if constexpr (has_next) products.add(parity, c, state, splat(next_key[i]));
    }
    if constexpr (!has_next)
      if (prefetched)
        for (int c = 0; c < DELTA_VECTORS * LANES; c += 16)
          __builtin_prefetch(at(prefetched, i, 0) + c);
  });
}

/// Columns from `first` on.  A pass over the state for each token, and one before the first: that of a token
/// also takes the state's product with the next one's key.
ALWAYS_INLINE void delta_vectors(const DeltaColumns& args, int first) {
  float* const to = args.after + first;
  const float* from = args.before ? args.before + first : to;
  const float* const next = args.next ? args.next + first : nullptr;
  ColumnSums products;  // zero where there is no correction
  if (!args.is_additive)
    for_keys(args.key_dim, [&](int i, int parity) __attribute__((always_inline)) {
      for (int c = 0; c < DELTA_VECTORS; c++)
        products.add(parity, c, load(at(from, i, c)), splat(args.k[i]));
    });
  const int num_values = args.num_values - first;
  for (int t = 0; t < args.num_tokens; t++, from = to) {
    const size_t key = static_cast<size_t>(t) * args.key_dim, gate = t * args.gate_stride;
    float values[DELTA_VECTORS * LANES] = {};
    const float* v = args.v + t * args.value_stride + first;
    for (int i = 0; i < DELTA_VECTORS * LANES; i++)
      if (i < num_values) values[i] = v[i];
    F32 deltas[DELTA_VECTORS];
    for (int c = 0; c < DELTA_VECTORS; c++)
      deltas[c] = (load(values + c * LANES) - products.total(c) * splat(args.decay[gate])) *
                  splat(args.beta[gate]);
    products = {};
    ColumnSums outputs;
    const float *q = args.q + key, *k = args.k + key;
    const bool is_last = t + 1 == args.num_tokens;
    if (!is_last && !args.is_additive)
      delta_token<true>(from, to, args.key_dim, q, k, args.decay[gate], deltas, k + args.key_dim,
                        nullptr, outputs, products);
    else
      delta_token<false>(from, to, args.key_dim, q, k, args.decay[gate], deltas, nullptr,
                         is_last ? next : nullptr, outputs, products);
    for (int c = 0; c < DELTA_VECTORS; c++) store(values + c * LANES, outputs.total(c));
    float* y = args.y + t * args.output_stride + first;
    for (int i = 0; i < DELTA_VECTORS * LANES; i++)
      if (i < num_values) y[i] = values[i];
  }
}

void delta_columns(const DeltaColumns& args) {
  if (!args.before)
    for (int i = 0; i < args.key_dim * STATE_COLUMNS; i++) args.after[i] = 0;
  for (int c = 0; c < STATE_COLUMNS; c += DELTA_VECTORS * LANES)
    delta_vectors(args, c);
}

void convolve_rows(const ConvolvedRows& args) {
  for_vectors(args.size, [&](int i, auto vector) {
    F32 sum = args.bias ? vector.load(args.bias + i) : F32{};
    for (int r = 0; r < args.num_rows; r++)
      sum = fused(vector.load(args.rows[r] + i), vector.load(args.taps + r * args.tap_stride + i),
                  sum);
    vector.store(args.y + i, args.activates ? silu(sum) : sum);
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

#include "operations/block.h"

#include <cstring>

#include "kernels.h"
#include "operations/half.h"
#include "operations/parallel.h"

namespace native {

namespace {

/// Copy a part of each row [first, next) of joined outputs.
void split(const float* joined, size_t stride, size_t size, int first, int next, float* y) {
  for (size_t m = first; m < static_cast<size_t>(next); m++)
    std::memcpy(y + m * size, joined + m * stride, size * sizeof(float));
}

/// The numbers of query heads that gates are beside.
void split_gates(const float* gated, size_t dim, size_t first, size_t next, float* q) {
  for (size_t i = first; i < next; i++)
    std::memcpy(q + i * dim, gated + 2 * i * dim, dim * sizeof(float));
}

void apply_gates(const float* gated, size_t dim, size_t first, size_t next, float* heads) {
  for (size_t i = first; i < next; i++)
    kernels()->gate(gated + (2 * i + 1) * dim, heads + i * dim, dim, heads + i * dim);
}

void norm_heads(const Norm& norm, int first, int next, int size, float* heads) {
  if (!norm.size()) return;
  const int count = size / norm.size();
  norm_rows(norm, heads, first * count, next * count, heads);
}

auto gated_kernel(Activation activation) {
  const Kernels& k = *kernels();
  switch (activation) {
    case Activation::kSilu: break;
    case Activation::kGelu: return k.geglu;
    case Activation::kGeluErf: return k.geglu_erf;
    case Activation::kRelu: return k.reglu;
    case Activation::kSquaredRelu: return k.squared_reglu;
  }
  return k.swiglu;
}

}  // namespace

void run_attention(const AttentionHalf& half, Pool& pool, const Step& step,
                   const Rotation& rotation, const Visibility& visibility,
                   const float* query_factors, const float* x, int num_rows, float* y,
                   const AdaptedRows* adapted) {
  const PoolLayout& layout = pool.layout();
  const int dim = layout.key_dim, num_keys = layout.num_heads;
  const size_t rows = num_rows, q_size = half.num_heads * dim, k_size = num_keys * dim;
  const size_t v_size = num_keys * layout.value_dim, total = q_size + k_size + v_size;
  thread_local std::vector<float> memory;
  float *normed, *q, *outputs, *k, *v, *attended, *joined;
  // As layers of their own, q, k and v are written one after the other.
  assign(memory, {{&normed, rows * half.size()}, {&q, half.is_gated ? rows * q_size : 0},
                  {&outputs, half.is_gated ? 2 * rows * q_size : rows * q_size},
                  {&k, rows * k_size}, {&v, rows * v_size},
                  {&attended, rows * half.output.layer.num_inputs()},
                  {&joined, half.is_joined() ? rows * total : 0}});
  multiply_normed(half.qkv, half.norm, x, num_rows, adapted, normed,
                  half.is_joined() ? joined : outputs);
  if (!half.is_gated) q = outputs;
  for_rows(num_rows, rows_per_part(num_rows), [&](int first, int next) {
    if (half.is_joined()) {
      split(joined, total, q_size, first, next, q);
      split(joined + q_size, total, k_size, first, next, k);
      split(joined + q_size + k_size, total, v_size, first, next, v);
    }
    if (half.is_gated)
      split_gates(outputs, dim, first * half.num_heads, next * half.num_heads, q);
    if (!half.has_own_values()) split(k, k_size, v_size, first, next, v);
    const auto norm = [&] {
      norm_heads(half.q_norm, first, next, static_cast<int>(q_size), q);
      norm_heads(half.k_norm, first, next, static_cast<int>(k_size), k);
    };
    norm_heads(half.v_norm, first, next, static_cast<int>(v_size), v);
    if (!half.norms_last) norm();
    if (rotation.half) {
      rotate_rows(q, rotation, first, next, half.num_heads, dim, q);
      rotate_rows(k, rotation, first, next, num_keys, dim, k);
    }
    if (half.norms_last) norm();
    if (query_factors) scale_rows(query_factors, first, next, q_size, q);
    write_rows(pool, step, first, next, k, v);
  });
  const AttentionArgs args{.pool = layout,
                           .keys = pool.keys(),
                           .values = pool.values(),
                           .q = q,
                           .y = attended,
                           .num_query_heads = half.num_heads,
                           .scale = half.scale,
                           .soft_cap = visibility.soft_cap,
                           .window = visibility.window,
                           .is_chunked = visibility.is_chunked,
                           .sinks = data_or_null(half.sinks),
                           .span_blocks = 0};
  attend(step, args, num_rows);
  multiply_output(half.output, x, attended, num_rows, adapted, y, [&](int first, int next) {
    if (half.is_gated)
      apply_gates(outputs, dim, first * half.num_heads, next * half.num_heads, attended);
  });
}

void run_mlp(const MlpHalf& half, const float* x, const float* residual, int num_rows, float* y,
             const AdaptedRows* adapted) {
  const size_t rows = num_rows, width = half.width();
  thread_local std::vector<float> memory;
  float *normed, *gate, *up, *gated;
  assign(memory, {{&normed, rows * half.size()}, {&gate, rows * width},
                  {&up, half.is_gated() ? rows * width : 0},
                  {&gated, half.is_joined() ? rows * width : 0}});
  multiply_normed(half.gate_up, half.norm, x, num_rows, adapted, normed, gate);
  const size_t stride = half.is_joined() ? 2 * width : width;
  if (half.is_joined()) up = gate + width;
  else gated = gate;
  const auto activate = gated_kernel(half.activation);
  multiply_output(half.output, residual, gated, num_rows, adapted, y, [&](int first, int next) {
    for (size_t m = first; m < static_cast<size_t>(next); m++)
      activate(gate + m * stride, half.is_gated() ? up + m * stride : nullptr, width,
               gated + m * width);
  });
}

}  // namespace native

// A transformer block as one operation.
#pragma once

#include <vector>

#include "operations/attention.h"
#include "operations/pointwise.h"
#include "weights.h"

namespace native {

/// A transformer block of the llama family: attention and a gated MLP, each after a norm.
struct Block {
  Weights q, k, v, o, gate, up, down;
  // Each may be empty.
  std::vector<float> q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
  std::vector<float> attention_norm, mlp_norm;  // [size]
  std::vector<float> q_norm, k_norm;            // [head_dim], or empty
  float eps, q_eps, k_eps, mlp_eps;
  int num_heads;
  float scale;

  int size() const { return q->panels().num_inputs; }
};

/// x + attention(norm(x)), then the same with the MLP; `[num_rows, size]` in and out.
void run_block(const Block& block, Pool& pool, const Step& step, const Rotation& rotation,
               int window, const float* x, int num_rows, float* y);

}  // namespace native

// What the kernels compute for whole arrays, by all threads.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "thread_pool.h"
#include "weights.h"

namespace native {

using Weights = std::shared_ptr<const PackedWeights>;

/// The threads of this process.
ThreadPool& threads();
/// Make them anew if it is another number; then nothing may run meanwhile.
void set_num_threads(int num_threads);

/// Several products of one input.
void multiply(std::vector<LinearArgs> products);

/// The highest output of each row, and which it is: the first of equal ones; not a number where an
/// output is none.  `y` of the product is not used.
void arg_max(const LinearArgs& product, uint32_t* indices, float* values);

void embed(const PackedWeights& weights, const int32_t* tokens, int num_rows, float* y);

/// Rows `[num_rows, size]`; `weight` may be null.
void rms_norm(const float* x, const float* weight, float eps, int num_rows, int size, float* y);

void swiglu(const float* gate, const float* up, size_t size, float* y);

/// Cosines and sines `[num_rows, half]` of the angles by which pairs are rotated.
struct Rotation {
  const float* cosines;
  const float* sines;
  int half;
  bool traditional;  // a pair is two neighbours, and else `half` apart
};

/// Rotate heads `[num_rows, num_heads, dim]`; `y` may be `x`.
void rotate(const float* x, const Rotation& rotation, int num_rows, int num_heads, int dim,
            float* y);

/// Write keys and values `[num_rows, heads, dim]` into the pool, then attend; outputs of rows
/// beyond those of the step, `num_rows` in all, are zero.
void write_and_attend(Pool& pool, const Step& step, const AttentionArgs& args, const float* keys,
                      const float* values, int num_rows);

/// A transformer block of the llama family: attention and a gated MLP, each after a norm.
struct Block {
  Weights q, k, v, o, gate, up, down;
  // Of the products of the same names; each may be empty.
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

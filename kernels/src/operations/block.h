// The two halves of a transformer block, each one operation.
#pragma once

#include <vector>

#include "operations/attention.h"
#include "operations/half.h"

namespace native {

/// Attention, after a norm of its input.
struct AttentionHalf {
  std::vector<Layer> qkv;  // q, k and v; q and k, which is v, too; or one layer with all outputs
  Norm norm;
  Norm q_norm, k_norm, v_norm;  // of each head, or of all heads of a row together
  Output output;
  std::vector<float> sinks;  // [num_heads], or empty
  int num_heads;
  float scale;
  // The first layer has a gate after each head's query: sigmoid(gate) scales the head's output.
  bool is_gated = false;
  bool norms_last = false;  // heads are normalized after they are rotated

  int size() const { return qkv[0].num_inputs(); }
  bool is_joined() const { return qkv.size() == 1; }
  bool has_own_values() const { return qkv.size() != 2; }
};

enum class Activation {
  kSilu,
  kGelu,  // in its tanh form
  kGeluErf,
  kRelu,
  kSquaredRelu,
};
constexpr int NUM_ACTIVATIONS = 5;

/// An MLP, gated or not, after a norm of its input.
struct MlpHalf {
  std::vector<Layer> gate_up;  // gate and up, one layer with the outputs of both, or up alone
  Norm norm;
  Output output;
  Activation activation;  // of the gate, or of what is not gated

  int size() const { return gate_up[0].num_inputs(); }
  int width() const { return output.layer.num_inputs(); }
  bool is_joined() const { return gate_up.size() == 1 && gate_up[0].num_outputs() == 2 * width(); }
  bool is_gated() const { return gate_up.size() == 2 || is_joined(); }
};

/// How the scores of a layer are masked and bounded; see AttentionArgs.
struct Visibility {
  int window = 0;
  bool is_chunked = false;
  float soft_cap = 0;
};

/// Rows `[num_rows, size]` in and out.  Rotates by nothing if `rotation.half` is 0.  A row's queries
/// are multiplied by its factor, and its products have the changes of its adapter, if there are any.
void run_attention(const AttentionHalf& half, Pool& pool, const Step& step,
                   const Rotation& rotation, const Visibility& visibility,
                   const float* query_factors, const float* x, int num_rows, float* y,
                   const AdaptedRows* adapted = nullptr);

/// Rows `[num_rows, size]` in and out.  The output is added to `residual`, which is x but in blocks
/// whose attention and MLP have one input.
void run_mlp(const MlpHalf& half, const float* x, const float* residual, int num_rows, float* y,
             const AdaptedRows* adapted = nullptr);

}  // namespace native

// The two halves of a transformer block, each one operation.
#pragma once

#include <vector>

#include "operations/attention.h"
#include "operations/pointwise.h"
#include "weights.h"

namespace native {

struct Layer {
  Weights weights;
  std::vector<float> bias;  // empty is none

  int num_outputs() const { return weights->panels().num_outputs; }
  int num_inputs() const { return weights->panels().num_inputs; }
};

/// RMSNorm; without weights it is none.
struct Norm {
  std::vector<float> weight;
  float eps = 0;

  int size() const { return static_cast<int>(weight.size()); }
};

/// What becomes of a half's result r: x + residual * norm(r), without x if `residual` is 0.
struct Ending {
  Norm norm;
  float residual;

  /// Whether it is x + r.
  bool is_sum() const { return !norm.size() && residual == 1; }
  bool is_nothing() const { return !norm.size() && residual == 0; }
  /// Rows [first, next) in the place of r.
  void finish(const float* x, int first, int next, int size, float* r) const;
};

/// The last product of a half.
struct Output {
  Layer layer;
  Ending ending;
};

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

  int size() const { return qkv[0].num_inputs(); }
  bool is_joined() const { return qkv.size() == 1; }
  bool has_own_values() const { return qkv.size() != 2; }
};

/// A gated MLP, after a norm of its input.
struct MlpHalf {
  std::vector<Layer> gate_up;  // gate and up, or one layer with the outputs of both
  Norm norm;
  Output output;
  bool is_gelu;  // the gate's activation; else SiLU

  int size() const { return gate_up[0].num_inputs(); }
  bool is_joined() const { return gate_up.size() == 1; }
};

/// How the scores of a layer are masked and bounded; see AttentionArgs.
struct Visibility {
  int window = 0;
  bool is_chunked = false;
  float soft_cap = 0;
};

/// Rows `[num_rows, size]` in and out.  Rotates by nothing if `rotation.half` is 0.
void run_attention(const AttentionHalf& half, Pool& pool, const Step& step,
                   const Rotation& rotation, const Visibility& visibility, const float* x,
                   int num_rows, float* y);

/// Rows `[num_rows, size]` in and out.
void run_mlp(const MlpHalf& half, const float* x, int num_rows, float* y);

}  // namespace native

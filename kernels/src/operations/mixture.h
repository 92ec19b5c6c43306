// A mixture of experts in place of a block's MLP, as one operation.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "operations/block.h"
#include "operations/experts.h"

namespace native {

/// How experts are chosen and weighed by the logits of a row.
///
/// Scores are the softmax, or the sigmoids, of the logits.  Those with the highest scores plus
/// correction are chosen, if there are groups from the groups with the highest sums of two; the rest
/// then counts as 0.  A chosen expert's weight is its score without correction.
struct Router {
  int num_experts;
  int top_k;
  bool is_sigmoid;                // else softmax
  std::vector<float> correction;  // [num_experts], or empty
  int num_groups;
  int top_groups;
  bool is_normalized;  // weights are divided by epsilon plus their sum
  float epsilon;
  float factor;  // of the weights

  bool has_groups() const { return top_groups < num_groups; }
};

/// Indices and weights `[top_k]` of the experts of one row, those with the highest scores first.
void route(const Router& router, const float* logits, int32_t* indices, float* weights);

/// norm(x), the experts that the router chooses, plus a shared one.
struct MixtureHalf {
  Layer router_layer;
  Router router;
  Experts experts;
  std::optional<MlpHalf> shared;     // of what the experts have, too
  std::optional<Layer> shared_gate;  // whose sigmoid is the weight of the shared one; else 1
  Norm norm;
  Ending ending;

  int size() const { return router_layer.num_inputs(); }
};

/// Rows `[num_rows, size]` in and out.  Adapters change the router, the shared expert and its gate.
void run_mixture(const MixtureHalf& half, const float* x, int num_rows, float* y,
                 const AdaptedRows* adapted = nullptr);

}  // namespace native

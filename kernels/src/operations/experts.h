// Mixtures of experts: each row is multiplied with the matrices that it is routed to.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "weights.h"

namespace native {

/// Rows by the expert that they go to, so that an expert's weights are read once.
class Routing {
 public:
  struct Group {
    int expert;
    int first;  // of its rows, in `slots`
    int num_rows;
  };

  /// Indices `[num_slots]` of experts; one out of range is no error, as in MLX.
  Routing(const int32_t* indices, int num_slots, int num_experts);

  const std::vector<Group>& groups() const { return groups_; }
  int num_slots() const { return static_cast<int>(slots_.size()); }
  /// The slot of a sorted row.
  int slot(int sorted) const { return slots_[sorted]; }
  /// The sorted row of a slot.
  int sorted(int slot) const { return sorted_[slot]; }
  const Group& group_of(int sorted) const { return groups_[group_of_[sorted]]; }

 private:
  std::vector<Group> groups_;
  std::vector<int> slots_;
  std::vector<int> sorted_;
  std::vector<int> group_of_;
};

/// A matrix for each expert, with a bias `[experts, outputs]` or null.
struct ExpertLayer {
  Weights weights;
  std::shared_ptr<const float> bias;
};

/// What is computed of gate and up.
struct GatedActivation {
  bool is_clipped = false;  // as in gpt-oss; see Kernels::clipped_swiglu
  float alpha = 0;
  float limit = 0;
};

struct Experts {
  ExpertLayer gate, up, down;
  GatedActivation activation;

  int num_experts() const { return gate.weights->num_matrices(); }
  int num_inputs() const { return gate.weights->panels().num_inputs; }
  int num_outputs() const { return down.weights->panels().num_outputs; }
};

/// y[slot] = x[slot / slots_per_row] W[expert of slot]^T + b, `[num_slots, outputs]`.
void switch_linear(const ExpertLayer& layer, const float* x, int slots_per_row,
                   const Routing& routing, float* y);

/// y[slot] = down(activation(gate(x), up(x))) of the slot's expert, `[num_slots, outputs]`.
void run_experts(const Experts& experts, const float* x, int slots_per_row, const Routing& routing,
                 float* y);

/// The same for sorted rows, in memory of the calling thread that its next experts overwrite.
const float* run_sorted(const Experts& experts, const float* x, int slots_per_row,
                        const Routing& routing);

}  // namespace native

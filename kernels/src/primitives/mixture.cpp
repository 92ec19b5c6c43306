// A mixture of experts in place of a block's MLP.
#include "operations/mixture.h"

#include "primitives/adapters.h"
#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

class Mixture : public CpuPrimitive {
 public:
  Mixture(std::shared_ptr<const MixtureHalf> half, std::shared_ptr<const AdaptedRows> adapted)
      : half_(std::move(half)), adapted_(std::move(adapted)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int num_rows = static_cast<int>(inputs[0].size() / half_->size());
    dispatch([x = contiguous(inputs[0]), num_rows, half = half_, adapted = adapted_,
              y = allocate(outputs[0])] {
      native::run_mixture(*half, x, num_rows, y, adapted.get());
    });
  }

  DEFINE_NAME(NativeMixtureHalf)

 private:
  std::shared_ptr<const MixtureHalf> half_;
  std::shared_ptr<const AdaptedRows> adapted_;
};

/// Those that adapters may change.
std::vector<Layer> layers_of(const MixtureHalf& half) {
  std::vector<Layer> layers{half.router_layer};
  if (half.shared) {
    layers.insert(layers.end(), half.shared->gate_up.begin(), half.shared->gate_up.end());
    layers.push_back(half.shared->output.layer);
  }
  if (half.shared_gate) layers.push_back(*half.shared_gate);
  return layers;
}

bool fits(const Norm& norm, int size) { return !norm.size() || norm.size() == size; }

/// As many biases as outputs, or none.
bool fits(const Layer& layer, int num_inputs, int num_outputs) {
  return layer.num_inputs() == num_inputs && layer.num_outputs() == num_outputs &&
         (layer.bias.empty() || static_cast<int>(layer.bias.size()) == num_outputs);
}

}  // namespace

void check_router(const Router& router) {
  const int size = router.num_experts;
  require(1 <= router.top_k && router.top_k <= size, "a row goes to some of the experts");
  require(router.correction.empty() || static_cast<int>(router.correction.size()) == size,
          "a correction for each expert");
  require(1 <= router.top_groups && router.top_groups <= router.num_groups,
          "experts are chosen from some of the groups");
  require(!router.has_groups() ||
              (size % router.num_groups == 0 && size / router.num_groups > 1),
          "groups of as many experts, of two or more");
}

void check_mixture(const MixtureHalf& half) {
  const int size = half.size(), num_experts = half.router.num_experts;
  check_router(half.router);
  require(fits(half.router_layer, size, num_experts) &&
              half.experts.num_experts() == num_experts,
          "a logit for each expert");
  require(half.experts.num_inputs() == size && half.experts.num_outputs() == size,
          "experts have the size of a row");
  require(fits(half.norm, size) && fits(half.ending.norm, size),
          "norms are of what they normalize");
  require(!half.shared || (half.shared->size() == size &&
                           half.shared->output.layer.num_outputs() == size),
          "a shared expert has the size of a row");
  require(!half.shared_gate || (half.shared && fits(*half.shared_gate, size, 1)),
          "a gate of a shared expert has one output");
}

mx::array run_mixture(const mx::array& x, std::shared_ptr<const MixtureHalf> half) {
  require(x.ndim() > 0 && x.shape(-1) == half->size(), "x is [..., size]");
  auto adapted = adapted_rows(x, {layers_of(*half)});
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<Mixture>(std::move(half), std::move(adapted)),
                   {as_floats(x)});
}

}  // namespace native::graph

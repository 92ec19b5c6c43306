// Mixtures of experts.
#include "operations/experts.h"

#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

/// Calls `run(x, routing, y)` with rows `[.., inputs]` and indices of experts.
template <typename Run>
class Routed : public CpuPrimitive {
 public:
  Routed(Run run, int num_experts) : run_(std::move(run)), num_experts_(num_experts) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([run = run_, num_experts = num_experts_, x = contiguous(inputs[0]),
              indices = contiguous<int32_t>(inputs[1]),
              num_slots = static_cast<int>(inputs[1].size()), y = allocate(outputs[0])] {
      run(x, Routing(indices, num_slots, num_experts), y);
    });
  }

  DEFINE_NAME(NativeExperts)

 private:
  Run run_;
  int num_experts_;
};

int slots_per_row(const mx::array& x, const mx::array& indices) {
  const auto num_rows = x.size() / x.shape(-1);
  require(num_rows > 0 && indices.size() > 0 && indices.size() % num_rows == 0,
          "as many indices for each row");
  return static_cast<int>(indices.size() / num_rows);
}

template <typename Run>
mx::array routed(const mx::array& x, const mx::array& indices, int num_inputs, int num_outputs,
                 int num_experts, Run run) {
  require(x.ndim() > 0 && x.shape(-1) == num_inputs, "rows have as many inputs as weights");
  mx::Shape shape = indices.shape();
  shape.push_back(num_outputs);
  return mx::array(std::move(shape), mx::float32,
                   std::make_shared<Routed<Run>>(std::move(run), num_experts),
                   {as_floats(x), mx::astype(indices, mx::int32, stream())});
}

}  // namespace

ExpertLayer expert_layer(Weights weights, const std::optional<mx::array>& bias) {
  if (!bias) return {std::move(weights), nullptr};
  require(bias->shape() == mx::Shape{weights->num_matrices(), weights->panels().num_outputs},
          "a bias for each output of each expert");
  auto rows = std::make_shared<mx::array>(mx::contiguous(as_floats(*bias), false, stream()));
  rows->eval();
  return {std::move(weights), std::shared_ptr<const float>(rows, rows->data<float>())};
}

std::shared_ptr<const Experts> gated_experts(const ExpertLayer& gate, const ExpertLayer& up,
                                             const ExpertLayer& down, float alpha, float limit) {
  const Panels gates = gate.weights->panels(), ups = up.weights->panels();
  require(gates.num_inputs == ups.num_inputs && gates.num_outputs == ups.num_outputs &&
              gates.num_outputs == down.weights->panels().num_inputs,
          "gate, up and down fit to each other");
  require(are_packed_alike(gates, ups), "gate and up are packed alike");
  require(up.weights->num_matrices() == gate.weights->num_matrices() &&
              down.weights->num_matrices() == gate.weights->num_matrices(),
          "as many experts");
  return std::make_shared<Experts>(Experts{gate, up, down, {limit > 0, alpha, limit}});
}

mx::array switch_linear(const mx::array& x, const mx::array& indices, const ExpertLayer& layer) {
  const Panels panels = layer.weights->panels();
  return routed(x, indices, panels.num_inputs, panels.num_outputs, layer.weights->num_matrices(),
                [layer, slots = slots_per_row(x, indices)](const float* x, const Routing& routing,
                                                           float* y) {
                  native::switch_linear(layer, x, slots, routing, y);
                });
}

mx::array experts(const mx::array& x, const mx::array& indices,
                  std::shared_ptr<const Experts> gated) {
  const int inputs = gated->num_inputs(), outputs = gated->num_outputs();
  const int num_experts = gated->num_experts();
  return routed(x, indices, inputs, outputs, num_experts,
                [gated = std::move(gated), slots = slots_per_row(x, indices)](
                    const float* x, const Routing& routing, float* y) {
                  run_experts(*gated, x, slots, routing, y);
                });
}

}  // namespace native::graph

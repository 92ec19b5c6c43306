// All layers of a model as an operation.
#include "operations/stack.h"

#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

class RunStack : public CpuPrimitive {
 public:
  RunStack(std::shared_ptr<const Stack> stack, StackStep step)
      : stack_(std::move(stack)), step_(std::move(step)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    StackStep step = step_;
    for (size_t i = 0; i < step.rotations.size(); i++) {
      const mx::array &cosines = inputs[1 + 2 * i], &sines = inputs[2 + 2 * i];
      step.rotations[i].cosines = contiguous(cosines);
      step.rotations[i].sines = contiguous(sines);
    }
    dispatch([stack = stack_, step = std::move(step), x = contiguous(inputs[0]),
              y = allocate(outputs[0])] { stack->run(step, x, y); });
  }

  DEFINE_NAME(NativeStack)

 private:
  std::shared_ptr<const Stack> stack_;
  StackStep step_;
};

}  // namespace

mx::array run_stack(const mx::array& x, std::shared_ptr<const Stack> stack,
                    std::vector<std::shared_ptr<const Step>> steps,
                    const std::vector<std::tuple<mx::array, mx::array, bool>>& rotations,
                    std::shared_ptr<const StateStep> states) {
  const int num_rows = x.ndim() > 0 ? x.shape(0) : 0;
  require(x.shape() == mx::Shape{num_rows, 1, stack->size()} && num_rows > 0,
          "x is [rows, 1, size]");
  require(static_cast<int>(steps.size()) == stack->num_steps(), "a step for each kind of layers");
  for (const auto& step : steps) require(step->num_rows() <= num_rows, "a row for each of the step");
  require(stack->state_pools().empty() || (states && states->num_rows == num_rows),
          "what becomes of the states of all rows");
  require(rotations.size() == stack->max_pairs().size(), "the angles of each rotation");
  std::vector<mx::array> inputs{as_floats(x)};
  StackStep step{num_rows, std::move(steps), {}, std::move(states)};
  for (size_t i = 0; i < rotations.size(); i++) {
    const auto& [cosines, sines, traditional] = rotations[i];
    require(cosines.shape() == sines.shape() && cosines.ndim() == 2 &&
                cosines.shape(0) == num_rows && cosines.shape(1) <= stack->max_pairs()[i],
            "angles are [rows, dims / 2]");
    inputs.push_back(as_floats(cosines));
    inputs.push_back(as_floats(sines));
    step.rotations.push_back({nullptr, nullptr, cosines.shape(1), traditional});
  }
  for (const auto& pool : stack->state_pools()) pool->grow(step.states->num_cells);
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<RunStack>(std::move(stack), std::move(step)),
                   std::move(inputs));
}

}  // namespace native::graph

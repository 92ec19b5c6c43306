// Mixtures of experts.
#include "operations/experts.h"

#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

using Bias = std::optional<mx::array>;

/// Inputs of a primitive: rows, indices, then what there is of the others.
class Inputs {
 public:
  Inputs(const mx::array& x, const mx::array& indices)
      : arrays_{as_floats(x), mx::astype(indices, mx::int32, stream())} {}

  /// Return where an array is among the inputs, 0 if there is none.
  int add(const std::optional<mx::array>& array) {
    if (!array) return 0;
    arrays_.push_back(as_floats(*array));
    return static_cast<int>(arrays_.size()) - 1;
  }
  std::vector<mx::array> take() { return std::move(arrays_); }

 private:
  std::vector<mx::array> arrays_;
};

struct Layer {
  Weights weights;
  int bias;  // its input, or 0
};

void check_layer(const Weights& weights, const Bias& bias, int num_inputs) {
  const Panels panels = weights->panels();
  require(panels.num_inputs == num_inputs, "rows have as many inputs as weights");
  require(!bias || bias->shape() == mx::Shape{weights->num_matrices(), panels.num_outputs},
          "a bias for each output of each expert");
}

int slots_per_row(const mx::array& x, const mx::array& indices) {
  const auto num_rows = x.size() / x.shape(-1);
  require(num_rows > 0 && indices.size() > 0 && indices.size() % num_rows == 0,
          "as many indices for each row");
  return static_cast<int>(indices.size() / num_rows);
}

class ExpertsPrimitive : public CpuPrimitive {
 protected:
  template <typename Run>
  void run(const std::vector<mx::array>& inputs, const std::vector<Layer>& layers, Run&& run) {
    std::vector<ExpertLayer> plain;
    for (const Layer& layer : layers)
      plain.push_back({layer.weights.get(), layer.bias ? contiguous(inputs[layer.bias]) : nullptr});
    dispatch([run, plain, layers, x = contiguous(inputs[0]),
              indices = contiguous<int32_t>(inputs[1]),
              num_slots = static_cast<int>(inputs[1].size())] {
      run(plain, x, Routing(indices, num_slots, layers[0].weights->num_matrices()));
    });
  }
};

class SwitchLinear : public ExpertsPrimitive {
 public:
  SwitchLinear(Layer layer, int slots_per_row)
      : layer_(std::move(layer)), slots_per_row_(slots_per_row) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    run(inputs, {layer_}, [y = allocate(outputs[0]), slots = slots_per_row_](
                              const std::vector<ExpertLayer>& layers, const float* x,
                              const Routing& routing) {
      native::switch_linear(layers[0], x, slots, routing, y);
    });
  }

  DEFINE_NAME(NativeSwitchLinear)

 private:
  Layer layer_;
  int slots_per_row_;
};

class GatedExperts : public ExpertsPrimitive {
 public:
  GatedExperts(std::vector<Layer> layers, GatedActivation activation, int slots_per_row)
      : layers_(std::move(layers)), activation_(activation), slots_per_row_(slots_per_row) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    run(inputs, layers_, [y = allocate(outputs[0]), slots = slots_per_row_,
                          activation = activation_](const std::vector<ExpertLayer>& layers,
                                                    const float* x, const Routing& routing) {
      run_experts({layers[0], layers[1], layers[2], activation}, x, slots, routing, y);
    });
  }

  DEFINE_NAME(NativeGatedExperts)

 private:
  std::vector<Layer> layers_;
  GatedActivation activation_;
  int slots_per_row_;
};

}  // namespace

mx::array switch_linear(const mx::array& x, const mx::array& indices, Weights weights,
                        const std::optional<mx::array>& bias) {
  check_layer(weights, bias, x.shape(-1));
  const int slots = slots_per_row(x, indices);
  mx::Shape shape = indices.shape();
  shape.push_back(weights->panels().num_outputs);
  Inputs inputs(x, indices);
  const int at = inputs.add(bias);
  return mx::array(std::move(shape), mx::float32,
                   std::make_shared<SwitchLinear>(Layer{std::move(weights), at}, slots),
                   inputs.take());
}

mx::array experts(const mx::array& x, const mx::array& indices,
                  const std::vector<Weights>& weights,
                  const std::vector<std::optional<mx::array>>& biases, float alpha, float limit) {
  require(weights.size() == 3 && biases.size() == 3, "experts have gate, up and down");
  const int width = weights[0]->panels().num_outputs;
  for (size_t i = 0; i < 3; i++) {
    check_layer(weights[i], biases[i], i < 2 ? x.shape(-1) : width);
    require(weights[i]->num_matrices() == weights[0]->num_matrices(), "as many experts");
  }
  const Panels gate = weights[0]->panels(), up = weights[1]->panels();
  require(gate.num_outputs == up.num_outputs && gate.group == up.group &&
              gate.input_type == up.input_type,
          "gate and up are packed alike");
  mx::Shape shape = indices.shape();
  shape.push_back(weights[2]->panels().num_outputs);
  Inputs inputs(x, indices);
  std::vector<Layer> layers;
  for (size_t i = 0; i < 3; i++) layers.push_back({weights[i], inputs.add(biases[i])});
  const GatedActivation activation{limit > 0, alpha, limit};
  return mx::array(std::move(shape), mx::float32,
                   std::make_shared<GatedExperts>(std::move(layers), activation,
                                                  slots_per_row(x, indices)),
                   inputs.take());
}

}  // namespace native::graph

// Products with packed weights, the argmax of each row of them, and embedding lookup.
#include <string>

#include "operations/linear.h"
#include "primitives/adapters.h"
#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"
#include "thread_pool.h"

namespace native::graph {

namespace {

class Linear : public CpuPrimitive {
 public:
  Linear(std::vector<Weights> weights, std::vector<bool> has_bias,
         std::shared_ptr<const AdaptedRows> adapted)
      : weights_(std::move(weights)), has_bias_(std::move(has_bias)),
        adapted_(std::move(adapted)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const float* x = contiguous(inputs[0]);
    std::vector<LinearArgs> products;
    size_t next_bias = 1;
    for (size_t i = 0; i < weights_.size(); i++) {
      const Panels& panels = weights_[i]->panels();
      const float* bias = has_bias_[i] ? contiguous(inputs[next_bias++]) : nullptr;
      const int num_rows = static_cast<int>(inputs[0].size() / panels.num_inputs);
      products.push_back({panels, bias, nullptr, x, allocate(outputs[i]), num_rows});
    }
    dispatch([products = std::move(products), weights = weights_, adapted = adapted_] {
      multiply(products, adapted.get());
    });
  }

  DEFINE_NAME(NativeLinear)

  /// Whether it is one product, without adapters.
  bool is_plain() const { return weights_.size() == 1 && !adapted_; }
  const Weights& weights() const { return weights_[0]; }

 private:
  std::vector<Weights> weights_;
  std::vector<bool> has_bias_;
  std::shared_ptr<const AdaptedRows> adapted_;
};

class LinearArgMax : public CpuPrimitive {
 public:
  explicit LinearArgMax(Weights weights) : weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    float* values = allocate(outputs[1]);
    const LinearArgs product{.weights = weights_->panels(),
                             .bias = inputs.size() > 1 ? contiguous(inputs[1]) : nullptr,
                             .residual = nullptr,
                             .x = contiguous(inputs[0]),
                             .y = nullptr,
                             .num_rows = static_cast<int>(outputs[0].size())};
    dispatch([product, weights = weights_, indices = outputs[0].data<uint32_t>(), values] {
      native::arg_max(product, indices, values);
    });
  }

  DEFINE_NAME(NativeLinearArgMax)

 private:
  Weights weights_;
};

class Embedding : public CpuPrimitive {
 public:
  explicit Embedding(Weights weights) : weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([tokens = contiguous<int32_t>(inputs[0]),
              num_rows = static_cast<int>(inputs[0].size()), weights = weights_,
              y = allocate(outputs[0])] {
      native::embed(*weights, tokens, num_rows, y);
    });
  }

  DEFINE_NAME(NativeEmbedding)

 private:
  Weights weights_;
};

}  // namespace

std::vector<mx::array> linear(const mx::array& x, const std::vector<Weights>& weights,
                              const std::vector<std::optional<mx::array>>& biases) {
  require(weights.size() == biases.size(), "a bias, or none, for each matrix");
  std::vector<mx::array> inputs{as_floats(x)};
  std::vector<mx::Shape> shapes;
  std::vector<bool> has_bias;
  for (size_t i = 0; i < weights.size(); i++) {
    require(x.shape(-1) == weights[i]->panels().num_inputs, "rows have as many inputs as weights");
    require(are_packed_alike(weights[i]->panels(), weights[0]->panels()),
            "weights of one input have one layout");
    mx::Shape shape = x.shape();
    shape.back() = weights[i]->panels().num_outputs;
    shapes.push_back(std::move(shape));
    has_bias.push_back(biases[i].has_value());
    if (!biases[i]) continue;
    require(biases[i]->size() == static_cast<size_t>(shapes.back().back()), "a bias an output");
    inputs.push_back(as_floats(*biases[i]));
  }
  return mx::array::make_arrays(std::move(shapes),
                                std::vector<mx::Dtype>(weights.size(), mx::float32),
                                std::make_shared<Linear>(weights, has_bias, adapted_rows(x, weights)),
                                inputs);
}

std::pair<mx::array, mx::array> arg_max(const mx::array& logits) {
  require(logits.ndim() == 2, "logits are [rows, size]");
  mx::array product = logits;
  // A model's logits were [rows, 1, size].
  while (product.has_primitive() && product.primitive().name() == std::string("Squeeze"))
    product = mx::array(product.inputs()[0]);
  const bool is_unevaluated =
      product.has_primitive() && product.status() == mx::array::Status::unscheduled;
  const auto* linear = is_unevaluated ? dynamic_cast<const Linear*>(&product.primitive()) : nullptr;
  if (!linear || !linear->is_plain())
    return {mx::argmax(logits, -1, false, stream()), mx::max(logits, -1, false, stream())};
  const mx::Shape shape{logits.shape(0)};
  const auto outputs = mx::array::make_arrays(
      {shape, shape}, {mx::uint32, mx::float32},
      std::make_shared<LinearArgMax>(linear->weights()), product.inputs());
  return {outputs[0], outputs[1]};
}

mx::array embed(const mx::array& tokens, Weights weights) {
  mx::Shape shape = tokens.shape();
  shape.push_back(weights->panels().num_inputs);
  return mx::array(std::move(shape), mx::float32, std::make_shared<Embedding>(std::move(weights)),
                   {mx::astype(tokens, mx::int32, stream())});
}

}  // namespace native::graph

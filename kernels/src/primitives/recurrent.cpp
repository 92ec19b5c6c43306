// Recurrences.
#include "operations/recurrent.h"

#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

class DeltaRule : public CpuPrimitive {
 public:
  explicit DeltaRule(bool is_additive) : is_additive_(is_additive) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::Shape &keys = inputs[1].shape(), &values = inputs[2].shape();
    const DeltaArgs args{
        .num_tokens = keys[1],
        .num_key_heads = keys[2],
        .num_heads = values[2],
        .key_dim = keys[3],
        .value_dim = values[3],
        .is_additive = is_additive_,
        .has_channels = inputs[3].ndim() == 4,
        .q = contiguous(inputs[0]),
        .k = contiguous(inputs[1]),
        .v = contiguous(inputs[2]),
        .decay = contiguous(inputs[3]),
        .beta = contiguous(inputs[4]),
        .state = inputs.size() > 5 ? contiguous(inputs[5]) : nullptr,
        .y = allocate(outputs[0]),
        .new_state = allocate(outputs[1]),
    };
    dispatch([args, num_requests = keys[0]] { native::delta_rule(args, num_requests); });
  }

  DEFINE_NAME(NativeDeltaRule)

 private:
  bool is_additive_;
};

class Convolution : public CpuPrimitive {
 public:
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const ConvolutionArgs args{
        .num_tokens = outputs[0].shape(1),
        .num_taps = inputs[1].shape(0),
        .num_channels = inputs[1].shape(1),
        .x = contiguous(inputs[0]),
        .taps = contiguous(inputs[1]),
        .bias = inputs.size() > 2 ? contiguous(inputs[2]) : nullptr,
        .y = allocate(outputs[0]),
    };
    dispatch([args, num_requests = inputs[0].shape(0)] { native::convolve(args, num_requests); });
  }

  DEFINE_NAME(NativeConvolution)
};

}  // namespace

std::pair<mx::array, mx::array> delta_rule(const mx::array& q, const mx::array& k,
                                           const mx::array& v, const mx::array& decay,
                                           const mx::array& beta,
                                           const std::optional<mx::array>& state,
                                           bool is_additive) {
  require(q.ndim() == 4 && q.shape() == k.shape() && q.size() > 0,
          "queries and keys are [requests, tokens, key heads, dim]");
  require(v.ndim() == 4 && v.shape(0) == k.shape(0) && v.shape(1) == k.shape(1) && v.size() > 0 &&
              v.shape(2) % k.shape(2) == 0,
          "values are [requests, tokens, heads, dim], and key heads divide heads");
  const mx::Shape gates(v.shape().begin(), v.shape().end() - 1);
  mx::Shape channels = gates;
  channels.push_back(k.shape(3));
  require(decay.shape() == gates || decay.shape() == channels, "a decay for each head or channel");
  require(beta.shape() == gates, "a beta for each head");
  const mx::Shape states{v.shape(0), v.shape(2), v.shape(3), k.shape(3)};
  require(!state || state->shape() == states, "a state is [requests, heads, value_dim, key_dim]");
  std::vector<mx::array> inputs{as_floats(q), as_floats(k), as_floats(v), as_floats(decay),
                                as_floats(beta)};
  if (state) inputs.push_back(as_floats(*state));
  const auto outputs = mx::array::make_arrays({v.shape(), states}, {mx::float32, mx::float32},
                                              std::make_shared<DeltaRule>(is_additive), inputs);
  return {outputs[0], outputs[1]};
}

mx::array convolve(const mx::array& x, const mx::array& taps,
                   const std::optional<mx::array>& bias) {
  require(taps.ndim() == 2 && taps.size() > 0, "taps are [taps, channels]");
  require(x.ndim() == 3 && x.shape(2) == taps.shape(1) && x.shape(1) >= taps.shape(0),
          "x is [requests, tokens, channels], with a token for each tap");
  require(!bias || bias->shape() == mx::Shape{taps.shape(1)}, "a bias for each channel");
  std::vector<mx::array> inputs{as_floats(x), as_floats(taps)};
  if (bias) inputs.push_back(as_floats(*bias));
  return mx::array({x.shape(0), x.shape(1) - taps.shape(0) + 1, x.shape(2)}, mx::float32,
                   std::make_shared<Convolution>(), std::move(inputs));
}

}  // namespace native::graph

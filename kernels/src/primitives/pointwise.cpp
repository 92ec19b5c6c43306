// Operations on each row or each value by itself.
#include "operations/pointwise.h"

#include <cmath>

#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

class RMSNorm : public CpuPrimitive {
 public:
  explicit RMSNorm(float eps) : eps_(eps) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int size = inputs[0].shape(-1);
    dispatch([x = contiguous(inputs[0]),
              weight = inputs.size() > 1 ? contiguous(inputs[1]) : nullptr, size,
              num_rows = static_cast<int>(inputs[0].size() / size), eps = eps_,
              y = allocate(outputs[0])] {
      native::rms_norm(x, weight, eps, num_rows, size, y);
    });
  }

  DEFINE_NAME(NativeRMSNorm)

 private:
  float eps_;
};

class LayerNorm : public CpuPrimitive {
 public:
  LayerNorm(float eps, bool has_weight, bool has_bias)
      : eps_(eps), has_weight_(has_weight), has_bias_(has_bias) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int size = inputs[0].shape(-1);
    dispatch([x = contiguous(inputs[0]), weight = has_weight_ ? contiguous(inputs[1]) : nullptr,
              bias = has_bias_ ? contiguous(inputs.back()) : nullptr, size,
              num_rows = static_cast<int>(inputs[0].size() / size), eps = eps_,
              y = allocate(outputs[0])] {
      native::layer_norm(x, weight, bias, eps, num_rows, size, y);
    });
  }

  DEFINE_NAME(NativeLayerNorm)

 private:
  float eps_;
  bool has_weight_;
  bool has_bias_;
};

/// SwiGLU or GeGLU; with one input, its activation alone.
class Gated : public CpuPrimitive {
 public:
  explicit Gated(bool is_gelu) : is_gelu_(is_gelu) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([gate = contiguous(inputs[0]),
              up = inputs.size() > 1 ? contiguous(inputs[1]) : nullptr, size = inputs[0].size(),
              is_gelu = is_gelu_, y = allocate(outputs[0])] {
      (is_gelu ? native::geglu : native::swiglu)(gate, up, size, y);
    });
  }

  // Models compile functions for any shape that call these.
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return is_gelu_ == static_cast<const Gated&>(other).is_gelu_;
  }

  DEFINE_NAME(NativeGated)

 private:
  bool is_gelu_;
};

using Function = double (*)(double);

/// Set `[num_rows, radians.size()]` to a function of the angles at the position of each row.
void set_angles(const int32_t* positions, int num_rows, const Frequencies& frequencies,
                Function function, float* y) {
  for (int m = 0; m < num_rows; m++)
    for (const double radians : frequencies.radians)
      *y++ = static_cast<float>(frequencies.factor * function(positions[m] * radians));
}

class Angles : public CpuPrimitive {
 public:
  Angles(const Frequencies& frequencies, Function function)
      : frequencies_(frequencies), function_(function) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([positions = contiguous<int32_t>(inputs[0]), num_rows = inputs[0].shape(0),
              frequencies = frequencies_, function = function_, y = allocate(outputs[0])] {
      set_angles(positions, num_rows, frequencies, function, y);
    });
  }

  DEFINE_NAME(NativeAngles)

 private:
  Frequencies frequencies_;
  Function function_;
};

class RoPE : public CpuPrimitive {
 public:
  explicit RoPE(bool traditional) : traditional_(traditional) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Rotation rotation{contiguous(inputs[1]), contiguous(inputs[2]), inputs[1].shape(1),
                            traditional_};
    dispatch([x = contiguous(inputs[0]), rotation, num_rows = inputs[0].shape(0),
              num_heads = inputs[0].shape(1), dim = inputs[0].shape(3), y = allocate(outputs[0])] {
      rotate(x, rotation, num_rows, num_heads, dim, y);
    });
  }

  DEFINE_NAME(NativeRoPE)

 private:
  bool traditional_;
};

}  // namespace

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  require(!weight || weight->shape() == mx::Shape{x.shape(-1)}, "a weight for each number");
  std::vector<mx::array> inputs{as_floats(x)};
  if (weight) inputs.push_back(as_floats(*weight));
  return mx::array(x.shape(), mx::float32, std::make_shared<RMSNorm>(eps), std::move(inputs));
}

mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& weight,
                     const std::optional<mx::array>& bias, float eps) {
  const mx::Shape size{x.shape(-1)};
  require((!weight || weight->shape() == size) && (!bias || bias->shape() == size),
          "a weight and a bias for each number");
  std::vector<mx::array> inputs{as_floats(x)};
  if (weight) inputs.push_back(as_floats(*weight));
  if (bias) inputs.push_back(as_floats(*bias));
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<LayerNorm>(eps, weight.has_value(), bias.has_value()),
                   std::move(inputs));
}

mx::array swiglu(const mx::array& gate, const mx::array& up) {
  require(gate.shape() == up.shape(), "gate and up have one shape");
  return mx::array(gate.shape(), mx::float32, std::make_shared<Gated>(false),
                   {as_floats(gate), as_floats(up)});
}

mx::array silu(const mx::array& x) {
  return mx::array(x.shape(), mx::float32, std::make_shared<Gated>(false), {as_floats(x)});
}

mx::array gelu(const mx::array& x) {
  return mx::array(x.shape(), mx::float32, std::make_shared<Gated>(true), {as_floats(x)});
}

std::pair<mx::array, mx::array> angles(const mx::array& given, const Frequencies& frequencies) {
  require(given.ndim() == 1, "a position for each row");
  const mx::array positions = mx::astype(given, mx::int32, stream());
  const mx::Shape shape{positions.shape(0), static_cast<int>(frequencies.radians.size())};
  const bool is_known = positions.is_available() && positions.flags().row_contiguous;
  const auto make = [&](Function function) {
    // To wait for positions would be to wait for the step in flight, whose operations need the GIL
    // when they are released.
    if (!is_known)
      return mx::array(shape, mx::float32, std::make_shared<Angles>(frequencies, function),
                       {positions});
    mx::array made(mx::allocator::malloc(sizeof(float) * shape[0] * shape[1]), shape, mx::float32);
    set_angles(positions.data<int32_t>(), shape[0], frequencies, function, made.data<float>());
    return made;
  };
  return {make(std::cos), make(std::sin)};
}

mx::array rope(const mx::array& x, const mx::array& cosines, const mx::array& sines,
               bool traditional) {
  require(x.ndim() == 4 && x.shape(2) == 1, "x is [rows, heads, 1, dim]");
  require(cosines.shape() == sines.shape() && cosines.ndim() == 2, "angles are [rows, dims / 2]");
  require(cosines.shape(0) == x.shape(0) && 2 * cosines.shape(1) <= x.shape(3), "angles fit to x");
  return mx::array(x.shape(), mx::float32, std::make_shared<RoPE>(traditional),
                   {as_floats(x), as_floats(cosines), as_floats(sines)});
}

}  // namespace native::graph

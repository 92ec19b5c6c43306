#include "primitives.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace native::graph {

namespace {

mx::Stream stream() { return mx::default_stream(mx::Device(mx::Device::cpu)); }

mx::array as_floats(const mx::array& x) { return mx::astype(x, mx::float32, stream()); }

/// Numbers of any strides, one after the other.
template <typename T>
T* copy_strided(const T* x, const mx::Shape& shape, const mx::Strides& strides, size_t axis, T* y) {
  if (axis == shape.size()) {
    *y = *x;
    return y + 1;
  }
  for (int i = 0; i < shape[axis]; i++)
    y = copy_strided(x + i * strides[axis], shape, strides, axis + 1, y);
  return y;
}

/// Where an output goes; it is allocated now and written when the stream comes to it.
float* allocate(mx::array& output) {
  output.set_data(mx::allocator::malloc(output.nbytes()));
  return output.data<float>();
}

/// One that computes in float32 on the CPU stream, and is given what it needs as it is made.
class CpuPrimitive : public mx::Primitive {
 public:
  CpuPrimitive() : mx::Primitive(graph::stream()) {}

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("the native kernels run on the CPU");
  }

 protected:
  template <typename Run>
  void dispatch(Run&& run) {
    mx::cpu::get_command_encoder(stream()).dispatch(std::forward<Run>(run));
  }

  /// Where an input lies row by row: its own memory, or that of a copy which is made when the
  /// stream comes to it.  An operation of MLX's for each input would cost more than most kernels.
  template <typename T = float>
  const T* rows(const mx::array& x) {
    if (x.flags().row_contiguous) return x.data<T>();
    mx::array copy(x.shape(), x.dtype(), nullptr, {});
    copy.set_data(mx::allocator::malloc(copy.nbytes()));
    dispatch([from = x.data<T>(), to = copy.data<T>(), shape = x.shape(), strides = x.strides()] {
      copy_strided(from, shape, strides, 0, to);
    });
    mx::cpu::get_command_encoder(stream()).add_temporary(copy);
    return copy.data<T>();
  }
};

class Linear : public CpuPrimitive {
 public:
  Linear(std::vector<Weights> weights, std::vector<bool> has_bias)
      : weights_(std::move(weights)), has_bias_(std::move(has_bias)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const float* x = rows(inputs[0]);
    std::vector<LinearArgs> products;
    size_t next_bias = 1;
    for (size_t i = 0; i < weights_.size(); i++) {
      const Panels& panels = weights_[i]->panels();
      const float* bias = has_bias_[i] ? rows(inputs[next_bias++]) : nullptr;
      const int num_rows = static_cast<int>(inputs[0].size() / panels.num_inputs);
      products.push_back({panels, bias, nullptr, x, allocate(outputs[i]), num_rows});
    }
    dispatch([products = std::move(products), weights = weights_] { multiply(products); });
  }

  DEFINE_NAME(NativeLinear)

  const std::vector<Weights>& weights() const { return weights_; }

 private:
  std::vector<Weights> weights_;
  std::vector<bool> has_bias_;
};

class ArgMax : public CpuPrimitive {
 public:
  explicit ArgMax(Weights weights) : weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    float* values = allocate(outputs[1]);
    const LinearArgs product{.weights = weights_->panels(),
                             .bias = inputs.size() > 1 ? rows(inputs[1]) : nullptr,
                             .residual = nullptr,
                             .x = rows(inputs[0]),
                             .y = nullptr,
                             .num_rows = static_cast<int>(outputs[0].size())};
    dispatch([product, weights = weights_, indices = outputs[0].data<uint32_t>(), values] {
      native::arg_max(product, indices, values);
    });
  }

  DEFINE_NAME(NativeArgMax)

 private:
  Weights weights_;
};

class Embedding : public CpuPrimitive {
 public:
  explicit Embedding(Weights weights) : weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([tokens = rows<int32_t>(inputs[0]), num_rows = static_cast<int>(inputs[0].size()),
              weights = weights_, y = allocate(outputs[0])] {
      native::embed(*weights, tokens, num_rows, y);
    });
  }

  DEFINE_NAME(NativeEmbedding)

 private:
  Weights weights_;
};

class RMSNorm : public CpuPrimitive {
 public:
  explicit RMSNorm(float eps) : eps_(eps) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int size = inputs[0].shape(-1);
    dispatch([x = rows(inputs[0]), weight = inputs.size() > 1 ? rows(inputs[1]) : nullptr, size,
              num_rows = static_cast<int>(inputs[0].size() / size), eps = eps_,
              y = allocate(outputs[0])] {
      native::rms_norm(x, weight, eps, num_rows, size, y);
    });
  }

  DEFINE_NAME(NativeRMSNorm)

 private:
  float eps_;
};

class SwiGLU : public CpuPrimitive {
 public:
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([gate = rows(inputs[0]), up = rows(inputs[1]), size = inputs[0].size(),
              y = allocate(outputs[0])] { native::swiglu(gate, up, size, y); });
  }

  DEFINE_NAME(NativeSwiGLU)
};

class RoPE : public CpuPrimitive {
 public:
  explicit RoPE(bool traditional) : traditional_(traditional) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Rotation rotation{rows(inputs[1]), rows(inputs[2]), inputs[1].shape(1), traditional_};
    dispatch([x = rows(inputs[0]), rotation, num_rows = inputs[0].shape(0),
              num_heads = inputs[0].shape(1), dim = inputs[0].shape(3), y = allocate(outputs[0])] {
      rotate(x, rotation, num_rows, num_heads, dim, y);
    });
  }

  DEFINE_NAME(NativeRoPE)

 private:
  bool traditional_;
};

class PagedAttention : public CpuPrimitive {
 public:
  PagedAttention(std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, float scale,
                 int window, float soft_cap)
      : pool_(std::move(pool)), step_(std::move(step)), scale_(scale), window_(window),
        soft_cap_(soft_cap) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const AttentionArgs args{
        .pool = pool_->layout(),
        .keys = pool_->keys(),
        .values = pool_->values(),
        .q = rows(inputs[0]),
        .y = allocate(outputs[0]),
        .num_query_heads = inputs[0].shape(1),
        .scale = scale_,
        .soft_cap = soft_cap_,
        .window = window_,
        .sinks = inputs.size() > 3 ? rows(inputs[3]) : nullptr,
        .span_blocks = 0,
    };
    dispatch([args, k = rows(inputs[1]), v = rows(inputs[2]), pool = pool_, step = step_,
              num_rows = inputs[0].shape(0)] {
      write_and_attend(*pool, *step, args, k, v, num_rows);
    });
  }

  DEFINE_NAME(NativePagedAttention)

 private:
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<const Step> step_;
  float scale_;
  int window_;
  float soft_cap_;
};

class TransformerBlock : public CpuPrimitive {
 public:
  TransformerBlock(std::shared_ptr<const Block> block, std::shared_ptr<Pool> pool,
                   std::shared_ptr<const Step> step, bool traditional, int window)
      : block_(std::move(block)), pool_(std::move(pool)), step_(std::move(step)),
        traditional_(traditional), window_(window) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Rotation rotation{rows(inputs[1]), rows(inputs[2]), inputs[1].shape(1), traditional_};
    dispatch([x = rows(inputs[0]), rotation, num_rows = inputs[0].shape(0), block = block_,
              pool = pool_, step = step_, window = window_, y = allocate(outputs[0])] {
      run_block(*block, *pool, *step, rotation, window, x, num_rows, y);
    });
  }

  DEFINE_NAME(NativeTransformerBlock)

 private:
  std::shared_ptr<const Block> block_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<const Step> step_;
  bool traditional_;
  int window_;
};

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

/// An array as the kernels read it, its values computed.
mx::array evaluated(const mx::array& x, mx::Dtype dtype) {
  mx::array rows = mx::contiguous(mx::astype(x, dtype, stream()), false, stream());
  rows.eval();
  return rows;
}

Inputs inputs_of(int bits) {
  if (bits == 32) return Inputs::kFloats;
  require(bits == 16 || bits == 8, "inputs have 8, 16 or 32 bits");
  require(kernels()->max_tile_rows_integers > 0, "this processor has no products of integers");
  return bits == 16 ? Inputs::kInt16 : Inputs::kInt8;
}

}  // namespace

Weights pack(const mx::array& weight, const std::optional<mx::array>& scales,
             const std::optional<mx::array>& biases, int bits, bool rounds, int input_bits) {
  require(weight.ndim() == 2, "weights are a matrix");
  const int columns = kernels()->columns;
  const int num_outputs = weight.shape(0);
  if (!scales) {
    const bool is_bf16 = weight.dtype() == mx::bfloat16;
    const mx::array rows = evaluated(weight, is_bf16 ? mx::bfloat16 : mx::float32);
    const Format format = is_bf16 ? Format::kBfloat16 : Format::kFloat32;
    return std::make_shared<PackedWeights>(
        PlainWeights{format, num_outputs, weight.shape(1), 0, false, Inputs::kFloats,
                     rows.data<uint8_t>(), nullptr, nullptr},
        columns);
  }
  const Inputs inputs = inputs_of(input_bits);
  require(bits == 4 || bits == 8, "quantized weights have 4 or 8 bits");
  require(biases.has_value() && weight.dtype() == mx::uint32, "quantized weights are affine");
  const int num_inputs = weight.shape(1) * 32 / bits;
  const int group = num_inputs / scales->shape(1);
  require(group == 32 || group == 64 || group == 128, "a group has 32, 64 or 128 weights");
  const mx::array rows = evaluated(weight, mx::uint32);
  const mx::array scale_rows = evaluated(*scales, mx::float32);
  const mx::array bias_rows = evaluated(*biases, mx::float32);
  return std::make_shared<PackedWeights>(
      PlainWeights{bits == 4 ? Format::kBits4 : Format::kBits8, num_outputs, num_inputs, group,
                   rounds, inputs, rows.data<uint8_t>(), scale_rows.data<float>(),
                   bias_rows.data<float>()},
      columns);
}

std::vector<mx::array> linear(const mx::array& x, const std::vector<Weights>& weights,
                              const std::vector<std::optional<mx::array>>& biases) {
  require(weights.size() == biases.size(), "a bias, or none, for each matrix");
  std::vector<mx::array> inputs{as_floats(x)};
  std::vector<mx::Shape> shapes;
  std::vector<bool> has_bias;
  for (size_t i = 0; i < weights.size(); i++) {
    require(x.shape(-1) == weights[i]->panels().num_inputs, "rows have as many inputs as weights");
    require(weights[i]->panels().inputs == weights[0]->panels().inputs &&
                weights[i]->panels().group == weights[0]->panels().group,
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
                                std::make_shared<Linear>(weights, has_bias), inputs);
}

std::pair<mx::array, mx::array> arg_max(const mx::array& logits) {
  require(logits.ndim() == 2, "logits are [rows, size]");
  mx::array product = logits;
  // A model's logits are [rows, 1, size].
  while (product.has_primitive() && product.primitive().name() == std::string("Squeeze"))
    product = mx::array(product.inputs()[0]);
  const bool is_open =
      product.has_primitive() && product.status() == mx::array::Status::unscheduled;
  const auto* linear = is_open ? dynamic_cast<const Linear*>(&product.primitive()) : nullptr;
  if (!linear || linear->weights().size() != 1)
    return {mx::argmax(logits, -1, false, stream()), mx::max(logits, -1, false, stream())};
  const mx::Shape shape{logits.shape(0)};
  const auto outputs = mx::array::make_arrays(
      {shape, shape}, {mx::uint32, mx::float32}, std::make_shared<ArgMax>(linear->weights()[0]),
      product.inputs());
  return {outputs[0], outputs[1]};
}

mx::array embed(const mx::array& tokens, Weights weights) {
  mx::Shape shape = tokens.shape();
  shape.push_back(weights->panels().num_inputs);
  return mx::array(std::move(shape), mx::float32, std::make_shared<Embedding>(std::move(weights)),
                   {mx::astype(tokens, mx::int32, stream())});
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  require(!weight || weight->shape() == mx::Shape{x.shape(-1)}, "a weight for each number");
  std::vector<mx::array> inputs{as_floats(x)};
  if (weight) inputs.push_back(as_floats(*weight));
  return mx::array(x.shape(), mx::float32, std::make_shared<RMSNorm>(eps), std::move(inputs));
}

mx::array swiglu(const mx::array& gate, const mx::array& up) {
  require(gate.shape() == up.shape(), "gate and up have one shape");
  return mx::array(gate.shape(), mx::float32, std::make_shared<SwiGLU>(),
                   {as_floats(gate), as_floats(up)});
}

mx::array rope(const mx::array& x, const mx::array& cosines, const mx::array& sines,
               bool traditional) {
  require(x.ndim() == 4 && x.shape(2) == 1, "x is [rows, heads, 1, dim]");
  require(cosines.shape() == sines.shape() && cosines.ndim() == 2, "angles are [rows, dims / 2]");
  require(cosines.shape(0) == x.shape(0) && 2 * cosines.shape(1) <= x.shape(3), "angles fit to x");
  return mx::array(x.shape(), mx::float32, std::make_shared<RoPE>(traditional),
                   {as_floats(x), as_floats(cosines), as_floats(sines)});
}

mx::array attend(const mx::array& q, const mx::array& k, const mx::array& v,
                 std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, float scale,
                 int window, float soft_cap, const std::optional<mx::array>& sinks) {
  const PoolLayout& layout = pool->layout();
  require(q.ndim() == 4 && q.shape(2) == 1, "queries are [rows, heads, 1, dim]");
  require(q.shape(0) >= step->num_rows(), "a query for each row of the step");
  require(q.shape(1) % layout.num_heads == 0, "key heads divide query heads");
  require(q.shape(1) / layout.num_heads <= MAX_TILE, "too many query heads for a key head");
  const mx::Shape keys{q.shape(0), layout.num_heads, 1, layout.key_dim};
  const mx::Shape values{q.shape(0), layout.num_heads, 1, layout.value_dim};
  require(k.shape() == keys && v.shape() == values && q.shape(3) == layout.key_dim,
          "queries, keys and values are of the pool's shape");
  std::vector<mx::array> inputs{as_floats(q), as_floats(k), as_floats(v)};
  require(!sinks || sinks->shape() == mx::Shape{q.shape(1)}, "a sink for each query head");
  if (sinks) inputs.push_back(as_floats(*sinks));
  return mx::array({q.shape(0), q.shape(1), 1, layout.value_dim}, mx::float32,
                   std::make_shared<PagedAttention>(std::move(pool), std::move(step), scale,
                                                    window, soft_cap),
                   std::move(inputs));
}

mx::array transform(const mx::array& x, const mx::array& cosines, const mx::array& sines,
                    bool traditional, std::shared_ptr<const Block> block,
                    std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, int window) {
  const PoolLayout& layout = pool->layout();
  const mx::Shape rows{x.shape(0), 1, block->size()};
  require(x.shape() == rows && x.shape(0) >= step->num_rows(), "x is [rows, 1, size]");
  require(cosines.shape() == sines.shape() && cosines.ndim() == 2, "angles are [rows, dims / 2]");
  require(cosines.shape(0) == x.shape(0) && 2 * cosines.shape(1) <= layout.key_dim,
          "angles fit to the heads");
  require(block->q->panels().num_outputs == block->num_heads * layout.key_dim &&
              block->k->panels().num_outputs == layout.num_heads * layout.key_dim &&
              block->v->panels().num_outputs == layout.num_heads * layout.value_dim &&
              block->o->panels().num_inputs == block->num_heads * layout.value_dim,
          "the block and the pool have the same heads");
  require(block->num_heads % layout.num_heads == 0 &&
              block->num_heads / layout.num_heads <= MAX_TILE,
          "too many query heads for a key head");
  return mx::array(rows, mx::float32,
                   std::make_shared<TransformerBlock>(std::move(block), std::move(pool),
                                                      std::move(step), traditional, window),
                   {as_floats(x), as_floats(cosines), as_floats(sines)});
}

}  // namespace native::graph

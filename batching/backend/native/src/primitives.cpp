#include "primitives.h"

#include <algorithm>
#include <stdexcept>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "thread_pool.h"

namespace native {

namespace {

// Rows, or numbers, that are worth a part of their own.
constexpr int ROWS_PER_PART = 8;
constexpr size_t NUMBERS_PER_PART = 4096;

// Of one product.  More of them would be shared out more evenly, but claiming one takes longer
// than computing a part of a small one.
constexpr int PARTS_PER_THREAD = 3;

std::unique_ptr<ThreadPool> threads = std::make_unique<ThreadPool>(1);

mx::Stream stream() { return mx::default_stream(mx::Device(mx::Device::cpu)); }

mx::array as_rows(const mx::array& x) {
  return mx::contiguous(mx::astype(x, mx::float32, stream()), false, stream());
}

/// Where an output goes; it is allocated now and written when the stream comes to it.
float* allocate(mx::array& output) {
  output.set_data(mx::allocator::malloc(output.nbytes()));
  return output.data<float>();
}

float* scratch(size_t size) {
  thread_local std::vector<float> memory;
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

template <typename Run>
void for_rows(int num_rows, int rows_per_part, const Run& run) {
  threads->for_each((num_rows + rows_per_part - 1) / rows_per_part, [&](int part) {
    const int first = part * rows_per_part;
    run(first, std::min(first + rows_per_part, num_rows));
  });
}

/// One that computes in float32 on the CPU stream, and is given what it needs as it is made.
class CpuPrimitive : public mx::Primitive {
 public:
  CpuPrimitive() : mx::Primitive(native::stream()) {}

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("the native kernels run on the CPU");
  }

 protected:
  template <typename Run>
  void dispatch(Run&& run) {
    mx::cpu::get_command_encoder(stream()).dispatch(std::forward<Run>(run));
  }
};

class Linear : public CpuPrimitive {
 public:
  Linear(std::vector<Weights> weights, std::vector<bool> has_bias)
      : weights_(std::move(weights)), has_bias_(std::move(has_bias)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    std::vector<LinearArgs> products;
    size_t next_bias = 1;
    for (size_t i = 0; i < weights_.size(); i++) {
      const Panels& panels = weights_[i]->panels();
      const float* bias = has_bias_[i] ? inputs[next_bias++].data<float>() : nullptr;
      const int num_rows = static_cast<int>(inputs[0].size() / panels.num_inputs);
      products.push_back({panels, bias, inputs[0].data<float>(), allocate(outputs[i]), num_rows});
    }
    dispatch([products = std::move(products), weights = weights_] { run(products); });
  }

  DEFINE_NAME(NativeLinear)

 private:
  static void run(const std::vector<LinearArgs>& products) {
    const Kernels& k = *kernels();
    int num_panels = 0;
    for (const LinearArgs& p : products) num_panels += p.weights.num_panels();
    const int num_parts = std::min(num_panels, PARTS_PER_THREAD * threads->num_threads());
    threads->for_each(num_parts, [&](int part) {
      const LinearArgs* p = products.data();
      int panel = static_cast<int>(int64_t{num_panels} * part / num_parts);
      const int next = static_cast<int>(int64_t{num_panels} * (part + 1) / num_parts);
      for (int before = 0; panel < next; panel++) {
        while (panel - before >= p->weights.num_panels()) before += p++->weights.num_panels();
        k.linear(*p, panel - before, scratch(k.scratch_floats));
      }
    });
  }

  std::vector<Weights> weights_;
  std::vector<bool> has_bias_;
};

class Embedding : public CpuPrimitive {
 public:
  explicit Embedding(Weights weights) : weights_(std::move(weights)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([tokens = inputs[0].data<int32_t>(), num_rows = static_cast<int>(inputs[0].size()),
              weights = weights_, y = allocate(outputs[0])] {
      const Panels& panels = weights->panels();
      for_rows(num_rows, ROWS_PER_PART, [&](int first, int next) {
        for (int m = first; m < next; m++) {
          // As in the rest of MLX, an index beyond the end is not an error but must do no harm.
          const int token = std::clamp(tokens[m], 0, panels.num_outputs - 1);
          weights->unpack(token, y + static_cast<size_t>(m) * panels.num_inputs);
        }
      });
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
    const int num_rows = static_cast<int>(inputs[0].size() / size);
    const float* weight = inputs.size() > 1 ? inputs[1].data<float>() : nullptr;
    dispatch([x = inputs[0].data<float>(), weight, size, num_rows, eps = eps_,
              y = allocate(outputs[0])] {
      for_rows(num_rows, std::max(1, static_cast<int>(NUMBERS_PER_PART / size)),
               [&](int first, int next) {
                 for (size_t m = first; m < static_cast<size_t>(next); m++)
                   kernels()->rms_norm(x + m * size, weight, eps, size, y + m * size);
               });
    });
  }

  DEFINE_NAME(NativeRMSNorm)

 private:
  float eps_;
};

class SwiGLU : public CpuPrimitive {
 public:
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([gate = inputs[0].data<float>(), up = inputs[1].data<float>(),
              size = inputs[0].size(), y = allocate(outputs[0])] {
      const int num_parts = static_cast<int>((size + NUMBERS_PER_PART - 1) / NUMBERS_PER_PART);
      threads->for_each(num_parts, [&](int part) {
        const size_t first = part * NUMBERS_PER_PART;
        kernels()->swiglu(gate + first, up + first, std::min(NUMBERS_PER_PART, size - first),
                          y + first);
      });
    });
  }

  DEFINE_NAME(NativeSwiGLU)
};

class RoPE : public CpuPrimitive {
 public:
  explicit RoPE(bool traditional) : traditional_(traditional) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int num_heads = inputs[0].shape(1), dim = inputs[0].shape(3);
    const int half = inputs[1].shape(1);
    dispatch([x = inputs[0].data<float>(), cosines = inputs[1].data<float>(),
              sines = inputs[2].data<float>(), y = allocate(outputs[0]),
              num_rows = inputs[0].shape(0), num_heads, dim, half, traditional = traditional_] {
      for_rows(num_rows, ROWS_PER_PART, [&](int first, int next) {
        for (int m = first; m < next; m++)
          for (int h = 0; h < num_heads; h++) {
            const size_t at = (static_cast<size_t>(m) * num_heads + h) * dim;
            kernels()->rope(x + at, cosines + static_cast<size_t>(m) * half,
                            sines + static_cast<size_t>(m) * half, half, dim, traditional, y + at);
          }
      });
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
        .q = inputs[0].data<float>(),
        .y = allocate(outputs[0]),
        .num_query_heads = inputs[0].shape(1),
        .scale = scale_,
        .soft_cap = soft_cap_,
        .window = window_,
        .sinks = inputs.size() > 3 ? inputs[3].data<float>() : nullptr,
        .span_blocks = 0,
    };
    dispatch([args, k = inputs[1].data<float>(), v = inputs[2].data<float>(), pool = pool_,
              step = step_, num_rows = inputs[0].shape(0)] {
      write(*pool, *step, k, v);
      attend_step(*threads, *kernels(), args, *step);
      const size_t row = static_cast<size_t>(args.num_query_heads) * args.pool.value_dim;
      std::fill(args.y + step->num_rows() * row, args.y + num_rows * row, 0.0f);
    });
  }

  DEFINE_NAME(NativePagedAttention)

 private:
  static void write(Pool& pool, const Step& step, const float* k, const float* v) {
    const PoolLayout& layout = pool.layout();
    for_rows(step.num_rows(), ROWS_PER_PART, [&](int first, int next) {
      for (size_t m = first; m < static_cast<size_t>(next); m++)
        pool.write(step.slots[m], k + m * layout.num_heads * layout.key_dim,
                   v + m * layout.num_heads * layout.value_dim);
    });
  }

  std::shared_ptr<Pool> pool_;
  std::shared_ptr<const Step> step_;
  float scale_;
  int window_;
  float soft_cap_;
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

}  // namespace

void set_num_threads(int num_threads) { threads = std::make_unique<ThreadPool>(num_threads); }

int num_threads() { return threads->num_threads(); }

Weights pack(const mx::array& weight, const std::optional<mx::array>& scales,
             const std::optional<mx::array>& biases, int bits, bool rounds) {
  require(weight.ndim() == 2, "weights are a matrix");
  const int columns = kernels()->columns;
  const int num_outputs = weight.shape(0);
  if (!scales) {
    const bool is_bf16 = weight.dtype() == mx::bfloat16;
    const mx::array rows = evaluated(weight, is_bf16 ? mx::bfloat16 : mx::float32);
    const Format format = is_bf16 ? Format::kBfloat16 : Format::kFloat32;
    return std::make_shared<PackedWeights>(
        PlainWeights{format, num_outputs, weight.shape(1), 0, false, rows.data<uint8_t>(),
                     nullptr, nullptr},
        columns);
  }
  require(bits == 4 || bits == 8, "quantized weights have 4 or 8 bits");
  require(biases.has_value() && weight.dtype() == mx::uint32, "quantized weights are affine");
  const int num_inputs = weight.shape(1) * 32 / bits;
  const int group = num_inputs / scales->shape(1);
  require(group == 32 || group == 64 || group == 128, "a group has 32, 64 or 128 weights");
  const mx::array rows = evaluated(weight, mx::uint32);
  const mx::array scale_rows = evaluated(*scales, mx::float32);
  const mx::array bias_rows = evaluated(*biases, mx::float32);
  return std::make_shared<PackedWeights>(
      PlainWeights{bits == 4 ? Format::kBits4 : Format::kBits8, num_outputs, num_inputs, group, rounds,
                   rows.data<uint8_t>(), scale_rows.data<float>(), bias_rows.data<float>()},
      columns);
}

std::vector<mx::array> linear(const mx::array& x, const std::vector<Weights>& weights,
                              const std::vector<std::optional<mx::array>>& biases) {
  require(weights.size() == biases.size(), "a bias, or none, for each matrix");
  std::vector<mx::array> inputs{as_rows(x)};
  std::vector<mx::Shape> shapes;
  std::vector<bool> has_bias;
  for (size_t i = 0; i < weights.size(); i++) {
    require(x.shape(-1) == weights[i]->panels().num_inputs, "rows have as many inputs as weights");
    mx::Shape shape = x.shape();
    shape.back() = weights[i]->panels().num_outputs;
    shapes.push_back(std::move(shape));
    has_bias.push_back(biases[i].has_value());
    if (!biases[i]) continue;
    require(biases[i]->size() == static_cast<size_t>(shapes.back().back()), "a bias an output");
    inputs.push_back(as_rows(*biases[i]));
  }
  return mx::array::make_arrays(std::move(shapes),
                                std::vector<mx::Dtype>(weights.size(), mx::float32),
                                std::make_shared<Linear>(weights, has_bias), inputs);
}

mx::array embed(const mx::array& tokens, Weights weights) {
  mx::Shape shape = tokens.shape();
  shape.push_back(weights->panels().num_inputs);
  return mx::array(std::move(shape), mx::float32, std::make_shared<Embedding>(std::move(weights)),
                   {mx::contiguous(mx::astype(tokens, mx::int32, stream()), false, stream())});
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  require(!weight || weight->shape() == mx::Shape{x.shape(-1)}, "a weight for each number of a row");
  std::vector<mx::array> inputs{as_rows(x)};
  if (weight) inputs.push_back(as_rows(*weight));
  return mx::array(x.shape(), mx::float32, std::make_shared<RMSNorm>(eps), std::move(inputs));
}

mx::array swiglu(const mx::array& gate, const mx::array& up) {
  require(gate.shape() == up.shape(), "gate and up have one shape");
  return mx::array(gate.shape(), mx::float32, std::make_shared<SwiGLU>(),
                   {as_rows(gate), as_rows(up)});
}

mx::array rope(const mx::array& x, const mx::array& cosines, const mx::array& sines,
               bool traditional) {
  require(x.ndim() == 4 && x.shape(2) == 1, "x is [rows, heads, 1, dim]");
  require(cosines.shape() == sines.shape() && cosines.ndim() == 2, "angles are [rows, dims / 2]");
  require(cosines.shape(0) == x.shape(0) && 2 * cosines.shape(1) <= x.shape(3), "angles fit to x");
  return mx::array(x.shape(), mx::float32, std::make_shared<RoPE>(traditional),
                   {as_rows(x), as_rows(cosines), as_rows(sines)});
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
  std::vector<mx::array> inputs{as_rows(q), as_rows(k), as_rows(v)};
  require(!sinks || sinks->shape() == mx::Shape{q.shape(1)}, "a sink for each query head");
  if (sinks) inputs.push_back(as_rows(*sinks));
  return mx::array({q.shape(0), q.shape(1), 1, layout.value_dim}, mx::float32,
                   std::make_shared<PagedAttention>(std::move(pool), std::move(step), scale,
                                                    window, soft_cap),
                   std::move(inputs));
}

}  // namespace native

// The halves of a transformer block as operations.
#include "primitives/adapters.h"
#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"
#include "primitives/rows.h"

namespace native::graph {

namespace {

class Attention : public RowPrimitive {
 public:
  Attention(const RowInputs& inputs, std::shared_ptr<const AttentionHalf> half,
            std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, bool traditional,
            const Visibility& visibility, std::shared_ptr<const AdaptedRows> adapted)
      : RowPrimitive(inputs, traditional), half_(std::move(half)), pool_(std::move(pool)),
        step_(std::move(step)), visibility_(visibility), adapted_(std::move(adapted)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([x = contiguous(inputs[0]), rotation = rotation(inputs),
              factors = query_factors(inputs), num_rows = inputs[0].shape(0), half = half_,
              pool = pool_, step = step_, visibility = visibility_, adapted = adapted_,
              y = allocate(outputs[0])] {
      native::run_attention(*half, *pool, *step, rotation, visibility, factors, x, num_rows, y,
                            adapted.get());
    });
  }

  DEFINE_NAME(NativeAttentionHalf)

 private:
  std::shared_ptr<const AttentionHalf> half_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<const Step> step_;
  Visibility visibility_;
  std::shared_ptr<const AdaptedRows> adapted_;
};

class Mlp : public CpuPrimitive {
 public:
  Mlp(std::shared_ptr<const MlpHalf> half, std::shared_ptr<const AdaptedRows> adapted)
      : half_(std::move(half)), adapted_(std::move(adapted)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int num_rows = static_cast<int>(inputs[0].size() / half_->size());
    dispatch([x = contiguous(inputs[0]), residual = contiguous(inputs.back()), num_rows,
              half = half_, adapted = adapted_, y = allocate(outputs[0])] {
      native::run_mlp(*half, x, residual, num_rows, y, adapted.get());
    });
  }

  DEFINE_NAME(NativeMlpHalf)

 private:
  std::shared_ptr<const MlpHalf> half_;
  std::shared_ptr<const AdaptedRows> adapted_;
};

bool fits(const Norm& norm, int size) { return !norm.size() || norm.size() == size; }

bool fits(const Output& output, int size) {
  return output.layer.num_outputs() == size && fits(output.ending.norm, size);
}

/// A norm of each head, or of all heads of a row together.
bool fits_heads(const Norm& norm, int num_heads, int dim) {
  return fits(norm, dim) || norm.size() == num_heads * dim;
}

int num_outputs(const std::vector<Layer>& layers) {
  int total = 0;
  for (const Layer& layer : layers) total += layer.num_outputs();
  return total;
}

void check_attention(const AttentionHalf& half, const PoolLayout& layout) {
  const int q_size = half.num_heads * layout.key_dim * (half.is_gated ? 2 : 1);
  const int k_size = layout.num_heads * layout.key_dim;
  const int v_size = layout.num_heads * layout.value_dim;
  require(num_outputs(half.qkv) == q_size + k_size + (half.has_own_values() ? v_size : 0) &&
              (half.is_joined() || (half.qkv[0].num_outputs() == q_size &&
                                     half.qkv[1].num_outputs() == k_size)) &&
              (half.has_own_values() || v_size == k_size) &&
              !(half.is_gated && (half.is_joined() || layout.key_dim != layout.value_dim)) &&
              half.output.layer.num_inputs() == half.num_heads * layout.value_dim,
          "the half and the pool have the same heads");
  require(fits(half.norm, half.size()) && fits(half.output, half.size()) &&
              fits_heads(half.q_norm, half.num_heads, layout.key_dim) &&
              fits_heads(half.k_norm, layout.num_heads, layout.key_dim) &&
              fits_heads(half.v_norm, layout.num_heads, layout.value_dim),
          "norms are of what they normalize");
  require(half.sinks.empty() || static_cast<int>(half.sinks.size()) == half.num_heads,
          "a sink for each query head");
  require(!layout.is_latent && half.num_heads % layout.num_heads == 0 &&
              half.num_heads / layout.num_heads <= MAX_TILE,
          "too many query heads for a key head");
}

void check_mlp(const MlpHalf& half) {
  const int outputs = num_outputs(half.gate_up);
  require(outputs == 2 * half.width() || (outputs == half.width() && !half.is_gated()),
          "gate and up are of one size");
  require(fits(half.norm, half.size()) && fits(half.output, half.size()),
          "norms are of what they normalize");
}

}  // namespace

mx::array run_attention(const mx::array& x, const std::optional<mx::array>& cosines,
                        const std::optional<mx::array>& sines, bool traditional,
                        std::shared_ptr<const AttentionHalf> half, std::shared_ptr<Pool> pool,
                        std::shared_ptr<const Step> step, int window, bool is_chunked,
                        float soft_cap, const std::optional<mx::array>& query_factors) {
  const PoolLayout& layout = pool->layout();
  const mx::Shape rows{x.shape(0), 1, half->size()};
  require(x.shape() == rows && x.shape(0) >= step->num_rows(), "x is [rows, 1, size]");
  check_attention(*half, layout);
  auto adapted = adapted_rows(x, {half->qkv, only(half->output.layer)});
  RowInputs inputs = row_inputs(x, cosines, sines, query_factors, layout.key_dim);
  return mx::array(rows, mx::float32,
                   std::make_shared<Attention>(inputs, std::move(half), std::move(pool),
                                               std::move(step), traditional,
                                               Visibility{window, is_chunked, soft_cap},
                                               std::move(adapted)),
                   std::move(inputs.arrays));
}

mx::array run_mlp(const mx::array& x, std::shared_ptr<const MlpHalf> half,
                  const std::optional<mx::array>& residual) {
  require(x.ndim() > 0 && x.shape(-1) == half->size(), "x is [..., size]");
  require(!residual || residual->shape() == x.shape(), "rows to add to");
  check_mlp(*half);
  std::vector<mx::array> inputs{as_floats(x)};
  if (residual) inputs.push_back(as_floats(*residual));
  auto adapted = adapted_rows(x, {half->gate_up, only(half->output.layer)});
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<Mlp>(std::move(half), std::move(adapted)),
                   std::move(inputs));
}

}  // namespace native::graph

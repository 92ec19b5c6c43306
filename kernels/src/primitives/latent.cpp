// Latent attention of a transformer block as an operation.
#include "operations/latent.h"
#include "primitives/adapters.h"
#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"
#include "primitives/rows.h"

namespace native::graph {

namespace {

class Latent : public RowPrimitive {
 public:
  Latent(const RowInputs& inputs, std::shared_ptr<const LatentHalf> half,
         std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, bool traditional, int window,
         std::shared_ptr<const AdaptedRows> adapted)
      : RowPrimitive(inputs, traditional), half_(std::move(half)), pool_(std::move(pool)),
        step_(std::move(step)), window_(window), adapted_(std::move(adapted)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([x = contiguous(inputs[0]), rotation = rotation(inputs),
              factors = query_factors(inputs), num_rows = inputs[0].shape(0), half = half_,
              pool = pool_, step = step_, window = window_, adapted = adapted_,
              y = allocate(outputs[0])] {
      native::run_latent(*half, *pool, *step, rotation, window, factors, x, num_rows, y,
                         adapted.get());
    });
  }

  DEFINE_NAME(NativeLatentHalf)

 private:
  std::shared_ptr<const LatentHalf> half_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<const Step> step_;
  int window_;
  std::shared_ptr<const AdaptedRows> adapted_;
};

void check_sizes(const LatentHalf& half) {
  const int heads = half.num_heads, first = half.inputs[0].num_outputs();
  require(half.inputs[1].num_inputs() == half.size() && half.rotated_dim() >= 0 &&
              half.latent_dim() > 0 && half.plain_dim() > 0 && half.value_dim() > 0,
          "a latent and a rotated key");
  require(half.q.empty() || (half.q.size() == 1 && half.q[0].num_inputs() == first),
          "q is made of what its first layer gives");
  require(half.query_dim() * heads == (half.q.empty() ? first : half.q[0].num_outputs()) &&
              half.value_dim() * heads == half.output.layer.num_inputs(),
          "heads are of one size");
  require(half.output.layer.num_outputs() == half.size() &&
              (!half.norm.size() || half.norm.size() == half.size()) &&
              (!half.q_norm.size() || half.q_norm.size() == first) &&
              (!half.output.ending.norm.size() || half.output.ending.norm.size() == half.size()),
          "norms are of what they normalize");
  if (half.is_expanded()) {
    require(half.expand.size() == 1 && half.expand[0].num_inputs() == half.latent_dim() &&
                half.expand[0].num_outputs() == heads * (half.plain_dim() + half.value_dim()),
            "latents become keys and values");
    return;
  }
  require(half.embed && half.unembed, "a matrix for each head");
  const Panels embed = half.embed->panels(), unembed = half.unembed->panels();
  require(half.embed->num_matrices() == heads && half.unembed->num_matrices() == heads &&
              embed.num_inputs == half.plain_dim() && embed.num_outputs == half.latent_dim() &&
              unembed.num_inputs == half.latent_dim() && unembed.num_outputs == half.value_dim(),
          "a matrix for each head, of a query and of a value");
}

void check_latent(const LatentHalf& half, const PoolLayout& layout) {
  check_sizes(half);
  const bool is_latent = !half.is_expanded();
  require(layout.is_latent == is_latent && layout.num_heads == (is_latent ? 1 : half.num_heads) &&
              layout.key_dim ==
                  half.rotated_dim() + (is_latent ? half.latent_dim() : half.plain_dim()) &&
              layout.value_dim == (is_latent ? half.latent_dim() : half.value_dim()),
          "the half and the pool have the same heads");
  require(half.num_heads / layout.num_heads <= MAX_TILE, "too many query heads for a key head");
}

}  // namespace

mx::array run_latent(const mx::array& x, const std::optional<mx::array>& cosines,
                     const std::optional<mx::array>& sines, bool traditional,
                     std::shared_ptr<const LatentHalf> half, std::shared_ptr<Pool> pool,
                     std::shared_ptr<const Step> step, int window,
                     const std::optional<mx::array>& query_factors) {
  const mx::Shape rows{x.shape(0), 1, half->size()};
  require(x.shape() == rows && x.shape(0) >= step->num_rows(), "x is [rows, 1, size]");
  check_latent(*half, pool->layout());
  auto adapted = adapted_rows(x, {half->inputs, half->q, half->expand, only(half->output.layer)});
  RowInputs inputs = row_inputs(x, cosines, sines, query_factors, half->rotated_dim());
  return mx::array(rows, mx::float32,
                   std::make_shared<Latent>(inputs, std::move(half), std::move(pool),
                                            std::move(step), traditional, window,
                                            std::move(adapted)),
                   std::move(inputs.arrays));
}

}  // namespace native::graph

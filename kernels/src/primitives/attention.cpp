// Attention over the paged pool.
#include "operations/attention.h"
#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

class PagedAttention : public CpuPrimitive {
 public:
  PagedAttention(std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, float scale,
                 int window, float soft_cap, bool is_chunked)
      : pool_(std::move(pool)), step_(std::move(step)), scale_(scale), window_(window),
        soft_cap_(soft_cap), is_chunked_(is_chunked) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const AttentionArgs args{
        .pool = pool_->layout(),
        .keys = pool_->keys(),
        .values = pool_->values(),
        .q = contiguous(inputs[0]),
        .y = allocate(outputs[0]),
        .num_query_heads = inputs[0].shape(1),
        .scale = scale_,
        .soft_cap = soft_cap_,
        .window = window_,
        .is_chunked = is_chunked_,
        .sinks = inputs.size() > 3 ? contiguous(inputs[3]) : nullptr,
        .span_blocks = 0,
    };
    dispatch([args, k = contiguous(inputs[1]), v = contiguous(inputs[2]), pool = pool_,
              step = step_, num_rows = inputs[0].shape(0)] {
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
  bool is_chunked_;
};

}  // namespace

mx::array attend(const mx::array& q, const mx::array& k, const mx::array& v,
                 std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, float scale,
                 int window, float soft_cap, const std::optional<mx::array>& sinks,
                 bool is_chunked) {
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
                                                    window, soft_cap, is_chunked),
                   std::move(inputs));
}

}  // namespace native::graph

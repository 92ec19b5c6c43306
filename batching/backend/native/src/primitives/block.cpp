// A transformer block as one operation.
#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

class TransformerBlock : public CpuPrimitive {
 public:
  TransformerBlock(std::shared_ptr<const Block> block, std::shared_ptr<Pool> pool,
                   std::shared_ptr<const Step> step, bool traditional, int window)
      : block_(std::move(block)), pool_(std::move(pool)), step_(std::move(step)),
        traditional_(traditional), window_(window) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Rotation rotation{contiguous(inputs[1]), contiguous(inputs[2]), inputs[1].shape(1),
                            traditional_};
    dispatch([x = contiguous(inputs[0]), rotation, num_rows = inputs[0].shape(0), block = block_,
              pool = pool_, step = step_, window = window_, y = allocate(outputs[0])] {
      native::run_block(*block, *pool, *step, rotation, window, x, num_rows, y);
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

}  // namespace

mx::array run_block(const mx::array& x, const mx::array& cosines, const mx::array& sines,
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

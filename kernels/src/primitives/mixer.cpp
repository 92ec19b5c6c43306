// The recurrent half of a block as an operation.
#include "operations/mixer.h"

#include "primitives/adapters.h"
#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

class RunMixer : public CpuPrimitive {
 public:
  RunMixer(std::shared_ptr<const Mixer> mixer, std::shared_ptr<const StatePool> pool,
           std::shared_ptr<const StateStep> step, std::shared_ptr<const AdaptedRows> adapted)
      : mixer_(std::move(mixer)), pool_(std::move(pool)), step_(std::move(step)),
        adapted_(std::move(adapted)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch([x = contiguous(inputs[0]), mixer = mixer_, pool = pool_, step = step_,
              adapted = adapted_, y = allocate(outputs[0])] {
      native::run_mixer(*mixer, *pool, *step, x, y, adapted.get());
    });
  }

  DEFINE_NAME(NativeMixer)

 private:
  std::shared_ptr<const Mixer> mixer_;
  std::shared_ptr<const StatePool> pool_;
  std::shared_ptr<const StateStep> step_;
  std::shared_ptr<const AdaptedRows> adapted_;
};

}  // namespace

mx::array run_mixer(const mx::array& x, std::shared_ptr<const Mixer> mixer,
                    std::shared_ptr<StatePool> pool, std::shared_ptr<const StateStep> step) {
  require(x.shape() == mx::Shape{step->num_rows, 1, mixer->size()}, "x is [rows, 1, size]");
  require(pool->cell_floats() == mixer->state_size(), "the pool has the mixer's states");
  pool->grow(step->num_cells);
  auto adapted = adapted_rows(x, {mixer->layers, only(mixer->output.layer)});
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<RunMixer>(std::move(mixer), std::move(pool), std::move(step),
                                              std::move(adapted)),
                   {as_floats(x)});
}

}  // namespace native::graph

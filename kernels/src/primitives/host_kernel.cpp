// What mx.fast.metal_kernel and mx.fast.cuda_kernel are on a GPU, on the CPU.
#include <cstdint>

#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

class HostKernelCall : public CpuPrimitive {
 public:
  explicit HostKernelCall(HostKernel kernel) : kernel_(std::move(kernel)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    std::vector<uintptr_t> from, to;
    for (const mx::array& input : inputs) from.push_back(address(input));
    for (mx::array& output : outputs) {
      output.set_data(mx::allocator::malloc(output.nbytes()));
      to.push_back(reinterpret_cast<uintptr_t>(output.data<char>()));
    }
    dispatch([kernel = kernel_, from = std::move(from), to = std::move(to)] { kernel(from, to); });
  }

  DEFINE_NAME(HostKernel)

 private:
  /// Return where an input's values are, side by side.
  uintptr_t address(const mx::array& input) {
    switch (input.itemsize()) {
      case 1: return reinterpret_cast<uintptr_t>(contiguous<uint8_t>(input));
      case 2: return reinterpret_cast<uintptr_t>(contiguous<uint16_t>(input));
      case 4: return reinterpret_cast<uintptr_t>(contiguous<uint32_t>(input));
      default: return reinterpret_cast<uintptr_t>(contiguous<uint64_t>(input));
    }
  }

  HostKernel kernel_;
};

}  // namespace

std::vector<mx::array> host_kernel(HostKernel kernel, const std::vector<mx::array>& inputs,
                                   const std::vector<std::vector<int>>& shapes,
                                   const std::vector<mx::Dtype>& dtypes) {
  require(shapes.size() == dtypes.size() && !shapes.empty(), "a shape and a type for each output");
  std::vector<mx::Shape> of_outputs;
  for (const std::vector<int>& shape : shapes) of_outputs.emplace_back(shape.begin(), shape.end());
  return mx::array::make_arrays(of_outputs, dtypes,
                                std::make_shared<HostKernelCall>(std::move(kernel)), inputs);
}

}  // namespace native::graph

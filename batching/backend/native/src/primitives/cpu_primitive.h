// What all primitives share.
#pragma once

#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace native::graph {

namespace mx = mlx::core;

inline mx::Stream stream() { return mx::default_stream(mx::Device(mx::Device::cpu)); }

inline mx::array as_floats(const mx::array& x) { return mx::astype(x, mx::float32, stream()); }

/// Throws std::invalid_argument if the condition is false.
inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

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
inline float* allocate(mx::array& output) {
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

}  // namespace native::graph

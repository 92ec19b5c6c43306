// The base of all primitives, on the CPU stream of MLX.
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

/// An evaluated, contiguous array.
inline mx::array evaluated(const mx::array& x, mx::Dtype dtype) {
  mx::array rows = mx::contiguous(mx::astype(x, dtype, stream()), false, stream());
  rows.eval();
  return rows;
}

/// Throws std::invalid_argument if the condition is false.
inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

/// Copy values of any strides to contiguous memory; return its end.
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

/// Allocate an output, which the stream will write later.
inline float* allocate(mx::array& output) {
  output.set_data(mx::allocator::malloc(output.nbytes()));
  return output.data<float>();
}

/// Computes in float32 on the CPU stream.
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

  /// Return contiguous values of an input: its own memory, or a copy that the stream will make.  An
  /// operation of MLX for each input would cost more than most kernels.
  template <typename T = float>
  const T* contiguous(const mx::array& x) {
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

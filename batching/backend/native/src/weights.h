// Weights of a linear layer, packed for the kernel.
#pragma once

#include "kernels.h"
#include "memory.h"

namespace native {

/// As MLX keeps them: floats `[outputs, inputs]`, or `bits` bits each in words of 32 with scales
/// and biases `[outputs, inputs / group]`.
struct PlainWeights {
  Format format;
  int num_outputs;
  int num_inputs;
  int group;
  bool rounds;  // as in Panels
  const void* weights;
  const float* scales;
  const float* biases;
};

class PackedWeights {
 public:
  PackedWeights(const PlainWeights& plain, int columns);

  const Panels& panels() const { return panels_; }
  /// Unpack the weights of one output, `[num_inputs]`.
  void unpack(int output, float* row) const;

  size_t num_bytes() const { return memory_.size(); }

 private:
  Panels panels_;
  Memory memory_;
};

}  // namespace native

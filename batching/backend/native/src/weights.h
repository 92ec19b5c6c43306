// Weights of a linear layer, packed for the kernels.
#pragma once

#include <memory>

#include "kernels.h"
#include "memory.h"

namespace native {

/// As MLX stores them: floats `[outputs, inputs]`, or integers packed in 32-bit words with scales
/// and biases `[outputs, inputs / group]`.
struct PlainWeights {
  Format format;
  int num_outputs;
  int num_inputs;
  int group;
  InputType input_type;   // as in Panels
  const void* weights;
  const float* scales;
  const float* biases;
};

class PackedWeights {
 public:
  PackedWeights(const PlainWeights& plain, int columns);
  ~PackedWeights();
  PackedWeights(const PackedWeights&) = delete;
  PackedWeights& operator=(const PackedWeights&) = delete;

  /// Bytes of all packed weights of this process.
  static size_t all_bytes();

  const Panels& panels() const { return panels_; }
  /// Dequantize the weights of one output, `[num_inputs]`.
  void unpack(int output, float* row) const;

  size_t num_bytes() const { return memory_.size(); }

 private:
  float quantized(const uint8_t* panel, size_t input, size_t column) const;

  Panels panels_;
  Memory memory_;
};

using Weights = std::shared_ptr<const PackedWeights>;

}  // namespace native

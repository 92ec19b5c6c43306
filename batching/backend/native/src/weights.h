// Weights of a linear layer, packed for the kernels.
#pragma once

#include <memory>

#include "kernels.h"
#include "memory.h"

namespace native {

/// As MLX stores them: floats `[matrices, outputs, inputs]`, or integers of some bits, one after the
/// other from the lowest bits on, with scales and biases `[matrices, outputs, inputs / group]`.
struct PlainWeights {
  Format format;
  int num_matrices;
  int num_outputs;
  int num_inputs;
  int group;
  int bits;                // of an integer: up to 4 are kept as 4, more as 8
  InputType input_type;   // as in Panels
  const void* weights;
  const float* scales;
  const float* biases;
  const uint8_t* exponents;  // in place of scales and biases, of MXFP4
};

class PackedWeights {
 public:
  PackedWeights(const PlainWeights& plain, int columns);
  ~PackedWeights();
  PackedWeights(const PackedWeights&) = delete;
  PackedWeights& operator=(const PackedWeights&) = delete;

  /// Bytes of all packed weights of this process.
  static size_t all_bytes();

  int num_matrices() const { return num_matrices_; }
  Panels panels(int matrix = 0) const;
  /// Dequantize the weights of one output of the first matrix, `[num_inputs]`.
  void unpack(int output, float* row) const;

  size_t num_bytes() const { return memory_.size(); }

 private:
  size_t matrix_bytes() const { return panels_.panel_bytes() * panels_.num_panels(); }
  float quantized(const uint8_t* panel, size_t input, size_t column) const;

  int num_matrices_;
  Panels panels_;
  Memory memory_;
};

using Weights = std::shared_ptr<const PackedWeights>;

}  // namespace native

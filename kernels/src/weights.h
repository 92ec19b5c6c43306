// Weights of a linear layer, packed for the kernels.
#pragma once

#include <memory>
#include <vector>

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

using Shifts = std::shared_ptr<const std::vector<uint8_t>>;

class PackedWeights {
 public:
  PackedWeights(const PlainWeights& plain, int columns);
  /// What others were packed to, read from a file.  Throws std::system_error.
  PackedWeights(const Panels& layout, int num_matrices, FilePart part);
  ~PackedWeights();
  PackedWeights(const PackedWeights&) = delete;
  PackedWeights& operator=(const PackedWeights&) = delete;

  /// Whether inputs can be scaled by channel.
  bool can_scale_inputs() const;
  /// Round inputs to 8 bits, scaled by channel; see Panels::shifts.  Not while anything computes with
  /// these weights.  Layers of one input are to share the shifts.
  /// Throws std::invalid_argument.
  void scale_inputs(Shifts shifts);

  /// Whether these weights can be multiplied in bfloat16.
  bool can_use_bfloat16() const;
  /// Round inputs and dequantized weights to bfloat16.  Not while anything computes with these weights;
  /// for all layers of one input, with the least of their exponents, or for none.
  /// Throws std::invalid_argument.
  void use_bfloat16(int exponent);

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
  Shifts shifts_;
  Memory memory_;
};

using Weights = std::shared_ptr<const PackedWeights>;

}  // namespace native

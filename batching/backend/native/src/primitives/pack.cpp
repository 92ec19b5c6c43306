// Packs weights for the kernels.
#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

/// An evaluated, contiguous array.
mx::array evaluated(const mx::array& x, mx::Dtype dtype) {
  mx::array rows = mx::contiguous(mx::astype(x, dtype, stream()), false, stream());
  rows.eval();
  return rows;
}

InputType input_type_of(int bits) {
  if (bits == 32) return InputType::kFloat32;
  require(bits == 16 || bits == 8, "inputs have 8, 16 or 32 bits");
  require(kernels()->max_tile_rows_int > 0, "this processor has no integer dot products");
  return bits == 16 ? InputType::kInt16 : InputType::kInt8;
}

}  // namespace

Weights pack(const mx::array& weight, const std::optional<mx::array>& scales,
             const std::optional<mx::array>& biases, int bits, int input_bits) {
  require(weight.ndim() == 2, "weights are a matrix");
  const int columns = kernels()->columns;
  const int num_outputs = weight.shape(0);
  if (!scales) {
    const bool is_bf16 = weight.dtype() == mx::bfloat16;
    const mx::array rows = evaluated(weight, is_bf16 ? mx::bfloat16 : mx::float32);
    const Format format = is_bf16 ? Format::kBfloat16 : Format::kFloat32;
    return std::make_shared<PackedWeights>(
        PlainWeights{format, num_outputs, weight.shape(1), 0, InputType::kFloat32,
                     rows.data<uint8_t>(), nullptr, nullptr},
        columns);
  }
  const InputType input_type = input_type_of(input_bits);
  require(bits == 4 || bits == 8, "quantized weights have 4 or 8 bits");
  require(biases.has_value() && weight.dtype() == mx::uint32, "quantized weights are affine");
  const int num_inputs = weight.shape(1) * 32 / bits;
  const int group = num_inputs / scales->shape(1);
  require(group == 32 || group == 64 || group == 128, "a group has 32, 64 or 128 weights");
  const mx::array rows = evaluated(weight, mx::uint32);
  const mx::array scale_rows = evaluated(*scales, mx::float32);
  const mx::array bias_rows = evaluated(*biases, mx::float32);
  return std::make_shared<PackedWeights>(
      PlainWeights{bits == 4 ? Format::kBits4 : Format::kBits8, num_outputs, num_inputs, group,
                   input_type, rows.data<uint8_t>(), scale_rows.data<float>(),
                   bias_rows.data<float>()},
      columns);
}

}  // namespace native::graph

// Packs weights for the kernels.
#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"

namespace native::graph {

namespace {

InputType input_type_of(int bits) {
  if (bits == 32) return InputType::kFloat32;
  require(bits == 16, "inputs have 16 or 32 bits");
  require(kernels()->min_input_bits <= 16, "this processor has no products of integers");
  return InputType::kInt16;
}

}  // namespace

Weights pack(const mx::array& weight, const std::optional<mx::array>& scales,
             const std::optional<mx::array>& biases, int bits, int input_bits) {
  require(weight.ndim() == 2 || weight.ndim() == 3, "weights are a matrix, or several");
  PlainWeights plain{.format = Format::kFloat32,
                     .num_matrices = weight.ndim() == 3 ? weight.shape(0) : 1,
                     .num_outputs = weight.shape(-2),
                     .num_inputs = weight.shape(-1),
                     .group = 0,
                     .bits = bits,
                     .input_type = InputType::kFloat32,
                     .weights = nullptr,
                     .scales = nullptr,
                     .biases = nullptr,
                     .exponents = nullptr};
  const int columns = kernels()->columns;
  if (!scales) {
    const bool is_bf16 = weight.dtype() == mx::bfloat16;
    const mx::array rows = evaluated(weight, is_bf16 ? mx::bfloat16 : mx::float32);
    plain.format = is_bf16 ? Format::kBfloat16 : Format::kFloat32;
    plain.weights = rows.data<uint8_t>();
    return std::make_shared<PackedWeights>(plain, columns);
  }
  require(weight.dtype() == mx::uint32, "quantized weights are packed in words");
  require(1 <= bits && bits <= 8, "quantized weights have 1 to 8 bits");
  plain.input_type = input_type_of(input_bits);
  plain.num_inputs = static_cast<int>(int64_t{weight.shape(-1)} * 32 / bits);
  plain.group = plain.num_inputs / scales->shape(-1);
  require(plain.group == 16 || plain.group == 32 || plain.group == 64 || plain.group == 128,
          "a group has 16, 32, 64 or 128 weights");
  require(plain.group != 16 || plain.num_inputs % 32 == 0, "inputs are rounded in groups of 32");
  const mx::array rows = evaluated(weight, mx::uint32);
  plain.weights = rows.data<uint8_t>();
  if (!biases) {
    require(bits == 4 && plain.group == 32 && scales->dtype() == mx::uint8,
            "weights without biases are of MXFP4");
    const mx::array exponents = evaluated(*scales, mx::uint8);
    plain.format = Format::kMxfp4;
    plain.exponents = exponents.data<uint8_t>();
    return std::make_shared<PackedWeights>(plain, columns);
  }
  const mx::array scale_rows = evaluated(*scales, mx::float32);
  const mx::array bias_rows = evaluated(*biases, mx::float32);
  plain.format = bits <= 4 ? Format::kBits4 : Format::kBits8;
  plain.scales = scale_rows.data<float>();
  plain.biases = bias_rows.data<float>();
  return std::make_shared<PackedWeights>(plain, columns);
}

}  // namespace native::graph

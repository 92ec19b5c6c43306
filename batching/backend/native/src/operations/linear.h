// Products with packed weights, by all threads.
#pragma once

#include <vector>

#include "kernels.h"
#include "operations/parallel.h"
#include "weights.h"

namespace native {

/// Packs the input of products, in memory of the calling thread that its next product overwrites.
class InputPacker {
 public:
  explicit InputPacker(const LinearArgs& product);

  const PackedInputs& packed() const { return packed_; }
  int rows_per_part() const;
  /// Pack rows [first, next), in any thread.
  void pack(int first, int next) const;

 private:
  const float* x_;
  InputType input_type_;
  size_t size_;
  int group_;
  Tiles tiles_;
  float *floats_ = nullptr, *scales_ = nullptr, *sums_ = nullptr;
  uint8_t* integers_ = nullptr;
  PackedInputs packed_;
};

/// Pack the input that some products share; `prepare(first, next)` computes its rows before.
template <typename Prepare>
void pack_input(std::vector<LinearArgs>& products, const Prepare& prepare) {
  const InputPacker packer(products[0]);
  for_rows(products[0].num_rows, packer.rows_per_part(), [&](int first, int next) {
    prepare(first, next);
    packer.pack(first, next);
  });
  for (LinearArgs& product : products) product.packed = packer.packed();
}

/// Compute several products of one packed input.
void multiply_packed(const std::vector<LinearArgs>& products);

/// Compute several products of one input, whose rows `prepare(first, next)` computes before.
template <typename Prepare>
void multiply(std::vector<LinearArgs> products, const Prepare& prepare) {
  pack_input(products, prepare);
  multiply_packed(products);
}

/// Compute several products of one input.
void multiply(std::vector<LinearArgs> products);

/// The largest output of each row and its index: the first of equal ones; NaN if any output is NaN.
/// `y` of the product is not used.
void arg_max(const LinearArgs& product, uint32_t* indices, float* values);

/// Dequantize the weights of each token, `[num_rows, num_inputs]`.
void embed(const PackedWeights& weights, const int32_t* tokens, int num_rows, float* y);

}  // namespace native

// Products with packed weights, by all threads.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "operations/low_rank.h"
#include "operations/parallel.h"
#include "weights.h"

namespace native {

/// Rows that are packed together: all of one product.
struct RowRange {
  int first;
  int num_rows;
};

/// Packs the inputs of products, in memory of the calling thread that its next products overwrite.
class InputPacker {
 public:
  /// For `num_rows` rows of products with weights like these; `has_halves`: others have groups of
  /// HALF_GROUP.
  InputPacker(const Panels& weights, int num_rows, bool has_halves = false);

  int rows_per_part() const;
  /// What the product of these rows reads.
  PackedInputs packed(const RowRange& rows) const;
  /// Pack the inputs of row `row` of all, in any thread; `rows` are those of its product.
  void pack(const float* x, const RowRange& rows, int row) const;

 private:
  Panels weights_;
  int num_rows_;
  PackedInputs all_ = {};
  float input_factor_ = 1;  // of bfloat16
};

/// Pack the input that some products share; `prepare(first, next)` computes its rows before.
template <typename Prepare>
void pack_input(std::vector<LinearArgs>& products, const Prepare& prepare) {
  const LinearArgs& any = products[0];
  const bool has_halves = std::any_of(products.begin(), products.end(), [](const LinearArgs& p) {
    return p.weights.has_halves();
  });
  const InputPacker packer(any.weights, any.num_rows, has_halves);
  const RowRange all{0, any.num_rows};
  for_rows(any.num_rows, packer.rows_per_part(), [&](int first, int next) {
    prepare(first, next);
    for (int row = first; row < next; row++)
      packer.pack(any.x + static_cast<size_t>(row) * any.weights.num_inputs, all, row);
  });
  const PackedInputs packed = packer.packed(all);
  for (LinearArgs& product : products) product.packed = packed;
}

/// Compute several products of packed inputs.
void multiply_packed(const std::vector<LinearArgs>& products);

/// Compute several products of one input, whose rows `prepare(first, next)` computes before, and what
/// adapters add to them, if there are any.
template <typename Prepare>
void multiply(std::vector<LinearArgs> products, const AdaptedRows* adapted,
              const Prepare& prepare) {
  pack_input(products, prepare);
  const Deltas deltas(adapted, products);
  multiply_packed(products);
}

/// Compute several products of one input.
void multiply(std::vector<LinearArgs> products, const AdaptedRows* adapted = nullptr);

/// The largest output of each row and its index: the first of equal ones; NaN if any output is NaN.
/// `y` of the product is not used.
void arg_max(const LinearArgs& product, uint32_t* indices, float* values);

/// Dequantize the weights of each token, `[num_rows, num_inputs]`.
void embed(const PackedWeights& weights, const int32_t* tokens, int num_rows, float* y);

}  // namespace native

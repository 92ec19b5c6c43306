// Products with packed weights, by all threads.
#pragma once

#include <vector>

#include "kernels.h"
#include "operations/parallel.h"
#include "weights.h"

namespace native {

/// Arranges the input of products, in memory of the calling thread that its next product uses
/// again.
class InputPacker {
 public:
  explicit InputPacker(const LinearArgs& product);

  const Arranged& arranged() const { return arranged_; }
  int rows_per_part() const;
  /// Arrange rows [first, next), in any thread.
  void pack(int first, int next) const;

 private:
  const float* x_;
  Inputs inputs_;
  size_t size_;
  int group_;
  Tiles tiles_;
  float *floats_ = nullptr, *scales_ = nullptr, *sums_ = nullptr;
  uint8_t* integers_ = nullptr;
  Arranged arranged_;
};

/// Arrange the input of some products, which they share; `prepare(first, next)` computes its rows
/// before.
template <typename Prepare>
void arrange_input(std::vector<LinearArgs>& products, const Prepare& prepare) {
  const InputPacker packer(products[0]);
  for_rows(products[0].num_rows, packer.rows_per_part(), [&](int first, int next) {
    prepare(first, next);
    packer.pack(first, next);
  });
  for (LinearArgs& product : products) product.arranged = packer.arranged();
}

/// Several products of one input that is arranged.
void multiply_arranged(const std::vector<LinearArgs>& products);

/// Several products of one input, whose rows [first, next) `prepare(first, next)` computes.
template <typename Prepare>
void multiply(std::vector<LinearArgs> products, const Prepare& prepare) {
  arrange_input(products, prepare);
  multiply_arranged(products);
}

/// Several products of one input that is there.
void multiply(std::vector<LinearArgs> products);

/// The highest output of each row, and which it is: the first of equal ones; not a number where an
/// output is none.  `y` of the product is not used.
void arg_max(const LinearArgs& product, uint32_t* indices, float* values);

void embed(const PackedWeights& weights, const int32_t* tokens, int num_rows, float* y);

}  // namespace native

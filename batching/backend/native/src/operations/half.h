// What the halves of a block have in common: their first and their last products.
#pragma once

#include <vector>

#include "operations/block.h"
#include "operations/buffers.h"
#include "operations/linear.h"
#include "operations/parallel.h"

namespace native {

inline const float* data_or_null(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}

inline LinearArgs product(const Layer& layer, const float* residual, const float* x, int num_rows,
                          float* y) {
  return {layer.weights->panels(), data_or_null(layer.bias), residual, x, y, num_rows};
}

/// Compute the products of norm(x), with `normed` as space for it; their outputs follow each other.
void multiply_normed(const std::vector<Layer>& layers, const Norm& norm, const float* x,
                     int num_rows, float* normed, float* y);

/// Compute the output from its layer's input, whose rows `prepare` computes before.
template <typename Prepare>
void multiply_output(const Output& output, const float* x, const float* input, int num_rows,
                     float* y, const Prepare& prepare) {
  const Ending& ending = output.ending;
  const float* residual = ending.is_sum() ? x : nullptr;
  multiply({product(output.layer, residual, input, num_rows, y)}, prepare);
  if (residual || ending.is_nothing()) return;
  for_rows(num_rows, rows_per_part(num_rows), [&](int first, int next) {
    ending.finish(x, first, next, output.layer.num_outputs(), y);
  });
}

}  // namespace native

// What the halves of a block have in common: layers, norms, and what becomes of the last product.
#pragma once

#include <vector>

#include "operations/buffers.h"
#include "operations/linear.h"
#include "operations/parallel.h"
#include "operations/pointwise.h"
#include "weights.h"

namespace native {

struct Layer {
  Weights weights;
  std::vector<float> bias;  // empty is none

  int num_outputs() const { return weights->panels().num_outputs; }
  int num_inputs() const { return weights->panels().num_inputs; }
};

/// RMSNorm, or LayerNorm; without weights it is none.
struct Norm {
  std::vector<float> weight;
  float eps = 0;
  bool is_centered = false;  // LayerNorm (Ba et al. 2016): less the mean
  std::vector<float> bias = {};

  int size() const { return static_cast<int>(weight.size()); }
};

/// What becomes of a half's result r: x + residual * norm(r), without x if `residual` is 0.
struct Ending {
  Norm norm;
  float residual;

  /// Whether it is x + r.
  bool is_sum() const { return !norm.size() && residual == 1; }
  bool is_nothing() const { return !norm.size() && residual == 0; }
  /// Rows [first, next) in the place of r.
  void finish(const float* x, int first, int next, int size, float* r) const;
};

/// The last product of a half.
struct Output {
  Layer layer;
  Ending ending;
};

/// The data, or null if there is none.
const float* data_or_null(const std::vector<float>& values);

/// Rows [first, next), in the calling thread; `y` may be `x`.
void norm_rows(const Norm& norm, const float* x, int first, int next, float* y);

/// Multiply rows [first, next) by a factor each, in the calling thread.
void scale_rows(const float* factors, int first, int next, size_t size, float* y);

LinearArgs product(const Layer& layer, const float* residual, const float* x, int num_rows,
                   float* y);

/// Compute the products of norm(x), with `normed` as space for it; their outputs follow each other.
void multiply_normed(const std::vector<Layer>& layers, const Norm& norm, const float* x,
                     int num_rows, const AdaptedRows* adapted, float* normed, float* y);

/// Compute the output from its layer's input, whose rows `prepare` computes before.
template <typename Prepare>
void multiply_output(const Output& output, const float* x, const float* input, int num_rows,
                     const AdaptedRows* adapted, float* y, const Prepare& prepare) {
  const Ending& ending = output.ending;
  const float* residual = ending.is_sum() ? x : nullptr;
  multiply({product(output.layer, residual, input, num_rows, y)}, adapted, prepare);
  if (residual || ending.is_nothing()) return;
  for_rows(num_rows, rows_per_part(num_rows), [&](int first, int next) {
    ending.finish(x, first, next, output.layer.num_outputs(), y);
  });
}

}  // namespace native

#include "operations/half.h"

#include <utility>

namespace native {

const float* data_or_null(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}

void Ending::finish(const float* x, int first, int next, int size, float* r) const {
  if (norm.size()) norm_rows(norm, r, first, next, r);
  if (residual == 0) return;
  const size_t end = static_cast<size_t>(next) * size;
  for (size_t i = static_cast<size_t>(first) * size; i < end; i++) r[i] = x[i] + residual * r[i];
}

void norm_rows(const Norm& norm, const float* x, int first, int next, float* y) {
  const int size = norm.size();
  if (norm.is_centered)
    layer_norm_rows(x, norm.weight.data(), data_or_null(norm.bias), norm.eps, first, next, size, y);
  else
    norm_rows(x, norm.weight.data(), norm.eps, first, next, size, y);
}

void scale_rows(const float* factors, int first, int next, size_t size, float* y) {
  for (int m = first; m < next; m++)
    for (size_t i = m * size; i < (m + 1) * size; i++) y[i] *= factors[m];
}

LinearArgs product(const Layer& layer, const float* residual, const float* x, int num_rows,
                   float* y) {
  return {layer.weights->panels(), data_or_null(layer.bias), residual, x, y, num_rows};
}

void multiply_normed(const std::vector<Layer>& layers, const Norm& norm, const float* x,
                     int num_rows, const AdaptedRows* adapted, float* normed, float* y) {
  bool is_normed = !norm.size();
  const float* input = norm.size() ? normed : x;
  for (size_t i = 0; i < layers.size();) {
    std::vector<LinearArgs> products;
    const Panels panels = layers[i].weights->panels();
    for (; i < layers.size() && are_packed_alike(panels, layers[i].weights->panels()); i++) {
      products.push_back(product(layers[i], nullptr, input, num_rows, y));
      y += static_cast<size_t>(num_rows) * layers[i].num_outputs();
    }
    multiply(std::move(products), adapted, [&](int first, int next) {
      if (!is_normed) norm_rows(norm, x, first, next, normed);
    });
    is_normed = true;
  }
}

}  // namespace native

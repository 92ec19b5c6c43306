#include "operations/half.h"

#include <utility>

namespace native {

namespace {

/// Whether two layers take the same packed inputs.
bool are_packed_alike(const Layer& a, const Layer& b) {
  const Panels p = a.weights->panels(), q = b.weights->panels();
  return p.group == q.group && p.input_type == q.input_type;
}

}  // namespace

void multiply_normed(const std::vector<Layer>& layers, const Norm& norm, const float* x,
                     int num_rows, float* normed, float* y) {
  const int size = layers[0].num_inputs();
  bool is_normed = !norm.size();
  const float* input = norm.size() ? normed : x;
  for (size_t i = 0; i < layers.size();) {
    std::vector<LinearArgs> products;
    const Layer& first = layers[i];
    for (; i < layers.size() && are_packed_alike(first, layers[i]); i++) {
      products.push_back(product(layers[i], nullptr, input, num_rows, y));
      y += static_cast<size_t>(num_rows) * layers[i].num_outputs();
    }
    multiply(std::move(products), [&](int first, int next) {
      if (!is_normed) norm_rows(x, norm.weight.data(), norm.eps, first, next, size, normed);
    });
    is_normed = true;
  }
}

}  // namespace native

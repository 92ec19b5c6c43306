#include "primitives/adapters.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "primitives/cpu_primitive.h"

namespace native::graph {

namespace {

thread_local std::shared_ptr<const AdaptedRows> current;

std::string shape_of(const mx::array& x) {
  std::string text;
  for (int size : x.shape()) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text + "]";
}

void check_shapes(size_t index, const LayerChange& layer) {
  const auto& [weights, a, b] = layer;
  const Panels panels = weights->panels();
  if (a.ndim() == 2 && b.ndim() == 2 && a.shape(0) == panels.num_inputs &&
      b.shape(1) == panels.num_outputs && a.shape(1) == b.shape(0))
    return;
  throw std::invalid_argument("layer " + std::to_string(index) + ": a " + shape_of(a) + " and b " +
                              shape_of(b) + " are not [" + std::to_string(panels.num_inputs) +
                              ", rank] and [rank, " + std::to_string(panels.num_outputs) + "]");
}

/// Those of this thread, if `has_change` says so of them.
template <typename HasChange>
std::shared_ptr<const AdaptedRows> current_if(const mx::array& x, const HasChange& has_change) {
  if (!current || !has_change(*current)) return nullptr;
  const int64_t num_rows = static_cast<int64_t>(x.size()) / x.shape(-1);
  if (num_rows < 1 || num_rows % current->num_rows() != 0)
    throw std::invalid_argument("an input of " + std::to_string(num_rows) +
                                " rows has not as many for each of the " +
                                std::to_string(current->num_rows()) + " rows with adapters");
  return current;
}

}  // namespace

std::shared_ptr<Adapter> adapter(const std::vector<LayerChange>& layers) {
  std::vector<mx::array> arrays;
  std::vector<WeightChange> changes;
  for (const LayerChange& layer : layers) {
    check_shapes(changes.size(), layer);
    const auto& [weights, a, b] = layer;
    const bool is_bf16 = a.dtype() == mx::bfloat16 && b.dtype() == mx::bfloat16;
    const mx::Dtype dtype = is_bf16 ? mx::bfloat16 : mx::float32;
    arrays.push_back(evaluated(a, dtype));
    const void* a_data = arrays.back().data<uint8_t>();
    arrays.push_back(evaluated(b, dtype));
    changes.push_back({weights, a.shape(1), is_bf16, a_data, arrays.back().data<uint8_t>()});
  }
  return std::make_shared<Adapter>(changes);
}

std::shared_ptr<const AdaptedRows> use_adapters(std::shared_ptr<const AdaptedRows> rows) {
  return std::exchange(current, std::move(rows));
}

std::shared_ptr<const AdaptedRows> adapted_rows(const mx::array& x,
                                                const std::vector<Weights>& weights) {
  return current_if(x, [&](const AdaptedRows& rows) {
    return std::any_of(weights.begin(), weights.end(),
                       [&](const Weights& each) { return rows.change(each->panels()); });
  });
}

std::shared_ptr<const AdaptedRows> adapted_rows(
    const mx::array& x, std::initializer_list<std::span<const Layer>> layers) {
  return current_if(x, [&](const AdaptedRows& rows) {
    for (const std::span<const Layer> some : layers)
      for (const Layer& layer : some)
        if (rows.change(layer.weights->panels())) return true;
    return false;
  });
}

}  // namespace native::graph

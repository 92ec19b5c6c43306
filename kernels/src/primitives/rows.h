// The rows that attention takes as an operation of the graph, with what belongs to each of them.
#pragma once

#include <optional>
#include <vector>

#include "operations/pointwise.h"
#include "primitives/cpu_primitive.h"

namespace native::graph {

/// x, then angles and factors of queries, as far as there are any.
struct RowInputs {
  std::vector<mx::array> arrays;
  bool has_angles;
  bool has_factors;
};

inline RowInputs row_inputs(const mx::array& x, const std::optional<mx::array>& cosines,
                            const std::optional<mx::array>& sines,
                            const std::optional<mx::array>& query_factors, int max_dims) {
  require(!cosines == !sines, "cosines and sines, or none");
  RowInputs inputs{{as_floats(x)}, cosines.has_value(), query_factors.has_value()};
  if (cosines) {
    require(cosines->shape() == sines->shape() && cosines->ndim() == 2,
            "angles are [rows, dims / 2]");
    require(cosines->shape(0) == x.shape(0) && 2 * cosines->shape(1) <= max_dims,
            "angles fit to the heads");
    inputs.arrays.push_back(as_floats(*cosines));
    inputs.arrays.push_back(as_floats(*sines));
  }
  if (query_factors) {
    require(query_factors->shape() == mx::Shape{x.shape(0)}, "a factor for each row");
    inputs.arrays.push_back(as_floats(*query_factors));
  }
  return inputs;
}

/// An operation on such rows.
class RowPrimitive : public CpuPrimitive {
 public:
  RowPrimitive(const RowInputs& inputs, bool traditional)
      : has_angles_(inputs.has_angles), has_factors_(inputs.has_factors),
        traditional_(traditional) {}

 protected:
  Rotation rotation(const std::vector<mx::array>& inputs) {
    if (!has_angles_) return {nullptr, nullptr, 0, traditional_};
    return {contiguous(inputs[1]), contiguous(inputs[2]), inputs[1].shape(1), traditional_};
  }
  const float* query_factors(const std::vector<mx::array>& inputs) {
    return has_factors_ ? contiguous(inputs.back()) : nullptr;
  }

 private:
  bool has_angles_;
  bool has_factors_;
  bool traditional_;
};

}  // namespace native::graph

// The adapters of the rows that operations are built for.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "mlx/array.h"
#include "operations/half.h"
#include "operations/low_rank.h"

namespace native::graph {

namespace mx = mlx::core;

/// Weights, A `[inputs, rank]` and B `[rank, outputs]`.
using LayerChange = std::tuple<Weights, mx::array, mx::array>;

/// Throws std::invalid_argument if shapes do not fit.
std::shared_ptr<Adapter> adapter(const std::vector<LayerChange>& layers);

/// Let operations that the calling thread builds from now on have these adapters, or none; return those
/// before.
std::shared_ptr<const AdaptedRows> use_adapters(std::shared_ptr<const AdaptedRows> rows);

/// The adapters of this thread, or null if they change none of the weights.  Throws
/// std::invalid_argument if x has not as many rows, one or more, for each of theirs.
std::shared_ptr<const AdaptedRows> adapted_rows(const mx::array& x,
                                                const std::vector<Weights>& weights);
std::shared_ptr<const AdaptedRows> adapted_rows(
    const mx::array& x, std::initializer_list<std::span<const Layer>> layers);

inline std::span<const Layer> only(const Layer& layer) { return {&layer, 1}; }

}  // namespace native::graph

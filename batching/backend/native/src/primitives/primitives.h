// The kernels as operations of MLX's graph, on the CPU stream.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "operations/block.h"
#include "pool.h"
#include "weights.h"

namespace native::graph {

namespace mx = mlx::core;

/// Pack `[outputs, inputs]`; with scales and biases `[outputs, inputs / group]`, 4 or 8 bits each,
/// which if `rounds` mean what they do in float16; with `input_bits` 8 or 16 what they are
/// multiplied with is rounded instead, 32 is not at all.
Weights pack(const mx::array& weight, const std::optional<mx::array>& scales,
             const std::optional<mx::array>& biases, int bits, bool rounds, int input_bits);

/// x W^T + b of several layers at once, for x `[..., inputs]`, float32.
std::vector<mx::array> linear(const mx::array& x, const std::vector<Weights>& weights,
                              const std::vector<std::optional<mx::array>>& biases);

/// The index of the highest number of each row of logits `[rows, size]`, uint32, and that number,
/// not a number where one of the row is none.  Logits that are a product which nobody has computed
/// so far are compared as they are computed, and not written.
std::pair<mx::array, mx::array> arg_max(const mx::array& logits);

/// Rows of the weights, one for each token.
mx::array embed(const mx::array& tokens, Weights weights);

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps);

mx::array swiglu(const mx::array& gate, const mx::array& up);

/// Rotate the first dims of x `[rows, heads, 1, dim]` by angles `[rows, dims / 2]`.
mx::array rope(const mx::array& x, const mx::array& cosines, const mx::array& sines,
               bool traditional);

/// Write keys and values `[rows, heads, 1, dim]` into the pool, then attend queries
/// `[rows, query heads, 1, dim]`; rows beyond those of the step are padding and give zeros.
mx::array attend(const mx::array& q, const mx::array& k, const mx::array& v,
                 std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, float scale,
                 int window, float soft_cap, const std::optional<mx::array>& sinks);

/// A whole transformer block, for x `[rows, 1, size]`; angles as for `rope`.
mx::array transform(const mx::array& x, const mx::array& cosines, const mx::array& sines,
                    bool traditional, std::shared_ptr<const Block> block,
                    std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, int window);

}  // namespace native::graph

// The kernels as operations of the MLX graph, on the CPU stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "operations/block.h"
#include "operations/experts.h"
#include "operations/latent.h"
#include "operations/mixer.h"
#include "operations/mixture.h"
#include "operations/sampling.h"
#include "pool.h"
#include "weights.h"

namespace native::graph {

namespace mx = mlx::core;

/// Pack weights `[outputs, inputs]`, or `[matrices, outputs, inputs]`, quantized to up to 8 bits if
/// there are scales and biases `[.., outputs, inputs / group]`, to MXFP4 if only scales.  With `input_bits` of 8 or 16 the inputs of quantized weights are
/// rounded to integers; 32 rounds nothing.
Weights pack(const mx::array& weight, const std::optional<mx::array>& scales,
             const std::optional<mx::array>& biases, int bits, int input_bits);

/// x W^T + b of several layers with the same input `[..., inputs]`, float32.
std::vector<mx::array> linear(const mx::array& x, const std::vector<Weights>& weights,
                              const std::vector<std::optional<mx::array>>& biases);

/// With a bias `[experts, outputs]`, or none.
ExpertLayer expert_layer(Weights weights, const std::optional<mx::array>& bias);

/// A limit above 0 is that of gpt-oss's SwiGLU.
std::shared_ptr<const Experts> gated_experts(const ExpertLayer& gate, const ExpertLayer& up,
                                             const ExpertLayer& down, float alpha, float limit);

/// x W^T + b of the expert of each index: x `[..., inputs]` with as many of the indices for each of
/// its rows; `[*indices, outputs]`.
mx::array switch_linear(const mx::array& x, const mx::array& indices, const ExpertLayer& layer);

/// down(activation(gate(x), up(x))) of the expert of each index, `[*indices, outputs]`.
mx::array experts(const mx::array& x, const mx::array& indices,
                  std::shared_ptr<const Experts> gated);

/// The index, uint32, and value of the largest of each row of logits `[rows, size]`; NaN if one of
/// the row is NaN.  Logits that are an unevaluated `linear` are compared as they are computed, and
/// not written.
std::pair<mx::array, mx::array> arg_max(const mx::array& logits);

/// A token, uint32, for each row of logits `[rows, size]`, sampled as its entries say.  `before` are the
/// tokens of the step before, if edits expect some of them: ids within the row, not checked.
mx::array sample(const mx::array& logits, std::vector<RowSampling> rows,
                 std::vector<LogitEdits> edits, const std::optional<mx::array>& before);

/// The row of the weights of each token.
mx::array embed(const mx::array& tokens, Weights weights);

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps);

mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& weight,
                     const std::optional<mx::array>& bias, float eps);

mx::array swiglu(const mx::array& gate, const mx::array& up);

mx::array silu(const mx::array& x);

/// GELU in its tanh form.
mx::array gelu(const mx::array& x);

/// The radians by which pairs turn from a position to the next, and a factor for what is rotated.
struct Frequencies {
  std::vector<double> radians;
  double factor;
};

/// Cosines and sines `[rows, dims / 2]` for the position of each row; at once if they are known.
std::pair<mx::array, mx::array> angles(const mx::array& positions, const Frequencies& frequencies);

/// Rotate the first dims of x `[rows, heads, 1, dim]` by angles `[rows, dims / 2]`.
mx::array rope(const mx::array& x, const mx::array& cosines, const mx::array& sines,
               bool traditional);

/// The outputs and the new state of a recurrence; see DeltaArgs for the shapes.  No state is all zero.
std::pair<mx::array, mx::array> delta_rule(const mx::array& q, const mx::array& k,
                                           const mx::array& v, const mx::array& decay,
                                           const mx::array& beta,
                                           const std::optional<mx::array>& state,
                                           bool is_additive);

/// A causal convolution of each channel of x `[requests, tokens, channels]` with taps
/// `[taps, channels]`, for the tokens that have as many others before them.
mx::array convolve(const mx::array& x, const mx::array& taps,
                   const std::optional<mx::array>& bias);

/// Write keys and values `[rows, heads, 1, dim]` into the pool, then attend queries
/// `[rows, query heads, 1, dim]`.  Rows beyond those of the step are padding; their outputs are
/// zero.
mx::array attend(const mx::array& q, const mx::array& k, const mx::array& v,
                 std::shared_ptr<Pool> pool, std::shared_ptr<const Step> step, float scale,
                 int window, float soft_cap, const std::optional<mx::array>& sinks,
                 bool is_chunked);

/// The attention of a transformer block, for x `[rows, 1, size]`; angles as for `rope`, or none, and
/// a factor for the queries of each row, or none.
mx::array run_attention(const mx::array& x, const std::optional<mx::array>& cosines,
                        const std::optional<mx::array>& sines, bool traditional,
                        std::shared_ptr<const AttentionHalf> half, std::shared_ptr<Pool> pool,
                        std::shared_ptr<const Step> step, int window, bool is_chunked,
                        float soft_cap, const std::optional<mx::array>& query_factors);

/// Latent attention of a transformer block, likewise.
mx::array run_latent(const mx::array& x, const std::optional<mx::array>& cosines,
                     const std::optional<mx::array>& sines, bool traditional,
                     std::shared_ptr<const LatentHalf> half, std::shared_ptr<Pool> pool,
                     std::shared_ptr<const Step> step, int window,
                     const std::optional<mx::array>& query_factors);

/// The MLP of a transformer block, for x `[..., size]`, added to `residual`; none is x.
mx::array run_mlp(const mx::array& x, std::shared_ptr<const MlpHalf> half,
                  const std::optional<mx::array>& residual);

/// Throw std::invalid_argument if parts do not fit to each other.
void check_router(const Router& router);
void check_mixture(const MixtureHalf& half);

/// The mixture of experts of a transformer block, for x `[..., size]`.
mx::array run_mixture(const mx::array& x, std::shared_ptr<const MixtureHalf> half);

/// A recurrent mixer, for x `[rows, 1, size]`; the states of the step are in the pool afterwards.
mx::array run_mixer(const mx::array& x, std::shared_ptr<const Mixer> mixer,
                    std::shared_ptr<StatePool> pool, std::shared_ptr<const StateStep> step);

/// Given the addresses of its inputs and its outputs, in a thread of MLX.
using HostKernel = std::function<void(const std::vector<uintptr_t>& inputs, const std::vector<uintptr_t>& outputs)>;

/// A kernel as a lazy operation, with what holds for those of a GPU: inputs are contiguous, those that are so already
/// are given as they are, so that it can write to them in place, and MLX knows nothing of that.
std::vector<mx::array> host_kernel(HostKernel kernel, const std::vector<mx::array>& inputs,
                                   const std::vector<std::vector<int>>& shapes,
                                   const std::vector<mx::Dtype>& dtypes);

}  // namespace native::graph

// Attention of a transformer block whose keys and values are products of a latent (MLA, DeepSeek-V2
// 2024), as one operation.
#pragma once

#include <vector>

#include "operations/attention.h"
#include "operations/half.h"

namespace native {

/// Latent attention, after a norm of its input.  A head's query has a plain part, and one that is
/// rotated; all heads share the rotated key.
///
/// With a matrix for each head, queries become those of latents, the pool keeps latents, and what is
/// attended to becomes the values of heads.  Otherwise `expand` makes keys and values of latents,
/// head by head, and the pool keeps these.
struct LatentHalf {
  std::vector<Layer> inputs;  // of x: that of q, and that of the latent and the rotated key
  std::vector<Layer> q;       // of what the first one gives, or none
  Norm norm, q_norm, latent_norm;
  Weights embed, unembed;
  std::vector<Layer> expand;
  Output output;
  int num_heads;
  float scale;

  int size() const { return inputs[0].num_inputs(); }
  int latent_dim() const { return latent_norm.size(); }
  int rotated_dim() const { return inputs[1].num_outputs() - latent_dim(); }
  int query_dim() const { return (q.empty() ? inputs[0] : q[0]).num_outputs() / num_heads; }
  int plain_dim() const { return query_dim() - rotated_dim(); }
  int value_dim() const { return output.layer.num_inputs() / num_heads; }
  bool is_expanded() const { return !expand.empty(); }
};

/// y `[matrices, num_rows, outputs]` of x `[num_rows, matrices, stride]`, whose first numbers are
/// multiplied with the matrix of their head.
void multiply_heads(const PackedWeights& weights, const float* x, int stride, int num_rows,
                    float* y);

/// Rows `[num_rows, size]` in and out.  A row's queries are multiplied by its factor, if there are any.
void run_latent(const LatentHalf& half, Pool& pool, const Step& step, const Rotation& rotation,
                int window, const float* query_factors, const float* x, int num_rows, float* y,
                const AdaptedRows* adapted = nullptr);

}  // namespace native

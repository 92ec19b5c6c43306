// The recurrent half of a hybrid model's block, as one operation.
#pragma once

#include <vector>

#include "operations/block.h"
#include "states.h"

namespace native {

/// Where the numbers of a key head are among the outputs of a layer: those of head h are from
/// first + h * stride on.
struct HeadColumns {
  int layer;
  int first;
  int stride;
};

/// A gated delta net (Yang et al. 2024), after a norm of its input: q, k and v by a short convolution
/// with SiLU, q and k of unit length, the gated delta rule, a norm of each head that is gated by
/// silu(z).
///
/// A state is the last inputs of the convolution, `[num_taps - 1][channels]`, q, k and v of all heads one
/// after the other, and those of the delta rule, `[num_heads][value columns][key_dim][STATE_COLUMNS]`.
struct DeltaMixer {
  std::vector<Layer> layers;
  Norm norm;
  HeadColumns q, k, v, z, b, a;  // v and z: value_dim for each head; b and a: one
  int num_key_heads, num_heads;
  int key_dim, value_dim;
  std::vector<float> taps;     // [num_taps, channels]
  std::vector<float> decay;    // [num_heads]: a step decays by e^(-decay softplus(a + dt_bias))
  std::vector<float> dt_bias;  // [num_heads]
  float q_scale, k_scale;      // of RMSNorm, which makes vectors of length sqrt(key_dim)
  float eps;                   // of that
  Norm head_norm;              // of each head's output
  Output output;

  /// Throws std::invalid_argument if the parts do not fit together.
  void check() const;

  int size() const { return layers[0].num_inputs(); }
  int group() const { return num_heads / num_key_heads; }
  int num_channels() const { return 2 * num_key_heads * key_dim + num_heads * value_dim; }
  int num_taps() const { return static_cast<int>(taps.size()) / num_channels(); }
  int columns() const { return (value_dim + STATE_COLUMNS - 1) / STATE_COLUMNS; }
  size_t head_state_size() const {
    return static_cast<size_t>(columns()) * key_dim * STATE_COLUMNS;
  }
  /// Where the states of heads begin: vectors of them do not cross cache lines.
  size_t first_head_state() const {
    const size_t inputs = static_cast<size_t>(num_taps() - 1) * num_channels();
    return (inputs + STATE_COLUMNS - 1) / STATE_COLUMNS * STATE_COLUMNS;
  }
  size_t state_size() const { return first_head_state() + num_heads * head_state_size(); }
};

/// Rows `[step.num_rows, size]` in and out.
void run_delta_mixer(const DeltaMixer& mixer, const StatePool& pool, const StateStep& step,
                     const float* x, float* y);

}  // namespace native

// The recurrent half of a hybrid model's block, as one operation.
#pragma once

#include <cmath>
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

/// What a mixer's state of each head is.
enum class Recurrence {
  kNone,      // nothing: the convolution is the mixer
  kDelta,     // the gated delta rule (Yang et al. 2024), with q and k of unit length
  kAdditive,  // that of Mamba 2 (Dao and Gu 2024), the same without the correction
};

/// A mixer after a norm of its input: a short convolution, a recurrence, a gate, a product.
///
/// With a recurrence, q, k and v are convolved, with SiLU; Mamba 2 calls them C, B and x, a head's keys
/// a group.  What a head puts out is normalized and gated by silu(z).  With none (LFM2), v is multiplied by
/// b before it is convolved and by z afterwards.
///
/// A state is the last inputs of the convolution, `[num_taps - 1][channels]`, q, k and v of all heads one
/// after the other, and those of the recurrence, `[num_heads][value columns][key_dim][STATE_COLUMNS]`.
struct Mixer {
  std::vector<Layer> layers;
  Norm norm;
  Recurrence recurrence;
  // v and z: value_dim for each head; b and a: one, but b as many as v if there is no recurrence.
  HeadColumns q, k, v, z, b, a;
  int num_key_heads, num_heads;
  int key_dim, value_dim;         // key_dim: 0 without a recurrence
  std::vector<float> taps;        // [num_taps, channels]
  std::vector<float> tap_bias;    // [channels], or empty
  std::vector<float> decay;       // [num_heads]: a step decays by e^(-decay step)
  std::vector<float> dt_bias;     // [num_heads]: a step is softplus(a + dt_bias), within limits
  float min_step = 0, max_step = INFINITY;
  std::vector<float> skip;        // [num_heads]: what is added of v to the output; or empty
  float q_scale = 0, k_scale = 0;  // of RMSNorm, which makes vectors of length sqrt(key_dim)
  float eps = 0;                  // of that
  /// RMSNorm of `norm_width` outputs at a time.  It has weights for these, for all outputs, or none.
  Norm head_norm;
  int norm_width = 0;
  bool gates_first = false;       // outputs are gated before they are normalized
  Output output;

  /// Throws std::invalid_argument if the parts do not fit together.
  void check() const;

  int size() const { return layers[0].num_inputs(); }
  int group() const { return num_heads / num_key_heads; }
  int num_channels() const { return 2 * num_key_heads * key_dim + num_values(); }
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
  int num_values() const { return num_heads * value_dim; }
  size_t state_size() const { return first_head_state() + num_heads * head_state_size(); }
};

/// Rows `[step.num_rows, size]` in and out.
void run_mixer(const Mixer& mixer, const StatePool& pool, const StateStep& step, const float* x,
               float* y, const AdaptedRows* adapted = nullptr);

}  // namespace native

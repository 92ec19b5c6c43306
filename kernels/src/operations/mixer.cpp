#include "operations/mixer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kernels.h"
#include "memory.h"
#include "operations/half.h"
#include "operations/parallel.h"

namespace native {

namespace {

// What a thread convolves at a time of each row: less is a page or a line of memory for little.
constexpr int CHANNELS = 256;

/// The rows of one layer's outputs, and where they begin in a buffer of all layers.
struct Joined {
  std::vector<size_t> first;
  size_t size = 0;

  Joined(const std::vector<Layer>& layers, size_t num_rows) {
    for (const Layer& layer : layers) {
      first.push_back(size);
      size += num_rows * layer.num_outputs();
    }
  }
};

/// Channels of a head that are adjacent in the outputs and in the state.
struct Channels {
  const HeadColumns* from;
  int head;    // of keys
  int offset;  // from the first of the head's columns
  int first;   // of the state's
  int size;
};

class MixerRun {
 public:
  MixerRun(const Mixer& mixer, const StatePool& pool, const StateStep& step,
           const AdaptedRows* adapted)
      : mixer_(mixer), pool_(pool), step_(step), adapted_(adapted), rows_(step.num_rows),
        joined_(mixer.layers, rows_) {
    const size_t keys = rows_ * mixer.num_key_heads * mixer.key_dim;
    const size_t values = rows_ * mixer.num_values();
    thread_local std::vector<float> memory;
    assign(memory, {{&normed_, rows_ * mixer.size()}, {&outputs_, joined_.size}, {&q_, keys},
                    {&k_, keys}, {&v_, values}, {&decay_, rows_ * mixer.num_heads},
                    {&beta_, rows_ * mixer.num_heads}, {&y_, values}});
    q_weight_.assign(mixer.key_dim, mixer.q_scale);
    k_weight_.assign(mixer.key_dim, mixer.k_scale);
  }

  void compute(const float* x, float* y) {
    multiply_normed(mixer_.layers, mixer_.norm, x, static_cast<int>(rows_), adapted_, normed_,
                    outputs_);
    const bool has_states = mixer_.recurrence != Recurrence::kNone;
    // Keys of a head, or values of some.
    const int num_runs = static_cast<int>(step_.runs.size());
    const int num_keys = has_states ? mixer_.num_key_heads : 0;
    const int heads = std::max(1, CHANNELS / mixer_.value_dim);
    const int num_parts = num_keys + (mixer_.num_heads + heads - 1) / heads;
    threads().for_each(num_runs * num_parts, [&](int part) {
      const StateRun& run = step_.runs[part % num_runs];
      const int own = part / num_runs, first = (own - num_keys) * heads;
      if (own < num_keys) convolve_keys(run, own);
      else convolve_values(run, first, std::min(first + heads, mixer_.num_heads));
    });
    if (has_states)
      threads().for_each(num_runs * mixer_.num_heads, [&](int part) {
        recur(step_.runs[part / mixer_.num_heads], part % mixer_.num_heads);
      });
    multiply_output(mixer_.output, x, y_, static_cast<int>(rows_), adapted_, y,
                    [&](int first, int next) {
                      for (int row = first; row < next; row++) gate_outputs(row);
                    });
  }

 private:
  const Mixer& mixer_;
  const StatePool& pool_;
  const StateStep& step_;
  const AdaptedRows* adapted_;
  size_t rows_;
  Joined joined_;
  std::vector<float> q_weight_, k_weight_;
  float *normed_, *outputs_, *q_, *k_, *v_, *decay_, *beta_, *y_;

  float* columns(const HeadColumns& of, int row, int head) const {
    return outputs_ + joined_.first[of.layer] +
           static_cast<size_t>(row) * mixer_.layers[of.layer].num_outputs() + of.first +
           static_cast<size_t>(head) * of.stride;
  }

  /// The numbers of a head, of which each key head has a group.
  float* values(const HeadColumns& of, int row, int head) const {
    return columns(of, row, head / mixer_.group()) + head % mixer_.group() * mixer_.value_dim;
  }

  /// Outputs of a row and head, which the last product takes.
  float* outputs(int row, int head) const {
    return y_ + (static_cast<size_t>(row) * mixer_.num_heads + head) * mixer_.value_dim;
  }

  Channels value_channels(int head) const {
    const int dim = mixer_.value_dim, keys = 2 * mixer_.num_key_heads * mixer_.key_dim;
    return {&mixer_.v, head / mixer_.group(), head % mixer_.group() * dim, keys + head * dim, dim};
  }

  void convolve_keys(const StateRun& run, int head) const {
    const int dim = mixer_.key_dim, all = mixer_.num_key_heads * dim;
    const Channels q{&mixer_.q, head, 0, head * dim, dim};
    const Channels k{&mixer_.k, head, 0, all + head * dim, dim};
    for (int row = run.first_row; row < run.first_row + run.num_rows; row++) {
      const size_t at = (head * rows_ + row) * dim;
      convolve(run, row, q, q_ + at);
      convolve(run, row, k, k_ + at);
      if (mixer_.recurrence == Recurrence::kAdditive) continue;
      kernels()->rms_norm(q_ + at, q_weight_.data(), mixer_.eps, dim, q_ + at);
      kernels()->rms_norm(k_ + at, k_weight_.data(), mixer_.eps, dim, k_ + at);
    }
    keep_inputs(run, q);
    keep_inputs(run, k);
  }

  /// Of heads [first, next).
  void convolve_values(const StateRun& run, int first, int next) const {
    for (int row = run.first_row; row < run.first_row + run.num_rows; row++)
      for (int head = first; head < next; head++) {
        if (mixer_.recurrence == Recurrence::kNone) {
          convolve_gated(run, row, head);
          continue;
        }
        float* const to = v_ + (head * rows_ + row) * mixer_.value_dim;
        convolve(run, row, value_channels(head), to);
        compute_gates(row, head);
      }
    for (int head = first; head < next; head++) keep_inputs(run, value_channels(head));
  }

  void convolve_gated(const StateRun& run, int row, int head) const {
    scale(values(mixer_.b, row, head), mixer_.value_dim, values(mixer_.v, row, head));
    convolve(run, row, value_channels(head), outputs(row, head));
    scale(values(mixer_.z, row, head), mixer_.value_dim, outputs(row, head));
  }

  static void scale(const float* factors, int size, float* y) {
    for (int i = 0; i < size; i++) y[i] *= factors[i];
  }

  /// The convolution's input of a row that is of a piece or before it; null is zero.
  const float* input(const StatePiece& piece, int row, const Channels& of) const {
    if (row >= piece.first_row) return columns(*of.from, row, of.head) + of.offset;
    if (piece.source < 0) return nullptr;
    const size_t at = row - piece.first_row + mixer_.num_taps() - 1;
    return pool_.cell(piece.source) + at * mixer_.num_channels() + of.first;
  }

  void convolve(const StateRun& run, int row, const Channels& of, float* y) const {
    // As one piece: the states between are not there yet.
    const StatePiece piece{run.first_row, run.num_rows, step_.pieces[run.first_piece].source, -1};
    const int num_taps = mixer_.num_taps();
    thread_local std::vector<const float*> rows;
    rows.clear();
    for (int back = num_taps - 1; back >= 0; back--)
      if (const float* from = input(piece, row - back, of)) rows.push_back(from);
    const int missing = num_taps - static_cast<int>(rows.size());
    const float* bias = data_or_null(mixer_.tap_bias);
    kernels()->convolve_rows(
        {.num_rows = static_cast<int>(rows.size()),
         .size = of.size,
         .tap_stride = static_cast<size_t>(mixer_.num_channels()),
         .activates = mixer_.recurrence != Recurrence::kNone,
         .rows = rows.data(),
         .taps = mixer_.taps.data() + missing * mixer_.num_channels() + of.first,
         .bias = bias ? bias + of.first : nullptr,
         .y = y});
  }

  void compute_gates(int row, int head) const {
    const int key_head = head / mixer_.group(), own = head % mixer_.group();
    const float a = columns(mixer_.a, row, key_head)[own] + mixer_.dt_bias[head];
    const float softplus = std::max(a, 0.0f) + std::log1p(std::exp(-std::abs(a)));
    const float step = std::clamp(softplus, mixer_.min_step, mixer_.max_step);
    const size_t at = head * rows_ + row;
    decay_[at] = std::exp(-mixer_.decay[head] * step);
    beta_[at] = step;
    if (mixer_.recurrence == Recurrence::kDelta)
      beta_[at] = 1 / (1 + std::exp(-columns(mixer_.b, row, key_head)[own]));
  }

  /// The last inputs of the convolution become those of the new states.
  void keep_inputs(const StateRun& run, const Channels& of) const {
    const int num_kept = mixer_.num_taps() - 1;
    for (int i = run.first_piece; i < run.first_piece + run.num_pieces; i++) {
      const StatePiece& piece = step_.pieces[i];
      const int first = piece.first_row + piece.num_rows - num_kept;
      for (int row = 0; row < num_kept; row++) {
        float* to = pool_.cell(piece.target) + static_cast<size_t>(row) * mixer_.num_channels() +
                    of.first;
        // Of a state that is overwritten, rows are read that are later than those written so far.
        const float* from = input(piece, first + row, of);
        if (from) std::memmove(to, from, of.size * sizeof(float));
        else std::fill_n(to, of.size, 0.0f);
      }
    }
  }

  void recur(const StateRun& run, int head) const {
    for (int i = run.first_piece; i < run.first_piece + run.num_pieces; i++)
      for (int column = 0; column < mixer_.value_dim; column += STATE_COLUMNS)
        recur(step_.pieces[i], head, column);
    if (mixer_.skip.empty()) return;
    for (int row = run.first_row; row < run.first_row + run.num_rows; row++) {
      const float* v = v_ + (head * rows_ + row) * mixer_.value_dim;
      float* const y = outputs(row, head);
      for (int i = 0; i < mixer_.value_dim; i++) y[i] += mixer_.skip[head] * v[i];
    }
  }

  void recur(const StatePiece& piece, int head, int column) const {
    const size_t first = mixer_.first_head_state() + head * mixer_.head_state_size() +
                         static_cast<size_t>(column) * mixer_.key_dim;
    const float* before = piece.source < 0 ? nullptr : pool_.cell(piece.source) + first;
    const size_t key = ((head / mixer_.group()) * rows_ + piece.first_row) * mixer_.key_dim;
    const size_t value = head * rows_ + piece.first_row;
    const bool has_next = before && column + STATE_COLUMNS < mixer_.value_dim;
    kernels()->delta_columns(
        {.num_tokens = piece.num_rows,
         .key_dim = mixer_.key_dim,
         .num_values = std::min(STATE_COLUMNS, mixer_.value_dim - column),
         .is_additive = mixer_.recurrence == Recurrence::kAdditive,
         .value_stride = static_cast<size_t>(mixer_.value_dim),
         .output_stride = static_cast<size_t>(mixer_.num_values()),
         .gate_stride = 1,
         .q = q_ + key,
         .k = k_ + key,
         .v = v_ + value * mixer_.value_dim + column,
         .decay = decay_ + value,
         .beta = beta_ + value,
         .before = before,
         .after = pool_.cell(piece.target) + first,
         .y = outputs(piece.first_row, head) + column,
         .next = has_next ? before + static_cast<size_t>(mixer_.key_dim) * STATE_COLUMNS
                          : nullptr});
  }

  void gate_outputs(int row) const {
    if (mixer_.recurrence == Recurrence::kNone) return;
    if (mixer_.gates_first) gate_heads(row);
    normalize(row);
    if (!mixer_.gates_first) gate_heads(row);
  }

  void gate_heads(int row) const {
    for (int head = 0; head < mixer_.num_heads; head++) {
      float* const y = outputs(row, head);
      kernels()->swiglu(values(mixer_.z, row, head), y, mixer_.value_dim, y);
    }
  }

  void normalize(int row) const {
    const Norm& norm = mixer_.head_norm;
    if (!norm.size()) return;
    float* const y = outputs(row, 0);
    for (int i = 0; i < mixer_.num_values(); i += mixer_.norm_width)
      kernels()->rms_norm(y + i, norm.weight.data() + i % norm.size(), norm.eps,
                          mixer_.norm_width, y + i);
  }
};

}  // namespace

void Mixer::check() const {
  const auto require = [](bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
  };
  const bool has_states = recurrence != Recurrence::kNone;
  require(std::min({num_key_heads, num_heads, value_dim}) > 0 && num_heads % num_key_heads == 0 &&
              (key_dim > 0) == has_states,
          "a mixer has heads, and key heads divide them");
  const auto fits = [&](const HeadColumns& of, int width) {
    return of.layer >= 0 && of.layer < static_cast<int>(layers.size()) && of.first >= 0 &&
           of.stride >= 0 &&
           of.first + (num_key_heads - 1) * of.stride + width <= layers[of.layer].num_outputs();
  };
  const int values = group() * value_dim;
  require(fits(q, key_dim) && fits(k, key_dim) && fits(v, values) && fits(z, values) &&
              fits(b, has_states ? group() : values) && fits(a, has_states ? group() : 0),
          "columns are of the layers");
  for (const Layer& layer : layers) require(layer.num_inputs() == size(), "layers share an input");
  require(!taps.empty() && taps.size() % num_channels() == 0, "taps are [taps, channels]");
  require(tap_bias.empty() || tap_bias.size() == static_cast<size_t>(num_channels()),
          "a bias for each channel");
  const size_t num_states = has_states ? num_heads : 0;
  require(decay.size() == num_states && dt_bias.size() == num_states &&
              (skip.empty() || skip.size() == num_states) && min_step <= max_step,
          "a decay for each head");
  require(!head_norm.size() ||
              (norm_width > 0 && num_values() % norm_width == 0 &&
               (head_norm.size() == norm_width || head_norm.size() == num_values())),
          "a norm of parts of the outputs");
  require((!norm.size() || norm.size() == size()) && output.layer.num_outputs() == size() &&
              output.layer.num_inputs() == num_values() &&
              (!output.ending.norm.size() || output.ending.norm.size() == size()),
          "the output has the size of the input");
}

void run_mixer(const Mixer& mixer, const StatePool& pool, const StateStep& step, const float* x,
               float* y, const AdaptedRows* adapted) {
  MixerRun(mixer, pool, step, adapted).compute(x, y);
}

}  // namespace native

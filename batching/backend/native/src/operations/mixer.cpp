#include "operations/mixer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kernels.h"
#include "memory.h"
#include "operations/half.h"
#include "operations/parallel.h"

namespace native {

namespace {

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

class Run {
 public:
  Run(const DeltaMixer& mixer, const StatePool& pool, const StateStep& step)
      : mixer_(mixer), pool_(pool), step_(step), rows_(step.num_rows),
        joined_(mixer.layers, rows_) {
    const size_t keys = rows_ * mixer.num_key_heads * mixer.key_dim;
    const size_t values = rows_ * mixer.num_heads * mixer.value_dim;
    thread_local std::vector<float> memory;
    assign(memory, {{&normed_, rows_ * mixer.size()}, {&outputs_, joined_.size}, {&q_, keys},
                    {&k_, keys}, {&v_, values}, {&decay_, rows_ * mixer.num_heads},
                    {&beta_, rows_ * mixer.num_heads}, {&y_, values}});
    q_weight_.assign(mixer.key_dim, mixer.q_scale);
    k_weight_.assign(mixer.key_dim, mixer.k_scale);
  }

  void compute(const float* x, float* y) {
    multiply_normed(mixer_.layers, mixer_.norm, x, static_cast<int>(rows_), normed_, outputs_);
    const int num_runs = static_cast<int>(step_.runs.size());
    threads().for_each(num_runs * mixer_.num_key_heads, [&](int part) {
      const StateRun& run = step_.runs[part / mixer_.num_key_heads];
      const int head = part % mixer_.num_key_heads;
      for (int row = run.first_row; row < run.first_row + run.num_rows; row++) {
        convolve(run, row, head);
        compute_gates(row, head);
      }
      keep_inputs(run, head);
    });
    threads().for_each(num_runs * mixer_.num_heads, [&](int part) {
      recur(step_.runs[part / mixer_.num_heads], part % mixer_.num_heads);
    });
    multiply_output(mixer_.output, x, y_, static_cast<int>(rows_), y, [&](int first, int next) {
      for (int row = first; row < next; row++) gate_outputs(row);
    });
  }

 private:
  const DeltaMixer& mixer_;
  const StatePool& pool_;
  const StateStep& step_;
  size_t rows_;
  Joined joined_;
  std::vector<float> q_weight_, k_weight_;
  float *normed_, *outputs_, *q_, *k_, *v_, *decay_, *beta_, *y_;

  const float* columns(const HeadColumns& of, int row, int head) const {
    return outputs_ + joined_.first[of.layer] +
           static_cast<size_t>(row) * mixer_.layers[of.layer].num_outputs() + of.first +
           static_cast<size_t>(head) * of.stride;
  }

  /// Channels that are adjacent in the outputs and in the state.
  struct Channels {
    const HeadColumns* from;
    int first;  // of the state's
    int size;
  };

  std::array<Channels, 3> channels(int head) const {
    const int dim = mixer_.key_dim, all = mixer_.num_key_heads * dim;
    const int values = mixer_.group() * mixer_.value_dim;
    return {{{&mixer_.q, head * dim, dim},
             {&mixer_.k, all + head * dim, dim},
             {&mixer_.v, 2 * all + head * values, values}}};
  }

  /// The convolution's input of a row that is of a piece or before it; null is zero.
  const float* input(const StatePiece& piece, int row, int head, const Channels& channels) const {
    if (row >= piece.first_row) return columns(*channels.from, row, head);
    if (piece.source < 0) return nullptr;
    const size_t at = row - piece.first_row + mixer_.num_taps() - 1;
    return pool_.cell(piece.source) + at * mixer_.num_channels() + channels.first;
  }

  void convolve(const StateRun& run, int row, int head) {
    // As one piece: the states between are not there yet.
    const StatePiece piece{run.first_row, run.num_rows, step_.pieces[run.first_piece].source, -1};
    const int num_taps = mixer_.num_taps(), dim = mixer_.key_dim;
    const auto parts = channels(head);
    const size_t key = (head * rows_ + row) * dim;
    float* const values = convolved_values();
    float* const to[] = {q_ + key, k_ + key, values};
    std::vector<const float*>& rows = row_pointers();
    for (size_t part = 0; part < parts.size(); part++) {
      rows.clear();
      for (int back = num_taps - 1; back >= 0; back--) {
        const float* from = input(piece, row - back, head, parts[part]);
        if (from) rows.push_back(from);
      }
      const int missing = num_taps - static_cast<int>(rows.size());
      kernels()->convolve_silu(
          rows.data(), mixer_.taps.data() + missing * mixer_.num_channels() + parts[part].first,
          mixer_.num_channels(), static_cast<int>(rows.size()), parts[part].size, to[part]);
    }
    kernels()->rms_norm(to[0], q_weight_.data(), mixer_.eps, dim, to[0]);
    kernels()->rms_norm(to[1], k_weight_.data(), mixer_.eps, dim, to[1]);
    for (int i = 0; i < mixer_.group(); i++)
      std::memcpy(v_ + ((head * mixer_.group() + i) * rows_ + row) * mixer_.value_dim,
                  values + i * mixer_.value_dim, mixer_.value_dim * sizeof(float));
  }

  float* convolved_values() const {
    thread_local std::vector<float> memory;
    return grow(memory, static_cast<size_t>(mixer_.group()) * mixer_.value_dim);
  }

  static std::vector<const float*>& row_pointers() {
    thread_local std::vector<const float*> pointers;
    return pointers;
  }

  void compute_gates(int row, int key_head) {
    const int group = mixer_.group();
    for (int i = 0; i < group; i++) {
      const int head = key_head * group + i;
      const float a = columns(mixer_.a, row, key_head)[i] + mixer_.dt_bias[head];
      const float b = columns(mixer_.b, row, key_head)[i];
      const float softplus = std::max(a, 0.0f) + std::log1p(std::exp(-std::abs(a)));
      const size_t at = head * rows_ + row;
      decay_[at] = std::exp(-mixer_.decay[head] * softplus);
      beta_[at] = 1 / (1 + std::exp(-b));
    }
  }

  /// The last inputs of the convolution become those of the new states.
  void keep_inputs(const StateRun& run, int head) const {
    const int num_kept = mixer_.num_taps() - 1;
    for (int i = run.first_piece; i < run.first_piece + run.num_pieces; i++) {
      const StatePiece& piece = step_.pieces[i];
      const int first = piece.first_row + piece.num_rows - num_kept;
      for (int row = 0; row < num_kept; row++)
        for (const Channels& part : channels(head)) {
          float* to = pool_.cell(piece.target) +
                      static_cast<size_t>(row) * mixer_.num_channels() + part.first;
          // Of a state that is overwritten, rows are read that are later than those written so far.
          const float* from = input(piece, first + row, head, part);
          if (from) std::memmove(to, from, part.size * sizeof(float));
          else std::fill_n(to, part.size, 0.0f);
        }
    }
  }

  void recur(const StateRun& run, int head) {
    const size_t block = static_cast<size_t>(mixer_.key_dim) * STATE_COLUMNS;
    const size_t first = mixer_.first_head_state() + head * mixer_.head_state_size();
    const size_t outputs = static_cast<size_t>(mixer_.num_heads) * mixer_.value_dim;
    for (int i = run.first_piece; i < run.first_piece + run.num_pieces; i++) {
      const StatePiece& piece = step_.pieces[i];
      const float* before = piece.source < 0 ? nullptr : pool_.cell(piece.source) + first;
      const size_t key = ((head / mixer_.group()) * rows_ + piece.first_row) * mixer_.key_dim;
      const size_t value = head * rows_ + piece.first_row;
      for (int c = 0; c < mixer_.columns(); c++) {
        const int column = c * STATE_COLUMNS;
        kernels()->delta_columns(
            {.num_tokens = piece.num_rows,
             .key_dim = mixer_.key_dim,
             .num_values = std::min(STATE_COLUMNS, mixer_.value_dim - column),
             .value_stride = static_cast<size_t>(mixer_.value_dim),
             .output_stride = outputs,
             .gate_stride = 1,
             .q = q_ + key,
             .k = k_ + key,
             .v = v_ + value * mixer_.value_dim + column,
             .decay = decay_ + value,
             .beta = beta_ + value,
             .before = before ? before + c * block : nullptr,
             .after = pool_.cell(piece.target) + first + c * block,
             .y = y_ + piece.first_row * outputs +
                  static_cast<size_t>(head) * mixer_.value_dim + column,
             .next = before && c + 1 < mixer_.columns() ? before + (c + 1) * block : nullptr});
      }
    }
  }

  void gate_outputs(int row) {
    const int dim = mixer_.value_dim, group = mixer_.group();
    for (int head = 0; head < mixer_.num_heads; head++) {
      float* y = y_ + (static_cast<size_t>(row) * mixer_.num_heads + head) * dim;
      const float* z = columns(mixer_.z, row, head / group) + head % group * dim;
      kernels()->rms_norm(y, mixer_.head_norm.weight.data(), mixer_.head_norm.eps, dim, y);
      kernels()->swiglu(z, y, dim, y);
    }
  }
};

}  // namespace

void DeltaMixer::check() const {
  const auto require = [](bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
  };
  require(std::min({num_key_heads, num_heads, key_dim, value_dim}) > 0 &&
              num_heads % num_key_heads == 0,
          "a mixer has heads, and key heads divide them");
  const auto fits = [&](const HeadColumns& of, int width) {
    return of.layer >= 0 && of.layer < static_cast<int>(layers.size()) && of.first >= 0 &&
           of.stride >= 0 &&
           of.first + (num_key_heads - 1) * of.stride + width <= layers[of.layer].num_outputs();
  };
  require(fits(q, key_dim) && fits(k, key_dim) && fits(v, group() * value_dim) &&
              fits(z, group() * value_dim) && fits(b, group()) && fits(a, group()),
          "columns are of the layers");
  for (const Layer& layer : layers) require(layer.num_inputs() == size(), "layers share an input");
  require(!taps.empty() && taps.size() % num_channels() == 0, "taps are [taps, channels]");
  require(decay.size() == static_cast<size_t>(num_heads) && dt_bias.size() == decay.size(),
          "a decay for each head");
  require(head_norm.size() == value_dim, "a norm of each head");
  require((!norm.size() || norm.size() == size()) && output.layer.num_outputs() == size() &&
              output.layer.num_inputs() == num_heads * value_dim &&
              (!output.ending.norm.size() || output.ending.norm.size() == size()),
          "the output has the size of the input");
}

void run_delta_mixer(const DeltaMixer& mixer, const StatePool& pool, const StateStep& step,
                     const float* x, float* y) {
  Run(mixer, pool, step).compute(x, y);
}

}  // namespace native

// Recurrent mixers against plain loops: whole, cut into slices, alone, with states that are kept.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <sstream>
#include <thread>

#include "check.h"
#include "operations/linear.h"
#include "operations/mixer.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

Layer random_layer(Random& random, int num_outputs, int num_inputs) {
  Floats weights = random.normal(static_cast<size_t>(num_outputs) * num_inputs);
  for (float& w : weights) w /= std::sqrt(static_cast<float>(num_inputs));
  const PlainWeights plain{.format = Format::kFloat32,
                           .num_matrices = 1,
                           .num_outputs = num_outputs,
                           .num_inputs = num_inputs,
                           .weights = weights.data()};
  return {std::make_shared<PackedWeights>(plain, kernels()->columns), {}};
}

/// A gated delta net.
void describe_delta(Random& random, int size, Mixer& mixer) {
  const int group = mixer.group(), values = group * mixer.value_dim, key_dim = mixer.key_dim;
  const int heads = mixer.num_heads, keys = mixer.num_key_heads * key_dim;
  mixer.q_scale = 1.0f / static_cast<float>(key_dim);
  mixer.k_scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
  mixer.eps = 1e-6f;
  if (random.chance()) {
    mixer.layers = {random_layer(random, 2 * keys + mixer.num_values(), size),
                    random_layer(random, mixer.num_values(), size),
                    random_layer(random, heads, size), random_layer(random, heads, size)};
    mixer.q = {0, 0, key_dim}, mixer.k = {0, keys, key_dim}, mixer.v = {0, 2 * keys, values};
    mixer.z = {1, 0, values}, mixer.b = {2, 0, group}, mixer.a = {3, 0, group};
  } else {
    const int head = 2 * key_dim + 2 * values;
    mixer.layers = {random_layer(random, mixer.num_key_heads * head, size),
                    random_layer(random, 2 * heads, size)};
    mixer.q = {0, 0, head}, mixer.k = {0, key_dim, head}, mixer.v = {0, 2 * key_dim, head};
    mixer.z = {0, 2 * key_dim + values, head};
    mixer.b = {1, 0, 2 * group}, mixer.a = {1, group, 2 * group};
  }
}

/// Mamba 2.
void describe_additive(Random& random, int size, Mixer& mixer) {
  const int group = mixer.group(), values = group * mixer.value_dim, all = mixer.num_values();
  const int keys = mixer.num_key_heads * mixer.key_dim;
  mixer.layers = {random_layer(random, 2 * all + 2 * keys + mixer.num_heads, size)};
  mixer.z = {0, 0, values}, mixer.v = {0, all, values};
  mixer.k = {0, 2 * all, mixer.key_dim}, mixer.q = {0, 2 * all + keys, mixer.key_dim};
  mixer.b = {0, 0, 0}, mixer.a = {0, 2 * all + 2 * keys, group};
  mixer.min_step = random.one_of({0, 1}) * 0.5f;
  mixer.max_step = random.chance() ? 1.5f : INFINITY;
  if (random.chance()) mixer.skip = random.normal(mixer.num_heads);
}

/// A short convolution between two gates.
void describe_none(Random& random, int size, Mixer& mixer) {
  const int all = mixer.num_values(), width = mixer.group() * mixer.value_dim;
  mixer.layers = {random_layer(random, 3 * all, size)};
  mixer.q = mixer.k = mixer.a = {0, 0, 0};
  mixer.b = {0, 0, width}, mixer.z = {0, all, width}, mixer.v = {0, 2 * all, width};
}

void add_states(Random& random, Mixer& mixer) {
  mixer.dt_bias = random.normal(mixer.num_heads);
  for (int i = 0; i < mixer.num_heads; i++)
    mixer.decay.push_back(random.one_of({0, 1, 16}) * 0.9f);
  mixer.gates_first = random.chance();
  const int all = mixer.num_values(), group = mixer.group() * mixer.value_dim;
  mixer.norm_width = random.one_of({mixer.value_dim, group, all});
  const int num_weights = random.one_of({0, mixer.norm_width, all});
  mixer.head_norm = {random.normal(num_weights), 1e-2f};
}

Mixer random_mixer(Random& random, Recurrence recurrence) {
  const bool has_states = recurrence != Recurrence::kNone;
  const int key_heads = random.between(1, 3), size = random.between(4, 40);
  Mixer mixer{.recurrence = recurrence,
              .num_key_heads = key_heads,
              .num_heads = key_heads * random.between(1, 3),
              .key_dim = has_states ? random.one_of({16, 32, random.between(1, 40)}) : 0,
              .value_dim = random.one_of({8, 32, 64, random.between(1, 70)})};
  switch (recurrence) {
    case Recurrence::kDelta: describe_delta(random, size, mixer); break;
    case Recurrence::kAdditive: describe_additive(random, size, mixer); break;
    case Recurrence::kNone: describe_none(random, size, mixer); break;
  }
  const int min_taps = has_states ? 1 : 2;
  mixer.taps = random.normal(static_cast<size_t>(random.between(min_taps, 5)) *
                             mixer.num_channels());
  if (random.chance()) mixer.tap_bias = random.normal(mixer.num_channels());
  if (has_states) add_states(random, mixer);
  if (random.chance()) mixer.norm = {random.normal(size), 1e-5f};
  mixer.output = {random_layer(random, size, mixer.num_values()),
                  {.norm = {}, .residual = random.one_of({0, 1, 2}) * 0.75f}};
  mixer.check();
  return mixer;
}

Floats multiplied(const Layer& layer, const Floats& x, size_t num_rows) {
  Floats y(num_rows * layer.num_outputs(), NAN);
  multiply({{layer.weights->panels(), nullptr, nullptr, x.data(), y.data(),
             static_cast<int>(num_rows)}});
  return y;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

/// One request from its first row on.
class Plain {
 public:
  Plain(const Mixer& mixer, const Floats& x, size_t num_rows) : m_(mixer), rows_(num_rows) {
    Floats normed = x;
    if (m_.norm.size())
      rms_norm(x.data(), m_.norm.weight.data(), m_.norm.eps, static_cast<int>(rows_), m_.size(),
               normed.data());
    for (const Layer& layer : m_.layers) outputs_.push_back(multiplied(layer, normed, rows_));
  }

  /// What the last layer takes, `[rows, num_heads * value_dim]`.
  Floats attended() const {
    Floats y;
    std::vector<Doubles> states(m_.num_heads, Doubles(m_.value_dim * m_.key_dim));
    for (size_t row = 0; row < rows_; row++) {
      Doubles outputs, gates;
      for (int head = 0; head < m_.num_heads; head++) {
        const Doubles own = has_states() ? step(row, head, states[head]) : gated(row, head);
        outputs.insert(outputs.end(), own.begin(), own.end());
        for (int i = 0; i < m_.value_dim; i++) {
          const double z = number(m_.z, row, head, m_.value_dim, i);
          gates.push_back(has_states() ? silu(z) : z);
        }
      }
      if (m_.gates_first || !has_states()) multiply_by(gates, outputs);
      normalize(outputs);
      if (!m_.gates_first && has_states()) multiply_by(gates, outputs);
      y.insert(y.end(), outputs.begin(), outputs.end());
    }
    return y;
  }

 private:
  const Mixer& m_;
  size_t rows_;
  std::vector<Floats> outputs_;

  bool has_states() const { return m_.recurrence != Recurrence::kNone; }

  static void multiply_by(const Doubles& factors, Doubles& y) {
    for (size_t i = 0; i < y.size(); i++) y[i] *= factors[i];
  }

  void normalize(Doubles& y) const {
    const Norm& norm = m_.head_norm;
    if (!norm.size()) return;
    const size_t width = m_.norm_width;
    for (size_t first = 0; first < y.size(); first += width) {
      double squares = 0;
      for (size_t i = first; i < first + width; i++) squares += y[i] * y[i];
      const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + norm.eps);
      for (size_t i = first; i < first + width; i++) y[i] *= factor * norm.weight[i % norm.size()];
    }
  }

  /// Number i of a head; `size` is what a head has.
  double number(const HeadColumns& of, size_t row, int head, int size, int i) const {
    const int group = m_.group();
    return outputs_[of.layer][row * m_.layers[of.layer].num_outputs() + of.first +
                              head / group * of.stride + head % group * size + i];
  }

  /// The sum of taps times what `input` returns of each row.
  template <typename Input>
  double convolved(size_t row, int channel, const Input& input) const {
    double sum = m_.tap_bias.empty() ? 0 : m_.tap_bias[channel];
    for (int t = 0; t < m_.num_taps(); t++) {
      const int64_t from = static_cast<int64_t>(row) + t - m_.num_taps() + 1;
      if (from < 0) continue;
      sum += input(from) * double{m_.taps[static_cast<size_t>(t) * m_.num_channels() + channel]};
    }
    return sum;
  }

  double activated(const HeadColumns& of, size_t row, int at, int channel) const {
    return silu(convolved(row, channel, [&](size_t from) {
      return double{outputs_[of.layer][from * m_.layers[of.layer].num_outputs() + at]};
    }));
  }

  Doubles gated(size_t row, int head) const {
    Doubles outputs;
    for (int i = 0; i < m_.value_dim; i++)
      outputs.push_back(convolved(row, head * m_.value_dim + i, [&](size_t from) {
        return number(m_.v, from, head, m_.value_dim, i) *
               number(m_.b, from, head, m_.value_dim, i);
      }));
    return outputs;
  }

  Doubles key(const HeadColumns& of, size_t row, int key_head, int first, double scale) const {
    Doubles key;
    double squares = 0;
    for (int i = 0; i < m_.key_dim; i++) {
      key.push_back(activated(of, row, of.first + key_head * of.stride + i,
                              first + key_head * m_.key_dim + i));
      squares += key.back() * key.back();
    }
    if (m_.recurrence == Recurrence::kAdditive) return key;
    for (double& x : key) x *= scale / std::sqrt(squares / m_.key_dim + m_.eps);
    return key;
  }

  Doubles step(size_t row, int head, Doubles& state) const {
    const int key_head = head / m_.group(), keys = m_.num_key_heads * m_.key_dim;
    const Doubles q = key(m_.q, row, key_head, 0, m_.q_scale);
    const Doubles k = key(m_.k, row, key_head, keys, m_.k_scale);
    const double a = number(m_.a, row, head, 1, 0) + double{m_.dt_bias[head]};
    const double size = std::clamp(std::log1p(std::exp(a)), double{m_.min_step}, double{m_.max_step});
    const bool is_additive = m_.recurrence == Recurrence::kAdditive;
    const double decay = std::exp(-m_.decay[head] * size);
    const double beta = is_additive ? size : 1 / (1 + std::exp(-number(m_.b, row, head, 1, 0)));
    Doubles outputs;
    for (int i = 0; i < m_.value_dim; i++) {
      const int at = m_.v.first + key_head * m_.v.stride + head % m_.group() * m_.value_dim + i;
      const double v = activated(m_.v, row, at, 2 * keys + head * m_.value_dim + i);
      double* s = state.data() + static_cast<size_t>(i) * m_.key_dim;
      double product = 0, output = 0;
      for (int j = 0; j < m_.key_dim; j++) product += (s[j] *= decay) * k[j];
      if (is_additive) product = 0;
      for (int j = 0; j < m_.key_dim; j++) output += (s[j] += (v - product) * beta * k[j]) * q[j];
      outputs.push_back(output + (m_.skip.empty() ? 0 : m_.skip[head] * v));
    }
    return outputs;
  }
};

class Case {
 public:
  Case(Random& random, Recurrence recurrence) : mixer_(random_mixer(random, recurrence)) {
    const int num_requests = random.between(1, 4);
    for (int i = 0; i < num_requests; i++) {
      lengths_.push_back(random.one_of({1, 2, random.between(1, 40)}));
      inputs_.push_back(random.normal(static_cast<size_t>(lengths_[i]) * mixer_.size()));
    }
  }

  void check(Random& random) {
    set_num_threads(random.one_of({1, 2, 4}));
    std::vector<Floats> alone;
    for (size_t i = 0; i < inputs_.size(); i++) {
      StatePool pool(mixer_.state_size());
      alone.push_back(run(pool, {{0, lengths_[i], -1, 0}}, inputs_[i]));
      compare(i, alone[i]);
    }
    set_num_threads(random.one_of({1, 2, 4}));
    check_together(random, alone);
    check_kept(random, alone[0]);
  }

 private:
  Mixer mixer_;
  std::vector<int> lengths_;
  std::vector<Floats> inputs_;

  Floats run(StatePool& pool, std::vector<StatePiece> pieces, const Floats& x) const {
    const StateStep step(std::move(pieces));
    pool.grow(step.num_cells);
    Floats y(x.size(), NAN);
    run_mixer(mixer_, pool, step, x.data(), y.data());
    return y;
  }

  Floats rows(size_t request, int first, int next) const {
    const auto begin = inputs_[request].begin();
    return Floats(begin + first * mixer_.size(), begin + next * mixer_.size());
  }

  void compare(size_t request, const Floats& y) const {
    const Floats& x = inputs_[request];
    const Floats attended = Plain(mixer_, x, lengths_[request]).attended();
    const Floats outputs = multiplied(mixer_.output.layer, attended, lengths_[request]);
    const float residual = mixer_.output.ending.residual;
    std::vector<Expected> expected;
    for (size_t i = 0; i < y.size(); i++)
      expected.push_back({outputs[i] * (residual ? residual : 1) + (residual ? x[i] : 0),
                          1e-4 * (1 + std::abs(outputs[i]))});
    expect_close(y, expected, describe());
  }

  /// All requests in each step, cut anywhere; half of them change their cells.
  void check_together(Random& random, const std::vector<Floats>& alone) const {
    StatePool pool(mixer_.state_size());
    const int num_requests = static_cast<int>(inputs_.size());
    std::vector<int> done(num_requests), cells(num_requests, -1);
    std::vector<Floats> outputs(num_requests);
    while (done != lengths_) {
      std::vector<StatePiece> pieces;
      std::vector<int> sizes(num_requests);
      Floats x;
      int row = 0;
      for (int i = 0; i < num_requests; i++) {
        sizes[i] = std::min(lengths_[i] - done[i], random.one_of({0, 1, random.between(1, 20)}));
        if (sizes[i] == 0) continue;
        const bool moves = cells[i] < 0 || random.chance();
        const int target = moves ? (cells[i] == 2 * i ? 2 * i + 1 : 2 * i) : cells[i];
        pieces.push_back({row, sizes[i], cells[i], target});
        cells[i] = target;
        row += sizes[i];
        const Floats own = rows(i, done[i], done[i] + sizes[i]);
        x.insert(x.end(), own.begin(), own.end());
      }
      if (row == 0) continue;
      const Floats y = run(pool, pieces, x);
      auto next = y.begin();
      for (int i = 0; i < num_requests; i++) {
        const auto end = next + sizes[i] * mixer_.size();
        outputs[i].insert(outputs[i].end(), next, end);
        next = end;
        done[i] += sizes[i];
      }
    }
    for (int i = 0; i < num_requests; i++)
      expect_same(outputs[i], alone[i], "together and cut, " + describe());
  }

  /// A state in the middle of a slice, the rest once more from there, and from the end's cell in place.
  void check_kept(Random& random, const Floats& alone) const {
    const int length = lengths_[0];
    if (length < 3) return;
    const int first = random.between(1, length - 2), second = random.between(first + 1, length - 1);
    StatePool pool(mixer_.state_size());
    run(pool, {{0, first, -1, 9}}, rows(0, 0, first));
    const Floats both = run(
        pool, {{0, second - first, 9, 9}, {second - first, length - second, 9, 1}},
        rows(0, first, length));
    const Floats again = run(pool, {{0, length - second, 9, 9}}, rows(0, second, length));
    const auto from = [&](int row) {
      return std::span(alone).subspan(static_cast<size_t>(row) * mixer_.size());
    };
    expect_same(both, from(first), "with a kept state, " + describe());
    expect_same(again, from(second), "from a kept state, " + describe());
    const size_t size = mixer_.state_size();
    expect_same(std::span(pool.cell(9), size), std::span(pool.cell(1), size), "states");
  }

  std::string describe() const {
    std::ostringstream text;
    text << "mixer " << static_cast<int>(mixer_.recurrence) << ": " << mixer_.num_key_heads << "/" << mixer_.num_heads << " heads of "
         << mixer_.key_dim << "x" << mixer_.value_dim << ", " << mixer_.num_taps() << " taps, "
         << mixer_.layers.size() << " layers";
    return text.str();
  }
};

/// A step is queued, for which the pool grows, while the one before it runs; where cells moved, or where
/// they are found, the thread sanitizer reports a data race.
void test_a_pool_that_grows_while_it_is_read() {
  StatePool pool(3);
  pool.grow(1);
  float* const first = pool.cell(0);
  std::atomic<bool> has_begun = false, is_done = false;
  bool has_moved = false;
  std::thread reader([&] {
    while (!is_done) {
      has_moved |= pool.cell(0) != first;
      has_begun = true;
    }
  });
  while (!has_begun) std::this_thread::yield();
  for (int n = 2; n < 5000; n++) {
    pool.grow(n);
    pool.cell(n - 1)[2] = static_cast<float>(n);
  }
  is_done = true;
  reader.join();
  expect(!has_moved, "cells stay where they are");
  for (int n = 2; n < 5000; n++) expect(pool.cell(n - 1)[2] == n, "each cell has memory of its own");
}

}  // namespace

void test_mixer() {
  test_a_pool_that_grows_while_it_is_read();
  Random random(6);
  for (int i = 0; i < 60; i++)
    for (Recurrence recurrence : {Recurrence::kDelta, Recurrence::kAdditive, Recurrence::kNone})
      Case(random, recurrence).check(random);
}

}  // namespace tests

// Recurrences of several requests, whole and cut into parts.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "check.h"
#include "operations/recurrent.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;

/// Random inputs, and what is computed of them.
class DeltaCase {
 public:
  DeltaCase(Random& random, const DeltaArgs& shape, int num_requests)
      : args_(shape), num_requests_(num_requests) {
    const size_t tokens = static_cast<size_t>(num_requests) * args_.num_tokens;
    q_ = normalized(random, tokens * args_.num_key_heads * args_.key_dim);
    k_ = normalized(random, tokens * args_.num_key_heads * args_.key_dim);
    v_ = random.normal(tokens * args_.num_heads * args_.value_dim);
    decay_ = fractions(random, tokens * decay_size());
    beta_ = fractions(random, tokens * args_.num_heads);
    if (random.chance()) state_ = random.normal(num_requests * state_size());
    y_.assign(v_.size(), NAN);
    new_state_.assign(num_requests * state_size(), NAN);
    args_.q = q_.data(), args_.k = k_.data(), args_.v = v_.data();
    args_.decay = decay_.data(), args_.beta = beta_.data();
    args_.state = state_.empty() ? nullptr : state_.data();
    args_.y = y_.data(), args_.new_state = new_state_.data();
  }

  void check(Random& random) {
    set_num_threads(random.one_of({1, 2, 4}));
    delta_rule(args_, num_requests_);
    compare_with_doubles();
    const std::vector<float> y = y_, new_state = new_state_;
    std::fill(y_.begin(), y_.end(), NAN);
    std::fill(new_state_.begin(), new_state_.end(), NAN);
    set_num_threads(random.one_of({1, 2, 4}));
    for (int request = 0; request < num_requests_; request++)
      run_cut(request, random.between(0, args_.num_tokens - 1));
    expect_same(y_, y, "alone and cut, " + describe());
    expect_same(new_state_, new_state, "states, alone and cut, " + describe());
  }

 private:
  DeltaArgs args_;
  int num_requests_;
  std::vector<float> q_, k_, v_, decay_, beta_, state_, y_, new_state_;

  size_t state_size() const {
    return static_cast<size_t>(args_.num_heads) * args_.value_dim * args_.key_dim;
  }
  size_t decay_size() const {
    return static_cast<size_t>(args_.num_heads) * (args_.has_channels ? args_.key_dim : 1);
  }

  /// Keys of a length of about one, as models make them: the recurrence is stable.
  std::vector<float> normalized(Random& random, size_t size) const {
    auto numbers = random.normal(size);
    for (float& x : numbers) x /= std::sqrt(static_cast<float>(args_.key_dim)) * 1.5f;
    return numbers;
  }

  /// In [0, 1], its bounds included.
  static std::vector<float> fractions(Random& random, size_t size) {
    auto numbers = random.normal(size);
    for (float& x : numbers) x = std::clamp(0.5f + x / 3, 0.0f, 1.0f);
    return numbers;
  }

  std::string describe() const {
    std::ostringstream text;
    text << "delta rule: " << num_requests_ << "x" << args_.num_tokens << " tokens, "
         << args_.num_key_heads << "/" << args_.num_heads << " heads of " << args_.key_dim << "x"
         << args_.value_dim << (args_.has_channels ? ", channels" : "")
         << (args_.is_additive ? ", additive" : "")
         << (args_.state ? ", a state" : "");
    return text.str();
  }

  /// The first tokens of one request, then the others.
  void run_cut(int request, int num_first) {
    std::vector<float> between(state_size());
    DeltaArgs part = from(args_, static_cast<size_t>(request) * args_.num_tokens);
    if (part.state) part.state += request * state_size();
    part.new_state += request * state_size();
    float* const last_state = part.new_state;
    if (num_first > 0) {
      part.num_tokens = num_first;
      part.new_state = between.data();
      delta_rule(part, 1);
      part = from(part, num_first);
      part.state = between.data();
    }
    part.num_tokens = args_.num_tokens - num_first;
    part.new_state = last_state;
    delta_rule(part, 1);
  }

  static DeltaArgs from(DeltaArgs args, size_t token) {
    args.q += token * args.num_key_heads * args.key_dim;
    args.k += token * args.num_key_heads * args.key_dim;
    args.v += token * args.num_heads * args.value_dim;
    args.decay += token * args.num_heads * (args.has_channels ? args.key_dim : 1);
    args.beta += token * args.num_heads;
    args.y += token * args.num_heads * args.value_dim;
    return args;
  }

  void compare_with_doubles() const {
    std::vector<Expected> y(y_.size()), states;
    for (int request = 0; request < num_requests_; request++)
      for (int head = 0; head < args_.num_heads; head++)
        for (int row = 0; row < args_.value_dim; row++) expect_row(request, head, row, y, states);
    expect_close(y_, y, describe());
    expect_close(new_state_, states, "states, " + describe());
  }

  void expect_row(int request, int head, int row, std::vector<Expected>& y,
                  std::vector<Expected>& states) const {
    const size_t size = args_.key_dim;
    std::vector<double> state(size);
    const size_t first = request * state_size() +
                         (static_cast<size_t>(head) * args_.value_dim + row) * size;
    for (size_t i = 0; i < size; i++) state[i] = args_.state ? args_.state[first + i] : 0;
    for (int t = 0; t < args_.num_tokens; t++) {
      const size_t token = static_cast<size_t>(request) * args_.num_tokens + t;
      const size_t key =
          (token * args_.num_key_heads + head / (args_.num_heads / args_.num_key_heads)) * size;
      const size_t at = token * args_.num_heads + head;
      double sum = 0, output = 0;
      for (size_t i = 0; i < size; i++) {
        state[i] *= args_.has_channels ? args_.decay[at * size + i] : args_.decay[at];
        if (!args_.is_additive) sum += state[i] * args_.k[key + i];
      }
      const double delta = (args_.v[at * args_.value_dim + row] - sum) * args_.beta[at];
      for (size_t i = 0; i < size; i++) {
        state[i] += delta * args_.k[key + i];
        output += state[i] * args_.q[key + i];
      }
      y[at * args_.value_dim + row] = {output, 1e-5};
    }
    for (double x : state) states.push_back({x, 1e-5});
  }
};

void test_convolve(Random& random) {
  const int num_requests = random.between(1, 3);
  ConvolutionArgs args{.num_tokens = random.between(1, 20),
                       .num_taps = random.between(1, 5),
                       .num_channels = random.one_of({random.between(1, 100), 1024, 2500})};
  const size_t channels = args.num_channels;
  const size_t num_inputs = args.num_tokens + args.num_taps - 1;
  const auto x = random.normal(num_requests * num_inputs * channels);
  const auto taps = random.normal(args.num_taps * channels);
  const auto bias = random.chance() ? random.normal(channels) : std::vector<float>{};
  std::vector<float> y(num_requests * args.num_tokens * channels, NAN);
  std::vector<Expected> expected;
  for (int row = 0; row < num_requests * args.num_tokens; row++)
    for (size_t c = 0; c < channels; c++) {
      const size_t first = row / args.num_tokens * num_inputs + row % args.num_tokens;
      double sum = bias.empty() ? 0 : bias[c], magnitude = std::abs(sum);
      for (int t = 0; t < args.num_taps; t++) {
        const double product =
            static_cast<double>(x[(first + t) * channels + c]) * taps[t * channels + c];
        sum += product, magnitude += std::abs(product);
      }
      expected.push_back({sum, 1e-6 * magnitude});
    }
  args.x = x.data(), args.taps = taps.data(), args.y = y.data();
  args.bias = bias.empty() ? nullptr : bias.data();
  convolve(args, num_requests);
  expect_close(y, expected, "convolve " + std::to_string(channels));
}

}  // namespace

void test_recurrent() {
  Random random(4);
  for (int i = 0; i < 60; i++) {
    test_convolve(random);
    const int num_key_heads = random.between(1, 3);
    const DeltaArgs shape{.num_tokens = random.one_of({1, 2, random.between(1, 100)}),
                          .num_key_heads = num_key_heads,
                          .num_heads = num_key_heads * random.one_of({1, 1, 2, 3}),
                          .key_dim = random.one_of({16, 32, 128, random.between(1, 100)}),
                          .value_dim = random.one_of({8, 32, 64, random.between(1, 80)}),
                          .is_additive = random.chance(),
                          .has_channels = random.chance()};
    DeltaCase(random, shape, random.between(1, 4)).check(random);
  }
}

}  // namespace tests

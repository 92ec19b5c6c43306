// A mixture of experts is what plain loops make of its weights.
#include "operations/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "check.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

/// Matrices `[matrices, outputs, inputs]`, with biases.
struct Matrices {
  int num_outputs, num_inputs;
  std::shared_ptr<Floats> weights, bias;
  Weights packed;

  Matrices(Random& random, int num_matrices, int outputs, int inputs)
      : num_outputs(outputs), num_inputs(inputs) {
    const size_t rows = static_cast<size_t>(num_matrices) * outputs;
    weights = std::make_shared<Floats>(random.normal(rows * inputs));
    for (float& weight : *weights) weight /= std::sqrt(static_cast<float>(inputs));
    bias = std::make_shared<Floats>(random.normal(rows));
    const PlainWeights plain{.format = Format::kFloat32,
                             .num_matrices = num_matrices,
                             .num_outputs = outputs,
                             .num_inputs = inputs,
                             .weights = weights->data()};
    packed = std::make_shared<PackedWeights>(plain, kernels()->columns);
  }

  Layer layer() const { return {packed, *bias}; }
  ExpertLayer of_experts() const { return {packed, {bias, bias->data()}}; }

  Doubles times(const Doubles& x, int matrix = 0) const {
    Doubles y;
    for (int i = 0; i < num_outputs; i++) {
      const size_t row = static_cast<size_t>(matrix) * num_outputs + i;
      y.push_back((*bias)[row]);
      for (int j = 0; j < num_inputs; j++) y.back() += (*weights)[row * num_inputs + j] * x[j];
    }
    return y;
  }
};

/// An MLP, or one for each expert.
struct Gated {
  Matrices gate, up, down;

  Gated(Random& random, int num_experts, int width, int size)
      : gate(random, num_experts, width, size), up(random, num_experts, width, size),
        down(random, num_experts, size, width) {}

  Doubles run(const Doubles& x, int expert = 0) const {
    Doubles gates = gate.times(x, expert);
    const Doubles ups = up.times(x, expert);
    for (size_t i = 0; i < gates.size(); i++) gates[i] *= ups[i] / (1 + std::exp(-gates[i]));
    return down.times(gates, expert);
  }
};

Doubles normed(const Norm& norm, const Doubles& x) {
  double squares = 0;
  for (double value : x) squares += value * value;
  Doubles y(x);
  for (size_t i = 0; norm.size() && i < x.size(); i++)
    y[i] *= norm.weight[i] / std::sqrt(squares / x.size() + norm.eps);
  return y;
}

std::vector<int> by_size(const Doubles& values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  return order;
}

Doubles scores_of(const Router& router, const Doubles& logits) {
  Doubles scores;
  double total = 0;
  for (double logit : logits) total += std::exp(logit);
  for (double logit : logits)
    scores.push_back(router.is_sigmoid ? 1 / (1 + std::exp(-logit)) : std::exp(logit) / total);
  return scores;
}

/// The weight of each expert, 0 for those that are not chosen.
Doubles weights_of(const Router& router, const Doubles& logits) {
  const Doubles scores = scores_of(router, logits);
  Doubles choice(scores);
  for (size_t i = 0; i < router.correction.size(); i++) choice[i] += router.correction[i];
  const size_t of_group = choice.size() / router.num_groups;
  Doubles sums;
  for (int group = 0; group < router.num_groups; group++) {
    Doubles own(choice.begin() + group * of_group, choice.begin() + (group + 1) * of_group);
    std::sort(own.rbegin(), own.rend());
    sums.push_back(own[0] + (own.size() > 1 ? own[1] : 0));
  }
  const std::vector<int> groups = by_size(sums);
  for (int i = router.top_groups; i < router.num_groups; i++)
    std::fill_n(choice.begin() + groups[i] * of_group, of_group, 0);
  const std::vector<int> order = by_size(choice);
  double total = router.epsilon;
  for (int i = 0; i < router.top_k; i++) total += scores[order[i]];
  Doubles weights(choice.size());
  for (int i = 0; i < router.top_k; i++)
    weights[order[i]] = scores[order[i]] * router.factor / (router.is_normalized ? total : 1);
  return weights;
}

Router random_router(Random& random) {
  const int num_groups = random.one_of({1, 1, 2, 3}), size = num_groups * random.between(2, 5);
  const int top_groups = random.between(1, num_groups);
  Router router{.num_experts = size,
                .top_k = random.between(1, std::min(5, size / num_groups * top_groups)),
                .is_sigmoid = random.chance(),
                .correction = random.chance() ? random.normal(size) : Floats{},
                .num_groups = num_groups,
                .top_groups = top_groups,
                .is_normalized = random.chance(),
                .epsilon = random.chance() ? 0.5f : 0,
                .factor = random.chance() ? 2.5f : 1};
  // Those of groups that are left out count as 0: equal ones would be chosen otherwise.
  for (float& value : router.correction) value = std::abs(value);
  return router;
}

void test_router(Random& random) {
  const Router router = random_router(random);
  const Floats logits = random.normal(router.num_experts);
  std::vector<int32_t> indices(router.top_k);
  Floats chosen(router.top_k), weights(router.num_experts);
  route(router, logits.data(), indices.data(), chosen.data());
  for (int i = 0; i < router.top_k; i++) weights[indices[i]] = chosen[i];
  std::vector<Expected> expected;
  for (double value : weights_of(router, Doubles(logits.begin(), logits.end())))
    expected.push_back({value, 1e-6 * router.factor});
  expect_close(weights, expected, "router");
}

/// With logits that are not numbers, experts are still different ones that are there.
void test_router_without_numbers(Random& random) {
  Router router = random_router(random);
  Floats logits = random.normal(router.num_experts);
  for (float& logit : logits)
    if (random.chance()) logit = random.chance() ? NAN : INFINITY;
  std::vector<int32_t> indices(router.top_k);
  Floats weights(router.top_k);
  route(router, logits.data(), indices.data(), weights.data());
  std::sort(indices.begin(), indices.end());
  expect(std::unique(indices.begin(), indices.end()) == indices.end() && indices.front() >= 0 &&
             indices.back() < router.num_experts,
         "a router of what are no numbers");
}

Norm random_norm(Random& random, int size) {
  return random.chance() ? Norm{random.normal(size), 1e-5f} : Norm{};
}

/// A half, and what plain loops make of its weights.
struct Mixture {
  int size;
  Router router;
  Matrices layer, gate;
  Gated experts, shared;
  MixtureHalf half;

  explicit Mixture(Random& random)
      : size(random.between(3, 60)), router(random_router(random)),
        layer(random, 1, router.num_experts, size), gate(random, 1, 1, size),
        experts(random, router.num_experts, random.between(3, 70), size),
        shared(random, 1, random.between(3, 70), size) {
    half.router_layer = layer.layer();
    half.router = router;
    half.experts = {experts.gate.of_experts(), experts.up.of_experts(), experts.down.of_experts(),
                    {}};
    const std::vector<Layer> gate_up{shared.gate.layer(), shared.up.layer()};
    if (random.chance()) half.shared = MlpHalf{gate_up, {}, {shared.down.layer(), {}}};
    if (half.shared && random.chance()) half.shared_gate = gate.layer();
    half.norm = random_norm(random, size);
    half.ending = {random_norm(random, size), random.one_of({0, 1, 2}) * 0.5f};
  }

  /// The experts of a row and the shared one.
  Doubles sum(const Doubles& input) const {
    const Doubles weights = weights_of(router, layer.times(input));
    Doubles total(size);
    const auto add = [&](double weight, const Doubles& output) {
      for (int i = 0; i < size; i++) total[i] += weight * output[i];
    };
    for (int expert = 0; expert < router.num_experts; expert++)
      if (weights[expert] != 0) add(weights[expert], experts.run(input, expert));
    if (half.shared)
      add(half.shared_gate ? 1 / (1 + std::exp(-gate.times(input)[0])) : 1, shared.run(input));
    return total;
  }

  void expect_row(const Doubles& x, std::vector<Expected>& expected) const {
    const Doubles output = normed(half.ending.norm, sum(normed(half.norm, x)));
    const float residual = half.ending.residual;
    double largest = 1;
    for (double value : output) largest = std::max(largest, std::abs(value));
    for (int i = 0; i < size; i++)
      expected.push_back({residual ? x[i] + residual * output[i] : output[i], 1e-5 * largest});
  }
};

void test_mixture_half(Random& random) {
  const Mixture mixture(random);
  const int num_rows = random.between(1, 30);
  const size_t size = mixture.size;
  const Floats x = random.normal(num_rows * size);
  std::vector<Expected> expected;
  Floats y(x.size(), NAN), alone(y);
  for (auto row = x.begin(); row < x.end(); row += size)
    mixture.expect_row(Doubles(row, row + size), expected);
  run_mixture(mixture.half, x.data(), num_rows, y.data());
  expect_close(y, expected, "mixture half");
  for (size_t at = 0; at < x.size(); at += size)
    run_mixture(mixture.half, x.data() + at, 1, alone.data() + at);
  expect_same(alone, y, "rows of a mixture alone");
}

}  // namespace

void test_mixture() {
  Random random(6);
  for (int i = 0; i < 200; i++) {
    test_router(random);
    test_router_without_numbers(random);
  }
  for (int i = 0; i < 60; i++) {
    set_num_threads(random.one_of({1, 2, 4}));
    test_mixture_half(random);
  }
}

}  // namespace tests

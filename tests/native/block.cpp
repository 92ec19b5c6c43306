// The halves of a block are the operations that they are made of, one after the other.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "check.h"
#include "operations/block.h"
#include "operations/linear.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;
using Floats = std::vector<float>;

/// Weights that several layers may take parts of.
struct Matrix {
  Floats weights, bias;
  int num_inputs;

  Matrix(Random& random, int num_outputs, int inputs)
      : weights(random.normal(static_cast<size_t>(num_outputs) * inputs)),
        bias(random.normal(num_outputs)), num_inputs(inputs) {}

  Layer layer(int first, int next) const {
    const PlainWeights plain{.format = Format::kFloat32,
                             .num_matrices = 1,
                             .num_outputs = next - first,
                             .num_inputs = num_inputs,
                             .weights = weights.data() + static_cast<size_t>(first) * num_inputs};
    return {std::make_shared<PackedWeights>(plain, kernels()->columns),
            Floats(bias.begin() + first, bias.begin() + next)};
  }
};

/// Heads `[dim]` of outputs, every second one from `first` on.
Matrix every_second(const Matrix& both, int dim, int first) {
  Matrix picked = both;
  picked.weights.clear(), picked.bias.clear();
  const size_t head = static_cast<size_t>(dim) * both.num_inputs;
  for (size_t i = first; i < both.bias.size() / dim; i += 2) {
    const auto weights = both.weights.begin() + i * head, bias = both.bias.begin() + i * dim;
    picked.weights.insert(picked.weights.end(), weights, weights + head);
    picked.bias.insert(picked.bias.end(), bias, bias + dim);
  }
  return picked;
}

Floats multiplied(const Layer& layer, const Floats& x, int num_rows) {
  Floats y(static_cast<size_t>(num_rows) * layer.num_outputs(), NAN);
  multiply({{layer.weights->panels(), layer.bias.data(), nullptr, x.data(), y.data(), num_rows}});
  return y;
}

Norm random_norm(Random& random, int size) {
  return random.chance() ? Norm{random.normal(size), 1e-5f} : Norm{};
}

/// Rows, or heads of them.
Floats normed(const Norm& norm, Floats x) {
  if (norm.size())
    rms_norm(x.data(), norm.weight.data(), norm.eps, static_cast<int>(x.size() / norm.size()),
             norm.size(), x.data());
  return x;
}

float random_residual(Random& random) { return random.one_of({0, 1, 2}) * 0.75f; }

std::vector<Expected> expected_output(const Output& output, const Floats& x, const Floats& input,
                                      int num_rows, double tolerance = 0) {
  const Floats y = normed(output.ending.norm, multiplied(output.layer, input, num_rows));
  std::vector<Expected> expected;
  for (size_t i = 0; i < y.size(); i++) {
    const float residual = output.ending.residual;
    const double value = residual ? x[i] + double{residual} * y[i] : y[i];
    expected.push_back({value, 1e-6 * (std::abs(x[i]) + std::abs(y[i]) + tolerance)});
  }
  return expected;
}

/// What a half gives with layers of their own, with joined ones, and for the first row alone.
template <typename Run>
void expect_alike(const Run& run, const std::vector<Expected>& expected, size_t size,
                  const std::string& what) {
  const Floats y = run(false, -1);
  expect_close(y, expected, what);
  expect_same(run(true, -1), y, "joined, " + what);
  const Floats alone = run(true, 1);
  expect_same(std::span(alone).first(size), std::span(y).first(size), "alone, " + what);
}

void test_mlp(Random& random) {
  const int num_rows = random.between(1, 30), size = random.between(8, 60);
  const int width = random.between(8, 90);
  const Matrix both(random, 2 * width, size), down(random, size, width);
  const Norm norm = random_norm(random, size);
  const Output output{down.layer(0, size), {random_norm(random, size), random_residual(random)}};
  const bool is_gelu = random.chance();
  const Layer gate = both.layer(0, width), up = both.layer(width, 2 * width);
  const Floats x = random.normal(static_cast<size_t>(num_rows) * size);
  Floats gated = multiplied(gate, normed(norm, x), num_rows);
  const Floats ups = multiplied(up, normed(norm, x), num_rows);
  (is_gelu ? geglu : swiglu)(gated.data(), ups.data(), gated.size(), gated.data());
  const auto run = [&](bool is_joined, int rows) {
    const auto layers = is_joined ? std::vector{both.layer(0, 2 * width)} : std::vector{gate, up};
    Floats y(x.size(), NAN);
    run_mlp({layers, norm, output, is_gelu}, x.data(), rows < 0 ? num_rows : rows, y.data());
    return y;
  };
  expect_alike(run, expected_output(output, x, gated, num_rows), size, "MLP");
}

void test_attention_half(Random& random) {
  const int num_rows = random.between(1, 30), size = random.between(8, 60);
  const int num_keys = random.between(1, 3), num_heads = num_keys * random.between(1, 3);
  const int dim = 2 * random.between(2, 20), q_size = num_heads * dim, k_size = num_keys * dim;
  Matrix all(random, q_size + 2 * k_size, size);
  const Matrix gated(random, 2 * q_size, size), o(random, size, q_size);
  const bool is_gated = random.chance();
  if (is_gated) {
    const Matrix queries = every_second(gated, dim, 0);
    std::copy(queries.weights.begin(), queries.weights.end(), all.weights.begin());
    std::copy(queries.bias.begin(), queries.bias.end(), all.bias.begin());
  }
  const Output output{o.layer(0, size), {random_norm(random, size), random_residual(random)}};
  const bool is_by_head = random.chance();
  const Norm norm = random_norm(random, size);
  const Norm q_norm = random_norm(random, is_by_head ? dim : q_size);
  const Norm k_norm = random_norm(random, is_by_head ? dim : k_size);
  const Norm v_norm = random_norm(random, dim);
  const Layer q_layer = all.layer(0, q_size), k_layer = all.layer(q_size, q_size + k_size);
  const Layer v_layer = all.layer(q_size + k_size, q_size + 2 * k_size);
  const Floats sinks = random.chance() ? random.normal(num_heads) : Floats{};
  const Floats x = random.normal(static_cast<size_t>(num_rows) * size);
  const int half = random.between(0, dim / 2);
  const Floats cosines = random.normal(static_cast<size_t>(num_rows) * half + 1);
  const Floats sines = random.normal(cosines.size());
  const Rotation rotation{cosines.data(), sines.data(), half, random.chance()};
  const Visibility visibility{random.one_of({0, 5}), random.chance(), random.chance() ? 3.0f : 0};
  const PoolLayout layout{num_keys, 4, dim, dim, CacheType::kFloat32, kernels()->columns};
  const auto step_of = [](int rows) {
    Step step{{{0, rows, 0, 0}}, std::vector<int32_t>(8), std::vector<int32_t>(rows)};
    std::iota(step.tables.rbegin(), step.tables.rend(), 0);
    for (int i = 0; i < rows; i++) step.slots[i] = step.tables[i / 4] * 4 + i % 4;
    return step;
  };
  Floats q = normed(q_norm, multiplied(q_layer, normed(norm, x), num_rows));
  Floats k = normed(k_norm, multiplied(k_layer, normed(norm, x), num_rows));
  const Floats v = normed(v_norm, multiplied(v_layer, normed(norm, x), num_rows));
  rotate(q.data(), rotation, num_rows, num_heads, dim, q.data());
  rotate(k.data(), rotation, num_rows, num_keys, dim, k.data());
  Pool plain(layout, 8);
  Floats attended(q.size(), NAN);
  const AttentionArgs args{layout, plain.keys(), plain.values(), q.data(), attended.data(),
                           num_heads, 0.3f, visibility.soft_cap, visibility.window,
                           visibility.is_chunked, sinks.empty() ? nullptr : sinks.data(), 0};
  write_and_attend(plain, step_of(num_rows), args, k.data(), v.data(), num_rows);
  if (is_gated) {
    const Layer gates = every_second(gated, dim, 1).layer(0, q_size);
    const Floats gate = multiplied(gates, normed(norm, x), num_rows);
    for (size_t i = 0; i < gate.size(); i++) attended[i] /= 1 + std::exp(-gate[i]);
  }
  const auto run = [&](bool is_joined, int rows) {
    auto layers = is_joined ? std::vector{all.layer(0, q_size + 2 * k_size)}
                            : std::vector{q_layer, k_layer, v_layer};
    if (is_gated) layers = {gated.layer(0, 2 * q_size), k_layer, v_layer};
    Pool pool(layout, 8);
    Floats y(x.size(), NAN);
    rows = rows < 0 ? num_rows : rows;
    run_attention({layers, norm, q_norm, k_norm, v_norm, output, sinks, num_heads, 0.3f, is_gated},
                  pool, step_of(rows), rotation, visibility, x.data(), rows, y.data());
    return y;
  };
  // The e^x of gates is another one.
  const double tolerance = is_gated ? 30 : 0;
  expect_alike(run, expected_output(output, x, attended, num_rows, tolerance), size,
               is_gated ? "gated attention half" : "attention half");
}

}  // namespace

void test_block() {
  Random random(5);
  for (int i = 0; i < 60; i++) {
    set_num_threads(random.one_of({1, 2, 4}));
    test_mlp(random);
    test_attention_half(random);
  }
}

}  // namespace tests

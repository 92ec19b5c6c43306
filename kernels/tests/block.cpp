// The halves of a block are the operations that they are made of, one after the other.
#include <algorithm>
#include <array>
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
  if (random.chance()) return {};
  return random.chance() ? Norm{random.normal(size), 1e-5f}
                         : Norm{random.normal(size), 1e-5f, true,
                                random.chance() ? random.normal(size) : Floats{}};
}

/// Rows, or heads of them.
Floats normed(const Norm& norm, Floats x) {
  if (!norm.size()) return x;
  const int num_rows = static_cast<int>(x.size() / norm.size());
  if (norm.is_centered)
    layer_norm(x.data(), norm.weight.data(), norm.bias.empty() ? nullptr : norm.bias.data(),
               norm.eps, num_rows, norm.size(), x.data());
  else
    rms_norm(x.data(), norm.weight.data(), norm.eps, num_rows, norm.size(), x.data());
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
  const Activation activation = random.chance() ? Activation::kGelu : Activation::kSilu;
  const Layer gate = both.layer(0, width), up = both.layer(width, 2 * width);
  const Floats x = random.normal(static_cast<size_t>(num_rows) * size);
  // That of a block whose attention and MLP have one input.
  const Floats added_to = random.chance() ? random.normal(x.size()) : x;
  Floats gated = multiplied(gate, normed(norm, x), num_rows);
  const Floats ups = multiplied(up, normed(norm, x), num_rows);
  (activation == Activation::kGelu ? geglu : swiglu)(gated.data(), ups.data(), gated.size(), gated.data());
  const auto run = [&](bool is_joined, int rows) {
    const auto layers = is_joined ? std::vector{both.layer(0, 2 * width)} : std::vector{gate, up};
    Floats y(x.size(), NAN);
    run_mlp({layers, norm, output, activation}, x.data(), added_to.data(),
            rows < 0 ? num_rows : rows, y.data());
    return y;
  };
  expect_alike(run, expected_output(output, added_to, gated, num_rows), size, "MLP");
}

void test_mlp_without_gate(Random& random) {
  const int num_rows = random.between(1, 30), size = random.between(8, 60);
  const int width = random.between(8, 90);
  const Matrix up(random, width, size), down(random, size, width);
  const Norm norm = random_norm(random, size);
  const Output output{down.layer(0, size), {random_norm(random, size), random_residual(random)}};
  const Floats x = random.normal(static_cast<size_t>(num_rows) * size);
  const auto activate = [](int activation, Floats x) {
    const Kernels& k = *kernels();
    const auto kernel = std::array{k.swiglu, k.geglu, k.geglu_erf, k.reglu, k.squared_reglu};
    kernel[activation](x.data(), nullptr, x.size(), x.data());
    return x;
  };
  for (int activation = 0; activation < NUM_ACTIVATIONS; activation++) {
    const Floats middle = activate(activation, multiplied(up.layer(0, width), normed(norm, x), num_rows));
    const auto run = [&](bool, int rows) {
      Floats y(x.size(), NAN);
      run_mlp({{up.layer(0, width)}, norm, output, static_cast<Activation>(activation)}, x.data(),
              x.data(), rows < 0 ? num_rows : rows, y.data());
      return y;
    };
    expect_alike(run, expected_output(output, x, middle, num_rows), size,
                 "MLP without a gate, activation " + std::to_string(activation));
  }
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
  const bool norms_last = random.chance();
  const Floats factors = random.chance() ? random.normal(num_rows) : Floats{};
  const auto turned = [&](const Layer& layer, const Norm& heads_norm, int heads) {
    Floats y = multiplied(layer, normed(norm, x), num_rows);
    if (!norms_last) y = normed(heads_norm, y);
    rotate(y.data(), rotation, num_rows, heads, dim, y.data());
    return norms_last ? normed(heads_norm, y) : y;
  };
  Floats q = turned(q_layer, q_norm, num_heads);
  const Floats k = turned(k_layer, k_norm, num_keys);
  const Floats v = normed(v_norm, multiplied(v_layer, normed(norm, x), num_rows));
  for (size_t i = 0; i < q.size() && !factors.empty(); i++) q[i] *= factors[i / q_size];
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
    run_attention({layers, norm, q_norm, k_norm, v_norm, output, sinks, num_heads, 0.3f, is_gated,
                   norms_last},
                  pool, step_of(rows), rotation, visibility,
                  factors.empty() ? nullptr : factors.data(), x.data(), rows, y.data());
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
    test_mlp_without_gate(random);
    test_attention_half(random);
  }
}

}  // namespace tests

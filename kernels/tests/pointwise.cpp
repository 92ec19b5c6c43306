// Operations on each row or each value by itself.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "kernels.h"
#include "operations/pointwise.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;

void test_rms_norm(Random& random) {
  const int num_rows = random.between(1, 40), size = random.between(1, 300);
  const float eps = random.chance() ? 1e-5f : 0.1f;
  const auto x = random.normal(static_cast<size_t>(num_rows) * size);
  const auto weight = random.chance() ? random.normal(size) : std::vector<float>{};
  std::vector<float> y(x.size(), NAN);
  std::vector<Expected> expected;
  for (int m = 0; m < num_rows; m++) {
    const float* row = x.data() + static_cast<size_t>(m) * size;
    double squares = 0;
    for (int i = 0; i < size; i++) squares += static_cast<double>(row[i]) * row[i];
    for (int i = 0; i < size; i++) {
      const double scaled =
          row[i] / std::sqrt(squares / size + eps) * (weight.empty() ? 1.0 : weight[i]);
      expected.push_back({scaled, 2e-6 * std::abs(scaled)});
    }
  }
  rms_norm(x.data(), weight.empty() ? nullptr : weight.data(), eps, num_rows, size, y.data());
  expect_close(y, expected, "rms_norm " + std::to_string(num_rows) + "x" + std::to_string(size));
}

void test_layer_norm(Random& random) {
  const int num_rows = random.between(1, 40), size = random.between(1, 300);
  const float eps = random.chance() ? 1e-5f : 0.1f;
  auto x = random.normal(static_cast<size_t>(num_rows) * size);
  const float shift = random.one_of({0, 3});
  for (float& value : x) value += shift;
  const auto weight = random.chance() ? random.normal(size) : std::vector<float>{};
  const auto bias = random.chance() ? random.normal(size) : std::vector<float>{};
  std::vector<Expected> expected;
  for (int m = 0; m < num_rows; m++) {
    const float* row = x.data() + static_cast<size_t>(m) * size;
    double mean = 0, squares = 0;
    for (int i = 0; i < size; i++) mean += row[i] / static_cast<double>(size);
    for (int i = 0; i < size; i++) squares += (row[i] - mean) * (row[i] - mean);
    const double deviation = std::sqrt(squares / size + eps);
    for (int i = 0; i < size; i++) {
      const double factor = (weight.empty() ? 1.0 : weight[i]) / deviation;
      const double value = (row[i] - mean) * factor + (bias.empty() ? 0 : bias[i]);
      // The mean is off by a rounding of its own.
      expected.push_back({value, 2e-6 * (std::abs(value) + (1 + shift) * std::abs(factor))});
    }
  }
  // In place, as a block does it.
  layer_norm(x.data(), weight.empty() ? nullptr : weight.data(),
             bias.empty() ? nullptr : bias.data(), eps, num_rows, size, x.data());
  expect_close(x, expected, "layer_norm " + std::to_string(num_rows) + "x" + std::to_string(size));
}

void test_other_activations(Random& random) {
  const size_t size = random.between(1, 3000);
  auto x = random.normal(size);
  for (float& value : x) value *= 3;
  x[0] = random.one_of({-200, -20, -5, 0, 20, 200});
  const auto up = random.normal(size);
  std::vector<Expected> gelu, relu, squared;
  for (size_t i = 0; i < size; i++) {
    const double part = 0.5 * x[i] * std::erfc(-x[i] / std::sqrt(2.0));
    const double positive = std::max(x[i], 0.0f);
    gelu.push_back({part * up[i], 4e-7 * (1 + std::abs(x[i])) * std::abs(up[i])});
    relu.push_back({positive * up[i], 1e-6 * std::abs(positive * up[i])});
    squared.push_back({positive * positive, 1e-6 * positive * positive});
  }
  std::vector<float> y(size, NAN);
  kernels()->geglu_erf(x.data(), up.data(), size, y.data());
  expect_close(y, gelu, "geglu_erf " + std::to_string(size));
  kernels()->reglu(x.data(), up.data(), size, y.data());
  expect_close(y, relu, "reglu " + std::to_string(size));
  kernels()->squared_reglu(x.data(), nullptr, size, y.data());
  expect_close(y, squared, "squared relu " + std::to_string(size));
}

void test_swiglu(Random& random) {
  const size_t size = random.between(1, 10000);
  auto gate = random.normal(size);
  const auto up = random.normal(size);
  gate[0] = random.one_of({-200, -90, -87, 0, 88, 200});
  std::vector<Expected> expected;
  for (size_t i = 0; i < size; i++) {
    const double value = gate[i] / (1 + std::exp(-static_cast<double>(gate[i]))) * up[i];
    expected.push_back({value, 1e-6 * std::abs(value) + 1e-30});
  }
  // In place, as a block does it.
  swiglu(gate.data(), up.data(), size, gate.data());
  expect_close(gate, expected, "swiglu " + std::to_string(size));
  std::vector<float> y(size, NAN);
  const std::vector<float> ones(size, 1);
  swiglu(up.data(), ones.data(), size, y.data());
  auto alone = up;
  swiglu(alone.data(), nullptr, size, alone.data());
  expect_same(alone, y, "silu " + std::to_string(size));
}

void test_geglu(Random& random) {
  const size_t size = random.between(1, 5000);
  auto gate = random.normal(size);
  const auto up = random.normal(size);
  gate[0] = random.one_of({-200, -20, -5, 0, 20, 200});
  std::vector<Expected> expected;
  for (size_t i = 0; i < size; i++) {
    const double x = gate[i];
    const double twice = 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    const double value = x / (1 + std::exp(-twice)) * up[i];
    // e^-u is as far off as u is, which is a sum of two.
    expected.push_back({value, 1e-6 * (1 + std::abs(twice)) * std::abs(value) + 1e-30});
  }
  geglu(gate.data(), up.data(), size, gate.data());
  expect_close(gate, expected, "geglu " + std::to_string(size));
}

void test_rotate(Random& random) {
  const int num_rows = random.between(1, 30), num_heads = random.between(1, 5);
  const int half = random.between(1, 40), dim = 2 * half + random.one_of({0, 0, 1, 16});
  const bool traditional = random.chance();
  auto x = random.normal(static_cast<size_t>(num_rows) * num_heads * dim);
  const auto angles = random.normal(static_cast<size_t>(num_rows) * half);
  std::vector<float> cosines, sines;
  for (float angle : angles) cosines.push_back(std::cos(angle)), sines.push_back(std::sin(angle));
  std::vector<Expected> expected;
  for (float number : x) expected.push_back({number, 0});
  for (int head = 0; head < num_rows * num_heads; head++)
    for (int i = 0; i < half; i++) {
      const size_t first = static_cast<size_t>(head) * dim + (traditional ? 2 * i : i);
      const size_t second = first + (traditional ? 1 : half);
      const size_t angle = static_cast<size_t>(head / num_heads) * half + i;
      const double a = x[first], b = x[second], c = cosines[angle], s = sines[angle];
      expected[first] = {a * c - b * s, 2e-7 * (std::abs(a * c) + std::abs(b * s))};
      expected[second] = {b * c + a * s, 2e-7 * (std::abs(a * s) + std::abs(b * c))};
    }
  std::vector<float> y(x.size(), NAN);
  const Rotation rotation{cosines.data(), sines.data(), half, traditional};
  rotate(x.data(), rotation, num_rows, num_heads, dim, y.data());
  expect_close(y, expected, "rotate " + std::to_string(half) + " of " + std::to_string(dim));
  rotate(x.data(), rotation, num_rows, num_heads, dim, x.data());
  expect_same(x, y, "rotate in place");
}

}  // namespace

void test_pointwise() {
  Random random(2);
  for (int i = 0; i < 60; i++) {
    set_num_threads(random.one_of({1, 2, 4}));
    test_rms_norm(random);
    test_layer_norm(random);
    test_other_activations(random);
    test_swiglu(random);
    test_geglu(random);
    test_rotate(random);
  }
}

}  // namespace tests

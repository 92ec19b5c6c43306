// Products of rows with adapters are those of the weights plus B (A x), and of the row and its adapter alone.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "check.h"
#include "operations/block.h"
#include "operations/linear.h"
#include "operations/low_rank.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;
using Floats = std::vector<float>;

/// Weights that adapters change.
struct Changed {
  int num_inputs, num_outputs;
  Floats plain;
  Weights weights;

  Changed(Random& random, int inputs, int outputs)
      : num_inputs(inputs), num_outputs(outputs),
        plain(random.normal(static_cast<size_t>(inputs) * outputs)),
        weights(std::make_shared<PackedWeights>(PlainWeights{.format = Format::kFloat32,
                                                             .num_matrices = 1,
                                                             .num_outputs = outputs,
                                                             .num_inputs = inputs,
                                                             .weights = plain.data()},
                                                kernels()->columns)) {}
};

/// A and B as floats and, if they are bfloat16, as these.
struct Change {
  int rank;
  bool is_bf16;
  Floats a, b;
  std::vector<uint16_t> a_bits, b_bits;

  Change(Random& random, const Changed& of)
      : rank(random.one_of({1, 2, 3, 4, 5, 8, 16, 33})), is_bf16(random.chance()),
        a(random.normal(static_cast<size_t>(of.num_inputs) * rank)),
        b(random.normal(static_cast<size_t>(of.num_outputs) * rank)) {
    for (float& x : a) a_bits.push_back(to_bf16(x)), x = is_bf16 ? from_bf16(a_bits.back()) : x;
    for (float& x : b) b_bits.push_back(to_bf16(x)), x = is_bf16 ? from_bf16(b_bits.back()) : x;
  }

  WeightChange change(const Weights& weights) const {
    if (is_bf16) return {weights, rank, true, a_bits.data(), b_bits.data()};
    return {weights, rank, false, a.data(), b.data()};
  }

  /// What is added to an output of a row, and what the sum of its terms' sizes is.
  std::pair<double, double> delta(const float* x, const Changed& of, int output) const {
    double total = 0, size = 0;
    for (int r = 0; r < rank; r++) {
      double inner = 0, inner_size = 0;
      for (int i = 0; i < of.num_inputs; i++) {
        const double term = double{x[i]} * a[static_cast<size_t>(i) * rank + r];
        inner += term, inner_size += std::abs(term);
      }
      const double weight = b[static_cast<size_t>(r) * of.num_outputs + output];
      total += inner * weight, size += inner_size * std::abs(weight);
    }
    return {total, size};
  }
};

/// Products of one input for the adapters of some rows, or for none.
Floats multiplied(const std::vector<Changed>& layers, const Floats& x, int num_rows,
                  const AdaptedRows* adapted) {
  size_t size = 0;
  for (const Changed& layer : layers) size += static_cast<size_t>(num_rows) * layer.num_outputs;
  Floats y(size, NAN);
  float* next = y.data();
  std::vector<LinearArgs> products;
  for (const Changed& layer : layers) {
    products.push_back({layer.weights->panels(), nullptr, nullptr, x.data(), next, num_rows});
    next += static_cast<size_t>(num_rows) * layer.num_outputs;
  }
  multiply(products, adapted);
  return y;
}

struct Case {
  int per_row, num_inputs;
  std::vector<Changed> layers;
  std::vector<std::vector<Change>> changes;  // of an adapter, of the first layers
  std::vector<std::shared_ptr<const Adapter>> adapters;
  std::vector<int> adapter_of;  // of each row of the step; -1 is none

  explicit Case(Random& random)
      : per_row(random.one_of({1, 1, 2, 3})),
        num_inputs(random.one_of({1, 7, 32, 60, 100, 576, 1024, 1030, 2100})) {
    const int num_layers = random.between(1, 3), num_adapters = random.between(1, 4);
    for (int i = 0; i < num_layers; i++) layers.emplace_back(random, num_inputs, random.between(1, 150));
    for (int i = 0; i < num_adapters; i++) {
      std::vector<WeightChange> own;
      changes.emplace_back();
      const int count = random.between(1, num_layers);
      changes.back().reserve(count);
      for (int j = 0; j < count; j++) {
        changes.back().emplace_back(random, layers[j]);
        own.push_back(changes.back()[j].change(layers[j].weights));
      }
      adapters.push_back(std::make_shared<Adapter>(own));
    }
    const int num_segments = random.between(1, 6);
    for (int i = 0; i < num_segments; i++)
      adapter_of.insert(adapter_of.end(), random.between(1, random.chance() ? 3 : 40),
                        random.between(-1, num_adapters - 1));
  }

  std::shared_ptr<const Adapter> adapter(int index) const {
    return index < 0 ? nullptr : adapters[index];
  }
  /// One segment for each row: those that follow each other with one adapter are one again.
  AdaptedRows rows() const {
    std::vector<RowSegment> segments;
    for (int index : adapter_of) segments.emplace_back(1, adapter(index));
    return AdaptedRows(segments);
  }
  int num_rows() const { return static_cast<int>(adapter_of.size()) * per_row; }
};

void test_products(Random& random) {
  const Case test(random);
  const Floats x = random.normal(static_cast<size_t>(test.num_rows()) * test.num_inputs);
  const AdaptedRows rows = test.rows();
  const Floats plain = multiplied(test.layers, x, test.num_rows(), nullptr);
  const Floats y = multiplied(test.layers, x, test.num_rows(), &rows);
  size_t at = 0;
  for (size_t layer = 0; layer < test.layers.size(); layer++) {
    const Changed& of = test.layers[layer];
    for (int m = 0; m < test.num_rows(); m++, at += of.num_outputs) {
      const std::span<const float> row = std::span(y).subspan(at, of.num_outputs);
      const std::span<const float> before = std::span(plain).subspan(at, of.num_outputs);
      const float* input = x.data() + static_cast<size_t>(m) * test.num_inputs;
      const int index = test.adapter_of[m / test.per_row];
      if (index < 0 || layer >= test.changes[index].size()) {
        expect_same(row, before, "a row that no adapter changes");
        continue;
      }
      std::vector<Expected> expected;
      for (int j = 0; j < of.num_outputs; j++) {
        const auto [delta, size] = test.changes[index][layer].delta(input, of, j);
        expected.push_back({before[j] + delta, 2e-6 * (1 + std::abs(before[j]) + size)});
      }
      expect_close(row, expected, "a row with an adapter");
    }
  }
}

/// A row has the same bits by itself.
void test_rows_alone(Random& random) {
  const Case test(random);
  const int num_rows = static_cast<int>(test.adapter_of.size());
  const Floats x = random.normal(static_cast<size_t>(num_rows) * test.num_inputs);
  const AdaptedRows rows = test.rows();
  const Floats y = multiplied(test.layers, x, num_rows, &rows);
  set_num_threads(random.one_of({1, 3}));
  for (int m = 0; m < num_rows; m += random.between(1, 9)) {
    const auto row = x.begin() + static_cast<size_t>(m) * test.num_inputs;
    const AdaptedRows own({{1, test.adapter(test.adapter_of[m])}});
    const Floats alone = multiplied(test.layers, Floats(row, row + test.num_inputs), 1, &own);
    size_t first = 0, at = 0;
    for (const Changed& layer : test.layers) {
      const size_t size = layer.num_outputs;
      expect_same(std::span(alone).subspan(at, size), std::span(y).subspan(first + m * size, size),
                  "a row with an adapter alone");
      first += num_rows * size, at += size;
    }
  }
}

/// The changes of a half's products come before what uses these: as of weights that are changed already.
void test_half(Random& random) {
  const int size = random.between(4, 40), width = random.between(4, 60), num_rows = random.between(1, 20);
  std::vector<Changed> layers, merged;
  std::vector<Change> changes;
  std::vector<WeightChange> given;
  changes.reserve(3);
  for (const auto& [inputs, outputs] : {std::pair{size, width}, {size, width}, {width, size}}) {
    layers.emplace_back(random, inputs, outputs);
    changes.emplace_back(random, layers.back());
    given.push_back(changes.back().change(layers.back().weights));
    Changed& of = layers.back();
    Changed whole = of;
    for (int i = 0; i < inputs; i++) {
      Floats unit(inputs);
      unit[i] = 1;
      for (int j = 0; j < outputs; j++)
        whole.plain[static_cast<size_t>(j) * inputs + i] +=
            static_cast<float>(changes.back().delta(unit.data(), of, j).first);
    }
    whole.weights = std::make_shared<PackedWeights>(PlainWeights{.format = Format::kFloat32,
                                                                 .num_matrices = 1,
                                                                 .num_outputs = outputs,
                                                                 .num_inputs = inputs,
                                                                 .weights = whole.plain.data()},
                                                    kernels()->columns);
    merged.push_back(whole);
  }
  const auto adapter = std::make_shared<Adapter>(given);
  expect(adapter->used().empty(), "no change is used yet");
  const float residual = random.one_of({0, 1, 2}) * 0.5f;
  const Norm norm{random.normal(size), 1e-5f}, last = random.chance() ? norm : Norm{};
  const auto half = [&](const std::vector<Changed>& of) {
    return MlpHalf{{{of[0].weights, {}}, {of[1].weights, {}}}, norm, {{of[2].weights, {}}, {last, residual}},
                   Activation::kSilu};
  };
  const Floats x = random.normal(static_cast<size_t>(num_rows) * size);
  Floats y(x.size(), NAN), expected(x.size(), NAN);
  const AdaptedRows rows({{num_rows, adapter}});
  run_mlp(half(layers), x.data(), x.data(), num_rows, y.data(), &rows);
  run_mlp(half(merged), x.data(), x.data(), num_rows, expected.data());
  double largest = 1;
  for (float value : expected) largest = std::max(largest, std::abs(double{value}));
  std::vector<Expected> close;
  for (float value : expected) close.push_back({value, 1e-4 * largest});
  expect_close(y, close, "an MLP with an adapter");
  expect(adapter->used() == std::vector{0, 1, 2}, "all changes are used");
}

template <typename Make>
void expect_refused(const Make& make, const std::string& what) {
  try {
    make();
  } catch (const std::invalid_argument&) {
    return;
  }
  expect(false, what + " is not refused");
}

void test_refused(Random& random) {
  const Changed of(random, 3, 2);
  const Change change(random, of);
  WeightChange given = change.change(of.weights);
  expect_refused([&] { Adapter({given, given}); }, "a second change of one matrix");
  for (int rank : {0, -1, MAX_RANK + 1}) {
    given.rank = rank;
    expect_refused([&] { Adapter({given}); }, "a rank of " + std::to_string(rank));
  }
  expect_refused([&] { AdaptedRows({{0, nullptr}}); }, "a segment without rows");
}

}  // namespace

void test_low_rank() {
  Random random(11);
  for (int i = 0; i < 60; i++) {
    set_num_threads(random.one_of({1, 2, 4}));
    test_products(random);
    test_rows_alone(random);
    test_half(random);
  }
  test_refused(random);
}

}  // namespace tests

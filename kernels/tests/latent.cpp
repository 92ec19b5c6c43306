// Latent attention against plain loops in double precision.
#include <cmath>
#include <numeric>

#include "check.h"
#include "operations/latent.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

/// Matrices `[matrices, outputs, inputs]` of floats.
struct Matrices {
  Floats weights;
  int num_matrices, num_outputs, num_inputs;

  Matrices(Random& random, int matrices, int outputs, int inputs)
      : weights(random.normal(static_cast<size_t>(matrices) * outputs * inputs)),
        num_matrices(matrices), num_outputs(outputs), num_inputs(inputs) {
    for (float& weight : weights) weight /= std::sqrt(static_cast<float>(inputs));
  }

  Weights packed() const {
    const PlainWeights plain{.format = Format::kFloat32,
                             .num_matrices = num_matrices,
                             .num_outputs = num_outputs,
                             .num_inputs = num_inputs,
                             .weights = weights.data()};
    return std::make_shared<PackedWeights>(plain, kernels()->columns);
  }
  Layer layer() const { return {packed(), {}}; }

  Doubles times(int matrix, const double* x) const {
    Doubles y(num_outputs);
    for (int i = 0; i < num_outputs; i++)
      for (int j = 0; j < num_inputs; j++)
        y[i] += weights[(static_cast<size_t>(matrix) * num_outputs + i) * num_inputs + j] * x[j];
    return y;
  }
};

Norm norm_of(Random& random, int size) { return {random.normal(size), 1e-5f}; }

Doubles normed(const Norm& norm, Doubles x) {
  double squares = 0;
  for (int i = 0; i < norm.size(); i++) squares += x[i] * x[i];
  for (int i = 0; i < norm.size(); i++)
    x[i] *= norm.weight[i] / std::sqrt(squares / norm.size() + norm.eps);
  return x;
}

/// A half of random sizes, its rows, and what plain loops make of them.
class Case {
 public:
  explicit Case(Random& random)
      : num_rows_(random.between(1, 25)), size_(random.between(8, 40)),
        heads_(random.between(1, 5)), latent_(random.between(3, 50)), plain_(random.between(3, 20)),
        half_(random.between(0, 6)), value_(random.between(3, 20)),
        has_q_layers_(random.chance()), is_expanded_(random.chance()), has_norm_(random.chance()),
        q_a_(random, 1, random.between(4, 30), size_),
        q_(random, 1, heads_ * query_dim(), has_q_layers_ ? q_a_.num_outputs : size_),
        kv_(random, 1, latent_ + 2 * half_, size_), embed_(random, heads_, latent_, plain_),
        unembed_(random, heads_, value_, latent_),
        expand_(random, 1, heads_ * (plain_ + value_), latent_),
        o_(random, 1, size_, heads_ * value_), norm_(norm_of(random, size_)),
        q_norm_(norm_of(random, q_a_.num_outputs)), latent_norm_(norm_of(random, latent_)),
        residual_(random.one_of({0, 1, 2}) * 0.75f),
        x_(random.normal(static_cast<size_t>(num_rows_) * size_)),
        angles_(random.normal(static_cast<size_t>(num_rows_) * half_ + 1)),
        factors_(random.chance() ? random.normal(num_rows_) : Floats{}),
        traditional_(random.chance()) {
    for (const float angle : angles_)
      cosines_.push_back(std::cos(angle)), sines_.push_back(std::sin(angle));
  }

  void check(Random& random) const {
    set_num_threads(1);
    const Floats y = run(num_rows_);
    const std::string what = std::string(is_expanded_ ? "expanded" : "latent") + " attention";
    expect_close(y, expected(), what);
    set_num_threads(random.one_of({2, 4}));
    expect_same(run(num_rows_), y, "threads, " + what);
    const int rows = random.between(1, num_rows_);
    expect_same(run(rows), std::span(y).first(static_cast<size_t>(rows) * size_), "fewer, " + what);
  }

 private:
  int num_rows_, size_, heads_, latent_, plain_, half_, value_;
  bool has_q_layers_, is_expanded_, has_norm_;
  Matrices q_a_, q_, kv_, embed_, unembed_, expand_, o_;
  Norm norm_, q_norm_, latent_norm_;
  float residual_;
  Floats x_, angles_, factors_, cosines_, sines_;
  bool traditional_;

  int query_dim() const { return plain_ + 2 * half_; }

  Floats run(int num_rows) const {
    LatentHalf half{.inputs = {(has_q_layers_ ? q_a_ : q_).layer(), kv_.layer()},
                    .q = {},
                    .norm = has_norm_ ? norm_ : Norm{},
                    .q_norm = q_norm_,
                    .latent_norm = latent_norm_,
                    .embed = is_expanded_ ? nullptr : embed_.packed(),
                    .unembed = is_expanded_ ? nullptr : unembed_.packed(),
                    .expand = {},
                    .output = {o_.layer(), {{}, residual_}},
                    .num_heads = heads_,
                    .scale = 0.3f};
    if (has_q_layers_) half.q.push_back(q_.layer());
    if (is_expanded_) half.expand.push_back(expand_.layer());
    const int columns = kernels()->columns;
    Pool pool(is_expanded_ ? PoolLayout{heads_, 4, query_dim(), value_, CacheType::kFloat32, columns}
                           : PoolLayout{1, 4, latent_ + 2 * half_, latent_, CacheType::kFloat32,
                                        columns, false, true},
              8);
    Step step{{{0, num_rows, 0, 0}}, std::vector<int32_t>(8), std::vector<int32_t>(num_rows)};
    std::iota(step.tables.rbegin(), step.tables.rend(), 0);
    for (int i = 0; i < num_rows; i++) step.slots[i] = step.tables[i / 4] * 4 + i % 4;
    Floats y(static_cast<size_t>(num_rows) * size_, NAN);
    run_latent(half, pool, step, {cosines_.data(), sines_.data(), half_, traditional_}, 0,
               factors_.empty() ? nullptr : factors_.data(), x_.data(), num_rows, y.data());
    return y;
  }

  /// Rotate the last 2 * half_ numbers.
  void rotate(int row, Doubles& x) const {
    double* first = x.data() + x.size() - 2 * half_;
    for (int i = 0; i < half_; i++) {
      double& a = first[traditional_ ? 2 * i : i];
      double& b = first[traditional_ ? 2 * i + 1 : i + half_];
      const double c = cosines_[row * half_ + i], s = sines_[row * half_ + i];
      const double turned = a * c - b * s;
      b = b * c + a * s;
      a = turned;
    }
  }

  /// Of all heads, keys `[query_dim]` and values `[value]`.
  struct Row {
    std::vector<Doubles> queries, keys, values;
  };

  Row row_of(int row) const {
    const float* x = x_.data() + static_cast<size_t>(row) * size_;
    Doubles input(x, x + size_);
    if (has_norm_) input = normed(norm_, input);
    Doubles q = has_q_layers_ ? normed(q_norm_, q_a_.times(0, input.data())) : input;
    q = q_.times(0, q.data());
    Doubles both = kv_.times(0, input.data());
    rotate(row, both);
    both = normed(latent_norm_, both);
    const Doubles expanded = expand_.times(0, both.data());
    Row made;
    for (int head = 0; head < heads_; head++) {
      const auto at = q.begin() + head * query_dim();
      Doubles query(at, at + query_dim());
      for (double& number : query) number *= factors_.empty() ? 1 : factors_[row];
      rotate(row, query);
      Doubles key, value;
      if (is_expanded_) {
        const auto own = expanded.begin() + head * (plain_ + value_);
        key.assign(own, own + plain_);
        value.assign(own + plain_, own + plain_ + value_);
      } else {
        for (int i = 0; i < plain_; i++) {
          double sum = 0;
          for (int j = 0; j < latent_; j++)
            sum += embed_.weights[(static_cast<size_t>(head) * latent_ + j) * plain_ + i] * both[j];
          key.push_back(sum);
        }
        value = unembed_.times(head, both.data());
      }
      key.insert(key.end(), both.end() - 2 * half_, both.end());
      made.queries.push_back(query);
      made.keys.push_back(key);
      made.values.push_back(value);
    }
    return made;
  }

  std::vector<Expected> expected() const {
    std::vector<Row> rows;
    std::vector<Expected> results;
    for (int row = 0; row < num_rows_; row++) {
      rows.push_back(row_of(row));
      Doubles attended;
      for (int head = 0; head < heads_; head++) {
        Doubles sums(value_);
        double total = 0;
        for (const Row& key : rows) {
          const Doubles& q = rows[row].queries[head];
          const double score =
              std::inner_product(q.begin(), q.end(), key.keys[head].begin(), 0.0);
          const double weight = std::exp(0.3f * score);
          total += weight;
          for (int i = 0; i < value_; i++) sums[i] += weight * key.values[head][i];
        }
        for (const double sum : sums) attended.push_back(sum / total);
      }
      const Doubles y = o_.times(0, attended.data());
      for (int i = 0; i < size_; i++) {
        const double x = x_[static_cast<size_t>(row) * size_ + i];
        results.push_back({residual_ ? x + residual_ * y[i] : y[i], 2e-4});
      }
    }
    return results;
  }
};

}  // namespace

void test_latent() {
  Random random(11);
  for (int i = 0; i < 60; i++) Case(random).check(random);
}

}  // namespace tests

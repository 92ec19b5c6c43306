// Attention of ragged steps over a pool whose blocks lie scattered.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "check.h"
#include "operations/attention.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;

/// Tokens of a request before the step, and in it.
struct Request {
  int num_before;
  int num_rows;

  int num_tokens() const { return num_before + num_rows; }
};

struct Shape {
  std::vector<Request> requests;
  PoolLayout layout;
  int group;  // query heads of a key head
  int window;
  bool is_chunked;
  float soft_cap;
  bool has_sinks;
  int num_padding;  // rows beyond those of the step

  int num_query_heads() const { return layout.num_heads * group; }
  /// Whether queries and weights are rounded on this processor.
  bool rounds() const {
    if (layout.type == CacheType::kFloat32 || !layout.rounds_inputs) return false;
    if (layout.type == CacheType::kInt8) return kernels()->min_input_bits < 32;
    const std::string name = kernels()->name;
    return name == "avx512_bf16" || name == "avx512_amx" || name == "emulated_amx";
  }
};

std::string describe(const Shape& shape) {
  const PoolLayout& pool = shape.layout;
  std::ostringstream text;
  text << "attention: " << pool.num_heads << "x" << shape.group << " heads of " << pool.key_dim
       << "," << pool.value_dim << ", blocks of " << pool.block_size
       << ", type " << static_cast<int>(pool.type) << (pool.is_latent ? ", latent" : "")
       << (shape.rounds() ? ", rounded" : "") << ", window " << shape.window
       << (shape.is_chunked ? ", chunked" : "") << ", cap "
       << shape.soft_cap << (shape.has_sinks ? ", sinks," : ",");
  for (const Request& r : shape.requests) text << " " << r.num_before << "+" << r.num_rows;
  return text.str();
}

/// Replace numbers by what integers with a common scale make of them.
void round(std::span<float> vector, float top = 127) {
  float largest = 0;
  for (const float x : vector) largest = std::max(largest, std::abs(x));
  const double factor = largest > 0 ? top / largest : 0;
  for (float& x : vector) x = static_cast<float>(std::nearbyint(x * factor)) * (largest / top);
}

/// Multiply every `n` numbers by a Hadamard matrix, in the kernels' order of sums.
void rotate(std::span<float> vector, size_t n) {
  for (size_t half = 1; half < n; half *= 2) {
    const std::vector<float> x(vector.begin(), vector.end());
    for (size_t i = 0; i < x.size(); i++)
      vector[i] = i / half % 2 == 0 ? x[i] + x[i + half] : x[i - half] - x[i];
  }
}

/// Replace vectors of `dim` numbers, side by side, by what the pool stores.
void store(std::vector<float>& numbers, size_t dim, CacheType type, size_t rotated = 1) {
  if (type == CacheType::kBfloat16)
    for (float& x : numbers) x = from_bf16(to_bf16(x));
  if (type != CacheType::kInt8) return;
  for (size_t i = 0; i < numbers.size(); i += dim) {
    const std::span<float> vector{numbers.data() + i, dim};
    rotate(vector, rotated);
    round(vector);
    rotate(vector, rotated);
    for (float& x : vector) x /= static_cast<float>(rotated);
  }
}

/// A step, its inputs, and a pool that holds what came before it.
class Case {
 public:
  Case(Random& random, const Shape& shape)
      : shape_(shape), free_blocks_(all_blocks(shape)), pool_(shape.layout, num_free()) {
    fill_with_nan();
    sinks_ = random.normal(shape.num_query_heads());
    for (const Request& request : shape_.requests) add(random, request);
    q_ = random.normal(num_rows() * shape.num_query_heads() * shape.layout.key_dim);
    scaled_q_ = q_;
    for (float& x : scaled_q_) x *= scale();
    if (shape.rounds()) round_queries();
  }

  void check(Random& random) {
    set_num_threads(1);
    const std::vector<float> y = run(step_);
    expect_close(y, expected(), describe(shape_));
    set_num_threads(random.one_of({2, 4}));
    expect_same(run(step_), y, "split, " + describe(shape_));
    // Each request alone; the other rows keep their outputs.
    y_ = y;
    for (const Slice& slice : step_.slices) run_alone(slice);
    expect_same(y_, y, "alone, " + describe(shape_));
  }

 private:
  const Shape shape_;
  std::vector<int> free_blocks_;
  Pool pool_;
  Step step_;
  std::vector<float> sinks_, q_, scaled_q_, keys_, values_, y_;
  // Of each request, all its keys and values `[tokens, heads, dim]` as the pool holds them.
  std::vector<std::vector<float>> all_keys_, all_values_;

  size_t num_rows() const { return step_.num_rows() + shape_.num_padding; }
  size_t key_size() const { return shape_.layout.num_heads * shape_.layout.key_dim; }
  size_t value_size() const { return shape_.layout.num_heads * shape_.layout.value_dim; }
  size_t output_size() const { return shape_.num_query_heads() * shape_.layout.value_dim; }

  static std::vector<int> all_blocks(const Shape& shape) {
    int num_blocks = 3;
    for (const Request& request : shape.requests)
      num_blocks += request.num_tokens() / shape.layout.block_size + 1;
    std::vector<int> blocks(num_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    return blocks;
  }

  int num_free() const { return static_cast<int>(free_blocks_.size()); }
  int block_size() const { return shape_.layout.block_size; }

  /// Slots that are not written must not be read.
  void fill_with_nan() {
    const std::vector<float> nan(std::max(key_size(), value_size()), NAN);
    for (int slot = 0; slot < num_free() * block_size(); slot++)
      pool_.write(&slot, 1, nan.data(), nan.data());
  }

  int take_block(Random& random) {
    std::swap(free_blocks_.back(), free_blocks_[random.between(0, num_free() - 1)]);
    const int block = free_blocks_.back();
    free_blocks_.pop_back();
    return block;
  }

  void add(Random& random, const Request& request) {
    const int first_block = static_cast<int>(step_.tables.size());
    for (int i = 0; i < request.num_tokens(); i += block_size())
      step_.tables.push_back(take_block(random));
    const int until = random.chance() ? random.between(0, request.num_tokens()) : 0;
    step_.slices.push_back(
        {step_.num_rows(), request.num_rows, request.num_before, first_block, until});
    auto keys = random.normal(request.num_tokens() * key_size());
    auto values = random.normal(request.num_tokens() * value_size());
    if (shape_.layout.is_latent) take_values(keys, values);
    for (int i = 0; i < request.num_tokens(); i++) {
      const int slot =
          step_.tables[first_block + i / block_size()] * block_size() + i % block_size();
      const float* key = keys.data() + i * key_size();
      const float* value = values.data() + i * value_size();
      if (i < request.num_before) {
        pool_.write(&slot, 1, key, value);
        continue;
      }
      step_.slots.push_back(slot);
      keys_.insert(keys_.end(), key, key + key_size());
      values_.insert(values_.end(), value, value + value_size());
    }
    const PoolLayout& pool = shape_.layout;
    store(keys, pool.key_dim, pool.type, pool.rotated());
    store(values, pool.value_dim, pool.type);
    all_keys_.push_back(std::move(keys));
    all_values_.push_back(std::move(values));
  }

  /// Values are the first numbers of keys.
  void take_values(const std::vector<float>& keys, std::vector<float>& values) const {
    const size_t dim = shape_.layout.value_dim;
    for (size_t i = 0; i < values.size(); i++)
      values[i] = keys[i / dim * shape_.layout.key_dim + i % dim];
  }

  AttentionArgs args(float* y) const {
    return {.pool = shape_.layout,
            .keys = pool_.keys(),
            .values = pool_.values(),
            .q = q_.data(),
            .y = y,
            .num_query_heads = shape_.num_query_heads(),
            .scale = scale(),
            .soft_cap = shape_.soft_cap,
            .window = shape_.window,
            .is_chunked = shape_.is_chunked,
            .sinks = shape_.has_sinks ? sinks_.data() : nullptr,
            .span_blocks = 0};
  }

  float scale() const { return 1 / std::sqrt(static_cast<float>(shape_.layout.key_dim)); }

  void round_queries() {
    const PoolLayout& pool = shape_.layout;
    if (pool.type == CacheType::kBfloat16) return store(scaled_q_, 1, pool.type);
    const int64_t most = INT32_MAX / (127 * pool.key_dim);  // so that no sum of products overflows
    for (size_t i = 0; i < scaled_q_.size(); i += pool.key_dim) {
      const std::span<float> query{scaled_q_.data() + i, static_cast<size_t>(pool.key_dim)};
      rotate(query, pool.rotated());
      round(query, static_cast<float>(std::min<int64_t>(32767, most)));
      rotate(query, pool.rotated());
      for (float& x : query) x /= static_cast<float>(pool.rotated());
    }
  }

  std::vector<float> run(const Step& step) {
    std::vector<float> y(num_rows() * output_size(), NAN);
    write_and_attend(pool_, step, args(y.data()), keys_.data(), values_.data(),
                     static_cast<int>(num_rows()));
    return y;
  }

  void run_alone(const Slice& slice) {
    Step step{{slice}, step_.tables, {}};
    step.slices[0].first_row = 0;
    const auto slots = step_.slots.begin() + slice.first_row;
    step.slots.assign(slots, slots + slice.num_rows);
    AttentionArgs own = args(y_.data() + slice.first_row * output_size());
    own.q += slice.first_row * static_cast<size_t>(shape_.num_query_heads()) *
             shape_.layout.key_dim;
    write_and_attend(pool_, step, own, keys_.data() + slice.first_row * key_size(),
                     values_.data() + slice.first_row * value_size(), slice.num_rows);
  }

  std::vector<Expected> expected() const {
    std::vector<Expected> all;
    for (size_t i = 0; i < step_.slices.size(); i++)
      for (int row = 0; row < step_.slices[i].num_rows; row++)
        for (int head = 0; head < shape_.num_query_heads(); head++) attend(i, row, head, all);
    all.resize(num_rows() * output_size(), {0, 0});
    return all;
  }

  double score(size_t request, size_t row, int head, int key) const {
    const size_t dim = shape_.layout.key_dim;
    const float* q = scaled_q_.data() + (row * shape_.num_query_heads() + head) * dim;
    const float* k = all_keys_[request].data() + key * key_size() + head / shape_.group * dim;
    double sum = 0;
    for (size_t i = 0; i < dim; i++) sum += static_cast<double>(q[i]) * k[i];
    return shape_.soft_cap > 0 ? shape_.soft_cap * std::tanh(sum / shape_.soft_cap) : sum;
  }

  void attend(size_t request, int row, int head, std::vector<Expected>& results) const {
    const Slice& slice = step_.slices[request];
    const int position = slice.first_position + row;
    int first = shape_.window > 0 ? std::max(0, position - shape_.window + 1) : 0;
    if (shape_.is_chunked && shape_.window > 0) first = position - position % shape_.window;
    const size_t dim = shape_.layout.value_dim;
    std::vector<double> sums(dim), magnitudes(dim);
    // Scores of normal numbers are small: no maximum needs to be taken away.
    double largest = 0;
    double total = shape_.has_sinks ? std::exp(static_cast<double>(sinks_[head])) : 0;
    for (int key = first; key <= std::max(position, slice.until - 1); key++) {
      const double weight = std::exp(score(request, slice.first_row + row, head, key));
      const float* value =
          all_values_[request].data() + key * value_size() + head / shape_.group * dim;
      total += weight;
      for (size_t i = 0; i < dim; i++) {
        sums[i] += weight * value[i];
        magnitudes[i] += weight * std::abs(value[i]);
        largest = std::max(largest, weight * std::abs(value[i]));
      }
    }
    const double tolerance = !shape_.rounds() ? 1e-5 : is_int8() ? 1e-4 : 1.0 / 256;
    // A half of the last bit of the integers, the largest of which is the largest weight.
    const double rounding = shape_.rounds() && is_int8() ? (position + 1) * largest / 32767 : 0;
    for (size_t i = 0; i < dim; i++)
      results.push_back({sums[i] / total, (tolerance * magnitudes[i] + rounding) / total});
  }

  bool is_int8() const { return shape_.layout.type == CacheType::kInt8; }
};

CacheType random_type(Random& random) { return static_cast<CacheType>(random.between(0, 2)); }

Shape random_shape(Random& random) {
  const int columns = kernels()->columns;
  const int group = random.one_of({1, 2, 3, 5, 48});
  Shape shape{.requests = {},
              .layout = {.num_heads = random.between(1, 3),
                         .block_size = random.one_of({1, 5, 16, 32, 40}),
                         .key_dim = random.one_of({random.between(1, 80), 64, 96, 256, 512, 576}),
                         .value_dim = random.one_of({random.between(1, 80), 64, 128, 512}),
                         .type = random_type(random),
                         .columns = columns,
                         .rounds_inputs = random.chance()},
              .group = group,
              .window = random.chance() ? random.between(1, 300) : 0,
              .is_chunked = random.chance(),
              .soft_cap = random.chance() ? 2.0f : 0.0f,
              .has_sinks = random.chance(),
              .num_padding = random.one_of({0, 3})};
  shape.layout.is_latent = shape.num_padding == 0 && shape.layout.type != CacheType::kInt8 &&
                           shape.layout.value_dim <= shape.layout.key_dim && random.chance();
  shape.layout.rounds_inputs &= !shape.layout.is_latent;
  return shape;
}

void test_ragged_steps(Random& random) {
  for (int i = 0; i < 60; i++) {
    Shape shape = random_shape(random);
    const int num_requests = random.between(1, 6);
    for (int j = 0; j < num_requests; j++)
      shape.requests.push_back({random.one_of({0, 1, 31, 32, random.between(0, 120)}),
                                random.one_of({1, 1, 2, random.between(1, 70)})});
    Case(random, shape).check(random);
  }
}

/// So few rows that the spans of their contexts are split among threads.
void test_long_contexts(Random& random) {
  for (int i = 0; i < 36; i++) {
    Shape shape = random_shape(random);
    shape.requests = {{random.between(200, 1500), random.one_of({1, 1, 7})}};
    if (random.chance()) shape.requests.push_back({random.one_of({0, 255, 256, 600}), 1});
    if (random.chance()) shape.window = random.between(200, 1000);
    Case(random, shape).check(random);
  }
}

std::vector<uint8_t> bytes(const Pool& pool) {
  std::vector<uint8_t> all;
  for (const Memory* memory : {&pool.key_memory(), &pool.value_memory()}) {
    const auto* data = static_cast<const uint8_t*>(memory->data());
    all.insert(all.end(), data, data + memory->size());
  }
  return all;
}

/// What is stored of a token depends on it alone.
void test_tokens_written_together_or_alone(Random& random, CacheType type) {
  const PoolLayout layout{random.between(1, 3), random.one_of({1, 5, 32}), random.between(1, 80),
                          random.between(1, 80), type, kernels()->columns};
  const int num_rows = random.between(2, 40), first = random.between(0, 6);
  const size_t key_size = layout.num_heads * layout.key_dim;
  const size_t value_size = layout.num_heads * layout.value_dim;
  const auto keys = random.normal(num_rows * key_size);
  const auto values = random.normal(num_rows * value_size);
  std::vector<int> slots(num_rows);
  std::iota(slots.begin(), slots.end(), first);
  const int num_blocks = slots.back() / layout.block_size + 1;
  Pool together(layout, num_blocks), alone(layout, num_blocks);
  together.write(slots.data(), num_rows, keys.data(), values.data());
  for (int row = num_rows; row-- > 0;) {
    const float* key = keys.data() + row * key_size;
    const float* value = values.data() + row * value_size;
    // What was there before does not matter.
    alone.write(&slots[row], 1, keys.data(), values.data());
    alone.write(&slots[row], 1, key, value);
  }
  expect(bytes(together) == bytes(alone), "a token is stored as if it were alone");
}

/// The first output of one token that attends to itself alone.
float own_value(const PoolLayout& like, std::vector<float> key, const std::vector<float>& value) {
  PoolLayout layout = like;
  layout.key_dim = static_cast<int>(key.size());
  layout.value_dim = static_cast<int>(value.size());
  Pool pool(layout, 1);
  const Step step{{{0, 1, 0, 0}}, {0}, {0}};
  std::vector<float> q(key.size(), 1), y(value.size(), 7);
  const AttentionArgs args{.pool = layout,
                           .keys = pool.keys(),
                           .values = pool.values(),
                           .q = q.data(),
                           .y = y.data(),
                           .num_query_heads = 1,
                           .scale = 1,
                           .soft_cap = 0,
                           .window = 0,
                           .is_chunked = false,
                           .sinks = nullptr,
                           .span_blocks = 0};
  write_and_attend(pool, step, args, key.data(), value.data(), 1);
  return y[0];
}

void test_extreme_numbers(CacheType type, bool rounds_inputs) {
  const PoolLayout layout{1, 4, 1, 1, type, kernels()->columns, rounds_inputs};
  for (const int dim : {1, 18, 32}) {
    const auto with_last = [dim](float x) {
      std::vector<float> numbers(dim, x / 4);
      numbers[dim - 1] = x;
      return numbers;
    };
    const std::vector<float> zero = with_last(0), one(dim, 1);
    expect(own_value(layout, zero, zero) == 0, "zeros are zeros");
    expect(own_value(layout, with_last(1e-40f), with_last(1e-40f)) < 1e-39f, "tiny numbers");
    expect(std::isfinite(own_value(layout, one, with_last(3e38f))), "huge numbers");
    for (const float x : {NAN, std::bit_cast<float>(0x7fc00001), INFINITY, -INFINITY}) {
      std::vector<float> some = zero;
      some[dim / 2] = some[0] = x;
      const float y = own_value(layout, one, some);
      expect(type == CacheType::kInt8 ? std::isnan(y) : !std::isfinite(y),
             "a value that is no number is kept");
      expect(x < 0 || std::isnan(own_value(layout, some, one)), "a key that is no number is kept");
    }
  }
}

void test_copied_block(Random& random, CacheType type) {
  const PoolLayout layout{2, 4, 3, 5, type, kernels()->columns};
  Pool pool(layout, 3);
  const auto numbers = random.normal(10);
  for (int slot = 4; slot < 8; slot++) pool.write(&slot, 1, numbers.data(), numbers.data());
  pool.copy(1, 2);
  const auto is_copied = [](const Memory& memory) {
    const auto* data = static_cast<const uint8_t*>(memory.data());
    const size_t size = memory.size() / 3;
    return std::equal(data + size, data + 2 * size, data + 2 * size);
  };
  expect(is_copied(pool.key_memory()) && is_copied(pool.value_memory()), "a block is copied");
  bool is_rejected = false;
  try {
    pool.copy(0, 3);
  } catch (const std::invalid_argument&) {
    is_rejected = true;
  }
  expect(is_rejected, "a block that does not exist is rejected");
}

}  // namespace

void test_attention() {
  Random random(3);
  test_ragged_steps(random);
  test_long_contexts(random);
  for (const CacheType type : {CacheType::kFloat32, CacheType::kBfloat16, CacheType::kInt8}) {
    test_copied_block(random, type);
    for (const bool rounds_inputs : {false, true}) test_extreme_numbers(type, rounds_inputs);
    for (int i = 0; i < 20; i++) test_tokens_written_together_or_alone(random, type);
  }
}

}  // namespace tests

// The layers of a stack are their halves, called one after the other, bit for bit.
#include "operations/stack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "check.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;
using Floats = std::vector<float>;

constexpr int HEADS = 2, DIM = 8, BLOCK_SIZE = 4, NUM_BLOCKS = 8;

Layer random_layer(Random& random, int num_outputs, int num_inputs) {
  const Floats weights = random.normal(static_cast<size_t>(num_outputs) * num_inputs);
  const PlainWeights plain{.format = Format::kFloat32,
                           .num_matrices = 1,
                           .num_outputs = num_outputs,
                           .num_inputs = num_inputs,
                           .weights = weights.data()};
  return {std::make_shared<PackedWeights>(plain, kernels()->columns), {}};
}

Norm norm_of(int size) { return {Floats(size, 0.5f), 1e-5f}; }

/// Rows of one request, in blocks in another order.
std::shared_ptr<const Step> step_of(int num_rows, bool is_reversed) {
  Step step{{{0, num_rows, 0, 0}}, std::vector<int32_t>(NUM_BLOCKS),
            std::vector<int32_t>(num_rows)};
  std::iota(step.tables.begin(), step.tables.end(), 0);
  if (is_reversed) std::reverse(step.tables.begin(), step.tables.end());
  for (int i = 0; i < num_rows; i++)
    step.slots[i] = step.tables[i / BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE;
  return std::make_shared<Step>(std::move(step));
}

/// A stack, and what computes the same in steps, of x and of what the half before had as x.
struct Model {
  using Half = std::function<void(const Floats& x, const Floats& before, Floats& y)>;

  Stack stack;
  std::vector<Half> halves;
  const StackStep& step;
  const int size;

  Model(const StackStep& of, int row_size) : step(of), size(row_size) {}

  void add_attention(Random& random) {
    const auto half = std::make_shared<AttentionHalf>(AttentionHalf{
        .qkv = {random_layer(random, 3 * HEADS * DIM, size)},
        .norm = norm_of(size),
        .output = {random_layer(random, size, HEADS * DIM), {.norm = {}, .residual = 1}},
        .num_heads = HEADS,
        .scale = 0.3f});
    const PoolLayout layout{HEADS, BLOCK_SIZE, DIM, DIM, CacheType::kFloat32, kernels()->columns};
    const Stack::Use use{random.between(0, 1), random.between(-1, 1)};
    const Visibility visibility{random.one_of({0, 3}), random.chance(), 0};
    stack.add_attention(half, std::make_shared<Pool>(layout, NUM_BLOCKS), use, visibility);
    const auto pool = std::make_shared<Pool>(layout, NUM_BLOCKS);
    const Rotation none{nullptr, nullptr, 0, false};
    halves.push_back([=, this](const Floats& x, const Floats&, Floats& y) {
      run_attention(*half, *pool, *step.steps[use.step],
                    use.rotation < 0 ? none : step.rotations[use.rotation], visibility, nullptr,
                    x.data(), step.num_rows, y.data());
    });
  }

  void add_mlp(Random& random, bool is_parallel) {
    const int width = random.between(4, 40);
    const auto half = std::make_shared<MlpHalf>(
        MlpHalf{{random_layer(random, 2 * width, size)},
                norm_of(size),
                {random_layer(random, size, width), {norm_of(size), 0.75f}},
                Activation::kSilu});
    if (is_parallel) half->output.ending = {{}, 1};
    stack.add_mlp(half, is_parallel);
    halves.push_back([=, this](const Floats& x, const Floats& before, Floats& y) {
      run_mlp(*half, is_parallel ? before.data() : x.data(), x.data(), step.num_rows, y.data());
    });
  }

  void add_convolution(Random& random) {
    const auto mixer = std::make_shared<Mixer>(
        Mixer{.layers = {random_layer(random, 3 * size, size)},
              .norm = norm_of(size),
              .recurrence = Recurrence::kNone,
              .q = {0, 0, 0},
              .k = {0, 0, 0},
              .v = {0, 2 * size, size},
              .z = {0, size, size},
              .b = {0, 0, size},
              .a = {0, 0, 0},
              .num_key_heads = 1,
              .num_heads = 1,
              .key_dim = 0,
              .value_dim = size,
              .taps = random.normal(static_cast<size_t>(3) * size),
              .output = {random_layer(random, size, size), {.norm = {}, .residual = 1}}});
    mixer->check();
    const auto make_pool = [&] {
      auto pool = std::make_shared<StatePool>(mixer->state_size());
      pool->grow(step.states->num_cells);
      return pool;
    };
    stack.add_mixer(mixer, make_pool());
    const auto pool = make_pool();
    halves.push_back([=, this](const Floats& x, const Floats&, Floats& y) {
      run_mixer(*mixer, *pool, *step.states, x.data(), y.data());
    });
  }

  Floats one_by_one(const Floats& x) const {
    Floats before, input = x;
    for (const Half& half : halves) {
      Floats y(x.size(), NAN);
      half(input, before, y);
      before = std::exchange(input, y);
    }
    return input;
  }
};

void test_random_stack(Random& random) {
  const int num_rows = random.between(1, 20), size = random.between(4, 40);
  std::array<Floats, 4> angles;
  for (Floats& of : angles) of = random.normal(static_cast<size_t>(num_rows) * DIM / 2);
  const StackStep step{
      num_rows,
      {step_of(num_rows, false), step_of(num_rows, true)},
      {{angles[0].data(), angles[1].data(), DIM / 2, false},
       {angles[2].data(), angles[3].data(), DIM / 4, true}},
      std::make_shared<StateStep>(std::vector<StatePiece>{{0, num_rows, -1, 0}})};
  Model model(step, size);
  const int num_layers = random.between(1, 4);
  for (int i = 0; i < num_layers; i++) {
    random.chance() ? model.add_attention(random) : model.add_convolution(random);
    if (random.chance()) model.add_mlp(random, random.chance());
  }
  const Floats x = random.normal(static_cast<size_t>(num_rows) * size);
  // The second time over what the first one has written.
  for (int time = 0; time < 2; time++) {
    Floats y(x.size(), NAN);
    model.stack.run(step, x.data(), y.data());
    expect_same(y, model.one_by_one(x), "a stack of " + std::to_string(num_layers));
  }
}

template <typename Add>
void expect_refused(const Add& add, const std::string& what) {
  try {
    add();
    expect(false, what);
  } catch (const std::invalid_argument&) {
  }
}

void test_what_does_not_fit(Random& random) {
  const StackStep step{};
  Model model(step, 8);
  expect_refused([&] { model.add_mlp(random, true); }, "an MLP with the input of no half");
  model.add_mlp(random, false);
  const auto half = std::make_shared<MlpHalf>(MlpHalf{{random_layer(random, 8, 12)},
                                                      {},
                                                      {random_layer(random, 12, 4), {{}, 1}},
                                                      Activation::kSilu});
  expect_refused([&] { model.stack.add_mlp(half, false); }, "a layer of another size");
}

}  // namespace

void test_stack() {
  Random random(11);
  for (int i = 0; i < 60; i++) {
    set_num_threads(random.one_of({1, 2, 4}));
    test_random_stack(random);
  }
  test_what_does_not_fit(random);
}

}  // namespace tests

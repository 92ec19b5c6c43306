#include "operations.h"

#include <algorithm>

namespace native {

namespace {

// Rows, or numbers, that are worth a part of their own.
constexpr int ROWS_PER_PART = 8;
constexpr size_t NUMBERS_PER_PART = 4096;
// Of one product.  More of them would be shared out more evenly, but claiming one takes longer
// than computing a part of a small one.
constexpr int PARTS_PER_THREAD = 3;

std::unique_ptr<ThreadPool> the_threads = std::make_unique<ThreadPool>(1);

/// Room in memory that a thread keeps for the next operation.
template <typename T>
T* room(std::vector<T>& memory, size_t size) {
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

float* scratch(size_t size) {
  thread_local std::vector<float> memory;
  return room(memory, size);
}

template <typename Run>
void for_rows(int num_rows, int rows_per_part, const Run& run) {
  threads().for_each((num_rows + rows_per_part - 1) / rows_per_part, [&](int part) {
    const int first = part * rows_per_part;
    run(first, std::min(first + rows_per_part, num_rows));
  });
}

int rows_of(size_t numbers_per_row) {
  return std::max(1, static_cast<int>(NUMBERS_PER_PART / numbers_per_row));
}

const float* data_or_null(const std::vector<float>& numbers) {
  return numbers.empty() ? nullptr : numbers.data();
}

LinearArgs product(const Weights& weights, const std::vector<float>& bias, const float* residual,
                   const float* x, int num_rows, float* y) {
  return {weights->panels(), data_or_null(bias), residual, x, y, num_rows};
}

/// Arrange the input of some products, which they share; for its rows, `prepare(first, next)` is
/// called before.
template <typename Prepare>
void arrange_input(std::vector<LinearArgs>& products, const Prepare& prepare) {
  // Of the calling thread; the others write into them.
  thread_local std::vector<float> floats, scales, sums;
  thread_local std::vector<uint8_t> bytes;
  const Kernels& k = *kernels();
  const LinearArgs& shared = products[0];
  const Inputs inputs = shared.weights.inputs;
  if (shared.num_rows == 1 && inputs == Inputs::kFloats) {
    prepare(0, 1);
    for (LinearArgs& p : products) p.arranged = {p.x, nullptr, nullptr, nullptr};
    return;
  }
  const bool are_integers = inputs != Inputs::kFloats;
  const int group = shared.weights.group;
  const size_t size = shared.weights.num_inputs, total = shared.num_rows * size;
  const size_t integer_size = inputs == Inputs::kInt16 ? 2 : 1;
  const auto arrange_integers = inputs == Inputs::kInt16 ? k.arrange_int16 : k.arrange_int8;
  float* const x = are_integers ? nullptr : room(floats, total);
  uint8_t* const integers = are_integers ? room(bytes, total * integer_size) : nullptr;
  float* const steps = are_integers ? room(scales, total / group) : nullptr;
  float* const step_sums = are_integers ? room(sums, total / group) : nullptr;
  const Tiles tiles{shared.num_rows, are_integers ? k.max_tile_rows_integers : k.max_tile_rows};
  // Rows of a tile lie side by side: two threads had better not write into the same one.
  const int share = (shared.num_rows + threads().num_threads() - 1) / threads().num_threads();
  for_rows(shared.num_rows, std::clamp(share, 1, 2 * ROWS_PER_PART), [&](int first, int next) {
    prepare(first, next);
    for (int row = first; row < next; row++) {
      const int tile = tiles.of(row), height = tiles.height(tile), m = row - tiles.first(tile);
      const size_t at = tiles.first(tile) * size;
      const float* numbers = shared.x + row * size;
      if (are_integers)
        arrange_integers(numbers, m, height, size, group, integers + at * integer_size,
                         steps + at / group, step_sums + at / group);
      else
        k.arrange(numbers, m, height, size, x + at);
    }
  });
  for (LinearArgs& p : products) p.arranged = {x, integers, steps, step_sums};
}

int count_panels(const std::vector<LinearArgs>& products) {
  int num_panels = 0;
  for (const LinearArgs& p : products) num_panels += p.weights.num_panels();
  return num_panels;
}

/// How many parts the panels are shared out in.
int count_parts(const std::vector<LinearArgs>& products) {
  return std::min(count_panels(products), PARTS_PER_THREAD * threads().num_threads());
}

/// What a block computes on the way.
struct Buffers {
  float *normed, *q, *k, *v, *attended, *middle, *gate, *up;

  Buffers(const Block& block, size_t num_rows) {
    const auto size = [&](const Weights& w) { return num_rows * w->panels().num_outputs; };
    const size_t sizes[] = {num_rows * block.size(), size(block.q), size(block.k), size(block.v),
                            num_rows * block.o->panels().num_inputs, num_rows * block.size(),
                            size(block.gate), size(block.up)};
    float** const buffers[] = {&normed, &q, &k, &v, &attended, &middle, &gate, &up};
    size_t total = 0;
    for (size_t each : sizes) total += each;
    thread_local std::vector<float> memory;
    float* next = room(memory, total);
    for (size_t i = 0; i < std::size(sizes); next += sizes[i++]) *buffers[i] = next;
  }
};

}  // namespace

ThreadPool& threads() { return *the_threads; }

void set_num_threads(int num_threads) {
  if (num_threads != threads().num_threads())
    the_threads = std::make_unique<ThreadPool>(num_threads);
}

namespace {

/// Call `run(product, panel, scratch, part)` for all panels of products of one input.
template <typename Prepare, typename Run>
void for_panels(std::vector<LinearArgs>& products, const Prepare& prepare, const Run& run) {
  arrange_input(products, prepare);
  const size_t size = static_cast<size_t>(kernels()->columns) * products[0].weights.num_inputs;
  const int num_panels = count_panels(products), num_parts = count_parts(products);
  threads().for_each(num_parts, [&](int part) {
    const LinearArgs* p = products.data();
    int panel = static_cast<int>(int64_t{num_panels} * part / num_parts);
    const int next = static_cast<int>(int64_t{num_panels} * (part + 1) / num_parts);
    for (int before = 0; panel < next; panel++) {
      while (panel - before >= p->weights.num_panels()) before += p++->weights.num_panels();
      run(*p, panel - before, scratch(size), part);
    }
  });
}

void nothing_to_prepare(int, int) {}

/// Several products of one input, whose rows [first, next) `prepare` computes.
template <typename Prepare>
void multiply(std::vector<LinearArgs> products, const Prepare& prepare) {
  for_panels(products, prepare, [](const LinearArgs& product, int panel, float* scratch, int) {
    kernels()->linear(product, panel, scratch);
  });
}

void norm_rows(const float* x, const float* weight, float eps, int first, int next, int size,
               float* y) {
  for (size_t m = first; m < static_cast<size_t>(next); m++)
    kernels()->rms_norm(x + m * size, weight, eps, size, y + m * size);
}

void rotate_rows(const float* x, const Rotation& rotation, int first, int next, int num_heads,
                 int dim, float* y) {
  for (size_t m = first; m < static_cast<size_t>(next); m++)
    for (int h = 0; h < num_heads; h++) {
      const size_t at = (m * num_heads + h) * dim;
      kernels()->rope(x + at, rotation.cosines + m * rotation.half,
                      rotation.sines + m * rotation.half, rotation.half, dim, rotation.traditional,
                      y + at);
    }
}

/// Write rows into the pool, of those that the step has.
void write_rows(Pool& pool, const Step& step, int first, int next, const float* keys,
                const float* values) {
  const PoolLayout& layout = pool.layout();
  const size_t at = static_cast<size_t>(first) * layout.num_heads;
  pool.write(step.slots.data() + first, std::min(next, step.num_rows()) - first,
             keys + at * layout.key_dim, values + at * layout.value_dim);
}

/// Attend what has been written; rows beyond those of the step become zero.
void attend(const Step& step, const AttentionArgs& args, int num_rows) {
  attend_step(threads(), *kernels(), args, step);
  const size_t row = static_cast<size_t>(args.num_query_heads) * args.pool.value_dim;
  std::fill(args.y + step.num_rows() * row, args.y + num_rows * row, 0.0f);
}

}  // namespace

void multiply(std::vector<LinearArgs> products) {
  multiply(std::move(products), nothing_to_prepare);
}

void arg_max(const LinearArgs& product, uint32_t* indices, float* values) {
  std::vector<LinearArgs> products{product};
  const size_t num_rows = product.num_rows;
  std::vector<Highest> found(count_parts(products) * num_rows);
  for_panels(products, nothing_to_prepare,
             [&](const LinearArgs& p, int panel, float* scratch, int part) {
               kernels()->highest(p, panel, scratch, found.data() + part * num_rows);
             });
  for (size_t m = 0; m < num_rows; m++) {
    Highest highest;
    for (size_t at = m; at < found.size(); at += num_rows)
      highest.see(found[at].value, found[at].index);
    indices[m] = highest.index;
    values[m] = highest.value;
  }
}

void embed(const PackedWeights& weights, const int32_t* tokens, int num_rows, float* y) {
  const Panels& panels = weights.panels();
  for_rows(num_rows, ROWS_PER_PART, [&](int first, int next) {
    for (int m = first; m < next; m++) {
      // As in the rest of MLX, an index beyond the end is not an error but must do no harm.
      const int token = std::clamp(tokens[m], 0, panels.num_outputs - 1);
      weights.unpack(token, y + static_cast<size_t>(m) * panels.num_inputs);
    }
  });
}

void rms_norm(const float* x, const float* weight, float eps, int num_rows, int size, float* y) {
  for_rows(num_rows, rows_of(size), [&](int first, int next) {
    norm_rows(x, weight, eps, first, next, size, y);
  });
}

void swiglu(const float* gate, const float* up, size_t size, float* y) {
  const int num_parts = static_cast<int>((size + NUMBERS_PER_PART - 1) / NUMBERS_PER_PART);
  threads().for_each(num_parts, [&](int part) {
    const size_t first = part * NUMBERS_PER_PART;
    kernels()->swiglu(gate + first, up + first, std::min(NUMBERS_PER_PART, size - first),
                      y + first);
  });
}

void rotate(const float* x, const Rotation& rotation, int num_rows, int num_heads, int dim,
            float* y) {
  for_rows(num_rows, rows_of(static_cast<size_t>(num_heads) * dim), [&](int first, int next) {
    rotate_rows(x, rotation, first, next, num_heads, dim, y);
  });
}

void write_and_attend(Pool& pool, const Step& step, const AttentionArgs& args, const float* keys,
                      const float* values, int num_rows) {
  for_rows(step.num_rows(), ROWS_PER_PART,
           [&](int first, int next) { write_rows(pool, step, first, next, keys, values); });
  attend(step, args, num_rows);
}

void run_block(const Block& block, Pool& pool, const Step& step, const Rotation& rotation,
               int window, const float* x, int num_rows, float* y) {
  const Buffers b(block, num_rows);
  const PoolLayout& layout = pool.layout();
  const int size = block.size(), dim = layout.key_dim;
  const auto norm = [&](const float* from, const std::vector<float>& weight, float eps) {
    return [&b, from, w = weight.data(), eps, size](int first, int next) {
      norm_rows(from, w, eps, first, next, size, b.normed);
    };
  };
  const auto norm_and_rotate = [&](const std::vector<float>& weight, float eps, int first,
                                   int next, int num_heads, float* heads) {
    if (!weight.empty())
      norm_rows(heads, weight.data(), eps, first * num_heads, next * num_heads, dim, heads);
    rotate_rows(heads, rotation, first, next, num_heads, dim, heads);
  };
  multiply({product(block.q, block.q_bias, nullptr, b.normed, num_rows, b.q),
            product(block.k, block.k_bias, nullptr, b.normed, num_rows, b.k),
            product(block.v, block.v_bias, nullptr, b.normed, num_rows, b.v)},
           norm(x, block.attention_norm, block.eps));
  for_rows(num_rows, ROWS_PER_PART, [&](int first, int next) {
    norm_and_rotate(block.q_norm, block.q_eps, first, next, block.num_heads, b.q);
    norm_and_rotate(block.k_norm, block.k_eps, first, next, layout.num_heads, b.k);
    write_rows(pool, step, first, next, b.k, b.v);
  });
  const AttentionArgs args{.pool = layout,
                           .keys = pool.keys(),
                           .values = pool.values(),
                           .q = b.q,
                           .y = b.attended,
                           .num_query_heads = block.num_heads,
                           .scale = block.scale,
                           .soft_cap = 0,
                           .window = window,
                           .sinks = nullptr,
                           .span_blocks = 0};
  attend(step, args, num_rows);
  multiply({product(block.o, block.o_bias, x, b.attended, num_rows, b.middle)});
  multiply({product(block.gate, block.gate_bias, nullptr, b.normed, num_rows, b.gate),
            product(block.up, block.up_bias, nullptr, b.normed, num_rows, b.up)},
           norm(b.middle, block.mlp_norm, block.mlp_eps));
  const size_t width = block.gate->panels().num_outputs;
  multiply({product(block.down, block.down_bias, b.middle, b.gate, num_rows, y)},
           [&](int first, int next) {
             const size_t at = first * width;
             kernels()->swiglu(b.gate + at, b.up + at, (next - first) * width, b.gate + at);
           });
}

}  // namespace native

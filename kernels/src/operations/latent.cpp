#include "operations/latent.h"

#include <cstring>

#include "kernels.h"

namespace native {

namespace {

/// Of a row: a head has enough numbers to be worth a part.
constexpr int ROW = 1;

void copy(const float* x, size_t size, float* y) { std::memcpy(y, x, size * sizeof(float)); }

/// The rows of one run of a half.
struct LatentRun {
  const LatentHalf& half;
  Pool& pool;
  const Step& step;
  const Rotation& rotation;
  int window;
  const AdaptedRows* adapted;
  size_t num_rows;
  const float* q;        // [rows, heads, query_dim]
  const float* latents;  // [rows, latent_dim + rotated_dim]

  const float* query(size_t row, size_t head) const {
    return q + (row * half.num_heads + head) * half.query_dim();
  }
  const float* latent(size_t row) const {
    return latents + row * (half.latent_dim() + half.rotated_dim());
  }
  void norm_latent(size_t row, float* y) const {
    norm_rows(half.latent_norm, latent(row), 0, 1, y);
  }
  void rotate(size_t row, const float* x, float* y) const {
    const size_t at = row * rotation.half;
    kernels()->rope(x, rotation.cosines + at, rotation.sines + at, rotation.half,
                    half.rotated_dim(), rotation.traditional, y);
  }
  void attend(const float* queries, float* y) const {
    const AttentionArgs args{.pool = pool.layout(),
                             .keys = pool.keys(),
                             .values = pool.values(),
                             .q = queries,
                             .y = y,
                             .num_query_heads = half.num_heads,
                             .scale = half.scale,
                             .soft_cap = 0,
                             .window = window,
                             .is_chunked = false,
                             .sinks = nullptr,
                             .span_blocks = 0};
    native::attend(step, args, static_cast<int>(num_rows));
  }
};

/// Attend to latents; `y` is the input of the output's layer.
struct ByLatents {
  const LatentRun& run;
  float *embedded, *queries, *keys, *attended, *unembedded;

  void attend() const {
    const LatentHalf& half = run.half;
    const size_t heads = half.num_heads, latent = half.latent_dim(), dim = latent + half.rotated_dim();
    multiply_heads(*half.embed, run.q, half.query_dim(), static_cast<int>(run.num_rows), embedded);
    for_rows(static_cast<int>(run.num_rows), ROW, [&](int m, int next) {
      for (size_t h = 0; h < heads; h++) {
        float* query = queries + (m * heads + h) * dim;
        copy(embedded + (h * run.num_rows + m) * latent, latent, query);
        run.rotate(m, run.query(m, h) + half.plain_dim(), query + latent);
      }
      run.norm_latent(m, keys + m * dim);
      run.rotate(m, run.latent(m) + latent, keys + m * dim + latent);
      write_rows(run.pool, run.step, m, next, keys, nullptr);
    });
    run.attend(queries, attended);
    multiply_heads(*half.unembed, attended, half.latent_dim(), static_cast<int>(run.num_rows),
                   unembedded);
  }

  /// Bring the values of a row's heads together.
  void join(size_t row, float* y) const {
    const size_t heads = run.half.num_heads, dim = run.half.value_dim();
    for (size_t h = 0; h < heads; h++)
      copy(unembedded + (h * run.num_rows + row) * dim, dim, y + (row * heads + h) * dim);
  }
};

/// Attend to keys and values of each head, made of latents.
struct ByHeads {
  const LatentRun& run;
  float *normed, *expanded, *queries, *keys, *values;

  void attend(float* y) const {
    const LatentHalf& half = run.half;
    const size_t heads = half.num_heads, latent = half.latent_dim(), dim = half.query_dim();
    const size_t plain = half.plain_dim(), value = half.value_dim();
    multiply({product(half.expand[0], nullptr, normed, static_cast<int>(run.num_rows), expanded)},
             run.adapted, [&](int first, int next) {
               for (size_t m = first; m < static_cast<size_t>(next); m++)
                 run.norm_latent(m, normed + m * latent);
             });
    for_rows(static_cast<int>(run.num_rows), ROW, [&](int m, int next) {
      for (size_t h = 0; h < heads; h++) {
        const size_t at = m * heads + h;
        const float* both = expanded + at * (plain + value);
        copy(run.query(m, h), plain, queries + at * dim);
        run.rotate(m, run.query(m, h) + plain, queries + at * dim + plain);
        copy(both, plain, keys + at * dim);
        run.rotate(m, run.latent(m) + latent, keys + at * dim + plain);
        copy(both + plain, value, values + at * value);
      }
      write_rows(run.pool, run.step, m, next, keys, values);
    });
    run.attend(queries, y);
  }
};

}  // namespace

void multiply_heads(const PackedWeights& weights, const float* x, int stride, int num_rows,
                    float* y) {
  const int num_heads = weights.num_matrices(), total = num_heads * num_rows;
  const InputPacker packer(weights.panels(), total);
  for_rows(total, packer.rows_per_part(), [&](int first, int next) {
    for (int i = first; i < next; i++) {
      const size_t head = i / num_rows, row = i % num_rows;
      packer.pack(x + (row * num_heads + head) * stride,
                  {static_cast<int>(head) * num_rows, num_rows}, i);
    }
  });
  std::vector<LinearArgs> products;
  for (int head = 0; head < num_heads; head++) {
    const Panels panels = weights.panels(head);
    products.push_back({.weights = panels,
                        .bias = nullptr,
                        .residual = nullptr,
                        .x = nullptr,
                        .y = y + static_cast<size_t>(head) * num_rows * panels.num_outputs,
                        .num_rows = num_rows,
                        .packed = packer.packed({head * num_rows, num_rows})});
  }
  multiply_packed(products);
}

void run_latent(const LatentHalf& half, Pool& pool, const Step& step, const Rotation& rotation,
                int window, const float* query_factors, const float* x, int num_rows, float* y,
                const AdaptedRows* adapted) {
  const size_t rows = num_rows, heads = half.num_heads, cells = rows * heads;
  const size_t key_dim = pool.layout().key_dim, latent = half.latent_dim();
  const size_t value_dim = half.value_dim();
  const bool is_expanded = half.is_expanded();
  const size_t first_size = half.inputs[0].num_outputs();
  const size_t key_heads = is_expanded ? heads : 1;
  float *normed, *first, *latents, *q_normed, *q, *made, *queries, *keys, *values, *attended;
  thread_local std::vector<float> memory;
  assign(memory, {{&normed, rows * std::max<size_t>(half.size(), latent)},
          {&first, rows * first_size},
          {&latents, rows * half.inputs[1].num_outputs()},
          {&q_normed, half.q.empty() ? 0 : rows * first_size},
          {&q, half.q.empty() ? 0 : cells * half.query_dim()},
          {&made, cells * (is_expanded ? half.plain_dim() + value_dim : latent)},
          {&queries, cells * std::max(key_dim, value_dim)},
          {&keys, rows * key_heads * key_dim},
          {&values, cells * value_dim},
          {&attended, cells * (is_expanded ? value_dim : latent)}});
  multiply_normed(half.inputs, half.norm, x, num_rows, adapted, normed, first);
  if (half.q.empty()) q = first;
  else multiply_normed(half.q, half.q_norm, first, num_rows, adapted, q_normed, q);
  if (query_factors)
    for_rows(num_rows, rows_per_part(num_rows), [&](int from, int to) {
      scale_rows(query_factors, from, to, heads * half.query_dim(), q);
    });
  const LatentRun run{half, pool, step, rotation, window, adapted, rows, q, latents};
  if (is_expanded) {
    ByHeads{run, normed, made, queries, keys, values}.attend(attended);
    return multiply_output(half.output, x, attended, num_rows, adapted, y, [](int, int) {});
  }
  const ByLatents by{run, made, queries, keys, attended, values};
  by.attend();
  // The queries are not needed any more.
  float* joined = queries;
  multiply_output(half.output, x, joined, num_rows, adapted, y, [&](int first_row, int next) {
    for (int m = first_row; m < next; m++) by.join(m, joined);
  });
}

}  // namespace native

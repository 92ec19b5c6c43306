#include "operations/mixture.h"

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "operations/buffers.h"
#include "operations/parallel.h"
#include "operations/pointwise.h"

namespace native {

namespace {

// Of a group, the sum of so many is what it is chosen by.
constexpr int NUM_OF_GROUP = 2;

float sigmoid(float x) {
  // e^x of a positive number may be infinite.
  const float small = std::exp(-std::abs(x));
  return (x < 0 ? small : 1) / (1 + small);
}

/// The indices of the `count` highest of `values`, highest first and of equal ones the first.
template <typename Index>
void find_top(const float* values, int size, int count, Index* top) {
  int found = 0;
  for (int i = 0; i < size; i++) {
    // With a NaN no comparison is true, so that indices stay distinct.
    if (found == count && !(values[i] > values[top[count - 1]])) continue;
    int at = found < count ? found++ : count - 1;
    for (; at > 0 && values[i] > values[top[at - 1]]; at--) top[at] = top[at - 1];
    top[at] = i;
  }
}

void score(const Router& router, const float* logits, float* scores) {
  const int size = router.num_experts;
  if (router.is_sigmoid) {
    for (int i = 0; i < size; i++) scores[i] = sigmoid(logits[i]);
    return;
  }
  const float highest = *std::max_element(logits, logits + size);
  float total = 0;
  for (int i = 0; i < size; i++) total += scores[i] = std::exp(logits[i] - highest);
  for (int i = 0; i < size; i++) scores[i] /= total;
}

/// Set values to 0 but for those of the best groups.
void keep_groups(const Router& router, float* values) {
  thread_local std::vector<float> sum_memory;
  thread_local std::vector<int> memory;
  const int size = router.num_experts / router.num_groups;
  float* sums = grow(sum_memory, router.num_groups);
  int* top = grow(memory, std::max(router.num_groups, NUM_OF_GROUP));
  for (int group = 0; group < router.num_groups; group++) {
    const float* own = values + group * size;
    find_top(own, size, NUM_OF_GROUP, top);
    sums[group] = own[top[0]] + own[top[1]];
  }
  find_top(sums, router.num_groups, router.top_groups, top);
  for (int group = 0; group < router.num_groups; group++)
    if (std::find(top, top + router.top_groups, group) == top + router.top_groups)
      std::fill_n(values + group * size, size, 0.0f);
}

/// Products of one input, whose rows `prepare` computes before the first.
template <typename Prepare>
void multiply_by(const Layer& layer, const float* x, int num_rows, const AdaptedRows* adapted,
                 float* y, const Prepare& prepare) {
  multiply({product(layer, nullptr, x, num_rows, y)}, adapted, prepare);
}

/// What is added up for a row: a row of each chosen expert, and of the shared one.
struct Sum {
  const MixtureHalf& half;
  const Routing& routing;
  const float* weights;  // [rows, top_k]
  const float* experts;  // sorted
  const float* shared;   // [rows, size], or null
  const float* gates;    // of the shared one, [rows], or null

  void write(size_t row, float* y) const {
    const size_t top_k = half.router.top_k, size = half.size();
    thread_local std::vector<const float*> row_memory;
    thread_local std::vector<float> weight_memory;
    const float** rows = grow(row_memory, top_k + 1);
    float* row_weights = grow(weight_memory, top_k + 1);
    for (size_t i = 0; i < top_k; i++) {
      rows[i] = experts + routing.sorted(static_cast<int>(row * top_k + i)) * size;
      row_weights[i] = weights[row * top_k + i];
    }
    if (shared) {
      rows[top_k] = shared + row * size;
      row_weights[top_k] = gates ? sigmoid(gates[row]) : 1;
    }
    kernels()->weighted_sum(rows, row_weights, static_cast<int>(top_k) + (shared ? 1 : 0), size, y);
  }
};

}  // namespace

void route(const Router& router, const float* logits, int32_t* indices, float* weights) {
  thread_local std::vector<float> score_memory, choice_memory;
  const int size = router.num_experts;
  float* scores = grow(score_memory, size);
  score(router, logits, scores);
  const float* choice = logits;  // in the same order, and with fewer equal ones
  if (!router.correction.empty() || router.has_groups()) {
    float* values = grow(choice_memory, size);
    std::copy_n(scores, size, values);
    for (size_t i = 0; i < router.correction.size(); i++) values[i] += router.correction[i];
    if (router.has_groups()) keep_groups(router, values);
    choice = values;
  }
  find_top(choice, size, router.top_k, indices);
  float total = router.epsilon;
  for (int i = 0; i < router.top_k; i++) total += weights[i] = scores[indices[i]];
  for (int i = 0; i < router.top_k; i++)
    weights[i] = (router.is_normalized ? weights[i] / total : weights[i]) * router.factor;
}

void run_mixture(const MixtureHalf& half, const float* x, int num_rows, float* y,
                 const AdaptedRows* adapted) {
  const size_t rows = num_rows, size = half.size(), top_k = half.router.top_k;
  const size_t num_experts = half.router.num_experts;
  thread_local std::vector<float> memory;
  thread_local std::vector<int32_t> index_memory;
  float *normed, *logits, *weights, *shared, *gates;
  assign(memory, {{&normed, half.norm.size() ? rows * size : 0}, {&logits, rows * num_experts},
                  {&weights, rows * top_k}, {&shared, half.shared ? rows * size : 0},
                  {&gates, half.shared_gate ? rows : 0}});
  const float* input = half.norm.size() ? normed : x;
  multiply_by(half.router_layer, input, num_rows, adapted, logits, [&](int first, int next) {
    if (half.norm.size()) norm_rows(half.norm, x, first, next, normed);
  });
  int32_t* indices = grow(index_memory, rows * top_k);
  for_rows(num_rows, rows_per_part(num_rows), [&](int first, int next) {
    for (size_t m = first; m < static_cast<size_t>(next); m++)
      route(half.router, logits + m * num_experts, indices + m * top_k, weights + m * top_k);
  });
  if (half.shared) run_mlp(*half.shared, input, input, num_rows, shared, adapted);
  if (half.shared_gate)
    multiply_by(*half.shared_gate, input, num_rows, adapted, gates, [](int, int) {});
  const Routing routing(indices, static_cast<int>(rows * top_k), half.router.num_experts);
  const Sum sum{half, routing, weights,
                run_sorted(half.experts, input, half.router.top_k, routing),
                half.shared ? shared : nullptr, half.shared_gate ? gates : nullptr};
  for_rows(num_rows, rows_per_part(num_rows), [&](int first, int next) {
    for (size_t m = first; m < static_cast<size_t>(next); m++) sum.write(m, y + m * size);
    half.ending.finish(x, first, next, half.size(), y);
  });
}

}  // namespace native

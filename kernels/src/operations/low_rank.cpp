#include "operations/low_rank.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace native {

namespace {

/// Rows of A x that a thread computes at a time.
constexpr int ROWS_OF_INNER = 16;
/// Where matrices begin: a cache line.
constexpr size_t ALIGNMENT = 64;

size_t aligned(size_t size) { return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

LowRank low_rank_of(const WeightChange& change) {
  const Panels panels = change.weights->panels();
  return {.num_inputs = panels.num_inputs,
          .num_outputs = panels.num_outputs,
          .rank = change.rank,
          .columns = panels.columns,
          .is_bf16 = change.is_bf16};
}

std::string layer_name(size_t index) { return "layer " + std::to_string(index) + ": "; }

/// Bytes of all matrices.  Throws std::invalid_argument if one of them cannot be.
size_t total_bytes(const std::vector<WeightChange>& changes) {
  size_t total = 0;
  for (size_t i = 0; i < changes.size(); i++) {
    if (changes[i].rank < 1 || changes[i].rank > MAX_RANK)
      throw std::invalid_argument(layer_name(i) + "the rank is " +
                                  std::to_string(changes[i].rank) + " and not from 1 to " +
                                  std::to_string(MAX_RANK));
    if (changes[i].weights->num_matrices() != 1)
      throw std::invalid_argument(layer_name(i) + "the weights are several matrices");
    const LowRank low_rank = low_rank_of(changes[i]);
    total += aligned(low_rank.a_bytes()) + aligned(low_rank.b_bytes());
  }
  return total;
}

/// Bring matrices into the order of LowRank, in memory that is zero.
template <typename Float>
void arrange(const WeightChange& change, const LowRank& to) {
  const auto *from_a = static_cast<const Float*>(change.a), *from_b = static_cast<const Float*>(change.b);
  auto *a = static_cast<Float*>(const_cast<void*>(to.a)), *b = static_cast<Float*>(const_cast<void*>(to.b));
  const size_t columns = to.columns, rank = to.rank, outputs = to.num_outputs;
  const size_t block = RANKS * to.padded(to.num_inputs), panel = to.padded_rank() * columns;
  const size_t pack = packed_rows(sizeof(Float));
  // A division for each number would take longer than a decode step.
  for (size_t i = 0; i < static_cast<size_t>(to.num_inputs); i++) {
    Float* input = a + i / columns * RANKS * columns + i % columns;
    for (size_t r = 0; r < rank; r++)
      input[r / RANKS * block + r % RANKS * columns] = *from_a++;
  }
  for (size_t r = 0; r < rank; r++) {
    Float* of_panel = b + r / pack * columns * pack + r % pack;
    for (size_t first = 0; first < outputs; first += columns, of_panel += panel)
      for (size_t j = 0; j < std::min(columns, outputs - first); j++)
        of_panel[j * pack] = *from_b++;
  }
}

}  // namespace

Adapter::Adapter(const std::vector<WeightChange>& changes) : memory_(total_bytes(changes)) {
  auto* next = static_cast<uint8_t*>(memory_.data());
  for (const WeightChange& change : changes) {
    LowRank low_rank = low_rank_of(change);
    low_rank.a = next;
    low_rank.b = next += aligned(low_rank.a_bytes());
    next += aligned(low_rank.b_bytes());
    const auto [at, is_new] = changes_.try_emplace(change.weights->panels().data);
    if (!is_new)
      throw std::invalid_argument(layer_name(weights_.size()) +
                                  "the weights are those of an earlier layer");
    at->second.low_rank = low_rank;
    at->second.index = static_cast<int>(weights_.size());
    (change.is_bf16 ? arrange<uint16_t> : arrange<float>)(change, low_rank);
    weights_.push_back(change.weights);
  }
}

const LowRank* Adapter::find(const Panels& weights) const {
  const auto found = changes_.find(weights.data);
  return found == changes_.end() ? nullptr : &found->second.low_rank;
}

const LowRank* Adapter::use(const Panels& weights) const {
  const auto found = changes_.find(weights.data);
  if (found == changes_.end()) return nullptr;
  found->second.is_used.store(true, std::memory_order_relaxed);
  return &found->second.low_rank;
}

std::vector<int> Adapter::used() const {
  std::vector<int> indices;
  for (const auto& [weights, change] : changes_)
    if (change.is_used.load(std::memory_order_relaxed)) indices.push_back(change.index);
  std::sort(indices.begin(), indices.end());
  return indices;
}

AdaptedRows::AdaptedRows(const std::vector<RowSegment>& segments) {
  for (const auto& [num_rows, adapter] : segments) {
    if (num_rows < 1) throw std::invalid_argument("a segment has one row or more");
    const bool continues = !segments_.empty() && segments_.back().adapter == adapter &&
                           segments_.back().first_row + segments_.back().num_rows == num_rows_;
    if (continues)
      segments_.back().num_rows += num_rows;
    else if (adapter)
      segments_.push_back({num_rows_, num_rows, adapter});
    num_rows_ += num_rows;
  }
}

bool AdaptedRows::change(const Panels& weights) const {
  return std::any_of(segments_.begin(), segments_.end(),
                     [&](const Segment& segment) { return segment.adapter->find(weights); });
}

Deltas::Deltas(const AdaptedRows* adapted, std::vector<LinearArgs>& products) {
  if (!adapted || adapted->segments().empty()) return;
  find(*adapted, products);
  compute_inner();
}

void Deltas::find(const AdaptedRows& adapted, std::vector<LinearArgs>& products) {
  const int per_row = products[0].num_rows / adapted.num_rows();
  size_t total = 0;
  for (LinearArgs& product : products)
    for (const AdaptedRows::Segment& segment : adapted.segments())
      if (const LowRank* low_rank = segment.adapter->use(product.weights)) {
        deltas_.push_back({low_rank, product.x, product.y, segment.first_row * per_row,
                           segment.num_rows * per_row, nullptr});
        total += low_rank->num_parts() * deltas_.back().part_size();
        product.deltas = this;
      }
  thread_local std::vector<float> memory;
  float* next = grow(memory, total);
  for (Delta& delta : deltas_) {
    delta.inner = next;
    next += delta.low_rank->num_parts() * delta.part_size();
  }
}

void Deltas::compute_inner() const {
  struct Part {
    const Delta* delta;
    int part;
    int first_row;
  };
  std::vector<Part> parts;
  for (const Delta& delta : deltas_)
    for (int part = 0; part < delta.low_rank->num_parts(); part++)
      for (int row = 0; row < delta.num_rows; row += ROWS_OF_INNER)
        parts.push_back({&delta, part, row});
  threads().for_each(static_cast<int>(parts.size()), [&](int i) {
    const auto [delta, part, row] = parts[i];
    const LowRank& low_rank = *delta->low_rank;
    const float* x =
        delta->x + static_cast<size_t>(delta->first_row + row) * low_rank.num_inputs;
    float* inner = delta->inner + part * delta->part_size() +
                   static_cast<size_t>(row) * low_rank.padded_rank();
    kernels()->low_rank_inner(low_rank, x, std::min(ROWS_OF_INNER, delta->num_rows - row), part,
                              inner);
  });
}

/// A x of some rows of a delta, in memory of the calling thread if it has to be added up.
const float* Deltas::sum_parts(const Delta& delta, int first_row, int num_rows) {
  const size_t rank = delta.low_rank->padded_rank();
  const float* inner = delta.inner + first_row * rank;
  if (delta.low_rank->num_parts() == 1) return inner;
  thread_local std::vector<float> memory;
  const size_t size = num_rows * rank;
  float* sums = grow(memory, size);
  std::copy_n(inner, size, sums);
  for (int part = 1; part < delta.low_rank->num_parts(); part++) {
    const float* terms = inner + part * delta.part_size();
    for (size_t i = 0; i < size; i++) sums[i] += terms[i];
  }
  return sums;
}

void Deltas::add(const LinearArgs& product, int panel, int next) const {
  const size_t size = product.weights.num_outputs;
  for (const Delta& delta : deltas_) {
    if (delta.y + product.first_row * size != product.y) continue;
    const int first = std::max(delta.first_row, product.first_row);
    const int end = std::min(delta.first_row + delta.num_rows, product.first_row + product.num_rows);
    if (first >= end) continue;
    const float* inner = sum_parts(delta, first - delta.first_row, end - first);
    kernels()->add_low_rank(*delta.low_rank, inner, end - first, panel, next,
                            product.y + (first - product.first_row) * size);
  }
}

}  // namespace native

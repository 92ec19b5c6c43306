// LoRA adapters (Hu et al. 2021): low-rank changes of packed weights, each for some rows of a step.
#pragma once

#include <atomic>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "weights.h"

namespace native {

constexpr int MAX_RANK = 512;

/// A change W + B A of weights, from A `[inputs, rank]` and B `[rank, outputs]`, as layers have them
/// transposed.
struct WeightChange {
  Weights weights;
  int rank;
  bool is_bf16;  // else float32
  const void* a;
  const void* b;
};

/// Changes of some weights, which it keeps.
class Adapter {
 public:
  /// Throws std::invalid_argument.
  explicit Adapter(const std::vector<WeightChange>& changes);
  Adapter(const Adapter&) = delete;
  Adapter& operator=(const Adapter&) = delete;

  /// The change of some weights, or null.
  const LowRank* find(const Panels& weights) const;
  /// The same for a product, which is remembered.
  const LowRank* use(const Panels& weights) const;
  /// Those of the changes that products were computed with, in order.
  std::vector<int> used() const;

  size_t num_bytes() const { return memory_.size(); }

 private:
  struct Change {
    LowRank low_rank;
    int index;
    mutable std::atomic<bool> is_used{false};
  };

  std::vector<Weights> weights_;
  std::unordered_map<const uint8_t*, Change> changes_;  // by the packed weights' memory
  Memory memory_;
};

/// A number of rows, and the adapter that they have, or null.
using RowSegment = std::pair<int, std::shared_ptr<const Adapter>>;

/// The adapters of the rows of a step.
class AdaptedRows {
 public:
  struct Segment {
    int first_row;
    int num_rows;
    std::shared_ptr<const Adapter> adapter;
  };

  /// Of successive rows.  Throws std::invalid_argument.
  explicit AdaptedRows(const std::vector<RowSegment>& segments);

  int num_rows() const { return num_rows_; }
  /// Those with an adapter.
  const std::vector<Segment>& segments() const { return segments_; }
  /// Whether one of the adapters changes these weights.
  bool change(const Panels& weights) const;

 private:
  std::vector<Segment> segments_;
  int num_rows_ = 0;
};

/// What adapters add to the outputs of some products of one input.
class Deltas {
 public:
  /// Compute A x, in memory of the calling thread that its next deltas overwrite, and let products
  /// have them that are changed.  Without adapters there are none.  Inputs may have several rows for each
  /// row of the step.
  Deltas(const AdaptedRows* adapted, std::vector<LinearArgs>& products);
  Deltas(const Deltas&) = delete;
  Deltas& operator=(const Deltas&) = delete;

  /// Add B (A x) to panels [panel, next) of a product, or of some of its rows.
  void add(const LinearArgs& product, int panel, int next) const;

 private:
  struct Delta {
    const LowRank* low_rank;
    const float* x;  // of the product
    const float* y;
    int first_row;
    int num_rows;
    float* inner;  // [parts, num_rows, padded_rank]

    size_t part_size() const { return static_cast<size_t>(num_rows) * low_rank->padded_rank(); }
  };

  void find(const AdaptedRows& adapted, std::vector<LinearArgs>& products);
  void compute_inner() const;
  static const float* sum_parts(const Delta& delta, int first_row, int num_rows);

  std::vector<Delta> deltas_;
};

}  // namespace native

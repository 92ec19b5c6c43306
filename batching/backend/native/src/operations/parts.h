// Divides the panels of products among the threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace native {

/// The panels of successive products in parts, as many for each thread, of which some may be empty.
///
/// A thread's parts become smaller, half of its range, a quarter and so on, so that threads end at
/// about the same time and claim few parts.  The threads of a node have the same share of each
/// product's panels, however many products there are: it is in the memory of the node that packed it.
class Parts {
 public:
  explicit Parts(const std::vector<LinearArgs>& products);

  int count() const { return static_cast<int>(starts_.size()) - 1; }

  /// Call `run(product, panel, next)` for the panels [panel, next) of each product in a part.
  template <typename Run>
  void for_each(int part, const Run& run) const {
    for (size_t i = starts_[part]; i < starts_[part + 1]; i++)
      run(products_[ranges_[i].product], ranges_[i].first, ranges_[i].next);
  }

 private:
  struct Range {
    size_t product;
    int first, next;
  };

  int first_panel(size_t product, int thread) const;
  void add_node(int first_thread, int next_thread);

  const std::vector<LinearArgs>& products_;
  int per_thread_;
  std::vector<Range> ranges_;
  std::vector<size_t> starts_;  // of each part's ranges; the last is the end
};

}  // namespace native

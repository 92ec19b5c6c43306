// Divides products among the threads.
#pragma once

#include <climits>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace native {

/// As the height of tiles: rows are not divided.
constexpr int NO_TILES = INT_MAX;

/// The panels of successive products in parts, as many for each thread, of which some may be empty.
///
/// A thread's parts become smaller, half of its range, a quarter and so on, so that threads end at
/// about the same time and claim few parts.  The last panels, if they are too few for all threads,
/// are divided into tiles of rows, which are each thread's last part.  The threads of a node have
/// the same share of each product's panels, however many products there are: it is in the memory of
/// the node that packed it.
class Parts {
 public:
  Parts(const std::vector<LinearArgs>& products, int max_tile_rows);

  int count() const { return static_cast<int>(starts_.size()) - 1; }

  /// Call `run(product, panel, next)` for the panels [panel, next) of each product in a part, or of
  /// some of its rows.
  template <typename Run>
  void for_each(int part, const Run& run) const {
    for (size_t i = starts_[part]; i < starts_[part + 1]; i++)
      run(rows_of(ranges_[i]), ranges_[i].first, ranges_[i].next);
  }

 private:
  struct Range {
    size_t product;
    int first, next;  // panels
    int first_row, num_rows;
  };
  struct Panel {
    size_t product;
    int panel;
  };

  int first_panel(size_t product, int thread) const;
  bool needs_tiles(int num_panels) const;
  void add_node(int first_thread, int next_thread);
  std::vector<Panel> last_panels(int first_thread, int next_thread, int count) const;
  void add_tiles(const std::vector<Panel>& panels, int thread, int num_threads);
  LinearArgs rows_of(const Range& range) const;

  const std::vector<LinearArgs>& products_;
  int max_tile_rows_;
  int num_parts_;  // of a thread, without the tiles
  bool has_tiles_;
  std::vector<Range> ranges_;
  std::vector<size_t> starts_;  // of each part's ranges; the last is the end
};

}  // namespace native

#include "operations/parts.h"

#include <algorithm>

#include "operations/linear.h"
#include "thread_pool.h"

namespace native {

namespace {

constexpr int MAX_PARTS_PER_THREAD = 4;
/// Weights of a tile of its own are unpacked once more: not worth a smaller share of a thread's time.
constexpr int WORTH_TILES = 32;

/// What a panel costs to read, in rows to multiply with it.
constexpr int64_t READ_COST = 4;

int64_t panel_cost(const LinearArgs& product) { return READ_COST + product.num_rows; }

}  // namespace

Parts::Parts(const std::vector<LinearArgs>& products, int max_tile_rows)
    : products_(products), max_tile_rows_(max_tile_rows) {
  int num_panels = 0;
  for (const LinearArgs& p : products) num_panels += p.weights.num_panels();
  const int num_threads = threads().num_threads();
  num_parts_ = std::clamp(num_panels / num_threads, 1, num_threads > 1 ? MAX_PARTS_PER_THREAD : 1);
  has_tiles_ = needs_tiles(num_panels);
  for (int node = 0; node < threads().num_nodes(); node++)
    add_node(threads().first_thread(node), threads().first_thread(node + 1));
  starts_.push_back(ranges_.size());
}

/// Tell whether threads would wait long for those that have one panel more.
bool Parts::needs_tiles(int num_panels) const {
  const int num_rows = products_[0].num_rows, num_threads = threads().num_threads();
  const int left = num_panels % num_threads, most = num_panels / num_threads + 1;
  return left > 0 && (num_threads - left) * WORTH_TILES > num_threads * most &&
         num_rows > max_tile_rows_ &&
         std::all_of(products_.begin(), products_.end(),
                     [&](const LinearArgs& p) { return p.num_rows == num_rows; });
}

/// The first panel of a thread, were a product divided among all threads by itself.
int Parts::first_panel(size_t product, int thread) const {
  const int64_t num_panels = products_[product].weights.num_panels();
  return static_cast<int>(num_panels * thread / threads().num_threads());
}

void Parts::add_node(int first_thread, int next_thread) {
  int num_panels = 0;
  int64_t total = 0, before = 0;
  for (size_t i = 0; i < products_.size(); i++) {
    const int of_product = first_panel(i, next_thread) - first_panel(i, first_thread);
    num_panels += of_product;
    total += of_product * panel_cost(products_[i]);
  }
  const int num_threads = next_thread - first_thread;
  const int num_left = has_tiles_ && num_threads > 0 ? num_panels % num_threads : 0;
  const std::vector<Panel> left = last_panels(first_thread, next_thread, num_left);
  total -= num_left * panel_cost(products_[0]);

  size_t product = 0;
  int panel = first_panel(0, first_thread);
  const auto add_part = [&](int64_t end) {
    starts_.push_back(ranges_.size());
    while (product < products_.size()) {
      const LinearArgs& p = products_[product];
      const int last = first_panel(product, next_thread);
      const int64_t cost = panel_cost(p), wanted = (end - before + cost / 2) / cost;
      const int next = panel + static_cast<int>(std::clamp<int64_t>(wanted, 0, last - panel));
      if (next > panel) ranges_.push_back({product, panel, next, 0, p.num_rows});
      before += (next - panel) * cost;
      panel = next;
      if (panel < last) return;
      if (++product < products_.size()) panel = first_panel(product, first_thread);
    }
  };
  // In the size of a thread's smallest part; the last two are equal.
  const int64_t size = int64_t{1} << (num_parts_ - 1), sum = size * num_threads;
  for (int thread = 0; thread < num_threads; thread++) {
    const int64_t next = size * (thread + 1);
    for (int64_t rest = size / 2; rest > 0; rest /= 2) add_part(total * (next - rest) / sum);
    add_part(total * next / sum);
    if (has_tiles_) add_tiles(left, thread, num_threads);
  }
}

/// The last panels of those that threads [first, next) have.
std::vector<Parts::Panel> Parts::last_panels(int first_thread, int next_thread, int count) const {
  std::vector<Panel> panels;
  for (size_t product = products_.size(); product-- > 0;) {
    const int first = first_panel(product, first_thread);
    for (int panel = first_panel(product, next_thread); panel-- > first;) {
      if (static_cast<int>(panels.size()) == count) return panels;
      panels.push_back({product, panel});
    }
  }
  return panels;
}

/// Add a thread's share of the tiles of some panels, as a part.
void Parts::add_tiles(const std::vector<Panel>& panels, int thread, int num_threads) {
  starts_.push_back(ranges_.size());
  const Tiles tiles{products_[0].num_rows, max_tile_rows_};
  const int64_t total = static_cast<int64_t>(panels.size()) * tiles.count();
  const int64_t next = total * (thread + 1) / num_threads;
  for (int64_t i = total * thread / num_threads; i < next; i++) {
    const auto [product, panel] = panels[i / tiles.count()];
    const int tile = static_cast<int>(i % tiles.count());
    ranges_.push_back({product, panel, panel + 1, tiles.first(tile), tiles.height(tile)});
  }
}

LinearArgs Parts::rows_of(const Range& range) const {
  LinearArgs p = products_[range.product];
  const size_t at = static_cast<size_t>(range.first_row) * p.weights.num_outputs;
  p.y += at;
  if (p.residual) p.residual += at;
  p.num_rows = range.num_rows;
  p.first_row = range.first_row;
  p.packed = p.packed.from_row(p.weights, range.first_row);
  return p;
}

}  // namespace native

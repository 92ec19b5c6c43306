#include "operations/parts.h"

#include <algorithm>

#include "thread_pool.h"

namespace native {

namespace {

constexpr int MAX_PARTS_PER_THREAD = 4;

/// What a panel costs to read, in rows to multiply with it.
constexpr int64_t READ_COST = 4;

int64_t panel_cost(const LinearArgs& product) { return READ_COST + product.num_rows; }

}  // namespace

Parts::Parts(const std::vector<LinearArgs>& products) : products_(products) {
  int64_t num_panels = 0;
  for (const LinearArgs& p : products) num_panels += p.weights.num_panels();
  const int num_threads = threads().num_threads();
  const int64_t most = num_threads == 1 ? 1 : MAX_PARTS_PER_THREAD;
  per_thread_ = static_cast<int>(std::clamp<int64_t>(num_panels / num_threads, 1, most));
  for (int node = 0; node < threads().num_nodes(); node++)
    add_node(threads().first_thread(node), threads().first_thread(node + 1));
  starts_.push_back(ranges_.size());
}

/// The first panel of a thread, were a product divided among all threads by itself.
int Parts::first_panel(size_t product, int thread) const {
  const int64_t num_panels = products_[product].weights.num_panels();
  return static_cast<int>(num_panels * thread / threads().num_threads());
}

void Parts::add_node(int first_thread, int next_thread) {
  int64_t total = 0, before = 0;
  for (size_t i = 0; i < products_.size(); i++)
    total += (first_panel(i, next_thread) - first_panel(i, first_thread)) * panel_cost(products_[i]);
  size_t product = 0;
  int panel = first_panel(0, first_thread);
  const auto add_part = [&](int64_t end) {
    starts_.push_back(ranges_.size());
    while (product < products_.size()) {
      const int last = first_panel(product, next_thread);
      const int64_t cost = panel_cost(products_[product]), wanted = (end - before + cost / 2) / cost;
      const int next = panel + static_cast<int>(std::clamp<int64_t>(wanted, 0, last - panel));
      if (next > panel) ranges_.push_back({product, panel, next});
      before += (next - panel) * cost;
      panel = next;
      if (panel < last) return;
      if (++product < products_.size()) panel = first_panel(product, first_thread);
    }
  };
  // In the size of a thread's smallest part; the last two are equal.
  const int64_t size = int64_t{1} << (per_thread_ - 1), sum = size * (next_thread - first_thread);
  for (int64_t start = 0; start < sum; start += size) {
    for (int64_t left = size / 2; left > 0; left /= 2) add_part(total * (start + size - left) / sum);
    add_part(total * (start + size) / sum);
  }
}

}  // namespace native

// The parts of products: each panel once, about the same for each thread.
#include "operations/parts.h"

#include <algorithm>

#include "check.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;

constexpr int COLUMNS = 16;

std::vector<LinearArgs> products_of(const std::vector<int>& num_panels, int num_rows) {
  std::vector<LinearArgs> products(num_panels.size());
  for (size_t i = 0; i < products.size(); i++) {
    products[i].weights.num_outputs = num_panels[i] * COLUMNS;
    products[i].weights.columns = COLUMNS;
    products[i].num_rows = num_rows;
  }
  return products;
}

/// How many panels each thread has of each product, after it is checked that all are covered once.
std::vector<std::vector<int>> panels_by_thread(const std::vector<LinearArgs>& products) {
  const Parts parts(products);
  std::vector<std::vector<int>> panels(threads().num_threads(), std::vector<int>(products.size()));
  std::vector<std::vector<int>> counts;
  for (const LinearArgs& product : products) counts.emplace_back(product.weights.num_panels());
  for (int thread = 0; thread < threads().num_threads(); thread++)
    for (int part = threads().first_part(parts.count(), thread);
         part < threads().first_part(parts.count(), thread + 1); part++)
      parts.for_each(part, [&](const LinearArgs& product, int panel, int next) {
        const size_t at = &product - products.data();
        panels[thread][at] += next - panel;
        for (; panel < next; panel++) counts[at][panel]++;
      });
  for (const std::vector<int>& of_product : counts)
    expect(std::all_of(of_product.begin(), of_product.end(), [](int n) { return n == 1; }),
           "each panel is computed once");
  return panels;
}

void test_one_node() {
  for (int num_threads : {1, 2, 3, 4, 7, 64})
    for (const auto& num_panels : std::vector<std::vector<int>>{{18}, {18, 6, 6}, {48, 48}, {1, 0}})
      for (int num_rows : {1, 16, 500}) {
        set_num_threads(num_threads);
        int total = 0, most = 0;
        for (const auto& of_thread : panels_by_thread(products_of(num_panels, num_rows))) {
          int sum = 0;
          for (int n : of_thread) sum += n;
          total += sum;
          most = std::max(most, sum);
        }
        expect(most <= (total + num_threads - 1) / num_threads, "threads have as many panels");
      }
}

/// Rows as of experts, of which some have more.
void test_costs() {
  set_num_threads(4);
  auto products = products_of({10, 10, 10}, 4);
  products[1].num_rows = 60;
  for (const auto& of_thread : panels_by_thread(products)) {
    const int cost = of_thread[0] * 8 + of_thread[1] * 64 + of_thread[2] * 8;
    expect(std::abs(cost - 200) <= 64, "threads have about the same to compute");
  }
}

void test_nodes_have_their_share_of_each_product() {
  set_num_threads(4, {{0, 1}, {2, 3}});
  const auto panels = panels_by_thread(products_of({40, 8, 20}, 3));
  for (int node : {0, 1}) {
    const auto &one = panels[2 * node], &other = panels[2 * node + 1];
    expect(one[0] + other[0] == 20 && one[1] + other[1] == 4 && one[2] + other[2] == 10,
           "a node has the same half of each product");
    expect(one[0] + one[1] + one[2] == 17, "threads of a node share its panels");
  }
}

}  // namespace

void test_parts() {
  test_one_node();
  test_costs();
  test_nodes_have_their_share_of_each_product();
  set_num_threads(1);
}

}  // namespace tests

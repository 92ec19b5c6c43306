// The parts of products: each row of a panel once, about the same for each thread.
#include "operations/parts.h"

#include <algorithm>

#include "check.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;

constexpr int COLUMNS = 16;
constexpr int TILE_ROWS = 4;

/// Where outputs and biases would be; neither is read nor written.
float outputs[500 * 48 * COLUMNS], biases[8];

std::vector<LinearArgs> products_of(const std::vector<int>& num_panels, int num_rows) {
  std::vector<LinearArgs> products(num_panels.size());
  for (size_t i = 0; i < products.size(); i++) {
    products[i].weights.num_outputs = num_panels[i] * COLUMNS;
    products[i].weights.columns = COLUMNS;
    products[i].num_rows = num_rows;
    products[i].y = outputs;
    products[i].bias = biases + i;
  }
  return products;
}

/// How many rows of panels each thread has of each product, after it is checked that each of a panel
/// is computed once.
std::vector<std::vector<int>> rows_by_thread(const std::vector<LinearArgs>& products,
                                             int max_tile_rows) {
  const Parts parts(products, max_tile_rows);
  std::vector<std::vector<int>> rows(threads().num_threads(), std::vector<int>(products.size()));
  std::vector<std::vector<int>> counts;
  for (const LinearArgs& p : products) counts.emplace_back(p.weights.num_panels() * p.num_rows);
  for (int thread = 0; thread < threads().num_threads(); thread++)
    for (int part = threads().first_part(parts.count(), thread);
         part < threads().first_part(parts.count(), thread + 1); part++)
      parts.for_each(part, [&](const LinearArgs& product, int panel, int next) {
        size_t at = 0;
        while (products[at].bias != product.bias) at++;
        const int first = static_cast<int>((product.y - outputs) / product.weights.num_outputs);
        rows[thread][at] += (next - panel) * product.num_rows;
        for (; panel < next; panel++)
          for (int row = first; row < first + product.num_rows; row++)
            counts[at][panel * products[at].num_rows + row]++;
      });
  for (const std::vector<int>& of_product : counts)
    expect(std::all_of(of_product.begin(), of_product.end(), [](int n) { return n == 1; }),
           "each row of a panel is computed once");
  return rows;
}

void test_one_node() {
  for (int num_threads : {1, 2, 3, 4, 7, 64})
    for (const auto& num_panels : std::vector<std::vector<int>>{{18}, {18, 6, 6}, {48, 48}, {1, 0}})
      for (int num_rows : {1, 4, 16, 500})
        for (int max_tile_rows : {TILE_ROWS, NO_TILES}) {
          set_num_threads(num_threads);
          int total = 0, most = 0;
          for (const auto& of_thread :
               rows_by_thread(products_of(num_panels, num_rows), max_tile_rows)) {
            int sum = 0;
            for (int n : of_thread) sum += n;
            total += sum;
            most = std::max(most, sum);
          }
          const int one = max_tile_rows < num_rows ? max_tile_rows : num_rows;
          const double share = static_cast<double>(total) / num_threads;
          // Panels are divided where that is more than a thirtieth.
          const double rounding = num_rows > max_tile_rows ? share / 30 + one : one;
          expect(most <= share + rounding, "threads have as many rows of panels");
        }
}

/// Rows as of experts, of which some have more.
void test_costs() {
  set_num_threads(4);
  auto products = products_of({10, 10, 10}, 4);
  products[1].num_rows = 60;
  for (const auto& of_thread : rows_by_thread(products, TILE_ROWS)) {
    const int cost = of_thread[0] * 8 / 4 + of_thread[1] * 64 / 60 + of_thread[2] * 8 / 4;
    expect(std::abs(cost - 200) <= 64, "threads have about the same to compute");
  }
}

void test_nodes_have_their_share_of_each_product() {
  set_num_threads(4, {{0, 1}, {2, 3}});
  const auto panels = rows_by_thread(products_of({40, 8, 20}, 1), TILE_ROWS);
  for (int node : {0, 1}) {
    const auto &one = panels[2 * node], &other = panels[2 * node + 1];
    expect(one[0] + other[0] == 20 && one[1] + other[1] == 4 && one[2] + other[2] == 10,
           "a node has the same half of each product");
    expect(one[0] + one[1] + one[2] == 17, "threads of a node share its panels");
  }
}

void test_tiles_of_a_node_are_its_own() {
  set_num_threads(6, {{0, 1, 2}, {3, 4, 5}});
  const auto rows = rows_by_thread(products_of({8, 8}, 60), TILE_ROWS);
  for (int first : {0, 3})
    for (int product : {0, 1}) {
      int sum = 0;
      for (int thread = first; thread < first + 3; thread++) sum += rows[thread][product];
      expect(sum == 4 * 60, "a node has its half of each product");
    }
  for (const auto& of_thread : rows)
    expect(std::abs(of_thread[0] + of_thread[1] - 160) <= TILE_ROWS, "with tiles all have as much");
}

}  // namespace

void test_parts() {
  test_one_node();
  test_costs();
  test_nodes_have_their_share_of_each_product();
  test_tiles_of_a_node_are_its_own();
  set_num_threads(1);
}

}  // namespace tests

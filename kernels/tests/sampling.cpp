// One token for each row of logits.
#include "operations/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "check.h"
#include "kernels.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;

uint32_t philox(uint32_t number, uint64_t seed) {
  uint32_t left = number, right = static_cast<uint32_t>(seed >> 32), key = static_cast<uint32_t>(seed);
  for (int round = 0; round < 10; round++, key += 0x9e3779b9) {
    const uint64_t product = uint64_t{left} * 0xd256d193;
    left = static_cast<uint32_t>(product >> 32) ^ key ^ right;
    right = static_cast<uint32_t>(product);
  }
  return left;
}

double distance(int token, uint64_t seed) {
  const double uniform = ((philox(token, seed) >> 1) + 0.5) / 0x1p31;
  return -std::log1p(-std::min(uniform, 1 - 0x1p-25));
}

double weight(const std::vector<float>& logits, int token, float highest, float temperature) {
  return std::exp((double{logits[token]} - highest) / temperature);
}

/// The tokens that a row's parameters leave, by a sort of all of them.
std::vector<int> kept(const std::vector<float>& logits, const RowSampling& row, float highest) {
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  if (row.top_k > 0 && row.top_k < static_cast<int>(order.size())) order.resize(row.top_k);
  const auto weight_of = [&](int token) { return weight(logits, token, highest, row.temperature); };
  if (row.top_p < 1) {
    double total = 0, before = 0;
    for (int token : order) total += weight_of(token);
    size_t count = 0;
    do before += weight_of(order[count++]);
    while (count < order.size() && before < double{row.top_p} * total);
    order.resize(count);
  }
  std::erase_if(order, [&](int token) { return weight_of(token) < row.min_p; });
  return order;
}

RowSampling random_row(Random& random) {
  const float temperatures[] = {0, 0.3f, 1, 2.5f}, top_ps[] = {1, 1, 0.95f, 0.5f, 0.01f};
  return {.temperature = temperatures[random.between(0, 3)],
          .top_k = random.one_of({0, 0, 1, 7, 40, 5000}),
          .top_p = top_ps[random.between(0, 4)],
          .min_p = random.chance() ? 0 : 0.05f,
          .top_n_sigma = 0,
          .seed = uint64_t(random.between(0, 1 << 30)) << 34 | random.between(0, 1 << 30)};
}

std::vector<uint32_t> random_tokens(Random& random, int size) {
  std::vector<uint32_t> tokens;
  for (int i = 0; i < 4; i++) tokens.push_back(random.between(0, size - 1));
  return tokens;
}

ExpectedEdit random_expected(Random& random, const LogitEdits& edits) {
  ExpectedEdit expected{random.between(0, 3), 1.5f, -0.75f, {}, {}};
  for (size_t i = 0; i < edits.tokens.size(); i++) {
    expected.factors.push_back(edits.factors[i] * 1.1f);
    expected.terms.push_back(edits.terms[i] - 0.3f);
  }
  return expected;
}

/// Factor and term of the token that is expected.
std::pair<float, float> expected_edit(const LogitEdits& edits, int32_t token) {
  const auto& [index, factor, term, factors, terms] = edits.expected;
  for (size_t i = 0; i < edits.tokens.size(); i++)
    if (edits.tokens[i] == token) return {factors[i], terms[i]};
  return {factor, term};
}

void test_rows(Random& random) {
  const int num_rows = random.between(1, 6), size = random.one_of({1, 3, 17, 64, 1000, 3001});
  std::vector<std::vector<float>> logits;
  std::vector<float> all;
  std::vector<RowSampling> rows;
  for (int m = 0; m < num_rows; m++) {
    logits.push_back(random.normal(size));
    const bool has_ties = random.chance(), has_masked = random.chance();
    for (int i = 0; i < size; i++) {
      float& x = logits.back()[i];
      x = has_ties ? std::round(3 * x) : 3 * x;
      if (has_masked && i > 0 && random.chance()) x = random.chance() ? -INFINITY : NEVER;
    }
    all.insert(all.end(), logits.back().begin(), logits.back().end());
    rows.push_back(random_row(random));
  }
  std::vector<LogitEdits> edits(num_rows);
  for (int m = 0; m < num_rows; m++) {
    if (random.chance()) continue;
    for (int token = random.between(0, size - 1); token < size; token += random.between(1, 9)) {
      const float factor = random.chance() ? 1.3f : 1, term = random.chance() ? -0.5f : 0;
      edits[m].tokens.push_back(token);
      edits[m].factors.push_back(factor);
      edits[m].terms.push_back(term);
      float& x = logits[m][token];
      x = x * (x > 0 ? 1 / factor : factor) + term;
    }
  }
  const std::vector<uint32_t> before = random_tokens(random, size);
  for (int m = 0; m < num_rows; m++)
    if (random.chance()) {
      edits[m].expected = random_expected(random, edits[m]);
      const auto token = before[edits[m].expected.index];
      const auto [factor, term] = expected_edit(edits[m], static_cast<int32_t>(token));
      const float x = all[size_t(m) * size + token];
      logits[m][token] = x * (x > 0 ? 1 / factor : factor) + term;
    }
  std::vector<uint32_t> tokens(num_rows);
  sample(all.data(), rows.data(), edits.data(), num_rows, size, before.data(), tokens.data());
  for (int m = 0; m < num_rows; m++) {
    const RowSampling& row = rows[m];
    const auto highest = std::max_element(logits[m].begin(), logits[m].end());
    if (row.temperature == 0) {
      expect(tokens[m] == highest - logits[m].begin(), "the most probable token");
      continue;
    }
    const auto speed = [&](int token) {
      return weight(logits[m], token, *highest, row.temperature) / distance(token, row.seed);
    };
    const auto left = kept(logits[m], row, *highest);
    double fastest = 0;
    for (int token : left) fastest = std::max(fastest, speed(token));
    const int winner = static_cast<int>(tokens[m]);
    expect(std::find(left.begin(), left.end(), winner) != left.end(), "a token that is left");
    expect(speed(winner) >= fastest * (1 - 1e-4), "the one that comes first");
  }
}

}  // namespace

void test_sampling() {
  for (const int num_threads : {1, 3}) {
    set_num_threads(num_threads);
    Random random(23);
    for (int i = 0; i < 150; i++) test_rows(random);
  }
  set_num_threads(1);
}

}  // namespace tests

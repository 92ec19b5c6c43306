#include "operations/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace native {

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
// Below it, dividing by the temperature overflows and the most probable token has all the mass.
constexpr float MIN_TEMPERATURE = 1e-5f;
// So few tokens are sorted.
constexpr int FEW = 32;

struct Candidate {
  float logit;
  int32_t token;
  float weight;

  /// In the order of probability; of equal ones the first token comes first.
  bool operator<(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && token < other.token);
  }
};

using Candidates = std::vector<Candidate>;

double total_weight(const Candidates& candidates) {
  double total = 0;
  for (const auto& candidate : candidates) total += candidate.weight;
  return total;
}

/// Keep a token while those before it have not reached `target`; the first one always stays.
void keep_mass(Candidates& candidates, double target) {
  // What is before `first` stays, what is not before `last` goes.
  auto first = candidates.begin(), last = candidates.end();
  double before = 0;
  while (last - first > FEW) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last);
    double mass = before;
    for (auto it = first; it != middle; ++it) mass += it->weight;
    if (mass >= target)
      last = middle;
    else
      first = middle, before = mass;
  }
  std::sort(first, last);
  for (; first != last && (before < target || first == candidates.begin()); ++first)
    before += first->weight;
  candidates.erase(first, candidates.end());
}

/// A row whose tokens have probabilities.
class Row {
 public:
  Row(const float* logits, const RowSampling& sampling, int size, float highest)
      : logits_(logits), sampling_(sampling), size_(size), highest_(highest) {}

  uint32_t sample() const {
    const auto& [temperature, k, p, min_p, num_deviations, seed] = sampling_;
    const bool has_top_k = k > 0 && k < size_, has_top_p = p < 1;
    if (!has_top_k && !has_top_p && min_p <= 0 && num_deviations <= 0)
      return kernels()->race(logits_, nullptr, size_, highest_, factor(), seed);
    const float sigma = num_deviations > 0 ? sigma_floor() : -INF;
    const float least = min_p > 0 ? std::max(sigma, min_p_floor()) : sigma;
    Candidates candidates = has_top_k ? top_k(sigma) : above(has_top_p ? top_p_floor(sigma) : least);
    if (has_top_p) keep_mass(candidates, p * (has_top_k ? total_weight(candidates) : total(sigma)));
    std::erase_if(candidates, [least](const Candidate& c) { return c.logit < least; });
    return winner(candidates);
  }

 private:
  float factor() const { return 1 / sampling_.temperature; }

  uint32_t winner(const Candidates& candidates) const {
    std::vector<float> logits;
    std::vector<int32_t> tokens;
    for (const auto& each : candidates) logits.push_back(each.logit), tokens.push_back(each.token);
    const int size = static_cast<int>(tokens.size());
    return tokens[kernels()->race(logits.data(), tokens.data(), size, highest_, factor(),
                                  sampling_.seed)];
  }

  float min_p_floor() const {
    return highest_ + static_cast<float>(std::log(double{sampling_.min_p}) * sampling_.temperature);
  }

  /// So many standard deviations below the highest logit; tokens that must not follow do not count.
  float sigma_floor() const {
    const float lowest = highest_ + NEVER / 2;
    double total = 0, squares = 0;
    int count = 0;
    for (int i = 0; i < size_; i++)
      if (logits_[i] > lowest) total += logits_[i], count++;
    const double mean = total / count;
    for (int i = 0; i < size_; i++)
      if (logits_[i] > lowest) squares += (logits_[i] - mean) * (logits_[i] - mean);
    return static_cast<float>(highest_ - sampling_.top_n_sigma * std::sqrt(squares / count));
  }

  /// No token with a lower logit is within top-p of those that have at least `least`: all that have
  /// less than the mean of what top-p leaves out have no more than that together.
  float top_p_floor(float least) const {
    const double left_out = (1 - double{sampling_.top_p}) * total(least) / size_;
    // A little lower, for what is rounded.
    const double floor = highest_ + (std::log(left_out) - 1e-3) * sampling_.temperature;
    return std::max(least, static_cast<float>(floor));
  }

  double total(float least) const {
    if (least > -INF) return total_weight(above(least));
    return kernels()->total_weight(logits_, size_, highest_, factor());
  }

  /// The tokens with a logit of at least `least`, in their order.
  Candidates above(float least) const {
    Candidates candidates;
    for_above(least, [&](const Candidate& candidate, float&) { candidates.push_back(candidate); });
    return candidates;
  }

  /// The most probable of them.
  Candidates top_k(float least) const {
    const size_t num = sampling_.top_k;
    Candidates candidates;
    const auto cut = [&](float& floor) {
      std::nth_element(candidates.begin(), candidates.begin() + (num - 1), candidates.end());
      candidates.resize(num);
      // A later token with this logit comes after those.
      floor = candidates.back().logit;
    };
    for_above(least, [&](const Candidate& candidate, float& floor) {
      candidates.push_back(candidate);
      if (candidates.size() >= 4 * num + FEW) cut(floor);
    });
    if (float floor; candidates.size() > num) cut(floor);
    return candidates;
  }

  /// Call `add` with each token whose logit is at least `least`, and above the floor that it may raise.
  template <typename Add>
  void for_above(float least, const Add& add) const {
    float floor = least > -INF ? std::nextafter(least, -INF) : least;
    for (int i = 0; (i = kernels()->find_above(logits_, i, size_, floor)) < size_; i++)
      add(Candidate{logits_[i], i, std::exp((logits_[i] - highest_) * factor())}, floor);
  }

  const float* logits_;
  const RowSampling& sampling_;
  const int size_;
  const float highest_;
};

uint32_t sample_row(const float* logits, const RowSampling& sampling, int size) {
  const float highest = kernels()->largest(logits, size);
  if (std::isfinite(highest) && sampling.temperature >= MIN_TEMPERATURE)
    return Row(logits, sampling, size, highest).sample();
  const auto is_highest = [highest](float x) {
    return std::isnan(highest) ? std::isnan(x) : x == highest;
  };
  return static_cast<uint32_t>(std::find_if(logits, logits + size, is_highest) - logits);
}

float edited(float x, float factor, float term) { return x * (x > 0 ? 1 / factor : factor) + term; }

std::vector<float> edited(const float* logits, const LogitEdits& edits, int size,
                          const uint32_t* before) {
  const auto& [tokens, factors, terms, expected] = edits;
  std::vector<float> row(logits, logits + size);
  for (size_t i = 0; i < tokens.size(); i++) row[tokens[i]] = edited(row[tokens[i]], factors[i], terms[i]);
  if (expected.index < 0) return row;
  const auto token = static_cast<int32_t>(before[expected.index]);
  const size_t i = std::find(tokens.begin(), tokens.end(), token) - tokens.begin();
  const bool is_new = i == tokens.size();
  row[token] = edited(logits[token], is_new ? expected.factor : expected.factors[i],
                      is_new ? expected.term : expected.terms[i]);
  return row;
}

}  // namespace

void sample(const float* logits, const RowSampling* rows, const LogitEdits* edits, int num_rows,
            int size, const uint32_t* before, uint32_t* tokens) {
  threads().for_each(num_rows, [&](int row) {
    const float* plain = logits + static_cast<size_t>(row) * size;
    if (edits[row].empty())
      tokens[row] = sample_row(plain, rows[row], size);
    else
      tokens[row] = sample_row(edited(plain, edits[row], size, before).data(), rows[row], size);
  });
}

}  // namespace native

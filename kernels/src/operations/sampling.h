// One token for each row of logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace native {

/// How a row's token is sampled; see `SamplingParams`.
struct RowSampling {
  float temperature;  // 0 takes the most probable token
  int32_t top_k;      // 0 is off
  float top_p;
  float min_p;
  float top_n_sigma;  // 0 is off
  uint64_t seed;
};

/// How edits change with the token before the row's, which is known when they are made.
struct ExpectedEdit {
  int32_t index = -1;  // of that token among those of the step before; -1 is none
  float factor, term;  // if it is none of the tokens that are edited already
  std::vector<float> factors, terms;  // for each of those, if it is that one
};

/// Changes of a row's logits: x becomes x / factor + term if it is above 0, else x * factor + term.
struct LogitEdits {
  std::vector<int32_t> tokens;  // within the row
  std::vector<float> factors;
  std::vector<float> terms;
  ExpectedEdit expected;

  bool empty() const { return tokens.empty() && expected.index < 0; }
};

/// A logit this much below the highest is of a token that must not follow; a tenth of it is no logit's.
constexpr float NEVER = -1e9f;

/// Sample from logits `[num_rows, size]`: each row by itself, with random numbers of its seed alone.
/// Edits that expect a token find it in `before`.
///
/// A row in which NaN or inf is the largest number gives its index.
void sample(const float* logits, const RowSampling* rows, const LogitEdits* edits, int num_rows,
            int size, const uint32_t* before, uint32_t* tokens);

}  // namespace native

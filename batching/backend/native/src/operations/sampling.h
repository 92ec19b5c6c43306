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

/// Changes of a row's logits: x becomes x / factor + term if it is above 0, else x * factor + term.
struct LogitEdits {
  std::vector<int32_t> tokens;  // within the row
  std::vector<float> factors;
  std::vector<float> terms;
};

/// A logit this much below the highest is of a token that must not follow; a tenth of it is no logit's.
constexpr float NEVER = -1e9f;

/// Sample from logits `[num_rows, size]`: each row by itself, with random numbers of its seed alone.
///
/// A row in which NaN or inf is the largest number gives its index.
void sample(const float* logits, const RowSampling* rows, const LogitEdits* edits, int num_rows,
            int size, uint32_t* tokens);

}  // namespace native

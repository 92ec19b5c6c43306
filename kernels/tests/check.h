// Helpers of the tests: random numbers, comparisons, and the number of failures.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace tests {

/// The same numbers in every run.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  /// A whole number in [first, last].
  int between(int first, int last);
  bool chance() { return between(0, 1) == 1; }
  int one_of(const std::vector<int>& choices);
  std::vector<float> normal(size_t size);

 private:
  std::mt19937 engine_;
};

/// A value in double precision, and the tolerance for float32.
struct Expected {
  double value;
  double tolerance;
};

void expect(bool is_right, const std::string& what);
void expect_close(std::span<const float> actual, std::span<const Expected> expected,
                  const std::string& what);
/// Bit for bit.
void expect_same(std::span<const float> actual, std::span<const float> expected,
                 const std::string& what);

int num_failures();

/// To the 8 bits that bfloat16 has of a float's 24.
uint16_t to_bf16(float x);
float from_bf16(uint16_t x);

void test_linear();
void test_pointwise();
void test_attention();
void test_block();
void test_mixer();
void test_mixture();
void test_latent();
void test_recurrent();
void test_sampling();
void test_threads();
void test_parts();
void test_low_rank();

}  // namespace tests

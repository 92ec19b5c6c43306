#include "check.h"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace tests {

namespace {

// The first failures are enough.
constexpr int MAX_PRINTED = 20;

std::atomic<int> num_failed = 0;

}  // namespace

// Not by the distributions of the standard library, which differ between libraries.
int Random::between(int first, int last) {
  return first + static_cast<int>(engine_() % static_cast<uint32_t>(last - first + 1));
}

int Random::one_of(const std::vector<int>& choices) {
  return choices[between(0, static_cast<int>(choices.size()) - 1)];
}

std::vector<float> Random::normal(size_t size) {
  std::vector<float> numbers(size);
  for (float& x : numbers) {
    // Twelve uniform numbers have a variance of one.
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += engine_() / 4294967296.0;
    x = static_cast<float>(sum);
  }
  return numbers;
}

void expect(bool is_right, const std::string& what) {
  if (is_right) return;
  if (++num_failed <= MAX_PRINTED) std::fprintf(stderr, "FAILED %s\n", what.c_str());
}

void expect_close(std::span<const float> actual, std::span<const Expected> expected,
                  const std::string& what) {
  if (actual.size() != expected.size()) return expect(false, what + ": another size");
  for (size_t i = 0; i < actual.size(); i++) {
    const auto [value, tolerance] = expected[i];
    if (std::abs(actual[i] - value) <= tolerance) continue;  // a NaN is not
    return expect(false, what + ": [" + std::to_string(i) + "] is " + std::to_string(actual[i]) +
                             " and not " + std::to_string(value) + " +- " +
                             std::to_string(tolerance));
  }
}

void expect_same(std::span<const float> actual, std::span<const float> expected,
                 const std::string& what) {
  expect(actual.size() == expected.size() &&
             std::memcmp(actual.data(), expected.data(), actual.size_bytes()) == 0,
         what);
}

int num_failures() { return num_failed; }

uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t half = 0x8000, odd = bits >> 16 & 1;
  return static_cast<uint16_t>((bits + half - 1 + odd) >> 16);
}

float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

}  // namespace tests

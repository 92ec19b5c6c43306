// Prints how many floating-point operations and how many bytes read from memory a number of threads
// reach per second: the roofline of this machine.  Compiled and run by roofline.py.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "kernels/attention/rounded.h"
#include "memory.h"
#include "thread_pool.h"

namespace {

constexpr int NUM_SUMS = 16;
constexpr int64_t NUM_ROUNDS = 1 << 22;
// Far more than the caches hold.
constexpr size_t NUM_FLOATS = size_t{1} << 26;

/// Multiplies and adds in registers.
float multiply_add(float factor) {
  F32 sums[NUM_SUMS];
  const F32 value = splat(factor);
  // All different, or the compiler would compute only one of them.
  for (int i = 0; i < NUM_SUMS; i++) sums[i] = splat(factor + i);
  for (int64_t i = 0; i < NUM_ROUNDS; i++)
    for (F32& each : sums) each = each * value + value;
  F32 total{};
  for (const F32& each : sums) total += each;
  return sum(total);
}

/// The same of pairs of 16 bits, which are multiplied with stored numbers of a type.
template <typename Stored>
float multiply_add_pairs(uint32_t pair) {
  using D = Dots<Stored>;
  const I32 pairs = (I32)splat(1.0f);
  typename D::Sums sums[NUM_SUMS] = {};
  for (int k = 0; k < NUM_SUMS; k++) sums[k] = D::add(sums[k], pairs + (k << 16), &pair);
  for (int64_t i = 0; i < NUM_ROUNDS; i++)
    for (auto& each : sums) {
      // Without VNNI a product is an instruction of its own, which the compiler would do once for all.
      I32 own = pairs;
      asm volatile("" : "+x"(own));
      each = D::add(each, own, &pair);
    }
  float total = 0;
  for (auto& each : sums) total += sum(D::scaled(each, 1));
  return total;
}

/// Reads memory and does as little with it as possible.
float read(const float* x, size_t size) {
  F32 sums[8] = {};
  for (size_t i = 0; i + 8 * LANES <= size; i += 8 * LANES)
    for (int v = 0; v < 8; v++) sums[v] += load(x + i + v * LANES);
  F32 total{};
  for (const F32& each : sums) total += each;
  return sum(total);
}

/// Seconds that the fastest of several runs of all parts takes.
template <typename Run>
double fastest(native::ThreadPool& threads, int num_parts, const Run& run) {
  std::atomic<float> sink = 0;
  double best = 1e9;
  for (int i = 0; i < 5; i++) {
    const auto start = std::chrono::steady_clock::now();
    threads.for_each(num_parts, [&](int part) { sink = run(part); });
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  return best;
}

double measure_arithmetic(native::ThreadPool& threads) {
  const int num_parts = threads.num_threads();
  const double seconds = fastest(threads, num_parts, [](int) { return multiply_add(0.5f); });
  return 2.0 * NUM_SUMS * LANES * NUM_ROUNDS * num_parts / seconds;
}

/// 0 if there is no instruction for it.
template <typename Stored>
double measure_pairs(native::ThreadPool& threads) {
  if constexpr (Dots<Stored>::EXIST) {
    const int num_parts = threads.num_threads();
    const double seconds = fastest(
        threads, num_parts, [](int part) { return multiply_add_pairs<Stored>(part + 1); });
    return 4.0 * NUM_SUMS * LANES * NUM_ROUNDS * num_parts / seconds;
  }
  return 0;
}

double measure_bandwidth(native::ThreadPool& threads) {
  const native::Memory memory(NUM_FLOATS * sizeof(float));
  auto* floats = static_cast<float*>(memory.data());
  std::fill(floats, floats + NUM_FLOATS, 1.0f);
  const int num_parts = 16 * threads.num_threads();
  const size_t size = NUM_FLOATS / num_parts;
  const double seconds =
      fastest(threads, num_parts, [&](int part) { return read(floats + part * size, size); });
  return num_parts * size * sizeof(float) / seconds;
}

}  // namespace

/// The argument is the number of threads.
int main(int, char** arguments) {
  native::ThreadPool threads(std::atoi(arguments[1]));
  std::printf("%g %g %g %g\n", measure_arithmetic(threads), measure_bandwidth(threads),
              measure_pairs<uint16_t>(threads), measure_pairs<int8_t>(threads));
}

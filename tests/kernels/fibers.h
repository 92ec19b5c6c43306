// Threads of a GPU as fibers: what a kernel calls, and how a test runs one.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

typedef _Float16 half;

struct bfloat16 {
  std::uint16_t bits;

  bfloat16() = default;
  explicit bfloat16(float value) {
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    // To the nearest, to even in the middle; a NaN stays one.
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  explicit operator float() const {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

struct int3 {
  int x, y, z;
};

// What a kernel calls.  A line tells one call from another: all threads of a group, or of 32 neighbours, must
// wait at the same one.
namespace dialect {
int thread_index();
int3 group_index();
int3 num_groups();
void* shared_memory(std::size_t bytes, int line);
void barrier(int line);
// Replaces each of n values by its sum (or maximum) over `lanes` neighbouring threads.
void reduce(float* values, int n, int lanes, bool maximum, int line);
// Returns the value of the thread whose number differs in the bits of `mask`, below 32.
float shuffle_xor(float value, int mask, int line);
}  // namespace dialect

struct Kernel {
  // What one thread does.
  void (*body)(void* const* buffers, const int* const* shapes);
  // Of inputs and then of outputs.
  void* const* buffers;
  const int* const* shapes;
};

// order: of threads and groups: 0 forward, 1 backward, else shuffled by this number.
// Returns 0, or 1 with an error.
extern "C" int run_kernel(const Kernel* kernel, const int* grid, int threads, int order, char* error,
                          std::size_t error_size);

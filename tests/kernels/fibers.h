// How a test runs a kernel.
#pragma once
#include <cstddef>

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

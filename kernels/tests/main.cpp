// Runs all tests with the kernels that NATIVE_ISA names; 77 if this processor lacks them, or if they were not built.
#include <cstdio>
#include <exception>

#include "check.h"
#include "kernels.h"

int main() {
  using namespace tests;
  const native::Kernels* kernels = native::kernels();
  if (!kernels) {
    std::puts("there are no kernels of this name, or not for this processor");
    return 77;
  }
  std::printf("kernels for %s\n", kernels->name);
  try {
    test_threads();
    test_parts();
    test_linear();
    test_low_rank();
    test_pointwise();
    test_attention();
    test_block();
    test_mixer();
    test_mixture();
    test_latent();
    test_recurrent();
    test_sampling();
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
  std::printf("%d failed\n", num_failures());
  return num_failures() > 0;
}
